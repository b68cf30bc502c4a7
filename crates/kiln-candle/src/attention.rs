//! Attention and its gradient, composed of matrix products and a softmax, all in f64 and rounded once at the end.

use candle_core::{Device, Result, Tensor};
use kiln_graph::op::{AttentionDims, RandomKind};
use kiln_graph::{DType, Shape, philox};

use crate::contract::matmul;
use crate::value::{Val, float, repeat, select};

/// Operands of the forward attention, in f64, heads of keys and values repeated for the queries that read them.
struct Operands {
    batch: usize,
    heads: usize,
    groups: usize,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    mask: Option<Tensor>,
    /// Factors of the probabilities: 0 where dropped, 1 / keep elsewhere.
    dropout: Option<Tensor>,
    causal: bool,
}

impl Operands {
    fn new(dims: &AttentionDims, inputs: &[&Val]) -> Result<Self> {
        let (batch, heads, t, _) = inputs[0].tensor.dims4()?;
        let (_, groups, s, _) = inputs[1].tensor.dims4()?;
        let heads_of = |x: &Val| {
            let x = x.wide()?;
            let width = x.dims()[3];
            x.unsqueeze(2)?
                .broadcast_as((batch, groups, heads / groups, s, width))?
                .contiguous()?
                .reshape((batch * heads, s, width))
        };
        let q = inputs[0].wide()?;
        let width = q.dims()[3];
        let scores = (batch, heads, t, s);
        let mut rest = inputs[4..].iter();
        let mask = match (dims.mask, rest.as_slice()) {
            (true, [mask, ..]) => {
                rest.next();
                Some(
                    mask.wide()?
                        .broadcast_as(scores)?
                        .reshape((batch * heads, t, s))?,
                )
            }
            _ => None,
        };
        let dropout = match (dims.dropout, rest.as_slice()) {
            (true, [seed, stream, keep, ..]) => {
                let (seed, stream) = (seed.to_i64()? as u64, stream.to_i64()? as u64);
                let shape = Shape::from([batch, heads, t, s]);
                let draw = philox::fill(RandomKind::Uniform, inputs[0].dtype, &shape, seed, stream, (0, 0));
                let draw = Val::from_host(&draw)?.wide()?.reshape((batch * heads, t, s))?;
                let keep = repeat(&keep.wide()?, draw.shape())?;
                Some(select(&draw.lt(&keep)?, &keep.recip()?, &float(&draw, 0.0)?)?)
            }
            _ => None,
        };
        Ok(Self {
            batch,
            heads,
            groups,
            q: q.reshape((batch * heads, t, width))?,
            k: heads_of(inputs[1])?,
            v: heads_of(inputs[2])?,
            scale: inputs[3].wide()?,
            mask,
            dropout,
            causal: dims.causal,
        })
    }

    /// `q k^T * scale + mask`, -inf where causality forbids: `[batch * heads, t, s]`.
    fn scores(&self) -> Result<Tensor> {
        let product = matmul(&self.q, &self.k.transpose(1, 2)?, DType::F64)?;
        let mut scores = product.broadcast_mul(&self.scale)?;
        if let Some(mask) = &self.mask {
            scores = scores.add(mask)?;
        }
        if self.causal {
            let (_, t, s) = scores.dims3()?;
            let axis = |n: usize, dims: (usize, usize)| {
                repeat(&Tensor::arange(0, n as i64, &Device::Cpu)?.reshape(dims)?, (t, s))
            };
            // j <= i + s - t, without subtracting below zero.
            let shift = repeat(&Tensor::new(t as i64 - s as i64, &Device::Cpu)?, (t, s))?;
            let seen = axis(s, (1, s))?.add(&shift)?.le(&axis(t, (t, 1))?)?;
            let seen = repeat(&seen, scores.shape())?;
            scores = select(&seen, &scores, &float(&scores, f64::NEG_INFINITY)?)?;
        }
        Ok(scores)
    }

    /// Probabilities and `max + log(sum(exp))` of each row of scores, `[batch * heads, t, s]` and `[batch * heads, t, 1]`.
    fn softmax(&self) -> Result<(Tensor, Tensor)> {
        let scores = self.scores()?;
        let (planes, t, s) = scores.dims3()?;
        if s == 0 {
            let stats = Tensor::full(f64::NEG_INFINITY, (planes, t, 1), &Device::Cpu)?;
            return Ok((scores, stats));
        }
        let largest = scores.max_keepdim(2)?;
        let exps = scores.broadcast_sub(&largest)?.exp()?;
        let sums = exps.sum_keepdim(2)?;
        let stats = largest.add(&sums.log()?)?;
        Ok((exps.broadcast_div(&sums)?, stats))
    }

    /// `x` times the dropout factors.
    fn dropped(&self, x: &Tensor) -> Result<Tensor> {
        match &self.dropout {
            Some(factors) => x.mul(factors),
            None => Ok(x.clone()),
        }
    }

    /// Gradients of repeated heads added up, in the shape of the operand `like`.
    fn fold(&self, gradient: &Tensor, like: &Val) -> Result<Val> {
        let (_, s, width) = gradient.dims3()?;
        let repeated = (self.batch, self.groups, self.heads / self.groups, s, width);
        let sum = gradient.reshape(repeated)?.sum(2)?;
        Val::narrow(sum.reshape(like.dims())?, like.dtype)
    }
}

/// The result and the row statistics.
pub(crate) fn forward(dims: &AttentionDims, inputs: &[&Val]) -> Result<(Val, Val)> {
    let operands = Operands::new(dims, inputs)?;
    let (probabilities, stats) = operands.softmax()?;
    let out = matmul(&operands.dropped(&probabilities)?, &operands.v, DType::F64)?;
    let (batch, heads, t, _) = inputs[0].tensor.dims4()?;
    let width = inputs[2].dims()[3];
    Ok((
        Val::narrow(out.reshape((batch, heads, t, width))?, inputs[0].dtype)?,
        Val::narrow(stats.reshape((batch, heads, t))?, DType::F32)?,
    ))
}

/// Gradients of query, key and value. The probabilities come from the row statistics handed in, and their inner product with
/// the gradient from the forward result: `sum_j p_j dp_j = out . dy`.
pub(crate) fn backward(dims: &AttentionDims, inputs: &[&Val]) -> Result<[Val; 3]> {
    let (forward, [out, stats, dy]) = match inputs.split_last_chunk::<3>() {
        Some((forward, last)) => (forward, last.map(Val::wide)),
        None => candle_core::bail!("attention_grad takes the forward operands and three more"),
    };
    let operands = Operands::new(dims, forward)?;
    let planes = |x: Result<Tensor>| -> Result<Tensor> {
        let x = x?;
        x.reshape((
            operands.batch * operands.heads,
            x.dims()[2],
            x.dims().get(3).copied().unwrap_or(1),
        ))
    };
    let (out, stats, dy) = (planes(out)?, planes(stats)?, planes(dy)?);
    let probabilities = operands.scores()?.broadcast_sub(&stats)?.exp()?;
    let dv = matmul(
        &operands.dropped(&probabilities)?.transpose(1, 2)?,
        &dy,
        DType::F64,
    )?;
    let dp = operands.dropped(&matmul(&dy, &operands.v.transpose(1, 2)?, DType::F64)?)?;
    let inner = out.mul(&dy)?.sum_keepdim(2)?;
    let ds = probabilities
        .mul(&dp.broadcast_sub(&inner)?)?
        .broadcast_mul(&operands.scale)?;
    let dq = matmul(&ds, &operands.k, DType::F64)?;
    let dk = matmul(&ds.transpose(1, 2)?, &operands.q, DType::F64)?;
    Ok([
        Val::narrow(dq.reshape(forward[0].dims())?, forward[0].dtype)?,
        operands.fold(&dk, forward[1])?,
        operands.fold(&dv, forward[2])?,
    ])
}
