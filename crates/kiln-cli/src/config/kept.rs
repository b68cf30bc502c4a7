//! The settings by which a run prepares files of its data once and keeps them.
//!
//! They stand beside these files, in `data/prepared.json`. The config of the run does not answer for the
//! files: a user may edit it, and it is read by a later version that may not understand it.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_hub::write_bytes_atomic;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Config, DataSource, UNSET};
use crate::error::CliError;

/// The file with the settings.
pub(crate) const PREPARED: &str = "prepared.json";

/// Values of settings by their key. Only those that decide about a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kept(BTreeMap<String, Value>);

/// A setting with two values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its key.
    pub key: String,
    /// Its value before.
    pub before: String,
    /// Its value now.
    pub now: String,
}

impl Config {
    /// The settings by which a run of this config prepares files.
    pub fn kept(&self) -> Kept {
        let data = &self.data;
        let mut kept = BTreeMap::new();
        let mut keep = |key: &str, value: Value| kept.insert(key.to_owned(), value);
        let paths = |paths: &[std::path::PathBuf]| {
            let paths = paths.iter().map(|path| path.to_string_lossy().into_owned());
            Value::from_iter(paths)
        };
        match data.source {
            DataSource::Text => {
                keep("data.paths", paths(&data.paths));
                keep("data.evaluation_paths", paths(&data.evaluation_paths));
            }
            DataSource::Passages | DataSource::Table => {}
            DataSource::Shapes | DataSource::Images | DataSource::Cifar10 | DataSource::Cifar100 => {
                return Kept::default();
            }
        }
        match data.tokenizer.as_deref() {
            None if self.model.weights.is_some() => {
                keep("data.tokenizer", Value::Null);
            }
            None | Some("bpe") => {
                keep("data.tokenizer", "bpe".into());
                keep("data.vocabulary", data.vocabulary.into());
            }
            Some(other) => {
                keep("data.tokenizer", other.into());
            }
        }
        Kept(kept)
    }
}

impl Kept {
    /// The settings of the files in `prepared`; none if nobody wrote them there.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`], or [`CliError::Config`] if they are damaged.
    pub fn read(prepared: &Path) -> Result<Option<Self>, CliError> {
        let path = prepared.join(PREPARED);
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| {
                CliError::config(
                    path.display(),
                    format!("{error}; remove this file, and the run's config is asked instead"),
                )
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CliError::io("read", &path)(error)),
        }
    }

    /// Writes the settings beside the files in `prepared`, if they decide about any: before the files are
    /// made.
    ///
    /// # Errors
    ///
    /// [`CliError::Hub`].
    pub fn save(&self, prepared: &Path) -> Result<(), CliError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let path = prepared.join(PREPARED);
        let json =
            serde_json::to_vec_pretty(self).map_err(|error| CliError::config(path.display(), error))?;
        Ok(write_bytes_atomic(&path, &json)?)
    }

    /// The first setting that is another one `now`, among those of files that `is_kept` knows.
    pub fn difference(&self, now: &Self, is_kept: impl Fn(&str) -> bool) -> Option<Difference> {
        let text = |value: &Value| match value {
            Value::Null => UNSET.to_owned(),
            value => value.to_string(),
        };
        let found = self.differences(now).find(|&(key, ..)| {
            let is_trained = key == "data.paths" && self.trains_tokenizer();
            is_kept(file_of(key)) || (is_trained && is_kept(TOKENIZER))
        });
        found.map(|(key, before, now)| Difference {
            key: key.to_owned(),
            before: text(before),
            now: text(now),
        })
    }

    /// The encoded files of these settings that are of other texts than those of `now`.
    pub fn stale(&self, now: &Self) -> Vec<&'static str> {
        let files = self.differences(now).map(|(key, ..)| file_of(key));
        files.filter(|&file| file != TOKENIZER).collect()
    }

    /// The settings that are others `now`, with both values.
    fn differences<'a>(&'a self, now: &'a Self) -> impl Iterator<Item = (&'a str, &'a Value, &'a Value)> {
        now.0.iter().filter_map(|(key, now)| {
            let before = self.0.get(key)?;
            (before != now).then_some((key.as_str(), before, now))
        })
    }

    /// Whether the tokenizer is made of the texts of `data.paths`.
    fn trains_tokenizer(&self) -> bool {
        self.0.get("data.tokenizer").is_some_and(|made| made == "bpe")
    }
}

/// The file of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// The file that a setting decides about.
fn file_of(key: &str) -> &'static str {
    match key {
        "data.paths" => "tokens.bin",
        "data.evaluation_paths" => "evaluation-tokens.bin",
        _ => TOKENIZER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(set: &[&str]) -> Kept {
        let text = "[model]\nname = \"llama-tiny\"\n[data]\nsource = \"text\"\npaths = [\"a\"]\n";
        let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
        Config::parse(text, "x.toml", &set).unwrap().kept()
    }

    #[test]
    fn a_vocabulary_counts_where_one_is_trained() {
        let differ = |set: &[&str]| {
            let larger = kept(&[set, &["data.vocabulary=4096"]].concat());
            kept(set).difference(&larger, |_| true)
        };
        let found = differ(&[]).unwrap();
        assert_eq!(
            [&*found.key, &*found.before, &*found.now],
            ["data.vocabulary", "2048", "4096"]
        );
        assert!(differ(&["data.tokenizer=bpe"]).is_some());
        for set in [
            "data.tokenizer=bytes",
            "data.tokenizer=tokenizer.json",
            "model.weights=llama",
        ] {
            assert_eq!(differ(&[set]), None, "{set}");
        }
        assert_eq!(kept(&[]), kept(&["data.tokenizer=bpe"]), "the default");
    }

    #[test]
    fn settings_count_once_their_file_is_there() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Kept::read(folder.path()).unwrap(), None);
        kept(&[]).save(folder.path()).unwrap();
        let saved = Kept::read(folder.path()).unwrap().unwrap();
        let now = kept(&["data.paths=[\"b\"]", "data.tokenizer=bytes"]);
        let first = |there: &'static [&'static str]| saved.difference(&now, |file| there.contains(&file));
        assert_eq!(first(&["evaluation-tokens.bin"]), None);
        let bytes = kept(&["data.tokenizer=bytes"]);
        let found = saved.difference(&bytes, |file| file == TOKENIZER).unwrap();
        assert_eq!(found.key, "data.tokenizer");
        let paths = first(&["tokens.bin"]).unwrap();
        assert_eq!(saved.stale(&now), ["tokens.bin"]);
        assert_eq!((&*paths.before, &*paths.now), ("[\"a\"]", "[\"b\"]"));
        std::fs::write(folder.path().join(PREPARED), "{").unwrap();
        let error = Kept::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains(PREPARED) && error.contains("remove"), "{error}");
    }

    /// As where a run was killed while it encoded what it had trained a tokenizer on.
    #[test]
    fn a_trained_tokenizer_is_of_its_texts() {
        let differ = |set: &str| {
            let other = kept(&[set, "data.paths=[\"b\"]"]);
            kept(&[set]).difference(&other, |file| file == TOKENIZER)
        };
        assert_eq!(differ("data.tokenizer=bpe").unwrap().key, "data.paths");
        for set in ["data.tokenizer=bytes", "data.tokenizer=tokenizer.json"] {
            assert_eq!(differ(set), None, "{set}");
        }
    }
}
