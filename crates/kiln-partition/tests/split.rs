//! The two graphs together compute what the joint graph computes.

mod support;

use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, HostTensor, Scalar, Value, interpret, verify};
use kiln_partition::{
    Liveness, Options, OutputRole, PartitionError, Planner, SavedSource, Split, Strategy, split,
    split_within, without_tangents,
};
use support::{Sizes, Tape, arguments, decoder, f32s};

/// Runs both halves on the joint graph's arguments; the joint graph's outputs in their order.
fn run_split(
    joint: &Graph,
    split: &Split,
    tangents: &[u32],
    tensors: &[HostTensor],
    scalars: &[Scalar],
) -> Vec<HostTensor> {
    assert_eq!(verify(&split.forward), Ok(()));
    assert_eq!(verify(&split.backward), Ok(()));
    let (given, later): (Vec<_>, Vec<_>) = tensors
        .iter()
        .enumerate()
        .partition(|(i, _)| !tangents.contains(&(*i as u32)));
    let inputs: Vec<HostTensor> = given.into_iter().map(|(_, tensor)| tensor.clone()).collect();
    assert_eq!(later.len(), tangents.len());
    let forward = interpret(&split.forward, &inputs, scalars).expect("forward runs");
    let saved = split.saved.iter().map(|source| match *source {
        SavedSource::Input(index) => inputs[index as usize].clone(),
        SavedSource::Output(index) => forward[index as usize].clone(),
    });
    let arguments: Vec<HostTensor> = saved
        .chain(tangents.iter().map(|&index| tensors[index as usize].clone()))
        .collect();
    let gradients = interpret(&split.backward, &arguments, scalars).expect("backward runs");
    let mut outputs: Vec<Option<HostTensor>> = vec![None; joint.outputs.len()];
    for (&position, tensor) in split.forward_outputs.iter().zip(&forward) {
        outputs[position] = Some(tensor.clone());
    }
    assert_eq!(split.gradients.len(), gradients.len());
    for (&position, tensor) in split.gradients.iter().zip(gradients) {
        outputs[position] = Some(tensor);
    }
    outputs
        .into_iter()
        .map(|tensor| tensor.expect("every output comes from one half"))
        .collect()
}

fn check(joint: &Graph, tangents: &[u32], roles: &[OutputRole]) {
    let (tensors, scalars) = arguments(joint, 9);
    let expected = interpret(joint, &tensors, &scalars).expect("the joint graph runs");
    for strategy in [Strategy::MinimumCut, Strategy::KeepEverything] {
        let options = Options {
            strategy,
            ..Options::default()
        };
        let split = split(joint, tangents, roles, &options).expect("splits");
        assert_eq!(
            run_split(joint, &split, tangents, &tensors, &scalars),
            expected,
            "{strategy:?}"
        );
    }
}

fn index(tape: &Tape, value: Value) -> u32 {
    match tape.graph.def(value).op {
        Op::Parameter { index, .. } => index,
        _ => panic!("{value} is no argument"),
    }
}

/// Loss and gradients of a decoder with dropout, and the argument that is the loss's tangent.
fn decoder_with_tangent(sizes: Sizes) -> (Tape, u32) {
    let mut tape = Tape::new("decoder");
    let loss = decoder(&mut tape, sizes);
    let tangent = tape.input(f32s(&[]));
    let weights = tape.parameters.clone();
    let gradients = tape.backward_from(&[(loss, tangent)], &weights);
    tape.graph.output(loss, None);
    gradients
        .into_iter()
        .for_each(|gradient| tape.graph.output(gradient, None));
    let tangent = index(&tape, tangent);
    (tape, tangent)
}

#[test]
fn a_decoder_with_dropout() {
    let (tape, tangent) = decoder_with_tangent(Sizes {
        layers: 2,
        ..Sizes::SMALL
    });
    check(&tape.graph, &[tangent], &[]);

    let split = split(&tape.graph, &[tangent], &[], &Options::default()).expect("splits");
    assert_eq!(split.forward_outputs, [0]);
    assert_eq!(split.gradients.len(), tape.parameters.len());
    let weights_saved = split
        .saved
        .iter()
        .filter(|source| matches!(source, SavedSource::Input(_)))
        .count();
    assert!(weights_saved > 0, "weights are read where they are, not copied");
}

/// What the larger half takes by the planner, and what lies between the two.
fn memory(split: &Split) -> u64 {
    let kept = split.forward.outputs[split.forward_outputs.len()..].iter();
    let kept: usize = kept.map(|output| split.forward.ty(output.value).bytes()).sum();
    let halves = [&split.forward, &split.backward].map(|half| Liveness.peak(half).expect("planned"));
    halves[0].max(halves[1]) + kept as u64
}

#[test]
fn a_budget_holds_for_both_halves_and_what_lies_between_them() {
    let (tape, tangent) = decoder_with_tangent(Sizes {
        layers: 6,
        hidden: 48,
        ..Sizes::SMALL
    });
    let joint = &tape.graph;
    let within = |budget: u64| split_within(joint, &[tangent], &[], &Options::default(), budget, Liveness);
    let unlimited = memory(&within(u64::MAX).expect("anything fits"));
    assert_eq!(
        unlimited,
        memory(&split(joint, &[tangent], &[], &Options::default()).expect("splits"))
    );
    let smallest = match within(0) {
        Err(PartitionError::BudgetTooSmall { smallest, .. }) => smallest,
        other => panic!("nothing fits in nothing: {:?}", other.map(|split| memory(&split))),
    };
    assert!(smallest * 4 <= unlimited * 3, "{smallest} of {unlimited}");
    assert!(within(smallest - 1).is_err());

    let (tensors, scalars) = arguments(joint, 9);
    let expected = interpret(joint, &tensors, &scalars).expect("the joint graph runs");
    for share in 0..4 {
        let budget = smallest + (unlimited - smallest) * share / 3;
        let split = within(budget).expect("it fits");
        assert!(memory(&split) <= budget, "{} within {budget}", memory(&split));
        assert_eq!(run_split(joint, &split, &[tangent], &tensors, &scalars), expected);
    }
}

/// Several outputs, one of which carries no gradient, gradients in between the outputs, an input as an
/// output, running state.
#[test]
fn mixed_outputs() {
    let mut tape = Tape::new("mixed");
    let x = tape.input(f32s(&[3, 4]));
    let running = tape.input(f32s(&[4]));
    let y = tape.linear(x, 4, 4);
    let mean = tape.sum(y, &[0]);
    let statistic = tape.binary(BinaryOp::Add, running, mean);
    let y = tape.unary(UnaryOp::Tanh, y);
    let scaled = tape.rows(running, y);
    let z = tape.binary(BinaryOp::Mul, y, scaled);
    let [dy, dz] = [(); 2].map(|()| tape.input(f32s(&[3, 4])));
    let wanted = [vec![x], tape.parameters.clone()].concat();
    let gradients = tape.backward_from(&[(y, dy), (z, dz)], &wanted);
    let constant = tape.like(2.0, x);
    tape.graph.output(gradients[0], None);
    tape.graph.output(y, None);
    tape.graph.output(gradients[1], None);
    tape.state(running, statistic);
    tape.graph.output(z, None);
    tape.graph.output(x, None);
    tape.graph.output(gradients[2], None);
    tape.graph.output(constant, None);
    use OutputRole::{Auto, Forward, Gradient, State};
    let tangents = [index(&tape, dy), index(&tape, dz)];
    let roles = [Auto, Forward, Gradient, State, Forward, Auto, Gradient, Gradient];
    check(&tape.graph, &tangents, &roles);

    // The backward pass reads the old running mean: the forward pass must not overwrite it.
    let split = split(&tape.graph, &tangents, &roles, &Options::default()).expect("splits");
    assert!(split.forward.outputs.iter().all(|output| output.alias.is_none()));
}

#[test]
fn what_cannot_be_split_is_said() {
    let mut tape = Tape::new("wrong");
    let x = tape.input(f32s(&[2]));
    let t = tape.input(f32s(&[2]));
    let y = tape.binary(BinaryOp::Mul, x, t);
    tape.graph.output(y, None);
    let options = Options::default();
    let error = split(&tape.graph, &[1], &[OutputRole::Forward], &options).unwrap_err();
    assert!(
        matches!(
            error,
            PartitionError::ForwardNeedsTangent {
                output: 0,
                tangent: 1,
                ..
            }
        ),
        "{error}"
    );
    let error = split(&tape.graph, &[2], &[], &options).unwrap_err();
    assert!(
        matches!(
            error,
            PartitionError::UnknownTangent {
                index: 2,
                parameters: 2,
                ..
            }
        ),
        "{error}"
    );
    let error = split(&tape.graph, &[1], &[OutputRole::Auto; 3], &options).unwrap_err();
    assert!(
        matches!(error, PartitionError::RoleCount { given: 3, outputs: 1 }),
        "{error}"
    );
}

/// A loss that uses some outputs has the gradients that zeros for the others give, wherever those are finite.
#[test]
fn tangents_that_are_not_there_are_zeros() {
    let joint = Graph::parse(
        "graph @f {
  %x = parameter 0 : f32[2,3]
  %w = parameter 1 : f32[3,3]
  %da = parameter 2 : f32[2,3]
  %db = parameter 3 : f32[2,3]
  %dc = parameter 4 : f32[2,3]
  %zero = constant 0 : f32[]
  %zeros = broadcast %zero {dims=[]} : f32[2,3]
  %a = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[2,3]   ; fwd
  %b = exp %a : f32[2,3]                                                ; fwd
  %c = sqrt %x : f32[2,3]                                               ; fwd
  %r = recip %c : f32[2,3]                                              ; bwd
  %dx_c = mul %dc, %r : f32[2,3]                                        ; bwd
  %da_b = mul %db, %b : f32[2,3]                                        ; bwd
  %da_all = sub %da, %da_b : f32[2,3]                                   ; bwd
  %dw = dot_general %x, %da_all {a_contract=[0], b_contract=[0]} : f32[3,3] ; bwd
  %dx_a = dot_general %da_all, %w {a_contract=[1], b_contract=[1]} : f32[2,3] ; bwd
  %hidden = compare lt %x, %zeros : bool[2,3]                                   ; bwd
  %dx_s = select %hidden, %zeros, %dx_c : f32[2,3]                      ; bwd
  %dx = add %dx_a, %dx_s : f32[2,3]                                     ; bwd
  %rows = concat %dc, %da_all {axis=0} : f32[4,3]                       ; bwd
  %largest = max %dc, %db : f32[2,3]                                    ; bwd
  return %a, %b, %c, %dw, %dx, %rows, %largest
}",
    )
    .unwrap();
    let split = split(&joint, &[2, 3, 4], &[], &Options::default()).unwrap();
    let (tensors, scalars) = arguments(&split.backward, 5);
    let saved = split.saved.len();
    for set in 0..8u32 {
        let given: Vec<bool> = (0..3).map(|tangent| set >> tangent & 1 == 1).collect();
        let part = without_tangents(&split.backward, saved, &given, |_| false).unwrap();
        assert_eq!(verify(&part), Ok(()));
        let absent = |index: usize| index.checked_sub(saved).is_some_and(|tangent| !given[tangent]);
        let with_zeros: Vec<HostTensor> = tensors
            .iter()
            .enumerate()
            .map(|(index, tensor)| match absent(index) {
                true => HostTensor::from_floats(tensor.ty().dtype, tensor.ty().shape.clone(), [0.0; 6]),
                false => tensor.clone(),
            })
            .collect();
        let there: Vec<HostTensor> = tensors
            .iter()
            .enumerate()
            .filter(|(index, _)| !absent(*index))
            .map(|(_, tensor)| tensor.clone())
            .collect();
        assert_eq!(part.parameters().len(), there.len());
        let (found, expected) = (
            interpret(&part, &there, &scalars).unwrap(),
            interpret(&split.backward, &with_zeros, &scalars).unwrap(),
        );
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.to_f64s(), expected.to_f64s(), "{given:?}\n{part}");
        }
        let roots = part.nodes().any(|(_, data)| data.op == Op::Unary(UnaryOp::Recip));
        assert_eq!(roots, given[2], "{part}");
    }
}

/// What follows from a tangent that is not there is not there either, whichever operation it goes through: the
/// sum behind it is the other gradient, although an infinite factor stands between, which makes a NaN of
/// zeros. Each line is an operation on `%d`, the tangent that is not there, with values of the forward pass
/// (`%x` is all ones) and constants.
#[test]
fn what_is_absent_goes_through_no_operation() {
    let window = "size=[2], stride=[1], pad_low=[0], pad_high=[0], dilation=[1]";
    let conv = "stride=[1], pad_low=[0], pad_high=[0], dilation=[1], groups=1";
    let operations = [
        ("neg %d", "f32[2,3]"),
        ("abs %d", "f32[2,3]"),
        ("add %d, %x", "f32[2,3]"),
        ("sub %x, %d", "f32[2,3]"),
        ("mul %x, %d", "f32[2,3]"),
        ("div %d, %x", "f32[2,3]"),
        ("max %d, %x", "f32[2,3]"),
        ("min %zeros, %d", "f32[2,3]"),
        ("select %mask, %d, %zeros", "f32[2,3]"),
        ("select %mask, %x, %d", "f32[2,3]"),
        ("cast %d", "f64[2,3]"),
        ("compare ge %d, %zeros", "bool[2,3]"),
        ("reduce sum %d {axes=[0]}", "f32[3]"),
        ("reduce max %d {axes=[1]}", "f32[2]"),
        ("cumulative sum %d {axis=1}", "f32[2,3]"),
        ("reshape %d", "f32[6]"),
        ("transpose %d {perm=[1,0]}", "f32[3,2]"),
        ("broadcast %d {dims=[1,2]}", "f32[2,2,3]"),
        ("slice %d {starts=[0,1], limits=[2,3], steps=[1,1]}", "f32[2,2]"),
        ("pad %d, %one {low=[0,1], high=[0,0]}", "f32[2,4]"),
        ("concat %d, %x {axis=0}", "f32[4,3]"),
        ("flip %d {axes=[0]}", "f32[2,3]"),
        ("update_slice %wide, %d {starts=[1,0], steps=[1,1]}", "f32[4,3]"),
        ("update_slice %d, %row {starts=[0,0], steps=[1,1]}", "f32[2,3]"),
        ("gather %d, %at {axis=1}", "f32[2,3]"),
        ("scatter add %x, %at, %d {axis=1}", "f32[2,3]"),
        ("scatter max %zeros, %at, %d {axis=1}", "f32[2,3]"),
        ("index_select %d, %rows {axis=0}", "f32[2,3]"),
        ("index_put add %wide, %rows, %d {axis=0}", "f32[4,3]"),
        ("index_put assign %d, %rows, %x {axis=0}", "f32[2,3]"),
        ("dot_general %d, %x {a_contract=[1], b_contract=[1]}", "f32[2,2]"),
        ("conv %image, %taps {CONV}", "f32[1,1,5]"),
        ("conv_input_grad %image, %taps {CONV, input=[7]}", "f32[1,1,7]"),
        (
            "conv_weight_grad %image, %pieces {CONV, kernel=[2]}",
            "f32[1,1,2]",
        ),
        ("max_pool %image {WINDOW}", "f32[1,1,5]"),
        ("avg_pool %image {WINDOW}", "f32[1,1,5]"),
        ("avg_pool_grad %image {WINDOW, input=[7]}", "f32[1,1,7]"),
        ("max_pool_grad %image, %places {input=[6]}", "f32[1,1,6]"),
        (
            "attention_grad %q, %q, %q, %one, %stats, %heads, %one, %one",
            "f32[1,1,2,3], f32[1,1,2,3], f32[1,1,2,3]",
        ),
        ("sort %d {axis=1}", "f32[2,3], i64[2,3]"),
        ("top_k %d {axis=1, k=1}", "f32[2,1], i64[2,1]"),
        ("extern \"own\" %x, %d", "f32[2,3]"),
    ];
    for (operation, types) in operations {
        let operation = operation.replace("CONV", conv).replace("WINDOW", window);
        let results = types.matches('[').count();
        let names = ["%t", "%t2", "%t3"][..results].join(", ");
        let first = types.split_inclusive(']').next().unwrap();
        let shape = &first[first.find('[').unwrap()..];
        let axes: Vec<String> = (0..shape.split(',').count())
            .map(|axis| axis.to_string())
            .collect();
        let text = format!(
            "graph @t {{
  %x = parameter 0 : f32[2,3]
  %infinity = parameter 1 : f32[]
  %g = parameter 2 : f32[]
  %d = parameter 3 : f32[2,3]
  %zero = constant 0 : f32[]
  %one = constant 1 : f32[]
  %zeros = broadcast %zero {{dims=[]}} : f32[2,3]
  %wide = broadcast %zero {{dims=[]}} : f32[4,3]
  %row = slice %x {{starts=[0,0], limits=[1,3], steps=[1,1]}} : f32[1,3]
  %mask = compare gt %x, %zeros : bool[2,3]
  %at = iota {{axis=0}} : i64[2,3]
  %rows = iota {{axis=0}} : i64[2]
  %places = iota {{axis=2}} : i64[1,1,6]
  %taps = broadcast %one {{dims=[]}} : f32[1,1,2]
  %pieces = broadcast %one {{dims=[]}} : f32[1,1,5]
  %image = reshape %d : f32[1,1,6]
  %q = reshape %x : f32[1,1,2,3]
  %stats = broadcast %one {{dims=[]}} : f32[1,1,2,2]
  %heads = reshape %d : f32[1,1,2,3]
  {names} = {operation} : {types}
  %f = cast %t : f32{shape}
  %factors = broadcast %infinity {{dims=[]}} : f32{shape}
  %product = mul %f, %factors : f32{shape}
  %sum = reduce sum %product {{axes=[{axes}]}} : f32[]
  %all = add %g, %sum : f32[]
  return %all
}}",
            axes = axes.join(",")
        );
        let backward = Graph::parse(&text).unwrap_or_else(|error| panic!("{operation}: {error}"));
        let scalar = |value: f64| HostTensor::from_floats(DType::F32, [], [value]);
        let ones = HostTensor::from_floats(DType::F32, [2, 3], [1.0; 6]);
        let there = [ones.clone(), scalar(f64::INFINITY), scalar(7.0)];
        let part = without_tangents(&backward, 2, &[true, false], |_| false).unwrap();
        assert_eq!(verify(&part), Ok(()));
        let found = interpret(&part, &there, &[]).unwrap();
        assert_eq!(found[0].to_f64s(), [7.0], "{operation}\n{part}");
        // The interpreter does not run an operation kept whole.
        if operation.starts_with("extern") {
            continue;
        }
        // Of both tangents none is left out.
        let whole = without_tangents(&backward, 2, &[true, true], |_| false).unwrap();
        let found = interpret(&whole, &[&there[..], &[ones]].concat(), &[]).unwrap();
        assert_ne!(found[0].to_f64s(), [7.0], "{operation}");
    }
}

/// Other ranks wait for a mean over ranks, whose tangent may be there on theirs.
#[test]
fn what_is_absent_stops_no_operation_that_others_wait_for() {
    let backward = Graph::parse(
        "graph @t {
  %x = parameter 0 : f32[2]
  %g = parameter 1 : f32[2]
  %d = parameter 2 : f32[2]
  %twice = add %d, %d : f32[2]
  %mean = extern \"mean over ranks\" %twice : f32[2]
  %own = extern \"own\" %d : f32[2]
  %product = mul %mean, %x : f32[2]
  %some = add %g, %product : f32[2]
  %all = add %some, %own : f32[2]
  return %all
}",
    )
    .unwrap();
    let is_of_ranks = |op: &Op| matches!(op, Op::Extern(op) if op.name == "mean over ranks");
    let part = without_tangents(&backward, 1, &[true, false], is_of_ranks).unwrap();
    assert_eq!(verify(&part), Ok(()));
    let kept: Vec<_> = part
        .nodes()
        .filter(|(_, data)| matches!(data.op, Op::Extern(_)))
        .map(|(_, data)| (is_of_ranks(&data.op), part.is_zero(data.inputs[0])))
        .collect();
    assert_eq!(kept, [(true, true)], "{part}");
    // What follows from the mean is there, too.
    assert!(
        part.nodes().any(|(_, data)| data.op == Op::Binary(BinaryOp::Mul)),
        "{part}"
    );
}
