//! The gradient of the weight of a convolution with a window on tiles of AMX, as [`super::moved`] does the
//! convolution: a product over all pixels for each kernel element, in which the pixels of the image are
//! moved.
//!
//! The depth of these products are pixels. So pairs are of neighbouring pixels: those of the image twice,
//! because a kernel element that moves pixels by an odd number needs other pairs than one that moves them by
//! an even one. With a stride the image is in phases, of which the gradient of the output is like one. Where
//! the padded image has pixels that no result belongs to, the gradient of the output is zero. (So infinity or
//! NaN in the image also reaches kernel elements that never meet it, of the same channel, whose others have
//! it.)
//!
//! Some images are taken at a time, and some pixels of those: their pairs stay in L2 while all kernel
//! elements and channels pass. Sums are added up in the workspace. Threads share kernel elements and
//! channels; where those are few, because the weight is small, each takes slices of the images instead, does
//! with them all that there is to do, and waits for no other. The sums of slices, whose number depends on the
//! shape alone, are added up in order.

use super::moved::{FEWEST_PIXELS, MOST_TAPS, are_used};
use super::phases::{Padding, Phases, has_halves};
use super::{ImageAxis, WeightGradSpec};
use crate::isa::Isa;
use crate::kernels::frame::Frame;
use crate::kernels::tile::amx::{self, EXTENT};
use crate::kernels::{KernelText, Width, call_part, indent, round_up};
use crate::policy::{DEEP_SLICES, DEEP_TILE_SLICES, MOVED_IMAGES, MOVED_SLICE, MOVED_SUMS, TILE_DEPTH};

/// Channels of the image and of the output in a panel.
const PANEL: usize = 2 * EXTENT;

/// Pixels of a block of pairs.
const BLOCK: usize = 2 * EXTENT;

/// Most elements of the weight for one channel of the output, which a thread orders on its stack: 256 KiB.
const MOST_ORDERED: usize = 64 << 10;

/// The kernel, if the convolution is of this kind.
pub(super) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<KernelText> {
    let g = &spec.geometry;
    let pixels = g.images * g.output.iter().product::<usize>();
    let images = [&spec.input, &spec.output_grad];
    let has_window = g.groups == 1 && (2..=MOST_TAPS).contains(&g.taps());
    let has_kind = isa.has_tiles() && has_window && g.in_channels * g.taps() <= MOST_ORDERED;
    let in_tiles = [g.in_channels, g.out_channels]
        .iter()
        .all(|channels| channels.is_multiple_of(PANEL));
    let fits = images
        .iter()
        .all(|image| has_halves(image, spec.storage) && image.contiguous == Some(ImageAxis::Channel));
    let is_kind = has_kind && in_tiles && fits && pixels >= FEWEST_PIXELS;
    if !is_kind {
        return None;
    }
    let emitter = Emitter::new(spec);
    are_used(g.output.iter().product(), emitter.image.pixels()).then(|| emitter.kernel())
}

struct Emitter<'a> {
    spec: &'a WeightGradSpec<'a>,
    /// Phases of the padded image, and the one of the gradient.
    image: Phases,
    gradient: Phases,
    /// Phase of each kernel element, and by how many pixels it is moved there.
    places: Vec<(usize, usize)>,
    /// Images of a slice, and slices: one of all images where threads share the weight.
    slice: usize,
    slices: usize,
    /// Images that are taken at a time.
    images: usize,
    /// Blocks of pairs of so many images.
    blocks: usize,
    /// Rows of pairs of the image.
    rows: usize,
    /// Places in the workspace, in bytes: the padded image and gradient, their pairs, the end of these, the
    /// sums of all slices, and its end.
    padded: [usize; 2],
    pairs: [usize; 2],
    own: usize,
    sums: usize,
    end: usize,
}

impl<'a> Emitter<'a> {
    fn new(spec: &'a WeightGradSpec<'a>) -> Self {
        let g = &spec.geometry;
        let [_, height, width] = g.kernel;
        let [dz, dy, dx] = g.dilation;
        let padded =
            [0, 1, 2].map(|d| (g.output[d] - 1) * g.stride[d] + (g.kernel[d] - 1) * g.dilation[d] + 1);
        let image = Phases::new(g.stride, padded);
        let gradient = Phases::new([1; 3], image.reach);
        let pixels = image.pixels();
        let places: Vec<_> = (0..g.taps())
            .map(|t| image.place([t / (height * width) * dz, t / width % height * dy, t % width * dx]))
            .collect();
        // Each pixel as it is, and in pairs; those of the image twice.
        let each = pixels * (6 * image.all() * g.in_channels + 4 * g.out_channels);
        let sums = g.weight_len() * 4;
        let slice = g.images.div_ceil(DEEP_SLICES);
        let slices = match sums <= MOVED_SUMS && each <= MOVED_SLICE && g.images >= DEEP_TILE_SLICES {
            true => g.images.div_ceil(slice),
            false => 1,
        };
        let (slice, near) = match slices {
            1 => (g.images, MOVED_IMAGES),
            _ => (slice, MOVED_SLICE),
        };
        let images = (near / each).clamp(1, slice);
        let blocks = (images * pixels).div_ceil(BLOCK);
        let last = places
            .iter()
            .map(|(phase, moved)| phase * images * pixels + moved)
            .max();
        let rows = blocks * EXTENT + last.unwrap_or(0) / 2 + 1;
        let mut end = 0;
        let mut region = |bytes: usize| {
            let at = end;
            end += round_up(bytes, 64);
            at
        };
        let all = images * pixels;
        let padded = [
            region(all * image.all() * g.in_channels * 2),
            region(all * g.out_channels * 2),
        ];
        let pairs = [
            region(2 * rows * g.in_channels * 4),
            region(blocks * EXTENT * g.out_channels * 4),
        ];
        // Each thread has its own of these where it takes slices.
        let threads = if slices > 1 && !g.is_small() {
            spec.threads
        } else {
            1
        };
        let own = end;
        let sums = threads * own;
        let end = sums + slices * round_up(g.weight_len() * 4, 64);
        Self {
            spec,
            image,
            gradient,
            places,
            slice,
            slices,
            images,
            blocks,
            rows,
            padded,
            pairs,
            own,
            sums,
            end,
        }
    }

    fn kernel(self) -> KernelText {
        let frame = self.spec.frame();
        let (g, name) = (&self.spec.geometry, frame.name);
        let about = format!(
            "{} images of {:?} x {} channels, {} slices, {} at a time, in pairs of pixels, tiles of AMX.",
            g.images, g.input, g.in_channels, self.slices, self.images
        );
        let image = Padding {
            suffix: "pad_input",
            image: &self.spec.input,
            first: "args->first_image",
            count: format!("args->pixels / {}", self.image.pixels()),
            channels: g.in_channels,
            extents: g.input,
            before: g.pad.map(|pad| pad as i64),
            phases: &self.image,
            to: self.padded[0],
        };
        let gradient = Padding {
            suffix: "pad_output",
            image: &self.spec.output_grad,
            channels: g.out_channels,
            extents: g.output,
            before: [0; 3],
            phases: &self.gradient,
            to: self.padded[1],
            count: image.count.clone(),
            ..image
        };
        let source = frame.head(
            &about,
            "    float *sums;\n    int64_t first_image, pixels;\n    int adds;\n",
        ) + &image.source(&frame)
            + &gradient.source(&frame)
            + &self.zip(&frame)
            + &self.turn(&frame)
            + &self.products(&frame);
        let serial = g.is_small() || frame.threads == 1;
        let rows = |phases: &Phases| format!("count * {}", phases.rows());
        let parts = [
            ("pad_input", rows(&self.image)),
            ("pad_output", rows(&self.gradient)),
            ("zip", self.rows.div_ceil(EXTENT).to_string()),
            ("turn", format!("(pixels + {}) / {BLOCK}", BLOCK - 1)),
            ("products", (g.taps() * g.in_channels / PANEL).to_string()),
        ];
        // All that is done with the images from `begin` to `end`, whose arguments are `args`.
        let images = |args: &str, begin: &str, end: &str, call: &dyn Fn(&str, &str) -> String| -> String {
            let each: String = parts
                .iter()
                .map(|(part, count)| call(&format!("{name}_{part}"), count))
                .collect();
            format!(
                "for (int64_t from = {begin}; from < {end}; from += {some}) {{\n    const int64_t count = {end} - from < {some} ? {end} - from : {some}, pixels = count * {};\n    \
                 {args}.first_image = from;\n    {args}.pixels = pixels;\n    {args}.adds = from > {begin};\n{each}}}\n",
                self.image.pixels(),
                some = self.images,
            )
        };
        let (sliced, products) = match self.slices {
            1 => {
                let shared = |part: &str, count: &str| call_part(serial, part, count);
                let images = images("args", "0", &g.images.to_string(), &shared);
                let sums = format!("args.sums = (float *)(workspace + {});\n", self.sums);
                (String::new(), indent(&(sums + &images), 4))
            }
            _ => {
                let alone = |part: &str, count: &str| format!("    {part}(&own, 0, {count}, thread);\n");
                let images = images("own", "first_image", "last_image", &alone);
                (
                    self.take_slices(&frame, &images),
                    call_part(serial, &format!("{name}_slices"), self.slices),
                )
            }
        };
        let source = source + &sliced + &self.order(&frame);
        let calls = products + &call_part(serial, &format!("{name}_order"), g.out_channels);
        let mut kernel = frame.finish(source, &calls, self.end);
        kernel.helpers = vec![amx::beside()];
        kernel
    }

    /// `name_slices(ctx, begin, end, thread)`: all that is done with the images of some slices.
    fn take_slices(&self, frame: &Frame<'_>, images: &str) -> String {
        let (name, slice) = (frame.name, self.slice);
        frame.part(
            "Slices of the images, each done by one thread in memory of its own.",
            "slices",
            &format!(
                "struct {name}_args own = *args;\nown.workspace = args->workspace + thread * (int64_t){};\nfor (int64_t slice = begin; slice < end; slice++) {{\n    const int64_t first_image = slice * {slice}, last_image = first_image + {slice} < {all} ? \
                 first_image + {slice} : {all};\n    own.sums = (float *)(args->workspace + {} + slice * {});\n{}}}\n",
                self.own,
                self.sums,
                self.sum_bytes(),
                indent(images, 4),
                all = self.spec.geometry.images,
            ),
        )
    }

    /// Bytes of the sums of a slice.
    fn sum_bytes(&self) -> usize {
        round_up(self.spec.geometry.weight_len() * 4, 64)
    }

    /// `name_zip(ctx, begin, end, thread)`: pairs of neighbouring pixels of the image, 16 rows at a time:
    /// panels of 16 channels of the pairs that begin at even pixels, then of those that begin at odd ones.
    fn zip(&self, frame: &Frame<'_>) -> String {
        let channels = self.spec.geometry.in_channels;
        let panels = channels / EXTENT;
        let body = format!(
            "static const uint16_t none[{EXTENT}] = {{0}};\nconst uint16_t *padded = (const uint16_t *)(args->workspace + {});\nbf16_pair *pairs = (bf16_pair *)(args->workspace + {});\nconst int64_t pixels = {} * args->pixels;\nfor \
             (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t stop = (unit + 1) * {EXTENT} < {rows} ? (unit + 1) * {EXTENT} : {rows};\n    for (int64_t panel = 0; panel < \
             {panels}; panel++)\n        for (int64_t q = unit * {EXTENT}; q < stop; q++) {{\n            const uint16_t *at[3];\n            for (int i = 0; i < 3; i++) at[i] = 2 * q + i < \
             pixels ? padded + (2 * q + i) * {channels} + panel * {EXTENT} : none;\n            vu_store(pairs + (panel * {rows} + q) * {EXTENT}, vu_zip_bf16(at[0], at[1]));\n            \
             vu_store(pairs + (({panels} + panel) * {rows} + q) * {EXTENT}, vu_zip_bf16(at[1], at[2]));\n        }}\n}}\n",
            self.padded[0],
            self.pairs[0],
            self.image.all(),
            rows = self.rows,
        );
        frame.part("Pairs of pixels.", "zip", &body)
    }

    /// `name_turn(ctx, begin, end, thread)`: blocks of pairs of pixels of the gradient, as panels of rows of
    /// A: for each 32 channels the blocks, each with a row of 16 pairs for each channel.
    fn turn(&self, frame: &Frame<'_>) -> String {
        let channels = self.spec.geometry.out_channels;
        let body = format!(
            "static const uint16_t none[{EXTENT}] = {{0}};\nconst uint16_t *padded = (const uint16_t *)(args->workspace + {});\nbf16_pair *pairs = (bf16_pair *)(args->workspace + {});\nfor \
             (int64_t block = begin; block < end; block++)\n    for (int64_t c = 0; c < {channels}; c += {EXTENT}) {{\n        vu line[{EXTENT}];\n        for (int l = 0; l < {EXTENT}; l++) {{\n            \
             const int64_t pixel = block * {BLOCK} + 2 * l;\n            const uint16_t *low = pixel < args->pixels ? padded + pixel * {channels} + c : none;\n            const uint16_t *high = pixel \
             + 1 < args->pixels ? padded + (pixel + 1) * {channels} + c : none;\n            line[l] = vu_zip_bf16(low, high);\n        }}\n        vu_transpose(line);\n        bf16_pair *to = \
             pairs + ((c / {PANEL} * {} + block) * {PANEL} + c % {PANEL}) * {EXTENT};\n        KILN_UNROLL for (int l = 0; l < {EXTENT}; l++) vu_store(to + l * {EXTENT}, line[l]);\n    }}\n",
            self.padded[1], self.pairs[1], self.blocks,
        );
        frame.part("Pairs of pixels of the gradient, turned.", "turn", &body)
    }

    /// `name_products(ctx, begin, end, thread)`: adds up the products of some kernel elements and panels of
    /// channels of the image, which are columns, with all channels of the output.
    fn products(&self, frame: &Frame<'_>) -> String {
        let g = &self.spec.geometry;
        let list = |of: fn(&(usize, usize)) -> usize| -> String {
            let numbers: Vec<_> = self.places.iter().map(|place| of(place).to_string()).collect();
            numbers.join(", ")
        };
        let (panels, rows) = (g.in_channels / PANEL, g.out_channels / PANEL);
        let chunk = TILE_DEPTH / EXTENT;
        let body = format!(
            "static const int64_t phases[] = {{{}}}, moves[] = {{{}}};\nconst bf16_pair *image = (const bf16_pair *)(args->workspace + {}), *gradient = (const bf16_pair *)(args->workspace + {});\nfloat *sums \
             = args->sums;\nconst int64_t blocks = (args->pixels + {}) / {BLOCK};\n{}for (int64_t from = 0; from < blocks; from += {chunk}) {{\n    const int64_t some = \
             blocks - from < {chunk} ? blocks - from : {chunk};\n    for (int64_t unit = begin; unit < end; unit++) {{\n        const int64_t move = phases[unit / {panels}] * args->pixels + moves[unit / {panels}], panel = unit % \
             {panels} * 2 + (move & 1) * {};\n        const bf16_pair *columns = image + (panel * {pairs} + move / 2 + from * {EXTENT}) * {EXTENT};\n        for (int64_t row = 0; row < {rows}; \
             row++)\n            {}(gradient + (row * {} + from) * {}, columns, {}, some * {EXTENT}, sums + (unit * {rows} + row) * {}, {PANEL}, from > 0 || args->adds);\n    }}\n}}\n{}",
            list(|place| place.0),
            list(|place| place.1),
            self.pairs[0],
            self.pairs[1],
            BLOCK - 1,
            amx::BEGIN,
            g.in_channels / EXTENT,
            amx::beside().name,
            self.blocks,
            PANEL * EXTENT,
            self.rows * EXTENT,
            PANEL * PANEL,
            amx::END,
            pairs = self.rows,
        );
        frame.part("Products.", "products", &body)
    }

    /// `name_order(ctx, begin, end, thread)`: the sums of some channels of the output in the order of the
    /// weight.
    fn order(&self, frame: &Frame<'_>) -> String {
        let g = &self.spec.geometry;
        let (taps, panels, rows) = (g.taps(), g.in_channels / PANEL, g.out_channels / PANEL);
        let all = g.in_channels * taps;
        let consume = (self.spec.consume)(Width::Vector, &format!("(o * {all} + i)"), "value");
        let body = format!(
            "const float *sums = (const float *)(args->workspace + {});\nfor (int64_t o = begin; o < end; o++) {{\n    float line[{all}];\n    for (int64_t unit = 0; unit < {}; unit++) {{\n        \
             const float *from = sums + ((unit * {rows} + o / {PANEL}) * {PANEL} + o % {PANEL}) * {PANEL};\n        float *to = line + unit % {panels} * {} + unit / {panels};\n        for (int64_t c = 0; c < \
             {PANEL}; c += {EXTENT}) {{\n            vf value = vf_load(from + c);\n            for (int64_t slice = 1; slice < {}; slice++) value += vf_load(from + slice * {} + c);\n            vf_store_stride(to + c * {taps}, {taps}, value);\n        }}\n    }}\n    for (int64_t i = 0; i < {all}; i += {EXTENT}) {{\n        const vf value = vf_load(line + i);\n{}    }}\n}}\n",
            self.sums,
            taps * panels,
            PANEL * taps,
            self.slices,
            self.sum_bytes() / 4,
            indent(&consume, 8),
        );
        frame.part("Sums in the order of the weight.", "order", &body)
    }
}
