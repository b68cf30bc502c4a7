//! Joint graphs with a known right choice, as text: see `tests/cases`.
//!
//! A case is a graph with phases, and in its comments the expected choice: `keeps:` lists the kept values as
//! type and operation, `recomputes:` the operations that run again, one word each time.
//! `below the peak recomputes:` lists operations that must be among those that run again under a budget one
//! byte below the peak of the unlimited choice. `launch seconds:` gives the machine launches that take so
//! long. Adding a case takes no code.
//!
//! The choices are those of a machine with slow memory: there a function of an f32 takes less time than to
//! write and read it.

use std::path::Path;

use kiln_graph::{Graph, verify};
use kiln_partition::{Frontier, Liveness, Machine, Options, Planner, Report, partition};

/// The list behind `key` in the comments of a case; none if it has no such line.
fn expected(text: &str, key: &str, separator: char) -> Option<Vec<String>> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("# {key}:")))?;
    let mut list: Vec<String> = line.split(separator).map(|item| item.trim().to_owned()).collect();
    list.retain(|item| !item.is_empty());
    list.sort();
    Some(list)
}

fn kept(report: &Report) -> Vec<String> {
    let mut list: Vec<String> = report
        .saved
        .iter()
        .map(|saved| format!("{} {}", saved.ty, saved.origin.op))
        .collect();
    list.sort();
    list
}

fn recomputed(report: &Report) -> Vec<String> {
    let words = report
        .recomputed
        .iter()
        .flat_map(|op| std::iter::repeat_n(op.op.clone(), op.count));
    let mut list: Vec<String> = words.collect();
    list.sort();
    list
}

#[test]
fn every_case_is_chosen_as_it_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("the folder of cases")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    assert!(files.len() >= 9, "the cases are there");
    let mut failures = String::new();
    for file in files {
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let text = std::fs::read_to_string(&file).expect("a readable case");
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let launch = expected(&text, "launch seconds", ';').unwrap_or_default();
        let options = Options {
            machine: Machine {
                bytes_per_second: 28e9,
                special_per_second: 9e9,
                launch_seconds: launch.first().map_or(0.0, |it| it.parse().expect("seconds")),
                ..Machine::default()
            },
            ..Options::default()
        };
        let partitioned = partition(&graph, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(verify(&partitioned.graph), Ok(()), "{name}");
        let report = &partitioned.report;
        for (key, separator, found) in [
            ("keeps", ';', kept(report)),
            ("recomputes", ',', recomputed(report)),
        ] {
            let expected =
                expected(&text, key, separator).unwrap_or_else(|| panic!("{name} says what it {key}"));
            if expected != found {
                failures += &format!("{name} {key} {found:?}, expected {expected:?}\n{report}\n");
            }
        }
        if let Some(must) = expected(&text, "below the peak recomputes", ',') {
            let peak = Liveness
                .peak(&partitioned.graph)
                .expect("liveness plans everything");
            let mut frontier = Frontier::new(&graph, &options, Liveness).expect("valid");
            let smaller = frontier
                .fit(peak - 1)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let found = recomputed(&smaller.report);
            if !must.iter().all(|op| found.contains(op)) {
                failures += &format!("{name} recomputes {found:?} below the peak, expected {must:?}\n");
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}
