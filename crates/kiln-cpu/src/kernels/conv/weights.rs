//! Weights in the order in which tiles read them: for each group and panel of result channels,
//! `[kernel element][summed channel][result channel within the panel]`.

use super::{Geometry, Spatial};
use crate::kernels::element::Element;
use crate::kernels::{Param, indent, unpack};

/// The description of the panels of one class of pixels.
pub(super) struct Request<'a> {
    /// Prefix of the generated names.
    pub prefix: &'a str,
    /// Name of the function.
    pub function: &'a str,
    pub geometry: &'a Geometry,
    /// C expression of the weight.
    pub weight: &'a str,
    /// Whether the sum runs over output channels (input gradient) and not over input channels (forward).
    pub transposed: bool,
    /// Kernel elements along each dimension, in the order of the panel.
    pub taps: &'a [Vec<usize>; 3],
    /// Result channels of a group, and how they are cut: width of a full panel, number of panels, width of
    /// the last.
    pub panels: Panels,
    /// Place of the panels in the workspace, in bytes.
    pub offset: usize,
    pub params: &'a [Param],
    pub lanes: usize,
    /// The type that tiles compute in.
    pub element: Element,
}

/// The cut of the result channels of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels {
    pub channels: usize,
    pub width: usize,
    pub count: usize,
    pub last: usize,
}

impl Panels {
    pub fn new(channels: usize, vectors: usize, lanes: usize) -> Self {
        let width = vectors * lanes;
        let count = channels.div_ceil(width);
        let last = (channels - (count - 1) * width).div_ceil(lanes) * lanes;
        Self {
            channels,
            width,
            count,
            last,
        }
    }

    /// Channels of all panels together, with padding.
    pub fn padded(&self) -> usize {
        (self.count - 1) * self.width + self.last
    }
}

/// `function(ctx, begin, end, thread)`: fills panels `begin..end`, counted over groups and panels.
pub(super) fn source(request: &Request<'_>) -> String {
    let Request {
        prefix,
        function,
        geometry,
        weight,
        transposed,
        taps,
        panels,
        offset,
        params,
        lanes,
        element,
    } = *request;
    let (real, vf) = element.ctypes();
    let (group_in, group_out, all_taps) = (geometry.group_in(), geometry.group_out(), geometry.taps());
    let (summed, tap_count) = (
        if transposed { group_out } else { group_in },
        taps.iter().map(Vec::len).product::<usize>(),
    );
    let depth = summed * tap_count;
    let body = if transposed {
        // For one output channel, memory runs over input channels and kernel elements.
        let list: Vec<String> = flat_taps(taps, geometry.kernel)
            .iter()
            .map(usize::to_string)
            .collect();
        let vector = if all_taps == 1 {
            format!("{vf}_load(at)")
        } else {
            format!("{vf}_load_stride(at, {all_taps})")
        };
        format!(
            "static const int32_t taps[] = {{{}}};\nfor (int64_t o = 0; o < {summed}; o++)\n    for (int64_t j = 0; j < width; j += \
             {lanes}) {{\n        const {real} *from = {weight} + ((group * {group_out} + o) * {group_in} + lowest + j) * \
             {all_taps};\n        for (int64_t t = 0; t < {tap_count}; t++) {{\n            {real} *to = packed + (t * {summed} + o) * \
             width + j;\n            const {real} *at = from + taps[t];\n            if (j + {lanes} <= valid) {vf}_store(to, \
             {vector});\n            else for (int64_t l = 0; l < {lanes}; l++) to[l] = j + l < valid ? at[l * {all_taps}] : \
             0.0f;\n        }}\n    }}\n",
            list.join(", ")
        )
    } else {
        // For one output channel, memory runs over the whole depth, kernel elements innermost.
        format!(
            "for (int64_t j = 0; j < width; j += {lanes})\n    for (int64_t k = 0; k < {depth}; k += {lanes}) {{\n        {vf} \
             block[{lanes}];\n        const int64_t some = {depth} - k < {lanes} ? {depth} - k : {lanes};\n        KILN_UNROLL for (int l \
             = 0; l < {lanes}; l++) {{\n            const {real} *from = {weight} + (group * {group_out} + lowest + j + l) * {depth} + \
             k;\n            block[l] = j + l >= valid ? ({vf}){{0}} : some == {lanes} ? {vf}_load(from) : {vf}_load_n(from, \
             some);\n        }}\n        {vf}_transpose(block);\n        for (int64_t l = 0; l < some; l++) {vf}_store(packed + ((k + l) % \
             {all_taps} * {summed} + (k + l) / {all_taps}) * width + j, block[l]);\n    }}\n"
        )
    };
    format!(
        "/* Packs panels of the weight. */\nstatic void {function}(void *ctx, int64_t begin, int64_t end, int thread) {{\n    \
         const struct {prefix}_args *args = ctx;\n{}    for (int64_t unit = begin; unit < end; unit++) {{\n        const int64_t \
         group = unit / {count}, panel = unit % {count}, lowest = panel * {full};\n        const int64_t width = panel == {} ? {} : \
         {full}, valid = {channels} - lowest < width ? {channels} - lowest : width;\n        {real} *packed = ({real} \
         *)(args->workspace + {offset}) + (group * {padded} + lowest) * {depth};\n{}    }}\n}}\n",
        unpack(params),
        panels.count - 1,
        panels.last,
        indent(&body, 8),
        count = panels.count,
        full = panels.width,
        channels = panels.channels,
        padded = panels.padded(),
    )
}

/// Positions of the chosen kernel elements in the flat kernel.
pub(super) fn flat_taps(taps: &[Vec<usize>; 3], kernel: Spatial) -> Vec<usize> {
    let mut flat = Vec::new();
    for z in &taps[0] {
        for y in &taps[1] {
            for x in &taps[2] {
                flat.push((z * kernel[1] + y) * kernel[2] + x);
            }
        }
    }
    flat
}
