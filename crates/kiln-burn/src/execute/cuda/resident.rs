//! The places of a step's arguments and outputs on a GPU, from run to run.
//!
//! State and constants stay in the GPU's memory: they are found once, and a run does not look for them.
//! State that the step does not compute in its place has two buffers, which change roles after each run.
//! Tensors that are new at each run are given to the step wherever they are.

use std::sync::Arc;

use burn_flex::FlexTensor;
use kiln_compiler::{Check, Contract};
use kiln_cuda::execute::{CudaExecutable, Given, Gpu, Settled};
use kiln_graph::Graph;

use super::indices::Source;
use super::move_to;
use crate::execute::memory::Memory;
use crate::execute::{ExecuteError, convert};
use crate::gpu_tensor::GpuTensor;
use crate::storage::Storage;

/// The arguments of a step that stay.
pub struct Resident {
    pub(super) settled: Settled,
    held: Vec<bool>,
    /// For each argument with two buffers, the tensor whose memory the next run writes.
    spares: Vec<(usize, Storage)>,
    /// For each index check, whether its indices are constant and were checked.
    pub(super) looked: Vec<bool>,
}

impl Resident {
    /// Finds the tensors of `memory` that stay, brings them to the GPU, and copies state that other tensors
    /// share. `checked` has the graph and the source of each index check.
    pub(super) fn find(
        executable: &CudaExecutable,
        memory: &mut Memory,
        checked: (&Graph, &[Source]),
    ) -> Result<Self, ExecuteError> {
        let gpu = executable.gpu();
        let count = memory.tensors.len();
        let mut is_state = vec![false; count];
        let next_values = memory.becomes.iter().flatten();
        next_values.for_each(|&argument| is_state[argument] = true);
        let looked = look_at_constants(executable.contract(), memory, checked)?;
        let mut inputs = vec![None; count];
        for index in 0..count {
            if !is_state[index] && !memory.is_constant(index) {
                continue;
            }
            let tensor = memory.tensors[index]
                .as_mut()
                .ok_or(ExecuteError::Missing { index })?;
            move_to(gpu, tensor)?;
            if let Storage::Gpu(own) = tensor {
                if is_state[index] && !own.is_unique() {
                    *own = copy(gpu, own)?;
                }
                inputs[index] = Some(own.storage().clone());
            }
        }
        let held = inputs.iter().map(Option::is_some).collect();
        let settled = executable.settle(inputs, &memory.becomes)?;
        let spare = |&(argument, output): &(usize, usize)| {
            let (Some(Storage::Gpu(tensor)), Some(storage)) =
                (&memory.tensors[argument], settled.output(output))
            else {
                unreachable!("state with two buffers is on the GPU")
            };
            let (shape, dtype) = (tensor.shape().clone(), tensor.dtype());
            let spare = GpuTensor::new(gpu, storage.clone(), shape, dtype);
            (argument, Storage::Gpu(spare))
        };
        let spares = settled.pairs().iter().map(spare).collect();
        Ok(Self {
            settled,
            held,
            spares,
            looked,
        })
    }

    /// Whether argument `index` stays.
    pub fn holds(&self, index: usize) -> bool {
        self.held[index]
    }

    /// The elements of new arguments, in the form that the step takes.
    pub(super) fn fresh(&self, gpu: &Arc<Gpu>, memory: &Memory) -> Result<Vec<Ready>, ExecuteError> {
        let ready = |&index: &usize| match &memory.tensors[index] {
            None => Err(ExecuteError::Missing { index }),
            Some(Storage::Gpu(tensor)) if Arc::ptr_eq(tensor.gpu(), gpu) => Ok(Ready::Gpu(tensor.clone())),
            Some(tensor) => {
                let host = tensor.clone().try_into_host()?;
                Ok(Ready::Host(convert::contiguous(host)))
            }
        };
        self.settled.fresh().iter().map(ready).collect()
    }

    /// After a run: new arguments are used up, and buffers change roles.
    pub(super) fn advance(&mut self, memory: &mut Memory) {
        for &index in self.settled.fresh() {
            memory.tensors[index] = None;
        }
        for (argument, spare) in &mut self.spares {
            if let Some(tensor) = &mut memory.tensors[*argument] {
                std::mem::swap(tensor, spare);
            }
        }
    }
}

/// An argument that is new at each run.
pub(super) enum Ready {
    /// Row-major on the host.
    Host(FlexTensor),
    /// On the GPU of the step.
    Gpu(GpuTensor),
}

impl Ready {
    /// The argument in the form that the step takes.
    pub(super) fn given(&self) -> Given<'_> {
        match self {
            Self::Host(tensor) => Given::Host(tensor.bytes()),
            Self::Gpu(tensor) => Given::Device(tensor.storage()),
        }
    }
}

/// Checks the indices of constants that are on the host, before these go to the GPU. Returns for each check
/// whether it was made.
fn look_at_constants(
    contract: &Contract,
    memory: &Memory,
    (graph, sources): (&Graph, &[Source]),
) -> Result<Vec<bool>, ExecuteError> {
    let host = |index: usize| match &memory.tensors[index] {
        Some(Storage::Host(tensor)) if memory.is_constant(index) => Some(tensor),
        _ => None,
    };
    let look = |(check, source): (&Check, &Source)| match source {
        source if source.is_constant(|index| memory.is_constant(index)) => source.look(graph, check, host),
        _ => Ok(false),
    };
    contract.checks.iter().zip(sources).map(look).collect()
}

fn copy(gpu: &Arc<Gpu>, tensor: &GpuTensor) -> Result<GpuTensor, ExecuteError> {
    let storage = gpu.duplicate(tensor.storage())?;
    Ok(GpuTensor::new(
        gpu,
        storage,
        tensor.shape().clone(),
        tensor.dtype(),
    ))
}
