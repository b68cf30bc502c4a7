//! Every compiler of this machine besides the usual one on the widest instructions that this machine has, and
//! one of GCC and of Clang on each narrower set: the trial of a compiler, random graphs over every primitive,
//! and the cases of `kiln-compiler/tests/cases`. A compiler that is not installed is skipped with a message.
//!
//! Other test programs run with the compiler that `$CC` names; `tests/kernels` does so in continuous
//! integration with the oldest Clang.

mod support;

use std::fs;
use std::path::Path;

use kiln_cpu::{Cache, Toolchain, try_compiler};
use kiln_graph::testing::{Family, GraphConfig, difference, random_arguments};
use kiln_graph::{DType, Graph, interpret_f64};
use support::{append, batch, build_with, run};

/// The compilers that users may have. Versions in wide use come first.
const COMPILERS: [&str; 14] = [
    "gcc-12", "gcc-14", "clang-14", "clang-16", "clang-19", "gcc-11", "gcc-13", "gcc-15", "clang-13",
    "clang-15", "clang-17", "clang-18", "clang-20", "clang-21",
];

/// Those of [`COMPILERS`] that run, restricted to fewer instructions by `argument`. Where `argument` takes
/// instructions away, only the first of GCC and the first of Clang.
fn compilers(argument: &str) -> Vec<Toolchain> {
    let found = |name: &&str, argument: &str| {
        let found = Toolchain::from_candidates(&[format!("{name} {argument}")]);
        if let Err(error) = &found {
            eprintln!("not tested: {error}");
        }
        found.ok()
    };
    let mut kinds = Vec::new();
    let chosen = COMPILERS.iter().filter_map(|name| {
        let restricted = found(name, argument)?;
        let kind = name.split('-').next().unwrap();
        if restricted.isa() != found(name, "")?.isa() && kinds.contains(&kind) {
            return None;
        }
        kinds.push(kind);
        Some(restricted)
    });
    chosen.collect()
}

/// Random graphs over every primitive, half as many for `narrow` instructions, and the graphs of
/// `kiln-compiler/tests/cases`, each as one step, and how far its outputs may be off.
fn steps(narrow: bool) -> Vec<(Graph, Vec<f64>)> {
    let mut simple = GraphConfig {
        families: vec![
            Family::Pointwise,
            Family::Reduce,
            Family::Movement,
            Family::Index,
            Family::Random,
        ],
        floats: vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16],
        ..GraphConfig::default()
    };
    simple.steps = 25;
    let mut kernels = simple.clone();
    kernels.families = vec![
        Family::Dot,
        Family::Conv,
        Family::Pool,
        Family::Sort,
        Family::Attention,
    ];
    kernels.floats = vec![DType::F32];
    let mut cases = (Graph::new("cases"), Vec::new());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kiln-compiler/tests/cases");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.collect();
    files.sort();
    for path in files {
        let text = fs::read_to_string(&path).unwrap();
        let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let graph = Graph::parse(&body.join("\n")).unwrap();
        for output in &graph.outputs {
            // Tolerances are relative to the largest element where values between are rounded to 16 bits.
            let halves = graph.values().any(|(value, _)| graph.dtype(value).size() == 2);
            cases.1.push(match graph.dtype(output.value) {
                DType::BF16 => -1.6e-2,
                DType::F16 => -2e-3,
                _ if halves => -8e-3,
                _ => -2e-5,
            });
        }
        append(&mut cases.0, &graph);
    }
    assert!(cases.1.len() >= 30, "the cases are gone");
    let part = if narrow { 2 } else { 1 };
    vec![
        batch(4000, 6 / part, &simple),
        batch(4100, 8 / part, &kernels),
        cases,
    ]
}

/// Tries each compiler with `argument`, which leaves it the instruction set `isa` where this machine has
/// that.
fn try_all(argument: &str, isa: &str) {
    let steps = steps(!argument.is_empty());
    let prepared: Vec<_> = steps
        .iter()
        .map(|(graph, tolerances)| {
            let arguments = random_arguments(graph, 7);
            let expected = interpret_f64(graph, &arguments.0, &arguments.1).unwrap();
            (graph, tolerances, arguments, expected)
        })
        .collect();
    for toolchain in compilers(argument) {
        if toolchain.isa().to_string() != isa {
            eprintln!("not tested: {} has no {isa} here", toolchain.command());
            continue;
        }
        let name = format!("{} ({isa})", toolchain.version());
        try_compiler(&toolchain, &Cache::disabled()).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (graph, tolerances, (tensors, scalars), expected) in &prepared {
            let step =
                build_with(&toolchain, graph, |_| ()).unwrap_or_else(|error| panic!("{name}: {error}"));
            let actual = run(&step, graph, tensors, scalars, 2);
            for (number, (actual, expected)) in actual.iter().zip(expected).enumerate() {
                // A negative one is relative.
                let largest = expected.to_f64s().iter().fold(0.0f64, |a, b| a.max(b.abs()));
                let tolerance = match tolerances[number] {
                    relative if relative < 0.0 => 1e-4f64.max(largest * -relative),
                    absolute => absolute,
                };
                if let Some(found) = difference(actual, expected, tolerance) {
                    panic!("{name}: output {number} of `{}`: {found}", graph.name);
                }
            }
        }
        eprintln!("tested: {name}");
    }
}

#[test]
fn avx512() {
    try_all("", "avx512");
}

#[test]
fn avx2() {
    try_all("-mno-avx512f", "avx2");
}

#[test]
fn sse2() {
    try_all("-mno-avx", "sse2");
}
