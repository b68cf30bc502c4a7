//! Lines of gradients: each operation of the backward pass is shown at the line of the forward operation
//! whose gradient it belongs to.
//!
//! The programs have a mark (`//: name`) at each line. The truth that claims are compared with comes from
//! shapes that only one layer has, or from the weight that a product reads.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, relu, softmax};
use burn::tensor::{Int, Tensor};
use burn_optim::AdamWConfig;
use kiln::{CompileBackend, CompileOptions, Compiled, TrainStep};
use kiln_graph::{Graph, Node, Op, Phase, Value};

use super::{B, device, matrix};

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

/// Five powers, each at a line of its own; the exponents tell them apart in the backward pass. (Branches of
/// one `match` would end in one call.)
const POWERS: [fn(Tensor<B, 2>) -> Tensor<B, 2>; 5] = [
    |x| x.powf_scalar(1.25),  //: power 0
    |x| x.powf_scalar(1.375), //: power 1
    |x| x.powf_scalar(1.75),  //: power 2
    |x| x.powf_scalar(2.25),  //: power 3
    |x| x.powf_scalar(2.625), //: power 4
];

/// A backward power's exponent is one less than the forward one's, so that it says which line is right.
#[test]
fn claims_of_random_programs_are_right() {
    let exponents = [1.25, 1.375, 1.75, 2.25, 2.625];
    let lines: Vec<String> = (0..5).map(|which| line_of(&format!("power {which}"))).collect();
    let (mut right, mut open) = (0, 0);
    for seed in 0..24_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % below
        };
        let options = CompileOptions::default()
            .with_name("random")
            .with_backend(CompileBackend::AotEager);
        let mut region = kiln::compile(options);
        let (a, b) = (leaf::<4, 4>(1), leaf::<4, 4>(2));
        region
            .run(|| {
                let mut pool = vec![a.clone(), b.clone()];
                for _ in 0..14 {
                    let pick = |at: usize| pool[pool.len().saturating_sub(1 + at % 4)].clone();
                    let x = pick(draw(4));
                    let new = match draw(8) {
                        0 => x + pick(draw(4)),
                        1 => x - pick(draw(4)),
                        2 => x * pick(draw(4)),
                        3 => x + 0.5,
                        _ => POWERS[draw(5)](x),
                    };
                    pool.push(new);
                }
                let loss = (pool.pop().unwrap() + pool.pop().unwrap()).sum();
                let grads = loss.backward();
                [&a, &b].map(|it| it.grad(&grads).map(Tensor::<B, 2>::from_inner))
            })
            .unwrap();
        let graph = region.report().steps[0].graph.clone();
        for (node, data) in graph.nodes() {
            let Op::Constant { value, .. } = data.op else {
                continue;
            };
            let exponent = exponents
                .iter()
                .position(|it| value.to_string() == (it - 1.0).to_string());
            let Some(which) = exponent.filter(|_| data.provenance.phase == Phase::Backward) else {
                continue;
            };
            match (&data.provenance.gradient_of, &data.provenance.location) {
                (Some(of), Some(line)) => {
                    assert_eq!(&**of, "powf_scalar", "{node} of program {seed}\n{graph}");
                    assert!(line.ends_with(&lines[which]), "{node} of program {seed}\n{graph}");
                    right += 1;
                }
                _ => open += 1,
            }
        }
    }
    println!("{right} found, {open} open");
    assert!(right > 4 * open, "{right} found, {open} open");
}

/// Modules of burn-nn: gradients have the line of the call, as forward operations do.
#[derive(Module, Debug)]
struct Network<B: burn::tensor::backend::Backend> {
    first: Linear<B>,
    norm: LayerNorm<B>,
    last: Linear<B>,
}

#[test]
fn modules_loss_and_reports() {
    let model = Network::<B> {
        first: LinearConfig::new(12, 20).init(&device()),
        norm: LayerNormConfig::new(20).init(&device()),
        last: LinearConfig::new(20, 5).init(&device()),
    };
    let mut step = TrainStep::new(
        model,
        AdamWConfig::new().init(),
        |model: &Network<B>, x: Tensor<B, 2>| {
            let h = gelu(model.first.forward(x)); //: first
            let h = model.norm.forward(h); //: norm
            let attention = softmax(h.clone(), 1); //: softmax
            let y = model.last.forward(h * attention); //: last
            let targets = Tensor::<B, 1, Int>::from_ints([0, 1, 2, 3, 4, 0, 1, 2], &device());
            CrossEntropyLossConfig::new().init(&device()).forward(y, targets) //: cross entropy
        },
    )
    .with_options(CompileOptions::default().with_name("network"))
    .build()
    .unwrap();
    for index in 0..4 {
        step.step(1e-3, given::<8, 12>(index)).unwrap();
    }
    let profile = kiln::profile();
    step.step(1e-3, given::<8, 12>(9)).unwrap();
    let summary = profile.summary();
    let explain = step.explain();
    let fused: Vec<_> = explain
        .report()
        .steps
        .iter()
        .flat_map(|step| &step.kernels)
        .flat_map(|kernel| &kernel.fused)
        .collect();
    let gradients: Vec<(&str, &str)> = fused
        .iter()
        .filter_map(|it| Some((it.gradient_of.as_deref()?, it.location.as_deref()?)))
        .collect();
    let pages = [
        ("text", explain.to_string()),
        ("JSON", explain.to_json()),
        ("HTML", explain.to_html()),
    ];
    for mark in ["first", "norm", "softmax", "last", "cross entropy"] {
        let line = line_of(mark);
        assert!(
            gradients.iter().any(|(_, at)| at.ends_with(&line)),
            "{mark}: {gradients:?}"
        );
        let row = summary.operations.iter().find(|row| {
            row.gradient_of.is_some() && row.location.as_ref().is_some_and(|at| at.ends_with(&line))
        });
        assert!(row.is_some(), "{mark} is not in the summary");
    }
    let text = summary.to_string();
    assert!(
        text.contains(", gradient of `") && text.contains("` at tests/inside/gradients.rs:"),
        "{text}"
    );
    for (name, page) in &pages {
        assert!(page.contains("gradient"), "{name} shows no gradients");
    }
    assert!(pages[0].1.contains("(gradient of `"), "{}", pages[0].1);
    // Files are shown below the working folder.
    assert!(
        gradients
            .iter()
            .all(|(_, at)| at.starts_with("tests/inside/gradients.rs:")),
        "{gradients:?}"
    );
}
