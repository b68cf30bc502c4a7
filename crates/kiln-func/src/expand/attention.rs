//! Attention and its gradient by their formulas (`kiln-graph/src/interpret/attention.rs`), with the scores
//! as a tensor `[b, h, t, s]`. All values between operands and results have the type that the operands'
//! type is computed in.

use kiln_graph::op::{AttentionDims, CompareOp, Dims, Op, RandomKind, ReduceOp, UnaryOp};
use kiln_graph::{DType, Shape, Value};

use crate::build::{Builder, dot_dims};
use crate::error::Result;

/// The operands, widened, and values that follow from them alone.
struct Parts {
    dims: AttentionDims,
    q: Value,
    k: Value,
    v: Value,
    dtype: DType,
    /// Type of the operands.
    narrow: DType,
    /// Shape of the scores.
    shape: Shape,
    /// The keys whose score is not `fill`; none if all keys have a score.
    hidden: Option<Value>,
    /// The elements that dropout keeps.
    kept: Option<Value>,
    scores: Value,
}

impl Parts {
    fn new(b: &mut Builder, x: &[Value], dims: AttentionDims) -> Result<Self> {
        let narrow = b.dtype(x[0]);
        let dtype = narrow.compute();
        let at = dims.operands();
        let [q, k, v] = [b.cast(x[0], dtype)?, b.cast(x[1], dtype)?, b.cast(x[2], dtype)?];
        let (query, key) = (b.shape(q), b.shape(k));
        let shape = Shape::from([query[0], query[1], query[2], key[2]]);
        let kept = match at.dropout {
            None => None,
            Some(at) => {
                let op = Op::Random {
                    kind: RandomKind::Uniform,
                    dtype,
                    shape: shape.clone(),
                };
                let draw = b.op(op, &[x[at], x[at + 1]])?;
                let keep = b.splat_like(x[at + 2], draw)?;
                Some(b.compare(CompareOp::Lt, draw, keep)?)
            }
        };
        let hidden = match at.hidden {
            None => None,
            Some(at) => Some(b.broadcast(x[at], &shape, &[0, 1, 2, 3])?),
        };
        let products = by_heads(b, q, k, [3, 3])?;
        let mut parts = Self {
            dims,
            q,
            k,
            v,
            dtype,
            narrow,
            shape,
            hidden,
            kept,
            scores: products,
        };
        let scaled = parts.times(b, products, x[3])?;
        let mut scores = match at.dropout {
            Some(at) if dims.drop_scores => parts.dropped(b, scaled, x[at + 3])?,
            _ => scaled,
        };
        let mask = match at.mask {
            None => None,
            Some(at) => {
                let mask = b.cast(x[at], dtype)?;
                Some(b.broadcast(mask, &parts.shape, &[0, 1, 2, 3])?)
            }
        };
        if let (Some(mask), false) = (mask, dims.mask_last) {
            scores = b.add(scores, mask)?;
        }
        if let (Some(hidden), Some(at)) = (parts.hidden, at.hidden) {
            let fill = b.splat_like(x[at + 1], scores)?;
            scores = b.select(hidden, fill, scores)?;
        }
        if let (Some(mask), true) = (mask, dims.mask_last) {
            scores = b.add(scores, mask)?;
        }
        if dims.causal {
            let future = parts.future(b)?;
            let never = b.full_like(f64::NEG_INFINITY, scores)?;
            scores = b.select(future, never, scores)?;
        }
        parts.scores = scores;
        Ok(parts)
    }

    /// Which keys causal order hides: those with `j + t > i + s`.
    fn future(&self, b: &mut Builder) -> Result<Value> {
        let (length, key_length) = (self.shape[2] as i64, self.shape[3] as i64);
        let query = b.iota(DType::I64, &self.shape, 2)?;
        let key = b.iota(DType::I64, &self.shape, 3)?;
        let reach = b.full_like(key_length - length, query)?;
        let last = b.add(query, reach)?;
        b.compare(CompareOp::Gt, key, last)
    }

    fn times(&self, b: &mut Builder, x: Value, factor: Value) -> Result<Value> {
        let factor = b.splat_like(factor, x)?;
        b.mul(x, factor)
    }

    /// `x * factor` where dropout keeps, 0 elsewhere.
    fn dropped(&self, b: &mut Builder, x: Value, factor: Value) -> Result<Value> {
        let Some(kept) = self.kept else { return Ok(x) };
        let scaled = self.times(b, x, factor)?;
        b.keep(kept, scaled)
    }

    /// The same where dropout is of probabilities.
    fn dropped_probability(&self, b: &mut Builder, x: Value, factor: Option<Value>) -> Result<Value> {
        match factor {
            Some(factor) if !self.dims.drop_scores => self.dropped(b, x, factor),
            _ => Ok(x),
        }
    }

    /// Repeats a number of each row for all scores of the row.
    fn rows(&self, b: &mut Builder, x: Value) -> Result<Value> {
        let shape = self.shape.clone();
        b.expand(x, &shape, &[3])
    }
}

/// A product for each head: dimension `contract[0]` of `a: [b, h, ..]` with `contract[1]` of `b: [b, g, ..]`,
/// where `h / g` heads read the same. `[b, h, rest of a, rest of b]`.
fn by_heads(build: &mut Builder, a: Value, b: Value, contract: [usize; 2]) -> Result<Value> {
    let (a_shape, b_shape) = (build.shape(a), build.shape(b));
    let grouped = build.reshape(a, grouped(&a_shape, b_shape[1]))?;
    let dims = dot_dims(
        Dims::from_slice(&[0, 1]),
        Dims::from_slice(&[0, 1]),
        Dims::from_slice(&[contract[0] + 1]),
        Dims::from_slice(&[contract[1]]),
    );
    let product = build.op(Op::DotGeneral(dims), &[grouped, b])?;
    let shape = build.shape(product);
    build.reshape(product, Shape::from([shape[0], a_shape[1], shape[3], shape[4]]))
}

/// `[b, h, ..]` as `[b, g, h / g, ..]`.
fn grouped(shape: &Shape, heads: usize) -> Shape {
    [shape[0], heads, shape[1] / heads]
        .into_iter()
        .chain(shape[2..].iter().copied())
        .collect()
}

/// The sum over the heads that read a key head, of the sums over rows of `a: [b, h, t, s]` times `x: [b, h,
/// t, d]`. `[b, g, s, d]`.
fn to_key_heads(build: &mut Builder, a: Value, x: Value, heads: usize) -> Result<Value> {
    let [a_shape, x_shape] = [a, x].map(|value| grouped(&build.shape(value), heads));
    let (a, x) = (build.reshape(a, a_shape)?, build.reshape(x, x_shape)?);
    let dims = dot_dims(
        Dims::from_slice(&[0, 1]),
        Dims::from_slice(&[0, 1]),
        Dims::from_slice(&[2, 3]),
        Dims::from_slice(&[2, 3]),
    );
    build.op(Op::DotGeneral(dims), &[a, x])
}

pub(super) fn forward(b: &mut Builder, x: &[Value], dims: AttentionDims) -> Result<Vec<Value>> {
    let parts = Parts::new(b, x, dims)?;
    let factor = dims.operands().dropout.map(|at| x[at + 3]);
    let mut largest = b.reduce(ReduceOp::Max, parts.scores, &[3])?;
    let nothing = match dims.safe {
        false => None,
        true => {
            let lowest = b.full_like(f64::NEG_INFINITY, largest)?;
            Some(b.compare(CompareOp::Eq, largest, lowest)?)
        }
    };
    if let Some(nothing) = nothing {
        largest = b.drop(nothing, largest)?;
    }
    let spread = parts.rows(b, largest)?;
    let below = b.sub(parts.scores, spread)?;
    let exps = b.unary(UnaryOp::Exp, below)?;
    let mut sum = b.sum(exps, &[3])?;
    if let Some(nothing) = nothing {
        let one = b.full_like(1.0, sum)?;
        sum = b.select(nothing, one, sum)?;
    }
    let spread = parts.rows(b, sum)?;
    let probabilities = b.div(exps, spread)?;
    let probabilities = parts.dropped_probability(b, probabilities, factor)?;
    let out = by_heads(b, probabilities, parts.v, [3, 2])?;
    let out = b.cast(out, parts.narrow)?;
    let column: Shape = parts.shape[..3].iter().copied().chain([1]).collect();
    let (largest, sum) = (b.reshape(largest, column.clone())?, b.reshape(sum, column)?);
    let stats = b.op(Op::Concat { axis: 3 }, &[largest, sum])?;
    Ok(vec![out, stats])
}

pub(super) fn backward(b: &mut Builder, x: &[Value], dims: AttentionDims) -> Result<Vec<Value>> {
    let parts = Parts::new(b, x, dims)?;
    let at = dims.operands();
    let [stats, d_out, d_scale, inner] = [0, 1, 2, 3].map(|offset| x[at.forward + offset]);
    let factor = at.dropout.map(|at| x[at + 3]);
    let d_factor = at.dropout.map(|_| x[at.forward + 4]);
    let d_out = b.cast(d_out, parts.dtype)?;
    let row = Shape::from(&parts.shape[..3]);
    let statistic = |b: &mut Builder, index: usize| {
        let column = b.slice(stats, 3, index, index + 1)?;
        let column = b.reshape(column, row.clone())?;
        parts.rows(b, column)
    };
    let (largest, sum) = (statistic(b, 0)?, statistic(b, 1)?);
    let below = b.sub(parts.scores, largest)?;
    let exps = b.unary(UnaryOp::Exp, below)?;
    let probabilities = b.div(exps, sum)?;
    let d_kept = by_heads(b, d_out, parts.v, [3, 3])?;
    let d_probabilities = parts.dropped_probability(b, d_kept, d_factor)?;
    let products = b.mul(probabilities, d_probabilities)?;
    let delta = b.sum(products, &[3])?;
    let delta = parts.times(b, delta, inner)?;
    let delta = parts.rows(b, delta)?;
    let centred = b.add(d_probabilities, delta)?;
    let d_scores = b.mul(probabilities, centred)?;
    let mut d_scores = parts.times(b, d_scores, d_scale)?;
    if let (Some(d_factor), true) = (d_factor, dims.drop_scores) {
        d_scores = parts.dropped(b, d_scores, d_factor)?;
    }
    if let Some(hidden) = parts.hidden {
        d_scores = b.drop(hidden, d_scores)?;
    }
    let heads = b.shape(parts.k)[1];
    let kept = parts.dropped_probability(b, probabilities, factor)?;
    let dq = by_heads(b, d_scores, parts.k, [3, 2])?;
    let dk = to_key_heads(b, d_scores, parts.q, heads)?;
    let dv = to_key_heads(b, kept, d_out, heads)?;
    [dq, dk, dv]
        .into_iter()
        .map(|gradient| b.cast(gradient, parts.narrow))
        .collect()
}
