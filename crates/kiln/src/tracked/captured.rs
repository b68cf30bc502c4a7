//! Tensors that a function captures and that are trained.
//!
//! A function takes its tracked tensors as arguments; a tensor that it captures is not replaced by a leaf
//! of the trace. The trace's gradients reach such a tensor all the same, and Burn's autograd files its
//! gradient under the number of its node. So after the gradients of the leaves are taken out, the remaining
//! gradients belong to other leaves ([`Kind`]). Most are older than the trace. A parameter that was never
//! used before is drawn in it. And a detached argument is a leaf again if the argument is one: Burn's
//! softmax makes such a leaf, and nobody asks for its gradient.
//!
//! Burn tells the gradient of one number at a time, and not which numbers have one. But a remaining gradient
//! is a tensor of the recording with a handle that is not ours. So it is known how long to look: from the
//! newest node down to the last that has such a gradient. A function that captures nothing looks at no node
//! that is older than its trace, however many the program has made.
//!
//! A captured tensor that is not a leaf cannot be found in this way: the trace's gradients have run through
//! the operations that made it, which the program's own backward pass needs.

use std::sync::Arc;

use burn_autodiff::NodeId;
use burn_autodiff::grads::Gradients;
use burn_ir::{TensorId, TensorIr, TensorStatus};
use hashbrown::HashSet;
use kiln_burn::Kiln;
use kiln_burn::record::recording::{Input, Recorded};
use kiln_burn::table;

use super::{TrackedTensor, graph};
use crate::input::KilnTensor;

/// A leaf that the function did not take as an argument, and that has a gradient.
pub(super) struct Captured {
    /// The tensor in the program's graph.
    pub(super) tensor: TrackedTensor,
    pub(super) gradient: TensorIr,
}

/// What a leaf is to the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A tensor from before the trace.
    Older,
    /// A tensor that was drawn in the trace, and that the function captures from now on.
    Drawn,
    /// A tensor that was made in the trace from one that existed, and that the function may have kept. The
    /// next call makes another one.
    Kept,
    /// A tensor that was made in the trace and is no more.
    Gone,
}

/// What a function took and what it left behind.
pub(super) struct Forward<'a> {
    pub(super) recorded: &'a Recorded,
    /// How many of the recording's inputs it read.
    pub(super) reads: usize,
    /// The number of the first node of the trace.
    pub(super) first: u64,
    /// The tensors that it took.
    pub(super) arguments: &'a [TensorId],
    /// The gradients of its outputs, which were made when it had returned.
    pub(super) tangents: &'a [TensorId],
    /// The tensors that it computed from leaves and returned.
    pub(super) outputs: &'a [TensorId],
    /// Numbers of the leaves that it made and returned.
    pub(super) made: &'a [u64],
}

impl Forward<'_> {
    /// What `captured` is.
    pub(super) fn kind(&self, captured: &Captured) -> Kind {
        let number = captured.tensor.node.id.value;
        if number < self.first {
            return Kind::Older;
        }
        // A node does not tell its tensor, so each tensor of its type may be it.
        let is_it = |ir: &TensorIr| has_type(ir, &captured.gradient);
        let kept = |input: &&Input| {
            is_it(&input.ir) && !input.tensor_dies() && !self.arguments.contains(&input.ir.id)
        };
        let kept: Vec<&Input> = self.inputs().iter().filter(kept).collect();
        if kept.iter().any(|input| input.is_host_data()) || self.leaves_drawn(is_it) {
            Kind::Drawn
        } else if !kept.is_empty() || self.made.contains(&number) {
            Kind::Kept
        } else {
            Kind::Gone
        }
    }

    /// Whether `captured` may be one of the tensors that the function read, by its type. If it is none of
    /// them it was used to compute one.
    pub(super) fn reads(&self, captured: &Captured) -> bool {
        self.inputs()
            .iter()
            .any(|input| has_type(&input.ir, &captured.gradient))
    }

    /// The inputs of the recording that the function read.
    fn inputs(&self) -> &[Input] {
        &self.recorded.inputs[..self.reads]
    }

    /// Whether the function left behind a tensor that `is_it` and that follows from none that it took.
    fn leaves_drawn(&self, is_it: impl Fn(&TensorIr) -> bool) -> bool {
        let left = self.recorded.output_ids.iter().copied();
        let left: HashSet<TensorId> = left
            .filter(|&id| !is_later(id, self.tangents) && !self.outputs.contains(&id))
            .collect();
        if left.is_empty() {
            return false;
        }
        let mut following: HashSet<TensorId> = self.arguments.iter().copied().collect();
        for operation in &self.recorded.operations {
            let follows = operation.inputs().any(|input| following.contains(&input.id));
            for output in operation.outputs() {
                if follows {
                    following.insert(output.id);
                } else if left.contains(&output.id) && is_it(output) {
                    return true;
                }
            }
        }
        false
    }
}

fn has_type(ir: &TensorIr, like: &TensorIr) -> bool {
    ir.shape == like.shape && ir.dtype == like.dtype
}

/// Whether the tensor `id` was made when the function had returned: after the first of its tangents.
fn is_later(id: TensorId, tangents: &[TensorId]) -> bool {
    tangents
        .first()
        .is_some_and(|&tangent| table::number(id) > table::number(tangent))
}

/// The gradients of a trace besides those of its own leaves.
pub(super) struct Others {
    gradients: Gradients,
    /// Those whose leaves have not been found.
    open: HashSet<TensorId>,
    /// Handles of the gradients that were taken out: salvage gives a gradient elements, which end with the
    /// last handle.
    handles: Vec<KilnTensor>,
}

impl Others {
    /// What `gradients` still has when those in `taken` were taken out.
    pub(super) fn new(
        gradients: Gradients,
        taken: impl IntoIterator<Item = KilnTensor>,
        recorded: &Recorded,
        tangents: &[TensorId],
    ) -> Self {
        let made = recorded.output_ids.iter().copied();
        let mut others = Self {
            gradients,
            open: made.filter(|&id| is_later(id, tangents)).collect(),
            handles: Vec::new(),
        };
        for gradient in taken {
            others.take(gradient);
        }
        others
    }

    /// Notes that a gradient was taken out. Its status says whether this was the last handle: leaves of one
    /// type may share a gradient, the summands of a sum for example.
    fn take(&mut self, gradient: KilnTensor) -> TensorIr {
        let client = gradient.client;
        let ir = gradient.into_ir();
        if ir.status == TensorStatus::ReadWrite {
            self.open.remove(&ir.id);
            let handle = KilnTensor::new(ir.id, ir.shape.clone(), ir.dtype, client);
            self.handles.push(handle);
        } else {
            self.open.insert(ir.id);
        }
        ir
    }

    /// The leaves of the open gradients among the nodes of these `numbers`. Looks at no number behind the
    /// last one that has an open gradient. `like` is some tensor of the trace.
    pub(super) fn find(
        &mut self,
        like: &TrackedTensor,
        numbers: impl IntoIterator<Item = u64>,
    ) -> Vec<Captured> {
        let mut found = Vec::new();
        if self.open.is_empty() {
            return found;
        }
        let mut probe = graph::stand_in(like, 0);
        for value in numbers {
            if let Some(node) = Arc::get_mut(&mut probe.node) {
                node.id = NodeId { value };
            }
            let Some(gradient) = self.gradients.remove::<Kiln>(&probe) else {
                continue;
            };
            let mut tensor = std::mem::replace(&mut probe, graph::stand_in(like, 0));
            tensor.rc = Arc::new(tensor.node.id);
            found.push(Captured {
                tensor,
                gradient: self.take(gradient),
            });
            if self.open.is_empty() {
                break;
            }
        }
        found
    }
}

/// The numbers of all nodes, newest first.
pub(super) fn newest_first() -> impl Iterator<Item = u64> {
    (0..NodeId::new().value).rev()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use burn_autodiff::Autodiff;
    use burn_tensor::{Distribution, Tensor, activation};
    use kiln_burn::record::Traced;
    use kiln_burn::{CompileBackend, CompileOptions, CompiledRegion, KilnDevice};

    use super::super::graph::Places;
    use super::super::{Collect, Leaves, Trace, differentiate, id};
    use super::*;
    use crate::input::StepInput;

    type Vector = Tensor<Autodiff<Kiln>, 1>;

    /// Nodes that a program has made before it captures anything.
    const AGE: usize = 100_000;

    fn vector() -> Vector {
        Tensor::from_floats([1.0, 2.0, 3.0], &KilnDevice::cpu())
    }

    fn age() {
        (0..AGE).for_each(|_| {
            NodeId::new();
        });
    }

    /// The kinds of the leaves that are found in a call of `function`, and the number of nodes looked at.
    fn found(function: impl Fn(Vector) -> Vector) -> (Vec<Kind>, usize) {
        let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
        let region = CompiledRegion::new(options);
        let mut arguments = Collect::default();
        let x = vector().require_grad().map(&mut arguments);
        let places = Places::new(arguments.tracked);
        let traced = region.trace(
            false,
            || differentiate(&places, |leaves: &mut Leaves| function(x.map(leaves))),
            |trace, recorded| {
                let Trace {
                    outputs,
                    tangents,
                    gradients,
                    rest,
                    made,
                    reads,
                    ..
                } = trace;
                let tangents: Vec<TensorId> = tangents.iter().map(id).collect();
                let forward = Forward {
                    recorded: &recorded,
                    reads,
                    first: places.first(),
                    arguments: &arguments.ids,
                    tangents: &tangents,
                    outputs: &outputs.iter().map(id).collect::<Vec<_>>(),
                    made: &made,
                };
                let taken = gradients.into_iter().flatten();
                let mut others = Others::new(rest.unwrap(), taken, &recorded, &tangents);
                let looked_at = Cell::new(0);
                let numbers = newest_first().inspect(|_| looked_at.set(looked_at.get() + 1));
                let found = others.find(&places.leaves[0], numbers);
                assert!(others.open.is_empty(), "a gradient has no leaf");
                let kinds = found.iter().map(|captured| forward.kind(captured)).collect();
                Ok((kinds, looked_at.get()))
            },
        );
        match traced.unwrap() {
            Traced::Whole(found) => found,
            Traced::Cut(_) => panic!("the function read a value"),
        }
    }

    #[test]
    fn a_function_that_captures_nothing_trained_looks_at_no_node() {
        let constant = vector();
        age();
        assert_eq!(found(|x| x.clone() * constant.clone() + x.exp()), (Vec::new(), 0));
    }

    #[test]
    fn a_detached_argument_is_gone() {
        age();
        let (kinds, looked_at) = found(|x| activation::softmax(x.clone(), 0) * x);
        assert_eq!(kinds, [Kind::Gone]);
        assert!(looked_at < AGE, "{looked_at}");
    }

    #[test]
    fn what_is_captured_is_found_from_the_newest_node_down() {
        age();
        let (captured, other) = (vector().require_grad(), vector().require_grad());
        // The sum's gradient is that of all its terms.
        let (kinds, looked_at) = found(|x| x + captured.clone() + other.clone());
        assert_eq!(kinds, [Kind::Older; 2]);
        assert!(looked_at < AGE, "{looked_at}");
    }

    #[test]
    fn what_is_made_in_the_call_and_kept_is_not_gone() {
        let kept = RefCell::new(None::<Vector>);
        let base = vector();
        let multiply = |x: Vector, leaf: Vector| {
            *kept.borrow_mut() = Some(leaf.clone());
            x * leaf
        };
        let drawn = || Vector::random([3], Distribution::Default, &KilnDevice::cpu());
        assert_eq!(found(|x| multiply(x, drawn().require_grad())).0, [Kind::Drawn]);
        assert_eq!(
            found(|x| multiply(x, (drawn() * 2.0).require_grad())).0,
            [Kind::Drawn]
        );
        assert_eq!(found(|x| multiply(x, vector().require_grad())).0, [Kind::Drawn]);
        let copy = || base.clone().detach().require_grad();
        assert_eq!(found(|x| multiply(x, copy())).0, [Kind::Kept]);
        assert_eq!(found(|x| x * drawn().require_grad()).0, [Kind::Gone]);
    }
}
