//! Operations that float and int tensors share.

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::{BoolDType, DType, IntDType, Scalar, Shape};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use burn_ir::{BinaryOpIr, DimOpIr, NumericOperationIr, ReduceDimOpIr, ReduceOpIr, ScalarOpIr, TensorIr};

use super::top_k::top_k_indices;
use super::{NextStream, Operands, OperationError, TensorStore, float_dtype, random};

type T = FlexTensor;
type Binary = fn(T, T) -> T;
type Elem = fn(T, Scalar) -> T;
type Compare = fn(T, T, BoolDType) -> T;
type CompareElem = fn(T, Scalar, BoolDType) -> T;
type Reduce = fn(T) -> T;
type ReduceDim = fn(T, usize) -> T;

/// The functions of burn-flex for one of the two kinds.
pub(super) struct Kind {
    add: (Binary, Elem),
    sub: (Binary, Elem),
    div: (Binary, Elem),
    rem: (Binary, Elem),
    mul: (Binary, Elem),
    powi: (Binary, Elem),
    abs: Reduce,
    full: fn(Shape, Scalar, DType) -> T,
    mean: (Reduce, ReduceDim),
    sum: (Reduce, ReduceDim),
    prod: (Reduce, ReduceDim),
    max: ReduceDim,
    min: ReduceDim,
    max_abs: ReduceDim,
    greater: (Compare, CompareElem),
    greater_equal: (Compare, CompareElem),
    lower: (Compare, CompareElem),
    lower_equal: (Compare, CompareElem),
    argmax: fn(T, usize, DType) -> T,
    argmin: fn(T, usize, DType) -> T,
    max_with_indices: fn(T, usize, DType) -> (T, T),
    min_with_indices: fn(T, usize, DType) -> (T, T),
    gather: fn(usize, T, T) -> T,
    clamp: fn(T, Scalar, Scalar) -> T,
    cumsum: ReduceDim,
    cumprod: ReduceDim,
    cummin: ReduceDim,
    cummax: ReduceDim,
}

pub(super) const FLOAT: Kind = Kind {
    add: (Flex::float_add, Flex::float_add_scalar),
    sub: (Flex::float_sub, Flex::float_sub_scalar),
    div: (Flex::float_div, Flex::float_div_scalar),
    rem: (Flex::float_remainder, Flex::float_remainder_scalar),
    mul: (Flex::float_mul, Flex::float_mul_scalar),
    powi: (Flex::float_powi, Flex::float_powi_scalar),
    abs: Flex::float_abs,
    full: |shape, value, dtype| Flex::float_full(shape, value, &FlexDevice, float_dtype(dtype)),
    mean: (Flex::float_mean, Flex::float_mean_dim),
    sum: (Flex::float_sum, Flex::float_sum_dim),
    prod: (Flex::float_prod, Flex::float_prod_dim),
    max: Flex::float_max_dim,
    min: Flex::float_min_dim,
    max_abs: Flex::float_max_abs_dim,
    greater: (Flex::float_greater, Flex::float_greater_elem),
    greater_equal: (Flex::float_greater_equal, Flex::float_greater_equal_elem),
    lower: (Flex::float_lower, Flex::float_lower_elem),
    lower_equal: (Flex::float_lower_equal, Flex::float_lower_equal_elem),
    argmax: |tensor, dim, dtype| Flex::float_argmax(tensor, dim, IntDType::from(dtype)),
    argmin: |tensor, dim, dtype| Flex::float_argmin(tensor, dim, IntDType::from(dtype)),
    max_with_indices: |tensor, dim, dtype| {
        Flex::float_max_dim_with_indices(tensor, dim, IntDType::from(dtype))
    },
    min_with_indices: |tensor, dim, dtype| {
        Flex::float_min_dim_with_indices(tensor, dim, IntDType::from(dtype))
    },
    gather: Flex::float_gather,
    clamp: Flex::float_clamp,
    cumsum: Flex::float_cumsum,
    cumprod: Flex::float_cumprod,
    cummin: Flex::float_cummin,
    cummax: Flex::float_cummax,
};

pub(super) const INT: Kind = Kind {
    add: (Flex::int_add, Flex::int_add_scalar),
    sub: (Flex::int_sub, Flex::int_sub_scalar),
    div: (Flex::int_div, Flex::int_div_scalar),
    rem: (Flex::int_remainder, Flex::int_remainder_scalar),
    mul: (Flex::int_mul, Flex::int_mul_scalar),
    powi: (Flex::int_powi, Flex::int_powi_scalar),
    abs: Flex::int_abs,
    full: |shape, value, dtype| Flex::int_full(shape, value, &FlexDevice, IntDType::from(dtype)),
    mean: (Flex::int_mean, Flex::int_mean_dim),
    sum: (Flex::int_sum, Flex::int_sum_dim),
    prod: (Flex::int_prod, Flex::int_prod_dim),
    max: Flex::int_max_dim,
    min: Flex::int_min_dim,
    max_abs: Flex::int_max_abs_dim,
    greater: (Flex::int_greater, Flex::int_greater_elem),
    greater_equal: (Flex::int_greater_equal, Flex::int_greater_equal_elem),
    lower: (Flex::int_lower, Flex::int_lower_elem),
    lower_equal: (Flex::int_lower_equal, Flex::int_lower_equal_elem),
    argmax: |tensor, dim, _| Flex::int_argmax(tensor, dim),
    argmin: |tensor, dim, _| Flex::int_argmin(tensor, dim),
    max_with_indices: |tensor, dim, _| Flex::int_max_dim_with_indices(tensor, dim),
    min_with_indices: |tensor, dim, _| Flex::int_min_dim_with_indices(tensor, dim),
    gather: Flex::int_gather,
    clamp: Flex::int_clamp,
    cumsum: Flex::int_cumsum,
    cumprod: Flex::int_cumprod,
    cummin: Flex::int_cummin,
    cummax: Flex::int_cummax,
};

pub(super) fn run<S: TensorStore>(
    kind: &Kind,
    op: &NumericOperationIr,
    s: &mut Operands<'_, S>,
    next: &mut NextStream<'_>,
) -> Result<(), OperationError> {
    use NumericOperationIr as Op;
    match op {
        Op::Add(d) => binary(kind.add.0, d, s),
        Op::AddScalar(d) => scalar(kind.add.1, d, s),
        Op::Sub(d) => binary(kind.sub.0, d, s),
        Op::SubScalar(d) => scalar(kind.sub.1, d, s),
        Op::Div(d) => binary(kind.div.0, d, s),
        Op::DivScalar(d) => scalar(kind.div.1, d, s),
        Op::Rem(d) => binary(kind.rem.0, d, s),
        Op::RemScalar(d) => scalar(kind.rem.1, d, s),
        Op::Mul(d) => binary(kind.mul.0, d, s),
        Op::MulScalar(d) => scalar(kind.mul.1, d, s),
        Op::Powi(d) => binary(kind.powi.0, d, s),
        Op::PowiScalar(d) => scalar(kind.powi.1, d, s),
        Op::Abs(d) => {
            let tensor = (kind.abs)(s.take(&d.input)?);
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::Full(d) => {
            let tensor = (kind.full)(d.out.shape.clone(), d.value.into(), d.out.dtype);
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::Mean(d) => reduce(kind.mean.0, d, s),
        Op::MeanDim(d) => reduce_dim(kind.mean.1, d, s),
        Op::Sum(d) => reduce(kind.sum.0, d, s),
        Op::SumDim(d) => reduce_dim(kind.sum.1, d, s),
        Op::Prod(d) => reduce(kind.prod.0, d, s),
        Op::ProdDim(d) => reduce_dim(kind.prod.1, d, s),
        Op::Max(d) => over_all(kind.max, d, s),
        Op::MaxDim(d) => reduce_dim(kind.max, d, s),
        Op::Min(d) => over_all(kind.min, d, s),
        Op::MinDim(d) => reduce_dim(kind.min, d, s),
        Op::MaxAbs(d) => over_all(kind.max_abs, d, s),
        Op::MaxAbsDim(d) => reduce_dim(kind.max_abs, d, s),
        Op::Greater(d) => compare(kind.greater.0, d, s),
        Op::GreaterElem(d) => compare_elem(kind.greater.1, d, s),
        Op::GreaterEqual(d) => compare(kind.greater_equal.0, d, s),
        Op::GreaterEqualElem(d) => compare_elem(kind.greater_equal.1, d, s),
        Op::Lower(d) => compare(kind.lower.0, d, s),
        Op::LowerElem(d) => compare_elem(kind.lower.1, d, s),
        Op::LowerEqual(d) => compare(kind.lower_equal.0, d, s),
        Op::LowerEqualElem(d) => compare_elem(kind.lower_equal.1, d, s),
        Op::ArgMax(d) => {
            let tensor = (kind.argmax)(s.take(&d.input)?, d.axis, d.out.dtype);
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::ArgMin(d) => {
            let tensor = (kind.argmin)(s.take(&d.input)?, d.axis, d.out.dtype);
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::TopK(d) => {
            let input = s.take(&d.input)?;
            let indices = largest(&input, d.axis, &d.out)?;
            s.put(&d.out, (kind.gather)(d.axis, input, indices));
            Ok(())
        }
        Op::ArgTopK(d) => {
            let input = s.take(&d.input)?;
            let indices = largest(&input, d.axis, &d.out)?;
            s.put(&d.out, indices);
            Ok(())
        }
        Op::MaxDimWithIndices(d) => {
            let (values, indices) = (kind.max_with_indices)(s.take(&d.tensor)?, d.dim, d.out_indices.dtype);
            s.put(&d.out, values);
            s.put(&d.out_indices, indices);
            Ok(())
        }
        Op::MinDimWithIndices(d) => {
            let (values, indices) = (kind.min_with_indices)(s.take(&d.tensor)?, d.dim, d.out_indices.dtype);
            s.put(&d.out, values);
            s.put(&d.out_indices, indices);
            Ok(())
        }
        Op::Clamp(d) => {
            let tensor = (kind.clamp)(s.take(&d.tensor)?, d.min.into(), d.max.into());
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::IntRandom(d) => {
            let tensor = random::draw(&d.out, d.distribution, next());
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::CumSum(d) => cumulative(kind.cumsum, d, s),
        Op::CumProd(d) => cumulative(kind.cumprod, d, s),
        Op::CumMin(d) => cumulative(kind.cummin, d, s),
        Op::CumMax(d) => cumulative(kind.cummax, d, s),
    }
}

/// The indices of the largest elements along `axis`, as many as `out` has.
fn largest(input: &FlexTensor, axis: usize, out: &TensorIr) -> Result<FlexTensor, OperationError> {
    top_k_indices(input, axis, out.shape[axis]).ok_or_else(|| OperationError::Unsupported {
        operation: "TopK".into(),
        reason: format!(
            "elements of type {:?} have no order; convert the tensor first",
            input.dtype()
        ),
    })
}

/// An extreme of all elements, along the only dimension of their list. burn-flex's own reduction of all
/// elements ignores NaN, its reduction of a dimension does not; all extremes should treat NaN alike.
fn over_all(f: ReduceDim, d: &ReduceOpIr, s: &mut Operands<'_, impl TensorStore>) -> Done {
    let input = s.take(&d.input)?;
    let count = input.layout().num_elements();
    s.put(&d.out, f(input.reshape(vec![count].into()), 0));
    Ok(())
}

type Done = Result<(), OperationError>;

pub(super) fn binary<S: TensorStore>(f: Binary, d: &BinaryOpIr, s: &mut Operands<'_, S>) -> Done {
    let (lhs, rhs) = (s.take(&d.lhs)?, s.take(&d.rhs)?);
    s.put(&d.out, f(lhs, rhs));
    Ok(())
}

pub(super) fn scalar<S: TensorStore>(f: Elem, d: &ScalarOpIr, s: &mut Operands<'_, S>) -> Done {
    let lhs = s.take(&d.lhs)?;
    s.put(&d.out, f(lhs, d.rhs.into()));
    Ok(())
}

fn compare<S: TensorStore>(f: Compare, d: &BinaryOpIr, s: &mut Operands<'_, S>) -> Done {
    let (lhs, rhs) = (s.take(&d.lhs)?, s.take(&d.rhs)?);
    s.put(&d.out, f(lhs, rhs, d.out.dtype.into()));
    Ok(())
}

fn compare_elem<S: TensorStore>(f: CompareElem, d: &ScalarOpIr, s: &mut Operands<'_, S>) -> Done {
    let lhs = s.take(&d.lhs)?;
    s.put(&d.out, f(lhs, d.rhs.into(), d.out.dtype.into()));
    Ok(())
}

fn reduce<S: TensorStore>(f: Reduce, d: &ReduceOpIr, s: &mut Operands<'_, S>) -> Done {
    let input = s.take(&d.input)?;
    s.put(&d.out, f(input));
    Ok(())
}

fn reduce_dim<S: TensorStore>(f: ReduceDim, d: &ReduceDimOpIr, s: &mut Operands<'_, S>) -> Done {
    let input = s.take(&d.input)?;
    s.put(&d.out, f(input, d.axis));
    Ok(())
}

fn cumulative<S: TensorStore>(f: ReduceDim, d: &DimOpIr, s: &mut Operands<'_, S>) -> Done {
    let input = s.take(&d.input)?;
    s.put(&d.out, f(input, d.axis));
    Ok(())
}
