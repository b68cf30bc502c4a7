//! Which template makes a contraction, and how its operands are addressed.
//!
//! f32 matrix products go to [`crate::kernels::gemm`]: operands are strided windows on stored values, so transposes, slices, head
//! splits and repeated heads cost nothing. f32 convolutions of up to three spatial dimensions go to
//! [`crate::kernels::conv`]; fewer dimensions are three with extents of one. Everything else is the plain loops of [`super::library`].

use kiln_graph::op::{ConvDims, DotDims, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::Call;
use super::library;
use super::nest::Argument;
use crate::kernels::conv::{self, ConvSpec, Geometry, Image, PixelEpilogue, WeightGradSpec};
use crate::kernels::gemm::{self, Epilogue, GemmSpec, Operand};
use crate::kernels::{Param, Width};
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
    if let Some(call) = convolution(graph, kernel, node, options) {
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
fn pointer(name: &str, offset: i64) -> String {
    if offset == 0 {
        name.to_owned()
    } else {
        format!("({name} + {offset})")
    }
}

/// Three spatial numbers from one to three: missing ones come first and are `missing`.
fn spatial(list: &[usize], missing: usize) -> [usize; 3] {
    let mut out = [missing; 3];
    out[3 - list.len()..].copy_from_slice(list);
    out
}

/// Strides (image, depth, height, width, channel) of a window of dimensions (image, channel, spatial..).
fn image_strides(window: &Strided) -> [i64; 5] {
    let mut out = [0; 5];
    out[0] = window.strides[0];
    out[4] = window.strides[1];
    let planes = &window.strides[2..];
    out[4 - planes.len()..4].copy_from_slice(planes);
    out
}

fn geometry(conv: &ConvDims, x: &[usize], w: &[usize], y: &[usize]) -> Geometry {
    Geometry {
        images: x[0],
        groups: conv.groups,
        in_channels: x[1],
        out_channels: w[0],
        input: spatial(&x[2..], 1),
        output: spatial(&y[2..], 1),
        kernel: spatial(&w[2..], 1),
        stride: spatial(&conv.stride, 1),
        pad: spatial(&conv.pad_low, 0),
        dilation: spatial(&conv.dilation, 1),
    }
}

fn convolution(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions) -> Option<Call> {
    let data = graph.node(node);
    let (Op::Conv(dims) | Op::ConvInputGrad { conv: dims, .. } | Op::ConvWeightGrad { conv: dims, .. }) =
        &data.op
    else {
        return None;
    };
    let out = data.outputs[0];
    let plain = graph.dtype(out) == DType::F32 && (1..=3).contains(&dims.stride.len());
    if !plain
        || data
            .inputs
            .iter()
            .chain(&data.outputs)
            .any(|&v| graph.ty(v).numel() == 0)
    {
        return None;
    }
    let first = window(graph, &options.layouts, data.inputs[0], &kernel.reads);
    let second = window(graph, &options.layouts, data.inputs[1], &kernel.reads);
    let shape = |value: Value| graph.shape(value).dims();
    let params = vec![
        Param::new("const float *", "first"),
        Param::new("const float *", "second"),
        Param::new("float *", "out"),
    ];
    let image =
        |name: &str, window: &Strided| Image::strided(&pointer(name, window.offset), image_strides(window));
    let contiguous: Vec<i64> = graph
        .shape(out)
        .strides()
        .iter()
        .map(|&stride| stride as i64)
        .collect();
    let result = Strided {
        base: out,
        offset: 0,
        strides: contiguous,
    };
    let types = format!(
        "{} {} -> {}",
        graph.ty(data.inputs[0]),
        graph.ty(data.inputs[1]),
        graph.ty(out)
    );
    let made = if let Op::ConvWeightGrad { .. } = &data.op {
        let spec = WeightGradSpec {
            name: "@".into(),
            comment: format!("Gradient of a convolution's weight: {types}"),
            geometry: geometry(dims, shape(data.inputs[0]), shape(out), shape(data.inputs[1])),
            input: image("first", &first),
            output_grad: image("second", &second),
            consume: Box::new(|width, at, value| match width {
                Width::Scalar => format!("out[{at}] = {value};"),
                Width::Vector => format!("vf_store(out + {at}, {value});"),
            }),
            params,
            threads: options.threads,
        };
        conv::weight_grad(spec, options.isa)
    } else {
        let forward = matches!(data.op, Op::Conv(_));
        let (x, y) = if forward {
            (data.inputs[0], out)
        } else {
            (out, data.inputs[0])
        };
        let spec = ConvSpec {
            name: "@".into(),
            comment: format!(
                "Convolution{}: {types}",
                if forward { "" } else { " (gradient of its input)" }
            ),
            geometry: geometry(dims, shape(x), shape(data.inputs[1]), shape(y)),
            image: image("first", &first),
            weight: pointer("second", second.offset),
            epilogue: PixelEpilogue::store("out", image_strides(&result)),
            params,
            threads: options.threads,
        };
        if forward {
            conv::forward(spec, options.isa)
        } else {
            conv::input_grad(spec, options.isa)
        }
    };
    Some(Call::Kernel {
        kernel: Box::new(made),
        arguments: [first.base, second.base, out]
            .map(|v| Argument::Buffer(Buffer::Value(v)))
            .to_vec(),
    })
}
