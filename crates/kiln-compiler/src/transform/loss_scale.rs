//! Dynamic loss scaling, inside the step.
//!
//! Gradients that are stored in `f16` underflow below 6e-8. The backward pass is linear in the gradient
//! that it begins with. So the pass multiplies that gradient by a *scale*, and divides the values that
//! leave the backward pass by it. A scale that is too large makes infinities: then the step is skipped,
//! which is a select between the old and the new value of each state, and the scale shrinks. After a number
//! of steps without a skipped one it grows:
//!
//! ```text
//! skipped step    scale := max(scale * backoff, 1)      counter := 0               skipped := skipped + 1
//! other step      counter + 1 = interval:  scale := min(scale * growth, 2^24)      counter := 0
//!                 else                                  counter := counter + 1
//! ```
//!
//! (P. Micikevicius and others, *Mixed precision training*, 2018, section 3.2.) The host reads nothing: the
//! scale, the counter and the number of skipped steps are three more arguments and three more outputs of
//! the graph, of shape `[1]`, each output in the memory of its argument.
//!
//! The pass works on a step as it was recorded, with phases, before any pass that merges constants: the
//! gradient that the backward pass begins with is a tensor of ones like others.

use cranelift_entity::SecondaryMap;
use kiln_graph::op::{BinaryOp, CompareOp, Dims, Op, ReduceOp, ScatterMode, UnaryOp};
use kiln_graph::{
    DType, Graph, Node, NodeData, Phase, Provenance, Rewriter, Scalar, Shape, TensorType, TypeError, Value,
};
use rustc_hash::FxHashMap;

/// The largest scale.
const LARGEST: f64 = (1u32 << 24) as f64;

/// How the scale moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// What the scale is multiplied by after `interval` steps; a power of two keeps scaling exact.
    pub growth: f64,
    /// What it is multiplied by when a gradient was not finite.
    pub backoff: f64,
    /// Steps without a skipped one from one growth to the next.
    pub interval: i32,
}

impl Default for LossScaling {
    fn default() -> Self {
        Self {
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
        }
    }
}

/// A state that a skipped step leaves as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedState {
    /// The output that is its next value.
    pub output: usize,
    /// The tensor argument that is its last one.
    pub argument: usize,
}

/// Why the loss of a step cannot be scaled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LossScaleError {
    /// There is no gradient to begin with.
    #[error("the step has no backward pass whose loss could be scaled")]
    NoSeed,
    /// A state and its next value have different types, or do not exist.
    #[error("output {output} is no next value of argument {argument}")]
    State {
        /// Number of the output.
        output: usize,
        /// Number of the argument.
        argument: usize,
    },
    /// An operation of the backward pass is not linear in the gradient.
    #[error("`{operation}` is not linear in the gradient of the loss, so the loss cannot be scaled")]
    NotLinear {
        /// The operation and where it is, as the program knows it.
        operation: String,
    },
    /// A node is ill typed: a bug of the pass, or a seed that is no float.
    #[error(transparent)]
    Type(#[from] TypeError),
}

/// `graph` with a scaled loss. `seeds` are the values that its backward pass begins with (the gradients of
/// losses with respect to themselves), `states` the values that a skipped step does not change. The last
/// three arguments are the scale (`f32[1]`), the counter of steps since the scale moved and the number of
/// skipped steps (`i32[1]`), and so are the last three outputs.
///
/// # Errors
/// If there are no seeds, or a state does not exist.
pub fn scale_loss(
    graph: &Graph,
    scaling: &LossScaling,
    seeds: &[Value],
    states: &[SkippedState],
) -> Result<Graph, LossScaleError> {
    if seeds.is_empty() {
        return Err(LossScaleError::NoSeed);
    }
    for &SkippedState { output, argument } in states {
        let next = graph.outputs.get(output).map(|output| graph.ty(output.value));
        let last = graph.parameters().get(argument).map(|&value| graph.ty(value));
        if next.is_none() || next != last {
            return Err(LossScaleError::State { output, argument });
        }
    }
    Pass::new(graph, seeds)?.run(scaling, seeds, states)
}

/// The values that are multiples of the seeds: those that the forward and the backward pass compute from
/// them linearly.
fn multiples(graph: &Graph, seeds: &[Value]) -> Result<SecondaryMap<Value, bool>, LossScaleError> {
    let mut scaled: SecondaryMap<Value, bool> = SecondaryMap::new();
    seeds.iter().for_each(|&seed| scaled[seed] = true);
    for (_, data) in graph.nodes() {
        if data.provenance.phase == Phase::Optimizer || !data.inputs.iter().any(|&value| scaled[value]) {
            continue;
        }
        if !is_linear(graph, data, &scaled) {
            let at = data.provenance.location.as_deref();
            let at = at.map_or_else(String::new, |line| format!(" at {line}"));
            let name = data.provenance.operation.as_deref().unwrap_or(data.op.name());
            let operation = format!("{name}{at}");
            return Err(LossScaleError::NotLinear { operation });
        }
        for &value in data
            .outputs
            .iter()
            .filter(|&&value| graph.dtype(value).is_float())
        {
            scaled[value] = true;
        }
    }
    Ok(scaled)
}

/// Whether the results of a node are multiples of the scale: some of its operands are.
fn is_linear(graph: &Graph, data: &NodeData, scaled: &SecondaryMap<Value, bool>) -> bool {
    let is = |operand: usize| scaled[data.inputs[operand]];
    // An operand that is no multiple of the scale fits beside multiples if it is zero.
    let fits = |operand: usize| is(operand) || is_zero(graph, data.inputs[operand]);
    let only = |operand: usize| (0..data.inputs.len()).all(|other| is(other) == (other == operand));
    match &data.op {
        Op::Binary(BinaryOp::Add | BinaryOp::Sub) => fits(0) && fits(1),
        Op::Binary(BinaryOp::Mul)
        | Op::DotGeneral(_)
        | Op::Conv(_)
        | Op::ConvInputGrad { .. }
        | Op::ConvWeightGrad { .. } => is(0) != is(1),
        Op::Binary(BinaryOp::Div)
        | Op::Gather { .. }
        | Op::IndexSelect { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AvgPool { .. }
        | Op::AvgPoolGrad { .. } => only(0),
        Op::Unary(UnaryOp::Neg)
        | Op::Reduce {
            op: ReduceOp::Sum, ..
        } => true,
        Op::Cumulative {
            op: ReduceOp::Sum, ..
        } => true,
        Op::Cast(to) => to.is_float(),
        Op::Select => !is(0) && fits(1) && fits(2),
        Op::UpdateSlice { .. } => fits(0) && fits(1),
        Op::Scatter { mode, .. } | Op::IndexPut { mode, .. } => {
            matches!(mode, ScatterMode::Add | ScatterMode::Assign) && fits(0) && fits(2)
        }
        Op::AttentionGrad(dims) => only(dims.operands().forward + 1),
        op if op.is_movement() => (0..data.inputs.len()).all(fits),
        _ => false,
    }
}

/// Whether every element of `value` is the constant 0.
fn is_zero(graph: &Graph, value: Value) -> bool {
    let data = graph.def(value);
    match data.op {
        Op::Constant { value, .. } => value.to_f64() == 0.0,
        Op::Broadcast { .. } | Op::Reshape(_) => is_zero(graph, data.inputs[0]),
        _ => false,
    }
}

struct Pass<'a> {
    old: &'a Graph,
    new: Rewriter<'a>,
    /// Old values that are multiples of the scale.
    scaled: SecondaryMap<Value, bool>,
    /// The values that were divided by the scale again.
    unscaled: FxHashMap<Value, Value>,
    /// The scale, the counter and the number of skipped steps, as arguments.
    arguments: [Value; 3],
    /// The scale as a number.
    scale: Value,
    /// One over the scale.
    inverse: Value,
    /// For each gradient whether it is not finite: `bool[]`.
    bad: Vec<Value>,
    provenance: Provenance,
}

impl<'a> Pass<'a> {
    fn new(old: &'a Graph, seeds: &[Value]) -> Result<Self, LossScaleError> {
        let scaled = multiples(old, seeds)?;
        let provenance = Provenance {
            phase: Phase::Optimizer,
            ..Provenance::operation("loss scale")
        };
        // New arguments are numbered after the old ones, but most nodes need them.
        let mut new = Rewriter::new(old);
        for &value in old.parameters() {
            new.copy(old.value(value).node)?;
        }
        let one = |dtype| TensorType::new(dtype, [1]);
        let arguments = [DType::F32, DType::I32, DType::I32].map(|dtype| new.graph.parameter(one(dtype)));
        // The gradient that the backward pass begins with reads it.
        let begins = Provenance {
            phase: Phase::Backward,
            ..provenance.clone()
        };
        let scale = new
            .graph
            .add(Op::Reshape(Shape::scalar()), &arguments[..1], &begins)?;
        let inverse = new.graph.unary(UnaryOp::Recip, scale, &provenance)?;
        Ok(Self {
            old,
            new,
            scaled,
            unscaled: FxHashMap::default(),
            arguments,
            scale,
            inverse,
            bad: Vec::new(),
            provenance,
        })
    }

    fn run(
        mut self,
        scaling: &LossScaling,
        seeds: &[Value],
        states: &[SkippedState],
    ) -> Result<Graph, LossScaleError> {
        for (node, data) in self.old.nodes() {
            match data.op {
                Op::Parameter { .. } => {}
                _ if data.provenance.phase == Phase::Optimizer => self.update(node)?,
                _ => {
                    self.new.copy(node)?;
                }
            }
            for &value in data.outputs.iter().filter(|value| seeds.contains(value)) {
                let seed = self.new.map(value);
                let begins = Provenance {
                    phase: Phase::Backward,
                    ..data.provenance.clone()
                };
                let scaled = self.times(seed, self.scale, &begins)?;
                self.new.replace(value, scaled);
            }
        }
        let outputs: Vec<Value> = self.old.outputs.iter().map(|output| output.value).collect();
        let leaving: Vec<Value> = outputs
            .iter()
            .copied()
            .filter(|&value| self.scaled[value])
            .collect();
        for value in leaving {
            self.unscaled(value)?;
        }
        let bad = self.any_bad()?;
        let next = self.next(scaling, bad)?;
        let mut chosen: Vec<Option<Value>> = vec![None; outputs.len()];
        for state in states {
            let value = outputs[state.output];
            let new = self
                .unscaled
                .get(&value)
                .copied()
                .unwrap_or_else(|| self.new.map(value));
            let old = self.new.map(self.old.parameters()[state.argument]);
            let provenance = self.provenance.clone();
            let skip = self.spread(bad, self.old.shape(value), &provenance)?;
            chosen[state.output] = Some(self.add(Op::Select, &[skip, old, new])?);
        }
        let (unscaled, first) = (self.unscaled, self.arguments[0]);
        let mut graph = self.new.finish();
        for (output, (value, chosen)) in graph.outputs.iter_mut().zip(outputs.iter().zip(chosen)) {
            output.value = chosen.or(unscaled.get(value).copied()).unwrap_or(output.value);
        }
        let first = graph
            .parameters()
            .iter()
            .position(|&value| value == first)
            .unwrap_or_default() as u32;
        for (argument, value) in (first..).zip(next) {
            graph.output(value, Some(argument));
        }
        Ok(graph)
    }

    /// Copies a node that updates: it reads gradients without their scale.
    fn update(&mut self, node: Node) -> Result<(), TypeError> {
        let data = self.old.node(node);
        let kept: Vec<(Value, Value)> = data
            .inputs
            .iter()
            .filter(|&&value| self.scaled[value])
            .map(|&value| (value, self.new.map(value)))
            .collect();
        for &(value, _) in &kept {
            let unscaled = self.unscaled(value)?;
            self.new.replace(value, unscaled);
        }
        self.new.copy(node)?;
        kept.into_iter()
            .for_each(|(value, scaled)| self.new.replace(value, scaled));
        Ok(())
    }

    /// The scaled `value` divided by the scale; notes whether it is finite.
    fn unscaled(&mut self, value: Value) -> Result<Value, TypeError> {
        if let Some(&unscaled) = self.unscaled.get(&value) {
            return Ok(unscaled);
        }
        let scaled = self.new.map(value);
        let provenance = self.provenance.clone();
        let unscaled = self.times(scaled, self.inverse, &provenance)?;
        let nan = self.add(Op::Unary(UnaryOp::IsNan), &[unscaled])?;
        let infinite = self.add(Op::Unary(UnaryOp::IsInf), &[unscaled])?;
        let mut bad = self.add(Op::Binary(BinaryOp::Or), &[nan, infinite])?;
        let rank = self.old.shape(value).rank();
        if rank > 0 {
            let any = Op::Reduce {
                op: ReduceOp::Any,
                axes: (0..rank).collect(),
            };
            bad = self.add(any, &[bad])?;
        }
        self.bad.push(bad);
        self.unscaled.insert(value, unscaled);
        Ok(unscaled)
    }

    /// Whether any gradient is not finite: `bool[]`.
    fn any_bad(&mut self) -> Result<Value, TypeError> {
        let mut bad = self.constant(Scalar::Bool(false), DType::Bool)?;
        for one in std::mem::take(&mut self.bad) {
            bad = self.add(Op::Binary(BinaryOp::Or), &[bad, one])?;
        }
        Ok(bad)
    }

    /// The next scale, counter and number of skipped steps.
    fn next(&mut self, scaling: &LossScaling, bad: Value) -> Result<[Value; 3], TypeError> {
        let number =
            |pass: &mut Self, at: usize| pass.add(Op::Reshape(Shape::scalar()), &[pass.arguments[at]]);
        let (counter, skipped) = (number(self, 1)?, number(self, 2)?);
        let float = |pass: &mut Self, x: f64| pass.constant(Scalar::Float(x), DType::F32);
        let int = |pass: &mut Self, x: i64| pass.constant(Scalar::Int(x), DType::I32);
        let (growth, backoff) = (float(self, scaling.growth)?, float(self, scaling.backoff)?);
        let (largest, least) = (float(self, LARGEST)?, float(self, 1.0)?);
        let (zero, one) = (int(self, 0)?, int(self, 1)?);
        let interval = int(self, i64::from(scaling.interval))?;

        let counted = self.add(Op::Binary(BinaryOp::Add), &[counter, one])?;
        let due = self.add(Op::Compare(CompareOp::Ge), &[counted, interval])?;
        let grown = self.add(Op::Binary(BinaryOp::Mul), &[self.scale, growth])?;
        let grown = self.add(Op::Binary(BinaryOp::Min), &[grown, largest])?;
        let shrunk = self.add(Op::Binary(BinaryOp::Mul), &[self.scale, backoff])?;
        let shrunk = self.add(Op::Binary(BinaryOp::Max), &[shrunk, least])?;
        let scale = self.add(Op::Select, &[due, grown, self.scale])?;
        let scale = self.add(Op::Select, &[bad, shrunk, scale])?;
        let again = self.add(Op::Binary(BinaryOp::Or), &[due, bad])?;
        let counter = self.add(Op::Select, &[again, zero, counted])?;
        let more = self.add(Op::Cast(DType::I32), &[bad])?;
        let skipped = self.add(Op::Binary(BinaryOp::Add), &[skipped, more])?;
        let list = |pass: &mut Self, value: Value| pass.add(Op::Reshape([1].into()), &[value]);
        Ok([list(self, scale)?, list(self, counter)?, list(self, skipped)?])
    }

    /// `value` times a number.
    fn times(&mut self, value: Value, number: Value, provenance: &Provenance) -> Result<Value, TypeError> {
        let shape = self.new.graph.shape(value).clone();
        let number = self.spread(number, &shape, provenance)?;
        let product = Op::Binary(BinaryOp::Mul);
        self.new.graph.add(product, &[value, number], provenance)
    }

    /// A number in every element of `shape`.
    fn spread(&mut self, number: Value, shape: &Shape, provenance: &Provenance) -> Result<Value, TypeError> {
        let spread = Op::Broadcast {
            shape: shape.clone(),
            dims: Dims::new(),
        };
        self.new.graph.add(spread, &[number], provenance)
    }

    fn constant(&mut self, value: Scalar, dtype: DType) -> Result<Value, TypeError> {
        self.add(Op::Constant { value, dtype }, &[])
    }

    fn add(&mut self, op: Op, inputs: &[Value]) -> Result<Value, TypeError> {
        self.new.graph.add(op, inputs, &self.provenance)
    }
}
