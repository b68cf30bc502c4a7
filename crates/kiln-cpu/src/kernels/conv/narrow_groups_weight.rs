//! The weight gradient of convolutions whose groups are narrower than a vector.
//!
//! A vector holds the input channels of several whole groups. For each pixel, an output channel of every
//! group is spread over its group (a constant shuffle) once, and multiplied with the input under all kernel
//! elements of a row: a few shuffles serve many multiply-adds. Lines of pixels are read once and in order,
//! for all channels; a fixed number of chunks of lines have sums of their own, which are added up in order.

use super::WeightGradSpec;
use super::narrow_groups::{read, spread};
use super::weight_grad::{self, Images};
use crate::isa::Isa;
use crate::kernels::{KernelText, indent, round_up};

/// Most sums, each of which a thread can make by itself.
const MAX_CHUNKS: usize = 16;

/// Accumulators that leave room for operands.
fn accumulators(isa: Isa) -> usize {
    if isa.registers() >= 32 { 24 } else { 10 }
}

pub(super) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> KernelText {
    let (frame, g) = (spec.frame(), &spec.geometry);
    let name = frame.name;
    let element = spec.storage.element();
    let (real, vf) = element.ctypes();
    let lanes = element.lanes(isa);
    let (channels, group) = (g.in_channels, g.group_in());
    let vectors = channels.div_ceil(lanes);
    let [kz, ky, kx] = g.kernel;
    let images = Images::new(spec, lanes, true);
    let lines = g.images * g.output[0] * g.output[1];
    let chunks = lines.min(MAX_CHUNKS);
    // Elements of the sums of a chunk: [vector][kernel row][output channel of the group][kernel element of
    // the row][lane].
    let row = group * kx * lanes;
    let sums = vectors * kz * ky * row;

    // Output channels of a group whose sums stay in registers together.
    let some = (1..=group)
        .rev()
        .find(|&some| group % some == 0 && some * kx <= accumulators(isa))
        .unwrap_or(1);
    let blocks: String = (0..group)
        .step_by(some)
        .map(|first| block(spec, &images, first..first + some, lanes))
        .collect();
    let [xn, xz, xy, _] = images.input.strides;
    let [yn, yz, yy, _] = images.output.strides;
    let [_, height, _] = g.output;
    let body = format!(
        "for (int64_t chunk = begin; chunk < end; chunk++) {{\n    {real} *sums = ({real} *)(args->workspace + {}) + chunk * {sums};\n    __builtin_memset(sums, 0, {sums} * \
         sizeof({real}));\n    for (int64_t line = {lines} * chunk / {chunks}; line < {lines} * (chunk + 1) / {chunks}; line++) {{\n        const int64_t image = line / {}, pz \
         = line / {height} % {}, py = line % {height};\n        for (int64_t v = 0; v < {vectors}; v++)\n            for (int64_t tz = 0; tz < {kz}; tz++)\n                for \
         (int64_t ty = 0; ty < {ky}; ty++) {{\n                    const {real} *from = {} + image * {xn} + (pz * {} + tz * {}) * {xz} + (py * {} + ty * {}) * {xy} + v * \
         {lanes};\n                    const {real} *grad = {} + image * {yn} + pz * {yz} + py * {yy} + v * {lanes};\n                    {real} *own = sums + ((v * {kz} + tz) * \
         {ky} + ty) * {row};\n{}                }}\n    }}\n}}\n",
        images.bytes,
        g.output[0] * height,
        g.output[0],
        images.input.base,
        g.stride[0],
        g.dilation[0],
        g.stride[1],
        g.dilation[1],
        images.output.base,
        indent(&blocks, 20),
    );
    let join = format!(
        "{real} *sums = ({real} *)(args->workspace + {});\nfor (int64_t i = begin * {lanes}; i < end * {lanes}; i += {lanes}) {{\n    {vf} total = {vf}_load(sums + i);\n    for \
         (int64_t chunk = 1; chunk < {chunks}; chunk++) total += {vf}_load(sums + chunk * {sums} + i);\n    {vf}_store(sums + i, total);\n}}\n",
        images.bytes
    );
    let about = format!(
        "{} images of {:?} x {channels} channels in groups of {group}.",
        g.images, g.input
    );
    // Back to the order of the weight: output channel, channel of the group, kernel element.
    let channel = format!("(o / {group} * {group} + c)");
    let place = format!(
        "sums[((({channel} / {lanes} * {} + t / {kx}) * {group} + o % {group}) * {kx} + t % {kx}) * {lanes} + {channel} % {lanes}]",
        kz * ky
    );
    let source = frame.head(&about, "")
        + &images.sources()
        + &frame.part("Sums over chunks of lines.", "sum", &body)
        + &frame.part("Adds up the sums of all chunks.", "join", &join)
        + &weight_grad::consume_rows(spec, &place, images.bytes, lanes);
    let run = frame.run(g.is_small());
    let calls = images.calls(&run)
        + &run(&format!("{name}_sum"), chunks)
        + &run(&format!("{name}_join"), sums / lanes)
        + &run(&format!("{name}_finish"), g.out_channels);
    let bytes = images.bytes + round_up(chunks * sums * element.bytes(), 64);
    frame.finish(source, &calls, bytes)
}

/// Statements for a line of pixels and some output channels of each group: adds to their sums at `own`.
fn block(
    spec: &WeightGradSpec<'_>,
    images: &Images,
    outputs: std::ops::Range<usize>,
    lanes: usize,
) -> String {
    let g = &spec.geometry;
    let element = spec.storage.element();
    let vf = element.vector();
    let (channels, group, kx) = (g.in_channels, g.group_in(), g.kernel[2]);
    let (xx, yx) = (images.input.strides[3], images.output.strides[3]);
    let each = |text: &dyn Fn(usize, usize) -> String| -> Vec<String> {
        outputs
            .clone()
            .flat_map(|s| (0..kx).map(move |tx| (s, tx)))
            .map(|(s, tx)| text(s, tx))
            .collect()
    };
    // Each line adds up separately: in one chain with the lines before, each product would be rounded in
    // proportion to all of them.
    let zeros = each(&|s, tx| format!("sum{s}_{tx} = {{0}}"));
    let stores = each(&|s, tx| {
        let at = (s * kx + tx) * lanes;
        format!("{vf}_store(own + {at}, {vf}_load(own + {at}) + sum{s}_{tx});\n")
    });
    let mut step = read("dy", &format!("grad + px * {yx}"), channels, lanes, element) + "\n";
    for tx in 0..kx {
        let address = format!(
            "from + px * {} + {}",
            g.stride[2] as i64 * xx,
            (tx * g.dilation[2]) as i64 * xx
        );
        step += &(read(&format!("x{tx}"), &address, channels, lanes, element) + "\n");
    }
    for s in outputs.clone() {
        step += &format!("const {vf} dy{s} = {};\n", spread("dy", s, group, lanes, element));
        for tx in 0..kx {
            step += &format!("sum{s}_{tx} = {vf}_fma(dy{s}, x{tx}, sum{s}_{tx});\n");
        }
    }
    format!(
        "{{\n    {vf} {};\n    for (int64_t px = 0; px < {}; px++) {{\n{}    }}\n{}}}\n",
        zeros.join(", "),
        g.output[2],
        indent(&step, 8),
        indent(&stores.concat(), 4)
    )
}
