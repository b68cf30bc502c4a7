//! A graph that can be launched.

use std::ptr;
use std::sync::Arc;

use super::builder::{Kept, OwnedGraph};
use super::moving::Moving;
use crate::error::Result;
use crate::runtime::{Device, Storage, Stream};
use crate::sys::driver::CUgraphExec;

/// An instantiated graph, on its device. Dropping it waits for its last launch.
#[derive(Debug)]
pub struct StepGraph {
    executable: Executable,
    stream: Stream,
    /// How the error of a lost device names this graph as the last launch.
    label: Arc<str>,
    nodes: usize,
    /// The nodes whose arguments are changed, if there are such. Destroyed before the kernels that they name.
    _graph: Option<OwnedGraph>,
    kept: Kept,
    moving: Moving,
}

#[derive(Debug)]
struct Executable {
    device: Device,
    raw: CUgraphExec,
}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: instantiated once, destroyed here once.
            unsafe { (self.device.driver().cuGraphExecDestroy)(self.raw) };
        }
    }
}

impl Drop for StepGraph {
    fn drop(&mut self) {
        // A launch may be under way. Whoever waits for its results gets its error, if there is one.
        let _ = self.stream.synchronize();
    }
}

impl StepGraph {
    pub(super) fn instantiate(
        graph: OwnedGraph,
        name: &str,
        kept: Kept,
        moving: Moving,
        stream: &Stream,
    ) -> Result<Self> {
        let device = stream.device();
        let driver = device.driver();
        device.enter()?;
        let mut nodes = 0;
        // SAFETY: without an array the call counts; the pointer is to an integer on this stack.
        let code = unsafe { (driver.cuGraphGetNodes)(graph.raw, ptr::null_mut(), &raw mut nodes) };
        device.check("cuGraphGetNodes", code, || {
            format!("counting the nodes of graph `{name}`")
        })?;
        let mut raw = CUgraphExec::NULL;
        // SAFETY: the graph is complete; the pointer is to a handle on this stack.
        let code = unsafe { (driver.cuGraphInstantiateWithFlags)(&raw mut raw, graph.raw, 0) };
        device.check("cuGraphInstantiate", code, || {
            format!("instantiating graph `{name}` of {nodes} nodes")
        })?;
        let executable = Executable {
            device: device.clone(),
            raw,
        };
        // SAFETY: executable and stream are alive and of one device.
        let code = unsafe { (driver.cuGraphUpload)(raw, stream.raw()) };
        device.check("cuGraphUpload", code, || {
            format!("bringing graph `{name}` to the device")
        })?;
        let last = kept.kernels.last().map_or("none", |kernel| kernel.name());
        Ok(Self {
            executable,
            stream: stream.clone(),
            label: format!("graph `{name}` of {nodes} nodes, whose last kernel is `{last}`").into(),
            nodes,
            kept,
            _graph: (!moving.is_empty()).then_some(graph),
            moving,
        })
    }

    /// Has the next launch read memory `memory` ([`Arguments::moving`](crate::runtime::Arguments::moving)) in
    /// `storage`. Launches that are queued are not changed. Each such memory is to be said anew for each
    /// launch; one that no kernel reads is ignored.
    ///
    /// # Errors
    /// `CudaError::TwoDevices`, `CudaError::Driver`, `CudaError::Lost`.
    ///
    /// # Safety
    /// With pointers into this storage, each kernel must touch only what is inside of it and of the storages
    /// among its arguments, and none may write what the graph reads or writes elsewhere without an edge for it.
    pub unsafe fn point(&mut self, memory: u32, storage: &Arc<Storage>) -> Result<()> {
        let device = self.stream.device();
        device.same_as(storage.device(), "pointing a graph to other memory")?;
        self.moving.point(self.executable.raw, device, memory, storage)
    }

    /// Queues the whole graph on its stream and returns.
    ///
    /// # Errors
    /// `CudaError::Driver`, `CudaError::Lost`; `CudaError::Launch` if nobody has said where a memory is
    /// ([`StepGraph::point`]).
    pub fn launch(&mut self) -> Result<()> {
        // Kept until the launch is queued; freeing comes behind it.
        let _moving = self.moving.take_to(&self.stream, &self.label)?;
        for storage in &self.kept.storages {
            storage.take_to(&self.stream)?;
        }
        let device = self.stream.device();
        device.enter()?;
        device.note_launch(&self.label);
        // SAFETY: executable and stream are alive, and `&mut self` keeps a second launch from starting at the
        // same time.
        let code = unsafe { (device.driver().cuGraphLaunch)(self.executable.raw, self.stream.raw()) };
        device.check("cuGraphLaunch", code, || format!("launching {}", self.label))
    }

    /// The stream on which launches are queued.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// How many nodes the driver counts, those inside captured calls included.
    pub fn nodes(&self) -> usize {
        self.nodes
    }
}
