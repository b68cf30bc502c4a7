//! Batch norm on several ranks: local by default, synchronised by an option.

mod launch;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_nn::conv::{Conv2d, Conv2dConfig};
use burn_nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn_optim::SgdConfig;
use burn_optim::momentum::MomentumConfig;
use kiln::distributed::{self, World};
use kiln::{CompileBackend, CompileOptions, KilnDevice, TrainError, TrainStep};
use launch::examples::{B, EXAMPLES, squares};
use launch::{agree, losses, print, run, text};

type Batch = (Tensor<B, 4>, Tensor<B, 2>);

const STEPS: usize = 20;
const SIDE: usize = 6;

/// Norms of the input, of images and of vectors; two have statistics of one shape.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    input: BatchNorm<B>,
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    second: Conv2d<B>,
    again: BatchNorm<B>,
    middle: Linear<B>,
    vectors: BatchNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            input: BatchNormConfig::new(2).init(device),
            first: Conv2dConfig::new([2, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            second: Conv2dConfig::new([4, 4], [1, 1]).init(device),
            again: BatchNormConfig::new(4).init(device),
            middle: LinearConfig::new(4, 5).init(device),
            vectors: BatchNormConfig::new(5).init(device),
            last: LinearConfig::new(5, 1).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self
            .norm
            .forward(self.first.forward(self.input.forward(x)))
            .tanh();
        let x = self.again.forward(self.second.forward(x)).tanh();
        let channels = x.mean_dim(3).mean_dim(2).reshape([-1, 4]);
        let x = self.middle.forward(channels);
        self.last.forward(self.vectors.forward(x).tanh())
    }
}

/// The share of a rank in the examples of a step, whose images get brighter from the first to the last.
fn share(step: usize, world: &World, device: &KilnDevice) -> Batch {
    let pixels = 2 * SIDE * SIDE;
    let number = |i: usize| ((i * 37 + step * 101) % 199) as f32 / 99.5 - 1.0 + (i / pixels) as f32 * 0.2;
    let x: Vec<f32> = (0..EXAMPLES * pixels).map(number).collect();
    let y: Vec<f32> = (0..EXAMPLES)
        .map(|i| x[i * pixels] - x[i * pixels + 7].abs())
        .collect();
    let rows = EXAMPLES / world.size();
    let from = world.rank() * rows;
    let own = x[from * pixels..(from + rows) * pixels].to_vec();
    let x = Tensor::from_data(TensorData::new(own, [rows, 2, SIDE, SIDE]), device);
    let y = Tensor::from_data(TensorData::new(y[from..from + rows].to_vec(), [rows, 1]), device);
    (x, y)
}

fn loss(net: &Net<B>, (x, y): Batch) -> Tensor<B, 1> {
    squares(net.forward(x), y)
}

/// What a rank of another test does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let has = |word: &str| part.split(' ').any(|other| other == word);
    let world = distributed::init().expect("the ranks are connected");
    let device = KilnDevice::cpu();
    B::seed(&device, 3);
    let net = Net::<B>::new(&device);
    let backend = match has("node-by-node") {
        true => CompileBackend::AotEager,
        false => CompileBackend::Cpu,
    };
    let options = CompileOptions::default().with_backend(backend).with_threads(1);
    let optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let loss = match has("other") {
        // Centres channels by a mean that goes into no running statistic.
        true => |net: &Net<B>, (x, y): Batch| {
            let mean = x
                .clone()
                .swap_dims(0, 1)
                .reshape([2, -1])
                .mean_dim(1)
                .reshape([1, 2, 1, 1]);
            loss(net, (x - mean, y))
        },
        false => loss,
    };
    let mut step = TrainStep::new(net, optim, loss)
        .with_options(options)
        .with_data_parallel(&world);
    if has("synchronised") {
        step = step.with_synchronised_batch_norm();
    }
    if has("sharded") {
        step = step.with_sharded_state();
    }
    let mut step = step.build().expect("the ranks begin together");
    let mut losses = Vec::new();
    for number in 0..STEPS {
        match step.step(2e-2, share(number, &world, &device)) {
            Ok(loss) => losses.push(loss.into_data().to_vec::<f32>().expect("one f32")[0]),
            Err(TrainError::BatchNorm { reason }) if has("other") => {
                assert!(step.model().is_some(), "nothing was run");
                println!("refused: {reason}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Running statistics go on as losses do.
    let model = step.model().expect("no step failed");
    for running in [&model.norm.running_mean, &model.vectors.running_var] {
        losses.push(
            running
                .value()
                .into_data()
                .to_vec::<f32>()
                .expect("f32")
                .iter()
                .sum(),
        );
    }
    print(world.is_first(), &losses);
}

#[test]
fn synchronised_ranks_train_as_one_rank_with_all_examples() {
    let Some(one) = losses(1, "synchronised") else {
        return;
    };
    assert!(one[STEPS - 1] < 0.8 * one[0], "{one:?}");
    assert_eq!(losses(1, "local").expect("mpirun was there"), one);
    for (ranks, part) in [
        (2, "synchronised"),
        (3, "synchronised"),
        (4, "synchronised"),
        (2, "synchronised node-by-node"),
        (3, "synchronised sharded"),
    ] {
        let several = losses(ranks, part).expect("mpirun was there");
        agree(&one, &several, &format!("{ranks} ranks, {part}"));
        if (ranks, part) == (3, "synchronised") {
            assert_eq!(
                losses(ranks, part).expect("mpirun was there"),
                several,
                "two runs have equal bits"
            );
        }
    }
}

#[test]
fn batch_norm_is_local_unless_it_is_asked_for() {
    let Some(one) = losses(1, "local") else { return };
    let local = losses(2, "local").expect("mpirun was there");
    let furthest = one
        .iter()
        .zip(&local)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(furthest > 1e-2, "each rank looks at its own examples: {furthest}");
}

#[test]
fn means_that_are_no_statistics_are_refused() {
    let Some(output) = run(2, "synchronised other") else {
        return;
    };
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("refused: it takes means of channels that go into no running statistic"),
        "{text}"
    );
}
