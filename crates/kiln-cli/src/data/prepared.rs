//! What a run makes of its data once and keeps: tokenizer, encoded corpus, names of the classes.
//!
//! The files stand in the run's folder and are made before training. What a run has trained with stands in
//! its checkpoints too, as the tokenizer itself, the names of the classes and the number of tokens. A
//! checkpoint answers for them: files may be removed, and are then made again of data that may have changed
//! since.

use std::path::{Path, PathBuf};

use kiln_hub::data::TokenStream;
use kiln_hub::{Checkpoint, Tokenizer, write_bytes_atomic};

use super::pretrained_tokenizer;
use crate::config::{Config, Kept, PREPARED};
use crate::error::CliError;
use crate::model::Family;

/// The encoded corpus.
pub(super) const TOKENS: &str = "tokens.bin";
/// The encoded corpus of the evaluation.
pub(super) const EVALUATION_TOKENS: &str = "evaluation-tokens.bin";
const TOKENIZER: &str = "tokenizer.json";
const CLASSES: &str = "classes.json";
/// All of them, and the settings that they were made by.
const FILES: [&str; 5] = [TOKENS, EVALUATION_TOKENS, TOKENIZER, CLASSES, PREPARED];

/// The prepared files of a run, and what its checkpoint says about them.
#[derive(Debug)]
pub struct Prepared {
    folder: PathBuf,
    /// Whether what is missing is written.
    writes: bool,
    /// Files of other settings than the config's, which are passed over.
    stale: Vec<&'static str>,
    /// Of the checkpoint.
    tokenizer: Option<Tokenizer>,
    /// Of the checkpoint; empty if it does not say.
    classes: Vec<String>,
    /// Of the checkpoint.
    tokens: Option<usize>,
}

impl Prepared {
    /// The files in `folder` of a run that trains.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            writes: true,
            stale: Vec::new(),
            tokenizer: None,
            classes: Vec::new(),
            tokens: None,
        }
    }

    /// Removes the files in `folder`: those of a run that has not trained with them.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`].
    pub fn remove(folder: &Path) -> Result<(), CliError> {
        for path in FILES.map(|file| folder.join(file)) {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(CliError::io("remove", &path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Leaves the folder as it is: what is missing is made in memory, and so is what is not of these
    /// settings.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or [`CliError::Config`] if it cannot be told which settings the files are of.
    pub fn read_only(mut self, config: &Config) -> Result<Self, CliError> {
        self.writes = false;
        self.stale = Kept::read(&self.folder)?.map_or_else(Vec::new, |kept| kept.stale(&config.kept()));
        Ok(self)
    }

    /// With the names of the classes and the number of tokens that a checkpoint has.
    pub fn with_counts(mut self, classes: Vec<String>, tokens: Option<usize>) -> Self {
        (self.classes, self.tokens) = (classes, tokens);
        self
    }

    /// With the tokenizer beside the weights of a checkpoint, to which no other ids mean anything. One that
    /// is among the files must be the same.
    ///
    /// # Errors
    ///
    /// [`CliError::Tokenizer`] if it is another one; [`CliError::Hub`] if one of them is damaged.
    pub fn with_tokenizer_of(mut self, checkpoint: &Checkpoint, family: Family) -> Result<Self, CliError> {
        self.tokenizer = pretrained_tokenizer(Some(checkpoint), family)?;
        let kept = self.folder.join(TOKENIZER);
        if let Some(tokenizer) = &self.tokenizer
            && kept.exists()
            && !Tokenizer::open(&kept)?.is_same(tokenizer)?
        {
            return Err(CliError::Tokenizer {
                prepared: self.folder,
                checkpoint: checkpoint.folder().to_path_buf(),
            });
        }
        Ok(self)
    }

    /// The tokenizer that the run has.
    pub(super) fn tokenizer(&self) -> Result<Option<Tokenizer>, CliError> {
        let kept = self.folder.join(TOKENIZER);
        match &self.tokenizer {
            Some(tokenizer) => {
                if !kept.exists() {
                    self.keep_tokenizer(tokenizer)?;
                }
                Ok(Some(tokenizer.clone()))
            }
            None if kept.exists() => Ok(Some(Tokenizer::open(&kept)?)),
            None => Ok(None),
        }
    }

    /// Keeps a tokenizer.
    pub(super) fn keep_tokenizer(&self, tokenizer: &Tokenizer) -> Result<(), CliError> {
        if self.writes {
            tokenizer.save(self.create()?.join(TOKENIZER))?;
        }
        Ok(())
    }

    /// An encoded corpus, which `encode` makes if there is none.
    pub(super) fn stream(
        &self,
        name: &'static str,
        encode: impl FnOnce() -> Result<TokenStream, CliError>,
    ) -> Result<TokenStream, CliError> {
        let kept = self.folder.join(name);
        let is_kept = kept.exists() && !self.stale.contains(&name);
        let stream = match is_kept {
            true => TokenStream::open(&kept)?,
            false => encode()?,
        };
        // Texts of other settings are meant to be others.
        let before = self
            .tokens
            .filter(|_| name == TOKENS && !self.stale.contains(&name));
        if let Some(before) = before.filter(|&before| before != stream.len()) {
            let found = if is_kept {
                kept.display().to_string()
            } else {
                "data.paths".to_owned()
            };
            return Err(CliError::Usage(format!(
                "{found} has {} tokens, but the checkpoint was trained on {before}: restore the data as it was, or \
                 start another run",
                stream.len()
            )));
        }
        if is_kept || !self.writes {
            return Ok(stream);
        }
        self.create()?;
        stream.save(&kept)?;
        // From the file, which need not be in memory.
        Ok(TokenStream::open(&kept)?)
    }

    /// The classes of a run are those of its beginning: a class more or less would shift the labels of the
    /// others.
    pub(super) fn classes(&self, found: &[String]) -> Result<(), CliError> {
        let path = self.folder.join(CLASSES);
        let kept: Option<Vec<String>> = match std::fs::read(&path) {
            Ok(bytes) => {
                let kept = serde_json::from_slice(&bytes);
                Some(kept.map_err(|error| CliError::config(path.display(), error))?)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(CliError::io("read", &path)(error)),
        };
        let of_checkpoint = (!self.classes.is_empty()).then_some(&self.classes);
        if let Some(before) = of_checkpoint.or(kept.as_ref())
            && before != found
        {
            return Err(CliError::Usage(format!(
                "the data has the classes {}, but the run began with {}: restore the data, or start another run",
                found.join(", "),
                before.join(", ")
            )));
        }
        if self.writes && !found.is_empty() && kept.as_deref() != Some(found) {
            let json = serde_json::to_vec_pretty(found)
                .map_err(|error| CliError::Usage(format!("{}: {error}", path.display())))?;
            self.create()?;
            write_bytes_atomic(&path, &json)?;
        }
        Ok(())
    }

    /// The folder, which is there then.
    fn create(&self) -> Result<&Path, CliError> {
        std::fs::create_dir_all(&self.folder).map_err(CliError::io("create", &self.folder))?;
        Ok(&self.folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_checkpoint_answers_for_the_classes() {
        let folder = tempfile::tempdir().unwrap();
        let prepared = || Prepared::new(folder.path());
        prepared().classes(&names(&["a", "b"])).unwrap();
        let error = prepared().classes(&names(&["a", "c"])).unwrap_err().to_string();
        assert!(
            error.contains("classes a, c") && error.contains("began with a, b"),
            "{error}"
        );
        let of_checkpoint = || prepared().with_counts(names(&["a", "b"]), None);
        std::fs::remove_file(folder.path().join(CLASSES)).unwrap();
        assert!(of_checkpoint().classes(&names(&["a", "c"])).is_err());
        assert!(!folder.path().join(CLASSES).exists(), "nothing wrong is kept");
        of_checkpoint().classes(&names(&["a", "b"])).unwrap();
        assert!(folder.path().join(CLASSES).exists());
    }

    #[test]
    fn a_checkpoint_answers_for_the_number_of_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let encode = |count: u32| move || Ok(TokenStream::from_tokens((0..count).collect()));
        let prepared = || Prepared::new(folder.path()).with_counts(Vec::new(), Some(5));
        let error = prepared().stream(TOKENS, encode(6)).unwrap_err().to_string();
        assert!(
            error.contains("data.paths has 6 tokens") && error.contains("on 5"),
            "{error}"
        );
        assert!(!folder.path().join(TOKENS).exists(), "nothing wrong is kept");
        assert_eq!(prepared().stream(TOKENS, encode(5)).unwrap().len(), 5);
        assert_eq!(prepared().stream(EVALUATION_TOKENS, encode(7)).unwrap().len(), 7);
    }

    #[test]
    fn what_is_only_read_is_made_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let config = |paths: &str| {
            let text =
                format!("[model]\nname = \"llama-tiny\"\n[data]\nsource = \"text\"\npaths = [\"{paths}\"]\n");
            Config::parse(&text, "x.toml", &[]).unwrap()
        };
        let encode = |count: u32| move || Ok(TokenStream::from_tokens((0..count).collect()));
        config("a").kept().save(folder.path()).unwrap();
        Prepared::new(folder.path()).stream(TOKENS, encode(5)).unwrap();
        let read = |paths: &str, name| {
            let prepared = Prepared::new(folder.path()).with_counts(Vec::new(), Some(5));
            let prepared = prepared.read_only(&config(paths)).unwrap();
            prepared.stream(name, encode(7)).unwrap().len()
        };
        assert_eq!(read("a", TOKENS), 5);
        assert_eq!(read("b", TOKENS), 7, "other texts");
        assert_eq!(read("a", EVALUATION_TOKENS), 7);
        assert!(!folder.path().join(EVALUATION_TOKENS).exists());
    }
}
