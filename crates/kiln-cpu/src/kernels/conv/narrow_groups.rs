//! Convolutions whose groups are narrower than a vector: depthwise ones, and a few channels a group.
//!
//! A vector holds the channels of several whole groups. For each kernel element and each channel of a
//! group, a constant shuffle spreads that channel of the image's vector over its group (depthwise
//! convolutions need no shuffle), and the vector is multiplied with a vector of weights. So every lane
//! works, and no lane sees another group's values.

use std::fmt::Write;

use super::blocks::{self, BlockFunction, Blocks, ClassImage};
use super::image::{self, Padded};
use super::parts::{Parts, TileColumns};
use super::walk::{Class, Direction, Sides, Walk};
use super::{ConvSpec, Spatial};
use crate::isa::Isa;
use crate::kernels::element::Element;
use crate::kernels::{KernelText, indent, round_up, unpack};

/// Most pixels of a tile.
fn max_pixels(isa: Isa) -> usize {
    if isa.registers() >= 32 { 8 } else { 4 }
}

/// C expression: lane `l` is the channel `s` of `x`'s group that contains `l`.
pub(super) fn spread(x: &str, s: usize, group: usize, lanes: usize, element: Element) -> String {
    if group == 1 {
        return x.into();
    }
    let index: Vec<String> = (0..lanes).map(|l| (l / group * group + s).to_string()).collect();
    let shuffle = match element {
        Element::F32 => "KILN_SHUFFLE",
        Element::F64 => "KILN_SHUFFLE_D",
    };
    format!("{shuffle}({x}, {x}, {})", index.join(", "))
}

/// Statements that read a vector of channels `v`, the last of which may be partial, into `name`.
pub(super) fn read(name: &str, address: &str, channels: usize, lanes: usize, element: Element) -> String {
    let vf = element.vector();
    match channels % lanes {
        0 => format!("{vf} {name} = {vf}_load({address});"),
        rest => format!(
            "{vf} {name} = v + 1 < {} ? {vf}_load({address}) : {vf}_load_n({address}, {rest});",
            channels.div_ceil(lanes)
        ),
    }
}

/// The forward convolution or the input gradient.
pub(super) fn correlate(
    spec: &ConvSpec<'_>,
    walk: &Walk,
    sides: &Sides,
    direction: Direction,
    isa: Isa,
) -> KernelText {
    let frame = spec.frame();
    let g = &spec.geometry;
    let lanes = spec.storage.element().lanes(isa);
    let run = frame.run(g.is_small());
    let padded = padded(spec, walk, sides, lanes);
    let result = match direction {
        Direction::Forward => g.output,
        Direction::InputGrad => g.input,
    };
    let kernel = Kernel {
        spec,
        walk,
        sides,
        padded: &padded,
        direction,
        isa,
        result,
    };
    let mut source = frame.head(&kernel.about(), "");
    let mut calls = String::new();
    let mut workspace = 0;
    if let Some(copy) = &padded.copy {
        source.push_str(&copy.row_source);
        if !kernel.cut(&walk.classes[0]).slab {
            source.push_str(&copy.source);
            calls.push_str(&run(&copy.function, copy.rows));
            workspace = copy.bytes;
        }
    }
    let consumer = blocks::consumer(spec, walk, result, sides.result_channels, workspace, lanes);
    source.push_str(&consumer.source);
    workspace += consumer.bytes;
    for (index, class) in walk.classes.iter().enumerate() {
        let (text, bytes) = kernel.class(index, class, workspace, &run, &mut calls);
        source.push_str(&text);
        workspace += bytes;
    }
    if let Some((function, count)) = &consumer.last {
        calls.push_str(&run(function, *count));
    }
    frame.finish(source, &calls, workspace)
}

/// The image with the zeros that windows reach.
fn padded(spec: &ConvSpec<'_>, walk: &Walk, sides: &Sides, lanes: usize) -> Padded {
    let request = image::Request {
        prefix: &spec.name,
        suffix: "",
        offset: 0,
        images: spec.geometry.images,
        channels: sides.channels,
        extents: sides.extents,
        before: walk.before,
        reach: walk.reach,
        spread: walk.spread,
        params: &spec.params,
        lanes,
        element: spec.storage.element(),
        in_place: true,
    };
    image::padded(&spec.image, &request)
}

/// What all classes of pixels have in common.
struct Kernel<'a> {
    spec: &'a ConvSpec<'a>,
    walk: &'a Walk,
    sides: &'a Sides,
    padded: &'a Padded,
    direction: Direction,
    isa: Isa,
    /// Extents of the result.
    result: Spatial,
}

impl<'a> Kernel<'a> {
    /// What it works on, for the comment above it.
    fn about(&self) -> String {
        let sides = self.sides;
        format!(
            "{} images of {:?} x {} channels in groups of {}, {} classes of pixels.",
            self.spec.geometry.images,
            sides.extents,
            sides.channels,
            sides.group,
            self.walk.classes.len()
        )
    }

    fn pixels(&self, class: &'a Class) -> ClassImage<'a> {
        ClassImage {
            spec: self.spec,
            walk: self.walk,
            class,
            padded: self.padded,
        }
    }

    /// The blocks of a class.
    fn cut(&self, class: &'a Class) -> Blocks {
        let lanes = self.spec.storage.element().lanes(self.isa);
        let columns = self.sides.channels.next_multiple_of(lanes);
        let parts = class.count[2].div_ceil(max_pixels(self.isa));
        Blocks::new(&self.pixels(class), parts, columns, self.result)
    }

    /// The functions of a class, whose packed weights begin at `workspace`, and the bytes that it takes
    /// there. Their calls are added to `calls`.
    fn class(
        &self,
        index: usize,
        class: &'a Class,
        workspace: usize,
        run: &dyn Fn(&str, usize) -> String,
        calls: &mut String,
    ) -> (String, usize) {
        let Self { spec, sides, .. } = *self;
        let (name, element) = (&spec.name, spec.storage.element());
        let lanes = element.lanes(self.isa);
        let vectors = sides.channels.div_ceil(lanes);
        let taps: usize = class.taps.iter().map(Vec::len).product();
        let weights = round_up(vectors * taps * sides.group * lanes * element.bytes(), 64);
        let blocks = self.cut(class);
        let work = Work {
            spec,
            walk: self.walk,
            sides,
            class,
            index,
            padded: self.padded,
            blocks: &blocks,
            direction: self.direction,
            isa: self.isa,
        };
        let source = work.source(workspace, workspace + weights);
        if taps > 0 {
            calls.push_str(&run(&format!("{name}_pack{index}"), vectors));
        }
        calls.push_str(&run(&format!("{name}_class{index}"), blocks.units));
        let own = blocks.bytes(&self.pixels(class), lanes) * spec.threads;
        (source, weights + own)
    }
}

/// One class of pixels and everything known about it.
struct Work<'a> {
    spec: &'a ConvSpec<'a>,
    walk: &'a Walk,
    sides: &'a Sides,
    class: &'a Class,
    index: usize,
    padded: &'a Padded,
    blocks: &'a Blocks,
    direction: Direction,
    isa: Isa,
}

impl Work<'_> {
    /// Packing of weights (at `weights` in the workspace) and the loops of the class (with its blocks from
    /// `workspace` on).
    fn source(&self, weights: usize, workspace: usize) -> String {
        let parts = Parts::of(self.class.count[2], max_pixels(self.isa));
        let mut source = self.pack_weights(weights);
        for height in parts.heights() {
            source.push_str(&self.row(height));
        }
        source + &self.blocks_of_class(&parts, weights, workspace)
    }

    /// Kernel elements along each dimension.
    fn taps(&self) -> [usize; 3] {
        [0, 1, 2].map(|d| self.class.taps[d].len())
    }

    fn lanes(&self) -> usize {
        self.spec.storage.element().lanes(self.isa)
    }

    /// Vectors of all channels.
    fn vectors(&self) -> usize {
        self.sides.channels.div_ceil(self.lanes())
    }

    /// The function that packs weights as `[vector][kernel element][channel of the group][lane]`; empty
    /// without kernel elements.
    fn pack_weights(&self, weights: usize) -> String {
        let ConvSpec {
            name,
            geometry: g,
            weight,
            params,
            ..
        } = self.spec;
        let (real, _) = self.spec.storage.element().ctypes();
        let (lanes, group, channels, index) =
            (self.lanes(), self.sides.group, self.sides.channels, self.index);
        let taps: usize = self.taps().iter().product();
        if taps == 0 {
            return String::new();
        }
        let list: Vec<String> = super::weights::flat_taps(&self.class.taps, g.kernel)
            .iter()
            .map(usize::to_string)
            .collect();
        let place = match self.direction {
            Direction::Forward => format!("(channel * {group} + s)"),
            Direction::InputGrad => {
                format!("((channel / {group} * {group} + s) * {group} + channel % {group})")
            }
        };
        format!(
            "static void {name}_pack{index}(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = \
             ctx;\n{}    static const int32_t taps[] = {{{}}};\n    {real} *packed = ({real} *)(args->workspace + {weights});\n    for \
             (int64_t v = begin; v < end; v++)\n        for (int64_t t = 0; t < {taps}; t++)\n            for (int64_t s = 0; s < {group}; \
             s++)\n                for (int64_t l = 0; l < {lanes}; l++) {{\n                    const int64_t channel = v * {lanes} + \
             l;\n                    packed[((v * {taps} + t) * {group} + s) * {lanes} + l] =\n                        channel < \
             {channels} ? {weight}[{place} * {} + taps[t]] : 0.0f;\n                }}\n}}\n",
            unpack(params),
            list.join(", "),
            g.taps(),
        )
    }

    /// The function that computes `height` neighbouring pixels, all channels.
    fn row(&self, height: usize) -> String {
        let Self {
            spec,
            walk,
            sides,
            index,
            padded,
            ..
        } = *self;
        let (name, element) = (&spec.name, spec.storage.element());
        let (real, vf) = element.ctypes();
        let (lanes, group, channels, vectors) = (self.lanes(), sides.group, sides.channels, self.vectors());
        let [taps_z, taps_y, taps_x] = self.taps();
        let padded_channels = vectors * lanes;
        let [_, sz, sy, sx] = padded.strides;
        let step = |d: usize, stride: i64| walk.tap_step[d] as i64 * stride;
        let mut body = String::new();
        for r in 0..height {
            let address = format!("at + {} + v * {lanes}", r as i64 * walk.pixel_step[2] as i64 * sx);
            let _ = writeln!(body, "{{ {}", read("pixel", &address, channels, lanes, element));
            for s in 0..group {
                let _ = writeln!(
                    body,
                    "    sum{r} = {vf}_fma({}, {vf}_load(w + {}), sum{r});",
                    spread("pixel", s, group, lanes, element),
                    s * lanes
                );
            }
            body.push_str("}\n");
        }
        // Depthwise bodies are short enough to be written out for all kernel elements.
        let unroll = if group == 1 && taps_z * taps_y * taps_x <= 25 {
            "KILN_UNROLL "
        } else {
            ""
        };
        let sums: Vec<String> = (0..height).map(|r| format!("sum{r} = {{0}}")).collect();
        let stores: String = (0..height)
            .map(|r| {
                format!(
                    "        {vf}_store(tile + {} + v * {lanes}, sum{r});\n",
                    r * padded_channels
                )
            })
            .collect();
        format!(
            "/* {height} neighbouring pixels, all channels. */\nstatic __attribute__((noinline)) void {name}_row{index}_{height}(const {real} \
             *from, const {real} *w, {real} *tile) {{\n    for (int64_t v = 0; v < {vectors}; v++) {{\n        {vf} {};\n        for \
             (int64_t z = 0; z < {taps_z}; z++)\n        {unroll}for (int64_t y = 0; y < {taps_y}; y++) {{\n            const {real} *at = from + z \
             * {} + y * {};\n            {unroll}for (int64_t x = 0; x < {taps_x}; x++, at += {}, w += {}) {{\n{}            }}\n        \
             }}\n{stores}    }}\n}}\n",
            sums.join(", "),
            step(0, sz),
            step(1, sy),
            step(2, sx),
            group * lanes,
            indent(&body, 16)
        )
    }

    /// The function that computes blocks of the class: lines of pixels, each in parts.
    fn blocks_of_class(&self, parts: &Parts, weights: usize, workspace: usize) -> String {
        let Self {
            spec,
            walk,
            class,
            index,
            padded,
            blocks,
            ..
        } = *self;
        let name = &spec.name;
        let (real, _) = spec.storage.element().ctypes();
        let (lanes, channels) = (self.lanes(), self.sides.channels);
        let padded_channels = self.vectors() * lanes;
        let [.., sx] = padded.strides;
        let rows = parts.rows;
        let call = match parts.heights()[..] {
            [_, short] => format!(
                "if ({}) {name}_row{index}_{rows}(at, w, target);\nelse {name}_row{index}_{short}(at, w, target);\n",
                parts.is_long("part")
            ),
            _ => format!("{name}_row{index}_{rows}(at, w, target);\n"),
        };
        let pixels = format!(
            "const {real} *at = from + px * {};\n",
            walk.pixel_step[2] as i64 * sx
        );
        let columns = TileColumns {
            pitch: padded_channels.to_string(),
            first: "0".into(),
            count: channels.to_string(),
        };
        let image = ClassImage {
            spec,
            walk,
            class,
            padded,
        };
        let line = blocks.line(&image);
        let unit = parts.unit((name, class, blocks), &line, [&pixels, &call], &columns);
        let planes = if blocks.planes {
            blocks.consume_planes(name, class, &columns.pitch, &columns.first, &columns.count)
        } else {
            String::new()
        };
        let body = format!(
            "for (int64_t unit = block; unit < block_end; unit++) {{\n{}}}\n{planes}",
            indent(&unit, 4)
        );
        let declare = format!(
            "const {real} *w = (const {real} *)(args->workspace + {weights});\n{real} tile[{}] __attribute__((aligned(64)));\n",
            rows * padded_channels
        );
        let function = format!("{name}_class{index}");
        let function = BlockFunction {
            name: &function,
            workspace,
            lanes,
            declare: &declare,
            body: &body,
        };
        blocks.function(&image, &function)
    }
}
