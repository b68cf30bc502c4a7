//! Marked dimensions: variables from the first shape on; what pins them; what a mark that is not there costs.

use burn::tensor::{Int, Tensor, TensorData};
use burn_optim::SgdConfig;
use kiln::{
    CompileBackend, CompileOptions, Dynamic, DynamicError, Kiln, KilnDevice, RegionReport, TrainStep,
};

use crate::harness::*;
use crate::models::*;

fn options(dynamic: Dynamic) -> CompileOptions {
    CompileOptions::default().with_dynamic(dynamic)
}

/// `[rows, columns]` of numbers that differ.
fn matrix(rows: usize, columns: usize) -> Tensor<Kiln, 2> {
    let values: Vec<f32> = (0..rows * columns)
        .map(|at| ((at * 29) % 31) as f32 / 7.0 - 2.0)
        .collect();
    Tensor::from_data(TensorData::new(values, [rows, columns]), &KilnDevice::cpu())
}

fn numbers<const D: usize>(tensor: Tensor<Kiln, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{a} instead of {b}");
    }
}

/// How often something was compiled.
fn compiled(report: &RegionReport) -> usize {
    report.compiles.iter().filter(|event| !event.absorbed).count()
}

/// All notes on sizes.
fn notes(report: &RegionReport) -> String {
    let all = report.compiles.iter().flat_map(|event| &event.notes);
    all.map(String::as_str).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_marked_training_step_is_compiled_once() {
    let _turn = turn();
    const SIZES: [usize; 14] = [4, 2, 7, 5, 3, 11, 6, 13, 9, 8, 16, 10, 4, 7];
    let device = KilnDevice::cpu();
    let start = initialised(Mlp::<Compiled>::new(&device));
    let run = |options: CompileOptions, marks: usize| {
        let model = copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device), &device);
        let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
        let step = TrainStep::new(model, SgdConfig::new().init(), loss).with_options(options);
        let mut step = step.build().unwrap();
        let mut outcome = Outcome::default();
        for (index, &size) in SIZES.iter().enumerate() {
            let batch = batch(index, size, &device);
            if index < marks {
                // A clone is the same tensor, and its labels always have its size.
                kiln::dynamic(&batch.values.clone(), 0, 2..=16).unwrap();
            }
            outcome.losses.push(value(step.step(rate(index), batch).unwrap()));
        }
        let (report, text) = (step.report(), step.explain().to_string());
        outcome.parameters = parameters::<Compiled, _>(&step.into_model());
        (outcome, report, text)
    };
    let (expected, ..) = run(
        CompileOptions::default().with_backend(CompileBackend::AotEager),
        0,
    );
    for (dynamic, marks) in [(Dynamic::Marked, SIZES.len()), (Dynamic::Auto, 1)] {
        let (outcome, report, text) = run(options(dynamic), marks);
        outcome.assert_close(&expected, "marked sizes");
        // Two where the disk has the first size alone: the next one brings all that are expected.
        assert!(compiled(&report) <= 2, "{dynamic:?}: {:?}", report.compiles);
        assert_eq!(report.compiles.len(), 12, "each size is planned once");
        assert!(
            text.contains("(marked, 2 to 16) is a variable, and with it dimension 0 of input"),
            "{text}"
        );
        assert!(text.contains(" more sizes of these steps were planned"), "{text}");
    }
    let (outcome, report, _) = run(options(Dynamic::Off), SIZES.len());
    outcome.assert_close(&expected, "marks without variables");
    assert_eq!(compiled(&report), 12);
}

#[test]
fn a_dimension_without_mark_is_compiled_by_itself() {
    let _turn = turn();
    let mut step = kiln::compile(options(Dynamic::Marked));
    let mut run = |rows: usize, columns: usize| {
        let x = matrix(rows, columns);
        kiln::dynamic(&x, 0, 2..=24).unwrap();
        let expected = numbers((x.clone().exp() * 0.5).sum_dim(1));
        assert_close(
            &numbers(step.run(|| (x.exp() * 0.5).sum_dim(1)).unwrap()),
            &expected,
        );
        (
            compiled(&step.report()),
            notes(&step.report()),
            step.explain().to_string(),
        )
    };
    assert_eq!(run(6, 5).0, 1);
    assert_eq!(run(9, 5).0, 1);
    let (count, notes, text) = run(6, 7);
    assert_eq!(count, 2);
    let said = "dimension 1 of input 0 (5 became 7) varies and is not marked";
    assert!(notes.contains(said) && text.contains(said), "{text}");
    // The marked dimension is a variable there as well.
    assert_eq!(run(11, 7).0, 2);
    // A third number of columns is a third step.
    assert_eq!(run(11, 8).0, 3);
}

#[test]
fn what_pins_a_size_is_named() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    // A table that has no more rows.
    let mut step = kiln::compile(options(Dynamic::Marked));
    let table = matrix(20, 6);
    let x = matrix(8, 6);
    kiln::dynamic(&x, 0, 2..=40).unwrap();
    step.run(|| (x + table.slice(0..8)).sum_dim(1)).unwrap();
    let said = notes(&step.report());
    assert!(
        said.contains("(marked, 2 to 40) is a variable, but not at size"),
        "{said}"
    );
    assert!(
        said.contains("Slice") && said.contains("shapes_marked.rs"),
        "{said}"
    );

    // A weight.
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let step = TrainStep::new(Mlp::<Compiled>::new(&device), SgdConfig::new().init(), loss);
    let mut step = step.with_options(options(Dynamic::Auto)).build().unwrap();
    let batch = batch::<Compiled>(0, 4, &device);
    kiln::dynamic(&batch.values, 1, 2..=64).unwrap();
    step.step(0.1, batch).unwrap();
    let said = notes(&step.report());
    assert!(said.contains("which is a weight or state and keeps 48"), "{said}");

    // A branch: nobody can know before the other way was taken.
    let mut step = kiln::compile(options(Dynamic::Marked));
    let mut run = |rows: usize| {
        let x = matrix(rows, 3);
        kiln::dynamic(&x, 0, 2..=32).unwrap();
        let program = |x: Tensor<Kiln, 2>| match x.dims()[0] > 10 {
            true => x.tanh().sum(),
            false => x.abs().sum(),
        };
        let expected = numbers(program(x.clone()));
        assert_close(&numbers(step.run(|| program(x)).unwrap()), &expected);
        (compiled(&step.report()), notes(&step.report()))
    };
    run(5);
    assert_eq!(run(8).0, 1);
    let (count, said) = run(12);
    assert_eq!(count, 2);
    assert!(
        said.contains("became 12), which is marked: what it records depends on the size (operation 0 was"),
        "{said}"
    );
    assert_eq!(run(20).0, 2, "the other way is general as well");
}

#[test]
fn marks_are_independent_or_one() {
    let _turn = turn();
    let mut step = kiln::compile(options(Dynamic::Marked));
    for (index, (rows, inner, columns)) in [(4, 6, 5), (7, 9, 3), (12, 4, 10), (5, 5, 5), (9, 12, 11)]
        .into_iter()
        .enumerate()
    {
        let (a, b) = (matrix(rows, inner), matrix(inner, columns));
        kiln::dynamic(&a, 0, 2..=16).unwrap();
        kiln::dynamic(&a, 1, 2..=12).unwrap();
        kiln::dynamic(&b, 0, 3..=16).unwrap();
        kiln::dynamic(&b, 1, 2..=16).unwrap();
        let program = |a: Tensor<Kiln, 2>, b: Tensor<Kiln, 2>| a.matmul(b).tanh().mean_dim(0);
        let expected = numbers(program(a.clone(), b.clone()));
        assert_close(&numbers(step.run(|| program(a, b)).unwrap()), &expected);
        let said = notes(&step.report());
        assert!(
            said.contains(
                "dimension 0 of input 1 (marked, 3 to 16) always has the size of dimension 1 of input 0"
            ),
            "{said}"
        );
        assert_eq!(step.report().compiles.len(), index + 1);
        assert!(step.report().compiles[index].shares, "{said}");
    }
}

#[test]
fn marks_that_cannot_be_are_refused() {
    let _turn = turn();
    let x = matrix(4, 6);
    let tokens = Tensor::<Kiln, 2, Int>::ones([4, 3], &KilnDevice::cpu());
    assert_eq!(
        kiln::dynamic(&x, 2, 2..8),
        Err(DynamicError::NoDimension { dim: 2, rank: 2 })
    );
    assert_eq!(kiln::dynamic(&tokens, 0, 5..5), Err(DynamicError::EmptyRange));
    assert_eq!(kiln::dynamic(&x, 0, ..2), Err(DynamicError::EmptyRange));
    assert_eq!(kiln::dynamic(&x, 0, ..0), Err(DynamicError::EmptyRange));
    assert_eq!(kiln::dynamic(&(), 0, ..), Err(DynamicError::NoTensor { dim: 0 }));
    let outside = DynamicError::OutOfRange {
        dim: 1,
        size: 6,
        least: 8,
        most: 16,
    };
    assert_eq!(kiln::dynamic(&x, 1, 8..=16), Err(outside));
    let mut step = kiln::compile(CompileOptions::default().with_backend(CompileBackend::AotEager));
    let inside = step.run(|| kiln::dynamic(&(x.clone() + 1.0), 0, ..)).unwrap();
    assert_eq!(inside, Err(DynamicError::Pending));
    assert_eq!(kiln::dynamic(&(x, tokens), 1, ..), Ok(()));
}

#[test]
fn the_limit_says_which_dimension_varied() {
    let _turn = turn();
    let mut step = kiln::compile(options(Dynamic::Off).with_recompile_limit(2));
    for columns in [3, 5, 4, 6] {
        step.run(|| matrix(2, columns).tanh().sum()).unwrap();
    }
    let mut other = kiln::compile(options(Dynamic::Off).with_recompile_limit(2));
    for columns in [3, 5, 4, 6] {
        let x = matrix(2, columns);
        other.run(|| x.tanh().sum()).unwrap();
    }
    let text = other.explain().to_string();
    let report = other.report();
    assert!(
        report.advice.contains("dimension 1 (4 sizes: "),
        "{}",
        report.advice
    );
    for part in [
        "of input 0, first used by",
        "with_dynamic(Dynamic::Auto)",
        "pad it",
        "raise recompile_limit",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }

    // Branches are named in place of sizes.
    let mut step = kiln::compile(options(Dynamic::Auto).with_recompile_limit(2));
    for turn in 0..4 {
        let x = matrix(2, 3);
        let way = |x: Tensor<Kiln, 2>| (0..turn).fold(x, |x, _| x.tanh());
        step.run(|| way(x).sum()).unwrap();
    }
    let advice = step.report().advice;
    assert!(
        advice.contains("control flow took another way") && !advice.contains("dimension"),
        "{advice}"
    );
}
