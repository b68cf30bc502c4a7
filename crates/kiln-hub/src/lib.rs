//! Weights, tokenizers and data for Kiln: Hugging Face files, safetensors, datasets.
