//! What distinguishes training from evaluation: dropout, initial weights, padding.

use crate::fixture::{Ad, Inner, Values};
use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::tensor::{Int, Tensor};
use kiln_models::bert::BertConfig;
use kiln_models::llama::LlamaConfig;
use kiln_models::loss::{CrossEntropy, binary_cross_entropy};
use kiln_models::vision::VisionConfig;

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
