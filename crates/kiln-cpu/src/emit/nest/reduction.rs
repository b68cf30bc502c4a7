//! Reductions: row reductions, and late ones, which write partial results for chunks of rows and add those
//! up in order.

use kiln_compiler::index::{Index, linear};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::nest::{Nest, vars};
use kiln_graph::op::{Op, ReduceOp};
use kiln_graph::{DType, Graph, Node, Value};

use super::{Argument, Lanes, Launch, Register, Writer, blocks, c};
use crate::policy::{REDUCTION_CHUNKS, SERIAL_POINTS};

impl Writer<'_> {
    pub(super) fn accumulator(&mut self, node: Node) -> Accumulator {
        let data = self.graph.node(node);
        let Op::Reduce { op, .. } = &data.op else {
            unreachable!("members that reduce are reductions")
        };
        let value = data.outputs[0];
        let nest = &self.space.loops.nest;
        let index = nest.reduced_operand_index(self.graph, node, &nest.maps[&value]);
        let terms = self.trips().iter().product();
        Accumulator {
            name: self.fresh("sum"),
            value,
            x: data.inputs[0],
            index,
            op: *op,
            dtype: self.graph.dtype(value),
            vector: self.space.vector.is_some(),
            blocks: blocks::in_blocks(*op, self.graph.dtype(value), terms),
        }
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
        let Op::Reduce { op, .. } = &data.op else {
            unreachable!("members that reduce are reductions")
        };
        let (op, value, x) = (*op, data.outputs[0], data.inputs[0]);
        let nest = &self.space.loops.nest;
        let kept = &nest.maps[&value];
        let index = nest.reduced_operand_index(self.graph, node, kept);
        let dtype = self.graph.dtype(value).compute();
        let count = self.graph.ty(value).numel() as i64;
        let position = linear(kept, self.graph.shape(value));
        let of_points = vars(&index) & !self.space.loops.row_set() != 0;
        let chunks = self.chunks();
        let per_element = of_points && position.vars() != 0;
        // Terms that one accumulator gets from a chunk.
        let rows = self.space.loops.row_count() / chunks + 1;
        let trips: i64 = self.trips().iter().product();
        let terms = if per_element || !of_points {
            rows
        } else {
            rows * trips
        };
        let blocks = blocks::in_blocks(op, dtype, terms);
        let stored = if dtype == DType::Bool { DType::I32 } else { dtype };
        let partials = Partials {
            dtype: if blocks { DType::F64 } else { stored },
            scratch: self.reserve(chunks * count, if blocks { DType::F64 } else { stored }),
            count,
            chunks,
        };
        let name = self.fresh("late");
        if per_element {
            self.element_partials(&name, op, stored, &partials);
        } else {
            let vector = of_points && self.space.vector.is_some();
            self.register_partials(&name, op, dtype, &partials, vector);
        }
        self.combines.push(combine_launch(
            op,
            self.graph.dtype(value),
            &partials,
            Buffer::Value(value),
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
            blocks,
        }
    }

    /// Scratch memory for so many elements; where it begins, in bytes.
    fn reserve(&mut self, elements: i64, dtype: DType) -> usize {
        let at = self.scratch;
        self.scratch += (elements as usize * dtype.size()).next_multiple_of(64);
        at
    }

    /// Partial results in memory, one for each element of the result; where those are sums of blocks, the
    /// current block is in memory too.
    fn element_partials(&mut self, name: &str, op: ReduceOp, dtype: DType, partials: &Partials) {
        let count = partials.count;
        let in_blocks = partials.dtype != dtype;
        let block = if in_blocks {
            self.reserve(partials.chunks * count, dtype)
        } else {
            partials.scratch
        };
        let mut array = |name: &str, scratch: usize, dtype: DType| {
            let at = self.argument(Argument::Scratch(scratch));
            let (ty, neutral) = (c::memory_type(dtype), c::neutral(op, dtype));
            self.chunk_top
                .push(format!("{ty} *{name} = ({ty} *)b[{at}] + chunk * {count};"));
            self.chunk_top.push(format!(
                "for (int64_t k = 0; k < {count}; k++) {name}[k] = {neutral};"
            ));
        };
        array(name, block, dtype);
        if !in_blocks {
            return;
        }
        let total = blocks::total(name);
        array(&total, partials.scratch, partials.dtype);
        self.block_end.push(format!(
            "for (int64_t k = 0; k < {count}; k++) {{ {total}[k] += {name}[k]; {name}[k] = 0.0f; }}"
        ));
    }

    /// A partial result of the whole chunk, in a register; a vector of them is folded at the end.
    fn register_partials(
        &mut self,
        name: &str,
        op: ReduceOp,
        dtype: DType,
        partials: &Partials,
        vector: bool,
    ) {
        let at = self.argument(Argument::Scratch(partials.scratch));
        let neutral = c::neutral(op, dtype);
        let start = if vector {
            format!("set_{dtype}({neutral})")
        } else {
            neutral
        };
        let register = c::register_type(dtype, vector);
        self.chunk_top.push(format!("{register} {name} = {start};"));
        let (last, end) = if partials.dtype == DType::F64 && dtype != DType::F64 {
            self.chunk_top.push(blocks::declare(name, vector));
            // A vector's blocks end with the rows.
            if !vector {
                self.block_end.push(blocks::flush(name, false));
            }
            (DType::F64, blocks::total(name))
        } else {
            (dtype, name.to_owned())
        };
        let end = if vector {
            format!("fold_{}_{last}({end})", op.name())
        } else {
            end
        };
        let ty = c::memory_type(partials.dtype);
        self.chunk_end.push(format!("(({ty} *)b[{at}])[chunk] = {end};"));
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
            (true, Some(stride)) => format!("lds_{stored}({} + {at}, {stride}, {n})", late.name),
            (true, None) => {
                self.accumulate_lanes(late, stored, &x);
                return;
            }
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

    /// Accumulates the lanes of `x` one after the other: their places among the partial results have no
    /// stride, since the columns are those of a tensor that was reshaped and permuted.
    fn accumulate_lanes(&mut self, late: &LateSum, stored: DType, x: &Register) {
        let name = &late.name;
        let each = self.index_text(&late.position, true);
        let n = self.mode.count(self.lanes);
        let value = self.spread(x);
        let ty = c::memory_type(stored);
        let sum = c::combine(late.op, late.dtype, false, &format!("{name}[{each}]"), "t[l]");
        self.body_stores.push(format!(
            "{{ {ty} t[KILN_LANES]; st_{stored}(t, {value}); for (int l = 0; l < {n}; l++) {name}[{each}] = {sum}; }}"
        ));
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
    /// Whether it is added up [in blocks](blocks).
    pub(super) blocks: bool,
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
    /// Whether it is added up [in blocks](blocks).
    pub(super) blocks: bool,
}

/// Partial results in scratch memory: `chunks` times `count` of them.
struct Partials {
    dtype: DType,
    scratch: usize,
    count: i64,
    chunks: i64,
}

/// Adds up the partial results of the chunks, sums of f32 in f64.
fn combine_launch(op: ReduceOp, dtype: DType, partials: &Partials, out: Buffer) -> Launch {
    let (count, chunks) = (partials.count, partials.chunks);
    let register = if blocks::widens(op, dtype) {
        DType::F64
    } else {
        dtype.compute()
    };
    let ty = |dtype: DType| c::memory_type(if dtype == DType::Bool { DType::I32 } else { dtype });
    let (part, wide) = (ty(partials.dtype), ty(register));
    let (memory, narrow) = (c::memory_type(dtype), ty(dtype.compute()));
    let next = c::combine(op, register, false, "x", &format!("part[chunk * {count} + k]"));
    let text = format!(
        "void @(void *ctx, int64_t begin, int64_t end, int thread) {{\nvoid *const *b = ctx;\n(void)thread;\n\
         {memory} *out = b[0];\nconst {part} *part = b[1];\nfor (int64_t k = begin; k < end; k++) {{\n{wide} x = part[k];\n\
         for (int64_t chunk = 1; chunk < {chunks}; chunk++) x = {next};\nput_{dtype}(out + k, ({narrow})x);\n}}\n}}\n"
    );
    Launch {
        text,
        arguments: vec![Argument::Buffer(out), Argument::Scratch(partials.scratch)],
        n: count,
        grain: 256,
        parallel: count * chunks >= SERIAL_POINTS,
        flat: false,
    }
}

/// Bytes of scratch memory for the partial results of `value`, a late reduction of `nest`; none if that
/// depends on how many terms a vector's lanes share. The same decisions as in [`Writer::late_sum`], from the
/// nest alone.
pub(super) fn late_scratch(graph: &Graph, nest: &Nest, value: Value) -> Option<usize> {
    let data = graph.def(value);
    let Op::Reduce { op, axes } = &data.op else {
        unreachable!("late results are those of reductions")
    };
    let rows = nest.split.map_or(0, |split| split.rows);
    let kept = &nest.maps[&value];
    let reduced = nest.reduced.get(&value).map_or(&[][..], Vec::as_slice);
    let of_points = (vars(kept) | vars(&reduced[..reduced.len().min(axes.len())])) & !rows != 0;
    let per_element = of_points && linear(kept, graph.shape(value)).vars() != 0;
    let dtype = graph.dtype(value).compute();
    let (count, points) = (graph.ty(value).numel() as i64, nest.points(rows));
    let chunks = points.clamp(1, REDUCTION_CHUNKS);
    let terms = points / chunks + 1;
    let cuts = |terms| blocks::in_blocks(*op, dtype, terms);
    let in_blocks = cuts(terms);
    // Each lane of a vector adds up a part of the columns only.
    if of_points && !per_element && in_blocks != cuts(terms * nest.points(nest.all() & !rows)) {
        return None;
    }
    let stored = if dtype == DType::Bool { DType::I32 } else { dtype };
    let bytes = |dtype: DType| ((chunks * count) as usize * dtype.size()).next_multiple_of(64);
    Some(match (in_blocks, per_element) {
        (true, true) => bytes(DType::F64) + bytes(stored),
        (true, false) => bytes(DType::F64),
        (false, _) => bytes(stored),
    })
}
