//! The forward convolution and the input gradient: both slide a window over an image, with the output
//! pixels of one row as the rows of register tiles.

use std::collections::BTreeSet;

use super::blocks::{self, BlockFunction, Blocks, ClassImage};
use super::image::{self, Padded};
use super::parts::{Parts, TileColumns};
use super::walk::{Direction, Sides, Walk};
use super::weights::{self, Panels};
use super::{
    ConvSpec, Image, ImageAxis, PixelPlace, Spatial, depthwise, im2col, narrow_groups, planar, winograd,
};
use crate::isa::Isa;
use crate::kernels::element::Element;
use crate::kernels::gemm::{self, Axis, Epilogue, GemmSpec, Operand};
use crate::kernels::tile::{self, Access, Tile};
use crate::kernels::{Helper, KernelText, indent, round_up, run_part, signature};

/// Whether the result has no elements.
pub(super) fn is_empty(spec: &ConvSpec<'_>, direction: Direction) -> bool {
    let g = &spec.geometry;
    let result = match direction {
        Direction::Forward => g.output,
        Direction::InputGrad => g.input,
    };
    let channels = Sides::new(spec, direction).result_channels;
    g.images * channels * result.iter().product::<usize>() == 0
}

pub(super) fn emit(spec: &ConvSpec<'_>, direction: Direction, isa: Isa) -> KernelText {
    let g = &spec.geometry;
    let element = spec.storage.element();
    let lanes = element.lanes(isa);
    let sides = Sides::new(spec, direction);
    if is_empty(spec, direction) {
        let head = signature(&spec.name, &spec.params);
        return KernelText {
            name: spec.name.clone(),
            params: spec.params.clone(),
            prototype: format!("{head};"),
            source: format!("/* {}: no elements */\n{head} {{\n}}\n", spec.comment),
            helpers: Vec::new(),
            workspace_bytes: 0,
        };
    }
    if g.is_product() {
        return gemm::emit(as_product(spec, direction), isa);
    }
    let special = || {
        planar::correlate(spec, direction, isa)
            .or_else(|| im2col::correlate(spec, direction, isa))
            .or_else(|| winograd::correlate(spec, direction, isa))
            .or_else(|| depthwise::input_gradient(spec, direction, isa))
    };
    if element == Element::F32
        && let Some(kernel) = special()
    {
        return kernel;
    }
    let walk = Walk::new(spec, direction);
    if g.is_narrow(lanes) {
        return narrow_groups::correlate(spec, &walk, &sides, direction, isa);
    }
    Emitter {
        spec,
        direction,
        walk,
        sides,
        isa,
        lanes,
        element,
        tiles: BTreeSet::new(),
    }
    .kernel()
}

/// A convolution that only mixes channels is a matrix product: pixels times the weight.
pub(super) fn as_product<'a>(spec: &'a ConvSpec<'a>, direction: Direction) -> GemmSpec<'a> {
    let g = &spec.geometry;
    let rows = PixelRows::new(spec);
    let (k, n) = match direction {
        Direction::Forward => (g.in_channels, g.out_channels),
        Direction::InputGrad => (g.out_channels, g.in_channels),
    };
    // Strides of the weight along the columns and along the depth of the product.
    let [free, depth] = match direction {
        Direction::Forward => [k as i64, 1],
        Direction::InputGrad => [1, n as i64],
    };
    let consume = move |r: &gemm::Result<'_>| {
        let [image, z, y, x] = rows.place(r.batch, r.row, rows.result == Some(ImageAxis::Plane));
        let place = PixelPlace {
            width: r.width,
            image: &image,
            at: [&z, &y, &x],
            channel: r.col,
        };
        (spec.epilogue.consume)(&place, r.value)
    };
    GemmSpec {
        name: spec.name.clone(),
        comment: spec.comment.clone(),
        batch: if rows.by_image { g.images } else { 1 },
        m: if rows.by_image {
            rows.pixels
        } else {
            rows.pixels * g.images
        },
        n,
        k,
        a: rows.operand(spec),
        b: Operand::stored(spec.storage, &spec.weight, &[], free, depth),
        epilogue: Epilogue::custom(product_axis(rows.result), consume),
        params: spec.params.clone(),
        threads: spec.threads,
    }
}

/// The axis of a product of pixels along which an image has vectors; rows of the product are pixels.
fn product_axis(axis: Option<ImageAxis>) -> Option<Axis> {
    match axis {
        Some(ImageAxis::Channel) => Some(Axis::Depth),
        Some(ImageAxis::Plane) => Some(Axis::Free),
        _ => None,
    }
}

/// The pixels of a convolution that is a matrix product, as rows of that product.
#[derive(Clone, Copy)]
struct PixelRows {
    /// Depth, height and width of the image.
    extents: Spatial,
    /// Pixels of an image.
    pixels: usize,
    /// Whether all pixels of an image follow each other at one stride.
    flat: bool,
    /// Whether each image is a product of its own. Images that are stored channels-first have their pixels
    /// together within one image only.
    by_image: bool,
    /// Whether the image is read along its planes.
    planes: bool,
    /// The axis of the result along which it is consumed in vectors.
    result: Option<ImageAxis>,
}

impl PixelRows {
    fn new(spec: &ConvSpec<'_>) -> Self {
        let (g, image) = (&spec.geometry, &spec.image);
        let [depth, height, width] = g.input;
        let flat = is_dense(image, g.input);
        let planes = image.contiguous == Some(ImageAxis::Plane)
            || (image.contiguous == Some(ImageAxis::Width) && flat && depth == 1);
        let result = spec.epilogue.axis(g.input);
        let apart = flat && !follow_each_other(image, g.images, g.input);
        Self {
            extents: g.input,
            pixels: depth * height * width,
            flat,
            by_image: planes || apart || result == Some(ImageAxis::Plane),
            planes,
            result,
        }
    }

    /// C expressions of image, depth, height and width of the pixel in row `row` of product `batch`; with
    /// `planes` its number in the plane stands for its width.
    fn place(&self, batch: &str, row: &str, planes: bool) -> [String; 4] {
        let [depth, height, width] = self.extents;
        if planes {
            return [batch.into(), "0".into(), "0".into(), row.into()];
        }
        let (n, z) = if self.by_image {
            (batch.into(), format!("({row} / {})", height * width))
        } else {
            (
                format!("({row} / {})", self.pixels),
                format!("({row} / {} % {depth})", height * width),
            )
        };
        [
            n,
            z,
            format!("({row} / {width} % {height})"),
            format!("({row} % {width})"),
        ]
    }

    /// The image as the operand A.
    fn operand<'a>(self, spec: &'a ConvSpec<'a>) -> Operand<'a> {
        let image = &spec.image;
        if let Some(memory) = image.memory.as_ref().filter(|_| self.flat) {
            let strides = memory.strides;
            let batch = match self.by_image {
                true => vec![(spec.geometry.images, strides[0])],
                false => vec![],
            };
            return Operand::stored(memory.storage, &memory.pointer, &batch, strides[3], strides[4]);
        }
        let load = move |at: &gemm::At<'_>| {
            let [n, z, y, x] = if image.numbered && !self.by_image {
                number(at.free)
            } else {
                self.place(at.batch, at.free, self.planes)
            };
            (image.load)(&PixelPlace {
                width: at.width,
                image: &n,
                at: [&z, &y, &x],
                channel: at.depth,
            })
        };
        Operand::computed(product_axis(image.contiguous), load).standing_for(spec.storage)
    }
}

/// The place of a pixel that is known by its number among those of all images.
pub(super) fn number(pixel: &str) -> [String; 4] {
    ["0".into(), "0".into(), "0".into(), pixel.into()]
}

/// Whether the pixels of each image follow each other at one stride.
pub(super) fn is_dense(image: &Image<'_>, [depth, height, width]: Spatial) -> bool {
    let Some(memory) = &image.memory else {
        return image.numbered;
    };
    let [_, z, y, x, _] = memory.strides;
    follows(y, x, width, height) && follows(z, x, width * height, depth)
}

/// Whether the next image of a dense one begins at the pixel after its last.
fn follow_each_other(image: &Image<'_>, images: usize, extents: Spatial) -> bool {
    let Some(memory) = &image.memory else {
        return image.numbered;
    };
    let [n, _, _, x, _] = memory.strides;
    follows(n, x, extents.iter().product(), images)
}

/// Whether all pixels of all images follow each other at one stride.
pub(super) fn are_dense(image: &Image<'_>, images: usize, extents: Spatial) -> bool {
    is_dense(image, extents) && follow_each_other(image, images, extents)
}

/// Whether an axis with `repeats` elements at stride `outer` goes on where the `extent` elements at stride
/// `inner` end.
fn follows(outer: i64, inner: i64, extent: usize, repeats: usize) -> bool {
    repeats == 1 || outer == inner * extent as i64
}

struct Emitter<'a> {
    spec: &'a ConvSpec<'a>,
    direction: Direction,
    walk: Walk,
    sides: Sides,
    isa: Isa,
    lanes: usize,
    element: Element,
    tiles: BTreeSet<Helper>,
}

/// One class of pixels, and where its kernel finds what it needs.
struct ClassWork<'a> {
    index: usize,
    pixels: ClassImage<'a>,
    blocks: &'a Blocks,
    panels: Panels,
    /// Where the packed weights lie in the workspace, in bytes.
    weights: usize,
    /// Where the memory of its blocks begins there.
    workspace: usize,
}

impl Emitter<'_> {
    fn kernel(mut self) -> KernelText {
        let frame = self.spec.frame();
        let (name, params) = (frame.name, frame.params);
        let g = &self.spec.geometry;
        let lanes = self.lanes;
        let padded = self.padded();
        let vectors = self.sides.result_group.div_ceil(lanes).min(2);
        let panels = Panels::new(self.sides.result_group, vectors, lanes);
        let result = self.result();
        let mut workspace = 0;

        let serial = frame.threads == 1 || g.is_small();
        let run = run_part(serial);

        let mut source = frame.head(&self.about(&padded), "");
        let mut calls = String::new();
        // Without slabs, the copy of the whole image comes first in the workspace; its address is part of
        // `padded`.
        let walk = self.walk.clone();
        let pixels = |class| ClassImage {
            spec: self.spec,
            walk: &walk,
            class,
            padded: &padded,
        };
        let classes: Vec<ClassImage<'_>> = walk.classes.iter().map(pixels).collect();
        let cut = |pixels: &ClassImage<'_>| {
            let parts = pixels.class.count[2].div_ceil(tile::max_rows(self.isa, vectors));
            Blocks::new(pixels, parts, panels.width, result)
        };
        let cuts: Vec<Blocks> = classes.iter().map(cut).collect();
        if let Some(copy) = &padded.copy {
            source.push_str(&copy.row_source);
            if !cuts[0].slab {
                source.push_str(&copy.source);
                calls.push_str(&run(&copy.function, copy.rows));
                workspace = copy.bytes;
            }
        }
        let channels = self.sides.result_channels;
        let consumer = blocks::consumer(self.spec, &self.walk, result, channels, workspace, lanes);
        source.push_str(&consumer.source);
        workspace += consumer.bytes;
        for (index, (&pixels, blocks)) in classes.iter().zip(&cuts).enumerate() {
            let taps: usize = pixels.class.taps.iter().map(Vec::len).product();
            let pack = format!("{name}_pack{index}");
            let weights = workspace;
            workspace += round_up(
                (g.groups * panels.padded() * taps * self.sides.group + lanes) * self.element.bytes(),
                64,
            );
            if taps > 0 {
                source.push_str(&weights::source(&weights::Request {
                    prefix: name,
                    function: &pack,
                    geometry: g,
                    weight: &self.spec.weight,
                    transposed: self.direction == Direction::InputGrad,
                    taps: &pixels.class.taps,
                    panels,
                    offset: weights,
                    params,
                    lanes,
                    element: self.element,
                }));
                calls.push_str(&run(&pack, g.groups * panels.count));
            }
            source.push_str(&self.class(&ClassWork {
                index,
                pixels,
                blocks,
                panels,
                weights,
                workspace,
            }));
            calls.push_str(&run(&format!("{name}_class{index}"), blocks.units));
            workspace += blocks.bytes(&pixels, lanes) * if serial { 1 } else { frame.threads };
        }
        if let Some((function, count)) = &consumer.last {
            calls.push_str(&run(function, *count));
        }
        let mut kernel = frame.finish(source, &calls, workspace);
        kernel.helpers = self.tiles.into_iter().collect();
        kernel
    }

    /// The image with room for the window around it.
    fn padded(&self) -> Padded {
        let frame = self.spec.frame();
        let (sides, walk) = (&self.sides, &self.walk);
        image::padded(
            &self.spec.image,
            &image::Request {
                prefix: frame.name,
                suffix: "",
                offset: 0,
                images: self.spec.geometry.images,
                channels: sides.channels,
                extents: sides.extents,
                before: walk.before,
                reach: walk.reach,
                spread: walk.spread,
                params: frame.params,
                lanes: self.lanes,
                element: self.element,
                in_place: true,
            },
        )
    }

    /// The comment at the beginning of the source.
    fn about(&self, padded: &Padded) -> String {
        let (g, sides) = (&self.spec.geometry, &self.sides);
        let groups = match g.groups {
            1 => String::new(),
            groups => format!(" in {groups} groups"),
        };
        let copied = match padded.copy.is_some() {
            true => ", copied with padding",
            false => ", read in place",
        };
        format!(
            "{} images of {:?} x {} channels{groups}{copied}, {} classes of pixels.",
            g.images,
            sides.extents,
            sides.channels,
            self.walk.classes.len()
        )
    }

    /// Extents of the result.
    fn result(&self) -> Spatial {
        match self.direction {
            Direction::Forward => self.spec.geometry.output,
            Direction::InputGrad => self.spec.geometry.input,
        }
    }

    /// `name_class<index>(ctx, begin, end, thread)`: the pixels of one class.
    fn class(&mut self, work: &ClassWork<'_>) -> String {
        let ClassWork {
            index,
            pixels: image,
            blocks,
            panels,
            weights,
            workspace,
        } = *work;
        let ClassImage { class, padded, .. } = image;
        let vectors = panels.width / self.lanes;
        let parts = Parts::of(class.count[2], tile::max_rows(self.isa, vectors));
        let uneven = panels.count > 1 && panels.last < panels.width;
        let last = panels.count - 1;
        let full = if panels.count == 1 {
            panels.last
        } else {
            panels.width
        };
        let full_panels = self.part_tiles(work, &parts, full);
        let calls = if uneven {
            let last_panel = self.part_tiles(work, &parts, panels.last);
            format!(
                "if (cp < {last}) {{\n{}}} else {{\n{}}}\n",
                indent(&full_panels, 4),
                indent(&last_panel, 4)
            )
        } else {
            full_panels
        };
        let ConvSpec {
            name, geometry: g, ..
        } = self.spec;
        let (lanes, sides, walk, real) = (self.lanes, &self.sides, &self.walk, self.element.ctype());
        let (n, w) = (sides.result_group, panels.width);
        let columns = TileColumns {
            pitch: if uneven {
                format!("(cp < {last} ? {full} : {})", panels.last)
            } else {
                full.to_string()
            },
            first: format!("group * {n} + cp * {w}"),
            count: format!("({n} - cp * {w} < {w} ? {n} - cp * {w} : {w})"),
        };
        let pixels = format!(
            "const {real} *tile_a = from + px * {} + group * {};\n",
            walk.pixel_step[2] as i64 * padded.strides[3],
            sides.group,
        );
        let line = blocks.line(&image);
        let unit = parts.unit((name, class, blocks), &line, [&pixels, &calls], &columns);
        let planes = if blocks.planes {
            blocks.consume_planes(name, class, &columns.pitch, &columns.first, &columns.count)
        } else {
            String::new()
        };
        let taps: usize = class.taps.iter().map(Vec::len).product();
        let body = format!(
            "for (int64_t group = 0; group < {}; group++)\nfor (int64_t cp = 0; cp < {}; cp++) {{\n    const {real} *tile_b = (const {real} \
             *)(args->workspace + {weights}) + (group * {} + cp * {w}) * {};\n    for (int64_t unit = block; unit < block_end; unit++) \
             {{\n{}    }}\n{}}}\n",
            g.groups,
            panels.count,
            panels.padded(),
            taps * sides.group,
            indent(&unit, 8),
            indent(&planes, 4),
        );
        let declare = format!("{real} tile[{}] __attribute__((aligned(64)));\n", parts.rows * w);
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

    /// The tile of a part, `width` columns wide: a long part's or a short one's.
    fn part_tiles(&mut self, work: &ClassWork<'_>, parts: &Parts, width: usize) -> String {
        match parts.heights()[..] {
            [long, short] => {
                let (first, second) = (
                    self.tile_call(work, long, width),
                    self.tile_call(work, short, width),
                );
                format!(
                    "if ({}) {{\n{}}} else {{\n{}}}\n",
                    parts.is_long("part"),
                    indent(&first, 4),
                    indent(&second, 4)
                )
            }
            _ => self.tile_call(work, parts.rows, width),
        }
    }

    /// The call that computes a tile of `rows` pixels and `width` columns, over all kernel elements.
    fn tile_call(&mut self, work: &ClassWork<'_>, rows: usize, width: usize) -> String {
        let ClassImage { class, padded, .. } = work.pixels;
        let (sides, walk) = (&self.sides, &self.walk);
        let [_, sz, sy, sx] = padded.strides;
        let [taps_z, taps_y, taps_x] = [0, 1, 2].map(|d| class.taps[d].len());
        let step = |d: usize, stride: i64| walk.tap_step[d] as i64 * stride;
        // Neighbouring kernel elements of a row are one run if nothing lies between them.
        let merged = self.spec.geometry.groups == 1 && walk.tap_step[2] == 1 && sx == sides.channels as i64;
        let (depth, along_x) = if merged {
            (taps_x * sides.group, 1)
        } else {
            (sides.group, taps_x)
        };
        let tile = Tile {
            rows,
            vectors: width / self.lanes,
            a: Access::Strided {
                free: walk.pixel_step[2] as i64 * sx,
                depth: 1,
            },
            b: Access::Packed,
            factor: self.element.into(),
            nested: true,
            block: tile::BLOCK,
        };
        self.tiles.insert(tile.helper(self.isa));
        let any = taps_z * taps_y * taps_x > 0;
        let nest = [
            if any { taps_y as i64 } else { 0 },
            step(1, sy),
            (taps_x * sides.group * width) as i64,
            along_x as i64,
            step(2, sx),
            (sides.group * width) as i64,
        ];
        let nest = nest.map(|n| n.to_string()).join(", ");
        let each_z = taps_y * taps_x * sides.group * width;
        format!(
            "for (int64_t t = 0; t < {}; t++)\n    {}(tile_a + t * {}, tile_b + t * {each_z}, {depth}, target, {width}, t > 0, (const \
             int64_t[6]){{{nest}}});\n",
            taps_z.max(1),
            tile.name(),
            step(0, sz)
        )
    }
}
