//! A convolution in the library's terms: tensors, one operation, an operation graph.

use super::convolution::{Convolution, Task, Tensor};
use super::descriptor::Descriptor;
use crate::error::Result;
use crate::products::Number;
use crate::sys::cudnn::{
    CudnnFunctions, CudnnHandle, attribute, attribute_type, convolution_mode, data_type, descriptor,
};

/// Names of the tensors in a variant pack: `x`, `w` and `y`.
pub(super) const TENSORS: [i64; 3] = [1, 2, 3];

/// What every tensor's address is a multiple of, in bytes.
const ALIGNMENT: i64 = 16;

/// An operation graph of one convolution.
#[derive(Debug)]
pub(super) struct Described {
    // The graph leads to the operation, which leads to the parts: dropped in this order.
    pub(super) graph: Descriptor,
    _operation: Descriptor,
    _parts: [Descriptor; 4],
}

impl Described {
    pub(super) fn new(
        functions: &CudnnFunctions,
        handle: CudnnHandle,
        convolution: &Convolution,
    ) -> Result<Self> {
        let window = window(functions, convolution)?;
        let x = tensor(functions, &convolution.x, TENSORS[0])?;
        let w = tensor(functions, &convolution.w, TENSORS[1])?;
        let y = tensor(functions, &convolution.y, TENSORS[2])?;
        // The operation's type; its attributes for the window, x, w, y and the two factors.
        let (kind, window_at, [x_at, w_at, y_at], [alpha, beta]) = match convolution.task {
            Task::Forward => (
                descriptor::CONVOLUTION_FORWARD,
                attribute::FORWARD_CONVOLUTION,
                [attribute::FORWARD_X, attribute::FORWARD_W, attribute::FORWARD_Y],
                [attribute::FORWARD_ALPHA, attribute::FORWARD_BETA],
            ),
            Task::InputGradient => (
                descriptor::CONVOLUTION_BACKWARD_DATA,
                attribute::BACKWARD_DATA_CONVOLUTION,
                [
                    attribute::BACKWARD_DATA_DX,
                    attribute::BACKWARD_DATA_W,
                    attribute::BACKWARD_DATA_DY,
                ],
                [attribute::BACKWARD_DATA_ALPHA, attribute::BACKWARD_DATA_BETA],
            ),
            Task::WeightGradient => (
                descriptor::CONVOLUTION_BACKWARD_FILTER,
                attribute::BACKWARD_FILTER_CONVOLUTION,
                [
                    attribute::BACKWARD_FILTER_X,
                    attribute::BACKWARD_FILTER_DW,
                    attribute::BACKWARD_FILTER_DY,
                ],
                [attribute::BACKWARD_FILTER_ALPHA, attribute::BACKWARD_FILTER_BETA],
            ),
        };
        let mut operation = Descriptor::new(functions, kind)?;
        operation.descriptor(window_at, &window)?;
        operation.descriptor(x_at, &x)?;
        operation.descriptor(w_at, &w)?;
        operation.descriptor(y_at, &y)?;
        operation.float(alpha, 1.0)?;
        operation.float(beta, 0.0)?;
        operation.finalize()?;
        let mut graph = Descriptor::new(functions, descriptor::OPERATION_GRAPH)?;
        graph.descriptor(attribute::GRAPH_OPERATIONS, &operation)?;
        graph.handle(attribute::GRAPH_HANDLE, handle)?;
        graph.finalize()?;
        Ok(Self {
            graph,
            _operation: operation,
            _parts: [window, x, w, y],
        })
    }
}

/// How the window moves.
fn window(functions: &CudnnFunctions, convolution: &Convolution) -> Result<Descriptor> {
    let mut window = Descriptor::new(functions, descriptor::CONVOLUTION)?;
    let dimensions = i64::try_from(convolution.stride.len()).unwrap_or(i64::MAX);
    window.integers(attribute::CONVOLUTION_SPATIAL_DIMENSIONS, &[dimensions])?;
    // Sums are in f32, whatever the operands are.
    window.choice(
        attribute::CONVOLUTION_COMPUTE_TYPE,
        attribute_type::DATA_TYPE,
        data_type::FLOAT,
    )?;
    window.choice(
        attribute::CONVOLUTION_MODE,
        attribute_type::CONVOLUTION_MODE,
        convolution_mode::CROSS_CORRELATION,
    )?;
    for (attribute, numbers) in [
        (attribute::CONVOLUTION_PRE_PADDINGS, &convolution.low),
        (attribute::CONVOLUTION_POST_PADDINGS, &convolution.high),
        (attribute::CONVOLUTION_DILATIONS, &convolution.dilation),
        (attribute::CONVOLUTION_STRIDES, &convolution.stride),
    ] {
        window.integers(attribute, numbers)?;
    }
    window.finalize()?;
    Ok(window)
}

fn tensor(functions: &CudnnFunctions, of: &Tensor, id: i64) -> Result<Descriptor> {
    let number = match of.number {
        Number::F16 => data_type::HALF,
        Number::Bf16 => data_type::BFLOAT16,
        Number::F32 => data_type::FLOAT,
        Number::F64 => data_type::DOUBLE,
    };
    let mut tensor = Descriptor::new(functions, descriptor::TENSOR)?;
    tensor.choice(attribute::TENSOR_DATA_TYPE, attribute_type::DATA_TYPE, number)?;
    tensor.integers(attribute::TENSOR_DIMENSIONS, &of.extents)?;
    tensor.integers(attribute::TENSOR_STRIDES, &of.strides)?;
    tensor.integers(attribute::TENSOR_UNIQUE_ID, &[id])?;
    tensor.integers(attribute::TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT])?;
    tensor.finalize()?;
    Ok(tensor)
}
