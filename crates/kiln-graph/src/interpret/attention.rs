//! Attention and its gradient, one row of scores at a time.
//!
//! For query row `i` of a head, with `m` the mask and `r` the dropout mask (0 or `factor`):
//!
//! ```text
//! s_j  = scale * q_i . k_j + m_ij         fill where j is hidden (+ m_ij, if the mask comes last), -inf where causal order forbids j
//! p_j  = exp(s_j - max_j s_j) / sum_j exp(s_j - max_j s_j)         0 where all are -inf, if safe
//! out  = sum_j p_j r_j v_j
//! ```
//!
//! and, with `g` the gradient of `out`, `r'` the dropout mask with `d factor`, and
//! `D = sum_j p_j r'_j (g . v_j)`:
//!
//! ```text
//! dv_j += p_j r_j g      ds_j = p_j (r'_j (g . v_j) + inner D)      0 where j is hidden
//! dq   += d_scale sum_j ds_j k_j      dk_j += d_scale ds_j q_i
//! ```
//!
//! Where dropout is of scores, `r` multiplies `scale` instead, and `r'` multiplies `d_scale`.

use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use super::array::{Array, Data};
use crate::op::{AttentionDims, RandomKind};
use crate::{Shape, TensorType, philox};

/// The operands that forward and gradient share.
struct Operands<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    scale: f64,
    mask: Option<(&'a [f64], &'a [usize])>,
    hidden: Option<(&'a [i128], &'a [usize])>,
    fill: f64,
    /// Which probabilities dropout keeps, `[b, h, t, s]`.
    dropout: Option<Vec<bool>>,
    factor: f64,
    dims: AttentionDims,
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
        let at = dims.operands();
        let mask = at.mask.map(|at| (x[at].floats(), x[at].ty.shape.dims()));
        let hidden = at.hidden.map(|at| (x[at].ints(), x[at].ty.shape.dims()));
        let dropout = at.dropout.map(|at| {
            let [seed, stream] = [0, 1].map(|offset| x[at + offset].ints()[0] as u64);
            let keep = x[at + 2].floats()[0];
            let shape = Shape::from([batch, heads, length, key_length]);
            let draws = philox::fill(
                RandomKind::Uniform,
                q.ty.dtype.compute(),
                &shape,
                seed,
                stream,
                (0, 0),
            );
            draws.to_f64s().into_iter().map(|draw| draw < keep).collect()
        });
        Self {
            q: q.floats(),
            k: k.floats(),
            v: v.floats(),
            scale: x[3].floats()[0],
            mask,
            hidden,
            fill: at.hidden.map_or(0.0, |at| x[at + 1].floats()[0]),
            dropout,
            factor: at.dropout.map_or(1.0, |at| x[at + 3].floats()[0]),
            dims,
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

    /// The position of a mask's element for query row `row` and key position `j`; `extents` are the mask's.
    fn position(&self, row: usize, j: usize, extents: &[usize]) -> usize {
        let plane = row / self.length;
        let place = [plane / self.heads, plane % self.heads, row % self.length, j];
        place.iter().zip(extents).fold(0, |at, (&index, &extent)| {
            at * extent + if extent == 1 { 0 } else { index }
        })
    }

    /// Whether the score is `fill` whatever query and key are.
    fn is_hidden(&self, row: usize, j: usize) -> bool {
        self.hidden
            .is_some_and(|(hidden, extents)| hidden[self.position(row, j, extents)] != 0)
    }

    /// The scores of a query row.
    fn scores(&self, row: usize) -> Vec<f64> {
        let i = row % self.length;
        let score = |j: usize| {
            if self.dims.causal && j + self.length > i + self.key_length {
                return f64::NEG_INFINITY;
            }
            let mask = self
                .mask
                .map_or(0.0, |(mask, extents)| mask[self.position(row, j, extents)]);
            if self.is_hidden(row, j) {
                return self.fill + if self.dims.mask_last { mask } else { 0.0 };
            }
            let product = dot(self.query(row), self.key(self.key_row(row, j))) * self.scale;
            product * self.dropped_score(row, j, self.factor) + mask
        };
        (0..self.key_length).map(score).collect()
    }

    /// What dropout of probabilities multiplies the probability at key position `j` by: `factor`, or 0.
    fn dropped(&self, row: usize, j: usize, factor: f64) -> f64 {
        if self.dims.drop_scores {
            1.0
        } else {
            self.kept(row, j, factor)
        }
    }

    /// What dropout of scores multiplies the score at key position `j` by: `factor`, or 0.
    fn dropped_score(&self, row: usize, j: usize, factor: f64) -> f64 {
        if self.dims.drop_scores {
            self.kept(row, j, factor)
        } else {
            1.0
        }
    }

    fn kept(&self, row: usize, j: usize, factor: f64) -> f64 {
        match &self.dropout {
            Some(kept) if !kept[row * self.key_length + j] => 0.0,
            Some(_) => factor,
            None => 1.0,
        }
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
    let mut stats = Vec::with_capacity(2 * operands.rows());
    for row in 0..operands.rows() {
        let scores = operands.scores(row);
        let mut largest = scores
            .iter()
            .fold(f64::NEG_INFINITY, |a, &b| super::array::Number::max(a, b));
        let nothing = dims.safe && largest == f64::NEG_INFINITY;
        if nothing {
            largest = 0.0;
        }
        let exps: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum = if nothing { 1.0 } else { exps.iter().sum::<f64>() };
        let result = &mut out[row * operands.value_width..][..operands.value_width];
        for (j, exp) in exps.iter().enumerate() {
            let probability = exp / sum * operands.dropped(row, j, operands.factor);
            add_scaled(result, probability, operands.value(operands.key_row(row, j)));
        }
        stats.extend([largest, sum]);
    }
    let shape = &x[0].ty.shape;
    let ty = TensorType {
        dtype: x[0].ty.dtype,
        shape: shape.with(3, operands.value_width),
    };
    let stats_ty = TensorType {
        dtype: x[0].ty.dtype.compute(),
        shape: shape.with(3, 2),
    };
    smallvec![
        Array::new(ty, Data::Float(out)),
        Array::new(stats_ty, Data::Float(stats))
    ]
}

pub(super) fn attention_grad(x: &[Rc<Array>], dims: AttentionDims) -> SmallVec<[Array; 1]> {
    let operands = Operands::new(x, dims);
    let at = dims.operands();
    let [stats, d_out] = [0, 1].map(|offset| x[at.forward + offset].floats());
    let [d_scale, inner] = [2, 3].map(|offset| x[at.forward + offset].floats()[0]);
    let d_factor = if dims.dropout {
        x[at.forward + 4].floats()[0]
    } else {
        1.0
    };
    let mut dq = vec![0.0; operands.q.len()];
    let mut dk = vec![0.0; operands.k.len()];
    let mut dv = vec![0.0; operands.v.len()];
    let (width, value_width) = (operands.width, operands.value_width);
    for row in 0..operands.rows() {
        let gradient = &d_out[row * value_width..][..value_width];
        let (largest, sum) = (stats[2 * row], stats[2 * row + 1]);
        let scores = operands.scores(row);
        let probability = |j: usize| (scores[j] - largest).exp() / sum;
        let d_probability = |j: usize| {
            operands.dropped(row, j, d_factor) * dot(gradient, operands.value(operands.key_row(row, j)))
        };
        let delta: f64 = (0..scores.len()).map(|j| probability(j) * d_probability(j)).sum();
        for j in 0..scores.len() {
            let key_row = operands.key_row(row, j);
            let kept = probability(j) * operands.dropped(row, j, operands.factor);
            add_scaled(&mut dv[key_row * value_width..][..value_width], kept, gradient);
            if operands.is_hidden(row, j) {
                continue;
            }
            let d_score = probability(j) * (d_probability(j) + inner * delta);
            let d_score = d_score * d_scale * operands.dropped_score(row, j, d_factor);
            add_scaled(&mut dq[row * width..][..width], d_score, operands.key(key_row));
            add_scaled(&mut dk[key_row * width..][..width], d_score, operands.query(row));
        }
    }
    let array = |of: usize, data| Array::new(x[of].ty.clone(), Data::Float(data));
    smallvec![array(0, dq), array(1, dk), array(2, dv)]
}
