//! Transposes of products, convolutions and average pooling with respect to the operand that depends on
//! tangents.

use kiln_graph::Value;
use kiln_graph::op::{ConvDims, Dims, DotDims, Op};

use super::Reverse;
use crate::build::dot_dims;
use crate::error::Result;

impl Reverse<'_> {
    /// The cotangent is contracted with the other operand over the other's free dimensions. The remaining
    /// dimensions are the batch dimensions, the free dimensions of this operand, and its contracted
    /// dimensions in the order that they have in the other operand.
    pub(super) fn dot(&mut self, dims: &DotDims, x: &[Value], ct: Value) -> Result<()> {
        let first = self.varies(x[0]);
        let (to, other) = if first { (x[0], x[1]) } else { (x[1], x[0]) };
        let (batch, contract, other_batch, other_contract) = if first {
            (&dims.a_batch, &dims.a_contract, &dims.b_batch, &dims.b_contract)
        } else {
            (&dims.b_batch, &dims.b_contract, &dims.a_batch, &dims.a_contract)
        };
        let rank = |value: Value| self.linear.shape(value).rank();
        let free = DotDims::free(rank(to), batch, contract);
        let other_free = DotDims::free(rank(other), other_batch, other_contract);
        // The first of the other operand's free dimensions in the result.
        let start = batch.len() + if first { free.len() } else { 0 };
        let of_ct: Dims = (start..start + other_free.len()).collect();
        let numbered: Dims = (0..batch.len()).collect();
        let mut order: Vec<usize> = (0..contract.len()).collect();
        order.sort_by_key(|&at| other_contract[at]);
        let contracted = order.iter().map(|&at| contract[at]);
        let other = self.primal(other);
        let ct = self.b.cast(ct, self.b.dtype(other))?;
        // The gradients of a product `a b` are computed as `ct b` and `a ct`, which need the fewest
        // transposes afterwards.
        let (product, made): (Value, Vec<usize>) = if first {
            let dims = dot_dims(numbered, other_batch.clone(), of_ct, other_free);
            let made = batch.iter().copied().chain(free).chain(contracted);
            (self.b.op(Op::DotGeneral(dims), &[ct, other])?, made.collect())
        } else {
            let dims = dot_dims(other_batch.clone(), numbered, other_free, of_ct);
            let made = batch.iter().copied().chain(contracted).chain(free);
            (self.b.op(Op::DotGeneral(dims), &[other, ct])?, made.collect())
        };
        let mut perm = Dims::from_elem(0, made.len());
        made.iter().enumerate().for_each(|(at, &dim)| perm[dim] = at);
        let ct = self.b.transpose(product, &perm)?;
        self.accumulate(to, ct)
    }

    /// The spatial extents of a tensor or a kernel.
    fn spatial(&self, value: Value) -> Dims {
        self.linear.shape(value)[2..].into()
    }

    /// `ct` in the type of the operand beside it, and `conv` with results of that type: a product of 16
    /// bits may have a result of f32, and the cotangent of its operand has the operand's type.
    fn narrowed(&mut self, conv: &ConvDims, ct: Value, beside: Value) -> Result<(ConvDims, Value)> {
        let ct = self.b.cast(ct, self.b.dtype(beside))?;
        let conv = ConvDims {
            result: None,
            ..conv.clone()
        };
        Ok((conv, ct))
    }

    pub(super) fn conv(&mut self, conv: &ConvDims, x: &[Value], ct: Value) -> Result<()> {
        if self.varies(x[0]) {
            let w = self.primal(x[1]);
            let (conv, ct) = self.narrowed(conv, ct, w)?;
            let input = self.spatial(x[0]);
            let ct = self.b.op(Op::ConvInputGrad { conv, input }, &[ct, w])?;
            self.accumulate(x[0], ct)
        } else {
            let input = self.primal(x[0]);
            let (conv, ct) = self.narrowed(conv, ct, input)?;
            let kernel = self.spatial(x[1]);
            let ct = self.b.op(Op::ConvWeightGrad { conv, kernel }, &[input, ct])?;
            self.accumulate(x[1], ct)
        }
    }

    pub(super) fn conv_input_grad(&mut self, conv: &ConvDims, x: &[Value], ct: Value) -> Result<()> {
        if self.varies(x[0]) {
            let w = self.primal(x[1]);
            let (conv, ct) = self.narrowed(conv, ct, w)?;
            let ct = self.b.op(Op::Conv(conv), &[ct, w])?;
            self.accumulate(x[0], ct)
        } else {
            let dy = self.primal(x[0]);
            let (conv, ct) = self.narrowed(conv, ct, dy)?;
            let kernel = self.spatial(x[1]);
            let ct = self.b.op(Op::ConvWeightGrad { conv, kernel }, &[ct, dy])?;
            self.accumulate(x[1], ct)
        }
    }

    pub(super) fn conv_weight_grad(&mut self, conv: &ConvDims, x: &[Value], ct: Value) -> Result<()> {
        if self.varies(x[0]) {
            let dy = self.primal(x[1]);
            let (conv, ct) = self.narrowed(conv, ct, dy)?;
            let input = self.spatial(x[0]);
            let ct = self.b.op(Op::ConvInputGrad { conv, input }, &[dy, ct])?;
            self.accumulate(x[0], ct)
        } else {
            let input = self.primal(x[0]);
            let (conv, ct) = self.narrowed(conv, ct, input)?;
            let ct = self.b.op(Op::Conv(conv), &[input, ct])?;
            self.accumulate(x[1], ct)
        }
    }

    pub(super) fn avg_pool(&mut self, op: &Op, x: &[Value], ct: Value) -> Result<()> {
        let transposed = match op {
            Op::AvgPool {
                window,
                count_include_pad,
            } => Op::AvgPoolGrad {
                window: window.clone(),
                count_include_pad: *count_include_pad,
                input: self.spatial(x[0]),
            },
            Op::AvgPoolGrad {
                window,
                count_include_pad,
                ..
            } => Op::AvgPool {
                window: window.clone(),
                count_include_pad: *count_include_pad,
            },
            other => unreachable!("{} is no average", other.name()),
        };
        let ct = self.b.op(transposed, &[ct])?;
        self.accumulate(x[0], ct)
    }
}
