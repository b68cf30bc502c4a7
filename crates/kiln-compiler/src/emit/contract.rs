//! Which template makes a contraction, and how its operands are addressed.
//!
//! f32 matrix products go to [`crate::kernels::gemm`]: operands are strided windows on stored values, so transposes, slices, head
//! splits and repeated heads cost nothing. Convolutions and pools are [`super::image`]'s; everything else is the plain loops of
//! [`super::library`].

use kiln_graph::op::{DotDims, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::Call;
use super::nest::Argument;
use super::{image, library};
use crate::kernels::Param;
use crate::kernels::gemm::{self, Epilogue, GemmSpec, Operand};
use crate::schedule::access::{Strided, side, strided};
use crate::schedule::layout::{Layouts, product_strides, strides};
use crate::schedule::{Buffer, Kernel};

/// The window on one of the buffers in `reads` through which a library kernel reads `operand`.
pub fn window(graph: &Graph, layouts: &Layouts, operand: Value, reads: &[Buffer]) -> Strided {
    let stop = |value: Value| reads.contains(&Buffer::Value(value));
    strided(graph, layouts, operand, &stop).unwrap_or_else(|| Strided {
        base: operand,
        offset: 0,
        strides: graph
            .shape(operand)
            .strides()
            .iter()
            .map(|&stride| stride as i64)
            .collect(),
    })
}

/// The calls for a library kernel; none if the operation has no template here.
pub fn generate(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    options: &super::EmitOptions,
) -> Option<Vec<Call>> {
    let data = graph.node(node);
    if let Op::DotGeneral(dims) = &data.op
        && let Some(call) = product(graph, kernel, node, dims, options)
    {
        return Some(vec![call]);
    }
    if let Some(call) = image::generate(graph, kernel, node, options) {
        return Some(vec![call]);
    }
    if let Some(call) = super::attention::generate(graph, kernel, node, options) {
        return Some(vec![call]);
    }
    let launches = library::generate(graph, node, &kernel.reads, &options.layouts)?;
    Some(launches.into_iter().map(Call::Task).collect())
}

fn product(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    dims: &DotDims,
    options: &super::EmitOptions,
) -> Option<Call> {
    let data = graph.node(node);
    let out = data.outputs[0];
    if graph.dtype(out) != DType::F32 || graph.ty(out).numel() == 0 {
        return None;
    }
    let layouts = &options.layouts;
    let (wa, wb) = (
        window(graph, layouts, data.inputs[0], &kernel.reads),
        window(graph, layouts, data.inputs[1], &kernel.reads),
    );
    let (a, b) = (side(graph, data, 0, &wa)?, side(graph, data, 1, &wb)?);
    let (out_batch, rows, cols) =
        product_strides(graph, out, dims, &strides(graph.shape(out), layouts.get(&out)))?;
    let (m, k, n) = (a.free.0, a.depth.0, b.free.0);
    let batch: usize = a.batch.iter().map(|&(extent, _)| extent).product();
    let spec = GemmSpec {
        name: "@".into(),
        comment: format!("{batch} x [{m}, {k}] x [{k}, {n}]"),
        batch,
        m,
        n,
        k,
        a: Operand::strided(&pointer("left", wa.offset), &a.batch, a.free.1, a.depth.1),
        b: Operand::strided(&pointer("right", wb.offset), &b.batch, b.free.1, b.depth.1),
        epilogue: Epilogue::store("out", &out_batch, rows.1, cols.1),
        params: vec![
            Param::new("const float *", "left"),
            Param::new("const float *", "right"),
            Param::new("float *", "out"),
        ],
        threads: options.threads,
    };
    let made = gemm::emit(spec, options.isa);
    Some(Call::Kernel {
        kernel: Box::new(made),
        arguments: vec![
            Argument::Buffer(Buffer::Value(wa.base)),
            Argument::Buffer(Buffer::Value(wb.base)),
            Argument::Buffer(Buffer::Value(out)),
        ],
    })
}

/// A pointer `offset` elements into a parameter.
pub fn pointer(name: &str, offset: i64) -> String {
    if offset == 0 {
        name.to_owned()
    } else {
        format!("({name} + {offset})")
    }
}
