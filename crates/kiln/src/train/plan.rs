//! Plans: from recorded calls to a plan for replaying them, and the comparison of a plan with later calls.
//!
//! Two recorded calls of one step make a plan if every tensor has a binding (`kiln_burn::record::binding`),
//! if the numbers that model and loss compute on the host were the same, and if the optimizer's numbers are
//! those of its rehearsal. When a step with a plan is recorded again, the new call is compared with the
//! plan in the same respects ([`Expected::difference`]): a difference means that the closure is not the
//! same function at every call, and that replays were wrong since it changed.

use std::sync::Arc;

use burn_ir::{ScalarIr, TensorId, TensorIr};
use kiln_burn::record::{self, Bindings, Call, CompiledRegion, Position, Replay, ReplayError, Watch};
use kiln_burn::{Error, KilnClient, KilnDevice};
use kiln_profile::Category;

use super::rehearsal::Updates;
use crate::input::{KilnTensor, StepInput, inspect};

/// A recorded call.
pub(super) struct Trace {
    pub call: Call,
    /// The tensors of the call's input.
    pub tensors: Vec<TensorIr>,
    /// Where the optimizer's part of the recording begins.
    pub optimizer: Position,
    /// Tensors of the input that were different in two recorded calls of this step: the closure holds none
    /// of them.
    pub varied: Vec<bool>,
    /// The expectations of the plan made from this call; none if there was no plan.
    pub expected: Option<Expected>,
}

impl Trace {
    /// The scalars of model and loss, and those of the optimizer.
    fn scalars(&self) -> (&[ScalarIr], &[ScalarIr]) {
        let scalars = &self.call.run.scalars;
        scalars.split_at(self.optimizer.scalars.min(scalars.len()))
    }

    /// Takes over the facts about the input's tensors from an earlier call of the same signature.
    pub(super) fn follow(&mut self, earlier: &Self) {
        if !earlier.call.run.step.is_same(&self.call.run.step) {
            return;
        }
        let fresh = earlier.call.fresh.iter().zip(&self.call.fresh);
        self.varied = fresh
            .zip(&earlier.varied)
            .map(|((a, b), &varied)| varied || a != b)
            .collect();
    }
}

/// The expectations of a plan, for a comparison with a later call.
#[derive(Clone)]
pub(super) struct Expected {
    pub bindings: Bindings,
    pub model_scalars: Vec<ScalarIr>,
    /// Number of the last call that was recorded and agreed, from 1.
    pub last_equal: u64,
}

/// How much of a new call must agree with the plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scrutiny {
    /// Everything.
    All,
    /// Everything if it is the same step: the optimizer may have taken another branch, which is another step.
    SameStep,
    /// Only numbers: tensors that the replay relied on were replaced, and it ended at once.
    Numbers,
}

impl Expected {
    /// How the closure of `trace`, whose bindings are `bindings`, differs from the one that the plan was
    /// made from.
    pub(super) fn difference(
        &self,
        trace: &Trace,
        bindings: &Result<Bindings, Obstacle>,
        scrutiny: Scrutiny,
    ) -> Option<String> {
        let (now, _) = trace.scalars();
        let before = &self.model_scalars;
        let tensors = || match (bindings, scrutiny) {
            (Ok(bindings), Scrutiny::All | Scrutiny::SameStep) => bindings.difference(&self.bindings),
            (Err(Obstacle::NotYet), Scrutiny::All) => Some("it runs other operations".to_owned()),
            (Err(Obstacle::Reason(reason)), Scrutiny::All | Scrutiny::SameStep) => Some(reason.clone()),
            _ => None,
        };
        let numbers = || {
            // Another step has other numbers.
            let same_length = before.len() == now.len() && !matches!(bindings, Err(Obstacle::NotYet));
            let mut pairs = before.iter().zip(now).enumerate().filter(|_| same_length);
            let (index, (before, now)) = pairs.find(|(_, (a, b))| !is_same(a, b))?;
            let line = trace.call.run.step.scalar_line(index);
            let line = line.map_or_else(String::new, |line| format!(" at {line}"));
            Some(format!(
                "a number of model or loss{line} was {} and is {}",
                number(before),
                number(now)
            ))
        };
        numbers().or_else(tensors)
    }
}

/// A scalar in words.
pub(super) fn number(scalar: &ScalarIr) -> String {
    match scalar {
        ScalarIr::Float(x) => x.to_string(),
        ScalarIr::Int(x) => x.to_string(),
        ScalarIr::UInt(x) => x.to_string(),
        ScalarIr::Bool(x) => x.to_string(),
    }
}

/// Why there is no plan.
pub(super) enum Obstacle {
    /// The two calls were not the same step; others may be.
    NotYet,
    /// The step can never be replayed.
    Reason(String),
}

impl From<ReplayError> for Obstacle {
    fn from(error: ReplayError) -> Self {
        match error.may_pass() {
            true => Self::NotYet,
            false => Self::Reason(error.to_string()),
        }
    }
}

/// The action of a call's closure that a replay would not do; none if there was none.
pub(super) fn host_obstacle(output: &impl StepInput, region: &CompiledRegion) -> Option<String> {
    if let Some(line) = region.last_seed() {
        let line = line.map_or_else(String::new, |line| format!(" at {line}"));
        return Some(format!(
            "the closure seeds the generator of random numbers{line}, which a replay would not do; seed it before the \
             step, or draw the numbers once and use them twice"
        ));
    }
    if let Some(read) = region.last_host_read() {
        let remedy = read.counterpart().unwrap_or_else(|| {
            "compute it with tensor operations, or pass the number as a plain value of the input".to_owned()
        });
        return Some(format!(
            "the closure reads {read} on the host, and what it does with the number cannot be replayed; {remedy}"
        ));
    }
    let mut visitor = crate::input::InputVisitor::default();
    output.visit(&mut visitor);
    (visitor.values() > 0).then(|| {
        "the closure returns a plain value (a number, a `bool`, a `String`) that may be another one at each call; return it as a tensor, or compute it outside".to_owned()
    })
}

/// The bindings of `last`, decided together with the `earlier` call.
pub(super) fn bind(earlier: &Trace, last: &Trace) -> Result<Bindings, Obstacle> {
    if last.call.run.step.is_provisional() {
        return Err(Obstacle::NotYet);
    }
    let mut bindings = Bindings::new(&earlier.call, &last.call)?;
    let pinned = bindings.pinned.iter_mut().zip(&last.varied);
    pinned
        .filter(|(_, varied)| **varied)
        .for_each(|(pinned, _)| *pinned = None);
    let (before, _) = earlier.scalars();
    let (now, _) = last.scalars();
    let differs = |&index: &usize| match (before.get(index), now.get(index)) {
        (Some(before), Some(now)) => !is_same(before, now),
        _ => true,
    };
    if let Some(index) = (0..now.len().max(before.len())).find(differs) {
        let line = last.call.run.step.scalar_line(index);
        let line = line.map_or_else(String::new, |line| format!(" (at {line})"));
        return Err(Obstacle::Reason(format!(
            "a number of the model or loss{line} changes from call to call; pass it as a tensor of the step's input"
        )));
    }
    Ok(bindings)
}

/// A step ready to be replayed.
pub(super) struct Plan<L> {
    pub replay: Replay,
    /// Types and shapes of the tensors of a call's input.
    pub fresh: Vec<TensorIr>,
    /// The optimizer's updates in the step.
    pub updates: Updates,
    /// The scalars of the model's part; they are the same at each call.
    model_scalars: Vec<ScalarIr>,
    /// Structure of the output, with tensors that have no elements.
    output: L,
    device: KilnDevice,
}

/// Whether two calls give the same number: NaN is what NaN is, and zero is not minus zero.
fn is_same(one: &ScalarIr, other: &ScalarIr) -> bool {
    match (one, other) {
        (ScalarIr::Float(one), ScalarIr::Float(other)) => one.to_bits() == other.to_bits(),
        (one, other) => one == other,
    }
}

/// Whether two calls give the same numbers.
fn are_same(ones: &[ScalarIr], others: &[ScalarIr]) -> bool {
    ones.len() == others.len() && ones.iter().zip(others).all(|(one, other)| is_same(one, other))
}

impl<L: StepInput + Clone> Plan<L> {
    /// A plan for more calls like `last`, whose state is under `watch`. `rehearsed` has the optimizer's
    /// scalars as a rehearsal found them, and what it did.
    pub(super) fn new(
        bindings: Bindings,
        last: &Trace,
        rehearsed: Option<(&[ScalarIr], &Updates)>,
        output: &L,
        device: KilnDevice,
        watch: &Arc<Watch>,
    ) -> Result<Self, Obstacle> {
        let (model_scalars, optimizer_scalars) = last.scalars();
        let updates = match rehearsed {
            Some((scalars, updates)) if are_same(scalars, optimizer_scalars) => updates.clone(),
            _ => {
                return Err(Obstacle::Reason(
                    "the optimizer's scalars do not follow from its own state alone, or it reads tensors on the host".into(),
                ));
            }
        };
        let mut hollow = |tensor: KilnTensor| {
            let dtype = burn_backend::TensorMetadata::dtype(&tensor);
            tensor.client.zeros([0].into(), dtype)
        };
        Ok(Self {
            replay: Replay::new(bindings, &last.call, watch),
            updates,
            fresh: last.tensors.clone(),
            model_scalars: model_scalars.to_vec(),
            output: output.clone().map(&mut hollow),
            device,
        })
    }

    /// The scalars of the model's part.
    pub(super) fn model_scalars(&self) -> &[ScalarIr] {
        &self.model_scalars
    }

    /// Whether these tensors of an input are the ones that the closure may hold as well.
    pub(super) fn accepts(&self, tensors: &[TensorIr]) -> bool {
        let pinned = self.replay.bindings().pinned.iter().zip(tensors);
        pinned
            .into_iter()
            .all(|(pinned, ir)| pinned.is_none_or(|id| id == ir.id))
    }

    /// The expectations for a later recorded call, if call `number` was the last that agreed.
    pub(super) fn expected(&self, number: u64) -> Expected {
        Expected {
            bindings: self.replay.bindings().clone(),
            model_scalars: self.model_scalars.clone(),
            last_equal: number,
        }
    }

    /// Runs the step with the optimizer's scalars of this call.
    pub(super) fn run(
        &self,
        inputs: &[TensorIr],
        input: impl StepInput,
        optimizer_scalars: &[ScalarIr],
    ) -> Result<L, Error> {
        let _span = kiln_profile::span(Category::Host, "replay");
        let fetch = |ir: &TensorIr| record::session::fetch(ir, record::BreakReason::Read);
        let fresh = inputs.iter().map(fetch).collect::<Result<Vec<_>, _>>()?;
        // The step may overwrite the batch if no other handle shares it.
        drop(input);
        let scalars = self.model_scalars.iter().chain(optimizer_scalars);
        let scalars: Vec<ScalarIr> = scalars.copied().collect();
        let mut results = self.replay.run(&fresh, &scalars)?.into_iter();
        let client = KilnClient::new(self.device);
        let mut next = |hollow: KilnTensor| results.next().map_or(hollow, |tensor| client.adopt(tensor));
        Ok(self.output.clone().map(&mut next))
    }
}

/// The ids of the tensors in `structure`, in order.
pub(super) fn ids(structure: &impl StepInput) -> Vec<TensorId> {
    inspect(structure).0.iter().map(|ir| ir.id).collect()
}
