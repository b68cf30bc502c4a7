//! Convolutions of images with any number of channels on tiles of AMX ([`crate::kernels::tile::amx`]), such
//! as the first layer of a network.
//!
//! Where channels do not fill tiles ([`super::moved`]) a pixel's window is written out: in a padded image
//! what a row of the kernel meets are neighbouring elements, which are copied as whole steps of the depth,
//! with zeros behind the last. A thread does so for some pixels at a time, which stay in L2 until they are
//! multiplied. Pixels of the result are counted without gaps, so that none is multiplied in vain.

use std::collections::BTreeSet;

use super::moved::{FEWEST_PIXELS, MOST_TAPS, PIXELS, WIDE, column_panels, panels_of_block};
use super::phases::{Padding, Phases};
use super::walk::{Class, Direction, Sides, Walk};
use super::{ConvSpec, ImageAxis, PixelPlace, Spatial};
use crate::isa::Isa;
use crate::kernels::element::Storage;
use crate::kernels::frame::Frame;
use crate::kernels::tile::amx::{self, EXTENT};
use crate::kernels::{Helper, KernelText, Width, indent, round_up};
use crate::policy::{MOVED_RESULT, TILE_DEPTH_THREADS};

/// Elements of a window in a step of a product: the pairs of a tile.
pub(super) const STEP: usize = 2 * EXTENT;

/// Halves behind a padded image that the last step of a window may read.
pub(super) const BEHIND: usize = STEP;

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
    let by_channels = spec.epilogue.axis(result) == Some(ImageAxis::Channel);
    let in_tiles = sides.result_channels.is_multiple_of(EXTENT) && !sides.channels.is_multiple_of(STEP);
    if !has_kind || !by_channels || !in_tiles || pixels < FEWEST_PIXELS {
        return None;
    }
    let walk = Walk::new(spec, direction);
    let is_reached = |class: &Class| class.taps.iter().all(|taps| !taps.is_empty());
    let lies_together = walk.tap_step[2] == 1 || g.kernel[2] == 1;
    if walk.spread != [1; 3] || !lies_together || !walk.classes.iter().all(is_reached) {
        return None;
    }
    let mut emitter = Emitter {
        spec,
        direction,
        phases: Phases::new([1; 3], walk.reach),
        sides,
        walk,
        helpers: BTreeSet::new(),
    };
    Some(emitter.kernel())
}

struct Emitter<'a> {
    spec: &'a ConvSpec<'a>,
    direction: Direction,
    sides: Sides,
    walk: Walk,
    /// The padded image, as its only phase.
    phases: Phases,
    helpers: BTreeSet<Helper>,
}

/// A class of pixels of the result, and where its memory lies in the workspace, in bytes.
struct Work<'a> {
    index: usize,
    class: &'a Class,
    weights: usize,
    /// What a thread writes: windows, then results.
    block: usize,
    /// Panels of [`PIXELS`] pixels of a block.
    group: usize,
    /// Rows of the kernel in depth and height.
    rows: usize,
    /// Elements of a row.
    run: usize,
}

impl Work<'_> {
    /// Pixels of an image.
    fn pixels(&self) -> usize {
        self.class.count.iter().product()
    }

    /// Steps of a row of the kernel.
    fn steps(&self) -> usize {
        self.run.div_ceil(STEP)
    }

    /// Pairs between windows: an odd number of lines, so that those of a tile do not fight for L1.
    fn pitch(&self) -> usize {
        ((self.rows * self.steps()) | 1) * EXTENT
    }

    /// Bytes of the windows of a block.
    fn window_bytes(&self) -> usize {
        self.group * PIXELS * self.pitch() * 4
    }
}

impl Emitter<'_> {
    fn kernel(&mut self) -> KernelText {
        let frame = self.spec.frame();
        let g = &self.spec.geometry;
        let serial = g.is_small();
        let run = frame.run(serial);
        let threads = if serial { 1 } else { frame.threads };
        let about = format!(
            "{} images of {:?} x {} channels, copied with padding, windows on tiles of AMX.",
            g.images, self.sides.extents, self.sides.channels
        );
        let padding = Padding {
            suffix: "pad",
            image: &self.spec.image,
            first: "0",
            count: g.images.to_string(),
            channels: self.sides.channels,
            extents: self.sides.extents,
            before: self.walk.before,
            phases: &self.phases,
            to: 0,
        };
        let mut source = frame.head(&about, "") + &padding.source(&frame);
        let mut calls = run(&format!("{}_pad", frame.name), g.images * self.phases.rows());
        let elements = g.images * self.phases.pixels() * self.sides.channels + BEHIND;
        let mut workspace = round_up(elements * 2, 64);
        let classes = self.walk.classes.clone();
        for (index, class) in classes.iter().enumerate() {
            let mut work = Work {
                index,
                class,
                weights: workspace,
                block: 0,
                group: 1,
                rows: class.taps[0].len() * class.taps[1].len(),
                run: class.taps[2].len() * self.sides.channels,
            };
            let panels = (g.images * work.pixels()).div_ceil(PIXELS);
            let of_panel = work.window_bytes() + PIXELS * self.pitch() * 4;
            let most = (MOVED_RESULT / of_panel).clamp(1, 8);
            work.group = panels_of_block(panels, most, threads);
            let weight = work.rows * work.steps() * STEP * self.sides.result_channels * 2;
            work.block = work.weights + round_up(weight, 64);
            workspace = work.block + threads * self.block_bytes(&work);
            source.push_str(&self.weights(&frame, &work));
            source.push_str(&self.products(&frame, &work));
            let columns = self.sides.result_channels.div_ceil(WIDE);
            calls.push_str(&run(
                &format!("{}_weights{index}", frame.name),
                columns * work.rows,
            ));
            let units = panels.div_ceil(work.group);
            calls.push_str(&run(&format!("{}_windows{index}", frame.name), units));
        }
        let mut kernel = frame.finish(source, &calls, workspace);
        kernel.helpers = std::mem::take(&mut self.helpers).into_iter().collect();
        kernel
    }

    /// Elements between rows of a block of results, as in [`super::moved`].
    fn pitch(&self) -> usize {
        self.sides.result_channels + EXTENT
    }

    fn block_bytes(&self, work: &Work<'_>) -> usize {
        round_up(work.window_bytes() + work.group * PIXELS * self.pitch() * 4, 64)
    }

    /// `name_weights<index>(ctx, begin, end, thread)`: the weight in tiles, some rows of the kernel for some
    /// channels of the result at a time, with zeros behind each row.
    fn weights(&self, frame: &Frame<'_>, work: &Work<'_>) -> String {
        let (channels, columns) = (self.sides.channels, self.sides.result_channels);
        let [_, height, width] = self.spec.geometry.kernel;
        let all = self.spec.geometry.taps();
        let [zs, ys, xs] = &work.class.taps;
        let rows: Vec<String> = zs
            .iter()
            .flat_map(|z| ys.iter().map(move |y| ((z * height + y) * width).to_string()))
            .collect();
        let taps: Vec<String> = xs.iter().map(usize::to_string).collect();
        // Distances in the weight of channels of the image and of the result.
        let [inner, outer] = match self.direction {
            Direction::Forward => [all, channels * all],
            Direction::InputGrad => [columns * all, all],
        };
        let body = format!(
            "static const int16_t rows[] = {{{}}}, taps[] = {{{}}};\nconst uint16_t *elements = {};\nfor (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t row = unit % {count}, \
             column = unit / {count} * {WIDE};\n    const int64_t wide = {columns} - column < {WIDE} ? {columns} - column : {WIDE};\n    uint16_t *packed = (uint16_t *)((bf16_pair *)(args->workspace + {}) + column * \
             {depth} + row * {steps} * {EXTENT} * wide);\n    for (int64_t e = 0; e < {steps} * {STEP}; e++) {{\n        uint16_t *to = packed + e / {STEP} * {STEP} * wide + e % {STEP} / 2 * {STEP} + e % 2;\n        \
             const uint16_t *from = elements + column * {outer} + (e < {run} ? rows[row] + taps[e / {channels}] + e % {channels} * {inner} : 0);\n        for (int64_t r = 0; r < wide; r++) to[r / {EXTENT} * {tile} + r % {EXTENT} * 2] = e < \
             {run} ? from[r * {outer}] : 0;\n    }}\n}}\n",
            rows.join(", "),
            taps.join(", "),
            self.spec.weight,
            work.weights,
            count = work.rows,
            steps = work.steps(),
            depth = work.rows * work.steps() * EXTENT,
            run = work.run,
            tile = STEP * EXTENT,
        );
        frame.part("The weight in tiles.", &format!("weights{}", work.index), &body)
    }

    /// `name_windows<index>(ctx, begin, end, thread)`: blocks of pixels of a class.
    fn products(&mut self, frame: &Frame<'_>, work: &Work<'_>) -> String {
        let class = work.class;
        let (channels, columns, pitch) = (self.sides.channels, self.sides.result_channels, self.pitch());
        let (steps, group, window) = (work.steps(), work.group, work.pitch());
        let [_, height, width] = self.phases.reach;
        let [oz, oy, ox] = class.origin;
        let [dz, dy, _] = self.walk.tap_step;
        let [sz, sy, sx] = self.walk.pixel_step;
        let rows: Vec<String> = (0..class.taps[0].len())
            .flat_map(|iz| (0..class.taps[1].len()).map(move |iy| (oz + iz * dz, oy + iy * dy)))
            .map(|(z, y)| (((z * height + y) * width + ox) * channels).to_string())
            .collect();
        let passing = self.spec.threads <= TILE_DEPTH_THREADS;
        let mut call = |wide: usize| {
            let helper = amx::moved(wide, passing);
            let text = format!(
                "{}(windows + tile * {}, {window}, none, 1, {}, columns, sums + tile * {} + column, {pitch});\n",
                helper.name,
                PIXELS * window,
                work.rows * steps,
                PIXELS * pitch,
            );
            self.helpers.insert(helper);
            text
        };
        let tiles = column_panels(columns, work.rows * steps * EXTENT, &mut call);
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
            "static const int64_t rows[] = {{{}}};\nstatic const int64_t none[1] = {{0}};\nconst bf16_pair *weights = (const bf16_pair *)(args->workspace + {});\nconst uint16_t *padded = (const uint16_t *)args->workspace;\nbf16_pair *windows = (bf16_pair \
             *)(args->workspace + {} + thread * (int64_t){});\nfloat *sums = (float *)(windows + {});\n{}{}for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t from = unit * {}, stop = from + {} < {all} ? from + {} : {all}, some \
             = (stop - from + {}) / {PIXELS};\n    {{\n        {}        for (int64_t p = from; p < stop; p++) {{\n            const uint16_t *window = padded + ((image * {} + z * {}) * {width} + y * {} + x * {sx}) * {channels};\n            \
             bf16_pair *to = windows + (p - from) * {window};\n            for (int64_t row = 0; row < {}; row++, to += {}) {{\n                const bf16_pair *of = (const bf16_pair *)(window + rows[row]);\n                for (int64_t s = 0; s < \
             {before}; s++) vu_store(to + s * {EXTENT}, vu_load(of + s * {EXTENT}));\n                vu_store(to + {before} * {EXTENT}, vu_load(of + {before} * {EXTENT}) & keep);\n            }}\n            {}        }}\n    }}\n{}    \
             {}    for (int64_t p = from; p < stop; p++) {{\n        for (int64_t c = 0; c < {columns}; c += {EXTENT}) {{\n            const vf sum = vf_load(sums + (p - from) * {pitch} + c);\n{}        }}\n        {}    }}\n}}\n{}",
            rows.join(", "),
            work.weights,
            work.block,
            self.block_bytes(work),
            group * PIXELS * window,
            keep(work.run - (steps - 1) * STEP),
            amx::BEGIN,
            group * PIXELS,
            group * PIXELS,
            group * PIXELS,
            PIXELS - 1,
            first_place("from", class.count),
            self.phases.reach[0] * height,
            height * sz,
            width * sy,
            work.rows,
            steps * EXTENT,
            next_place(class.count),
            indent(&tiles, 4),
            first_place("from", class.count),
            indent(&consume, 12),
            next_place(class.count),
            amx::END,
            all = self.spec.geometry.images * work.pixels(),
            before = steps - 1,
        );
        frame.part(
            "Windows, products, and results.",
            &format!("windows{}", work.index),
            &body,
        )
    }
}

/// Definition of `keep`: ones where the pairs of a step have the first `count` of its elements.
fn keep(count: usize) -> String {
    let ones = vec!["65535"; count];
    format!(
        "static const uint16_t ones[{STEP}] = {{{}}};\nconst vu keep = vu_load((const bf16_pair *)ones);\n",
        ones.join(", ")
    )
}

/// Definitions of `image`, `z`, `y` and `x` of the pixel of this number among those of all images.
pub(super) fn first_place(number: &str, [depth, height, width]: Spatial) -> String {
    format!(
        "int64_t x = {number} % {width}, y = {number} / {width} % {height}, z = {number} / {} % {depth}, image = {number} / {};\n",
        height * width,
        depth * height * width
    )
}

/// Statement that takes them to the next pixel.
pub(super) fn next_place([depth, height, width]: Spatial) -> String {
    format!("if (++x == {width} && (x = 0, ++y) == {height} && (y = 0, ++z) == {depth}) z = 0, image++;\n")
}
