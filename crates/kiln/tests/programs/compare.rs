//! What a program looks at, as numbers, and the comparison of two runs.

use burn::tensor::{Bool, Int, Tensor};

use crate::program::B;
use kiln::Kiln;

/// Largest difference of a value from the plain run's, relative to its norm.
pub const TOLERANCE: f64 = 1e-5;

/// A value that a program can look at.
pub trait Look: Clone + 'static {
    /// Reads the value: the numbers of each tensor in it, and each plain number, in a fixed order.
    fn look(&self, parts: &mut Vec<Vec<f64>>);
}

macro_rules! tensors {
    ($($backend:ty),*) => {$(
        impl<const D: usize> Look for Tensor<$backend, D> {
            fn look(&self, parts: &mut Vec<Vec<f64>>) {
                parts.push(self.to_data().convert::<f64>().iter::<f64>().collect());
            }
        }

        impl<const D: usize> Look for Tensor<$backend, D, Int> {
            fn look(&self, parts: &mut Vec<Vec<f64>>) {
                parts.push(self.to_data().iter::<i64>().map(|x| x as f64).collect());
            }
        }

        impl<const D: usize> Look for Tensor<$backend, D, Bool> {
            fn look(&self, parts: &mut Vec<Vec<f64>>) {
                parts.push(self.to_data().iter::<bool>().map(f64::from).collect());
            }
        }
    )*};
}

tensors!(B, Kiln);

macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl Look for $ty {
            fn look(&self, parts: &mut Vec<Vec<f64>>) {
                parts.push(vec![*self as f64]);
            }
        }
    )*};
}

numbers!(f32, f64, i32, i64, u32, u64, usize);

/// Numbers that belong together, such as a parameter's.
#[derive(Clone)]
pub struct Numbers(pub Vec<f64>);

impl Look for Numbers {
    fn look(&self, parts: &mut Vec<Vec<f64>>) {
        parts.push(self.0.clone());
    }
}

impl Look for bool {
    fn look(&self, parts: &mut Vec<Vec<f64>>) {
        parts.push(vec![f64::from(*self)]);
    }
}

impl Look for String {
    fn look(&self, parts: &mut Vec<Vec<f64>>) {
        parts.push(self.bytes().map(f64::from).collect());
    }
}

impl<T: Look> Look for Vec<T> {
    fn look(&self, parts: &mut Vec<Vec<f64>>) {
        self.iter().for_each(|item| item.look(parts));
    }
}

impl<T: Look, const N: usize> Look for [T; N] {
    fn look(&self, parts: &mut Vec<Vec<f64>>) {
        self.iter().for_each(|item| item.look(parts));
    }
}

impl<T: Look> Look for Option<T> {
    fn look(&self, parts: &mut Vec<Vec<f64>>) {
        self.iter().for_each(|item| item.look(parts));
    }
}

macro_rules! tuples {
    ($(($($name:ident $index:tt),*)),*) => {$(
        impl<$($name: Look),*> Look for ($($name,)*) {
            fn look(&self, parts: &mut Vec<Vec<f64>>) {
                $(self.$index.look(parts);)*
            }
        }
    )*};
}

tuples!((A 0), (A 0, C 1), (A 0, C 1, D 2), (A 0, C 1, D 2, E 3), (A 0, C 1, D 2, E 3, G 4));

/// The numbers of a value, tensor by tensor.
pub fn parts(value: &impl Look) -> Vec<Vec<f64>> {
    let mut parts = Vec::new();
    value.look(&mut parts);
    parts
}

/// The part that differs most from what is expected, and by how much; a part more or less is an infinite
/// difference.
pub fn worst(found: &[Vec<f64>], expected: &[Vec<f64>]) -> (usize, f64) {
    if found.len() != expected.len() {
        return (0, f64::INFINITY);
    }
    let errors = found
        .iter()
        .zip(expected)
        .map(|(found, expected)| difference(found, expected));
    errors.enumerate().fold(
        (0, 0.0),
        |worst, next| if next.1 > worst.1 { next } else { worst },
    )
}

/// `|a - b| / |b|` of two tensors by Euclidean norms; infinite where lengths or what is finite differ.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let (mut square, mut norm) = (0.0, 0.0);
    for (&found, &expected) in found.iter().zip(expected) {
        if !expected.is_finite() || !found.is_finite() {
            let equal = found == expected || found.is_nan() && expected.is_nan();
            if !equal {
                return f64::INFINITY;
            }
            continue;
        }
        square += (found - expected).powi(2);
        norm += expected * expected;
    }
    square.sqrt() / norm.sqrt().max(1e-3)
}

/// The first few of a list of numbers, for a message.
pub fn shown(numbers: Option<&Vec<f64>>) -> String {
    let Some(numbers) = numbers else {
        return "nothing".to_owned();
    };
    let rest = if numbers.len() > 6 { ", .." } else { "" };
    let first: Vec<String> = numbers.iter().take(6).map(|x| format!("{x:.6}")).collect();
    format!("[{}{rest}]", first.join(", "))
}
