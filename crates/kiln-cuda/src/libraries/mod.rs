//! NVIDIA's libraries, found and opened at run time.
//!
//! Kiln links none of them, so that one binary runs on machines with and without a GPU. [`Search`] says where
//! they are looked for and [`Opened`] is one that was found, with its functions, path and version. A library
//! is never closed again: its threads and its functions' addresses live as long as the process.

mod driver;
mod report;
mod search;

use std::path::PathBuf;

pub use driver::{DeviceDescription, Driver};
pub use report::Report;
pub use search::{Looked, Search};

use crate::error::{CudaError, Result};
use crate::sys::cublaslt::CublasLtFunctions;
use crate::sys::cudnn::CudnnFunctions;
use crate::sys::nvjpeg::{NvjpegFunctions, VERSION_PARTS};
use crate::sys::nvrtc::NvrtcFunctions;
use kiln_distributed::nccl::{self, NcclFunctions};

/// A library that Kiln uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Library {
    /// `libcuda`, a part of the driver.
    Driver,
    /// `libnvrtc`, which compiles kernels.
    Nvrtc,
    /// `libcublasLt`, which multiplies matrices.
    CublasLt,
    /// `libcudnn`, for convolutions. Optional.
    Cudnn,
    /// `libnccl`, for training on several GPUs. Optional.
    Nccl,
    /// `libnvjpeg`, which decodes pictures. Optional.
    Nvjpeg,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Driver,
        Self::Nvrtc,
        Self::CublasLt,
        Self::Cudnn,
        Self::Nccl,
        Self::Nvjpeg,
    ];

    /// The name without suffix or version: `libnvrtc`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda",
            Self::Nvrtc => "libnvrtc",
            Self::CublasLt => "libcublasLt",
            Self::Cudnn => "libcudnn",
            Self::Nccl => "libnccl",
            Self::Nvjpeg => "libnvjpeg",
        }
    }

    /// File names, best first. A toolkit of CUDA 12 does as well as one of 13.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Self::Cudnn => &["libcudnn.so.9", "libcudnn.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
            Self::Nvjpeg => &["libnvjpeg.so.13", "libnvjpeg.so.12", "libnvjpeg.so"],
        }
    }

    /// What to do where it is missing.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver",
            Self::Nvrtc => "`pip install nvidia-cuda-nvrtc`, or install CUDA's toolkit and set CUDA_HOME",
            Self::CublasLt => "`pip install nvidia-cublas`, or install CUDA's toolkit and set CUDA_HOME",
            Self::Cudnn => "`pip install nvidia-cudnn-cu13`; without it convolutions use Kiln's own kernels",
            Self::Nccl => "`pip install nvidia-nccl-cu13`; without it a GPU trains alone",
            Self::Nvjpeg => "`pip install nvidia-nvjpeg`; without it images are decoded on the host",
        }
    }

    /// The oldest version that has all functions that Kiln calls.
    pub fn oldest(self) -> &'static str {
        match self {
            Self::Driver => "driver 550 (CUDA 12.4) or later",
            Self::Nvrtc => "NVRTC of CUDA 12.0 or later",
            Self::CublasLt => "cuBLASLt of CUDA 12.0 or later",
            Self::Cudnn => "cuDNN 9 or later",
            Self::Nccl => "NCCL 2.18 or later",
            Self::Nvjpeg => "nvJPEG of CUDA 12.0 or later",
        }
    }
}

/// A library that was opened.
#[derive(Debug, Clone)]
pub struct Opened<F> {
    /// Its functions.
    pub functions: F,
    /// Its file.
    pub path: PathBuf,
    /// Its version, in the form that the library's maker writes it.
    pub version: String,
}

/// NVRTC.
pub type Nvrtc = Opened<NvrtcFunctions>;
/// cuBLASLt.
pub type CublasLt = Opened<CublasLtFunctions>;
/// cuDNN.
pub type Cudnn = Opened<CudnnFunctions>;
/// nvJPEG.
pub type Nvjpeg = Opened<NvjpegFunctions>;

/// Finds and opens NCCL.
///
/// # Errors
/// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`], [`CudaError::Ranks`] if it is too old.
pub fn open_nccl(search: &Search) -> Result<nccl::Nccl> {
    // SAFETY: `open` passes the library that was looked up as NCCL and never closes it.
    let load = |library: &_| unsafe { NcclFunctions::load(library) };
    let version = |functions: &NcclFunctions| nccl::dotted(functions.version());
    let opened = open(search, Library::Nccl, load, version)?;
    Ok(nccl::Nccl::new(opened.functions, &opened.path)?)
}

/// Opens `library`, fills its table with `load`, and asks it for its version.
fn open<F>(
    search: &Search,
    library: Library,
    load: impl FnOnce(&libloading::Library) -> std::result::Result<F, &'static str>,
    version: impl FnOnce(&F) -> String,
) -> Result<Opened<F>> {
    let (handle, path) = search.find(library)?;
    let functions = load(&handle).map_err(|function| CudaError::OldLibrary {
        library,
        path: path.clone(),
        function,
    })?;
    // The table points into the library, which therefore stays open for the rest of the process.
    std::mem::forget(handle);
    let version = version(&functions);
    Ok(Opened {
        functions,
        path,
        version,
    })
}

impl Nvrtc {
    /// Finds and opens NVRTC.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`].
    pub fn open(search: &Search) -> Result<Self> {
        // SAFETY: `open` passes the library that was looked up as NVRTC and never closes it.
        let load = |library: &_| unsafe { NvrtcFunctions::load(library) };
        let opened = open(search, Library::Nvrtc, load, |functions| {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: both pointers are to integers on this stack.
            unsafe { (functions.nvrtcVersion)(&raw mut major, &raw mut minor) };
            format!("{major}.{minor}")
        })?;
        open_builtins(&opened);
        Ok(opened)
    }
}

/// Opens `libnvrtc-builtins` beside NVRTC. NVRTC asks the dynamic linker for it by name; the linker does
/// not look into the folder of a wheel, but finds a library that is already open.
fn open_builtins(nvrtc: &Nvrtc) {
    let file = format!("libnvrtc-builtins.so.{}", nvrtc.version);
    let path = nvrtc.path.with_file_name(file);
    // SAFETY: the constructors of this library set up the library itself.
    match unsafe { libloading::Library::new(&path) } {
        Ok(handle) => std::mem::forget(handle),
        // Then NVRTC finds the library by itself, or says when it compiles that it does not.
        Err(error) => tracing::debug!("{error}"),
    }
}

impl CublasLt {
    /// Finds and opens cuBLASLt.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`].
    pub fn open(search: &Search) -> Result<Self> {
        // SAFETY: `open` passes the library that was looked up as cuBLASLt and never closes it.
        let load = |library: &_| unsafe { CublasLtFunctions::load(library) };
        open(search, Library::CublasLt, load, |functions| {
            // SAFETY: the function takes nothing.
            dotted(unsafe { (functions.cublasLtGetVersion)() }, 10_000)
        })
    }
}

impl Cudnn {
    /// Finds and opens cuDNN.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`].
    pub fn open(search: &Search) -> Result<Self> {
        // SAFETY: `open` passes the library that was looked up as cuDNN and never closes it.
        let load = |library: &_| unsafe { CudnnFunctions::load(library) };
        open(search, Library::Cudnn, load, |functions| {
            // SAFETY: the function takes nothing.
            dotted(unsafe { (functions.cudnnGetVersion)() }, 10_000)
        })
    }
}

impl Nvjpeg {
    /// Finds and opens nvJPEG.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`].
    pub fn open(search: &Search) -> Result<Self> {
        // SAFETY: `open` passes the library that was looked up as nvJPEG and never closes it.
        let load = |library: &_| unsafe { NvjpegFunctions::load(library) };
        open(search, Library::Nvjpeg, load, |functions| {
            let parts = VERSION_PARTS.map(|part| {
                let mut value = 0;
                // SAFETY: the pointer is to an integer on this stack.
                unsafe { (functions.nvjpegGetProperty)(part, &raw mut value) };
                value.to_string()
            });
            parts.join(".")
        })
    }
}

/// 130002 as 13.0.2: `unit` separates the first number from the second, and 100 the second from the third.
fn dotted(version: usize, unit: usize) -> String {
    format!("{}.{}.{}", version / unit, version % unit / 100, version % 100)
}

#[cfg(test)]
mod tests {
    #[test]
    fn versions_are_written_as_their_makers_write_them() {
        assert_eq!(super::dotted(130_002, 10_000), "13.0.2");
        assert_eq!(super::dotted(91_900, 10_000), "9.19.0");
    }
}
