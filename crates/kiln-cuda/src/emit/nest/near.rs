//! Which values may be a little off.
//!
//! Functions that round f32 correctly take two to four times the instructions of those that leave an error of
//! some units (`kiln_near_exp` and its neighbours in `kernels/cuda/math.cuh`), and kernels with a few of them
//! wait for arithmetic, not for memory. Where all that becomes of a value is rounded to 16 bits, the error is
//! a hundredth of that rounding's.

use kiln_compiler::schedule::nest::Nest;
use kiln_graph::op::{BinaryOp, Op, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, Value};
use rustc_hash::{FxHashMap, FxHashSet};

/// What becomes of a value, the most demanding last.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Demand {
    /// Nothing but numbers of 16 bits.
    #[default]
    Rounded,
    /// Numbers of more bits, or of a function that multiplies errors.
    Full,
    /// A decision: whatever is off may change a result altogether, be it rounded before or not.
    Exact,
}

/// The members of `nest` whose results may be a little off. Members in `equal` are computed as the one there.
pub(super) fn near(graph: &Graph, nest: &Nest, equal: &FxHashMap<Value, Value>) -> FxHashSet<Value> {
    let first = |value: Value| *equal.get(&value).unwrap_or(&value);
    let mut demands: FxHashMap<Value, Demand> = FxHashMap::default();
    let mut demand = |value: Value, most: Demand| {
        let known = demands.entry(first(value)).or_default();
        *known = most.max(*known);
        *known
    };
    for store in &nest.stores {
        demand(store.value, Demand::Full);
    }
    // What is asked of the function that gives `value`, for which `demand` is.
    let of_function = |value: Value, demand: Demand| match demand {
        Demand::Full if is_half(graph.dtype(value)) => Demand::Rounded,
        demand => demand,
    };
    for &node in nest.members.iter().rev() {
        let data = graph.node(node);
        for &output in &data.outputs {
            let own = of_function(output, demand(output, Demand::Rounded));
            for (place, &operand) in data.inputs.iter().enumerate() {
                demand(operand, own.max(asked(&data.op, place, graph.dtype(operand))));
            }
        }
    }
    demands.retain(|&value, demand| of_function(value, *demand) == Demand::Rounded);
    demands.into_keys().collect()
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// What `op` itself demands of operand number `place`, which is of `dtype`.
fn asked(op: &Op, place: usize, dtype: DType) -> Demand {
    match op {
        // The largest of numbers of 16 bits is looked for by its value: a gradient asks which numbers are
        // equal to it, in a kernel that may compute them anew, and there exactly.
        Op::Reduce {
            op: ReduceOp::Max | ReduceOp::Min,
            ..
        }
        | Op::Binary(BinaryOp::Max | BinaryOp::Min)
            if is_half(dtype) =>
        {
            Demand::Exact
        }
        Op::Unary(op) => match op {
            UnaryOp::Neg
            | UnaryOp::Abs
            | UnaryOp::Exp
            | UnaryOp::Sqrt
            | UnaryOp::Rsqrt
            | UnaryOp::Recip
            | UnaryOp::Tanh
            | UnaryOp::Erf
            | UnaryOp::Sigmoid => Demand::Rounded,
            UnaryOp::Sign
            | UnaryOp::Not
            | UnaryOp::Floor
            | UnaryOp::Ceil
            | UnaryOp::Round
            | UnaryOp::Trunc
            | UnaryOp::IsNan
            | UnaryOp::IsInf => Demand::Exact,
            _ => Demand::Full,
        },
        Op::Binary(op) => match op {
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Max | BinaryOp::Min => {
                Demand::Rounded
            }
            BinaryOp::Pow | BinaryOp::Atan2 => Demand::Full,
            _ => Demand::Exact,
        },
        // What is selected, moved or gathered, not by what.
        Op::Select if place > 0 => Demand::Rounded,
        Op::Gather { .. } | Op::IndexSelect { .. } if place == 0 => Demand::Rounded,
        Op::Cast(to) if to.is_float() => Demand::Rounded,
        Op::Reduce { .. } => Demand::Rounded,
        op if op.is_movement() => Demand::Rounded,
        _ => Demand::Exact,
    }
}
