//! A cuDNN without a GPU, for tests: descriptors keep their attributes, the heuristic answers with engines
//! that a test names, and calls are recorded among the fake driver's.
//!
//! As in the library, attributes are set before a descriptor is finalized and read afterwards, and a
//! descriptor takes only finalized ones as attributes.

#![allow(non_snake_case, reason = "the names are the library's")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;

use crate::libraries::{Cudnn, Opened};
use crate::sys::cudnn::{
    CudnnFunctions, CudnnHandle, CudnnStatus, Descriptor, attribute, attribute_type, descriptor,
};
use crate::sys::driver::CUstream;

use super::with;

/// An engine of the fake library.
#[derive(Debug, Clone, Default)]
pub struct FakeEngine {
    /// The library's notes on its results, as numbers.
    pub numerical_notes: Vec<i32>,
    /// The library's notes on its calls.
    pub behavior_notes: Vec<i32>,
    /// Bytes of working memory of its plan.
    pub workspace_bytes: i64,
    /// Whether making a plan fails.
    pub refuses: bool,
}

/// State of the fake library.
#[derive(Debug, Default)]
pub(super) struct Library {
    /// In the order of the heuristic.
    engines: Vec<FakeEngine>,
    descriptors: HashMap<usize, Object>,
    /// The streams that handles have.
    streams: HashMap<usize, usize>,
}

#[derive(Debug, Default)]
struct Object {
    kind: i32,
    finalized: bool,
    /// Attributes with the bytes of their elements.
    attributes: HashMap<i32, Vec<u8>>,
    /// The engine that it leads to.
    engine: Option<usize>,
}

/// Starts the library with these engines. Its calls are among the fake driver's, which must be running.
pub fn fake_cudnn(engines: &[FakeEngine]) -> Cudnn {
    with(|state| state.cudnn.engines = engines.to_vec());
    Opened {
        functions: TABLE,
        path: PathBuf::from("fake"),
        version: "9.99.0".into(),
    }
}

/// Descriptors that were made and not destroyed.
pub fn fake_cudnn_descriptors() -> usize {
    with(|state| state.cudnn.descriptors.len())
}

/// The answer to wrong arguments.
const BAD_PARAM: CudnnStatus = 2000;
/// A descriptor in the wrong state.
const NOT_FINALIZED: CudnnStatus = 2004;
/// The answer where the driver refuses what the library asks of a stream.
const STREAM_IS_CAPTURED: CudnnStatus = 4004;
/// The answer of an engine that refuses a convolution.
const NOT_SUPPORTED: CudnnStatus = 3000;

/// Bytes of an element.
fn size(kind: i32) -> usize {
    match kind {
        attribute_type::HANDLE
        | attribute_type::INT64
        | attribute_type::POINTER
        | attribute_type::DESCRIPTOR => 8,
        attribute_type::CHAR => 1,
        _ => 4,
    }
}

const TABLE: CudnnFunctions = CudnnFunctions {
    cudnnGetVersion,
    cudnnCreate,
    cudnnDestroy,
    cudnnSetStream,
    cudnnBackendCreateDescriptor,
    cudnnBackendDestroyDescriptor,
    cudnnBackendSetAttribute,
    cudnnBackendGetAttribute,
    cudnnBackendFinalize,
    cudnnBackendExecute,
};

unsafe extern "C" fn cudnnGetVersion() -> usize {
    99_900
}

unsafe extern "C" fn cudnnCreate(handle: *mut CudnnHandle) -> CudnnStatus {
    with(|state| {
        state.note("cudnnCreate", "");
        let number = state.handle();
        // SAFETY: the caller gives a place for the handle.
        unsafe { *handle = CudnnHandle(number as *mut c_void) };
        0
    })
}

unsafe extern "C" fn cudnnDestroy(_: CudnnHandle) -> CudnnStatus {
    with(|state| state.note("cudnnDestroy", "").unwrap_or(0))
}

unsafe extern "C" fn cudnnSetStream(handle: CudnnHandle, stream: CUstream) -> CudnnStatus {
    with(|state| {
        let given = format!("{:?}", stream.0);
        if let Some(status) = state.note("cudnnSetStream", &given) {
            return status;
        }
        let stream = stream.0 as usize;
        // The library looks at the stream that the handle had.
        match state.cudnn.streams.insert(handle.0 as usize, stream) {
            Some(before) if before != stream && state.capturing.contains_key(&before) => STREAM_IS_CAPTURED,
            _ => 0,
        }
    })
}

unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: i32, made: *mut Descriptor) -> CudnnStatus {
    with(|state| {
        let number = state.handle();
        let object = Object {
            kind,
            ..Object::default()
        };
        state.cudnn.descriptors.insert(number, object);
        // SAFETY: the caller gives a place for the descriptor.
        unsafe { *made = Descriptor(number as *mut c_void) };
        0
    })
}

unsafe extern "C" fn cudnnBackendDestroyDescriptor(destroyed: Descriptor) -> CudnnStatus {
    with(
        |state| match state.cudnn.descriptors.remove(&(destroyed.0 as usize)) {
            Some(_) => 0,
            None => BAD_PARAM,
        },
    )
}

unsafe extern "C" fn cudnnBackendSetAttribute(
    of: Descriptor,
    name: i32,
    kind: i32,
    count: i64,
    elements: *const c_void,
) -> CudnnStatus {
    with(|state| {
        let length = size(kind) * count as usize;
        // SAFETY: the caller gives as many elements.
        let bytes = unsafe { std::slice::from_raw_parts(elements.cast::<u8>(), length) }.to_vec();
        let library = &mut state.cudnn;
        let mut engine = None;
        if kind == attribute_type::DESCRIPTOR {
            let Some(other) = library.descriptors.get(&word(&bytes)) else {
                return BAD_PARAM;
            };
            // What the library itself has written counts as finalized.
            if !other.finalized && other.engine.is_none() {
                return NOT_FINALIZED;
            }
            engine = other.engine;
        }
        if name == attribute::PLAN_JSON {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            engine = text
                .strip_prefix("engine ")
                .and_then(|number| number.parse().ok());
            if engine.is_none() {
                return BAD_PARAM;
            }
        }
        match library.descriptors.get_mut(&(of.0 as usize)) {
            Some(object) if !object.finalized => {
                object.attributes.insert(name, bytes);
                object.engine = object.engine.or(engine);
                0
            }
            _ => BAD_PARAM,
        }
    })
}

/// The first eight bytes as a number.
fn word(bytes: &[u8]) -> usize {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    usize::from_ne_bytes(word)
}

unsafe extern "C" fn cudnnBackendGetAttribute(
    of: Descriptor,
    name: i32,
    kind: i32,
    wanted: i64,
    count: *mut i64,
    to: *mut c_void,
) -> CudnnStatus {
    with(|state| {
        let library = &mut state.cudnn;
        let Some(object) = library.descriptors.get(&(of.0 as usize)) else {
            return BAD_PARAM;
        };
        if !object.finalized && object.engine.is_none() {
            return NOT_FINALIZED;
        }
        let own = object.engine;
        let engine = own.and_then(|number| library.engines.get(number)).cloned();
        // Descriptors are filled where they are, others are copied.
        if kind == attribute_type::DESCRIPTOR {
            let engines: Vec<usize> = match (name, own) {
                (attribute::HEURISTICS_RESULTS, _) => (0..library.engines.len()).collect(),
                (attribute::CONFIGURATION_ENGINE, Some(engine)) => vec![engine],
                _ => return BAD_PARAM,
            };
            // SAFETY: the caller gives a place for the count.
            unsafe { *count = engines.len() as i64 };
            for (at, engine) in engines.into_iter().enumerate().take(wanted as usize) {
                // SAFETY: the caller gives `wanted` descriptors.
                let number = unsafe { *to.cast::<usize>().add(at) };
                match library.descriptors.get_mut(&number) {
                    Some(object) => object.engine = Some(engine),
                    None => return BAD_PARAM,
                }
            }
            return 0;
        }
        let Some(engine) = engine else { return BAD_PARAM };
        let notes = |notes: &[i32]| notes.iter().flat_map(|note| note.to_ne_bytes()).collect();
        let bytes: Vec<u8> = match name {
            attribute::ENGINE_NUMERICAL_NOTES => notes(&engine.numerical_notes),
            attribute::ENGINE_BEHAVIOR_NOTES => notes(&engine.behavior_notes),
            attribute::PLAN_WORKSPACE_SIZE => engine.workspace_bytes.to_ne_bytes().to_vec(),
            attribute::PLAN_JSON => format!("engine {}", own.unwrap_or(0)).into_bytes(),
            _ => return BAD_PARAM,
        };
        let room = (size(kind) * wanted as usize).min(bytes.len());
        if room > 0 {
            // SAFETY: the caller gives room for `wanted` elements.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), room) };
        }
        // SAFETY: the caller gives a place for the count.
        unsafe { *count = (bytes.len() / size(kind)) as i64 };
        0
    })
}

unsafe extern "C" fn cudnnBackendFinalize(of: Descriptor) -> CudnnStatus {
    with(|state| {
        let library = &mut state.cudnn;
        let engine = |object: &Object| library.engines.get(object.engine?).cloned();
        let Some(object) = library.descriptors.get(&(of.0 as usize)) else {
            return BAD_PARAM;
        };
        let needed: &[i32] = match object.kind {
            descriptor::TENSOR => &[
                attribute::TENSOR_DATA_TYPE,
                attribute::TENSOR_DIMENSIONS,
                attribute::TENSOR_STRIDES,
                attribute::TENSOR_UNIQUE_ID,
                attribute::TENSOR_BYTE_ALIGNMENT,
            ],
            descriptor::CONVOLUTION => &[
                attribute::CONVOLUTION_SPATIAL_DIMENSIONS,
                attribute::CONVOLUTION_COMPUTE_TYPE,
                attribute::CONVOLUTION_MODE,
                attribute::CONVOLUTION_PRE_PADDINGS,
                attribute::CONVOLUTION_POST_PADDINGS,
                attribute::CONVOLUTION_DILATIONS,
                attribute::CONVOLUTION_STRIDES,
            ],
            descriptor::OPERATION_GRAPH => &[attribute::GRAPH_HANDLE, attribute::GRAPH_OPERATIONS],
            descriptor::HEURISTICS => &[attribute::HEURISTICS_MODE, attribute::HEURISTICS_OPERATION_GRAPH],
            descriptor::EXECUTION_PLAN => &[attribute::PLAN_HANDLE],
            descriptor::VARIANT_PACK => &[
                attribute::PACK_UNIQUE_IDS,
                attribute::PACK_DATA_POINTERS,
                attribute::PACK_WORKSPACE,
            ],
            _ => &[],
        };
        if needed.iter().any(|name| !object.attributes.contains_key(name)) {
            return BAD_PARAM;
        }
        if object.kind == descriptor::EXECUTION_PLAN {
            match engine(object) {
                None => return BAD_PARAM,
                Some(engine) if engine.refuses => return NOT_SUPPORTED,
                Some(_) => {}
            }
        }
        if let Some(object) = library.descriptors.get_mut(&(of.0 as usize)) {
            object.finalized = true;
        }
        0
    })
}

unsafe extern "C" fn cudnnBackendExecute(_: CudnnHandle, plan: Descriptor, pack: Descriptor) -> CudnnStatus {
    with(|state| {
        let library = &state.cudnn;
        let (Some(plan), Some(pack)) = (
            library.descriptors.get(&(plan.0 as usize)),
            library.descriptors.get(&(pack.0 as usize)),
        ) else {
            return BAD_PARAM;
        };
        if !plan.finalized || !pack.finalized {
            return NOT_FINALIZED;
        }
        let needed = plan
            .engine
            .map_or(0, |engine| library.engines[engine].workspace_bytes);
        let workspace = word(&pack.attributes[&attribute::PACK_WORKSPACE]);
        let tensors = pack.attributes[&attribute::PACK_DATA_POINTERS]
            .chunks(8)
            .map(word);
        let held = tensors.clone().all(|address| state.holds(address as u64, 1))
            && (needed == 0 || state.holds(workspace as u64, needed as usize));
        let line = format!("engine {}", plan.engine.unwrap_or(0));
        match held {
            true => state.note("cudnnBackendExecute", &line).unwrap_or(0),
            false => BAD_PARAM,
        }
    })
}
