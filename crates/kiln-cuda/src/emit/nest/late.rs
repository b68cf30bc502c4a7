//! Late reductions: partial results of chunks, and the kernel that adds them up.

use kiln_compiler::index::{Index, linear};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::nest::vars;
use kiln_graph::op::{Op, ReduceOp};
use kiln_graph::{DType, Node, Value};

use super::writer::Writer;
use super::{Argument, Launch, PROCESSORS, Role, c, ceil, grid, power_of_two};
use crate::code::FunctionText;
use crate::emit::after::Along;

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
        let mut launches: Vec<(Columns, Vec<Argument>)> = Vec::new();
        for (late, partials) in lates {
            let Some(scratch) = partials.scratch else { continue };
            let dtype = self.graph.dtype(late.value);
            let alike = Columns::new(late.op, late.dtype, dtype, late.count, partials.chunks);
            let own = [
                Argument::Scratch(scratch),
                Argument::Buffer(Buffer::Value(late.value)),
            ];
            let is_alike = |known: &Columns| Columns { results: 1, ..*known } == alike;
            match launches.iter_mut().find(|(known, _)| is_alike(known)) {
                Some((known, arguments)) => {
                    *known = known.and_another();
                    arguments.extend(own);
                }
                None => launches.push((alike, own.to_vec())),
            }
        }
        let launch = |(columns, arguments): (Columns, Vec<Argument>)| columns.launch(arguments);
        launches.into_iter().map(launch).collect()
    }
}

/// Most results that a block adds up beside each other: its threads are no more than a block has.
const MOST_RESULTS: i64 = 32;

/// Results of so many elements whose partial results are combined alike, by one kernel: those of the chunks,
/// sums of f32 in f64. Neighbouring threads have neighbouring elements; several lanes of the block take every
/// so-many-th chunk each, and are combined in pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Columns {
    op: ReduceOp,
    /// The type of partial results.
    part: DType,
    /// The type of results.
    dtype: DType,
    /// Elements of a result.
    count: i64,
    chunks: i64,
    /// How many results there are. Each has two arguments.
    results: i64,
}

impl Columns {
    /// One result of `count` elements of `dtype`, whose partial results are of `part`.
    pub(in crate::emit) fn new(op: ReduceOp, part: DType, dtype: DType, count: i64, chunks: i64) -> Self {
        Self {
            op,
            part,
            dtype,
            count,
            chunks,
            results: 1,
        }
    }

    /// The same with another result of the kind.
    pub(in crate::emit) fn and_another(self) -> Self {
        Self {
            results: self.results + 1,
            ..self
        }
    }

    /// Whether `along` goes over the elements of a result, and a block has whole places of it.
    pub fn has(&self, along: &Along) -> bool {
        along.extent == self.count && self.across() % along.width == 0 && self.results <= MOST_RESULTS
    }

    /// Elements of a block. Sectors of 32 bytes are read whole, and blocks of few columns are many.
    fn across(&self) -> i64 {
        if self.count >= 8 {
            8
        } else {
            power_of_two(self.count)
        }
    }

    /// Lanes for each element of a result, of a block that has so many of the `results`.
    fn lanes(&self, results: i64) -> i64 {
        // Some four chunks a lane, all under way at once, and no more threads than a block has; where every
        // multiprocessor has a block, more in smaller ones, of which it holds several.
        let across = self.across();
        let blocks = ceil(self.count, across) * (self.results / results);
        let (each, most) = if blocks >= PROCESSORS { (8, 512) } else { (4, 1024) };
        let lanes = power_of_two(ceil(self.chunks, each)).clamp(1, most / power_of_two(results) / across);
        if across * lanes < 32 { 32 / across } else { lanes }
    }

    /// The statements, and the threads of a block: each result has blocks of its own, which `blockIdx.y`
    /// numbers. If something comes `behind`, a block has its columns of all results, and goes on with that
    /// at each place of them, `width` elements.
    pub fn body(&self, behind: Option<&str>, width: i64) -> (String, u32) {
        let Self {
            op,
            part,
            dtype,
            count,
            chunks,
            results,
        } = *self;
        let register = match (op, part) {
            (ReduceOp::Sum, DType::F32) => DType::F64,
            (_, dtype) => dtype,
        };
        let across = self.across();
        let inside = if behind.is_some() { results } else { 1 };
        let lanes = self.lanes(inside);
        let threads = across * lanes * inside;
        let (ty, memory) = (c::memory_type(part), c::memory_type(dtype));
        let (wide, narrow) = (c::register_type(register), c::register_type(dtype));
        let neutral = c::neutral(op, register);
        let element = c::widened(part, &format!("part[chunk * {count} + k]"));
        let next = c::combine(op, register, "x", &format!("({wide})({element})"));
        let pair = c::combine(
            op,
            register,
            "x",
            &format!("lanes[threadIdx.x + apart * {across}]"),
        );
        let stored = c::narrowed(dtype, &format!("({narrow})x"));
        let (number, lane) = match behind {
            None => ("blockIdx.y".to_owned(), format!("threadIdx.x / {across}")),
            Some(_) => (
                format!("threadIdx.x / {}", across * lanes),
                format!("threadIdx.x / {across} % {lanes}"),
            ),
        };
        let choose = |name: char| {
            let others = (1..results).map(|result| format!("{number} == {result} ? {name}{result} : "));
            others.collect::<String>() + &format!("{name}0")
        };
        let pointers = format!(
            "const {ty}* part = {};\n{memory}* out = {};\n",
            choose('a'),
            choose('b')
        );
        let behind = behind.map_or_else(String::new, |behind| {
            let places = across / width;
            format!(
                "__syncthreads();
const kiln_u32 place = blockIdx.x * {places} + threadIdx.x;
if (threadIdx.x < {places} && place < {}) {behind}
",
                count / width
            )
        });
        let body = format!(
            "__shared__ {wide} lanes[{threads}];
{pointers}const kiln_u64 k = (kiln_u64)blockIdx.x * {across} + threadIdx.x % {across};
const int y = {lane};
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
{behind}"
        );
        (body, threads as u32)
    }

    fn launch(self, arguments: Vec<Argument>) -> Launch {
        let (body, threads) = self.body(None, 1);
        let (ty, memory) = (c::memory_type(self.part), c::memory_type(self.dtype));
        Launch {
            text: FunctionText {
                helpers: String::new(),
                parameters: (0..self.results)
                    .flat_map(|result| [format!("const {ty}* a{result}"), format!("{memory}* b{result}")])
                    .collect(),
                body,
                threads,
                device_only: false,
                blocks: 0,
            },
            grid: [grid(ceil(self.count, self.across())), self.results as u32, 1],
            shared_bytes: 0,
            arguments,
            role: Role::Sums(self),
        }
    }
}
