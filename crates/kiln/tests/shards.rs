//! Training on ranks that divide the optimizer's state.

mod launch;

use burn::module::Module;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::decay::WeightDecayConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, GradientsParams, MuonConfig, Optimizer, RmsPropConfig, SgdConfig,
    SimpleOptimizer,
};
use kiln::distributed::{self, World};
use kiln::explain::State;
use kiln::{
    CompileBackend, CompileOptions, Kiln, KilnDevice, LossScaling, RegionReport, TrainError, TrainStep,
    Weights,
};
use kiln_compiler::{CollectiveCall, ExternCall};
use launch::examples::{B, Batch, EXAMPLES, examples, same_on_all, share_of, squares};
use launch::{agree, losses, print, run, text};

const STEPS: usize = 50;

/// Steps in which the last rank has an example that is far off.
const OUTLIERS: [usize; 2] = [10, 30];

/// Elements of the parameters that are trained.
const SIZES: [usize; 6] = [42, 7, 49, 7, 14, 2];

/// No number of ranks divides its parameters: [`SIZES`] and 49 elements.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    /// Not trained.
    frozen: Linear<B>,
    /// Used twice.
    shared: Linear<B>,
    last: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(6, 7).init(device),
            frozen: LinearConfig::new(7, 7).init::<B>(device).no_grad(),
            shared: LinearConfig::new(7, 7).init(device),
            last: LinearConfig::new(7, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.shared.forward(self.first.forward(x).tanh()).tanh();
        let x = self.frozen.forward(x).tanh();
        self.last.forward(self.shared.forward(x).tanh())
    }
}

/// The share of a rank in the examples of a step. An `outlier` is in two steps, on the last rank.
fn share(step: usize, outlier: bool, world: &World, device: &KilnDevice) -> Batch {
    let (x, mut y) = examples(step);
    if outlier && OUTLIERS.contains(&step) {
        y[EXAMPLES * 2 - 1] = 1e5;
    }
    share_of((x, y), world, device)
}

fn loss(net: &Net<B>, (x, y): Batch) -> Tensor<B, 1> {
    squares(net.forward(x), y)
}

/// The same of two halves of a batch, one after the other: accumulated gradients.
fn accumulated(net: &Net<B>, (x, y): Batch) -> Tensor<B, 1> {
    let half = |tensor: &Tensor<B, 2>, number| tensor.clone().chunk(2, 0).swap_remove(number);
    (loss(net, (half(&x, 0), half(&y, 0))) + loss(net, (half(&x, 1), half(&y, 1)))) * 0.5
}

/// How a part trains.
#[derive(Clone, Copy)]
struct Way<'a> {
    world: &'a World,
    sharded: bool,
    optimizer_has_moments: bool,
    backend: CompileBackend,
    scaling: Option<LossScaling>,
    autocast: Option<DType>,
    weights: Option<Weights>,
    loss: fn(&Net<B>, Batch) -> Tensor<B, 1>,
    rate: f64,
}

fn train<O: SimpleOptimizer<Kiln> + 'static>(way: Way, optim: OptimizerAdaptor<O, Net<B>, B>) {
    let device = KilnDevice::cpu();
    B::seed(&device, 11 + way.world.rank() as u64);
    train_net(way, Net::<B>::new(&device), optim);
}

fn train_net<O: SimpleOptimizer<Kiln> + 'static>(
    way: Way,
    net: Net<B>,
    optim: OptimizerAdaptor<O, Net<B>, B>,
) {
    let world = way.world;
    let device = KilnDevice::cpu();
    let mut options = CompileOptions::default()
        .with_backend(way.backend)
        .with_threads(1);
    if let Some(scaling) = way.scaling {
        options = options.with_loss_scaling(scaling);
    }
    if let Some(dtype) = way.autocast {
        options = options.with_autocast(dtype);
    }
    let mut step = TrainStep::new(net, optim, way.loss)
        .with_options(options)
        .with_data_parallel(world);
    if let Some(weights) = way.weights {
        step = step.with_weights(weights);
    }
    if way.sharded {
        step = step.with_sharded_state();
    }
    let mut step = step.build().expect("the ranks begin together");
    let (mut losses, mut skipped) = (Vec::new(), 0);
    for number in 0..STEPS {
        if number == 40 {
            // As for a checkpoint.
            check_whole(world, step.optimizer().expect("every rank gives its share"));
        }
        let loss = step
            .step(way.rate, share(number, way.scaling.is_some(), world, &device))
            .expect("it trains");
        losses.push(loss.into_data().to_vec::<f32>().expect("one f32")[0]);
        if way.autocast.is_some() {
            let scale = step.loss_scale().expect("f16 scales its loss");
            world
                .agree(&[("its scale", format!("{scale:?}"))])
                .expect("all ranks skip the same steps");
            let skips = scale.skipped > skipped;
            assert!(skips || !OUTLIERS.contains(&number), "step {number}: {scale:?}");
            skipped = scale.skipped;
        }
    }
    if way.backend == CompileBackend::Cpu && way.autocast.is_none() {
        assert!(step.history().replayed > 25, "{:?}", step.history());
    }
    let state = step.state().expect("it trains");
    let text = step.explain().to_string();
    if way.sharded && world.size() > 1 {
        assert_eq!(state.ranks, world.size());
        // 121 trained elements in six tensors; each share is rounded up to a whole element.
        let elements: usize = SIZES.iter().map(|elements| elements.div_ceil(world.size())).sum();
        let share = elements * 4;
        match way.optimizer_has_moments {
            true => assert_eq!(state.optimizer_bytes, 2 * share, "{state:?}"),
            false => assert_eq!(state.optimizer_bytes % share, 0, "{state:?}"),
        }
        assert!(
            text.contains(&format!("the share of one of {} ranks", world.size())),
            "{text}"
        );
    }
    if way.weights.is_some_and(Weights::has_master) {
        check_master(&way, &mut step, state);
    }
    check_plan(&way, &step.report());
    if let Some(scale) = step.loss_scale().filter(|_| way.autocast.is_none()) {
        assert_eq!(scale.skipped, 2, "{scale:?}");
    }
    let model = step.model().expect("no step failed");
    same_on_all(world, model.shared.weight.val());
    let (model, optim) = step.into_parts().expect("every rank gives its share");
    check_whole(world, &optim);
    if way.weights.is_some_and(Weights::has_master) {
        assert_eq!(model.last.weight.val().dtype(), DType::F32, "as without shares");
    }
    print(world.is_first(), &losses);
}

/// The training step of a part.
type Step<O> = TrainStep<B, Net<B>, O, fn(&Net<B>, Batch) -> Tensor<B, 1>, Batch, Tensor<B, 1>>;

/// A master copy is divided as the state is, and is whole and in f32 where it is asked for.
fn check_master<O: SimpleOptimizer<Kiln> + 'static>(way: &Way, step: &mut Step<O>, state: State) {
    let world = way.world;
    let divided = way.sharded && world.size() > 1;
    // The two parameters that are not trained have a share, too.
    let shares = SIZES
        .iter()
        .chain(&[49, 7])
        .map(|elements| elements.div_ceil(world.size()));
    let bytes = if divided { 4 * shares.sum::<usize>() } else { 0 };
    assert_eq!(state.master_bytes, bytes, "{state:?}");
    let whole = step.whole_model().expect("every rank gives its share");
    assert_eq!(whole.last.weight.val().dtype(), DType::F32);
    same_on_all(world, whole.shared.weight.val());
    let model = step.model().expect("no step failed");
    let stored = if divided { DType::BF16 } else { DType::F32 };
    assert_eq!(model.shared.weight.val().dtype(), stored);
    let narrow = |net: &Net<B>, part: fn(&Net<B>) -> Tensor<B, 2>| part(net).cast(DType::BF16).into_data();
    for part in [
        |net: &Net<B>| net.shared.weight.val(),
        |net: &Net<B>| net.frozen.weight.val(),
    ] {
        assert_eq!(
            narrow(&whole, part),
            narrow(model, part),
            "it is what is computed with"
        );
    }
    if divided {
        let finer = whole.shared.weight.val() - model.shared.weight.val().cast(DType::F32);
        assert!(finer.abs().max().into_scalar() > 0.0, "it has more than 8 bits");
    }
}

/// A compiled step communicates once for each trained parameter and direction, and keeps all state in place.
fn check_plan(way: &Way, report: &RegionReport) {
    // Not the first one, which makes the state of some optimizers.
    let step = report.steps.iter().max_by_key(|step| step.runs);
    let contract = step.and_then(|step| step.contract.as_ref());
    let Some(contract) = contract.filter(|_| way.world.size() > 1) else {
        return;
    };
    if !way.sharded {
        // 121 trained parameters and the loss, once, however often the loss uses a parameter.
        let started = contract.externs.iter().filter(|call| call.name == "all_reduce");
        let elements: usize = started
            .map(|call| call.inputs[0].1.iter().product::<usize>())
            .sum();
        assert_eq!(elements, 122);
        return;
    }
    // In one bucket each: so small ones are joined, and travel beside other work.
    let started = |name: &str| -> Vec<usize> {
        let is_started = |call: &&ExternCall| {
            call.name == name && matches!(call.collective, Some(CollectiveCall::Start { .. }))
        };
        let calls = contract.externs.iter().filter(is_started);
        calls.map(|call| call.inputs[0].1.iter().product()).collect()
    };
    let share: usize = SIZES
        .iter()
        .map(|elements| elements.div_ceil(way.world.size()))
        .sum();
    assert_eq!(
        (started("reduce_scatter"), started("all_gather")),
        (vec![share * way.world.size()], vec![share])
    );
    if way.weights.is_some() {
        return;
    }
    // Those of loss scaling are so small that they are copied.
    let scalars = if way.scaling.is_some() { 3 } else { 0 };
    let new = contract.aliases.iter().filter(|alias| alias.is_none()).count();
    assert_eq!(
        new,
        1 + scalars,
        "the loss alone needs memory of its own: {:?}",
        contract.aliases
    );
}

/// The state that a checkpoint gets is whole, and the same on all ranks.
fn check_whole<O: SimpleOptimizer<Kiln>>(world: &World, optim: &OptimizerAdaptor<O, Net<B>, B>) {
    let record = optim.to_record();
    let mut records: Vec<_> = record.into_iter().collect();
    records.sort_by_key(|(parameter, _)| parameter.val());
    let sizes: Vec<usize> = records
        .into_iter()
        .map(|(_, record)| {
            let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
            let bytes = Recorder::<B>::record(&recorder, record, ()).expect("it is recorded");
            bytes.len()
        })
        .collect();
    assert!(sizes.is_empty() || sizes.len() == 6, "{sizes:?}");
    world
        .agree(&[("its state", sizes.iter().sum::<usize>().to_string())])
        .expect("all have the same");
}

/// What a rank of another test does; nothing where nobody asks for a part: `OPTIMIZER WORD..`.
#[test]
fn a_part() {
    let Ok(part) = std::env::var("KILN_PART") else {
        return;
    };
    let world = distributed::init().expect("the ranks are connected");
    let has = |word: &str| part.split(' ').any(|other| other == word);
    let scaling = LossScaling {
        initial: 2f32.powi(120),
        ..LossScaling::default()
    };
    let way = Way {
        world: &world,
        sharded: has("sharded"),
        optimizer_has_moments: has("adam") || has("adamw") || has("loaded"),
        backend: if has("node-by-node") {
            CompileBackend::AotEager
        } else {
            CompileBackend::Cpu
        },
        scaling: match has("f16") {
            // Two skipped steps leave most of it.
            true => Some(LossScaling {
                initial: 1024.0,
                ..LossScaling::default()
            }),
            false => has("scaled").then_some(scaling),
        },
        autocast: has("f16").then_some(DType::F16),
        weights: if has("master") {
            Some(Weights::BF16.with_master())
        } else {
            has("bf16").then_some(Weights::BF16)
        },
        loss: if has("accumulated") { accumulated } else { loss },
        rate: 1e-2,
    };
    let norm = Some(GradientClippingConfig::Norm(0.05));
    match part.split(' ').next().unwrap_or_default() {
        "adamw" => train(
            way,
            AdamWConfig::new()
                .with_weight_decay(0.01)
                .with_grad_clipping(norm)
                .init(),
        ),
        "adam" => train(
            way,
            AdamConfig::new()
                .with_weight_decay(Some(WeightDecayConfig::new(1e-3)))
                .init(),
        ),
        "sgd" => train(
            way,
            SgdConfig::new()
                .with_momentum(Some(MomentumConfig::new()))
                .with_weight_decay(Some(WeightDecayConfig::new(1e-3)))
                .with_gradient_clipping(Some(GradientClippingConfig::Value(0.02)))
                .init(),
        ),
        "rmsprop" => train(
            Way { rate: 1e-3, ..way },
            RmsPropConfig::new().with_momentum(0.0).init(),
        ),
        "adagrad" => train(way, AdaGradConfig::new().init()),
        // Each rank comes with another state, and rank 0 with the one that counts.
        "loaded" => {
            let device = KilnDevice::cpu();
            B::seed(&device, 5);
            let net = Net::<B>::new(&device);
            let alone = |seed: usize| {
                let optim = AdamConfig::new().init::<B, Net<B>>();
                let x = Tensor::<B, 2>::ones([1, 6], &device) * (seed as f64 - 0.5);
                let gradients = loss(&net, (x, Tensor::zeros([1, 2], &device))).backward();
                let gradients = GradientsParams::from_grads(gradients, &net);
                let mut optim = optim;
                drop(optim.step(1e-2, net.clone(), gradients));
                optim
            };
            let optim = match world.rank() {
                0 => alone(1),
                1 => alone(3),
                _ => AdamConfig::new().init(),
            };
            train_net(way, net.clone(), optim);
        }
        "muon" => {
            let device = KilnDevice::cpu();
            let mut net = Net::<B>::new(&device);
            for layer in [&mut net.first, &mut net.shared, &mut net.last] {
                layer.bias = None;
            }
            let built = TrainStep::new(net, MuonConfig::new().init(), loss)
                .with_data_parallel(&world)
                .with_sharded_state()
                .build::<Batch, Tensor<B, 1>>();
            match built.err() {
                Some(TrainError::Sharding { reason }) => println!("refused: {reason}"),
                other => panic!("{other:?}"),
            }
        }
        other => panic!("there is no part {other}"),
    }
}

#[test]
fn ranks_with_shares_train_as_one_rank() {
    let Some(one) = losses(1, "adamw") else { return };
    assert!(one[STEPS - 1] < 0.8 * one[0], "{one:?}");
    for ranks in [2, 3, 4] {
        let several = losses(ranks, "adamw sharded").expect("mpirun was there");
        agree(&one, &several, &format!("{ranks} ranks"));
        if ranks == 3 {
            let again = losses(ranks, "adamw sharded").expect("mpirun was there");
            assert_eq!(again, several, "two runs have equal bits");
        }
    }
    let by_nodes = losses(2, "adamw sharded node-by-node").expect("mpirun was there");
    agree(&one, &by_nodes, "node by node");
    for part in ["adamw accumulated", "adamw accumulated sharded"] {
        agree(&one, &losses(2, part).expect("mpirun was there"), part);
    }
    assert_eq!(losses(1, "adamw sharded").expect("mpirun was there"), one);
}

#[test]
fn other_optimizers_divide_their_state() {
    for (optimizer, ranks) in [("adam", 4), ("sgd", 3), ("rmsprop", 2), ("adagrad", 3)] {
        let Some(one) = losses(1, optimizer) else { return };
        let several = losses(ranks, &format!("{optimizer} sharded")).expect("mpirun was there");
        agree(&one, &several, optimizer);
    }
}

#[test]
fn a_step_that_overflows_is_skipped_on_all_ranks() {
    let Some(one) = losses(1, "adamw scaled") else {
        return;
    };
    for (ranks, part) in [(2, "adamw scaled"), (3, "adamw scaled sharded")] {
        agree(&one, &losses(ranks, part).expect("mpirun was there"), part);
    }
}

/// The last rank's gradients alone are infinite in f16.
#[test]
fn ranks_that_compute_in_f16_skip_the_same_steps() {
    let Some(one) = losses(1, "adamw f16") else { return };
    for part in ["adamw f16", "adamw f16 sharded"] {
        let two = losses(2, part).expect("mpirun was there");
        let close = |step: usize| (one[step] - two[step]).abs() <= 0.02 * one[step].abs().max(0.1);
        assert!((0..STEPS).all(close), "{part}: {one:?} and {two:?}");
    }
}

#[test]
fn all_ranks_begin_with_the_state_of_the_first() {
    let Some(one) = losses(1, "loaded") else { return };
    for (ranks, part) in [(3, "loaded"), (3, "loaded sharded"), (2, "loaded sharded")] {
        agree(&one, &losses(ranks, part).expect("mpirun was there"), part);
    }
}

#[test]
fn shares_of_parameters_of_16_bits() {
    for weights in ["bf16", "master"] {
        let Some(whole) = losses(2, &format!("adam {weights}")) else {
            return;
        };
        assert!(whole[STEPS - 1] < 0.9 * whole[0], "{whole:?}");
        let shares = losses(2, &format!("adam {weights} sharded")).expect("mpirun was there");
        agree(&whole, &shares, weights);
        let three = losses(3, &format!("adam {weights} sharded")).expect("mpirun was there");
        let close = |step: usize| (whole[step] - three[step]).abs() <= 0.02 * whole[step].abs().max(0.1);
        assert!((0..STEPS).all(close), "{weights}: {whole:?} and {three:?}");
    }
}

#[test]
fn an_update_of_whole_matrices_is_refused() {
    let Some(output) = run(2, "muon sharded") else {
        return;
    };
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("refused: `"), "{text}");
    assert!(
        text.contains("looks at more than one element at a time"),
        "{text}"
    );
}
