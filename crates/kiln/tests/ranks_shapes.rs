//! Ranks whose batches have shapes of their own, and other ones from step to step.
//!
//! Every part computes the same without ranks first: the mean over the ranks' losses, by Burn's own
//! autodiff, in one process and nothing compiled.

mod launch;

use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData, TensorPrimitive, activation};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, unary};
use burn_nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
use kiln::distributed::{self, Options, World};
use kiln::{CompileOptions, Dynamic, Kiln, KilnDevice, RegionReport, TrainStep};
use launch::examples::{B, same_on_all, squares};
use launch::{losses_in, print, run, text};

/// The first epoch, and some steps more.
const STEPS: usize = 14;
/// Steps where each is compiled for its shape. The first is provisional, the limit is two, and no length comes
/// twice to the first two ranks.
const LIMITED_STEPS: usize = 5;
const WIDTH: usize = 16;
const RATE: f64 = 5e-3;

/// Sentences, and a target for each.
type Batch = (Tensor<B, 3>, Tensor<B, 2>);

/// A reader of sentences: attention over their words, and a mean over what it gives.
#[derive(Module, Debug)]
struct Reader<B: Backend> {
    words: Linear<B>,
    query: Linear<B>,
    key: Linear<B>,
    norm: LayerNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Reader<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to);
        Self {
            words: linear(6, WIDTH).init(device),
            query: linear(WIDTH, WIDTH).with_bias(false).init(device),
            key: linear(WIDTH, WIDTH).with_bias(false).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            last: linear(WIDTH, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 2> {
        let [batch, ..] = x.dims();
        let x = self.words.forward(x).tanh();
        let scores = self
            .query
            .forward(x.clone())
            .matmul(self.key.forward(x.clone()).transpose());
        let weights = activation::softmax(scores / (WIDTH as f64).sqrt(), 2);
        let x = activation::gelu(self.norm.forward(x.clone() + weights.matmul(x)));
        self.last.forward(x.mean_dim(1).reshape([batch, WIDTH]))
    }
}

/// Sentences of a rank and their words, at a step. At every third step all ranks have one length, which
/// may be new to them; at others lengths differ, and are new to some. The last batch of an epoch of ten
/// steps is smaller, by another number on each rank.
fn size_of(step: usize, rank: usize) -> [usize; 2] {
    let length = match step % 3 {
        0 => 3 + (step * 5) % 21,
        _ => 3 + (step * 5 + rank * (step % 7 + 1)) % 21,
    };
    let sentences = match step % 10 {
        9 => 1 + (rank + step / 10) % 3,
        _ => 4,
    };
    [sentences, length]
}

fn batch([sentences, length]: [usize; 2], step: usize, rank: usize, device: &KilnDevice) -> Batch {
    let number = |i: usize| ((i * 37 + step * 101 + rank * 53) % 199) as f32 / 99.5 - 1.0;
    let x: Vec<f32> = (0..sentences * length * 6).map(number).collect();
    let y: Vec<f32> = (0..sentences * 2).map(|i| x[i] * 0.7 + x[i + 3].abs()).collect();
    (
        Tensor::from_data(TensorData::new(x, [sentences, length, 6]), device),
        Tensor::from_data(TensorData::new(y, [sentences, 2]), device),
    )
}

fn batch_of(step: usize, rank: usize, device: &KilnDevice) -> Batch {
    batch(size_of(step, rank), step, rank, device)
}

fn loss(net: &Reader<B>, (x, y): Batch) -> Tensor<B, 1> {
    squares(net.forward(x), y)
}

fn optimizer() -> AdamWConfig {
    AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.5)))
}

fn first_number(loss: Tensor<B, 1>) -> f32 {
    loss.into_data().to_vec::<f32>().expect("one f32")[0]
}

/// The parameters, one after the other.
fn parameters(net: &Reader<B>) -> Vec<f32> {
    let linear = [&net.words, &net.query, &net.key, &net.last];
    let mut all: Vec<Vec<f32>> = Vec::new();
    for layer in linear {
        all.push(layer.weight.val().into_data().to_vec().expect("f32"));
        if let Some(bias) = layer.bias.as_ref().map(Param::val) {
            all.push(bias.into_data().to_vec().expect("f32"));
        }
    }
    all.push(net.norm.gamma.val().into_data().to_vec().expect("f32"));
    all.concat()
}

/// Losses and parameters of the same training without ranks.
fn in_one_process(mut net: Reader<B>, ranks: usize, steps: usize) -> (Vec<f32>, Vec<f32>) {
    let device = KilnDevice::cpu();
    let mut optim = optimizer().init();
    let mut losses = Vec::new();
    for step in 0..steps {
        let each = (0..ranks).map(|rank| loss(&net, batch_of(step, rank, &device)));
        let sum = each.reduce(|a, b| a + b).expect("there is a rank");
        let mean = sum / ranks as f64;
        losses.push(first_number(mean.clone()));
        let gradients = GradientsParams::from_grads(mean.backward(), &net);
        net = optim.step(RATE, net, gradients);
    }
    (losses, parameters(&net))
}

/// A model of the ranks, the same in every process.
fn model(device: &KilnDevice) -> Reader<B> {
    B::seed(device, 7);
    let net = Reader::<B>::new(device);
    drop(parameters(&net));
    net
}

fn close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-5, "{what}, number {at}: {a} and {b}");
    }
}

fn is_limited(part: &str) -> bool {
    part.split(' ').any(|word| word == "limited")
}

fn options(part: &str) -> CompileOptions {
    let options = CompileOptions::default().with_threads(1);
    match is_limited(part) {
        true => options.with_dynamic(Dynamic::Off).with_recompile_limit(2),
        false => options,
    }
}

/// Compilations, and shapes that needed none.
fn tell(world: &World, report: &RegionReport) {
    let absorbed = report.compiles.iter().filter(|event| event.absorbed).count();
    println!(
        "rank {} compiled {} and planned {absorbed}",
        world.rank(),
        report.compiles.len() - absorbed
    );
}

fn train(world: &World, part: &str) {
    let device = KilnDevice::cpu();
    let net = model(&device);
    let steps = match is_limited(part) {
        true => LIMITED_STEPS,
        false => STEPS,
    };
    let (expected, trained) = in_one_process(net.clone(), world.size(), steps);
    if steps == STEPS {
        assert!(expected[STEPS - 1] < 0.9 * expected[0], "{expected:?}");
    }
    let mut step = TrainStep::new(net, optimizer().init(), loss)
        .with_options(options(part))
        .with_data_parallel(world);
    if part.contains("sharded") {
        step = step.with_sharded_state();
    }
    let mut step = step.build().expect("the ranks begin together");
    let mut losses = Vec::new();
    for number in 0..steps {
        let batch = batch_of(number, world.rank(), &device);
        losses.push(first_number(step.step(RATE, batch).expect("it trains")));
        let model = step.model().expect("no step failed");
        same_on_all(world, model.words.weight.val());
        same_on_all(world, model.last.weight.val());
    }
    tell(world, &step.report());
    close(&losses, &expected, "losses");
    close(
        &parameters(step.model().expect("no step failed")),
        &trained,
        "parameters",
    );
    print(world.is_first(), &losses);
}

fn train_region(world: &World, part: &str) {
    let device = KilnDevice::cpu();
    let net = model(&device);
    let (expected, trained) = in_one_process(net.clone(), world.size(), LIMITED_STEPS);
    let mut net = distributed::share_model(net, world).expect("the ranks begin together");
    let mut optim = distributed::share_optimizer(&net, optimizer().init(), world).expect("it has no state");
    let mut region = kiln::compile(options(part).with_data_parallel(world));
    let mut losses = Vec::new();
    for number in 0..LIMITED_STEPS {
        let batch = batch_of(number, world.rank(), &device);
        let updated = region.run(|| {
            let loss = loss(&net, batch);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            let gradients = distributed::average(&net, gradients);
            (
                optim.step(RATE, net.clone(), gradients),
                distributed::mean(loss.inner()),
            )
        });
        let loss;
        (net, loss) = updated.expect("it trains");
        losses.push(loss.into_data().to_vec::<f32>().expect("one f32")[0]);
        same_on_all(world, net.words.weight.val());
    }
    tell(world, &region.report());
    close(&losses, &expected, "losses");
    close(&parameters(&net), &trained, "parameters");
    print(world.is_first(), &losses);
}

/// Steps until one fails, whose message is printed.
fn until_it_fails(mut step: impl FnMut(usize) -> Result<(), String>) {
    for number in 0..12 {
        if let Err(error) = step(number) {
            println!("said at {number}: {error}");
            std::thread::sleep(Duration::from_millis(500));
            std::process::exit(3);
        }
    }
    panic!("the ranks went different ways");
}

/// Rank 1 has another activation, and trains all the same parameters.
fn other_program(world: &World, first: usize) {
    let device = KilnDevice::cpu();
    let is_other = world.rank() == 1;
    let twisted = move |net: &Reader<B>, (x, y): Batch| -> Tensor<B, 1> {
        match is_other {
            true => squares(net.forward(x.clone() * x), y),
            false => squares(net.forward(x), y),
        }
    };
    let mut step = TrainStep::new(model(&device), optimizer().init(), twisted)
        .with_options(options(""))
        .with_data_parallel(world)
        .build()
        .expect("same models");
    until_it_fails(|number| {
        let batch = batch_of(number + first, world.rank(), &device);
        step.step(RATE, batch)
            .map(drop)
            .map_err(|error| error.to_string())
    });
}

/// Each rank trains a layer of its own, from some step on; both layers have one shape.
fn other_parameters(world: &World, from: usize) {
    let device = KilnDevice::cpu();
    let rank = world.rank();
    let choose = move |net: &Reader<B>, (x, y, own): (Tensor<B, 3>, Tensor<B, 2>, bool)| -> Tensor<B, 1> {
        let [batch, ..] = x.dims();
        let x = net.words.forward(x).tanh();
        let x = match own && rank == 1 {
            true => net.query.forward(x),
            false => net.key.forward(x),
        };
        squares(net.last.forward(x.mean_dim(1).reshape([batch, WIDTH])), y)
    };
    let mut step = TrainStep::new(model(&device), optimizer().init(), choose)
        .with_options(options(""))
        .with_data_parallel(world)
        .build()
        .expect("same models");
    until_it_fails(|number| {
        let (x, y) = batch_of(number, rank, &device);
        let trained = step.step(RATE, (x, y, number >= from));
        trained.map(drop).map_err(|error| error.to_string())
    });
}

#[derive(Module, Debug)]
struct Normed<B: Backend> {
    first: Linear<B>,
    norm: BatchNorm<B>,
    last: Linear<B>,
}

/// Batch norm over examples of all ranks, which have different numbers of them.
fn synchronised(world: &World) {
    let device = KilnDevice::cpu();
    let net = Normed::<B> {
        first: LinearConfig::new(6, 8).init(&device),
        norm: BatchNormConfig::new(8).init(&device),
        last: LinearConfig::new(8, 2).init(&device),
    };
    let loss = |net: &Normed<B>, x: Tensor<B, 2>| -> Tensor<B, 1> {
        let x = net.norm.forward(net.first.forward(x)).tanh();
        net.last.forward(x).powf_scalar(2.0).mean()
    };
    let mut step = TrainStep::new(net, optimizer().init(), loss)
        .with_options(options(""))
        .with_data_parallel(world)
        .with_synchronised_batch_norm()
        .build()
        .expect("same models");
    until_it_fails(|number| {
        // Equal ones at first, in two sizes.
        let rows = match number {
            6 => 4 + world.rank(),
            _ => 4 + number % 2,
        };
        let x = Tensor::random([rows, 6], Distribution::Default, &device);
        step.step(RATE, x).map(drop).map_err(|error| error.to_string())
    });
}

/// The gradient of its operand is the mean of the ranks' gradients.
#[derive(Debug)]
struct MeanGradient;

impl Backward<Kiln, 1> for MeanGradient {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<Kiln, _>(ops.parents, ops.node, gradients, |gradient| {
            let gradient = Tensor::<Kiln, 1>::from_primitive(TensorPrimitive::Float(gradient));
            distributed::mean(gradient).into_primitive().tensor()
        });
    }
}

/// `x`, whose gradient the ranks average.
fn averaged(x: Tensor<B, 1>) -> Tensor<B, 1> {
    let x = x.into_primitive().tensor();
    let prepared = MeanGradient.prepare::<NoCheckpointing>([x.node]);
    let y = prepared.compute_bound().stateless(x.primitive);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// A function under eager autograd. Rank 0 has another shape at each call and goes behind the recompile limit,
/// and the loss of rank 1 uses one output less: that from which the ranks' mean follows.
fn function(world: &World) {
    const CALLS: usize = 3;
    let device = KilnDevice::cpu();
    let is_first = world.is_first();
    let function = kiln::compile_fn(|(w, x): (Tensor<B, 1>, Tensor<B, 2>)| {
        let sums = x.sum_dim(0).reshape([4]);
        [averaged(w.clone()) * sums, w.clone() * 3.0, w * 5.0]
    })
    .with_options(options("").with_recompile_limit(1));
    for call in 0..CALLS {
        let rows = if is_first { call + 1 } else { 2 };
        let w = Tensor::<B, 1>::ones([4], &device).require_grad();
        let x = Tensor::<B, 2>::ones([rows, 4], &device);
        let [first, second, _]: [Tensor<B, 1>; 3] = function.call((w.clone(), x)).expect("it is compiled");
        let loss = match is_first {
            true => first + second,
            false => second,
        };
        let gradient = w.grad(&loss.sum().backward()).expect("the loss follows from it");
        let expected = (call + 1) as f32 / 2.0 + 3.0;
        let gradient = gradient.into_data().to_vec::<f32>().expect("f32");
        assert_eq!(gradient, [expected; 4], "call {call}");
    }
    assert_eq!(function.compiled_pairs(), if is_first { CALLS } else { 1 });
    let text = function.explain_tracked();
    assert!(!text.contains("each on burn-flex"), "{text}");
}

/// What a rank of another test does; nothing where nobody asks for a part.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let world = distributed::init_with(Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    })
    .expect("the ranks are connected");
    match part.as_str() {
        "train" | "sharded" | "limited" | "sharded limited" => train(&world, &part),
        "region limited" => train_region(&world, &part),
        "function" => function(&world),
        "other program" => other_program(&world, 0),
        "other program of other shapes" => other_program(&world, 1),
        "other parameters" => other_parameters(&world, 0),
        "other parameters later" => other_parameters(&world, 4),
        "synchronised" => synchronised(&world),
        other => panic!("there is no part {other}"),
    }
}

/// What ranks say; none where there is no `mpirun`.
fn said(ranks: usize, part: &str) -> Option<String> {
    let output = run(ranks, part)?;
    let text = text(&output);
    assert!(output.status.success(), "{ranks} ranks, {part}: {text}");
    Some(text)
}

/// The most that a rank compiled, and the most shapes for which it compiled nothing.
fn compiled(text: &str) -> (usize, usize) {
    let numbers = text.lines().filter_map(|line| {
        let (_, rest) = line.split_once(" compiled ")?;
        let (compiled, planned) = rest.split_once(" and planned ")?;
        Some((
            compiled.parse::<usize>().ok()?,
            planned.trim().parse::<usize>().ok()?,
        ))
    });
    let numbers: Vec<_> = numbers.collect();
    let most = |of: fn(&(usize, usize)) -> usize| numbers.iter().map(of).max().unwrap_or(0);
    (most(|it| it.0), most(|it| it.1))
}

#[test]
fn ranks_with_other_lengths_train_as_one_process() {
    for part in ["train", "sharded"] {
        let Some(text) = said(2, part) else { return };
        let (compiled, planned) = compiled(&text);
        println!("{part}: compiled {compiled}, planned {planned}");
        assert!(
            planned > compiled,
            "lengths share kernels: {compiled} and {planned}"
        );
        if part == "sharded" {
            let again = said(2, part).expect("mpirun was there");
            assert_eq!(losses_in(&again), losses_in(&text), "two runs have equal bits");
        }
    }
}

#[test]
fn ranks_behind_the_recompile_limit_exchange_the_same() {
    for (ranks, part) in [(2, "limited"), (2, "sharded limited"), (3, "region limited")] {
        let Some(text) = said(ranks, part) else { return };
        let (compiled, planned) = compiled(&text);
        assert_eq!((compiled, planned), (LIMITED_STEPS, 0), "{part}");
    }
}

#[test]
fn functions_behind_the_recompile_limit_exchange_the_same() {
    said(2, "function");
}

#[test]
fn ranks_with_other_programs_are_refused() {
    for (part, words) in [
        (
            "other program",
            "rank 1 differs from rank 0 in the size of its step",
        ),
        (
            "other program of other shapes",
            "the ranks do not run the same step",
        ),
        ("other parameters", "rank 1 differs from rank 0 in exchange "),
        ("other parameters later", "the ranks do not run the same step"),
        ("synchronised", "the ranks do not run the same step"),
    ] {
        let Some(output) = run(2, part) else { return };
        let text = text(&output);
        assert!(!output.status.success(), "{part}: {text}");
        assert!(
            text.contains("said at ") && text.contains(words),
            "{part}: {text}"
        );
    }
}
