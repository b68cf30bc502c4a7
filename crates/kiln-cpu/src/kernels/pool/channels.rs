//! Pooling of images whose channels are contiguous (or of any layout, slower) and its gradients.
//!
//! Vectors run along the channels, so a window is a loop over places with one vector each: no slab, no
//! shuffles, and borders are tests on scalars. Threads share the lines of the result. Gradients gather from
//! the windows that contain a place: the gradient of the mean from all of them, the gradient of the maximum
//! from those whose index is the place. Where the indices may come from any other pooling, the gradient of
//! the maximum adds each element at its index instead, and threads share the images and blocks of channels.

use super::planes::{PoolGeometry, PoolKind, table};
use crate::isa::Isa;
use crate::kernels::conv::{PixelPlace, address};
use crate::kernels::element::{Element, Storage};
use crate::kernels::frame::Frame;
use crate::kernels::pieces::Pieces;
use crate::kernels::{KernelText, Param, Width, indent};
use crate::policy::SERIAL_POOLING;

/// Windows that contain a place and are looked up together on a thread's stack.
const MOST_WINDOWS: usize = 4096;

/// A tensor in memory: a C pointer and strides in elements (image, depth, height, width, channel).
#[derive(Debug, Clone)]
pub struct Memory {
    /// C expression of the pointer.
    pub pointer: String,
    /// Elements between neighbours.
    pub strides: [i64; 5],
}

impl Memory {
    fn at(&self, y: &str, x: &str) -> String {
        let place = PixelPlace {
            width: Width::Scalar,
            image: "image",
            at: ["0", y, x],
            channel: "c",
        };
        address(&self.pointer, self.strides, &place)
    }

    fn load(&self, storage: Storage, width: Width, y: &str, x: &str) -> String {
        let at = self.at(y, x);
        match width {
            Width::Scalar => storage.load(width, &at),
            Width::Vector => storage.load_spaced(&at, self.strides[4]),
        }
    }

    fn store(&self, storage: Storage, width: Width, y: &str, x: &str, value: &str) -> String {
        let at = self.at(y, x);
        match width {
            Width::Scalar => storage.store(width, &at, value),
            Width::Vector => storage.store_spaced(&at, self.strides[4], value),
        }
    }
}

/// Indices of largest elements in memory.
#[derive(Debug, Clone)]
pub struct Indices {
    /// The tensor.
    pub memory: Memory,
    /// C type of an element.
    pub ctype: &'static str,
    /// For the gradient: whether a pooling of the same shape made them.
    pub own: bool,
}

/// A pooling, or the gradient of one with respect to its input.
#[derive(Debug, Clone)]
pub struct ChannelPool {
    /// C identifier of the kernel.
    pub name: String,
    /// What it computes, for the comment above it.
    pub comment: String,
    /// The result of a window.
    pub kind: PoolKind,
    /// Shape of the forward pooling.
    pub geometry: PoolGeometry,
    /// How elements are stored. Results of 16-bit elements are rounded once, when they are stored.
    pub storage: Storage,
    /// The forward input; for the gradient, the gradient of the output.
    pub input: Memory,
    /// The result.
    pub output: Memory,
    /// For the maximum: where indices are stored, if they are wanted; for its gradient, where they are
    /// read.
    pub indices: Option<Indices>,
    /// Parameters that the pointers refer to.
    pub params: Vec<Param>,
    /// Most threads the kernel may meet; never changes the result.
    pub threads: usize,
}

impl ChannelPool {
    fn element(&self) -> Element {
        self.storage.element()
    }

    /// Lanes of vectors along the channels.
    fn lanes(&self, isa: Isa) -> usize {
        self.element().lanes(isa)
    }

    /// C type of an element or a vector of them, and zero.
    fn register(&self, width: Width) -> (&'static str, &'static str) {
        match width {
            Width::Scalar => (self.element().ctype(), "0.0f"),
            Width::Vector => (self.element().vector(), "{0}"),
        }
    }

    /// The element of the operand at a place.
    fn load(&self, width: Width, y: &str, x: &str) -> String {
        self.input.load(self.storage, width, y, x)
    }

    /// Stores the result at a place.
    fn store(&self, width: Width, y: &str, x: &str, value: &str) -> String {
        self.output.store(self.storage, width, y, x, value)
    }
}

/// As [`super::forward`].
pub fn forward(spec: &ChannelPool, isa: Isa) -> KernelText {
    let lanes = spec.lanes(isa);
    let g = &spec.geometry;
    let tables = match spec.kind {
        PoolKind::Max => String::new(),
        PoolKind::Mean { count_padding } => divisors(spec, count_padding),
    };
    let each = |width| {
        let (start, step, end) = match spec.kind {
            PoolKind::Max => max_window(spec, width, lanes),
            PoolKind::Mean { .. } => mean_window(spec, width),
        };
        let window = format!(
            "for (int64_t ty = 0; ty < {}; ty++) {{\n    const int64_t y0 = y * {} - {} + ty * {};\n    if (y0 < 0 || y0 >= {}) \
             continue;\n    for (int64_t tx = 0; tx < {}; tx++) {{\n        const int64_t x0 = x * {} - {} + tx * {};\n        if (x0 \
             < 0 || x0 >= {}) continue;\n{}    }}\n}}\n",
            g.window[0],
            g.stride[0],
            g.pad_low[0],
            g.dilation[0],
            g.input[0],
            g.window[1],
            g.stride[1],
            g.pad_low[1],
            g.dilation[1],
            g.input[1],
            indent(&step, 8),
        );
        format!("{start}{window}{end}")
    };
    let body = lines(g.output, g.channels, lanes, "", each);
    let units = g.images * g.output[0];
    let elements = g.images * g.channels * (g.input[0] * g.input[1] + g.output[0] * g.output[1]);
    kernel(spec, &tables, &body, units, elements, 0)
}

/// Statements before, within and after the window of a maximum.
fn max_window(spec: &ChannelPool, width: Width, lanes: usize) -> (String, String, String) {
    let g = &spec.geometry;
    let element = spec.load(width, "y0", "x0");
    let (real, vf) = spec.element().ctypes();
    let vi = spec.element().integers();
    let place = format!("(int32_t)(y0 * {} + x0)", g.input[1]);
    let store = spec.store(width, "y", "x", "sum");
    match width {
        Width::Vector => (
            format!("{vf} sum = {vf}_set1(-__builtin_inff());\n{vi} index = {vi}_set1(-1);\n"),
            format!(
                "const {vf} element = {element};\nconst {vi} better = (element > sum) | ((element != element) & (sum == sum)) | (index < 0);\nsum = \
                 {vf}_select(better, element, sum);\nindex = {vi}_select(better, {vi}_set1({place}), index);\n"
            ),
            match &spec.indices {
                None => format!("{store}\n"),
                Some(indices) => format!(
                    "{store}\nindex = {vi}_select(index < 0, ({vi}){{0}}, index);\nfor (int64_t l = 0; l < {lanes}; l++) ({})[l * {}] = \
                     ({})index[l];\n",
                    indices.memory.at("y", "x"),
                    indices.memory.strides[4],
                    indices.ctype
                ),
            },
        ),
        Width::Scalar => (
            format!("{real} sum = -__builtin_inff();\nint32_t index = -1;\n"),
            format!(
                "const {real} element = {element};\nif (index < 0 || element > sum || (element != element && sum == sum)) sum = element, index = \
                 {place};\n"
            ),
            match &spec.indices {
                None => format!("{store}\n"),
                Some(indices) => format!(
                    "{store}\n*({}) = ({})(index < 0 ? 0 : index);\n",
                    indices.memory.at("y", "x"),
                    indices.ctype
                ),
            },
        ),
    }
}

/// Statements before, within and after the window of a mean.
fn mean_window(spec: &ChannelPool, width: Width) -> (String, String, String) {
    let name = &spec.name;
    let (ty, zero) = spec.register(width);
    (
        format!("{ty} sum = {zero};\n"),
        format!("sum += {};\n", spec.load(width, "y0", "x0")),
        format!(
            "const {} count = {name}_count_y[y] * {name}_count_x[x];\nsum = count == 0.0f ? ({ty}){zero} : sum / count;\n{}\n",
            spec.element().ctype(),
            spec.store(width, "y", "x", "sum")
        ),
    )
}

/// Tables of the factors of the divisor.
fn divisors(spec: &ChannelPool, count_padding: bool) -> String {
    let (g, name) = (&spec.geometry, &spec.name);
    let of = |d: usize, axis: &str| {
        table(
            "float",
            &format!("{name}_count_{axis}"),
            &g.counts(d, count_padding),
            0,
            "",
        )
    };
    of(0, "y") + &of(1, "x")
}

/// Statements for units `begin..end`, the lines of an image of these extents: `before` runs for every
/// pixel, `each` for every pixel and vector of channels.
fn lines(
    [height, width]: [usize; 2],
    channels: usize,
    lanes: usize,
    before: &str,
    each: impl Fn(Width) -> String,
) -> String {
    let vectors = if channels >= lanes {
        format!(
            "        for (; c + {lanes} <= {channels}; c += {lanes}) {{\n{}        }}\n",
            indent(&each(Width::Vector), 12)
        )
    } else {
        String::new()
    };
    let rest = if channels.is_multiple_of(lanes) {
        String::new()
    } else {
        format!(
            "        for (; c < {channels}; c++) {{\n{}        }}\n",
            indent(&each(Width::Scalar), 12)
        )
    };
    format!(
        "for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t image = unit / {height}, y = unit % {height};\n    for (int64_t x \
         = 0; x < {width}; x++) {{\n{}        int64_t c = 0;\n{vectors}{rest}    }}\n}}\n",
        indent(before, 8)
    )
}

/// The kernel around `body`, with so many bytes of working memory.
fn kernel(
    spec: &ChannelPool,
    before: &str,
    body: &str,
    units: usize,
    elements: usize,
    workspace: usize,
) -> KernelText {
    let g = &spec.geometry;
    let frame = Frame {
        name: &spec.name,
        comment: &spec.comment,
        params: &spec.params,
        threads: spec.threads,
    };
    let about = format!(
        "{} images of {:?} x {} channels, vectors along the channels.",
        g.images, g.input, g.channels
    );
    let source = frame.head(&about, "") + before + &frame.part("", "units", body);
    let calls = frame.run(elements < SERIAL_POOLING)(&format!("{}_units", frame.name), units);
    frame.finish(source, &calls, workspace)
}

/// As [`super::input_grad`].
pub fn input_grad(spec: &ChannelPool, isa: Isa) -> KernelText {
    match spec.kind {
        PoolKind::Max => max_gather(spec, spec.lanes(isa)).unwrap_or_else(|| max_grad(spec, spec.lanes(isa))),
        PoolKind::Mean { count_padding } => mean_grad(spec, count_padding, spec.lanes(isa)),
    }
}

/// The gradient of the maximum, element by element. Sums of elements of 16 bits are in working memory, as
/// f32, so that they are rounded once.
fn max_grad(spec: &ChannelPool, lanes: usize) -> KernelText {
    let g = &spec.geometry;
    let [height, width] = g.input;
    let index = spec.indices.as_ref().map_or_else(
        || "0".into(),
        |indices| format!("*({})", indices.memory.at("y", "x")),
    );
    let (at_y, at_x) = (&format!("(index / {width})"), &format!("(index % {width})"));
    let pixels = height * width;
    let each_pixel = |[height, width]: [usize; 2], statement: &str| {
        format!(
            "    for (int64_t y = 0; y < {height}; y++)\n        for (int64_t x = 0; x < {width}; x++)\n            \
             for (int64_t c = from; c < to; c++) {statement}\n"
        )
    };
    let element = spec.load(Width::Scalar, "y", "x");
    let blocks = g.channels.div_ceil(lanes);
    let units = g.images * blocks;
    let sums = Pieces::new(pixels * lanes * 4, units, spec.threads);
    let (workspace, start, update, end) = match spec.storage.is_plain() {
        true => {
            let sum = spec.output.load(spec.storage, Width::Scalar, at_y, at_x);
            (
                0,
                each_pixel(g.input, &spec.store(Width::Scalar, "y", "x", "0.0f")),
                spec.store(Width::Scalar, at_y, at_x, &format!("{sum} + {element}")),
                String::new(),
            )
        }
        false => (
            sums.total(),
            format!(
                "    float *sums = (float *)(args->workspace + {});\n    __builtin_memset(sums, 0, {});\n",
                sums.at("unit"),
                pixels * lanes * 4
            ),
            format!("sums[index * {lanes} + c - from] += {element};"),
            each_pixel(
                g.input,
                &spec.store(
                    Width::Scalar,
                    "y",
                    "x",
                    &format!("sums[(y * {width} + x) * {lanes} + c - from]"),
                ),
            ),
        ),
    };
    let add = each_pixel(
        g.output,
        &format!(
            "{{\n                int64_t index = (int64_t){index};\n                index = index < 0 ? 0 : index >= \
             {pixels} ? {} : index;\n                {update}\n            }}",
            pixels - 1
        ),
    );
    let body = format!(
        "for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t image = unit / {blocks}, from = unit % \
         {blocks} * {lanes};\n    const int64_t to = from + {lanes} < {channels} ? from + {lanes} : {channels};\n\
         {start}{add}{end}}}\n",
        channels = g.channels,
    );
    let elements = g.images * g.channels * (pixels + g.output[0] * g.output[1]);
    kernel(spec, "", &body, units, elements, workspace)
}

/// The gradient of the maximum, gathered: its sums have the order of [`max_grad`]. None where the windows
/// do not determine the indices.
fn max_gather(spec: &ChannelPool, lanes: usize) -> Option<KernelText> {
    let g = &spec.geometry;
    let indices = spec.indices.as_ref().filter(|indices| indices.own)?;
    let load_indices = match (spec.element(), indices.ctype) {
        (Element::F32, "int32_t") => "vi_load",
        (Element::F32, "int64_t") => "vi_load_i64",
        (Element::F32, "uint16_t") => "vi_load_u16",
        (Element::F64, "int32_t") => "vl_load_i32",
        (Element::F64, "int64_t") => "vl_load_i64",
        (Element::F64, "uint16_t") => "vl_load_u16",
        _ => return None,
    };
    let most = match indices.ctype {
        "uint16_t" => 1 << 16,
        _ => i32::MAX as usize,
    };
    let (_, vf) = spec.element().ctypes();
    let dense = |memory: &Memory| memory.strides[4] == 1;
    // Elements of 16 bits are gathered across gaps, too: sums of them need working memory.
    let by_channel =
        dense(&indices.memory) && (!spec.storage.is_plain() || dense(&spec.input) && dense(&spec.output));
    // A window of padding only has the index 0, wherever it is; indices of larger planes wrap.
    if !by_channel || g.only_padding() || g.input[0] * g.input[1] > most {
        return None;
    }
    let windows_of_a_place = g.windows_of_a_place(0) * g.windows_of_a_place(1);
    if windows_of_a_place > MOST_WINDOWS {
        return None;
    }
    let [height, width] = g.input;
    let (grads, places) = (spec.input.at("0", "0"), indices.memory.at("0", "0"));
    let sum = |width| {
        let (ty, start) = spec.register(width);
        let from = format!("{grads} + from[k]");
        let element = match width {
            Width::Scalar => spec.storage.load(width, &from),
            Width::Vector => spec.storage.load_spaced(&from, spec.input.strides[4]),
        };
        let step = match width {
            Width::Scalar => format!("if (({places})[where[k]] == place) sum += {element};"),
            Width::Vector => {
                format!(
                    "sum += {vf}_select({load_indices}({places} + where[k]) == place, {element}, ({vf}){{0}});"
                )
            }
        };
        format!(
            "{ty} sum = {start};\nfor (int64_t k = 0; k < count; k++) {step}\n{}\n",
            spec.store(width, "y", "x", "sum")
        )
    };
    // Windows in the order of their places in the result.
    let windows = format!(
        "/* The windows that contain this place: where their gradients and indices are. */\nint64_t from[{windows_of_a_place}], where[{windows_of_a_place}], count = \
         0;\n{}{}        from[count] = y0 * {} + x0 * {};\n        where[count++] = y0 * {} + x0 * {};\n    }}\n}}\nconst int32_t place = (int32_t)(y * {width} + x);\n",
        each_window(g, "y", 0, true),
        indent(&each_window(g, "x", 1, true), 4),
        spec.input.strides[2],
        spec.input.strides[3],
        indices.memory.strides[2],
        indices.memory.strides[3],
    );
    let body = lines(g.input, g.channels, lanes, &windows, sum);
    let elements = g.images * g.channels * (height * width + g.output[0] * g.output[1]);
    Some(kernel(spec, "", &body, g.images * height, elements, 0))
}

/// The head of a loop over the windows `{axis}0` that contain the place `axis`, by its element `t{axis}` of
/// the window, from the last or from the first: only those that may.
fn each_window(g: &PoolGeometry, axis: &str, d: usize, is_last_first: bool) -> String {
    let (pad, dilation, stride) = (g.pad_low[d], g.dilation[d], g.stride[d]);
    let beyond = (g.output[d] - 1) * stride;
    let order = match is_last_first {
        true => format!("t{axis} = t{axis}_to; t{axis} >= t{axis}_from; t{axis}--"),
        false => format!("t{axis} = t{axis}_from; t{axis} <= t{axis}_to; t{axis}++"),
    };
    format!(
        "const int64_t t{axis}_to = ({axis} + {pad}) / {dilation} < {last} ? ({axis} + {pad}) / {dilation} : {last};\nconst int64_t t{axis}_from = {axis} + {pad} > {beyond} ? \
         ({axis} + {pad} - {beyond} + {}) / {dilation} : 0;\nfor (int64_t {order}) {{\n    const int64_t {axis}1 = {axis} + {pad} - t{axis} * {dilation}, {axis}0 = {axis}1 / \
         {stride};\n    if ({axis}1 % {stride} != 0) continue;\n",
        dilation - 1,
        last = g.window[d] - 1,
    )
}

fn mean_grad(spec: &ChannelPool, count_padding: bool, lanes: usize) -> KernelText {
    let (g, name) = (&spec.geometry, &spec.name);
    let each = |width| {
        let (ty, zero) = spec.register(width);
        format!(
            "{ty} sum = {zero};\n{}{}        sum += {} / ({name}_count_y[y0] * {name}_count_x[x0]);\n    }}\n}}\n{}\n",
            each_window(g, "y", 0, false),
            indent(&each_window(g, "x", 1, false), 4),
            spec.load(width, "y0", "x0"),
            spec.store(width, "y", "x", "sum"),
        )
    };
    let body = lines(g.input, g.channels, lanes, "", each);
    let elements = g.images * g.channels * (g.input[0] * g.input[1] + g.output[0] * g.output[1]);
    kernel(
        spec,
        &divisors(spec, count_padding),
        &body,
        g.images * g.input[0],
        elements,
        0,
    )
}
