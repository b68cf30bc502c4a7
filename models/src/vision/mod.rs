//! Image classifiers of torchvision and timm, each by its own configuration or by name through
//! [`VisionConfig`].

pub mod alexnet;
pub mod mnasnet;
pub mod mobilenet;
pub mod resnet;
pub mod squeezenet;
pub mod vgg;
pub mod vit;
mod zoo;

pub use zoo::{VisionConfig, VisionModel};

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
