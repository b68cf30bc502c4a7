//! A compiled function inside an eager autograd graph: its backward pass is compiled, too.
//!
//! The function is traced on leaves of its own, one for each tracked tensor that it takes, together with its gradients: every tracked output is
//! multiplied by a *tangent*, the gradient that the program will have for it, and Burn's autograd differentiates the sum. The trace is split and compiled by
//! kiln-burn ([`SplitRegion`]); the forward pass runs at once.
//!
//! In the program's own autograd graph the whole function is three kinds of operations. Burn fixes an operation's number of parents, so the tracked
//! inputs are joined pairwise through a token, a tensor of one element that stands for the call, and each tracked output follows from the last token:
//!
//! ```text
//!   input 0 ─► join ─► token 0 ─► join ─► token 1 ─► .. ─► last token ─┬─► output 0
//!                 input 1 ──────────┘                                  └─► output 1
//! ```
//!
//! Backward, outputs run before the last token, since the program's autograd goes by depth. An output puts its gradient into the state that all of them share; the last token
//! runs the compiled backward pass; each join hands its input the gradient that it finds there.

use std::sync::{Arc, Mutex, PoisonError};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::backend::BackendTypes;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{AutodiffBackend, Shape, TensorMetadata};
use burn_flex::FlexTensor;
use burn_ir::TensorId;
use burn_router::{RouterTensor, RunnerClient};
use kiln_burn::record::{BreakReason, Recorded, Saved, SplitRegion, SplitStep, session, split, trace};
use kiln_burn::{Error, Kiln, table};

use crate::input::{KilnTensor, StepInput, TensorMap};

type Tracking = Autodiff<Kiln>;

/// A float tensor in a program's autograd graph.
pub type TrackedTensor = <Tracking as BackendTypes>::FloatTensorPrimitive;

/// The tensor inside.
pub(crate) fn inner(tensor: TrackedTensor) -> KilnTensor {
    <Tracking as AutodiffBackend>::inner(tensor)
}

/// A tensor outside any autograd graph.
pub(crate) fn untracked(tensor: KilnTensor) -> TrackedTensor {
    <Tracking as AutodiffBackend>::from_inner(tensor)
}

fn leaf(tensor: KilnTensor) -> TrackedTensor {
    Tracking::float_set_require_grad(untracked(tensor), true)
}

fn id(tensor: &KilnTensor) -> TensorId {
    // A copy beside the original: its status is read-only, so this is no last use.
    tensor.clone().into_ir().id
}

/// The tracked tensors of an input, in order; the input stays as it is.
pub(crate) fn tracked_tensors<A: StepInput>(input: A) -> (A, Vec<TrackedTensor>) {
    let mut found = Collect::default();
    let input = input.map(&mut found);
    (input, found.0)
}

/// Takes down the tracked tensors it is shown.
#[derive(Default)]
pub(crate) struct Collect(pub(crate) Vec<TrackedTensor>);

impl TensorMap for Collect {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if tensor.is_tracked() {
            self.0.push(tensor.clone());
        }
        tensor
    }
}

/// Puts the leaves of a trace in the place of the tracked tensors, in order.
pub(crate) struct Leaves(std::vec::IntoIter<TrackedTensor>);

impl TensorMap for Leaves {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if tensor.is_tracked() {
            self.0.next().unwrap_or(tensor)
        } else {
            tensor
        }
    }
}

/// What a trace leaves behind.
struct Trace<R> {
    result: R,
    /// Outputs that the leaves lead to.
    outputs: Vec<KilnTensor>,
    tangents: Vec<KilnTensor>,
    /// For each leaf, its gradient; none if no output depends on it.
    gradients: Vec<Option<KilnTensor>>,
}

/// Runs `function` on leaves in the place of `inputs`, and differentiates it.
fn differentiate<R: StepInput>(
    inputs: &[TrackedTensor],
    function: impl FnOnce(&mut Leaves) -> R,
) -> Trace<R> {
    let leaves: Vec<TrackedTensor> = inputs.iter().map(|input| leaf(inner(input.clone()))).collect();
    let result = function(&mut Leaves(leaves.clone().into_iter()));
    let (result, tracked) = tracked_tensors(result);
    let mut tangents = Vec::with_capacity(tracked.len());
    let mut outputs = Vec::with_capacity(tracked.len());
    let mut sum: Option<TrackedTensor> = None;
    for output in tracked {
        let value = inner(output.clone());
        let client = value.client;
        let tangent = RouterTensor::new(client.create_empty_handle(), value.shape(), value.dtype(), client);
        let weighted = Tracking::float_sum(Tracking::float_mul(output, untracked(tangent.clone())));
        sum = Some(match sum {
            Some(sum) => Tracking::float_add(sum, weighted),
            None => weighted,
        });
        tangents.push(tangent);
        outputs.push(value);
    }
    let gradients = sum.map(<Tracking as AutodiffBackend>::backward);
    let gradients = leaves.iter().map(|leaf| {
        let gradients = gradients.as_ref()?;
        <Tracking as AutodiffBackend>::grad(leaf, gradients)
    });
    let gradients = gradients.collect();
    Trace {
        result,
        outputs,
        tangents,
        gradients,
    }
}

/// Calls `function` with leaves in the place of `inputs`, compiled, and returns its result as part of the program's autograd graph. None if the function
/// read a value, and can therefore not be traced.
pub(crate) fn call<R: StepInput>(
    region: &SplitRegion,
    inputs: Vec<TrackedTensor>,
    function: impl FnOnce(&mut Leaves) -> R,
) -> Result<Option<R>, Error> {
    let Some((traced, recorded)) = trace(|| differentiate(&inputs, function)) else {
        return Ok(None);
    };
    let Trace {
        result,
        outputs,
        tangents,
        gradients,
    } = traced;
    let wanted: Vec<TensorId> = gradients.iter().flatten().map(id).collect();
    let tangent_ids: Vec<TensorId> = tangents.iter().map(id).collect();
    let step = region.step(&recorded, &wanted, &tangent_ids)?;
    let saved = run_forward(&step, &recorded, &wanted)?;
    if outputs.is_empty() {
        return Ok(Some(result));
    }
    let shared = Shared(Arc::new(Mutex::new(State {
        step,
        saved: Some(saved),
        shapes: outputs.clone(),
        tangents: vec![None; outputs.len()],
        has_gradient: gradients.iter().map(Option::is_some).collect(),
        gradients: vec![None; inputs.len()],
    })));
    let token = join(inputs, &shared);
    let mut attach = Attach {
        shared,
        token,
        next: 0,
    };
    Ok(Some(result.map(&mut attach)))
}

/// Runs the forward pass and gives the tensors of the trace their values.
fn run_forward(step: &SplitStep, recorded: &Recorded, gradients: &[TensorId]) -> Result<Saved, Error> {
    let ids = split::results(recorded, gradients);
    match step.forward(recorded) {
        Ok((tensors, saved)) => {
            ids.into_iter()
                .zip(tensors)
                .for_each(|(id, tensor)| table::insert(id, tensor));
            Ok(saved)
        }
        Err(error) => {
            let reason: Arc<str> = error.to_string().into();
            ids.into_iter().for_each(|id| table::fail(id, reason.clone()));
            Err(error)
        }
    }
}

/// What the operations of one call share.
#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    step: Arc<SplitStep>,
    /// Gone once the backward pass has run.
    saved: Option<Saved>,
    /// The outputs, for the shapes of gradients that nobody has.
    shapes: Vec<KilnTensor>,
    tangents: Vec<Option<KilnTensor>>,
    has_gradient: Vec<bool>,
    gradients: Vec<Option<KilnTensor>>,
}

impl Shared {
    /// Takes the gradient of input `index`; the first call runs the backward pass.
    ///
    /// # Panics
    ///
    /// If the backward pass fails: Burn's autograd has no errors.
    fn gradient(&self, index: usize) -> Option<KilnTensor> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(saved) = state.saved.take() {
            state
                .run(saved)
                .unwrap_or_else(|error| panic!("the compiled backward pass failed: {error}"));
        }
        state.gradients[index].take()
    }
}

impl State {
    fn run(&mut self, saved: Saved) -> Result<(), Error> {
        let tangents = std::mem::take(&mut self.tangents);
        let elements = |(tangent, like): (Option<KilnTensor>, &KilnTensor)| match tangent {
            Some(tangent) => session::fetch(&tangent.into_ir(), BreakReason::OutsideOperation),
            None => Ok(FlexTensor::zeros(like.shape(), like.dtype())),
        };
        let tangents = tangents
            .into_iter()
            .zip(&self.shapes)
            .map(elements)
            .collect::<Result<Vec<_>, Error>>()?;
        let client = self.shapes[0].client;
        let mut found = self.step.backward(saved, tangents)?.into_iter();
        for (gradient, has) in self.gradients.iter_mut().zip(&self.has_gradient) {
            if *has {
                *gradient = found.next().map(|tensor| client.adopt(tensor));
            }
        }
        Ok(())
    }
}

/// A tensor of one element.
fn token(like: &KilnTensor) -> KilnTensor {
    let zero = FlexTensor::zeros(Shape::new([1]), like.dtype());
    like.client.adopt(zero)
}

/// Joins one more input with the tokens of those before it.
#[derive(Clone, Debug)]
struct Join {
    shared: Shared,
    index: usize,
}

/// The first of the joins, which has no token before it.
#[derive(Debug)]
struct First;
/// The others.
#[derive(Debug)]
struct Next;
/// An output of the call.
#[derive(Debug)]
struct Output;

impl Backward<Kiln, 1> for First {
    type State = Join;

    fn backward(self, ops: Ops<Join, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let _ = gradients.consume::<Kiln>(&ops.node);
        let [input] = ops.parents;
        if let (Some(node), Some(gradient)) = (input, ops.state.shared.gradient(ops.state.index)) {
            gradients.register::<Kiln>(node.id, gradient);
        }
    }
}

impl Backward<Kiln, 2> for Next {
    type State = Join;

    fn backward(self, ops: Ops<Join, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let dummy = gradients.consume::<Kiln>(&ops.node);
        let [before, input] = ops.parents;
        if let (Some(node), Some(gradient)) = (input, ops.state.shared.gradient(ops.state.index)) {
            gradients.register::<Kiln>(node.id, gradient);
        }
        if let Some(node) = before {
            gradients.register::<Kiln>(node.id, dummy);
        }
    }
}

impl Backward<Kiln, 1> for Output {
    type State = Join;

    fn backward(self, ops: Ops<Join, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Kiln>(&ops.node);
        let dummy = token(&gradient);
        let Join { shared, index } = ops.state;
        let mut state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tangent) = state.tangents.get_mut(index) {
            *tangent = Some(gradient);
        }
        drop(state);
        let [last] = ops.parents;
        if let Some(node) = last {
            gradients.register::<Kiln>(node.id, dummy);
        }
    }
}

/// The last token of a call on `inputs`, of which there is at least one.
fn join(inputs: Vec<TrackedTensor>, shared: &Shared) -> Option<TrackedTensor> {
    let mut last: Option<TrackedTensor> = None;
    for (index, input) in inputs.into_iter().enumerate() {
        let value = token(&inner(input.clone()));
        let state = Join {
            shared: shared.clone(),
            index,
        };
        last = Some(match last {
            None => match First
                .prepare::<NoCheckpointing>([input.node])
                .compute_bound()
                .stateful()
            {
                OpsKind::Tracked(prepared) => prepared.finish(state, value),
                OpsKind::UnTracked(prepared) => prepared.finish(value),
            },
            Some(before) => match Next
                .prepare::<NoCheckpointing>([before.node, input.node])
                .compute_bound()
                .stateful()
            {
                OpsKind::Tracked(prepared) => prepared.finish(state, value),
                OpsKind::UnTracked(prepared) => prepared.finish(value),
            },
        });
    }
    last
}

/// Makes the outputs of a trace outputs of the call.
struct Attach {
    shared: Shared,
    token: Option<TrackedTensor>,
    next: usize,
}

impl TensorMap for Attach {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        let tracked = tensor.is_tracked();
        let value = inner(tensor);
        let Some(token) = self.token.clone().filter(|_| tracked) else {
            return untracked(value);
        };
        let state = Join {
            shared: self.shared.clone(),
            index: self.next,
        };
        self.next += 1;
        match Output
            .prepare::<NoCheckpointing>([token.node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish(state, value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        }
    }
}
