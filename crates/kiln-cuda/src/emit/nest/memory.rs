//! Loads, stores and addresses: an index becomes C++; neighbours that lie together are moved by one
//! instruction.

use kiln_compiler::index::{Atom, Index, Var, bit};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::nest::Store;
use kiln_graph::{DType, Op};

use super::space::{Lanes, Seen, lanes};
use super::writer::{Key, Place, Register, Writer};
use super::{Argument, c};

/// Bytes that are moved to and from shared memory at once.
const PIECE: usize = 16;

impl Writer<'_> {
    /// Registers for the loaded integers in `index`; the place where all of them exist.
    pub(super) fn load_slots(&mut self, index: &Index) -> Place {
        let mut place = Place::default();
        for (atom, _) in index.terms() {
            place = place.and(match atom {
                Atom::Var { .. } => Place::default(),
                Atom::Div(inner, _) | Atom::Mod(inner, _) => self.load_slots(inner),
                Atom::Data { slot, extent, .. } => self.slot(*slot, *extent).place,
            });
        }
        place
    }

    fn slot(&mut self, slot: u32, extent: i64) -> Register {
        if let Some(register) = self.slots.get(&slot) {
            return register.clone();
        }
        let (indices, at) = self.integers.at(slot);
        let at = at.to_vec();
        let loaded = self.eval(indices, &at);
        let bits = if self.space.wide { "u64" } else { "u32" };
        let wide = c::cast(loaded.dtype, DType::I64, &loaded.name);
        let name = self.fresh("at");
        let ty = self.index_type();
        let line = format!("const {ty} {name} = kiln_index_{bits}({wide}, {extent});");
        self.line(loaded.place, line);
        let register = Register { name, ..loaded };
        self.slots.insert(slot, register.clone());
        register
    }

    /// C++ of an index, of the first neighbour or, with `lane`, of neighbour `l`.
    pub(super) fn index_text(&self, index: &Index, lane: bool) -> String {
        let vector = self.space.vector.filter(|_| lane && self.width > 1);
        let var = |var: Var| match Some(var) == vector {
            true => format!("(i{var} + l)"),
            false => format!("i{var}"),
        };
        let data = |slot: u32| match self.slots.get(&slot) {
            Some(register) => register.name.clone(),
            None => unreachable!("slots are loaded before they are used"),
        };
        index.to_c(&var, &data)
    }

    /// How an index behaves over the neighbours of a thread.
    pub(super) fn lanes(&self, index: &Index) -> Lanes {
        match self.space.vector {
            Some(vector) => lanes(index, vector, self.width),
            None => Lanes::Same,
        }
    }

    /// Notes that `index` was seen.
    pub(super) fn see(&mut self, index: &Index, weight: i64, dtype: DType) {
        self.seen.push(Seen {
            index: index.clone(),
            weight,
            bytes: dtype.size() as i64,
        });
    }

    /// Where the element of `buffer` at `position` is: behind which argument, and at which index from there.
    fn element(&self, buffer: Buffer, position: &Index) -> (Argument, Index) {
        let within = position.shift(-position.offset());
        match usize::try_from(position.offset()) {
            // Indices are not negative, so what runs backwards keeps its constant part.
            Ok(elements @ 1..) if self.parts && within.range().0 >= 0 => {
                let bytes = elements * self.buffer_dtype(buffer).size();
                (Argument::Part(buffer, bytes), within)
            }
            _ => (Argument::Buffer(buffer), position.clone()),
        }
    }

    /// Loads the element of `buffer` at `position`, which is the value `key`.
    pub(super) fn load(&mut self, buffer: Buffer, position: &Index, key: &Key) -> Register {
        let dtype = self.buffer_dtype(buffer);
        // What is said of a position holds whether its constant part stands in the index or in the address.
        let (argument, within) = self.element(buffer, position);
        let (at, within) = (self.argument(argument), &within);
        let data = self.load_slots(position);
        self.see(position, 1, dtype);
        let lanes = if data.lane {
            Lanes::Apart
        } else {
            self.lanes(position)
        };
        let place = Place {
            lane: lanes != Lanes::Same,
            ..self.place(position.vars()).and(data)
        };
        let ty = c::memory_type(dtype);
        let text = c::widened(dtype, &format!("a{at}[{}]", self.index_text(within, place.lane)));
        if place.level < 2 {
            // Of a single row, what is read once does not depend on the row.
            self.read_by_rows.push(buffer.bytes(self.graph));
            return self.define(dtype, place, &text);
        }
        *self.evaluated.entry(key.clone()).or_default() |= 1 << self.pass.min(63);
        if let Some(element) = self.stage_tile(within, data, &format!("a{at}"), dtype) {
            return self.define(dtype, place, &c::widened(dtype, &element));
        }
        let several = self.several.filter(|_| data.level == 0);
        let of_rows = |rows: u64| position.vars() & rows != 0;
        let kept = self.kept.keys.contains(key) || several.is_some_and(of_rows);
        let is_shared = several.is_some_and(|rows| !of_rows(rows));
        let of_column = self
            .space
            .vector
            .is_some_and(|column| position.vars() == bit(column));
        let is_kept_by_block = self.keeps_pieces && is_shared && of_column;
        if (self.width == 1 || data.lane || lanes == Lanes::Same) && !kept {
            return self.define(dtype, place, &text);
        }
        let (first, each) = (self.index_text(within, false), self.index_text(within, true));
        // One variable for all neighbours, in an array over the turns of the loop if it is kept.
        let name = self.fresh("v");
        let own = if kept { format!("{name}[k]") } else { name.clone() };
        let turns = if kept {
            format!("[{}]", self.turns)
        } else {
            String::new()
        };
        let bytes = self.width as usize * dtype.size();
        let (declaration, fill, element) = match lanes {
            _ if self.width == 1 => (
                format!("{ty} {name}{turns};"),
                format!("{own} = a{at}[{first}];"),
                own.clone(),
            ),
            Lanes::Same => (
                format!("{ty} {name}{turns};"),
                format!("{own} = a{at}[{first}];"),
                own.clone(),
            ),
            Lanes::Together => {
                let (vector, element) = match self.moves_eight(dtype) {
                    true => (format!("kiln_eight<{ty}>"), format!("{own}.wide(l)")),
                    false => (
                        format!("kiln_lanes<{ty}, {}>", self.width),
                        format!("{own}.at[l]"),
                    ),
                };
                let there = format!("*(const {vector}*)(a{at} + ({first}))");
                let fill = if kept && self.ahead && bytes >= 4 {
                    format!("kiln_copy_ahead({own}, a{at} + ({first}));")
                } else if is_kept_by_block && bytes.is_multiple_of(PIECE) {
                    format!("{own} = {};", self.keep_in_shared(&vector, &there, bytes))
                } else {
                    format!("{own} = {there};")
                };
                (format!("{vector} {name}{turns};"), fill, element)
            }
            Lanes::Apart => {
                let (width, fill) = (self.width, format!("{own}[l] = a{at}[{each}];"));
                let fill = match data.lane {
                    true => fill,
                    false => format!("#pragma unroll\nfor (int l = 0; l < {width}; l++) {fill}"),
                };
                (format!("{ty} {name}{turns}[{width}];"), fill, format!("{own}[l]"))
            }
        };
        let lines = match data.lane || self.width == 1 {
            _ if kept && data.level < 2 => &mut self.fills,
            true => &mut self.body,
            false => &mut self.loads,
        };
        if kept {
            lines.push(fill);
            self.row_arrays.push(declaration);
            self.kept.arrays.insert(key.clone(), (element.clone(), self.pass));
        } else {
            let lines = if is_shared { &mut self.shared } else { lines };
            lines.push(declaration);
            lines.push(fill);
        }
        match element.ends_with(".wide(l)") {
            true => self.define(dtype, place, &element),
            false => self.define(dtype, place, &c::widened(dtype, &element)),
        }
    }

    /// Puts `there`, a `vector` of so many bytes of a thread's columns, into shared memory where the kernel
    /// begins, and says what it is there (`kiln_product_kept`).
    fn keep_in_shared(&mut self, vector: &str, there: &str, bytes: usize) -> String {
        let (first, ty, column) = (
            self.pieces_kept,
            self.index_type(),
            self.space.vector.unwrap_or(0),
        );
        self.top.push(format!(
            "kiln_product_keep<@_case, {vector}>(size, shared, {first}, [&](const {ty} i{column}) {{ return {there}; }});"
        ));
        self.pieces_kept += (bytes / PIECE) as i64;
        format!("kiln_product_kept<@_case, {vector}>(shared, {first})")
    }

    /// Whether neighbours of `dtype` are moved as `kiln_eight` does behind products
    /// (`kernels/product/warpgroups.cuh`).
    fn moves_eight(&self, dtype: DType) -> bool {
        self.given.is_some() && self.width == 8 && matches!(dtype, DType::BF16 | DType::F16)
    }

    /// The register that is stored for `value`. Where `kiln_store_eight` rounds it to the buffer's type
    /// (`rounds`), that is what the value is rounded from.
    fn stored_register(&mut self, store: &Store, dtype: DType, rounds: bool) -> Register {
        let rounded = self.eval(store.value, &store.index);
        let data = self.graph.def(store.value);
        match data.op {
            Op::Cast(to) if to == dtype && rounds && self.graph.dtype(data.inputs[0]) == DType::F32 => {
                self.eval(data.inputs[0], &store.index)
            }
            _ => rounded,
        }
    }

    /// Evaluates what `store` stores at the point being written and stores it behind everything that the
    /// point loads.
    pub(super) fn store_point(&mut self, store: &Store) {
        let dtype = self.buffer_dtype(store.buffer);
        // As for loads, neighbours lie together where the whole position says so.
        let together = self.lanes(&store.position) == Lanes::Together;
        let eight = together && self.moves_eight(dtype);
        let register = self.stored_register(store, dtype, eight);
        let (argument, within) = self.element(store.buffer, &store.position);
        let at = self.target(argument);
        let (address, x) = (format!("a{at}"), &register.name);
        let ty = c::memory_type(dtype);
        let (first, each) = (self.index_text(&within, false), self.index_text(&within, true));
        let data = self.graph.def(store.value);
        let is_rounded = data.op == Op::Cast(dtype) && self.graph.dtype(data.inputs[0]) != dtype;
        let narrowed = match is_rounded {
            true => c::narrowed_exactly(dtype, x),
            false => c::narrowed(dtype, x),
        };
        let name = self.fresh("y");
        let width = self.width;
        if width == 1 {
            self.body.push(format!("const {ty} {name} = {narrowed};"));
            self.stores.push(format!("{address}[{first}] = {name};"));
        } else if eight {
            self.loads.push(format!("float {name}[{width}];"));
            self.body.push(format!("{name}[l] = {x};"));
            self.stores
                .push(format!("kiln_store_eight<{ty}>({address} + ({first}), {name});"));
        } else if together {
            self.loads.push(format!("kiln_lanes<{ty}, {width}> {name};"));
            self.body.push(format!("{name}.at[l] = {narrowed};"));
            self.stores.push(format!(
                "*(kiln_lanes<{ty}, {width}>*)({address} + ({first})) = {name};"
            ));
        } else {
            self.loads.push(format!("{ty} {name}[{width}];"));
            self.body.push(format!("{name}[l] = {narrowed};"));
            self.stores.push(format!(
                "#pragma unroll\nfor (int l = 0; l < {width}; l++) {address}[{each}] = {name}[l];"
            ));
        }
    }
}
