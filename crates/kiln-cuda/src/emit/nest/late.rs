//! Late reductions: partial results of chunks, and the kernel that adds them up.

use kiln_compiler::index::{Index, linear};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::nest::vars;
use kiln_graph::op::{Op, ReduceOp};
use kiln_graph::{DType, Node, Value};

use super::writer::Writer;
use super::{Argument, Launch, PROCESSORS, c, ceil, grid, power_of_two};
use crate::code::FunctionText;

/// A late reduction being accumulated.
#[derive(Clone, Debug)]
pub(super) struct Late {
    /// The accumulator of a thread.
    pub(super) name: String,
    pub(super) value: Value,
    /// What is reduced, and its index.
    pub(super) x: Value,
    pub(super) index: Vec<Index>,
    pub(super) op: ReduceOp,
    /// The type of the accumulator.
    pub(super) dtype: DType,
    /// Which element of the result a point belongs to; a constant if there is one.
    pub(super) position: Index,
    /// How many elements the result has.
    pub(super) count: i64,
    /// Whether the operand differs from point to point of a row.
    pub(super) of_points: bool,
}

impl Late {
    /// Whether each column has a result of its own.
    pub(super) fn by_column(&self) -> bool {
        self.of_points && self.position.vars() != 0
    }

    pub(super) fn neutral(&self) -> String {
        c::neutral(self.op, self.dtype)
    }

    pub(super) fn register(&self) -> &'static str {
        c::register_type(self.dtype)
    }
}

/// Where partial results go: to working memory, or, of one chunk, to the result itself.
#[derive(Clone, Debug)]
pub(super) struct Partials {
    /// C++ of the address.
    pub(super) address: String,
    /// The type of an element.
    pub(super) dtype: DType,
    scratch: Option<usize>,
    chunks: i64,
}

impl Writer<'_> {
    /// The late reductions of the nest, each with the stage of its operand.
    pub(super) fn lates(&mut self) -> Vec<(usize, Late)> {
        let nest = &self.space.loops.nest;
        let nodes: Vec<Node> = nest.members.clone();
        let mut lates = Vec::new();
        for node in nodes {
            let data = self.graph.node(node);
            let value = data.outputs[0];
            let Op::Reduce { op, .. } = &data.op else {
                continue;
            };
            if !nest.late.contains(&value) {
                continue;
            }
            let kept = &nest.maps[&value];
            let index = nest.reduced_operand_index(self.graph, node, kept);
            let late = Late {
                name: self.fresh("late"),
                value,
                x: data.inputs[0],
                of_points: vars(&index) & !self.space.loops.row_set() != 0,
                index,
                op: *op,
                dtype: self.graph.dtype(value).compute(),
                position: linear(kept, self.graph.shape(value)),
                count: self.graph.ty(value).numel() as i64,
            };
            lates.push((self.stage(data.inputs[0]), late));
        }
        lates
    }

    /// Reserves the partial results of `late` for so many chunks. One chunk alone stores the result, if it
    /// may do so `directly`.
    pub(super) fn partials(&mut self, late: &Late, chunks: i64, chunk: &str, directly: bool) -> Partials {
        if chunks == 1 && directly {
            let at = self.target(Argument::Buffer(Buffer::Value(late.value)));
            return Partials {
                address: format!("a{at}"),
                dtype: self.graph.dtype(late.value),
                scratch: None,
                chunks,
            };
        }
        let scratch = self.scratch;
        self.scratch += ((chunks * late.count) as usize * late.dtype.size()).next_multiple_of(256);
        let at = self.target(Argument::Scratch(scratch));
        let ty = c::memory_type(late.dtype);
        Partials {
            address: format!("(({ty}*)a{at} + (kiln_u64)({chunk}) * {})", late.count),
            dtype: late.dtype,
            scratch: Some(scratch),
            chunks,
        }
    }

    /// The text that ends a reduction to one number: the block's threads combined and stored by the first.
    pub(super) fn store_total(&self, late: &Late, partials: &Partials, threads: i64) -> String {
        let (name, by) = (&late.name, c::joiner(late.op));
        let stored = c::narrowed(partials.dtype, name);
        format!(
            "{name} = kiln_block<{by}, {threads}>({name});\nif (threadIdx.x == 0) {}[0] = {stored};\n",
            partials.address
        )
    }

    /// The kernels that combine the chunks: results that are combined alike share one.
    pub(super) fn combinations(&self, lates: &[(&Late, &Partials)]) -> Vec<Launch> {
        let mut launches: Vec<(Alike, Vec<Argument>)> = Vec::new();
        for (late, partials) in lates {
            let Some(scratch) = partials.scratch else { continue };
            let alike = Alike {
                op: late.op,
                part: late.dtype,
                dtype: self.graph.dtype(late.value),
                count: late.count,
                chunks: partials.chunks,
            };
            let own = [
                Argument::Scratch(scratch),
                Argument::Buffer(Buffer::Value(late.value)),
            ];
            match launches.iter_mut().find(|(known, _)| *known == alike) {
                Some((_, arguments)) => arguments.extend(own),
                None => launches.push((alike, own.to_vec())),
            }
        }
        let launch = |(alike, arguments): (Alike, Vec<Argument>)| alike.launch(arguments);
        launches.into_iter().map(launch).collect()
    }
}

/// What says how partial results are combined.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Alike {
    op: ReduceOp,
    /// The type of partial results.
    part: DType,
    /// The type of results.
    dtype: DType,
    count: i64,
    chunks: i64,
}

impl Alike {
    /// Adds up the partial results of the chunks, sums of f32 in f64. Neighbouring threads have neighbouring
    /// elements; several lanes of the block take every so-many-th chunk each, and are combined in pairs.
    /// `blockIdx.y` numbers results; each has two arguments.
    fn launch(self, arguments: Vec<Argument>) -> Launch {
        let Self {
            op,
            part,
            dtype,
            count,
            chunks,
        } = self;
        let results = arguments.len() / 2;
        let register = match (op, part) {
            (ReduceOp::Sum, DType::F32) => DType::F64,
            (_, dtype) => dtype,
        };
        // Sectors of 32 bytes are read whole, and blocks of few columns are many.
        let across = if count >= 8 { 8 } else { power_of_two(count) };
        // Some four chunks a lane, all under way at once, and no more threads than a block has; where every
        // multiprocessor has a block, more in smaller ones, of which it holds several.
        let blocks = ceil(count, across) * results as i64;
        let (each, most) = if blocks >= PROCESSORS { (8, 512) } else { (4, 1024) };
        let lanes = power_of_two(ceil(chunks, each)).clamp(1, most / across);
        let lanes = if across * lanes < 32 { 32 / across } else { lanes };
        let threads = across * lanes;
        let (ty, memory) = (c::memory_type(part), c::memory_type(dtype));
        let (wide, narrow) = (c::register_type(register), c::register_type(dtype));
        let neutral = c::neutral(op, register);
        let element = c::widened(part, &format!("part[chunk * {count} + k]"));
        let next = c::combine(op, register, "x", &format!("({wide})({element})"));
        let pair = c::combine(
            op,
            register,
            "x",
            &format!("lanes[(y + apart) * {across} + threadIdx.x % {across}]"),
        );
        let stored = c::narrowed(dtype, &format!("({narrow})x"));
        let choose = |name: char| {
            let others = (1..results).map(|result| format!("blockIdx.y == {result} ? {name}{result} : "));
            others.collect::<String>() + &format!("{name}0")
        };
        let pointers = format!(
            "const {ty}* part = {};\n{memory}* out = {};\n",
            choose('a'),
            choose('b')
        );
        let body = format!(
            "__shared__ {wide} lanes[{threads}];
{pointers}const kiln_u64 k = (kiln_u64)blockIdx.x * {across} + threadIdx.x % {across};
const int y = threadIdx.x / {across};
{wide} x = {neutral};
if (k < {count}) {{
#pragma unroll 8
for (kiln_u64 chunk = y; chunk < {chunks}; chunk += {lanes}) x = {next};
}}
#pragma unroll
for (int apart = {lanes} / 2; apart > 0; apart /= 2) {{
lanes[threadIdx.x] = x;
__syncthreads();
if (y < apart) x = {pair};
__syncthreads();
}}
if (y == 0 && k < {count}) out[k] = {stored};
"
        );
        Launch {
            text: FunctionText {
                helpers: String::new(),
                parameters: (0..results)
                    .flat_map(|result| [format!("const {ty}* a{result}"), format!("{memory}* b{result}")])
                    .collect(),
                body,
                threads: threads as u32,
                device_only: false,
                blocks: 0,
            },
            grid: [grid(ceil(count, across)), results as u32, 1],
            shared_bytes: 0,
            arguments,
        }
    }
}
