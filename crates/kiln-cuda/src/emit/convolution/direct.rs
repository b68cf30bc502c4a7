//! One result a thread, of any type.

use kiln_graph::Value;

use super::correlation::Correlation;
use super::{Convolution, THREADS};
use crate::emit::image::PLACE;
use crate::emit::{Argument, Launch};

const SOURCE: &str = include_str!("../../kernels/cuda/convolution/source.cuh");
const DIRECT: &str = include_str!("../../kernels/cuda/convolution/direct.cuh");
const DIRECT_WEIGHT: &str = include_str!("../../kernels/cuda/convolution/direct_weight.cuh");

/// The launch of a correlation.
pub fn correlation(task: &Correlation<'_>) -> Option<Launch> {
    let mut template = task.template(THREADS);
    template
        .spatial("IMAGE", task.image.extents)
        .strides('X', task.image)
        .result(task.result, task.result.is_channels_last())
        .bools([("GRADIENT", task.gradient)]);
    let operands = vec![
        (
            template.reads(),
            task.image.offset,
            Argument::value(task.image.base),
        ),
        (
            template.reads(),
            task.weight.offset,
            Argument::value(task.weight.base),
        ),
        (template.writes(), 0, Argument::value(task.result.base)),
    ];
    let blocks = task.result.elements().div_ceil(THREADS as usize);
    template.launch(&[PLACE, SOURCE, DIRECT], blocks, operands)
}

/// The launch of a weight's gradient.
pub fn weight(convolution: &Convolution<'_>, out: Value) -> Option<Launch> {
    let (x, y) = (&convolution.x, &convolution.y);
    let [depth, channels] = convolution.group;
    let results = y.channels * depth * convolution.taps();
    let mut template = convolution.template(THREADS);
    template
        .ints([("DEPTH", depth), ("OUT", channels), ("IMAGES", x.images)])
        .constant("Index", "RESULTS", results)
        .spatial("IMAGE", x.extents)
        .spatial("PIXELS", y.extents)
        .strides('X', x)
        .strides('G', y);
    let operands = vec![
        (template.reads(), x.offset, Argument::value(x.base)),
        (template.reads(), y.offset, Argument::value(y.base)),
        (template.writes(), 0, Argument::value(out)),
    ];
    template.launch(&[DIRECT_WEIGHT], results.div_ceil(THREADS as usize), operands)
}
