//! The gradient of a pool of largest elements from any indices.

use super::{Pool, THREADS, sum_register};
use crate::emit::expressions::memory_type;
use crate::emit::image::{Image, Template};
use crate::emit::{Argument, KernelCode};

const SCATTER: &str = include_str!("../../kernels/cuda/pooling/scatter.cuh");
const NARROW: &str = include_str!("../../kernels/cuda/pooling/narrow.cuh");

/// Threads that keep a large device busy. Where images and channels are fewer, each is cut into slices.
const BUSY: usize = 1 << 16;

/// The code of the gradient.
pub fn generate(pool: &Pool) -> Option<KernelCode> {
    let (indices, index_type) = pool.indices.as_ref()?;
    let result = &pool.result;
    let places = result.plane();
    let planes = result.images * result.channels;
    let slices = (BUSY / planes).clamp(1, places);
    let slice = places.div_ceil(slices);
    let slices = places.div_ceil(slice);
    // Elements of 16 bits are added in 32, in memory of the same order.
    let wide = pool.dtype.is_float() && pool.dtype.size() == 2;

    let mut template = template(pool, result);
    template
        .alias("I", memory_type(*index_type))
        .alias("S", if wide { "R" } else { "T" })
        .spatial("IMAGE", pool.image.extents)
        .strides('X', &pool.image)
        .strides('I', indices)
        .strides('S', result)
        .ints([
            ("IMAGES", result.images),
            ("CHANNELS", result.channels),
            ("SLICES", slices),
        ])
        .constant("Index", "SLICE", slice)
        .constant("Index", "PLACES", places);
    let [_, height, width] = result.extents;
    let slot_at = format!(
        "inline Index slot_at(Index place)\n{{\n    return place / {} * S0 + place / {width} % {height} * S1 + place % {width} * S2;\n}}\n",
        height * width
    );
    let sums = match wide {
        true => (template.sums_written(), 0, Argument::Scratch(0)),
        false => (template.writes(), 0, Argument::value(result.base)),
    };
    let operands = vec![
        (
            template.reads(),
            pool.image.offset,
            Argument::value(pool.image.base),
        ),
        (
            format!("const {}", memory_type(*index_type)),
            indices.offset,
            Argument::value(indices.base),
        ),
        sums,
    ];
    let blocks = (planes * slices).div_ceil(THREADS as usize);
    let mut launches = vec![template.launch(&[&slot_at, SCATTER], blocks, operands)?];
    let mut scratch = 0;
    if wide {
        let mut template = self::template(pool, result);
        template.constant("Index", "RESULTS", result.elements());
        let operands = vec![
            (template.sums(), 0, Argument::Scratch(0)),
            (template.writes(), 0, Argument::value(result.base)),
        ];
        let blocks = result.elements().div_ceil(THREADS as usize);
        launches.push(template.launch(&[NARROW], blocks, operands)?);
        scratch = result.elements() * 4;
    }
    let mut code = KernelCode::launches(launches);
    code.scratch = scratch;
    Some(code)
}

fn template(pool: &Pool, result: &Image) -> Template {
    let mut images = vec![&pool.image, result];
    images.extend(pool.indices.iter().map(|(image, _)| image));
    Template::new(pool.dtype, sum_register(pool.dtype), THREADS, &images)
}
