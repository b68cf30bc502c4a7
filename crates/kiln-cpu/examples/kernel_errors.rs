//! How much each kernel of a compiled step rounds.
//!
//! ```sh
//! KILN_DEBUG=/tmp/kiln cargo run --release -p kiln-cli -- explain --model resnet18 --batch 8
//! cargo run --release -p kiln-cpu --example kernel_errors -- /tmp/kiln/train_step/step-0/0-recorded.kg
//! ```
//!
//! The step runs once on small random numbers. After each kernel, its results are compared with those that
//! the interpreter computes in f64 from the numbers that the kernel read: the error is the kernel's own,
//! without errors of its operands. For each result, in the order of the kernels, the program prints the
//! error's norm over the result's, in units of the rounding of the type (2^-24 for f32), and the
//! operations. In the environment, `KERNELS=60` stops after so many kernels (the interpreter takes minutes
//! for whole steps), `THREADS` as elsewhere.

use std::collections::BTreeMap;
use std::error::Error;

use kiln_compiler::plan::Place;
use kiln_compiler::schedule::Buffer;
use kiln_compiler::{Options, compile};
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuStep, CpuTarget, NoHooks, StepMemory, ThreadPool, Toolchain,
};
use kiln_graph::op::Dims;
use kiln_graph::{Graph, HostTensor, Op, Scalar, TensorType, Value, interpret_f64};
use kiln_partition::assign_phases;

#[allow(dead_code)] // what only measurements of time use
mod harness;

use harness::Memory;

/// The values of a step: arguments from the start, results as kernels write them.
struct Watch<'a> {
    compiled: &'a CpuStep,
    known: BTreeMap<Value, HostTensor>,
    kernels: usize,
}

impl Watch<'_> {
    /// Compares the results of `kernel` with the same results computed in f64.
    fn look(&mut self, kernel: usize, memory: &StepMemory<'_>) -> Result<(), Box<dyn Error>> {
        let graph = &self.compiled.graph;
        if kernel >= self.kernels {
            return Ok(());
        }
        let parts = &self.compiled.schedule.kernels[kernel];
        for &buffer in &parts.writes {
            let value = buffer.value(graph);
            let Some(found) = self.read(memory, buffer, value) else {
                continue;
            };
            if graph.dtype(value).is_float() {
                let expected = self.in_f64(value, &parts.reads)?;
                let (found, expected) = (found.to_f64s(), expected.to_f64s());
                let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
                let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
                let size = norm(&mut expected.iter().copied()).max(f64::MIN_POSITIVE);
                let unit = 2f64.powi(-24);
                let ops: Vec<&str> = parts
                    .nodes
                    .iter()
                    .map(|&node| graph.node(node).op.name())
                    .collect();
                println!(
                    "{kernel:4} {:>12} {:9.2} units  {} {}",
                    self.compiled.kernels[kernel].name,
                    error / size / unit,
                    graph.ty(value),
                    ops.join(" ").chars().take(70).collect::<String>()
                );
            }
            self.known.insert(value, found);
        }
        Ok(())
    }

    /// `value`, computed from the values that its kernel read.
    fn in_f64(&self, value: Value, reads: &[Buffer]) -> Result<HostTensor, Box<dyn Error>> {
        let whole = &self.compiled.graph;
        let read: Vec<Value> = reads.iter().map(|buffer| buffer.value(whole)).collect();
        let mut part = Graph::new("kernel");
        let mut map: BTreeMap<Value, Value> = BTreeMap::new();
        let mut arguments = Vec::new();
        let mut stack = vec![value];
        while let Some(&next) = stack.last() {
            if map.contains_key(&next) {
                stack.pop();
                continue;
            }
            let data = whole.def(next);
            if next != value && (read.contains(&next) || matches!(data.op, Op::Parameter { .. })) {
                let own = part.parameter(whole.ty(next).clone());
                arguments.push(
                    self.known
                        .get(&next)
                        .ok_or("a value was read before it was written")?
                        .clone(),
                );
                map.insert(next, own);
                stack.pop();
                continue;
            }
            let missing: Vec<Value> = data
                .inputs
                .iter()
                .copied()
                .filter(|v| !map.contains_key(v))
                .collect();
            if !missing.is_empty() {
                stack.extend(missing);
                continue;
            }
            let inputs: Vec<Value> = data.inputs.iter().map(|v| map[v]).collect();
            let outputs = match &data.op {
                Op::Scalar { dtype, .. } => vec![part.scalar(*dtype)],
                op => part
                    .add_node(op.clone(), &inputs, data.provenance.clone())?
                    .to_vec(),
            };
            map.extend(data.outputs.iter().copied().zip(outputs));
            stack.pop();
        }
        part.output(map[&value], None);
        let scalars = vec![Scalar::Float(0.5); part.scalars().len()];
        let mut results = interpret_f64(&part, &arguments, &scalars)?;
        Ok(results.remove(0))
    }

    /// The row-major elements of a buffer; none if it has none.
    fn read(&self, memory: &StepMemory<'_>, buffer: Buffer, value: Value) -> Option<HostTensor> {
        let ty = self.compiled.graph.ty(value);
        let bytes = match self.compiled.plan.places.get(&buffer)? {
            Place::Arena(offset) => memory.arena(*offset, ty.bytes()),
            Place::Output(index) => memory.output(*index as usize, ty.bytes()),
            Place::Input(_) => return None,
        };
        match self.compiled.schedule.layouts.get(&value) {
            None => HostTensor::from_bytes(ty.clone(), bytes),
            Some(order) => HostTensor::from_bytes(ty.clone(), row_major(ty, order, bytes)),
        }
    }
}

/// Elements that are stored with the dimensions in `order`, in row-major order.
fn row_major(ty: &TensorType, order: &Dims, bytes: &[u8]) -> Vec<u8> {
    let (rank, size) = (ty.shape.rank(), ty.dtype.size());
    let mut strides = vec![0; rank];
    let mut stride = 1;
    for &axis in order.iter().rev() {
        strides[axis] = stride;
        stride *= ty.shape[axis];
    }
    let mut out = Vec::with_capacity(bytes.len());
    for position in 0..ty.numel() {
        let mut rest = position;
        let mut at = 0;
        for axis in (0..rank).rev() {
            at += rest % ty.shape[axis] * strides[axis];
            rest /= ty.shape[axis];
        }
        out.extend_from_slice(&bytes[at * size..(at + 1) * size]);
    }
    out
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("give a file with a recorded graph")?;
    let mut graph = harness::read(&path)?;
    let toolchain = Toolchain::detect()?;
    let pool = ThreadPool::new(harness::threads());
    assign_phases(&mut graph);
    let (options, target) = (Options::default(), CpuTarget::new(&toolchain, pool.threads()));
    let compiled = compile(&graph, &options, &target)?;
    let step = CpuExecutable::new(
        &graph,
        &options,
        &target,
        &toolchain,
        &Cache::from_env(),
        &BuildOptions::default(),
    )?;
    let mut memory = Memory::new(&graph)?;
    let parameters = compiled.graph.parameters().iter().zip(&memory.arguments);
    let known = parameters
        .filter_map(|(&value, bytes)| {
            let tensor = HostTensor::from_bytes(compiled.graph.ty(value).clone(), bytes.as_slice().to_vec())?;
            Some((value, tensor))
        })
        .collect();
    let kernels = std::env::var("KERNELS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(usize::MAX);
    let mut watch = Watch {
        compiled: &compiled,
        known,
        kernels,
    };
    let mut failure = None;
    let mut observer = |kernel: usize, memory: &StepMemory<'_>| {
        if failure.is_none() {
            failure = watch.look(kernel, memory).err();
        }
    };
    memory.run_observed(&step, &pool, &NoHooks, Some(&mut observer))?;
    failure.map_or(Ok(()), Err)
}
