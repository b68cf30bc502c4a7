//! Runs generated convolutions and pools on the host and compares them with the interpreter: odd shapes,
//! strides, dilations, groups and paddings, in one to three dimensions, of every type, with channels first
//! or last. Where NVRTC is installed it compiles the same kernels.

#[path = "../common/mod.rs"]
mod common;

mod bands;
mod compare;
mod convolution;
mod giants;
mod kinds;
mod library;
mod machine_code;
mod pools;
mod tensor_cores;
