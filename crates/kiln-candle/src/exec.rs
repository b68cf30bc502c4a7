//! Running a graph: node by node in order, each value freed after its last use.

use std::sync::Arc;

use kiln_graph::op::{ExternOp, RandomKind};
use kiln_graph::{
    DType, Graph, HostTensor, IndexError, Node, NodeData, Op, Scalar, TensorType, Value, philox,
};

use crate::error::{CandleError, Computed, Failure};
use crate::value::Val;
use crate::{attention, contract, index, movement, pointwise, pool, reduce};

/// Runs an operation kept whole: its operands in, its results out, or a reason why not.
pub type ExternHandler<'a> = &'a dyn Fn(&ExternOp, Vec<HostTensor>) -> Result<Vec<HostTensor>, String>;

/// A graph ready to run on candle's CPU backend.
///
/// ```
/// use std::sync::Arc;
/// use kiln_candle::CandleExecutable;
/// use kiln_graph::op::UnaryOp;
/// use kiln_graph::{DType, Graph, HostTensor, Provenance, TensorType};
///
/// let mut graph = Graph::new("double negation");
/// let x = graph.parameter(TensorType::new(DType::F32, [2]));
/// let y = graph.unary(UnaryOp::Neg, x, &Provenance::default())?;
/// graph.output(y, None);
///
/// let executable = CandleExecutable::new(Arc::new(graph))?;
/// let out = executable.run(&[HostTensor::from_vec([2], [1.0f32, -2.0])], &[])?;
/// assert_eq!(out[0].to_f64s(), [-1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CandleExecutable {
    graph: Arc<Graph>,
    /// The values each node is the last to use, in the order of nodes; values nobody uses die where they are
    /// defined.
    dying: Vec<Vec<Value>>,
}

impl CandleExecutable {
    /// Prepares `graph`. Fails if a value is too large for this executor.
    pub fn new(graph: Arc<Graph>) -> Result<Self, CandleError> {
        for (value, data) in graph.values() {
            let count = data
                .ty
                .shape
                .iter()
                .try_fold(1usize, |n, &extent| n.checked_mul(extent));
            if count.is_none_or(|count| count >= 1 << 31) {
                let ty = data.ty.clone();
                return Err(CandleError::TooLarge { value, ty });
            }
        }
        let mut used = vec![false; graph.num_values()];
        let index = |value: Value| value.as_u32() as usize;
        for output in &graph.outputs {
            used[index(output.value)] = true;
        }
        let mut dying = vec![Vec::new(); graph.num_nodes()];
        for ((_, data), dying) in graph.nodes().rev().zip(dying.iter_mut().rev()) {
            for &value in data.outputs.iter().chain(&data.inputs) {
                if !std::mem::replace(&mut used[index(value)], true) {
                    dying.push(value);
                }
            }
        }
        Ok(Self { graph, dying })
    }

    /// The graph.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// Runs the graph on tensor arguments and runtime scalars (each [`Scalar::to_bits`] of its type); returns
    /// the outputs in order. A graph with operations kept whole needs [`CandleExecutable::run_with`].
    ///
    /// # Errors
    ///
    /// Arguments that do not fit the graph, an index out of range, an operation kept whole; the error names
    /// the node.
    pub fn run(&self, inputs: &[HostTensor], scalars: &[u64]) -> Result<Vec<HostTensor>, CandleError> {
        self.execute(inputs, scalars, None)
    }

    /// [`CandleExecutable::run`] with `handler` running the operations kept whole.
    ///
    /// # Errors
    ///
    /// As [`CandleExecutable::run`]; also what the handler reports, and results of it that are not the
    /// declared ones.
    pub fn run_with(
        &self,
        inputs: &[HostTensor],
        scalars: &[u64],
        handler: ExternHandler,
    ) -> Result<Vec<HostTensor>, CandleError> {
        self.execute(inputs, scalars, Some(handler))
    }

    fn execute(
        &self,
        inputs: &[HostTensor],
        scalars: &[u64],
        handler: Option<ExternHandler>,
    ) -> Result<Vec<HostTensor>, CandleError> {
        self.check_arguments(inputs, scalars)?;
        let call = Call {
            graph: &self.graph,
            inputs,
            scalars,
            handler,
        };
        let mut values: Vec<Option<Val>> = vec![None; self.graph.num_values()];
        let index = |value: Value| value.as_u32() as usize;
        for ((node, data), dying) in self.graph.nodes().zip(&self.dying) {
            let operands: Vec<&Val> = data
                .inputs
                .iter()
                .filter_map(|&value| values[index(value)].as_ref())
                .collect();
            debug_assert_eq!(
                operands.len(),
                data.inputs.len(),
                "operands are defined before their use"
            );
            let results = call
                .node(data, &operands)
                .map_err(|failure| node_error(node, data, failure))?;
            debug_assert_eq!(results.len(), data.outputs.len(), "{}", data.op.name());
            for (&value, result) in data.outputs.iter().zip(results) {
                debug_assert_eq!(result.ty(), *self.graph.ty(value), "{}", data.op.name());
                values[index(value)] = Some(result);
            }
            for &value in dying {
                values[index(value)] = None;
            }
        }
        self.graph
            .outputs
            .iter()
            .filter_map(|output| {
                values[index(output.value)]
                    .as_ref()
                    .map(|val| (output.value, val))
            })
            .map(|(value, val)| {
                let node = self.graph.value(value).node;
                val.to_host()
                    .map_err(|error| node_error(node, self.graph.node(node), error.into()))
            })
            .collect()
    }

    fn check_arguments(&self, inputs: &[HostTensor], scalars: &[u64]) -> Result<(), CandleError> {
        let parameters = self.graph.parameters();
        if inputs.len() != parameters.len() {
            return Err(CandleError::ArgumentCount {
                expected: parameters.len(),
                given: inputs.len(),
            });
        }
        for (index, (input, &parameter)) in inputs.iter().zip(parameters).enumerate() {
            let expected = self.graph.ty(parameter);
            if input.ty() != expected {
                return Err(CandleError::ArgumentType {
                    index,
                    expected: expected.clone(),
                    given: input.ty().clone(),
                });
            }
        }
        let expected = self.graph.scalars().len();
        if scalars.len() != expected {
            return Err(CandleError::ScalarCount {
                expected,
                given: scalars.len(),
            });
        }
        Ok(())
    }
}

fn node_error(node: Node, data: &NodeData, failure: Failure) -> CandleError {
    if let Failure::IndexOutOfRange { index, axis, extent } = failure {
        return CandleError::Index(Box::new(IndexError::new(data, index.into(), axis, extent)));
    }
    let provenance = &data.provenance;
    let origin = match (&provenance.operation, &provenance.location) {
        (Some(operation), Some(location)) => format!(" ({operation} at {location})"),
        (Some(operation), None) => format!(" ({operation})"),
        (None, Some(location)) => format!(" (at {location})"),
        (None, None) => String::new(),
    };
    CandleError::Node {
        node,
        op: data.op.name().to_owned(),
        origin,
        failure: Box::new(failure),
    }
}

/// The arguments of one run.
struct Call<'a> {
    graph: &'a Graph,
    inputs: &'a [HostTensor],
    scalars: &'a [u64],
    handler: Option<ExternHandler<'a>>,
}

impl Call<'_> {
    /// The results of one node.
    fn node(&self, data: &NodeData, operands: &[&Val]) -> Computed<Vec<Val>> {
        if let Op::Extern(op) = &data.op {
            return self.whole(op, operands);
        }
        let types: Vec<&TensorType> = data.outputs.iter().map(|&value| self.graph.ty(value)).collect();
        if types.iter().all(|ty| ty.numel() == 0) {
            // Nothing to compute, and candle's kernels need not know about empty tensors. Wrong indices stay
            // wrong.
            match &data.op {
                Op::Gather { axis }
                | Op::Scatter { axis, .. }
                | Op::IndexSelect { axis }
                | Op::IndexPut { axis, .. } => {
                    index::check(operands[1], *axis, operands[0].dims()[*axis])?;
                }
                Op::MaxPoolGrad { input } => index::check(operands[1], 2, input.iter().product())?,
                _ => {}
            }
            return types
                .iter()
                .map(|ty| Ok(Val::zeros(&ty.shape, ty.dtype)?))
                .collect();
        }
        self.compute(&data.op, operands, &types)
    }

    fn compute(&self, op: &Op, x: &[&Val], types: &[&TensorType]) -> Computed<Vec<Val>> {
        let ty = types[0];
        let one = match op {
            Op::Parameter { index, .. } => Val::from_host(&self.inputs[*index as usize])?,
            Op::Scalar { index, dtype } => scalar(self.scalars[*index as usize], *dtype)?,
            Op::Constant { value, .. } => reduce::full(*value, ty)?,
            Op::Iota { axis, .. } => reduce::iota(&ty.shape, *axis, ty.dtype)?,
            Op::Random { kind, .. } => random(*kind, x, ty)?,
            Op::Unary(op) => pointwise::unary(*op, x[0])?,
            Op::Binary(op) => pointwise::binary(*op, x[0], x[1])?,
            Op::Compare(op) => pointwise::compare(*op, x[0], x[1])?,
            Op::Select => pointwise::select_op(x[0], x[1], x[2])?,
            Op::Cast(dtype) => pointwise::cast(x[0], *dtype)?,
            Op::Reduce { op, axes } => reduce::reduce(*op, x[0], axes, ty)?,
            Op::ArgReduce { op, axis, .. } => reduce::arg_reduce(*op, x[0], *axis, ty)?,
            Op::Cumulative { op, axis } => reduce::cumulative(*op, x[0], *axis)?,
            Op::Reshape(shape) => Val::new(x[0].tensor.reshape(shape.dims())?, ty.dtype),
            Op::Transpose(perm) => Val::new(x[0].tensor.permute(perm.as_slice())?, ty.dtype),
            Op::Broadcast { shape, dims } => movement::broadcast(x[0], shape, dims)?,
            Op::Slice {
                starts,
                limits,
                steps,
            } => movement::slice(x[0], starts, limits, steps)?,
            Op::Pad { low, .. } => movement::pad(x[0], x[1], low, ty)?,
            Op::Concat { axis } => movement::concat(x, *axis)?,
            Op::Flip(axes) => movement::flip(x[0], axes)?,
            Op::UpdateSlice { starts, steps } => movement::update_slice(x[0], x[1], starts, steps)?,
            Op::Gather { axis } => index::gather(x[0], x[1], *axis)?,
            Op::Scatter { axis, mode } => index::scatter(x[0], x[1], x[2], *axis, *mode)?,
            Op::IndexSelect { axis } => index::index_select(x[0], x[1], *axis)?,
            Op::IndexPut { axis, mode } => index::index_put(x[0], x[1], x[2], *axis, *mode)?,
            Op::DotGeneral(dims) => contract::dot_general(x[0], x[1], dims, ty)?,
            Op::Conv(conv) => contract::conv(x[0], x[1], conv, ty)?,
            Op::ConvInputGrad { conv, .. } => contract::conv_input_grad(x[0], x[1], conv, ty)?,
            Op::ConvWeightGrad { conv, .. } => contract::conv_weight_grad(x[0], x[1], conv, ty)?,
            Op::MaxPool(window) => pool::max_pool(x[0], window, ty)?,
            Op::MaxPoolGrad { .. } => index::max_pool_grad(x[0], x[1], ty)?,
            Op::AvgPool {
                window,
                count_include_pad,
            } => pool::avg_pool(x[0], window, *count_include_pad, ty)?,
            Op::AvgPoolGrad {
                window,
                count_include_pad,
                ..
            } => pool::avg_pool_grad(x[0], window, *count_include_pad, ty)?,
            Op::MaxPoolWithIndices { window, dtype } => {
                let (largest, at) = pool::max_pool_with_indices(x[0], window, ty, *dtype)?;
                return Ok(vec![largest, at]);
            }
            Op::Sort {
                axis,
                descending,
                dtype,
            } => {
                let (sorted, order) = index::sort(x[0], *axis, *descending, ty.shape[*axis], *dtype)?;
                return Ok(vec![sorted, order]);
            }
            Op::TopK { axis, k, dtype } => {
                let (sorted, order) = index::sort(x[0], *axis, true, *k, *dtype)?;
                return Ok(vec![sorted, order]);
            }
            Op::Attention(dims) => {
                let (out, stats) = attention::forward(dims, x)?;
                return Ok(vec![out, stats]);
            }
            Op::AttentionGrad(dims) => return Ok(attention::backward(dims, x)?.into()),
            Op::Collective(_) | Op::CollectiveWait => {
                let name = op.name().to_owned();
                return Err(Failure::NoHandler { name });
            }
            Op::Extern(op) => return self.whole(op, x),
        };
        Ok(vec![one])
    }

    /// An operation kept whole.
    fn whole(&self, op: &ExternOp, operands: &[&Val]) -> Computed<Vec<Val>> {
        let name = || op.name.clone();
        let Some(handler) = self.handler else {
            return Err(Failure::NoHandler { name: name() });
        };
        let operands = operands
            .iter()
            .map(|operand| operand.to_host())
            .collect::<candle_core::Result<Vec<_>>>()?;
        let results = handler(op, operands).map_err(|reason| Failure::Handler { name: name(), reason })?;
        if !results.iter().map(HostTensor::ty).eq(&op.outputs) {
            return Err(Failure::HandlerResult {
                name: name(),
                expected: op.outputs.to_vec(),
                given: results.iter().map(|result| result.ty().clone()).collect(),
            });
        }
        Ok(results
            .iter()
            .map(Val::from_host)
            .collect::<candle_core::Result<_>>()?)
    }
}

/// A runtime scalar from its bits.
fn scalar(bits: u64, dtype: DType) -> candle_core::Result<Val> {
    let value = match dtype {
        DType::Bool => Scalar::Bool(bits != 0),
        _ if dtype.is_float() => Scalar::Float(f64::from_bits(bits)),
        _ if dtype.is_unsigned_int() => Scalar::UInt(bits),
        _ => Scalar::Int(bits as i64),
    };
    Val::from_host(&HostTensor::scalar(dtype, value))
}

/// Random numbers: drawn on the host, because [`philox::fill`] defines them.
fn random(kind: RandomKind, operands: &[&Val], ty: &TensorType) -> candle_core::Result<Val> {
    let mut words = [0; 4];
    for (word, operand) in words.iter_mut().zip(operands) {
        *word = operand.to_i64()?;
    }
    let [seed, stream, low, high] = words;
    let drawn = philox::fill(kind, ty.dtype, &ty.shape, seed as u64, stream as u64, (low, high));
    Val::from_host(&drawn)
}

#[cfg(test)]
mod tests {
    use kiln_graph::testing::{GraphConfig, random_graph};

    use super::*;

    /// Every value but the outputs dies exactly once: at its last use, or where it is defined if it has none.
    #[test]
    fn values_die_at_their_last_use() {
        for seed in 0..50 {
            let mut graph = random_graph(seed, &GraphConfig::default()).graph;
            // Some values nobody uses.
            let kept = graph.outputs.len() / 2;
            graph.outputs.truncate(kept);
            let executable = CandleExecutable::new(Arc::new(graph)).unwrap();
            let graph = executable.graph();
            for (value, data) in graph.values() {
                let uses = graph.nodes().filter(|(_, user)| user.inputs.contains(&value));
                let last = uses.map(|(node, _)| node).max().unwrap_or(data.node);
                let returned = graph.outputs.iter().any(|output| output.value == value);
                let expected: Vec<Node> = if returned { vec![] } else { vec![last] };
                let deaths = graph.nodes().zip(&executable.dying);
                let died: Vec<Node> = deaths
                    .flat_map(|((node, _), dying)| dying.iter().filter(|&&v| v == value).map(move |_| node))
                    .collect();
                assert_eq!(died, expected, "{value} of graph {seed}");
            }
        }
    }
}
