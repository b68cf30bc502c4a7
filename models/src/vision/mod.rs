//! Image classifiers of torchvision and timm, each by its own configuration or by name through
//! [`VisionConfig`].

pub mod alexnet;
mod file;
pub mod mnasnet;
pub mod mobilenet;
pub mod resnet;
pub mod squeezenet;
pub mod vgg;
pub mod vit;
mod zoo;

pub use zoo::{VisionConfig, VisionModel};

use crate::ModelError;

/// Whether a network that was built for colour images takes a batch of shape
/// `[batch, channels, height, width]`; `least` is the smallest side that its pools and strides leave a pixel
/// of.
fn check_images(family: &'static str, dims: [usize; 4], least: usize) -> Result<(), ModelError> {
    let [_, channels, height, width] = dims;
    let reason = if channels == 1 {
        format!("grey images, shape {dims:?}: repeat the one channel three times (`images.repeat_dim(1, 3)`)")
    } else if channels != 3 {
        format!("images of {channels} channels, shape {dims:?}: the network takes 3, red, green and blue")
    } else if height < least || width < least {
        format!(
            "images of {height}x{width} pixels, but the network needs at least {least}x{least}: enlarge them"
        )
    } else {
        return Ok(());
    };
    Err(ModelError::Input { family, reason })
}

/// Renumbers the first index of `list.index.rest`; any other path stays as it is.
fn renumber(path: &str, place: impl Fn(&str, usize) -> usize) -> String {
    let parts = path
        .split_once('.')
        .and_then(|(list, rest)| Some((list, rest.split_once('.')?)));
    match parts.and_then(|(list, (index, rest))| Some((list, index.parse().ok()?, rest))) {
        Some((list, index, rest)) => format!("{list}.{}.{rest}", place(list, index)),
        None => path.to_string(),
    }
}
