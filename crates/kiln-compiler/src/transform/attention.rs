//! Attention: `softmax(q k^T * scale, masked) v` and its gradient become [`Op::Attention`] and [`Op::AttentionGrad`].
//!
//! The score matrix is by far the largest value of the composition, and every step of it passes over the matrix; the operations keep it
//! in cache. What is matched, from the product with the values backwards, is the table below: each line is one form that programs
//! write. The gradient is found by the products it must have: with the values (`dp`), with the weights (`dv`), with keys and queries
//! (`dq`, `dk`). Between `dp` and those must be the gradient of the same masks, softmax and dropout.
//!
//! Heads of keys and values that several heads of queries share arrive repeated; the repetition and the sum of its gradients are left
//! out.
//!
//! In types of 16 bits programs do the softmax, masks or scale in that type or in f32, with casts before and after. The operations compute in f32
//! either way: what they leave out are roundings of scores and weights.
//!
//! A composition is replaced only if nothing of its size is left: where a program also uses the weights, it stays.

use rustc_hash::FxHashSet;

use kiln_graph::op::{AttentionDims, Op};
use kiln_graph::{DType, Graph, TypeError, Value};

use super::attention_build::replace;
use super::pattern::{Bindings, Pattern, behind_casts};
use super::view::{Matmul, View, matmul};

/// Weights that multiply the values: a softmax, maybe with dropout.
const WEIGHTS: &[&str] = &[
    "(wide (mul (mul ?p (= ?kept (cast (lt (= ?draws (uniform ?seed ?stream)) (splat ?keep))))) (splat ?factor)))",
    "?p",
];
/// A softmax of scores.
const SOFTMAX: &str = "(wide (div (= ?e (exp (sub ?scores (row (max ?scores))))) (row (= ?sum (sum ?e)))))";
/// Masked scores.
const MASKED: &[&str] = &[
    "(wide (select ?hidden (splat ?fill) ?s))",
    "(wide (add ?s ?mask))",
    "(wide (add ?mask ?s))",
    "?s",
];
/// Scaled products of queries and keys.
const SCALED: &[&str] = &[
    "(wide (mul ?qk (splat ?scale)))",
    "(wide (div ?qk (splat ?divisor)))",
    "?qk",
];

/// The gradient of scores before masks, from `?d_masked`.
const D_SCALED: &[&str] = &[
    "(wide (mul ?d_s (splat ?d_scale)))",
    "(wide (div ?d_s (splat ?d_divisor)))",
    "?d_s",
];
/// The gradient of masks.
const D_HIDDEN: &str = "(wide (select ?hidden (splat ?zero) ?d_softmax))";
/// The gradient of a softmax, from the gradient of its result.
const D_SOFTMAX: &str = "(wide (mul (add (row (sum (mul ?dp (div (mul ?e (splat ?inner)) (row (mul ?sum ?sum)))))) (mul ?dp (row (recip ?sum)))) ?e))";
/// The gradient of dropout.
const D_WEIGHTS: &[&str] = &[
    "(wide (mul (mul ?d_kept (splat ?d_factor)) ?kept))",
    "(wide (mul (mul ?d_kept ?kept) (splat ?d_factor)))",
];

/// Replaces attentions in `graph`.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn attention(graph: &Graph) -> Result<Graph, TypeError> {
    let products: Vec<Matmul> = graph
        .nodes()
        .filter_map(|(node, _)| matmul(graph, node))
        .collect();
    let mut found: Vec<Match> = products
        .iter()
        .filter_map(|product| forward(graph, product))
        .collect();
    for one in &mut found {
        one.gradient = gradient(graph, one, &products);
    }
    keep_closed(graph, &mut found);
    if found.is_empty() {
        return Ok(graph.clone());
    }
    replace(graph, &found)
}

/// A number: a value of rank 0, or what one is divided by.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    One,
    Value(Value),
    Inverse(Value),
}

impl Number {
    fn of(bindings: &Bindings, factor: &str, divisor: &str) -> Self {
        match (bindings.get(factor), bindings.get(divisor)) {
            (Some(value), _) => Number::Value(value),
            (None, Some(value)) => Number::Inverse(value),
            (None, None) => Number::One,
        }
    }

    fn value(self) -> Option<Value> {
        match self {
            Number::One => None,
            Number::Value(value) | Number::Inverse(value) => Some(value),
        }
    }
}

/// A composition that was recognised.
#[derive(Debug)]
pub(super) struct Match {
    /// The product with the values.
    pub out: Value,
    /// `[b, h, t, d]`.
    pub query: View,
    /// `[b, h, s, d]`.
    pub key: View,
    /// `[b, h, s, e]`.
    pub value: View,
    /// The product of queries and keys.
    pub scores: Value,
    /// What multiplies the values.
    pub weights: Value,
    /// Factor of the scores.
    pub scale: Number,
    /// Masks and dropout.
    pub bindings: Bindings,
    pub dims: AttentionDims,
    pub gradient: Option<Gradient>,
}

/// The gradient of a composition.
#[derive(Debug)]
pub(super) struct Gradient {
    pub d_out: View,
    pub d_scale: Number,
    pub inner: Value,
    pub d_factor: Option<Value>,
    /// What the results stand for, and in which order of dimensions.
    pub d_query: (Value, bool),
    pub d_key: (Value, bool),
    pub d_value: (Value, bool),
}

fn first(graph: &Graph, patterns: &[&'static str], value: Value, known: &Bindings) -> Option<Bindings> {
    patterns
        .iter()
        .find_map(|text| Pattern::parse(text).matches(graph, value, known))
}

/// The attention whose product with the values is `product`.
fn forward(graph: &Graph, product: &Matmul) -> Option<Match> {
    let dtype = graph.dtype(product.out);
    if graph.ty(product.out).numel() == 0 {
        return None;
    }
    let straight = |view: &View| view.order.iter().copied().eq(0..4).then_some(view.base);
    let weights = straight(&product.left)?;
    // Without dropout last: its pattern accepts everything.
    WEIGHTS.iter().find_map(|text| {
        let bindings = Pattern::parse(text).matches(graph, weights, &Bindings::default())?;
        let bindings = Pattern::parse(SOFTMAX).matches(graph, bindings.of("?p"), &bindings)?;
        MASKED.iter().find_map(|text| {
            let bindings = Pattern::parse(text).matches(graph, bindings.of("?scores"), &bindings)?;
            SCALED.iter().find_map(|text| {
                let bindings = Pattern::parse(text).matches(graph, bindings.of("?s"), &bindings)?;
                let scores = matmul(graph, graph.value(behind_casts(graph, bindings.of("?qk"))).node)?;
                let dropout = bindings.get("?kept").is_some();
                if dropout && graph.dtype(bindings.of("?draws")) != dtype.compute() {
                    return None;
                }
                (graph.dtype(scores.out) == dtype && fit(graph, &bindings, dtype)).then_some(())?;
                Some(Match {
                    out: product.out,
                    query: scores.left.clone(),
                    key: scores.right.transposed(),
                    value: product.right.clone(),
                    scores: scores.out,
                    weights,
                    scale: Number::of(&bindings, "?scale", "?divisor"),
                    dims: AttentionDims {
                        causal: false,
                        mask: bindings.get("?mask").is_some(),
                        hidden: bindings.get("?hidden").is_some(),
                        dropout,
                    },
                    bindings,
                    gradient: None,
                })
            })
        })
    })
}

/// Whether numbers and masks are of types that an attention of `dtype` takes.
fn fit(graph: &Graph, bindings: &Bindings, dtype: DType) -> bool {
    let names = [
        "?scale",
        "?divisor",
        "?mask",
        "?fill",
        "?keep",
        "?factor",
        "?d_scale",
        "?d_divisor",
        "?d_factor",
        "?inner",
    ];
    names.iter().filter_map(|name| bindings.get(name)).all(|value| {
        let own = graph.dtype(value);
        own == dtype || own == dtype.compute()
    })
}

/// The gradient of `one`, if the graph has all of it.
fn gradient(graph: &Graph, one: &Match, products: &[Matmul]) -> Option<Gradient> {
    let weights = View::of(graph, one.weights);
    // dv = weights^T d_out
    let (d_out, d_value) = products.iter().find_map(|product| {
        if product.left == weights.transposed() {
            Some((product.right.clone(), (product.out, false)))
        } else if product.right == weights {
            Some((product.left.transposed(), (product.out, true)))
        } else {
            None
        }
    })?;
    // dp = d_out v^T
    let d_weights = products
        .iter()
        .find(|product| product.left == d_out && product.right == one.value.transposed())?
        .out;
    // dq = ds k
    products
        .iter()
        .filter(|product| product.right == one.key)
        .find_map(|product| {
            let d_scores = product
                .left
                .order
                .iter()
                .copied()
                .eq(0..4)
                .then_some(product.left.base)?;
            let bindings = d_scores_of(graph, one, d_scores, d_weights)?;
            let view = View::of(graph, d_scores);
            // dk = ds^T q, or its transpose q^T ds
            let d_key = products.iter().find_map(|product| {
                if product.left == one.query.transposed() && product.right == view {
                    Some((product.out, true))
                } else if product.left == view.transposed() && product.right == one.query {
                    Some((product.out, false))
                } else {
                    None
                }
            })?;
            Some(Gradient {
                d_out: d_out.clone(),
                d_scale: Number::of(&bindings, "?d_scale", "?d_divisor"),
                inner: bindings.of("?inner"),
                d_factor: bindings.get("?d_factor"),
                d_query: (product.out, false),
                d_key,
                d_value,
            })
        })
}

/// Matches the gradient of the scores against that of scale, masks, softmax and dropout of `one`.
fn d_scores_of(graph: &Graph, one: &Match, d_scores: Value, d_weights: Value) -> Option<Bindings> {
    D_SCALED
        .iter()
        .find_map(|text| {
            let mut known = Pattern::parse(text).matches(graph, d_scores, &one.bindings)?;
            let mut d_masked = known.of("?d_s");
            if one.dims.hidden {
                known = Pattern::parse(D_HIDDEN).matches(graph, d_masked, &known)?;
                is_zero(graph, known.of("?zero")).then_some(())?;
                d_masked = known.of("?d_softmax");
            }
            let known = Pattern::parse(D_SOFTMAX).matches(graph, d_masked, &known)?;
            if !one.dims.dropout {
                return (behind_casts(graph, known.of("?dp")) == d_weights).then_some(known);
            }
            let known = first(graph, D_WEIGHTS, known.of("?dp"), &known)?;
            (behind_casts(graph, known.of("?d_kept")) == d_weights).then_some(known)
        })
        .filter(|known| fit(graph, known, graph.dtype(one.out)))
}

fn is_zero(graph: &Graph, value: Value) -> bool {
    matches!(&graph.def(value).op, Op::Constant { value, .. } if value.to_f64() == 0.0)
}

/// Keeps the matches whose scores nothing else needs.
fn keep_closed(graph: &Graph, found: &mut Vec<Match>) {
    loop {
        let mut stand_ins: FxHashSet<Value> = FxHashSet::default();
        for one in found.iter() {
            stand_ins.insert(one.out);
            if let Some(gradient) = &one.gradient {
                stand_ins.extend([gradient.d_query.0, gradient.d_key.0, gradient.d_value.0]);
            }
        }
        let mut live: FxHashSet<Value> = FxHashSet::default();
        let mut needed: Vec<Value> = graph.outputs.iter().map(|output| output.value).collect();
        for one in found.iter() {
            needed.extend(operands(one));
        }
        while let Some(value) = needed.pop() {
            if !live.insert(value) || stand_ins.contains(&value) {
                continue;
            }
            needed.extend(graph.def(value).inputs.iter().copied());
        }
        let before = found.len();
        found.retain(|one| !live.contains(&one.scores) && !live.contains(&one.weights));
        if found.len() == before {
            return;
        }
    }
}

/// The old values that the operations for `one` read.
fn operands(one: &Match) -> Vec<Value> {
    let mut list = vec![one.query.base, one.key.base, one.value.base];
    list.extend(one.scale.value());
    for name in [
        "?mask", "?hidden", "?fill", "?seed", "?stream", "?keep", "?factor",
    ] {
        list.extend(one.bindings.get(name));
    }
    if let Some(gradient) = &one.gradient {
        list.extend([gradient.d_out.base, gradient.inner]);
        list.extend(gradient.d_scale.value());
        list.extend(gradient.d_factor);
    }
    list
}
