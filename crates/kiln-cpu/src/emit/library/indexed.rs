//! Operations that write where indices say.

use kiln_compiler::schedule::fuse::starts_constant;
use kiln_graph::Shape;
use kiln_graph::op::{ReduceOp, ScatterMode};

use super::sums::{Place, Sums, columns};
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

/// Combines the element at `place` with element `update` of the updates.
fn update_text(w: &Writer, mode: ScatterMode, place: &Place, sums: Option<&String>, update: &str) -> String {
    let dtype = w.out_dtype();
    let op = match mode {
        ScatterMode::Assign => return format!("out0[{}] = in2[{update}];", place.out),
        ScatterMode::Add => ReduceOp::Sum,
        ScatterMode::Mul => ReduceOp::Prod,
        ScatterMode::Max => ReduceOp::Max,
        ScatterMode::Min => ReduceOp::Min,
    };
    let (old, new) = (place.get(dtype, sums), format!("get_{dtype}(in2 + {update})"));
    place.put(dtype, sums, &c::combine(op, dtype, false, &old, &new))
}

/// The statement that gives the element at `place` what it has before any update.
fn start_text(w: &Writer, place: &Place, sums: Option<&String>) -> String {
    let dtype = w.out_dtype();
    match (starts_constant(w.graph, w.node), sums) {
        (Some(value), _) => place.put(dtype, sums, &c::literal(value, dtype)),
        (None, Some(_)) => place.put(dtype, sums, &format!("get_{dtype}(in0 + {})", place.out)),
        (None, None) => format!("out0[{0}] = in0[{0}];", place.out),
    }
}

/// One iteration for each line of the result along `axis`: updates of a line never meet another's.
pub(super) fn scatter(mut w: Writer, axis: usize, mode: ScatterMode, threads: usize) -> Launch {
    let (out, indices) = (w.out_shape(), w.shape(1));
    let extent = out[axis];
    let inner: usize = out[axis + 1..].iter().product();
    let n = out.iter().product::<usize>() / extent.max(1);
    let sums = Sums::of(w.graph, w.node, threads).map(|sums| sums.declared(&mut w));
    w.task(n, extent + indices[axis], |w, t| {
        let sums = sums.as_ref();
        t.line(format!(
            "const int64_t line = i / {inner} * {} + i % {inner};",
            inner * extent
        ));
        if let Some(declaration) = sums {
            t.line(declaration);
        }
        let place = |sum| format!("(line + {sum} * {inner})");
        let each = Place {
            out: &place("k"),
            sum: "k",
        };
        t.each("k", extent);
        t.line(start_text(w, &each, sums));
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
        let updated = Place {
            out: &place("at"),
            sum: "at",
        };
        t.line(update_text(w, mode, &updated, sums, "j"));
        t.close();
        if sums.is_some() {
            t.each("k", extent);
            each.store(t, w.out_dtype());
            t.close();
        }
    })
}

/// Columns of the result are independent; the updates of one column run in order.
pub(super) fn index_put(mut w: Writer, axis: usize, mode: ScatterMode, threads: usize) -> Launch {
    let (out, count) = (w.out_shape(), w.shape(1)[0]);
    let extent = out[axis];
    let inner: usize = out[axis + 1..].iter().product();
    let outer: usize = out[..axis].iter().product();
    let block = columns(w.out_dtype(), inner);
    let blocks = inner.div_ceil(block);
    let sums = Sums::of(w.graph, w.node, threads).map(|sums| sums.declared(&mut w));
    w.task(outer * blocks, (extent + count) * block, |w, t| {
        let sums = sums.as_ref();
        t.line(format!(
            "const int64_t o = i / {blocks}, low = i % {blocks} * {block};"
        ));
        t.line(format!(
            "const int64_t high = low + {block} < {inner} ? low + {block} : {inner};"
        ));
        if let Some(declaration) = sums {
            t.line(declaration);
        }
        let all_columns = "for (int64_t q = low; q < high; q++) ";
        let place = Place {
            out: "(at + q)",
            sum: &format!("row * {block} + q - low"),
        };
        t.each("row", extent);
        t.line(format!("const int64_t at = (o * {extent} + row) * {inner};"));
        match (starts_constant(w.graph, w.node), sums) {
            (None, None) => {
                t.line("memcpy(out0 + at + low, in0 + at + low, (size_t)(high - low) * sizeof *out0);");
            }
            _ => t.line(all_columns.to_owned() + &start_text(w, &place, sums)),
        }
        t.close();
        t.each("j", count);
        t.line(format!(
            "const int64_t row = clamp_index((int64_t)in1[j], {extent}), at = (o * {extent} + row) * {inner};"
        ));
        t.line(format!("const int64_t from = (o * {count} + j) * {inner};"));
        t.line(all_columns.to_owned() + &update_text(w, mode, &place, sums, "(from + q)"));
        t.close();
        if sums.is_some() {
            t.each("row", extent);
            t.line(format!("const int64_t at = (o * {extent} + row) * {inner};"));
            t.open(all_columns.to_owned() + "{");
            place.store(t, w.out_dtype());
            t.close();
            t.close();
        }
    })
}
