//! A checkpoint: the tensors and side files of one saved model, wherever they lie.
//!
//! [`load`] turns a path or a repository's name into a [`Checkpoint`]. The checkpoint knows each tensor's
//! name, shape and element type, and reads a tensor when asked for it. It hides three layouts (one
//! safetensors file, several with an index, PyTorch archives) and two origins (a folder, the hub's cache).
//! Nothing about it is tied to a model: a [`KeyMap`](crate::KeyMap) defines what the names mean.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_tensor::{DType, TensorData};
use safetensors::tensor::Dtype;

use crate::config::Config;
use crate::convert::RawTensor;
use crate::error::HubError;
use crate::hub::{Hub, Snapshot};
use crate::mapped::{Entry, MappedFile};
use crate::names::{is_repository, join_checked};
use crate::pytorch::{self, OwnedTensor};
use crate::safetensors_file;
use crate::shards::ShardIndex;
use crate::tokenizer::Tokenizer;

/// Loads a checkpoint from a folder, a file, or a repository of the Hugging Face hub.
///
/// `repo_or_path` is, in this order: an existing folder with `model.safetensors` (or shards, or
/// `pytorch_model.bin`); an existing `.safetensors`, index or PyTorch file; the name of a repository,
/// `owner/name`. The hub is used as the environment says (`HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
/// `HF_ENDPOINT`, `HF_HUB_OFFLINE`); for more control see [`Hub`].
///
/// # Errors
/// [`HubError`]: not found, no access, offline, no weights, damaged files.
pub fn load(repo_or_path: impl AsRef<str>) -> Result<Checkpoint, HubError> {
    Hub::from_env().load(repo_or_path)
}

/// The weight files that are looked for, most preferred first.
const WEIGHTS: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// Files besides the weights that are fetched with a repository when it has them.
const SIDE_FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
];

/// An opened checkpoint. Cheap to open: tensors are read from the mapped files when asked for.
#[derive(Debug)]
pub struct Checkpoint {
    place: String,
    folder: PathBuf,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Slot>,
    code: Vec<String>,
}

#[derive(Debug)]
enum Slot {
    Mapped { file: usize, entry: Entry },
    Owned(OwnedTensor),
}

/// Shape and element type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Element type in the file.
    pub dtype: Dtype,
    /// Extent of each dimension.
    pub shape: Vec<usize>,
}

impl Hub {
    /// Loads a checkpoint as [`load`] does, with this hub's settings.
    ///
    /// # Errors
    /// See [`load`].
    pub fn load(&self, repo_or_path: impl AsRef<str>) -> Result<Checkpoint, HubError> {
        let name = repo_or_path.as_ref();
        let path = Path::new(name);
        if path.exists() {
            return Checkpoint::open(path);
        }
        if !is_repository(name) {
            return Err(HubError::NotFound {
                name: name.to_string(),
            });
        }
        let snapshot = self.snapshot(name)?;
        for file in SIDE_FILES {
            if snapshot.has(file) {
                snapshot.fetch(file)?;
            }
        }
        Checkpoint::from_source(&Source::Repository(&snapshot))
    }
}

/// Where files come from.
enum Source<'a> {
    Folder(&'a Path),
    Repository(&'a Snapshot<'a>),
}

impl Source<'_> {
    fn place(&self) -> String {
        match self {
            Source::Folder(path) => path.display().to_string(),
            Source::Repository(snapshot) => snapshot.place(),
        }
    }

    fn folder(&self) -> PathBuf {
        match self {
            Source::Folder(path) => path.to_path_buf(),
            Source::Repository(snapshot) => snapshot.folder().to_path_buf(),
        }
    }

    fn has(&self, file: &str) -> bool {
        match self {
            Source::Folder(path) => path.join(file).is_file(),
            Source::Repository(snapshot) => snapshot.has(file),
        }
    }

    /// The file's path, after downloading it if needed.
    fn fetch(&self, file: &str) -> Result<PathBuf, HubError> {
        match self {
            Source::Folder(folder) => {
                let path = join_checked(folder, file, &self.place())?;
                if path.is_file() {
                    Ok(path)
                } else {
                    Err(HubError::MissingFile {
                        place: self.place(),
                        file: file.to_string(),
                    })
                }
            }
            Source::Repository(snapshot) => snapshot.fetch(file),
        }
    }

    /// Safetensors files at the top, for folders whose one file has another name.
    fn lone_safetensors(&self) -> Option<String> {
        let names: Vec<String> = match self {
            Source::Folder(path) => std::fs::read_dir(path)
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect(),
            Source::Repository(snapshot) => snapshot.files().to_vec(),
        };
        let mut found = names
            .into_iter()
            .filter(|n| n.ends_with(".safetensors") && !n.contains('/'));
        let first = found.next()?;
        found.next().is_none().then_some(first)
    }
}

impl Checkpoint {
    /// Opens a local folder or file; never uses the network.
    ///
    /// # Errors
    /// [`HubError`]: no weights, damaged files.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, HubError> {
        let path = path.as_ref();
        if path.is_dir() {
            return Self::from_source(&Source::Folder(path));
        }
        let folder = path
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or_else(|| Path::new("."));
        let Some(file) = path.file_name().and_then(|name| name.to_str()) else {
            return Err(HubError::NotFound {
                name: path.display().to_string(),
            });
        };
        if !path.is_file() {
            return Err(HubError::NotFound {
                name: path.display().to_string(),
            });
        }
        Self::from_weights(&Source::Folder(folder), file, path.display().to_string())
    }

    fn from_source(source: &Source<'_>) -> Result<Self, HubError> {
        let chosen = WEIGHTS
            .iter()
            .find(|file| source.has(file))
            .map(|file| file.to_string());
        match (chosen.or_else(|| source.lone_safetensors()), source) {
            (Some(file), _) => Self::from_weights(source, &file, source.place()),
            // The repository may well have weights; the cache does not.
            (None, Source::Repository(snapshot)) if snapshot.is_offline() => {
                Err(snapshot.not_cached("the weight file"))
            }
            (None, _) => Err(HubError::NoWeights {
                place: source.place(),
                looked_for: WEIGHTS.join(", "),
            }),
        }
    }

    /// Opens one weight file, or all files of an index.
    fn from_weights(source: &Source<'_>, file: &str, place: String) -> Result<Self, HubError> {
        let mut checkpoint = Self {
            place,
            folder: source.folder(),
            files: vec![],
            tensors: BTreeMap::new(),
            code: vec![],
        };
        if file.ends_with(".index.json") {
            let index_path = source.fetch(file)?;
            let index = ShardIndex::read(&index_path)?;
            for shard in index.files() {
                checkpoint.add(&source.fetch(shard)?, |name| {
                    // A tensor that the index places elsewhere is not taken from here.
                    index.weight_map.get(name).is_none_or(|owner| owner == shard)
                })?;
            }
            checkpoint.check_complete(&index, &index_path)?;
        } else {
            checkpoint.add(&source.fetch(file)?, |_| true)?;
        }
        tracing::debug!(place = %checkpoint.place, tensors = checkpoint.tensors.len(), "checkpoint opened");
        Ok(checkpoint)
    }

    /// Adds the wanted tensors of one file.
    fn add(&mut self, path: &Path, wanted: impl Fn(&str) -> bool) -> Result<(), HubError> {
        let pickled = path
            .extension()
            .is_some_and(|ext| ["bin", "pt", "pth", "ckpt", "tar"].iter().any(|p| ext == *p));
        let (file, mapped, owned) = if pickled {
            let archive = pytorch::open(path)?;
            if !archive.code.is_empty() {
                kiln_log::warn!(
                    "{} holds code besides tensors ({}). None of it was run, here or ever; Python's `torch.load` with \
                     `weights_only=False` would run it, so do not open the file so",
                    path.display(),
                    archive.code.join(", ")
                );
            }
            self.code.extend(archive.code);
            (archive.file, archive.mapped, archive.owned)
        } else {
            let (file, tensors) = safetensors_file::open(path)?;
            (file, tensors, vec![])
        };
        let number = self.files.len();
        self.files.push(file);
        let mapped = mapped
            .into_iter()
            .map(|(name, entry)| (name, Slot::Mapped { file: number, entry }));
        let owned = owned
            .into_iter()
            .map(|(name, tensor)| (name, Slot::Owned(tensor)));
        self.tensors
            .extend(mapped.chain(owned).filter(|(name, _)| wanted(name)));
        Ok(())
    }

    /// Every tensor of the index must be in the file that the index names.
    fn check_complete(&self, index: &ShardIndex, path: &Path) -> Result<(), HubError> {
        let absent: Vec<String> = index
            .weight_map
            .iter()
            .filter(|(tensor, _)| !self.tensors.contains_key(*tensor))
            .map(|(tensor, file)| format!("{tensor} ({file})"))
            .collect();
        if absent.is_empty() {
            Ok(())
        } else {
            Err(HubError::index(
                path,
                format!("the shards lack {} tensors: {}", absent.len(), absent.join(", ")),
            ))
        }
    }

    /// Where the checkpoint comes from, for messages: a path or `owner/name@revision`.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The folder of the weights and side files; for a repository, its snapshot in the cache.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The weight files, in the order they were opened.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Descriptions of the code in the files: functions that a pickle would call in Python, programs in an
    /// archive. None of it is run; a warning has named it when the checkpoint was opened.
    pub fn code(&self) -> &[String] {
        &self.code
    }

    /// Shape and element type of a tensor.
    pub fn stored(&self, name: &str) -> Option<StoredTensor> {
        let slot = self.tensors.get(name)?;
        Some(match slot {
            Slot::Mapped { entry, .. } => StoredTensor {
                dtype: entry.dtype,
                shape: entry.shape.clone(),
            },
            Slot::Owned(tensor) => StoredTensor {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
            },
        })
    }

    /// Number of elements of all tensors together.
    pub fn num_elements(&self) -> usize {
        self.tensors
            .values()
            .map(|slot| match slot {
                Slot::Mapped { entry, .. } => entry.shape.iter().product::<usize>(),
                Slot::Owned(tensor) => tensor.shape.iter().product(),
            })
            .sum()
    }

    /// Reads a tensor in the type it is stored in.
    ///
    /// # Errors
    /// [`HubError::UnknownTensor`]; [`HubError::DType`] for types that Burn does not have.
    pub fn tensor(&self, name: &str) -> Result<TensorData, HubError> {
        self.raw(name)?.to_data()
    }

    /// Reads a float tensor as another float type (f64, f32, f16, bf16).
    ///
    /// # Errors
    /// [`HubError::UnknownTensor`]; [`HubError::DType`] if the tensor does not hold floats.
    pub fn tensor_as(&self, name: &str, dtype: DType) -> Result<TensorData, HubError> {
        self.raw(name)?.to_floats(dtype)
    }

    /// Whether two tensors have the same shape and the same values, floats of different types by their
    /// values.
    ///
    /// # Errors
    /// [`HubError::UnknownTensor`] if one of them does not exist.
    pub fn same(&self, name: &str, other: &str) -> Result<bool, HubError> {
        let (a, b) = (self.raw(name)?, self.raw(other)?);
        if a.shape != b.shape {
            return Ok(false);
        }
        if a.dtype == b.dtype {
            // PyTorch's files hold tied tensors as two views of one storage.
            return Ok(std::ptr::eq(a.bytes, b.bytes) || a.bytes == b.bytes);
        }
        Ok(match (a.to_floats(DType::F64), b.to_floats(DType::F64)) {
            (Ok(a), Ok(b)) => a.as_bytes() == b.as_bytes(),
            _ => false,
        })
    }

    pub(crate) fn raw(&self, name: &str) -> Result<RawTensor<'_>, HubError> {
        let Some((name, slot)) = self.tensors.get_key_value(name) else {
            return Err(HubError::UnknownTensor {
                place: self.place.clone(),
                name: name.to_string(),
            });
        };
        Ok(match slot {
            Slot::Mapped { file, entry } => RawTensor {
                name,
                dtype: entry.dtype,
                shape: &entry.shape,
                bytes: self.files[*file].tensor(entry),
            },
            Slot::Owned(tensor) => RawTensor {
                name,
                dtype: tensor.dtype,
                shape: &tensor.shape,
                bytes: &tensor.bytes,
            },
        })
    }

    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`HubError::MissingFile`] if there is none; [`HubError::Config`] if it is not a JSON object.
    pub fn config(&self) -> Result<Config, HubError> {
        Config::read(self.side_file("config.json")?)
    }

    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`HubError::MissingFile`] if there is none; [`HubError::Tokenizer`] if it is damaged.
    pub fn tokenizer(&self) -> Result<Tokenizer, HubError> {
        Tokenizer::open(self.side_file("tokenizer.json")?)
    }

    /// The path of a file beside the weights.
    ///
    /// # Errors
    /// [`HubError::MissingFile`]; [`HubError::UnsafePath`] if the name leaves the folder.
    pub fn side_file(&self, file: &str) -> Result<PathBuf, HubError> {
        Source::Folder(&self.folder).fetch(file)
    }
}
