//! Products by Kiln's own template for Hopper, in pieces and with what follows them, on a machine without a
//! GPU: that they are chosen, that NVRTC compiles them, and that other devices compute the same in two
//! kernels. `device_steps.rs` runs them.

mod behind;
mod common;

use kiln_compiler::schedule::KernelKind;
use kiln_compiler::{Options, compile};
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::code::{CallKind, Pointer, StepCall, StepCode};
use kiln_cuda::emit::product::padded::Padding;
use kiln_cuda::emit::product::warpgroups::Warpgroups;
use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_cuda::{CudaStep, CudaTarget};
use kiln_graph::{DType, Graph, HostTensor};

fn code(graph: &Graph, warpgroups: Warpgroups) -> StepCode {
    let target = CudaTarget {
        warpgroups,
        ..CudaTarget::default()
    };
    compile(graph, &Options::default(), &target).unwrap().code
}

/// Launches that take matrices of the copy engine, on either side of a choice.
fn own_products(code: &StepCode) -> usize {
    let is_own = |call: &CallKind| {
        matches!(call, CallKind::Launch { arguments, .. }
            if arguments.iter().any(|argument| matches!(argument, Pointer::Copied(..))))
    };
    let sides = |call: &CallKind| match call {
        CallKind::Either { own, .. } => own.iter().filter(|call| is_own(call)).count(),
        call => usize::from(is_own(call)),
    };
    code.calls.iter().map(|call| sides(&call.kind)).sum()
}

/// Steps of which every other one is of the other type: where what is compiled or run takes long, and types
/// make no other kernels.
fn in_turn(steps: impl Fn(&str) -> Vec<Graph>) -> impl Iterator<Item = Graph> {
    let both = steps("bf16").into_iter().zip(steps("f16")).enumerate();
    both.map(|(number, (one, other))| if number % 2 == 0 { one } else { other })
}

#[test]
fn a_nest_and_its_product_are_one_kernel() {
    for dtype in ["bf16", "f16"] {
        for graph in behind::nests(dtype) {
            let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
            let products = graph
                .nodes()
                .filter(|(_, node)| node.op.name() == "dot_general")
                .count();
            assert_eq!(step.schedule.kernels.len(), products, "{}", graph.name);
            assert_eq!(
                step.code.calls.len(),
                products,
                "{}: {:?}",
                graph.name,
                step.code.calls
            );
            // A product of less than a GFLOP with nothing behind it is the library's.
            assert_eq!(own_products(&step.code), 1, "{}", graph.name);
        }
    }
}

#[test]
fn where_the_template_is_not_product_and_nest_follow_each_other() {
    for graph in in_turn(behind::nests) {
        assert_eq!(own_products(&code(&graph, Warpgroups::Never)), 0);
        let outcome = Differential::new(&graph).check();
        assert!(
            matches!(outcome, Ok(Outcome::Same)),
            "{}: {outcome:?}",
            graph.name
        );
    }
}

/// What is cut off to 16 bits is a number of 16 bits: neighbours that are stored one by one are rounded as
/// those that are stored together.
#[test]
fn neighbours_apart_are_rounded() {
    let code = code(&behind::placed("bf16"), Warpgroups::WherePays);
    assert_eq!(own_products(&code), 1);
    let mut stored = 0;
    for body in code.functions.iter().map(|function| &function.text.body) {
        for part in body.split("kiln_upper(").skip(1) {
            let name = part.split(')').next().unwrap();
            let (_, definition) = body.split_once(&format!("const float {name} = ")).unwrap();
            assert!(definition.starts_with("kiln_rounded<kiln_bf16>("), "{body}");
            stored += 1;
        }
    }
    assert_eq!(stored, 1);
}

#[test]
fn sums_of_columns_follow_the_product_that_makes_them() {
    for dtype in ["bf16", "f16"] {
        for behind::Summed { graph, .. } in behind::sums(dtype) {
            let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
            let name = &graph.name;
            let sums_alone = |step: &CudaStep| {
                let kernels = step.schedule.kernels.iter();
                let mut nests = kernels.filter_map(|kernel| match &kernel.kind {
                    KernelKind::Nest(nest) => Some(nest),
                    _ => None,
                });
                nests.any(|nest| !nest.late.is_empty())
            };
            assert!(!sums_alone(&step), "{name}");
            assert_eq!(own_products(&step.code), 1, "{name}");
            assert_eq!(own_products(&code(&graph, Warpgroups::Never)), 0, "{name}");
            let other = CudaTarget {
                capability: (8, 0),
                ..CudaTarget::default()
            };
            let other = compile(&graph, &Options::default(), &other).unwrap();
            assert!(sums_alone(&other), "{name}");
        }
    }
}

#[test]
fn what_follows_a_convolution_of_windows_is_in_its_kernel() {
    for dtype in ["bf16", "f16"] {
        for behind::Summed { graph, .. } in behind::windows(dtype) {
            let name = &graph.name;
            assert_eq!(own_products(&code(&graph, Warpgroups::WherePays)), 1, "{name}");
            assert_eq!(own_products(&code(&graph, Warpgroups::Never)), 0, "{name}");
            let other = CudaTarget {
                capability: (8, 0),
                ..CudaTarget::default()
            };
            let kernels = |target: &CudaTarget| {
                let step = compile(&graph, &Options::default(), target).unwrap();
                step.schedule.kernels.len()
            };
            assert!(kernels(&CudaTarget::default()) < kernels(&other), "{name}");
        }
    }
}

#[test]
fn convolutions_of_windows_are_offered_beside_the_library() {
    for dtype in ["bf16", "f16"] {
        for behind::Summed { graph, .. } in behind::windows_alone(dtype) {
            let own = |target: CudaTarget| {
                let step = compile(&graph, &Options::default(), &target).unwrap();
                own_products(&step.code)
            };
            let always = CudaTarget {
                warpgroups: Warpgroups::Always,
                ..CudaTarget::default()
            };
            let name = &graph.name;
            assert_eq!(own(always.clone()), 1, "{name}");
            let small = CudaTarget {
                warpgroups: Warpgroups::WherePays,
                ..CudaTarget::default()
            };
            assert_eq!(own(small), 0, "{name}");
            let other = CudaTarget {
                capability: (8, 0),
                ..always
            };
            assert_eq!(own(other), 0, "{name}");
        }
    }
}

/// One group multiplies where threads that finish have turns ahead and the product is not deep; elsewhere two
/// do.
#[test]
fn short_products_leave_warps_to_finish() {
    let groups = |graph: &Graph| {
        let code = code(graph, Warpgroups::WherePays);
        let says = |groups: u64| {
            let text = format!("GROUPS = {groups},");
            let mut functions = code.functions.iter();
            functions.any(|function| function.text.helpers.contains(&text))
        };
        [1, 2].map(says)
    };
    for dtype in ["bf16", "f16"] {
        for behind::Summed { graph, .. } in behind::sums::of_one_group(dtype) {
            assert_eq!(groups(&graph), [true, false], "{}", graph.name);
        }
        // A deep product, one that a single tensor meets, and narrow columns.
        let others = [
            "residuals_264",
            "bias_gradient",
            "statistics_64_256",
            "gradient_104_32_1",
        ];
        let named = |name: &str| {
            behind::sums(dtype)
                .into_iter()
                .find(|summed| summed.graph.name == name)
        };
        for name in others {
            assert_eq!(groups(&named(name).unwrap().graph), [false, true], "{name}");
        }
    }
}

#[test]
fn where_the_template_is_not_sums_are_of_what_is_stored() {
    // One of each kind.
    for (dtype, cases) in [("bf16", [1, 8]), ("f16", [5, 12])] {
        let all = behind::sums(dtype).into_iter().enumerate();
        for (_, summed) in all.filter(|(case, _)| cases.contains(case)) {
            let differential = Differential::new(&summed.graph);
            let outcome = differential.tolerances(&summed.tolerances).check();
            let name = &summed.graph.name;
            assert!(matches!(outcome, Ok(Outcome::Same)), "{name}: {outcome:?}");
        }
    }
}

#[test]
fn products_alone_are_offered_beside_the_library() {
    let graph = behind::products("bf16");
    assert_eq!(own_products(&code(&graph, Warpgroups::Always)), 6);
    assert_eq!(own_products(&code(&graph, Warpgroups::WherePays)), 0);
    let odd = "graph @odd {
      %a = parameter 0 : bf16[390,203]
      %b = parameter 1 : bf16[203,264]
      %c = parameter 2 : bf16[200,390]
      %d = parameter 3 : bf16[390,261]
      %x = dot_general %a, %b {a_contract=[1], b_contract=[0]} : bf16[390,264]
      %y = dot_general %c, %d {a_contract=[1], b_contract=[0]} : bf16[200,261]
      return %x, %y
    }";
    // Rows that begin at no multiple of sixteen bytes, and results of no whole vectors.
    assert_eq!(
        own_products(&code(&Graph::parse(odd).unwrap(), Warpgroups::Always)),
        0
    );
    let other = CudaTarget {
        capability: (8, 0),
        warpgroups: Warpgroups::Always,
        ..CudaTarget::default()
    };
    let step = compile(&graph, &Options::default(), &other).unwrap();
    assert_eq!(
        own_products(&step.code),
        0,
        "an instruction of another generation"
    );
}

#[test]
fn products_that_share_an_operand_or_are_added_up_are_one() {
    for dtype in ["bf16", "f16"] {
        for joined in behind::joined(dtype) {
            let code = code(&joined.graph, Warpgroups::Always);
            assert_eq!(own_products(&code), joined.kernels, "{}", joined.graph.name);
            let others = code
                .calls
                .iter()
                .filter(|call| matches!(call.kind, CallKind::Product { .. }));
            assert_eq!(others.count(), 0, "{}", joined.graph.name);
        }
    }
}

/// The library's side of a product in pieces copies matrices to working memory, which is other values' before
/// and after: it is no working memory of products alone, and orders them.
#[test]
fn copies_of_pieces_keep_away_from_values_in_the_same_memory() {
    let graph = Graph::parse(
        "graph @beside {
          %v = parameter 0 : f32[8704,1024]
          %e = exp %v : f32[8704,1024]
          %c = cumulative sum %e {axis=1} : f32[8704,1024]
          %x = parameter 1 : bf16[2047,64]
          %q = parameter 2 : bf16[64,512]
          %k = parameter 3 : bf16[64,512]
          %qx = dot_general %x, %q {a_contract=[1], b_contract=[0]} : bf16[2047,512]
          %kx = dot_general %x, %k {a_contract=[1], b_contract=[0]} : bf16[2047,512]
          return %qx, %kx, %c
        }",
    )
    .unwrap();
    let mut differential = Differential::new(&graph);
    differential.target = CudaTarget {
        warpgroups: Warpgroups::Always,
        padding: Padding::Always,
        ..CudaTarget::default()
    };
    let code = differential.compile().unwrap().code;
    let copies = |call: &StepCall| {
        matches!(&call.kind, CallKind::Either { library, .. }
            if library.iter().filter(|call| matches!(call, CallKind::Launch { .. })).count() >= 2)
    };
    assert!(code.calls.iter().any(copies), "{:?}", code.calls);

    // In the order of calls, and with the product in front of what has its memory before it.
    assert_eq!(differential.check(), Ok(Outcome::Same));
}

#[test]
fn where_the_template_is_not_pieces_are_products_of_their_own() {
    for dtype in ["bf16", "f16"] {
        for joined in behind::joined(dtype) {
            let graph = &joined.graph;
            assert_eq!(own_products(&code(graph, Warpgroups::Never)), 0);
            let mut differential = Differential::new(graph);
            if let Some(tolerances) = joined.tolerances {
                differential = differential.tolerances(tolerances);
            }
            let outcome = differential.check();
            assert!(
                matches!(outcome, Ok(Outcome::Same)),
                "{}: {outcome:?}",
                graph.name
            );
        }
    }
}

/// A kernel has room for so many matrices: of more pieces the concatenation is made, and more products that
/// share an operand are several.
#[test]
fn a_kernel_reads_a_few_matrices() {
    let most = |text: &str| {
        let code = code(&Graph::parse(text).unwrap(), Warpgroups::Always);
        let matrices = |call: &CallKind| match call {
            CallKind::Launch { arguments, .. } => arguments
                .iter()
                .filter(|argument| matches!(argument, Pointer::Copied(..)))
                .count(),
            _ => 0,
        };
        let calls = code.calls.iter().map(|call| match &call.kind {
            CallKind::Either { own, .. } => own.iter().map(matrices).max().unwrap_or(0),
            call => matrices(call),
        });
        calls.max().unwrap_or(0)
    };
    let numbered = |count: usize, line: &dyn Fn(usize) -> String| (0..count).map(line).collect::<String>();
    let names = |name: &str, count: usize| {
        let names: Vec<String> = (0..count).map(|at| format!("%{name}{at}")).collect();
        names.join(", ")
    };
    for (pieces, expected) in [(24, 25), (25, 2)] {
        let text = format!(
            "graph @pieces {{\n{}%x = parameter {pieces} : bf16[256,64]\n\
             %w = concat {} {{axis=1}} : bf16[64,{wide}]\n\
             %y = dot_general %x, %w {{a_contract=[1], b_contract=[0]}} : bf16[256,{wide}]\nreturn %y\n}}",
            numbered(pieces, &|at| format!("%w{at} = parameter {at} : bf16[64,512]\n")),
            names("w", pieces),
            wide = 512 * pieces,
        );
        assert_eq!(most(&text), expected, "{pieces} pieces");
    }
    let shared = format!(
        "graph @shared {{\n%x = parameter 0 : bf16[256,64]\n{}return {}\n}}",
        numbered(30, &|at| {
            format!(
                "%w{at} = parameter {} : bf16[64,512]\n\
                 %y{at} = dot_general %x, %w{at} {{a_contract=[1], b_contract=[0]}} : bf16[256,512]\n",
                at + 1
            )
        }),
        names("y", 30),
    );
    assert_eq!(most(&shared), 25, "shared");
}

/// The terms of a product in pieces along its depth may be larger than any number of f16, and their sum not.
#[test]
fn terms_are_added_before_they_are_rounded() {
    let graph = Graph::parse(
        "graph @terms {
          %a = parameter 0 : f16[1304,48]
          %b = parameter 1 : f16[1304,48]
          %u = parameter 2 : f16[48,1288]
          %v = parameter 3 : f16[48,1288]
          %l = concat %a, %b {axis=1} : f16[1304,96]
          %r = concat %u, %v {axis=0} : f16[96,1288]
          %y = dot_general %l, %r {a_contract=[1], b_contract=[0]} : f16[1304,1288]
          return %y
        }",
    )
    .unwrap();
    let full = |rows: usize, columns: usize, number: f64| {
        let numbers = std::iter::repeat_n(number, rows * columns);
        HostTensor::from_floats(DType::F16, [rows, columns], numbers)
    };
    let tensors = vec![
        full(1304, 48, 40.0),
        full(1304, 48, -40.0),
        full(48, 1288, 40.0),
        full(48, 1288, 40.0),
    ];
    // The template where it is tried, elsewhere products of the pieces.
    let differential = Differential::new(&graph).arguments(tensors, Vec::new());
    let code = differential.compile().unwrap().code;
    let products = code
        .calls
        .iter()
        .filter(|call| !matches!(call.kind, CallKind::Launch { .. }));
    assert_eq!(products.count(), 2, "{:?}", code.calls);
    assert_eq!(differential.check(), Ok(Outcome::Same));
}

#[test]
fn nvrtc_compiles_them() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let compiler = Compiler::new(nvrtc, (9, 0), Store::disabled()).unwrap();
    let steps = in_turn(|dtype| {
        let alone = [behind::products(dtype), behind::placed(dtype)];
        let joined = behind::joined(dtype).into_iter().map(|joined| joined.graph);
        let summed = [behind::sums, behind::windows, behind::windows_alone].into_iter();
        let summed = summed.flat_map(|graphs| graphs(dtype));
        let summed = summed.map(|summed| summed.graph);
        let steps = behind::nests(dtype).into_iter().chain(alone);
        steps.chain(joined).chain(summed).collect()
    });
    for graph in steps {
        let (sources, _) = code(&graph, Warpgroups::Always).sources();
        let compiled = compiler.compile(&sources);
        compiled.unwrap_or_else(|error| panic!("{}: {error}", graph.name));
    }
}
