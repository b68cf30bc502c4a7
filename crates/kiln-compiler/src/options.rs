//! Options of the step compiler.

use std::path::PathBuf;

use kiln_cpu::{Isa, Toolchain};
use kiln_partition::Machine;

pub use crate::partition::Keep;

/// What the compiler may assume and how far it goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Vector instructions that the generated code uses.
    pub isa: Isa,
    /// Most threads that will run the step. Sizes working memory; results do not depend on it.
    pub threads: usize,
    /// Whether operations are fused. Without, each is a kernel of its own: slow, for narrowing down a wrong result.
    pub fuse: bool,
    /// Whether an optimizer's update may run in the epilogue of the product that makes its gradient. Without, updates are kernels of their own, and all
    /// others are those of a step with other updates: for a step that runs once, before the one that lasts.
    pub update_in_epilogue: bool,
    /// Whether the graph is simplified and rewritten first.
    pub transform: bool,
    /// What the backward pass keeps of the forward pass.
    pub keep: Keep,
    /// What the machine that runs the step can do ([`crate::rates`]): what the partitioner weighs keeping against computing again with.
    pub machine: Machine,
    /// Whether to keep the text of the graph after each pass.
    pub dump: bool,
    /// Folder in which to write what each stage made ([`crate::debug`]); none to write nothing.
    pub debug: Option<PathBuf>,
}

impl Options {
    /// The options for code built by `toolchain` and run by `threads` threads, on a machine like the project's reference machine.
    pub fn new(toolchain: &Toolchain, threads: usize) -> Self {
        Self {
            isa: toolchain.isa(),
            threads: threads.max(1),
            fuse: true,
            update_in_epilogue: true,
            transform: true,
            keep: Keep::default(),
            machine: Machine::default(),
            dump: false,
            debug: None,
        }
    }

    /// What of the options the generated code depends on, for cache keys.
    pub fn identity(&self) -> String {
        format!(
            "{} threads={} fuse={} update_in_epilogue={} transform={} keep={} machine={:?}",
            self.isa,
            self.threads,
            self.fuse,
            self.update_in_epilogue,
            self.transform,
            self.keep,
            self.machine
        )
    }
}
