//! Convolutions of pictures by groups of four warps, which Hopper has instructions for.
//!
//! A block keeps rows of the picture in shared memory, four channels a place, and the instructions read the
//! overlapping depths of windows where they are (`kernels/cuda/convolution/bands.cuh`). Nothing of the picture
//! is copied in device memory. What depths are is in [`super::picture`].

use kiln_graph::Value;

use super::picture::{CHANNELS, Rows};
use super::weight::finish;
use super::{Convolution, Weight};
use crate::emit::image::Template;
use crate::emit::product::warpgroups::{CAPABILITY, Warpgroups};
use crate::emit::{Argument, EmitOptions, KernelCode, Launch};
use crate::kernels::convolution::{GROUPS, instruction};

const TENSOR: &str = include_str!("../../kernels/cuda/convolution/tensor.cuh");
const BANDS: &str = include_str!("../../kernels/cuda/convolution/bands.cuh");
const FORWARD: &str = include_str!("../../kernels/cuda/convolution/bands_forward.cuh");
const WEIGHT: &str = include_str!("../../kernels/cuda/convolution/bands_weight.cuh");

/// Results that one instruction computes, and threads of a group.
const TILE: usize = 64;
const GROUP: usize = 128;

/// Pixels that an instruction takes of the depth of a gradient.
const STEP: usize = 16;

/// Bytes of an element.
const BYTES: usize = 2;

/// The most channels of a result.
const MOST_CHANNELS: usize = 128;

/// The most sums that a thread has in registers.
const MOST_SUMS: usize = 112;

/// The most steps whose pixels a thread has in registers.
const MOST_STEPS: usize = 7;

/// The most rows of results of a band: more save hardly any rows that two bands share.
const MOST_ROWS: usize = 8;

/// Bytes of shared memory with which a multiprocessor has room for two blocks, and for three.
const SHARED_OF_TWO: usize = 112 << 10;
const SHARED_OF_THREE: usize = 74 << 10;

/// The partial sums of a weight: one for each block that devices have room for. Results depend on it, and so it
/// does not depend on the device.
const CHUNKS: usize = 396;

/// Rows of results that a block computes, and what of the picture they need.
struct Band {
    /// Rows of results.
    rows: usize,
    /// Rows of the picture.
    lines: usize,
    /// Places of a row of the picture, and those of them that windows meet.
    row: usize,
    reach: usize,
}

impl Band {
    /// The band with the most rows whose block has no more than `most` bytes of shared memory, of which `rest`
    /// gives those besides the picture. Rows have `places` results. None if one row is too much.
    fn new(
        convolution: &Convolution<'_>,
        rows: &Rows,
        places: usize,
        most: usize,
        rest: impl Fn(usize) -> usize,
    ) -> Option<Self> {
        let [_, height, width] = convolution.y.extents;
        let [_, stride, step] = convolution.stride;
        let reach = (width - 1) * step + rows.window;
        let row = ((places - 1) * step + rows.window).max(reach);
        let below = (convolution.window[1] - 1) * convolution.dilation[1] + 1;
        let band = |rows: usize| Self {
            rows,
            lines: (rows - 1) * stride + below,
            row,
            reach,
        };
        let fits = |band: &Self| band.elements() * BYTES + rest(band.rows) <= most;
        let all: Vec<Self> = (1..=MOST_ROWS.min(height)).map(band).filter(fits).collect();
        // Bands that divide the rows leave no block with few of them.
        let whole = all.iter().rposition(|band| height.is_multiple_of(band.rows));
        let at = whole
            .filter(|&at| 2 * (at + 1) > all.len())
            .or(all.len().checked_sub(1))?;
        all.into_iter().nth(at)
    }

    /// Elements of the picture in shared memory.
    fn elements(&self) -> usize {
        self.lines * self.row * CHANNELS
    }
}

/// Whether groups of warps compute the convolution of a picture with these rows, or its weight's gradient.
fn is_taken(convolution: &Convolution<'_>, rows: &Rows, options: &EmitOptions<'_>) -> bool {
    let Convolution {
        x, y, stride, low, ..
    } = convolution;
    let [depth, _, width] = y.extents;
    // A picture has no depth, neither of its own nor of zeros around it.
    let is_flat = x.extents[0] == 1 && depth == 1 && low[0] == 0;
    let is_wide = 2 * width >= width.next_multiple_of(TILE);
    let is_wanted = match options.warpgroups {
        Warpgroups::WherePays => options.capability == CAPABILITY && is_wide,
        Warpgroups::Always => true,
        Warpgroups::Never => false,
    };
    let [taps, ..] = convolution.window;
    is_wanted
        && taps == 1
        && is_flat
        && stride[2] == 2
        && rows.depth().is_multiple_of(STEP)
        && y.channels <= MOST_CHANNELS
        && y.has_vectors(16 / BYTES, y.channels)
}

impl Convolution<'_> {
    /// The constants of both kernels, and their instruction.
    fn band_template(&self, rows: &Rows, band: &Band, threads: usize) -> Template {
        let mut template = self.template(threads as u32);
        template
            .spatial("IMAGE", self.x.extents)
            .spatial("RESULT", self.y.extents)
            .strides('X', &self.x)
            .ints(self.types())
            .ints([
                ("X_CHANNELS", self.x.channels),
                ("OUT", self.y.channels),
                ("DEPTH", rows.depth()),
                ("ROW", band.row),
                ("REACH", band.reach),
                ("LINES", band.lines),
                ("BAND", band.rows),
                ("BANDS", self.y.extents[1].div_ceil(band.rows)),
                ("BAND_ELEMENTS", band.elements()),
            ]);
        template
    }
}

/// A launch with so many bytes of shared memory.
fn shared(mut launch: Launch, bytes: usize, blocks: u32) -> Option<Launch> {
    launch.shared_bytes = u32::try_from(bytes).ok()?;
    launch.text.blocks = blocks;
    Some(launch)
}

/// The code of a convolution whose weight is packed in rows of depths; none where groups of warps do not compute
/// it.
pub fn forward(
    convolution: &Convolution<'_>,
    rows: &Rows,
    weight: &Weight,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    let (x, y) = (&convolution.x, &convolution.y);
    if !is_taken(convolution, rows, options) || convolution.result_dtype != convolution.dtype {
        return None;
    }
    let [_, height, width] = y.extents;
    let groups = 2;
    let weights = convolution.window[1] * rows.depth() * y.channels * BYTES;
    let waiting = groups * TILE * (y.channels + 8) * BYTES;
    let places = width.next_multiple_of(TILE);
    let band = Band::new(convolution, rows, places, SHARED_OF_TWO, |_| weights + waiting)?;
    let mut template = convolution.band_template(rows, &band, groups * GROUP);
    template.strides('Y', y);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), weight.offset, Argument::value(weight.base)),
        (template.writes(), y.offset, Argument::value(y.base)),
    ];
    let own = instruction(convolution.dtype, y.channels, false);
    let templates = [TENSOR, BANDS, &own, FORWARD];
    let blocks = y.images * height.div_ceil(band.rows);
    let mut launch = template.launch(&templates, blocks, operands)?;
    launch.text.helpers.insert_str(0, GROUPS);
    let bytes = weights + band.elements() * BYTES + waiting;
    Some(KernelCode::launches([shared(launch, bytes, 2)?]))
}

/// The code of the gradient of a weight, as that of `inner`, the convolution of depths; none where groups of
/// warps do not compute it.
pub fn weight(
    convolution: &Convolution<'_>,
    rows: &Rows,
    inner: &Convolution<'_>,
    out: Value,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    let (x, y) = (&convolution.x, &convolution.y);
    let columns = convolution.window[1] * rows.depth();
    if !is_taken(convolution, rows, options) || columns > 2 * MOST_SUMS {
        return None;
    }
    let [_, height, width] = y.extents;
    let steps = width.div_ceil(STEP);
    let together = steps.div_ceil(steps.div_ceil(MOST_STEPS));
    let wide = width.next_multiple_of(together * STEP);
    let groups = y.channels.div_ceil(TILE);
    let pitch = groups * TILE + 8;
    let gradient = |rows: usize| rows * wide * pitch * BYTES;
    let band = Band::new(convolution, rows, wide, SHARED_OF_THREE, gradient)?;
    let count = CHUNKS.min(y.images * height.div_ceil(band.rows));
    if count == 1 {
        return None;
    }
    let mut template = convolution.band_template(rows, &band, groups * GROUP);
    template
        .strides('G', y)
        .ints([
            ("IMAGES", y.images),
            ("WIDE", wide),
            ("TOGETHER", together),
            ("CHUNKS", count),
        ])
        .constant("Index", "PARTS", y.channels * columns);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), y.offset, Argument::value(y.base)),
        (template.writes(), 0, Argument::value(out)),
        (template.sums_written(), 0, Argument::Scratch(0)),
    ];
    let own = instruction(convolution.dtype, rows.depth(), true);
    let templates = [TENSOR, BANDS, &own, WEIGHT];
    let mut launch = template.launch(&templates, count, operands)?;
    launch.text.helpers.insert_str(0, GROUPS);
    let bytes = band.elements() * BYTES + gradient(band.rows);
    let blocks = if groups == 1 { 3 } else { 1 };
    finish(inner, shared(launch, bytes, blocks)?, count, out)
}
