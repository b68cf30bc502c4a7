//! C for a fused loop nest.
//!
//! The shape of the generated function:
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
//! **Levels.** Every register belongs to the outermost place where its operands exist: the kernel (level 0),
//! the row (level 1) or the point (level 2). Expressions are written on demand, once for each (value, index)
//! and place.
//!
//! **Stages.** The result of a row reduction of stage `s` operands exists at stage `s + 1`. Pass `p` over a
//! row evaluates everything of stage `p` that is needed: operands of reductions, stores and late reductions.
//! Values of earlier stages are evaluated again in later passes, from a row that is in cache by then.
//!
//! **One vector variable.** It is chosen so that most memory accesses are contiguous in it. If it numbers
//! columns, a vector holds neighbours of a row and reductions fold lanes at the end of a pass; if it numbers
//! rows, a vector holds one element of each of several rows, and nothing folds. The loop body is written for
//! whole vectors and once more for the remaining lanes.
//!
//! Late reductions write partial results for a fixed number of chunks of rows; a second function adds the
//! chunks up in order. Long sums of f32 go by blocks (`blocks`).

mod blocks;
pub mod epilogue;
mod expression;
mod function;
mod memory;
mod power;
pub mod prologue;
mod reduction;
mod space;

use kiln_compiler::index::{Index, bit};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::integers::Integers;
use kiln_compiler::schedule::nest::Nest;
use kiln_compiler::schedule::row_stages::RowStages;
use kiln_graph::{DType, Graph, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use super::expressions as c;
use crate::policy::{FLAT_GRAIN, KEPT_ELEMENTS, KEPT_ROW, SERIAL_POINTS};
use space::Space;

/// An argument of a kernel function.
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
        let accesses = writer.accesses;
        let indices: Vec<&Index> = accesses.iter().map(|access| &access.index).collect();
        if !space.loops.collapse(&indices) {
            space.choose_vector(&accesses, lanes);
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
    let row = space.loops.row_length();
    if repeated.is_empty() || row > KEPT_ROW || row * repeated.len() as i64 > KEPT_ELEMENTS {
        return writer.finish();
    }
    let mut writer = Writer::new(graph, &space, lanes);
    writer.repeated = repeated;
    writer.run();
    writer.finish()
}

/// Bytes of scratch memory of [`generate`]'s code, from the nest alone; none if it depends on how the nest is
/// vectorised.
pub fn scratch(graph: &Graph, nest: &Nest) -> Option<usize> {
    match nest.late.is_empty() {
        true => Some(0),
        false => nest
            .late
            .iter()
            .map(|&value| reduction::late_scratch(graph, nest, value))
            .sum(),
    }
}

/// A value at an index.
type Key = (Value, Vec<Index>);

/// An index that becomes an address or a number, and its weight in the choice of the vector variable.
struct Access {
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
    /// The expensive values that several passes need: the first pass keeps them for the others.
    repeated: FxHashSet<Key>,
    /// Names of the arrays that hold them, once written.
    kept: FxHashMap<Key, (String, usize)>,
    /// The nest's, and those that are written in another way here: by way of a reshape, from a store whose
    /// loops were joined.
    integers: Integers,
    slots: FxHashMap<u32, Register>,
    /// For vectors that were rounded to a half type, by name: the halves, which a store takes as they are.
    halves: FxHashMap<String, String>,
    /// Buffers that are read from end to end, and the pass over a row that reads them first.
    streams: FxHashMap<Buffer, usize>,
    reduced: FxHashMap<Value, Register>,
    stages: RowStages,
    /// For the result of an operation that another member computes as well: that member's result.
    equal: FxHashMap<Value, Value>,
    accesses: Vec<Access>,
    /// Declarations and final lines of one chunk of rows.
    chunk_top: Vec<String>,
    chunk_end: Vec<String>,
    /// The statements after each block of the rows of a chunk: late sums [in blocks](blocks) go on to the
    /// next.
    block_end: Vec<String>,
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
            integers: space.loops.nest.integers.clone(),
            slots: FxHashMap::default(),
            halves: FxHashMap::default(),
            streams: FxHashMap::default(),
            reduced: FxHashMap::default(),
            stages: RowStages::default(),
            equal: space.loops.nest.equal_members(graph),
            accesses: Vec::new(),
            chunk_top: Vec::new(),
            chunk_end: Vec::new(),
            block_end: Vec::new(),
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
        self.graph.dtype(buffer.value(self.graph))
    }

    // ---- places ----

    fn level(&self, set: u64) -> u8 {
        if set == 0 {
            0
        } else if set & !self.space.loops.row_set() == 0 {
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

    fn finish(mut self) -> NestCode {
        let space = self.space;
        let late = !space.loops.nest.late.is_empty();
        let points: i64 = space.loops.row_count() * space.loops.row_length();
        let (n, grain) = if space.flat() {
            (points, FLAT_GRAIN)
        } else if late {
            (self.chunks(), 1)
        } else {
            let rows = space.loops.product(&self.outer_rows());
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
