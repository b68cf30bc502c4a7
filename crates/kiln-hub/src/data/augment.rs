//! Augmentation and normalisation, with the meanings and defaults of torchvision's transforms.

use super::error::DataError;
use super::image::Picture;
use super::rng::Rng;
use super::vector::vectorised;
use super::view::{Change, View};

/// One step on a picture.
#[derive(Clone, Debug, PartialEq)]
pub enum Augment {
    /// Scales the shorter side to this many pixels, keeping the ratio.
    Resize(usize),
    /// The square of this many pixels in the middle; smaller pictures are padded with black.
    CenterCrop(usize),
    /// A square of this many pixels anywhere, after padding each side with black.
    RandomCrop {
        /// Pixels a side of the result.
        size: usize,
        /// Black pixels added on each side first.
        padding: usize,
    },
    /// A rectangle of random area and ratio, scaled to a square: Inception's crop, the usual one for
    /// ImageNet.
    RandomResizedCrop {
        /// Pixels a side of the result.
        size: usize,
        /// Smallest and largest part of the area.
        scale: (f32, f32),
        /// Smallest and largest width divided by height.
        ratio: (f32, f32),
    },
    /// Mirrors left to right with this probability.
    HorizontalFlip(f32),
}

/// Steps in order, then normalisation by channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    /// The steps.
    pub steps: Vec<Augment>,
    /// Mean of each channel, of values from 0 to 1.
    pub mean: [f32; 3],
    /// Standard deviation of each channel.
    pub deviation: [f32; 3],
}

/// The statistics that torchvision and timm use for ImageNet.
const IMAGENET: ([f32; 3], [f32; 3]) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);

impl Pipeline {
    /// Values from 0 to 1, nothing changed.
    pub fn plain() -> Self {
        Self {
            steps: vec![],
            mean: [0.0; 3],
            deviation: [1.0; 3],
        }
    }

    /// Steps, without normalisation.
    pub fn new(steps: Vec<Augment>) -> Self {
        Self {
            steps,
            ..Self::plain()
        }
    }

    /// Sets mean and deviation of each channel.
    pub fn with_normalisation(mut self, mean: [f32; 3], deviation: [f32; 3]) -> Self {
        (self.mean, self.deviation) = (mean, deviation);
        self
    }

    /// Training on CIFAR: crop of 32 with padding 4, flip, CIFAR's statistics.
    pub fn cifar_train() -> Self {
        let steps = vec![
            Augment::RandomCrop { size: 32, padding: 4 },
            Augment::HorizontalFlip(0.5),
        ];
        Self {
            steps,
            ..Self::cifar_evaluation()
        }
    }

    /// Evaluation on CIFAR: the statistics only.
    pub fn cifar_evaluation() -> Self {
        Self::plain().with_normalisation([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
    }

    /// Training on ImageNet: random resized crop, flip, ImageNet's statistics.
    pub fn imagenet_train(size: usize) -> Self {
        let crop = Augment::RandomResizedCrop {
            size,
            scale: (0.08, 1.0),
            ratio: (3.0 / 4.0, 4.0 / 3.0),
        };
        Self::new(vec![crop, Augment::HorizontalFlip(0.5)]).with_normalisation(IMAGENET.0, IMAGENET.1)
    }

    /// Evaluation on ImageNet: shorter side to 8/7 of the size, centre crop, ImageNet's statistics.
    pub fn imagenet_evaluation(size: usize) -> Self {
        let steps = vec![Augment::Resize((size * 8).div_ceil(7)), Augment::CenterCrop(size)];
        Self::new(steps).with_normalisation(IMAGENET.0, IMAGENET.1)
    }

    /// Applies the steps.
    ///
    /// # Errors
    /// [`DataError::Shape`] for a picture without pixels or a size of 0.
    pub fn augment(&self, mut picture: Picture, rng: &mut Rng) -> Result<Picture, DataError> {
        for step in &self.steps {
            for change in step.changes(picture.width, picture.height, rng)? {
                picture = change.apply(picture)?;
            }
        }
        Ok(picture)
    }

    /// What [`Pipeline::augment`] would show of a picture of this size, with the same random numbers; none if
    /// the steps do more than scale once and cut.
    ///
    /// # Errors
    /// Those of [`Pipeline::augment`].
    pub fn view(&self, width: usize, height: usize, rng: &mut Rng) -> Result<Option<View>, DataError> {
        let (mut view, mut size) = (Some(View::whole(width, height)), (width, height));
        for step in &self.steps {
            for change in step.changes(size.0, size.1, rng)? {
                view = view.and_then(|view| view.changed(change));
                size = match change {
                    Change::Resize(width, height) | Change::Crop { width, height, .. } => (width, height),
                    Change::Mirror => size,
                };
            }
        }
        Ok(view)
    }

    /// The picture as floats, `[3, height, width]`, channel by channel.
    pub fn normalise(&self, picture: &Picture) -> Vec<f32> {
        let mut values = vec![0.0; picture.rgb.len()];
        self.normalisation().apply(picture, &mut values);
        values
    }

    /// How bytes become floats.
    pub fn normalisation(&self) -> Normalisation {
        Normalisation {
            // (byte / 255 - mean) / deviation as one multiplication and one addition.
            scale: self.deviation.map(|deviation| 1.0 / (255.0 * deviation)),
            shift: std::array::from_fn(|channel| -self.mean[channel] / self.deviation[channel]),
        }
    }
}

/// What makes a float of a byte: `byte * scale + shift`, by channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalisation {
    /// The factor of each channel.
    pub scale: [f32; 3],
    /// What is added to each channel.
    pub shift: [f32; 3],
}

impl Normalisation {
    /// Writes a picture as floats, `[3, height, width]`, into as many values as the picture has bytes.
    pub(crate) fn apply(&self, picture: &Picture, values: &mut [f32]) {
        let (pixels, _) = picture.rgb.as_chunks::<3>();
        let count = pixels.len();
        let (red, rest) = values.split_at_mut(count);
        let (green, blue) = rest.split_at_mut(count);
        let Self { scale, shift } = *self;
        vectorised(
            #[inline(always)]
            || {
                for (((pixel, r), g), b) in pixels.iter().zip(red).zip(green).zip(blue) {
                    *r = f32::from(pixel[0]) * scale[0] + shift[0];
                    *g = f32::from(pixel[1]) * scale[1] + shift[1];
                    *b = f32::from(pixel[2]) * scale[2] + shift[2];
                }
            },
        );
    }
}

impl Augment {
    /// What it does to a picture of this size. All randomness comes from `rng`.
    ///
    /// # Errors
    /// [`DataError::Shape`] for a picture without pixels or a size of 0.
    fn changes(&self, width: usize, height: usize, rng: &mut Rng) -> Result<Vec<Change>, DataError> {
        if width == 0 || height == 0 || self.size() == Some(0) {
            return Err(DataError::Shape {
                operation: "augmentation",
                reason: format!("{self:?} of {width}x{height} pixels"),
            });
        }
        Ok(match *self {
            Augment::Resize(short) => {
                let scaled = |long: usize, of: usize| (long * short / of).max(1);
                vec![match width <= height {
                    true => Change::Resize(short, scaled(height, width)),
                    false => Change::Resize(scaled(width, height), short),
                }]
            }
            Augment::CenterCrop(size) => {
                vec![square(centred(width, size), centred(height, size), size)]
            }
            Augment::RandomCrop { size, padding } => {
                let mut start = |side: usize| {
                    let room = side as isize + 2 * padding as isize - size as isize;
                    let first = -(padding as isize);
                    match room {
                        // A picture that is smaller even with its padding is centred.
                        room if room < 0 => first + room.div_euclid(2),
                        room => first + rng.index(room as usize + 1) as isize,
                    }
                };
                let x = start(width);
                vec![square(x, start(height), size)]
            }
            Augment::RandomResizedCrop { size, scale, ratio } => {
                let (x, y, width, height) = random_rectangle(width, height, scale, ratio, rng);
                let (x, y) = (x as isize, y as isize);
                vec![Change::Crop { x, y, width, height }, Change::Resize(size, size)]
            }
            Augment::HorizontalFlip(probability) => {
                let mirrors = rng.chance(probability);
                mirrors.then_some(Change::Mirror).into_iter().collect()
            }
        })
    }

    /// Pixels a side of the result, for the steps that set it.
    fn size(&self) -> Option<usize> {
        match *self {
            Augment::Resize(size) | Augment::CenterCrop(size) => Some(size),
            Augment::RandomCrop { size, .. } | Augment::RandomResizedCrop { size, .. } => Some(size),
            Augment::HorizontalFlip(_) => None,
        }
    }
}

fn square(x: isize, y: isize, size: usize) -> Change {
    let (width, height) = (size, size);
    Change::Crop { x, y, width, height }
}

/// Where a crop in the middle of a side begins, rounded as torchvision does: halves to the even neighbour
/// when it cuts, the larger part of an odd padding at the end when it pads.
fn centred(side: usize, size: usize) -> isize {
    if side < size {
        return -((size - side) as isize / 2);
    }
    let room = (side - size) as isize;
    let half = room / 2;
    half + isize::from(room % 2 == 1 && half % 2 == 1)
}

/// A rectangle of random area and ratio inside the picture: ten attempts, then the largest one in the middle
/// whose ratio is allowed.
fn random_rectangle(
    width: usize,
    height: usize,
    scale: (f32, f32),
    ratio: (f32, f32),
    rng: &mut Rng,
) -> (usize, usize, usize, usize) {
    let area = (width * height) as f32;
    for _ in 0..10 {
        let target = area * rng.range(scale.0, scale.1);
        // Uniform in the logarithm, so that a ratio and its inverse are as likely.
        let aspect = rng
            .range(
                ratio.0.max(f32::MIN_POSITIVE).ln(),
                ratio.1.max(f32::MIN_POSITIVE).ln(),
            )
            .exp();
        let w = (target * aspect).sqrt().round() as usize;
        let h = (target / aspect).sqrt().round() as usize;
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            return (rng.index(width - w + 1), rng.index(height - h + 1), w, h);
        }
    }
    let aspect = width as f32 / height as f32;
    let (w, h) = if aspect < ratio.0 {
        (width, (width as f32 / ratio.0).round() as usize)
    } else if aspect > ratio.1 {
        ((height as f32 * ratio.1).round() as usize, height)
    } else {
        (width, height)
    };
    let (w, h) = (w.clamp(1, width), h.clamp(1, height));
    ((width - w) / 2, (height - h) / 2, w, h)
}
