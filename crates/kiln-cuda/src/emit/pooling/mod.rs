//! Pools and their gradients: a thread has a few neighbouring channels of one place of the result, or of a
//! block of them.
//!
//! Gradients are gathered, so that no two threads add to one element: the thread of an input element, or of a
//! block of them, looks at all windows that contain one of its own. The gradient of a pool of largest
//! elements has no operand for the windows. They are known where the pool that made its indices is in the
//! same graph; elsewhere [`scatter`] reads all indices of a channel.

mod scatter;

use kiln_compiler::schedule::Kernel;
use kiln_graph::op::{Op, Window};
use kiln_graph::range::Range;
use kiln_graph::{DType, Graph, Node, Value};

use super::expressions::memory_type;
use super::image::{Image, PLACE, Template, beyond, has_places, spatial, sum_type};
use super::{Argument, EmitOptions, KernelCode};

const WINDOW: &str = include_str!("../../kernels/cuda/pooling/window.cuh");
const MAX: &str = include_str!("../../kernels/cuda/pooling/max.cuh");
const MAX_GRADIENT: &str = include_str!("../../kernels/cuda/pooling/max_gradient.cuh");
const MEAN: &str = include_str!("../../kernels/cuda/pooling/mean.cuh");
const MEAN_GRADIENT: &str = include_str!("../../kernels/cuda/pooling/mean_gradient.cuh");

/// Threads of a block.
const THREADS: u32 = 256;

/// The most neighbouring channels of a thread.
const MOST_CHANNELS: usize = 8;

/// The most places of a thread of a gradient of largest elements. Those of one stride share their windows: the
/// gradient of ResNet's first pool (128 images) takes 99 us in blocks of 2 x 2 and 146 place by place (H200;
/// 84 would move the tensors). Loads of four windows under way at once take registers, and 117 us.
const MOST_PLACES: usize = 4;

/// The longest row of a window whose elements are written out one after the other.
const LONGEST_ROW: usize = 9;

/// What the kernels of a pool share.
struct Pool {
    dtype: DType,
    /// The image that is read, and the one that is written.
    image: Image,
    result: Image,
    /// Indices of largest elements, read or written, and their type.
    indices: Option<(Image, DType)>,
}

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let data = graph.node(node);
    let (from, to) = (data.inputs[0], data.outputs[0]);
    if graph.ty(to).numel() == 0 {
        return Some(KernelCode::default());
    }
    if !(3..=5).contains(&graph.shape(to).rank()) {
        return None;
    }
    let read = |value: Value| Image::read(graph, kernel, options, value);
    let indices = match (data.inputs.get(1), data.outputs.get(1)) {
        (Some(&value), _) => Some((read(value), graph.dtype(value))),
        (_, Some(&value)) => Some((Image::result(graph, options, value), graph.dtype(value))),
        _ => None,
    };
    let pool = Pool {
        dtype: graph.dtype(to),
        image: read(from),
        result: Image::result(graph, options, to),
        indices,
    };
    let is_counted = |window: &Window| pool.has_places(Some(window));
    match &data.op {
        Op::MaxPool(window) | Op::MaxPoolWithIndices { window, .. } if is_counted(window) => pool.max(window),
        Op::MaxPoolGrad { .. } => {
            let window = made_by(graph, node).filter(|window| is_counted(window) && pool.is_covered(window));
            match window {
                Some(window) => pool.max_gradient(window),
                None if pool.has_places(None) => scatter::generate(&pool),
                None => None,
            }
        }
        Op::AvgPool {
            window,
            count_include_pad,
        } if is_counted(window) => pool.mean(window, *count_include_pad, MEAN),
        Op::AvgPoolGrad {
            window,
            count_include_pad,
            ..
        } if is_counted(window) => pool.mean(window, *count_include_pad, MEAN_GRADIENT),
        _ => None,
    }
}

/// Places of a thread of the gradient of largest elements, in each dimension.
fn block(window: &Window) -> [usize; 3] {
    let mut block = [1; 3];
    for axis in (0..3).rev() {
        let each = spatial(&window.stride, 1)[axis].min(2);
        if each * block.iter().product::<usize>() <= MOST_PLACES {
            block[axis] = each;
        }
    }
    block
}

/// The window of the pool that made the indices of the gradient `node`, if it is known.
fn made_by(graph: &Graph, node: Node) -> Option<&Window> {
    let data = graph.node(node);
    let maker = graph.def(data.inputs[1]);
    match &maker.op {
        Op::MaxPoolWithIndices { window, .. } => {
            let same = graph.shape(maker.inputs[0]) == graph.shape(data.outputs[0]);
            same.then_some(window)
        }
        _ => None,
    }
}

impl Pool {
    fn max(&self, window: &Window) -> Option<KernelCode> {
        let mut template = self.template(window, memory_register(self.dtype), true);
        template.constant("bool", "WITH_INDICES", self.indices.is_some());
        self.index_constants(&mut template);
        let operands = vec![
            (
                template.reads(),
                self.image.offset,
                Argument::value(self.image.base),
            ),
            (template.writes(), 0, Argument::value(self.result.base)),
            self.index_operand(false),
        ];
        let lowest = format!("inline R lowest() {{ return {}; }}\n", lowest(self.dtype));
        let numbers = self.result.elements();
        self.launch(template, &[&lowest, PLACE, WINDOW, MAX], operands, numbers)
    }

    fn max_gradient(&self, window: &Window) -> Option<KernelCode> {
        let block = block(window);
        let blocks: [usize; 3] = std::array::from_fn(|axis| self.result.extents[axis].div_ceil(block[axis]));
        let numbers = blocks.iter().product::<usize>() * self.result.images * self.result.channels;
        let mut template = self.template(window, sum_register(self.dtype), true);
        self.index_constants(&mut template);
        template
            .spatial("BLOCK", block)
            .spatial("BLOCKS", blocks)
            .constant("Index", "NUMBERS", numbers);
        let operands = vec![
            (
                template.reads(),
                self.image.offset,
                Argument::value(self.image.base),
            ),
            self.index_operand(true),
            (template.writes(), 0, Argument::value(self.result.base)),
        ];
        self.launch(template, &[PLACE, WINDOW, MAX_GRADIENT], operands, numbers)
    }

    fn mean(&self, window: &Window, count_padding: bool, text: &str) -> Option<KernelCode> {
        let mut template = self.template(window, sum_type(self.dtype), count_padding);
        template.alias("S", sum_register(self.dtype));
        let operands = vec![
            (
                template.reads(),
                self.image.offset,
                Argument::value(self.image.base),
            ),
            (template.writes(), 0, Argument::value(self.result.base)),
        ];
        let numbers = self.result.elements();
        self.launch(template, &[PLACE, WINDOW, text], operands, numbers)
    }

    /// Whether kernels count the places of each dimension in 31 bits, and those that `window` reaches.
    fn has_places(&self, window: Option<&Window>) -> bool {
        let reach = |window: &Window| {
            let [size, dilation, stride] =
                [&window.size, &window.dilation, &window.stride].map(|list| spatial(list, 1));
            let padding = [&window.pad_low, &window.pad_high].map(|list| spatial(list, 0));
            beyond(size, dilation, padding, stride)
        };
        has_places([&self.image, &self.result], window.map_or([0; 3], reach))
    }

    /// Whether indices say which window they are of: every window has an element that is no padding, and no
    /// index wrapped.
    fn is_covered(&self, window: &Window) -> bool {
        let plane = self.result.plane() as i128;
        let holds = |dtype: DType| matches!(Range::of(dtype), Some(Range::Int(_, most)) if plane <= most + 1);
        if !self.indices.as_ref().is_some_and(|(_, dtype)| holds(*dtype)) {
            return false;
        }
        let (from, to) = (self.result.extents, self.image.extents);
        let (size, stride) = (spatial(&window.size, 1), spatial(&window.stride, 1));
        let (low, dilation) = (spatial(&window.pad_low, 0), spatial(&window.dilation, 1));
        (0..3).all(|axis| {
            let inside = low[axis]..low[axis] + from[axis];
            (0..to[axis])
                .all(|o| (0..size[axis]).any(|k| inside.contains(&(o * stride[axis] + k * dilation[axis]))))
        })
    }

    /// Neighbouring channels of a thread: as many as 16 bytes hold, if all images have them side by side.
    fn vector(&self) -> usize {
        let whole = (16 / self.dtype.size()).min(MOST_CHANNELS);
        let all = || {
            [&self.image, &self.result]
                .into_iter()
                .chain(self.indices.iter().map(|(image, _)| image))
        };
        let widths = [whole, whole / 2];
        let fits = |width: usize| width > 1 && all().all(|image| image.has_vectors(width, image.channels));
        widths.into_iter().find(|&width| fits(width)).unwrap_or(1)
    }

    fn template(&self, window: &Window, register: &'static str, count_padding: bool) -> Template {
        let row = spatial(&window.size, 1)[2];
        let mut images = vec![&self.image, &self.result];
        images.extend(self.indices.iter().map(|(image, _)| image));
        let mut template = Template::new(self.dtype, register, THREADS, &images);
        template
            .spatial("WINDOW", spatial(&window.size, 1))
            .spatial("STRIDE", spatial(&window.stride, 1))
            .spatial("LOW", spatial(&window.pad_low, 0))
            .spatial("HIGH", spatial(&window.pad_high, 0))
            .spatial("DILATION", spatial(&window.dilation, 1))
            .spatial("IMAGE", self.image.extents)
            .strides('X', &self.image)
            .result(&self.result, self.result.is_channels_last())
            .bools([("COUNT_PADDING", count_padding)])
            .ints([
                ("VECTOR", self.vector()),
                ("UNROLLED", if row <= LONGEST_ROW { row } else { 1 }),
            ]);
        template
    }

    /// The type and the strides of the indices; a pool without indices gives the result's in their place.
    fn index_constants(&self, template: &mut Template) {
        let (image, dtype) = match &self.indices {
            Some((image, dtype)) => (image, *dtype),
            None => (&self.result, DType::I32),
        };
        template.alias("I", memory_type(dtype)).strides('I', image);
    }

    fn index_operand(&self, read: bool) -> (String, i64, Argument) {
        let (image, dtype) = match &self.indices {
            Some((image, dtype)) => (image, *dtype),
            None => return ("int".into(), 0, Argument::Scratch(0)),
        };
        let constant = if read { "const " } else { "" };
        (
            format!("{constant}{}", memory_type(dtype)),
            image.offset,
            Argument::value(image.base),
        )
    }

    /// The launch of threads that have `numbers` elements, or blocks of them, [`Self::vector`] each.
    fn launch(
        &self,
        template: Template,
        templates: &[&str],
        operands: Vec<(String, i64, Argument)>,
        numbers: usize,
    ) -> Option<KernelCode> {
        let blocks = numbers.div_ceil(THREADS as usize * self.vector());
        Some(KernelCode::launches([
            template.launch(templates, blocks, operands)?
        ]))
    }
}

/// The type that elements are compared in.
fn memory_register(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 | DType::BF16 => "float",
        _ => memory_type(dtype),
    }
}

/// The type that elements are added in, where integers wrap.
fn sum_register(dtype: DType) -> &'static str {
    match dtype.is_float() {
        true => sum_type(dtype),
        false => "unsigned long long",
    }
}

/// An element below all others, in CUDA C++.
fn lowest(dtype: DType) -> String {
    let bits = 8 * dtype.size() as u32;
    if dtype.is_float() {
        "(R)__uint_as_float(0xff800000u)".into()
    } else if dtype.is_signed_int() {
        format!("(R)(1ull << {})", bits - 1)
    } else {
        "0".into()
    }
}
