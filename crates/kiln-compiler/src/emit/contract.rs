//! Which template makes a contraction, and how its operands are addressed.
//!
//! f32 matrix products go to [`crate::kernels::gemm`]: operands are strided windows on stored values, so transposes, slices, head
//! splits and repeated heads cost nothing. Everything else is the plain loops of [`super::library`].

use kiln_graph::op::{DotDims, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::Call;
use super::library;
use super::nest::Argument;
use crate::kernels::gemm::{self, Epilogue, GemmSpec, Operand};
use crate::kernels::Param;
use crate::schedule::access::{Strided, strided};
use crate::schedule::{Buffer, Kernel};

/// The window on one of the buffers in `reads` through which a library kernel reads `operand`.
pub fn window(graph: &Graph, operand: Value, reads: &[Buffer]) -> Strided {
    let stop = |value: Value| reads.contains(&Buffer::Value(value));
    strided(graph, operand, &stop).unwrap_or_else(|| Strided {
        base: operand,
        offset: 0,
        strides: graph.shape(operand).strides().iter().map(|&stride| stride as i64).collect(),
    })
}

/// The calls for a library kernel; none if the operation has no template here.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions) -> Option<Vec<Call>> {
    let data = graph.node(node);
    if let Op::DotGeneral(dims) = &data.op
        && let Some(call) = product(graph, kernel, node, dims, options)
    {
        return Some(vec![call]);
    }
    let launches = library::generate(graph, node, &kernel.reads)?;
    Some(launches.into_iter().map(Call::Task).collect())
}

/// Extents and strides of several dimensions of a window as one dimension; none if they are not evenly spaced.
fn join(extents: &[usize], strides: &[i64]) -> Option<(usize, i64)> {
    let mut joined = (1usize, 0i64);
    for (&extent, &stride) in extents.iter().zip(strides).rev() {
        if extent == 1 {
            continue;
        }
        joined = match joined {
            (1, _) => (extent, stride),
            (inner, unit) if stride == unit * inner as i64 => (inner * extent, unit),
            _ => return None,
        };
    }
    Some(joined)
}

fn product(graph: &Graph, kernel: &Kernel, node: Node, dims: &DotDims, options: &super::EmitOptions) -> Option<Call> {
    let data = graph.node(node);
    let out = data.outputs[0];
    if graph.dtype(out) != DType::F32 || graph.ty(out).numel() == 0 {
        return None;
    }
    struct Side {
        batch: Vec<(usize, i64)>,
        free: (usize, i64),
        depth: (usize, i64),
    }
    let side = |at: usize, batch: &[usize], contract: &[usize]| -> Option<(Strided, Side)> {
        let operand = data.inputs[at];
        let shape = graph.shape(operand);
        let window = window(graph, operand, &kernel.reads);
        let pick = |axes: &[usize]| -> (Vec<usize>, Vec<i64>) {
            axes.iter().map(|&axis| (shape[axis], window.strides[axis])).unzip()
        };
        let (e, s) = pick(&DotDims::free(shape.rank(), batch, contract));
        let free = join(&e, &s)?;
        let (e, s) = pick(contract);
        let depth = join(&e, &s)?;
        let batch = batch.iter().map(|&axis| (shape[axis], window.strides[axis])).collect();
        Some((window, Side { batch, free, depth }))
    };
    let (wa, a) = side(0, &dims.a_batch, &dims.a_contract)?;
    let (wb, b) = side(1, &dims.b_batch, &dims.b_contract)?;
    let (m, k, n) = (a.free.0, a.depth.0, b.free.0);
    let batch: usize = a.batch.iter().map(|&(extent, _)| extent).product();
    let pointer = |name: &str, offset: i64| if offset == 0 { name.to_owned() } else { format!("({name} + {offset})") };
    let spec = GemmSpec {
        name: "@".into(),
        comment: format!("{batch} x [{m}, {k}] x [{k}, {n}]"),
        batch,
        m,
        n,
        k,
        a: Operand::strided(&pointer("a", wa.offset), &a.batch, a.free.1, a.depth.1),
        b: Operand::strided(&pointer("x", wb.offset), &b.batch, b.free.1, b.depth.1),
        epilogue: Epilogue::store("c", &[(batch, (m * n) as i64)], n as i64, 1),
        params: vec![
            Param::new("const float *", "a"),
            Param::new("const float *", "x"),
            Param::new("float *", "c"),
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
