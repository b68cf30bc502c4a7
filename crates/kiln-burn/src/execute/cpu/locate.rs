//! The first kernel whose result is not the reference's.
//!
//! The compiler's passes are repeated (they are a function of graph and options) to know which value every
//! buffer holds. The reference computes all these values from the transformed graph; the step runs once
//! more, and after each kernel its memory is compared with them. If all values agree, the fault lies before
//! scheduling: the transforms changed the meaning of the graph.

use kiln_compiler::compile;
use kiln_compiler::plan::Place;
use kiln_compiler::schedule::Buffer;
use kiln_cpu::{CpuStep, StepMemory};
use kiln_graph::op::Dims;
use kiln_graph::{HostTensor, TensorType, Value};
use rustc_hash::FxHashMap;

use super::Cpu;
use crate::execute::ExecuteError;
use crate::execute::check::{Parting, Reference};
use crate::execute::memory::Memory;

/// The first kernel of `cpu` that does not give what the reference gives.
pub fn first_kernel(cpu: &Cpu, reference: &Reference<'_>) -> Result<Option<Parting>, ExecuteError> {
    let (options, target) = &cpu.compiler;
    let compiled = compile(&cpu.graph, options, target)?;
    let buffers = complete_after(&compiled);
    let mut values: Vec<Value> = buffers.iter().flatten().map(|&(_, value)| value).collect();
    values.sort_unstable();
    values.dedup();
    let mut graph = compiled.graph.clone();
    graph.outputs.clear();
    values.iter().for_each(|&value| graph.output(value, None));
    let expected = reference.values(graph)?;
    let numbers: FxHashMap<Value, usize> = values.into_iter().zip(0..).collect();
    let mut parting = None;
    let mut observe = |kernel: usize, memory: &StepMemory<'_>| {
        if parting.is_some() {
            return;
        }
        for &(buffer, value) in &buffers[kernel] {
            let Some(found) = read(&compiled, memory, buffer, value) else {
                continue;
            };
            if let Some(difference) = expected.difference(numbers[&value], &found) {
                let at = Parting::at(&compiled.graph, compiled.graph.def(value), difference);
                parting = Some(Parting {
                    kernel: Some(format!("{kernel} ({})", compiled.kernels[kernel].name)),
                    ..at
                });
                return;
            }
        }
    };
    let mut memory = Memory::once(reference.inputs.to_vec(), cpu.outputs.len());
    cpu.call(&mut memory, reference.scalars, Some(&mut observe))?;
    if parting.is_some() {
        return Ok(parting);
    }
    reference.first_node(&cpu.graph, crate::options::CompileBackend::AotEager)
}

/// For each kernel, the buffers that are complete after it, with the values they hold.
fn complete_after(compiled: &CpuStep) -> Vec<Vec<(Buffer, Value)>> {
    let mut last: FxHashMap<Buffer, usize> = FxHashMap::default();
    for (number, kernel) in compiled.schedule.kernels.iter().enumerate() {
        last.extend(kernel.writes.iter().map(|&buffer| (buffer, number)));
    }
    let mut buffers = vec![Vec::new(); compiled.schedule.kernels.len()];
    for (buffer, kernel) in last {
        let value = match buffer {
            Buffer::Value(value) => value,
            Buffer::Output(output) => compiled.graph.outputs[output as usize].value,
        };
        buffers[kernel].push((buffer, value));
    }
    buffers
        .iter_mut()
        .for_each(|list| list.sort_unstable_by_key(|&(buffer, _)| buffer));
    buffers
}

/// The row-major elements of a buffer; none if it has none.
fn read(compiled: &CpuStep, memory: &StepMemory<'_>, buffer: Buffer, value: Value) -> Option<HostTensor> {
    let ty = compiled.graph.ty(value);
    let bytes = match compiled.plan.places.get(&buffer)? {
        Place::Arena(offset) => memory.arena(*offset, ty.bytes()),
        Place::Output(index) => memory.output(*index as usize, ty.bytes()),
        Place::Input(_) => return None,
    };
    match compiled.schedule.layouts.get(&value) {
        None => HostTensor::from_bytes(ty.clone(), bytes),
        Some(order) => HostTensor::from_bytes(ty.clone(), row_major(ty, order, bytes)),
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
    let mut index = vec![0; rank];
    for _ in 0..ty.numel() {
        let at: usize = index.iter().zip(&strides).map(|(i, stride)| i * stride).sum();
        out.extend_from_slice(&bytes[at * size..(at + 1) * size]);
        for axis in (0..rank).rev() {
            index[axis] += 1;
            if index[axis] < ty.shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use kiln_graph::DType;

    use super::*;

    #[test]
    fn permuted_elements_are_put_in_order() {
        let ty = TensorType::new(DType::U8, [2, 3]);
        // Stored column by column.
        let stored = [0, 3, 1, 4, 2, 5];
        assert_eq!(
            row_major(&ty, &Dims::from_slice(&[1, 0]), &stored),
            [0, 1, 2, 3, 4, 5]
        );
    }
}
