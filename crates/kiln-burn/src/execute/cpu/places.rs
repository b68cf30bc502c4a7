//! The places of a step's arguments and outputs in memory, from run to run.
//!
//! Some pointers are found only once. An output that the step computes in place of an argument, and that is
//! that argument's next value, stays in its place as long as the step runs again; so does an argument that
//! never changes. An output that is an argument's next value but is not computed in its place has two
//! buffers, which change roles after each run. All other tensors *move*: their buffer is another one at
//! each run.

use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use kiln_cpu::ALIGNMENT;

use crate::execute::convert;
use crate::execute::memory::Memory;
use crate::storage::Storage;

/// Pointers of arguments and outputs, and which of them have to be found at each run.
pub struct Places {
    pub(super) inputs: Vec<*const u8>,
    pub(super) outputs: Vec<*mut u8>,
    /// Arguments whose buffer is another one at each run.
    pub(super) moving: Vec<usize>,
    /// Outputs whose buffer is another one at each run.
    pub(super) made: Vec<usize>,
    swaps: Vec<Swap>,
    held: Vec<bool>,
}

/// An output that becomes an argument whose buffer it could not take over.
struct Swap {
    output: usize,
    argument: usize,
    /// The buffer that the output is written to.
    spare: Storage,
}

// SAFETY: the pointers lead into tensors of the `Memory` that the places belong to, which may go to another
// thread with all it owns; only a run reads or writes through them, and a run has the memory to itself.
unsafe impl Send for Places {}
// SAFETY: as above: shared places can only be looked at.
unsafe impl Sync for Places {}

impl Places {
    /// Finds the tensors of `memory` that stay in place. `aliases` has for each output the argument whose
    /// buffer it takes over, `successors` the same the other way round.
    pub(super) fn find(memory: &mut Memory, aliases: &[Option<u32>], successors: &[Option<u32>]) -> Self {
        let mut places = Self {
            inputs: vec![std::ptr::null(); successors.len()],
            outputs: vec![std::ptr::null_mut(); aliases.len()],
            moving: Vec::new(),
            made: Vec::new(),
            swaps: Vec::new(),
            held: vec![false; successors.len()],
        };
        for (output, alias) in aliases.iter().enumerate() {
            let alias = alias.map(|argument| argument as usize);
            let free = |argument: usize| alias.is_none() && successors[argument].is_none();
            let stays = memory.becomes[output].filter(|&argument| alias == Some(argument) || free(argument));
            let Some((argument, tensor)) =
                stays.and_then(|argument| Some((argument, memory.tensors[argument].take()?)))
            else {
                places.made.push(output);
                continue;
            };
            let (tensor, place) = own(tensor);
            places.inputs[argument] = place.cast_const();
            places.outputs[output] = place;
            if alias.is_none() {
                let (spare, place) = own(Storage::zeros(tensor.shape().clone(), tensor.dtype()));
                places.outputs[output] = place;
                places.swaps.push(Swap {
                    output,
                    argument,
                    spare,
                });
            }
            memory.tensors[argument] = Some(tensor);
            places.held[argument] = true;
        }
        for (argument, successor) in successors.iter().enumerate() {
            if places.held[argument] {
                continue;
            }
            if memory.is_constant(argument)
                && successor.is_none()
                && let Some(tensor) = memory.tensors[argument].take()
            {
                let tensor = tensor.kernel_ready();
                places.inputs[argument] = tensor.buffer().0;
                places.held[argument] = true;
                memory.tensors[argument] = Some(tensor);
            } else {
                places.moving.push(argument);
            }
        }
        places
    }

    /// Makes the outputs that have two buffers the next values of their arguments.
    pub(super) fn swap(&mut self, memory: &mut Memory) {
        for swap in &mut self.swaps {
            if let Some(tensor) = &mut memory.tensors[swap.argument] {
                std::mem::swap(tensor, &mut swap.spare);
                let (input, output) = (&mut self.inputs[swap.argument], &mut self.outputs[swap.output]);
                let written = *output;
                *output = input.cast_mut();
                *input = written.cast_const();
            }
        }
    }

    /// Whether argument `index` stays in place, or between its two.
    pub fn holds(&self, index: usize) -> bool {
        self.held[index]
    }
}

/// `tensor` in a buffer that a kernel can write and that no other tensor shares, and the buffer's address.
fn own(tensor: Storage) -> (Storage, *mut u8) {
    let layout = Layout::contiguous(tensor.shape().clone());
    let dtype = tensor.dtype();
    let mut bytes = into_bytes(tensor);
    let place = bytes.as_mut_ptr();
    (FlexTensor::new(bytes, layout, dtype).into(), place)
}

/// The buffer of a tensor that is row-major and aligned, and shares its buffer with no other.
pub(super) fn into_bytes(tensor: Storage) -> Bytes {
    let ready = convert::kernel_ready(tensor.into_host());
    if !ready.is_unique() {
        return copied(ready.bytes());
    }
    let mut bytes = ready.into_data().bytes;
    // Bytes that are copied when they are first written, as those of a file are, move then.
    match bytes.as_mut_ptr().addr().is_multiple_of(ALIGNMENT) {
        true => bytes,
        false => copied(&bytes),
    }
}

/// The same bytes in an aligned buffer.
fn copied(bytes: &[u8]) -> Bytes {
    let mut copy = convert::aligned(bytes.len());
    copy.copy_from_slice(bytes);
    copy
}
