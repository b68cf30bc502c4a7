//! From a replay to a step that runs without Kiln ([`kiln_cpu::export`]).
//!
//! The bindings say where every tensor comes from and goes. The owner of the step adds how its numbers
//! follow from the learning rate and from how many steps were run ([`Number`]).

mod function;

use std::collections::HashMap;
use std::path::Path;

use burn_ir::{ScalarIr, TensorId, TensorIr};
use kiln_cpu::export::{
    ArgumentSource, ExportError, ExportedStep, NamedTensor, NumberSource, NumberTable, ResultSource,
    StateTensor,
};
use kiln_graph::{DType, Graph, TensorType};

use super::binding::{InputBinding, OutputBinding, ResultBinding};
use super::replay::Replay;
use super::step::{Binding, Step};
use crate::execute::{ExecuteError, convert, cpu};
use crate::options::CompileOptions;
use crate::random;
use crate::storage::Storage;
use crate::stream;
use crate::table::{self, Slot};
pub use function::export_function;

/// How a number of the recorded step is computed at a later call.
#[derive(Clone, Debug)]
pub enum Number {
    /// It is the same at each call.
    Fixed(ScalarIr),
    /// `offset + factor * learning rate`, in f64.
    Rate {
        /// What is added.
        offset: f64,
        /// What the learning rate is multiplied by.
        factor: f64,
    },
    /// The entry of the call in [`Numbers::sequences`].
    Sequence(usize),
}

/// The numbers of a step at all later calls.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    /// For each number of the recording, in order.
    pub of: Vec<Number>,
    /// One number for each call, and whether the last one stays.
    pub sequences: Vec<(Vec<ScalarIr>, bool)>,
    /// The learning rate of the last call.
    pub rate: f64,
    /// Whether they are right for that rate only.
    pub is_rate_fixed: bool,
    /// Steps that were run before.
    pub steps: u64,
}

/// Why a step was not exported.
#[derive(Debug, thiserror::Error)]
pub enum StepExportError {
    /// The step could not be compiled, or its folder not be written.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// There is no C compiler, or it cannot be used.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// State of the step has no elements.
    #[error("{name} has no value: {reason}")]
    NoValue {
        /// What it is called.
        name: String,
        /// What happened to it.
        reason: String,
    },
    /// A graph break cuts the function.
    #[error("the function has a graph break, and only a whole one can be exported: {graph_break}")]
    Broken {
        /// Where and why.
        graph_break: String,
    },
    /// A function keeps a tensor elsewhere.
    #[error(
        "the function leaves a tensor behind that it does not return, such as a running statistic: an exported function has no state"
    )]
    Kept,
    /// One tensor is two inputs of the call, so the recording does not say which of them each operation
    /// reads.
    #[error(
        "inputs {first} and {second} are one tensor in the call that is exported, so the step does not tell them apart: \
         call it with two tensors (`let copy = x.clone() * 1.0`) until it is replayed, and export it then, or take one input"
    )]
    SameInput {
        /// The number of the input.
        first: usize,
        /// That of the other.
        second: usize,
    },
    /// An input was the same tensor at each call, so the program may hold it as well.
    #[error(
        "input {input} was the same tensor at each call, and the closure may hold that tensor as well, as a constant: \
         call the step with other tensors there until it is replayed, and export it then"
    )]
    Pinned {
        /// The number of the input.
        input: usize,
    },
    /// The element type of a tensor is one that graphs do not have.
    #[error("{name} is of a type that compiled steps do not have")]
    ElementType {
        /// The tensor.
        name: String,
    },
}

/// The states of the exported step, by the tensor that each is now.
#[derive(Default)]
struct States {
    tensors: Vec<StateTensor>,
    by_id: HashMap<TensorId, usize>,
}

impl States {
    fn add(&mut self, name: String, storage: &Storage, constant: bool) -> Result<usize, StepExportError> {
        let Some(ty) = storage.tensor_type() else {
            return Err(StepExportError::ElementType { name });
        };
        let data = storage.clone().try_into_data().map_err(ExecuteError::from)?;
        self.tensors.push(StateTensor {
            elements: data.as_bytes().to_vec(),
            tensor: NamedTensor { name, ty },
            constant,
        });
        Ok(self.tensors.len() - 1)
    }

    /// The state that the tensor of `id` is.
    fn of_place(&mut self, name: &str, id: TensorId) -> Result<usize, StepExportError> {
        if let Some(&known) = self.by_id.get(&id) {
            return Ok(known);
        }
        let name = plain(name);
        let storage = elements(id, &name)?;
        let index = self.add(name, &storage, false)?;
        self.by_id.insert(id, index);
        Ok(index)
    }

    fn of_constant(&mut self, id: TensorId, storage: &Storage) -> Result<usize, StepExportError> {
        if let Some(&known) = self.by_id.get(&id) {
            return Ok(known);
        }
        let name = format!("constant.{}", self.tensors.len());
        let index = self.add(name, storage, true)?;
        self.by_id.insert(id, index);
        Ok(index)
    }
}

/// The elements of the tensor of `id`, which people call `name`.
fn elements(id: TensorId, name: &str) -> Result<Storage, StepExportError> {
    let reason = match table::get(id) {
        Some(Slot::Ready(storage)) => return Ok(storage),
        Some(Slot::Failed(reason)) => reason.to_string(),
        None => "the program dropped it".to_owned(),
    };
    let name = name.to_owned();
    Err(StepExportError::NoValue { name, reason })
}

/// A name without what JSON or C would have to escape.
fn plain(name: &str) -> String {
    name.chars()
        .filter(|c| !matches!(c, '`' | '"' | '\\') && !c.is_control())
        .collect()
}

/// Writes the folder of a step that continues from the state of `replay`. `fresh` are the tensors of a
/// call's input. The replay itself is not affected.
///
/// # Errors
///
/// [`StepExportError`].
pub fn export(
    replay: &Replay,
    fresh: &[TensorIr],
    numbers: &Numbers,
    options: &CompileOptions,
    folder: &Path,
) -> Result<(), StepExportError> {
    let (step, bindings) = (replay.step(), replay.bindings());
    distinct(fresh)?;
    if let Some(input) = bindings.pinned.iter().position(Option::is_some) {
        return Err(StepExportError::Pinned { input });
    }
    let graph: &Graph = &step.graph;
    let mut states = States::default();
    let place = |states: &mut States, place: usize| {
        let place = &bindings.places[place];
        states.of_place(&place.name, place.after)
    };
    let mut arguments = Vec::with_capacity(graph.parameters().len());
    for &position in step.argument_positions() {
        arguments.push(match &bindings.inputs[position] {
            InputBinding::State(number) => ArgumentSource::State(place(&mut states, *number)?),
            InputBinding::Unchanged(number) => {
                let state = place(&mut states, *number)?;
                states.tensors[state].constant = true;
                ArgumentSource::State(state)
            }
            InputBinding::Fresh(number) => ArgumentSource::Input(*number),
            InputBinding::Constant(id, storage) => ArgumentSource::State(states.of_constant(*id, storage)?),
            InputBinding::HostData(storage) => {
                let name = format!("constant.{}", states.tensors.len());
                ArgumentSource::State(states.add(name, storage, true)?)
            }
            InputBinding::Unread => unreachable!("an argument of the graph is read"),
        });
    }
    let mut outputs = Vec::with_capacity(bindings.outputs.len());
    for binding in &bindings.outputs {
        outputs.push(match *binding {
            OutputBinding::State(number) | OutputBinding::Written(number) => {
                Some(place(&mut states, number)?)
            }
            OutputBinding::Result | OutputBinding::Dropped => None,
        });
    }
    let inputs = named_inputs(fresh)?;
    let mut results = Vec::with_capacity(bindings.results.len());
    for (number, binding) in bindings.results.iter().enumerate() {
        let (ty, source) = match binding {
            ResultBinding::Computed(output) => (
                graph.ty(graph.outputs[*output].value).clone(),
                ResultSource::Output(*output),
            ),
            ResultBinding::Fresh(input) => (inputs[*input].ty.clone(), ResultSource::Input(*input)),
            ResultBinding::Place(number) => {
                let state = place(&mut states, *number)?;
                of_state(&states, state)
            }
            ResultBinding::Constant(id, storage) => {
                let state = states.of_constant(*id, storage)?;
                of_state(&states, state)
            }
        };
        let name = format!("result.{number}");
        results.push((NamedTensor { name, ty }, source));
    }
    let (sources, tables, fixed_rate) = number_sources(step, numbers);
    let random = random::state().unwrap_or(random::Stream { seed: 0, stream: 0 });
    let exported = ExportedStep {
        graph,
        inputs,
        results,
        states: states.tensors,
        arguments,
        outputs,
        numbers: sources,
        tables,
        fixed_rate,
        steps: numbers.steps,
        random: (random.seed, random.stream),
        streams: replay.random_operations() as u64,
    };
    cpu::export(&exported, options, folder)
}

/// Refuses inputs of which two are one tensor.
fn distinct(fresh: &[TensorIr]) -> Result<(), StepExportError> {
    for (second, ir) in fresh.iter().enumerate() {
        if let Some(first) = fresh[..second].iter().position(|earlier| earlier.id == ir.id) {
            return Err(StepExportError::SameInput { first, second });
        }
    }
    Ok(())
}

/// The tensors of a call's input, by number.
fn named_inputs(fresh: &[TensorIr]) -> Result<Vec<NamedTensor>, StepExportError> {
    let named = fresh.iter().enumerate().map(|(number, ir)| {
        let name = format!("input.{number}");
        match tensor_type(ir) {
            Some(ty) => Ok(NamedTensor { name, ty }),
            None => Err(StepExportError::ElementType { name }),
        }
    });
    named.collect()
}

fn of_state(states: &States, state: usize) -> (TensorType, ResultSource) {
    (
        states.tensors[state].tensor.ty.clone(),
        ResultSource::State(state),
    )
}

fn tensor_type(ir: &TensorIr) -> Option<TensorType> {
    let shape = kiln_graph::Shape::new(ir.shape.iter().copied());
    Some(TensorType::new(convert::dtype(ir.dtype)?, shape))
}

/// The source of each runtime scalar of the graph, the tables that these need, and the learning rate if
/// calls may have only one.
fn number_sources(step: &Step, numbers: &Numbers) -> (Vec<NumberSource>, Vec<NumberTable>, Option<f64>) {
    let mut tables = Vec::new();
    let mut is_rate_fixed = numbers.is_rate_fixed;
    let mut known: HashMap<(usize, DType), usize> = HashMap::new();
    let bits = |scalar: ScalarIr, dtype: DType| stream::to_scalar(scalar).to_bits(dtype);
    let sources = step.scalars.sources().map(|(binding, dtype)| match binding {
        Binding::Seed(_) => NumberSource::Seed,
        Binding::Stream(index) => NumberSource::Stream(index),
        Binding::Recorded(index) => match numbers.of[index] {
            Number::Fixed(scalar) => NumberSource::Fixed(bits(scalar, dtype)),
            Number::Rate { offset, factor } if matches!(dtype, DType::F32 | DType::F64) => {
                NumberSource::Rate { offset, factor }
            }
            // The exported step rounds to no narrower type.
            Number::Rate { offset, factor } => {
                is_rate_fixed = true;
                NumberSource::Fixed(bits(ScalarIr::Float(offset + factor * numbers.rate), dtype))
            }
            Number::Sequence(sequence) => {
                let table = *known.entry((sequence, dtype)).or_insert_with(|| {
                    let (scalars, settles) = &numbers.sequences[sequence];
                    tables.push(NumberTable {
                        bits: scalars.iter().map(|&scalar| bits(scalar, dtype)).collect(),
                        settles: *settles,
                    });
                    tables.len() - 1
                });
                NumberSource::Table(table)
            }
        },
    });
    let sources = sources.collect();
    (sources, tables, is_rate_fixed.then_some(numbers.rate))
}
