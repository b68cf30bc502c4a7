//! Replaying a step without running the program that recorded it.
//!
//! Two consecutive calls that ran the same step tell how state flows: an input of the second call that was an
//! output of the first is *state* (a parameter, a moment, a running mean); one that is the same tensor in
//! both, or is made from equal data on the host in both, is *constant* (a frozen parameter, a table of
//! angles, a mask); one the caller names is *fresh* (the batch). If every input is one of these, the step can
//! be replayed: state belongs to the ids under which the program's own objects (model, optimizer) hold it,
//! so that these objects are up to date without being touched.
//!
//! State stays in the replay's memory from run to run, and the table knows where it is ([`table::Keeper`]). When the program asks for such a
//! tensor it is moved into the table; the next run takes it back, and computes on a copy if the program still holds it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_flex::FlexTensor;
use burn_ir::{ScalarIr, TensorId};
use rustc_hash::FxHashMap;

use super::region::LastRun;
use super::step::Step;
use crate::error::Error;
use crate::execute::memory::{Lifetime, Memory};
use crate::random;
use crate::table::{self, Keeper, Slot};

/// Where an input of a replayed step comes from.
enum Source {
    /// The last run, or the table under this id.
    State(TensorId),
    /// It is the same at each run.
    Constant(FlexTensor),
    /// The caller's tensor of this number.
    Fresh(usize),
}

/// Where an output goes that does not stay in the memory.
struct Target {
    output: usize,
    /// To the caller, as result of this number.
    result: Option<usize>,
    /// To the table, under this id.
    table: Option<TensorId>,
    /// To the memory, as this argument.
    argument: Option<usize>,
}

/// Why a step cannot be replayed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplayError {
    /// The two calls did not run the same step.
    #[error("the last two calls ran different steps")]
    Differs,
    /// The region was cut by a graph break.
    #[error("the region has a graph break")]
    Broken,
    /// An input is neither state, nor constant, nor named by the caller.
    #[error(
        "input {index} ({ty}) is a tensor the closure makes anew, with other elements, in each call; pass it as an input of the step, or make it once outside"
    )]
    Unknown {
        /// Its position among the inputs.
        index: usize,
        /// Its type and shape.
        ty: String,
    },
}

/// A step with its state, ready to be replayed.
pub struct Replay {
    step: Arc<Step>,
    state: Arc<State>,
    /// Argument of the step, and number among the caller's tensors.
    fresh: Vec<(usize, usize)>,
    targets: Vec<Target>,
    random_operations: usize,
}

/// What a replayed step keeps from run to run.
struct State(Mutex<Held>);

struct Held {
    memory: Memory,
    /// For each argument of the step that is state, the id under which the table knows it.
    ids: Vec<Option<TensorId>>,
    /// Arguments that are in the table, not in the memory.
    outside: Vec<bool>,
    /// Whether any is.
    any_outside: bool,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Held> {
        // A panic inside a run is caught there, and its state given up.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for State {
    fn give_back(&self, index: usize) {
        let mut held = self.lock();
        let Some(id) = held.ids[index].filter(|_| !held.outside[index]) else {
            return;
        };
        held.outside[index] = true;
        held.any_outside = true;
        let slot = match held.memory.take(index) {
            Some(tensor) => Slot::Ready(tensor),
            None => Slot::Failed("the step that had it failed".into()),
        };
        table::settle(id, slot);
    }
}

impl Held {
    /// Takes state that is in the table back into the memory, and leaves word of it there.
    fn collect(&mut self, keeper: &Arc<State>) -> Result<(), Error> {
        if !self.any_outside {
            return Ok(());
        }
        for index in 0..self.ids.len() {
            let Some(id) = self.ids[index].filter(|_| self.outside[index]) else {
                continue;
            };
            // Out of the table: the step may overwrite what nobody else holds.
            self.memory.put(index, ready(table::remove(id))?);
            table::keep(id, keeper.clone(), index);
            self.outside[index] = false;
        }
        self.any_outside = false;
        Ok(())
    }

    /// Gives up all state, after a run that failed half way.
    fn fail(&mut self, reason: &Arc<str>) {
        for (id, outside) in self.ids.iter().zip(&mut self.outside) {
            if let Some(id) = id {
                table::fail(*id, reason.clone());
                *outside = true;
            }
        }
        self.any_outside = true;
    }
}

/// The tensor of a slot.
fn ready(slot: Option<Slot>) -> Result<FlexTensor, Error> {
    match slot {
        Some(Slot::Ready(tensor)) => Ok(tensor),
        Some(Slot::Failed(reason)) => Err(Error::NoValue { reason }),
        None => Err(Error::NoValue {
            reason: "state of the step was dropped".into(),
        }),
    }
}

/// Input `index` if both calls made it from equal data on the host.
fn unchanged(previous: &LastRun, last: &LastRun, index: usize) -> Option<FlexTensor> {
    let (before, now) = (previous.host_data.get(&index)?, last.host_data.get(&index)?);
    let (before, now) = (before.to_contiguous(), now.to_contiguous());
    (before.bytes() == now.bytes()).then_some(now)
}

/// Where each input of `last` comes from in a replay.
fn sources(previous: &LastRun, last: &LastRun, fresh: &[TensorId]) -> Result<Vec<Source>, ReplayError> {
    let before: FxHashMap<TensorId, usize> = previous
        .outputs
        .iter()
        .enumerate()
        .map(|(position, &id)| (id, position))
        .collect();
    let unknown = |index: usize| ReplayError::Unknown {
        index,
        ty: last.step.inputs()[index].clone(),
    };
    let source = |(index, &id): (usize, &TensorId)| {
        if let Some(position) = fresh.iter().position(|&fresh| fresh == id) {
            Ok(Source::Fresh(position))
        } else if let Some(&position) = before.get(&id) {
            // What was output `position` then is output `position` of the last call now.
            Ok(Source::State(last.outputs[position]))
        } else if previous.inputs[index] == id {
            ready(table::get(id))
                .map(Source::Constant)
                .map_err(|_| unknown(index))
        } else {
            unchanged(previous, last, index)
                .map(Source::Constant)
                .ok_or_else(|| unknown(index))
        }
    };
    last.inputs.iter().enumerate().map(source).collect()
}

impl Replay {
    /// A replay of `last`, the call after `previous`. `fresh` are the ids of the tensors that the caller supplies at each call, in order, as they were in `last`;
    /// `results` those it takes away.
    pub fn new(
        previous: &LastRun,
        last: &LastRun,
        fresh: &[TensorId],
        results: &[TensorId],
    ) -> Result<Self, ReplayError> {
        if last.segment != 0 || previous.segment != 0 {
            return Err(ReplayError::Broken);
        }
        if !Arc::ptr_eq(&previous.step, &last.step) {
            return Err(ReplayError::Differs);
        }
        let step = &last.step;
        let sources = sources(previous, last, fresh)?;
        // What the graph does not read needs no source.
        let arguments: Vec<(usize, Source)> = sources
            .into_iter()
            .enumerate()
            .filter_map(|(position, source)| Some((step.argument(position)?, source)))
            .collect();
        let mut lifetimes = vec![Lifetime::Run; arguments.len()];
        let mut ids = vec![None; arguments.len()];
        for (argument, source) in &arguments {
            match source {
                Source::State(id) => ids[*argument] = Some(*id),
                Source::Constant(_) => lifetimes[*argument] = Lifetime::Constant,
                Source::Fresh(_) => {}
            }
        }
        let argument_of = |id: TensorId| ids.iter().position(|&known| known == Some(id));
        let mut becomes = vec![None; last.outputs.len()];
        let mut targets = Vec::new();
        for (output, &id) in last.outputs.iter().enumerate() {
            let result = results.iter().position(|&result| result == id);
            match (result, argument_of(id)) {
                (None, Some(argument)) => becomes[output] = Some(argument),
                (_, argument) => targets.push(Target {
                    output,
                    result,
                    table: (result.is_none() && argument.is_none()).then_some(id),
                    argument,
                }),
            }
        }
        let mut memory = Memory::new(lifetimes, becomes);
        let mut fresh = Vec::new();
        for (argument, source) in arguments {
            match source {
                Source::Constant(tensor) => memory.put(argument, tensor),
                Source::Fresh(number) => fresh.push((argument, number)),
                Source::State(_) => {}
            }
        }
        let held = Held {
            memory,
            outside: ids.iter().map(Option::is_some).collect(),
            any_outside: true,
            ids,
        };
        Ok(Self {
            step: step.clone(),
            state: Arc::new(State(Mutex::new(held))),
            fresh,
            targets,
            random_operations: last.random_operations,
        })
    }

    /// Runs the step once. `fresh` and `scalars` are in the order of the recording; the results are in the order of `results` of [`Replay::new`], none for those the step does
    /// not make.
    ///
    /// # Errors
    ///
    /// If the step fails, or state it needs has no value. State that had been handed to the step is then lost and says so when used.
    pub fn run(
        &self,
        fresh: &[FlexTensor],
        scalars: &[ScalarIr],
        results: usize,
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let streams: Vec<random::Stream> = (0..self.random_operations).map(|_| random::take()).collect();
        let mut guard = self.state.lock();
        let held = &mut *guard;
        held.collect(&self.state)?;
        for &(argument, number) in &self.fresh {
            held.memory.put(argument, fresh[number].clone());
        }
        let mut outputs = match self.step.run_on(&mut held.memory, scalars, &streams) {
            Ok(outputs) => outputs,
            Err(error) => {
                held.fail(&error.to_string().into());
                return Err(error);
            }
        };
        let mut taken = vec![None; results];
        for target in &self.targets {
            let Some(tensor) = outputs[target.output].take() else {
                continue;
            };
            if let Some(id) = target.table {
                table::insert(id, tensor.clone());
            }
            if let Some(argument) = target.argument {
                held.memory.put(argument, tensor.clone());
            }
            if let Some(result) = target.result {
                taken[result] = Some(tensor);
            }
        }
        Ok(taken)
    }

    /// Follows state that the program's objects hold under another id now: `names` has the new id of each old one. The tensors are in the table, under both.
    pub fn rename(&self, names: &HashMap<TensorId, TensorId>) {
        let mut held = self.state.lock();
        let held = &mut *held;
        for (index, id) in held.ids.iter_mut().enumerate() {
            if let Some(new) = id.and_then(|id| names.get(&id)) {
                *id = Some(*new);
                held.outside[index] = true;
                held.any_outside = true;
            }
        }
    }
}

impl Drop for Replay {
    /// State goes to the table, where the program's objects find it.
    fn drop(&mut self) {
        let arguments = self.state.lock().ids.len();
        (0..arguments).for_each(|index| self.state.give_back(index));
    }
}
