//! Each primitive on candle against the plain interpreter, and whole graphs.

mod common;
mod contraction;
mod executable;
mod movement;
mod pointwise;
