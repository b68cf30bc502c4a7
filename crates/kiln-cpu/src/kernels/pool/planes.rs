//! Pooling of channels-first images and its gradients, a plane at a time.
//!
//! A thread copies a plane into a padded slab, runs a vector of neighbouring windows over it, collects the
//! result plane and lets the caller consume it. Padding is minus infinity for the maximum and zero for the
//! mean, so no window needs a test. The divisor of the mean is a factor for the row times one for the
//! column, both in tables. The gradient of the mean spreads the divided gradient with zeros between its
//! elements and sums windows of that; the gradient of the maximum adds each element at its index.

use crate::isa::Isa;
use crate::kernels::conv::{LoadImage, PixelPlace};
use crate::kernels::frame::Frame;
use crate::kernels::pieces::Pieces;
use crate::kernels::plane::{Slab, spaced};
use crate::kernels::{KernelText, Param, Width, indent, round_up, vector};
use crate::policy::SERIAL_POOLING;

/// Elements of a window for each of which code is written out.
const UNROLLED: usize = 64;

/// The result of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// Its largest element; NaN if there is one.
    Max,
    /// The mean.
    Mean {
        /// Whether padding counts in the divisor.
        count_padding: bool,
    },
}

/// Shape of a pooling. Gradients are described by their forward pooling. Pairs are height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolGeometry {
    /// Images.
    pub images: usize,
    /// Channels.
    pub channels: usize,
    /// Extents of the input.
    pub input: [usize; 2],
    /// Extents of the output.
    pub output: [usize; 2],
    /// Extents of the window.
    pub window: [usize; 2],
    /// Step of the window.
    pub stride: [usize; 2],
    /// Padding before the first element.
    pub pad_low: [usize; 2],
    /// Padding after the last element. A window may reach beyond it; elements there count in no divisor.
    pub pad_high: [usize; 2],
    /// Distance between elements of the window.
    pub dilation: [usize; 2],
}

/// A function to statements, from a place (`[0, 0, y * width + x]`, by the number of the pixel in its
/// plane), the C variable with the value (`float` or `vf`) and, for the maximum, the C variable with the
/// index of the largest element within its input plane (`int64_t` or `vi`).
pub type ConsumePooled<'a> = Box<dyn Fn(&PixelPlace<'_>, &str, &str) -> String + 'a>;

/// A pooling, or the gradient of one with respect to its input.
pub struct PoolSpec<'a> {
    /// C identifier of the kernel.
    pub name: String,
    /// What it computes, for the comment above it.
    pub comment: String,
    /// The result of a window.
    pub kind: PoolKind,
    /// Shape of the forward pooling.
    pub geometry: PoolGeometry,
    /// The forward input, vectors along the width; for the gradient, the gradient of the output.
    pub load: LoadImage<'a>,
    /// For the gradient of the maximum: the index (`int64_t`) that the forward pooling gave, at a place
    /// given by the number of the pixel in its plane.
    pub index: Option<LoadImage<'a>>,
    /// The consumer of the result.
    pub consume: ConsumePooled<'a>,
    /// Parameters that the snippets refer to.
    pub params: Vec<Param>,
    /// Most threads the kernel may meet; decides the size of the workspace, never the result.
    pub threads: usize,
}

impl PoolGeometry {
    fn planes(&self) -> usize {
        self.images * self.channels
    }

    fn span(&self, d: usize) -> usize {
        (self.window[d] - 1) * self.dilation[d]
    }

    /// How many windows a place of the input is in at most, along dimension `d`.
    pub(super) fn windows_of_a_place(&self, d: usize) -> usize {
        let windows = self.span(d) / self.stride[d] + 1;
        windows.min(self.window[d]).min(self.output[d])
    }

    /// Whether code for each element of a window is written out.
    pub fn is_unrolled(&self) -> bool {
        self.window[0] * self.window[1] <= UNROLLED
    }

    /// `each` for the elements of the window: given the offset of an element in a slab of rows so long, and
    /// in the input.
    fn each_element(&self, pitch: usize, each: impl Fn(&str, &str) -> String) -> String {
        let [height, width] = self.window;
        let [down, across] = self.dilation;
        if self.is_unrolled() {
            let elements = (0..height).flat_map(|ty| (0..width).map(move |tx| (ty * down, tx * across)));
            return elements
                .map(|(y, x)| each(&(y * pitch + x).to_string(), &(y * self.input[1] + x).to_string()))
                .collect();
        }
        let offset = |pitch: usize| format!("(ty * {} + tx * {across})", down * pitch);
        format!(
            "for (int64_t ty = 0; ty < {height}; ty++)\n    for (int64_t tx = 0; tx < {width}; tx++) {{\n{}    }}\n",
            indent(
                &each(&offset(pitch), &format!("(int32_t){}", offset(self.input[1]))),
                8
            )
        )
    }

    /// Places of the window at output `o` along dimension `d`, as offsets from the first input element.
    fn places(&self, d: usize, o: usize) -> impl Iterator<Item = i64> + use<> {
        let start = (o * self.stride[d]) as i64 - self.pad_low[d] as i64;
        let dilation = self.dilation[d] as i64;
        (0..self.window[d] as i64).map(move |t| start + t * dilation)
    }

    /// The factor of the divisor along dimension `d`, for each output.
    pub(super) fn counts(&self, d: usize, count_padding: bool) -> Vec<usize> {
        let (low, high) = if count_padding {
            (self.pad_low[d] as i64, self.pad_high[d] as i64)
        } else {
            (0, 0)
        };
        let inside = -low..self.input[d] as i64 + high;
        (0..self.output[d])
            .map(|o| self.places(d, o).filter(|place| inside.contains(place)).count())
            .collect()
    }

    /// Whether some window contains nothing but padding.
    pub(super) fn only_padding(&self) -> bool {
        (0..2).any(|d| self.firsts(d).contains(&-1))
    }

    /// The first place of each window that lies inside the input, or -1.
    fn firsts(&self, d: usize) -> Vec<i64> {
        let inside = 0..self.input[d] as i64;
        (0..self.output[d])
            .map(|o| {
                self.places(d, o)
                    .find(|place| inside.contains(place))
                    .unwrap_or(-1)
            })
            .collect()
    }
}

/// A constant table in C, with room for a vector past its end.
pub(super) fn table<T: ToString>(ctype: &str, name: &str, values: &[T], lanes: usize, rest: &str) -> String {
    let mut list: Vec<String> = values.iter().map(T::to_string).collect();
    list.resize(values.len() + lanes, rest.into());
    format!("static const {ctype} {name}[] = {{{}}};\n", list.join(", "))
}

/// The working memory of a kernel that works plane by plane.
///
/// A plane has the padded slab that its operand's plane is copied into, if the kernel needs one, then the
/// plane of results, then the plane of indices, if there is one.
struct PlaneMemory {
    slab: Option<Slab>,
    /// Elements of the result plane.
    pixels: usize,
    /// Whether there are indices.
    indices: bool,
    lanes: usize,
}

impl PlaneMemory {
    fn forward(kind: PoolKind, g: &PoolGeometry, lanes: usize) -> Self {
        let [height, width] = g.output;
        let rows = height.saturating_sub(1) * g.stride[0] + g.span(0) + 1;
        let reach = round_up(width, lanes) * g.stride[1] + g.span(1) + lanes;
        let before = g.pad_low.map(|pad| pad as i64);
        let slab = Slab::new(g.input, before, rows, reach, [1, 1], lanes);
        Self {
            slab: Some(match kind {
                PoolKind::Max => slab.surrounded_by("-__builtin_inff()"),
                PoolKind::Mean { .. } => slab,
            }),
            pixels: height * width,
            indices: kind == PoolKind::Max,
            lanes,
        }
    }

    fn input_grad(kind: PoolKind, g: &PoolGeometry, lanes: usize) -> Self {
        let [height, width] = g.input;
        let slab = || {
            let before = [0, 1].map(|d| g.span(d) as i64 - g.pad_low[d] as i64);
            let rows = height + g.span(0);
            let reach = round_up(width, lanes) + g.span(1) + lanes;
            Slab::new(g.output, before, rows, reach, g.stride, lanes)
        };
        Self {
            slab: matches!(kind, PoolKind::Mean { .. }).then(slab),
            pixels: height * width,
            indices: false,
            lanes,
        }
    }

    fn slab_bytes(&self) -> usize {
        self.slab.as_ref().map_or(0, |slab| slab.bytes(self.lanes))
    }

    fn plane_bytes(&self) -> usize {
        round_up((self.pixels + self.lanes) * 4, 64)
    }

    /// That of a kernel for `planes`, which at most `threads` threads share.
    fn pieces(&self, planes: usize, threads: usize) -> Pieces {
        let bytes = self.slab_bytes() + self.plane_bytes() * if self.indices { 2 } else { 1 };
        Pieces::new(bytes, planes, threads)
    }
}

/// Bytes of working memory of [`forward`], or of [`input_grad`] if `grad`, for up to `threads` threads.
pub fn workspace(kind: PoolKind, geometry: &PoolGeometry, grad: bool, threads: usize, isa: Isa) -> usize {
    let lanes = vector::lanes(isa);
    let memory = match grad {
        false => PlaneMemory::forward(kind, geometry, lanes),
        true => PlaneMemory::input_grad(kind, geometry, lanes),
    };
    memory.pieces(geometry.planes(), threads).total()
}

/// Parts of a kernel that works plane by plane.
struct Planes {
    memory: PlaneMemory,
    /// Definitions before the loop.
    before: String,
    /// Statements that compute `result` (and `indices`) for one plane.
    body: String,
}

impl Planes {
    fn kernel(self, spec: &PoolSpec<'_>) -> KernelText {
        let (g, consume) = (&spec.geometry, &spec.consume);
        let frame = Frame {
            name: &spec.name,
            comment: &spec.comment,
            params: &spec.params,
            threads: spec.threads,
        };
        let Self { memory, before, body } = self;
        let units = g.planes();
        let (slab, pieces) = (memory.slab_bytes(), memory.pieces(units, spec.threads));
        let PlaneMemory {
            pixels,
            indices,
            lanes,
            ..
        } = memory;
        let consume = |width| {
            let place = PixelPlace {
                width,
                image: "image",
                at: ["0", "0", "x"],
                channel: "channel",
            };
            indent(&consume(&place, "sum", "index"), 8)
        };
        let index = |text: &str| if indices { indent(text, 8) } else { String::new() };
        let about = format!(
            "{} images of {:?} x {} channels, plane by plane.",
            g.images, g.input, g.channels
        );
        let body = format!(
            "for (int64_t unit = begin; unit < end; unit++) {{\n    char *own = args->workspace + {};\n    float *slab = (float *)own, *result = \
             (float *)(own + {slab});\n    int32_t *indices = (int32_t *)(own + {});\n    (void)slab, (void)indices;\n    const int64_t image = unit / \
             {channels}, channel = unit % {channels};\n{}    int64_t x = 0;\n    for (; x + {lanes} <= {pixels}; x += {lanes}) {{\n        vf sum = \
             vf_load(result + x);\n{}{}    }}\n    for (; x < {pixels}; x++) {{\n        float sum = result[x];\n{}{}    }}\n}}\n",
            pieces.at("unit"),
            slab + memory.plane_bytes(),
            indent(&body, 4),
            index("vi index = vi_load(indices + x);"),
            consume(Width::Vector),
            index("int64_t index = indices[x];"),
            consume(Width::Scalar),
            channels = g.channels,
        );
        let small = units * (g.input[0] * g.input[1] + pixels) < SERIAL_POOLING;
        let source = frame.head(&about, "") + &before + &frame.part("", "planes", &body);
        let calls = frame.run(small)(&format!("{}_planes", frame.name), units);
        frame.finish(source, &calls, pieces.total())
    }
}

fn fill(spec: &PoolSpec<'_>, slab: &Slab, lanes: usize) -> String {
    let load = |width| {
        (spec.load)(&PixelPlace {
            width,
            image: "image",
            at: ["0", "y", "x"],
            channel: "channel",
        })
    };
    slab.fill(
        &load,
        &spec.name,
        &format!("{}_fill", spec.name),
        &spec.params,
        lanes,
    )
}

/// `out[n, c, p]` is the maximum or mean of `x[n, c, p * stride - pad_low + t * dilation]` over the
/// window's elements `t` (those inside the input). The index of the maximum is that of the first of equals,
/// or of the first NaN; 0 where the window holds padding only.
pub fn forward(spec: PoolSpec<'_>, isa: Isa) -> KernelText {
    let lanes = vector::lanes(isa);
    let g = &spec.geometry;
    let [height, width] = g.output;
    let memory = PlaneMemory::forward(spec.kind, g, lanes);
    let slab = memory.slab.as_ref().expect("forward poolings have a slab");
    let each = g.each_element(slab.pitch, |offset, number| {
        let element = spaced(
            &format!("at + x * {} + {offset}", g.stride[1]),
            g.stride[1],
            lanes,
        );
        match spec.kind {
            PoolKind::Mean { .. } => format!("sum += {element};\n"),
            PoolKind::Max => format!(
                "{{\n    const vf element = {element};\n    const vi better = (element > sum) | ((element != element) & (sum == sum));\n    sum \
                 = vf_select(better, element, sum);\n    index = vi_select(better, place + {number}, index);\n}}\n"
            ),
        }
    });
    let (tables, start, end) = match spec.kind {
        PoolKind::Max => (
            table("int32_t", "first_y", &g.firsts(0), 0, "") + &table("int32_t", "first_x", &g.firsts(1), lanes, "-1"),
            format!(
                "vf sum = vf_set1(-__builtin_inff());\n/* Where nothing is larger than minus infinity: the first element. */\nconst vi lowest = \
                 vi_load(first_x + x);\nvi index = first_y[y] < 0 ? (vi){{0}} : vi_select(lowest < 0, (vi){{0}}, lowest + first_y[y] * {w});\nconst \
                 vi place = (vi_iota() + (int32_t)x) * {sx} + (int32_t)((y * {sy} - {py}) * {w} - {px});\n",
                w = g.input[1],
                sy = g.stride[0],
                sx = g.stride[1],
                py = g.pad_low[0],
                px = g.pad_low[1],
            ),
            format!("vi_store(indices + y * {width} + x, index);\n"),
        ),
        PoolKind::Mean { count_padding } => (
            table("float", "count_y", &g.counts(0, count_padding), 0, "")
                + &table("float", "count_x", &g.counts(1, count_padding), lanes, "1"),
            "vf sum = {0};\n".to_owned(),
            "const vf count = count_y[y] * vf_load(count_x + x);\nsum = vf_select(count == 0, (vf){0}, sum / count);\n".to_owned(),
        ),
    };
    let body = format!(
        "{}{}_fill(args, image, channel, slab);\nfor (int64_t y = 0; y < {height}; y++) {{\n    const float *at = slab + y * {};\n    /* What a vector \
         writes past the end of its row, the next row overwrites. */\n    for (int64_t x = 0; x < {width}; x += {lanes}) {{\n{}{}{}        \
         vf_store(result + y * {width} + x, sum);\n    }}\n}}\n",
        tables,
        spec.name,
        g.stride[0] * slab.pitch,
        indent(&start, 8),
        indent(&each, 8),
        indent(&end, 8),
    );
    let planes = Planes {
        before: fill(&spec, slab, lanes),
        body,
        memory,
    };
    planes.kernel(&spec)
}

/// The gradient of [`forward`] with respect to its input. For the maximum, each element of `dy` is added at
/// its index (clamped into the plane).
pub fn input_grad(spec: PoolSpec<'_>, isa: Isa) -> KernelText {
    match spec.kind {
        PoolKind::Max => max_grad(&spec, vector::lanes(isa)),
        PoolKind::Mean { count_padding } => mean_grad(&spec, count_padding, vector::lanes(isa)),
    }
}

fn max_grad(spec: &PoolSpec<'_>, lanes: usize) -> KernelText {
    let g = &spec.geometry;
    let memory = PlaneMemory::input_grad(spec.kind, g, lanes);
    let pixels = memory.pixels;
    let place = PixelPlace {
        width: Width::Scalar,
        image: "image",
        at: ["0", "0", "i"],
        channel: "channel",
    };
    let index = spec
        .index
        .as_ref()
        .map_or_else(|| "0".into(), |index| index(&place));
    let body = format!(
        "__builtin_memset(result, 0, {pixels} * sizeof(float));\nfor (int64_t i = 0; i < {}; i++) {{\n    int64_t index = {index};\n    index = index < 0 \
         ? 0 : index >= {pixels} ? {} : index;\n    result[index] += {};\n}}\n",
        g.output[0] * g.output[1],
        pixels - 1,
        (spec.load)(&place),
    );
    Planes {
        before: String::new(),
        body,
        memory,
    }
    .kernel(spec)
}

fn mean_grad(spec: &PoolSpec<'_>, count_padding: bool, lanes: usize) -> KernelText {
    let g = &spec.geometry;
    let [height, width] = g.input;
    let memory = PlaneMemory::input_grad(spec.kind, g, lanes);
    let slab = memory.slab.as_ref().expect("the gradient of a mean has a slab");
    let load = |width| {
        let value = (spec.load)(&PixelPlace {
            width,
            image: "image",
            at: ["0", "y", "x"],
            channel: "channel",
        });
        let name = &spec.name;
        let column = match width {
            Width::Scalar => format!("{name}_count_x[x]"),
            Width::Vector => format!("vf_load({name}_count_x + x)"),
        };
        format!("({value}) / ({name}_count_y[y] * {column})")
    };
    let tables = table(
        "float",
        &format!("{}_count_y", spec.name),
        &g.counts(0, count_padding),
        0,
        "",
    ) + &table(
        "float",
        &format!("{}_count_x", spec.name),
        &g.counts(1, count_padding),
        lanes,
        "1",
    );
    let fill = slab.fill(
        &load,
        &spec.name,
        &format!("{}_fill", spec.name),
        &spec.params,
        lanes,
    );
    let each = g.each_element(slab.pitch, |offset, _| {
        format!("sum += vf_load(at + x + {offset});\n")
    });
    let body = format!(
        "{}_fill(args, image, channel, slab);\nfor (int64_t y = 0; y < {height}; y++) {{\n    const float *at = slab + y * {};\n    /* What a vector writes \
         past the end of its row, the next row overwrites. */\n    for (int64_t x = 0; x < {width}; x += {lanes}) {{\n        vf sum = {{0}};\n{}        \
         vf_store(result + y * {width} + x, sum);\n    }}\n}}\n",
        spec.name,
        slab.pitch,
        indent(&each, 8),
    );
    let planes = Planes {
        before: tables + &fill,
        body,
        memory,
    };
    planes.kernel(spec)
}
