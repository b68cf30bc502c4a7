//! Random graphs over every primitive, compiled for a GPU, run on the host, and compared with the
//! interpreter.

mod common;
#[path = "../../kiln-compiler/tests/targets/numbers.rs"]
mod numbers;
mod support;

use kiln_compiler::Options;
use kiln_cuda::CudaTarget;
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::code::StepCode;
use kiln_cuda::testing::host::{Differential, HostStep, Outcome, differential};
use kiln_graph::testing::{Family, GraphConfig, special_arguments};
use kiln_graph::{DType, Graph, HostTensor, Op, Provenance, Scalar};
use support::Batch;

fn nests() -> GraphConfig {
    let mut config = GraphConfig::of(&[
        Family::Pointwise,
        Family::Reduce,
        Family::Movement,
        Family::Index,
        Family::Random,
    ]);
    config.floats = vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16];
    config.ints = vec![
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
    ];
    config.steps = 25;
    config
}

fn not_fused() -> Options {
    Options {
        fuse: false,
        ..Options::default()
    }
}

/// Operations that loop nests compute, over all types.
#[test]
fn nests_compute_what_the_interpreter_does() {
    for seed in 0..2 {
        let what = format!("seeds from {}", 1000 * seed);
        let options = Options::default();
        Batch::new(1000 * seed..1000 * seed + 8, &nests(), &options).check(&what, &options);
    }
}

#[test]
fn nests_that_are_not_fused() {
    let options = not_fused();
    Batch::new(3000..3008, &nests(), &options).check("not fused", &options);
}

/// Larger tensors: several blocks, whole vectors, long rows.
#[test]
fn large_nests() {
    let mut config = GraphConfig::of(&[Family::Pointwise, Family::Reduce, Family::Movement]);
    config.max_elements = 60_000;
    config.steps = 20;
    let options = Options::default();
    Batch::new(500..506, &config, &options).check("large", &options);
}

/// Operations that share their operands, as a model's do: more of them end up in one kernel.
#[test]
fn operations_that_belong_together() {
    for (number, max_elements) in [120, 3_000, 20_000].into_iter().enumerate() {
        let config = GraphConfig::of_a_step(max_elements);
        let (first, options) = (5000 + 100 * number as u64, Options::default());
        Batch::new(first..first + 8, &config, &options).check("together", &options);
    }
}

#[test]
fn not_a_number_and_negative_zero() {
    let options = Options::default();
    let rows = GraphConfig::of(&[Family::Pointwise, Family::Reduce, Family::Movement]);
    let others = GraphConfig::of(&[Family::Pool, Family::Sort, Family::Index]);
    for (config, first) in [(rows, 40), (others, 90)] {
        let batch = Batch::new(first..first + 10, &config, &options);
        let (tensors, scalars) = special_arguments(&batch.graph, 5);
        let outcome = Differential::new(&batch.graph)
            .arguments(tensors, scalars)
            .tolerances(&batch.tolerances)
            .check();
        assert_eq!(outcome, Ok(Outcome::Same), "seeds from {first}");
    }
}

/// `count` graphs with operations of `family`, of which none may be refused.
fn family(family: Family, count: u64) {
    let options = Options::default();
    batch_of(family, count).check(&format!("{family:?}"), &options);
}

fn batch_of(family: Family, count: u64) -> Batch {
    let mut config = GraphConfig::of(&[family, Family::Pointwise]);
    config.floats = vec![DType::F32, DType::F64, DType::F16, DType::BF16];
    let first = 100 * family as u64;
    Batch::new(first..first + count, &config, &Options::default())
}

#[test]
fn products() {
    family(Family::Dot, 14);
}

#[test]
fn convolutions() {
    family(Family::Conv, 12);
}

/// What surrounds the calls of cuDNN, whose place plain loops take on the host.
#[test]
fn convolutions_of_the_library() {
    let target = CudaTarget {
        cudnn: true,
        ..CudaTarget::default()
    };
    batch_of(Family::Conv, 12).check_on(target, "in the library", &Options::default());
}

#[test]
fn pools() {
    family(Family::Pool, 12);
}

#[test]
fn sorts() {
    family(Family::Sort, 14);
}

#[test]
fn attentions() {
    family(Family::Attention, 5);
}

/// What the shared tests compare. Threads in either order must give the same bits.
fn results_of(graph: &Graph, tensors: &[HostTensor], scalars: &[Scalar]) -> Vec<HostTensor> {
    let comparison = Differential::new(graph).arguments(tensors.to_vec(), scalars.to_vec());
    let host = HostStep::of(&comparison.compile().unwrap()).unwrap();
    let results = comparison.run(&host).unwrap();
    let backward = comparison.run(&host.backward(true)).unwrap();
    assert!(results == backward, "the bits depend on the order of threads");
    results
}

#[test]
fn products_of_every_float() {
    numbers::check_products_of_every_float((1, 3, 4200, 8));
}

/// Numbers that are arguments of the step, of every type.
#[test]
fn scalars_of_every_type() {
    let mut graph = Graph::new("scalars");
    let mut scalars = Vec::new();
    for dtype in DType::ALL {
        let scalar = graph.scalar(dtype);
        let shape = [3].as_slice().into();
        let dims = [].into_iter().collect();
        let wide = graph
            .add(Op::Broadcast { shape, dims }, &[scalar], &Provenance::default())
            .unwrap();
        graph.output(wide, None);
        scalars.push(match dtype {
            DType::Bool => Scalar::Bool(true),
            dtype if dtype.is_float() => Scalar::Float(-1.25),
            dtype if dtype.is_unsigned_int() => Scalar::UInt(200),
            _ => Scalar::Int(-100),
        });
    }
    let outcome = Differential::new(&graph).arguments(Vec::new(), scalars).check();
    assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
}

#[test]
fn a_graph_without_work() {
    let graph = Graph::parse(
        "graph @copies {\n %x = parameter 0 : f32[5]\n %e = parameter 1 : f32[0,3]\n return %x, %e\n}",
    );
    differential(&graph.unwrap()).unwrap();
}

/// The code of a step is stored as text and comes back as it was.
#[test]
fn code_survives_being_stored() {
    let options = Options::default();
    let config = GraphConfig::of(&[Family::Pointwise, Family::Reduce, Family::Index, Family::Dot]);
    let batch = Batch::new(60..66, &config, &options);
    let code = Differential::new(&batch.graph).compile().unwrap().code;
    assert!(!code.functions.is_empty() && !code.calls.is_empty());
    let text = serde_json::to_string(&code).unwrap();
    assert_eq!(serde_json::from_str::<StepCode>(&text).unwrap(), code);
}

/// What random graphs become is accepted by NVIDIA's compiler, for the oldest and the newest of the reference
/// devices.
#[test]
fn generated_sources_compile_for_devices() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let mut config = nests();
    config.families = Family::ALL
        .iter()
        .copied()
        .filter(|&family| family != Family::Extern)
        .collect();
    let options = Options::default();
    let batch = Batch::new(200..204, &config, &options);
    assert!(batch.refused.is_empty(), "{:?}", batch.refused);
    for capability in [(8, 0), (9, 0)] {
        let mut comparison = Differential::new(&batch.graph);
        comparison.target.capability = capability;
        let (sources, _) = comparison.compile().unwrap().code.sources();
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        if let Err(error) = compiler.compile(&sources) {
            panic!("{error}");
        }
    }
}
