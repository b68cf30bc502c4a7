//! Derivatives of functions over ranks, against differences of the sum of what all ranks compute.

use kiln_func::{FuncError, Randomness, jvp, vjp, vmap};
use kiln_graph::{DType, Graph, HostTensor, Scalar, interpret_ranks};

const NONE: &[Scalar] = &[];

/// `y = f(x)` on two ranks, with 4 elements in and as many out as `f` says.
fn function(body: &str) -> Graph {
    let text = format!("graph @f {{\n%0 = parameter 0 : f64[4]\n{body}\n}}");
    Graph::parse(&text).expect("it is well formed")
}

fn tensor(values: &[f64]) -> HostTensor {
    HostTensor::from_floats(DType::F64, [values.len()], values.iter().copied())
}

/// The outputs of both ranks.
fn run(graph: &Graph, ranks: &[Vec<HostTensor>; 2]) -> Vec<Vec<Vec<f64>>> {
    let arguments: Vec<_> = ranks.iter().map(|tensors| (&tensors[..], NONE)).collect();
    let outputs = interpret_ranks(graph, &arguments).expect("it runs");
    let floats = |outputs: &Vec<HostTensor>| outputs.iter().map(HostTensor::to_f64s).collect();
    outputs.iter().map(floats).collect()
}

const X: [[f64; 4]; 2] = [[0.3, -1.2, 0.7, 2.0], [1.1, 0.4, -0.6, 0.9]];

/// Cubes on both sides, so that the derivative depends on both ranks.
fn cases() -> Vec<(Graph, usize)> {
    let around = |middle: &str, out: usize| {
        let ty = format!("f64[{out}]");
        function(&format!(
            "%1 = mul %0, %0 : f64[4]\n%2 = {middle} : {ty}\n%3 = mul %2, %2 : {ty}\nreturn %3"
        ))
    };
    vec![
        (around("all_reduce %1 {ranks=2}", 4), 4),
        (around("all_reduce %1 {ranks=2,mean=true}", 4), 4),
        (around("reduce_scatter %1 {ranks=2}", 2), 2),
        (around("reduce_scatter %1 {ranks=2,mean=true}", 2), 2),
        (around("all_gather %1 {ranks=2}", 8), 8),
    ]
}

/// `sum over ranks of <weights of the rank, f(x)>`.
fn total(graph: &Graph, x: &[[f64; 4]; 2], weights: &[Vec<f64>; 2]) -> f64 {
    let outputs = run(graph, &x.map(|x| vec![tensor(&x)]));
    let dot = |y: &[f64], w: &[f64]| y.iter().zip(w).map(|(y, w)| y * w).sum::<f64>();
    (0..2).map(|rank| dot(&outputs[rank][0], &weights[rank])).sum()
}

#[test]
fn cotangents_are_the_derivatives_of_the_sum_over_ranks() {
    for (graph, out) in cases() {
        let weights = [0, 1].map(|rank| {
            (0..out)
                .map(|i| 0.5 + (i + 3 * rank) as f64 * 0.25)
                .collect::<Vec<_>>()
        });
        let reverse = vjp(&graph, &[0], &[0]).expect("it has a derivative");
        let arguments = [0, 1].map(|rank| vec![tensor(&X[rank]), tensor(&weights[rank])]);
        let outputs = run(&reverse, &arguments);
        for rank in 0..2 {
            for element in 0..4 {
                let at = |step: f64| {
                    let mut x = X;
                    x[rank][element] += step;
                    total(&graph, &x, &weights)
                };
                let expected = (at(1e-5) - at(-1e-5)) / 2e-5;
                let given = outputs[rank][1][element];
                assert!(
                    (given - expected).abs() < 1e-6,
                    "{given} is not {expected} in\n{graph}"
                );
            }
        }
    }
}

#[test]
fn tangents_are_the_derivatives_along_them() {
    let from =
        function("%1 = broadcast_from %0 {ranks=2,root=1} : f64[4]\n%2 = mul %1, %1 : f64[4]\nreturn %2");
    for (graph, out) in cases().into_iter().chain([(from, 4)]) {
        let tangents = [[0.2, -0.4, 1.0, 0.1], [-0.3, 0.8, 0.5, -1.0]];
        let forward = jvp(&graph, &[0], &[0]).expect("it has a derivative");
        let outputs = run(
            &forward,
            &[0, 1].map(|rank| vec![tensor(&X[rank]), tensor(&tangents[rank])]),
        );
        let at = |step: f64| {
            let moved = [0, 1]
                .map(|rank| std::array::from_fn::<f64, 4, _>(|i| X[rank][i] + step * tangents[rank][i]));
            run(&graph, &moved.map(|x| vec![tensor(&x)]))
        };
        let (above, below) = (at(1e-5), at(-1e-5));
        for rank in 0..2 {
            for element in 0..out {
                let expected = (above[rank][0][element] - below[rank][0][element]) / 2e-5;
                let given = outputs[rank][1][element];
                assert!(
                    (given - expected).abs() < 1e-6,
                    "{given} is not {expected} in\n{graph}"
                );
            }
        }
    }
}

#[test]
fn a_batch_of_sums_is_a_sum_of_batches() {
    let graph = function("%1 = all_reduce %0 {ranks=2} : f64[4]\nreturn %1");
    let batched = vmap(&graph, &[Some(0)], 1, &[Some(0)], Randomness::Same).expect("it has a batched form");
    let one = |rank: usize| vec![HostTensor::from_floats(DType::F64, [1, 4], X[rank])];
    let outputs = run(&batched, &[one(0), one(1)]);
    assert_eq!(outputs[0][0], [0, 1, 2, 3].map(|i| X[0][i] + X[1][i]));

    let gather = function("%1 = all_gather %0 {ranks=2} : f64[8]\nreturn %1");
    let error = vmap(&gather, &[Some(0)], 1, &[Some(0)], Randomness::Same).expect_err("it has none");
    assert!(matches!(error, FuncError::NoBatching { .. }), "{error}");
}

#[test]
fn what_differs_from_rank_to_rank_has_no_reverse_mode() {
    let from = function("%1 = broadcast_from %0 {ranks=2} : f64[4]\nreturn %1");
    let error = vjp(&from, &[0], &[0])
        .expect_err("the root alone has a gradient")
        .to_string();
    assert!(
        error.contains("`broadcast_from`") && error.contains("differs from rank to rank"),
        "{error}"
    );
}
