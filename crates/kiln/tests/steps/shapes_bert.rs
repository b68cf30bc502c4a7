//! Fine-tuning of a BERT on sentences of 300 lengths, in batches padded to their longest.

use burn::tensor::{Int, Tensor, TensorData};
use burn_optim::AdamWConfig;
use kiln::{CompileBackend, CompileOptions, Dynamic, KilnDevice, RegionReport, StepInput, TrainStep};
use kiln_models::bert::{BertConfig, BertForSequenceClassification};

use crate::empty_cache::with_empty_cache;
use crate::harness::*;

type Classifier = BertForSequenceClassification<Compiled>;

const SENTENCES: usize = 300;
const SHORTEST: usize = 4;
const EPOCHS: usize = 2;

#[derive(Clone, StepInput)]
struct Texts {
    tokens: Tensor<Compiled, 2, Int>,
    keep: Tensor<Compiled, 2, Int>,
    labels: Tensor<Compiled, 1, Int>,
}

/// Lengths of the sentences of each batch: all 300 in an order of their own.
fn epoch(number: usize, size: usize) -> Vec<Vec<usize>> {
    // 77 and 151 have no divisor in common with 300.
    let (step, first) = ([77, 151][number % 2], 13 * number);
    let lengths: Vec<usize> = (0..SENTENCES)
        .map(|at| SHORTEST + (first + at * step) % SENTENCES)
        .collect();
    lengths.chunks(size).map(<[usize]>::to_vec).collect()
}

fn texts(lengths: &[usize]) -> Texts {
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let shape = [lengths.len(), longest];
    let device = KilnDevice::cpu();
    let of = |value: &dyn Fn(usize, usize) -> i64| -> Tensor<Compiled, 2, Int> {
        let rows = lengths
            .iter()
            .flat_map(|&length| (0..longest).map(move |at| (length, at)));
        let values: Vec<i64> = rows
            .map(|(length, at)| if at < length { value(length, at) } else { 0 })
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &device)
    };
    let labels: Vec<i64> = lengths.iter().map(|length| (length % 2) as i64).collect();
    Texts {
        tokens: of(&|length, at| 1 + ((length * 31 + at * 7) % 60) as i64),
        keep: of(&|_, _| 1),
        labels: Tensor::from_data(TensorData::new(labels, [lengths.len()]), &device),
    }
}

fn model(start: &Classifier) -> Classifier {
    let device = KilnDevice::cpu();
    copy_weights::<Compiled, Compiled, _, _>(start.clone(), config().init_classifier(&device), &device)
}

fn config() -> BertConfig {
    BertConfig::new()
        .with_vocab_size(64)
        .with_hidden_size(32)
        .with_num_hidden_layers(1)
        .with_num_attention_heads(2)
        .with_intermediate_size(64)
        .with_hidden_dropout_prob(0.0)
        .with_attention_probs_dropout_prob(0.0)
        .with_max_position_embeddings(320)
        .with_num_labels(2)
}

/// Trains for two epochs; how often something was compiled by the end of each, besides. Under
/// [`Dynamic::Marked`] the dimensions that vary are marked.
fn train(start: &Classifier, options: CompileOptions, size: usize) -> (Outcome, RegionReport, Vec<usize>) {
    let loss = |model: &Classifier, texts: Texts| model.loss(texts.tokens, Some(texts.keep), texts.labels);
    let optim = AdamWConfig::new().with_epsilon(1e-3).init();
    let marks = options.dynamic == Dynamic::Marked;
    let step = TrainStep::new(model(start), optim, loss).with_options(options);
    let mut step = step.build().unwrap();
    let mut outcome = Outcome::default();
    let mut compiled = Vec::new();
    for number in 0..EPOCHS {
        for lengths in epoch(number, size) {
            let texts = texts(&lengths);
            if marks {
                kiln::dynamic(&texts, 0, 2..=size).unwrap();
                for padded in [&texts.tokens, &texts.keep] {
                    kiln::dynamic(padded, 1, SHORTEST..SHORTEST + SENTENCES).unwrap();
                }
            }
            outcome.losses.push(value(step.step(1e-3, texts).unwrap()));
        }
        let report = step.report();
        compiled.push(report.compiles.iter().filter(|event| !event.absorbed).count());
    }
    let report = step.report();
    outcome.parameters = parameters::<Compiled, _>(&step.into_model());
    (outcome, report, compiled)
}

/// Trains in batches of `size`, and compares with Burn, operation by operation. There are at most three
/// compilations in the first epoch, and none in the second, whose batches have other lengths.
fn check(size: usize, dynamic: Dynamic) {
    let lengths: std::collections::BTreeSet<usize> = epoch(0, size).into_iter().flatten().collect();
    assert_eq!(lengths.len(), SENTENCES);
    let start = initialised(config().init_classifier::<Compiled>(&KilnDevice::cpu()));
    let eager = CompileOptions::default().with_backend(CompileBackend::Eager);
    let (expected, ..) = train(&start, eager, size);
    let (outcome, report, compiled) = train(&start, CompileOptions::default().with_dynamic(dynamic), size);
    for (one, other) in outcome.losses.iter().zip(&expected.losses) {
        assert!(
            (one - other).abs() <= 1e-5 * other.abs(),
            "{one} instead of {other}"
        );
    }
    for (one, other) in outcome.parameters.iter().zip(&expected.parameters) {
        // Each update has a rounding of its own.
        assert!(relative_error(one, other, 1e-3) <= 1e-4);
    }
    let unshared = report
        .compiles
        .iter()
        .filter(|event| event.backend != CompileBackend::Cpu);
    assert_eq!(unshared.count(), 0, "{:?}", report.compiles);
    let built: Vec<_> = report.compiles.iter().filter(|event| !event.absorbed).collect();
    assert!(compiled[0] <= 3, "{compiled:?} {built:?}");
    assert_eq!(compiled[1], compiled[0], "{built:?}");
}

#[test]
fn sentences_of_300_lengths_take_three_compilations() {
    with_empty_cache(
        "shapes_bert::sentences_of_300_lengths_take_three_compilations",
        || check(10, Dynamic::Auto),
    );
}

/// 4 sentences are left for the last of the batches of 8.
#[test]
fn a_smaller_last_batch_takes_no_other() {
    with_empty_cache("shapes_bert::a_smaller_last_batch_takes_no_other", || {
        check(8, Dynamic::Auto)
    });
}

/// What is marked is a variable of the first step.
#[test]
fn marked_lengths_and_batches_take_no_more() {
    with_empty_cache("shapes_bert::marked_lengths_and_batches_take_no_more", || {
        check(8, Dynamic::Marked)
    });
}
