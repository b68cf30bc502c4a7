//! The thresholds of a machine: what scheduling must know of it, in one type with one value for each target.
//!
//! Which operations may share a kernel at all follows from the graph. Whether sharing pays follows from the
//! machine: how many rows keep its threads busy, how much a nest can hold in registers, what its templates
//! can compute while they read an operand or store a result. The second kind of question is answered here and
//! nowhere else in this crate. A target says beside each number how it was found.

use kiln_graph::DType;

/// What a target's kernels can do and where its thresholds lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Alignment of everything in the arena, in bytes; a power of two.
    pub alignment: usize,
    /// What holding a byte through the backward pass costs, in percent of moving it to or from memory. The
    /// choice between keeping a value and computing it again weighs this cost beside the traffic.
    pub hold_percent: u32,
    /// Whether autocast to bf16 rounds the gradient of a convolution's weight, as `torch.autocast` does:
    /// the fast kernels of some libraries store it so.
    pub narrow_weight_gradients: bool,
    /// Whether autocast to bf16 rounds what gradients multiply by and what was expensive to compute, such as
    /// the distribution function of GELU: where keeping such a factor costs less than computing it again, it
    /// is kept in half of the bytes.
    pub narrow_factors: bool,
    /// Most bytes of a buffer that shares its memory with no other buffer. Kernels that touch only such
    /// buffers may change places.
    pub kept_buffer: usize,
    /// Most buffers that one nest reads and writes.
    pub nest_buffers: usize,
    /// Most operations in one nest.
    pub nest_operations: usize,
    /// Most operations on constants and coordinates alone that are computed wherever they are used.
    pub inline_operations: u32,
    /// Fewest rows that a nest is split into: fewer would leave threads without work.
    pub rows: i64,
    /// Most elements of a reduction over outer dimensions that runs inside a row, whose elements it reads
    /// with large strides.
    pub strided_reduction: i64,
    /// Elements from which a reduction to fewer rows than [`Policy::rows`] is shared out over its own
    /// elements.
    pub shared_reduction: i64,
    /// Fewest elements of a tensor for whose sake nests that read it become one.
    pub sibling_elements: usize,
    /// Elements from which a tensor is not expected to stay in a cache until it is read again.
    pub cached_elements: usize,
    /// Whether images are stored channels-last.
    pub channels_last: bool,
    /// Whether convolutions of such images read weights whose channels come last, too ([`crate::weights`]).
    pub weights_last: bool,
    /// Most spatial dimensions of a convolution that a template computes.
    pub convolution_dimensions: usize,
    /// Most spatial dimensions of a pooling that a template computes.
    pub pooling_dimensions: usize,
    /// Whether the gradient of an attention reads the attention's result.
    pub attention_result: bool,
    /// Most operations by which an image is computed again from a stored image at each use.
    pub image_operations: usize,
    /// Element types of products whose template applies a nest to its result before that reaches memory.
    pub epilogue_types: &'static [DType],
    /// Most other tensors of the result's size that such a nest reads.
    pub epilogue_streams: usize,
    /// The same of a nest that sums up columns of the result, too; none where no template keeps sums.
    pub epilogue_sums: Option<usize>,
    /// Whether convolutions of single pixels, channels-last, are products of that template.
    pub epilogue_pixels: bool,
    /// What channels of an image, channels-last, are multiples of in other convolutions that the template
    /// computes, and in gradients of the input of such without strides; none where there are none.
    pub epilogue_windows: Option<usize>,
    /// Fewest elements of such a result.
    pub epilogue_elements: usize,
    /// What columns, and distances between rows in memory, of such a product are multiples of.
    pub epilogue_unit: usize,
    /// Whether nests that read such a result become one before one of them follows it.
    pub epilogue_joined: bool,
    /// Whether such a nest may be contiguous along the rows of the result, and not along its columns.
    pub epilogue_turned: bool,
    /// What rows and columns of an operand that a product of [`Policy::epilogue_types`] reads in pieces
    /// ([`crate::products`]) are multiples of; none where products read whole operands.
    pub product_piece: Option<usize>,
    /// Element types of products and convolutions whose template computes an operand by a nest while it
    /// reads.
    pub prologue_types: &'static [DType],
    /// Most tensors of the operand's size that such a nest reads.
    pub prologue_streams: usize,
    /// Fewest pixels, of all images of the batch, of an operand that a convolution computes.
    pub prologue_pixels: usize,
    /// Most elements of an update that shares a kernel with other updates.
    pub joined_update: i64,
    /// Joined updates may hold at most one in so many of the elements that the step is given, because each of
    /// their gradients stays in memory until the joint update runs.
    pub joined_share: i64,
}
