//! Sentences of many lengths: how often a step is compiled, and what a shared kernel costs.
//!
//! `varying_lengths [--marked] [--short]`: a small BERT is trained on sentences of 300 different lengths, in
//! batches padded to their longest, for two epochs; the last batch is smaller. `--marked` says beforehand
//! which dimensions vary. Then the step of some lengths is timed against the step compiled for exactly that
//! length.

use std::error::Error;
use std::time::{Duration, Instant};

use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use kiln::{CompileOptions, Dynamic, Kiln, KilnDevice, StepInput, TrainStep};
use kiln_models::bert::{BertConfig, BertForSequenceClassification};

type B = Autodiff<Kiln>;

#[derive(Clone, StepInput)]
struct Texts<B: Backend> {
    tokens: Tensor<B, 2, Int>,
    keep: Tensor<B, 2, Int>,
    labels: Tensor<B, 1, Int>,
}

const SHORTEST: usize = 4;
const BATCH: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let has = |name: &str| std::env::args().skip(1).any(|argument| argument == name);
    let (short, marked) = (has("--short"), has("--marked"));
    // No divisor of the number of sentences is one of 77 and 151, so each epoch has all of them.
    let (sentences, timed) = if short { (20, 1) } else { (300, 6) };
    let device = KilnDevice::default();
    B::seed(&device, 0);
    let size = if short { 32 } else { 128 };
    let sizes = BertConfig::new()
        .with_vocab_size(512)
        .with_hidden_size(size)
        .with_num_hidden_layers(2)
        .with_num_attention_heads(4)
        .with_intermediate_size(4 * size)
        .with_max_position_embeddings(320)
        .with_num_labels(2);
    let model = sizes.init_classifier::<B>(&device);
    let loss = |model: &BertForSequenceClassification<B>, texts: Texts<B>| {
        model.loss(texts.tokens, Some(texts.keep), texts.labels)
    };
    let begin = |options: CompileOptions| {
        TrainStep::new(model.clone(), AdamWConfig::new().init(), loss)
            .with_options(options)
            .build()
    };

    let mut step = begin(CompileOptions::default().with_name("varying"))?;
    let mut seen = 0;
    for epoch in 0..2 {
        let lengths: Vec<usize> = (0..sentences)
            .map(|at| SHORTEST + (13 * epoch + at * [77, 151][epoch]) % sentences)
            .collect();
        for (index, lengths) in lengths.chunks(BATCH).enumerate() {
            let texts = texts(lengths, &device);
            if marked {
                kiln::dynamic(&texts, 0, 2..=BATCH)?;
                kiln::dynamic(&texts.tokens, 1, SHORTEST..SHORTEST + sentences)?;
            }
            let shape = texts.tokens.dims();
            let loss = step.step(1e-4, texts)?.into_scalar();
            let compiles = step.report().compiles;
            for event in compiles[seen..].iter().filter(|event| !event.absorbed) {
                println!(
                    "epoch {}: {shape:?} was compiled in {:.1} s",
                    epoch + 1,
                    event.time.as_secs_f64()
                );
            }
            seen = compiles.len();
            if index == 0 {
                println!("step {}: loss {loss:.4}", epoch * sentences.div_ceil(BATCH) + 1);
            }
        }
        let compiles = step.report().compiles;
        let planned: Vec<f64> = compiles
            .iter()
            .filter(|event| event.absorbed)
            .map(|event| event.time.as_secs_f64())
            .collect();
        println!(
            "epoch {}: {} compilations so far; {} shapes only planned, {:.2} s each",
            epoch + 1,
            compiles.len() - planned.len(),
            planned.len(),
            planned.iter().sum::<f64>() / planned.len().max(1) as f64,
        );
    }

    let mut ratios = Vec::new();
    for number in 0..timed {
        let length = SHORTEST + (number * 2 + 1) * sentences / (2 * timed);
        let lengths = [length; BATCH];
        let mut exact = begin(CompileOptions::default().with_dynamic(Dynamic::Off))?;
        let rounds = if short { 4 } else { 24 };
        let (mut shared_time, mut exact_time) = (Duration::MAX, Duration::MAX);
        for _ in 0..rounds {
            // In turns, so that both meet the same machine.
            for (step, best) in [(&mut step, &mut shared_time), (&mut exact, &mut exact_time)] {
                let texts = texts(&lengths, &device);
                let start = Instant::now();
                step.step(1e-4, texts)?.into_scalar();
                *best = start.elapsed().min(*best);
            }
        }
        let ratio = shared_time.as_secs_f64() / exact_time.as_secs_f64();
        println!(
            "length {length:3}: {shared_time:.2?}, compiled for it alone {exact_time:.2?}, ratio {ratio:.2}"
        );
        ratios.push(ratio);
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    println!(
        "mean ratio {mean:.2}, largest {:.2}",
        ratios.iter().copied().fold(0.0, f64::max)
    );
    println!(
        "{}",
        step.explain()
            .to_string()
            .lines()
            .take_while(|line| !line.starts_with("  step "))
            .collect::<Vec<_>>()
            .join("\n")
    );
    Ok(())
}

/// A batch of sentences of these lengths, padded to the longest.
fn texts(lengths: &[usize], device: &KilnDevice) -> Texts<B> {
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let tensor = |value: &dyn Fn(usize, usize) -> i64| -> Tensor<B, 2, Int> {
        let places = lengths
            .iter()
            .flat_map(|&length| (0..longest).map(move |at| (length, at)));
        let values: Vec<i64> = places
            .map(|(length, at)| if at < length { value(length, at) } else { 0 })
            .collect();
        Tensor::from_data(TensorData::new(values, [lengths.len(), longest]), device)
    };
    let labels: Vec<i64> = lengths.iter().map(|length| (length % 2) as i64).collect();
    Texts {
        tokens: tensor(&|length, at| 1 + ((length * 31 + at * 7) % 500) as i64),
        keep: tensor(&|_, _| 1),
        labels: Tensor::from_data(TensorData::new(labels, [lengths.len()]), device),
    }
}
