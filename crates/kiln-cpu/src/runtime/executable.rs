//! A compiled step that can be called.
//!
//! [`CpuExecutable::new`] asks the disk cache for the step of a graph before it compiles anything: the key is
//! the graph's text without names, the phases of its nodes, the options, and (added by the cache) versions,
//! compiler and CPU. What the caller must know besides the code (aliases, the arena, what the kernels are) is
//! stored with the shared object, so that a second process does none of the compiler's work. Source lines are
//! this process's ([`kiln_compiler::numbered`]).

use std::time::{Duration, Instant};

use kiln_compiler::{Contract, Options, compile, identity, log_step, numbered};
use kiln_graph::Graph;
use kiln_store::Key;
use smallvec::SmallVec;

use crate::build::{BuildOptions, Toolchain};
use crate::cache::{Cache, CachedStep, Origin, StepSource, step_key};
use crate::error::{CpuError, StepError};
use crate::runtime::arenas::Claim;
use crate::runtime::library::{Step, StepArguments, StepHooks};
use crate::runtime::observe::{Observed, Observer};
use crate::runtime::thread_pool::ThreadPool;
use crate::target::CpuTarget;

/// Memory for one number that the step leaves: the least or the largest of some indices.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Extreme([u8; 8]);

/// A step that is built and loaded.
#[derive(Debug)]
pub struct CpuExecutable {
    name: String,
    step: Step,
    contract: Contract,
    /// Most threads that may run the step: its working memory is made for so many.
    threads: usize,
    arena: Claim,
    /// Whether the cache had it.
    pub from_cache: bool,
    /// Time in Kiln's own passes.
    pub compile_time: Duration,
    /// Time in the C compiler and linker.
    pub build_time: Duration,
    /// Time in each stage, those of the C compiler and of loading included.
    pub stages: Vec<(&'static str, Duration)>,
}

/// The key of the step of `graph` in the cache.
fn key(
    graph: &Graph,
    options: &Options,
    target: &CpuTarget,
    toolchain: &Toolchain,
    build: &BuildOptions,
) -> Key {
    let fields = identity::fields(graph, options, target).into_iter();
    let key = step_key(toolchain, build);
    fields
        .fold(key, |key, (name, value)| key.field(name, value))
        .finish()
}

impl CpuExecutable {
    /// Compiles `graph`, or finds it in `cache`.
    ///
    /// # Errors
    /// Those of [`compile()`], of the C compiler and of loading.
    pub fn new(
        graph: &Graph,
        options: &Options,
        target: &CpuTarget,
        toolchain: &Toolchain,
        cache: &Cache,
        build: &BuildOptions,
    ) -> Result<Self, StepError> {
        let start = Instant::now();
        let key = key(graph, options, target, toolchain, build);
        if let Some(folder) = &options.debug {
            // What is written there must not depend on what the cache holds.
            let compiled = compile(graph, options, target)?;
            crate::debug::write(folder, &compiled, target, toolchain, build);
        }
        let quiet = Options {
            debug: None,
            ..options.clone()
        };
        let mut stages = Vec::new();
        let mut compile_time = Duration::ZERO;
        let cached = cache.get_or_build(&key, toolchain, build, || -> Result<StepSource, StepError> {
            let compiled = compile(&numbered(graph), &quiet, target)?;
            compile_time = start.elapsed();
            stages.clone_from(&compiled.times);
            let payload =
                serde_json::to_string(&compiled.contract()).map_err(|error| StepError::Description {
                    name: graph.name.clone(),
                    reason: error.to_string(),
                })?;
            Ok(StepSource {
                name: graph.name.clone(),
                files: compiled.code,
                payload,
            })
        })?;
        let mut step = Self::of_cached(graph, options, target, cached)?;
        step.compile_time = compile_time;
        step.stages.splice(0..0, stages);
        tracing::info!(
            name = graph.name,
            kernels = step.contract.kernels.len(),
            arena = step.contract.arena_bytes,
            ?compile_time,
            build_time = ?step.build_time,
            "step ready"
        );
        Ok(step)
    }

    /// The step of `graph` if `cache` has it.
    ///
    /// # Errors
    /// If what stands beside it cannot be read.
    pub fn cached(
        graph: &Graph,
        options: &Options,
        target: &CpuTarget,
        toolchain: &Toolchain,
        cache: &Cache,
        build: &BuildOptions,
    ) -> Result<Option<Self>, StepError> {
        if cache.folder().is_none() {
            return Ok(None);
        }
        let found = cache.get(&key(graph, options, target, toolchain, build));
        found
            .map(|found| Self::of_cached(graph, options, target, found))
            .transpose()
    }

    fn of_cached(
        graph: &Graph,
        options: &Options,
        target: &CpuTarget,
        cached: CachedStep,
    ) -> Result<Self, StepError> {
        let contract: Contract =
            serde_json::from_str(&cached.payload).map_err(|error| StepError::Description {
                name: graph.name.clone(),
                reason: error.to_string(),
            })?;
        let contract = contract.with_lines_of(graph);
        log_step(&graph.name, options.keep, &contract);
        let mut stages = Vec::new();
        let build_time = match cached.origin {
            Origin::Cache => Duration::ZERO,
            Origin::Built(elapsed) => elapsed,
        };
        if build_time > Duration::ZERO {
            stages.push(("cc", build_time));
        }
        stages.push(("load", cached.load_time));
        Ok(Self {
            name: graph.name.clone(),
            step: cached.library.step(),
            arena: Claim::new(contract.arena_bytes),
            contract,
            threads: target.threads,
            from_cache: matches!(cached.origin, Origin::Cache),
            compile_time: Duration::ZERO,
            build_time,
            stages,
        })
    }

    /// A step called `name` that calls functions which are there.
    pub(crate) fn of_calls(name: &str, step: Step, contract: Contract, threads: usize) -> Self {
        Self {
            name: name.to_owned(),
            step,
            arena: Claim::new(contract.arena_bytes),
            contract,
            threads,
            from_cache: false,
            compile_time: Duration::ZERO,
            build_time: Duration::ZERO,
            stages: Vec::new(),
        }
    }

    /// The contract with the caller.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// Runs the step once.
    ///
    /// # Errors
    /// [`StepError::Arguments`] when the pool has more threads than the step was compiled for;
    /// [`StepError::Index`] when an index is out of range, and then nothing was overwritten: no input, and of
    /// the outputs none that takes over an input's memory; [`StepError::Cpu`] when counts do not fit or an
    /// operation outside failed.
    ///
    /// # Safety
    /// `inputs[i]` must point to the row-major elements of parameter `i` and `outputs[i]` to memory of the
    /// size of output `i`, the former aligned to their elements and the latter to 64 bytes, valid and not
    /// written by anyone else during the call. An output must not overlap an input or another output, unless [`Contract::aliases`] pairs it with an
    /// input: then both pointers must be the same.
    pub unsafe fn run(
        &self,
        pool: &ThreadPool,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        scalars: &[u64],
        hooks: &dyn StepHooks,
    ) -> Result<(), StepError> {
        // SAFETY: the same contract.
        unsafe { self.run_observed(pool, inputs, outputs, scalars, hooks, None) }
    }

    /// [`CpuExecutable::run`], with an observer that is shown the step's memory after each kernel, for
    /// finding wrong results.
    ///
    /// # Errors
    /// Those of [`CpuExecutable::run`].
    ///
    /// # Safety
    /// As [`CpuExecutable::run`].
    pub unsafe fn run_observed(
        &self,
        pool: &ThreadPool,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        scalars: &[u64],
        hooks: &dyn StepHooks,
        observer: Option<&mut Observer<'_>>,
    ) -> Result<(), StepError> {
        if pool.threads() > self.threads {
            return Err(StepError::Arguments {
                name: self.name.clone(),
                what: "threads at most",
                expected: self.threads,
                given: pool.threads(),
            });
        }
        let checks = &self.contract.checks;
        let mut extremes: SmallVec<[Extreme; 8]> = SmallVec::from_elem(Extreme::default(), 2 * checks.len());
        let places = extremes.iter_mut().map(|extreme| extreme.0.as_mut_ptr());
        let outputs: Vec<*mut u8> = outputs.iter().copied().chain(places).collect();
        let outputs = outputs.as_slice();
        let mut arena = self.arena.arena()?;
        let (memory, bytes) = (arena.as_mut_ptr().cast_const(), arena.len());
        // SAFETY: the arena stays ours, and the outputs valid by this function's contract, until the step is
        // over.
        let observed = observer.map(|it| unsafe { Observed::new(hooks, memory, bytes, outputs, it) });
        let arguments = StepArguments {
            inputs,
            outputs,
            arena: &mut arena,
            scalars,
        };
        let hooks = observed
            .as_ref()
            .map_or(hooks, |observed| observed as &dyn StepHooks);
        // SAFETY: this function's contract is that of the step; the arena is ours alone until it is dropped.
        let result = unsafe { self.step.run(pool, arguments, hooks) };
        if let Err(CpuError::Check { number }) = &result
            && let Some(check) = checks.get(*number)
        {
            let extreme = |at: usize| check.number(extremes[2 * number + at].0);
            if let Some(error) = check.error(extreme(0), extreme(1)) {
                return Err(StepError::Index(Box::new(error)));
            }
        }
        result?;
        if let Some(observed) = &observed {
            observed.finish();
        }
        Ok(())
    }

    /// Name of the step.
    pub fn name(&self) -> &str {
        &self.name
    }
}
