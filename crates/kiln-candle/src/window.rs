//! Sliding windows as index tables.
//!
//! A window operation in any number of spatial dimensions is a gather: with the spatial dimensions merged
//! into one, element `k` of the window at output position `p` is at a row-major position that depends on
//! the geometry alone. [`Windows`] is the table of these positions; positions in the padding point one past
//! the end, where the caller puts the value of padding. The adjoint, which gradients need, adds at the same
//! positions and drops the elements in the padding.

use candle_core::{Result, Tensor};

use crate::index;
use crate::value::{Val, indices, int, repeat};
use kiln_graph::Shape;
use kiln_graph::op::{ConvDims, Window};

/// Geometry of a sliding window, one entry per spatial dimension.
pub(crate) struct Geometry<'a> {
    pub input: &'a [usize],
    pub output: &'a [usize],
    pub size: &'a [usize],
    pub stride: &'a [usize],
    pub pad_low: &'a [usize],
    pub pad_high: &'a [usize],
    pub dilation: &'a [usize],
}

impl<'a> Geometry<'a> {
    pub fn of_conv(conv: &'a ConvDims, kernel: &'a [usize], input: &'a [usize], output: &'a [usize]) -> Self {
        Self {
            input,
            output,
            size: kernel,
            stride: &conv.stride,
            pad_low: &conv.pad_low,
            pad_high: &conv.pad_high,
            dilation: &conv.dilation,
        }
    }

    pub fn of_pool(window: &'a Window, input: &'a [usize], output: &'a [usize]) -> Self {
        Self {
            input,
            output,
            size: &window.size,
            stride: &window.stride,
            pad_low: &window.pad_low,
            pad_high: &window.pad_high,
            dilation: &window.dilation,
        }
    }

    /// Calls `f` for each window element and output position, elements outermost, with the coordinates in the
    /// padded input along every dimension.
    fn for_each(&self, mut f: impl FnMut(&[usize])) {
        let rank = self.input.len();
        let mut padded = vec![0; rank];
        for element in coordinates(self.size) {
            for position in coordinates(self.output) {
                for axis in 0..rank {
                    padded[axis] = position[axis] * self.stride[axis] + element[axis] * self.dilation[axis];
                }
                f(&padded);
            }
        }
    }

    /// How many elements of the window at each output position lie in the input, or, `with_padding`, in the
    /// input and its padding.
    pub fn counts(&self, with_padding: bool) -> Vec<f64> {
        let outputs: usize = self.output.iter().product();
        let mut counts = vec![0.0; outputs];
        let mut next = 0;
        self.for_each(|padded| {
            let inside = padded.iter().enumerate().all(|(axis, &at)| {
                let (low, extent) = (self.pad_low[axis], self.input[axis]);
                if with_padding {
                    at < low + extent + self.pad_high[axis]
                } else {
                    (low..low + extent).contains(&at)
                }
            });
            counts[next % outputs] += f64::from(u8::from(inside));
            next += 1;
        });
        counts
    }
}

/// All coordinates within `extents`, row-major.
fn coordinates(extents: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let count: usize = extents.iter().product();
    (0..count).map(|mut flat| {
        let mut coordinate = vec![0; extents.len()];
        for axis in (0..extents.len()).rev() {
            coordinate[axis] = flat % extents[axis];
            flat /= extents[axis];
        }
        coordinate
    })
}

/// Where each window element of each output position is read: `[elements * outputs]`, elements outermost.
pub(crate) struct Windows {
    /// Row-major spatial positions; the number of positions where the element is in the padding.
    pub table: Tensor,
    pub elements: usize,
    pub outputs: usize,
    /// Spatial positions of the input.
    pub positions: usize,
}

impl Windows {
    pub fn new(geometry: &Geometry) -> Result<Self> {
        let positions: usize = geometry.input.iter().product();
        let elements: usize = geometry.size.iter().product();
        let outputs: usize = geometry.output.iter().product();
        let mut table = Vec::with_capacity(elements * outputs);
        geometry.for_each(|padded| {
            let mut flat = 0;
            let mut inside = true;
            for (axis, &at) in padded.iter().enumerate() {
                let (low, extent) = (geometry.pad_low[axis], geometry.input[axis]);
                inside &= (low..low + extent).contains(&at);
                flat = flat * extent + at.saturating_sub(low);
            }
            table.push(if inside { flat } else { positions } as i64);
        });
        Ok(Self {
            table: indices(table)?,
            elements,
            outputs,
            positions,
        })
    }

    /// Whether any element of any window is in the padding.
    pub fn padded(&self) -> Result<bool> {
        Ok(self.table.max_all()?.to_scalar::<i64>()? == self.positions as i64)
    }

    /// Where element `k` of the windows is in the input: a mask over output positions, repeated to
    /// `[.., outputs]`.
    pub fn inside(&self, k: usize, shape: &candle_core::Shape) -> Result<Tensor> {
        let row = self.table.narrow(0, k * self.outputs, self.outputs)?;
        repeat(&row.ne(&int(&row, self.positions as i64)?)?, shape)
    }

    /// `[planes, positions]` to `[planes, elements * outputs]`, padding reading as the one element of
    /// `padding`.
    pub fn read(&self, x: &Tensor, padding: &Tensor) -> Result<Tensor> {
        let padding = padding.to_dtype(x.dtype())?.reshape((1, 1))?;
        let padding = repeat(&padding, (x.dims()[0], 1))?;
        let extended = if self.positions == 0 {
            padding.contiguous()?
        } else {
            Tensor::cat(&[x.contiguous()?, padding.contiguous()?], 1)?
        };
        extended.index_select(&self.table, 1)
    }

    /// The adjoint of [`Windows::read`]: `[planes, elements * outputs]` added up to `[planes, positions]`.
    pub fn add_up(&self, read: &Val) -> Result<Val> {
        let planes = read.dims()[0];
        let sums = Val::zeros(&Shape::from([planes, self.positions + 1]), read.dtype)?;
        let sums = index::add(&sums, &self.table, read, 1)?;
        Ok(Val::new(sums.tensor.narrow(1, 0, self.positions)?, read.dtype))
    }
}
