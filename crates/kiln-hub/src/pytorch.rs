//! PyTorch archives (`pytorch_model.bin`, `.pt`, `.pth`), through burn-store's reader.
//!
//! A PyTorch archive is a pickle: a program that builds objects. burn-store interprets the few instructions that state
//! dictionaries need and executes no code. Its snapshots are lazy but bound to one thread and may panic on damaged
//! archives, so everything is read when the file is opened, inside a guard that turns a panic into an error. This costs
//! memory for the whole file; safetensors do not have that cost and are preferred wherever both exist.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use burn_store::pytorch::PytorchReader;
use safetensors::tensor::Dtype;

use crate::convert::to_stored;
use crate::error::HubError;

/// A tensor in memory.
#[derive(Clone, Debug)]
pub(crate) struct OwnedTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Keys under which training scripts put the weights, tried in this order when the file's top level has no tensors.
const NESTED: [&str; 3] = ["state_dict", "model_state_dict", "model"];

/// Reads every tensor of an archive.
pub(crate) fn read(path: &Path) -> Result<BTreeMap<String, OwnedTensor>, HubError> {
    let fail = |reason: String| HubError::Pytorch {
        path: path.to_path_buf(),
        reason,
    };
    // Existence and permissions first: burn-store reports them as a format error.
    std::fs::File::open(path).map_err(|source| HubError::io("open", path, source))?;
    let mut last = None;
    for key in [None, Some(NESTED[0]), Some(NESTED[1]), Some(NESTED[2])] {
        match guarded(|| read_under(path, key)) {
            Ok(tensors) if !tensors.is_empty() => return Ok(tensors),
            Ok(_) => {}
            Err(reason) => {
                last.get_or_insert(reason);
            }
        }
    }
    Err(fail(last.unwrap_or_else(|| "it holds no tensors".to_string())))
}

fn read_under(path: &Path, key: Option<&str>) -> Result<BTreeMap<String, OwnedTensor>, String> {
    let reader = match key {
        None => PytorchReader::new(path),
        Some(key) => PytorchReader::with_top_level_key(path, key),
    };
    let mut tensors = BTreeMap::new();
    for (name, snapshot) in reader.map_err(|error| error.to_string())?.into_tensors() {
        let data = snapshot
            .to_data()
            .map_err(|error| format!("tensor `{name}`: {error}"))?;
        let dtype = to_stored(data.dtype)
            .ok_or_else(|| format!("tensor `{name}` has element type {:?}", data.dtype))?;
        let shape = data.shape.to_vec();
        let expected = shape
            .iter()
            .try_fold(dtype.bitsize() / 8, |n, &d| n.checked_mul(d))
            .ok_or_else(|| format!("the shape of tensor `{name}` overflows"))?;
        let bytes = data.as_bytes().to_vec();
        if bytes.len() != expected {
            return Err(format!(
                "tensor `{name}` of shape {shape:?} has {} bytes, not {expected}",
                bytes.len()
            ));
        }
        tensors.insert(name, OwnedTensor { dtype, shape, bytes });
    }
    Ok(tensors)
}

/// Runs foreign code that may panic on bad input.
fn guarded<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err("the archive is damaged".to_string()))
}
