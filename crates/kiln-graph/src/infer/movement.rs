//! Types of the results of operations that move elements, and of reads and writes at computed positions.

use smallvec::smallvec;

use super::{Infer, Results, Rule};
use crate::op::{Dims, Op};
use crate::{DType, Shape, TensorType};

impl Rule<'_> {
    /// Operations that move elements: shapes, slices, indices.
    pub(super) fn movement(&self) -> Infer<Results> {
        let one = |dtype: DType, shape: Shape| Ok(smallvec![TensorType { dtype, shape }]);
        match self.op {
            Op::Reshape(shape) => {
                let [x] = self.operands()?;
                self.require(x.numel() == shape.numel(), || {
                    format!("{x} does not have the {} elements of {shape}", shape.numel())
                })?;
                one(x.dtype, shape.clone())
            }
            Op::Transpose(perm) => {
                let [x] = self.operands()?;
                self.per_dimension("the permutation", perm.len(), x.shape.rank())?;
                let mut seen = perm.clone();
                seen.sort_unstable();
                self.require(seen.iter().copied().eq(0..perm.len()), || {
                    format!("{perm:?} is no permutation")
                })?;
                one(x.dtype, perm.iter().map(|&axis| x.shape[axis]).collect())
            }
            Op::Broadcast { shape, dims } => {
                let [x] = self.operands()?;
                self.per_dimension("dims", dims.len(), x.shape.rank())?;
                self.require(dims.windows(2).all(|pair| pair[0] < pair[1]), || {
                    format!("dims {dims:?} do not increase")
                })?;
                for (from, &to) in dims.iter().enumerate() {
                    let fits = to < shape.rank() && (x.shape[from] == 1 || x.shape[from] == shape[to]);
                    self.require(fits, || {
                        format!("dimension {from} of {x} does not fit dimension {to} of {shape}")
                    })?;
                }
                one(x.dtype, shape.clone())
            }
            Op::Slice {
                starts,
                limits,
                steps,
            } => {
                let [x] = self.operands()?;
                self.slice_extents(starts, limits, steps, &x.shape)
                    .and_then(|shape| one(x.dtype, shape))
            }
            Op::Pad { low, high } => {
                let [x, value] = self.operands()?;
                self.scalar(value, x.dtype)?;
                self.per_dimension("low", low.len(), x.shape.rank())?;
                self.per_dimension("high", high.len(), x.shape.rank())?;
                let mut shape = x.shape.clone();
                for axis in 0..shape.rank() {
                    let extent = (shape[axis] as i64)
                        .checked_add(low[axis])
                        .and_then(|n| n.checked_add(high[axis]));
                    let Some(extent) = extent.and_then(|n| usize::try_from(n).ok()) else {
                        return self.fail(format!(
                            "dimension {axis} of {x} is cropped below nothing or overflows"
                        ));
                    };
                    shape[axis] = extent;
                }
                one(x.dtype, shape)
            }
            Op::Concat { axis } => {
                let Some(first) = self.inputs.first() else {
                    return self.fail("takes at least one operand");
                };
                self.axis(*axis, first)?;
                let mut extent = 0;
                for x in self.inputs {
                    self.same_dtype(first, x)?;
                    let agree = x.shape.rank() == first.shape.rank()
                        && x.shape.with(*axis, 0) == first.shape.with(*axis, 0);
                    self.require(agree, || {
                        format!("{first} and {x} differ outside dimension {axis}")
                    })?;
                    extent += x.shape[*axis];
                    self.fits(&TensorType {
                        dtype: x.dtype,
                        shape: x.shape.with(*axis, extent),
                    })?;
                }
                one(first.dtype, first.shape.with(*axis, extent))
            }
            Op::Flip(axes) => {
                let [x] = self.operands()?;
                self.axes(axes, x)?;
                Ok(smallvec![(*x).clone()])
            }
            Op::UpdateSlice { starts, steps } => {
                let [x, update] = self.operands()?;
                self.same_dtype(x, update)?;
                self.per_dimension("update", update.shape.rank(), x.shape.rank())?;
                self.per_dimension("starts", starts.len(), x.shape.rank())?;
                self.per_dimension("steps", steps.len(), x.shape.rank())?;
                for axis in 0..x.shape.rank() {
                    let reach = update.shape[axis].saturating_sub(1).checked_mul(steps[axis]);
                    let last = reach.and_then(|reach| reach.checked_add(starts[axis]));
                    let inside = last.is_some_and(|last| last < x.shape[axis]);
                    let fits = steps[axis] >= 1 && (update.shape[axis] == 0 || inside);
                    self.require(fits, || {
                        format!("{update} does not fit into dimension {axis} of {x}")
                    })?;
                }
                Ok(smallvec![(*x).clone()])
            }
            Op::Gather { axis } => {
                let [x, indices] = self.operands()?;
                self.index_operand(*axis, x, indices)?;
                one(x.dtype, indices.shape.clone())
            }
            Op::Scatter { axis, .. } => {
                let [x, indices, updates] = self.operands()?;
                self.index_operand(*axis, x, indices)?;
                let expected = TensorType {
                    dtype: x.dtype,
                    shape: indices.shape.clone(),
                };
                self.require(*updates == expected, || {
                    format!("updates are {updates}, expected {expected}")
                })?;
                Ok(smallvec![(*x).clone()])
            }
            Op::IndexSelect { axis } => {
                let [x, indices] = self.operands()?;
                self.index_list(*axis, x, indices)?;
                one(x.dtype, x.shape.with(*axis, indices.shape[0]))
            }
            Op::IndexPut { axis, .. } => {
                let [x, indices, updates] = self.operands()?;
                self.index_list(*axis, x, indices)?;
                let expected = TensorType {
                    dtype: x.dtype,
                    shape: x.shape.with(*axis, indices.shape[0]),
                };
                self.require(*updates == expected, || {
                    format!("updates are {updates}, expected {expected}")
                })?;
                Ok(smallvec![(*x).clone()])
            }
            other => unreachable!("{} has a rule of its own", other.name()),
        }
    }

    fn slice_extents(&self, starts: &Dims, limits: &Dims, steps: &Dims, shape: &Shape) -> Infer<Shape> {
        for (what, list) in [("starts", starts), ("limits", limits), ("steps", steps)] {
            self.per_dimension(what, list.len(), shape.rank())?;
        }
        let mut out = shape.clone();
        for axis in 0..shape.rank() {
            let (start, limit, step) = (starts[axis], limits[axis], steps[axis]);
            let fits = start <= limit && limit <= shape[axis] && step >= 1;
            self.require(fits, || {
                format!("{start}..{limit} by {step} is no slice of dimension {axis} of {shape}")
            })?;
            out[axis] = (limit - start).div_ceil(step);
        }
        Ok(out)
    }

    fn index_operand(&self, axis: usize, x: &TensorType, indices: &TensorType) -> Infer<()> {
        self.axis(axis, x)?;
        self.integer(indices)?;
        self.per_dimension("indices", indices.shape.rank(), x.shape.rank())?;
        for other in (0..x.shape.rank()).filter(|&other| other != axis) {
            let fits = indices.shape[other] <= x.shape[other];
            self.require(fits, || {
                format!("indices {indices} exceed {x} in dimension {other}")
            })?;
        }
        Ok(())
    }

    fn index_list(&self, axis: usize, x: &TensorType, indices: &TensorType) -> Infer<()> {
        self.axis(axis, x)?;
        self.integer(indices)?;
        self.require(indices.shape.rank() == 1, || {
            format!("indices are {indices}, expected one dimension")
        })
    }
}
