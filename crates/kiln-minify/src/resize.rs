//! Cases with smaller dimensions.
//!
//! Dimensions that belong together mostly have one extent: the width of a layer is that of its weight, its
//! gradient and its optimizer's state. So an extent is replaced wherever it occurs, alone or (`[2, 64, 8]`
//! reshaped to `[128, 8]`) with all its multiples, and inference says whether the result is still a graph.
//! Rules need no knowledge of operations that way, but for the attributes that hold extents.

use kiln_graph::op::{ConvDims, Dims};
use kiln_graph::{Graph, Op, Shape, TensorType};

use crate::case::Case;
use crate::cut::Rebuild;

/// How extents change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resize {
    /// The extent that is replaced.
    pub from: usize,
    /// What replaces it.
    pub to: usize,
    /// Whether its multiples change in proportion.
    pub multiples: bool,
}

impl Resize {
    fn extent(self, extent: usize) -> usize {
        if extent == self.from {
            self.to
        } else if self.multiples && extent > 0 && extent.is_multiple_of(self.from) {
            extent / self.from * self.to
        } else {
            extent
        }
    }

    fn shape(self, shape: &Shape) -> Shape {
        shape.dims().iter().map(|&extent| self.extent(extent)).collect()
    }

    fn dims(self, dims: &Dims) -> Dims {
        dims.iter().map(|&extent| self.extent(extent)).collect()
    }

    /// The first and the last index of a slice of a dimension.
    fn bounds(self, start: usize, limit: usize, extent: usize) -> (usize, usize) {
        let limit = self.extent(limit).min(self.extent(extent));
        let start = if start == 0 { 0 } else { self.extent(start) };
        (start.min(limit), limit)
    }

    fn conv(self, conv: &ConvDims) -> ConvDims {
        ConvDims {
            groups: if conv.groups == 1 {
                1
            } else {
                self.extent(conv.groups)
            },
            ..conv.clone()
        }
    }

    /// An operation whose attributes hold the changed extents; `operand` is the shape of its first operand.
    fn op(self, op: &Op, operand: Option<&Shape>) -> Op {
        match op.clone() {
            Op::Parameter { index, ty, .. } => Op::Parameter {
                index,
                ty: TensorType {
                    dtype: ty.dtype,
                    shape: self.shape(&ty.shape),
                },
                copy_of: None,
            },
            Op::Iota { dtype, shape, axis } => Op::Iota {
                dtype,
                shape: self.shape(&shape),
                axis,
            },
            Op::Random { kind, dtype, shape } => Op::Random {
                kind,
                dtype,
                shape: self.shape(&shape),
            },
            Op::Reshape(shape) => Op::Reshape(self.shape(&shape)),
            Op::Broadcast { shape, dims } => Op::Broadcast {
                shape: self.shape(&shape),
                dims,
            },
            Op::Slice {
                mut starts,
                mut limits,
                steps,
            } => {
                for axis in 0..starts.len() {
                    let extent = operand.map_or(limits[axis], |shape| shape[axis]);
                    (starts[axis], limits[axis]) = self.bounds(starts[axis], limits[axis], extent);
                }
                Op::Slice {
                    starts,
                    limits,
                    steps,
                }
            }
            Op::UpdateSlice { starts, steps } => Op::UpdateSlice {
                starts: starts
                    .iter()
                    .map(|&start| if start == 0 { 0 } else { self.extent(start) })
                    .collect(),
                steps,
            },
            Op::Conv(conv) => Op::Conv(self.conv(&conv)),
            Op::ConvInputGrad { conv, input } => Op::ConvInputGrad {
                conv: self.conv(&conv),
                input: self.dims(&input),
            },
            Op::ConvWeightGrad { conv, kernel } => Op::ConvWeightGrad {
                conv: self.conv(&conv),
                kernel: self.dims(&kernel),
            },
            Op::MaxPoolGrad { input } => Op::MaxPoolGrad {
                input: self.dims(&input),
            },
            Op::AvgPoolGrad {
                window,
                count_include_pad,
                input,
            } => Op::AvgPoolGrad {
                window,
                count_include_pad,
                input: self.dims(&input),
            },
            Op::TopK { axis, k, dtype } => Op::TopK {
                axis,
                k: operand.map_or(k, |shape| k.min(self.extent(shape[axis]))),
                dtype,
            },
            other => other,
        }
    }
}

impl Case {
    /// The extents that occur, from the largest to the smallest above 1.
    pub(crate) fn extents(&self) -> Vec<usize> {
        let all = self
            .graph
            .values()
            .flat_map(|(_, data)| data.ty.shape.dims().iter().copied());
        let mut extents: Vec<usize> = all.filter(|&extent| extent > 1).collect();
        extents.sort_unstable_by(|a, b| b.cmp(a));
        extents.dedup();
        extents
    }

    /// The case with other extents; none if they do not fit together.
    pub(crate) fn resized(&self, resize: Resize) -> Option<Self> {
        let graph: &Graph = &self.graph;
        let mut new = Rebuild::new(self);
        for (_, data) in graph.nodes() {
            let operand = data.inputs.first().map(|&value| graph.shape(value));
            new.copy(data, resize.op(&data.op, operand))?;
        }
        new.finish(&self.outputs())
    }
}
