//! Epilogues: loop nests that consume the result of a contraction, tile by tile, before it reaches memory.
//!
//! A nest may follow a contraction inside its kernel if it runs over exactly the elements of the result,
//! with one point for each, and every point needs that one element only. Bias, activation and its gradient,
//! residual and dropout are like that. Reductions of rows are not: no tile holds a whole row. Those of
//! columns, such as statistics of channels and gradients of biases, have to be kept from tile to tile, which
//! some templates do ([`Policy::epilogue_sums`]).
//!
//! Contractions are products of matrices and, for some templates, convolutions: all pixels
//! ([`products::is_of_pixels`]) or all windows ([`products::is_of_windows`]) by the weight, channels-last.
//!
//! The template numbers the elements of its result in its own way: a [`ResultFrame`]. [`ResultFrame::place`]
//! rewrites a nest from its variables to those.

use kiln_graph::op::{DotDims, Op};
use kiln_graph::{Graph, Node, NodeData, Value};

use super::access::{self, Side, Strided, side_of, strided};
use super::buffer::Buffer;
use super::class::is_cheap;
use super::layout::{join, position, strides};
use super::nest::{Nest, Store, bijective, vars};
use crate::index::{Index, Var, bit, linear};
use crate::policy::Policy;
use crate::products;

/// Batch variable of the frame of a product.
pub const BATCH: Var = 0;
/// Row variable of the frame of a product.
pub const ROW: Var = 1;
/// Column variable of the frame of a product.
pub const COL: Var = 2;

/// How a template numbers the elements of its result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResultFrame {
    /// Extent of each variable.
    pub extents: Vec<i64>,
    /// Position of an element among the row-major elements of the result.
    pub position: Index,
}

impl ResultFrame {
    /// The frame of a matrix product: batch, row, column.
    pub fn product(graph: &Graph, value: Value, dims: &DotDims) -> Self {
        let shape = graph.shape(value);
        let a = graph.shape(graph.def(value).inputs[0]);
        let batch = dims.a_batch.len();
        let rows = batch + DotDims::free(a.rank(), &dims.a_batch, &dims.a_contract).len();
        let count = |range: std::ops::Range<usize>| shape[range].iter().product::<usize>() as i64;
        let extents = vec![count(0..batch), count(batch..rows), count(rows..shape.rank())];
        let var = |var: Var| Index::var(var, extents[var as usize]);
        let position = var(BATCH)
            .scale(extents[1] * extents[2])
            .add(&var(ROW).scale(extents[2]))
            .add(&var(COL));
        Self { extents, position }
    }

    /// The frame of a convolution: one matrix of pixels by channels.
    pub fn pixels(shape: &[usize]) -> Self {
        let (images, channels) = (shape[0] as i64, shape[1] as i64);
        let places = shape[2..].iter().product::<usize>() as i64;
        let extents = vec![1, images * places, channels];
        let pixel = Index::var(ROW, extents[1]);
        let position = pixel
            .div(places)
            .scale(channels * places)
            .add(&Index::var(COL, channels).scale(places))
            .add(&pixel.rem(places));
        Self { extents, position }
    }

    /// The frame of `value`; none if no contraction with a frame makes it.
    pub fn of(graph: &Graph, value: Value) -> Option<Self> {
        let data = graph.def(value);
        match &data.op {
            Op::DotGeneral(dims) => Some(Self::product(graph, value, dims)),
            _ if products::is_of_pixels(graph, data) || products::is_of_windows(graph, data, 1) => {
                Some(Self::pixels(graph.shape(value)))
            }
            _ => None,
        }
    }

    /// `nest`, which reads or makes `value` at `index`, over the variables of this frame.
    pub fn place(&self, graph: &Graph, nest: &Nest, value: Value, index: &[Index]) -> Nest {
        let own = linear(index, graph.shape(value));
        let factor = |var: Var| {
            own.terms()
                .iter()
                .find(|(atom, _)| atom.vars() == bit(var))
                .map_or(1, |(_, factor)| *factor)
        };
        let with = |var: Var, extent: i64| self.position.div(factor(var)).rem(extent);
        let mut placed = nest.clone();
        placed.substitute(&with);
        placed.extents.clone_from(&self.extents);
        placed.split = None;
        placed
    }
}

/// The variable among `candidates` along which every access of the nest is contiguous or constant, and some
/// are contiguous.
pub fn vector_variable(graph: &Graph, nest: &Nest, value: Value, candidates: &[Var]) -> Option<Var> {
    let mut positions: Vec<Index> = Vec::new();
    for (used, indices) in nest.uses.iter().filter(|(used, _)| *used != value) {
        positions.extend(
            indices
                .iter()
                .map(|index| position(graph, &nest.layouts, *used, index)),
        );
    }
    positions.extend(nest.stores.iter().map(|store| store.position.clone()));
    access::vector_variable(&positions, candidates.iter().copied())
}

/// Whether the product `node` can be computed by the template, whatever follows it. `stop` says which values
/// have a buffer.
pub fn has_template(
    graph: &Graph,
    policy: &Policy,
    nest: &Nest,
    node: Node,
    stop: &dyn Fn(Value) -> bool,
) -> bool {
    let data = graph.node(node);
    let out = data.outputs[0];
    let takes = |value: Value| policy.epilogue_types.contains(&graph.dtype(value));
    if !takes(out) || graph.ty(out).numel() < policy.epilogue_elements.max(1) {
        return false;
    }
    match data.op {
        Op::DotGeneral(_) => {}
        _ => {
            let windows = |unit: usize| products::is_of_windows(graph, data, unit);
            let taken = policy.epilogue_pixels && products::is_of_pixels(graph, data)
                || policy.epilogue_windows.is_some_and(windows);
            return taken
                && data.inputs.iter().all(|&value| takes(value))
                && [out, data.inputs[0]]
                    .iter()
                    .all(|&image| lies_by_pixels(graph, policy, nest, image, stop));
        }
    }
    let cut = products::read_in_pieces(graph, policy, node);
    let mut operands = (0..data.inputs.len()).flat_map(|operand| {
        let pieces = products::pieces(graph, node, cut, operand).iter();
        pieces.map(move |&piece| (operand, piece))
    });
    operands.all(|(operand, value)| {
        let fits = |window: &Strided| {
            let side = side_of(graph, data, operand, value, window);
            side.is_some_and(|side| is_aligned(&side, window, operand, policy))
        };
        let stored = Strided {
            base: value,
            offset: 0,
            strides: strides(graph.shape(value), nest.layouts.get(&value)),
        };
        takes(value)
            && graph.ty(value).numel() > 0
            && (strided(graph, &nest.layouts, value, stop).is_some_and(|window| fits(&window))
                || fits(&stored))
    })
}

/// Whether an operand is as [`Policy::epilogue_unit`] wants it: one matrix, contiguous along rows or columns,
/// whose other distances and whose columns in the result are multiples of the unit.
fn is_aligned(side: &Side, window: &Strided, operand: usize, policy: &Policy) -> bool {
    let unit = policy.epilogue_unit;
    let (free, depth) = (side.free, side.depth);
    let whole = |stride: i64| stride.unsigned_abs().is_multiple_of(unit as u64);
    let lies = |line: i64, across: i64| line == 1 && whole(across);
    unit == 1
        || side.batch.iter().all(|&(extent, _)| extent == 1)
            && (lies(depth.1, free.1) || lies(free.1, depth.1))
            && whole(window.offset)
            && (operand == 0 || free.0.is_multiple_of(unit))
}

/// Whether an image is as [`Policy::epilogue_unit`] wants it: one matrix of pixels by channels.
fn lies_by_pixels(
    graph: &Graph,
    policy: &Policy,
    nest: &Nest,
    image: Value,
    stop: &dyn Fn(Value) -> bool,
) -> bool {
    let shape = graph.shape(image);
    let stored = Strided {
        base: image,
        offset: 0,
        strides: strides(shape, nest.layouts.get(&image)),
    };
    let window = strided(graph, &nest.layouts, image, stop).unwrap_or(stored);
    let unit = policy.epilogue_unit;
    let pixels: Vec<usize> = (0..shape.rank()).filter(|&axis| axis != 1).collect();
    let (extents, distances): (Vec<usize>, Vec<i64>) = pixels
        .iter()
        .map(|&axis| (shape[axis], window.strides[axis]))
        .unzip();
    let whole = |distance: i64| distance.unsigned_abs().is_multiple_of(unit as u64);
    shape[1].is_multiple_of(unit)
        && (window.strides[1] == 1 || shape[1] == 1)
        && whole(window.offset)
        && join(&extents, &distances).is_some_and(|(_, pixel)| whole(pixel))
}

/// How many tensors of the size of `value` the nest reads besides it.
pub fn streams(graph: &Graph, nest: &Nest, value: Value) -> usize {
    let whole = |used: Value| graph.ty(used).numel() == graph.ty(value).numel();
    let others = nest.uses.iter().filter(|(used, _)| *used != value);
    others.filter(|(used, _)| whole(*used)).count()
}

/// Whether `nest` may follow the contraction that makes `value`, which it reads at `index`.
pub fn fits(
    graph: &Graph,
    policy: &Policy,
    nest: &Nest,
    value: Value,
    index: &[Index],
    stored: bool,
) -> bool {
    let Some(frame) = ResultFrame::of(graph, value) else {
        return false;
    };
    if nest.members.is_empty() || vars(index) != nest.all() || !bijective(index, graph.shape(value)) {
        return false;
    }
    let (late, stored_by_point): (Vec<&Store>, Vec<&Store>) = nest
        .stores
        .iter()
        .partition(|store| nest.late.contains(&store.value));
    // Only nests with a split store values once for each row.
    let complete = stored_by_point
        .iter()
        .all(|store| vars(&store.index) == nest.all());
    let reductions = nest.members.iter().map(|&node| graph.node(node));
    let mut reductions = reductions.filter(|data| matches!(data.op, Op::Reduce { .. }));
    let of_columns = |data: &NodeData| {
        let [result] = data.outputs[..] else { return false };
        nest.late.contains(&result)
            && late.iter().filter(|store| store.value == result).count() == 1
            && nest
                .split
                .is_some_and(|split| vars(&nest.maps[&result]) == split.cols)
    };
    // Beside sums, functions of many instructions take the few warps of a template that finish longer than
    // all warps of a kernel of their own.
    let cheap =
        |&node: &Node| is_cheap(&graph.node(node).op) || matches!(graph.node(node).op, Op::Reduce { .. });
    let light = nest.late.is_empty() || nest.members.iter().all(cheap);
    if !complete || !light || !reductions.all(of_columns) {
        return false;
    }
    // An epilogue saves writing and reading the result. But it reads its other operands in pieces of rows,
    // where a nest of its own streams them. Measured, that costs more than it saves where there are more
    // than two other operands, or sums over the rows to keep.
    let streams = streams(graph, nest, value);
    let most = match nest.late.is_empty() {
        true => Some(policy.epilogue_streams),
        false => policy.epilogue_sums,
    };
    if most.is_none_or(|most| streams > most) {
        return false;
    }
    let mut nest = nest.clone();
    if stored {
        nest.add_store(graph, value, index.to_vec());
    }
    let placed = frame.place(graph, &nest, value, index);
    let sums_columns = |&late: &Value| vars(&placed.maps[&late]) == bit(COL);
    if !placed.late.iter().all(sums_columns) {
        return false;
    }
    let along: &[Var] = if policy.epilogue_turned {
        &[COL, ROW]
    } else {
        &[COL]
    };
    vector_variable(graph, &placed, value, along).is_some()
}

/// The stored values that the contraction `node` itself reads; `reads` are all buffers of its kernel.
pub fn operands(graph: &Graph, node: Node, reads: &[Buffer]) -> Vec<Value> {
    let mut bases = Vec::new();
    let mut left = graph.node(node).inputs.to_vec();
    while let Some(value) = left.pop() {
        let data = graph.def(value);
        match (&data.op, reads.contains(&Buffer::Value(value))) {
            (Op::Concat { .. }, false) => left.extend(&data.inputs),
            (_, false) if !data.inputs.is_empty() => left.push(data.inputs[0]),
            _ => bases.push(value),
        }
    }
    bases
}
