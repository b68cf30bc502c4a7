//! Texts as a rectangle of token ids.
//!
//! A model takes `[rows, cols]` ids of one length, with a mask that tells tokens from padding. How long a row
//! may be, to what length it is padded and on which side are [`BatchOptions`]; what they leave open is as the
//! tokenizer's file says.

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor, TensorData};
use tokenizers::{EncodeInput, PostProcessor, TruncationParams};

use crate::error::HubError;
use crate::tokenizer::failed;

/// The length to which the rows of a batch are padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// The longest row of the batch.
    Longest,
    /// This many tokens; a compiled step then sees one shape only.
    Fixed(usize),
}

/// How texts become a rectangular batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchOptions {
    /// Longest row in tokens, special tokens included; longer texts are cut. By default what the file says.
    pub max_length: Option<usize>,
    /// Padding; by default what the file says, else the longest row.
    pub padding: Option<Padding>,
    /// Rounds the padded length up to a multiple.
    pub multiple_of: Option<usize>,
    /// Pads on the left, as generation needs it.
    pub pad_left: bool,
    /// Cuts on the left.
    pub truncate_left: bool,
    /// Leaves out `[CLS]`, `[SEP]` and the like.
    pub no_special_tokens: bool,
}

impl BatchOptions {
    /// What the file says.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cuts texts to a length.
    pub fn with_max_length(mut self, tokens: usize) -> Self {
        self.max_length = Some(tokens);
        self
    }

    /// Sets the padding.
    pub fn with_padding(mut self, padding: Padding) -> Self {
        self.padding = Some(padding);
        self
    }

    /// Rounds the padded length up.
    pub fn with_multiple_of(mut self, tokens: usize) -> Self {
        self.multiple_of = Some(tokens);
        self
    }

    /// Pads on the left.
    pub fn with_pad_left(mut self, left: bool) -> Self {
        self.pad_left = left;
        self
    }
}

/// Encodes batches; see [`Tokenizer::batch_encoder`](crate::Tokenizer::batch_encoder).
#[derive(Clone, Debug)]
pub struct BatchEncoder {
    inner: tokenizers::Tokenizer,
    pad_id: u32,
    special_tokens: bool,
}

impl BatchEncoder {
    /// An encoder with the padding and truncation that `inner` is set to.
    pub(crate) fn new(inner: tokenizers::Tokenizer, pad_id: u32, special_tokens: bool) -> Self {
        Self {
            inner,
            pad_id,
            special_tokens,
        }
    }

    /// Encodes texts.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`].
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<TokenBatch, HubError> {
        self.encode_inputs(
            texts
                .iter()
                .map(|text| EncodeInput::from(text.as_ref()))
                .collect(),
        )
    }

    /// Encodes pairs of texts, such as question and passage.
    ///
    /// # Errors
    /// [`HubError::Tokenizer`]; also if the length has no room for the special tokens of a pair.
    pub fn encode_pairs<S: AsRef<str>, P: AsRef<str>>(
        &self,
        pairs: &[(S, P)],
    ) -> Result<TokenBatch, HubError> {
        self.encode_inputs(
            pairs
                .iter()
                .map(|(a, b)| EncodeInput::from((a.as_ref(), b.as_ref())))
                .collect(),
        )
    }

    pub(crate) fn encode_inputs(&self, inputs: Vec<EncodeInput<'_>>) -> Result<TokenBatch, HubError> {
        let rows = inputs.len();
        let pairs = inputs.iter().any(|input| matches!(input, EncodeInput::Dual(..)));
        if let Some(truncation) = self.inner.get_truncation().filter(|_| pairs) {
            has_room(&self.inner, truncation, self.special_tokens, pairs).map_err(failed)?;
        }
        let encodings = self
            .inner
            .encode_batch_fast(inputs, self.special_tokens)
            .map_err(failed)?;
        let cols = encodings.iter().map(|e| e.get_ids().len()).max().unwrap_or(0);
        let mut batch = TokenBatch {
            rows,
            cols,
            ids: vec![self.pad_id as i32; rows * cols],
            mask: vec![0; rows * cols],
            type_ids: vec![0; rows * cols],
        };
        // The library has padded to one length, except where a row is longer than a fixed length and
        // truncation is off.
        for (row, encoding) in encodings.iter().enumerate() {
            let start = row * cols;
            for (to, from) in batch.ids[start..].iter_mut().zip(encoding.get_ids()) {
                *to = *from as i32;
            }
            for (to, from) in batch.mask[start..].iter_mut().zip(encoding.get_attention_mask()) {
                *to = *from as i32;
            }
            for (to, from) in batch.type_ids[start..].iter_mut().zip(encoding.get_type_ids()) {
                *to = *from as i32;
            }
        }
        Ok(batch)
    }
}

/// Whether the length of `truncation` has room for the special tokens of a row, if there are any, and for the
/// stride, which is how many tokens a piece of a text shares with the next one. The library counts on both.
pub(crate) fn has_room(
    tokenizer: &tokenizers::Tokenizer,
    truncation: &TruncationParams,
    special_tokens: bool,
    pairs: bool,
) -> Result<(), String> {
    let &TruncationParams {
        max_length, stride, ..
    } = truncation;
    let processor = tokenizer.get_post_processor().filter(|_| special_tokens);
    let added = processor.map_or(0, |processor| processor.added_tokens(pairs));
    let Some(room) = max_length.checked_sub(added) else {
        return Err(format!(
            "rows of {max_length} tokens do not hold their {added} special tokens"
        ));
    };
    // The texts of a pair share the room.
    let piece = if pairs { room / 2 } else { room };
    if stride > 0 && stride >= piece {
        return Err(format!(
            "pieces of {piece} tokens, of rows of {max_length}, cannot share {stride} (the stride)"
        ));
    }
    Ok(())
}

/// A rectangular batch of token ids, row major.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBatch {
    /// Number of texts.
    pub rows: usize,
    /// Padded length in tokens.
    pub cols: usize,
    /// Token ids, `[rows, cols]`.
    pub ids: Vec<i32>,
    /// 1 for a token, 0 for padding, `[rows, cols]`.
    pub mask: Vec<i32>,
    /// 0 for the first text of a pair, 1 for the second, `[rows, cols]`.
    pub type_ids: Vec<i32>,
}

impl TokenBatch {
    /// Token ids as an int tensor `[rows, cols]`.
    pub fn ids_tensor<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2, Int> {
        self.tensor(&self.ids, device)
    }

    /// The attention mask as an int tensor `[rows, cols]`, 1 for tokens and 0 for padding.
    pub fn mask_tensor<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2, Int> {
        self.tensor(&self.mask, device)
    }

    /// The segment ids as an int tensor `[rows, cols]`.
    pub fn type_ids_tensor<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2, Int> {
        self.tensor(&self.type_ids, device)
    }

    fn tensor<B: Backend>(&self, values: &[i32], device: &B::Device) -> Tensor<B, 2, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), [self.rows, self.cols]), device)
    }
}
