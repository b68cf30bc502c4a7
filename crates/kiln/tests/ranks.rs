//! Training on several ranks.

mod launch;

use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
use kiln::distributed::{self, Options, World};
use kiln::{CompileBackend, CompileOptions, Error, KilnDevice, TrainStep};
use launch::examples::{B, Batch, examples, same_on_all, share_of, squares};
use launch::{agree, losses, print, run, text};

const STEPS: usize = 50;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    /// Not trained.
    frozen: Linear<B>,
    last: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> Net<B> {
    fn new(dropout: f64, device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(6, 32).init(device),
            frozen: LinearConfig::new(32, 32).init::<B>(device).no_grad(),
            last: LinearConfig::new(32, 2).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.dropout.forward(self.first.forward(x).tanh());
        self.last.forward(self.frozen.forward(x).tanh())
    }
}

/// The share of a rank in the examples of a step.
fn share(step: usize, world: &World, device: &KilnDevice) -> Batch {
    share_of(examples(step), world, device)
}

fn loss(net: &Net<B>, (x, y): Batch) -> Tensor<B, 1> {
    squares(net.forward(x), y)
}

/// Trains, and gives the losses; each rank begins with a model of its own.
fn train(
    world: &World,
    backend: CompileBackend,
    dropout: f64,
    wait: impl Fn(usize),
) -> Result<Vec<f32>, String> {
    let device = KilnDevice::cpu();
    B::seed(&device, 11 + world.rank() as u64);
    let net = Net::<B>::new(dropout, &device);
    let optim = AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.05)))
        .init();
    let options = CompileOptions::default().with_backend(backend).with_threads(1);
    let mut step = TrainStep::new(net, optim, loss)
        .with_options(options)
        .with_data_parallel(world)
        .build()
        .map_err(|error| error.to_string())?;
    let mut losses = Vec::new();
    for number in 0..STEPS {
        wait(number);
        let loss = step
            .step(1e-2, share(number, world, &device))
            .map_err(|error| error.to_string())?;
        losses.push(loss.into_data().to_vec::<f32>().expect("one f32")[0]);
    }
    if backend == CompileBackend::Cpu {
        assert!(step.history().replayed > 30, "{:?}", step.history());
    }
    let model = step.model().expect("no step failed");
    same_on_all(world, model.first.weight.val());
    Ok(losses)
}

/// How a region's closure treats its gradients.
#[derive(Clone, Copy, PartialEq)]
enum Averages {
    All,
    /// Those of the loss alone.
    Loss,
    Nothing,
}

/// [`train`] without a `TrainStep`: a compiled region whose closure has backward pass and optimizer.
fn train_region(world: &World, averages: Averages) -> Result<Vec<f32>, Error> {
    let device = KilnDevice::cpu();
    B::seed(&device, 11 + world.rank() as u64);
    let net = Net::<B>::new(0.0, &device);
    let mut net = distributed::share_model(net, world).expect("the ranks begin together");
    let clipping = Some(GradientClippingConfig::Norm(0.05));
    let optim = AdamWConfig::new().with_grad_clipping(clipping).init();
    let mut optim = distributed::share_optimizer(&net, optim, world).expect("there is no state yet");
    let options = CompileOptions::default()
        .with_threads(1)
        .with_data_parallel(world);
    let mut region = kiln::compile(options);
    let mut losses = Vec::new();
    for number in 0..STEPS {
        let batch = share(number, world, &device);
        let updated = region.run(|| {
            let loss = loss(&net, batch);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            let gradients = match averages {
                Averages::All => distributed::average(&net, gradients),
                Averages::Loss | Averages::Nothing => gradients,
            };
            let loss = match averages {
                Averages::All | Averages::Loss => distributed::mean(loss.inner()),
                Averages::Nothing => loss.inner(),
            };
            (optim.step(1e-2, net.clone(), gradients), loss)
        });
        let loss;
        (net, loss) = updated?;
        losses.push(loss.into_data().to_vec::<f32>().expect("one f32")[0]);
    }
    same_on_all(world, net.first.weight.val());
    // Sums travel in buckets, as those of a `TrainStep`.
    let report = region.report();
    let contract = report.steps.last().and_then(|step| step.contract.as_ref());
    let started = |name: &str| {
        let calls = contract.iter().flat_map(|contract| &contract.externs);
        calls.filter(|call| call.name == name).count()
    };
    assert_eq!(started("all_reduce") > 0, world.size() > 1);
    assert_eq!(started("all_reduce"), started("collective_wait"));
    Ok(losses)
}

/// What a rank of another test does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let timeout = Duration::from_secs(match part.as_str() {
        "hang" => 3,
        _ => 60,
    });
    let world = distributed::init_with(Options {
        timeout,
        ..Options::default()
    })
    .expect("the ranks are connected");
    let nothing = |_| {};
    match part.as_str() {
        "train" => print(
            world.is_first(),
            &train(&world, CompileBackend::Cpu, 0.0, nothing).expect("it trains"),
        ),
        "node by node" => print(
            world.is_first(),
            &train(&world, CompileBackend::AotEager, 0.0, nothing).expect("it trains"),
        ),
        "dropout" => print(
            world.is_first(),
            &train(&world, CompileBackend::Cpu, 0.5, nothing).expect("it trains"),
        ),
        "region" => print(
            world.is_first(),
            &train_region(&world, Averages::All).expect("it trains"),
        ),
        "region of its own" => {
            for averages in [Averages::Loss, Averages::Nothing] {
                let error = train_region(&world, averages).expect_err("its gradients are its own");
                assert!(matches!(error, Error::NotAveraged { ranks: 2, .. }), "{error}");
                println!("said: {error}");
            }
        }
        "hang" => {
            let hang = |step| {
                if step == 20 && world.rank() == 1 {
                    std::thread::sleep(Duration::from_secs(8));
                    std::process::exit(4);
                }
            };
            let error = train(&world, CompileBackend::Cpu, 0.0, hang).expect_err("rank 1 hangs");
            println!("said: {error}");
            std::process::exit(3);
        }
        "death" => {
            let die = |step| {
                if step == 20 && world.rank() == 1 {
                    std::process::abort();
                }
            };
            let error = train(&world, CompileBackend::Cpu, 0.0, die).expect_err("rank 1 dies");
            println!("said: {error}");
            std::process::exit(3);
        }
        "other step" => {
            let device = KilnDevice::cpu();
            let net = Net::<B>::new(0.0, &device);
            let factor = if world.rank() == 1 { 3.0 } else { 2.0 };
            let optim = AdamWConfig::new().init();
            let other = move |net: &Net<B>, (x, y): Batch| -> Tensor<B, 1> {
                let x = if factor > 2.5 { x.clone() * x } else { x };
                squares(net.forward(x), y)
            };
            let mut step = TrainStep::new(net, optim, other)
                .with_data_parallel(&world)
                .build()
                .expect("same models");
            let error = step
                .step(1e-2, share(0, &world, &device))
                .expect_err("rank 1 has another step");
            println!("said: {error}");
            std::thread::sleep(Duration::from_millis(500));
            std::process::exit(3);
        }
        "other rate" => {
            let device = KilnDevice::cpu();
            let mut step = TrainStep::new(Net::<B>::new(0.0, &device), AdamWConfig::new().init(), loss)
                .with_data_parallel(&world)
                .build()
                .expect("same models");
            let other = world.rank() == 1;
            for number in 0..7 {
                let (rate, (x, y)) = (1e-2, share(number, &world, &device));
                let rate = if number == 6 && other { 2.0 * rate } else { rate };
                if let Err(error) = step.step(rate, (x, y)) {
                    assert_eq!(number, 6);
                    println!("said: {error}");
                    std::thread::sleep(Duration::from_millis(500));
                    std::process::exit(3);
                }
            }
            panic!("the ranks went different ways");
        }
        "other optimizer" => {
            let decay = if world.rank() == 1 { 0.25 } else { 0.5 };
            let optim = AdamWConfig::new().with_weight_decay(decay).init();
            let built = TrainStep::new(Net::<B>::new(0.0, &KilnDevice::cpu()), optim, loss)
                .with_data_parallel(&world)
                .build();
            println!("said: {}", built.err().expect("rank 1 has another optimizer"));
            std::thread::sleep(Duration::from_millis(500));
            std::process::exit(3);
        }
        "other model" => {
            let device = KilnDevice::cpu();
            let mut net = Net::<B>::new(0.0, &device);
            if world.rank() == 1 {
                let weight = Tensor::random([6, 16], Distribution::Default, &device);
                net.first.weight = Param::from_tensor(weight);
            }
            let built = TrainStep::new(net, AdamWConfig::new().init(), loss)
                .with_data_parallel(&world)
                .build();
            println!("said: {}", built.err().expect("rank 1 has another model"));
            std::thread::sleep(Duration::from_millis(500));
            std::process::exit(3);
        }
        other => panic!("there is no part {other}"),
    }
}

#[test]
fn ranks_train_as_one_rank_with_all_examples() {
    let Some(one) = losses(1, "train") else { return };
    assert!(one[STEPS - 1] < 0.8 * one[0], "{one:?}");
    for ranks in [2, 3, 4] {
        let several = losses(ranks, "train").expect("mpirun was there");
        agree(&one, &several, &format!("{ranks} ranks"));
        if ranks == 3 {
            assert_eq!(
                losses(ranks, "train").expect("mpirun was there"),
                several,
                "two runs have equal bits"
            );
        }
    }
    let by_nodes = losses(2, "node by node").expect("mpirun was there");
    agree(&one, &by_nodes, "node by node");
}

#[test]
fn a_region_that_averages_its_gradients_trains_as_one_rank() {
    let Some(one) = losses(1, "region") else { return };
    assert!(one[STEPS - 1] < 0.8 * one[0], "{one:?}");
    for ranks in [2, 3] {
        let several = losses(ranks, "region").expect("mpirun was there");
        agree(&one, &several, &format!("{ranks} ranks"));
    }
}

#[test]
fn a_region_that_keeps_its_gradients_to_itself_is_refused() {
    let Some(output) = run(2, "region of its own") else {
        return;
    };
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("follows from gradients that were not averaged over them"),
        "{text}"
    );
}

#[test]
fn ranks_draw_their_own_numbers_again() {
    let Some(first) = losses(2, "dropout") else { return };
    assert_eq!(losses(2, "dropout").expect("mpirun was there"), first);
}

#[test]
fn a_rank_that_hangs_ends_the_step_of_the_others() {
    let begun = Instant::now();
    let Some(output) = run(3, "hang") else { return };
    let text = text(&output);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("waited 3 s for rank 1, which did not take part in collective"),
        "{text}"
    );
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_rank_that_dies_ends_the_others() {
    let Some(output) = run(3, "death") else { return };
    assert!(!output.status.success(), "{}", text(&output));
}

#[test]
fn another_step_and_another_model_are_named() {
    let Some(output) = run(2, "other step") else {
        return;
    };
    let text_of_step = text(&output);
    assert!(
        text_of_step.contains("rank 1 differs from rank 0 in the size of its step"),
        "{text_of_step}"
    );
    let output = run(2, "other model").expect("mpirun was there");
    let text = text(&output);
    assert!(
        text.contains("rank 1 differs from rank 0 in the parameters of its model"),
        "{text}"
    );
}

/// Ranks whose parameters would go different ways.
#[test]
fn what_ranks_do_not_have_in_common_is_named() {
    for (part, said) in [
        (
            "other optimizer",
            "rank 1 differs from rank 0 in the numbers of its optimizer",
        ),
        ("other rate", "of a step with learning rate 0.02"),
    ] {
        let Some(output) = run(2, part) else { return };
        let text = text(&output);
        assert!(text.contains("said: ") && text.contains(said), "{part}: {text}");
    }
}
