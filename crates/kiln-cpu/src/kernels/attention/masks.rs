//! Masks of a row, read once where rows share them.

use super::memory::Memory;
use super::plan::AttentionPlan;
use super::rows::Masks;
use super::{AttentionSpec, View, section};
use crate::kernels::{Width, indent};

/// Memory for the masks of a row, and the statements that fill it: once for a head if all rows share the
/// masks, otherwise for each row `i`.
pub(super) struct MaskRows {
    pub masks: Masks,
    by_head: String,
    pub by_row: String,
}

impl MaskRows {
    pub fn new(spec: &AttentionSpec, plan: &AttentionPlan, memory: &mut Memory) -> Self {
        let (mut by_head, mut by_row) = (String::new(), String::new());
        let keys = spec.extents.keys;
        let mut add = |view: &View, ctype: &str, vector: &str, statement: &str| {
            let per_row = view.strides[2] != 0 && spec.extents.queries > 1;
            let whole = if view.strides[3] == 1 {
                keys / plan.lanes * plan.lanes
            } else {
                0
            };
            let mut text = format!(
                "{{\n    const {ctype} *from = {} + {} * {};\n",
                view.head("batch", "head"),
                if per_row { "row" } else { "0" },
                view.strides[2],
            );
            if whole > 0 {
                text.push_str(&format!(
                    "    for (int64_t j = 0; j < {whole}; j += {}) {vector};\n",
                    plan.lanes
                ));
            }
            if whole < keys {
                text.push_str(&format!(
                    "    for (int64_t j = {whole}; j < {keys}; j++) {};\n",
                    statement.replace('@', &format!("from + j * {}", view.strides[3])),
                ));
            }
            text.push_str("}\n");
            if per_row { &mut by_row } else { &mut by_head }.push_str(&text);
        };
        let element = plan.element;
        let (vf, vi) = (element.vector(), element.integers());
        if let Some((mask, storage)) = &spec.mask {
            memory.part(element.ctype(), "bias", plan.ld);
            add(
                mask,
                storage.ctype(),
                &format!(
                    "{vf}_store(bias + j, {})",
                    storage.load(Width::Vector, "from + j")
                ),
                &format!("bias[j] = {}", storage.load(Width::Scalar, "@")),
            );
        }
        if let Some(hidden) = &spec.hidden {
            memory.part(element.integer(), "hide", plan.ld);
            add(
                hidden,
                "uint8_t",
                &format!("{vi}_store(hide + j, {vi}_mask_u8(from + j))"),
                "hide[j] = *(@) ? -1 : 0",
            );
        }
        let masks = Masks {
            bias: spec.mask.is_some(),
            hide: spec.hidden.is_some(),
            bias_last: spec.mask_last,
        };
        Self {
            masks,
            by_head,
            by_row,
        }
    }

    /// The statements that fill shared masks once for a head, in a block that `open` opens.
    pub fn once(&self, open: &str) -> String {
        if self.by_head.is_empty() {
            return String::new();
        }
        let block = format!("{open}{}}}\n", indent(&self.by_head, 4));
        section("Masks that all rows of a head share.", &block)
    }
}
