//! Attention and its gradient without a score matrix in memory.
//!
//! A thread takes a block of query rows of one head at a time. Their scores against all keys are a *strip*
//! in the thread's own memory, some tens of rows that stay in L2. A register-tiled product makes the strip,
//! one pass over each row turns scores into weights, and the next product consumes the weights. The kernel
//! stores the result and two numbers for each row: its largest score and the sum of its exponentials. From
//! these two numbers the gradient computes the strip again, and with it a second strip, the gradient of the
//! weights. The gradients of keys and values are collected in the thread's memory while all rows that see
//! them pass by.
//!
//! **Operands** are windows of any strides, so heads are never split or joined in memory. Keys are packed
//! once for a head, transposed, in panels of two vectors; values and blocks of queries are copied to rows
//! of whole vectors. These copies widen tensors of 16 bits to f32, and results are rounded once, when they
//! are stored, so no other part of the kernel depends on the 16-bit types. Where the machine multiplies
//! pairs of bf16, one by one or in tiles of AMX, the copies hold pairs ([`pairs`]), and weights and gradients
//! of scores are rounded to bf16 before they are multiplied.
//!
//! **Causal order** leaves out tiles of scores that no row of the tile sees, both in the products that make
//! strips and in those that read them. Where only a mask expresses the order, the kernel looks in the mask
//! for the last key that each row sees.
//!
//! **Threads** share blocks of rows; in the gradient they share heads of keys. Each number is computed in
//! an order that depends on the shape alone.

mod backward;
mod forward;
mod masks;
mod memory;
mod pack;
mod pairs;
mod plan;
mod rows;
mod visible_keys;

use super::element::{Element, Storage};
use super::{Param, Width};

pub use backward::{Gradients, gradient, gradient_workspace};
pub use forward::{forward, forward_workspace};

/// Extents of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extents {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub key_heads: usize,
    /// Query positions.
    pub queries: usize,
    /// Key positions.
    pub keys: usize,
    /// Elements of a query or key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
}

/// A tensor of four dimensions in memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct View {
    /// C expression of its first element's address, in terms of parameters.
    pub pointer: String,
    /// Elements between neighbours along each dimension: batch, head, position and element; for masks
    /// batch, head, query, key.
    pub strides: [i64; 4],
}

impl View {
    /// Address of position 0 of a head.
    fn head(&self, batch: &str, head: &str) -> String {
        let [of_batch, of_head, ..] = self.strides;
        format!("{} + {batch} * {of_batch} + {head} * {of_head}", self.pointer)
    }
}

/// Whether keys past the last one that is not hidden from a row may be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Skips {
    /// They may not: their weights count.
    Never,
    /// `fill` is so low that their weights are zero.
    Always,
    /// They may unless every key that the row sees scores nearly as low as `fill`. The kernel compares the
    /// row's largest score with `fill`, and takes all keys in that case.
    Mostly,
}

/// Operands of both directions. With dropout there are two more parameters, `seed` and `stream` (`const
/// uint64_t *`).
pub struct AttentionSpec {
    /// C identifier of the kernel.
    pub name: String,
    /// Extents.
    pub extents: Extents,
    /// How queries, keys, values, results and their gradients are stored. All other values have the type
    /// that these have in registers.
    pub storage: Storage,
    /// The numbers that occur, by name, and how each is stored: `scale`, `fill`, `keep`, `factor`,
    /// `d_scale`, `inner`, `d_factor`. The parameter for `scale` is `scale_at`.
    pub numbers: Vec<(&'static str, Storage)>,
    /// Queries.
    pub query: View,
    /// Keys.
    pub key: View,
    /// Values.
    pub value: View,
    /// Whether query `i` sees keys `j <= i + keys - queries` only.
    pub causal: bool,
    /// Added to the scores, and how it is stored; strides of 0 broadcast.
    pub mask: Option<(View, Storage)>,
    /// `uint8_t`: where not 0 the score is `fill`.
    pub hidden: Option<View>,
    /// Whether `mask` is added after hiding, to `fill` too.
    pub mask_last: bool,
    /// Whether hidden keys at the end of a row are left out.
    pub skips: Skips,
    /// Whether weights are multiplied by `factor` where the uniform draw is below `keep`, and dropped
    /// elsewhere.
    pub dropout: bool,
    /// Whether dropout applies to the scores, before masks, instead of to the weights.
    pub drop_scores: bool,
    /// Whether a row of which every score is -inf has weights of zero.
    pub safe: bool,
    /// The statistics (largest score, sum of exponentials), contiguous: C expression of the address.
    /// Written by the forward kernel.
    pub stats: String,
    /// The parameters.
    pub params: Vec<Param>,
    /// Most threads the kernel may meet; decides the size of the workspace, never the result.
    pub threads: usize,
    /// Whether tiles are as tall as registers allow, whatever the number of rows: one form for all extents.
    pub tallest: bool,
}

/// `text` under a comment; nothing without text.
fn section(comment: &str, text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    format!("/* {comment} */\n{text}")
}

impl AttentionSpec {
    /// Whether rows see different numbers of keys.
    fn varies(&self) -> bool {
        self.causal || self.skips != Skips::Never
    }

    /// C condition for a weight of `fill` that is not zero beside a largest score `most`, or NaN. The
    /// difference of two large numbers is exact, the sum of one and a small one is not.
    fn fill_counts(&self, most: &str) -> String {
        let zero_below = match self.storage.element() {
            Element::F32 => "104.0f",
            Element::F64 => "746.0",
        };
        format!("!(fill - {most} <= -{zero_below})")
    }

    /// Address of the statistics of row `row` of a head.
    fn stats_of(&self, row: &str) -> String {
        format!("{} + {} * 2", self.stats, self.row_of(row))
    }

    /// C expression of the number of row `row` of a head among all rows.
    fn row_of(&self, row: &str) -> String {
        let e = &self.extents;
        format!("((batch * {} + head) * {} + {row})", e.heads, e.queries)
    }

    /// Statements that read the numbers.
    fn read_numbers(&self) -> String {
        let real = self.storage.element().ctype();
        let read = |(name, storage): &(&str, Storage)| {
            let number = storage.load(Width::Scalar, &format!("{name}_at"));
            format!("    const {real} {name} = {number};\n")
        };
        self.numbers.iter().map(read).collect()
    }

    fn shape_text(&self) -> String {
        let e = &self.extents;
        format!(
            "{} x {} heads (keys {}), {} queries, {} keys, width {} and {}{}",
            e.batch,
            e.heads,
            e.key_heads,
            e.queries,
            e.keys,
            e.width,
            e.value_width,
            if self.causal { ", causal" } else { "" }
        )
    }
}
