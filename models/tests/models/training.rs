//! What distinguishes training from evaluation: dropout, initial weights, padding.

use crate::fixture::{Ad, Inner, Values};
use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::tensor::{Int, Tensor};
use kiln_models::bert::BertConfig;
use kiln_models::llama::LlamaConfig;
use kiln_models::loss::{CrossEntropy, binary_cross_entropy};
use kiln_models::vision::VisionConfig;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn spread(data: &burn::tensor::TensorData) -> f64 {
    let values: Vec<f64> = data.iter::<f64>().collect();
    (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt()
}

/// Spread of one tensor; the others stay uninitialised.
fn spread_of<M: burn::module::Module<Inner>>(model: &M, wanted: &str) -> f64 {
    struct Find<'a> {
        names: Vec<String>,
        wanted: &'a str,
        found: Option<f64>,
    }
    impl ModuleVisitor<Inner> for Find<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.names.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.names.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Inner, D>>) {
            if self.names.join(".") == self.wanted {
                self.found = Some(spread(&param.val().into_data()));
            }
        }
    }
    let mut find = Find {
        names: Vec::new(),
        wanted,
        found: None,
    };
    model.visit(&mut find);
    find.found.unwrap_or_else(|| panic!("no tensor {wanted}"))
}

#[test]
fn dropout_acts_in_training_only() {
    let device = Default::default();
    let model = BertConfig::new()
        .with_hidden_size(32)
        .with_num_hidden_layers(1)
        .with_num_attention_heads(4)
        .with_intermediate_size(32)
        .with_vocab_size(50)
        .init_classifier::<Ad>(&device);
    let tokens = Tensor::<Ad, 2, Int>::from_ints([[3, 4, 5, 6]], &device);
    let train = || model.forward(tokens.clone(), None, None).into_data();
    assert_ne!(train(), train());
    let valid = model.valid();
    let evaluate = || valid.forward(tokens.clone().inner(), None, None).into_data();
    assert_eq!(evaluate(), evaluate());
}

#[test]
fn initial_weights_have_the_spread_of_the_originals() {
    let device = Default::default();
    let values = Values::of(&LlamaConfig::tiny().init::<Inner>(&device));
    for (path, expected) in [
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.0.mlp.down_proj.weight", 0.02),
        ("lm_head.weight", 0.02),
        ("model.norm.gamma", 1.0),
    ] {
        let found = spread(&values[path]);
        assert!(
            (found / expected - 1.0).abs() < 0.05,
            "{path}: {found} where {expected} was expected"
        );
    }
    // A uniform draw in +-bound has spread bound / sqrt(3).
    for (model, path, square) in [
        ("resnet18", "ResNet.conv1.weight", 2.0 / (64.0 * 49.0)),
        ("resnet18", "ResNet.layer3.0.conv2.weight", 2.0 / (256.0 * 9.0)),
        ("resnet18", "ResNet.fc.weight", 1.0 / 512.0 / 3.0),
        ("resnet18", "ResNet.bn1.running_var", 1.0),
        // Depthwise: the fan counts all channels out.
        (
            "mobilenet_v2",
            "MobileNetV2.blocks.16.depthwise.conv.weight",
            2.0 / (960.0 * 9.0),
        ),
        ("mobilenet_v2", "MobileNetV2.classifier.weight", 1e-4),
        ("mnasnet1_0", "MnasNet.classifier.weight", 3.0 / 1000.0 / 3.0),
        (
            "squeezenet1_1",
            "SqueezeNet.fires.7.expand3x3.weight",
            6.0 / (64.0 * 9.0) / 3.0,
        ),
        ("squeezenet1_1", "SqueezeNet.classifier.weight", 1e-4),
    ] {
        let config = VisionConfig::new(model.into());
        let found = spread_of(&config.init::<Inner>(&device).expect(model), path);
        let expected = f64::sqrt(square);
        assert!(
            (found / expected - 1.0).abs() < 0.05,
            "{path}: {found} where {expected} was expected"
        );
    }
    let values = Values::of(&BertConfig::minilm().init::<Inner>(&device));
    let table: Vec<f32> = values["embeddings.word_embeddings.weight"]
        .iter::<f32>()
        .collect();
    assert!(
        table[..384].iter().all(|value| *value == 0.0),
        "the padding row begins at zero"
    );
    assert!(
        values["pooler.dense.bias"]
            .iter::<f32>()
            .all(|value| value == 0.0)
    );
}

/// A label that is no class is an error of the backend, never the loss of another class.
#[test]
fn a_label_that_is_no_class_has_no_loss() {
    let device = Default::default();
    for wrong in [3, -1, -101, 1 << 20] {
        for loss in [CrossEntropy::new(), CrossEntropy::new().with_ignore_index(-100)] {
            let logits = Tensor::<Inner, 2>::from_floats([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], &device);
            let targets = Tensor::<Inner, 1, Int>::from_ints([1, wrong], &device);
            let outcome = catch_unwind(AssertUnwindSafe(|| loss.forward(logits, targets).into_data()));
            assert!(outcome.is_err(), "label {wrong} of 3 classes: {outcome:?}");
        }
    }
}

/// What a batch that a model cannot take panics with: what was given and what would be right.
#[test]
fn inputs_that_do_not_fit_are_named() {
    let device = Default::default();
    let refusal = |run: Box<dyn Fn()>| {
        let payload = catch_unwind(AssertUnwindSafe(&*run)).expect_err("the input does not fit");
        payload.downcast_ref::<String>().expect("a message").clone()
    };
    for (name, shape, expected) in [
        ("resnet18", [2, 1, 32, 32], "repeat the one channel"),
        ("mobilenet_v2", [2, 4, 32, 32], "4 channels"),
        ("alexnet", [1, 3, 62, 80], "at least 63x63"),
        ("vgg16", [1, 3, 31, 31], "at least 32x32"),
        ("squeezenet1_1", [1, 3, 16, 16], "at least 17x17"),
        ("vit_small_patch16_224", [1, 3, 32, 32], "built for 224x224"),
    ] {
        let text = refusal(Box::new(move || {
            let model = VisionConfig::new(name.into())
                .init::<Inner>(&Default::default())
                .expect(name);
            let _ = model.forward(Tensor::zeros(shape, &Default::default()));
        }));
        assert!(text.contains(expected), "{name}: {text}");
    }
    // One pixel more, and the network has an answer.
    let smallest = VisionConfig::new("squeezenet1_1".into()).with_num_classes(3);
    let model = smallest.init::<Inner>(&device).expect("a model");
    assert_eq!(
        model.forward(Tensor::zeros([1, 3, 17, 17], &device)).dims(),
        [1, 3]
    );

    let text = refusal(Box::new(|| {
        let config = BertConfig::new()
            .with_hidden_size(16)
            .with_num_hidden_layers(1)
            .with_num_attention_heads(2);
        let model = config
            .with_max_position_embeddings(8)
            .with_vocab_size(9)
            .init::<Inner>(&Default::default());
        let _ = model.forward(Tensor::zeros([1, 9], &Default::default()), None, None);
    }));
    assert!(
        text.contains("9 tokens") && text.contains("8 positions"),
        "{text}"
    );
}

/// The loss is that of `problem_type`: with one number per text a squared error, not the cross entropy of one
/// class, which is always 0.
#[test]
fn one_number_per_text_is_a_regression() {
    let device = Default::default();
    let config = BertConfig::new()
        .with_hidden_size(16)
        .with_num_hidden_layers(1)
        .with_num_attention_heads(2)
        .with_intermediate_size(16)
        .with_vocab_size(9)
        .with_num_labels(1);
    let model = config.init_classifier::<Inner>(&device);
    let tokens = Tensor::<Inner, 2, Int>::from_ints([[1, 2], [3, 4]], &device);
    let labels = Tensor::<Inner, 1, Int>::from_ints([2, -1], &device);
    let logits: Vec<f64> = model
        .forward(tokens.clone(), None, None)
        .into_data()
        .iter::<f64>()
        .collect();
    let expected = ((logits[0] - 2.0).powi(2) + (logits[1] + 1.0).powi(2)) / 2.0;
    let found = f64::from(model.loss(tokens, None, labels).into_scalar());
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
}

#[test]
fn a_query_without_keys_stays_finite() {
    let device = Default::default();
    let config = BertConfig::new()
        .with_hidden_size(16)
        .with_num_hidden_layers(1)
        .with_num_attention_heads(2);
    let model = config
        .with_intermediate_size(16)
        .with_vocab_size(9)
        .init::<Inner>(&device);
    let tokens = Tensor::<Inner, 2, Int>::zeros([1, 3], &device);
    let hidden = model.embed(tokens.clone(), None, Some(tokens));
    assert!(hidden.into_data().iter::<f32>().all(f32::is_finite));
}

#[test]
fn losses_equal_their_definitions() {
    let device = Default::default();
    let logits =
        Tensor::<Inner, 2>::from_floats([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0], [9.0, 9.0, 9.0]], &device);
    let log_prob =
        |row: [f64; 3], class: usize| row[class] - row.iter().map(|value| value.exp()).sum::<f64>().ln();
    let rows = [[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]];
    let targets = Tensor::<Inner, 1, Int>::from_ints([1, 0, -100], &device);
    let plain = -(log_prob(rows[0], 1) + log_prob(rows[1], 0)) / 2.0;
    let uniform = -rows
        .iter()
        .flat_map(|row| (0..3).map(|class| log_prob(*row, class)))
        .sum::<f64>()
        / 6.0;
    let near = |found: Tensor<Inner, 1>, expected: f64| {
        let found = found.into_scalar() as f64;
        assert!(
            (found - expected).abs() < 1e-5,
            "{found} where {expected} was expected"
        );
    };
    let loss = CrossEntropy::new().with_ignore_index(-100);
    near(loss.forward(logits.clone(), targets.clone()), plain);
    near(
        loss.with_label_smoothing(0.2).forward(logits.clone(), targets),
        0.8 * plain + 0.2 * uniform,
    );
    // An ignored target that is a class, and one that stands for the only sample that counts.
    let first = CrossEntropy::new().with_ignore_index(1);
    let targets = Tensor::<Inner, 1, Int>::from_ints([1, 0, 1], &device);
    near(first.forward(logits.clone(), targets), -log_prob(rows[1], 0));
    let none = Tensor::<Inner, 1, Int>::from_ints([-100, -100, -100], &device);
    near(loss.forward(logits.clone(), none), 0.0);

    let labels =
        Tensor::<Inner, 2>::from_floats([[1.0, 0.0, 0.3], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]], &device);
    let values: Vec<f64> = logits.to_data().iter::<f64>().collect();
    let wanted: Vec<f64> = labels.to_data().iter::<f64>().collect();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let expected = values
        .iter()
        .zip(&wanted)
        .map(|(x, t)| t * sigmoid(*x).ln() + (1.0 - t) * sigmoid(-*x).ln());
    near(binary_cross_entropy(logits, labels), -expected.sum::<f64>() / 9.0);
}
