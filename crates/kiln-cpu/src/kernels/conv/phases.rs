//! Copies of images with zeros around them, in phases of a stride.
//!
//! The pixels of a padded image whose places leave the same remainders, divided by the stride, are a phase.
//! All that a kernel element meets lies in one phase, and what it meets for neighbouring pixels of the result
//! are neighbours there. Without a stride the padded image is the only phase.

use super::{Image, ImageAxis, ImageMemory, PixelPlace, Spatial};
use crate::kernels::element::Storage;
use crate::kernels::frame::Frame;
use crate::kernels::tile::amx::EXTENT;
use crate::kernels::{Width, indent};

/// Pixels of an image of these extents before the one at `place`.
pub(super) fn number([z, y, x]: Spatial, [_, height, width]: Spatial) -> usize {
    (z * height + y) * width + x
}

/// The phases of a padded image.
pub(super) struct Phases {
    /// Distance of neighbours of a phase in the padded image.
    stride: Spatial,
    /// Phases along each dimension.
    number: Spatial,
    /// Extents of a phase.
    pub reach: Spatial,
}

impl Phases {
    /// Those of a padded image of these extents.
    pub fn new(stride: Spatial, padded: Spatial) -> Self {
        Self {
            stride,
            number: [0, 1, 2].map(|d| stride[d].min(padded[d])),
            reach: [0, 1, 2].map(|d| padded[d].div_ceil(stride[d])),
        }
    }

    /// How many there are.
    pub fn all(&self) -> usize {
        self.number.iter().product()
    }

    /// Pixels of a phase of one image.
    pub fn pixels(&self) -> usize {
        self.reach.iter().product()
    }

    /// Rows of all phases of one image.
    pub fn rows(&self) -> usize {
        self.all() * self.reach[0] * self.reach[1]
    }

    /// Phase of a place in the padded image, and pixels before it there.
    pub fn place(&self, place: Spatial) -> (usize, usize) {
        let of = |map: fn(usize, usize) -> usize| [0, 1, 2].map(|d| map(place[d], self.stride[d]));
        (
            number(of(|place, stride| place % stride), self.number),
            number(of(|place, stride| place / stride), self.reach),
        )
    }
}

/// Copies of images with zeros around them, as bf16, channels last: of each phase all images, one after the
/// other.
pub(super) struct Padding<'a> {
    /// The end of the name of the function that copies.
    pub suffix: &'static str,
    pub image: &'a Image<'a>,
    /// C expression of the first image that is copied.
    pub first: &'static str,
    /// C expression of the number of images that are copied.
    pub count: String,
    /// Channels, of any number; whole vectors of them that lie together are copied at once.
    pub channels: usize,
    /// Extents of the image.
    pub extents: Spatial,
    /// Zeros before it; negative: elements that are left out.
    pub before: [i64; 3],
    pub phases: &'a Phases,
    /// Place of the copies in the workspace, in bytes.
    pub to: usize,
}

impl Padding<'_> {
    /// `name_suffix(ctx, begin, end, thread)`: some rows of the copies.
    pub fn source(&self, frame: &Frame<'_>) -> String {
        let Self {
            suffix,
            image,
            first,
            ref count,
            channels,
            extents: [own_depth, own_height, own_width],
            before: [before_z, before_y, before_x],
            phases,
            to,
        } = *self;
        let [depth, height, width] = phases.reach;
        let [stride_z, stride_y, stride_x] = phases.stride;
        let [_, across_y, across_x] = phases.number;
        let by_pixel = image.contiguous == Some(ImageAxis::Channel) && channels.is_multiple_of(EXTENT);
        let copy = match halves(image) {
            _ if by_pixel => copy_pixel(image, channels),
            Some(memory) => {
                let element = super::address(&memory.pointer, memory.strides, &place(Width::Scalar, "c"));
                format!("to[c] = *({element});\n")
            }
            None => {
                let value = (image.load)(&place(Width::Scalar, "c"));
                Storage::BF16.store(Width::Scalar, "to + c", &value) + "\n"
            }
        };
        // Channels that do not lie together are read row by row.
        let channel = match by_pixel {
            true => String::new(),
            false => format!("for (int64_t c = 0; c < {channels}; c++)\n    "),
        };
        let body = format!(
            "for (int64_t padded_row = begin; padded_row < end; padded_row++) {{\n    const int64_t plane = padded_row / {rows}, image = {first} + plane % ({count}), phase = plane / ({count});\n    \
             const int64_t z = padded_row / {height} % {depth} * {stride_z} + phase / {planar} - ({before_z}), y = padded_row % {height} * {stride_y} + phase / {across_x} % {across_y} - \
             ({before_y});\n    const int64_t before = phase % {across_x} - ({before_x});\n    uint16_t *padded = (uint16_t *)(args->workspace + {to}) + padded_row * {row};\n    if (z < 0 || z >= {own_depth} || y < 0 || y \
             >= {own_height}) {{\n        __builtin_memset(padded, 0, {row} * sizeof *padded);\n        continue;\n    }}\n    /* The pixels of the row that lie in the image. */\n    int64_t from = before < 0 ? (-before + {stride_x} - 1) / \
             {stride_x} : 0, stop = before < {own_width} ? ({own_width} - before + {stride_x} - 1) / {stride_x} : 0;\n    if (stop > {width}) stop = {width};\n    if (from > stop) from = stop;\n    __builtin_memset(padded, 0, from * {channels} * \
             sizeof *padded);\n    __builtin_memset(padded + stop * {channels}, 0, ({width} - stop) * {channels} * sizeof *padded);\n    {channel}for (int64_t px = from; px < stop; px++) {{\n        const int64_t x = px * {stride_x} + before;\n        \
             uint16_t *to = padded + px * {channels};\n{}    }}\n}}\n",
            indent(&copy, 8),
            rows = depth * height,
            row = width * channels,
            planar = across_y * across_x,
        );
        frame.part("Images with zeros around them.", suffix, &body)
    }
}

/// The memory of an image that is stored as bf16.
fn halves<'a>(image: &'a Image<'_>) -> Option<&'a ImageMemory> {
    image
        .memory
        .as_ref()
        .filter(|memory| memory.storage == Storage::BF16)
}

/// The place of the C variables `image`, `z`, `y` and `x`.
fn place(width: Width, channel: &str) -> PixelPlace<'_> {
    PixelPlace {
        width,
        image: "image",
        at: ["z", "y", "x"],
        channel,
    }
}

/// Statements that copy the channels of the pixel at `image`, `z`, `y` and `x`, which lie together and are
/// whole vectors, to the C pointer `to` as bf16.
pub(super) fn copy_pixel(image: &Image<'_>, channels: usize) -> String {
    match halves(image) {
        Some(memory) => format!(
            "__builtin_memcpy(to, {}, {channels} * sizeof *to);\n",
            super::address(&memory.pointer, memory.strides, &place(Width::Scalar, "0"))
        ),
        None => format!(
            "for (int64_t c = 0; c < {channels}; c += {EXTENT}) vf_store_bf16(to + c, {});\n",
            (image.load)(&place(Width::Vector, "c"))
        ),
    }
}

/// Whether an image has elements of bf16, in memory or computed by a kernel for tensors stored as `storage`.
pub(super) fn has_halves(image: &Image<'_>, storage: Storage) -> bool {
    match &image.memory {
        Some(memory) => memory.storage == Storage::BF16,
        None => storage == Storage::BF16,
    }
}
