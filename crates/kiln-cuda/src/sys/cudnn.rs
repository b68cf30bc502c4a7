//! `libcudnn`: convolutions, through the backend (graph) API of cuDNN 9.
//!
//! Everything is a descriptor: it is created with a type, given attributes, and finalized. An attribute's
//! type is that of its elements.

use std::ffi::{c_int, c_void};

use super::driver::CUstream;
use super::{functions, handles};

/// What a call answers; zero is success.
pub type CudnnStatus = c_int;

handles! {
    /// The library's state on a device.
    CudnnHandle;
    /// A descriptor of any type.
    Descriptor;
}

/// `cudnnBackendDescriptorType_t`.
pub mod descriptor {
    /// How a window moves over an image.
    pub const CONVOLUTION: i32 = 1;
    /// A way to compute an operation graph.
    pub const ENGINE: i32 = 2;
    /// An engine with its settings.
    pub const ENGINE_CONFIGURATION: i32 = 3;
    /// A query for engine configurations.
    pub const HEURISTICS: i32 = 4;
    /// An engine configuration that is ready to run.
    pub const EXECUTION_PLAN: i32 = 5;
    /// A convolution.
    pub const CONVOLUTION_FORWARD: i32 = 10;
    /// The gradient of a convolution's weight.
    pub const CONVOLUTION_BACKWARD_FILTER: i32 = 11;
    /// The gradient of a convolution's input.
    pub const CONVOLUTION_BACKWARD_DATA: i32 = 12;
    /// Operations that are computed together.
    pub const OPERATION_GRAPH: i32 = 15;
    /// Where the tensors of a call are.
    pub const VARIANT_PACK: i32 = 16;
    /// How a tensor lies in memory.
    pub const TENSOR: i32 = 17;
}

/// `cudnnBackendAttributeType_t`.
pub mod attribute_type {
    /// A [`super::CudnnHandle`].
    pub const HANDLE: i32 = 0;
    /// A [`super::data_type`].
    pub const DATA_TYPE: i32 = 1;
    /// `i64`.
    pub const INT64: i32 = 3;
    /// `f32`.
    pub const FLOAT: i32 = 4;
    /// An address.
    pub const POINTER: i32 = 6;
    /// `i32`: whether the window is mirrored.
    pub const CONVOLUTION_MODE: i32 = 7;
    /// A [`super::heuristics_mode`].
    pub const HEURISTICS_MODE: i32 = 8;
    /// A [`super::numerical_note`].
    pub const NUMERICAL_NOTE: i32 = 11;
    /// A [`super::Descriptor`].
    pub const DESCRIPTOR: i32 = 15;
    /// A [`super::behavior_note`].
    pub const BEHAVIOR_NOTE: i32 = 19;
    /// A byte of a text.
    pub const CHAR: i32 = 24;
}

/// `cudnnBackendAttributeName_t`.
pub mod attribute {
    /// Of a convolution: the type of its sums.
    pub const CONVOLUTION_COMPUTE_TYPE: i32 = 100;
    /// Whether the window is mirrored.
    pub const CONVOLUTION_MODE: i32 = 101;
    /// Distance of the window's elements, for each spatial dimension.
    pub const CONVOLUTION_DILATIONS: i32 = 102;
    /// Steps of the window.
    pub const CONVOLUTION_STRIDES: i32 = 103;
    /// Zeros behind the image.
    pub const CONVOLUTION_POST_PADDINGS: i32 = 104;
    /// Zeros in front of the image.
    pub const CONVOLUTION_PRE_PADDINGS: i32 = 105;
    /// Number of spatial dimensions.
    pub const CONVOLUTION_SPATIAL_DIMENSIONS: i32 = 106;
    /// Of a query: how it is answered.
    pub const HEURISTICS_MODE: i32 = 200;
    /// What is to be computed.
    pub const HEURISTICS_OPERATION_GRAPH: i32 = 201;
    /// Engine configurations, best first.
    pub const HEURISTICS_RESULTS: i32 = 202;
    /// Of an engine configuration: its engine.
    pub const CONFIGURATION_ENGINE: i32 = 300;
    /// Of a plan: the library's state.
    pub const PLAN_HANDLE: i32 = 400;
    /// What it runs.
    pub const PLAN_CONFIGURATION: i32 = 401;
    /// Bytes of working memory.
    pub const PLAN_WORKSPACE_SIZE: i32 = 402;
    /// The plan as a text from which the same version of the library makes it again.
    pub const PLAN_JSON: i32 = 405;
    /// Of a convolution as an operation: factor of the result.
    pub const FORWARD_ALPHA: i32 = 700;
    /// Factor of what was in the result.
    pub const FORWARD_BETA: i32 = 701;
    /// The convolution.
    pub const FORWARD_CONVOLUTION: i32 = 702;
    /// The weight.
    pub const FORWARD_W: i32 = 703;
    /// The input.
    pub const FORWARD_X: i32 = 704;
    /// The result.
    pub const FORWARD_Y: i32 = 705;
    /// The same of the gradient of the input: factor of the result.
    pub const BACKWARD_DATA_ALPHA: i32 = 706;
    /// Factor of what was in the result.
    pub const BACKWARD_DATA_BETA: i32 = 707;
    /// The convolution.
    pub const BACKWARD_DATA_CONVOLUTION: i32 = 708;
    /// The weight.
    pub const BACKWARD_DATA_W: i32 = 709;
    /// The gradient of the input.
    pub const BACKWARD_DATA_DX: i32 = 710;
    /// The gradient of the result.
    pub const BACKWARD_DATA_DY: i32 = 711;
    /// The same of the gradient of the weight: factor of the result.
    pub const BACKWARD_FILTER_ALPHA: i32 = 712;
    /// Factor of what was in the result.
    pub const BACKWARD_FILTER_BETA: i32 = 713;
    /// The convolution.
    pub const BACKWARD_FILTER_CONVOLUTION: i32 = 714;
    /// The gradient of the weight.
    pub const BACKWARD_FILTER_DW: i32 = 715;
    /// The input.
    pub const BACKWARD_FILTER_X: i32 = 716;
    /// The gradient of the result.
    pub const BACKWARD_FILTER_DY: i32 = 717;
    /// Of an operation graph: the library's state.
    pub const GRAPH_HANDLE: i32 = 800;
    /// The operations.
    pub const GRAPH_OPERATIONS: i32 = 801;
    /// Of a tensor: what its address is a multiple of.
    pub const TENSOR_BYTE_ALIGNMENT: i32 = 900;
    /// Type of the elements.
    pub const TENSOR_DATA_TYPE: i32 = 901;
    /// Extents: images, channels, spatial dimensions.
    pub const TENSOR_DIMENSIONS: i32 = 902;
    /// Elements between neighbours.
    pub const TENSOR_STRIDES: i32 = 903;
    /// The name by which a variant pack gives its address.
    pub const TENSOR_UNIQUE_ID: i32 = 906;
    /// Of a variant pack: names of tensors.
    pub const PACK_UNIQUE_IDS: i32 = 1000;
    /// Their addresses.
    pub const PACK_DATA_POINTERS: i32 = 1001;
    /// Address of the working memory.
    pub const PACK_WORKSPACE: i32 = 1003;
    /// Of an engine: what is said of its results.
    pub const ENGINE_NUMERICAL_NOTES: i32 = 1303;
    /// What is said of its calls.
    pub const ENGINE_BEHAVIOR_NOTES: i32 = 1305;
}

/// `cudnnDataType_t`.
pub mod data_type {
    /// f32.
    pub const FLOAT: i32 = 0;
    /// f64.
    pub const DOUBLE: i32 = 1;
    /// f16.
    pub const HALF: i32 = 2;
    /// bf16.
    pub const BFLOAT16: i32 = 9;
}

/// `cudnnConvolutionMode_t`.
pub mod convolution_mode {
    /// The window is not mirrored.
    pub const CROSS_CORRELATION: i32 = 1;
}

/// `cudnnBackendHeurMode_t`.
pub mod heuristics_mode {
    /// Configurations that work for almost everything, if slowly.
    pub const FALLBACK: i32 = 2;
    /// A quick and good answer.
    pub const A: i32 = 3;
}

/// `cudnnBackendNumericalNote_t`.
pub mod numerical_note {
    /// Tensor cores: operands of f32 are rounded to 10 bits of fraction.
    pub const TENSOR_CORE: i32 = 0;
    /// Operands are rounded to a narrower type.
    pub const DOWN_CONVERT_INPUTS: i32 = 1;
    /// Sums are in a narrower type than asked for.
    pub const REDUCED_PRECISION_REDUCTION: i32 = 2;
    /// Fourier transforms.
    pub const FFT: i32 = 3;
    /// Two runs may have different bits.
    pub const NONDETERMINISTIC: i32 = 4;
    /// Winograd's algorithm.
    pub const WINOGRAD: i32 = 5;
    /// How many notes there are.
    pub const COUNT: usize = 10;
}

/// `cudnnBackendBehaviorNote_t`.
pub mod behavior_note {
    /// The kernel is compiled when the plan is made.
    pub const RUNTIME_COMPILATION: i32 = 0;
    /// How many notes there are.
    pub const COUNT: usize = 4;
}

functions! {
    /// cuDNN's functions.
    CudnnFunctions
    fn cudnnGetVersion() -> usize;
    fn cudnnCreate(handle: *mut CudnnHandle) -> CudnnStatus;
    fn cudnnDestroy(handle: CudnnHandle) -> CudnnStatus;
    fn cudnnSetStream(handle: CudnnHandle, stream: CUstream) -> CudnnStatus;
    fn cudnnBackendCreateDescriptor(kind: i32, descriptor: *mut Descriptor) -> CudnnStatus;
    fn cudnnBackendDestroyDescriptor(descriptor: Descriptor) -> CudnnStatus;
    fn cudnnBackendSetAttribute(
        descriptor: Descriptor, attribute: i32, kind: i32, count: i64, elements: *const c_void,
    ) -> CudnnStatus;
    fn cudnnBackendGetAttribute(
        descriptor: Descriptor, attribute: i32, kind: i32, wanted: i64, count: *mut i64, elements: *mut c_void,
    ) -> CudnnStatus;
    fn cudnnBackendFinalize(descriptor: Descriptor) -> CudnnStatus;
    fn cudnnBackendExecute(handle: CudnnHandle, plan: Descriptor, pack: Descriptor) -> CudnnStatus;
}
