//! Prologues: loop nests that compute an operand of a product or a convolution while the template reads it.
//!
//! A template that packs an operand into panels before it multiplies may as well compute the operand then.
//! Values between two layers, such as an activation or a normalised value, are then neither written nor
//! read. [`super::fuse`] decides which nests become prologues.

use kiln_graph::Value;

use super::nest::Nest;
use crate::index::{Index, Var};

/// Batch, row or column, and depth of an operand of a product.
pub const PRODUCT: [Var; 3] = [0, 1, 2];
/// Pixel (of all images) and channel of an image.
pub const IMAGE: [Var; 2] = [0, 1];

/// A nest that makes an operand.
#[derive(Clone, Debug)]
pub struct Prologue {
    /// Which operand of the template's operation.
    pub operand: usize,
    /// The value that is computed for the element at the loop variables ([`PRODUCT`] or [`IMAGE`]).
    pub value: Value,
    /// Its index.
    pub index: Vec<Index>,
    /// The operations, and what they read.
    pub nest: Nest,
    /// The variable along which vectors can be read.
    pub vector: Var,
}
