//! Convolutions and their gradients as implicit matrix products over channels-last images.
//!
//! In a channels-last image, the elements that one output pixel needs from one kernel row are one run of
//! memory, and those of the next output pixel are the same run further on. A register tile whose rows are
//! neighbouring output pixels therefore reads the image in place with constant strides; no im2col matrix is
//! written. Only an image that needs padding, has another layout, or is computed on the fly is copied,
//! once, to a padded channels-last image.
//!
//! - [`forward`]: rows are output pixels, columns output channels, the depth runs over kernel and input
//!   channels.
//! - [`input_grad`]: the same with the roles of the images exchanged and the kernel reversed. With a
//!   stride, the input pixels fall into classes by their position within the stride. Each class is a
//!   convolution of its own with those kernel elements that reach it, so nothing is multiplied with
//!   inserted zeros.
//! - [`weight_grad`]: rows are output channels, columns kernel elements and input channels, the depth runs
//!   over all pixels.
//!
//! Groups wide enough for vectors are products of their own; narrow groups (depthwise, or a few channels a
//! group) have kernels of their own with a vector across groups.
//!
//! Few pixels with large weights are written out as a matrix ([`im2col`]).
//!
//! 3x3 convolutions of stride 1 with many channels take fewer multiplications in [`winograd`] form.
//!
//! One and two spatial dimensions are three with extents of one. Sums are accumulated in f32 (f64 for f64),
//! in an order that depends on the shape alone. Tensors of 16 bits are widened where f32 would be copied:
//! images while they are padded, weights before everything else ([`widened`]). Tiles and narrow groups
//! support f64; the kernels for special shapes support f32 only. Pairs of bf16 are multiplied where a
//! convolution or a gradient is a matrix product, and tiles of them on AMX: read in place where channels fill
//! tiles ([`moved`], [`moved_weight`]), or of windows that are written out ([`windows`], [`windows_weight`]).

mod blocks;
mod correlate;
mod depthwise;
mod im2col;
mod image;
mod moved;
mod moved_weight;
mod narrow_groups;
mod narrow_groups_weight;
mod parts;
mod phases;
mod planar;
mod walk;
mod weight_grad;
mod weights;
mod widened;
mod windows;
mod windows_weight;
mod winograd;

use super::element::Storage;
use super::frame::Frame;
use super::{KernelText, Param, Width, gemm};
use crate::isa::Isa;
use crate::policy::SERIAL_CONVOLUTION;

/// The spatial dimensions: depth, height, width.
pub type Spatial = [usize; 3];

/// Shape and attributes of a convolution. Gradients are described by their forward convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Images.
    pub images: usize,
    /// Channel groups; divides both channel counts.
    pub groups: usize,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Extents of the input.
    pub input: Spatial,
    /// Extents of the output.
    pub output: Spatial,
    /// Extents of the kernel.
    pub kernel: Spatial,
    /// Step of the window.
    pub stride: Spatial,
    /// Zeros before the first input element. Those after the last follow from `output`.
    pub pad: Spatial,
    /// Distance between kernel elements.
    pub dilation: Spatial,
}

impl Geometry {
    /// Kernel elements: the product of its extents.
    pub fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// How many windows a place of the input is in at most, along dimension `d`.
    pub(super) fn windows_of_a_place(&self, d: usize) -> usize {
        let windows = (self.kernel[d] - 1) * self.dilation[d] / self.stride[d] + 1;
        windows.min(self.kernel[d]).min(self.output[d])
    }

    /// Input channels of a group.
    pub fn group_in(&self) -> usize {
        self.in_channels / self.groups
    }

    /// Output channels of a group.
    pub fn group_out(&self) -> usize {
        self.out_channels / self.groups
    }

    /// Elements of the weight `[out, in / groups, kernel..]`.
    pub fn weight_len(&self) -> usize {
        self.out_channels * self.group_in() * self.taps()
    }

    /// Floating-point operations of the convolution, or of one of its gradients.
    fn flops(&self) -> usize {
        2 * self.images * self.weight_len() * self.output.iter().product::<usize>()
    }

    /// Whether it only mixes channels, so that it is a matrix product.
    fn is_product(&self) -> bool {
        self.taps() == 1
            && self.stride == [1; 3]
            && self.pad == [0; 3]
            && self.groups == 1
            && self.input == self.output
    }

    /// Whether one thread does it all.
    fn is_small(&self) -> bool {
        self.flops() < SERIAL_CONVOLUTION
    }

    /// Whether the groups are so narrow that a vector spans several whole ones.
    fn is_narrow(&self, lanes: usize) -> bool {
        let (cin, cout) = (self.group_in(), self.group_out());
        self.groups > 1 && cin == cout && cout < lanes && lanes.is_multiple_of(cout)
    }
}

/// The place of an element of an image. All but `width` are C expressions of type `int64_t`, safe to use as
/// factors.
#[derive(Debug, Clone, Copy)]
pub struct PixelPlace<'a> {
    /// One element, or a vector of them along the contiguous axis.
    pub width: Width,
    /// Image.
    pub image: &'a str,
    /// Depth, height and width.
    pub at: [&'a str; 3],
    /// Channel.
    pub channel: &'a str,
}

/// The axis of an image along which vectors can be loaded or stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImageAxis {
    /// Channels last.
    Channel,
    /// Channels first: the width.
    Width,
    /// Channels first with rows that follow each other without gaps: vectors may run over the end of a row.
    /// Such places are given as `[z, 0, y * width + x]`; their address is still a sum of strides.
    Plane,
}

/// A function from a place to the C expression of the element (`float`) or vector (`vf`) there.
pub type LoadImage<'a> = Box<dyn Fn(&PixelPlace<'_>) -> String + 'a>;

/// An image that a convolution reads.
pub struct Image<'a> {
    /// The axis along which `load` can give vectors, if any.
    pub contiguous: Option<ImageAxis>,
    /// How an element is obtained; only asked for places inside the image.
    pub load: LoadImage<'a>,
    /// Where it lies, unless it is computed.
    pub memory: Option<ImageMemory>,
    /// Whether a computed image takes any pixel by its number: as `x`, with the other coordinates `0`.
    numbered: bool,
}

/// An image in memory.
#[derive(Debug, Clone)]
pub struct ImageMemory {
    /// How elements are stored.
    pub storage: Storage,
    /// C expression of the pointer.
    pub pointer: String,
    /// Elements between neighbours: image, depth, height, width, channel.
    pub strides: [i64; 5],
}

impl<'a> Image<'a> {
    /// The f32 tensor at the C pointer `pointer`, with strides in elements: image, depth, height, width,
    /// channel.
    pub fn strided(pointer: &str, strides: [i64; 5]) -> Self {
        Self::stored(Storage::F32, pointer, strides)
    }

    /// As [`Image::strided`], for a tensor stored in another way.
    pub fn stored(storage: Storage, pointer: &str, strides: [i64; 5]) -> Self {
        let contiguous = match strides {
            [_, _, _, _, 1] => Some(ImageAxis::Channel),
            [_, _, _, 1, _] => Some(ImageAxis::Width),
            _ => None,
        };
        let base = pointer.to_owned();
        let load = move |place: &PixelPlace<'_>| storage.load(place.width, &address(&base, strides, place));
        Self {
            contiguous,
            load: Box::new(load),
            memory: Some(ImageMemory {
                storage,
                pointer: pointer.to_owned(),
                strides,
            }),
            numbered: false,
        }
    }

    /// An image that is computed while it is read, about once for each element.
    pub fn computed(contiguous: Option<ImageAxis>, load: impl Fn(&PixelPlace<'_>) -> String + 'a) -> Self {
        Self {
            contiguous,
            load: Box::new(load),
            memory: None,
            numbered: false,
        }
    }

    /// A computed image with vectors of channels, whose pixels are identified by their number among the
    /// pixels of all images.
    pub fn pixels(load: impl Fn(&PixelPlace<'_>) -> String + 'a) -> Self {
        Self {
            numbered: true,
            ..Self::computed(Some(ImageAxis::Channel), load)
        }
    }

    /// Pointer and strides if registers hold what its memory does, so that tiles may read it in place.
    fn plain(&self) -> Option<(&str, [i64; 5])> {
        let memory = self.memory.as_ref().filter(|memory| memory.storage.is_plain())?;
        Some((&memory.pointer, memory.strides))
    }
}

/// C expression of the address of an element of a strided image.
pub fn address(pointer: &str, strides: [i64; 5], place: &PixelPlace<'_>) -> String {
    let [z, y, x] = place.at;
    let terms = [place.image, z, y, x, place.channel];
    let mut sum = pointer.to_owned();
    for (term, stride) in terms.iter().zip(strides) {
        if *term != "0" {
            sum.push_str(&format!(" + {term} * {stride}"));
        }
    }
    sum
}

/// A function from a place and the C variable with the finished value (`float` or `vf`, `double` or `vd`
/// for f64) to the statements that consume it.
pub type ConsumePixel<'a> = Box<dyn Fn(&PixelPlace<'_>, &str) -> String + 'a>;

/// The consumer of each element of the resulting image.
pub struct PixelEpilogue<'a> {
    /// The axis along which `consume` can take vectors, if any: [`ImageAxis::Channel`] or
    /// [`ImageAxis::Plane`].
    pub contiguous: Option<ImageAxis>,
    /// Statements for each element or vector.
    pub consume: ConsumePixel<'a>,
    /// Strides, if the result is only stored.
    strides: Option<[i64; 5]>,
}

impl<'a> PixelEpilogue<'a> {
    /// Stores to the f32 tensor at the C pointer `pointer`, with strides as of [`Image::strided`].
    pub fn store(pointer: &str, strides: [i64; 5]) -> Self {
        Self::store_as(Storage::F32, pointer, strides)
    }

    /// As [`PixelEpilogue::store`], for a tensor stored in another way.
    pub fn store_as(storage: Storage, pointer: &str, strides: [i64; 5]) -> Self {
        let pointer = pointer.to_owned();
        let consume = move |place: &PixelPlace<'_>, value: &str| {
            storage.store(place.width, &address(&pointer, strides, place), value)
        };
        let contiguous = (strides[4] == 1).then_some(ImageAxis::Channel);
        Self {
            contiguous,
            consume: Box::new(consume),
            strides: Some(strides),
        }
    }

    /// The axis of vectors, for a result of these extents.
    fn axis(&self, [depth, height, width]: Spatial) -> Option<ImageAxis> {
        let plane = |[_, _, y, x, _]: [i64; 5]| x == 1 && (y == width as i64 || height == 1) && depth == 1;
        match self.strides {
            Some(strides) if plane(strides) && strides[4] != 1 => Some(ImageAxis::Plane),
            _ => self.contiguous.filter(|&axis| axis != ImageAxis::Width),
        }
    }

    /// Statements of the caller's own.
    pub fn custom(
        contiguous: Option<ImageAxis>,
        consume: impl Fn(&PixelPlace<'_>, &str) -> String + 'a,
    ) -> Self {
        Self {
            contiguous,
            consume: Box::new(consume),
            strides: None,
        }
    }
}

/// A convolution, or the gradient of one with respect to its input.
pub struct ConvSpec<'a> {
    /// C identifier of the kernel.
    pub name: String,
    /// What it computes, for the comment above it.
    pub comment: String,
    /// Shape of the forward convolution.
    pub geometry: Geometry,
    /// The forward input; for the gradient, the gradient of the output.
    pub image: Image<'a>,
    /// C expression (a pointer) of the weight `[out, in / groups, depth, height, width]`, contiguous.
    pub weight: String,
    /// How the weight is stored. Computed images have the type that such a weight has in registers.
    pub storage: Storage,
    /// The consumer of the forward output or, for the gradient, of the gradient of the input.
    pub epilogue: PixelEpilogue<'a>,
    /// Parameters that the snippets refer to.
    pub params: Vec<Param>,
    /// Most threads the kernel may meet; decides the size of the workspace, never the result.
    pub threads: usize,
}

impl ConvSpec<'_> {
    fn frame(&self) -> Frame<'_> {
        let (params, threads) = (&self.params, self.threads);
        Frame {
            name: &self.name,
            comment: &self.comment,
            params,
            threads,
        }
    }
}

/// A function from width, index into the flat weight (`int64_t`) and the C variable with the gradient to
/// statements.
pub type ConsumeWeight<'a> = Box<dyn Fn(Width, &str, &str) -> String + 'a>;

/// The gradient of a convolution with respect to its weight.
pub struct WeightGradSpec<'a> {
    /// C identifier of the kernel.
    pub name: String,
    /// What it computes, for the comment above it.
    pub comment: String,
    /// Shape of the forward convolution.
    pub geometry: Geometry,
    /// The forward input.
    pub input: Image<'a>,
    /// The gradient of the output.
    pub output_grad: Image<'a>,
    /// How the weight's gradient is stored. Computed images have the type that such a gradient has in
    /// registers.
    pub storage: Storage,
    /// The consumer of each element of the gradient, in the order of the weight in memory; vectors are of
    /// consecutive elements.
    pub consume: ConsumeWeight<'a>,
    /// Parameters that the snippets refer to.
    pub params: Vec<Param>,
    /// Most threads the kernel may meet; decides the size of the workspace, never the result.
    pub threads: usize,
}

impl WeightGradSpec<'_> {
    fn frame(&self) -> Frame<'_> {
        Frame {
            name: &self.name,
            comment: &self.comment,
            params: &self.params,
            threads: self.threads,
        }
    }
}

/// `out[n, o, p] = sum over c, t of x[n, c, p * stride - pad + t * dilation] * w[o, c, t]`.
pub fn forward(spec: ConvSpec<'_>, isa: Isa) -> KernelText {
    correlation(spec, walk::Direction::Forward, isa)
}

/// `dx[n, c, q] = sum over o, t of dy[n, o, (q + pad - t * dilation) / stride] * w[o, c, t]`, over those
/// `t` for which the division is exact. With `w` read as `[in, out / groups, ..]` this is also the
/// transposed convolution.
pub fn input_grad(spec: ConvSpec<'_>, isa: Isa) -> KernelText {
    correlation(spec, walk::Direction::InputGrad, isa)
}

fn correlation(spec: ConvSpec<'_>, direction: walk::Direction, isa: Isa) -> KernelText {
    if spec.storage.is_plain() || spec.geometry.is_product() || correlate::is_empty(&spec, direction) {
        correlate::emit(&spec, direction, isa)
    } else if let Some(kernel) =
        moved::correlate(&spec, direction, isa).or_else(|| windows::correlate(&spec, direction, isa))
    {
        kernel
    } else {
        widened::correlate(spec, direction, isa)
    }
}

/// `dw[o, c, t] = sum over n, p of dy[n, o, p] * x[n, c, p * stride - pad + t * dilation]`.
pub fn weight_grad(spec: WeightGradSpec<'_>, isa: Isa) -> KernelText {
    weight_grad::emit(&spec, isa)
}

/// Bytes of working memory of the kernel for a convolution that is a matrix product, from its plan; none
/// for others.
pub fn correlation_workspace(spec: &ConvSpec<'_>, forward: bool, isa: Isa) -> Option<usize> {
    let direction = match forward {
        true => walk::Direction::Forward,
        false => walk::Direction::InputGrad,
    };
    let product = spec.geometry.is_product() && !correlate::is_empty(spec, direction);
    product.then(|| gemm::workspace(correlate::as_product(spec, direction), isa))
}

/// [`correlation_workspace`] for the gradient of a weight.
pub fn weight_grad_workspace(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<usize> {
    let g = &spec.geometry;
    let empty = g.weight_len() == 0 || g.flops() == 0;
    let product = weight_grad::as_product(spec, isa).filter(|_| !empty)?;
    Some(gemm::workspace(product, isa))
}
