//! Functions on one row of a strip: scores to weights, and gradients of weights to gradients of scores.
//!
//! A NaN among the scores makes the sum NaN and thereby every weight of the row; a row of nothing but -inf does too. The largest score is
//! therefore looked for with a plain comparison.

use std::collections::BTreeSet;

use crate::kernels::Helper;

/// What is done to the scores of a row before the exponential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Masks {
    /// A bias for each key is added.
    pub bias: bool,
    /// Some keys are hidden.
    pub hide: bool,
}

impl Masks {
    fn suffix(self) -> &'static str {
        match (self.bias, self.hide) {
            (false, false) => "",
            (true, false) => "_biased",
            (false, true) => "_hidden",
            (true, true) => "_biased_hidden",
        }
    }

    fn params(self) -> String {
        format!(
            "{}{}",
            if self.bias { "const float *bias, " } else { "" },
            if self.hide {
                "const int32_t *hide, float fill, "
            } else {
                ""
            }
        )
    }

    /// Arguments of the functions here.
    pub fn arguments(self) -> String {
        format!(
            "{}{}",
            if self.bias { "bias, " } else { "" },
            if self.hide { "hide, *fill, " } else { "" }
        )
    }

    /// Statements on `v`, the scores at `j`.
    fn apply(self) -> String {
        format!(
            "{}{}",
            if self.bias { " v += vf_load(bias + j);" } else { "" },
            if self.hide {
                " v = vf_select(vi_load(hide + j), vf_set1(fill), v);"
            } else {
                ""
            }
        )
    }
}

fn helper(name: String, head: String, body: &str, comment: &str) -> Helper {
    Helper {
        name,
        prototype: format!("{head};"),
        definition: format!("/* {comment} */\n{head} {{\n{body}}}\n"),
    }
}

/// `name(x, n, end, .., stats)`: scores become `exp(score - largest)`, zero from `n` to `end`; `stats` gets the largest and the sum.
pub(super) fn weights(masks: Masks, lanes: usize, helpers: &mut BTreeSet<Helper>) -> String {
    let name = format!("kiln_attention_weights{}", masks.suffix());
    let head = format!(
        "void {name}(float *x, int64_t n, int64_t end, {}float *stats)",
        masks.params()
    );
    let store = if masks.bias || masks.hide {
        " vf_store(x + j, v);"
    } else {
        ""
    };
    let body = format!(
        "    vf largest = vf_set1(-KILN_INF), sum = {{0}};\n    int64_t j = 0;\n    for (; j + {lanes} <= n; j += {lanes}) {{\n        vf v = vf_load(x + \
         j);{apply}{store}\n        largest = vf_larger(v, largest);\n    }}\n    if (j < n) {{\n        vf v = vf_load(x + j);{apply}\n        v = \
         vf_select(vi_iota() < (int32_t)(n - j), v, vf_set1(-KILN_INF));\n        vf_store(x + j, v);\n        largest = vf_larger(v, largest);\n    \
         }}\n    const float most = vf_largest(largest);\n    for (j = 0; j + {lanes} <= n; j += {lanes}) {{\n        vf v = vf_exp_down(vf_load(x + j) - \
         most);\n        vf_store(x + j, v);\n        sum += v;\n    }}\n    if (j < n) {{\n        vf v = vf_exp_down(vf_load(x + j) - most);\n        v = \
         vf_select(vi_iota() < (int32_t)(n - j), v, (vf){{0}});\n        vf_store(x + j, v);\n        sum += v;\n        j += {lanes};\n    }}\n    for (; j < \
         end; j += {lanes}) vf_store(x + j, (vf){{0}});\n    stats[0] = most;\n    stats[1] = vf_sum(sum);\n",
        apply = masks.apply(),
    );
    helpers.insert(helper(
        name.clone(),
        head,
        &body,
        "Scores of a row become exp(score - largest), zero from n to end.",
    ));
    name
}

/// `name(x, d, n, scale, .., stats)`: products of query and keys become probabilities; gives the inner product with their gradients `d`.
pub(super) fn probabilities(masks: Masks, lanes: usize, helpers: &mut BTreeSet<Helper>) -> String {
    let name = format!("kiln_attention_probabilities{}", masks.suffix());
    let head = format!(
        "float {name}(float *x, const float *d, int64_t n, float scale, {}const float *stats)",
        masks.params()
    );
    let apply = masks.apply();
    let body = format!(
        "    const float most = stats[0], share = 1.0f / stats[1];\n    vf sum = {{0}};\n    int64_t j = 0;\n    for (; j + {lanes} <= n; j += {lanes}) {{\n        \
         vf v = vf_load(x + j) * scale;{apply}\n        v = vf_exp_down(v - most) * share;\n        vf_store(x + j, v);\n        sum = vf_fma(v, vf_load(d + \
         j), sum);\n    }}\n    if (j < n) {{\n        const vi inside = vi_iota() < (int32_t)(n - j);\n        vf v = vf_load(x + j) * scale;{apply}\n        v \
         = vf_select(inside, vf_exp_down(v - most) * share, (vf){{0}});\n        vf_store(x + j, v);\n        sum += vf_select(inside, v * vf_load(d + j), \
         (vf){{0}});\n    }}\n    return vf_sum(sum);\n"
    );
    helpers.insert(helper(
        name.clone(),
        head,
        &body,
        "Products of a query with keys become probabilities; the inner product with d.",
    ));
    name
}

/// `name(p, d, n, end, [hide,] inner, scale)`: `d` becomes the gradient of the scores; both are zero from `n` to `end`.
pub(super) fn score_gradients(hide: bool, lanes: usize, helpers: &mut BTreeSet<Helper>) -> String {
    let name = format!(
        "kiln_attention_score_gradients{}",
        if hide { "_hidden" } else { "" }
    );
    let head = format!(
        "void {name}(float *p, float *d, int64_t n, int64_t end, {}float inner, float scale)",
        if hide { "const int32_t *hide, " } else { "" }
    );
    let apply = if hide {
        " v = vf_select(vi_load(hide + j), (vf){0}, v);"
    } else {
        ""
    };
    let body = format!(
        "    int64_t j = 0;\n    for (; j + {lanes} <= n; j += {lanes}) {{\n        vf v = vf_load(p + j) * (vf_load(d + j) + inner) * scale;{apply}\n        \
         vf_store(d + j, v);\n    }}\n    if (j < n) {{\n        vf v = vf_load(p + j) * (vf_load(d + j) + inner) * scale;{apply}\n        vf_store(d + j, \
         vf_select(vi_iota() < (int32_t)(n - j), v, (vf){{0}}));\n        j += {lanes};\n    }}\n    for (; j < end; j += {lanes}) {{\n        vf_store(p + j, \
         (vf){{0}});\n        vf_store(d + j, (vf){{0}});\n    }}\n"
    );
    helpers.insert(helper(
        name.clone(),
        head,
        &body,
        "Gradients d of probabilities p become gradients of scores.",
    ));
    name
}

/// `name(to, n, seed, stream, first, keep)`: 1 where the uniform draw number `first + j` is below `keep`, 0 elsewhere, at `to + first % 4 + j`
/// for `j` up to `n` in whole vectors.
pub(super) fn draws(lanes: usize, helpers: &mut BTreeSet<Helper>) -> String {
    let name = "kiln_attention_draws".to_owned();
    let head = format!(
        "void {name}(float *to, int64_t n, uint64_t seed, uint64_t stream, int64_t first, float keep)"
    );
    let body = format!(
        "    const int64_t count = (n + {lanes} - 1) / {lanes} * {lanes} + first % 4;\n    first -= first % 4;\n    for (int64_t j = 0; j < count; j += {lanes}) \
         {{\n        vf u = vf_uniform_aligned(seed, stream, first + \
         j);\n        vf_store(to + j, vf_select(u < keep, vf_set1(1.0f), (vf){{0}}));\n    }}\n"
    );
    helpers.insert(helper(
        name.clone(),
        head,
        &body,
        "1 where dropout keeps an element.",
    ));
    name
}
