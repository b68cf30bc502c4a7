//! Dimensions that the program marks: they vary from call to call.
//!
//! A mark belongs to a tensor, whatever handle the program has of it: clones, and the tensor inside or
//! outside of `Autodiff`, are one tensor. A recording takes the marks of its inputs when it first reads them,
//! and a step keeps them for calls whose tensors are not marked.

use std::fmt;
use std::ops::{Bound, RangeBounds};

use burn_ir::TensorIr;

use super::guard::Guard;
use super::recording::Recorded;
use super::words::dims_of;
use crate::options::Dynamic;
use crate::table;

/// A dimension that varies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The dimension, from 0.
    pub axis: usize,
    /// Its smallest size.
    pub least: usize,
    /// Its largest size; `usize::MAX` if the program gives none.
    pub most: usize,
}

/// `32 to 512`, `at least 2`
impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.most {
            usize::MAX => write!(f, "at least {}", self.least),
            most => write!(f, "{} to {most}", self.least),
        }
    }
}

/// A dimension that cannot be marked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DynamicError {
    /// The input has no tensors.
    #[error("there is no tensor whose dimension {dim} could be marked")]
    NoTensor {
        /// The dimension.
        dim: usize,
    },
    /// A tensor has fewer dimensions.
    #[error("dimension {dim} of a tensor with {rank} dimensions cannot be marked")]
    NoDimension {
        /// The dimension.
        dim: usize,
        /// Number of dimensions of the tensor.
        rank: usize,
    },
    /// The range has no size of at least 2. A dimension of size 1 is repeated where larger ones are not, so
    /// it is a step of its own.
    #[error("a marked dimension varies between sizes of at least 2, and the range has none")]
    EmptyRange,
    /// The tensor's own size is not in the range.
    #[error("dimension {dim} has size {size}, outside of the range of its mark, {least} to {most}")]
    OutOfRange {
        /// The dimension.
        dim: usize,
        /// Its size.
        size: usize,
        /// Smallest size of the range.
        least: usize,
        /// Largest size of the range.
        most: usize,
    },
    /// The tensor is a result of the region that is being recorded, or of a step that failed.
    #[error("the tensor has no elements yet: mark the inputs of a step before it is called")]
    Pending,
}

/// Marks dimension `dim` of a tensor, which has sizes of `range`.
///
/// # Errors
///
/// See [`DynamicError`]. Nothing is marked then.
pub fn mark(ir: &TensorIr, dim: usize, range: &impl RangeBounds<usize>) -> Result<(), DynamicError> {
    let rank = ir.shape.num_dims();
    let Some(&size) = ir.shape.iter().nth(dim) else {
        return Err(DynamicError::NoDimension { dim, rank });
    };
    let least = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let most = match range.end_bound() {
        Bound::Included(&end) => end,
        Bound::Excluded(&end) => end.checked_sub(1).ok_or(DynamicError::EmptyRange)?,
        Bound::Unbounded => usize::MAX,
    };
    if most < least.max(2) {
        return Err(DynamicError::EmptyRange);
    }
    if !(least..=most).contains(&size) {
        return Err(DynamicError::OutOfRange {
            dim,
            size,
            least,
            most,
        });
    }
    let mark = Mark {
        axis: dim,
        least: least.max(2),
        most,
    };
    match table::mark(ir.id, mark) {
        true => Ok(()),
        false => Err(DynamicError::Pending),
    }
}

/// A marked dimension of an input of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MarkedInput {
    /// Position of the input.
    pub input: usize,
    /// The dimension.
    pub mark: Mark,
}

/// The marked dimensions of a recording's inputs: those of its tensors, and those that a step which resembles
/// it was compiled with, as far as their ranges have the size that is there now.
pub fn of(recorded: &Recorded, resembling: &[MarkedInput]) -> Vec<MarkedInput> {
    let inputs = recorded.inputs.iter().enumerate();
    let own = inputs.flat_map(|(input, it)| it.marks.iter().map(move |&mark| MarkedInput { input, mark }));
    let mut marks: Vec<MarkedInput> = own.collect();
    for &earlier in resembling {
        let input = recorded.inputs.get(earlier.input);
        let size = input.and_then(|input| input.ir.shape.get(earlier.mark.axis));
        let is_in_range = size.is_some_and(|size| (earlier.mark.least..=earlier.mark.most).contains(size));
        let same = |other: &MarkedInput| (other.input, other.mark.axis) == (earlier.input, earlier.mark.axis);
        if is_in_range && !marks.iter().any(same) {
            marks.push(earlier);
        }
    }
    marks
}

/// A dimension of an input that is another than before.
struct Change {
    input: usize,
    axis: usize,
    before: usize,
    now: usize,
}

/// `dimension 1 of input 0 (12 became 17)`
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            input,
            axis,
            before,
            now,
        } = self;
        write!(f, "dimension {axis} of input {input} ({before} became {now})")
    }
}

/// The dimensions of inputs that differ, where a recording has inputs of the same types and ranks.
fn changes(guard: &Guard, recorded: &Recorded) -> Vec<Change> {
    let mut changes = Vec::new();
    for (index, (before, input)) in guard.inputs().iter().zip(&recorded.inputs).enumerate() {
        let Some(before) = dims_of(before) else { continue };
        let now: Vec<usize> = input.ir.shape.iter().copied().collect();
        if before.len() != now.len() {
            continue;
        }
        let differing = (0..now.len()).filter(|&axis| before[axis] != now[axis]);
        changes.extend(differing.map(|axis| Change {
            input: index,
            axis,
            before: before[axis],
            now: now[axis],
        }));
    }
    changes
}

/// What there is to say about sizes when a recording is compiled that differs from the step of `guard`.
pub fn notes(guard: &Guard, recorded: &Recorded, marks: &[MarkedInput], dynamic: Dynamic) -> Vec<String> {
    let changes = changes(guard, recorded);
    let is_marked = |change: &Change| {
        let same = |it: &MarkedInput| (it.input, it.mark.axis) == (change.input, change.axis);
        marks.iter().any(same)
    };
    let mut notes = Vec::new();
    if changes.is_empty() {
        return notes;
    }
    if let Some(why) = guard.pinned_by(recorded) {
        let marked = |change: &Change| {
            if is_marked(change) {
                ", which is marked"
            } else {
                ""
            }
        };
        let all = changes.iter().map(|change| format!("{change}{}", marked(change)));
        let all: Vec<String> = all.collect();
        notes.push(format!(
            "the program pins {}: what it records depends on the size ({why}), so each size that it treats in another way is a step of its own",
            all.join(" and ")
        ));
        return notes;
    }
    for change in &changes {
        let mark = marks
            .iter()
            .find(|it| (it.input, it.mark.axis) == (change.input, change.axis));
        if let Some(MarkedInput { mark, .. }) = mark
            && !(mark.least..=mark.most).contains(&change.now)
        {
            notes.push(format!(
                "{change} is outside of the range of its mark, {mark}: kernels for this size may be missing"
            ));
        }
    }
    if dynamic == Dynamic::Marked {
        let follows = |change: &Change| {
            let mut marked = changes.iter().filter(|other| is_marked(other));
            marked.any(|other| (other.before, other.now) == (change.before, change.now))
        };
        for change in changes
            .iter()
            .filter(|change| !is_marked(change) && !follows(change))
        {
            notes.push(format!(
                "{change} varies and is not marked, so the step is compiled for it alone: mark it with `kiln::dynamic`, or \
                 compile with `Dynamic::Auto`"
            ));
        }
    }
    notes
}
