//! Kernels: the units that a step launches.

use kiln_graph::{Graph, Node, Op, Phase, Value};

use super::buffer::Buffer;
use super::nest::Nest;
use super::prologue::Prologue;
use super::{epilogue, inplace};

/// What a kernel does.
#[derive(Clone, Debug)]
pub enum KernelKind {
    /// A fused loop nest.
    Nest(Box<Nest>),
    /// One operation from the library.
    Library(Node),
    /// A contraction whose result a nest consumes before it reaches memory ([`super::epilogue`]).
    Contraction(Node, Box<Nest>),
    /// Loop nests over different tensors that do not depend on each other ([`super::together`]).
    Together(Vec<Nest>),
}

/// What a collective that gives each element of its operand another value works on in place, and its wait.
fn in_place(graph: &Graph, node: Node, buffer: Buffer) -> Vec<Value> {
    let data = graph.node(node);
    let is_in_place = match data.op {
        Op::CollectiveWait => true,
        Op::Collective(it) => it.kind.is_in_place(),
        _ => false,
    };
    match is_in_place && buffer == Buffer::Value(data.outputs[0]) {
        true => vec![data.inputs[0]],
        false => Vec::new(),
    }
}

/// Where in a larger buffer a kernel stores its result ([`super::parts`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The result, all of it and contiguous.
    pub value: Value,
    /// The value whose buffer it is a part of.
    pub of: Value,
    /// The position of its first element there.
    pub start: usize,
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
    /// The part of the buffer it writes that its result is, if that is not all of the buffer.
    pub part: Option<Part>,
}

impl Kernel {
    /// The buffers whose elements it stores: those that it writes, or its part of the one that it writes.
    pub fn stored(&self) -> Vec<Buffer> {
        match self.part {
            Some(part) => vec![Buffer::Value(part.value)],
            None => self.writes.clone(),
        }
    }

    /// What kind of kernel it is, which names of functions begin with.
    pub fn kind_name(&self, graph: &Graph) -> &str {
        let op = |&node: &Node| &graph.node(node).op;
        match &self.kind {
            KernelKind::Nest(nest) if nest.split.is_some() => "rows",
            KernelKind::Nest(nest) if nest.members.is_empty() => "copy",
            KernelKind::Nest(_) => "points",
            KernelKind::Together(_) => {
                let mut phases = self.nodes.iter().map(|&node| graph.node(node).provenance.phase);
                let same = |&node: &Node| {
                    let data = graph.node(node);
                    graph.dtype(data.inputs[0]) == graph.dtype(data.outputs[0])
                };
                match self.nodes.iter().all(|node| matches!(op(node), Op::Cast(_))) {
                    true if self.nodes.iter().all(same) => "copies",
                    true => "casts",
                    false if phases.any(|phase| phase == Phase::Optimizer) => "updates",
                    false => "pieces",
                }
            }
            KernelKind::Library(node) | KernelKind::Contraction(node, _) => op(node).name(),
        }
    }

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
        if let KernelKind::Library(node) = self.kind {
            return in_place(graph, node, buffer);
        }
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
        let in_tiles = matches!(self.kind, KernelKind::Contraction(..));
        let mut values = inplace::overwritable(graph, nest, store, in_tiles);
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
