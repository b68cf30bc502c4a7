//! Tokenizers: text to ids and back.
//!
//! A model's `tokenizer.json` is used as it is, through the library that wrote it. Its settings for padding
//! and truncation apply to batches only: a text that is encoded alone, to be packed into a stream, must not
//! lose its end or gain padding. So the tokenizer itself carries neither, and [`Tokenizer::batch_encoder`]
//! makes a second one that does.
//!
//! For training from scratch there are two makers: the 256 bytes as they are, and byte-level BPE trained on a
//! corpus. Both cover every text, so there is no unknown token.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, PaddingDirection, PaddingParams, PaddingStrategy, TruncationDirection, TruncationParams,
    TruncationStrategy,
};

use crate::atomic::write_bytes_atomic;
use crate::error::HubError;
use crate::mistaken;
use crate::pieces::{PIECE, pieces};
use crate::token_batch::{BatchEncoder, BatchOptions, Padding, has_room};

/// The token that separates documents in the tokenizers that this crate makes.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The file's settings for batches; kept apart from `inner`, see above.
    padding: Option<PaddingParams>,
    truncation: Option<TruncationParams>,
    path: Option<PathBuf>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`HubError::Io`]; [`HubError::Tokenizer`] if the file is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, HubError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| HubError::io("read", path, source))?;
        Self::parse(&bytes, Some(path.to_path_buf()))
    }

    /// Reads the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`] if they are damaged.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HubError> {
        Self::parse(bytes, None)
    }

    fn parse(bytes: &[u8], path: Option<PathBuf>) -> Result<Self, HubError> {
        // The library checks syntax; some contradictions inside a valid file make it panic.
        let parsed = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(bytes)));
        match parsed {
            Ok(Ok(inner)) => Ok(Self::from_inner(inner, path)),
            Ok(Err(error)) => {
                if let Some(path) = &path {
                    mistaken::refuse(path, bytes)?;
                }
                Err(HubError::Tokenizer {
                    path,
                    reason: error.to_string(),
                })
            }
            Err(_) => Err(HubError::Tokenizer {
                path,
                reason: "the file contradicts itself".to_string(),
            }),
        }
    }

    fn from_inner(mut inner: tokenizers::Tokenizer, path: Option<PathBuf>) -> Self {
        let padding = inner.get_padding().cloned();
        let truncation = inner.get_truncation().cloned();
        inner.with_padding(None);
        // Removing a setting cannot fail; the library's signature is for setting one.
        let _ = inner.with_truncation(None);
        Self {
            inner,
            padding,
            truncation,
            path,
        }
    }

    /// A tokenizer whose tokens are the 256 bytes, id by byte value, and [`END_OF_TEXT`] as 256.
    ///
    /// # Errors
    /// None in practice; the library's construction is fallible.
    pub fn bytes() -> Result<Self, HubError> {
        let characters: Vec<char> = byte_characters().collect();
        let vocabulary: [(String, u32); 256] =
            std::array::from_fn(|id| (characters[id].to_string(), id as u32));
        let model = BPE::builder().vocab_and_merges(vocabulary, vec![]).build();
        let model = model.map_err(failed)?;
        let mut inner = byte_level(tokenizers::Tokenizer::new(model));
        inner
            .add_special_tokens([AddedToken::from(END_OF_TEXT, true)])
            .map_err(failed)?;
        Ok(Self::from_inner(inner, None))
    }

    /// Trains byte-level BPE on texts. The same texts in the same order give the same tokenizer.
    ///
    /// `vocabulary` counts all tokens: [`END_OF_TEXT`] (id 0), the 256 bytes, and as many merges as fit and
    /// as the texts support. Long texts are counted in pieces, which gives the same words.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`] if `vocabulary` is below 257.
    pub fn train_bpe<S: AsRef<str> + Send>(
        texts: impl Iterator<Item = S> + Send,
        vocabulary: usize,
    ) -> Result<Self, HubError> {
        let owned = |text: S| {
            pieces(text.as_ref(), PIECE)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        Self::train_on(texts.flat_map(owned), vocabulary)
    }

    fn train_on<S: AsRef<str> + Send>(
        texts: impl Iterator<Item = S> + Send,
        vocabulary: usize,
    ) -> Result<Self, HubError> {
        if vocabulary < 257 {
            return Err(failed(format!(
                "a vocabulary of {vocabulary} cannot hold the 256 bytes and {END_OF_TEXT}"
            )));
        }
        let trainer = BpeTrainer::builder()
            .vocab_size(vocabulary)
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet(byte_characters().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .build();
        let mut inner = byte_level(tokenizers::Tokenizer::new(BPE::default()));
        inner
            .train(&mut TrainerWrapper::from(trainer), texts)
            .map_err(failed)?;
        Ok(Self::from_inner(inner, None))
    }

    /// Writes a `tokenizer.json`, atomically.
    ///
    /// # Errors
    /// [`HubError::Io`], [`HubError::Tokenizer`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), HubError> {
        let mut whole = self.inner.clone();
        whole.with_padding(self.padding.clone());
        self.truncate(&mut whole, self.truncation.clone())?;
        let text = whole.to_string(true).map_err(failed)?;
        write_bytes_atomic(path.as_ref(), text.as_bytes())
    }

    /// Whether both give every text the same ids: they would be written as the same file, but for its
    /// settings for batches.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`].
    pub fn is_same(&self, other: &Self) -> Result<bool, HubError> {
        let [own, others] = [self, other].map(|one| one.inner.to_string(false));
        Ok(own.map_err(failed)? == others.map_err(failed)?)
    }

    /// Rows that a table of embeddings needs: one more than the largest id, added tokens included. Where the
    /// file leaves gaps between its ids that is more than the number of tokens.
    pub fn vocabulary(&self) -> usize {
        let ids = self.inner.get_vocab(true).into_values();
        ids.max().map_or(0, |largest| largest as usize + 1)
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The token that ends a text, under the names that models use for it.
    pub fn end_of_text(&self) -> Option<u32> {
        [
            END_OF_TEXT,
            "</s>",
            "<|end_of_text|>",
            "<eos>",
            "<|im_end|>",
            "[SEP]",
        ]
        .iter()
        .find_map(|t| self.id(t))
    }

    /// The same tokenizer with eyes closed to special tokens: `<|endoftext|>` within a text is then eleven or
    /// so ordinary tokens. For text that is data, such as a corpus that may contain the sources of a
    /// tokenizer.
    pub fn literal(&self) -> Self {
        let mut literal = self.clone();
        literal.inner.set_encode_special_tokens(true);
        literal
    }

    /// Encodes one text, without padding or truncation. Special tokens within the text are recognised.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`].
    pub fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, HubError> {
        let encoding = self
            .inner
            .encode_fast(text, special_tokens)
            .map_err(|e| self.failed(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes one text that is data: without special tokens around it, in pieces of `size` bytes or more
    /// where that gives the same tokens, as a whole where nobody knows.
    pub(crate) fn encode_data(&self, text: &str, size: usize) -> Result<Vec<u32>, HubError> {
        if !self.splits_at_words() {
            return self.encode(text, false);
        }
        let mut ids = Vec::new();
        for piece in pieces(text, size) {
            ids.extend(self.encode(piece, false)?);
        }
        Ok(ids)
    }

    /// Whether a text that [`pieces`] cuts has the same tokens: it is split by the pattern from which these
    /// follow, and nothing sees it before.
    fn splits_at_words(&self) -> bool {
        let splits = match self.inner.get_pre_tokenizer() {
            Some(PreTokenizerWrapper::ByteLevel(level)) => level.use_regex && !level.add_prefix_space,
            _ => false,
        };
        let mut added = self.inner.get_added_tokens_decoder().into_values();
        // Added tokens are looked for in the whole text, except for special ones of a literal tokenizer.
        let finds_none = self.inner.get_encode_special_tokens() && added.all(|token| token.special);
        splits && finds_none && self.inner.get_normalizer().is_none()
    }

    /// The text of some ids.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, HubError> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|e| self.failed(e))
    }

    /// An encoder of batches, with the file's settings where `options` says nothing.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`] if the lengths are impossible, or padding is asked for and no padding token is
    /// known.
    pub fn batch_encoder(&self, options: &BatchOptions) -> Result<BatchEncoder, HubError> {
        let mut inner = self.inner.clone();
        let mut truncation = self.truncation.clone();
        if let Some(max_length) = options.max_length {
            let from_file = truncation.unwrap_or_default();
            truncation = Some(TruncationParams {
                max_length,
                ..from_file
            });
        }
        if let Some(params) = &mut truncation {
            params.strategy = TruncationStrategy::LongestFirst;
            params.direction = if options.truncate_left {
                TruncationDirection::Left
            } else {
                params.direction
            };
        }
        self.truncate(&mut inner, truncation)?;

        let mut padding = match &self.padding {
            Some(padding) => padding.clone(),
            None => self.default_padding(),
        };
        match options.padding {
            Some(Padding::Longest) => padding.strategy = PaddingStrategy::BatchLongest,
            Some(Padding::Fixed(length)) => padding.strategy = PaddingStrategy::Fixed(length),
            None => {}
        }
        if let Some(multiple) = options.multiple_of {
            padding.pad_to_multiple_of = Some(multiple.max(1));
        }
        if options.pad_left {
            padding.direction = PaddingDirection::Left;
        }
        let pad_id = padding.pad_id;
        inner.with_padding(Some(padding));
        Ok(BatchEncoder::new(inner, pad_id, !options.no_special_tokens))
    }

    /// Sets the truncation of `inner`, which is this tokenizer's.
    fn truncate(
        &self,
        inner: &mut tokenizers::Tokenizer,
        truncation: Option<TruncationParams>,
    ) -> Result<(), HubError> {
        if let Some(truncation) = &truncation {
            // The library subtracts the special tokens of one text from the length, whether or not rows have them.
            has_room(inner, truncation, true, false).map_err(|e| self.failed(e))?;
        }
        inner.with_truncation(truncation).map_err(|e| self.failed(e))?;
        Ok(())
    }

    /// Padding for files that say nothing about it: the usual names of the padding token, else the end of
    /// text (it is masked, so any id would do).
    fn default_padding(&self) -> PaddingParams {
        let named = ["[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>"]
            .into_iter()
            .find_map(|token| Some((self.id(token)?, token.to_string())));
        let end = || self.end_of_text().and_then(|id| Some((id, self.token(id)?)));
        let (pad_id, pad_token) = named.or_else(end).unwrap_or((0, String::new()));
        PaddingParams {
            pad_id,
            pad_token,
            ..Default::default()
        }
    }

    fn failed(&self, error: impl ToString) -> HubError {
        HubError::Tokenizer {
            path: self.path.clone(),
            reason: error.to_string(),
        }
    }
}

pub(crate) fn failed(error: impl ToString) -> HubError {
    HubError::Tokenizer {
        path: None,
        reason: error.to_string(),
    }
}

/// Byte-level splitting and decoding, with no space added in front.
fn byte_level(mut tokenizer: tokenizers::Tokenizer) -> tokenizers::Tokenizer {
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer
}

/// The printable stand-ins that byte-level tokenizers use for bytes, in the order of the bytes: printable
/// Latin-1 stands for itself, the other bytes are numbered on from U+0100.
fn byte_characters() -> impl Iterator<Item = char> {
    let mut spare = 0x100u32;
    (0u8..=255).map(move |byte| {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { u32::from(byte) } else { spare };
        spare += u32::from(!printable);
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn corpus() -> Vec<String> {
        (0..200)
            .map(|i| {
                format!(
                    "the step {i} compiles the step, the kernel runs the kernel {}\n",
                    i * 7
                )
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]
        /// Both makers cover every text: nothing is unknown and nothing is lost.
        #[test]
        fn byte_level_tokenizers_lose_nothing(text in "\\PC{0,60}|(\\s|\\w|😀|é){0,40}") {
            let bytes = Tokenizer::bytes().unwrap();
            let ids = bytes.encode(&text, false).unwrap();
            prop_assert_eq!(ids.iter().map(|&id| id as u8).collect::<Vec<_>>(), text.as_bytes());
            prop_assert_eq!(bytes.decode(&ids, false).unwrap(), text);
        }
    }

    #[test]
    fn bpe_training_is_deterministic_and_compresses() {
        let train = || Tokenizer::train_bpe(corpus().into_iter(), 400).unwrap();
        let (first, second) = (train(), train());
        assert_eq!(
            first.inner.to_string(false).unwrap(),
            second.inner.to_string(false).unwrap()
        );
        let text = "the kernel runs the step — naïvely";
        let ids = first.encode(text, true).unwrap();
        assert!(
            ids.len() < text.len() / 2,
            "{} tokens for {} bytes",
            ids.len(),
            text.len()
        );
        assert_eq!(first.decode(&ids, true).unwrap(), text);
        assert!(first.vocabulary() <= 400);
        assert_eq!(first.end_of_text(), Some(0));
        assert!(Tokenizer::train_bpe(corpus().into_iter(), 100).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]
        /// Cut wherever that is permitted, a text has the same tokens, and so has what is trained on it.
        #[test]
        fn pieces_change_no_token(
            text in "([a-c']| |\\n|\\r|\\t|'s|[.,!]|1|é|中|。|\u{a0}|\u{3000}|\u{85}|\u{200b}|\u{301}|<\\|endoftext\\|>){0,80}"
        ) {
            let trained = Tokenizer::train_on([text.as_str()].into_iter(), 300).unwrap();
            let cut = Tokenizer::train_on(pieces(&text, 1), 300).unwrap();
            prop_assert_eq!(trained.inner.to_string(false).unwrap(), cut.inner.to_string(false).unwrap());
            let literal = trained.literal();
            prop_assert!(literal.splits_at_words());
            prop_assert_eq!(literal.encode_data(&text, 1).unwrap(), literal.encode(&text, false).unwrap());
        }
    }

    #[test]
    fn texts_of_tokenizers_that_may_join_words_stay_whole() {
        let literal = Tokenizer::bytes().unwrap().literal();
        assert!(literal.splits_at_words());
        assert!(
            !Tokenizer::bytes().unwrap().splits_at_words(),
            "special tokens are found"
        );
        let mut added = literal.clone();
        added.inner.add_tokens([AddedToken::from("a\nb", false)]).unwrap();
        assert!(!added.splits_at_words());
        assert_eq!(added.encode_data("a\nb", 1).unwrap().len(), 1);
        let mut whole = literal.clone();
        whole
            .inner
            .with_pre_tokenizer(Some(ByteLevel::new(false, true, false)));
        assert!(!whole.splits_at_words());
        let mut prefixed = literal;
        prefixed
            .inner
            .with_pre_tokenizer(Some(ByteLevel::new(true, true, true)));
        assert!(!prefixed.splits_at_words());
    }

    #[test]
    fn special_tokens_in_a_text_are_text_if_it_is_data() {
        let tokenizer = Tokenizer::bytes().unwrap();
        let text = format!("a{END_OF_TEXT}b");
        assert_eq!(tokenizer.encode(&text, false).unwrap(), [97, 256, 98]);
        let literal = tokenizer.literal().encode(&text, false).unwrap();
        assert_eq!(
            literal.iter().map(|&id| id as u8).collect::<Vec<_>>(),
            text.as_bytes()
        );
        assert!(!literal.contains(&256));
    }

    #[test]
    fn batches_are_padded_cut_and_masked() {
        let tokenizer = Tokenizer::bytes().unwrap();
        let texts = ["a", "abcdef", ""];
        let longest = tokenizer
            .batch_encoder(&BatchOptions::new())
            .unwrap()
            .encode(&texts)
            .unwrap();
        assert_eq!((longest.rows, longest.cols), (3, 6));
        assert_eq!(longest.mask.iter().sum::<i32>(), 7);
        assert_eq!(longest.ids[..2], [97, 256]);

        let options = BatchOptions::new()
            .with_max_length(4)
            .with_padding(Padding::Fixed(8))
            .with_pad_left(true);
        let fixed = tokenizer.batch_encoder(&options).unwrap().encode(&texts).unwrap();
        assert_eq!((fixed.rows, fixed.cols), (3, 8));
        assert_eq!(fixed.ids[8..16], [256, 256, 256, 256, 97, 98, 99, 100]);
        assert_eq!(fixed.mask[..8], [0, 0, 0, 0, 0, 0, 0, 1]);

        let options = BatchOptions::new().with_multiple_of(4);
        assert_eq!(
            tokenizer
                .batch_encoder(&options)
                .unwrap()
                .encode(&texts)
                .unwrap()
                .cols,
            8
        );
        assert_eq!(
            tokenizer
                .batch_encoder(&options)
                .unwrap()
                .encode::<&str>(&[])
                .unwrap()
                .rows,
            0
        );
    }

    #[test]
    fn a_saved_tokenizer_reads_back_with_its_batch_settings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut tokenizer = Tokenizer::train_bpe(corpus().into_iter(), 300).unwrap();
        tokenizer.padding = Some(PaddingParams {
            strategy: PaddingStrategy::Fixed(16),
            ..Default::default()
        });
        tokenizer.truncation = Some(TruncationParams {
            max_length: 16,
            ..Default::default()
        });
        tokenizer.save(&path).unwrap();
        let read = Tokenizer::open(&path).unwrap();
        assert!(read.is_same(&tokenizer).unwrap());
        read.save(&path).unwrap();
        let again = Tokenizer::open(&path).unwrap();
        assert!(again.is_same(&read).unwrap() && again.is_same(&tokenizer).unwrap());
        let other = Tokenizer::train_bpe(corpus().into_iter(), 301).unwrap();
        assert!(!other.is_same(&tokenizer).unwrap());
        let text = corpus().concat();
        assert!(
            read.encode(&text, true).unwrap().len() > 100,
            "one text alone is neither cut nor padded"
        );
        assert_eq!(
            read.encode(&text, true).unwrap(),
            tokenizer.encode(&text, true).unwrap()
        );
        let batch = read
            .batch_encoder(&BatchOptions::new())
            .unwrap()
            .encode(&[text.as_str(), "x"])
            .unwrap();
        assert_eq!(batch.cols, 16);
    }
}
