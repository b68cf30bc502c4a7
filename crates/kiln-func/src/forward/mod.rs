//! Forward mode: each value is followed by its tangent.
//!
//! A rule says how the tangents of an operation's results follow from those of its operands. It may compute
//! anything from the values themselves, but it is *linear* in the tangents, and it writes that part with
//! the operations of [`crate::transpose`] alone, so that reverse mode can run it backwards.
//!
//! A value without a tangent does not depend on the parameters of the derivative, or depends on them only
//! through integers, bools and functions that are constant almost everywhere: its derivative is zero, and
//! no rule runs.
//!
//! | file | operations |
//! |---|---|
//! | `pointwise` | functions of single elements |
//! | `structure` | movements, reductions, running reductions, sorting |
//! | `index` | reads and writes at computed positions, max pooling |
//! | `product` | matrix products, convolutions, average pooling |

pub(crate) mod index;
mod pointwise;
mod product;
pub(crate) mod structure;

use std::sync::Arc;

use cranelift_entity::SecondaryMap;
use kiln_graph::{Graph, NodeData, Op, Provenance, Value};
use smallvec::SmallVec;

use crate::build::{Builder, Counterparts, Transform, Values, declare_arguments, rebuild, set_outputs};
use crate::error::{FuncError, Origin, Result, name_of};
use crate::expand;

/// The tangents of an operation's results.
pub(crate) type Tangents = SmallVec<[Option<Value>; 1]>;

/// A graph with the tangents of its values.
pub(crate) struct Forward {
    pub(crate) b: Builder,
    tangents: SecondaryMap<Value, Option<Value>>,
}

impl Forward {
    /// An empty graph.
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            b: Builder::new(name),
            tangents: SecondaryMap::new(),
        }
    }

    /// The tangent of a value; none if that is zero.
    pub(crate) fn tangent(&self, value: Value) -> Option<Value> {
        self.tangents[value]
    }

    pub(crate) fn set_tangent(&mut self, value: Value, tangent: Option<Value>) {
        self.tangents[value] = tangent;
    }

    /// The tangent of a value, zeros if it has none.
    pub(crate) fn tangent_or_zeros(&mut self, value: Value) -> Result<Value> {
        match self.tangent(value) {
            Some(tangent) => Ok(tangent),
            None => self.b.zeros_like(value),
        }
    }

    /// The sum of terms of which some may be missing.
    fn sum(&mut self, a: Option<Value>, b: Option<Value>) -> Result<Option<Value>> {
        match (a, b) {
            (Some(a), Some(b)) => Ok(Some(self.b.add(a, b)?)),
            (one, other) => Ok(one.or(other)),
        }
    }

    /// The tangents of results `y` of `op` on `x`, one of which has a tangent.
    fn follow(&mut self, op: &Op, x: &[Value], y: &[Value]) -> Result<Tangents> {
        if let Some(graph) = self.expansion(op, x)? {
            let scalars: [Value; 0] = [];
            let results = rebuild(self, &graph, x, &scalars)?.outputs(&graph);
            return Ok(results.into_iter().map(|result| self.tangent(result)).collect());
        }
        let tangent = match op {
            Op::Unary(op) => self.unary(*op, x[0], y[0])?,
            Op::Binary(op) => self.binary(*op, x[0], x[1], y[0])?,
            Op::Select => self.select(x[0], x[1], x[2])?,
            Op::Cast(dtype) => self.cast(x[0], *dtype)?,
            Op::Reduce { op, axes } => self.reduce(*op, axes, x[0], y[0])?,
            Op::Cumulative { op, axis } => self.cumulative(*op, *axis, x[0], y[0])?,
            Op::Sort { axis, .. } | Op::TopK { axis, .. } => {
                let moved = self
                    .tangent(x[0])
                    .map(|t| self.b.op(Op::Gather { axis: *axis }, &[t, y[1]]));
                return Ok([moved.transpose()?, None].into_iter().collect());
            }
            Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Broadcast { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Concat { .. }
            | Op::Flip(_)
            | Op::UpdateSlice { .. } => self.moved(op, x)?,
            Op::Gather { .. } | Op::IndexSelect { .. } | Op::MaxPoolGrad { .. } => self.read(op, x)?,
            Op::Scatter { .. } | Op::IndexPut { .. } => self.write(op, x)?,
            Op::MaxPool(window) => self.max_pool(window, x[0])?,
            Op::MaxPoolWithIndices { .. } => {
                let picked = self.pick(x[0], y[1])?;
                return Ok([picked, None].into_iter().collect());
            }
            Op::DotGeneral(_) | Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => {
                self.bilinear(op, x[0], x[1])?
            }
            // Linear in the operands of all ranks.
            Op::AvgPool { .. } | Op::AvgPoolGrad { .. } | Op::Collective(_) | Op::CollectiveWait => {
                self.moved(op, x)?
            }
            // Their results are integers or bools, or have no operands that have tangents.
            Op::Parameter { .. }
            | Op::Scalar { .. }
            | Op::Constant { .. }
            | Op::Iota { .. }
            | Op::Random { .. }
            | Op::Compare(_)
            | Op::ArgReduce { .. } => None,
            Op::Attention(_) | Op::AttentionGrad(_) => unreachable!("{} is expanded", op.name()),
            Op::Extern(_) => {
                return Err(FuncError::NoDerivative {
                    operation: name_of(op),
                    origin: Origin::new(&self.b.provenance),
                    remedy: "it is kept whole; write it with operations that Kiln knows, or call it outside of \
                             what is differentiated",
                });
            }
        };
        Ok([tangent].into_iter().collect())
    }

    /// The operation expanded into others that have rules, if it has none itself.
    fn expansion(&self, op: &Op, x: &[Value]) -> Result<Option<Graph>> {
        let types: Vec<_> = x.iter().map(|&value| self.b.ty(value)).collect();
        // A product that is linear in `x` alone needs no expansion.
        let updates_vary = x.get(2).is_some_and(|&updates| self.tangent(updates).is_some());
        expand::for_derivative(op, &types, updates_vary)
    }
}

impl Transform for Forward {
    type Counterpart = Value;

    fn builder(&mut self) -> &mut Builder {
        &mut self.b
    }

    fn push(&mut self, op: &Op, inputs: &[Value]) -> Result<Values> {
        let results = self.b.node(op.clone(), inputs)?;
        let depends = inputs.iter().any(|&input| self.tangent(input).is_some());
        let differs = results.iter().any(|&result| self.b.dtype(result).is_float());
        if depends && differs {
            let origin = self.b.provenance.clone();
            self.b.provenance = derived(&origin, op);
            let tangents = self.follow(op, inputs, &results)?;
            self.b.provenance = origin;
            for (&result, tangent) in results.iter().zip(tangents) {
                self.set_tangent(result, tangent);
            }
        }
        Ok(results)
    }
}

/// The provenance of a node in the derivative of an operation from `origin`.
pub(crate) fn derived(origin: &Provenance, op: &Op) -> Provenance {
    let mut provenance = origin.clone();
    let of = provenance.operation.take().or(provenance.gradient_of.take());
    provenance.gradient_of = Some(of.unwrap_or_else(|| Arc::from(op.name())));
    provenance
}

/// A graph that takes tangents of some of its parameters after the parameters, and the tangents that follow
/// from them.
pub(crate) struct Linearized {
    pub(crate) forward: Forward,
    /// The tangents that it takes.
    pub(crate) tangents: Vec<Value>,
    /// The replacements of the old graph's values.
    pub(crate) counterparts: Counterparts<Value>,
}

/// [`Forward`] that follows no tangents but those of `needed` values of the graph that is rebuilt.
struct Needed<'a> {
    forward: &'a mut Forward,
    needed: SecondaryMap<Value, bool>,
}

impl<'a> Needed<'a> {
    /// What `values` of `graph` depend on.
    fn by(values: &[Value], graph: &Graph, forward: &'a mut Forward) -> Self {
        let mut needed = SecondaryMap::new();
        let mut next = values.to_vec();
        while let Some(value) = next.pop() {
            if !std::mem::replace(&mut needed[value], true) {
                next.extend(&graph.def(value).inputs);
            }
        }
        Self { forward, needed }
    }
}

impl Transform for Needed<'_> {
    type Counterpart = Value;

    fn builder(&mut self) -> &mut Builder {
        &mut self.forward.b
    }

    fn push(&mut self, op: &Op, inputs: &[Value]) -> Result<Values> {
        self.forward.push(op, inputs)
    }

    fn push_node(&mut self, node: &NodeData, inputs: &[Value]) -> Result<Values> {
        match node.outputs.iter().any(|&output| self.needed[output]) {
            true => self.push(&node.op, inputs),
            false => self.forward.b.push(&node.op, inputs),
        }
    }
}

/// Follows the tangents of parameters `wrt`, which the new graph takes after its parameters, as far as
/// `values` depend on them. What else `graph` computes is only copied: it may have no derivative.
pub(crate) fn linearize(graph: &Graph, wrt: &[usize], values: &[Value], name: &str) -> Result<Linearized> {
    check_parameters(graph, wrt)?;
    let mut forward = Forward::new(name);
    let (parameters, scalars) = declare_arguments(&mut forward.b, graph);
    let mut tangents = Vec::with_capacity(wrt.len());
    for &index in wrt {
        let ty = forward.b.ty(parameters[index]);
        let tangent = forward.b.graph.parameter(ty);
        tangents.push(tangent);
        // A parameter that is named twice moves by the sum of both.
        let tangent = forward.sum(forward.tangent(parameters[index]), Some(tangent))?;
        forward.set_tangent(parameters[index], tangent);
    }
    let mut needed = Needed::by(values, graph, &mut forward);
    let counterparts = rebuild(&mut needed, graph, &parameters, &scalars)?;
    Ok(Linearized {
        forward,
        tangents,
        counterparts,
    })
}

fn check_parameters(graph: &Graph, wrt: &[usize]) -> Result<()> {
    let parameters = graph.parameters();
    for &index in wrt {
        let Some(&value) = parameters.get(index) else {
            return Err(FuncError::NoParameter {
                graph: graph.name.clone(),
                index,
                count: parameters.len(),
            });
        };
        if !graph.dtype(value).is_float() {
            let ty = graph.ty(value).clone();
            return Err(FuncError::DiscreteParameter { index, ty });
        }
    }
    Ok(())
}

/// The values of outputs `outputs`, which must be floats.
pub(crate) fn float_outputs(graph: &Graph, outputs: &[usize]) -> Result<Vec<Value>> {
    let value = |&index: &usize| {
        let output = graph.outputs.get(index).ok_or_else(|| FuncError::NoOutput {
            graph: graph.name.clone(),
            index,
            count: graph.outputs.len(),
        })?;
        if graph.dtype(output.value).is_float() {
            Ok(output.value)
        } else {
            let ty = graph.ty(output.value).clone();
            Err(FuncError::DiscreteOutput { index, ty })
        }
    };
    outputs.iter().map(value).collect()
}

/// Forward mode: the *Jacobian-vector product* of `graph`.
///
/// The new graph takes the parameters of `graph`, then a tangent of each parameter in `wrt`, of that
/// parameter's type; its runtime scalars are those of `graph`. It returns the outputs of `graph`, then the
/// tangent of each output in `outputs`: how the output moves when the parameters move along their tangents.
/// The tangent of an output that does not depend on those parameters is zeros.
///
/// Where a function has no derivative, the rules are these: `|x|` at 0 has the slope 0. The larger of two
/// equal numbers moves by the mean of both (but by its own tangent alone beside a bound that does not
/// vary). Equal largest elements share a reduction's tangent equally. Poolings, sorts and running extremes
/// have the tangent of the element that they took. Roundings and random draws are constant. Outputs of the
/// new graph take over no argument's buffer.
///
/// # Errors
///
/// If a position does not exist or is not of floats, or an operation on the way has no derivative.
pub fn jvp(graph: &Graph, wrt: &[usize], outputs: &[usize]) -> Result<Graph> {
    let values = float_outputs(graph, outputs)?;
    let Linearized {
        mut forward,
        counterparts,
        ..
    } = linearize(graph, wrt, &values, &format!("jvp({})", graph.name))?;
    set_outputs(&mut forward.b, graph, &counterparts.outputs(graph));
    for value in values {
        let tangent = forward.tangent_or_zeros(counterparts.get(value))?;
        forward.b.graph.output(tangent, None);
    }
    Ok(forward.b.graph.without_dead_code())
}
