//! Tensors that a function captures and that are trained.
//!
//! A function takes its tracked tensors as arguments; a tensor that it captures is not replaced by a leaf
//! of the trace. The trace's gradients reach such a tensor all the same, and Burn's autograd files its
//! gradient under the number of its node. So after the gradients of the leaves are taken out, the remaining
//! gradients belong to tensors that the function captures. Most such tensors are older than the trace; a
//! parameter that was never used before is drawn in it.
//!
//! A captured tensor that is not a leaf cannot be found in this way: the trace's gradients have run through
//! the operations that made it, which the program's own backward pass needs.

use std::sync::Arc;

use burn_autodiff::NodeId;
use burn_autodiff::grads::Gradients;
use burn_backend::TensorMetadata;
use kiln_burn::Kiln;
use kiln_burn::record::recording::Input;

use super::{TrackedTensor, graph};
use crate::input::KilnTensor;

/// A captured leaf.
pub(super) struct Captured {
    /// The tensor in the program's graph.
    pub(super) tensor: TrackedTensor,
    pub(super) gradient: KilnTensor,
    /// Whether the tensor was made during the trace: a parameter that had not been drawn yet.
    is_new: bool,
}

impl Captured {
    /// Whether the tensor may be one of `inputs`, by its type. If it is none of them it was used to compute
    /// one.
    pub(super) fn is_among(&self, inputs: &[Input]) -> bool {
        if self.is_new {
            return true;
        }
        let (shape, dtype) = (self.gradient.shape(), self.gradient.dtype());
        inputs
            .iter()
            .any(|input| input.ir.shape == shape && input.ir.dtype == dtype)
    }
}

/// The captured leaves among the tensors of `gradients`, from which those of the `leaves` of the trace were
/// removed.
pub(super) fn find(gradients: &Gradients, leaves: &[TrackedTensor]) -> Vec<Captured> {
    let Some(leaf) = leaves.first() else {
        return Vec::new();
    };
    let mut probe = graph::stand_in(leaf, 0);
    let mut found = Vec::new();
    for value in 0..NodeId::new().value {
        match Arc::get_mut(&mut probe.node) {
            Some(node) => node.id = NodeId { value },
            None => break,
        }
        if let Some(gradient) = gradients.get::<Kiln>(&probe) {
            let mut tensor = std::mem::replace(&mut probe, graph::stand_in(leaf, 0));
            tensor.rc = Arc::new(tensor.node.id);
            found.push(Captured {
                is_new: value > leaf.node.id.value,
                tensor,
                gradient,
            });
        }
    }
    found
}
