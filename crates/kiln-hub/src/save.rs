//! From a module to files that transformers, torchvision and timm load.
//!
//! Each parameter is written under the key of its rule, with the rule's transform undone, so that what
//! [`load_into`] reads is what [`save_pretrained`] writes. The header of a safetensors file needs only shapes
//! and types, which are known beforehand; values are read from the device one at a time while the file is
//! written, so saving needs memory for one tensor, not for a second model. Running statistics are written as
//! the model after `valid()` has them, the newest step's included. Every file is written atomically, and the
//! files that readers look for first are written last.
//!
//! [`load_into`]: crate::load_into

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn_core::module::{Module, ModuleVisitor, Param};
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, BoolStore, DType, Int, Tensor, TensorData};
use kiln_models::params::sync_running;
use safetensors::tensor::{Dtype, SafeTensorError, View};
use serde_json::json;

use crate::atomic::{write_atomic, write_bytes_atomic};
use crate::convert::{RawTensor, to_stored, transpose_bytes};
use crate::error::{HubError, KeyReport};
use crate::key_map::{KeyMap, KeyRule, Transform};
use crate::walk::PathStack;

/// How a module is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Float type in the file (f64, f32, f16 or bf16); by default that of each parameter.
    pub dtype: Option<DType>,
    /// Largest size of one file in bytes; a larger model becomes several files with an index. No limit by
    /// default.
    pub max_shard_bytes: Option<u64>,
    /// More entries for the file's header, beside `format: pt`.
    pub metadata: HashMap<String, String>,
}

impl SaveOptions {
    /// One file, types unchanged.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the float type in the file.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Splits models larger than this into several files.
    pub fn with_max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = Some(bytes);
        self
    }
}

/// Writes `model.safetensors` and, if given, `config.json` into a folder, as transformers' `save_pretrained`
/// does.
///
/// The folder is created if needed. `config` must be a JSON object. Weight files of an earlier save in the
/// folder are replaced or removed.
///
/// # Errors
/// [`HubError::Keys`] if a parameter has no rule; [`HubError::Config`] if `config` is not a JSON object;
/// [`HubError::DType`] for a type that the format lacks, and for f64 from a backend that reads it as another
/// type, as Burn reads all floats of Kiln as f32; [`HubError::Io`].
pub fn save_pretrained<B: Backend, M: Module<B>>(
    module: &M,
    map: impl Into<KeyMap>,
    config: Option<&str>,
    folder: impl AsRef<Path>,
) -> Result<(), HubError> {
    save_pretrained_with(module, map, config, folder, &SaveOptions::default())
}

/// Saves as [`save_pretrained`] does, with options.
///
/// # Errors
/// See [`save_pretrained`].
pub fn save_pretrained_with<B: Backend, M: Module<B>>(
    module: &M,
    map: impl Into<KeyMap>,
    config: Option<&str>,
    folder: impl AsRef<Path>,
    options: &SaveOptions,
) -> Result<(), HubError> {
    let folder = folder.as_ref();
    if let Some(config) = config {
        crate::Config::parse(config.as_bytes(), folder.join("config.json"))?;
    }
    let tensors = collect(module, &map.into(), folder, options.dtype)?;
    std::fs::create_dir_all(folder).map_err(|source| HubError::io("create", folder, source))?;
    let shards = split(tensors, options.max_shard_bytes);
    let written: Vec<String> = if let [_] = shards.as_slice() {
        vec!["model.safetensors".to_string()]
    } else {
        (1..=shards.len())
            .map(|i| format!("model-{i:05}-of-{:05}.safetensors", shards.len()))
            .collect()
    };
    let mut weight_map = BTreeMap::new();
    let mut total = 0u64;
    for (file, tensors) in written.iter().zip(shards) {
        for (key, tensor) in &tensors {
            weight_map.insert(key.clone(), file.clone());
            total += tensor.len_bytes as u64;
        }
        write_tensors(&folder.join(file), tensors, &options.metadata)?;
    }
    if let Some(config) = config {
        write_bytes_atomic(&folder.join("config.json"), config.as_bytes())?;
    }
    let index = "model.safetensors.index.json";
    let sharded = written.len() > 1;
    if sharded {
        let text = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_bytes_atomic(&folder.join(index), format!("{text:#}\n").as_bytes())?;
    }
    remove_stale(folder, &written, sharded.then_some(index))
}

/// Writes the tensors of a module into one safetensors file, atomically.
///
/// # Errors
/// See [`save_pretrained`].
pub fn save_safetensors<B: Backend, M: Module<B>>(
    module: &M,
    map: impl Into<KeyMap>,
    path: impl AsRef<Path>,
    options: &SaveOptions,
) -> Result<(), HubError> {
    let path = path.as_ref();
    let tensors = collect(module, &map.into(), path, options.dtype)?;
    write_tensors(path, tensors.into_iter().collect(), &options.metadata)
}

/// A tensor that is read from its device when the writer comes to it.
struct Pending {
    key: String,
    dtype: Dtype,
    shape: Vec<usize>,
    len_bytes: usize,
    transpose: bool,
    read: Box<dyn Fn() -> TensorData>,
}

impl View for Pending {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let data = (self.read)();
        let mut bytes = Cow::Borrowed(data.as_bytes());
        if self.transpose
            && let &[rows, cols] = self.shape.as_slice()
        {
            // `shape` is the file's, the data's is the other way round.
            bytes = Cow::Owned(transpose_bytes(
                &bytes,
                cols,
                rows,
                bytes.len() / (rows * cols).max(1),
            ));
        }
        Cow::Owned(convert(&self.key, &bytes, &data, self.dtype))
    }

    fn data_len(&self) -> usize {
        self.len_bytes
    }
}

/// The bytes in the file's type. Types were checked when the tensor was collected.
fn convert(key: &str, bytes: &[u8], data: &TensorData, wanted: Dtype) -> Vec<u8> {
    let stored = to_stored(data.dtype);
    let wanted_burn = crate::convert::to_burn(wanted);
    match (stored, wanted_burn) {
        (Some(stored), Some(dtype)) if stored != wanted => {
            let shape = [bytes.len() / (stored.bitsize() / 8)];
            let raw = RawTensor {
                name: key,
                dtype: stored,
                shape: &shape,
                bytes,
            };
            raw.to_floats(dtype)
                .map_or_else(|_| bytes.to_vec(), |data| data.as_bytes().to_vec())
        }
        _ => bytes.to_vec(),
    }
}

/// All tensors of a module by key; nothing is read yet.
fn collect<B: Backend, M: Module<B>>(
    module: &M,
    map: &KeyMap,
    target: &Path,
    dtype: Option<DType>,
) -> Result<BTreeMap<String, Pending>, HubError> {
    let rules = map.by_param()?;
    sync_running(module);
    let mut collector = Collector {
        rules: &rules,
        dtype,
        path: PathStack::default(),
        tensors: BTreeMap::new(),
        unmapped: vec![],
        error: None,
    };
    module.visit(&mut collector);
    let (tensors, unmapped, error) = (collector.tensors, collector.unmapped, collector.error);
    if !unmapped.is_empty() {
        let report = KeyReport {
            place: target.display().to_string(),
            unmapped,
            ..Default::default()
        };
        return Err(HubError::Keys(Box::new(report)));
    }
    match error {
        Some(error) => Err(error),
        None => Ok(tensors),
    }
}

struct Collector<'a> {
    rules: &'a BTreeMap<&'a str, &'a KeyRule>,
    dtype: Option<DType>,
    path: PathStack,
    tensors: BTreeMap<String, Pending>,
    unmapped: Vec<String>,
    error: Option<HubError>,
}

impl Collector<'_> {
    fn add(&mut self, mut shape: Vec<usize>, held: DType, wanted: DType, read: Box<dyn Fn() -> TensorData>) {
        let path = self.path.path();
        let Some(rule) = self.rules.get(path.as_str()) else {
            self.unmapped.push(path);
            return;
        };
        let convertible = wanted == held || (wanted.is_float() && held.is_float());
        let (true, Some(dtype), Some(_)) = (convertible, to_stored(wanted), to_stored(held)) else {
            self.error.get_or_insert(HubError::DType {
                name: path,
                stored: format!("{held:?}"),
                wanted: format!("{wanted:?} in a safetensors file"),
            });
            return;
        };
        let transpose = rule.transform == Transform::Transpose;
        if transpose && shape.len() != 2 {
            self.error.get_or_insert(HubError::KeyMap(format!(
                "parameter `{path}` has rank {} and cannot be transposed",
                shape.len()
            )));
            return;
        }
        if transpose {
            shape.reverse();
        }
        let len_bytes = shape.iter().product::<usize>() * (dtype.bitsize() / 8);
        let key = rule.key.clone();
        self.tensors.insert(
            key.clone(),
            Pending {
                key,
                dtype,
                shape,
                len_bytes,
                transpose,
                read,
            },
        );
    }
}

impl<B: Backend> ModuleVisitor<B> for Collector<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.transform_for_save().val();
        let held = tensor.dtype();
        let wanted = self.dtype.unwrap_or(held);
        // Elements arrive in the type that the backend reads, and f64 from fewer bits would be no f64.
        let arrives = || {
            Tensor::<B, 1>::zeros([1], (&tensor.device(), held))
                .to_data()
                .dtype
        };
        if wanted == DType::F64 && held == DType::F64 && arrives() != held {
            self.error.get_or_insert(HubError::DType {
                name: self.path.path(),
                stored: format!("F64, of which the backend hands out {:?}", arrives()),
                wanted: "F64; save it as F32 (`SaveOptions::with_dtype`)".to_string(),
            });
            return;
        }
        self.add(
            tensor.shape().to_vec(),
            held,
            wanted,
            Box::new(move || tensor.to_data()),
        );
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        let tensor = param.val();
        let held = tensor.dtype();
        self.add(
            tensor.shape().to_vec(),
            held,
            held,
            Box::new(move || tensor.to_data()),
        );
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        let tensor = param.val();
        let held = DType::Bool(BoolStore::Native);
        let read = move || {
            let data = tensor.to_data();
            let shape = data.shape.to_vec();
            TensorData::new(data.iter::<bool>().collect::<Vec<_>>(), shape)
        };
        self.add(param.lazy_shape().to_vec(), held, held, Box::new(read));
    }
}

/// Tensors in groups below the limit, in the order of their keys.
fn split(tensors: BTreeMap<String, Pending>, limit: Option<u64>) -> Vec<Vec<(String, Pending)>> {
    let mut shards = vec![vec![]];
    let mut size = 0u64;
    for (key, tensor) in tensors {
        let bytes = tensor.len_bytes as u64;
        if size > 0 && limit.is_some_and(|limit| size + bytes > limit) {
            shards.push(vec![]);
            size = 0;
        }
        size += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((key, tensor));
        }
    }
    shards
}

fn write_tensors(
    path: &Path,
    tensors: Vec<(String, Pending)>,
    metadata: &HashMap<String, String>,
) -> Result<(), HubError> {
    // transformers refuses files that do not say which framework's layout they follow.
    let mut header = metadata.clone();
    header.insert("format".to_string(), "pt".to_string());
    write_atomic(path, |temporary| {
        safetensors::serialize_to_file(tensors, Some(header), temporary).map_err(|error| match error {
            SafeTensorError::IoError(source) => HubError::io("write", path, source),
            other => HubError::safetensors(path, other),
        })
    })
}

/// Removes weight files of an earlier save, which readers might prefer to the new ones.
fn remove_stale(folder: &Path, written: &[String], index: Option<&str>) -> Result<(), HubError> {
    let entries = std::fs::read_dir(folder).map_err(|source| HubError::io("list", folder, source))?;
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let weights = name == "model.safetensors"
            || name == "model.safetensors.index.json"
            || (name.starts_with("model-") && name.ends_with(".safetensors") && name.contains("-of-"));
        if weights && !written.contains(&name) && index != Some(&name) {
            std::fs::remove_file(entry.path())
                .map_err(|source| HubError::io("remove", entry.path(), source))?;
        }
    }
    Ok(())
}
