//! Convolutions that filter each channel by itself.
//!
//! Where channels are neighbours in memory, a thread has a *strip*: some neighbouring places of a line, for
//! which it reads each element of the image once per line of the window. One place a thread reads each
//! element once per tap, and waits for it as often: at 14 by 14 places of 384 channels (128 images, bf16,
//! H100) gradients took three and six times what their bytes take.

use kiln_graph::Value;

use super::correlation::Correlation;
use super::tile::BLOCKS;
use super::weight::chunks;
use super::{Convolution, THREADS, join};
use crate::emit::image::{Image, PLACE, Template};
use crate::emit::{Argument, KernelCode};

const SOURCE: &str = include_str!("../../kernels/cuda/convolution/source.cuh");
const DEPTHWISE: &str = include_str!("../../kernels/cuda/convolution/depthwise.cuh");
const DEPTHWISE_STRIPS: &str = include_str!("../../kernels/cuda/convolution/depthwise_strips.cuh");
const DEPTHWISE_LANES: &str = include_str!("../../kernels/cuda/convolution/depthwise_lanes.cuh");
const DEPTHWISE_WEIGHT: &str = include_str!("../../kernels/cuda/convolution/depthwise_weight.cuh");
const DEPTHWISE_WEIGHT_STRIPS: &str =
    include_str!("../../kernels/cuda/convolution/depthwise_weight_strips.cuh");
const STRIP: &str = include_str!("../../kernels/cuda/convolution/strip.cuh");

/// The partial sums of a weight are ordered by tap and channel; the weight itself by channel and tap.
const PART_AT: &str =
    "inline Index part_at(Index number) { return number % CHANNELS * TAPS + number / CHANNELS; }\n";

/// The longest row of a window whose taps are written out one after the other.
const LONGEST_ROW: usize = 9;

/// Taps that a thread adds at a time: each takes a vector of registers.
const MOST_TAPS: usize = 9;

/// The longest strip, and the most elements of a line that one reads: they are in registers.
const LONGEST_STRIP: usize = 8;
const LONGEST_SPAN: usize = 12;

/// The fewest strips of a lane: fewer are not worth another pass over the weight.
const LEAST_STRIPS: usize = 4;

/// The fewest neighbouring vectors of channels of a block that has several tiles of them: 128 bytes of 16
/// bits.
const LEAST_ACROSS: usize = 16;

/// Bytes of sums that the threads of a block show each other at a time.
const SHOWN: usize = 36 << 10;

/// Neighbouring places of a line that a thread has.
struct Strip {
    places: usize,
    /// Strips of a line.
    count: usize,
    /// The elements of a line of the image that it reads: the first, behind the place that its own first lies
    /// at, and how many.
    first: i64,
    span: usize,
}

impl Strip {
    /// How the lines of a convolution, or of the gradient of its input, are divided into strips; none if they
    /// are not, because neighbours in memory are not channels, or what a strip keeps would not fit into
    /// registers.
    fn new(convolution: &Convolution<'_>, gradient: bool) -> Option<Self> {
        let (x, y) = (&convolution.x, &convolution.y);
        let fits = vector(convolution) > 1 && x.is_channels_last() && y.is_channels_last();
        let [_, _, taps] = convolution.window;
        if !fits || taps > LONGEST_ROW || convolution.sum_bytes() > 4 {
            return None;
        }
        let width = if gradient { x.extents[2] } else { y.extents[2] };
        let strips = (1..=LONGEST_STRIP).rev().filter_map(|places| {
            let (first, span) = reach(convolution, gradient, places)?;
            (span <= LONGEST_SPAN).then_some(Self {
                places,
                count: width.div_ceil(places),
                first,
                span,
            })
        });
        // What is read and written; of equals the longest.
        strips.min_by_key(|strip| strip.count * (strip.span + strip.places))
    }

    /// The constants that `strip.cuh` needs.
    fn define(&self, template: &mut Template, convolution: &Convolution<'_>, gradient: bool) {
        let [_, _, stride] = convolution.stride;
        let hop = match gradient {
            true => self.places / stride,
            false => self.places * stride,
        };
        template
            .ints([
                ("STRIP", self.places),
                ("COUNT", self.count),
                ("SPAN", self.span),
                ("HOP", hop),
            ])
            .constant("int", "FIRST", self.first);
    }

    /// The image `of` of strips in place of elements.
    fn image(&self, of: &Image) -> Image {
        let mut image = of.clone();
        image.extents[2] = self.count;
        image.places[2] *= self.places as i64;
        image
    }
}

/// The elements of a line that `places` places are joined with by a window: the first, and how many. None if
/// strips of gradients would not begin at multiples of the stride.
fn reach(convolution: &Convolution<'_>, gradient: bool, places: usize) -> Option<(i64, usize)> {
    let at = |list: [usize; 3]| list[2] as i64;
    let (stride, low) = (at(convolution.stride), at(convolution.low));
    let apart = (at(convolution.window) - 1) * at(convolution.dilation);
    let last = places as i64 - 1;
    let (first, last) = match gradient {
        true if last % stride != stride - 1 => return None,
        true => (-(apart - low).div_euclid(stride), (last + low).div_euclid(stride)),
        false => (-low, last * stride - low + apart),
    };
    Some((first, (last - first + 1).max(1) as usize))
}

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
    let [_, lines, row] = convolution.window;
    let mut template = task.template(THREADS);
    template
        .spatial("IMAGE", task.image.extents)
        .strides('X', task.image)
        .bools([("GRADIENT", task.gradient)])
        .ints([("VECTOR", vector), ("OUT_PADDED", channels.next_multiple_of(4))]);
    let (results, texts) = match Strip::new(convolution, task.gradient) {
        Some(strip) => {
            strip.define(&mut template, convolution, task.gradient);
            template
                .ints([
                    ("WIDTH", task.result.extents[2]),
                    ("LINES", if lines * row <= MOST_TAPS { lines } else { 1 }),
                ])
                .constant("Index", "STEP", task.result.places[2]);
            (strip.image(task.result), [STRIP, DEPTHWISE_STRIPS])
        }
        None => {
            template.ints([("UNROLLED", if row <= LONGEST_ROW { row } else { 1 })]);
            (task.result.clone(), ["", DEPTHWISE])
        }
    };
    template.result(&results, results.is_channels_last());
    let operands = vec![
        (
            template.reads(),
            task.image.offset,
            Argument::value(task.image.base),
        ),
        (template.reads(), 0, Argument::Scratch(0)),
        (template.writes(), 0, Argument::value(task.result.base)),
    ];
    let blocks = results.elements().div_ceil(THREADS as usize * vector);
    let main = template.launch(&[PLACE, SOURCE, texts[0], texts[1]], blocks, operands)?;
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
    let (channels, taps) = (y.channels, convolution.taps());
    let vector = vector(convolution);
    let across = match x.is_channels_last() && y.is_channels_last() {
        true => across(channels / vector),
        false => 1,
    };
    let lanes = THREADS as usize / across;
    let tiles = channels.div_ceil(across * vector);
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
        ])
        .constant("Index", "PARTS", parts);
    let blocks = [tiles, lanes];
    let Division {
        piece,
        pieces,
        chunks: [count, share],
        texts,
        resident,
    } = by_strips(&mut template, convolution, blocks)
        .unwrap_or_else(|| by_pixels(&mut template, convolution, blocks));
    let together = SHOWN / (THREADS as usize * vector * convolution.sum_bytes());
    template.ints([
        ("PIECE", piece),
        ("PIECES", pieces),
        ("SHARE", share),
        ("CHUNKS", count),
        ("TOGETHER", together.clamp(1, piece)),
    ]);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), y.offset, Argument::value(y.base)),
        (template.writes(), 0, Argument::value(out)),
        (template.sums_written(), 0, Argument::Scratch(0)),
    ];
    let texts = [DEPTHWISE_LANES, texts[0], texts[1]];
    let mut main = template.launch(&texts, tiles * pieces * count, operands)?;
    main.text.blocks = resident;
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

/// Neighbouring vectors of channels of a block, of `vectors`: as many as leave the fewest threads idle.
fn across(vectors: usize) -> usize {
    let threads = THREADS as usize;
    let most = vectors.min(threads / 4);
    let busy = |&across: &usize| vectors * (threads / across) * 1000 / vectors.div_ceil(across);
    (vectors.min(LEAST_ACROSS)..=most).max_by_key(busy).unwrap_or(1)
}

/// How a weight's gradient is divided among blocks.
struct Division {
    /// Taps of a block, and the number of such pieces of the window.
    piece: usize,
    pieces: usize,
    /// The number of chunks that the pixels or strips are divided into, and how many a chunk has.
    chunks: [usize; 2],
    texts: [&'static str; 2],
    /// See [`FunctionText::blocks`](crate::code::FunctionText::blocks).
    resident: u32,
}

fn by_pixels(template: &mut Template, convolution: &Convolution<'_>, [tiles, lanes]: [usize; 2]) -> Division {
    let (taps, pixels) = (convolution.taps(), convolution.y.pixels());
    let piece = taps.min(MOST_TAPS);
    let pieces = taps.div_ceil(piece);
    template.ints([("PIXELS", pixels)]);
    Division {
        piece,
        pieces,
        chunks: chunks(pixels, tiles * pieces, lanes),
        texts: ["", DEPTHWISE_WEIGHT],
        resident: 0,
    }
}

/// None if images have no strips.
fn by_strips(
    template: &mut Template,
    convolution: &Convolution<'_>,
    [tiles, lanes]: [usize; 2],
) -> Option<Division> {
    let strip = Strip::new(convolution, false)?;
    strip.define(template, convolution, false);
    let [depth, height, row] = convolution.window;
    let lines = (MOST_TAPS / row).clamp(1, depth * height);
    let pieces = (depth * height).div_ceil(lines);
    let strips = strip.image(&convolution.y).pixels();
    // As many blocks as a device has at once: a few more would take twice as long.
    let most = strips.div_ceil(lanes * LEAST_STRIPS);
    let share = strips.div_ceil((BLOCKS / (tiles * pieces)).clamp(1, most));
    template.ints([("STRIPS", strips), ("LINES", lines)]);
    Some(Division {
        piece: lines * row,
        pieces,
        chunks: [strips.div_ceil(share), share],
        texts: [STRIP, DEPTHWISE_WEIGHT_STRIPS],
        // With a few registers more there would be one: 100 us become 138 (144 channels of 56 by 56).
        resident: 2,
    })
}
