//! A corpus as one long stream of tokens, cut into windows.
//!
//! Language models learn from windows of one length. Packing puts all documents end to end with a separator
//! between and cuts the stream into windows of `length + 1` tokens: the first `length` are the input, the
//! last `length` the targets. No token is padding and all but the stream's last few are used.
//!
//! A stream can be kept in a file and is mapped from there, so a corpus is encoded once and need not fit into
//! memory. The file is the text `KILNTOK`, one byte for the size of a token (2 or 4), the number of tokens as
//! a little-endian u64, and the tokens, little endian.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor, TensorData};
use memmap2::Mmap;

use super::contents::{Contents, examples};
use super::corpus::Corpus;
use super::error::DataError;
use super::loader::{Collate, Dataset};
use super::rng::Rng;
use crate::atomic::write_atomic;
use crate::error::HubError;
use crate::pieces::PIECE;
use crate::tokenizer::Tokenizer;

const MAGIC: &[u8; 7] = b"KILNTOK";
const HEADER: usize = 16;

/// A stream of token ids, in memory or mapped from a file. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TokenStream {
    tokens: Tokens,
}

#[derive(Clone, Debug)]
enum Tokens {
    Memory(Arc<Vec<u32>>),
    Mapped { map: Arc<Mmap>, width: usize },
}

impl TokenStream {
    /// A stream of the given tokens.
    pub fn from_tokens(tokens: Vec<u32>) -> Self {
        Self {
            tokens: Tokens::Memory(Arc::new(tokens)),
        }
    }

    /// Encodes the documents of a corpus, each followed by the tokenizer's end of text if it has one.
    ///
    /// # Errors
    /// [`DataError::Hub`] if the tokenizer fails.
    pub fn encode(corpus: &Corpus, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let mut tokens = Vec::new();
        let separator = tokenizer.end_of_text();
        let tokenizer = tokenizer.literal();
        for text in corpus.texts() {
            tokens.extend(tokenizer.encode_data(text, PIECE)?);
            tokens.extend(separator);
        }
        Ok(Self::from_tokens(tokens))
    }

    /// Maps a file that [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Format`] if the file is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| DataError::io("open", path, source))?;
        let damaged = |reason: String| DataError::format(path, None, reason);
        let metadata = file
            .metadata()
            .map_err(|source| DataError::io("read", path, source))?;
        if !metadata.is_file() || metadata.len() < HEADER as u64 {
            return Err(damaged("not a token stream: shorter than its header".into()));
        }
        // SAFETY: the map is only read, through `&[u8]`. Token files are written by `save`, which replaces
        // them by rename and never changes a file in place, so a mapped file stays as it is.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| DataError::io("map", path, source))?;
        if &map[..7] != MAGIC {
            return Err(damaged("not a token stream".into()));
        }
        let width = usize::from(map[7]);
        if width != 2 && width != 4 {
            return Err(damaged(format!("tokens of {width} bytes")));
        }
        let count = map[8..HEADER]
            .iter()
            .rev()
            .fold(0u64, |n, &b| n << 8 | u64::from(b));
        let present = (map.len() - HEADER) as u64;
        if count.checked_mul(width as u64) != Some(present) {
            return Err(damaged(format!(
                "announces {count} tokens of {width} bytes but has {present} bytes"
            )));
        }
        Ok(Self {
            tokens: Tokens::Mapped {
                map: Arc::new(map),
                width,
            },
        })
    }

    /// Writes the stream to a file, atomically; two bytes a token where all ids fit.
    ///
    /// # Errors
    /// [`DataError::Hub`] with the error of the file system.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), DataError> {
        let path = path.as_ref();
        let tokens = self.read(0..self.len());
        let wide = tokens.iter().any(|&token| token > u32::from(u16::MAX));
        let mut bytes = Vec::with_capacity(HEADER + tokens.len() * 4);
        bytes.extend_from_slice(MAGIC);
        bytes.push(if wide { 4 } else { 2 });
        bytes.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
        for token in tokens {
            bytes.extend_from_slice(&token.to_le_bytes()[..if wide { 4 } else { 2 }]);
        }
        let write = |temporary: &Path| {
            std::fs::write(temporary, &bytes).map_err(|source| HubError::io("write", path, source))
        };
        Ok(write_atomic(path, write)?)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        match &self.tokens {
            Tokens::Memory(tokens) => tokens.len(),
            Tokens::Mapped { map, width } => (map.len() - HEADER) / width,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens of a range, cut to the stream's length.
    pub fn read(&self, range: Range<usize>) -> Vec<u32> {
        let end = range.end.min(self.len());
        let start = range.start.min(end);
        match &self.tokens {
            Tokens::Memory(tokens) => tokens[start..end].to_vec(),
            Tokens::Mapped { map, width: 2 } => {
                let bytes = &map[HEADER + start * 2..HEADER + end * 2];
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| u32::from(u16::from_le_bytes(*b)))
                    .collect()
            }
            Tokens::Mapped { map, .. } => {
                let bytes = &map[HEADER + start * 4..HEADER + end * 4];
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| u32::from_le_bytes(*b))
                    .collect()
            }
        }
    }

    /// The largest token id; 0 for an empty stream. A model's vocabulary must be larger.
    pub fn max_token(&self) -> u32 {
        self.read(0..self.len()).into_iter().max().unwrap_or(0)
    }

    /// Windows of `length` inputs and targets over a part of the stream given by fractions of its length.
    ///
    /// Training on 0.0 to 0.95 and evaluation on 0.95 to 1.0 have no token in common.
    ///
    /// # Errors
    /// [`DataError::Empty`] if the part is shorter than one window.
    pub fn windows(&self, length: usize, from: f64, to: f64) -> Result<TokenWindows, DataError> {
        let at = |fraction: f64| (self.len() as f64 * fraction.clamp(0.0, 1.0)).round() as usize;
        let range = at(from)..at(to).max(at(from));
        if length == 0 || range.len() <= length {
            return Err(DataError::Empty {
                place: "token stream".into(),
                reason: format!(
                    "{} tokens are less than one window of {length} and its target",
                    range.len()
                ),
            });
        }
        Ok(TokenWindows {
            stream: self.clone(),
            range,
            length,
        })
    }
}

/// Consecutive windows of a stream as a dataset.
#[derive(Clone, Debug)]
pub struct TokenWindows {
    stream: TokenStream,
    range: Range<usize>,
    length: usize,
}

impl TokenWindows {
    /// Tokens a window.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Dataset for TokenWindows {
    /// `length + 1` tokens: the inputs and the last target.
    type Item = Vec<u32>;

    fn len(&self) -> usize {
        // The last token of a window is the first of the next, as a target and as an input.
        (self.range.len() - 1) / self.length
    }

    fn item(&self, index: usize, _rng: &mut Rng) -> Result<Vec<u32>, DataError> {
        if index >= self.len() {
            return Err(DataError::OutOfRange {
                index,
                len: self.len(),
            });
        }
        let start = self.range.start + index * self.length;
        Ok(self.stream.read(start..start + self.length + 1))
    }

    fn contents(&self) -> u64 {
        let mut contents = Contents::of("windows");
        for index in examples(self.len()) {
            let start = self.range.start + index * self.length;
            let tokens = self.stream.read(start..start + self.length + 1);
            contents.add(
                &tokens
                    .iter()
                    .flat_map(|token| token.to_le_bytes())
                    .collect::<Vec<u8>>(),
            );
        }
        contents.number()
    }
}

/// Collates windows into [`WindowBatch`].
#[derive(Clone, Copy, Debug, Default)]
pub struct WindowBatcher;

impl Collate<Vec<u32>> for WindowBatcher {
    type Batch = WindowBatch;

    fn collate(&self, items: Vec<Vec<u32>>) -> Result<WindowBatch, DataError> {
        let rows = items.len();
        let cols = items.first().map_or(0, |item| item.len().saturating_sub(1));
        let mut batch = WindowBatch {
            rows,
            cols,
            inputs: vec![],
            targets: vec![],
        };
        for item in items {
            if item.len() != cols + 1 {
                return Err(DataError::Shape {
                    operation: "batch of windows",
                    reason: format!("one has {} tokens, another {}", cols + 1, item.len()),
                });
            }
            batch
                .inputs
                .extend(item[..cols].iter().map(|&token| token as i32));
            batch.targets.extend(item[1..].iter().map(|&token| token as i32));
        }
        Ok(batch)
    }
}

/// Inputs and next tokens of some windows, row major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowBatch {
    /// Windows.
    pub rows: usize,
    /// Tokens a window.
    pub cols: usize,
    /// `[rows, cols]`.
    pub inputs: Vec<i32>,
    /// `[rows, cols]`: the token after each input.
    pub targets: Vec<i32>,
}

impl WindowBatch {
    /// Inputs and targets as int tensors `[rows, cols]`.
    pub fn tensors<B: Backend>(&self, device: &B::Device) -> (Tensor<B, 2, Int>, Tensor<B, 2, Int>) {
        let tensor = |values: &[i32]| {
            Tensor::from_data(TensorData::new(values.to_vec(), [self.rows, self.cols]), device)
        };
        (tensor(&self.inputs), tensor(&self.targets))
    }
}
