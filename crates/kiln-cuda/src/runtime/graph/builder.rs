//! Building a graph, node by node.

use std::ffi::{c_uint, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use super::moving::Moving;
use super::order::{Order, Position};
use super::step::StepGraph;
use crate::error::{CudaError, Result};
use crate::libraries::Driver;
use crate::ranks::Ranks;
use crate::runtime::{Device, Kernel, Launch, Storage, Stream};
use crate::sys::driver::{
    CAPTURE_MODE_THREAD_LOCAL, CUgraph, CUgraphNode, CopyEnd, CudaKernelNodeParams, CudaMemcpy3D,
    CudaMemsetNodeParams, MEMORY_TYPE_DEVICE,
};

/// A node of the graph under construction, which later nodes name to come after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node(pub(super) u32);

/// A graph under construction.
#[derive(Debug)]
pub struct GraphBuilder {
    device: Device,
    name: String,
    graph: OwnedGraph,
    nodes: Vec<CUgraphNode>,
    /// Library calls are captured on a stream that does nothing else.
    capture: Stream,
    /// Those of [`GraphBuilder::capture_apart`], on another one.
    urgent: Option<Stream>,
    kept: Kept,
    moving: Moving,
    order: Order,
    /// Whether a call could not be captured: the graph may have a part of it.
    incomplete: bool,
}

/// Kernels and storages that must live as long as the graph.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) storages: Vec<Arc<Storage>>,
    pub(super) kernels: Vec<Kernel>,
    /// NCCL, whose captured calls use its memory.
    pub(super) ranks: Option<Ranks>,
}

impl Kept {
    fn storage(&mut self, storage: &Arc<Storage>) {
        self.storages.push(storage.clone());
    }

    /// Each storage once.
    fn without_repeats(mut self) -> Self {
        self.storages.sort_by_key(Arc::as_ptr);
        self.storages.dedup_by(|a, b| Arc::ptr_eq(a, b));
        self
    }
}

/// Where the driver adds a node.
struct Place<'a> {
    /// Gets its name.
    node: *mut CUgraphNode,
    graph: CUgraph,
    after: &'a [CUgraphNode],
}

/// A graph of the driver's, destroyed when dropped.
#[derive(Debug)]
pub(super) struct OwnedGraph {
    device: Device,
    pub(super) raw: CUgraph,
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        // A capture that was broken off leaves none.
        if self.raw != CUgraph::NULL && self.device.enter().is_ok() {
            // SAFETY: created by `GraphBuilder`, destroyed here once. What was instantiated from it lives on.
            unsafe { (self.device.driver().cuGraphDestroy)(self.raw) };
        }
    }
}

impl GraphBuilder {
    /// An empty graph on `device`. `name` is for messages.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn new(device: &Device, name: &str) -> Result<Self> {
        device.enter()?;
        let mut raw = CUgraph::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let code = unsafe { (device.driver().cuGraphCreate)(&raw mut raw, 0) };
        device.check("cuGraphCreate", code, || format!("making graph `{name}`"))?;
        Ok(Self {
            device: device.clone(),
            name: name.to_owned(),
            graph: OwnedGraph {
                device: device.clone(),
                raw,
            },
            nodes: Vec::new(),
            capture: device.stream()?,
            urgent: None,
            kept: Kept::default(),
            moving: Moving::default(),
            order: Order::default(),
            incomplete: false,
        })
    }

    /// Adds a kernel after the nodes `after`.
    ///
    /// # Errors
    /// [`CudaError::Launch`], [`CudaError::TwoDevices`], [`CudaError::Driver`], [`CudaError::Lost`].
    ///
    /// # Safety
    /// With these arguments the kernel must touch only the storages among them, inside their sizes. Nodes
    /// that touch the same bytes, one of them writing, must be ordered by edges.
    pub unsafe fn kernel(&mut self, after: &[Node], launch: &Launch) -> Result<Node> {
        self.device
            .same_as(launch.kernel.device(), "adding a kernel to a graph")?;
        launch.prepare()?;
        let mut pointers = launch.arguments.pointers();
        let parameters = kernel_node(launch, &mut pointers);
        let position = self.order.next(after);
        let what = || format!("kernel `{}`", launch.kernel.name());
        // SAFETY: there are as many arguments, of the sizes that the kernel has (`prepare`), and the driver
        // copies them; the nodes are of this graph. Kernel and storages are kept as long as the graph.
        let node = self.insert("cuGraphAddKernelNode", what, position, |driver, to| unsafe {
            (driver.cuGraphAddKernelNode_v2)(
                to.node,
                to.graph,
                to.after.as_ptr(),
                to.after.len(),
                &raw const parameters,
            )
        })?;
        self.kept.storages.extend_from_slice(launch.arguments.storages());
        self.kept.kernels.push(launch.kernel.clone());
        if launch.arguments.moves().next().is_some() {
            self.moving.add(self.nodes[node.0 as usize], launch);
        }
        Ok(node)
    }

    /// Adds a copy of bytes `range` of `from` to byte `at` of `to`. Two ranges of one storage must not
    /// overlap.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn copy(
        &mut self,
        after: &[Node],
        from: &Arc<Storage>,
        range: Range<usize>,
        to: &Arc<Storage>,
        at: usize,
    ) -> Result<Node> {
        const ACTION: &str = "adding a copy to a graph";
        self.device.same_as(from.device(), ACTION)?;
        self.device.same_as(to.device(), ACTION)?;
        let parameters = CudaMemcpy3D {
            source: device_end(from.part(&range, ACTION)?),
            destination: device_end(to.part(&(at..at.saturating_add(range.len())), ACTION)?),
            width_in_bytes: range.len(),
            height: 1,
            depth: 1,
        };
        if range.is_empty() {
            return self.join(after);
        }
        let context = self.device.context();
        let position = self.order.next(after);
        let what = || "a copy".to_owned();
        // SAFETY: both ranges are inside their storages, which are kept as long as the graph; the nodes are
        // its own.
        let node = self.insert("cuGraphAddMemcpyNode", what, position, |driver, to| unsafe {
            (driver.cuGraphAddMemcpyNode)(
                to.node,
                to.graph,
                to.after.as_ptr(),
                to.after.len(),
                &raw const parameters,
                context,
            )
        })?;
        self.kept.storage(from);
        self.kept.storage(to);
        Ok(node)
    }

    /// Adds setting bytes `range` of `to` to `value`.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn fill(
        &mut self,
        after: &[Node],
        to: &Arc<Storage>,
        range: Range<usize>,
        value: u8,
    ) -> Result<Node> {
        const ACTION: &str = "adding a fill to a graph";
        self.device.same_as(to.device(), ACTION)?;
        let parameters = CudaMemsetNodeParams {
            destination: to.part(&range, ACTION)?,
            pitch: 0,
            value: c_uint::from(value),
            element_size: 1,
            width: range.len(),
            height: 1,
        };
        if range.is_empty() {
            return self.join(after);
        }
        let context = self.device.context();
        let position = self.order.next(after);
        let what = || "a fill".to_owned();
        // SAFETY: the range is inside the storage, which is kept as long as the graph; the nodes are its own.
        let node = self.insert("cuGraphAddMemsetNode", what, position, |driver, to| unsafe {
            (driver.cuGraphAddMemsetNode)(
                to.node,
                to.graph,
                to.after.as_ptr(),
                to.after.len(),
                &raw const parameters,
                context,
            )
        })?;
        self.kept.storage(to);
        Ok(node)
    }

    /// Adds a node that does nothing: a single name for "all of these nodes are over".
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn join(&mut self, after: &[Node]) -> Result<Node> {
        let position = self.order.next(after);
        let node = self.join_raw(&self.raw(&position)?)?;
        Ok(self.add(node, &position))
    }

    /// Adds whatever `call` queues on the stream that it is given, as if it were queued where these nodes
    /// stand. `storages` are all that the call uses.
    ///
    /// # Errors
    /// Those of `call`; [`CudaError::Captured`] and [`CudaError::Driver`] for what cannot be captured, such
    /// as copies from the host and waiting; [`CudaError::Lost`]. After an error the graph takes nothing more.
    pub fn capture(
        &mut self,
        after: &[Node],
        storages: &[&Arc<Storage>],
        call: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Node> {
        let stream = self.capture.clone();
        let position = self.order.next(after);
        let raw = self.raw(&position)?;
        self.device.enter()?;
        let device = self.device.clone();
        let _capturing = device.begin_capture();
        let driver = self.device.driver();
        // SAFETY: the nodes are of this graph; without edge data edges are plain.
        let code = unsafe {
            (driver.cuStreamBeginCaptureToGraph)(
                stream.raw(),
                self.graph.raw,
                raw.as_ptr(),
                ptr::null(),
                raw.len(),
                CAPTURE_MODE_THREAD_LOCAL,
            )
        };
        self.check("cuStreamBeginCaptureToGraph", code, || "a library's call".into())?;
        // From here on the graph may have nodes that use the storages; it is complete again only at the
        // end.
        storages.iter().for_each(|storage| self.kept.storage(storage));
        self.incomplete = true;
        stream.set_capturing(true);
        let called = call(&stream);
        stream.set_capturing(false);
        let last = self.captured_last(&stream);
        self.device.enter()?;
        let mut graph = CUgraph::NULL;
        // SAFETY: the capture was begun above, on this thread.
        let code = unsafe { (driver.cuStreamEndCapture)(stream.raw(), &raw mut graph) };
        called?;
        self.check("cuStreamEndCapture", code, || "a library's call".into())?;
        let last = last?;
        self.incomplete = false;
        let node = match last[..] {
            [node] => node,
            _ => self.join_raw(&last)?,
        };
        Ok(self.add(node, &position))
    }

    /// Captures whatever `call` queues into a graph of its own, which becomes one node of this graph, after
    /// the nodes `after`. The call's kernels start before others that could start at the same time, because
    /// other devices wait for them. `storages` are all that the call uses.
    ///
    /// NCCL needs this: it remembers its streams of a capture by the number of the graph that is captured,
    /// and takes a second capture into one graph for the first, which is over (NCCL 2.28).
    ///
    /// # Errors
    /// As [`GraphBuilder::capture`], but the graph has nothing of a call that failed, and takes more.
    pub fn capture_apart(
        &mut self,
        after: &[Node],
        storages: &[&Arc<Storage>],
        call: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Node> {
        let stream = match &self.urgent {
            Some(stream) => stream.clone(),
            None => self.urgent.insert(self.device.urgent_stream()?).clone(),
        };
        self.refuse_if_incomplete()?;
        self.device.enter()?;
        let device = self.device.clone();
        let capturing = device.begin_capture();
        // SAFETY: the stream is this builder's and is not capturing.
        let code = unsafe {
            (self.device.driver().cuStreamBeginCapture_v2)(stream.raw(), CAPTURE_MODE_THREAD_LOCAL)
        };
        self.check("cuStreamBeginCapture", code, || "a library's call".into())?;
        stream.set_capturing(true);
        let called = call(&stream);
        stream.set_capturing(false);
        self.device.enter()?;
        let mut raw = CUgraph::NULL;
        // SAFETY: the capture was begun above, on this thread.
        let code = unsafe { (self.device.driver().cuStreamEndCapture)(stream.raw(), &raw mut raw) };
        // The node below has a copy of its own.
        let part = OwnedGraph {
            device: self.device.clone(),
            raw,
        };
        drop(capturing);
        called?;
        self.check("cuStreamEndCapture", code, || "a library's call".into())?;
        let position = self.order.next_urgent(after);
        let what = || "a library's call".to_owned();
        // SAFETY: both graphs live, and the nodes are of this one. What the call uses is kept below.
        let node = self.insert("cuGraphAddChildGraphNode", what, position, |driver, to| unsafe {
            (driver.cuGraphAddChildGraphNode)(to.node, to.graph, to.after.as_ptr(), to.after.len(), part.raw)
        })?;
        storages.iter().for_each(|storage| self.kept.storage(storage));
        Ok(node)
    }

    /// Keeps the ranks as long as the graph.
    pub(crate) fn keep_ranks(&mut self, ranks: &Ranks) {
        self.kept.ranks.get_or_insert_with(|| ranks.clone());
    }

    /// How many nodes were added, each capture counting as one.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Makes the graph launchable on `stream` and brings it to the device.
    ///
    /// # Errors
    /// [`CudaError::TwoDevices`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn instantiate(self, stream: &Stream) -> Result<StepGraph> {
        self.device.same_as(stream.device(), "instantiating a graph")?;
        self.refuse_if_incomplete()?;
        StepGraph::instantiate(
            self.graph,
            &self.name,
            self.kept.without_repeats(),
            self.moving,
            stream,
        )
    }

    /// The captured nodes that no captured node comes after.
    fn captured_last(&self, stream: &Stream) -> Result<Vec<CUgraphNode>> {
        let (mut status, mut id, mut graph) = (0, 0, CUgraph::NULL);
        let (mut last, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
        self.device.enter()?;
        // SAFETY: all pointers are to values on this stack.
        let code = unsafe {
            (self.device.driver().cuStreamGetCaptureInfo_v3)(
                stream.raw(),
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut last,
                &raw mut edges,
                &raw mut count,
            )
        };
        self.check("cuStreamGetCaptureInfo", code, || "a library's call".into())?;
        if last.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: the driver's array has `count` nodes and lives until the next call with this stream.
        Ok(unsafe { std::slice::from_raw_parts(last, count) }.to_vec())
    }

    /// An empty node after these.
    fn join_raw(&self, after: &[CUgraphNode]) -> Result<CUgraphNode> {
        let (mut node, call) = (CUgraphNode::NULL, "cuGraphAddEmptyNode");
        self.device.enter()?;
        // SAFETY: the nodes are of this graph; the pointer is to a handle on this stack.
        let code = unsafe {
            let add = self.device.driver().cuGraphAddEmptyNode;
            add(&raw mut node, self.graph.raw, after.as_ptr(), after.len())
        };
        self.check(call, code, || "a join".into())?;
        Ok(node)
    }

    /// Adds the node that `add` makes by the driver's function `call`, where `position` says. `add` returns
    /// the driver's code. `what` names the node in messages.
    fn insert(
        &mut self,
        call: &'static str,
        what: impl FnOnce() -> String,
        position: Position,
        add: impl FnOnce(&Driver, Place<'_>) -> i32,
    ) -> Result<Node> {
        let raw = self.raw(&position)?;
        self.device.enter()?;
        let mut node = CUgraphNode::NULL;
        let to = Place {
            node: &raw mut node,
            graph: self.graph.raw,
            after: &raw,
        };
        let code = add(self.device.driver(), to);
        self.check(call, code, what)?;
        Ok(self.add(node, &position))
    }

    /// Notes that `node` was added where `position` says.
    fn add(&mut self, node: CUgraphNode, position: &Position) -> Node {
        let index = u32::try_from(self.nodes.len()).expect("fewer than 2^32 nodes");
        self.nodes.push(node);
        self.order.add(position);
        Node(index)
    }

    /// The driver's names of the nodes that one at `position` comes after.
    fn raw(&self, position: &Position) -> Result<Vec<CUgraphNode>> {
        self.refuse_if_incomplete()?;
        position
            .after
            .iter()
            .map(|node| self.nodes.get(node.0 as usize).copied())
            .collect::<Option<_>>()
            .ok_or_else(|| CudaError::Launch {
                kernel: self.name.clone(),
                reason: "an edge comes from a node of another graph".into(),
            })
    }

    fn refuse_if_incomplete(&self) -> Result<()> {
        if self.incomplete {
            return Err(CudaError::IncompleteGraph {
                graph: self.name.clone(),
            });
        }
        Ok(())
    }

    fn check(&self, call: &'static str, code: i32, what: impl FnOnce() -> String) -> Result<()> {
        self.device.check(call, code, || {
            format!("adding {} to graph `{}`", what(), self.name)
        })
    }
}

/// A launch as the driver takes it. `pointers` are those of its arguments, and are read through.
pub(super) fn kernel_node(launch: &Launch, pointers: &mut [*mut c_void]) -> CudaKernelNodeParams {
    CudaKernelNodeParams {
        function: launch.kernel.raw(),
        grid: launch.grid,
        block: launch.block,
        shared_bytes: launch.shared_bytes,
        parameters: pointers.as_mut_ptr(),
        extra: ptr::null_mut(),
        kernel: ptr::null_mut(),
        context: launch.kernel.device().context(),
    }
}

/// An end of a copy in the device's memory.
fn device_end(address: u64) -> CopyEnd {
    CopyEnd {
        x_in_bytes: 0,
        y: 0,
        z: 0,
        level_of_detail: 0,
        memory_type: MEMORY_TYPE_DEVICE,
        host: ptr::null_mut(),
        device: address,
        array: ptr::null_mut(),
        reserved: ptr::null_mut(),
        pitch: 0,
        height: 0,
    }
}
