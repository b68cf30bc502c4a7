//! Names, shapes and parameter counts of full-size models equal those of the originals.

use crate::fixture::Inner;
use kiln_models::bert::BertConfig;
use kiln_models::keys::Pretrained;
use kiln_models::llama::LlamaConfig;
use kiln_models::params::{TensorKind, num_trainable};
use kiln_models::vision::VisionConfig;
use std::collections::BTreeMap;

/// One model of `architectures.txt`: number of trained elements, and shape and kind of each tensor.
struct Listing {
    count: usize,
    tensors: BTreeMap<String, (Vec<usize>, TensorKind)>,
}

fn listings() -> BTreeMap<String, Listing> {
    let text = include_str!("../fixtures/architectures.txt");
    let mut all = BTreeMap::new();
    for part in text.split("# ").skip(1) {
        let mut lines = part.lines();
        let (name, count) = lines
            .next()
            .and_then(|line| line.split_once(' '))
            .expect("a name and a count");
        let tensors = lines.map(|line| {
            let mut words = line.split(' ');
            let key = words.next().expect("a key").to_string();
            let shape = words
                .next()
                .expect("a shape")
                .split('x')
                .map(|size| size.parse().expect("a size"));
            let shape = shape.collect();
            let kind = if words.next() == Some("buffer") {
                TensorKind::Buffer
            } else {
                TensorKind::Parameter
            };
            (key, (shape, kind))
        });
        all.insert(
            name.into(),
            Listing {
                count: count.parse().expect("a count"),
                tensors: tensors.collect(),
            },
        );
    }
    all
}

fn check<M: Pretrained<Inner>>(name: &str, model: &M) {
    let all = listings();
    let listing = all.get(name).unwrap_or_else(|| panic!("{name} is not listed"));
    let found: BTreeMap<_, _> = model
        .key_map()
        .entries
        .into_iter()
        .map(|entry| (entry.key.clone(), (entry.original_shape(), entry.kind)))
        .collect();
    for (key, tensor) in &listing.tensors {
        assert_eq!(found.get(key), Some(tensor), "{name}: {key}");
    }
    for key in found.keys() {
        assert!(
            listing.tensors.contains_key(key),
            "{name}: the original has no {key}"
        );
    }
    assert_eq!(num_trainable(model), listing.count, "{name}: parameters");
}

#[test]
fn image_classifiers() {
    for name in VisionConfig::NAMES {
        check(
            name,
            &VisionConfig::new(name.into())
                .init::<Inner>(&Default::default())
                .expect(name),
        );
    }
}

#[test]
fn image_classifiers_that_cannot_be_are_refused() {
    let refused = |config: VisionConfig| {
        config
            .init::<Inner>(&Default::default())
            .expect_err("no such model")
    };
    let unknown = refused(VisionConfig::new("resnet19".into())).to_string();
    assert!(
        unknown.contains("resnet19") && unknown.contains("resnet18"),
        "{unknown}"
    );
    let uneven = refused(VisionConfig::new("vit_small_patch16_224".into()).with_image_size(100));
    assert!(uneven.to_string().contains("`patch_size`"), "{uneven}");
    let empty = refused(VisionConfig::new("alexnet".into()).with_num_classes(0));
    assert!(empty.to_string().contains("`num_classes`"), "{empty}");
}

#[test]
fn berts() {
    let device = Default::default();
    for name in ["bert-base", "bert-minilm"] {
        check(
            name,
            &BertConfig::preset(name)
                .expect("a preset")
                .init_classifier::<Inner>(&device),
        );
    }
    check(
        "bert-base-mlm",
        &BertConfig::base().init_masked_lm::<Inner>(&device),
    );
}

#[test]
fn llamas() {
    for name in LlamaConfig::preset_names() {
        check(
            name,
            &LlamaConfig::preset(name)
                .expect("a preset")
                .init::<Inner>(&Default::default()),
        );
    }
}
