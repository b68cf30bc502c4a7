//! Images that stay encoded until they are on the device that decodes them.
//!
//! [`EncodedImages`] draws what [`Images`](super::Images) would, without decoding: a file's head says how
//! large it is, and so which part of it the pipeline shows. A picture that is no plain JPEG, or of which the
//! pipeline shows more than one scaled rectangle, is decoded and augmented here; a batch may have both kinds.

use super::augment::{Normalisation, Pipeline};
use super::error::DataError;
use super::image::{ImageBatch, ImageExample, ImageFile, ImageSource, Picture, check_label, one_size};
use super::jpeg::plain_size;
use super::loader::Dataset;
use super::rng::Rng;
use super::view::View;

/// A source seen through a pipeline, encoded as far as possible.
#[derive(Clone, Debug)]
pub struct EncodedImages<S> {
    source: S,
    pipeline: Pipeline,
    decodes: bool,
}

impl<S: ImageSource> EncodedImages<S> {
    /// Joins a source and a pipeline.
    pub fn new(source: S, pipeline: Pipeline) -> Self {
        Self {
            source,
            pipeline,
            decodes: false,
        }
    }

    /// Whether every picture is decoded and augmented here, for a device that only normalises them: bytes are
    /// a quarter of the floats that they become.
    pub fn with_decoding(mut self, decodes: bool) -> Self {
        self.decodes = decodes;
        self
    }

    /// The pipeline.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }
}

/// The first plain JPEG of a source, if there is one among its first pictures.
///
/// # Errors
/// Those of [`ImageSource::file`].
pub fn first_jpeg(source: &impl ImageSource) -> Result<Option<Encoded>, DataError> {
    for index in 0..source.len().min(64) {
        let Some((file, _)) = source.file(index)? else {
            continue;
        };
        if let Some(size) = plain_size(&file.bytes) {
            return Ok(Some(Encoded::Jpeg(file, size)));
        }
    }
    Ok(None)
}

/// A picture, encoded or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// A plain JPEG (baseline, 8 bits, one scan, grey or of brightness and colours) of this width and height.
    Jpeg(ImageFile, (usize, usize)),
    /// Decoded by the host.
    Decoded(Picture),
}

/// A picture before its pipeline's steps.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedExample {
    /// The picture.
    pub picture: Encoded,
    /// What the batch shows of it.
    pub view: View,
    /// How its channels become floats.
    pub normalisation: Normalisation,
    /// Index into the classes.
    pub label: usize,
}

impl<S: ImageSource> Dataset for EncodedImages<S> {
    type Item = EncodedExample;

    fn len(&self) -> usize {
        self.source.len()
    }

    fn item(&self, index: usize, rng: &mut Rng) -> Result<EncodedExample, DataError> {
        let example = |picture, view, label| {
            check_label(index, label, &self.source)?;
            Ok(EncodedExample {
                picture,
                view,
                normalisation: self.pipeline.normalisation(),
                label,
            })
        };
        // The steps draw the same numbers again where they come down to no view.
        let mut same = rng.clone();
        let (picture, label) = match self.source.file(index)? {
            Some((file, label)) => {
                if !self.decodes
                    && let Some(size) = plain_size(&file.bytes)
                    && let Some(view) = self.pipeline.view(size.0, size.1, rng)?
                {
                    return example(Encoded::Jpeg(file, size), view, label);
                }
                (file.decode()?, label)
            }
            None => self.source.picture(index)?,
        };
        let picture = self.pipeline.augment(picture, &mut same)?;
        let view = View::whole(picture.width, picture.height);
        example(Encoded::Decoded(picture), view, label)
    }

    fn contents(&self) -> u64 {
        self.source.contents()
    }
}

/// Encoded pictures and their labels.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedBatch {
    /// Pictures, and what the batch shows of them.
    pub pictures: Vec<(Encoded, View)>,
    /// `[rows]`: indices into the classes.
    pub labels: Vec<i32>,
    /// How channels become floats.
    pub normalisation: Normalisation,
    /// Pixels a row.
    pub width: usize,
    /// Rows of a picture.
    pub height: usize,
}

impl EncodedBatch {
    /// Puts pictures into a batch.
    ///
    /// # Errors
    /// As [`ImageBatch::collate`].
    pub fn collate(items: Vec<EncodedExample>) -> Result<Self, DataError> {
        let (width, height) = one_size(items.iter().map(|item| item.view.size))?;
        let normalisation = items.first().map(|item| item.normalisation);
        Ok(Self {
            labels: items.iter().map(|item| item.label as i32).collect(),
            normalisation: normalisation.unwrap_or_else(|| Pipeline::plain().normalisation()),
            pictures: items.into_iter().map(|item| (item.picture, item.view)).collect(),
            width,
            height,
        })
    }

    /// The batch as the host decodes it.
    ///
    /// # Errors
    /// [`DataError::Format`] if a file is damaged, with its path.
    pub fn decode(self) -> Result<ImageBatch, DataError> {
        let pictures = self.pictures.into_iter().zip(self.labels);
        let examples = pictures.map(|((picture, view), label)| {
            let picture = match picture {
                Encoded::Jpeg(file, _) => file.decode()?,
                Encoded::Decoded(picture) => picture,
            };
            Ok(ImageExample {
                picture: view.apply(&picture)?,
                normalisation: self.normalisation,
                label: label as usize,
            })
        });
        ImageBatch::collate(examples.collect::<Result<_, DataError>>()?)
    }
}
