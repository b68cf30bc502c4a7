//! Log-softmax of long rows, as cross entropy uses it: kernels read the row again instead of storing values
//! computed from it.
//!
//! Of each row the forward pass must keep only the largest element and the sum of exponentials; the loss
//! picks one logarithm, and the gradient computes the exponentials again. Programs keep the shifted row and
//! its exponentials, two tensors of the size of the logits. This pass gives every other user of those two
//! tensors operations of its own on the logits, which become part of its own loop: a row of a vocabulary of
//! 32 thousand is then read once where it would be written and read. Where the loss and the gradient end up
//! in one nest all the same ([`crate::schedule::fuse`]), that nest computes the exponentials once.

use rustc_hash::FxHashSet;

use kiln_graph::{Graph, Node, Rewriter, TypeError, Value};

use super::pattern::{Bindings, Pattern};

const LOG_SOFTMAX: &str =
    "(sub (= ?shifted (sub ?x (= ?most (row (max ?x))))) (row (log (sum (= ?e (exp ?shifted))))))";

/// Gives the users of shifted rows and their exponentials operations of their own, for tensors from `large`
/// elements: smaller ones stay in a cache.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn log_softmax(graph: &Graph, large: usize) -> Result<Graph, TypeError> {
    let pattern = Pattern::parse(LOG_SOFTMAX);
    // The shifted row and its exponential, and the node that may use the first copy of each.
    let mut shared: Vec<(Value, Value)> = Vec::new();
    let mut owners: FxHashSet<(Value, Node)> = FxHashSet::default();
    let users = graph.users();
    for (_, data) in graph.nodes() {
        let &[value] = data.outputs.as_slice() else {
            continue;
        };
        if graph.ty(value).numel() < large {
            continue;
        }
        let Some(found) = pattern.matches(graph, value, &Bindings::default()) else {
            continue;
        };
        let (shifted, e) = (found.of("?shifted"), found.of("?e"));
        if users.outputs(shifted) + users.outputs(e) > 0 || shared.contains(&(shifted, e)) {
            continue;
        }
        shared.push((shifted, e));
        owners.insert((shifted, graph.value(e).node));
        let sums = users
            .of(e)
            .iter()
            .filter(|&&user| graph.node(user).op.name() == "reduce");
        owners.extend(sums.map(|&user| (e, user)));
    }
    if shared.is_empty() {
        return Ok(graph.clone());
    }
    let mut rewriter = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        for &operand in data
            .inputs
            .iter()
            .filter(|&&operand| !owners.contains(&(operand, node)))
        {
            if shared
                .iter()
                .any(|(shifted, e)| operand == *shifted || operand == *e)
            {
                again(&mut rewriter, graph, operand, &shared)?;
            }
        }
        rewriter.copy(node)?;
    }
    Ok(rewriter.finish().without_dead_code())
}

/// Computes `value`, a shifted row or its exponential, once more: the copy replaces it from now on.
fn again(
    rewriter: &mut Rewriter<'_>,
    graph: &Graph,
    value: Value,
    shared: &[(Value, Value)],
) -> Result<(), TypeError> {
    if let Some(&(shifted, _)) = shared.iter().find(|(_, e)| *e == value) {
        again(rewriter, graph, shifted, shared)?;
    }
    rewriter.copy(graph.value(value).node).map(|_| ())
}
