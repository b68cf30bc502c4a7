//! Attention and its gradient through the template of [`crate::kernels::attention`].

use kiln_graph::op::{AttentionDims, AttentionOperands, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::contract::{pointer, window};
use super::nest::Argument;
use super::{Call, EmitOptions};
use crate::kernels::Param;
use crate::kernels::attention::{self, AttentionSpec, Extents, Gradients, View};
use crate::schedule::layout::strides;
use crate::schedule::{Buffer, Kernel};

/// The call for an attention of f32; none for other types and for empty tensors.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions) -> Option<Call> {
    let data = graph.node(node);
    let (Op::Attention(dims) | Op::AttentionGrad(dims)) = &data.op else {
        return None;
    };
    let all = || data.inputs.iter().chain(&data.outputs);
    if graph.dtype(data.inputs[0]) != DType::F32 || all().any(|&v| graph.ty(v).numel() == 0) {
        return None;
    }
    let mut call = Parameters {
        graph,
        kernel,
        options,
        params: Vec::new(),
        arguments: Vec::new(),
    };
    let at = dims.operands();
    let made = match &data.op {
        Op::Attention(_) => {
            let mut spec = call.operands(node, dims, at, "Attention");
            let out = call.result("out", data.outputs[0]);
            call.scalar("float *", "stats", data.outputs[1]);
            spec.params = call.params;
            attention::forward(&spec, &out, options.isa)
        }
        _ => {
            let mut spec = call.operands(node, dims, at, "Gradient of attention");
            call.scalar("const float *", "stats", data.inputs[at.forward]);
            let d_out = call.operand("const float *", "d_out", data.inputs[at.forward + 1]);
            call.scalar("const float *", "d_scale", data.inputs[at.forward + 2]);
            call.scalar("const float *", "inner", data.inputs[at.forward + 3]);
            if dims.dropout {
                call.scalar("const float *", "d_factor", data.inputs[at.forward + 4]);
            }
            let tensors = Gradients {
                d_out,
                d_query: call.result("d_query", data.outputs[0]),
                d_key: call.result("d_key", data.outputs[1]),
                d_value: call.result("d_value", data.outputs[2]),
            };
            spec.params = call.params;
            attention::gradient(&spec, &tensors, options.isa)
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
    options: &'a EmitOptions,
    params: Vec<Param>,
    arguments: Vec<Argument>,
}

impl Parameters<'_> {
    /// A parameter that is passed as it is stored.
    fn scalar(&mut self, ctype: &str, name: &str, value: Value) {
        self.params.push(Param::new(ctype, name));
        self.arguments.push(Argument::Buffer(Buffer::Value(value)));
    }

    /// An operand read through a window.
    fn operand(&mut self, ctype: &str, name: &str, value: Value) -> View {
        let window = window(self.graph, &self.options.layouts, value, &self.kernel.reads);
        self.scalar(ctype, name, window.base);
        View {
            pointer: pointer(name, window.offset),
            strides: four(&window.strides),
        }
    }

    /// A result, in the layout it is stored in.
    fn result(&mut self, name: &str, value: Value) -> View {
        self.scalar("float *", name, value);
        let order = self.options.layouts.get(&value);
        View {
            pointer: name.to_owned(),
            strides: four(&strides(self.graph.shape(value), order)),
        }
    }

    fn operands(
        &mut self,
        node: Node,
        dims: &AttentionDims,
        at: AttentionOperands,
        what: &str,
    ) -> AttentionSpec {
        let inputs = self.graph.node(node).inputs.clone();
        let [q, k, v] = [0, 1, 2].map(|operand| self.graph.shape(inputs[operand]).clone());
        let query = self.operand("const float *", "query", inputs[0]);
        let key = self.operand("const float *", "key", inputs[1]);
        let value = self.operand("const float *", "value", inputs[2]);
        self.scalar("const float *", "scale", inputs[3]);
        let mask = at
            .mask
            .map(|at| self.broadcast("const float *", "mask", inputs[at]));
        let hidden = at.hidden.map(|at| {
            let view = self.broadcast("const uint8_t *", "hidden", inputs[at]);
            self.scalar("const float *", "fill", inputs[at + 1]);
            view
        });
        if let Some(at) = at.dropout {
            let names = [
                ("const uint64_t *", "seed"),
                ("const uint64_t *", "stream"),
                ("const float *", "keep"),
                ("const float *", "factor"),
            ];
            for (offset, (ctype, name)) in names.into_iter().enumerate() {
                self.scalar(ctype, name, inputs[at + offset]);
            }
        }
        AttentionSpec {
            name: "@".into(),
            comment: what.into(),
            extents: Extents {
                batch: q[0],
                heads: q[1],
                key_heads: k[1],
                queries: q[2],
                keys: k[2],
                width: q[3],
                value_width: v[3],
            },
            query,
            key,
            value,
            causal: dims.causal,
            mask,
            hidden,
            skips: at.hidden.is_some_and(|at| is_lowest(self.graph, inputs[at + 1])),
            dropout: dims.dropout,
            stats: "stats".into(),
            params: Vec::new(),
            threads: self.options.threads,
        }
    }

    /// A mask: dimensions of one element repeat.
    fn broadcast(&mut self, ctype: &str, name: &str, value: Value) -> View {
        let mut view = self.operand(ctype, name, value);
        for (stride, &extent) in view.strides.iter_mut().zip(self.graph.shape(value).iter()) {
            if extent == 1 {
                *stride = 0;
            }
        }
        view
    }
}

/// Whether a score of this makes a weight of zero beside any other.
fn is_lowest(graph: &Graph, fill: Value) -> bool {
    match graph.def(fill).op {
        Op::Constant { value, .. } => value.to_f64() <= -1e30,
        _ => false,
    }
}

/// Strides of the four dimensions.
fn four(strides: &[i64]) -> [i64; 4] {
    let mut out = [0; 4];
    out.copy_from_slice(strides);
    out
}
