//! Convolutions by tiles on tensor cores: elements of 16 bits, and f32 where products may round their
//! operands to 10 bits of fraction.
//!
//! A block copies each step of the depth into shared memory 16 bytes at a time, so the image's channels
//! must come in fours of f32 or in eights of 16 bits. The few channels of a picture are padded with zeros
//! in working memory first ([`padded`]).

use kiln_graph::{DType, Value};

use super::correlation::{self, Correlation, Division, SLIDE, constants_of_the_slide};
use super::tile::BLOCKS;
use super::transfer::transfer;
use super::weight::{self, PLACES, chunks};
use super::{ALIGNMENT, Convolution, THREADS, Weight};
use crate::convolutions::Task;
use crate::emit::image::Image;
use crate::emit::{Argument, Call, EmitOptions, KernelCode, Launch};

const TENSOR: &str = include_str!("../../kernels/cuda/convolution/tensor.cuh");
const TILE: &str = include_str!("../../kernels/cuda/convolution/tensor_tile.cuh");
const PACK: &str = include_str!("../../kernels/cuda/convolution/pack_tensor.cuh");
const CORRELATION: &str = include_str!("../../kernels/cuda/convolution/correlation_tensor.cuh");
const WEIGHT: &str = include_str!("../../kernels/cuda/convolution/weight_tensor.cuh");

/// Warps of a block. Few warps with large parts of a tile read less from shared memory than many with small
/// ones.
const WARPS: usize = 4;

/// Words of the depth that a step multiplies: elements of f32, or pairs of 16 bits.
const STEP: usize = 32;

/// An image with more channels is not copied to pad them.
const FEW_CHANNELS: usize = 16;

/// The fewest channels of a result that are worth a tile: others leave most of its columns empty.
const LEAST_CHANNELS: usize = 16;

/// A tile of results that a block computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TensorTile {
    /// Rows and columns.
    block: [usize; 2],
}

impl TensorTile {
    /// The sides of a tile for results of `rows` by `columns`, of which `count` are computed side by side.
    fn sides([rows, columns]: [usize; 2], count: usize) -> [usize; 2] {
        let blocks = |[m, n]: [usize; 2]| rows.div_ceil(m) * columns.div_ceil(n) * count;
        if columns <= 32 {
            return [128, 32];
        }
        // No column of the tile is left over, and there are enough tiles.
        let left_over = (1..=64).contains(&(columns % 128));
        let n = if left_over || blocks([128, 128]) < BLOCKS {
            64
        } else {
            128
        };
        let m = if n == 128 || blocks([128, n]) >= BLOCKS {
            128
        } else {
            64
        };
        [m, n]
    }

    /// The sides of a tile for the gradient of a weight of `channels` by `columns`. Chunks of pixels fill
    /// the device, whatever the tile is.
    fn sides_of_weight(channels: usize, columns: usize) -> [usize; 2] {
        [channels, columns].map(|side| if side <= 64 { 64 } else { 128 })
    }

    /// Steps of the depth that shared memory holds at a time: as many as two blocks of a multiprocessor
    /// have room for on every device with these tensor cores.
    fn stages(self) -> usize {
        if self.block == [128, 128] { 2 } else { 3 }
    }

    /// The launch of a kernel whose step takes `stage` elements of shared memory.
    fn shared(self, mut launch: Launch, stage: usize) -> Option<Launch> {
        launch.shared_bytes = u32::try_from(self.stages() * stage * size_of::<f32>()).ok()?;
        Some(launch)
    }

    /// The constants of a template whose step takes `stage` elements of shared memory.
    fn constants(self, stage: usize) -> [(&'static str, usize); 6] {
        let [m, n] = self.block;
        let row_warps = if n == 32 { WARPS } else { 2 };
        [
            ("BM", m),
            ("BN", n),
            ("ROW_WARPS", row_warps),
            ("COLUMN_WARPS", WARPS / row_warps),
            ("STAGES", self.stages()),
            ("STAGE", stage),
        ]
    }
}

impl Convolution<'_> {
    /// Whether tensor cores may compute it.
    pub(super) fn has_tensor_types(&self, options: &EmitOptions<'_>) -> bool {
        let operands = match self.dtype {
            DType::F32 => options.tf32,
            DType::F16 | DType::BF16 => true,
            _ => false,
        };
        operands && options.capability >= (8, 0)
    }

    /// Whether tensor cores may compute it, and both images have their channels in whole vectors.
    fn has_tensor_tiles(&self, options: &EmitOptions<'_>) -> bool {
        let whole = |group: &usize| group.is_multiple_of(self.vector());
        self.has_tensor_types(options) && self.group.iter().all(whole)
    }

    /// Elements that are copied together.
    fn vector(&self) -> usize {
        16 / self.dtype.size()
    }

    /// Elements of a word.
    fn per_word(&self) -> usize {
        4 / self.dtype.size()
    }

    /// The constants that all templates for tensor cores take.
    pub(super) fn types(&self) -> [(&'static str, usize); 2] {
        [
            ("PER_WORD", self.per_word()),
            ("IS_BF16", usize::from(self.dtype == DType::BF16)),
        ]
    }
}

/// The code of a correlation; none if it has no tiles of this kind.
pub fn correlation(task: &Correlation<'_>, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let convolution = task.convolution;
    let fits =
        convolution.has_tensor_tiles(options) && task.image.has_vectors(convolution.vector(), task.depth);
    if !fits || task.out < LEAST_CHANNELS {
        return None;
    }
    let division = Division::new(task, TensorTile::sides);
    let (pack, packed) = pack(task)?;
    let main = tiles(task, &division, packed)?;
    correlation::finish(task, &division, [pack, main], packed)
}

/// The launch that packs and rounds the weight, and the bytes of working memory that it fills.
fn pack(task: &Correlation<'_>) -> Option<(Launch, usize)> {
    let convolution = task.convolution;
    let mut template = task.template(THREADS);
    template.ints(convolution.types());
    let operands = vec![
        (
            template.reads(),
            task.weight.offset,
            Argument::value(task.weight.base),
        ),
        (template.packs(), 0, Argument::Scratch(0)),
    ];
    let rows = convolution.dims.groups * task.out * task.depth;
    let templates = [TENSOR, PACK];
    let launch = template.launch(&templates, rows.div_ceil(THREADS as usize), operands)?;
    let bytes = rows * convolution.taps() * convolution.dtype.size();
    Some((launch, bytes.next_multiple_of(ALIGNMENT)))
}

/// The launch of the tiles; partial sums are in working memory from byte `parts`.
fn tiles(task: &Correlation<'_>, division: &Division, parts: usize) -> Option<Launch> {
    let (image, result) = (task.image, task.result);
    let tile = TensorTile {
        block: division.block,
    };
    let stage = (tile.block[0] + tile.block[1]) * (STEP + 4);
    let mut template = task.template(32 * WARPS as u32);
    constants_of_the_slide(&mut template, task, division);
    template
        .spatial("IMAGE", image.extents)
        .spatial("RESULT", result.extents)
        .strides('X', image)
        .strides('Y', result)
        .ints(task.convolution.types())
        .ints(tile.constants(stage))
        .ints([
            ("PIXELS", division.pixels),
            ("PIXEL_TILES", division.tiles[0]),
            ("COLUMN_TILES", division.tiles[1]),
            ("PHASES", division.phases),
            ("CHUNKS", division.chunks),
            ("CHANNELS", result.channels),
        ])
        .bools([("STORE_PAIRS", result.has_vectors(2, task.out))])
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
    let blocks = division.blocks(task.convolution.dims.groups);
    let launch = template.launch(&[SLIDE, TENSOR, TILE, CORRELATION], blocks, operands)?;
    tile.shared(launch, stage)
}

/// The code of a weight's gradient; none if it has no tiles of this kind.
pub fn weight(convolution: &Convolution<'_>, out: Value, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let (x, y) = (&convolution.x, &convolution.y);
    let [depth, channels] = convolution.group;
    let vector = convolution.vector();
    let fits = convolution.has_tensor_tiles(options)
        && x.has_vectors(vector, depth)
        && y.has_vectors(vector, channels);
    let columns = depth * convolution.taps();
    if !fits || channels < LEAST_CHANNELS || columns < LEAST_CHANNELS {
        return None;
    }
    let tile = TensorTile {
        block: TensorTile::sides_of_weight(channels, columns),
    };
    let stage = (tile.block[0] + 8 + tile.block[1] + 8) * STEP;
    let tiles = [channels.div_ceil(tile.block[0]), columns.div_ceil(tile.block[1])];
    let blocks = tiles[0] * tiles[1] * convolution.dims.groups;
    let [count, share] = chunks(y.pixels(), blocks, STEP * convolution.per_word());
    let mut template = convolution.template(32 * WARPS as u32);
    template
        .spatial("IMAGE", x.extents)
        .spatial("PIXELS", y.extents)
        .strides('X', x)
        .strides('G', y)
        .ints(convolution.types())
        .ints(tile.constants(stage))
        .ints([
            ("DEPTH", depth),
            ("OUT", channels),
            ("COLUMNS", columns),
            ("PIXELS", y.pixels()),
            ("SHARE", share),
            ("CHUNKS", count),
            ("ROW_TILES", tiles[0]),
            ("COLUMN_TILES", tiles[1]),
        ])
        .constant("Index", "G_PIXEL", y.pixel().unwrap_or(0))
        .constant("Index", "PARTS", y.channels * columns);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), y.offset, Argument::value(y.base)),
        (template.writes(), 0, Argument::value(out)),
        (template.sums_written(), 0, Argument::Scratch(0)),
    ];
    let launch = template.launch(&[PLACES, TENSOR, TILE, WEIGHT], blocks * count, operands)?;
    weight::finish(convolution, tile.shared(launch, stage)?, count, out)
}

/// The code of a convolution, or of its weight's gradient, whose image has fewer channels than a vector:
/// image and weight are padded in working memory. None for the gradient of such an image, which hardly any
/// model asks for.
pub fn padded(
    convolution: &Convolution<'_>,
    weight: &Image,
    task: Task,
    options: &EmitOptions<'_>,
) -> Option<KernelCode> {
    let vector = convolution.vector();
    let channels = convolution.x.channels.next_multiple_of(vector);
    let bases = [convolution.x.base, weight.base, convolution.y.base];
    let distinct = bases[0] != bases[1] && bases[1] != bases[2] && bases[0] != bases[2];
    let has_few_channels = channels != convolution.x.channels && convolution.x.channels < FEW_CHANNELS;
    let fits =
        convolution.dims.groups == 1 && convolution.has_tensor_types(options) && has_few_channels && distinct;
    if !fits || task == Task::InputGradient {
        return None;
    }
    // The same convolution of whole vectors of channels, as if image and weight lay so in memory.
    let x = whole(&convolution.x, channels, true);
    let w = whole(weight, channels, false);
    let inner = Convolution {
        x: x.clone(),
        y: convolution.y.clone(),
        group: [channels, convolution.group[1]],
        ..*convolution
    };
    let code = match task {
        Task::WeightGradient => self::weight(&inner, w.base, options)?,
        _ => {
            let [e0, e1, e2] = w.places;
            let dimensions = convolution.dims.stride.len();
            let weight = Weight {
                base: w.base,
                offset: 0,
                strides: [w.image, w.channel]
                    .into_iter()
                    .chain([e0, e1, e2][3 - dimensions..].iter().copied())
                    .collect(),
            };
            correlation(&Correlation::new(&inner, &weight, false), options)?
        }
    };
    // The padded tensors are in front of the working memory of the tiles.
    let size = |image: &Image, dtype: DType| (image.elements() * dtype.size()).next_multiple_of(ALIGNMENT);
    let weight_dtype = match task {
        Task::WeightGradient => convolution.result_dtype,
        _ => convolution.dtype,
    };
    let copied = size(&x, convolution.dtype);
    let all = copied + size(&w, weight_dtype);
    let place = |argument: &mut Argument| match argument {
        Argument::Scratch(at) => *at += all,
        argument if *argument == Argument::value(x.base) => *argument = Argument::Scratch(0),
        argument if *argument == Argument::value(w.base) => *argument = Argument::Scratch(copied),
        _ => {}
    };
    let mut calls = vec![Call::Launch(transfer(
        convolution.dtype,
        [&convolution.x, &x],
        0,
        true,
    )?)];
    let weight_copy = transfer(weight_dtype, [weight, &w], copied, task != Task::WeightGradient)?;
    let mut weight_copy = Some(Call::Launch(weight_copy));
    if task != Task::WeightGradient {
        calls.extend(weight_copy.take());
    }
    for call in code.calls {
        let Call::Launch(mut launch) = call else {
            return None;
        };
        launch.arguments.iter_mut().for_each(place);
        calls.push(Call::Launch(launch));
    }
    calls.extend(weight_copy);
    Some(KernelCode {
        calls,
        scratch: all + code.scratch,
    })
}

/// `image` with `channels` channels without gaps: the channels last, or behind the images as in a weight.
fn whole(image: &Image, channels: usize, last: bool) -> Image {
    let [_, height, width] = image.extents.map(|extent| extent as i64);
    let (count, plane) = (channels as i64, image.plane() as i64);
    let step = if last { count } else { 1 };
    Image {
        offset: 0,
        channels,
        image: count * plane,
        places: [height * width * step, width * step, step],
        channel: if last { 1 } else { plane },
        ..image.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::TensorTile;

    #[test]
    fn warps_have_whole_products_and_shared_memory_suffices() {
        let mut blocks = Vec::new();
        for columns in [16, 32, 36, 64, 68, 128, 132, 192, 512] {
            for rows in [1, 6272, 100_000] {
                blocks.push(TensorTile::sides([rows, columns], 1));
                blocks.push(TensorTile::sides_of_weight(columns, 9 * columns));
            }
        }
        for block in blocks {
            let tile = TensorTile { block };
            for stage in [(block[0] + block[1]) * 36, (block[0] + block[1] + 16) * 32] {
                let [_, _, (_, row_warps), (_, column_warps), (_, stages), _] = tile.constants(stage);
                assert_eq!(block[0] % (16 * row_warps), 0, "{block:?}");
                assert_eq!(block[1] % (16 * column_warps), 0, "{block:?}");
                // Devices from 8.0 on give a block at least so much.
                assert!(stages * stage * 4 <= 99 * 1024, "{block:?}");
            }
        }
    }
}
