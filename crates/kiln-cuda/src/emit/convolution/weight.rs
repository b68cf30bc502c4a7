//! Gradients of a convolution's weight by tiles.

use kiln_graph::Value;

use super::tile::{BLOCKS, Tile};
use super::{Convolution, THREADS, join};
use crate::emit::{Argument, KernelCode, Launch};

const VECTORS: &str = include_str!("../../kernels/cuda/convolution/weight_vectors.cuh");
/// Which elements of the image and the gradient belong to columns and pixels.
pub const PLACES: &str = include_str!("../../kernels/cuda/convolution/weight_places.cuh");
const WEIGHT: &str = include_str!("../../kernels/cuda/convolution/weight.cuh");

/// The partial sums of a weight are ordered by channel, tap and depth; the weight itself by channel, depth
/// and tap.
const PART_AT: &str = "inline Index part_at(Index number)
{
    Index row = number / COLUMNS;
    int column = (int)(number % COLUMNS);
    return (row * DEPTH + column % DEPTH) * TAPS + column / DEPTH;
}
";

/// The fewest pixels of a chunk: fewer are not worth another pass over the weight.
const LEAST_PIXELS: usize = 512;

/// The number of chunks into which `pixels` are divided if `blocks` blocks work on each chunk, and the
/// pixels of a chunk, a multiple of `unit`.
pub fn chunks(pixels: usize, blocks: usize, unit: usize) -> [usize; 2] {
    // Twice as many blocks as elsewhere: chunks differ in what they cost, as pixels at the border have fewer
    // taps.
    let wanted = (2 * BLOCKS).div_ceil(blocks);
    let wanted = wanted.min(pixels.div_ceil(LEAST_PIXELS)).max(1);
    let share = pixels.div_ceil(wanted).next_multiple_of(unit);
    [pixels.div_ceil(share), share]
}

/// The code of the gradient `out`.
pub fn generate(convolution: &Convolution<'_>, out: Value) -> Option<KernelCode> {
    let (x, y) = (&convolution.x, &convolution.y);
    let ([depth, channels], groups) = (convolution.group, convolution.dims.groups);
    let (columns, pixels) = (depth * convolution.taps(), y.pixels());
    let wide = convolution.sum_bytes() > 4;
    let tile = Tile::of_weight(channels, columns, wide);
    let tiles = [channels.div_ceil(tile.block[0]), columns.div_ceil(tile.block[1])];
    let bk = 8;
    let blocks = tiles[0] * tiles[1] * groups;
    let [count, share] = chunks(pixels, blocks, bk);
    let parts = y.channels * columns;
    let g_vector = if y.has_vectors(4, channels) { 4 } else { 1 };
    let x_vector = if x.has_vectors(4, depth) { 4 } else { 1 };

    let mut template = convolution.template(tile.threads());
    template
        .spatial("IMAGE", x.extents)
        .spatial("PIXELS", y.extents)
        .strides('X', x)
        .strides('G', y)
        .ints(tile.constants())
        .ints([
            ("BK", bk),
            ("DEPTH", depth),
            ("OUT", channels),
            ("COLUMNS", columns),
            ("PIXELS", pixels),
            ("SHARE", share),
            ("CHUNKS", count),
            ("ROW_TILES", tiles[0]),
            ("COLUMN_TILES", tiles[1]),
            ("G_VECTOR", g_vector),
            ("X_VECTOR", x_vector),
        ])
        .bools([
            ("G_PIXELS_FIRST", g_vector == 1 && !y.is_channels_last()),
            ("X_PIXELS_FIRST", x_vector == 1 && !x.is_channels_last()),
        ])
        .constant("Index", "G_PIXEL", y.pixel().unwrap_or(0))
        .constant("Index", "PARTS", parts);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), y.offset, Argument::value(y.base)),
        (template.writes(), 0, Argument::value(out)),
        (template.sums_written(), 0, Argument::Scratch(0)),
    ];
    let main = template.launch(&[VECTORS, PLACES, WEIGHT], blocks * count, operands)?;
    finish(convolution, main, count, out)
}

/// The code of a gradient whose `main` part leaves the sums of `count` chunks in working memory if there are
/// several.
pub fn finish(convolution: &Convolution<'_>, main: Launch, count: usize, out: Value) -> Option<KernelCode> {
    if count == 1 {
        return Some(KernelCode::launches([main]));
    }
    let depth = convolution.group[0];
    let columns = depth * convolution.taps();
    let parts = convolution.y.channels * columns;
    let mut template = convolution.template(THREADS);
    template.ints([("DEPTH", depth), ("COLUMNS", columns)]);
    let add = join(template, [count, parts], &[PART_AT], 0, out)?;
    let mut code = KernelCode::launches([main, add]);
    code.scratch = count * parts * convolution.sum_bytes();
    Some(code)
}
