//! What happens at the edges of a compiled region: breaks, panics, threads, lifetimes, odd shapes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_tensor::{Int, Tensor};
use kiln::{BreakReason, CompileBackend, CompileOptions, Compiled, Error, Kiln, KilnDevice, Mismatch};

type Vector = Tensor<Kiln, 1>;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn region() -> Compiled {
    kiln::compile(
        CompileOptions::default()
            .with_backend(CompileBackend::AotEager)
            .with_name("test"),
    )
}

fn vector(values: &[f32]) -> Vector {
    Tensor::from_floats(values, &device())
}

fn values<const D: usize>(tensor: Tensor<Kiln, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

#[test]
fn a_region_computes_what_its_closure_says() {
    let mut region = region();
    let x = vector(&[1.0, 2.0, 3.0]);
    for factor in [2.0, 3.0, 4.0] {
        let y = region.run(|| x.clone() * factor + 1.0).unwrap();
        assert_eq!(values(y), [factor + 1.0, 2.0 * factor + 1.0, 3.0 * factor + 1.0]);
    }
    let report = region.report();
    assert_eq!(
        (report.calls, report.steps.len(), report.recompiles.len()),
        (3, 1, 0)
    );
    assert_eq!(report.steps[0].runs, 3);
}

#[test]
fn nothing_runs_before_the_region_ends() {
    let mut region = region();
    let before = kiln_burn::table::len();
    let y = region
        .run(|| {
            let y = vector(&[1.0]) + 1.0;
            let inside = kiln_burn::table::len();
            // The input is there, the result is not.
            assert!(inside <= before + 1, "{inside} tensors, {before} before");
            y
        })
        .unwrap();
    assert_eq!(values(y), [2.0]);
}

#[test]
fn a_region_that_records_nothing() {
    let mut region = region();
    assert_eq!(region.run(|| 7).unwrap(), 7);
    assert!(region.report().steps.is_empty());
}

#[test]
fn a_region_whose_results_die_runs_nothing() {
    let mut region = region();
    region.run(|| drop(vector(&[1.0]) + 1.0)).unwrap();
    assert!(region.report().steps.is_empty());
}

#[test]
fn a_region_whose_result_is_its_input() {
    let mut region = region();
    let x = vector(&[1.0, 2.0]);
    let y = region.run(|| x.clone()).unwrap();
    assert_eq!(values(y), [1.0, 2.0]);
    let y = region.run(|| x).unwrap();
    assert_eq!(values(y), [1.0, 2.0]);
}

#[test]
fn an_input_beside_a_result() {
    let mut region = region();
    let x = vector(&[1.0, 2.0]);
    let (same, other) = region.run(|| (x.clone(), x.clone() * 2.0)).unwrap();
    assert_eq!((values(same), values(other)), (vec![1.0, 2.0], vec![2.0, 4.0]));
    assert_eq!(values(x), [1.0, 2.0]);
}

#[test]
fn zero_sized_and_single_elements() {
    let mut region = region();
    let empty = Tensor::<Kiln, 2>::zeros([0, 3], &device());
    let (sum, joined) = region
        .run(|| {
            (
                empty.clone().sum(),
                Tensor::cat(vec![empty.clone(), Tensor::ones([1, 3], &device())], 0),
            )
        })
        .unwrap();
    assert_eq!(values(sum), [0.0]);
    assert_eq!(joined.dims(), [1, 3]);
    assert_eq!(values(joined), [1.0; 3]);
}

#[test]
fn a_tensor_made_from_data_inside_is_an_input() {
    let mut region = region();
    for start in [0.0f32, 5.0] {
        let y = region.run(|| vector(&[start, 1.0]) + 1.0).unwrap();
        assert_eq!(values(y), [start + 1.0, 2.0]);
    }
    assert_eq!(region.report().steps.len(), 1);
}

#[test]
fn reading_a_value_breaks_the_graph_and_names_the_line() {
    let mut region = region();
    let x = vector(&[1.0, 2.0]);
    for _ in 0..3 {
        let y = region
            .run(|| {
                let total: f32 = x.clone().sum().into_scalar();
                x.clone() * total
            })
            .unwrap();
        assert_eq!(values(y), [3.0, 6.0]);
    }
    let report = region.report();
    assert_eq!(report.steps.len(), 2, "one step before the break, one after");
    let [(graph_break, times)] = &report.breaks[..] else {
        panic!("one break, got {:?}", report.breaks)
    };
    assert_eq!((&graph_break.reason, *times), (&BreakReason::Read, 3));
    assert_eq!(graph_break.operation.as_deref(), Some("NumericFloat.Sum"));
    let location = graph_break.location.as_ref().expect("tests carry line tables");
    assert!(location.file.ends_with("region.rs"), "{location}");
    let source = include_str!("region.rs")
        .lines()
        .nth(location.line.unwrap() as usize - 1)
        .unwrap();
    assert!(
        source.contains("into_scalar"),
        "line {:?} is {source}",
        location.line
    );
}

#[test]
fn fullgraph_makes_a_break_an_error() {
    let options = CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_fullgraph(true);
    let mut region = kiln::compile(options);
    let x = vector(&[1.0]);
    let result = region.run(|| (x.clone() * 2.0).into_data());
    let Err(Error::GraphBreak { graph_break, .. }) = result else {
        panic!("expected a graph break")
    };
    assert_eq!(graph_break.reason, BreakReason::Read);
    // The region and its inputs live on.
    let y = region.run(|| x.clone() * 2.0).unwrap();
    assert_eq!(values(y), [2.0]);
}

#[test]
fn sync_inside_breaks() {
    use burn_tensor::backend::Backend;
    let mut region = region();
    let y = region
        .run(|| {
            let y = vector(&[1.0]) + 1.0;
            Kiln::sync(&device()).unwrap();
            y + 1.0
        })
        .unwrap();
    assert_eq!(values(y), [3.0]);
    assert_eq!(region.report().breaks[0].0.reason, BreakReason::Sync);
}

#[test]
fn what_a_panic_leaves_behind_has_its_values() {
    let mut region = region();
    let x = vector(&[1.0, 2.0]);
    let mut left_behind = None;
    let result = catch_unwind(AssertUnwindSafe(|| {
        region.run(|| {
            left_behind = Some(x.clone() * 2.0);
            panic!("the batch is broken");
        })
    }));
    let payload = result
        .expect_err("the panic reaches the caller")
        .downcast::<&str>()
        .unwrap();
    assert_eq!(*payload, "the batch is broken");

    // As without Kiln, when read and when used.
    let left_behind = left_behind.unwrap();
    assert_eq!(values(left_behind.clone() + 1.0), [3.0, 5.0]);
    assert_eq!(values(left_behind), [2.0, 4.0]);

    // Inputs and region are as before.
    let y = region.run(|| x.clone() + 1.0).unwrap();
    assert_eq!(values(y), [2.0, 3.0]);
    assert_eq!(values(x), [1.0, 2.0]);
}

#[test]
fn an_inner_region_joins_the_outer_one() {
    let (mut outer, mut inner) = (region(), region());
    let y = outer
        .run(|| {
            let y = vector(&[1.0]) + 1.0;
            inner.run(|| y * 3.0).unwrap() + 1.0
        })
        .unwrap();
    assert_eq!(values(y), [7.0]);
    assert_eq!(outer.report().steps.len(), 1);
    assert!(inner.report().steps.is_empty());
}

#[test]
fn other_threads_run_eagerly() {
    let mut region = region();
    let (there, here) = region
        .run(|| {
            let there = std::thread::spawn(|| values(vector(&[1.0, 2.0]) * 3.0))
                .join()
                .unwrap();
            (there, vector(&[1.0]) + 1.0)
        })
        .unwrap();
    assert_eq!(there, [3.0, 6.0]);
    assert_eq!(values(here), [2.0]);
    assert!(region.report().breaks.is_empty());
}

#[test]
fn another_thread_that_needs_a_pending_tensor_breaks_the_graph() {
    let mut region = region();
    let (there, here) = region
        .run(|| {
            let y = vector(&[1.0, 2.0]) * 3.0;
            let copy = y.clone();
            let there = std::thread::spawn(move || values(copy + 1.0)).join().unwrap();
            (there, y + 2.0)
        })
        .unwrap();
    assert_eq!(there, [4.0, 7.0]);
    assert_eq!(values(here), [5.0, 8.0]);
    assert_eq!(region.report().breaks[0].0.reason, BreakReason::OtherThread);
}

#[test]
fn a_pending_tensor_dropped_on_another_thread_is_no_output() {
    let mut region = region();
    for _ in 0..2 {
        let kept = region
            .run(|| {
                let kept = vector(&[1.0]) + 1.0;
                let dropped = kept.clone() * 5.0;
                std::thread::spawn(move || drop(dropped)).join().unwrap();
                kept
            })
            .unwrap();
        assert_eq!(values(kept), [2.0]);
    }
    let report = region.report();
    assert!(report.breaks.is_empty());
    assert_eq!((report.steps.len(), report.steps[0].outputs), (1, 1));
}

#[test]
fn a_shape_recompiles_once_and_says_why() {
    let mut region = region();
    for length in [8, 8, 5, 5, 8] {
        let x = Tensor::<Kiln, 2>::ones([length, 3], &device());
        let y = region.run(|| x.clone() * 2.0).unwrap();
        assert_eq!(values(y), vec![2.0; length * 3]);
    }
    let report = region.report();
    assert_eq!(report.steps.len(), 2);
    let [recompile] = &report.recompiles[..] else {
        panic!("{:?}", report.recompiles)
    };
    let Mismatch::Input {
        index: 0,
        used: Some(used),
        before,
        after,
    } = &recompile.mismatch
    else {
        panic!("{recompile:?}")
    };
    assert_eq!((&**before, &**after), ("f32 [8, 3]", "f32 [5, 3]"));
    assert!(
        used.starts_with("NumericFloat.MulScalar at ") && used.contains("region.rs:"),
        "{used}"
    );
    assert_eq!(
        recompile.mismatch.to_string(),
        format!("type and shape of input 0, first used by {used}: f32 [8, 3] became f32 [5, 3]")
    );
}

#[test]
fn a_dtype_and_a_branch_recompile() {
    use burn_tensor::{DType, FloatDType};
    let mut region = region();
    let x = vector(&[1.0, 4.0]);
    region.run(|| x.clone().sqrt()).unwrap();
    region.run(|| x.clone().exp()).unwrap();
    let double = x.cast(FloatDType::F64);
    let y = region.run(|| double.clone().sqrt()).unwrap();
    assert_eq!(y.dtype(), DType::F64);
    let reasons: Vec<String> = region
        .report()
        .recompiles
        .iter()
        .map(|it| it.mismatch.to_string())
        .collect();
    assert!(
        reasons[0].starts_with("operation 0: Float.Sqrt at "),
        "{reasons:?}"
    );
    assert!(reasons[0].ends_with(" became Float.Exp"), "{reasons:?}");
    assert!(reasons[1].contains("f32 [2] became f64 [2]"), "{reasons:?}");
}

/// Rewrites know a negation, so the factor -1 is part of a step's identity; any other factor is an argument
/// of the step.
#[test]
fn a_factor_is_an_argument_unless_it_negates() {
    let mut region = region();
    let x = vector(&[1.0, -4.0]);
    for factor in [0.5, -1.0, 2.0, -3.0, -1.0] {
        let y = region.run(|| x.clone() * factor).unwrap();
        assert_eq!(values(y), [factor, -4.0 * factor]);
    }
    let mut runs: Vec<_> = region.report().steps.iter().map(|step| step.runs).collect();
    runs.sort();
    assert_eq!(runs, [2, 3]);
}

#[test]
fn results_that_are_kept_are_part_of_the_step() {
    let mut region = region();
    let x = vector(&[1.0]);
    for keep in [false, false, true, true] {
        let mut kept = None;
        region
            .run(|| {
                let y = x.clone() * 2.0;
                kept = keep.then(|| y.clone());
                y + 1.0
            })
            .unwrap();
        assert_eq!(kept.map(values), keep.then(|| vec![2.0]));
    }
    let report = region.report();
    assert_eq!(report.steps.len(), 2);
    let Mismatch::Outputs { kept, .. } = &report.recompiles[0].mismatch else {
        panic!("{:?}", report.recompiles)
    };
    assert_eq!(kept.len(), 1, "{kept:?}");
}

#[test]
fn beyond_the_limit_steps_still_run() {
    let options = CompileOptions::default()
        .with_backend(CompileBackend::Interpret)
        .with_recompile_limit(2);
    let mut region = kiln::compile(options);
    for length in 1..6 {
        let x = Tensor::<Kiln, 1>::ones([length], &device());
        assert_eq!(values(region.run(|| x * 2.0).unwrap()), vec![2.0; length]);
    }
    let backends: Vec<CompileBackend> = region.report().steps.iter().map(|step| step.backend).collect();
    assert_eq!(
        backends
            .iter()
            .filter(|&&backend| backend == CompileBackend::Interpret)
            .count(),
        2,
        "{backends:?}"
    );
    assert_eq!(
        backends
            .iter()
            .filter(|&&backend| backend == CompileBackend::AotEager)
            .count(),
        3,
        "{backends:?}"
    );
}

#[test]
fn an_index_out_of_range_is_an_error_of_the_region() {
    let mut region = region();
    let x = vector(&[1.0, 2.0, 3.0]);
    let wrong = Tensor::<Kiln, 1, Int>::from_ints([0, 7], &device());
    let error = region.run(|| x.clone().select(0, wrong)).unwrap_err();
    assert!(matches!(error, Error::Execute { .. }), "{error}");
    let right = Tensor::<Kiln, 1, Int>::from_ints([0, 2], &device());
    assert_eq!(
        values(region.run(|| x.clone().select(0, right)).unwrap()),
        [1.0, 3.0]
    );
}

#[test]
fn an_input_that_dies_gives_its_buffer() {
    let mut region = self::region();
    let mut x = Tensor::<Kiln, 1>::zeros([1 << 12], &device());
    for _ in 0..3 {
        x = region.run(|| x.clone() + 1.0).unwrap();
    }
    // `x.clone()` keeps the input alive inside the closure, the assignment outside ends it too late.
    assert_eq!(region.report().steps[0].aliased, 0);
    let mut region = self::region();
    for _ in 0..3 {
        region.run(|| x = x.clone() + 1.0).unwrap();
    }
    assert!(
        region.report().steps.iter().any(|step| step.aliased == 1),
        "{}",
        region.explain()
    );
    assert_eq!(values(x)[0], 6.0);
}

#[test]
fn no_tensor_is_leaked() {
    let mut region = region();
    let x = vector(&[1.0, 2.0]);
    region.run(|| (x.clone() * 2.0).exp()).unwrap();
    let before = kiln_burn::table::len();
    for _ in 0..10 {
        let y = region.run(|| (x.clone() * 2.0).exp() + x.clone().sum()).unwrap();
        drop(y);
    }
    assert_eq!(kiln_burn::table::len(), before);
}

#[test]
fn a_lazy_device_records_until_a_value_is_read() {
    let lazy = KilnDevice::lazy(CompileBackend::AotEager);
    let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &lazy);
    let y = x.clone() * 3.0;
    let shared = y.clone();
    let z = std::thread::spawn(move || shared + 1.0).join().unwrap();
    assert_eq!(values(y), [3.0, 6.0]);
    assert_eq!(
        values(z),
        [4.0, 7.0],
        "what a finished thread left pending can still be read"
    );
    let moved = (x + 1.0).to_device(&device());
    assert_eq!(values(moved), [2.0, 3.0]);
}

#[test]
fn a_progression_made_inside_is_an_operation() {
    let mut region = kiln::compile(CompileOptions::default().with_backend(CompileBackend::AotEager));
    let arange = |start: i64, step: i64| {
        let range = start..start + 12 * step;
        Tensor::<Kiln, 1, Int>::arange_step(range, step as usize, &device())
    };
    let ints = |tensor: Tensor<Kiln, 1, Int>| tensor.into_data().convert::<i64>().to_vec::<i64>().unwrap();
    let counted = region.run(|| arange(0, 1)).unwrap();
    assert_eq!(ints(counted), (0..12).collect::<Vec<_>>());
    assert_eq!(region.report().steps[0].inputs, 0);
    for (start, step) in [(5, 3), (7, 2), (100, 4)] {
        let counted = region.run(|| arange(start, step)).unwrap();
        assert_eq!(
            ints(counted),
            (0..12).map(|i| start + step * i).collect::<Vec<_>>()
        );
    }
    // Start and step are runtime scalars.
    assert_eq!(region.report().steps.len(), 2);
}

#[test]
fn inputs_that_end_in_the_step_only_later_give_their_buffers_then() {
    let mut region = region();
    let step = |region: &mut Compiled, state: Vector| region.run(move || state * 0.5).unwrap();
    // Compiled while the program keeps every state.
    let mut kept = vec![vector(&[8.0; 40])];
    for _ in 0..3 {
        let next = step(&mut region, kept[kept.len() - 1].clone());
        kept.push(next);
    }
    assert_eq!(region.report().steps[0].aliased, 0);
    let mut state = kept.pop().unwrap();
    for _ in 0..4 {
        state = step(&mut region, state);
    }
    assert_eq!(values(state), [8.0 / 128.0; 40]);
    assert_eq!(values(kept[0].clone()), [8.0; 40]);
    let report = region.report();
    assert_eq!((report.steps.len(), report.steps[0].aliased), (1, 1));
    assert_eq!(report.recompiles, [], "no guard failed");
}

#[test]
fn what_changed_about_an_operation_is_said_in_words() {
    let x = Tensor::<Kiln, 2>::ones([4, 6], &device());
    let y = Tensor::<Kiln, 2>::ones([4, 6], &device());
    // Each program runs once with `false`, once with `true`.
    type Program = Box<dyn Fn(Tensor<Kiln, 2>, Tensor<Kiln, 2>, bool) -> Tensor<Kiln, 2>>;
    let programs: [(Program, &str, &str); 6] = [
        (
            Box::new(|x, _, late| x.slice([0..2, if late { 1..4 } else { 0..3 }])),
            "`ranges` of operation 0, BaseFloat.Slice at ",
            "[..2, ..3] became [..2, 1..4]",
        ),
        (
            Box::new(|x, _, other| x.sum_dim(usize::from(other))),
            "`axis` of operation 0, NumericFloat.SumDim at ",
            "0 became 1",
        ),
        (
            Box::new(|x, _, other| {
                let mask = x.clone().equal_elem(0.0);
                x.mask_fill(mask, if other { 7.0 } else { 3.0 })
            }),
            "the number `value` of operation 1, BaseFloat.MaskFill at ",
            "3.0 became 7.0",
        ),
        (
            Box::new(|x, y, other| {
                let z = x.clone() + y.clone();
                z.clone() * if other { y } else { z }
            }),
            "the operand `rhs` of operation 1, NumericFloat.Mul at ",
            "the result of operation 0, NumericFloat.Add at ",
        ),
        (
            Box::new(|x, _, other| x.reshape(if other { [8, 3] } else { [3, 8] })),
            "type or shape of the result `out` of operation 0, BaseFloat.Reshape at ",
            "f32 [3, 8] became f32 [8, 3]",
        ),
        (
            Box::new(|x, y, other| match other {
                false => Tensor::cat(vec![x, y], 0),
                true => Tensor::cat(vec![x.clone(), y, x], 0).slice([0..8, 0..6]),
            }),
            "of operation 0, BaseFloat.Cat at ",
            "2 of them became 3 of them",
        ),
    ];
    for (program, guard, change) in programs {
        let mut region = region();
        for other in [false, true] {
            region.run(|| program(x.clone(), y.clone(), other)).unwrap();
        }
        let report = region.report();
        let [recompile] = &report.recompiles[..] else {
            panic!("{:?}", report.recompiles)
        };
        let text = recompile.mismatch.to_string();
        for part in [guard, change, "region.rs:"] {
            assert!(text.contains(part), "`{part}` is missing in: {text}");
        }
    }
}

#[test]
fn a_recompiled_step_has_lines_where_it_resembles_the_one_before() {
    let mut region = region();
    let x = vector(&[1.0, 2.0]);
    for more in [false, true] {
        region
            .run(|| {
                let y = x.clone().exp();
                let y = if more { y.tanh() } else { y };
                y + 1.0
            })
            .unwrap();
    }
    let report = region.report();
    let lines = |step: usize| -> Vec<Option<String>> {
        let step = report.steps.iter().find(|it| it.number == step).unwrap();
        let nodes = step.graph.nodes();
        let made = nodes.filter(|(_, node)| node.provenance.operation.is_some());
        made.map(|(_, node)| node.provenance.location.as_deref().map(str::to_owned))
            .collect()
    };
    let (before, now) = (lines(0), lines(1));
    assert!(before.iter().all(Option::is_some), "{before:?}");
    assert_eq!((now.first(), now.last()), (before.first(), before.last()));
    assert!(
        now.contains(&None),
        "nobody saw the line of the new operation: {now:?}"
    );
}

#[test]
fn a_frozen_region_refuses_and_loses_nothing() {
    let mut region = region();
    let mut state = vector(&[1.0, 2.0]);
    let advance = |region: &mut Compiled, state: &mut Vector, exponential: bool| {
        region.run(|| {
            let next = state.clone() * 2.0;
            *state = if exponential { next.exp() } else { next };
        })
    };
    advance(&mut region, &mut state, false).unwrap();
    region.freeze();
    advance(&mut region, &mut state, false).unwrap();
    assert_eq!(values(state.clone()), [4.0, 8.0]);
    let before = kiln_burn::table::len();
    let error = advance(&mut region, &mut state, true).unwrap_err();
    let Error::Frozen { guard, .. } = &error else {
        panic!("{error}")
    };
    assert!(guard.contains("operation 1") && guard.contains("Exp"), "{guard}");
    assert!(error.to_string().contains("`test` is frozen"), "{error}");
    assert_eq!(region.report().compiles.len(), 1);
    // What the closure assigned is there when somebody asks for it, ..
    assert_eq!(values(state.clone()), [8.0f32.exp(), 16.0f32.exp()]);
    // .. and costs nothing otherwise.
    let _ = advance(&mut region, &mut state, true).unwrap_err();
    drop(state);
    assert!(kiln_burn::table::len() < before, "everything was dropped");
    region.unfreeze();
    let mut state = vector(&[1.0, 2.0]);
    advance(&mut region, &mut state, true).unwrap();
    assert_eq!(region.report().compiles.len(), 2);
}

#[test]
fn a_frozen_function_refuses_other_shapes() {
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let double = kiln::compile_fn(|x: Vector| x * 2.0).with_options(options.clone());
    assert_eq!(values(double.call(vector(&[1.5])).unwrap()), [3.0]);
    double.freeze();
    assert_eq!(values(double.call(vector(&[2.5])).unwrap()), [5.0]);
    let error = double.call(vector(&[1.0, 2.5])).unwrap_err();
    assert!(error.to_string().contains("f32 [1] became f32 [2]"), "{error}");
    double.unfreeze();
    assert_eq!(values(double.call(vector(&[1.0, 2.5])).unwrap()), [2.0, 5.0]);

    let cold = kiln::compile_fn(|x: Vector| x * 2.0).with_options(options.with_frozen(true));
    let error = cold.call(vector(&[1.5])).unwrap_err();
    assert!(
        error.is_frozen() && error.to_string().contains("nothing was compiled"),
        "{error}"
    );
}

#[test]
fn a_frozen_function_refuses_with_gradients_too() {
    use burn_autodiff::Autodiff;
    type Tracked = Tensor<Autodiff<Kiln>, 1>;
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let square = kiln::compile_fn(|x: Tracked| x.clone() * x).with_options(options);
    let x = |values: &[f32]| Tracked::from_floats(values, &device()).require_grad();
    square.call(x(&[1.0, 2.0])).unwrap();
    square.freeze();
    let (input, seen) = (x(&[3.0, 4.0]), |x: Tensor<Kiln, 1>| values(x));
    let gradients = square.call(input.clone()).unwrap().sum().backward();
    assert_eq!(seen(input.grad(&gradients).unwrap()), [6.0, 8.0]);
    let error = square.call(x(&[3.0, 4.0, 5.0])).unwrap_err();
    assert!(error.to_string().contains("f32 [2] became f32 [3]"), "{error}");
    assert_eq!(square.compiled_pairs(), 1);
}

#[test]
fn a_disabled_part_runs_at_once() {
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        let x = vector(&[1.0, 2.0, 3.0]);
        for _ in 0..3 {
            let (before, y) = region
                .run(|| {
                    let square = x.clone() * x.clone();
                    let before = kiln::disable(|| {
                        let next = square.clone() + 1.0;
                        // It has elements while the region is under way: nothing is recorded here, not by
                        // regions inside either.
                        let mut inner = kiln::compile(CompileOptions::default());
                        let inside = inner.run(|| next.clone() * 1.0).unwrap();
                        assert_eq!(inner.report().calls, 0);
                        values(inside)
                    });
                    (before, square * 3.0)
                })
                .unwrap();
            assert_eq!((before, values(y)), (vec![2.0, 5.0, 10.0], vec![3.0, 12.0, 27.0]));
        }
        let report = region.report();
        let (graph_break, times) = &report.breaks[0];
        assert_eq!(
            (&graph_break.reason, *times, report.breaks.len()),
            (&BreakReason::Disabled, 3, 1)
        );
        assert!(graph_break.to_string().contains("kiln::disable"), "{graph_break}");
        assert_eq!(report.steps.len(), 2, "one before it, one after it");
        assert!(region.explain().to_string().contains("kiln::disable"));
    }
}

#[test]
fn under_fullgraph_a_disabled_part_is_an_error() {
    let options = CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_fullgraph(true);
    let mut region = kiln::compile(options);
    let x = vector(&[1.0]);
    let ran = std::cell::Cell::new(false);
    let result = region.run(|| {
        let y = x.clone() + 1.0;
        kiln::disable(|| ran.set(true));
        y
    });
    let error = result.unwrap_err();
    assert!(error.to_string().contains("kiln::disable"), "{error}");
    assert!(!ran.get());
    assert_eq!(values(region.run(|| x.clone() + 1.0).unwrap()), [2.0]);
}

#[test]
fn a_panic_in_a_disabled_part_leaves_the_region_usable() {
    let mut region = region();
    let x = vector(&[1.0]);
    let result = catch_unwind(AssertUnwindSafe(|| {
        region.run(|| {
            let _y = x.clone() + 1.0;
            kiln::disable::<()>(|| panic!("inside"));
        })
    }));
    assert!(result.is_err());
    let y = region.run(|| x.clone() + 1.0).unwrap();
    assert_eq!(values(y), [2.0]);
    // Outside of everything it only runs.
    assert_eq!(kiln::disable(|| values(x + 1.0)), [2.0]);
}

#[test]
fn a_disabled_part_on_a_lazy_device_runs_at_once() {
    let lazy = KilnDevice::lazy(CompileBackend::AotEager);
    let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &lazy) * 2.0;
    let before = kiln_burn::table::len();
    let y = kiln::disable(|| x.clone() + 1.0);
    assert!(kiln_burn::table::len() > before, "it has its elements");
    assert_eq!(values(y), [3.0, 5.0]);
    assert_eq!(values(x), [2.0, 4.0]);
}

/// burn-flex would read beyond the end of the weight here, which is repeated for no matrix.
#[test]
fn a_product_of_an_empty_batch_is_empty() {
    let ones = |shape: [usize; 3]| Tensor::<Kiln, 3>::ones(shape, &device());
    let ints = |shape: [usize; 3]| Tensor::<Kiln, 3, Int>::ones(shape, &device());
    let product = |batch: usize| {
        let (x, w) = (ones([batch, 12, 6]), ones([1, 6, 5]));
        let whole = ints([batch, 2, 3]).matmul(ints([1, 3, 4]));
        (x.matmul(w.clone()), w.matmul(ones([batch, 5, 2])), whole)
    };
    let check = |(a, b, c): (Tensor<Kiln, 3>, Tensor<Kiln, 3>, Tensor<Kiln, 3, Int>), batch: usize| {
        assert_eq!(a.dims(), [batch, 12, 5]);
        assert_eq!(b.dims(), [batch, 6, 2]);
        assert_eq!(c.dims(), [batch, 2, 4]);
        assert_eq!(values(a), vec![6.0; batch * 60]);
        assert_eq!(values(b), vec![5.0; batch * 12]);
        assert_eq!(
            c.into_data().iter::<i64>().collect::<Vec<_>>(),
            vec![3; batch * 8]
        );
    };
    check(product(0), 0);
    for backend in [
        CompileBackend::AotEager,
        CompileBackend::Interpret,
        CompileBackend::Cpu,
    ] {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        for batch in [2, 0, 3, 0] {
            check(region.run(|| product(batch)).unwrap(), batch);
        }
    }
    // A sum of nothing.
    assert_eq!(values(ones([2, 3, 0]).matmul(ones([1, 0, 2]))), [0.0; 12]);
}

#[test]
fn a_linear_layer_of_another_width_is_named_with_its_line() {
    let x = Tensor::<Kiln, 2>::ones([4, 5], &device());
    let weight = Tensor::<Kiln, 2>::ones([6, 8], &device());
    let layer = || burn_tensor::module::linear(x.clone(), weight.clone(), None);
    let mut region = region();
    for recorded in [false, true] {
        let result = catch_unwind(AssertUnwindSafe(|| match recorded {
            true => drop(region.run(layer)),
            false => drop(layer()),
        }));
        let said = result.unwrap_err();
        let said = said.downcast_ref::<String>().unwrap();
        let wanted = "Linear: the last dimension of the input (f32 [4, 5]) is not the first of the weight (f32 [6, 8]), at ";
        assert!(said.starts_with(wanted) && said.contains("region.rs:"), "{said}");
    }
}

/// The second call gives its argument away, for which there would be a better step; there is no folder to
/// compile it in.
#[test]
fn a_step_that_fits_stays_where_a_better_one_cannot_be_compiled() {
    const NAME: &str = "a_step_that_fits_stays_where_a_better_one_cannot_be_compiled";
    const CHILD: &str = "KILN_TEST_WITHOUT_ROOM";
    if std::env::var_os(CHILD).is_none() {
        let [cache, temporary] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(CHILD, "1")
            .env("KILN_CACHE_DIR", cache.path())
            .env("TMPDIR", temporary.path())
            .output()
            .unwrap();
        let [said, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(said.contains("1 passed"), "{said}{errors}");
        assert_eq!(
            errors.matches("a faster step could not be compiled").count(),
            1,
            "{errors}"
        );
        return;
    }
    let mut region = kiln::compile(CompileOptions::default().with_backend(CompileBackend::Cpu));
    let mut state = vector(&[1.0; 5000]);
    let first = state.clone();
    for call in 1..5 {
        if call == 2 {
            std::fs::remove_dir_all(std::env::temp_dir()).unwrap();
        }
        state = region.run(move || state * 0.5 + call as f32).unwrap();
    }
    assert_eq!(
        values(state)[4999],
        ((((1.0f32 * 0.5 + 1.0) * 0.5 + 2.0) * 0.5 + 3.0) * 0.5) + 4.0
    );
    assert_eq!(values(first)[0], 1.0);
    assert_eq!(region.report().steps.len(), 1);
}

#[test]
fn any_name_is_a_name_of_a_region() {
    let options = CompileOptions::default().with_backend(CompileBackend::Cpu);
    let mut region = kiln::compile(options.with_name("train/*/x \\ \"y\" */ #if"));
    let x = vector(&[1.0, 2.0]);
    assert_eq!(values(region.run(|| x.clone() * 2.0 + 1.0).unwrap()), [3.0, 5.0]);
}

/// As Burn's layers do, which draw their parameters when they are first used.
#[test]
fn parameters_that_the_first_call_draws_are_no_change_of_control_flow() {
    let mut region = region();
    let (x, mut weight) = (vector(&[1.0, 2.0, 3.0]), None);
    for _ in 0..3 {
        let draw = || Tensor::random([3], burn_tensor::Distribution::Default, &device());
        let y = region
            .run(|| x.clone() * weight.get_or_insert_with(draw).clone())
            .unwrap();
        assert_eq!(values(y)[0], values(weight.clone().unwrap())[0]);
    }
    let explain = region.explain().to_string();
    assert_eq!(region.report().recompiles.len(), 1);
    assert!(
        explain.contains("nothing, if these numbers initialise parameters"),
        "{explain}"
    );
}
