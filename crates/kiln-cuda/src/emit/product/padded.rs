//! Matrices of 16 bits whose extents are no multiple of eight.
//!
//! Tensor cores take eight elements at once. Where an extent of a product is no multiple of eight (a
//! vocabulary of 30,522), cuBLASLt falls back to kernels of an older generation. On an H200, `[4096, 768] ·
//! [768, n]` of bf16 takes 786 microseconds for n = 30,522 and 250 for n = 30,528; aligning the rows alone
//! does not help. Where it pays, matrices with such extents are therefore copied to working memory with
//! zeros behind their rows and columns, and a result is copied back from there.

use crate::emit::text::{THREADS, Text, blocks, index_type};
use crate::emit::{Argument, Call, KernelCode, Launch, PaddedProduct, ProductCall};
use crate::products::{MatrixIn, Number, Product, ScalarsFrom};

/// Extents that tensor cores take are multiples of this.
const UNIT: u64 = 8;
/// Seconds that each multiply-add takes longer where an extent is no multiple of [`UNIT`]: 235 instead of
/// 768 TFLOP/s (H200).
const LOSS: f64 = 5.9e-15;
/// Seconds that a byte of a copy takes, read and written (H200).
const BYTE: f64 = 2.0 / 4.3e12;
/// Seconds of a launch.
const LAUNCH: f64 = 2e-6;
/// A copy must save so many times its own time: other devices have other rates.
const MARGIN: f64 = 1.5;
/// The most bytes of a copy: working memory counts into the step's peak.
const MOST: usize = 640 << 20;
/// Copies begin at multiples of so many bytes.
const BORDER: usize = 256;

/// Which products are computed on copies with padded extents.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Padding {
    /// Those that are faster on copies.
    #[default]
    WherePays,
    /// All that could be, however small: for tests.
    Always,
}

/// Each thread writes one element, or several neighbours as one number whose size divides the start of
/// every row on both sides. Elements behind the source's rows and columns are zeros.
const COPY: &str = "
const Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
if (i >= COUNT) return;
const Index row = i / TO_COLUMNS, column = i % TO_COLUMNS;
to[TO_START + row * TO_LEADING + column] = row < ROWS && column < COLUMNS ? from[FROM_START + row * FROM_LEADING + column] : (Element)0;
";

/// A matrix as it lies in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stored {
    rows: u64,
    columns: u64,
    /// Elements from row to row.
    leading: u64,
    number: Number,
}

impl Stored {
    /// The matrices of a product: left operand, right operand, result.
    fn of(product: &Product) -> [Self; 3] {
        let operand = |matrix: &MatrixIn, rows: u64, columns: u64| {
            let (rows, columns) = match matrix.transposed {
                true => (columns, rows),
                false => (rows, columns),
            };
            Self {
                rows,
                columns,
                leading: matrix.leading,
                number: matrix.number,
            }
        };
        let Product { m, n, k, .. } = *product;
        [
            operand(&product.left, m, k),
            operand(&product.right, k, n),
            Self {
                rows: m,
                columns: n,
                leading: product.result.leading,
                number: product.result.number,
            },
        ]
    }

    /// The same with extents that tensor cores take, row by row without gaps.
    fn padded(self) -> Self {
        let columns = self.columns.next_multiple_of(UNIT);
        Self {
            rows: self.rows.next_multiple_of(UNIT),
            columns,
            leading: columns,
            ..self
        }
    }

    /// Whether tensor cores take the matrix as it is.
    fn is_aligned(&self) -> bool {
        [self.rows, self.columns, self.leading]
            .iter()
            .all(|extent| extent.is_multiple_of(UNIT))
    }

    /// Bytes without gaps.
    fn bytes(&self) -> usize {
        usize::try_from(self.rows.saturating_mul(self.columns))
            .unwrap_or(usize::MAX / 64)
            .saturating_mul(self.number.bytes())
    }
}

/// The calls for `call`, on copies where `padding` says so.
pub(super) fn calls(call: ProductCall, padding: Padding) -> KernelCode {
    let own = Stored::of(&call.product);
    let copies = own.map(|matrix| !matrix.is_aligned());
    if !is_candidate(&call.product) || !copies.contains(&true) || !pays(&call.product, own, copies, padding) {
        return KernelCode {
            scratch: call.workspace,
            calls: vec![Call::Product(Box::new(call))],
        };
    }
    let mut scratch = call.workspace;
    let mut places = [None; 3];
    for ((place, matrix), _) in places
        .iter_mut()
        .zip(own)
        .zip(copies)
        .filter(|(_, copied)| *copied)
    {
        let at = scratch.next_multiple_of(BORDER);
        *place = Some(at);
        scratch = at + matrix.padded().bytes();
    }
    let argument = |(buffer, bytes)| (Argument::Buffer(buffer), bytes);
    let buffers = [call.left, call.right, call.result].map(argument);
    let side = |matrix: usize| {
        let (buffer, bytes) = buffers[matrix].clone();
        let in_scratch = places[matrix].map(Argument::Scratch)?;
        Some((
            (buffer, bytes, own[matrix]),
            (in_scratch, 0, own[matrix].padded()),
        ))
    };
    let copied = |from, to| Call::Launch(copy(from, to));
    let mut calls: Vec<Call> = [0, 1]
        .into_iter()
        .filter_map(|matrix| side(matrix).map(|(memory, padded)| copied(memory, padded)))
        .collect();
    let behind = side(2).map(|(memory, padded)| copied(padded, memory));
    let padded = PaddedProduct {
        call: ProductCall {
            product: padded_product(&call.product, places),
            ..call
        },
        copies: places,
    };
    calls.push(Call::Padded(Box::new(padded)));
    calls.extend(behind);
    KernelCode { calls, scratch }
}

/// Whether the product may be computed on copies: one of matrices of 16 bits.
fn is_candidate(product: &Product) -> bool {
    let half = |number: Number| matches!(number, Number::F16 | Number::Bf16);
    half(product.left.number)
        && half(product.right.number)
        && product.batch == 1
        && product.scalars == ScalarsFrom::Product
        && [product.m, product.n, product.k]
            .iter()
            .all(|&extent| extent >= UNIT)
}

/// Whether the copies take less time than they save.
fn pays(product: &Product, own: [Stored; 3], copies: [bool; 3], padding: Padding) -> bool {
    let copied = || own.iter().zip(copies).filter(|(_, copied)| *copied);
    let sizes = || copied().map(|(matrix, _)| matrix.padded().bytes());
    if padding == Padding::Always {
        return true;
    }
    let cost = sizes().map(|bytes| bytes as f64 * BYTE + LAUNCH).sum::<f64>();
    // Floating-point operations are two for each multiplication.
    sizes().all(|bytes| bytes <= MOST) && product.flop() / 2.0 * LOSS > MARGIN * cost
}

/// The product of padded matrices, those in `places` without gaps.
fn padded_product(product: &Product, places: [Option<usize>; 3]) -> Product {
    let mut padded = product.clone();
    for extent in [&mut padded.m, &mut padded.n, &mut padded.k] {
        *extent = extent.next_multiple_of(UNIT);
    }
    let [left, right, result] = Stored::of(&padded).map(|matrix| matrix.columns);
    let strides = [
        (&mut padded.left.leading, left),
        (&mut padded.right.leading, right),
        (&mut padded.result.leading, result),
    ];
    for ((leading, columns), place) in strides.into_iter().zip(places) {
        if place.is_some() {
            *leading = columns;
        }
    }
    padded
}

/// The launch that copies a matrix from one memory to another; each side is given with its offset in bytes.
/// Elements that the source lacks are zero.
fn copy(from: (Argument, usize, Stored), to: (Argument, usize, Stored)) -> Launch {
    let size = from.2.number.bytes();
    // The widest access that starts and lengths of all rows, on both sides, are multiples of.
    let fits = |width: usize| {
        [&from, &to].iter().all(|(_, start, matrix)| {
            let whole = |elements: u64| (elements as usize * size).is_multiple_of(width);
            start.is_multiple_of(width) && whole(matrix.columns) && whole(matrix.leading)
        })
    };
    let types = [
        (8, "unsigned long long"),
        (4, "unsigned int"),
        (2, "unsigned short"),
    ];
    let (width, ty) = types
        .into_iter()
        .find(|&(width, _)| fits(width))
        .unwrap_or(types[2]);
    let units = |elements: u64| elements as usize * size / width;
    let span =
        |(_, start, matrix): &(Argument, usize, Stored)| start / width + units(matrix.rows * matrix.leading);
    let count = units(to.2.rows * to.2.columns);
    Text::default()
        .ty("Index", index_type(span(&from).max(span(&to))))
        .ty("Element", ty)
        .count("COUNT", count)
        .count("ROWS", from.2.rows as usize)
        .count("COLUMNS", units(from.2.columns))
        .count("TO_COLUMNS", units(to.2.columns))
        .count("FROM_LEADING", units(from.2.leading))
        .count("TO_LEADING", units(to.2.leading))
        .count("FROM_START", from.1 / width)
        .count("TO_START", to.1 / width)
        .reads(ty, "from", from.0)
        .writes(ty, "to", to.0)
        .launch(COPY, blocks(count, THREADS as usize), THREADS)
}
