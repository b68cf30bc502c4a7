//! Machine code on a device: modules, their kernels, and how one is launched.
//!
//! A launch is checked before it reaches the driver: the extents against the kernel and the device, the
//! arguments against the sizes of the kernel's parameters, which the driver knows from the machine code. What
//! remains for the caller is what the kernel does with its arguments, which is why launching is `unsafe`.

use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::device::Device;
use super::storage::Storage;
use super::stream::Stream;
use crate::code::{Boxes, Copied, Windows};
use crate::error::{CudaError, Result};
use crate::products::Number;
use crate::sys::driver::{CUfunction, CUmodule, TensorMap, function_attribute, result, tensor_map};

/// Bytes of dynamic shared memory that a launch may have without asking for more.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// Loaded machine code. Cheap to clone. Unloaded with its last clone and kernel, after everything queued on
/// the device.
#[derive(Clone)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

struct ModuleInner {
    device: Device,
    raw: CUmodule,
    name: String,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Module({} on cuda:{})",
            self.inner.name,
            self.inner.device.ordinal()
        )
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            // SAFETY: loaded by `Module::load`, unloaded here once, when nothing queued runs any of its
            // kernels.
            unsafe { (self.device.driver().cuModuleUnload)(self.raw) };
        }
    }
}

/// The registers and memory that a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelUse {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes a thread in local memory: arrays and registers that did not fit. Zero in a kernel that is well
    /// built.
    pub local_bytes: u32,
    /// Bytes of shared memory a block, without those that a launch adds.
    pub shared_bytes: u32,
    /// Threads that a block may have.
    pub block_threads: u32,
}

/// A kernel. Cheap to clone.
#[derive(Clone)]
pub struct Kernel {
    inner: Arc<KernelInner>,
}

struct KernelInner {
    module: Module,
    raw: CUfunction,
    name: Arc<str>,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
    usage: KernelUse,
    /// Dynamic shared memory that launches may have at present.
    shared_limit: AtomicU32,
    raising: Mutex<()>,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({})", self.inner.name)
    }
}

impl Module {
    /// Loads machine code (a cubin) onto a device. `name` is for messages.
    ///
    /// # Errors
    /// [`CudaError::Driver`] where the code is for another architecture or damaged, [`CudaError::Lost`].
    pub fn load(device: &Device, name: &str, cubin: &[u8]) -> Result<Self> {
        device.enter()?;
        let mut raw = CUmodule::NULL;
        // The driver takes the length from the header of the image, and reads words.
        let mut image = vec![0_u64; cubin.len().div_ceil(8) + 1];
        for (word, bytes) in image.iter_mut().zip(cubin.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        // SAFETY: the image is complete, aligned, and ends with zeros; the driver copies what it keeps.
        let code = unsafe { (device.driver().cuModuleLoadData)(&raw mut raw, image.as_ptr().cast()) };
        device.check("cuModuleLoadData", code, || format!("loading module `{name}`"))?;
        Ok(Self {
            inner: Arc::new(ModuleInner {
                device: device.clone(),
                raw,
                name: name.to_owned(),
            }),
        })
    }

    /// The kernel called `name` (declared `extern "C"`).
    ///
    /// # Errors
    /// [`CudaError::Launch`] if the module has none, [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let device = &self.inner.device;
        device.enter()?;
        let missing = |reason: String| CudaError::Launch {
            kernel: name.to_owned(),
            reason,
        };
        let symbol = CString::new(name).map_err(|_| missing("its name has a zero in it".into()))?;
        let mut raw = CUfunction::NULL;
        // SAFETY: module and name are alive; the pointer is to a handle on this stack.
        let code =
            unsafe { (device.driver().cuModuleGetFunction)(&raw mut raw, self.inner.raw, symbol.as_ptr()) };
        device
            .check("cuModuleGetFunction", code, String::new)
            .map_err(|error| match error {
                CudaError::Driver { what, .. } => missing(format!("module `{}`: {what}", self.inner.name)),
                other => other,
            })?;
        let attribute = |attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the pointer is to an integer on this stack.
            let code = unsafe { (device.driver().cuFuncGetAttribute)(&raw mut value, attribute, raw) };
            device.check("cuFuncGetAttribute", code, || {
                format!("describing kernel `{name}`")
            })?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let usage = KernelUse {
            registers: attribute(function_attribute::NUM_REGS)?,
            local_bytes: attribute(function_attribute::LOCAL_SIZE_BYTES)?,
            shared_bytes: attribute(function_attribute::SHARED_SIZE_BYTES)?,
            block_threads: attribute(function_attribute::MAX_THREADS_PER_BLOCK)?,
        };
        Ok(Kernel {
            inner: Arc::new(KernelInner {
                module: self.clone(),
                raw,
                name: name.into(),
                parameters: parameters(device, raw, name)?,
                usage,
                shared_limit: AtomicU32::new(SHARED_WITHOUT_ASKING.saturating_sub(usage.shared_bytes)),
                raising: Mutex::new(()),
            }),
        })
    }
}

/// Sizes of a kernel's parameters, in order.
fn parameters(device: &Device, raw: CUfunction, name: &str) -> Result<Vec<usize>> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: both pointers are to integers on this stack.
        let code = unsafe {
            (device.driver().cuFuncGetParamInfo)(raw, sizes.len(), &raw mut offset, &raw mut bytes)
        };
        if code == result::INVALID_VALUE {
            // Past the last parameter.
            return Ok(sizes);
        }
        device.check("cuFuncGetParamInfo", code, || {
            format!("describing kernel `{name}`")
        })?;
        sizes.push(bytes);
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The registers and memory that it takes.
    pub fn usage(&self) -> KernelUse {
        self.inner.usage
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.module.inner.device
    }

    pub(super) fn raw(&self) -> CUfunction {
        self.inner.raw
    }

    pub(super) fn shared_name(&self) -> &Arc<str> {
        &self.inner.name
    }

    /// Lets launches have `bytes` bytes of dynamic shared memory.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        if bytes <= self.inner.shared_limit.load(Ordering::Acquire) {
            return Ok(());
        }
        let _raising = self.inner.raising.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= self.inner.shared_limit.load(Ordering::Acquire) {
            return Ok(());
        }
        let device = self.device();
        let attribute = function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function lives as long as `self`.
        let code = unsafe { (device.driver().cuFuncSetAttribute)(self.inner.raw, attribute, value) };
        device.check("cuFuncSetAttribute", code, || {
            format!("giving kernel `{}` {bytes} bytes of shared memory", self.name())
        })?;
        self.inner.shared_limit.store(bytes, Ordering::Release);
        Ok(())
    }
}

/// The arguments of a launch, in the order of the kernel's parameters. Keeps the storages alive.
#[derive(Debug, Clone, Default)]
pub struct Arguments {
    bytes: Vec<u8>,
    /// Start and size of each argument in `bytes`.
    parts: Vec<(usize, usize)>,
    storages: Vec<Arc<Storage>>,
    moving: Vec<MovingPointer>,
}

/// A pointer whose memory is elsewhere at each launch of a graph.
#[derive(Debug, Clone, Copy)]
struct MovingPointer {
    /// The memory's number.
    memory: u32,
    /// Bytes in front of what is meant.
    offset: usize,
    /// Which argument it is.
    part: usize,
}

impl Arguments {
    /// No arguments.
    pub fn new() -> Self {
        Self::default()
    }

    /// A pointer to byte `offset` of a storage.
    #[must_use]
    pub fn memory(mut self, storage: &Arc<Storage>, offset: usize) -> Self {
        self.storages.push(storage.clone());
        self.raw(&(storage.address() + offset as u64).to_ne_bytes())
    }

    /// A pointer to byte `offset` of memory `memory` of a graph, which is elsewhere at each launch: it points
    /// nowhere before [`StepGraph::point`](super::StepGraph::point). Not for a launch on a stream.
    #[must_use]
    pub fn moving(mut self, memory: u32, offset: usize) -> Self {
        let part = self.parts.len();
        self.moving.push(MovingPointer { memory, offset, part });
        self.raw(&0_u64.to_ne_bytes())
    }

    /// A storage that the kernel reaches through a table in memory: no argument, but in use while the kernel
    /// runs.
    #[must_use]
    pub fn reaching(mut self, storage: &Arc<Storage>) -> Self {
        self.storages.push(storage.clone());
        self
    }

    /// A tensor from byte `offset` of a storage on, described for the copy engine.
    ///
    /// # Errors
    /// [`CudaError::Driver`] where the engine does not take such a tensor: its rows or pixels begin at no
    /// multiples of 16 bytes, or its windows reach too far beyond it. [`CudaError::Lost`].
    pub fn copied(
        mut self,
        device: &Device,
        storage: &Arc<Storage>,
        offset: usize,
        copied: &Copied,
    ) -> Result<Self> {
        let address = (storage.address() + offset as u64) as *const c_void;
        device.enter()?;
        let map = match copied {
            Copied::Matrix(boxes) => matrix(device, address, boxes),
            Copied::Image(windows) => image(device, address, windows),
        }?;
        self.storages.push(storage.clone());
        let bytes: Vec<u8> = map.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(self.raw(&bytes))
    }

    /// A 32-bit integer without sign.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.raw(&value.to_ne_bytes())
    }

    /// A 64-bit integer without sign.
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.raw(&value.to_ne_bytes())
    }

    /// A 32-bit number.
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.raw(&value.to_ne_bytes())
    }

    /// The bytes of one argument, such as a structure.
    #[must_use]
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        // Eight bytes are the alignment of every scalar; the driver copies the rest as it lies.
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.parts.push((self.bytes.len(), bytes.len()));
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(super) fn storages(&self) -> &[Arc<Storage>] {
        &self.storages
    }

    /// The numbers of the memories that are elsewhere at each launch, with repeats.
    pub(super) fn moves(&self) -> impl Iterator<Item = u32> {
        self.moving.iter().map(|pointer| pointer.memory)
    }

    /// Has all pointers to memory `memory` point to where it is now. Whether it has moving pointers there.
    pub(super) fn point(&mut self, memory: u32, address: u64) -> bool {
        let mut points = false;
        for pointer in self.moving.iter().filter(|pointer| pointer.memory == memory) {
            let (start, bytes) = self.parts[pointer.part];
            let to = address + pointer.offset as u64;
            self.bytes[start..start + bytes].copy_from_slice(&to.to_ne_bytes());
            points = true;
        }
        points
    }

    /// A pointer to each argument. The driver reads through them and nothing else.
    pub(super) fn pointers(&self) -> Vec<*mut c_void> {
        self.parts
            .iter()
            .map(|&(start, _)| self.bytes[start..].as_ptr().cast_mut().cast())
            .collect()
    }
}

/// A kernel with everything that a launch of it needs.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Number of blocks in x, y and z.
    pub grid: [u32; 3],
    /// Number of threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory a block.
    pub shared_bytes: u32,
    /// The arguments.
    pub arguments: Arguments,
}

impl Launch {
    /// Checks the launch against kernel and device, and raises the kernel's limit of shared memory.
    pub(super) fn prepare(&self) -> Result<()> {
        let kernel = &self.kernel;
        let refuse = |reason: String| {
            Err(CudaError::Launch {
                kernel: kernel.name().to_owned(),
                reason,
            })
        };
        let usage = kernel.usage();
        let threads = self
            .block
            .iter()
            .map(|&extent| u64::from(extent))
            .product::<u64>();
        if threads == 0 || self.grid.contains(&0) {
            return refuse(format!(
                "grid {:?} and block {:?} have no threads",
                self.grid, self.block
            ));
        }
        if threads > u64::from(usage.block_threads) {
            let most = usage.block_threads;
            return refuse(format!("its blocks have at most {most} threads, not {threads}"));
        }
        let most = kernel.device().description().shared_bytes;
        let shared = u64::from(self.shared_bytes) + u64::from(usage.shared_bytes);
        if shared > u64::from(most) {
            return refuse(format!(
                "a block has at most {most} bytes of shared memory, not {shared}"
            ));
        }
        let given: Vec<usize> = self.arguments.parts.iter().map(|&(_, bytes)| bytes).collect();
        if given != kernel.inner.parameters {
            let expected = &kernel.inner.parameters;
            return refuse(format!(
                "its parameters have {expected:?} bytes, the arguments {given:?}"
            ));
        }
        kernel.allow_shared(self.shared_bytes)
    }
}

impl Stream {
    /// Queues a kernel.
    ///
    /// # Errors
    /// [`CudaError::Launch`], [`CudaError::TwoDevices`], [`CudaError::Driver`], [`CudaError::Lost`].
    ///
    /// # Safety
    /// With these arguments the kernel must touch only the storages among them, inside their sizes.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<()> {
        launch
            .kernel
            .device()
            .same_as(self.device(), "launching a kernel on a stream")?;
        launch.prepare()?;
        for storage in launch.arguments.storages() {
            storage.take_to(self)?;
        }
        self.device().enter()?;
        self.device().note_launch(launch.kernel.shared_name());
        let mut pointers = launch.arguments.pointers();
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: there are as many arguments, of the sizes that the kernel has (`prepare`), and the driver
        // copies them before it returns. What the kernel does is the caller's promise.
        let code = unsafe {
            (self.device().driver().cuLaunchKernel)(
                launch.kernel.raw(),
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launch.shared_bytes,
                self.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.device().check("cuLaunchKernel", code, || {
            format!("launching kernel `{}`", launch.kernel.name())
        })
    }
}

/// The copy engine's name of a type of 16 bits.
fn half(number: Number) -> u32 {
    match number {
        Number::F16 => tensor_map::FLOAT16,
        _ => tensor_map::BFLOAT16,
    }
}

/// A matrix at `address`, for the copy engine.
fn matrix(device: &Device, address: *const c_void, boxes: &Boxes) -> Result<TensorMap> {
    let mut map = TensorMap([0; 16]);
    let extents = [boxes.inner, boxes.outer];
    let strides = [boxes.leading * boxes.number.bytes() as u64];
    let (wide, steps) = ([boxes.wide, boxes.tall], [1, 1]);
    // SAFETY: all pointers are to values on this stack, of the lengths of two dimensions; the address is only
    // noted.
    let code = unsafe {
        (device.driver().cuTensorMapEncodeTiled)(
            &raw mut map,
            half(boxes.number),
            2,
            address,
            extents.as_ptr(),
            strides.as_ptr(),
            wide.as_ptr(),
            steps.as_ptr(),
            0,
            tensor_map::SWIZZLE_128B,
            tensor_map::PROMOTION_128B,
            0,
        )
    };
    device.check("cuTensorMapEncodeTiled", code, || {
        format!("describing a matrix: {boxes:?}")
    })?;
    Ok(map)
}

/// An image at `address`, for the copy engine, which names the dimension of neighbours first.
fn image(device: &Device, address: *const c_void, windows: &Windows) -> Result<TensorMap> {
    let mut map = TensorMap([0; 16]);
    let ([height, width], [down, right]) = (windows.extents, windows.places);
    let extents = [windows.channels, width, height, windows.images];
    let strides = [right, down, windows.image].map(|stride| stride * windows.number.bytes() as u64);
    let turned = |[down, right]: [i32; 2]| [right, down];
    let (low, high) = (turned(windows.low), turned(windows.high));
    let steps = [1, windows.stride[1], windows.stride[0], 1];
    // SAFETY: all pointers are to values on this stack, of the lengths of four dimensions of which two are
    // spatial; the address is only noted.
    let code = unsafe {
        (device.driver().cuTensorMapEncodeIm2col)(
            &raw mut map,
            half(windows.number),
            4,
            address,
            extents.as_ptr(),
            strides.as_ptr(),
            low.as_ptr(),
            high.as_ptr(),
            windows.wide,
            windows.tall,
            steps.as_ptr(),
            0,
            tensor_map::SWIZZLE_128B,
            tensor_map::PROMOTION_128B,
            0,
        )
    };
    device.check("cuTensorMapEncodeIm2col", code, || {
        format!("describing the windows of an image: {windows:?}")
    })?;
    Ok(map)
}
