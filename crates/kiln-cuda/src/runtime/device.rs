//! One device: its context, whether it is still there, and the pool of its memory.
//!
//! Every call of the driver goes through [`Device::check`], which distinguishes three kinds of failures.
//! Memory that is used up and arguments that are refused leave the device as it was. A fault of a kernel,
//! or of the hardware, makes the context unusable for good: the device keeps the first such answer, with
//! the name of the last launch, and [`Device::enter`], with which every operation begins, returns it from
//! then on.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use super::memory::Pool;
use super::stream::Stream;
use crate::error::{CudaError, Lost, MemorySizes, Result};
use crate::libraries::{DeviceDescription, Driver};
use crate::sys::driver::{CUcontext, CUdevice, CUresult, result};

/// A device that is in use. Cheap to clone; clones are one device. The device is given back with its last
/// clone, stream and storage.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    driver: Driver,
    description: DeviceDescription,
    context: Context,
    pool: Pool,
    lost: OnceLock<Arc<Lost>>,
    /// Name of the last launch.
    last: Mutex<Option<Arc<str>>>,
    /// Whether work on the device may wait for another process.
    shared: AtomicBool,
    /// Whether somebody is ending what runs on the device.
    ending: AtomicBool,
    /// Held by captures, and alone by who waits for the whole device: the driver invalidates all captures of
    /// a context that is waited for, whichever thread made them.
    captures: Arc<RwLock<()>>,
}

/// The [`Inner::captures`] of each device: its context is the process's, however often it is opened.
static CAPTURES: Mutex<BTreeMap<usize, Arc<RwLock<()>>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// How many captures are under way on this thread.
    static CAPTURING: Cell<usize> = const { Cell::new(0) };
}

/// A capture under way on this thread.
pub(super) struct Capturing<'a> {
    _held: RwLockReadGuard<'a, ()>,
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        CAPTURING.set(CAPTURING.get() - 1);
    }
}

/// The device's primary context, retained.
struct Context {
    driver: Driver,
    device: CUdevice,
    raw: CUcontext,
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once by `Device::open`, and this gives it back once.
        unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the context is given back after this, when the fields are dropped.
        unsafe { (self.driver.cuCtxSetCurrent)(self.context.raw) };
        self.pool.destroy(&self.driver);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Device(cuda:{}, {})",
            self.ordinal(),
            self.inner.description.name
        )
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Device {}

/// Whether a result means that the context can never be used again.
fn is_fatal(code: CUresult) -> bool {
    // ECC and NVLink errors, contained errors, launch faults (illegal address to launch failure), timeouts,
    // contexts that were destroyed, devices that fell off the bus, and errors that the driver itself does not
    // know.
    matches!(
        code,
        4 | 46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 999
    )
}

impl Device {
    /// Takes device `ordinal` into use, with a pool of memory of its own. The caller should open each
    /// device once and hand out clones, so that there is one pool a device.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`], [`CudaError::Driver`].
    pub fn open(driver: &Driver, ordinal: usize) -> Result<Self> {
        let description = driver.describe(ordinal)?;
        let doing = || format!("taking cuda:{ordinal} into use");
        let device = CUdevice::try_from(ordinal).unwrap_or(CUdevice::MAX);
        let mut raw = CUcontext::NULL;
        // SAFETY: the pointer is to a handle on this stack; `describe` has shown that the device is there.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut raw, device) };
        driver.check("cuDevicePrimaryCtxRetain", code, doing)?;
        let context = Context {
            driver: driver.clone(),
            device,
            raw,
        };
        // SAFETY: the context was just retained.
        let code = unsafe { (driver.cuCtxSetCurrent)(raw) };
        driver.check("cuCtxSetCurrent", code, doing)?;
        let pool = Pool::create(driver, device)?;
        let captures = CAPTURES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(ordinal)
            .or_default()
            .clone();
        Ok(Self {
            inner: Arc::new(Inner {
                driver: driver.clone(),
                description,
                context,
                pool,
                lost: OnceLock::new(),
                last: Mutex::new(None),
                shared: AtomicBool::new(false),
                ending: AtomicBool::new(false),
                captures,
            }),
        })
    }

    /// Number by which the driver knows the device.
    pub fn ordinal(&self) -> usize {
        self.inner.description.ordinal
    }

    /// What the device is.
    pub fn description(&self) -> &DeviceDescription {
        &self.inner.description
    }

    /// A new stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self)
    }

    /// A new stream whose kernels start before those of other streams.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn urgent_stream(&self) -> Result<Stream> {
        Stream::create_urgent(self)
    }

    /// How much memory the device has, how much is free, and how much the pool holds.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn memory(&self) -> Result<MemorySizes> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to integers on this stack.
        let code = unsafe { (self.driver().cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code, || "asking for free memory".into())?;
        let (pool, used) = self.pool().held(self)?;
        Ok(MemorySizes {
            total,
            free,
            pool,
            used,
        })
    }

    /// The most bytes of the pool that were in use at once since [`Self::reset_memory_peak`].
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn memory_peak(&self) -> Result<usize> {
        self.pool().peak(self)
    }

    /// Starts counting [`Self::memory_peak`] anew.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn reset_memory_peak(&self) -> Result<()> {
        self.pool().reset_peak(self)
    }

    /// Waits for everything that was queued on the device.
    ///
    /// # Errors
    /// [`CudaError::Driver`], and [`CudaError::Lost`] if something queued failed.
    pub fn synchronize(&self) -> Result<()> {
        self.enter()?;
        while self.inner.ending.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
            self.enter()?;
        }
        // A capture of this thread cannot end before this call does.
        let captures = &self.inner.captures;
        let _alone = (CAPTURING.get() == 0).then(|| captures.write().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: the context is current.
        let code = unsafe { (self.driver().cuCtxSynchronize)() };
        self.check("cuCtxSynchronize", code, || "waiting for the device".into())
    }

    /// Begins a capture on this thread: nobody waits for the whole device until it is over.
    pub(super) fn begin_capture(&self) -> Capturing<'_> {
        let captures = &self.inner.captures;
        let _held = captures.read().unwrap_or_else(PoisonError::into_inner);
        CAPTURING.set(CAPTURING.get() + 1);
        Capturing { _held }
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.inner.driver
    }

    pub(crate) fn context(&self) -> CUcontext {
        self.inner.context.raw
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    /// Makes the device the calling thread's own, if it is still there.
    pub(crate) fn enter(&self) -> Result<()> {
        if let Some(lost) = self.inner.lost.get() {
            return Err(CudaError::Lost(lost.clone()));
        }
        // SAFETY: the context is retained as long as `Inner` lives.
        let code = unsafe { (self.driver().cuCtxSetCurrent)(self.context()) };
        self.check("cuCtxSetCurrent", code, || "entering the device's context".into())
    }

    /// Says that work on the device may wait for other processes. Whoever waits for it from here on looks at
    /// it again and again, so that [`Device::call_off`] reaches him: no call of the driver's that waits can
    /// be ended.
    pub(crate) fn share(&self) {
        self.inner.shared.store(true, Ordering::Release);
    }

    /// Whether work on the device may wait for other processes.
    pub(super) fn is_shared(&self) -> bool {
        self.inner.shared.load(Ordering::Acquire)
    }

    /// Says whether somebody is ending what runs on the device: then nobody begins to wait for all of it in
    /// the driver.
    pub(crate) fn set_ending(&self, ending: bool) {
        self.inner.ending.store(ending, Ordering::Release);
    }

    /// Gives the device up: work that waits for other processes did not end after `call`, which was to end
    /// it. Whoever waits for a shared device gets the error, and so does every later call.
    pub(crate) fn call_off(&self, call: &'static str) {
        let _ = self.lose(call, result::NOT_READY);
    }

    /// Notes what is launched, for the error of a device that is lost.
    pub(crate) fn note_launch(&self, name: &Arc<str>) {
        let mut last = self
            .inner
            .last
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        *last = Some(name.clone());
    }

    /// Success, or an error; the fatal ones are kept.
    pub(crate) fn check(
        &self,
        call: &'static str,
        code: CUresult,
        doing: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == result::SUCCESS {
            return Ok(());
        }
        if !is_fatal(code) {
            return self.driver().check(call, code, doing);
        }
        Err(CudaError::Lost(self.lose(call, code)))
    }

    /// Notes that nothing on the device can be used again: `call` answered `code`.
    fn lose(&self, call: &'static str, code: CUresult) -> Arc<Lost> {
        let lost = self.inner.lost.get_or_init(|| {
            let last = self
                .inner
                .last
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            Arc::new(Lost {
                device: self.ordinal(),
                call,
                what: self.driver().answer(code),
                last: match &*last {
                    Some(name) => format!("the last launch was {name}"),
                    None => "nothing had been launched".into(),
                },
            })
        });
        kiln_log::error!("{lost}");
        lost.clone()
    }

    /// An error if `other` is another device.
    pub(crate) fn same_as(&self, other: &Self, action: &'static str) -> Result<()> {
        if self == other {
            return Ok(());
        }
        Err(CudaError::TwoDevices {
            action,
            one: self.ordinal(),
            other: other.ordinal(),
        })
    }
}
