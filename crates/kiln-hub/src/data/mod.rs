//! Data: from files to shuffled batches.
//!
//! ```text
//! files ──► Dataset (one example by number) ──► Loader (order, batches, prefetch, resume) ──► batch
//! ```
//!
//! A [`Dataset`] answers "example number `i`", with random numbers handed in for augmentation. A [`Loader`]
//! decides which numbers come when. Nothing depends on time, threads or hash order: the same seed gives the
//! same batches, bit for bit, and a run that stopped after batch `n` goes on with batch `n + 1`. Of ranks that
//! train together each prepares its [`Share`] of a batch, and the shares are the batch, bit for bit.
//!
//! | Source | Type | Batch |
//! | --- | --- | --- |
//! | text files and folders | [`Corpus`] → [`TokenStream`] → [`TokenWindows`] | [`WindowBatch`] |
//! | JSONL and CSV tables | [`TextExamples`] | [`TextBatch`] |
//! | image folders, CIFAR, drawn shapes | [`ImageFolder`], [`Cifar`], [`Shapes`] → [`Images`] | [`ImageBatch`] |
//! | image folders, for a device that decodes them | [`ImageFolder`] → [`EncodedImages`] | [`EncodedBatch`] |

mod augment;
mod cifar;
mod classify;
mod contents;
mod corpus;
mod encoded;
mod error;
mod folder;
mod image;
mod jpeg;
mod listing;
mod loader;
mod rng;
mod shapes;
mod stream;
mod team;
mod vector;
mod view;

pub use self::image::{ImageBatch, ImageBatcher, ImageExample, ImageFile, ImageSource, Images, Picture};
pub use augment::{Augment, Normalisation, Pipeline};
pub use cifar::{Cifar, CifarKind};
pub use classify::{TextBatch, TextBatcher, TextExample, TextExamples, TextFields};
pub use corpus::{Corpus, CorpusOptions, Document, LeftOut};
pub use encoded::{Encoded, EncodedBatch, EncodedExample, EncodedImages, first_jpeg};
pub use error::DataError;
pub use folder::ImageFolder;
pub use loader::{Batches, Collate, Dataset, Loader, LoaderState, Share};
pub use rng::Rng;
pub use shapes::Shapes;
pub use stream::{TokenStream, TokenWindows, WindowBatch, WindowBatcher};
pub use view::View;
