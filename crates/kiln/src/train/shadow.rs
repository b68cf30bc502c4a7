//! A stand-in for a model: some of its parameters, without elements and apart from its modules.
//!
//! Burn's adaptor gives a [`SimpleOptimizer`] one parameter after the other, with its gradient and its state,
//! and never the module that it is in. So a rehearsal steps through the parameters that it is about, and not
//! through all modules of the model, which takes much longer than the optimizer.

use std::any::TypeId;
use std::collections::HashSet;

use burn_core as burn;
use burn_core::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn_ir::TensorId;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{Adam, AdamW, GradientsParams, RmsProp, Sgd, SimpleOptimizer};
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Tensor};
use kiln_burn::Kiln;

use super::TrainBackend;

/// Parameters by rank. They are visited in this order, those of one rank as they came.
#[derive(Module, Debug)]
pub(super) struct Shadow<B: Backend> {
    rank0: Vec<Param<Tensor<B, 0>>>,
    rank1: Vec<Param<Tensor<B, 1>>>,
    rank2: Vec<Param<Tensor<B, 2>>>,
    rank3: Vec<Param<Tensor<B, 3>>>,
    rank4: Vec<Param<Tensor<B, 4>>>,
    rank5: Vec<Param<Tensor<B, 5>>>,
    rank6: Vec<Param<Tensor<B, 6>>>,
    rank7: Vec<Param<Tensor<B, 7>>>,
    rank8: Vec<Param<Tensor<B, 8>>>,
}

/// The optimizer of a shadow.
pub(super) type ShadowOptimizer<B, O> = OptimizerAdaptor<O, Shadow<B>, B>;

/// Evaluates `$body` once for the parameters of each rank.
macro_rules! each_rank {
    ($shadow:expr, |$params:ident, $rank:ident| $body:expr) => {
        each_rank!(@ $shadow, $params, $rank, $body,
            rank0 0, rank1 1, rank2 2, rank3 3, rank4 4, rank5 5, rank6 6, rank7 7, rank8 8)
    };
    (@ $shadow:expr, $params:ident, $rank:ident, $body:expr, $($field:ident $number:literal),*) => {
        $({
            const $rank: usize = $number;
            let $params = &$shadow.$field;
            $body
        })*
    };
}

impl<B: TrainBackend> Shadow<B> {
    /// These parameters of `model`: with its types and shapes, and no elements, so that those of the model
    /// can end. With `widened` those of 16 bits are `f32`.
    pub(super) fn of<M: AutodiffModule<B>>(model: &M, parameters: &[ParamId], widened: bool) -> Self {
        let mut visitor = Collector {
            wanted: parameters.iter().copied().collect(),
            widened,
            shadow: Self::empty(),
        };
        model.visit(&mut visitor);
        visitor.shadow
    }

    fn empty() -> Self {
        Self {
            rank0: Vec::new(),
            rank1: Vec::new(),
            rank2: Vec::new(),
            rank3: Vec::new(),
            rank4: Vec::new(),
            rank5: Vec::new(),
            rank6: Vec::new(),
            rank7: Vec::new(),
            rank8: Vec::new(),
        }
    }

    /// The shadow with these parameters alone.
    pub(super) fn only(&self, parameters: &[ParamId]) -> Self {
        fn some<B: Backend, const D: usize>(
            params: &[Param<Tensor<B, D>>],
            of: &[ParamId],
        ) -> Vec<Param<Tensor<B, D>>> {
            let is_one = |param: &&Param<Tensor<B, D>>| of.contains(&param.id);
            params.iter().filter(is_one).cloned().collect()
        }
        Self {
            rank0: some(&self.rank0, parameters),
            rank1: some(&self.rank1, parameters),
            rank2: some(&self.rank2, parameters),
            rank3: some(&self.rank3, parameters),
            rank4: some(&self.rank4, parameters),
            rank5: some(&self.rank5, parameters),
            rank6: some(&self.rank6, parameters),
            rank7: some(&self.rank7, parameters),
            rank8: some(&self.rank8, parameters),
        }
    }

    /// The parameters in the order of a visit, each with its rank.
    pub(super) fn parameters(&self) -> Vec<(ParamId, usize)> {
        let mut all = Vec::new();
        each_rank!(self, |params, D| all
            .extend(params.iter().map(|param| (param.id, D))));
        all
    }

    /// The parameters in the order of a visit, each with the tensor that it has.
    pub(super) fn tensors(&self) -> Vec<(ParamId, TensorId)> {
        let mut all = Vec::new();
        each_rank!(self, |params, D| all.extend(params.iter().map(
            |param: &Param<Tensor<B, D>>| {
                let tensor = B::to_kiln(param.val().into_primitive().tensor());
                (param.id, tensor.into_ir().id)
            }
        )));
        all
    }

    /// A gradient without elements for each parameter.
    pub(super) fn gradients(&self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        each_rank!(self, |params, D| for param in params {
            let value = param.val();
            let gradient = Tensor::<Kiln, D>::empty(value.shape(), (&value.device(), value.dtype()));
            gradients.register(param.id, gradient);
        });
        gradients
    }
}

struct Collector<B: Backend> {
    /// Parameters that were not seen yet.
    wanted: HashSet<ParamId>,
    widened: bool,
    shadow: Shadow<B>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Collector<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.wanted.remove(&param.id) {
            return;
        }
        let value = param.val();
        let dtype = match value.dtype() {
            DType::F16 | DType::BF16 if self.widened => DType::F32,
            dtype => dtype,
        };
        let empty = Tensor::<B, D>::empty(value.shape(), (&value.device(), dtype));
        let empty = empty.set_require_grad(value.is_require_grad()).into_primitive();
        macro_rules! push {
            ($($rank:literal $field:ident),*) => {
                match D {
                    $($rank => {
                        let tensor = Tensor::from_primitive(empty);
                        self.shadow.$field.push(Param::initialized(param.id, tensor));
                    })*
                    _ => unreachable!("records of optimizers have ranks of 0 to 8"),
                }
            };
        }
        push!(0 rank0, 1 rank1, 2 rank2, 3 rank3, 4 rank4, 5 rank5, 6 rank6, 7 rank7, 8 rank8);
    }
}

/// The rule and the clipping of `optim` for another module, without state.
pub(super) fn without_state<B, M, N, O>(optim: &OptimizerAdaptor<O, M, B>) -> OptimizerAdaptor<O, N, B>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    N: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    let plain = OptimizerAdaptor::from(optim.optim().clone());
    match optim.grad_clipping() {
        Some(clipping) => plain.with_grad_clipping(clipping.clone()),
        None => plain,
    }
}

/// Whether the numbers of the optimizer's host code are known to depend on learning rate, settings and the
/// state's own numbers alone, and not on a parameter's shape: so it is for these of burn-optim, by their
/// source. (It is for AdaGrad, too. But by default AdaGrad's numbers are the same at each call, so they do
/// not tell parameters apart that were trained from different calls on, and AdaGrad counts the calls.)
pub(super) fn is_blind_to_shapes<O>() -> bool {
    [
        TypeId::of::<Adam>(),
        TypeId::of::<AdamW>(),
        TypeId::of::<RmsProp>(),
        TypeId::of::<Sgd<Kiln>>(),
    ]
    .contains(&typeid::of::<O>())
}
