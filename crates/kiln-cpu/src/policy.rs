//! Where the thresholds of a CPU lie, and how each was found.
//!
//! The reference machine is an x86-64 server core with AVX-512, 2 MiB of L2 and a share of L3. A threshold that was chosen by measuring says so; one that
//! follows from a size (a cache line, a register file) says which.

use kiln_compiler::Policy;
use kiln_graph::DType;

/// The thresholds that scheduling asks for.
pub const POLICY: Policy = Policy {
    // A cache line, and the widest vector there is.
    alignment: 64,
    // Each buffer takes a pointer register or a reload of it; 16 and 32 are the general registers of the machines at hand. Some steps were slower with 16.
    nest_buffers: 24,
    // Bounds the registers that a loop body keeps alive, and the time of the C compiler, which grows faster than the body.
    nest_operations: 160,
    // About the latency of one load from L2, in simple operations on integers.
    inline_operations: 12,
    // Threads of a small machine times two, so that uneven rows still divide evenly.
    rows: 8,
    // So many lines of a cache fit L1 beside the row.
    strided_reduction: 64,
    // 128 KiB of f32: shared between threads it takes some microseconds less than on one, which is what waking them costs.
    shared_reduction: 32 * 1024,
    // Below, the call of a kernel costs more than the loads that a joint one saves.
    sibling_elements: 256,
    // 256 KiB of f32: a share of L2.
    cached_elements: 64 * 1024,
    channels_last: true,
    // Depth, height, width.
    convolution_dimensions: 3,
    // Height and width.
    pooling_dimensions: 2,
    // A batch normalisation with its activation and mask; the next step up would store less and compute for longer than storing takes.
    image_operations: 12,
    // The register tiles of other types hand their results on in f32.
    epilogue_types: &[DType::F32],
    // Measured: with three, AdamW in the weight gradients of bert-minilm took 87 ms instead of 78.
    epilogue_streams: 2,
    // Tensors of 16 bits are widened while they are packed, and computed operands would be rounded once more or once less.
    prologue_types: &[DType::F32],
    // More compete with the panel being packed for L1.
    prologue_streams: 3,
    // Smaller images cost little anyway.
    prologue_pixels: 512,
    // Larger updates run where their gradient was just made, and find it in L2.
    joined_update: 32 * 1024,
    // 1.6 % of the step's arguments may wait.
    joined_share: 64,
};
