//! Generated kernels against plain loops in f64, on every instruction set this machine has.

mod conv;
mod gemm;
mod harness;
mod math;
mod pool;
