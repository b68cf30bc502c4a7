//! The graph: arenas of values and nodes, and the order in which nodes run.
//!
//! Values and nodes are entities: `u32` indices into arenas. Everything prints, copies and serves as a key of
//! a side table; nothing borrows. Nodes are only appended, so their index order *is* a topological order. A
//! transform does not edit a graph in place; it builds a new one ([`crate::Graph::add`] types every node on
//! the way), which keeps every intermediate graph valid by construction.

use cranelift_entity::{PrimaryMap, entity_impl};
use smallvec::SmallVec;

use crate::infer::{TypeError, infer};
use crate::op::{BinaryOp, CompareOp, Dims, Op, ReduceOp, UnaryOp};
use crate::{DType, Provenance, Scalar, Shape, TensorType};

/// A value: the result of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(u32);
entity_impl!(Value, "%");

/// A node: one application of a primitive.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node(u32);
entity_impl!(Node, "node");

/// What is known of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ValueData {
    /// Element type and shape.
    pub ty: TensorType,
    /// The node that defines it.
    pub node: Node,
    /// Which of the node's results it is.
    pub result: u32,
}

/// What is known of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeData {
    /// The primitive.
    pub op: Op,
    /// Operands, all defined by earlier nodes.
    pub inputs: SmallVec<[Value; 3]>,
    /// Results.
    pub outputs: SmallVec<[Value; 1]>,
    /// Where it comes from.
    pub provenance: Provenance,
}

/// One output of the graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Output {
    /// The value that leaves.
    pub value: Value,
    /// The tensor argument whose buffer it may overwrite: an argument that nobody needs after the step, of
    /// the same size in bytes. Executors may ignore it.
    pub alias: Option<u32>,
    /// Whether executors look at this output before they overwrite anything: one that stops there leaves
    /// every argument as it was.
    pub check: bool,
}

/// A training step, or part of one, as a program in SSA form.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Graph {
    /// Name for people: the compiled region's.
    pub name: String,
    pub(crate) values: PrimaryMap<Value, ValueData>,
    pub(crate) nodes: PrimaryMap<Node, NodeData>,
    /// Values of the `Parameter` nodes, by index.
    pub(crate) parameters: Vec<Value>,
    pub(crate) scalars: Vec<Value>,
    /// What leaves the graph, in order.
    pub outputs: Vec<Output>,
}

/// Whether an argument of type `copy` may be one of type `of` with rounded elements.
pub(crate) fn may_be_copy(copy: &TensorType, of: &TensorType) -> bool {
    of.dtype == DType::F32 && matches!(copy.dtype, DType::F16 | DType::BF16) && copy.shape == of.shape
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Appends a node and returns its results; fails if the operands do not fit the operation.
    pub fn add_node(
        &mut self,
        op: Op,
        inputs: &[Value],
        provenance: Provenance,
    ) -> Result<SmallVec<[Value; 1]>, TypeError> {
        let results = {
            let types: SmallVec<[&TensorType; 4]> =
                inputs.iter().map(|&value| &self.values[value].ty).collect();
            infer(&op, &types)?
        };
        match op {
            Op::Parameter { index, .. } if index as usize != self.parameters.len() => {
                return Err(TypeError::new(
                    &op,
                    format!("expected parameter {}, the next one", self.parameters.len()),
                ));
            }
            Op::Scalar { index, .. } if index as usize != self.scalars.len() => {
                return Err(TypeError::new(
                    &op,
                    format!("expected scalar {}, the next one", self.scalars.len()),
                ));
            }
            _ => {}
        }
        let node = self.nodes.next_key();
        let outputs: SmallVec<[Value; 1]> = results
            .into_iter()
            .enumerate()
            .map(|(result, ty)| {
                self.values.push(ValueData {
                    ty,
                    node,
                    result: result as u32,
                })
            })
            .collect();
        match op {
            Op::Parameter { .. } => self.parameters.push(outputs[0]),
            Op::Scalar { .. } => self.scalars.push(outputs[0]),
            _ => {}
        }
        self.nodes.push(NodeData {
            op,
            inputs: inputs.into(),
            outputs: outputs.clone(),
            provenance,
        });
        Ok(outputs)
    }

    /// [`Graph::add_node`] for operations with one result.
    pub fn add(&mut self, op: Op, inputs: &[Value], provenance: &Provenance) -> Result<Value, TypeError> {
        self.add_node(op, inputs, provenance.clone())
            .map(|outputs| outputs[0])
    }

    /// Declares the next tensor argument.
    pub fn parameter(&mut self, ty: TensorType) -> Value {
        let index = self.parameters.len() as u32;
        let op = Op::Parameter {
            index,
            ty,
            copy_of: None,
        };
        self.add_node(op, &[], Provenance::default())
            .expect("the next parameter is well typed")[0]
    }

    /// Notes the caller's promise that the elements of the argument `copy` are those of the argument `of`, each
    /// rounded to its type of 16 bits. Returns whether the two can be such: `of` is an earlier argument of f32
    /// and of the same shape. Otherwise nothing is noted.
    pub fn note_copy(&mut self, copy: Value, of: Value) -> bool {
        let Op::Parameter { index: earlier, .. } = self.def(of).op else {
            return false;
        };
        let node = self.values[copy].node;
        let fits = may_be_copy(self.ty(copy), self.ty(of));
        match &mut self.nodes[node].op {
            Op::Parameter { index, copy_of, .. } if fits && earlier < *index => {
                *copy_of = Some(earlier);
                true
            }
            _ => false,
        }
    }

    /// The same graph for a caller who promises nothing of its arguments ([`Graph::note_copy`]).
    pub fn without_copies(mut self) -> Self {
        for node in self.nodes.values_mut() {
            if let Op::Parameter { copy_of, .. } = &mut node.op {
                *copy_of = None;
            }
        }
        self
    }

    /// Declares the next runtime scalar.
    pub fn scalar(&mut self, dtype: DType) -> Value {
        let index = self.scalars.len() as u32;
        self.add_node(Op::Scalar { index, dtype }, &[], Provenance::default())
            .expect("the next scalar is well typed")[0]
    }

    /// Adds an output.
    pub fn output(&mut self, value: Value, alias: Option<u32>) {
        self.outputs.push(Output {
            value,
            alias,
            check: false,
        });
    }

    /// Adds an output that executors look at before they overwrite anything ([`Output::check`]).
    pub fn check_output(&mut self, value: Value) {
        self.outputs.push(Output {
            value,
            alias: None,
            check: true,
        });
    }

    /// The tensor arguments, in order.
    pub fn parameters(&self) -> &[Value] {
        &self.parameters
    }

    /// The runtime scalars, in order.
    pub fn scalars(&self) -> &[Value] {
        &self.scalars
    }

    /// The nodes in the order in which they run.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = (Node, &NodeData)> + ExactSizeIterator {
        self.nodes.iter()
    }

    /// The values in the order of definition.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = (Value, &ValueData)> + ExactSizeIterator {
        self.values.iter()
    }

    /// Number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Number of values.
    pub fn num_values(&self) -> usize {
        self.values.len()
    }

    /// One node.
    pub fn node(&self, node: Node) -> &NodeData {
        &self.nodes[node]
    }

    /// One value.
    pub fn value(&self, value: Value) -> &ValueData {
        &self.values[value]
    }

    /// The node that defines `value`.
    pub fn def(&self, value: Value) -> &NodeData {
        &self.nodes[self.values[value].node]
    }

    /// The number that `value` holds if it is a constant.
    pub fn constant(&self, value: Value) -> Option<Scalar> {
        match self.def(value).op {
            Op::Constant { value, .. } => Some(value),
            _ => None,
        }
    }

    /// The number that is in every element of `value`, as a value of rank 0.
    pub fn splatted(&self, mut value: Value) -> Option<Value> {
        while self.shape(value).rank() > 0 {
            let data = self.def(value);
            match data.op {
                Op::Broadcast { .. } | Op::Reshape(_) => value = data.inputs[0],
                _ => return None,
            }
        }
        Some(value)
    }

    /// Whether `value` is a constant 0 in every element.
    pub fn is_zero(&self, value: Value) -> bool {
        let number = self.splatted(value).and_then(|number| self.constant(number));
        number.is_some_and(|number| number.to_f64() == 0.0)
    }

    /// Type of a value.
    pub fn ty(&self, value: Value) -> &TensorType {
        &self.values[value].ty
    }

    /// Shape of a value.
    pub fn shape(&self, value: Value) -> &Shape {
        &self.values[value].ty.shape
    }

    /// Element type of a value.
    pub fn dtype(&self, value: Value) -> DType {
        self.values[value].ty.dtype
    }

    /// The provenance of a node, to be changed: the only part of a node that may change after it was added.
    pub fn provenance_mut(&mut self, node: Node) -> &mut Provenance {
        &mut self.nodes[node].provenance
    }
}

/// Shorthands that add one node. They fail as [`Graph::add`] does.
impl Graph {
    /// A constant of `ty` with every element `value`.
    pub fn full(
        &mut self,
        value: impl Into<Scalar>,
        ty: &TensorType,
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        let constant = self.add(
            Op::Constant {
                value: value.into(),
                dtype: ty.dtype,
            },
            &[],
            p,
        )?;
        self.splat(constant, &ty.shape, p)
    }

    /// A rank-0 value repeated to `shape`.
    pub fn splat(&mut self, scalar: Value, shape: &Shape, p: &Provenance) -> Result<Value, TypeError> {
        if shape.rank() == 0 {
            return Ok(scalar);
        }
        self.add(
            Op::Broadcast {
                shape: shape.clone(),
                dims: Dims::new(),
            },
            &[scalar],
            p,
        )
    }

    /// Applies `op` to each element.
    pub fn unary(&mut self, op: UnaryOp, x: Value, p: &Provenance) -> Result<Value, TypeError> {
        self.add(Op::Unary(op), &[x], p)
    }

    /// Applies `op` to each pair of elements.
    pub fn binary(&mut self, op: BinaryOp, a: Value, b: Value, p: &Provenance) -> Result<Value, TypeError> {
        self.add(Op::Binary(op), &[a, b], p)
    }

    /// Compares each pair of elements.
    pub fn compare(&mut self, op: CompareOp, a: Value, b: Value, p: &Provenance) -> Result<Value, TypeError> {
        self.add(Op::Compare(op), &[a, b], p)
    }

    /// `x` converted to `dtype`; `x` itself if it has that type.
    pub fn cast(&mut self, x: Value, dtype: DType, p: &Provenance) -> Result<Value, TypeError> {
        if self.dtype(x) == dtype {
            Ok(x)
        } else {
            self.add(Op::Cast(dtype), &[x], p)
        }
    }

    /// `x` under another shape; `x` itself if it has that shape.
    pub fn reshape(&mut self, x: Value, shape: impl Into<Shape>, p: &Provenance) -> Result<Value, TypeError> {
        let shape = shape.into();
        if *self.shape(x) == shape {
            Ok(x)
        } else {
            self.add(Op::Reshape(shape), &[x], p)
        }
    }

    /// `x` with its dimensions permuted; `x` itself if nothing moves.
    pub fn transpose(&mut self, x: Value, perm: &[usize], p: &Provenance) -> Result<Value, TypeError> {
        if perm.iter().enumerate().all(|(to, &from)| to == from) {
            return Ok(x);
        }
        self.add(Op::Transpose(perm.into()), &[x], p)
    }

    /// `x` repeated to `shape` by the rule of NumPy: aligned at the last dimension, extents equal or 1; `x`
    /// itself if it has that shape.
    pub fn broadcast_to(&mut self, x: Value, shape: &Shape, p: &Provenance) -> Result<Value, TypeError> {
        if self.shape(x) == shape {
            return Ok(x);
        }
        let skip = shape.rank().checked_sub(self.shape(x).rank());
        let Some(skip) = skip else {
            let op = Op::Broadcast {
                shape: shape.clone(),
                dims: Dims::new(),
            };
            return Err(TypeError::new(
                &op,
                format!("{} has more dimensions than {shape}", self.ty(x)),
            ));
        };
        let dims = (skip..shape.rank()).collect();
        self.add(
            Op::Broadcast {
                shape: shape.clone(),
                dims,
            },
            &[x],
            p,
        )
    }

    /// Reduces `axes` (sorted) away; `x` itself if there are none.
    pub fn reduce(
        &mut self,
        op: ReduceOp,
        x: Value,
        axes: &[usize],
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        if axes.is_empty() {
            Ok(x)
        } else {
            self.add(
                Op::Reduce {
                    op,
                    axes: axes.into(),
                },
                &[x],
                p,
            )
        }
    }
}
