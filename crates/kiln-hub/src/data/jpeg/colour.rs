//! From planes of luma and chroma to RGB.
//!
//! Chroma with half the samples is doubled by a triangle: each new sample is three quarters of the nearest
//! old one and a quarter of the next, first down, then across. At an edge the nearest sample stands in for
//! the one that is missing. The colours are those of JFIF (BT.601, all 256 levels) with factors of 14 bits.

use super::Plane;
use crate::data::image::{Picture, Region};

/// The pixels of a region whose samples are in the planes.
#[inline(always)]
pub(super) fn rgb(planes: &[Plane], region: Region) -> Picture {
    let mut rgb = vec![0; region.width * region.height * 3];
    let luma = &planes[0];
    let mut chroma = [Doubled::new(region), Doubled::new(region)];
    for (row, target) in rgb.chunks_exact_mut(region.width * 3).enumerate() {
        let y = region.y + row;
        let bright = &luma.samples[(y - luma.y) * luma.width + region.x - luma.x..][..region.width];
        match planes {
            [_, blue, red] => {
                let [blues, reds] = &mut chroma;
                let size = luma.full;
                convert(
                    bright,
                    blues.row(blue, size, region, y),
                    reds.row(red, size, region, y),
                    target,
                );
            }
            _ => {
                for (pixel, &value) in target.chunks_exact_mut(3).zip(bright) {
                    pixel.fill(value);
                }
            }
        }
    }
    Picture {
        width: region.width,
        height: region.height,
        rgb,
    }
}

/// Scratch for the rows of a chroma plane at the size of the luma plane.
struct Doubled {
    /// A row at the right height, still of the plane's width.
    down: Vec<u8>,
    /// A row of the region.
    across: Vec<u8>,
}

impl Doubled {
    fn new(region: Region) -> Self {
        Self {
            down: vec![],
            across: vec![0; region.width],
        }
    }

    /// Row `y` of the picture, between the sides of the region. `full` is the size of the luma plane.
    #[inline(always)]
    fn row<'a>(&'a mut self, plane: &'a Plane, full: (usize, usize), region: Region, y: usize) -> &'a [u8] {
        let line = |y: usize| &plane.samples[(y - plane.y) * plane.width..][..plane.width];
        let row = if full.1 == plane.full.1 {
            line(y)
        } else {
            let near = y / 2;
            let far = neighbour(y, plane.full.1);
            self.down.resize(plane.width, 0);
            for ((to, &near), &far) in self.down.iter_mut().zip(line(near)).zip(line(far)) {
                *to = mixed(near, far);
            }
            &self.down
        };
        if full.0 == plane.full.0 {
            return &row[region.x - plane.x..][..region.width];
        }
        // Pixels 2 n + 1 and 2 n + 2 both lie between the samples n and n + 1.
        let sample = |n: usize| row[n - plane.x];
        let edge = |x: usize| mixed(sample(x / 2), sample(neighbour(x, plane.full.0)));
        let (from, to) = (region.x, region.x + region.width);
        let inner = (from | 1)..to;
        let pairs = (inner.len() / 2).min((plane.full.0 - 1).saturating_sub(from / 2));
        if from % 2 == 0 {
            self.across[0] = edge(from);
        }
        let first = from / 2 - plane.x;
        let left = &row[first..first + pairs];
        let right = &row[first + usize::from(pairs > 0)..][..pairs];
        let start = inner.start - from;
        for ((to, &a), &b) in self.across[start..].chunks_exact_mut(2).zip(left).zip(right) {
            to[0] = mixed(a, b);
            to[1] = mixed(b, a);
        }
        for x in inner.start + 2 * pairs..to {
            self.across[x - from] = edge(x);
        }
        &self.across
    }
}

/// The second nearest sample to pixel `x` of a line of `len` samples that is doubled.
#[inline(always)]
fn neighbour(x: usize, len: usize) -> usize {
    match x % 2 {
        0 => (x / 2).saturating_sub(1),
        _ => (x / 2 + 1).min(len - 1),
    }
}

/// Three quarters and one quarter.
#[inline(always)]
fn mixed(near: u8, far: u8) -> u8 {
    ((3 * u16::from(near) + u16::from(far) + 2) >> 2) as u8
}

/// A row of colours.
#[inline(always)]
fn convert(luma: &[u8], blue: &[u8], red: &[u8], target: &mut [u8]) {
    // A little less than a half, as zune-jpeg rounds.
    const ROUND: i32 = (1 << 13) - 1;
    let level = |value: i32| (value >> 14).clamp(0, 255) as u8;
    for (((pixel, &y), &b), &r) in target.chunks_exact_mut(3).zip(luma).zip(blue).zip(red) {
        let y = i32::from(y) * (1 << 14) + ROUND;
        let (b, r) = (i32::from(b) - 128, i32::from(r) - 128);
        pixel[0] = level(y + r * 22970);
        pixel[1] = level(y - r * 11700 - b * 5638);
        pixel[2] = level(y + b * 29032);
    }
}
