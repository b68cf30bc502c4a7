//! In which branch of a graph each node goes.
//!
//! A graph has at most eight branches, sequences of nodes in which each comes after the one before it: with
//! more, kernels that use local memory fail where other processes use the device at the same time. A step of
//! nine branches with one such kernel (64 bytes a thread), run by ten processes at once, ended with
//! "unspecified launch failure" or never in 24 of 30 processes; in eight branches it did in none of 80, in
//! four in none of 40, and with the kernel left out in none of 20 (H100 and H200, driver 580.159). A device
//! has eight queues by default, but with four (`CUDA_DEVICE_MAX_CONNECTIONS`) nine branches did not fail.
//! Tools find nothing in the kernels, and a process that has the device for itself never failed: it seems to
//! be the driver's fault. One of eight kernels of cuBLASLt uses local memory, and one of fourteen of cuDNN,
//! so it is the branches that are limited, not the kernels.
//!
//! A node continues a branch whose last node it comes after. Where there is none, and no branch is left, it
//! also comes after the last node of the one that was continued the longest ago. Calls that other devices
//! wait for have the eighth branch for themselves. Steps of bert-base, llama-125m and resnet50, which would
//! have 17, 27 and 45 branches, get 9 to 37 edges so, and take the same time.

use std::array;

use super::Node;

/// The most branches of a graph.
const BRANCHES: usize = 8;

/// The branch of calls that other devices wait for: nothing else goes there, so that nothing waits for them
/// without need.
const URGENT: usize = BRANCHES - 1;

/// The branches of a graph under construction.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The end of each branch.
    ends: Ends,
    /// Of each node the end of each branch among those nodes that it comes after, and itself.
    seen: Vec<Ends>,
}

/// How many nodes the graph had when each branch was continued for the last time; zero for one without nodes.
type Ends = [u32; BRANCHES];

/// Where a node goes.
#[derive(Debug)]
pub(super) struct Position {
    /// The nodes that it comes after, each once.
    pub(super) after: Vec<Node>,
    branch: usize,
}

impl Order {
    /// Where the next node goes if it is to come after the nodes `after`.
    pub(super) fn next(&self, after: &[Node]) -> Position {
        let seen = self.seen(after);
        // The latest, so that the others are left to nodes that come after less; new ones are the last.
        let continued = (0..URGENT)
            .filter(|&branch| self.ends[branch] == seen[branch])
            .max_by_key(|&branch| self.ends[branch]);
        let idle = || (0..URGENT).min_by_key(|&branch| self.ends[branch]);
        let branch = continued.or_else(idle).expect("a graph has branches");
        self.position(after, seen, branch)
    }

    /// The same for a call that other devices wait for.
    pub(super) fn next_urgent(&self, after: &[Node]) -> Position {
        self.position(after, self.seen(after), URGENT)
    }

    fn position(&self, after: &[Node], seen: Ends, branch: usize) -> Position {
        let end = self.ends[branch];
        let missing = (end > seen[branch]).then(|| Node(end - 1));
        let mut after: Vec<Node> = after.iter().copied().chain(missing).collect();
        after.sort_unstable();
        after.dedup();
        Position { after, branch }
    }

    /// Notes that the next node went there.
    pub(super) fn add(&mut self, position: &Position) {
        let mut seen = self.seen(&position.after);
        let end = u32::try_from(self.seen.len() + 1).expect("fewer than 2^32 nodes");
        seen[position.branch] = end;
        self.ends[position.branch] = end;
        self.seen.push(seen);
    }

    /// The end of each branch among the nodes `after` and those that they come after.
    fn seen(&self, after: &[Node]) -> Ends {
        // Nodes of another graph are refused by the builder.
        let seen: Vec<&Ends> = after
            .iter()
            .filter_map(|node| self.seen.get(node.0 as usize))
            .collect();
        array::from_fn(|branch| seen.iter().map(|ends| ends[branch]).max().unwrap_or(0))
    }
}
