//! Products of many elements as products of two. They are exact where elements are zero (a quotient by each
//! element is not), and differentiable any number of times.

use kiln_graph::op::{BinaryOp, Dims, SignedDims};
use kiln_graph::{Graph, Shape, TensorType, Value};

use super::small;
use crate::build::Builder;
use crate::error::Result;

/// A tree: the first half times the second, until one element is left.
pub(super) fn reduce(x: &TensorType, axes: &[usize]) -> Result<Graph> {
    small("product", std::slice::from_ref(x), |b, operands| {
        let rest = x.shape.without(axes);
        let perm: Dims = (0..x.shape.rank())
            .filter(|axis| !axes.contains(axis))
            .chain(axes.iter().copied())
            .collect();
        let count: usize = axes.iter().map(|&axis| x.shape[axis]).product();
        let ordered = b.transpose(operands[0], &perm)?;
        let shape: Shape = rest.iter().copied().chain([count]).collect();
        let mut left = b.reshape(ordered, shape)?;
        if count == 0 {
            let ty = TensorType::new(x.dtype, rest);
            return Ok(vec![b.full(1.0, &ty)?]);
        }
        let axis = rest.rank();
        let mut count = count;
        while count > 1 {
            let half = count.div_ceil(2);
            let first = b.slice(left, axis, 0, half)?;
            let second = b.slice(left, axis, half, count)?;
            let second = fill(b, second, axis, 0, 2 * half as i64 - count as i64)?;
            left = b.mul(first, second)?;
            count = half;
        }
        Ok(vec![b.reshape(left, rest.clone())?])
    })
}

/// A scan: each element times the one `1, 2, 4, ..` places before it (Hillis and Steele 1986).
pub(super) fn cumulative(x: &TensorType, axis: usize) -> Result<Graph> {
    small("running_product", std::slice::from_ref(x), |b, operands| {
        let mut running = operands[0];
        let mut distance = 1;
        while distance < x.shape[axis] {
            let before = fill(b, running, axis, distance as i64, -(distance as i64))?;
            running = b.binary(BinaryOp::Mul, running, before)?;
            distance *= 2;
        }
        Ok(vec![running])
    })
}

/// Ones before and after the elements along `axis`.
fn fill(b: &mut Builder, x: Value, axis: usize, low: i64, high: i64) -> Result<Value> {
    let rank = b.shape(x).rank();
    let one = b.constant(1.0, b.dtype(x))?;
    let mut amounts = [SignedDims::from_elem(0, rank), SignedDims::from_elem(0, rank)];
    (amounts[0][axis], amounts[1][axis]) = (low, high);
    let [low, high] = amounts;
    b.pad(x, one, low, high)
}
