//! An operation of a recording in words: its parts with their names.
//!
//! Tensors are named by position, like in the words that guards compare ([`super::recording`]), so that two
//! recordings of one step have equal words. Debug dumps print them ([`super::stream_text`]); guards keep
//! them to say what changed ([`super::guard`]).

use std::fmt;

use burn_ir::{OperationIr, ScalarIr, TensorId, TensorIr};
use rustc_hash::FxHashMap;

use super::recording::Recorded;
use crate::stream::{self, Reader};

/// Which tensor of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// An input, by order of first use.
    Input(usize),
    /// A result, by order of definition.
    Result(usize),
}

/// `in3`, `r5`
impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(index) => write!(f, "in{index}"),
            Self::Result(index) => write!(f, "r{index}"),
        }
    }
}

/// A part of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part {
    /// A tensor that it reads; none if the recording does not know it.
    Operand(Option<Position>),
    /// A number that is given with each run; only its kind is part of the step.
    Runtime(&'static str),
    /// A number that is part of the step.
    Scalar(Box<str>),
    /// An attribute.
    Attribute(Box<str>),
    /// A tensor that it defines, with type and shape.
    Result(usize, Box<str>),
}

/// A part with its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    /// Its name in Burn's stream.
    pub name: &'static str,
    /// The part.
    pub part: Part,
}

/// Names the tensors of a recording while its operations are read, in order.
#[derive(Default)]
pub struct Words {
    positions: FxHashMap<TensorId, Position>,
    results: usize,
}

impl Words {
    /// The words of the recording's inputs are known, none of its results.
    pub fn new(recorded: &Recorded) -> Self {
        let inputs = recorded.inputs.iter().enumerate();
        Self {
            positions: inputs
                .map(|(index, input)| (input.ir.id, Position::Input(index)))
                .collect(),
            results: 0,
        }
    }

    /// The parts of each operation of a recording.
    pub fn of_all(recorded: &Recorded) -> Vec<Box<[Named]>> {
        let mut words = Self::new(recorded);
        recorded
            .operations
            .iter()
            .map(|operation| words.of(operation).into())
            .collect()
    }

    /// The parts of the next operation.
    pub fn of(&mut self, operation: &OperationIr) -> Vec<Named> {
        let mut parts = Parts {
            words: self,
            runtime: !stream::scalars_are_static(operation),
            list: Vec::new(),
        };
        stream::read(operation, &mut parts);
        parts.list
    }

    /// The tensor with this id, if it was seen.
    pub fn position(&self, id: TensorId) -> Option<Position> {
        self.positions.get(&id).copied()
    }
}

/// Type and shape: `f32 [8, 3]`.
pub fn type_text(ir: &TensorIr) -> String {
    let dims: Vec<String> = ir.shape.iter().map(usize::to_string).collect();
    format!("{:?} [{}]", ir.dtype, dims.join(", ")).to_lowercase()
}

/// The shape in the text of [`type_text`].
pub fn dims_of(text: &str) -> Option<Vec<usize>> {
    let list = text.split_once('[')?.1.strip_suffix(']')?;
    let dims = list.split(", ").filter(|dim| !dim.is_empty());
    dims.map(|dim| dim.parse().ok()).collect()
}

/// Collects the parts of one operation.
struct Parts<'a> {
    words: &'a mut Words,
    /// Whether scalars are runtime arguments.
    runtime: bool,
    list: Vec<Named>,
}

impl Parts<'_> {
    fn add(&mut self, name: &'static str, part: Part) {
        self.list.push(Named { name, part });
    }
}

impl Reader for Parts<'_> {
    fn operand(&mut self, name: &'static str, tensor: &TensorIr) {
        let position = self.words.position(tensor.id);
        self.add(name, Part::Operand(position));
    }

    fn result(&mut self, name: &'static str, tensor: &TensorIr) {
        let index = self.words.results;
        self.words.results += 1;
        self.words.positions.insert(tensor.id, Position::Result(index));
        self.add(name, Part::Result(index, type_text(tensor).into()));
    }

    fn scalar(&mut self, name: &'static str, scalar: ScalarIr) {
        let (kind, text) = match scalar {
            ScalarIr::Float(x) => ("float", format!("{x:?}")),
            ScalarIr::Int(x) => ("integer", x.to_string()),
            ScalarIr::UInt(x) => ("unsigned integer", x.to_string()),
            ScalarIr::Bool(x) => ("bool", x.to_string()),
        };
        self.add(
            name,
            match self.runtime {
                true => Part::Runtime(kind),
                false => Part::Scalar(text.into()),
            },
        );
    }

    fn attribute(&mut self, name: &'static str, text: String) {
        self.add(name, Part::Attribute(text.into()));
    }
}
