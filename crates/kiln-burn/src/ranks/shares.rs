//! Shares: what each rank has of a tensor that the ranks divide among them, and which updates can work on shares.
//!
//! A tensor of `n` elements on `N` ranks has shares of `ceil(n / N)` elements; zeros fill the last one up. Rank `r`
//! has the `r`-th. Like [`super::mean`], the operations here are recorded, and become collectives of a compiled graph.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_backend::{TensorData, TensorMetadata};
use burn_ir::{BaseOperationIr, FloatOperationIr, IntOperationIr, NumericOperationIr, OperationIr};
use burn_router::RouterTensor;
use kiln_distributed::{World, current};
use kiln_graph::{Collective, CollectiveKind, Op};

use crate::client::KilnClient;
use crate::custom;
use crate::execute::convert;
use crate::record::Recorded;

/// The types that stand for the functions.
struct Sum;
struct MeanShare;
struct Joined;

/// The ids of the operations, each with its collective and whether that is divided by the number of ranks.
static IDS: Mutex<BTreeMap<String, (CollectiveKind, bool)>> = Mutex::new(BTreeMap::new());

fn ids() -> MutexGuard<'static, BTreeMap<String, (CollectiveKind, bool)>> {
    IDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that this id stands for a collective.
pub(super) fn keep_id(id: &str, kind: CollectiveKind, mean: bool) {
    ids().insert(id.to_owned(), (kind, mean));
}

/// The collective that an id stands for, and whether it is divided by the number of ranks.
pub(super) fn kind_of(id: &str) -> Option<(CollectiveKind, bool)> {
    ids().get(id).copied()
}

/// The id of the sum over ranks.
static SUM: LazyLock<String> = LazyLock::new(|| {
    let id = custom::register("sum over ranks", TypeId::of::<Sum>(), None, || {
        Arc::new(|operands| operands.iter().map(sum_of).collect())
    });
    keep_id(&id, CollectiveKind::AllReduce, false);
    id
});

/// The id of a rank's share of the mean over ranks, of the gradient of a parameter.
fn mean_share_id(parameter: usize) -> String {
    let name = format!("share of the mean over ranks, parameter {parameter}");
    let id = custom::register(&name, TypeId::of::<MeanShare>(), None, || {
        Arc::new(|operands| operands.iter().map(share_of).collect())
    });
    keep_id(&id, CollectiveKind::ReduceScatter, true);
    id
}

/// The id of the shares of all ranks, joined.
static JOINED: LazyLock<String> = LazyLock::new(|| {
    let id = custom::register("shares of all ranks", TypeId::of::<Joined>(), None, || {
        Arc::new(|operands| operands.iter().map(joined_of).collect())
    });
    keep_id(&id, CollectiveKind::AllGather, false);
    id
});

/// The sum of `tensor`, of numbers, over all ranks, on each of them.
pub fn sum(tensor: RouterTensor<KilnClient>) -> RouterTensor<KilnClient> {
    if current().is_none() {
        return tensor;
    }
    let length = tensor.shape();
    call(&SUM, tensor, length)
}

/// This rank's share of the mean of `tensor` over all ranks, the gradient of a parameter that has this number among those
/// of its model. `tensor` has one dimension, whose extent the number of ranks divides.
pub fn mean_share(tensor: RouterTensor<KilnClient>, parameter: usize) -> RouterTensor<KilnClient> {
    let Some(world) = current() else { return tensor };
    let length = tensor.shape().num_elements() / world.size();
    call(&mean_share_id(parameter), tensor, [length].into())
}

/// The shares of all ranks, in the order of ranks, on each of them. `tensor` has one dimension.
pub fn joined(tensor: RouterTensor<KilnClient>) -> RouterTensor<KilnClient> {
    let Some(world) = current() else { return tensor };
    let length = tensor.shape().num_elements() * world.size();
    call(&JOINED, tensor, [length].into())
}

/// One operation of the ranks.
pub(super) fn call(
    id: &str,
    tensor: RouterTensor<KilnClient>,
    shape: burn_backend::Shape,
) -> RouterTensor<KilnClient> {
    let (client, dtype) = (tensor.client, tensor.dtype());
    client.custom(id, vec![tensor], &[(shape, dtype)]).remove(0)
}

/// The ranks, for a function of a step that runs.
fn world() -> World {
    current().expect("the ranks are connected as long as the training step lives")
}

/// The element type of an operand.
fn dtype_of(operand: &TensorData) -> kiln_graph::DType {
    convert::dtype(operand.dtype).expect("ranks exchange numbers that a graph can have")
}

// The functions panic if the ranks are not connected, which is an error of the step.

fn sum_of(operand: &TensorData) -> TensorData {
    let mut result = operand.clone();
    world()
        .all_reduce(dtype_of(operand), false, &mut result.bytes)
        .unwrap_or_else(|error| panic!("{error}"));
    result
}

fn share_of(operand: &TensorData) -> TensorData {
    let world = world();
    let share = world
        .reduce_scatter(dtype_of(operand), true, &operand.bytes)
        .unwrap_or_else(|error| panic!("{error}"));
    data(&share, operand.num_elements() / world.size(), operand)
}

fn joined_of(operand: &TensorData) -> TensorData {
    let world = world();
    let all = world
        .all_gather(&operand.bytes)
        .unwrap_or_else(|error| panic!("{error}"));
    data(&all, operand.num_elements() * world.size(), operand)
}

/// So many elements of the type of `like`.
fn data(elements: &[u8], count: usize, like: &TensorData) -> TensorData {
    let mut bytes = convert::aligned(elements.len());
    bytes.copy_from_slice(elements);
    TensorData::from_bytes(bytes, [count], like.dtype)
}

/// The collective over `ranks` that an operation of this file, or a mean, stands for.
pub(super) fn collective(op: &Op, ranks: usize) -> Option<Collective> {
    let Op::Extern(op) = op else { return None };
    let (kind, mean) = kind_of(&op.name)?;
    Some(Collective {
        mean,
        ..Collective::new(kind, ranks)
    })
}

/// Makes sure that an update, recorded on shares of `share` elements and on whole tensors, computes each element from
/// the elements at its own place alone, and with numbers that do not follow from the shape. Such an update can work
/// on shares.
///
/// # Errors
///
/// What prevents that, in words.
pub fn check_elementwise(shares: &Recorded, whole: &Recorded) -> Result<(), String> {
    if let Some(operation) = shares
        .operations
        .iter()
        .find(|operation| !is_elementwise(operation))
    {
        return Err(format!(
            "`{}` looks at more than one element at a time",
            name(operation)
        ));
    }
    let names = |recorded: &Recorded| recorded.operations.iter().map(name).collect::<Vec<_>>();
    if names(shares) != names(whole) {
        return Err("it runs other operations for another shape".into());
    }
    if shares.scalars != whole.scalars {
        return Err("its numbers follow from the shape of the parameter".into());
    }
    Ok(())
}

/// The variant of an operation: `Sum`.
fn name(operation: &OperationIr) -> String {
    let text = format!("{operation:?}");
    // `NumericFloat(F32, Sum(ReduceOpIr { .. }))`, `BaseFloat(Reshape(ShapeOpIr { .. }))`
    let head = text.split('{').next().unwrap_or(&text);
    let mut parts: Vec<&str> = head
        .split(['(', ',', ' '])
        .filter(|part| !part.is_empty())
        .collect();
    parts.pop();
    parts.pop().unwrap_or("an operation").to_owned()
}

/// Whether each element of the results follows from the elements at the same place.
fn is_elementwise(operation: &OperationIr) -> bool {
    use NumericOperationIr as N;
    match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => matches!(
            op,
            // These keep the order of elements, or repeat a single one.
            BaseOperationIr::Reshape(_)
                | BaseOperationIr::Expand(_)
                | BaseOperationIr::MaskWhere(_)
                | BaseOperationIr::MaskFill(_)
                | BaseOperationIr::Equal(_)
                | BaseOperationIr::EqualElem(_)
                | BaseOperationIr::Cast(_)
                | BaseOperationIr::Empty(_)
                | BaseOperationIr::Ones(_)
                | BaseOperationIr::Zeros(_)
        ),
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => matches!(
            op,
            N::Add(_)
                | N::AddScalar(_)
                | N::Sub(_)
                | N::SubScalar(_)
                | N::Div(_)
                | N::DivScalar(_)
                | N::Rem(_)
                | N::RemScalar(_)
                | N::Mul(_)
                | N::MulScalar(_)
                | N::Abs(_)
                | N::Full(_)
                | N::Greater(_)
                | N::GreaterElem(_)
                | N::GreaterEqual(_)
                | N::GreaterEqualElem(_)
                | N::Lower(_)
                | N::LowerElem(_)
                | N::LowerEqual(_)
                | N::LowerEqualElem(_)
                | N::Clamp(_)
                | N::Powi(_)
                | N::PowiScalar(_)
        ),
        OperationIr::Float(_, op) => !matches!(
            op,
            FloatOperationIr::Matmul(_)
                | FloatOperationIr::Cross(_)
                | FloatOperationIr::Random(_)
                | FloatOperationIr::Quantize(_)
                | FloatOperationIr::Dequantize(_)
                | FloatOperationIr::GridSample2d(_)
        ),
        OperationIr::Int(op) => !matches!(op, IntOperationIr::Matmul(_)),
        OperationIr::Bool(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_ir::{ReduceOpIr, TensorId, TensorIr, UnaryOpIr};

    use super::*;

    fn tensor(id: u64, extent: usize) -> TensorIr {
        TensorIr::uninit(TensorId::new(id), [extent].into(), DType::F32)
    }

    #[test]
    fn operations_are_told_apart_and_named() {
        let sum = OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::Sum(ReduceOpIr {
                input: tensor(1, 4),
                out: tensor(2, 1),
            }),
        );
        assert_eq!((name(&sum).as_str(), is_elementwise(&sum)), ("Sum", false));
        let root = OperationIr::Float(
            DType::F32,
            FloatOperationIr::Sqrt(UnaryOpIr {
                input: tensor(1, 4),
                out: tensor(2, 4),
            }),
        );
        assert_eq!((name(&root).as_str(), is_elementwise(&root)), ("Sqrt", true));
    }
}
