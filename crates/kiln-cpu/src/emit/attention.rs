//! Attention and its gradient through the template of [`crate::kernels::attention`].

use kiln_compiler::schedule::access::window;
use kiln_compiler::schedule::layout::strides;
use kiln_compiler::schedule::{Buffer, Kernel};
use kiln_graph::op::{AttentionDims, AttentionOperands, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::contract::{pointer, storage};
use super::nest::Argument;
use super::{Call, EmitOptions};
use crate::kernels::attention::{self, AttentionSpec, Extents, Gradients, Skips, View};
use crate::kernels::element::Storage;
use crate::kernels::{self, Param};

/// The call for an attention; none for empty tensors.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<Call> {
    let data = graph.node(node);
    let (Op::Attention(dims) | Op::AttentionGrad(dims)) = &data.op else {
        return None;
    };
    let all = || data.inputs.iter().chain(&data.outputs);
    if all().any(|&v| graph.ty(v).numel() == 0) {
        return None;
    }
    let mut call = Parameters {
        graph,
        kernel,
        options,
        storage: storage(graph.dtype(data.inputs[0]))?,
        params: Vec::new(),
        numbers: Vec::new(),
        arguments: Vec::new(),
    };
    let at = dims.operands();
    let real = call.storage.element().ctype();
    let spec = call.operands(node, dims, at);
    let made = match &data.op {
        Op::Attention(_) => {
            let out = call.result("out", data.outputs[0]);
            call.parameter(&format!("{real} *"), "stats", data.outputs[1]);
            let spec = call.complete(spec);
            match options.writes {
                true => attention::forward(&spec, &out, options.isa),
                false => kernels::KernelText::planned(attention::forward_workspace(&spec, options.isa)),
            }
        }
        _ => {
            call.parameter(&format!("const {real} *"), "stats", data.inputs[at.forward]);
            let d_out = call.operand("d_out", data.inputs[at.forward + 1]);
            call.number("d_scale", data.inputs[at.forward + 2]);
            call.number("inner", data.inputs[at.forward + 3]);
            if dims.dropout {
                call.number("d_factor", data.inputs[at.forward + 4]);
            }
            let tensors = Gradients {
                d_out,
                d_query: call.result("d_query", data.outputs[0]),
                d_key: call.result("d_key", data.outputs[1]),
                d_value: call.result("d_value", data.outputs[2]),
            };
            let spec = call.complete(spec);
            match options.writes {
                true => attention::gradient(&spec, &tensors, options.isa),
                false => kernels::KernelText::planned(attention::gradient_workspace(&spec, options.isa)),
            }
        }
    };
    Some(Call::Kernel {
        kernel: Box::new(made),
        arguments: call.arguments,
    })
}

struct Parameters<'a> {
    graph: &'a Graph,
    kernel: &'a Kernel,
    options: &'a EmitOptions<'a>,
    /// How queries, keys and values, and all tensors of their type, are stored.
    storage: Storage,
    params: Vec<Param>,
    numbers: Vec<(&'static str, Storage)>,
    arguments: Vec<Argument>,
}

impl Parameters<'_> {
    /// A parameter that is passed as it is stored.
    fn parameter(&mut self, ctype: &str, name: &str, value: Value) {
        self.params.push(Param::new(ctype, name));
        self.arguments.push(Argument::Buffer(Buffer::Value(value)));
    }

    /// How `value` is stored.
    fn storage_of(&self, value: Value) -> Storage {
        storage(self.graph.dtype(value)).unwrap_or(self.storage)
    }

    /// A number.
    fn number(&mut self, name: &'static str, value: Value) {
        let storage = self.storage_of(value);
        self.parameter(
            &format!("const {} *", storage.ctype()),
            &format!("{name}_at"),
            value,
        );
        self.numbers.push((name, storage));
    }

    /// A tensor of floats that is read through a window.
    fn operand(&mut self, name: &str, value: Value) -> View {
        let ctype = self.storage_of(value).ctype();
        self.windowed(ctype, name, value)
    }

    fn windowed(&mut self, ctype: &str, name: &str, value: Value) -> View {
        let window = window(self.graph, self.options.layouts, value, &self.kernel.reads);
        self.parameter(&format!("const {ctype} *"), name, window.base);
        View {
            pointer: pointer(name, window.offset),
            strides: four(&window.strides),
        }
    }

    /// A result, in the layout it is stored in.
    fn result(&mut self, name: &str, value: Value) -> View {
        self.parameter(&format!("{} *", self.storage.ctype()), name, value);
        let order = self.options.layouts.get(&value);
        View {
            pointer: name.to_owned(),
            strides: four(&strides(self.graph.shape(value), order)),
        }
    }

    /// `spec` with all parameters.
    fn complete(&self, spec: AttentionSpec) -> AttentionSpec {
        AttentionSpec {
            params: self.params.clone(),
            numbers: self.numbers.clone(),
            ..spec
        }
    }

    fn operands(&mut self, node: Node, dims: &AttentionDims, at: AttentionOperands) -> AttentionSpec {
        let inputs = self.graph.node(node).inputs.clone();
        let [q, k, v] = [0, 1, 2].map(|operand| self.graph.shape(inputs[operand]).clone());
        let query = self.operand("query", inputs[0]);
        let key = self.operand("key", inputs[1]);
        let value = self.operand("value", inputs[2]);
        self.number("scale", inputs[3]);
        let mask = at.mask.map(|at| {
            let view = self.operand("mask", inputs[at]);
            (self.broadcast(view, inputs[at]), self.storage_of(inputs[at]))
        });
        let hidden = at.hidden.map(|at| {
            let view = self.windowed("uint8_t", "hidden", inputs[at]);
            self.number("fill", inputs[at + 1]);
            self.broadcast(view, inputs[at])
        });
        if let Some(at) = at.dropout {
            self.parameter("const uint64_t *", "seed", inputs[at]);
            self.parameter("const uint64_t *", "stream", inputs[at + 1]);
            self.number("keep", inputs[at + 2]);
            self.number("factor", inputs[at + 3]);
        }
        AttentionSpec {
            name: "@".into(),
            extents: Extents {
                batch: q[0],
                heads: q[1],
                key_heads: k[1],
                queries: q[2],
                keys: k[2],
                width: q[3],
                value_width: v[3],
            },
            storage: self.storage,
            numbers: Vec::new(),
            query,
            key,
            value,
            causal: dims.causal,
            mask,
            hidden,
            mask_last: dims.mask_last,
            skips: at
                .hidden
                .map_or(Skips::Never, |at| skips(self.graph, inputs[at + 1], dims)),
            dropout: dims.dropout,
            drop_scores: dims.drop_scores,
            safe: dims.safe,
            stats: "stats".into(),
            params: Vec::new(),
            threads: self.options.threads,
            tallest: self.options.family,
        }
    }

    /// A mask: dimensions of one element repeat.
    fn broadcast(&self, mut view: View, value: Value) -> View {
        for (stride, &extent) in view.strides.iter_mut().zip(self.graph.shape(value).iter()) {
            if extent == 1 {
                *stride = 0;
            }
        }
        view
    }
}

/// Whether hidden keys may be left out, given their score `fill`.
fn skips(graph: &Graph, fill: Value, dims: &AttentionDims) -> Skips {
    let Some(value) = graph.constant(fill) else {
        return Skips::Never;
    };
    // A `fill` below this has no weight beside any score that its type is meant for. A mask that is added
    // later may raise it, and one that was added before may have lowered all that a row sees as far.
    let zero = match graph.dtype(fill) {
        _ if dims.mask => f64::NEG_INFINITY,
        DType::F16 => -65504.0,
        _ => -1e30,
    };
    // Programs that mean a mask write this number. A safe softmax has no such rule: its statistics do not
    // tell rows that see only -inf from others.
    let low = if dims.mask_last || dims.safe { zero } else { -1e3 };
    match value.to_f64() {
        value if value <= zero => Skips::Always,
        value if value <= low => Skips::Mostly,
        _ => Skips::Never,
    }
}

/// Strides of the four dimensions.
fn four(strides: &[i64]) -> [i64; 4] {
    let mut out = [0; 4];
    out.copy_from_slice(strides);
    out
}
