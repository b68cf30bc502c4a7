//! Pooling of any type and number of dimensions, and its gradients.

use kiln_graph::DType;
use kiln_graph::op::{BinaryOp, ReduceOp, Window};

use super::convolution::{reverse_taps, taps};
use super::sums::{Place, Sums};
use super::{Text, Writer, c, position};
use crate::emit::nest::Launch;

/// A forward pooling. For each result `i`, `before` writes the first statements, `each` is the statement
/// for every element `x` of the window (at `place` in the plane of the input), and `after` writes the last
/// statements. The result's place is `o0, o1, ..`.
fn pool(
    w: Writer,
    window: &Window,
    before: impl FnOnce(&Writer, &mut Text),
    each: &str,
    after: impl FnOnce(&Writer, &mut Text),
) -> Launch {
    let (x, out) = (w.shape(0), w.out_shape());
    let n = out.iter().product();
    let plane: usize = x[2..].iter().product();
    w.task(n, window.size.iter().product(), |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t o{} = c{axis};", axis - 2));
        }
        before(w, t);
        taps(
            t,
            &window.size,
            &window.stride,
            &window.pad_low,
            &window.dilation,
            &x[2..],
        );
        t.line(format!("const int64_t place = {};", position("p", &x[2..])));
        t.line(format!(
            "const {} x = get_{dtype}(in0 + (c0 * {} + c1) * {plane} + place);",
            c::register_type(dtype, false),
            x[1]
        ));
        t.line(each);
        for _ in 0..window.size.len() {
            t.close();
        }
        after(w, t);
    })
}

pub(super) fn max_pool(w: Writer, window: &Window, indices: bool) -> Launch {
    let start = |w: &Writer, t: &mut Text| {
        let dtype = w.dtype(0);
        let (ty, least) = (c::register_type(dtype, false), c::neutral(ReduceOp::Max, dtype));
        t.line(format!("{ty} best = {least};"));
        t.line("int64_t at = -1;");
    };
    let better = "if (at < 0 || (best == best && (x > best || x != x))) { best = x; at = place; }";
    pool(w, window, start, better, |w, t| {
        t.line(format!("put_{}(out0 + i, best);", w.dtype(0)));
        if indices {
            let ty = c::memory_type(w.graph.dtype(w.graph.node(w.node).outputs[1]));
            t.line(format!("out1[i] = ({ty})(at < 0 ? 0 : at);"));
        }
    })
}

pub(super) fn max_pool_grad(mut w: Writer, threads: usize) -> Launch {
    let (dy, out) = (w.shape(0), w.out_shape());
    let (small, large): (usize, usize) = (dy[2..].iter().product(), out[2..].iter().product());
    let sums = Sums::of(w.graph, w.node, threads).map(|sums| sums.declared(&mut w));
    w.task(out[0] * out[1], small + large, |w, t| {
        let (dtype, sums) = (w.dtype(0), sums.as_ref());
        let place = Place {
            out: &format!("i * {large} + at"),
            sum: "at",
        };
        match sums {
            Some(declaration) => {
                t.line(declaration);
                t.line(format!("memset(sums, 0, {large} * sizeof *sums);"));
            }
            None => t.line(format!("memset(out0 + i * {large}, 0, {large} * sizeof *out0);")),
        }
        t.each("k", small);
        t.line(format!(
            "const int64_t at = clamp_index((int64_t)in1[i * {small} + k], {large});"
        ));
        let sum = format!("{} + get_{dtype}(in0 + i * {small} + k)", place.get(dtype, sums));
        t.line(place.put(dtype, sums, &sum));
        t.close();
        if sums.is_some() {
            t.each("at", large);
            place.store(t, dtype);
            t.close();
        }
    })
}

/// Defines `count`, the divisor of the window at output coordinates `o0, ..`.
pub(super) fn divisor(t: &mut Text, window: &Window, include: bool, input: &[usize]) {
    t.line("int64_t count = 1;");
    for (axis, &extent) in input.iter().enumerate() {
        let (size, stride, low, high) = (
            window.size[axis],
            window.stride[axis],
            window.pad_low[axis],
            window.pad_high[axis],
        );
        t.open("{");
        t.line(format!(
            "int64_t from = o{axis} * {stride} - {low}, to = from + {size};"
        ));
        let (first, last) = if include {
            (format!("-{low}"), extent + high)
        } else {
            ("0".into(), extent)
        };
        t.line(format!("if (from < {first}) from = {first};"));
        t.line(format!("if (to > {last}) to = {last};"));
        t.line("count *= to > from ? to - from : 0;");
        t.close();
    }
}

/// The type in which a mean of elements of `dtype` is computed: 64 bits for integers.
fn mean_type(dtype: DType) -> DType {
    match dtype {
        dtype if dtype.is_unsigned_int() => DType::U64,
        dtype if dtype.is_int() => DType::I64,
        dtype => dtype,
    }
}

pub(super) fn avg_pool(w: Writer, window: &Window, include: bool) -> Launch {
    let input = w.shape(0);
    let mean_type = mean_type(w.dtype(0));
    let ty = c::register_type(mean_type, false);
    let start = |_: &Writer, t: &mut Text| {
        divisor(t, window, include, &input[2..]);
        t.line(format!("{ty} sum = 0;"));
    };
    let sum = c::binary(BinaryOp::Add, mean_type, false, "sum", &format!("({ty})x"));
    pool(w, window, start, &format!("sum = {sum};"), |w, t| {
        let dtype = w.dtype(0);
        let mean = c::binary(BinaryOp::Div, mean_type, false, "sum", &format!("({ty})count"));
        // A window of which nothing counts has a mean of 0.
        t.line(format!("put_{dtype}(out0 + i, count ? {mean} : 0);"));
    })
}

pub(super) fn avg_pool_grad(w: Writer, window: &Window, include: bool) -> Launch {
    let (dy, out) = (w.shape(0), w.out_shape());
    let n = out.iter().product();
    let plane: usize = dy[2..].iter().product();
    w.task(n, window.size.iter().product::<usize>() * 4, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t p{} = c{axis};", axis - 2));
        }
        let mean_type = mean_type(dtype);
        let ty = c::register_type(mean_type, false);
        t.line(format!("{ty} sum = 0;"));
        reverse_taps(
            t,
            &window.size,
            &window.stride,
            &window.pad_low,
            &window.dilation,
            &dy[2..],
        );
        divisor(t, window, include, &out[2..]);
        let share = c::binary(
            BinaryOp::Div,
            mean_type,
            false,
            &format!(
                "({ty})get_{dtype}(in0 + (c0 * {} + c1) * {plane} + {})",
                dy[1],
                position("o", &dy[2..])
            ),
            &format!("({ty})count"),
        );
        let sum = c::binary(BinaryOp::Add, mean_type, false, "sum", &share);
        t.line(format!("sum = {sum};"));
        for _ in 0..window.size.len() {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, sum);"));
    })
}
