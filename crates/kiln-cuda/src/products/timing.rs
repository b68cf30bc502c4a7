//! Times of calls, by events of the device.

use crate::error::Result;
use crate::runtime::Stream;

/// A first run this many times as slow as the best is not timed further.
const HOPELESS: f32 = 2.0;
/// Microseconds that the timed runs of one algorithm should take together, so that the clock's half
/// microsecond is little.
const TIMED_MICROSECONDS: f32 = 500.0;

/// Rounds of calls that are timed in turns.
const ROUNDS: usize = 4;

/// What queues a call.
pub(super) type Call<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Microseconds of one of at most `runs` runs of a library's call that `run` queues; a first guess if that is
/// hopeless beside `fastest`.
pub(crate) fn time_runs(
    stream: &Stream,
    runs: u32,
    fastest: Option<f32>,
    mut run: impl FnMut() -> Result<()>,
) -> Result<f32> {
    let guess = guess(stream, &mut run)?;
    if fastest.is_some_and(|fastest| guess > HOPELESS * fastest.max(10.0)) {
        return Ok(guess);
    }
    let runs = enough(runs, guess);
    Ok(time(stream, runs, &mut run)?.min(time(stream, runs, &mut run)?))
}

/// The same of several calls, which are timed in turns: the device's clock is the same for all of them, and
/// what they have less than each other is their own.
pub(crate) fn time_in_turns(stream: &Stream, runs: u32, calls: &mut [Call<'_>]) -> Result<Vec<f32>> {
    let guesses = calls.iter_mut().map(|run| guess(stream, run));
    let counts: Vec<u32> = guesses
        .map(|guess| Ok(enough(runs, guess?)))
        .collect::<Result<_>>()?;
    let mut best = vec![f32::INFINITY; calls.len()];
    for _ in 0..ROUNDS {
        for ((run, &runs), best) in calls.iter_mut().zip(&counts).zip(&mut best) {
            *best = best.min(time(stream, runs, run)?);
        }
    }
    Ok(best)
}

/// Microseconds of a second run: the first one loads the code.
fn guess(stream: &Stream, run: &mut dyn FnMut() -> Result<()>) -> Result<f32> {
    time(stream, 1, run)?;
    time(stream, 1, run)
}

/// Of at most `runs` runs, so many that they take [`TIMED_MICROSECONDS`].
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "between one and `runs`, which are some dozens"
)]
fn enough(runs: u32, guess: f32) -> u32 {
    (TIMED_MICROSECONDS / guess.max(1.0)).clamp(1.0, runs.max(1) as f32) as u32
}

/// Microseconds of one of `runs` runs, one behind the other.
fn time(stream: &Stream, runs: u32, run: &mut dyn FnMut() -> Result<()>) -> Result<f32> {
    let start = stream.record_time()?;
    for _ in 0..runs {
        run()?;
    }
    let end = stream.record_time()?;
    #[allow(clippy::cast_precision_loss, reason = "a count of at most some dozens")]
    let runs = runs as f32;
    Ok(end.milliseconds_since(&start)? * 1000.0 / runs)
}
