//! The forward pass as a row of units: transformer blocks, residual blocks, layers.
//!
//! Recomputing pays off in memory where much lies between two narrow places: keep the narrow places, drop
//! what is between them, and bring it back, unit by unit, when the backward pass gets there. The narrow
//! places are found, not named: walk the forward nodes in order, and after each one add up the *heavy* values
//! that are defined before and used by forward nodes after it. (A value is light if it follows from arguments
//! without any kernel of its own: masks, tables of positions, embeddings.) Between two expensive nodes the
//! best place is the one where the least crosses, and a place is a boundary if no less crosses at either
//! neighbouring place. Inside an attention layer queries, keys and values cross together with the residual
//! stream; between two layers the stream crosses alone.

use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::{Node, Value};

use crate::cost::bytes;
use crate::joint::{Joint, Side};
use crate::recompute::Recompute;

/// The units of a forward pass.
#[derive(Debug)]
pub(crate) struct Units {
    /// The unit of each candidate node, in the order of the forward pass.
    pub(crate) of: SecondaryMap<Node, u32>,
    /// Per boundary, the heavy values that cross it: boundary `i` lies between units `i` and `i + 1`.
    pub(crate) crossing: Vec<EntitySet<Value>>,
}

/// A place between two forward nodes.
struct Place {
    /// The last node before it.
    after: Node,
    /// Bytes of heavy values that cross.
    bytes: u64,
}

impl Units {
    pub(crate) fn new(joint: &Joint) -> Self {
        let graph = joint.graph;
        let heavy = heavy_values(joint);
        let last_use = |value: Value| {
            let users = joint.users.of(value).iter();
            users
                .copied()
                .filter(|&user| joint.side[user] == Side::Forward)
                .max()
        };

        let mut ends: SecondaryMap<Node, u64> = SecondaryMap::new();
        let mut live = 0;
        let mut places: Vec<Place> = Vec::new();
        let mut best: Option<Place> = None;
        for (node, data) in graph.nodes() {
            if joint.side[node] != Side::Forward {
                continue;
            }
            if Recompute::of(&data.op) == Recompute::Expensive {
                places.extend(best.take());
            }
            for &value in data.outputs.iter().filter(|&&value| heavy.contains(value)) {
                if let Some(last) = last_use(value) {
                    live += bytes(graph, value);
                    ends[last] += bytes(graph, value);
                }
            }
            live -= ends[node];
            if live > 0 && best.as_ref().is_none_or(|best| live < best.bytes) {
                best = Some(Place {
                    after: node,
                    bytes: live,
                });
            }
        }
        // Behind the last expensive node there is nothing left to drop.
        let boundaries: Vec<Node> = (1..places.len())
            .filter(|&i| {
                let next = places.get(i + 1).map_or(u64::MAX, |place| place.bytes);
                places[i].bytes <= places[i - 1].bytes && places[i].bytes <= next
            })
            .map(|i| places[i].after)
            .collect();

        let mut of = SecondaryMap::new();
        for (node, data) in graph.nodes() {
            of[node] = match joint.side[node] {
                Side::Forward => boundaries.partition_point(|&boundary| boundary < node) as u32,
                // Where the last of its operands is.
                _ => data
                    .inputs
                    .iter()
                    .map(|&value| of[joint.node_of(value)])
                    .max()
                    .unwrap_or(0),
            };
        }
        let mut crossing = vec![EntitySet::new(); boundaries.len()];
        for value in heavy.iter() {
            if let Some(last) = last_use(value) {
                for unit in of[joint.node_of(value)]..of[last] {
                    crossing[unit as usize].insert(value);
                }
            }
        }
        Self { of, crossing }
    }

    /// Number of units.
    pub(crate) fn count(&self) -> usize {
        self.crossing.len() + 1
    }
}

/// Forward values that some kernel of its own must have run for, since the arguments.
fn heavy_values(joint: &Joint) -> EntitySet<Value> {
    let mut heavy = EntitySet::with_capacity(joint.graph.num_values());
    for (node, data) in joint.graph.nodes() {
        let kernel = Recompute::of(&data.op).is_kernel() && joint.side[node] != Side::Resident;
        if kernel || data.inputs.iter().any(|&value| heavy.contains(value)) {
            data.outputs.iter().for_each(|&value| {
                heavy.insert(value);
            });
        }
    }
    // Only forward values cross.
    let all: Vec<Value> = heavy.iter().collect();
    for value in all {
        if joint.side_of(value) != Side::Forward {
            heavy.remove(value);
        }
    }
    heavy
}
