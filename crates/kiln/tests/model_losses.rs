//! Fifty training steps of a small model of each family, compiled for `cpu` and replayed, against the same
//! program on `Autodiff<Flex>`: every loss must agree.
//!
//! Dropout is off, since burn-flex draws other random numbers. AdamW is taken with an epsilon above rounding
//! errors: it divides gradients by their own size, so that of a parameter whose gradient is zero but for
//! rounding (a bias before a normalisation) only noise remains, in any two programs. Networks with batch norm
//! over eight images amplify such noise: they are trained by plain gradient descent, over fewer steps, and
//! compared less closely.

use burn::module::{Module, ModuleVisitor, Param};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_flex::Flex;
use burn_optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use kiln::{CompileBackend, Kiln, KilnDevice, TrainStep};
use kiln_models::bert::{BertConfig, BertForSequenceClassification};
use kiln_models::llama::{Llama, LlamaConfig};
use kiln_models::mlp::{Mlp, MlpConfig};
use kiln_models::vision::mobilenet::{MobileNetV2, MobileNetV2Config};
use kiln_models::vision::resnet::{BlockKind, ResNet, ResNetConfig};
use kiln_models::vision::vit::{VisionTransformer, VitConfig};

type Reference = Autodiff<Flex>;
type Compiled = Autodiff<Kiln>;

const STEPS: usize = 50;
/// Steps of networks with batch norm: see above.
const FEW_STEPS: usize = 20;
const EXAMPLES: usize = 8;
const CLASSES: usize = 5;
const VOCABULARY: usize = 40;
/// Largest relative difference of a loss.
const TOLERANCE: f64 = 1e-4;
/// The same for networks with batch norm: eight images leave it eight numbers a channel in the last layers,
/// and it amplifies rounding by the inverse of their deviation.
const NORMALISED: f64 = 1e-2;

/// Numbers from -1 to 1 without a pattern that a model could see; five batches that come again and again.
fn floats<B: Backend, const D: usize>(step: usize, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul((step % 5) as u64 + 1);
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn ints<B: Backend, const D: usize>(
    step: usize,
    shape: [usize; D],
    below: usize,
    device: &B::Device,
) -> Tensor<B, D, Int> {
    let value = |index: usize| ((index * 7 + index * index * 3 + (step % 5) * 11) % below) as i32;
    let values: Vec<i32> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

type Vectors<B> = (Tensor<B, 2>, Tensor<B, 1, Int>);
type Images<B> = (Tensor<B, 4>, Tensor<B, 1, Int>);
type Text<B> = (Tensor<B, 2, Int>, Tensor<B, 2, Int>);
type Sentences<B> = (Tensor<B, 2, Int>, Tensor<B, 1, Int>);

fn vectors<B: Backend>(step: usize, device: &B::Device) -> Vectors<B> {
    (
        floats(step, [EXAMPLES, 12], device),
        ints(step, [EXAMPLES], CLASSES, device),
    )
}

fn images<B: Backend>(step: usize, device: &B::Device) -> Images<B> {
    (
        floats(step, [EXAMPLES, 3, 32, 32], device),
        ints(step, [EXAMPLES], CLASSES, device),
    )
}

fn text<B: Backend>(step: usize, device: &B::Device) -> Text<B> {
    let tokens = ints(step, [EXAMPLES, 9], VOCABULARY, device);
    (tokens.clone().narrow(1, 0, 8), tokens.narrow(1, 1, 8))
}

fn sentences<B: Backend>(step: usize, device: &B::Device) -> Sentences<B> {
    (
        ints(step, [EXAMPLES, 8], VOCABULARY, device),
        ints(step, [EXAMPLES], CLASSES, device),
    )
}

fn value<B: Backend>(loss: Tensor<B, 1>) -> f64 {
    loss.into_data().convert::<f64>().to_vec().unwrap()[0]
}

/// `model` with its parameters drawn, which Burn does at first use.
fn initialised<B: Backend, M: Module<B>>(model: M) -> M {
    struct Touch;
    impl<B: Backend> ModuleVisitor<B> for Touch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            param.val();
        }
    }
    model.visit(&mut Touch);
    model
}

fn assert_close(losses: &[f64], expected: &[f64], tolerance: f64) {
    for (step, (a, b)) in losses.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * b.abs(),
            "loss of step {step} is {a}, on flex {b}"
        );
    }
    let (first, last) = (expected[0], expected[expected.len() - 5]);
    assert!(
        (last - first).abs() > 0.01 * first,
        "the same batch has the same loss, nothing could differ: {first} to {last}"
    );
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-5)
}

/// A test that trains the model of `$config` on batches of `$batch`.
macro_rules! fifty_steps {
    ($test:ident, $config:expr, $optimizer:expr, $rate:expr, $steps:expr, $tolerance:expr, $init:ident, $batch:ident, |$model:ident: $ty:ident, ($x:ident, $y:ident): $input:ident| $loss:expr) => {
        #[test]
        fn $test() {
            let config = $config;
            let device = Default::default();
            let optimizer = $optimizer;
            Reference::seed(&device, 3);
            let mut model = initialised(config.$init::<Reference>(&device));
            let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
            let record = model.clone().into_record();
            let start = Recorder::<Reference>::record(&recorder, record, ()).unwrap();
            let mut optim = optimizer.init();
            let expected: Vec<f64> = (0..$steps)
                .map(|step| {
                    let ($x, $y) = $batch::<Reference>(step, &device);
                    let loss = {
                        let $model = &model;
                        $loss
                    };
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optim.step($rate, model.clone(), gradients);
                    value(loss)
                })
                .collect();

            let device = KilnDevice::cpu();
            let model = config.$init::<Compiled>(&device);
            let model = model.load_record(recorder.load(start, &device).unwrap());
            let loss = |$model: &$ty<Compiled>, ($x, $y): $input<Compiled>| $loss;
            let mut step = TrainStep::new(model, optimizer.init(), loss)
                .with_backend(CompileBackend::Cpu)
                .build()
                .unwrap();
            let losses: Vec<f64> = (0..$steps)
                .map(|index| {
                    value(
                        step.step($rate, $batch::<Compiled>(index, &device))
                            .unwrap(),
                    )
                })
                .collect();
            assert_close(&losses, &expected, $tolerance);
            assert!(
                step.history().recorded - step.history().proofs <= 4,
                "{:?}",
                step.history()
            );
        }
    };
}

fifty_steps!(
    mlp,
    MlpConfig::new().with_widths(vec![12, 32, 32, CLASSES]),
    adamw(),
    1e-2,
    STEPS,
    TOLERANCE,
    init,
    vectors,
    |model: Mlp, (x, y): Vectors| model.loss(x, y)
);

fifty_steps!(
    llama,
    LlamaConfig::new(VOCABULARY, 32, 64, 2, 4)
        .with_num_key_value_heads(Some(2))
        .with_max_position_embeddings(32),
    adamw(),
    1e-3,
    STEPS,
    TOLERANCE,
    init,
    text,
    |model: Llama, (x, y): Text| model.loss(x, y)
);

fifty_steps!(
    bert,
    BertConfig::new()
        .with_vocab_size(VOCABULARY)
        .with_hidden_size(32)
        .with_num_hidden_layers(2)
        .with_num_attention_heads(4)
        .with_intermediate_size(64)
        .with_max_position_embeddings(16)
        .with_hidden_dropout_prob(0.0)
        .with_attention_probs_dropout_prob(0.0)
        .with_num_labels(CLASSES),
    adamw(),
    1e-3,
    STEPS,
    TOLERANCE,
    init_classifier,
    sentences,
    |model: BertForSequenceClassification, (x, y): Sentences| model.loss(x, None, y)
);

fifty_steps!(
    resnet,
    ResNetConfig::new(BlockKind::Basic, [1, 1, 1, 1])
        .with_stem_channels(8)
        .with_num_classes(CLASSES),
    SgdConfig::new(),
    1e-2,
    FEW_STEPS,
    NORMALISED,
    init,
    images,
    |model: ResNet, (x, y): Images| model.loss(x, y)
);

fifty_steps!(
    mobilenet,
    MobileNetV2Config::new()
        .with_groups(vec![[1, 16, 1, 1], [3, 24, 2, 2], [3, 32, 1, 2]])
        .with_width_mult(0.5)
        .with_dropout(0.0)
        .with_num_classes(CLASSES),
    SgdConfig::new(),
    1e-2,
    FEW_STEPS,
    NORMALISED,
    init,
    images,
    |model: MobileNetV2, (x, y): Images| model.loss(x, y)
);

fifty_steps!(
    vit,
    VitConfig::new(32, 2, 4)
        .with_image_size(32)
        .with_patch_size(8)
        .with_num_classes(CLASSES),
    adamw(),
    1e-3,
    STEPS,
    TOLERANCE,
    init,
    images,
    |model: VisionTransformer, (x, y): Images| model.loss(x, y)
);
