//! Data that Burn makes on the host although it follows from its shape: constant padding, `arange`.
//!
//! Recorded as data it would be an input of the step, made anew at each call. Recorded as the operation
//! that computes it, it needs no memory, and its code folds into its readers (a causal mask is two
//! coordinates and a comparison).

use burn_backend::{DType, TensorData};
use burn_ir::ScalarIr;

/// Fewest elements of a tensor that is taken for a constant because they are all equal: in real data of this
/// size they are not.
const SPLAT_ELEMENTS: usize = 64;

/// Fewest elements of a vector that is taken for a progression: shorter ones occur in real data (labels,
/// say), and a step must not change with its data.
const PROGRESSION_ELEMENTS: usize = 8;

/// The name of the operation `() -> int[n]` that counts from 0. burn-ir has none: it is recorded as a custom
/// operation.
pub const IOTA: &str = "kiln.iota";

/// The pattern of host data.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Pattern {
    /// Every element is this.
    Splat(ScalarIr),
    /// Element `i` of a vector is `start + i * step`; `step` is not 0.
    Progression {
        /// The first element.
        start: i64,
        /// The difference of neighbours.
        step: i64,
    },
}

impl Pattern {
    /// The pattern of `data`; none if it has no pattern or is too short for one.
    pub fn of(data: &TensorData) -> Option<Self> {
        match data.dtype {
            DType::F32 => splat(data),
            DType::I32 => progression(data.as_slice::<i32>().ok()?, &data.shape),
            DType::I64 => progression(data.as_slice::<i64>().ok()?, &data.shape),
            _ => None,
        }
    }
}

fn splat(data: &TensorData) -> Option<Pattern> {
    let elements = data.as_slice::<f32>().ok()?;
    let first = *elements.first().filter(|_| elements.len() >= SPLAT_ELEMENTS)?;
    let same = elements
        .iter()
        .all(|element| element.to_bits() == first.to_bits());
    same.then_some(Pattern::Splat(ScalarIr::Float(f64::from(first))))
}

fn progression<T: Copy + Into<i64>>(elements: &[T], shape: &[usize]) -> Option<Pattern> {
    let &[length] = shape else { return None };
    if length < PROGRESSION_ELEMENTS {
        return None;
    }
    let start: i64 = elements[0].into();
    let step = elements[1].into().checked_sub(start).filter(|&step| step != 0)?;
    let steady = elements
        .windows(2)
        .all(|pair| pair[1].into().checked_sub(pair[0].into()) == Some(step));
    steady.then_some(Pattern::Progression { start, step })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progressions_are_recognised_and_nothing_else() {
        let of = |elements: Vec<i64>| Pattern::of(&TensorData::new(elements.clone(), [elements.len()]));
        let progression = |start, step| Some(Pattern::Progression { start, step });
        assert_eq!(of((0..8).collect()), progression(0, 1));
        assert_eq!(of((-3..40).rev().collect()), progression(39, -1));
        assert_eq!(of((5..100).step_by(7).collect()), progression(5, 7));
        assert_eq!(of((0..7).collect()), None, "too short");
        assert_eq!(of(vec![4; 20]), None, "no step");
        assert_eq!(of((0..20).map(|i| i * i).collect()), None);
        assert_eq!(of((0..20).map(|i| if i == 19 { 0 } else { i }).collect()), None);
        let far = i64::MAX - 3;
        let wraps: Vec<i64> = (0..8).map(|i| far.wrapping_add(i)).collect();
        assert_eq!(of(wraps), None, "an overflow is no step");
        let narrow = TensorData::new((0..9i32).collect::<Vec<_>>(), [9]);
        assert_eq!(Pattern::of(&narrow), progression(0, 1));
        assert_eq!(Pattern::of(&narrow.clone().convert::<f32>()), None);
        let matrix = TensorData::new((0..9i32).collect::<Vec<_>>(), [3, 3]);
        assert_eq!(Pattern::of(&matrix), None);
    }

    #[test]
    fn equal_elements_are_recognised_by_their_bits() {
        let of = |elements: Vec<f32>| Pattern::of(&TensorData::new(elements.clone(), [elements.len()]));
        assert_eq!(of(vec![0.5; 64]), Some(Pattern::Splat(ScalarIr::Float(0.5))));
        assert_eq!(of(vec![0.5; 63]), None);
        let signs = (0..64).map(|i| if i == 40 { -0.0 } else { 0.0 }).collect();
        assert_eq!(of(signs), None);
    }
}
