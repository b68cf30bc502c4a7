//! How far tensors are from what they should be.

use kiln_graph::HostTensor;

/// `||actual - expected|| / ||expected||`.
pub fn error(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-12)
}
