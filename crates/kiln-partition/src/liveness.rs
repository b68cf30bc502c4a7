//! A memory planner, as far as the partitioner needs one: it estimates how many bytes a graph's
//! intermediates take at their peak.
//!
//! The executor's planner is the authority on memory, and lives with the executor; the partitioner is given
//! it as a [`Planner`]. [`Liveness`] is the simplest planner that is right about lifetimes: nodes run in
//! the graph's order, one at a time; every result has a buffer until its last use; a reshape is a view; a
//! pointwise result takes over the buffer of an operand that dies with it. It knows no fusion and no
//! fragmentation.

use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Value};

use crate::cost::bytes;

/// Knows how much memory a step needs.
pub trait Planner {
    /// Bytes that running `graph` allocates at its peak, without its arguments and the outputs that take
    /// over their buffers.
    ///
    /// # Errors
    ///
    /// A sentence that says why the graph cannot be planned.
    fn peak(&self, graph: &Graph) -> Result<u64, String>;
}

impl<F: Fn(&Graph) -> Result<u64, String>> Planner for F {
    fn peak(&self, graph: &Graph) -> Result<u64, String> {
        self(graph)
    }
}

/// The simplest planner: see the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Liveness;

impl Planner for Liveness {
    fn peak(&self, graph: &Graph) -> Result<u64, String> {
        Ok(profile(graph).into_iter().max().unwrap_or(0))
    }
}

impl Liveness {
    /// Bytes alive while each node runs, in order: operands, results, and whatever is needed later.
    pub fn profile(&self, graph: &Graph) -> Vec<u64> {
        profile(graph)
    }
}

fn profile(graph: &Graph) -> Vec<u64> {
    let mut replaces: EntitySet<Value> = EntitySet::with_capacity(graph.num_values());
    for output in graph.outputs.iter().filter(|output| output.alias.is_some()) {
        replaces.insert(output.value);
    }
    // The value whose buffer each value lies in; arguments and what replaces them have none here, nor
    // have views of those.
    let mut base: SecondaryMap<Value, Option<Value>> = SecondaryMap::new();
    for (value, data) in graph.values() {
        let node = graph.node(data.node);
        base[value] = match node.op {
            _ if replaces.contains(value) => None,
            Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. } => None,
            Op::Reshape(_) => base[node.inputs[0]],
            _ => Some(value),
        };
    }
    let mut last: SecondaryMap<Value, Option<Node>> = SecondaryMap::new();
    let mut stays: SecondaryMap<Value, bool> = SecondaryMap::new();
    for (node, data) in graph.nodes() {
        for &value in data.inputs.iter().chain(&data.outputs) {
            if let Some(buffer) = base[value] {
                last[buffer] = Some(node);
            }
        }
    }
    for output in &graph.outputs {
        if let Some(buffer) = base[output.value] {
            stays[buffer] = true;
        }
    }
    let mut live = 0u64;
    let mut profile = Vec::with_capacity(graph.num_nodes());
    for (node, data) in graph.nodes() {
        let dies = |value: Value| last[value] == Some(node) && !stays[value];
        let mut dead: Vec<Value> = data
            .inputs
            .iter()
            .filter_map(|&value| base[value])
            .filter(|&b| dies(b))
            .collect();
        dead.sort();
        dead.dedup();
        let mut reuse = 0;
        for &value in &data.outputs {
            if base[value] != Some(value) {
                continue;
            }
            let size = bytes(graph, value);
            live += size;
            if dies(value) {
                dead.push(value);
            }
            if data.op.is_pointwise()
                && reuse == 0
                && dead.iter().any(|&b| b != value && bytes(graph, b) == size)
            {
                reuse = size;
            }
        }
        profile.push(live - reuse);
        live -= dead.iter().map(|&value| bytes(graph, value)).sum::<u64>();
    }
    profile
}
