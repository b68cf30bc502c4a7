//! How convolutions and pools address their images, and which template makes them.
//!
//! Convolutions of up to three spatial dimensions go to [`crate::kernels::conv`], pools of up to two to
//! [`crate::kernels::pool`]; missing dimensions get extents of one. Images are read and written in the
//! layout that the scheduler chose for them.

use kiln_compiler::schedule::access::{Strided, window};
use kiln_compiler::schedule::layout::{Layouts, strides};
use kiln_compiler::schedule::{Buffer, Kernel};
use kiln_graph::op::{ConvDims, Op, Window};
use kiln_graph::{Graph, Node, Value};

use super::Call;
use super::contract::{Sources, pointer, storage};
use super::expressions::memory_type;
use super::nest::Argument;
use super::nest::prologue::Operand as Computed;
use crate::kernels::conv::{
    self, ConvSpec, Geometry, Image, PixelEpilogue, PixelPlace, WeightGradSpec, address,
};
use crate::kernels::element::Element;
use crate::kernels::pool::channels::{self, ChannelPool, Indices, Memory};
use crate::kernels::pool::{self, PoolGeometry, PoolKind, PoolSpec};
use crate::kernels::{self, Param, Width};

/// The call for a convolution or pool; none if the operation is neither or has no template.
pub fn generate(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    options: &super::EmitOptions<'_>,
) -> Option<Call> {
    convolution(graph, kernel, node, options).or_else(|| pooling(graph, kernel, node, options))
}

/// A value in its own memory.
fn stored(graph: &Graph, layouts: &Layouts, value: Value) -> Strided {
    Strided {
        base: value,
        offset: 0,
        strides: strides(graph.shape(value), layouts.get(&value)),
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

fn convolution(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions<'_>) -> Option<Call> {
    let data = graph.node(node);
    let (Op::Conv(dims) | Op::ConvInputGrad { conv: dims, .. } | Op::ConvWeightGrad { conv: dims, .. }) =
        &data.op
    else {
        return None;
    };
    let out = data.outputs[0];
    let (result_storage, storage) = (storage(graph.dtype(out))?, storage(graph.dtype(data.inputs[0]))?);
    if !(1..=3).contains(&dims.stride.len())
        || data
            .inputs
            .iter()
            .chain(&data.outputs)
            .any(|&v| graph.ty(v).numel() == 0)
    {
        return None;
    }
    let shape = |value: Value| graph.shape(value).dims();
    let mut sources = Sources::default();
    let mut image = |at: usize, name: &'static str| {
        if let Some(prologue) = kernel.prologue(at) {
            let functions = sources.computed(graph, prologue, name, options);
            return computed(functions, spatial(&shape(data.inputs[at])[2..], 1));
        }
        let window = window(graph, options.layouts, data.inputs[at], &kernel.reads);
        sources.stored(storage, name, window.base);
        Image::stored(storage, &pointer(name, window.offset), image_strides(&window))
    };
    let first = image(0, "first");
    let second = matches!(data.op, Op::ConvWeightGrad { .. }).then(|| image(1, "second"));
    let weight = window(graph, options.layouts, data.inputs[1], &kernel.reads);
    if second.is_none() {
        sources.stored(storage, "second", weight.base);
    }
    let out_param = Param::new(format!("{} *", result_storage.ctype()), "out");
    let params: Vec<Param> = sources.params.iter().cloned().chain([out_param]).collect();
    let result = stored(graph, options.layouts, out);
    let types = format!(
        "{} {} -> {}",
        graph.ty(data.inputs[0]),
        graph.ty(data.inputs[1]),
        graph.ty(out)
    );
    let made = if let Some(second) = second {
        let spec = WeightGradSpec {
            name: "@".into(),
            comment: format!("Gradient of a convolution's weight: {types}"),
            geometry: geometry(dims, shape(data.inputs[0]), shape(out), shape(data.inputs[1])),
            input: first,
            output_grad: second,
            storage,
            consume: Box::new(move |width, at, value| {
                result_storage.store(width, &format!("out + {at}"), value)
            }),
            params,
            threads: options.threads,
        };
        match planned(options, || conv::weight_grad_workspace(&spec, options.isa)) {
            Some(planned) => planned,
            None => conv::weight_grad(spec, options.isa),
        }
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
            image: first,
            weight: pointer("second", weight.offset),
            storage,
            epilogue: PixelEpilogue::store_as(result_storage, "out", image_strides(&result)),
            params,
            threads: options.threads,
        };
        if let Some(planned) = planned(options, || {
            conv::correlation_workspace(&spec, forward, options.isa)
        }) {
            planned
        } else if forward {
            conv::forward(spec, options.isa)
        } else {
            conv::input_grad(spec, options.isa)
        }
    };
    Some(sources.call(made, [Argument::Buffer(Buffer::Value(out))]))
}

/// A kernel that is only planned, if no text is asked for and `workspace` knows its working memory.
fn planned(
    options: &super::EmitOptions<'_>,
    workspace: impl FnOnce() -> Option<usize>,
) -> Option<kernels::KernelText> {
    match options.writes {
        true => None,
        false => workspace().map(kernels::KernelText::planned),
    }
}

/// Whether a convolution only mixes channels: it is a matrix product, and planned as one.
pub fn is_product(graph: &Graph, node: Node) -> bool {
    let data = graph.node(node);
    data.inputs
        .get(1)
        .is_some_and(|&weight| data.op.is_pixelwise(graph.shape(weight)))
}

/// The image of these extents that `functions` compute.
fn computed(functions: Computed, [depth, height, width]: [usize; 3]) -> Image<'static> {
    let strides = [depth * height * width, height * width, width, 1, 0].map(|stride| stride as i64);
    let load = move |place: &PixelPlace<'_>| {
        let pixel = address(
            "0",
            strides,
            &PixelPlace {
                channel: "0",
                ..*place
            },
        );
        functions.load(place.width, &[&format!("({pixel})"), place.channel])
    };
    Image::pixels(load)
}

/// The pooling that an operation is: its kind, window, forward input extents, and whether it is the gradient.
struct Pooling<'a> {
    kind: PoolKind,
    window: Option<&'a Window>,
    grad: bool,
}

impl<'a> Pooling<'a> {
    /// `made_by`: the window of the pooling that made the indices of a gradient, if it is known.
    fn new(op: &'a Op, made_by: Option<&'a Window>) -> Option<Self> {
        let new = |kind, window, grad| Some(Self { kind, window, grad });
        match op {
            Op::MaxPool(window) | Op::MaxPoolWithIndices { window, .. } => {
                new(PoolKind::Max, Some(window), false)
            }
            Op::MaxPoolGrad { .. } => new(PoolKind::Max, made_by, true),
            Op::AvgPool {
                window,
                count_include_pad,
            } => {
                let kind = PoolKind::Mean {
                    count_padding: *count_include_pad,
                };
                new(kind, Some(window), false)
            }
            Op::AvgPoolGrad {
                window,
                count_include_pad,
                ..
            } => {
                let kind = PoolKind::Mean {
                    count_padding: *count_include_pad,
                };
                new(kind, Some(window), true)
            }
            _ => None,
        }
    }

    /// Extents of the forward pooling of `x` to `y`; one spatial dimension is two with a height of one.
    fn geometry(&self, x: &[usize], y: &[usize]) -> PoolGeometry {
        let pair = |list: &[usize], missing: usize| match list {
            [width] => [missing, *width],
            [height, width, ..] => [*height, *width],
            [] => [missing; 2],
        };
        let of = |list: fn(&Window) -> &[usize], missing: usize| {
            self.window
                .map_or([missing; 2], |window| pair(list(window), missing))
        };
        PoolGeometry {
            images: x[0],
            channels: x[1],
            input: pair(&x[2..], 1),
            output: pair(&y[2..], 1),
            window: of(|window| &window.size, 1),
            stride: of(|window| &window.stride, 1),
            pad_low: of(|window| &window.pad_low, 0),
            pad_high: of(|window| &window.pad_high, 0),
            dilation: of(|window| &window.dilation, 1),
        }
    }
}

/// The window of the pooling that made the indices of the gradient `node`, if it has the gradient's extents.
fn indices_of(graph: &Graph, node: Node) -> Option<&Window> {
    let data = graph.node(node);
    let Op::MaxPoolGrad { input } = &data.op else {
        return None;
    };
    let maker = graph.def(data.inputs[1]);
    match &maker.op {
        Op::MaxPoolWithIndices { window, .. } => {
            (graph.shape(maker.inputs[0]).dims()[2..] == input[..]).then_some(window)
        }
        _ => None,
    }
}

fn pooling(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions<'_>) -> Option<Call> {
    let data = graph.node(node);
    let made_by = indices_of(graph, node);
    let pooling = Pooling::new(&data.op, made_by)?;
    let (from, to) = (data.inputs[0], data.outputs[0]);
    let spatial = graph.shape(from).rank() - 2;
    let all = || data.inputs.iter().chain(&data.outputs);
    let storage = storage(graph.dtype(to))?;
    if !(1..=2).contains(&spatial) || all().any(|&v| graph.ty(v).numel() == 0) {
        return None;
    }
    let shape = |value: Value| graph.shape(value).dims();
    let geometry = if pooling.grad {
        pooling.geometry(shape(to), shape(from))
    } else {
        pooling.geometry(shape(from), shape(to))
    };
    // Templates number the places of a plane in 32 bits.
    if pooling.kind == PoolKind::Max
        && !pooling.grad
        && geometry.input[0] * geometry.input[1] > i32::MAX as usize
    {
        return None;
    }
    // The operand and the result, then the indices of either direction.
    let indices = data.inputs.get(1).or(data.outputs.get(1)).copied();
    let input = window(graph, options.layouts, from, &kernel.reads);
    let output = stored(graph, options.layouts, to);
    let places = indices.map(|value| {
        if pooling.grad {
            window(graph, options.layouts, value, &kernel.reads)
        } else {
            stored(graph, options.layouts, value)
        }
    });
    let memory = |name: &str, window: &Strided| Memory {
        pointer: pointer(name, window.offset),
        strides: image_strides(window),
    };
    let ctype = storage.ctype();
    let mut params = vec![
        Param::new(format!("const {ctype} *"), "first"),
        Param::new(format!("{ctype} *"), "out"),
    ];
    let mut arguments = vec![input.base, to];
    let comment = format!("{}: {} -> {}", data.op.name(), graph.ty(from), graph.ty(to));
    let places = indices.zip(places).map(|(value, window)| {
        let ctype = memory_type(graph.dtype(value));
        let qualifier = if pooling.grad { "const " } else { "" };
        params.push(Param::new(format!("{qualifier}{ctype} *"), "places"));
        arguments.push(window.base);
        Indices {
            memory: memory("places", &window),
            ctype,
            own: made_by.is_some(),
        }
    });
    let spec = ChannelPool {
        name: "@".into(),
        comment,
        kind: pooling.kind,
        geometry,
        storage,
        input: memory("first", &input),
        output: memory("out", &output),
        indices: places,
        params,
        threads: options.threads,
    };
    let grad = pooling.grad;
    // The template for planes computes in f32 only.
    let planes = storage.element() == Element::F32 && is_planar(&spec, grad);
    let made = match (planes, grad) {
        (true, _) if !options.writes => {
            let bytes = pool::workspace(spec.kind, &spec.geometry, grad, spec.threads, options.isa);
            kernels::KernelText::planned(bytes)
        }
        (true, false) => pool::forward(planar(&spec, grad), options.isa),
        (true, true) => pool::input_grad(planar(&spec, grad), options.isa),
        (false, false) => channels::forward(&spec, options.isa),
        (false, true) => channels::input_grad(&spec, options.isa),
    };
    Some(Call::Kernel {
        kernel: Box::new(made),
        arguments: arguments
            .into_iter()
            .map(|v| Argument::Buffer(Buffer::Value(v)))
            .collect(),
    })
}

/// Whether all tensors of a pooling are channels-first with planes that have no gaps, and the template for
/// planes is fast.
fn is_planar(spec: &ChannelPool, grad: bool) -> bool {
    let plane = |memory: &Memory, [height, width]: [usize; 2]| {
        memory.strides[3] == 1 && (memory.strides[2] == width as i64 || height == 1)
    };
    let g = &spec.geometry;
    // There, the gradient of a mean adds up as many elements for each place as a window has: most of them are
    // zeros where windows are large.
    if grad && matches!(spec.kind, PoolKind::Mean { .. }) && !g.is_unrolled() {
        return false;
    }
    let (from, to) = if grad {
        (g.output, g.input)
    } else {
        (g.input, g.output)
    };
    let indices = spec.indices.as_ref();
    plane(&spec.input, from)
        && plane(&spec.output, to)
        && indices.is_none_or(|indices| plane(&indices.memory, g.output))
}

/// The same pooling, described for the template that works plane by plane.
fn planar(spec: &ChannelPool, grad: bool) -> PoolSpec<'_> {
    let at = |memory: &Memory, place: &PixelPlace<'_>| address(&memory.pointer, memory.strides, place);
    let load = move |place: &PixelPlace<'_>| spec.storage.load(place.width, &at(&spec.input, place));
    let consume = move |place: &PixelPlace<'_>, value: &str, index: &str| {
        let store = spec.storage.store(place.width, &at(&spec.output, place), value);
        let Some(indices) = spec.indices.as_ref().filter(|_| !grad) else {
            return store;
        };
        let (to, ctype) = (at(&indices.memory, place), indices.ctype);
        match place.width {
            Width::Scalar => format!("{store}\n*({to}) = ({ctype}){index};"),
            Width::Vector => {
                format!("{store}\nfor (int64_t l = 0; l < KILN_LANES; l++) ({to})[l] = ({ctype}){index}[l];")
            }
        }
    };
    let index = spec.indices.as_ref().filter(|_| grad).map(|indices| {
        let load = move |place: &PixelPlace<'_>| format!("(int64_t)*({})", at(&indices.memory, place));
        Box::new(load) as conv::LoadImage<'_>
    });
    PoolSpec {
        name: spec.name.clone(),
        comment: spec.comment.clone(),
        kind: spec.kind,
        geometry: spec.geometry,
        load: Box::new(load),
        index,
        consume: Box::new(consume),
        params: spec.params.clone(),
        threads: spec.threads,
    }
}
