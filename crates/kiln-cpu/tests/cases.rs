//! The effect of passes on graphs, case by case: files in `kiln-compiler/tests/cases`.
//!
//! A file is a graph in its text form under lines that begin with `//`. Two kinds of those say what must come
//! out:
//!
//! ```text
//! //= after simplify: parameter exp mul        the operations left by the transforms, in order
//! //= kernels: exp reduce div | dot_general    the operations of each kernel, in the order in which they run
//! ```
//!
//! Every case is also compiled, run, and compared with the interpreter.

mod support;

use std::fs;
use std::path::Path;

use kiln_graph::testing::{difference, random_arguments};
use kiln_graph::{DType, Graph, interpret_f64};
use support::{Setup, build, run};

fn names(graph: &Graph) -> String {
    let names: Vec<&str> = graph.nodes().map(|(_, node)| node.op.name()).collect();
    names.join(" ")
}

#[test]
fn cases() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kiln-compiler/tests/cases");
    let mut count = 0;
    let mut wrong = Vec::new();
    let mut expect = |name: &str, actual: &str, expected: &str| {
        if actual != expected {
            wrong.push(format!("{name}:\n  got      {actual}\n  expected {expected}"));
        }
    };
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let graph = Graph::parse(&body.join("\n")).unwrap_or_else(|error| panic!("{name}: {error}"));
        let compiled = Setup::detect(2).compile(&graph).unwrap();
        for line in text.lines() {
            if let Some(expected) = line.strip_prefix("//= after simplify: ") {
                expect(&name, &names(&compiled.graph), expected);
            }
            if let Some(expected) = line.strip_prefix("//= kernels: ") {
                let kernels: Vec<String> = compiled
                    .schedule
                    .kernels
                    .iter()
                    .map(|kernel| {
                        let ops: Vec<&str> = kernel
                            .nodes
                            .iter()
                            .map(|&node| compiled.graph.node(node).op.name())
                            .collect();
                        ops.join(" ")
                    })
                    .collect();
                expect(&name, &kernels.join(" | "), expected);
            }
        }
        let (tensors, scalars) = random_arguments(&graph, 1);
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        let step = build(&graph, |_| ()).unwrap();
        let actual = run(&step, &graph, &tensors, &scalars, 2);
        for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let largest = expected.to_f64s().iter().fold(0.0f64, |a, b| a.max(b.abs()));
            // Values between are rounded to 16 bits too.
            let relative = match actual.ty().dtype {
                DType::F16 => 1e-3,
                DType::BF16 => 8e-3,
                _ => 1e-5,
            };
            if let Some(found) = difference(actual, expected, 1e-4f64.max(largest * relative)) {
                panic!("{name}: output {number}: {found}");
            }
        }
        count += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count >= 6, "the cases are gone");
}
