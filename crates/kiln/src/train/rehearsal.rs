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

use std::collections::{HashMap, HashSet};

use burn_backend::TensorMetadata;
use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_core::record::{FullPrecisionSettings, Record};
use burn_ir::{ScalarIr, TensorId};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::{DType, Tensor};
use kiln_burn::record::{Recorded, exchange, rehearse};
use kiln_burn::{Kiln, KilnDevice};

use super::places::{tensors_of, with_state};
use super::shadow::{Shadow, ShadowOptimizer, is_blind_to_shapes, without_state};
use super::{TrainBackend, Trained};
use crate::input::KilnTensor;

/// The parameters of `model` that have a gradient, in the order in which an optimizer visits them.
pub(super) fn trained_parameters<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    gradients: &GradientsParams,
) -> Vec<ParamId> {
    struct Visitor<'a> {
        gradients: &'a GradientsParams,
        seen: HashSet<ParamId>,
        found: Vec<ParamId>,
    }
    impl<B: TrainBackend> ModuleVisitor<B> for Visitor<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            // Of places that share a parameter's id the optimizer updates the first.
            if self.gradients.get::<Kiln, D>(param.id).is_some() && self.seen.insert(param.id) {
                self.found.push(param.id);
            }
        }
    }
    let mut visitor = Visitor {
        gradients,
        seen: HashSet::new(),
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
    /// Where its results go, and the numbers of the state that are no tensors; nothing where the optimizer's
    /// source says that they follow from the rest.
    besides: (Vec<u64>, Option<Vec<u8>>),
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
        host: &HostParts,
    ) -> Option<Self> {
        let shadow = rehearse(|| Shadow::of(model, parameters, widened))?.0;
        let plain: ShadowOptimizer<B, O> = without_state(optim);
        let mut records = optim.to_record();
        let blind = is_blind_to_shapes::<O>();
        let mut classes: Vec<Class> = Vec::new();
        let mut class_of = HashMap::new();
        for (parameter, rank) in shadow.parameters() {
            let record = records.get(&parameter).cloned();
            let own = record.iter().map(|record| (parameter, record.clone())).collect();
            let alone = Box::new(shadow.only(&[parameter]));
            let host = host.get(&parameter).cloned();
            let mut trained = Some((alone, plain.clone().load_record(own)));
            let ((), recorded) = rehearse_shadow(&mut trained, SAMPLE_RATE)?;
            let (model, optim) = trained?;
            let besides = (routes(&*model, &optim, &recorded), host);
            let update = (rank, Form::of(&recorded, blind), recorded.scalars);
            let known = classes
                .iter()
                .position(|class| class.update == update && class.besides == besides);
            let class = known.unwrap_or_else(|| {
                classes.push(Class {
                    representative: parameter,
                    update,
                    besides,
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
        let routes = routes(&*model, &next, &recorded);
        self.model = Some(model);
        if self.updates.words.is_empty() {
            let operations: usize = self.classes.iter().map(|class| class.length).sum();
            if recorded.operations.len() != operations {
                return None;
            }
        }
        self.updates.words = recorded.identity.words;
        self.updates.words.extend(routes);
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

/// The learning rate with which classes are formed. It is the same for all parameters, and not zero, at which
/// some optimizers leave operations out: variants share a rehearsal, and would replace each other's.
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

/// Which result or input of a rehearsal each parameter and each tensor of the optimizer's state is after it:
/// host code may give results of the same operations to other places. Nothing of optimizers that cannot.
fn routes<B: TrainBackend, O: SimpleOptimizer<Kiln>>(
    model: &Shadow<B>,
    optim: &ShadowOptimizer<B, O>,
    recorded: &Recorded,
) -> Vec<u64> {
    if is_blind_to_shapes::<O>() {
        return Vec::new();
    }
    let route = |id: TensorId| {
        let result = recorded.output_ids.iter().position(|&output| output == id);
        let input = || recorded.inputs.iter().position(|input| input.ir.id == id);
        match result {
            Some(result) => (result as u64) << 1,
            None => input().map_or(u64::MAX, |input| (input as u64) << 1 | 1),
        }
    };
    let mut state = optim.to_record();
    let mut all = Vec::new();
    for (parameter, tensor) in model.tensors() {
        all.push(route(tensor));
        let tensors = state
            .remove(&parameter)
            .map(tensors_of::<B, O>)
            .unwrap_or_default();
        all.push(tensors.len() as u64);
        all.extend(tensors.into_iter().map(|tensor| route(tensor.into_ir().id)));
    }
    all
}

/// The numbers of each parameter's state that are no tensors, as its record has them.
pub(super) type HostParts = HashMap<ParamId, Vec<u8>>;

/// The host parts of `optim`'s state: parameters that differ there may take other branches later. Not inside
/// of a recording, which would note that tensors without elements are read. Nothing of optimizers whose
/// numbers tell.
pub(super) fn host_parts<B, M, O>(optim: &OptimizerAdaptor<O, M, B>) -> HostParts
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    if is_blind_to_shapes::<O>() {
        return HostParts::new();
    }
    let records = optim.to_record().into_iter();
    records
        .map(|(parameter, record)| (parameter, host_part::<B, O>(record)))
        .collect()
}

fn host_part<B: TrainBackend, O: SimpleOptimizer<Kiln>>(record: AdaptorRecord<O, B>) -> Vec<u8> {
    let hollow = |tensor: KilnTensor| {
        let shape = vec![0; tensor.shape().num_dims()];
        tensor.client.zeros(shape.into(), tensor.dtype())
    };
    let tensors = tensors_of(record.clone()).into_iter().map(hollow).collect();
    with_state!(record, |state, D| {
        let state = exchange::replace(tensors, |device: &KilnDevice| O::to_device::<D>(state, device));
        let item = state.map(Record::<Kiln>::into_item::<FullPrecisionSettings>);
        item.and_then(|item| serde_json::to_vec(&item).ok())
            .unwrap_or_default()
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
