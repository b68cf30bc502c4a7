//! Where the thresholds of an NVIDIA GPU lie, and how each was found.
//!
//! The reference machine is an H200: 132 multiprocessors of 2,048 threads, 228 KiB of shared memory and 64 Ki
//! registers each, 50 MiB of L2, 4.3 TB/s.

use kiln_compiler::Policy;
use kiln_graph::DType;

/// The thresholds that scheduling asks for.
pub const POLICY: Policy = Policy {
    // What the driver's own allocations have, and two lines of L2.
    alignment: 256,
    // Memory is plentiful and what lies in it pushes nothing out of L2: only between choices of about equal
    // traffic does the smaller win. At 101, resnet50 (batch 128) computed each activation of its forward pass
    // a second time to save 1.7 GB, and moved 57.4 GB a step in place of 51.7; llama-125m (8 x 1024) moved
    // 33.1 GB in place of 31.3.
    hold_percent: 25,
    // For 64 channels of 56 by 56 (128 images) cuDNN's engine takes 2.0 ms with a result of f32 and 0.07 with
    // one of bf16; tiles of our own take 0.16.
    narrow_weight_gradients: true,
    // Special functions take less time than the bytes, so factors are computed again.
    narrow_factors: false,
    // Statistics of some thousand channels or rows: kernels on these are joined where nothing keeps their
    // order. Some hundred such buffers are a few megabytes.
    kept_buffer: 32 * 1024,
    // All arguments of a kernel travel in 4 KiB; what bounds a nest are the registers that loads in flight
    // take.
    nest_buffers: 24,
    nest_operations: 160,
    // Integer work is hidden behind memory.
    inline_operations: 16,
    // A row is at least a warp's: fewer rows than multiprocessors leave most of the device idle.
    rows: 32,
    // Neighbouring threads take neighbouring rows.
    strided_reduction: 64,
    // One block reduces so many elements in some ten microseconds.
    shared_reduction: 16 * 1024,
    // A launch costs more than the loads that it saves, whatever the size.
    sibling_elements: 1,
    // A share of L2: 8 MiB of f32.
    cached_elements: 2 * 1024 * 1024,
    channels_last: true,
    // Copies of resnet50's weights in front of each convolution and gradient took 3 to 5 us each (H200).
    weights_last: true,
    convolution_dimensions: 3,
    pooling_dimensions: 3,
    // Without it a kernel needs a second sum of each row, a product of eight in all.
    attention_result: true,
    image_operations: 12,
    // The library's products store what they compute; what follows is a nest.
    epilogue_types: &[],
    epilogue_streams: 0,
    epilogue_sums: None,
    epilogue_pixels: false,
    epilogue_windows: None,
    epilogue_elements: 0,
    epilogue_unit: 1,
    epilogue_joined: false,
    epilogue_turned: false,
    product_piece: None,
    prologue_types: &[],
    prologue_streams: 0,
    prologue_pixels: usize::MAX,
    // One launch updates all parameters; larger ones fill the device by themselves.
    joined_update: 4 * 1024 * 1024,
    joined_share: 2,
};

/// The same on Hopper, where Kiln's own template for products has warps that finish
/// ([`crate::emit::product::warpgroups`]).
pub const WITH_WARPGROUPS: Policy = Policy {
    epilogue_types: &[DType::BF16, DType::F16],
    // SwiGLU's gradient reads two. For [8192, 1024] . [1024, 32768] with that behind it, 1.15 ms in place of
    // 0.8 and 0.9; SwiGLU, which reads one, takes 1.0 in place of 0.8 and 0.53 (H100).
    epilogue_streams: 2,
    // Statistics of batch norm behind [401408, 64] . [64, 256] take 2 us where a kernel of their own takes
    // 84; the sums of its gradient behind that read three more tensors, and take 361 in place of 99 and 352
    // (H100).
    epilogue_sums: Some(3),
    epilogue_pixels: true,
    // The copy engine takes so many channels under a tap at once.
    epilogue_windows: Some(64),
    // A tile of 128 by 128 for three of four multiprocessors.
    epilogue_elements: 100 * 128 * 128,
    // Rows begin at multiples of 16 bytes.
    epilogue_unit: 8,
    // Both gradients of a gated activation read the product's.
    epilogue_joined: true,
    // A tile has 128 rows, and at least as many columns.
    product_piece: Some(128),
    ..POLICY
};
