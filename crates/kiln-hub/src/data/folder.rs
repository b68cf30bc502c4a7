//! A folder of images: one subfolder a class, any files inside.
//!
//! The layout is torchvision's `ImageFolder`: `root/class/…/name.png`. Classes and files are in the order of
//! their names; links to folders and files are followed. Files are found when the folder is opened and
//! decoded when they are asked for. A link that leads nowhere is an error: without its class, the labels of
//! the classes behind it would be others.

use std::path::{Path, PathBuf};

use super::contents::{Contents, examples};
use super::error::DataError;
use super::image::{ImageFile, ImageSource, Picture};
use super::listing::{Entered, Kind, list};

/// Image files with their classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFolder {
    files: Vec<(PathBuf, usize)>,
    classes: Vec<String>,
}

impl ImageFolder {
    /// Finds the PNG and JPEG files below each subfolder of `root`.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Empty`] if a class has no images or there is no class;
    /// [`DataError::DeadLink`] if one of them is a link that leads nowhere.
    pub fn open(root: impl AsRef<Path>) -> Result<Self, DataError> {
        let root = root.as_ref();
        let classes = subfolders(root)?.into_iter().map(|(name, _)| name).collect();
        Self::open_as(root, classes)
    }

    /// Finds the images of given classes, as evaluation needs them to agree with training: a label is a
    /// class's place in `classes`, whatever other subfolders `root` has. Classes without a subfolder have no
    /// images.
    ///
    /// # Errors
    /// As [`ImageFolder::open`]; [`DataError::Format`] if a subfolder is none of the classes.
    pub fn open_as(root: impl AsRef<Path>, classes: Vec<String>) -> Result<Self, DataError> {
        let root = root.as_ref();
        let found = subfolders(root)?;
        if found.is_empty() {
            return Err(DataError::empty(root, "no subfolders; each class is one"));
        }
        let mut folder = Self {
            files: vec![],
            classes,
        };
        for (name, path) in found {
            let Some(class) = folder.classes.iter().position(|class| *class == name) else {
                let known = folder.classes.join(", ");
                let reason = format!("the class `{name}` is none of those of the training: {known}");
                return Err(DataError::format(&path, None, reason));
            };
            let before = folder.files.len();
            folder.add(&path, class, &mut Entered::default())?;
            if folder.files.len() == before {
                return Err(DataError::empty(
                    &path,
                    "a class without .png, .jpg or .jpeg files",
                ));
            }
        }
        Ok(folder)
    }

    fn add(&mut self, folder: &Path, class: usize, entered: &mut Entered) -> Result<(), DataError> {
        if !entered.is_new(folder)? {
            return Ok(());
        }
        for (path, kind) in list(folder)? {
            match kind {
                Kind::Folder => self.add(&path, class, entered)?,
                Kind::File if is_picture(&path) => self.files.push((path, class)),
                // Without an extension it may have been a folder.
                Kind::DeadLink if is_picture(&path) || (path.extension().is_none() && !is_hidden(&path)) => {
                    return Err(DataError::dead_link(path));
                }
                Kind::File | Kind::DeadLink | Kind::Other => {}
            }
        }
        Ok(())
    }

    fn entry(&self, index: usize) -> Result<&(PathBuf, usize), DataError> {
        let len = self.files.len();
        self.files.get(index).ok_or(DataError::OutOfRange { index, len })
    }

    /// The files and their labels.
    pub fn files(&self) -> &[(PathBuf, usize)] {
        &self.files
    }
}

/// Whether a name is that of a picture.
fn is_picture(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    ["png", "jpg", "jpeg"].contains(&&*extension.to_lowercase())
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b".")
}

/// Names and paths of the subfolders that are classes, by name.
fn subfolders(root: &Path) -> Result<Vec<(String, PathBuf)>, DataError> {
    let mut found = Vec::new();
    for (path, kind) in list(root)? {
        match kind {
            _ if is_hidden(&path) => {}
            Kind::Folder => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                found.push((name.to_string(), path));
            }
            Kind::DeadLink => return Err(DataError::dead_link(path)),
            Kind::File | Kind::Other => {}
        }
    }
    Ok(found)
}

impl ImageSource for ImageFolder {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn picture(&self, index: usize) -> Result<(Picture, usize), DataError> {
        let (path, label) = self.entry(index)?;
        Ok((Picture::open(path)?, *label))
    }

    fn file(&self, index: usize) -> Result<Option<(ImageFile, usize)>, DataError> {
        let (path, label) = self.entry(index)?;
        Ok(Some((ImageFile::read(path)?, *label)))
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn contents(&self) -> u64 {
        let mut contents = Contents::of("folder");
        for index in examples(self.files.len()) {
            let (path, label) = &self.files[index];
            contents.add(path.file_name().unwrap_or_default().as_encoded_bytes());
            contents.add(self.classes[*label].as_bytes());
        }
        contents.number()
    }
}
