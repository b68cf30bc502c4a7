//! Transposes of operations over ranks.
//!
//! The function that is differentiated is the sum of what all ranks compute. So the cotangent of an operand
//! is a sum over ranks, too: what every rank reads of it, every rank sends back.

use kiln_graph::{Collective, CollectiveKind, NodeData, Op, Value};

use super::Reverse;
use crate::error::{FuncError, Origin, Result};

impl Reverse<'_> {
    pub(super) fn collective(&mut self, collective: &Collective, node: &NodeData, ct: Value) -> Result<()> {
        let refuse = |remedy| {
            Err(FuncError::NoDerivative {
                operation: collective.kind.name().to_owned(),
                origin: Origin::new(&node.provenance),
                remedy,
            })
        };
        if collective.started {
            return refuse("it is only started here; transform the graph before collectives are");
        }
        let opposite = |kind| Collective::new(kind, collective.ranks);
        let ct = match collective.kind {
            CollectiveKind::AllReduce => self.b.op(node.op.clone(), &[ct])?,
            CollectiveKind::AllGather => {
                let scatter = opposite(CollectiveKind::ReduceScatter);
                self.b.op(Op::Collective(scatter), &[ct])?
            }
            CollectiveKind::ReduceScatter => {
                let gather = opposite(CollectiveKind::AllGather);
                let joined = self.b.op(Op::Collective(gather), &[ct])?;
                match collective.mean {
                    true => self.b.scale(joined, 1.0 / collective.ranks as f64)?,
                    false => joined,
                }
            }
            CollectiveKind::FromRoot => {
                return refuse("its transpose differs from rank to rank; use forward mode");
            }
        };
        self.accumulate(node.inputs[0], ct)
    }
}
