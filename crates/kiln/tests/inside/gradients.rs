//! Lines of gradients: each operation of the backward pass is shown at the line of the forward operation whose gradient it belongs to.
//!
//! The programs have a mark (`//: name`) at each line. The truth that claims are compared with comes from shapes that only one layer
//! has, or from the weight that a product reads.

use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use kiln::{CompileOptions, Compiled};
use kiln_graph::{Graph, Node, Op, Phase, Value};

use super::{B, matrix};

/// The line of a mark, and of nothing else.
fn line_of(mark: &str) -> String {
    let wanted = format!("//: {mark}");
    let mut lines = include_str!("gradients.rs")
        .lines()
        .enumerate()
        .filter(|(_, line)| line.ends_with(&wanted));
    let (line, _) = lines.next().unwrap_or_else(|| panic!("no mark {mark}"));
    assert!(lines.next().is_none(), "{mark} is there twice");
    format!("gradients.rs:{}", line + 1)
}

fn leaf<const R: usize, const C: usize>(start: i32) -> Tensor<B, 2> {
    Tensor::from_inner(matrix::<R, C>(start)).require_grad()
}

fn given<const R: usize, const C: usize>(start: i32) -> Tensor<B, 2> {
    Tensor::from_inner(matrix::<R, C>(start))
}

/// The graph of a program's only step.
fn graph_of<R>(program: impl FnOnce() -> R) -> (Graph, Compiled) {
    let options = CompileOptions::default().with_name("gradients");
    let mut region = kiln::compile(options);
    region.run(program).unwrap();
    let graph = Graph::clone(&region.report().steps[0].graph);
    (graph, region)
}

/// What is claimed of a backward node: the forward operation, and the line.
struct Claim<'a> {
    node: Node,
    op: &'a Op,
    shape: Vec<usize>,
    of: &'a str,
    line: &'a str,
}

/// The backward nodes, each with its line; those without a claim are counted.
fn claims(graph: &Graph) -> (Vec<Claim<'_>>, usize) {
    let mut without = 0;
    let mut found = Vec::new();
    for (node, data) in graph.nodes() {
        if data.provenance.phase != Phase::Backward || data.inputs.is_empty() {
            continue;
        }
        match (&data.provenance.gradient_of, &data.provenance.location) {
            (Some(of), Some(line)) => found.push(Claim {
                node,
                op: &data.op,
                shape: graph.shape(data.outputs[0]).dims().to_vec(),
                of,
                line,
            }),
            _ => without += 1,
        }
    }
    (found, without)
}

fn layers() -> impl FnMut() -> Vec<Tensor<B, 2>> {
    let (w1, w2) = (leaf::<6, 10>(1), leaf::<10, 3>(2));
    let (bias, gain) = (leaf::<1, 10>(3), leaf::<1, 10>(4));
    move || {
        let h = given::<8, 6>(5).matmul(w1.clone()); //: matmul 1
        let h = h + bias.clone(); //: bias
        let h = relu(h); //: relu
        let mean = h.clone().mean_dim(1); //: mean
        let centred = h - mean; //: centre
        let square = centred.clone() * centred.clone(); //: square
        let deviation = (square.mean_dim(1) + 1e-5).sqrt(); //: deviation
        let normal = centred / deviation; //: normal
        let normal = normal * gain.clone(); //: gain
        let y = normal.matmul(w2.clone()); //: matmul 2
        let error = y - given::<8, 3>(6); //: error
        let loss = error.powf_scalar(2.0).mean(); //: loss
        let grads = loss.backward(); //: backward
        [&w1, &bias, &gain, &w2]
            .map(|it| Tensor::from_inner(it.grad(&grads).unwrap()))
            .into()
    }
}

#[test]
fn gradients_have_the_line_of_their_forward_operation() {
    let (graph, _) = graph_of(layers());
    let (claims, without) = claims(&graph);
    let text = graph.to_string();
    // What the backward pass begins with is at its own line.
    assert_eq!(without, 1, "{text}");
    let wanted = [
        ("matmul 1", "matmul"),
        ("bias", "add"),
        ("relu", "relu"),
        ("mean", "mean_dim"),
        ("centre", "sub"),
        ("square", "mul"),
        ("deviation", "mean_dim"),
        ("deviation", "sqrt"),
        ("normal", "div"),
        ("gain", "mul"),
        ("matmul 2", "matmul"),
        ("loss", "mul"),
        ("loss", "mean"),
    ];
    for (mark, of) in wanted {
        let line = line_of(mark);
        assert!(
            claims
                .iter()
                .any(|claim| claim.of == of && claim.line.ends_with(&line)),
            "no gradient of {of} at {line} in\n{text}"
        );
    }
    for claim in &claims {
        assert!(
            wanted
                .iter()
                .any(|(mark, of)| claim.of == *of && claim.line.ends_with(&line_of(mark))),
            "gradient of {} at {}\n{text}",
            claim.of,
            claim.line
        );
        // Shapes that only one product has.
        let mark = match (claim.op, &claim.shape[..]) {
            (Op::DotGeneral(_), [6, 10]) => "matmul 1",
            (Op::DotGeneral(_), [10, 3] | [8, 10]) => "matmul 2",
            _ => continue,
        };
        assert!(
            claim.line.ends_with(&line_of(mark)),
            "{} is at {}\n{text}",
            claim.node,
            claim.line
        );
    }
}

/// The parameter that a value is but for movement of its elements.
fn parameter_of(graph: &Graph, value: Value) -> Option<u32> {
    let def = graph.def(value);
    match def.op {
        Op::Parameter { index, .. } => Some(index),
        ref op if op.is_movement() => parameter_of(graph, def.inputs[0]),
        _ => None,
    }
}

#[test]
fn layers_that_look_alike_are_not_taken_for_each_other() {
    let weights = [leaf::<8, 8>(1), leaf::<8, 8>(2), leaf::<8, 8>(3), leaf::<8, 8>(4)];
    let x = leaf::<8, 8>(5);
    let kept = weights.clone();
    let (graph, _) = graph_of(move || {
        let [a, b, c, d] = weights.clone();
        let h = x.clone() + relu(x.clone().matmul(a)); //: block 1
        let h = h.clone() + relu(h.matmul(b)); //: block 2
        let u = h.clone().matmul(c); //: branch 1
        let v = h.clone().matmul(d); //: branch 2
        let loss = (h + u + v).sum();
        let grads = loss.backward(); //: together
        kept.clone()
            .map(|it| Tensor::<B, 2>::from_inner(it.grad(&grads).unwrap()))
    });
    let text = graph.to_string();
    let marks = ["block 1", "block 2", "branch 1", "branch 2"];
    // The forward products say which argument is which weight.
    let line = |node: Node| graph.node(node).provenance.location.clone().unwrap_or_default();
    let products = |phase: Phase| {
        graph
            .nodes()
            .filter(move |(_, data)| data.provenance.phase == phase && matches!(data.op, Op::DotGeneral(_)))
            .map(|(node, _)| node)
            .collect::<Vec<Node>>()
    };
    let reads = |node: Node| {
        let inputs = graph.node(node).inputs.to_vec();
        inputs
            .into_iter()
            .filter_map(|value| parameter_of(&graph, value))
            .collect::<Vec<u32>>()
    };
    let mut known = 0;
    for (forward, mark) in products(Phase::Forward).into_iter().zip(marks) {
        assert!(line(forward).ends_with(&line_of(mark)), "{text}");
        let weight = *reads(forward).last().unwrap();
        for backward in products(Phase::Backward) {
            if reads(backward).contains(&weight) {
                assert_eq!(line(backward), line(forward), "{backward}\n{text}");
                known += 1;
            }
        }
    }
    assert!(known >= 4, "each weight is read once more: {known}\n{text}");
    let (claims, without) = claims(&graph);
    let products: Vec<&Claim> = claims
        .iter()
        .filter(|claim| matches!(claim.op, Op::DotGeneral(_)))
        .collect();
    assert_eq!(products.len(), 8, "{text}");
    assert!(
        without * 10 <= claims.len(),
        "{without} of {} have no claim\n{text}",
        claims.len()
    );
}
