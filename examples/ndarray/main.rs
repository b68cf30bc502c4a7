//! Training on a data set that is an `ndarray`: batches are slices of it, and steps read them where they are.
//!
//! The data are points on three spiral arms; a network of two layers learns which arm a point is on.

use burn::module::{AutodiffModule, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use kiln::arrays::{HostArray, copied_bytes};
use kiln::{Kiln, KilnDevice, TrainStep};
use ndarray::{Array1, Array2, Axis, Ix2, s};

type B = Autodiff<Kiln>;

const ARMS: usize = 3;
const BATCH: usize = 64;

#[derive(Module, Debug)]
struct Network<B: Backend> {
    hidden: [Linear<B>; 2],
    out: Linear<B>,
}

impl<B: Backend> Network<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: [
                LinearConfig::new(2, 64).init(device),
                LinearConfig::new(64, 64).init(device),
            ],
            out: LinearConfig::new(64, ARMS).init(device),
        }
    }

    /// Logits `[batch, arms]` of points `[batch, 2]`.
    fn forward(&self, points: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = self.hidden.iter().fold(points, |x, layer| relu(layer.forward(x)));
        self.out.forward(hidden)
    }
}

/// `count` points `[count, 2]` and the arm of each, in an order that mixes the arms.
fn spirals(count: usize) -> (Array2<f32>, Array1<i64>) {
    let arm = |i: usize| i % ARMS;
    let point = |i: usize| {
        // The golden ratio's multiples spread evenly.
        let along = (i as f32 * 0.618_034).fract();
        let angle = 4.0 * along + arm(i) as f32 * std::f32::consts::TAU / ARMS as f32;
        [(0.1 + along) * angle.cos(), (0.1 + along) * angle.sin()]
    };
    let points = Array2::from_shape_fn((count, 2), |(i, axis)| point(i)[axis]);
    (points, Array1::from_shape_fn(count, |i| arm(i) as i64))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let device = KilnDevice::default();
    let (points, arms) = spirals(if short { 256 } else { 3072 });
    let loss = |model: &Network<B>, (points, arms): (Tensor<B, 2>, Tensor<B, 1, Int>)| {
        let logits = model.forward(points);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, arms)
    };
    let mut train = TrainStep::new(Network::new(&device), AdamWConfig::new().init(), loss).build()?;
    let copied = copied_bytes();
    let mut steps = 0;
    for _ in 0..if short { 5 } else { 40 } {
        for begin in (0..points.nrows()).step_by(BATCH) {
            let rows = begin..begin + BATCH;
            let batch = (points.slice(s![rows.clone(), ..]), arms.slice(s![rows]));
            let loss = train.step_arrays(3e-3, batch, &device)?;
            steps += 1;
            if steps == 1 || steps % 10 == 0 && short || steps % 480 == 0 {
                println!("step {steps}: loss {:.4}", loss.into_scalar());
            }
        }
    }
    println!("{}", train.history());
    println!("bytes of batches that were copied: {}", copied_bytes() - copied);

    let model = train.into_model().valid();
    let logits = kiln::compile_fn(|points: Tensor<Kiln, 2>| model.forward(points));
    let found: HostArray<f32, Ix2> = logits.call_arrays(&points, &device)?;
    let right = found
        .view()
        .axis_iter(Axis(0))
        .zip(&arms)
        .filter(|(row, arm)| {
            let best = (0..ARMS).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            best == Some(**arm as usize)
        })
        .count();
    println!(
        "{:.1} % of the points are put on their arm",
        100.0 * right as f64 / arms.len() as f64
    );
    Ok(())
}
