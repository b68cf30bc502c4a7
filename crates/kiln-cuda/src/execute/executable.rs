//! A compiled step that can be called.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kiln_compiler::{Contract, ExternCall, Options, log_step};
use kiln_graph::Graph;

use super::bound::{Bound, Chosen, Memory, Parts, Place, Sink, bind};
use super::error::StepError;
use super::gpu::Gpu;
use super::prepare::{choices, compiled, load, name_own_kernels, ranks};
use super::replayed::{Arrangement, Common, Given, Replayed};
use super::settled::Parked;
use super::{either, guards};
use crate::code::{Address, CallKind, StepCode};
use crate::debug;
use crate::error::CudaError;
use crate::family::SharedStep;
use crate::products::Multiplier;
use crate::ranks::Ranks;
use crate::runtime::{Event, Kernel, Parcel, Storage};
use crate::target::CudaTarget;

/// Runs operations that stay outside the compiled step.
pub trait Outside {
    /// Runs operation `index`. `places` are its operands and then its results, each a storage and the bytes
    /// in front of its first element. Everything before the operation is queued on the device's stream.
    ///
    /// # Errors
    /// Why it failed, for people.
    fn call(&self, index: u32, places: &[(Arc<Storage>, usize)]) -> Result<(), String>;
}

/// For steps without such operations.
#[derive(Clone, Copy, Debug)]
pub struct NothingOutside;

impl Outside for NothingOutside {
    fn call(&self, index: u32, _: &[(Arc<Storage>, usize)]) -> Result<(), String> {
        Err(format!("nothing runs operation {index}"))
    }
}

/// When a call ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallTime {
    /// The kernel of the schedule that it belongs to.
    pub kernel: u32,
    /// When it began, in milliseconds of the device's clock since the step did.
    pub begin: f32,
    /// When it ended.
    pub end: f32,
}

/// A step that is compiled and loaded.
pub struct CudaExecutable {
    name: String,
    gpu: Arc<Gpu>,
    code: StepCode,
    contract: Contract,
    kernels: Vec<Kernel>,
    guards: Vec<Kernel>,
    choices: Vec<Chosen>,
    /// The other ranks, if the step has collectives.
    ranks: Option<Ranks>,
    label: Arc<str>,
    state: Mutex<State>,
    /// Whether calls become a graph at the second run.
    replays: bool,
    parked: Parked,
    /// Nodes of the graph, once there was one.
    nodes: OnceLock<usize>,
    /// Whether the step came from the cache.
    pub from_cache: bool,
    /// Time in Kiln's own passes.
    pub compile_time: Duration,
    /// Time in NVRTC and in the search for algorithms.
    pub build_time: Duration,
    /// Time in each stage.
    pub stages: Vec<(&'static str, Duration)>,
}

/// What a step keeps from call to call.
pub(super) struct State {
    /// Runtime scalars of calls that are queued one by one.
    scalars: Parcel,
    stopped: Arc<Storage>,
    /// Where the least and the largest index of each check are left.
    extremes: Vec<Arc<Storage>>,
    /// The addresses of the last call of [`CudaExecutable::run`].
    last: Vec<u64>,
    /// For each input and output, whether its address changed from one call to the next although no output
    /// takes the input's memory.
    moves: Vec<bool>,
}

/// What a call is given.
#[derive(Clone, Copy)]
struct CallArguments<'a> {
    inputs: &'a [Arc<Storage>],
    outputs: &'a [Arc<Storage>],
    scalars: &'a [u64],
    outside: &'a dyn Outside,
    /// Whether to wait for the index checks.
    wait: bool,
}

impl CallArguments<'_> {
    /// The addresses of inputs and then of outputs.
    fn addresses(&self) -> Vec<u64> {
        let all = self.inputs.iter().chain(self.outputs);
        all.map(|storage| storage.address()).collect()
    }
}

impl std::fmt::Debug for CudaExecutable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaExecutable({} on {:?})", self.name, self.gpu)
    }
}

impl CudaExecutable {
    /// Compiles `graph` for the device, which `target` describes ([`Gpu::target`]), or finds it in the cache.
    ///
    /// # Errors
    /// Those of [`kiln_compiler::compile()`], of NVRTC, of cuBLASLt and of loading.
    pub fn new(
        graph: &Graph,
        options: &Options,
        target: &CudaTarget,
        gpu: &Arc<Gpu>,
    ) -> Result<Self, StepError> {
        let start = Instant::now();
        let mut stages = Vec::new();
        let (code, contract, from_cache) = compiled(graph, options, target, gpu.store(), &mut stages)?;
        let compile_time = start.elapsed();
        log_step(&graph.name, options.keep, &contract);
        if let Some(folder) = &options.debug {
            debug::write(folder, &code, &contract);
        }
        let mut made = Self::from_code(&graph.name, code, contract, gpu)?;
        stages.append(&mut made.stages);
        Ok(Self {
            from_cache,
            compile_time,
            stages,
            ..made
        })
    }

    /// Builds and loads the code of a step.
    ///
    /// # Errors
    /// Those of NVRTC, of cuBLASLt and of loading; [`CudaError::NotConnected`] for a step of several ranks on a
    /// device that is not connected with theirs.
    pub fn from_code(
        name: &str,
        code: StepCode,
        mut contract: Contract,
        gpu: &Arc<Gpu>,
    ) -> Result<Self, StepError> {
        let mut stages = Vec::new();
        let start = Instant::now();
        ranks(&code, gpu)?;
        either::measure(gpu, &code)?;
        let (code, refused) = code.decided(|functions, call| either::takes(gpu, functions, call))?;
        name_own_kernels(&code, &mut contract, &refused);
        stages.push(("choices", start.elapsed()));
        let start = Instant::now();
        let kernels = load(&code, &contract, gpu)?;
        stages.push(("nvrtc", start.elapsed()));
        let mut made = Self::with_kernels(name, code, contract, kernels, gpu)?;
        stages.append(&mut made.stages);
        Ok(Self {
            build_time: stages.iter().map(|(_, time)| *time).sum(),
            stages,
            ..made
        })
    }

    /// Loads a step of a family ([`crate::family`]).
    ///
    /// # Errors
    /// Those of cuBLASLt and of loading, and as [`CudaExecutable::from_code`] for a step of several ranks.
    pub fn from_shared(name: &str, step: SharedStep, gpu: &Arc<Gpu>) -> Result<Self, StepError> {
        let start = Instant::now();
        let SharedStep {
            code,
            contract,
            programs,
            guards,
            from_cache,
            compile_time,
            build_time,
            mut stages,
        } = step;
        let functions = code.functions.iter().zip(&programs);
        let kernels = functions.map(|(function, program)| program.kernel(gpu.device(), &function.name));
        let kernels = kernels.collect::<Result<_, _>>()?;
        let checks = 0..contract.checks.len() as u32;
        let guards = guards.iter().flat_map(|program| {
            checks
                .clone()
                .map(|number| program.kernel(gpu.device(), &guards::name(number)))
        });
        let kernels = (kernels, guards.collect::<Result<_, _>>()?);
        stages.push(("load", start.elapsed()));
        let mut made = Self::with_kernels(name, code, contract, kernels, gpu)?;
        stages.append(&mut made.stages);
        Ok(Self {
            from_cache,
            compile_time,
            build_time: build_time + start.elapsed(),
            stages,
            ..made
        })
    }

    /// A decided step with the kernels of its functions and of its guards.
    fn with_kernels(
        name: &str,
        code: StepCode,
        contract: Contract,
        (kernels, guards): (Vec<Kernel>, Vec<Kernel>),
        gpu: &Arc<Gpu>,
    ) -> Result<Self, StepError> {
        let ranks = ranks(&code, gpu)?;
        let mut stages = Vec::new();
        let start = Instant::now();
        let choices = choices(&code, gpu)?;
        stages.push(("products", start.elapsed()));

        let outputs = code.outputs.len() - 2 * contract.checks.len();
        let extremes = code.outputs[outputs..].iter();
        let state = State {
            scalars: Parcel::new(gpu.stream(), 8 * code.scalars.max(1))?,
            stopped: gpu.allocate(4)?,
            extremes: extremes
                .map(|&bytes| gpu.allocate(bytes))
                .collect::<Result<_, _>>()?,
            last: Vec::new(),
            moves: vec![false; code.inputs.len() + outputs],
        };
        let build_time = stages.iter().map(|(_, time)| *time).sum();
        tracing::info!(
            name,
            calls = code.calls.len(),
            functions = code.functions.len(),
            arena = code.arena_bytes,
            ?build_time,
            "step ready"
        );
        Ok(Self {
            name: name.to_owned(),
            gpu: gpu.clone(),
            code,
            contract,
            kernels,
            guards,
            choices,
            ranks,
            label: format!("the collectives of step `{name}`").into(),
            state: Mutex::new(state),
            replays: true,
            parked: Parked::default(),
            nodes: OnceLock::new(),
            from_cache: false,
            compile_time: Duration::ZERO,
            build_time,
            stages,
        })
    }

    /// The same step, whose calls never become a graph: for one that runs once, or on other memory each time.
    #[must_use]
    pub fn without_graph(mut self) -> Self {
        self.replays = false;
        self
    }

    /// Whether calls may become a graph: not where operations run outside, which would cut it, nor where NCCL's
    /// calls cannot be captured.
    pub fn can_settle(&self) -> bool {
        let captures = self.ranks.as_ref().is_none_or(Ranks::can_capture);
        self.replays && captures && self.outside() == 0
    }

    /// How many operations run outside; collectives of all ranks do not.
    pub(super) fn outside(&self) -> usize {
        let outside = |call: &&ExternCall| call.collective.is_none();
        self.contract.externs.iter().filter(outside).count()
    }

    /// An error if other ranks have gone.
    pub(super) fn check_ranks(&self) -> Result<(), StepError> {
        match &self.ranks {
            Some(ranks) => Ok(ranks.check()?),
            None => Ok(()),
        }
    }

    /// Has the collectives that were just queued watched.
    pub(super) fn watch_ranks(&self) -> Result<(), StepError> {
        match &self.ranks {
            Some(ranks) => Ok(ranks.watch(self.gpu.stream(), &self.label)?),
            None => Ok(()),
        }
    }

    /// What the caller must know.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// What runs on the device.
    pub fn code(&self) -> &StepCode {
        &self.code
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// How many nodes the step's graph has; none as long as all calls were queued one by one.
    pub fn graph_nodes(&self) -> Option<usize> {
        self.nodes.get().copied()
    }

    /// The graph that nobody has settled on.
    pub(super) fn parked(&self) -> &Parked {
        &self.parked
    }

    fn park(&self) -> MutexGuard<'_, Option<Replayed>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic may leave the addresses half written; each call compares them with its own.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the step and returns. `outputs` has a storage for each output; an output that takes over an
    /// input's memory ([`Contract::aliases`]) may have the input's storage, and otherwise storages must
    /// differ. `wait` says whether to wait for the index checks.
    ///
    /// # Errors
    /// [`StepError::Arguments`]; [`StepError::Index`] when `wait` and an index is out of range: then no
    /// output that has an input's storage was written; [`StepError::Outside`]; [`StepError::Cuda`].
    pub fn run(
        &self,
        inputs: &[Arc<Storage>],
        outputs: &[Arc<Storage>],
        scalars: &[u64],
        outside: &dyn Outside,
        wait: bool,
    ) -> Result<(), StepError> {
        self.check(inputs, outputs, scalars)?;
        self.check_ranks()?;
        let call = CallArguments {
            inputs,
            outputs,
            scalars,
            outside,
            wait,
        };
        self.with_state(|state, arena| {
            let now = call.addresses();
            let mut parked = self.park();
            let fitting = parked.as_ref().and_then(|graph| graph.fitting(&now, arena));
            match (&mut *parked, fitting) {
                (Some(graph), Some(variant)) => self.launch(graph, variant, &call)?,
                (parked, _) => self.run_unfit(state, parked, &call, &now, arena)?,
            }
            state.last = now;
            Ok(())
        })
    }

    /// Launches a graph that fits.
    fn launch(
        &self,
        graph: &mut Replayed,
        variant: usize,
        call: &CallArguments<'_>,
    ) -> Result<(), StepError> {
        graph.missed = false;
        let (entering, leaving): (Vec<_>, Vec<_>) = (graph.entering().collect(), graph.leaving().collect());
        let given = entering.iter().map(|&index| Given::Device(&call.inputs[index]));
        let results = leaving.iter().map(|&index| &call.outputs[index]);
        graph.launch(variant, &self.gpu, call.scalars, given, results)?;
        self.watch_ranks()?;
        if call.wait && !self.contract.checks.is_empty() {
            self.look_at_checks(&graph.memory(variant))?;
        }
        Ok(())
    }

    /// As [`CudaExecutable::run`], call by call and with a look at the clock between two calls. Waits for the
    /// step. A call takes a little longer so than in the graph, where no launch lies between two.
    ///
    /// # Errors
    /// Those of [`CudaExecutable::run`].
    pub fn run_timed(
        &self,
        inputs: &[Arc<Storage>],
        outputs: &[Arc<Storage>],
        scalars: &[u64],
        outside: &dyn Outside,
    ) -> Result<Vec<CallTime>, StepError> {
        self.check(inputs, outputs, scalars)?;
        self.check_ranks()?;
        let call = CallArguments {
            inputs,
            outputs,
            scalars,
            outside,
            wait: true,
        };
        self.with_state(|state, arena| {
            self.on_memory(state, &call, arena, |memory| {
                let mut marks = Vec::with_capacity(self.code.calls.len() + 1);
                self.run_one_by_one(memory, self.multiplier()?, outside, || {
                    marks.push(self.gpu.stream().record_time()?);
                    Ok(())
                })?;
                self.look_at_checks(memory)?;
                let start = &marks[0];
                let at = |mark: &Event| mark.milliseconds_since(start);
                let times = self.code.calls.iter().zip(marks.windows(2)).map(|(call, pair)| {
                    Ok(CallTime {
                        kernel: call.kernel,
                        begin: at(&pair[0])?,
                        end: at(&pair[1])?,
                    })
                });
                Ok(times.collect::<Result<_, CudaError>>()?)
            })
        })
    }

    /// Does `work` with what the step keeps from call to call and the memory of intermediate values. Nobody
    /// queues another step meanwhile.
    pub(super) fn with_state<R>(
        &self,
        work: impl FnOnce(&mut State, &Arc<Storage>) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        let mut state = self.lock();
        self.gpu
            .with_arena(self.code.arena_bytes, |arena| work(&mut state, arena))
    }

    /// Sends the scalars, and does `work` with all memory of a call that is queued one by one.
    fn on_memory<R>(
        &self,
        state: &mut State,
        call: &CallArguments<'_>,
        arena: &Arc<Storage>,
        work: impl FnOnce(&Memory<'_>) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        let scalars = call.scalars;
        state
            .scalars
            .send(self.gpu.stream(), 8 * scalars.len(), |block| {
                let (words, _) = block.as_chunks_mut::<8>();
                for (word, bits) in words.iter_mut().zip(scalars) {
                    *word = bits.to_ne_bytes();
                }
            })?;
        let start = |storage: &Arc<Storage>| (storage.clone(), 0);
        let inputs: Vec<Place> = call.inputs.iter().map(start).collect();
        let outputs: Vec<Place> = call.outputs.iter().chain(&state.extremes).map(start).collect();
        work(&Memory {
            inputs: &inputs,
            moving: &[],
            outputs: &outputs,
            arena,
            scalars: state.scalars.storage(),
            stopped: &state.stopped,
        })
    }

    /// Runs a call that no kept graph fits: call by call if addresses changed since the last one, and as
    /// the first launch of a new graph otherwise. A graph that a single call does not fit is kept.
    fn run_unfit(
        &self,
        state: &mut State,
        parked: &mut Option<Replayed>,
        call: &CallArguments<'_>,
        now: &[u64],
        arena: &Arc<Storage>,
    ) -> Result<(), StepError> {
        let kept = parked.as_mut().is_some_and(|graph| {
            let kept = !graph.missed && graph.has_arena(arena);
            graph.missed = true;
            kept
        });
        if !kept {
            *parked = None;
        }
        let first = state.last.len() != now.len();
        if !first {
            let count = self.code.inputs.len();
            for (index, moves) in state.moves.iter_mut().enumerate() {
                let is_state = match index.checked_sub(count) {
                    None => self.contract.aliases.contains(&Some(index as u32)),
                    Some(output) => self.contract.aliases.get(output).is_some_and(Option::is_some),
                };
                *moves |= !is_state && state.last[index] != now[index];
            }
        }
        if first || kept || !self.can_settle() {
            return self.on_memory(state, call, arena, |memory| {
                self.run_one_by_one(memory, self.multiplier()?, call.outside, || Ok(()))?;
                match call.wait && !self.contract.checks.is_empty() {
                    true => self.look_at_checks(memory),
                    false => Ok(()),
                }
            });
        }
        let moved = state.last.iter().zip(now).map(|(last, now)| last != now);
        let moves: Vec<bool> = state.moves.iter().zip(moved).map(|(a, b)| *a || b).collect();
        let stays = |(storage, &moves): (&Arc<Storage>, &bool)| (!moves).then(|| storage.clone());
        let (inputs, outputs) = moves.split_at(self.code.inputs.len());
        let arrangement = Arrangement {
            inputs: call.inputs.iter().zip(inputs).map(stays).collect(),
            outputs: call.outputs.iter().zip(outputs).map(stays).collect(),
            pairs: Vec::new(),
        };
        let graph = parked.insert(self.build(&arrangement, state, arena)?);
        self.launch(graph, 0, call)
    }

    /// Builds the graph of a call with these arguments.
    pub(super) fn build(
        &self,
        arrangement: &Arrangement,
        state: &State,
        arena: &Arc<Storage>,
    ) -> Result<Replayed, StepError> {
        let common = Common {
            name: &self.name,
            parts: &self.parts(),
            multiplier: self.multiplier()?,
            stream: self.gpu.stream(),
            arena,
            stopped: &state.stopped,
            extremes: &state.extremes,
            aliases: &self.contract.aliases,
        };
        let graph = Replayed::build(&common, arrangement)?;
        self.nodes.get_or_init(|| graph.nodes());
        Ok(graph)
    }

    /// Queues call by call; `between` comes in front of the first and behind each.
    fn run_one_by_one(
        &self,
        memory: &Memory<'_>,
        multiplier: Option<&Multiplier>,
        outside: &dyn Outside,
        mut between: impl FnMut() -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let mut stream = self.gpu.stream().clone();
        if !self.guards.is_empty() {
            stream.clear(memory.stopped)?;
        }
        let calls = bind(&self.parts(), memory, multiplier, self.gpu.stream())?;
        between()?;
        for mut call in calls {
            if let Bound::Extern(index, addresses) = call {
                let place = |address: &Address| {
                    let (storage, at) = memory.place(*address);
                    (storage.clone(), at)
                };
                let places: Vec<_> = addresses.iter().map(place).collect();
                let failed = |reason| StepError::Outside {
                    name: self.name.clone(),
                    index,
                    reason,
                };
                outside.call(index, &places).map_err(failed)?;
            } else {
                call.give(&mut stream, memory)?;
            }
            between()?;
        }
        self.watch_ranks()
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            code: &self.code,
            kernels: &self.kernels,
            guards: &self.guards,
            choices: &self.choices,
            ranks: self.ranks.as_ref(),
        }
    }

    /// cuBLASLt, if a call needs it.
    fn multiplier(&self) -> Result<Option<&Multiplier>, StepError> {
        let is_product = |choice: &Chosen| matches!(choice, Chosen::Product(_));
        match self.choices.iter().any(is_product) {
            true => Ok(Some(self.gpu.multiplier()?)),
            false => Ok(None),
        }
    }

    /// Waits for the step and says whether an index was out of range.
    pub(super) fn look_at_checks(&self, memory: &Memory<'_>) -> Result<(), StepError> {
        let stream = self.gpu.stream();
        if self.contract.checks.is_empty() {
            // Nobody writes the mark, not even a zero.
            stream.synchronize()?;
            return self.check_ranks();
        }
        let mut mark = [0; 4];
        stream.read(memory.stopped, 0, &mut mark)?;
        self.check_ranks()?;
        let mark = u32::from_ne_bytes(mark);
        let Some(number) = mark.checked_sub(1) else {
            return Ok(());
        };
        let check = &self.contract.checks[number as usize];
        let guard = |kind: &CallKind| match kind {
            CallKind::Guard {
                check, least, most, ..
            } if *check == number => Some([*least, *most]),
            _ => None,
        };
        let places = self.code.calls.iter().find_map(|call| guard(&call.kind));
        let mut extremes = [0; 2];
        for (extreme, address) in extremes.iter_mut().zip(places.into_iter().flatten()) {
            let (storage, at) = memory.place(address);
            let mut bytes = [0; 8];
            let size = bytes.len().min(storage.bytes() - at);
            stream.read(storage, at, &mut bytes[..size])?;
            *extreme = check.number(bytes);
        }
        match check.error(extremes[0], extremes[1]) {
            Some(error) => Err(StepError::Index(Box::new(error))),
            None => Ok(()),
        }
    }

    fn check(
        &self,
        inputs: &[Arc<Storage>],
        outputs: &[Arc<Storage>],
        scalars: &[u64],
    ) -> Result<(), StepError> {
        self.expect("tensors", self.code.inputs.len(), inputs.len())?;
        self.expect("outputs", self.own_outputs(), outputs.len())?;
        self.expect("scalars", self.code.scalars, scalars.len())?;
        let inputs = inputs.iter().zip(&self.code.inputs);
        for (storage, &bytes) in inputs.chain(outputs.iter().zip(&self.code.outputs)) {
            self.expect("bytes", bytes, storage.bytes())?;
        }
        Ok(())
    }

    /// How many outputs the caller sees: without those of the index checks.
    pub(super) fn own_outputs(&self) -> usize {
        self.code.outputs.len() - 2 * self.contract.checks.len()
    }

    /// An error if the step takes another number of `what`.
    pub(super) fn expect(&self, what: &'static str, expected: usize, given: usize) -> Result<(), StepError> {
        match expected == given {
            true => Ok(()),
            false => Err(StepError::Arguments {
                name: self.name.clone(),
                what,
                expected,
                given,
            }),
        }
    }
}
