//! A small Llama on this repository's own sources, byte by byte, and a text that it writes.

use std::error::Error;
use std::ops::ControlFlow;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::AutodiffModule;
use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use kiln::{Kiln, KilnDevice, TrainStep};
use kiln_hub::Tokenizer;
use kiln_hub::data::{Corpus, CorpusOptions, Loader, TokenStream, WindowBatcher};
use kiln_models::llama::{GenerateConfig, Llama, LlamaConfig};

type B = Autodiff<Kiln>;

fn main() -> Result<(), Box<dyn Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let (steps, batch, length) = if short { (4, 2, 16) } else { (300, 16, 96) };
    let device = KilnDevice::default();
    B::seed(&device, 0);

    let tokenizer = Tokenizer::bytes()?;
    let corpus = Corpus::read(
        &[concat!(env!("CARGO_MANIFEST_DIR"), "/../models/src")],
        &CorpusOptions::default(),
    )?;
    let windows = TokenStream::encode(&corpus, &tokenizer)?.windows(length, 0.0, 1.0)?;
    println!("{} bytes of text", corpus.num_bytes());

    let sizes = LlamaConfig::new(tokenizer.vocabulary(), 128, 344, 3, 4).with_tie_word_embeddings(true);
    let model = sizes.init::<B>(&device);
    let optimizer = AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    let loss = |model: &Llama<B>, (tokens, targets): (Tensor<B, 2, Int>, Tensor<B, 2, Int>)| {
        model.loss(tokens, targets)
    };
    let mut step = TrainStep::new(model, optimizer, loss).build()?;
    for (index, batch) in Loader::new(windows, WindowBatcher, batch)
        .start()?
        .take(steps)
        .enumerate()
    {
        // The learning rate may change at every step; nothing is compiled anew.
        let rate = 3e-3 * (1.0 - index as f64 / steps as f64);
        let loss = step.step(rate, batch?.tensors(&device))?;
        if index % 50 == 0 || index + 1 == steps {
            println!("step {:3}: loss {:.4}", index + 1, loss.into_scalar());
        }
    }

    let config = GenerateConfig::new()
        .with_max_new_tokens(if short { 8 } else { 200 })
        .with_temperature(0.6);
    let prompt = tokenizer.encode("/// The ", false)?;
    let text =
        step.into_model()
            .valid()
            .generate(&prompt, &config, &device, |_| ControlFlow::Continue(()))?;
    println!("/// The {}", tokenizer.decode(&text, true)?);
    Ok(())
}
