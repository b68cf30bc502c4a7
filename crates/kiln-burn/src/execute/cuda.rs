//! `cuda`: the graph compiled to kernels for an NVIDIA GPU.
//!
//! kiln-compiler plans the step, and kiln-cuda writes, builds, caches and queues its kernels; this executor
//! turns tensors into memory of the GPU. Inputs that are on the host are copied to the GPU, outputs stay
//! there. An output that the step computes in place of an input takes over that input's memory if no other
//! tensor shares it.
//!
//! A step that is replayed finds the tensors that stay only once ([`Resident`]), and gives new tensors
//! to its graph, which copies small ones and reads large ones where they are.
//!
//! Indices that come from the host, or follow from what does, are checked before anything is queued, so that
//! a run need not wait for the GPU ([`indices`]). Others are checked by the step, and the run waits for the
//! result.

mod indices;
mod resident;

use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn_backend::{DType, Shape};
use kiln_compiler::{Contract, Keep, Options, log_step};
use kiln_cuda::execute::{CallTime, CudaExecutable, Gpu, Outside, StepError};
use kiln_cuda::family::{CudaMaker, Outcome};
use kiln_cuda::runtime::Storage as Memory;
use kiln_cuda::{CudaError, CudaTarget};
use kiln_graph::op::ExternOp;
use kiln_graph::{Graph, TensorType};
use kiln_partition::{OutputRole, Point, Split};
use kiln_profile::{KernelTime, StepDescription, StepRun};

use super::check::{Parting, Reference};
use super::cpu::{extern_operation, has_collectives};
use super::families::{Shared, UNMARKED, sharing_text};
use super::profile::{describe_contract, next_id};
use super::{
    Effort, Executable, ExecuteError, Setting, check_arguments, check_scalars, check_tensor, convert, memory,
};
use super::{autocast_text, kib};
use crate::gpu_tensor::GpuTensor;
use crate::import::external;
use crate::options::{CompileBackend, CompileOptions};
use crate::ranks;
use crate::storage::Storage;

use indices::Source;
use resident::Ready;
pub use resident::Resident;

/// The graph as kernels on a GPU.
pub struct Cuda {
    graph: Arc<Graph>,
    executable: CudaExecutable,
    externs: Vec<ExternOp>,
    id: u64,
    description: OnceLock<Arc<StepDescription>>,
    /// Shape, element type and bytes of each output.
    outputs: Vec<(Shape, DType, usize)>,
    /// How the graph was compiled, and for what.
    options: (Options, CudaTarget),
    /// What it took, as a member of a family; none if it belongs to none.
    outcome: Option<Outcome>,
    /// What became of the dimensions that the program marked.
    notes: Vec<String>,
    /// For each index check, where the indices come from.
    sources: Vec<Source>,
    /// Nanoseconds of the host in queuing the step, over all runs.
    code_time: AtomicU64,
}

fn compiler_options(options: &CompileOptions) -> Result<Options, ExecuteError> {
    Ok(Options {
        keep: options
            .memory_budget
            .map_or_else(Keep::default, |bytes| Keep::Within(bytes as u64)),
        autocast: super::autocast(options)?,
        buckets: options.buckets.unwrap_or_default(),
        ..Options::default()
    })
}

fn target(gpu: &Gpu, options: &CompileOptions) -> CudaTarget {
    CudaTarget {
        tf32: options.tf32,
        ..gpu.target()
    }
}

/// The effect of memory budgets on a step on this GPU: its plans from the fastest to the smallest.
///
/// # Errors
///
/// If there is no such GPU, or the graph cannot be scheduled.
pub fn memory_curve(gpu: usize, graph: &Graph, options: &CompileOptions) -> Result<Vec<Point>, ExecuteError> {
    let target = target(&*Gpu::get(gpu)?, options);
    Ok(kiln_compiler::memory_curve(
        graph,
        &compiler_options(options)?,
        &target,
    )?)
}

/// The joint graph of a function as one graph for each pass, within the memory budget of `options`: see
/// [`kiln_compiler::split()`].
///
/// # Errors
///
/// If there is no such GPU, the graph cannot be split, or nothing fits the budget.
pub fn split(
    gpu: usize,
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &CompileOptions,
) -> Result<Split, ExecuteError> {
    let target = target(&*Gpu::get(gpu)?, options);
    let options = compiler_options(options)?;
    Ok(kiln_compiler::split(graph, tangents, roles, &options, &target)?)
}

/// The step of `graph`, as a member of the region's families if there are such; none if only known kernels
/// may be used and some are not.
fn executable(
    graph: &Arc<Graph>,
    (compiler, target): (&Options, &CudaTarget),
    gpu: &Arc<Gpu>,
    setting: Setting<'_>,
) -> Result<Option<Shared<CudaExecutable>>, ExecuteError> {
    // Other ranks exchange buckets, which no other executor has.
    let only_known = setting.only_known && !has_collectives(graph);
    // What ranks do together has fixed sizes.
    let varies = setting.effort == Effort::Full && !has_collectives(graph);
    let Some(families) = setting.families.filter(|_| varies) else {
        if only_known {
            return Ok(None);
        }
        let compiler = Options {
            debug: setting.debug.map(Path::to_path_buf),
            ..compiler.clone()
        };
        let executable = CudaExecutable::new(graph, &compiler, target, gpu)?;
        return Ok(Some(Shared::alone(executable)));
    };
    let sizes = setting.sizes.unwrap_or(&UNMARKED);
    let fits = |maker: &CudaMaker<Arc<Gpu>>| Arc::ptr_eq(maker.backend(), gpu);
    let shared = if only_known {
        let Some(known) = families.cuda.known(graph, sizes, fits)? else {
            return Ok(None);
        };
        known
    } else {
        let maker = || CudaMaker::new(compiler, target, gpu.clone());
        families
            .cuda
            .compile(graph, (maker, fits), (setting.debug, sizes))?
    };
    let Shared { step, outcome, notes } = shared;
    log_step(&graph.name, compiler.keep, &step.contract);
    Ok(Some(Shared {
        step: CudaExecutable::from_shared(&graph.name, step, gpu)?,
        outcome,
        notes,
    }))
}

impl Cuda {
    /// Compiles `graph` for GPU `gpu`, or finds it in the disk cache. The result of each stage is written
    /// to `debug`, if that is given. A step of [`Effort::Quick`] is queued kernel by kernel at each run.
    ///
    /// # Errors
    ///
    /// If a library or the GPU is missing, an operation has no code, or the build fails; for a step of several ranks,
    /// if NCCL is missing or the ranks compile different steps.
    ///
    /// None if only known kernels may be used ([`Setting::only_known`]) and some are not.
    pub fn new(
        gpu: usize,
        graph: Arc<Graph>,
        options: &CompileOptions,
        setting: Setting<'_>,
    ) -> Result<Option<Self>, ExecuteError> {
        let gpu = Gpu::get(gpu)?;
        let mut compiler = Options {
            update_in_epilogue: false,
            ..compiler_options(options)?
        };
        let target = target(&gpu, options);
        let recorded = graph.clone();
        let graph = match ranks::connect(&gpu, &graph)? {
            Some(across) => Arc::new(across),
            None => graph,
        };
        let mut exchanges = None;
        if has_collectives(&graph) {
            let met = ranks::meet(&recorded, &graph, &compiler.identity())?;
            compiler.sums = Some(met.sums.clone());
            exchanges = Some(met);
        }
        let Some(Shared {
            step: executable,
            outcome,
            notes,
        }) = executable(&graph, (&compiler, &target), &gpu, setting)?
        else {
            return Ok(None);
        };
        if let Some(exchanges) = exchanges {
            exchanges.compiled(executable.contract())?;
        }
        let executable = match setting.effort {
            Effort::Full => executable,
            Effort::Quick => executable.without_graph(),
        };
        let externs = executable.contract().externs.iter().map(extern_operation);
        let externs = externs.collect::<Result<_, _>>().map_err(ExecuteError::Step)?;
        let output = |output: &kiln_graph::Output| {
            let ty = graph.ty(output.value);
            (
                convert::burn_shape(&ty.shape),
                convert::burn_dtype(ty.dtype),
                ty.bytes(),
            )
        };
        Ok(Some(Self {
            outcome,
            notes,
            outputs: graph.outputs.iter().map(output).collect(),
            sources: indices::sources(&graph),
            options: (compiler_options(options)?, target),
            graph,
            executable,
            externs,
            id: next_id(),
            description: OnceLock::new(),
            code_time: AtomicU64::new(0),
        }))
    }

    /// Checks the indices that are on the host. Returns whether some are left for the step to check.
    fn check_indices(&self, inputs: &[Storage]) -> Result<bool, ExecuteError> {
        let mut left = false;
        let host = |index: usize| match &inputs[index] {
            Storage::Host(tensor) => Some(tensor),
            Storage::Gpu(_) => None,
        };
        for (check, source) in self.executable.contract().checks.iter().zip(&self.sources) {
            left |= !source.look(&self.graph, check, host)?;
        }
        Ok(left)
    }

    /// Queues the step. The inputs leave their list, unless the step could not be queued.
    fn queue(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        self.try_queue(inputs, scalars)
            .map_err(|error| self.explained(error))
    }

    /// The error; one of missing memory gets an explanation.
    fn explained(&self, error: ExecuteError) -> ExecuteError {
        match error {
            ExecuteError::Cuda(StepError::Cuda(source @ CudaError::OutOfMemory { .. })) => {
                self.out_of_memory(source)
            }
            error => error,
        }
    }

    /// The error of a step for which the GPU has no memory: what the step takes, and what to do.
    fn out_of_memory(&self, source: CudaError) -> ExecuteError {
        let arguments = self.graph.parameters().iter();
        let aliases = &self.executable.contract().aliases;
        let outputs = self.outputs.iter().zip(aliases);
        let arena = self.executable.contract().arena_bytes;
        let (options, target) = &self.options;
        let smallest = kiln_compiler::memory_curve(&self.graph, options, target);
        let smallest = smallest
            .ok()
            .and_then(|curve| curve.iter().map(|point| point.peak).min());
        ExecuteError::GpuMemory {
            source: Box::new(source),
            arguments: arguments.map(|&value| self.graph.ty(value).bytes()).sum(),
            outputs: outputs
                .filter(|(_, alias)| alias.is_none())
                .map(|((.., bytes), _)| bytes)
                .sum(),
            arena,
            remedy: match smallest.filter(|&smallest| smallest < arena as u64) {
                Some(smallest) => format!("with a memory budget these would need {smallest} at least"),
                None => "no memory budget would need fewer: take a smaller batch".to_owned(),
            },
        }
    }

    /// As [`Cuda::queue`], without the explanation of missing memory.
    fn try_queue(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        check_arguments(&self.graph, inputs, scalars)?;
        let wait = self.check_indices(inputs)?;
        let gpu = self.executable.gpu();
        inputs.iter_mut().try_for_each(|input| move_to(gpu, input))?;
        let tensors: Vec<&GpuTensor> = inputs.iter().filter_map(on_gpu).collect();
        let aliases = &self.executable.contract().aliases;
        let in_place = |alias: &Option<u32>| {
            let input = alias.map(|input| input as usize);
            input.filter(|&input| tensors[input].is_unique())
        };
        let taken: Vec<Option<usize>> = aliases.iter().map(in_place).collect();
        let place = |(output, &(.., bytes)): (usize, &(Shape, DType, usize))| match taken[output] {
            Some(input) => Ok(tensors[input].storage().clone()),
            None => gpu.allocate(bytes),
        };
        let outputs = self.outputs.iter().enumerate().map(place);
        let outputs = outputs.collect::<Result<Vec<_>, CudaError>>()?;
        let memory: Vec<Arc<Memory>> = tensors.iter().map(|tensor| tensor.storage().clone()).collect();
        let start = Instant::now();
        match kiln_profile::is_active() {
            true => self.run_profiled(&memory, &outputs, scalars)?,
            false => self.executable.run(&memory, &outputs, scalars, self, wait)?,
        }
        self.code_time
            .fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        // An output in an input's memory is the input, with other elements.
        let mut given: Vec<Option<Storage>> = inputs.drain(..).map(Some).collect();
        let made = outputs.into_iter().zip(&self.outputs).zip(taken);
        let made = made.map(|((storage, (shape, dtype, _)), taken)| {
            match taken.and_then(|input| given[input].take()) {
                Some(tensor) => tensor.with_dtype(*dtype),
                None => GpuTensor::new(gpu, storage, shape.clone(), *dtype).into(),
            }
        });
        Ok(made.collect())
    }
}

impl Cuda {
    /// A run on the tensors that stay. The memory is as before after an error that is found before anything
    /// is overwritten.
    fn run_resident(
        &self,
        memory: &mut memory::Memory,
        scalars: &[u64],
    ) -> Result<Vec<Option<Storage>>, ExecuteError> {
        check_scalars(&self.graph, scalars)?;
        for index in std::mem::take(&mut memory.given) {
            if let Some(tensor) = &memory.tensors[index] {
                check_tensor(&self.graph, index, tensor)?;
            }
        }
        let mut resident = match memory.resident.take() {
            Some(resident) => resident,
            None => Resident::find(&self.executable, memory, (&self.graph, &self.sources))?,
        };
        let outputs = self.queue_resident(&mut resident, memory, scalars);
        memory.resident = Some(resident);
        outputs
    }

    fn queue_resident(
        &self,
        resident: &mut Resident,
        memory: &mut memory::Memory,
        scalars: &[u64],
    ) -> Result<Vec<Option<Storage>>, ExecuteError> {
        let gpu = self.executable.gpu();
        let host = |index: usize| match &memory.tensors[index] {
            Some(Storage::Host(tensor)) => Some(tensor),
            _ => None,
        };
        let mut wait = false;
        let checks = self.executable.contract().checks.iter().zip(&self.sources);
        for ((check, source), looked) in checks.zip(&resident.looked) {
            wait |= !*looked && !source.look(&self.graph, check, host)?;
        }
        let fresh = resident.fresh(gpu, memory)?;
        let given: Vec<_> = fresh.iter().map(Ready::given).collect();
        let start = Instant::now();
        let made = self
            .executable
            .run_settled(&mut resident.settled, &given, scalars, wait)?;
        self.code_time
            .fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if wait {
            // Constant indices that the step has checked stay in range.
            for (looked, source) in resident.looked.iter_mut().zip(&self.sources) {
                *looked |= source.is_constant(|index| memory.is_constant(index));
            }
        }
        resident.advance(memory);
        let mut outputs: Vec<Option<Storage>> = self.outputs.iter().map(|_| None).collect();
        for (&output, storage) in resident.settled.leaving().iter().zip(made) {
            let (shape, dtype, _) = &self.outputs[output];
            let tensor = GpuTensor::new(gpu, storage, shape.clone(), *dtype);
            outputs[output] = memory.accept(output, tensor.into());
        }
        Ok(outputs)
    }

    /// A run under a profile: call by call, with a time stamp of the GPU's clock between two calls.
    fn run_profiled(
        &self,
        inputs: &[Arc<Memory>],
        outputs: &[Arc<Memory>],
        scalars: &[u64],
    ) -> Result<(), ExecuteError> {
        let begin = kiln_profile::now();
        let times = self.executable.run_timed(inputs, outputs, scalars, self)?;
        let describe = || {
            let contract = self.executable.contract();
            Arc::new(describe_contract(
                CompileBackend::Cuda,
                &self.graph.name,
                self.id,
                contract,
            ))
        };
        // The host waits for the step to end; the GPU's clock is aligned so that the last call ended at
        // that moment.
        let end = kiln_profile::now();
        let nanoseconds = |milliseconds: f32| (f64::from(milliseconds) * 1e6) as u64;
        let whole = times.last().map_or(0, |last| nanoseconds(last.end));
        let at = |milliseconds: f32| end.saturating_sub(whole) + nanoseconds(milliseconds);
        kiln_profile::add_run(StepRun {
            step: self.description.get_or_init(describe).clone(),
            row: kiln_profile::row(),
            begin,
            end,
            kernels: kernel_times(&times, at),
        });
        Ok(())
    }
}

/// The time of each kernel, whose calls follow each other.
fn kernel_times(times: &[CallTime], at: impl Fn(f32) -> u64) -> Vec<KernelTime> {
    let mut kernels: Vec<KernelTime> = Vec::new();
    for time in times {
        let (begin, end) = (at(time.begin), at(time.end));
        match kernels.last_mut() {
            Some(last) if last.kernel == time.kernel => last.end = end,
            _ => kernels.push(KernelTime {
                kernel: time.kernel,
                thread: 0,
                begin,
                end,
            }),
        }
    }
    kernels
}

/// Brings the elements to `gpu`, from wherever they are.
fn move_to(gpu: &Arc<Gpu>, tensor: &mut Storage) -> Result<(), CudaError> {
    if let Storage::Gpu(own) = tensor
        && Arc::ptr_eq(own.gpu(), gpu)
    {
        return Ok(());
    }
    let host = tensor.clone().try_into_host()?;
    *tensor = GpuTensor::upload(gpu, host)?.into();
    Ok(())
}

fn on_gpu(tensor: &Storage) -> Option<&GpuTensor> {
    match tensor {
        Storage::Gpu(tensor) => Some(tensor),
        Storage::Host(_) => None,
    }
}

impl Executable for Cuda {
    fn run_given(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        self.queue(inputs, scalars)
    }

    fn run_on(
        &self,
        memory: &mut memory::Memory,
        scalars: &[u64],
    ) -> Result<Vec<Option<Storage>>, ExecuteError> {
        // A profile takes a time stamp between two kernels, which a graph of kernels does not allow.
        if self.executable.can_settle() && !kiln_profile::is_active() {
            let outputs = self.run_resident(memory, scalars);
            return outputs.map_err(|error| self.explained(error));
        }
        // Tensors that stay are copied once, not at each run.
        for index in 0..memory.tensors.len() {
            if memory.is_constant(index)
                && let Some(tensor) = &mut memory.tensors[index]
            {
                move_to(self.executable.gpu(), tensor)?;
            }
        }
        memory.run_by(|inputs| self.run_given(inputs, scalars))
    }

    fn locate(&self, reference: &Reference<'_>) -> Result<Option<Parting>, ExecuteError> {
        reference.first_node(&self.graph, CompileBackend::Cuda)
    }

    fn report(&self) -> String {
        let (contract, code) = (self.executable.contract(), self.executable.code());
        let source = if self.executable.from_cache {
            "from the disk cache"
        } else {
            "built"
        };
        let mut text = sharing_text(self.outcome.as_ref());
        let _ = write!(
            text,
            "{} kernels, {} launches of {} functions ({source}: compiler {:.0?}, NVRTC and cuBLASLt {:.0?}), arena {} KiB on {}",
            contract.kernels.len(),
            code.calls.len(),
            code.functions.len(),
            self.executable.compile_time,
            self.executable.build_time,
            kib(contract.arena_bytes as u64),
            self.executable.gpu().device().description().name,
        );
        if self.options.1.tf32 {
            text.push_str("\nproducts of f32 round their operands to 10 bits of fraction (TF32)");
        }
        if let Some(nodes) = self.executable.graph_nodes() {
            let _ = write!(text, "\none graph of {nodes} nodes");
        }
        text.extend(ranks::buckets_text(contract));
        for call in contract.externs.iter().filter(|call| call.collective.is_none()) {
            let _ = write!(text, "\noutside the compiled code, on the host: {}", call.name);
        }
        text.extend(autocast_text(self.executable.contract()));
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
}

impl Outside for Cuda {
    fn call(&self, index: u32, places: &[(Arc<Memory>, usize)]) -> Result<(), String> {
        let call = &self.executable.contract().externs[index as usize];
        let op = &self.externs[index as usize];
        let stream = self.executable.gpu().stream();
        let (operands, results) = places.split_at(call.inputs.len());
        let read = |(storage, at): &(Arc<Memory>, usize), (dtype, dims): &(String, Vec<usize>)| {
            let dtype = dtype
                .parse()
                .map_err(|error: kiln_graph::dtype::UnknownDType| error.to_string())?;
            let ty = TensorType::new(dtype, dims.clone());
            let mut bytes = convert::aligned(ty.bytes());
            stream
                .read(storage, *at, &mut bytes)
                .map_err(|error| error.to_string())?;
            let layout = burn_flex::Layout::contiguous(convert::burn_shape(&ty.shape));
            Ok(burn_flex::FlexTensor::new(
                bytes,
                layout,
                convert::burn_dtype(ty.dtype),
            ))
        };
        let operands = operands.iter().zip(&call.inputs);
        let operands = operands.map(|(place, ty)| read(place, ty));
        let operands = operands.collect::<Result<_, String>>()?;
        let made = external::run(op, operands).map_err(|error| error.to_string())?;
        for (position, ((made, ty), (storage, at))) in
            made.into_iter().zip(&op.outputs).zip(results).enumerate()
        {
            let made = convert::contiguous(made);
            if made.bytes().len() != ty.bytes() {
                return Err(format!(
                    "{}: result {position} has {} bytes, expected {ty}",
                    op.name,
                    made.bytes().len()
                ));
            }
            stream
                .write(made.bytes(), storage, *at)
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}
