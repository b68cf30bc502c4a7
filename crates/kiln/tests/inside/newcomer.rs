//! The newcomer's test: three programs with a planted fault each, and what Kiln's own reports say of them.
//!
//! Who has never seen the inside of Kiln must find the line of the fault, what happened there and what to do,
//! in `explain()`, in the log or in the summary of a profile alone.

use std::process::Command;

use burn::tensor::module::interpolate;
use burn::tensor::ops::{InterpolateMode, InterpolateOptions};
use burn::tensor::{Distribution, Tensor};
use kiln::{CompileOptions, Dynamic, Explain, Kiln, Summary};

use super::{device, matrix};

fn options(name: &str) -> CompileOptions {
    CompileOptions::default().with_name(name)
}

/// `newcomer.rs:LINE`
fn at(line: u32) -> String {
    format!("newcomer.rs:{line}")
}

/// Program `name` of this file as a process of its own.
fn program(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        &format!("newcomer::{name}"),
        "--ignored",
        "--nocapture",
    ]);
    command
}

/// What a program writes.
fn output_of(program: &mut Command) -> String {
    let output = program.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout) + &text(&output.stderr)
}

/// Looks at the loss in the middle of the step. Returns the line of it.
fn broken() -> (Explain, u32) {
    let mut step = kiln::compile(options("broken"));
    let w = matrix::<8, 4>(2);
    let mut line = 0;
    for batch in 0..3 {
        let x = matrix::<6, 8>(batch);
        step.run(|| {
            let loss = (x.matmul(w.clone()) * 0.5).powf_scalar(2.0).mean();
            line = line!() + 1;
            let seen: f32 = loss.clone().into_scalar();
            if seen.is_finite() { loss * 2.0 } else { loss }
        })
        .unwrap();
    }
    (step.explain(), line)
}

/// Takes one row more in each step, then another exponent. Returns the lines of both. Sizes do not share
/// kernels here: whether they do depends on what the cache holds, and a size that shares is no recompilation.
fn recompiling() -> (Explain, [u32; 2]) {
    let mut step = kiln::compile(options("recompiling").with_dynamic(Dynamic::Off));
    let x = matrix::<6, 8>(1);
    let mut lines = [0; 2];
    for (rows, exponent) in [(2, 1.5), (2, 1.5), (3, 1.5), (3, 2.5)] {
        step.run(|| {
            lines = [line!() + 1, line!() + 2];
            let part = x.clone().slice([0..rows, 0..8]);
            let power = (part + 3.0).powf_scalar(exponent);
            power.sum_dim(0)
        })
        .unwrap();
    }
    (step.explain(), lines)
}

/// Resizes an image in a way that no kernel has, beside a small product. Returns the line.
fn slow() -> (Explain, Summary, u32) {
    let mut step = kiln::compile(options("slow"));
    let w = matrix::<64, 64>(2);
    let image = Tensor::<Kiln, 4>::random([4, 8, 64, 64], Distribution::Default, &device());
    let mut line = 0;
    let mut run = || {
        step.run(|| {
            let resize = InterpolateOptions::new(InterpolateMode::Bicubic);
            line = line!() + 1;
            let large = interpolate(image.clone(), [128, 128], resize);
            large.mean() + w.clone().matmul(w.clone()).mean()
        })
        .unwrap();
    };
    run();
    let profile = kiln::profile();
    (0..3).for_each(|_| run());
    let summary = profile.summary();
    (step.explain().with_times(&summary, None), summary, line)
}

#[test]
#[ignore = "a program of the tests below"]
fn broken_program() {
    broken();
}

#[test]
#[ignore = "a program of the tests below"]
fn recompiling_program() {
    recompiling();
}

/// A step, twice, and what `explain` says of it.
#[test]
#[ignore = "a program of the tests below"]
fn plain_program() {
    let mut step = kiln::compile(options("plain"));
    for _ in 0..2 {
        step.run(|| matrix::<6, 8>(0).exp().sum()).unwrap();
    }
    println!("{}", step.explain());
}

#[test]
fn a_missing_compiler_is_told_and_found_in_explain() {
    let empty = tempfile::tempdir().unwrap();
    let text = output_of(
        program("plain_program")
            .env("PATH", empty.path())
            .env_remove("CC")
            .env_remove("KILN_LOG"),
    );
    let warnings = text
        .lines()
        .filter(|line| line.contains("steps run on aot_eager, which is slower: "));
    assert_eq!(warnings.count(), 1, "{text}");
    let found = text.lines().find(|line| line.contains("each on burn-flex"));
    let found = found.unwrap_or_else(|| panic!("no line in {text}"));
    for part in ["; not compiled: ", "C compiler"] {
        assert!(found.contains(part), "{part} is missing in {found}");
    }
}

/// The tensors of a program that is not on Kiln are not Kiln's to record.
#[test]
fn a_program_on_another_backend_is_found_in_explain() {
    let mut step = kiln::compile(options("elsewhere"));
    step.run(|| Tensor::<burn_flex::Flex, 1>::from([1.0, 2.0]).exp())
        .unwrap();
    let text = step.explain().to_string();
    assert!(
        text.contains("nothing was compiled: ") && text.contains("put model and data on `Kiln`"),
        "{text}"
    );
}

#[test]
fn a_break_is_found_in_explain() {
    let (explain, line) = broken();
    let text = explain.to_string();
    assert!(text.lines().next().unwrap().contains("1 graph breaks"), "{text}");
    let found = text.lines().nth(1).unwrap();
    for part in ["graph break", "a value was read", "NumericFloat.Mean", &at(line)] {
        assert!(found.contains(part), "{part} is missing in {found}");
    }
    let remedy = text.lines().nth(2).unwrap();
    assert!(
        remedy.contains("what to do") && remedy.contains("read it outside"),
        "{remedy}"
    );
}

#[test]
fn a_break_is_found_in_the_log() {
    let text = output_of(program("broken_program").env("KILN_LOG", "graph_breaks"));
    let found = text.lines().find(|line| line.contains("kiln::graph_breaks"));
    let found = found.unwrap_or_else(|| panic!("no event in {text}"));
    assert!(
        found.contains("newcomer.rs:") && found.contains("read it outside"),
        "{found}"
    );
}

#[test]
fn recompiles_are_found_in_explain() {
    let (explain, [slice, power]) = recompiling();
    let text = explain.to_string();
    let recompiles: Vec<&str> = text.lines().filter(|line| line.contains("recompiled")).collect();
    assert_eq!(recompiles.len(), 2, "{text}");
    let wanted = [
        (
            slice,
            "`ranges` of operation 0, BaseFloat.Slice",
            "[..2, ..8] became [..3, ..8]",
        ),
        (
            power,
            "the number `rhs` of operation 2, Float.PowfScalar",
            "1.5 became 2.5",
        ),
    ];
    for (found, (line, guard, change)) in recompiles.iter().zip(wanted) {
        for part in [guard, &at(line), change] {
            assert!(found.contains(part), "{part} is missing in {found}");
        }
    }
    assert!(text.contains("what to do: a host number that changes"), "{text}");
    assert!(text.contains("what to do: exponents"), "{text}");
}

#[test]
fn recompiles_are_found_in_the_log() {
    let text = output_of(program("recompiling_program").env("KILN_LOG", "recompiles"));
    let events: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("kiln::recompiles"))
        .collect();
    assert_eq!(events.len(), 2, "{text}");
    assert!(events[0].contains("[..2, ..8] became [..3, ..8]"), "{text}");
    assert!(
        events[1].contains("newcomer.rs:") && events[1].contains("1.5 became 2.5"),
        "{text}"
    );
}

#[test]
fn a_slow_operation_is_found_in_the_summary() {
    let (_, summary, line) = slow();
    let slowest = &summary.operations[0];
    assert_eq!(slowest.operation, "Module.Interpolate", "{summary}");
    assert!(
        slowest
            .location
            .as_deref()
            .is_some_and(|it| it.ends_with(&at(line))),
        "{slowest:?}"
    );
    let text = summary.to_string();
    let first = |title: &str| {
        text.lines()
            .skip_while(|line| !line.starts_with(title))
            .nth(2)
            .unwrap()
    };
    assert!(first("by kernel").contains("Module.Interpolate"), "{text}");
    assert!(first("by Burn operation").contains(&at(line)), "{text}");
}

#[test]
fn a_slow_operation_is_found_in_explain() {
    let (explain, _, line) = slow();
    let text = explain.to_string();
    let whole = text.lines().find(|line| line.contains("kept whole")).unwrap();
    assert!(
        whole.contains("Module.Interpolate") && whole.contains(&at(line)),
        "{text}"
    );
    let slowest = text
        .lines()
        .skip_while(|line| !line.contains("the slowest first"))
        .nth(1)
        .unwrap();
    assert!(
        slowest.contains("Module.Interpolate") && slowest.contains(&at(line)),
        "{text}"
    );
}
