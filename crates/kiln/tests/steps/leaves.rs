//! What a closure and an optimizer can tell of a tensor besides its elements: whether it is tracked, where in
//! the model it is, and which leaf it is.

use burn::module::{
    AutodiffModule, Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, ParamId,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig, SimpleOptimizer};
use kiln::{CompileBackend, Kiln, KilnDevice, TrainStep, Weights};

use crate::harness::*;

const BACKEND: CompileBackend = CompileBackend::AotEager;
const WIDTH: usize = 3;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn input(call: usize) -> Tensor<Compiled, 2> {
    let values: Vec<f32> = (0..4 * WIDTH)
        .map(|index| ((call * 31 + index) as f32 * 0.7).sin())
        .collect();
    Tensor::from_data(TensorData::new(values, [4, WIDTH]), &device())
}

/// A parameter whose numbers 8 bits hold.
fn matrix(step: f32) -> Param<Tensor<Compiled, 2>> {
    let values: Vec<f32> = (0..WIDTH * WIDTH)
        .map(|index| (index % 4) as f32 * step - step)
        .collect();
    let values = Tensor::from_data(TensorData::new(values, [WIDTH, WIDTH]), &device());
    Param::initialized(ParamId::new(), values.require_grad())
}

/// The losses of a plain loop; call `index` has the input `batch(index)`.
fn plain<M, O>(
    mut model: M,
    mut optim: OptimizerAdaptor<O, M, Compiled>,
    calls: usize,
    rate: f64,
    loss: impl Fn(&M, Tensor<Compiled, 2>) -> Tensor<Compiled, 1>,
    batch: impl Fn(usize) -> Tensor<Compiled, 2>,
) -> Vec<f64>
where
    M: AutodiffModule<Compiled>,
    O: SimpleOptimizer<Kiln>,
{
    let call = |index| {
        let output = loss(&model, batch(index));
        let gradients = GradientsParams::from_grads(output.backward(), &model);
        model = optim.step(rate, model.clone(), gradients);
        value(output)
    };
    (0..calls).map(call).collect()
}

#[track_caller]
fn assert_close(losses: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    for (call, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        assert!(
            (loss - expected).abs() <= tolerance * expected.abs(),
            "{what}: loss {call} is {loss}, in a plain loop {expected}"
        );
    }
}

#[test]
fn an_input_that_is_tracked_is_another_step() {
    let _turn = turn();
    // Adversarial examples where the program asks for them: it tracks the batch.
    fn loss(model: &Param<Tensor<Compiled, 2>>, x: Tensor<Compiled, 2>) -> Tensor<Compiled, 1> {
        let plain = |x: Tensor<Compiled, 2>| x.matmul(model.val()).powf_scalar(2.0).mean();
        let gradients = plain(x.clone()).backward();
        match x.grad(&gradients) {
            Some(gradient) => plain(Tensor::from_inner(x.inner() + gradient.sign() * 0.5)),
            None => plain(x),
        }
    }
    const CALLS: usize = 24;
    let batch = |index: usize| match index >= 10 && index.is_multiple_of(2) {
        true => input(index).require_grad(),
        false => input(index),
    };
    let model = matrix(0.25);
    let expected = plain(model.clone(), SgdConfig::new().init(), CALLS, 0.05, loss, batch);
    let mut step = TrainStep::new(model, SgdConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let losses: Vec<f64> = (0..CALLS)
        .map(|index| value(step.step(0.05, batch(index)).unwrap()))
        .collect();
    assert_close(&losses, &expected, TOLERANCE, "tracked now and then");
    assert_eq!(step.history().obstacle, None);
    assert_eq!(step.replayed_signatures(), 2);
    assert!(step.history().replayed >= 12, "{}", step.history());
}

/// An embedding that is the last layer, too.
#[derive(Module, Debug)]
struct Tied<B: Backend> {
    embedding: Param<Tensor<B, 2>>,
    last: Param<Tensor<B, 2>>,
}

impl Tied<Compiled> {
    fn new() -> Self {
        let embedding = matrix(0.25);
        Self {
            last: embedding.clone(),
            embedding,
        }
    }

    fn loss(&self, x: Tensor<Compiled, 2>) -> Tensor<Compiled, 1> {
        let hidden = x.matmul(self.embedding.val()).tanh();
        hidden.matmul(self.last.val().transpose()).powf_scalar(2.0).mean()
    }
}

#[test]
fn a_parameter_in_two_places_has_the_gradient_of_both_in_16_bits() {
    let _turn = turn();
    let loss = |model: &Tied<Compiled>, x| model.loss(x);
    let expected = plain(Tied::new(), SgdConfig::new().init(), 3, 0.5, loss, input);
    for weights in [
        Weights::BF16,
        Weights::BF16.with_master(),
        Weights::F16.with_master(),
    ] {
        let step = TrainStep::new(Tied::new(), SgdConfig::new().init(), loss);
        let step = step.with_backend(BACKEND).with_weights(weights);
        let mut step = step.build().unwrap();
        let losses: Vec<f64> = (0..3)
            .map(|index| value(step.step(0.5, input(index)).unwrap()))
            .collect();
        // With the gradient of one place alone the second loss is a fifth larger.
        assert_close(&losses, &expected, 0.05, &format!("{weights:?}"));
    }
}

#[test]
fn a_parameter_in_two_places_is_one_after_a_cast() {
    let _turn = turn();
    let loss = |model: &Tied<Compiled>, x| model.loss(x);
    let expected = plain(Tied::new(), SgdConfig::new().init(), 2, 0.5, loss, input);
    let narrow = kiln::cast_parameters::<Compiled, _>(Tied::new(), DType::BF16);
    let model = kiln::cast_parameters::<Compiled, _>(narrow, DType::F32);
    let losses = plain(model, SgdConfig::new().init(), 2, 0.5, loss, input);
    assert_close(&losses, &expected, TOLERANCE, "cast");
}

/// Layers in a collection of the program's own: nothing says where one of them begins.
#[derive(Clone, Debug)]
struct Bag<B: Backend>(Vec<Param<Tensor<B, 2>>>);

impl<B: Backend> Module<B> for Bag<B> {
    type Record = Vec<Param<Tensor<B, 2>>>;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self(self.0.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self(self.0.to_device(device))
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.0.iter().for_each(|layer| layer.visit(visitor));
    }

    fn map<M: ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        Self(
            self.0
                .into_iter()
                .map(|layer| Module::map(layer, mapper))
                .collect(),
        )
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(record)
    }

    fn into_record(self) -> Self::Record {
        self.0
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Bag<B> {
    type InnerModule = Bag<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        Bag(self.0.iter().map(AutodiffModule::valid).collect())
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self(module.0.into_iter().map(AutodiffModule::from_inner).collect())
    }
}

impl<B: Backend> ModuleDisplay for Bag<B> {}

impl<B: Backend> ModuleDisplayDefault for Bag<B> {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content)
    }
}

impl<B: Backend> std::fmt::Display for Bag<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("bag")
    }
}

#[test]
fn parameters_without_a_path_are_told_apart() {
    let _turn = turn();
    const CALLS: usize = 10;
    let loss = |model: &Bag<Compiled>, x: Tensor<Compiled, 2>| {
        let hidden = x.matmul(model.0[0].val()).tanh();
        hidden.matmul(model.0[1].val()).powf_scalar(2.0).mean()
    };
    let model = Bag(vec![matrix(0.25), matrix(0.5)]);
    let optim = || AdamWConfig::new().with_epsilon(1e-3).init();
    let expected = plain(model.clone(), optim(), CALLS, 0.01, loss, input);
    let mut step = TrainStep::new(model, optim(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let losses: Vec<f64> = (0..CALLS)
        .map(|index| value(step.step(0.01, input(index)).unwrap()))
        .collect();
    assert_close(&losses, &expected, TOLERANCE, "a module written by hand");
    assert_eq!(step.history().obstacle, None);
    assert_eq!(step.history().replayed, 6, "{}", step.history());
    let replay = step.explain().into_report().replay.unwrap();
    let has = |end: &str| replay.inputs.iter().any(|line| line.ends_with(end));
    assert!(has("state of ``") && has("state of ` (2)`"), "{replay:?}");
}
