//! Rehearsals: an optimizer's host code, run for its scalars.
//!
//! A replayed step needs the numbers that the optimizer's Rust code would have computed this time: learning
//! rate, bias correction, decay. That code sees a parameter only through its shape and the optimizer's
//! state of it. So parameters with equal operations and scalars form *classes*, and one representative of
//! each class is enough. The representatives' optimizer runs in a rehearsal
//! (`kiln_burn::record::rehearse`), where operations are noted and never run; its state goes from step to
//! step with tensors that have no elements.
//!
//! The real optimizer is not run meanwhile: the replay keeps its tensors up to date, under their own ids,
//! but host fields such as `time` do not change. [`Rehearsal::catch_up`] repairs that: each parameter gets
//! its representative's state, with the parameter's own tensors put in (`kiln_burn::record::exchange`).

use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_ir::ScalarIr;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::{DType, Tensor};
use kiln_burn::record::{Recorded, exchange, rehearse};
use kiln_burn::{Kiln, KilnDevice};

use super::places::{tensors_of, with_state};
use super::{TrainBackend, Trained};

/// The parameters of `model` that have a gradient, in the order in which an optimizer visits them.
pub(super) fn trained_parameters<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    gradients: &GradientsParams,
) -> Vec<ParamId> {
    struct Visitor<'a> {
        gradients: &'a GradientsParams,
        found: Vec<ParamId>,
    }
    impl<B: TrainBackend> ModuleVisitor<B> for Visitor<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.gradients.get::<Kiln, D>(param.id).is_some() {
                self.found.push(param.id);
            }
        }
    }
    let mut visitor = Visitor {
        gradients,
        found: Vec::new(),
    };
    model.visit(&mut visitor);
    visitor.found
}

/// Parameters whose update is the same program with the same scalars.
#[derive(Clone)]
struct Class {
    representative: ParamId,
    /// The operations of one update, in relative form.
    words: Vec<u64>,
    /// Number of those operations.
    length: usize,
    /// Scalars of one update.
    scalars: usize,
}

/// A shadow of model and optimizer that takes the host's part in every step.
pub(super) struct Rehearsal<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>> {
    /// The shadow's model. It has no elements, so it is the same after a step as before it, and each
    /// rehearsal has it from the last one; none after one that did not end.
    model: Option<Box<M>>,
    optim: OptimizerAdaptor<O, M, B>,
    /// The shadow's optimizer after the step that is under way.
    next: Option<OptimizerAdaptor<O, M, B>>,
    classes: Vec<Class>,
    updates: Updates,
}

/// The updates of an optimizer in one step: the parameters that it updates, and the branches that its host
/// code takes.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct Updates {
    /// Class of each trained parameter, in the optimizer's order.
    members: Vec<(ParamId, usize)>,
    /// The words of a rehearsal of all representatives.
    words: Vec<u64>,
}

impl Updates {
    /// The parameters, in the optimizer's order.
    pub(super) fn parameters(&self) -> Vec<ParamId> {
        self.members.iter().map(|(parameter, _)| *parameter).collect()
    }

    /// Whether both update the same parameters, in the same classes.
    pub(super) fn has_members_of(&self, other: &Self) -> bool {
        self.members == other.members
    }
}

impl<B: TrainBackend, M: AutodiffModule<B> + Clone, O: SimpleOptimizer<Kiln>> Rehearsal<B, M, O> {
    /// A rehearsal that starts from the state of `model` and `optim`, for the parameters that are trained.
    /// With `widened` the optimizer updates parameters of 16 bits as `f32`. None if the optimizer reads tensors
    /// on the host, or parameters cannot be told apart by class.
    pub(super) fn new(
        model: &M,
        optim: &OptimizerAdaptor<O, M, B>,
        parameters: &[ParamId],
        widened: bool,
    ) -> Option<Self> {
        let model = hollow(model, parameters, widened)?;
        let mut classes: Vec<Class> = Vec::new();
        let mut members = Vec::new();
        let mut samples: Vec<Vec<ScalarIr>> = Vec::new();
        for &parameter in parameters {
            let ((), recorded) = rehearse_update(
                &mut Some((model.clone(), optim.clone())),
                &[parameter],
                SAMPLE_RATE,
            )?;
            let same = |index: &usize| {
                classes[*index].words == recorded.identity.words && samples[*index] == recorded.scalars
            };
            let class = (0..classes.len()).find(same).unwrap_or(classes.len());
            if class == classes.len() {
                classes.push(Class {
                    representative: parameter,
                    length: recorded.operations.len(),
                    scalars: recorded.scalars.len(),
                    words: recorded.identity.words,
                });
                samples.push(recorded.scalars);
            }
            members.push((parameter, class));
        }
        // Only the representatives' state takes part from here on.
        let mut records = optim.to_record();
        records.retain(|parameter, _| classes.iter().any(|class| class.representative == *parameter));
        // Each step copies the map, with its empty places.
        records.shrink_to_fit();
        Some(Self {
            model: Some(model),
            optim: optim.clone().load_record(records),
            next: None,
            classes,
            updates: Updates {
                members,
                words: Vec::new(),
            },
        })
    }

    /// The updates of the optimizer in the rehearsal of [`Rehearsal::scalars`].
    pub(super) fn updates(&self) -> &Updates {
        &self.updates
    }

    /// The optimizer's scalars of the next step with learning rate `lr`, for all parameters in order; the
    /// state moves on with [`Rehearsal::commit`]. None if they cannot be told. They are those of a step
    /// that makes the same [`Updates`].
    pub(super) fn scalars(&mut self, lr: LearningRate) -> Option<Vec<ScalarIr>> {
        let scalars = self.representative_scalars(lr)?;
        Some(self.for_all(&scalars))
    }

    /// As [`Rehearsal::scalars`], of one representative of each class.
    pub(super) fn representative_scalars(&mut self, lr: LearningRate) -> Option<Vec<ScalarIr>> {
        let representatives: Vec<ParamId> = self.classes.iter().map(|class| class.representative).collect();
        let mut shadow = Some((self.model.take()?, self.optim.clone()));
        let ((), recorded) = rehearse_update(&mut shadow, &representatives, lr)?;
        let (model, next) = shadow?;
        self.model = Some(model);
        if self.updates.words.is_empty() {
            let operations: usize = self.classes.iter().map(|class| class.length).sum();
            if recorded.operations.len() != operations {
                return None;
            }
        }
        self.updates.words = recorded.identity.words;
        self.next = Some(next);
        let expected: usize = self.classes.iter().map(|class| class.scalars).sum();
        (recorded.scalars.len() == expected).then_some(recorded.scalars)
    }

    /// The values that belong to the representatives' scalars, repeated for all parameters in order.
    pub(super) fn for_all<T: Clone>(&self, of_representatives: &[T]) -> Vec<T> {
        let mut first = 0;
        let starts: Vec<usize> = self
            .classes
            .iter()
            .map(|class| {
                let start = first;
                first += class.scalars;
                start
            })
            .collect();
        let of = |&(_, class): &(ParamId, usize)| {
            &of_representatives[starts[class]..starts[class] + self.classes[class].scalars]
        };
        let parts: Vec<&[T]> = self.updates.members.iter().map(of).collect();
        parts.concat()
    }

    /// A separate rehearsal that continues from the state of this one.
    pub(super) fn fork(&self) -> Self {
        Self {
            model: self.model.clone(),
            optim: self.optim.clone(),
            next: None,
            classes: self.classes.clone(),
            updates: self.updates.clone(),
        }
    }

    /// Moves the state on by the step whose scalars were asked for last: it ran.
    pub(super) fn commit(&mut self) {
        if let Some(next) = self.next.take() {
            self.optim = next;
        }
    }

    /// `optim` with the host state of the shadow and its own tensors.
    pub(super) fn catch_up(&self, optim: OptimizerAdaptor<O, M, B>) -> OptimizerAdaptor<O, M, B> {
        let theirs = self.optim.to_record();
        let mut records = optim.to_record();
        for &(parameter, class) in &self.updates.members {
            let template = theirs.get(&self.classes[class].representative);
            if let (Some(template), Some(own)) = (template, records.remove(&parameter)) {
                let merged = merge::<B, O>(template.clone(), &own);
                records.insert(parameter, merged.unwrap_or(own));
            }
        }
        optim.load_record(records)
    }
}

/// The learning rate with which classes are formed. Any will do: it is the same for all parameters.
const SAMPLE_RATE: LearningRate = 1e-3;

/// Runs the optimizer of `shadow` on `parameters` in a rehearsal, with gradients that have no elements.
pub(super) fn rehearse_update<B, M, O>(
    shadow: &mut Option<Trained<B, M, O>>,
    parameters: &[ParamId],
    lr: LearningRate,
) -> Option<((), Recorded)>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    rehearse(|| {
        if let Some((model, mut optim)) = shadow.take() {
            let gradients = empty_gradients(&*model, parameters);
            let model = Box::new(optim.step(lr, *model, gradients));
            *shadow = Some((model, optim));
        }
    })
}

/// A copy of `model` whose trained parameters have no elements: it must not keep those of the model alive.
/// With `widened` they are `f32`. Other tensors are as they were: copies of a running statistic share its value.
fn hollow<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    parameters: &[ParamId],
    widened: bool,
) -> Option<Box<M>> {
    struct Mapper<'a> {
        parameters: &'a [ParamId],
        widened: bool,
    }
    impl<B: TrainBackend> ModuleMapper<B> for Mapper<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            if !self.parameters.contains(&param.id) {
                return param;
            }
            let (id, tensor, mapper) = param.consume();
            let dtype = match tensor.dtype() {
                DType::F16 | DType::BF16 if self.widened => DType::F32,
                dtype => dtype,
            };
            let empty = Tensor::empty(tensor.shape(), (&tensor.device(), dtype));
            Param::from_mapped_value(id, empty.set_require_grad(tensor.is_require_grad()), mapper)
        }
    }
    let mut mapper = Mapper { parameters, widened };
    Some(rehearse(|| Box::new(model.clone().map(&mut mapper)))?.0)
}

/// A gradient without elements for each of `parameters`.
fn empty_gradients<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    parameters: &[ParamId],
) -> GradientsParams {
    struct Visitor<'a> {
        parameters: &'a [ParamId],
        gradients: GradientsParams,
    }
    impl<B: TrainBackend> ModuleVisitor<B> for Visitor<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.parameters.contains(&param.id) {
                let value = param.val();
                let gradient = Tensor::<Kiln, D>::empty(value.shape(), (&value.device(), value.dtype()));
                self.gradients.register(param.id, gradient);
            }
        }
    }
    let mut visitor = Visitor {
        parameters,
        gradients: GradientsParams::new(),
    };
    model.visit(&mut visitor);
    visitor.gradients
}

/// `template` with the tensors of `own`; none if their numbers differ.
fn merge<B: TrainBackend, O: SimpleOptimizer<Kiln>>(
    template: AdaptorRecord<O, B>,
    own: &AdaptorRecord<O, B>,
) -> Option<AdaptorRecord<O, B>> {
    let tensors = tensors_of(own.clone());
    with_state!(template, |state, D| {
        let state = exchange::replace(tensors, |device: &KilnDevice| O::to_device::<D>(state, device));
        state.map(AdaptorRecord::from_state::<D>)
    })
}
