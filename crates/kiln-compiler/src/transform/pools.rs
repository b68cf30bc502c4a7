//! The gradient of a ReLU that is pooled.
//!
//! Max pooling hands each gradient to the largest element of a window, and what a window's largest element is
//! is what was pooled. So where the ReLU in front of a pooling hides the gradient, the pooled value is 0,
//! too: the comparison can look at the pooled values, of which there are a quarter as many, and which the
//! next operation reads anyway. The large one would be kept for the backward pass, and the gradient written
//! twice.
//!
//! ```text
//! %m = compare le %x, %0                           %m = compare le %x, %0
//! %r = select %m, %0, %x                           %r = select %m, %0, %x
//! %p, %i = max_pool_with_indices %r         ─►     %p, %i = max_pool_with_indices %r
//! %dr = max_pool_grad %dp, %i                      %n = compare le %p, %0
//! %dx = select %m, %0, %dr                         %dq = select %n, %0, %dp
//!                                                  %dx = max_pool_grad %dq, %i
//! ```
//!
//! No bit changes: what a window hands to an element was that element, NaN included. Behind a normalisation
//! the backward pass computes `x` again in any case, and everything stays as it is.

use kiln_graph::op::{CompareOp, Op, Window};
use kiln_graph::{Graph, NodeData, Rewriter, Shape, TypeError, Users, Value};

use super::relu::{is_contracted, relu};

/// Replaces gradients of ReLUs behind those of poolings in `graph`.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn pools(graph: &Graph) -> Result<Graph, TypeError> {
    let users = graph.users();
    let mut rewriter = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        let Some(Pooled { of, values }) = pooled(graph, &users, data) else {
            rewriter.copy(node)?;
            continue;
        };
        let p = &data.provenance;
        let [gradient, indices] = [of.inputs[0], of.inputs[1]].map(|value| rewriter.map(value));
        let values = rewriter.map(values);
        let new = &mut rewriter.graph;
        let zeros = new.full(0.0, &new.ty(values).clone(), p)?;
        let hidden = new.add(Op::Compare(CompareOp::Le), &[values, zeros], p)?;
        let shown = new.add(Op::Select, &[hidden, zeros, gradient], p)?;
        let result = new.add(of.op.clone(), &[shown, indices], p)?;
        rewriter.replace(data.outputs[0], result);
    }
    Ok(rewriter.finish().without_dead_code())
}

/// The gradient of a pooling behind which a ReLU hides elements.
struct Pooled<'a> {
    /// The gradient of the pooling.
    of: &'a NodeData,
    /// What was pooled.
    values: Value,
}

/// Whether `data` is the gradient of a ReLU behind that of a pooling that read the ReLU.
fn pooled<'a>(graph: &'a Graph, users: &Users, data: &NodeData) -> Option<Pooled<'a>> {
    let (Op::Select, &[compare, zeros, gradient]) = (&data.op, &data.inputs[..]) else {
        return None;
    };
    let of = graph.def(gradient);
    if !matches!(of.op, Op::MaxPoolGrad { .. })
        || users.of(gradient).len() != 1
        || users.outputs(gradient) > 0
        || !graph.is_zero(zeros)
    {
        return None;
    }
    let pool = graph.def(of.inputs[1]);
    let Op::MaxPoolWithIndices { window, .. } = &pool.op else {
        return None;
    };
    let (x, values) = (pool.inputs[0], pool.outputs[0]);
    let relu = relu(graph, graph.def(x))?;
    let same = relu.compare == compare && graph.dtype(values) == graph.dtype(of.inputs[0]);
    let fits = pool.outputs[1] == of.inputs[1] && begins_inside(window, graph.shape(x), graph.shape(values));
    (same && fits && is_contracted(graph, relu.x)).then_some(Pooled { of, values })
}

/// Whether every window has an element. One of padding alone hands its gradient to the first element of all.
fn begins_inside(window: &Window, x: &Shape, values: &Shape) -> bool {
    let mut axes = 0..window.size.len();
    axes.all(|axis| {
        let last = values[2 + axis].saturating_sub(1) * window.stride[axis];
        window.pad_low[axis] == 0 && last < x[2 + axis]
    })
}
