//! Graphs of other sizes, from one graph.

use kiln_graph::{Dimension, Graph, Resizer};

/// A layer over `[batch, length, 4]` with positions from a table, means over words, a causal mask, a reshape
/// that joins batch and length, and the gradient of the table's slice.
fn program(batch: usize, length: usize) -> Graph {
    let words = batch * length;
    Graph::parse(&format!(
        "graph @step {{
  %0 = parameter 0 : f32[{batch},{length},4]
  %1 = parameter 1 : f32[32,4]
  %2 = parameter 2 : f32[4,6]
  %3 = slice %1 {{starts=[0,0], limits=[{length},4], steps=[1,1]}} : f32[{length},4]
  %4 = broadcast %3 {{dims=[1,2]}} : f32[{batch},{length},4]
  %5 = add %0, %4 : f32[{batch},{length},4]
  %6 = reshape %5 : f32[{words},4]
  %7 = dot_general %6, %2 {{a_contract=[1], b_contract=[0]}} : f32[{words},6]
  %8 = reshape %7 : f32[{batch},{length},6]
  %9 = iota {{axis=0}} : i32[{length}]
  %10 = broadcast %9 {{dims=[0]}} : i32[{length},{length}]
  %11 = broadcast %9 {{dims=[1]}} : i32[{length},{length}]
  %12 = compare ge %10, %11 : bool[{length},{length}]
  %13 = cast %12 : f32[{length},{length}]
  %14 = dot_general %13, %8 {{a_contract=[1], b_contract=[1]}} : f32[{length},{batch},6]
  %15 = reduce sum %14 {{axes=[0]}} : f32[{batch},6]
  %16 = constant {length}.0 : f32[]
  %17 = broadcast %16 {{dims=[]}} : f32[{batch},6]
  %18 = div %15, %17 : f32[{batch},6]
  %19 = slice %8 {{starts=[0,{last},0], limits=[{batch},{length},6], steps=[1,1,1]}} : f32[{batch},1,6]
  %20 = reshape %19 : f32[{batch},6]
  %21 = add %18, %20 : f32[{batch},6]
  %22 = constant 0.0 : f32[]
  %23 = broadcast %22 {{dims=[]}} : f32[32,4]
  %24 = update_slice %23, %3 {{starts=[0,0], steps=[1,1]}} : f32[32,4]
  return %21, %24
}}
",
        last = length - 1
    ))
    .unwrap()
}

fn dimension(parameter: u32, axis: usize) -> Dimension {
    Dimension { parameter, axis }
}

#[test]
fn sizes_spread_to_what_follows_from_them() {
    let varies = [true, false, false];
    for (batch, length) in [(3, 8), (8, 3), (4, 4), (6, 4)] {
        let from = program(batch, length);
        let resizer = Resizer::new(&from, &varies);
        for (batch, length) in [(5, 31), (2, 2), (7, 12)] {
            let sizes = [(dimension(0, 0), batch), (dimension(0, 1), length)];
            assert_eq!(resizer.at(&sizes).unwrap(), program(batch, length));
        }
        if batch != length {
            // Which of two equal extents a joined one consists of cannot be told.
            assert_eq!(resizer.at(&[(dimension(0, 1), 20)]).unwrap(), program(batch, 20));
        }
        assert_eq!(resizer.equals(dimension(0, 1)), [dimension(0, 1)]);
    }
}

#[test]
fn what_cannot_have_another_size_says_why() {
    let graph = program(3, 8);
    let resizer = Resizer::new(&graph, &[true, false, false]);
    let why = |at: Dimension, size: usize| resizer.at(&[(at, size)]).unwrap_err().to_string();
    assert!(
        why(dimension(0, 2), 5).contains("argument"),
        "{}",
        why(dimension(0, 2), 5)
    );
    // The table has 32 rows.
    let long = why(dimension(0, 1), 40);
    assert!(long.starts_with("slice: ") && long.contains("32"), "{long}");
    let single = program(1, 8);
    let resizer = Resizer::new(&single, &[true, false, false]);
    let why = resizer.at(&[(dimension(0, 0), 5)]).unwrap_err().to_string();
    assert!(why.contains("size 1"), "{why}");
}
