//! Convolutions that filter each channel by itself.

use kiln_graph::Value;

use super::correlation::Correlation;
use super::weight::chunks;
use super::{Convolution, THREADS, join};
use crate::emit::image::PLACE;
use crate::emit::{Argument, KernelCode};

const SOURCE: &str = include_str!("../../kernels/cuda/convolution/source.cuh");
const DEPTHWISE: &str = include_str!("../../kernels/cuda/convolution/depthwise.cuh");
const DEPTHWISE_WEIGHT: &str = include_str!("../../kernels/cuda/convolution/depthwise_weight.cuh");

/// The partial sums of a weight are ordered by tap and channel; the weight itself by channel and tap.
const PART_AT: &str =
    "inline Index part_at(Index number) { return number % CHANNELS * TAPS + number / CHANNELS; }\n";

/// The longest row of a window whose taps are written out one after the other.
const LONGEST_ROW: usize = 9;

/// Taps that a thread adds at a time: each takes a vector of registers.
const MOST_TAPS: usize = 9;

/// Neighbouring channels of a thread.
fn vector(convolution: &Convolution<'_>) -> usize {
    let channels = convolution.x.channels;
    let (x, y) = (&convolution.x, &convolution.y);
    if x.has_vectors(4, channels) && y.has_vectors(4, channels) {
        4
    } else {
        1
    }
}

/// The code of a correlation.
pub fn correlation(task: &Correlation<'_>) -> Option<KernelCode> {
    let (convolution, channels) = (task.convolution, task.result.channels);
    // In the packed weight, the channels of a single group take the place of groups of one channel.
    let (pack, packed) = pack(task)?;
    let vector = vector(convolution);
    let row = convolution.window[2];
    let mut template = task.template(THREADS);
    template
        .spatial("IMAGE", task.image.extents)
        .strides('X', task.image)
        .result(task.result, task.result.is_channels_last())
        .bools([("GRADIENT", task.gradient)])
        .ints([
            ("VECTOR", vector),
            ("OUT_PADDED", channels.next_multiple_of(4)),
            ("UNROLLED", if row <= LONGEST_ROW { row } else { 1 }),
        ]);
    let operands = vec![
        (
            template.reads(),
            task.image.offset,
            Argument::value(task.image.base),
        ),
        (template.reads(), 0, Argument::Scratch(0)),
        (template.writes(), 0, Argument::value(task.result.base)),
    ];
    let blocks = task.result.elements().div_ceil(THREADS as usize * vector);
    let main = template.launch(&[PLACE, SOURCE, DEPTHWISE], blocks, operands)?;
    let mut code = KernelCode::launches([pack, main]);
    code.scratch = packed;
    Some(code)
}

/// The launch that packs the weight as if all channels were of one group.
fn pack(task: &Correlation<'_>) -> Option<(crate::emit::Launch, usize)> {
    let channels = task.result.channels;
    let mut dims = task.convolution.dims.clone();
    dims.groups = 1;
    let convolution = Convolution {
        dims: &dims,
        x: task.convolution.x.clone(),
        y: task.convolution.y.clone(),
        ..*task.convolution
    };
    let whole = Correlation {
        convolution: &convolution,
        depth: 1,
        out: channels,
        // The weight's first dimension has the channels in both directions.
        gradient: false,
        ..*task
    };
    whole.pack(1, channels)
}

/// The code of a weight's gradient.
pub fn weight(convolution: &Convolution<'_>, out: Value) -> Option<KernelCode> {
    let (x, y) = (&convolution.x, &convolution.y);
    let (channels, taps, pixels) = (y.channels, convolution.taps(), y.pixels());
    let vector = vector(convolution);
    let across = match x.is_channels_last() && y.is_channels_last() {
        true => (channels / vector).next_power_of_two().min(32),
        false => 1,
    };
    let lanes = THREADS as usize / across;
    let tiles = channels.div_ceil(across * vector);
    let piece = taps.min(MOST_TAPS);
    let pieces = taps.div_ceil(piece);
    let blocks = tiles * pieces;
    let [count, share] = chunks(pixels, blocks, lanes);
    let parts = channels * taps;

    let mut template = convolution.template(THREADS);
    template
        .spatial("IMAGE", x.extents)
        .spatial("PIXELS", y.extents)
        .strides('X', x)
        .strides('G', y)
        .ints([
            ("VECTOR", vector),
            ("ACROSS", across),
            ("LANES", lanes),
            ("CHANNELS", channels),
            ("CHANNEL_TILES", tiles),
            ("PIECE", piece),
            ("PIECES", pieces),
            ("PIXELS", pixels),
            ("SHARE", share),
            ("CHUNKS", count),
        ])
        .constant("Index", "PARTS", parts);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), y.offset, Argument::value(y.base)),
        (template.writes(), 0, Argument::value(out)),
        (template.sums_written(), 0, Argument::Scratch(0)),
    ];
    let main = template.launch(&[DEPTHWISE_WEIGHT], blocks * count, operands)?;
    if count == 1 {
        return Some(KernelCode::launches([main]));
    }
    let mut template = convolution.template(THREADS);
    template.ints([("CHANNELS", channels)]);
    let add = join(template, [count, parts], &[PART_AT], 0, out)?;
    let mut code = KernelCode::launches([main, add]);
    code.scratch = count * parts * convolution.sum_bytes();
    Some(code)
}
