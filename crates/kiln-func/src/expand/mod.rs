//! Operations expanded into others: the others have the rules that the operation itself lacks.
//!
//! Each function returns a small graph whose parameters are the operands and whose outputs are the results.
//! A transform rebuilds that graph in the operation's place, so the operation's rule follows from those of
//! the graph's operations.

mod attention;
mod product;
mod update;

use kiln_graph::op::{AttentionDims, ReduceOp, ScatterMode};
use kiln_graph::{Graph, Op, TensorType, Value};

use crate::build::Builder;
use crate::error::Result;

/// The expansion of `op` for derivatives; none if it has a rule. `updates_vary` says whether the third
/// operand depends on tangents.
pub(crate) fn for_derivative(op: &Op, types: &[TensorType], updates_vary: bool) -> Result<Option<Graph>> {
    let graph = match op {
        Op::Reduce {
            op: ReduceOp::Prod,
            axes,
        } => product::reduce(&types[0], axes)?,
        Op::Cumulative {
            op: ReduceOp::Prod,
            axis,
        } => product::cumulative(&types[0], *axis)?,
        Op::Scatter { axis, mode } if !is_linear(*mode, updates_vary) => {
            update::scatter(types, *axis, *mode)?
        }
        Op::IndexPut { axis, mode } if !is_linear(*mode, updates_vary) => {
            update::index_put(types, *axis, *mode)?
        }
        Op::Attention(dims) => attention(types, *dims)?,
        Op::AttentionGrad(dims) => attention_grad(types, *dims)?,
        _ => return Ok(None),
    };
    Ok(Some(graph))
}

fn is_linear(mode: ScatterMode, updates_vary: bool) -> bool {
    match mode {
        ScatterMode::Add | ScatterMode::Assign => true,
        ScatterMode::Mul => !updates_vary,
        ScatterMode::Max | ScatterMode::Min => false,
    }
}

/// Attention as products, pointwise functions and reductions of its scores.
pub(crate) fn attention(types: &[TensorType], dims: AttentionDims) -> Result<Graph> {
    small("attention", types, |b, x| attention::forward(b, x, dims))
}

/// The gradient of attention in the same way.
pub(crate) fn attention_grad(types: &[TensorType], dims: AttentionDims) -> Result<Graph> {
    small("attention_grad", types, |b, x| attention::backward(b, x, dims))
}

/// A graph with parameters of `types`, whose outputs `body` adds.
fn small(
    name: &str,
    types: &[TensorType],
    body: impl FnOnce(&mut Builder, &[Value]) -> Result<Vec<Value>>,
) -> Result<Graph> {
    let mut b = Builder::new(name);
    let parameters: Vec<Value> = types.iter().map(|ty| b.graph.parameter(ty.clone())).collect();
    for value in body(&mut b, &parameters)? {
        b.graph.output(value, None);
    }
    Ok(b.graph)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_graph::op::Dims;
    use kiln_graph::testing::{every_attention, random_tensor};
    use kiln_graph::{DType, HostTensor, Provenance, interpret_f64};

    /// The operation and its expansion give the same on random arguments.
    fn agree(op: &Op, graph: &Graph, arguments: &[HostTensor]) {
        let mut whole = Graph::new("whole");
        let operands: Vec<Value> = arguments
            .iter()
            .map(|x| whole.parameter(x.ty().clone()))
            .collect();
        let results = whole
            .add_node(op.clone(), &operands, Provenance::default())
            .expect("well typed");
        results.iter().for_each(|&result| whole.output(result, None));
        kiln_graph::verify(graph).expect("the expansion is valid");
        let expected = interpret_f64(&whole, arguments, &[]).expect("runs");
        let actual = interpret_f64(graph, arguments, &[]).expect("runs");
        assert_eq!(expected.len(), actual.len());
        for (expected, actual) in expected.iter().zip(&actual) {
            if let Some(difference) = kiln_graph::testing::difference(actual, expected, 1e-12) {
                panic!("{op:?}: {difference}");
            }
        }
    }

    fn f64s(shape: &[usize], seed: u64) -> HostTensor {
        random_tensor(&TensorType::new(DType::F64, shape), seed)
    }

    fn types(arguments: &[HostTensor]) -> Vec<TensorType> {
        arguments.iter().map(|x| x.ty().clone()).collect()
    }

    #[test]
    fn products() {
        let axes: [&[usize]; 4] = [&[0], &[1], &[0, 2], &[0, 1, 2]];
        for shape in [[2, 5, 3], [1, 8, 2], [2, 0, 3]] {
            let x = [f64s(&shape, 3)];
            for axes in axes {
                let axes = Dims::from(axes);
                let op = Op::Reduce {
                    op: ReduceOp::Prod,
                    axes,
                };
                let graph = for_derivative(&op, &types(&x), false)
                    .expect("fits")
                    .expect("is expanded");
                agree(&op, &graph, &x);
            }
            for axis in 0..3 {
                let op = Op::Cumulative {
                    op: ReduceOp::Prod,
                    axis,
                };
                let graph = for_derivative(&op, &types(&x), false)
                    .expect("fits")
                    .expect("is expanded");
                agree(&op, &graph, &x);
            }
        }
    }

    #[test]
    fn updates() {
        let x = f64s(&[3, 4], 1);
        let lists = HostTensor::from_vec([5], [2i64, 0, 2, 2, 1]);
        let scattered = HostTensor::from_vec([2, 3], [1i64, 2, 0, 1, 0, 0]);
        for mode in [ScatterMode::Mul, ScatterMode::Max, ScatterMode::Min] {
            let op = Op::Scatter { axis: 0, mode };
            let arguments = [x.clone(), scattered.clone(), f64s(&[2, 3], 2)];
            let graph = for_derivative(&op, &types(&arguments), true)
                .expect("fits")
                .expect("is expanded");
            agree(&op, &graph, &arguments);
            let op = Op::IndexPut { axis: 0, mode };
            let arguments = [x.clone(), lists.clone(), f64s(&[5, 4], 2)];
            let graph = for_derivative(&op, &types(&arguments), true)
                .expect("fits")
                .expect("is expanded");
            agree(&op, &graph, &arguments);
        }
    }

    #[test]
    fn attentions() {
        for dims in every_attention() {
            let (q, k, v) = (
                f64s(&[2, 4, 3, 2], 1),
                f64s(&[2, 2, 5, 2], 2),
                f64s(&[2, 2, 5, 3], 3),
            );
            let number = |value: f64| HostTensor::from_vec([0; 0], [value]);
            let word = |value: u64| HostTensor::from_vec([0; 0], [value]);
            let mut arguments = vec![q, k, v, number(0.7)];
            if dims.mask {
                arguments.push(f64s(&[1, 4, 1, 5], 4));
            }
            if dims.hidden {
                arguments.push(random_tensor(&TensorType::new(DType::Bool, [2, 1, 3, 5]), 5));
                arguments.push(number(-3.0));
            }
            if dims.dropout {
                arguments.extend([word(7), word(9), number(0.8), number(1.25)]);
            }
            let forward = attention(&types(&arguments), dims).expect("fits");
            agree(&Op::Attention(dims), &forward, &arguments);
            let results = interpret_f64(&forward, &arguments, &[]).expect("runs");
            arguments.extend([
                results[1].clone(),
                f64s(&[2, 4, 3, 3], 6),
                number(0.7),
                number(-1.0),
            ]);
            if dims.dropout {
                arguments.push(number(1.25));
            }
            let backward = attention_grad(&types(&arguments), dims).expect("fits");
            agree(&Op::AttentionGrad(dims), &backward, &arguments);
        }
    }
}
