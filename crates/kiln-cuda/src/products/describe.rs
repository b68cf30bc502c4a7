//! A product in the library's terms.
//!
//! cuBLASLt's matrices are column-major. A row-major matrix of `m` by `n` is a column-major one of `n` by
//! `m`, so the library is asked for the transposed result: its first matrix is the right operand, its second
//! the left one, and the vector that it adds to each column is the one that Kiln adds to each row.

use std::ffi::c_void;

use super::product::{Compute, Epilogue, Number, Product, ScalarsFrom};
use super::{Multiplier, check};
use crate::error::{CudaError, Result};
use crate::libraries::CublasLt;
use crate::sys::cublaslt::{
    MatmulDescription, MatmulPreference, MatrixLayout, compute, data_type, description_attribute, epilogue,
    layout_attribute, preference_attribute,
};

/// The library's description of a product, destroyed when dropped.
#[derive(Debug)]
pub(super) struct Described {
    library: CublasLt,
    pub(super) description: MatmulDescription,
    /// The library's first matrix: Kiln's right operand.
    pub(super) a: MatrixLayout,
    /// The library's second matrix: Kiln's left operand.
    pub(super) b: MatrixLayout,
    pub(super) d: MatrixLayout,
}

impl Drop for Described {
    fn drop(&mut self) {
        for layout in [self.a, self.b, self.d] {
            if layout != MatrixLayout::NULL {
                // SAFETY: created by `describe`, destroyed here once.
                unsafe { (self.library.functions.cublasLtMatrixLayoutDestroy)(layout) };
            }
        }
        if self.description != MatmulDescription::NULL {
            // SAFETY: created by `describe`, destroyed here once.
            unsafe { (self.library.functions.cublasLtMatmulDescDestroy)(self.description) };
        }
    }
}

fn data_type_of(number: Number) -> i32 {
    match number {
        Number::F32 => data_type::R_32F,
        Number::F64 => data_type::R_64F,
        Number::F16 => data_type::R_16F,
        Number::Bf16 => data_type::R_16BF,
    }
}

/// Rows, columns and leading extent of a matrix as the library sees it.
struct Stored {
    number: Number,
    rows: u64,
    columns: u64,
    leading: u64,
    batch_stride: u64,
}

impl Described {
    /// Describes `product`, whose bias, if it has one, is not named yet.
    pub(super) fn new(multiplier: &Multiplier, product: &Product) -> Result<Self> {
        if [product.batch, product.m, product.n, product.k].contains(&0) {
            return Err(CudaError::Product {
                product: product.to_string(),
                call: "Kiln",
                what: "that there is nothing to multiply".into(),
            });
        }
        let mut described = Self {
            library: multiplier.library.clone(),
            description: MatmulDescription::NULL,
            a: MatrixLayout::NULL,
            b: MatrixLayout::NULL,
            d: MatrixLayout::NULL,
        };
        let (how, scale) = match product.compute {
            Compute::F32 => (compute::F32, data_type::R_32F),
            Compute::Tf32 => (compute::F32_FAST_TF32, data_type::R_32F),
            Compute::F64 => (compute::F64, data_type::R_64F),
        };
        let create = described.library.functions.cublasLtMatmulDescCreate;
        // SAFETY: the pointer is to the handle in `described`.
        let status = unsafe { create(&raw mut described.description, how, scale) };
        check(status, "cublasLtMatmulDescCreate", || product.to_string())?;
        let pointer_mode = i32::from(product.scalars == ScalarsFrom::Device);
        let after = match product.epilogue {
            Epilogue::None => epilogue::DEFAULT,
            Epilogue::Bias => epilogue::BIAS,
            Epilogue::Relu => epilogue::RELU,
            Epilogue::BiasRelu => epilogue::BIAS | epilogue::RELU,
            Epilogue::TanhGelu => epilogue::GELU,
            Epilogue::BiasTanhGelu => epilogue::BIAS | epilogue::GELU,
            Epilogue::RightSums => epilogue::SUM_OF_A,
            Epilogue::LeftSums => epilogue::SUM_OF_B,
        };
        for (attribute, value) in [
            (description_attribute::POINTER_MODE, pointer_mode),
            (
                description_attribute::TRANSPOSE_A,
                i32::from(product.right.transposed),
            ),
            (
                description_attribute::TRANSPOSE_B,
                i32::from(product.left.transposed),
            ),
            (description_attribute::EPILOGUE, after),
        ] {
            described.set(attribute, &value.to_ne_bytes(), product)?;
        }
        let Product {
            m,
            n,
            k,
            left,
            right,
            result,
            ..
        } = *product;
        let exchange = |transposed: bool, rows: u64, columns: u64| {
            if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        let (a_rows, a_columns) = exchange(right.transposed, n, k);
        let (b_rows, b_columns) = exchange(left.transposed, k, m);
        described.a = described.layout(
            product,
            &Stored {
                number: right.number,
                rows: a_rows,
                columns: a_columns,
                leading: right.leading,
                batch_stride: right.batch_stride,
            },
        )?;
        described.b = described.layout(
            product,
            &Stored {
                number: left.number,
                rows: b_rows,
                columns: b_columns,
                leading: left.leading,
                batch_stride: left.batch_stride,
            },
        )?;
        described.d = described.layout(
            product,
            &Stored {
                number: result.number,
                rows: n,
                columns: m,
                leading: result.leading,
                batch_stride: result.batch_stride,
            },
        )?;
        Ok(described)
    }

    /// Names the vector to add or to write.
    pub(super) fn set_vector(&mut self, address: u64, product: &Product) -> Result<()> {
        self.set(
            description_attribute::BIAS_POINTER,
            &address.to_ne_bytes(),
            product,
        )
    }

    fn set(&mut self, attribute: i32, value: &[u8], product: &Product) -> Result<()> {
        let pointer = value.as_ptr().cast::<c_void>();
        // SAFETY: the description is alive; the library copies the value, which is as long as it is told.
        let status = unsafe {
            (self.library.functions.cublasLtMatmulDescSetAttribute)(
                self.description,
                attribute,
                pointer,
                value.len(),
            )
        };
        check(status, "cublasLtMatmulDescSetAttribute", || product.to_string())
    }

    fn layout(&self, product: &Product, stored: &Stored) -> Result<MatrixLayout> {
        let functions = &self.library.functions;
        let kind = data_type_of(stored.number);
        // The library wants a column's extent even where there is one column only.
        let leading = i64::try_from(stored.leading.max(stored.rows)).unwrap_or(i64::MAX);
        let mut layout = MatrixLayout::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let status = unsafe {
            (functions.cublasLtMatrixLayoutCreate)(
                &raw mut layout,
                kind,
                stored.rows,
                stored.columns,
                leading,
            )
        };
        check(status, "cublasLtMatrixLayoutCreate", || product.to_string())?;
        if product.batch == 1 {
            return Ok(layout);
        }
        let batch = i32::try_from(product.batch).unwrap_or(i32::MAX).to_ne_bytes();
        let stride = i64::try_from(stored.batch_stride)
            .unwrap_or(i64::MAX)
            .to_ne_bytes();
        let set = |attribute, value: &[u8]| {
            // SAFETY: the layout was just made; the library copies the value, which is as long as it is told.
            unsafe {
                (functions.cublasLtMatrixLayoutSetAttribute)(
                    layout,
                    attribute,
                    value.as_ptr().cast(),
                    value.len(),
                )
            }
        };
        let counted = set(layout_attribute::BATCH_COUNT, &batch);
        let spaced = set(layout_attribute::STRIDED_BATCH_OFFSET, &stride);
        if counted != 0 || spaced != 0 {
            // SAFETY: made above, and nobody else has it.
            unsafe { (functions.cublasLtMatrixLayoutDestroy)(layout) };
        }
        check(counted, "cublasLtMatrixLayoutSetAttribute", || {
            product.to_string()
        })?;
        check(spaced, "cublasLtMatrixLayoutSetAttribute", || product.to_string())?;
        Ok(layout)
    }
}

/// What a search may use, destroyed when dropped.
pub(super) struct Preference<'a> {
    library: &'a CublasLt,
    pub(super) raw: MatmulPreference,
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed here once.
        unsafe { (self.library.functions.cublasLtMatmulPreferenceDestroy)(self.raw) };
    }
}

impl<'a> Preference<'a> {
    /// At most `workspace_bytes` bytes of working memory, and addresses as `product` has them.
    pub(super) fn new(library: &'a CublasLt, workspace_bytes: u64, product: &Product) -> Result<Self> {
        let mut raw = MatmulPreference::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let status = unsafe { (library.functions.cublasLtMatmulPreferenceCreate)(&raw mut raw) };
        check(status, "cublasLtMatmulPreferenceCreate", || product.to_string())?;
        let preference = Self { library, raw };
        let workspace = preference_attribute::MAX_WORKSPACE_BYTES;
        preference.set(workspace, &workspace_bytes.to_ne_bytes(), product)?;
        let [left, right, result] = product.alignments;
        for (attribute, alignment) in [
            (preference_attribute::MIN_ALIGNMENT_A_BYTES, right),
            (preference_attribute::MIN_ALIGNMENT_B_BYTES, left),
            (preference_attribute::MIN_ALIGNMENT_C_BYTES, result),
            (preference_attribute::MIN_ALIGNMENT_D_BYTES, result),
        ] {
            preference.set(attribute, &alignment.to_ne_bytes(), product)?;
        }
        Ok(preference)
    }

    fn set(&self, attribute: i32, value: &[u8], product: &Product) -> Result<()> {
        // SAFETY: the preference is alive; the library copies the value, which is as long as it is told.
        let status = unsafe {
            (self.library.functions.cublasLtMatmulPreferenceSetAttribute)(
                self.raw,
                attribute,
                value.as_ptr().cast(),
                value.len(),
            )
        };
        check(status, "cublasLtMatmulPreferenceSetAttribute", || {
            product.to_string()
        })
    }
}
