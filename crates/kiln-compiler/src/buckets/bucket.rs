//! One bucket: what travels together, started and waited for.
//!
//! Sums are joined as rows of elements. Shares are joined as a matrix with one row for each of `n` ranks, so
//! that the rank's row of the whole has the rank's share of each tensor:
//!
//! ```text
//!   all_reduce       a, b                concat a, b                       sums of all
//!   reduce_scatter   [n, a/n], [n, b/n]  concat along columns [n, (a+b)/n] own row [1, (a+b)/n]
//!   all_gather       [1, a], [1, b]      concat along columns [1, a+b]     all rows [n, a+b]
//! ```

use kiln_graph::op::Op;
use kiln_graph::{
    Collective, CollectiveKind, DType, Graph, Node, NodeData, Phase, Provenance, Rewriter, Shape, TypeError,
    Users, Value,
};

use super::{Buckets, index, is_copied, is_sum};

/// A collective of the old graph that travels with others.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub node: Node,
    pub operand: Value,
    /// Movements and casts that lead from what is computed to the operand, in their order: they are computed
    /// when the bucket starts, wherever the program has them.
    movements: Vec<Node>,
    /// The node behind which it can be started.
    pub ready: usize,
    /// The node in front of which it must be complete; the number of nodes if none reads it.
    pub needed: usize,
}

impl Member {
    pub(super) fn new(graph: &Graph, users: &Users, node: Node, data: &NodeData) -> Self {
        let operand = data.inputs[0];
        let mut movements = Vec::new();
        let mut ready = Some(0);
        let mut stack = vec![operand];
        while let Some(value) = stack.pop() {
            let maker = graph.value(value).node;
            let made = graph.node(maker);
            if is_sum(&made.op) {
                // A sum of a sum follows its wait.
                ready = None;
            } else if is_packing(&made.op) {
                if !movements.contains(&maker) {
                    movements.push(maker);
                    stack.extend(&made.inputs);
                }
            } else {
                ready = ready.map(|ready| ready.max(index(maker)));
            }
        }
        if ready.is_none() {
            movements.clear();
        }
        movements.sort_unstable();
        let needed = users.of(data.outputs[0]).iter().map(|&user| index(user)).min();
        Self {
            node,
            operand,
            movements,
            ready: ready.unwrap_or(index(node)),
            needed: needed.unwrap_or(graph.num_nodes()),
        }
    }
}

/// Whether an operation may take part in packing an operand: it moves elements, changes their type, or makes
/// constants that fill up. Unlike [`Op::is_movement`] that leaves out what takes elements away or turns them
/// around. A gradient of 16 bits is cast where its sum is, which is behind the whole backward pass.
fn is_packing(op: &Op) -> bool {
    matches!(
        op,
        Op::Cast(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Concat { .. }
            | Op::Pad { .. }
            | Op::Broadcast { .. }
            | Op::Constant { .. }
    )
}

/// Collectives that travel together.
#[derive(Debug)]
pub(super) struct Bucket {
    pub members: Vec<Member>,
    collective: Collective,
    dtype: DType,
    /// Of the largest that the collective has on a rank, operand or result.
    bytes: usize,
    /// The wait's operands, once it is started: what is under way, and what it is made of.
    begun: Option<(Value, Value)>,
}

/// Adds `member` to the last of `buckets`, or to a new one.
pub(super) fn join(graph: &Graph, buckets: &mut Vec<Bucket>, member: Member, sizes: &Buckets) {
    let data = graph.node(member.node);
    let Op::Collective(collective) = data.op else {
        return;
    };
    let ty = graph.ty(member.operand);
    let bytes = ty.bytes().max(graph.ty(data.outputs[0]).bytes());
    let alike = |bucket: &Bucket| bucket.dtype == ty.dtype && bucket.collective == collective;
    let limit = match buckets.iter().filter(|bucket| alike(bucket)).count() {
        0 | 1 => sizes.first,
        _ => sizes.others,
    };
    match buckets.last_mut() {
        Some(bucket) if alike(bucket) && bucket.bytes + bytes <= limit => {
            bucket.bytes += bytes;
            bucket.members.push(member);
        }
        _ => buckets.push(Bucket {
            members: vec![member],
            collective,
            dtype: ty.dtype,
            bytes,
            begun: None,
        }),
    }
}

impl Bucket {
    fn provenance(&self, graph: &Graph, phase: Phase) -> Provenance {
        Provenance {
            phase,
            ..graph.node(self.members[0].node).provenance.clone()
        }
    }

    /// Whether it gives each rank its share.
    pub(super) fn is_of_shares(&self) -> bool {
        self.collective.kind == CollectiveKind::ReduceScatter
    }

    /// Whether it was started.
    pub(super) fn is_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// The dimension along which tensors are joined.
    fn axis(&self) -> usize {
        usize::from(!self.collective.kind.is_in_place())
    }

    /// The shape of a tensor of so many elements in the bucket's operand.
    fn given(&self, elements: usize) -> Shape {
        match self.collective.kind {
            CollectiveKind::ReduceScatter => [self.collective.ranks, elements / self.collective.ranks].into(),
            CollectiveKind::AllGather => [1, elements].into(),
            CollectiveKind::AllReduce | CollectiveKind::FromRoot => [elements].into(),
        }
    }

    /// Joins the operands and starts the collective.
    pub(super) fn start(&mut self, graph: &Graph, new: &mut Rewriter<'_>) -> Result<(), TypeError> {
        let phase = match self.collective.kind.reduces() {
            true => Phase::Backward,
            false => Phase::Optimizer,
        };
        let p = self.provenance(graph, phase);
        let whole = match &self.members[..] {
            [alone] => self.alone(graph, new, alone)?,
            members => {
                let mut parts = Vec::with_capacity(members.len());
                for member in members {
                    move_to_operand(graph, new, member)?;
                    let shape = self.given(graph.ty(member.operand).numel());
                    let operand = new.map(member.operand);
                    parts.push(new.graph.add(Op::Reshape(shape), &[operand], &p)?);
                }
                new.graph.add(Op::Concat { axis: self.axis() }, &parts, &p)?
            }
        };
        let started = Collective {
            started: true,
            ..self.collective
        };
        let begun = new.graph.add(Op::Collective(started), &[whole], &p)?;
        self.begun = Some((begun, whole));
        Ok(())
    }

    /// The operand of a collective that travels by itself. Where it is a gradient in another shape, of which
    /// each rank gets whole rows, that is the gradient: it need not be copied.
    fn alone(&self, graph: &Graph, new: &mut Rewriter<'_>, member: &Member) -> Result<Value, TypeError> {
        let mut source = member.operand;
        while let Op::Reshape(_) = graph.def(source).op
            && self.collective.kind == CollectiveKind::ReduceScatter
        {
            source = graph.def(source).inputs[0];
        }
        let rows = graph.shape(source).first().copied().unwrap_or(1);
        if self.collective.kind == CollectiveKind::ReduceScatter
            && rows % self.collective.ranks == 0
            && let Some(source) = new.get(source)
        {
            return Ok(source);
        }
        move_to_operand(graph, new, member)?;
        Ok(new.map(member.operand))
    }

    /// Waits; from now on the results replace those of the old graph.
    pub(super) fn wait(&self, graph: &Graph, new: &mut Rewriter<'_>) -> Result<(), TypeError> {
        let Some((begun, operand)) = self.begun else {
            return Ok(());
        };
        let p = self.provenance(graph, Phase::Optimizer);
        let operands = match self.collective.kind.is_in_place() {
            true => vec![begun],
            false => vec![begun, operand],
        };
        let whole = new.graph.add(Op::CollectiveWait, &operands, &p)?;
        let mut at = 0;
        for member in &self.members {
            let result = graph.node(member.node).outputs[0];
            let shape = graph.shape(result);
            let mut part = whole;
            if self.members.len() > 1 {
                let all = new.graph.shape(whole);
                let rows: usize = all[..self.axis()].iter().product();
                let columns = shape.numel() / rows;
                let slice = Op::slice(all, self.axis(), at..at + columns);
                at += columns;
                part = new.graph.add(slice, &[whole], &p)?;
            }
            if new.graph.shape(part) != shape {
                part = new.graph.add(Op::Reshape(shape.clone()), &[part], &p)?;
            }
            new.replace(result, part);
        }
        Ok(())
    }
}

/// Copies the movements that make the operand of `member`, as far as that was not done.
fn move_to_operand(graph: &Graph, new: &mut Rewriter<'_>, member: &Member) -> Result<(), TypeError> {
    for &node in &member.movements {
        if !is_copied(new, graph.node(node)) {
            new.copy(node)?;
        }
    }
    Ok(())
}
