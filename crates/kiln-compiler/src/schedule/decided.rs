//! Values that decisions depend on.
//!
//! A target may take functions that are a little off where all that becomes of their results is rounded to 16
//! bits. Now and then an element then rounds to a neighbour of what it should be: no loss, unless something
//! is decided by it. A gradient that asks which elements equal the maximum finds none if its kernel computes
//! them again in another way than the kernel that looked for the maximum did.
//!
//! So what a decision reads is *decided*, and with it all that its kernel computes that from. A value that
//! several kernels compute, be it by the same operation or by a copy of it (the partition makes them), is
//! decided in all of them if it is in one. What one kernel computes and others load is the same number for
//! all, whatever gave it.

use std::sync::Arc;

use kiln_graph::op::{BinaryOp, Op, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, Node, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use super::bits::passed;
use super::{Kernel, KernelKind};

/// Tells all nests of a step which values are decided.
pub(super) fn mark(graph: &Graph, kernels: &mut [Kernel]) {
    let short = short(graph);
    if short.is_empty() {
        return;
    }
    let decided = Arc::new(decided(graph, kernels, &short));
    for kernel in kernels {
        let nests = match &mut kernel.kind {
            KernelKind::Nest(nest) | KernelKind::Contraction(_, nest) => std::slice::from_mut(&mut **nest),
            KernelKind::Together(nests) => nests,
            KernelKind::Library(_) => &mut [],
        };
        let prologues = kernel.prologues.iter_mut().map(|prologue| &mut prologue.nest);
        for nest in nests.iter_mut().chain(prologues) {
            nest.decided = Arc::clone(&decided);
        }
    }
}

fn decided(graph: &Graph, kernels: &[Kernel], short: &FxHashSet<Value>) -> FxHashSet<Value> {
    let nests = kernels.iter().flat_map(|kernel| {
        let prologues = kernel.prologues.iter().map(|prologue| &prologue.nest);
        kernel.nests().iter().chain(prologues)
    });
    let computed: Vec<Vec<Node>> = nests.map(|nest| nest.computed(graph)).collect();
    let first = firsts(graph);
    // Where each value is computed, by the first operation that does.
    let mut made: FxHashMap<Value, Vec<(usize, Node)>> = FxHashMap::default();
    let mut here: FxHashSet<(usize, Node)> = FxHashSet::default();
    for (nest, nodes) in computed.iter().enumerate() {
        for &node in nodes {
            here.insert((nest, node));
            for output in &graph.node(node).outputs {
                made.entry(first[output]).or_default().push((nest, node));
            }
        }
    }
    let is_here = |nest: usize, value: Value| here.contains(&(nest, graph.value(value).node));
    let mut found: FxHashSet<Value> = FxHashSet::default();
    let mut next: Vec<Value> = Vec::new();
    for (nest, nodes) in computed.iter().enumerate() {
        for data in nodes.iter().map(|&node| graph.node(node)) {
            for (place, value) in data.inputs.iter().enumerate() {
                let is_read = || decides(&data.op, place, short.contains(value));
                let is_made =
                    || is_here(nest, *value) || made.get(&first[value]).is_some_and(|it| it.len() > 1);
                if is_read() && is_made() && found.insert(first[value]) {
                    next.push(first[value]);
                }
            }
        }
    }
    let mut all = FxHashSet::default();
    while let Some(value) = next.pop() {
        for &(nest, node) in made.get(&value).into_iter().flatten() {
            let data = graph.node(node);
            all.extend(data.outputs.iter().copied());
            let operands = data.inputs.iter().filter(|&&operand| is_here(nest, operand));
            next.extend(
                operands
                    .map(|operand| first[operand])
                    .filter(|&operand| found.insert(operand)),
            );
        }
    }
    all
}

/// For each value the first one that the same operation on equal operands gives.
fn firsts(graph: &Graph) -> FxHashMap<Value, Value> {
    let mut first: FxHashMap<Value, Value> = FxHashMap::default();
    let mut known: FxHashMap<(&Op, Vec<Value>), Node> = FxHashMap::default();
    for (node, data) in graph.nodes() {
        let operands = data.inputs.iter().map(|operand| first[operand]).collect();
        let same = *known.entry((&data.op, operands)).or_insert(node);
        first.extend(
            data.outputs
                .iter()
                .copied()
                .zip(graph.node(same).outputs.iter().copied()),
        );
    }
    first
}

/// The values whose elements are numbers of 16 bits, be they widened, moved or chosen since.
fn short(graph: &Graph) -> FxHashSet<Value> {
    let mut short = FxHashSet::default();
    for (_, data) in graph.nodes() {
        let among = match &data.op {
            Op::Cast(to) if to.is_float() => 0..1,
            Op::Reduce {
                op: ReduceOp::Max | ReduceOp::Min,
                ..
            } => 0..1,
            op => passed(op, data.inputs.len()).unwrap_or_default(),
        };
        let moves = data.inputs[among].iter().any(|operand| short.contains(operand));
        let is_short = |value: &Value| moves || matches!(graph.dtype(*value), DType::F16 | DType::BF16);
        short.extend(data.outputs.iter().copied().filter(is_short));
    }
    short
}

/// Whether a little more or less of operand number `place` may change what `op` makes of it altogether.
/// `is_short` says whether its elements are numbers of 16 bits: what becomes of their maximum or minimum may
/// be looked for by its value.
fn decides(op: &Op, place: usize, is_short: bool) -> bool {
    match op {
        Op::Reduce {
            op: ReduceOp::Max | ReduceOp::Min,
            ..
        }
        | Op::Binary(BinaryOp::Max | BinaryOp::Min) => is_short,
        Op::Unary(op) => {
            use UnaryOp::{Ceil, Floor, IsInf, IsNan, Not, Round, Sign, Trunc};
            matches!(op, Sign | Not | Floor | Ceil | Round | Trunc | IsNan | IsInf)
        }
        Op::Binary(op) => {
            use BinaryOp::{Add, Atan2, Div, Mul, Pow, Sub};
            !matches!(op, Add | Sub | Mul | Div | Pow | Atan2)
        }
        Op::Select => place == 0,
        Op::Gather { .. } | Op::IndexSelect { .. } => place > 0,
        Op::Cast(to) => !to.is_float(),
        Op::Reduce { .. } => false,
        op => !op.is_movement() && !op.is_contraction(),
    }
}

#[cfg(test)]
mod tests {
    use crate::options::Options;
    use crate::schedule::fuse::schedule;
    use crate::testing::POLICY;
    use kiln_graph::{Graph, Op};

    /// How many exponentials are decided in a step of which the forward pass stores a rounded one, and the
    /// backward pass computes it again for `%r`.
    fn decided(r: &str) -> usize {
        let graph = Graph::parse(&format!(
            "graph @again {{
  %x = parameter 0 : f32[64,48]
  %d = parameter 1 : f32[64,48]
  %e = exp %x : f32[64,48] ; fwd
  %y = cast %e : bf16[64,48] ; fwd
  %f = exp %x : f32[64,48] ; bwd
  %z = cast %f : bf16[64,48] ; bwd
  %w = cast %z : f32[64,48] ; bwd
  %r = {r} ; bwd
  return %y, %r
}}"
        ))
        .unwrap();
        let schedule = schedule(&graph, &Options::default(), &POLICY);
        let nests: Vec<_> = schedule.kernels.iter().flat_map(|it| it.nests()).collect();
        assert_eq!(nests.len(), 2, "{}", schedule.to_text(&graph));
        let exponentials = graph.nodes().filter(|(_, data)| matches!(data.op, Op::Unary(_)));
        let values: Vec<_> = exponentials.map(|(_, data)| data.outputs[0]).collect();
        let of_nest = |at: usize| {
            values
                .iter()
                .filter(|value| nests[at].decided.contains(value))
                .count()
        };
        assert_eq!(of_nest(0), of_nest(1));
        of_nest(0)
    }

    #[test]
    fn what_a_kernel_decides_by_is_decided_in_others() {
        assert_eq!(decided("compare gt %w, %d : bool[64,48]"), 2);
        assert_eq!(decided("reduce max %w {axes=[1]} : f32[64]"), 2);
        assert_eq!(decided("mul %w, %d : f32[64,48]"), 0);
        assert_eq!(decided("reduce sum %w {axes=[1]} : f32[64]"), 0);
    }

    /// What a product reads is not the nest's behind it, and decides nothing.
    #[test]
    fn products_decide_nothing_for_the_nests_behind_them() {
        let graph = Graph::parse(
            "graph @layers {
  %x = parameter 0 : f32[64,48]
  %u = parameter 1 : f32[48,32]
  %v = parameter 2 : f32[32,16]
  %b = parameter 3 : f32[64,16]
  %h = dot_general %x, %u {a_contract=[1], b_contract=[0]} : f32[64,32]
  %e = exp %h : f32[64,32]
  %p = dot_general %e, %v {a_contract=[1], b_contract=[0]} : f32[64,16]
  %s = add %p, %b : f32[64,16]
  %y = cast %s : bf16[64,16]
  return %y
}",
        )
        .unwrap();
        let schedule = schedule(&graph, &Options::default(), &POLICY);
        let nests: Vec<_> = schedule.kernels.iter().flat_map(|it| it.nests()).collect();
        let text = schedule.to_text(&graph);
        let last = graph.value(graph.outputs[0].value).node;
        let behind = nests.iter().find(|nest| nest.members.contains(&last)).unwrap();
        let computed: Vec<_> = behind
            .computed(&graph)
            .iter()
            .map(|&node| graph.node(node).op.name())
            .collect();
        assert_eq!(computed, ["dot_general", "add", "cast"], "{text}");
        assert!(nests.iter().all(|nest| nest.decided.is_empty()), "{text}");
    }
}
