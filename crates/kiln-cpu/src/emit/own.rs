//! Operations of the program's own that come with C: a file each, called from the step.
//!
//! The source defines `void operation(const kiln_tensor *inputs, const kiln_tensor *outputs)`. It is a file by
//! itself, so that its names meet no others, and `operation` is a name that follows from the source: the same
//! source for several calls is compiled once.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use kiln_graph::op::ExternOp;
use kiln_graph::{Graph, Node, Value};

use super::nest::Argument;
use super::operands;
use crate::build::SourceFile;

/// The header that declares what an operation is given.
pub const HEADER: &str = include_str!("c/kiln_operation.h");

/// The call of an operation that comes with C.
#[derive(Clone, Debug)]
pub struct OwnCall {
    /// The program's name for it.
    name: String,
    source: String,
    /// Operands, then results.
    pub arguments: Vec<Argument>,
    shapes: Vec<Vec<usize>>,
    inputs: usize,
}

/// The declaration of an operation's function.
pub fn prototype(symbol: &str) -> String {
    format!("void {symbol}(const kiln_tensor *inputs, const kiln_tensor *outputs);")
}

impl OwnCall {
    /// The call of `node`, which is `op`.
    pub fn new(graph: &Graph, node: Node, op: &ExternOp) -> Self {
        let data = graph.node(node);
        let shape = |&value: &Value| graph.shape(value).to_vec();
        Self {
            name: op.name.clone(),
            source: op.c_source.clone(),
            arguments: operands(graph, node),
            shapes: data.inputs.iter().chain(&data.outputs).map(shape).collect(),
            inputs: data.inputs.len(),
        }
    }

    /// The function's name in the step.
    pub fn symbol(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.source.hash(&mut hasher);
        format!("own_{:016x}", hasher.finish())
    }

    /// The function's file. Messages of the compiler count lines from the first of the source, and name the
    /// operation.
    pub fn file(&self) -> SourceFile {
        let symbol = self.symbol();
        let name: String = self
            .name
            .chars()
            .filter(|&c| c != '"' && c != '\\' && !c.is_control())
            .collect();
        let text = format!(
            "#include \"kiln_operation.h\"\n#define operation {symbol}\n{}\n#line 1 \"{name}\"\n{}\n",
            prototype("operation"),
            self.source
        );
        SourceFile::new(format!("{symbol}.c"), text).written_by_hand()
    }

    /// The call, as kernel `number`, with its tensors at `places`.
    pub fn text(&self, number: usize, places: &[String]) -> String {
        let tensors = places.iter().zip(&self.shapes).map(|(place, shape)| {
            let elements: usize = shape.iter().product();
            // An array in C has an element.
            let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
            let dims = if dims.is_empty() {
                "0".to_owned()
            } else {
                dims.join(", ")
            };
            let rank = shape.len();
            format!("            {{(void *)({place}), {elements}, {rank}, (const int64_t[]){{{dims}}}}},\n")
        });
        let tensors: String = tensors.collect();
        format!(
            "    {{\n        const kiln_tensor tensors[] = {{\n{tensors}        }};\n        EVENT({number}, 1);\n        \
             {}(tensors, tensors + {});\n        EVENT({number}, 0);\n    }}\n",
            self.symbol(),
            self.inputs
        )
    }
}
