//! Attention: `softmax(q k^T * scale, masked) v` and its gradient become
//! [`Attention`](kiln_graph::op::Op::Attention) and [`AttentionGrad`](kiln_graph::op::Op::AttentionGrad).
//!
//! The score matrix is by far the largest value of the composition, and every step of it passes over the
//! matrix; the operations keep it in cache. What is matched, from the product with the values backwards, is a
//! table (`matching`): each line is one form that programs write. The gradient is found by the products it
//! must have: with the values (`dp`), with the weights (`dv`), with keys and queries (`dq`, `dk`). Between
//! `dp` and those must be the gradient of the same masks, softmax and dropout.
//!
//! Heads of keys and values that several heads of queries share arrive repeated; the repetition and the sum
//! of its gradients are left out.
//!
//! In types of 16 bits programs do the softmax, masks or scale in that type or in f32, with casts before and
//! after. The operations compute in f32 either way: what they leave out are roundings of scores and weights.
//!
//! A composition is replaced only if nothing of its size is left: where a program also uses the weights, it
//! stays.

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
