//! An operation of the program's own in the middle of a model: quantiles that do not cross.
//!
//! The network guesses five quantiles of a noisy curve. Guesses of neighbouring quantiles may cross, which no
//! distribution's do, so each row is moved to the nearest row that does not fall. That is isotonic
//! regression, by an algorithm that merges neighbours for as long as some fall: no tensor operation says it,
//! a few lines of Rust do. Its gradient is the mean over each group that was merged.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use burn_autodiff::Autodiff;
use kiln::{CSource, Kiln, KilnBackend, KilnDevice, TrainStep};

type B = Autodiff<Kiln>;

const QUANTILES: [f32; 5] = [0.05, 0.25, 0.5, 0.75, 0.95];

/// The groups that neighbours of `row` are merged to so that their means do not fall, by length and mean.
fn groups(row: &[f32]) -> Vec<(usize, f32)> {
    let mut groups: Vec<(usize, f32)> = Vec::new();
    for &value in row {
        let mut group = (1, value);
        while let Some(&(length, mean)) = groups.last().filter(|(_, mean)| *mean > group.1) {
            let both = length + group.0;
            group = (
                both,
                (mean * length as f32 + group.1 * group.0 as f32) / both as f32,
            );
            groups.pop();
        }
        groups.push(group);
    }
    groups
}

/// Each row of `[rows, columns]` as the nearest row that does not fall.
fn isotonic(inputs: &[TensorData]) -> TensorData {
    let x: &[f32] = inputs[0].as_slice().expect("f32");
    let rows = x.chunks(inputs[0].shape[1]).flat_map(groups);
    let y: Vec<f32> = rows.flat_map(|(length, mean)| vec![mean; length]).collect();
    TensorData::new(y, inputs[0].shape.clone())
}

/// Every member of a group takes part in the group's mean by the same share.
fn isotonic_gradient(inputs: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
    let columns = inputs[0].shape[1];
    let x: &[f32] = inputs[0].as_slice().expect("f32");
    let upstream: &[f32] = gradient.as_slice().expect("f32");
    let mut found = Vec::with_capacity(x.len());
    for (row, upstream) in x.chunks(columns).zip(upstream.chunks(columns)) {
        let mut rest = upstream;
        for (length, _) in groups(row) {
            let (members, next) = rest.split_at(length);
            let share = members.iter().sum::<f32>() / length as f32;
            found.extend(std::iter::repeat_n(share, length));
            rest = next;
        }
    }
    vec![TensorData::new(found, inputs[0].shape.clone())]
}

/// Both in C, which is compiled into the step: [`isotonic`] and [`isotonic_gradient`] remain the reference.
const IN_C: CSource = CSource {
    forward: include_str!("isotonic.c"),
    gradient: Some(include_str!("isotonic_gradient.c")),
};

#[derive(Module, Debug)]
struct Guess<B: Backend> {
    hidden: Linear<B>,
    out: Linear<B>,
}

impl<B: KilnBackend> Guess<B> {
    /// Quantiles of `y` for each `x: [batch, 1]`: `[batch, 5]`.
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let guessed = self.out.forward(relu(self.hidden.forward(x)));
        let shape = guessed.dims();
        // SAFETY: the sources compute what the functions do, for rows of up to 64 columns, of which there are
        // five here; they read their inputs, write all of their outputs and use no other memory.
        unsafe { kiln::custom_op_with_c("isotonic", guessed, shape, isotonic, isotonic_gradient, IN_C) }
    }

    /// The pinball loss, which the true quantiles make least.
    fn loss(&self, x: Tensor<B, 2>, y: Tensor<B, 2>) -> Tensor<B, 1> {
        let above = y - self.forward(x);
        let shares = Tensor::<B, 1>::from_floats(QUANTILES, &above.device()).unsqueeze::<2>();
        (above.clone() * shares - above.clamp_max(0.0)).mean()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = if std::env::args().any(|argument| argument == "--short") {
        20
    } else {
        2000
    };
    let device = KilnDevice::default();
    let model = Guess::<B> {
        hidden: LinearConfig::new(1, 64).init(&device),
        out: LinearConfig::new(64, QUANTILES.len()).init(&device),
    };
    let loss = |model: &Guess<B>, (x, y)| model.loss(x, y);
    let mut train = TrainStep::new(model, AdamWConfig::new().init(), loss).build()?;
    for step in 1..=steps {
        let x = Tensor::<B, 2>::random([128, 1], Distribution::Uniform(-3.0, 3.0), &device);
        let noise = x.random_like(Distribution::Normal(0.0, 1.0));
        let y = x.clone().sin() + noise * (x.clone().abs() * 0.2 + 0.1);
        let loss = train.step(3e-3, (x, y))?;
        if step == 1 || step % (steps / 4) == 0 {
            println!("step {step}: loss {:.4}", loss.into_scalar());
        }
    }
    println!("{}", train.explain());
    println!("{}", train.history());
    let model = train.into_model();
    for x in [-2.0, 0.0, 2.0f32] {
        let found = model
            .forward(Tensor::<B, 2>::from_floats([[x]], &device))
            .into_data();
        let found: Vec<String> = found.iter::<f32>().map(|y| format!("{y:5.2}")).collect();
        println!("quantiles at {x:4.1}: {}", found.join(" "));
    }
    Ok(())
}
