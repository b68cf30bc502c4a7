//! Convolutions of any type and number of dimensions, and their gradients.

use kiln_graph::op::ConvDims;

use super::{Text, Writer, c, position};
use crate::emit::nest::Launch;

/// Opens loops over kernel positions `k0, k1, ..` and defines the input coordinates `p0, p1, ..` under output
/// coordinates `o0, o1, ..`, skipping those outside.
pub(super) fn taps(
    t: &mut Text,
    window: &[usize],
    stride: &[usize],
    low: &[usize],
    dilation: &[usize],
    input: &[usize],
) {
    for axis in 0..window.len() {
        t.each(&format!("k{axis}"), window[axis]);
        t.line(format!(
            "const int64_t p{axis} = o{axis} * {} - {} + k{axis} * {};",
            stride[axis], low[axis], dilation[axis]
        ));
        t.line(format!(
            "if (p{axis} < 0 || p{axis} >= {}) continue;",
            input[axis]
        ));
    }
}

pub(super) fn convolution(w: Writer, conv: &ConvDims) -> Launch {
    let (x, k, out) = (w.shape(0), w.shape(1), w.out_shape());
    let n = out.iter().product();
    let work = k[1..].iter().product();
    w.task(n, work, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t o{} = c{axis};", axis - 2));
        }
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        t.each("c", k[1]);
        t.line(format!("const int64_t channel = c1 / {} * {} + c;", k[0] / conv.groups, k[1]));
        taps(t, &k[2..], &conv.stride, &conv.pad_low, &conv.dilation, &x[2..]);
        let plane: usize = x[2..].iter().product();
        let taps_count: usize = k[2..].iter().product();
        t.line(format!(
            "sum += get_{dtype}(in0 + (c0 * {} + channel) * {plane} + {}) * get_{dtype}(in1 + (c1 * {} + c) * {taps_count} + {});",
            x[1],
            position("p", &x[2..]),
            k[1],
            position("k", &k[2..])
        ));
        for _ in 0..k.len() - 1 {
            t.close();
        }
        t.line(format!("put_{}(out0 + i, sum);", w.out_dtype()));
    })
}

/// Opens loops over kernel positions and defines the output coordinates `o0, ..` that read input coordinates
/// `p0, ..`.
pub(super) fn reverse_taps(
    t: &mut Text,
    window: &[usize],
    stride: &[usize],
    low: &[usize],
    dilation: &[usize],
    output: &[usize],
) {
    for axis in 0..window.len() {
        t.each(&format!("k{axis}"), window[axis]);
        t.line(format!(
            "const int64_t d{axis} = p{axis} + {} - k{axis} * {};",
            low[axis], dilation[axis]
        ));
        t.line(format!(
            "if (d{axis} < 0 || d{axis} % {} != 0) continue;",
            stride[axis]
        ));
        t.line(format!("const int64_t o{axis} = d{axis} / {};", stride[axis]));
        t.line(format!("if (o{axis} >= {}) continue;", output[axis]));
    }
}

pub(super) fn convolution_input(w: Writer, conv: &ConvDims) -> Launch {
    let (dy, k, out) = (w.shape(0), w.shape(1), w.out_shape());
    let n = out.iter().product();
    let per_group = k[0] / conv.groups;
    let work = per_group * k[2..].iter().product::<usize>();
    w.task(n, work, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t p{} = c{axis};", axis - 2));
        }
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        t.each("f", per_group);
        t.line(format!("const int64_t filter = c1 / {} * {per_group} + f, c = c1 % {};", k[1], k[1]));
        reverse_taps(t, &k[2..], &conv.stride, &conv.pad_low, &conv.dilation, &dy[2..]);
        let plane: usize = dy[2..].iter().product();
        let taps_count: usize = k[2..].iter().product();
        t.line(format!(
            "sum += get_{dtype}(in0 + (c0 * {} + filter) * {plane} + {}) * get_{dtype}(in1 + (filter * {} + c) * {taps_count} + {});",
            dy[1],
            position("o", &dy[2..]),
            k[1],
            position("k", &k[2..])
        ));
        for _ in 0..k.len() - 1 {
            t.close();
        }
        t.line(format!("put_{}(out0 + i, sum);", w.out_dtype()));
    })
}

pub(super) fn convolution_weight(w: Writer, conv: &ConvDims) -> Launch {
    let (x, dy, k) = (w.shape(0), w.shape(1), w.out_shape());
    let n = k.iter().product();
    let work = dy[0] * dy[2..].iter().product::<usize>();
    w.task(n, work, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", k);
        t.line(format!("const int64_t channel = c0 / {} * {} + c1;", k[0] / conv.groups, k[1]));
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        t.each("n", dy[0]);
        for axis in 0..k.len() - 2 {
            t.each(&format!("o{axis}"), dy[axis + 2]);
            t.line(format!(
                "const int64_t p{axis} = o{axis} * {} - {} + c{} * {};",
                conv.stride[axis],
                conv.pad_low[axis],
                axis + 2,
                conv.dilation[axis]
            ));
            t.line(format!("if (p{axis} < 0 || p{axis} >= {}) continue;", x[axis + 2]));
        }
        let (px, py): (usize, usize) = (x[2..].iter().product(), dy[2..].iter().product());
        t.line(format!(
            "sum += get_{dtype}(in0 + (n * {} + channel) * {px} + {}) * get_{dtype}(in1 + (n * {} + c0) * {py} + {});",
            x[1],
            position("p", &x[2..]),
            dy[1],
            position("o", &dy[2..])
        ));
        for _ in 0..k.len() - 1 {
            t.close();
        }
        t.line(format!("put_{}(out0 + i, sum);", w.out_dtype()));
    })
}
