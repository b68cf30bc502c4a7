//! Decodes a part of a JPEG file, in about half the time that a general decoder takes for the whole.
//!
//! Training cuts a random part of about half the area out of each picture. The entropy code of a JPEG has no
//! places to start from, so all symbols up to the last row of the part must be read. Everything after that,
//! the inverse transform, the colours, is needed for the blocks of the part only, and nothing at all is
//! needed below it.
//!
//! ```text
//! bytes ─► Baseline::read ─► size ─► caller chooses a Region ─► Baseline::decode
//!          (header.rs)                                            symbols ─► coefficients   entropy.rs
//!                                                                 coefficients ─► planes    transform.rs
//!                                                                 planes ─► RGB             colour.rs
//! ```
//!
//! What is read here is what nearly every photograph is: baseline, 8 bits, Huffman codes, one scan, grey or
//! YCbCr, with full or halved chroma. For all else, and at the first byte that is not as it should be, the
//! answer is `None`, and the caller takes the general decoder (zune-jpeg, through the `image` crate). That
//! one alone decides what is an error and how damaged data looks; what follows the last symbol is not read.
//! The arithmetic is zune-jpeg's, so that both give the same pixels; `tests/jpeg.rs` compares them bit by
//! bit.

mod colour;
mod entropy;
mod header;
mod transform;

use super::image::{Picture, Region};
use super::vector::vectorised;
use entropy::{BitReader, Codes};
use transform::inverse;

/// A baseline JPEG whose headers have been read.
pub(super) struct Baseline<'a> {
    width: usize,
    height: usize,
    /// One for grey, three for YCbCr.
    components: Vec<Component>,
    /// Largest sampling factors: a minimum coded unit is this many blocks wide and high.
    sampling: (usize, usize),
    /// Minimum coded units between two restart markers; 0 if there are none.
    restart: usize,
    /// The entropy-coded bytes and all that follows them.
    scan: &'a [u8],
}

/// A colour plane as the file stores it.
struct Component {
    /// Blocks of this component in a minimum coded unit, across and down.
    sampling: (usize, usize),
    /// Steps of quantisation in zigzag order.
    steps: [i32; 64],
    dc: std::rc::Rc<Codes>,
    ac: std::rc::Rc<Codes>,
}

/// The samples of a component that a region needs: whole blocks.
struct Plane {
    /// First sample, a multiple of 8.
    x: usize,
    y: usize,
    /// Samples a row and rows, multiples of 8.
    width: usize,
    height: usize,
    /// The size of the whole component with its padding to whole units, for the edges of an upsampling.
    full: (usize, usize),
    samples: Vec<u8>,
}

impl<'a> Baseline<'a> {
    /// Pixels a row and rows.
    pub fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// The pixels of a region, which lies inside the picture and has pixels.
    pub fn decode(&self, region: Region) -> Option<Picture> {
        vectorised(
            #[inline(always)]
            || {
                let mut planes: Vec<Plane> = self.components.iter().map(|c| self.plane(c, region)).collect();
                self.scan(region, &mut planes)?;
                Some(colour::rgb(&planes, region))
            },
        )
    }

    /// The plane of a component with the blocks that `region` needs. Upsampling looks one sample to each
    /// side.
    fn plane(&self, component: &Component, region: Region) -> Plane {
        let (across, down) = self.units();
        let range = |from: usize, len: usize, most: usize, own: usize, units: usize| {
            let full = units * own * 8;
            let factor = most / own;
            let margin = usize::from(factor > 1);
            let first = (from / factor).saturating_sub(margin) / 8 * 8;
            let last = ((from + len - 1) / factor + margin).min(full - 1);
            (first, (last + 1).next_multiple_of(8) - first, full)
        };
        let (x, width, full_width) = range(
            region.x,
            region.width,
            self.sampling.0,
            component.sampling.0,
            across,
        );
        let (y, height, full_height) = range(
            region.y,
            region.height,
            self.sampling.1,
            component.sampling.1,
            down,
        );
        Plane {
            x,
            y,
            width,
            height,
            full: (full_width, full_height),
            samples: vec![0; width * height],
        }
    }

    /// Minimum coded units across and down.
    fn units(&self) -> (usize, usize) {
        (
            self.width.div_ceil(8 * self.sampling.0),
            self.height.div_ceil(8 * self.sampling.1),
        )
    }

    /// Reads the symbols up to the last row of units that a plane needs, and fills the planes.
    #[inline(always)]
    fn scan(&self, region: Region, planes: &mut [Plane]) -> Option<()> {
        let (across, _) = self.units();
        let rows = planes.iter().zip(&self.components);
        let rows = rows.map(|(plane, component)| (plane.y + plane.height).div_ceil(8 * component.sampling.1));
        let rows = rows.max().unwrap_or(0);
        debug_assert!(rows * 8 * self.sampling.1 >= region.y + region.height);
        let mut bits = BitReader::new(self.scan);
        let mut predictions = [0i32; 3];
        let mut until_restart = self.restart;
        for row in 0..rows {
            for column in 0..across {
                if self.restart > 0 {
                    if until_restart == 0 {
                        bits.restart()?;
                        predictions = [0; 3];
                        until_restart = self.restart;
                    }
                    until_restart -= 1;
                }
                for ((component, plane), prediction) in
                    self.components.iter().zip(&mut *planes).zip(&mut predictions)
                {
                    for v in 0..component.sampling.1 {
                        for h in 0..component.sampling.0 {
                            let x = (column * component.sampling.0 + h) * 8;
                            let y = (row * component.sampling.1 + v) * 8;
                            let column = x.wrapping_sub(plane.x);
                            let row = y.wrapping_sub(plane.y);
                            let steps = &component.steps;
                            if column < plane.width && row < plane.height {
                                let mut block = [0i32; 64];
                                let last =
                                    bits.block(&component.dc, &component.ac, steps, prediction, &mut block)?;
                                let at = row * plane.width + column;
                                inverse(&block, last, &mut plane.samples[at..], plane.width);
                            } else {
                                bits.skip_block(&component.dc, &component.ac, prediction)?;
                            }
                        }
                    }
                }
            }
            if bits.is_past_the_end() {
                return None;
            }
        }
        Some(())
    }
}
