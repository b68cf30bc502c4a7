//! Replaying a step without running the program that recorded it.
//!
//! [`Bindings`] say where each input comes from and where each output goes. State belongs to the ids under which the program's own objects (model,
//! optimizer) hold it, so that these objects are up to date without being touched.
//!
//! State stays in the replay's memory from run to run, and the table knows where it is ([`table::Keeper`]). When the program asks for such a
//! tensor it is moved into the table; the next run takes it back, and computes on a copy if the program still holds it. A [`table::Watch`] on every
//! constant and on all state says when the program has dropped one of them: the replay is over then ([`Replay::disturbed`]), and the step is recorded again.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_ir::{ScalarIr, TensorId};

use super::binding::{Bindings, Call, InputBinding, OutputBinding, ResultBinding};
use super::step::Step;
use crate::error::Error;
use crate::execute::memory::{Lifetime, Memory};
use crate::random;
use crate::storage::Storage;
use crate::table::{self, Keeper, Slot, Watch};

/// A step with its state, ready to be replayed.
pub struct Replay {
    step: Arc<Step>,
    state: Arc<State>,
    bindings: Bindings,
    /// Argument of the step, and number among the caller's tensors.
    fresh: Vec<(usize, usize)>,
    results: Vec<Taken>,
    /// Outputs that go to places the step does not read, and their ids.
    written: Vec<(usize, TensorId)>,
    /// Ids of constants: their elements do not change while they exist.
    constants: Vec<TensorId>,
    random_operations: usize,
}

/// Where a result is taken from.
enum Taken {
    /// This output.
    Output(usize),
    /// This argument, before the step runs.
    Argument(usize),
    /// The table, under the id of this entry of `written`, before the step runs.
    Table(usize),
    /// The caller's tensor of this number.
    Fresh(usize),
    /// Always this one.
    Constant(Storage),
}

/// What a replayed step keeps from run to run.
struct State {
    held: Mutex<Held>,
    watch: Arc<Watch>,
}

struct Held {
    memory: Memory,
    /// For each argument of the step that is state, the id under which the table knows it.
    ids: Vec<Option<TensorId>>,
    /// Arguments that are in the table, not in the memory.
    outside: Vec<bool>,
    /// Whether any is.
    any_outside: bool,
}

/// What put an end to a replay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disturbance {
    /// The tensor, in the words of its binding.
    what: String,
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} was replaced, dropped or written by the program since the last call",
            self.what
        )
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Held> {
        // A panic inside a run is caught there, and its state given up.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
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
            let tensor = match table::keep(id, keeper.clone(), index, &keeper.watch) {
                Some(Slot::Ready(tensor)) => tensor,
                Some(Slot::Failed(reason)) => return Err(Error::NoValue { reason }),
                None => {
                    let reason = "state of the step was dropped while the step was called".into();
                    return Err(Error::NoValue { reason });
                }
            };
            self.memory.put(index, tensor);
            self.outside[index] = false;
        }
        self.any_outside = false;
        Ok(())
    }

    /// Gives up all state, after a run that failed half way.
    fn fail(&mut self, reason: &Arc<str>) {
        for (id, outside) in self.ids.iter().zip(&mut self.outside) {
            if let Some(id) = id {
                table::fail_if_known(*id, reason);
                *outside = true;
            }
        }
        self.any_outside = true;
    }
}

impl Replay {
    /// A replay of `call`, whose bindings are `bindings`.
    pub fn new(bindings: Bindings, call: &Call) -> Self {
        let run = &call.run;
        let step = run.step.clone();
        let place_id = |place: usize| bindings.places[place].after;
        let arguments: Vec<(usize, usize)> = (0..run.inputs.len())
            .filter_map(|input| Some((step.argument(input)?, input)))
            .collect();
        let mut lifetimes = vec![Lifetime::Run; arguments.len()];
        let mut ids = vec![None; arguments.len()];
        let mut fresh = Vec::new();
        let mut held_from_start = Vec::new();
        for &(argument, input) in &arguments {
            match &bindings.inputs[input] {
                InputBinding::State(place) => ids[argument] = Some(place_id(*place)),
                InputBinding::Fresh(number) => fresh.push((argument, *number)),
                InputBinding::Constant(_, tensor) | InputBinding::HostData(tensor) => {
                    lifetimes[argument] = Lifetime::Constant;
                    held_from_start.push((argument, tensor.clone()));
                }
                InputBinding::Unread => {}
            }
        }
        let argument_of = |id: TensorId| ids.iter().position(|&known| known == Some(id));
        let returned = |output: usize| {
            let is = |result: &ResultBinding| matches!(result, ResultBinding::Computed(of) if *of == output);
            bindings.results.iter().any(is)
        };
        let mut becomes = vec![None; run.outputs.len()];
        let mut written = Vec::new();
        for (output, binding) in bindings.outputs.iter().enumerate() {
            match *binding {
                // A result leaves the memory; its copy for the next run is put back after the run.
                OutputBinding::State(place) if !returned(output) => {
                    becomes[output] = argument_of(place_id(place));
                }
                OutputBinding::Written(place) => written.push((output, place_id(place))),
                OutputBinding::State(_) | OutputBinding::Result | OutputBinding::Dropped => {}
            }
        }
        let taken = |result: &ResultBinding| match result {
            ResultBinding::Computed(output) => Taken::Output(*output),
            ResultBinding::Fresh(number) => Taken::Fresh(*number),
            ResultBinding::Constant(_, tensor) => Taken::Constant(tensor.clone()),
            ResultBinding::Place(place) => {
                let id = place_id(*place);
                match (argument_of(id), written.iter().position(|&(_, of)| of == id)) {
                    (Some(argument), _) => Taken::Argument(argument),
                    (None, Some(entry)) => Taken::Table(entry),
                    (None, None) => unreachable!("a place that changes is an output of the step"),
                }
            }
        };
        let results = bindings.results.iter().map(taken).collect();
        let constants = bindings.inputs.iter().filter_map(|input| match input {
            InputBinding::Constant(id, _) => Some(*id),
            _ => None,
        });
        let returned_constants = bindings.results.iter().filter_map(|result| match result {
            ResultBinding::Constant(id, _) => Some(*id),
            _ => None,
        });
        let constants = constants.chain(returned_constants).collect();
        let mut memory = Memory::new(lifetimes, becomes);
        held_from_start
            .into_iter()
            .for_each(|(argument, tensor)| memory.put(argument, tensor));
        let held = Held {
            memory,
            outside: ids.iter().map(Option::is_some).collect(),
            any_outside: true,
            ids,
        };
        let replay = Self {
            step,
            state: Arc::new(State {
                held: Mutex::new(held),
                watch: Arc::default(),
            }),
            bindings,
            fresh,
            results,
            written,
            constants,
            random_operations: run.random_operations,
        };
        replay.watch(table::watch);
        replay
    }

    /// What every tensor of the step is bound to.
    pub fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    /// The step.
    pub(super) fn step(&self) -> &Step {
        &self.step
    }

    /// Number of random operations in a call.
    pub(super) fn random_operations(&self) -> usize {
        self.random_operations
    }

    /// Ids of the places that the step writes.
    pub fn state_ids(&self) -> Vec<TensorId> {
        let state = self
            .state
            .lock()
            .ids
            .iter()
            .flatten()
            .copied()
            .collect::<Vec<_>>();
        state
            .into_iter()
            .chain(self.written.iter().map(|&(_, id)| id))
            .collect()
    }

    /// What ended the replay; none if everything it relies on is as it was.
    pub fn disturbed(&self) -> Option<Disturbance> {
        let id = self.state.watch.tripped()?;
        let of = |binding: &InputBinding| match binding {
            InputBinding::State(place) => self.bindings.places[*place].after == id,
            InputBinding::Constant(constant, _) => *constant == id,
            _ => false,
        };
        let place = || self.bindings.places.iter().find(|place| place.after == id);
        let what = match self.bindings.inputs.iter().position(of) {
            Some(index) => format!("input {index}, {},", self.bindings.describe_input(index)),
            None => place().map_or_else(|| "a constant result".to_owned(), |place| place.name.to_string()),
        };
        Some(Disturbance { what })
    }

    /// Runs the step once. `fresh` and `scalars` are in the order of the recording; the results are in the order of [`Bindings::results`].
    ///
    /// # Errors
    ///
    /// If the step fails, or state it needs has no value. [`Replay::has_state`] tells whether its state is as before the call.
    pub fn run(&self, fresh: &[Storage], scalars: &[ScalarIr]) -> Result<Vec<Storage>, Error> {
        let streams: Vec<random::Stream> = (0..self.random_operations).map(|_| random::take()).collect();
        let mut guard = self.state.lock();
        let held = &mut *guard;
        held.collect(&self.state)?;
        // What is handed out as it is before the step: the step then computes on a copy.
        let before: Vec<Option<Storage>> = self
            .results
            .iter()
            .map(|taken| self.before(taken, held))
            .collect();
        for &(argument, number) in &self.fresh {
            held.memory.put(argument, fresh[number].clone());
        }
        let mut outputs = match self.step.run_on(&mut held.memory, scalars, &streams) {
            Ok(outputs) => outputs,
            Err(error) => {
                // An index out of range, or missing memory, is found before anything is overwritten.
                if !error.is_before_overwriting() {
                    held.fail(&error.to_string().into());
                }
                return Err(error);
            }
        };
        let missing = || Error::NoValue {
            reason: "the step did not make it".into(),
        };
        let results = self
            .results
            .iter()
            .zip(before)
            .map(|(taken, before)| match taken {
                Taken::Output(output) => outputs[*output].clone().ok_or_else(missing),
                Taken::Fresh(number) => Ok(fresh[*number].clone()),
                Taken::Constant(tensor) => Ok(tensor.clone()),
                Taken::Argument(_) | Taken::Table(_) => before.ok_or_else(missing),
            });
        let results = results.collect::<Result<Vec<_>, _>>()?;
        for &(output, id) in &self.written {
            if let Some(tensor) = &outputs[output] {
                table::overwrite(id, tensor.clone(), &self.state.watch);
            }
        }
        // State that is a result, too: both have one buffer until the next run.
        for (output, binding) in self.bindings.outputs.iter().enumerate() {
            if let OutputBinding::State(place) = *binding
                && let Some(tensor) = outputs[output].take()
            {
                let id = Some(self.bindings.places[place].after);
                let argument = held.ids.iter().position(|&known| known == id);
                argument
                    .into_iter()
                    .for_each(|argument| held.memory.put(argument, tensor.clone()));
            }
        }
        Ok(results)
    }

    /// A result that is what a place has before the step runs.
    fn before(&self, taken: &Taken, held: &mut Held) -> Option<Storage> {
        match taken {
            Taken::Argument(argument) => {
                let tensor = held.memory.take(*argument)?;
                held.memory.put(*argument, tensor.clone());
                Some(tensor)
            }
            Taken::Table(entry) => match table::get(self.written[*entry].1)? {
                Slot::Ready(tensor) => Some(tensor),
                Slot::Failed(_) => None,
            },
            Taken::Output(_) | Taken::Fresh(_) | Taken::Constant(_) => None,
        }
    }

    /// Whether all state has its elements: false after a run that failed when it had begun to overwrite them.
    pub fn has_state(&self) -> bool {
        let ids = self.state_ids();
        ids.into_iter().all(table::is_ready)
    }

    /// Follows state that the program's objects hold under another id now: `renew` renames objects and gives the new id of each old one. The tensors are in the table, under
    /// the new ids.
    pub fn rename<E>(
        &mut self,
        renew: impl FnOnce() -> Result<HashMap<TensorId, TensorId>, E>,
    ) -> Result<(), E> {
        // The old ids may be dropped now.
        self.watch(table::unwatch);
        let names = renew()?;
        // An object that two places share is renamed twice.
        let last_name = |mut id: TensorId| {
            while let Some(&next) = names.get(&id) {
                id = next;
            }
            id
        };
        {
            let mut held = self.state.lock();
            let held = &mut *held;
            for (index, id) in held.ids.iter_mut().enumerate() {
                let old = *id;
                *id = id.map(last_name);
                if *id != old {
                    held.outside[index] = true;
                    held.any_outside = true;
                }
            }
        }
        self.written.iter_mut().for_each(|(_, id)| *id = last_name(*id));
        let places = self.bindings.places.iter_mut();
        places.for_each(|place| place.after = last_name(place.after));
        self.watch(table::watch);
        Ok(())
    }

    /// Puts the watch on everything the replay relies on, or takes it off.
    fn watch(&self, change: impl Fn(TensorId, &Arc<Watch>)) {
        let ids = self.state_ids();
        ids.iter()
            .chain(&self.constants)
            .for_each(|&id| change(id, &self.state.watch));
    }
}

impl Drop for Replay {
    /// State goes to the table, where the program's objects find it.
    fn drop(&mut self) {
        self.watch(table::unwatch);
        let arguments = self.state.lock().ids.len();
        (0..arguments).for_each(|index| self.state.give_back(index));
    }
}
