//! Attention and its gradient, composed of matrix products and a softmax, all in f64 and rounded once at the
//! end.

use candle_core::{Device, Result, Tensor};
use kiln_graph::op::{AttentionDims, RandomKind};
use kiln_graph::{DType, Shape, philox};

use crate::contract::matmul;
use crate::value::{Val, float, repeat, select};

/// Operands of the forward attention, in f64, heads of keys and values repeated for the queries that read
/// them.
struct Operands {
    batch: usize,
    heads: usize,
    groups: usize,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    mask: Option<Tensor>,
    /// The mask of hidden scores (truth values), and the score in their place.
    hidden: Option<(Tensor, Tensor)>,
    /// 1 where dropout keeps a probability, 0 elsewhere.
    kept: Option<Tensor>,
    /// The factor of kept probabilities.
    factor: Option<Tensor>,
    dims: AttentionDims,
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
        let at = dims.operands();
        let planes = |x: Tensor| x.broadcast_as(scores)?.reshape((batch * heads, t, s));
        let mask = at.mask.map(|at| planes(inputs[at].wide()?)).transpose()?;
        let hidden = match at.hidden {
            Some(at) => {
                let hidden = planes(inputs[at].wide()?)?;
                let hidden = hidden.ne(&float(&hidden, 0.0)?)?;
                let fill = repeat(&inputs[at + 1].wide()?, hidden.shape())?;
                Some((hidden, fill))
            }
            None => None,
        };
        let kept = match at.dropout {
            Some(at) => {
                let (seed, stream) = (inputs[at].to_i64()? as u64, inputs[at + 1].to_i64()? as u64);
                let shape = Shape::from([batch, heads, t, s]);
                let dtype = inputs[0].dtype.compute();
                let draw = philox::fill(RandomKind::Uniform, dtype, &shape, seed, stream, (0, 0));
                let draw = Val::from_host(&draw)?.wide()?.reshape((batch * heads, t, s))?;
                let keep = repeat(&inputs[at + 2].wide()?, draw.shape())?;
                Some(select(
                    &draw.lt(&keep)?,
                    &float(&draw, 1.0)?,
                    &float(&draw, 0.0)?,
                )?)
            }
            None => None,
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
            hidden,
            kept,
            factor: at.dropout.map(|at| inputs[at + 3].wide()).transpose()?,
            dims: *dims,
        })
    }

    /// `q k^T * scale + mask`, `fill` where hidden, -inf where causality forbids, as `dims` orders them:
    /// `[batch * heads, t, s]`.
    fn scores(&self) -> Result<Tensor> {
        let product = matmul(&self.q, &self.k.transpose(1, 2)?, DType::F64)?;
        let mut scores = product.broadcast_mul(&self.scale)?;
        if self.dims.drop_scores {
            scores = self.dropped(&scores, self.factor.as_ref())?;
        }
        let masked = |scores: Tensor, last: bool| match &self.mask {
            Some(mask) if self.dims.mask_last == last => scores.add(mask),
            _ => Ok(scores),
        };
        scores = masked(scores, false)?;
        if let Some((hidden, fill)) = &self.hidden {
            scores = select(hidden, fill, &scores)?;
        }
        scores = masked(scores, true)?;
        if self.dims.causal {
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

    /// Probabilities, the largest score of each row and the sum of its exponentials: `[batch * heads, t, s]`
    /// and twice `[batch * heads, t, 1]`.
    fn softmax(&self) -> Result<[Tensor; 3]> {
        let scores = self.scores()?;
        let (planes, t, s) = scores.dims3()?;
        if s == 0 {
            let full = |value: f64| Tensor::full(value, (planes, t, 1), &Device::Cpu);
            let (largest, sum) = if self.dims.safe {
                (0.0, 1.0)
            } else {
                (f64::NEG_INFINITY, 0.0)
            };
            return Ok([scores, full(largest)?, full(sum)?]);
        }
        // Candle's maximum passes over NaN.
        let missing = scores
            .ne(&scores)?
            .to_dtype(candle_core::DType::F64)?
            .sum_keepdim(2)?;
        let missing = missing.gt(&float(&missing, 0.0)?)?;
        let largest = scores.max_keepdim(2)?;
        let mut largest = select(&missing, &float(&largest, f64::NAN)?, &largest)?;
        let nothing = largest.eq(&float(&largest, f64::NEG_INFINITY)?)?;
        if self.dims.safe {
            largest = select(&nothing, &float(&largest, 0.0)?, &largest)?;
        }
        let exps = scores.broadcast_sub(&largest)?.exp()?;
        let mut sums = exps.sum_keepdim(2)?;
        if self.dims.safe {
            sums = select(&nothing, &float(&sums, 1.0)?, &sums)?;
        }
        Ok([exps.broadcast_div(&sums)?, largest, sums])
    }

    /// `x`, probabilities or their gradient, after dropout of them.
    fn dropped_probabilities(&self, x: &Tensor, factor: Option<&Tensor>) -> Result<Tensor> {
        if self.dims.drop_scores {
            return Ok(x.clone());
        }
        self.dropped(x, factor)
    }

    /// `x` times `factor` where dropout keeps it, 0 elsewhere.
    fn dropped(&self, x: &Tensor, factor: Option<&Tensor>) -> Result<Tensor> {
        match (&self.kept, factor) {
            (Some(kept), Some(factor)) => x.mul(kept)?.broadcast_mul(factor),
            _ => Ok(x.clone()),
        }
    }

    /// Sums of `ds * other` along `axis`, of what is not hidden only: NaN in a hidden key or query has no
    /// part in the gradient. `ds` is `[planes, t, s]`, `other` `[planes, 1, s, width]` or
    /// `[planes, t, 1, width]`.
    fn visible_sum(&self, ds: &Tensor, other: &Tensor, axis: usize) -> Result<Tensor> {
        let terms = ds.unsqueeze(3)?.broadcast_mul(other)?;
        let terms = match &self.hidden {
            Some((hidden, _)) => {
                let hidden = hidden.unsqueeze(3)?.broadcast_as(terms.shape())?.contiguous()?;
                select(&hidden, &float(&terms, 0.0)?, &terms)?
            }
            None => terms,
        };
        terms.sum(axis)
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
    let [probabilities, largest, sums] = operands.softmax()?;
    let stats = Tensor::cat(&[largest, sums], 2)?;
    let kept = operands.dropped_probabilities(&probabilities, operands.factor.as_ref())?;
    let out = matmul(&kept, &operands.v, DType::F64)?;
    let (batch, heads, t, _) = inputs[0].tensor.dims4()?;
    let width = inputs[2].dims()[3];
    Ok((
        Val::narrow(out.reshape((batch, heads, t, width))?, inputs[0].dtype)?,
        Val::narrow(stats.reshape((batch, heads, t, 2))?, inputs[0].dtype.compute())?,
    ))
}

/// Gradients of query, key and value. The probabilities come from the row statistics handed in.
pub(crate) fn backward(dims: &AttentionDims, inputs: &[&Val]) -> Result<[Val; 3]> {
    let at = dims.operands();
    let forward = &inputs[..at.forward];
    let own: Vec<Tensor> = inputs[at.forward..]
        .iter()
        .map(|value| value.wide())
        .collect::<Result<_>>()?;
    let [stats, dy, d_scale, inner] = [&own[0], &own[1], &own[2], &own[3]];
    let operands = Operands::new(dims, forward)?;
    let planes = |x: &Tensor| -> Result<Tensor> {
        let (_, _, t, width) = x.dims4()?;
        x.reshape((operands.batch * operands.heads, t, width))
    };
    let (stats, dy) = (planes(stats)?, planes(dy)?);
    let shifted = operands.scores()?.broadcast_sub(&stats.narrow(2, 0, 1)?)?;
    let probabilities = shifted.exp()?.broadcast_div(&stats.narrow(2, 1, 1)?)?;
    let kept = operands.dropped_probabilities(&probabilities, operands.factor.as_ref())?;
    let dv = matmul(&kept.transpose(1, 2)?, &dy, DType::F64)?;
    let dp = matmul(&dy, &operands.v.transpose(1, 2)?, DType::F64)?;
    let dp = operands.dropped_probabilities(&dp, own.get(4))?;
    let sum = probabilities.mul(&dp)?.sum_keepdim(2)?.broadcast_mul(inner)?;
    let mut ds = probabilities
        .mul(&dp.broadcast_add(&sum)?)?
        .broadcast_mul(d_scale)?;
    if let Some((hidden, _)) = &operands.hidden {
        ds = select(hidden, &float(&ds, 0.0)?, &ds)?;
    }
    if dims.drop_scores {
        ds = operands.dropped(&ds, own.get(4))?;
    }
    let dq = operands.visible_sum(&ds, &operands.k.unsqueeze(1)?, 2)?;
    let dk = operands.visible_sum(&ds, &operands.q.unsqueeze(2)?, 1)?;
    Ok([
        Val::narrow(dq.reshape(forward[0].dims())?, forward[0].dtype)?,
        operands.fold(&dk, forward[1])?,
        operands.fold(&dv, forward[2])?,
    ])
}
