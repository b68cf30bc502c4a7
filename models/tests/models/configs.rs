//! Configurations of Hugging Face: what is read, what is written, what is refused.

use crate::fixture::Fixture;
use kiln_models::ModelError;
use kiln_models::bert::{BertConfig, ProblemType};
use kiln_models::llama::{LlamaConfig, RopeScaling};
use kiln_models::vision::VisionConfig;

const LLAMA: &str = r#"{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4"#;

fn llama(more: &str) -> Result<LlamaConfig, ModelError> {
    LlamaConfig::from_hf_json(&format!("{LLAMA}{more}}}"))
}

#[test]
fn llama_reads_older_and_newer_forms() {
    let plain = llama("").expect("the least configuration");
    assert_eq!(
        (plain.kv_heads(), plain.head_width(), plain.rope_theta),
        (4, 8, 10000.0)
    );
    assert_eq!(plain.rms_norm_eps, 1e-6);

    let older = llama(
        r#", "num_key_value_heads": 2, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": [1, 2],
        "rope_scaling": {"type": "linear", "factor": 2.0}, "pad_token_id": -1"#,
    )
    .expect("an older configuration");
    assert_eq!(older.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(
        (older.kv_heads(), older.rope_theta, older.pad_token_id),
        (2, 500000.0, None)
    );
    assert_eq!(older.eos_token_ids, [1, 2]);

    let newer = Fixture::load("llama3");
    let newer = LlamaConfig::from_hf_json(&newer.config).expect("a newer configuration");
    let expected = RopeScaling::Llama3 {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 16,
    };
    assert_eq!((newer.rope_scaling, newer.rope_theta), (expected, 500.0));
}

/// Where the same thing can be said in two places, the place that transformers prefers decides.
#[test]
fn llama_prefers_the_places_that_transformers_prefers() {
    let scaling = |original| RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: original,
    };
    let llama3 = |more: &str| {
        format!(
            r#"{{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0{more}}}"#
        )
    };
    let inside = llama3(r#", "original_max_position_embeddings": 16"#);
    let without = llama3("");
    for (fields, expected) in [
        (format!(r#", "rope_scaling": {inside}"#), scaling(16)),
        (
            format!(r#", "rope_scaling": {inside}, "original_max_position_embeddings": 32"#),
            scaling(32),
        ),
        (
            format!(r#", "rope_scaling": {without}, "original_max_position_embeddings": 32"#),
            scaling(32),
        ),
        (
            format!(r#", "rope_scaling": {without}, "max_position_embeddings": 64"#),
            scaling(64),
        ),
        (
            format!(r#", "rope_parameters": {{"rope_type": "default"}}, "rope_scaling": {inside}"#),
            scaling(16),
        ),
        (
            format!(r#", "rope_parameters": {inside}, "rope_scaling": {{}}"#),
            scaling(16),
        ),
        (
            format!(r#", "rope_parameters": {inside}, "rope_scaling": null"#),
            scaling(16),
        ),
        (
            format!(r#", "rope_scaling": {inside}, "partial_rotary_factor": 1.0"#),
            scaling(16),
        ),
    ] {
        assert_eq!(llama(&fields).expect(&fields).rope_scaling, expected, "{fields}");
    }
    let theta = |fields: &str| llama(fields).expect(fields).rope_theta;
    assert_eq!(
        theta(r#", "rope_theta": 5.0, "rope_scaling": {"factor": 2, "type": "linear", "rope_theta": 7.0}"#),
        7.0
    );
    assert_eq!(
        theta(
            r#", "rope_theta": 5.0, "rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"type": "default"}"#
        ),
        5.0
    );
}

#[test]
fn the_kind_of_labels_is_that_of_transformers() {
    let problem = |text: &str| BertConfig::from_hf_json(text).expect(text).problem();
    assert_eq!(problem("{}"), ProblemType::SingleLabel);
    assert_eq!(
        problem(r#"{"id2label": {"0": "score"}}"#),
        ProblemType::Regression
    );
    assert_eq!(
        problem(r#"{"id2label": {"0": "score"}, "problem_type": "single_label_classification"}"#),
        ProblemType::SingleLabel
    );
    assert_eq!(
        problem(r#"{"problem_type": "regression"}"#),
        ProblemType::Regression
    );
    let many = BertConfig::from_hf_json(r#"{"problem_type": "multi_label_classification"}"#).expect("known");
    assert_eq!(many.problem(), ProblemType::MultiLabel);
    assert!(
        many.to_hf_json("BertModel")
            .contains(r#""problem_type": "multi_label_classification""#)
    );
}

#[test]
fn written_configurations_read_back() {
    for name in [
        "llama2",
        "llama_gqa_tied",
        "llama3",
        "llama_linear",
        "llama_dynamic",
    ] {
        let config = LlamaConfig::from_hf_json(&Fixture::load(name).config).expect(name);
        let again = LlamaConfig::from_hf_json(&config.to_hf_json()).expect(name);
        // Written with every default spelled out; the meaning is the same, so a second round changes nothing.
        assert_eq!(again.to_hf_json(), config.to_hf_json(), "{name}");
        assert_eq!(again.rope_scaling, config.rope_scaling, "{name}");
    }
    for name in ["bert_classifier", "bert_masked_lm", "bert_untied"] {
        let config = BertConfig::from_hf_json(&Fixture::load(name).config).expect(name);
        let again = BertConfig::from_hf_json(&config.to_hf_json("BertModel")).expect(name);
        assert_eq!(format!("{again:?}"), format!("{config:?}"), "{name}");
    }
}

#[test]
fn impossible_llamas_are_refused() {
    let cases = [
        (r#", "num_key_value_heads": 3"#, "num_key_value_heads"),
        (r#", "num_key_value_heads": 0"#, "num_key_value_heads"),
        (r#", "head_dim": 7"#, "head_dim"),
        (r#", "rms_norm_eps": 0"#, "rms_norm_eps"),
        (r#", "rope_theta": -1"#, "rope_theta"),
        (r#", "attention_dropout": 1.5"#, "attention_dropout"),
        (r#", "hidden_act": "quick_gelu""#, "hidden_act"),
        (r#", "model_type": "mamba""#, "model_type"),
        (r#", "is_causal": false"#, "is_causal"),
        (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor"),
        (
            r#", "rope_scaling": {"partial_rotary_factor": 0.5}"#,
            "partial_rotary_factor",
        ),
        (
            r#", "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}"#,
            "rope_parameters",
        ),
        (
            r#", "quantization_config": {"quant_method": "gptq", "bits": 4}"#,
            "quantization_config",
        ),
        (r#", "pruned_heads": {"0": [1]}"#, "pruned_heads"),
        (r#", "layer_types": ["sliding_attention"]"#, "layer_types"),
        (r#", "is_encoder_decoder": true"#, "is_encoder_decoder"),
        (
            r#", "rope_scaling": {"rope_type": "yarn", "factor": 2}"#,
            "rope_type",
        ),
        (r#", "rope_scaling": {"rope_type": "linear"}"#, "factor"),
        (
            r#", "rope_scaling": {"rope_type": "dynamic", "factor": 0}"#,
            "factor",
        ),
    ];
    for (field, named) in cases {
        let error = llama(field).expect_err(field).to_string();
        assert!(error.contains(&format!("`{named}`")), "{field}: {error}");
    }
    assert!(matches!(
        llama(r#", "hidden_size": NaN"#),
        Err(ModelError::Parse { .. })
    ));
    assert!(matches!(
        LlamaConfig::from_hf_json("{}"),
        Err(ModelError::Parse { .. })
    ));
    assert!(matches!(
        LlamaConfig::preset("llama-7t"),
        Err(ModelError::UnknownModel { .. })
    ));
}

#[test]
fn impossible_berts_are_refused() {
    let cases = [
        (r#"{"num_attention_heads": 7}"#, "num_attention_heads"),
        (r#"{"vocab_size": 0}"#, "vocab_size"),
        (r#"{"hidden_dropout_prob": -0.1}"#, "hidden_dropout_prob"),
        (r#"{"hidden_act": "step"}"#, "hidden_act"),
        (
            r#"{"position_embedding_type": "relative_key"}"#,
            "position_embedding_type",
        ),
        (r#"{"is_decoder": true}"#, "is_decoder"),
        (r#"{"id2label": {}}"#, "num_labels"),
        (r#"{"is_causal": true}"#, "is_causal"),
        (r#"{"problem_type": "ranking"}"#, "problem_type"),
        (
            r#"{"quantization_config": {"load_in_8bit": true}}"#,
            "quantization_config",
        ),
    ];
    for (text, named) in cases {
        let error = BertConfig::from_hf_json(text).expect_err(text).to_string();
        assert!(error.contains(&format!("`{named}`")), "{text}: {error}");
    }
}

/// A damaged file neither panics nor asks for memory.
#[test]
fn sizes_beyond_every_model_are_refused() {
    let fields = [
        ("num_hidden_layers", "100000000"),
        ("num_hidden_layers", "18446744073709551615"),
        ("hidden_size", "9223372036854775808"),
        ("hidden_size", "2147483648"),
        ("vocab_size", "1099511627776"),
        ("intermediate_size", "4294967296"),
        ("max_position_embeddings", "18446744073709551615"),
        ("num_attention_heads", "8589934592"),
    ];
    let replaced = |field: &str, value: &str| {
        let mut file: serde_json::Value = serde_json::from_str(&format!("{LLAMA}}}")).unwrap();
        file[field] = serde_json::from_str(value).unwrap();
        file
    };
    let refused = |error: ModelError, field: &str| {
        assert!(matches!(error, ModelError::Invalid { .. }), "{field}: {error}");
    };
    for (field, value) in fields {
        let file = replaced(field, value).to_string();
        refused(LlamaConfig::from_hf_json(&file).unwrap_err(), field);
        refused(BertConfig::from_hf_json(&file).unwrap_err(), field);
    }
    for (heads, width) in [
        (4_u64, 1_u64 << 40),
        (1 << 33, 1 << 33),
        (1 << 31, 1 << 12),
        (4, u64::MAX),
    ] {
        let mut file = replaced("num_attention_heads", &heads.to_string());
        file["head_dim"] = width.into();
        refused(
            LlamaConfig::from_hf_json(&file.to_string()).unwrap_err(),
            "head_dim",
        );
    }
    let file = replaced("num_labels", "4294967296").to_string();
    refused(BertConfig::from_hf_json(&file).unwrap_err(), "num_labels");
}

#[test]
fn files_of_image_classifiers_are_obeyed_or_refused() {
    let check = |name: &str, text: &str| VisionConfig::new(name.into()).check_file(text);
    let plain = [
        (
            "resnet50",
            r#"{"architecture": "resnet50", "num_classes": 1000, "image_size": 224}"#,
        ),
        (
            "resnet50",
            r#"{"architecture": "resnet50.a1_in1k", "num_classes": 1000, "num_features": 2048, "global_pool": "avg",
            "model_args": {"num_classes": 10, "in_chans": 3}, "pretrained_cfg": {"mean": [0.5, 0.5, 0.5]}}"#,
        ),
        (
            "resnet18",
            r#"{"model_type": "resnet", "hidden_act": "relu", "downsample_in_bottleneck": false}"#,
        ),
        (
            "vit_small_patch16_224",
            r#"{"architecture": "vit_small_patch16_224", "global_pool": "token", "model_args": null}"#,
        ),
    ];
    for (name, text) in plain {
        check(name, text).expect(text);
    }
    let other = [
        ("architecture", r#"{"architecture": "resnet50"}"#),
        (
            "model_args",
            r#"{"architecture": "resnet18", "model_args": {"aa_layer": "blurpool"}}"#,
        ),
        ("model_args", r#"{"model_args": "aa_layer"}"#),
        (
            "downsample_in_bottleneck",
            r#"{"downsample_in_bottleneck": true}"#,
        ),
        (
            "downsample_in_first_stage",
            r#"{"downsample_in_first_stage": true}"#,
        ),
        ("hidden_act", r#"{"hidden_act": "silu"}"#),
        ("global_pool", r#"{"global_pool": "catavgmax"}"#),
        ("num_channels", r#"{"num_channels": 1}"#),
    ];
    for (field, text) in other {
        let error = check("resnet18", text).unwrap_err();
        assert!(
            matches!(error, ModelError::Invalid { field: found, .. } if found == field),
            "{error}"
        );
    }
    let quantized = check("resnet18", r#"{"quantization_config": {"bits": 4}}"#);
    assert!(matches!(quantized, Err(ModelError::Unsupported { .. })));
    assert!(matches!(check("resnet18", "[1]"), Err(ModelError::Parse { .. })));

    let halves = Some(([0.5; 3], [0.25; 3]));
    for text in [
        r#"{"pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}}"#,
        r#"{"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}"#,
    ] {
        assert_eq!(VisionConfig::normalisation_of_file(text), halves);
    }
    assert_eq!(
        VisionConfig::normalisation_of_file(r#"{"mean": [0.5], "std": 1}"#),
        None
    );
}
