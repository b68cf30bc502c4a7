//! A recorded call of a training step, and its consequences for later ones.
//!
//! The closure, Burn's autograd and the optimizer run under recording, with a backup of the tensors that
//! they consume. The recording is compared with earlier calls ([`super::plan`]), which gives the variant of
//! this signature a plan or an obstacle; the other variants continue from the state that the call leaves
//! ([`super::variants`]).

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;

use burn_core::module::AutodiffModule;
use burn_ir::TensorIr;
use burn_optim::{LearningRate, SimpleOptimizer};
use kiln_burn::record::{self, Call, Place};
use kiln_burn::{Error, Kiln, KilnDevice};

use super::backup::Backup;
use super::loss_scale;
use super::places::{self, Cells, Found};
use super::plan::{self, Obstacle, Plan, Scrutiny, Trace};
use super::recording::{Recorded, Recording, Refused, Rehearsed};
use super::rehearsal::host_parts;
use super::variants::Variant;
use super::weights::{Stored, Storing};
use super::{Cause, StepOutput, TrainBackend, TrainError, TrainStep};
use crate::input::{KilnTensor, Signature, StepInput};

impl<B, M, O, F, I, L> TrainStep<B, M, O, F, I, L>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
    F: Fn(&M, I) -> L,
    I: StepInput,
    L: StepOutput<B>,
{
    /// Records one call; prepares replay if it was the same step as an earlier one.
    pub(super) fn record(
        &mut self,
        lr: LearningRate,
        input: I,
        tensors: &[TensorIr],
        signature: Signature,
        cause: Cause,
    ) -> Result<L, TrainError> {
        let (model, optim) = self.trained.take().ok_or(TrainError::Lost)?;
        // A step inside another region is a part of that region.
        let traced = self.replays && !record::is_nested();
        let cells = self
            .cells
            .get_or_insert_with(|| Cells::of::<B, M>(&model))
            .clone();
        // Burn draws a parameter when it is first used, so no other use may come before the closure's.
        let is_initialized = places::is_initialized::<B, M>(&model);
        if cells.any() && is_initialized {
            drop(model.valid());
        }
        let mut before = places::of_model::<B, M>(&model);
        let masters = self.masters.take();
        let backup = Backup::new(&*model, &optim, &cells, masters.clone());
        let copies = self.copies.take();
        let stored = self
            .storing(is_initialized)
            .and_then(|storing| Stored::new::<B, M>(&model, &cells, storing, copies));
        let keeps_copies = self.rounded.is_some() && stored.is_some();
        before.extend(match &masters {
            Some(masters) => masters.places::<B, M>(&model),
            None => stored
                .iter()
                .flat_map(|stored| stored.places::<B, M>(&model))
                .collect(),
        });

        let earlier = self.variants.position(&signature).filter(|_| traced);
        let mut backup = Some(backup);
        let recording = Recording {
            loss: &self.loss,
            rate: lr,
            cells: &cells,
            is_initialized,
            first_state: self.replays.then_some(self.start),
            traced,
            rehearses: earlier.is_some(),
            host: match earlier {
                Some(_) => host_parts(&optim),
                None => Default::default(),
            },
            scaling: self.scaling,
            // A failed step leaves the scale as it is.
            scale: self.loss_scale.clone(),
            start_scale: self.start_scale,
            stored,
            has_ranks: self.world.is_some(),
            shards: self.shards.as_ref(),
            masters,
            synchronised: self.synchronised,
            before,
        };
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.region.run(|| {
                let mut recorded = recording.run(model, optim, input);
                // The old parameters and state end here, so that the step may reuse their buffers.
                backup = backup.take().filter(|_| traced).map(Backup::surrender);
                recorded.output = recorded.output.map(&mut |tensor: KilnTensor| tensor);
                recorded
            })
        }));
        let recorded = match result {
            Ok(Ok(recorded)) => recorded,
            Ok(Err(error)) => {
                self.restore(backup);
                return Err(error.into());
            }
            Err(payload) => {
                self.restore(backup);
                match payload.downcast::<Refused>() {
                    Ok(refused) => return Err(TrainError::BatchNorm { reason: refused.0 }),
                    Err(payload) => resume_unwind(payload),
                }
            }
        };
        drop(backup);
        let Recorded {
            trained,
            mut output,
            optimizer,
            mut before,
            optimizer_before,
            loss_scale,
            scale_before,
            copies,
            masters,
            rehearsed,
        } = recorded;
        drop(scale_before);
        let after = places::of_model::<B, M>(&trained.0);
        let device = trained.0.devices().first().copied().unwrap_or_default();
        let optimizer_after = match traced {
            true => places::of_optimizer(&*trained.0, &trained.1),
            false => Vec::new(),
        };
        self.trained = Some(trained);
        let scale_after = loss_scale
            .iter()
            .flat_map(loss_scale::State::places)
            .collect::<Vec<_>>();
        self.loss_scale = loss_scale.or(self.loss_scale.take());
        let copies_after = copies
            .iter()
            .zip(&self.trained)
            .flat_map(|(copies, (model, _))| copies.places::<B, M>(model))
            .collect::<Vec<_>>();
        self.copies = copies;
        self.keeps_copies |= keeps_copies;
        let masters_after = masters
            .iter()
            .zip(&self.trained)
            .flat_map(|(masters, (model, _))| masters.places::<B, M>(model))
            .collect::<Vec<_>>();
        self.masters = masters;
        let is_cut = || {
            let run = self.region.last_run();
            run.is_some_and(|run| run.graph_break.is_some())
        };
        if keeps_copies && is_cut() && !self.region.is_frozen() {
            // A graph break makes each parameter behind it a result of what is in front of it.
            (self.rounded, self.copies) = (None, None);
        }
        let scrutiny = match cause {
            // The optimizer may give the results of one step to other places.
            Cause::Disturbed(_) | Cause::Optimizer => Scrutiny::Numbers,
            Cause::Input => Scrutiny::SameStep,
            _ => Scrutiny::All,
        };
        self.history.note(cause);
        let (true, Some(run), Some(optimizer)) = (traced, self.region.last_run(), optimizer) else {
            self.variants.drop_plans();
            return Ok(output);
        };
        let results = plan::ids(&output);
        // The caller's handles get ids of their own: a tensor that is still known under its old id has
        // another holder.
        output = detach(output)?;
        before.extend(optimizer_before);
        let call = Call {
            run,
            fresh: tensors.iter().map(|ir| ir.id).collect(),
            results,
            places: pair(
                before,
                after
                    .into_iter()
                    .chain(copies_after)
                    .chain(masters_after)
                    .chain(optimizer_after)
                    .chain(scale_after),
            ),
        };
        let places = call.places.clone();
        let mut variant = Variant {
            signature,
            types: tensors.iter().map(record::type_text).collect(),
            trace: Trace {
                varied: vec![false; call.fresh.len()],
                call,
                tensors: tensors.to_vec(),
                optimizer,
                expected: None,
            },
            plan: None,
            calls: 1,
            obstacle: None,
            lapsed: None,
        };
        let outcome = match earlier {
            Some(earlier) => self.plan(earlier, &mut variant, rehearsed, &output, device, scrutiny),
            None => Ok(()),
        };
        if !self.replays {
            // The closure is not the same function at every call, whatever the input.
            self.variants.drop_plans();
            return outcome.map(|()| output);
        }
        self.variants.resume(variant, &places);
        self.history.obstacle = self.variants.obstacle().cloned();
        // A tensor of the new state that the closure put aside keeps its id, and the model gets another.
        self.lent.store(true, Ordering::Relaxed);
        self.take_possession()?;
        outcome.map(|()| output)
    }

    /// How the call to be recorded stores parameters of 16 bits, or copies of parameters. Copies for autocast
    /// begin where nothing was compiled without them, or may be compiled once more.
    fn storing(&self, is_initialized: bool) -> Option<Storing> {
        let begins = || self.keeps_copies || self.history.calls() == 0 || !self.region.is_frozen();
        let is_own = !record::is_nested() && !record::is_disabled();
        let rounded = self.rounded.filter(|_| is_initialized && is_own && begins());
        self.weights
            .map(Storing::weights)
            .or(rounded.map(Storing::rounded))
    }

    /// After a call that failed: what a backup has of it.
    fn restore(&mut self, backup: Option<Backup<B, M, O>>) {
        self.variants.drop_plans();
        let restored = backup.and_then(Backup::restore);
        let (trained, masters) = restored.unzip();
        self.trained = trained;
        self.masters = masters.flatten();
    }

    /// Makes a plan from two calls of one signature, or says why there is none.
    fn plan(
        &mut self,
        earlier: usize,
        variant: &mut Variant<L>,
        rehearsed: Option<Rehearsed<B, O>>,
        output: &L,
        device: KilnDevice,
        scrutiny: Scrutiny,
    ) -> Result<(), TrainError> {
        let number = self.history.calls();
        variant.obstacle = self.variants.get(earlier).obstacle.clone();
        let earlier = &self.variants.get(earlier).trace;
        let trace = &mut variant.trace;
        trace.follow(earlier);
        let bindings = match plan::host_obstacle(output, &self.region) {
            Some(reason) => Err(Obstacle::Reason(reason)),
            None => plan::bind(earlier, trace),
        };
        if let Some(expected) = &earlier.expected
            && let Some(what) = expected.difference(trace, &bindings, scrutiny)
        {
            let last_equal = expected.last_equal;
            return self.distrust(what, last_equal, number);
        }
        let agreed = earlier.expected.is_some();
        let found = rehearsed
            .as_ref()
            .map(|(scalars, rehearsal)| (&scalars[..], rehearsal.updates()));
        let made = bindings
            .and_then(|bindings| Plan::new(bindings, trace, found, output, device, self.variants.watch()));
        match made {
            Ok(plan) => {
                self.history.proofs += u64::from(agreed);
                trace.expected = Some(plan.expected(number));
                variant.plan = Some(plan);
                variant.obstacle = None;
                if let Some((_, rehearsal)) = rehearsed {
                    self.variants.rehearsed(rehearsal);
                }
            }
            Err(Obstacle::NotYet) => {}
            // A tensor that the replay relied on was replaced just now; the next call shows whether it is
            // replaced each time.
            Err(Obstacle::Reason(_)) if scrutiny == Scrutiny::Numbers => {}
            Err(Obstacle::Reason(reason)) => {
                self.give_up(&reason);
                variant.obstacle = Some(reason);
            }
        }
        Ok(())
    }

    /// Ends replay for good: the closure is not the same function at every call.
    fn distrust(&mut self, what: String, last_equal: u64, call: u64) -> Result<(), TrainError> {
        self.replays = false;
        let error = TrainError::Changed {
            what,
            last_equal,
            call,
        };
        kiln_log::warn!(target: "kiln", "{error}. It is recorded at every call from now on");
        self.history.obstacle = Some(error.to_string());
        match self.strict {
            true => Err(error),
            false => Ok(()),
        }
    }

    /// Warns once that the step will be recorded at each call.
    fn give_up(&mut self, reason: &String) {
        if !self.warned.contains(reason) {
            kiln_log::warn!(target: "kiln", "the training step is recorded at every call, which costs host time: {reason}");
            self.warned.push(reason.clone());
        }
    }
}

/// `output` with handles of its own: each tensor gets a new id.
fn detach<L: StepInput>(output: L) -> Result<L, Error> {
    let mut failed = None;
    let output = output.map(&mut |tensor: KilnTensor| {
        let client = tensor.client;
        let dtype = burn_backend::TensorMetadata::dtype(&tensor);
        let ir = tensor.into_ir();
        match record::session::fetch(&ir, record::BreakReason::OutsideOperation) {
            Ok(elements) => client.adopt(elements),
            Err(error) => {
                failed.get_or_insert(error);
                KilnTensor::new(ir.id, ir.shape, dtype, client)
            }
        }
    });
    failed.map_or(Ok(output), Err)
}

/// Places that existed before and after a call.
fn pair(before: Vec<Found>, after: impl Iterator<Item = Found>) -> Vec<Place> {
    let after: std::collections::HashMap<_, _> = after.map(|found| (found.name, found.id)).collect();
    let both = before.into_iter().filter_map(|found| {
        Some(Place {
            after: *after.get(&found.name)?,
            before: found.id,
            name: found.name,
        })
    });
    both.collect()
}
