//! How each operation treats the rows of its operands: one dimension, followed from operand to result and
//! back.

use kiln_graph::op::{DotDims, Op, ReduceOp};
use kiln_graph::{Graph, NodeData, Shape};
use smallvec::SmallVec;

/// The result of an operation on a chunk of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Result {
    /// The same chunk of its result's rows, along this dimension.
    Rows(usize),
    /// A term of its result, which is a sum over rows.
    Sum,
}

impl Result {
    /// The dimension that is cut, if one is.
    pub(super) fn axis(self) -> Option<usize> {
        match self {
            Result::Rows(axis) => Some(axis),
            Result::Sum => None,
        }
    }
}

/// One entry for each operand: the dimension that is cut, or none if it is read whole.
pub(super) type Axes = SmallVec<[Option<usize>; 4]>;

/// The result of `node` on chunks, given the cut dimensions of those operands that are known to be cut;
/// none if the node needs all rows at once, or its operands are cut in ways that do not fit.
pub(super) fn follow(
    graph: &Graph,
    node: &NodeData,
    known: &[Option<usize>],
    count: usize,
) -> Option<Result> {
    let (position, axis) = known
        .iter()
        .enumerate()
        .find_map(|(position, axis)| axis.map(|axis| (position, axis)))?;
    let shape = graph.shape(node.inputs[position]);
    let result = match &node.op {
        op if op.is_pointwise() => Result::Rows(axis),
        Op::Reduce { op, axes } if axes.contains(&axis) => {
            if *op != ReduceOp::Sum {
                return None;
            }
            Result::Sum
        }
        Op::Reduce { axes, .. } => Result::Rows(axis - axes.iter().filter(|&&other| other < axis).count()),
        Op::ArgReduce { axis: along, .. } if *along != axis => {
            Result::Rows(axis - usize::from(*along < axis))
        }
        Op::Broadcast { dims, .. } => Result::Rows(dims[axis]),
        Op::Reshape(to) => Result::Rows(same_rows(shape, axis, to, count)?),
        Op::Transpose(perm) => Result::Rows(perm.iter().position(|&from| from == axis)?),
        Op::Gather { axis: along } | Op::Scatter { axis: along, .. } if *along != axis => {
            let extents = node.inputs.iter().map(|&value| graph.shape(value)[axis]);
            extents
                .clone()
                .all(|extent| extent == shape[axis])
                .then_some(Result::Rows(axis))?
        }
        Op::DotGeneral(dims) => product(graph, node, dims, position, axis)?,
        _ => return None,
    };
    // Every known cut must be the one that this result asks for.
    let cut = operands_of(graph, node, known, result.axis(), count)?;
    let fits = known
        .iter()
        .zip(&cut)
        .all(|(known, cut)| known.is_none() || known == cut);
    fits.then_some(result)
}

/// Which dimension of each operand is cut where the result is cut along `result` (none: the result is a sum
/// over rows). For contractions, `known` says which operand's rows they are. The dimensions of a shape that
/// changes are cut into `count` parts.
pub(super) fn operands_of(
    graph: &Graph,
    node: &NodeData,
    known: &[Option<usize>],
    result: Option<usize>,
    count: usize,
) -> Option<Axes> {
    let shape = |operand: usize| graph.shape(node.inputs[operand]);
    let all = |axis: usize| SmallVec::from_elem(Some(axis), node.inputs.len());
    Some(match (&node.op, result) {
        (op, Some(axis)) if op.is_pointwise() => all(axis),
        (Op::Gather { .. } | Op::Scatter { .. }, Some(axis)) => all(axis),
        (Op::Iota { axis: along, .. }, Some(axis)) if *along != axis => Axes::new(),
        (Op::Broadcast { shape: to, dims }, Some(axis)) => {
            let from = dims.iter().position(|&dim| dim == axis);
            let from = from.filter(|&from| shape(0)[from] == to[axis]);
            SmallVec::from_slice(&[from])
        }
        (Op::Reshape(to), Some(axis)) => SmallVec::from_slice(&[Some(same_rows(to, axis, shape(0), count)?)]),
        (Op::Transpose(perm), Some(axis)) => SmallVec::from_slice(&[Some(perm[axis])]),
        (Op::Reduce { axes, .. }, Some(axis)) => {
            let mut left = (0..shape(0).rank()).filter(|dim| !axes.contains(dim));
            SmallVec::from_slice(&[Some(left.nth(axis)?)])
        }
        (Op::ArgReduce { axis: along, .. }, Some(axis)) => {
            SmallVec::from_slice(&[Some(axis + usize::from(axis >= *along))])
        }
        (Op::Reduce { .. }, None) => known.iter().copied().collect(),
        (Op::DotGeneral(dims), Some(axis)) => {
            let batch = dims.a_batch.len();
            let a = DotDims::free(shape(0).rank(), &dims.a_batch, &dims.a_contract);
            let b = DotDims::free(shape(1).rank(), &dims.b_batch, &dims.b_contract);
            let cut = match axis {
                axis if axis < batch => [Some(dims.a_batch[axis]), Some(dims.b_batch[axis])],
                axis if axis < batch + a.len() => [Some(a[axis - batch]), None],
                axis => [None, Some(b[axis - batch - a.len()])],
            };
            SmallVec::from_slice(&cut)
        }
        (Op::DotGeneral(dims), None) => {
            let number = known.iter().zip([&dims.a_contract, &dims.b_contract]);
            let number = number
                .filter_map(|(axis, contracted)| contracted.iter().position(|dim| Some(*dim) == *axis))
                .next()?;
            SmallVec::from_slice(&[Some(dims.a_contract[number]), Some(dims.b_contract[number])])
        }
        _ => return None,
    })
}

/// Whether `node` computes a chunk of its result along `axis` from chunks of its operands with negligible
/// arithmetic.
pub(super) fn is_repeatable(graph: &Graph, node: &NodeData, axis: usize, count: usize) -> bool {
    let simple = node.op.is_pointwise()
        || matches!(
            node.op,
            Op::Broadcast { .. } | Op::Iota { .. } | Op::Reshape(_) | Op::Transpose(_)
        );
    simple && operands_of(graph, node, &[], Some(axis), count).is_some()
}

fn product(graph: &Graph, node: &NodeData, dims: &DotDims, position: usize, axis: usize) -> Option<Result> {
    let lists = [
        (&dims.a_batch, &dims.a_contract),
        (&dims.b_batch, &dims.b_contract),
    ];
    let (batch, contract) = lists[position];
    if contract.contains(&axis) {
        return Some(Result::Sum);
    }
    if let Some(number) = batch.iter().position(|&dim| dim == axis) {
        return Some(Result::Rows(number));
    }
    let free = |operand: usize| {
        let (batch, contract) = lists[operand];
        DotDims::free(graph.shape(node.inputs[operand]).rank(), batch, contract)
    };
    let number = free(position).iter().position(|&dim| dim == axis)?;
    let before = if position == 0 { 0 } else { free(0).len() };
    Some(Result::Rows(batch.len() + before + number))
}

/// The dimension of `to` that has the rows of dimension `axis` of `from`, in the same order and such that
/// chunks of one are chunks of the other.
fn same_rows(from: &Shape, axis: usize, to: &Shape, count: usize) -> Option<usize> {
    let before: usize = from[..axis].iter().product();
    dimension_after(to, before).filter(|&found| to[found].is_multiple_of(count))
}

/// The dimension of `shape` before which there are `before` elements, not counting dimensions of extent 1.
fn dimension_after(shape: &Shape, before: usize) -> Option<usize> {
    let mut product = 1;
    shape.iter().position(|&extent| {
        let found = product == before && extent > 1;
        product *= extent;
        found
    })
}
