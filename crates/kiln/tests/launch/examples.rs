//! Examples that ranks divide among them, and what they check together.

use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use kiln::distributed::World;
use kiln::{Kiln, KilnDevice};

pub type B = Autodiff<Kiln>;

/// Inputs of six numbers and targets of two.
pub type Batch = (Tensor<B, 2>, Tensor<B, 2>);

/// Examples of a step, on all ranks together.
pub const EXAMPLES: usize = 12;

/// The examples of a step: inputs, targets.
pub fn examples(step: usize) -> (Vec<f32>, Vec<f32>) {
    let number = |i: usize| ((i * 37 + step * 101) % 199) as f32 / 99.5 - 1.0;
    let x: Vec<f32> = (0..EXAMPLES * 6).map(number).collect();
    let y = (0..EXAMPLES * 2)
        .map(|i| x[i / 2 * 6 + i % 2] * 0.7 + x[i / 2 * 6 + 3].abs())
        .collect();
    (x, y)
}

/// The share of a rank in such examples.
pub fn share_of((x, y): (Vec<f32>, Vec<f32>), world: &World, device: &KilnDevice) -> Batch {
    let rows = EXAMPLES / world.size();
    let from = world.rank() * rows;
    let tensor = |all: &[f32], columns: usize| {
        let own = all[from * columns..(from + rows) * columns].to_vec();
        Tensor::from_data(TensorData::new(own, [rows, columns]), device)
    };
    (tensor(&x, 6), tensor(&y, 2))
}

/// The mean of the squares of what is missing to the targets.
pub fn squares(outputs: Tensor<B, 2>, targets: Tensor<B, 2>) -> Tensor<B, 1> {
    (outputs - targets).powf_scalar(2.0).mean()
}

/// Panics unless all ranks have the same elements.
pub fn same_on_all(world: &World, tensor: Tensor<B, 2>) {
    let own = tensor.into_data();
    let all = world.all_gather(&own.bytes).expect("every rank gives");
    assert!(
        all.chunks(own.bytes.len()).all(|other| *other == own.bytes[..]),
        "the ranks have other parameters"
    );
}
