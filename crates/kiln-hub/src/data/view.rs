//! What a pipeline shows of a picture, before any pixel is touched.
//!
//! Steps change a picture of a known size by resizing, cropping and mirroring it. [`Change`]s can be applied
//! one after the other, which is how the host augments. Most pipelines come down to one [`View`]: a rectangle
//! is scaled, and a window of the result is taken. That is what can be done on a GPU, in one pass.

use super::error::DataError;
use super::image::Picture;

/// One thing that a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// To this width and height.
    Resize(usize, usize),
    /// A part, black where it reaches over the edge.
    Crop {
        x: isize,
        y: isize,
        width: usize,
        height: usize,
    },
    /// Left to right.
    Mirror,
}

impl Change {
    /// The picture afterwards.
    ///
    /// # Errors
    /// Those of [`Picture::resize`].
    pub fn apply(self, picture: Picture) -> Result<Picture, DataError> {
        match self {
            Self::Resize(width, height) => picture.resize(width, height),
            Self::Crop { x, y, width, height } => Ok(picture.crop(x, y, width, height)),
            Self::Mirror => Ok(picture.into_flipped()),
        }
    }
}

/// What a pipeline shows of a picture: a rectangle is scaled, and a window of that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// First column and row of the rectangle.
    pub corner: (usize, usize),
    /// Its width and height.
    pub from: (usize, usize),
    /// Width and height after scaling.
    pub scaled: (usize, usize),
    /// First column and row of the window in what was scaled. Where it reaches over the edge it is black.
    pub window: (isize, isize),
    /// Width and height of the window.
    pub size: (usize, usize),
    /// Whether the window is mirrored left to right.
    pub mirrored: bool,
}

impl View {
    /// All of a picture.
    pub fn whole(width: usize, height: usize) -> Self {
        let size = (width, height);
        Self {
            corner: (0, 0),
            from: size,
            scaled: size,
            window: (0, 0),
            size,
            mirrored: false,
        }
    }

    /// What it shows after a change; none if that is no view of the picture.
    pub(super) fn changed(self, change: Change) -> Option<Self> {
        match change {
            Change::Mirror => Some(Self {
                mirrored: !self.mirrored,
                ..self
            }),
            Change::Resize(width, height) if (width, height) == self.size => Some(self),
            Change::Resize(width, height) => {
                let inside = [
                    (self.window.0, self.size.0, self.scaled.0),
                    (self.window.1, self.size.1, self.scaled.1),
                ];
                let is_inside = inside.iter().all(|&(begin, length, side)| {
                    usize::try_from(begin).is_ok_and(|begin| begin + length <= side)
                });
                // Scaling twice, or scaling a black border, is more than one pass.
                if self.scaled != self.from || !is_inside {
                    return None;
                }
                let (x, y) = (self.window.0.unsigned_abs(), self.window.1.unsigned_abs());
                Some(Self {
                    corner: (self.corner.0 + x, self.corner.1 + y),
                    from: self.size,
                    scaled: (width, height),
                    window: (0, 0),
                    size: (width, height),
                    ..self
                })
            }
            Change::Crop { x, y, width, height } => {
                let x = match self.mirrored {
                    true => self.size.0 as isize - x - width as isize,
                    false => x,
                };
                let crop = [
                    (x, width, self.window.0, self.size.0, self.scaled.0),
                    (y, height, self.window.1, self.size.1, self.scaled.1),
                ];
                // What an earlier crop has cut off stays black.
                let hides_nothing = crop.iter().all(|&(begin, length, window, size, scaled)| {
                    let end = |begin: isize, length: usize| begin + length as isize;
                    let is_inside = begin >= 0 && end(begin, length) <= size as isize;
                    is_inside || (window <= 0 && end(window, size) >= scaled as isize)
                });
                hides_nothing.then_some(Self {
                    window: (self.window.0 + x, self.window.1 + y),
                    size: (width, height),
                    ..self
                })
            }
        }
    }

    /// The window of a picture.
    ///
    /// # Errors
    /// Those of [`Picture::resize`].
    pub fn apply(&self, picture: &Picture) -> Result<Picture, DataError> {
        let (x, y) = (self.corner.0 as isize, self.corner.1 as isize);
        let cut = picture.crop(x, y, self.from.0, self.from.1);
        let scaled = cut.resize(self.scaled.0, self.scaled.1)?;
        let window = scaled.crop(self.window.0, self.window.1, self.size.0, self.size.1);
        Ok(match self.mirrored {
            true => window.into_flipped(),
            false => window,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::augment::{Augment, Pipeline};
    use super::super::rng::Rng;
    use super::*;
    use proptest::prelude::*;

    fn noise(width: usize, height: usize) -> Picture {
        let rgb = (0..width * height * 3).map(|at| (at * 37 % 251) as u8).collect();
        Picture { width, height, rgb }
    }

    fn step() -> impl Strategy<Value = Augment> {
        prop_oneof![
            (1_usize..40).prop_map(Augment::Resize),
            (1_usize..40).prop_map(Augment::CenterCrop),
            (1_usize..40, 0_usize..6).prop_map(|(size, padding)| Augment::RandomCrop { size, padding }),
            (1_usize..40).prop_map(|size| Augment::RandomResizedCrop {
                size,
                scale: (0.1, 1.0),
                ratio: (0.7, 1.4),
            }),
            Just(Augment::HorizontalFlip(0.5)),
        ]
    }

    proptest! {
        #[test]
        fn a_view_shows_what_the_steps_make(
            steps in prop::collection::vec(step(), 0..4),
            width in 1_usize..50,
            height in 1_usize..50,
            seed: u64,
        ) {
            let pipeline = Pipeline::new(steps);
            let picture = noise(width, height);
            let made = pipeline.augment(picture.clone(), &mut Rng::at(&[seed])).unwrap();
            let view = pipeline.view(width, height, &mut Rng::at(&[seed])).unwrap();
            if let Some(view) = view {
                prop_assert_eq!(view.apply(&picture).unwrap(), made, "{:?}", view);
            }
        }
    }

    #[test]
    fn the_usual_pipelines_are_views() {
        for (pipeline, size) in [
            (Pipeline::imagenet_train(24), 24),
            (Pipeline::imagenet_evaluation(24), 24),
            (Pipeline::cifar_train(), 32),
        ] {
            for seed in 0..50 {
                let view = pipeline.view(48, 40, &mut Rng::at(&[seed])).unwrap();
                let view = view.expect("one pass does it");
                assert_eq!(view.size, (size, size));
            }
        }
        // Scaling twice is not: both would round.
        let twice = Pipeline::new(vec![Augment::Resize(20), Augment::Resize(10)]);
        assert_eq!(twice.view(48, 40, &mut Rng::at(&[0])).unwrap(), None);
    }
}
