//! Logits, losses and gradients equal those of the originals from the same weights.

use crate::fixture::{Ad, Fixture, Inner};
use burn::config::Config;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use kiln_models::bert::{BertConfig, BertForMaskedLm, BertForSequenceClassification, BertModel};
use kiln_models::llama::LlamaConfig;
use kiln_models::loss::{CrossEntropy, sequence_cross_entropy};
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

/// All fixtures of an image classifier: a family, and a configuration that the fixtures change.
macro_rules! check_classifier {
    ($family:expr, $defaults:expr) => {
        for fixture in Fixture::family($family) {
            fixture.check(
                || config(&fixture, &$defaults).init::<Ad>(&Default::default()),
                |model| model.forward(fixture.float("input.images")),
                |model| model.forward(fixture.float("input.images")),
                |model| model.loss(fixture.float("input.images"), fixture.int("input.targets")),
            );
        }
    };
}

#[test]
fn mlp() {
    check_classifier!("mlp", MlpConfig::new());
}

#[test]
fn resnet() {
    check_classifier!("resnet", ResNetConfig::resnet18());
}

#[test]
fn alexnet() {
    check_classifier!("alexnet", AlexNetConfig::new());
}

#[test]
fn vgg() {
    check_classifier!("vgg", VggConfig::vgg16());
}

#[test]
fn squeezenet() {
    check_classifier!("squeezenet", SqueezeNetConfig::new());
}

#[test]
fn mobilenet() {
    check_classifier!("mobilenet", MobileNetV2Config::new());
}

#[test]
fn mnasnet() {
    check_classifier!("mnasnet", MnasNetConfig::new());
}

#[test]
fn vit() {
    check_classifier!("vit", VitConfig::vit_small_patch16_224());
}

/// Tokens, segments and kept tokens of a text.
type Text<B> = (
    Tensor<B, 2, Int>,
    Option<Tensor<B, 2, Int>>,
    Option<Tensor<B, 2, Int>>,
);

fn text<B: Backend>(fixture: &Fixture) -> Text<B> {
    (
        fixture.int("input.tokens"),
        Some(fixture.int("input.segments")),
        Some(fixture.int("input.keep")),
    )
}

#[test]
fn bert_classifier() {
    for fixture in Fixture::family("bert_classifier") {
        let config = BertConfig::from_hf_json(&fixture.config).expect("a configuration");
        fn forward<B: Backend>(model: &BertForSequenceClassification<B>, fixture: &Fixture) -> Tensor<B, 2> {
            let (tokens, segments, keep) = text(fixture);
            model.forward(tokens, segments, keep)
        }
        fixture.check(
            || config.init_classifier::<Ad>(&Default::default()),
            |model| forward(model, &fixture),
            |model| forward(model, &fixture),
            |model| CrossEntropy::new().forward(forward(model, &fixture), fixture.int("input.targets")),
        );
    }
}

#[test]
fn bert_masked_lm() {
    for fixture in Fixture::family("bert_masked_lm") {
        let config = BertConfig::from_hf_json(&fixture.config).expect("a configuration");
        fn forward<B: Backend>(model: &BertForMaskedLm<B>, fixture: &Fixture) -> Tensor<B, 3> {
            let (tokens, segments, keep) = text(fixture);
            model.forward(tokens, segments, keep)
        }
        let loss = CrossEntropy::new().with_ignore_index(-100);
        fixture.check(
            || config.init_masked_lm::<Ad>(&Default::default()),
            |model| forward(model, &fixture),
            |model| forward(model, &fixture),
            |model| sequence_cross_entropy(&loss, forward(model, &fixture), fixture.int("input.targets")),
        );
    }
}

#[test]
fn bert_embedding() {
    for fixture in Fixture::family("bert_embedding") {
        let config = BertConfig::from_hf_json(&fixture.config).expect("a configuration");
        fn embed<B: Backend>(model: &BertModel<B>, fixture: &Fixture) -> Tensor<B, 2> {
            model.embed_normalized(fixture.int("input.tokens"), None, Some(fixture.int("input.keep")))
        }
        fixture.check(
            || config.init::<Ad>(&Default::default()),
            |model| embed(model, &fixture),
            |model| embed(model, &fixture),
            |model| (embed(model, &fixture) * fixture.float("input.direction")).sum(),
        );
    }
}

#[test]
fn llama() {
    for fixture in Fixture::family("llama") {
        let config = LlamaConfig::from_hf_json(&fixture.config).expect("a configuration");
        fixture.check(
            || config.init::<Ad>(&Default::default()),
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
