//! Rehearsals: an optimizer's host code, run for its scalars.
//!
//! A replayed step needs the numbers that the optimizer's Rust code would have computed this time: learning
//! rate, bias correction, decay. That code sees a parameter only through its shape and the optimizer's
//! state of it. So parameters with equal operations and scalars form *classes*, and one representative of
//! each class is enough: of parameters of one shape, or of one rank where the optimizer's numbers are known
//! not to depend on shapes. The representatives' optimizer runs in a rehearsal
//! (`kiln_burn::record::rehearse`) on a stand-in for the model ([`super::shadow`]), where operations are noted
//! and never run; its state goes from step to step with tensors that have no elements.
//!
//! The real optimizer is not run meanwhile: the replay keeps its tensors up to date, under their own ids,
//! but host fields such as `time` do not change. [`Rehearsal::catch_up`] repairs that: each parameter gets
//! its representative's state, with the parameter's own tensors put in (`kiln_burn::record::exchange`).

use std::collections::HashMap;

use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_ir::ScalarIr;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::{DType, Tensor};
use kiln_burn::record::{Recorded, exchange, rehearse};
use kiln_burn::{Kiln, KilnDevice};

use super::places::{tensors_of, with_state};
use super::shadow::{Shadow, ShadowOptimizer, is_blind_to_shapes, without_state};
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
    /// What one update is, with the rank of the parameters and the scalars at a sample rate.
    update: (usize, Form, Vec<ScalarIr>),
    /// Number of its operations.
    length: usize,
}

impl Class {
    /// Scalars of one update.
    fn scalars(&self) -> usize {
        self.update.2.len()
    }
}

/// The operations of one update.
#[derive(Clone, PartialEq, Eq)]
enum Form {
    /// In relative form, with their shapes.
    Words(Vec<u64>),
    /// Of each, how many tensors it reads, and the types and ranks of its results. The rest follows from the
    /// optimizer's source.
    Blind(Vec<(usize, Vec<(DType, usize)>)>),
}

impl Form {
    fn of(recorded: &Recorded, blind: bool) -> Self {
        if !blind {
            return Self::Words(recorded.identity.words.clone());
        }
        let operations = recorded.operations.iter().map(|operation| {
            let results = operation.outputs().map(|ir| (ir.dtype, ir.shape.num_dims()));
            (operation.inputs().count(), results.collect())
        });
        Self::Blind(operations.collect())
    }
}

/// A shadow of model and optimizer that takes the host's part in every step.
pub(super) struct Rehearsal<B: TrainBackend, O: SimpleOptimizer<Kiln>> {
    /// The shadow's parameters. They have no elements, so they are the same after a step as before it, and
    /// each rehearsal has them from the last one; none after a rehearsal that did not end.
    model: Option<Box<Shadow<B>>>,
    optim: ShadowOptimizer<B, O>,
    /// The shadow's optimizer after the step that is under way.
    next: Option<ShadowOptimizer<B, O>>,
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

impl<B: TrainBackend, O: SimpleOptimizer<Kiln>> Rehearsal<B, O> {
    /// A rehearsal that starts from the state of `model` and `optim`, for the parameters that are trained.
    /// With `widened` the optimizer updates parameters of 16 bits as `f32`. None if the optimizer reads tensors
    /// on the host, or parameters cannot be told apart by class.
    pub(super) fn new<M: AutodiffModule<B>>(
        model: &M,
        optim: &OptimizerAdaptor<O, M, B>,
        parameters: &[ParamId],
        widened: bool,
    ) -> Option<Self> {
        let shadow = rehearse(|| Shadow::of(model, parameters, widened))?.0;
        let plain: ShadowOptimizer<B, O> = without_state(optim);
        let mut records = optim.to_record();
        let blind = is_blind_to_shapes::<O>();
        let mut classes: Vec<Class> = Vec::new();
        let mut class_of = HashMap::new();
        for (parameter, rank) in shadow.parameters() {
            let record = records.get(&parameter).cloned();
            let own = record.into_iter().map(|record| (parameter, record)).collect();
            let alone = Box::new(shadow.only(&[parameter]));
            let mut trained = Some((alone, plain.clone().load_record(own)));
            let ((), recorded) = rehearse_shadow(&mut trained, SAMPLE_RATE)?;
            let update = (rank, Form::of(&recorded, blind), recorded.scalars);
            let known = classes.iter().position(|class| class.update == update);
            let class = known.unwrap_or_else(|| {
                classes.push(Class {
                    representative: parameter,
                    update,
                    length: recorded.operations.len(),
                });
                classes.len() - 1
            });
            class_of.insert(parameter, class);
        }
        let representatives: Vec<ParamId> = classes.iter().map(|class| class.representative).collect();
        let member = |parameter: &ParamId| Some((*parameter, *class_of.get(parameter)?));
        let members = parameters.iter().map(member).collect::<Option<_>>()?;
        // Only the representatives' state takes part from here on.
        records.retain(|parameter, _| representatives.contains(parameter));
        // Each step copies the map, with its empty places.
        records.shrink_to_fit();
        Some(Self {
            model: Some(Box::new(shadow.only(&representatives))),
            optim: plain.load_record(records),
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
        let mut shadow = Some((self.model.take()?, self.optim.clone()));
        let ((), recorded) = rehearse_shadow(&mut shadow, lr)?;
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
        let expected: usize = self.classes.iter().map(Class::scalars).sum();
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
                first += class.scalars();
                start
            })
            .collect();
        let of = |&(_, class): &(ParamId, usize)| {
            &of_representatives[starts[class]..starts[class] + self.classes[class].scalars()]
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
    pub(super) fn catch_up<M: AutodiffModule<B>>(
        &self,
        optim: OptimizerAdaptor<O, M, B>,
    ) -> OptimizerAdaptor<O, M, B> {
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

/// Runs the optimizer on all parameters of a shadow in a rehearsal, with gradients that have no elements.
pub(super) fn rehearse_shadow<B: TrainBackend, O: SimpleOptimizer<Kiln>>(
    shadow: &mut Option<Trained<B, Shadow<B>, O>>,
    lr: LearningRate,
) -> Option<((), Recorded)> {
    rehearse(|| {
        if let Some((model, mut optim)) = shadow.take() {
            let gradients = model.gradients();
            let model = Box::new(optim.step(lr, *model, gradients));
            *shadow = Some((model, optim));
        }
    })
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
