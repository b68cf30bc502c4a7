//! The case files of the compiler (`kiln-compiler/tests/cases`), compiled for a GPU, run on the host, and
//! compared with the interpreter.
//!
//! The lines of a case that say what the compiler decides hold for the CPU's thresholds; here the results
//! count.

use std::fs;
use std::path::Path;

use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_graph::testing::random_arguments;
use kiln_graph::{DType, Graph, interpret_f64};

#[test]
fn cases() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kiln-compiler/tests/cases");
    let (mut count, mut wrong) = (0, Vec::new());
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let graph = Graph::parse(&body.join("\n")).unwrap_or_else(|error| panic!("{name}: {error}"));
        match check(&graph) {
            Ok(Outcome::Same) => count += 1,
            Ok(Outcome::Unsupported(why)) => wrong.push(format!("{name} is refused: {why}")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count >= 30, "the cases are gone: {count} are left");
}

fn check(graph: &Graph) -> Result<Outcome, String> {
    let (tensors, scalars) = random_arguments(graph, 1);
    let expected = interpret_f64(graph, &tensors, &scalars).unwrap();
    let tolerances: Vec<f64> = graph
        .outputs
        .iter()
        .zip(&expected)
        .map(|(output, expected)| {
            let largest = expected.to_f64s().iter().fold(0.0f64, |a, b| a.max(b.abs()));
            // What lies between is rounded to 16 bits too.
            let relative = match graph.dtype(output.value) {
                DType::F16 => 1e-3,
                DType::BF16 => 8e-3,
                _ => 1e-5,
            };
            1e-4f64.max(largest * relative)
        })
        .collect();
    Differential::new(graph)
        .arguments(tensors, scalars)
        .tolerances(&tolerances)
        .check()
}
