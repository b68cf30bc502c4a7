//! Convolutions by plain loops, for what cuDNN computes on a device.

use kiln_graph::HostTensor;

use super::product::{dtype, widen};
use crate::convolutions::{Convolution, Task, Tensor};

/// Computes `convolution`. Operands and result begin with their first element.
pub(super) fn compute(
    convolution: &Convolution,
    operands: [&[u8]; 2],
    result: &mut [u8],
) -> Result<(), String> {
    let tensors = convolution.tensors();
    let memory = [operands[0], operands[1], &*result];
    for (tensor, bytes) in tensors.iter().zip(memory) {
        if tensor.bytes() > bytes.len() {
            return Err(format!(
                "{convolution}: {tensor} spans {} bytes, of which {} are there",
                tensor.bytes(),
                bytes.len()
            ));
        }
    }
    let [first, second, made] = tensors;
    let first_elements = widen(first.number, &operands[0][..first.bytes()]);
    let second_elements = widen(second.number, &operands[1][..second.bytes()]);
    let mut sums = vec![0.0; made.bytes() / made.number.bytes()];
    let mut add = |[x, w, y]: [usize; 3]| match convolution.task {
        Task::Forward => sums[y] += first_elements[x] * second_elements[w],
        Task::InputGradient => sums[x] += first_elements[y] * second_elements[w],
        Task::WeightGradient => sums[w] += first_elements[x] * second_elements[y],
    };
    each_pair(convolution, &mut add);
    // Elements between those of the tensor keep what was there.
    let size = made.number.bytes();
    let rounded = HostTensor::from_floats(dtype(made.number), [sums.len()], sums);
    let mut index = vec![0; made.extents.len()];
    loop {
        let at = position(made, &index) * size;
        result[at..at + size].copy_from_slice(&rounded.bytes()[at..at + size]);
        if !advance(&mut index, &made.extents) {
            return Ok(());
        }
    }
}

/// Elements in front of the one at `index`.
fn position(tensor: &Tensor, index: &[i64]) -> usize {
    let at: i64 = index
        .iter()
        .zip(&tensor.strides)
        .map(|(index, stride)| index * stride)
        .sum();
    at as usize
}

/// The next index; whether there is one.
fn advance(index: &mut [i64], extents: &[i64]) -> bool {
    for (index, &extent) in index.iter_mut().zip(extents).rev() {
        *index += 1;
        if *index < extent {
            return true;
        }
        *index = 0;
    }
    false
}

/// Each triple of elements of `x`, `w` and `y` that belong together, as positions in memory.
fn each_pair(convolution: &Convolution, add: &mut impl FnMut([usize; 3])) {
    let Convolution { x, w, y, .. } = convolution;
    let (per_group, out_of_group) = (w.extents[1], w.extents[0] / convolution.groups());
    let window = &w.extents[2..];
    let mut out = vec![0; y.extents.len()];
    loop {
        // Channel zero of the group, at the pixel.
        let channel = out[1] / out_of_group * per_group;
        let (first, written) = (out[0] * x.strides[0] + channel * x.strides[1], position(y, &out));
        let mut tap = vec![0; window.len()];
        loop {
            let (mut read, mut weight, mut inside) = (first, out[1] * w.strides[0], true);
            for (axis, &tap) in tap.iter().enumerate() {
                let place = out[2 + axis] * convolution.stride[axis] + tap * convolution.dilation[axis]
                    - convolution.low[axis];
                inside &= (0..x.extents[2 + axis]).contains(&place);
                read += place * x.strides[2 + axis];
                weight += tap * w.strides[2 + axis];
            }
            let channels = if inside { per_group } else { 0 };
            for channel in 0..channels {
                let at = [read + channel * x.strides[1], weight + channel * w.strides[1]];
                add([at[0] as usize, at[1] as usize, written]);
            }
            if !advance(&mut tap, window) {
                break;
            }
        }
        if !advance(&mut out, &y.extents) {
            return;
        }
    }
}
