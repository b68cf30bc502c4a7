//! What a product computes.

use std::fmt;

use kiln_graph::DType;
use serde::{Deserialize, Serialize};

/// A type of elements that cuBLASLt multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Number {
    /// 32 bits.
    F32,
    /// 64 bits.
    F64,
    /// 16 bits, 10 of fraction.
    F16,
    /// 16 bits, 7 of fraction.
    Bf16,
}

impl Number {
    /// The name of a tensor's type; none if no library multiplies it.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F64 => Some(Self::F64),
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// How elements are multiplied and summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Compute {
    /// Exact products of f32 or 16-bit operands, sums in f32.
    F32,
    /// Operands of f32 are rounded to 10 bits of fraction for the tensor cores, sums in f32.
    Tf32,
    /// Everything in f64.
    F64,
}

/// What follows the sum, before the result is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// A vector of `n` elements, of the result's type, is added to each row.
    Bias,
    /// Negative values become zero.
    Relu,
    /// [`Self::Bias`], then [`Self::Relu`].
    BiasRelu,
    /// GELU by the hyperbolic tangent.
    TanhGelu,
    /// [`Self::Bias`], then [`Self::TanhGelu`].
    BiasTanhGelu,
    /// Besides the product, the sum of each row of the left operand is written, `m` elements of the
    /// result's type. In a weight's gradient `dYᵀ · X` that is the gradient of the bias. Only where the
    /// left operand is transposed. The sums are not free: beside a gradient of 3072 by 768 from 4096 rows
    /// of bf16 they take 12 microseconds, and a kernel of two stages takes 7 (H200, cuBLASLt 13.1).
    LeftSums,
    /// Besides the product, the sum of each column of the right operand is written, `n` elements of the
    /// result's type. In a weight's gradient `Xᵀ · dY` that is the gradient of the bias. Only where the right
    /// operand is not transposed.
    RightSums,
}

impl Epilogue {
    /// Whether there is a vector to add.
    pub fn adds_vector(self) -> bool {
        matches!(self, Self::Bias | Self::BiasRelu | Self::BiasTanhGelu)
    }

    /// Whether there is a vector to add, or one to write.
    pub fn has_vector(self) -> bool {
        self.adds_vector() || matches!(self, Self::LeftSums | Self::RightSums)
    }
}

/// An operand: row-major matrices in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MatrixIn {
    /// Type of the elements.
    pub number: Number,
    /// Whether rows and columns are exchanged in memory.
    pub transposed: bool,
    /// Elements from one row in memory to the next.
    pub leading: u64,
    /// Elements from one matrix to the next; zero uses one matrix for all.
    pub batch_stride: u64,
}

/// The result: row-major matrices in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MatrixOut {
    /// Type of the elements.
    pub number: Number,
    /// Elements from one row to the next.
    pub leading: u64,
    /// Elements from one matrix to the next.
    pub batch_stride: u64,
}

/// Where the factors come from: `alpha` of the product, and `beta` of the result's previous elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScalarsFrom {
    /// `alpha` is 1 and `beta` 0: the result is the product.
    Product,
    /// `alpha` and `beta` are 1: the product is added to the result's previous elements.
    Sum,
    /// Both are in the device's memory, side by side, f64 for [`Compute::F64`] and f32 otherwise.
    Device,
}

/// `result[b] = epilogue(alpha · left[b] · right[b] + beta · result[b])` with `left[b]` of `m` by `k` and
/// `right[b]` of `k` by `n` elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Product {
    pub batch: u64,
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub left: MatrixIn,
    pub right: MatrixIn,
    pub result: MatrixOut,
    pub compute: Compute,
    pub epilogue: Epilogue,
    pub scalars: ScalarsFrom,
    /// Bytes that the addresses of the left operand, the right operand and the result are multiples of,
    /// powers of two up to [`ALIGNED`]: an algorithm that was chosen for some may refuse others.
    pub alignments: [u32; 3],
}

/// Bytes that the addresses of allocations, and of buffers in an arena, are multiples of.
pub const ALIGNED: u32 = 256;

/// The bytes, up to [`ALIGNED`], that an address is a multiple of, so many bytes behind an aligned one.
pub fn alignment(bytes: usize) -> u32 {
    1 << bytes.trailing_zeros().min(ALIGNED.trailing_zeros())
}

impl Product {
    /// One product of dense matrices, all of `number`, without TF32 and epilogue.
    pub fn dense(m: u64, n: u64, k: u64, number: Number) -> Self {
        let operand = |rows: u64, columns: u64| MatrixIn {
            number,
            transposed: false,
            leading: columns,
            batch_stride: rows * columns,
        };
        Self {
            batch: 1,
            m,
            n,
            k,
            left: operand(m, k),
            right: operand(k, n),
            result: MatrixOut {
                number,
                leading: n,
                batch_stride: m * n,
            },
            compute: if number == Number::F64 {
                Compute::F64
            } else {
                Compute::F32
            },
            epilogue: Epilogue::None,
            scalars: ScalarsFrom::Product,
            alignments: [ALIGNED; 3],
        }
    }

    /// As many dense products.
    #[must_use]
    pub fn with_batch(mut self, batch: u64) -> Self {
        self.batch = batch;
        self
    }

    /// The left operand, dense, lies transposed in memory: `k` rows of `m`.
    #[must_use]
    pub fn with_transposed_left(mut self) -> Self {
        self.left.transposed = true;
        self.left.leading = self.m;
        self
    }

    /// The right operand, dense, lies transposed in memory: `n` rows of `k`.
    #[must_use]
    pub fn with_transposed_right(mut self) -> Self {
        self.right.transposed = true;
        self.right.leading = self.k;
        self
    }

    /// The result has another type, such as f32 for operands of 16 bits.
    #[must_use]
    pub fn with_result(mut self, number: Number) -> Self {
        self.result.number = number;
        self
    }

    /// Another arithmetic.
    #[must_use]
    pub fn with_compute(mut self, compute: Compute) -> Self {
        self.compute = compute;
        self
    }

    /// What follows the sum.
    #[must_use]
    pub fn with_epilogue(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// What the addresses are multiples of.
    #[must_use]
    pub fn with_alignments(mut self, alignments: [u32; 3]) -> Self {
        self.alignments = alignments;
        self
    }

    /// Where the factors come from.
    #[must_use]
    pub fn with_scalars(mut self, scalars: ScalarsFrom) -> Self {
        self.scalars = scalars;
        self
    }

    /// Floating-point operations, a multiplication and an addition counting as two.
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn flop(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Bytes from the left operand's first element to its last.
    pub fn left_bytes(&self) -> usize {
        let (rows, columns) = if self.left.transposed {
            (self.k, self.m)
        } else {
            (self.m, self.k)
        };
        self.span(
            rows,
            columns,
            self.left.leading,
            self.left.batch_stride,
            self.left.number,
        )
    }

    /// Bytes from the right operand's first element to its last.
    pub fn right_bytes(&self) -> usize {
        let (rows, columns) = if self.right.transposed {
            (self.n, self.k)
        } else {
            (self.k, self.n)
        };
        self.span(
            rows,
            columns,
            self.right.leading,
            self.right.batch_stride,
            self.right.number,
        )
    }

    /// Bytes from the result's first element to its last.
    pub fn result_bytes(&self) -> usize {
        let MatrixOut {
            number,
            leading,
            batch_stride,
        } = self.result;
        self.span(self.m, self.n, leading, batch_stride, number)
    }

    /// Bytes of the vector that is added or written.
    pub fn vector_bytes(&self) -> usize {
        let elements = match self.epilogue {
            Epilogue::None | Epilogue::Relu | Epilogue::TanhGelu => 0,
            Epilogue::Bias | Epilogue::BiasRelu | Epilogue::BiasTanhGelu | Epilogue::RightSums => self.n,
            Epilogue::LeftSums => self.m,
        };
        count(elements).saturating_mul(self.result.number.bytes())
    }

    /// Bytes of one factor.
    pub fn scalar_bytes(&self) -> usize {
        if self.compute == Compute::F64 { 8 } else { 4 }
    }

    fn span(&self, rows: u64, columns: u64, leading: u64, batch_stride: u64, number: Number) -> usize {
        let elements = self
            .batch
            .saturating_sub(1)
            .saturating_mul(batch_stride)
            .saturating_add(rows.saturating_sub(1).saturating_mul(leading))
            .saturating_add(columns);
        count(elements).saturating_mul(number.bytes())
    }
}

fn count(elements: u64) -> usize {
    usize::try_from(elements).unwrap_or(usize::MAX)
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, m, n, k, .. } = self;
        if *batch != 1 {
            write!(f, "{batch} x ")?;
        }
        let exchanged = |operand: &MatrixIn| if operand.transposed { "ᵀ" } else { "" };
        let (left, right) = (exchanged(&self.left), exchanged(&self.right));
        write!(f, "[{m}, {k}]{left} · [{k}, {n}]{right} of {}", self.left.number)?;
        if self.right.number != self.left.number {
            write!(f, " and {}", self.right.number)?;
        }
        if self.result.number != self.left.number {
            write!(f, " into {}", self.result.number)?;
        }
        if self.compute == Compute::Tf32 {
            write!(f, " in TF32")?;
        }
        match self.epilogue {
            Epilogue::None => {}
            Epilogue::Bias => write!(f, " with bias")?,
            Epilogue::Relu => write!(f, " with ReLU")?,
            Epilogue::BiasRelu => write!(f, " with bias and ReLU")?,
            Epilogue::TanhGelu => write!(f, " with GELU")?,
            Epilogue::BiasTanhGelu => write!(f, " with bias and GELU")?,
            Epilogue::LeftSums => write!(f, " and sums of the left operand")?,
            Epilogue::RightSums => write!(f, " and sums of the right operand")?,
        }
        match self.scalars {
            ScalarsFrom::Product => Ok(()),
            ScalarsFrom::Sum => write!(f, ", added to the result"),
            ScalarsFrom::Device => write!(f, ", factors on the device"),
        }
    }
}
