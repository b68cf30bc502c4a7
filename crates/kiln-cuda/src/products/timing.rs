//! Times of calls, by events of the device.

use crate::error::Result;
use crate::runtime::Stream;

/// A first run this many times as slow as the best is not timed further.
const HOPELESS: f32 = 2.0;
/// Microseconds that the timed runs of one algorithm should take together, so that the clock's half
/// microsecond is little.
const TIMED_MICROSECONDS: f32 = 500.0;

/// Calls that are timed again, in turns, if they are slower than the fastest by no more than this factor: the
/// clock of a device moves, and what is timed later meets another one.
const CLOSE: f32 = 1.1;
/// How many of them at most, the fastest ones.
const FINALISTS: usize = 4;
/// Rounds of calls that are timed in turns.
const ROUNDS: usize = 4;

/// What queues a call.
type Call<'a> = &'a mut dyn FnMut() -> Result<()>;

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

/// The place of the fastest of calls that were timed one after the other; none of none. Those that are close
/// are timed again, in turns.
pub(crate) fn fastest<T>(
    stream: &Stream,
    runs: u32,
    timed: &mut [(T, f32)],
    run: impl Fn(&mut T) -> Result<()>,
) -> Result<Option<usize>> {
    let run = &run;
    settle(timed, |close| {
        let mut each: Vec<_> = close.iter_mut().map(|call| move || run(call)).collect();
        let mut calls: Vec<Call<'_>> = each.iter_mut().map(|run| run as Call<'_>).collect();
        time_in_turns(stream, runs, &mut calls)
    })
}

/// [`fastest`], with the times that `again` gives those that are close, the fastest first.
fn settle<T>(
    timed: &mut [(T, f32)],
    again: impl FnOnce(&mut [&mut T]) -> Result<Vec<f32>>,
) -> Result<Option<usize>> {
    let least = timed.iter().map(|(_, time)| *time).fold(f32::INFINITY, f32::min);
    let mut close: Vec<(usize, &mut (T, f32))> = timed
        .iter_mut()
        .enumerate()
        .filter(|(_, (_, time))| *time <= CLOSE * least)
        .collect();
    close.sort_by(|(_, a), (_, b)| a.1.total_cmp(&b.1));
    close.truncate(FINALISTS);
    if close.len() > 1 {
        let mut calls: Vec<&mut T> = close.iter_mut().map(|(_, (call, _))| call).collect();
        let times = again(&mut calls)?;
        for ((_, (_, time)), again) in close.iter_mut().zip(times) {
            *time = again;
        }
    }
    let best = close.into_iter().min_by(|(_, a), (_, b)| a.1.total_cmp(&b.1));
    Ok(best.map(|(place, _)| place))
}

/// Microseconds of one run of each of several calls, which are timed in turns: the device's clock is the same
/// for all of them.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of the fastest of calls with these times, and which of them were timed again; there they
    /// take the second time.
    fn settled(times: &[(f32, f32)]) -> (Option<usize>, Vec<usize>) {
        let mut timed: Vec<(usize, f32)> = times.iter().map(|(first, _)| *first).enumerate().collect();
        let mut again = Vec::new();
        let best = settle(&mut timed, |close| {
            again.extend(close.iter().map(|place| **place));
            Ok(close.iter().map(|place| times[**place].1).collect())
        });
        for (place, &(first, second)) in times.iter().enumerate() {
            let expected = if again.contains(&place) { second } else { first };
            assert_eq!(timed[place], (place, expected));
        }
        (best.unwrap(), again)
    }

    #[test]
    fn what_is_close_is_timed_again() {
        // The second was timed at a lower clock. The third is too far off, whatever it would take.
        let times = [(10.0, 12.0), (10.9, 11.0), (11.1, 1.0)];
        assert_eq!(settled(&times), (Some(1), vec![0, 1]));
        // The fastest ones, at most four.
        let times = [10.9, 10.1, 10.0, 10.8, 10.2, 10.3].map(|time| (time, 20.0 - time));
        assert_eq!(settled(&times), (Some(5), vec![2, 1, 4, 5]));
    }

    #[test]
    fn one_that_stands_out_is_not() {
        assert_eq!(
            settled(&[(30.0, 1.0), (10.0, 99.0), (20.0, 1.0)]),
            (Some(1), vec![])
        );
        assert_eq!(settled(&[(5.0, 1.0)]), (Some(0), vec![]));
        assert_eq!(settled(&[]), (None, vec![]));
    }
}
