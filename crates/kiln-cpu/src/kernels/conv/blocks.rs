//! Blocks: threads go over the pixels of a result in blocks of lines that stay in L2.
//!
//! The unit that threads share is a line of result pixels (or, where lines are few or long, a part of one).
//! A thread takes some lines at a time. An image has to be copied if it needs padding, has another layout,
//! or is computed on the fly. The thread then copies just the rows that its lines need into a slab of its
//! own, which the tiles find in L2: the copy never goes through memory. Rows at the border of two blocks
//! are copied twice, which is cheaper.
//!
//! Results that are stored channels-first are collected for a block and transposed there, with vectors
//! along the plane.

use super::image::Padded;
use super::walk::{Class, Walk};
use super::{ConvSpec, ImageAxis, PixelEpilogue, PixelPlace, Spatial};
use crate::kernels::element::Element;
use crate::kernels::{Width, indent, round_up, unpack};
use crate::policy::{CONVOLUTION_L2, CONVOLUTION_RESULT};

/// A class of result pixels, and the image that they are computed from.
#[derive(Clone, Copy)]
pub(super) struct ClassImage<'a> {
    pub spec: &'a ConvSpec<'a>,
    pub walk: &'a Walk,
    pub class: &'a Class,
    pub padded: &'a Padded,
}

/// The function over the units of a class: see [`Blocks::function`].
pub(super) struct BlockFunction<'a> {
    /// C identifier.
    pub name: &'a str,
    /// Where the memory of its blocks begins in the workspace, in bytes.
    pub workspace: usize,
    /// Elements of a vector.
    pub lanes: usize,
    /// Declarations in front of the loop over blocks.
    pub declare: &'a str,
    /// Statements for the block `block..block_end`.
    pub body: &'a str,
}

/// How a class of pixels is cut.
pub(super) struct Blocks {
    /// Whether a unit is a whole line (else a part of one).
    pub by_line: bool,
    /// Whether rows are copied into a slab, and not the whole image at once.
    pub slab: bool,
    /// Whether results are collected and consumed along the plane.
    pub planes: bool,
    /// Units of a block.
    size: usize,
    /// Units of the class.
    pub units: usize,
    /// Rows that a slab has room for.
    slab_rows: usize,
    /// Columns of collected results.
    result_columns: usize,
    /// Their type.
    pub element: Element,
}

impl Blocks {
    /// `parts` tiles make a line; `columns` is the most results that a pixel has at a time; `result` has the
    /// extents of the whole result.
    pub fn new(pixels: &ClassImage<'_>, parts: usize, columns: usize, result: Spatial) -> Self {
        let ClassImage {
            spec,
            walk,
            class,
            padded,
        } = *pixels;
        let lines = spec.geometry.images * class.count[0] * class.count[1];
        let single = walk.classes.len() == 1;
        let planes = single && spec.epilogue.axis(result) == Some(ImageAxis::Plane);
        let enough = lines >= 4 * spec.threads || parts == 1;
        let slab = padded.copy.is_some() && single && walk.reach[0] == 1 && enough;
        let by_line = slab || planes;

        let element = spec.storage.element();
        let row_bytes = padded.strides[2] as usize * element.bytes();
        let span = (class.taps[1].len().max(1) - 1) * walk.tap_step[1] + 1;
        let fresh = walk.pixel_step[1].min(span);
        let lines_each = (CONVOLUTION_L2 / (row_bytes * fresh).max(1)).max(4);
        let lines_each = if planes {
            lines_each.min((CONVOLUTION_RESULT / (class.count[2] * columns * element.bytes())).max(1))
        } else {
            lines_each
        };
        let lines_each = lines_each.min(lines);
        let (units, size) = if by_line {
            (lines, lines_each)
        } else {
            (lines * parts, lines_each * parts)
        };
        let segments = size / class.count[1] + 2;
        let slab_rows = if slab { size * fresh + segments * span } else { 0 };
        Self {
            by_line,
            slab,
            planes,
            size,
            units,
            slab_rows,
            result_columns: columns,
            element,
        }
    }

    /// Bytes of workspace for each thread.
    pub fn bytes(&self, pixels: &ClassImage<'_>, lanes: usize) -> usize {
        self.slab_bytes(pixels.padded, lanes) + self.result_bytes(pixels.class)
    }

    fn slab_bytes(&self, padded: &Padded, lanes: usize) -> usize {
        if self.slab {
            let elements = self.slab_rows * padded.strides[2] as usize + lanes * 4;
            round_up(elements * self.element.bytes(), 64)
        } else {
            0
        }
    }

    fn result_bytes(&self, class: &Class) -> usize {
        if self.planes {
            let elements = self.size * class.count[2] * self.result_columns;
            round_up(elements * self.element.bytes(), 64)
        } else {
            0
        }
    }

    /// C statements that define `image`, `pz`, `py` and a pointer `from` for `line`: `from` is the first
    /// image element that the line's first pixel needs.
    pub fn line(&self, pixels: &ClassImage<'_>) -> String {
        let ClassImage {
            walk, class, padded, ..
        } = *pixels;
        let real = self.element.ctype();
        let [count_z, count_y, _] = class.count;
        let [sn, sz, sy, sx] = padded.strides;
        let place = format!(
            "const int64_t image = line / {}, pz = line / {count_y} % {count_z}, py = line % {count_y};\n",
            count_z * count_y
        );
        let x = class.origin[2] as i64 * sx;
        if self.slab {
            return format!("{place}const {real} *from = line_rows[unit - block] + {x};\n");
        }
        format!(
            "{place}const {real} *from = {} + image * {sn} + (pz * {} + {}) * {sz} + (py * {} + {}) * {sy} + {x};\n",
            padded.base, walk.pixel_step[0], class.origin[0], walk.pixel_step[1], class.origin[1]
        )
    }

    /// The function over units `begin..end`. Its `body` handles the block `block..block_end`, with `args`,
    /// the parameters, the declarations of `declare` and, where results are collected, `result` in scope.
    pub fn function(&self, pixels: &ClassImage<'_>, function: &BlockFunction<'_>) -> String {
        let ClassImage {
            spec, class, padded, ..
        } = *pixels;
        let BlockFunction {
            name: function,
            workspace,
            lanes,
            declare,
            body,
        } = *function;
        let (name, real) = (&spec.name, self.element.ctype());
        let each = self.bytes(pixels, lanes);
        let mut own = String::new();
        let mut fill = String::new();
        if self.slab {
            own = format!(
                "    {real} *slab = ({real} *)(args->workspace + {workspace} + thread * (int64_t){each});\n    const {real} \
                 *line_rows[{}];\n",
                self.size
            );
            if let Some(copy) = &padded.copy {
                fill = self.fill(pixels, &copy.row);
            }
        }
        if self.planes {
            own.push_str(&format!(
                "    {real} *result = ({real} *)(args->workspace + {} + thread * (int64_t){each});\n",
                workspace + self.slab_bytes(padded, lanes)
            ));
        }
        let size = self.size;
        format!(
            "/* Pixels {:?} + {:?} * i. */\nstatic void {function}(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const \
             struct {name}_args *args = ctx;\n{}{own}{}    for (int64_t block = begin; block < end; block += {size}) {{\n        \
             const int64_t block_end = block + {size} < end ? block + {size} : end;\n{}{}    }}\n}}\n",
            class.start,
            class.step,
            unpack(&spec.params),
            indent(declare, 4),
            indent(&fill, 8),
            indent(body, 8),
        )
    }

    /// Copies the rows that the block's lines need, each once.
    fn fill(&self, pixels: &ClassImage<'_>, copy_row: &str) -> String {
        let ClassImage {
            walk, class, padded, ..
        } = *pixels;
        let span = (class.taps[1].len().max(1) - 1) * walk.tap_step[1] + 1;
        format!(
            "int64_t filled = 0, next = 0, shift = 0, current = -1;\nfor (int64_t line = block; line < block_end; line++) {{\n    const \
             int64_t image = line / {count}, y = line % {count} * {step} + {origin};\n    if (image != current || y > next) {{\n        \
             current = image, next = y, shift = filled - y;\n    }}\n    for (; next < y + {span}; next++, filled++)\n        \
             {copy_row}(args, image, 0, next, slab + filled * {row});\n    line_rows[line - block] = slab + (y + shift) * \
             {row};\n}}\n",
            count = class.count[1],
            step = walk.pixel_step[1],
            origin = class.origin[1],
            row = padded.strides[2],
        )
    }

    /// C statements, after all units of a block, that consume the collected results: `columns` of them from
    /// channel `col` on, `ld` apart.
    pub fn consume_planes(&self, name: &str, class: &Class, ld: &str, col: &str, columns: &str) -> String {
        let [count_z, count_y, count_x] = class.count;
        format!(
            "for (int64_t line = block; line < block_end;) {{\n    const int64_t image = line / {}, pz = line / {count_y} % {count_z}, py = \
             line % {count_y};\n    const int64_t rest = {count_y} - py, lines = rest < block_end - line ? rest : block_end - line;\n    \
             {name}_finish_planes(args, result + (line - block) * {count_x} * {ld}, {ld}, image, pz, py * {count_x}, lines * {count_x}, \
             {col}, {columns});\n    line += lines;\n}}\n",
            count_z * count_y,
        )
    }
}

/// `name_finish_planes(...)`: consumes results of consecutive pixels of a plane, vectors along the pixels.
fn finish_planes(spec: &ConvSpec<'_>, lanes: usize) -> String {
    let name = &spec.name;
    let (real, vf) = spec.storage.element().ctypes();
    let each = |width, channel: &str| {
        let place = PixelPlace {
            width,
            image: "image",
            at: ["z", "0", "x"],
            channel,
        };
        (spec.epilogue.consume)(&place, "sum")
    };
    format!(
        "/* Consumes results of consecutive pixels, a row of `tile` each. */\nstatic __attribute__((noinline)) void \
         {name}_finish_planes(const struct {name}_args *args, const {real} *tile, int64_t ld, int64_t image,\n        int64_t z, int64_t \
         pixel0, int64_t count, int64_t col, int64_t cols) {{\n{}    int64_t i = 0;\n    for (; i + {lanes} <= count; i += {lanes})\n        \
         for (int64_t group = 0; group < cols; group += {lanes}) {{\n            {vf} block[{lanes}];\n            KILN_UNROLL for (int l = 0; l < {lanes}; \
         l++) block[l] = {vf}_load(tile + (i + l) * ld + group);\n            {vf}_transpose(block);\n            {vf} turned[{lanes}];\n            KILN_UNROLL for (int l = 0; \
         l < {lanes}; l++) turned[l] = block[l];\n            const int64_t x = pixel0 + i;\n            for (int64_t l = 0; l < {lanes} && group + l < cols; l++) {{\n                const int64_t j = col + group + \
         l;\n                {vf} sum = turned[l];\n{}            }}\n        }}\n    for (int64_t j = col; j < col + cols; j++)\n        for \
         (int64_t r = i; r < count; r++) {{\n            const int64_t x = pixel0 + r;\n            {real} sum = tile[r * ld + (j - \
         col)];\n{}        }}\n}}\n",
        unpack(&spec.params),
        indent(&each(Width::Vector, "j"), 16),
        indent(&each(Width::Scalar, "j"), 12),
    )
}

/// `name_finish(...)`: the epilogue of one tile, whose rows are pixels `x, x + step, ...`.
fn finish(spec: &ConvSpec<'_>, epilogue: &PixelEpilogue<'_>, lanes: usize) -> String {
    let ConvSpec { name, params, .. } = spec;
    let (real, vf) = spec.storage.element().ctypes();
    let each = |width| {
        let place = PixelPlace {
            width,
            image: "image",
            at: ["z", "y", "x"],
            channel: "j",
        };
        indent(&(epilogue.consume)(&place, "sum"), 12)
    };
    let vectors = if epilogue.contiguous == Some(ImageAxis::Channel) {
        format!(
            "        for (; j + {lanes} <= col + cols; j += {lanes}) {{\n            {vf} sum = {vf}_load(tile + i * ld + (j - \
             col));\n{}        }}\n",
            each(Width::Vector),
            lanes = lanes
        )
    } else {
        String::new()
    };
    format!(
        "/* Consumes a finished tile of the result. */\nstatic __attribute__((noinline)) void {name}_finish(const struct \
         {name}_args *args, const {real} *tile, int64_t ld, int64_t image,\n        int64_t z, int64_t y, int64_t x, int64_t step, \
         int64_t rows, int64_t col, int64_t cols) {{\n{}    for (int64_t i = 0; i < rows; i++, x += step) {{\n        int64_t j \
         = col;\n{vectors}        for (; j < col + cols; j++) {{\n            {real} sum = tile[i * ld + (j - col)];\n{}        \
         }}\n    }}\n}}\n",
        unpack(params),
        each(Width::Scalar)
    )
}

/// The functions that consume results.
pub(super) struct Consumer {
    /// Their definitions: `name_finish` for tiles, `name_finish_planes` for planes where vectors run along
    /// them.
    pub source: String,
    /// Bytes of workspace that they need.
    pub bytes: usize,
    /// The function to run, over how many units, after all classes.
    pub last: Option<(String, usize)>,
}

/// Pixels of a plane that are turned at a time.
const TURNED: usize = 64;

/// The functions that consume results with `channels` channels. Where vectors run along the planes but
/// neighbouring pixels belong to different classes, tiles go to a channels-last buffer (at `workspace`),
/// which is transposed and consumed when all classes are done.
pub(super) fn consumer(
    spec: &ConvSpec<'_>,
    walk: &Walk,
    result: Spatial,
    channels: usize,
    workspace: usize,
    lanes: usize,
) -> Consumer {
    let planes = spec.epilogue.axis(result) == Some(ImageAxis::Plane);
    if !planes {
        return Consumer {
            source: finish(spec, &spec.epilogue, lanes),
            bytes: 0,
            last: None,
        };
    }
    let along = finish_planes(spec, lanes);
    if walk.classes.len() == 1 {
        return Consumer {
            source: finish(spec, &spec.epilogue, lanes) + &along,
            bytes: 0,
            last: None,
        };
    }
    let name = &spec.name;
    let element = spec.storage.element();
    let (real, vf) = element.ctypes();
    let [depth, height, width] = result;
    let buffer = format!("(({real} *)(args->workspace + {workspace}))");
    let store = PixelEpilogue::custom(Some(ImageAxis::Channel), |place, value| {
        let [z, y, x] = place.at;
        let place_of = format!(
            "{buffer} + ((({} * {depth} + {z}) * {height} + {y}) * {width} + {x}) * {channels} + {}",
            place.image, place.channel
        );
        match place.width {
            Width::Scalar => format!("*({place_of}) = {value};"),
            Width::Vector => format!("{vf}_store({place_of}, {value});"),
        }
    });
    let plane = height * width;
    let parts = plane.div_ceil(TURNED);
    let turn = format!(
        "static void {name}_turn(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n    for (int64_t \
         unit = begin; unit < end; unit++) {{\n        const int64_t map = unit / {parts}, pixel = unit % {parts} * {TURNED};\n        \
         {name}_finish_planes(args, {buffer} + (map * {plane} + pixel) * {channels}, {channels}, map / {depth}, map % {depth}, pixel,\n            {plane} - \
         pixel < {TURNED} ? {plane} - pixel : {TURNED}, 0, {channels});\n    }}\n}}\n"
    );
    let maps = spec.geometry.images * depth;
    Consumer {
        source: finish(spec, &store, lanes) + &along + &turn,
        bytes: round_up((maps * plane * channels + lanes) * element.bytes(), 64),
        last: Some((format!("{name}_turn"), maps * parts)),
    }
}
