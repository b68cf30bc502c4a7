//! C for a fused loop nest.
//!
//! The shape of what is written:
//!
//! ```c
//! void nest_7(void *ctx, int64_t begin, int64_t end, int thread) {
//!     void *const *b = ctx;                       // the buffers
//!     ...                                         // what no variable changes
//!     for (int64_t row = begin; row < end; row++) {
//!         ...                                     // row variables, what only they change
//!         v_f32 sum0 = set_f32(0.0f);             // pass 0: what the first reductions need
//!         for (i1 = 0; i1 < 1024; i1 += 16) { ... sum0 = sum0 + x3; }
//!         float r0 = fold_sum_f32(sum0);
//!         ...                                     // pass 1 reads r0, and so on
//!     }
//! }
//! ```
//!
//! Three ideas carry it.
//!
//! **Levels.** Every register belongs to the outermost place where its operands exist: the kernel (level 0), the row
//! (level 1) or the point (level 2). Expressions are written on demand, once for each (value, index) and place.
//!
//! **Stages.** The result of a row reduction of stage `s` operands exists at stage `s + 1`. Pass `p` over a row evaluates
//! everything of stage `p` that is needed: operands of reductions, stores and late reductions. Values of earlier stages
//! are evaluated again in later passes, from a row that is in cache by then.
//!
//! **One vector variable.** It is chosen so that most memory accesses are contiguous in it. If it numbers columns, a vector holds
//! neighbours of a row and reductions fold lanes at the end of a pass; if it numbers rows, a vector holds one element of
//! each of several rows, and nothing folds. The loop body is written for whole vectors and once more for the
//! remaining lanes.
//!
//! Late reductions write partial results for a fixed number of chunks of rows; a second function adds the chunks up in
//! order.

pub mod epilogue;

use std::fmt::Write as _;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_graph::op::{Op, RandomKind, ReduceOp};
use kiln_graph::{DType, Graph, Node, Value};

use super::pointwise as c;
use crate::index::{Atom, Index, Var, bit, linear};
use crate::schedule::Buffer;
use crate::schedule::access::operand_index;
use crate::schedule::layout::position;
use crate::schedule::nest::{Nest, Store, vars};

/// Points of work below which a nest runs on the calling thread alone.
const SERIAL_POINTS: i64 = 16 * 1024;
/// Elements that a thread takes at a time from a flat nest.
const FLAT_GRAIN: i64 = 4096;
/// Longest row of which an expensive intermediate is kept from one pass to the next, in elements: it lives on the stack.
const MAX_CACHED: i64 = 32 * 1024;
/// Most chunks of rows of a late reduction.
const MAX_CHUNKS: i64 = 16;

/// What a kernel function is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Argument {
    /// The memory of a buffer.
    Buffer(Buffer),
    /// Eight bytes of a runtime scalar.
    Scalar(u32),
    /// Working memory of this kernel, at an offset in bytes.
    Scratch(usize),
}

/// One call of a generated function.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The text of the function, with `@` for its name.
    pub text: String,
    /// Its arguments: the elements of `ctx`.
    pub arguments: Vec<Argument>,
    /// Iterations.
    pub n: i64,
    /// Iterations that stay together.
    pub grain: i64,
    /// Whether to share the iterations between threads.
    pub parallel: bool,
    /// Whether iterations are independent elements, so that several tensors can share a launch.
    pub flat: bool,
}

/// The functions of a nest, in the order of their calls, and the scratch memory they share.
#[derive(Clone, Debug, Default)]
pub struct NestCode {
    /// Calls.
    pub launches: Vec<Launch>,
    /// Bytes of scratch memory.
    pub scratch: usize,
}

/// Writes the C of `nest`. `lanes` is the number of elements of a vector.
pub fn generate(graph: &Graph, nest: &Nest, lanes: i64) -> NestCode {
    let mut space = Space::new(nest);
    loop {
        let mut writer = Writer::new(graph, &space, lanes);
        writer.run();
        let seen = writer.seen;
        if !space.collapse(&seen) {
            space.choose_vector(&seen, lanes);
            break;
        }
    }
    let mut writer = Writer::new(graph, &space, lanes);
    writer.run();
    let repeated: FxHashSet<Key> = writer
        .evaluated
        .iter()
        .filter(|(_, passes)| passes.count_ones() > 1)
        .map(|(key, _)| key.clone())
        .collect();
    if repeated.is_empty() || space.product(&space.cols) > MAX_CACHED {
        return writer.finish();
    }
    let mut writer = Writer::new(graph, &space, lanes);
    writer.repeated = repeated;
    writer.run();
    writer.finish()
}

/// A value at an index.
type Key = (Value, Vec<Index>);

/// Whether an operation costs more than keeping its result in cache until the next pass.
fn is_expensive(op: &Op) -> bool {
    use kiln_graph::op::{BinaryOp, UnaryOp};
    match op {
        Op::Unary(op) => !matches!(
            op,
            UnaryOp::Neg
                | UnaryOp::Abs
                | UnaryOp::Sign
                | UnaryOp::Not
                | UnaryOp::Sqrt
                | UnaryOp::Recip
                | UnaryOp::IsNan
                | UnaryOp::IsInf
        ),
        Op::Binary(op) => matches!(op, BinaryOp::Pow | BinaryOp::Atan2 | BinaryOp::Rem),
        Op::Random { .. } => true,
        _ => false,
    }
}

/// The loops of a nest, prepared for writing.
#[derive(Clone)]
struct Space {
    nest: Nest,
    rows: Vec<Var>,
    cols: Vec<Var>,
    vector: Option<Var>,
}

impl Space {
    fn new(nest: &Nest) -> Self {
        let list = |set: u64| nest.list(set).iter().map(|&(var, _)| var).collect::<Vec<Var>>();
        let (rows, cols) = match nest.split {
            Some(split) => (list(split.rows), list(split.cols)),
            None => (Vec::new(), list(nest.all())),
        };
        Self {
            nest: nest.clone(),
            rows,
            cols,
            vector: None,
        }
    }

    fn extent(&self, var: Var) -> i64 {
        self.nest.extents[var as usize]
    }

    fn product(&self, list: &[Var]) -> i64 {
        list.iter().map(|&var| self.extent(var)).product()
    }

    /// Joins two variables that every index treats as one; whether it found a pair.
    fn collapse(&mut self, seen: &[Seen]) -> bool {
        for of_rows in [true, false] {
            let list = if of_rows {
                self.rows.clone()
            } else {
                self.cols.clone()
            };
            for &outer in &list {
                for &inner in list.iter().filter(|&&inner| inner != outer) {
                    let extent = self.extent(inner);
                    let joint =
                        seen.iter().all(
                            |seen| match (seen.index.stride(outer), seen.index.stride(inner)) {
                                (Some(a), Some(b)) => a == b * extent,
                                _ => false,
                            },
                        );
                    if joint && self.nest.extents.len() < 60 {
                        self.join(outer, inner, of_rows);
                        return true;
                    }
                }
            }
        }
        false
    }

    fn join(&mut self, outer: Var, inner: Var, of_rows: bool) {
        let (a, b) = (self.extent(outer), self.extent(inner));
        let joint = self.nest.extents.len() as Var;
        self.nest.extents.push(a * b);
        let list = if of_rows { &mut self.rows } else { &mut self.cols };
        let at = list.iter().position(|&var| var == outer).unwrap_or(0);
        list[at] = joint;
        list.retain(|&var| var != inner);
        let whole = Index::var(joint, a * b);
        let with = |var: Var, extent: i64| {
            if var == outer {
                whole.div(b)
            } else if var == inner {
                whole.rem(b)
            } else {
                Index::var(var, extent)
            }
        };
        self.nest.substitute(&with);
    }

    /// Chooses the vector variable: where most accesses are contiguous and the extent fills vectors.
    fn choose_vector(&mut self, seen: &[Seen], lanes: i64) {
        let late = !self.nest.late.is_empty();
        let candidates = if late {
            self.cols.clone()
        } else {
            self.cols.iter().chain(&self.rows).copied().collect()
        };
        let score = |var: Var| {
            let mut score = 0i64;
            for seen in seen {
                score += match seen.index.stride(var) {
                    Some(0) => 0,
                    Some(1) => 2 * seen.weight,
                    _ => -3 * seen.weight,
                };
            }
            // Few lanes in use, few accesses worth having.
            let extent = self.extent(var);
            let rows = self.rows.contains(&var);
            (
                if extent < lanes {
                    score * extent / lanes - 1
                } else {
                    score
                },
                !rows,
                var,
            )
        };
        self.vector = candidates.into_iter().max_by_key(|&var| score(var));
        if self.nest.split.is_none() {
            // Without reductions all but the vector variable number rows.
            let vector = self.vector;
            self.rows = self
                .cols
                .iter()
                .copied()
                .filter(|&var| Some(var) != vector)
                .collect();
            self.cols = vector.into_iter().collect();
        }
        let vector = self.vector;
        for list in [&mut self.rows, &mut self.cols] {
            list.sort_by_key(|&var| Some(var) == vector);
        }
    }

    fn flat(&self) -> bool {
        self.nest.split.is_none() && self.rows.is_empty()
    }
}

/// An index that ends up as an address or a number, and how much it counts.
struct Seen {
    index: Index,
    weight: i64,
}

#[derive(Clone, Debug)]
struct Register {
    name: String,
    dtype: DType,
    vector: bool,
    level: u8,
    stage: usize,
}

/// How many lanes of a vector are in use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lanes {
    All,
    /// The first so many.
    First(i64),
    /// A number known when the code runs: the variable `left`.
    Left,
}

impl Lanes {
    fn count(self, lanes: i64) -> String {
        match self {
            Lanes::All => lanes.to_string(),
            Lanes::First(n) => n.to_string(),
            Lanes::Left => "left".into(),
        }
    }
}

struct Writer<'a> {
    graph: &'a Graph,
    space: &'a Space,
    lanes: i64,
    mode: Lanes,
    arguments: Vec<Argument>,
    names: usize,
    top: Vec<String>,
    sections: Vec<Vec<String>>,
    body: Vec<String>,
    /// Stores of the current body: after all loads, so that a store may overwrite what was read.
    body_stores: Vec<String>,
    known: FxHashMap<Key, Register>,
    /// The pass being written.
    pass: usize,
    /// For expensive values of single points: the passes that evaluate them, as a bit set.
    evaluated: FxHashMap<Key, u64>,
    /// Those that several passes need: the first keeps them for the rest.
    repeated: FxHashSet<Key>,
    /// Names of the arrays that hold them, once written.
    kept: FxHashMap<Key, (String, usize)>,
    slots: FxHashMap<u32, Register>,
    reduced: FxHashMap<Value, Register>,
    stages: FxHashMap<Value, usize>,
    seen: Vec<Seen>,
    /// Declarations and final lines of one chunk of rows.
    chunk_top: Vec<String>,
    chunk_end: Vec<String>,
    scratch: usize,
    combines: Vec<Launch>,
    text: String,
    /// Whether arguments are parameters `a0`, `a1`, ... of their own instead of elements of `b`.
    named: bool,
    /// A value that is in a register before the first statement: the result of a contraction.
    given: Option<(Value, Register)>,
}

impl<'a> Writer<'a> {
    fn new(graph: &'a Graph, space: &'a Space, lanes: i64) -> Self {
        Self {
            graph,
            space,
            lanes,
            mode: Lanes::All,
            arguments: Vec::new(),
            names: 0,
            top: Vec::new(),
            sections: Vec::new(),
            body: Vec::new(),
            body_stores: Vec::new(),
            known: FxHashMap::default(),
            pass: 0,
            evaluated: FxHashMap::default(),
            repeated: FxHashSet::default(),
            kept: FxHashMap::default(),
            slots: FxHashMap::default(),
            reduced: FxHashMap::default(),
            stages: FxHashMap::default(),
            seen: Vec::new(),
            chunk_top: Vec::new(),
            chunk_end: Vec::new(),
            scratch: 0,
            combines: Vec::new(),
            text: String::new(),
            named: false,
            given: None,
        }
    }

    fn fresh(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names - 1)
    }

    fn argument(&mut self, argument: Argument) -> usize {
        match self.arguments.iter().position(|own| *own == argument) {
            Some(at) => at,
            None => {
                self.arguments.push(argument);
                let at = self.arguments.len() - 1;
                match argument {
                    Argument::Buffer(buffer) if !self.named => {
                        let ty = c::memory_type(self.buffer_dtype(buffer));
                        self.top.push(format!("{ty} *a{at} = b[{at}];"));
                    }
                    _ => {}
                }
                at
            }
        }
    }

    /// C of the pointer that is argument `at`.
    fn pointer(&self, at: usize) -> String {
        if self.named {
            format!("a{at}")
        } else {
            format!("b[{at}]")
        }
    }

    fn buffer_dtype(&self, buffer: Buffer) -> DType {
        match buffer {
            Buffer::Value(value) => self.graph.dtype(value),
            Buffer::Output(number) => self.graph.dtype(self.graph.outputs[number as usize].value),
        }
    }

    // ---- places ----

    fn row_set(&self) -> u64 {
        self.space.rows.iter().fold(0, |set, &var| set | bit(var))
    }

    fn level(&self, set: u64) -> u8 {
        if set == 0 {
            0
        } else if set & !self.row_set() == 0 {
            1
        } else {
            2
        }
    }

    fn is_vector(&self, set: u64) -> bool {
        self.space.vector.is_some_and(|vector| set & bit(vector) != 0)
    }

    fn line(&mut self, level: u8, stage: usize, text: String) {
        match level {
            0 => self.top.push(text),
            1 => {
                while self.sections.len() <= stage {
                    self.sections.push(Vec::new());
                }
                self.sections[stage].push(text);
            }
            _ => self.body.push(text),
        }
    }

    fn define(&mut self, dtype: DType, vector: bool, level: u8, stage: usize, expression: &str) -> Register {
        let name = self.fresh("x");
        let ty = c::register_type(dtype, vector);
        self.line(level, stage, format!("{ty} {name} = {expression};"));
        Register {
            name,
            dtype,
            vector,
            level,
            stage,
        }
    }

    /// The register as a vector.
    fn spread(&self, register: &Register) -> String {
        if register.vector {
            register.name.clone()
        } else {
            format!("set_{}({})", register.dtype.compute(), register.name)
        }
    }

    fn operand(&self, register: &Register, vector: bool) -> String {
        if vector {
            self.spread(register)
        } else {
            register.name.clone()
        }
    }

    // ---- indices ----

    /// Registers for the loaded integers in `index`; the deepest level and stage among them.
    fn load_slots(&mut self, index: &Index) -> (u8, usize) {
        let mut place = (0, 0);
        for (atom, _) in index.terms() {
            let inner = match atom {
                Atom::Var { .. } => (0, 0),
                Atom::Div(inner, _) | Atom::Mod(inner, _) => self.load_slots(inner),
                Atom::Data { slot, extent, .. } => {
                    let register = self.slot(*slot, *extent);
                    (register.level, register.stage)
                }
            };
            place = (place.0.max(inner.0), place.1.max(inner.1));
        }
        place
    }

    fn slot(&mut self, slot: u32, extent: i64) -> Register {
        if let Some(register) = self.slots.get(&slot) {
            return register.clone();
        }
        let (indices, at) = self.space.nest.data[slot as usize].clone();
        let loaded = self.eval(indices, &at);
        let wide = c::cast(loaded.dtype, DType::I64, loaded.vector, &loaded.name);
        let clamp = if loaded.vector {
            "v_clamp_index"
        } else {
            "clamp_index"
        };
        let register = self.define(
            DType::I64,
            loaded.vector,
            loaded.level,
            loaded.stage,
            &format!("{clamp}({wide}, {extent})"),
        );
        self.slots.insert(slot, register.clone());
        register
    }

    /// C of an index at lane 0, or at lane `l` if `lane`.
    fn index_text(&self, index: &Index, lane: bool) -> String {
        let vector = self.space.vector;
        let var = |var: Var| {
            if lane && Some(var) == vector {
                format!("(i{var} + l)")
            } else {
                format!("i{var}")
            }
        };
        let data = |slot: u32| match self.slots.get(&slot) {
            Some(register) if register.vector && lane => format!("{}[l]", register.name),
            Some(register) if register.vector => format!("{}[0]", register.name),
            Some(register) => register.name.clone(),
            None => format!("at{slot}"),
        };
        index.to_c(&var, &data)
    }

    /// The stride of the lanes, if there is one.
    fn lane_stride(&self, index: &Index) -> Option<i64> {
        self.space.vector.and_then(|vector| index.stride(vector))
    }

    fn load(&mut self, buffer: Buffer, position: &Index, weight: i64) -> Register {
        let dtype = self.buffer_dtype(buffer);
        let at = self.argument(Argument::Buffer(buffer));
        let (data_level, stage) = self.load_slots(position);
        self.seen.push(Seen {
            index: position.clone(),
            weight,
        });
        let set = position.vars();
        let level = self.level(set).max(data_level);
        let vector = self.is_vector(set);
        let expression = if !vector {
            format!("get_{dtype}(a{at} + {})", self.index_text(position, false))
        } else {
            let n = self.mode.count(self.lanes);
            match self.lane_stride(position) {
                Some(1) if self.mode == Lanes::All => {
                    format!("ld_{dtype}(a{at} + {})", self.index_text(position, false))
                }
                Some(1) => format!("ldn_{dtype}(a{at} + {}, {n})", self.index_text(position, false)),
                Some(stride) => format!(
                    "lds_{dtype}(a{at} + {}, {stride}, {n})",
                    self.index_text(position, false)
                ),
                None => {
                    let ty = c::memory_type(dtype);
                    let gathered = self.fresh("g");
                    let each = self.index_text(position, true);
                    self.line(
                        level,
                        stage,
                        format!("{ty} {gathered}[KILN_LANES] = {{0}}; for (int l = 0; l < {n}; l++) {gathered}[l] = a{at}[{each}];"),
                    );
                    format!("ld_{dtype}({gathered})")
                }
            }
        };
        self.define(dtype, vector, level, stage, &expression)
    }

    /// The text that stores `register`.
    fn store_text(&self, dtype: DType, address: &str, position: &Index, register: &Register) -> String {
        let set = position.vars();
        if !self.is_vector(set) {
            let value = if register.vector {
                format!("{}[0]", register.name)
            } else {
                register.name.clone()
            };
            return format!(
                "put_{dtype}({address} + {}, {value});",
                self.index_text(position, false)
            );
        }
        let value = self.spread(register);
        let at = self.index_text(position, false);
        let n = self.mode.count(self.lanes);
        match self.lane_stride(position) {
            Some(1) if self.mode == Lanes::All => format!("st_{dtype}({address} + {at}, {value});"),
            Some(1) => format!("stn_{dtype}({address} + {at}, {value}, {n});"),
            Some(stride) => format!("sts_{dtype}({address} + {at}, {stride}, {value}, {n});"),
            None => {
                let ty = c::memory_type(dtype);
                let each = self.index_text(position, true);
                format!(
                    "{{ {ty} t[KILN_LANES]; st_{dtype}(t, {value}); for (int l = 0; l < {n}; l++) ({address})[{each}] = t[l]; }}"
                )
            }
        }
    }

    // ---- expressions ----

    fn stage(&mut self, value: Value) -> usize {
        if let Some(&stage) = self.stages.get(&value) {
            return stage;
        }
        let given = self.given.as_ref().is_some_and(|(given, _)| *given == value);
        let stage = if given || !self.space.nest.uses_of(value).is_empty() {
            0
        } else {
            let data = self.graph.def(value);
            let inputs = data.inputs.clone();
            let operands = inputs.into_iter().map(|v| self.stage(v)).max().unwrap_or(0);
            operands + usize::from(matches!(data.op, Op::Reduce { .. }))
        };
        self.stages.insert(value, stage);
        stage
    }

    fn eval(&mut self, value: Value, index: &[Index]) -> Register {
        if let Some((given, register)) = &self.given
            && *given == value
        {
            return register.clone();
        }
        if let Some(register) = self.reduced.get(&value) {
            return register.clone();
        }
        let key = (value, index.to_vec());
        if let Some(register) = self.known.get(&key) {
            return register.clone();
        }
        let register = if is_expensive(&self.graph.def(value).op) {
            self.compute_once(&key)
        } else {
            self.compute(value, index)
        };
        self.known.insert(key, register.clone());
        register
    }

    /// An expensive value: evaluated by the first pass over a row that needs it, kept on the stack for the others.
    fn compute_once(&mut self, key: &Key) -> Register {
        let (value, index) = key;
        let dtype = self.graph.dtype(*value).compute();
        let columns = self.space.cols.clone();
        let position = || {
            let index: Vec<Index> = columns
                .iter()
                .map(|&var| Index::var(var, self.space.extent(var)))
                .collect();
            let extents: Vec<usize> = columns
                .iter()
                .map(|&var| self.space.extent(var) as usize)
                .collect();
            linear(&index, &extents)
        };
        if let Some((name, pass)) = self.kept.get(key)
            && *pass < self.pass
        {
            let text = format!("ld_{dtype}({name} + {})", self.index_text(&position(), false));
            return self.define(self.graph.dtype(*value), true, 2, 0, &text);
        }
        let register = self.compute(*value, index);
        if register.level < 2
            || !register.vector
            || !dtype.is_float()
            || self.vector_rows()
            || self.space.flat()
        {
            return register;
        }
        *self.evaluated.entry(key.clone()).or_default() |= 1 << self.pass.min(63);
        if self.repeated.contains(key) {
            let name = match self.kept.get(key) {
                Some((name, _)) => name.clone(),
                None => {
                    let name = self.fresh("kept");
                    let length = self.space.product(&columns) + self.lanes;
                    let ty = c::memory_type(dtype);
                    self.top
                        .push(format!("{ty} {name}[{length}] __attribute__((aligned(64)));"));
                    self.kept.insert(key.clone(), (name.clone(), self.pass));
                    name
                }
            };
            let at = self.index_text(&position(), false);
            self.body
                .push(format!("st_{dtype}({name} + {at}, {});", register.name));
        }
        register
    }

    fn compute(&mut self, value: Value, index: &[Index]) -> Register {
        let graph = self.graph;
        if !self.space.nest.uses_of(value).is_empty() {
            let position = position(graph, &self.space.nest.layouts, value, index);
            return self.load(Buffer::Value(value), &position, 1);
        }
        let data = graph.def(value);
        let dtype = graph.dtype(value);
        if let Some(operand) = operand_index(graph, value, index) {
            return self.eval(data.inputs[0], &operand);
        }
        match &data.op {
            Op::Constant { value, dtype } => {
                let text = c::literal(*value, *dtype);
                Register {
                    name: text,
                    dtype: *dtype,
                    vector: false,
                    level: 0,
                    stage: 0,
                }
            }
            Op::Scalar { index, dtype } => {
                let at = self.argument(Argument::Scalar(*index));
                let at = self.pointer(at);
                let text = match dtype {
                    DType::Bool => format!("*(const uint64_t *){at} != 0"),
                    dtype if dtype.is_float() => {
                        let text = format!("(float)*(const double *){at}");
                        match dtype {
                            DType::F64 => format!("*(const double *){at}"),
                            DType::F32 => text,
                            half => format!("s_round_{half}({text})"),
                        }
                    }
                    dtype => format!("({})*(const uint64_t *){at}", c::memory_type(*dtype)),
                };
                self.define(*dtype, false, 0, 0, &text)
            }
            Op::Iota { axis, dtype, .. } => self.number(&index[*axis], *dtype),
            Op::Random { kind, dtype, shape } => {
                self.random(*kind, *dtype, &linear(index, shape), &data.inputs)
            }
            Op::Gather { .. } | Op::IndexSelect { .. } => {
                let mut nest = self.space.nest.clone();
                let operands = nest.operands(graph, graph.value(value).node, index);
                debug_assert_eq!(nest.data.len(), self.space.nest.data.len());
                let (x, at) = &operands[1];
                self.eval(*x, at)
            }
            op => {
                let registers: Vec<Register> = data.inputs.iter().map(|&v| self.eval(v, index)).collect();
                let vector = registers.iter().any(|register| register.vector);
                let level = registers.iter().map(|register| register.level).max().unwrap_or(0);
                let stage = registers.iter().map(|register| register.stage).max().unwrap_or(0);
                let names: Vec<String> = registers
                    .iter()
                    .map(|register| self.operand(register, vector))
                    .collect();
                let of = registers[0].dtype;
                let text = match op {
                    Op::Unary(op) => c::unary(*op, of, vector, &names[0]),
                    Op::Binary(op) => c::binary(*op, of, vector, &names[0], &names[1]),
                    Op::Compare(op) => c::compare(*op, of, vector, &names[0], &names[1]),
                    Op::Select => c::select(dtype, vector, &names[0], &names[1], &names[2]),
                    Op::Cast(to) => c::cast(of, *to, vector, &names[0]),
                    other => unreachable!("{} is not computed point by point", other.name()),
                };
                self.define(dtype, vector, level, stage, &text)
            }
        }
    }

    /// An index as a number.
    fn number(&mut self, index: &Index, dtype: DType) -> Register {
        let (data_level, stage) = self.load_slots(index);
        self.seen.push(Seen {
            index: index.clone(),
            weight: 0,
        });
        let set = index.vars();
        let level = self.level(set).max(data_level);
        let vector = self.is_vector(set);
        let base = format!("(int64_t)({})", self.index_text(index, false));
        if !vector {
            let text = c::cast(DType::I64, dtype, false, &base);
            return self.define(dtype, false, level, stage, &text);
        }
        let text = match self.lane_stride(index) {
            Some(stride) => format!("set_i64({base}) + iota_i64() * {stride}"),
            None => {
                let each = self.index_text(index, true);
                let name = self.fresh("g");
                let n = self.mode.count(self.lanes);
                self.line(
                    level,
                    stage,
                    format!("int64_t {name}[KILN_LANES] = {{0}}; for (int l = 0; l < {n}; l++) {name}[l] = {each};"),
                );
                format!("ld_i64({name})")
            }
        };
        let text = c::cast(DType::I64, dtype, true, &format!("({text})"));
        self.define(dtype, true, level, stage, &text)
    }

    fn random(&mut self, kind: RandomKind, dtype: DType, position: &Index, inputs: &[Value]) -> Register {
        let scalars: Vec<String> = inputs.iter().map(|&v| self.eval(v, &[]).name).collect();
        let arguments = scalars[..2].join(", ");
        let each = |at: &str| match kind {
            RandomKind::IntRange => {
                let ty = c::memory_type(dtype);
                format!(
                    "({ty})random_range({arguments}, {at}, {}, {})",
                    scalars[2], scalars[3]
                )
            }
            RandomKind::Uniform => format!("uniform_{dtype}({arguments}, {at})"),
            RandomKind::Normal => match dtype {
                DType::F64 => format!("normal_f64({arguments}, {at})"),
                DType::F32 => format!("normal_f32({arguments}, {at})"),
                half => format!("s_round_{half}(normal_f32({arguments}, {at}))"),
            },
        };
        self.seen.push(Seen {
            index: position.clone(),
            weight: 2,
        });
        let set = position.vars();
        let level = self.level(set);
        if !self.is_vector(set) {
            let text = each(&format!("({})", self.index_text(position, false)));
            return self.define(dtype, false, level, 0, &text);
        }
        if kind == RandomKind::Uniform && dtype == DType::F32 && self.lane_stride(position) == Some(1) {
            let at = self.index_text(position, false);
            return self.define(
                dtype,
                true,
                level,
                0,
                &format!("v_uniform_f32({arguments}, {at})"),
            );
        }
        let name = self.fresh("g");
        let n = self.mode.count(self.lanes);
        let ty = c::memory_type(dtype.compute());
        let text = each(&format!("({})", self.index_text(position, true)));
        self.line(
            level,
            0,
            format!("{ty} {name}[KILN_LANES] = {{0}}; for (int l = 0; l < {n}; l++) {name}[l] = {text};"),
        );
        self.define(dtype, true, level, 0, &format!("ld_{}({name})", dtype.compute()))
    }

    // ---- the function ----

    fn run(&mut self) {
        for store in self.space.nest.stores.clone() {
            self.seen.push(Seen {
                index: store.position.clone(),
                weight: 2,
            });
        }
        let vector_rows = self
            .space
            .vector
            .is_some_and(|vector| self.space.rows.contains(&vector));
        let late = !self.space.nest.late.is_empty();
        let mut rows = String::new();
        if self.space.flat() {
            self.flat_body(&mut rows);
        } else if vector_rows {
            let vector = self.space.vector.unwrap_or(0);
            let extent = self.space.extent(vector);
            let whole = extent / self.lanes * self.lanes;
            if whole > 0 {
                let _ = writeln!(
                    rows,
                    "for (int64_t i{vector} = 0; i{vector} < {whole}; i{vector} += {}) {{",
                    self.lanes
                );
                self.row(Lanes::All, &mut rows);
                rows.push_str("}\n");
            }
            if whole < extent {
                let _ = writeln!(rows, "{{\nconst int64_t i{vector} = {whole};");
                self.row(Lanes::First(extent - whole), &mut rows);
                rows.push_str("}\n");
            }
        } else {
            self.row(Lanes::All, &mut rows);
        }
        let mut text = String::new();
        text.push_str("void @(void *ctx, int64_t begin, int64_t end, int thread) {\nvoid *const *b = ctx;\n(void)thread;\n");
        for line in &self.top {
            text.push_str(line);
            text.push('\n');
        }
        if self.space.flat() {
            text.push_str(&rows);
        } else {
            let outer: Vec<Var> = self.outer_rows();
            let count = self.space.product(&outer);
            let mut loops = String::new();
            let (from, to) = if late {
                let chunks = self.chunks();
                let _ = writeln!(loops, "for (int64_t chunk = begin; chunk < end; chunk++) {{");
                let _ = writeln!(
                    loops,
                    "const int64_t first = {count} * chunk / {chunks}, last = {count} * (chunk + 1) / {chunks};"
                );
                self.chunk_top
                    .iter()
                    .for_each(|line| loops.push_str(&format!("{line}\n")));
                ("first", "last")
            } else {
                ("begin", "end")
            };
            let _ = writeln!(loops, "for (int64_t row = {from}; row < {to}; row++) {{");
            let mut rest = "row".to_owned();
            for (at, &var) in outer.iter().enumerate() {
                let inner = self.space.product(&outer[at + 1..]);
                let value = if inner == 1 {
                    rest.clone()
                } else {
                    format!("{rest} / {inner}")
                };
                let _ = writeln!(loops, "const int64_t i{var} = {value};");
                if inner != 1 {
                    rest = format!("{rest} % {inner}");
                }
            }
            loops.push_str(&rows);
            loops.push_str("}\n");
            if late {
                self.chunk_end
                    .iter()
                    .for_each(|line| loops.push_str(&format!("{line}\n")));
                loops.push_str("}\n");
            }
            text.push_str(&loops);
        }
        text.push_str("}\n");
        self.text = text;
    }

    fn outer_rows(&self) -> Vec<Var> {
        self.space
            .rows
            .iter()
            .copied()
            .filter(|&var| Some(var) != self.space.vector)
            .collect()
    }

    fn chunks(&self) -> i64 {
        self.space.product(&self.space.rows).clamp(1, MAX_CHUNKS)
    }

    /// A nest of one variable without reductions: iterations are elements.
    fn flat_body(&mut self, out: &mut String) {
        let stores = self.space.nest.stores.clone();
        let Some(vector) = self.space.vector.or(self.space.cols.first().copied()) else {
            // One element.
            self.sections.clear();
            for store in &stores {
                let register = self.eval(store.value, &store.index);
                self.store_point(store, &register);
            }
            let lines = std::mem::take(&mut self.body_stores);
            out.push_str("if (begin < end) {\n");
            for line in self.sections.iter().flatten().chain(&self.body).chain(&lines) {
                let _ = writeln!(out, "{line}");
            }
            out.push_str("}\n");
            return;
        };
        for (mode, head) in [
            (
                Lanes::All,
                format!(
                    "int64_t i{vector} = begin;\nfor (; i{vector} + {0} <= end; i{vector} += {0}) {{",
                    self.lanes
                ),
            ),
            (
                Lanes::Left,
                format!("if (i{vector} < end) {{\nconst int64_t left = end - i{vector};"),
            ),
        ] {
            self.point_body(mode, |writer| {
                for store in &stores {
                    let register = writer.eval(store.value, &store.index);
                    writer.store_point(store, &register);
                }
            });
            let _ = writeln!(out, "{head}");
            self.flush_body(out);
            out.push_str("}\n");
        }
    }

    fn store_point(&mut self, store: &Store, register: &Register) {
        let dtype = self.buffer_dtype(store.buffer);
        let at = self.argument(Argument::Buffer(store.buffer));
        let text = self.store_text(dtype, &format!("a{at}"), &store.position, register);
        self.body_stores.push(text);
    }

    /// Starts a body with nothing of level 2 known and fills it.
    fn point_body(&mut self, mode: Lanes, fill: impl FnOnce(&mut Self)) {
        self.mode = mode;
        self.known.retain(|_, register| register.level < 2);
        self.slots.retain(|_, register| register.level < 2);
        self.body.clear();
        self.body_stores.clear();
        fill(self);
    }

    fn flush_body(&mut self, out: &mut String) {
        for line in self.body.drain(..).chain(self.body_stores.drain(..)) {
            out.push_str(&line);
            out.push('\n');
        }
    }

    /// Everything that happens on one row (or, if the vector variable numbers rows, on a vector of rows).
    fn row(&mut self, mode: Lanes, out: &mut String) {
        let graph = self.graph;
        self.known.retain(|_, register| register.level < 1);
        self.slots.retain(|_, register| register.level < 1);
        self.reduced.clear();
        self.sections = vec![Vec::new()];
        self.mode = mode;
        let nest = &self.space.nest;
        let reduces: Vec<Node> = nest
            .members
            .iter()
            .copied()
            .filter(|&node| matches!(graph.node(node).op, Op::Reduce { .. }))
            .collect();
        let late = nest.late.clone();
        let stores: Vec<Store> = nest
            .stores
            .iter()
            .filter(|store| !late.contains(&store.value))
            .cloned()
            .collect();
        let row_set = self.row_set();
        let mut passes = 0;
        for &node in &reduces {
            passes = passes.max(self.stage(graph.node(node).inputs[0]) + 1);
        }
        for store in &stores {
            let stage = self.stage(store.value);
            if vars(&store.index) & !row_set != 0 {
                passes = passes.max(stage + 1);
            }
        }
        let mut pass_texts: Vec<String> = Vec::new();
        for pass in 0..passes {
            self.pass = pass;
            let mut text = String::new();
            let due: Vec<Node> = reduces
                .iter()
                .copied()
                .filter(|&node| self.stage(graph.node(node).inputs[0]) == pass)
                .collect();
            let (due_late, due_row): (Vec<Node>, Vec<Node>) = due
                .into_iter()
                .partition(|&node| late.contains(&graph.node(node).outputs[0]));
            let due_stores: Vec<Store> = stores
                .iter()
                .filter(|store| vars(&store.index) & !row_set != 0)
                .cloned()
                .collect::<Vec<_>>()
                .into_iter()
                .filter(|store| self.stage(store.value) == pass)
                .collect();
            let sums: Vec<Accumulator> = due_row.iter().map(|&node| self.accumulator(node)).collect();
            for sum in &sums {
                let _ = writeln!(
                    text,
                    "{} {} = {};",
                    c::register_type(sum.dtype, sum.vector),
                    sum.name,
                    sum.neutral()
                );
            }
            let lates: Vec<LateSum> = due_late.iter().map(|&node| self.late_sum(node)).collect();
            let (point_late, row_late): (Vec<LateSum>, Vec<LateSum>) =
                lates.into_iter().partition(|late| late.of_points);
            for late in &row_late {
                let x = self.eval(late.x, &late.index);
                let value = c::combine(late.op, late.dtype, false, &late.name, &x.name);
                self.line(1, x.stage, format!("{} = {value};", late.name));
            }
            if !sums.is_empty() || !due_stores.is_empty() || !point_late.is_empty() {
                self.columns(mode, &sums, &due_stores, &point_late, &mut text);
            }
            for sum in sums {
                let register = if sum.vector && !self.vector_rows() {
                    let name = self.fresh("r");
                    let ty = c::register_type(sum.dtype, false);
                    let _ = writeln!(
                        text,
                        "const {ty} {name} = fold_{}_{}({});",
                        sum.op.name(),
                        sum.dtype.compute(),
                        sum.name
                    );
                    Register {
                        name,
                        dtype: sum.dtype,
                        vector: false,
                        level: 1,
                        stage: pass + 1,
                    }
                } else {
                    Register {
                        name: sum.name.clone(),
                        dtype: sum.dtype,
                        vector: sum.vector,
                        level: 1,
                        stage: pass + 1,
                    }
                };
                self.reduced.insert(sum.value, register);
            }
            pass_texts.push(text);
        }
        let mut row_stores = Vec::new();
        for store in stores.iter().filter(|store| vars(&store.index) & !row_set == 0) {
            let register = self.eval(store.value, &store.index);
            let dtype = self.buffer_dtype(store.buffer);
            let at = self.argument(Argument::Buffer(store.buffer));
            row_stores.push(self.store_text(dtype, &format!("a{at}"), &store.position, &register));
        }
        for stage in 0..self.sections.len().max(pass_texts.len()) {
            for line in self.sections.get(stage).into_iter().flatten() {
                out.push_str(line);
                out.push('\n');
            }
            if let Some(text) = pass_texts.get(stage) {
                out.push_str(text);
            }
        }
        for line in row_stores {
            out.push_str(&line);
            out.push('\n');
        }
    }

    fn vector_rows(&self) -> bool {
        self.space
            .vector
            .is_some_and(|vector| self.space.rows.contains(&vector))
    }

    /// The loops over the columns of a row, with the body of one pass.
    fn columns(
        &mut self,
        row_mode: Lanes,
        sums: &[Accumulator],
        stores: &[Store],
        lates: &[LateSum],
        out: &mut String,
    ) {
        let vector_rows = self.vector_rows();
        let loops: Vec<Var> = self
            .space
            .cols
            .iter()
            .copied()
            .filter(|&var| vector_rows || Some(var) != self.space.vector)
            .collect();
        for &var in &loops {
            let _ = writeln!(
                out,
                "for (int64_t i{var} = 0; i{var} < {}; i{var}++) {{",
                self.space.extent(var)
            );
        }
        let vector = self
            .space
            .vector
            .filter(|_| !vector_rows && self.space.cols.contains(&self.space.vector.unwrap_or(0)));
        let parts: Vec<(Lanes, String)> = match vector {
            None => vec![(row_mode, "{".to_owned())],
            Some(vector) => {
                let extent = self.space.extent(vector);
                let whole = extent / self.lanes * self.lanes;
                let mut parts = Vec::new();
                if whole > 0 {
                    let head = format!(
                        "for (int64_t i{vector} = 0; i{vector} < {whole}; i{vector} += {}) {{",
                        self.lanes
                    );
                    parts.push((Lanes::All, head));
                }
                if whole < extent {
                    parts.push((
                        Lanes::First(extent - whole),
                        format!("{{\nconst int64_t i{vector} = {whole};"),
                    ));
                }
                parts
            }
        };
        for (mode, head) in parts {
            self.point_body(mode, |writer| {
                for sum in sums {
                    writer.accumulate(sum, vector.is_some());
                }
                for late in lates {
                    writer.accumulate_late(late, vector.is_some());
                }
                for store in stores {
                    let register = writer.eval(store.value, &store.index);
                    writer.store_point(store, &register);
                }
            });
            let _ = writeln!(out, "{head}");
            self.flush_body(out);
            out.push_str("}\n");
        }
        for _ in &loops {
            out.push_str("}\n");
        }
        self.mode = row_mode;
        self.known.retain(|_, register| register.level < 2);
        self.slots.retain(|_, register| register.level < 2);
    }

    fn accumulator(&mut self, node: Node) -> Accumulator {
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
    fn reduced_index(&self, value: Value, axes: &[usize], kept: &[Index]) -> Vec<Index> {
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

    fn accumulate(&mut self, sum: &Accumulator, mask: bool) {
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

    fn late_sum(&mut self, node: Node) -> LateSum {
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

    fn accumulate_late(&mut self, late: &LateSum, mask: bool) {
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

    fn finish(mut self) -> NestCode {
        let space = self.space;
        let late = !space.nest.late.is_empty();
        let points: i64 = space.product(&space.rows) * space.product(&space.cols);
        let (n, grain) = if space.flat() {
            (points, FLAT_GRAIN)
        } else if late {
            (self.chunks(), 1)
        } else {
            let rows = space.product(&self.outer_rows());
            let each = (points / rows.max(1)).max(1);
            (rows, (SERIAL_POINTS / 4 / each).max(1))
        };
        let main = Launch {
            text: std::mem::take(&mut self.text),
            arguments: self.arguments,
            n,
            grain,
            parallel: points >= SERIAL_POINTS,
            flat: space.flat(),
        };
        let mut launches = vec![main];
        launches.append(&mut self.combines);
        NestCode {
            launches,
            scratch: self.scratch,
        }
    }
}

/// A row reduction being accumulated.
struct Accumulator {
    name: String,
    value: Value,
    x: Value,
    index: Vec<Index>,
    op: ReduceOp,
    dtype: DType,
    vector: bool,
}

impl Accumulator {
    fn neutral(&self) -> String {
        let text = c::neutral(self.op, self.dtype);
        if self.vector {
            format!("set_{}({text})", self.dtype.compute())
        } else {
            text
        }
    }
}

/// A late reduction being accumulated.
struct LateSum {
    name: String,
    x: Value,
    index: Vec<Index>,
    op: ReduceOp,
    dtype: DType,
    position: Index,
    of_points: bool,
    per_element: bool,
}

/// Adds up the partial results of the chunks.
fn combine_launch(
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
