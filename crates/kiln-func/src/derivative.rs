//! Gradients, Jacobians and Hessians, made of the two modes and of batching.

use kiln_graph::op::CompareOp;
use kiln_graph::{DType, Graph, Shape, TensorType, Value};

use crate::batch::{Randomness, vmap};
use crate::build::{Builder, declare_arguments, inline, set_outputs};
use crate::error::{FuncError, Result};
use crate::forward::{float_outputs, jvp};
use crate::transpose::vjp;

/// The mode that computes a Jacobian. Both give the same result up to rounding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    /// A forward pass for each element of a parameter: for few inputs and many outputs.
    Forward,
    /// A backward pass for each element of an output: for many inputs and few outputs.
    #[default]
    Reverse,
}

/// The value and the gradient of a function of one number.
///
/// The new graph takes the arguments of `graph`. It returns the outputs of `graph`, of which `loss` has one
/// element, then the gradient of `loss` with respect to each parameter in `wrt`, of the parameter's type.
///
/// # Errors
///
/// Those of [`vjp`], and if `loss` has more elements than one.
pub fn value_and_grad(graph: &Graph, wrt: &[usize], loss: usize) -> Result<Graph> {
    let value = float_outputs(graph, &[loss])?[0];
    if graph.ty(value).numel() != 1 {
        let ty = graph.ty(value).clone();
        return Err(FuncError::NotOneNumber { index: loss, ty });
    }
    let reverse = vjp(graph, wrt, &[loss])?;
    let mut b = Builder::new(format!("value_and_grad({})", graph.name));
    let (mut parameters, scalars) = declare_arguments(&mut b, graph);
    parameters.push(b.full(1.0, graph.ty(value))?);
    let results = inline(&mut b, &reverse, &parameters, &scalars)?;
    set_outputs(&mut b, &reverse, &results);
    Ok(b.graph.without_dead_code())
}

/// [`value_and_grad`] without the outputs of `graph`.
///
/// # Errors
///
/// Those of [`value_and_grad`].
pub fn grad(graph: &Graph, wrt: &[usize], loss: usize) -> Result<Graph> {
    let mut gradient = value_and_grad(graph, wrt, loss)?;
    gradient.name = format!("grad({})", graph.name);
    gradient.outputs.drain(..graph.outputs.len());
    Ok(gradient.without_dead_code())
}

/// The Jacobian of each output in `outputs` with respect to each parameter in `wrt`.
///
/// The new graph takes the arguments of `graph`. For each output, and for each parameter, it returns a
/// tensor of the output's extents followed by the parameter's: element `[i.., j..]` is the derivative of
/// element `i` of the output with respect to element `j` of the parameter.
///
/// # Errors
///
/// Those of [`vjp`] and [`jvp`].
pub fn jacobian(graph: &Graph, wrt: &[usize], outputs: &[usize], mode: Mode) -> Result<Graph> {
    let values = float_outputs(graph, outputs)?;
    let mut b = Builder::new(format!("jacobian({})", graph.name));
    let (parameters, scalars) = declare_arguments(&mut b, graph);
    let mut found: Vec<Vec<Value>> = vec![Vec::new(); outputs.len()];
    match mode {
        Mode::Reverse => {
            for ((found, &output), &value) in found.iter_mut().zip(outputs).zip(&values) {
                let reverse = vjp(graph, wrt, &[output])?;
                let ty = graph.ty(value).clone();
                let rows = along(&mut b, graph, reverse, &ty, 0, (&parameters, &scalars))?;
                *found = rows;
            }
        }
        Mode::Forward => {
            for &index in wrt {
                let forward = jvp(graph, &[index], outputs)?;
                let ty = parameter_type(graph, index)?;
                let columns = along(&mut b, graph, forward, &ty, usize::MAX, (&parameters, &scalars))?;
                found
                    .iter_mut()
                    .zip(columns)
                    .for_each(|(found, column)| found.push(column));
            }
        }
    }
    for (found, &value) in found.into_iter().zip(&values) {
        for (jacobian, &index) in found.into_iter().zip(wrt) {
            let (rows, columns) = (graph.shape(value), parameter_type(graph, index)?.shape);
            let shape: Shape = rows.iter().chain(columns.iter()).copied().collect();
            let jacobian = b.reshape(jacobian, shape)?;
            b.graph.output(jacobian, None);
        }
    }
    Ok(b.graph.without_dead_code())
}

fn parameter_type(graph: &Graph, index: usize) -> Result<TensorType> {
    let parameters = graph.parameters();
    match parameters.get(index) {
        Some(&value) => Ok(graph.ty(value).clone()),
        None => Err(FuncError::NoParameter {
            graph: graph.name.clone(),
            index,
            count: parameters.len(),
        }),
    }
}

/// The results of `product`, a [`vjp`] or [`jvp`] of `graph` with one last argument of type `ty`, for every
/// unit vector as that argument. Dimension `dim` of the results, or a last one, counts the vectors.
fn along(
    b: &mut Builder,
    graph: &Graph,
    mut product: Graph,
    ty: &TensorType,
    dim: usize,
    (parameters, scalars): (&[Value], &[Value]),
) -> Result<Vec<Value>> {
    product.outputs.drain(..graph.outputs.len());
    let product = product.without_dead_code();
    let count = ty.numel();
    let dims: Vec<usize> = product
        .outputs
        .iter()
        .map(|output| dim.min(product.shape(output.value).rank()))
        .collect();
    if count == 0 {
        let empty = product.outputs.iter().zip(&dims).map(|(output, &dim)| {
            let ty = product.ty(output.value);
            let mut shape: Vec<usize> = ty.shape.to_vec();
            shape.insert(dim, 0);
            b.zeros(&TensorType::new(ty.dtype, shape))
        });
        return empty.collect();
    }
    let mut in_dims = vec![None; parameters.len()];
    in_dims.push(Some(0));
    let out_dims: Vec<Option<usize>> = dims.into_iter().map(Some).collect();
    let batched = vmap(&product, &in_dims, count, &out_dims, Randomness::Same)?;
    let square = Shape::from([count, count]);
    let (row, column) = (b.iota(DType::I64, &square, 0)?, b.iota(DType::I64, &square, 1)?);
    let equal = b.compare(CompareOp::Eq, row, column)?;
    let basis = b.cast(equal, ty.dtype)?;
    let shape: Shape = [count].into_iter().chain(ty.shape.iter().copied()).collect();
    let basis = b.reshape(basis, shape)?;
    let mut arguments = parameters.to_vec();
    arguments.push(basis);
    inline(b, &batched, &arguments, scalars)
}

/// The second derivatives of a function of one number: forward mode over reverse mode.
///
/// The new graph takes the arguments of `graph`. For each pair of parameters in `wrt`, the second one
/// varying fastest, it returns a tensor of the first one's extents followed by the second one's.
///
/// # Errors
///
/// Those of [`value_and_grad`].
pub fn hessian(graph: &Graph, wrt: &[usize], loss: usize) -> Result<Graph> {
    let gradient = grad(graph, wrt, loss)?;
    let all: Vec<usize> = (0..wrt.len()).collect();
    let mut hessian = jacobian(&gradient, wrt, &all, Mode::Forward)?;
    hessian.name = format!("hessian({})", graph.name);
    Ok(hessian)
}
