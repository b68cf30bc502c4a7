//! Operations that write where indices say.

use kiln_compiler::schedule::fuse::starts_constant;
use kiln_graph::Shape;
use kiln_graph::op::{ReduceOp, ScatterMode};

use super::{Writer, c, position};
use crate::emit::nest::Launch;

pub(super) fn update_slice(w: Writer, starts: &[usize], steps: &[usize]) -> Launch {
    let (out, update) = (w.out_shape(), w.shape(1));
    let n = out.iter().product();
    let empty = update.contains(&0);
    w.task(n, 1, |_, t| {
        if empty {
            t.line("out0[i] = in0[i];");
            return;
        }
        t.split("i", "i", out);
        let mut inside = vec!["1".to_owned()];
        for axis in 0..out.len() {
            let (start, step) = (starts[axis], steps[axis]);
            t.line(format!(
                "const int64_t d{axis} = i{axis} - {start}, j{axis} = d{axis} / {step};"
            ));
            inside.push(format!(
                "d{axis} >= 0 && d{axis} % {step} == 0 && j{axis} < {}",
                update[axis]
            ));
        }
        t.line(format!(
            "out0[i] = {} ? in1[{}] : in0[i];",
            inside.join(" && "),
            position("j", update)
        ));
    })
}

pub(super) fn update_text(w: &Writer, mode: ScatterMode, place: &str, update: &str) -> String {
    let dtype = w.out_dtype();
    let op = match mode {
        ScatterMode::Assign => return format!("out0[{place}] = in2[{update}];"),
        ScatterMode::Add => ReduceOp::Sum,
        ScatterMode::Mul => ReduceOp::Prod,
        ScatterMode::Max => ReduceOp::Max,
        ScatterMode::Min => ReduceOp::Min,
    };
    let old = format!("get_{dtype}(out0 + {place})");
    let new = format!("get_{dtype}(in2 + {update})");
    format!(
        "put_{dtype}(out0 + {place}, {});",
        c::combine(op, dtype, false, &old, &new)
    )
}

/// One iteration for each line of the result along `axis`: updates of a line never meet another's.
pub(super) fn scatter(w: Writer, axis: usize, mode: ScatterMode) -> Launch {
    let (out, indices) = (w.out_shape(), w.shape(1));
    let extent = out[axis];
    let inner: usize = out[axis + 1..].iter().product();
    let n = out.iter().product::<usize>() / extent.max(1);
    w.task(n, extent + indices[axis], |w, t| {
        t.line(format!(
            "const int64_t line = i / {inner} * {} + i % {inner};",
            inner * extent
        ));
        t.open(format!("for (int64_t k = 0; k < {extent}; k++) {{"));
        match starts_constant(w.graph, w.node) {
            Some(value) => t.line(format!(
                "put_{0}(out0 + line + k * {inner}, {1});",
                w.out_dtype(),
                c::literal(value, w.out_dtype())
            )),
            None => t.line(format!("out0[line + k * {inner}] = in0[line + k * {inner}];")),
        }
        t.close();
        let lines: Vec<usize> = out
            .iter()
            .enumerate()
            .map(|(at, &e)| if at == axis { 1 } else { e })
            .collect();
        t.split("i", "i", &lines);
        let inside: Vec<String> = (0..out.len())
            .filter(|&at| at != axis && indices[at] < out[at])
            .map(|at| format!("i{at} < {}", indices[at]))
            .chain(["1".to_owned()])
            .collect();
        t.open(format!(
            "if ({}) for (int64_t k = 0; k < {}; k++) {{",
            inside.join(" && "),
            indices[axis]
        ));
        t.line(format!(
            "const int64_t j = {} + k * {};",
            position("i", indices),
            Shape::from(indices).strides()[axis]
        ));
        t.line(format!(
            "const int64_t at = clamp_index((int64_t)in1[j], {extent});"
        ));
        t.line(update_text(w, mode, &format!("(line + at * {inner})"), "j"));
        t.close();
    })
}

/// Columns of the result are independent; the updates of one column run in order.
pub(super) fn index_put(w: Writer, axis: usize, mode: ScatterMode) -> Launch {
    let (out, count) = (w.out_shape(), w.shape(1)[0]);
    let extent = out[axis];
    let inner: usize = out[axis + 1..].iter().product();
    let outer: usize = out[..axis].iter().product();
    // Blocks of neighbouring columns, so that a row of an update is read in whole cache lines.
    let block = inner.clamp(1, 64);
    let blocks = inner.div_ceil(block);
    w.task(outer * blocks, (extent + count) * block, |w, t| {
        t.line(format!(
            "const int64_t o = i / {blocks}, low = i % {blocks} * {block};"
        ));
        t.line(format!(
            "const int64_t high = low + {block} < {inner} ? low + {block} : {inner};"
        ));
        t.each("k", extent);
        t.line(format!("const int64_t at = (o * {extent} + k) * {inner};"));
        match starts_constant(w.graph, w.node) {
            Some(value) => t.line(format!(
                "for (int64_t q = low; q < high; q++) put_{0}(out0 + at + q, {1});",
                w.out_dtype(),
                c::literal(value, w.out_dtype())
            )),
            None => t.line("memcpy(out0 + at + low, in0 + at + low, (size_t)(high - low) * sizeof *out0);"),
        }
        t.close();
        t.each("j", count);
        t.line(format!(
            "const int64_t at = (o * {extent} + clamp_index((int64_t)in1[j], {extent})) * {inner};"
        ));
        t.line(format!("const int64_t from = (o * {count} + j) * {inner};"));
        t.open("for (int64_t q = low; q < high; q++) {");
        t.line(update_text(w, mode, "(at + q)", "(from + q)"));
        t.close();
        t.close();
    })
}
