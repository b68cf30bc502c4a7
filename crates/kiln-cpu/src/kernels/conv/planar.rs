//! Depthwise convolutions of channels-first images: one plane at a time.
//!
//! A channel of an image is a small plane, separate from all other channels. A thread copies it into a
//! padded slab in its L2 (computing the image if that is needed), runs vectors along the rows with the
//! weights broadcast, collects the result plane, and lets the caller consume that. No image is transposed
//! to channels-last.
//!
//! The input gradient of a convolution with a stride puts zeros between the elements of the slab, which
//! makes the stride 1.

use super::walk::Direction;
use super::{ConvSpec, Geometry, Image, ImageAxis, PixelPlace, Spatial, WeightGradSpec};
use crate::isa::Isa;
use crate::kernels::plane::{Slab, spaced};
use crate::kernels::{KernelText, Param, Width, indent, round_up, vector};
use crate::policy::SERIAL_CONVOLUTION;

/// Most kernel elements of which each has instructions of its own: those of 7 x 7. The gradient of a
/// depthwise transposed convolution is one with a kernel as large as the image.
const UNROLLED: usize = 64;
/// Elements of a window whose sums a thread keeps on its stack.
const MOST_SUMS: usize = 16 << 10;

/// Whether a convolution is depthwise over planes.
fn fits(g: &Geometry, image: &Image<'_>) -> bool {
    let flat = g.kernel[0] == 1 && g.input[0] == 1 && g.output[0] == 1 && g.pad[0] == 0;
    let depthwise = g.groups == g.in_channels && g.in_channels == g.out_channels;
    flat && depthwise && matches!(image.contiguous, Some(ImageAxis::Width | ImageAxis::Plane))
}

/// What a kernel works on, for the comment above it.
fn about(g: &Geometry, extents: Spatial) -> String {
    format!(
        "{} images of {extents:?} x {} channels, plane by plane.",
        g.images, g.in_channels
    )
}

/// `function(args, image, channel, slab)`: fills a slab with a plane of an image.
fn fill(
    slab: &Slab,
    image: &Image<'_>,
    prefix: &str,
    function: &str,
    params: &[Param],
    lanes: usize,
) -> String {
    let load = |width| {
        (image.load)(&PixelPlace {
            width,
            image: "image",
            at: ["0", "y", "x"],
            channel: "channel",
        })
    };
    slab.fill(&load, prefix, function, params, lanes)
}

/// Weights that are loaded once for a plane, and what adds the products of a vector of pixels to `sum`. Rows
/// of the slab are `pitch` elements apart, pixels `step`.
fn products(
    g: &Geometry,
    forward: bool,
    weight: &str,
    pitch: usize,
    step: usize,
    lanes: usize,
) -> [String; 2] {
    let ([_, ky, kx], count) = (g.kernel, g.taps());
    let [down, across] = [g.dilation[1] * pitch, g.dilation[2]];
    // The input gradient reads the kernel in reverse.
    if count > UNROLLED {
        let tap = match forward {
            true => format!("ty * {kx} + tx"),
            false => format!("({} - ty) * {kx} + ({} - tx)", ky - 1, kx - 1),
        };
        let pixels = format!("at + x * {step} + ty * {down} + tx * {across}");
        let sums = format!(
            "for (int64_t ty = 0; ty < {ky}; ty++)\n    for (int64_t tx = 0; tx < {kx}; tx++)\n        sum = vf_fma({}, vf_set1({weight}[j * \
             {count} + {tap}]), sum);\n",
            spaced(&pixels, step, lanes)
        );
        return [String::new(), sums];
    }
    let [mut weights, mut sums] = [String::new(), String::new()];
    for t in 0..count {
        let tap = if forward { t } else { count - 1 - t };
        weights.push_str(&format!(
            "const vf w{t} = vf_set1({weight}[j * {count} + {tap}]);\n"
        ));
        let pixels = format!("at + x * {step} + {}", t / kx * down + t % kx * across);
        sums.push_str(&format!(
            "sum = vf_fma({}, w{t}, sum);\n",
            spaced(&pixels, step, lanes)
        ));
    }
    [weights, sums]
}

/// The forward convolution or the input gradient, if it is of this kind.
pub(super) fn correlate(spec: &ConvSpec<'_>, direction: Direction, isa: Isa) -> Option<KernelText> {
    let frame = spec.frame();
    let (name, params) = (frame.name, frame.params);
    let (g, image, weight, epilogue) = (&spec.geometry, &spec.image, &spec.weight, &spec.epilogue);
    let (from, to) = match direction {
        Direction::Forward => (g.input, g.output),
        Direction::InputGrad => (g.output, g.input),
    };
    if !fits(g, image) || epilogue.axis(to) != Some(ImageAxis::Plane) {
        return None;
    }
    let lanes = vector::lanes(isa);
    let [_, height, width] = to;
    let span = [1, 2].map(|d| (g.kernel[d] - 1) * g.dilation[d]);
    let forward = direction == Direction::Forward;
    let step = if forward {
        [g.stride[1], g.stride[2]]
    } else {
        [1, 1]
    };
    let spread = if forward {
        [1, 1]
    } else {
        [g.stride[1], g.stride[2]]
    };
    let before = [0, 1].map(|d| {
        let pad = g.pad[d + 1] as i64;
        if forward { pad } else { span[d] as i64 - pad }
    });
    let rows = (height - 1) * step[0] + span[0] + 1;
    let reach = round_up(width, lanes) * step[1] + span[1] + lanes;
    let slab = Slab::new([from[1], from[2]], before, rows, reach, spread, lanes);
    let result_at = slab.bytes(lanes);
    let each = result_at + round_up((height * width + lanes) * 4, 64);

    let count = g.taps();
    let [weights, taps] = products(g, forward, weight, slab.pitch, step[1], lanes);
    let consume = |width| {
        let place = PixelPlace {
            width,
            image: "image",
            at: ["0", "0", "x"],
            channel: "j",
        };
        indent(&(epilogue.consume)(&place, "sum"), 8)
    };
    let pixels = height * width;
    let body = format!(
        "float *slab = (float *)(args->workspace + thread * (int64_t){each}), *result = (float *)(args->workspace + thread * (int64_t){each} + {result_at});\nfor \
         (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t image = unit / {channels}, j = unit % {channels};\n    \
         {name}_fill(args, image, j, slab);\n{}    for (int64_t y = 0; y < {height}; y++) {{\n        const float *at = slab + y * {};\n        /* What \
         a vector writes past the end of its row, the next row overwrites. */\n        for (int64_t x = 0; x < {width}; x += {lanes}) {{\n            \
         vf sum = {{0}};\n{}            vf_store(result + y * {width} + x, sum);\n        }}\n    }}\n    int64_t x = 0;\n    for (; x + {lanes} <= \
         {pixels}; x += {lanes}) {{\n        vf sum = vf_load(result + x);\n{}    }}\n    for (; x < {pixels}; x++) {{\n        float sum = \
         result[x];\n{}    }}\n}}\n",
        indent(&weights, 4),
        step[0] * slab.pitch,
        indent(&taps, 12),
        consume(Width::Vector),
        consume(Width::Scalar),
        channels = g.in_channels,
    );
    let source = frame.head(&about(g, from), "")
        + &fill(&slab, image, name, &format!("{name}_fill"), params, lanes)
        + &frame.part("", "planes", &body);
    let planes = g.images * g.in_channels;
    let calls =
        frame.run(2 * planes * pixels * count < SERIAL_CONVOLUTION)(&format!("{name}_planes"), planes);
    Some(frame.finish(source, &calls, each * frame.threads))
}

/// The weight gradient, if it is of this kind.
pub(super) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<KernelText> {
    let frame = spec.frame();
    let (name, params) = (frame.name, frame.params);
    let (g, input, output_grad, consume) = (&spec.geometry, &spec.input, &spec.output_grad, &spec.consume);
    if !fits(g, input) || !fits(g, output_grad) || g.taps() > MOST_SUMS {
        return None;
    }
    let lanes = vector::lanes(isa);
    let kx = g.kernel[2];
    let [_, height, width] = g.output;
    let span = [1, 2].map(|d| (g.kernel[d] - 1) * g.dilation[d]);
    let before = [g.pad[1] as i64, g.pad[2] as i64];
    let rows = (height - 1) * g.stride[1] + span[0] + 1;
    let reach = round_up(width, lanes) * g.stride[2] + span[1] + lanes;
    let x_slab = Slab::new([g.input[1], g.input[2]], before, rows, reach, [1, 1], lanes);
    // Zeros up to a whole vector: lanes past the end of a row add nothing.
    let y_slab = Slab::new([g.output[1], g.output[2]], [0, 0], height, width, [1, 1], lanes);
    let y_at = x_slab.bytes(lanes);
    let each = y_at + y_slab.bytes(lanes);

    let taps = g.taps();
    // Lanes past the end of a row multiply zeros of the gradient, so the image must not be infinite there.
    let guard = if width.is_multiple_of(lanes) {
        String::new()
    } else {
        let rest = width % lanes;
        format!("const vi inside = x + {lanes} <= {width} ? vi_set1(-1) : vi_iota() < {rest};\n")
    };
    let add = |sum: &str, offset: &str| {
        let x = format!("at + x * {} + {offset}", g.stride[2]);
        let x = spaced(&x, g.stride[2], lanes);
        match guard.is_empty() {
            true => format!("{sum} = vf_fma({x}, dy, {sum});\n"),
            false => format!("{sum} = vf_fma(vf_select(inside, {x}, (vf){{0}}), dy, {sum});\n"),
        }
    };
    let over_pixels = |steps: &str| {
        format!(
            "for (int64_t y = 0; y < {height}; y++) {{\n    const float *at = slab + y * {};\n    for (int64_t x = 0; x < {width}; x += {lanes}) {{\n        \
             const vf dy = vf_load(grad + y * {} + x);\n{}{}    }}\n}}\n",
            g.stride[1] * x_slab.pitch,
            y_slab.pitch,
            indent(&guard, 8),
            indent(steps, 8),
        )
    };
    let [down, across] = [g.dilation[1] * x_slab.pitch, g.dilation[2]];
    // What stands before the images, for each of them, and behind them.
    let [before_all, each_image, behind_all] = if taps > UNROLLED {
        let offset = format!("t / {kx} * {down} + t % {kx} * {across}");
        [
            format!("for (int64_t t = 0; t < {taps}; t++) row[t] = 0.0f;\n"),
            format!(
                "for (int64_t t = 0; t < {taps}; t++) {{\n    const int64_t offset = {offset};\n    vf sum = {{0}};\n{}    row[t] += vf_sum(sum);\n}}\n",
                indent(&over_pixels(&add("sum", "offset")), 4)
            ),
            String::new(),
        ]
    } else {
        let each = |text: &dyn Fn(usize) -> String| (0..taps).map(text).collect::<String>();
        let steps = each(&|t| {
            let offset = t / kx * down + t % kx * across;
            add(&format!("sum{t}"), &offset.to_string())
        });
        let sums: Vec<String> = (0..taps).map(|t| format!("sum{t} = {{0}}")).collect();
        [
            format!("vf {};\n", sums.join(", ")),
            over_pixels(&steps),
            each(&|t| format!("row[{t}] = vf_sum(sum{t});\n")),
        ]
    };
    let vector = indent(&consume(Width::Vector, "(from + i)", "sum"), 8);
    let scalar = indent(&consume(Width::Scalar, "(from + i)", "sum"), 8);
    let body = format!(
        "float *slab = (float *)(args->workspace + thread * (int64_t){each}), *grad = (float *)(args->workspace + thread * (int64_t){each} + {y_at});\nfor (int64_t channel \
         = begin; channel < end; channel++) {{\n    float row[{taps}];\n{}    for (int64_t image = 0; image < {}; image++) {{\n        {name}_fill_input(args, image, \
         channel, slab);\n        {name}_fill_output(args, image, channel, grad);\n{}    }}\n{}    const int64_t from = channel * {taps};\n    int64_t i = 0;\n    for (; i \
         + {lanes} <= {taps}; i += {lanes}) {{\n        vf sum = vf_load(row + i);\n{vector}    }}\n    for (; i < {taps}; i++) {{\n        float sum = \
         row[i];\n{scalar}    }}\n}}\n",
        indent(&before_all, 4),
        g.images,
        indent(&each_image, 8),
        indent(&behind_all, 4),
    );
    let copy =
        |slab, image, what: &str| fill(slab, image, name, &format!("{name}_fill_{what}"), params, lanes);
    let source = frame.head(&about(g, g.input), "")
        + &copy(&x_slab, input, "input")
        + &copy(&y_slab, output_grad, "output")
        + &frame.part("", "channels", &body);
    let calls = frame.run(g.is_small())(&format!("{name}_channels"), g.in_channels);
    Some(frame.finish(source, &calls, each * frame.threads))
}
