//! Labelled texts from JSONL and CSV tables.
//!
//! Both formats come down to rows of named fields, of which one is the text, maybe one a second text, and one
//! the label. Labels are strings or integers; the classes are the distinct labels in the order of their
//! numbers (if all are integers) or of their text, unless the caller gives the list. Every refusal names the
//! line.

use std::path::Path;

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor, TensorData};
use serde_json::Value;
use tokenizers::EncodeInput;

use super::contents::{Contents, examples};
use super::error::DataError;
use super::loader::{Collate, Dataset};
use super::rng::Rng;
use crate::token_batch::{BatchEncoder, TokenBatch};

/// The names of the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFields {
    /// Field of the text.
    pub text: String,
    /// Field of a second text, for pairs.
    pub pair: Option<String>,
    /// Field of the label.
    pub label: String,
    /// All classes in order; by default the labels that occur.
    pub classes: Option<Vec<String>>,
}

impl Default for TextFields {
    fn default() -> Self {
        Self {
            text: "text".into(),
            pair: None,
            label: "label".into(),
            classes: None,
        }
    }
}

impl TextFields {
    /// Fields with other names than `text` and `label`.
    pub fn new(text: impl Into<String>, label: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            label: label.into(),
            ..Self::default()
        }
    }

    /// Adds a second text.
    pub fn with_pair(mut self, field: impl Into<String>) -> Self {
        self.pair = Some(field.into());
        self
    }

    /// Fixes the classes and their order, as evaluation needs to agree with training.
    pub fn with_classes<S: Into<String>>(mut self, classes: impl IntoIterator<Item = S>) -> Self {
        self.classes = Some(classes.into_iter().map(Into::into).collect());
        self
    }
}

/// One labelled text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextExample {
    /// The text.
    pub text: String,
    /// The second text of a pair.
    pub pair: Option<String>,
    /// Index into the classes.
    pub label: usize,
}

/// A table of labelled texts in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextExamples {
    examples: Vec<TextExample>,
    classes: Vec<String>,
}

/// A row before its label is known to be a class.
struct Row {
    line: u64,
    text: String,
    pair: Option<String>,
    label: String,
}

impl TextExamples {
    /// Reads one JSON object a line. Empty lines are skipped.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Format`] with the line; [`DataError::Empty`].
    pub fn from_jsonl(path: impl AsRef<Path>, fields: &TextFields) -> Result<Self, DataError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| DataError::io("read", path, source))?;
        let mut rows = Vec::new();
        // A byte order mark, as some editors put in front, is no part of the first object.
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        for (number, line) in text.split(|&b| b == b'\n').enumerate() {
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let number = number as u64 + 1;
            let fail = |reason: String| DataError::format(path, Some(number), reason);
            let value: Value =
                serde_json::from_slice(line).map_err(|error| fail(format!("not JSON: {error}")))?;
            let object = value
                .as_object()
                .ok_or_else(|| fail("not a JSON object".into()))?;
            let field = |name: &str| match object.get(name) {
                Some(Value::String(text)) => Ok(text.clone()),
                Some(Value::Number(number)) => Ok(number.to_string()),
                Some(Value::Bool(flag)) => Ok(flag.to_string()),
                Some(other) => Err(fail(format!("field `{name}` is {other}, not a string or number"))),
                None => Err(fail(format!(
                    "no field `{name}`; there are {}",
                    listed(object.keys())
                ))),
            };
            rows.push(Row {
                line: number,
                text: field(&fields.text)?,
                pair: fields.pair.as_deref().map(field).transpose()?,
                label: field(&fields.label)?,
            });
        }
        Self::from_rows(path, rows, fields)
    }

    /// Reads a CSV table with a header line, quoting as in RFC 4180.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Format`] with the line; [`DataError::Empty`].
    pub fn from_csv(path: impl AsRef<Path>, fields: &TextFields) -> Result<Self, DataError> {
        let path = path.as_ref();
        let file = std::fs::File::open(path).map_err(|source| DataError::io("open", path, source))?;
        let mut reader = csv::ReaderBuilder::new()
            .trim(csv::Trim::Headers)
            .from_reader(file);
        let fail = |error: csv::Error| {
            let line = error.position().map(csv::Position::line);
            DataError::format(path, line, error)
        };
        let header = reader.headers().map_err(fail)?.clone();
        let column = |name: &str| {
            header
                .iter()
                .position(|field| field.trim_start_matches('\u{feff}') == name)
                .ok_or_else(|| {
                    DataError::format(
                        path,
                        Some(1),
                        format!("no column `{name}`; there are {}", listed(header.iter())),
                    )
                })
        };
        let text = column(&fields.text)?;
        let pair = fields.pair.as_deref().map(column).transpose()?;
        let label = column(&fields.label)?;
        let mut rows = Vec::new();
        for record in reader.records() {
            // The reader has checked that every record has as many fields as the header.
            let record = record.map_err(fail)?;
            let field = |index: usize| record.get(index).unwrap_or_default().to_string();
            let (line, named) = (record.position().map_or(0, csv::Position::line), field(label));
            if named.trim().is_empty() {
                let reason = format!("nothing in column `{}`", fields.label);
                return Err(DataError::format(path, Some(line), reason));
            }
            rows.push(Row {
                line,
                text: field(text),
                pair: pair.map(field),
                label: named.trim().to_string(),
            });
        }
        Self::from_rows(path, rows, fields)
    }

    /// Examples that are already in memory.
    ///
    /// # Errors
    /// [`DataError::Label`] with the first example whose label is not below the number of classes.
    pub fn new(examples: Vec<TextExample>, classes: Vec<String>) -> Result<Self, DataError> {
        let bad = examples
            .iter()
            .enumerate()
            .find(|(_, example)| example.label >= classes.len());
        match bad {
            Some((index, bad)) => Err(DataError::Label {
                example: format!("text {index}"),
                label: bad.label,
                classes: classes.len(),
            }),
            None => Ok(Self { examples, classes }),
        }
    }

    fn from_rows(path: &Path, rows: Vec<Row>, fields: &TextFields) -> Result<Self, DataError> {
        if rows.is_empty() {
            return Err(DataError::empty(path, "no examples"));
        }
        let classes = fields.classes.clone().unwrap_or_else(|| classes_of(&rows));
        let by_name: std::collections::HashMap<&str, usize> = classes
            .iter()
            .enumerate()
            .map(|(index, name)| (name.as_str(), index))
            .collect();
        let mut examples = Vec::with_capacity(rows.len());
        for row in &rows {
            let label = *by_name.get(row.label.as_str()).ok_or_else(|| {
                let reason = format!(
                    "label `{}` is none of the classes {}",
                    row.label,
                    listed(classes.iter())
                );
                DataError::format(path, Some(row.line), reason)
            })?;
            examples.push(TextExample {
                text: row.text.clone(),
                pair: row.pair.clone(),
                label,
            });
        }
        Ok(Self { examples, classes })
    }

    /// The examples.
    pub fn examples(&self) -> &[TextExample] {
        &self.examples
    }

    /// Names of the classes; a label is an index into them.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }
}

/// The distinct labels: by number if all are integers, else by text.
fn classes_of(rows: &[Row]) -> Vec<String> {
    let mut names: Vec<String> = rows.iter().map(|row| row.label.clone()).collect();
    names.sort();
    names.dedup();
    if names.iter().all(|name| name.parse::<i64>().is_ok()) {
        names.sort_by_key(|name| name.parse::<i64>().unwrap_or_default());
    }
    names
}

/// Names for a message, the first few of them.
fn listed<S: AsRef<str>>(names: impl Iterator<Item = S>) -> String {
    let names: Vec<String> = names.map(|name| format!("`{}`", name.as_ref())).collect();
    match names.len() {
        0 => "none".to_string(),
        1..=12 => names.join(", "),
        n => format!("{} and {} more", names[..12].join(", "), n - 12),
    }
}

impl Dataset for TextExamples {
    type Item = TextExample;

    fn len(&self) -> usize {
        self.examples.len()
    }

    fn item(&self, index: usize, _rng: &mut Rng) -> Result<TextExample, DataError> {
        self.examples.get(index).cloned().ok_or(DataError::OutOfRange {
            index,
            len: self.examples.len(),
        })
    }

    fn contents(&self) -> u64 {
        let mut contents = Contents::of("texts");
        for index in examples(self.examples.len()) {
            let example = &self.examples[index];
            contents.add(example.text.as_bytes());
            contents.add(example.pair.as_deref().unwrap_or_default().as_bytes());
            contents.add(self.classes[example.label].as_bytes());
        }
        contents.number()
    }
}

/// Collates labelled texts into [`TextBatch`] with a tokenizer.
#[derive(Clone, Debug)]
pub struct TextBatcher {
    encoder: BatchEncoder,
}

impl TextBatcher {
    /// Encodes with the given encoder.
    pub fn new(encoder: BatchEncoder) -> Self {
        Self { encoder }
    }
}

impl Collate<TextExample> for TextBatcher {
    type Batch = TextBatch;

    fn collate(&self, items: Vec<TextExample>) -> Result<TextBatch, DataError> {
        let labels = items.iter().map(|item| item.label as i32).collect();
        let inputs = items.iter().map(|item| match &item.pair {
            Some(pair) => EncodeInput::from((item.text.as_str(), pair.as_str())),
            None => EncodeInput::from(item.text.as_str()),
        });
        Ok(TextBatch {
            tokens: self.encoder.encode_inputs(inputs.collect())?,
            labels,
        })
    }
}

/// Encoded texts and their labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextBatch {
    /// The texts.
    pub tokens: TokenBatch,
    /// `[rows]`: indices into the classes.
    pub labels: Vec<i32>,
}

impl TextBatch {
    /// The labels as an int tensor `[rows]`.
    pub fn labels_tensor<B: Backend>(&self, device: &B::Device) -> Tensor<B, 1, Int> {
        Tensor::from_data(TensorData::new(self.labels.clone(), [self.labels.len()]), device)
    }
}
