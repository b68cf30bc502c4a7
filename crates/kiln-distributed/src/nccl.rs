//! The functions of NCCL that Kiln calls.
//!
//! NCCL moves data between GPUs: between those of one machine over NVLink or PCIe, between machines over the
//! network. It is loaded at run time like MPI ([`crate::World`]), and only by a program that trains on GPUs.
//! A [`Communicator`] stands for one GPU among those of all ranks; its collectives are queued on a stream of
//! that GPU, and the stream may be one that is captured into a graph.
//!
//! NCCL knows no launcher: rank 0 makes a [`UniqueId`], and every rank gives the same one. How the id reaches
//! the other ranks is the program's business; here [`crate::World::broadcast`] takes it there.
//!
//! Two runs have equal bits, because NCCL takes algorithm, protocol and channels from the size of the operand,
//! the ranks, the machines between them, its version and its variables (`NCCL_ALGO`, `NCCL_PROTO`, ..), and
//! adds in the order that these give. Where one of these differs, sums may round otherwise.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_graph::{CollectiveKind, DType};

use crate::error::Error;

/// A communicator of the library's.
type Handle = *mut c_void;

/// A stream of the CUDA driver's or runtime's, which are the same.
pub type RawStream = *mut c_void;

/// The oldest version with all that is called: 2.18, by its number.
const OLDEST: c_int = 21800;

/// What names the ranks that belong together: as many bytes as NCCL's id has.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; Self::BYTES]);

impl UniqueId {
    /// How many bytes it is.
    pub const BYTES: usize = 128;
}

impl fmt::Debug for UniqueId {
    /// The id is an address and a secret, so it is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// The table of functions; names and meanings are those of `nccl.h`.
#[derive(Clone, Copy)]
#[allow(
    non_snake_case,
    missing_docs,
    reason = "names and documentation are the library's"
)]
pub struct NcclFunctions {
    pub ncclGetVersion: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub ncclGetUniqueId: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub ncclCommInitRank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    pub ncclCommDestroy: unsafe extern "C" fn(Handle) -> c_int,
    pub ncclCommAbort: unsafe extern "C" fn(Handle) -> c_int,
    pub ncclCommGetAsyncError: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    pub ncclAllReduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, RawStream) -> c_int,
    pub ncclReduceScatter:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, RawStream) -> c_int,
    pub ncclAllGather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, RawStream) -> c_int,
    pub ncclBroadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, RawStream) -> c_int,
    pub ncclGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
    pub ncclGetLastError: unsafe extern "C" fn(Handle) -> *const c_char,
}

impl fmt::Debug for NcclFunctions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NcclFunctions")
    }
}

impl NcclFunctions {
    /// Looks every function up.
    ///
    /// # Errors
    /// The name of the first function that the library has not.
    ///
    /// # Safety
    /// `library` must be NCCL, and must stay open while the table is used.
    pub unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
        macro_rules! table {
            ($($name:ident),* $(,)?) => {
                Self {
                    $(
                        // SAFETY: the caller promises the library; the signature is that of its header.
                        $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|_| stringify!($name))?,
                    )*
                }
            };
        }
        Ok(table!(
            ncclGetVersion,
            ncclGetUniqueId,
            ncclCommInitRank,
            ncclCommDestroy,
            ncclCommAbort,
            ncclCommGetAsyncError,
            ncclAllReduce,
            ncclReduceScatter,
            ncclAllGather,
            ncclBroadcast,
            ncclGetErrorString,
            ncclGetLastError,
        ))
    }

    /// The library's version as its number, 10000 times the first figure and 100 times the second.
    pub fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the pointer is to an integer on this stack.
        unsafe { (self.ncclGetVersion)(&raw mut version) };
        version
    }
}

/// A version number as NCCL's makers write it: 22809 as 2.28.9.
pub fn dotted(version: i32) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version % 10_000 / 100,
        version % 100
    )
}

/// The library. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Nccl {
    inner: Arc<Library>,
}

#[derive(Debug)]
struct Library {
    functions: NcclFunctions,
    path: PathBuf,
    version: i32,
}

impl Nccl {
    /// Opens the library in this file; a name without a folder is looked for where the dynamic linker looks.
    ///
    /// # Errors
    /// [`Error::Nccl`] if it does not open, lacks a function, or is too old.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let wrong = |reason: String| Error::NcclLibrary {
            library: path.display().to_string(),
            reason,
        };
        // SAFETY: the constructors of NCCL set up the library itself. A file of that name that is something
        // else was named by whoever runs this process.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| wrong(error.to_string()))?;
        // SAFETY: as above; the library is never closed.
        let functions = unsafe { NcclFunctions::load(&library) };
        let functions = functions.map_err(|name| wrong(format!("it has no function {name}")))?;
        std::mem::forget(library);
        Self::new(functions, path)
    }

    /// The library with these functions, which came from `path`.
    ///
    /// # Errors
    /// [`Error::NcclLibrary`] if it is too old.
    pub fn new(functions: NcclFunctions, path: &Path) -> Result<Self, Error> {
        let version = functions.version();
        if version < OLDEST {
            return Err(Error::NcclLibrary {
                library: path.display().to_string(),
                reason: format!(
                    "its version is {}, and 2.18 is the oldest that does",
                    dotted(version)
                ),
            });
        }
        Ok(Self {
            inner: Arc::new(Library {
                functions,
                path: path.to_path_buf(),
                version,
            }),
        })
    }

    /// Its version: `2.28.9`.
    pub fn version(&self) -> String {
        dotted(self.inner.version)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// A new id, to be given to all ranks.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: the pointer is to an id on this stack.
        let code = unsafe { (self.inner.functions.ncclGetUniqueId)(&raw mut id) };
        self.check(0, "ncclGetUniqueId", code, std::ptr::null_mut(), "")?;
        Ok(id)
    }

    /// Connects the GPU whose context is current on this thread with those of the other ranks; waits until all
    /// have called.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn connect(&self, id: UniqueId, rank: usize, size: usize) -> Result<Communicator, Error> {
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a handle on this stack; ranks are numbers of `c_int`'s range, because
        // nobody starts more of them.
        let code = unsafe {
            (self.inner.functions.ncclCommInitRank)(&raw mut handle, size as c_int, id, rank as c_int)
        };
        let about = format!(" when it connected rank {rank} of {size}");
        self.check(rank, "ncclCommInitRank", code, std::ptr::null_mut(), &about)?;
        Ok(Communicator {
            library: self.clone(),
            handle,
            rank,
            size,
        })
    }

    fn check(
        &self,
        rank: usize,
        function: &'static str,
        code: c_int,
        handle: Handle,
        about: &str,
    ) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let functions = &self.inner.functions;
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: the library's texts end with a zero and live until its next failure on this thread.
            false => unsafe { CStr::from_ptr(pointer) }
                .to_string_lossy()
                .trim()
                .to_owned(),
        };
        // SAFETY: any number is a code; the handle is one of the library's, or null.
        let (meaning, last) = unsafe {
            (
                text((functions.ncclGetErrorString)(code)),
                text((functions.ncclGetLastError)(handle)),
            )
        };
        let meaning = match last.is_empty() {
            true => meaning,
            false => format!("{meaning}; {last}"),
        };
        Err(Error::Nccl {
            rank,
            function,
            code,
            meaning,
            about: about.to_owned(),
        })
    }
}

/// What a collective computes, without the memory that it works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// What it computes.
    pub kind: CollectiveKind,
    /// Whether a sum is divided by the number of ranks: each element before it is added.
    pub mean: bool,
    /// The rank that [`CollectiveKind::FromRoot`] takes.
    pub root: usize,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the operand.
    pub elements: usize,
}

impl Shape {
    /// Bytes of operand and result on `ranks` ranks.
    pub fn bytes(&self, ranks: usize) -> (usize, usize) {
        let operand = self.elements * self.dtype.size();
        let result = match self.kind {
            CollectiveKind::AllReduce | CollectiveKind::FromRoot => operand,
            CollectiveKind::ReduceScatter => operand / ranks.max(1),
            CollectiveKind::AllGather => operand * ranks,
        };
        (operand, result)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}", self.kind, self.elements, self.dtype)
    }
}

/// NCCL's number for the type of elements that are added up; none if NCCL does not add such elements.
pub fn added_type(dtype: DType) -> Option<i32> {
    Some(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

/// NCCL's type of bytes.
const BYTES: c_int = 1;

/// A GPU among those of all ranks. Its methods may be called from any thread, by one at a time; only
/// [`Communicator::abort`] may be called meanwhile.
#[derive(Debug)]
pub struct Communicator {
    library: Nccl,
    handle: Handle,
    rank: usize,
    size: usize,
}

// SAFETY: the library allows calls from any thread, one at a time.
unsafe impl Send for Communicator {}
// SAFETY: the methods' documentation says what the caller must keep apart.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The library.
    pub fn library(&self) -> &Nccl {
        &self.library
    }

    /// Queues a collective on `stream`, from address `from` to address `to` of the GPU's memory.
    ///
    /// # Errors
    /// [`Error::Operands`] if it does not fit the ranks, or NCCL does not add such elements; [`Error::Nccl`].
    ///
    /// # Safety
    /// Both addresses must be valid for the bytes that [`Shape::bytes`] says until the stream has done it, and
    /// equal or apart; the stream must be of this communicator's GPU. No other call may be under way.
    pub unsafe fn queue(&self, shape: &Shape, from: u64, to: u64, stream: RawStream) -> Result<(), Error> {
        let wrong = |reason: String| Err(Error::Operands(format!("{shape}: {reason}")));
        let Shape {
            kind,
            mean,
            root,
            dtype,
            elements,
        } = *shape;
        if root >= self.size {
            return wrong(format!("there is no rank {root}"));
        }
        let added = added_type(dtype);
        let (from, to) = (
            std::ptr::with_exposed_provenance::<c_void>(from as usize),
            std::ptr::with_exposed_provenance_mut::<c_void>(to as usize),
        );
        // `ncclAvg` and `ncclSum`.
        let operation = if mean { 4 } else { 0 };
        let (functions, handle) = (&self.library.inner.functions, self.handle);
        let moved = elements * dtype.size();
        // SAFETY: the caller's promise; counts are those of the operand, or of a block.
        let (function, code) = unsafe {
            match (kind, added) {
                (CollectiveKind::AllReduce | CollectiveKind::ReduceScatter, None) => {
                    return wrong(format!("NCCL does not add up elements of {dtype}"));
                }
                (CollectiveKind::AllReduce, Some(ty)) => (
                    "ncclAllReduce",
                    (functions.ncclAllReduce)(from, to, elements, ty, operation, handle, stream),
                ),
                (CollectiveKind::ReduceScatter, Some(ty)) => {
                    if !elements.is_multiple_of(self.size) {
                        return wrong(format!("they do not divide among {} ranks", self.size));
                    }
                    let block = elements / self.size;
                    (
                        "ncclReduceScatter",
                        (functions.ncclReduceScatter)(from, to, block, ty, operation, handle, stream),
                    )
                }
                (CollectiveKind::AllGather, _) => (
                    "ncclAllGather",
                    (functions.ncclAllGather)(from, to, moved, BYTES, handle, stream),
                ),
                (CollectiveKind::FromRoot, _) => (
                    "ncclBroadcast",
                    (functions.ncclBroadcast)(from, to, moved, BYTES, root as c_int, handle, stream),
                ),
            }
        };
        self.library
            .check(self.rank, function, code, handle, &format!(" at {shape}"))
    }

    /// What has gone wrong since the last call, such as a connection that broke.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn look(&self) -> Result<(), Error> {
        // `ncclInProgress` is no failure.
        const IN_PROGRESS: c_int = 7;
        let mut state = 0;
        // SAFETY: the pointer is to an integer on this stack.
        let code =
            unsafe { (self.library.inner.functions.ncclCommGetAsyncError)(self.handle, &raw mut state) };
        let function = "ncclCommGetAsyncError";
        self.library.check(self.rank, function, code, self.handle, "")?;
        match state {
            IN_PROGRESS => Ok(()),
            _ => self.library.check(
                self.rank,
                function,
                state,
                self.handle,
                " since an earlier collective",
            ),
        }
    }

    /// Ends what is under way; its results are undefined. The communicator is of no further use: no other
    /// method may be called.
    pub fn abort(&self) {
        // SAFETY: nothing uses the handle afterwards; `Drop` is told by the owner ([`Communicator::forget`]).
        unsafe { (self.library.inner.functions.ncclCommAbort)(self.handle) };
    }

    /// Ends the value without the library: for one that was aborted.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: made by `Nccl::connect`, destroyed here once.
        unsafe { (self.library.inner.functions.ncclCommDestroy)(self.handle) };
    }
}
