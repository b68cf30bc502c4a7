//! Convolutions of pictures of up to four channels with even strides, on tensor cores.
//!
//! A picture with its channels padded to whole vectors of eight would be multiplied mostly by zeros. Here a
//! place has four channels, and all places of a row that a window meets are one *depth*, contiguous in
//! memory:
//!
//! ```text
//! row of the picture   | r g b 0 | r g b 0 | r g b 0 | r g b 0 | r g b 0 | ..
//! depth of result 0    '-------------------------------'
//! depth of result 1                        '-------------------------------'
//! ```
//!
//! Depths overlap, which a stride says as well as any other distance: the convolution of these images has a
//! window of one column. An even stride makes each depth begin at a multiple of 16 bytes. For the 7 by 7
//! window of a ResNet the products have a depth of 224 in place of 392, and the copy has half the bytes.

use kiln_graph::DType;

use super::correlation::Correlation;
use super::transfer::transfer;
use super::{ALIGNMENT, Convolution, THREADS, Weight};
use super::{bands, tensor};
use crate::convolutions::Task;
use crate::emit::image::{Image, Template};
use crate::emit::{Argument, Call, EmitOptions, KernelCode, Launch};

const PICTURE: &str = include_str!("../../kernels/cuda/convolution/picture.cuh");

/// Channels of a place.
pub const CHANNELS: usize = 4;

/// Elements of 16 bits that are copied together.
const VECTOR: usize = 8;

/// How the rows of a picture and of its windows lie in working memory.
pub struct Rows {
    /// Places of a row of the picture.
    row: usize,
    /// Places of a row of a window.
    pub window: usize,
}

impl Rows {
    /// Those of a convolution's picture; none if its depths do not begin at whole vectors.
    fn new(convolution: &Convolution<'_>) -> Option<Self> {
        let [.., stride] = convolution.stride;
        let [.., window] = convolution.window;
        let fits = convolution.x.channels <= CHANNELS
            && (stride * CHANNELS).is_multiple_of(VECTOR)
            && convolution.dilation[2] == 1;
        let window = window.next_multiple_of(VECTOR / CHANNELS);
        let row = (convolution.y.extents[2] - 1) * stride + window;
        fits.then(|| Self {
            row: row.next_multiple_of(VECTOR / CHANNELS),
            window,
        })
    }

    /// Elements of a depth.
    pub fn depth(&self) -> usize {
        self.window * CHANNELS
    }
}

/// The code of a convolution of a picture, or of its weight's gradient; none for others.
pub fn generate(
    convolution: &Convolution<'_>,
    weight: &Image,
    task: Task,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    let bases = [convolution.x.base, weight.base, convolution.y.base];
    let distinct = bases[0] != bases[1] && bases[1] != bases[2] && bases[0] != bases[2];
    let fits = convolution.dims.groups == 1
        && convolution.dtype.size() == 2
        && convolution.has_tensor_types(options)
        && task != Task::InputGradient
        && distinct;
    let rows = Rows::new(convolution).filter(|_| fits)?;
    let x = depths(convolution, &rows);
    let [w0, w1, _] = convolution.window;
    let inner = Convolution {
        x: x.clone(),
        y: convolution.y.clone(),
        group: [rows.depth(), convolution.group[1]],
        window: [w0, w1, 1],
        stride: [convolution.stride[0], convolution.stride[1], 1],
        low: [convolution.low[0], convolution.low[1], 0],
        ..*convolution
    };
    let depth = rows.depth() as i64;
    let taps = [w1 as i64 * depth, depth, 0];
    let dimensions = convolution.dims.stride.len();
    let own = Weight {
        base: weight.base,
        offset: 0,
        strides: [(w0 * w1) as i64 * depth, 1]
            .into_iter()
            .chain(taps[3 - dimensions..].iter().copied())
            .collect(),
    };
    let in_bands = match task {
        Task::WeightGradient => bands::weight(convolution, &rows, &inner, weight.base, options),
        _ => bands::forward(convolution, &rows, &own, options),
    };
    if let Some(code) = in_bands {
        return assemble(convolution, weight, task, &rows, code, false);
    }
    let code = match task {
        Task::WeightGradient => tensor::weight(&inner, weight.base, options)?,
        _ => tensor::correlation(&Correlation::new(&inner, &own, false), options)?,
    };
    assemble(convolution, weight, task, &rows, code, true)
}

/// The picture's rows in working memory as an image of overlapping depths.
fn depths(convolution: &Convolution<'_>, rows: &Rows) -> Image {
    let x = &convolution.x;
    let [depth, height, _] = x.extents;
    let row = (rows.row * CHANNELS) as i64;
    let plane = height as i64 * row;
    Image {
        base: x.base,
        offset: 0,
        images: x.images,
        channels: rows.depth(),
        extents: [depth, height, convolution.y.extents[2]],
        image: depth as i64 * plane,
        places: [plane, row, (convolution.stride[2] * CHANNELS) as i64],
        channel: 1,
    }
}

/// `code`, which reads and writes copies, with the launches that make these and, of a gradient, the one that
/// stores it. The copies are in front of the working memory of `code`. The picture itself is copied if `copies`.
fn assemble(
    convolution: &Convolution<'_>,
    weight: &Image,
    task: Task,
    rows: &Rows,
    code: KernelCode,
    copies: bool,
) -> Option<KernelCode> {
    let (x, [w0, w1, w2]) = (&convolution.x, convolution.window);
    let is_gradient = task == Task::WeightGradient;
    let weight_dtype = match is_gradient {
        true => convolution.result_dtype,
        false => convolution.dtype,
    };
    let places = x.images * x.extents[0] * x.extents[1] * rows.row;
    let size = |elements: usize, dtype: DType| (elements * dtype.size()).next_multiple_of(ALIGNMENT);
    let copied = match copies {
        true => size(places * CHANNELS, convolution.dtype),
        false => 0,
    };
    let all = copied + size(weight.images * w0 * w1 * rows.depth(), weight_dtype);
    let place = |argument: &mut Argument| match argument {
        Argument::Scratch(at) => *at += all,
        argument if copies && *argument == Argument::value(x.base) => *argument = Argument::Scratch(0),
        argument if *argument == Argument::value(weight.base) => *argument = Argument::Scratch(copied),
        _ => {}
    };
    let mut calls = Vec::new();
    if copies {
        calls.push(Call::Launch(copy(
            convolution,
            x,
            convolution.low[2],
            rows.row,
            0,
        )?));
    }
    if !is_gradient {
        calls.push(Call::Launch(copy(convolution, weight, 0, rows.window, copied)?));
    }
    for call in code.calls {
        let Call::Launch(mut launch) = call else {
            return None;
        };
        launch.arguments.iter_mut().for_each(place);
        calls.push(Call::Launch(launch));
    }
    if is_gradient {
        // Channels of the result, elements of a depth, taps.
        let taps = (w0 * w1) as i64;
        let made = Image {
            offset: 0,
            extents: [w0, w1, w2],
            image: rows.depth() as i64 * taps,
            places: [w1 as i64, 1, CHANNELS as i64 * taps],
            channel: taps,
            ..weight.clone()
        };
        calls.push(Call::Launch(transfer(
            weight_dtype,
            [weight, &made],
            copied,
            false,
        )?));
    }
    Some(KernelCode {
        calls,
        scratch: all + code.scratch,
    })
}

/// The launch that copies `image` into rows of `row` places, of which the `low`-th is its first, at byte `to`
/// of working memory.
fn copy(convolution: &Convolution<'_>, image: &Image, low: usize, row: usize, to: usize) -> Option<Launch> {
    let places = image.images * image.extents[0] * image.extents[1] * row;
    let target = Image {
        images: places * CHANNELS,
        image: 1,
        ..image.clone()
    };
    let mut template = Template::new(convolution.dtype, "float", THREADS, &[image, &target]);
    template
        .strides('F', image)
        .spatial("EXTENT", image.extents)
        .ints([
            ("CHANNELS", image.channels),
            ("LOW", low),
            ("ROW", row),
            ("PLACES", places),
        ]);
    let operands = vec![
        (template.reads(), image.offset, Argument::value(image.base)),
        (template.packs(), 0, Argument::Scratch(to)),
    ];
    template.launch(&[PICTURE], places.div_ceil(THREADS as usize), operands)
}
