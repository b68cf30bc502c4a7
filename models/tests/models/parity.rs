//! Logits, losses and gradients equal those of the originals from the same weights.

use crate::fixture::{Ad, Fixture, Inner};
use burn::config::Config;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use kiln_models::bert::BertConfig;
use kiln_models::llama::LlamaConfig;
use kiln_models::mlp::MlpConfig;
use kiln_models::vision::alexnet::AlexNetConfig;
use kiln_models::vision::mnasnet::MnasNetConfig;
use kiln_models::vision::mobilenet::MobileNetV2Config;
use kiln_models::vision::resnet::ResNetConfig;
use kiln_models::vision::squeezenet::SqueezeNetConfig;
use kiln_models::vision::vgg::VggConfig;
use kiln_models::vision::vit::VitConfig;

/// The configuration of a model of this crate: `defaults`, changed by the metadata of the fixture.
fn config<C: Config>(fixture: &Fixture, defaults: &C) -> C {
    let mut value = serde_json::to_value(defaults).expect("a configuration is an object");
    let given: serde_json::Value = serde_json::from_str(&fixture.config).expect("JSON");
    let (Some(all), Some(given)) = (value.as_object_mut(), given.as_object()) else {
        panic!("{}: not an object", fixture.name)
    };
    all.extend(given.clone());
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}

/// An image classifier: any model with `forward(images)` and `loss(images, targets)`.
macro_rules! check_classifier {
    ($fixture:expr, $config:expr) => {{
        let fixture = $fixture;
        fixture.check(
            $config.init::<Ad>(&Default::default()),
            |model| model.forward(fixture.float("input.images")),
            |model| model.forward(fixture.float("input.images")),
            |model| model.loss(fixture.float("input.images"), fixture.int("input.targets")),
        );
    }};
}

#[test]
fn mlp() {
    let fixture = Fixture::load("mlp");
    let config: MlpConfig = config(&fixture, &MlpConfig::new());
    check_classifier!(fixture, config);
}

#[test]
fn resnets() {
    for name in ["resnet_basic", "resnet_bottleneck", "resnext"] {
        let fixture = Fixture::load(name);
        let config = config(&fixture, &ResNetConfig::resnet18());
        check_classifier!(fixture, config);
    }
}

#[test]
fn alexnet() {
    let fixture = Fixture::load("alexnet");
    let config = config(&fixture, &AlexNetConfig::new());
    check_classifier!(fixture, config);
}

#[test]
fn vgg() {
    let fixture = Fixture::load("vgg");
    let config = config(&fixture, &VggConfig::vgg16());
    check_classifier!(fixture, config);
}

#[test]
fn squeezenet() {
    let fixture = Fixture::load("squeezenet");
    let config = config(&fixture, &SqueezeNetConfig::new());
    check_classifier!(fixture, config);
}

#[test]
fn mobilenet() {
    let fixture = Fixture::load("mobilenet");
    let config = config(&fixture, &MobileNetV2Config::new());
    check_classifier!(fixture, config);
}

#[test]
fn mnasnet() {
    let fixture = Fixture::load("mnasnet");
    let config = config(&fixture, &MnasNetConfig::new());
    check_classifier!(fixture, config);
}

#[test]
fn vit() {
    let fixture = Fixture::load("vit");
    let config = config(&fixture, &VitConfig::vit_small_patch16_224());
    check_classifier!(fixture, config);
}

#[test]
fn bert_classifier() {
    let fixture = Fixture::load("bert_classifier");
    let config = BertConfig::from_hf_json(&fixture.config).expect("a configuration");
    assert_eq!(config.num_labels, 3);
    fn inputs<B: Backend>(fixture: &Fixture) -> [Tensor<B, 2, burn::tensor::Int>; 3] {
        ["input.tokens", "input.segments", "input.keep"].map(|key| fixture.int(key))
    }
    fixture.check(
        config.init_classifier::<Ad>(&Default::default()),
        |model| {
            let [tokens, segments, keep] = inputs(&fixture);
            model.forward(tokens, Some(segments), Some(keep))
        },
        |model| {
            let [tokens, segments, keep] = inputs(&fixture);
            model.forward(tokens, Some(segments), Some(keep))
        },
        |model| {
            let [tokens, segments, keep] = inputs(&fixture);
            let logits = model.forward(tokens, Some(segments), Some(keep));
            kiln_models::loss::CrossEntropy::new().forward(logits, fixture.int("input.targets"))
        },
    );
}

#[test]
fn bert_masked_lm() {
    for name in ["bert_masked_lm", "bert_untied"] {
        let fixture = Fixture::load(name);
        let config = BertConfig::from_hf_json(&fixture.config).expect("a configuration");
        let segments = || Some(fixture.int("input.segments"));
        let keep = || Some(fixture.int("input.keep"));
        fixture.check(
            config.init_masked_lm::<Ad>(&Default::default()),
            |model| model.forward(fixture.int("input.tokens"), segments(), keep()),
            |model| {
                model.forward(
                    fixture.int("input.tokens"),
                    Some(fixture.int("input.segments")),
                    Some(fixture.int("input.keep")),
                )
            },
            |model| {
                let logits = model.forward(fixture.int("input.tokens"), segments(), keep());
                let loss = kiln_models::loss::CrossEntropy::new().with_ignore_index(-100);
                kiln_models::loss::sequence_cross_entropy(&loss, logits, fixture.int("input.targets"))
            },
        );
    }
}

#[test]
fn bert_embedding() {
    let fixture = Fixture::load("bert_embedding");
    let config = BertConfig::from_hf_json(&fixture.config).expect("a configuration");
    fn embed<B: Backend>(model: &kiln_models::bert::BertModel<B>, fixture: &Fixture) -> Tensor<B, 2> {
        model.embed_normalized(fixture.int("input.tokens"), None, Some(fixture.int("input.keep")))
    }
    fixture.check(
        config.init::<Ad>(&Default::default()),
        |model| embed(model, &fixture),
        |model| embed(model, &fixture),
        |model| (embed(model, &fixture) * fixture.float("input.direction")).sum(),
    );
}

#[test]
fn llamas() {
    for name in [
        "llama2",
        "llama_gqa_tied",
        "llama3",
        "llama_linear",
        "llama_dynamic",
    ] {
        let fixture = Fixture::load(name);
        let config = LlamaConfig::from_hf_json(&fixture.config).expect("a configuration");
        fixture.check(
            config.init::<Ad>(&Default::default()),
            |model| model.forward(fixture.int("input.tokens")),
            |model| model.forward(fixture.int("input.tokens")),
            |model| model.causal_loss(fixture.int("input.tokens")),
        );
    }
}

#[test]
#[should_panic(expected = "logits differs")]
fn fixtures_notice_a_small_error() {
    let fixture = Fixture::load("mlp");
    let config: MlpConfig = config(&fixture, &MlpConfig::new());
    let model = fixture.weights(config.init::<Inner>(&Default::default()));
    let logits = model.forward(fixture.float::<Inner, 2>("input.images") * 1.001);
    fixture.compare("logits", logits.into_data(), fixture.data("output.eval_logits"));
}
