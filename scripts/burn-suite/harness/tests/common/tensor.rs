pub use super::*;

#[path = "../tensor/bool/mod.rs"]
mod bool;
#[path = "../tensor/clone_invariance.rs"]
mod clone_invariance;
#[path = "../tensor/float/mod.rs"]
mod float;
#[path = "../tensor/int/mod.rs"]
mod int;
#[path = "../tensor/multi_threads.rs"]
mod multi_threads;
