//! Damaged and hostile files give typed errors that say what is wrong; nothing panics.

use std::path::Path;

use crate::common::*;
use kiln_hub::*;
use proptest::prelude::*;

fn open(bytes: &[u8]) -> Result<Checkpoint, HubError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path)
}

fn reason(result: Result<Checkpoint, HubError>) -> String {
    match result {
        Err(error @ HubError::Safetensors { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn tensor(shape: &str, from: usize, to: usize) -> String {
    format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
}

#[test]
fn safetensors_rules() {
    let good = safetensors_of(&TORCH_SHAPES);
    assert!(open(&good).is_ok());
    assert!(reason(open(&good[..good.len() - 1])).contains("truncated"));
    assert!(reason(open(&[&good[..], &[0]].concat())).contains("truncated or padded"));
    assert!(reason(open(&good[..5])).contains("shorter"));
    // Header longer than the file, and so long that the sum overflows.
    assert!(reason(open(&[&1000u64.to_le_bytes()[..], b"{}"].concat())).contains("1000"));
    assert!(reason(open(&[&u64::MAX.to_le_bytes()[..], b"{}"].concat())).contains("limit"));
    assert!(reason(open(&raw_safetensors("{\"a\":", &[]))).contains("JSON"));
    assert!(reason(open(&raw_safetensors("[]", &[]))).contains("JSON"));
    let overlap = format!("{{\"a\":{},\"b\":{}}}", tensor("[2]", 0, 8), tensor("[2]", 4, 12));
    assert!(reason(open(&raw_safetensors(&overlap, &[0; 12]))).contains("overlap"));
    let gap = format!(
        "{{\"a\":{},\"b\":{}}}",
        tensor("[2]", 0, 8),
        tensor("[1]", 12, 16)
    );
    assert!(reason(open(&raw_safetensors(&gap, &[0; 16]))).contains("gap"));
    let reversed = format!("{{\"a\":{}}}", tensor("[2]", 8, 0));
    assert!(open(&raw_safetensors(&reversed, &[0; 8])).is_err());
    let shape = format!("{{\"a\":{}}}", tensor("[3]", 0, 8));
    assert!(reason(open(&raw_safetensors(&shape, &[0; 8]))).contains("shape"));
    let huge = format!("{{\"a\":{}}}", tensor("[4294967296,4294967296,16]", 0, 8));
    assert!(reason(open(&raw_safetensors(&huge, &[0; 8]))).contains("overflow"));
    let beyond = format!("{{\"a\":{}}}", tensor("[1000]", 0, 4000));
    assert!(reason(open(&raw_safetensors(&beyond, &[0; 8]))).contains("truncated"));
    let dtype = r#"{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#;
    assert!(reason(open(&raw_safetensors(dtype, &[0; 4]))).contains("JSON"));
}

#[test]
fn what_is_no_weight_file_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 90868376\n";
    let page = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>";
    let folder = tempfile::tempdir().unwrap();
    for (bytes, word) in [
        (&pointer[..], "git lfs pull"),
        (page, "HTML page"),
        (
            b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>",
            "XML",
        ),
        (b"GGUF\x03\0\0\0 and more", "GGUF"),
        (b"", "empty"),
    ] {
        for name in [
            "model.safetensors",
            "pytorch_model.bin",
            "model.safetensors.index.json",
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let error = Checkpoint::open(&path).unwrap_err();
            assert!(matches!(error, HubError::Mistaken { .. }), "{name}: {error:?}");
            let text = error.to_string();
            assert!(text.contains(word) && text.contains(name), "{text}");
        }
        for name in ["config.json", "tokenizer.json"] {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let error = match name {
                "config.json" => Config::read(&path).unwrap_err(),
                _ => Tokenizer::open(&path).unwrap_err(),
            };
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    let archive = Checkpoint::open(folder.path().join("model.safetensors"));
    assert!(archive.is_err());
    assert!(
        open(b"PK\x03\x04 a zip")
            .unwrap_err()
            .to_string()
            .contains(".bin or .pt")
    );
    assert!(
        open(b"{\"error\": \"Repository not found\"}")
            .unwrap_err()
            .to_string()
            .contains("server")
    );
}

#[test]
fn types_without_a_counterpart_open_but_do_not_read() {
    let header = r#"{"w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, raw_safetensors(header, &[1; 4])).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.stored("w").unwrap().dtype, Dtype::F8_E4M3);
    assert!(matches!(checkpoint.tensor("w"), Err(HubError::DType { .. })));
    assert!(matches!(
        checkpoint.tensor("v"),
        Err(HubError::UnknownTensor { .. })
    ));
}

/// A folder with two shards and an index of the given text.
fn sharded(index: &str) -> (tempfile::TempDir, Result<Checkpoint, HubError>) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("one.safetensors"),
        safetensors_of(&[("a", &[2]), ("b", &[3])]),
    )
    .unwrap();
    std::fs::write(
        folder.path().join("two.safetensors"),
        safetensors_of(&[("c", &[4])]),
    )
    .unwrap();
    std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let result = load(folder.path().to_str().unwrap());
    (folder, result)
}

#[test]
fn index_rules() {
    let good = r#"{"metadata":{"total_size":36},"weight_map":{"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors"}}"#;
    let (folder, checkpoint) = sharded(good);
    let checkpoint = checkpoint.unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    // The index may also be named itself.
    assert!(Checkpoint::open(folder.path().join("model.safetensors.index.json")).is_ok());

    let index_error = |text: &str| match sharded(text).1 {
        Err(HubError::Index { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert!(index_error("{").contains("EOF"));
    assert!(index_error("{}").contains("weight_map"));
    assert!(index_error(r#"{"weight_map":{}}"#).contains("empty"));
    assert!(index_error(r#"{"weight_map":{"a":1}}"#).contains("`a`"));
    let absent =
        index_error(r#"{"weight_map":{"a":"one.safetensors","x":"two.safetensors","y":"one.safetensors"}}"#);
    assert!(
        absent.contains("x (two.safetensors)") && absent.contains("y (one.safetensors)"),
        "{absent}"
    );
    let missing = sharded(r#"{"weight_map":{"a":"three.safetensors"}}"#).1;
    assert!(matches!(missing, Err(HubError::MissingFile { file, .. }) if file == "three.safetensors"));
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret.safetensors");
    std::fs::write(&secret, safetensors_of(&[("a", &[2])])).unwrap();
    let absolute = secret.to_str().unwrap().to_string();
    let up = format!(
        "../{}/secret.safetensors",
        outside.path().file_name().unwrap().to_str().unwrap()
    );
    for name in [&*absolute, &*up, "x/../../y", "..", "C:\\\\x", "a\\u0000b"] {
        let (_folder, result) = sharded(&format!(r#"{{"weight_map":{{"a":"{name}"}}}}"#));
        assert!(
            matches!(result, Err(HubError::UnsafePath { .. })),
            "{name}: {result:?}"
        );
    }
}

#[test]
fn names_that_lead_nowhere_say_so() {
    assert!(matches!(load("./no/such/folder"), Err(HubError::NotFound { .. })));
    assert!(matches!(load("no/such/folder"), Err(HubError::NotFound { .. })));
    let empty = tempfile::tempdir().unwrap();
    let error = load(empty.path().to_str().unwrap()).unwrap_err();
    assert!(matches!(error, HubError::NoWeights { .. }) && error.to_string().contains("model.safetensors"));
    std::fs::write(
        empty.path().join("weights.safetensors"),
        safetensors_of(&[("a", &[2])]),
    )
    .unwrap();
    let lone = load(empty.path().to_str().unwrap()).unwrap();
    assert!(matches!(lone.config(), Err(HubError::MissingFile { .. })));
    assert!(matches!(lone.side_file("../x"), Err(HubError::UnsafePath { .. })));
}

#[test]
fn broken_pickles_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pytorch_model.bin");
    let samples: [&[u8]; 5] = [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"hello", &[0x80; 4096]];
    for bytes in samples {
        std::fs::write(&path, bytes).unwrap();
        let result = load(folder.path().to_str().unwrap());
        assert!(
            matches!(
                result,
                Err(HubError::Pytorch { .. } | HubError::Io { .. } | HubError::Mistaken { .. })
            ),
            "{bytes:?}: {result:?}"
        );
    }
}

/// Reads everything there is, so that a bad range would show.
fn exhaust(path: &Path) {
    if let Ok(checkpoint) = Checkpoint::open(path) {
        for name in checkpoint.names() {
            let _ = checkpoint.tensor(name);
            let _ = checkpoint.tensor_as(name, burn_tensor::DType::F32);
        }
        let _ = checkpoint.config();
        let _ = checkpoint.tokenizer();
    }
}

/// A tokenizer with special tokens around a text, and the lengths of its file.
fn bert_tokenizer(max_length: usize, stride: usize) -> Tokenizer {
    let text = format!(
        r###"{{"version":"1.0","truncation":{{"direction":"Right","max_length":{max_length},
        "strategy":"LongestFirst","stride":{stride}}},"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{{"type":"Whitespace"}},"post_processor":{{"type":"BertProcessing","sep":["[SEP]",1],
        "cls":["[CLS]",2]}},"decoder":null,"model":{{"type":"WordPiece","unk_token":"[UNK]",
        "continuing_subword_prefix":"##","max_input_chars_per_word":100,
        "vocab":{{"[UNK]":0,"[SEP]":1,"[CLS]":2,"a":3,"b":4}}}}}}"###
    );
    Tokenizer::from_bytes(text.as_bytes()).unwrap()
}

/// Lengths of a file, or of the program, without room for special tokens or for what pieces share.
#[test]
fn lengths_without_room_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let refused = |result: Result<(), HubError>, with: &str| match result {
        Err(error @ HubError::Tokenizer { .. }) => assert!(error.to_string().contains(with), "{error}"),
        other => panic!("{other:?}"),
    };
    for (max_length, stride, reason) in [
        (0, 0, "2 special tokens"),
        (1, 0, "2 special tokens"),
        (4, 2, "share 2"),
        (4, 9, "share 9"),
    ] {
        let tokenizer = bert_tokenizer(max_length, stride);
        let encoder = tokenizer.batch_encoder(&BatchOptions::new());
        refused(encoder.map(drop), reason);
        refused(tokenizer.save(&path), reason);
    }
    let tokenizer = bert_tokenizer(16, 0);
    let encoder = |length| tokenizer.batch_encoder(&BatchOptions::new().with_max_length(length));
    refused(encoder(1).map(drop), "2 special tokens");
    // Room for the special tokens of a text, and not for those of a pair.
    let tight = encoder(2).unwrap();
    assert_eq!(tight.encode(&["a b a", "b"]).unwrap().ids, [2, 1, 2, 1]);
    refused(tight.encode_pairs(&[("a b", "b")]).map(drop), "3 special tokens");
    let pairs = encoder(5).unwrap().encode_pairs(&[("a b a b", "b b b b")]);
    assert_eq!(pairs.unwrap().ids, [2, 3, 1, 4, 1]);
    // Pieces of a pair are half as long as those of a text.
    let shared = bert_tokenizer(8, 2).batch_encoder(&BatchOptions::new()).unwrap();
    assert_eq!(shared.encode(&["a b a b a b a b a b"]).unwrap().cols, 8);
    refused(
        shared.encode_pairs(&[("a b a b", "b b b b")]).map(drop),
        "share 2",
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    /// Valid files with a few bytes changed, cut or doubled.
    #[test]
    fn mutated_safetensors_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = safetensors_of(&[("a", &[2, 3]), ("b", &[5]), ("c", &[])]);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        exhaust(&path);
    }

    /// Headers that are JSON of the right form with any numbers.
    #[test]
    fn arbitrary_headers_never_panic(
        tensors in prop::collection::vec((
            "[a-c]{1,2}",
            prop::sample::select(vec!["F32", "F16", "BF16", "F64", "I64", "BOOL", "U8", "F8_E5M2", "F4", "C64"]),
            prop::collection::vec(prop_oneof![0u64..6, any::<u64>()], 0..4),
            prop_oneof![0u64..40, any::<u64>()],
            prop_oneof![0u64..40, any::<u64>()],
        ), 0..4),
        data in 0usize..64,
    ) {
        let entries: Vec<String> = tensors
            .iter()
            .map(|(n, t, s, a, b)| format!(r#""{n}":{{"dtype":"{t}","shape":{s:?},"data_offsets":[{a},{b}]}}"#))
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, raw_safetensors(&format!("{{{}}}", entries.join(",")), &vec![7; data])).unwrap();
        exhaust(&path);
    }

    #[test]
    fn mutated_side_files_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        which in 0usize..3,
    ) {
        let tokenizer = br#"{"version":"1.0","truncation":{"direction":"Right","max_length":8,"strategy":"LongestFirst","stride":0},
            "padding":null,"added_tokens":[{"id":0,"content":"[UNK]","single_word":false,"lstrip":false,"rstrip":false,
            "normalized":false,"special":true}],"normalizer":{"type":"Lowercase"},"pre_tokenizer":{"type":"Whitespace"},
            "post_processor":null,"decoder":null,"model":{"type":"WordPiece","unk_token":"[UNK]",
            "continuing_subword_prefix":"\#\#","max_input_chars_per_word":100,"vocab":{"[UNK]":0,"a":1,"b":2}}}"#;
        let files: [(&str, &[u8]); 3] = [
            ("model.safetensors.index.json", br#"{"weight_map":{"a":"one.safetensors"}}"#),
            ("config.json", br#"{"model_type":"bert","hidden_size":384,"layer_norm_eps":1e-12}"#),
            ("tokenizer.json", tokenizer),
        ];
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("one.safetensors"), safetensors_of(&[("a", &[2])])).unwrap();
        for (number, (name, bytes)) in files.iter().enumerate() {
            let mut bytes = bytes.to_vec();
            for (at, value) in edits.iter().filter(|_| number == which) {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        exhaust(folder.path());
        if let Ok(tokenizer) = Tokenizer::open(folder.path().join("tokenizer.json"))
            && let Ok(encoder) = tokenizer.batch_encoder(&BatchOptions::new())
        {
            let _ = encoder.encode(&["a b", "", "zz zz"]);
        }
    }
}
