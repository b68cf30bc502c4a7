//! Convolutions and their gradients: calls of cuDNN where the device has it and it takes them, and Kiln's
//! own CUDA C++ elsewhere.
//!
//! | what | how |
//! | --- | --- |
//! | 16 and 32 bits, where there is cuDNN | [`library`] |
//! | windows of one element, without strides | [`pixelwise`]: a product of matrices in cuBLASLt |
//! | 16 bits on Hopper, and what follows | [`windows`]: products of windows by the weight |
//! | a filter for each channel by itself | [`depthwise`] |
//! | results of a convolution, gradients of its input | [`correlation`]: tiles of pixels by channels |
//! | gradients of its weight | [`weight`]: tiles of channels by taps, the pixels in chunks |
//! | both, of 16 bits or where products may round | [`tensor`]: the same tiles on tensor cores |
//! | both, of pictures | [`picture`] with [`bands`] or [`tensor`], before cuDNN is asked |
//! | integers, empty tensors, few channels of a group | [`direct`]: one result a thread |
//!
//! A convolution and the gradient of its input are both correlations: a pixel of the result is a sum over
//! taps of the window and over channels (the *depth*) of an image. The gradient reads the image of the
//! convolution's results, its window is mirrored, and its strides are the result's.

mod bands;
mod correlation;
mod depthwise;
mod direct;
mod library;
mod picture;
mod pixelwise;
mod tensor;
mod tile;
mod transfer;
mod weight;
pub(in crate::emit) mod windows;

use kiln_compiler::schedule::Kernel;
use kiln_compiler::schedule::access::window;
use kiln_graph::op::{ConvDims, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::image::{Image, Template, beyond, has_places, spatial};
use super::product::warpgroups;
use super::{Argument, Call, EmitOptions, KernelCode, Launch, ProductCall};
use crate::convolutions::Task;
use windows::InWindows;

/// Working memory is given out in multiples of so many bytes.
const ALIGNMENT: usize = 256;

/// Threads of a block of kernels with one result or vector a thread.
const THREADS: u32 = 256;

/// What the kernels of a convolution share.
struct Convolution<'a> {
    /// Element type of the operands.
    dtype: DType,
    /// Element type of the result.
    result_dtype: DType,
    dims: &'a ConvDims,
    /// The image of the forward input: an operand, or the gradient that is computed.
    x: Image,
    /// The image of the forward result, or its gradient.
    y: Image,
    /// Channels of one group of `x`, and of `y`.
    group: [usize; 2],
    /// Spatial extents of the window.
    window: [usize; 3],
    stride: [usize; 3],
    low: [usize; 3],
    dilation: [usize; 3],
}

/// A convolution's weight in memory: where it is, and elements between neighbours.
struct Weight {
    base: Value,
    offset: i64,
    strides: Vec<i64>,
}

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let data = graph.node(node);
    let (first, second, out) = (data.inputs[0], data.inputs[1], data.outputs[0]);
    if graph.ty(out).numel() == 0 {
        return Some(KernelCode::default());
    }
    let (convolution, task) = Convolution::new(graph, kernel, node, options)?;
    let stored = match task {
        Task::WeightGradient => Image::result(graph, options, out),
        _ => Image::read(graph, kernel, options, second),
    };
    let own = match task {
        Task::WeightGradient => convolution.weight_gradient(out, options),
        _ => {
            let weight = Weight::read(graph, kernel, options, second);
            convolution.correlation(&weight, task == Task::InputGradient, options)
        }
    };
    if convolution.has_tiles()
        && let Some(code) = picture::generate(&convolution, &stored, task, options)
            .or_else(|| tensor::padded(&convolution, &stored, task, options))
    {
        return Some(code);
    }
    let own = own?;
    let windows = convolution.in_windows(graph, kernel, node, task, options);
    let [first, second, out] = [first, second, out].map(|value| graph.dtype(value));
    let dtypes = match task {
        Task::Forward => [first, second, out],
        Task::InputGradient => [out, second, first],
        Task::WeightGradient => [first, out, second],
    };
    let code = convolution.or_library(own, stored, dtypes, task, options);
    Some(match windows {
        Some(windows) => warpgroups::beside(code, windows, options),
        None => code,
    })
}

/// The product that `node`, a convolution or the gradient of its input, is; none if it is none.
pub fn product(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<ProductCall> {
    let (convolution, task) = Convolution::new(graph, kernel, node, options)?;
    if task == Task::WeightGradient || !convolution.has_tiles() {
        return None;
    }
    let weight = Weight::read(graph, kernel, options, graph.node(node).inputs[1]);
    let task = correlation::Correlation::new(&convolution, &weight, task == Task::InputGradient);
    pixelwise::product_of(&task, options)
}

/// The product of windows that `node`, a convolution or the gradient of its input, is; none if it is none.
pub fn in_windows(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    options: &EmitOptions<'_>,
) -> Option<InWindows> {
    let (convolution, task) = Convolution::new(graph, kernel, node, options)?;
    convolution.in_windows(graph, kernel, node, task, options)
}

impl Weight {
    /// The operand `weight` of a library kernel.
    fn read(graph: &Graph, kernel: &Kernel, options: &EmitOptions<'_>, weight: Value) -> Self {
        let window = window(graph, options.layouts, weight, &kernel.reads);
        Self {
            base: window.base,
            offset: window.offset,
            strides: window.strides,
        }
    }
}

impl<'a> Convolution<'a> {
    /// The convolution of which `node` computes the result or a gradient, and which; none if it is no
    /// convolution of one to three dimensions, of places that kernels count.
    fn new(graph: &'a Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<(Self, Task)> {
        let data = graph.node(node);
        let read = |value: Value| Image::read(graph, kernel, options, value);
        let result = |value: Value| Image::result(graph, options, value);
        let out = data.outputs.first().copied()?;
        let operand = |at: usize| data.inputs[at];
        let (dims, x, y, weight, task) = match &data.op {
            Op::Conv(dims) => (dims, read(operand(0)), result(out), operand(1), Task::Forward),
            Op::ConvInputGrad { conv, .. } => (
                conv,
                result(out),
                read(operand(0)),
                operand(1),
                Task::InputGradient,
            ),
            Op::ConvWeightGrad { conv, .. } => (
                conv,
                read(operand(0)),
                read(operand(1)),
                out,
                Task::WeightGradient,
            ),
            _ => return None,
        };
        if !(1..=3).contains(&dims.stride.len()) {
            return None;
        }
        let convolution = Self {
            dtype: graph.dtype(operand(0)),
            result_dtype: graph.dtype(out),
            dims,
            group: [x.channels / dims.groups, y.channels / dims.groups],
            x,
            y,
            window: spatial(&graph.shape(weight)[2..], 1),
            stride: spatial(&dims.stride, 1),
            low: spatial(&dims.pad_low, 0),
            dilation: spatial(&dims.dilation, 1),
        };
        let padding = [convolution.low, spatial(&dims.pad_high, 0)];
        let beyond = beyond(
            convolution.window,
            convolution.dilation,
            padding,
            convolution.stride,
        );
        has_places([&convolution.x, &convolution.y], beyond).then_some((convolution, task))
    }
}

impl Convolution<'_> {
    /// The product of windows that this is, which `node` computes.
    fn in_windows(
        &self,
        graph: &Graph,
        kernel: &Kernel,
        node: Node,
        task: Task,
        options: &EmitOptions<'_>,
    ) -> Option<InWindows> {
        if task == Task::WeightGradient || !self.has_tiles() || self.taps() == 1 && self.stride == [1; 3] {
            return None;
        }
        let operand = graph.node(node).inputs[1];
        let weight = Weight::read(graph, kernel, options, operand);
        let task = correlation::Correlation::new(self, &weight, task == Task::InputGradient);
        windows::product_of(&task, &Image::read(graph, kernel, options, operand))
    }

    /// The call of cuDNN where it takes the convolution, and `own` elsewhere.
    fn or_library(
        &self,
        own: KernelCode,
        weight: Image,
        dtypes: [DType; 3],
        task: Task,
        options: &EmitOptions<'_>,
    ) -> KernelCode {
        if !self.has_tiles() {
            return own;
        }
        match library::generate(self, weight, dtypes, task, options) {
            Some(library) => KernelCode {
                scratch: own.scratch.max(library.scratch),
                calls: vec![Call::Either(library.calls, own.calls, None)],
            },
            None => own,
        }
    }

    fn correlation(&self, weight: &Weight, gradient: bool, options: &EmitOptions<'_>) -> Option<KernelCode> {
        let task = correlation::Correlation::new(self, weight, gradient);
        if !self.has_tiles() {
            return Some(KernelCode::launches([direct::correlation(&task)?]));
        }
        if let Some(code) = pixelwise::correlation(&task, options) {
            return Some(code);
        }
        if self.is_depthwise() {
            return depthwise::correlation(&task);
        }
        if let Some(code) = tensor::correlation(&task, options) {
            return Some(code);
        }
        match self.is_narrow() {
            true => Some(KernelCode::launches([direct::correlation(&task)?])),
            false => correlation::generate(&task),
        }
    }

    fn weight_gradient(&self, out: Value, options: &EmitOptions<'_>) -> Option<KernelCode> {
        if !self.has_tiles() {
            return Some(KernelCode::launches([direct::weight(self, out)?]));
        }
        if let Some(code) = pixelwise::weight(self, out, options) {
            return Some(code);
        }
        if let Some(code) = tensor::weight(self, out, options) {
            return Some(code);
        }
        match self.is_depthwise() {
            true => depthwise::weight(self, out),
            false => weight::generate(self, out),
        }
    }

    /// Whether the kernels with vectors and tiles compute it. They take floats, no empty tensors, and at
    /// most 31 bits of pixels and of places of the depth.
    fn has_tiles(&self) -> bool {
        let counts = [
            self.x.pixels(),
            self.y.pixels(),
            self.group[0] * self.taps(),
            self.group[1] * self.taps(),
        ];
        self.dtype.is_float() && counts.iter().all(|&count| (1..1 << 30).contains(&count))
    }

    /// Whether each channel has a filter of its own.
    fn is_depthwise(&self) -> bool {
        self.group == [1, 1] && self.dims.groups > 1
    }

    /// Whether groups are narrower than a tile's narrowest vectors.
    fn is_narrow(&self) -> bool {
        self.dims.groups > 1 && self.group[0].min(self.group[1]) < 4
    }

    /// Elements of the window.
    fn taps(&self) -> usize {
        self.window.iter().product()
    }

    /// The constants of all kernels, for elements of the tensors' type.
    fn template(&self, threads: u32) -> Template {
        let register = match self.dtype.is_float() {
            true => super::image::sum_type(self.dtype),
            // Sums of integers wrap; C++ allows that of integers without a sign only.
            false => "unsigned long long",
        };
        let types = [self.dtype, self.result_dtype];
        let mut template = Template::between(
            types,
            register,
            threads,
            &[&self.x, &self.y],
            self.weight_elements(),
        );
        template
            .spatial("WINDOW", self.window)
            .spatial("STRIDE", self.stride)
            .spatial("LOW", self.low)
            .spatial("DILATION", self.dilation)
            .ints([("GROUPS", self.dims.groups), ("TAPS", self.taps())]);
        template
    }

    /// The most elements of the weight: in memory, or packed with the channels of its results padded to fours.
    fn weight_elements(&self) -> usize {
        let [depth, channels] = self.group;
        // What packs the filters of single channels takes them for one group.
        let groups = self.y.channels.div_ceil(channels.max(1));
        let padded = |results: usize, depth: usize| results.next_multiple_of(4) * depth;
        padded(channels, depth).max(padded(depth, channels)) * self.taps() * groups
    }

    /// Bytes of the type that results are summed in.
    fn sum_bytes(&self) -> usize {
        self.dtype.compute().size()
    }
}

/// The launch that adds `chunks` partial results of `parts` elements each, which are in working memory from
/// byte `at`. `place` defines `part_at`, where a result is stored.
fn join(
    mut template: Template,
    [chunks, parts]: [usize; 2],
    place: &[&str],
    at: usize,
    out: Value,
) -> Option<Launch> {
    // Many results keep the device busy by themselves; neighbouring threads read sectors of 32 bytes.
    let threads = THREADS as usize;
    let lanes = match parts.div_ceil(threads) {
        ..tile::BLOCKS => (chunks / 8).next_power_of_two().clamp(1, threads / 8),
        _ => 1,
    };
    template
        .ints([("CHUNKS", chunks), ("LANES", lanes)])
        .constant("Index", "PARTS", parts);
    let operands = vec![
        (template.sums(), 0, Argument::Scratch(at)),
        (template.writes(), 0, Argument::value(out)),
    ];
    let join = include_str!("../../kernels/cuda/convolution/join.cuh");
    let templates: Vec<&str> = place.iter().copied().chain([join]).collect();
    template.launch(&templates, parts.div_ceil(threads / lanes), operands)
}
