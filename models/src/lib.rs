//! Models as plain Burn modules, generic over the backend.
//!
//! Nothing in this crate knows Kiln: every model is a `Module<B>` for any `B: Backend`, built from a `Config`
//! with the names and defaults of its original (torchvision, timm or transformers), and it computes what the
//! original computes from the same weights. Three rules keep the models easy to compile and easy to load:
//!
//! - **A forward pass never reads a tensor's value.** Shapes are known on the host, so masks and position
//!   tables come from shapes; a step compiler can record a forward pass once and replay it.
//! - **The parts are spelled out.** Attention is `softmax(q k^T * scale + mask) v`, a loss is `log_softmax`
//!   and `gather`: the forms that pattern rewrites look for.
//! - **Names follow the original.** The path of a parameter in a module differs from its name in the original
//!   checkpoint by a rule of a line or two per family ([`keys::Pretrained`]), and [`keys::KeyMap`] hands the
//!   result to a loader as plain data.
//!
//! Training mode follows Burn's convention: on an autodiff backend dropout and batch statistics are active,
//! on the inner backend (after `model.valid()`) they are not.
//!
//! # Models
//!
//! | module | original | built by |
//! |---|---|---|
//! | [`llama`] | transformers, Llama 2 and 3 | [`llama::LlamaConfig`]: presets, sizes, or a `config.json` |
//! | [`bert`] | transformers, BERT | [`bert::BertConfig`]: presets, sizes, or a `config.json` |
//! | [`vision`] | torchvision and timm | [`vision::VisionConfig`] by name, or the configuration of a family |
//! | [`mlp`] | a plain `nn.Sequential` | [`mlp::MlpConfig`] |
//!
//! # Example
//!
//! ```
//! use burn::tensor::{Int, Tensor};
//! use kiln_models::keys::Pretrained;
//! use kiln_models::llama::LlamaConfig;
//! use kiln_models::params::num_trainable;
//!
//! type B = burn_autodiff::Autodiff<burn_flex::Flex>;
//! let device = Default::default();
//! let model = LlamaConfig::new(64, 16, 32, 2, 4).init::<B>(&device);
//!
//! // One training step's loss and gradients.
//! let tokens = Tensor::<B, 2, Int>::from_ints([[1, 2, 3, 4]], &device);
//! let gradients = model.causal_loss(tokens).backward();
//!
//! // What a checkpoint of transformers calls each tensor.
//! let map = model.key_map();
//! let entry = map.by_path("model.norm.gamma").expect("a norm ends the decoder");
//! assert_eq!(entry.key, "model.norm.weight");
//! assert_eq!(num_trainable(&model), 7_248);
//! # let _ = gradients;
//! ```

pub mod bert;
pub mod error;
pub mod keys;
pub mod layers;
pub mod llama;
pub mod loss;
pub mod mlp;
pub mod params;
mod settings;
pub mod vision;

pub use error::ModelError;
