//! Layouts: values stored in another order of dimensions than their shape's.
//!
//! The heads of attention are joined by a transpose and a reshape before the output projection. If the product that makes the heads stores
//! them in the transposed order to begin with, the joined matrix is a contiguous window and nothing is ever moved. Only values that products
//! make are considered, and only where every reader takes strides: loop nests always do, products do for their operands.

use rustc_hash::FxHashMap;

use kiln_graph::op::{Dims, DotDims, Op};
use kiln_graph::{DType, Graph, Shape, Value};

use super::access::join;
use crate::index::{Index, linear};

/// For values that are not stored row-major: the order of their dimensions in memory, outermost first.
pub type Layouts = FxHashMap<Value, Dims>;

/// Chooses layouts.
pub fn choose(graph: &Graph) -> Layouts {
    let users = graph.users();
    let mut layouts = Layouts::default();
    for (_, node) in graph.nodes() {
        let Op::DotGeneral(dims) = &node.op else { continue };
        let value = node.outputs[0];
        if graph.dtype(value) != DType::F32 || users.outputs(value) > 0 || graph.ty(value).numel() == 0 {
            continue;
        }
        let mut order: Option<&Dims> = None;
        let takes_strides = users.of(value).iter().all(|&user| match &graph.node(user).op {
            Op::Transpose(perm) => {
                order = order.or(Some(perm));
                true
            }
            Op::DotGeneral(_) | Op::Reduce { .. } => true,
            op => op.is_pointwise(),
        });
        if let Some(order) = order
            && takes_strides
            && product_fits(graph, value, dims, order)
        {
            layouts.insert(value, order.clone());
        }
    }
    layouts
}

/// Whether a product can store its result in this order: rows and columns evenly spaced, one of them contiguous.
fn product_fits(graph: &Graph, value: Value, dims: &DotDims, order: &Dims) -> bool {
    let Some((_, rows, cols)) =
        product_strides(graph, value, dims, &strides(graph.shape(value), Some(order)))
    else {
        return false;
    };
    rows.1 == 1 || cols.1 == 1
}

/// An extent and the stride between neighbours.
pub type Spaced = (usize, i64);

/// Batch dimensions, rows and columns of a product's result stored with `strides`, each as extent and stride.
pub fn product_strides(
    graph: &Graph,
    value: Value,
    dims: &DotDims,
    strides: &[i64],
) -> Option<(Vec<Spaced>, Spaced, Spaced)> {
    let shape = graph.shape(value);
    let a = graph.shape(graph.def(value).inputs[0]);
    let batch = dims.a_batch.len();
    let rows = batch..batch + DotDims::free(a.rank(), &dims.a_batch, &dims.a_contract).len();
    let cols = rows.end..shape.rank();
    Some((
        (0..batch).map(|axis| (shape[axis], strides[axis])).collect(),
        join(&shape[rows.clone()], &strides[rows])?,
        join(&shape[cols.clone()], &strides[cols])?,
    ))
}

/// Elements between neighbours, for each dimension of a value of `shape` stored in `order`.
pub fn strides(shape: &Shape, order: Option<&Dims>) -> Vec<i64> {
    let Some(order) = order else {
        return shape.strides().iter().map(|&stride| stride as i64).collect();
    };
    let mut out = vec![0; shape.rank()];
    let mut stride = 1;
    for &axis in order.iter().rev() {
        out[axis] = stride;
        stride *= shape[axis] as i64;
    }
    out
}

/// Position of the element at `index` in the buffer of a value.
pub fn position(graph: &Graph, layouts: &Layouts, value: Value, index: &[Index]) -> Index {
    let shape = graph.shape(value);
    match layouts.get(&value) {
        None => linear(index, shape),
        Some(order) => {
            let index: Vec<Index> = order.iter().map(|&axis| index[axis].clone()).collect();
            let shape: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
            linear(&index, &shape)
        }
    }
}
