//! Memory that is elsewhere at each launch of a graph.
//!
//! A kernel's node holds the addresses of its arguments, and the driver lets them be changed in front of a
//! launch: large inputs of a step, such as a batch of images, need not be copied to where the graph expects
//! them. The nodes that libraries have captured cannot be changed so, because Kiln does not know which of
//! their bytes are addresses.

use std::sync::Arc;

use super::builder::kernel_node;
use crate::error::{CudaError, Result};
use crate::runtime::{Device, Launch, Storage, Stream};
use crate::sys::driver::{CUgraphExec, CUgraphNode};

/// The memories of a graph that are elsewhere at each launch, and the kernels that read them.
#[derive(Debug, Default)]
pub(super) struct Moving {
    readers: Vec<Reader>,
    memories: Vec<Memory>,
}

/// A kernel with pointers to such memory.
#[derive(Debug)]
struct Reader {
    node: CUgraphNode,
    /// With the addresses that the node has now.
    launch: Launch,
}

#[derive(Debug)]
struct Memory {
    number: u32,
    /// The address that all readers have; none before the first launch, and after an error.
    address: Option<u64>,
    /// Where it is at the next launch.
    next: Option<Arc<Storage>>,
}

impl Moving {
    /// Notes the node of `launch`, which has such pointers.
    pub(super) fn add(&mut self, node: CUgraphNode, launch: &Launch) {
        for number in launch.arguments.moves() {
            if self.memories.iter().all(|memory| memory.number != number) {
                self.memories.push(Memory {
                    number,
                    address: None,
                    next: None,
                });
            }
        }
        let launch = launch.clone();
        self.readers.push(Reader { node, launch });
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.memories.is_empty()
    }

    /// Has the kernels of `executable` read memory `number` in `storage` at the next launch.
    pub(super) fn point(
        &mut self,
        executable: CUgraphExec,
        device: &Device,
        number: u32,
        storage: &Arc<Storage>,
    ) -> Result<()> {
        let Some(memory) = self.memories.iter_mut().find(|memory| memory.number == number) else {
            // No kernel reads it.
            return Ok(());
        };
        let address = storage.address();
        if memory.address != Some(address) {
            // An error leaves some readers with the address before, and some with this one.
            memory.address = None;
            device.enter()?;
            for Reader { node, launch } in &mut self.readers {
                if !launch.arguments.point(number, address) {
                    continue;
                }
                let mut pointers = launch.arguments.pointers();
                let parameters = kernel_node(launch, &mut pointers);
                // SAFETY: the node is one of the graph that was instantiated, which lives as long as the
                // executable; the driver copies the arguments, of which there are as many as before.
                let code = unsafe {
                    (device.driver().cuGraphExecKernelNodeSetParams_v2)(
                        executable,
                        *node,
                        &raw const parameters,
                    )
                };
                device.check("cuGraphExecKernelNodeSetParams", code, || {
                    format!("pointing kernel `{}` to other memory", launch.kernel.name())
                })?;
            }
            memory.address = Some(address);
        }
        memory.next = Some(storage.clone());
        Ok(())
    }

    /// The storages of the next launch on `stream`, which are to be kept until it is queued. Each memory must
    /// have been pointed somewhere since the last one. `label` names the graph.
    pub(super) fn take_to(&mut self, stream: &Stream, label: &str) -> Result<Vec<Arc<Storage>>> {
        let take = |memory: &mut Memory| {
            let number = memory.number;
            let storage = memory.next.take().ok_or_else(|| CudaError::Launch {
                kernel: label.to_owned(),
                reason: format!("nobody has said where its memory {number} is"),
            })?;
            storage.take_to(stream)?;
            Ok(storage)
        };
        self.memories.iter_mut().map(take).collect()
    }
}
