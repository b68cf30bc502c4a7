//! Which nodes of a graph run alone.
//!
//! A graph of nine branches, one of which has a kernel that uses local memory, fails where other processes
//! use the device at the same time: in a third of the processes where ten did, with "unspecified launch
//! failure" or without an end. That was measured with a step of 22 kernels, one of them with 64 bytes a
//! thread (H100 and H200, driver 580.159). A process that has the device for itself never failed, and of ten
//! at once none did with one branch or eight, without that kernel, with that kernel alone, or with two
//! queues to the device in place of eight (`CUDA_DEVICE_MAX_CONNECTIONS=2`), 20 to 40 processes each;
//! compute-sanitizer finds nothing in the kernels. So such kernels run alone. They are few: a good kernel
//! keeps what it has in registers.
//!
//! Calls of libraries are not looked at, though one of eight kernels in cuBLASLt for this architecture uses
//! local memory, and one of fourteen in cuDNN: to run so many alone would give up the branches. Whether they
//! fail so, too, has not been seen; the error of a lost device names the variable.

use std::collections::BTreeSet;

use super::Node;

/// The edges of a graph under construction that its operations do not ask for.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The last node that is to run alone. All nodes behind it come after it.
    alone: Option<Node>,
    /// Nodes that none comes after yet.
    last: BTreeSet<Node>,
}

impl Order {
    /// The nodes that one after `after` comes after, each once: the lonely node, too, unless one of `after`
    /// is it or comes after it.
    pub(super) fn edges(&self, after: &[Node]) -> BTreeSet<Node> {
        let missing = |alone: &Node| !after.iter().any(|node| node >= alone);
        after.iter().copied().chain(self.alone.filter(missing)).collect()
    }

    /// Notes that `node` was added after the nodes `after`.
    pub(super) fn add(&mut self, node: Node, after: &[Node]) {
        for before in self.edges(after) {
            self.last.remove(&before);
        }
        self.last.insert(node);
    }

    /// `after`, and what else a node comes after that runs beside none of those that are there.
    pub(super) fn all_before(&self, after: &[Node]) -> Vec<Node> {
        after.iter().chain(&self.last).copied().collect()
    }

    /// Has all nodes that are added from here on come after `node`, the last one.
    pub(super) fn put_alone(&mut self, node: Node) {
        self.alone = Some(node);
    }
}
