//! Weights, tokenizers and data for Kiln.
//!
//! Three things stand between a Burn module and a useful run, and this crate is the three of them:
//!
//! - **Weights.** [`load`] opens a checkpoint from a folder or from the Hugging Face hub, [`load_into`] fills
//!   any Burn module from it through a [`KeyMap`], [`save_pretrained`] writes files that the Python libraries
//!   load back.
//! - **Tokenizers.** [`Tokenizer`] reads a model's `tokenizer.json`, or makes one from bytes or from a
//!   corpus.
//! - **Data.** [`data`] turns texts, tables and images into shuffled batches with prefetch and exact resume.
//!
//! ```no_run
//! # fn main() -> Result<(), kiln_hub::HubError> {
//! let checkpoint = kiln_hub::load("sentence-transformers/all-MiniLM-L6-v2")?;
//! println!("{} parameters", checkpoint.num_elements());
//! let ids = checkpoint.tokenizer()?.encode("A kiln turns clay into stone.", true)?;
//! # Ok(())
//! # }
//! ```
//!
//! Every file that is read may be damaged or hostile: lengths, names and numbers are checked before they
//! are used, and faults are reported as a [`HubError`] or [`data::DataError`] that names the file. The
//! crate knows no backend and nothing about compiling.

mod atomic;
mod checkpoint;
mod compare;
mod config;
mod convert;
mod error;
mod hub;
mod key_map;
mod load;
mod mapped;
mod mistaken;
mod names;
mod pieces;
mod pytorch;
mod safetensors_file;
mod save;
mod shards;
mod token_batch;
mod tokenizer;
mod walk;

pub mod data;

pub use atomic::{TEMPORARY, write_atomic, write_bytes_atomic};
pub use checkpoint::{Checkpoint, StoredTensor, load};
pub use config::Config;
pub use error::{AmbiguousKeys, HubError, KeyReport, MisshapenKey, MissingKey, MistypedKey};
pub use hub::{Hub, Snapshot};
pub use key_map::{KeyMap, KeyPattern, KeyRule, Transform};
pub use load::{LoadOptions, Loaded, load_into, load_into_with};
pub use safetensors::tensor::Dtype;
pub use save::{SaveOptions, save_pretrained, save_pretrained_with, save_safetensors};
pub use token_batch::{BatchEncoder, BatchOptions, Padding, TokenBatch};
pub use tokenizer::{END_OF_TEXT, Tokenizer};
