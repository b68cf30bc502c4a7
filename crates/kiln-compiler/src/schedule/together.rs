//! Small kernels together: one for all updates, for all casts of arguments, for all pieces of a bucket.
//!
//! A model has many small parameters, such as biases and the scales of normalisations. Updating each is a
//! loop over a few hundred elements that costs a call, and a kernel to look at in every report. Updates whose
//! results leave the step are independent of each other, so the small ones become one kernel, which walks
//! through a table of tensors. Large ones stay alone: they run where their gradient was just made.

use rustc_hash::FxHashSet;

use kiln_graph::{Graph, Node, Op, Phase, Users, Value};

use super::buffer::Buffer;
use super::kernel::{Kernel, KernelKind};
use super::nest::Nest;
use crate::policy::Policy;

/// Joins the small updates among `kernels` into one kernel.
pub fn join_updates(graph: &Graph, policy: &Policy, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let read: FxHashSet<Buffer> = kernels.iter().flat_map(|kernel| &kernel.reads).copied().collect();
    let (mut small, mut others): (Vec<Kernel>, Vec<Kernel>) = kernels
        .into_iter()
        .partition(|kernel| is_small_update(graph, policy, kernel, &read));
    let given: usize = graph
        .parameters()
        .iter()
        .map(|&value| graph.ty(value).numel())
        .sum();
    let mut left = given as i64 / policy.joined_share;
    small.sort_by_key(points);
    let fitting = small.iter().take_while(|kernel| {
        left -= points(kernel);
        left >= 0
    });
    let fitting = fitting.count();
    others.extend(small.drain(fitting..));
    others.extend(side_by_side(small));
    others
}

/// Joins the kernels that only cast arguments into one: these make the 16-bit copies of parameters, which
/// products read. They depend on nothing, and most copies are needed until the backward pass has read them
/// too. A nest that casts an argument as one piece of a concatenation and copies another piece depends on that.
pub fn join_casts(graph: &Graph, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let casts = |&node: &Node| {
        let data = graph.node(node);
        matches!(data.op, Op::Cast(_)) && matches!(graph.def(data.inputs[0]).op, Op::Parameter { .. })
    };
    let given = |buffer: &Buffer| matches!(graph.def(buffer.value(graph)).op, Op::Parameter { .. });
    let (casts, mut others): (Vec<Kernel>, Vec<Kernel>) = kernels.into_iter().partition(|kernel| {
        matches!(&kernel.kind, KernelKind::Nest(nest) if nest.split.is_none() && !nest.members.is_empty())
            && kernel.nodes.iter().all(casts)
            && kernel.reads.iter().all(given)
    });
    // Parts of the step that share no kernels: those of the forward pass, those behind it, and chunks. Copies
    // ([`weights`](crate::weights)) are for later than what is cast, on which the first operations wait.
    let part = |kernel: &Kernel| {
        let data = graph.node(kernel.nodes[0]);
        let provenance = &data.provenance;
        let copies = graph.dtype(data.inputs[0]) == graph.dtype(data.outputs[0]);
        (provenance.phase.is_after_forward(), provenance.chunk, copies)
    };
    let mut parts: Vec<Vec<Kernel>> = Vec::new();
    for kernel in casts {
        match parts.iter_mut().find(|list| part(&list[0]) == part(&kernel)) {
            Some(list) => list.push(kernel),
            None => parts.push(vec![kernel]),
        }
    }
    others.extend(parts.into_iter().flat_map(side_by_side));
    others
}

/// Joins the small kernels that make the pieces of one bucket ([`crate::buckets`]) into one kernel: copies
/// and casts of gradients, updates of parameters that are gathered. The bucket starts behind the last of
/// them, so none is wanted earlier.
pub fn join_pieces(graph: &Graph, policy: &Policy, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let users = graph.users();
    let read: FxHashSet<Buffer> = kernels.iter().flat_map(|kernel| &kernel.reads).copied().collect();
    let bucket = |kernel: &Kernel| {
        let KernelKind::Nest(nest) = &kernel.kind else {
            return None;
        };
        if nest.split.is_some() || !nest.late.is_empty() || points(kernel) > policy.joined_update {
            return None;
        }
        let mut inside = kernel.writes.iter().filter(|&buffer| read.contains(buffer));
        match (inside.next(), inside.next()) {
            (Some(&Buffer::Value(whole)), None) if is_bucket(graph, &users, whole) => Some(whole),
            _ => None,
        }
    };
    let mut others = Vec::new();
    let mut lists: Vec<(Value, Vec<Kernel>)> = Vec::new();
    for kernel in kernels {
        let Some(bucket) = bucket(&kernel) else {
            others.push(kernel);
            continue;
        };
        match lists.iter_mut().find(|(of, _)| *of == bucket) {
            Some((_, list)) => list.push(kernel),
            None => lists.push((bucket, vec![kernel])),
        }
    }
    others.extend(lists.into_iter().flat_map(|(_, list)| side_by_side(list)));
    others
}

/// Whether a value is what a bucket of collectives is made of.
pub fn is_bucket(graph: &Graph, users: &Users, value: Value) -> bool {
    let travels = |&node: &Node| matches!(graph.node(node).op, Op::Collective(it) if it.started);
    let waits = |node: &Node| graph.node(*node).op == Op::CollectiveWait;
    let users = users.of(value);
    matches!(graph.def(value).op, Op::Concat { .. })
        && users.iter().any(travels)
        && users.iter().all(|user| travels(user) || waits(user))
}

/// Nests that do not depend on each other as one kernel, if there are several.
fn side_by_side(mut small: Vec<Kernel>) -> Vec<Kernel> {
    if small.len() < 2 {
        return small;
    }
    small.sort_by_key(|kernel| kernel.nodes.first().copied());
    let mut nests: Vec<Nest> = Vec::new();
    let mut joined = Kernel {
        kind: KernelKind::Together(Vec::new()),
        reads: Vec::new(),
        writes: Vec::new(),
        nodes: Vec::new(),
        prologues: Vec::new(),
        part: None,
    };
    for kernel in small {
        if let KernelKind::Nest(nest) = kernel.kind {
            nests.push(*nest);
        }
        joined.reads.extend(kernel.reads);
        joined.writes.extend(kernel.writes);
        joined.nodes.extend(kernel.nodes);
    }
    for buffers in [&mut joined.reads, &mut joined.writes] {
        buffers.sort_unstable();
        buffers.dedup();
    }
    joined.kind = KernelKind::Together(nests);
    vec![joined]
}

fn points(kernel: &Kernel) -> i64 {
    kernel.nests().iter().map(|nest| nest.points(nest.all())).sum()
}

/// Whether `kernel` updates a small tensor and no kernel of the step reads the result, so that it can run
/// at any time after its operands are made.
fn is_small_update(graph: &Graph, policy: &Policy, kernel: &Kernel, read: &FxHashSet<Buffer>) -> bool {
    let KernelKind::Nest(nest) = &kernel.kind else {
        return false;
    };
    let reduces = nest
        .members
        .iter()
        .any(|&node| matches!(graph.node(node).op, Op::Reduce { .. }));
    let phases = || kernel.nodes.iter().map(|&node| graph.node(node).provenance.phase);
    let update = phases().any(|phase| phase == Phase::Optimizer)
        && phases().all(|phase| matches!(phase, Phase::Optimizer | Phase::Backward));
    !nest.members.is_empty()
        && !reduces
        && nest.split.is_none()
        && points(kernel) <= policy.joined_update
        && update
        && kernel.writes.iter().all(|buffer| !read.contains(buffer))
}
