//! Facts about a graph that passes look up: who uses a value, and what identifies a graph.

use std::fmt;

use cranelift_entity::SecondaryMap;
use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use crate::{Graph, Node, Value};

/// Who uses each value. Made by [`Graph::users`]; says nothing about nodes added later.
#[derive(Clone, Debug)]
pub struct Users {
    nodes: SecondaryMap<Value, SmallVec<[Node; 2]>>,
    outputs: SecondaryMap<Value, u32>,
}

impl Users {
    /// The nodes that take `value` as an operand, in order; a node that takes it twice is listed twice.
    pub fn of(&self, value: Value) -> &[Node] {
        &self.nodes[value]
    }

    /// How many outputs of the graph are `value`.
    pub fn outputs(&self, value: Value) -> usize {
        self.outputs[value] as usize
    }

    /// Number of uses as an operand or an output.
    pub fn count(&self, value: Value) -> usize {
        self.of(value).len() + self.outputs(value)
    }

    /// The node that alone uses `value`, once, if the value is no output.
    pub fn single(&self, value: Value) -> Option<Node> {
        match (self.of(value), self.outputs(value)) {
            (&[node], 0) => Some(node),
            _ => None,
        }
    }
}

/// What a graph computes, as 32 bytes: SHA-256 of the text form without names and provenance. Equal
/// computations written in the same order have equal fingerprints, on every machine and in every process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Graph {
    /// The users of every value, in one pass.
    pub fn users(&self) -> Users {
        let mut users = Users {
            nodes: SecondaryMap::new(),
            outputs: SecondaryMap::new(),
        };
        for (id, node) in self.nodes() {
            for &input in &node.inputs {
                users.nodes[input].push(id);
            }
        }
        for output in &self.outputs {
            users.outputs[output.value] += 1;
        }
        users
    }

    /// What identifies this graph's computation.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(Sha256::digest(self.canonical_text()).into())
    }
}
