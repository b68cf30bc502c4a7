//! Replaying a step without running the program that recorded it.
//!
//! [`Bindings`] say where each input comes from and where each output goes. State belongs to the ids under
//! which the program's own objects (model, optimizer) hold it, so that these objects are up to date without
//! being touched.
//!
//! State stays in the replay's memory from run to run, and the table knows that ([`table::Keeper`]). When
//! the program asks for such a tensor it is moved into the table; the next run takes it back, and computes
//! on a copy if the program still holds it. A [`table::Watch`] on every constant and on all state reports
//! when the program has dropped one of them: the replay is over then ([`Replay::disturbed`]), and the step
//! is recorded again.
//!
//! An owner with several replays (`TrainStep` has one for each signature of its input) has one state. The
//! replays share the watch on it, so that one may write what another reads, and only one of them has it in
//! its memory:
//!
//! ```text
//!   a.run()                          state is in a's memory
//!   a.release()    a ──► table       .. and in the table
//!   b.run()        table ──► b       what a's step made is b's state
//! ```
//!
//! A recorded call leaves the state under other ids. The owner takes the replays off the state before
//! ([`Replay::suspend`]) and tells them the new ids after it ([`Replay::follow`]).

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
    /// For each argument of the step that is state, its place.
    state_places: Vec<Option<usize>>,
    /// Outputs that go to places the step does not read, and these places.
    written: Vec<(usize, usize)>,
    /// Arguments that the step reads from places and does not change, and these places.
    unchanged: Vec<(usize, usize)>,
    /// Ids of constants: their elements do not change while they exist.
    constants: Vec<TensorId>,
    constants_watch: Arc<Watch>,
    random_operations: usize,
}

/// The source of a result.
enum Taken {
    /// This output.
    Output(usize),
    /// This argument, before the step runs.
    Argument(usize),
    /// The table, which has the tensor of this place, before the step runs.
    Table(usize),
    /// The caller's tensor of this number.
    Fresh(usize),
    /// Always this one.
    Constant(Storage),
}

/// The state that a replayed step keeps from run to run.
struct State {
    held: Mutex<Held>,
}

struct Held {
    memory: Memory,
    /// For each argument of the step that is state, the id under which the table knows it.
    ids: Vec<Option<TensorId>>,
    /// Arguments that are in the table, not in the memory.
    outside: Vec<bool>,
    /// Whether any is.
    any_outside: bool,
    /// Whether the memory has the arguments that the step reads from places and does not change.
    has_unchanged: bool,
    /// The owner's watch on state.
    watch: Arc<Watch>,
}

/// The event that ended a replay.
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
    /// Takes state that is in the table back into the memory, and notes in the table who keeps it.
    fn collect(&mut self, keeper: &Arc<State>) -> Result<(), Error> {
        if !self.any_outside {
            return Ok(());
        }
        for index in 0..self.ids.len() {
            let Some(id) = self.ids[index].filter(|_| self.outside[index]) else {
                continue;
            };
            // The tensor leaves the table: the step may overwrite it if no other handle shares it.
            let tensor = match table::keep(id, keeper.clone(), index, &self.watch) {
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

    /// Whether the memory has any of the owner's state.
    fn holds_state(&self) -> bool {
        let mut state = self.ids.iter().zip(&self.outside);
        self.has_unchanged || state.any(|(id, outside)| id.is_some() && !outside)
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

/// The arguments of a step by what they are bound to.
struct Arguments {
    /// How long the memory keeps each.
    lifetimes: Vec<Lifetime>,
    /// For each that is state, its place.
    state_places: Vec<Option<usize>>,
    /// As in [`Replay`].
    fresh: Vec<(usize, usize)>,
    /// As in [`Replay`].
    unchanged: Vec<(usize, usize)>,
    /// Those that the memory holds from the start.
    held: Vec<(usize, Storage)>,
}

impl Arguments {
    fn new(step: &Step, bindings: &Bindings) -> Self {
        let inputs = bindings.inputs.iter().enumerate();
        let read: Vec<(usize, &InputBinding)> = inputs
            .filter_map(|(input, binding)| Some((step.argument(input)?, binding)))
            .collect();
        let mut arguments = Self {
            lifetimes: vec![Lifetime::Run; read.len()],
            state_places: vec![None; read.len()],
            fresh: Vec::new(),
            unchanged: Vec::new(),
            held: Vec::new(),
        };
        for (argument, binding) in read {
            match binding {
                InputBinding::State(place) => arguments.state_places[argument] = Some(*place),
                InputBinding::Unchanged(place) => {
                    arguments.lifetimes[argument] = Lifetime::Constant;
                    arguments.unchanged.push((argument, *place));
                }
                InputBinding::Fresh(number) => arguments.fresh.push((argument, *number)),
                InputBinding::Constant(_, tensor) | InputBinding::HostData(tensor) => {
                    arguments.lifetimes[argument] = Lifetime::Constant;
                    arguments.held.push((argument, tensor.clone()));
                }
                InputBinding::Unread => {}
            }
        }
        arguments
    }
}

/// The ids of constants that a step reads or a call returns.
fn constants(bindings: &Bindings) -> Vec<TensorId> {
    let read = bindings.inputs.iter().filter_map(|input| match input {
        InputBinding::Constant(id, _) => Some(*id),
        _ => None,
    });
    let returned = bindings.results.iter().filter_map(|result| match result {
        ResultBinding::Constant(id, _) => Some(*id),
        _ => None,
    });
    read.chain(returned).collect()
}

impl Replay {
    /// A replay of `call`, whose bindings are `bindings`. `watch` is the owner's watch on state, one for all
    /// its replays.
    pub fn new(bindings: Bindings, call: &Call, watch: &Arc<Watch>) -> Self {
        let run = &call.run;
        let step = run.step.clone();
        let arguments = Arguments::new(&step, &bindings);
        let ids: Vec<Option<TensorId>> = arguments
            .state_places
            .iter()
            .map(|place| place.map(|place| bindings.places[place].after))
            .collect();
        // By id: places may share a tensor.
        let argument_of = |place: usize| {
            let id = Some(bindings.places[place].after);
            ids.iter().position(|&known| known == id)
        };
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
                    becomes[output] = argument_of(place);
                }
                OutputBinding::Written(place) => written.push((output, place)),
                OutputBinding::State(_) | OutputBinding::Result | OutputBinding::Dropped => {}
            }
        }
        let taken = |result: &ResultBinding| match result {
            ResultBinding::Computed(output) => Taken::Output(*output),
            ResultBinding::Fresh(number) => Taken::Fresh(*number),
            ResultBinding::Constant(_, tensor) => Taken::Constant(tensor.clone()),
            ResultBinding::Place(place) => match argument_of(*place) {
                Some(argument) => Taken::Argument(argument),
                None => Taken::Table(*place),
            },
        };
        let results = bindings.results.iter().map(taken).collect();
        let mut memory = Memory::new(arguments.lifetimes, becomes);
        arguments
            .held
            .into_iter()
            .for_each(|(argument, tensor)| memory.put(argument, tensor));
        let held = Held {
            memory,
            outside: ids.iter().map(Option::is_some).collect(),
            any_outside: true,
            has_unchanged: false,
            watch: watch.clone(),
            ids,
        };
        let replay = Self {
            step,
            state: Arc::new(State {
                held: Mutex::new(held),
            }),
            fresh: arguments.fresh,
            results,
            state_places: arguments.state_places,
            written,
            unchanged: arguments.unchanged,
            constants: constants(&bindings),
            bindings,
            constants_watch: Arc::default(),
            random_operations: run.random_operations,
        };
        replay
            .constants
            .iter()
            .for_each(|&id| table::watch(id, &replay.constants_watch));
        replay.watch();
        replay
    }

    /// The bindings of the step's tensors.
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
        let state = self.state_places.iter().flatten();
        let written = self.written.iter().map(|(_, place)| place);
        state
            .chain(written)
            .map(|&place| self.bindings.places[place].after)
            .collect()
    }

    /// The event that ended the replay; none if all tensors that it relies on are as they were.
    pub fn disturbed(&self) -> Option<Disturbance> {
        let of_state = self.state.lock().watch.tripped();
        let id = of_state.or_else(|| self.constants_watch.tripped())?;
        let of = |binding: &InputBinding| match binding {
            InputBinding::State(place) | InputBinding::Unchanged(place) => {
                self.bindings.places[*place].after == id
            }
            InputBinding::Constant(constant, _) => *constant == id,
            _ => false,
        };
        let place = || self.bindings.places.iter().find(|place| place.after == id);
        let what = match self.bindings.inputs.iter().position(of) {
            Some(index) => format!("input {index}, {},", self.bindings.describe_input(index)),
            None => match (place(), of_state) {
                (Some(place), _) => place.name.to_string(),
                (None, Some(_)) => "state of the step".to_owned(),
                (None, None) => "a constant result".to_owned(),
            },
        };
        Some(Disturbance { what })
    }

    /// Runs the step once. `fresh` and `scalars` are in the order of the recording; the results are in the
    /// order of [`Bindings::results`].
    ///
    /// # Errors
    ///
    /// If the step fails, or state it needs has no value. [`Replay::has_state`] tells whether its state is
    /// as before the call.
    pub fn run(&self, fresh: &[Storage], scalars: &[ScalarIr]) -> Result<Vec<Storage>, Error> {
        let streams: Vec<random::Stream> = (0..self.random_operations).map(|_| random::take()).collect();
        let mut guard = self.state.lock();
        let held = &mut *guard;
        held.collect(&self.state)?;
        self.collect_unchanged(held)?;
        // Results that are tensors before the step are taken first; the step then computes on a copy.
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
                // An index out of range, or missing memory, is found before anything is overwritten, and a
                // check keeps what may be.
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
        for &(output, place) in &self.written {
            if let Some(tensor) = &outputs[output] {
                table::overwrite(self.bindings.places[place].after, tensor.clone(), &held.watch);
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

    /// Puts the tensors that the step reads from places and does not change into the memory.
    fn collect_unchanged(&self, held: &mut Held) -> Result<(), Error> {
        if std::mem::replace(&mut held.has_unchanged, true) {
            return Ok(());
        }
        for &(argument, place) in &self.unchanged {
            let reason = match table::get(self.bindings.places[place].after) {
                Some(Slot::Ready(tensor)) => {
                    held.memory.put(argument, tensor);
                    continue;
                }
                Some(Slot::Failed(reason)) => reason,
                None => "a constant of the step was dropped while the step was called".into(),
            };
            held.has_unchanged = false;
            return Err(Error::NoValue { reason });
        }
        Ok(())
    }

    /// A result that is the tensor of a place before the step runs.
    fn before(&self, taken: &Taken, held: &mut Held) -> Option<Storage> {
        match taken {
            Taken::Argument(argument) => {
                let tensor = held.memory.take(*argument)?;
                held.memory.put(*argument, tensor.clone());
                Some(tensor)
            }
            Taken::Table(place) => match table::get(self.bindings.places[*place].after)? {
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

    /// Puts all state into the table: another replay of the owner is about to run.
    pub fn release(&self) {
        if !self.state.lock().holds_state() {
            return;
        }
        (0..self.state_places.len()).for_each(|index| self.state.give_back(index));
        let mut held = self.state.lock();
        let held = &mut *held;
        if std::mem::take(&mut held.has_unchanged) {
            for &(argument, _) in &self.unchanged {
                held.memory.take(argument);
            }
        }
    }

    /// Detaches the replay from the owner's state, which a recorded call is about to replace. It runs again
    /// after [`Replay::follow`].
    pub fn suspend(&self) {
        self.release();
        self.unwatch();
    }

    /// Continues from the tensors that places have after a recorded call, by name, under the owner's watch,
    /// which it enters with [`Replay::watch`]. Returns false if the replay cannot continue: a place is
    /// gone, or shares its tensor with other places than it did.
    pub fn follow(&mut self, now: &HashMap<Arc<str>, TensorId>, watch: &Arc<Watch>) -> bool {
        let found = self
            .bindings
            .places
            .iter()
            .map(|place| now.get(&place.name).copied());
        let Some(ids) = found.collect::<Option<Vec<TensorId>>>() else {
            return false;
        };
        let before = self.bindings.places.iter().map(|place| place.after);
        if first_equals(before) != first_equals(ids.iter().copied()) {
            return false;
        }
        for (place, id) in self.bindings.places.iter_mut().zip(ids) {
            place.after = id;
        }
        self.state.lock().watch = watch.clone();
        self.note_ids();
        true
    }

    /// Enters the ids that places have now; state is in the table.
    fn note_ids(&self) {
        let mut held = self.state.lock();
        let held = &mut *held;
        for (index, place) in self.state_places.iter().enumerate() {
            let id = place.map(|place| self.bindings.places[place].after);
            if held.ids[index] != id {
                held.ids[index] = id;
                held.outside[index] = true;
                held.any_outside = true;
            }
        }
    }

    /// Follows tensors of places to the new ids under which the program's objects hold them, by the new id
    /// of each old one. The tensors are in the table, under the new ids. The watch is off meanwhile
    /// ([`Replay::unwatch`]).
    pub fn rename(&mut self, names: &HashMap<TensorId, TensorId>) {
        // An object that two places share is renamed twice.
        let last_name = |mut id: TensorId| {
            while let Some(&next) = names.get(&id) {
                id = next;
            }
            id
        };
        let places = self.bindings.places.iter_mut();
        places.for_each(|place| place.after = last_name(place.after));
        self.note_ids();
    }

    /// Takes the owner's watch off all state and off the tensors that the step finds at places, because
    /// they are about to be dropped or renamed. It is then off for all of the owner's replays.
    pub fn unwatch(&self) {
        self.change_watch(table::unwatch);
    }

    /// Puts the owner's watch on all state and on the tensors that the step finds at places.
    pub fn watch(&self) {
        self.change_watch(table::watch);
    }

    fn change_watch(&self, change: impl Fn(TensorId, &Arc<Watch>)) {
        let watch = self.state.lock().watch.clone();
        let unchanged = self.unchanged.iter().map(|(_, place)| *place);
        let returned = self.results.iter().filter_map(|taken| match taken {
            Taken::Table(place) => Some(*place),
            _ => None,
        });
        let read = unchanged
            .chain(returned)
            .map(|place| self.bindings.places[place].after);
        self.state_ids()
            .into_iter()
            .chain(read)
            .for_each(|id| change(id, &watch));
    }
}

/// For each id, the position of the first that is equal.
fn first_equals(ids: impl Iterator<Item = TensorId>) -> Vec<usize> {
    let mut first = HashMap::new();
    ids.enumerate()
        .map(|(position, id)| *first.entry(id).or_insert(position))
        .collect()
}

impl Drop for Replay {
    /// State goes to the table, where the program's objects find it. The owner's watch goes off it, for the
    /// other replays too.
    fn drop(&mut self) {
        self.suspend();
        let constants = self.constants.iter();
        constants.for_each(|&id| table::unwatch(id, &self.constants_watch));
    }
}
