//! Where compiled code finds its arguments and leaves its outputs.
//!
//! An output that the step computes in place of an argument, and that is that argument's next value, stays where it is for as long as the step
//! runs again: its pointer is found once. So is that of an argument that never changes. Everything else *moves*: its buffer is another one at
//! each run.

use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;

use crate::execute::convert;
use crate::execute::memory::Memory;

/// Pointers of arguments and outputs, and which of them have to be found at each run.
pub struct Places {
    pub(super) inputs: Vec<*const u8>,
    pub(super) outputs: Vec<*mut u8>,
    /// Arguments whose buffer is another one at each run.
    pub(super) moving: Vec<usize>,
    /// Outputs whose buffer is another one at each run.
    pub(super) made: Vec<usize>,
    held: Vec<bool>,
}

// SAFETY: the pointers lead into tensors of the `Memory` that the places belong to, which may go to another thread with all it owns; nothing is read or written
// through them but by a run, which has the memory to itself.
unsafe impl Send for Places {}
// SAFETY: as above: shared places can only be looked at.
unsafe impl Sync for Places {}

impl Places {
    /// Finds the tensors of `memory` that stay in place. `aliases` has for each output the argument whose buffer it takes over, `successors` the same the other way round.
    pub(super) fn find(memory: &mut Memory, aliases: &[Option<u32>], successors: &[Option<u32>]) -> Self {
        let mut places = Self {
            inputs: vec![std::ptr::null(); successors.len()],
            outputs: vec![std::ptr::null_mut(); aliases.len()],
            moving: Vec::new(),
            made: Vec::new(),
            held: vec![false; successors.len()],
        };
        for (output, alias) in aliases.iter().enumerate() {
            let stays = memory.becomes[output].filter(|&argument| *alias == Some(argument as u32));
            let Some((argument, tensor)) =
                stays.and_then(|argument| Some((argument, memory.tensors[argument].take()?)))
            else {
                places.made.push(output);
                continue;
            };
            let (layout, dtype) = (
                Layout::contiguous(tensor.layout().shape().clone()),
                tensor.dtype(),
            );
            let mut bytes = into_bytes(tensor);
            let place = bytes.as_mut_ptr();
            memory.tensors[argument] = Some(FlexTensor::new(bytes, layout, dtype));
            places.outputs[output] = place;
            places.inputs[argument] = place.cast_const();
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
                let tensor = convert::kernel_ready(tensor);
                places.inputs[argument] = tensor.bytes().as_ptr();
                places.held[argument] = true;
                memory.tensors[argument] = Some(tensor);
            } else {
                places.moving.push(argument);
            }
        }
        places
    }

    /// Whether argument `index` stays in place.
    pub fn holds(&self, index: usize) -> bool {
        self.held[index]
    }
}

/// The buffer of a tensor that is row-major, aligned and nobody else's.
pub(super) fn into_bytes(tensor: FlexTensor) -> Bytes {
    let ready = convert::kernel_ready(tensor);
    if ready.is_unique() {
        return ready.into_data().bytes;
    }
    let mut copy = convert::aligned(ready.bytes().len());
    copy.copy_from_slice(ready.bytes());
    copy
}
