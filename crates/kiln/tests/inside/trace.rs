//! Traces, read back: nesting, order, arrows, sums.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use kiln::{CompileBackend, CompileOptions, Kiln};
use serde_json::Value;

use super::{device, format, train};

/// A slice of a trace, in nanoseconds.
#[derive(Clone, Debug)]
struct Slice {
    category: String,
    name: String,
    row: u64,
    begin: u64,
    end: u64,
    arguments: Value,
}

struct Trace {
    events: Vec<Value>,
    slices: Vec<Slice>,
    /// As Perfetto would show it.
    read: format::Read,
}

fn nanoseconds(value: &Value) -> u64 {
    (value.as_f64().unwrap() * 1000.0).round() as u64
}

/// Runs `program` under a profile; the trace it exports, and the profile.
fn profiled(program: impl FnOnce()) -> (Trace, kiln::Summary) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let profile = kiln::profile();
    program();
    profile.export_chrome_trace(&path).unwrap();
    let summary = profile.summary();
    let text = std::fs::read_to_string(&path).unwrap();
    let read = format::read(&text).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    let events = file["traceEvents"].as_array().unwrap().clone();
    let slices = events
        .iter()
        .filter(|event| event["ph"] == "X")
        .map(|event| Slice {
            category: event["cat"].as_str().unwrap().to_owned(),
            name: event["name"].as_str().unwrap().to_owned(),
            row: event["tid"].as_u64().unwrap(),
            begin: nanoseconds(&event["ts"]),
            end: nanoseconds(&event["ts"]) + nanoseconds(&event["dur"]),
            arguments: event["args"].clone(),
        });
    let slices = slices.collect();
    let trace = Trace { events, slices, read };
    (trace, summary)
}

impl Trace {
    fn of<'a>(&'a self, category: &'a str) -> impl Iterator<Item = &'a Slice> {
        self.slices.iter().filter(move |slice| slice.category == category)
    }

    fn inside<'a>(&'a self, outer: &'a Slice, category: &'a str) -> impl Iterator<Item = &'a Slice> {
        self.of(category)
            .filter(|slice| slice.row == outer.row && slice.begin >= outer.begin && slice.end <= outer.end)
    }
}

#[test]
fn slices_nest_and_come_in_order() {
    let (trace, _) = profiled(|| drop(train(CompileOptions::default().with_name("nested"), 6)));
    let times: Vec<u64> = trace
        .events
        .iter()
        .filter(|event| event["ph"] != "M")
        .map(|event| nanoseconds(&event["ts"]))
        .collect();
    assert!(times.is_sorted(), "events are in the order of time");
    let mut open: BTreeMap<u64, Vec<&Slice>> = BTreeMap::new();
    for slice in &trace.slices {
        let row = open.entry(slice.row).or_default();
        while row.last().is_some_and(|outer| outer.end <= slice.begin) {
            row.pop();
        }
        if let Some(outer) = row.last() {
            assert!(slice.end <= outer.end, "{slice:?} overlaps the end of {outer:?}");
        }
        row.push(slice);
    }
    let rows = trace.events.iter().filter(|event| event["name"] == "thread_name");
    assert!(rows.count() > 0, "rows have names");
}

#[test]
fn every_run_has_its_kernels() {
    let (trace, _) = profiled(|| drop(train(CompileOptions::default().with_name("runs"), 6)));
    let runs: Vec<&Slice> = trace.of("step").filter(|run| run.name == "runs").collect();
    assert_eq!(runs.len(), 6);
    for run in &runs {
        assert_eq!(run.arguments["backend"], "cpu");
        let kernels: Vec<&Slice> = trace.inside(run, "kernel").collect();
        assert_eq!(kernels.len() as u64, run.arguments["kernels"].as_u64().unwrap());
        let sum: u64 = kernels.iter().map(|kernel| kernel.end - kernel.begin).sum();
        assert!(sum <= run.end - run.begin, "kernels of one thread do not overlap");
        for kernel in &kernels {
            assert!(kernel.arguments["bytes"].as_u64().unwrap() > 0, "{kernel:?}");
            assert!(
                !kernel.arguments["fused"].as_array().unwrap().is_empty(),
                "{kernel:?}"
            );
        }
        assert!(
            kernels
                .iter()
                .any(|kernel| kernel.arguments["flop"].as_u64().unwrap() >= 2 * 16 * 32 * 8)
        );
        for phase in trace.inside(run, "phase") {
            let inside: Vec<_> = trace
                .inside(phase, "kernel")
                .filter(|it| it.arguments["phase"] != "")
                .collect();
            assert!(!inside.is_empty());
            for kernel in inside {
                assert_eq!(kernel.arguments["phase"], *phase.name);
            }
        }
    }
    let host: Vec<&str> = trace.of("host").map(|slice| &*slice.name).collect();
    for name in ["train step", "recording", "guard", "replay"] {
        assert!(host.contains(&name), "{name} is missing in {host:?}");
    }
    let stages: Vec<&str> = trace.of("compile").map(|slice| &*slice.name).collect();
    assert!(
        stages.contains(&"import") && stages.contains(&"load"),
        "{stages:?}"
    );
}

#[test]
fn kernels_lie_in_phases_phases_in_the_step_and_stages_in_the_compilation() {
    let (trace, _) = profiled(|| drop(train(CompileOptions::default().with_name("levels"), 6)));
    let slices = &trace.read.slices;
    let parent = |slice: &format::Slice| slice.parent.map(|parent| &*slices[parent].category);
    let of = |category: &'static str| slices.iter().filter(move |slice| slice.category == category);
    let caller = of("step").next().unwrap().thread;
    assert!(of("step").all(|step| step.thread == caller));
    let mut phases: Vec<&str> = of("phase").map(|phase| &*phase.name).collect();
    phases.sort_unstable();
    phases.dedup();
    assert_eq!(phases, ["backward", "forward", "optimizer"]);
    assert!(of("phase").all(|phase| parent(phase) == Some("step")));
    for kernel in of("kernel") {
        let expected = (kernel.thread == caller).then_some("phase");
        assert_eq!(parent(kernel), expected, "{kernel:?}");
    }
    let stages: Vec<&format::Slice> = of("compile").filter(|slice| slice.name != "compile").collect();
    assert!(!stages.is_empty());
    for stage in stages {
        assert_eq!(parent(stage), Some("compile"), "{stage:?}");
    }
    for (begin, end) in &trace.read.arrows {
        let ends = (&*slices[*begin].category, &*slices[*end].category);
        assert_eq!(ends, ("step", "kernel"));
    }
    assert!(trace.read.counters > 0);
}

#[test]
fn steps_of_two_threads_do_not_overlap_on_a_row() {
    // Reading the trace back checks it.
    let (trace, _) = profiled(|| {
        std::thread::scope(|scope| {
            for name in ["one", "other"] {
                scope.spawn(move || train(CompileOptions::default().with_name(name), 8));
            }
        });
    });
    let threads = |name: &str| trace.of("step").find(|run| run.name == name).map(|run| run.row);
    assert_ne!(threads("one"), threads("other"));
}

#[test]
fn arrows_lead_from_the_run_to_its_kernels() {
    let (trace, _) = profiled(|| drop(train(CompileOptions::default().with_name("arrows"), 5)));
    let ends = |phase: &str| -> BTreeMap<u64, (u64, u64)> {
        let events = trace.events.iter().filter(|event| event["ph"] == phase);
        events
            .map(|event| {
                let at = (event["tid"].as_u64().unwrap(), nanoseconds(&event["ts"]));
                (event["id"].as_u64().unwrap(), at)
            })
            .collect()
    };
    let (starts, finishes) = (ends("s"), ends("f"));
    assert_eq!(
        starts.len(),
        trace.of("kernel").count(),
        "one arrow for each kernel and piece of one"
    );
    assert!(starts.keys().eq(finishes.keys()), "every arrow has two ends");
    for (id, &(row, at)) in &starts {
        assert!(
            trace.of("step").any(|run| (run.row, run.begin) == (row, at)),
            "arrow {id} starts nowhere"
        );
        let (row, at) = finishes[id];
        assert!(
            trace
                .of("kernel")
                .any(|kernel| (kernel.row, kernel.begin) == (row, at)),
            "arrow {id} ends nowhere"
        );
    }
}

#[test]
fn the_memory_counter_is_the_plan() {
    let mut arena = 0;
    let (trace, _) = profiled(|| {
        let explain = train(CompileOptions::default().with_name("counter"), 4);
        arena = explain
            .report()
            .steps
            .iter()
            .filter_map(|step| Some(step.memory.as_ref()?.arena_bytes))
            .max()
            .unwrap();
    });
    let counters: Vec<u64> = trace
        .events
        .iter()
        .filter(|event| event["ph"] == "C" && event["name"] == "arena")
        .map(|event| event["args"]["bytes"].as_u64().unwrap())
        .collect();
    assert!(counters.iter().all(|&bytes| bytes <= arena));
    assert_eq!(counters.last(), Some(&0), "nothing is in use after a step");
    assert!(arena == 0 || counters.iter().any(|&bytes| bytes > 0));
}

#[test]
fn a_graph_break_is_an_instant_with_its_reason() {
    let (trace, _) = profiled(|| {
        let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
        let mut region = kiln::compile(options.with_name("broken"));
        let x = Tensor::<Kiln, 1>::ones([3], &device());
        region.run(|| x.clone() * x.clone().sum().into_scalar()).unwrap();
    });
    let found = trace
        .events
        .iter()
        .find(|event| event["ph"] == "i" && event["args"]["region"] == "broken");
    let found = found.expect("the break is in the trace");
    assert_eq!(found["cat"], "graph_break");
    assert!(
        found["args"]["break"].as_str().unwrap().contains("trace.rs"),
        "{found}"
    );
}

#[test]
fn the_summary_adds_up() {
    let (trace, summary) = profiled(|| {
        drop(train(CompileOptions::default().with_name("sums"), 5));
        let x = Tensor::<Kiln, 1>::ones([3], &device());
        let _ = (x.clone() + x).into_data();
    });
    let caller = trace
        .of("kernel")
        .filter(|kernel| trace.of("step").any(|run| run.row == kernel.row));
    let slices: u64 = caller.map(|kernel| kernel.end - kernel.begin).sum();
    let rows: f64 = summary.kernels.iter().map(|row| row.seconds).sum();
    assert!(
        (rows - slices as f64 * 1e-9).abs() < 1e-6,
        "{rows} s by kernel, {slices} ns in slices"
    );
    assert!((summary.kernels.iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-9);
    let eager: u64 = trace.of("eager").map(|slice| slice.end - slice.begin).sum();
    assert!(eager > 0, "an operation outside a region is in the profile");
    let operations: f64 = summary.operations.iter().map(|row| row.seconds).sum();
    assert!((operations - rows - eager as f64 * 1e-9).abs() < 1e-6);
    assert!(summary.kernels.is_sorted_by(|a, b| a.seconds >= b.seconds));
    assert_eq!(summary.runs, trace.of("step").count() as u64);
    let text = summary.to_string();
    assert!(
        text.contains("by kernel") && text.contains("by Burn operation"),
        "{text}"
    );
}

#[test]
fn nothing_is_collected_without_a_profile() {
    drop(train(CompileOptions::default().with_name("before"), 3));
    let (trace, _) = profiled(|| ());
    assert!(!trace.of("step").any(|run| run.name == "before"));
}
