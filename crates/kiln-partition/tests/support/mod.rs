//! The models that tests and examples partition, under one name wherever they are used.

pub use kiln_partition::testing::*;
