//! What an open profile adds to a training step.
//!
//! A transformer encoder with AdamW through `TrainStep`, with many kernels of some ten to some hundred
//! microseconds: a step in which the events of a profile weigh the most. Steps with a profile and without
//! take turns, so that a machine that slows down slows both. Noise hits single pairs: what counts is the
//! median over the pairs of the ratio of their times, and on a busy machine the ratio of the shortest times.
//! Steps without a profile are compared with one another in the same way, which says how much of the result
//! is noise. Once on one thread, once on all cores, where the pieces of other threads are timed too.
//!
//! ```text
//! cargo bench -p kiln --bench profile_cost
//! ```

use std::time::Instant;

use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_optim::AdamWConfig;
use kiln::{CompileOptions, Kiln, KilnDevice, TrainStep};

const LAYERS: usize = 6;
const WIDTH: usize = 128;
const EXAMPLES: usize = 8;
const LENGTH: usize = 32;

const WARM_UP: usize = 6;
const ROUNDS: usize = 60;

#[derive(Module, Debug)]
struct Encoder<B: Backend> {
    layers: TransformerEncoder<B>,
    out: Linear<B>,
}

impl<B: Backend> Encoder<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            layers: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, LAYERS)
                .with_dropout(0.1)
                .init(device),
            out: LinearConfig::new(WIDTH, 1).init(device),
        }
    }

    fn loss(&self, x: Tensor<B, 3>) -> Tensor<B, 1> {
        let x = self.layers.forward(TransformerEncoderInput::new(x));
        self.out.forward(x).powf_scalar(2.0).mean()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn shortest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn main() {
    measure(1);
    measure(0);
}

/// Measures on `threads` threads; 0 means all cores.
fn measure(threads: usize) {
    let device = KilnDevice::cpu();
    let x = Tensor::<Autodiff<Kiln>, 3>::random([EXAMPLES, LENGTH, WIDTH], Distribution::Default, &device);
    let options = CompileOptions::default().with_threads(threads);
    let mut train = TrainStep::new(
        Encoder::new(&device),
        AdamWConfig::new().init(),
        |model: &Encoder<Autodiff<Kiln>>, x: Tensor<Autodiff<Kiln>, 3>| model.loss(x),
    )
    .with_options(options.with_name("profile_cost"))
    .build()
    .expect("nothing is compiled yet");
    // Seconds of one step.
    let mut step = || {
        let start = Instant::now();
        train.step(1e-4, x.clone()).expect("the step runs");
        start.elapsed().as_secs_f64()
    };

    let (mut before, mut profiled, mut after) = (Vec::new(), Vec::new(), Vec::new());
    let mut kernels: u64 = 0;
    for round in 0..WARM_UP + ROUNDS {
        let first = step();
        let profile = kiln::profile();
        let time = step();
        kernels = profile.summary().kernels.iter().map(|row| row.calls).sum();
        drop(profile);
        let last = step();
        if round >= WARM_UP {
            before.push(first);
            profiled.push(time);
            after.push(last);
        }
    }
    let pairs = before.iter().zip(&after).zip(&profiled);
    let with_profile = pairs.map(|((a, b), profiled)| 2.0 * profiled / (a + b)).collect();
    let without = before.iter().zip(&after).map(|(a, b)| b / a).collect();
    let threads = if threads == 0 { "all cores" } else { "one thread" };
    println!(
        "{threads}: a step of {kernels} kernels, {:.2} ms without a profile, {:.2} ms with one (medians of {ROUNDS})",
        median(before.clone()) * 1e3,
        median(profiled.clone()) * 1e3
    );
    println!(
        "  without / without           {:.4}   shortest {:.4}",
        median(without),
        shortest(&after) / shortest(&before)
    );
    println!(
        "  with a profile / without    {:.4}   shortest {:.4}   (bound: 1.03)",
        median(with_profile),
        2.0 * shortest(&profiled) / (shortest(&before) + shortest(&after))
    );
}
