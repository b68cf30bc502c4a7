//! Loads, stores and addresses: an index becomes C, whole vectors are read where the vector variable is
//! contiguous.

use kiln_compiler::index::{Atom, Index, Var};
use kiln_compiler::schedule::Buffer;
use kiln_graph::DType;

use super::{Access, Argument, Lanes, Register, Writer, c};

impl Writer<'_> {
    /// Registers for the loaded integers in `index`; the deepest level and stage among them.
    pub(super) fn load_slots(&mut self, index: &Index) -> (u8, usize) {
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

    pub(super) fn slot(&mut self, slot: u32, extent: i64) -> Register {
        if let Some(register) = self.slots.get(&slot) {
            return register.clone();
        }
        let (indices, at) = self.integers.at(slot);
        let at = at.to_vec();
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
    pub(super) fn index_text(&self, index: &Index, lane: bool) -> String {
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
    pub(super) fn lane_stride(&self, index: &Index) -> Option<i64> {
        self.space.vector.and_then(|vector| index.stride(vector))
    }

    pub(super) fn load(&mut self, buffer: Buffer, position: &Index, weight: i64) -> Register {
        let dtype = self.buffer_dtype(buffer);
        let at = self.argument(Argument::Buffer(buffer));
        let (data_level, stage) = self.load_slots(position);
        self.accesses.push(Access {
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
                    let how = if self.runs_ahead(buffer, position) {
                        "lda"
                    } else {
                        "ld"
                    };
                    format!("{how}_{dtype}(a{at} + {})", self.index_text(position, false))
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

    /// Whether the load of a whole vector at `position` asks for what lies ahead of it as well: the loops
    /// walk through the buffer from its first element to its last, and this is the first pass over a row that
    /// reads it. Processors ask by themselves too, but bodies of some fifty instructions an element leave
    /// most of the latency visible: GELU's gradient with its bias's sum took 1.5 ms for 1.2 million elements,
    /// and 0.85 with this (two cores, half of the tensors in memory). Extents do not decide, so that a family
    /// of shapes has one text.
    fn runs_ahead(&mut self, buffer: Buffer, position: &Index) -> bool {
        if self.named || self.vector_rows() {
            return false;
        }
        let loops = &self.space.loops;
        let (columns, vector) = self.column_loops();
        let inwards = self.outer_rows().into_iter().chain(columns).chain(vector);
        let outwards: Vec<Var> = inwards.collect();
        let mut run = 1;
        for &var in outwards.iter().rev() {
            let extent = loops.extent(var);
            if extent != 1 && position.stride(var) != Some(run) {
                return false;
            }
            run *= extent;
        }
        *self.streams.entry(buffer).or_insert(self.pass) == self.pass
    }

    /// The text that stores `register`.
    pub(super) fn store_text(
        &self,
        dtype: DType,
        address: &str,
        position: &Index,
        register: &Register,
    ) -> String {
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
        let (dtype, value) = match self.halves.get(&register.name) {
            Some(half) if dtype == register.dtype => (DType::U16, half.clone()),
            _ => (dtype, self.spread(register)),
        };
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
}
