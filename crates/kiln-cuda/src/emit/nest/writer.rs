//! The state of writing one kernel: its arguments, the registers that exist, and the lines of each place.

use kiln_compiler::index::{Index, bit};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::integers::Integers;
use kiln_compiler::schedule::row_stages::RowStages;
use kiln_graph::{DType, Graph, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use super::near::near;
use super::space::{Seen, Space};
use super::tiles::Tiles;
use super::{Argument, c};

/// A value at an index.
pub(super) type Key = (Value, Vec<Index>);

/// Where a register exists.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Place {
    /// 0 the kernel, 1 the row, 2 the point.
    pub(super) level: u8,
    /// How many row reductions, one behind the other, it waits for.
    pub(super) stage: usize,
    /// Whether it differs between the neighbours of a thread.
    pub(super) lane: bool,
}

impl Place {
    /// The outermost place where what exists here and what exists at `other` both do.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            level: self.level.max(other.level),
            stage: self.stage.max(other.stage),
            lane: self.lane || other.lane,
        }
    }
}

/// A value that is held in a C++ variable.
#[derive(Clone, Debug)]
pub(super) struct Register {
    /// The variable, or a literal.
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) place: Place,
}

/// Values that the first pass over a row keeps for the later ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    /// Which.
    pub(super) keys: FxHashSet<Key>,
    /// The array of each that was written, and the pass that fills it.
    pub(super) arrays: FxHashMap<Key, (String, usize)>,
}

pub(super) struct Writer<'a> {
    pub(super) graph: &'a Graph,
    pub(super) space: &'a Space,
    /// Elements that a thread handles at a time, neighbours along the vector variable.
    pub(super) width: i64,
    pub(super) arguments: Vec<Argument>,
    /// For each argument whether the kernel writes to it.
    pub(super) written: Vec<bool>,
    names: usize,
    /// Lines of the kernel.
    pub(super) top: Vec<String>,
    /// Lines of a row, by stage.
    pub(super) sections: Vec<Vec<String>>,
    /// Where a thread handles several rows of its columns: the variables that number them.
    pub(super) several: Option<u64>,
    /// Lines that load what all of these rows share.
    pub(super) shared: Vec<String>,
    /// Lines of a point: what is loaded for all neighbours, what is done for each, what is stored for all.
    pub(super) loads: Vec<String>,
    /// Lines that load what is kept, all turns of a thread in front of the first that computes.
    pub(super) fills: Vec<String>,
    pub(super) body: Vec<String>,
    pub(super) stores: Vec<String>,
    /// Declarations of arrays that live as long as a row.
    pub(super) row_arrays: Vec<String>,
    pub(super) known: FxHashMap<Key, Register>,
    /// The nest's, and those that are written in another way here: by way of a reshape, from a store whose
    /// loops were joined.
    pub(super) integers: Integers,
    pub(super) slots: FxHashMap<u32, Register>,
    /// The divisor of each register that divides numbers of points.
    pub(super) divisors: FxHashMap<String, String>,
    /// Results of row reductions.
    pub(super) reduced: FxHashMap<Value, Register>,
    pub(super) stages: RowStages,
    /// For results of operations that another member does as well: that member's result.
    pub(super) equal: FxHashMap<Value, Value>,
    pub(super) seen: Vec<Seen>,
    /// The pass being written.
    pub(super) pass: usize,
    /// For values of points that are loaded or computed: the passes that evaluate them, as a bit set.
    pub(super) evaluated: FxHashMap<Key, u64>,
    pub(super) kept: Kept,
    /// How often the loop over a row runs, where it is unrolled.
    pub(super) turns: i64,
    /// The sizes of buffers of which an element was read once for a row, or once for all.
    pub(super) read_by_rows: Vec<usize>,
    /// Bytes of working memory.
    pub(super) scratch: usize,
    /// Whether the constant part of a position goes into the address, so that texts of nests that read or
    /// make different parts of a buffer are equal.
    pub(super) parts: bool,
    /// What a block brings into shared memory to read it across, if it does.
    pub(super) tiles: Option<Tiles>,
    /// Whether what is loaded for several rows is copied to shared memory ahead of its use.
    pub(super) ahead: bool,
    /// Whether a block stays in its columns, and what all of its rows share of these waits in shared memory.
    pub(super) keeps_pieces: bool,
    /// The pieces of sixteen bytes, for each thread side by side, that wait there.
    pub(super) pieces_kept: i64,
    /// The value that is not loaded but in the lanes of `product` ([`super::epilogue`]).
    pub(super) given: Option<Value>,
    /// The values whose functions may be a little off ([`super::near`]).
    pub(super) near: FxHashSet<Value>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(graph: &'a Graph, space: &'a Space) -> Self {
        let nest = &space.loops.nest;
        let equal = nest.equal_members(graph);
        Self {
            graph,
            space,
            width: space.width,
            arguments: Vec::new(),
            written: Vec::new(),
            names: 0,
            top: Vec::new(),
            sections: Vec::new(),
            several: None,
            shared: Vec::new(),
            loads: Vec::new(),
            fills: Vec::new(),
            body: Vec::new(),
            stores: Vec::new(),
            row_arrays: Vec::new(),
            known: FxHashMap::default(),
            integers: nest.integers.clone(),
            slots: FxHashMap::default(),
            divisors: FxHashMap::default(),
            reduced: FxHashMap::default(),
            stages: RowStages::default(),
            near: near(graph, nest, &equal),
            equal,
            seen: Vec::new(),
            pass: 0,
            evaluated: FxHashMap::default(),
            kept: Kept::default(),
            turns: 1,
            read_by_rows: Vec::new(),
            scratch: 0,
            parts: false,
            tiles: None,
            ahead: false,
            keeps_pieces: false,
            pieces_kept: 0,
            given: None,
        }
    }

    pub(super) fn fresh(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names - 1)
    }

    /// The number of an argument, new or known.
    pub(super) fn argument(&mut self, argument: Argument) -> usize {
        if let Some(at) = self.arguments.iter().position(|own| *own == argument) {
            return at;
        }
        self.arguments.push(argument);
        self.written.push(false);
        self.arguments.len() - 1
    }

    /// The number of an argument that is written.
    pub(super) fn target(&mut self, argument: Argument) -> usize {
        let at = self.argument(argument);
        self.written[at] = true;
        at
    }

    /// Declarations of the parameters; working memory is cast where it is used.
    pub(super) fn parameters(&self) -> Vec<String> {
        let arguments = self.arguments.iter().zip(&self.written).enumerate();
        let parameters = arguments.map(|(at, (argument, written))| {
            let constant = if *written { "" } else { "const " };
            format!("{constant}{}* a{at}", self.pointed(argument))
        });
        parameters.collect()
    }

    /// What an argument points to.
    pub(super) fn pointed(&self, argument: &Argument) -> &'static str {
        match argument {
            Argument::Buffer(buffer) | Argument::Part(buffer, _) => {
                c::memory_type(self.buffer_dtype(*buffer))
            }
            Argument::Copied(at, _) => self.pointed(at),
            Argument::Scalar(_) => "kiln_u64",
            Argument::Scratch(_) | Argument::Table(_) => "unsigned char",
        }
    }

    pub(super) fn buffer_dtype(&self, buffer: Buffer) -> DType {
        self.graph.dtype(buffer.value(self.graph))
    }

    /// The type of positions.
    pub(super) fn index_type(&self) -> &'static str {
        if self.space.wide { "kiln_u64" } else { "kiln_u32" }
    }

    // ---- places ----

    pub(super) fn level(&self, set: u64) -> u8 {
        if set == 0 {
            0
        } else if set & !self.space.loops.row_set() == 0 {
            1
        } else {
            2
        }
    }

    /// The place of what depends on a set of variables.
    pub(super) fn place(&self, set: u64) -> Place {
        Place {
            level: self.level(set),
            stage: 0,
            lane: self.space.vector.is_some_and(|vector| set & bit(vector) != 0),
        }
    }

    pub(super) fn line(&mut self, place: Place, text: String) {
        match place.level {
            0 => self.top.push(text),
            1 => {
                while self.sections.len() <= place.stage {
                    self.sections.push(Vec::new());
                }
                self.sections[place.stage].push(text);
            }
            // What all neighbours share stands in front of the loop over them.
            _ if self.width > 1 && !place.lane => self.loads.push(text),
            _ => self.body.push(text),
        }
    }

    pub(super) fn define(&mut self, dtype: DType, place: Place, expression: &str) -> Register {
        let name = self.fresh("x");
        let ty = c::register_type(dtype);
        self.line(place, format!("const {ty} {name} = {expression};"));
        Register { name, dtype, place }
    }

    /// Starts the body of a point: nothing of points is known.
    pub(super) fn begin_points(&mut self) {
        self.known.retain(|_, register| register.place.level < 2);
        self.slots.retain(|_, register| register.place.level < 2);
        self.loads.clear();
        self.fills.clear();
        self.body.clear();
        self.stores.clear();
    }

    /// The text of the body of a point; `guard` is a condition of its stores.
    pub(super) fn end_points(&mut self, guard: Option<&str>) -> String {
        let mut text = String::new();
        let mut lines = |lines: &mut Vec<String>| {
            for line in lines.drain(..) {
                text.push_str(&line);
                text.push('\n');
            }
        };
        lines(&mut self.loads);
        if self.width > 1 && !self.body.is_empty() {
            self.body.insert(
                0,
                format!("#pragma unroll\nfor (int l = 0; l < {}; l++) {{", self.width),
            );
            self.body.push("}".into());
        }
        lines(&mut self.body);
        if let (Some(guard), false) = (guard, self.stores.is_empty()) {
            self.stores.insert(0, format!("if ({guard}) {{"));
            self.stores.push("}".into());
        }
        lines(&mut self.stores);
        self.known.retain(|_, register| register.place.level < 2);
        self.slots.retain(|_, register| register.place.level < 2);
        text
    }

    /// The lines that load what several rows share, behind the declarations of what each of them loads.
    pub(super) fn take_shared(&mut self) -> String {
        let lines = self.row_arrays.drain(..).chain(self.shared.drain(..));
        lines.map(|line| line + "\n").collect()
    }

    /// The lines that load the elements of one of several rows.
    pub(super) fn take_fills(&mut self) -> String {
        self.fills.drain(..).map(|line| line + "\n").collect()
    }

    /// Starts a row: nothing of rows is known.
    pub(super) fn begin_row(&mut self) {
        self.known.retain(|_, register| register.place.level < 1);
        self.slots.retain(|_, register| register.place.level < 1);
        self.reduced.clear();
        self.sections = vec![Vec::new()];
    }
}
