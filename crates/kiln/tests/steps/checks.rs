//! Steps that are compared with a reference: what rounding explains, what it does not, and that a call which fails
//! costs nothing.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor, TensorData, activation};
use burn_optim::{AdamWConfig, RmsPropConfig, SgdConfig};
use kiln::{CSource, CompileOptions, KilnDevice, TrainError, TrainStep};

use crate::harness::*;
use crate::models::*;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

/// Every call that is checked fails at a tolerance of zero: sums have another order. Model and optimizer are
/// then as they were, and calls behind the checked ones go on from there.
#[test]
fn a_check_that_fails_costs_neither_model_nor_optimizer() {
    let _turn = turn();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let train = |options: CompileOptions, failing: usize| {
        let model = copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());
        let step = TrainStep::new(model, AdamWConfig::new().init(), loss).with_options(options);
        let mut step = step.build().unwrap();
        for _ in 0..failing {
            let error = step.step(rate(0), batch(0, EXAMPLES, &device())).unwrap_err();
            assert!(
                error.to_string().contains("is not what aot_eager gives"),
                "{error}"
            );
            assert_eq!(
                parameters::<Compiled, _>(step.model().unwrap()),
                parameters::<Compiled, _>(&start)
            );
        }
        let mut outcome = Outcome::default();
        for index in 0..8 {
            let loss = step.step(rate(index), batch(index, EXAMPLES, &device()));
            outcome.losses.push(value(loss.unwrap()));
        }
        outcome.parameters = parameters::<Compiled, _>(&step.into_model());
        outcome
    };
    let options = CompileOptions::default();
    let expected = train(options.clone(), 0);
    let checked = options
        .check_against("aot_eager", 0.0)
        .unwrap()
        .with_check_steps(3);
    let outcome = train(checked, 3);
    assert_eq!(outcome.losses, expected.losses);
    assert_eq!(outcome.parameters, expected.parameters);
}

/// A network whose every bias is in front of a batch norm: their gradients are zero but for rounding.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Conv2d<B>,
    images: BatchNorm<B>,
    second: Linear<B>,
    vectors: BatchNorm<B>,
    table: Param<Tensor<B, 2>>,
}

type Images = (Tensor<Compiled, 4>, Tensor<Compiled, 1, Int>);

impl Net<Compiled> {
    fn new() -> Self {
        let table = Tensor::random([11, 16], Distribution::Normal(0.0, 0.3), &device());
        Self {
            first: Conv2dConfig::new([3, 8], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(&device()),
            images: BatchNormConfig::new(8).init(&device()),
            second: LinearConfig::new(8, 16).init(&device()),
            vectors: BatchNormConfig::new(16).init(&device()),
            table: Param::from_tensor(table),
        }
    }

    /// The loss, with `last` between the second norm and the classes.
    fn loss(
        &self,
        (images, classes): Images,
        last: impl Fn(Tensor<Compiled, 2>) -> Tensor<Compiled, 2>,
    ) -> Tensor<Compiled, 1> {
        let x = activation::relu(self.images.forward(self.first.forward(images)));
        let [examples, channels, ..] = x.dims();
        let x = x.mean_dim(3).mean_dim(2).reshape([examples, channels]);
        let x = last(self.vectors.forward(self.second.forward(x)));
        let logits = x.matmul(self.table.val().transpose());
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, classes)
    }
}

fn images(seed: usize, examples: usize, side: usize) -> Images {
    let elements = examples * 3 * side * side;
    let pixels: Vec<f32> = (0..elements)
        .map(|index| ((index * 37 + seed * 101) as f32 * 0.618).sin())
        .collect();
    let classes: Vec<i64> = (0..examples)
        .map(|index| ((index * 7 + seed) % 11) as i64)
        .collect();
    (
        Tensor::from_data(TensorData::new(pixels, [examples, 3, side, side]), &device()),
        Tensor::from_data(TensorData::new(classes, [examples]), &device()),
    )
}

fn checked(tolerance: f64) -> CompileOptions {
    let options = CompileOptions::default().check_against("aot_eager", tolerance);
    options.unwrap().with_check_steps(3)
}

/// Optimizers that divide a gradient by its size move a bias in front of a batch norm by rounding alone.
#[test]
fn what_rounding_does_to_parameters_is_no_difference() {
    let _turn = turn();
    for (examples, side, last) in [
        (4, 6, activation::relu as fn(Tensor<Compiled, 2>) -> _),
        (33, 8, activation::tanh),
        (4, 16, activation::relu),
    ] {
        macro_rules! run {
            ($optim:expr) => {{
                let net = initialised(Net::new());
                let loss = |net: &Net<Compiled>, batch| net.loss(batch, last);
                let step = TrainStep::new(net, $optim, loss).with_options(checked(1e-4));
                let mut step = step.build().unwrap();
                for call in 0..4 {
                    let outcome = step.step(3e-3, images(call, examples, side));
                    outcome.unwrap_or_else(|error| panic!("{examples} {side}, call {call}: {error}"));
                }
            }};
        }
        run!(AdamWConfig::new().init());
        run!(RmsPropConfig::new().init());
        run!(SgdConfig::new().init());
    }
}

/// A gradient that is one percent too large, in a step that moves some parameters by rounding alone.
#[test]
fn what_rounding_does_hides_no_fault() {
    fn same(inputs: &[TensorData]) -> TensorData {
        inputs[0].clone()
    }
    fn gradient(_: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
        vec![gradient.clone()]
    }
    let _turn = turn();
    let faulty = CSource {
        forward: "void operation(const kiln_tensor *in, const kiln_tensor *out) {
                      for (int64_t i = 0; i < out[0].elements; i++) ((float *)out->data)[i] = ((float *)in->data)[i];
                  }",
        gradient: Some(
            "void operation(const kiln_tensor *in, const kiln_tensor *out) {
                 for (int64_t i = 0; i < out[0].elements; i++)
                     ((float *)out->data)[i] = 1.01f * ((float *)in[2].data)[i];
             }",
        ),
    };
    let last = |x: Tensor<Compiled, 2>| {
        let shape = x.dims();
        // SAFETY: the sources read their inputs' elements and write those of outputs of the same shape. That one
        // does not compute what its host function does is what the check is to find.
        unsafe { kiln::custom_op_with_c("faulty", x, shape, same, gradient, faulty) }
    };
    let loss = |net: &Net<Compiled>, batch| net.loss(batch, last);
    let step = TrainStep::new(initialised(Net::new()), AdamWConfig::new().init(), loss);
    let mut step = step.with_options(checked(1e-4)).build().unwrap();
    let error = step.step(3e-3, images(0, 4, 6)).unwrap_err().to_string();
    assert!(
        error.contains("is not what aot_eager gives") && error.contains("faulty"),
        "{error}"
    );
}

/// The first call draws parameters and moves running statistics; when it fails, the next one begins with none of
/// either.
#[test]
fn a_first_call_that_fails_leaves_statistics_and_parameters_to_be_drawn() {
    let _turn = turn();
    let train = |options: CompileOptions, is_failing: bool| {
        let seed = || Compiled::seed(&device(), 7);
        seed();
        let loss = |net: &Net<Compiled>, batch| net.loss(batch, activation::relu);
        let step = TrainStep::new(Net::new(), AdamWConfig::new().init(), loss).with_options(options);
        let mut step = step.build().unwrap();
        if is_failing {
            let error = step.step(3e-3, images(9, 4, 6)).unwrap_err();
            assert!(matches!(error, TrainError::Step(_)), "{error}");
            seed();
            Net::new();
        }
        let losses: Vec<f64> = (0..4)
            .map(|call| value(step.step(3e-3, images(call, 4, 6)).unwrap()))
            .collect();
        (losses, trained(&step.into_model()))
    };
    let expected = train(CompileOptions::default(), false);
    let found = train(checked(0.0).with_check_steps(1), true);
    assert_eq!(found, expected);
}
