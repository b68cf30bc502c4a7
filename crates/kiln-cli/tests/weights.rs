//! Weights and labels from outside: what does not fit the model is an error that names both, and what is
//! saved is what was trained.

mod place;

use std::path::Path;

use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, Int, Tensor};
use burn_autodiff::Autodiff;
use burn_optim::{GradientsParams, Optimizer, SgdConfig};
use kiln::{Kiln, KilnDevice, TrainStep};
use kiln_hub::{Checkpoint, SaveOptions, Tokenizer, save_pretrained, save_safetensors};
use kiln_models::keys::Pretrained;
use kiln_models::llama::LlamaConfig;
use kiln_models::params::sync_running;
use kiln_models::vision::resnet::{BlockKind, ResNet, ResNetConfig};
use place::Place;
use safetensors::tensor::{Dtype, TensorView};

fn sizes(tied: bool) -> LlamaConfig {
    LlamaConfig::new(257, 32, 48, 1, 2)
        .with_max_position_embeddings(64)
        .with_tie_word_embeddings(tied)
}

/// Saves a Llama whose weights are stored with tied embeddings, so without a head, under the config `said`.
fn save_headless(folder: &Path, said: &LlamaConfig) {
    let model = sizes(true).init::<Kiln>(&KilnDevice::cpu());
    save_pretrained(&model, model.key_map(), Some(&said.to_hf_json()), folder).unwrap();
    Tokenizer::bytes()
        .unwrap()
        .save(folder.join("tokenizer.json"))
        .unwrap();
}

/// Adds an output projection of `rows` tokens to a checkpoint.
fn add_head(folder: &Path, rows: usize) {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let values: Vec<u8> = (0..rows * 32)
        .flat_map(|i| ((i % 7) as f32 * 0.1).to_le_bytes())
        .collect();
    let mut views = stored.tensors();
    let head = TensorView::new(Dtype::F32, vec![rows, 32], &values).unwrap();
    views.push(("lm_head.weight".into(), head));
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

const GENERATE: [&str; 7] = [
    "generate", "--model", "model", "--prompt", "line", "--tokens", "3",
];

const FINE_TUNE: &str = "[model]\nname = \"llama-tiny\"\nweights = \"model\"\n\
    [data]\nsource = \"text\"\npaths = [\"corpus.txt\"]\nlength = 16\n\
    [train]\nsteps = 2\nbatch_size = 2\nbackend = \"aot_eager\"\n[sample]\ntokens = 0\n";

#[test]
fn a_head_that_is_not_there_is_an_error_and_new_in_fine_tuning_only() {
    let place = Place::new("");
    save_headless(&place.path("model"), &sizes(false));
    let error = place.fails(&GENERATE);
    assert!(
        error.contains("lm_head.weight [257, 32]") && error.contains("fine-tuning"),
        "{error}"
    );

    place.write("corpus.txt", &"the kiln fires clay\n".repeat(100));
    place.write("tune.toml", FINE_TUNE);
    let [_, said] = place.both(&["train", "--config", "tune.toml", "--out", "tuned"]);
    assert!(
        said.contains("lm_head.weight") && said.contains("random"),
        "what was drawn is named: {said}"
    );
    // Trained, the head is stored: nothing is new on the second start.
    let [_, said] = place.both(&[
        "generate", "--model", "tuned", "--prompt", "line", "--tokens", "3",
    ]);
    assert!(!said.contains("random"), "{said}");

    add_head(&place.path("model"), 200);
    let error = place.fails(&GENERATE);
    assert!(
        error.contains("[200, 32]") && error.contains("[257, 32]"),
        "{error}"
    );
}

#[test]
fn weights_that_are_called_tied_and_are_not_are_believed() {
    let place = Place::new("");
    save_headless(&place.path("model"), &sizes(true));
    place.both(&GENERATE);
    add_head(&place.path("model"), 257);
    let [_, said] = place.both(&GENERATE);
    assert!(said.contains("not tied"), "{said}");
}

#[test]
fn a_new_tokenizer_for_old_embeddings_is_refused() {
    let place = Place::new("");
    save_headless(&place.path("model"), &sizes(true));
    place.write("tune.toml", FINE_TUNE);
    let train = ["train", "--config", "tune.toml"];
    for made in ["bytes", "bpe"] {
        let set = format!("data.tokenizer={made}");
        let error = place.fails(&[&train[..], &["--out", made, "--set", &set]].concat());
        assert!(
            error.contains("data.tokenizer") && error.contains("remove the key") && error.contains(made),
            "{error}"
        );
    }
    let stored = "data.tokenizer=model/tokenizer.json";
    place.ok(&[&train[..], &["--out", "tuned", "--set", stored]].concat());
}

#[test]
fn settings_without_effect_are_refused_by_name() {
    let place = Place::new("");
    save_headless(&place.path("model"), &sizes(true));
    place.write("corpus.txt", &"the kiln fires clay\n".repeat(100));
    place.write("tune.toml", FINE_TUNE);
    let train = |out: &str, more: &[&str]| {
        let arguments = ["train", "--config", "tune.toml", "--out", out];
        place.fails(&[&arguments[..], more].concat())
    };
    let error = train("layers", &["--set", "model.layers=3"]);
    assert!(
        error.contains("model.layers") && error.contains("config.json"),
        "{error}"
    );
    let shapes = [
        "--set",
        "model.name=resnet18",
        "--set",
        "data.source=shapes",
        "--set",
        "model.heads=2",
    ];
    let error = train("shapes", &shapes);
    assert!(error.contains("model.heads"), "{error}");
    std::fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    let error = train("tokenizer", &[]);
    assert!(error.contains("data.tokenizer"), "{error}");
}

#[test]
fn data_that_the_model_cannot_take_is_named_before_the_run() {
    let place = Place::new("");
    place.write(
        "shapes.toml",
        "[model]\nname = \"squeezenet1_1\"\n[data]\nsource = \"shapes\"\nimage_size = 16\nexamples = 32\n\
         [train]\nsteps = 1\nbatch_size = 4\nbackend = \"aot_eager\"\n",
    );
    let error = place.fails(&["train", "--config", "shapes.toml", "--out", "small"]);
    assert!(
        error.contains("16x16") && error.contains("at least 17x17"),
        "{error}"
    );

    let table = |labels: &[&str]| -> String {
        let rows = labels.iter().cycle().take(24).enumerate();
        rows.map(|(row, label)| format!("{{\"text\": \"clay {row}\", \"label\": \"{label}\"}}\n"))
            .collect()
    };
    let bert = |length: usize| {
        format!(
            "[model]\nname = \"bert-minilm\"\nhidden_size = 32\nlayers = 1\nheads = 2\nintermediate_size = 48\n\
             [data]\nsource = \"table\"\npaths = [\"table.jsonl\"]\nvocabulary = 300\nlength = {length}\n\
             [train]\nsteps = 2\nbatch_size = 4\nbackend = \"aot_eager\"\n"
        )
    };
    place.write("table.jsonl", &table(&["a", "b"]));
    place.write("long.toml", &bert(600));
    let error = place.fails(&["train", "--config", "long.toml", "--out", "long"]);
    assert!(
        error.contains("600 tokens") && error.contains("512 positions"),
        "{error}"
    );

    // Another class in the same file would shift the labels of those behind it.
    place.write("bert.toml", &bert(12));
    place.both(&["train", "--config", "bert.toml", "--out", "bert"]);
    place.write("table.jsonl", &table(&["a", "aa", "b"]));
    let error = place.fails(&["eval", "--run", "bert"]);
    assert!(
        error.contains("a, aa, b") && error.contains("began with a, b"),
        "{error}"
    );

    place.write("table.jsonl", &table(&["a"]));
    let error = place.fails(&["train", "--config", "bert.toml", "--out", "one"]);
    assert!(error.contains("one class"), "{error}");
}

/// Random tokens of bytes rarely end in a whole character; their end shows all the same.
#[test]
fn a_text_that_ends_within_a_character_is_printed() {
    let place = Place::new("");
    save_headless(&place.path("model"), &sizes(true));
    let mut incomplete = 0;
    for seed in 0..12 {
        let seed = seed.to_string();
        let more = [
            "generate", "--model", "model", "--prompt", "line", "--tokens", "1", "--seed", &seed,
        ];
        let [text, _] = place.both(&more);
        incomplete += usize::from(text.ends_with("\u{fffd}\n"));
    }
    assert!(
        incomplete > 0,
        "half of all bytes begin or continue a longer character"
    );
}

type Ad = Autodiff<Kiln>;

/// What a step takes and returns.
type Images = (Tensor<Ad, 4>, Tensor<Ad, 1, Int>);

fn network(device: &KilnDevice) -> ResNet<Ad> {
    Kiln::seed(device, 7);
    let network = ResNetConfig::new(BlockKind::Basic, [1, 1, 1, 1])
        .with_stem_channels(4)
        .with_num_classes(3)
        .init(device);
    // Draws the initial weights now, in one order.
    sync_running(&network);
    network
}

/// The running statistics of a file, by name.
fn statistics(file: &Path) -> Vec<(String, Vec<f32>)> {
    let checkpoint = Checkpoint::open(file).unwrap();
    let names = checkpoint.names().filter(|name| name.contains("running_"));
    names
        .map(|name| {
            let values = checkpoint.tensor_as(name, DType::F32).unwrap();
            (name.to_string(), values.to_vec().unwrap())
        })
        .collect()
}

/// What is saved after a compiled step are the statistics that a plain loop has after `valid()`.
#[test]
fn saved_statistics_are_those_of_a_plain_loop() {
    let device = KilnDevice::cpu();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let save = |model: &ResNet<Ad>| {
        save_safetensors(model, model.key_map(), &file, &SaveOptions::new()).unwrap();
        statistics(&file)
    };
    Kiln::seed(&device, 3);
    let batches: Vec<Images> = (0..3)
        .map(|_| {
            let pixels = Tensor::random([2, 3, 16, 16], Distribution::Normal(1.0, 2.0), &device);
            (pixels, Tensor::from_ints([0, 2], &device))
        })
        .collect();
    for steps in [1, 3] {
        let mut model = network(&device);
        let mut optimizer = SgdConfig::new().init();
        for (pixels, targets) in &batches[..steps] {
            let gradients = model.loss(pixels.clone(), targets.clone()).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(1e-2, model, gradients);
        }
        let valid = model.valid();
        save_safetensors(&valid, valid.key_map(), &file, &SaveOptions::new()).unwrap();
        let expected = statistics(&file);
        assert!(
            expected
                .iter()
                .any(|(_, values)| values.iter().any(|value| *value != 0.0 && *value != 1.0))
        );

        let compiled = || {
            let loss = |model: &ResNet<Ad>, (pixels, targets): Images| model.loss(pixels, targets);
            let mut step = TrainStep::new(network(&device), SgdConfig::new().init(), loss)
                .with_backend("aot_eager".parse().unwrap())
                .build::<Images, Tensor<Ad, 1>>()
                .unwrap();
            for batch in &batches[..steps] {
                step.step(1e-2, batch.clone()).unwrap();
            }
            step
        };
        let close = |found: Vec<(String, Vec<f32>)>| {
            for ((name, found), (other, expected)) in found.iter().zip(&expected) {
                assert_eq!(name, other);
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
                        "{name} after {steps} steps: {found} where {expected} was expected"
                    );
                }
            }
            assert_eq!(found.len(), expected.len());
        };
        close(save(compiled().model().unwrap()));
        close(save(&compiled().into_model()));
        close(save(&compiled().into_model().clone().fork(&device)));
    }
}
