//! A replayed training step as files that train without Kiln.
//!
//! A replay asks the host for the optimizer's numbers at each call. They come from the optimizer's Rust
//! code, which the exported step does not have. So the export rehearses that code for later calls and
//! several learning rates, and classifies each number: it is constant, it follows from the learning rate,
//! or it follows from how many steps were run. A number that follows from both is exported for the learning
//! rate of the last call, and the exported step refuses any other rate.

use std::path::Path;

use burn_core::module::AutodiffModule;
use burn_ir::ScalarIr;
use burn_optim::{LearningRate, SimpleOptimizer};
use kiln_burn::record::{self, Number, Numbers, StepExportError};

use super::plan::Plan;
use super::rehearsal::{Rehearsal, Updates};
use super::{StepOutput, TrainBackend, TrainStep};
use crate::input::StepInput;

/// Most calls for which numbers that depend on the number of the call are exported, unless they settle
/// before.
const MOST_CALLS: usize = 1 << 17;

/// Calls that are rehearsed at each of the other learning rates.
const SAMPLED_CALLS: usize = 12;

/// A sequence has settled when this part of it, at its end, is one number. A number like `1 - beta^t` stays
/// on one value for no more than 7 % of its way before it reaches its limit: `ln 3` of `24 ln 2` time
/// constants.
const SETTLED_PART: usize = 8;

/// Shortest sequence that can be said to have settled.
const SHORTEST: usize = 256;

/// Why a training step was not exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The step is not replayed, so some of its bindings are unknown.
    #[error("the training step cannot be exported: {reason}")]
    NotReplayed {
        /// The reason.
        reason: String,
    },
    /// The optimizer's numbers cannot be foretold.
    #[error(
        "the training step cannot be exported: the optimizer reads tensors on the host, or takes another branch at the next step"
    )]
    Optimizer,
    /// The step could not be compiled, or its folder not be written.
    #[error(transparent)]
    Step(Box<StepExportError>),
    /// The function could not be called.
    #[error(transparent)]
    Call(#[from] kiln_burn::Error),
    /// The function recorded nothing.
    #[error(
        "the function cannot be exported: it computes nothing from tensors, or runs inside another compiled region"
    )]
    Nothing,
}

impl From<StepExportError> for ExportError {
    fn from(error: StepExportError) -> Self {
        Self::Step(Box::new(error))
    }
}

impl<B, M, O, F, I, L> TrainStep<B, M, O, F, I, L>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<kiln_burn::Kiln>,
    F: Fn(&M, I) -> L,
    I: StepInput,
    L: StepOutput<B>,
{
    /// Writes a folder that continues the training from here, without Kiln, Rust or a compiler: `step.so`
    /// and `step.h` for C and foreign-function interfaces, `manifest.json` with every input, result and
    /// state, `state.safetensors`, and a `README.md` that shows how to call it. It runs on the CPU, draws
    /// the random numbers that this process would draw next, and computes the same bits.
    ///
    /// The step must be replayed, which it is from the third call on. The step itself is not affected by
    /// the export.
    ///
    /// # Errors
    ///
    /// If the step is not replayed, calls operations that are not compiled, or the folder cannot be written.
    pub fn export(&mut self, folder: impl AsRef<Path>) -> Result<(), ExportError> {
        let rate = self.rate.unwrap_or_default();
        let Some(replayed) = self.variants.replayed(rate, &mut self.trained) else {
            let reason = match &self.history.obstacle {
                Some(obstacle) => obstacle.clone(),
                None => "it is known from two equal calls on; call it again with an input of the same shapes"
                    .to_owned(),
            };
            return Err(ExportError::NotReplayed { reason });
        };
        let (plan, rehearsal) = replayed;
        let numbers = numbers(plan, rehearsal, rate, self.history.calls()).ok_or(ExportError::Optimizer)?;
        let options = self.region.options();
        record::export(&plan.replay, &plan.fresh, &numbers, &options, folder.as_ref())?;
        Ok(())
    }
}

/// The numbers of all later calls.
fn numbers<B, M, O, L>(
    plan: &Plan<L>,
    rehearsal: &Rehearsal<B, M, O>,
    rate: LearningRate,
    steps: u64,
) -> Option<Numbers>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<kiln_burn::Kiln>,
    L: StepOutput<B>,
{
    let mut numbers = Numbers {
        of: plan.model_scalars().iter().copied().map(Number::Fixed).collect(),
        rate,
        steps,
        ..Numbers::default()
    };
    let mut here = calls(rehearsal, &plan.updates, rate);
    let first = rehearsed(&mut here, SAMPLED_CALLS)?;
    let others = [0.5 * rate, 3.0 * rate, 1e-3, 0.017, 1.0].map(|rate| {
        let sample = rehearsed(&mut calls(rehearsal, &plan.updates, rate), SAMPLED_CALLS);
        sample.map(|sample| (rate, sample))
    });
    let others: Vec<(LearningRate, Vec<Vec<ScalarIr>>)> = others.into_iter().collect::<Option<_>>()?;
    let mut kinds = Vec::with_capacity(first[0].len());
    let mut moving = Vec::new();
    for column in 0..first[0].len() {
        let of =
            |sample: &[Vec<ScalarIr>]| -> Vec<ScalarIr> { sample.iter().map(|row| row[column]).collect() };
        let values = of(&first);
        let moves = values.iter().any(|value| *value != values[0]);
        let follows_rate = others.iter().any(|(_, sample)| of(sample) != values);
        let fitted = || {
            fit(
                rate,
                values[0],
                others.iter().map(|(rate, sample)| (*rate, sample[0][column])),
            )
        };
        kinds.push(match (moves, follows_rate) {
            (false, false) => Number::Fixed(values[0]),
            (false, true) => match fitted() {
                Some(number) => number,
                None => {
                    numbers.is_rate_fixed = true;
                    Number::Fixed(values[0])
                }
            },
            (true, follows_rate) => {
                if follows_rate {
                    numbers.is_rate_fixed = true;
                }
                moving.push((column, values));
                Number::Sequence(moving.len() - 1)
            }
        });
    }
    let expanded = rehearsal.for_all(&kinds);
    numbers.of.extend(expanded);
    numbers.sequences = sequences(moving, &mut here);
    Some(numbers)
}

/// The optimizer's numbers at the next calls, one row a call; ends where they cannot be foretold, or the
/// optimizer does something else than `updates`.
fn calls<B, M, O>(
    rehearsal: &Rehearsal<B, M, O>,
    updates: &Updates,
    rate: LearningRate,
) -> impl Iterator<Item = Vec<ScalarIr>> + use<B, M, O>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<kiln_burn::Kiln>,
{
    let (mut rehearsal, updates) = (rehearsal.fork(), updates.clone());
    std::iter::from_fn(move || {
        let row = rehearsal.representative_scalars(rate)?;
        rehearsal.commit();
        (*rehearsal.updates() == updates).then_some(row)
    })
}

fn rehearsed(calls: &mut impl Iterator<Item = Vec<ScalarIr>>, count: usize) -> Option<Vec<Vec<ScalarIr>>> {
    let rows: Vec<Vec<ScalarIr>> = calls.take(count).collect();
    (rows.len() == count).then_some(rows)
}

/// `value` as `offset + factor * rate`, if that gives exactly the values at all other rates.
fn fit(
    rate: LearningRate,
    value: ScalarIr,
    others: impl Iterator<Item = (LearningRate, ScalarIr)> + Clone,
) -> Option<Number> {
    let ScalarIr::Float(value) = value else {
        return None;
    };
    let agrees = |offset: f64, factor: f64| {
        let equal = |(rate, value): (f64, ScalarIr)| matches!(value, ScalarIr::Float(value) if (offset + factor * rate).to_bits() == value.to_bits());
        equal((rate, ScalarIr::Float(value))) && others.clone().all(equal)
    };
    [0.0, 1.0].into_iter().find_map(|offset| {
        let factor = (value - offset) / rate;
        // The division rounds: the number that the optimizer multiplied by is that, or next to it.
        let next = [
            factor,
            factor.next_up(),
            factor.next_down(),
            f64::from(factor as f32),
        ];
        let factor = next.into_iter().find(|&factor| agrees(offset, factor))?;
        Some(Number::Rate { offset, factor })
    })
}

/// Continues with the columns that change until all have settled, or cannot be predicted any further.
fn sequences(
    moving: Vec<(usize, Vec<ScalarIr>)>,
    rows: &mut impl Iterator<Item = Vec<ScalarIr>>,
) -> Vec<(Vec<ScalarIr>, bool)> {
    if moving.is_empty() {
        return Vec::new();
    }
    let (columns, mut sequences): (Vec<usize>, Vec<Vec<ScalarIr>>) = moving.into_iter().unzip();
    // How many of the last entries are one number.
    let mut equal = vec![1; columns.len()];
    let settled = |equal: usize, length: usize| length >= SHORTEST && equal >= length / SETTLED_PART;
    while sequences[0].len() < MOST_CALLS {
        let length = sequences[0].len();
        if equal.iter().all(|&equal| settled(equal, length)) {
            break;
        }
        let Some(row) = rows.next() else {
            return sequences.into_iter().map(|sequence| (sequence, false)).collect();
        };
        for ((&column, sequence), equal) in columns.iter().zip(&mut sequences).zip(&mut equal) {
            *equal = match sequence.last() == Some(&row[column]) {
                true => *equal + 1,
                false => 1,
            };
            sequence.push(row[column]);
        }
    }
    let ended = sequences.into_iter().zip(equal).map(|(mut sequence, equal)| {
        let settles = settled(equal, sequence.len());
        if settles {
            sequence.truncate(sequence.len() - equal + 1);
        }
        (sequence, settles)
    });
    ended.collect()
}
