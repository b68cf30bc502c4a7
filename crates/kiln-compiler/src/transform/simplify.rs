//! Simplification: each node is looked at once, with its operands already simplified.
//!
//! - **Common subexpressions.** Two nodes that apply the same operation to the same values are one. Random
//!   numbers are pure functions of seed and stream, so that goes for them too.
//! - **Constants.** Arithmetic on repeated constants is done now, in the precision of the type. `x * 1`,
//!   `x / 1`, `x - 0`, `x + -0` are `x`. `x + 0` stays: for `x = -0` it is not `x`.
//! - **Powers.** A constant exponent of 1, 2, 3 or -1 is multiplications or a reciprocal. `exp(-log(y))`, of
//!   which Burn makes the sigmoid, is `rsqrt(y)^2`: as `1 / y`, but NaN where `y` is negative, and infinity
//!   where it is -0. The error of `log(y)` grows with its size and is one of the exponent; this one is 2 ULP.
//! - **Movements.** Reshapes of reshapes and transposes of transposes are one; those that move nothing are
//!   none.
//! - **Reductions.** Reductions over single elements are reshapes; reductions one dimension at a time are
//!   one reduction over all of them.
//! - **One-hot scatters.** A scatter of one update for each line (the gradient of picking the target's
//!   logit) becomes a selection that compares the coordinate with the index. A selection is pointwise, and
//!   so it can be part of the loop nest around it. It has no index that could be checked, so checks come first.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use kiln_graph::op::{BinaryOp, CompareOp, Dims, Op, ReduceOp, ScatterMode, UnaryOp};
use kiln_graph::{DType, Graph, Node, NodeData, Provenance, Rewriter, Scalar, TypeError, Value};

/// Simplifies `graph`; values keep their meaning.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn simplify(graph: &Graph) -> Result<Graph, TypeError> {
    simplified(graph, true)
}

/// [`simplify`], but scatters stay scatters, for a graph whose indices are checked later.
///
/// # Errors
/// Those of [`simplify`].
pub fn simplify_before_checks(graph: &Graph) -> Result<Graph, TypeError> {
    simplified(graph, false)
}

fn simplified(graph: &Graph, has_checks: bool) -> Result<Graph, TypeError> {
    let mut pass = Simplify {
        has_checks,
        rewriter: Rewriter::new(graph),
        known: FxHashMap::default(),
    };
    for (id, node) in graph.nodes() {
        pass.node(id, node)?;
    }
    Ok(pass.rewriter.finish().without_dead_code())
}

/// An operation, its operands, and whether autocast leaves it as it is.
type Key = (Op, SmallVec<[Value; 3]>, bool);

struct Simplify<'a> {
    /// Whether indices have their checks ([`crate::checks`]), so that operations may lose them.
    has_checks: bool,
    rewriter: Rewriter<'a>,
    known: FxHashMap<Key, SmallVec<[Value; 1]>>,
}

impl Simplify<'_> {
    fn node(&mut self, id: Node, node: &NodeData) -> Result<(), TypeError> {
        let inputs = self.rewriter.map_all(&node.inputs);
        if let [result] = node.outputs.as_slice()
            && let Some(value) = self.rule(&node.op, &inputs, &node.provenance)?
        {
            self.rewriter.replace(*result, value);
            return Ok(());
        }
        let pure = !node.op.is_impure();
        let key = (node.op.clone(), inputs, node.provenance.full_precision);
        if pure && let Some(values) = self.known.get(&key) {
            for (&old, &new) in node.outputs.iter().zip(&values.clone()) {
                self.rewriter.replace(old, new);
            }
            return Ok(());
        }
        let values = self.rewriter.copy(id)?;
        if pure {
            self.known.insert(key, values);
        }
        Ok(())
    }

    /// Adds a node, or finds it.
    fn add(&mut self, op: Op, inputs: &[Value], p: &Provenance) -> Result<Value, TypeError> {
        if let Some(value) = self.rule(&op, inputs, p)? {
            return Ok(value);
        }
        let key = (op.clone(), SmallVec::from_slice(inputs), p.full_precision);
        if let Some(values) = self.known.get(&key) {
            return Ok(values[0]);
        }
        let value = self.rewriter.graph.add(op, inputs, p)?;
        self.known.insert(key, SmallVec::from_slice(&[value]));
        Ok(value)
    }

    /// The constant that every element of `value` is.
    fn splat(&self, value: Value) -> Option<Scalar> {
        let node = self.rewriter.graph.def(value);
        match &node.op {
            Op::Constant { value, dtype } => {
                let rounded = kiln_graph::HostTensor::scalar(*dtype, *value);
                Some(if dtype.is_float() {
                    Scalar::Float(rounded.to_f64s()[0])
                } else {
                    *value
                })
            }
            Op::Broadcast { .. } | Op::Reshape(_) => self.splat(node.inputs[0]),
            _ => None,
        }
    }

    fn float_splat(&self, value: Value) -> Option<f64> {
        match self.splat(value)? {
            Scalar::Float(x) => Some(x),
            _ => None,
        }
    }

    /// `y` if `x` is `-log(y)`, of a type in which the logarithm is not rounded to less than f32.
    fn minus_log(&self, x: Value) -> Option<Value> {
        let graph = &self.rewriter.graph;
        let node = graph.def(x);
        let minus_one = |value: &Value| self.float_splat(*value) == Some(-1.0);
        let log = match (&node.op, node.inputs.as_slice()) {
            (Op::Unary(UnaryOp::Neg), &[log]) => log,
            (Op::Binary(BinaryOp::Mul), &[log, factor]) if minus_one(&factor) => log,
            (Op::Binary(BinaryOp::Mul), &[factor, log]) if minus_one(&factor) => log,
            _ => return None,
        };
        let node = graph.def(log);
        let is_log = matches!(node.op, Op::Unary(UnaryOp::Log));
        (is_log && matches!(graph.dtype(log), DType::F32 | DType::F64)).then(|| node.inputs[0])
    }

    /// A value that stands for `op(inputs)`, if a rule applies.
    fn rule(&mut self, op: &Op, inputs: &[Value], p: &Provenance) -> Result<Option<Value>, TypeError> {
        match op {
            Op::Binary(op) => self.binary(*op, inputs[0], inputs[1], p),
            Op::Unary(UnaryOp::Neg) => {
                let ty = self.rewriter.graph.ty(inputs[0]).clone();
                match self.float_splat(inputs[0]) {
                    Some(x) if ty.dtype.is_float() => self.full(-x, &ty, p).map(Some),
                    _ => Ok(None),
                }
            }
            Op::Unary(UnaryOp::Exp) => {
                let Some(y) = self.minus_log(inputs[0]) else {
                    return Ok(None);
                };
                let root = self.add(Op::Unary(UnaryOp::Rsqrt), &[y], p)?;
                self.add(Op::Binary(BinaryOp::Mul), &[root, root], p).map(Some)
            }
            Op::Reshape(shape) => {
                let graph = &self.rewriter.graph;
                if graph.shape(inputs[0]) == shape {
                    return Ok(Some(inputs[0]));
                }
                let node = graph.def(inputs[0]);
                match (&node.op, node.inputs.first().copied()) {
                    (Op::Reshape(_), Some(x)) => self.add(Op::Reshape(shape.clone()), &[x], p).map(Some),
                    _ => Ok(None),
                }
            }
            Op::Transpose(perm) => {
                if perm.iter().enumerate().all(|(to, &from)| to == from) {
                    return Ok(Some(inputs[0]));
                }
                let node = self.rewriter.graph.def(inputs[0]);
                let Op::Transpose(first) = &node.op else {
                    return Ok(None);
                };
                let both: Dims = perm.iter().map(|&at| first[at]).collect();
                let x = node.inputs[0];
                self.add(Op::Transpose(both), &[x], p).map(Some)
            }
            Op::Broadcast { shape, dims } => {
                let same =
                    self.rewriter.graph.shape(inputs[0]) == shape && dims.iter().copied().eq(0..shape.rank());
                Ok(same.then_some(inputs[0]))
            }
            Op::Cast(dtype) => Ok(self.cast(*dtype, inputs[0])),
            Op::Slice {
                starts,
                limits,
                steps,
            } => {
                let shape = self.rewriter.graph.shape(inputs[0]);
                let whole = starts.iter().all(|&s| s == 0)
                    && limits.as_slice() == shape.dims()
                    && steps.iter().all(|&s| s == 1);
                Ok(whole.then_some(inputs[0]))
            }
            Op::Concat { .. } if inputs.len() == 1 => Ok(Some(inputs[0])),
            Op::Reduce { op, axes } => self.reduce(*op, axes, inputs[0], p),
            Op::Scatter { axis, mode } if self.has_checks => self.one_hot(*axis, *mode, inputs, p),
            _ => Ok(None),
        }
    }

    /// A cast to the type that the value has, or had before it was cast to a float type that holds all of its
    /// numbers.
    fn cast(&self, dtype: DType, x: Value) -> Option<Value> {
        let graph = &self.rewriter.graph;
        if graph.dtype(x) == dtype {
            return Some(x);
        }
        let node = graph.def(x);
        let holds_all = match graph.dtype(x) {
            DType::F32 => matches!(dtype, DType::F16 | DType::BF16),
            DType::F64 => matches!(dtype, DType::F16 | DType::BF16 | DType::F32),
            _ => false,
        };
        match (&node.op, node.inputs.first()) {
            (Op::Cast(_), Some(&inner)) if holds_all && graph.dtype(inner) == dtype => Some(inner),
            _ => None,
        }
    }

    /// Reductions over single elements are reshapes; a reduction of a reduction, maybe with dimensions of 1
    /// put in between, is one.
    fn reduce(
        &mut self,
        op: ReduceOp,
        axes: &Dims,
        x: Value,
        p: &Provenance,
    ) -> Result<Option<Value>, TypeError> {
        let graph = &self.rewriter.graph;
        let shape = graph.shape(x).clone();
        let result = shape.without(axes);
        if axes.iter().all(|&axis| shape[axis] == 1) {
            return self.add(Op::Reshape(result), &[x], p).map(Some);
        }
        let inner = match graph.def(x) {
            NodeData {
                op: Op::Reshape(_),
                inputs,
                ..
            } => inputs[0],
            _ => x,
        };
        let NodeData {
            op: Op::Reduce {
                op: first,
                axes: gone,
            },
            inputs,
            ..
        } = graph.def(inner)
        else {
            return Ok(None);
        };
        let y = inputs[0];
        let whole = graph.shape(y);
        // Dimensions of more than one element correspond in order, unless the reshape does more than insert
        // ones.
        let of_x: Dims = (0..shape.rank()).filter(|&axis| shape[axis] != 1).collect();
        let of_y: Dims = (0..whole.rank())
            .filter(|axis| whole[*axis] != 1 && !gone.contains(axis))
            .collect();
        let same = of_x
            .iter()
            .map(|&axis| shape[axis])
            .eq(of_y.iter().map(|&axis| whole[axis]));
        if *first != op || !same {
            return Ok(None);
        }
        let mut all: Dims = gone.clone();
        all.extend(
            of_x.iter()
                .zip(&of_y)
                .filter(|(from, _)| axes.contains(from))
                .map(|(_, &to)| to),
        );
        all.sort_unstable();
        let reduced = self.add(Op::Reduce { op, axes: all }, &[y], p)?;
        self.add(Op::Reshape(result), &[reduced], p).map(Some)
    }

    fn full(&mut self, value: f64, ty: &kiln_graph::TensorType, p: &Provenance) -> Result<Value, TypeError> {
        let constant = Op::Constant {
            value: Scalar::Float(value),
            dtype: ty.dtype,
        };
        let scalar = self.add(constant, &[], p)?;
        if ty.shape.rank() == 0 {
            return Ok(scalar);
        }
        let fill = Op::Broadcast {
            shape: ty.shape.clone(),
            dims: Dims::new(),
        };
        self.add(fill, &[scalar], p)
    }

    fn binary(
        &mut self,
        op: BinaryOp,
        a: Value,
        b: Value,
        p: &Provenance,
    ) -> Result<Option<Value>, TypeError> {
        let ty = self.rewriter.graph.ty(a).clone();
        if !ty.dtype.is_float() {
            return Ok(None);
        }
        let (x, y) = (self.float_splat(a), self.float_splat(b));
        // Rounding to f64 and then to the type is rounding once: f64 has more than twice the digits of the
        // narrower types.
        if let (Some(x), Some(y)) = (x, y) {
            let value = match op {
                BinaryOp::Add => x + y,
                BinaryOp::Sub => x - y,
                BinaryOp::Mul => x * y,
                BinaryOp::Div => x / y,
                _ => return Ok(None),
            };
            return self.full(value, &ty, p).map(Some);
        }
        let minus_zero = |x: Option<f64>| x.is_some_and(|x| x == 0.0 && x.is_sign_negative());
        let plus_zero = |x: Option<f64>| x.is_some_and(|x| x == 0.0 && x.is_sign_positive());
        let kept = match op {
            BinaryOp::Add if minus_zero(y) => Some(a),
            BinaryOp::Add if minus_zero(x) => Some(b),
            BinaryOp::Sub if plus_zero(y) => Some(a),
            BinaryOp::Mul | BinaryOp::Div if y == Some(1.0) => Some(a),
            BinaryOp::Mul if x == Some(1.0) => Some(b),
            _ => None,
        };
        if kept.is_some() {
            return Ok(kept);
        }
        let (BinaryOp::Pow, Some(exponent)) = (op, y) else {
            return Ok(None);
        };
        let value = if exponent == 1.0 {
            a
        } else if exponent == 2.0 {
            self.add(Op::Binary(BinaryOp::Mul), &[a, a], p)?
        } else if exponent == 3.0 {
            let square = self.add(Op::Binary(BinaryOp::Mul), &[a, a], p)?;
            self.add(Op::Binary(BinaryOp::Mul), &[square, a], p)?
        } else if exponent == -1.0 {
            self.add(Op::Unary(UnaryOp::Recip), &[a], p)?
        } else {
            // Not 0.5: pow(-0, 0.5) is 0 and pow(-inf, 0.5) is inf, where the square root is -0 and NaN.
            return Ok(None);
        };
        Ok(Some(value))
    }

    fn one_hot(
        &mut self,
        axis: usize,
        mode: ScatterMode,
        inputs: &[Value],
        p: &Provenance,
    ) -> Result<Option<Value>, TypeError> {
        let (x, indices, updates) = (inputs[0], inputs[1], inputs[2]);
        let graph = &self.rewriter.graph;
        let (ty, lines) = (graph.ty(x).clone(), graph.ty(indices).clone());
        let single = lines.shape[axis] == 1 && lines.shape == ty.shape.with(axis, 1) && ty.numel() > 0;
        if !single || !matches!(mode, ScatterMode::Add | ScatterMode::Assign) {
            return Ok(None);
        }
        let spread = Op::Broadcast {
            shape: ty.shape.clone(),
            dims: (0..ty.shape.rank()).collect(),
        };
        // Bytes count to 255: along a longer axis their numbers would come again.
        let (dtype, indices) = match lines.dtype.size() {
            1 | 2 => {
                let cast = Op::Cast(DType::I32);
                (DType::I32, self.add(cast, &[indices], p)?)
            }
            _ => (lines.dtype, indices),
        };
        // Out-of-range indices of the program match no coordinate.
        let coordinate = Op::Iota {
            dtype,
            shape: ty.shape.clone(),
            axis,
        };
        let coordinate = self.add(coordinate, &[], p)?;
        let at = self.add(spread.clone(), &[indices], p)?;
        let hit = self.add(Op::Compare(CompareOp::Eq), &[coordinate, at], p)?;
        let updates = self.add(spread, &[updates], p)?;
        let zero = matches!(self.splat(x), Some(Scalar::Float(v)) if v == 0.0 && v.is_sign_positive());
        let updated = match mode {
            ScatterMode::Add if !zero => self.add(Op::Binary(BinaryOp::Add), &[x, updates], p)?,
            _ => updates,
        };
        self.add(Op::Select, &[hit, updated, x], p).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use kiln_graph::{HostTensor, interpret};

    use super::*;

    /// What is special about a logarithm is special about what stands for it.
    #[test]
    fn exponentials_of_negative_logarithms_keep_what_is_special() {
        let text = "graph @inverse {
  %y = parameter 0 : f32[9]
  %log = log %y : f32[9]
  %minus = neg %log : f32[9]
  %e = exp %minus : f32[9]
  return %e
}";
        let before = Graph::parse(text).unwrap();
        let after = simplify(&before).unwrap();
        assert!(!after.to_string().contains("log"), "{after}");
        let values = [
            1.0,
            0.0,
            -0.0,
            -2.0,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            1e-45,
            3e38,
        ];
        let y = HostTensor::from_floats(DType::F32, [9], values);
        let [before, after] = [before, after].map(|graph| {
            let results = interpret(&graph, std::slice::from_ref(&y), &[]).unwrap();
            results[0].to_f64s()
        });
        for ((y, a), b) in values.iter().zip(before).zip(after) {
            let near = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-4 * a.abs();
            assert!(near, "exp(-log({y})): {a} was {b}");
        }
    }
}
