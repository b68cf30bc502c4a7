//! The forward convolution and the input gradient.

use std::collections::BTreeSet;

use super::transform::{Matrices, both_sides};
use super::{CHUNK, Cut, apart, by_channels, fits, guarded};
use crate::isa::Isa;
use crate::kernels::conv::walk::{Direction, Sides};
use crate::kernels::conv::weights::Panels;
use crate::kernels::conv::{ConvSpec, ImageAxis, PixelPlace};
use crate::kernels::element::Factor;
use crate::kernels::tile::{self, Access, Tile};
use crate::kernels::{Helper, KernelText, Width, call_part, indent, round_up, unpack, vector};
use crate::policy::WINOGRAD_READ_WEIGHT;

/// The kernel, if the convolution is of this kind and large enough.
pub(in crate::kernels::conv) fn correlate(
    spec: &ConvSpec<'_>,
    direction: Direction,
    isa: Isa,
) -> Option<KernelText> {
    let g = &spec.geometry;
    let lanes = vector::lanes(isa);
    let (result, pad) = match direction {
        Direction::Forward => (g.output, [g.pad[1] as i64, g.pad[2] as i64]),
        Direction::InputGrad => (g.input, [2 - g.pad[1] as i64, 2 - g.pad[2] as i64]),
    };
    let fits =
        fits(g, lanes) && by_channels(&spec.image) && spec.epilogue.axis(result) == Some(ImageAxis::Channel);
    if !fits {
        return None;
    }
    let sides = Sides::new(spec, direction);
    let by_panel = sides.result_channels.is_multiple_of(2 * lanes);
    let channels = [sides.channels, sides.result_channels];
    let cut = Cut::new(g, result, channels, WINOGRAD_READ_WEIGHT, by_panel)?;
    // Panels of one vector cost little more, and there are twice as many of them: threads that share panels
    // would else find too few, such as the eight of 256 channels.
    let vectors = sides.result_channels / lanes;
    let few = !cut.own && vectors.div_ceil(2) < spec.threads;
    let emitter = Emitter {
        spec,
        direction,
        panels: Panels::new(sides.result_channels, if few { 1 } else { vectors.min(2) }, lanes),
        sides,
        cut,
        pad,
        result: [result[1], result[2]],
        matrices: Matrices::new(cut.m),
        lanes,
        isa,
    };
    Some(emitter.kernel())
}

struct Emitter<'a> {
    spec: &'a ConvSpec<'a>,
    direction: Direction,
    sides: Sides,
    panels: Panels,
    cut: Cut,
    /// Zeros before the image that is read.
    pad: [i64; 2],
    /// Height and width of the result.
    result: [usize; 2],
    matrices: Matrices,
    lanes: usize,
    isa: Isa,
}

impl Emitter<'_> {
    fn kernel(self) -> KernelText {
        let frame = self.spec.frame();
        let name = frame.name;
        let (cut, elements) = (self.cut, self.cut.elements());
        let mut helpers = BTreeSet::new();
        let images = format!(
            "{} images of {:?} x {} channels",
            self.spec.geometry.images, self.sides.extents, self.sides.channels
        );
        let mut source = cut.head(&frame, &images);
        source.push_str(&self.turn());
        source.push_str(&self.tiles());
        let run = frame.run(false);
        let (calls, workspace) = if cut.own {
            source.push_str(&self.weights());
            source.push_str(&self.products(&mut helpers));
            source.push_str(&self.results());
            source.push_str(&format!(
                "/* Blocks of tiles, through all stages. */\nstatic void {name}_blocks(void *ctx, int64_t begin, int64_t end, int thread) {{\n    struct \
                 {name}_args own = *(const struct {name}_args *)ctx;\n    own.own += thread * (int64_t){};\n    for (int64_t block = begin; block < end; block++) \
                 {{\n{}        {name}_tiles(&own, 0, own.count, thread);\n        {name}_products(&own, 0, {}, thread);\n        \
                 {name}_results(&own, 0, own.count, thread);\n    }}\n}}\n",
                cut.bytes(),
                indent(&cut.choose("own"), 8),
                elements * self.panels.count,
            ));
            let own_at = round_up((elements * self.weight_apart() + self.lanes) * 4, 64);
            let units = self.sides.channels / self.lanes * (self.panels.padded() / self.lanes);
            let calls = format!(
                "    args.own = workspace + {own_at};\n{}{}",
                run(&format!("{name}_weights"), units),
                run(&format!("{name}_blocks"), cut.blocks())
            );
            (calls, own_at + frame.threads * cut.bytes())
        } else {
            source.push_str(&self.by_panels(&mut helpers));
            let tiles = call_part(frame.threads == 1, &format!("{name}_tiles"), "args.count");
            let calls = format!(
                "    args.own = workspace;\n    for (int64_t block = 0; block < {}; block++) {{\n{}{}{}    }}\n",
                cut.blocks(),
                indent(&cut.choose("args"), 8),
                indent(&tiles, 4),
                indent(&run(&format!("{name}_panels"), self.panels.count), 4)
            );
            (calls, cut.side_bytes(0) + frame.threads * self.panel_bytes())
        };
        let mut kernel = frame.finish(source, &calls, workspace);
        kernel.helpers = helpers.into_iter().collect();
        kernel
    }

    /// Summed channels whose weights are transformed at a time.
    fn chunk(&self) -> usize {
        if self.cut.own {
            self.sides.channels
        } else {
            self.sides.channels.min(CHUNK)
        }
    }

    /// Floats between the elements of a panel's products.
    fn products_apart(&self) -> usize {
        apart(self.cut.block * self.panels.width)
    }

    /// Bytes of a thread's transformed weights and products of a panel.
    fn panel_bytes(&self) -> usize {
        let floats = self.cut.elements() * (self.weight_apart() + self.products_apart()) + self.lanes;
        round_up(floats * 4, 64)
    }

    /// Panels of result channels, through all stages but the first.
    fn by_panels(&self, helpers: &mut BTreeSet<Helper>) -> String {
        let (cut, panels, lanes) = (self.cut, self.panels, self.lanes);
        let (summed, chunk, width) = (self.sides.channels, self.chunk(), panels.width);
        let calls = self.row_calls(width, width, "some", "from > 0", helpers);
        let body = format!(
            "float *weights = (float *)(args->own + {} + thread * (int64_t){}), *products = weights + {};\nfor (int64_t panel = begin; panel < end; panel++) {{\n    const \
             int64_t col = panel * {width};\n    for (int64_t from = 0; from < {summed}; from += {chunk}) {{\n        const int64_t some = {summed} - from < \
             {chunk} ? {summed} - from : {chunk};\n        for (int64_t c = 0; c < some; c += {lanes})\n            for (int64_t k = 0; k < {width}; k += {lanes}) \
             {name}_turn(args, from + c, col + k, weights + c * {width} + k, {width});\n        for (int64_t element = 0; element < {}; element++) {{\n            const \
             float *tile_a = (const float *)args->own + element * {} + from;\n            const float *tile_b = weights + element * {};\n            float *target = products \
             + element * {};\n            int64_t row = 0;\n{}        }}\n    }}\n    for (int64_t tile = 0; tile < args->count; tile++) {{\n{}        for (int64_t c = \
             col; c < col + {width}; c += {lanes}) {{\n            const float *from = products + tile * {width} + c - col;\n{}        }}\n    }}\n}}\n",
            cut.side_bytes(0),
            self.panel_bytes(),
            cut.elements() * self.weight_apart(),
            cut.elements(),
            cut.apart(0),
            self.weight_apart(),
            self.products_apart(),
            indent(&calls, 12),
            indent(&cut.place([0, 0]), 8),
            indent(&self.transform_back(self.products_apart()), 12),
            name = self.spec.name,
        );
        self.spec.frame().part(
            "Panels of channels: their weights, products and results.",
            "panels",
            &body,
        )
    }

    /// Floats between the elements of the transformed weight.
    fn weight_apart(&self) -> usize {
        if self.cut.own {
            apart(self.sides.channels * self.panels.padded())
        } else {
            apart(self.chunk() * self.panels.width)
        }
    }

    /// `name_turn(args, c, k, to, ld)`: transforms the weights of a vector of summed channels from `c` and
    /// one of result channels from `k`, to `[element][summed channel][result channel]`, with `ld` floats
    /// between summed channels.
    fn turn(&self) -> String {
        let (lanes, weight, name) = (self.lanes, &self.spec.weight, &self.spec.name);
        let (summed, results) = (self.sides.channels, self.sides.result_channels);
        let store = |r: usize, value: &str| {
            let (first, apart) = (r * self.matrices.tile, self.weight_apart());
            format!("vf_store(to + ({first} + j) * {apart}, vf_set1(scale[{first} + j]) * ({value}));")
        };
        let (gather, load): (String, Box<dyn Fn(usize) -> String>) = match self.direction {
            // For one result channel memory runs over summed channels and kernel elements: whole vectors of
            // those are loaded and transposed.
            Direction::Forward => (
                format!(
                    "vf turned[{}];\nfor (int64_t part = 0; part < 9; part++) {{\n    vf block[KILN_LANES];\n    KILN_UNROLL for (int l = 0; l < {lanes}; \
                     l++) block[l] = vf_load({weight} + (k + l) * {} + c * 9 + part * {lanes});\n    vf_transpose(block);\n    KILN_UNROLL for (int l = 0; \
                     l < {lanes}; l++) turned[part * {lanes} + l] = block[l];\n}}\n",
                    lanes * 9,
                    summed * 9
                ),
                Box::new(|j| format!("turned[s * 9 + i * 3 + {j}]")),
            ),
            // For one summed channel memory runs over result channels and kernel elements, which are read
            // in reverse.
            Direction::InputGrad => (
                String::new(),
                Box::new(move |j| {
                    format!(
                        "vf_load_stride({weight} + (c + s) * {} + k * 9 + 8 - i * 3 - {j}, 9)",
                        results * 9
                    )
                }),
            ),
        };
        let transform = both_sides(&self.matrices.kernel, "", &load, &store);
        format!(
            "/* Transforms a block of the weight. */\nstatic void {name}_turn(const struct {name}_args *args, int64_t c, int64_t k, float *to, int64_t ld) \
             {{\n{}{}{}    for (int64_t s = 0; s < {lanes}; s++, to += ld) {{\n{}    }}\n}}\n",
            unpack(&self.spec.params),
            indent(&self.matrices.scales(), 4),
            indent(&gather, 4),
            indent(&transform, 8),
        )
    }

    /// Transforms the whole weight, panel by panel.
    fn weights(&self) -> String {
        let (panels, lanes) = (self.panels, self.lanes);
        let body = format!(
            "for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t c = unit / {blocks} * {lanes}, k = unit % {blocks} * {lanes}, panel = k / \
             {width};\n    const int64_t ld = panel == {} ? {} : {width};\n    {}_turn(args, c, k, (float *)args->workspace + panel * {} + c * ld + k % {width}, \
             ld);\n}}\n",
            panels.count - 1,
            panels.last,
            self.spec.name,
            panels.width * self.sides.channels,
            blocks = panels.padded() / lanes,
            width = panels.width,
        );
        self.spec.frame().part("Transforms the weight.", "weights", &body)
    }

    /// Transforms tiles of the image into `[element][tile][channel]`.
    fn tiles(&self) -> String {
        let (cut, lanes, t) = (self.cut, self.lanes, self.matrices.tile);
        let [_, height, width] = self.sides.extents;
        let image = &self.spec.image;
        let load = |j: usize| guarded(image, "y", &format!("(x0 + {j})"), width);
        let store =
            |r: usize, value: &str| format!("vf_store(to + ({} + j) * {}, {value});", r * t, cut.apart(0));
        let transform = both_sides(
            &self.matrices.input,
            &format!("const int64_t y = y0 + i;\nconst int row = y >= 0 && y < {height};\n"),
            &load,
            &store,
        );
        let body = format!(
            "for (int64_t tile = begin; tile < end; tile++) {{\n{}    const int inside = y0 >= 0 && y0 + {t} <= {height} && x0 >= 0 && x0 + {t} <= {width};\n    \
             for (int64_t c = 0; c < {}; c += {lanes}) {{\n        float *to = (float *)args->own + tile * {} + c;\n{}    }}\n}}\n",
            indent(&cut.place(self.pad), 4),
            self.sides.channels,
            cut.stride[0],
            indent(&transform, 8),
        );
        self.spec
            .frame()
            .part("Transforms tiles of the image.", "tiles", &body)
    }

    /// Statements that multiply all rows `row..` of `tile_a` (at the stride of transformed tiles) with
    /// `tile_b`, of this width, into `target`.
    fn row_calls(
        &self,
        width: usize,
        ld: usize,
        depth: &str,
        accumulate: &str,
        helpers: &mut BTreeSet<Helper>,
    ) -> String {
        let (cut, vectors) = (self.cut, width / self.lanes);
        let parts = cut.block.div_ceil(tile::max_rows(self.isa, vectors));
        let rows = cut.block.div_ceil(parts);
        let tall = cut.block - parts * (rows - 1);
        let mut call = |rows: usize| {
            let tile = Tile {
                rows,
                vectors,
                a: Access::Strided {
                    free: cut.stride[0] as i64,
                    depth: 1,
                },
                b: Access::Packed,
                factor: Factor::F32,
                nested: false,
                block: super::BLOCK,
            };
            helpers.insert(tile.helper(self.isa));
            format!(
                "{}(tile_a + row * {}, tile_b, {depth}, target + row * {ld}, {ld}, {accumulate});\n",
                tile.name(),
                cut.stride[0],
            )
        };
        let mut text = format!("for (; row < {}; row += {rows})\n    {}", tall * rows, call(rows));
        if tall < parts {
            let short = rows - 1;
            text.push_str(&format!(
                "for (; row < {}; row += {short})\n    {}",
                cut.block,
                call(short)
            ));
        }
        text
    }

    /// The products: for each element and panel of result channels, all tiles.
    fn products(&self, helpers: &mut BTreeSet<Helper>) -> String {
        let (cut, panels) = (self.cut, self.panels);
        let summed = self.sides.channels;
        let mut heights =
            |width: usize| self.row_calls(width, cut.stride[1], &summed.to_string(), "0", helpers);
        let full = if panels.count == 1 {
            panels.last
        } else {
            panels.width
        };
        let calls = if panels.count > 1 && panels.last < panels.width {
            let (wide, narrow) = (heights(full), heights(panels.last));
            format!(
                "if (panel < {}) {{\n{}}} else {{\n{}}}\n",
                panels.count - 1,
                indent(&wide, 4),
                indent(&narrow, 4)
            )
        } else {
            heights(full)
        };
        let body = format!(
            "for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t element = unit / {count}, panel = unit % {count};\n    const float *tile_a = (const \
             float *)args->own + element * {};\n    const float *tile_b = (const float *)args->workspace + element * {} + panel * {};\n    \
             float *target = (float *)(args->own + {}) + element * {} + panel * {};\n    int64_t row = 0;\n{}}}\n",
            cut.apart(0),
            self.weight_apart(),
            panels.width * summed,
            cut.side_bytes(0),
            cut.apart(1),
            panels.width,
            indent(&calls, 4),
            count = panels.count,
        );
        self.spec
            .frame()
            .part("One product for each element of a tile.", "products", &body)
    }

    /// Statements that transform the products of `tile` at `from` back, for the vector of channels at `c`,
    /// and let the caller consume the results.
    fn transform_back(&self, apart: usize) -> String {
        let t = self.matrices.tile;
        let [height, width] = self.result;
        let load = |j: usize| format!("vf_load(from + (i * {t} + {j}) * {apart})");
        let consume = |r: usize, value: &str| {
            let place = PixelPlace {
                width: Width::Vector,
                image: "image",
                at: ["0", &format!("(y0 + {r})"), "x"],
                channel: "c",
            };
            let consume = (self.spec.epilogue.consume)(&place, "sum");
            format!(
                "if (y0 + {r} < {height} && x < {width}) {{\n    const vf sum = {value};\n    {consume}\n}}"
            )
        };
        both_sides(&self.matrices.output, "", &load, &consume).replace(
            "const vf d0 = half[0][j];",
            "const int64_t x = x0 + j;\nconst vf d0 = half[0][j];",
        )
    }

    /// Transforms products back.
    fn results(&self) -> String {
        let (cut, lanes) = (self.cut, self.lanes);
        let body = format!(
            "for (int64_t tile = begin; tile < end; tile++) {{\n{}    for (int64_t c = 0; c < {}; c += {lanes}) {{\n        const float *from = (const float \
             *)(args->own + {}) + tile * {} + c;\n{}    }}\n}}\n",
            indent(&cut.place([0, 0]), 4),
            self.sides.result_channels,
            cut.side_bytes(0),
            cut.stride[1],
            indent(&self.transform_back(cut.apart(1)), 8),
        );
        self.spec
            .frame()
            .part("Transforms products back.", "results", &body)
    }
}
