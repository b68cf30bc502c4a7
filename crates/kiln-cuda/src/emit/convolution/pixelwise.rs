//! Convolutions that only mix channels, as products of matrices.
//!
//! ```text
//! result of a convolution   [pixels, out] = [pixels, in] · [out, in]ᵀ
//! gradient of its input     [pixels, in]  = [pixels, out] · [out, in]
//! gradient of its weight    [out, in]     = [pixels, out]ᵀ · [pixels, in]
//! ```
//!
//! Where the channels of the result come first, the product computes the transposed result from transposed
//! operands. Groups become a batch of products, and so do images whose pixels are not evenly spaced from
//! one image to the next.

use kiln_compiler::schedule::Buffer;
use kiln_graph::{DType, Value};

use super::Convolution;
use super::correlation::Correlation;
use crate::emit::image::Image;
use crate::emit::{Call, EmitOptions, KernelCode, ProductCall};
use crate::products::{ALIGNED, Compute, Epilogue, MatrixIn, MatrixOut, Number, Product, ScalarsFrom};

/// The most working memory that cuBLASLt may use, in bytes: what its documentation recommends for this
/// generation.
const WORKSPACE: usize = 32 << 20;

/// The parts of a long sum that working memory has room for.
const SPLITS: usize = 16;

/// A matrix in memory, for each of a batch: rows, columns, and elements between neighbours of each.
#[derive(Clone, Copy)]
struct Matrix {
    extents: [usize; 2],
    strides: [i64; 2],
    batch: i64,
}

impl Matrix {
    fn transposed(self) -> Self {
        let ([rows, columns], [down, right]) = (self.extents, self.strides);
        Self {
            extents: [columns, rows],
            strides: [right, down],
            ..self
        }
    }

    /// Elements from one row to the next, if elements of a row are neighbours.
    fn leading(self) -> Option<u64> {
        let ([rows, columns], [down, right]) = (self.extents, self.strides);
        if columns > 1 && right != 1 {
            return None;
        }
        let leading = if rows > 1 {
            u64::try_from(down).ok()?
        } else {
            columns as u64
        };
        (leading >= columns as u64).then_some(leading)
    }

    fn operand(self, number: Number) -> Option<MatrixIn> {
        let (transposed, leading) = match self.leading() {
            Some(leading) => (false, leading),
            None => (true, self.transposed().leading()?),
        };
        Some(MatrixIn {
            number,
            transposed,
            leading,
            batch_stride: u64::try_from(self.batch).ok()?,
        })
    }

    fn result(self, number: Number) -> Option<MatrixOut> {
        Some(MatrixOut {
            number,
            leading: self.leading()?,
            batch_stride: u64::try_from(self.batch).ok()?,
        })
    }
}

/// A buffer, and the elements in front of a matrix.
type Place = (Value, i64);

impl Convolution<'_> {
    /// Whether each pixel of the result is computed from one pixel of the image, the one in its own place.
    fn is_pixelwise(&self) -> bool {
        self.taps() == 1
            && self.stride == [1; 3]
            && self.low == [0; 3]
            && self.dims.pad_high.iter().all(|&pad| pad == 0)
    }

    /// The matrices of `image`'s pixels for each product of `batch`.
    fn pixels(&self, image: &Image, group: usize, batch: Batch) -> Option<Matrix> {
        let (rows, stride, batch) = match batch {
            Batch::Groups => (image.pixels(), image.pixel()?, group as i64 * image.channel),
            Batch::Images => (image.plane(), image.place()?, image.image),
        };
        Some(Matrix {
            extents: [rows, group],
            strides: [stride, image.channel],
            batch,
        })
    }
}

/// What each product of a batch computes.
#[derive(Clone, Copy, PartialEq)]
enum Batch {
    /// Groups of channels, each with all pixels.
    Groups,
    /// Images, of a convolution without groups.
    Images,
}

/// The code of a correlation; none if it is no product.
pub fn correlation(task: &Correlation<'_>, options: &EmitOptions<'_>) -> Option<KernelCode> {
    product_of(task, options).map(code)
}

/// The product that a correlation is; none if it is none.
pub fn product_of(task: &Correlation<'_>, options: &EmitOptions<'_>) -> Option<ProductCall> {
    let convolution = task.convolution;
    if !convolution.is_pixelwise() {
        return None;
    }
    let groups = convolution.dims.groups;
    let evenly = task.image.pixel().is_some() && task.result.pixel().is_some();
    let (batch, count) = match evenly {
        true => (Batch::Groups, groups),
        false if groups == 1 => (Batch::Images, task.image.images),
        false => return None,
    };
    let image = convolution.pixels(task.image, task.depth, batch)?;
    let result = convolution.pixels(task.result, task.out, batch)?;
    let (first, second) = (task.weight.strides[0], task.weight.strides[1]);
    let [own, other] = match task.gradient {
        false => [second, first],
        true => [first, second],
    };
    let weight = Matrix {
        extents: [task.depth, task.out],
        strides: [own, other],
        batch: match batch {
            Batch::Groups if task.gradient => first * task.depth as i64,
            Batch::Groups => first * task.out as i64,
            Batch::Images => 0,
        },
    };
    let (image_at, weight_at) = (
        (task.image.base, task.image.offset),
        (task.weight.base, task.weight.offset),
    );
    let out = task.result.base;
    let dtypes = [convolution.dtype, convolution.result_dtype];
    product(
        dtypes,
        count,
        [image, weight, result],
        [image_at, weight_at],
        out,
        options,
    )
    .or_else(|| {
        let sides = [weight, image, result].map(Matrix::transposed);
        product(dtypes, count, sides, [weight_at, image_at], out, options)
    })
}

/// The code of a weight's gradient; none if it is no product.
pub fn weight(convolution: &Convolution<'_>, out: Value, options: &EmitOptions<'_>) -> Option<KernelCode> {
    if !convolution.is_pixelwise() {
        return None;
    }
    let (x, y) = (&convolution.x, &convolution.y);
    let [depth, channels] = convolution.group;
    let gradient = convolution.pixels(y, channels, Batch::Groups)?.transposed();
    let image = convolution.pixels(x, depth, Batch::Groups)?;
    let result = Matrix {
        extents: [channels, depth],
        strides: [depth as i64, 1],
        batch: (channels * depth) as i64,
    };
    let places = [(y.base, y.offset), (x.base, x.offset)];
    let call = product(
        [convolution.dtype, convolution.result_dtype],
        convolution.dims.groups,
        [gradient, image, result],
        places,
        out,
        options,
    )?;
    Some(code(call))
}

/// The code of a product.
fn code(call: ProductCall) -> KernelCode {
    KernelCode {
        scratch: call.workspace,
        calls: vec![Call::Product(Box::new(call))],
    }
}

/// `count` products of `left` and `right`, given the element types of the operands and of the result.
fn product(
    [dtype, result_dtype]: [DType; 2],
    count: usize,
    [left, right, result]: [Matrix; 3],
    [left_at, right_at]: [Place; 2],
    out: Value,
    options: &EmitOptions<'_>,
) -> Option<ProductCall> {
    let number = Number::of(dtype)?;
    let compute = match dtype {
        DType::F64 => Compute::F64,
        DType::F32 if options.tf32 => Compute::Tf32,
        _ => Compute::F32,
    };
    let product = Product {
        batch: count as u64,
        m: left.extents[0] as u64,
        n: right.extents[1] as u64,
        k: left.extents[1] as u64,
        left: left.operand(number)?,
        right: right.operand(number)?,
        result: result.result(Number::of(result_dtype)?)?,
        compute,
        epilogue: Epilogue::None,
        scalars: ScalarsFrom::Product,
        alignments: [ALIGNED; 3],
    };
    let place = |(base, offset): Place| {
        let bytes = usize::try_from(offset).ok()? * number.bytes();
        // The library may read vectors of 16 bytes from the first element on.
        bytes.is_multiple_of(16).then_some((Buffer::Value(base), bytes))
    };
    let elements = count * left.extents[0] * right.extents[1];
    let workspace = (elements * SPLITS * product.scalar_bytes()).min(WORKSPACE);
    let workspace = workspace.next_multiple_of(super::ALIGNMENT);
    Some(ProductCall {
        product,
        left: place(left_at)?,
        right: place(right_at)?,
        result: (Buffer::Value(out), 0),
        workspace,
    })
}
