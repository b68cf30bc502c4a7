//! What can go wrong between a library that is not there and a device that is gone.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::libraries::{Library, Looked};

/// An error of the CUDA runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library is not on this machine, or cannot be opened.
    #[error("{} was not found; {}\n{}", library.name(), library.remedy(), looked)]
    MissingLibrary {
        /// Which.
        library: Library,
        /// Everything that was tried, in order.
        looked: Looked,
    },

    /// A library is there, but too old: it has not a function that Kiln calls.
    #[error("{} has no function {function}: Kiln needs {}", path.display(), library.oldest())]
    OldLibrary {
        /// Which.
        library: Library,
        /// Where it was found.
        path: PathBuf,
        /// The function.
        function: &'static str,
    },

    /// The machine has fewer devices, or none.
    #[error("there is no device cuda:{asked}: the driver sees {present} (`kiln backends` lists them)")]
    NoDevice {
        /// Ordinal that was asked for.
        asked: usize,
        /// How many there are.
        present: usize,
    },

    /// A call of the driver failed. The device can be used as before.
    #[error("{call} failed while {doing}: {what}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// What Kiln was doing: `loading module m`.
        doing: String,
        /// The driver's answer.
        what: Answer,
    },

    /// Memory of the device is used up. Nothing was changed.
    #[error(
        "cuda:{device} has not {asked} bytes of memory left: {sizes}; set a smaller memory budget or batch"
    )]
    OutOfMemory {
        /// Ordinal of the device.
        device: usize,
        /// Bytes that were asked for.
        asked: usize,
        /// Who has the rest.
        sizes: MemorySizes,
    },

    /// Pinned memory of the host is used up.
    #[error("the host has not {asked} bytes of memory left that cuda:{device} could copy from")]
    OutOfPinnedMemory {
        /// Ordinal of the device.
        device: usize,
        /// Bytes that were asked for.
        asked: usize,
    },

    /// A kernel failed or the device was lost. Nothing on this device can be used again in this process.
    #[error("{0}")]
    Lost(Arc<Lost>),

    /// Generated CUDA C++ does not compile.
    #[error("NVRTC rejects the source `{name}` for {architecture}:\n{excerpt}")]
    Compile {
        /// Name of the source.
        name: String,
        /// The architecture it was compiled for, such as `sm_90a`.
        architecture: String,
        /// Each message of the log with the line of the source that it names.
        excerpt: String,
        /// The whole log.
        log: String,
    },

    /// NVRTC failed, for another reason than the source.
    #[error("{call} failed while compiling `{name}`: {what}")]
    Nvrtc {
        /// The function.
        call: &'static str,
        /// Name of the source.
        name: String,
        /// NVRTC's answer.
        what: String,
    },

    /// NVRTC does not know the device's architecture.
    #[error(
        "NVRTC {version} compiles for nothing that runs on compute capability {capability}: install a newer \
         one"
    )]
    UnknownArchitecture {
        /// NVRTC's version.
        version: String,
        /// The device's compute capability.
        capability: String,
    },

    /// A launch does not fit its kernel.
    #[error("kernel `{kernel}` cannot be launched: {reason}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What does not fit.
        reason: String,
    },

    /// A range lies outside its memory.
    #[error("{action}: bytes {start}..{end} are not all inside the {size} bytes there")]
    Range {
        /// What was about to happen.
        action: &'static str,
        /// First byte.
        start: usize,
        /// Past the last byte.
        end: usize,
        /// Bytes of the memory.
        size: usize,
    },

    /// A stream that is being captured was given what a graph cannot hold.
    #[error("{action} cannot be captured into a graph: do it before, or on another stream")]
    Captured {
        /// What was about to happen.
        action: &'static str,
    },

    /// A library's call could not be captured, and its graph has perhaps a part of it.
    #[error("graph `{graph}` is incomplete since a call could not be captured into it: build it anew")]
    IncompleteGraph {
        /// The graph.
        graph: String,
    },

    /// Memory of one device met a stream or memory of another.
    #[error("{action}: cuda:{one} and cuda:{other} cannot take part in one operation")]
    TwoDevices {
        /// What was about to happen.
        action: &'static str,
        /// Ordinal of one device.
        one: usize,
        /// Ordinal of the other.
        other: usize,
    },

    /// cuBLASLt has no way, or failed, to compute a product.
    #[error("cuBLASLt cannot compute {product}: {call} answered {what}")]
    Product {
        /// The product.
        product: String,
        /// The function.
        call: &'static str,
        /// The library's answer.
        what: String,
    },

    /// cuDNN has no way, or failed, to compute a convolution.
    #[error("cuDNN cannot compute {convolution}: {call} answered {what}")]
    Convolution {
        /// The convolution.
        convolution: String,
        /// The function, or what was being done.
        call: &'static str,
        /// The library's answer.
        what: String,
    },

    /// Pictures could not be decoded on the device.
    #[error("pictures cannot be decoded on the GPU: {what}")]
    Pictures {
        /// Why.
        what: String,
    },

    /// A collective of all ranks failed, or other ranks did not take part.
    #[error(transparent)]
    Ranks(#[from] kiln_distributed::Error),

    /// A step is one of several ranks, and its device is not connected with theirs.
    #[error("the step is one of {needed} ranks, and cuda:{device} is connected with {connected}")]
    NotConnected {
        /// Ordinal of the device.
        device: usize,
        /// Ranks of the step.
        needed: usize,
        /// Ranks that the device is connected with, itself included.
        connected: usize,
    },

    /// A file could not be read or written.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb: `writing`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
}

/// What the driver says of a failed call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({name}, {code})")]
pub struct Answer {
    /// The number.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: String,
    /// What it means, in the driver's words.
    pub text: String,
}

/// Who has a device's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "of {total} bytes {free} are free, Kiln's pool holds {pool} ({used} of them in use), the rest belongs to \
     others"
)]
pub struct MemorySizes {
    /// Of the device.
    pub total: usize,
    /// Not held by anybody.
    pub free: usize,
    /// Held by the pool.
    pub pool: usize,
    /// Held by the pool and in use.
    pub used: usize,
}

/// How a device was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "cuda:{device} is gone: {call} reported {what}; {last}. Nothing on this device can be used again in this \
     process: start it anew from the last checkpoint"
)]
pub struct Lost {
    /// Ordinal of the device.
    pub device: usize,
    /// The call that reported it.
    pub call: &'static str,
    /// The driver's answer.
    pub what: Answer,
    /// What was launched last, in words.
    pub last: String,
}

/// Result of the CUDA runtime.
pub type Result<T> = std::result::Result<T, CudaError>;
