//! The values that cross from the forward to the backward pass, chosen by a minimum cut.
//!
//! Every candidate node `n` (see [`crate::joint`]) becomes a vertex, and every value `v` that it defines
//! another one:
//!
//! ```text
//!              recompute(n)            keep(v)                 ∞
//!   source ─────────────────────► n ─────────────► v ──────────────────► sink   if a fixed node reads v
//!                                                  └────── ∞ ──► m              if candidate m reads v
//! ```
//!
//! A vertex on the sink's side is available in the backward pass. If `v` is on that side, one of two edges
//! is cut. Either `n` is on the sink's side too, and the cut goes through `source → n`: the node runs in
//! the backward pass. Or `n` is on the source's side, and the cut goes through `n → v`: the value is kept.
//! If `n` runs in the backward pass, everything that it reads must be available there, so the edges from
//! its operands cannot be cut. A node that must not be recomputed has an uncuttable edge from the source,
//! and a value that must not be kept (a random draw) an uncuttable edge from `n` to `v`. So the cuts of
//! this network are exactly the ways to run the backward pass, each with its cost, and a minimum cut is a
//! cheapest way; the test beside this file tries all of them.

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
        if joint.is_redrawn(value) {
            return INFINITE;
        }
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

    // Only values that the backward pass could ever need take part.
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

#[cfg(test)]
mod tests {
    use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, Op, ReduceOp, UnaryOp};
    use kiln_graph::{DType, Graph, Phase, Provenance, TensorType};
    use proptest::prelude::*;

    use super::*;
    use crate::{Machine, Options};

    /// One choice of the generator: an operation and where its operands come from.
    type Choice = (u8, usize, usize);

    /// Values of one type, to draw operands from.
    #[derive(Default)]
    struct Pool {
        matrices: Vec<Value>,
        vectors: Vec<Value>,
        masks: Vec<Value>,
    }

    fn of<T: Copy>(list: &[T], at: usize) -> T {
        list[at % list.len()]
    }

    /// One of the last few values, so that long chains occur.
    fn recent<T: Copy>(list: &[T], at: usize) -> T {
        list[list.len() - 1 - at % list.len().min(3)]
    }

    /// Adds one node and puts its result into the pool.
    fn grow(graph: &mut Graph, pool: &mut Pool, (op, a, b): Choice, phase: Phase) {
        let provenance = Provenance {
            phase,
            ..Provenance::default()
        };
        let shape: kiln_graph::Shape = [4, 4].into();
        let (x, y) = (recent(&pool.matrices, a), of(&pool.matrices, b));
        let add =
            |graph: &mut Graph, op, inputs: &[Value]| graph.add(op, inputs, &provenance).expect("well typed");
        match op % 10 {
            0 => pool.matrices.push(add(graph, Op::Unary(UnaryOp::Tanh), &[x])),
            1 | 2 => pool.matrices.push(add(graph, Op::Binary(BinaryOp::Mul), &[x, y])),
            3 | 4 => pool
                .matrices
                .push(add(graph, Op::DotGeneral(DotDims::matmul(0)), &[x, y])),
            5 => {
                let axes = Dims::from_slice(&[1]);
                pool.vectors.push(add(
                    graph,
                    Op::Reduce {
                        op: ReduceOp::Sum,
                        axes,
                    },
                    &[x],
                ));
            }
            6 if !pool.vectors.is_empty() => {
                let dims = Dims::from_slice(&[0]);
                pool.matrices.push(add(
                    graph,
                    Op::Broadcast { shape, dims },
                    &[recent(&pool.vectors, a)],
                ));
            }
            7 => pool.masks.push(add(graph, Op::Compare(CompareOp::Gt), &[x, y])),
            8 if !pool.masks.is_empty() => {
                pool.matrices
                    .push(add(graph, Op::Select, &[recent(&pool.masks, a), x, y]));
            }
            9 => pool
                .matrices
                .push(add(graph, Op::Transpose(Dims::from_slice(&[1, 0])), &[x])),
            _ => pool.matrices.push(add(graph, Op::Unary(UnaryOp::Neg), &[x])),
        }
    }

    /// A joint graph: forward nodes, then backward nodes that read them, the last of which depends on a
    /// product.
    fn joint_graph(forward: &[Choice], backward: &[Choice]) -> Graph {
        let mut graph = Graph::new("random");
        let ty = TensorType::new(DType::F32, [4, 4]);
        let mut pool = Pool::default();
        pool.matrices.push(graph.parameter(ty.clone()));
        let seed = graph.parameter(ty);
        forward
            .iter()
            .for_each(|&choice| grow(&mut graph, &mut pool, choice, Phase::Forward));
        graph.output(*pool.matrices.last().expect("never empty"), None);
        let provenance = Provenance {
            phase: Phase::Backward,
            ..Provenance::default()
        };
        let mut tangent = seed;
        for &choice in backward {
            grow(&mut graph, &mut pool, choice, Phase::Backward);
            let read = of(&pool.matrices, choice.1 + choice.2);
            let op = if choice.0 % 2 == 0 {
                Op::Binary(BinaryOp::Mul)
            } else {
                Op::DotGeneral(DotDims::matmul(0))
            };
            let product = Op::DotGeneral(DotDims::matmul(0));
            tangent = graph
                .add(product, &[tangent, seed], &provenance)
                .expect("well typed");
            tangent = graph.add(op, &[tangent, read], &provenance).expect("well typed");
        }
        graph.output(tangent, None);
        graph.without_dead_code()
    }

    fn choices(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Choice>> {
        prop::collection::vec((any::<u8>(), 0usize..64, 0usize..64), count)
    }

    /// Whether a dropout mask, or a part of its computation, is kept on a machine that draws this many
    /// elements per second; `output`: the step returns the mask.
    fn keeps_the_draw(per_second: f64, output: bool) -> bool {
        let graph = Graph::parse(&format!(
            "graph @dropout {{
  %x = parameter 0 : f32[8,8]
  %dy = parameter 1 : f32[8,8]
  %seed = scalar 0 : u64[]
  %stream = scalar 1 : u64[]
  %noise = random uniform %seed, %stream : f32[8,8]                        ; fwd
  %p = constant 0.9 : f32[]                                                ; fwd
  %ps = broadcast %p {{dims=[]}} : f32[8,8]                                  ; fwd
  %mask = compare lt %noise, %ps : bool[8,8]                               ; fwd
  %y = select %mask, %x, %ps : f32[8,8]                                    ; fwd
  %d = dot_general %dy, %x {{a_contract=[1], b_contract=[0]}} : f32[8,8]     ; bwd
  %dx = select %mask, %d, %ps : f32[8,8]                                   ; bwd
  return %y, %dx{}
}}",
            if output { ", %mask" } else { "" }
        ))
        .expect("well formed");
        let machine = Machine {
            random_per_second: per_second,
            ..Machine::default()
        };
        let options = Options {
            machine,
            ..Options::default()
        };
        let joint = Joint::new(&graph, &options).expect("valid");
        let kept = choose(&joint, &Steering::FASTEST).0;
        let drawn = ["random", "compare"];
        kept.iter()
            .any(|value| drawn.contains(&graph.def(value).op.name()))
    }

    #[test]
    fn draws_are_made_again_however_slow() {
        assert!(!keeps_the_draw(6e9, false));
        assert!(!keeps_the_draw(1.0, false));
        assert!(keeps_the_draw(1.0, true), "an output lies in memory anyway");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(320))]

        /// No set of kept values is cheaper than the chosen one, at any price, and its cost is what the cut
        /// says.
        #[test]
        fn the_choice_is_optimal(
            forward in choices(3..15),
            backward in choices(2..6),
            expensive: bool,
            price in prop::sample::select(vec![0.0, 90.0, 4000.0]),
            hold in prop::sample::select(vec![0.0, 35.0]),
            prologue: bool,
        ) {
            let graph = joint_graph(&forward, &backward);
            let options = Options {
                hold,
                dot_prologue: prologue,
                machine: Machine { special_per_second: 1e9, ..Machine::default() },
                ..Options::default()
            };
            let joint = Joint::new(&graph, &options).expect("valid");
            let steering = Steering { expensive, price, anchors: None };
            let cost = |kept: &EntitySet<Value>| -> u64 {
                let closure = joint.closure(kept, expensive);
                let held: u64 = closure.kept.iter().map(|value| steering.keep(&joint, value)).sum();
                held + closure.recomputed.iter().map(|node| joint.recompute(node)).sum::<u64>()
            };
            let (kept, value) = choose(&joint, &steering);
            prop_assert_eq!(cost(&kept), value);

            let needed = joint.closure(&EntitySet::new(), true);
            let candidates: Vec<Value> = graph.values()
                .filter(|(_, data)| needed.recomputed.contains(data.node))
                .map(|(value, _)| value)
                .collect();
            prop_assume!(candidates.len() <= 14);
            let best = (0..1usize << candidates.len()).map(|subset| {
                let mut kept = EntitySet::new();
                kept.extend((0..candidates.len()).filter(|&i| subset >> i & 1 == 1).map(|i| candidates[i]));
                cost(&kept)
            });
            prop_assert_eq!(best.min(), Some(value), "{}", graph);
        }
    }
}
