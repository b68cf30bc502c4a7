//! Attention: `softmax(q k^T * scale, masked) v` and its gradient become
//! [`Attention`](kiln_graph::op::Op::Attention) and [`AttentionGrad`](kiln_graph::op::Op::AttentionGrad).
//!
//! The score matrix is by far the largest value of the composition, and every step of it passes over the
//! matrix; the operations keep it in cache. The matcher starts at the product with the values and goes
//! backwards through a table (`matching`): each line is one form that programs write. It finds the gradient
//! by the products that a gradient must have: with the values (`dp`), with the weights (`dv`), with keys
//! and queries (`dq`, `dk`). Between `dp` and the others must be the gradient of the same masks, softmax
//! and dropout.
//!
//! Heads of keys and values that several heads of queries share arrive repeated; the repetition and the sum
//! of its gradients are left out.
//!
//! In types of 16 bits programs compute the softmax, masks or scale in that type or in f32, with casts
//! before and after. The operations compute in f32 either way: they only leave out roundings of scores and
//! weights.
//!
//! A composition is replaced only if no value of the scores' size is left: where a program also uses the
//! weights, the composition stays.

mod building;
mod matching;

use kiln_graph::{Graph, TypeError};

/// Replaces attentions in `graph`.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn attention(graph: &Graph) -> Result<Graph, TypeError> {
    let found = matching::find(graph);
    if found.is_empty() {
        return Ok(graph.clone());
    }
    building::replace(graph, &found)
}
