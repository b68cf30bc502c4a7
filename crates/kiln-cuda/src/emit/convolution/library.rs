//! Convolutions in cuDNN.
//!
//! The library is fast where all three tensors have their channels last. A step stores its images so. Other
//! tensors (an image among the step's arguments; a weight, whose dimensions lie in memory in their own
//! order) are copied into working memory first, and a result in another order is copied from there. Where
//! the images have their channels first, all three tensors stay as they are, and the library does its own
//! copying.
//!
//! An image that is copied gets its channels padded with zeros to vectors of 16 bytes. Even then the
//! library has no fast engine for the three channels of a picture: the first convolution of resnet50 and
//! its weight's gradient take 1.5 and 3.4 ms in TF32, and 0.9 ms in bf16 (128 images, H200), where Kiln's
//! own tiles take 0.64, 0.63 and 0.66 ms, copies included ([`super::tensor::padded`]).

use kiln_graph::DType;

use super::transfer::transfer;
use super::{ALIGNMENT, Convolution};
use crate::convolutions::{self, Task, Tensor};
use crate::emit::image::{Image, spatial};
use crate::emit::{Argument, Call, ConvolutionCall, EmitOptions, KernelCode, Launch};
use crate::products::Number;

/// The most working memory that the library may use, in bytes.
const WORKSPACE: usize = 64 << 20;

/// The parts of a long sum that working memory has room for.
const SPLITS: usize = 16;

/// The order of a tensor's dimensions in memory.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    ChannelsLast,
    ChannelsFirst,
}

/// One of the three tensors: how it is stored, and how the library gets it.
struct Operand {
    dtype: DType,
    /// As the step stores it. A weight is an image of its window for each channel of the result.
    stored: Image,
    /// As the library gets it.
    given: Tensor,
    /// Where a copy is in working memory.
    copy: Option<usize>,
}

/// The library's call for `convolution`; none if the library is slower than Kiln's own kernels.
pub fn generate(
    convolution: &Convolution<'_>,
    weight: Image,
    dtypes: [DType; 3],
    task: Task,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    let has_few_channels = dtypes[0] == DType::F32 && convolution.x.channels < 4;
    // For 64 channels of 56 by 56 (128 images, bf16, H200) the library's engine takes 2.0 ms with a result
    // of f32, and 0.07 ms with one of bf16.
    let has_wide_result = task == Task::WeightGradient && dtypes[0] != dtypes[1];
    if !options.cudnn || convolution.is_depthwise() || has_few_channels || has_wide_result {
        return None;
    }
    let numbers = [number(dtypes[0])?, number(dtypes[1])?, number(dtypes[2])?];
    let images = [&convolution.x, &convolution.y];
    let format = match images.iter().all(|image| is_stored(image, Format::ChannelsFirst))
        && is_stored(&weight, Format::ChannelsFirst)
        && !images.iter().all(|image| is_stored(image, Format::ChannelsLast))
    {
        true => Format::ChannelsFirst,
        false => Format::ChannelsLast,
    };
    // Zeros behind a flat image make the result deep.
    let depths = [
        convolution.x.extents[0],
        convolution.y.extents[0],
        convolution.window[0],
    ];
    let dimensions = if depths == [1; 3] && convolution.low[0] == 0 {
        2
    } else {
        3
    };
    let mut scratch = 0;
    let x_copied = !fits(&convolution.x, numbers[0], format);
    // Only an image that is copied anyway is padded, and the weight then has as many channels.
    let channels = match x_copied && convolution.dims.groups == 1 {
        true => convolution.x.channels.next_multiple_of(16 / numbers[0].bytes()),
        false => convolution.x.channels,
    };
    let mut operand = |stored: &Image, number: Number, dtype: DType, channels: usize| {
        let copied = !fits(stored, number, format) || channels != stored.channels;
        let given = tensor(stored, number, channels, format, dimensions);
        let copy = copied.then(|| {
            let at = scratch;
            scratch = (scratch + given.bytes()).next_multiple_of(ALIGNMENT);
            at
        });
        Operand {
            dtype,
            stored: stored.clone(),
            given,
            copy,
        }
    };
    let group_channels = match channels == convolution.x.channels {
        true => weight.channels,
        false => channels,
    };
    let operands = [
        operand(&convolution.x, numbers[0], dtypes[0], channels),
        operand(&weight, numbers[1], dtypes[1], group_channels),
        operand(&convolution.y, numbers[2], dtypes[2], convolution.y.channels),
    ];
    let described = describe(convolution, &operands, task, dimensions, options.tf32)?;
    let workspace = workspace(&described);
    let result = match task {
        Task::Forward => 2,
        Task::InputGradient => 0,
        Task::WeightGradient => 1,
    };
    let mut calls = Vec::new();
    for (_, operand) in operands.iter().enumerate().filter(|&(at, _)| at != result) {
        if let Some(copy) = operand.copy {
            calls.push(Call::Launch(operand.transfer(copy, true)?));
        }
    }
    calls.push(Call::Convolution(Box::new(ConvolutionCall {
        convolution: described,
        tensors: [0, 1, 2].map(|at: usize| operands[at].place()),
        workspace: (scratch, workspace),
    })));
    if let Some(copy) = operands[result].copy {
        calls.push(Call::Launch(operands[result].transfer(copy, false)?));
    }
    Some(KernelCode {
        calls,
        scratch: scratch + workspace,
    })
}

impl Operand {
    /// Where the library finds the tensor.
    fn place(&self) -> (Argument, usize) {
        match self.copy {
            Some(at) => (Argument::Scratch(at), 0),
            None => {
                let bytes = self.stored.offset.unsigned_abs() as usize * self.given.number.bytes();
                (Argument::value(self.stored.base), bytes)
            }
        }
    }
}

/// The library's name of a type that it is fast in.
fn number(dtype: DType) -> Option<Number> {
    Number::of(dtype).filter(|&number| number != Number::F64)
}

/// The strides of a whole tensor of `channels` channels: images, channels, places.
fn strides(image: &Image, channels: usize, format: Format) -> [i64; 5] {
    let [depth, height, width] = image.extents.map(|extent| extent as i64);
    let (channels, plane) = (channels as i64, depth * height * width);
    match format {
        Format::ChannelsLast => [
            plane * channels,
            1,
            height * width * channels,
            width * channels,
            channels,
        ],
        Format::ChannelsFirst => [plane * channels, plane, height * width, width, 1],
    }
}

/// Whether `image` lies in memory without gaps in the order of `format`.
fn is_stored(image: &Image, format: Format) -> bool {
    let [a, b, c] = image.places;
    let own = [image.image, image.channel, a, b, c];
    let [e0, e1, e2] = image.extents;
    let extents = [image.images, image.channels, e0, e1, e2];
    let whole = strides(image, image.channels, format);
    (0..5).all(|at| extents[at] == 1 || own[at] == whole[at])
}

/// Whether the library takes `image` where it is.
fn fits(image: &Image, number: Number, format: Format) -> bool {
    let bytes = number.bytes() as i64;
    image.offset >= 0 && (image.offset * bytes) % 16 == 0 && is_stored(image, format)
}

/// `image` with `channels` channels, as a whole tensor.
fn tensor(image: &Image, number: Number, channels: usize, format: Format, dimensions: usize) -> Tensor {
    let [n, c, d, h, w] = strides(image, channels, format);
    let extents = image.extents.map(|extent| extent as i64);
    let spatial = 3 - dimensions..;
    Tensor {
        number,
        extents: [image.images as i64, channels as i64]
            .into_iter()
            .chain(extents[spatial.clone()].iter().copied())
            .collect(),
        strides: [n, c]
            .into_iter()
            .chain([d, h, w][spatial].iter().copied())
            .collect(),
    }
}

/// The convolution in the library's terms.
fn describe(
    convolution: &Convolution<'_>,
    [x, w, y]: &[Operand; 3],
    task: Task,
    dimensions: usize,
    tf32: bool,
) -> Option<convolutions::Convolution> {
    let list = |numbers: [usize; 3]| -> Vec<i64> {
        numbers[3 - dimensions..]
            .iter()
            .map(|&number| number as i64)
            .collect()
    };
    // The library has more engines for as many zeros behind the image as in front of it.
    let given = spatial(&convolution.dims.pad_high, 0);
    let high = [0, 1, 2].map(|axis: usize| {
        let low = convolution.low[axis];
        let reach = convolution.dilation[axis] * (convolution.window[axis] - 1) + 1;
        let places = (convolution.x.extents[axis] + 2 * low).checked_sub(reach);
        let extent = places.map(|places| places / convolution.stride[axis] + 1);
        match extent == Some(convolution.y.extents[axis]) {
            true => low,
            false => given[axis],
        }
    });
    let small = |number: usize| number < 1 << 30;
    let counts = [&x.given, &w.given, &y.given].map(|tensor| tensor.elements());
    counts.into_iter().all(small).then(|| convolutions::Convolution {
        task,
        x: x.given.clone(),
        w: w.given.clone(),
        y: y.given.clone(),
        stride: list(convolution.stride),
        dilation: list(convolution.dilation),
        low: list(convolution.low),
        high: list(high),
        tf32: tf32 && x.dtype == DType::F32,
    })
}

/// Bytes of working memory that the library may use: copies of all tensors, and the sums of several parts
/// of the depth.
fn workspace(convolution: &convolutions::Convolution) -> usize {
    let copies: usize = convolution
        .tensors()
        .iter()
        .map(|tensor| 2 * tensor.bytes())
        .sum();
    let sums = 4 * SPLITS * convolution.tensors()[2].elements();
    (copies + sums).min(WORKSPACE).next_multiple_of(ALIGNMENT)
}

impl Operand {
    /// The launch that copies the tensor to its place in working memory, or from there.
    fn transfer(&self, copy: usize, to_library: bool) -> Option<Launch> {
        let strides = &self.given.strides;
        let mut places = [0; 3];
        places[5 - strides.len()..].copy_from_slice(&strides[2..]);
        let library = Image {
            offset: 0,
            channels: usize::try_from(self.given.extents[1]).ok()?,
            image: strides[0],
            places,
            channel: strides[1],
            ..self.stored.clone()
        };
        transfer(self.dtype, [&self.stored, &library], copy, to_library)
    }
}
