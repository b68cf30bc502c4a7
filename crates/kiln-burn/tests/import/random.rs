//! Random tensors: eager and every executor draw the same numbers, bit for bit.

use burn_backend::{DType, Distribution};
use burn_tensor::{Int, Tensor};

use crate::check::{check_executors, scalars};
use crate::outs;
use crate::record::{self, Log};

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
const INTS: [DType; 8] = [
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
];

fn distributions() -> [Distribution; 4] {
    [
        Distribution::Default,
        Distribution::Uniform(-2.5, 7.25),
        Distribution::Normal(0.5, 3.0),
        Distribution::Bernoulli(0.3),
    ]
}

#[test]
fn every_distribution_and_type() {
    let device = &burn_flex::FlexDevice;
    let eager = check_executors(|_| {
        let mut all = Vec::new();
        for distribution in distributions() {
            for dtype in FLOATS {
                all.extend(outs![Tensor::<Log, 2>::random(
                    [3, 7],
                    distribution,
                    (device, dtype)
                )]);
            }
        }
        for dtype in INTS {
            let bounds = if dtype.is_uint() { (0.0, 9.9) } else { (-4.0, 5.0) };
            for distribution in [
                Distribution::Default,
                Distribution::Uniform(bounds.0, bounds.1),
                Distribution::Bernoulli(0.5),
            ] {
                all.extend(outs![Tensor::<Log, 1, Int>::random(
                    [11],
                    distribution,
                    (device, dtype)
                )]);
            }
        }
        all
    });
    // Each draws from a stream of its own.
    let uniform: Vec<_> = eager[..4].iter().map(|tensor| tensor.bytes().to_vec()).collect();
    assert!(uniform.windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn ranges_hold() {
    let device = &burn_flex::FlexDevice;
    let eager = check_executors(|_| {
        outs![
            Tensor::<Log, 1>::random([1000], Distribution::Uniform(-1.0, 3.0), device),
            Tensor::<Log, 1>::random([1000], Distribution::Default, device),
            Tensor::<Log, 1>::random([1000], Distribution::Bernoulli(0.25), device),
        ]
    });
    let values = |index: usize| eager[index].storage::<f32>();
    assert!(values(0).iter().all(|x| (-1.0..=3.0).contains(x)));
    assert!(values(0).iter().any(|&x| x > 2.5) && values(0).iter().any(|&x| x < -0.5));
    assert!(values(1).iter().all(|x| (0.0..1.0).contains(x)));
    let hits: f32 = values(2).iter().sum();
    // 250 expected, standard deviation 13.7: five of them.
    assert!((hits - 250.0).abs() < 69.0, "{hits}");
}

/// Parameters, seeds and streams are runtime scalars: other values need no other graph.
#[test]
fn parameters_are_arguments() {
    let device = &burn_flex::FlexDevice;
    let import = |low: f64| {
        record::start();
        let x = Tensor::<Log, 1>::random([5], Distribution::Uniform(low, 1.0), device) * low;
        let id = x.clone().into_primitive().tensor().into_ir().id;
        let state = record::finish();
        let imported = kiln_burn::import::import(&state.operations, &[id]).expect("imports");
        let scalars = scalars(&imported, &state);
        (imported.graph.to_string(), scalars)
    };
    let (first, second) = (import(0.25), import(0.5));
    assert_eq!(first.0, second.0);
    assert_ne!(first.1, second.1);
}
