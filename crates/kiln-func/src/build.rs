//! Tools of the rules: a graph under construction, and the walk that rebuilds one graph inside another.

use cranelift_entity::SecondaryMap;
use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, Op, ReduceOp, SignedDims, UnaryOp};
use kiln_graph::{DType, Graph, NodeData, Provenance, Scalar, Shape, TensorType, Value};
use smallvec::SmallVec;

use crate::error::Result;

pub(crate) type Values = SmallVec<[Value; 1]>;

/// A graph and the provenance that new nodes get.
#[derive(Debug)]
pub(crate) struct Builder {
    pub(crate) graph: Graph,
    pub(crate) provenance: Provenance,
}

/// Each method adds the nodes that its name says. All fail where the operands do not fit.
impl Builder {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            graph: Graph::new(name),
            provenance: Provenance::default(),
        }
    }

    pub(crate) fn node(&mut self, op: Op, inputs: &[Value]) -> Result<Values> {
        Ok(self.graph.add_node(op, inputs, self.provenance.clone())?)
    }

    /// A node with one result.
    pub(crate) fn op(&mut self, op: Op, inputs: &[Value]) -> Result<Value> {
        Ok(self.node(op, inputs)?[0])
    }

    pub(crate) fn ty(&self, x: Value) -> TensorType {
        self.graph.ty(x).clone()
    }

    pub(crate) fn shape(&self, x: Value) -> Shape {
        self.graph.shape(x).clone()
    }

    pub(crate) fn dtype(&self, x: Value) -> DType {
        self.graph.dtype(x)
    }

    /// A tensor of type `ty` with every element `value`.
    pub(crate) fn full(&mut self, value: impl Into<Scalar>, ty: &TensorType) -> Result<Value> {
        let provenance = self.provenance.clone();
        Ok(self.graph.full(value.into().cast(ty.dtype), ty, &provenance)?)
    }

    /// The same of the type of `x`.
    pub(crate) fn full_like(&mut self, value: impl Into<Scalar>, x: Value) -> Result<Value> {
        let ty = self.ty(x);
        self.full(value, &ty)
    }

    pub(crate) fn zeros(&mut self, ty: &TensorType) -> Result<Value> {
        self.full(0.0, ty)
    }

    pub(crate) fn zeros_like(&mut self, x: Value) -> Result<Value> {
        self.full_like(0.0, x)
    }

    pub(crate) fn constant(&mut self, value: impl Into<Scalar>, dtype: DType) -> Result<Value> {
        self.full(value, &TensorType::scalar(dtype))
    }

    /// A rank-0 value repeated to the shape of `like`, in its element type.
    pub(crate) fn splat_like(&mut self, scalar: Value, like: Value) -> Result<Value> {
        let (dtype, shape) = (self.dtype(like), self.shape(like));
        let scalar = self.cast(scalar, dtype)?;
        let provenance = self.provenance.clone();
        Ok(self.graph.splat(scalar, &shape, &provenance)?)
    }

    pub(crate) fn iota(&mut self, dtype: DType, shape: &Shape, axis: usize) -> Result<Value> {
        let shape = shape.clone();
        self.op(Op::Iota { dtype, shape, axis }, &[])
    }

    pub(crate) fn unary(&mut self, op: UnaryOp, x: Value) -> Result<Value> {
        self.op(Op::Unary(op), &[x])
    }

    pub(crate) fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Result<Value> {
        self.op(Op::Binary(op), &[a, b])
    }

    pub(crate) fn neg(&mut self, x: Value) -> Result<Value> {
        self.unary(UnaryOp::Neg, x)
    }

    pub(crate) fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(BinaryOp::Add, a, b)
    }

    pub(crate) fn sub(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(BinaryOp::Sub, a, b)
    }

    pub(crate) fn mul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(BinaryOp::Mul, a, b)
    }

    pub(crate) fn div(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(BinaryOp::Div, a, b)
    }

    /// `x * factor`.
    pub(crate) fn scale(&mut self, x: Value, factor: f64) -> Result<Value> {
        let factor = self.full_like(factor, x)?;
        self.mul(x, factor)
    }

    /// `x + offset`.
    pub(crate) fn shift(&mut self, x: Value, offset: f64) -> Result<Value> {
        let offset = self.full_like(offset, x)?;
        self.add(x, offset)
    }

    /// `value - x`.
    pub(crate) fn subtract_from(&mut self, value: f64, x: Value) -> Result<Value> {
        let value = self.full_like(value, x)?;
        self.sub(value, x)
    }

    pub(crate) fn compare(&mut self, op: CompareOp, a: Value, b: Value) -> Result<Value> {
        self.op(Op::Compare(op), &[a, b])
    }

    pub(crate) fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Value> {
        self.op(Op::Select, &[condition, a, b])
    }

    /// `x` where the condition holds, 0 elsewhere.
    pub(crate) fn keep(&mut self, condition: Value, x: Value) -> Result<Value> {
        let zeros = self.zeros_like(x)?;
        self.select(condition, x, zeros)
    }

    /// `x` where the condition does not hold, 0 elsewhere.
    pub(crate) fn drop(&mut self, condition: Value, x: Value) -> Result<Value> {
        let zeros = self.zeros_like(x)?;
        self.select(condition, zeros, x)
    }

    pub(crate) fn cast(&mut self, x: Value, dtype: DType) -> Result<Value> {
        let provenance = self.provenance.clone();
        Ok(self.graph.cast(x, dtype, &provenance)?)
    }

    pub(crate) fn reduce(&mut self, op: ReduceOp, x: Value, axes: &[usize]) -> Result<Value> {
        let provenance = self.provenance.clone();
        Ok(self.graph.reduce(op, x, axes, &provenance)?)
    }

    pub(crate) fn sum(&mut self, x: Value, axes: &[usize]) -> Result<Value> {
        self.reduce(ReduceOp::Sum, x, axes)
    }

    pub(crate) fn reshape(&mut self, x: Value, shape: impl Into<Shape>) -> Result<Value> {
        let provenance = self.provenance.clone();
        Ok(self.graph.reshape(x, shape, &provenance)?)
    }

    pub(crate) fn transpose(&mut self, x: Value, perm: &[usize]) -> Result<Value> {
        let provenance = self.provenance.clone();
        Ok(self.graph.transpose(x, perm, &provenance)?)
    }

    /// `x` with its dimension `from` moved to position `to`; the others keep their order.
    pub(crate) fn move_dim(&mut self, x: Value, from: usize, to: usize) -> Result<Value> {
        let mut perm: Dims = (0..self.shape(x).rank()).filter(|&axis| axis != from).collect();
        perm.insert(to, from);
        self.transpose(x, &perm)
    }

    /// `x` repeated to `shape`, its dimension `d` being `dims[d]`; `x` itself if nothing changes.
    pub(crate) fn broadcast(&mut self, x: Value, shape: &Shape, dims: &[usize]) -> Result<Value> {
        if self.graph.shape(x) == shape {
            return Ok(x);
        }
        let (shape, dims) = (shape.clone(), dims.into());
        self.op(Op::Broadcast { shape, dims }, &[x])
    }

    /// The result of a reduction over `axes`, repeated along them to `shape`.
    pub(crate) fn expand(&mut self, x: Value, shape: &Shape, axes: &[usize]) -> Result<Value> {
        let dims: Dims = (0..shape.rank()).filter(|axis| !axes.contains(axis)).collect();
        self.broadcast(x, shape, &dims)
    }

    /// The elements `start..limit` along `axis`.
    pub(crate) fn slice(&mut self, x: Value, axis: usize, start: usize, limit: usize) -> Result<Value> {
        let shape = self.shape(x);
        if start == 0 && limit == shape[axis] {
            return Ok(x);
        }
        let op = Op::slice(&shape, axis, start..limit);
        self.op(op, &[x])
    }

    pub(crate) fn pad(&mut self, x: Value, value: Value, low: SignedDims, high: SignedDims) -> Result<Value> {
        if low.iter().chain(&high).all(|&amount| amount == 0) {
            return Ok(x);
        }
        self.op(Op::Pad { low, high }, &[x, value])
    }
}

/// A product over these batch and contracted dimensions, with a result of the operands' type.
pub(crate) fn dot_dims(a_batch: Dims, b_batch: Dims, a_contract: Dims, b_contract: Dims) -> DotDims {
    DotDims {
        a_batch,
        b_batch,
        a_contract,
        b_contract,
        result: None,
    }
}

/// A transform that rebuilds a graph node by node.
pub(crate) trait Transform {
    /// The replacement of a value of the old graph.
    type Counterpart: Copy;

    fn builder(&mut self) -> &mut Builder;

    /// The replacements of an operation's results.
    fn push(&mut self, op: &Op, inputs: &[Self::Counterpart]) -> Result<SmallVec<[Self::Counterpart; 1]>>;

    /// The replacements of the results of a node of the graph that is rebuilt.
    fn push_node(
        &mut self,
        node: &NodeData,
        inputs: &[Self::Counterpart],
    ) -> Result<SmallVec<[Self::Counterpart; 1]>> {
        self.push(&node.op, inputs)
    }
}

/// Copies a graph as it is.
impl Transform for Builder {
    type Counterpart = Value;

    fn builder(&mut self) -> &mut Builder {
        self
    }

    fn push(&mut self, op: &Op, inputs: &[Value]) -> Result<Values> {
        self.node(op.clone(), inputs)
    }
}

/// The replacement of each value of a graph.
pub(crate) struct Counterparts<S: Copy>(SecondaryMap<Value, Option<S>>);

impl<S: Copy> Counterparts<S> {
    /// # Panics
    ///
    /// If `value` is of another graph.
    pub(crate) fn get(&self, value: Value) -> S {
        self.0[value].unwrap_or_else(|| panic!("{value} was not rebuilt"))
    }

    pub(crate) fn all(&self, values: &[Value]) -> SmallVec<[S; 4]> {
        values.iter().map(|&value| self.get(value)).collect()
    }

    pub(crate) fn outputs(&self, graph: &Graph) -> Vec<S> {
        graph
            .outputs
            .iter()
            .map(|output| self.get(output.value))
            .collect()
    }
}

/// Rebuilds the nodes of `graph` by `transform`, on these parameters and runtime scalars.
pub(crate) fn rebuild<T: Transform>(
    transform: &mut T,
    graph: &Graph,
    parameters: &[T::Counterpart],
    scalars: &[T::Counterpart],
) -> Result<Counterparts<T::Counterpart>> {
    let mut counterparts = Counterparts(SecondaryMap::new());
    let outer = transform.builder().provenance.clone();
    for (_, node) in graph.nodes() {
        let made = match node.op {
            Op::Parameter { index, .. } => SmallVec::from_elem(parameters[index as usize], 1),
            Op::Scalar { index, .. } => SmallVec::from_elem(scalars[index as usize], 1),
            _ => {
                // Nodes of a rule's own small graphs have no origin: they get that of the node that they
                // replace.
                let known = node.provenance != Provenance::default();
                let provenance = if known { &node.provenance } else { &outer };
                transform.builder().provenance = provenance.clone();
                transform.push_node(node, &counterparts.all(&node.inputs))?
            }
        };
        for (&old, new) in node.outputs.iter().zip(made) {
            counterparts.0[old] = Some(new);
        }
    }
    transform.builder().provenance = outer;
    Ok(counterparts)
}

/// Declares the arguments of `graph` in another one: its parameters and its runtime scalars.
pub(crate) fn declare_arguments(builder: &mut Builder, graph: &Graph) -> (Vec<Value>, Vec<Value>) {
    let parameters = graph.parameters().iter();
    let parameters = parameters.map(|&value| builder.graph.parameter(graph.ty(value).clone()));
    let parameters = parameters.collect();
    let scalars = graph.scalars().iter();
    let scalars = scalars.map(|&value| builder.graph.scalar(graph.dtype(value)));
    (parameters, scalars.collect())
}

/// Copies `graph` into another on these arguments; its outputs.
pub(crate) fn inline(
    builder: &mut Builder,
    graph: &Graph,
    parameters: &[Value],
    scalars: &[Value],
) -> Result<Vec<Value>> {
    Ok(rebuild(builder, graph, parameters, scalars)?.outputs(graph))
}

/// Makes `values` outputs. An output is checked before anything is overwritten if the output of `like` at
/// its position is.
pub(crate) fn set_outputs(builder: &mut Builder, like: &Graph, values: &[Value]) {
    for (value, output) in values.iter().zip(&like.outputs) {
        if output.check {
            builder.graph.check_output(*value);
        } else {
            builder.graph.output(*value, None);
        }
    }
}
