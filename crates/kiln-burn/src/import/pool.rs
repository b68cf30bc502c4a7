//! Lowering of pooling in one and two dimensions.
//!
//! Average and max pooling have primitives. burn-flex gives a window that starts beyond the padded input (in
//! ceil mode) an output of its own where the primitives do not; such shapes are rare and stay whole.
//!
//! Adaptive average pooling is ordinary average pooling where the output extents divide the input's.
//! Elsewhere windows differ in size: output `i` is the mean of inputs
//! `floor(i n / m) .. ceil((i + 1) n / m)`, which is a product with an `[m, n]` matrix of weights along each
//! dimension.

use burn_ir::{ModuleOperationIr, OperationIr, TensorIr};
use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, Window};
use kiln_graph::{DType, Op, Shape, Value};

use super::external;
use super::lower::{Done, Fault, Lower, shape_of, tensor_type};

/// The window of a recorded pooling.
fn window(
    size: &[usize],
    stride: &[usize],
    padding: &[usize],
    dilation: &[usize],
    ceil_mode: bool,
) -> Window {
    Window {
        size: size.into(),
        stride: stride.into(),
        pad_low: padding.into(),
        pad_high: padding.into(),
        dilation: dilation.into(),
        ceil_mode,
    }
}

/// The window of a pooling in one dimension.
fn line_window(size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> Window {
    window(&[size], &[stride], &[padding], &[dilation], ceil_mode)
}

/// Lowers one of the poolings; other operations are the caller's fault and reported as such.
pub(super) fn lower(l: &mut Lower, operation: &OperationIr, op: &ModuleOperationIr) -> Done {
    use ModuleOperationIr as M;
    match op {
        M::AvgPool1d(d) => {
            let w = line_window(d.kernel_size, d.stride, d.padding, 1, d.ceil_mode);
            if !fits(&w, &d.x, &d.out) {
                return external::keep(l, operation);
            }
            avg(l, w, d.count_include_pad, &d.x, &d.out)
        }
        M::AvgPool2d(d) => {
            let w = window(&d.kernel_size, &d.stride, &d.padding, &[1, 1], d.ceil_mode);
            if !fits(&w, &d.x, &d.out) {
                return external::keep(l, operation);
            }
            avg(l, w, d.count_include_pad, &d.x, &d.out)
        }
        M::AvgPool1dBackward(d) => {
            let w = line_window(d.kernel_size, d.stride, d.padding, 1, d.ceil_mode);
            if !fits(&w, &d.x, &d.grad) {
                return external::keep(l, operation);
            }
            avg_backward(l, w, d.count_include_pad, &d.grad, &d.out)
        }
        M::AvgPool2dBackward(d) => {
            let w = window(&d.kernel_size, &d.stride, &d.padding, &[1, 1], d.ceil_mode);
            if !fits(&w, &d.x, &d.grad) {
                return external::keep(l, operation);
            }
            avg_backward(l, w, d.count_include_pad, &d.grad, &d.out)
        }
        M::AdaptiveAvgPool1d(d) => adaptive(l, &d.x, &d.out),
        M::AdaptiveAvgPool2d(d) => adaptive(l, &d.x, &d.out),
        M::AdaptiveAvgPool1dBackward(d) => adaptive_backward(l, &d.grad, &d.out),
        M::AdaptiveAvgPool2dBackward(d) => adaptive_backward(l, &d.grad, &d.out),
        M::MaxPool1d(d) => {
            let w = line_window(d.kernel_size, d.stride, d.padding, d.dilation, d.ceil_mode);
            max(l, operation, w, &d.x, &d.out)
        }
        M::MaxPool2d(d) => {
            let w = window(&d.kernel_size, &d.stride, &d.padding, &d.dilation, d.ceil_mode);
            max(l, operation, w, &d.x, &d.out)
        }
        M::MaxPool1dWithIndices(d) => {
            let w = line_window(d.kernel_size, d.stride, d.padding, d.dilation, d.ceil_mode);
            max_with_indices(l, operation, w, &d.x, &d.out, &d.out_indices)
        }
        M::MaxPool2dWithIndices(d) => {
            let w = window(&d.kernel_size, &d.stride, &d.padding, &d.dilation, d.ceil_mode);
            max_with_indices(l, operation, w, &d.x, &d.out, &d.out_indices)
        }
        M::MaxPool1dWithIndicesBackward(d) => {
            let w = line_window(d.kernel_size, d.stride, d.padding, d.dilation, d.ceil_mode);
            max_backward(l, operation, &w, [&d.x, &d.grad, &d.indices], &d.out)
        }
        M::MaxPool2dWithIndicesBackward(d) => {
            let w = window(&d.kernel_size, &d.stride, &d.padding, &d.dilation, d.ceil_mode);
            max_backward(l, operation, &w, [&d.x, &d.grad, &d.indices], &d.out)
        }
        _ => Err(Fault::Unsupported("it is no pooling".into())),
    }
}

/// Whether the primitive's output extents are the recorded ones.
fn fits(window: &Window, x: &TensorIr, out: &TensorIr) -> bool {
    (0..window.size.len())
        .all(|axis| window.output_extent(axis, x.shape[axis + 2]) == Some(out.shape[axis + 2]))
}

fn avg(l: &mut Lower, window: Window, count_include_pad: bool, x: &TensorIr, out: &TensorIr) -> Done {
    let x = l.input(x)?;
    let op = Op::AvgPool {
        window,
        count_include_pad,
    };
    let result = l.add(op, &[x])?;
    l.define(out, result)
}

fn avg_backward(
    l: &mut Lower,
    window: Window,
    count_include_pad: bool,
    grad: &TensorIr,
    out: &TensorIr,
) -> Done {
    let grad = l.input(grad)?;
    let input = Dims::from_slice(&shape_of(out)[2..]);
    let op = Op::AvgPoolGrad {
        window,
        count_include_pad,
        input,
    };
    let dx = l.add(op, &[grad])?;
    l.define(out, dx)
}

fn max(l: &mut Lower, operation: &OperationIr, window: Window, x: &TensorIr, out: &TensorIr) -> Done {
    if !fits(&window, x, out) {
        return external::keep(l, operation);
    }
    let x = l.input(x)?;
    let result = l.add(Op::MaxPool(window), &[x])?;
    l.define(out, result)
}

fn max_with_indices(
    l: &mut Lower,
    operation: &OperationIr,
    window: Window,
    x: &TensorIr,
    out: &TensorIr,
    indices: &TensorIr,
) -> Done {
    if !fits(&window, x, out) {
        return external::keep(l, operation);
    }
    let x = l.input(x)?;
    let dtype = tensor_type(indices)?.dtype;
    let results = l.add_many(Op::MaxPoolWithIndices { window, dtype }, &[x])?;
    l.define(out, results[0])?;
    l.define(indices, results[1])
}

fn max_backward(
    l: &mut Lower,
    operation: &OperationIr,
    window: &Window,
    [x, grad, indices]: [&TensorIr; 3],
    out: &TensorIr,
) -> Done {
    if !fits(window, x, grad) {
        return external::keep(l, operation);
    }
    let (grad, indices) = (l.input(grad)?, l.input(indices)?);
    let input = Dims::from_slice(&shape_of(out)[2..]);
    let dx = l.add(Op::MaxPoolGrad { input }, &[grad, indices])?;
    l.define(out, dx)
}

/// The window of ordinary pooling that takes `input` to `output`, if each extent of `output` divides.
fn even_window(input: &[usize], output: &[usize]) -> Option<Window> {
    let divides = input
        .iter()
        .zip(output)
        .all(|(n, m)| *m > 0 && n % m == 0 && *n > 0);
    divides.then(|| {
        let size: Vec<usize> = input.iter().zip(output).map(|(n, m)| n / m).collect();
        let zeros = vec![0; size.len()];
        window(&size, &size, &zeros, &vec![1; size.len()], false)
    })
}

fn adaptive(l: &mut Lower, x: &TensorIr, out: &TensorIr) -> Done {
    if let Some(window) = even_window(&shape_of(x)[2..], &shape_of(out)[2..]) {
        return avg(l, window, true, x, out);
    }
    let mut x = l.input(x)?;
    let extents = shape_of(out);
    l.p.full_precision = true;
    for axis in 2..extents.rank() {
        let from = l.shape(x)[axis];
        let weights = mean_weights(l, l.dtype(x), extents[axis], from)?;
        x = along(l, x, axis, weights, 1)?;
    }
    l.define(out, x)
}

fn adaptive_backward(l: &mut Lower, grad: &TensorIr, out: &TensorIr) -> Done {
    let extents = shape_of(out);
    if let Some(window) = even_window(&extents[2..], &shape_of(grad)[2..]) {
        return avg_backward(l, window, true, grad, out);
    }
    let mut grad = l.input(grad)?;
    l.p.full_precision = true;
    for axis in 2..extents.rank() {
        let to = l.shape(grad)[axis];
        let weights = mean_weights(l, l.dtype(grad), to, extents[axis])?;
        grad = along(l, grad, axis, weights, 0)?;
    }
    l.define(out, grad)
}

/// Replaces dimension `axis` of `x` by its product with dimension `contract` of a matrix. These are means: 16
/// bits of a third would be off by as much in all elements, so autocast leaves them alone.
fn along(l: &mut Lower, x: Value, axis: usize, weights: Value, contract: usize) -> Result<Value, Fault> {
    let rank = l.shape(x).rank();
    let dims = DotDims {
        a_contract: Dims::from_slice(&[axis]),
        b_contract: Dims::from_slice(&[contract]),
        ..DotDims::default()
    };
    let product = l.dot(dims, x, weights)?;
    // The new dimension came out last.
    let mut perm: Dims = (0..rank - 1).collect();
    perm.insert(axis, rank - 1);
    l.transpose(product, &perm)
}

/// `[outputs, inputs]`: row `i` has `1 / count` where input `j` lies in window `i` of an adaptive pooling.
fn mean_weights(l: &mut Lower, dtype: DType, outputs: usize, inputs: usize) -> Result<Value, Fault> {
    let shape = Shape::from([outputs, inputs]);
    let i = l.iota(DType::I64, &shape, 0)?;
    let j = l.iota(DType::I64, &shape, 1)?;
    let scaled = l.with_constant(BinaryOp::Mul, i, inputs as i64)?;
    let start = l.with_constant(BinaryOp::Div, scaled, outputs as i64)?;
    // ceil((i + 1) n / m) = (i n + n + m - 1) / m
    let end = l.with_constant(BinaryOp::Add, scaled, (inputs + outputs) as i64 - 1)?;
    let end = l.with_constant(BinaryOp::Div, end, outputs as i64)?;
    let count = l.binary(BinaryOp::Sub, end, start)?;
    let after = l.compare(CompareOp::Ge, j, start)?;
    let before = l.compare(CompareOp::Lt, j, end)?;
    let inside = l.binary(BinaryOp::And, after, before)?;
    let inside = l.cast(inside, dtype)?;
    let count = l.cast(count, dtype)?;
    l.binary(BinaryOp::Div, inside, count)
}
