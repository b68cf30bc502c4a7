//! Operations of int tensors alone: bits, conversion, matrix product.

use burn_backend::IntDType;
use burn_backend::ops::IntTensorOps;
use burn_flex::{Flex, FlexDevice};
use burn_ir::IntOperationIr;

use super::float::{has_no_terms, unary};
use super::numeric::{binary, scalar};
use super::{Operands, OperationError, TensorStore, float_dtype};

pub(super) fn run_int<S: TensorStore>(
    op: &IntOperationIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    use IntOperationIr as Op;
    match op {
        Op::IntoFloat(d) => {
            let tensor = Flex::int_into_float(s.take(&d.input)?, float_dtype(d.out.dtype));
            s.put(&d.out, tensor);
            Ok(())
        }
        Op::BitwiseAnd(d) => binary(Flex::bitwise_and, d, s),
        Op::BitwiseAndScalar(d) => scalar(Flex::bitwise_and_scalar, d, s),
        Op::BitwiseOr(d) => binary(Flex::bitwise_or, d, s),
        Op::BitwiseOrScalar(d) => scalar(Flex::bitwise_or_scalar, d, s),
        Op::BitwiseXor(d) => binary(Flex::bitwise_xor, d, s),
        Op::BitwiseXorScalar(d) => scalar(Flex::bitwise_xor_scalar, d, s),
        Op::BitwiseNot(d) => unary(Flex::bitwise_not, d, s),
        Op::BitwiseLeftShift(d) => binary(Flex::bitwise_left_shift, d, s),
        Op::BitwiseLeftShiftScalar(d) => scalar(Flex::bitwise_left_shift_scalar, d, s),
        Op::BitwiseRightShift(d) => binary(Flex::bitwise_right_shift, d, s),
        Op::BitwiseRightShiftScalar(d) => scalar(Flex::bitwise_right_shift_scalar, d, s),
        Op::Matmul(d) => {
            let (lhs, rhs) = (s.take(&d.lhs)?, s.take(&d.rhs)?);
            let tensor = match has_no_terms(d) {
                true => Flex::int_zeros(d.out.shape.clone(), &FlexDevice, IntDType::from(d.out.dtype)),
                false => Flex::int_matmul(lhs, rhs),
            };
            s.put(&d.out, tensor);
            Ok(())
        }
    }
}
