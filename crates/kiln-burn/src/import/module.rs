//! Lowering of module operations: the dispatch, and linear, embedding and attention.

use burn_ir::{
    AttentionOpIr, EmbeddingBackwardOpIr, EmbeddingOpIr, LinearOpIr, LinearWeightBackwardOpIr,
    LinearXBackwardOpIr, ModuleOperationIr, OperationIr,
};
use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, ReduceOp, ScatterMode, UnaryOp};
use kiln_graph::{DType, Op, Shape, Value};

use super::lower::{Done, Fault, Lower, shape_of};
use super::{conv, external, float, interpolate, pool};

pub(super) fn lower(l: &mut Lower, operation: &OperationIr, op: &ModuleOperationIr) -> Done {
    use ModuleOperationIr as M;
    match op {
        M::Embedding(d) => embedding(l, d),
        M::EmbeddingBackward(d) => embedding_backward(l, d),
        M::Linear(d) => linear(l, d),
        M::LinearXBackward(d) => linear_x_backward(l, d),
        M::LinearWeightBackward(d) => linear_weight_backward(l, d),
        M::LinearBiasBackward(d) => {
            let grad = l.input(&d.output_grad)?;
            let axes: Dims = (0..l.shape(grad).rank() - 1).collect();
            let out = l.reduce(ReduceOp::Sum, grad, &axes)?;
            l.define(&d.out, out)
        }
        M::Conv1d(_)
        | M::Conv1dXBackward(_)
        | M::Conv1dWeightBackward(_)
        | M::Conv1dBiasBackward(_)
        | M::Conv2d(_)
        | M::Conv2dXBackward(_)
        | M::Conv2dWeightBackward(_)
        | M::Conv2dBiasBackward(_)
        | M::Conv3d(_)
        | M::Conv3dXBackward(_)
        | M::Conv3dWeightBackward(_)
        | M::Conv3dBiasBackward(_)
        | M::ConvTranspose1d(_)
        | M::ConvTranspose2d(_)
        | M::ConvTranspose3d(_) => conv::lower(l, op),
        M::AvgPool1d(_)
        | M::AvgPool2d(_)
        | M::AvgPool1dBackward(_)
        | M::AvgPool2dBackward(_)
        | M::AdaptiveAvgPool1d(_)
        | M::AdaptiveAvgPool2d(_)
        | M::AdaptiveAvgPool1dBackward(_)
        | M::AdaptiveAvgPool2dBackward(_)
        | M::MaxPool1d(_)
        | M::MaxPool1dWithIndices(_)
        | M::MaxPool1dWithIndicesBackward(_)
        | M::MaxPool2d(_)
        | M::MaxPool2dWithIndices(_)
        | M::MaxPool2dWithIndicesBackward(_) => pool::lower(l, operation, op),
        M::Interpolate(d) => interpolate::forward(l, operation, d),
        M::InterpolateBackward(d) => interpolate::backward(l, operation, d),
        M::Attention(d) => attention(l, d),
        M::DeformableConv2d(_)
        | M::DeformableConv2dBackward(_)
        | M::Rfft(_)
        | M::IRfft(_)
        | M::CtcLoss(_)
        | M::CtcLossBackward(_) => external::keep(l, operation),
    }
}

/// `weights: [n, d], indices: [..] -> [.., d]`.
fn embedding(l: &mut Lower, d: &EmbeddingOpIr) -> Done {
    let (weights, indices) = (l.input(&d.weights)?, l.input(&d.indices)?);
    let count = l.shape(indices).numel();
    let indices = l.reshape(indices, [count])?;
    let out = l.index_select(weights, 0, indices)?;
    l.define_reshaped(&d.out, out)
}

/// The gradient of each looked-up row added to the row.
fn embedding_backward(l: &mut Lower, d: &EmbeddingBackwardOpIr) -> Done {
    let (weights, grad, indices) = (l.input(&d.weights)?, l.input(&d.out_grad)?, l.input(&d.indices)?);
    let shape = l.shape(weights);
    let count = l.shape(indices).numel();
    let indices = l.reshape(indices, [count])?;
    let grad = l.reshape(grad, [count, shape[1]])?;
    let zeros = l.full(0i64, l.dtype(weights), &shape)?;
    let mode = ScatterMode::Add;
    let out = l.add(Op::IndexPut { axis: 0, mode }, &[zeros, indices, grad])?;
    l.define(&d.out, out)
}

/// `x: [.., i], weight: [i, o], bias: [o] -> [.., o]`.
fn linear(l: &mut Lower, d: &LinearOpIr) -> Done {
    let (x, weight) = (l.input(&d.x)?, l.input(&d.weight)?);
    let last = l.shape(x).rank() - 1;
    let dims = DotDims {
        a_contract: Dims::from_slice(&[last]),
        b_contract: Dims::from_slice(&[0]),
        ..DotDims::default()
    };
    let mut out = l.dot(dims, x, weight)?;
    if let Some(bias) = &d.bias {
        let bias = l.input(bias)?;
        let bias = l.broadcast_to(bias, &shape_of(&d.out))?;
        out = l.binary(BinaryOp::Add, out, bias)?;
    }
    l.define(&d.out, out)
}

fn linear_x_backward(l: &mut Lower, d: &LinearXBackwardOpIr) -> Done {
    let (weight, grad) = (l.input(&d.weight)?, l.input(&d.output_grad)?);
    let last = l.shape(grad).rank() - 1;
    let dims = DotDims {
        a_contract: Dims::from_slice(&[last]),
        b_contract: Dims::from_slice(&[1]),
        ..DotDims::default()
    };
    let out = l.dot(dims, grad, weight)?;
    l.define(&d.out, out)
}

/// One product over all leading dimensions: the sum over the batch is part of it.
fn linear_weight_backward(l: &mut Lower, d: &LinearWeightBackwardOpIr) -> Done {
    let (x, grad) = (l.input(&d.x)?, l.input(&d.output_grad)?);
    let leading: Dims = (0..l.shape(x).rank() - 1).collect();
    let dims = DotDims {
        a_contract: leading.clone(),
        b_contract: leading,
        ..DotDims::default()
    };
    let out = l.dot(dims, x, grad)?;
    l.define(&d.out, out)
}

/// `softmax(mask(softcap(q k^T * scale)) + bias) v`. A query all of whose keys are masked gives zeros: the
/// row maximum is kept finite and the row sum positive. Half types compute in f32 throughout, as burn-flex
/// does.
fn attention(l: &mut Lower, d: &AttentionOpIr) -> Done {
    let (q, k, v) = (l.input(&d.query)?, l.input(&d.key)?, l.input(&d.value)?);
    let dtype = l.dtype(q);
    let (q, k, v) = (l.widen(q)?, l.widen(k)?, l.widen(v)?);
    let wide = l.dtype(q);
    let (of_q, of_k) = (l.shape(q), l.shape(k));
    let width = of_q[of_q.rank() - 1];
    let scale = match d.options.scale {
        Some(scale) => l.scalar(scale, wide)?,
        None => l.constant(1.0 / (width as f64).sqrt(), wide)?,
    };
    let softcap = d.options.softcap.map(|cap| l.scalar(cap, wide)).transpose()?;

    let shape = Shape::from([of_q[0], of_q[1], of_q[2], of_k[2]]);
    let k = l.transpose(k, &[0, 1, 3, 2])?;
    let scores = float::product(l, q, k, &shape)?;
    let scale = l.splat(scale, &shape)?;
    let mut scores = l.binary(BinaryOp::Mul, scores, scale)?;
    if let Some(cap) = softcap {
        let cap = l.splat(cap, &shape)?;
        scores = l.binary(BinaryOp::Div, scores, cap)?;
        scores = l.unary(UnaryOp::Tanh, scores)?;
        scores = l.binary(BinaryOp::Mul, scores, cap)?;
    }
    let low = l.full(f64::NEG_INFINITY, wide, &shape)?;
    if let Some(mask) = &d.mask {
        let mask = l.input(mask)?;
        let mask = l.broadcast_to(mask, &shape)?;
        scores = l.select(mask, low, scores)?;
    }
    if d.options.is_causal {
        let future = future_keys(l, &shape)?;
        scores = l.select(future, low, scores)?;
    }
    if let Some(bias) = &d.attn_bias {
        let bias = l.input(bias)?;
        let bias = l.cast(bias, wide)?;
        let bias = l.broadcast_to(bias, &shape)?;
        scores = l.binary(BinaryOp::Add, scores, bias)?;
    }

    let (lowest, least) = if wide == DType::F64 {
        (f64::MIN, f64::MIN_POSITIVE)
    } else {
        (f64::from(f32::MIN), f64::from(f32::MIN_POSITIVE))
    };
    let max = l.reduce(ReduceOp::Max, scores, &[3])?;
    let max = at_least(l, max, lowest)?;
    let max = l.broadcast(max, &shape, &[0, 1, 2])?;
    let shifted = l.binary(BinaryOp::Sub, scores, max)?;
    let exp = l.unary(UnaryOp::Exp, shifted)?;
    let sum = l.reduce(ReduceOp::Sum, exp, &[3])?;
    let sum = at_least(l, sum, least)?;
    let sum = l.broadcast(sum, &shape, &[0, 1, 2])?;
    let probabilities = l.binary(BinaryOp::Div, exp, sum)?;
    let out = float::product(l, probabilities, v, &shape_of(&d.out))?;
    let out = l.cast(out, dtype)?;
    l.define(&d.out, out)
}

/// `x`, but `least` where it is smaller; NaN stays.
fn at_least(l: &mut Lower, x: Value, least: f64) -> Result<Value, Fault> {
    let least = l.full(least, l.dtype(x), &l.shape(x))?;
    let below = l.compare(CompareOp::Lt, x, least)?;
    l.select(below, least, x)
}

/// True where the key lies after the query, both counted from their ends.
fn future_keys(l: &mut Lower, shape: &Shape) -> Result<Value, Fault> {
    let offset = shape[3] as i64 - shape[2] as i64;
    let query = l.iota(DType::I64, shape, 2)?;
    let last = l.with_constant(BinaryOp::Add, query, offset)?;
    let key = l.iota(DType::I64, shape, 3)?;
    l.compare(CompareOp::Gt, key, last)
}
