//! The loops that a target writes for a nest: which variables number rows, which number the elements of a
//! row, and which of them are one loop.
//!
//! A nest has a variable for each axis that fusion met. Where every index that the code needs treats two
//! variables as one, `index = .. + (outer * extent(inner) + inner) * stride`, one loop over both is shorter,
//! and a vector may run across their border:
//!
//! ```text
//! rows i0=8 i1=128, columns i2=64        x[i0 * 8192 + i1 * 64 + i2]
//! rows i3=1024, columns i2=64            x[i3 * 64 + i2]
//! ```
//!
//! A target learns which indices the code needs only by writing the code. So it writes a nest, joins a pair
//! of variables, and writes the nest again.

use super::nest::Nest;
use crate::index::{Index, Var, bit};

/// Sets of variables are bits of a word. A joint variable gets a new number, so joining stops before numbers
/// reach the width of the word.
const MOST_VARIABLES: usize = 60;

/// A nest and the order of its loops. The last variable of a list runs fastest.
#[derive(Clone, Debug)]
pub struct NestLoops {
    /// The nest; its indices are in terms of `rows` and `cols`.
    pub nest: Nest,
    /// The variables that number rows; none without reductions.
    pub rows: Vec<Var>,
    /// The variables that number the elements of a row; without reductions all variables.
    pub cols: Vec<Var>,
}

impl NestLoops {
    /// The loops of a nest as it was scheduled.
    pub fn new(nest: &Nest) -> Self {
        let list = |set: u64| nest.list(set).iter().map(|&(var, _)| var).collect::<Vec<Var>>();
        let (rows, cols) = match nest.split {
            Some(split) => (list(split.rows), list(split.cols)),
            None => (Vec::new(), list(nest.all())),
        };
        Self {
            nest: nest.clone(),
            rows,
            cols,
        }
    }

    /// How many values a variable takes.
    pub fn extent(&self, var: Var) -> i64 {
        self.nest.extents[var as usize]
    }

    /// How many combinations of values the variables of a list take.
    pub fn product(&self, list: &[Var]) -> i64 {
        list.iter().map(|&var| self.extent(var)).product()
    }

    /// How many rows there are.
    pub fn row_count(&self) -> i64 {
        self.product(&self.rows)
    }

    /// How many elements a row has.
    pub fn row_length(&self) -> i64 {
        self.product(&self.cols)
    }

    /// The bit set of the variables that number rows.
    pub fn row_set(&self) -> u64 {
        self.rows.iter().fold(0, |set, &var| set | bit(var))
    }

    /// Joins two variables that each of `indices` treats as one. Returns whether it found such a pair.
    pub fn collapse(&mut self, indices: &[&Index]) -> bool {
        if self.nest.extents.len() >= MOST_VARIABLES {
            return false;
        }
        for of_rows in [true, false] {
            let list = if of_rows { &self.rows } else { &self.cols };
            let pairs = list
                .iter()
                .flat_map(|&outer| list.iter().map(move |&inner| (outer, inner)));
            let joint = pairs
                .filter(|(outer, inner)| outer != inner)
                .find(|&(outer, inner)| {
                    let extent = self.extent(inner);
                    let as_one = |index: &&Index| match (index.stride(outer), index.stride(inner)) {
                        (Some(a), Some(b)) => a == b * extent,
                        _ => false,
                    };
                    indices.iter().all(as_one)
                });
            if let Some((outer, inner)) = joint {
                self.join(outer, inner, of_rows);
                return true;
            }
        }
        false
    }

    /// Replaces `outer` and `inner` by one variable, at the place of `outer`.
    fn join(&mut self, outer: Var, inner: Var, of_rows: bool) {
        let (a, b) = (self.extent(outer), self.extent(inner));
        let joint = self.nest.extents.len() as Var;
        self.nest.extents.push(a * b);
        let list = if of_rows { &mut self.rows } else { &mut self.cols };
        let at = list.iter().position(|&var| var == outer).unwrap_or(0);
        list[at] = joint;
        list.retain(|&var| var != inner);
        let whole = Index::var(joint, a * b);
        self.nest.substitute(&|var, extent| {
            if var == outer {
                whole.div(b)
            } else if var == inner {
                whole.rem(b)
            } else {
                Index::var(var, extent)
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Buffer;
    use crate::schedule::nest::{Split, Store};
    use kiln_graph::{DType, Graph, TensorType};

    /// Loops over `[8, 128]` rows of 64 elements that are joined as long as a row-major index and `other`
    /// allow.
    fn joined(other: &Index) -> NestLoops {
        let position = Index::var(0, 8)
            .scale(8192)
            .add(&Index::var(1, 128).scale(64))
            .add(&Index::var(2, 64));
        let value = Graph::new("g").parameter(TensorType::new(DType::F32, [8, 128, 64]));
        let nest = Nest {
            extents: vec![8, 128, 64],
            split: Some(Split {
                rows: 0b011,
                cols: 0b100,
            }),
            stores: vec![Store {
                value,
                index: vec![],
                buffer: Buffer::Value(value),
                position,
            }],
            ..Nest::default()
        };
        let mut loops = NestLoops::new(&nest);
        while loops.collapse(&[&loops.nest.stores[0].position.clone(), other]) {}
        loops
    }

    #[test]
    fn variables_are_joined_where_every_index_treats_them_as_one() {
        let loops = joined(&Index::default());
        assert_eq!(
            (loops.rows.as_slice(), loops.cols.as_slice()),
            (&[3][..], &[2][..])
        );
        assert_eq!(loops.extent(3), 1024);
        assert_eq!(loops.nest.stores[0].position.to_string(), "i2 + i3 * 64");
        // A value of each column of rows, as a bias of shape [128] has, keeps the variables apart.
        assert_eq!(joined(&Index::var(1, 128)).rows, [0, 1]);
    }
}
