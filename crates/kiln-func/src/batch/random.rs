//! Random numbers for a batch ([`super::Randomness`] says which).

use kiln_graph::{Op, Value};

use super::{Batch, Lane, Lanes, Randomness, per_element};
use crate::error::Result;

impl Batch {
    /// One draw for all elements. If the elements have seeds, streams or ranges of their own, one draw for
    /// each.
    pub(super) fn random(&mut self, op: &Op, x: &[Lane]) -> Result<Lanes> {
        let Op::Random { kind, dtype, shape } = op else {
            unreachable!("{} draws nothing", op.name())
        };
        let drawn = match self.randomness {
            Randomness::Same => shape.clone(),
            Randomness::Different => self.wide(shape),
        };
        let draw = Op::Random {
            kind: *kind,
            dtype: *dtype,
            shape: drawn,
        };
        if x.iter().all(|lane| !lane.batched) {
            let operands: Vec<Value> = x.iter().map(|lane| lane.value).collect();
            let drawn = self.b.op(draw, &operands)?;
            return Ok([per_element(drawn)].into_iter().collect());
        }
        let mut rows = Vec::with_capacity(self.size);
        for element in 0..self.size {
            let operands = x.iter().map(|&lane| self.number_of(lane, element));
            let operands = operands.collect::<Result<Vec<Value>>>()?;
            let drawn = self.b.op(draw.clone(), &operands)?;
            rows.push(match self.randomness {
                Randomness::Same => self.b.reshape(
                    drawn,
                    [1].into_iter()
                        .chain(shape.iter().copied())
                        .collect::<kiln_graph::Shape>(),
                )?,
                Randomness::Different => self.b.slice(drawn, 0, element, element + 1)?,
            });
        }
        let rows = self.b.op(Op::Concat { axis: 0 }, &rows)?;
        Ok([per_element(rows)].into_iter().collect())
    }

    /// The number that a rank-0 value is for one element.
    fn number_of(&mut self, lane: Lane, element: usize) -> Result<Value> {
        if !lane.batched {
            return Ok(lane.value);
        }
        let number = self.b.slice(lane.value, 0, element, element + 1)?;
        self.b.reshape(number, kiln_graph::Shape::scalar())
    }
}
