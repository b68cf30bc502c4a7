//! Keys and values of the positions already seen, so that a new token costs one position and not the whole
//! sequence.
//!
//! Each layer owns a buffer with room for `capacity` positions; new positions are written behind the ones
//! seen. When the buffer is full its capacity doubles, so a long text costs a logarithmic number of copies.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// Keys and values of one layer.
#[derive(Debug, Clone)]
pub struct LayerCache<B: Backend> {
    /// Keys and values, each `[batch, kv_heads, capacity, head_dim]`.
    buffers: Option<[Tensor<B, 4>; 2]>,
    len: usize,
    reserve: usize,
}

impl<B: Backend> LayerCache<B> {
    /// Appends keys and values `[batch, kv_heads, new, head_dim]` and returns all,
    /// `[batch, kv_heads, len, head_dim]`.
    pub(super) fn append(&mut self, key: Tensor<B, 4>, value: Tensor<B, 4>) -> [Tensor<B, 4>; 2] {
        let [batch, heads, new, dim] = key.dims();
        let (from, to) = (self.len, self.len + new);
        let grown = |old: Option<Tensor<B, 4>>, like: &Tensor<B, 4>, capacity: usize| {
            let options = (&like.device(), like.dtype());
            let buffer = Tensor::zeros([batch, heads, capacity, dim], options);
            match old {
                Some(old) => {
                    buffer.slice_assign([0..batch, 0..heads, 0..from, 0..dim], old.slice_dim(2, 0..from))
                }
                None => buffer,
            }
        };
        let [keys, values] = match self.buffers.take() {
            Some(buffers) if buffers[0].dims()[2] >= to => buffers,
            old => {
                let capacity = to.max(2 * from).max(self.reserve);
                let (old_key, old_value) = match old {
                    Some([key, value]) => (Some(key), Some(value)),
                    None => (None, None),
                };
                [grown(old_key, &key, capacity), grown(old_value, &value, capacity)]
            }
        };
        let place = [0..batch, 0..heads, from..to, 0..dim];
        let keys = keys.slice_assign(place.clone(), key);
        let values = values.slice_assign(place, value);
        self.len = to;
        let seen = [
            keys.clone().slice_dim(2, 0..to),
            values.clone().slice_dim(2, 0..to),
        ];
        self.buffers = Some([keys, values]);
        seen
    }
}

/// Keys and values of all layers of a model, for one batch of sequences of equal length.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    pub(super) layers: Vec<LayerCache<B>>,
}

impl<B: Backend> KvCache<B> {
    /// An empty cache for `layers` layers that begins with room for `reserve` positions.
    pub fn new(layers: usize, reserve: usize) -> Self {
        Self {
            layers: (0..layers)
                .map(|_| LayerCache {
                    buffers: None,
                    len: 0,
                    reserve,
                })
                .collect(),
        }
    }

    /// Number of positions seen.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.len)
    }

    /// Whether no position has been seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
