//! Reverse mode: forward mode's computation of tangents, run backwards.
//!
//! The part of a graph that depends on tangents is linear in them. Its transpose takes cotangents of the
//! outputs and returns those of the tangents. It walks the nodes from the last to the first: the cotangent
//! of a node's result adds to the cotangents of its operands. A rule here is the transpose of one linear
//! operation; there are some twenty-five of them, and no other operation has tangents for operands
//! ([`crate::forward`]).
//!
//! | file | operations |
//! |---|---|
//! | `structure` | functions of single elements, movements, sums |
//! | `index` | reads and writes at computed positions |
//! | `ranks` | operations over ranks |
//! | `product` | matrix products, convolutions, pooling |

mod index;
mod product;
mod ranks;
mod structure;

use cranelift_entity::SecondaryMap;
use kiln_graph::op::{BinaryOp, ReduceOp, UnaryOp};
use kiln_graph::{Graph, NodeData, Op, Value};

use crate::build::{Builder, declare_arguments, set_outputs};
use crate::error::{FuncError, Origin, Result, name_of};
use crate::forward::{Linearized, float_outputs, linearize};

/// Reverse mode: the *vector-Jacobian product* of `graph`.
///
/// The new graph takes the parameters of `graph`, then a cotangent of each output in `outputs`, of that
/// output's type; its runtime scalars are those of `graph`. It gives the outputs of `graph`, then for each
/// parameter in `wrt` the cotangent of that parameter: the sum over outputs of the output's cotangent times
/// its Jacobian. A parameter that no output depends on gets zeros.
///
/// Where a function has no derivative the result is that of one side or a mean of both, by the rules of
/// [`jvp`](crate::jvp()). Outputs of the new graph take over no argument's buffer.
///
/// # Errors
///
/// If a position does not exist or is not of floats, or an operation on the way has no derivative.
pub fn vjp(graph: &Graph, wrt: &[usize], outputs: &[usize]) -> Result<Graph> {
    let values = float_outputs(graph, outputs)?;
    let linear = linearize(graph, wrt, &values, &format!("vjp({})", graph.name))?;
    let tangents: Vec<Option<Value>> = values
        .iter()
        .map(|&value| linear.forward.tangent(linear.counterparts.get(value)))
        .collect();
    let primal = linear.counterparts.outputs(graph);
    let (mut reverse, cotangents) = Reverse::new(graph, &linear, &values)?;
    for (tangent, cotangent) in tangents.into_iter().zip(cotangents) {
        if let Some(tangent) = tangent {
            reverse.accumulate(tangent, cotangent)?;
        }
    }
    reverse.run()?;
    let mut results: Vec<Value> = primal.iter().map(|&value| reverse.primal(value)).collect();
    for &tangent in &linear.tangents {
        results.push(reverse.cotangent(tangent)?);
    }
    let mut b = reverse.b;
    set_outputs(&mut b, graph, &results);
    results
        .iter()
        .skip(graph.outputs.len())
        .for_each(|&value| b.graph.output(value, None));
    Ok(b.graph.without_dead_code())
}

/// A linearized graph run backwards.
pub(crate) struct Reverse<'a> {
    pub(crate) b: Builder,
    linear: &'a Graph,
    /// Whether a value of the linearized graph depends on tangents.
    varies: SecondaryMap<Value, bool>,
    /// The replacements of the values that do not.
    primal: SecondaryMap<Value, Option<Value>>,
    cotangents: SecondaryMap<Value, Option<Value>>,
}

impl<'a> Reverse<'a> {
    /// Copies the nodes that do not depend on tangents, and declares the cotangents that the new graph
    /// takes, of the types of `outputs`.
    fn new(graph: &Graph, linear: &'a Linearized, outputs: &[Value]) -> Result<(Self, Vec<Value>)> {
        let old = &linear.forward.b.graph;
        let mut b = Builder::new(old.name.clone());
        let (parameters, scalars) = declare_arguments(&mut b, graph);
        let cotangents: Vec<Value> = outputs
            .iter()
            .map(|&value| b.graph.parameter(graph.ty(value).clone()))
            .collect();
        let mut reverse = Self {
            b,
            linear: old,
            varies: SecondaryMap::new(),
            primal: SecondaryMap::new(),
            cotangents: SecondaryMap::new(),
        };
        for &tangent in &linear.tangents {
            reverse.varies[tangent] = true;
        }
        let arguments = old.parameters().iter().zip(parameters);
        for (&from, to) in arguments.chain(old.scalars().iter().zip(scalars)) {
            reverse.primal[from] = Some(to);
        }
        for (_, node) in old.nodes() {
            reverse.copy(node)?;
        }
        Ok((reverse, cotangents))
    }

    fn copy(&mut self, node: &NodeData) -> Result<()> {
        if matches!(node.op, Op::Parameter { .. } | Op::Scalar { .. }) {
            return Ok(());
        }
        if node.inputs.iter().any(|&input| self.varies[input]) {
            node.outputs.iter().for_each(|&output| self.varies[output] = true);
            return Ok(());
        }
        let inputs: Vec<Value> = node.inputs.iter().map(|&input| self.primal(input)).collect();
        self.b.provenance = node.provenance.clone();
        let results = self.b.node(node.op.clone(), &inputs)?;
        for (&from, to) in node.outputs.iter().zip(results) {
            self.primal[from] = Some(to);
        }
        Ok(())
    }

    /// The replacement of a value that depends on no tangent.
    ///
    /// # Panics
    ///
    /// If it depends on one.
    pub(crate) fn primal(&self, value: Value) -> Value {
        self.primal[value].unwrap_or_else(|| panic!("{value} depends on tangents"))
    }

    /// Whether a value depends on tangents.
    pub(crate) fn varies(&self, value: Value) -> bool {
        self.varies[value]
    }

    pub(crate) fn accumulate(&mut self, value: Value, cotangent: Value) -> Result<()> {
        self.cotangents[value] = Some(match self.cotangents[value] {
            Some(held) => self.b.add(held, cotangent)?,
            None => cotangent,
        });
        Ok(())
    }

    /// The cotangent of a value so far; zeros if nothing was added.
    fn cotangent(&mut self, value: Value) -> Result<Value> {
        match self.cotangents[value] {
            Some(cotangent) => Ok(cotangent),
            None => self.b.zeros(self.linear.ty(value)),
        }
    }

    fn run(&mut self) -> Result<()> {
        let linear = self.linear;
        for (_, node) in linear.nodes().rev() {
            let arrived = node.outputs.iter().find_map(|&output| self.cotangents[output]);
            let varies = node.inputs.iter().any(|&input| self.varies(input));
            if let (Some(cotangent), true) = (arrived, varies) {
                self.b.provenance = node.provenance.clone();
                self.transpose(node, cotangent)?;
            }
        }
        Ok(())
    }

    /// Adds the terms that follow from `ct`, the cotangent of a node's result, to the cotangents of its
    /// operands.
    fn transpose(&mut self, node: &NodeData, ct: Value) -> Result<()> {
        let x = &node.inputs;
        match &node.op {
            Op::Unary(UnaryOp::Neg) => {
                let ct = self.b.neg(ct)?;
                self.accumulate(x[0], ct)
            }
            Op::Binary(op @ (BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div)) => {
                self.arithmetic(*op, x, ct)
            }
            Op::Select => self.select(x, ct),
            Op::Cast(_) => {
                let ct = self.b.cast(ct, self.linear.dtype(x[0]))?;
                self.accumulate(x[0], ct)
            }
            Op::Reduce {
                op: ReduceOp::Sum,
                axes,
            } => {
                let ct = self.b.expand(ct, self.linear.shape(x[0]), axes)?;
                self.accumulate(x[0], ct)
            }
            Op::Cumulative {
                op: ReduceOp::Sum,
                axis,
            } => self.running_sum(*axis, x, ct),
            Op::Reshape(_) => {
                let ct = self.b.reshape(ct, self.linear.shape(x[0]).clone())?;
                self.accumulate(x[0], ct)
            }
            Op::Transpose(perm) => self.permuted(perm, x, ct),
            Op::Broadcast { shape, dims } => self.broadcast(shape, dims, x, ct),
            Op::Slice { starts, steps, .. } => self.slice(starts, steps, x, ct),
            Op::Pad { low, high } => self.pad(low, high, x, ct),
            Op::Concat { axis } => self.concat(*axis, x, ct),
            Op::Flip(axes) => {
                let ct = self.b.op(Op::Flip(axes.clone()), &[ct])?;
                self.accumulate(x[0], ct)
            }
            Op::UpdateSlice { starts, steps } => self.update_slice(starts, steps, x, ct),
            Op::Gather { axis } => self.gather(*axis, x, ct),
            Op::IndexSelect { axis } => self.index_select(*axis, x, ct),
            Op::Scatter { axis, mode } => self.scatter(*axis, *mode, x, ct),
            Op::IndexPut { axis, mode } => self.index_put(*axis, *mode, x, ct),
            Op::MaxPoolGrad { .. } => self.max_pool_grad(x, ct),
            Op::DotGeneral(dims) => self.dot(dims, x, ct),
            Op::Conv(conv) => self.conv(conv, x, ct),
            Op::ConvInputGrad { conv, .. } => self.conv_input_grad(conv, x, ct),
            Op::ConvWeightGrad { conv, .. } => self.conv_weight_grad(conv, x, ct),
            Op::AvgPool { .. } | Op::AvgPoolGrad { .. } => self.avg_pool(&node.op, x, ct),
            Op::Collective(collective) => self.collective(collective, node, ct),
            other => Err(FuncError::NoDerivative {
                operation: name_of(other),
                origin: Origin::new(&node.provenance),
                remedy: "it has no reverse mode; use forward mode",
            }),
        }
    }
}
