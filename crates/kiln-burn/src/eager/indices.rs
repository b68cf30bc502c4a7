//! Indices of eager operations: an index out of range is reported before burn-flex sees it, with the
//! operation and the user's line. burn-flex itself panics without either, or (indexing several dimensions
//! at once) reads another element.

use burn_backend::DType;
use burn_flex::FlexTensor;
use kiln_graph::IndexError;

use super::OperationError;
use crate::record::user_location;

/// Checks `indices` along dimension `axis` of `tensor`, for the operation `name`.
pub(super) fn check(
    name: &str,
    tensor: &FlexTensor,
    axis: usize,
    indices: &FlexTensor,
) -> Result<(), OperationError> {
    let extent = tensor.layout().shape()[axis];
    match find(indices, |_, index| !(0..extent as i128).contains(&index)) {
        None => Ok(()),
        Some((_, index)) => Err(outside(name, index, axis, extent)),
    }
}

/// Checks index tuples, the last dimension of `indices`, into the first dimensions of `tensor`.
pub(super) fn check_tuples(
    name: &str,
    tensor: &FlexTensor,
    indices: &FlexTensor,
) -> Result<(), OperationError> {
    let shape = tensor.layout().shape();
    let width = indices
        .layout()
        .shape()
        .iter()
        .last()
        .copied()
        .unwrap_or(1)
        .max(1);
    match find(indices, |at, index| {
        !(0..shape[at % width] as i128).contains(&index)
    }) {
        None => Ok(()),
        Some((at, index)) => Err(outside(name, index, at % width, shape[at % width])),
    }
}

/// The first element of an integer tensor, row-major, for which `wrong` holds, and its position.
pub(crate) fn find(tensor: &FlexTensor, wrong: impl Fn(usize, i128) -> bool) -> Option<(usize, i128)> {
    fn first<T: Copy + Into<i128>>(
        values: &[T],
        wrong: impl Fn(usize, i128) -> bool,
    ) -> Option<(usize, i128)> {
        let mut values = values.iter().map(|&value| value.into()).enumerate();
        values.find(|&(at, value)| wrong(at, value))
    }
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::I64 => first(tensor.storage::<i64>(), wrong),
        DType::I32 => first(tensor.storage::<i32>(), wrong),
        DType::I16 => first(tensor.storage::<i16>(), wrong),
        DType::I8 => first(tensor.storage::<i8>(), wrong),
        DType::U64 => first(tensor.storage::<u64>(), wrong),
        DType::U32 => first(tensor.storage::<u32>(), wrong),
        DType::U16 => first(tensor.storage::<u16>(), wrong),
        DType::U8 => first(tensor.storage::<u8>(), wrong),
        _ => None,
    }
}

fn outside(name: &str, index: i128, axis: usize, extent: usize) -> OperationError {
    OperationError::Index(Box::new(IndexError {
        operation: name.to_owned(),
        recorded: None,
        location: user_location().map(|location| location.to_string().into()),
        index,
        axis,
        extent,
    }))
}
