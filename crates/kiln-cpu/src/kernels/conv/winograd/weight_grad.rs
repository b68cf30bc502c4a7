//! The gradient with respect to the weight: products of transformed tiles of both images, summed over
//! tiles, transformed back once.

use std::collections::BTreeSet;

use super::transform::{Matrices, both_sides, transposed};
use super::{Cut, apart, by_channels, fits, guarded};
use crate::isa::Isa;
use crate::kernels::conv::WeightGradSpec;
use crate::kernels::element::Factor;
use crate::kernels::tile::{self, Access, Tile};
use crate::kernels::{Helper, KernelText, Width, call_part, indent, round_up, vector};
use crate::policy::{WINOGRAD_SUMMED_WEIGHT, WINOGRAD_SUMS};

/// The kernel, if the convolution is of this kind and large enough.
pub(in crate::kernels::conv) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<KernelText> {
    let g = &spec.geometry;
    let lanes = vector::lanes(isa);
    if !fits(g, lanes) || !by_channels(&spec.input) || !by_channels(&spec.output_grad) {
        return None;
    }
    let cut = Cut::new(
        g,
        g.output,
        [g.in_channels, g.out_channels],
        WINOGRAD_SUMMED_WEIGHT,
        true,
    )?;
    let emitter = Emitter {
        spec,
        cut,
        chunks: chunks(&cut, g.in_channels * g.out_channels),
        matrices: Matrices::new(cut.m),
        lanes,
        isa,
    };
    Some(emitter.kernel())
}

/// How many sums there are, of `weights` elements each before they are transformed.
fn chunks(cut: &Cut, weights: usize) -> usize {
    if !cut.own {
        return 1;
    }
    (WINOGRAD_SUMS / (cut.elements() * weights * 4))
        .clamp(2, 8)
        .min(cut.blocks())
}

struct Emitter<'a> {
    spec: &'a WeightGradSpec<'a>,
    cut: Cut,
    /// Sums that are added up at the end, so that each thread can make one.
    chunks: usize,
    matrices: Matrices,
    lanes: usize,
    isa: Isa,
}

impl Emitter<'_> {
    fn kernel(self) -> KernelText {
        let frame = self.spec.frame();
        let (name, g) = (frame.name, &self.spec.geometry);
        let (cut, elements) = (self.cut, self.cut.elements());
        if !cut.own && cut.blocks() == 1 {
            return self.by_panels();
        }
        let own_at = round_up((self.chunks * elements * self.sums_apart() + self.lanes) * 4, 64);
        let mut helpers = BTreeSet::new();
        let mut source = cut.head(&frame, &self.images());
        source.push_str(&self.tiles());
        let (products, units) = self.products(&mut helpers);
        source.push_str(&products);
        source.push_str(&self.finish());
        let run = frame.run(false);
        let (chunks, blocks) = (self.chunks, cut.blocks());
        let (mut calls, copies) = if cut.own {
            // Which blocks a sum takes does not depend on the number of threads.
            source.push_str(&format!(
                "/* Sums over some blocks of tiles each. */\nstatic void {name}_chunks(void *ctx, int64_t begin, int64_t end, int thread) {{\n    struct \
                 {name}_args own = *(const struct {name}_args *)ctx;\n    own.own += thread * (int64_t){};\n    for (int64_t chunk = begin; chunk < end; chunk++) {{\n        \
                 own.workspace = ((const struct {name}_args *)ctx)->workspace + chunk * {};\n        own.fresh = 1;\n        for (int64_t block = chunk * {blocks} / \
                 {chunks}; block < (chunk + 1) * {blocks} / {chunks}; block++) {{\n{}            {name}_tiles(&own, 0, own.count, thread);\n            \
                 {name}_products(&own, 0, {units}, thread);\n            own.fresh = 0;\n        }}\n    }}\n}}\n",
                cut.bytes(),
                elements * self.sums_apart() * 4,
                indent(&cut.choose("own"), 12),
            ));
            (run(&format!("{name}_chunks"), chunks), frame.threads)
        } else {
            let tiles = call_part(frame.threads == 1, &format!("{name}_tiles"), "args.count");
            let calls = format!(
                "    for (int64_t block = 0; block < {blocks}; block++) {{\n        args.fresh = block == 0;\n{}{}    }}\n",
                indent(&cut.choose("args"), 8),
                indent(&(tiles + &run(&format!("{name}_products"), units)), 4),
            );
            (calls, 1)
        };
        calls.push_str(&run(&format!("{name}_finish"), g.out_channels));
        let calls = format!("    args.own = workspace + {own_at};\n{calls}");
        let mut kernel = frame.finish(source, &calls, own_at + copies * cut.bytes());
        kernel.helpers = helpers.into_iter().collect();
        kernel
    }

    /// The kernel that takes a panel of input channels and some output channels from the products to the
    /// gradient: sums stay in cache.
    fn by_panels(self) -> KernelText {
        let frame = self.spec.frame();
        let (name, g) = (frame.name, &self.spec.geometry);
        let (cut, lanes, elements) = (self.cut, self.lanes, self.cut.elements());
        let (n, m) = (g.in_channels, g.out_channels);
        let width = if n.is_multiple_of(2 * lanes) {
            2 * lanes
        } else {
            lanes
        };
        let some = [64, 48, 32]
            .into_iter()
            .find(|some| m.is_multiple_of(*some))
            .unwrap_or(lanes);
        let sums = apart(some * width);
        let own_at = cut.bytes();
        let each = round_up((elements * sums + lanes) * 4, 64);
        let (panels, groups) = (n / width, m / some);
        let mut helpers = BTreeSet::new();
        let calls = self.row_calls(some, width, width, "0", &mut helpers);
        let body = format!(
            "float *sums = (float *)(args->own + {own_at} + thread * (int64_t){each});\nfor (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t col = unit / \
             {groups} * {width}, low = unit % {groups} * {some};\n    for (int64_t element = 0; element < {elements}; element++) {{\n        const float *tile_a = (const \
             float *)(args->own + {}) + element * {} + low;\n        const float *tile_b = (const float *)args->own + element * {} + col;\n        float *target = sums \
             + element * {sums};\n        int64_t row = 0;\n{}    }}\n    for (int64_t o = low; o < low + {some}; o++)\n        for (int64_t c = col; c < col + {width}; \
             c += {lanes}) {{\n            const float *from = sums + (o - low) * {width} + c - col;\n{}        }}\n}}\n",
            cut.side_bytes(0),
            cut.apart(1),
            cut.apart(0),
            indent(&calls, 8),
            indent(&self.transform_back(1, sums), 12),
        );
        let panels_of =
            "Panels of input channels by some output channels: sums of products, transformed back.";
        let source =
            cut.head(&frame, &self.images()) + &self.tiles() + &frame.part(panels_of, "panels", &body);
        let run = frame.run(false);
        let calls = format!(
            "    args.own = workspace;\n    args.lead = 0;\n    args.count = {};\n{}{}",
            cut.tiles,
            run(&format!("{name}_tiles"), cut.tiles),
            run(&format!("{name}_panels"), panels * groups)
        );
        let mut kernel = frame.finish(source, &calls, own_at + each * frame.threads);
        kernel.helpers = helpers.into_iter().collect();
        kernel
    }

    /// Statements that add the products of `rows` output channels from `tile_a` with a panel of input
    /// channels from `tile_b` to `target`.
    fn row_calls(
        &self,
        rows: usize,
        width: usize,
        ld: usize,
        accumulate: &str,
        helpers: &mut BTreeSet<Helper>,
    ) -> String {
        let (cut, vectors, all) = (self.cut, width / self.lanes, rows);
        let parts = all.div_ceil(tile::max_rows(self.isa, vectors));
        let rows = all.div_ceil(parts);
        let tall = all - parts * (rows - 1);
        let mut call = |rows: usize| {
            let tile = Tile {
                rows,
                vectors,
                a: Access::Strided {
                    free: 1,
                    depth: cut.stride[1] as i64,
                },
                b: Access::Strided {
                    free: 1,
                    depth: cut.stride[0] as i64,
                },
                factor: Factor::F32,
                nested: false,
                block: tile::BLOCK,
            };
            helpers.insert(tile.helper(self.isa));
            format!(
                "{}(tile_a + row, tile_b, args->count, target + row * {ld}, {ld}, {accumulate});\n",
                tile.name()
            )
        };
        let mut text = format!("for (; row < {}; row += {rows})\n    {}", tall * rows, call(rows));
        if tall < parts {
            let short = rows - 1;
            text.push_str(&format!(
                "for (; row < {all}; row += {short})\n    {}",
                call(short)
            ));
        }
        text
    }

    /// Statements that transform the sums at `from` back, for the output channel `o` and the vector of
    /// input channels at `c`, and let the caller consume them in the order of the weight. The elements of
    /// each of `chunks` sums are `apart` floats from each other.
    fn transform_back(&self, chunks: usize, apart: usize) -> String {
        let WeightGradSpec {
            geometry: g, consume, ..
        } = self.spec;
        let (lanes, t, elements) = (self.lanes, self.matrices.tile, self.cut.elements());
        let load = |j: usize| {
            let chunk = |chunk: usize| {
                format!(
                    "vf_load(from + {} + (i * {t} + {j}) * {apart})",
                    chunk * elements * apart
                )
            };
            let sum = (0..chunks).map(chunk).collect::<Vec<_>>().join(" + ");
            format!("vf_set1(scale[i * {t} + {j}]) * ({sum})")
        };
        let store = |r: usize, value: &str| format!("vf_store_stride(row + {} + j, 9, {value});", r * 3);
        let transform = both_sides(&transposed(&self.matrices.kernel), "", &load, &store);
        format!(
            "{}float row[{all}];\n{transform}const int64_t start = (o * {} + c) * 9;\nfor (int64_t i = 0; i < {all}; i += {lanes}) {{\n    vf sum = vf_load(row + \
             i);\n{}}}\n",
            self.matrices.scales(),
            g.in_channels,
            indent(&consume(Width::Vector, "(start + i)", "sum"), 4),
            all = 9 * lanes,
        )
    }

    /// Floats between the elements of the sums.
    fn sums_apart(&self) -> usize {
        let g = &self.spec.geometry;
        apart(g.in_channels * g.out_channels)
    }

    /// What is convolved, in words.
    fn images(&self) -> String {
        let g = &self.spec.geometry;
        format!(
            "{} images of {:?} x {} channels to {}",
            g.images, g.input, g.in_channels, g.out_channels
        )
    }

    /// Transforms tiles of both images into `[element][tile][channel]`.
    fn tiles(&self) -> String {
        let WeightGradSpec {
            geometry: g,
            input,
            output_grad,
            ..
        } = self.spec;
        let (cut, lanes, t) = (self.cut, self.lanes, self.matrices.tile);
        let one = |matrix: &super::transform::Matrix,
                   image: &crate::kernels::conv::Image<'_>,
                   [height, width]: [usize; 2],
                   before: [i64; 2],
                   channels: usize,
                   side: usize| {
            let (at, stride) = (side * cut.side_bytes(0), cut.stride[side]);
            let read = matrix[0].len();
            let load = |j: usize| guarded(image, "y", &format!("(x0 + {j})"), width);
            let store = |r: usize, value: &str| {
                format!("vf_store(to + ({} + j) * {}, {value});", r * t, cut.apart(side))
            };
            let row = format!("const int64_t y = y0 + i;\nconst int row = y >= 0 && y < {height};\n");
            let transform = both_sides(matrix, &row, &load, &store);
            format!(
                "{{\n{}    const int inside = y0 >= 0 && y0 + {read} <= {height} && x0 >= 0 && x0 + {read} <= {width};\n    for (int64_t c = 0; c < \
                 {channels}; c += {lanes}) {{\n        float *to = (float *)(args->own + {at}) + tile * {stride} + c;\n{}    }}\n}}\n",
                indent(&cut.place(before), 4),
                indent(&transform, 8)
            )
        };
        let of_input = one(
            &self.matrices.input,
            input,
            [g.input[1], g.input[2]],
            [g.pad[1] as i64, g.pad[2] as i64],
            g.in_channels,
            0,
        );
        let of_grad = one(
            &transposed(&self.matrices.output),
            output_grad,
            [g.output[1], g.output[2]],
            [0, 0],
            g.out_channels,
            1,
        );
        let body = format!(
            "for (int64_t tile = begin; tile < end; tile++) {{\n{}}}\n",
            indent(&(of_input + &of_grad), 4)
        );
        self.spec.frame().part(
            "Transforms tiles of the input and of the output's gradient.",
            "tiles",
            &body,
        )
    }

    /// For each element and panel of input channels: products over the tiles of a block, added to the sums
    /// of earlier blocks.
    fn products(&self, helpers: &mut BTreeSet<Helper>) -> (String, usize) {
        let g = &self.spec.geometry;
        let (cut, lanes) = (self.cut, self.lanes);
        let (n, m) = (g.in_channels, g.out_channels);
        let vectors = (n / lanes).min(2);
        let width = vectors * lanes;
        let panels = n.div_ceil(width);
        let last = n - (panels - 1) * width;
        let mut heights = |width: usize| self.row_calls(m, width, n, "!args->fresh", helpers);
        let calls = if last < width {
            let (wide, narrow) = (heights(width), heights(last));
            format!(
                "if (panel < {}) {{\n{}}} else {{\n{}}}\n",
                panels - 1,
                indent(&wide, 4),
                indent(&narrow, 4)
            )
        } else {
            heights(width)
        };
        let body = format!(
            "for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t element = unit / {panels}, panel = unit % {panels};\n    const float *tile_a = (const \
             float *)(args->own + {}) + element * {};\n    const float *tile_b = (const float *)args->own + element * {} + panel * \
             {width};\n    float *target = (float *)args->workspace + element * {} + panel * {width};\n    int64_t row = 0;\n{}}}\n",
            cut.side_bytes(0),
            cut.apart(1),
            cut.apart(0),
            self.sums_apart(),
            indent(&calls, 4),
        );
        let text = self
            .spec
            .frame()
            .part("One product for each element of a tile.", "products", &body);
        (text, self.cut.elements() * panels)
    }

    /// Transforms sums back, over output channels, and lets the caller consume them in the order of the
    /// weight.
    fn finish(&self) -> String {
        let (lanes, n) = (self.lanes, self.spec.geometry.in_channels);
        let body = format!(
            "for (int64_t o = begin; o < end; o++)\n    for (int64_t c = 0; c < {n}; c += {lanes}) {{\n        const float *from = (const float *)args->workspace + \
             o * {n} + c;\n{}    }}\n",
            indent(&self.transform_back(self.chunks, self.sums_apart()), 8),
        );
        self.spec.frame().part(
            "Transforms sums back, into the order of the weight.",
            "finish",
            &body,
        )
    }
}
