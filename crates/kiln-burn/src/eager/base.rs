//! Operations that exist for every tensor kind: movement, indexing, masks, creation.

use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{BoolDType, DType, IntDType, Scalar, Shape, Slice};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use burn_ir::BaseOperationIr;

use super::cast::float_cast;
use super::indices::{check, check_tuples};
use super::{Operands, OperationError, TensorStore, float_dtype};

type T = FlexTensor;
type ScatterNd = fn(T, T, T, IndexingUpdateOp) -> T;

/// The functions of burn-flex for one tensor kind.
pub(super) struct Kind {
    name: &'static str,
    reshape: fn(T, Shape) -> T,
    swap_dims: fn(T, usize, usize) -> T,
    permute: fn(T, &[usize]) -> T,
    flip: fn(T, &[usize]) -> T,
    expand: fn(T, Shape) -> T,
    unfold: fn(T, usize, usize, usize) -> T,
    slice: fn(T, &[Slice]) -> T,
    slice_assign: fn(T, &[Slice], T) -> T,
    gather: fn(usize, T, T) -> T,
    scatter_add: fn(usize, T, T, T) -> T,
    select: fn(T, usize, T) -> T,
    select_add: fn(T, usize, T, T) -> T,
    gather_nd: Option<fn(T, T) -> T>,
    scatter_nd: Option<ScatterNd>,
    mask_where: fn(T, T, T) -> T,
    mask_fill: fn(T, T, Scalar) -> T,
    equal: fn(T, T, BoolDType) -> T,
    equal_elem: fn(T, Scalar, BoolDType) -> T,
    repeat_dim: fn(T, usize, usize) -> T,
    cat: fn(Vec<T>, usize) -> T,
    cast: fn(T, DType) -> T,
    empty: fn(Shape, DType) -> T,
    ones: fn(Shape, DType) -> T,
    zeros: fn(Shape, DType) -> T,
}

pub(super) const FLOAT: Kind = Kind {
    name: "BaseFloat",
    reshape: Flex::float_reshape,
    swap_dims: Flex::float_swap_dims,
    permute: Flex::float_permute,
    flip: Flex::float_flip,
    expand: Flex::float_expand,
    unfold: Flex::float_unfold,
    slice: Flex::float_slice,
    slice_assign: Flex::float_slice_assign,
    gather: Flex::float_gather,
    scatter_add: Flex::float_scatter_add,
    select: Flex::float_select,
    select_add: Flex::float_select_add,
    gather_nd: Some(Flex::float_gather_nd),
    scatter_nd: Some(Flex::float_scatter_nd),
    mask_where: Flex::float_mask_where,
    mask_fill: Flex::float_mask_fill,
    equal: Flex::float_equal,
    equal_elem: Flex::float_equal_elem,
    repeat_dim: Flex::float_repeat_dim,
    cat: Flex::float_cat,
    cast: |tensor, dtype| float_cast(tensor, float_dtype(dtype)),
    empty: |shape, dtype| Flex::float_empty(shape, &FlexDevice, float_dtype(dtype)),
    ones: |shape, dtype| Flex::float_ones(shape, &FlexDevice, float_dtype(dtype)),
    zeros: |shape, dtype| Flex::float_zeros(shape, &FlexDevice, float_dtype(dtype)),
};

pub(super) const INT: Kind = Kind {
    name: "BaseInt",
    reshape: Flex::int_reshape,
    swap_dims: Flex::int_swap_dims,
    permute: Flex::int_permute,
    flip: Flex::int_flip,
    expand: Flex::int_expand,
    unfold: Flex::int_unfold,
    slice: Flex::int_slice,
    slice_assign: Flex::int_slice_assign,
    gather: Flex::int_gather,
    scatter_add: Flex::int_scatter_add,
    select: Flex::int_select,
    select_add: Flex::int_select_add,
    gather_nd: Some(Flex::int_gather_nd),
    scatter_nd: Some(Flex::int_scatter_nd),
    mask_where: Flex::int_mask_where,
    mask_fill: Flex::int_mask_fill,
    equal: Flex::int_equal,
    equal_elem: Flex::int_equal_elem,
    repeat_dim: Flex::int_repeat_dim,
    cat: Flex::int_cat,
    cast: |tensor, dtype| Flex::int_cast(tensor, IntDType::from(dtype)),
    empty: |shape, dtype| Flex::int_empty(shape, &FlexDevice, IntDType::from(dtype)),
    ones: |shape, dtype| Flex::int_ones(shape, &FlexDevice, IntDType::from(dtype)),
    zeros: |shape, dtype| Flex::int_zeros(shape, &FlexDevice, IntDType::from(dtype)),
};

pub(super) const BOOL: Kind = Kind {
    name: "BaseBool",
    reshape: Flex::bool_reshape,
    swap_dims: Flex::bool_swap_dims,
    permute: Flex::bool_permute,
    flip: Flex::bool_flip,
    expand: Flex::bool_expand,
    unfold: Flex::bool_unfold,
    slice: Flex::bool_slice,
    slice_assign: Flex::bool_slice_assign,
    gather: Flex::bool_gather,
    // Adding truth values is `or`.
    scatter_add: Flex::bool_scatter_or,
    select: Flex::bool_select,
    select_add: Flex::bool_select_or,
    gather_nd: None,
    scatter_nd: None,
    mask_where: Flex::bool_mask_where,
    mask_fill: Flex::bool_mask_fill,
    equal: |lhs, rhs, _| Flex::bool_equal(lhs, rhs),
    equal_elem: |lhs, rhs, _| Flex::bool_equal_elem(lhs, rhs),
    repeat_dim: Flex::bool_repeat_dim,
    cat: Flex::bool_cat,
    cast: |tensor, _| tensor,
    empty: |shape, dtype| Flex::bool_empty(shape, &FlexDevice, BoolDType::from(dtype)),
    ones: |shape, dtype| Flex::bool_ones(shape, &FlexDevice, BoolDType::from(dtype)),
    zeros: |shape, dtype| Flex::bool_zeros(shape, &FlexDevice, BoolDType::from(dtype)),
};

pub(super) fn run<S: TensorStore>(
    kind: &Kind,
    op: &BaseOperationIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    use BaseOperationIr as Op;
    let name = |variant: &str| format!("{}.{variant}", kind.name);
    let (out, tensor) = match op {
        Op::Reshape(d) => (&d.out, (kind.reshape)(s.take(&d.input)?, d.out.shape.clone())),
        Op::SwapDims(d) => (&d.out, (kind.swap_dims)(s.take(&d.input)?, d.dim1, d.dim2)),
        Op::Permute(d) => (&d.out, (kind.permute)(s.take(&d.input)?, &d.axes)),
        Op::Flip(d) => (&d.out, (kind.flip)(s.take(&d.input)?, &d.axes)),
        Op::Expand(d) => (&d.out, (kind.expand)(s.take(&d.input)?, d.out.shape.clone())),
        Op::Unfold(d) => (&d.out, (kind.unfold)(s.take(&d.input)?, d.dim, d.size, d.step)),
        Op::Slice(d) => (&d.out, (kind.slice)(s.take(&d.tensor)?, &d.ranges)),
        Op::SliceAssign(d) => {
            let (tensor, value) = (s.take(&d.tensor)?, s.take(&d.value)?);
            (&d.out, (kind.slice_assign)(tensor, &d.ranges, value))
        }
        Op::Select(d) => {
            let (tensor, indices) = (s.take(&d.tensor)?, s.take(&d.indices)?);
            check(&name("Select"), &tensor, d.dim, &indices)?;
            (&d.out, (kind.select)(tensor, d.dim, indices))
        }
        Op::SelectAssign(d) => {
            require_add(kind, "SelectAssign", d.update)?;
            let (tensor, indices, value) = (s.take(&d.tensor)?, s.take(&d.indices)?, s.take(&d.value)?);
            check(&name("SelectAssign"), &tensor, d.dim, &indices)?;
            (&d.out, (kind.select_add)(tensor, d.dim, indices, value))
        }
        Op::Gather(d) => {
            let (tensor, indices) = (s.take(&d.tensor)?, s.take(&d.indices)?);
            check(&name("Gather"), &tensor, d.dim, &indices)?;
            (&d.out, (kind.gather)(d.dim, tensor, indices))
        }
        Op::Scatter(d) => {
            require_add(kind, "Scatter", d.update)?;
            let (tensor, indices, value) = (s.take(&d.tensor)?, s.take(&d.indices)?, s.take(&d.value)?);
            check(&name("Scatter"), &tensor, d.dim, &indices)?;
            (&d.out, (kind.scatter_add)(d.dim, tensor, indices, value))
        }
        Op::GatherNd(d) => {
            let gather = kind.gather_nd.ok_or_else(|| not_for_bool(kind, "GatherNd"))?;
            let (data, indices) = (s.take(&d.data)?, s.take(&d.indices)?);
            check_tuples(&name("GatherNd"), &data, &indices)?;
            (&d.out, gather(data, indices))
        }
        Op::ScatterNd(d) => {
            let scatter = kind.scatter_nd.ok_or_else(|| not_for_bool(kind, "ScatterNd"))?;
            let (data, indices, values) = (s.take(&d.data)?, s.take(&d.indices)?, s.take(&d.values)?);
            check_tuples(&name("ScatterNd"), &data, &indices)?;
            (&d.out, scatter(data, indices, values, d.reduction))
        }
        Op::MaskWhere(d) => {
            let (tensor, mask, value) = (s.take(&d.tensor)?, s.take(&d.mask)?, s.take(&d.value)?);
            (&d.out, (kind.mask_where)(tensor, mask, value))
        }
        Op::MaskFill(d) => {
            let (tensor, mask) = (s.take(&d.tensor)?, s.take(&d.mask)?);
            (&d.out, (kind.mask_fill)(tensor, mask, d.value.into()))
        }
        Op::Equal(d) => {
            let (lhs, rhs) = (s.take(&d.lhs)?, s.take(&d.rhs)?);
            (&d.out, (kind.equal)(lhs, rhs, d.out.dtype.into()))
        }
        Op::EqualElem(d) => {
            let lhs = s.take(&d.lhs)?;
            (&d.out, (kind.equal_elem)(lhs, d.rhs.into(), d.out.dtype.into()))
        }
        Op::RepeatDim(d) => (&d.out, (kind.repeat_dim)(s.take(&d.tensor)?, d.dim, d.times)),
        Op::Cat(d) => {
            let tensors = d
                .tensors
                .iter()
                .map(|ir| s.take(ir))
                .collect::<Result<Vec<_>, _>>()?;
            (&d.out, (kind.cat)(tensors, d.dim))
        }
        Op::Cast(d) => (&d.out, (kind.cast)(s.take(&d.input)?, d.out.dtype)),
        Op::Empty(d) => (&d.out, (kind.empty)(d.out.shape.clone(), d.out.dtype)),
        Op::Ones(d) => (&d.out, (kind.ones)(d.out.shape.clone(), d.out.dtype)),
        Op::Zeros(d) => (&d.out, (kind.zeros)(d.out.shape.clone(), d.out.dtype)),
    };
    s.put(out, tensor);
    Ok(())
}

fn require_add(kind: &Kind, variant: &str, update: IndexingUpdateOp) -> Result<(), OperationError> {
    match update {
        IndexingUpdateOp::Add => Ok(()),
        other => Err(OperationError::Unsupported {
            operation: format!("{}.{variant}", kind.name),
            reason: format!(
                "indexed updates combine by addition only, not {other:?}; scatter_nd has the others"
            ),
        }),
    }
}

fn not_for_bool(kind: &Kind, variant: &str) -> OperationError {
    OperationError::Unsupported {
        operation: format!("{}.{variant}", kind.name),
        reason: "it exists for float and int tensors only; convert the tensor with `.int()` first".into(),
    }
}
