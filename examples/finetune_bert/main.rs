//! Fine-tuning: weights from a checkpoint, a frozen encoder but for its last layer, a new head.
//!
//! `finetune_bert [PATH OR REPOSITORY] [--short]`: the checkpoint may be a folder or a repository of the
//! Hugging Face hub such as
//! `sentence-transformers/all-MiniLM-L6-v2`. Without one the example writes a small one of its own first, so
//! that it runs anywhere.

use std::error::Error;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use kiln::{Kiln, KilnDevice, StepInput, TrainStep};
use kiln_hub::data::{Loader, TextBatch, TextBatcher, TextExample, TextExamples};
use kiln_hub::{BatchOptions, Checkpoint, LoadOptions, Padding, Tokenizer, load_into_with, save_pretrained};
use kiln_models::bert::{BertConfig, BertForSequenceClassification};
use kiln_models::keys::Pretrained;

type B = Autodiff<Kiln>;

/// What a step takes: a struct of tensors, made known to Kiln by the derive.
#[derive(Clone, StepInput)]
struct Texts<B: Backend> {
    tokens: Tensor<B, 2, Int>,
    keep: Tensor<B, 2, Int>,
    labels: Tensor<B, 1, Int>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let short = arguments.iter().any(|argument| argument == "--short");
    arguments.retain(|argument| argument != "--short");
    let steps = if short { 4 } else { 60 };
    let device = KilnDevice::default();
    B::seed(&device, 0);

    let own = tempfile::tempdir()?;
    let checkpoint = match arguments.first() {
        Some(name) => kiln_hub::load(name)?,
        None => write_small_checkpoint(own.path(), &device)?,
    };
    let tokenizer = checkpoint.tokenizer()?;
    let sizes = BertConfig::from_hf_json(&checkpoint.config()?.to_json())?.with_num_labels(2);
    let model = sizes.init_classifier::<B>(&device);
    // The checkpoint has no classifier for this task: the head starts from new weights, which only
    // fine-tuning may ask for.
    let map = model.key_map();
    let options = LoadOptions::new().with_new_heads(true);
    let (model, loaded) = load_into_with(model, &checkpoint, map, &options)?;
    println!("drawn anew: {}", loaded.new_heads.join(", "));
    let last = format!("bert.encoder.layer.{}.", sizes.num_hidden_layers - 1);
    let (model, trained) = train_only(model, &[&last, "bert.pooler.", "classifier."]);
    println!(
        "{}: {} of {} numbers are trained",
        checkpoint.place(),
        trained,
        model.num_params()
    );

    let options = BatchOptions::new()
        .with_max_length(24)
        .with_padding(Padding::Fixed(24));
    let texts = Loader::new(
        sentences()?,
        TextBatcher::new(tokenizer.batch_encoder(&options)?),
        8,
    );
    let loss = |model: &BertForSequenceClassification<B>, texts: Texts<B>| {
        model.loss(texts.tokens, Some(texts.keep), texts.labels)
    };
    let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss).build()?;
    for (index, batch) in texts.start()?.take(steps).enumerate() {
        let loss = step.step(1e-3, tensors(&batch?, &device))?;
        if index % 10 == 0 || index + 1 == steps {
            println!("step {:2}: loss {:.4}", index + 1, loss.into_scalar());
        }
    }
    Ok(())
}

fn tensors(batch: &TextBatch, device: &KilnDevice) -> Texts<B> {
    let shape = [batch.tokens.rows, batch.tokens.cols];
    let tensor = |values: &[i32]| Tensor::<B, 1, Int>::from_ints(values, device).reshape(shape);
    Texts {
        tokens: tensor(&batch.tokens.ids),
        keep: tensor(&batch.tokens.mask),
        labels: batch.labels_tensor(device),
    }
}

/// Sentences about clay and about water, to be told apart.
fn sentences() -> Result<TextExamples, Box<dyn Error>> {
    let subjects = [
        "The potter",
        "A student",
        "My neighbour",
        "Nobody here",
        "The old man",
        "Her sister",
        "A stranger",
        "The master",
    ];
    let clay = [
        "fires the bowl in the kiln",
        "turns clay on the wheel",
        "glazes a stoneware jar",
        "presses a tile into the mould",
    ];
    let water = [
        "sails along the coast",
        "swims across the lake",
        "rows to the other shore",
        "watches the tide come in",
    ];
    let example = |(label, subject, rest): (usize, &str, &str)| TextExample {
        text: format!("{subject} {rest}."),
        pair: None,
        label,
    };
    let of = |label: usize, rests: [&'static str; 4]| {
        subjects
            .into_iter()
            .flat_map(move |subject| rests.map(|rest| (label, subject, rest)))
    };
    let examples = of(0, clay).chain(of(1, water)).map(example).collect();
    Ok(TextExamples::new(examples, vec!["clay".into(), "water".into()])?)
}

/// Stops the training of all parameters but those below `prefixes`; returns how many numbers are left.
fn train_only<M: Module<B>>(model: M, prefixes: &[&str]) -> (M, usize) {
    struct Mapper<'a> {
        prefixes: &'a [&'a str],
        path: Vec<String>,
        trained: usize,
    }
    impl ModuleMapper<B> for Mapper<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let path = self.path.join(".");
            if self.prefixes.iter().any(|prefix| path.starts_with(prefix)) {
                self.trained += param.lazy_shape().num_elements();
                return param;
            }
            param.set_require_grad(false)
        }
    }
    let mut mapper = Mapper {
        prefixes,
        path: Vec::new(),
        trained: 0,
    };
    let model = model.map(&mut mapper);
    (model, mapper.trained)
}

/// A BERT of two layers with random weights, in the files that transformers writes.
fn write_small_checkpoint(folder: &Path, device: &KilnDevice) -> Result<Checkpoint, Box<dyn Error>> {
    let examples = sentences()?;
    let tokenizer = Tokenizer::train_bpe(
        examples.examples().iter().map(|example| example.text.as_str()),
        400,
    )?;
    let sizes = BertConfig::new()
        .with_vocab_size(tokenizer.vocabulary())
        .with_hidden_size(64)
        .with_num_hidden_layers(2)
        .with_num_attention_heads(4)
        .with_intermediate_size(256);
    let model = sizes.init::<Kiln>(device);
    save_pretrained(
        &model,
        model.key_map(),
        Some(&sizes.to_hf_json("BertModel")),
        folder,
    )?;
    tokenizer.save(folder.join("tokenizer.json"))?;
    Ok(Checkpoint::open(folder)?)
}
