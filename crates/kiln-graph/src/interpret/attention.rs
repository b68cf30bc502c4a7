//! Attention and its gradient, one row of scores at a time.
//!
//! For query row `i` of a head, with `m` the mask and `r` the dropout mask (0 or `1 / keep`):
//!
//! ```text
//! s_j  = scale * q_i . k_j + m_ij         -inf where causal order forbids j
//! p_j  = exp(s_j - stats_i)               stats_i = max_j s_j + ln sum_j exp(s_j - max)
//! out  = sum_j p_j r_j v_j
//! ```
//!
//! and, with `g` the gradient of `out`, `D = g . out` (which is `sum_j p_j r_j (g . v_j)`):
//!
//! ```text
//! dv_j += p_j r_j g      ds_j = p_j (r_j (g . v_j) - D)
//! dq   += scale sum_j ds_j k_j      dk_j += scale ds_j q_i
//! ```

use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use super::array::{Array, Data};
use crate::op::{AttentionDims, RandomKind};
use crate::{DType, Shape, TensorType, philox};

/// The operands that forward and gradient share.
struct Operands<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    scale: f64,
    mask: Option<(&'a [f64], &'a [usize])>,
    /// The dropout mask, `[b, h, t, s]`.
    dropout: Option<Vec<f64>>,
    causal: bool,
    /// Batch, query heads, key heads, query length, key length, width of a query, width of a value.
    batch: usize,
    heads: usize,
    key_heads: usize,
    length: usize,
    key_length: usize,
    width: usize,
    value_width: usize,
}

impl<'a> Operands<'a> {
    fn new(x: &'a [Rc<Array>], dims: AttentionDims) -> Self {
        let (q, k, v) = (&x[0], &x[1], &x[2]);
        let [batch, heads, length, width] = [0, 1, 2, 3].map(|axis| q.ty.shape[axis]);
        let [key_heads, key_length, value_width] = [v.ty.shape[1], v.ty.shape[2], v.ty.shape[3]];
        let mask = dims.mask.then(|| (x[4].floats(), x[4].ty.shape.dims()));
        let dropout = dims.dropout.then(|| {
            let first = 4 + usize::from(dims.mask);
            let [seed, stream] = [0, 1].map(|offset| x[first + offset].ints()[0] as u64);
            let keep = x[first + 2].floats()[0];
            let shape = Shape::from([batch, heads, length, key_length]);
            let draws = philox::fill(RandomKind::Uniform, q.ty.dtype, &shape, seed, stream, (0, 0));
            draws
                .to_f64s()
                .into_iter()
                .map(|draw| if draw < keep { 1.0 / keep } else { 0.0 })
                .collect()
        });
        Self {
            q: q.floats(),
            k: k.floats(),
            v: v.floats(),
            scale: x[3].floats()[0],
            mask,
            dropout,
            causal: dims.causal,
            batch,
            heads,
            key_heads,
            length,
            key_length,
            width,
            value_width,
        }
    }

    /// Number of query rows; a row is numbered `(batch * heads + head) * length + position`.
    fn rows(&self) -> usize {
        self.batch * self.heads * self.length
    }

    /// The key and value row of key position `j` for query row `row`.
    fn key_row(&self, row: usize, j: usize) -> usize {
        let (plane, per_key_head) = (row / self.length, self.heads / self.key_heads);
        let (batch, head) = (plane / self.heads, plane % self.heads);
        (batch * self.key_heads + head / per_key_head) * self.key_length + j
    }

    fn query(&self, row: usize) -> &[f64] {
        &self.q[row * self.width..][..self.width]
    }

    fn key(&self, key_row: usize) -> &[f64] {
        &self.k[key_row * self.width..][..self.width]
    }

    fn value(&self, key_row: usize) -> &[f64] {
        &self.v[key_row * self.value_width..][..self.value_width]
    }

    /// The scores of a query row.
    fn scores(&self, row: usize) -> Vec<f64> {
        let i = row % self.length;
        let (batch, head) = (row / self.length / self.heads, row / self.length % self.heads);
        let score = |j: usize| {
            if self.causal && j + self.length > i + self.key_length {
                return f64::NEG_INFINITY;
            }
            let product = dot(self.query(row), self.key(self.key_row(row, j))) * self.scale;
            let Some((mask, extents)) = self.mask else {
                return product;
            };
            let position = [batch, head, i, j]
                .iter()
                .zip(extents)
                .fold(0, |at, (&index, &extent)| {
                    at * extent + if extent == 1 { 0 } else { index }
                });
            product + mask[position]
        };
        (0..self.key_length).map(score).collect()
    }

    /// The factor dropout puts on the probability of key position `j`.
    fn factor(&self, row: usize, j: usize) -> f64 {
        self.dropout
            .as_ref()
            .map_or(1.0, |mask| mask[row * self.key_length + j])
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut()
        .zip(from)
        .for_each(|(to, from)| *to += factor * from);
}

pub(super) fn attention(x: &[Rc<Array>], dims: AttentionDims) -> SmallVec<[Array; 1]> {
    let operands = Operands::new(x, dims);
    let mut out = vec![0.0; operands.rows() * operands.value_width];
    let mut stats = Vec::with_capacity(operands.rows());
    for row in 0..operands.rows() {
        let scores = operands.scores(row);
        let largest = scores
            .iter()
            .fold(f64::NEG_INFINITY, |a, &b| super::array::Number::max(a, b));
        let exps: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = exps.iter().sum();
        let result = &mut out[row * operands.value_width..][..operands.value_width];
        for (j, exp) in exps.iter().enumerate() {
            let probability = exp / sum * operands.factor(row, j);
            add_scaled(result, probability, operands.value(operands.key_row(row, j)));
        }
        stats.push(largest + sum.ln());
    }
    let shape = &x[0].ty.shape;
    let ty = TensorType {
        dtype: x[0].ty.dtype,
        shape: shape.with(3, operands.value_width),
    };
    let stats_ty = TensorType {
        dtype: DType::F32,
        shape: shape.without(&[3]),
    };
    smallvec![
        Array::new(ty, Data::Float(out)),
        Array::new(stats_ty, Data::Float(stats))
    ]
}

pub(super) fn attention_grad(x: &[Rc<Array>], dims: AttentionDims) -> SmallVec<[Array; 1]> {
    let operands = Operands::new(x, dims);
    let [out, stats, d_out] = [3, 2, 1].map(|back| x[x.len() - back].floats());
    let mut dq = vec![0.0; operands.q.len()];
    let mut dk = vec![0.0; operands.k.len()];
    let mut dv = vec![0.0; operands.v.len()];
    let (width, value_width) = (operands.width, operands.value_width);
    for row in 0..operands.rows() {
        let gradient = &d_out[row * value_width..][..value_width];
        let delta = dot(gradient, &out[row * value_width..][..value_width]);
        for (j, score) in operands.scores(row).into_iter().enumerate() {
            let key_row = operands.key_row(row, j);
            let probability = (score - stats[row]).exp();
            let factor = operands.factor(row, j);
            add_scaled(
                &mut dv[key_row * value_width..][..value_width],
                probability * factor,
                gradient,
            );
            let d_score =
                probability * (factor * dot(gradient, operands.value(key_row)) - delta) * operands.scale;
            add_scaled(&mut dq[row * width..][..width], d_score, operands.key(key_row));
            add_scaled(&mut dk[key_row * width..][..width], d_score, operands.query(row));
        }
    }
    let array = |of: usize, data| Array::new(x[of].ty.clone(), Data::Float(data));
    smallvec![array(0, dq), array(1, dk), array(2, dv)]
}
