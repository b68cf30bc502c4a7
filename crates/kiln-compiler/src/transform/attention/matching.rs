//! Finds attention: the forms that programs write, as layers of text patterns, and their gradients.
//!
//! Each table below lists the forms of one layer, so a form more is a line more. A form that is a name alone
//! is a layer that a program may leave out.

use rustc_hash::FxHashSet;

use kiln_graph::op::AttentionDims;
use kiln_graph::{DType, Graph, Value};

use crate::transform::pattern::{Bindings, Pattern, behind_casts};
use crate::transform::view::{Matmul, View, matmul};

/// The forms of a value after dropout.
macro_rules! dropout {
    ($x:literal) => {
        concat!(
            "(wide (mul (mul ",
            $x,
            " (= ?kept (cast (lt (= ?draws (uniform ?seed ?stream)) (splat ?keep))))) (splat ?factor)))"
        )
    };
}

/// The forms of its gradient.
macro_rules! d_dropout {
    ($x:literal) => {
        &[
            concat!("(wide (mul (mul ", $x, " (splat ?d_factor)) ?kept))"),
            concat!("(wide (mul (mul ", $x, " ?kept) (splat ?d_factor)))"),
        ]
    };
}

/// Layers of the composition, from `?weights` inwards to `?qk`: what is matched, and the forms it has. A form
/// that is a name alone is a layer that a program may leave out.
const FORWARD: &[(&str, &[&str])] = &[
    ("?weights", &[dropout!("?p"), "?p"]),
    ("?p", &[SOFTMAX, SAFE_SOFTMAX]),
    (
        "?scores",
        &[
            "(wide (add (wide (select ?also (splat ?fill) (wide (select ?hidden (splat ?fill) ?s)))) ?bias))",
            "(wide (add (wide (select ?hidden (splat ?fill) ?s)) ?bias))",
            "(wide (select ?also (splat ?fill) (wide (select ?hidden (splat ?fill) ?s))))",
            "(wide (select ?hidden (splat ?fill) (wide (add ?s ?mask))))",
            "(wide (select ?hidden (splat ?fill) (wide (add ?mask ?s))))",
            "(wide (select ?hidden (splat ?fill) ?s))",
            "(wide (add ?s ?mask))",
            "(wide (add ?mask ?s))",
            "?s",
        ],
    ),
    ("?s", &[dropout!("?t"), "?t"]),
    (
        "?t",
        &[
            "(wide (mul ?qk (splat ?scale)))",
            "(wide (div ?qk (splat ?divisor)))",
            "?qk",
        ],
    ),
];
/// A softmax of scores.
const SOFTMAX: &str = "(wide (div (= ?e (exp (sub ?scores (row (max ?scores))))) (row (= ?sum (sum ?e)))))";
/// The softmax that gives zeros where every score is -inf.
const SAFE_SOFTMAX: &str = "(wide (div (= ?e (exp (sub ?scores (row (select (= ?nothing (lt (max ?scores) (splat ?lowest))) (splat ?lowest) (max ?scores)))))) \
     (row (= ?sum (select (= ?empty (lt (= ?total (sum ?e)) (splat ?least))) (splat ?least) ?total)))))";

/// The gradient of the scale, from `?d_scores`.
const D_SCALED: &[&str] = &[
    "(wide (mul ?d_t (splat ?d_scale)))",
    "(wide (div ?d_t (splat ?d_divisor)))",
    "?d_t",
];
/// The gradient of dropout of scores, from `?d_t`.
const D_SCORES: &[&str] = d_dropout!("?d_s");
/// The gradient of masks: of none, of one, of two.
const D_MASKED: [&[&str]; 3] = [
    &["?d_masked"],
    &["(wide (select ?hidden (splat ?zero) ?d_masked))"],
    &["(wide (select ?hidden (splat ?zero) (wide (select ?also (splat ?zero) ?d_masked))))"],
];
/// The gradient of a softmax, from the gradient of its result.
const D_SOFTMAX: &str = "(wide (mul (add (row (sum (mul ?dp (div (mul ?e (splat ?inner)) (row (mul ?sum ?sum)))))) (mul ?dp (row (recip ?sum)))) ?e))";
/// The gradient of the safe softmax. Programs also pass a gradient to the largest score: the sum of all the
/// others' gradients, which is zero.
const D_SAFE_SOFTMAX: &str = "(wide (add (select (eq (iota) (row (argmax ?scores))) (row (select ?nothing (splat ?zero) (sum (mul ?direct (splat ?minus))))) (splat ?zero)) \
     (= ?direct (mul (add (row (select ?empty (splat ?zero) (sum (mul ?dp (div (mul ?e (splat ?inner)) (row (mul ?sum ?sum))))))) (mul ?dp (row (recip ?sum)))) ?e))))";
/// The gradient of dropout of weights.
const D_WEIGHTS: &[&str] = d_dropout!("?d_weights");

/// The attentions of `graph` that can be replaced, each with its gradient if that was found.
pub(super) fn find(graph: &Graph) -> Vec<Match> {
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
    found
}

/// A number: a value of rank 0, or its reciprocal.
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
    /// The weights, which multiply the values.
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
    /// The values that the results replace, and whether they are transposed.
    pub d_query: (Value, bool),
    pub d_key: (Value, bool),
    pub d_value: (Value, bool),
}

/// All the ways in which layers of patterns match, the first layer first. Layers start from a name.
fn through(graph: &Graph, layers: &[(&str, &[&'static str])], start: Bindings) -> Vec<Bindings> {
    layers.iter().fold(vec![start], |ways, (from, forms)| {
        let next = |known: &Bindings| {
            let forms = forms.iter().map(|text| Pattern::parse(text));
            let found = forms.filter_map(|form| form.matches(graph, known.of(from), known));
            found.collect::<Vec<_>>()
        };
        ways.iter().flat_map(next).collect()
    })
}

/// The attention whose product with the values is `product`.
fn forward(graph: &Graph, product: &Matmul) -> Option<Match> {
    if graph.ty(product.out).numel() == 0 {
        return None;
    }
    let straight = |view: &View| view.order.iter().copied().eq(0..4).then_some(view.base);
    let weights = straight(&product.left)?;
    let start = Bindings::default().with("?weights", weights);
    let ways = through(graph, FORWARD, start);
    ways.into_iter()
        .find_map(|bindings| complete(graph, product, bindings))
}

/// The attention that the layers in `bindings` make, if they are about products and of types that go
/// together.
fn complete(graph: &Graph, product: &Matmul, bindings: Bindings) -> Option<Match> {
    let dtype = graph.dtype(product.out);
    let scores = matmul(graph, graph.value(behind_casts(graph, bindings.of("?qk"))).node)?;
    let has = |name: &str| bindings.get(name).is_some();
    let dims = AttentionDims {
        causal: false,
        mask: has("?mask") || has("?bias"),
        hidden: has("?hidden"),
        mask_last: has("?bias"),
        dropout: has("?kept"),
        drop_scores: bindings.of("?t") != bindings.of("?s"),
        safe: has("?nothing"),
    };
    // Autocast leaves both products as they are, or neither.
    let full_precision = |value: Value| graph.def(value).provenance.full_precision;
    let fits = graph.dtype(scores.out) == dtype
        && graph.ty(scores.out).numel() > 0
        && graph.ty(scores.left.base).numel() > 0
        && full_precision(scores.out) == full_precision(product.out)
        && fit(graph, &bindings, dtype)
        && (!dims.dropout || graph.dtype(bindings.of("?draws")) == dtype.compute())
        // There is one dropout: dropping weights and scores by the same draws is another computation.
        && (!dims.drop_scores || bindings.of("?weights") == bindings.of("?p"))
        && (!dims.safe || guards_nothing_else(graph, &bindings));
    fits.then(|| Match {
        out: product.out,
        query: scores.left.clone(),
        key: scores.right.transposed(),
        value: product.right.clone(),
        scores: scores.out,
        weights: bindings.of("?weights"),
        scale: Number::of(&bindings, "?scale", "?divisor"),
        dims,
        bindings,
        gradient: None,
    })
}

/// Whether the bounds of a safe softmax only change rows whose scores are all -inf: the largest score of
/// any other row is at least the least number, and the sum of its exponentials at least 1.
fn guards_nothing_else(graph: &Graph, bindings: &Bindings) -> bool {
    let lowest = bindings.of("?lowest");
    let Some(largest) = graph.dtype(lowest).largest() else {
        return false;
    };
    let number = |value| graph.constant(value).map(|number| number.to_f64());
    number(lowest).is_some_and(|value| value <= -largest)
        && number(bindings.of("?least")).is_some_and(|value| value > 0.0 && value <= 1.0)
}

/// Whether numbers and masks are of types that an attention of `dtype` takes.
fn fit(graph: &Graph, bindings: &Bindings, dtype: DType) -> bool {
    let names = [
        "?scale",
        "?divisor",
        "?mask",
        "?bias",
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
    let has = |name: &str| usize::from(one.bindings.get(name).is_some());
    let layers: [(&str, &[&str]); 5] = [
        ("?d_scores", D_SCALED),
        ("?d_t", if one.dims.drop_scores { D_SCORES } else { &["?d_s"] }),
        ("?d_s", D_MASKED[has("?hidden") + has("?also")]),
        (
            "?d_masked",
            if one.dims.safe {
                &[D_SAFE_SOFTMAX]
            } else {
                &[D_SOFTMAX]
            },
        ),
        (
            "?dp",
            if one.dims.dropout && !one.dims.drop_scores {
                D_WEIGHTS
            } else {
                &["?d_weights"]
            },
        ),
    ];
    let start = one.bindings.clone().with("?d_scores", d_scores);
    let dtype = graph.dtype(one.out);
    through(graph, &layers, start).into_iter().find(|known| {
        let number = |value| graph.constant(value).map(|number| number.to_f64());
        let constant = |name: &str, value: f64| known.get(name).is_none_or(|of| number(of) == Some(value));
        behind_casts(graph, known.of("?d_weights")) == d_weights
            && fit(graph, known, dtype)
            && constant("?zero", 0.0)
            && (!one.dims.safe || constant("?minus", -1.0) && constant("?inner", -1.0))
    })
}

/// The constant that `value` is.
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
        "?mask", "?bias", "?hidden", "?also", "?fill", "?seed", "?stream", "?keep", "?factor",
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
