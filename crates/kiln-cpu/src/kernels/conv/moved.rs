//! Convolutions with a window on tiles of AMX ([`crate::kernels::tile::amx`]).
//!
//! The image is copied with zeros around it. Its pixels then lie one after the other, so that what a kernel
//! element multiplies for some neighbouring pixels of the result are as many neighbouring pixels of the
//! image, moved by the distance of that element:
//!
//! ```text
//! result  p p+1 p+2 ..        =  sum over kernel elements t
//! image     p + move(t), p + move(t) + 1, ..   times   weight(t)
//! ```
//!
//! A tile of A is 16 such pixels, each with 16 pairs of channels, and is read in place. Pixels go on from one
//! row of the padded image to the next; those between the rows of the result are computed, too, and left out.
//!
//! With a stride what neighbours in the result read are no neighbours in the image. So its copy is in phases
//! ([`super::phases`]), in each of which they are; the distance of a kernel element leads to its phase, too.

use std::collections::BTreeSet;

use super::phases::{Padding, Phases, number};
use super::walk::{Class, Direction, Sides, Walk};
use super::{ConvSpec, ImageAxis, PixelPlace};
use crate::isa::Isa;
use crate::kernels::element::Storage;
use crate::kernels::frame::Frame;
use crate::kernels::tile::amx::{self, EXTENT};
use crate::kernels::{Helper, KernelText, Width, indent, round_up};
use crate::policy::{MOVED_RESULT, TILE_DEPTH_THREADS};

/// Channels of a step: the pairs of a tile.
const CHANNELS: usize = 2 * EXTENT;

/// Pixels of the result that a tile function computes.
pub(super) const PIXELS: usize = amx::MAX_ROWS;

/// Columns of a panel of the weight.
pub(super) const WIDE: usize = 2 * EXTENT;

/// Fewest pixels of the result: with fewer, reordering the weight takes as long as the products.
pub(super) const FEWEST_PIXELS: usize = 128;

/// Whether enough of the pixels that are multiplied belong to the result. Of small images most lie between
/// rows or fill up a panel: of 4x4 pixels half are left, of 2x2 an eighth. Winograd's algorithm in f32, which
/// wastes none, has a third to a half of the rate of tiles.
pub(super) fn are_used(result: usize, multiplied: usize) -> bool {
    5 * result >= 2 * multiplied
}

/// Most kernel elements: reordering them takes 2 KiB of a thread's stack for each.
pub(super) const MOST_TAPS: usize = 64;

/// The forward convolution or the input gradient, if it is of this kind.
pub(super) fn correlate(spec: &ConvSpec<'_>, direction: Direction, isa: Isa) -> Option<KernelText> {
    let g = &spec.geometry;
    let result = match direction {
        Direction::Forward => g.output,
        Direction::InputGrad => g.input,
    };
    let sides = Sides::new(spec, direction);
    let pixels = g.images * result.iter().product::<usize>();
    let has_window = g.groups == 1 && (2..=MOST_TAPS).contains(&g.taps());
    let has_kind = isa.has_tiles() && spec.storage == Storage::BF16 && has_window;
    let by_channels = spec.image.contiguous == Some(ImageAxis::Channel)
        && spec.epilogue.axis(result) == Some(ImageAxis::Channel);
    let in_tiles = sides.channels.is_multiple_of(CHANNELS) && sides.result_channels.is_multiple_of(EXTENT);
    if !has_kind || !by_channels || !in_tiles || sides.channels == 0 || pixels < FEWEST_PIXELS {
        return None;
    }
    let walk = Walk::new(spec, direction);
    // There is something to read for each pixel of the result.
    let is_reached = |class: &Class| class.taps.iter().all(|taps| !taps.is_empty());
    if walk.spread != [1; 3] || !walk.classes.iter().all(is_reached) {
        return None;
    }
    let phases = Phases::new(walk.pixel_step, walk.reach);
    let multiplied: usize = walk
        .classes
        .iter()
        .map(|class| PIXELS * panels(class, &phases))
        .sum();
    if !are_used(result.iter().product(), multiplied) {
        return None;
    }
    let mut emitter = Emitter {
        spec,
        direction,
        sides,
        walk,
        phases,
        helpers: BTreeSet::new(),
    };
    Some(emitter.kernel())
}

/// Panels of pixels of a phase from the first to the last that a class needs.
fn panels(class: &Class, phases: &Phases) -> usize {
    number(class.count.map(|count| count - 1), phases.reach) / PIXELS + 1
}

/// Panels of pixels of a block, at most so many, where threads share them all: the busiest thread is done
/// first. To bring the weight near takes a block as long as two panels.
pub(super) fn panels_of_block(all: usize, most: usize, threads: usize) -> usize {
    let time = |group: &usize| all.div_ceil(*group).div_ceil(threads) * (group + 2);
    (1..=most).min_by_key(time).unwrap_or(1)
}

/// Loops over the panels of columns of the weight, of `depth` pairs each, and `some` tiles of pixels, around
/// the `call` of a function of tiles of one or two vectors.
pub(super) fn column_panels(columns: usize, depth: usize, call: &mut dyn FnMut(usize) -> String) -> String {
    let full = columns / WIDE * WIDE;
    let mut panels = |from: usize, to: usize, wide: usize| match from < to {
        true => format!(
            "for (int64_t column = {from}; column < {to}; column += {}) {{\n    const bf16_pair *columns = weights + column * {depth};\n    for (int64_t tile = 0; tile < some; tile++)\n        {}}}\n",
            wide * EXTENT,
            call(wide)
        ),
        false => String::new(),
    };
    panels(0, full, 2) + &panels(full, columns, 1)
}

struct Emitter<'a> {
    spec: &'a ConvSpec<'a>,
    direction: Direction,
    sides: Sides,
    walk: Walk,
    /// Those of the copies.
    phases: Phases,
    helpers: BTreeSet<Helper>,
}

/// A class of pixels of the result, and where its memory lies in the workspace, in bytes.
struct Work<'a> {
    index: usize,
    class: &'a Class,
    weights: usize,
    results: usize,
    /// Panels of [`PIXELS`] pixels of an image.
    panels: usize,
    /// Panels of a block.
    group: usize,
}

impl Emitter<'_> {
    fn kernel(&mut self) -> KernelText {
        let frame = self.spec.frame();
        let g = &self.spec.geometry;
        let serial = g.is_small();
        let run = frame.run(serial);
        let threads = if serial { 1 } else { frame.threads };
        let about = format!(
            "{} images of {:?} x {} channels, copied with padding, tiles of AMX.",
            g.images, self.sides.extents, self.sides.channels
        );
        let mut source = frame.head(&about, "") + &self.padding().source(&frame);
        let mut calls = run(&format!("{}_pad", frame.name), g.images * self.phases.rows());
        let mut workspace = self.image_bytes();
        let classes = self.walk.classes.clone();
        for (index, class) in classes.iter().enumerate() {
            let panels = panels(class, &self.phases);
            let most = (MOVED_RESULT / (PIXELS * self.pitch() * 4)).clamp(1, 8);
            let group = panels_of_block(g.images * panels, most, threads);
            let weights = workspace;
            workspace += round_up(
                self.taps(class).len() * self.sides.channels * self.sides.result_channels * 2,
                64,
            );
            let work = Work {
                index,
                class,
                weights,
                results: workspace,
                panels,
                group,
            };
            workspace += threads * self.block_bytes(group);
            source.push_str(&self.weights(&frame, &work));
            source.push_str(&self.tiles(&frame, &work));
            let blocks = self.sides.channels / CHANNELS * self.sides.result_channels.div_ceil(WIDE);
            calls.push_str(&run(&format!("{}_weights{index}", frame.name), blocks));
            let units = (g.images * panels).div_ceil(group);
            calls.push_str(&run(&format!("{}_tiles{index}", frame.name), units));
        }
        let mut kernel = frame.finish(source, &calls, workspace);
        kernel.helpers = std::mem::take(&mut self.helpers).into_iter().collect();
        kernel
    }

    /// The image with zeros around it, at the start of the workspace.
    fn padding(&self) -> Padding<'_> {
        Padding {
            suffix: "pad",
            image: &self.spec.image,
            first: "0",
            count: self.spec.geometry.images.to_string(),
            channels: self.sides.channels,
            extents: self.sides.extents,
            before: self.walk.before,
            phases: &self.phases,
            to: 0,
        }
    }

    /// Bytes of the padded images, with as many pixels after the last as a panel may read.
    fn image_bytes(&self) -> usize {
        let pixels = self.spec.geometry.images * self.phases.all() * self.phases.pixels();
        round_up((pixels + PIXELS) * self.sides.channels * 2, 64)
    }

    /// Elements between rows of a block of results: a vector more than the channels, so that rows do not
    /// fight for the same lines of L1.
    fn pitch(&self) -> usize {
        self.sides.result_channels + EXTENT
    }

    fn block_bytes(&self, group: usize) -> usize {
        round_up(group * PIXELS * self.pitch() * 4, 64)
    }

    /// Number of each kernel element of a class, and how many pixels of the copies it is moved by.
    fn taps(&self, class: &Class) -> Vec<(usize, usize)> {
        let [_, height, width] = self.spec.geometry.kernel;
        let [oz, oy, ox] = class.origin;
        let [dz, dy, dx] = self.walk.tap_step;
        let mut taps = Vec::new();
        for (iz, z) in class.taps[0].iter().enumerate() {
            for (iy, y) in class.taps[1].iter().enumerate() {
                for (ix, x) in class.taps[2].iter().enumerate() {
                    let (phase, pixels) = self.phases.place([oz + iz * dz, oy + iy * dy, ox + ix * dx]);
                    let before = phase * self.spec.geometry.images * self.phases.pixels();
                    taps.push(((z * height + y) * width + x, before + pixels));
                }
            }
        }
        taps
    }

    /// `name_weights<index>(ctx, begin, end, thread)`: the weight in tiles, some channels of the image and of
    /// the result at a time. A panel of columns has its kernel elements one after the other, each with its
    /// channels in steps as of a panel of B of a product.
    fn weights(&self, frame: &Frame<'_>, work: &Work<'_>) -> String {
        let (channels, columns) = (self.sides.channels, self.sides.result_channels);
        let all = self.spec.geometry.taps();
        let taps = self.taps(work.class);
        let numbers: Vec<String> = taps.iter().map(|(number, _)| number.to_string()).collect();
        // Distances in the weight of channels of the image and of the result.
        let [inner, outer] = match self.direction {
            Direction::Forward => [all, channels * all],
            Direction::InputGrad => [columns * all, all],
        };
        let steps = channels / CHANNELS;
        let body = format!(
            "static const int16_t numbers[] = {{{}}};\nconst uint16_t *elements = {};\nfor (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t step = unit % {steps}, \
             column = unit / {steps} * {WIDE};\n    const int64_t wide = {columns} - column < {WIDE} ? {columns} - column : {WIDE};\n    /* Kernel elements of each pair of channels and \
             each column, which lie together in the weight. */\n    bf16_pair pairs[{EXTENT} * {WIDE} * {all}];\n    for (int64_t r = 0; r < wide; r++)\n        for (int64_t l = 0; l < {EXTENT}; \
             l++) {{\n            const uint16_t *low = elements + (step * {CHANNELS} + 2 * l) * {inner} + (column + r) * {outer}, *high = low + {inner};\n            bf16_pair *to = pairs + (l * {WIDE} + \
             r) * {all};\n            for (int64_t t = 0; t < {all}; t++) to[t] = low[t] | (uint32_t)high[t] << 16;\n        }}\n    bf16_pair *packed = (bf16_pair *)(args->workspace + {}) + column * \
             {depth} + step * {EXTENT} * wide;\n    for (int64_t t = 0; t < {count}; t++, packed += {} * wide)\n        for (int64_t l = 0; l < {EXTENT}; l++)\n            for (int64_t r = 0; r < wide; \
             r += {EXTENT})\n                vu_store(packed + r * {EXTENT} + l * {EXTENT}, (vu)vf_load_stride((const float *)pairs + (l * {WIDE} + r) * {all} + numbers[t], {all}));\n}}\n",
            numbers.join(", "),
            self.spec.weight,
            work.weights,
            channels / 2,
            depth = taps.len() * channels / 2,
            count = taps.len(),
        );
        frame.part("The weight in tiles.", &format!("weights{}", work.index), &body)
    }

    /// `name_tiles<index>(ctx, begin, end, thread)`: blocks of pixels of a class.
    fn tiles(&mut self, frame: &Frame<'_>, work: &Work<'_>) -> String {
        let Work {
            class, panels, group, ..
        } = *work;
        let (channels, columns, pitch) = (self.sides.channels, self.sides.result_channels, self.pitch());
        let taps = self.taps(class);
        let moves: Vec<String> = taps
            .iter()
            .map(|(_, pixels)| (pixels * channels / 2).to_string())
            .collect();
        let all = self.spec.geometry.images * panels;
        let passing = self.spec.threads <= TILE_DEPTH_THREADS;
        let mut call = |wide: usize| {
            let helper = amx::moved(wide, passing);
            let text = format!(
                "{}(pixels + ((from + tile) / {panels} * {} + (from + tile) % {panels} * {PIXELS}) * {}, {}, moves, {}, {}, columns, sums + tile * {} + column, {pitch});\n",
                helper.name,
                self.phases.pixels(),
                channels / 2,
                channels / 2,
                taps.len(),
                channels / CHANNELS,
                PIXELS * pitch,
            );
            self.helpers.insert(helper);
            text
        };
        let tiles = column_panels(columns, taps.len() * channels / 2, &mut call);
        let [depth, height, width] = class.count;
        let [_, padded_height, padded_width] = self.phases.reach;
        let [z, y, x] = class.place();
        let consume = (self.spec.epilogue.consume)(
            &PixelPlace {
                width: Width::Vector,
                image: "image",
                at: [&z, &y, &x],
                channel: "c",
            },
            "sum",
        );
        let body = format!(
            "static const int64_t moves[] = {{{}}};\nconst bf16_pair *weights = (const bf16_pair *)(args->workspace + {}), *pixels = (const bf16_pair *)args->workspace;\nfloat *sums = (float *)(args->workspace + {} + thread * \
             (int64_t){});\n{}for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t from = unit * {group}, some = {all} - from < {group} ? {all} - from : {group};\n{}    for (int64_t r = 0; r < some * \
             {PIXELS}; r++) {{\n        const int64_t tile = from + r / {PIXELS}, image = tile / {panels}, p = tile % {panels} * {PIXELS} + r % {PIXELS};\n        const int64_t x = p % \
             {padded_width}, y = p / {padded_width} % {padded_height}, z = p / {};\n        if (x >= {width} || y >= {height} || z >= {depth}) continue;\n        for (int64_t c = 0; c < {columns}; c += {EXTENT}) {{\n            const vf sum = vf_load(sums + r * {pitch} + c);\n{}        }}\n    }}\n}}\n{}",
            moves.join(", "),
            work.weights,
            work.results,
            self.block_bytes(group),
            amx::BEGIN,
            indent(&tiles, 4),
            padded_height * padded_width,
            indent(&consume, 12),
            amx::END,
        );
        frame.part("Products, and results.", &format!("tiles{}", work.index), &body)
    }
}
