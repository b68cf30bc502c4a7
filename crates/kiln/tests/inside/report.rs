//! `explain` and compile times: what they say of programs with planted faults.

use burn::tensor::Tensor;
use kiln::explain::Report;
use kiln::{CompileBackend, CompileOptions, Kiln};

use super::{device, matrix, train};

fn options(name: &str) -> CompileOptions {
    CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_name(name)
}

#[test]
fn a_planted_recompile_is_named_with_before_and_after() {
    let mut region = kiln::compile(options("planted_recompile"));
    for rows in [4, 4, 3, 4] {
        let x = Tensor::<Kiln, 2>::ones([rows, 2], &device());
        region.run(|| x.clone() * 2.0 + x).unwrap();
    }
    let explain = region.explain();
    let [first, second] = &explain.report().compiles[..] else {
        panic!("two compilations, got {:?}", explain.report().compiles)
    };
    assert_eq!((first.guard.as_deref(), first.runs), (None, 3));
    assert!(first.expected && !second.expected);
    assert_eq!(second.runs, 1);
    let guard = second.guard.as_deref().unwrap();
    assert!(
        guard.starts_with("type and shape of input 0, first used by "),
        "{guard}"
    );
    assert_eq!(second.before.as_deref(), Some("f32 [4, 2]"));
    assert_eq!(second.after.as_deref(), Some("f32 [3, 2]"));
    assert!(
        second
            .remedy
            .as_ref()
            .is_some_and(|remedy| remedy.contains("pad"))
    );
    let text = explain.to_string();
    assert!(
        text.contains("f32 [4, 2] became f32 [3, 2]") && text.contains("pad"),
        "{text}"
    );
}

#[test]
fn a_planted_break_is_named_with_its_line() {
    let mut region = kiln::compile(options("planted_break"));
    let x = matrix::<2, 2>(0);
    let line = line!() + 3;
    for _ in 0..2 {
        let double = |total: f32| x.clone() * total;
        region.run(|| double(x.clone().sum().into_scalar())).unwrap();
    }
    let report = region.explain().into_report();
    let [found] = &report.breaks[..] else {
        panic!("one break, got {:?}", report.breaks)
    };
    assert_eq!(
        (found.times, found.operation.as_deref()),
        (2, Some("NumericFloat.Sum"))
    );
    let location = found.location.as_ref().unwrap();
    assert!(
        location.ends_with(&format!("report.rs:{line}")),
        "{location} is not line {line}"
    );
    assert!(found.remedy.contains("read it outside"));
}

#[test]
fn the_step_that_stays_is_no_cause_for_concern() {
    let explain = train(CompileOptions::default().with_name("stays"), 5);
    let report = explain.report();
    assert!(
        report.compiles.iter().all(|compile| compile.expected),
        "{:?}",
        report.compiles
    );
    assert!(explain.to_string().contains("0 recompiles"), "{explain}");
}

#[test]
fn beyond_the_limit_the_report_says_so() {
    let mut region = kiln::compile(options("limit").with_recompile_limit(2));
    for rows in 1..4 {
        region
            .run(|| Tensor::<Kiln, 1>::ones([rows], &device()) + 1.0)
            .unwrap();
    }
    let text = region.explain().to_string();
    assert!(text.contains("recompile limit of 2"), "{text}");
    assert!(text.contains("likely fix: a host number that changes"), "{text}");
}

#[test]
fn the_report_survives_json() {
    let explain = train(CompileOptions::default().with_name("json"), 4);
    let read: Report = serde_json::from_str(&explain.to_json()).unwrap();
    assert_eq!(read.region, "json");
    assert_eq!(read.steps.len(), explain.report().steps.len());
    assert_eq!(read.steps[0].kernels, explain.report().steps[0].kernels);
}

#[test]
fn kernels_and_memory_of_a_compiled_step() {
    let explain = train(CompileOptions::default().with_name("compiled"), 5);
    let report = explain.report();
    let step = report
        .steps
        .iter()
        .find(|step| step.backend == "cpu")
        .expect("a C compiler");
    let memory = step.memory.as_ref().unwrap();
    assert!(!step.kernels.is_empty());
    assert_eq!(memory.in_use.len(), step.kernels.len());
    assert!(memory.in_use.iter().all(|&bytes| bytes <= memory.arena_bytes));
    let product = step
        .kernels
        .iter()
        .find(|kernel| kernel.fused.iter().any(|it| it.op.starts_with("dot")));
    let product = product.expect("the linear layer is a product");
    assert!(product.flops >= 2 * 16 * 32 * 8, "{product:?}");
    for kernel in &step.kernels {
        let all = kernel.reads.iter().chain(&kernel.writes);
        let bytes: u64 = all.clone().map(|&at| memory.buffers[at].bytes).sum();
        assert_eq!(bytes, kernel.bytes);
        for &at in all {
            let buffer = &memory.buffers[at];
            assert!(
                (buffer.first..=buffer.last).contains(&kernel.number),
                "{buffer:?} {kernel:?}"
            );
        }
    }
    let known = step
        .kernels
        .iter()
        .flat_map(|kernel| &kernel.fused)
        .filter(|it| it.operation.is_some());
    assert!(known.count() > 0, "operations are traced back to Burn's");
}

#[test]
fn measured_times_are_those_of_the_profile() {
    let profile = kiln::profile();
    let explain = train(CompileOptions::default().with_name("measured"), 6);
    let machine = kiln::explain::Machine {
        bytes_per_second: 1e12,
        caches: Vec::new(),
        flops_per_second: 1e13,
        threads: 1,
        gpu: None,
    };
    let explain = explain.with_times(&profile.summary(), Some(machine));
    let step = explain
        .report()
        .steps
        .iter()
        .find(|step| step.backend == "cpu")
        .unwrap();
    for kernel in &step.kernels {
        let seconds = kernel
            .seconds
            .unwrap_or_else(|| panic!("{kernel:?} was not timed"));
        assert!(seconds > 0.0 && kernel.machine_share.is_some());
    }
    let sum: f64 = step.kernels.iter().filter_map(|kernel| kernel.seconds).sum();
    assert!(
        sum <= step.mean_seconds().unwrap() * 6.0,
        "kernels are part of the step"
    );
}

#[test]
fn compile_times_name_every_stage() {
    train(CompileOptions::default().with_name("timed"), 3);
    let times = kiln::compile_times();
    let step = times
        .steps
        .iter()
        .find(|step| step.region == "timed" && step.backend == "cpu")
        .unwrap();
    let names: Vec<&str> = step.stages.iter().map(|stage| &*stage.name).collect();
    assert_eq!(names[..2], ["record", "import"]);
    assert_eq!(names.last(), Some(&"load"));
    if !step.from_cache {
        for stage in ["simplify", "schedule", "kernels", "plan", "emit", "cc"] {
            assert!(names.contains(&stage), "{stage} is missing in {names:?}");
        }
    }
    let table = times.to_string();
    assert!(table.contains("timed") && table.contains("total"), "{table}");
}
