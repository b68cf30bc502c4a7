//! Recordings that are transformed before they are compiled: into a derivative, or into the function on a
//! batch.
//!
//! The recording is made on *placeholders*, tensors whose elements do not matter. It is imported as a graph
//! whose parameters are the placeholders, followed by the tensors that the closure captures. A transform of
//! the caller's makes another graph of that, whose parameters keep the same order and may be followed by
//! more. The result is compiled once for each recording, and runs on the caller's tensors for the
//! placeholders.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn_ir::{TensorId, TensorIr};
use kiln_graph::{Graph, Op, Rewriter, TensorType, Value};
use rustc_hash::FxHashMap;

use super::breaks::BreakReason;
use super::gradient;
use super::guard::Guard;
use super::recording::Recorded;
use super::session;
use super::step::{Scalars, panic_message};
use crate::error::Error;
use crate::execute::{self, Executable, ExecuteError, Setting, convert};
use crate::import::{self, ImportError};
use crate::options::CompileOptions;
use crate::storage::Storage;
use crate::table;

/// The functions that were made of one closure, by its recordings.
pub struct TransformedRegion {
    options: CompileOptions,
    steps: Mutex<Vec<Arc<Step>>>,
}

/// A transformed recording, compiled.
struct Step {
    guard: Guard,
    key: Key,
    name: String,
    executable: Box<dyn Executable>,
    /// The captured tensors, in the order of the graph's parameters after the placeholders.
    captured: Vec<Captured>,
    scalars: Scalars,
}

/// The key of a step besides its recording.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Key {
    /// Type of each placeholder, and which input of the recording it is.
    arguments: Vec<(Option<TensorType>, Option<usize>)>,
    results: Vec<Place>,
    /// The options of the transform, as text.
    transform: String,
}

/// Where a result of the closure comes from.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Place {
    /// The recording leaves it behind.
    Output(usize),
    /// The recording reads it.
    Input(usize),
    /// A placeholder that no operation reads.
    Argument(usize),
    /// A tensor from outside that no operation reads: the first of the results that are this one.
    Outside(usize, Option<TensorType>),
}

/// A tensor from outside.
#[derive(Clone, Copy, Debug)]
pub(super) enum Captured {
    /// An input of the recording.
    Input(usize),
    /// A result of the closure that it did not compute.
    Result(usize),
}

/// A recording, and the roles of its tensors.
pub struct Transformed<'a> {
    /// The closure's recording.
    pub recorded: &'a Recorded,
    /// The placeholders.
    pub arguments: &'a [TensorIr],
    /// The closure's results.
    pub results: &'a [TensorIr],
    /// The options of the transform, as text.
    pub transform: String,
}

impl TransformedRegion {
    /// A region that has compiled nothing.
    pub fn new(options: CompileOptions) -> Self {
        Self {
            options,
            steps: Mutex::default(),
        }
    }

    /// Whether nothing was compiled yet.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many functions were compiled.
    pub fn count(&self) -> usize {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Runs the function that `transform` makes of a recording, compiled before or now, and returns its
    /// outputs. `given` are the tensors for the placeholders, then those for the parameters that the
    /// transform has added. Tensors that the closure left elsewhere have no value.
    ///
    /// # Errors
    ///
    /// If the recording cannot be imported, transformed or compiled, or the function fails.
    pub fn run<E: From<Error>>(
        &self,
        what: Transformed<'_>,
        given: &[Storage],
        transform: impl FnOnce(Graph) -> Result<Graph, E>,
    ) -> Result<Vec<Storage>, E> {
        what.fail_others();
        let step = self.step(&what, transform)?;
        Ok(step.run(&what, given)?)
    }

    fn step<E: From<Error>>(
        &self,
        what: &Transformed<'_>,
        transform: impl FnOnce(Graph) -> Result<Graph, E>,
    ) -> Result<Arc<Step>, E> {
        let key = what.key();
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let known = steps
            .iter()
            .find(|step| step.key == key && step.guard.accepts(what.recorded));
        if let Some(step) = known {
            return Ok(step.clone());
        }
        let step = Arc::new(Step::compile(&self.options, what, key, transform)?);
        steps.push(step.clone());
        Ok(step)
    }
}

impl Transformed<'_> {
    fn argument(&self, id: TensorId) -> Option<usize> {
        self.arguments.iter().position(|argument| argument.id == id)
    }

    fn input(&self, id: TensorId) -> Option<usize> {
        self.recorded.inputs.iter().position(|input| input.ir.id == id)
    }

    /// Enters the reason why tensors that the closure left elsewhere have no value.
    pub(super) fn fail_others(&self) {
        let reason: Arc<str> =
            "it was computed inside a function that is transformed (`kiln::func`), and only what \
                                that returns has a value"
                .into();
        self.recorded
            .output_ids
            .iter()
            .for_each(|&id| table::fail(id, reason.clone()));
    }

    pub(super) fn key(&self) -> Key {
        let arguments = self.arguments.iter();
        let place = |result: &TensorIr| {
            let output = self.recorded.output_ids.iter().position(|&id| id == result.id);
            output
                .map(Place::Output)
                .or_else(|| self.input(result.id).map(Place::Input))
                .or_else(|| self.argument(result.id).map(Place::Argument))
                .unwrap_or_else(|| {
                    let first = self.results.iter().position(|other| other.id == result.id);
                    Place::Outside(first.unwrap_or_default(), type_of(result))
                })
        };
        Key {
            arguments: arguments
                .map(|argument| (type_of(argument), self.input(argument.id)))
                .collect(),
            results: self.results.iter().map(place).collect(),
            transform: self.transform.clone(),
        }
    }
}

pub(super) fn type_of(ir: &TensorIr) -> Option<TensorType> {
    let shape = kiln_graph::Shape::new(ir.shape.iter().copied());
    Some(TensorType::new(convert::dtype(ir.dtype)?, shape))
}

impl Step {
    fn compile<E: From<Error>>(
        options: &CompileOptions,
        what: &Transformed<'_>,
        key: Key,
        transform: impl FnOnce(Graph) -> Result<Graph, E>,
    ) -> Result<Self, E> {
        let _span = tracing::info_span!("compile_transformed", region = %options.name).entered();
        let recorded = what.recorded;
        let sources = gradient::sources(&recorded.operations, &recorded.lines, &recorded.full_precision);
        let (graph, captured, scalars) = complete(&options.name, what, |position| {
            recorded.source(&sources, position)
        })?;
        let scalars = Scalars::new(&recorded.operations, &scalars, &graph);
        let mut graph = transform(graph)?;
        kiln_partition::assign_phases(&mut graph);
        graph.name.clone_from(&options.name);
        let backend = options.backend.on(recorded.gpu());
        let gpu = recorded.gpu().unwrap_or(0);
        let prepared = execute::prepare(backend, gpu, Arc::new(graph), options, Setting::default());
        let (executable, _) = prepared.map_err(|source| failed(&options.name, source))?;
        Ok(Self {
            guard: Guard::new(recorded, sources),
            key,
            name: options.name.clone(),
            executable,
            captured,
            scalars,
        })
    }

    fn run(&self, what: &Transformed<'_>, given: &[Storage]) -> Result<Vec<Storage>, Error> {
        let (arguments, added) = given.split_at(what.arguments.len());
        let captured = self.captured.iter().map(|captured| match *captured {
            Captured::Input(position) => Ok(what.recorded.inputs[position].tensor.clone()),
            Captured::Result(position) => {
                session::fetch(&what.results[position], BreakReason::OutsideOperation)
            }
        });
        let captured = captured.collect::<Result<Vec<Storage>, Error>>()?;
        let inputs = [arguments, &captured, added].concat();
        let scalars = self.scalars.bind(&what.recorded.scalars, &what.recorded.streams);
        let run = AssertUnwindSafe(|| self.executable.run(inputs, &scalars));
        let outputs = catch_unwind(run).unwrap_or_else(|payload| {
            Err(ExecuteError::Panicked {
                message: panic_message(&*payload),
            })
        });
        outputs.map_err(|source| failed(&self.name, source))
    }
}

fn failed(name: &str, source: ExecuteError) -> Error {
    Error::Execute {
        region: name.to_owned(),
        source: source.into(),
    }
}

/// The closure as a graph: placeholders, captured tensors, results. Also returns the captured tensors, and
/// the sources of its runtime scalars.
pub(super) fn complete(
    name: &str,
    what: &Transformed<'_>,
    source: impl Fn(usize) -> gradient::Source,
) -> Result<(Graph, Vec<Captured>, Vec<import::ScalarSource>), Error> {
    let recorded = what.recorded;
    let unsupported = |source: ImportError| Error::Import {
        region: name.to_owned(),
        source: source.into(),
    };
    let is_known = |id: TensorId| recorded.output_ids.contains(&id) || what.input(id).is_some();
    let known: Vec<TensorId> = what
        .results
        .iter()
        .map(|ir| ir.id)
        .filter(|&id| is_known(id))
        .collect();
    let imported = import::import_located(&recorded.operations, &known, source).map_err(unsupported)?;
    let mut rewriter = Rewriter::new(&imported.graph);
    let mut captured = Vec::new();
    let mut values: FxHashMap<TensorId, Value> = FxHashMap::default();
    let unknown = |ir: &TensorIr| {
        unsupported(ImportError::UnknownOutput {
            tensor: ir.id.value(),
        })
    };
    for argument in what.arguments {
        let ty = type_of(argument).ok_or_else(|| unknown(argument))?;
        values.insert(argument.id, rewriter.graph.parameter(ty));
    }
    for (ir, &parameter) in imported.inputs.iter().zip(imported.graph.parameters()) {
        let value = match values.get(&ir.id) {
            Some(&value) => value,
            None => {
                let position = what.input(ir.id).ok_or_else(|| unknown(ir))?;
                captured.push(Captured::Input(position));
                let value = rewriter.graph.parameter(imported.graph.ty(parameter).clone());
                values.insert(ir.id, value);
                value
            }
        };
        rewriter.replace(parameter, value);
    }
    for (position, result) in what.results.iter().enumerate() {
        if !is_known(result.id) && !values.contains_key(&result.id) {
            let ty = type_of(result).ok_or_else(|| unknown(result))?;
            captured.push(Captured::Result(position));
            values.insert(result.id, rewriter.graph.parameter(ty));
        }
    }
    for (id, node) in imported.graph.nodes() {
        if !matches!(node.op, Op::Parameter { .. }) {
            rewriter
                .copy(id)
                .unwrap_or_else(|error| unreachable!("a copy is well typed: {error}"));
        }
    }
    for (&id, output) in known.iter().zip(&imported.graph.outputs) {
        values.insert(id, rewriter.map(output.value));
    }
    let mut graph = rewriter.finish();
    graph.outputs.clear();
    what.results
        .iter()
        .for_each(|result| graph.output(values[&result.id], None));
    Ok((graph, captured, imported.scalars))
}
