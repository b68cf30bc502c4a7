//! Ranges: intervals of a value's elements that are known without running the graph.
//!
//! One walk over the graph gives each integer value the smallest interval that its operation and its
//! operands' intervals allow. Ranges answer whether an index can be out of range at all
//! ([`crate::indices`]): coordinates, positions of a largest element and clamped numbers never are, so no
//! executor needs to look at them.
//!
//! ```text
//!   %i = iota {axis=0} : i64[8]        0 ..= 7
//!   %j = parameter 0 : i64[8]          all of i64
//!   %k = min %j, %seven                all of i64 below 7
//!   %l = max %k, %zero                 0 ..= 7
//! ```
//!
//! The result of an operation that could wrap has the whole range of its type. Of the float types only f64
//! is followed: a bound computed here in f64 is exactly what the operation computes from the extreme
//! operand. An interval of floats also says that no element is NaN.

use crate::op::{BinaryOp, ReduceOp, ScatterMode, UnaryOp};
use crate::{DType, Graph, NodeData, Op, Scalar, Value};

/// An interval that holds every element of a value; both ends belong to it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Range {
    /// Integers.
    Int(i128, i128),
    /// Finite floats.
    Float(f64, f64),
}

impl Range {
    /// Everything that `dtype` can hold; none for floats. Truth values count as 0 and 1.
    pub fn of(dtype: DType) -> Option<Self> {
        let bits = dtype.size() as u32 * 8;
        match dtype {
            DType::Bool => Some(Range::Int(0, 1)),
            _ if dtype.is_signed_int() => Some(Range::Int(-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)),
            _ if dtype.is_unsigned_int() => Some(Range::Int(0, (1i128 << bits) - 1)),
            _ => None,
        }
    }

    /// Whether every element is an index into `extent` elements.
    pub fn is_below(self, extent: usize) -> bool {
        matches!(self, Range::Int(low, high) if low >= 0 && high < extent as i128)
    }

    /// The smallest interval that holds both.
    fn union(self, other: Self) -> Option<Self> {
        match (self, other) {
            (Range::Int(a, b), Range::Int(c, d)) => Some(Range::Int(a.min(c), b.max(d))),
            (Range::Float(a, b), Range::Float(c, d)) => Some(Range::Float(a.min(c), b.max(d))),
            _ => None,
        }
    }

    /// This range if `dtype` holds it exactly: integers without wrapping, finite floats of 64 bits.
    fn within(self, dtype: DType) -> Option<Self> {
        match (self, Range::of(dtype)) {
            (Range::Int(low, high), Some(Range::Int(least, most))) => {
                (least <= low && high <= most).then_some(self)
            }
            (Range::Float(low, high), _) => {
                (dtype == DType::F64 && low.is_finite() && high.is_finite()).then_some(self)
            }
            _ => None,
        }
    }
}

/// What is known of each value of a graph.
#[derive(Clone, Debug)]
pub struct Ranges(Vec<Option<Range>>);

impl Ranges {
    /// Walks over `graph` once.
    pub fn new(graph: &Graph) -> Self {
        let mut ranges = Self(Vec::with_capacity(graph.num_values()));
        for (_, node) in graph.nodes() {
            for (result, &value) in node.outputs.iter().enumerate() {
                let dtype = graph.dtype(value);
                let found = by_operation(graph, node, result, |value| ranges.get(value));
                ranges.0.push(found.or_else(|| Range::of(dtype)));
            }
        }
        ranges
    }

    /// The range of `value`; none if nothing is known (floats).
    pub fn get(&self, value: Value) -> Option<Range> {
        self.0[value.as_u32() as usize]
    }
}

/// Values that a [`Bounds`] goes through at most.
const LONGEST: usize = 64;

/// How the range of one value follows from the ranges of arguments, which are known only when a step is
/// called.
///
/// ```text
///   %labels = parameter 0 : i32[8]             -1 ..= 9 in this call
///   %known = max %labels, %zero                 0 ..= 9
/// ```
#[derive(Clone, Debug)]
pub struct Bounds {
    /// The values that it depends on and itself, in program order, each with what is known of it in every
    /// call.
    values: Vec<(Value, Option<Range>)>,
}

impl Bounds {
    /// How the range of `value` follows; none if no argument says anything about it, or it takes many
    /// operations.
    pub fn of(graph: &Graph, ranges: &Ranges, value: Value) -> Option<Self> {
        let mut found = Vec::new();
        let mut open = vec![value];
        let mut has_argument = false;
        while let Some(value) = open.pop() {
            if graph.dtype(value).is_float() || found.contains(&value) {
                continue;
            }
            if found.len() == LONGEST {
                return None;
            }
            found.push(value);
            let node = graph.def(value);
            has_argument |= matches!(node.op, Op::Parameter { .. });
            open.extend_from_slice(&node.inputs);
        }
        found.sort_unstable();
        let values = found
            .into_iter()
            .map(|value| (value, ranges.get(value)))
            .collect();
        has_argument.then_some(Self { values })
    }

    /// The range of the value in a call in which arguments have the ranges `given`, where they are known.
    pub fn range(&self, graph: &Graph, given: impl Fn(u32) -> Option<Range>) -> Option<Range> {
        let mut found: Vec<(Value, Option<Range>)> = Vec::with_capacity(self.values.len());
        for &(value, always) in &self.values {
            let get = |of: Value| {
                let known = found.binary_search_by_key(&of, |&(value, _)| value);
                known.ok().and_then(|at| found[at].1)
            };
            let node = graph.def(value);
            let own = match node.op {
                Op::Parameter { index, .. } => {
                    given(index).and_then(|range| range.within(graph.dtype(value)))
                }
                _ => {
                    let result = node.outputs.iter().position(|&output| output == value);
                    result.and_then(|result| by_operation(graph, node, result, get))
                }
            };
            found.push((value, own.or(always)));
        }
        // The value itself is the last: its operands come before it.
        found.last().and_then(|&(_, range)| range)
    }
}

/// The range of one result of `node` by its operation and those of its operands; none if that says nothing.
fn by_operation(
    graph: &Graph,
    node: &NodeData,
    result: usize,
    get: impl Fn(Value) -> Option<Range>,
) -> Option<Range> {
    let of = |operand: usize| get(node.inputs[operand]);
    let union = |values: &[Value]| {
        let (&first, rest) = values.split_first()?;
        rest.iter().try_fold(get(first)?, |all, &value| {
            get(value).and_then(|range| all.union(range))
        })
    };
    let extent = |axis: usize| graph.shape(node.inputs[0])[axis] as i128;
    let position = |extent: i128| Some(Range::Int(0, (extent - 1).max(0)));
    let range = match &node.op {
        Op::Constant { value, dtype } => constant(*value, *dtype),
        Op::Iota { dtype, shape, axis } => {
            let last = shape[*axis].saturating_sub(1);
            match dtype.is_float() {
                true => Some(Range::Float(0.0, last as f64)),
                false => Some(Range::Int(0, last as i128)),
            }
        }
        Op::Unary(op) => unary(*op, of(0)?),
        Op::Binary(op) => binary(*op, of(0)?, of(1)?),
        Op::Cast(dtype) => cast(of(0)?, *dtype),
        Op::Select => union(&node.inputs[1..]),
        Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Flip(_)
        | Op::Gather { .. }
        | Op::IndexSelect { .. } => of(0),
        Op::Pad { .. } | Op::Concat { .. } | Op::UpdateSlice { .. } => union(&node.inputs),
        // A reduction of nothing gives an extreme of the type.
        Op::Reduce {
            op: ReduceOp::Max | ReduceOp::Min,
            axes,
        } => axes.iter().all(|&axis| extent(axis) > 0).then(|| of(0))?,
        Op::Cumulative {
            op: ReduceOp::Max | ReduceOp::Min,
            ..
        } => of(0),
        Op::Scatter {
            mode: ScatterMode::Assign | ScatterMode::Max | ScatterMode::Min,
            ..
        }
        | Op::IndexPut {
            mode: ScatterMode::Assign | ScatterMode::Max | ScatterMode::Min,
            ..
        } => of(0)?.union(of(2)?),
        Op::ArgReduce { axis, .. } => position(extent(*axis)),
        Op::Sort { axis, .. } | Op::TopK { axis, .. } if result == 1 => position(extent(*axis)),
        Op::Sort { .. } | Op::TopK { .. } => of(0),
        Op::MaxPoolWithIndices { .. } if result == 1 => {
            let spatial = &graph.shape(node.inputs[0])[2..];
            position(spatial.iter().product::<usize>() as i128)
        }
        _ => None,
    };
    range.and_then(|range| range.within(graph.dtype(node.outputs[result])))
}

fn constant(value: Scalar, dtype: DType) -> Option<Range> {
    match (dtype.is_float(), value.cast(dtype)) {
        (true, Scalar::Float(x)) => Some(Range::Float(x, x)),
        (false, Scalar::Int(x)) => Some(Range::Int(x.into(), x.into())),
        (false, Scalar::UInt(x)) => Some(Range::Int(x.into(), x.into())),
        (false, Scalar::Bool(x)) => Some(Range::Int(x.into(), x.into())),
        _ => None,
    }
}

fn unary(op: UnaryOp, x: Range) -> Option<Range> {
    let steps = |step: fn(f64) -> f64| match x {
        Range::Float(low, high) => Some(Range::Float(step(low), step(high))),
        Range::Int(..) => None,
    };
    match (op, x) {
        (UnaryOp::Neg, Range::Int(low, high)) => Some(Range::Int(-high, -low)),
        (UnaryOp::Neg, Range::Float(low, high)) => Some(Range::Float(-high, -low)),
        (UnaryOp::Abs, Range::Int(low, high)) if low >= 0 => Some(Range::Int(low, high)),
        (UnaryOp::Abs, Range::Int(low, high)) => Some(Range::Int(0, high.max(-low))),
        (UnaryOp::Sign, Range::Int(low, high)) => Some(Range::Int(low.signum(), high.signum())),
        (UnaryOp::Floor, _) => steps(f64::floor),
        (UnaryOp::Ceil, _) => steps(f64::ceil),
        (UnaryOp::Round, _) => steps(f64::round_ties_even),
        (UnaryOp::Trunc, _) => steps(f64::trunc),
        _ => None,
    }
}

fn binary(op: BinaryOp, a: Range, b: Range) -> Option<Range> {
    match (a, b) {
        (Range::Int(a, b), Range::Int(c, d)) => integers(op, (a, b), (c, d)),
        (Range::Float(a, b), Range::Float(c, d)) => floats(op, (a, b), (c, d)),
        _ => None,
    }
}

/// The interval of the exact result. It may exceed the operands' type: the operation would then wrap, and
/// the caller knows nothing of its result.
fn integers(op: BinaryOp, (a, b): (i128, i128), (c, d): (i128, i128)) -> Option<Range> {
    let hull = |corners: [i128; 4]| {
        let (low, high) = (corners.iter().min()?, corners.iter().max()?);
        Some(Range::Int(*low, *high))
    };
    match op {
        BinaryOp::Add => Some(Range::Int(a + c, b + d)),
        BinaryOp::Sub => Some(Range::Int(a - d, b - c)),
        BinaryOp::Mul => hull([
            a.checked_mul(c)?,
            a.checked_mul(d)?,
            b.checked_mul(c)?,
            b.checked_mul(d)?,
        ]),
        BinaryOp::Div if c > 0 => hull([a / c, a / d, b / c, b / d]),
        BinaryOp::Rem if c > 0 => Some(Range::Int(0, d - 1)),
        BinaryOp::Max => Some(Range::Int(a.max(c), b.max(d))),
        BinaryOp::Min => Some(Range::Int(a.min(c), b.min(d))),
        BinaryOp::And if a >= 0 && c >= 0 => Some(Range::Int(0, b.min(d))),
        BinaryOp::And if a >= 0 => Some(Range::Int(0, b)),
        BinaryOp::And if c >= 0 => Some(Range::Int(0, d)),
        BinaryOp::Shr if c == d && (0..64).contains(&c) => Some(Range::Int(a >> c, b >> c)),
        _ => None,
    }
}

fn floats(op: BinaryOp, (a, b): (f64, f64), (c, d): (f64, f64)) -> Option<Range> {
    match op {
        BinaryOp::Add => Some(Range::Float(a + c, b + d)),
        BinaryOp::Sub => Some(Range::Float(a - d, b - c)),
        BinaryOp::Mul => {
            let corners = [a * c, a * d, b * c, b * d];
            let low = corners.into_iter().fold(f64::INFINITY, f64::min);
            let high = corners.into_iter().fold(f64::NEG_INFINITY, f64::max);
            Some(Range::Float(low, high))
        }
        BinaryOp::Max => Some(Range::Float(a.max(c), b.max(d))),
        BinaryOp::Min => Some(Range::Float(a.min(c), b.min(d))),
        _ => None,
    }
}

fn cast(x: Range, dtype: DType) -> Option<Range> {
    /// The largest magnitude up to which floats of 64 bits represent every integer.
    const EXACT: i128 = 1 << 53;
    match (x, dtype) {
        (Range::Int(low, high), DType::Bool) if low > 0 || high < 0 => Some(Range::Int(1, 1)),
        (Range::Int(0, 0), DType::Bool) => Some(Range::Int(0, 0)),
        (_, DType::Bool) => None,
        (Range::Int(low, high), DType::F64) if -EXACT <= low && high <= EXACT => {
            Some(Range::Float(low as f64, high as f64))
        }
        (Range::Int(..), _) if dtype.is_float() => None,
        (Range::Float(..), _) if dtype.is_float() => (dtype == DType::F64).then_some(x),
        (Range::Int(..), _) => Some(x),
        // Truncated and saturated.
        (Range::Float(low, high), _) => {
            let Some(Range::Int(least, most)) = Range::of(dtype) else {
                return None;
            };
            Some(Range::Int(
                (low as i128).clamp(least, most),
                (high as i128).clamp(least, most),
            ))
        }
    }
}
