//! The loops of a nest: which variables number rows and columns, which of them are one, and along which a
//! thread takes neighbours.

use kiln_compiler::index::{Atom, Index, Var, bit};
use kiln_compiler::schedule::loops::NestLoops;
use kiln_compiler::schedule::nest::Nest;

/// An index that ends up as an address or a number.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) index: Index,
    /// How much memory moves there: 0 for a number, 1 for a load, 2 for a store.
    pub(super) weight: i64,
    /// Bytes of an element.
    pub(super) bytes: i64,
}

/// The loops of a nest, prepared for writing.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) loops: NestLoops,
    /// The variable of which a thread takes [`Space::width`] neighbours.
    pub(super) vector: Option<Var>,
    pub(super) width: i64,
    /// Whether positions need 64 bits.
    pub(super) wide: bool,
}

impl Space {
    pub(super) fn new(nest: &Nest) -> Self {
        Self {
            loops: NestLoops::new(nest),
            vector: None,
            width: 1,
            wide: false,
        }
    }

    /// Makes all variables columns: for nests whose results are each a single number, or one number a
    /// point.
    pub(super) fn flatten(&mut self) {
        self.loops.cols = self
            .loops
            .rows
            .drain(..)
            .chain(self.loops.cols.iter().copied())
            .collect();
        self.loops.cols.sort_unstable();
    }

    /// Numbers the variables that are left from 0 on, so that nests that differ in others have one text.
    pub(super) fn renumber(&mut self) {
        let left: Vec<Var> = self.loops.rows.iter().chain(&self.loops.cols).copied().collect();
        let extents: Vec<i64> = left.iter().map(|&var| self.loops.extent(var)).collect();
        let with = |var: Var, extent: i64| match left.iter().position(|&own| own == var) {
            Some(at) => Index::var(at as Var, extent),
            None => Index::default(),
        };
        self.loops.nest.substitute(&with);
        self.loops.nest.extents = extents;
        let rows = self.loops.rows.len() as Var;
        self.loops.cols = (rows..left.len() as Var).collect();
        self.loops.rows = (0..rows).collect();
    }

    /// Chooses along which variable neighbouring threads lie: that in which most accesses are contiguous. It
    /// becomes the last of its list. Of `rows_too`, also variables of rows are candidates.
    pub(super) fn choose_vector(&mut self, seen: &[Seen], rows_too: bool) {
        let score = |var: Var| {
            let mut score = 0i64;
            for seen in seen {
                score += match seen.index.stride(var) {
                    Some(0) => 0,
                    Some(1) => 2 * seen.weight,
                    None if lanes(&seen.index, var, 2) != Lanes::Apart => seen.weight,
                    _ => -3 * seen.weight,
                };
            }
            // A variable with few neighbours makes few accesses contiguous.
            let extent = self.loops.extent(var);
            let worth = if extent < 32 {
                score * extent / 32 - 1
            } else {
                score
            };
            (worth, self.loops.cols.contains(&var), var)
        };
        let rows = self.loops.rows.iter().filter(|_| rows_too);
        self.vector = self
            .loops
            .cols
            .iter()
            .chain(rows)
            .copied()
            .max_by_key(|&var| score(var));
        let vector = self.vector;
        for list in [&mut self.loops.rows, &mut self.loops.cols] {
            list.sort_by_key(|&var| (Some(var) == vector, var));
        }
    }

    /// Chooses how many neighbours a thread takes at once: as many elements of the narrowest tensor that is
    /// accessed along the vector variable as 16 bytes hold, provided that the count divides the variable's
    /// extent (or `ragged`: rows begin anywhere, and a tail is left over), that accesses remain contiguous,
    /// and that registers suffice.
    pub(super) fn choose_width(&mut self, seen: &[Seen], ragged: bool) {
        self.width = 1;
        let Some(vector) = self.vector else { return };
        let extent = self.loops.extent(vector);
        let streams = |width: i64| {
            let seen = seen.iter().filter(|seen| seen.weight > 0);
            let moved = seen.map(move |seen| (seen, lanes(&seen.index, vector, width)));
            moved.filter(|(_, lanes)| *lanes != Lanes::Same)
        };
        let Some(narrowest) = streams(2).map(|(seen, _)| seen.bytes).min() else {
            self.width = if extent % 4 == 0 { 4 } else { 1 };
            return;
        };
        for width in [8, 4, 2] {
            let fits = width * narrowest <= 16 && (extent % width == 0 || (ragged && extent >= width));
            let (mut together, mut apart, mut bytes) = (0, 0, 0);
            for (seen, lanes) in streams(width) {
                bytes += width * seen.bytes;
                match lanes {
                    Lanes::Apart => apart += seen.weight,
                    _ => together += seen.weight,
                }
            }
            // Elements that lie apart need an instruction each, while neighbouring threads would share
            // their cache lines.
            if fits && together > 2 * apart && bytes <= 4 * MOST_LIVE {
                self.width = width;
                return;
            }
        }
    }
}

/// Registers of 32 bits that the elements of one point loop may take while they are loaded.
const MOST_LIVE: i64 = 96;

/// How an index behaves over `width` neighbours of a variable, of which the first is a multiple of `width`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lanes {
    /// It is the same for all.
    Same,
    /// It grows by one, from a multiple of `width`.
    Together,
    /// Anything else.
    Apart,
}

/// How `index` behaves over `width` neighbours of `var`.
pub(super) fn lanes(index: &Index, var: Var, width: i64) -> Lanes {
    if width == 1 {
        // One element is its own neighbourhood.
        return if index.vars() & bit(var) == 0 {
            Lanes::Same
        } else {
            Lanes::Together
        };
    }
    let mut growing = false;
    let mut aligned = index.offset() % width == 0;
    for (atom, factor) in index.terms() {
        let own = match atom {
            Atom::Var { var: own, .. } if *own == var => Lanes::Together,
            atom if atom.vars() & bit(var) == 0 => Lanes::Same,
            Atom::Div(inner, by) => match lanes(inner, var, width) {
                Lanes::Together if by % width == 0 => Lanes::Same,
                Lanes::Same => Lanes::Same,
                _ => Lanes::Apart,
            },
            Atom::Mod(inner, by) => match lanes(inner, var, width) {
                Lanes::Together if by % width != 0 => Lanes::Apart,
                lanes => lanes,
            },
            _ => Lanes::Apart,
        };
        match own {
            Lanes::Same => aligned &= factor % width == 0,
            Lanes::Together if *factor == 1 && !growing => growing = true,
            _ => return Lanes::Apart,
        }
    }
    match (growing, aligned) {
        (false, _) => Lanes::Same,
        (true, true) => Lanes::Together,
        (true, false) => Lanes::Apart,
    }
}
