//! Buffers: the memory that kernels read and write.

use kiln_graph::{Graph, Value};

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
    /// The value that it holds once it is written.
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

    /// Its name and type, for people.
    pub fn to_text(self, graph: &Graph) -> String {
        match self {
            Self::Value(value) => format!("{value} {}", graph.ty(value)),
            Self::Output(index) => format!("output {index}"),
        }
    }
}
