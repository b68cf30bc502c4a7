//! The C interface of a compiled step, in Rust.
//!
//! `kiln_runtime.h` is the authority; the structures here mirror it field by field. A generated source tree
//! includes that header (`#include "kiln_runtime.h"`; the build writes the file beside the sources) and
//! defines two symbols: the entry `kiln_step` and the constant `kiln_step_signature`, which says how many
//! arguments the entry expects, so that a caller's mistake is an error and not a wild read.

use std::ffi::{c_int, c_void};

/// Name of the header in a generated source tree.
pub const RUNTIME_HEADER_NAME: &str = "kiln_runtime.h";

/// Text of the header that every generated source includes.
pub const RUNTIME_HEADER: &str = include_str!("kiln_runtime.h");

/// Version of the contract; part of every cache key and of every step's signature.
pub const ABI_VERSION: u64 = 1;

/// One piece of a parallel loop: `(ctx, begin, end, thread)`.
pub type Task = unsafe extern "C" fn(*mut c_void, i64, i64, c_int);

/// `kiln_runtime` of the header.
#[repr(C)]
pub(crate) struct RawRuntime {
    pub pool: *mut c_void,
    pub parallel_for: unsafe extern "C" fn(*mut c_void, i64, i64, Task, *mut c_void),
    pub threads: c_int,
    pub kernel_event: Option<unsafe extern "C" fn(*mut c_void, c_int, c_int)>,
    pub call_extern: unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void) -> c_int,
}

/// `kiln_step` of the header.
pub(crate) type RawStep = unsafe extern "C" fn(
    *const RawRuntime,
    *const *mut c_void,
    *const *mut c_void,
    *mut c_void,
    *const u64,
) -> c_int;

/// What a compiled step expects of its caller (`kiln_signature` of the header).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    abi: u64,
    /// Number of input buffers.
    pub inputs: u64,
    /// Number of output buffers.
    pub outputs: u64,
    /// Number of 8-byte scalar arguments.
    pub scalars: u64,
    /// Size of the arena in bytes.
    pub arena_bytes: u64,
}

impl Signature {
    /// The signature of a step with this many inputs, outputs and scalars and an arena of `arena_bytes`.
    pub fn new(inputs: usize, outputs: usize, scalars: usize, arena_bytes: usize) -> Self {
        Self {
            abi: ABI_VERSION,
            inputs: inputs as u64,
            outputs: outputs as u64,
            scalars: scalars as u64,
            arena_bytes: arena_bytes as u64,
        }
    }

    /// Version of the contract the step was built for.
    pub fn abi(&self) -> u64 {
        self.abi
    }

    /// The C definition of `kiln_step_signature`; exactly one source of a tree contains it.
    pub fn to_c(&self) -> String {
        format!(
            "const kiln_signature kiln_step_signature = {{\n    .abi = KILN_ABI, .inputs = {}, .outputs = {}, .scalars \
             = {}, .arena_bytes = {}}};\n",
            self.inputs, self.outputs, self.scalars, self.arena_bytes
        )
    }
}
