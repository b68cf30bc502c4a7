//! `cpu`: the graph compiled to one shared object.
//!
//! kiln-compiler writes the C and kiln-cpu builds, caches and calls it; here burn-flex's tensors become pointers and back. Inputs are read where they are if their buffers
//! are row-major on a 64-byte border, as the outputs of compiled steps always are; others are copied. An output that the step computes in place of an input takes over that
//! input's buffer if nobody else holds it, and a copy of it otherwise.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Write;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use kiln_compiler::{CompileError, CpuExecutable, ExternCall, Options};
use kiln_cpu::{BuildOptions, Cache, CpuError, StepHooks, ThreadPool, Toolchain};
use kiln_graph::op::ExternOp;
use kiln_graph::{Graph, TensorType};

use super::{Executable, ExecuteError, check_arguments, convert};
use crate::import::external;
use crate::options::CompileOptions;

/// The graph as compiled code.
pub struct Cpu {
    graph: Arc<Graph>,
    executable: CpuExecutable,
    pool: Arc<ThreadPool>,
    externs: Vec<ExternOp>,
}

/// The pool of each number of threads: steps of one program share it.
static POOLS: LazyLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);

fn pool(threads: usize) -> Arc<ThreadPool> {
    let threads = match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools
        .entry(threads)
        .or_insert_with(|| Arc::new(ThreadPool::new(threads)))
        .clone()
}

impl Cpu {
    /// Compiles `graph`, or finds it in the disk cache.
    ///
    /// # Errors
    ///
    /// If there is no C compiler, an operation has no code, or the build fails.
    pub fn new(graph: Arc<Graph>, options: &CompileOptions) -> Result<Self, ExecuteError> {
        static TOOLCHAIN: LazyLock<Result<Toolchain, Arc<CpuError>>> =
            LazyLock::new(|| Toolchain::detect().map_err(Arc::new));
        static CACHE: LazyLock<Cache> = LazyLock::new(Cache::from_env);
        let toolchain = TOOLCHAIN
            .as_ref()
            .map_err(|error| ExecuteError::NoCompiler(error.clone()))?;
        let pool = pool(options.threads);
        let compiler = Options::new(toolchain, pool.threads());
        let executable = CpuExecutable::new(&graph, &compiler, toolchain, &CACHE, &BuildOptions::default())?;
        let externs = executable
            .contract()
            .externs
            .iter()
            .map(extern_operation)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            graph,
            executable,
            pool,
            externs,
        })
    }
}

/// The operation behind a call out of the compiled code.
fn extern_operation(call: &ExternCall) -> Result<ExternOp, CompileError> {
    let outputs = call.outputs.iter().map(|(dtype, dims)| {
        let dtype =
            dtype.parse().map_err(
                |error: kiln_graph::dtype::UnknownDType| CompileError::Description {
                    name: call.name.clone(),
                    reason: error.to_string(),
                },
            )?;
        Ok(TensorType::new(dtype, dims.clone()))
    });
    Ok(ExternOp {
        name: call.name.clone(),
        attributes: call.attributes.clone(),
        outputs: outputs.collect::<Result<_, CompileError>>()?,
    })
}

/// The buffer of a tensor that is row-major, aligned and nobody else's.
fn into_bytes(tensor: FlexTensor) -> Bytes {
    let ready = convert::kernel_ready(tensor);
    if ready.is_unique() {
        return ready.into_data().bytes;
    }
    let mut copy = convert::aligned(ready.bytes().len());
    copy.copy_from_slice(ready.bytes());
    copy
}

impl Executable for Cpu {
    fn run(&self, inputs: Vec<FlexTensor>, scalars: &[u64]) -> Result<Vec<FlexTensor>, ExecuteError> {
        check_arguments(&self.graph, &inputs, scalars)?;
        let aliases = &self.executable.contract().aliases;
        let types: Vec<&TensorType> = self
            .graph
            .outputs
            .iter()
            .map(|output| self.graph.ty(output.value))
            .collect();

        // Inputs that an output takes over leave the list; the rest stay shared.
        let mut inputs: Vec<Option<FlexTensor>> = inputs.into_iter().map(Some).collect();
        let mut outputs: Vec<Bytes> = aliases
            .iter()
            .zip(&types)
            .map(|(alias, ty)| {
                let taken = alias.and_then(|index| inputs[index as usize].take());
                taken.map_or_else(|| convert::aligned(ty.bytes()), into_bytes)
            })
            .collect();
        let inputs: Vec<Option<FlexTensor>> = inputs
            .into_iter()
            .map(|input| input.map(convert::kernel_ready))
            .collect();

        let output_pointers: Vec<*mut u8> = outputs.iter_mut().map(|bytes| bytes.as_mut_ptr()).collect();
        let pointer = |(index, input): (usize, &Option<FlexTensor>)| match input {
            Some(tensor) => tensor.bytes().as_ptr(),
            None => {
                let output = aliases.iter().position(|&alias| alias == Some(index as u32));
                output.map_or(std::ptr::null(), |output| output_pointers[output].cast_const())
            }
        };
        let input_pointers: Vec<*const u8> = inputs.iter().enumerate().map(pointer).collect();
        // SAFETY: `check_arguments` compared number and types of the inputs with the graph the step was compiled from, so every pointer is valid for the size of its
        // tensor; `kernel_ready` and `aligned` put them on 64-byte borders. Output buffers are fresh or were taken over from an input that `aliases` pairs with
        // them, and are exclusively ours; the inputs are kept alive, and unchanged, by `inputs` until after the call.
        unsafe {
            self.executable.run(
                &self.pool,
                &input_pointers,
                &output_pointers,
                scalars,
                &Outside(self),
            )
        }?;
        drop(inputs);
        let tensor = |(bytes, ty): (Bytes, &&TensorType)| {
            FlexTensor::new(
                bytes,
                Layout::contiguous(convert::burn_shape(&ty.shape)),
                convert::burn_dtype(ty.dtype),
            )
        };
        Ok(outputs.into_iter().zip(&types).map(tensor).collect())
    }

    fn report(&self) -> String {
        let contract = self.executable.contract();
        let source = if self.executable.from_cache {
            "from the disk cache"
        } else {
            "built"
        };
        let mut text = format!(
            "{} kernels ({source}: compiler {:.0?}, cc {:.0?}), arena {} KiB, {} threads",
            contract.kernels.len(),
            self.executable.compile_time,
            self.executable.build_time,
            contract.arena_bytes >> 10,
            self.pool.threads(),
        );
        for call in &contract.externs {
            let _ = write!(text, "\noutside the compiled code: {}", call.name);
        }
        text
    }

    fn arena_bytes(&self) -> Option<usize> {
        Some(self.executable.contract().arena_bytes)
    }
}

/// Runs what stayed outside the compiled code.
struct Outside<'a>(&'a Cpu);

impl StepHooks for Outside<'_> {
    fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> Result<(), String> {
        let (call, op) = (
            &self.0.executable.contract().externs[index],
            &self.0.externs[index],
        );
        let read = |(position, (dtype, dims)): (usize, &(String, Vec<usize>))| {
            let ty = TensorType::new(
                dtype
                    .parse()
                    .map_err(|error: kiln_graph::dtype::UnknownDType| error.to_string())?,
                dims.clone(),
            );
            let mut bytes = convert::aligned(ty.bytes());
            // SAFETY: the step passes one pointer for each operand and result of this call, operands first, each valid for its type.
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
            // SAFETY: as above; results follow the operands, and nothing else refers to their memory during the call.
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
