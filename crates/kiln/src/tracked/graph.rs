//! A call of a compiled function as operations of the program's own autograd graph.
//!
//! Burn fixes an operation's number of parents, so the tracked inputs that an output depends on are joined
//! pairwise through *tokens*, tensors of one element, and the output follows from the last token:
//!
//! ```text
//!   input 0 ─► join ─► token 0 ─► join ─► token 1 ─► .. ─► last token ─► output
//!                 input 1 ──────────┘
//! ```
//!
//! Each output has a chain of its own, so that a loss of one output leaves the others to another loss, as
//! without Kiln. Burn's backward pass goes from deep operations to shallow ones, and all outputs are deeper
//! than all tokens of the call. Each output puts its gradient into the state that all of them share. Then
//! the first token runs the compiled backward pass with the gradients found there, and each join hands its
//! input the gradient from that pass. An input from which no differentiated output follows gets no
//! gradient.
//!
//! Where the function read a value ([`Link`]) its operations stay in Burn's graph. They start from the leaves
//! of the trace, which lie deeper than any token; a join hands its input the gradient that Burn has found for
//! the leaf.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{DType, Shape, TensorMetadata};
use kiln_burn::record::{BreakReason, Saved, SplitStep, session};
use kiln_burn::{Error, Kiln, KilnClient};

use super::{TrackedTensor, Tracking, inner, untracked};
use crate::input::{KilnTensor, TensorMap};

/// A tensor with the node of `like`, at another depth of the graph.
pub(super) fn stand_in(like: &TrackedTensor, order: usize) -> TrackedTensor {
    let mut tensor = untracked(inner(like.clone()));
    // The node is new, so it has no other owner.
    if let Some(node) = Arc::get_mut(&mut tensor.node) {
        node.id = like.node.id;
        node.order = order;
        node.requirement = like.node.requirement;
    }
    tensor.rc = like.rc.clone();
    tensor
}

/// Depth of the last token of a chain through all of `inputs`.
fn depth_of_tokens(inputs: &[TrackedTensor]) -> usize {
    let depths = inputs.iter().map(|input| input.node.order);
    depths.fold(0, |last, input| last.max(input) + 1)
}

/// The inputs of a call and the leaves in their place in a trace.
pub(super) struct Places {
    pub(super) inputs: Vec<TrackedTensor>,
    pub(super) leaves: Vec<TrackedTensor>,
}

/// The origin of a tracked tensor that a function returns.
pub(super) enum Place {
    /// The input of this number, as it is.
    Input(usize),
    /// A tensor of the program, from before the call.
    Captured,
    /// A leaf that the function made: a detached parameter, or a parameter that was drawn in the call. It is
    /// the program's from here on, as it is.
    Leaf,
    /// A tensor that the function computed.
    Output,
}

impl Places {
    pub(super) fn new(inputs: Vec<TrackedTensor>) -> Self {
        let depth = depth_of_tokens(&inputs);
        let leaf = |input: &TrackedTensor| {
            let root = Tracking::float_set_require_grad(untracked(inner(input.clone())), true);
            let mut leaf = stand_in(&root, depth);
            // What a function does with a parameter and with what follows from one is not the same: a
            // detached parameter is another one.
            if let Some(node) = Arc::get_mut(&mut leaf.node) {
                node.requirement = input.node.requirement;
            }
            leaf
        };
        Self {
            leaves: inputs.iter().map(leaf).collect(),
            inputs,
        }
    }

    pub(super) fn of(&self, tensor: &TrackedTensor) -> Place {
        let id = tensor.node.id;
        match self.leaves.iter().position(|leaf| leaf.node.id == id) {
            Some(index) => Place::Input(index),
            None if id.value < self.first() => Place::Captured,
            None if Tracking::float_is_require_grad(tensor) => Place::Leaf,
            None => Place::Output,
        }
    }

    /// The number of the first node of the trace.
    pub(super) fn first(&self) -> u64 {
        self.leaves[0].node.id.value
    }
}

/// The state that the operations of one call share.
#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    step: Arc<SplitStep>,
    /// Gone once every output has been differentiated.
    saved: Option<Saved>,
    /// Gradients of outputs that the backward pass has not used yet.
    tangents: Vec<Option<KilnTensor>>,
    differentiated: Vec<bool>,
    has_gradient: Vec<bool>,
    /// For each input, the client of its device.
    clients: Vec<KilnClient>,
    gradients: Vec<Option<KilnTensor>>,
}

impl Shared {
    /// Takes the gradient of input `index`; the first call after an output got a gradient runs the backward
    /// pass.
    ///
    /// # Panics
    ///
    /// If the backward pass fails: Burn's autograd has no errors.
    fn gradient(&self, index: usize) -> Option<KilnTensor> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.tangents.iter().any(Option::is_some) {
            state
                .run()
                .unwrap_or_else(|error| panic!("the compiled backward pass failed: {error}"));
        }
        state.gradients[index].take()
    }
}

impl State {
    fn run(&mut self) -> Result<(), Error> {
        let nothing = vec![None; self.tangents.len()];
        let tangents = std::mem::replace(&mut self.tangents, nothing);
        let mut reached = vec![false; self.has_gradient.iter().filter(|&&has| has).count()];
        for (index, _) in tangents
            .iter()
            .enumerate()
            .filter(|(_, tangent)| tangent.is_some())
        {
            self.differentiated[index] = true;
            let by_this = self.step.reached(index);
            reached
                .iter_mut()
                .zip(by_this)
                .for_each(|(reached, by_this)| *reached |= by_this);
        }
        let last = self.differentiated.iter().all(|&done| done);
        let saved = if last {
            self.saved.take()
        } else {
            self.saved.clone()
        };
        let Some(saved) = saved else { return Ok(()) };
        let elements = |tangent: Option<KilnTensor>| {
            tangent
                .map(|tangent| session::fetch(&tangent.into_ir(), BreakReason::OutsideOperation))
                .transpose()
        };
        let tangents = tangents
            .into_iter()
            .map(elements)
            .collect::<Result<Vec<_>, Error>>()?;
        let found = self.step.backward(saved, tangents)?;
        let mut found = found.into_iter().zip(reached);
        let inputs = self.clients.iter().zip(&self.has_gradient);
        for (gradient, (client, has)) in self.gradients.iter_mut().zip(inputs) {
            if *has {
                let tensor = found
                    .next()
                    .and_then(|(tensor, reached)| reached.then_some(tensor));
                *gradient = tensor.map(|tensor| client.adopt(tensor));
            }
        }
        Ok(())
    }
}

/// The source of the gradient of a join's input.
#[derive(Clone, Debug)]
enum Source {
    /// The compiled backward pass has it, under this number.
    Compiled(Shared, usize),
    /// Burn has it, for this leaf.
    Leaf(TrackedTensor),
}

/// Joins one more input with the tokens of those before it.
#[derive(Clone, Debug)]
struct Join {
    source: Source,
    token: KilnTensor,
    inside: Arc<Inside>,
}

/// Nodes of a trace: a gradient that reaches one of them goes no further.
#[derive(Debug, Default)]
pub(super) struct Inside {
    /// Numbers of leaves and results.
    own: Vec<u64>,
    /// The numbers that were given during the trace, to other threads, too.
    all: Range<u64>,
    /// Leaves that were made in the trace and are the program's.
    except: Vec<u64>,
    /// Shapes of tensors that the function kept elsewhere.
    kept: Vec<Shape>,
}

impl Inside {
    pub(super) fn new(own: Vec<u64>, except: Vec<u64>, kept: Vec<Shape>) -> Self {
        Self {
            own,
            except,
            kept,
            ..Self::default()
        }
    }
}

impl Join {
    fn take(&self, gradients: &mut Gradients) -> Option<KilnTensor> {
        match &self.source {
            Source::Compiled(shared, index) => shared.gradient(*index),
            // Burn's backward pass goes on to an input that follows from others, and asks for its gradient.
            Source::Leaf(leaf) => gradients.remove::<Kiln>(leaf).or_else(|| {
                let follows = !Tracking::float_is_require_grad(leaf);
                follows.then(|| {
                    let value = inner(leaf.clone());
                    value.client.zeros(value.shape(), value.dtype())
                })
            }),
        }
    }

    /// # Panics
    ///
    /// If a tensor from inside the function has a gradient: the function kept it elsewhere, and no
    /// operation in the graph would hand the gradient on.
    fn refuse_strays(&self, gradients: &Gradients) {
        if !matches!(self.source, Source::Compiled(..)) {
            return;
        }
        let mut probe = untracked(self.token.clone());
        let Inside {
            own,
            all,
            except,
            kept,
        } = &*self.inside;
        // Burn does not say whose a number is: one that another thread gave has a gradient of its own.
        let others = all
            .clone()
            .filter(|value| !kept.is_empty() && !except.contains(value));
        for value in own.iter().copied().chain(others) {
            if let Some(node) = Arc::get_mut(&mut probe.node) {
                node.id = NodeId { value };
            }
            let gradient = gradients.get::<Kiln>(&probe);
            let is_stray = |gradient: KilnTensor| own.contains(&value) || kept.contains(&gradient.shape());
            assert!(
                !gradient.is_some_and(is_stray),
                "a tensor that a compiled function kept elsewhere is part of a loss, and its gradient \
                 would be lost: return the tensor from the function, tracked (not detached)"
            );
        }
    }
}

/// The first of the joins, which has no token before it.
#[derive(Debug)]
struct First;
/// The others.
#[derive(Debug)]
struct Next;
/// An output of a call whose backward pass is compiled.
#[derive(Debug)]
struct Output;
/// An output of a call whose backward pass is Burn's.
#[derive(Debug)]
struct Linked;

/// An output puts its gradient here.
#[derive(Clone, Debug)]
struct Slot {
    shared: Shared,
    index: usize,
    token: KilnTensor,
}

impl Backward<Kiln, 1> for First {
    type State = Join;

    fn backward(self, ops: Ops<Join, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let _ = gradients.consume::<Kiln>(&ops.node);
        ops.state.refuse_strays(gradients);
        let [input] = ops.parents;
        if let (Some(node), Some(gradient)) = (input, ops.state.take(gradients)) {
            gradients.register::<Kiln>(node.id, gradient);
        }
    }
}

impl Backward<Kiln, 2> for Next {
    type State = Join;

    fn backward(self, ops: Ops<Join, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let _ = gradients.consume::<Kiln>(&ops.node);
        let [before, input] = ops.parents;
        if let (Some(node), Some(gradient)) = (input, ops.state.take(gradients)) {
            gradients.register::<Kiln>(node.id, gradient);
        }
        if let Some(node) = before {
            gradients.register::<Kiln>(node.id, ops.state.token);
        }
    }
}

impl Backward<Kiln, 1> for Output {
    type State = Slot;

    fn backward(self, ops: Ops<Slot, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Kiln>(&ops.node);
        let Slot { shared, index, token } = ops.state;
        let mut state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.tangents[index] = Some(gradient);
        drop(state);
        let [last] = ops.parents;
        if let Some(node) = last {
            gradients.register::<Kiln>(node.id, token);
        }
    }
}

impl Backward<Kiln, 2> for Linked {
    type State = KilnTensor;

    fn backward(self, ops: Ops<KilnTensor, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Kiln>(&ops.node);
        let [value, last] = ops.parents;
        if let Some(node) = value {
            gradients.register::<Kiln>(node.id, gradient);
        }
        if let Some(node) = last {
            gradients.register::<Kiln>(node.id, ops.state);
        }
    }
}

/// The last token of a chain of joins.
fn join(joins: impl Iterator<Item = (TrackedTensor, Join)>) -> Option<TrackedTensor> {
    let mut last: Option<TrackedTensor> = None;
    for (input, state) in joins {
        let value = state.token.clone();
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

/// A tensor of one element.
fn token(like: &TrackedTensor) -> KilnTensor {
    let client = inner(like.clone()).client;
    client.zeros(Shape::new([1]), DType::F32)
}

/// One call whose backward pass is compiled.
pub(super) struct Call {
    /// The inputs, captured leaves included.
    inputs: Vec<TrackedTensor>,
    shared: Shared,
}

impl Call {
    /// A call that has run forward and has `outputs` tensors that can be differentiated. `has_gradient` says
    /// for which inputs there is a gradient at all.
    pub(super) fn new(
        inputs: Vec<TrackedTensor>,
        has_gradient: Vec<bool>,
        outputs: usize,
        (step, saved): (Arc<SplitStep>, Saved),
    ) -> Self {
        let state = State {
            step,
            saved: Some(saved),
            tangents: vec![None; outputs],
            differentiated: vec![false; outputs],
            has_gradient,
            clients: inputs.iter().map(|input| inner(input.clone()).client).collect(),
            gradients: vec![None; inputs.len()],
        };
        Self {
            inputs,
            shared: Shared(Arc::new(Mutex::new(state))),
        }
    }

    /// The inputs that output `index` depends on.
    fn inputs_of(&self, index: usize) -> Vec<usize> {
        let state = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        let with_gradient = state.has_gradient.iter().enumerate().filter(|(_, has)| **has);
        let reached = with_gradient.zip(state.step.reached(index));
        reached
            .filter(|(_, reached)| **reached)
            .map(|((input, _), _)| input)
            .collect()
    }
}

/// Makes the outputs of a trace outputs of the call.
pub(super) struct Attach<'a> {
    places: &'a Places,
    call: Call,
    token: KilnTensor,
    depth: usize,
    inside: Arc<Inside>,
    next: usize,
}

impl<'a> Attach<'a> {
    pub(super) fn new(places: &'a Places, mut inside: Inside, call: Call) -> Self {
        let leaves = places.leaves.iter().map(|leaf| leaf.node.id.value);
        inside.own.extend(leaves);
        inside.all = places.first()..NodeId::new().value;
        inside
            .except
            .extend(call.inputs.iter().map(|input| input.node.id.value));
        Self {
            places,
            token: token(&places.inputs[0]),
            depth: depth_of_tokens(&call.inputs),
            inside: Arc::new(inside),
            call,
            next: 0,
        }
    }
}

impl TensorMap for Attach<'_> {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if !tensor.is_tracked() {
            return tensor;
        }
        match self.places.of(&tensor) {
            Place::Input(index) => return self.places.inputs[index].clone(),
            Place::Captured | Place::Leaf => return tensor,
            Place::Output => {}
        }
        let index = self.next;
        self.next += 1;
        let joins = self.call.inputs_of(index).into_iter().map(|input| {
            let join = Join {
                source: Source::Compiled(self.call.shared.clone(), input),
                token: self.token.clone(),
                inside: self.inside.clone(),
            };
            (self.call.inputs[input].clone(), join)
        });
        let value = inner(tensor);
        // An output that depends on no input: the function made a tracked tensor of its own.
        let Some(last) = join(joins) else {
            return untracked(value);
        };
        let slot = Slot {
            shared: self.call.shared.clone(),
            index,
            token: self.token.clone(),
        };
        match Output
            .prepare::<NoCheckpointing>([stand_in(&last, self.depth).node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish(slot, value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        }
    }
}

/// Links the outputs of a function that read a value, and whose operations are in Burn's graph, with the
/// program's graph.
pub(super) struct Link<'a> {
    places: &'a Places,
    token: KilnTensor,
    inside: Arc<Inside>,
}

impl<'a> Link<'a> {
    pub(super) fn new(places: &'a Places) -> Self {
        Self {
            token: token(&places.inputs[0]),
            // The trace's operations are part of the program's graph here.
            inside: Arc::new(Inside::default()),
            places,
        }
    }
}

impl TensorMap for Link<'_> {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if !tensor.is_tracked() {
            return tensor;
        }
        match self.places.of(&tensor) {
            Place::Input(index) => return self.places.inputs[index].clone(),
            Place::Captured | Place::Leaf => return tensor,
            Place::Output => {}
        }
        let pairs = self.places.inputs.iter().zip(&self.places.leaves);
        let joins = pairs.map(|(input, leaf)| {
            let join = Join {
                source: Source::Leaf(leaf.clone()),
                token: self.token.clone(),
                inside: self.inside.clone(),
            };
            (input.clone(), join)
        });
        let Some(last) = join(joins) else { return tensor };
        let value = inner(tensor.clone());
        match Linked
            .prepare::<NoCheckpointing>([tensor.node, last.node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish(self.token.clone(), value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        }
    }
}
