//! The state of an import, and the shorthands that lowerings are written in.

use std::sync::Arc;

use burn_ir::{OperationIr, ScalarIr, TensorId, TensorIr};
use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, Op, Provenance, Scalar, Shape, TensorType, TypeError, Value};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{ImportError, Imported, ScalarSource};
use crate::execute::convert;
use crate::record::Source;
use crate::stream;

/// The result of a lowering.
pub(super) type Done = Result<(), Fault>;

/// Why an operation could not be lowered, before it is known where that happened.
#[derive(Debug)]
pub(super) enum Fault {
    Type(TypeError),
    Unsupported(String),
    Announced {
        found: TensorType,
        announced: TensorType,
    },
}

impl Fault {
    /// The error, with the operation it concerns.
    pub(super) fn of(self, operation: &OperationIr, position: usize) -> ImportError {
        let operation = stream::name(operation);
        match self {
            Fault::Type(source) => ImportError::Type {
                operation,
                position,
                source: Box::new(source),
            },
            Fault::Unsupported(reason) => ImportError::Unsupported {
                operation,
                position,
                reason,
            },
            Fault::Announced { found, announced } => ImportError::Announced {
                operation,
                position,
                found: Box::new(found),
                announced: Box::new(announced),
            },
        }
    }
}

impl From<TypeError> for Fault {
    fn from(error: TypeError) -> Self {
        Fault::Type(error)
    }
}

/// An import under way.
pub(super) struct Lower {
    pub(super) graph: Graph,
    values: FxHashMap<TensorId, Value>,
    inputs: Vec<TensorIr>,
    scalars: Vec<ScalarSource>,
    /// Random operations so far.
    randoms: usize,
    /// Position of the operation being lowered.
    position: usize,
    /// Scalars of this operation visited so far.
    nth: usize,
    /// Whether this operation's scalars are constants.
    statics: bool,
    /// Names by kind of operation. They are shared: a step has thousands of operations and some fifty names.
    names: FxHashMap<u64, Arc<str>>,
    pub(super) p: Provenance,
}

impl Lower {
    pub(super) fn new() -> Self {
        Self {
            graph: Graph::new("step"),
            values: FxHashMap::default(),
            inputs: Vec::new(),
            scalars: Vec::new(),
            randoms: 0,
            position: 0,
            nth: 0,
            statics: false,
            names: FxHashMap::default(),
            p: Provenance::default(),
        }
    }

    /// Turns to the next operation.
    pub(super) fn begin(&mut self, operation: &OperationIr, position: usize, source: Source) {
        let name = match operation {
            // One kind of operation with a name for each of the program's own.
            OperationIr::Custom(_) => stream::name(operation).into(),
            _ => {
                let code = stream::describe(operation).code;
                let name = self.names.entry(code);
                name.or_insert_with(|| stream::name(operation).into()).clone()
            }
        };
        self.p = Provenance {
            location: source.line,
            gradient_of: source.gradient_of,
            full_precision: source.full_precision,
            ..Provenance::operation(name)
        };
        self.position = position;
        self.nth = 0;
        self.statics = stream::scalars_are_static(operation);
    }

    pub(super) fn finish(self) -> Imported {
        Imported {
            graph: self.graph,
            inputs: self.inputs,
            scalars: self.scalars,
        }
    }

    /// The value of a tensor that has been seen.
    pub(super) fn value(&self, id: TensorId) -> Option<Value> {
        self.values.get(&id).copied()
    }

    /// The value of an operand: the result of an earlier operation, or else the next parameter.
    pub(super) fn input(&mut self, ir: &TensorIr) -> Result<Value, Fault> {
        if let Some(value) = self.value(ir.id) {
            return Ok(value);
        }
        let value = self.graph.parameter(tensor_type(ir)?);
        self.values.insert(ir.id, value);
        self.inputs.push(ir.clone());
        Ok(value)
    }

    /// Makes `value` the result `ir`, under another shape of the same elements if need be.
    pub(super) fn define(&mut self, ir: &TensorIr, value: Value) -> Done {
        let announced = tensor_type(ir)?;
        let found = self.graph.ty(value);
        if *found != announced {
            return Err(Fault::Announced {
                found: found.clone(),
                announced,
            });
        }
        self.values.insert(ir.id, value);
        Ok(())
    }

    /// Makes `value`, reshaped, the result `ir`.
    pub(super) fn define_reshaped(&mut self, ir: &TensorIr, value: Value) -> Done {
        let value = self.reshape(value, shape_of(ir))?;
        self.define(ir, value)
    }

    /// The next scalar of the operation as a rank-0 value: a constant or a runtime scalar. Must be called
    /// once for each scalar, in order.
    pub(super) fn scalar(&mut self, value: ScalarIr, dtype: DType) -> Result<Value, Fault> {
        let nth = self.nth;
        self.nth += 1;
        if self.statics {
            return self.constant(stream::to_scalar(value), dtype);
        }
        self.scalars.push(ScalarSource::Operation {
            op: self.position,
            nth,
        });
        Ok(self.graph.scalar(dtype))
    }

    /// Whether the operation's scalars are constants.
    pub(super) fn statics(&self) -> bool {
        self.statics
    }

    /// Seed and stream of the next random operation.
    pub(super) fn random_position(&mut self) -> [Value; 2] {
        let nth = self.randoms;
        self.randoms += 1;
        self.scalars.push(ScalarSource::RandomSeed { nth });
        self.scalars.push(ScalarSource::RandomStream { nth });
        [self.graph.scalar(DType::U64), self.graph.scalar(DType::U64)]
    }
}

/// Shorthands that add nodes with the provenance of the current operation.
impl Lower {
    pub(super) fn shape(&self, x: Value) -> Shape {
        self.graph.shape(x).clone()
    }

    pub(super) fn dtype(&self, x: Value) -> DType {
        self.graph.dtype(x)
    }

    pub(super) fn add(&mut self, op: Op, inputs: &[Value]) -> Result<Value, Fault> {
        Ok(self.graph.add(op, inputs, &self.p)?)
    }

    pub(super) fn add_many(&mut self, op: Op, inputs: &[Value]) -> Result<SmallVec<[Value; 1]>, Fault> {
        Ok(self.graph.add_node(op, inputs, self.p.clone())?)
    }

    pub(super) fn constant(&mut self, value: impl Into<Scalar>, dtype: DType) -> Result<Value, Fault> {
        let value = value.into().cast(dtype);
        self.add(Op::Constant { value, dtype }, &[])
    }

    pub(super) fn full(
        &mut self,
        value: impl Into<Scalar>,
        dtype: DType,
        shape: &Shape,
    ) -> Result<Value, Fault> {
        let constant = self.constant(value, dtype)?;
        self.splat(constant, shape)
    }

    pub(super) fn splat(&mut self, scalar: Value, shape: &Shape) -> Result<Value, Fault> {
        Ok(self.graph.splat(scalar, shape, &self.p)?)
    }

    pub(super) fn unary(&mut self, op: UnaryOp, x: Value) -> Result<Value, Fault> {
        Ok(self.graph.unary(op, x, &self.p)?)
    }

    pub(super) fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Result<Value, Fault> {
        Ok(self.graph.binary(op, a, b, &self.p)?)
    }

    pub(super) fn compare(&mut self, op: CompareOp, a: Value, b: Value) -> Result<Value, Fault> {
        Ok(self.graph.compare(op, a, b, &self.p)?)
    }

    /// `op` of every element of `x` and the constant `value`.
    pub(super) fn with_constant(
        &mut self,
        op: BinaryOp,
        x: Value,
        value: impl Into<Scalar>,
    ) -> Result<Value, Fault> {
        let shape = self.shape(x);
        let value = self.full(value, self.dtype(x), &shape)?;
        self.binary(op, x, value)
    }

    pub(super) fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Value, Fault> {
        self.add(Op::Select, &[condition, a, b])
    }

    pub(super) fn cast(&mut self, x: Value, dtype: DType) -> Result<Value, Fault> {
        Ok(self.graph.cast(x, dtype, &self.p)?)
    }

    pub(super) fn reshape(&mut self, x: Value, shape: impl Into<Shape>) -> Result<Value, Fault> {
        Ok(self.graph.reshape(x, shape, &self.p)?)
    }

    pub(super) fn transpose(&mut self, x: Value, perm: &[usize]) -> Result<Value, Fault> {
        Ok(self.graph.transpose(x, perm, &self.p)?)
    }

    /// `x` repeated to `shape`, aligned at the last dimension.
    pub(super) fn broadcast_to(&mut self, x: Value, shape: &Shape) -> Result<Value, Fault> {
        Ok(self.graph.broadcast_to(x, shape, &self.p)?)
    }

    /// `x` repeated to `shape`, its dimension `d` becoming `dims[d]`.
    pub(super) fn broadcast(&mut self, x: Value, shape: &Shape, dims: &[usize]) -> Result<Value, Fault> {
        let op = Op::Broadcast {
            shape: shape.clone(),
            dims: dims.into(),
        };
        self.add(op, &[x])
    }

    pub(super) fn reduce(&mut self, op: ReduceOp, x: Value, axes: &[usize]) -> Result<Value, Fault> {
        Ok(self.graph.reduce(op, x, axes, &self.p)?)
    }

    pub(super) fn iota(&mut self, dtype: DType, shape: &Shape, axis: usize) -> Result<Value, Fault> {
        let shape = shape.clone();
        self.add(Op::Iota { dtype, shape, axis }, &[])
    }

    /// Elements `start..limit` along `axis`.
    pub(super) fn narrow(
        &mut self,
        x: Value,
        axis: usize,
        start: usize,
        limit: usize,
    ) -> Result<Value, Fault> {
        let shape = self.shape(x);
        if start == 0 && limit == shape[axis] {
            return Ok(x);
        }
        let mut starts = Dims::from_elem(0, shape.rank());
        let mut limits = Dims::from_slice(&shape);
        (starts[axis], limits[axis]) = (start, limit);
        let steps = Dims::from_elem(1, shape.rank());
        let op = Op::Slice {
            starts,
            limits,
            steps,
        };
        self.add(op, &[x])
    }

    /// Whole slices of `x` along `axis`, by a list of indices.
    pub(super) fn index_select(&mut self, x: Value, axis: usize, indices: Value) -> Result<Value, Fault> {
        self.add(Op::IndexSelect { axis }, &[x, indices])
    }

    pub(super) fn dot(&mut self, dims: DotDims, a: Value, b: Value) -> Result<Value, Fault> {
        self.add(Op::DotGeneral(dims), &[a, b])
    }

    /// `x` in a type wide enough to sum in, for the half types: what burn-flex accumulates means in.
    pub(super) fn widen(&mut self, x: Value) -> Result<Value, Fault> {
        self.cast(x, self.dtype(x).compute())
    }
}

/// The graph's type of a recorded tensor.
pub(super) fn tensor_type(ir: &TensorIr) -> Result<TensorType, Fault> {
    let dtype = convert::dtype(ir.dtype).ok_or_else(|| {
        Fault::Unsupported(format!(
            "element type {:?} has no place in a graph; use a float, integer or one-byte bool type",
            ir.dtype
        ))
    })?;
    Ok(TensorType::new(dtype, shape_of(ir)))
}

/// The graph's shape of a recorded tensor.
pub(super) fn shape_of(ir: &TensorIr) -> Shape {
    Shape::new(ir.shape.iter().copied())
}
