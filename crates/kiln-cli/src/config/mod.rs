//! The config of a run: a TOML file with the tables `model`, `data`, `optimizer`, `schedule`, `train`,
//! `distributed` and `sample`.
//!
//! Every key has a default except `model.name` and `data.source`. An unknown key is an error that names the
//! nearest known one, in the file as on the command line (`--set`), so that a misspelled key cannot cause a
//! run of three days with the default. The config that a run really used, with every change of the command
//! line, is written into the run's folder and read back by `--resume`.

mod kept;
mod optimizer;
mod schedule;

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use kiln::Buckets;
use kiln_models::llama::GenerateConfig;
use serde::{Deserialize, Serialize};

use crate::error::{CliError, nearest};
pub(crate) use kept::PREPARED;
pub use kept::{Difference, Kept};
pub use optimizer::{OptimizerConfig, OptimizerName};
pub use schedule::{ScheduleConfig, ScheduleKind};

/// A whole config.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the run; `runs/NAME` is its default folder.
    #[serde(default = "default_name")]
    pub name: String,
    /// Seed of initial weights, order of the data, and dropout.
    #[serde(default)]
    pub seed: u64,
    /// The model.
    pub model: ModelConfig,
    /// The data.
    pub data: DataConfig,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// The learning rate over time.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// The loop.
    #[serde(default)]
    pub train: TrainConfig,
    /// Several ranks.
    #[serde(default)]
    pub distributed: DistributedConfig,
    /// The text printed at the end, for language models.
    #[serde(default)]
    pub sample: SampleConfig,
}

/// Which model, and what differs from its standard sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A Llama preset (`llama-tiny`, `llama-15m`, ...), `bert-base` or `bert-minilm`, or an image classifier
    /// of torchvision or timm.
    pub name: String,
    /// A checkpoint to start from: a folder, a file, or a repository of the Hugging Face hub. Its
    /// `config.json` then decides about sizes.
    pub weights: Option<String>,
    /// Parameters whose path begins with one of these are not trained.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Width of the residual stream (Llama, BERT).
    pub hidden_size: Option<usize>,
    /// Number of layers (Llama, BERT).
    pub layers: Option<usize>,
    /// Number of attention heads (Llama, BERT).
    pub heads: Option<usize>,
    /// Width inside of the feed-forward network (Llama, BERT).
    pub intermediate_size: Option<usize>,
    /// The output projection is the table of token embeddings (Llama).
    pub tie_embeddings: Option<bool>,
    /// Dropout of the hidden layers and attention weights (BERT), of the attention weights (Llama).
    pub dropout: Option<f64>,
}

/// The text of a setting without a value.
const UNSET: &str = "unset";

/// Where examples come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataSource {
    /// Text files and folders as one stream of tokens, for Llama.
    Text,
    /// Passages of text files, to be told apart by the extension of their file, for BERT.
    Passages,
    /// Labelled texts, JSONL or CSV, for BERT.
    Table,
    /// Drawn shapes with noise, for image classifiers.
    Shapes,
    /// A folder with one folder of images a class.
    Images,
    /// CIFAR-10 in binary form.
    Cifar10,
    /// CIFAR-100 in binary form.
    Cifar100,
}

/// Who decodes image files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decoding {
    /// The step's device, if it is a GPU with engines for JPEGs; else the host, and one warning says why.
    #[default]
    Auto,
    /// Threads of the host.
    Host,
    /// The step's device; an error if it cannot.
    Device,
}

/// The data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Where examples come from.
    pub source: DataSource,
    /// Files or folders, relative to where `kiln` is started. Links are followed.
    #[serde(default)]
    pub paths: Vec<PathBuf>,
    /// Files or folders of the evaluation; without them a part of `paths` is set aside where the source has
    /// no test set of its own. One for `table` and `images`, none for the sources that have their own.
    #[serde(default)]
    pub evaluation_paths: Vec<PathBuf>,
    /// Part of the examples set aside for evaluation: of a stream of tokens its end, else examples at random.
    #[serde(default = "default_evaluation_fraction")]
    pub evaluation_fraction: f64,
    /// `bpe` (trained on the data), `bytes`, or the path of a `tokenizer.json`; that of `model.weights` if
    /// absent and there are weights, else `bpe`. With weights it is absent or a path.
    pub tokenizer: Option<String>,
    /// Size of a trained vocabulary.
    #[serde(default = "default_vocabulary")]
    pub vocabulary: usize,
    /// Tokens in an example.
    #[serde(default = "default_length")]
    pub length: usize,
    /// Pixels a side of an image.
    #[serde(default = "default_image_size")]
    pub image_size: usize,
    /// Number of drawn pictures.
    #[serde(default = "default_examples")]
    pub examples: usize,
    /// Whether images are cropped and mirrored at random in training.
    #[serde(default = "default_true")]
    pub augment: bool,
    /// Who decodes the files of `source = "images"`: `auto`, `host` or `device`.
    #[serde(default)]
    pub decoding: Decoding,
    /// Field of the text in a table.
    #[serde(default = "default_text_field")]
    pub text_field: String,
    /// Field of the label in a table.
    #[serde(default = "default_label_field")]
    pub label_field: String,
}

impl ModelConfig {
    /// The settings that a checkpoint fixes, as texts.
    fn settings(&self) -> [(&'static str, String); 8] {
        fn text<T: ToString>(value: Option<&T>) -> String {
            value.map_or_else(|| UNSET.to_owned(), T::to_string)
        }
        [
            ("model.name", self.name.clone()),
            ("model.weights", text(self.weights.as_ref())),
            ("model.hidden_size", text(self.hidden_size.as_ref())),
            ("model.layers", text(self.layers.as_ref())),
            ("model.heads", text(self.heads.as_ref())),
            ("model.intermediate_size", text(self.intermediate_size.as_ref())),
            ("model.tie_embeddings", text(self.tie_embeddings.as_ref())),
            ("model.dropout", text(self.dropout.as_ref())),
        ]
    }

    /// The settings that a checkpoint fixes, as texts by their key.
    pub fn fixed(&self) -> BTreeMap<String, String> {
        let settings = self.settings().into_iter();
        settings.map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// The first of these settings that is another one than `before`. Of `model.weights` it counts whether
    /// there are any: they are not read again, and may have moved.
    pub fn difference(&self, before: &BTreeMap<String, String>) -> Option<Difference> {
        let differ = |key: &str, before: &str, now: &str| match key {
            "model.weights" => (before == UNSET) != (now == UNSET),
            _ => before != now,
        };
        self.settings().into_iter().find_map(|(key, now)| {
            let before = before.get(key)?;
            differ(key, before, &now).then(|| Difference {
                key: key.to_owned(),
                before: before.clone(),
                now,
            })
        })
    }
}

impl DataConfig {
    /// Paths that would not be read.
    fn check(&self) -> Result<(), String> {
        let (most, reason) = match self.source {
            DataSource::Text => return Ok(()),
            DataSource::Table => (1, "one JSONL or CSV file is read"),
            DataSource::Images => (1, "one folder with the classes of data.paths is read"),
            DataSource::Passages => (0, "a part of the passages is set aside, data.evaluation_fraction"),
            DataSource::Shapes => (
                0,
                "other pictures are drawn, data.evaluation_fraction says how many",
            ),
            DataSource::Cifar10 | DataSource::Cifar100 => (0, "its test set is in the folder of data.paths"),
        };
        let paths = self.evaluation_paths.len();
        if paths > most {
            let name = serde_json::to_string(&self.source).unwrap_or_default();
            return Err(format!(
                "data.evaluation_paths has {paths} entries, but data.source = {name} takes {}: {reason}",
                if most == 0 { "none" } else { "at most one" }
            ));
        }
        Ok(())
    }
}

/// The loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: u64,
    /// Examples in a batch.
    pub batch_size: usize,
    /// Batches whose gradients one optimizer step averages.
    pub accumulate: usize,
    /// The backend of the step.
    pub backend: String,
    /// The device of the step: `cpu`, `cuda` or `cuda:ORDINAL`.
    pub device: String,
    /// Whether products of f32 on a GPU may round their operands to 10 bits of fraction.
    pub tf32: bool,
    /// Mixed precision: the type that products, convolutions and attention read, `bf16` or `f16`; `none` is
    /// f32.
    pub autocast: String,
    /// How parameters are stored: `f32`, `bf16`, `f16`, `bf16+master` or `f16+master`. With a master the
    /// parameters are `f32`, and loss and gradients are computed from 16 bits that the update writes.
    pub weights: String,
    /// Bound in MiB of what a step may allocate beyond parameters, state and inputs; 0 is none.
    pub memory_budget_mb: usize,
    /// Steps between lines on a screen that is no terminal.
    pub log_every: u64,
    /// Steps between evaluations; 0 evaluates at the end only.
    pub evaluate_every: u64,
    /// Most batches of an evaluation, the same at random each time.
    pub evaluation_batches: usize,
    /// Steps between checkpoints; 0 saves at the end only.
    pub checkpoint_every: u64,
    /// Minutes between checkpoints, whatever their number of steps; 0 switches this off, and so does `inf`.
    pub checkpoint_minutes: f64,
    /// Checkpoints kept, the newest.
    pub keep: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch_size: 8,
            accumulate: 1,
            backend: "cpu".to_owned(),
            device: "cpu".to_owned(),
            tf32: false,
            autocast: "none".to_owned(),
            weights: "f32".to_owned(),
            memory_budget_mb: 0,
            log_every: 10,
            evaluate_every: 0,
            evaluation_batches: 16,
            checkpoint_every: 0,
            checkpoint_minutes: 10.0,
            keep: 2,
        }
    }
}

/// More examples, batches or tokens than any memory holds at once.
const MOST: usize = 1 << 24;
/// Sides of pictures have 16 bits.
const LARGEST_SIDE: usize = 65535;

/// A month, in seconds: who waits longer for another rank waits for nothing.
const LONGEST_WAIT: f64 = 2_678_400.0;

/// Several ranks: processes that `mpirun` or `srun` starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DistributedConfig {
    /// How long a rank waits for another one.
    pub timeout_seconds: f64,
    /// The most megabytes (of 2^20 bytes) of gradients that travel together; 0 for a size that follows from
    /// the link between the ranks.
    pub bucket_mb: f64,
    /// The same for the first ones, which are to travel early; 0 for a twenty-fifth of `bucket_mb`.
    pub first_bucket_mb: f64,
    /// Whether the ranks divide the optimizer's state among them.
    pub sharded_state: bool,
    /// Whether batch norm looks at the examples of all ranks.
    pub synchronised_batch_norm: bool,
}

impl Default for DistributedConfig {
    fn default() -> Self {
        Self {
            timeout_seconds: 60.0,
            bucket_mb: 0.0,
            first_bucket_mb: 0.0,
            sharded_state: false,
            synchronised_batch_norm: false,
        }
    }
}

impl DistributedConfig {
    /// The bucket sizes that the config asks for, if it does.
    pub fn buckets(&self) -> Option<Buckets> {
        let bytes = |megabytes: f64| (megabytes * f64::from(1 << 20)) as usize;
        let asked = (self.bucket_mb > 0.0).then(|| Buckets::with_others(bytes(self.bucket_mb)));
        match self.first_bucket_mb > 0.0 {
            false => asked,
            true => Some(Buckets {
                first: bytes(self.first_bucket_mb),
                ..asked.unwrap_or_default()
            }),
        }
    }
}

/// The text printed at the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SampleConfig {
    /// The text that the model continues.
    pub prompt: String,
    /// Tokens to add; 0 prints none.
    pub tokens: usize,
    /// Below 1 sharper, above 1 flatter, 0 always the likeliest token.
    pub temperature: f64,
    /// Draw from the k likeliest tokens only.
    pub top_k: Option<usize>,
}

impl SampleConfig {
    /// How the text is generated, up to one of `stop_tokens`.
    pub fn generation(&self, stop_tokens: Vec<u32>) -> GenerateConfig {
        GenerateConfig {
            max_new_tokens: self.tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: None,
            stop_tokens,
            seed: 0,
        }
    }
}

impl Default for SampleConfig {
    fn default() -> Self {
        Self {
            prompt: "The ".to_owned(),
            tokens: 96,
            temperature: 0.8,
            top_k: Some(40),
        }
    }
}

fn default_name() -> String {
    "run".to_owned()
}

fn default_evaluation_fraction() -> f64 {
    0.05
}

fn default_vocabulary() -> usize {
    2048
}

fn default_length() -> usize {
    128
}

fn default_image_size() -> usize {
    32
}

fn default_examples() -> usize {
    4096
}

fn default_true() -> bool {
    true
}

fn default_text_field() -> String {
    "text".to_owned()
}

fn default_label_field() -> String {
    "label".to_owned()
}

impl Config {
    /// Reads a config and applies `--set` arguments, each `key=value` with a dotted key.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`], or [`CliError::Config`] with the line and the nearest known key.
    pub fn read(path: &Path, set: &[String]) -> Result<Self, CliError> {
        let text = std::fs::read_to_string(path).map_err(CliError::io("read the config", path))?;
        Self::parse(&text, &path.display().to_string(), set)
    }

    /// Parses the text of a config; `place` is for errors. See [`Config::read`].
    ///
    /// # Errors
    ///
    /// [`CliError::Config`].
    pub fn parse(text: &str, place: &str, set: &[String]) -> Result<Self, CliError> {
        // The text is parsed first, because its errors have lines.
        let mut config: Self = toml::from_str(text)
            .map_err(|error| CliError::config(place, explain(error.message(), &error.to_string())))?;
        if !set.is_empty() {
            let mut table: toml::Table =
                toml::from_str(text).map_err(|error| CliError::config(place, error))?;
            for assignment in set {
                assign(&mut table, assignment)?;
            }
            config = table.try_into().map_err(|error: toml::de::Error| {
                let message = explain(error.message(), error.message());
                CliError::config(format!("--set {}", set.join(" --set ")), message)
            })?;
        }
        config.check().map_err(|reason| CliError::config(place, reason))?;
        Ok(config)
    }

    /// The config as TOML.
    ///
    /// # Errors
    ///
    /// [`CliError::Config`] if a number is too large for TOML.
    pub fn to_toml(&self) -> Result<String, CliError> {
        toml::to_string(self).map_err(|error| CliError::config("the config", error))
    }

    /// Numbers that no run can have.
    fn check(&self) -> Result<(), String> {
        if !is_inside(&self.name) {
            return Err(format!(
                "name is {:?}; it must be that of a folder in runs: not empty, without `..`, and no whole path",
                self.name
            ));
        }
        let positive = [
            ("train.batch_size", self.train.batch_size),
            ("train.accumulate", self.train.accumulate),
            ("train.keep", self.train.keep),
            ("data.length", self.data.length),
            ("data.image_size", self.data.image_size),
        ];
        if let Some((key, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return Err(format!("{key} is 0; it must be at least 1"));
        }
        let bounded = [
            ("train.batch_size", self.train.batch_size, MOST),
            ("train.accumulate", self.train.accumulate, MOST),
            ("data.length", self.data.length, MOST),
            ("data.vocabulary", self.data.vocabulary, MOST),
            ("data.examples", self.data.examples, MOST),
            ("data.image_size", self.data.image_size, LARGEST_SIDE),
        ];
        if let Some((key, value, most)) = bounded.into_iter().find(|&(_, value, most)| value > most) {
            return Err(format!("{key} is {value}; it must be at most {most}"));
        }
        if !(0.0..1.0).contains(&self.data.evaluation_fraction) {
            return Err(format!(
                "data.evaluation_fraction is {}; it must be at least 0 and below 1",
                self.data.evaluation_fraction
            ));
        }
        if self.train.log_every == 0 {
            return Err("train.log_every is 0; it must be at least 1".to_owned());
        }
        for (key, value) in [
            ("distributed.bucket_mb", self.distributed.bucket_mb),
            ("distributed.first_bucket_mb", self.distributed.first_bucket_mb),
        ] {
            if !(0.0..1e6).contains(&value) {
                return Err(format!(
                    "{key} is {value}; it must be at least 0 and below a million"
                ));
            }
        }
        let seconds = self.distributed.timeout_seconds;
        if !(seconds > 0.0 && seconds <= LONGEST_WAIT) {
            return Err(format!(
                "distributed.timeout_seconds is {seconds}; it must be above 0 and at most {LONGEST_WAIT}"
            ));
        }
        let minutes = self.train.checkpoint_minutes;
        if minutes.is_nan() || minutes < 0.0 {
            return Err(format!(
                "train.checkpoint_minutes is {minutes}; it must be at least 0, and 0 saves by steps only"
            ));
        }
        if self.train.memory_budget_mb.checked_mul(1 << 20).is_none() {
            return Err(format!(
                "train.memory_budget_mb is {}, more than there are addresses; 0 is no bound",
                self.train.memory_budget_mb
            ));
        }
        if let Err(error) = self.sample.generation(Vec::new()).validate() {
            return Err(format!("sample: {error}"));
        }
        self.data.check()?;
        self.optimizer.check()?;
        self.schedule.check()
    }
}

/// Whether a path leads from a folder to one inside of it.
fn is_inside(path: &str) -> bool {
    let mut parts = Path::new(path).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Writes one `key=value` into the table. The value is TOML; what is no TOML is a text.
fn assign(table: &mut toml::Table, assignment: &str) -> Result<(), CliError> {
    let usage = || {
        CliError::config(
            format!("--set {assignment}"),
            "expected key=value, as in train.batch_size=16",
        )
    };
    let (key, value) = assignment.split_once('=').ok_or_else(usage)?;
    let value = toml::from_str::<toml::Table>(&format!("value = {value}"))
        .ok()
        .and_then(|mut parsed| parsed.remove("value"))
        .unwrap_or_else(|| toml::Value::String(value.to_owned()));
    let (path, last) = key
        .rsplit_once('.')
        .map_or((None, key), |(path, last)| (Some(path), last));
    let mut at = table;
    for part in path.into_iter().flat_map(|path| path.split('.')) {
        let entry = at
            .entry(part)
            .or_insert_with(|| toml::Value::Table(toml::Table::new()));
        at = entry.as_table_mut().ok_or_else(usage)?;
    }
    if last.is_empty() {
        return Err(usage());
    }
    at.insert(last.to_owned(), value);
    Ok(())
}

/// Adds the nearest name to an error about an unknown one. The parser's message lists what it would have
/// accepted, in backticks after the name.
fn explain(message: &str, whole: &str) -> String {
    let whole = whole.trim_end();
    let mut names = message.split('`').skip(1).step_by(2);
    let unknown = message.contains("unknown field") || message.contains("unknown variant");
    match names
        .next()
        .filter(|_| unknown)
        .and_then(|name| nearest(name, names))
    {
        Some(near) => format!("{whole}\n  did you mean `{near}`?"),
        None => whole.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str =
        "[model]\nname = \"llama-tiny\"\n[data]\nsource = \"text\"\npaths = [\"README.md\"]\n";

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let text = format!("{SMALL}[train]\nbatchsize = 3\n");
        let error = Config::parse(&text, "x.toml", &[]).unwrap_err().to_string();
        assert!(
            error.contains("did you mean `batch_size`") && error.contains("line 7"),
            "{error}"
        );
        let error = Config::parse(SMALL, "x.toml", &["optimizer.clipnorm=1".into()])
            .unwrap_err()
            .to_string();
        assert!(error.contains("did you mean `clip_norm`"), "{error}");
        let error = Config::parse(SMALL, "x.toml", &["schedule.kind=cosin".into()])
            .unwrap_err()
            .to_string();
        assert!(error.contains("did you mean `cosine`"), "{error}");
    }

    #[test]
    fn values_that_no_run_can_have_name_their_key() {
        let error = |set: &str| {
            Config::parse(SMALL, "x.toml", &[set.into()])
                .unwrap_err()
                .to_string()
        };
        for (key, values) in [
            ("name", ["", "..", "a/../..", "/a"].as_slice()),
            ("data.vocabulary", &["1000000000000", "9000000000000000000"]),
            ("data.examples", &["1000000000000"]),
            (
                "distributed.timeout_seconds",
                &["0.0", "-1.0", "1e19", "inf", "nan"],
            ),
        ] {
            for value in values {
                let error = error(&format!("{key}={value}"));
                assert!(error.contains(&format!("{key} is ")), "{key}={value}: {error}");
            }
        }
        for set in ["name=a/b", "name=..a", "distributed.timeout_seconds=86400.0"] {
            assert!(Config::parse(SMALL, "x.toml", &[set.into()]).is_ok(), "{set}");
        }
    }

    #[test]
    fn set_replaces_values_of_every_type() {
        let set = [
            "train.batch_size=3",
            "model.name=llama-15m",
            "data.paths=[\"a\", \"b\"]",
            "sample.prompt=a b",
        ];
        let config = Config::parse(SMALL, "x.toml", &set.map(String::from)).unwrap();
        assert_eq!(
            (config.train.batch_size, config.model.name.as_str()),
            (3, "llama-15m")
        );
        assert_eq!(config.data.paths, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!(config.sample.prompt, "a b");
        assert!(Config::parse(SMALL, "x.toml", &["train".into()]).is_err());
        assert!(Config::parse(SMALL, "x.toml", &["train.batch_size=0".into()]).is_err());
    }

    #[test]
    fn numbers_that_no_run_can_have_are_refused() {
        let error = |set: &str| {
            let parsed = Config::parse(SMALL, "x.toml", &[set.to_owned()]);
            parsed.expect_err(set).to_string()
        };
        for set in [
            "train.checkpoint_minutes=-1.0",
            "train.checkpoint_minutes=nan",
            "train.accumulate=1000000000000000000",
            "train.batch_size=1000000000000000000",
            "train.memory_budget_mb=17592186044416",
            "data.length=1000000000000000000",
            "data.image_size=65536",
            "optimizer.clip_norm=-1.0",
            "optimizer.clip_norm=nan",
            "optimizer.clip_norm=inf",
            "optimizer.clip_value=-1.0",
            "optimizer.weight_decay=-0.1",
            "optimizer.weight_decay=nan",
            "optimizer.epsilon=-1e-8",
            "optimizer.momentum=-0.9",
            "sample.temperature=-1.0",
            "sample.top_k=0",
        ] {
            let (key, _) = set.split_once('=').unwrap();
            let key = key.strip_prefix("sample.").unwrap_or(key);
            let error = error(set);
            assert!(error.contains(key) && error.contains(" is "), "{set}: {error}");
        }
        for set in [
            "train.checkpoint_minutes=inf",
            "train.checkpoint_minutes=1e300",
            "train.memory_budget_mb=17592186044415",
            "optimizer.clip_norm=0.0",
            "optimizer.weight_decay=0.0",
        ] {
            let parsed = Config::parse(SMALL, "x.toml", &[set.to_owned()]);
            assert!(parsed.is_ok(), "{set}: {parsed:?}");
        }
    }

    #[test]
    fn evaluation_paths_that_would_not_be_read_are_refused() {
        let check = |source: &str, paths: &str| {
            let set = [
                format!("data.source=\"{source}\""),
                format!("data.evaluation_paths={paths}"),
            ];
            Config::parse(SMALL, "x.toml", &set).map(drop)
        };
        for (source, one, several) in [
            ("text", true, true),
            ("table", true, false),
            ("images", true, false),
            ("passages", false, false),
            ("shapes", false, false),
            ("cifar10", false, false),
            ("cifar100", false, false),
        ] {
            assert!(check(source, "[]").is_ok());
            for (paths, taken) in [("[\"a\"]", one), ("[\"a\", \"b\"]", several)] {
                let checked = check(source, paths);
                assert_eq!(checked.is_ok(), taken, "{source} {paths}: {checked:?}");
                let told = |error: CliError| {
                    let error = error.to_string();
                    error.contains("data.evaluation_paths") && error.contains(&format!("\"{source}\""))
                };
                assert!(checked.err().is_none_or(told), "{source} {paths}");
            }
        }
    }

    #[test]
    fn weights_that_have_moved_are_no_other_model() {
        let model = |set: &[&str]| {
            let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
            Config::parse(SMALL, "x.toml", &set).unwrap().model
        };
        let before = model(&["model.weights=here", "model.dropout=0.1"]).fixed();
        let differ = |set: &[&str]| model(set).difference(&before).map(|found| found.key);
        assert_eq!(differ(&["model.weights=there", "model.dropout=0.1"]), None);
        assert_eq!(differ(&["model.dropout=0.1"]).as_deref(), Some("model.weights"));
        assert_eq!(differ(&["model.weights=here"]).as_deref(), Some("model.dropout"));
    }

    #[test]
    fn what_a_run_writes_reads_back() {
        let config = Config::parse(SMALL, "x.toml", &["model.dropout=0.1".into()]).unwrap();
        assert_eq!(
            Config::parse(&config.to_toml().unwrap(), "x.toml", &[]).unwrap(),
            config
        );
    }
}
