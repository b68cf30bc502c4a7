//! Products as cuBLASLt takes them: matrices with one stride of 1, and one evenly spaced batch of them.
//!
//! Where rows (or columns) consist of several dimensions that do not join, all but one of these become
//! batch dimensions, along which the other operand repeats. Where the batch consists of several dimensions
//! that do not join, all but one of them become calls of their own, if there are few.

use kiln_compiler::schedule::Buffer;

use super::{Dim, Frame, joined};
use crate::emit::ProductCall;
use crate::products::{ALIGNED, Compute, Epilogue, MatrixIn, MatrixOut, Number, Product, ScalarsFrom};

/// The most calls that one product becomes: beyond that, one launch of Kiln's own kernel is faster.
const CALLS: usize = 32;
/// The most working memory of a product, in bytes: what the library's largest algorithms ask for.
const WORKSPACE: usize = 32 << 20;
/// Parts that a sum may be split into, each with a result of its own in working memory.
const SPLITS: usize = 16;

/// The calls that compute the product; none if cuBLASLt does not take it.
pub(super) fn calls(frame: &Frame, tf32: bool) -> Option<Vec<ProductCall>> {
    let numbers = [Number::of(frame.dtype)?, Number::of(frame.result_dtype)?];
    let depth = match frame.depth[..] {
        [] => Dim::ONE,
        [depth] => depth,
        _ => return None,
    };
    choices(&frame.rows).into_iter().find_map(|(row, other_rows)| {
        choices(&frame.columns)
            .into_iter()
            .find_map(|(column, other_columns)| {
                let mut batch = frame.batch.clone();
                batch.extend(other_rows.iter().chain(&other_columns));
                let matrices = Matrices {
                    numbers,
                    rows: row,
                    columns: column,
                    depth,
                    batch: joined(batch),
                };
                matrices.calls(frame, tf32)
            })
    })
}

/// Each dimension with the others, the longest first.
fn choices(dims: &[Dim]) -> Vec<(Dim, Vec<Dim>)> {
    if dims.is_empty() {
        return vec![(Dim::ONE, Vec::new())];
    }
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(dims[at].extent));
    let choice = |chosen: usize| {
        let others = dims.iter().enumerate().filter(|&(at, _)| at != chosen);
        (dims[chosen], others.map(|(_, &dim)| dim).collect())
    };
    order.into_iter().map(choice).collect()
}

/// A batch of products of matrices.
struct Matrices {
    /// Element types of the operands and of the result.
    numbers: [Number; 2],
    rows: Dim,
    columns: Dim,
    depth: Dim,
    batch: Vec<Dim>,
}

impl Matrices {
    fn calls(mut self, frame: &Frame, tf32: bool) -> Option<Vec<ProductCall>> {
        let (mut left, mut right) = (frame.left, frame.right);
        if self.columns.result != 1 && self.columns.extent != 1 {
            // Column by column in memory: the transposed product is row by row.
            (left, right) = (right, left);
            let batch = self.batch.into_iter().map(Dim::exchanged).collect();
            self = Self {
                numbers: self.numbers,
                rows: self.columns.exchanged(),
                columns: self.rows.exchanged(),
                depth: self.depth.exchanged(),
                batch,
            };
        }
        let inner = (0..self.batch.len()).max_by_key(|&at| self.batch[at].extent);
        let inner = inner.map_or(Dim::ONE, |at| self.batch.remove(at));
        let outer: usize = self.batch.iter().map(|dim| dim.extent).product();
        if outer > CALLS {
            return None;
        }
        let product = self.product(inner, tf32)?;
        let workspace = workspace(&product);
        let [operands, result] = self.numbers;
        (0..outer)
            .map(|call| {
                let at = self.offsets(call);
                let place = |number: Number, value, offset: i64| {
                    let bytes = offset * number.bytes() as i64;
                    Some((Buffer::Value(value), usize::try_from(bytes).ok()?))
                };
                Some(ProductCall {
                    product: product.clone(),
                    left: place(operands, left.0, left.1 + at.left)?,
                    right: place(operands, right.0, right.1 + at.right)?,
                    result: place(result, frame.result.0, frame.result.1 + at.result)?,
                    workspace,
                })
            })
            .collect()
    }

    /// The elements in front of the matrices of call number `call`.
    fn offsets(&self, mut call: usize) -> Dim {
        let mut at = Dim::ONE;
        for dim in self.batch.iter().rev() {
            let index = (call % dim.extent) as i64;
            call /= dim.extent;
            at.left += index * dim.left;
            at.right += index * dim.right;
            at.result += index * dim.result;
        }
        at
    }

    /// The product of the matrices along `batch`.
    fn product(&self, batch: Dim, tf32: bool) -> Option<Product> {
        let Self {
            numbers: [number, result],
            rows,
            columns,
            depth,
            ..
        } = *self;
        let stride = |elements: i64| u64::try_from(elements).ok();
        let operand = |rows: (usize, i64), columns: (usize, i64), batch: i64| {
            let (transposed, leading) = stored(rows, columns)?;
            Some(MatrixIn {
                number,
                transposed,
                leading,
                batch_stride: stride(batch)?,
            })
        };
        let (false, leading) = stored((rows.extent, rows.result), (columns.extent, columns.result))? else {
            return None;
        };
        Some(Product {
            batch: batch.extent as u64,
            m: rows.extent as u64,
            n: columns.extent as u64,
            k: depth.extent as u64,
            left: operand((rows.extent, rows.left), (depth.extent, depth.left), batch.left)?,
            right: operand(
                (depth.extent, depth.right),
                (columns.extent, columns.right),
                batch.right,
            )?,
            result: MatrixOut {
                number: result,
                leading,
                batch_stride: stride(batch.result)?,
            },
            compute: match number {
                Number::F64 => Compute::F64,
                Number::F32 if tf32 => Compute::Tf32,
                _ => Compute::F32,
            },
            epilogue: Epilogue::None,
            scalars: ScalarsFrom::Product,
            alignments: [ALIGNED; 3],
        })
    }
}

/// How a matrix lies in memory, given extent and stride of its rows and columns: whether it is transposed,
/// and the elements from one row in memory to the next; none if neither stride is 1, or rows overlap.
fn stored(rows: (usize, i64), columns: (usize, i64)) -> Option<(bool, u64)> {
    let along = |line: (usize, i64), across: (usize, i64)| {
        let (extent, stride) = line;
        // A single line has no next one: its stride is its own length.
        let leading = if across.0 == 1 { extent as i64 } else { across.1 };
        let fits = (extent == 1 || stride == 1) && leading >= extent as i64;
        fits.then(|| leading.unsigned_abs())
    };
    match along(columns, rows) {
        Some(leading) => Some((false, leading)),
        None => Some((true, along(rows, columns)?)),
    }
}

/// Bytes of working memory that algorithms may use: room for the results of a split sum in f32.
fn workspace(product: &Product) -> usize {
    let elements = usize::try_from(product.batch * product.m * product.n).unwrap_or(usize::MAX);
    let bytes = elements.saturating_mul(SPLITS * product.scalar_bytes());
    bytes.min(WORKSPACE).next_multiple_of(256)
}
