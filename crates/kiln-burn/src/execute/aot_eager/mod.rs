//! `aot_eager`: the graph node by node on burn-flex.
//!
//! This executor computes from the graph what eager execution computes from the program. A difference
//! between the two lies in recording or import; a difference between this executor and a compiled step lies
//! in the compiler. Each value is freed after its last use, and its last user gets it by value, so that
//! burn-flex works in place where it can.
//!
//! Three things are decided once, in [`AotEager::new`]. Nodes that no output needs do not run. A rank-0
//! value that is only repeated to fill an operand of a pointwise operation is not repeated, because
//! burn-flex has operations with a scalar. And nodes that compute indices run first: the arguments keep
//! their tensors until every index is known to be in range ([`kiln_graph::indices`]), so nothing is
//! overwritten before.
//!
//! A primitive that burn-flex has no kernel for and that is not worth composing (attention, 3-d pooling,
//! exotic integer types) runs in the interpreter.

mod contract;
mod index;
mod movement;
mod pointwise;
mod pool;
mod reduce;

use std::sync::{Arc, OnceLock};

use burn_flex::FlexTensor;
use kiln_graph::interpret::interpret;
use kiln_graph::{
    DType, Graph, HostTensor, IndexCheck, IndexError, Node, NodeData, Op, Provenance, Scalar, Shape, Value,
    indices, philox,
};
use kiln_profile::StepDescription;
use smallvec::{SmallVec, smallvec};

use super::check::{Parting, Reference};
use super::host::scalar_of_bits;
use super::profile::{RunClock, describe_nodes, next_id};
use super::{Executable, ExecuteError, check_arguments, convert};
use crate::eager::indices::find;
use crate::import::external;
use crate::options::CompileBackend;
use crate::storage::Storage;

type Results = SmallVec<[FlexTensor; 1]>;

/// A graph ready to run node by node.
pub struct AotEager {
    graph: Arc<Graph>,
    steps: Vec<Step>,
    /// How many steps at the beginning compute indices.
    first: usize,
    /// The checks after these steps.
    checks: Vec<IndexCheck>,
    id: u64,
    /// Why the step is not compiled, if it was to be.
    instead: Option<String>,
    description: OnceLock<Arc<StepDescription>>,
}

/// One node to run.
struct Step {
    node: Node,
    operands: SmallVec<[Operand; 3]>,
}

/// The source of an operand.
#[derive(Clone, Copy)]
struct Operand {
    value: Value,
    /// Whether `value` has rank 0 and stands for itself repeated to the operand's shape.
    splat: bool,
    /// Whether this is the last use of `value`.
    last: bool,
}

/// An operand at run time.
enum Argument {
    Tensor(FlexTensor),
    /// A rank-0 tensor standing for itself repeated.
    Splat(FlexTensor),
}

impl AotEager {
    /// Prepares `graph`.
    pub fn new(graph: Arc<Graph>) -> Self {
        let mut needed = vec![false; graph.num_values()];
        let index = |value: Value| value.as_u32() as usize;
        for output in &graph.outputs {
            needed[index(output.value)] = true;
        }
        let checks = indices::checks(&graph);
        let mut makes_indices = vec![false; graph.num_values()];
        for check in &checks {
            makes_indices[index(check.indices)] = true;
            needed[index(check.indices)] = true;
        }
        for (_, data) in graph.nodes().rev() {
            if data.outputs.iter().any(|&value| makes_indices[index(value)]) {
                data.inputs
                    .iter()
                    .for_each(|&value| makes_indices[index(value)] = true);
            }
        }
        // Values keep their order within both parts, and nothing in the first needs anything in the second.
        let of_first = |data: &NodeData| data.outputs.iter().any(|&value| makes_indices[index(value)]);
        let (sooner, later): (Vec<_>, Vec<_>) = graph.nodes().partition(|(_, data)| of_first(data));
        let mut used_later = needed.clone();
        let mut steps = Vec::new();
        let mut first = 0;
        for (node, data) in sooner.into_iter().chain(later).rev() {
            if !data.outputs.iter().any(|&value| needed[index(value)]) {
                continue;
            }
            let mut operands: SmallVec<[Operand; 3]> = data
                .inputs
                .iter()
                .map(|&value| match splat_of(&graph, data, value) {
                    Some(value) => Operand {
                        value,
                        splat: true,
                        last: false,
                    },
                    None => Operand {
                        value,
                        splat: false,
                        last: false,
                    },
                })
                .collect();
            for operand in operands.iter_mut().rev() {
                needed[index(operand.value)] = true;
                operand.last = !std::mem::replace(&mut used_later[index(operand.value)], true);
            }
            first += usize::from(of_first(data));
            steps.push(Step { node, operands });
        }
        steps.reverse();
        Self {
            steps,
            first,
            checks,
            graph,
            id: next_id(),
            instead: None,
            description: OnceLock::new(),
        }
    }

    /// Prepares `graph`, which was to be compiled; `cause` says why it is not.
    pub fn instead(graph: Arc<Graph>, cause: &str) -> Self {
        Self {
            instead: Some(cause.to_owned()),
            ..Self::new(graph)
        }
    }

    /// Checks the indices that the first steps computed.
    fn check(&self, values: &[Option<FlexTensor>]) -> Result<(), ExecuteError> {
        for check in &self.checks {
            let data = self.graph.node(check.node);
            let indices = values[check.indices.as_u32() as usize]
                .as_ref()
                .ok_or_else(|| failure(data, "its indices have no value"))?;
            let extent = check.extent as i128;
            let wrong = find(indices, |_, index| !(0..extent).contains(&index));
            if let Some((_, index)) = wrong {
                let error = IndexError::new(data, index, check.axis, check.extent);
                return Err(ExecuteError::Index(Box::new(error)));
            }
        }
        Ok(())
    }
}

/// The rank-0 value that the operand `value` of a pointwise node repeats, if it does.
fn splat_of(graph: &Graph, user: &NodeData, value: Value) -> Option<Value> {
    if !matches!(user.op, Op::Binary(_) | Op::Compare(_)) {
        return None;
    }
    let def = graph.def(value);
    match def.op {
        Op::Broadcast { .. } if graph.shape(def.inputs[0]).rank() == 0 => Some(def.inputs[0]),
        _ => None,
    }
}

impl Executable for AotEager {
    fn run_given(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        let graph = &*self.graph;
        check_arguments(graph, inputs, scalars)?;
        let mut arguments: Vec<Option<FlexTensor>> = Vec::new();
        let mut values: Vec<Option<FlexTensor>> = vec![None; graph.num_values()];
        let clock = RunClock::start();
        for (number, step) in self.steps.iter().enumerate() {
            if number == self.first {
                self.check(&values)?;
                arguments.extend(inputs.drain(..).map(|input| Some(input.into_host())));
                // From here on the handles of the first steps are the only ones.
                for step in &self.steps[..self.first] {
                    if let Op::Parameter { index, .. } = graph.node(step.node).op {
                        arguments[index as usize] = None;
                    }
                }
            }
            let data = graph.node(step.node);
            if let Some(clock) = &clock {
                clock.begin();
            }
            let results = match &data.op {
                // The first steps get a second handle: they cannot overwrite the argument.
                Op::Parameter { index, .. } if number < self.first => {
                    smallvec![inputs[*index as usize].clone().into_host()]
                }
                Op::Parameter { index, .. } => {
                    let taken = arguments.get_mut(*index as usize).and_then(Option::take);
                    smallvec![taken.ok_or_else(|| failure(data, "its argument is gone"))?]
                }
                Op::Scalar { index, dtype } => {
                    let scalar = scalar_of_bits(scalars[*index as usize], *dtype);
                    smallvec![rank_0(*dtype, scalar)]
                }
                _ => {
                    let arguments = step.operands.iter().map(|operand| {
                        let slot = &mut values[operand.value.as_u32() as usize];
                        let tensor = if operand.last { slot.take() } else { slot.clone() };
                        let tensor = tensor.ok_or_else(|| failure(data, "an operand has no value"))?;
                        Ok(match operand.splat {
                            true => Argument::Splat(tensor),
                            false => Argument::Tensor(tensor),
                        })
                    });
                    let arguments = arguments.collect::<Result<SmallVec<[Argument; 3]>, ExecuteError>>()?;
                    compute(graph, data, arguments)?
                }
            };
            for (&value, tensor) in data.outputs.iter().zip(results) {
                debug_assert_eq!(
                    convert::tensor_type(&tensor).as_ref(),
                    Some(graph.ty(value)),
                    "result of {}",
                    data.op.name()
                );
                values[value.as_u32() as usize] = Some(tensor);
            }
            if let Some(clock) = &clock {
                clock.end(number);
            }
        }
        if self.first == self.steps.len() {
            self.check(&values)?;
            inputs.clear();
        }
        if let Some(clock) = clock {
            let nodes = self.steps.iter().map(|step| graph.node(step.node));
            clock.finish(
                self.description
                    .get_or_init(|| Arc::new(describe_nodes(graph, self.id, nodes))),
            );
        }
        let outputs = graph.outputs.iter().map(|output| {
            let value = &values[output.value.as_u32() as usize];
            value
                .clone()
                .map(Storage::from)
                .ok_or_else(|| failure(graph.def(output.value), "the output has no value"))
        });
        outputs.collect()
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn locate(&self, reference: &Reference<'_>) -> Result<Option<Parting>, ExecuteError> {
        reference.first_node(&self.graph, CompileBackend::AotEager)
    }

    fn report(&self) -> String {
        let nodes = format!(
            "{} of {} nodes, each on burn-flex",
            self.steps.len(),
            self.graph.num_nodes()
        );
        match &self.instead {
            Some(cause) => format!("{nodes}; not compiled: {cause}"),
            None => nodes,
        }
    }
}

/// The results of one node.
fn compute(
    graph: &Graph,
    data: &NodeData,
    arguments: SmallVec<[Argument; 3]>,
) -> Result<Results, ExecuteError> {
    let shape = graph.shape(data.outputs[0]).clone();
    if let Op::Binary(_) | Op::Compare(_) = data.op {
        return pointwise::binary(graph, data, arguments, &shape);
    }
    let operands: SmallVec<[FlexTensor; 3]> = arguments
        .into_iter()
        .map(|argument| argument.into_tensor(&shape))
        .collect();
    match &data.op {
        Op::Constant { value, dtype } => Ok(smallvec![rank_0(*dtype, *value)]),
        Op::Random { kind, dtype, shape } => {
            let integer = |index: usize| operands.get(index).and_then(|tensor| read_integers(tensor).pop());
            let bits = |index| integer(index).unwrap_or_default() as u64;
            let range = (
                integer(2).unwrap_or_default() as i64,
                integer(3).unwrap_or_default() as i64,
            );
            let tensor = philox::fill(*kind, *dtype, shape, bits(0), bits(1), range);
            Ok(smallvec![convert::from_host(
                &tensor,
                convert::burn_dtype(*dtype)
            )])
        }
        Op::Unary(_) | Op::Select | Op::Cast(_) => pointwise::other(graph, data, operands),
        Op::Reduce { .. }
        | Op::ArgReduce { .. }
        | Op::Cumulative { .. }
        | Op::Sort { .. }
        | Op::TopK { .. } => reduce::compute(graph, data, operands),
        Op::Iota { .. }
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::Concat { .. }
        | Op::Flip(_)
        | Op::UpdateSlice { .. } => movement::compute(graph, data, operands),
        Op::Gather { .. } | Op::Scatter { .. } | Op::IndexSelect { .. } | Op::IndexPut { .. } => {
            index::compute(graph, data, operands)
        }
        Op::DotGeneral(_) | Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => {
            contract::compute(graph, data, operands)
        }
        Op::MaxPool(_)
        | Op::MaxPoolWithIndices { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AvgPool { .. }
        | Op::AvgPoolGrad { .. } => pool::compute(graph, data, operands),
        Op::Extern(op) => Ok(external::run(op, operands.into_vec())?.into()),
        Op::Collective(_) | Op::CollectiveWait => Err(failure(data, "it runs in compiled steps alone")),
        Op::Attention(_) | Op::AttentionGrad(_) => fallback(graph, data, &operands),
        Op::Parameter { .. } | Op::Scalar { .. } | Op::Binary(_) | Op::Compare(_) => {
            Err(failure(data, "it is computed elsewhere"))
        }
    }
}

impl Argument {
    fn into_tensor(self, shape: &Shape) -> FlexTensor {
        match self {
            Argument::Tensor(tensor) => tensor,
            Argument::Splat(tensor) => movement::splat(tensor, shape),
        }
    }
}

/// Runs one node in the interpreter.
fn fallback(graph: &Graph, data: &NodeData, operands: &[FlexTensor]) -> Result<Results, ExecuteError> {
    let mut alone = Graph::new(data.op.name());
    let parameters: Vec<Value> = data
        .inputs
        .iter()
        .map(|&value| alone.parameter(graph.ty(value).clone()))
        .collect();
    let outputs = alone
        .add_node(data.op.clone(), &parameters, Provenance::default())
        .map_err(|error| failure(data, &error.to_string()))?;
    outputs.iter().for_each(|&value| alone.output(value, None));
    let operands: Vec<HostTensor> = operands.iter().filter_map(convert::to_host).collect();
    let results = interpret(&alone, &operands, &[]).map_err(|error| failure(data, &error.to_string()))?;
    Ok(results
        .iter()
        .map(|tensor| convert::from_host(tensor, convert::burn_dtype(tensor.ty().dtype)))
        .collect())
}

/// The error of a node.
fn failure(data: &NodeData, reason: &str) -> ExecuteError {
    let provenance = &data.provenance;
    let origin = match (&provenance.operation, &provenance.location) {
        (Some(operation), Some(location)) => format!(" ({operation} at {location})"),
        (Some(operation), None) => format!(" ({operation})"),
        (None, Some(location)) => format!(" (at {location})"),
        (None, None) => String::new(),
    };
    let operation = match &data.op {
        Op::Extern(op) => op.name.clone(),
        op => op.name().to_owned(),
    };
    ExecuteError::Node {
        operation,
        origin,
        reason: reason.to_owned(),
    }
}

/// A tensor of rank 0.
fn rank_0(dtype: DType, value: Scalar) -> FlexTensor {
    convert::from_host(&HostTensor::scalar(dtype, value), convert::burn_dtype(dtype))
}

/// The elements of an integer tensor, row-major.
fn read_integers(tensor: &FlexTensor) -> Vec<i128> {
    let tensor = tensor.to_contiguous();
    fn widen<T: Copy + Into<i128>>(values: &[T]) -> Vec<i128> {
        values.iter().map(|&value| value.into()).collect()
    }
    match convert::dtype(tensor.dtype()) {
        Some(DType::I64) => widen(tensor.storage::<i64>()),
        Some(DType::I32) => widen(tensor.storage::<i32>()),
        Some(DType::I16) => widen(tensor.storage::<i16>()),
        Some(DType::I8) => widen(tensor.storage::<i8>()),
        Some(DType::U64) => widen(tensor.storage::<u64>()),
        Some(DType::U32) => widen(tensor.storage::<u32>()),
        Some(DType::U16) => widen(tensor.storage::<u16>()),
        Some(DType::U8) => widen(tensor.storage::<u8>()),
        _ => Vec::new(),
    }
}
