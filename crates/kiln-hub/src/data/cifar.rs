//! CIFAR-10 and CIFAR-100 in their binary form (Krizhevsky, 2009).
//!
//! A record is one label byte (CIFAR-100: a coarse and a fine one) and 3072 bytes of a 32 by 32 picture, all
//! red, then all green, then all blue. Ten thousand records make a file of CIFAR-10, of which training has
//! five. The files are read whole: 150 MB at most.

use std::path::{Path, PathBuf};

use super::error::DataError;
use super::image::{ImageSource, Picture};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;

/// Which of the two datasets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CifarKind {
    /// 10 classes.
    Cifar10,
    /// 100 classes (the fine labels).
    Cifar100,
}

impl CifarKind {
    fn label_bytes(self) -> usize {
        match self {
            CifarKind::Cifar10 => 1,
            CifarKind::Cifar100 => 2,
        }
    }

    fn num_classes(self) -> usize {
        match self {
            CifarKind::Cifar10 => 10,
            CifarKind::Cifar100 => 100,
        }
    }

    fn files(self, train: bool) -> Vec<String> {
        match (self, train) {
            (CifarKind::Cifar10, true) => (1..=5).map(|n| format!("data_batch_{n}.bin")).collect(),
            (CifarKind::Cifar10, false) => vec!["test_batch.bin".into()],
            (CifarKind::Cifar100, true) => vec!["train.bin".into()],
            (CifarKind::Cifar100, false) => vec!["test.bin".into()],
        }
    }

    /// The file of class names that the archive contains.
    fn names_file(self) -> &'static str {
        match self {
            CifarKind::Cifar10 => "batches.meta.txt",
            CifarKind::Cifar100 => "fine_label_names.txt",
        }
    }

    /// The folder that the archive unpacks to.
    fn archive_folder(self) -> &'static str {
        match self {
            CifarKind::Cifar10 => "cifar-10-batches-bin",
            CifarKind::Cifar100 => "cifar-100-binary",
        }
    }
}

/// Records of CIFAR in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cifar {
    kind: CifarKind,
    records: Vec<u8>,
    classes: Vec<String>,
}

impl Cifar {
    /// Reads the training or test files from a folder, or from the archive's folder within it.
    ///
    /// # Errors
    /// [`DataError::Io`] if a file is missing; [`DataError::Format`] if one is damaged.
    pub fn open(folder: impl AsRef<Path>, kind: CifarKind, train: bool) -> Result<Self, DataError> {
        let folder = folder.as_ref();
        let inner = folder.join(kind.archive_folder());
        let folder: PathBuf = if inner.is_dir() {
            inner
        } else {
            folder.to_path_buf()
        };
        let mut records = Vec::new();
        for file in kind.files(train) {
            let path = folder.join(file);
            let bytes = std::fs::read(&path).map_err(|source| DataError::io("read", &path, source))?;
            check(kind, &bytes).map_err(|reason| DataError::format(&path, None, reason))?;
            records.extend(bytes);
        }
        let names = std::fs::read_to_string(folder.join(kind.names_file())).unwrap_or_default();
        let mut classes: Vec<String> = names
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .map(str::to_string)
            .collect();
        if classes.len() != kind.num_classes() {
            // The names are for people; without their file the numbers do.
            classes = (0..kind.num_classes()).map(|class| class.to_string()).collect();
        }
        Ok(Self {
            kind,
            records,
            classes,
        })
    }

    fn record_bytes(&self) -> usize {
        self.kind.label_bytes() + 3 * PLANE
    }
}

/// Whether a file has whole records with labels in range.
fn check(kind: CifarKind, bytes: &[u8]) -> Result<(), String> {
    let record = kind.label_bytes() + 3 * PLANE;
    if bytes.is_empty() || !bytes.len().is_multiple_of(record) {
        return Err(format!(
            "{} bytes are not a whole number of records of {record}",
            bytes.len()
        ));
    }
    for (number, bytes) in bytes.chunks_exact(record).enumerate() {
        let label = usize::from(bytes[kind.label_bytes() - 1]);
        if label >= kind.num_classes() {
            return Err(format!(
                "record {number} has label {label}, but {kind:?} has {} classes",
                kind.num_classes()
            ));
        }
    }
    Ok(())
}

impl ImageSource for Cifar {
    fn len(&self) -> usize {
        self.records.len() / self.record_bytes()
    }

    fn picture(&self, index: usize) -> Result<(Picture, usize), DataError> {
        let size = self.record_bytes();
        let out_of_range = DataError::OutOfRange {
            index,
            len: self.len(),
        };
        let record = self.records.chunks_exact(size).nth(index).ok_or(out_of_range)?;
        let (labels, planes) = record.split_at(self.kind.label_bytes());
        let mut picture = Picture::filled(SIDE, SIDE, [0; 3]);
        for (channel, plane) in planes.chunks_exact(PLANE).enumerate() {
            for (to, from) in picture.rgb.iter_mut().skip(channel).step_by(3).zip(plane) {
                *to = *from;
            }
        }
        Ok((picture, usize::from(labels[self.kind.label_bytes() - 1])))
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }
}
