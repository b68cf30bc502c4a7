//! NCCL without a GPU, for tests: calls are recorded among the fake driver's, checked against its allocations,
//! and become nodes of a graph where the stream is captured. Nothing is computed.

#![allow(non_snake_case, reason = "the names are the library's")]

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::time::Duration;

use kiln_distributed::Error;
use kiln_distributed::nccl::{Communicator, Nccl, NcclFunctions, RawStream, UniqueId};

use super::{State, with};

const TABLE: NcclFunctions = NcclFunctions {
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
};

/// The library.
///
/// # Errors
/// None; those of [`Nccl::new`].
pub fn fake_library() -> Result<Nccl, Error> {
    Nccl::new(TABLE, Path::new("fake"))
}

/// A communicator of rank `rank` among `size` ranks, which are not there.
///
/// # Errors
/// Those of [`Nccl::connect`], if a test makes the call fail.
pub fn fake_nccl(rank: usize, size: usize) -> Result<Communicator, Error> {
    let nccl = fake_library()?;
    nccl.connect(nccl.unique_id()?, rank, size)
}

/// `ncclUnhandledCudaError`.
const CUDA_FAILURE: c_int = 1;

/// `ncclInvalidArgument`.
const INVALID: c_int = 4;

/// The number of ranks is the handle.
fn size(handle: *mut c_void) -> usize {
    handle.addr()
}

unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller gives a place for the number.
    unsafe { *version = 22_809 };
    0
}

unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    // SAFETY: the caller gives a place for the id.
    unsafe { (*id).0.fill(7) };
    0
}

unsafe extern "C" fn ncclCommInitRank(
    handle: *mut *mut c_void,
    ranks: c_int,
    _: UniqueId,
    rank: c_int,
) -> c_int {
    // SAFETY: the caller gives a place for the handle.
    unsafe { *handle = std::ptr::without_provenance_mut(ranks as usize) };
    let given = format!("rank {rank} of {ranks}");
    let answer = with(|state| state.note("ncclCommInitRank", &given).unwrap_or(0));
    wait("ncclCommInitRank", false);
    answer
}

unsafe extern "C" fn ncclCommDestroy(_: *mut c_void) -> c_int {
    let answer = with(|state| state.note("ncclCommDestroy", "").unwrap_or(0));
    wait("ncclCommDestroy", false);
    answer
}

unsafe extern "C" fn ncclCommAbort(_: *mut c_void) -> c_int {
    let answer = with(|state| state.note("ncclCommAbort", "").unwrap_or(0));
    with(|state| state.aborted = true);
    wait("ncclCommAbort", false);
    answer
}

unsafe extern "C" fn ncclCommGetAsyncError(_: *mut c_void, told: *mut c_int) -> c_int {
    let code = with(|state| state.failing.get("ncclCommGetAsyncError").copied().unwrap_or(0));
    // SAFETY: the caller gives a place for the code.
    unsafe { *told = code };
    0
}

/// Waits as long as a test has the call wait, or until NCCL is aborted if that ends it; whether that was why.
fn wait(name: &'static str, ends: bool) -> bool {
    loop {
        let (waits, aborted) = with(|state| (state.blocked.contains(name), ends && state.aborted));
        if aborted || !waits {
            return aborted;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// `ncclInternalError`.
const ENDED: c_int = 3;

/// Records a collective from so many bytes to so many, and waits for the other ranks.
fn collective(
    name: &'static str,
    given: &str,
    from: (*const c_void, usize),
    to: (*mut c_void, usize),
    stream: RawStream,
) -> c_int {
    match with(|state| queue(state, name, given, from, to, stream)) {
        0 if wait(name, true) => ENDED,
        code => code,
    }
}

/// Records a collective.
fn queue(
    state: &mut State,
    name: &'static str,
    given: &str,
    (from, operand): (*const c_void, usize),
    (to, result): (*mut c_void, usize),
    stream: RawStream,
) -> c_int {
    let text = format!("{given}, {:x} -> {:x}", from.addr(), to.addr());
    if let Some(code) = state.note(name, &text) {
        return code;
    }
    if !state.holds(from.addr() as u64, operand) || !state.holds(to.addr() as u64, result) {
        return INVALID;
    }
    if !state.is_new_to_nccl(stream.addr()) {
        return CUDA_FAILURE;
    }
    state.queued(stream.addr());
    0
}

/// Bytes of an element of NCCL's type.
fn bytes(ty: c_int) -> usize {
    match ty {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        _ => 8,
    }
}

unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: c_int,
    operation: c_int,
    _: *mut c_void,
    stream: RawStream,
) -> c_int {
    let (given, all) = (
        format!("{count} of type {ty}, operation {operation}"),
        count * bytes(ty),
    );
    collective("ncclAllReduce", &given, (from, all), (to, all), stream)
}

unsafe extern "C" fn ncclReduceScatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: c_int,
    operation: c_int,
    handle: *mut c_void,
    stream: RawStream,
) -> c_int {
    let (given, block) = (
        format!("{count} of type {ty}, operation {operation}"),
        count * bytes(ty),
    );
    let all = block * size(handle);
    collective("ncclReduceScatter", &given, (from, all), (to, block), stream)
}

unsafe extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: c_int,
    handle: *mut c_void,
    stream: RawStream,
) -> c_int {
    let (given, own) = (format!("{count} of type {ty}"), count * bytes(ty));
    let all = own * size(handle);
    collective("ncclAllGather", &given, (from, own), (to, all), stream)
}

unsafe extern "C" fn ncclBroadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: c_int,
    root: c_int,
    _: *mut c_void,
    stream: RawStream,
) -> c_int {
    let (given, all) = (format!("{count} of type {ty}, root {root}"), count * bytes(ty));
    collective("ncclBroadcast", &given, (from, all), (to, all), stream)
}

unsafe extern "C" fn ncclGetErrorString(_: c_int) -> *const c_char {
    c"an error of the fake's".as_ptr()
}

unsafe extern "C" fn ncclGetLastError(_: *mut c_void) -> *const c_char {
    c"".as_ptr()
}
