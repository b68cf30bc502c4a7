//! Functions on one row of a strip: scores to weights, and gradients of weights to gradients of scores.
//!
//! A NaN among the scores makes the sum NaN, and thereby every weight of the row; so does a row in which
//! all scores are -inf. Therefore a plain comparison, which ignores NaN, is enough to find the largest
//! score.

use std::collections::BTreeSet;

use super::AttentionSpec;
use super::plan::AttentionPlan;
use crate::kernels::Helper;
use crate::kernels::element::Element;

/// The C names of numbers and vectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words {
    real: &'static str,
    vf: &'static str,
    vi: &'static str,
    int: &'static str,
    /// The end of the names of functions.
    suffix: &'static str,
    lanes: usize,
}

impl Words {
    pub fn of(plan: &AttentionPlan) -> Self {
        let element = plan.element;
        Self {
            real: element.ctype(),
            vf: element.vector(),
            vi: element.integers(),
            int: element.integer(),
            suffix: match element {
                Element::F32 => "",
                Element::F64 => "_f64",
            },
            lanes: plan.lanes,
        }
    }
}

/// The operations on the scores of a row before the exponential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Masks {
    /// A bias for each key is added.
    pub bias: bool,
    /// Some keys are hidden.
    pub hide: bool,
    /// The bias is added after hiding, to the fill too.
    pub bias_last: bool,
}

impl Masks {
    fn suffix(self) -> &'static str {
        match (self.bias, self.hide) {
            (false, false) => "",
            (true, false) => "_biased",
            (false, true) => "_hidden",
            (true, true) if self.bias_last => "_hidden_biased",
            (true, true) => "_biased_hidden",
        }
    }

    fn params(self, words: Words) -> String {
        let Words { real, int, .. } = words;
        let bias = format!("const {real} *bias, ");
        let hide = format!("const {int} *hide, {real} fill, ");
        self.among(&bias, &hide)
    }

    /// The texts of the masks that occur, in their order.
    fn among(self, bias: &str, hide: &str) -> String {
        let bias = if self.bias { bias } else { "" };
        let hide = if self.hide { hide } else { "" };
        if self.bias_last {
            format!("{hide}{bias}")
        } else {
            format!("{bias}{hide}")
        }
    }

    /// Arguments of the functions here.
    pub fn arguments(self) -> String {
        self.among("bias, ", "hide, fill, ")
    }

    /// Statements on `v`, the scores at `j`.
    fn apply(self, words: Words) -> String {
        let Words { vf, vi, .. } = words;
        let bias = format!(" v += {vf}_load(bias + j);");
        let hide = format!(" v = {vf}_select({vi}_load(hide + j), {vf}_set1(fill), v);");
        self.among(&bias, &hide)
    }
}

/// Adds the function `name` to `helpers`; gives its name.
fn define(helpers: &mut BTreeSet<Helper>, name: String, head: &str, body: &str, comment: &str) -> String {
    helpers.insert(Helper {
        name: name.clone(),
        prototype: format!("{head};"),
        definition: format!("/* {comment} */\n{head} {{\n{body}}}\n"),
    });
    name
}

/// `name(x, n, end, .., stats)`: scores become `exp(score - largest)`, and zero from `n` to `end`. `stats`
/// gets the largest score and the sum; a `safe` function gives 0 and 1 where all scores are -inf. A
/// `scaled` function has a parameter `scale` before `stats`, and multiplies the scores by it first.
pub(super) fn weights(
    masks: Masks,
    safe: bool,
    scaled: bool,
    words: Words,
    helpers: &mut BTreeSet<Helper>,
) -> String {
    let Words {
        real,
        vf,
        vi,
        int,
        suffix,
        lanes,
    } = words;
    let name = format!(
        "kiln_attention_weights{}{}{}{suffix}",
        masks.suffix(),
        if safe { "_safe" } else { "" },
        if scaled { "_scaled" } else { "" },
    );
    let (parameter, times) = match scaled {
        true => (format!("{real} scale, "), " * scale"),
        false => (String::new(), ""),
    };
    let head = format!(
        "void {name}({real} *x, int64_t n, int64_t end, {}{parameter}{real} *stats)",
        masks.params(words)
    );
    let store = if masks.bias || masks.hide || scaled {
        format!(" {vf}_store(x + j, v);")
    } else {
        String::new()
    };
    let (most, total) = if safe {
        (
            format!(
                "const {real} found = {vf}_largest(largest), most = found > -KILN_INF ? found : 0.0f;\n    "
            ),
            format!("const {real} total = {vf}_sum(sum);\n    stats[1] = total == 0.0f ? 1.0f : total;\n"),
        )
    } else {
        (
            format!("const {real} most = {vf}_largest(largest);\n    "),
            format!("stats[1] = {vf}_sum(sum);\n"),
        )
    };
    let body = format!(
        "    {vf} largest = {vf}_set1(-KILN_INF), sum = {{0}};\n    int64_t j = 0;\n    for (; j + {lanes} <= n; j += {lanes}) {{\n        {vf} v = {vf}_load(x + \
         j){times};{apply}{store}\n        largest = {vf}_larger(v, largest);\n    }}\n    if (j < n) {{\n        {vf} v = {vf}_load(x + j){times};{apply}\n        v = \
         {vf}_select({vi}_iota() < ({int})(n - j), v, {vf}_set1(-KILN_INF));\n        {vf}_store(x + j, v);\n        largest = {vf}_larger(v, largest);\n    \
         }}\n    {most}for (j = 0; j + {lanes} <= n; j += {lanes}) {{\n        {vf} v = {vf}_exp_down({vf}_load(x + j) - \
         most);\n        {vf}_store(x + j, v);\n        sum += v;\n    }}\n    if (j < n) {{\n        {vf} v = {vf}_exp_down({vf}_load(x + j) - most);\n        v = \
         {vf}_select({vi}_iota() < ({int})(n - j), v, ({vf}){{0}});\n        {vf}_store(x + j, v);\n        sum += v;\n        j += {lanes};\n    }}\n    for (; j < \
         end; j += {lanes}) {vf}_store(x + j, ({vf}){{0}});\n    stats[0] = most;\n    {total}",
        apply = masks.apply(words),
    );
    define(
        helpers,
        name,
        &head,
        &body,
        "Scores of a row become exp(score - largest), zero from n to end.",
    )
}

/// `name(x, d, n, scale, .., stats)`: products of a query with keys become probabilities; returns their
/// inner product with their gradients `d`.
pub(super) fn probabilities(masks: Masks, words: Words, helpers: &mut BTreeSet<Helper>) -> String {
    let Words {
        real,
        vf,
        vi,
        int,
        suffix,
        lanes,
    } = words;
    let name = format!("kiln_attention_probabilities{}{suffix}", masks.suffix());
    let head = format!(
        "{real} {name}({real} *x, const {real} *d, int64_t n, {real} scale, {}const {real} *stats)",
        masks.params(words)
    );
    let apply = masks.apply(words);
    let body = format!(
        "    const {real} most = stats[0], share = 1.0f / stats[1];\n    {vf} sum = {{0}};\n    int64_t j = 0;\n    for (; j + {lanes} <= n; j += {lanes}) {{\n        \
         {vf} v = {vf}_load(x + j) * scale;{apply}\n        v = {vf}_exp_down(v - most) * share;\n        {vf}_store(x + j, v);\n        sum = {vf}_fma(v, {vf}_load(d + \
         j), sum);\n    }}\n    if (j < n) {{\n        const {vi} inside = {vi}_iota() < ({int})(n - j);\n        {vf} v = {vf}_load(x + j) * scale;{apply}\n        v \
         = {vf}_select(inside, {vf}_exp_down(v - most) * share, ({vf}){{0}});\n        {vf}_store(x + j, v);\n        sum += {vf}_select(inside, v * {vf}_load(d + j), \
         ({vf}){{0}});\n    }}\n    return {vf}_sum(sum);\n"
    );
    define(
        helpers,
        name,
        &head,
        &body,
        "Products of a query with keys become probabilities; the inner product with d.",
    )
}

/// `name(p, d, n, end, [hide,] inner, scale)`: `d` becomes the gradient of the scores; both are zero from
/// `n` to `end`.
pub(super) fn score_gradients(hide: bool, words: Words, helpers: &mut BTreeSet<Helper>) -> String {
    let Words {
        real,
        vf,
        vi,
        int,
        suffix,
        lanes,
    } = words;
    let name = format!(
        "kiln_attention_score_gradients{}{suffix}",
        if hide { "_hidden" } else { "" }
    );
    let masks = Masks {
        bias: false,
        hide,
        bias_last: false,
    };
    let head = format!(
        "void {name}({real} *p, {real} *d, int64_t n, int64_t end, {}{real} inner, {real} scale)",
        masks.among("", &format!("const {int} *hide, "))
    );
    let apply = masks.among(
        "",
        &format!(" v = {vf}_select({vi}_load(hide + j), ({vf}){{0}}, v);"),
    );
    let body = format!(
        "    int64_t j = 0;\n    for (; j + {lanes} <= n; j += {lanes}) {{\n        {vf} v = {vf}_load(p + j) * ({vf}_load(d + j) + inner) * scale;{apply}\n        \
         {vf}_store(d + j, v);\n    }}\n    if (j < n) {{\n        {vf} v = {vf}_load(p + j) * ({vf}_load(d + j) + inner) * scale;{apply}\n        {vf}_store(d + j, \
         {vf}_select({vi}_iota() < ({int})(n - j), v, ({vf}){{0}}));\n        j += {lanes};\n    }}\n    for (; j < end; j += {lanes}) {{\n        {vf}_store(p + j, \
         ({vf}){{0}});\n        {vf}_store(d + j, ({vf}){{0}});\n    }}\n"
    );
    define(
        helpers,
        name,
        &head,
        &body,
        "Gradients d of probabilities p become gradients of scores.",
    )
}

/// `name(to, n, seed, stream, first, keep)`: 1 where the uniform draw number `first + j` is below `keep`, 0
/// elsewhere, at `to + first % 4 + j` for `j` up to `n` in whole vectors.
pub(super) fn draws(words: Words, helpers: &mut BTreeSet<Helper>) -> String {
    let Words {
        real,
        vf,
        suffix,
        lanes,
        ..
    } = words;
    let name = format!("kiln_attention_draws{suffix}");
    let head = format!(
        "void {name}({real} *to, int64_t n, uint64_t seed, uint64_t stream, int64_t first, {real} keep)"
    );
    let body = format!(
        "    const int64_t count = (n + {lanes} - 1) / {lanes} * {lanes} + first % 4;\n    first -= first % 4;\n    for (int64_t j = 0; j < count; j += {lanes}) \
         {{\n        {vf} u = {vf}_uniform_aligned(seed, stream, first + \
         j);\n        {vf}_store(to + j, {vf}_select(u < keep, {vf}_set1(1.0f), ({vf}){{0}}));\n    }}\n"
    );
    define(helpers, name, &head, &body, "1 where dropout keeps an element.")
}

/// Statements of dropout in the loop over rows.
pub(super) struct Dropout {
    /// Draws for a row.
    pub draw: String,
    lanes: usize,
    vf: &'static str,
}

impl Dropout {
    pub fn new(spec: &AttentionSpec, plan: &AttentionPlan, helpers: &mut BTreeSet<Helper>) -> Self {
        let draw = if spec.dropout {
            let draws = draws(Words::of(plan), helpers);
            format!(
                "const int64_t draw = {} * {};\n{draws}(kept, n, *seed, *stream, draw, keep);\n",
                spec.row_of("row"),
                spec.extents.keys
            )
        } else {
            String::new()
        };
        Self {
            draw,
            lanes: plan.lanes,
            vf: plan.element.vector(),
        }
    }

    /// Applies dropout to the row `of`: kept elements are multiplied by `factor`.
    pub fn times(&self, of: &str, factor: &str) -> String {
        if self.draw.is_empty() {
            return String::new();
        }
        let Self { lanes, vf, .. } = self;
        format!(
            "for (int64_t j = 0; j < n; j += {lanes}) {vf}_store({of} + j, {vf}_load({of} + j) * {vf}_load(kept + draw % 4 + j) * {factor});\n"
        )
    }
}
