//! Operations of float tensors alone, and of bool tensors.

use burn_backend::ops::{BoolTensorOps, FloatTensorOps};
use burn_backend::{BoolDType, IntDType};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use burn_ir::{BoolOperationIr, FloatOperationIr, MatmulOpIr, OperationIr, UnaryOpIr};

use super::numeric::{binary, scalar};
use super::{NextStream, Operands, OperationError, TensorStore, float_dtype, random};

/// Whether a product is no element or a sum of nothing. burn-flex 0.21 takes a batch of one matrix that is
/// repeated for none (`[0, m, k] x [1, k, n]`) for a batch of one, and reads beyond the end of its operand.
pub(super) fn has_no_terms(product: &MatmulOpIr) -> bool {
    product.out.shape.num_elements() == 0 || product.lhs.shape.last() == Some(&0)
}

pub(super) fn run_float<S: TensorStore>(
    operation: &OperationIr,
    op: &FloatOperationIr,
    s: &mut Operands<'_, S>,
    next: &mut NextStream<'_>,
) -> Result<(), OperationError> {
    use FloatOperationIr as Op;
    match op {
        Op::Exp(d) => unary(Flex::float_exp, d, s),
        Op::Log(d) => unary(Flex::float_log, d, s),
        Op::Log1p(d) => unary(Flex::float_log1p, d, s),
        Op::Erf(d) => unary(Flex::float_erf, d, s),
        Op::PowfScalar(d) => scalar(Flex::float_powf_scalar, d, s),
        Op::Sqrt(d) => unary(Flex::float_sqrt, d, s),
        Op::Cos(d) => unary(Flex::float_cos, d, s),
        Op::Cosh(d) => unary(Flex::float_cosh, d, s),
        Op::Sin(d) => unary(Flex::float_sin, d, s),
        Op::Sinh(d) => unary(Flex::float_sinh, d, s),
        Op::Tan(d) => unary(Flex::float_tan, d, s),
        Op::Tanh(d) => unary(Flex::float_tanh, d, s),
        Op::ArcCos(d) => unary(Flex::float_acos, d, s),
        Op::ArcCosh(d) => unary(Flex::float_acosh, d, s),
        Op::ArcSin(d) => unary(Flex::float_asin, d, s),
        Op::ArcSinh(d) => unary(Flex::float_asinh, d, s),
        Op::ArcTan(d) => unary(Flex::float_atan, d, s),
        Op::ArcTanh(d) => unary(Flex::float_atanh, d, s),
        Op::ArcTan2(d) => binary(Flex::float_atan2, d, s),
        Op::Round(d) => unary(Flex::float_round, d, s),
        Op::Floor(d) => unary(Flex::float_floor, d, s),
        Op::Ceil(d) => unary(Flex::float_ceil, d, s),
        Op::Trunc(d) => unary(Flex::float_trunc, d, s),
        Op::Recip(d) => unary(Flex::float_recip, d, s),
        Op::Powf(d) => binary(Flex::float_powf, d, s),
        Op::IntoInt(d) => {
            let tensor = Flex::float_into_int(s.take(&d.input)?, IntDType::from(d.out.dtype));
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::Matmul(d) => {
            let (lhs, rhs) = (s.take(&d.lhs)?, s.take(&d.rhs)?);
            let tensor = match has_no_terms(d) {
                true => {
                    let shape = d.out.shape.clone();
                    Flex::float_zeros(shape, &FlexDevice, float_dtype(d.out.dtype))
                }
                false => Flex::float_matmul(lhs, rhs),
            };
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::Cross(d) => {
            let (lhs, rhs) = (s.take(&d.lhs)?, s.take(&d.rhs)?);
            s.put(&d.out, Flex::float_cross(lhs, rhs, d.dim));
            Ok(())
        }
        Op::Random(d) => {
            let tensor = random::draw(&d.out, d.distribution, next());
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::IsNan(d) => {
            let tensor = Flex::float_is_nan(s.take(&d.input)?, BoolDType::from(d.out.dtype));
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::IsInf(d) => {
            let tensor = Flex::float_is_inf(s.take(&d.input)?, BoolDType::from(d.out.dtype));
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::GridSample2d(d) => {
            let (tensor, grid) = (s.take(&d.tensor)?, s.take(&d.grid)?);
            s.put(
                &d.out,
                Flex::float_grid_sample_2d(tensor, grid, d.options.clone().into()),
            );
            Ok(())
        }
        Op::Quantize(_) | Op::Dequantize(_) => Err(OperationError::unsupported(
            operation,
            "burn-router does not carry quantized tensors; keep the tensor in a float type",
        )),
    }
}

pub(super) fn run_bool<S: TensorStore>(
    op: &BoolOperationIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    use BoolOperationIr as Op;
    match op {
        Op::IntoFloat(d) => {
            let tensor = Flex::bool_into_float(s.take(&d.input)?, float_dtype(d.out.dtype));
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::IntoInt(d) => {
            let tensor = Flex::bool_into_int(s.take(&d.input)?, IntDType::from(d.out.dtype));
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::Not(d) => unary(Flex::bool_not, d, s),
        Op::And(d) => binary(Flex::bool_and, d, s),
        Op::Or(d) => binary(Flex::bool_or, d, s),
    }
}

pub(super) fn unary<S: TensorStore>(
    f: fn(FlexTensor) -> FlexTensor,
    d: &UnaryOpIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    let input = s.take(&d.input)?;
    s.put(&d.out, f(input));
    Ok(())
}
