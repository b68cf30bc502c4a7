//! How movement operations act on indices: from the wanted index of the result to the index of the operand.

use kiln_graph::op::{Dims, DotDims, Op};
use kiln_graph::{Graph, NodeData, Value};

use super::Buffer;
use super::layout::{Layouts, join, position, strides};
use crate::index::{Index, Var, coordinates, linear};

/// The first variable among `candidates` along which every position is contiguous or constant, and some are
/// contiguous: vectors can be read along it.
pub fn vector_variable(positions: &[Index], candidates: impl IntoIterator<Item = Var>) -> Option<Var> {
    candidates.into_iter().find(|&var| {
        let strides = || positions.iter().map(|position| position.stride(var));
        strides().all(|stride| matches!(stride, Some(0 | 1))) && strides().any(|stride| stride == Some(1))
    })
}

/// The index of operand 0 of the movement that defines `value`, for the element of `value` at `index`; none
/// if the definition is no movement that an index expresses.
pub fn operand_index(graph: &Graph, value: Value, index: &[Index]) -> Option<Vec<Index>> {
    let data = graph.def(value);
    let operand = graph.shape(*data.inputs.first()?);
    let out = match &data.op {
        Op::Reshape(shape) => coordinates(&linear(index, shape), operand),
        Op::Transpose(perm) => {
            let mut out = vec![Index::default(); index.len()];
            for (to, &from) in perm.iter().enumerate() {
                out[from] = index[to].clone();
            }
            out
        }
        Op::Broadcast { dims, .. } => dims
            .iter()
            .zip(operand.iter())
            .map(|(&to, &extent)| {
                if extent == 1 {
                    Index::default()
                } else {
                    index[to].clone()
                }
            })
            .collect(),
        Op::Slice { starts, steps, .. } => index
            .iter()
            .zip(starts.iter().zip(steps))
            .map(|(i, (&start, &step))| i.scale(step as i64).shift(start as i64))
            .collect(),
        Op::Flip(axes) => index
            .iter()
            .enumerate()
            .map(|(axis, i)| {
                if axes.contains(&axis) {
                    i.scale(-1).shift(operand[axis] as i64 - 1)
                } else {
                    i.clone()
                }
            })
            .collect(),
        _ => return None,
    };
    Some(out)
}

/// The identity index of a shape: one variable for each dimension of extent above 1, numbered from `first`.
/// Also gives the extents of the variables used.
pub fn identity(shape: &[usize], first: u32) -> (Vec<Index>, Vec<i64>) {
    let mut extents = Vec::new();
    let index = shape
        .iter()
        .map(|&extent| {
            if extent == 1 {
                return Index::default();
            }
            let var = first + extents.len() as u32;
            extents.push(extent as i64);
            Index::var(var, extent as i64)
        })
        .collect();
    (index, extents)
}

/// [`identity`] with the variables numbered in the order in which the elements lie in memory, so that the
/// last is the contiguous one.
pub fn identity_in(shape: &[usize], order: Option<&Dims>) -> (Vec<Index>, Vec<i64>) {
    let Some(order) = order else {
        return identity(shape, 0);
    };
    let stored: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
    let (numbered, extents) = identity(&stored, 0);
    let mut index = vec![Index::default(); shape.len()];
    for (&axis, own) in order.iter().zip(numbered) {
        index[axis] = own;
    }
    (index, extents)
}

/// A value seen as a strided window on a stored buffer: element `i` is
/// `base[offset + sum(i[d] * strides[d])]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Strided {
    /// The stored value behind it.
    pub base: Value,
    /// Elements skipped at the start of the buffer.
    pub offset: i64,
    /// Elements between neighbours, for each dimension of the value (0 where it repeats).
    pub strides: Vec<i64>,
}

/// The window on one of the buffers in `reads` through which a kernel reads `operand`. An operand that is a
/// window on none of them has a buffer of its own.
pub fn window(graph: &Graph, layouts: &Layouts, operand: Value, reads: &[Buffer]) -> Strided {
    let stop = |value: Value| reads.contains(&Buffer::Value(value));
    strided(graph, layouts, operand, &stop).unwrap_or_else(|| Strided {
        base: operand,
        offset: 0,
        strides: strides(graph.shape(operand), layouts.get(&operand)),
    })
}

/// Follows movements from `value` to the stored value behind it, as long as the result is a strided window.
/// `stop` says where to stop: values that have a buffer.
pub fn strided(
    graph: &Graph,
    layouts: &Layouts,
    value: Value,
    stop: &dyn Fn(Value) -> bool,
) -> Option<Strided> {
    let shape = graph.shape(value);
    let (mut index, _) = identity(shape, 0);
    let mut base = value;
    while !stop(base) {
        index = operand_index(graph, base, &index)?;
        base = graph.def(base).inputs[0];
    }
    let position = position(graph, layouts, base, &index);
    let mut var = 0;
    let mut strides = Vec::with_capacity(shape.rank());
    for &extent in shape.iter() {
        if extent == 1 {
            strides.push(0);
            continue;
        }
        strides.push(position.stride(var)?);
        var += 1;
    }
    Some(Strided {
        base,
        offset: position.offset(),
        strides,
    })
}

/// One operand of a product as a batch of matrices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Side {
    /// Extent and stride of each batch dimension.
    pub batch: Vec<(usize, i64)>,
    /// Extent and stride of the free dimensions as one.
    pub free: (usize, i64),
    /// Extent and stride of the contracted dimensions as one.
    pub depth: (usize, i64),
}

/// Operand number `operand` of a product seen through `window` as a batch of matrices; none if its free or
/// contracted dimensions are not evenly spaced.
pub fn side(graph: &Graph, product: &NodeData, operand: usize, window: &Strided) -> Option<Side> {
    side_of(graph, product, operand, product.inputs[operand], window)
}

/// [`side`] for `piece`, which is operand number `operand` or a piece of it.
pub fn side_of(
    graph: &Graph,
    product: &NodeData,
    operand: usize,
    piece: Value,
    window: &Strided,
) -> Option<Side> {
    let Op::DotGeneral(dims) = &product.op else {
        return None;
    };
    let (batch, contract) = dims.of(operand);
    let shape = graph.shape(piece);
    let pick = |axes: &[usize]| -> (Vec<usize>, Vec<i64>) {
        axes.iter()
            .map(|&axis| (shape[axis], window.strides[axis]))
            .unzip()
    };
    let (extents, strides) = pick(&DotDims::free(shape.rank(), batch, contract));
    let free = join(&extents, &strides)?;
    let (extents, strides) = pick(contract);
    let depth = join(&extents, &strides)?;
    let batch = batch
        .iter()
        .map(|&axis| (shape[axis], window.strides[axis]))
        .collect();
    Some(Side { batch, free, depth })
}
