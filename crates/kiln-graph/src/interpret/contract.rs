//! Sums of products: matrix products and convolutions.

use super::array::{Array, Data, Number, map_data, map_data2, strides, walk};
use crate::TensorType;
use crate::op::{ConvDims, DotDims};

/// The elements of `x` with its dimensions in the order given.
fn arranged(x: &Array, order: impl Iterator<Item = usize>) -> Data {
    let all = strides(&x.ty.shape);
    let (extents, steps): (Vec<usize>, Vec<isize>) = order.map(|axis| (x.ty.shape[axis], all[axis])).unzip();
    map_data!(x.data, values => walk(&extents, &steps, 0).map(|at| values[at]).collect())
}

pub(super) fn dot_general(a: &Array, b: &Array, dims: &DotDims, ty: &TensorType) -> Array {
    let free_a = DotDims::free(a.ty.shape.rank(), &dims.a_batch, &dims.a_contract);
    let free_b = DotDims::free(b.ty.shape.rank(), &dims.b_batch, &dims.b_contract);
    let extent = |x: &Array, axes: &[usize]| axes.iter().map(|&axis| x.ty.shape[axis]).product::<usize>();
    let depth = extent(a, &dims.a_contract);
    let (rows, columns) = (extent(a, &free_a), extent(b, &free_b));
    let order = |axes: [&[usize]; 3]| axes.concat().into_iter();
    let a = arranged(a, order([&dims.a_batch, &free_a, &dims.a_contract]));
    let b = arranged(b, order([&dims.b_batch, &dims.b_contract, &free_b]));
    let data = map_data2!(a, b, (a, b) => {
        let mut out = vec![Number::ZERO; ty.numel()];
        // A row of sums at a time: each adds its products in the order of the depth, and none waits for another.
        for (row, sums) in out.chunks_exact_mut(columns.max(1)).enumerate() {
            let b = &b[row / rows * depth * columns..][..depth * columns];
            for (&x, b) in a[row * depth..][..depth].iter().zip(b.chunks_exact(columns)) {
                for (sum, &y) in sums.iter_mut().zip(b) {
                    *sum = Number::add(*sum, x.mul(y));
                }
            }
        }
        out
    });
    Array::new(ty.clone(), data)
}

/// One product of a sliding window: which output it belongs to, which kernel element, which input. All three
/// are row-major positions within the spatial dimensions.
#[derive(Clone, Copy)]
pub(super) struct Tap {
    pub(super) out: usize,
    pub(super) kernel: usize,
    pub(super) input: usize,
}

/// How a window slides along one dimension.
pub(super) struct Slide {
    pub(super) out: usize,
    pub(super) kernel: usize,
    pub(super) input: usize,
    pub(super) stride: usize,
    pub(super) dilation: usize,
    pub(super) pad_low: usize,
}

/// All taps that fall inside the input, output by output; those of one output in row-major order of the
/// kernel.
pub(super) fn taps(slides: &[Slide]) -> Vec<Tap> {
    let mut taps = vec![Tap {
        out: 0,
        kernel: 0,
        input: 0,
    }];
    for slide in slides {
        let mut line = Vec::new();
        for out in 0..slide.out {
            for kernel in 0..slide.kernel {
                let padded = out * slide.stride + kernel * slide.dilation;
                if let Some(input) = padded
                    .checked_sub(slide.pad_low)
                    .filter(|&input| input < slide.input)
                {
                    line.push(Tap { out, kernel, input });
                }
            }
        }
        taps = taps
            .iter()
            .flat_map(|outer| {
                line.iter().map(|inner| Tap {
                    out: outer.out * slide.out + inner.out,
                    kernel: outer.kernel * slide.kernel + inner.kernel,
                    input: outer.input * slide.input + inner.input,
                })
            })
            .collect();
    }
    taps
}

/// A convolution's extents, and the walk that its forward pass and both gradients share.
struct Convolution {
    batch: usize,
    groups: usize,
    /// Output and input channels of one group.
    out_channels: usize,
    in_channels: usize,
    /// Spatial elements of output, kernel and input.
    out: usize,
    kernel: usize,
    input: usize,
    taps: Vec<Tap>,
}

impl Convolution {
    fn new(conv: &ConvDims, x: &[usize], w: &[usize], y: &[usize]) -> Self {
        let slides: Vec<Slide> = (0..conv.stride.len())
            .map(|axis| Slide {
                out: y[axis + 2],
                kernel: w[axis + 2],
                input: x[axis + 2],
                stride: conv.stride[axis],
                dilation: conv.dilation[axis],
                pad_low: conv.pad_low[axis],
            })
            .collect();
        Self {
            batch: x[0],
            groups: conv.groups,
            out_channels: w[0] / conv.groups,
            in_channels: w[1],
            out: y[2..].iter().product(),
            kernel: w[2..].iter().product(),
            input: x[2..].iter().product(),
            taps: taps(&slides),
        }
    }

    /// Calls `product(y, w, x)` with the positions in output, weight and input of every product of the
    /// forward pass.
    fn for_each(&self, mut product: impl FnMut(usize, usize, usize)) {
        for n in 0..self.batch {
            for o in 0..self.groups * self.out_channels {
                let group = o / self.out_channels;
                for c in 0..self.in_channels {
                    let channel = group * self.in_channels + c;
                    let y = (n * self.groups * self.out_channels + o) * self.out;
                    let w = (o * self.in_channels + c) * self.kernel;
                    let x = (n * self.groups * self.in_channels + channel) * self.input;
                    for tap in &self.taps {
                        product(y + tap.out, w + tap.kernel, x + tap.input);
                    }
                }
            }
        }
    }
}

pub(super) fn conv(x: &Array, w: &Array, conv: &ConvDims, ty: &TensorType) -> Array {
    let shape = Convolution::new(conv, &x.ty.shape, &w.ty.shape, &ty.shape);
    let data = map_data2!(x.data, w.data, (x, w) => {
        let mut out = vec![Number::ZERO; ty.numel()];
        shape.for_each(|y, k, i| out[y] = Number::add(out[y], x[i].mul(w[k])));
        out
    });
    Array::new(ty.clone(), data)
}

pub(super) fn conv_input_grad(dy: &Array, w: &Array, conv: &ConvDims, ty: &TensorType) -> Array {
    let shape = Convolution::new(conv, &ty.shape, &w.ty.shape, &dy.ty.shape);
    let data = map_data2!(dy.data, w.data, (dy, w) => {
        let mut out = vec![Number::ZERO; ty.numel()];
        shape.for_each(|y, k, i| out[i] = Number::add(out[i], dy[y].mul(w[k])));
        out
    });
    Array::new(ty.clone(), data)
}

pub(super) fn conv_weight_grad(x: &Array, dy: &Array, conv: &ConvDims, ty: &TensorType) -> Array {
    let shape = Convolution::new(conv, &x.ty.shape, &ty.shape, &dy.ty.shape);
    let data = map_data2!(x.data, dy.data, (x, dy) => {
        let mut out = vec![Number::ZERO; ty.numel()];
        shape.for_each(|y, k, i| out[k] = Number::add(out[k], x[i].mul(dy[y])));
        out
    });
    Array::new(ty.clone(), data)
}
