//! Convolutions as products of matrices that nobody makes: the rows of the left one are windows of the image.
//!
//! ```text
//! result of a convolution   [pixels, out] = [pixels, (taps, in)] · [out, (taps, in)]ᵀ
//! gradient of its input     [pixels, in]  = [pixels, (taps, out)] · [(taps, out), in]
//! ```
//!
//! Hopper's copy engine takes the pixels under one tap of many windows out of an image whose channels are
//! last, so that its template for products ([`crate::emit::product::warpgroups`]) computes such convolutions,
//! with what follows them. The gradient's taps are in the opposite order.

use std::fmt::Write as _;

use kiln_compiler::schedule::Buffer;
use kiln_graph::DType;

use super::ALIGNMENT;
use super::correlation::Correlation;
use super::transfer::transfer;
use crate::code::Windows;
use crate::emit::image::Image;
use crate::emit::{Launch, ProductCall};
use crate::products::{ALIGNED, Compute, Epilogue, MatrixIn, MatrixOut, Number, Product, ScalarsFrom};

/// Channels that the engine takes at once. A step of the depth is of one tap.
const CHANNELS: usize = 64;

/// Elements of 16 bits that distances in memory are multiples of: the engine takes multiples of 16 bytes.
const UNIT: i64 = 8;

/// What the engine takes at most: the first window's place and the last one's, from their ends of a
/// dimension, the distance of taps, and that of windows.
const CORNERS: std::ops::RangeInclusive<i64> = -128..=127;
const OFFSET: usize = 255;
const STRIDE: usize = 8;

/// A convolution as a product whose left operand is the windows of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InWindows {
    /// The product, as if its left operand were in memory, with where its image, its right operand and its
    /// result are. The left operand's rows are as far apart as pixels of the image.
    pub call: ProductCall,
    /// The image. How much of it is taken at once depends on the tile.
    pub image: Windows,
    /// Rows and columns of a window.
    pub window: [usize; 2],
    /// Pixels from one tap of a window to the next.
    pub dilation: [usize; 2],
    /// Windows of an image, below each other and side by side.
    pub result: [usize; 2],
    /// Channels under a tap.
    pub channels: usize,
    /// Whether the right operand has its taps side by side, the last one first.
    pub mirrored: bool,
    /// The copy of the weight that is the right operand, if the weight lies otherwise.
    pub copy: Option<WeightCopy>,
}

/// A copy of a weight whose channels come last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WeightCopy {
    dtype: DType,
    stored: Image,
    copied: Image,
    /// Where it is in the kernel's working memory.
    pub at: usize,
}

impl WeightCopy {
    /// The launch that makes the copy behind `scratch` bytes of working memory, and all of that.
    pub fn behind(&mut self, scratch: usize) -> Option<(Launch, usize)> {
        self.at = scratch.next_multiple_of(ALIGNMENT);
        let launch = transfer(self.dtype, [&self.stored, &self.copied], self.at, true)?;
        Some((launch, self.at + self.copied.elements() * self.dtype.size()))
    }
}

impl InWindows {
    /// Elements of a window.
    pub fn taps(&self) -> u64 {
        self.window.iter().product::<usize>() as u64
    }

    /// What a case of the template says about its windows.
    pub fn constants(&self) -> String {
        let pairs = [
            ("WINDOW", self.window.map(|taps| taps as i64)),
            ("DILATION", self.dilation.map(|pixels| pixels as i64)),
            ("STRIDE", self.image.stride.map(i64::from)),
            ("LOW", self.image.low.map(i64::from)),
            ("RESULT", self.result.map(|windows| windows as i64)),
        ];
        let mut text = String::new();
        for (name, [down, right]) in pairs {
            let _ = writeln!(
                text,
                "static constexpr int {name}_H = {down}, {name}_W = {right};"
            );
        }
        let mirrored_by = match self.mirrored {
            true => self.call.product.n,
            false => 0,
        };
        let _ = writeln!(
            text,
            "static constexpr int CHANNELS = {}, MIRRORED_BY = {mirrored_by};",
            self.channels
        );
        text
    }
}

/// The two dimensions of an image, of three of which the first is single.
fn plane<T: Copy>([_, down, right]: [T; 3]) -> [T; 2] {
    [down, right]
}

/// The windows that a convolution reads of an image.
struct Geometry {
    image: Windows,
    window: [usize; 2],
    dilation: [usize; 2],
    result: [usize; 2],
}

impl Geometry {
    /// None if the engine does not take them.
    fn new(task: &Correlation<'_>) -> Option<Self> {
        let Correlation {
            convolution,
            image,
            result,
            gradient,
            ..
        } = *task;
        let single = convolution.window[0] == 1
            && convolution.low[0] == 0
            && convolution.stride[0] == 1
            && [image, result].iter().all(|image| image.extents[0] == 1);
        let [stride, window, dilation, low] = [
            convolution.stride,
            convolution.window,
            convolution.dilation,
            convolution.low,
        ]
        .map(plane);
        let (extents, windows) = (plane(image.extents), plane(result.extents));
        // A gradient of a convolution with strides has another window for each phase of them.
        if !single || convolution.dims.groups != 1 || gradient && stride != [1; 2] {
            return None;
        }
        let mut corners = [[0_i32; 2]; 2];
        for axis in 0..2 {
            let reach = (window[axis] - 1).checked_mul(dilation[axis]);
            let reach = i64::try_from(reach.filter(|&reach| reach <= OFFSET)?).ok()?;
            let low = i64::try_from(low[axis]).ok()?;
            let first = if gradient { low - reach } else { -low };
            let across = i64::try_from((windows[axis] - 1).checked_mul(stride[axis])?).ok()?;
            let last = first + across - (i64::try_from(extents[axis]).ok()? - 1);
            for (corner, at) in corners.iter_mut().zip([first, last]) {
                corner[axis] = i32::try_from(at).ok().filter(|_| CORNERS.contains(&at))?;
            }
        }
        let number = Number::of(convolution.dtype)?;
        let [down, right] = plane(image.places);
        let places = [apart(down)?, apart(right)?];
        let fits = number.bytes() == 2
            && task.depth.is_multiple_of(CHANNELS)
            && stride.iter().all(|&stride| stride <= STRIDE)
            && image.channel == 1
            && right > 0;
        fits.then_some(Self {
            image: Windows {
                number,
                images: image.images as u64,
                channels: image.channels as u64,
                extents: extents.map(|extent| extent as u64),
                image: apart(image.image)?,
                places,
                low: corners[0],
                high: corners[1],
                stride: stride.map(|stride| stride as u32),
                wide: CHANNELS as u32,
                tall: 0,
            },
            window,
            dilation,
            result: windows,
        })
    }
}

/// A distance in memory that the engine takes.
fn apart(distance: i64) -> Option<u64> {
    u64::try_from(distance).ok().filter(|_| distance % UNIT == 0)
}

/// `task` as such a product; none if it is none.
pub(super) fn product_of(task: &Correlation<'_>, weight: &Image) -> Option<InWindows> {
    let convolution = task.convolution;
    let (image, result) = (task.image, task.result);
    let geometry = Geometry::new(task)?;
    let (number, result_number) = (geometry.image.number, Number::of(convolution.result_dtype)?);
    let leading = u64::try_from(result.pixel()?).ok()?;
    if result.channel != 1 {
        return None;
    }

    // The template reads a weight that lies [out, taps, in], densely but for its rows.
    let taps = convolution.taps();
    let [down_taps, right_taps] = geometry.window.map(|taps| taps as i64);
    let channels = weight.channels as i64;
    let copied = Image {
        offset: 0,
        image: taps as i64 * channels,
        places: [taps as i64 * channels, right_taps * channels, channels],
        channel: 1,
        ..weight.clone()
    };
    let lies = weight.channel == 1
        && weight.offset % UNIT == 0
        && weight.image % UNIT == 0
        && (right_taps == 1 || weight.places[2] == copied.places[2])
        && (down_taps == 1 || weight.places[1] == copied.places[1]);
    let read = if lies { weight } else { &copied };
    let place = |base, offset: i64| {
        let bytes = usize::try_from(offset).ok()?.checked_mul(number.bytes())?;
        Some((Buffer::Value(base), bytes))
    };
    let product = Product {
        batch: 1,
        m: result.pixels() as u64,
        n: task.out as u64,
        k: (taps * task.depth) as u64,
        left: MatrixIn {
            number,
            transposed: false,
            leading: geometry.image.places[1],
            batch_stride: 0,
        },
        right: MatrixIn {
            number,
            transposed: !task.gradient,
            leading: apart(read.image)?,
            batch_stride: 0,
        },
        result: MatrixOut {
            number: result_number,
            leading,
            batch_stride: 0,
        },
        compute: Compute::F32,
        epilogue: Epilogue::None,
        scalars: ScalarsFrom::Product,
        alignments: [ALIGNED; 3],
    };
    Some(InWindows {
        call: ProductCall {
            product,
            left: place(image.base, image.offset)?,
            right: place(read.base, read.offset)?,
            result: (Buffer::Value(result.base), 0),
            workspace: 0,
        },
        image: geometry.image,
        window: geometry.window,
        dilation: geometry.dilation,
        result: geometry.result,
        channels: task.depth,
        mirrored: task.gradient,
        copy: (!lies).then(|| WeightCopy {
            dtype: convolution.dtype,
            stored: weight.clone(),
            copied: copied.clone(),
            at: 0,
        }),
    })
}
