//! Thresholds of no machine in particular.

use kiln_graph::DType;

use crate::policy::Policy;

/// Thresholds that small graphs meet, so that small graphs take every way through the scheduler.
pub const POLICY: Policy = Policy {
    alignment: 64,
    hold_percent: 101,
    narrow_weight_gradients: false,
    narrow_factors: true,
    kept_buffer: 0,
    nest_buffers: 24,
    nest_operations: 160,
    inline_operations: 12,
    rows: 2,
    strided_reduction: 8,
    shared_reduction: 256,
    sibling_elements: 16,
    cached_elements: 256,
    channels_last: true,
    weights_last: false,
    convolution_dimensions: 3,
    pooling_dimensions: 2,
    attention_result: true,
    image_operations: 12,
    epilogue_types: &[DType::F32],
    epilogue_streams: 2,
    epilogue_sums: None,
    epilogue_pixels: false,
    epilogue_windows: None,
    epilogue_elements: 0,
    epilogue_unit: 1,
    epilogue_joined: false,
    epilogue_turned: true,
    product_piece: None,
    prologue_types: &[DType::F32],
    prologue_streams: 3,
    prologue_pixels: 4,
    joined_update: 1024,
    joined_share: 2,
};
