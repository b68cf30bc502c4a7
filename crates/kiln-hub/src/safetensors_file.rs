//! Safetensors files.
//!
//! The format is eight bytes of header length, a JSON header that gives each tensor's type, shape and byte
//! range, and the data. The header is checked completely when the file is opened (ranges must tile the data
//! without gap or overlap and agree with shape and type), so that later reads are slices that cannot fail.
//! The data stays on disk until a tensor is read: opening a 7-billion-parameter model costs a header.

use std::path::Path;

use safetensors::tensor::{SafeTensorError, SafeTensors};

use crate::error::HubError;
use crate::mapped::{Entry, MappedFile};
use crate::mistaken;

/// Maps a file and checks its header; returns it with the names and places of its tensors, in the order of
/// the data.
pub(crate) fn open(path: &Path) -> Result<(MappedFile, Vec<(String, Entry)>), HubError> {
    let file = MappedFile::open(path)?;
    match entries(file.bytes()) {
        Ok(tensors) => Ok((file, tensors)),
        Err(reason) => {
            mistaken::refuse_safetensors(path, file.bytes())?;
            Err(HubError::safetensors(path, reason))
        }
    }
}

/// Reads and checks the header of a whole file.
fn entries(bytes: &[u8]) -> Result<Vec<(String, Entry)>, String> {
    let (header_len, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| explain(error, bytes))?;
    let data_start = 8 + header_len;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        // The library promises this; a slice out of bounds is a panic, so the promise is checked where it is
        // used.
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
