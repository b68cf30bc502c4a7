//! Images: the picture in memory, sources of labelled pictures, and batches.
//!
//! A source ([`ImageFolder`](super::ImageFolder), [`Cifar`](super::Cifar), [`Shapes`](super::Shapes)) gives
//! bytes; a [`Pipeline`] crops, flips and normalises them; [`Images`] joins the two into a dataset.
//! Everything is RGB: grey images are widened and an alpha channel is dropped, as torchvision's loader does.

use std::path::{Path, PathBuf};

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor, TensorData};
use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

use super::augment::{Normalisation, Pipeline};
use super::error::DataError;
use super::jpeg::is_cut_off;
use super::loader::{Collate, Dataset};
use super::rng::Rng;

/// Most pixels a side of a picture that is read.
const SIDE: usize = 1 << 14;

/// An RGB image: rows from the top, three bytes a pixel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

impl Picture {
    /// An image of one colour.
    pub fn filled(width: usize, height: usize, colour: [u8; 3]) -> Self {
        Self {
            width,
            height,
            rgb: colour.repeat(width * height),
        }
    }

    /// Reads a PNG or JPEG file, whatever its name says.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Format`] if it is neither, is damaged, or is larger than 16384 pixels
    /// a side.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        ImageFile::read(path)?.decode()
    }

    /// Decodes the bytes of a PNG or JPEG file, of any kind.
    fn decode(bytes: &[u8]) -> Result<Self, String> {
        if is_cut_off(bytes) {
            return Err("the file ends before the picture does".to_string());
        }
        let mut reader = image::ImageReader::new(std::io::Cursor::new(bytes));
        reader = reader.with_guessed_format().map_err(|error| error.to_string())?;
        // A few bytes can announce an image that fills the memory.
        let mut limits = image::Limits::default();
        limits.max_image_width = Some(SIDE as u32);
        limits.max_image_height = Some(SIDE as u32);
        reader.limits(limits);
        let decoded = reader.decode().map_err(|error| error.to_string())?.into_rgb8();
        let (width, height) = (decoded.width() as usize, decoded.height() as usize);
        if width == 0 || height == 0 {
            return Err("an image without pixels".to_string());
        }
        Ok(Self {
            width,
            height,
            rgb: decoded.into_raw(),
        })
    }

    /// The colour of a pixel.
    pub fn pixel(&self, x: usize, y: usize) -> [u8; 3] {
        let at = (y * self.width + x) * 3;
        [self.rgb[at], self.rgb[at + 1], self.rgb[at + 2]]
    }

    /// A part of the image; where it reaches over the edge (coordinates may be negative) it is black.
    pub fn crop(&self, x: isize, y: isize, width: usize, height: usize) -> Self {
        let mut cut = Self::filled(width, height, [0; 3]);
        let from = x.max(0).min(self.width as isize);
        let to = (x + width as isize).clamp(from, self.width as isize);
        let len = (to - from) as usize * 3;
        for row in 0..height {
            let source_row = y + row as isize;
            if source_row < 0 || source_row >= self.height as isize || len == 0 {
                continue;
            }
            let source = (source_row as usize * self.width + from as usize) * 3;
            let target = (row * width + (from - x) as usize) * 3;
            cut.rgb[target..target + len].copy_from_slice(&self.rgb[source..source + len]);
        }
        cut
    }

    /// The image mirrored left to right.
    pub fn flip(&self) -> Self {
        self.clone().into_flipped()
    }

    /// As [`Picture::flip`], in place.
    pub(crate) fn into_flipped(mut self) -> Self {
        let (pixels, _) = self.rgb.as_chunks_mut::<3>();
        pixels.chunks_mut(self.width.max(1)).for_each(<[_]>::reverse);
        self
    }

    /// The image at another size: bilinear, averaging over all source pixels when it shrinks. Rows are scaled
    /// before columns, with a rounding to 8 bits after each, as Pillow does: a channel is within one level of
    /// the exact average, rounded.
    ///
    /// # Errors
    /// [`DataError::Shape`] if either size is 0, or if the result has more pixels than a picture that is read
    /// may have: a strip of one pixel by thousands, scaled until it is as wide as a model wants, fills the
    /// memory.
    pub fn resize(&self, width: usize, height: usize) -> Result<Self, DataError> {
        let refuse = |why: &str| DataError::Shape {
            operation: "resize",
            reason: format!("from {}x{} to {width}x{height}{why}", self.width, self.height),
        };
        let fail = || refuse("");
        if (width, height) == (self.width, self.height) {
            return Ok(self.clone());
        }
        if width
            .checked_mul(height)
            .is_none_or(|pixels| pixels > SIDE * SIDE)
        {
            return Err(refuse(
                " pixels: too many for the memory; cut the picture, or remove it",
            ));
        }
        let size = |n: usize| u32::try_from(n).ok().filter(|&n| n > 0).ok_or_else(fail);
        let (from, to) = (
            (size(self.width)?, size(self.height)?),
            (size(width)?, size(height)?),
        );
        let source = ImageRef::new(from.0, from.1, &self.rgb, PixelType::U8x3).map_err(|_| fail())?;
        let mut target = Image::new(to.0, to.1, PixelType::U8x3);
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        let done = Resizer::new().resize(&source, &mut target, &options);
        done.map_err(|_| fail())?;
        Ok(Self {
            width,
            height,
            rgb: target.into_vec(),
        })
    }
}

/// The file of a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// Where it is, for messages.
    pub path: PathBuf,
    /// PNG or JPEG.
    pub bytes: Vec<u8>,
}

impl ImageFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| DataError::io("read", path, source))?;
        Ok(Self {
            path: path.to_owned(),
            bytes,
        })
    }

    /// The picture.
    ///
    /// # Errors
    /// As [`Picture::open`], but for [`DataError::Io`].
    pub fn decode(&self) -> Result<Picture, DataError> {
        Picture::decode(&self.bytes).map_err(|reason| DataError::format(&self.path, None, reason))
    }
}

/// Labelled pictures by number.
pub trait ImageSource: Send + Sync + 'static {
    /// Number of pictures.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Picture `index`, below `len()`, and its label.
    ///
    /// # Errors
    /// [`DataError`] if it cannot be read.
    fn picture(&self, index: usize) -> Result<(Picture, usize), DataError>;

    /// The file of picture `index` and its label; none if it has no file of its own.
    ///
    /// # Errors
    /// [`DataError`] if it cannot be read.
    fn file(&self, _index: usize) -> Result<Option<(ImageFile, usize)>, DataError> {
        Ok(None)
    }

    /// Names of the classes; a label is an index into them.
    fn classes(&self) -> &[String];

    /// [`Dataset::contents`]: of files their names, which cost no reading.
    fn contents(&self) -> u64 {
        0
    }
}

/// A source seen through a pipeline, as a dataset.
#[derive(Clone, Debug)]
pub struct Images<S> {
    source: S,
    pipeline: Pipeline,
}

impl<S: ImageSource> Images<S> {
    /// Joins a source and a pipeline.
    pub fn new(source: S, pipeline: Pipeline) -> Self {
        Self { source, pipeline }
    }

    /// Names of the classes.
    pub fn classes(&self) -> &[String] {
        self.source.classes()
    }

    /// The source.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// An error of picture `index`, with its file if it has one.
    fn of_file(&self, index: usize, error: DataError) -> DataError {
        match self.source.file(index) {
            Ok(Some((file, _))) => DataError::format(file.path, None, error),
            _ => error,
        }
    }
}

/// One augmented picture. It stays in bytes until it is written into its batch, a quarter of the memory.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageExample {
    /// After the pipeline's steps.
    pub picture: Picture,
    /// How its channels become floats.
    pub normalisation: Normalisation,
    /// Index into the classes.
    pub label: usize,
}

impl<S: ImageSource> Dataset for Images<S> {
    type Item = ImageExample;

    fn len(&self) -> usize {
        self.source.len()
    }

    fn item(&self, index: usize, rng: &mut Rng) -> Result<ImageExample, DataError> {
        let (picture, label) = self.source.picture(index)?;
        check_label(index, label, &self.source)?;
        let augmented = self.pipeline.augment(picture, rng);
        Ok(ImageExample {
            picture: augmented.map_err(|error| self.of_file(index, error))?,
            normalisation: self.pipeline.normalisation(),
            label,
        })
    }

    fn contents(&self) -> u64 {
        self.source.contents()
    }
}

/// Whether the label of picture `index` is one of the classes.
pub(super) fn check_label(index: usize, label: usize, source: &impl ImageSource) -> Result<(), DataError> {
    let classes = source.classes().len();
    match label < classes {
        true => Ok(()),
        false => Err(DataError::Label {
            example: format!("image {index}"),
            label,
            classes,
        }),
    }
}

/// Whether pictures of a batch have one size, which is returned.
pub(super) fn one_size(mut sizes: impl Iterator<Item = (usize, usize)>) -> Result<(usize, usize), DataError> {
    let (width, height) = sizes.next().unwrap_or_default();
    match sizes.find(|&other| other != (width, height)) {
        None => Ok((width, height)),
        Some((other, tall)) => Err(DataError::Shape {
            operation: "batch of images",
            reason: format!("{other}x{tall} beside {width}x{height}; add a crop to the pipeline"),
        }),
    }
}

/// Pictures and their labels.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageBatch {
    /// `[rows, 3, height, width]`.
    pub pixels: Vec<f32>,
    /// `[rows]`: indices into the classes.
    pub labels: Vec<i32>,
    /// Pixels a row.
    pub width: usize,
    /// Rows of a picture.
    pub height: usize,
}

impl ImageBatch {
    /// Puts pictures of one size into a batch.
    ///
    /// # Errors
    /// [`DataError::Shape`] if the sizes differ: the pipeline needs a crop.
    pub fn collate(items: Vec<ImageExample>) -> Result<Self, DataError> {
        let sizes = items.iter().map(|item| (item.picture.width, item.picture.height));
        let (width, height) = one_size(sizes)?;
        let each = 3 * width * height;
        let mut pixels = vec![0.0; each * items.len()];
        for (item, pixels) in items.iter().zip(pixels.chunks_exact_mut(each.max(1))) {
            item.normalisation.apply(&item.picture, pixels);
        }
        Ok(Self {
            pixels,
            labels: items.iter().map(|item| item.label as i32).collect(),
            width,
            height,
        })
    }

    /// Pixels as a float tensor `[rows, 3, height, width]` and labels as an int tensor `[rows]`.
    pub fn tensors<B: Backend>(&self, device: &B::Device) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
        self.clone().into_tensors(device)
    }

    /// As [`ImageBatch::tensors`], without a copy of the pixels.
    pub fn into_tensors<B: Backend>(self, device: &B::Device) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
        let rows = self.labels.len();
        let pixels = TensorData::new(self.pixels, [rows, 3, self.height, self.width]);
        let labels = TensorData::new(self.labels, [rows]);
        (
            Tensor::from_data(pixels, device),
            Tensor::from_data(labels, device),
        )
    }
}

/// Collates pictures into [`ImageBatch`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageBatcher;

impl Collate<ImageExample> for ImageBatcher {
    type Batch = ImageBatch;

    fn collate(&self, items: Vec<ImageExample>) -> Result<ImageBatch, DataError> {
        ImageBatch::collate(items)
    }
}
