//! A file of tensors, mapped into memory.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Dtype;

use crate::error::HubError;

/// A mapped file. The data stays on disk until it is read.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

/// Where a tensor lies in its file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the whole file.
    pub range: Range<usize>,
}

impl MappedFile {
    /// Maps a regular file.
    pub fn open(path: &Path) -> Result<Self, HubError> {
        let fail = |action| move |source| HubError::io(action, path, source);
        let file = File::open(path).map_err(fail("open"))?;
        let metadata = file.metadata().map_err(fail("read"))?;
        if !metadata.is_file() {
            return Err(fail("map")(std::io::Error::other("not a regular file")));
        }
        // SAFETY: the map is private to this struct and only read through `&[u8]`. The one way to break it is
        // another process that truncates or rewrites the file in place while it is mapped; this crate and the
        // hub's clients replace files by rename, which leaves the mapped inode intact.
        let map = unsafe { Mmap::map(&file) }.map_err(fail("map"))?;
        Ok(Self {
            path: path.to_path_buf(),
            map,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The bytes of a tensor, little endian, row major. Entries are checked against the length when they are
    /// made.
    pub fn tensor(&self, entry: &Entry) -> &[u8] {
        &self.map[entry.range.clone()]
    }
}
