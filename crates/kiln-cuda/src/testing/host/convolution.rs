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
    let mut out = vec![0; y.extents.len()];
    loop {
        let mut tap = vec![0; w.extents.len() - 1];
        loop {
            // Channel of the group, then the window.
            let group = out[1] / out_of_group;
            let mut at = vec![out[0], group * per_group + tap[0]];
            let inside = (0..convolution.stride.len()).all(|axis| {
                let place = out[2 + axis] * convolution.stride[axis]
                    + tap[1 + axis] * convolution.dilation[axis]
                    - convolution.low[axis];
                at.push(place);
                (0..x.extents[2 + axis]).contains(&place)
            });
            if inside {
                let weight: Vec<i64> = std::iter::once(out[1]).chain(tap.iter().copied()).collect();
                add([position(x, &at), position(w, &weight), position(y, &out)]);
            }
            if !advance(&mut tap, &w.extents[1..]) {
                break;
            }
        }
        if !advance(&mut out, &y.extents) {
            return;
        }
    }
}
