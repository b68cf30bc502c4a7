//! The sources of kiln-hub behind one batch.
//!
//! A source becomes a loader for training, which repeats for ever and can start after any batch, and one
//! for evaluation, which passes once over examples that training never sees. The tokenizer and the encoded
//! corpus are made before training and kept in the run's folder: a resumed run must see the same tokens
//! even if the source files have changed since.
//!
//! Of several ranks each prepares its share of a training batch only. Texts of a run are all padded to
//! `data.length`, and nothing else of an example depends on others, so a share is that part of the whole
//! batch. Examples for evaluation are not shared: every rank evaluates all of them.

mod images;
mod prepared;
#[cfg(test)]
mod shares;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData};
use kiln::{KilnBackend, KilnDevice};
use kiln_hub::data::{
    Batches, Collate, Corpus, CorpusOptions, DataError, Dataset, EncodedBatch, ImageBatch, Loader,
    LoaderState, Rng, Share, TextBatch, TextBatcher, TextExample, TextExamples, TextFields, TokenStream,
    TokenWindows, WindowBatch, WindowBatcher,
};
use kiln_hub::{BatchOptions, Checkpoint, HubError, Padding, Tokenizer};

use serde::{Deserialize, Serialize};

use crate::config::{Config, DataConfig, DataSource};
use crate::error::CliError;
use crate::model::{Batch, Family};
pub use prepared::Prepared;

/// Most threads that read, decode and augment images for a GPU. One decodes and crops some 300 of 500 by 375
/// pixels a second, where a step of resnet50 on an H100 takes 6,400; without decoding it reads 24,000.
const MOST_THREADS: usize = 16;

/// A batch of any source, in memory.
#[derive(Clone, Debug, PartialEq)]
pub enum HostBatch {
    /// Windows of a stream of tokens.
    Windows(WindowBatch),
    /// Texts with a class.
    Texts(TextBatch),
    /// Images with a class.
    Images(ImageBatch),
    /// The same, for a device that decodes them.
    Encoded(EncodedBatch),
}

impl HostBatch {
    /// The batch as tensors.
    ///
    /// # Errors
    ///
    /// [`CliError::Data`] if a file is damaged that the device should have decoded.
    pub fn tensors<B: KilnBackend>(self, device: &KilnDevice) -> Result<Batch<B>, CliError> {
        Ok(match self {
            Self::Windows(batch) => {
                let (inputs, targets) = batch.tensors(device);
                Batch::Windows { inputs, targets }
            }
            Self::Texts(batch) => {
                let shape = [batch.tokens.rows, batch.tokens.cols];
                let tensor = |values: &[i32]| {
                    Tensor::<B, 2, Int>::from_data(TensorData::new(values.to_vec(), shape), device)
                };
                Batch::Texts {
                    tokens: tensor(&batch.tokens.ids),
                    keep: Some(tensor(&batch.tokens.mask)),
                    labels: batch.labels_tensor(device),
                }
            }
            Self::Images(batch) => {
                let (pixels, labels) = batch.into_tensors(device);
                Batch::Images { pixels, labels }
            }
            Self::Encoded(batch) => images::tensors(batch, device)?,
        })
    }

    /// Examples: windows, texts, images.
    pub fn rows(&self) -> usize {
        match self {
            Self::Windows(batch) => batch.rows,
            Self::Texts(batch) => batch.labels.len(),
            Self::Images(batch) => batch.labels.len(),
            Self::Encoded(batch) => batch.labels.len(),
        }
    }

    /// Classes of the examples; empty for language models.
    pub fn labels(&self) -> &[i32] {
        match self {
            Self::Windows(_) => &[],
            Self::Texts(batch) => &batch.labels,
            Self::Images(batch) => &batch.labels,
            Self::Encoded(batch) => &batch.labels,
        }
    }

    /// The units that a rate counts: tokens of a language model, examples otherwise.
    pub fn units(&self) -> usize {
        match self {
            Self::Windows(batch) => batch.rows * batch.cols,
            Self::Texts(batch) => batch.labels.len(),
            Self::Images(batch) => batch.labels.len(),
            Self::Encoded(batch) => batch.labels.len(),
        }
    }
}

/// A loader whose dataset and collation are forgotten.
trait Open {
    fn start(&self) -> LoaderState;
    fn open(&self, state: LoaderState, share: Share) -> Result<Batches<HostBatch>, DataError>;
}

impl<D: Dataset, C: Collate<D::Item, Batch = HostBatch>> Open for Loader<D, C> {
    fn start(&self) -> LoaderState {
        self.start_state()
    }

    fn open(&self, state: LoaderState, share: Share) -> Result<Batches<HostBatch>, DataError> {
        self.clone().with_share(share).resume(state)
    }
}

/// The data of a run.
pub struct Data {
    /// The tokenizer, of texts.
    pub tokenizer: Option<Tokenizer>,
    /// Number of tokens; 0 for images.
    pub vocabulary: usize,
    /// Names of the classes; none for language models.
    pub classes: Vec<String>,
    /// Tokens of the corpus, of a stream of tokens.
    pub tokens: Option<usize>,
    /// The name of the units that a rate counts.
    pub unit: &'static str,
    /// What is prepared of each training batch.
    share: Share,
    train: Box<dyn Open>,
    evaluation: Option<Box<dyn Open>>,
}

impl Data {
    /// Opens the data of a new run on `device`. `prepared` is the run's own folder for prepared files;
    /// `pretrained` is the tokenizer of the weights that the run starts from; `way` is how the run began to
    /// set examples aside.
    ///
    /// # Errors
    ///
    /// As [`Data::open_prepared`].
    pub fn open(
        config: &Config,
        device: &KilnDevice,
        prepared: &Path,
        pretrained: Option<Tokenizer>,
        way: HeldOut,
    ) -> Result<Self, CliError> {
        Self::open_prepared(config, device, &Prepared::new(prepared), pretrained, way)
    }

    /// Opens the data of a run of which some is prepared.
    ///
    /// # Errors
    ///
    /// [`CliError::Data`], [`CliError::Hub`], or [`CliError::Usage`] if the config lacks something its source
    /// needs, or the data is not that with which the run began.
    pub fn open_prepared(
        config: &Config,
        device: &KilnDevice,
        prepared: &Prepared,
        pretrained: Option<Tokenizer>,
        way: HeldOut,
    ) -> Result<Self, CliError> {
        let data = match config.data.source {
            DataSource::Text => text(config, prepared, pretrained),
            DataSource::Passages | DataSource::Table => labelled_texts(config, prepared, pretrained, way),
            DataSource::Shapes | DataSource::Images | DataSource::Cifar10 | DataSource::Cifar100 => {
                images::open(config, device, way)
            }
        }?;
        prepared.classes(&data.classes)?;
        Ok(data)
    }

    /// Prepares of each training batch only the share of a rank.
    pub fn with_share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// The batches of the training, this rank's share of each, after `state` or from the start.
    ///
    /// # Errors
    ///
    /// [`CliError::Data`] if the state is of other data.
    pub fn train(&self, state: Option<LoaderState>) -> Result<Batches<HostBatch>, CliError> {
        let state = state.unwrap_or_else(|| self.train.start());
        Ok(self.train.open(state, self.share)?)
    }

    /// The batches of the evaluation, once; none if nothing is set aside.
    ///
    /// # Errors
    ///
    /// [`CliError::Data`].
    pub fn evaluation(&self) -> Result<Option<Batches<HostBatch>>, CliError> {
        Ok(self
            .evaluation
            .as_ref()
            .map(|loader| loader.open(loader.start(), Share::WHOLE))
            .transpose()?)
    }
}

/// The tokenizer of the weights that a run starts from; none if they have none.
///
/// # Errors
///
/// [`CliError::Hub`] if it is damaged.
pub fn pretrained_tokenizer(
    weights: Option<&Checkpoint>,
    family: Family,
) -> Result<Option<Tokenizer>, CliError> {
    match weights
        .filter(|_| family != Family::Vision)
        .map(Checkpoint::tokenizer)
    {
        None | Some(Err(HubError::MissingFile { .. })) => Ok(None),
        Some(tokenizer) => Ok(Some(tokenizer?)),
    }
}

/// Threads that decode and augment images: a few where the step runs on a GPU, and one beside a step that
/// needs the cores.
fn threads(config: &Config) -> usize {
    let is_on_gpu = config.train.device.starts_with("cuda");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    match (is_on_gpu, config.data.source) {
        (true, DataSource::Images) => cores.min(MOST_THREADS),
        _ => 1,
    }
}

/// Loaders for training and evaluation with one way to make batches.
fn loaders<D: Dataset, C: Collate<D::Item, Batch = HostBatch>>(
    config: &Config,
    train: D,
    evaluation: Option<D>,
    collate: impl Fn() -> C,
) -> (Box<dyn Open>, Option<Box<dyn Open>>) {
    let size = config.train.batch_size;
    let threads = threads(config);
    let train = Loader::new(train, collate(), size).with_seed(config.seed);
    let train: Box<dyn Open> = Box::new(train.with_threads(threads));
    let evaluation = evaluation
        .filter(|dataset| !dataset.is_empty())
        .map(|dataset| -> Box<dyn Open> {
            // Shuffled, and always in the same order: the first batches stand for all examples, whatever the
            // order of the files. The last batch may be smaller, which is a second shape to compile; it is
            // reached by an evaluation of all examples only.
            let loader = Loader::evaluation(dataset, collate(), size).with_shuffle(true);
            Box::new(loader.with_threads(threads))
        });
    (train, evaluation)
}

/// How the examples that are set aside for evaluation are chosen. A run keeps the way in which it began: with
/// another one it would be evaluated on what it was trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeldOut {
    /// Every n-th. The way of checkpoints that do not say.
    #[default]
    EveryNth,
    /// As many as the fraction says, at random, whatever the order of the examples. The way of new runs.
    Random,
}

/// Chooses the examples that are set aside. The same whatever the seed of a run, so that evaluations compare.
const HELD_OUT_SEED: u64 = 0x6865_6c64;

/// The examples set aside of a dataset, or all others.
struct Part<D> {
    dataset: std::sync::Arc<D>,
    indices: Vec<usize>,
}

impl<D: Dataset> Part<D> {
    /// Training and evaluation parts of one dataset.
    fn split(dataset: D, fraction: f64, way: HeldOut) -> (Self, Option<Self>) {
        let dataset = std::sync::Arc::new(dataset);
        let is_held_out = held_out(dataset.len(), fraction, way);
        let part = |evaluation: bool| Self {
            dataset: dataset.clone(),
            indices: (0..dataset.len())
                .filter(|index| is_held_out[*index] == evaluation)
                .collect(),
        };
        (part(false), Some(part(true)))
    }

    fn whole(dataset: D) -> Self {
        let indices = (0..dataset.len()).collect();
        Self {
            dataset: std::sync::Arc::new(dataset),
            indices,
        }
    }
}

impl<D: Dataset> Dataset for Part<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn item(&self, index: usize, rng: &mut Rng) -> Result<D::Item, DataError> {
        self.dataset.item(self.indices[index], rng)
    }

    fn contents(&self) -> u64 {
        self.dataset.contents()
    }
}

/// Which of `count` examples are set aside. At least one is left for the training.
fn held_out(count: usize, fraction: f64, way: HeldOut) -> Vec<bool> {
    if way == HeldOut::EveryNth {
        let every = if fraction > 0.0 {
            (1.0 / fraction).round().max(2.0) as usize
        } else {
            usize::MAX
        };
        return (0..count).map(|index| index % every == every - 1).collect();
    }
    let mut order: Vec<usize> = (0..count).collect();
    Rng::at(&[HELD_OUT_SEED]).shuffle(&mut order);
    let out = ((count as f64 * fraction).round() as usize).min(count.saturating_sub(1));
    let mut is_held_out = vec![false; count];
    for &index in &order[..out] {
        is_held_out[index] = true;
    }
    is_held_out
}

/// The paths of the config, which must have some.
fn paths<'a>(config: &'a DataConfig, what: &str) -> Result<&'a [PathBuf], CliError> {
    match config.paths.as_slice() {
        [] => Err(CliError::Usage(format!(
            "data.paths is empty; data.source = {:?} needs {what}",
            config.source
        ))),
        paths => Ok(paths),
    }
}

fn path<'a>(config: &'a DataConfig, what: &str) -> Result<&'a Path, CliError> {
    match paths(config, what)? {
        [path] => Ok(path),
        _ => Err(CliError::Usage(format!(
            "data.paths has several entries; data.source = {:?} takes {what}",
            config.source
        ))),
    }
}

/// The tokenizer of the run: that of its checkpoint or the one it began with, else the config's, else that of
/// the weights. Weights of a language model have no use for a new one.
fn tokenizer(
    config: &Config,
    prepared: &Prepared,
    pretrained: Option<Tokenizer>,
    texts: impl FnOnce() -> Result<Corpus, CliError>,
) -> Result<Tokenizer, CliError> {
    if let Some(tokenizer) = prepared.tokenizer()? {
        return Ok(tokenizer);
    }
    let weights = config.model.weights.as_deref();
    let config = &config.data;
    let tokenizer = match (config.tokenizer.as_deref(), pretrained) {
        (None, Some(tokenizer)) => tokenizer,
        (None, None) if weights.is_some() => {
            let weights = weights.unwrap_or_default();
            return Err(CliError::Usage(format!(
                "{weights} has no tokenizer.json, and its embeddings mean nothing with another tokenizer: set \
                 data.tokenizer to the path of the one it was trained with"
            )));
        }
        (Some(made @ ("bpe" | "bytes")), _) if weights.is_some() => {
            let weights = weights.unwrap_or_default();
            return Err(CliError::config(
                "data.tokenizer",
                format!(
                    "{made:?} makes a new tokenizer, with which the embeddings of model.weights = {weights:?} mean \
                     nothing: remove the key to use the tokenizer of the weights, or set it to the path of the \
                     tokenizer.json that they were trained with"
                ),
            ));
        }
        (None | Some("bpe"), _) => Tokenizer::train_bpe(texts()?.texts(), config.vocabulary)?,
        (Some("bytes"), _) => Tokenizer::bytes()?,
        (Some(path), _) => Tokenizer::open(path)?,
    };
    prepared.keep_tokenizer(&tokenizer)?;
    Ok(tokenizer)
}

/// A part of the text, and what helps if it is shorter than a window.
type Piece = (&'static str, &'static str);

const TRAINED: Piece = ("the text to train on", "add to data.paths, or lower data.length");
const SET_ASIDE: Piece = (
    "the part of the text that is set aside for evaluation",
    "raise data.evaluation_fraction, set it to 0 to evaluate nothing, or lower data.length",
);
const EVALUATED: Piece = (
    "the text of data.evaluation_paths",
    "add to data.evaluation_paths, or lower data.length",
);

fn windows(
    stream: &TokenStream,
    (from, to): (f64, f64),
    length: usize,
    (place, remedy): Piece,
) -> Result<TokenWindows, DataError> {
    stream.windows(length, from, to).map_err(|error| match error {
        DataError::Empty { reason, .. } => DataError::Empty {
            place: place.to_owned(),
            reason: format!("{reason}: {remedy}"),
        },
        error => error,
    })
}

fn text(config: &Config, prepared: &Prepared, pretrained: Option<Tokenizer>) -> Result<Data, CliError> {
    let data = &config.data;
    let read = |paths: &[PathBuf]| Corpus::read(paths, &of_any_size());
    let paths = paths(data, "text files or folders")?;
    let tokenizer = tokenizer(config, prepared, pretrained, || Ok(read(paths)?))?;
    let stream = |name: &'static str, paths: &[PathBuf]| -> Result<TokenStream, CliError> {
        prepared.stream(name, || Ok(TokenStream::encode(&read(paths)?, &tokenizer)?))
    };
    let whole = stream(prepared::TOKENS, paths)?;
    let (train, evaluation) = if data.evaluation_paths.is_empty() {
        let border = 1.0 - data.evaluation_fraction;
        let train = windows(&whole, (0.0, border), data.length, TRAINED)?;
        let evaluation = (data.evaluation_fraction > 0.0)
            .then(|| windows(&whole, (border, 1.0), data.length, SET_ASIDE))
            .transpose()?;
        (train, evaluation)
    } else {
        let other = stream(prepared::EVALUATION_TOKENS, &data.evaluation_paths)?;
        (
            windows(&whole, (0.0, 1.0), data.length, TRAINED)?,
            Some(windows(&other, (0.0, 1.0), data.length, EVALUATED)?),
        )
    };
    let collate = || |items: Vec<Vec<u32>>| WindowBatcher.collate(items).map(HostBatch::Windows);
    let (train, evaluation) = loaders(config, train, evaluation, collate);
    Ok(Data {
        vocabulary: tokenizer.vocabulary(),
        tokenizer: Some(tokenizer),
        classes: Vec::new(),
        tokens: Some(whole.len()),
        unit: "tokens",
        share: Share::WHOLE,
        train,
        evaluation,
    })
}

fn labelled_texts(
    config: &Config,
    prepared: &Prepared,
    pretrained: Option<Tokenizer>,
    way: HeldOut,
) -> Result<Data, CliError> {
    let data = &config.data;
    let (train, evaluation) = match data.source {
        DataSource::Passages => Part::split(
            passages(paths(data, "text files or folders")?)?,
            data.evaluation_fraction,
            way,
        ),
        _ => {
            let fields = TextFields::new(&data.text_field, &data.label_field);
            let train = table(path(data, "one JSONL or CSV file")?, &fields)?;
            match data.evaluation_paths.as_slice() {
                [] => Part::split(train, data.evaluation_fraction, way),
                [other, ..] => {
                    let fields = fields.with_classes(train.classes().to_vec());
                    let other = table(other, &fields)?;
                    (Part::whole(train), Some(Part::whole(other)))
                }
            }
        }
    };
    let classes = train.dataset.classes().to_vec();
    let texts = || {
        Ok(Corpus::from_texts(
            train
                .dataset
                .examples()
                .iter()
                .map(|example| example.text.clone()),
        ))
    };
    let tokenizer = tokenizer(config, prepared, pretrained, texts)?;
    let options = BatchOptions::new()
        .with_max_length(data.length)
        .with_padding(Padding::Fixed(data.length));
    let encoder = tokenizer.batch_encoder(&options)?;
    let collate = || {
        let batcher = TextBatcher::new(encoder.clone());
        move |items: Vec<TextExample>| batcher.collate(items).map(HostBatch::Texts)
    };
    let (train, evaluation) = loaders(config, train, evaluation, collate);
    Ok(Data {
        vocabulary: tokenizer.vocabulary(),
        tokenizer: Some(tokenizer),
        classes,
        tokens: None,
        unit: "texts",
        share: Share::WHOLE,
        train,
        evaluation,
    })
}

/// Texts of any size: what data.paths names is meant to be read.
fn of_any_size() -> CorpusOptions {
    CorpusOptions {
        max_file_bytes: u64::MAX,
        ..CorpusOptions::default()
    }
}

fn table(path: &Path, fields: &TextFields) -> Result<TextExamples, CliError> {
    let csv = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    Ok(if csv {
        TextExamples::from_csv(path, fields)?
    } else {
        TextExamples::from_jsonl(path, fields)?
    })
}

/// Bytes from which on a passage ends at the next line.
const PASSAGE: usize = 320;
/// Most passages of a class, so that the largest kind of file is not nearly all there is.
const PASSAGES_OF_A_CLASS: usize = 1500;
/// Kinds of files with fewer passages are no class.
const FEWEST_PASSAGES: usize = 24;

/// Passages of text files, labelled with the extension of their file.
fn passages(paths: &[PathBuf]) -> Result<TextExamples, CliError> {
    let corpus = Corpus::read(paths, &of_any_size())?;
    let mut kinds: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for document in corpus.documents() {
        let extension = document
            .path
            .extension()
            .unwrap_or_default()
            .to_string_lossy()
            .to_lowercase();
        let found = kinds.entry(extension).or_default();
        let mut passage = String::new();
        for line in document.text.lines().filter(|line| !line.trim().is_empty()) {
            passage.push_str(line);
            passage.push('\n');
            if passage.len() >= PASSAGE {
                found.push(std::mem::take(&mut passage));
            }
        }
    }
    kinds.retain(|_, found| found.len() >= FEWEST_PASSAGES);
    if kinds.len() < 2 {
        let found = kinds.into_keys().collect::<Vec<_>>().join(", ");
        return Err(CliError::Usage(format!(
            "passages of fewer than two kinds of files in data.paths (found: {found}); \
             a kind needs {FEWEST_PASSAGES} passages of {PASSAGE} bytes"
        )));
    }
    let classes: Vec<String> = kinds.keys().cloned().collect();
    let mut examples = Vec::new();
    for (label, found) in kinds.into_values().enumerate() {
        // Evenly over the files, if there are too many.
        let step = found.len().div_ceil(PASSAGES_OF_A_CLASS);
        examples.extend(found.into_iter().step_by(step).map(|text| TextExample {
            text,
            pair: None,
            label,
        }));
    }
    Ok(TextExamples::new(examples, classes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the order of the examples, those set aside are like all of them, and as many as asked for.
    #[test]
    fn what_is_set_aside_is_a_sample() {
        for fraction in [0.0, 0.05, 0.25, 0.4, 0.5, 0.75, 0.99] {
            for count in [1, 2, 10, 64, 400] {
                let chosen = held_out(count, fraction, HeldOut::Random);
                let expected = ((count as f64 * fraction).round() as usize).min(count - 1);
                assert_eq!(chosen.len(), count);
                assert_eq!(
                    chosen.iter().filter(|&&out| out).count(),
                    expected,
                    "{count} {fraction}"
                );
                assert_eq!(chosen, held_out(count, fraction, HeldOut::Random));
            }
        }
        // Labels that alternate: of both there are some.
        let chosen = held_out(64, 0.25, HeldOut::Random);
        let even = chosen.iter().step_by(2).filter(|&&out| out).count();
        assert!((4..=12).contains(&even), "{even} of 16");
    }

    /// The labels of the batches of an evaluation.
    fn evaluated(config: &Config) -> Vec<Vec<i32>> {
        let folder = tempfile::tempdir().unwrap();
        let cpu = KilnDevice::cpu();
        let data = Data::open(config, &cpu, folder.path(), None, HeldOut::Random).unwrap();
        let batches = data.evaluation().unwrap().unwrap();
        batches.map(|batch| batch.unwrap().labels().to_vec()).collect()
    }

    #[test]
    fn an_evaluation_has_all_examples_in_one_order_that_is_not_that_of_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let rows = |name: &str, count: usize| {
            let path = folder.path().join(name);
            let row = |row: usize| format!("t{row},{}\n", if row < count / 2 { "a" } else { "b" });
            std::fs::write(
                &path,
                format!("text,label\n{}", (0..count).map(row).collect::<String>()),
            )
            .unwrap();
            path
        };
        let text = format!(
            "[model]\nname = \"bert-minilm\"\n[data]\nsource = \"table\"\npaths = [{:?}]\n\
             evaluation_paths = [{:?}]\nvocabulary = 300\nlength = 8\n[train]\nbatch_size = 8\n",
            rows("train.csv", 16),
            rows("other.csv", 21)
        );
        let config = |seed: &str| Config::parse(&text, "x.toml", &[format!("seed={seed}")]).unwrap();
        let batches = evaluated(&config("0"));
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [8, 8, 5]);
        assert_eq!(batches.concat().iter().sum::<i32>(), 11);
        assert!(
            batches
                .iter()
                .all(|labels| labels.contains(&0) && labels.contains(&1)),
            "{batches:?}"
        );
        assert_eq!(evaluated(&config("5")), batches, "runs with other seeds compare");
    }

    #[test]
    fn a_run_of_an_earlier_version_keeps_its_examples() {
        let chosen = held_out(12, 0.25, HeldOut::EveryNth);
        let places: Vec<usize> = (0..12).filter(|&index| chosen[index]).collect();
        assert_eq!(places, [3, 7, 11]);
        assert!(!held_out(12, 0.0, HeldOut::EveryNth).contains(&true));
    }
}
