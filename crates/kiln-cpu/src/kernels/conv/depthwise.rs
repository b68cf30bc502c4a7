//! Depthwise convolutions of channels-last images, read in place.
//!
//! The weight gradient goes over lines of the output. Along each line it takes the channels a vector at a
//! time: the part of a cache line that one vector does not use is still in L1 or L2 when the next vector
//! needs it, so memory is read once and in order. A fixed number of chunks of lines have sums of their own,
//! which are added up in order. The input gradient of a convolution with a stride gathers, for each place,
//! from the few kernel elements that reach it.
//!
//! No padded copy is made: borders are tests on scalars.

use super::walk::Direction;
use super::{
    ConvSpec, Geometry, Image, ImageAxis, PixelPlace, Spatial, WeightGradSpec, address, weight_grad,
};
use crate::isa::Isa;
use crate::kernels::{KernelText, Width, indent, round_up, run_part, vector};

/// Most sums of the weight gradient.
const MAX_CHUNKS: usize = 16;

/// Most kernel elements along the width: each has two accumulators.
const MAX_WIDTH: usize = 7;

/// Kernel elements that reach a place, listed on a thread's stack.
const MOST_PLACES: usize = 4096;

/// Whether the convolution is depthwise in two dimensions.
fn fits(g: &Geometry) -> bool {
    let flat = g.kernel[0] == 1 && g.input[0] == 1 && g.output[0] == 1 && g.pad[0] == 0;
    flat && g.groups == g.in_channels && g.in_channels == g.out_channels
}

/// What a kernel works on, for the comment above it.
fn about(g: &Geometry, extents: Spatial) -> String {
    format!(
        "{} images of {extents:?} x {} channels, depthwise.",
        g.images, g.in_channels
    )
}

/// C expression of the address of channel `c` at a place of an image, if the image is in memory with
/// contiguous channels.
fn element(image: &Image<'_>, y: &str, x: &str) -> Option<String> {
    let (pointer, strides) = image.plain()?;
    (strides[4] == 1).then(|| {
        let place = PixelPlace {
            width: Width::Scalar,
            image: "image",
            at: ["0", y, x],
            channel: "c",
        };
        address(pointer, strides, &place)
    })
}

/// C expression of the vector at an address, the last of a place's vectors maybe partial.
fn read(address: &str, channels: usize, lanes: usize) -> String {
    match channels % lanes {
        0 => format!("vf_load({address})"),
        rest => format!("(c + {lanes} <= {channels} ? vf_load({address}) : vf_load_n({address}, {rest}))"),
    }
}

/// The weight gradient, if the convolution is of this kind.
pub(super) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<KernelText> {
    let (frame, g) = (spec.frame(), &spec.geometry);
    let name = frame.name;
    let [_, ky, kx] = g.kernel;
    if !fits(g) || kx > MAX_WIDTH {
        return None;
    }
    let lanes = vector::lanes(isa);
    let (channels, taps) = (g.in_channels, g.taps());
    let (lines, [_, height, width]) = (g.images * g.output[1], g.output);
    let (stride, dilation, pad) = (g.stride[2], g.dilation[2], g.pad[2] as i64);
    let place = |px: &str, tx: usize| format!("({px} * {stride} + {})", (tx * dilation) as i64 - pad);
    let at = |px: &str, tx: usize| {
        element(&spec.input, "y0", &place(px, tx)).map(|address| read(&address, channels, lanes))
    };
    let grad = |px: &str| element(&spec.output_grad, "y", px).map(|address| read(&address, channels, lanes));

    // Outputs for which the whole kernel is inside along the width.
    let first = (pad as usize).div_ceil(stride).min(width);
    let reach = (g.input[2] as i64 + pad - ((kx - 1) * dilation) as i64 - 1).max(-1);
    let last = ((reach.div_euclid(stride as i64) + 1).max(0) as usize).clamp(first, width);
    let mut border = format!("const vf dy = {};\n", grad("px")?);
    let mut inner = format!("const vf dy = {}, dy1 = {};\n", grad("px")?, grad("(px + 1)")?);
    for tx in 0..kx {
        let x = place("px", tx);
        border.push_str(&format!(
            "if ({x} >= 0 && {x} < {}) even{tx} = vf_fma(dy, {}, even{tx});\n",
            g.input[2],
            at("px", tx)?
        ));
        inner.push_str(&format!(
            "even{tx} = vf_fma(dy, {}, even{tx});\nodd{tx} = vf_fma(dy1, {}, odd{tx});\n",
            at("px", tx)?,
            at("(px + 1)", tx)?
        ));
    }
    let list = |each: &dyn Fn(usize) -> String| (0..kx).map(each).collect::<String>();
    let sums = channels.div_ceil(lanes) * taps * lanes;
    let body = format!(
        "for (int64_t c = 0; c < {channels}; c += {lanes})\n    for (int64_t ty = 0; ty < {ky}; ty++) {{\n        const int64_t y0 = y * {} - {} + ty * \
         {};\n        if (y0 < 0 || y0 >= {}) continue;\n        float *own = sums + c * {taps} + ty * {};\n{}        int64_t px = 0;\n        for (; px < {first}; px++) \
         {{\n{}        }}\n        for (; px + 1 < {last}; px += 2) {{\n{}        }}\n        for (; px < {width}; px++) {{\n{}        }}\n{}    }}\n",
        g.stride[1],
        g.pad[1],
        g.dilation[1],
        g.input[1],
        kx * lanes,
        indent(
            &list(&|tx| format!("vf even{tx} = vf_load(own + {}), odd{tx} = {{0}};\n", tx * lanes)),
            8
        ),
        indent(&border, 12),
        indent(&inner, 12),
        indent(&border, 12),
        indent(
            &list(&|tx| format!("vf_store(own + {}, even{tx} + odd{tx});\n", tx * lanes)),
            8
        ),
    );
    let chunks = lines.min(MAX_CHUNKS);
    let body = format!(
        "for (int64_t chunk = begin; chunk < end; chunk++) {{\n    float *sums = (float *)args->workspace + chunk * {sums};\n    __builtin_memset(sums, 0, {sums} * \
         sizeof(float));\n    for (int64_t line = {lines} * chunk / {chunks}; line < {lines} * (chunk + 1) / {chunks}; line++) {{\n        const int64_t image = line / \
         {height}, y = line % {height};\n{}    }}\n}}\n",
        indent(&body, 8)
    );
    let mut source =
        frame.head(&about(g, g.input), "") + &frame.part("Sums over chunks of lines.", "sum", &body);
    source.push_str(&format!(
        "/* The sum of all chunks for channel `o` and kernel element `t`. */\nstatic float {name}_total(const float *sums, int64_t o, int64_t t) {{\n    float total = \
         0.0f;\n    for (int64_t chunk = 0; chunk < {chunks}; chunk++) total += sums[chunk * {sums} + (o / {lanes} * {taps} + t) * {lanes} + o % {lanes}];\n    return \
         total;\n}}\n"
    ));
    let element = format!("{name}_total(sums, o, t)");
    source.push_str(&weight_grad::consume_rows(spec, &element, 0, lanes));
    let run = frame.run(g.is_small());
    let calls = run(&format!("{name}_sum"), chunks) + &run(&format!("{name}_finish"), g.out_channels);
    let bytes = round_up(chunks * sums * 4, 64);
    Some(frame.finish(source, &calls, bytes))
}

/// The input gradient of a convolution with a stride, if it is of this kind.
pub(super) fn input_gradient(spec: &ConvSpec<'_>, direction: Direction, isa: Isa) -> Option<KernelText> {
    let (frame, g, weight) = (spec.frame(), &spec.geometry, &spec.weight);
    let name = frame.name;
    let strided = direction == Direction::InputGrad && (g.stride[1] > 1 || g.stride[2] > 1);
    let by_channel = spec.epilogue.axis(g.input) == Some(ImageAxis::Channel);
    if !strided || !fits(g) || !by_channel {
        return None;
    }
    let lanes = vector::lanes(isa);
    let [_, ky, kx] = g.kernel;
    let (channels, taps) = (g.in_channels, g.taps());
    let most = g.windows_of_a_place(1) * g.windows_of_a_place(2);
    if most > MOST_PLACES {
        return None;
    }
    let padded = round_up(channels, lanes);
    let [_, height, width] = g.input;
    // Offsets are from the gradient's image; the channel comes last.
    let (_, strides) = spec.image.plain()?;
    let base = element(&spec.image, "0", "0")?;
    let consume = |width| {
        let place = PixelPlace {
            width,
            image: "image",
            at: ["0", "y", "x"],
            channel: "c",
        };
        indent(&(spec.epilogue.consume)(&place, "sum"), 12)
    };
    let rest = if channels.is_multiple_of(lanes) {
        String::new()
    } else {
        format!(
            "        for (; c < {channels}; c++) {{\n            float sum = 0.0f;\n            for (int64_t e = 0; e < count; e++) sum = sf_fma(({base})[from[e]], \
             weights[element[e] + c], sum);\n{}        }}\n",
            consume(Width::Scalar)
        )
    };
    let reached = |axis: &str, d: usize, list: &str, extent: usize| {
        format!(
            "const int64_t {list}1 = {axis} + {} - t{axis} * {}, {list}0 = {list}1 / {stride};\nif ({list}1 < 0 || {list}1 % {stride} != 0 || {list}0 >= {extent}) continue;\n",
            g.pad[d],
            g.dilation[d],
            stride = g.stride[d]
        )
    };
    let body = format!(
        "const int64_t image = unit / {height}, y = unit % {height};\nfor (int64_t x = 0; x < {width}; x++) {{\n    /* Kernel elements that reach this place, and what \
         they are multiplied with. */\n    int64_t from[{most}], element[{most}], count = 0;\n    for (int64_t ty = 0; ty < {ky}; ty++) {{\n{}        for (int64_t tx = 0; \
         tx < {kx}; tx++) {{\n{}            from[count] = y0 * {} + x0 * {};\n            element[count++] = (ty * {kx} + tx) * {padded};\n        }}\n    }}\n    int64_t c = \
         0;\n        for (; c + {lanes} <= {channels}; c += {lanes}) {{\n            vf sum = {{0}};\n            for (int64_t e = 0; e < count; e++) sum = \
         vf_fma(vf_load({base} + from[e]), vf_load(weights + element[e] + c), sum);\n{}        }}\n{rest}}}\n",
        indent(&reached("y", 1, "y", g.output[1]), 8),
        indent(&reached("x", 2, "x", g.output[2]), 12),
        strides[2],
        strides[3],
        consume(Width::Vector),
    );
    let weights = format!(
        "for (int64_t t = begin; t < end; t++)\n    for (int64_t c = 0; c < {channels}; c++) ((float *)args->workspace)[t * {padded} + c] = ({weight})[c * {taps} + t];\n"
    );
    let lines = format!(
        "const float *weights = (const float *)args->workspace;\nfor (int64_t unit = begin; unit < end; unit++) {{\n{}}}\n",
        indent(&body, 4),
    );
    let source = frame.head(&about(g, g.output), "")
        + &frame.part("The weight by kernel elements.", "weights", &weights)
        + &frame.part("Lines of places.", "lines", &lines);
    let run = frame.run(g.is_small());
    let calls =
        run_part(true)(&format!("{name}_weights"), taps) + &run(&format!("{name}_lines"), g.images * height);
    let bytes = round_up(taps * padded * 4, 64);
    Some(frame.finish(source, &calls, bytes))
}
