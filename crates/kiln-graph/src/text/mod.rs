//! The text form of a graph: printed by `Display`, read back by [`Graph::parse`](crate::Graph::parse).
//!
//! One node a line, values named by their number, result types after the colon, provenance after the
//! semicolon:
//!
//! ```text
//! graph @step {
//!   %0 = parameter 0 : f32[8,128]
//!   %1 = scalar 0 : f32[]
//!   %2 = broadcast %1 {dims=[]} : f32[8,128]      ; fwd NumericFloat.MulScalar at main.rs:12 in model.head
//!   %3 = mul %0, %2 : f32[8,128]                  ; fwd NumericFloat.MulScalar
//!   %4, %5 = top_k %3 {axis=1, k=3} : f32[8,3], i64[8,3]
//!   # a comment
//!   return %3 (alias 0), %4
//! }
//! ```
//!
//! A node is `results = mnemonic words operands {key=value, ..} : result types ; provenance`. What the result
//! types already say (the dtype of a cast, the shape of a broadcast) is not said again as an attribute. A
//! word is the one attribute that names a variant: `compare lt %1, %2`, `reduce sum %3 {axes=[0]}`,
//! `constant 0.5`. Attributes equal to their default (empty lists, `false`) may be left out where `forms`
//! says so. Provenance is `phase [operation] [gradient forward-operation] [at location] [in module] [chunk
//! number]`; strings with characters of their own are quoted. Names of values are free when written by hand
//! (`%loss`); the parser numbers them in order. An output may say whose buffer it takes over (`(alias 0)`)
//! and that it is looked at before anything is overwritten (`(check)`).
//!
//! The round trip is exact: parsing what was printed gives an equal graph, provenance, NaN payloads and all.
//! Printer and parser share one table, `forms`, so that an attribute cannot be printed in one way and read in
//! another.

mod forms;
mod parse;
mod print;

pub(crate) use forms::mnemonic;
pub use parse::ParseError;
