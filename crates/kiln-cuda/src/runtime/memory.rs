//! The pool of a device's memory.
//!
//! Memory is allocated and freed in the order of a stream (`cuMemAllocFromPoolAsync`), so neither waits for
//! the device. Nor does an allocation on one stream wait for what another has queued, to take memory that is
//! freed behind that: the next batch would be uploaded after the step that reads the last one, not beside it.
//! The pool keeps freed memory (its release threshold is infinite) and returns it to the driver in one case:
//! an allocation failed. Then the runtime waits for the device, trims the pool and tries the allocation once
//! more before it returns an error with the sizes.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::device::Device;
use super::stream::Stream;
use crate::error::{CudaError, Result};
use crate::libraries::Driver;
use crate::sys::driver::{CUdevice, CUdeviceptr, CUmemPoolProps, CUmemoryPool, pool_attribute, result};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only kind of memory that pools have.
const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: u32 = 1;

pub(super) struct Pool {
    raw: CUmemoryPool,
}

impl Pool {
    /// A pool on `device`, whose context is current.
    pub(super) fn create(driver: &Driver, device: CUdevice) -> Result<Self> {
        let doing = || format!("making the pool of memory of cuda:{device}");
        let properties = CUmemPoolProps {
            alloc_type: ALLOCATION_PINNED,
            handle_types: 0,
            location_type: LOCATION_DEVICE,
            location_id: device,
            win32_security_attributes: ptr::null_mut(),
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut raw = CUmemoryPool::NULL;
        // SAFETY: both pointers are to values on this stack.
        let code = unsafe { (driver.cuMemPoolCreate)(&raw mut raw, &raw const properties) };
        driver.check("cuMemPoolCreate", code, doing)?;
        let pool = Self { raw };
        let attributes = [
            (pool_attribute::RELEASE_THRESHOLD, u64::MAX),
            (pool_attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0),
        ];
        for (attribute, mut value) in attributes {
            let value = (&raw mut value).cast::<c_void>();
            // SAFETY: the attribute is a `u64` or an `int`, which the driver finds in its low bytes.
            let code = unsafe { (driver.cuMemPoolSetAttribute)(raw, attribute, value) };
            if code != result::SUCCESS {
                pool.destroy(driver);
            }
            driver.check("cuMemPoolSetAttribute", code, doing)?;
        }
        Ok(pool)
    }

    /// Ends the pool. Its memory goes back to the driver once nothing of it is in use.
    pub(super) fn destroy(&self, driver: &Driver) {
        // SAFETY: called once, by the owner of the pool; storages keep the owner alive.
        unsafe { (driver.cuMemPoolDestroy)(self.raw) };
    }

    /// `bytes` bytes that may be used on `stream` from here on. `bytes` is not zero.
    pub(super) fn allocate(&self, stream: &Stream, bytes: usize) -> Result<CUdeviceptr> {
        let device = stream.device();
        device.enter()?;
        let doing = || format!("allocating {bytes} bytes");
        let mut address = 0;
        // SAFETY: the pointer is to an address on this stack; pool and stream are of one device.
        let mut attempt = || unsafe {
            (device.driver().cuMemAllocFromPoolAsync)(&raw mut address, bytes, self.raw, stream.raw())
        };
        let mut code = attempt();
        if code == result::OUT_OF_MEMORY {
            device.synchronize()?;
            self.trim(device)?;
            code = attempt();
        }
        if code == result::OUT_OF_MEMORY {
            // A failed attempt leaves memory in the pool: the sizes are those without it.
            self.trim(device)?;
            return Err(CudaError::OutOfMemory {
                device: device.ordinal(),
                asked: bytes,
                sizes: device.memory()?,
            });
        }
        device.check("cuMemAllocFromPoolAsync", code, doing)?;
        Ok(address)
    }

    /// Returns unused memory to the driver.
    fn trim(&self, device: &Device) -> Result<()> {
        device.enter()?;
        // SAFETY: trimming takes only what is not in use.
        let code = unsafe { (device.driver().cuMemPoolTrimTo)(self.raw, 0) };
        device.check("cuMemPoolTrimTo", code, || "trimming the pool of memory".into())
    }

    /// Bytes that the pool holds, and bytes of it in use.
    pub(super) fn held(&self, device: &Device) -> Result<(usize, usize)> {
        Ok((
            self.attribute(device, pool_attribute::RESERVED_MEM_CURRENT)?,
            self.attribute(device, pool_attribute::USED_MEM_CURRENT)?,
        ))
    }

    pub(super) fn peak(&self, device: &Device) -> Result<usize> {
        self.attribute(device, pool_attribute::USED_MEM_HIGH)
    }

    pub(super) fn reset_peak(&self, device: &Device) -> Result<()> {
        device.enter()?;
        let mut zero = 0_u64;
        let value = (&raw mut zero).cast::<c_void>();
        // SAFETY: the attribute is a `u64`, to which `value` points.
        let code = unsafe {
            (device.driver().cuMemPoolSetAttribute)(self.raw, pool_attribute::USED_MEM_HIGH, value)
        };
        device.check("cuMemPoolSetAttribute", code, || {
            "resetting the memory peak".into()
        })
    }

    fn attribute(&self, device: &Device, attribute: c_int) -> Result<usize> {
        device.enter()?;
        let mut bytes = 0_u64;
        let value = (&raw mut bytes).cast::<c_void>();
        // SAFETY: every attribute asked for here is a `u64`, to which `value` points.
        let code = unsafe { (device.driver().cuMemPoolGetAttribute)(self.raw, attribute, value) };
        device.check("cuMemPoolGetAttribute", code, || {
            "asking for the pool's sizes".into()
        })?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }
}
