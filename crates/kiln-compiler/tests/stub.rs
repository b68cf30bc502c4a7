//! The compiler without a machine: what the stub target emits is interpreted, and compared with the
//! interpretation of the whole graph.
//!
//! Random graphs over every primitive and the cases of `tests/cases`, fused and not, with the thresholds of
//! the stub and with some that make other schedules: what is tested is that kernels compute what they should
//! in the order, in the memory, and from the places that the plan says.

use std::fs;
use std::path::Path;

use kiln_compiler::schedule::KernelKind;
use kiln_compiler::testing::{POLICY, Stopped, Stub};
use kiln_compiler::{CompileError, CompiledStep, Keep, Options, Policy, compile, memory_curve};
use kiln_graph::alias::assign_aliases;
use kiln_graph::testing::{Family, GraphConfig, Rng, difference, random_arguments, random_graph, seeds};
use kiln_graph::{DType, Graph, HostTensor, Scalar, Value, interpret_f64};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, decoder_step};

/// Thresholds that fuse little: small nests, few rows in one, no epilogues or prologues, images
/// channels-first.
const RELUCTANT: Policy = Policy {
    alignment: 16,
    kept_buffer: 64,
    nest_buffers: 4,
    nest_operations: 3,
    inline_operations: 1,
    rows: 64,
    strided_reduction: 1,
    shared_reduction: 8,
    sibling_elements: 1 << 20,
    cached_elements: 1 << 20,
    channels_last: false,
    image_operations: 0,
    epilogue_types: &[],
    prologue_types: &[],
    joined_update: 0,
    ..POLICY
};

/// Products that share an operand, or are added up, become one that reads pieces.
const PIECEWISE: Policy = Policy {
    product_piece: Some(1),
    ..POLICY
};

/// Nests that read a product become one, which follows it.
const JOINED: Policy = Policy {
    epilogue_joined: true,
    ..POLICY
};

/// Nests that follow products may sum up columns, and convolutions of single pixels are products.
const SUMMED: Policy = Policy {
    epilogue_sums: Some(3),
    epilogue_pixels: true,
    epilogue_windows: Some(1),
    ..POLICY
};

/// Nests of one operation each, which copy and spread what others make.
const SINGLE: Policy = Policy {
    nest_operations: 1,
    inline_operations: 0,
    ..POLICY
};

/// Thresholds drawn from a seed: schedules that no target asks for today.
fn drawn(seed: u64) -> Policy {
    let mut rng = Rng::new(seed);
    let types: [&[DType]; 3] = [&[], &[DType::F32], &[DType::F32, DType::BF16, DType::F64]];
    let [epilogue_types, prologue_types] = [(); 2].map(|()| *rng.choose(&types));
    Policy {
        alignment: 1 << rng.below(8),
        hold_percent: rng.below(150) as u32,
        kept_buffer: *rng.choose(&[0, 0, 16, 256]),
        nest_buffers: *rng.choose(&[2, 6, 24, 60]),
        nest_operations: *rng.choose(&[1, 6, 40, 400]),
        inline_operations: *rng.choose(&[0, 1, 12, 60]),
        rows: *rng.choose(&[1, 2, 8, 64]),
        strided_reduction: *rng.choose(&[1, 8, 1 << 20]),
        shared_reduction: *rng.choose(&[1, 32, 1 << 20]),
        sibling_elements: *rng.choose(&[0, 16, 1 << 20]),
        cached_elements: *rng.choose(&[0, 64, 1 << 20]),
        channels_last: *rng.choose(&[false, true]),
        attention_result: *rng.choose(&[false, true]),
        image_operations: *rng.choose(&[0, 2, 12, 40]),
        epilogue_types,
        epilogue_streams: *rng.choose(&[0, 1, 2, 3]),
        epilogue_unit: *rng.choose(&[1, 1, 2]),
        epilogue_joined: *rng.choose(&[false, true]),
        epilogue_turned: *rng.choose(&[false, true]),
        product_piece: *rng.choose(&[None, Some(1), Some(2)]),
        prologue_types,
        prologue_streams: *rng.choose(&[1, 2, 3, 4]),
        prologue_pixels: 1 + rng.below(8) as usize,
        joined_update: *rng.choose(&[0, 16, 1 << 20]),
        joined_share: *rng.choose(&[1, 2, 3]),
        epilogue_sums: *rng.choose(&[None, Some(0), Some(1), Some(4)]),
        epilogue_pixels: *rng.choose(&[false, true]),
        weights_last: *rng.choose(&[false, true]),
        epilogue_windows: *rng.choose(&[None, Some(1), Some(2)]),
        ..POLICY
    }
}

/// How much farther from a number rounding to bf16 may lead than rounding to f32.
const NARROW: f64 = 6e4;

fn compiled(graph: &Graph, policy: Policy, options: &Options) -> CompiledStep<Stub> {
    compile(graph, options, &Stub { policy }).unwrap_or_else(|error| panic!("{}: {error}", graph.name))
}

/// Compiles, runs, and compares each output with the interpreter.
fn check(graph: &Graph, tolerances: &[f64], what: &str) {
    let not_fused = Options {
        fuse: false,
        ..Options::default()
    };
    let ways = [
        (POLICY, Options::default()),
        (POLICY, not_fused),
        (RELUCTANT, Options::default()),
        (PIECEWISE, Options::default()),
        (JOINED, Options::default()),
        (SUMMED, Options::default()),
        (SINGLE, Options::default()),
    ];
    check_with(graph, &ways, tolerances, what);
}

fn check_with(graph: &Graph, ways: &[(Policy, Options)], tolerances: &[f64], what: &str) {
    let (tensors, scalars) = random_arguments(graph, 7);
    let expected = interpret_f64(graph, &tensors, &scalars).unwrap();
    for (policy, options) in ways {
        let step = compiled(graph, *policy, options);
        let actual = step.code.run(&mut tensors.clone(), &scalars).unwrap();
        for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            if let Some(found) = difference(actual, expected, tolerances[number]) {
                panic!(
                    "{what}, fuse {}, keep {}: output {number}: {found}\n{}\n{}\n{}",
                    options.fuse,
                    options.keep,
                    step.graph,
                    step.schedule.to_text(&step.graph),
                    step.plan.to_text(&step.graph)
                );
            }
        }
    }
}

#[test]
fn random_graphs_over_every_primitive() {
    for seed in seeds(0..60) {
        let random = random_graph(seed, &GraphConfig::of(&Family::ALL));
        check(&random.graph, &random.tolerances, &format!("seed {seed}"));
    }
}

#[test]
fn random_graphs_of_each_family() {
    for family in Family::ALL {
        let config = GraphConfig::of(&[family, Family::Pointwise, Family::Movement]);
        for seed in seeds(0..12) {
            let random = random_graph(seed, &config);
            check(&random.graph, &random.tolerances, &format!("{family:?} {seed}"));
        }
    }
}

#[test]
fn random_graphs_under_drawn_thresholds() {
    for seed in seeds(0..400) {
        let sixteen = [DType::F32, DType::F32, DType::F64, DType::BF16, DType::F16];
        let config = GraphConfig {
            steps: [8, 20, 40][seed as usize % 3],
            max_elements: [60, 400][seed as usize % 2],
            floats: sixteen[..[1, 3, 5][seed as usize / 3 % 3]].to_vec(),
            together: seed % 4 != 0,
            zero_sized: seed % 8 < 2,
            ..GraphConfig::of(&Family::ALL)
        };
        let random = random_graph(seed + 10_000, &config);
        let what = format!("seed {seed}, drawn thresholds");
        let policies = [drawn(2 * seed), drawn(2 * seed + 1)];
        let mut ways = vec![(policies[0], Options::default())];
        // The least memory and all of it, or some point between.
        let curve = memory_curve(&random.graph, &Options::default(), &Stub { policy: policies[1] });
        let points = curve.unwrap_or_else(|error| panic!("{what}: {error}"));
        let point = points.get(seed as usize % points.len().max(1));
        let keep = point.map_or(Keep::Everything, |point| Keep::Within(point.peak));
        ways.push((
            policies[1],
            Options {
                keep,
                ..Options::default()
            },
        ));
        check_with(&random.graph, &ways, &random.tolerances, &what);
        let narrow = Options {
            autocast: Some(DType::BF16),
            ..Options::default()
        };
        let tolerances: Vec<f64> = random.tolerances.iter().map(|by| by * NARROW).collect();
        let ways = [drawn(3 * seed), drawn(5 * seed)].map(|policy| (policy, narrow.clone()));
        check_with(&random.graph, &ways, &tolerances, &format!("{what}, autocast"));
    }
}

/// Outputs that take over arguments, and values handed on, need tensors of equal size.
#[test]
fn long_chains_share_their_memory() {
    let config = GraphConfig {
        steps: 40,
        max_elements: 60,
        zero_sized: false,
        ..GraphConfig::of(&[Family::Pointwise, Family::Reduce, Family::Movement])
    };
    for seed in seeds(0..20) {
        let mut random = random_graph(seed, &config);
        let leaves = |value: &Value| random.graph.outputs.iter().any(|output| output.value == *value);
        let dies = random.graph.parameters().iter().map(|value| !leaves(value));
        let dies: Vec<bool> = dies.collect();
        assign_aliases(&mut random.graph, &dies);
        check(&random.graph, &random.tolerances, &format!("chain {seed}"));
    }
}

#[test]
fn cases() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let graph = Graph::parse(&body.join("\n")).unwrap();
        let (tensors, scalars) = random_arguments(&graph, 1);
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        // What lies between is rounded to 16 bits in another order.
        let tolerances = expected.iter().map(|tensor| {
            let largest = tensor.to_f64s().iter().fold(0.0f64, |a, b| a.max(b.abs()));
            let half = graph
                .values()
                .any(|(value, _)| matches!(graph.dtype(value), DType::F16 | DType::BF16));
            1e-4f64.max(largest * if half { 3e-2 } else { 1e-4 })
        });
        check(
            &graph,
            &tolerances.collect::<Vec<_>>(),
            &path.display().to_string(),
        );
        count += 1;
    }
    assert!(count >= 6, "the cases are gone");
}

/// A decoder's training step whose arguments may all be overwritten.
fn decoder() -> Graph {
    let mut step = decoder_step(Sizes {
        layers: 2,
        batch: 2,
        length: 5,
        width: 8,
        heads: 2,
        hidden: 12,
        vocabulary: 20,
        keep: 0.8,
    });
    let dies = vec![true; step.graph.parameters().len()];
    assign_aliases(&mut step.graph, &dies);
    assign_phases(&mut step.graph);
    step.graph
}

#[test]
fn a_training_step_under_every_memory_budget() {
    let graph = decoder();
    let (mut tensors, scalars) = random_arguments(&graph, 3);
    for tensor in tensors.iter_mut().filter(|tensor| !tensor.ty().dtype.is_float()) {
        // Tokens of the vocabulary.
        let tokens = (0..tensor.ty().numel() as i64).map(|at| at * 7 % 20);
        *tensor = HostTensor::from_ints(tensor.ty().dtype, tensor.ty().shape.clone(), tokens);
    }
    let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
    let options = Options::default();
    let curve = memory_curve(&graph, &options, &Stub::default()).unwrap();
    assert!(curve.len() > 2, "there is something to choose");
    for point in curve {
        let options = Options {
            keep: Keep::Within(point.peak),
            ..options.clone()
        };
        let step = compiled(&graph, POLICY, &options);
        assert_eq!(step.plan.arena_bytes as u64, point.peak);
        let actual = step.code.run(&mut tensors.clone(), &scalars).unwrap();
        for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let found = difference(actual, expected, 1e-3);
            assert!(
                found.is_none(),
                "within {}: output {number}: {found:?}",
                point.peak
            );
        }
    }
    assert!(
        compiled(&graph, POLICY, &options)
            .plan
            .aliases
            .iter()
            .any(Option::is_some),
        "updates take over arguments"
    );
}

#[test]
fn an_index_out_of_range_stops_the_step_before_anything_is_overwritten() {
    let text = "graph @lookup {
  %table = parameter 0 : f32[4,3]
  %ids = parameter 1 : i64[2]
  %state = parameter 2 : f32[5]
  %rows = index_select %table, %ids {axis=0} : f32[2,3]
  %next = exp %state : f32[5]
  return %rows, %next (alias 2)
}";
    let graph = match Graph::parse(text) {
        Ok(graph) => graph,
        Err(error) => panic!("{error}"),
    };
    let step = compiled(&graph, POLICY, &Options::default());
    let table = HostTensor::from_floats(DType::F32, [4, 3], (0..12).map(f64::from));
    let state = HostTensor::from_floats(DType::F32, [5], (0..5).map(f64::from));
    let scalars: [Scalar; 0] = [];
    for (ids, fits) in [([0, 3], true), ([0, 4], false), ([-1, 0], false)] {
        let ids = HostTensor::from_ints(DType::I64, [2], ids);
        let mut arguments = [table.clone(), ids, state.clone()];
        let result = step.code.run(&mut arguments, &scalars);
        assert_eq!(result.is_ok(), fits);
        if let Err(stopped) = result {
            assert!(matches!(stopped, Stopped::Index(_)), "{stopped}");
            assert_eq!(arguments[2].bytes(), state.bytes(), "state is as it was");
        }
    }
}

#[test]
fn an_operation_without_a_kernel_is_named() {
    let config = GraphConfig::of(&[Family::Extern]);
    let graph = random_graph(1, &config).graph;
    let error = compile(&graph, &Options::default(), &Stub::default()).unwrap_err();
    let CompileError::Unsupported { target, op, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(target, "stub");
    assert!(!op.is_empty());
}

/// The statistics of a convolution of single pixels, behind an image that is stored channels-last, and of a
/// linear layer's result: in the product's kernel, or behind it.
#[test]
fn statistics_follow_the_product_that_makes_the_image() {
    let text = |stride: usize, low: usize| {
        let plane = (6 + low - 1) / stride + 1;
        format!(
            "graph @statistics {{
      %x = parameter 0 : f32[3,4,6,5]
      %u = parameter 1 : f32[8,4,1,1]
      %w = parameter 2 : f32[5,8,1,1]
      %zero = constant 0.0 : f32[]
      %zeros = broadcast %zero {{dims=[]}} : f32[3,8,6,5]
      %h = conv %x, %u {{stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1}} : f32[3,8,6,5]
      %a = max %h, %zeros : f32[3,8,6,5]
      %y = conv %a, %w {{stride=[{stride},1], pad_low=[{low},0], pad_high=[0,0], dilation=[1,1], groups=1}} : \
       f32[3,5,{plane},5]
      %sum = reduce sum %y {{axes=[0,2,3]}} : f32[5]
      %q = mul %y, %y : f32[3,5,{plane},5]
      %squares = reduce sum %q {{axes=[0,2,3]}} : f32[5]
      %sums = broadcast %sum {{dims=[1]}} : f32[3,5,{plane},5]
      %out = mul %y, %sums : f32[3,5,{plane},5]
      return %out, %squares
    }}"
        )
    };
    let together = |text: &str, policy: Policy| {
        let graph = Graph::parse(text).unwrap();
        check(&graph, &[0.05, 0.05], "statistics");
        let step = compiled(&graph, policy, &Options::default());
        let kernels = step.schedule.kernels.iter();
        let with_sums = kernels.filter(|kernel| match &kernel.kind {
            KernelKind::Contraction(_, nest) => !nest.late.is_empty(),
            _ => false,
        });
        with_sums.count()
    };
    assert_eq!(together(&text(1, 0), SUMMED), 1);
    assert_eq!(together(&text(1, 0), POLICY), 0);
    // Other pixels than those of its own place are windows.
    let pixels = Policy {
        epilogue_windows: None,
        ..SUMMED
    };
    for text in [text(2, 0), text(1, 1)] {
        assert_eq!(together(&text, SUMMED), 1, "{text}");
        assert_eq!(together(&text, pixels), 0, "{text}");
    }
    let few = Policy {
        epilogue_elements: 1000,
        ..SUMMED
    };
    assert_eq!(together(&text(1, 0), few), 0);
    let linear = "graph @linear {
      %x = parameter 0 : f32[40,8]
      %w = parameter 1 : f32[8,12]
      %b = parameter 2 : f32[40,12]
      %y = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[40,12]
      %g = add %y, %b : f32[40,12]
      %sum = reduce sum %g {axes=[0]} : f32[12]
      return %g, %sum
    }";
    assert_eq!(together(linear, SUMMED), 1);
    // The nest reads one tensor besides the product.
    let none = Policy {
        epilogue_sums: Some(0),
        ..SUMMED
    };
    assert_eq!(together(linear, none), 0);
    // An exponential is for the warps of a kernel of its own.
    let heavy = linear.replace(
        "add %y, %b : f32[40,12]\n",
        "add %y, %b : f32[40,12]\n%e = exp %g : f32[40,12]\n",
    );
    let heavy = heavy.replace("sum %g", "sum %e");
    assert_eq!(together(&heavy, SUMMED), 0);
}

/// Of a value over channels, two functions that others wait for are one kernel with it, where buffers of that
/// size are kept apart.
#[test]
fn functions_of_channels_are_one_kernel() {
    let text = "graph @channels {
      %x = parameter 0 : f32[40,16]
      %y = parameter 1 : f32[40,16]
      %m = parameter 2 : f32[16]
      %square = mul %x, %x : f32[40,16]
      %s = reduce sum %square {axes=[0]} : f32[16]
      %a = add %s, %m : f32[16]
      %d = tanh %a : f32[16]
      %ds = broadcast %d {dims=[1]} : f32[40,16]
      %root = sqrt %a : f32[16]
      %e = recip %root : f32[16]
      %es = broadcast %e {dims=[1]} : f32[40,16]
      %left = mul %x, %ds : f32[40,16]
      %total = reduce max %left {axes=[0]} : f32[16]
      %ts = broadcast %total {dims=[1]} : f32[40,16]
      %right = mul %y, %es : f32[40,16]
      %out = add %right, %ts : f32[40,16]
      return %out
    }";
    let graph = Graph::parse(text).unwrap();
    // Nests that read the same stay apart, so that what is found is what follows.
    let policy = |kept_buffer: usize| Policy {
        kept_buffer,
        sibling_elements: 1 << 20,
        ..POLICY
    };
    let ways = [0, 64].map(|kept_buffer| (policy(kept_buffer), Options::default()));
    check_with(&graph, &ways, &[1e-4], "channels");
    let kernels = |kept_buffer: usize| {
        let step = compiled(&graph, policy(kept_buffer), &Options::default());
        step.schedule.kernels.len()
    };
    assert_eq!(kernels(64) + 1, kernels(0));
    // Larger buffers share their memory, and their kernels their places.
    assert_eq!(kernels(32), kernels(0));
}

/// The kernels of a graph with [`PIECEWISE`], by their operations, and its products after the passes.
fn piecewise(text: &str) -> (usize, usize) {
    let graph = Graph::parse(text).unwrap();
    check(&graph, &vec![1e-4; graph.outputs.len()], &graph.name);
    let step = compiled(&graph, PIECEWISE, &Options::default());
    let products = step
        .graph
        .nodes()
        .filter(|(_, node)| node.op.name() == "dot_general");
    (step.schedule.kernels.len(), products.count())
}

#[test]
fn products_of_one_operand_are_one() {
    let kernels = piecewise(
        "graph @shared {
          %x = parameter 0 : f32[6,10]
          %p = parameter 1 : f32[10,4]
          %q = parameter 2 : f32[10,8]
          %g = parameter 3 : f32[6,4]
          %h = parameter 4 : f32[6,8]
          %a = dot_general %x, %p {a_contract=[1], b_contract=[0]} : f32[6,4]
          %b = dot_general %x, %q {a_contract=[1], b_contract=[0]} : f32[6,8]
          %c = dot_general %g, %x {a_contract=[0], b_contract=[0]} : f32[4,10]
          %d = dot_general %h, %x {a_contract=[0], b_contract=[0]} : f32[8,10]
          %e = reduce sum %a {axes=[0]} : f32[4]
          %f = reduce max %b {axes=[1]} : f32[6]
          %i = dot_general %c, %d {a_contract=[1], b_contract=[1]} : f32[4,8]
          return %e, %f, %i
        }",
    );
    // Two that stand for two each, the third, and two reductions.
    assert_eq!(kernels, (5, 3));
}

#[test]
fn products_that_are_added_up_are_one() {
    let kernels = piecewise(
        "graph @sum {
          %a = parameter 0 : f32[6,10]
          %b = parameter 1 : f32[6,7]
          %u = parameter 2 : f32[10,4]
          %v = parameter 3 : f32[7,4]
          %r = parameter 4 : f32[6,4]
          %p = dot_general %a, %u {a_contract=[1], b_contract=[0]} : f32[6,4]
          %q = dot_general %b, %v {a_contract=[1], b_contract=[0]} : f32[6,4]
          %s = add %p, %r : f32[6,4]
          %t = add %s, %q : f32[6,4]
          return %t
        }",
    );
    // The rest of the sum is computed behind the product.
    assert_eq!(kernels, (1, 1));
}

#[test]
fn biases_of_products_that_become_one_are_one() {
    let kernels = piecewise(
        "graph @biased {
          %x = parameter 0 : f32[6,10]
          %p = parameter 1 : f32[10,4]
          %q = parameter 2 : f32[10,8]
          %b = parameter 3 : f32[4]
          %c = parameter 4 : f32[8]
          %1 = dot_general %x, %p {a_contract=[1], b_contract=[0]} : f32[6,4]
          %2 = broadcast %b {dims=[1]} : f32[6,4]
          %3 = add %1, %2 : f32[6,4]
          %4 = dot_general %x, %q {a_contract=[1], b_contract=[0]} : f32[6,8]
          %5 = broadcast %c {dims=[1]} : f32[6,8]
          %6 = add %4, %5 : f32[6,8]
          %7 = reduce max %3 {axes=[1]} : f32[6]
          %8 = reduce max %6 {axes=[1]} : f32[6]
          return %7, %8
        }",
    );
    // The biases are copied together; the nest behind the product adds them.
    assert_eq!(kernels, (5, 1));
}

/// Two that are read before they could be one: `b` needs what is made of `a`, and of two pairs each needs one
/// product of the other.
#[test]
fn products_that_need_each_other_stay_apart() {
    let chain = piecewise(
        "graph @chain {
          %x = parameter 0 : f32[8,8]
          %p = parameter 1 : f32[8,8]
          %a = dot_general %x, %p {a_contract=[1], b_contract=[0]} : f32[8,8]
          %w = tanh %a : f32[8,8]
          %b = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[8,8]
          return %b
        }",
    );
    assert_eq!(chain.1, 2);
    let crossed = piecewise(
        "graph @crossed {
          %x = parameter 0 : f32[8,8]
          %y = parameter 1 : f32[8,8]
          %p = parameter 2 : f32[8,8]
          %q = parameter 3 : f32[8,8]
          %a = dot_general %x, %p {a_contract=[1], b_contract=[0]} : f32[8,8]
          %v = transpose %q {perm=[1,0]} : f32[8,8]
          %b = dot_general %y, %v {a_contract=[1], b_contract=[0]} : f32[8,8]
          %am = reduce max %a {axes=[1]} : f32[8]
          %bm = reduce max %b {axes=[1]} : f32[8]
          %ab = broadcast %am {dims=[0]} : f32[8,8]
          %bb = broadcast %bm {dims=[0]} : f32[8,8]
          %c = dot_general %x, %bb {a_contract=[1], b_contract=[0]} : f32[8,8]
          %d = dot_general %y, %ab {a_contract=[1], b_contract=[0]} : f32[8,8]
          %cm = reduce max %c {axes=[1]} : f32[8]
          %dm = reduce max %d {axes=[1]} : f32[8]
          return %cm, %dm
        }",
    );
    // One of the pairs is one product; the other cannot be.
    assert_eq!(crossed.1, 3);
}
