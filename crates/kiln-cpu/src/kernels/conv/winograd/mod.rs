//! 3x3 convolutions of stride 1 by Winograd's algorithm: 2.25 (`m = 2`) to 4 times (`m = 4`) fewer
//! multiplications.
//!
//! The image is cut into tiles that give `m x m` results each. Tiles are transformed, which turns the
//! convolution into `t * t` matrix products over channels (one for each element of a transformed tile), and
//! the products are transformed back. Tiles are taken in blocks whose transforms stay in cache. A thread
//! takes a block of its own through all stages. Where the transformed weight is large and the image small,
//! a thread takes a panel of channels instead and transforms just their weights, which then stay in its
//! cache. Images are read channels-last, where vectors run along the channels, and the padding is a test on
//! scalars.
//!
//! **Error.** Results of `m = 2` are as exact as those of the direct kernel. In f32, results of `m = 4` are
//! two to three times as far from exact ones, because transforming back multiplies the rounding errors of
//! the products. Three things keep that small: the points of the transforms, products that add up in short
//! blocks, and weights that are scaled once ([`transform`]). Infinite and NaN elements reach all results of
//! their tile, not only those whose window contains them.

mod correlate;
mod transform;
mod weight_grad;

pub(super) use correlate::correlate;
pub(super) use weight_grad::weight_gradient;

use super::{Geometry, Image, ImageAxis, Spatial};
use crate::kernels::frame::Frame;
use crate::kernels::round_up;
use crate::policy::{WINOGRAD_FLOPS, WINOGRAD_OWN, WINOGRAD_SHARED};

/// Summed channels whose transformed weights a thread has at a time, for a panel of results.
const CHUNK: usize = 128;

/// Channels whose products add up in registers. These blocks are short, because transforming back
/// multiplies the rounding errors of the products.
const BLOCK: usize = 32;

/// How an image is cut into tiles.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Results of a tile along each dimension.
    m: usize,
    /// Tiles along height and width.
    across: [usize; 2],
    /// Tiles of all images.
    tiles: usize,
    /// Tiles of a block.
    block: usize,
    /// Whether a thread takes a block through all stages.
    own: bool,
    /// Elements between transformed tiles, of the image that is read and of the other.
    stride: [usize; 2],
}

impl Cut {
    /// The cut for results of these extents from and to these channels; none where the direct kernel is
    /// better. A thread takes blocks of its own if the transformed weight has at most `small` bytes, or if
    /// panels are not possible.
    fn new(g: &Geometry, extents: Spatial, channels: [usize; 2], small: usize, panels: bool) -> Option<Self> {
        let [a, b] = channels;
        // Seconds on two cores: products, the transforms of the weight, and those of tiles, which are
        // written and read in cache.
        let time = |m: usize| {
            let tiles = g.images * extents[1].div_ceil(m) * extents[2].div_ceil(m);
            let elements = (m + 2) * (m + 2);
            let (weight, images) = (4 * elements * a * b, 16 * elements * tiles * (a + b));
            (2 * elements * tiles * a * b) as f64 / 190e9 + weight as f64 / 20e9 + images as f64 / 80e9
        };
        let flops = 2 * g.images * extents.iter().product::<usize>() * a * b * 9;
        let m = if time(4) < 0.9 * time(2) { 4 } else { 2 };
        if flops < WINOGRAD_FLOPS || time(m) > 0.9 * flops as f64 / 180e9 {
            return None;
        }
        let across = [extents[1].div_ceil(m), extents[2].div_ceil(m)];
        let tiles = g.images * across[0] * across[1];
        let elements = (m + 2) * (m + 2);
        // Rows whose distance is a multiple of 2 KiB fight for the same lines of L1.
        let stride = channels.map(|c| if c % 512 == 0 { c + 16 } else { c });
        let each = elements * (stride[0] + stride[1]) * 4;
        let weight = elements * a * b * 4;
        let own = !panels || (weight <= small && tiles >= 8 * 14);
        let block = if own {
            (WINOGRAD_OWN / each).max(14)
        } else {
            (WINOGRAD_SHARED / (elements * stride[0].max(stride[1]) * 4)).max(14)
        };
        Some(Self {
            m,
            across,
            tiles,
            block: tiles.div_ceil(tiles.div_ceil(block)),
            own,
            stride,
        })
    }

    /// Elements of a transformed tile, for each channel.
    fn elements(&self) -> usize {
        (self.m + 2) * (self.m + 2)
    }

    /// Blocks of tiles.
    fn blocks(&self) -> usize {
        self.tiles.div_ceil(self.block)
    }

    /// Floats between the elements of the transformed tiles of a side. Not a multiple of a page, so that
    /// the elements of a tile do not fight for the same lines of L1.
    fn apart(&self, side: usize) -> usize {
        apart(self.block * self.stride[side])
    }

    /// Bytes of the transformed tiles of a block, both sides.
    fn bytes(&self) -> usize {
        self.side_bytes(0) + self.side_bytes(1)
    }

    /// Bytes of the transformed tiles of one side. A vector may run over the end.
    fn side_bytes(&self, side: usize) -> usize {
        round_up((self.elements() * self.apart(side) + 16) * 4, 64)
    }

    /// C statements that define the place of `tile` (counted within the block): `image`, and `y0`, `x0` of
    /// its first element when the image has `before` zeros around it.
    fn place(&self, before: [i64; 2]) -> String {
        let [down, along] = self.across;
        format!(
            "const int64_t number = args->lead + tile, image = number / {}, y0 = number / {along} % {down} * {m} - {}, x0 = number % {along} * {m} - \
             {};\n",
            down * along,
            before[0],
            before[1],
            m = self.m
        )
    }

    /// The comment above a kernel and the structure of its arguments; `images` says what is convolved.
    fn head(&self, frame: &Frame<'_>, images: &str) -> String {
        let about = format!(
            "{images}, Winograd's algorithm: {} tiles of {m} x {m} results, {} at a time.",
            self.tiles,
            self.block,
            m = self.m
        );
        frame.head(&about, FIELDS)
    }

    /// C statements that choose block number `block` in `args`.
    fn choose(&self, args: &str) -> String {
        format!(
            "{args}.lead = block * {block};\n{args}.count = {tiles} - {args}.lead < {block} ? {tiles} - {args}.lead : {block};\n",
            tiles = self.tiles,
            block = self.block
        )
    }
}

/// Fields of a kernel's arguments besides its parameters and the workspace: the transformed tiles of the
/// current block (of one thread, or of all), and the block's first tile and number of tiles.
const FIELDS: &str = "    char *own;\n    int64_t lead, count;\n    int fresh;\n";

/// Floats between slices of `length` so that equal places of neighbouring slices are in different lines of
/// L1.
fn apart(length: usize) -> usize {
    if length % 256 < 32 { length + 48 } else { length }
}

/// Whether the convolution is of the kind, with whole vectors of channels.
fn fits(g: &Geometry, lanes: usize) -> bool {
    g.groups == 1
        && g.kernel == [1, 3, 3]
        && g.stride == [1; 3]
        && g.dilation == [1; 3]
        && g.pad[0] == 0
        && g.input[0] == 1
        && g.output[0] == 1
        && g.in_channels.is_multiple_of(lanes)
        && g.out_channels.is_multiple_of(lanes)
        && lanes >= 8
}

/// Whether vectors of channels can be loaded.
fn by_channels(image: &Image<'_>) -> bool {
    image.contiguous == Some(ImageAxis::Channel)
}

/// C expression (a vector) of the element `[y][x]` of the image at channel `c`, zero outside. Needs
/// `inside`, whether the whole tile is inside, and `row`, whether this line is.
fn guarded(image: &Image<'_>, y: &str, x: &str, width: usize) -> String {
    let load = (image.load)(&super::PixelPlace {
        width: crate::kernels::Width::Vector,
        image: "image",
        at: ["0", y, x],
        channel: "c",
    });
    format!("inside || (row && {x} >= 0 && {x} < {width}) ? {load} : (vf){{0}}")
}
