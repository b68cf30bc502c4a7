//! Compares small kernels side by side in one launch with the interpreter, and compiles them for every
//! generation of GPUs.

mod common;

use std::fmt::Write as _;

use kiln_compiler::{Options, compile};
use kiln_cuda::CudaTarget;
use kiln_cuda::code::{CallKind, StepCode};
use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_graph::testing::random_arguments;
use kiln_graph::{DType, Graph, HostTensor};

/// Statistics of several widths, as a network with batch norm has: each layer has a sum over rows, a share
/// of it in a running value, and a product in between that is independent of both.
fn statistics(layers: usize) -> Graph {
    let (mut parameters, mut body, mut results) = (String::new(), String::new(), Vec::new());
    for layer in 0..layers {
        let width = 24 + 8 * layer;
        let (x, running) = (2 * layer, 2 * layer + 1);
        let _ = writeln!(parameters, "  %x{layer} = parameter {x} : f32[12,{width}]");
        let _ = writeln!(parameters, "  %r{layer} = parameter {running} : f32[{width}]");
        let _ = write!(
            body,
            "  %p{layer} = dot_general %x{layer}, %x{layer} {{a_contract=[0], b_contract=[0]}} : f32[{width},{width}]\n  \
             %s{layer} = reduce sum %x{layer} {{axes=[0]}} : f32[{width}]\n  \
             %b{layer} = broadcast %share {{dims=[]}} : f32[{width}]\n  \
             %t{layer} = mul %s{layer}, %b{layer} : f32[{width}]\n  \
             %n{layer} = add %r{layer}, %t{layer} : f32[{width}]\n  \
             %e{layer} = exp %t{layer} : f32[{width}]\n"
        );
        results.push(format!("%n{layer} (alias {running}), %p{layer}, %e{layer}"));
    }
    let text = format!(
        "graph @statistics {{\n{parameters}  %share = scalar 0 : f32[]\n{body}  return {}\n}}",
        results.join(", ")
    );
    Graph::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Launches of kernels, and how many of them are of several.
fn launches(code: &StepCode) -> (usize, usize) {
    let functions = code.calls.iter().filter_map(|call| match &call.kind {
        CallKind::Launch { function, .. } => Some(&code.functions[*function].name),
        _ => None,
    });
    let together = functions.clone().filter(|name| name.starts_with("beside"));
    (functions.count(), together.count())
}

#[test]
fn statistics_of_all_layers_are_few_launches() {
    let graph = statistics(5);
    let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
    let (all, together) = launches(&step.code);
    assert!(together > 0, "nothing is side by side");
    let products = step.code.calls.len() - all;
    assert!(
        all < step.kernels.len() - products,
        "{all} launches of {} kernels",
        step.kernels.len()
    );
    common::machine_code(&step.code);
    for seed in 0..3 {
        let (tensors, scalars) = random_arguments(&graph, seed);
        let comparison = Differential::new(&graph).arguments(tensors, scalars);
        assert_eq!(comparison.check(), Ok(Outcome::Same), "seed {seed}");
    }
    // Each kernel has the name of its launch.
    let named = |kernel: &kiln_compiler::report::KernelReport| {
        let name = &kernel.name;
        name.starts_with("product") || step.code.functions.iter().any(|function| function.name == *name)
    };
    assert!(step.kernels.iter().all(named));
}

/// Normalisation by running statistics after a look at indices: small kernels of one block that wait for
/// each other, some of which overwrite arguments.
#[test]
fn kernels_of_one_block_take_turns_and_those_that_overwrite_look_at_the_mark() {
    let layer = |layer: usize, width: usize| {
        let first = 3 * layer + 2;
        let parameters = format!(
            "  %x{layer} = parameter {first} : f32[96,{width}]\n  %m{layer} = parameter {} : f32[{width}]\n  \
             %v{layer} = parameter {} : f32[{width}]\n",
            first + 1,
            first + 2
        );
        let body = format!(
            "  %s{layer} = reduce sum %x{layer} {{axes=[0]}} : f32[{width}]\n  \
             %q{layer} = mul %x{layer}, %x{layer} : f32[96,{width}]\n  \
             %t{layer} = reduce sum %q{layer} {{axes=[0]}} : f32[{width}]\n  \
             %f{layer} = broadcast %share {{dims=[]}} : f32[{width}]\n  \
             %mean{layer} = mul %s{layer}, %f{layer} : f32[{width}]\n  \
             %newm{layer} = add %m{layer}, %mean{layer} : f32[{width}]\n  \
             %w{layer} = mul %t{layer}, %f{layer} : f32[{width}]\n  \
             %square{layer} = mul %mean{layer}, %mean{layer} : f32[{width}]\n  \
             %both{layer} = add %w{layer}, %square{layer} : f32[{width}]\n  \
             %root{layer} = sqrt %both{layer} : f32[{width}]\n  \
             %newv{layer} = add %v{layer}, %both{layer} : f32[{width}]\n  \
             %mb{layer} = broadcast %mean{layer} {{dims=[1]}} : f32[96,{width}]\n  \
             %rb{layer} = broadcast %root{layer} {{dims=[1]}} : f32[96,{width}]\n  \
             %c{layer} = sub %x{layer}, %mb{layer} : f32[96,{width}]\n  \
             %y{layer} = mul %c{layer}, %rb{layer} : f32[96,{width}]\n"
        );
        let results = format!(
            "%newm{layer} (alias {}), %newv{layer} (alias {}), %y{layer}",
            first + 1,
            first + 2
        );
        (parameters, body, results)
    };
    let layers: Vec<_> = [40, 48, 72]
        .into_iter()
        .enumerate()
        .map(|(at, width)| layer(at, width))
        .collect();
    let all =
        |part: fn(&(String, String, String)) -> &String| layers.iter().map(part).cloned().collect::<Vec<_>>();
    let text = format!(
        "graph @normalised {{\n  %table = parameter 0 : f32[30,8]\n  %at = parameter 1 : i32[5]\n{}  %share = scalar 0 : f32[]\n  \
         %rows = index_select %table, %at {{axis=0}} : f32[5,8]\n{}  return %rows, {}\n}}",
        all(|layer| &layer.0).concat(),
        all(|layer| &layer.1).concat(),
        all(|layer| &layer.2).join(", ")
    );
    let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
    let functions: Vec<_> = step.code.functions.iter().collect();
    let together = functions
        .iter()
        .filter(|function| function.name.starts_with("beside"));
    assert!(together.count() > 0, "nothing is side by side");
    common::machine_code(&step.code);
    let (mut tensors, scalars) = random_arguments(&graph, 5);
    tensors[1] = HostTensor::from_ints(DType::I32, [5], [0, 29, 3, 3, 7]);
    let comparison = Differential::new(&graph).arguments(tensors.clone(), scalars.clone());
    assert_eq!(comparison.check(), Ok(Outcome::Same));
    // An index out of range stops the step before it overwrites an argument.
    tensors[1] = HostTensor::from_ints(DType::I32, [5], [0, 30, 3, 3, 7]);
    common::stops_unchanged(&step, &tensors, &scalars);
}
