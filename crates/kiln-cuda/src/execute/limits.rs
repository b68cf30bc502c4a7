//! What a device can do at most, measured briefly: the limits that kernels are compared with.

use half::{bf16, f16};

use super::gpu::Gpu;
use crate::error::Result;
use crate::products::{Compute, Number, Product, ProductArguments};

/// Bytes that a copy reads and writes, the smallest first: some that fit into the second-level cache, and
/// more.
const AMOUNTS: [usize; 3] = [8 << 20, 32 << 20, 1 << 30];

/// Rows and columns of the product.
const SIDE: u64 = 4096;

/// How often each is tried; the best counts.
const TRIES: usize = 5;

/// What a device can do at most.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Amounts of bytes, the least first, and how many bytes a second a copy reads and writes of so many.
    pub moving: Vec<(u64, f64)>,
    /// Floating-point operations a second of a large product.
    pub flops_per_second: f64,
}

impl Limits {
    /// Measures `gpu`; takes some milliseconds. The product is one of `numbers`; with `tf32` one of f32 rounds
    /// its operands for the tensor cores.
    ///
    /// # Errors
    /// Those of allocating and of cuBLASLt.
    pub fn measure(gpu: &Gpu, numbers: Number, tf32: bool) -> Result<Self> {
        let mut moving: Vec<(u64, f64)> = Vec::new();
        for bytes in AMOUNTS {
            let half = bytes / 2;
            let (from, to) = (gpu.allocate(half)?, gpu.allocate(half)?);
            let seconds = best(gpu, || gpu.stream().copy(&from, 0..half, &to, 0))?;
            moving.push((bytes as u64, bytes as f64 / seconds));
        }
        // More data is never faster: a larger amount's rate is a lower bound for the smaller ones, which
        // short measurements underrate.
        for at in (1..moving.len()).rev() {
            moving[at - 1].1 = moving[at - 1].1.max(moving[at].1);
        }
        let mut product = Product::dense(SIDE, SIDE, SIDE, numbers);
        if tf32 && numbers == Number::F32 {
            product = product.with_compute(Compute::Tf32);
        }
        let workspace = 32 << 20;
        let choice = gpu.choice(&product, workspace)?;
        let mut prepared = gpu.multiplier()?.prepare(&product, &choice)?;
        let bytes = product.result_bytes();
        let (left, right, result) = (gpu.allocate(bytes)?, gpu.allocate(bytes)?, gpu.allocate(bytes)?);
        let work = gpu.allocate(workspace)?;
        // Zeros would be multiplied faster than numbers.
        let noise = noise(numbers);
        gpu.stream().write(&noise, &left, 0)?;
        gpu.stream().write(&noise, &right, 0)?;
        let mut arguments = ProductArguments::new((&left, 0), (&right, 0), (&result, 0));
        arguments.workspace = Some((&work, 0));
        let seconds = best(gpu, || prepared.run(gpu.stream(), &arguments))?;
        Ok(Self {
            moving,
            flops_per_second: product.flop() / seconds,
        })
    }
}

/// The bytes of a square matrix of numbers between -1 and 1.
fn noise(numbers: Number) -> Vec<u8> {
    let values =
        (0..SIDE * SIDE).map(|at| ((at.wrapping_mul(2_654_435_761) >> 7) % 2001) as f32 / 1000.0 - 1.0);
    match numbers {
        Number::F32 => values.flat_map(f32::to_ne_bytes).collect(),
        Number::F64 => values.flat_map(|x| f64::from(x).to_ne_bytes()).collect(),
        Number::F16 => values.flat_map(|x| f16::from_f32(x).to_ne_bytes()).collect(),
        Number::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
    }
}

/// The shortest time of `work` in seconds, of some turns.
fn best(gpu: &Gpu, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..TRIES {
        let start = gpu.stream().record_time()?;
        work()?;
        let end = gpu.stream().record_time()?;
        least = least.min(f64::from(end.milliseconds_since(&start)?) * 1e-3);
    }
    Ok(least)
}
