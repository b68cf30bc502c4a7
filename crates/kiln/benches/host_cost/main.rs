//! What a training step costs the host, apart from its arithmetic.
//!
//! The step is that of a transformer encoder of twelve layers with dropout, cross entropy and AdamW: some
//! 5,800 operations. It is taken in three ways, interleaved:
//!
//! - on a client that throws operations away: what Burn's own calls cost;
//! - in a compiled region: the same calls, recorded and compared with the compiled step;
//! - through `TrainStep`, replayed.
//!
//! Shapes are tiny so that arithmetic is little, and the time inside the compiled code is subtracted. Handing
//! tensors to the compiled code and taking its results is host work and stays in. Two ratios come out: what
//! recording and guard add to Burn's calls, relative to these calls, and a replayed step's host work relative
//! to a recorded one's.
//!
//! ```text
//! cargo bench -p kiln --bench host_cost
//! ```

mod null;

use std::time::{Duration, Instant};

use burn::module::{AutodiffModule, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use kiln::{CompileOptions, Kiln, KilnDevice, RegionReport, StepInput, TrainStep};
use null::Null;

const LAYERS: usize = 12;
const WIDTH: usize = 8;
const VOCABULARY: usize = 16;
const CLASSES: usize = 4;
const EXAMPLES: usize = 1;
const LENGTH: usize = 4;

/// Steps of each kind before measuring, and measured.
const WARM_UP: usize = 6;
const ROUNDS: usize = 40;

type Compiled = Autodiff<Kiln>;
type Discarded = Autodiff<Null>;

#[derive(Module, Debug)]
struct Encoder<B: Backend> {
    embedding: Embedding<B>,
    layers: TransformerEncoder<B>,
    out: Linear<B>,
}

#[derive(Clone, StepInput)]
struct Batch<B: Backend> {
    tokens: Tensor<B, 2, Int>,
    labels: Tensor<B, 1, Int>,
}

impl<B: Backend> Batch<B> {
    fn new(step: usize, device: &B::Device) -> Self {
        let tokens: Vec<i32> = (0..EXAMPLES * LENGTH)
            .map(|index| ((index * 7 + step * 3) % VOCABULARY) as i32)
            .collect();
        let labels: Vec<i32> = (0..EXAMPLES)
            .map(|index| ((index + step) % CLASSES) as i32)
            .collect();
        Self {
            tokens: Tensor::from_data(TensorData::new(tokens, [EXAMPLES, LENGTH]), device),
            labels: Tensor::from_data(TensorData::new(labels, [EXAMPLES]), device),
        }
    }
}

impl<B: Backend> Encoder<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            layers: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 2, LAYERS)
                .with_dropout(0.1)
                .init(device),
            out: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let x = self.embedding.forward(batch.tokens);
        let x = self.layers.forward(TransformerEncoderInput::new(x));
        let logits = self.out.forward(x.mean_dim(1).squeeze_dim(1));
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, batch.labels)
    }
}

/// Model and optimizer of the plain loop.
struct Trained<B: AutodiffBackend> {
    model: Option<Encoder<B>>,
    optim: OptimizerAdaptor<AdamW, Encoder<B>, B>,
}

impl<B: AutodiffBackend> Trained<B>
where
    Encoder<B>: AutodiffModule<B>,
{
    fn new(device: &B::Device) -> Self {
        Self {
            model: Some(Encoder::new(device)),
            optim: AdamWConfig::new().init(),
        }
    }

    /// The body of a training loop as a Burn user writes it.
    fn step(&mut self, lr: f64, batch: Batch<B>) -> Tensor<B, 1> {
        let model = self.model.take().expect("put back by every step");
        let loss = model.loss(batch);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optim.step(lr, model, gradients));
        loss
    }
}

/// A learning rate that changes at every step.
fn rate(step: usize) -> f64 {
    1e-3 / (1.0 + step as f64 * 0.1)
}

/// The time `run` takes.
fn timed<R>(run: impl FnOnce() -> R) -> (Duration, R) {
    let start = Instant::now();
    let result = run();
    (start.elapsed(), result)
}

/// Time inside compiled code, and in all of handing over, running and taking back, so far.
fn inside(report: &RegionReport) -> (Duration, Duration) {
    let code = report.steps.iter().map(|step| step.code_time).sum();
    let run = report.steps.iter().map(|step| step.run_time).sum();
    (code, run)
}

/// Microseconds, the median of `times`.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn main() {
    let device = KilnDevice::cpu();
    let mut discarded = Trained::<Discarded>::new(&Default::default());
    let mut trained = Trained::<Compiled>::new(&device);
    let options = CompileOptions::default().with_threads(1);
    let mut region = kiln::compile(options.clone());
    let mut replayed = TrainStep::new(
        Encoder::<Compiled>::new(&device),
        AdamWConfig::new().init(),
        |model: &Encoder<Compiled>, batch: Batch<Compiled>| model.loss(batch),
    )
    .with_options(options)
    .build()
    .expect("nothing is compiled yet");

    let mut burn = Vec::new();
    let (mut recording, mut recorded) = (Vec::new(), Vec::new());
    let (mut replay, mut replay_code) = (Vec::new(), Vec::new());
    for index in 0..WARM_UP + ROUNDS {
        let batch = Batch::<Discarded>::new(index, &Default::default());
        let (time, _) = timed(|| discarded.step(rate(index), batch));
        burn.push(time);

        let batch = Batch::<Compiled>::new(index, &device);
        let (code, run) = inside(&region.report());
        let (time, loss) = timed(|| region.run(|| trained.step(rate(index), batch).inner()));
        loss.expect("the region runs");
        let (code, run) = {
            let after = inside(&region.report());
            (after.0.saturating_sub(code), after.1.saturating_sub(run))
        };
        recording.push(time.saturating_sub(run));
        recorded.push(time.saturating_sub(code));

        let batch = Batch::<Compiled>::new(index, &device);
        let (code, _) = inside(&replayed.report());
        let (time, loss) = timed(|| replayed.step(rate(index), batch));
        loss.expect("the step runs");
        let code = inside(&replayed.report()).0.saturating_sub(code);
        replay.push(time.saturating_sub(code));
        replay_code.push(code);
    }
    assert_eq!(replayed.history().obstacle, None);
    let measured = |times: Vec<Duration>| median(times[WARM_UP..].to_vec());
    let operations = region.report().steps.iter().map(|step| step.operations).max();
    let (burn, recording, recorded) = (measured(burn), measured(recording), measured(recorded));
    let (replay, replay_code) = (measured(replay), measured(replay_code));

    println!(
        "{} operations a step; medians of {ROUNDS} steps, in us",
        operations.unwrap_or(0)
    );
    println!("  Burn's calls, operations thrown away      {burn:9.1}");
    println!("  the same, recorded and guarded            {recording:9.1}");
    println!("  recorded step, all host work              {recorded:9.1}");
    println!(
        "  replayed step, all host work              {replay:9.1}   (inside the code: {replay_code:.1})"
    );
    println!(
        "recording and guard / Burn's calls             {:.3}   (bound: 1)",
        (recording - burn) / burn
    );
    println!(
        "replayed / recorded host work                  1/{:.1}   (bound: 1/20)",
        recorded / replay
    );
}
