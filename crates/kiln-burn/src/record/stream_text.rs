//! A recording as text, for debug dumps: one operation a line, tensors by position instead of id, so that two recordings of the same step are equal texts.

use std::fmt::Write as _;

use burn_ir::{ScalarIr, TensorId, TensorIr};
use rustc_hash::FxHashMap;

use super::recording::Recorded;
use crate::stream::{self, Visitor};

/// The text: inputs, operations, outputs.
pub fn to_text(recorded: &Recorded) -> String {
    let mut names: FxHashMap<TensorId, String> = FxHashMap::default();
    let mut text = String::new();
    for (index, input) in recorded.inputs.iter().enumerate() {
        let dies = if input.tensor_dies() {
            ", not used afterwards"
        } else {
            ""
        };
        let _ = writeln!(text, "input in{index}: {}{dies}", ty(&input.ir));
        names.insert(input.ir.id, format!("in{index}"));
    }
    let mut results = 0;
    for (number, operation) in recorded.operations.iter().enumerate() {
        let mut line = Line {
            names: &mut names,
            results: &mut results,
            operands: Vec::new(),
            defined: Vec::new(),
            attributes: Vec::new(),
            runtime: !stream::scalars_are_static(operation),
        };
        stream::walk(operation, &mut line);
        let Line {
            operands,
            defined,
            attributes,
            ..
        } = line;
        let _ = write!(
            text,
            "{number:5}: {} = {} {}",
            defined.join(", "),
            stream::name(operation),
            operands.join(", ")
        );
        if !attributes.is_empty() {
            let _ = write!(text, " {{{}}}", attributes.join(" "));
        }
        text.push('\n');
    }
    for id in &recorded.output_ids {
        let _ = writeln!(text, "output {}", names.get(id).map_or("?", |name| name));
    }
    text
}

/// The parts of one operation.
struct Line<'a> {
    names: &'a mut FxHashMap<TensorId, String>,
    results: &'a mut usize,
    operands: Vec<String>,
    defined: Vec<String>,
    attributes: Vec<String>,
    /// Whether scalars are runtime arguments: their values are not part of the step, and not of the text.
    runtime: bool,
}

impl Visitor for Line<'_> {
    fn input(&mut self, tensor: &TensorIr) {
        let name = self.names.get(&tensor.id).map_or("?", |name| name);
        self.operands.push(name.to_owned());
    }

    fn output(&mut self, tensor: &TensorIr) {
        let name = format!("r{}", self.results);
        *self.results += 1;
        self.defined.push(format!("{name}: {}", ty(tensor)));
        self.names.insert(tensor.id, name);
    }

    fn scalar(&mut self, scalar: ScalarIr) {
        self.attributes.push(match (self.runtime, scalar) {
            (true, _) => "scalar".to_owned(),
            (false, ScalarIr::Float(x)) => format!("{x:?}"),
            (false, ScalarIr::Int(x)) => x.to_string(),
            (false, ScalarIr::UInt(x)) => x.to_string(),
            (false, ScalarIr::Bool(x)) => x.to_string(),
        });
    }

    fn word(&mut self, word: u64) {
        self.attributes.push(word.to_string());
    }
}

fn ty(tensor: &TensorIr) -> String {
    let dims: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
    format!("{:?}[{}]", tensor.dtype, dims.join(", ")).to_lowercase()
}
