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

/// A number stays for good when it was the same for this part of all calls since the training began. In f32,
/// a number like `1 - beta^t` stays on one value for no more than 7 % of its way before it reaches its limit:
/// `ln 3` of `24 ln 2` time constants.
const SETTLED_PART: u64 = 8;

/// Fewest and most calls that decide it. How many calls there were before the training was resumed is not
/// known here, and the last value of `1 - 0.999^t` before its limit stays for 1,100 calls.
const SETTLED_CALLS: (usize, usize) = (1 << 12, 1 << 16);

/// Fewest calls for a number of f32 that is a little below 1, as that last value is: with 0.9999, it stays
/// for 11,000.
const SETTLED_CALLS_NEAR_ONE: usize = 1 << 14;

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
    /// The step must be replayed, which it is from the third call on, with the tensors of its input changing
    /// from call to call. The step itself is not affected by the export.
    ///
    /// # Errors
    ///
    /// If the step is not replayed, its input has one tensor twice or the same tensor at each call, it calls
    /// operations that are not compiled, or the folder cannot be written.
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
fn numbers<B, O, L>(
    plan: &Plan<L>,
    rehearsal: &Rehearsal<B, O>,
    rate: LearningRate,
    steps: u64,
) -> Option<Numbers>
where
    B: TrainBackend,
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
    let others = [0.5 * rate, 3.0 * rate, 1e-3, 0.017, 1.0].map(|rate| {
        let sample = rehearsed(&mut calls(rehearsal, &plan.updates, rate), SAMPLED_CALLS);
        sample.map(|sample| (rate, sample))
    });
    let others: Vec<Sample> = others.into_iter().collect::<Option<_>>()?;
    let kinds = classify(&mut here, &others, &mut numbers)?;
    let expanded = rehearsal.for_all(&kinds);
    numbers.of.extend(expanded);
    Some(numbers)
}

/// A learning rate, and the numbers of the first calls with it.
type Sample = (LearningRate, Vec<Vec<ScalarIr>>);

/// The kind of each number of `rows`, which are those of the calls from the export on at `numbers.rate`. Adds
/// their sequences to `numbers`, and notes there whether they are right for that rate only. None if there are
/// few rows.
fn classify(
    rows: &mut impl Iterator<Item = Vec<ScalarIr>>,
    others: &[Sample],
    numbers: &mut Numbers,
) -> Option<Vec<Number>> {
    let rate = numbers.rate;
    let first = rehearsed(rows, SAMPLED_CALLS)?;
    let Columns { columns, ended } = follow(first.iter().cloned().chain(rows), first[0].len(), numbers.steps);
    let mut kinds = Vec::with_capacity(columns.len());
    // Where nothing moves and the rehearsal ended, one sequence says where.
    let mut has_end = !ended || columns.iter().any(Column::moves);
    for (column, followed) in columns.into_iter().enumerate() {
        let value = first[0][column];
        let follows_rate = others.iter().any(|(_, sample)| {
            let mut pairs = sample.iter().zip(&first);
            pairs.any(|(other, row)| other[column] != row[column])
        });
        let fitted = || {
            fit(
                rate,
                value,
                others.iter().map(|(rate, sample)| (*rate, sample[0][column])),
            )
        };
        kinds.push(match (followed.moves() || !has_end, follows_rate) {
            (false, false) => Number::Fixed(value),
            (false, true) => fitted().unwrap_or_else(|| {
                numbers.is_rate_fixed = true;
                Number::Fixed(value)
            }),
            (true, follows_rate) => {
                numbers.is_rate_fixed |= follows_rate;
                has_end = true;
                let settles = !ended && followed.has_settled(numbers.steps);
                numbers.sequences.push((followed.into_sequence(settles), settles));
                Number::Sequence(numbers.sequences.len() - 1)
            }
        });
    }
    Some(kinds)
}

/// The optimizer's numbers at the next calls, one row a call; ends where they cannot be foretold, or the
/// optimizer does something else than `updates`.
fn calls<B, O>(
    rehearsal: &Rehearsal<B, O>,
    updates: &Updates,
    rate: LearningRate,
) -> impl Iterator<Item = Vec<ScalarIr>> + use<B, O>
where
    B: TrainBackend,
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

/// One number at all calls that were rehearsed.
struct Column {
    /// Its values, up to the last one that differs from the one before.
    values: Vec<ScalarIr>,
    /// For how many calls it has had the last of them.
    equal: usize,
}

impl Column {
    fn push(&mut self, value: ScalarIr) {
        match self.values.last() {
            Some(&last) if last != value => {
                self.values.extend(std::iter::repeat_n(last, self.equal - 1));
                self.values.push(value);
                self.equal = 1;
            }
            Some(_) => self.equal += 1,
            None => {
                self.values.push(value);
                self.equal = 1;
            }
        }
    }

    fn moves(&self) -> bool {
        self.values.len() > 1
    }

    /// Whether the last value stays, if the first was that of the call after `steps` others.
    fn has_settled(&self, steps: u64) -> bool {
        let calls = steps.saturating_add((self.values.len() + self.equal) as u64);
        let (fewest, most) = match self.values.last() {
            Some(ScalarIr::Float(value)) if is_near_one(*value) => (SETTLED_CALLS_NEAR_ONE, SETTLED_CALLS.1),
            _ => SETTLED_CALLS,
        };
        let needed = usize::try_from(calls / SETTLED_PART).unwrap_or(most);
        self.equal >= needed.clamp(fewest, most)
    }

    /// The values; if the last one `settles`, it is there once.
    fn into_sequence(self, settles: bool) -> Vec<ScalarIr> {
        let mut values = self.values;
        if let (false, Some(&last)) = (settles, values.last()) {
            values.extend(std::iter::repeat_n(last, self.equal - 1));
        }
        values
    }
}

/// Whether a number is one of the last 16 of f32 below 1.
fn is_near_one(value: f64) -> bool {
    let below = 1.0 - value;
    below > 0.0 && below < f64::from(f32::EPSILON) * 8.5 && f64::from(value as f32) == value
}

/// All numbers.
struct Columns {
    columns: Vec<Column>,
    /// Whether the calls end because the next one cannot be foretold.
    ended: bool,
}

/// Follows `count` numbers through `rows` until all have settled, or cannot be predicted any further. A
/// number that does not move is followed as long: it may stay on one value for thousands of calls and move
/// then.
fn follow(mut rows: impl Iterator<Item = Vec<ScalarIr>>, count: usize, steps: u64) -> Columns {
    let empty = || Column {
        values: Vec::new(),
        equal: 0,
    };
    let mut columns: Vec<Column> = std::iter::repeat_with(empty).take(count).collect();
    for _ in 0..MOST_CALLS {
        if columns.iter().all(|column| column.has_settled(steps)) {
            break;
        }
        let Some(row) = rows.next() else {
            return Columns { columns, ended: true };
        };
        for (column, value) in columns.iter_mut().zip(row) {
            column.push(value);
        }
    }
    Columns {
        columns,
        ended: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: LearningRate = 0.01;

    /// A number that never moves, the learning rate, and the corrections of Adam in f32, as Burn computes
    /// them.
    fn adam(from: i32, rate: LearningRate) -> impl Iterator<Item = Vec<ScalarIr>> {
        let correction = |beta: f32, step: i32| ScalarIr::Float(f64::from(1.0 - beta.powi(step)));
        let row = move |step: i32| {
            let fixed = [ScalarIr::Float(1e-8), ScalarIr::Float(rate)];
            [fixed, [correction(0.9, step), correction(0.999, step)]].concat()
        };
        (from + 1..).map(row)
    }

    fn classified(
        from: i32,
        known_steps: u64,
        rows: impl Fn(LearningRate) -> Box<dyn Iterator<Item = Vec<ScalarIr>>>,
    ) -> (Vec<Number>, Numbers) {
        let mut numbers = Numbers {
            rate: RATE,
            steps: known_steps,
            ..Numbers::default()
        };
        let sample = |rate| (rate, rehearsed(&mut rows(rate), SAMPLED_CALLS).unwrap());
        let others = [0.005, 0.03, 1e-3, 1.0].map(sample);
        let kinds = classify(&mut rows(RATE), &others, &mut numbers);
        (
            kinds.unwrap_or_else(|| panic!("exported at step {from}")),
            numbers,
        )
    }

    /// What the exported step has at call `index` from the export on; none after the last one.
    fn at(kind: &Number, numbers: &Numbers, index: usize) -> Option<ScalarIr> {
        match *kind {
            Number::Fixed(value) => Some(value),
            Number::Rate { offset, factor } => Some(ScalarIr::Float(offset + factor * RATE)),
            Number::Sequence(sequence) => {
                let (values, settles) = &numbers.sequences[sequence];
                let last = settles.then(|| values.last()).flatten();
                values.get(index).or(last).copied()
            }
        }
    }

    #[test]
    fn numbers_that_are_on_a_plateau_at_the_export_move_later() {
        // From some 12,000 steps on `1 - 0.999^t` stays on one value for more calls than are sampled, and
        // from 17,300 on for good. A resumed training does not know of the steps before.
        for from in [
            0, 40, 11_000, 12_500, 14_000, 15_500, 16_500, 17_200, 18_000, 60_000,
        ] {
            for known_steps in [from as u64, 3] {
                let (kinds, numbers) = classified(from, known_steps, |rate| Box::new(adam(from, rate)));
                for (index, row) in adam(from, RATE).take(30_000).enumerate() {
                    for (kind, &value) in kinds.iter().zip(&row) {
                        assert_eq!(
                            at(kind, &numbers, index),
                            Some(value),
                            "{kind:?} {index} after {from}"
                        );
                    }
                }
                assert!(matches!(kinds[0], Number::Fixed(_)), "{kinds:?}");
                assert!(matches!(kinds[1], Number::Rate { .. }), "{kinds:?}");
                assert!(!numbers.is_rate_fixed);
            }
        }
    }

    /// A longer plateau, of a training that was resumed there.
    #[test]
    fn numbers_next_to_their_limit_are_followed_longer() {
        let correction = |step: i32| vec![ScalarIr::Float(f64::from(1.0 - 0.9999_f32.powi(step)))];
        for from in [158_000, 163_000] {
            let (kinds, numbers) = classified(from, 3, |_| Box::new((from + 1..).map(correction)));
            for (index, row) in (from + 1..).map(correction).take(30_000).enumerate() {
                assert_eq!(
                    at(&kinds[0], &numbers, index),
                    Some(row[0]),
                    "{index} after {from}"
                );
            }
        }
    }

    #[test]
    fn numbers_end_where_they_cannot_be_foretold() {
        let (kinds, numbers) = classified(0, 0, |rate| Box::new(adam(0, rate).take(5000)));
        let (values, settles) = &numbers.sequences[0];
        assert_eq!(
            (values.len(), *settles, numbers.sequences.len()),
            (5000, false, 2),
            "{kinds:?}"
        );
        // Nothing moves, and yet the step must end.
        let still = |rate: LearningRate| vec![ScalarIr::Float(rate), ScalarIr::Float(0.5)];
        let (kinds, numbers) = classified(0, 0, |rate| Box::new(std::iter::repeat_n(still(rate), 3000)));
        assert_eq!(
            kinds.iter().filter_map(|kind| at(kind, &numbers, 3000)).count(),
            1,
            "{kinds:?}"
        );
    }
}
