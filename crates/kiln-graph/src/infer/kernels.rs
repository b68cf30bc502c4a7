//! Types of the results of operations with structure: matrix products, convolutions, pooling, attention.

use smallvec::smallvec;

use super::{Infer, Results, Rule};
use crate::op::{ConvDims, Dims, DotDims, Op, Window};
use crate::{DType, Shape, TensorType};

impl Rule<'_> {
    pub(super) fn dot_general(&self, dims: &DotDims) -> Infer<Results> {
        let [a, b] = self.operands()?;
        self.same_dtype(a, b)?;
        self.number(a)?;
        let lists = [
            (&dims.a_batch, &dims.a_contract, a),
            (&dims.b_batch, &dims.b_contract, b),
        ];
        for (batch, contract, ty) in lists {
            let mut all: Dims = batch.iter().chain(contract.iter()).copied().collect();
            all.sort_unstable();
            self.axes(&all, ty)?;
        }
        for (what, of_a, of_b) in [
            ("batch", &dims.a_batch, &dims.b_batch),
            ("contracted", &dims.a_contract, &dims.b_contract),
        ] {
            self.per_dimension(what, of_b.len(), of_a.len())?;
            for (&i, &j) in of_a.iter().zip(of_b) {
                let agree = a.shape[i] == b.shape[j];
                self.require(agree, || {
                    format!("{what} dimensions {i} of {a} and {j} of {b} differ")
                })?;
            }
        }
        let free_a = DotDims::free(a.shape.rank(), &dims.a_batch, &dims.a_contract);
        let free_b = DotDims::free(b.shape.rank(), &dims.b_batch, &dims.b_contract);
        let batch = dims.a_batch.iter().map(|&axis| a.shape[axis]);
        let shape = batch
            .chain(free_a.iter().map(|&axis| a.shape[axis]))
            .chain(free_b.iter().map(|&axis| b.shape[axis]))
            .collect();
        let dtype = self.product_type(a.dtype, dims.result)?;
        Ok(smallvec![TensorType { dtype, shape }])
    }

    /// The element type of a product or convolution of operands of type `operands`, which asks for `result`
    /// if it is another.
    fn product_type(&self, operands: DType, result: Option<DType>) -> Infer<DType> {
        let Some(result) = result else {
            return Ok(operands);
        };
        let fits = result != operands && result == operands.compute();
        self.require(fits, || {
            format!("operands of {operands} have no results of {result}")
        })?;
        Ok(result)
    }

    /// Convolutions and pooling.
    pub(super) fn windowed(&self) -> Infer<Results> {
        let one = |dtype: DType, shape: Shape| Ok(smallvec![TensorType { dtype, shape }]);
        match self.op {
            Op::Conv(conv) => {
                let [x, w] = self.operands()?;
                self.same_dtype(x, w)?;
                let out = self.conv_output(conv, x, w)?;
                one(self.product_type(x.dtype, conv.result)?, out)
            }
            Op::ConvInputGrad { conv, input } => {
                let [dy, w] = self.operands()?;
                self.same_dtype(dy, w)?;
                self.planes(dy, input.len())?;
                self.planes(w, input.len())?;
                let Some(channels) = w.shape[1].checked_mul(conv.groups) else {
                    return self.fail(format!("{} groups of {w} overflow", conv.groups));
                };
                let x = TensorType::new(
                    dy.dtype,
                    Shape::new([dy.shape[0], channels].into_iter().chain(input.iter().copied())),
                );
                let expected = self.conv_output(conv, &x, w)?;
                self.require(dy.shape == expected, || {
                    format!("the gradient is {dy}, the forward result is {expected}")
                })?;
                one(self.product_type(dy.dtype, conv.result)?, x.shape)
            }
            Op::ConvWeightGrad { conv, kernel } => {
                let [x, dy] = self.operands()?;
                self.same_dtype(x, dy)?;
                self.planes(x, kernel.len())?;
                self.planes(dy, kernel.len())?;
                let divides = conv.groups > 0 && x.shape[1] % conv.groups == 0;
                self.require(divides, || {
                    format!("{} groups do not divide the channels of {x}", conv.groups)
                })?;
                let channels = x.shape[1] / conv.groups;
                let w = TensorType::new(
                    x.dtype,
                    Shape::new([dy.shape[1], channels].into_iter().chain(kernel.iter().copied())),
                );
                let expected = self.conv_output(conv, x, &w)?;
                self.require(dy.shape == expected, || {
                    format!("the gradient is {dy}, the forward result is {expected}")
                })?;
                one(self.product_type(x.dtype, conv.result)?, w.shape)
            }
            Op::MaxPool(window) => {
                let [x] = self.operands()?;
                one(x.dtype, self.pool_output(window, x)?)
            }
            Op::AvgPool { window, .. } => {
                let [x] = self.operands()?;
                self.undilated(window)?;
                one(x.dtype, self.pool_output(window, x)?)
            }
            Op::MaxPoolWithIndices { window, dtype } => {
                let [x] = self.operands()?;
                let shape = self.pool_output(window, x)?;
                let indices = TensorType {
                    dtype: *dtype,
                    shape: shape.clone(),
                };
                self.integer(&indices)?;
                Ok(smallvec![
                    TensorType {
                        dtype: x.dtype,
                        shape
                    },
                    indices
                ])
            }
            Op::MaxPoolGrad { input } => {
                let [dy, indices] = self.operands()?;
                self.planes(dy, input.len())?;
                self.integer(indices)?;
                self.require(dy.shape == indices.shape, || {
                    format!("{dy} and {indices} differ in shape")
                })?;
                one(dy.dtype, Shape::new(dy.shape[..2].iter().chain(input).copied()))
            }
            Op::AvgPoolGrad { window, input, .. } => {
                let [dy] = self.operands()?;
                self.undilated(window)?;
                self.planes(dy, input.len())?;
                let x = TensorType::new(dy.dtype, Shape::new(dy.shape[..2].iter().chain(input).copied()));
                let expected = self.pool_output(window, &x)?;
                self.require(dy.shape == expected, || {
                    format!("the gradient is {dy}, the forward result is {expected}")
                })?;
                Ok(smallvec![x])
            }
            other => unreachable!("{} has no window", other.name()),
        }
    }

    fn planes(&self, ty: &TensorType, spatial: usize) -> Infer<()> {
        self.require(ty.shape.rank() == spatial + 2, || {
            format!("{ty} does not have {spatial} spatial dimensions")
        })
    }

    fn conv_output(&self, conv: &ConvDims, x: &TensorType, w: &TensorType) -> Infer<Shape> {
        let spatial = conv.stride.len();
        self.planes(x, spatial)?;
        self.planes(w, spatial)?;
        self.number(x)?;
        for (what, list) in [
            ("pad_low", &conv.pad_low),
            ("pad_high", &conv.pad_high),
            ("dilation", &conv.dilation),
        ] {
            self.per_dimension(what, list.len(), spatial)?;
        }
        let positive = conv.groups >= 1 && conv.stride.iter().chain(&conv.dilation).all(|&n| n >= 1);
        self.require(positive, || "groups, strides and dilations are at least 1".into())?;
        let grouped =
            Some(x.shape[1]) == w.shape[1].checked_mul(conv.groups) && w.shape[0].is_multiple_of(conv.groups);
        self.require(grouped, || {
            format!("{x} and weight {w} do not fit {} groups", conv.groups)
        })?;
        let mut shape = Shape::new(
            [x.shape[0], w.shape[0]]
                .into_iter()
                .chain(x.shape[2..].iter().copied()),
        );
        for axis in 0..spatial {
            match conv.output_extent(axis, x.shape[axis + 2], w.shape[axis + 2]) {
                Some(extent) => shape[axis + 2] = extent,
                None => {
                    return self.fail(format!(
                        "kernel {w} does not fit into {x} in spatial dimension {axis}"
                    ));
                }
            }
        }
        Ok(shape)
    }

    /// What a mean divides by is counted from where a window begins and ends: its elements are neighbours.
    fn undilated(&self, window: &Window) -> Infer<()> {
        self.require(window.dilation.iter().all(|&n| n == 1), || {
            format!("the dilation {:?} of a mean is not 1", window.dilation)
        })
    }

    fn pool_output(&self, window: &Window, x: &TensorType) -> Infer<Shape> {
        let spatial = window.size.len();
        self.planes(x, spatial)?;
        self.number(x)?;
        for (what, list) in [
            ("stride", &window.stride),
            ("pad_low", &window.pad_low),
            ("pad_high", &window.pad_high),
            ("dilation", &window.dilation),
        ] {
            self.per_dimension(what, list.len(), spatial)?;
        }
        let positive = window.stride.iter().chain(&window.dilation).all(|&n| n >= 1);
        self.require(positive, || "strides and dilations are at least 1".into())?;
        let mut shape = x.shape.clone();
        for axis in 0..spatial {
            match window.output_extent(axis, x.shape[axis + 2]) {
                Some(extent) => shape[axis + 2] = extent,
                None => {
                    return self.fail(format!(
                        "the window does not fit into {x} in spatial dimension {axis}"
                    ));
                }
            }
        }
        Ok(shape)
    }

    pub(super) fn attention(&self) -> Infer<Results> {
        let (dims, gradient) = match self.op {
            Op::Attention(dims) => (dims, false),
            Op::AttentionGrad(dims) => (dims, true),
            other => unreachable!("{} is no attention", other.name()),
        };
        self.require(dims.is_consistent(), || {
            "mask_last takes mask and hidden, drop_scores takes dropout".into()
        })?;
        let at = dims.operands();
        let expected = if gradient { at.gradient } else { at.forward };
        self.require(self.inputs.len() == expected, || {
            format!("takes {expected} operands, got {}", self.inputs.len())
        })?;
        let (q, k, v, scale) = (self.inputs[0], self.inputs[1], self.inputs[2], self.inputs[3]);
        for ty in [q, k, v] {
            self.same_dtype(q, ty)?;
            self.float(ty)?;
            self.require(ty.shape.rank() == 4, || {
                format!("{ty} is not [batch, heads, length, width]")
            })?;
        }
        // Numbers and masks have the operands' type, or the type in which attention computes.
        let fitting = |ty: &TensorType| ty.dtype == q.dtype || ty.dtype == q.dtype.compute();
        let number = |ty: &TensorType| {
            self.require(fitting(ty) && ty.shape.rank() == 0, || {
                format!("takes a scalar of type {}[], got {ty}", q.dtype)
            })
        };
        number(scale)?;
        let fits = k.shape[1] > 0
            && q.shape[1] % k.shape[1] == 0
            && q.shape[0] == k.shape[0]
            && k.shape[..3] == v.shape[..3]
            && q.shape[3] == k.shape[3];
        self.require(fits, || format!("query {q}, key {k} and value {v} do not fit"))?;
        let scores = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]];
        let broadcasts = |mask: &TensorType| {
            let fits = mask.shape.rank() == 4
                && mask
                    .shape
                    .iter()
                    .zip(scores)
                    .all(|(&have, want)| have == 1 || have == want);
            self.require(fits, || {
                format!("mask {mask} does not broadcast to scores {scores:?}")
            })
        };
        if let Some(at) = at.mask {
            let mask = self.inputs[at];
            self.require(fitting(mask), || {
                format!("operands {q} and {mask} differ in element type")
            })?;
            broadcasts(mask)?;
        }
        if let Some(at) = at.hidden {
            let hidden = self.inputs[at];
            self.require(hidden.dtype == DType::Bool, || format!("{hidden} is not bool"))?;
            broadcasts(hidden)?;
            number(self.inputs[at + 1])?;
        }
        if let Some(at) = at.dropout {
            for offset in 0..2 {
                self.scalar(self.inputs[at + offset], DType::U64)?;
                number(self.inputs[at + 2 + offset])?;
            }
        }
        let out = TensorType {
            dtype: q.dtype,
            shape: q.shape.with(3, v.shape[3]),
        };
        let stats = TensorType {
            dtype: q.dtype.compute(),
            shape: q.shape.with(3, 2),
        };
        if !gradient {
            return Ok(smallvec![out, stats]);
        }
        for (given, expected) in self.inputs[at.forward..].iter().zip([&stats, &out]) {
            self.require(*given == expected, || format!("expected {expected}, got {given}"))?;
        }
        for factor in &self.inputs[at.forward + 2..] {
            number(factor)?;
        }
        Ok(smallvec![q.clone(), k.clone(), v.clone()])
    }
}
