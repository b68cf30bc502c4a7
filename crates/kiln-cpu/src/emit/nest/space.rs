//! The loops of a nest: which variables number rows and columns, which are one, and along which there are vectors.

use kiln_compiler::index::{Index, Var};
use kiln_compiler::schedule::nest::Nest;

use super::Seen;

/// The loops of a nest, prepared for writing.
#[derive(Clone)]
pub(super) struct Space {
    pub(super) nest: Nest,
    pub(super) rows: Vec<Var>,
    pub(super) cols: Vec<Var>,
    pub(super) vector: Option<Var>,
}

impl Space {
    pub(super) fn new(nest: &Nest) -> Self {
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

    pub(super) fn extent(&self, var: Var) -> i64 {
        self.nest.extents[var as usize]
    }

    pub(super) fn product(&self, list: &[Var]) -> i64 {
        list.iter().map(|&var| self.extent(var)).product()
    }

    /// Joins two variables that every index treats as one; whether it found a pair.
    pub(super) fn collapse(&mut self, seen: &[Seen]) -> bool {
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

    pub(super) fn join(&mut self, outer: Var, inner: Var, of_rows: bool) {
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
    pub(super) fn choose_vector(&mut self, seen: &[Seen], lanes: i64) {
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

    pub(super) fn flat(&self) -> bool {
        self.nest.split.is_none() && self.rows.is_empty()
    }
}
