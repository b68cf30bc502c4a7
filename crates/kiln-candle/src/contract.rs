//! Matrix products and convolutions.
//!
//! Both come down to candle's batched matrix product, in f32 for f32 and the half types and in f64 for f64.
//! Integers take the f64 product where that is exact and a sum of outer products otherwise. A convolution
//! multiplies the weights with the windows of its input, one sample at a time; its gradients are the two
//! products with one operand moved to the other side, the one for the input followed by the adjoint of
//! reading windows.

use candle_core::{DType as CandleType, Device, Result, Tensor};
use kiln_graph::op::{ConvDims, DotDims};
use kiln_graph::{DType, TensorType};

use crate::ints;
use crate::value::{Val, select, storage};
use crate::window::{Geometry, Windows};

/// `[batch, m, k] x [batch, k, n]` of tensors in the compute type of `dtype`.
pub(crate) fn matmul(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let (batch, m, k) = a.dims3()?;
    let n = b.dims()[2];
    if batch * m * k * n == 0 {
        return Tensor::zeros((batch, m, n), a.dtype(), &Device::Cpu);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    if !dtype.is_int() {
        return a.matmul(&b);
    }
    if ints::product_bound(&a, &b, k)? < 1 << 53 {
        let product = a
            .to_dtype(CandleType::F64)?
            .matmul(&b.to_dtype(CandleType::F64)?)?;
        return crate::value::wrap(&product.to_dtype(CandleType::I64)?, dtype);
    }
    let mut sum = Tensor::zeros((batch, m, n), CandleType::I64, &Device::Cpu)?;
    for i in 0..k {
        let column = a.narrow(2, i, 1)?.broadcast_as((batch, m, n))?.contiguous()?;
        let row = b.narrow(1, i, 1)?.broadcast_as((batch, m, n))?.contiguous()?;
        sum = ints::add(&sum, &ints::mul(&column, &row, dtype)?, dtype)?;
    }
    Ok(sum)
}

pub(crate) fn dot_general(a: &Val, b: &Val, dims: &DotDims, result: &TensorType) -> Result<Val> {
    let extent = |x: &Val, axes: &[usize]| axes.iter().map(|&axis| x.dims()[axis]).product::<usize>();
    let free_a = DotDims::free(a.dims().len(), &dims.a_batch, &dims.a_contract);
    let free_b = DotDims::free(b.dims().len(), &dims.b_batch, &dims.b_contract);
    let batch = extent(a, &dims.a_batch);
    let (m, k, n) = (
        extent(a, &free_a),
        extent(a, &dims.a_contract),
        extent(b, &free_b),
    );
    let order = |lists: [&[usize]; 3]| lists.concat();
    let left = a
        .compute()?
        .permute(order([&dims.a_batch, &free_a, &dims.a_contract]))?;
    let right = b
        .compute()?
        .permute(order([&dims.b_batch, &dims.b_contract, &free_b]))?;
    let left = left.contiguous()?.reshape((batch, m, k))?;
    let right = right.contiguous()?.reshape((batch, k, n))?;
    let product = matmul(&left, &right, a.dtype)?;
    Val::narrow(product.reshape(result.shape.dims())?, result.dtype)
}

/// Shapes of one convolution and the table of its windows.
struct Conv {
    groups: usize,
    /// Input channels.
    channels: usize,
    /// Output channels of a group.
    outputs: usize,
    /// Input channels of a group times window elements: the contracted extent.
    depth: usize,
    windows: Windows,
}

impl Conv {
    /// `x` is `[n, c, input..]`, `w` is `[o, c / groups, kernel..]`, `y` is `[n, o, output..]`.
    fn new(conv: &ConvDims, x: &[usize], w: &[usize], y: &[usize]) -> Result<Self> {
        let windows = Windows::new(&Geometry::of_conv(conv, &w[2..], &x[2..], &y[2..]))?;
        Ok(Self {
            groups: conv.groups,
            channels: x[1],
            outputs: w[0] / conv.groups,
            depth: w[1] * windows.elements,
            windows,
        })
    }

    /// Windows of sample `i` of `x`: `[groups, depth, outputs]`.
    fn read(&self, x: &Tensor, i: usize) -> Result<Tensor> {
        let planes = x
            .narrow(0, i, 1)?
            .reshape((self.channels, self.windows.positions))?;
        let zero = Tensor::zeros(1, x.dtype(), &Device::Cpu)?;
        self.windows
            .read(&planes, &zero)?
            .reshape((self.groups, self.depth, self.windows.outputs))
    }

    /// Sample `i` of `y`: `[groups, outputs of a group, positions]`.
    fn sample(&self, y: &Tensor, i: usize) -> Result<Tensor> {
        y.narrow(0, i, 1)?
            .reshape((self.groups, self.outputs, self.windows.outputs))
    }

    /// Product of the weight's matrices with the windows of a sample. Padding has no part in it, but as
    /// zeros in a product it would: zero times infinity or NaN is NaN. So in that case the elements of the
    /// window are multiplied one by one, and padding is left out.
    fn product(&self, weight: &Tensor, read: &Tensor, dtype: DType) -> Result<Tensor> {
        if !self.careful(weight)? {
            return matmul(weight, read, dtype);
        }
        let mut sum = Tensor::zeros(
            (self.groups, self.outputs, self.windows.outputs),
            weight.dtype(),
            &Device::Cpu,
        )?;
        for k in 0..self.windows.elements {
            let product = matmul(&self.element(weight, 2, k)?, &self.element(read, 1, k)?, dtype)?;
            let inside = self.windows.inside(k, product.shape())?;
            sum = sum.add(&select(&inside, &product, &product.zeros_like()?)?)?;
        }
        Ok(sum)
    }

    /// Product of a sample's gradient with the windows of its input, `[groups, outputs of a group, depth]`;
    /// padding as in [`Conv::product`].
    fn outer_product(&self, gradient: &Tensor, read: &Tensor, dtype: DType) -> Result<Tensor> {
        if !self.careful(gradient)? {
            return matmul(gradient, &read.transpose(1, 2)?, dtype);
        }
        let elements = (0..self.windows.elements)
            .map(|k| {
                let inside = self.windows.inside(k, gradient.shape())?;
                let gradient = select(&inside, gradient, &gradient.zeros_like()?)?;
                matmul(&gradient, &self.element(read, 1, k)?.transpose(1, 2)?, dtype)
            })
            .collect::<Result<Vec<_>>>()?;
        let shape = (self.groups, self.outputs, self.depth);
        Tensor::stack(&elements, 3)?.reshape(shape)
    }

    /// Whether there is padding, and an operand has infinite or NaN elements, whose product with zero is
    /// not zero.
    fn careful(&self, x: &Tensor) -> Result<bool> {
        if matches!(x.dtype(), CandleType::I64) || !self.windows.padded()? {
            return Ok(false);
        }
        let nothing = x.mul(&x.zeros_like()?)?.abs()?.contiguous()?.sum_all()?;
        Ok(nothing.to_dtype(CandleType::F64)?.to_scalar::<f64>()?.is_nan())
    }

    /// Element `k` of the windows, out of dimension `axis` with extent `depth`, which holds channels and
    /// elements.
    fn element(&self, x: &Tensor, axis: usize, k: usize) -> Result<Tensor> {
        let mut shape = x.dims().to_vec();
        shape[axis] = self.depth / self.windows.elements;
        shape.insert(axis + 1, self.windows.elements);
        x.reshape(shape)?.narrow(axis + 1, k, 1)?.squeeze(axis + 1)
    }

    /// The weight as matrices: `[groups, outputs of a group, depth]`.
    fn matrices(&self, w: &Tensor) -> Result<Tensor> {
        w.reshape((self.groups, self.outputs, self.depth))
    }
}

pub(crate) fn conv(x: &Val, w: &Val, dims: &ConvDims, result: &TensorType) -> Result<Val> {
    if x.numel() * w.numel() == 0 {
        return Val::zeros(&result.shape, result.dtype);
    }
    let conv = Conv::new(dims, x.dims(), w.dims(), &result.shape)?;
    let (input, weight) = (x.compute()?, conv.matrices(&w.compute()?)?);
    let samples = (0..x.dims()[0])
        .map(|i| conv.product(&weight, &conv.read(&input, i)?, x.dtype))
        .collect::<Result<Vec<_>>>()?;
    Val::narrow(
        Tensor::cat(&samples, 0)?.reshape(result.shape.dims())?,
        result.dtype,
    )
}

pub(crate) fn conv_input_grad(dy: &Val, w: &Val, dims: &ConvDims, result: &TensorType) -> Result<Val> {
    if dy.numel() * w.numel() == 0 {
        return Val::zeros(&result.shape, result.dtype);
    }
    let conv = Conv::new(dims, &result.shape, w.dims(), dy.dims())?;
    let gradient = dy.compute()?;
    let weight = conv.matrices(&w.compute()?)?.transpose(1, 2)?;
    let accumulate = accumulator(dy.dtype);
    let samples = (0..dy.dims()[0])
        .map(|i| {
            let read = matmul(&weight, &conv.sample(&gradient, i)?, dy.dtype)?;
            let read = read.reshape((conv.channels, conv.windows.elements * conv.windows.outputs))?;
            let read = Val::new(read.to_dtype(storage(accumulate))?, accumulate);
            Ok(conv.windows.add_up(&read)?.tensor)
        })
        .collect::<Result<Vec<_>>>()?;
    Val::narrow(
        Tensor::cat(&samples, 0)?.reshape(result.shape.dims())?,
        result.dtype,
    )
}

pub(crate) fn conv_weight_grad(x: &Val, dy: &Val, dims: &ConvDims, result: &TensorType) -> Result<Val> {
    if x.numel() * dy.numel() == 0 {
        return Val::zeros(&result.shape, result.dtype);
    }
    let conv = Conv::new(dims, x.dims(), &result.shape, dy.dims())?;
    let (input, gradient) = (x.compute()?, dy.compute()?);
    let accumulate = storage(accumulator(x.dtype));
    let mut sum: Option<Tensor> = None;
    for i in 0..x.dims()[0] {
        let product = conv.outer_product(&conv.sample(&gradient, i)?, &conv.read(&input, i)?, x.dtype)?;
        let product = product.to_dtype(accumulate)?;
        sum = Some(match sum {
            None => product,
            Some(sum) if x.dtype.is_int() => ints::add(&sum, &product, x.dtype)?,
            Some(sum) => sum.add(&product)?,
        });
    }
    match sum {
        Some(sum) => Val::narrow(sum.reshape(result.shape.dims())?, result.dtype),
        None => Val::zeros(&result.shape, result.dtype),
    }
}

/// The type in which products of matrices are summed up further.
fn accumulator(dtype: DType) -> DType {
    if dtype.is_float() { DType::F64 } else { dtype }
}
