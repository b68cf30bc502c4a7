//! Running compiled graphs on host tensors, for tests.

use kiln_compiler::{CompileError, CpuExecutable, Options};
use kiln_cpu::{AlignedBuffer, BuildOptions, Cache, NoHooks, OptLevel, ThreadPool, Toolchain};
use kiln_graph::{Graph, HostTensor, Scalar};

/// Builds `graph` without a cache.
pub fn build(graph: &Graph, change: impl FnOnce(&mut Options)) -> Result<CpuExecutable, CompileError> {
    let toolchain = Toolchain::detect()?;
    let mut options = Options::new(&toolchain, 3);
    change(&mut options);
    let build = BuildOptions {
        level: OptLevel::Quick,
        ..BuildOptions::default()
    };
    CpuExecutable::new(graph, &options, &toolchain, &Cache::disabled(), &build)
}

/// Runs a step on `threads` threads. Outputs that take over an argument's memory get a copy of it.
pub fn run(
    step: &CpuExecutable,
    graph: &Graph,
    inputs: &[HostTensor],
    scalars: &[Scalar],
    threads: usize,
) -> Vec<HostTensor> {
    let pool = ThreadPool::new(threads);
    let mut memory: Vec<AlignedBuffer> = inputs
        .iter()
        .map(|tensor| {
            let mut buffer = AlignedBuffer::zeroed(tensor.bytes().len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(tensor.bytes());
            buffer
        })
        .collect();
    let mut results: Vec<AlignedBuffer> = graph
        .outputs
        .iter()
        .map(|output| {
            let mut buffer = AlignedBuffer::zeroed(graph.ty(output.value).bytes()).unwrap();
            // Whatever is not written shows.
            buffer.as_mut_slice().fill(0xa5);
            buffer
        })
        .collect();
    let input_pointers: Vec<*const u8> = memory.iter().map(|buffer| buffer.as_ptr()).collect();
    let output_pointers: Vec<*mut u8> = results
        .iter_mut()
        .zip(&step.contract().aliases)
        .map(|(buffer, alias)| match alias {
            Some(index) => memory[*index as usize].as_mut_ptr(),
            None => buffer.as_mut_ptr(),
        })
        .collect();
    let bits: Vec<u64> = graph
        .scalars()
        .iter()
        .zip(scalars)
        .map(|(&value, scalar)| scalar.to_bits(graph.dtype(value)))
        .collect();
    // SAFETY: one buffer of the declared size for each parameter and output.
    unsafe { step.run(&pool, &input_pointers, &output_pointers, &bits, &NoHooks) }.unwrap();
    graph
        .outputs
        .iter()
        .zip(&results)
        .zip(&step.contract().aliases)
        .map(|((output, buffer), alias)| {
            let bytes = match alias {
                Some(index) => memory[*index as usize].as_slice(),
                None => buffer.as_slice(),
            };
            HostTensor::from_bytes(graph.ty(output.value).clone(), bytes.to_vec()).unwrap()
        })
        .collect()
}
