//! Lowering of operations that exist for every tensor kind: movement, indexing, masks, creation.

use burn_backend::Slice;
use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CatOpIr, GatherNdOpIr, MaskFillOpIr, MaskWhereOpIr, RepeatDimOpIr,
    ScalarOpIr, ScatterNdOpIr, ScatterOpIr, SelectAssignOpIr, SliceAssignOpIr, SliceOpIr, TensorIr,
    UnfoldOpIr,
};
use kiln_graph::op::{BinaryOp, CompareOp, Dims, ScatterMode};
use kiln_graph::{DType, Op, Shape, Value};

use super::lower::{Done, Fault, Lower, shape_of, tensor_type};

pub(super) fn lower(l: &mut Lower, op: &BaseOperationIr) -> Done {
    use BaseOperationIr as B;
    match op {
        B::Reshape(d) => {
            let x = l.input(&d.input)?;
            l.define_reshaped(&d.out, x)
        }
        B::SwapDims(d) => {
            let x = l.input(&d.input)?;
            let mut perm: Dims = (0..l.shape(x).rank()).collect();
            perm.swap(d.dim1, d.dim2);
            let out = l.transpose(x, &perm)?;
            l.define(&d.out, out)
        }
        B::Permute(d) => {
            let x = l.input(&d.input)?;
            let out = l.transpose(x, &d.axes)?;
            l.define(&d.out, out)
        }
        B::Flip(d) => {
            let x = l.input(&d.input)?;
            let out = flip(l, x, d.axes.iter().copied().collect())?;
            l.define(&d.out, out)
        }
        B::Expand(d) => {
            let x = l.input(&d.input)?;
            let out = l.broadcast_to(x, &shape_of(&d.out))?;
            l.define(&d.out, out)
        }
        B::Unfold(d) => unfold(l, d),
        B::Slice(d) => slice(l, d),
        B::SliceAssign(d) => slice_assign(l, d),
        B::Select(d) => {
            let (x, indices) = (l.input(&d.tensor)?, l.input(&d.indices)?);
            let out = l.index_select(x, d.dim, indices)?;
            l.define(&d.out, out)
        }
        B::SelectAssign(d) => select_assign(l, d),
        B::Gather(d) => {
            let (x, indices) = (l.input(&d.tensor)?, l.input(&d.indices)?);
            let out = l.add(Op::Gather { axis: d.dim }, &[x, indices])?;
            l.define(&d.out, out)
        }
        B::Scatter(d) => scatter(l, d),
        B::GatherNd(d) => gather_nd(l, d),
        B::ScatterNd(d) => scatter_nd(l, d),
        B::MaskWhere(d) => mask_where(l, d),
        B::MaskFill(d) => mask_fill(l, d),
        B::Equal(d) => equal(l, d),
        B::EqualElem(d) => equal_elem(l, d),
        B::RepeatDim(d) => repeat_dim(l, d),
        B::Cat(d) => concatenate(l, d),
        B::Cast(d) => {
            let x = l.input(&d.input)?;
            let out = l.cast(x, tensor_type(&d.out)?.dtype)?;
            l.define(&d.out, out)
        }
        // The elements of an empty tensor are unspecified; burn-flex gives zeros.
        B::Empty(d) | B::Zeros(d) => filled(l, &d.out, 0),
        B::Ones(d) => filled(l, &d.out, 1),
    }
}

/// The value where the mask holds, else `x`; all three are broadcast to the result.
fn mask_where(l: &mut Lower, d: &MaskWhereOpIr) -> Done {
    let (x, mask, value) = (l.input(&d.tensor)?, l.input(&d.mask)?, l.input(&d.value)?);
    let shape = shape_of(&d.out);
    let x = l.broadcast_to(x, &shape)?;
    let mask = l.broadcast_to(mask, &shape)?;
    let value = l.broadcast_to(value, &shape)?;
    let out = l.select(mask, value, x)?;
    l.define(&d.out, out)
}

/// A number where the mask holds, else `x`.
fn mask_fill(l: &mut Lower, d: &MaskFillOpIr) -> Done {
    let (x, mask) = (l.input(&d.tensor)?, l.input(&d.mask)?);
    let shape = shape_of(&d.out);
    let value = l.scalar(d.value, l.dtype(x))?;
    let value = l.splat(value, &shape)?;
    let x = l.broadcast_to(x, &shape)?;
    let mask = l.broadcast_to(mask, &shape)?;
    let out = l.select(mask, value, x)?;
    l.define(&d.out, out)
}

fn equal(l: &mut Lower, d: &BinaryOpIr) -> Done {
    let (a, b) = (l.input(&d.lhs)?, l.input(&d.rhs)?);
    let shape = shape_of(&d.out);
    let (a, b) = (l.broadcast_to(a, &shape)?, l.broadcast_to(b, &shape)?);
    let out = l.compare(CompareOp::Eq, a, b)?;
    l.define(&d.out, out)
}

fn equal_elem(l: &mut Lower, d: &ScalarOpIr) -> Done {
    let a = l.input(&d.lhs)?;
    let b = l.scalar(d.rhs, l.dtype(a))?;
    let b = l.splat(b, &shape_of(&d.out))?;
    let out = l.compare(CompareOp::Eq, a, b)?;
    l.define(&d.out, out)
}

fn concatenate(l: &mut Lower, d: &CatOpIr) -> Done {
    let operands = d
        .tensors
        .iter()
        .map(|ir| l.input(ir))
        .collect::<Result<Vec<_>, _>>()?;
    let out = match operands[..] {
        [x] => x,
        _ => l.add(Op::Concat { axis: d.dim }, &operands)?,
    };
    l.define(&d.out, out)
}

fn filled(l: &mut Lower, out: &TensorIr, value: i64) -> Done {
    let ty = tensor_type(out)?;
    let value = l.full(value, ty.dtype, &ty.shape)?;
    l.define(out, value)
}

fn flip(l: &mut Lower, x: Value, mut axes: Dims) -> Result<Value, Fault> {
    axes.sort_unstable();
    axes.dedup();
    if axes.is_empty() {
        return Ok(x);
    }
    l.add(Op::Flip(axes), &[x])
}

/// `[.., extent, ..] -> [.., windows, .., size]`: windows along a dimension, their elements last.
fn unfold(l: &mut Lower, d: &UnfoldOpIr) -> Done {
    let x = l.input(&d.input)?;
    let shape = l.shape(x);
    let windows = shape_of(&d.out)[d.dim];
    let split = if d.step == d.size {
        // The windows are next to each other.
        l.narrow(x, d.dim, 0, windows * d.size)?
    } else {
        let grid = Shape::from([windows, d.size]);
        let first = l.iota(DType::I64, &grid, 0)?;
        let first = l.with_constant(BinaryOp::Mul, first, d.step as i64)?;
        let offset = l.iota(DType::I64, &grid, 1)?;
        let indices = l.binary(BinaryOp::Add, first, offset)?;
        let indices = l.reshape(indices, [windows * d.size])?;
        l.index_select(x, d.dim, indices)?
    };
    let mut dims = shape.to_vec();
    dims.splice(d.dim..=d.dim, [windows, d.size]);
    let split = l.reshape(split, dims)?;
    let moved = d.dim + 1;
    let perm: Dims = (0..=shape.rank())
        .filter(|&axis| axis != moved)
        .chain([moved])
        .collect();
    let out = l.transpose(split, &perm)?;
    l.define(&d.out, out)
}

/// A recorded slice along every dimension, as forward strides and the axes that then run backward.
struct Strided {
    starts: Dims,
    limits: Dims,
    steps: Dims,
    reversed: Dims,
}

/// Burn's ranges select elements (`start..end`, negative counting from the end, clamped); the step gives
/// their order: a negative step starts from the last element of the range.
fn strided(ranges: &[Slice], shape: &Shape) -> Strided {
    let mut strided = Strided {
        starts: Dims::from_elem(0, shape.rank()),
        limits: Dims::from_slice(shape),
        steps: Dims::from_elem(1, shape.rank()),
        reversed: Dims::new(),
    };
    for (axis, slice) in ranges.iter().enumerate().take(shape.rank()) {
        let range = slice.to_range(shape[axis]);
        if range.start >= range.end {
            let start = range.start.min(shape[axis]);
            (strided.starts[axis], strided.limits[axis]) = (start, start);
            continue;
        }
        let step = slice.step.unsigned_abs().max(1);
        let count = range.len().div_ceil(step);
        strided.limits[axis] = range.end;
        strided.steps[axis] = step;
        strided.starts[axis] = if slice.step < 0 {
            strided.reversed.push(axis);
            range.end - 1 - (count - 1) * step
        } else {
            range.start
        };
    }
    strided
}

fn slice(l: &mut Lower, d: &SliceOpIr) -> Done {
    let x = l.input(&d.tensor)?;
    let shape = l.shape(x);
    let s = strided(&d.ranges, &shape);
    let whole = s.starts.iter().all(|&start| start == 0)
        && s.limits[..] == shape[..]
        && s.steps.iter().all(|&step| step == 1);
    let out = if whole {
        x
    } else {
        let op = Op::Slice {
            starts: s.starts,
            limits: s.limits,
            steps: s.steps,
        };
        l.add(op, &[x])?
    };
    let out = flip(l, out, s.reversed)?;
    l.define(&d.out, out)
}

fn slice_assign(l: &mut Lower, d: &SliceAssignOpIr) -> Done {
    let (x, update) = (l.input(&d.tensor)?, l.input(&d.value)?);
    // An update of no elements stays as well: a backward pass goes by what follows from what.
    let shape = l.shape(x);
    let s = strided(&d.ranges, &shape);
    let extents = (0..shape.rank()).map(|axis| (s.limits[axis] - s.starts[axis]).div_ceil(s.steps[axis]));
    let extents: Shape = extents.collect();
    let update = if l.shape(update).numel() == extents.numel() {
        l.reshape(update, extents)?
    } else {
        l.broadcast_to(update, &extents)?
    };
    let update = flip(l, update, s.reversed)?;
    let op = Op::UpdateSlice {
        starts: s.starts,
        steps: s.steps,
    };
    let out = l.add(op, &[x, update])?;
    l.define(&d.out, out)
}

fn select_assign(l: &mut Lower, d: &SelectAssignOpIr) -> Done {
    let (x, indices, updates) = (l.input(&d.tensor)?, l.input(&d.indices)?, l.input(&d.value)?);
    let out = combine(l, x, updates, d.update, |l, mode, x, updates| {
        l.add(Op::IndexPut { axis: d.dim, mode }, &[x, indices, updates])
    })?;
    l.define(&d.out, out)
}

fn scatter(l: &mut Lower, d: &ScatterOpIr) -> Done {
    let (x, indices, updates) = (l.input(&d.tensor)?, l.input(&d.indices)?, l.input(&d.value)?);
    let out = combine(l, x, updates, d.update, |l, mode, x, updates| {
        l.add(Op::Scatter { axis: d.dim, mode }, &[x, indices, updates])
    })?;
    l.define(&d.out, out)
}

/// An indexed update. Adding truth values is `or`: the maximum of bytes.
fn combine(
    l: &mut Lower,
    x: Value,
    updates: Value,
    update: IndexingUpdateOp,
    put: impl FnOnce(&mut Lower, ScatterMode, Value, Value) -> Result<Value, Fault>,
) -> Result<Value, Fault> {
    if l.dtype(x) == DType::Bool && update == IndexingUpdateOp::Add {
        let (x, updates) = (l.cast(x, DType::U8)?, l.cast(updates, DType::U8)?);
        let out = put(l, ScatterMode::Max, x, updates)?;
        return l.cast(out, DType::Bool);
    }
    put(l, scatter_mode(update), x, updates)
}

fn scatter_mode(update: IndexingUpdateOp) -> ScatterMode {
    match update {
        IndexingUpdateOp::Assign => ScatterMode::Assign,
        IndexingUpdateOp::Add => ScatterMode::Add,
        IndexingUpdateOp::Mul => ScatterMode::Mul,
        IndexingUpdateOp::Min => ScatterMode::Min,
        IndexingUpdateOp::Max => ScatterMode::Max,
    }
}

/// `data` as rows and, for each index tuple (the last dimension of `indices`), the number of the row it
/// names. Each coordinate is looked up among the coordinates of its dimension, where one out of range is
/// found: the number of the row alone does not show it.
fn rows(l: &mut Lower, data: Value, indices: Value) -> Result<(Value, Value), Fault> {
    let (shape, tuples) = (l.shape(data), l.shape(indices));
    let last = tuples.rank() - 1;
    let width = tuples[last];
    let count: usize = tuples[..last].iter().product();
    let mut linear = l.full(0i64, DType::I64, &Shape::from([count]))?;
    for j in 0..width {
        let stride: usize = shape[j + 1..width].iter().product();
        let coordinate = l.narrow(indices, last, j, j + 1)?;
        let coordinate = l.reshape(coordinate, [count])?;
        let all = l.iota(DType::I64, &Shape::from([shape[j]]), 0)?;
        let coordinate = l.index_select(all, 0, coordinate)?;
        let offset = l.with_constant(BinaryOp::Mul, coordinate, stride as i64)?;
        linear = l.binary(BinaryOp::Add, linear, offset)?;
    }
    let number: usize = shape[..width].iter().product();
    let size: usize = shape[width..].iter().product();
    let rows = l.reshape(data, [number, size])?;
    Ok((rows, linear))
}

fn gather_nd(l: &mut Lower, d: &GatherNdOpIr) -> Done {
    let (data, indices) = (l.input(&d.data)?, l.input(&d.indices)?);
    let (rows, linear) = rows(l, data, indices)?;
    let out = l.index_select(rows, 0, linear)?;
    l.define_reshaped(&d.out, out)
}

fn scatter_nd(l: &mut Lower, d: &ScatterNdOpIr) -> Done {
    let (data, indices, values) = (l.input(&d.data)?, l.input(&d.indices)?, l.input(&d.values)?);
    let (rows, linear) = rows(l, data, indices)?;
    let updates = Shape::from([l.shape(linear)[0], l.shape(rows)[1]]);
    let updates = l.reshape(values, updates)?;
    let mode = scatter_mode(d.reduction);
    let out = l.add(Op::IndexPut { axis: 0, mode }, &[rows, linear, updates])?;
    l.define_reshaped(&d.out, out)
}

fn repeat_dim(l: &mut Lower, d: &RepeatDimOpIr) -> Done {
    let x = l.input(&d.tensor)?;
    let shape = l.shape(x);
    // A new dimension before the repeated one, merged with it.
    let mut dims = shape.to_vec();
    dims.insert(d.dim, d.times);
    let kept: Dims = (0..=shape.rank()).filter(|&axis| axis != d.dim).collect();
    let out = l.broadcast(x, &Shape::from(dims), &kept)?;
    l.define_reshaped(&d.out, out)
}
