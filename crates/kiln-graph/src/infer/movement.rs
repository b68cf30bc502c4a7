//! Types of the results of operations that move elements, and of reads and writes at computed positions.

use smallvec::smallvec;

use super::{Infer, Results, Rule, single};
use crate::op::{Dims, Op};
use crate::{Shape, TensorType};

impl Rule<'_> {
    /// Operations that move elements: shapes, slices, indices.
    pub(super) fn movement(&self) -> Infer<Results> {
        match self.op {
            Op::Reshape(shape) => self.reshape(shape),
            Op::Transpose(permutation) => self.transpose(permutation),
            Op::Broadcast { shape, dims } => self.broadcast(shape, dims),
            Op::Slice {
                starts,
                limits,
                steps,
            } => {
                let [x] = self.operands()?;
                let shape = self.slice_extents(starts, limits, steps, &x.shape)?;
                single(x.dtype, shape)
            }
            Op::Pad { low, high } => self.pad(low, high),
            Op::Concat { axis } => self.concat(*axis),
            Op::Flip(axes) => {
                let [x] = self.operands()?;
                self.axes(axes, x)?;
                Ok(smallvec![(*x).clone()])
            }
            Op::UpdateSlice { starts, steps } => self.update_slice(starts, steps),
            Op::Gather { axis } => {
                let [x, indices] = self.operands()?;
                self.index_operand(*axis, x, indices)?;
                single(x.dtype, indices.shape.clone())
            }
            Op::Scatter { axis, .. } => self.scatter(*axis),
            Op::IndexSelect { axis } => {
                let [x, indices] = self.operands()?;
                self.index_list(*axis, x, indices)?;
                single(x.dtype, x.shape.with(*axis, indices.shape[0]))
            }
            Op::IndexPut { axis, .. } => self.index_put(*axis),
            other => unreachable!("{} has a rule of its own", other.name()),
        }
    }

    fn reshape(&self, shape: &Shape) -> Infer<Results> {
        let [x] = self.operands()?;
        self.require(x.numel() == shape.numel(), || {
            format!("{x} does not have the {} elements of {shape}", shape.numel())
        })?;
        single(x.dtype, shape.clone())
    }

    fn transpose(&self, permutation: &Dims) -> Infer<Results> {
        let [x] = self.operands()?;
        self.per_dimension("the permutation", permutation.len(), x.shape.rank())?;
        let mut sorted = permutation.clone();
        sorted.sort_unstable();
        self.require(sorted.iter().copied().eq(0..permutation.len()), || {
            format!("{permutation:?} is no permutation")
        })?;
        single(x.dtype, permutation.iter().map(|&axis| x.shape[axis]).collect())
    }

    fn broadcast(&self, shape: &Shape, dims: &Dims) -> Infer<Results> {
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
        single(x.dtype, shape.clone())
    }

    fn pad(&self, low: &[i64], high: &[i64]) -> Infer<Results> {
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
        single(x.dtype, shape)
    }

    fn concat(&self, axis: usize) -> Infer<Results> {
        let Some(first) = self.inputs.first() else {
            return self.fail("takes at least one operand");
        };
        self.axis(axis, first)?;
        let mut extent = 0;
        for x in self.inputs {
            self.same_dtype(first, x)?;
            let agree =
                x.shape.rank() == first.shape.rank() && x.shape.with(axis, 0) == first.shape.with(axis, 0);
            self.require(agree, || {
                format!("{first} and {x} differ outside dimension {axis}")
            })?;
            extent += x.shape[axis];
            self.fits(&TensorType {
                dtype: x.dtype,
                shape: x.shape.with(axis, extent),
            })?;
        }
        single(first.dtype, first.shape.with(axis, extent))
    }

    fn update_slice(&self, starts: &Dims, steps: &Dims) -> Infer<Results> {
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

    fn scatter(&self, axis: usize) -> Infer<Results> {
        let [x, indices, updates] = self.operands()?;
        self.index_operand(axis, x, indices)?;
        let expected = TensorType {
            dtype: x.dtype,
            shape: indices.shape.clone(),
        };
        self.require(*updates == expected, || {
            format!("updates are {updates}, expected {expected}")
        })?;
        Ok(smallvec![(*x).clone()])
    }

    fn index_put(&self, axis: usize) -> Infer<Results> {
        let [x, indices, updates] = self.operands()?;
        self.index_list(axis, x, indices)?;
        let expected = TensorType {
            dtype: x.dtype,
            shape: x.shape.with(axis, indices.shape[0]),
        };
        self.require(*updates == expected, || {
            format!("updates are {updates}, expected {expected}")
        })?;
        Ok(smallvec![(*x).clone()])
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
