//! Images that every reader computes for itself, instead of one kernel storing them.
//!
//! Several kernels of a batch normalisation's backward pass need the difference from the mean, the
//! normalised, scaled and shifted value, or the mask of the activation. All of these follow by a few
//! arithmetic operations from the convolution's result, which each of the kernels reads anyway. Computing
//! them again costs less than writing and reading an image, so such a value becomes [`Class::Inline`]: as
//! cheap as an index.
//!
//! A value that the partition keeps for the backward pass stays stored, unless the values that it is
//! computed from are kept as well: otherwise those would have to be kept in its place.
//!
//! A value stays stored, too, where rounding it to 16 bits is the only use of the wider value: an inline
//! rounding would have the wider value stored in its place.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use kiln_graph::{DType, Graph, Node, NodeData, Op, Users, Value};

use super::class::{Class, is_cheap, node_index};
use super::layout::Layouts;

/// The values that an inline image is computed from.
struct Origin {
    /// Stored images.
    images: SmallVec<[Value; 2]>,
    operations: usize,
}

/// Makes images inline that are computed by at most so many operations from values of channels and one
/// stored image, or (but for masks, which are small) two.
pub fn inline_images(
    graph: &Graph,
    users: &Users,
    layouts: &Layouts,
    most_operations: usize,
    classes: &mut [Class],
) {
    let mut origins: FxHashMap<Value, Origin> = FxHashMap::default();
    for (node, data) in graph.nodes() {
        let index = node_index(node);
        let Some(&value) = data.outputs.first() else {
            continue;
        };
        let plain = classes[index] == Class::Pointwise
            && data.op.is_pointwise()
            && is_cheap(&data.op)
            && layouts.contains_key(&value)
            && users.outputs(value) == 0;
        let read_by_nests = users.of(value).iter().all(|&user| {
            let user = node_index(user);
            matches!(classes[user], Class::Pointwise | Class::Reduce)
        });
        if !plain || !read_by_nests || is_stored_rounded(graph, users, classes, data) {
            continue;
        }
        if let Some(origin) = origin(graph, &data.inputs, classes, &origins) {
            let most = if graph.dtype(value) == DType::Bool { 1 } else { 2 };
            let there = !read_later(graph, users, value)
                || origin.images.iter().all(|&image| read_later(graph, users, image));
            if origin.images.len() <= most && origin.operations <= most_operations && there {
                origins.insert(value, origin);
                classes[index] = Class::Inline;
            }
        }
    }
}

/// Whether `data` rounds a value that one nest makes and nothing else reads, so that the rounded one is stored.
fn is_stored_rounded(graph: &Graph, users: &Users, classes: &[Class], data: &NodeData) -> bool {
    let (Op::Cast(to), Some(&input)) = (&data.op, data.inputs.first()) else {
        return false;
    };
    to.size() < graph.dtype(input).size()
        && users.of(input).len() == 1
        && classes[node_index(graph.value(input).node)] == Class::Pointwise
}

/// Whether `value` is made in the forward pass and read in the backward pass.
fn read_later(graph: &Graph, users: &Users, value: Value) -> bool {
    let backward = |node: Node| graph.node(node).provenance.phase.is_after_forward();
    !backward(graph.value(value).node) && users.of(value).iter().any(|&user| backward(user))
}

/// The values that a pointwise operation on `inputs` is computed from; none if one of them is moved in a
/// way that makes reading it expensive.
fn origin(
    graph: &Graph,
    inputs: &[Value],
    classes: &[Class],
    origins: &FxHashMap<Value, Origin>,
) -> Option<Origin> {
    let mut origin = Origin {
        images: SmallVec::new(),
        operations: 1,
    };
    for &input in inputs {
        if let Some(own) = origins.get(&input) {
            for &image in &own.images {
                if !origin.images.contains(&image) {
                    origin.images.push(image);
                }
            }
            origin.operations += own.operations;
            continue;
        }
        if classes[node_index(graph.value(input).node)] != Class::Inline {
            if !origin.images.contains(&input) {
                origin.images.push(input);
            }
            continue;
        }
        // A value of channels, or a number: behind its movements there are few elements.
        let mut behind = input;
        while classes[node_index(graph.value(behind).node)] == Class::Inline
            && let Some(&operand) = graph.def(behind).inputs.first()
            && !origins.contains_key(&behind)
        {
            behind = operand;
        }
        if graph.ty(behind).numel() * 8 > graph.ty(input).numel() {
            return None;
        }
    }
    Some(origin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::class::classify;
    use crate::schedule::layout;
    use crate::testing::POLICY;
    use kiln_graph::Phase;

    /// Whether `%a`, computed from the convolution `%z`, is inline in a step whose backward pass reads
    /// `reads`.
    fn is_inline(reads: &str) -> bool {
        let graph = Graph::parse(&format!(
            "graph @g {{
  %x = parameter 0 : f32[2,8,6,6]
  %w = parameter 1 : f32[8,8,1,1]
  %s = parameter 2 : f32[8]
  %dy = parameter 3 : f32[2,8,6,6]
  %z = conv %x, %w {{stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1}} : f32[2,8,6,6] ; fwd
  %scale = broadcast %s {{dims=[1]}} : f32[2,8,6,6] ; fwd
  %a = mul %z, %scale : f32[2,8,6,6] ; fwd
  %e = exp %a : f32[2,8,6,6] ; fwd
  %loss = reduce sum %e {{axes=[0,2,3]}} : f32[8] ; fwd
  %da = mul %dy, %a : f32[2,8,6,6] ; bwd
  %dz = mul %dy, {reads} : f32[2,8,6,6] ; bwd
  %both = add %da, %dz : f32[2,8,6,6] ; bwd
  %ds = reduce sum %both {{axes=[0,2,3]}} : f32[8] ; bwd
  return %loss, %ds
}}"
        ))
        .unwrap();
        let users = graph.users();
        let mut classes = classify(&graph, &POLICY);
        let layouts = layout::choose(&graph, &POLICY);
        inline_images(&graph, &users, &layouts, POLICY.image_operations, &mut classes);
        let (a, _) = graph
            .nodes()
            .find(|(_, data)| {
                data.provenance.phase == Phase::Forward && matches!(data.op, kiln_graph::Op::Binary(_))
            })
            .unwrap();
        classes[node_index(a)] == Class::Inline
    }

    #[test]
    fn what_is_kept_is_not_made_from_what_is_not() {
        assert!(
            is_inline("%z"),
            "the backward pass has the convolution's result anyway"
        );
        assert!(!is_inline("%dy"));
    }

    #[test]
    fn what_is_rounded_alone_is_stored_rounded() {
        let graph = Graph::parse(
            "graph @g {
  %x = parameter 0 : f32[2,8,6,6]
  %w = parameter 1 : f32[8,8,1,1]
  %dy = parameter 2 : f32[2,8,6,6]
  %dr = parameter 3 : f32[2,8,6,6]
  %z = conv %x, %w {stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1} : f32[2,8,6,6] ; fwd
  %dz = mul %dy, %z : f32[2,8,6,6] ; bwd
  %both = add %dz, %dr : f32[2,8,6,6] ; bwd
  %rounded = cast %both : bf16[2,8,6,6] ; bwd
  %first = cast %rounded : f32[2,8,6,6] ; bwd
  %sum = reduce sum %first {axes=[0,2,3]} : f32[8] ; bwd
  %second = cast %rounded : f32[2,8,6,6] ; bwd
  %square = mul %second, %second : f32[2,8,6,6] ; bwd
  %power = reduce sum %square {axes=[0,2,3]} : f32[8] ; bwd
  return %sum, %power
}",
        )
        .unwrap();
        let users = graph.users();
        let mut classes = classify(&graph, &POLICY);
        let layouts = layout::choose(&graph, &POLICY);
        inline_images(&graph, &users, &layouts, POLICY.image_operations, &mut classes);
        let class = |narrow: bool| {
            let mut casts = graph
                .nodes()
                .filter(|(_, data)| matches!(data.op, Op::Cast(to) if (to == DType::BF16) == narrow));
            classes[node_index(casts.next().unwrap().0)]
        };
        assert_eq!(class(true), Class::Pointwise);
        assert_eq!(
            class(false),
            Class::Inline,
            "what is read is widened by each reader"
        );
    }
}
