//! `cpu`: the graph compiled to one shared object.
//!
//! kiln-compiler plans the step, and kiln-cpu writes, builds, caches and calls its C; this executor turns
//! burn-flex's tensors into pointers and back. Inputs are read in place if their buffers are row-major, as
//! the outputs of compiled steps always are; others are copied. An output that the step computes in place of
//! an input takes over that input's buffer if no other tensor shares it, and a copy of it otherwise.

mod locate;
mod places;
mod process;

use std::ffi::c_void;
use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn_backend::DType;
use burn_flex::{FlexTensor, Layout};
use burn_std::{Bytes, Shape};
use kiln_compiler::buckets::Buckets;
use kiln_compiler::{Contract, ExternCall, Keep, Options};
use kiln_cpu::export::ExportedStep;
use kiln_cpu::family::{CpuMaker, Outcome};
use kiln_cpu::{
    BuildOptions, CpuExecutable, CpuTarget, KernelEvent, Observer, StepError, StepHooks, ThreadPool,
    Toolchain,
};
use kiln_distributed::StepTag;
use kiln_graph::op::ExternOp;
use kiln_graph::{Graph, TensorType};
use kiln_partition::{OutputRole, Point, Split};
use kiln_profile::StepDescription;

use super::check::{Parting, Reference};
use super::families::{Shared, UNMARKED, sharing_text};
use super::memory::Memory;
use super::profile::{RunClock, describe_contract, next_id};
use super::{Effort, Executable, ExecuteError, Setting, check_count, check_scalars, check_tensor, convert};
use super::{autocast_text, kib};
use crate::import::external;
use crate::options::{CompileBackend, CompileOptions};
use crate::ranks;
use crate::record::StepExportError;
use crate::storage::Storage;
pub use places::Places;
use places::into_bytes;
pub use process::toolchain;
use process::{CACHE, pool};

/// The graph as compiled code.
pub struct Cpu {
    graph: Arc<Graph>,
    executable: CpuExecutable,
    /// What it took, as a member of a family; none if it belongs to none.
    outcome: Option<Outcome>,
    /// What became of the dimensions that the program marked.
    notes: Vec<String>,
    pool: Arc<ThreadPool>,
    /// How the graph was compiled, and for what.
    compiler: (Options, CpuTarget),
    /// What other ranks know it by.
    tag: StepTag,
    externs: Vec<ExternOp>,
    id: u64,
    description: OnceLock<Arc<StepDescription>>,
    /// For each input, the output that takes over its buffer.
    successors: Vec<Option<u32>>,
    /// Layout, element type and bytes of each output.
    outputs: Vec<(Layout, DType, usize)>,
    /// Nanoseconds in compiled code, over all runs.
    code_time: AtomicU64,
}

/// The compiler's options and target for `options`.
fn compiler_options(
    options: &CompileOptions,
    toolchain: &Toolchain,
    threads: usize,
) -> Result<(Options, CpuTarget), ExecuteError> {
    let keep = options
        .memory_budget
        .map_or_else(Keep::default, |bytes| Keep::Within(bytes as u64));
    let compiler = Options {
        keep,
        autocast: super::autocast(options)?,
        ..Options::default()
    };
    Ok((compiler, CpuTarget::new(toolchain, threads)))
}

/// The effect of memory budgets on a step: its plans from the fastest to the smallest.
///
/// # Errors
///
/// If there is no C compiler, or the graph cannot be scheduled.
pub fn memory_curve(graph: &Graph, options: &CompileOptions) -> Result<Vec<Point>, ExecuteError> {
    let threads = pool(options.threads).threads();
    let (compiler, target) = compiler_options(options, toolchain()?, threads)?;
    Ok(kiln_compiler::memory_curve(graph, &compiler, &target)?)
}

/// The joint graph of a function as one graph for each pass, within the memory budget of `options`: see
/// [`kiln_compiler::split()`].
///
/// # Errors
///
/// If there is no C compiler, the graph cannot be split, or nothing fits the budget.
pub fn split(
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &CompileOptions,
) -> Result<Split, ExecuteError> {
    let (compiler, target) = compiler_options(options, toolchain()?, pool(options.threads).threads())?;
    Ok(kiln_compiler::split(graph, tangents, roles, &compiler, &target)?)
}

/// Compiles a step that is to run without Kiln and writes its folder.
///
/// # Errors
///
/// If there is no C compiler, the step cannot be compiled, or a file cannot be written.
pub fn export(
    step: &ExportedStep<'_>,
    options: &CompileOptions,
    folder: &Path,
) -> Result<(), StepExportError> {
    let toolchain = toolchain()?;
    let threads = pool(options.threads).threads();
    let (compiler, target) = compiler_options(options, toolchain, threads)?;
    let build = BuildOptions::default();
    kiln_cpu::export::write(folder, step, &compiler, &target, toolchain, &build)?;
    Ok(())
}

impl Cpu {
    /// Compiles `graph`, or finds it in the disk cache. The result of each stage is written to `debug`, if
    /// that is given.
    ///
    /// # Errors
    ///
    /// If there is no C compiler, an operation has no code, or the build fails.
    ///
    /// None if only known kernels may be used ([`Setting::only_known`]) and some are not.
    pub fn new(
        graph: Arc<Graph>,
        options: &CompileOptions,
        setting: Setting<'_>,
    ) -> Result<Option<Self>, ExecuteError> {
        let toolchain = toolchain()?;
        let pool = pool(options.threads);
        let (mut compiler, mut target) = compiler_options(options, toolchain, pool.threads())?;
        let averaged = ranks::as_collectives(&graph).map_err(ExecuteError::Mean)?;
        let recorded = graph.clone();
        let graph = averaged.map_or(graph, Arc::new);
        let mut exchanges = None;
        if has_collectives(&graph) {
            target.rates = ranks::shared_rates(target.rates)?;
            // What fits a memory budget depends on the buckets, and with it what is computed again.
            compiler.buckets = match (options.buckets, options.memory_budget) {
                (Some(asked), _) => asked,
                (None, None) => ranks::chosen_buckets()?,
                (None, Some(_)) => Buckets::default(),
            };
        }
        let mut compiler = Options {
            update_in_epilogue: setting.effort == Effort::Full,
            ..compiler
        };
        if has_collectives(&graph) {
            let met = ranks::meet(&recorded, &graph, &compiler.identity())?;
            compiler.sums = Some(met.sums.clone());
            exchanges = Some(met);
        }
        let varies = setting.effort == Effort::Full;
        // Other ranks exchange buckets, which no other executor has.
        let only_known = setting.only_known && exchanges.is_none();
        let sizes = setting.sizes.unwrap_or(&UNMARKED);
        let fits = |maker: &CpuMaker| maker.starts_sums_as(&compiler);
        let shared = match setting.families.filter(|_| varies) {
            Some(families) if only_known => match families.cpu.known(&graph, sizes, fits)? {
                Some(shared) => shared,
                None => return Ok(None),
            },
            None if only_known => return Ok(None),
            Some(families) => {
                let build = BuildOptions::default();
                let maker = || CpuMaker::new(&compiler, &target, toolchain, &CACHE, &build);
                families
                    .cpu
                    .compile(&graph, (maker, fits), (setting.debug, sizes))?
            }
            None => {
                let compiler = Options {
                    debug: setting.debug.map(Path::to_path_buf),
                    ..compiler.clone()
                };
                let build = BuildOptions::default();
                let executable = CpuExecutable::new(&graph, &compiler, &target, toolchain, &CACHE, &build)?;
                Shared::alone(executable)
            }
        };
        let Shared {
            step: executable,
            outcome,
            notes,
        } = shared;
        let tag = match exchanges {
            Some(exchanges) => exchanges.compiled(executable.contract())?,
            None => StepTag::default(),
        };
        let externs = executable
            .contract()
            .externs
            .iter()
            .map(extern_operation)
            .collect::<Result<_, _>>()?;
        let mut successors = vec![None; graph.parameters().len()];
        for (output, alias) in executable.contract().aliases.iter().enumerate() {
            if let Some(input) = alias {
                successors[*input as usize] = Some(output as u32);
            }
        }
        let output = |output: &kiln_graph::Output| {
            let ty = graph.ty(output.value);
            let layout = Layout::contiguous(convert::burn_shape(&ty.shape));
            (layout, convert::burn_dtype(ty.dtype), ty.bytes())
        };
        Ok(Some(Self {
            successors,
            outputs: graph.outputs.iter().map(output).collect(),
            graph,
            executable,
            outcome,
            notes,
            pool,
            compiler: (compiler, target),
            tag,
            externs,
            id: next_id(),
            description: OnceLock::new(),
            code_time: AtomicU64::new(0),
        }))
    }
}

/// Whether a graph works with other ranks.
pub(super) fn has_collectives(graph: &Graph) -> bool {
    let mut nodes = graph.nodes();
    nodes.any(|(_, data)| matches!(data.op, kiln_graph::Op::Collective(_)))
}

/// The operation behind a call out of the compiled code.
pub(super) fn extern_operation(call: &ExternCall) -> Result<ExternOp, StepError> {
    let outputs = call.outputs.iter().map(|(dtype, dims)| {
        let dtype =
            dtype
                .parse()
                .map_err(|error: kiln_graph::dtype::UnknownDType| StepError::Description {
                    name: call.name.clone(),
                    reason: error.to_string(),
                })?;
        Ok(TensorType::new(dtype, dims.clone()))
    });
    Ok(ExternOp {
        name: call.name.clone(),
        attributes: call.attributes.clone(),
        c_source: String::new(),
        outputs: outputs.collect::<Result<_, StepError>>()?,
    })
}

impl Cpu {
    /// Runs the step on `memory`. The result has none for each output that stays there. `observe` is shown
    /// the step's memory after each kernel.
    fn call(
        &self,
        memory: &mut Memory,
        scalars: &[u64],
        observe: Option<&mut Observer<'_>>,
    ) -> Result<Vec<Option<Storage>>, ExecuteError> {
        check_scalars(&self.graph, scalars)?;
        for index in std::mem::take(&mut memory.given) {
            if let Some(tensor) = &memory.tensors[index] {
                check_tensor(&self.graph, index, tensor)?;
            }
        }
        let aliases = &self.executable.contract().aliases;
        let mut places = match memory.places.take() {
            Some(places) => places,
            None => Places::find(memory, aliases, &self.successors),
        };
        let missing = |&&index: &&usize| memory.tensors[index].is_none();
        if let Some(&index) = places.moving.iter().find(missing) {
            return Err(ExecuteError::Missing { index });
        }

        let (mut made, taken) = self.take_over(memory, &places);
        for (&output, bytes) in places.made.iter().zip(&mut made) {
            places.outputs[output] = bytes.as_mut_ptr();
        }
        for &index in &places.moving {
            places.inputs[index] = match self.successors[index] {
                Some(output) => places.outputs[output as usize].cast_const(),
                None => {
                    let ready = memory.tensors[index].take().map(Storage::kernel_readable);
                    memory.tensors[index] = ready;
                    memory.tensors[index]
                        .as_ref()
                        .map_or(std::ptr::null(), |tensor| tensor.buffer().0)
                }
            };
        }
        let outside = Outside {
            step: self,
            clock: RunClock::start(),
            ranks: ranks::Calls::of(self.executable.contract(), self.tag),
        };
        let start = Instant::now();
        // SAFETY: number and types of the arguments were checked against the graph the step was compiled from
        // when they came into `memory`, so every pointer is valid for the size of its tensor; `kernel_readable`
        // puts those that are only read on a border of their elements, `into_bytes` and `aligned` the others on
        // one of 64 bytes. Output buffers are new or were taken over from the
        // argument that `aliases` pairs with them, and are exclusively ours; the others are kept alive, and
        // unchanged, by `memory` until after the call.
        let result = unsafe {
            self.executable.run_observed(
                &self.pool,
                &places.inputs,
                &places.outputs,
                scalars,
                &outside,
                observe,
            )
        };
        if let Err(error) = result {
            if let StepError::Index(_) = error {
                // Nothing was overwritten: each argument gets its buffer back, with its elements.
                give_back(memory, taken, made);
                memory.places = Some(places);
            }
            return Err(error.into());
        }
        self.code_time
            .fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if let Some(clock) = outside.clock {
            let contract = self.executable.contract();
            let describe = || {
                Arc::new(describe_contract(
                    CompileBackend::Cpu,
                    &self.graph.name,
                    self.id,
                    contract,
                ))
            };
            clock.finish(self.description.get_or_init(describe));
        }
        for &index in &places.moving {
            if !memory.is_constant(index) {
                memory.tensors[index] = None;
            }
        }
        places.swap(memory);
        let mut outputs = vec![None; self.outputs.len()];
        for (&output, bytes) in places.made.iter().zip(made) {
            let (layout, dtype, _) = &self.outputs[output];
            outputs[output] = memory.accept(output, FlexTensor::new(bytes, layout.clone(), *dtype).into());
        }
        memory.places = Some(places);
        Ok(outputs)
    }
}

/// A buffer that an argument gave to an output.
struct Taken {
    argument: usize,
    /// Position of the buffer among those of the outputs.
    position: usize,
    /// The argument's element type.
    dtype: DType,
    shape: Shape,
}

/// Gives arguments the buffers back that outputs took over.
fn give_back(memory: &mut Memory, taken: Vec<Taken>, made: Vec<Bytes>) {
    let mut made: Vec<Option<Bytes>> = made.into_iter().map(Some).collect();
    for it in taken {
        // An output took a copy of a constant's buffer; the constant has its own still.
        if memory.is_constant(it.argument) {
            continue;
        }
        let bytes = made[it.position].take();
        memory.tensors[it.argument] =
            bytes.map(|bytes| FlexTensor::new(bytes, Layout::contiguous(it.shape), it.dtype).into());
    }
}

impl Cpu {
    /// Buffers of the outputs that do not stay in place: taken over from an argument, or new.
    fn take_over(&self, memory: &mut Memory, places: &Places) -> (Vec<Bytes>, Vec<Taken>) {
        let aliases = &self.executable.contract().aliases;
        let mut taken: Vec<Taken> = Vec::new();
        let mut made: Vec<Bytes> = Vec::with_capacity(places.made.len());
        for (position, &output) in places.made.iter().enumerate() {
            let argument = aliases[output].map(|index| index as usize);
            let tensor = argument.and_then(|index| match memory.is_constant(index) {
                true => memory.tensors[index].clone(),
                false => memory.tensors[index].take(),
            });
            if let (Some(argument), Some(tensor)) = (argument, &tensor) {
                taken.push(Taken {
                    argument,
                    position,
                    dtype: tensor.dtype(),
                    shape: tensor.shape().clone(),
                });
            }
            made.push(tensor.map_or_else(|| convert::aligned(self.outputs[output].2), into_bytes));
        }
        (made, taken)
    }
}

impl Executable for Cpu {
    fn run_given(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        check_count(&self.graph, inputs.len())?;
        let mut memory = Memory::once(std::mem::take(inputs), self.outputs.len());
        match self.call(&mut memory, scalars, None) {
            Ok(outputs) => Ok(outputs.into_iter().flatten().collect()),
            Err(error) => {
                if let ExecuteError::Index(_) = error {
                    *inputs = memory.tensors.into_iter().flatten().collect();
                }
                Err(error)
            }
        }
    }

    fn run_on(&self, memory: &mut Memory, scalars: &[u64]) -> Result<Vec<Option<Storage>>, ExecuteError> {
        self.call(memory, scalars, None)
    }

    fn locate(&self, reference: &Reference<'_>) -> Result<Option<Parting>, ExecuteError> {
        locate::first_kernel(self, reference)
    }

    fn report(&self) -> String {
        let contract = self.executable.contract();
        let source = if self.executable.from_cache {
            "from the disk cache"
        } else {
            "built"
        };
        let mut text = sharing_text(self.outcome.as_ref())
            + &format!(
                "{} kernels ({source}: compiler {:.0?}, cc {:.0?}), arena {} KiB, {} threads",
                contract.kernels.len(),
                self.executable.compile_time,
                self.executable.build_time,
                kib(contract.arena_bytes as u64),
                self.pool.threads(),
            );
        if let Some(partition) = &contract.partition {
            let share = 100.0 * partition.saved_bytes as f64 / partition.everything_bytes.max(1) as f64;
            let _ = write!(
                text,
                "\nkeeps {} KiB for the backward pass, {share:.0} % of the {} KiB that it reads; computes the rest again in {:.2} ms by \
                 the cost model of two threads",
                kib(partition.saved_bytes),
                kib(partition.everything_bytes),
                partition.recompute_picoseconds as f64 * 1e-9
            );
            if let Some(chunks) = &partition.chunks {
                let _ = write!(text, "\n{chunks}");
            }
            if let Some(peak) = partition.peak_without_budget {
                let _ = write!(
                    text,
                    "\nwithout the memory budget the arena would have {} KiB",
                    kib(peak)
                );
            }
        }
        text.extend(ranks::buckets_text(contract));
        for call in contract.externs.iter().filter(|call| call.collective.is_none()) {
            let _ = write!(text, "\noutside the compiled code: {}", call.name);
        }
        text.extend(autocast_text(contract));
        text
    }

    fn arena_bytes(&self) -> Option<usize> {
        Some(self.executable.contract().arena_bytes)
    }

    fn code_time(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.code_time.load(Ordering::Relaxed)))
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn contract(&self) -> Option<&Contract> {
        Some(self.executable.contract())
    }

    fn stages(&self) -> &[(&'static str, Duration)] {
        &self.executable.stages
    }

    fn is_from_cache(&self) -> bool {
        self.executable.from_cache
    }

    fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    fn size_notes(&self) -> &[String] {
        &self.notes
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }
}

/// Runs operations outside the compiled code, and notes times for an open profile.
struct Outside<'a> {
    step: &'a Cpu,
    clock: Option<RunClock>,
    ranks: ranks::Calls,
}

impl StepHooks for Outside<'_> {
    fn wants_events(&self) -> bool {
        self.clock.is_some()
    }

    fn kernel_event(&self, kernel: usize, event: KernelEvent) {
        match (&self.clock, event) {
            (Some(clock), KernelEvent::Begin) => clock.begin(),
            (Some(clock), KernelEvent::End) => clock.end(kernel),
            (None, _) => {}
        }
    }

    fn piece_event(&self, kernel: usize, thread: usize, begin: u64, end: u64) {
        if let Some(clock) = &self.clock {
            clock.piece(kernel, thread, begin, end);
        }
    }

    fn over(&self) {
        self.ranks.finish();
    }

    fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> Result<(), String> {
        let call = &self.step.executable.contract().externs[index];
        if let Some(part) = call.collective {
            // SAFETY: the pointers are the step's for this call, and `over` is called before its memory is in other
            // use.
            return unsafe { self.ranks.run(part, call, buffers) };
        }
        let (call, op) = (
            &self.step.executable.contract().externs[index],
            &self.step.externs[index],
        );
        let read = |(position, (dtype, dims)): (usize, &(String, Vec<usize>))| {
            let ty = TensorType::new(
                dtype
                    .parse()
                    .map_err(|error: kiln_graph::dtype::UnknownDType| error.to_string())?,
                dims.clone(),
            );
            let mut bytes = convert::aligned(ty.bytes());
            // SAFETY: the step passes one pointer for each operand and result of this call, operands first,
            // each valid for its type.
            let source =
                unsafe { std::slice::from_raw_parts((*buffers.add(position)).cast::<u8>(), ty.bytes()) };
            bytes.copy_from_slice(source);
            let layout = Layout::contiguous(convert::burn_shape(&ty.shape));
            Ok(FlexTensor::new(bytes, layout, convert::burn_dtype(ty.dtype)))
        };
        let operands = call
            .inputs
            .iter()
            .enumerate()
            .map(read)
            .collect::<Result<_, String>>()?;
        let results = external::run(op, operands).map_err(|error| error.to_string())?;
        for (position, (result, ty)) in results.into_iter().zip(&op.outputs).enumerate() {
            let result = convert::contiguous(result);
            if result.bytes().len() != ty.bytes() {
                return Err(format!(
                    "{}: result {position} has {} bytes, expected {ty}",
                    op.name,
                    result.bytes().len()
                ));
            }
            // SAFETY: as above; results follow the operands, and nothing else refers to their memory during
            // the call.
            let target = unsafe {
                std::slice::from_raw_parts_mut(
                    (*buffers.add(call.inputs.len() + position)).cast::<u8>(),
                    ty.bytes(),
                )
            };
            target.copy_from_slice(result.bytes());
        }
        Ok(())
    }
}
