//! Models as plain Burn modules, generic over the backend.
//!
//! Nothing in this crate knows Kiln: every model is a `Module<B>` for any `B: Backend`, built from a `Config` with the
//! names and defaults of its original (torchvision, timm or transformers), and it computes what the original
//! computes from the same weights. Three rules keep the models easy to compile and easy to load:
//!
//! - **A forward pass never reads a tensor's value.** Shapes are known on the host, so masks and position tables come
//!   from shapes; a step compiler can record a forward pass once and replay it.
//! - **The parts are spelled out.** Attention is `softmax(q k^T * scale + mask) v`, a loss is `log_softmax` and `gather`:
//!   the forms that pattern rewrites look for.
//! - **Names follow the original.** The path of a parameter in a module differs from its name in the original
//!   checkpoint by a rule of a line or two per family ([`keys::Pretrained`]), and [`keys::KeyMap`] hands the result to
//!   a loader as plain data.
//!
//! Training mode follows Burn's convention: on an autodiff backend dropout and batch statistics are active, on the
//! inner backend (after `model.valid()`) they are not.

pub mod bert;
pub mod error;
pub mod keys;
pub mod layers;
pub mod llama;
pub mod loss;
pub mod mlp;
pub mod params;
pub mod vision;

pub use error::ModelError;
