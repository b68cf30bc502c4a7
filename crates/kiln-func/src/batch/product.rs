//! Products, convolutions, poolings and attention: the batch becomes part of a dimension that they treat
//! alike, or a batch dimension of a matrix product.

use kiln_graph::op::{AttentionDims, ConvDims, Dims, DotDims, Op};
use kiln_graph::{Shape, Value};

use super::{Batch, Lane, Lanes, Randomness, per_element};
use crate::error::Result;

impl Batch {
    /// Joins the batch into dimension `axis` of an element; the batch counts outermost there.
    fn fold(&mut self, lane: Lane, axis: usize) -> Result<Value> {
        let value = self.batched(lane)?;
        let value = self.b.move_dim(value, 0, axis)?;
        let mut shape = self.b.shape(value).to_vec();
        let extent = shape.remove(axis);
        shape[axis] *= extent;
        self.b.reshape(value, shape)
    }

    /// The reverse: splits the batch off dimension `axis`, as the first dimension.
    fn unfold(&mut self, value: Value, axis: usize) -> Result<Value> {
        let mut shape = self.b.shape(value).to_vec();
        shape[axis] /= self.size;
        shape.insert(axis, self.size);
        let value = self.b.reshape(value, shape)?;
        self.b.move_dim(value, axis, 0)
    }

    /// The batch becomes a batch dimension of the product if both operands have it, otherwise a free
    /// dimension of the operand that has it.
    pub(super) fn dot(&mut self, dims: &DotDims, a: Lane, b: Lane) -> Result<Value> {
        let up = |axes: &Dims, lane: Lane| -> Dims {
            axes.iter()
                .map(|&axis| axis + usize::from(lane.batched))
                .collect()
        };
        let mut wide = dims.clone();
        wide.a_batch = up(&dims.a_batch, a);
        wide.b_batch = up(&dims.b_batch, b);
        wide.a_contract = up(&dims.a_contract, a);
        wide.b_contract = up(&dims.b_contract, b);
        let batch = dims.a_batch.len();
        let at = match (a.batched, b.batched) {
            (true, true) => {
                wide.a_batch.insert(0, 0);
                wide.b_batch.insert(0, 0);
                0
            }
            (true, false) => batch,
            (false, _) => self.b.shape(a.value).rank() - dims.a_contract.len(),
        };
        let product = self.b.op(Op::DotGeneral(wide), &[a.value, b.value])?;
        self.b.move_dim(product, at, 0)
    }

    /// The convolution with the groups of every element.
    fn grouped(&self, conv: &ConvDims) -> ConvDims {
        ConvDims {
            groups: conv.groups * self.size,
            ..conv.clone()
        }
    }

    pub(super) fn conv(&mut self, conv: &ConvDims, x: Lane, w: Lane) -> Result<Value> {
        if !w.batched {
            let x = self.fold(x, 0)?;
            let y = self.b.op(Op::Conv(conv.clone()), &[x, w.value])?;
            return self.unfold(y, 0);
        }
        let w = self.fold(w, 0)?;
        let y = if !x.batched && conv.groups == 1 {
            self.b.op(Op::Conv(conv.clone()), &[x.value, w])?
        } else {
            let x = self.fold(x, 1)?;
            self.b.op(Op::Conv(self.grouped(conv)), &[x, w])?
        };
        self.unfold(y, 1)
    }

    pub(super) fn conv_input_grad(
        &mut self,
        conv: &ConvDims,
        input: &Dims,
        dy: Lane,
        w: Lane,
    ) -> Result<Value> {
        let input = input.clone();
        if !w.batched {
            let conv = conv.clone();
            let dy = self.fold(dy, 0)?;
            let dx = self.b.op(Op::ConvInputGrad { conv, input }, &[dy, w.value])?;
            return self.unfold(dx, 0);
        }
        let conv = self.grouped(conv);
        let (dy, w) = (self.fold(dy, 1)?, self.fold(w, 0)?);
        let dx = self.b.op(Op::ConvInputGrad { conv, input }, &[dy, w])?;
        self.unfold(dx, 1)
    }

    pub(super) fn conv_weight_grad(
        &mut self,
        conv: &ConvDims,
        kernel: &Dims,
        x: Lane,
        dy: Lane,
    ) -> Result<Value> {
        let kernel = kernel.clone();
        if conv.groups == 1 && x.batched != dy.batched {
            // The same operand for all: more input channels, or more output channels.
            let conv = conv.clone();
            let (inner, outer, at) = if x.batched {
                (self.fold(x, 1)?, dy.value, 1)
            } else {
                (x.value, self.fold(dy, 1)?, 0)
            };
            let dw = self.b.op(Op::ConvWeightGrad { conv, kernel }, &[inner, outer])?;
            return self.unfold(dw, at);
        }
        let conv = self.grouped(conv);
        let (x, dy) = (self.fold(x, 1)?, self.fold(dy, 1)?);
        let dw = self.b.op(Op::ConvWeightGrad { conv, kernel }, &[x, dy])?;
        self.unfold(dw, 0)
    }

    /// An operation that treats each index of the first dimension by itself.
    pub(super) fn folded(&mut self, op: &Op, x: &[Lane]) -> Result<Lanes> {
        let operands = x.iter().map(|&lane| self.fold(lane, 0));
        let operands = operands.collect::<Result<Vec<Value>>>()?;
        let results = self.b.node(op.clone(), &operands)?;
        results
            .into_iter()
            .map(|result| Ok(per_element(self.unfold(result, 0)?)))
            .collect()
    }

    /// Attention of a batch as one attention of more sequences; none where numbers differ between elements,
    /// or where all elements are to drop the same, because such an attention has no form with more
    /// sequences.
    pub(super) fn whole_attention(
        &mut self,
        op: &Op,
        dims: AttentionDims,
        x: &[Lane],
    ) -> Result<Option<Lanes>> {
        let at = dims.operands();
        let is_tensor =
            |operand: usize| dims.is_tensor(operand) || operand == at.forward || operand == at.forward + 1;
        let same = x
            .iter()
            .enumerate()
            .all(|(operand, lane)| is_tensor(operand) || !lane.batched);
        if !same || (dims.dropout && self.randomness == Randomness::Same) {
            return Ok(None);
        }
        let sequences = self.element(x[0]).shape[0];
        let mut operands = Vec::with_capacity(x.len());
        for (operand, &lane) in x.iter().enumerate() {
            let is_mask = is_tensor(operand) && operand > 3 && operand < at.forward;
            operands.push(match is_tensor(operand) {
                false => lane.value,
                true if is_mask => self.mask(lane, sequences)?,
                true => self.fold(lane, 0)?,
            });
        }
        let results = self.b.node(op.clone(), &operands)?;
        let lanes = results
            .into_iter()
            .map(|result| Ok(per_element(self.unfold(result, 0)?)));
        lanes.collect::<Result<Lanes>>().map(Some)
    }

    /// A mask that may be the same for all sequences of an element.
    fn mask(&mut self, lane: Lane, sequences: usize) -> Result<Value> {
        let shape = self.element(lane).shape;
        if !lane.batched && shape[0] == 1 {
            return Ok(lane.value);
        }
        let wide: Shape = self.wide(&shape).with(1, sequences);
        let first = usize::from(!lane.batched);
        let dims: Vec<usize> = (first..wide.rank()).collect();
        let mask = self.b.broadcast(lane.value, &wide, &dims)?;
        self.fold(per_element(mask), 0)
    }
}
