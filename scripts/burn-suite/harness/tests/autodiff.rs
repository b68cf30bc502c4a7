//! Gradient tests.
#![recursion_limit = "256"]
#![allow(unused, reason = "Burn's files are read as they are")]
extern crate alloc;

pub type FloatElem = f32;
pub type IntElem = i32;
pub type TestBackend = burn_autodiff::Autodiff<Inner>;

#[path = "common/backend.rs"]
mod backend;
pub use backend::*;
#[path = "common/autodiff.rs"]
mod cases;
