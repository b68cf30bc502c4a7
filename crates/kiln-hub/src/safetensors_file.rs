//! One safetensors file, mapped into memory.
//!
//! The format is eight bytes of header length, a JSON header that gives each tensor's type, shape and byte range, and
//! the data. The header is checked completely when the file is opened (ranges must tile the data without gap or overlap
//! and agree with shape and type), so that later reads are slices that cannot fail. The data stays on disk until a
//! tensor is read: opening a 7-billion-parameter model costs a header.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors};

use crate::error::HubError;

/// An opened safetensors file.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    path: PathBuf,
    bytes: Mmap,
    tensors: Vec<(String, Entry)>,
}

/// Where a tensor lies in its file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the whole file.
    pub range: Range<usize>,
}

impl SafetensorsFile {
    /// Maps a file and checks its header.
    pub fn open(path: &Path) -> Result<Self, HubError> {
        let file = File::open(path).map_err(|source| HubError::io("open", path, source))?;
        let metadata = file
            .metadata()
            .map_err(|source| HubError::io("read", path, source))?;
        if !metadata.is_file() {
            return Err(HubError::safetensors(path, "not a regular file"));
        }
        if metadata.len() < 8 {
            return Err(HubError::safetensors(
                path,
                format!(
                    "{} bytes, shorter than the 8 bytes of the header's length",
                    metadata.len()
                ),
            ));
        }
        // SAFETY: the map is private to this struct and only read through `&[u8]`. The one way to break it is another
        // process that truncates or rewrites the file in place while it is mapped; this crate and the hub's clients
        // replace files by rename, which leaves the mapped inode intact.
        let bytes = unsafe { Mmap::map(&file) }.map_err(|source| HubError::io("map", path, source))?;
        let tensors = entries(&bytes).map_err(|reason| HubError::safetensors(path, reason))?;
        Ok(Self {
            path: path.to_path_buf(),
            bytes,
            tensors,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names and places of all tensors, in the order of the data.
    pub fn tensors(&self) -> &[(String, Entry)] {
        &self.tensors
    }

    /// The bytes of a tensor, little endian, row major.
    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        // Ranges were checked against the length when the file was opened and the map's length never changes.
        &self.bytes[entry.range.clone()]
    }
}

/// Reads and checks the header of a whole file.
fn entries(bytes: &[u8]) -> Result<Vec<(String, Entry)>, String> {
    let (header_len, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| explain(error, bytes))?;
    let data_start = 8 + header_len;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        // The library promises this; a slice out of bounds is a panic, so the promise is checked where it is used.
        if range.start > range.end || range.end > bytes.len() {
            return Err(format!("tensor `{name}` lies outside the file"));
        }
        tensors.push((
            name,
            Entry {
                dtype: info.dtype,
                shape: info.shape.clone(),
                range,
            },
        ));
    }
    tensors.sort_by(|(a, x), (b, y)| (x.range.start, x.range.end, a).cmp(&(y.range.start, y.range.end, b)));
    Ok(tensors)
}

/// The format's rule in words, with the numbers at hand.
fn explain(error: SafeTensorError, bytes: &[u8]) -> String {
    let announced = bytes
        .get(..8)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u64::from_le_bytes);
    match error {
        SafeTensorError::HeaderTooSmall => "shorter than the 8 bytes of the header's length".into(),
        SafeTensorError::HeaderTooLarge => {
            format!("announces a header of {announced} bytes, above the format's limit")
        }
        SafeTensorError::InvalidHeaderLength => {
            format!(
                "announces a header of {announced} bytes but the file has {} bytes",
                bytes.len()
            )
        }
        SafeTensorError::InvalidHeader(e) => format!("the header is not UTF-8 ({e})"),
        SafeTensorError::InvalidHeaderDeserialization(e) => {
            format!("the header is not the expected JSON ({e})")
        }
        SafeTensorError::InvalidOffset(name) => {
            format!("the data of tensor `{name}` overlaps its neighbour or leaves a gap")
        }
        SafeTensorError::TensorInvalidInfo => {
            "a tensor's byte range does not agree with its shape and element type".into()
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            format!(
                "the file has {} bytes, not what the header announces: truncated or padded",
                bytes.len()
            )
        }
        SafeTensorError::ValidationOverflow => "a tensor's shape overflows".into(),
        other => other.to_string(),
    }
}
