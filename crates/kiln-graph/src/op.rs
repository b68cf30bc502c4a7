//! The primitives, and what each means.
//!
//! Some sixty operations are the whole vocabulary after import. Each variant of [`Op`] says what it computes
//! in terms of elements; [`crate::infer`] gives its result type and its typing rules, [`crate::interpret()`]
//! computes it.
//!
//! Rules that hold everywhere:
//!
//! - **No implicit broadcasting.** Operands of a pointwise operation have the same shape; [`Op::Broadcast`]
//!   is explicit.
//! - **Floats** follow IEEE 754 with round-to-nearest-even. NaN and infinities propagate as the formula says;
//!   nothing is reassociated across primitives and nothing assumes that NaN does not occur. `f16` and `bf16`
//!   compute in f32 and round once per primitive; fused executors may keep the f32 intermediate (they are
//!   compared with a tolerance).
//! - **Integers** wrap on overflow. Division or remainder by zero gives 0. Shifts by the width or more give 0
//!   (for `>>` of negative numbers: -1); a negative count acts like one that is too large.
//! - **Reductions** of nothing give the neutral element: sum 0, product 1, any false, all true, max the
//!   lowest value of the type (-inf for floats), min the highest. Sums of floats may be taken in any fixed
//!   order.
//! - **Max and min** of floats propagate NaN: if any operand is NaN the result is NaN.
//! - **Indices** out of range, negative ones included, are an error of the program, which every executor
//!   reports before it overwrites an argument ([`crate::indices`]). Compiled kernels clamp them as well, so
//!   that memory stays safe until the step stops.

use std::fmt;

use smallvec::SmallVec;

use crate::collective::Collective;
use crate::{DType, Scalar, Shape, TensorType};

/// A short list of dimensions or per-dimension numbers.
pub type Dims = SmallVec<[usize; 4]>;

/// A short list of signed per-dimension numbers (paddings may be negative: they crop).
pub type SignedDims = SmallVec<[i64; 4]>;

/// A primitive operation with its attributes. Operands are the node's inputs, in the order each variant
/// states.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// `() -> t`. Tensor argument number `index` of the graph, row-major.
    Parameter {
        /// Position among the tensor arguments.
        index: u32,
        /// Its type.
        ty: TensorType,
        /// The earlier tensor argument of f32 whose elements these are, each rounded to this type of 16 bits,
        /// if the caller promises that: whoever wants those rounded may read these.
        copy_of: Option<u32>,
    },
    /// `() -> d[]`. Runtime scalar number `index`: a rank-0 value that differs from call to call and is no
    /// part of the graph's identity. Passed as eight bytes ([`Scalar::to_bits`]) and rounded to `dtype`.
    Scalar {
        /// Position among the runtime scalars.
        index: u32,
        /// Its type.
        dtype: DType,
    },
    /// `() -> d[]`. A rank-0 constant.
    Constant {
        /// The value, rounded to `dtype`.
        value: Scalar,
        /// Its type.
        dtype: DType,
    },
    /// `() -> d[shape]`. The coordinate along `axis`: `out[i] = i[axis]`.
    Iota {
        /// Element type, a float or integer.
        dtype: DType,
        /// Result shape.
        shape: Shape,
        /// The dimension counted along.
        axis: usize,
    },
    /// `(seed: u64[], stream: u64[], ..) -> d[shape]`. Counter-based random numbers: element `i` (row-major)
    /// is a pure function of seed, stream and `i`, stated in [`crate::philox`]. [`RandomKind::IntRange`]
    /// takes two more operands: `low` and `high`, `i64[]`.
    Random {
        /// The distribution.
        kind: RandomKind,
        /// Element type.
        dtype: DType,
        /// Result shape.
        shape: Shape,
    },

    /// `(x) -> same type` (`IsNan`, `IsInf`: bool). Applied to each element.
    Unary(UnaryOp),
    /// `(a, b) -> same type`. Applied to each pair of elements; both operands have one type.
    Binary(BinaryOp),
    /// `(a, b) -> bool`. Comparison of each pair of elements; any comparison with NaN is false but `Ne`,
    /// which is true.
    Compare(CompareOp),
    /// `(c: bool, a, b) -> type of a`. `c ? a : b` for each element.
    Select,
    /// `(x) -> dtype`. Conversion of each element. Float to float rounds to nearest even; float to integer
    /// truncates toward zero, saturates, NaN gives 0; integer to integer keeps the low bits; anything to bool
    /// is `x != 0`; bool gives 0 or 1.
    Cast(DType),

    /// `(x) -> x without axes`. Combines the elements along `axes` (sorted, distinct, at least one).
    Reduce {
        /// How elements combine.
        op: ReduceOp,
        /// The dimensions that disappear.
        axes: Dims,
    },
    /// `(x) -> dtype[x without axis]`. Index along `axis` of the largest or smallest element; the first one
    /// on ties, and the first NaN if there is one. The axis must not be empty.
    ArgReduce {
        /// Largest or smallest.
        op: ArgReduceOp,
        /// The dimension that disappears.
        axis: usize,
        /// Integer type of the result.
        dtype: DType,
    },
    /// `(x) -> same type`. Running sum, product, maximum or minimum along `axis`, each including its own
    /// element.
    Cumulative {
        /// How elements combine: `Sum`, `Prod`, `Max` or `Min`.
        op: ReduceOp,
        /// The dimension run along.
        axis: usize,
    },

    /// `(x) -> shape`. The same elements in row-major order under another shape.
    Reshape(Shape),
    /// `(x) -> permuted`. Dimension `d` of the result is dimension `perm[d]` of `x`.
    Transpose(Dims),
    /// `(x) -> shape`. Dimension `d` of `x` becomes dimension `dims[d]` of the result (strictly increasing);
    /// its extent is the result's, or 1 and then repeated. Result dimensions not named repeat the whole. A
    /// rank-0 `x` with no dims fills the result.
    Broadcast {
        /// Result shape.
        shape: Shape,
        /// Where each dimension of the operand goes.
        dims: Dims,
    },
    /// `(x) -> sliced`. `out[i] = x[start + i * step]`, with `start <= limit <= extent` and `step >= 1`; the
    /// extent is `ceil((limit - start) / step)`.
    Slice {
        /// First index, per dimension.
        starts: Dims,
        /// End (exclusive), per dimension.
        limits: Dims,
        /// Stride, per dimension.
        steps: Dims,
    },
    /// `(x, value: d[]) -> padded`. `value` before (`low`) and after (`high`) each dimension. Negative
    /// amounts crop.
    Pad {
        /// Elements added before, per dimension.
        low: SignedDims,
        /// Elements added after, per dimension.
        high: SignedDims,
    },
    /// `(x0, x1, ..) -> joined`. At least one operand; extents agree but along `axis`.
    Concat {
        /// The dimension joined.
        axis: usize,
    },
    /// `(x) -> same type`. Reverses the order of elements along each of `axes`.
    Flip(Dims),
    /// `(x, update) -> type of x`. `x` with the elements that [`Op::Slice`] with these attributes would read
    /// replaced by `update`.
    UpdateSlice {
        /// First index, per dimension.
        starts: Dims,
        /// Stride, per dimension.
        steps: Dims,
    },

    /// `(x, indices) -> d[indices shape]`. Ranks agree; `out[i] = x[i with i[axis] := indices[i]]`. Extents
    /// of `indices` other than along `axis` are at most those of `x`.
    Gather {
        /// The dimension indexed.
        axis: usize,
    },
    /// `(x, indices, updates) -> type of x`. The reverse of [`Op::Gather`]: every `updates[i]` is combined
    /// into `x[i with i[axis] := indices[i]]`, in row-major order of `i`.
    Scatter {
        /// The dimension indexed.
        axis: usize,
        /// How an update combines with what is there.
        mode: ScatterMode,
    },
    /// `(x, indices: int[n]) -> x with extent n along axis`. Whole slices:
    /// `out[.., j, ..] = x[.., indices[j], ..]`. An embedding look-up is this with axis 0.
    IndexSelect {
        /// The dimension indexed.
        axis: usize,
    },
    /// `(x, indices: int[n], updates) -> type of x`. The reverse of [`Op::IndexSelect`]: slice `j` of
    /// `updates` is combined into slice `indices[j]` of `x`, in the order of `j`.
    IndexPut {
        /// The dimension indexed.
        axis: usize,
        /// How an update combines with what is there.
        mode: ScatterMode,
    },

    /// `(a, b) -> [batch.., a free.., b free..]`. Sum of products over the contracted dimensions, for each
    /// index of the batch dimensions; the free dimensions keep their order. Batch and contracted dimensions
    /// are matched by position in the lists. Accumulates in [`DType::compute`], in any fixed order, and
    /// rounds once to the type of the result.
    DotGeneral(DotDims),
    /// `(x: [n, c, s..], w: [o, c / groups, k..]) -> [n, o, out..]`. Cross-correlation (no flipping of the
    /// kernel). Accumulates as [`Op::DotGeneral`] does, and so do its gradients.
    Conv(ConvDims),
    /// `(dy: [n, o, out..], w: [o, c / groups, k..]) -> [n, c, input..]`. Gradient of [`Op::Conv`] with
    /// respect to its input of spatial extents `input`. With `w` read as `[in, out / groups, k..]` this is
    /// also the transposed convolution.
    ConvInputGrad {
        /// Attributes of the forward convolution.
        conv: ConvDims,
        /// Spatial extents of the forward input.
        input: Dims,
    },
    /// `(x: [n, c, s..], dy: [n, o, out..]) -> [o, c / groups, k..]`. Gradient of [`Op::Conv`] with respect
    /// to its weight.
    ConvWeightGrad {
        /// Attributes of the forward convolution.
        conv: ConvDims,
        /// Spatial extents of the kernel.
        kernel: Dims,
    },
    /// `(x: [n, c, s..]) -> [n, c, out..]`. Largest element of each window; padding counts as the lowest
    /// value.
    MaxPool(Window),
    /// `(x: [n, c, s..]) -> ([n, c, out..], dtype[n, c, out..])`. [`Op::MaxPool`] and where the element was:
    /// its row-major index within the spatial extents of `x`; the first on ties, the first NaN if there is
    /// one. A window of padding only gives 0.
    MaxPoolWithIndices {
        /// The window.
        window: Window,
        /// Integer type of the indices.
        dtype: DType,
    },
    /// `(dy: [n, c, out..], indices: int[n, c, out..]) -> [n, c, input..]`. Gradient of max pooling: each
    /// `dy` added at its index.
    MaxPoolGrad {
        /// Spatial extents of the forward input.
        input: Dims,
    },
    /// `(x: [n, c, s..]) -> [n, c, out..]`. Mean of each window. Padding counts in the divisor if
    /// `count_include_pad`; positions beyond the padded extent (they occur with ceil mode, as negative room
    /// at the end) never do. A window that counts nothing gives 0. Integers are added up in 64 bits, in which
    /// the sum wraps before it is divided, and the quotient is truncated.
    AvgPool {
        /// The window; its dilation is 1.
        window: Window,
        /// Whether padding counts in the divisor.
        count_include_pad: bool,
    },
    /// `(dy: [n, c, out..]) -> [n, c, input..]`. Gradient of [`Op::AvgPool`].
    AvgPoolGrad {
        /// The forward window.
        window: Window,
        /// Whether padding counted in the divisor.
        count_include_pad: bool,
        /// Spatial extents of the forward input.
        input: Dims,
    },

    /// `(q: [b, h, t, d], k: [b, g, s, d], v: [b, g, s, e], scale: c[], [mask], [hidden, fill], [seed,
    /// stream, keep, factor]) -> ([b, h, t, e], stats: c[b, h, t, 2])`. Attention:
    /// `softmax(q k^T * scale + mask) v` with `h` a multiple of `g` (query head `i` reads head
    /// `i / (h / g)`). Everything between the operands and the result is of the type `c` that their type is
    /// computed in ([`DType::compute`](crate::DType::compute)); the numbers `c[]` and the mask may also be of
    /// the operands' own. `stats` holds the largest score of each row and the sum of `exp(score - largest)`:
    /// both, because their logarithmic sum would lose the second beside a large first. A row of which every
    /// score is -inf gives NaN, as the formula does, if [`AttentionDims::safe`] does not say otherwise;
    /// whether values of weight zero that causal order or a `fill` of at most -1000 hides are multiplied by
    /// it or left out is not specified. Made by rewriting.
    Attention(AttentionDims),
    /// `(operands of the forward.., stats, d out, d scale: c[], inner: c[], [d factor: c[]]) -> (dq, dk,
    /// dv)`. Gradient of [`Op::Attention`]. Gradients are multiplied by `d scale` and `d factor` where the
    /// forward pass multiplies by `scale` and `factor`: these are the same numbers, but programs pass them
    /// again. `inner` is the -1 in the gradient `p (dp + inner sum(p dp))` of a softmax, which programs
    /// pass too. Hidden scores have no gradient, and a `safe` softmax has the gradient of the plain one.
    AttentionGrad(AttentionDims),

    /// `(x) -> (type of x, int[x])`. Sorts along `axis`, stable; NaN sorts as the largest. The second result
    /// is where each element was.
    Sort {
        /// The dimension sorted.
        axis: usize,
        /// Largest first.
        descending: bool,
        /// Integer type of the indices.
        dtype: DType,
    },
    /// `(x) -> (d[.., k, ..], int[.., k, ..])`. The `k` largest elements along `axis`, largest first, the
    /// first one first on ties; NaN counts as the largest.
    TopK {
        /// The dimension searched.
        axis: usize,
        /// How many.
        k: usize,
        /// Integer type of the indices.
        dtype: DType,
    },
    /// `(x) -> result`. An operation over ranks ([`crate::collective`]): the result depends on the operands
    /// of all processes that run the graph.
    Collective(Collective),
    /// `(x) -> same type`. The complete result of a started collective ([`Collective::started`]), whose
    /// result is the operand. Where that collective does not work in place
    /// ([`CollectiveKind::is_in_place`](crate::CollectiveKind::is_in_place)) its operand is a second one: it
    /// is read until the wait.
    CollectiveWait,
    /// `(..) -> (..)`. An operation kept whole: it has no lowering to primitives, or is the user's own.
    /// Executors hand it to the front end, which knows what `attributes` mean.
    Extern(Box<ExternOp>),
}

/// Distribution of [`Op::Random`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RandomKind {
    /// Uniform in `[0, 1)`, on the grid of the type's significand (24 bits for f32, 53 for f64, 11 for f16, 8
    /// for bf16).
    Uniform,
    /// Standard normal by the Box-Muller transform.
    Normal,
    /// Uniform integer in `[low, high)`; `low` if the range is empty.
    IntRange,
}

/// Pointwise functions of one operand. Float functions take floats only, unless stated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // The names are the functions; only what is not obvious has a line.
pub enum UnaryOp {
    /// `-x`, also of integers (wrapping).
    Neg,
    /// `|x|`, also of integers (wrapping).
    Abs,
    /// -1, 0 or 1 with the sign of x; NaN stays NaN; also of integers.
    Sign,
    /// Logical not of bool, bitwise not of integers.
    Not,
    Exp,
    /// `exp(x) - 1` without cancellation.
    Expm1,
    /// Natural logarithm; negative gives NaN, 0 gives -inf.
    Log,
    /// `log(1 + x)` without cancellation.
    Log1p,
    Sqrt,
    /// `1 / sqrt(x)`.
    Rsqrt,
    /// `1 / x`.
    Recip,
    Sin,
    Cos,
    Tan,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Tanh,
    Asinh,
    Acosh,
    Atanh,
    Erf,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    Floor,
    Ceil,
    /// To the nearest integer, halves to even.
    Round,
    Trunc,
    /// Float to bool.
    IsNan,
    /// Float to bool: plus or minus infinity.
    IsInf,
}

/// Pointwise functions of two operands, on floats and integers unless stated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
    /// Integers truncate toward zero; by zero gives 0.
    Div,
    /// `a - b * floor(a / b)`, rounded once: the sign of the divisor, as in Python. Integers by zero give 0.
    Rem,
    /// `a` to the power `b`. Integers: negative exponents give 0 unless `|a| = 1`.
    Pow,
    /// Angle of the point (b, a), floats only.
    Atan2,
    /// The larger; NaN if either is.
    Max,
    /// The smaller; NaN if either is.
    Min,
    /// Logical on bool, bitwise on integers.
    And,
    /// Logical on bool, bitwise on integers.
    Or,
    /// Logical on bool, bitwise on integers.
    Xor,
    /// Integers only.
    Shl,
    /// Integers only; arithmetic for signed types.
    Shr,
}

/// Comparisons. `Eq` and `Ne` also compare bools.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum CompareOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// Reductions. `Any` and `All` take bool; the rest take numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum ReduceOp {
    Sum,
    Prod,
    Max,
    Min,
    Any,
    All,
}

/// Which extreme [`Op::ArgReduce`] looks for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum ArgReduceOp {
    Max,
    Min,
}

/// How [`Op::Scatter`] and [`Op::IndexPut`] combine an update with the element it lands on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum ScatterMode {
    /// The last update wins.
    Assign,
    Add,
    Mul,
    Max,
    Min,
}

/// Dimension numbers of [`Op::DotGeneral`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct DotDims {
    /// Batch dimensions of `a`.
    pub a_batch: Dims,
    /// Batch dimensions of `b`, in the order of `a_batch`.
    pub b_batch: Dims,
    /// Contracted dimensions of `a`.
    pub a_contract: Dims,
    /// Contracted dimensions of `b`, in the order of `a_contract`.
    pub b_contract: Dims,
    /// Element type of the result where it is not the operands': f32, of operands of `f16` or `bf16`. The sum
    /// is then not rounded. (XLA's `preferred_element_type`.)
    pub result: Option<DType>,
}

impl DotDims {
    /// The dimensions of an operand of rank `rank` that are neither batch nor contracted, in order.
    pub fn free(rank: usize, batch: &[usize], contract: &[usize]) -> Dims {
        (0..rank)
            .filter(|axis| !batch.contains(axis) && !contract.contains(axis))
            .collect()
    }

    /// Batch and contracted dimensions of operand 0 (`a`) or 1 (`b`).
    pub fn of(&self, operand: usize) -> (&Dims, &Dims) {
        match operand {
            0 => (&self.a_batch, &self.a_contract),
            _ => (&self.b_batch, &self.b_contract),
        }
    }

    /// Matrix product of the last two dimensions, all dimensions before them being batch dimensions of rank
    /// `batch`: `[.., m, k] x [.., k, n]`.
    pub fn matmul(batch: usize) -> Self {
        Self {
            a_batch: (0..batch).collect(),
            b_batch: (0..batch).collect(),
            a_contract: Dims::from_slice(&[batch + 1]),
            b_contract: Dims::from_slice(&[batch]),
            result: None,
        }
    }
}

/// Attributes of a convolution, one entry per spatial dimension.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ConvDims {
    /// Step of the window.
    pub stride: Dims,
    /// Zeros before the first element.
    pub pad_low: Dims,
    /// Zeros after the last element.
    pub pad_high: Dims,
    /// Distance between kernel elements.
    pub dilation: Dims,
    /// Channel groups.
    pub groups: usize,
    /// Element type of the result where it is not the operands', as in [`DotDims::result`].
    pub result: Option<DType>,
}

impl ConvDims {
    /// Output extent along spatial dimension `axis` for an input of extent `input` and a kernel of extent
    /// `kernel`; none if the kernel does not fit.
    pub fn output_extent(&self, axis: usize, input: usize, kernel: usize) -> Option<usize> {
        let reach = self.dilation[axis]
            .checked_mul(kernel.checked_sub(1)?)?
            .checked_add(1)?;
        let padded = input
            .checked_add(self.pad_low[axis])?
            .checked_add(self.pad_high[axis])?;
        Some(padded.checked_sub(reach)? / self.stride[axis] + 1)
    }
}

/// A pooling window, one entry per spatial dimension.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// Extent of the window.
    pub size: Dims,
    /// Step of the window.
    pub stride: Dims,
    /// Padding before the first element.
    pub pad_low: Dims,
    /// Padding after the last element.
    pub pad_high: Dims,
    /// Distance between elements of the window.
    pub dilation: Dims,
    /// Whether a last window that starts inside but does not fit counts (the output extent rounds up).
    pub ceil_mode: bool,
}

impl Window {
    /// Output extent along spatial dimension `axis` for an input of extent `input`; none if the window does
    /// not fit. In ceil mode the last window must start inside the input or the padding before it.
    pub fn output_extent(&self, axis: usize, input: usize) -> Option<usize> {
        let reach = self.dilation[axis]
            .checked_mul(self.size[axis].checked_sub(1)?)?
            .checked_add(1)?;
        let padded = input
            .checked_add(self.pad_low[axis])?
            .checked_add(self.pad_high[axis])?;
        let room = padded.checked_sub(reach)?;
        let stride = self.stride[axis];
        if !self.ceil_mode {
            return Some(room / stride + 1);
        }
        let steps = room.div_ceil(stride);
        let starts_inside = steps.checked_mul(stride)? < input + self.pad_low[axis];
        Some(if starts_inside { steps + 1 } else { steps })
    }
}

/// What varies between attentions. Scores are scaled, then masked, then hidden, then cut by causal order,
/// unless a member says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AttentionDims {
    /// Query position `i` sees key positions `j <= i + s - t` only.
    pub causal: bool,
    /// An additive mask operand follows `scale`: a tensor broadcastable to `[b, h, t, s]` (extents equal or
    /// 1).
    pub mask: bool,
    /// Two operands `hidden: bool` (broadcastable to `[b, h, t, s]`) and `fill: c[]` follow: where `hidden`
    /// is true the score is `fill`.
    pub hidden: bool,
    /// The additive mask comes after hiding, and is added to `fill` too. Needs `mask` and `hidden`.
    pub mask_last: bool,
    /// Four operands `seed: u64[]`, `stream: u64[]`, `keep: c[]`, `factor: c[]` follow: a probability is
    /// multiplied by `factor` where the uniform draw of type `c[b, h, t, s]` is below `keep`, and by 0
    /// elsewhere.
    pub dropout: bool,
    /// Dropout applies to scores, after scaling and before masks, instead of to probabilities. Needs
    /// `dropout`.
    pub drop_scores: bool,
    /// A row of which every score is -inf has probabilities of zero; its statistics are 0 and 1.
    pub safe: bool,
}

/// The position of each operand of an attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionOperands {
    /// The additive mask.
    pub mask: Option<usize>,
    /// The mask of hidden scores; `fill` is the operand after it.
    pub hidden: Option<usize>,
    /// The seed; `stream`, `keep` and `factor` are the operands after it.
    pub dropout: Option<usize>,
    /// Number of operands of the forward operation. The operands that only the gradient has follow.
    pub forward: usize,
    /// Number of operands of the gradient.
    pub gradient: usize,
}

impl AttentionDims {
    /// Whether every member that needs another member has it.
    pub fn is_consistent(&self) -> bool {
        (!self.mask_last || self.mask && self.hidden) && (!self.drop_scores || self.dropout)
    }

    /// Whether forward operand number `operand` is a tensor: query, key, value or a mask.
    pub fn is_tensor(&self, operand: usize) -> bool {
        let at = self.operands();
        operand < 3 || at.mask == Some(operand) || at.hidden == Some(operand)
    }

    /// Positions of the operands.
    pub fn operands(&self) -> AttentionOperands {
        let mut next = 4;
        let mut take = |present: bool, count: usize| {
            let at = next;
            next += if present { count } else { 0 };
            present.then_some(at)
        };
        let (mask, hidden, dropout) = (take(self.mask, 1), take(self.hidden, 2), take(self.dropout, 4));
        AttentionOperands {
            mask,
            hidden,
            dropout,
            forward: next,
            gradient: next + 4 + usize::from(self.dropout),
        }
    }
}

/// An operation that the graph does not look into.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ExternOp {
    /// Name for people: shown by `explain`.
    pub name: String,
    /// What the front end needs to run it, as text.
    pub attributes: String,
    /// The operation in C, for targets that compile C; empty if the front end alone can run it. Both compute the
    /// same.
    pub c_source: String,
    /// Types of the results.
    pub outputs: SmallVec<[TensorType; 1]>,
}

/// Names of the simple operations in the text form, both ways.
macro_rules! names {
    ($ty:ident { $($variant:ident = $name:literal),* $(,)? }) => {
        impl $ty {
            /// Every variant, in the order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in the text form.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The variant of that name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

names!(UnaryOp {
    Neg = "neg", Abs = "abs", Sign = "sign", Not = "not", Exp = "exp", Expm1 = "expm1", Log = "log", Log1p = "log1p",
    Sqrt = "sqrt", Rsqrt = "rsqrt", Recip = "recip", Sin = "sin", Cos = "cos", Tan = "tan", Asin = "asin", Acos = "acos",
    Atan = "atan", Sinh = "sinh", Cosh = "cosh", Tanh = "tanh", Asinh = "asinh", Acosh = "acosh", Atanh = "atanh",
    Erf = "erf", Sigmoid = "sigmoid", Floor = "floor", Ceil = "ceil", Round = "round", Trunc = "trunc",
    IsNan = "is_nan", IsInf = "is_inf",
});
names!(BinaryOp {
    Add = "add", Sub = "sub", Mul = "mul", Div = "div", Rem = "rem", Pow = "pow", Atan2 = "atan2", Max = "max",
    Min = "min", And = "and", Or = "or", Xor = "xor", Shl = "shl", Shr = "shr",
});
names!(CompareOp { Eq = "eq", Ne = "ne", Lt = "lt", Le = "le", Gt = "gt", Ge = "ge" });
names!(ReduceOp {
    Sum = "sum", Prod = "prod", Max = "max", Min = "min", Any = "any", All = "all",
});
names!(ArgReduceOp { Max = "max", Min = "min" });
names!(ScatterMode { Assign = "assign", Add = "add", Mul = "mul", Max = "max", Min = "min" });
names!(RandomKind { Uniform = "uniform", Normal = "normal", IntRange = "int_range" });

impl Op {
    /// The mnemonic in the text form. Families share a prefix only where their functions need it:
    /// `add`, `exp`, `compare`, `reduce`, ….
    pub fn name(&self) -> &'static str {
        crate::text::mnemonic(self)
    }

    /// The slice of all of a tensor of `shape` but along `axis`, where it has the elements of `range`.
    pub fn slice(shape: &[usize], axis: usize, range: std::ops::Range<usize>) -> Self {
        let mut starts = Dims::from_elem(0, shape.len());
        let mut limits = Dims::from_slice(shape);
        (starts[axis], limits[axis]) = (range.start, range.end);
        Self::Slice {
            starts,
            limits,
            steps: Dims::from_elem(1, shape.len()),
        }
    }

    /// Whether each result element depends on one element of each operand, at the same index.
    pub fn is_pointwise(&self) -> bool {
        matches!(
            self,
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_)
        )
    }

    /// Whether it gives an argument of the graph, or must run as often, and in the order, as the graph
    /// says: collectives, and operations kept whole. No pass merges such nodes, and none computes them
    /// again.
    pub fn is_impure(&self) -> bool {
        matches!(
            self,
            Op::Parameter { .. } | Op::Scalar { .. } | Op::Collective(_) | Op::CollectiveWait | Op::Extern(_)
        )
    }

    /// The same product or convolution with f32 results of operands of 16 bits; none for other operations.
    pub fn with_result(&self, dtype: Option<DType>) -> Option<Op> {
        let mut op = self.clone();
        match &mut op {
            Op::DotGeneral(dims) => dims.result = dtype,
            Op::Conv(conv) | Op::ConvInputGrad { conv, .. } | Op::ConvWeightGrad { conv, .. } => {
                conv.result = dtype;
            }
            _ => return None,
        }
        Some(op)
    }

    /// Whether it is a convolution of single pixels, or a gradient of one; `second` is the shape of its
    /// second operand.
    pub fn is_pixelwise(&self, second: &[usize]) -> bool {
        match self {
            Op::Conv(_) | Op::ConvInputGrad { .. } => second[2..].iter().all(|&extent| extent == 1),
            Op::ConvWeightGrad { kernel, .. } => kernel.iter().all(|&extent| extent == 1),
            _ => false,
        }
    }

    /// Whether the results are elements of the operands, moved or repeated, and nothing is computed.
    pub fn is_movement(&self) -> bool {
        matches!(
            self,
            Op::Reshape(_)
                | Op::Transpose(_)
                | Op::Broadcast { .. }
                | Op::Slice { .. }
                | Op::Pad { .. }
                | Op::Concat { .. }
                | Op::Flip(_)
        )
    }

    /// Whether this is a matrix product, convolution or attention: the work is cubic, not linear, in the
    /// data.
    pub fn is_contraction(&self) -> bool {
        matches!(
            self,
            Op::DotGeneral(_)
                | Op::Conv(_)
                | Op::ConvInputGrad { .. }
                | Op::ConvWeightGrad { .. }
                | Op::Attention(_)
                | Op::AttentionGrad(_)
        )
    }
}
