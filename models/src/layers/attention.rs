//! Scaled dot-product attention, spelled out: `softmax(q k^T * scale, masked) v`.
//!
//! The explicit form is what a step compiler recognises and fuses, and what autograd differentiates on any
//! backend. Grouped-query attention repeats each key and value head in place, so that head `h` of the queries
//! reads head `h / groups`, as the originals do.

use burn::nn::Dropout;
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

/// Attention of queries over keys and values.
///
/// # Shapes
///
/// - query: `[batch, heads, queries, head_dim]`
/// - key, value: `[batch, kv_heads, keys, head_dim]`, `heads` a multiple of `kv_heads`
/// - mask: `[batch or 1, heads or 1, queries or 1, keys]`; `true` hides a key from a query
/// - output: `[batch, heads, queries, head_dim]`
///
/// A query whose keys are all hidden attends to all of them equally: the mask is the most negative finite
/// number of the dtype, not infinity, so no row of the softmax is NaN.
pub fn attention<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: Option<Tensor<B, 4, Bool>>,
    scale: f64,
    dropout: &Dropout,
) -> Tensor<B, 4> {
    let groups = query.dims()[1] / key.dims()[1];
    let key = repeat_heads(key, groups);
    let value = repeat_heads(value, groups);
    let mut scores = query.matmul(key.swap_dims(2, 3)).mul_scalar(scale);
    if let Some(mask) = mask {
        let lowest = scores.dtype().finfo().map_or(f32::MIN as f64, |info| info.min);
        scores = scores.mask_fill(mask, lowest);
    }
    dropout.forward(softmax(scores, 3)).matmul(value)
}

/// `[batch, kv_heads, keys, head_dim]` to `[batch, kv_heads * groups, keys, head_dim]`, each head repeated in
/// place.
fn repeat_heads<B: Backend>(tensor: Tensor<B, 4>, groups: usize) -> Tensor<B, 4> {
    if groups == 1 {
        return tensor;
    }
    let [batch, heads, length, dim] = tensor.dims();
    tensor
        .reshape([batch, heads, 1, length, dim])
        .expand([batch, heads, groups, length, dim])
        .reshape([batch, heads * groups, length, dim])
}

/// Mask of shape `[1, 1, queries, keys]` that hides the future: the queries are the last of the `keys`
/// positions.
pub fn causal_mask<B: Backend>(queries: usize, keys: usize, device: &B::Device) -> Tensor<B, 4, Bool> {
    let first = (keys - queries) as i64;
    let query = Tensor::<B, 1, Int>::arange(first..keys as i64, device).reshape([queries, 1]);
    let key = Tensor::<B, 1, Int>::arange(0..keys as i64, device).reshape([1, keys]);
    key.expand([queries, keys])
        .greater(query.expand([queries, keys]))
        .reshape([1, 1, queries, keys])
}

/// `[batch, length, heads * head_dim]` to `[batch, heads, length, head_dim]`.
pub fn split_heads<B: Backend>(tensor: Tensor<B, 3>, heads: usize) -> Tensor<B, 4> {
    let [batch, length, width] = tensor.dims();
    tensor
        .reshape([batch, length, heads, width / heads])
        .swap_dims(1, 2)
}

/// `[batch, heads, length, head_dim]` to `[batch, length, heads * head_dim]`.
pub fn merge_heads<B: Backend>(tensor: Tensor<B, 4>) -> Tensor<B, 3> {
    let [batch, heads, length, dim] = tensor.dims();
    tensor.swap_dims(1, 2).reshape([batch, length, heads * dim])
}
