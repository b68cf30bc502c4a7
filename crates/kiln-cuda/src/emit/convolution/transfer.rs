//! Copies images and weights into working memory, and results from there, where working memory has their
//! dimensions in another order or pads their channels.

use kiln_graph::DType;

use super::THREADS;
use crate::emit::image::{Image, Template};
use crate::emit::{Argument, Launch};

const TRANSFER: &str = include_str!("../../kernels/cuda/convolution/transfer.cuh");

/// Windows of so many elements are copied by one thread for each channel.
const SMALL_PLANE: usize = 64;

/// The launch that copies a tensor of `dtype` between `stored`, where the step has it, and byte `copy` of
/// working memory, where it lies as `other` says. `other` may have more channels, which become zeros.
pub fn transfer(dtype: DType, [stored, other]: [&Image; 2], copy: usize, to_copy: bool) -> Option<Launch> {
    let (from, to) = if to_copy { (stored, other) } else { (other, stored) };
    let to_channels = to.channels;
    let plane = stored.plane();
    let each = match () {
        () if to_copy && to_channels <= 8 && to.has_vectors(4, to_channels) => 0,
        () if plane <= SMALL_PLANE && stored.images * to_channels >= THREADS as usize => 1,
        () => 2,
    };
    let units = match each {
        0 => stored.images * plane,
        1 => stored.images * to_channels,
        _ => stored.images * plane * to_channels,
    };
    let mut template = Template::new(dtype, "float", THREADS, &[from, to]);
    template
        .strides('F', from)
        .strides('T', to)
        .spatial("EXTENT", stored.extents)
        .ints([
            ("EACH_PLACE", 0),
            ("EACH_CHANNEL", 1),
            ("EACH", each),
            ("PLANE", plane),
            ("CHANNELS", stored.channels),
            ("TO_CHANNELS", to_channels),
        ])
        .constant("Index", "UNITS", units);
    let (own, other) = (Argument::value(stored.base), Argument::Scratch(copy));
    let operands = match to_copy {
        true => vec![
            (template.reads(), stored.offset, own),
            (template.packs(), 0, other),
        ],
        false => vec![
            (template.reads(), 0, other),
            (template.packs(), stored.offset, own),
        ],
    };
    template.launch(&[TRANSFER], units.div_ceil(THREADS as usize), operands)
}
