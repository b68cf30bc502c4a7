//! The thresholds of a CPU, and how each was found.
//!
//! The reference machine is an x86-64 server core with AVX-512, 2 MiB of L2 and a share of L3. A threshold
//! that was chosen by measuring says so; one that follows from a size (a cache line, a register file) says
//! which.

use kiln_compiler::Policy;
use kiln_graph::DType;

/// The thresholds that scheduling asks for.
pub const POLICY: Policy = Policy {
    // A cache line, and the widest vector there is.
    alignment: 64,
    // A little more than one move: of two choices that take the same time, the one that keeps less.
    hold_percent: 101,
    // Kernels here store the sums, which are f32.
    narrow_weight_gradients: false,
    // An error function takes as long as to move some 12 bytes: what has 4 is kept. In 2 it takes a sixth off
    // the memory of steps of bert-base and vit_small.
    narrow_factors: true,
    // Kernels run in the order of the schedule.
    kept_buffer: 0,
    // Each buffer takes a pointer register or a reload of it; machines have 16 to 32 general registers.
    // Some steps were slower with 16.
    nest_buffers: 24,
    // Bounds the registers that a loop body keeps alive, and the time of the C compiler, which grows faster
    // than the body.
    nest_operations: 160,
    // About the latency of one load from L2, in simple operations on integers.
    inline_operations: 12,
    // Twice the threads of a small machine, so that uneven rows still divide evenly.
    rows: 8,
    // So many lines of a cache fit L1 beside the row.
    strided_reduction: 64,
    // 128 KiB of f32: sharing it between threads saves some microseconds, which is what waking them costs.
    shared_reduction: 32 * 1024,
    // Below, the call of a kernel costs more than the loads that a joint one saves.
    sibling_elements: 256,
    // 256 KiB of f32: a share of L2.
    cached_elements: 64 * 1024,
    channels_last: true,
    weights_last: false,
    // Depth, height, width.
    convolution_dimensions: 3,
    // Height and width.
    pooling_dimensions: 2,
    // Its templates go over the keys twice, which are in a cache.
    attention_result: false,
    // The operations of a batch normalisation with its activation and mask. With the next larger group of
    // operations computing again took longer than the stores that it saved.
    image_operations: 12,
    // Sums of both are f32, and an epilogue is given those.
    epilogue_types: &[DType::F32, DType::BF16],
    // Measured: with three, AdamW in the weight gradients of bert-minilm took 87 ms instead of 78.
    epilogue_streams: 2,
    epilogue_sums: None,
    epilogue_pixels: false,
    epilogue_windows: None,
    epilogue_elements: 0,
    epilogue_unit: 1,
    epilogue_joined: false,
    epilogue_turned: true,
    product_piece: None,
    // Values computed for an operand of bf16 are f32 and rounded to pairs, as they would be in memory;
    // where there are no pairs they are not rounded. f16 is left out because an f32 that is not rounded
    // could be too large for it.
    prologue_types: &[DType::F32, DType::BF16],
    // More streams compete with the packed panel for L1.
    prologue_streams: 3,
    // Smaller images cost little anyway.
    prologue_pixels: 512,
    // Larger updates run where their gradient was just made, and find it in L2.
    joined_update: 32 * 1024,
    // 1.6 % of the step's arguments may wait.
    joined_share: 64,
};

// Only this crate uses the thresholds below: sizes of caches, and the work from which threads pay.

/// Points of work below which a nest, or another operation written as plain loops, runs on the calling thread
/// alone: some microseconds, what waking another core costs.
pub const SERIAL_POINTS: i64 = 16 * 1024;

/// Elements of a flat nest that a thread takes at a time.
pub const FLAT_GRAIN: i64 = 4096;

/// Longest row of which an expensive intermediate is kept from one pass to the next, in elements: 256 KiB of
/// f32, which the second cache holds between the passes.
pub const KEPT_ROW: i64 = 64 * 1024;

/// Most elements of all intermediates that are kept so: 512 KiB of f32, which a thread's stack holds.
pub const KEPT_ELEMENTS: i64 = 128 * 1024;

/// Most chunks of rows of a reduction over rows, each with partial results of its own.
pub const REDUCTION_CHUNKS: i64 = 16;

/// Bytes of L2 that the streamed panels of a product may take on one thread.
pub const PRODUCT_L2: usize = 384 << 10;

/// Steps of the depth of a panel that a thread packs at a time: 16 KiB of f32. Panels alone are too few to
/// share, such as 24 among 16 threads.
pub const PACK_STEPS: usize = 128;

/// Most panels of a block of a product along one side: eight of depth 2048 in bf16 are half of L2.
pub const BLOCK_PANELS: usize = 8;

/// Threads that share a product of AMX tiles share blocks, of panels that were packed before, where their
/// shares would otherwise be so uneven. Measured with blocks and without, on 16 virtual processors of Emerald
/// Rapids: 768x768x2048 with A transposed takes 0.77 times as long with blocks, 1024x1024x1024 takes 0.84
/// times, 4096x4096x1024 0.92 times, 2048x3072x768 0.98 times, 2048x768x768 1.13 times, 4096x768x288 1.13
/// times.
pub const BLOCKS_WASTE: f64 = 1.2;

/// They also do where the stationary operand has so many panels: each streamed panel then meets enough of
/// them to pay for going to another core. See [`BLOCKS_WASTE`].
pub const BLOCKS_PANELS: usize = 32;

/// They do not where a thread has more streamed panels of its own: these meet each stationary panel as often
/// as in a block, and all of them packed would take much memory.
pub const BLOCKS_SHARE: usize = 8;

/// Threads that share a product of vectors share blocks where the stationary operand has more bytes than the
/// L2 of a core holds, and each of them would read it for too few streamed rows (or columns) at a time.
pub const BLOCKS_L2: usize = 2 << 20;

/// Fewer rows than so many for each thread are too few. A core that does 85 GFLOP/s of f32 and reads a number
/// for two operations of each of r rows reads 170/r GB/s, and sixteen of them share about 100 GB/s. See
/// [`BLOCKS_L2`].
pub const BLOCKS_STREAMED: usize = 2;

/// Longest depth of a product that is not cut.
pub const PRODUCT_DEPTH: usize = 4096;

/// A product is deep if its result has at most so many bytes, half of L2, and its depth fills slices: threads
/// take slices of the depth instead of parts of the result. A thread then reads its slice of the operands
/// once and, of the sums, as many bytes as the result has; otherwise it reads whole panels, which other cores
/// packed. On 16 virtual processors 288x288x4096 takes 0.75 of the time of blocks, 64x256x50176 half of that
/// of shares of the columns; on two threads 0.7 and 0.9, 256x64x12544 half.
pub const DEEP_RESULT: usize = 1 << 20;

/// Fewest slices of the depth of a deep product: one for each thread of the machine on which they were
/// measured.
pub const DEEP_SLICES: usize = 16;

/// There are more where the panels of a slice would have more bytes: with the tensors that they are packed
/// from they stay in L2.
pub const DEEP_PANELS: usize = 1 << 20;

/// Fewest slices of a deep product of tiles of AMX, which multiply so fast that the sums of all slices may
/// have no more than half of the bytes of the operands.
pub const DEEP_TILE_SLICES: usize = 8;

/// Fewest elements of the depth of a slice.
pub const DEEP_SLICE: usize = 128;

/// Most steps of the depth (pairs of bf16) in which panels of AMX tiles meet at a time on few threads: 32
/// rows are 24 KiB, which stay in L1 while panels of columns pass. 160 to 320 steps took the same time within
/// a twentieth.
pub const TILE_DEPTH: usize = 192;

/// With more threads whole panels meet, and tiles are brought to L1 two steps before. Two processors with AMX
/// were measured, in TFLOP/s on 768x3072x2048 (A transposed), 2048x768x3072 and 1024x1024x1024 in chunks, and
/// with whole panels. One or two threads, each with a core: 1.4, 1.4, 1.3 and 1.0, 1.0, 1.0 a thread. Sixteen
/// virtual processors, on which registers alone multiply tiles at a fifth of that rate: 5.3, 4.2, 3.3 and
/// 6.6, 5.7, 3.4 in all.
pub const TILE_DEPTH_THREADS: usize = 2;

/// Streamed panels of AMX tiles are packed chunk by chunk where those of the whole depth would have more
/// bytes: half of L2.
pub const STREAMED_L2: usize = 1 << 20;

/// Most stationary panels that each chunk then meets. Their sums wait in L2, 32 KiB for each panel. Measured:
/// 288x768x4096 (nine panels) takes 0.79 times as long, 1024x768x1024 (24) 1.2 times.
pub const CHUNKED_PANELS: usize = 12;

/// Floating-point operations below which a product runs on one thread: some microseconds, about what waking
/// and waiting for another core can cost.
pub const SERIAL_PRODUCT: usize = 1_000_000;

/// Most operations of one product of a batch that is left to one thread.
pub const BATCH_PRODUCT: usize = 16_000_000;

/// Bytes that one strip of attention's scores may take: it stays in L2 between the passes over it.
pub const ATTENTION_STRIP: usize = 128 << 10;

/// Most query rows of a block of attention: more would only make the strip of scores larger.
pub const ATTENTION_ROWS: usize = 64;

/// Multiply-adds below which attention runs on one thread.
pub const SERIAL_ATTENTION: usize = 256 * 1024;

/// Operations below which a convolution runs on one thread.
pub const SERIAL_CONVOLUTION: usize = 2_000_000;

/// Bytes of L2 for the lines of an image that a block of a convolution reads.
pub const CONVOLUTION_L2: usize = 256 << 10;

/// Bytes of results that a block of a convolution collects.
pub const CONVOLUTION_RESULT: usize = 128 << 10;

/// Bytes of L2 for the lines of pixels that a thread takes at a time for the gradient of a weight.
pub const WEIGHT_GRADIENT_L2: usize = 512 << 10;

/// Bytes of a weight whose gradient stays in cache while chunks of pixels go by.
pub const SMALL_WEIGHT: usize = 128 << 10;

/// Fewest bytes of a weight that a convolution of few pixels reads in place: reordering a smaller one costs
/// less than it saves.
pub const LARGE_WEIGHT: usize = 256 << 10;

/// Bytes of transformed tiles of a block that one thread takes through all stages of Winograd's algorithm:
/// half of its L2.
pub const WINOGRAD_OWN: usize = 512 << 10;

/// Bytes of transformed tiles of a block that all threads share.
pub const WINOGRAD_SHARED: usize = 16 << 20;

/// Largest transformed weight, in bytes, that each thread reads for blocks of its own.
pub const WINOGRAD_READ_WEIGHT: usize = 12 << 20;

/// As [`WINOGRAD_READ_WEIGHT`], where the weight is a sum that each block reads and writes.
pub const WINOGRAD_SUMMED_WEIGHT: usize = 1 << 20;

/// Fewest operations of a convolution that are worth the three stages of Winograd's algorithm.
pub const WINOGRAD_FLOPS: usize = 20_000_000;

/// Bytes of all sums of the gradient of a weight by Winograd's algorithm.
pub const WINOGRAD_SUMS: usize = 20 << 20;

/// Bytes of results that a block of a convolution on tiles of AMX collects: a quarter of L2.
pub const MOVED_RESULT: usize = 512 << 10;

/// Bytes of images and their pairs that the gradient of a weight takes at a time where tiles of AMX multiply
/// them: what the L2s of two threads hold. 8 images of 56x56 pixels and 64 channels took 0.72 times as long
/// as all at once.
pub const MOVED_IMAGES: usize = 4 << 20;

/// The same where each thread takes slices of the images of its own, and most bytes of one image there. More
/// than its L2: of 128 channels of 56x56 pixels with a stride an image has 2.9 MiB, and slices take 0.75 of
/// the time of shares of the weight on 16 virtual processors, 0.92 on two threads.
pub const MOVED_SLICE: usize = 14 << 18;

/// Most bytes of the weight's gradient for that: each slice has its sums. With 256 channels, 2.25 MiB, slices
/// take 1.1 to 1.3 times as long.
pub const MOVED_SUMS: usize = 640 << 10;

/// Bytes of the windows, in pairs of pixels, that a thread writes out at a time for the gradient of a weight
/// on tiles of AMX: an eighth of L2, where the gradients of the output, turned, and sums lie beside them.
pub const WINDOW_PAIRS: usize = 256 << 10;

/// Fewest pixels of a slice of such a gradient.
pub const WINDOW_SLICE: usize = 512;

/// Most bytes of the sums of all its slices.
pub const WINDOW_SUMS: usize = 8 << 20;

/// Elements below which a pooling runs on one thread.
pub const SERIAL_POOLING: usize = 64 * 1024;

/// Most characters of C in one file, roughly: files compile in parallel, and none should be much longer than
/// the rest. Shorter ones would not pay: a compiler process costs as much as some ten thousand characters.
pub const FILE_LENGTH: usize = 48 * 1024;
