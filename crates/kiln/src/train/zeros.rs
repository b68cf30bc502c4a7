//! Optimizer state that starts from zeros.
//!
//! Burn's optimizers have no state before the first step and take another branch there. For Adam and AdamW
//! that branch computes the same as the usual branch with moments of zero at time zero: `beta * 0 + (1 -
//! beta) * gradient`. With such state made beforehand the first step is the same graph as all that follow:
//! one graph is compiled instead of two, and the third call is replayed.

use std::any::{Any, TypeId};

use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{
    Adam, AdamState, AdamW, AdamWState, AdaptiveMomentumState, GradientsParams, Optimizer, SimpleOptimizer,
};
use burn_tensor::{Tensor, TensorPrimitive};
use hashbrown::HashMap;
use kiln_burn::record::rehearse;
use kiln_burn::{Kiln, KilnClient};

use super::TrainBackend;

/// `optim` with state for each parameter of `model` that has a gradient and no state yet; as it was if its
/// state does not start from zeros.
pub(super) fn start<B, M, O>(
    optim: OptimizerAdaptor<O, M, B>,
    model: &M,
    gradients: &GradientsParams,
) -> OptimizerAdaptor<O, M, B>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln> + 'static,
{
    if ![TypeId::of::<Adam>(), TypeId::of::<AdamW>()].contains(&TypeId::of::<O>()) {
        return optim;
    }
    let mut visitor = Visitor::<B, O> {
        optim: optim.optim(),
        gradients,
        records: optim.to_record(),
    };
    model.visit(&mut visitor);
    let records = visitor.records;
    optim.load_record(records)
}

/// Gives state to the parameters that have a gradient.
struct Visitor<'a, B: TrainBackend, O: SimpleOptimizer<Kiln>> {
    optim: &'a O,
    gradients: &'a GradientsParams,
    records: HashMap<ParamId, AdaptorRecord<O, B>>,
}

impl<B: TrainBackend, O: SimpleOptimizer<Kiln> + 'static> ModuleVisitor<B> for Visitor<'_, B, O> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.records.contains_key(&param.id) {
            return;
        }
        let gradient = self.gradients.get::<Kiln, D>(param.id);
        if let Some(state) = gradient.and_then(|gradient| state(self.optim, &gradient)) {
            self.records.insert(param.id, AdaptorRecord::from_state(state));
        }
    }
}

/// A parameter's state before the first step of Adam or AdamW, for gradients like `gradient`.
fn state<O: SimpleOptimizer<Kiln> + 'static, const D: usize>(
    optim: &O,
    gradient: &Tensor<Kiln, D>,
) -> Option<O::State<D>> {
    // The state that the first step would leave, without elements, shows which tensors there are.
    let empty = || Tensor::<Kiln, D>::empty(gradient.shape(), (&gradient.device(), gradient.dtype()));
    let ((_, left), _) = rehearse(|| optim.step::<D>(1.0, empty(), empty(), None))?;
    let left: &dyn Any = &left?;
    let state: Box<dyn Any> = if let Some(left) = left.downcast_ref::<AdamWState<Kiln, D>>() {
        Box::new(AdamWState::new(zeros_like(&left.momentum)))
    } else {
        let left = left.downcast_ref::<AdamState<Kiln, D>>()?;
        Box::new(AdamState::new(zeros_like(&left.momentum)))
    };
    state.downcast().ok().map(|state| *state)
}

/// Moments of zero at time zero. The largest second moment so far is zero, too: no second moment is less.
fn zeros_like<const D: usize>(left: &AdaptiveMomentumState<Kiln, D>) -> AdaptiveMomentumState<Kiln, D> {
    let zeros = |of: &Tensor<Kiln, D>| {
        let zeros = KilnClient::new(of.device()).zeros(of.shape(), of.dtype());
        Tensor::<Kiln, D>::from_primitive(TensorPrimitive::Float(zeros))
    };
    AdaptiveMomentumState {
        time: 0,
        moment_1: zeros(&left.moment_1),
        moment_2: zeros(&left.moment_2),
        max_moment_2: left.max_moment_2.as_ref().map(zeros),
    }
}
