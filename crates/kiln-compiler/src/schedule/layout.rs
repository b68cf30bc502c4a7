//! Layouts: values stored in another order of dimensions than their shape's.
//!
//! *Images* are stored channels-last: the results of convolutions and pools, and values that are computed
//! from those element by element. Channels are then contiguous for the tiles of convolutions, for vectors
//! of pools and nests, and for products (a 1x1 convolution is a product, without copies). The choice is
//! made once for the whole step: loop nests take any layout, so only values that a kernel without strides
//! reads stay row-major.
//!
//! The heads of attention are joined by a transpose and a reshape before the output projection. If the
//! product that makes the heads stores them in the transposed order, the joined matrix is a contiguous
//! window and nothing is moved. Only values that products make are considered, and only where every reader
//! takes strides: loop nests always do, products do for their operands.

use rustc_hash::FxHashMap;

use kiln_graph::op::{Dims, DotDims, Op};
use kiln_graph::{Graph, NodeData, Shape, Users, Value};

use super::class::{Class, classify, node_index};
use crate::index::{Index, linear};
use crate::policy::Policy;
use crate::weights;

/// For values that are not stored row-major: the order of their dimensions in memory, outermost first.
pub type Layouts = FxHashMap<Value, Dims>;

/// Chooses layouts.
pub fn choose(graph: &Graph, policy: &Policy) -> Layouts {
    let users = graph.users();
    let mut layouts = match policy.channels_last {
        true => images(graph, &users, policy),
        false => Layouts::default(),
    };
    let candidates = graph.nodes().flat_map(|(_, node)| {
        let count = match &node.op {
            Op::DotGeneral(_) | Op::Attention(_) | Op::Concat { .. } => 1,
            Op::AttentionGrad(_) => 3,
            _ => 0,
        };
        node.outputs[..count].iter().map(move |&value| (&node.op, value))
    });
    for (op, value) in candidates {
        if layouts.contains_key(&value) {
            continue;
        }
        if !graph.dtype(value).is_float() || users.outputs(value) > 0 || graph.ty(value).numel() == 0 {
            continue;
        }
        let mut order: Option<&Dims> = None;
        let takes_strides = users.of(value).iter().all(|&user| match &graph.node(user).op {
            Op::Transpose(perm) => {
                order = order.or(Some(perm));
                true
            }
            Op::DotGeneral(_) | Op::Reduce { .. } | Op::Attention(_) | Op::AttentionGrad(_) => true,
            op => op.is_pointwise(),
        });
        if let Some(order) = order
            && takes_strides
            && match op {
                Op::DotGeneral(dims) => product_fits(graph, value, dims, order),
                // Rows stay rows.
                _ => order.last() == Some(&(order.len() - 1)),
            }
        {
            layouts.insert(value, order.clone());
        }
    }
    layouts
}

/// Whether `op` is computed by a kernel that reads or writes images of any layout.
fn is_image_operation(op: &Op, spatial: usize, policy: &Policy) -> bool {
    match op {
        Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => {
            (1..=policy.convolution_dimensions).contains(&spatial)
        }
        Op::MaxPool(_)
        | Op::MaxPoolWithIndices { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AvgPool { .. }
        | Op::AvgPoolGrad { .. } => (1..=policy.pooling_dimensions).contains(&spatial),
        _ => false,
    }
}

/// Channels-last layouts of images: results of image operations and of pointwise operations on those. And of
/// weights that are copied or cast for convolutions of such.
fn images(graph: &Graph, users: &Users, policy: &Policy) -> Layouts {
    let classes = classify(graph, policy);
    let mut layouts = Layouts::default();
    for (node, data) in graph.nodes() {
        let class = classes[node_index(node)];
        for &value in &data.outputs {
            let shape = graph.shape(value);
            let Some(spatial) = shape.rank().checked_sub(2).filter(|&spatial| spatial > 0) else {
                continue;
            };
            let is_weight = weights::is_read_alone(graph, users, policy, value);
            let made = match class {
                Class::Pointwise if is_weight => true,
                Class::Library => {
                    is_image_operation(&data.op, spatial, policy)
                        && !matches!(data.op, Op::ConvWeightGrad { .. })
                        && is_plain_image(graph, data)
                }
                Class::Pointwise | Class::Join => data.inputs.iter().any(|operand| {
                    layouts.contains_key(operand) && (class == Class::Join || graph.shape(*operand) == shape)
                }),
                _ => false,
            };
            let pixels: usize = shape[2..].iter().product();
            if !made || shape[1] == 1 || pixels <= 1 || users.outputs(value) > 0 {
                continue;
            }
            let taken = users.of(value).iter().all(|&user| {
                let data = graph.node(user);
                let only_image = match data.op {
                    Op::Conv(_) | Op::ConvInputGrad { .. } => data.inputs[1] != value || is_weight,
                    _ => true,
                };
                match classes[node_index(user)] {
                    Class::Library => {
                        only_image
                            && (matches!(data.op, Op::DotGeneral(_))
                                || (is_image_operation(&data.op, spatial, policy)
                                    && is_plain_image(graph, data)))
                    }
                    _ => true,
                }
            });
            if taken {
                let order: Dims = [0].into_iter().chain(2..shape.rank()).chain([1]).collect();
                layouts.insert(value, order);
            }
        }
    }
    layouts
}

/// Whether the templates for images compute the operation: of floats, and no tensor is empty.
fn is_plain_image(graph: &Graph, data: &NodeData) -> bool {
    let all = || data.inputs.iter().chain(&data.outputs);
    all().all(|&v| graph.ty(v).numel() > 0) && graph.dtype(data.outputs[0]).is_float()
}

/// Whether a product can store its result in this order: rows and columns evenly spaced, one of them
/// contiguous.
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

/// Extents and strides of several dimensions as one dimension; none if they are not evenly spaced.
pub fn join(extents: &[usize], strides: &[i64]) -> Option<(usize, i64)> {
    let mut joined = (1usize, 0i64);
    for (&extent, &stride) in extents.iter().zip(strides).rev() {
        if extent == 1 {
            continue;
        }
        joined = match joined {
            (1, _) => (extent, stride),
            (inner, unit) if stride == unit * inner as i64 => (inner * extent, unit),
            _ => return None,
        };
    }
    Some(joined)
}
