//! The gradient of the weight of a convolution on tiles of AMX, for images with any number of channels: what
//! [`super::windows`] is to [`super::moved`].
//!
//! It is a product whose depth are the pixels of all results, so pairs are of neighbouring pixels, of their
//! windows as of the gradient of the output. The windows are columns: panels of neighbouring elements of each
//! row of the kernel (those behind the last are computed and left out).
//!
//! Threads share slices of the depth, whose number depends on the shape alone. A slice's windows and
//! gradients are written out for some pixels at a time, which stay in L2. The sums of the slices are added up
//! in order. (A last pair of pixels without a second has the first one twice, the gradient of one of which is
//! zero.)

use super::moved::{FEWEST_PIXELS, MOST_TAPS};
use super::phases::{Padding, Phases, copy_pixel, has_halves};
use super::windows::{BEHIND, STEP, first_place, next_place};
use super::{ImageAxis, WeightGradSpec};
use crate::isa::Isa;
use crate::kernels::frame::Frame;
use crate::kernels::tile::amx::{self, EXTENT};
use crate::kernels::{KernelText, Width, call_part, indent, round_up};
use crate::policy::{DEEP_SLICES, WINDOW_PAIRS, WINDOW_SLICE, WINDOW_SUMS};

/// Columns, and channels of the output, in a panel.
const PANEL: usize = 2 * EXTENT;

/// Pixels of a block of pairs.
const BLOCK: usize = STEP;

/// Most elements of the weight for one channel of the output, which a thread orders on its stack: 64 KiB.
const MOST_ORDERED: usize = 16 << 10;

/// The kernel, if the convolution is of this kind.
pub(super) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<KernelText> {
    let g = &spec.geometry;
    let pixels = g.images * g.output.iter().product::<usize>();
    let has_window = g.groups == 1 && (2..=MOST_TAPS).contains(&g.taps());
    let lies_together = g.dilation[2] == 1 || g.kernel[2] == 1;
    let in_tiles = !g.in_channels.is_multiple_of(PANEL) && g.out_channels.is_multiple_of(PANEL);
    let fits = has_halves(&spec.input, spec.storage)
        && has_halves(&spec.output_grad, spec.storage)
        && spec.output_grad.contiguous == Some(ImageAxis::Channel)
        && g.in_channels * g.taps() <= MOST_ORDERED;
    let is_kind = isa.has_tiles() && has_window && lies_together && in_tiles && fits;
    (is_kind && pixels >= FEWEST_PIXELS).then(|| Emitter::new(spec).kernel())
}

struct Emitter<'a> {
    spec: &'a WeightGradSpec<'a>,
    /// The padded image, as its only phase.
    phases: Phases,
    /// Pixels of all results.
    pixels: usize,
    /// Rows of the kernel in depth and height.
    rows: usize,
    /// Panels of 16 elements of such a row.
    of_row: usize,
    /// Pairs of panels.
    columns: usize,
    /// Pixels that are written out at a time.
    some: usize,
    /// Pixels of a slice, and slices.
    slice: usize,
    slices: usize,
    /// Bytes of what a thread writes out: windows, then gradients.
    windows: usize,
    gradients: usize,
    /// Places in the workspace, in bytes, of that, of the sums, and its end.
    block: usize,
    sums: usize,
    end: usize,
}

impl<'a> Emitter<'a> {
    fn new(spec: &'a WeightGradSpec<'a>) -> Self {
        let g = &spec.geometry;
        let padded =
            [0, 1, 2].map(|d| (g.output[d] - 1) * g.stride[d] + (g.kernel[d] - 1) * g.dilation[d] + 1);
        let phases = Phases::new([1; 3], padded);
        let pixels = g.images * g.output.iter().product::<usize>();
        let rows = g.kernel[0] * g.kernel[1];
        let of_row = (g.kernel[2] * g.in_channels).div_ceil(EXTENT);
        let columns = (rows * of_row).div_ceil(2);
        let of_pixel = 2 * columns * EXTENT * 2;
        let some = (WINDOW_PAIRS / of_pixel / BLOCK * BLOCK).clamp(BLOCK, 16 * BLOCK);
        let bytes = columns * PANEL * g.out_channels * 4;
        let slices = DEEP_SLICES
            .min(WINDOW_SUMS / bytes)
            .min(pixels / WINDOW_SLICE)
            .max(1);
        let slice = round_up(pixels.div_ceil(slices), BLOCK);
        let slices = pixels.div_ceil(slice);
        let (windows, gradients) = (some * of_pixel, some * g.out_channels * 2);
        let threads = if g.is_small() { 1 } else { spec.threads };
        let elements = g.images * phases.pixels() * g.in_channels + BEHIND;
        let block = round_up(elements * 2, 64);
        let sums = block + threads * round_up(windows + 2 * gradients, 64);
        Self {
            spec,
            phases,
            pixels,
            rows,
            of_row,
            columns,
            some,
            slice,
            slices,
            windows,
            gradients,
            block,
            sums,
            end: sums + round_up(slices * bytes, 64),
        }
    }

    fn kernel(self) -> KernelText {
        let frame = self.spec.frame();
        let (g, name) = (&self.spec.geometry, frame.name);
        let about = format!(
            "{} images of {:?} x {} channels, windows in pairs of pixels, {} slices of {}, tiles of AMX.",
            g.images, g.input, g.in_channels, self.slices, self.slice
        );
        let image = Padding {
            suffix: "pad_input",
            image: &self.spec.input,
            first: "0",
            count: g.images.to_string(),
            channels: g.in_channels,
            extents: g.input,
            before: g.pad.map(|pad| pad as i64),
            phases: &self.phases,
            to: 0,
        };
        let source =
            frame.head(&about, "") + &image.source(&frame) + &self.slice(&frame) + &self.order(&frame);
        let serial = g.is_small() || frame.threads == 1;
        let parts = [
            ("pad_input", g.images * self.phases.rows()),
            ("slices", self.slices),
            ("order", g.out_channels),
        ];
        let calls: String = parts
            .iter()
            .map(|(part, count)| call_part(serial, &format!("{name}_{part}"), count))
            .collect();
        let mut kernel = frame.finish(source, &calls, self.end);
        kernel.helpers = vec![amx::beside()];
        kernel
    }

    /// `name_slices(ctx, begin, end, thread)`: the sums of some slices.
    fn slice(&self, frame: &Frame<'_>) -> String {
        let g = &self.spec.geometry;
        let (channels, outputs, some) = (g.in_channels, g.out_channels, self.some);
        let [_, height, width] = self.phases.reach;
        let [sz, sy, sx] = g.stride;
        let [dz, dy, _] = g.dilation;
        let rows: Vec<String> = (0..g.kernel[0])
            .flat_map(|z| (0..g.kernel[1]).map(move |y| (z * dz, y * dy)))
            .map(|(z, y)| ((z * height + y) * width * channels).to_string())
            .collect();
        let copy = copy_pixel(&self.spec.output_grad, outputs);
        let panel = some / 2 * EXTENT;
        let body = format!(
            "static const int64_t rows[] = {{{}}};\nconst uint16_t *padded = (const uint16_t *)args->workspace;\nbf16_pair *windows = (bf16_pair *)(args->workspace + {} + thread * (int64_t){});\nuint16_t *gradients = (uint16_t *)((char *)windows + \
             {});\nbf16_pair *turned = (bf16_pair *)((char *)gradients + {});\n{}for (int64_t slice = begin; slice < end; slice++) {{\n    const int64_t slice_begin = slice * {}, slice_end = slice_begin + {} < {pixels} ? slice_begin + {} : {pixels};\n    float *sums = (float *)(args->workspace \
             + {}) + slice * {};\n    {}    for (int64_t from = slice_begin; from < slice_end; from += {some}) {{\n        const int64_t stop = from + {some} < slice_end ? from + {some} : slice_end, blocks = (stop - from + {}) / {BLOCK};\n        const uint16_t *window[2] = {{padded, \
             padded}};\n        for (int64_t p = 0; p < blocks * {BLOCK}; p++) {{\n            uint16_t *to = gradients + p * {outputs};\n            if (from + p < stop) {{\n                window[p % 2] = padded + ((image * {} + z * {}) * {width} + y * {} + x * {sx}) * \
             {channels};\n{}                {}            }} else {{\n                window[p % 2] = window[1 - p % 2];\n                __builtin_memset(to, 0, {outputs} * sizeof *to);\n            }}\n            if (p % 2 == 0) continue;\n            \
             bf16_pair *pairs = windows + p / 2 * {EXTENT};\n            for (int64_t row = 0; row < {}; row++)\n                for (int64_t e = 0; e < {}; e += {EXTENT}, pairs += {panel}) vu_store(pairs, vu_zip_bf16(window[0] + rows[row] + e, window[1] + rows[row] + e));\n        \
             }}\n        for (int64_t block = 0; block < blocks; block++)\n            for (int64_t c = 0; c < {outputs}; c += {EXTENT}) {{\n                vu line[{EXTENT}];\n                for (int l = 0; l < {EXTENT}; l++) {{\n                    const uint16_t *low = gradients \
             + (block * {BLOCK} + 2 * l) * {outputs} + c;\n                    line[l] = vu_zip_bf16(low, low + {outputs});\n                }}\n                vu_transpose(line);\n                bf16_pair *to = turned + ((c / {PANEL} * {} + block) * {PANEL} + c % {PANEL}) * \
             {EXTENT};\n                KILN_UNROLL for (int l = 0; l < {EXTENT}; l++) vu_store(to + l * {EXTENT}, line[l]);\n            }}\n        for (int64_t column = 0; column < {columns}; column++)\n            for (int64_t row = 0; row < {}; row++)\n                \
             {}(turned + row * {}, windows + column * 2 * {panel}, {}, blocks * {EXTENT}, sums + (row * {columns} + column) * {}, {PANEL}, from > slice_begin);\n    }}\n}}\n{}",
            rows.join(", "),
            self.block,
            round_up(self.windows + 2 * self.gradients, 64),
            self.windows,
            self.gradients,
            amx::BEGIN,
            self.slice,
            self.slice,
            self.slice,
            self.sums,
            self.columns * PANEL * outputs,
            first_place("slice_begin", g.output),
            BLOCK - 1,
            self.phases.reach[0] * height,
            height * sz,
            width * sy,
            indent(&copy, 16),
            next_place(g.output),
            self.rows,
            self.of_row * EXTENT,
            some / BLOCK,
            outputs / PANEL,
            amx::beside().name,
            some / BLOCK * PANEL * EXTENT,
            // Of an odd number of panels the last meets itself.
            match self.rows * self.of_row % 2 {
                0 => panel.to_string(),
                _ => format!("column < {} ? {panel} : 0", self.columns - 1),
            },
            PANEL * PANEL,
            amx::END,
            pixels = self.pixels,
            columns = self.columns,
        );
        frame.part("Windows, gradients, and products.", "slices", &body)
    }

    /// `name_order(ctx, begin, end, thread)`: the sums of some channels of the output, of all slices, in the
    /// order of the weight.
    fn order(&self, frame: &Frame<'_>) -> String {
        let g = &self.spec.geometry;
        let (taps, columns) = (g.taps(), self.columns);
        let all = g.in_channels * taps;
        let consume = |width| {
            indent(
                &(self.spec.consume)(width, &format!("(o * {all} + i)"), "value"),
                8,
            )
        };
        let body = format!(
            "const float *sums = (const float *)(args->workspace + {});\nfor (int64_t o = begin; o < end; o++) {{\n    float line[{all}], sum[{}];\n    for (int64_t column = 0; column < {columns}; column++)\n        for (int64_t c = 0; c < {PANEL}; c += {EXTENT}) {{\n            const \
             float *from = sums + ((o / {PANEL} * {columns} + column) * {PANEL} + o % {PANEL}) * {PANEL} + c;\n            vf value = vf_load(from);\n            for (int64_t slice = 1; slice < {}; slice++) value += vf_load(from + slice * {});\n            vf_store(sum + column * {PANEL} + c, \
             value);\n        }}\n    for (int64_t row = 0; row < {}; row++)\n        for (int64_t x = 0; x < {width}; x++)\n            for (int64_t c = 0; c < {channels}; c++) line[c * {taps} + row * {width} + x] = sum[row * {} + x * {channels} + c];\n    int64_t i = 0;\n    for (; i + {EXTENT} <= {all}; i += {EXTENT}) {{\n        \
             const vf value = vf_load(line + i);\n{}    }}\n    for (; i < {all}; i++) {{\n        const float value = line[i];\n{}    }}\n}}\n",
            self.sums,
            columns * PANEL,
            self.slices,
            columns * PANEL * g.out_channels,
            self.rows,
            self.of_row * EXTENT,
            consume(Width::Vector),
            consume(Width::Scalar),
            width = g.kernel[2],
            channels = g.in_channels,
        );
        frame.part("Sums in the order of the weight.", "order", &body)
    }
}
