//! Autocast: what it stores in which type, and that the step it makes computes what the step of f32 does, as
//! far as 16 bits can.

use kiln_compiler::schedule::Buffer;
use kiln_compiler::testing::{POLICY, Stub};
use kiln_compiler::transform::autocast::{Reason, StoredReport, autocast};
use kiln_compiler::{CompiledStep, Options, Policy, compile};
use kiln_graph::alias::assign_aliases;
use kiln_graph::op::{BinaryOp, ConvDims, Dims, Op, UnaryOp, Window};
use kiln_graph::testing::{Family, GraphConfig, random_arguments, random_graph, seeds};
use kiln_graph::{
    DType, Graph, HostTensor, NodeData, Phase, Provenance, Rewriter, Scalar, TensorType, Value, interpret,
    interpret_f64, verify,
};
use kiln_partition::assign_phases;
use kiln_partition::testing::{
    Sizes, Tape, accumulating_step, adversarial_step, arguments, decoder_step, f32s, repeated_step,
};

/// The types of 16 bits, and how far a step may be from f64, relative to the norm of each output.
const TYPES: [(DType, f64); 2] = [(DType::BF16, 3e-2), (DType::F16, 4e-3)];

fn prepared(step: Tape) -> Graph {
    let mut graph = step.graph;
    let dies = vec![true; graph.parameters().len()];
    assign_aliases(&mut graph, &dies);
    assign_phases(&mut graph);
    graph
}

fn decoder() -> Graph {
    prepared(decoder_step(Sizes {
        layers: 2,
        batch: 2,
        length: 8,
        width: 16,
        heads: 2,
        hidden: 24,
        vocabulary: 20,
        keep: 0.8,
    }))
}

/// Two perceptrons, one of which is updated before the other reads it, three micro-batches, and three
/// updates.
fn others() -> [Graph; 3] {
    [adversarial_step(), accumulating_step(), repeated_step()].map(prepared)
}

/// The forward pass and the gradients of a small image network by hand: convolutions, a normalisation by
/// channel statistics, ReLU, a residual, a pooling.
fn images() -> Graph {
    let mut graph = Graph::new("images");
    let [forward, backward, update] =
        [Phase::Forward, Phase::Backward, Phase::Optimizer].map(|phase| Provenance {
            phase,
            ..Provenance::default()
        });
    let two = |x: usize| [x, x].into_iter().collect::<Dims>();
    let conv = ConvDims {
        stride: two(1),
        pad_low: two(1),
        pad_high: two(1),
        dilation: two(1),
        groups: 1,
        result: None,
    };
    let (x, rate) = (graph.parameter(f32s(&[2, 3, 8, 8])), graph.scalar(DType::F32));
    let (first, second) = (
        graph.parameter(f32s(&[16, 3, 3, 3])),
        graph.parameter(f32s(&[16, 16, 3, 3])),
    );
    let p = &forward;
    let mut add =
        |op: Op, inputs: &[Value], p: &Provenance| graph.add_node(op, inputs, p.clone()).unwrap()[0];
    let binary = Op::Binary;
    let a = add(Op::Conv(conv.clone()), &[x, first], p);
    let image = TensorType::new(DType::F32, [2, 16, 8, 8]);
    let sum = |axes: &[usize]| Op::Reduce {
        op: kiln_graph::op::ReduceOp::Sum,
        axes: axes.iter().copied().collect(),
    };
    let spread = |shape: &[usize], dims: &[usize]| Op::Broadcast {
        shape: shape.into(),
        dims: dims.iter().copied().collect(),
    };
    let squares = add(binary(BinaryOp::Mul), &[a, a], p);
    let power = add(sum(&[0, 2, 3]), &[squares], p);
    let scale = add(Op::Unary(UnaryOp::Rsqrt), &[power], p);
    let scales = add(spread(&image.shape, &[1]), &[scale], p);
    let normal = add(binary(BinaryOp::Mul), &[a, scales], p);
    let zero = add(
        Op::Constant {
            value: 0.0.into(),
            dtype: DType::F32,
        },
        &[],
        p,
    );
    let zeros = add(spread(&image.shape, &[]), &[zero], p);
    let active = add(binary(BinaryOp::Max), &[normal, zeros], p);
    let b = add(Op::Conv(conv.clone()), &[active, second], p);
    let stream = add(binary(BinaryOp::Add), &[active, b], p);
    let window = Window {
        size: two(2),
        stride: two(2),
        pad_low: two(0),
        pad_high: two(0),
        dilation: two(1),
        ceil_mode: false,
    };
    let pooled = add(
        Op::AvgPool {
            window: window.clone(),
            count_include_pad: true,
        },
        &[stream],
        p,
    );
    let c = add(Op::Conv(conv.clone()), &[pooled, second], p);
    let energy = add(binary(BinaryOp::Mul), &[c, c], p);
    let loss = add(sum(&[0, 1, 2, 3]), &[energy], p);
    // Backward: of c, the pooling, the stream, b. (The normalisation's statistics count as constants.)
    let p = &backward;
    // Of half of the loss' 256th: f16 has no larger numbers than 65504.
    let small = add(
        Op::Constant {
            value: (1.0 / 256.0).into(),
            dtype: DType::F32,
        },
        &[],
        p,
    );
    let smalls = add(spread(&[2, 16, 4, 4], &[]), &[small], p);
    let dc = add(binary(BinaryOp::Mul), &[c, smalls], p);
    let input = |extent: usize| Op::ConvInputGrad {
        conv: conv.clone(),
        input: two(extent),
    };
    let weight = || Op::ConvWeightGrad {
        conv: conv.clone(),
        kernel: two(3),
    };
    let d_pooled = add(input(4), &[dc, second], p);
    let from_c = add(weight(), &[pooled, dc], p);
    let unpool = Op::AvgPoolGrad {
        window,
        count_include_pad: true,
        input: two(8),
    };
    let d_stream = add(unpool, &[d_pooled], p);
    let from_b = add(weight(), &[active, d_stream], p);
    let d_active = add(input(8), &[d_stream, second], p);
    let d_active = add(binary(BinaryOp::Add), &[d_active, d_stream], p);
    let open = add(Op::Compare(kiln_graph::op::CompareOp::Gt), &[normal, zeros], p);
    let d_normal = add(Op::Select, &[open, d_active, zeros], p);
    let da = add(binary(BinaryOp::Mul), &[d_normal, scales], p);
    let d_first = add(weight(), &[x, da], p);
    let d_second = add(binary(BinaryOp::Add), &[from_c, from_b], p);
    let p = &update;
    let mut outputs = Vec::new();
    for (weight, gradient, shape) in [
        (first, d_first, [16, 3, 3, 3]),
        (second, d_second, [16, 16, 3, 3]),
    ] {
        let rates = add(spread(&shape, &[]), &[rate], p);
        let change = add(binary(BinaryOp::Mul), &[gradient, rates], p);
        outputs.push(add(binary(BinaryOp::Sub), &[weight, change], p));
    }
    outputs.push(loss);
    outputs.into_iter().for_each(|value| graph.output(value, None));
    graph
}

fn compiled(graph: &Graph, autocast: Option<DType>) -> CompiledStep<Stub> {
    let options = Options {
        autocast,
        ..Options::default()
    };
    compile(graph, &options, &Stub { policy: POLICY })
        .unwrap_or_else(|error| panic!("{}: {error}", graph.name))
}

/// `||actual - expected|| / ||expected||`.
fn error(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-12)
}

fn is_16_bits(graph: &Graph, value: Value) -> bool {
    matches!(graph.dtype(value), DType::F16 | DType::BF16)
}

#[test]
fn steps_compute_what_those_of_f32_do() {
    let graphs = [decoder(), images()].into_iter().chain(others());
    for graph in graphs {
        let (tensors, scalars) = arguments(&graph, 3);
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        for (dtype, limit) in TYPES {
            let step = compiled(&graph, Some(dtype));
            let same = interpret(&step.graph, &tensors, &scalars).unwrap();
            let actual = step.code.run(&mut tensors.clone(), &scalars).unwrap();
            for (number, output) in graph.outputs.iter().enumerate() {
                let what = format!("{} in {dtype}, output {number}", graph.name);
                assert_eq!(actual[number].ty(), graph.ty(output.value), "{what}");
                let rounded = error(&actual[number], &expected[number]);
                assert!(rounded < limit, "{what}: {rounded:e}");
                // The same graph: what a kernel keeps in registers differs by sums of f32 and what they flip
                // when they are rounded.
                let between = error(&actual[number], &same[number]);
                assert!(between < limit / 8.0, "{what}: {between:e} from the interpreter");
            }
        }
    }
}

#[test]
fn no_kernel_only_casts_but_those_of_arguments() {
    for graph in [decoder(), images()].into_iter().chain(others()) {
        let step = compiled(&graph, Some(DType::BF16));
        let graph = &step.graph;
        for kernel in &step.schedule.kernels {
            // Operations on images may be computed inside a kernel without being named by it: then it does
            // not read the cast's operand.
            let casts = |&node: &kiln_graph::Node| {
                let data = graph.node(node);
                let operand = data.inputs.first().copied();
                matches!(data.op, Op::Cast(_))
                    && operand.is_some_and(|value| {
                        !matches!(graph.def(value).op, Op::Parameter { .. })
                            && kernel.reads.contains(&Buffer::Value(value))
                    })
            };
            assert!(
                !kernel.nodes.iter().all(casts),
                "a kernel only casts:\n{graph}\n{}",
                step.schedule.to_text(graph)
            );
        }
    }
}

/// `graph` with a copy in `dtype` behind each parameter of f32, and its arguments with them.
fn with_copies(graph: &Graph, dtype: DType, tensors: &[HostTensor]) -> (Graph, Vec<HostTensor>) {
    let mut new = Rewriter::new(graph);
    let mut given = Vec::new();
    for (node, data) in graph.nodes() {
        let made = new.copy(node).unwrap()[0];
        let Op::Parameter { index, ref ty, .. } = data.op else {
            continue;
        };
        given.push(tensors[index as usize].clone());
        if ty.dtype == DType::F32 {
            let copy = new.graph.parameter(TensorType::new(dtype, ty.shape.clone()));
            assert!(new.graph.note_copy(copy, made));
            assert!(
                !new.graph.note_copy(made, copy),
                "a parameter is no copy of its copy"
            );
            let elements = tensors[index as usize].to_f64s();
            given.push(HostTensor::from_floats(dtype, ty.shape.clone(), elements));
        }
    }
    (new.finish(), given)
}

#[test]
fn copies_that_the_caller_keeps_are_read_in_place_of_casts() {
    for graph in [decoder(), images()].into_iter().chain(others()) {
        let (tensors, scalars) = arguments(&graph, 5);
        for (dtype, _) in TYPES {
            let (with, given) = with_copies(&graph, dtype, &tensors);
            verify(&with).unwrap();
            assert_eq!(Graph::parse(&with.to_string()).unwrap(), with);
            let casts = |graph: &Graph| {
                let of_argument = |data: &&NodeData| {
                    data.op == Op::Cast(dtype) && matches!(graph.def(data.inputs[0]).op, Op::Parameter { .. })
                };
                graph.nodes().map(|(_, data)| data).filter(of_argument).count()
            };
            let [(plain, _), (copied, report)] =
                [&graph, &with].map(|graph| autocast(graph, dtype, &POLICY).unwrap());
            verify(&copied).unwrap();
            assert!(casts(&plain) > 0, "{plain}");
            assert_eq!(casts(&copied), 0, "{copied}");
            assert_eq!(report.unwrap().copies.len(), casts(&plain));
            // They are the same numbers, so are the results.
            let expected = interpret(&plain, &tensors, &scalars).unwrap();
            let actual = interpret(&copied, &given, &scalars).unwrap();
            assert_eq!(actual, expected, "{} in {dtype}", graph.name);
            // What was promised of one type says nothing of the other, or of a caller who promises nothing.
            let other = if dtype == DType::BF16 {
                DType::F16
            } else {
                DType::BF16
            };
            let (of_other, _) = autocast(&with, other, &POLICY).unwrap();
            let unread = of_other.users();
            let is_copy = |&&value: &&Value| of_other.dtype(value) == dtype;
            let mut copies = of_other.parameters().iter().filter(is_copy);
            assert!(copies.all(|&copy| unread.count(copy) == 0));
            let (alone, _) = autocast(&with.without_copies(), dtype, &POLICY).unwrap();
            assert_eq!(casts(&alone), casts(&plain));
            let step = compiled(&with_copies(&graph, dtype, &tensors).0, Some(dtype));
            let made = step.code.run(&mut given.clone(), &scalars).unwrap();
            let before = compiled(&graph, Some(dtype));
            let before = before.code.run(&mut tensors.clone(), &scalars).unwrap();
            assert_eq!(made, before, "{} in {dtype}, compiled", graph.name);
        }
    }
}

#[test]
fn what_backward_keeps_is_halved_and_updates_see_f32_only() {
    for graph in [decoder(), images()] {
        let [wide, narrow] = [None, Some(DType::BF16)].map(|dtype| compiled(&graph, dtype));
        let kept = |step: &CompiledStep<Stub>| step.partition.as_ref().unwrap().saved_bytes;
        // Copies of the weights are kept too, two bytes an element.
        let weights: u64 = graph
            .parameters()
            .iter()
            .map(|&value| graph.ty(value).numel() as u64 * 2)
            .sum();
        assert!(
            kept(&narrow) < kept(&wide) * 6 / 10 + weights,
            "{}: {} of {}",
            graph.name,
            kept(&narrow),
            kept(&wide)
        );
        for (_, data) in narrow.graph.nodes() {
            if data.provenance.phase == Phase::Optimizer {
                let mut all = data.inputs.iter().chain(&data.outputs);
                assert!(
                    !all.any(|&value| is_16_bits(&narrow.graph, value)),
                    "an update of 16 bits"
                );
            }
            if data.op.is_contraction() {
                assert!(is_16_bits(&narrow.graph, data.inputs[0]), "a product of f32");
            }
        }
        let report = narrow.autocast.unwrap();
        let count = |reason: Reason| {
            report
                .stored
                .iter()
                .filter(|value| value.reason == reason)
                .count()
        };
        assert!(
            count(Reason::Product) > 0 && count(Reason::Operand) > 0 && count(Reason::Update) > 0,
            "{report}"
        );
        assert!(
            report.casts.iter().any(|cast| cast.argument.is_some()),
            "{report}"
        );
    }
}

#[test]
fn gradients_of_convolutions_are_rounded_where_the_target_says_so() {
    let graph = images();
    let narrow = Policy {
        narrow_weight_gradients: true,
        ..POLICY
    };
    let types = |policy: &Policy, dtype: DType| -> Vec<DType> {
        let (graph, _) = autocast(&graph, dtype, policy).unwrap();
        verify(&graph).unwrap();
        let gradients = graph
            .nodes()
            .filter(|(_, data)| matches!(data.op, Op::ConvWeightGrad { .. }));
        gradients.map(|(_, data)| graph.dtype(data.outputs[0])).collect()
    };
    assert_eq!(types(&POLICY, DType::BF16), [DType::F32; 3]);
    assert_eq!(types(&narrow, DType::BF16), [DType::BF16; 3]);
    // Gradients may be larger than f16 holds.
    assert_eq!(types(&narrow, DType::F16), [DType::F32; 3]);
}

/// The gradient of a ReLU looks at the 16 bits that the products read, not at a comparison kept beside them.
#[test]
fn gradients_of_relus_look_at_what_is_stored() {
    let text = "graph @relu {
      %x = parameter 0 : f32[64,16]
      %w0 = parameter 1 : f32[16,48]
      %b = parameter 2 : f32[48]
      %w1 = parameter 3 : f32[48,8]
      %dy = parameter 4 : f32[64,8]
      %p = dot_general %x, %w0 {a_contract=[1], b_contract=[0]} : f32[64,48] ; fwd
      %bias = broadcast %b {dims=[1]} : f32[64,48] ; fwd
      %h = add %p, %bias : f32[64,48] ; fwd
      %zero = constant 0.0 : f32[] ; fwd
      %zeros = broadcast %zero {dims=[]} : f32[64,48] ; fwd
      %off = compare le %h, %zeros : bool[64,48] ; fwd
      %a = select %off, %zeros, %h : f32[64,48] ; fwd
      %y = dot_general %a, %w1 {a_contract=[1], b_contract=[0]} : f32[64,8] ; fwd
      %dw1 = dot_general %a, %dy {a_contract=[0], b_contract=[0]} : f32[48,8] ; bwd
      %da = dot_general %dy, %w1 {a_contract=[1], b_contract=[1]} : f32[64,48] ; bwd
      %dh = select %off, %zeros, %da : f32[64,48] ; bwd
      %dw0 = dot_general %x, %dh {a_contract=[0], b_contract=[0]} : f32[16,48] ; bwd
      %db = reduce sum %dh {axes=[0]} : f32[48] ; bwd
      return %y, %dw1, %dw0, %db
    }";
    let graph = Graph::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let (tensors, scalars) = random_arguments(&graph, 3);
    let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
    for (dtype, limit) in TYPES {
        let step = compiled(&graph, Some(dtype));
        let kept = &step.partition.as_ref().unwrap().saved;
        assert!(!kept.is_empty());
        assert!(kept.iter().all(|saved| saved.ty.dtype != DType::Bool), "{kept:?}");
        let actual = step.code.run(&mut tensors.clone(), &scalars).unwrap();
        for (number, expected) in expected.iter().enumerate() {
            // A sum that rounding moves across 0 is another ReLU's.
            let rounded = error(&actual[number], expected);
            assert!(rounded < 2.0 * limit, "{dtype}, output {number}: {rounded:e}");
        }
    }
}

/// A gradient that enters a batch normalisation is stored, because the sum over the batch is needed before it
/// is read again; one that chooses among 16 bits is not.
#[test]
fn gradients_that_meet_their_sum_are_stored_in_16_bits() {
    let step = |gradient: &str| {
        let text = format!(
            "graph @norm {{
      %dy = parameter 0 : f32[4,8,6,6]
      %w = parameter 1 : f32[8,16,1,1]
      %v = parameter 2 : f32[8,16,1,1]
      %mask = parameter 3 : bool[4,16,6,6]
      %factor = parameter 4 : f32[16]
      %zero = constant 0.0 : f32[] ; bwd
      %zeros = broadcast %zero {{dims=[]}} : f32[4,16,6,6] ; bwd
      %a = conv_input_grad %dy, %w {ONE}, input=[6,6]}} : f32[4,16,6,6] ; bwd
      %b = conv_input_grad %dy, %v {ONE}, input=[6,6]}} : f32[4,16,6,6] ; bwd
      %c = add %a, %b : f32[4,16,6,6] ; bwd
      %g = select %mask, %zeros, {gradient} : f32[4,16,6,6] ; bwd
      %sum = reduce sum %g {{axes=[0,2,3]}} : f32[16] ; bwd
      %mean = mul %sum, %factor : f32[16] ; bwd
      %means = broadcast %mean {{dims=[1]}} : f32[4,16,6,6] ; bwd
      %factors = broadcast %factor {{dims=[1]}} : f32[4,16,6,6] ; bwd
      %scaled = mul %g, %factors : f32[4,16,6,6] ; bwd
      %dx = sub %scaled, %means : f32[4,16,6,6] ; bwd
      %out = conv %dx, %w {ONE}}} : f32[4,8,6,6] ; bwd
      return %out, %sum
    }}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let (cast, report) = autocast(&graph, DType::BF16, &POLICY).unwrap();
        verify(&cast).unwrap();
        let stored = report.unwrap().stored;
        stored
            .iter()
            .filter(|stored| stored.reason == Reason::Summed)
            .count()
    };
    const ONE: &str = "{stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1";
    assert_eq!(step("%c"), 1);
    assert_eq!(step("%a"), 0);
}

/// GELU's gradient multiplies by what the forward pass multiplied by, in 16 bits; the forward pass itself has
/// it exactly. A tangent, whose gradient squares it, and what no product follows stay f32.
#[test]
fn factors_of_gradients_are_kept_in_16_bits() {
    let step = |function: &str, gradient: &str, last: &str| {
        let text = format!(
            "graph @gelu {{
      %x = parameter 0 : f32[64,32]
      %w = parameter 1 : f32[32,48]
      %v = parameter 2 : f32[48,32]
      %dy = parameter 3 : f32[64,32]
      %one = constant 1.0 : f32[]
      %ones = broadcast %one {{dims=[]}} : f32[64,48]
      %a = dot_general %x, %w {{a_contract=[1], b_contract=[0]}} : f32[64,48] ; fwd
      %f = {function} %a : f32[64,48] ; fwd
      %factor = add %f, %ones : f32[64,48] ; fwd
      %y = mul %a, %factor : f32[64,48] ; fwd
      {last}
      %d = dot_general %dy, %v {{a_contract=[1], b_contract=[1]}} : f32[64,48] ; bwd
      %da = mul %d, %factor : f32[64,48] ; bwd
      %db = mul %d, %a : f32[64,48] ; bwd
      {gradient}
      %dx = add %da, %dc : f32[64,48] ; bwd
      %dw = dot_general %x, %dx {{a_contract=[0], b_contract=[0]}} : f32[32,48] ; bwd
      return %out, %dw
    }}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let (cast, report) = autocast(&graph, DType::BF16, &POLICY).unwrap();
        verify(&cast).unwrap();
        let of_factor = |stored: &&StoredReport| stored.reason == Reason::Factor;
        (cast, report.unwrap().stored.iter().filter(of_factor).count())
    };
    const PRODUCT: &str = "%out = dot_general %y, %v {a_contract=[1], b_contract=[0]} : f32[64,32] ; fwd";
    const LOSS: &str = "%out = reduce sum %y {axes=[0,1]} : f32[] ; fwd";
    const SLOPE: &str = "%m = mul %a, %a : f32[64,48] ; bwd
      %e = exp %m : f32[64,48] ; bwd
      %dc = mul %db, %e : f32[64,48] ; bwd";
    const SQUARE: &str = "%m = mul %factor, %factor : f32[64,48] ; bwd
      %s = sub %ones, %m : f32[64,48] ; bwd
      %dc = mul %db, %s : f32[64,48] ; bwd";
    const ITS_OWN: &str = "%m = mul %da, %factor : f32[64,48] ; bwd
      %dc = sub %db, %m : f32[64,48] ; bwd";
    let (cast, count) = step("erf", SLOPE, PRODUCT);
    assert_eq!(count, 1);
    // The forward pass multiplies by the sum itself.
    let users = cast.users();
    let sum = cast
        .nodes()
        .find(|(_, data)| matches!(data.op, Op::Binary(BinaryOp::Add)))
        .map(|(_, data)| data.outputs[0]);
    let readers: Vec<&Op> = users
        .of(sum.unwrap())
        .iter()
        .map(|&user| &cast.node(user).op)
        .collect();
    assert!(
        matches!(
            readers[..],
            [Op::Binary(BinaryOp::Mul), Op::Cast(DType::BF16)]
                | [Op::Cast(DType::BF16), Op::Binary(BinaryOp::Mul)]
        ),
        "{readers:?}"
    );
    // It is rounded where it is made, so that the kernel that makes it does.
    let is_behind = |data: &NodeData| data.provenance.phase.is_after_forward();
    let of_sum = |data: &NodeData| matches!(data.op, Op::Cast(DType::BF16)) && data.inputs[0] == sum.unwrap();
    let first = cast.nodes().position(|(_, data)| is_behind(data) || of_sum(data));
    assert!(of_sum(cast.nodes().nth(first.unwrap()).unwrap().1));
    for (function, gradient, last) in [
        ("neg", SLOPE, PRODUCT),
        ("tanh", SQUARE, PRODUCT),
        ("tanh", ITS_OWN, PRODUCT),
        ("erf", SLOPE, LOSS),
    ] {
        assert_eq!(
            step(function, gradient, last).1,
            0,
            "{function} {gradient} {last}"
        );
    }
}

/// The program's own casts of f64 have ReLUs in front of them, too.
#[test]
fn relus_of_f64_are_left_alone() {
    let text = "graph @wide {
      %x = parameter 0 : f64[8,8]
      %w = parameter 1 : bf16[8,8]
      %u = parameter 2 : f32[8,8]
      %h = dot_general %x, %x {a_contract=[1], b_contract=[0]} : f64[8,8] ; fwd
      %zero = constant 0.0 : f64[] ; fwd
      %zeros = broadcast %zero {dims=[]} : f64[8,8] ; fwd
      %off = compare le %h, %zeros : bool[8,8] ; fwd
      %a = select %off, %zeros, %h : f64[8,8] ; fwd
      %n = cast %a : bf16[8,8] ; fwd
      %y = dot_general %n, %w {a_contract=[1], b_contract=[0]} : bf16[8,8] ; fwd
      %z = dot_general %u, %u {a_contract=[1], b_contract=[0]} : f32[8,8] ; fwd
      %dx = select %off, %zeros, %x : f64[8,8] ; bwd
      return %y, %z, %dx
    }";
    let graph = Graph::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let (tensors, scalars) = random_arguments(&graph, 3);
    let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
    let step = compiled(&graph, Some(DType::BF16));
    let actual = step.code.run(&mut tensors.clone(), &scalars).unwrap();
    for (actual, expected) in actual.iter().zip(&expected) {
        assert!(error(actual, expected) < 3e-2);
    }
}

#[test]
fn full_precision_is_kept() {
    let mut graph = decoder();
    let products: Vec<_> = graph
        .nodes()
        .filter(|(_, data)| data.op.is_contraction())
        .map(|(node, _)| node)
        .collect();
    for &node in &products {
        graph.provenance_mut(node).full_precision = true;
    }
    let (same, report) = autocast(&graph, DType::BF16, &POLICY).unwrap();
    assert!(report.is_none());
    assert_eq!(same.canonical_text(), graph.canonical_text());
    graph.provenance_mut(products[0]).full_precision = false;
    let (one, _) = autocast(&graph, DType::BF16, &POLICY).unwrap();
    let narrow = one
        .nodes()
        .filter(|(_, data)| data.op.is_contraction() && is_16_bits(&one, data.inputs[0]));
    assert_eq!(narrow.count(), 1);
}

#[test]
fn any_graph_stays_well_typed_and_a_second_pass_changes_nothing() {
    let config = GraphConfig {
        families: Family::ALL
            .iter()
            .copied()
            .filter(|&family| family != Family::Extern)
            .collect(),
        floats: vec![DType::F32, DType::F32, DType::BF16, DType::F64],
        ..GraphConfig::default()
    };
    for seed in seeds(0..150) {
        let config = GraphConfig {
            together: seed % 2 == 1,
            ..config.clone()
        };
        let graph = random_graph(seed, &config).graph;
        let (once, _) = autocast(&graph, DType::BF16, &POLICY).unwrap();
        verify(&once).unwrap();
        let types = |graph: &Graph| -> Vec<TensorType> {
            graph
                .outputs
                .iter()
                .map(|output| graph.ty(output.value).clone())
                .collect()
        };
        assert_eq!(types(&graph), types(&once), "seed {seed}");
        let (twice, report) = autocast(&once, DType::BF16, &POLICY).unwrap();
        assert!(report.is_none(), "seed {seed}");
        assert_eq!(once.canonical_text(), twice.canonical_text(), "seed {seed}");
    }
}

#[test]
fn losses_see_probabilities_as_they_are() {
    // A mixture of experts: probabilities weigh the experts, and a loss reads how far the first is from 1.
    let graph = Graph::parse(
        "graph @gate {
      %x = parameter 0 : f32[4,2]
      %experts = parameter 1 : f32[2,8]
      %one = constant 1.0 : f32[]
      %ones = broadcast %one {dims=[]} : f32[4,2]
      %e = exp %x : f32[4,2] ; fwd
      %s = reduce sum %e {axes=[1]} : f32[4] ; fwd
      %t = broadcast %s {dims=[0]} : f32[4,2] ; fwd
      %p = div %e, %t : f32[4,2] ; fwd
      %y = dot_general %p, %experts {a_contract=[1], b_contract=[0]} : f32[4,8] ; fwd
      %rest = sub %ones, %p : f32[4,2] ; fwd
      %log = log %rest : f32[4,2] ; fwd
      %loss = reduce sum %log {axes=[0,1]} : f32[] ; fwd
      return %y, %loss
    }",
    )
    .unwrap();
    let x = HostTensor::from_floats(
        DType::F32,
        [4, 2],
        (0..8).map(|k| if k % 2 == 0 { 8.0 } else { 0.0 }),
    );
    let experts = HostTensor::from_floats(DType::F32, [2, 8], (0..16).map(f64::from));
    for (dtype, _) in TYPES {
        let (cast, report) = autocast(&graph, dtype, &POLICY).unwrap();
        verify(&cast).unwrap();
        assert!(
            report
                .unwrap()
                .stored
                .iter()
                .any(|stored| stored.reason == Reason::Operand)
        );
        let arguments = [x.clone(), experts.clone()];
        let results = interpret(&cast, &arguments, &[]).unwrap();
        let exact = interpret_f64(&graph, &arguments, &[]).unwrap();
        let [loss, expected] = [&results, &exact].map(|results| results[1].to_f64s()[0]);
        assert!(
            (loss - expected).abs() < 1e-2,
            "{dtype}: {loss} is not {expected}"
        );
    }
}

#[test]
fn losses_join_branches_as_they_are() {
    // A teacher of one product, a student of two: the loss is the mean square of a small difference.
    let graph = Graph::parse(
        "graph @distilled {
      %x = parameter 0 : f32[4,8]
      %w = parameter 1 : f32[8,8]
      %b = parameter 2 : f32[4,8]
      %t = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[4,8] ; fwd
      %teacher = add %t, %b : f32[4,8] ; fwd
      %h = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[4,8] ; fwd
      %r = tanh %h : f32[4,8] ; fwd
      %s = dot_general %r, %w {a_contract=[1], b_contract=[0]} : f32[4,8] ; fwd
      %student = add %s, %b : f32[4,8] ; fwd
      %d = sub %teacher, %student : f32[4,8] ; fwd
      %q = mul %d, %d : f32[4,8] ; fwd
      %loss = reduce sum %q {axes=[0,1]} : f32[] ; fwd
      return %loss
    }",
    )
    .unwrap();
    let again = |graph: &Graph| {
        let (_, report) = autocast(graph, DType::BF16, &POLICY).unwrap();
        let stored = report.unwrap().stored;
        stored
            .iter()
            .filter(|stored| stored.reason == Reason::ReadAgain)
            .count()
    };
    assert_eq!(again(&graph), 0);
    // A stream of residuals is what a product follows.
    let text = graph.to_string();
    let end = text.find("  return").unwrap();
    let d = graph
        .nodes()
        .find(|(_, data)| matches!(data.op, Op::Binary(BinaryOp::Sub)))
        .unwrap()
        .1
        .outputs[0];
    let w = graph.parameters()[1];
    let stream = format!(
        "{}  %99 = dot_general {d}, {w} {{a_contract=[1], b_contract=[0]}} : f32[4,8] ; fwd\n  return %99\n}}",
        &text[..end]
    );
    assert_eq!(again(&Graph::parse(&stream).unwrap()), 1);
}

#[test]
fn experts_are_weighed_by_probabilities_as_they_are() {
    // The router's probabilities meet the expert's result behind its product, and a loss.
    let graph = Graph::parse(
        "graph @router {
      %x = parameter 0 : f32[4,2]
      %r = parameter 1 : f32[2,2]
      %w = parameter 2 : f32[2,2]
      %one = constant 1.0 : f32[]
      %ones = broadcast %one {dims=[]} : f32[4,2]
      %z = dot_general %x, %r {a_contract=[1], b_contract=[0]} : f32[4,2] ; fwd
      %e = exp %z : f32[4,2] ; fwd
      %s = reduce sum %e {axes=[1]} : f32[4] ; fwd
      %t = broadcast %s {dims=[0]} : f32[4,2] ; fwd
      %p = div %e, %t : f32[4,2] ; fwd
      %h = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[4,2] ; fwd
      %a = tanh %h : f32[4,2] ; fwd
      %i = dot_general %a, %w {a_contract=[1], b_contract=[0]} : f32[4,2] ; fwd
      %mixed = mul %p, %i : f32[4,2] ; fwd
      %y = dot_general %mixed, %w {a_contract=[1], b_contract=[0]} : f32[4,2] ; fwd
      %rest = sub %ones, %p : f32[4,2] ; fwd
      %log = log %rest : f32[4,2] ; fwd
      %loss = reduce sum %log {axes=[0,1]} : f32[] ; fwd
      return %y, %loss
    }",
    )
    .unwrap();
    let x = HostTensor::from_floats(DType::F32, [4, 2], [2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0]);
    let router = HostTensor::from_floats(DType::F32, [2, 2], [4.0, 0.0, 0.0, 0.0]);
    let expert = HostTensor::from_floats(DType::F32, [2, 2], [0.5, 0.25, 0.25, 0.5]);
    let (cast, _) = autocast(&graph, DType::BF16, &POLICY).unwrap();
    verify(&cast).unwrap();
    let arguments = [x, router, expert];
    let [loss, expected] = [
        interpret(&cast, &arguments, &[]).unwrap(),
        interpret_f64(&graph, &arguments, &[]).unwrap(),
    ]
    .map(|results| results[1].to_f64s()[0]);
    assert!((loss - expected).abs() < 1e-2, "{loss} is not {expected}");
}

/// What an update made is the state of the next one, also where somebody keeps the first state, so that no
/// output takes its place: rounded, it would lose what small updates change.
#[test]
fn several_updates_in_one_step_are_as_small_as_they_are() {
    let held = |step: Tape| {
        let mut graph = step.graph;
        graph.outputs.iter_mut().for_each(|output| output.alias = None);
        assign_phases(&mut graph);
        graph
    };
    let old: Vec<Option<u32>> = repeated_step()
        .graph
        .outputs
        .iter()
        .map(|output| output.alias)
        .collect();
    for graph in [prepared(repeated_step()), held(repeated_step())] {
        let (tensors, _) = arguments(&graph, 3);
        let scalars = [Scalar::Float(1e-4)];
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        let moved = |results: &[HostTensor], output: usize, from: u32| {
            let (new, old) = (results[output].to_f64s(), tensors[from as usize].to_f64s());
            let moved = new.iter().zip(&old).map(|(new, old)| new - old);
            HostTensor::from_floats(DType::F64, results[output].ty().shape.clone(), moved)
        };
        for (dtype, _) in TYPES {
            let actual = compiled(&graph, Some(dtype))
                .code
                .run(&mut tensors.clone(), &scalars);
            let actual = actual.unwrap();
            for (output, from) in old.iter().enumerate() {
                let Some(from) = *from else { continue };
                let error = error(&moved(&actual, output, from), &moved(&expected, output, from));
                assert!(
                    error < 0.05,
                    "{dtype}: output {output} moved by {error} other than in f64"
                );
            }
        }
    }
}

/// A row that sees nothing has the same score everywhere. Infinite, it would have no softmax.
#[test]
fn fills_that_16_bits_do_not_hold_stay_finite() {
    for (fill, types) in [("-3.4028234663852886e38", &TYPES[..]), ("-1e9", &TYPES[1..])] {
        let graph = Graph::parse(&format!(
            "graph @scores {{
          %x = parameter 0 : f32[4,8]
          %w = parameter 1 : f32[8,4]
          %v = parameter 2 : f32[4,8]
          %hidden = parameter 3 : bool[4,4]
          %c = constant {fill} : f32[]
          %fill = broadcast %c {{dims=[]}} : f32[4,4]
          %dot = dot_general %x, %w {{a_contract=[1], b_contract=[0]}} : f32[4,4] ; fwd
          %first = select %hidden, %fill, %dot : f32[4,4] ; fwd
          %h = dot_general %dot, %v {{a_contract=[1], b_contract=[0]}} : f32[4,8] ; fwd
          %again = dot_general %h, %w {{a_contract=[1], b_contract=[0]}} : f32[4,4] ; fwd
          %both = add %again, %first : f32[4,4] ; fwd
          %most = reduce max %both {{axes=[1]}} : f32[4] ; fwd
          %row = broadcast %most {{dims=[0]}} : f32[4,4] ; fwd
          %near = sub %both, %row : f32[4,4] ; fwd
          %e = exp %near : f32[4,4] ; fwd
          %y = dot_general %e, %v {{a_contract=[1], b_contract=[0]}} : f32[4,8] ; fwd
          return %y
        }}"
        ))
        .unwrap();
        let (mut tensors, _) = arguments(&graph, 3);
        let hidden = (0..16).map(|at| i64::from(at / 4 == 1 || at % 4 == 3));
        tensors[3] = HostTensor::from_ints(DType::Bool, [4, 4], hidden);
        // In f32, where nothing is left of what is added to such a number.
        let expected = interpret(&graph, &tensors, &[]).unwrap();
        for &(dtype, limit) in types {
            let (cast, report) = autocast(&graph, dtype, &POLICY).unwrap();
            assert!(report.is_some());
            let actual = interpret(&cast, &tensors, &[]).unwrap();
            let error = error(&actual[0], &expected[0]);
            assert!(error < limit, "{fill} in {dtype}: {error}");
        }
    }
}

/// The gradient of a softmax near 1 is a small difference of the terms that its formula gives for a sum and
/// for what is summed.
#[test]
fn formulas_of_gradients_are_as_exact_as_gradients() {
    let graph = Graph::parse(
        "graph @softmax {
      %x = parameter 0 : f32[4,8]
      %w = parameter 1 : f32[8,3]
      %v = parameter 2 : f32[3,8]
      %d = parameter 3 : f32[4,8]
      %s = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[4,3] ; fwd
      %e = exp %s : f32[4,3] ; fwd
      %sum = reduce sum %e {axes=[1]} : f32[4] ; fwd
      %t = broadcast %sum {dims=[0]} : f32[4,3] ; fwd
      %p = div %e, %t : f32[4,3] ; fwd
      %y = dot_general %p, %v {a_contract=[1], b_contract=[0]} : f32[4,8] ; fwd
      %dp = dot_general %d, %v {a_contract=[1], b_contract=[1]} : f32[4,3] ; bwd
      %de = div %dp, %t : f32[4,3] ; bwd
      %minus = neg %e : f32[4,3] ; bwd
      %square = mul %t, %t : f32[4,3] ; bwd
      %factor = div %minus, %square : f32[4,3] ; bwd
      %dt = mul %dp, %factor : f32[4,3] ; bwd
      %dsum = reduce sum %dt {axes=[1]} : f32[4] ; bwd
      %rows = broadcast %dsum {dims=[0]} : f32[4,3] ; bwd
      %both = add %de, %rows : f32[4,3] ; bwd
      %ds = mul %both, %e : f32[4,3] ; bwd
      return %y, %ds
    }",
    )
    .unwrap();
    let of = |count: usize, value: fn(usize) -> f64| (0..count).map(value);
    // The first score of a row is larger by 8, so its probability is nearly 1. All are numbers of 16 bits.
    let tensors = [
        HostTensor::from_floats(DType::F32, [4, 8], of(32, |_| 1.0)),
        HostTensor::from_floats(
            DType::F32,
            [8, 3],
            of(24, |at| if at % 3 == 0 { 1.0 } else { 0.0 }),
        ),
        HostTensor::from_floats(DType::F32, [3, 8], of(24, |at| (at % 5) as f64 - 1.0)),
        HostTensor::from_floats(DType::F32, [4, 8], of(32, |at| (at % 7) as f64 - 2.0)),
    ];
    let expected = interpret_f64(&graph, &tensors, &[]).unwrap();
    for (dtype, limit) in TYPES {
        let (cast, _) = autocast(&graph, dtype, &POLICY).unwrap();
        let actual = interpret(&cast, &tensors, &[]).unwrap();
        let error = error(&actual[1], &expected[1]);
        assert!(error < limit, "{dtype}: {error}");
    }
}

/// Each roll joins two parts of the one before: the ways from the first to a reader are 2 to the power of 60.
#[test]
fn a_loop_of_rolls_is_looked_at_once() {
    let (mut graph, p) = (
        Graph::new("rolls"),
        Provenance {
            phase: Phase::Forward,
            ..Provenance::default()
        },
    );
    let [x, w, v] = [[8, 4], [4, 6], [6, 5]].map(|shape| graph.parameter(f32s(&shape)));
    let dims = kiln_graph::op::DotDims {
        a_batch: Dims::new(),
        b_batch: Dims::new(),
        a_contract: Dims::from_slice(&[1]),
        b_contract: Dims::from_slice(&[0]),
        result: None,
    };
    let product = |graph: &mut Graph, a, b| graph.add(Op::DotGeneral(dims.clone()), &[a, b], &p).unwrap();
    let y = product(&mut graph, x, w);
    let (mut rolled, mut sum) = (y, y);
    for _ in 0..60 {
        let [last, first] = [(5, 6), (0, 5)].map(|(start, limit)| {
            let op = Op::Slice {
                starts: Dims::from_slice(&[0, start]),
                limits: Dims::from_slice(&[8, limit]),
                steps: Dims::from_slice(&[1, 1]),
            };
            graph.add(op, &[rolled], &p).unwrap()
        });
        rolled = graph.add(Op::Concat { axis: 1 }, &[last, first], &p).unwrap();
        let both = graph.binary(BinaryOp::Mul, y, rolled, &p).unwrap();
        sum = graph.binary(BinaryOp::Add, sum, both, &p).unwrap();
    }
    let out = product(&mut graph, sum, v);
    graph.output(out, None);
    let (cast, _) = autocast(&graph, DType::BF16, &POLICY).unwrap();
    verify::verify(&cast).unwrap();
    let (tensors, scalars) = random_arguments(&graph, 1);
    let [exact, rounded] = [&graph, &cast].map(|graph| interpret(graph, &tensors, &scalars).unwrap());
    let norm = |of: &dyn Fn(f64, f64) -> f64| {
        let pairs = exact[0].to_f64s().into_iter().zip(rounded[0].to_f64s());
        pairs.map(|(a, b)| of(a, b).powi(2)).sum::<f64>().sqrt()
    };
    assert!(norm(&|a, b| a - b) < TYPES[0].1 * norm(&|a, _| a));
}
