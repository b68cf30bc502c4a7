//! Generated programs with gradients: every executor against eager execution.
//!
//! A program is a list of steps over a growing pool of matrices of one shape. The functions are continuous
//! and their values bounded, so that a difference is a fault and not a rounding error that grew.

use burn_autodiff::Autodiff;
use burn_backend::{AutodiffBackend, DType};
use burn_tensor::{Tensor, activation};
use proptest::prelude::*;

use crate::check::{Out, bools, check_executors_within, f32s, ints};
use crate::outs;
use crate::record::Log;

const SHAPE: [usize; 2] = [3, 4];
const KINDS: u8 = 24;

/// Which function, and of which matrices of the pool (counted from the newest, wrapping around).
type Step = (u8, usize, usize);

fn apply<A: AutodiffBackend>(
    device: &A::Device,
    (kind, i, j): Step,
    pool: &[Tensor<A, 2>],
    seed: u64,
) -> Tensor<A, 2> {
    let pick = |k: usize| pool[pool.len() - 1 - k % pool.len()].clone();
    let (a, b) = (pick(i), pick(j));
    match kind % KINDS {
        0 => (a + b).tanh(),
        1 => a * b.sin(),
        2 => a - b * 0.5,
        3 => a / (b.abs() + 1.0),
        4 => activation::softmax(a, 1) + b,
        5 => activation::log_softmax(a, 0).tanh(),
        6 => activation::sigmoid(a.matmul(b.transpose())).matmul(pick(i + 1)),
        7 => a.clone() - a.mean_dim(1),
        8 => a.clone().sum_dim(0).tanh() + b,
        9 => a.clone() / (a.var(1) + 1.0).sqrt(),
        10 => Tensor::cat(vec![a.slice([0..3, 0..2]), b.slice([0..3, 2..4])], 1),
        11 => a.reshape([4, 3]).swap_dims(0, 1),
        12 => a.select(0, ints(device, [3], seed, 0..3, DType::I64)),
        13 => a.gather(1, ints(device, SHAPE, seed, 0..4, DType::I32)),
        14 => a.mask_where(bools(device, SHAPE, seed), b),
        15 => a.mask_fill(bools(device, SHAPE, seed), 0.25),
        16 => a.slice_assign([0..2, 1..3], b.slice([1..3, 0..2])),
        17 => a.flip([1]) * 0.75,
        18 => activation::relu(a) - b * 0.25,
        19 => a.clamp(-1.0, 1.0).powi_scalar(2),
        20 => (a.cos() + 1.5).log(),
        21 => a.clone().slice([0..1, 0..4]).repeat_dim(0, 3) - b,
        22 => a.tanh().exp() * 0.5,
        _ => a.square().add_scalar(0.5).recip(),
    }
}

/// The last matrix and the gradients of its weighted sum with respect to both leaves.
fn run<A: AutodiffBackend<InnerBackend = Log>>(device: &A::Device, steps: &[Step]) -> Vec<Out<Log>> {
    let x = f32s::<A, 2>(device, SHAPE, 300).require_grad();
    let y = f32s::<A, 2>(device, SHAPE, 301).require_grad();
    let mut pool = vec![x.clone(), y.clone(), x.clone() * y.clone()];
    for (position, &step) in steps.iter().enumerate() {
        let next = apply::<A>(device, step, &pool, 400 + position as u64);
        pool.push(next);
    }
    let last = pool
        .iter()
        .skip(2)
        .cloned()
        .reduce(|a, b| (a + b).tanh())
        .unwrap_or(x.clone());
    let loss = (last.clone() * f32s::<A, 2>(device, SHAPE, 302)).sum();
    let grads = loss.backward();
    let mut outs = outs![last.inner()];
    outs.extend(x.grad(&grads).map(Out::from));
    outs.extend(y.grad(&grads).map(Out::from));
    outs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn generated_programs(steps in prop::collection::vec((0..KINDS, 0..8usize, 0..8usize), 1..14)) {
        check_executors_within(20.0, |device| run::<Autodiff<Log>>(device, &steps));
    }
}
