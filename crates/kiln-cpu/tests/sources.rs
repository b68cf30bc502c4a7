//! The generated C under a strict compiler: steps are built with warnings off, so code that newer compilers
//! reject would go unnoticed.

use std::fs;
use std::path::Path;
use std::process::Command;

use kiln_compiler::{Options, compile};
use kiln_cpu::abi::{RUNTIME_HEADER, RUNTIME_HEADER_NAME};
use kiln_cpu::{BuildOptions, CpuTarget, SourceFile, Toolchain};
use kiln_graph::testing::{Family, GraphConfig, random_graph};
use kiln_graph::{DType, Graph};
use kiln_partition::testing::{Sizes, decoder_step};

/// Mistakes that newer compilers take for errors by default. Vectors that the machine has in pieces are
/// handed from one file to another of the same build only.
const STRICT: &str = "-Wall -Wno-psabi -Wno-unused -Wno-unknown-pragmas -Wno-tautological-compare -Werror=incompatible-pointer-types \
                      -Werror=implicit-function-declaration -Werror=int-conversion -Werror=implicit-int -Werror=return-type";

/// The compiler's messages about the sources of `graph`, checked with its own flags but with warnings on;
/// empty if there are none.
fn complaints(graph: &Graph) -> String {
    let toolchain = Toolchain::detect().unwrap();
    let sources = compile(graph, &Options::default(), &CpuTarget::new(&toolchain, 2))
        .unwrap()
        .code;
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &SourceFile| fs::write(folder.path().join(&file.name), &file.text).unwrap();
    sources.iter().for_each(write);
    write(&SourceFile::new(RUNTIME_HEADER_NAME, RUNTIME_HEADER));
    let commands = toolchain.build_commands(&sources, &BuildOptions::default());
    let compiling: Vec<&String> = commands.iter().filter(|it| it.contains(" -w -c ")).collect();
    assert!(
        !compiling.is_empty(),
        "no command is as this test expects: {commands:?}"
    );
    let mut all = String::new();
    for command in compiling {
        let command = command.replace(" -w -c ", &format!(" {STRICT} -fsyntax-only "));
        let output = Command::new("sh")
            .args(["-c", &command])
            .current_dir(folder.path())
            .output()
            .unwrap();
        all.push_str(&String::from_utf8_lossy(&output.stderr));
    }
    all
}

fn check(graph: &Graph) {
    let complaints = complaints(graph);
    assert!(complaints.is_empty(), "{}: {complaints}", graph.name);
}

#[test]
fn cases_are_valid_c() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kiln-compiler/tests/cases");
    for entry in fs::read_dir(folder).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        check(&Graph::parse(&body.join("\n")).unwrap());
    }
}

#[test]
fn random_graphs_and_a_training_step_are_valid_c() {
    for (seed, family) in [
        Family::Dot,
        Family::Conv,
        Family::Pool,
        Family::Sort,
        Family::Index,
    ]
    .into_iter()
    .enumerate()
    {
        let config = GraphConfig {
            families: vec![family, Family::Pointwise],
            floats: vec![DType::F32, DType::F64, DType::F16, DType::BF16],
            ..GraphConfig::default()
        };
        check(&random_graph(seed as u64, &config).graph);
    }
    let sizes = Sizes {
        layers: 1,
        batch: 2,
        length: 9,
        width: 32,
        heads: 2,
        hidden: 48,
        vocabulary: 40,
        keep: 0.8,
    };
    check(&decoder_step(sizes).graph);
}
