//! The variants of a training step: one for each signature of its input.
//!
//! Batches of two sizes are two steps. Each is recorded, has a plan and is replayed separately, but model
//! and optimizer are the same: one step reads the parameters that the other has written. So the plans share
//!
//! - the watch on state (`kiln_burn::record::replay`),
//! - the rehearsal of the optimizer. Two variants may train different parameters (a head alone, then
//!   everything); when one follows the other, the rehearsal is made anew from the optimizer's state.
//!
//! A recorded call, of any variant, replaces all of the state. The plans are detached from it before
//! ([`Variants::suspend`]) and follow it by the names of its places after it ([`Variants::resume`]).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn_core::module::AutodiffModule;
use burn_ir::{ScalarIr, TensorId, TensorIr};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{LearningRate, SimpleOptimizer};
use kiln_burn::record::binding::{InputBinding, OutputBinding, ResultBinding};
use kiln_burn::record::{self, Bindings, Place, Watch};
use kiln_burn::{Error, Kiln};
use kiln_profile::Category;

use super::history::Cause;
use super::places;
use super::plan::{Plan, Trace};
use super::rehearsal::{Rehearsal, host_parts};
use super::shards::Shards;
use super::{TrainBackend, Trained};
use crate::input::{Signature, StepInput};

/// The step for inputs of one signature.
pub(super) struct Variant<L> {
    pub signature: Signature,
    /// Type and shape of each tensor of the input.
    pub types: Vec<String>,
    /// The last recorded call.
    pub trace: Trace,
    pub plan: Option<Plan<L>>,
    /// Calls that succeeded.
    pub calls: u64,
    /// Why it is recorded at each call, if it is.
    pub obstacle: Option<String>,
    /// Why its plan was given up since the last call.
    pub lapsed: Option<Cause>,
}

/// See the module. The variant that was called last comes first.
pub(super) struct Variants<B: TrainBackend, O: SimpleOptimizer<Kiln>, L> {
    list: Vec<Variant<L>>,
    /// Most variants; those that were not called for longest are dropped.
    capacity: usize,
    /// Whether parameters are stored in 16 bits and updated as `f32`.
    widened: bool,
    /// How the ranks divide parameters and the optimizer's state, if they do.
    shards: Option<Shards>,
    /// The watch on the state of all plans.
    watch: Arc<Watch>,
    /// Whether the plans are detached from the state, until the next recorded call.
    suspended: bool,
    /// The optimizer's host code, as of the last call; none after a recorded one.
    rehearsal: Option<Rehearsal<B, O>>,
}

/// A plan, and a rehearsal of the optimizer that it is called with.
type Replayed<'a, B, O, L> = (&'a Plan<L>, &'a Rehearsal<B, O>);

impl<B, O, L> Variants<B, O, L>
where
    B: TrainBackend,
    O: SimpleOptimizer<Kiln>,
    L: StepInput + Clone,
{
    /// No variants, with room for `capacity`, of a step that updates parameters of 16 bits as `f32` if `widened`
    /// says so, and shares of them if there are `shards`.
    pub(super) fn new(capacity: usize, widened: bool, shards: Option<Shards>) -> Self {
        Self {
            list: Vec::new(),
            capacity,
            widened,
            shards,
            watch: Arc::default(),
            suspended: false,
            rehearsal: None,
        }
    }

    /// Whether nothing can be replayed before the next recorded call.
    pub(super) fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// The number of the variant that has this signature.
    pub(super) fn position(&self, signature: &Signature) -> Option<usize> {
        self.list
            .iter()
            .position(|variant| variant.signature == *signature)
    }

    /// Variant `index`.
    pub(super) fn get(&self, index: usize) -> &Variant<L> {
        &self.list[index]
    }

    /// Variant `index`, to change it.
    pub(super) fn get_mut(&mut self, index: usize) -> &mut Variant<L> {
        &mut self.list[index]
    }

    /// The difference between an input of these types and those of the nearest variant, in the words of a
    /// guard.
    pub(super) fn difference(&self, types: &[String]) -> String {
        let differing = |variant: &&Variant<L>| {
            let same = variant.types.iter().zip(types).filter(|(a, b)| a == b).count();
            variant.types.len().max(types.len()) - same
        };
        let Some(nearest) = self.list.iter().min_by_key(differing) else {
            return "nothing was compiled for it yet".to_owned();
        };
        let before = &nearest.types;
        if before.len() != types.len() {
            return format!(
                "number of tensors of the input: {} became {}",
                before.len(),
                types.len()
            );
        }
        match (0..types.len()).find(|&index| before[index] != types[index]) {
            Some(index) => format!(
                "type and shape of tensor {index} of the input: {} became {}",
                before[index], types[index]
            ),
            None => "plain values of the input, or which of its tensors are one and the same or are tracked, are others than before".to_owned(),
        }
    }

    /// The number of the variant that can be replayed with this input, as far as the input tells.
    pub(super) fn planned(&self, tensors: &[TensorIr], signature: &Signature) -> Option<usize> {
        let accepts = |variant: &Variant<L>| variant.plan.as_ref().is_some_and(|plan| plan.accepts(tensors));
        self.position(signature)
            .filter(|&index| accepts(&self.list[index]))
    }

    /// The plans, that of the last call first.
    pub(super) fn plans(&self) -> impl Iterator<Item = &Plan<L>> {
        self.list.iter().filter_map(|variant| variant.plan.as_ref())
    }

    fn plans_mut(&mut self) -> impl Iterator<Item = &mut Plan<L>> {
        self.list.iter_mut().filter_map(|variant| variant.plan.as_mut())
    }

    /// A tensor that a plan relies on at a place where the program has another one by now; `found` are places
    /// with the tensors that they have.
    pub(super) fn replaced(&self, found: &[places::Found]) -> Option<TensorId> {
        let found: HashMap<&str, TensorId> = found.iter().map(|found| (&*found.name, found.id)).collect();
        let relies_on = |plan: &Plan<L>| {
            let bindings = plan.replay.bindings();
            let mut used = used_places(bindings).map(|place| &bindings.places[place]);
            used.find(|place| found.get(&*place.name).is_some_and(|&id| id != place.after))
                .map(|place| place.after)
        };
        self.plans().find_map(relies_on)
    }

    /// The watch for the state of a new plan.
    pub(super) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Why the variants that are recorded at each call are; that of the last call first.
    pub(super) fn obstacle(&self) -> Option<&String> {
        self.list.iter().find_map(|variant| variant.obstacle.as_ref())
    }

    /// The optimizer's scalars of the next step of variant `index`; none if its host code takes another
    /// branch than in the plan, or they cannot be told.
    pub(super) fn scalars<M: AutodiffModule<B> + Clone>(
        &mut self,
        index: usize,
        lr: LearningRate,
        trained: &mut Option<Trained<B, M, O>>,
    ) -> Option<Vec<ScalarIr>> {
        let _span = kiln_profile::span(Category::Host, "rehearsal");
        let updates = &self.list[index].plan.as_ref()?.updates;
        let fits = |rehearsal: &Rehearsal<B, O>| updates.has_members_of(rehearsal.updates());
        if !self.rehearsal.as_ref().is_some_and(fits) {
            let (model, optim) = trained.take()?;
            let optim = match self.rehearsal.take() {
                Some(rehearsal) => rehearsal.catch_up(optim),
                None => optim,
            };
            let parameters = updates.parameters();
            let own = match &self.shards {
                Some(shards) => record::rehearse(|| shards.own_parameters(M::clone(&model), &parameters)),
                None => None,
            };
            let rehearsed = own.as_ref().map_or(&*model, |(own, _)| own);
            let host = host_parts(&optim);
            self.rehearsal = Rehearsal::new(rehearsed, &optim, &parameters, self.widened, &host);
            *trained = Some((model, optim));
        }
        let rehearsal = self.rehearsal.as_mut()?;
        let scalars = rehearsal.scalars(lr)?;
        (rehearsal.updates() == updates).then_some(scalars)
    }

    /// The plan that was called last, and a rehearsal of its optimizer; none if nothing is replayed. `lr` is
    /// any learning rate with which the optimizer takes the branch of the plan.
    pub(super) fn replayed<M: AutodiffModule<B> + Clone>(
        &mut self,
        lr: LearningRate,
        trained: &mut Option<Trained<B, M, O>>,
    ) -> Option<Replayed<'_, B, O, L>> {
        if self.suspended {
            return None;
        }
        let index = self.list.iter().position(|variant| variant.plan.is_some())?;
        self.scalars(index, lr, trained)?;
        Some((self.list[index].plan.as_ref()?, self.rehearsal.as_ref()?))
    }

    /// Continues with the rehearsal of a call that was recorded.
    pub(super) fn rehearsed(&mut self, rehearsal: Rehearsal<B, O>) {
        self.rehearsal = Some(rehearsal);
    }

    /// Replays variant `index` with the optimizer's scalars that [`Variants::scalars`] found.
    pub(super) fn run(
        &mut self,
        index: usize,
        tensors: &[TensorIr],
        input: impl StepInput,
        scalars: &[ScalarIr],
    ) -> Result<L, Error> {
        self.list[..=index].rotate_right(1);
        self.list[1..]
            .iter()
            .filter_map(|variant| variant.plan.as_ref())
            .for_each(|plan| plan.replay.release());
        let variant = &mut self.list[0];
        let reason = || Error::NoValue {
            reason: "the step has no plan".into(),
        };
        let plan = variant.plan.as_ref().ok_or_else(reason)?;
        let output = plan.run(tensors, input, scalars)?;
        variant.calls += 1;
        if let Some(rehearsal) = &mut self.rehearsal {
            rehearsal.commit();
        }
        Ok(output)
    }

    /// Whether all plans have the state they need: not after a replay that failed half way.
    pub(super) fn have_state(&self) -> bool {
        self.plans().all(|plan| plan.replay.has_state())
    }

    /// Before a recorded call: state goes to the table, and the host state of `optim` is brought up to date.
    pub(super) fn suspend<M: AutodiffModule<B>>(
        &mut self,
        optim: OptimizerAdaptor<O, M, B>,
    ) -> OptimizerAdaptor<O, M, B> {
        if !std::mem::replace(&mut self.suspended, true) {
            self.plans().for_each(|plan| plan.replay.suspend());
            self.watch = Arc::default();
        }
        match self.rehearsal.take() {
            Some(rehearsal) => rehearsal.catch_up(optim),
            None => optim,
        }
    }

    /// After a recorded call: `variant` has the new state of its signature, and other plans continue from
    /// the tensors that places have.
    pub(super) fn resume(&mut self, mut variant: Variant<L>, places: &[Place]) {
        if let Some(position) = self.position(&variant.signature) {
            variant.calls += self.list.remove(position).calls;
        }
        self.list.insert(0, variant);
        self.list.truncate(self.capacity);
        self.suspended = false;
        let now: HashMap<Arc<str>, TensorId> = places
            .iter()
            .map(|place| (place.name.clone(), place.after))
            .collect();
        for variant in &mut self.list[1..] {
            let follows = |plan: &mut Plan<L>| plan.replay.follow(&now, &self.watch);
            if !variant.plan.as_mut().is_none_or(follows) {
                variant.plan = None;
                let what = "the model or the optimizer has other tensors, or shares others, than when the step was recorded";
                variant.lapsed = Some(Cause::Disturbed(what.to_owned()));
            }
        }
        self.plans().for_each(|plan| plan.replay.watch());
    }

    /// Drops all plans.
    pub(super) fn drop_plans(&mut self) {
        self.list.iter_mut().for_each(|variant| variant.plan = None);
        self.suspended = false;
        self.rehearsal = None;
    }

    /// Lets `renew` give the program's objects other ids for some tensors of the plans' state, and follows
    /// them; `renew` returns the new id of each old one.
    pub(super) fn rename(
        &mut self,
        renew: impl FnOnce(HashSet<TensorId>) -> Result<HashMap<TensorId, TensorId>, Error>,
    ) -> Result<(), Error> {
        let state = self.plans().flat_map(|plan| plan.replay.state_ids()).collect();
        // The old ids may be dropped now.
        self.plans().for_each(|plan| plan.replay.unwatch());
        let names = renew(state)?;
        self.plans_mut().for_each(|plan| plan.replay.rename(&names));
        self.plans().for_each(|plan| plan.replay.watch());
        Ok(())
    }
}

/// The places that a step reads, writes or returns.
fn used_places(bindings: &Bindings) -> impl Iterator<Item = usize> {
    let read = bindings.inputs.iter().filter_map(|input| match input {
        InputBinding::State(place) | InputBinding::Unchanged(place) => Some(*place),
        _ => None,
    });
    let written = bindings.outputs.iter().filter_map(|output| match output {
        OutputBinding::State(place) | OutputBinding::Written(place) => Some(*place),
        _ => None,
    });
    let returned = bindings.results.iter().filter_map(|result| match result {
        ResultBinding::Place(place) => Some(*place),
        _ => None,
    });
    read.chain(written).chain(returned)
}
