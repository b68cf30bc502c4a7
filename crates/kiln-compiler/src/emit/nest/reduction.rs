//! Reductions: sums of a row, and late ones, which write partial results for chunks of rows and add those up in order.

use kiln_graph::op::{Op, ReduceOp};
use kiln_graph::{DType, Node, Value};

use super::{Argument, Lanes, Launch, Register, SERIAL_POINTS, Writer, c};
use crate::index::{Index, linear};
use crate::schedule::Buffer;
use crate::schedule::nest::vars;

impl Writer<'_> {
    pub(super) fn accumulator(&mut self, node: Node) -> Accumulator {
        let data = self.graph.node(node);
        let Op::Reduce { op, axes } = &data.op else {
            unreachable!("members that reduce are reductions")
        };
        let value = data.outputs[0];
        let kept = &self.space.nest.maps[&value];
        Accumulator {
            name: self.fresh("sum"),
            value,
            x: data.inputs[0],
            index: self.reduced_index(value, axes, kept),
            op: *op,
            dtype: self.graph.dtype(value),
            vector: self.space.vector.is_some(),
        }
    }

    /// The index of a reduction's operand: recorded among the maps of members or uses; kept axes from the result.
    pub(super) fn reduced_index(&self, value: Value, axes: &[usize], kept: &[Index]) -> Vec<Index> {
        let x = self.graph.def(value).inputs[0];
        let shape = self.graph.shape(x);
        let reduced = self.space.nest.reduced.get(&value).cloned().unwrap_or_default();
        let mut reduced = reduced.into_iter();
        let mut kept = kept.iter().cloned();
        (0..shape.rank())
            .map(|axis| {
                if axes.contains(&axis) {
                    reduced.next()
                } else {
                    kept.next()
                }
                .unwrap_or_default()
            })
            .collect()
    }

    pub(super) fn accumulate(&mut self, sum: &Accumulator, mask: bool) {
        let x = self.eval(sum.x, &sum.index);
        let mut text = self.operand(&x, sum.vector);
        if mask && let Lanes::First(n) = self.mode {
            text = format!(
                "sel_{}(lanes({n}), {text}, {})",
                sum.dtype.compute(),
                sum.neutral()
            );
        }
        let value = c::combine(sum.op, sum.dtype, sum.vector, &sum.name, &text);
        self.body.push(format!("{} = {value};", sum.name));
    }

    pub(super) fn late_sum(&mut self, node: Node) -> LateSum {
        let data = self.graph.node(node);
        let Op::Reduce { op, axes } = &data.op else {
            unreachable!("members that reduce are reductions")
        };
        let (op, value, x) = (*op, data.outputs[0], data.inputs[0]);
        let kept = self.space.nest.maps[&value].clone();
        let index = self.reduced_index(value, axes, &kept);
        let dtype = self.graph.dtype(value).compute();
        let count = self.graph.ty(value).numel() as i64;
        let position = linear(&kept, self.graph.shape(value));
        let of_points = vars(&index) & !self.row_set() != 0;
        let chunks = self.chunks();
        let ty = c::memory_type(if dtype == DType::Bool { DType::I32 } else { dtype });
        let scratch = self.scratch;
        let element = if dtype == DType::Bool { 4 } else { dtype.size() };
        self.scratch += (chunks as usize * count as usize * element).next_multiple_of(64);
        let at = self.argument(Argument::Scratch(scratch));
        let name = self.fresh("late");
        let per_element = of_points && position.vars() != 0;
        let neutral = c::neutral(op, dtype);
        if per_element {
            self.chunk_top
                .push(format!("{ty} *{name} = ({ty} *)b[{at}] + chunk * {count};"));
            self.chunk_top.push(format!(
                "for (int64_t k = 0; k < {count}; k++) {name}[k] = {neutral};"
            ));
        } else {
            let vector = of_points && self.space.vector.is_some();
            let (register, start, end) = if vector {
                let set = format!("set_{dtype}({neutral})");
                (
                    c::register_type(dtype, true),
                    set,
                    format!("fold_{}_{dtype}({name})", op.name()),
                )
            } else {
                (c::register_type(dtype, false), neutral, name.clone())
            };
            self.chunk_top.push(format!("{register} {name} = {start};"));
            self.chunk_end.push(format!("(({ty} *)b[{at}])[chunk] = {end};"));
        }
        self.combines.push(combine_launch(
            op,
            self.graph.dtype(value),
            scratch,
            Buffer::Value(value),
            count,
            chunks,
        ));
        LateSum {
            name,
            x,
            index,
            op,
            dtype,
            position,
            of_points,
            per_element,
        }
    }

    pub(super) fn accumulate_late(&mut self, late: &LateSum, mask: bool) {
        let x = self.eval(late.x, &late.index);
        let dtype = late.dtype;
        if !late.per_element {
            let vector = self.space.vector.is_some();
            let mut text = self.operand(&x, vector);
            if mask && let Lanes::First(n) = self.mode {
                text = format!(
                    "sel_{dtype}(lanes({n}), {text}, set_{dtype}({}))",
                    c::neutral(late.op, dtype)
                );
            }
            let value = c::combine(late.op, dtype, vector, &late.name, &text);
            self.body.push(format!("{} = {value};", late.name));
            return;
        }
        // Partial results of the chunk, one for each column.
        let stored = if dtype == DType::Bool { DType::I32 } else { dtype };
        let vector = self.is_vector(late.position.vars());
        let at = self.index_text(&late.position, false);
        let n = self.mode.count(self.lanes);
        let stride = self.lane_stride(&late.position);
        let old = match (vector, stride) {
            (false, _) => format!("{}[{at}]", late.name),
            (true, Some(1)) if self.mode == Lanes::All => format!("ld_{stored}({} + {at})", late.name),
            (true, stride) => format!("lds_{stored}({} + {at}, {}, {n})", late.name, stride.unwrap_or(1)),
        };
        let text = self.operand(&x, vector);
        let sum = self.fresh("y");
        let ty = c::register_type(stored, vector);
        self.body.push(format!(
            "{ty} {sum} = {};",
            c::combine(late.op, dtype, vector, &old, &text)
        ));
        let register = Register {
            name: sum,
            dtype: stored,
            vector,
            level: 2,
            stage: 0,
        };
        let text = self.store_text(stored, &late.name, &late.position, &register);
        self.body_stores.push(text);
    }
}

/// A row reduction being accumulated.
pub(super) struct Accumulator {
    pub(super) name: String,
    pub(super) value: Value,
    pub(super) x: Value,
    pub(super) index: Vec<Index>,
    pub(super) op: ReduceOp,
    pub(super) dtype: DType,
    pub(super) vector: bool,
}

impl Accumulator {
    pub(super) fn neutral(&self) -> String {
        let text = c::neutral(self.op, self.dtype);
        if self.vector {
            format!("set_{}({text})", self.dtype.compute())
        } else {
            text
        }
    }
}

/// A late reduction being accumulated.
pub(super) struct LateSum {
    pub(super) name: String,
    pub(super) x: Value,
    pub(super) index: Vec<Index>,
    pub(super) op: ReduceOp,
    pub(super) dtype: DType,
    pub(super) position: Index,
    pub(super) of_points: bool,
    pub(super) per_element: bool,
}

/// Adds up the partial results of the chunks.
pub(super) fn combine_launch(
    op: ReduceOp,
    dtype: DType,
    scratch: usize,
    out: Buffer,
    count: i64,
    chunks: i64,
) -> Launch {
    let register = dtype.compute();
    let ty = c::memory_type(if register == DType::Bool {
        DType::I32
    } else {
        register
    });
    let memory = c::memory_type(dtype);
    let next = c::combine(op, register, false, "x", &format!("part[chunk * {count} + k]"));
    let text = format!(
        "void @(void *ctx, int64_t begin, int64_t end, int thread) {{\nvoid *const *b = ctx;\n(void)thread;\n\
         {memory} *out = b[0];\nconst {ty} *part = b[1];\nfor (int64_t k = begin; k < end; k++) {{\n{ty} x = part[k];\n\
         for (int64_t chunk = 1; chunk < {chunks}; chunk++) x = {next};\nput_{dtype}(out + k, x);\n}}\n}}\n"
    );
    Launch {
        text,
        arguments: vec![Argument::Buffer(out), Argument::Scratch(scratch)],
        n: count,
        grain: 256,
        parallel: count * chunks >= SERIAL_POINTS,
        flat: false,
    }
}
