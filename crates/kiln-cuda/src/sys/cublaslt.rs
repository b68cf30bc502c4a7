//! `libcublasLt`: products of matrices.

use std::ffi::{c_int, c_void};

use super::driver::CUstream;
use super::{functions, handles};

/// What a call answers; zero is success.
pub type CublasStatus = c_int;

handles! {
    /// The library's state on a device.
    LtHandle;
    /// What a product computes.
    MatmulDescription;
    /// How a matrix lies in memory.
    MatrixLayout;
    /// What a search for algorithms may use.
    MatmulPreference;
}

/// `cudaDataType_t`.
pub mod data_type {
    /// Binary floating point of 32 bits.
    pub const R_32F: i32 = 0;
    /// Binary floating point of 64 bits.
    pub const R_64F: i32 = 1;
    /// Binary floating point of 16 bits.
    pub const R_16F: i32 = 2;
    /// The upper half of `R_32F`.
    pub const R_16BF: i32 = 14;
}

/// `cublasComputeType_t`.
pub mod compute {
    /// Sums in f32.
    pub const F32: i32 = 68;
    /// Operands of f32 are rounded to 10 bits of fraction for the tensor cores; sums in f32.
    pub const F32_FAST_TF32: i32 = 77;
    /// Sums in f64.
    pub const F64: i32 = 70;
}

/// Attributes of [`MatmulDescription`].
pub mod description_attribute {
    /// Where the two scalars are: `i32`, 0 for the host, 1 for the device.
    pub const POINTER_MODE: i32 = 2;
    /// Whether the first matrix is transposed: `i32`, 0 or 1.
    pub const TRANSPOSE_A: i32 = 3;
    /// Whether the second matrix is transposed.
    pub const TRANSPOSE_B: i32 = 4;
    /// What follows the product: `i32`.
    pub const EPILOGUE: i32 = 7;
    /// Address of the bias.
    pub const BIAS_POINTER: i32 = 8;
}

/// What follows a product; values add up.
pub mod epilogue {
    /// Nothing.
    pub const DEFAULT: i32 = 1;
    /// The larger of the value and zero.
    pub const RELU: i32 = 2;
    /// A vector is added to every column.
    pub const BIAS: i32 = 4;
    /// GELU by the hyperbolic tangent.
    pub const GELU: i32 = 32;
    /// The first matrix is summed over the extent that the product sums over.
    pub const SUM_OF_A: i32 = 256;
    /// So is the second.
    pub const SUM_OF_B: i32 = 512;
}

/// Attributes of [`MatrixLayout`].
pub mod layout_attribute {
    /// Number of matrices: `i32`.
    pub const BATCH_COUNT: i32 = 5;
    /// Elements from one matrix to the next: `i64`.
    pub const STRIDED_BATCH_OFFSET: i32 = 6;
}

/// Attributes of [`MatmulPreference`].
pub mod preference_attribute {
    /// Bytes of working memory that an algorithm may have: `u64`.
    pub const MAX_WORKSPACE_BYTES: i32 = 1;
    /// Bytes that the address of the first matrix is a multiple of, 256 unless told: `u32`.
    pub const MIN_ALIGNMENT_A_BYTES: i32 = 5;
    /// The same of the second.
    pub const MIN_ALIGNMENT_B_BYTES: i32 = 6;
    /// The same of the matrix that is added.
    pub const MIN_ALIGNMENT_C_BYTES: i32 = 7;
    /// The same of the result.
    pub const MIN_ALIGNMENT_D_BYTES: i32 = 8;
}

/// An algorithm with its settings. May be stored and read again by the same version of the library.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MatmulAlgorithm(pub [u64; 8]);

/// One answer of a search.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct HeuristicResult {
    pub algorithm: MatmulAlgorithm,
    pub workspace_bytes: usize,
    pub state: CublasStatus,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == 96);

functions! {
    /// cuBLASLt's functions, of CUDA 12 and later.
    CublasLtFunctions
    fn cublasLtGetVersion() -> usize;
    fn cublasLtCreate(handle: *mut LtHandle) -> CublasStatus;
    fn cublasLtDestroy(handle: LtHandle) -> CublasStatus;
    fn cublasLtMatmulDescCreate(
        description: *mut MatmulDescription, compute: i32, scale: i32,
    ) -> CublasStatus;
    fn cublasLtMatmulDescDestroy(description: MatmulDescription) -> CublasStatus;
    fn cublasLtMatmulDescSetAttribute(
        description: MatmulDescription, attribute: i32, value: *const c_void, bytes: usize,
    ) -> CublasStatus;
    fn cublasLtMatrixLayoutCreate(
        layout: *mut MatrixLayout, kind: i32, rows: u64, columns: u64, leading: i64,
    ) -> CublasStatus;
    fn cublasLtMatrixLayoutDestroy(layout: MatrixLayout) -> CublasStatus;
    fn cublasLtMatrixLayoutSetAttribute(
        layout: MatrixLayout, attribute: i32, value: *const c_void, bytes: usize,
    ) -> CublasStatus;
    fn cublasLtMatmulPreferenceCreate(preference: *mut MatmulPreference) -> CublasStatus;
    fn cublasLtMatmulPreferenceDestroy(preference: MatmulPreference) -> CublasStatus;
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: MatmulPreference, attribute: i32, value: *const c_void, bytes: usize,
    ) -> CublasStatus;
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: LtHandle, description: MatmulDescription,
        a: MatrixLayout, b: MatrixLayout, c: MatrixLayout, d: MatrixLayout,
        preference: MatmulPreference, wanted: c_int, results: *mut HeuristicResult, found: *mut c_int,
    ) -> CublasStatus;
    fn cublasLtMatmulAlgoCheck(
        handle: LtHandle, description: MatmulDescription,
        a: MatrixLayout, b: MatrixLayout, c: MatrixLayout, d: MatrixLayout,
        algorithm: *const MatmulAlgorithm, result: *mut HeuristicResult,
    ) -> CublasStatus;
    fn cublasLtMatmul(
        handle: LtHandle, description: MatmulDescription, alpha: *const c_void,
        a: *const c_void, a_layout: MatrixLayout, b: *const c_void, b_layout: MatrixLayout,
        beta: *const c_void, c: *const c_void, c_layout: MatrixLayout, d: *mut c_void, d_layout: MatrixLayout,
        algorithm: *const MatmulAlgorithm, workspace: *mut c_void, workspace_bytes: usize, stream: CUstream,
    ) -> CublasStatus;
}
