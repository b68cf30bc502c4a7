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
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn_core::module::{Module, ModuleVisitor, Param};
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, BoolStore, DType, Element, Int, Tensor, TensorData};
use kiln_models::params::sync_running;
use safetensors::tensor::{Dtype, SafeTensorError, View};
use serde_json::json;

use crate::atomic::{write_atomic, write_bytes_atomic};
use crate::convert::{RawTensor, int_range, to_stored, transpose_bytes};
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
/// [`HubError::DType`] for a type that the format lacks, for f64 from a backend that reads it as another
/// type, as Burn reads all floats of Kiln as f32, and for integers beyond the type that the backend reads
/// them as, which is i32 for Kiln; [`HubError::Io`].
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

/// Reads a tensor from its device.
type Read = Box<dyn Fn() -> Result<TensorData, HubError>>;

/// A tensor that is read from its device when the writer comes to it.
struct Pending {
    key: String,
    dtype: Dtype,
    shape: Vec<usize>,
    len_bytes: usize,
    transpose: bool,
    read: Read,
}

impl Pending {
    /// The bytes for the file, as many as its header announces.
    fn bytes(&self) -> Result<Vec<u8>, HubError> {
        let data = (self.read)()?;
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
        let converted = convert(&self.key, &bytes, &data, self.dtype)?;
        if converted.len() != self.len_bytes {
            return Err(HubError::DType {
                name: self.key.clone(),
                stored: format!("{} bytes of {:?}", converted.len(), self.dtype),
                wanted: format!("{} bytes in a safetensors file", self.len_bytes),
            });
        }
        Ok(converted)
    }
}

/// A tensor in the hands of a writer that asks for bytes and takes no error.
struct Written<'a> {
    tensor: &'a Pending,
    /// The first error; what is written after it is of no use.
    error: &'a RefCell<Option<HubError>>,
}

impl View for Written<'_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        if self.error.borrow().is_some() {
            return Cow::Borrowed(&[]);
        }
        self.tensor.bytes().map_or_else(
            |error| {
                self.error.replace(Some(error));
                Cow::Borrowed(&[][..])
            },
            Cow::Owned,
        )
    }

    fn data_len(&self) -> usize {
        self.tensor.len_bytes
    }
}

/// The bytes in the file's type.
fn convert(key: &str, bytes: &[u8], data: &TensorData, wanted: Dtype) -> Result<Vec<u8>, HubError> {
    let refused = || HubError::DType {
        name: key.to_string(),
        stored: format!("{:?}", data.dtype),
        wanted: format!("{wanted:?} in a safetensors file"),
    };
    let stored = to_stored(data.dtype).ok_or_else(refused)?;
    if stored == wanted {
        return Ok(bytes.to_vec());
    }
    let raw = RawTensor {
        name: key,
        dtype: stored,
        shape: &[bytes.len() / (stored.bitsize() / 8)],
        bytes,
    };
    let floats = raw.to_floats(crate::convert::to_burn(wanted).ok_or_else(refused)?)?;
    Ok(floats.as_bytes().to_vec())
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
    fn add(&mut self, mut shape: Vec<usize>, held: DType, wanted: DType, read: Read) {
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
            Box::new(move || Ok(tensor.to_data())),
        );
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        let tensor = param.val();
        let (held, path) = (tensor.dtype(), self.path.path());
        self.add(
            tensor.shape().to_vec(),
            held,
            held,
            Box::new(move || read_ints(&path, &tensor)),
        );
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        let tensor = param.val();
        let held = DType::Bool(BoolStore::Native);
        let read = move || {
            let data = tensor.to_data();
            let shape = data.shape.to_vec();
            Ok(TensorData::new(data.iter::<bool>().collect::<Vec<_>>(), shape))
        };
        self.add(param.lazy_shape().to_vec(), held, held, Box::new(read));
    }
}

/// Integers in the type that the tensor holds. Backends may read all integers as their own type, and values
/// beyond it make Burn panic, so they are looked for on the device.
fn read_ints<B: Backend, const D: usize>(
    path: &str,
    tensor: &Tensor<B, D, Int>,
) -> Result<TensorData, HubError> {
    let (held, own) = (tensor.dtype(), B::IntElem::dtype());
    let any = |found: Tensor<B, D, Bool>| found.any().to_data().iter::<bool>().any(|found| found);
    let arrives = || {
        let zero = Tensor::<B, 1, Int>::zeros([1], (&tensor.device(), held));
        zero.to_data().dtype
    };
    if let (Some(held_range), Some((least, greatest))) = (int_range(held), int_range(own)) {
        let above = held_range.1 > greatest && any(tensor.clone().greater_elem(greatest));
        let below = held_range.0 < least && any(tensor.clone().lower_elem(least));
        if (above || below) && arrives() != held {
            return Err(HubError::DType {
                name: path.to_string(),
                stored: format!(
                    "{held:?} with values beyond {own:?}, in which the backend hands out integers"
                ),
                wanted: format!("{held:?}; make them smaller before they are saved"),
            });
        }
    }
    Ok(tensor.to_data().convert_dtype(held))
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
    let error = RefCell::new(None);
    let written = tensors.iter().map(|(key, tensor)| {
        (
            key,
            Written {
                tensor,
                error: &error,
            },
        )
    });
    write_atomic(path, |temporary| {
        safetensors::serialize_to_file(written, Some(header), temporary).map_err(|error| match error {
            SafeTensorError::IoError(source) => HubError::io("write", path, source),
            other => HubError::safetensors(path, other),
        })?;
        error.take().map_or(Ok(()), Err)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(dtype: Dtype, data: TensorData) -> (String, Pending) {
        let shape = vec![3];
        let tensor = Pending {
            key: "x".to_string(),
            dtype,
            len_bytes: 3 * dtype.bitsize() / 8,
            shape,
            transpose: false,
            read: Box::new(move || Ok(data.clone())),
        };
        ("x".to_string(), tensor)
    }

    /// A file with another length than its header says could not be read.
    #[test]
    fn a_tensor_that_does_not_arrive_as_announced_is_an_error_and_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let write = |tensor| write_tensors(&path, vec![tensor], &HashMap::new());
        write(pending(Dtype::I32, TensorData::from([1i32, 2, 3]))).unwrap();
        let old = std::fs::read(&path).unwrap();
        for (announced, arrives) in [
            (Dtype::I64, TensorData::from([1i32, 2, 3])),
            (Dtype::U8, TensorData::from([1i32, 2, 3])),
            (Dtype::F32, TensorData::from([1i32, 2, 3])),
            (Dtype::I32, TensorData::from([1i32, 2])),
            (Dtype::F16, TensorData::from([1f32, 2.0])),
        ] {
            let error = write(pending(announced, arrives)).unwrap_err();
            assert!(matches!(error, HubError::DType { .. }), "{announced:?}: {error}");
            assert_eq!(std::fs::read(&path).unwrap(), old, "{announced:?}");
        }
        write(pending(Dtype::F16, TensorData::from([1f32, 2.0, 3.0]))).unwrap();
    }
}
