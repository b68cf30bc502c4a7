//! Convolutions and the gradients of their inputs by tiles.

use num_integer::gcd;

use super::tile::{BLOCKS, Tile};
use super::{ALIGNMENT, Convolution, THREADS, Weight, join};
use crate::emit::image::{Image, PLACE, Template};
use crate::emit::{Argument, KernelCode, Launch};

const PACK: &str = include_str!("../../kernels/cuda/convolution/pack.cuh");
/// How the image is read where the window lies.
pub const SLIDE: &str = include_str!("../../kernels/cuda/convolution/slide.cuh");
const CORRELATION: &str = include_str!("../../kernels/cuda/convolution/correlation.cuh");
const PART_AT: &str = "inline Index part_at(Index number) { return result_at(place_of(number)); }\n";

/// The least depth of a chunk: less is not worth another pass over the results.
const LEAST_DEPTH: usize = 256;

/// A convolution, or the gradient of its input.
pub struct Correlation<'a> {
    pub convolution: &'a Convolution<'a>,
    pub weight: &'a Weight,
    pub gradient: bool,
    /// The image that is read, and the one that is written.
    pub image: &'a Image,
    pub result: &'a Image,
    /// Channels of a group of `image`, and of `result`.
    pub depth: usize,
    pub out: usize,
}

impl<'a> Correlation<'a> {
    pub fn new(convolution: &'a Convolution<'a>, weight: &'a Weight, gradient: bool) -> Self {
        let ([c, o], (x, y)) = (convolution.group, (&convolution.x, &convolution.y));
        let (depth, out, image, result) = if gradient { (o, c, y, x) } else { (c, o, x, y) };
        Self {
            convolution,
            weight,
            gradient,
            image,
            result,
            depth,
            out,
        }
    }

    /// The constants of all kernels, and the weight's strides, named after what its dimensions mean here.
    pub fn template(&self, threads: u32) -> Template {
        let mut template = self.convolution.template(threads);
        let (first, second) = (self.weight.strides[0], self.weight.strides[1]);
        let (group, result, depth) = match self.gradient {
            false => (first * self.out as i64, first, second),
            true => (first * self.depth as i64, second, first),
        };
        let taps = &self.weight.strides[2..];
        for axis in 0..3 {
            let stride = (axis + taps.len()).checked_sub(3).map_or(0, |at| taps[at]);
            template.constant("Index", &format!("W{axis}"), stride);
        }
        template
            .constant("Index", "W_GROUP", group)
            .constant("Index", "W_RESULT", result)
            .constant("Index", "W_DEPTH", depth)
            .ints([("DEPTH", self.depth), ("OUT", self.out)]);
        template
    }

    /// The launch that packs the weight, and the bytes of working memory that it fills.
    pub fn pack(&self, groups: usize, out: usize) -> Option<(Launch, usize)> {
        let padded = out.next_multiple_of(4);
        let mut template = self.template(THREADS);
        template.ints([("OUT_PADDED", padded)]);
        let (dtype, taps) = (self.convolution.dtype, self.convolution.taps());
        let bytes = groups * taps * self.depth * padded * dtype.size();
        let operands = vec![
            (
                template.reads(),
                self.weight.offset,
                Argument::value(self.weight.base),
            ),
            (template.packs(), 0, Argument::Scratch(0)),
        ];
        let blocks = (groups * self.depth * padded).div_ceil(THREADS as usize);
        let launch = template.launch(&[PACK], blocks, operands)?;
        Some((launch, bytes.next_multiple_of(ALIGNMENT)))
    }
}

/// How a correlation is divided among blocks.
pub struct Division {
    /// Rows and columns of a block: pixels and channels.
    pub block: [usize; 2],
    /// Steps of the result's places, in each dimension, that one phase takes: 1 but for gradients of
    /// convolutions with strides.
    step: [usize; 3],
    /// Extents of a phase.
    tiled: [usize; 3],
    pub phases: usize,
    pub pixels: usize,
    pub chunks: usize,
    /// Tiles in the direction of pixels, and of channels.
    pub tiles: [usize; 2],
}

impl Division {
    /// Divides `task` among blocks. `choose` gives their sides, from rows and columns of a result and the
    /// number of results that are computed side by side.
    pub fn new(task: &Correlation<'_>, choose: impl FnOnce([usize; 2], usize) -> [usize; 2]) -> Self {
        let convolution = task.convolution;
        let step = if task.gradient { convolution.stride } else { [1; 3] };
        let tiled = [0, 1, 2].map(|axis| task.result.extents[axis].div_ceil(step[axis]));
        let phases = step.iter().product::<usize>();
        let pixels = task.result.images * tiled.iter().product::<usize>();
        let side_by_side = convolution.dims.groups * phases;
        let block = choose([pixels, task.out], side_by_side);
        let tiles = [pixels.div_ceil(block[0]), task.out.div_ceil(block[1])];
        let depth = task.depth * convolution.taps() / phases;
        let chunks = BLOCKS / (tiles[0] * tiles[1] * side_by_side);
        Self {
            block,
            step,
            tiled,
            phases,
            pixels,
            chunks: chunks.min(depth / LEAST_DEPTH).max(1),
            tiles,
        }
    }

    pub fn blocks(&self, groups: usize) -> usize {
        self.tiles[0] * self.tiles[1] * self.phases * groups * self.chunks
    }
}

/// The code of `task`.
pub fn generate(task: &Correlation<'_>) -> Option<KernelCode> {
    let convolution = task.convolution;
    let mut tile = None;
    let division = Division::new(task, |sides, side_by_side| {
        let chosen = Tile::new(sides, side_by_side, convolution.sum_bytes() > 4);
        tile.insert(chosen).block
    });
    let (pack, packed) = task.pack(convolution.dims.groups, task.out)?;
    let main = tiles(task, &division, tile?, packed)?;
    finish(task, &division, [pack, main], packed)
}

/// The code of a correlation whose weight is packed into `packed` bytes, behind which `main` leaves its
/// chunks' sums if there are several.
pub fn finish(
    task: &Correlation<'_>,
    division: &Division,
    [pack, main]: [Launch; 2],
    packed: usize,
) -> Option<KernelCode> {
    let results = task.result.elements();
    let (mut scratch, mut launches) = (packed, vec![pack, main]);
    if division.chunks > 1 {
        scratch += division.chunks * results * task.convolution.sum_bytes();
        let mut template = task.template(THREADS);
        template.result(task.result, true);
        launches.push(join(
            template,
            [division.chunks, results],
            &[PLACE, PART_AT],
            packed,
            task.result.base,
        )?);
    }
    let mut code = KernelCode::launches(launches);
    code.scratch = scratch;
    Some(code)
}

/// The launch of the tiles; partial sums are in working memory from byte `parts`.
fn tiles(task: &Correlation<'_>, division: &Division, tile: Tile, parts: usize) -> Option<Launch> {
    let (convolution, image, result) = (task.convolution, task.image, task.result);
    let is_half = convolution.dtype.size() == 2;
    let widths = if is_half { [8, 4] } else { [4, 4] };
    let fits = |width: &usize| image.has_vectors(*width, task.depth);
    let vector = widths.into_iter().find(fits).unwrap_or(1);
    let mut template = task.template(tile.threads());
    constants_of_the_slide(&mut template, task, division);
    template
        .spatial("IMAGE", image.extents)
        .spatial("RESULT", result.extents)
        .strides('X', image)
        .strides('Y', result)
        .ints(tile.constants())
        .ints([
            (
                "BK",
                if vector == 4 && convolution.dtype.size() == 2 {
                    16
                } else {
                    8
                },
            ),
            ("VECTOR", vector),
            ("PIXELS", division.pixels),
            ("PIXEL_TILES", division.tiles[0]),
            ("COLUMN_TILES", division.tiles[1]),
            ("PHASES", division.phases),
            ("CHUNKS", division.chunks),
            ("CHANNELS", result.channels),
            ("OUT_PADDED", task.out.next_multiple_of(4)),
        ])
        .bools([
            ("PIXELS_FIRST", vector == 1 && !image.is_channels_last()),
            ("STORE_FOURS", result.has_vectors(4, task.out)),
        ])
        .constant("Index", "PARTS", result.elements());
    let parts = match division.chunks {
        1 => Argument::Scratch(0),
        _ => Argument::Scratch(parts),
    };
    let operands = vec![
        (template.reads(), image.offset, Argument::value(image.base)),
        (template.reads(), 0, Argument::Scratch(0)),
        (template.writes(), 0, Argument::value(result.base)),
        (template.sums_written(), 0, parts),
    ];
    template.launch(
        &[SLIDE, CORRELATION],
        division.blocks(convolution.dims.groups),
        operands,
    )
}

/// How places of the result and taps of the window lead to places of the image.
pub fn constants_of_the_slide(template: &mut Template, task: &Correlation<'_>, division: &Division) {
    let convolution = task.convolution;
    let all = |of: &dyn Fn(usize) -> i64| [0, 1, 2].map(of);
    let dilation = |axis: usize| convolution.dilation[axis] as i64;
    // Taps that a phase meets, and how far apart in the image they are.
    let every = |axis: usize| division.step[axis] / gcd(division.step[axis], convolution.dilation[axis]);
    let (slide, origin, hop) = match task.gradient {
        false => (
            convolution.stride,
            all(&|axis| -(convolution.low[axis] as i64)),
            all(&dilation),
        ),
        true => (
            [1; 3],
            all(&|axis| convolution.low[axis] as i64),
            all(&|axis| -(every(axis) as i64 * dilation(axis) / division.step[axis] as i64)),
        ),
    };
    template
        .spatial("SLIDE", slide)
        .spatial("ORIGIN", origin)
        .spatial("HOP", hop)
        .spatial("STEP", division.step)
        .spatial("EVERY", [0, 1, 2].map(every))
        .spatial("TILED", division.tiled);
}
