//! Images that are computed wherever they are read, instead of being stored.
//!
//! What a batch normalisation makes of a convolution's result (the difference from the mean, the normalised, scaled and shifted value, the mask of the
//! activation) is needed in several places of the backward pass, each of which reads the convolution's result anyway. A few arithmetic
//! operations cost less than writing and reading an image. Such a value becomes [`Class::Inline`]: as cheap as an index.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use kiln_graph::{DType, Graph, Users, Value};

use super::class::{Class, is_cheap, node_index};
use super::layout::Layouts;

/// Most operations that are done again for each use.
const MAX_OPERATIONS: usize = 12;

/// What an inline image is computed from.
struct Origin {
    /// Stored images.
    images: SmallVec<[Value; 2]>,
    operations: usize,
}

/// Makes images inline that are computed from one stored image or (but for masks, which are small) two, and from values of channels.
pub fn inline_images(graph: &Graph, users: &Users, layouts: &Layouts, classes: &mut [Class]) {
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
        if !plain || !read_by_nests {
            continue;
        }
        if let Some(origin) = origin(graph, &data.inputs, classes, &origins) {
            let most = if graph.dtype(value) == DType::Bool { 1 } else { 2 };
            if origin.images.len() <= most && origin.operations <= MAX_OPERATIONS {
                origins.insert(value, origin);
                classes[index] = Class::Inline;
            }
        }
    }
}

/// What a pointwise operation on `inputs` is computed from; none if one of them is moved in a way that makes reading it dear.
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
        // A value of channels, or of nothing: behind movements there is little.
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
