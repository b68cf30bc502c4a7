//! Channels-last images with room around them, for tiles to read in place.

use super::{Image, ImageAxis, PixelPlace, Spatial};
use crate::kernels::element::Element;
use crate::kernels::{Param, Width, indent, round_up, unpack};

/// An image as the tiles see it: channels contiguous, strides constant, zeros wherever a window reaches
/// outside.
#[derive(Debug, Clone)]
pub(super) struct Padded {
    /// C expression (`const float *`) of the element at the lowest place that any window reaches, channel 0.
    pub base: String,
    /// Elements between images, and between neighbours along depth, height and width.
    pub strides: [i64; 4],
    /// The copy to make first, unless the image is used where it lies.
    pub copy: Option<Copy>,
}

/// A padded copy in the workspace.
#[derive(Debug, Clone)]
pub(super) struct Copy {
    /// C function `name(args, image, z, y, row)` that fills one row of the copy.
    pub row: String,
    /// C function `name(ctx, begin, end, thread)` that fills rows `begin..end`.
    pub function: String,
    /// Definition of the first.
    pub row_source: String,
    /// Definition of the second.
    pub source: String,
    /// Rows of all images together.
    pub rows: usize,
    /// Bytes of the copy.
    pub bytes: usize,
}

/// The description of a copy.
pub(super) struct Request<'a> {
    /// Prefix of the generated names; the context is `struct prefix_args`, which has a field for the
    /// workspace.
    pub prefix: &'a str,
    /// Distinguishes copies of one kernel.
    pub suffix: &'a str,
    /// PixelPlace of the copy in the workspace, in bytes.
    pub offset: usize,
    pub images: usize,
    pub channels: usize,
    /// Extents of the image.
    pub extents: Spatial,
    /// Zeros before it (negative: how many elements no window reaches).
    pub before: [i64; 3],
    /// Extents of the elements that windows reach, from `-before` on.
    pub reach: Spatial,
    /// Distance between neighbours in the copy; zeros are put between them where it is more than one.
    pub spread: Spatial,
    pub params: &'a [Param],
    pub lanes: usize,
    /// The type that tiles compute in.
    pub element: Element,
    /// Whether the image may be used in place. It may not if tiles read vectors that run over the end of a
    /// pixel's channels, because there is no memory past the last pixel.
    pub in_place: bool,
}

/// The image as tiles can read it.
pub(super) fn padded(image: &Image<'_>, request: &Request<'_>) -> Padded {
    let Request {
        images,
        channels,
        extents,
        before,
        reach,
        spread,
        ..
    } = *request;
    if let Some((pointer, [n, z, y, x, 1])) = image.plain() {
        let inside = request.in_place
            && (0..3).all(|d| {
                before[d] <= 0 && spread[d] == 1 && (reach[d] as i64 - before[d]) <= extents[d] as i64
            });
        if inside {
            let skip: i64 = -(before[0] * z + before[1] * y + before[2] * x);
            let base = if skip == 0 {
                pointer.to_owned()
            } else {
                format!("({pointer} + {skip})")
            };
            return Padded {
                base,
                strides: [n, z, y, x],
                copy: None,
            };
        }
    }
    let width = channels as i64;
    let x = width;
    let y = x * reach[2] as i64;
    let z = y * reach[1] as i64;
    let strides = [z * reach[0] as i64, z, y, x];
    // Room for a vector that starts at the last element.
    let bytes = round_up(
        ((images as i64 * strides[0]) as usize + request.lanes * 4) * request.element.bytes(),
        64,
    );
    let real = request.element.ctype();
    let rows = images * reach[0] * reach[1];
    let function = format!("{}_copy{}", request.prefix, request.suffix);
    let row = format!("{function}_row");
    let row_source = row_source(image, request, &row, strides);
    let source = format!(
        "static void {function}(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {}_args *args = \
         ctx;\n    {real} *base = ({real} *)(args->workspace + {});\n    for (int64_t r = begin; r < end; r++)\n        \
         {row}(args, r / {}, r / {} % {}, r % {}, base + r * {});\n}}\n",
        request.prefix,
        request.offset,
        reach[0] * reach[1],
        reach[1],
        reach[0],
        reach[1],
        strides[2],
    );
    Padded {
        base: format!("((const {real} *)(args->workspace + {}))", request.offset),
        strides,
        copy: Some(Copy {
            row,
            function,
            row_source,
            source,
            rows,
            bytes,
        }),
    }
}

/// The function that fills a row of the copy: all of the width at one image, depth and height.
fn row_source(image: &Image<'_>, request: &Request<'_>, function: &str, strides: [i64; 4]) -> String {
    let Request {
        prefix,
        channels,
        extents,
        before,
        reach,
        spread,
        params,
        lanes,
        element,
        ..
    } = *request;
    let real = element.ctype();
    // `to` is the place in the copy of element 0 of the row.
    let inner = if spread[2] == 1 {
        dense_row(image, channels, lanes, element)
    } else {
        let value = load(image, Width::Scalar, "x", "c");
        format!(
            "for (int64_t x = x_begin; x < x_end; x++)\n    for (int64_t c = 0; c < {channels}; c++)\n        to[x * {} + c] = \
             {value};\n",
            channels * spread[2]
        )
    };
    let outside = |axis: &str, d: usize| {
        let spread = spread[d];
        let on_grid = if spread == 1 {
            String::new()
        } else {
            format!(" || {axis} % {spread} != 0")
        };
        format!("{axis} < 0{on_grid} || {axis} / {spread} >= {}", extents[d])
    };
    // Elements of the row that the copy has room for.
    let first = (-before[2]).max(0).div_euclid(spread[2] as i64)
        + i64::from((-before[2]).max(0).rem_euclid(spread[2] as i64) != 0);
    let room = (reach[2] as i64 - before[2]).max(0);
    let last = ((room + spread[2] as i64 - 1) / spread[2] as i64)
        .min(extents[2] as i64)
        .max(first);
    let zero_all = spread[2] > 1;
    let edges = if zero_all {
        format!("__builtin_memset(row, 0, {} * sizeof({real}));\n", strides[2])
    } else {
        // Windows may all lie in the padding on one side: then no element of the row has a place.
        let left = ((before[2] + first).max(0) * channels as i64).min(strides[2]);
        let right = ((before[2] + last).max(0) * channels as i64).clamp(left, strides[2]);
        format!(
            "__builtin_memset(row, 0, {left} * sizeof({real}));\n__builtin_memset(row + {right}, 0, {} * \
             sizeof({real}));\n",
            strides[2] - right
        )
    };
    let [bz, by, bx] = before;
    format!(
        "/* Copies a row of the image into channels-last order with zeros around it. */\nstatic void {function}(const struct {prefix}_args \
         *args, int64_t image, int64_t z0, int64_t y0, {real} *row) {{\n{}    z0 -= {bz}, y0 -= {by};\n    if ({} || {}) {{\n        \
         __builtin_memset(row, 0, {} * sizeof({real}));\n        return;\n    }}\n    const int64_t z = z0 / {}, y = y0 / {}, x_begin \
         = {first}, x_end = {last};\n    {real} *to = row + {};\n{}{}}}\n",
        unpack(params),
        outside("z0", 0),
        outside("y0", 1),
        strides[2],
        spread[0],
        spread[1],
        bx * channels as i64,
        indent(&edges, 4),
        indent(&inner, 4),
    )
}

fn load(image: &Image<'_>, width: Width, x: &str, channel: &str) -> String {
    (image.load)(&PixelPlace {
        width,
        image: "image",
        at: ["z", "y", x],
        channel,
    })
}

/// Statements that copy elements `first..last` of a row to `to[x * channels + c]`.
fn dense_row(image: &Image<'_>, channels: usize, lanes: usize, element: Element) -> String {
    let vf = element.vector();
    let scalar = load(image, Width::Scalar, "x", "c");
    match image.contiguous {
        Some(ImageAxis::Channel) if channels >= lanes => {
            let vector = load(image, Width::Vector, "x", "c");
            format!(
                "for (int64_t x = x_begin; x < x_end; x++) {{\n    int64_t c = 0;\n    for (; c + {lanes} <= {channels}; c += \
                 {lanes}) {vf}_store(to + x * {channels} + c, {vector});\n    for (; c < {channels}; c++) to[x * {channels} + c] = \
                 {scalar};\n}}\n"
            )
        }
        Some(ImageAxis::Width | ImageAxis::Plane) if channels >= lanes => {
            let vector = load(image, Width::Vector, "x", "(group + l)");
            format!(
                "int64_t group = 0;\nfor (; group + {lanes} <= {channels}; group += {lanes}) {{\n    int64_t x = x_begin;\n    for \
                 (; x + {lanes} <= x_end; x += {lanes}) {{\n        {vf} block[{lanes}];\n        KILN_UNROLL for (int l = 0; l < {lanes}; \
                 l++) block[l] = {vector};\n        {vf}_transpose(block);\n        KILN_UNROLL for (int l = 0; l < {lanes}; l++) {vf}_store(to + \
                 (x + l) * {channels} + group, block[l]);\n    }}\n    for (; x < x_end; x++)\n        for (int64_t c = group; c < \
                 group + {lanes}; c++) to[x * {channels} + c] = {scalar};\n}}\nfor (int64_t c = group; c < {channels}; \
                 c++)\n    for (int64_t x = x_begin; x < x_end; x++) to[x * {channels} + c] = {scalar};\n"
            )
        }
        _ => format!(
            "for (int64_t x = x_begin; x < x_end; x++)\n    for (int64_t c = 0; c < {channels}; c++) to[x * {channels} + c] = \
             {scalar};\n"
        ),
    }
}
