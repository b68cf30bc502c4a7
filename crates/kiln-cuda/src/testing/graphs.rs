//! The functions of the fake driver that make graphs, launch them, and capture. SAFETY as in `functions`.

#![allow(non_snake_case, reason = "the names are the driver's")]

use std::ffi::{c_uint, c_ulonglong, c_void};
use std::slice;

use super::functions::{call, give, kernel, number, pointer};
use super::with;
use crate::sys::driver::{
    CUcontext, CUgraph, CUgraphExec, CUgraphNode, CUresult, CUstream, CudaKernelNodeParams, CudaMemcpy3D,
    CudaMemsetNodeParams, result,
};

/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
const CAPTURING: c_uint = 1;

pub(super) unsafe extern "C" fn cuGraphCreate(graph: *mut CUgraph, _: c_uint) -> CUresult {
    call("cuGraphCreate", "", |state| {
        // SAFETY: see the module.
        unsafe { give(state, graph.cast()) }
    })
}

pub(super) unsafe extern "C" fn cuGraphDestroy(_: CUgraph) -> CUresult {
    call("cuGraphDestroy", "", |_| result::SUCCESS)
}

/// Adds a node; `given` describes it.
unsafe fn add(
    name: &'static str,
    given: &str,
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
) -> CUresult {
    let after: Vec<usize> = if count == 0 {
        Vec::new()
    } else {
        // SAFETY: see the module; the array has `count` nodes.
        unsafe { slice::from_raw_parts(after, count) }
            .iter()
            .map(|node| number(node.0))
            .collect()
    };
    with(|state| {
        let made = state.handle();
        if let Some(code) = state.note(name, &format!("node {made}{given} after {after:?}")) {
            return code;
        }
        let nodes = state.nodes.entry(number(graph.0)).or_default();
        if !after.iter().all(|node| nodes.contains(node)) {
            return result::INVALID_VALUE;
        }
        nodes.push(made);
        // SAFETY: see the module.
        unsafe { *node = CUgraphNode(pointer(made)) };
        result::SUCCESS
    })
}

pub(super) unsafe extern "C" fn cuGraphAddKernelNode_v2(
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    parameters: *const CudaKernelNodeParams,
) -> CUresult {
    // SAFETY: see the module.
    let given = unsafe { kernel_node(parameters) };
    // SAFETY: see the module.
    unsafe { add("cuGraphAddKernelNode", &given, node, graph, after, count) }
}

pub(super) unsafe extern "C" fn cuGraphExecKernelNodeSetParams_v2(
    executable: CUgraphExec,
    node: CUgraphNode,
    parameters: *const CudaKernelNodeParams,
) -> CUresult {
    // SAFETY: see the module.
    let parameters = unsafe { kernel_node(parameters) };
    let (graph, node) = (number(executable.0), number(node.0));
    call(
        "cuGraphExecKernelNodeSetParams",
        &format!("graph {graph} node {node}{parameters}"),
        |state| match state.nodes.values().any(|nodes| nodes.contains(&node)) {
            true => result::SUCCESS,
            false => result::INVALID_VALUE,
        },
    )
}

/// Kernel, grid, block and pointers of a node.
unsafe fn kernel_node(parameters: *const CudaKernelNodeParams) -> String {
    // SAFETY: see the module.
    let parameters = unsafe { *parameters };
    let (kernel, sizes) = with(|state| {
        let kernel = kernel(state, parameters.function);
        let sizes = state.kernels.get(&kernel).cloned().unwrap_or_default();
        (kernel, sizes)
    });
    let pointers = sizes
        .iter()
        .enumerate()
        .filter(|(_, size)| **size == 8)
        // SAFETY: see the module; there is a pointer to each parameter, of the size that was declared.
        .map(|(index, _)| unsafe { (*parameters.parameters.add(index)).cast::<u64>().read_unaligned() });
    format!(
        " {kernel} grid {:?} block {:?} of {:x?}",
        parameters.grid,
        parameters.block,
        pointers.collect::<Vec<_>>()
    )
}

pub(super) unsafe extern "C" fn cuGraphAddMemcpyNode(
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    parameters: *const CudaMemcpy3D,
    _: CUcontext,
) -> CUresult {
    // SAFETY: see the module.
    let bytes = unsafe { (*parameters).width_in_bytes };
    // SAFETY: see the module.
    unsafe {
        add(
            "cuGraphAddMemcpyNode",
            &format!(" {bytes} bytes"),
            node,
            graph,
            after,
            count,
        )
    }
}

pub(super) unsafe extern "C" fn cuGraphAddMemsetNode(
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    parameters: *const CudaMemsetNodeParams,
    _: CUcontext,
) -> CUresult {
    // SAFETY: see the module.
    let parameters = unsafe { *parameters };
    let given = format!(" {} bytes to {}", parameters.width, parameters.value);
    // SAFETY: see the module.
    unsafe { add("cuGraphAddMemsetNode", &given, node, graph, after, count) }
}

pub(super) unsafe extern "C" fn cuGraphAddEmptyNode(
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
) -> CUresult {
    // SAFETY: see the module.
    unsafe { add("cuGraphAddEmptyNode", "", node, graph, after, count) }
}

pub(super) unsafe extern "C" fn cuGraphAddChildGraphNode(
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    child: CUgraph,
) -> CUresult {
    let inside = with(|state| state.nodes.get(&number(child.0)).map_or(0, Vec::len));
    let given = format!(" of {inside} nodes");
    // SAFETY: see the module.
    unsafe { add("cuGraphAddChildGraphNode", &given, node, graph, after, count) }
}

pub(super) unsafe extern "C" fn cuGraphGetNodes(
    graph: CUgraph,
    _: *mut CUgraphNode,
    count: *mut usize,
) -> CUresult {
    // SAFETY: see the module.
    unsafe { *count = with(|state| state.nodes.get(&number(graph.0)).map_or(0, Vec::len)) };
    result::SUCCESS
}

pub(super) unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut CUgraphExec,
    _: CUgraph,
    _: c_ulonglong,
) -> CUresult {
    call("cuGraphInstantiate", "", |state| {
        // SAFETY: see the module.
        unsafe { give(state, executable.cast()) }
    })
}

pub(super) unsafe extern "C" fn cuGraphUpload(_: CUgraphExec, stream: CUstream) -> CUresult {
    call(
        "cuGraphUpload",
        &format!("on stream {}", number(stream.0)),
        |_| result::SUCCESS,
    )
}

pub(super) unsafe extern "C" fn cuGraphLaunch(graph: CUgraphExec, stream: CUstream) -> CUresult {
    call(
        "cuGraphLaunch",
        &format!("graph {} on stream {}", number(graph.0), number(stream.0)),
        |_| result::SUCCESS,
    )
}

pub(super) unsafe extern "C" fn cuGraphExecDestroy(_: CUgraphExec) -> CUresult {
    call("cuGraphExecDestroy", "", |_| result::SUCCESS)
}

pub(super) unsafe extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, _: c_uint) -> CUresult {
    call(
        "cuStreamBeginCapture",
        &format!("stream {}", number(stream.0)),
        |state| {
            let graph = state.handle();
            state.capture(number(stream.0), graph, Vec::new());
            result::SUCCESS
        },
    )
}

pub(super) unsafe extern "C" fn cuStreamBeginCaptureToGraph(
    stream: CUstream,
    graph: CUgraph,
    after: *const CUgraphNode,
    _: *const c_void,
    count: usize,
    _: c_uint,
) -> CUresult {
    let last: Vec<usize> = if count == 0 {
        Vec::new()
    } else {
        // SAFETY: see the module; the array has `count` nodes.
        unsafe { slice::from_raw_parts(after, count) }
            .iter()
            .map(|node| number(node.0))
            .collect()
    };
    let given = format!("stream {} after {last:?}", number(stream.0));
    call("cuStreamBeginCaptureToGraph", &given, |state| {
        state.capture(number(stream.0), number(graph.0), last);
        result::SUCCESS
    })
}

pub(super) unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    status: *mut c_uint,
    _: *mut u64,
    graph: *mut CUgraph,
    last: *mut *const CUgraphNode,
    _: *mut *const c_void,
    count: *mut usize,
) -> CUresult {
    with(|state| {
        let Some(capture) = state.capturing.get(&number(stream.0)) else {
            return result::INVALID_VALUE;
        };
        state.last_nodes = capture.last.clone();
        // SAFETY: see the module; handles are pointers of the same size as the numbers.
        unsafe {
            *status = CAPTURING;
            *graph = CUgraph(pointer(capture.graph));
            *last = state.last_nodes.as_ptr().cast();
            *count = state.last_nodes.len();
        }
        result::SUCCESS
    })
}

pub(super) unsafe extern "C" fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> CUresult {
    call(
        "cuStreamEndCapture",
        &format!("stream {}", number(stream.0)),
        |state| match state.capturing.remove(&number(stream.0)) {
            Some(capture) if capture.invalidated => result::CAPTURE_INVALIDATED,
            Some(capture) => {
                // SAFETY: see the module.
                unsafe { *graph = CUgraph(pointer(capture.graph)) };
                result::SUCCESS
            }
            None => result::INVALID_VALUE,
        },
    )
}
