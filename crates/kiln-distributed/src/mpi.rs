//! The functions of MPI that Kiln calls, in the three binary interfaces that there are.
//!
//! Before version 5 MPI standardised source code, not binaries: the type of a handle (of a communicator, a type, a request)
//! differs from library to library. Open MPI's handles are addresses, and its predefined objects are
//! exported symbols. In MPICH and the MPIs that follow it (Intel's, Cray's, MVAPICH) handles are integers,
//! and the header gives those of predefined objects. MPI 5 fixes an interface for all libraries, which have it
//! in a library of its own (`libmpi_abi.so`): handles are addresses, and those of predefined objects small
//! numbers (the MPI Forum's header, github.com/mpi-forum/mpi-abi-stubs). The functions are otherwise the same,
//! so one table, generic in the handle, serves all three.
//!
//! Ten functions suffice, because Kiln computes all sums itself and sends everything as bytes from one rank
//! to another.

use std::ffi::{c_char, c_int, c_void};

use crate::environment::{Launcher, Place};
use crate::error::Error;

/// `MPI_THREAD_FUNNELED`: one thread makes all calls. The same number in Open MPI and MPICH.
const FUNNELED: c_int = 1;

/// `MPI_THREAD_FUNNELED` in the interface of MPI 5.
const STANDARD_FUNNELED: c_int = 1024;

/// `MPI_COMM_WORLD`, `MPI_BYTE` and `MPI_ERRORS_RETURN` in the interface of MPI 5.
const STANDARD_OBJECTS: [usize; 3] = [0x101, 0x247, 0x142];

/// What the name of a library with that interface begins with.
const STANDARD: &str = "libmpi_abi";

/// Names of Open MPI's library, the usual ones first.
const OPEN_MPI: &[&str] = &[
    "libmpi.so.40",
    "libmpi.so.80",
    "libmpi.so",
    "libmpi_abi.so.1",
    "libmpi_abi.so.0",
];

/// Names of MPICH's library and of those that follow it.
const MPICH: &[&str] = &[
    "libmpich.so.12",
    "libmpi.so.12",
    "libmpich.so",
    "libmpi_cray.so.12",
    "libmpi.so",
    "libmpi_abi.so.1",
    "libmpi_abi.so.0",
];

/// Why a function failed: its name and its code.
pub(crate) type Failure = (&'static str, c_int);

/// What is under way between two ranks.
#[derive(Debug)]
pub(crate) struct Request(usize);

/// The functions, for any type of handle. All calls come from the thread that called [`Functions::init`].
pub(crate) trait Functions {
    /// Connects the process with the others; returns its rank and the number of ranks.
    fn init(&self) -> Result<(usize, usize), Failure>;

    /// Begins to send.
    ///
    /// # Safety
    /// The bytes must stay there, and unchanged, until [`Functions::is_done`] has said so.
    unsafe fn send(&self, to: usize, tag: c_int, bytes: &[u8]) -> Result<Request, Failure>;

    /// Begins to receive exactly so many bytes.
    ///
    /// # Safety
    /// The bytes must stay there, and nobody may touch them, until [`Functions::is_done`] has said so.
    unsafe fn receive(&self, from: usize, tag: c_int, bytes: &mut [u8]) -> Result<Request, Failure>;

    /// Whether it is over.
    fn is_done(&self, request: &mut Request) -> Result<bool, Failure>;

    /// Disconnects, when all ranks do.
    fn finalize(&self);

    /// What a code means, in the library's words.
    fn describe(&self, code: c_int) -> String;
}

/// A handle: an address, or an integer.
trait Handle: Copy {
    fn from_bits(bits: usize) -> Self;
    fn bits(self) -> usize;
}

impl Handle for *mut c_void {
    fn from_bits(bits: usize) -> Self {
        std::ptr::with_exposed_provenance_mut(bits)
    }

    fn bits(self) -> usize {
        self.expose_provenance()
    }
}

impl Handle for c_int {
    fn from_bits(bits: usize) -> Self {
        bits as u32 as Self
    }

    fn bits(self) -> usize {
        self as u32 as usize
    }
}

/// Room for a status of any library: the largest has 32 bytes.
#[repr(C, align(16))]
struct Status([u8; 256]);

struct Table<H> {
    init_thread: unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int,
    initialized: unsafe extern "C" fn(*mut c_int) -> c_int,
    comm_rank: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    comm_size: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    comm_set_errhandler: unsafe extern "C" fn(H, H) -> c_int,
    isend: unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    irecv: unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    test: unsafe extern "C" fn(*mut H, *mut c_int, *mut Status) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    /// `MPI_COMM_WORLD`, `MPI_BYTE` and `MPI_ERRORS_RETURN`.
    world: H,
    byte: H,
    errors_return: H,
    /// `MPI_THREAD_FUNNELED`.
    funneled: c_int,
    /// Last, so that nothing above outlives the mapping it points into.
    _library: libloading::Library,
}

impl<H: Handle> Table<H> {
    /// Looks the functions up. `objects` are the predefined handles.
    fn new(library: libloading::Library, objects: [H; 3], funneled: c_int) -> Result<Self, String> {
        // SAFETY: the names are those of MPI's functions, whose C declarations the fields have.
        unsafe fn of<F: Copy>(library: &libloading::Library, name: &str) -> Result<F, String> {
            // SAFETY: as above.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            found.map(|symbol| *symbol).map_err(|error| error.to_string())
        }
        let [world, byte, errors_return] = objects;
        // SAFETY: as above.
        unsafe {
            Ok(Self {
                init_thread: of(&library, "MPI_Init_thread")?,
                initialized: of(&library, "MPI_Initialized")?,
                comm_rank: of(&library, "MPI_Comm_rank")?,
                comm_size: of(&library, "MPI_Comm_size")?,
                comm_set_errhandler: of(&library, "MPI_Comm_set_errhandler")?,
                isend: of(&library, "MPI_Isend")?,
                irecv: of(&library, "MPI_Irecv")?,
                test: of(&library, "MPI_Test")?,
                finalize: of(&library, "MPI_Finalize")?,
                error_string: of(&library, "MPI_Error_string")?,
                world,
                byte,
                errors_return,
                funneled,
                _library: library,
            })
        }
    }
}

/// The result of a call.
fn check(function: &'static str, code: c_int) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err((function, code)) }
}

/// A number of bytes as MPI takes it; the engine sends no more at once.
fn count(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).unwrap_or(c_int::MAX)
}

impl<H: Handle> Functions for Table<H> {
    fn init(&self) -> Result<(usize, usize), Failure> {
        let (mut already, mut level, mut rank, mut size) = (0, 0, 0, 0);
        // SAFETY: the pointers are to numbers of this frame; null stands for no arguments of the program.
        unsafe {
            check("MPI_Initialized", (self.initialized)(&mut already))?;
            if already == 0 {
                let none = std::ptr::null_mut();
                let code = (self.init_thread)(std::ptr::null_mut(), none, self.funneled, &mut level);
                check("MPI_Init_thread", code)?;
            }
            let code = (self.comm_set_errhandler)(self.world, self.errors_return);
            check("MPI_Comm_set_errhandler", code)?;
            check("MPI_Comm_rank", (self.comm_rank)(self.world, &mut rank))?;
            check("MPI_Comm_size", (self.comm_size)(self.world, &mut size))?;
        }
        Ok((rank.max(0) as usize, size.max(1) as usize))
    }

    unsafe fn send(&self, to: usize, tag: c_int, bytes: &[u8]) -> Result<Request, Failure> {
        let mut request = H::from_bits(0);
        // SAFETY: the bytes stay, by the caller's promise; the rank exists.
        let code = unsafe {
            let from = bytes.as_ptr().cast();
            (self.isend)(
                from,
                count(bytes),
                self.byte,
                to as c_int,
                tag,
                self.world,
                &mut request,
            )
        };
        check("MPI_Isend", code)?;
        Ok(Request(request.bits()))
    }

    unsafe fn receive(&self, from: usize, tag: c_int, bytes: &mut [u8]) -> Result<Request, Failure> {
        let mut request = H::from_bits(0);
        // SAFETY: the bytes stay, by the caller's promise; the rank exists.
        let code = unsafe {
            let to = bytes.as_mut_ptr().cast();
            (self.irecv)(
                to,
                count(bytes),
                self.byte,
                from as c_int,
                tag,
                self.world,
                &mut request,
            )
        };
        check("MPI_Irecv", code)?;
        Ok(Request(request.bits()))
    }

    fn is_done(&self, request: &mut Request) -> Result<bool, Failure> {
        let (mut handle, mut flag) = (H::from_bits(request.0), 0);
        let mut status = Status([0; 256]);
        // SAFETY: the request is one of this library, and was not over before.
        let code = unsafe { (self.test)(&mut handle, &mut flag, &mut status) };
        request.0 = handle.bits();
        check("MPI_Test", code)?;
        Ok(flag != 0)
    }

    fn finalize(&self) {
        // SAFETY: nothing is under way any more.
        unsafe { (self.finalize)() };
    }

    fn describe(&self, code: c_int) -> String {
        // Larger than what any library writes (`MPI_MAX_ERROR_STRING`).
        let (mut text, mut length) = ([0u8; 2048], 0);
        // SAFETY: as said.
        unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        let end = (length.max(0) as usize).min(text.len());
        String::from_utf8_lossy(&text[..end])
            .trim_end_matches('\0')
            .to_owned()
    }
}

/// Loads the MPI library of the launcher that started the process, or the one that the program's user has
/// `named`; returns its functions and its name.
///
/// # Errors
/// [`Error::NoLibrary`] if there is none, [`Error::UnknownLibrary`] if it lacks what is needed.
pub(crate) fn load(place: &Place, named: Option<String>) -> Result<(Box<dyn Functions>, String), Error> {
    let names: Vec<String> = match (named, place.launcher) {
        (Some(name), _) => vec![name],
        (None, Launcher::OpenMpi) => OPEN_MPI.iter().map(|name| (*name).to_owned()).collect(),
        (None, Launcher::Mpich) => MPICH.iter().map(|name| (*name).to_owned()).collect(),
        (None, _) => {
            let all = OPEN_MPI.iter().chain(MPICH);
            all.map(|name| (*name).to_owned()).collect()
        }
    };
    let mut tried = Vec::new();
    for name in names {
        match open(&name) {
            Ok(library) => return Ok((functions(library, &name)?, name)),
            Err(reason) => tried.push(format!("{name} ({reason})")),
        }
    }
    Err(Error::NoLibrary {
        launcher: place.launcher.name(),
        size: place.size,
        tried: tried.join(", "),
    })
}

/// The interface of a library: that of MPI 5 by its name, the others by whether it exports Open MPI's
/// communicator.
fn functions(library: libloading::Library, name: &str) -> Result<Box<dyn Functions>, Error> {
    let unknown = |reason: String| Error::UnknownLibrary {
        library: name.to_owned(),
        reason,
    };
    // SAFETY: only the addresses of these symbols are taken.
    let address = |symbol: &str| unsafe {
        let found = library.get::<*mut c_void>(symbol.as_bytes());
        found.ok().and_then(|symbol| symbol.try_as_raw_ptr())
    };
    let file = std::path::Path::new(name).file_name().unwrap_or_default();
    if file.to_string_lossy().starts_with(STANDARD) {
        if address("MPI_Abi_get_version").is_none() {
            return Err(unknown(
                "it has not the interface of MPI 5 that its name promises".into(),
            ));
        }
        let objects = STANDARD_OBJECTS.map(<*mut c_void>::from_bits);
        let table = Table::<*mut c_void>::new(library, objects, STANDARD_FUNNELED).map_err(unknown)?;
        return Ok(Box::new(table));
    }
    let objects = ["ompi_mpi_comm_world", "ompi_mpi_byte", "ompi_mpi_errors_return"].map(address);
    if let [Some(world), Some(byte), Some(errors)] = objects {
        let table = Table::<*mut c_void>::new(library, [world, byte, errors], FUNNELED);
        let table = table.map_err(unknown)?;
        return Ok(Box::new(table));
    }
    if address("MPIR_Process").is_none()
        && address("MPIR_Err_create_code").is_none()
        && address("MPIX_Comm_agree").is_none()
    {
        return Err(unknown("it exports none of the symbols that tell the two".into()));
    }
    // Of MPICH's header; fixed by the agreement of the MPIs that follow it (the MPICH ABI initiative).
    let objects = [0x4400_0000, 0x4c00_010d, 0x5400_0001];
    Ok(Box::new(
        Table::<c_int>::new(library, objects, FUNNELED).map_err(unknown)?,
    ))
}

/// Opens a library so that its own plugins find its symbols.
#[cfg(unix)]
fn open(name: &str) -> Result<libloading::Library, String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: MPI libraries run initialisers of their own, made for being loaded.
    let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) };
    library.map(Into::into).map_err(|error| full(&error))
}

#[cfg(not(unix))]
fn open(name: &str) -> Result<libloading::Library, String> {
    // SAFETY: as above.
    unsafe { libloading::Library::new(name) }.map_err(|error| full(&error))
}

/// The loader's error with its cause.
fn full(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => cause.to_string(),
        None => error.to_string(),
    }
}
