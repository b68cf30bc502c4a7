//! Recordings that are transformed and become one operation of another recording: transformed functions that
//! are called inside a region.
//!
//! The closure is recorded on placeholders while the region's recording stays open
//! ([`session::record_part`]), imported and transformed as by [`super::transformed`]. The graph is not
//! compiled: it is registered as a function ([`super::functions`]), and the region records one operation, which
//! reads the caller's tensors for the placeholders, what the closure captures, and a tensor for each runtime
//! scalar. A closure that was recorded before is not imported again.

use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use burn_backend::DType;
use burn_ir::{CustomOpIr, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::{RouterTensor, RunnerClient};
use kiln_graph::Graph;
use rustc_hash::FxHashMap;

use super::functions::{self, Function};
use super::gradient;
use super::guard::Guard;
use super::recording::{Identity, Recorded};
use super::session;
use super::step::{Binding, Scalars};
use super::transformed::{Captured, Key, Transformed, complete, type_of};
use super::words::type_text;
use crate::client::KilnClient;
use crate::error::Error;
use crate::execute::{ExecuteError, convert};
use crate::inlined::{Body, Inlined, Number, Operand};

/// What decides the graph of a call.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct CallKey {
    /// The name of the function.
    name: String,
    identity: Identity,
    key: Key,
}

/// The functions of calls, as long as somebody keeps them.
static CALLS: LazyLock<Mutex<FxHashMap<CallKey, Weak<Function>>>> = LazyLock::new(Mutex::default);

/// Records the function that `transform` makes of a recording as one operation of the region under way, and
/// returns its results. `given` are the tensors for the placeholders, then those for the parameters that the
/// transform has added; `results` are the element types of the function's results. Tensors that the closure
/// left elsewhere have no value.
///
/// # Errors
///
/// If the recording cannot be imported or transformed, or no region is under way. Nothing is recorded then.
pub fn call<E: From<Error>>(
    name: &str,
    client: KilnClient,
    what: Transformed<'_>,
    given: Vec<RouterTensor<KilnClient>>,
    results: &[DType],
    transform: impl FnOnce(Graph) -> Result<Graph, E>,
) -> Result<Vec<RouterTensor<KilnClient>>, E> {
    what.fail_others();
    let function = function(name, &what, transform);
    let recorded = match &function {
        Ok(function) => record(name, client, &what, &function.inlined, given, results),
        Err(_) => Ok((Vec::new(), Vec::new())),
    };
    let read = recorded.as_ref().map_or(&[] as &[TensorId], |(_, read)| read);
    let_go(what.recorded, read);
    function?;
    Ok(recorded?.0)
}

/// Gives up a recording that was made for [`call`].
pub fn abandon(recorded: &Recorded) {
    if session::is_inside_region() {
        let_go(recorded, &[]);
    }
}

/// Lets go of what the closure used for the last time, but for tensors that the operation has read.
fn let_go(recorded: &Recorded, read: &[TensorId]) {
    let ended = recorded.inputs.iter().filter(|input| input.tensor_dies());
    ended
        .map(|input| input.ir.id)
        .filter(|id| !read.contains(id))
        .for_each(session::let_go);
}

/// The function of a call, known or made now.
fn function<E: From<Error>>(
    name: &str,
    what: &Transformed<'_>,
    transform: impl FnOnce(Graph) -> Result<Graph, E>,
) -> Result<Arc<Function>, E> {
    let calls = || CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let key = CallKey {
        name: name.to_owned(),
        identity: what.recorded.identity.clone(),
        key: what.key(),
    };
    let seen = calls().get(&key).and_then(Weak::upgrade);
    if let Some(function) = seen {
        return Ok(function);
    }
    let recorded = what.recorded;
    let sources = gradient::sources(&recorded.operations, &recorded.lines, &recorded.full_precision);
    let (graph, captured, scalars) = complete(name, what, |position| recorded.source(&sources, position))?;
    let scalars = Scalars::new(&recorded.operations, &scalars, &graph);
    let graph = transform(graph)?.without_dead_code();
    let body = Body::new(
        graph,
        what.arguments.len(),
        &captured,
        &scalars,
        recorded.streams.len(),
    );
    let guard = Guard::new(recorded, sources);
    let mut calls = calls();
    if let Some(function) = calls.get(&key).and_then(Weak::upgrade) {
        // Another thread was faster.
        return Ok(function);
    }
    let function = functions::register(name, body, guard);
    calls.retain(|_, function| function.strong_count() > 0);
    calls.insert(key, Arc::downgrade(&function));
    Ok(function)
}

impl Body {
    /// A graph whose parameters are `arguments` placeholders, the `captured` tensors, and those that a
    /// transform has added.
    fn new(graph: Graph, arguments: usize, captured: &[Captured], scalars: &Scalars, draws: usize) -> Self {
        let users = graph.users();
        let mut operands = Vec::new();
        let mut operand = |operand: Operand| {
            operands.push(operand);
            operands.len() - 1
        };
        let source = |index: usize| match index.checked_sub(arguments) {
            None => Operand::Given(index),
            Some(index) => match captured.get(index) {
                Some(Captured::Input(position)) => Operand::Captured(*position),
                Some(Captured::Result(position)) => Operand::Result(*position),
                None => Operand::Given(arguments + index - captured.len()),
            },
        };
        let parameters = graph.parameters().iter().enumerate();
        let parameters = parameters
            .map(|(index, &value)| (users.count(value) > 0).then(|| operand(source(index))))
            .collect();
        let number = |(&value, (binding, dtype))| match binding {
            _ if users.count(value) == 0 => Number::Unused,
            Binding::Recorded(index) => Number::Operand(operand(Operand::Scalar(index, dtype))),
            Binding::Seed(draw) => Number::Seed(draw),
            Binding::Stream(draw) => Number::Stream(draw),
        };
        let scalars = graph
            .scalars()
            .iter()
            .zip(scalars.sources())
            .map(number)
            .collect();
        let added = arguments + captured.len()..graph.parameters().len();
        Self {
            given: (0..arguments).chain(added).collect(),
            parameters,
            scalars,
            operands,
            draws,
            graph,
        }
    }

    /// Whether the caller's tensors have the types of the parameters: tangents and cotangents are given apart
    /// from what they belong to.
    fn check(&self, given: &[RouterTensor<KilnClient>]) -> Result<(), ExecuteError> {
        if given.len() != self.given.len() {
            return Err(ExecuteError::TensorCount {
                expected: self.given.len(),
                given: given.len(),
            });
        }
        for (index, (tensor, &parameter)) in given.iter().zip(&self.given).enumerate() {
            let expected = self.graph.ty(self.graph.parameters()[parameter]);
            let ir = tensor.clone().into_ir();
            if type_of(&ir).as_ref() != Some(expected) {
                return Err(ExecuteError::TensorType {
                    index,
                    expected: expected.clone(),
                    given: type_text(&ir),
                });
            }
        }
        Ok(())
    }
}

/// Records the operation; returns its results, and the operands that end with it.
fn record(
    name: &str,
    client: KilnClient,
    what: &Transformed<'_>,
    function: &Inlined,
    given: Vec<RouterTensor<KilnClient>>,
    results: &[DType],
) -> Result<(Vec<RouterTensor<KilnClient>>, Vec<TensorId>), Error> {
    function.body.check(&given).map_err(|source| Error::Execute {
        region: name.to_owned(),
        source: source.into(),
    })?;
    let mut given: Vec<Option<RouterTensor<KilnClient>>> = given.into_iter().map(Some).collect();
    let (mut host_data, mut ended) = (Vec::new(), Vec::new());
    let missing = || Error::NoValue {
        reason: "a function inside a region was called with fewer tensors than it has".into(),
    };
    let mut operand = |operand: &Operand| match *operand {
        Operand::Given(index) => {
            let tensor = given.get_mut(index).and_then(Option::take);
            tensor.map(RouterTensor::into_ir).ok_or_else(missing)
        }
        Operand::Captured(position) => {
            let input = &what.recorded.inputs[position];
            host_data.extend(input.is_host_data().then_some(input.ir.id));
            if input.tensor_dies() {
                ended.push(input.ir.id);
            }
            Ok(captured(&input.ir, input.tensor_dies()))
        }
        Operand::Result(position) => Ok(captured(&what.results[position], false)),
        Operand::Scalar(index, dtype) => {
            let value = what.recorded.scalars[index];
            Ok(client.number(convert::burn_dtype(dtype), value).into_ir())
        }
    };
    let operands = function.body.operands.iter().map(&mut operand);
    let inputs = operands.collect::<Result<Vec<TensorIr>, Error>>()?;
    let shapes = function.body.graph.outputs.iter().zip(results);
    let outputs: Vec<TensorIr> = shapes
        .map(|(output, &dtype)| {
            let shape = convert::burn_shape(function.body.graph.shape(output.value));
            TensorIr::uninit(client.create_empty_handle(), shape, dtype)
        })
        .collect();
    let operation = OperationIr::Custom(CustomOpIr {
        id: function.id.clone(),
        inputs,
        outputs: outputs.clone(),
    });
    if !session::record_function(operation, &what.recorded.streams, &host_data) {
        return Err(Error::NoValue {
            reason: "the region that calls the function is over".into(),
        });
    }
    let tensor = |ir: TensorIr| RouterTensor::new(ir.id, ir.shape, ir.dtype, client);
    Ok((outputs.into_iter().map(tensor).collect(), ended))
}

/// A captured tensor as an operand; its last use if it `ends`.
fn captured(ir: &TensorIr, ends: bool) -> TensorIr {
    TensorIr {
        status: match ends {
            true => TensorStatus::ReadWrite,
            false => TensorStatus::ReadOnly,
        },
        ..ir.clone()
    }
}
