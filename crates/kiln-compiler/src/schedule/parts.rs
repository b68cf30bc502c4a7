//! Results that are made where they are wanted: in a part of a concatenation.
//!
//! A contraction of the library stores all of its result, contiguous. If a copy to a part of a larger buffer
//! is all that reads it, as the gradient of a weight is read by its bucket ([`crate::buckets`]), it is stored
//! there, and the copy is gone. Both tensors are row-major, and the part begins where the target's kernels
//! may begin a buffer ([`Policy::alignment`]).
//!
//! ```text
//! kernel 7: dot_general   writes %40             kernel 7: dot_general   writes %90
//! kernel 9: dot_general   writes %41      ──►    kernel 9: dot_general   writes %90
//! kernel 10: copy %40 %41 writes %90
//! ```

use kiln_graph::{Graph, Op, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use super::buffer::Buffer;
use super::kernel::{Kernel, KernelKind, Part};
use super::nest::{Nest, Store};
use crate::index::linear;
use crate::policy::Policy;

/// Stores the results of contractions in the buffers that they are copied to.
pub fn place_in_parts(graph: &Graph, policy: &Policy, mut kernels: Vec<Kernel>) -> Vec<Kernel> {
    let outputs: FxHashSet<Value> = graph.outputs.iter().map(|output| output.value).collect();
    let makers: FxHashMap<Value, usize> = kernels
        .iter()
        .enumerate()
        .filter_map(|(number, kernel)| Some((contiguous_result(graph, kernel)?, number)))
        .filter(|(value, _)| !outputs.contains(value))
        .collect();
    let mut readers: FxHashMap<Buffer, usize> = FxHashMap::default();
    for &buffer in kernels.iter().flat_map(|kernel| &kernel.reads) {
        *readers.entry(buffer).or_default() += 1;
    }
    let mut parts: Vec<(usize, Part)> = Vec::new();
    for kernel in &mut kernels {
        let KernelKind::Nest(nest) = &mut kernel.kind else {
            continue;
        };
        if !nest.members.is_empty() {
            continue;
        }
        let copied = |store: &Store| {
            let part = copied_part(graph, nest, store)?;
            let maker = *makers.get(&part.value)?;
            let size = graph.dtype(part.value).size();
            let fits = !outputs.contains(&part.of)
                && readers.get(&Buffer::Value(part.value)) == Some(&1)
                && (part.start * size).is_multiple_of(policy.alignment);
            fits.then_some((maker, part))
        };
        let found: Vec<(usize, Part)> = nest.stores.iter().filter_map(copied).collect();
        let is_moved = |value: Value| found.iter().any(|(_, part)| part.value == value);
        nest.stores
            .retain(|store| !is_moved(reshaped(graph, store.value)));
        nest.uses.retain(|(value, _)| !is_moved(*value));
        kernel.reads.retain(|buffer| match buffer {
            Buffer::Value(value) => !is_moved(*value),
            Buffer::Output(_) => true,
        });
        kernel.nodes = nest
            .stores
            .iter()
            .map(|store| graph.value(store.value).node)
            .collect();
        parts.extend(found);
    }
    for (maker, part) in parts {
        kernels[maker].writes = vec![Buffer::Value(part.of)];
        kernels[maker].part = Some(part);
    }
    kernels.retain(|kernel| !matches!(&kernel.kind, KernelKind::Nest(nest) if nest.stores.is_empty()));
    kernels
}

/// The result of a kernel that may store it anywhere.
fn contiguous_result(graph: &Graph, kernel: &Kernel) -> Option<Value> {
    let KernelKind::Library(node) = kernel.kind else {
        return None;
    };
    let data = graph.node(node);
    match data.outputs[..] {
        [value] if data.op.is_contraction() && kernel.writes == [Buffer::Value(value)] => Some(value),
        _ => None,
    }
}

/// The part of a concatenation to which `store` copies a value, element by element in the order of memory.
/// The value is no other store's.
fn copied_part(graph: &Graph, nest: &Nest, store: &Store) -> Option<Part> {
    let Buffer::Value(of) = store.buffer else {
        return None;
    };
    let is_row_major = |value: Value| !nest.layouts.contains_key(&value);
    let source = reshaped(graph, store.value);
    let alone = nest
        .stores
        .iter()
        .filter(|other| reshaped(graph, other.value) == source)
        .count();
    let [_] = nest.uses_of(source) else { return None };
    if alone != 1
        || !matches!(graph.def(of).op, Op::Concat { .. })
        || !is_row_major(source)
        || !is_row_major(of)
    {
        return None;
    }
    let own = linear(&store.index, graph.shape(store.value));
    let start = store.position.offset() - own.offset();
    let elements = graph.ty(source).numel();
    let end = usize::try_from(start).ok()? + elements;
    let inside = elements > 0 && end <= graph.ty(of).numel();
    (inside && own.shift(start) == store.position).then_some(Part {
        value: source,
        of,
        start: start as usize,
    })
}

/// The value of which `value` is another shape.
fn reshaped(graph: &Graph, mut value: Value) -> Value {
    while let Op::Reshape(_) = graph.def(value).op {
        value = graph.def(value).inputs[0];
    }
    value
}
