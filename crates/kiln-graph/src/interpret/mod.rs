//! The interpreter: the meaning of every primitive, as plain loops.
//!
//! The interpreter is slow and clear on purpose. Fast executors are compared with it, so it shares no code
//! with them but [`crate::philox`]. It holds floats as f64 and integers as i128 (`array`), computes each
//! primitive in those, and brings the result into the declared dtype: floats are rounded, integers wrapped.
//! [`interpret_f64`] does not round floats: a program of f32 operations is then computed in f64 throughout
//! and serves as the reference for error measurements. Only the numbers that the program itself rounds stay
//! rounded there: its constants and runtime scalars, its random numbers, and casts to a narrower float.
//!
//! One file a family: `pointwise`, `reduce`, `movement`, `index`, `contract`, `pool`, `attention`, `sort`.

mod array;
mod attention;
mod contract;
mod index;
mod movement;
mod pointwise;
mod pool;
mod reduce;
mod sort;

use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::collective::{Collective, combine};
use crate::op::ExternOp;
use crate::{DType, Graph, HostTensor, IndexError, NodeData, Op, Scalar, TensorType, philox};
use array::Array;

/// Why a graph cannot be interpreted on these arguments.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InterpretError {
    /// The number of tensor arguments is wrong.
    #[error("graph `{graph}` takes {expected} tensors, got {given}")]
    TensorCount {
        /// Name of the graph.
        graph: String,
        /// How many it takes.
        expected: usize,
        /// How many it was given.
        given: usize,
    },
    /// The number of runtime scalars is wrong.
    #[error("graph `{graph}` takes {expected} runtime scalars, got {given}")]
    ScalarCount {
        /// Name of the graph.
        graph: String,
        /// How many it takes.
        expected: usize,
        /// How many it was given.
        given: usize,
    },
    /// A tensor argument has the wrong type.
    #[error("parameter {index} is {expected}, got {given}")]
    TensorType {
        /// Which argument.
        index: usize,
        /// Its type in the graph.
        expected: TensorType,
        /// The type given.
        given: TensorType,
    },
    /// An index is out of range.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// The graph has an operation kept whole, and no handler runs it: give one to
    /// [`Interpreter::with_extern`].
    #[error("nothing here runs the operation `{name}` (in `{node}`)")]
    UnknownExtern {
        /// Name of the operation.
        name: String,
        /// The node, as text.
        node: String,
    },
    /// A graph that works with more ranks than it was given arguments of: see [`interpret_ranks`].
    #[error("it was given the arguments of {given} ranks: {reason} (in `{node}`)")]
    Ranks {
        /// How many ranks it was given.
        given: usize,
        /// What is wrong.
        reason: String,
        /// The node, as text.
        node: String,
    },
    /// The handler of an operation kept whole failed, or gave results of other types than declared.
    #[error("operation `{name}` failed: {reason}")]
    Extern {
        /// Name of the operation.
        name: String,
        /// What happened.
        reason: String,
    },
}

/// An index out of range, before it is known in which node.
pub(crate) struct OutOfRange {
    index: i128,
    axis: usize,
    extent: usize,
}

/// Runs an operation kept whole: gets the operation and its operands, gives its results.
pub type ExternHandler<'a> = dyn FnMut(&ExternOp, &[HostTensor]) -> Result<Vec<HostTensor>, String> + 'a;

/// Runs a graph on tensors: every output, in its declared type.
///
/// # Errors
///
/// If the arguments do not fit, an index is out of range, or the graph has an operation kept whole.
pub fn interpret(
    graph: &Graph,
    inputs: &[HostTensor],
    scalars: &[Scalar],
) -> Result<Vec<HostTensor>, InterpretError> {
    Interpreter::new(graph).run(inputs, scalars)
}

/// [`interpret`] with every float kept in f64: float outputs are f64 tensors, and float arguments may be.
pub fn interpret_f64(
    graph: &Graph,
    inputs: &[HostTensor],
    scalars: &[Scalar],
) -> Result<Vec<HostTensor>, InterpretError> {
    Interpreter::new(graph).in_f64(true).run(inputs, scalars)
}

/// [`interpret_f64`] of one graph on several ranks: `ranks` has the tensors and runtime scalars of each
/// rank. Returns the ranks' outputs, in the order of ranks.
///
/// # Errors
///
/// As [`interpret`]; also if a collective is one of another number of ranks.
pub fn interpret_ranks(
    graph: &Graph,
    ranks: &[RankArguments<'_>],
) -> Result<Vec<Vec<HostTensor>>, InterpretError> {
    let mut interpreter = Interpreter::new(graph).in_f64(true);
    let ranks = interpreter.evaluate(ranks, false)?;
    Ok(ranks.iter().map(|values| interpreter.outputs(values)).collect())
}

/// Tensors and runtime scalars of one rank.
pub type RankArguments<'a> = (&'a [HostTensor], &'a [Scalar]);

/// A run of a graph, with its options.
pub struct Interpreter<'a> {
    graph: &'a Graph,
    in_f64: bool,
    handler: Option<&'a mut ExternHandler<'a>>,
}

type Arrays = SmallVec<[Array; 1]>;

impl<'a> Interpreter<'a> {
    /// An interpreter of `graph` that rounds to the declared dtypes and knows no operation kept whole.
    pub fn new(graph: &'a Graph) -> Self {
        Self {
            graph,
            in_f64: false,
            handler: None,
        }
    }

    /// Whether floats stay in f64 throughout ([`interpret_f64`]).
    pub fn in_f64(mut self, in_f64: bool) -> Self {
        self.in_f64 = in_f64;
        self
    }

    /// Sets the handler that runs operations kept whole.
    pub fn with_extern(mut self, handler: &'a mut ExternHandler<'a>) -> Self {
        self.handler = Some(handler);
        self
    }

    /// The outputs of the graph.
    pub fn run(
        mut self,
        inputs: &[HostTensor],
        scalars: &[Scalar],
    ) -> Result<Vec<HostTensor>, InterpretError> {
        let ranks = self.evaluate(&[(inputs, scalars)], false)?;
        Ok(self.outputs(&ranks[0]))
    }

    /// The outputs among the values of one rank.
    fn outputs(&self, values: &[Option<Rc<Array>>]) -> Vec<HostTensor> {
        let of = |value: crate::Value| values[value.as_u32() as usize].as_ref();
        let outputs = self.graph.outputs.iter().filter_map(|output| of(output.value));
        outputs.map(|array| array.to_tensor(self.in_f64)).collect()
    }

    /// Every value of the graph, by number. Tests use it to find the first node at which two executors
    /// differ.
    pub fn run_values(
        mut self,
        inputs: &[HostTensor],
        scalars: &[Scalar],
    ) -> Result<Vec<HostTensor>, InterpretError> {
        let ranks = self.evaluate(&[(inputs, scalars)], true)?;
        Ok(ranks[0]
            .iter()
            .flatten()
            .map(|array| array.to_tensor(self.in_f64))
            .collect())
    }

    /// Every value of each rank that is still needed at the end; all of them if `keep`.
    fn evaluate(
        &mut self,
        ranks: &[RankArguments<'_>],
        keep: bool,
    ) -> Result<Vec<Vec<Option<Rc<Array>>>>, InterpretError> {
        let graph = self.graph;
        for (inputs, scalars) in ranks {
            self.check_arguments(inputs, scalars)?;
        }
        let users = graph.users();
        let mut uses: Vec<usize> = graph.values().map(|(value, _)| users.count(value)).collect();
        let mut values: Vec<Vec<Option<Rc<Array>>>> = vec![vec![None; graph.num_values()]; ranks.len()];
        for (_, node) in graph.nodes() {
            let operands = |values: &[Option<Rc<Array>>]| -> SmallVec<[Rc<Array>; 4]> {
                let operands = node.inputs.iter();
                operands
                    .filter_map(|value| values[value.as_u32() as usize].clone())
                    .collect()
            };
            let results: Vec<Arrays> = match &node.op {
                Op::Collective(collective) => {
                    let x: Vec<_> = values.iter().map(|values| operands(values)).collect();
                    self.collective(collective, node, &x)?
                }
                _ => {
                    let ranks = values.iter().zip(ranks);
                    ranks
                        .map(|(values, (inputs, scalars))| {
                            self.node(node, &operands(values), inputs, scalars)
                        })
                        .collect::<Result<_, _>>()?
                }
            };
            for (values, results) in values.iter_mut().zip(results) {
                for (&value, mut array) in node.outputs.iter().zip(results) {
                    array.settle(self.in_f64);
                    values[value.as_u32() as usize] =
                        (keep || uses[value.as_u32() as usize] > 0).then(|| Rc::new(array));
                }
            }
            for value in &node.inputs {
                let left = &mut uses[value.as_u32() as usize];
                *left -= 1;
                if *left == 0 && !keep {
                    values
                        .iter_mut()
                        .for_each(|values| values[value.as_u32() as usize] = None);
                }
            }
        }
        Ok(values)
    }

    fn check_arguments(&self, inputs: &[HostTensor], scalars: &[Scalar]) -> Result<(), InterpretError> {
        let graph = self.graph;
        let (tensors, expected_scalars) = (graph.parameters().len(), graph.scalars().len());
        if inputs.len() != tensors {
            let (graph, given) = (graph.name.clone(), inputs.len());
            return Err(InterpretError::TensorCount {
                graph,
                expected: tensors,
                given,
            });
        }
        if scalars.len() != expected_scalars {
            let (graph, given) = (graph.name.clone(), scalars.len());
            return Err(InterpretError::ScalarCount {
                graph,
                expected: expected_scalars,
                given,
            });
        }
        for (index, (&value, input)) in graph.parameters().iter().zip(inputs).enumerate() {
            let (expected, given) = (graph.ty(value), input.ty());
            let wide = self.in_f64
                && expected.dtype.is_float()
                && given.dtype == DType::F64
                && given.shape == expected.shape;
            if given != expected && !wide {
                return Err(InterpretError::TensorType {
                    index,
                    expected: expected.clone(),
                    given: given.clone(),
                });
            }
        }
        Ok(())
    }

    fn node(
        &mut self,
        node: &NodeData,
        x: &[Rc<Array>],
        inputs: &[HostTensor],
        scalars: &[Scalar],
    ) -> Result<Arrays, InterpretError> {
        // The type of the first result; an operation kept whole may have none.
        let first = || self.graph.ty(node.outputs[0]);
        let one = |array: Array| -> Result<Arrays, InterpretError> { Ok(smallvec![array]) };
        let checked = |result: Result<Array, OutOfRange>| match result {
            Ok(array) => one(array),
            Err(OutOfRange { index, axis, extent }) => Err(InterpretError::Index(Box::new(IndexError::new(
                node, index, axis, extent,
            )))),
        };
        match &node.op {
            Op::Parameter { index, .. } => {
                let mut array = Array::from_tensor(&inputs[*index as usize]);
                array.ty.dtype = first().dtype;
                one(array)
            }
            Op::Scalar { index, dtype } => one(Array::from_scalar(scalars[*index as usize], *dtype)),
            Op::Constant { value, dtype } => one(Array::from_scalar(*value, *dtype)),
            Op::Iota { axis, .. } => one(movement::iota(first(), *axis)),
            Op::Random { kind, dtype, shape } => {
                let word = |position: usize| x[position].ints()[0];
                let range = if x.len() == 4 {
                    (word(2) as i64, word(3) as i64)
                } else {
                    (0, 0)
                };
                let tensor = philox::fill(*kind, *dtype, shape, word(0) as u64, word(1) as u64, range);
                one(Array::from_tensor(&tensor))
            }
            Op::Unary(op) => one(pointwise::unary(*op, &x[0], first())),
            Op::Binary(op) => one(pointwise::binary(*op, &x[0], &x[1])),
            Op::Compare(op) => one(pointwise::compare(*op, &x[0], &x[1])),
            Op::Select => one(pointwise::select(&x[0], &x[1], &x[2])),
            Op::Cast(dtype) => one(pointwise::cast(&x[0], *dtype)),
            Op::Reduce { op, axes } => one(reduce::reduce(*op, &x[0], axes, first())),
            Op::ArgReduce { op, axis, .. } => one(reduce::arg_reduce(*op, &x[0], *axis, first())),
            Op::Cumulative { op, axis } => one(reduce::cumulative(*op, &x[0], *axis)),
            Op::Reshape(_) => one(Array {
                ty: first().clone(),
                data: x[0].data.clone(),
            }),
            Op::Transpose(perm) => one(movement::transpose(&x[0], perm, first())),
            Op::Broadcast { dims, .. } => one(movement::broadcast(&x[0], dims, first())),
            Op::Slice { starts, steps, .. } => one(movement::slice(&x[0], starts, steps, first())),
            Op::Pad { low, .. } => one(movement::pad(&x[0], &x[1], low, first())),
            Op::Concat { axis } => one(movement::concat(x, *axis, first())),
            Op::Flip(axes) => one(movement::flip(&x[0], axes)),
            Op::UpdateSlice { starts, steps } => one(movement::update_slice(&x[0], &x[1], starts, steps)),
            Op::Gather { axis } => checked(index::gather(&x[0], &x[1], *axis, first())),
            Op::Scatter { axis, mode } => checked(index::scatter(&x[0], &x[1], &x[2], *axis, *mode)),
            Op::IndexSelect { axis } => checked(index::index_select(&x[0], &x[1], *axis, first())),
            Op::IndexPut { axis, mode } => checked(index::index_put(&x[0], &x[1], &x[2], *axis, *mode)),
            Op::DotGeneral(dims) => one(contract::dot_general(&x[0], &x[1], dims, first())),
            Op::Conv(conv) => one(contract::conv(&x[0], &x[1], conv, first())),
            Op::ConvInputGrad { conv, .. } => one(contract::conv_input_grad(&x[0], &x[1], conv, first())),
            Op::ConvWeightGrad { conv, .. } => one(contract::conv_weight_grad(&x[0], &x[1], conv, first())),
            Op::MaxPool(window) => one(pool::max_pool(&x[0], window, first(), DType::I64).0),
            Op::MaxPoolWithIndices { window, dtype } => {
                let (largest, indices) = pool::max_pool(&x[0], window, first(), *dtype);
                Ok(smallvec![largest, indices])
            }
            Op::MaxPoolGrad { .. } => checked(pool::max_pool_grad(&x[0], &x[1], first())),
            Op::AvgPool {
                window,
                count_include_pad,
            } => one(pool::avg_pool(&x[0], window, *count_include_pad, first())),
            Op::AvgPoolGrad {
                window,
                count_include_pad,
                ..
            } => one(pool::avg_pool_grad(&x[0], window, *count_include_pad, first())),
            Op::Attention(dims) => Ok(attention::attention(x, *dims)),
            Op::AttentionGrad(dims) => Ok(attention::attention_grad(x, *dims)),
            Op::Sort {
                axis,
                descending,
                dtype,
            } => {
                let extent = x[0].ty.shape[*axis];
                Ok(sort::sort(&x[0], *axis, *descending, extent, *dtype))
            }
            Op::TopK { axis, k, dtype } => Ok(sort::sort(&x[0], *axis, true, *k, *dtype)),
            Op::CollectiveWait => one((*x[0]).clone()),
            Op::Collective(_) => unreachable!("collectives are computed for all ranks at once"),
            Op::Extern(op) => self.external(op, node, x),
        }
    }

    /// The results of a collective on every rank.
    fn collective(
        &self,
        collective: &Collective,
        node: &NodeData,
        ranks: &[SmallVec<[Rc<Array>; 4]>],
    ) -> Result<Vec<Arrays>, InterpretError> {
        let operands: Vec<HostTensor> = ranks.iter().map(|x| x[0].to_tensor(true)).collect();
        let results = combine(collective, &operands).map_err(|reason| InterpretError::Ranks {
            given: ranks.len(),
            reason,
            node: self.graph.node_text(node),
        })?;
        let declared = self.graph.ty(node.outputs[0]);
        let array = |result: &HostTensor| Array {
            ty: declared.clone(),
            ..Array::from_tensor(result)
        };
        Ok(results.iter().map(|result| smallvec![array(result)]).collect())
    }

    fn external(
        &mut self,
        op: &ExternOp,
        node: &NodeData,
        x: &[Rc<Array>],
    ) -> Result<Arrays, InterpretError> {
        let name = op.name.clone();
        let Some(handler) = self.handler.as_mut() else {
            return Err(InterpretError::UnknownExtern {
                name,
                node: self.graph.node_text(node),
            });
        };
        let operands: Vec<HostTensor> = x.iter().map(|array| array.to_tensor(false)).collect();
        let fail = |reason| InterpretError::Extern {
            name: op.name.clone(),
            reason,
        };
        let results = handler(op, &operands).map_err(fail)?;
        let given: Vec<&TensorType> = results.iter().map(HostTensor::ty).collect();
        if !given.iter().copied().eq(op.outputs.iter()) {
            return Err(fail(format!("it gave {given:?}, declared are {:?}", op.outputs)));
        }
        Ok(results.iter().map(Array::from_tensor).collect())
    }
}
