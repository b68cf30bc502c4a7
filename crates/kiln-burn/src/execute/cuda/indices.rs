//! The index checks of a step that the host can make before the step is queued.
//!
//! Where all indices of a check follow from tensors on the host, the host tells from these tensors' extremes
//! whether they are in range: at once for indices that are an argument, and by the operations in between for
//! those that the step makes of arguments (a loss that leaves out padding takes `select(labels == padding, 0,
//! labels)` for its labels). What it cannot tell is left to the step, and the run waits for it.

use burn_backend::DType;
use burn_flex::FlexTensor;
use kiln_compiler::Check;
use kiln_graph::op::Op;
use kiln_graph::range::{Bounds, Range, Ranges};
use kiln_graph::{Graph, Value};

use crate::execute::{ExecuteError, convert};

/// Where the indices of a check come from.
pub(super) enum Source {
    /// They are this argument.
    Argument(usize),
    /// They follow from arguments, and maybe from other numbers.
    Computed(Bounds),
    /// They follow from the step's own numbers.
    Step,
}

/// The sources of the indices of each check of a compiled step.
pub(super) fn sources(graph: &Graph) -> Vec<Source> {
    let mut seen: Vec<Value> = Vec::new();
    for check in kiln_graph::indices::checks(graph) {
        if !seen.contains(&check.indices) {
            seen.push(check.indices);
        }
    }
    if seen.is_empty() {
        return Vec::new();
    }
    let ranges = Ranges::new(graph);
    let source = |value: &Value| match graph.def(*value).op {
        Op::Parameter { index, .. } => Source::Argument(index as usize),
        _ => Bounds::of(graph, &ranges, *value).map_or(Source::Step, Source::Computed),
    };
    seen.iter().map(source).collect()
}

impl Source {
    /// Looks at the arguments that are on the host. Returns whether they show that all indices are in range;
    /// if not, the step has to look.
    ///
    /// # Errors
    ///
    /// If an index of an argument is out of range.
    pub(super) fn look<'a>(
        &self,
        graph: &Graph,
        check: &Check,
        host: impl Fn(usize) -> Option<&'a FlexTensor>,
    ) -> Result<bool, ExecuteError> {
        match self {
            Self::Argument(index) => match host(*index) {
                Some(tensor) => check_host_indices(check, tensor).map(|()| true),
                None => Ok(false),
            },
            Self::Computed(bounds) => {
                let given = |index: u32| {
                    let (least, most) = extremes(host(index as usize)?)?;
                    Some(Range::Int(least, most))
                };
                Ok(match bounds.range(graph, given) {
                    Some(Range::Int(least, most)) => check.error(least, most).is_none(),
                    _ => false,
                })
            }
            Self::Step => Ok(false),
        }
    }

    /// Whether the indices are the same in all runs, given which arguments are. What the step computes may
    /// follow from floats, scalars and random numbers, too.
    pub(super) fn is_constant(&self, constant: impl Fn(usize) -> bool) -> bool {
        matches!(self, Self::Argument(index) if constant(*index))
    }
}

/// The least and the largest of some integers or truth values; none if there are none, or they are floats.
fn extremes(tensor: &FlexTensor) -> Option<(i128, i128)> {
    fn of<T: Copy + Ord + Into<i128>>(elements: &[T]) -> Option<(i128, i128)> {
        let first = *elements.first()?;
        let (least, most) = elements.iter().fold((first, first), |(least, most), &element| {
            (least.min(element), most.max(element))
        });
        Some((least.into(), most.into()))
    }
    let tensor = convert::contiguous(tensor.clone());
    match tensor.dtype() {
        DType::I64 => of(tensor.storage::<i64>()),
        DType::I32 => of(tensor.storage::<i32>()),
        DType::I16 => of(tensor.storage::<i16>()),
        DType::I8 => of(tensor.storage::<i8>()),
        DType::U64 => of(tensor.storage::<u64>()),
        DType::U32 => of(tensor.storage::<u32>()),
        DType::U16 => of(tensor.storage::<u16>()),
        DType::U8 => of(tensor.storage::<u8>()),
        _ => None,
    }
}

/// An error if an index on the host is out of range.
fn check_host_indices(check: &Check, tensor: &FlexTensor) -> Result<(), ExecuteError> {
    let wrong = extremes(tensor).and_then(|(least, most)| check.error(least, most));
    match wrong {
        Some(error) => Err(ExecuteError::Index(Box::new(error))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was in range once may not be in the next run, although the integers that it follows from stay.
    #[test]
    fn computed_indices_are_not_constant() {
        let graph = Graph::parse(
            "graph @g {
               %x = parameter 0 : f32[8,6]
               %ids = parameter 1 : i64[4]
               %noise = parameter 2 : f32[4]
               %shift = cast %noise : i64[4]
               %at = add %ids, %shift : i64[4]
               %a = index_select %x, %ids {axis=0} : f32[4,6]
               %b = index_select %x, %at {axis=0} : f32[4,6]
               return %a, %b
             }",
        );
        let constant: Vec<bool> = sources(&graph.unwrap())
            .iter()
            .map(|source| source.is_constant(|_| true))
            .collect();
        assert_eq!(constant, [true, false]);
    }
}
