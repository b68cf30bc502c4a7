//! The driver's library, and the devices that it sees.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;

use super::{Library, Opened, Search, open};
use crate::error::{Answer, CudaError, Result};
use crate::sys::driver::{CUresult, DriverFunctions, device_attribute, result};

/// The driver's library, initialised. Cheap to clone.
#[derive(Clone)]
pub struct Driver(Arc<Opened<DriverFunctions>>);

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({}, {})", self.0.version, self.0.path.display())
    }
}

impl Deref for Driver {
    type Target = DriverFunctions;

    fn deref(&self) -> &DriverFunctions {
        &self.0.functions
    }
}

/// A device, described without touching it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Number by which the driver knows the device.
    pub ordinal: usize,
    /// Its name: `NVIDIA H200`.
    pub name: String,
    /// Its compute capability, two numbers: 9 and 0.
    pub capability: (u32, u32),
    /// Bytes of memory.
    pub memory: usize,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: u32,
    /// Bytes of shared memory that one block may have.
    pub shared_bytes: u32,
    /// Threads that one block may have.
    pub block_threads: u32,
}

impl Driver {
    /// Finds, opens and initialises the driver.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`], and [`CudaError::Driver`] when the driver
    /// does not start: there is no device, or its kernel module has another version.
    pub fn open(search: &Search) -> Result<Self> {
        // SAFETY: `open` passes the library that was looked up as the driver's and never closes it.
        let load = |library: &_| unsafe { DriverFunctions::load(library) };
        let opened = open(search, Library::Driver, load, |functions| {
            let mut version = 0;
            // SAFETY: the pointer is to an integer on this stack.
            unsafe { (functions.cuDriverGetVersion)(&raw mut version) };
            format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
        })?;
        Self::start(opened)
    }

    /// Initialises a driver whose functions are at hand.
    pub(crate) fn start(opened: Opened<DriverFunctions>) -> Result<Self> {
        let driver = Self(Arc::new(opened));
        // SAFETY: a plain call with a flag of zero.
        let code = unsafe { (driver.cuInit)(0) };
        driver.check("cuInit", code, || "starting the driver".into())?;
        Ok(driver)
    }

    /// The version of CUDA that the driver serves: `CUDA 13.0`.
    pub fn version(&self) -> &str {
        &self.0.version
    }

    /// The driver's file.
    pub fn path(&self) -> &std::path::Path {
        &self.0.path
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the pointer is to an integer on this stack.
        let code = unsafe { (self.cuDeviceGetCount)(&raw mut count) };
        self.check("cuDeviceGetCount", code, || "counting devices".into())?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Describes device `ordinal`.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`], [`CudaError::Driver`].
    pub fn describe(&self, ordinal: usize) -> Result<DeviceDescription> {
        let present = self.device_count()?;
        let doing = || format!("describing cuda:{ordinal}");
        if ordinal >= present {
            return Err(CudaError::NoDevice {
                asked: ordinal,
                present,
            });
        }
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device = 0;
        // SAFETY: the pointer is to an integer on this stack.
        let code = unsafe { (self.cuDeviceGet)(&raw mut device, number) };
        self.check("cuDeviceGet", code, doing)?;
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the driver writes at most 256 characters, the last of them zero.
        let code = unsafe { (self.cuDeviceGetName)(name.as_mut_ptr(), 256, device) };
        self.check("cuDeviceGetName", code, doing)?;
        // SAFETY: the driver ends the name with a zero inside the array.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned();
        let mut memory = 0;
        // SAFETY: the pointer is to an integer on this stack.
        let code = unsafe { (self.cuDeviceTotalMem_v2)(&raw mut memory, device) };
        self.check("cuDeviceTotalMem", code, doing)?;
        let attribute = |attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: the pointer is to an integer on this stack.
            let code = unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
            self.check("cuDeviceGetAttribute", code, doing)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(DeviceDescription {
            ordinal,
            name,
            capability: (
                attribute(device_attribute::COMPUTE_CAPABILITY_MAJOR)?,
                attribute(device_attribute::COMPUTE_CAPABILITY_MINOR)?,
            ),
            memory,
            multiprocessors: attribute(device_attribute::MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(device_attribute::L2_CACHE_SIZE)?,
            shared_bytes: attribute(device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            block_threads: attribute(device_attribute::MAX_THREADS_PER_BLOCK)?,
        })
    }

    /// The driver's words for a result.
    pub(crate) fn answer(&self, code: CUresult) -> Answer {
        let say = |function: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult| {
            let mut text = ptr::null();
            // SAFETY: the driver points `text` at a constant text, or leaves it null for a code it does not
            // know.
            let known = unsafe { function(code, &raw mut text) } == result::SUCCESS && !text.is_null();
            // SAFETY: as above.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        Answer {
            code,
            name: say(self.cuGetErrorName).unwrap_or_else(|| "unknown".into()),
            text: say(self.cuGetErrorString)
                .unwrap_or_else(|| "an error that the driver has no words for".into()),
        }
    }

    /// Success, or an error with what was being done.
    pub(crate) fn check(
        &self,
        call: &'static str,
        code: CUresult,
        doing: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == result::SUCCESS {
            return Ok(());
        }
        Err(CudaError::Driver {
            call,
            doing: doing(),
            what: self.answer(code),
        })
    }
}
