//! Which values may be a little off.
//!
//! Functions that round f32 correctly take two to four times the instructions of those that leave an error of
//! some units (`kiln_near_exp` and its neighbours in `kernels/cuda/math.cuh`), and kernels with a few of them
//! wait for arithmetic, not for memory. Where all that becomes of a value is rounded to 16 bits, the error is
//! a hundredth of that rounding's. What a decision depends on is exact all the same ([`Nest::decided`]).

use kiln_compiler::schedule::nest::Nest;
use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, Value};
use rustc_hash::{FxHashMap, FxHashSet};

/// The values of `nest` that may be a little off. Members in `equal` are computed as the one there.
pub(super) fn near(graph: &Graph, nest: &Nest, equal: &FxHashMap<Value, Value>) -> FxHashSet<Value> {
    let first = |value: Value| *equal.get(&value).unwrap_or(&value);
    // What becomes more than numbers of 16 bits.
    let mut full: FxHashSet<Value> = nest.stores.iter().map(|store| first(store.value)).collect();
    let mut near = FxHashSet::default();
    for &node in nest.computed(graph).iter().rev() {
        let data = graph.node(node);
        for &output in &data.outputs {
            let is_full = full.contains(&first(output)) && !is_half(graph.dtype(output));
            let operands = data.inputs.iter().enumerate();
            let wanted = operands.filter(|&(place, _)| is_full || is_sensitive(&data.op, place));
            full.extend(wanted.map(|(_, &operand)| first(operand)));
            if !is_full && !nest.decided.contains(&output) {
                near.insert(output);
            }
        }
    }
    near
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Whether `op` may multiply an error of operand number `place`.
fn is_sensitive(op: &Op, place: usize) -> bool {
    match op {
        Op::Unary(op) => {
            use UnaryOp::{Abs, Erf, Exp, Neg, Recip, Rsqrt, Sigmoid, Sqrt, Tanh};
            !matches!(op, Neg | Abs | Exp | Sqrt | Rsqrt | Recip | Tanh | Erf | Sigmoid)
        }
        Op::Binary(op) => {
            use BinaryOp::{Add, Div, Max, Min, Mul, Sub};
            !matches!(op, Add | Sub | Mul | Div | Max | Min)
        }
        Op::Gather { .. } | Op::IndexSelect { .. } => place > 0,
        Op::Select => place == 0,
        Op::Cast(to) => !to.is_float(),
        Op::Reduce { .. } => false,
        op => !op.is_movement(),
    }
}
