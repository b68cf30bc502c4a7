//! How kernels of convolutions and pools address their images, and how their text is put together.
//!
//! Such a kernel is a template in `kernels/cuda/` in a namespace of its own, behind the constants of its
//! shape: extents and strides have names there, and the compiler folds them. Images have three spatial
//! dimensions; fewer are more with extents of one. They are read and written in the layout that the scheduler
//! chose for them.

use std::fmt::{Display, Write};

use kiln_compiler::schedule::Kernel;
use kiln_compiler::schedule::access::{Strided, window};
use kiln_compiler::schedule::layout::{join, strides};
use kiln_graph::{DType, Graph, Value};

use super::after::Role;
use super::expressions::memory_type;
use super::{Argument, EmitOptions, Launch};
use crate::code::FunctionText;

/// The text that all templates of images begin with.
const COMMON: &str = include_str!("../kernels/cuda/images/common.cuh");

/// Where results are; needs [`Template::result`].
pub const PLACE: &str = include_str!("../kernels/cuda/images/place.cuh");

/// Three spatial numbers from one to three: missing ones come first and are `missing`.
pub fn spatial(list: &[usize], missing: usize) -> [usize; 3] {
    let mut out = [missing; 3];
    out[3 - list.len()..].copy_from_slice(list);
    out
}

/// An image in memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    /// The value whose buffer it is in.
    pub base: Value,
    /// Elements in front of its first.
    pub offset: i64,
    /// Number of images, and of channels.
    pub images: usize,
    /// See `images`.
    pub channels: usize,
    /// Spatial extents.
    pub extents: [usize; 3],
    /// Elements between neighbouring images.
    pub image: i64,
    /// Elements between neighbouring places, in each dimension.
    pub places: [i64; 3],
    /// Elements between neighbouring channels.
    pub channel: i64,
}

impl Image {
    /// The operand `value` of a library kernel, through the window that it is read by.
    pub fn read(graph: &Graph, kernel: &Kernel, options: &EmitOptions<'_>, value: Value) -> Self {
        Self::new(graph, value, window(graph, options.layouts, value, &kernel.reads))
    }

    /// The result `value`, which has a buffer of its own.
    pub fn result(graph: &Graph, options: &EmitOptions<'_>, value: Value) -> Self {
        let window = Strided {
            base: value,
            offset: 0,
            strides: strides(graph.shape(value), options.layouts.get(&value)),
        };
        Self::new(graph, value, window)
    }

    fn new(graph: &Graph, value: Value, window: Strided) -> Self {
        let shape = graph.shape(value);
        let mut places = [0; 3];
        places[5 - shape.rank()..].copy_from_slice(&window.strides[2..]);
        Self {
            base: window.base,
            offset: window.offset,
            images: shape[0],
            channels: shape[1],
            extents: spatial(&shape[2..], 1),
            image: window.strides[0],
            places,
            channel: window.strides[1],
        }
    }

    /// Elements between neighbouring pixels, counted over images and places; none if they are not evenly
    /// spaced.
    pub fn pixel(&self) -> Option<i64> {
        let [depth, height, width] = self.extents;
        let [a, b, c] = self.places;
        join(&[self.images, depth, height, width], &[self.image, a, b, c]).map(|(_, stride)| stride)
    }

    /// Elements between neighbouring places of one image; none if they are not evenly spaced.
    pub fn place(&self) -> Option<i64> {
        join(&self.extents, &self.places).map(|(_, stride)| stride)
    }

    /// Number of places of one image.
    pub fn plane(&self) -> usize {
        self.extents.iter().product()
    }

    /// Number of pixels of all images.
    pub fn pixels(&self) -> usize {
        self.images * self.plane()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.pixels() * self.channels
    }

    /// Whether `count` neighbouring channels, of groups of `group`, are `count` neighbouring elements that
    /// may be accessed together.
    pub fn has_vectors(&self, count: usize, group: usize) -> bool {
        let aligned = |stride: i64| stride % count as i64 == 0;
        self.channel == 1
            && group.is_multiple_of(count)
            && aligned(self.offset)
            && aligned(self.image)
            && self.places.into_iter().all(aligned)
    }

    /// Whether channels are nearer to each other than places are.
    pub fn is_channels_last(&self) -> bool {
        let place = |axis: usize| self.extents[axis] > 1 && self.places[axis].abs() < self.channel.abs();
        self.channels > 1 && !(0..3).any(place)
    }

    /// One more than the largest distance of an element from the buffer's first.
    fn span(&self) -> i64 {
        let mut span = self.offset + 1;
        let dimensions = [
            (self.images, self.image),
            (self.channels, self.channel),
            (self.extents[0], self.places[0]),
            (self.extents[1], self.places[1]),
            (self.extents[2], self.places[2]),
        ];
        for (extent, stride) in dimensions {
            span += (extent as i64 - 1).max(0) * stride.abs();
        }
        span
    }
}

/// Whether kernels count images, channels and the places of each dimension in 31 bits, with windows that
/// reach so far beyond an image. A plane may have more places than that.
pub fn has_places(images: [&Image; 2], beyond: [usize; 3]) -> bool {
    let counted = |count: usize| count <= i32::MAX as usize;
    images.iter().all(|image| {
        counted(image.images)
            && counted(image.channels)
            && (0..3).all(|axis| counted(image.extents[axis].saturating_add(beyond[axis])))
    })
}

/// How far beyond an image windows reach, the last of which may begin in its padding.
pub fn beyond(
    size: [usize; 3],
    dilation: [usize; 3],
    [low, high]: [[usize; 3]; 2],
    stride: [usize; 3],
) -> [usize; 3] {
    std::array::from_fn(|axis| {
        let reach = size[axis].saturating_mul(dilation[axis]);
        let padding = low[axis].saturating_add(high[axis]);
        reach.saturating_add(padding).saturating_add(stride[axis])
    })
}

/// The type that sums of `dtype` are given in: integers in 64 bits, of which the result has the lowest. What
/// adds up integers does so without a sign, where they wrap.
pub fn sum_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 | DType::F16 | DType::BF16 => "float",
        DType::U64 => "unsigned long long",
        _ => "long long",
    }
}

/// The text of a kernel: its constants, then templates.
pub struct Template {
    text: String,
    memory: &'static str,
    stored: &'static str,
    register: &'static str,
    threads: u32,
}

impl Template {
    /// A kernel of blocks of `threads` on elements of `dtype`, computed in the type `register`, that accesses
    /// `images`.
    pub fn new(dtype: DType, register: &'static str, threads: u32, images: &[&Image]) -> Self {
        Self::between([dtype; 2], register, threads, images, 0)
    }

    /// [`Template::new`] with results of another type than the elements that are read, the two types in this
    /// order, and with other tensors of up to `others` elements, such as weights.
    pub fn between(
        [dtype, result]: [DType; 2],
        register: &'static str,
        threads: u32,
        images: &[&Image],
        others: usize,
    ) -> Self {
        let most = i32::MAX as usize;
        // What is broadcast has more elements, which are counted, than its memory.
        let is_wide = |image: &&Image| image.span() > i64::from(i32::MAX) || image.elements() > most;
        let wide = others > most || images.iter().any(is_wide);
        let index = if wide { "long long" } else { "int" };
        let (memory, stored) = (memory_type(dtype), memory_type(result));
        let is_half = |dtype: DType| matches!(dtype, DType::F16 | DType::BF16);
        let widen = match is_half(dtype) {
            true => "kiln_widen(x)".to_owned(),
            false => format!("({register})x"),
        };
        let narrow = match is_half(result) {
            true => format!("kiln_narrow<{stored}>(x)"),
            false => format!("({stored})x"),
        };
        let text = format!(
            "namespace @_ {{\ntypedef {memory} T;\ntypedef {stored} O;\ntypedef {register} R;\ntypedef {index} Index;\ntypedef unsigned {index} Count;\ninline R widen(T x) {{ return {widen}; }}\n\
             inline O narrow(R x) {{ return {narrow}; }}\nconstexpr int THREADS = {threads};\n"
        );
        Self {
            text,
            memory,
            stored,
            register,
            threads,
        }
    }

    /// The parameter of elements that are read.
    pub fn reads(&self) -> String {
        format!("const {}", self.memory)
    }

    /// The parameter of results that are written.
    pub fn writes(&self) -> String {
        self.stored.to_owned()
    }

    /// The parameter of elements that the kernel writes in another order for another kernel to read.
    pub fn packs(&self) -> String {
        self.memory.to_owned()
    }

    /// The parameter of sums that are read.
    pub fn sums(&self) -> String {
        format!("const {}", self.register)
    }

    /// The parameter of sums that are written.
    pub fn sums_written(&self) -> String {
        self.register.to_owned()
    }

    /// A constant; numbers of elements are of the type `Index`.
    pub fn constant(&mut self, kind: &str, name: &str, value: impl Display) -> &mut Self {
        let _ = writeln!(self.text, "constexpr {kind} {name} = {value};");
        self
    }

    /// Another name of a type.
    pub fn alias(&mut self, name: &str, kind: &str) -> &mut Self {
        let _ = writeln!(self.text, "typedef {kind} {name};");
        self
    }

    /// Integers.
    pub fn ints<V: Display>(&mut self, values: impl IntoIterator<Item = (&'static str, V)>) -> &mut Self {
        for (name, value) in values {
            self.constant("int", name, value);
        }
        self
    }

    /// Truth values.
    pub fn bools(&mut self, values: impl IntoIterator<Item = (&'static str, bool)>) -> &mut Self {
        for (name, value) in values {
            self.constant("bool", name, value);
        }
        self
    }

    /// An integer of each dimension: the name and 0, 1 or 2.
    pub fn spatial<V: Display>(&mut self, name: &str, values: [V; 3]) -> &mut Self {
        for (axis, value) in values.into_iter().enumerate() {
            self.constant("int", &format!("{name}{axis}"), value);
        }
        self
    }

    /// The strides of an image under the letter `name`.
    pub fn strides(&mut self, name: char, image: &Image) -> &mut Self {
        self.constant("Index", &format!("{name}_IMAGE"), image.image);
        self.constant("Index", &format!("{name}_CHANNEL"), image.channel);
        for (axis, stride) in image.places.into_iter().enumerate() {
            self.constant("Index", &format!("{name}{axis}"), stride);
        }
        self
    }

    /// The constants that `place_of` and `result_at` need: the result `Y`, whose elements are counted with
    /// the channels last or first.
    pub fn result(&mut self, image: &Image, channels_last: bool) -> &mut Self {
        self.strides('Y', image)
            .spatial("RESULT", image.extents)
            .ints([("CHANNELS", image.channels)])
            .bools([("CHANNELS_LAST", channels_last)])
            .constant("Index", "RESULTS", image.elements())
    }

    /// The launch of the function `run` of `templates` with `operands`: their declared types, the elements to
    /// skip, and the arguments.
    pub fn launch(
        self,
        templates: &[&str],
        blocks: usize,
        operands: Vec<(String, i64, Argument)>,
    ) -> Option<Launch> {
        let mut helpers = self.text;
        for template in [COMMON].iter().chain(templates) {
            helpers.push_str(template);
        }
        helpers.push_str("}\n");
        let mut parameters = Vec::new();
        let mut passed = Vec::new();
        let mut arguments = Vec::new();
        for (number, (kind, offset, argument)) in operands.into_iter().enumerate() {
            parameters.push(format!("{kind}* a{number}"));
            passed.push(match offset {
                0 => format!("a{number}"),
                _ => format!("a{number} + {offset}ll"),
            });
            arguments.push(argument);
        }
        Some(Launch {
            text: FunctionText {
                helpers,
                parameters,
                body: format!("@_::run({});", passed.join(", ")),
                threads: self.threads,
                device_only: false,
                blocks: 0,
            },
            grid: [
                u32::try_from(blocks).ok().filter(|&blocks| blocks < 1 << 31)?,
                1,
                1,
            ],
            shared_bytes: 0,
            role: Role::Alone,
            arguments,
        })
    }
}
