//! Executors.
pub mod convert;
