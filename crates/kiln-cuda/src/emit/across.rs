//! Collectives of all ranks.
//!
//! A collective is a call of NCCL's, from the operand's memory to the result's: it needs no kernel and no
//! working memory. A collective that is only *started* ([`kiln_compiler::buckets`]) is the same call: the step's
//! graph runs it beside the kernels that follow, because they touch none of its bytes. The wait is what comes
//! after it. It has no call where it works in place, and is a copy where the plan gives its result other memory.

use kiln_distributed::nccl::added_type;
use kiln_graph::{Collective, Graph, Node};

use super::library::copy;
use super::{Argument, Call, KernelCode};
use crate::code::Across;

/// The code of a collective; none if NCCL does not add up elements of that type.
pub fn collective(graph: &Graph, node: Node, collective: Collective) -> Option<KernelCode> {
    let data = graph.node(node);
    let ty = graph.ty(data.inputs[0]);
    if collective.kind.reduces() && added_type(ty.dtype).is_none() {
        return None;
    }
    let across = Across {
        kind: collective.kind.name().to_owned(),
        ranks: collective.ranks,
        mean: collective.mean,
        root: collective.root,
        dtype: ty.dtype.name().to_owned(),
        elements: ty.numel(),
    };
    Some(KernelCode {
        calls: vec![Call::Across(Box::new(across), places(graph, node))],
        scratch: 0,
    })
}

/// The code of the wait for a collective that was started.
pub fn wait(graph: &Graph, node: Node) -> KernelCode {
    let data = graph.node(node);
    let (from, to) = (data.inputs[0], data.outputs[0]);
    KernelCode {
        calls: vec![Call::Wait(Box::new(copy(graph, from, to)), places(graph, node))],
        scratch: 0,
    }
}

/// Operand and result.
fn places(graph: &Graph, node: Node) -> [Argument; 2] {
    let data = graph.node(node);
    [data.inputs[0], data.outputs[0]].map(Argument::value)
}
