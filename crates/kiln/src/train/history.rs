//! How often a step was recorded and replayed, and why it was recorded.

use std::fmt;

/// Why a call was recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The first call: there is nothing to replay.
    First,
    /// Another call like the last one, which shows what stays the same.
    Confirming,
    /// The input has other types, shapes or plain values than that of any step recorded lately, or other
    /// tensors of it are the same.
    Input,
    /// The program replaced, dropped or wrote something that the replay relied on.
    Disturbed(String),
    /// The optimizer's host code took another branch than before, or its state was asked for.
    Optimizer,
    /// The call was due to be compared with the plan ([`History::proofs`]).
    Proof,
    /// The step was called where nothing is recorded ([`crate::disable`]).
    Disabled,
    /// The step was called inside another region, whose recording it joins.
    Nested,
    /// The step cannot be replayed.
    Obstacle(String),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("the first call"),
            Self::Confirming => f.write_str("a second call that shows what stays the same"),
            Self::Input => f.write_str(
                "the input has other types, shapes, plain values or coincidences of tensors than before",
            ),
            Self::Disturbed(what) => f.write_str(what),
            Self::Optimizer => {
                f.write_str("the optimizer's host code took another branch, or its state was asked for")
            }
            Self::Proof => f.write_str("a proof: the step is recorded again and compared with its plan"),
            Self::Disabled => {
                f.write_str("called inside of `kiln::disable`, where nothing is recorded or replayed")
            }
            Self::Nested => f.write_str("called inside another region, which records it"),
            Self::Obstacle(reason) => write!(f, "the step cannot be replayed: {reason}"),
        }
    }
}

/// The number of different causes that a history keeps; further ones are only counted in
/// [`History::recorded`].
const CAUSES: usize = 32;

/// How often a step was recorded and replayed, and why it is not replayed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Calls that ran model, autograd and optimizer code.
    pub recorded: u64,
    /// Calls that ran none of it.
    pub replayed: u64,
    /// Why the step is recorded each time, if it is.
    pub obstacle: Option<String>,
    /// Why calls were recorded, and how many for each cause, in the order in which the causes came up.
    pub causes: Vec<(Cause, u64)>,
    /// Recorded calls that were compared with the plan and agreed with it.
    pub proofs: u64,
}

impl History {
    /// Calls that succeeded.
    pub fn calls(&self) -> u64 {
        self.recorded + self.replayed
    }

    pub(super) fn note(&mut self, cause: Cause) {
        self.recorded += 1;
        match self.causes.iter().position(|(known, _)| *known == cause) {
            Some(position) => self.causes[position].1 += 1,
            None if self.causes.len() < CAUSES => self.causes.push((cause, 1)),
            None => {}
        }
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} calls recorded, {} replayed", self.recorded, self.replayed)?;
        for (cause, count) in &self.causes {
            writeln!(f, "  {count} x {cause}")?;
        }
        Ok(())
    }
}
