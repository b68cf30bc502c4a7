//! Task heads: classification of a sequence and masked language modelling.

use super::encoder::{dropout, layer_norm, linear};
use super::{BertConfig, BertModel, ProblemType};
use crate::keys::{KeyPattern, Pretrained};
use crate::layers::Activation;
use crate::loss::{CrossEntropy, binary_cross_entropy, mean_squared_error, sequence_cross_entropy};
use burn::module::{Initializer, Module, Param};
use burn::nn::{Dropout, LayerNorm, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// BERT with a classifier on the pooled first token.
#[derive(Module, Debug)]
pub struct BertForSequenceClassification<B: Backend> {
    /// The encoder.
    pub bert: BertModel<B>,
    dropout: Dropout,
    /// The classifier: `hidden_size` to `num_labels`.
    pub classifier: Linear<B>,
    #[module(skip)]
    problem: ProblemType,
}

impl<B: Backend> BertForSequenceClassification<B> {
    pub(super) fn new(config: &BertConfig, device: &B::Device) -> Self {
        Self {
            bert: BertModel::new(config, true, device),
            dropout: dropout(config.classifier_dropout.unwrap_or(config.hidden_dropout_prob)),
            classifier: linear(config, config.hidden_size, config.num_labels, device),
            problem: config.problem(),
        }
    }

    /// Logits `[batch, num_labels]`; inputs as for [`BertModel::forward`].
    pub fn forward(
        &self,
        tokens: Tensor<B, 2, Int>,
        segments: Option<Tensor<B, 2, Int>>,
        keep: Option<Tensor<B, 2, Int>>,
    ) -> Tensor<B, 2> {
        let pooled = self.bert.pool(self.bert.forward(tokens, segments, keep));
        self.classifier.forward(self.dropout.forward(pooled))
    }

    /// The loss of one label per text, `labels` `[batch]`: mean cross entropy of classes or, in a regression
    /// on one number ([`BertConfig::problem`]), the mean squared error of whole numbers. Output `[1]`.
    ///
    /// # Panics
    ///
    /// If the configuration asks for several labels per text, for which there are
    /// [`multi_label_loss`](Self::multi_label_loss) and [`regression_loss`](Self::regression_loss).
    pub fn loss(
        &self,
        tokens: Tensor<B, 2, Int>,
        keep: Option<Tensor<B, 2, Int>>,
        labels: Tensor<B, 1, Int>,
    ) -> Tensor<B, 1> {
        match self.problem {
            ProblemType::SingleLabel => {}
            ProblemType::Regression => {
                let logits = self.forward(tokens, None, keep);
                let [batch, outputs] = logits.dims();
                assert!(
                    outputs == 1,
                    "bert: `problem_type` is regression on {outputs} numbers per text: use `regression_loss`"
                );
                let numbers = labels.float().cast(logits.dtype()).reshape([batch, 1]);
                return mean_squared_error(logits, numbers);
            }
            ProblemType::MultiLabel => panic!(
                "bert: `problem_type` is multi_label_classification, a label for each class: use `multi_label_loss`"
            ),
        }
        // PyTorch's cross entropy ignores -100 by default, and transformers relies on it.
        CrossEntropy::new()
            .with_ignore_index(-100)
            .forward(self.forward(tokens, None, keep), labels)
    }

    /// Mean binary cross entropy of independent labels; `labels` `[batch, num_labels]` in `[0, 1]`, output
    /// `[1]`.
    pub fn multi_label_loss(
        &self,
        tokens: Tensor<B, 2, Int>,
        keep: Option<Tensor<B, 2, Int>>,
        labels: Tensor<B, 2>,
    ) -> Tensor<B, 1> {
        binary_cross_entropy(self.forward(tokens, None, keep), labels)
    }

    /// Mean squared error of regression; `labels` `[batch, num_labels]`, output `[1]`.
    pub fn regression_loss(
        &self,
        tokens: Tensor<B, 2, Int>,
        keep: Option<Tensor<B, 2, Int>>,
        labels: Tensor<B, 2>,
    ) -> Tensor<B, 1> {
        mean_squared_error(self.forward(tokens, None, keep), labels)
    }
}

impl<B: Backend> Pretrained<B> for BertForSequenceClassification<B> {
    fn family(&self) -> &'static str {
        "bert"
    }

    fn original_key(&self, path: &str) -> String {
        super::original_segments(path)
    }

    fn aliases(&self, key: &str) -> Vec<String> {
        super::aliases(key)
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("classifier.") || key.starts_with("bert.pooler.")
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        let mut patterns = super::computed_keys();
        patterns.push(KeyPattern::Prefix("cls.".into()));
        patterns
    }
}

/// The head of masked language modelling.
#[derive(Module, Debug)]
pub struct BertLmHead<B: Backend> {
    predictions: BertLmPredictions<B>,
}

/// A dense layer, then the projection to tokens.
#[derive(Module, Debug)]
pub struct BertLmPredictions<B: Backend> {
    transform: BertLmTransform<B>,
    /// Projection of its own, `None` when it is the table of token embeddings.
    decoder: Option<Linear<B>>,
    bias: Param<Tensor<B, 1>>,
}

/// Dense layer, activation and layer norm.
#[derive(Module, Debug)]
pub struct BertLmTransform<B: Backend> {
    dense: Linear<B>,
    layer_norm: LayerNorm<B>,
    #[module(skip)]
    activation: Activation,
}

/// BERT with a masked-language-model head on every token.
#[derive(Module, Debug)]
pub struct BertForMaskedLm<B: Backend> {
    /// The encoder, without pooler.
    pub bert: BertModel<B>,
    cls: BertLmHead<B>,
}

impl<B: Backend> BertForMaskedLm<B> {
    pub(super) fn new(config: &BertConfig, device: &B::Device) -> Self {
        let (width, tokens) = (config.hidden_size, config.vocab_size);
        let initializer = Initializer::Normal {
            mean: 0.0,
            std: config.initializer_range,
        };
        let decoder = LinearConfig::new(width, tokens)
            .with_bias(false)
            .with_initializer(initializer);
        let predictions = BertLmPredictions {
            transform: BertLmTransform {
                dense: linear(config, width, width, device),
                layer_norm: layer_norm(config, device),
                activation: config.hidden_act,
            },
            decoder: (!config.tie_word_embeddings).then(|| decoder.init(device)),
            bias: Initializer::Zeros.init([tokens], device),
        };
        Self {
            bert: BertModel::new(config, false, device),
            cls: BertLmHead { predictions },
        }
    }

    /// Logits `[batch, length, vocab_size]`; inputs as for [`BertModel::forward`].
    pub fn forward(
        &self,
        tokens: Tensor<B, 2, Int>,
        segments: Option<Tensor<B, 2, Int>>,
        keep: Option<Tensor<B, 2, Int>>,
    ) -> Tensor<B, 3> {
        let head = &self.cls.predictions;
        let hidden = head
            .transform
            .dense
            .forward(self.bert.forward(tokens, segments, keep));
        let hidden = head
            .transform
            .layer_norm
            .forward(head.transform.activation.forward(hidden));
        let logits = match &head.decoder {
            Some(decoder) => decoder.forward(hidden),
            None => self.bert.embeddings.word_embeddings.logits(hidden),
        };
        logits + head.bias.val().unsqueeze()
    }

    /// Mean cross entropy over the masked tokens; `labels` `[batch, length]` with -100 where a token is not
    /// predicted, output `[1]`.
    pub fn loss(
        &self,
        tokens: Tensor<B, 2, Int>,
        keep: Option<Tensor<B, 2, Int>>,
        labels: Tensor<B, 2, Int>,
    ) -> Tensor<B, 1> {
        let loss = CrossEntropy::new().with_ignore_index(-100);
        sequence_cross_entropy(&loss, self.forward(tokens, None, keep), labels)
    }
}

impl<B: Backend> Pretrained<B> for BertForMaskedLm<B> {
    fn family(&self) -> &'static str {
        "bert"
    }

    fn original_key(&self, path: &str) -> String {
        // With tied weights the bias lives beside the decoder, without them it is the decoder's own.
        match (path, &self.cls.predictions.decoder) {
            ("cls.predictions.bias", Some(_)) => "cls.predictions.decoder.bias".into(),
            _ => super::original_segments(path),
        }
    }

    fn aliases(&self, key: &str) -> Vec<String> {
        match key {
            "cls.predictions.bias" => vec!["cls.predictions.decoder.bias".into()],
            "cls.predictions.decoder.bias" => vec!["cls.predictions.bias".into()],
            _ => {
                let mut names = super::aliases(key);
                if self.cls.predictions.decoder.is_none() && key == "bert.embeddings.word_embeddings.weight" {
                    // The one tensor of tied weights; a file that has it under both names must have it twice.
                    names.push("cls.predictions.decoder.weight".into());
                }
                names
            }
        }
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("cls.")
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        let mut patterns = super::computed_keys();
        for other in ["bert.pooler.", "pooler.", "cls.seq_relationship.", "classifier."] {
            patterns.push(KeyPattern::Prefix(other.into()));
        }
        patterns
    }
}
