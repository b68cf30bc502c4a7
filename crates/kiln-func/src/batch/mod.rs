//! Batching: a function of one element becomes one of many.
//!
//! A value is either the same for every element of the batch, or it has one dimension more, the first, that
//! counts the elements. A rule says what an operation becomes if one of its operands has that dimension;
//! otherwise the operation is computed once.
//!
//! | file | operations |
//! |---|---|
//! | `structure` | functions of single elements, movements, reductions, sorting |
//! | `index` | reads and writes at computed positions |
//! | `product` | matrix products, convolutions, poolings, attention |
//! | `random` | random numbers |

mod index;
mod product;
mod random;
mod structure;

use kiln_graph::{CollectiveKind, Graph, Op, Shape, TensorType, Value};
use smallvec::{SmallVec, smallvec};

use crate::build::{Builder, Transform, rebuild};
use crate::error::{FuncError, Origin, Result, name_of};
use crate::expand;

/// The draws of random operations for the elements of a batch.
///
/// Let `op` draw a tensor of `n` elements from a seed and a stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Randomness {
    /// Every element of the batch draws what the function draws alone: elements `0..n` of the stream.
    #[default]
    Same,
    /// Element `b` of the batch takes elements `b n .. (b + 1) n` of the stream: one draw of a tensor with
    /// the batch as its first dimension. Operations differ in their streams, so all draws are independent.
    Different,
}

/// A value and whether its first dimension counts the elements of the batch.
#[derive(Clone, Copy, Debug)]
struct Lane {
    value: Value,
    batched: bool,
}

type Lanes = SmallVec<[Lane; 1]>;

/// Batches `graph`: the new one computes it for `size` elements at once.
///
/// Parameter `i` has the elements along its dimension `in_dims[i]`, which is one more than the parameter of
/// `graph` has; `None` is the same parameter for all. Runtime scalars are the same for all. Output `i` has
/// the elements along dimension `out_dims[i]`; `None` is an output that is the same for all. An output with a
/// dimension that is the same for all is repeated.
///
/// # Errors
///
/// If there is no element, a dimension does not exist, an output without a dimension differs between
/// elements, or an operation that has no batched form reads what differs.
pub fn vmap(
    graph: &Graph,
    in_dims: &[Option<usize>],
    size: usize,
    out_dims: &[Option<usize>],
    randomness: Randomness,
) -> Result<Graph> {
    check_count("parameters", graph.parameters().len(), in_dims)?;
    check_count("outputs", graph.outputs.len(), out_dims)?;
    if size == 0 {
        return Err(FuncError::EmptyBatch);
    }
    let mut batch = Batch {
        b: Builder::new(format!("vmap({})", graph.name)),
        size,
        randomness,
    };
    let mut parameters = Vec::with_capacity(in_dims.len());
    for (index, (&value, &dim)) in graph.parameters().iter().zip(in_dims).enumerate() {
        parameters.push(batch.parameter(index, graph.ty(value), dim)?);
    }
    // The arguments come first, as they are declared; then each one's batch becomes its first dimension.
    let scalars: Vec<Lane> = graph
        .scalars()
        .iter()
        .map(|&value| batch.same(graph.dtype(value)))
        .collect();
    for (lane, &dim) in parameters.iter_mut().zip(in_dims) {
        if let Some(dim) = dim {
            lane.value = batch.b.move_dim(lane.value, dim, 0)?;
        }
    }
    let lanes = rebuild(&mut batch, graph, &parameters, &scalars)?.outputs(graph);
    for (index, (lane, &dim)) in lanes.into_iter().zip(out_dims).enumerate() {
        let value = batch.output(index, lane, dim)?;
        if graph.outputs[index].check {
            batch.b.graph.check_output(value);
        } else {
            batch.b.graph.output(value, None);
        }
    }
    Ok(batch.b.graph.without_dead_code())
}

fn check_count(what: &'static str, expected: usize, dims: &[Option<usize>]) -> Result<()> {
    let given = dims.len();
    if given == expected {
        Ok(())
    } else {
        Err(FuncError::DimCount {
            what,
            expected,
            given,
        })
    }
}

/// The type of a batch of `size` elements of type `ty` along `dim`.
fn with_batch(
    what: &'static str,
    index: usize,
    ty: &TensorType,
    dim: usize,
    size: usize,
) -> Result<TensorType> {
    if dim > ty.shape.rank() {
        let ty = ty.clone();
        return Err(FuncError::DimRange { what, index, dim, ty });
    }
    let mut shape = ty.shape.to_vec();
    shape.insert(dim, size);
    Ok(TensorType::new(ty.dtype, shape))
}

struct Batch {
    b: Builder,
    size: usize,
    randomness: Randomness,
}

impl Batch {
    fn parameter(&mut self, index: usize, ty: &TensorType, dim: Option<usize>) -> Result<Lane> {
        let declared = match dim {
            Some(dim) => with_batch("parameter", index, ty, dim, self.size)?,
            None => ty.clone(),
        };
        // A type that no memory holds is an error, not a panic.
        let op = Op::Parameter {
            index: index as u32,
            ty: declared,
            copy_of: None,
        };
        Ok(Lane {
            value: self.b.op(op, &[])?,
            batched: dim.is_some(),
        })
    }

    fn same(&mut self, dtype: kiln_graph::DType) -> Lane {
        Lane {
            value: self.b.graph.scalar(dtype),
            batched: false,
        }
    }

    fn output(&mut self, index: usize, lane: Lane, dim: Option<usize>) -> Result<Value> {
        match (dim, lane.batched) {
            (None, false) => Ok(lane.value),
            (None, true) => Err(FuncError::Differs { index }),
            (Some(dim), _) => {
                with_batch("output", index, &self.element(lane), dim, self.size)?;
                let value = self.batched(lane)?;
                self.b.move_dim(value, 0, dim)
            }
        }
    }

    /// The type of one element.
    fn element(&self, lane: Lane) -> TensorType {
        let mut ty = self.b.ty(lane.value);
        if lane.batched {
            ty.shape = Shape::from(&ty.shape[1..]);
        }
        ty
    }

    /// `shape` with the batch before it.
    fn wide(&self, shape: &[usize]) -> Shape {
        [self.size].into_iter().chain(shape.iter().copied()).collect()
    }

    /// The value with a batch dimension, repeated if it has none.
    fn batched(&mut self, lane: Lane) -> Result<Value> {
        if lane.batched {
            return Ok(lane.value);
        }
        let shape = self.b.shape(lane.value);
        let dims: Vec<usize> = (1..=shape.rank()).collect();
        let wide = self.wide(&shape);
        self.b.op(
            Op::Broadcast {
                shape: wide,
                dims: dims[..].into(),
            },
            &[lane.value],
        )
    }

    fn all_batched(&mut self, lanes: &[Lane]) -> Result<SmallVec<[Value; 4]>> {
        lanes.iter().map(|&lane| self.batched(lane)).collect()
    }

    /// An operation on operands that all have the batch dimension, so that its results have it.
    fn apply(&mut self, op: Op, lanes: &[Lane]) -> Result<Lanes> {
        let operands = self.all_batched(lanes)?;
        let results = self.b.node(op, &operands)?;
        Ok(results.into_iter().map(per_element).collect())
    }

    /// Applies the rule of an operation that draws random numbers, or that has an operand with the batch
    /// dimension.
    fn rule(&mut self, op: &Op, x: &[Lane]) -> Result<Lanes> {
        let one = |value: Value| -> Lanes { smallvec![per_element(value)] };
        match op {
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => {
                self.apply(op.clone(), x)
            }
            Op::Random { .. } => self.random(op, x),
            Op::Reduce { .. }
            | Op::ArgReduce { .. }
            | Op::Cumulative { .. }
            | Op::Sort { .. }
            | Op::TopK { .. }
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Broadcast { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Flip(_)
            | Op::UpdateSlice { .. }
            | Op::Gather { .. }
            | Op::Scatter { .. } => {
                let op = self.shifted(op);
                self.apply(op, x)
            }
            Op::Pad { low, high } => self.pad(low, high, x).map(one),
            Op::IndexSelect { axis } => self.index_select(*axis, x).map(one),
            Op::IndexPut { axis, mode } => self.index_put(*axis, *mode, x).map(one),
            Op::DotGeneral(dims) => self.dot(dims, x[0], x[1]).map(one),
            Op::Conv(conv) => self.conv(conv, x[0], x[1]).map(one),
            Op::ConvInputGrad { conv, input } => self.conv_input_grad(conv, input, x[0], x[1]).map(one),
            Op::ConvWeightGrad { conv, kernel } => self.conv_weight_grad(conv, kernel, x[0], x[1]).map(one),
            Op::MaxPool(_)
            | Op::MaxPoolWithIndices { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AvgPool { .. }
            | Op::AvgPoolGrad { .. } => self.folded(op, x),
            Op::Attention(dims) => self.attention(op, *dims, x),
            Op::AttentionGrad(dims) => self.attention(op, *dims, x),
            Op::Collective(collective)
                if matches!(
                    collective.kind,
                    CollectiveKind::AllReduce | CollectiveKind::FromRoot
                ) =>
            {
                self.apply(op.clone(), x)
            }
            Op::CollectiveWait => self.apply(op.clone(), x),
            Op::Collective(_) => Err(FuncError::NoBatching {
                operation: name_of(op),
                origin: Origin::new(&self.b.provenance),
                remedy: "it joins or divides the first dimension of each element; batch what surrounds it",
            }),
            Op::Extern(_) => Err(FuncError::NoBatching {
                operation: name_of(op),
                origin: Origin::new(&self.b.provenance),
                remedy: "it is kept whole; write it with operations that Kiln knows, or call it outside of what is \
                         batched",
            }),
            Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. } | Op::Iota { .. } => {
                unreachable!("{} has no operands", op.name())
            }
        }
    }

    /// Batches `graph`, the expansion of an operation into others.
    fn expanded(&mut self, graph: &Graph, x: &[Lane]) -> Result<Lanes> {
        let results = rebuild(self, graph, x, &[])?.outputs(graph);
        Ok(results.into_iter().collect())
    }

    /// Attention kept whole where it can be, otherwise written with other operations.
    fn attention(&mut self, op: &Op, dims: kiln_graph::op::AttentionDims, x: &[Lane]) -> Result<Lanes> {
        if let Some(lanes) = self.whole_attention(op, dims, x)? {
            return Ok(lanes);
        }
        let types: Vec<TensorType> = x.iter().map(|&lane| self.element(lane)).collect();
        let graph = match op {
            Op::AttentionGrad(_) => expand::attention_grad(&types, dims)?,
            _ => expand::attention(&types, dims)?,
        };
        self.expanded(&graph, x)
    }
}

/// A value whose first dimension counts the elements.
fn per_element(value: Value) -> Lane {
    Lane { value, batched: true }
}

impl Transform for Batch {
    type Counterpart = Lane;

    fn builder(&mut self) -> &mut Builder {
        &mut self.b
    }

    fn push(&mut self, op: &Op, inputs: &[Lane]) -> Result<Lanes> {
        let differs = inputs.iter().any(|lane| lane.batched);
        let draws = matches!(op, Op::Random { .. }) || draws_inside(op);
        if differs || (draws && self.randomness == Randomness::Different) {
            return self.rule(op, inputs);
        }
        let operands: SmallVec<[Value; 4]> = inputs.iter().map(|lane| lane.value).collect();
        let results = self.b.node(op.clone(), &operands)?;
        let same = |value| Lane {
            value,
            batched: false,
        };
        Ok(results.into_iter().map(same).collect())
    }
}

/// Whether an operation other than [`Op::Random`] draws random numbers.
fn draws_inside(op: &Op) -> bool {
    matches!(op, Op::Attention(dims) | Op::AttentionGrad(dims) if dims.dropout)
}
