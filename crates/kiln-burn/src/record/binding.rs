//! Bindings: where each input of a replayed step comes from, and where each of its outputs goes.
//!
//! A replay runs no code of the program, so every tensor that a call could read or write must be bound to a
//! known source or target. Two recorded calls of one step decide the binding, once, of each input, each
//! output, and each tensor that the caller gets back:
//!
//! | binding    | an input is                                       | an output or result is                             |
//! | ---------- | ------------------------------------------------- | -------------------------------------------------- |
//! | state      | what the step made of a *place* last time         | kept for that place                                |
//! | fresh(n)   | tensor n of this call's input                     |                                                    |
//! | unchanged  | what a *place* has; the step leaves it as it is   |                                                    |
//! | constant   | the same tensor at every call                     |                                                    |
//! | result(n)  |                                                   | computed by the step, for the caller               |
//! | through    |                                                   | a tensor of the input, a place before the step, or a constant |
//!
//! A *place* is where the program keeps a tensor that its owner (`TrainStep`) can look into: a parameter, a
//! running statistic, a moment of the optimizer. The recorder of a call says which tensor each place had
//! before and after it ([`Place`]). A tensor that the closure keeps anywhere else and writes from call to
//! call has no place, and its step is not replayed, because the replay could not put the next value there.
//!
//! Bindings name places, not the tensors at these places: an owner with several steps has one state, and
//! each step finds at a place the tensor that another step left there.

use std::fmt;
use std::sync::Arc;

use burn_ir::TensorId;

use super::breaks::GraphBreak;
use super::region::LastRun;
use super::words::type_text;
use crate::storage::Storage;
use crate::table::{self, Slot};

/// Where the program keeps a tensor, and which tensor that was before and after a call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its name for people: `` `encoder.norm.running_mean` ``.
    pub name: Arc<str>,
    /// The tensor it had when the call began.
    pub before: TensorId,
    /// The tensor it had when the call was over.
    pub after: TensorId,
}

/// One recorded call, as its owner saw it.
#[derive(Clone)]
pub struct Call {
    /// The run of the call.
    pub run: LastRun,
    /// The tensors of the call's input, in order.
    pub fresh: Vec<TensorId>,
    /// The tensors that the closure returned, in order.
    pub results: Vec<TensorId>,
    /// Every place of the owner, in an order that is the same at each call.
    pub places: Vec<Place>,
}

/// Where an input of a replayed step comes from.
#[derive(Clone, Debug)]
pub enum InputBinding {
    /// The graph does not read it.
    Unread,
    /// The tensor that the last call left at this place (a position in [`Bindings::places`]).
    State(usize),
    /// The tensor of this place, which the step does not change.
    Unchanged(usize),
    /// Tensor of this number of the call's input.
    Fresh(usize),
    /// One tensor, the same at each call.
    Constant(TensorId, Storage),
    /// Data that the closure makes on the host, equal at each call.
    HostData(Storage),
}

/// Where an output of a replayed step goes, apart from results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputBinding {
    /// To this place, which is state that the step reads.
    State(usize),
    /// To this place, which the step does not read.
    Written(usize),
    /// Only to the caller.
    Result,
    /// Nowhere: the program dropped it after the call.
    Dropped,
}

/// The source of a tensor that the caller gets back.
#[derive(Clone, Debug)]
pub enum ResultBinding {
    /// Output of this number.
    Computed(usize),
    /// Tensor of this number of the call's input, unchanged.
    Fresh(usize),
    /// The tensor that this place had before the call.
    Place(usize),
    /// One tensor, the same at each call.
    Constant(TensorId, Storage),
}

/// Every input, output and result of a replayed step with its one binding.
#[derive(Clone)]
pub struct Bindings {
    /// Of each input of the recording, in order.
    pub inputs: Vec<InputBinding>,
    /// Of each output of the recording, in order.
    pub outputs: Vec<OutputBinding>,
    /// Of each result, in order.
    pub results: Vec<ResultBinding>,
    /// Tensors of the call's input that were the same in both calls. The closure may hold them too, so a
    /// call with another tensor there is another step.
    pub pinned: Vec<Option<TensorId>>,
    /// The places, in order.
    pub places: Vec<Place>,
    /// Type and shape of each input.
    types: Vec<String>,
}

/// Why a step cannot be replayed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplayError {
    /// The two calls did not run the same step.
    #[error("the last two calls ran different steps")]
    Differs,
    /// Two places shared one tensor, or came to share one, in this call: the next call is another step.
    #[error(
        "{place} shares its tensor with another place of the model or optimizer in one call and not in the next"
    )]
    Parted {
        /// One of the two places.
        place: Arc<str>,
    },
    /// The region was cut by a graph break.
    #[error("the step has a graph break: {}", graph_break.as_ref().map_or_else(String::new, ToString::to_string))]
    Broken {
        /// The break.
        graph_break: Option<GraphBreak>,
    },
    /// An input is made anew by the closure, with other elements, in each call.
    #[error(
        "input {index} ({ty}) is a tensor the closure makes anew, with other elements, in each call; pass it as an input of the step, or make it \
         once outside"
    )]
    Unknown {
        /// Its position among the inputs.
        index: usize,
        /// Its type and shape.
        ty: String,
    },
    /// The closure captures a tensor that is exchanged from call to call.
    #[error(
        "input {index} ({ty}) is a tensor that the closure captures and that is another one in each call; pass it as an input of the step"
    )]
    Exchanged {
        /// Its position among the inputs.
        index: usize,
        /// Its type and shape.
        ty: String,
    },
    /// The closure keeps a tensor from call to call outside of all places, so a replay could not store its
    /// next value.
    #[error(
        "the closure keeps a tensor ({ty}) from one call to the next outside the model; keep it in the model (a `RunningState`, a parameter), or \
         pass it as an input of the step and return the new value. (What the model computes with gradients and the loss does not \
         reach is kept by Burn's autodiff: return it detached, compute it with `model.valid()`, or freeze its layers with `no_grad()`)"
    )]
    Kept {
        /// Its type and shape.
        ty: String,
    },
    /// An input is written by another step.
    #[error(
        "input {index} ({ty}) is a tensor that another training step updates; pass it as an input of the step"
    )]
    Written {
        /// Its position among the inputs.
        index: usize,
        /// Its type and shape.
        ty: String,
    },
    /// A tensor of the call's input is a tensor that the step updates.
    #[error(
        "tensor {number} of the input is {place} of the model itself; read it in the closure instead, or pass a copy (`x.clone() + 0.0`)"
    )]
    FreshIsState {
        /// Which tensor of the input.
        number: usize,
        /// The place it is from.
        place: Arc<str>,
    },
    /// A place takes over a tensor that the step did not make.
    #[error("{place} takes over a tensor that the step does not compute")]
    Foreign {
        /// The place.
        place: Arc<str>,
    },
    /// A result is a tensor of unknown origin.
    #[error(
        "result {index} is a tensor that the step neither computes nor is given; compute it from tensors, or make it outside the closure"
    )]
    UnknownResult {
        /// Its position among the results.
        index: usize,
    },
}

impl ReplayError {
    /// Whether later calls may well be replayed.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Differs | Self::Parted { .. })
    }
}

impl Bindings {
    /// The bindings of `last`, decided together with `previous`, another call of the same step. The handles
    /// of the results of `last` must have been dropped: the program keeps any output that is still alive.
    ///
    /// # Errors
    ///
    /// If an input, output or result cannot be bound.
    pub fn new(previous: &Call, last: &Call) -> Result<Self, ReplayError> {
        let calls = [previous, last];
        if let Some(call) = calls
            .iter()
            .find(|call| call.run.graph_break.is_some() || call.run.segment != 0)
        {
            return Err(ReplayError::Broken {
                graph_break: call.run.graph_break.clone(),
            });
        }
        if !last.run.step.is_same(&previous.run.step)
            || previous.results.len() != last.results.len()
            || previous.fresh.len() != last.fresh.len()
        {
            return Err(ReplayError::Differs);
        }
        let made = |place: &&Place| place.before == place.after || last.run.outputs.contains(&place.after);
        if let Some(place) = last.places.iter().find(|place| !made(place)) {
            return Err(ReplayError::Foreign {
                place: place.name.clone(),
            });
        }
        let pair = Pair { previous, last };
        let inputs = (0..last.run.inputs.len()).map(|index| pair.input(index));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = (0..last.run.outputs.len()).map(|index| pair.output(index, &inputs));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let results = (0..last.results.len()).map(|index| pair.result(index));
        let results = results.collect::<Result<Vec<_>, _>>()?;
        let pinned = previous.fresh.iter().zip(&last.fresh);
        Ok(Self {
            inputs,
            outputs,
            results,
            pinned: pinned
                .map(|(before, now)| (before == now).then_some(*now))
                .collect(),
            places: last.places.clone(),
            types: last.run.step.inputs().to_vec(),
        })
    }

    /// The difference between these bindings and those of an earlier call of the same step, in words; none
    /// if each tensor has the same binding.
    pub fn difference(&self, earlier: &Self) -> Option<String> {
        // Places by name: other steps of the owner may have added some since.
        let same_place = |before: usize, now: usize| earlier.places[before].name == self.places[now].name;
        let pairs = earlier.inputs.iter().zip(&self.inputs).enumerate();
        for (index, (before, now)) in pairs {
            let same = match (before, now) {
                (InputBinding::Unread, InputBinding::Unread) => true,
                (InputBinding::State(a), InputBinding::State(b))
                | (InputBinding::Unchanged(a), InputBinding::Unchanged(b)) => same_place(*a, *b),
                (InputBinding::Fresh(a), InputBinding::Fresh(b)) => a == b,
                (InputBinding::Constant(a, _), InputBinding::Constant(b, _)) => a == b,
                (InputBinding::HostData(a), InputBinding::HostData(b)) => a.has_equal_elements(b),
                _ => false,
            };
            if !same {
                let (before, now) = (self.input_text(before), self.input_text(now));
                let ty = &self.types[index];
                return Some(match before == now {
                    true => format!("input {index} ({ty}), {now}, is another tensor than before"),
                    false => format!("input {index} ({ty}) was {before} and is {now}"),
                });
            }
        }
        let same_output = |(before, now): (&OutputBinding, &OutputBinding)| match (*before, *now) {
            (OutputBinding::State(a), OutputBinding::State(b))
            | (OutputBinding::Written(a), OutputBinding::Written(b)) => same_place(a, b),
            (before, now) => before == now,
        };
        let same_length = earlier.outputs.len() == self.outputs.len();
        if !same_length || !earlier.outputs.iter().zip(&self.outputs).all(same_output) {
            return Some("outputs go to other places than before".to_owned());
        }
        let results = earlier.results.iter().zip(&self.results).enumerate();
        for (index, (before, now)) in results {
            let same = match (before, now) {
                (ResultBinding::Computed(a), ResultBinding::Computed(b))
                | (ResultBinding::Fresh(a), ResultBinding::Fresh(b)) => a == b,
                (ResultBinding::Place(a), ResultBinding::Place(b)) => same_place(*a, *b),
                (ResultBinding::Constant(a, _), ResultBinding::Constant(b, _)) => a == b,
                _ => false,
            };
            if !same {
                return Some(format!("result {index} comes from elsewhere than before"));
            }
        }
        None
    }

    /// A description of input `index`, for people.
    pub fn describe_input(&self, index: usize) -> String {
        self.input_text(&self.inputs[index])
    }

    fn input_text(&self, binding: &InputBinding) -> String {
        match binding {
            InputBinding::Unread => "not read".to_owned(),
            InputBinding::State(place) => format!("state of {}", self.places[*place].name),
            InputBinding::Unchanged(place) => format!("constant {}", self.places[*place].name),
            InputBinding::Fresh(number) => format!("tensor {number} of the call's input"),
            InputBinding::Constant(..) => "a constant that the closure captures".to_owned(),
            InputBinding::HostData(_) => "a constant that the closure makes on the host".to_owned(),
        }
    }

    fn output_text(&self, binding: OutputBinding) -> String {
        match binding {
            OutputBinding::State(place) => format!("state of {}", self.places[place].name),
            OutputBinding::Written(place) => format!("next value of {}", self.places[place].name),
            OutputBinding::Result => "a result".to_owned(),
            OutputBinding::Dropped => "dropped by the program".to_owned(),
        }
    }

    fn result_text(&self, binding: &ResultBinding) -> String {
        match binding {
            ResultBinding::Computed(output) => format!("output {output}"),
            ResultBinding::Fresh(number) => format!("tensor {number} of the call's input, unchanged"),
            ResultBinding::Place(place) => format!("{} as it was before the step", self.places[*place].name),
            ResultBinding::Constant(..) => "a constant".to_owned(),
        }
    }
}

impl Bindings {
    /// Each input in a line: `input 3 (f32 [64]): state of ...`.
    pub fn input_lines(&self) -> Vec<String> {
        let typed = self.inputs.iter().zip(&self.types).enumerate();
        let line = |(index, (binding, ty))| format!("input {index} ({ty}): {}", self.input_text(binding));
        typed.map(line).collect()
    }

    /// Each output in a line.
    pub fn output_lines(&self) -> Vec<String> {
        let outputs = self.outputs.iter().enumerate();
        outputs
            .map(|(index, &binding)| format!("output {index}: {}", self.output_text(binding)))
            .collect()
    }

    /// Each result in a line.
    pub fn result_lines(&self) -> Vec<String> {
        let results = self.results.iter().enumerate();
        results
            .map(|(index, binding)| format!("result {index}: {}", self.result_text(binding)))
            .collect()
    }
}

impl fmt::Display for Bindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = [self.input_lines(), self.output_lines(), self.result_lines()].concat();
        lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// The two calls that decide the bindings.
struct Pair<'a> {
    previous: &'a Call,
    last: &'a Call,
}

impl Pair<'_> {
    fn input(&self, index: usize) -> Result<InputBinding, ReplayError> {
        let Self { previous, last } = *self;
        if last.run.step.argument(index).is_none() {
            return Ok(InputBinding::Unread);
        }
        let (before, id) = (previous.run.inputs[index], last.run.inputs[index]);
        let ty = || last.run.step.inputs()[index].clone();
        if let Some(number) = last.fresh.iter().position(|&fresh| fresh == id) {
            if let Some(place) = last.places.iter().find(|place| place.before == id) {
                return Err(ReplayError::FreshIsState {
                    number,
                    place: place.name.clone(),
                });
            }
            return match previous.fresh[number] == before {
                true => Ok(InputBinding::Fresh(number)),
                false => Err(ReplayError::Differs),
            };
        }
        if let Some(place) = last.places.iter().position(|place| place.before == id) {
            let after = last.places[place].after;
            if self.parts(place) {
                return Err(self.parted(place));
            }
            if self.previously(place) != Some(before) {
                return Err(ReplayError::Differs);
            }
            return Ok(match after != id {
                true => InputBinding::State(place),
                false => InputBinding::Unchanged(place),
            });
        }
        match (previous.run.host_data.get(&index), last.run.host_data.get(&index)) {
            (Some(before), Some(now)) if before.has_equal_elements(now) => {
                Ok(InputBinding::HostData(now.clone()))
            }
            (_, Some(_)) => Err(ReplayError::Unknown { index, ty: ty() }),
            _ if before == id => {
                let tensor = constant(id).ok_or_else(|| ReplayError::Written { index, ty: ty() })?;
                Ok(InputBinding::Constant(id, tensor))
            }
            _ if previous.run.outputs.contains(&id) => Err(ReplayError::Kept { ty: ty() }),
            _ => Err(ReplayError::Exchanged { index, ty: ty() }),
        }
    }

    /// The tensor that a place of the last call had before the previous one; none if there was no such place.
    fn previously(&self, place: usize) -> Option<TensorId> {
        let name = &self.last.places[place].name;
        let places = &self.previous.places;
        let at_once = places.get(place).filter(|place| place.name == *name);
        let found = at_once.or_else(|| places.iter().find(|place| place.name == *name));
        found.map(|place| place.before)
    }

    /// Whether some place had the same tensor as `place` before the call and has another one after it, or
    /// the other way round.
    fn parts(&self, place: usize) -> bool {
        let Place { before, after, .. } = self.last.places[place];
        let others = self.last.places.iter();
        others
            .filter(|other| other.before == before || other.after == after)
            .any(|other| (other.before, other.after) != (before, after))
    }

    fn parted(&self, place: usize) -> ReplayError {
        ReplayError::Parted {
            place: self.last.places[place].name.clone(),
        }
    }

    fn output(&self, index: usize, inputs: &[InputBinding]) -> Result<OutputBinding, ReplayError> {
        let last = self.last;
        let id = last.run.outputs[index];
        if let Some(place) = last.places.iter().position(|place| place.after == id) {
            if self.parts(place) {
                return Err(self.parted(place));
            }
            let read = inputs
                .iter()
                .any(|input| matches!(input, InputBinding::State(read) if *read == place));
            return Ok(match read {
                true => OutputBinding::State(place),
                false => OutputBinding::Written(place),
            });
        }
        if table::contains(id) {
            let ty = type_text(&last.run.step.outputs()[index]);
            return Err(ReplayError::Kept { ty });
        }
        Ok(match last.results.contains(&id) {
            true => OutputBinding::Result,
            false => OutputBinding::Dropped,
        })
    }

    fn result(&self, index: usize) -> Result<ResultBinding, ReplayError> {
        let Self { previous, last } = *self;
        let (before, id) = (previous.results[index], last.results[index]);
        if let Some(output) = last.run.outputs.iter().position(|&output| output == id) {
            return match previous.run.outputs.get(output) == Some(&before) {
                true => Ok(ResultBinding::Computed(output)),
                false => Err(ReplayError::Differs),
            };
        }
        if let Some(number) = last.fresh.iter().position(|&fresh| fresh == id) {
            return match previous.fresh[number] == before {
                true => Ok(ResultBinding::Fresh(number)),
                false => Err(ReplayError::Differs),
            };
        }
        if let Some(place) = last.places.iter().position(|place| place.before == id) {
            return match self.previously(place) == Some(before) {
                true => Ok(ResultBinding::Place(place)),
                false => Err(ReplayError::Differs),
            };
        }
        let tensor = constant(id)
            .filter(|_| before == id)
            .ok_or(ReplayError::UnknownResult { index })?;
        Ok(ResultBinding::Constant(id, tensor))
    }
}

/// The elements of a tensor that no step writes; none if one does, or the tensor is gone.
fn constant(id: TensorId) -> Option<Storage> {
    match table::is_written(id) {
        true => None,
        false => elements(id),
    }
}

/// The elements of a tensor that is not pending.
fn elements(id: TensorId) -> Option<Storage> {
    match table::get(id)? {
        Slot::Ready(tensor) => Some(tensor),
        Slot::Failed(_) => None,
    }
}
