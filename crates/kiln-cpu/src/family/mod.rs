//! Steps of several shapes that share their functions.
//!
//! Extents, strides and offsets are literals of the generated C. For a batch of another length the whole pipeline runs
//! again, for exactly that graph and up to the text of its functions, but the C compiler does not: a text that
//! equals a known one but for numbers is that function with other numbers, which every call brings along in a
//! table. So a step of a family *is* the step that its graph alone would be compiled to; there is nothing to
//! guard, and nothing that another shape decided.
//!
//! ```text
//! Graph ─► passes ─► calls, functions ──all known──► a list of calls with tables
//!                         │ some are not
//!                         ▼
//!          samples: the graphs seen, and graphs of other sizes on the line through two of them
//!                         │ templates: what differs between the shapes is a variable
//!                         ▼
//!                C compiler, once for all that is not known
//! ```
//!
//! - [`mod@scan`], [`mod@unit`]: functions apart from their numbers. [`mod@template`]: which numbers vary.
//!   [`mod@reach`], [`mod@write`]: the C of it. [`mod@samples`]: graphs of other sizes. [`mod@stored`]: templates on
//!   disk, from which another process starts.
//! - Order of kernels, partition, plan of memory and choices of templates are those of each shape. They
//!   are data: a shape that decides otherwise calls other functions, which most often are there.
//! - Graphs of the samples are guesses, and only show which numbers vary. Nothing of theirs is ever run.
//! - A function in which the C compiler rejects variables is compiled for each shape, and no other is.

pub mod reach;
mod samples;
pub mod scan;
mod state;
mod stored;
pub mod template;
pub mod unit;
pub mod write;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_compiler::{CompiledStep, Options, compile, log_step};
use kiln_graph::Graph;

use crate::build::{BuildOptions, Toolchain};
use crate::cache::Cache;
use crate::emit::calls::StepCall;
use crate::error::{CpuError, StepError};
use crate::runtime::abi::Signature;
use crate::runtime::executable::CpuExecutable;
use crate::runtime::functions::{BoundFunction, CallList};
use crate::runtime::library::Step;
use crate::target::{CallsTarget, CpuTarget};
pub use samples::Varying;
use state::State;
use template::Template;
use unit::Unit;

/// Most recorded graphs that are kept to find others on a line with them.
const GRAPHS: usize = 4;

/// What became of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was compiled on its own, with its extents as constants: it is the first of its family, or, if there is a
    /// reason, its functions could not be built.
    Alone(Option<String>),
    /// It is the first of its family, and its extents are variables at once ([`Family::compile_general`]).
    General {
        /// Functions that were built.
        functions: usize,
        /// Whether the cache had them.
        from_cache: bool,
    },
    /// All its functions were known, or the cache had the step: the C compiler did not run.
    Known,
    /// The C compiler ran, or the cache had what it would have made.
    Built {
        /// Functions that were not known.
        functions: usize,
        /// The first of them: what it computes, and how it differs from those that were known.
        reason: String,
        /// Whether the cache had them.
        from_cache: bool,
    },
}

/// Counts of a family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FamilyStats {
    /// Graphs compiled.
    pub graphs: usize,
    /// Runs of the C compiler, and what the cache saved of them.
    pub builds: usize,
    /// Functions that the objects of the family have.
    pub functions: usize,
}

/// Steps that differ in shapes, and share what was compiled.
#[derive(Debug)]
pub struct Family {
    options: Options,
    target: CpuTarget,
    toolchain: Toolchain,
    cache: Cache,
    build: BuildOptions,
    varying: Vec<Varying>,
    state: Mutex<State>,
}

/// A step that was planned and is not built.
type Planned = CompiledStep<CallsTarget>;

/// A step whose functions are wanted.
struct Wanted {
    planned: Planned,
    /// Its functions.
    units: Vec<Arc<Unit>>,
    /// Positions of the functions that no template stands for.
    positions: Vec<usize>,
    /// Time in the passes.
    compile_time: Duration,
}

/// What looking for a step's functions gave.
enum Search {
    /// All are known: the step.
    Known(Box<CpuExecutable>),
    /// Some are not.
    Missing(Box<Wanted>),
}

impl Family {
    /// A family without members. All of them are compiled with these options, for this target.
    pub fn new(
        options: &Options,
        target: &CpuTarget,
        toolchain: &Toolchain,
        cache: &Cache,
        build: &BuildOptions,
    ) -> Self {
        Self {
            options: options.clone(),
            target: target.clone(),
            toolchain: toolchain.clone(),
            cache: cache.clone(),
            build: build.clone(),
            varying: Vec::new(),
            state: Mutex::default(),
        }
    }

    /// Tells which dimensions vary, and how far. A hint: it decides which sizes are sampled, nothing else. A shape
    /// outside of the ranges is compiled as any other.
    #[must_use]
    pub fn with_varying(self, varying: Vec<Varying>) -> Self {
        Self { varying, ..self }
    }

    /// What the family has compiled so far.
    pub fn stats(&self) -> FamilyStats {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stats
    }

    /// The step of `graph`, and what it took.
    ///
    /// The first graph is compiled on its own. The second begins to share: what differs between the two, and between
    /// them and graphs of other sizes, becomes variables of the functions. From then on a graph compiles without
    /// the C compiler if all its functions are known.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn compile(&self, graph: &Graph) -> Result<(CpuExecutable, Outcome), StepError> {
        self.compile_into(graph, self.options.debug.as_deref())
    }

    /// [`Family::compile`], with the folder for what each stage makes of this graph.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn compile_into(
        &self,
        graph: &Graph,
        debug: Option<&Path>,
    ) -> Result<(CpuExecutable, Outcome), StepError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.stats.graphs += 1;
        if let Some(folder) = debug {
            // What is written there must not depend on what is known.
            let compiled = compile(graph, &self.options_of(debug), &self.target)?;
            crate::debug::write(folder, &compiled, &self.target, &self.toolchain, &self.build);
        }
        let is_general = !state.expected.is_empty();
        let is_first = state.graphs.is_empty() && !is_general;
        if is_first {
            state.graphs.push(graph.clone());
        }
        let cached = if is_general { None } else { self.cached(graph)? };
        if let Some(step) = cached {
            let outcome = if is_first {
                Outcome::Alone(None)
            } else {
                Outcome::Known
            };
            return Ok((step, outcome));
        }
        if state.refusal.is_some() || (is_first && !self.load(graph, &mut state)) {
            return self.alone(&mut state, graph);
        }
        let missing = match self.find(&mut state, graph)? {
            Search::Known(step) => {
                // Another process compiled it. The first size that is not known is compiled with the expected
                // ones.
                if state.graphs.is_empty() {
                    state.graphs.push(graph.clone());
                }
                return Ok((*step, Outcome::Known));
            }
            Search::Missing(missing) => missing,
        };
        if is_first {
            return self.alone(&mut state, graph);
        }
        let mut reason = state.reason(&missing.planned, &missing.units, &missing.positions);
        let learned = match self.learn(&mut state, graph, &missing.units) {
            Ok(learned) => learned,
            // Not even constants compile.
            Err(CpuError::Compile { file, stderr, .. }) => {
                tracing::warn!(target: "kiln::family", file, stderr, "functions do not compile");
                state.refusal = Some(reason);
                return self.alone(&mut state, graph);
            }
            Err(error) => return Err(error.into()),
        };
        let functions = missing.positions.len();
        let mut rejected = missing.positions.iter().map(|&at| &missing.units[at]);
        if rejected.any(|unit| state.rejected.contains(&unit.skeleton)) {
            reason += ", and the C compiler wants constants in one of these kernels: each size has its own";
        }
        let mut step = self.bind(&state, graph, *missing)?;
        step.compile_time += learned.sample_time;
        step.stages.push(("samples", learned.sample_time));
        step.build_time = learned.build_time;
        if learned.build_time > Duration::ZERO {
            step.stages.push(("cc", learned.build_time));
        }
        let from_cache = learned.from_cache;
        let outcome = match is_general {
            true => Outcome::General {
                functions,
                from_cache,
            },
            false => Outcome::Built {
                functions,
                reason,
                from_cache,
            },
        };
        Ok((step, outcome))
    }

    /// [`Family::compile_into`] of the first graph of a family, of which graphs of other sizes are
    /// `expected`: what differs between them is a variable at once, and the second graph does not pay for it.
    /// The expected graphs only show which numbers vary; nothing of theirs is run.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn compile_general(
        &self,
        graph: &Graph,
        expected: Vec<Graph>,
        debug: Option<&Path>,
    ) -> Result<(CpuExecutable, Outcome), StepError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.expected = expected;
        drop(state);
        self.compile_into(graph, debug)
    }

    /// The step of `graph` if all its functions are known; none if [`Family::compile`] would run the C compiler.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn known(&self, graph: &Graph) -> Result<Option<CpuExecutable>, StepError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let step = match self.cached(graph)? {
            Some(step) => Some(step),
            None => match self.find(&mut state, graph)? {
                Search::Known(step) => Some(*step),
                Search::Missing(_) => None,
            },
        };
        state.stats.graphs += usize::from(step.is_some());
        Ok(step)
    }

    /// Plans `graph`, and looks for its functions.
    fn find(&self, state: &mut State, graph: &Graph) -> Result<Search, StepError> {
        let start = Instant::now();
        self.load(graph, state);
        let planned = self.plan(graph)?;
        let units = state.look_up(&planned);
        let positions = state.missing(&units);
        let wanted = Wanted {
            planned,
            units,
            positions,
            compile_time: start.elapsed(),
        };
        if wanted.positions.is_empty() {
            return Ok(Search::Known(Box::new(self.bind(state, graph, wanted)?)));
        }
        Ok(Search::Missing(Box::new(wanted)))
    }

    /// The options of a graph whose stages are written to `debug`, if that is given.
    fn options_of(&self, debug: Option<&Path>) -> Options {
        Options {
            debug: debug.map(Path::to_path_buf),
            ..self.options.clone()
        }
    }

    /// The step of `graph` with its extents as constants.
    fn alone(&self, state: &mut State, graph: &Graph) -> Result<(CpuExecutable, Outcome), StepError> {
        state.stats.builds += 1;
        let step = CpuExecutable::new(
            graph,
            &self.options_of(None),
            &self.target,
            &self.toolchain,
            &self.cache,
            &self.build,
        )?;
        Ok((step, Outcome::Alone(state.refusal.clone())))
    }

    /// The step of `graph` with its extents as constants, if the cache has that. It is the fastest there is.
    fn cached(&self, graph: &Graph) -> Result<Option<CpuExecutable>, StepError> {
        let options = self.options_of(None);
        CpuExecutable::cached(
            graph,
            &options,
            &self.target,
            &self.toolchain,
            &self.cache,
            &self.build,
        )
    }

    /// The step of `graph` with its extents as constants, of the very functions that [`Family::compile`] calls with
    /// variables: their results are equal, bit for bit.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn compile_constant(&self, graph: &Graph) -> Result<CpuExecutable, StepError> {
        let planned = self.plan(graph)?;
        let mut state = State::default();
        let units = state.units(&planned);
        let templates = units.iter().map(Template::constant).collect();
        self.build(&mut state, &graph.name, templates)?;
        let wanted = Wanted {
            planned,
            units,
            positions: Vec::new(),
            compile_time: Duration::ZERO,
        };
        self.bind(&state, graph, wanted)
    }

    /// All passes for `graph`, up to the text of its functions.
    fn plan(&self, graph: &Graph) -> Result<Planned, StepError> {
        let target = CallsTarget(self.target.clone());
        Ok(compile(graph, &self.options_of(None), &target)?)
    }

    /// The step that `wanted` is, with known functions.
    fn bind(&self, state: &State, graph: &Graph, wanted: Wanted) -> Result<CpuExecutable, StepError> {
        let Wanted { planned, units, .. } = wanted;
        let mut contract = planned.contract();
        let mut functions = Vec::new();
        let mut names = Vec::new();
        for unit in &units {
            let known = state.find(unit).expect("what was missing has been built");
            names.push(&*known.written.name);
            functions.push(BoundFunction {
                library: known.library.clone(),
                number: known.number,
                table: known.written.table.iter().map(|&at| unit.values[at]).collect(),
            });
        }
        for call in planned.code.calls.iter().rev() {
            match call {
                StepCall::Task { kernel, function, .. }
                | StepCall::Each { kernel, function, .. }
                | StepCall::Kernel { kernel, function, .. } => {
                    names[*function].clone_into(&mut contract.kernels[*kernel].name);
                }
                StepCall::Extern { kernel, index, .. } => {
                    contract.kernels[*kernel].name = format!("extern_{index}")
                }
                StepCall::Guard { .. } => {}
            }
        }
        log_step(&graph.name, self.options.keep, &contract);
        let signature = Signature::new(
            planned.graph.parameters().len(),
            planned.graph.outputs.len(),
            planned.graph.scalars().len(),
            planned.plan.arena_bytes,
        );
        let list = CallList::new(planned.code, functions, signature);
        let step = Step::of_calls(list);
        let mut executable = CpuExecutable::of_calls(&graph.name, step, contract, self.target.threads);
        executable.compile_time = wanted.compile_time;
        executable.stages = planned.times;
        Ok(executable)
    }
}
