//! Indices of max pooling in 16 bits.
//!
//! A program's integers have 32 bits or 64, and a pooling's indices count the elements of a plane. Where
//! nothing but gradients of poolings reads them, and a plane has at most 65,536 elements, 16 bits hold each:
//! they are kept for the backward pass, written once and read once.
//!
//! ```text
//! %p, %i = max_pool_with_indices %x          %i i32[8,64,56,56]  ─►  u16[8,64,56,56]
//! %dx = max_pool_grad %dp, %i
//! ```
//!
//! Not 8 bits: of a network's poolings only the last, small ones would be served, and pictures of several
//! sizes share compiled steps as long as they have the same types.

use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Node, NodeData, Rewriter, TypeError, Users};

/// The elements of a plane that indices of 16 bits can tell apart.
const MOST: usize = 1 << 16;

/// Narrows the indices of poolings in `graph`.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn indices(graph: &Graph) -> Result<Graph, TypeError> {
    let users = graph.users();
    let mut rewriter = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        match narrowed(graph, &users, data) {
            Some(op) => rewriter.copy_as(node, op)?,
            None => rewriter.copy(node)?,
        };
    }
    Ok(rewriter.finish())
}

/// The pooling `data` with indices of 16 bits, if they hold what it tells and nobody sees them.
fn narrowed(graph: &Graph, users: &Users, data: &NodeData) -> Option<Op> {
    let Op::MaxPoolWithIndices { window, dtype } = &data.op else {
        return None;
    };
    let indices = data.outputs[1];
    let plane: usize = graph.shape(data.inputs[0])[2..].iter().product();
    let is_gradient = |user: &Node| matches!(graph.node(*user).op, Op::MaxPoolGrad { .. });
    // A gradient's other operand may be integers, too.
    let hidden = users.outputs(indices) == 0
        && users
            .of(indices)
            .iter()
            .all(|user| is_gradient(user) && graph.node(*user).inputs[0] != indices);
    (hidden && plane <= MOST && dtype.size() > DType::U16.size()).then(|| Op::MaxPoolWithIndices {
        window: window.clone(),
        dtype: DType::U16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pooling of `i32` indices and its gradient over planes of these extents, with `more` nodes and
    /// `results`.
    fn graph([height, width]: [usize; 2], more: &str, results: &str) -> Graph {
        let (y, x) = (height / 2, width / 2);
        let text = format!(
            "graph @pools {{
  %x = parameter 0 : f32[1,1,{height},{width}]
  %dp = parameter 1 : f32[1,1,{y},{x}]
  %p, %i = max_pool_with_indices %x {{size=[2,2], stride=[2,2], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]}} \
               : f32[1,1,{y},{x}], i32[1,1,{y},{x}]
  %dx = max_pool_grad %dp, %i {{input=[{height},{width}]}} : f32[1,1,{height},{width}]
  {more}
  return %dx{results}
}}"
        );
        Graph::parse(&text).expect("well formed")
    }

    fn type_of_indices(graph: &Graph) -> DType {
        let graph = indices(graph).expect("well typed");
        kiln_graph::verify::verify(&graph).expect("well formed");
        let pool = graph
            .nodes()
            .find(|(_, data)| matches!(data.op, Op::MaxPoolWithIndices { .. }));
        graph.dtype(pool.expect("it is still there").1.outputs[1])
    }

    #[test]
    fn planes_of_65536_elements_are_the_largest() {
        assert_eq!(type_of_indices(&graph([256, 256], "", "")), DType::U16);
        assert_eq!(type_of_indices(&graph([258, 256], "", "")), DType::I32);
    }

    #[test]
    fn indices_that_somebody_sees_keep_their_type() {
        assert_eq!(type_of_indices(&graph([8, 8], "", ", %i")), DType::I32);
        let read = "%c = cast %i : f32[1,1,4,4]";
        assert_eq!(type_of_indices(&graph([8, 8], read, ", %c")), DType::I32);
        let summed = "%s = max_pool_grad %i, %i {input=[8,8]} : i32[1,1,8,8]";
        assert_eq!(type_of_indices(&graph([8, 8], summed, ", %s")), DType::I32);
    }
}
