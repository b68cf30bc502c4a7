//! Schedule: which operations run together as one kernel, and in which order.
//!
//! The result is a list of [`Kernel`]s. A kernel is a fused loop nest ([`nest::Nest`]) or one operation of
//! the library; it reads and writes *buffers*, which are the values that need memory. [`fuse`] decides,
//! [`order`] puts the kernels into the order in which they run. The text form ([`Schedule::to_text`]) lists
//! kernels with what they read and write.

pub mod access;
pub mod attention;
pub mod bits;
pub mod buffer;
pub mod class;
pub mod decided;
pub mod epilogue;
pub mod fuse;
pub mod inplace;
pub mod integers;
pub mod kernel;
pub mod layout;
pub mod loops;
pub mod nest;
pub mod order;
pub mod parts;
pub mod power;
pub mod prologue;
pub mod recompute;
pub mod row_stages;
pub mod together;

use std::fmt::Write as _;
use std::sync::Arc;

use kiln_graph::Graph;
use rustc_hash::FxHashMap;

use layout::Layouts;

pub use buffer::Buffer;
pub use kernel::{Kernel, KernelKind};

/// Kernels in the order in which they run.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// The kernels.
    pub kernels: Vec<Kernel>,
    /// Values that are not stored row-major.
    pub layouts: Arc<Layouts>,
}

impl Schedule {
    /// One paragraph for each kernel: what it computes, reads and writes.
    pub fn to_text(&self, graph: &Graph) -> String {
        let mut text = String::new();
        for (value, order) in self.layouts.iter() {
            let _ = writeln!(text, "layout of {value} {}: {order:?}", graph.ty(*value));
        }
        for (number, kernel) in self.kernels.iter().enumerate() {
            let names: Vec<&str> = kernel
                .nodes
                .iter()
                .map(|&node| graph.node(node).op.name())
                .collect();
            let _ = writeln!(text, "kernel {number}: {}", names.join(" "));
            for nest in kernel.nests() {
                let _ = writeln!(text, "  loops {}", nest.loops_text());
            }
            for prologue in &kernel.prologues {
                let _ = writeln!(
                    text,
                    "  operand {} computed: {}",
                    prologue.operand, prologue.value
                );
            }
            if let Some(part) = kernel.part {
                let _ = writeln!(text, "  {} from element {}", part.value, part.start);
            }
            for (word, buffers) in [("reads", &kernel.reads), ("writes", &kernel.writes)] {
                let list: Vec<String> = buffers.iter().map(|buffer| buffer.to_text(graph)).collect();
                let _ = writeln!(text, "  {word} {}", list.join(", "));
            }
        }
        text
    }

    /// For each index check ([`crate::checks`]) the kernel after which it can be decided: the last that makes
    /// the least or the largest of its indices.
    pub fn checks_decided_after(&self, graph: &Graph) -> Vec<usize> {
        let extremes: Vec<usize> = (0..graph.outputs.len())
            .filter(|&output| graph.outputs[output].check)
            .collect();
        let mut last: FxHashMap<Buffer, usize> = FxHashMap::default();
        for (number, kernel) in self.kernels.iter().enumerate() {
            last.extend(kernel.writes.iter().map(|&buffer| (buffer, number)));
        }
        let made = |output: usize| {
            let own = last.get(&Buffer::Output(output as u32));
            own.or_else(|| last.get(&Buffer::Value(graph.outputs[output].value)))
                .copied()
                .unwrap_or(0)
        };
        extremes
            .chunks(2)
            .map(|pair| pair.iter().map(|&output| made(output)).max().unwrap_or(0))
            .collect()
    }
}
