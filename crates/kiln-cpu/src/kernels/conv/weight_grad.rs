//! The gradient of a convolution with respect to its weight.
//!
//! The gradient is a product of the output's gradient (rows: output channels) and the input (columns: a run
//! of kernel elements and input channels), summed over all pixels. Both are read in place: neighbouring
//! pixels are neighbouring steps of the depth. Pixels are taken in chunks that fit in L2. The workspace
//! keeps the sums between chunks; at the end they are brought into the order of the weight, where the
//! caller consumes them.

use std::collections::BTreeSet;

use super::image::{self, Padded};
use super::parts::Parts;
use super::weights::Panels;
use super::{
    ImageAxis, PixelPlace, WeightGradSpec, correlate, depthwise, im2col, moved_weight, narrow_groups_weight,
    planar, windows_weight, winograd,
};
use crate::isa::Isa;
use crate::kernels::element::{Element, Storage};
use crate::kernels::gemm::{self, Axis, Epilogue, GemmSpec, Operand};
use crate::kernels::tile::{self, Access, Tile};
use crate::kernels::{Helper, KernelText, Width, indent, round_up};
use crate::policy::{SMALL_WEIGHT, WEIGHT_GRADIENT_L2};

/// Channels whose gradients are brought into order at a time.
const ORDER_BLOCK: usize = 64;
/// Sums that a thread brings into order on its stack.
const MOST_IN_ORDER: usize = 16 << 10;

/// The two images, as tiles read them.
pub(super) struct Images {
    pub input: Padded,
    pub output: Padded,
    /// Bytes of the copies.
    pub bytes: usize,
}

impl Images {
    /// `any_run`: whether runs of channels of any length may be read in place.
    pub fn new(spec: &WeightGradSpec<'_>, lanes: usize, any_run: bool) -> Self {
        let g = &spec.geometry;
        let request = |suffix, offset, channels, extents| image::Request {
            prefix: &spec.name,
            suffix,
            offset,
            images: g.images,
            channels,
            extents,
            before: [0; 3],
            reach: g.output,
            spread: [1; 3],
            params: &spec.params,
            lanes,
            element: spec.storage.element(),
            in_place: true,
        };
        let reach =
            [0, 1, 2].map(|d| (g.output[d] - 1) * g.stride[d] + (g.kernel[d] - 1) * g.dilation[d] + 1);
        let input = image::padded(
            &spec.input,
            &image::Request {
                before: g.pad.map(|pad| pad as i64),
                reach,
                in_place: any_run || g.group_in().is_multiple_of(lanes),
                ..request("_input", 0, g.in_channels, g.input)
            },
        );
        let bytes = input.copy.as_ref().map_or(0, |copy| copy.bytes);
        let output = image::padded(
            &spec.output_grad,
            &request("_output", bytes, g.out_channels, g.output),
        );
        let bytes = bytes + output.copy.as_ref().map_or(0, |copy| copy.bytes);
        Self { input, output, bytes }
    }

    fn copies(&self) -> impl Iterator<Item = &image::Copy> {
        [&self.input, &self.output]
            .into_iter()
            .filter_map(|image| image.copy.as_ref())
    }

    /// Definitions of the functions that make the copies.
    pub fn sources(&self) -> String {
        self.copies()
            .map(|copy| format!("{}{}", copy.row_source, copy.source))
            .collect()
    }

    /// Calls of them.
    pub fn calls(&self, run: &dyn Fn(&str, usize) -> String) -> String {
        self.copies().map(|copy| run(&copy.function, copy.rows)).collect()
    }
}

pub(super) fn emit(spec: &WeightGradSpec<'_>, isa: Isa) -> KernelText {
    let element = spec.storage.element();
    let lanes = element.lanes(isa);
    if let Some(kernel) = without_pixels(spec, lanes) {
        return kernel;
    }
    if let Some(product) = as_product(spec, isa) {
        return gemm::emit(product, isa);
    }
    let tiles =
        moved_weight::weight_gradient(spec, isa).or_else(|| windows_weight::weight_gradient(spec, isa));
    if let Some(kernel) = tiles {
        return kernel;
    }
    let special = || {
        planar::weight_gradient(spec, isa)
            .or_else(|| im2col::weight_gradient(spec, isa))
            .or_else(|| winograd::weight_gradient(spec, isa))
            .or_else(|| depthwise::weight_gradient(spec, isa))
    };
    if element == Element::F32
        && let Some(kernel) = special()
    {
        return kernel;
    }
    if spec.geometry.is_narrow(lanes) {
        return narrow_groups_weight::weight_gradient(spec, isa);
    }
    Chunked::new(spec, isa).kernel()
}

/// The kernel of a gradient that has no elements, or is a sum of no pixels.
fn without_pixels(spec: &WeightGradSpec<'_>, lanes: usize) -> Option<KernelText> {
    let (frame, g) = (spec.frame(), &spec.geometry);
    if g.weight_len() == 0 {
        return Some(frame.finish(frame.head("No elements.", ""), "", 0));
    }
    if g.flops() == 0 {
        let source = frame.head("No pixels.", "") + &consume_rows(spec, "0.0f", 0, lanes);
        let calls = frame.run(true)(&format!("{}_finish", frame.name), g.out_channels);
        return Some(frame.finish(source, &calls, 0));
    }
    None
}

/// The columns of the product: runs of neighbouring elements of the input, for each kernel element or for
/// whole rows of them.
struct Runs {
    /// Whether the kernel elements of a row are one run, because nothing lies between them.
    merged: bool,
    /// Elements of a run.
    length: usize,
    /// Runs of a kernel row.
    of_row: usize,
    /// Runs of a group.
    of_group: usize,
}

impl Runs {
    fn new(spec: &WeightGradSpec<'_>, input: &Padded) -> Self {
        let g = &spec.geometry;
        let [kz, ky, kx] = g.kernel;
        let merged = g.groups == 1 && g.dilation[2] == 1 && input.strides[3] == g.in_channels as i64;
        let (length, of_row) = if merged {
            (kx * g.group_in(), 1)
        } else {
            (g.group_in(), kx)
        };
        Self {
            merged,
            length,
            of_row,
            of_group: kz * ky * of_row,
        }
    }
}

/// The general kernel: images are read in chunks that stay in L2, and sums are kept between chunks.
struct Chunked<'a> {
    spec: &'a WeightGradSpec<'a>,
    isa: Isa,
    element: Element,
    lanes: usize,
    images: Images,
    runs: Runs,
    panels: Panels,
    /// The rows of the product, output channels of a group.
    row_panels: Parts,
    /// Images of a chunk.
    chunk_images: usize,
    /// Lines of each of them.
    chunk_lines: usize,
}

impl<'a> Chunked<'a> {
    fn new(spec: &'a WeightGradSpec<'a>, isa: Isa) -> Self {
        let (g, element) = (&spec.geometry, spec.storage.element());
        let lanes = element.lanes(isa);
        let images = Images::new(spec, lanes, false);
        let runs = Runs::new(spec, &images.input);
        let vectors = runs.length.div_ceil(lanes).min(2);
        let (of_input, of_output) = (images.input.strides[2], images.output.strides[2]);
        let line_bytes = ((of_output + g.stride[1] as i64 * of_input).max(1)) as usize * element.bytes();
        Self {
            panels: Panels::new(runs.length, vectors, lanes),
            row_panels: Parts::of(g.group_out(), tile::max_rows(isa, vectors)),
            chunk_images: (WEIGHT_GRADIENT_L2 / (line_bytes * g.output[1])).clamp(1, g.images),
            chunk_lines: (WEIGHT_GRADIENT_L2 / line_bytes).clamp(1, g.output[1]),
            spec,
            isa,
            element,
            lanes,
            images,
            runs,
        }
    }

    fn kernel(&self) -> KernelText {
        let (frame, g) = (self.spec.frame(), &self.spec.geometry);
        let runs = g.groups * self.runs.of_group;
        let sums_at = self.images.bytes;
        let (calls, tiles) = self.tile_calls();
        let source = frame.head(&self.about(), "")
            + &self.images.sources()
            + &frame.part(
                "Tiles of the gradient, all pixels of each.",
                "sum",
                &self.chunks(&self.tile(&calls)),
            )
            + &consume_rows(self.spec, &self.sum_of_element(), sums_at, self.lanes);
        let run = frame.run(g.is_small());
        let mut calls = self.images.calls(&run);
        let units = runs * self.panels.count * self.row_panels.count;
        calls.push_str(&run(&format!("{}_sum", frame.name), units));
        calls.push_str(&run(&format!("{}_finish", frame.name), g.out_channels));
        let sums = runs * g.group_out() * self.panels.padded();
        let bytes = sums_at + round_up(sums * self.element.bytes(), 64);
        let mut kernel = frame.finish(source, &calls, bytes);
        kernel.helpers = tiles.into_iter().collect();
        kernel
    }

    /// The comment at the beginning of the source.
    fn about(&self) -> String {
        let g = &self.spec.geometry;
        let groups = match g.groups {
            1 => String::new(),
            groups => format!(" in {groups} groups"),
        };
        format!(
            "{} images of {:?} x {} channels to {}{groups}; chunks of {} images, {} lines.",
            g.images, g.input, g.in_channels, g.out_channels, self.chunk_images, self.chunk_lines
        )
    }

    /// The loops over chunks and, in each, over the thread's tiles, which `tile` computes.
    fn chunks(&self, tile: &str) -> String {
        let g = &self.spec.geometry;
        format!(
            "{real} *sums = ({real} *)(args->workspace + {sums_at});\nint fresh = 1;\nfor (int64_t image = 0; image < {n}; image += {some_images})\nfor \
             (int64_t pz = 0; pz < {depth}; pz++)\nfor (int64_t py = 0; py < {height}; py += {lines}) {{\n    const int64_t images = {n} - image < \
             {some_images} ? {n} - image : {some_images};\n    const int64_t lines = {height} - py < {lines} ? {height} - py : {lines};\n    for \
             (int64_t unit = begin; unit < end; unit++) {{\n{}    }}\n    fresh = 0;\n}}\n",
            indent(tile, 8),
            real = self.element.ctype(),
            sums_at = self.images.bytes,
            some_images = self.chunk_images,
            lines = self.chunk_lines,
            n = g.images,
            depth = g.output[0],
            height = g.output[1],
        )
    }

    /// Finds the operands and the sums of tile `unit`, and computes it by `calls`.
    fn tile(&self, calls: &str) -> String {
        let g = &self.spec.geometry;
        let [xn, xz, xy, xx] = self.images.input.strides;
        let [yn, yz, yy, _] = self.images.output.strides;
        let [kz, ky, kx] = g.kernel;
        let (row_panels, of_row) = (self.row_panels.count, self.runs.of_row);
        let tap_x = if self.runs.merged {
            "0".to_owned()
        } else {
            format!("(run % {kx}) * {}", g.dilation[2] as i64 * xx)
        };
        format!(
            "const int64_t rp = unit % {row_panels}, cp = unit / {row_panels} % {count}, run = unit / {per_run};\nconst int64_t group = run / \
             {run_group}, tz = run / {run_z} % {kz}, ty = run / {of_row} % {ky}, row = {row};\nconst {real} *tile_a = {dy} + image * {yn} + pz * \
             {yz} + py * {yy} + group * {group_out} + row;\nconst {real} *tile_b = {x} + image * {xn} + (pz * {stride_z} + tz * {dilation_z}) * \
             {xz} + (py * {stride_y} + ty * {dilation_y}) * {xy}\n    + {tap_x} + group * {group_in} + cp * {width};\n{real} *target = sums + \
             (run * {group_out} + row) * {padded} + cp * {width};\n{calls}",
            real = self.element.ctype(),
            count = self.panels.count,
            per_run = row_panels * self.panels.count,
            run_group = self.runs.of_group,
            run_z = ky * of_row,
            row = self.row_panels.first("rp"),
            dy = self.images.output.base,
            x = self.images.input.base,
            group_out = g.group_out(),
            group_in = g.group_in(),
            stride_z = g.stride[0],
            dilation_z = g.dilation[0],
            stride_y = g.stride[1],
            dilation_y = g.dilation[1],
            width = self.panels.width,
            padded = self.panels.padded(),
        )
    }

    /// The call of the tile function for the height and width of the tile, chosen at run time, and the
    /// functions.
    fn tile_calls(&self) -> (String, BTreeSet<Helper>) {
        let (panels, row_panels) = (&self.panels, &self.row_panels);
        let mut tiles = BTreeSet::new();
        let mut heights = |width: usize| {
            let mut call = |rows: usize| self.tile_call(rows, width, &mut tiles);
            match row_panels.heights()[..] {
                [long, short] => {
                    let (first, second) = (call(long), call(short));
                    format!("if ({}) {first}\nelse {second}\n", row_panels.is_long("rp"))
                }
                _ => call(row_panels.rows) + "\n",
            }
        };
        let full = if panels.count == 1 {
            panels.last
        } else {
            panels.width
        };
        let calls = if panels.count > 1 && panels.last < panels.width {
            let (wide, thin) = (heights(full), heights(panels.last));
            format!(
                "if (cp < {}) {{\n{}}} else {{\n{}}}\n",
                panels.count - 1,
                indent(&wide, 4),
                indent(&thin, 4)
            )
        } else {
            heights(full)
        };
        (calls, tiles)
    }

    /// The call of the function for tiles of `rows` rows and `width` columns, a sum over the pixels of a
    /// chunk; adds the function to `tiles`.
    fn tile_call(&self, rows: usize, width: usize, tiles: &mut BTreeSet<Helper>) -> String {
        let g = &self.spec.geometry;
        let [xn, _, xy, xx] = self.images.input.strides;
        let [yn, _, yy, yx] = self.images.output.strides;
        let tile = Tile {
            rows,
            vectors: width / self.lanes,
            a: Access::Strided { free: 1, depth: yx },
            b: Access::Strided {
                free: 1,
                depth: g.stride[2] as i64 * xx,
            },
            factor: self.element.into(),
            nested: true,
            block: tile::BLOCK,
        };
        tiles.insert(tile.helper(self.isa));
        let nest = format!(
            "(const int64_t[6]){{images, {yn}, {xn}, lines, {yy}, {}}}",
            g.stride[1] as i64 * xy
        );
        format!(
            "{}(tile_a, tile_b, {}, target, {}, !fresh, {nest});",
            tile.name(),
            g.output[2],
            self.panels.padded()
        )
    }

    /// C expression of the sum for output channel `o`, channel of the group `c` and kernel element `t`.
    fn sum_of_element(&self) -> String {
        let g = &self.spec.geometry;
        let (group_in, group_out, kx) = (g.group_in(), g.group_out(), g.kernel[2]);
        let (tap, column) = if self.runs.merged {
            (format!("t / {kx}"), format!("t % {kx} * {group_in} + c"))
        } else {
            ("t".into(), "c".into())
        };
        format!(
            "sums[((o / {group_out} * {} + {tap}) * {group_out} + o % {group_out}) * {} + {column}]",
            self.runs.of_group,
            self.panels.padded()
        )
    }
}

/// `name_finish(ctx, begin, end, thread)` over output channels: brings sums into the order of the weight
/// and lets the caller consume them. `element` is the C expression of the sum for output channel `o`,
/// channel of the group `c` and kernel element `t`.
pub(super) fn consume_rows(spec: &WeightGradSpec<'_>, element: &str, sums_at: usize, lanes: usize) -> String {
    let (g, consume) = (&spec.geometry, &spec.consume);
    let (real, vf) = spec.storage.element().ctypes();
    let (taps, group_in) = (g.taps(), g.group_in());
    let vector = indent(&consume(Width::Vector, "(from + i)", "sum"), 12);
    let scalar = indent(&consume(Width::Scalar, "(from + i)", "sum"), 12);
    let block = ORDER_BLOCK.min(group_in) * taps;
    // A thread has the sums of whole channels in order at a time, or of a part of a large window.
    let (some, each) = if block <= MOST_IN_ORDER {
        let each = format!(
            "for (int64_t c = block / {taps}; c < block_end / {taps}; c++)\n    for (int64_t t = 0; t < {taps}; t++) *to++ = {element};\n"
        );
        (block, each)
    } else {
        let each = format!(
            "for (int64_t e = block; e < block_end; e++) {{\n    const int64_t c = e / {taps}, t = e % {taps};\n    *to++ = {element};\n}}\n"
        );
        (MOST_IN_ORDER, each)
    };
    let body = format!(
        "const {real} *sums = (const {real} *)(args->workspace + {sums_at});\n(void)sums;\n{real} row[{some}];\nfor (int64_t o = begin; o < end; o++)\n    for \
         (int64_t block = 0; block < {all}; block += {some}) {{\n        const int64_t block_end = block + {some} < {all} ? block + {some} : {all};\n        {real} \
         *to = row;\n{}        const int64_t from = o * {all} + block, count = block_end - block;\n        int64_t i = 0;\n        for (; i + {lanes} <= count; i += \
         {lanes}) {{\n            {vf} sum = {vf}_load(row + i);\n{vector}        }}\n        for (; i < count; i++) {{\n            {real} sum = \
         row[i];\n{scalar}        }}\n    }}\n",
        indent(&each, 8),
        all = group_in * taps,
    );
    spec.frame()
        .part("Sums in the order of the weight.", "finish", &body)
}

/// Without a window, the gradient is a matrix product over the pixels. If the gradient is small and there
/// are many pixels of channels-last images, summing in chunks is faster, because each chunk is read from
/// memory once.
pub(super) fn as_product<'a>(spec: &'a WeightGradSpec<'a>, isa: Isa) -> Option<GemmSpec<'a>> {
    let g = &spec.geometry;
    let [depth, height, width] = g.input;
    let by_channel = |image: &super::Image<'_>| image.contiguous == Some(ImageAxis::Channel);
    // Chunks are widened; a product takes pairs.
    let pairs = spec.storage == Storage::BF16 && isa.has_bf16_pairs();
    let chunks = !pairs
        && g.weight_len() * spec.storage.element().bytes() <= SMALL_WEIGHT
        && g.images * depth * height * width >= 1024
        && by_channel(&spec.input)
        && by_channel(&spec.output_grad);
    if !g.is_product() || chunks {
        return None;
    }
    let n = g.in_channels;
    let consume = move |r: &gemm::Result<'_>| {
        (spec.consume)(r.width, &format!("({} * {n} + {})", r.row, r.col), r.value)
    };
    Some(GemmSpec {
        name: spec.name.clone(),
        comment: spec.comment.clone(),
        batch: 1,
        m: g.out_channels,
        n,
        k: g.images * depth * height * width,
        a: pixels_of(&spec.output_grad, spec)?,
        b: pixels_of(&spec.input, spec)?,
        epilogue: Epilogue::custom(Some(Axis::Depth), consume),
        params: spec.params.clone(),
        threads: spec.threads,
    })
}

/// An image as an operand with its channels free and all pixels of all images in the depth.
fn pixels_of<'a>(image: &'a super::Image<'_>, spec: &WeightGradSpec<'_>) -> Option<Operand<'a>> {
    let g = &spec.geometry;
    let [depth, height, width] = g.input;
    let dense = correlate::is_dense(image, g.input);
    let flat = correlate::are_dense(image, g.images, g.input);
    let plane = height * width;
    match (image.contiguous, &image.memory) {
        (Some(ImageAxis::Channel), Some(memory)) if flat => Some(Operand::stored(
            memory.storage,
            &memory.pointer,
            &[],
            memory.strides[4],
            memory.strides[3],
        )),
        (Some(ImageAxis::Channel), None) if flat => {
            let load = move |at: &gemm::At<'_>| {
                let [n, z, y, x] = correlate::number(at.depth);
                (image.load)(&PixelPlace {
                    width: at.width,
                    image: &n,
                    at: [&z, &y, &x],
                    channel: at.free,
                })
            };
            Some(Operand::computed(Some(Axis::Free), load).standing_for(spec.storage))
        }
        (Some(ImageAxis::Plane), _) | (Some(ImageAxis::Width), Some(_))
            if dense || image.memory.is_none() =>
        {
            let load = move |at: &gemm::At<'_>| {
                let n = format!("({} / {})", at.depth, depth * plane);
                let z = format!("({} / {plane} % {depth})", at.depth);
                let x = format!("({} % {plane})", at.depth);
                (image.load)(&PixelPlace {
                    width: at.width,
                    image: &n,
                    at: [&z, "0", &x],
                    channel: at.free,
                })
            };
            let operand = Operand::computed(Some(Axis::Depth), load).standing_for(spec.storage);
            Some(operand.in_segments(plane))
        }
        _ => None,
    }
}
