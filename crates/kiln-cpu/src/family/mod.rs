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
//! - [`mod@scan`], [`mod@unit`]: functions apart from their numbers. [`mod@template`]: which numbers vary. [`mod@write`]: the C of it.
//! - Order of kernels, partition, plan of memory and choices of templates are those of each shape. They
//!   are data: a shape that decides otherwise calls other functions, which most often are there.
//! - Graphs of the samples are guesses, and only show which numbers vary. Nothing of theirs is ever run.

pub mod scan;
pub mod template;
pub mod unit;
pub mod write;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_compiler::{CompiledStep, Options, compile, log_step};
use kiln_graph::{Fingerprint, Graph, Line};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::build::{BuildOptions, Toolchain};
use crate::cache::{Cache, Origin};
use crate::emit::calls::{StepCall, StepFunction};
use crate::error::{CpuError, StepError};
use crate::runtime::abi::Signature;
use crate::runtime::executable::CpuExecutable;
use crate::runtime::functions::{BoundFunction, CallList, FunctionLibrary};
use crate::runtime::library::Step;
use crate::target::{CallsTarget, CpuTarget};
use template::{Template, generalise};
use unit::{Skeleton, Unit, Units};
use write::Writer;

/// Most recorded graphs that are kept to find others on a line with them.
const GRAPHS: usize = 4;

/// Most sizes, about, that are sampled at once.
const SIZES: i64 = 128;

/// What became of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was compiled on its own, with its extents as constants: it is the first of its family, or, if there is a
    /// reason, its functions could not be built with variables.
    Alone(Option<String>),
    /// All its functions were known: the C compiler did not run.
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

/// A template that was built.
#[derive(Debug)]
struct Known {
    template: Template,
    name: String,
    table: Vec<usize>,
    library: Arc<FunctionLibrary>,
    number: usize,
}

/// What a family has learned.
#[derive(Debug, Default)]
struct State {
    units: Units,
    graphs: Vec<Graph>,
    /// Functions of the steps that were planned, by shape.
    samples: Vec<Vec<Arc<Unit>>>,
    /// Graphs that were made for samples.
    sampled: FxHashSet<Fingerprint>,
    /// How often functions were built.
    learned: usize,
    known: Vec<Known>,
    by_skeleton: FxHashMap<Skeleton, Vec<usize>>,
    /// Why each graph is compiled on its own, if sizes cannot be variables.
    refusal: Option<String>,
    stats: FamilyStats,
}

/// Steps that differ in shapes, and share what was compiled.
#[derive(Debug)]
pub struct Family {
    options: Options,
    target: CpuTarget,
    toolchain: Toolchain,
    cache: Cache,
    build: BuildOptions,
    state: Mutex<State>,
}

/// A step that was planned and is not built.
type Planned = CompiledStep<CallsTarget>;

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
            state: Mutex::default(),
        }
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
        if state.graphs.is_empty() || state.refusal.is_some() {
            if state.graphs.is_empty() {
                state.graphs.push(graph.clone());
            }
            state.stats.builds += 1;
            return Ok((self.alone(graph, debug)?, Outcome::Alone(state.refusal.clone())));
        }
        if let Some(folder) = debug {
            let compiled = compile(graph, &self.dumping(debug), &self.target)?;
            crate::debug::write(folder, &compiled, &self.target, &self.toolchain, &self.build);
        }
        let start = Instant::now();
        let planned = self.plan(graph)?;
        let units = state.look_up(&planned);
        let mut build_time = Duration::ZERO;
        let mut outcome = Outcome::Known;
        let missing = state.missing(&units);
        if let Some(&position) = missing.iter().find(|&&at| has_parts(&units[at])) {
            let operation = operation(&planned, position);
            let reason = format!("{operation}: a kernel of several parts cannot take its sizes from a table");
            state.stats.builds += 1;
            state.refusal = Some(reason.clone());
            return Ok((self.alone(graph, None)?, Outcome::Alone(Some(reason))));
        }
        if !missing.is_empty() {
            let reason = state.reason(&planned, &units, &missing);
            let built = self.learn(&mut state, graph, &units);
            let (elapsed, from_cache) = match built {
                Ok(built) => built,
                // C that these variables cannot stand in.
                Err(CpuError::Compile { file, stderr, .. }) => {
                    tracing::warn!(target: "kiln::family", file, stderr, "functions with variables do not compile");
                    state.stats.builds += 1;
                    state.refusal = Some(reason.clone());
                    return Ok((self.alone(graph, None)?, Outcome::Alone(Some(reason))));
                }
                Err(error) => return Err(error.into()),
            };
            build_time = elapsed;
            outcome = Outcome::Built {
                functions: missing.len(),
                reason,
                from_cache,
            };
        }
        let compile_time = start.elapsed().saturating_sub(build_time);
        let mut executable = self.bind(&state, graph, planned, &units)?;
        executable.compile_time = compile_time;
        executable.build_time = build_time;
        if build_time > Duration::ZERO {
            executable.stages.push(("cc", build_time));
        }
        Ok((executable, outcome))
    }

    /// The step of `graph` if all its functions are known; none if [`Family::compile`] would run the C compiler.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn known(&self, graph: &Graph) -> Result<Option<CpuExecutable>, StepError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let planned = self.plan(graph)?;
        let units = state.look_up(&planned);
        if !state.missing(&units).is_empty() {
            return Ok(None);
        }
        state.stats.graphs += 1;
        let mut executable = self.bind(&state, graph, planned, &units)?;
        executable.compile_time = start.elapsed();
        Ok(Some(executable))
    }

    /// The options of a graph whose stages are written to `debug`.
    fn dumping(&self, debug: Option<&Path>) -> Options {
        Options {
            debug: debug.map(Path::to_path_buf),
            ..self.options.clone()
        }
    }

    /// The step of `graph` with its extents as constants.
    fn alone(&self, graph: &Graph, debug: Option<&Path>) -> Result<CpuExecutable, StepError> {
        CpuExecutable::new(
            graph,
            &self.dumping(debug),
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
        self.build(
            &mut state,
            &graph.name,
            units.iter().map(Template::constant).collect(),
        )?;
        self.bind(&state, graph, planned, &units)
    }

    /// All passes for `graph`, up to the text of its functions.
    fn plan(&self, graph: &Graph) -> Result<Planned, StepError> {
        let quiet = Options {
            debug: None,
            ..self.options.clone()
        };
        Ok(compile(graph, &quiet, &CallsTarget(self.target.clone()))?)
    }

    /// Builds templates for what is not known: of `graph`, whose functions are `units`, and of the samples around it.
    fn learn(
        &self,
        state: &mut State,
        graph: &Graph,
        units: &[Arc<Unit>],
    ) -> Result<(Duration, bool), CpuError> {
        let line = state
            .graphs
            .iter()
            .filter_map(|known| Line::through(known, graph))
            .min_by_key(Line::kinds);
        let first = state.samples.is_empty().then(|| state.graphs[0].clone());
        if let Some(units) = first
            .and_then(|first| self.plan(&first).ok())
            .map(|first| state.units(&first))
        {
            state.samples.push(units);
        }
        if let Some(line) = &line {
            let sizes = match state.learned {
                0 => sample_sizes(line.sizes()),
                _ => all_sizes(line.sizes()),
            };
            for functions in self.sample(line, &sizes, state) {
                let units = functions
                    .iter()
                    .map(|function| state.units.keep(function))
                    .collect();
                state.samples.push(units);
            }
        }
        state.learned += 1;
        state.samples.push(units.to_vec());
        if state.graphs.len() < GRAPHS {
            state.graphs.push(graph.clone());
        }
        let templates = state.new_templates();
        self.build(state, &graph.name, templates)
    }

    /// The functions of the graphs of these sizes that were not sampled before. They are planned side by side.
    fn sample(&self, line: &Line, sizes: &[i64], state: &mut State) -> Vec<Vec<StepFunction>> {
        let graphs = sizes.iter().filter_map(|&size| line.at(size));
        let graphs: Vec<Graph> = graphs
            .filter(|graph| state.sampled.insert(graph.fingerprint()))
            .collect();
        let next = AtomicUsize::new(0);
        let take = || -> Vec<(usize, Vec<StepFunction>)> {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(graph) = graphs.get(at) else { return done };
                if let Ok(planned) = self.plan(graph) {
                    done.push((at, planned.code.functions));
                }
            }
        };
        let mut all = std::thread::scope(|scope| {
            let others: Vec<_> = (1..self.build.jobs).map(|_| scope.spawn(take)).collect();
            let mut all = take();
            // A panic of a pass is not hidden: it comes again where the graph itself is planned.
            all.extend(others.into_iter().filter_map(|other| other.join().ok()).flatten());
            all
        });
        // In the order of sizes: templates follow from it.
        all.sort_unstable_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, functions)| functions).collect()
    }

    /// Builds `templates`: the time of the C compiler, and whether the cache had them.
    fn build(
        &self,
        state: &mut State,
        name: &str,
        templates: Vec<Template>,
    ) -> Result<(Duration, bool), CpuError> {
        let mut writer = Writer::default();
        let written: Vec<_> = templates
            .iter()
            .map(|template| writer.add(template, &mut state.units.helpers))
            .collect();
        let files = writer.finish(self.target.isa);
        let (library, origin) = self.cache.functions(name, &files, &self.toolchain, &self.build)?;
        let library = Arc::new(library);
        state.stats.builds += 1;
        state.stats.functions += library.count();
        for (number, (template, written)) in templates.into_iter().zip(written).enumerate() {
            let position = state.known.len();
            state
                .by_skeleton
                .entry(template.base.skeleton)
                .or_default()
                .push(position);
            state.known.push(Known {
                template,
                name: written.name,
                table: written.table,
                library: library.clone(),
                number,
            });
        }
        Ok(match origin {
            Origin::Cache => (Duration::ZERO, true),
            Origin::Built(elapsed) => (elapsed, false),
        })
    }

    /// The step that `planned` is, with known functions.
    fn bind(
        &self,
        state: &State,
        graph: &Graph,
        planned: Planned,
        units: &[Arc<Unit>],
    ) -> Result<CpuExecutable, StepError> {
        let mut contract = planned.contract();
        let mut functions = Vec::new();
        let mut names = Vec::new();
        for unit in units {
            let known = state.find(unit).expect("what was missing has been built");
            names.push(&*known.name);
            functions.push(BoundFunction {
                library: known.library.clone(),
                number: known.number,
                table: known.table.iter().map(|&at| unit.values[at]).collect(),
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
        executable.stages = planned.times;
        Ok(executable)
    }
}

impl State {
    /// The units of a step's functions, which are kept.
    fn units(&mut self, planned: &Planned) -> Vec<Arc<Unit>> {
        let functions = planned.code.functions.iter();
        functions.map(|function| self.units.keep(function)).collect()
    }

    /// The units of a step's functions. A family of many shapes would grow if all were kept.
    fn look_up(&mut self, planned: &Planned) -> Vec<Arc<Unit>> {
        let functions = planned.code.functions.iter();
        functions.map(|function| self.units.get(function)).collect()
    }

    /// The template that stands for `unit`, with the fewest variables if there are several.
    fn find(&self, unit: &Unit) -> Option<&Known> {
        let candidates = self
            .by_skeleton
            .get(&unit.skeleton)?
            .iter()
            .map(|&at| &self.known[at]);
        candidates
            .filter(|known| known.template.fits(unit))
            .min_by_key(|known| known.template.variables.len())
    }

    /// Positions of the units that no template stands for.
    fn missing(&self, units: &[Arc<Unit>]) -> Vec<usize> {
        let numbered = units.iter().enumerate();
        numbered
            .filter(|(_, unit)| self.find(unit).is_none())
            .map(|(at, _)| at)
            .collect()
    }

    /// Templates for all units of the samples that none stands for yet.
    fn new_templates(&self) -> Vec<Template> {
        let mut seen = FxHashSet::default();
        let all = self.samples.iter().flatten();
        let mut missing: Vec<&Arc<Unit>> = all
            .filter(|unit| seen.insert(Arc::as_ptr(unit)) && self.find(unit).is_none())
            .collect();
        let mut templates = generalise(&self.samples);
        templates.retain(|template| {
            let before = missing.len();
            missing.retain(|unit| !template.fits(unit));
            missing.len() < before
        });
        templates
    }

    /// What the first of the `missing` functions computes, and how it differs from those that are known.
    fn reason(&self, planned: &Planned, units: &[Arc<Unit>], missing: &[usize]) -> String {
        let first = missing[0];
        let operation = operation(planned, first);
        let unit = &units[first];
        let same = self.by_skeleton.get(&unit.skeleton).into_iter().flatten();
        let differing = same
            .map(|&at| &self.known[at].template)
            .map(|template| {
                let pairs = unit.values.iter().zip(&template.base.values);
                let pairs = pairs
                    .zip(&template.holes)
                    .filter(|((a, b), hole)| hole.is_none() && a != b);
                pairs.map(|((a, b), _)| (*b, *a)).collect::<Vec<_>>()
            })
            .min_by_key(Vec::len);
        match differing.as_deref() {
            Some([(known, now), ..]) => {
                format!("{operation}: a number of its kernel was {known} so far and is {now} now")
            }
            Some([]) => format!("{operation}: numbers that were equal so far are not"),
            None => format!("{operation}: its kernel has another form at this size"),
        }
    }
}

/// What function `position` of a step computes.
fn operation(planned: &Planned, position: usize) -> String {
    let kernel = planned.code.calls.iter().find_map(|call| match call {
        StepCall::Task { kernel, function, .. }
        | StepCall::Each { kernel, function, .. }
        | StepCall::Kernel { kernel, function, .. }
            if *function == position =>
        {
            Some(*kernel)
        }
        _ => None,
    });
    let report = kernel.map(|kernel| &planned.kernels[kernel]);
    report
        .and_then(|report| report.nodes.last())
        .map_or_else(String::new, |node| format!("{node} : {}", node.ty))
}

/// Whether a function contains a kernel with arguments of its own (a convolution as a product), which no
/// table reaches.
fn has_parts(unit: &Unit) -> bool {
    unit.function.text.matches("_args {").count() > 1
}

/// Sizes at which a line is sampled: small and large ones, powers of two, odd and even ones.
fn sample_sizes((one, two): (i64, i64)) -> Vec<i64> {
    let most = one.max(two).max(16).unsigned_abs().next_power_of_two() as i64;
    let mut sizes = Vec::new();
    let mut power = 8.min(one.min(two).max(1));
    while power <= most {
        for sixteenth in [16, 17, 19, 21, 23, 25, 27, 29, 31] {
            sizes.push(power * sixteenth / 16 + i64::from(sixteenth % 4 == 3));
        }
        power *= 2;
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size != one && size != two);
    sizes
}

/// Sizes for a line of which a size had a form that no sample showed: all there are, or every few of many.
fn all_sizes((one, two): (i64, i64)) -> Vec<i64> {
    let most = 2 * one.max(two).max(16).unsigned_abs().next_power_of_two() as i64;
    let least = one.min(two).min(8);
    // An odd stride meets every remainder.
    let stride = ((most - least) / SIZES) | 1;
    (least..=most).step_by(stride.unsigned_abs() as usize).collect()
}
