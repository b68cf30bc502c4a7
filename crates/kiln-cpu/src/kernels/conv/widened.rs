//! Convolutions with a weight of 16 bits: the weight is widened to f32 in the workspace, and the rest is
//! the convolution of f32.
//!
//! Each kernel of convolutions packs weights in its own way, mostly with strides. Widening them first costs
//! one pass over a tensor that is small beside the images, and no kernel needs a form for 16 bits.

use super::walk::Direction;
use super::{ConvSpec, correlate};
use crate::isa::Isa;
use crate::kernels::{KernelText, Param, Width, call_part, round_up};

/// Elements that a thread widens at a time.
const BLOCK: usize = 1024;

/// The forward convolution or the input gradient.
pub(super) fn correlate(spec: ConvSpec<'_>, direction: Direction, isa: Isa) -> KernelText {
    let (storage, element) = (spec.storage, spec.storage.element());
    let (outer, comment, threads) = (spec.name.clone(), spec.comment.clone(), spec.threads);
    let (weight, params) = (spec.weight.clone(), spec.params.clone());
    let (count, is_small) = (spec.geometry.weight_len(), spec.geometry.is_small());
    let widened = Param::new(format!("const {} *", element.ctype()), "widened");
    let inner = ConvSpec {
        name: format!("{outer}_inner"),
        weight: widened.name.clone(),
        params: params.iter().cloned().chain([widened]).collect(),
        ..spec
    };
    let inner = correlate::emit(&inner, direction, isa);

    let frame = super::Frame {
        name: &outer,
        comment: &comment,
        params: &params,
        threads,
    };
    let at = round_up(inner.workspace_bytes, 64);
    let lanes = element.lanes(isa);
    let (real, vf) = element.ctypes();
    let place = format!("({weight}) + i");
    let body = format!(
        "{real} *to = ({real} *)(args->workspace + {at});\nfor (int64_t block = begin; block < end; block++) {{\n    const int64_t block_end = (block + 1) * \
         {BLOCK} < {count} ? (block + 1) * {BLOCK} : {count};\n    int64_t i = block * {BLOCK};\n    for (; i + {lanes} <= block_end; i += {lanes}) {vf}_store(to + i, {});\n    \
         for (; i < block_end; i++) to[i] = {};\n}}\n",
        storage.load(Width::Vector, &place),
        storage.load(Width::Scalar, &place),
    );
    let source =
        inner.source + &frame.head("The weight is widened first.", "") + &frame.part("", "widen", &body);
    let passed: String = params.iter().map(|param| format!("{}, ", param.name)).collect();
    let calls =
        call_part(
            is_small || threads == 1,
            &format!("{outer}_widen"),
            count.div_ceil(BLOCK),
        ) + &format!("    {outer}_inner(rt, {passed}(const {real} *)(workspace + {at}), workspace);\n");
    let bytes = at + round_up(count * element.bytes(), 64);
    let mut kernel = frame.finish(source, &calls, bytes);
    kernel.helpers = inner.helpers;
    kernel
}
