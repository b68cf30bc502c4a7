//! Dynamic loss scaling inside a training step.
//!
//! Gradients that are stored in `f16` underflow below 6e-8. The backward pass is linear in the gradient that it
//! begins with, so the loss is multiplied by a *scale* before the backward pass, and the gradients are divided
//! by it afterwards. A scale that is too large makes infinities: such a step is skipped and the scale shrinks.
//! After a number of steps without an infinity the scale grows:
//!
//! ```text
//! skipped step    scale := max(scale * backoff, 1)      steps := 0               skipped := skipped + 1
//! other step      steps + 1 = interval:  scale := min(scale * growth, 2^24)      steps := 0
//!                 else                                    steps := steps + 1
//! ```
//!
//! (P. Micikevicius and others, *Mixed precision training*, 2018, section 3.2.) All of this is recorded with
//! the step as tensor operations, so a replayed step reads nothing on the host: scale, steps and skipped steps
//! are three tensors of the step's state, and a skipped step selects the old parameters and the old state of
//! the optimizer. What the optimizer counts on the host (Adam's time) goes on in a skipped step.

use burn_backend::TensorMetadata;
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{GradientsParams, Optimizer, SimpleOptimizer};
use burn_tensor::{Bool, DType, Int, Tensor, TensorData, TensorPrimitive};
use hashbrown::{HashMap, HashSet};
use kiln_burn::record::exchange;
use kiln_burn::storage::Storage;
use kiln_burn::{CompileOptions, Kiln, KilnClient, KilnDevice, LossScaling, ranks};

use super::places::{self, Found, map_tensors, tensors_of, with_state};
use super::{TrainBackend, TrainError};
use crate::input::{KilnTensor, inspect};

/// The largest scale.
const LARGEST: f32 = (1u32 << 24) as f32;

/// Where the loss scaling of a training step stands: part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// What the loss is multiplied by.
    pub scale: f32,
    /// Steps since the scale changed.
    pub steps: u32,
    /// Steps that were skipped since training began.
    pub skipped: u32,
}

impl LossScale {
    /// Where `scaling` begins.
    pub fn start(scaling: &LossScaling) -> Self {
        Self {
            scale: scaling.initial,
            steps: 0,
            skipped: 0,
        }
    }
}

/// The state of loss scaling as tensors of one element each.
#[derive(Clone)]
pub(super) struct State {
    scale: Tensor<Kiln, 1>,
    steps: Tensor<Kiln, 1, Int>,
    skipped: Tensor<Kiln, 1, Int>,
}

/// The names of the state's tensors among the places of a step.
const NAMES: [&str; 3] = [
    "the loss scale",
    "the steps since the loss scale changed",
    "the number of skipped steps",
];

impl State {
    /// Tensors on `device` that stand where `start` says.
    ///
    /// They are no part of a recording that is under way.
    pub(super) fn new(start: LossScale, device: KilnDevice) -> Self {
        let client = KilnClient::new(device);
        let int = |x: u32| {
            let data = TensorData::from([x.min(i32::MAX as u32) as i32]);
            Tensor::from_primitive(client.adopt(Storage::from_data(data)))
        };
        let scale = client.adopt(Storage::from_data(TensorData::from([start.scale])));
        Self {
            scale: Tensor::from_primitive(TensorPrimitive::Float(scale)),
            steps: int(start.steps),
            skipped: int(start.skipped),
        }
    }

    /// The numbers in the tensors. Waits for the steps under way.
    pub(super) fn read(&self) -> LossScale {
        let int = |tensor: &Tensor<Kiln, 1, Int>| {
            tensor
                .clone()
                .into_data()
                .iter::<i64>()
                .next()
                .unwrap_or_default() as u32
        };
        let scale = self.scale.clone().into_data();
        LossScale {
            scale: scale.iter::<f32>().next().unwrap_or_default(),
            steps: int(&self.steps),
            skipped: int(&self.skipped),
        }
    }

    /// The tensors as places of a step.
    pub(super) fn places(&self) -> Vec<Found> {
        let tensors = inspect(&(self.scale.clone(), (self.steps.clone(), self.skipped.clone()))).0;
        let named = NAMES.into_iter().zip(tensors);
        named
            .map(|(name, ir)| Found {
                name: name.into(),
                id: ir.id,
            })
            .collect()
    }

    /// `loss` multiplied by the scale.
    pub(super) fn scaled<B: TrainBackend>(&self, loss: Tensor<B, 1>) -> Tensor<B, 1> {
        let scale = self.scale.clone().cast(loss.dtype());
        loss * Tensor::from_inner(scale)
    }

    /// Divides the `gradients` of `model` by the scale, and finds out whether the step is skipped. The
    /// gradients of a skipped step become zeros. All ranks skip a step together; where each has `shares` of the
    /// gradients, a sum over ranks tells.
    pub(super) fn unscale<B: TrainBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        gradients: &mut GradientsParams,
        shares: bool,
    ) -> Skip {
        let mut divide = Divide {
            inverse: self.scale.clone().recip(),
            gradients,
            seen: HashSet::new(),
            bad: Tensor::zeros_like(&self.skipped),
        };
        model.visit(&mut divide);
        let bad = match shares {
            true => Tensor::from_primitive(ranks::sum(divide.bad.into_primitive())),
            false => divide.bad,
        };
        let skip = bad.greater_elem(0);
        model.visit(&mut Clear {
            skip: skip.clone(),
            gradients,
        });
        Skip(skip)
    }

    /// The state after a step.
    pub(super) fn next(self, skip: &Skip, scaling: &LossScaling) -> Self {
        let Self {
            scale,
            steps,
            skipped,
        } = self;
        let steps = steps.add_scalar(1);
        // The counter is an `i32`: an interval beyond its numbers never ends.
        let due = steps
            .clone()
            .greater_equal_elem(scaling.interval.min(i32::MAX as u32));
        let grown = scale.clone().mul_scalar(scaling.growth).clamp_max(LARGEST);
        let shrunk = scale.clone().mul_scalar(scaling.backoff).clamp_min(1.0);
        Self {
            scale: scale
                .mask_where(due.clone(), grown)
                .mask_where(skip.0.clone(), shrunk),
            steps: steps.mask_fill(due.bool_or(skip.0.clone()), 0),
            skipped: skipped.add(skip.0.clone().int()),
        }
    }
}

/// Divides gradients by the scale and counts those that are not finite.
struct Divide<'a> {
    inverse: Tensor<Kiln, 1>,
    gradients: &'a mut GradientsParams,
    /// A parameter that a model has twice has one gradient.
    seen: HashSet<ParamId>,
    /// More than 0 if an element of a gradient is not finite, of shape `[1]`.
    bad: Tensor<Kiln, 1, Int>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Divide<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<Kiln, D>(param.id) else {
            return;
        };
        let inverse = self.inverse.clone().cast(gradient.dtype()).reshape([1; D]);
        let gradient = gradient.mul(inverse);
        let bad = gradient.clone().is_nan().bool_or(gradient.clone().is_inf());
        self.bad = self.bad.clone().max_pair(bad.int().max());
        self.gradients.register::<Kiln, D>(param.id, gradient);
    }
}

/// Puts zeros into the gradients of a skipped step, so that state which an optimizer makes of them is finite.
struct Clear<'a> {
    skip: Tensor<Kiln, 1, Bool>,
    gradients: &'a mut GradientsParams,
}

impl<B: TrainBackend> ModuleVisitor<B> for Clear<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(gradient) = self.gradients.remove::<Kiln, D>(param.id) else {
            return;
        };
        let skip = self.skip.clone().reshape([1; D]).expand(gradient.shape());
        let gradient = gradient.mask_fill(skip, 0.0);
        self.gradients.register::<Kiln, D>(param.id, gradient);
    }
}

/// Whether a step is skipped, as a tensor of shape `[1]`.
pub(super) struct Skip(Tensor<Kiln, 1, Bool>);

impl Skip {
    /// `new`, or `old` in a skipped step.
    fn select(&self, old: KilnTensor, new: KilnTensor) -> KilnTensor {
        let shape = new.shape();
        let ones = burn_backend::Shape::from(vec![1; shape.num_dims()]);
        let skip = Kiln::bool_reshape(self.0.clone().into_primitive(), ones);
        let skip = Kiln::bool_expand(skip, shape);
        match new.dtype().is_float() {
            true => Kiln::float_mask_where(new, skip, old),
            false => Kiln::int_mask_where(new, skip, old),
        }
    }

    /// `new`, with the tensors of `old` in a skipped step wherever the optimizer put others.
    pub(super) fn model<B: TrainBackend, M: AutodiffModule<B>>(&self, old: Parameters, new: M) -> M {
        new.map(&mut Chosen {
            skip: self,
            old: old.0.into_iter(),
        })
    }

    /// `new`, with the state of `old` in a skipped step; state that `old` lacks stays new. `model` has the
    /// parameters: their order is that of the operations, on all ranks.
    pub(super) fn optimizer<B, M, O>(
        &self,
        model: &M,
        old: HashMap<ParamId, AdaptorRecord<O, B>>,
        new: OptimizerAdaptor<O, M, B>,
    ) -> OptimizerAdaptor<O, M, B>
    where
        B: TrainBackend,
        M: AutodiffModule<B>,
        O: SimpleOptimizer<Kiln>,
    {
        let mut records: Vec<_> = new.to_record().into_iter().collect();
        // Recorded calls must be equal. The order of a hash map is not, and ids differ from process to process.
        let order = places::order::<B, M>(model);
        records.sort_by_key(|(parameter, _)| order.get(parameter).copied());
        let chosen = records.into_iter().map(|(parameter, record)| {
            let chosen = old
                .get(&parameter)
                .and_then(|old| self.state(old.clone(), record.clone()));
            (parameter, chosen.unwrap_or(record))
        });
        let chosen = chosen.collect();
        new.load_record(chosen)
    }

    /// One parameter's state; none if old and new state have different tensors.
    fn state<B: TrainBackend, O: SimpleOptimizer<Kiln>>(
        &self,
        old: AdaptorRecord<O, B>,
        new: AdaptorRecord<O, B>,
    ) -> Option<AdaptorRecord<O, B>> {
        let (before, after) = (tensors_of(old), tensors_of(new.clone()));
        if before.len() != after.len() || before.iter().zip(&after).any(|(a, b)| a.shape() != b.shape()) {
            return None;
        }
        let pairs = before.into_iter().zip(after);
        let chosen = pairs.map(|(old, new)| self.select(old, new)).collect();
        with_state!(new, |state, D| {
            let state = exchange::replace(chosen, |device: &KilnDevice| O::to_device::<D>(state, device));
            state.map(AdaptorRecord::from_state::<D>)
        })
    }
}

/// The tensors of a model in the order of its map; none where a parameter has no value yet.
pub(super) struct Parameters(Vec<Option<KilnTensor>>);

impl Parameters {
    /// The tensors of `model`.
    pub(super) fn of<B: TrainBackend, M: AutodiffModule<B> + Clone>(model: &M) -> Self {
        let mut look = Look { seen: Vec::new() };
        drop(model.clone().map(&mut look));
        Self(look.seen)
    }

    /// The tensors of the same model `before` a forward pass, which changed running statistics. Those of
    /// other shapes are not the model's: ranks divide parameters, which no forward pass changes.
    pub(super) fn or_before(self, before: Self) -> Self {
        let pairs = self.0.into_iter().zip(before.0);
        let chosen = pairs.map(|(now, before)| match (now, before) {
            (Some(now), Some(before)) if now.shape() == before.shape() => Some(before),
            (now, _) => now,
        });
        Self(chosen.collect())
    }
}

/// Collects tensors.
struct Look {
    seen: Vec<Option<KilnTensor>>,
}

map_tensors!(Look);

impl Look {
    fn skip(&mut self) {
        self.seen.push(None);
    }

    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        self.seen.push(Some(tensor.clone()));
        tensor
    }
}

/// Selects between the tensors of two models.
struct Chosen<'a> {
    skip: &'a Skip,
    old: std::vec::IntoIter<Option<KilnTensor>>,
}

map_tensors!(Chosen<'_>);

impl Chosen<'_> {
    fn skip(&mut self) {
        self.old.next();
    }

    fn tensor(&mut self, new: KilnTensor) -> KilnTensor {
        match self.old.next().flatten() {
            Some(old) if old.clone().into_ir().id != new.clone().into_ir().id => self.skip.select(old, new),
            _ => new,
        }
    }
}

/// How a step with these options scales its loss.
///
/// # Errors
///
/// [`TrainError::LossScaling`] if a number of it makes no sense.
pub(super) fn scaling(options: &CompileOptions) -> Result<Option<LossScaling>, TrainError> {
    let default = || (options.autocast == Some(DType::F16)).then(LossScaling::default);
    let Some(scaling) = options.loss_scaling.or_else(default) else {
        return Ok(None);
    };
    let LossScaling {
        initial,
        growth,
        backoff,
        interval,
    } = scaling;
    let checks = [
        (
            initial > 0.0 && initial.is_finite(),
            "initial",
            initial,
            "a finite number above 0",
        ),
        (
            growth >= 1.0 && growth.is_finite(),
            "growth",
            growth,
            "a finite number, 1 at least",
        ),
        (
            backoff > 0.0 && backoff <= 1.0,
            "backoff",
            backoff,
            "above 0 and at most 1",
        ),
        (interval > 0, "interval", interval as f32, "1 at least"),
    ];
    match checks.into_iter().find(|(is_right, ..)| !is_right) {
        Some((_, field, value, rule)) => Err(TrainError::LossScaling { field, value, rule }),
        None => Ok(Some(scaling)),
    }
}
