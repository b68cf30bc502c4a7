//! Tensors that a function captures and that are trained.
//!
//! A function takes its tracked tensors as arguments; one that it captures is not replaced by a leaf of the
//! trace. The trace's gradients reach such a tensor all the same, and Burn's autograd files its gradient
//! under the number of its node. Numbers are given out in order, so whatever is filed under a number smaller
//! than that of the first leaf belongs to a tensor from outside.
//!
//! A captured tensor that is no leaf itself cannot be had in this way: the trace's gradients have run through
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
    /// Stands for the tensor in the program's graph.
    pub(super) tensor: TrackedTensor,
    pub(super) gradient: KilnTensor,
}

impl Captured {
    /// Whether the tensor may be one of `inputs`, by its type. If it is none of them it was used to compute
    /// one.
    pub(super) fn is_among(&self, inputs: &[Input]) -> bool {
        let (shape, dtype) = (self.gradient.shape(), self.gradient.dtype());
        inputs
            .iter()
            .any(|input| input.ir.shape == shape && input.ir.dtype == dtype)
    }
}

/// The captured leaves among what `gradients` were found for; `leaf` is the first of the trace.
pub(super) fn find(gradients: &Gradients, leaf: &TrackedTensor) -> Vec<Captured> {
    let mut probe = graph::stand_in(leaf, 0);
    let mut found = Vec::new();
    for value in 0..leaf.node.id.value {
        match Arc::get_mut(&mut probe.node) {
            Some(node) => node.id = NodeId { value },
            None => break,
        }
        if let Some(gradient) = gradients.get::<Kiln>(&probe) {
            let mut tensor = std::mem::replace(&mut probe, graph::stand_in(leaf, 0));
            tensor.rc = Arc::new(tensor.node.id);
            found.push(Captured { tensor, gradient });
        }
    }
    found
}
