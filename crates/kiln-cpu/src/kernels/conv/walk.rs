//! Which image elements a window meets as it moves over an image, for the forward convolution and for the
//! input gradient.

use super::{ConvSpec, Spatial};

/// The two directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    InputGrad,
}

/// Result pixels that use the same kernel elements: along each dimension, `start + i * step` for `i < count`.
#[derive(Debug, Clone)]
pub(super) struct Class {
    /// Kernel elements along each dimension, by increasing place in the image.
    pub taps: [Vec<usize>; 3],
    /// Place in the padded image of the first tap of the first pixel.
    pub origin: Spatial,
    pub count: Spatial,
    pub start: Spatial,
    pub step: Spatial,
}

impl Class {
    /// C expressions of the place in the result of the pixel `z`, `y`, `x` of the class.
    pub fn place(&self) -> [String; 3] {
        let axes = ["z", "y", "x"];
        [0, 1, 2].map(|d| match (self.start[d], self.step[d]) {
            (0, 1) => axes[d].to_owned(),
            (start, step) => format!("({start} + {} * {step})", axes[d]),
        })
    }
}

/// How windows move over the padded image.
#[derive(Debug, Clone)]
pub(super) struct Walk {
    pub classes: Vec<Class>,
    /// Image elements between neighbouring pixels of a class.
    pub pixel_step: Spatial,
    /// Image elements between taps.
    pub tap_step: Spatial,
    /// Zeros before the image (negative: elements that no window reaches).
    pub before: [i64; 3],
    /// Extents of the elements that windows reach.
    pub reach: Spatial,
    /// Distance of neighbours in the padded image.
    pub spread: Spatial,
}

/// One dimension of a [`Class`].
struct Line {
    taps: Vec<usize>,
    origin: i64,
    count: usize,
    start: usize,
    step: usize,
}

impl Walk {
    pub fn new(spec: &ConvSpec<'_>, direction: Direction) -> Self {
        let g = &spec.geometry;
        let mut lines: [Vec<Line>; 3] = [Vec::new(), Vec::new(), Vec::new()];
        let mut walk = Self {
            classes: Vec::new(),
            pixel_step: [1; 3],
            tap_step: g.dilation,
            before: [0; 3],
            reach: [0; 3],
            spread: [1; 3],
        };
        for (d, lines) in lines.iter_mut().enumerate() {
            let (kernel, stride, dilation, pad) = (g.kernel[d], g.stride[d], g.dilation[d], g.pad[d] as i64);
            let span = (kernel - 1) * dilation;
            if direction == Direction::Forward {
                walk.pixel_step[d] = stride;
                walk.before[d] = pad;
                walk.reach[d] = (g.output[d] - 1) * stride + span + 1;
                let taps = (0..kernel).collect();
                lines.push(Line {
                    taps,
                    origin: 0,
                    count: g.output[d],
                    start: 0,
                    step: 1,
                });
            } else if stride == 1 || dilation > 1 {
                // With both a stride and a dilation, zeros between the elements make the stride 1.
                walk.spread[d] = stride;
                walk.before[d] = span as i64 - pad;
                walk.reach[d] = g.input[d] + span;
                let taps = (0..kernel).rev().collect();
                lines.push(Line {
                    taps,
                    origin: 0,
                    count: g.input[d],
                    start: 0,
                    step: 1,
                });
            } else {
                for residue in 0..stride.min(g.input[d] + g.pad[d]) {
                    // Pixels q * stride - pad + residue, which kernel elements residue, residue + stride,
                    // ... reach.
                    let taps: Vec<usize> = (residue..kernel).step_by(stride).collect();
                    let first = (pad - residue as i64 + stride as i64 - 1)
                        .div_euclid(stride as i64)
                        .max(0);
                    let start = (first * stride as i64 - pad + residue as i64) as usize;
                    if start >= g.input[d] {
                        continue;
                    }
                    let count = (g.input[d] - start).div_ceil(stride);
                    let origin = first - taps.len() as i64 + 1;
                    let taps = taps.into_iter().rev().collect();
                    lines.push(Line {
                        taps,
                        origin,
                        count,
                        start,
                        step: stride,
                    });
                }
                let met = |line: &&Line| !line.taps.is_empty();
                walk.before[d] = lines
                    .iter()
                    .filter(met)
                    .map(|line| -line.origin)
                    .max()
                    .unwrap_or(0);
                for line in lines.iter_mut() {
                    line.origin = if line.taps.is_empty() {
                        0
                    } else {
                        line.origin + walk.before[d]
                    };
                }
                let end = |line: &Line| line.origin as usize + line.count + line.taps.len() - 1;
                walk.reach[d] = lines.iter().filter(met).map(end).max().unwrap_or(1);
            }
        }
        for z in &lines[0] {
            for y in &lines[1] {
                for x in &lines[2] {
                    let line = [z, y, x];
                    walk.classes.push(Class {
                        taps: line.map(|l| l.taps.clone()),
                        origin: line.map(|l| l.origin as usize),
                        count: line.map(|l| l.count),
                        start: line.map(|l| l.start),
                        step: line.map(|l| l.step),
                    });
                }
            }
        }
        walk
    }
}

/// Extents and channels of the image that is read, by direction.
pub(super) struct Sides {
    pub extents: Spatial,
    /// Channels of the image, and of one group.
    pub channels: usize,
    pub group: usize,
    /// Result channels, and of one group.
    pub result_channels: usize,
    pub result_group: usize,
}

impl Sides {
    pub fn new(spec: &ConvSpec<'_>, direction: Direction) -> Self {
        let g = &spec.geometry;
        let input = (g.input, g.in_channels, g.group_in());
        let output = (g.output, g.out_channels, g.group_out());
        let (from, to) = if direction == Direction::Forward {
            (input, output)
        } else {
            (output, input)
        };
        Self {
            extents: from.0,
            channels: from.1,
            group: from.2,
            result_channels: to.1,
            result_group: to.2,
        }
    }
}
