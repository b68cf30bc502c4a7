//! What crosses from the forward to the backward pass, chosen by a minimum cut.
//!
//! Every candidate node `n` (see [`crate::joint`]) becomes a vertex, and every value `v` that it defines another one:
//!
//! ```text
//!              recompute(n)            keep(v)                 ∞
//!   source ─────────────────────► n ─────────────► v ──────────────────► sink   if a fixed node reads v
//!                                                  └────── ∞ ──► m              if candidate m reads v
//! ```
//!
//! A vertex on the sink's side is something the backward pass has. If `v` is there, either `n` is too, and the cut goes
//! through `source → n`: the node runs in the backward pass; or the cut goes through `n → v`: the value is kept. If `n` runs
//! there, so must everything it reads be there: the edges from its operands cannot be cut. What must not be
//! recomputed has an uncuttable edge from the source. So the cuts of this network are exactly the ways to run the backward
//! pass, each with its cost, and a minimum cut is a cheapest one; the test beside this file tries all of them.

use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::{Node, Value};

use crate::flow::{INFINITE, Network, Vertex};
use crate::joint::{Joint, Side};

/// How the choice is steered away from the fastest one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steering<'a> {
    /// Whether expensive operations may be recomputed.
    pub(crate) expensive: bool,
    /// Price of keeping a byte, in picoseconds, on top of [`Joint::keep`].
    pub(crate) price: f64,
    /// Values that are kept whatever it costs: they count as free.
    pub(crate) anchors: Option<&'a EntitySet<Value>>,
}

impl Steering<'_> {
    /// The fastest choice.
    pub(crate) const FASTEST: Steering<'static> = Steering {
        expensive: false,
        price: 0.0,
        anchors: None,
    };

    fn keep(&self, joint: &Joint, value: Value) -> u64 {
        if self.anchors.is_some_and(|anchors| anchors.contains(value)) {
            return 0;
        }
        let held = if joint.users.outputs(value) > 0 {
            0.0
        } else {
            crate::cost::bytes(joint.graph, value) as f64
        };
        joint.keep(value) + (held * self.price).round() as u64
    }
}

/// The values to keep so that cost is minimal, and that cost in picoseconds (with the price of kept bytes).
pub(crate) fn choose(joint: &Joint, steering: &Steering) -> (EntitySet<Value>, u64) {
    let graph = joint.graph;
    let mut network = Network::new();
    let none = Vertex::MAX;
    let mut node_vertex: SecondaryMap<Node, Vertex> = SecondaryMap::with_default(none);
    let mut value_vertex: SecondaryMap<Value, Vertex> = SecondaryMap::with_default(none);

    // Only what the backward pass could ever need takes part.
    let needed = joint.closure(&EntitySet::new(), true);
    for (node, data) in graph.nodes() {
        let kept_anyway = data.outputs.iter().any(|&value| needed.kept.contains(value));
        if !needed.recomputed.contains(node) && !kept_anyway {
            continue;
        }
        let vertex = network.vertex();
        node_vertex[node] = vertex;
        let again = if joint.may_recompute(node, steering.expensive) {
            joint.recompute(node)
        } else {
            INFINITE
        };
        if again > 0 {
            network.edge(Network::SOURCE, vertex, again);
        }
        for &value in &data.outputs {
            let there = network.vertex();
            value_vertex[value] = there;
            network.edge(vertex, there, steering.keep(joint, value));
            if joint.demanded(value) {
                network.edge(there, Network::SINK, INFINITE);
            }
        }
        if joint.may_recompute(node, true) {
            for &value in &data.inputs {
                if joint.side_of(value) != Side::Resident {
                    network.edge(value_vertex[value], vertex, INFINITE);
                }
            }
        }
    }

    let (cost, sink_side) = network.minimum_cut();
    let there = |vertex: Vertex| vertex != none && sink_side[vertex as usize];
    let mut kept = EntitySet::new();
    for (value, data) in graph.values() {
        if there(value_vertex[value]) && !there(node_vertex[data.node]) {
            kept.insert(value);
        }
    }
    (kept, cost)
}
