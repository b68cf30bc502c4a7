//! The loops of a nest as the CPU runs them: one of the variables goes by vectors.

use kiln_compiler::index::Var;
use kiln_compiler::schedule::loops::NestLoops;
use kiln_compiler::schedule::nest::Nest;

use super::Access;

/// The loops of a nest, prepared for writing.
#[derive(Clone)]
pub(super) struct Space {
    pub(super) loops: NestLoops,
    /// The variable along which there are vectors.
    pub(super) vector: Option<Var>,
}

impl Space {
    pub(super) fn new(nest: &Nest) -> Self {
        Self {
            loops: NestLoops::new(nest),
            vector: None,
        }
    }

    /// Chooses the vector variable: where most accesses are contiguous and the extent fills vectors.
    pub(super) fn choose_vector(&mut self, accesses: &[Access], lanes: i64) {
        let late = !self.loops.nest.late.is_empty();
        let candidates = if late {
            self.loops.cols.clone()
        } else {
            self.loops.cols.iter().chain(&self.loops.rows).copied().collect()
        };
        let score = |var: Var| {
            let mut score = 0i64;
            for access in accesses {
                score += match access.index.stride(var) {
                    Some(0) => 0,
                    Some(1) => 2 * access.weight,
                    _ => -3 * access.weight,
                };
            }
            // A variable that fills few lanes makes few accesses worth it.
            let extent = self.loops.extent(var);
            let rows = self.loops.rows.contains(&var);
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
        if self.loops.nest.split.is_none() {
            // Without reductions all but the vector variable number rows.
            let vector = self.vector;
            self.loops.rows = self
                .loops
                .cols
                .iter()
                .copied()
                .filter(|&var| Some(var) != vector)
                .collect();
            self.loops.cols = vector.into_iter().collect();
        }
        let vector = self.vector;
        for list in [&mut self.loops.rows, &mut self.loops.cols] {
            list.sort_by_key(|&var| Some(var) == vector);
        }
    }

    pub(super) fn flat(&self) -> bool {
        self.loops.nest.split.is_none() && self.loops.rows.is_empty()
    }
}
