//! For tests (feature `testing`): a target without a machine.
//!
//! [`Stub`] "emits" a list of kernels with the places of their buffers, and [`Program`] interprets it:
//! kernel by kernel, in an arena of bytes at the planned offsets, with kiln-graph's interpreter for the
//! operations of each kernel. So tests run the compiler's decisions without any code generator: what a
//! kernel reads and writes, where every buffer lives, which memory is handed on, which outputs take over
//! which arguments.

mod policy;
mod program;
mod stub;

pub use policy::POLICY;
pub use program::{Program, Stopped};
pub use stub::Stub;
