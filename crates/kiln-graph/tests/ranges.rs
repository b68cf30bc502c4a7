//! Ranges hold what they are said to hold, and indices that can be out of range are found.

use kiln_graph::range::{Bounds, Range, Ranges};
use kiln_graph::testing::{GraphConfig, graphs, random_arguments, special_arguments};
use kiln_graph::{Graph, IndexError, Interpreter, Op, indices};
use proptest::prelude::*;

/// The least and the largest element of a tensor of integers.
fn extremes(tensor: &kiln_graph::HostTensor) -> Option<Range> {
    if tensor.ty().dtype.is_float() {
        return None;
    }
    let elements = tensor.to_f64s();
    let low = elements.iter().copied().reduce(f64::min)?;
    let high = elements.iter().copied().reduce(f64::max)?;
    // Larger ones are not exact in f64.
    (low.abs().max(high.abs()) < 2f64.powi(53)).then_some(Range::Int(low as i128, high as i128))
}

/// Whether every element of every value of `graph` is in its range, for these arguments: in that which the
/// graph alone tells, and in that which follows from the ranges of the arguments.
fn check(
    graph: &Graph,
    (tensors, scalars): (Vec<kiln_graph::HostTensor>, Vec<kiln_graph::Scalar>),
) -> Result<(), TestCaseError> {
    let Ok(values) = Interpreter::new(graph).run_values(&tensors, &scalars) else {
        return Ok(());
    };
    let ranges = Ranges::new(graph);
    for ((value, data), tensor) in graph.values().zip(values) {
        let given = |index: u32| extremes(&tensors[index as usize]);
        let bounds = Bounds::of(graph, &ranges, value);
        let followed = bounds.and_then(|bounds| bounds.range(graph, given));
        for range in [ranges.get(value), followed] {
            let outside = |element: f64| match range {
                None => false,
                Some(Range::Int(low, high)) => element < low as f64 || element > high as f64,
                Some(Range::Float(low, high)) => !(low..=high).contains(&element),
            };
            let wrong = tensor.to_f64s().into_iter().find(|&element| outside(element));
            prop_assert!(
                wrong.is_none(),
                "{wrong:?} in {value} : {}, said to be {range:?}\n{graph}",
                data.ty,
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_element_is_in_the_range_of_its_value(random in graphs(GraphConfig::default()), seed in any::<u64>()) {
        check(&random.graph, random_arguments(&random.graph, seed))?;
        check(&random.graph, special_arguments(&random.graph, seed))?;
    }

    /// Arithmetic on small integers and their positions, where ranges are narrow.
    #[test]
    fn narrow_ranges_hold(
        words in prop::collection::vec((0..11usize, 0..16usize, 0..16usize), 1..24),
        arguments in prop::collection::vec(any::<i8>(), 6),
    ) {
        let mut text = String::from(
            "graph @narrow {
               %p = parameter 0 : i8[6]
               %v0 = iota {axis=0} : i8[6]
               %k = constant 5 : i8[]
               %v1 = broadcast %k {dims=[]} : i8[6]
               %m = constant -3 : i8[]
               %v2 = broadcast %m {dims=[]} : i8[6]
               %v3 = max %p, %v2 : i8[6]
               %v4 = min %v3, %v1 : i8[6]\n",
        );
        let mut last = 4;
        for (word, a, b) in words {
            let (a, b) = (a % (last + 1), b % (last + 1));
            last += 1;
            let op = ["add", "sub", "mul", "div", "rem", "max", "min", "and", "shr", "neg", "abs"][word];
            let line = match word {
                9 | 10 => format!("%v{last} = {op} %v{a} : i8[6]\n"),
                _ => format!("%v{last} = {op} %v{a}, %v{b} : i8[6]\n"),
            };
            text.push_str(&line);
        }
        text.push_str(&format!("return %v{last} }}"));
        let graph = Graph::parse(&text.replace(" }", "\n}")).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        let values: Vec<i64> = arguments.into_iter().map(i64::from).collect();
        let argument = kiln_graph::HostTensor::from_ints(kiln_graph::DType::I8, [6], values);
        check(&graph, (vec![argument], Vec::new()))?;
    }
}

#[test]
fn what_is_in_range_by_construction_is_not_looked_at() {
    let graph = Graph::parse(
        "graph @g {
           %x = parameter 0 : f32[8,6]
           %ids = parameter 1 : i64[4]
           %images = parameter 2 : f32[1,2,4,4]
           %dy = parameter 3 : f32[1,2,2,2]
           %position = arg_reduce max %x {axis=1} : i64[8]
           %a = index_select %x, %position {axis=1} : f32[8,8]
           %values, %largest = top_k %x {axis=0, k=2} : f32[2,6], i64[2,6]
           %b = gather %x, %largest {axis=0} : f32[2,6]
           %pooled, %where = max_pool_with_indices %images {size=[2,2], stride=[2,2], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]} : f32[1,2,2,2], i64[1,2,2,2]
           %c = max_pool_grad %dy, %where {input=[4,4]} : f32[1,2,4,4]
           %seven = constant 7 : i64[]
           %most = broadcast %seven {dims=[]} : i64[4]
           %zero = constant 0 : i64[]
           %least = broadcast %zero {dims=[]} : i64[4]
           %low = min %ids, %most : i64[4]
           %clamped = max %low, %least : i64[4]
           %d = index_select %x, %clamped {axis=0} : f32[4,6]
           return %a, %b, %c, %d
         }",
    )
    .unwrap();
    assert_eq!(indices::checks(&graph), []);
}

/// A loss that leaves out padding: labels, shifted and with 0 in place of -1.
#[test]
fn ranges_of_arguments_bound_what_is_computed_from_them() {
    let graph = Graph::parse(
        "graph @masked {
           %tokens = parameter 0 : i32[2,9]
           %noise = parameter 1 : f32[16]
           %labels = slice %tokens {starts=[0,1], limits=[2,9], steps=[1,1]} : i32[2,8]
           %flat = reshape %labels : i32[16]
           %none = constant -1 : i32[]
           %nones = broadcast %none {dims=[]} : i32[16]
           %zero = constant 0 : i32[]
           %zeros = broadcast %zero {dims=[]} : i32[16]
           %pad = compare eq %flat, %nones : bool[16]
           %known = select %pad, %zeros, %flat : i32[16]
           %wide = cast %known : i64[16]
           %some = cast %noise : i32[16]
           %mixed = add %known, %some : i32[16]
           return %wide, %mixed
         }",
    )
    .unwrap();
    let ranges = Ranges::new(&graph);
    let [wide, mixed] = [0, 1].map(|output| graph.outputs[output].value);
    let bounds = Bounds::of(&graph, &ranges, wide).unwrap();
    let within = |low, high| bounds.range(&graph, |_| Some(Range::Int(low, high)));
    assert_eq!(within(3, 99), Some(Range::Int(0, 99)));
    // Whether an element is the padding is not followed.
    assert_eq!(within(-1, 99), Some(Range::Int(-1, 99)));
    assert_eq!(bounds.range(&graph, |_| None), Range::of(kiln_graph::DType::I32));
    // A sum of which one part is not known may wrap.
    let bounds = Bounds::of(&graph, &ranges, mixed).unwrap();
    let sum = bounds.range(&graph, |index| (index == 0).then_some(Range::Int(0, 9)));
    assert_eq!(sum, Range::of(kiln_graph::DType::I32));
    // Nothing is given for what the step makes of its own numbers.
    let own = graph
        .nodes()
        .find(|(_, data)| matches!(data.op, Op::Constant { .. }))
        .unwrap();
    assert!(Bounds::of(&graph, &ranges, own.1.outputs[0]).is_none());
}

#[test]
fn what_may_be_out_of_range_is_looked_at_behind_its_views() {
    let graph = Graph::parse(
        "graph @g {
           %x = parameter 0 : f32[8,6]
           %ids = parameter 1 : i64[4]
           %column = reshape %ids : i64[4,1]
           %wide = broadcast %column {dims=[0,1]} : i64[4,6]
           %a = gather %x, %wide {axis=0} : f32[4,6]
           %part = slice %ids {starts=[0], limits=[2], steps=[1]} : i64[2]
           %b = index_select %x, %part {axis=0} : f32[2,6]
           %none = slice %ids {starts=[0], limits=[0], steps=[1]} : i64[0]
           %c = index_select %x, %none {axis=0} : f32[0,6]
           %low = constant 8 : i64[]
           %limit = broadcast %low {dims=[]} : i64[4]
           %clamped = min %ids, %limit : i64[4]
           %d = index_select %x, %clamped {axis=0} : f32[4,6]
           return %a, %b, %c
         }",
    )
    .unwrap();
    let found: Vec<(String, &str, usize)> = indices::checks(&graph)
        .iter()
        .map(|check| {
            let behind = graph.def(check.indices).op.name();
            (graph.node(check.node).op.name().to_owned(), behind, check.extent)
        })
        .collect();
    let expected = [
        ("gather", "parameter"),
        ("index_select", "slice"),
        ("index_select", "min"),
    ];
    let expected = expected.map(|(user, behind)| (user.to_owned(), behind, 8));
    assert_eq!(found, expected, "also the one whose result nobody needs");
}

#[test]
fn the_error_names_operation_line_index_and_bound() {
    let graph = Graph::parse(
        "graph @g {
           %x = parameter 0 : f32[8]
           %ids = parameter 1 : i64[1]
           %a = gather %x, %ids {axis=0} : f32[1] ; fwd BaseFloat.Gather at src/main.rs:12
           return %a
         }",
    )
    .unwrap();
    let (_, node) = graph
        .nodes()
        .find(|(_, node)| matches!(node.op, Op::Gather { .. }))
        .unwrap();
    assert_eq!(
        IndexError::new(node, -1, 0, 8).to_string(),
        "index -1 is out of range for dimension 0 of extent 8 in `gather` (BaseFloat.Gather at src/main.rs:12)"
    );
}
