//! Schedule: which operations run together as one kernel, and in which order.
//!
//! The result is a list of [`Kernel`]s. A kernel is a fused loop nest ([`nest::Nest`]) or one operation of
//! the library; it reads and writes *buffers*, which are the values that need memory. [`fuse`] decides,
//! [`order`] puts the kernels into the order in which they run. The text form ([`Schedule::to_text`]) lists
//! kernels with what they read and write.

pub mod access;
pub mod class;
pub mod epilogue;
pub mod fuse;
pub mod inplace;
pub mod layout;
pub mod loops;
pub mod nest;
pub mod order;
pub mod power;
pub mod prologue;
pub mod recompute;
pub mod row_stages;
pub mod together;

use std::fmt::Write as _;
use std::sync::Arc;

use kiln_graph::{Graph, Node, Value};

use layout::Layouts;
use nest::Nest;
use prologue::Prologue;

/// Memory that a kernel reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Buffer {
    /// The row-major elements of a value. A value that leaves the graph lives in the memory of its first
    /// output.
    Value(Value),
    /// The memory of output number `.0`, where it is a second copy of a value or of an argument.
    Output(u32),
}

impl Buffer {
    /// What it holds once it is written.
    pub fn value(self, graph: &Graph) -> Value {
        match self {
            Self::Value(value) => value,
            Self::Output(output) => graph.outputs[output as usize].value,
        }
    }

    /// Its size.
    pub fn bytes(self, graph: &Graph) -> usize {
        graph.ty(self.value(graph)).bytes()
    }
}

/// What a kernel does.
#[derive(Clone, Debug)]
pub enum KernelKind {
    /// A fused loop nest.
    Nest(Box<Nest>),
    /// One operation from the library.
    Library(Node),
    /// A contraction whose result a nest consumes before it reaches memory ([`epilogue`]).
    Contraction(Node, Box<Nest>),
    /// Loop nests over different tensors that do not depend on each other ([`together`]).
    Together(Vec<Nest>),
}

/// One kernel of the schedule.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What it does.
    pub kind: KernelKind,
    /// Buffers read, in a fixed order.
    pub reads: Vec<Buffer>,
    /// Buffers written. A buffer that several kernels write (the parts of a concatenation) is complete after
    /// the last.
    pub writes: Vec<Buffer>,
    /// Nodes computed here, for people.
    pub nodes: Vec<Node>,
    /// Operands that are computed while they are read.
    pub prologues: Vec<Prologue>,
}

impl Kernel {
    /// The loop nests of this kernel, alone, after a contraction or side by side.
    pub fn nests(&self) -> &[Nest] {
        match &self.kind {
            KernelKind::Nest(nest) | KernelKind::Contraction(_, nest) => std::slice::from_ref(nest),
            KernelKind::Together(nests) => nests,
            KernelKind::Library(_) => &[],
        }
    }

    /// The prologue that makes an operand, if it is computed here.
    pub fn prologue(&self, operand: usize) -> Option<&Prologue> {
        self.prologues.iter().find(|prologue| prologue.operand == operand)
    }

    /// The values whose memory the elements stored to `buffer` may take over; none if they are not stored at
    /// one place.
    pub fn overwritable(&self, graph: &Graph, buffer: Buffer) -> Vec<Value> {
        let stores = |nest: &Nest| nest.stores.iter().filter(|store| store.buffer == buffer).count();
        let mut writers = self.nests().iter().filter(|nest| stores(nest) > 0);
        let (Some(nest), None) = (writers.next(), writers.next()) else {
            return Vec::new();
        };
        let [store] = nest
            .stores
            .iter()
            .filter(|store| store.buffer == buffer)
            .collect::<Vec<_>>()[..]
        else {
            return Vec::new();
        };
        let mut values = inplace::overwritable(graph, nest, store);
        // Nests side by side run in any order.
        let others = self.nests().iter().filter(|other| !std::ptr::eq(*other, nest));
        let read: Vec<Value> = others
            .flat_map(|other| other.uses.iter().map(|(value, _)| *value))
            .collect();
        values.retain(|value| !read.contains(value));
        if let KernelKind::Contraction(node, _) = &self.kind {
            // Other tiles still read the contraction's own operands.
            let operands = epilogue::operands(graph, *node, &self.reads);
            values.retain(|value| !operands.contains(value));
        }
        values.retain(|&value| {
            self.prologues
                .iter()
                .all(|prologue| prologue.nest.uses_of(value).is_empty())
        });
        values
    }
}

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
            for (word, buffers) in [("reads", &kernel.reads), ("writes", &kernel.writes)] {
                let list: Vec<String> = buffers.iter().map(|&buffer| buffer_text(graph, buffer)).collect();
                let _ = writeln!(text, "  {word} {}", list.join(", "));
            }
        }
        text
    }
}

fn buffer_text(graph: &Graph, buffer: Buffer) -> String {
    match buffer {
        Buffer::Value(value) => format!("{value} {}", graph.ty(value)),
        Buffer::Output(index) => format!("output {index}"),
    }
}
