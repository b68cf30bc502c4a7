//! One primitive, or a whole graph, on candle and on the plain interpreter, and when their results count as
//! equal.
//!
//! Both round once per primitive, so results of one primitive differ by what the functions differ by in f64,
//! and by one unit in the last place of a narrower type where that straddles a rounding border. Products of
//! matrices accumulate in f32 here, so they are compared relative to the largest element.

use std::sync::Arc;

use kiln_candle::CandleExecutable;
use kiln_graph::interpret::interpret;
use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, Shape, TensorType, philox};

/// Float types, and integer types with bool.
pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
pub const INTS: [DType; 8] = [
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
];

/// What a comparison measures a difference by.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Relative {
    /// The expected element itself.
    Element,
    /// The largest finite element of the expected tensor.
    Tensor,
}

/// The relative difference allowed after one primitive: some units in the last place in f64, one or two in
/// the others.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 5e-7,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 0.0,
    }
}

/// The smallest positive number of a float type: what rounding can make of nearly nothing.
fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 5e-324,
        DType::F32 => f64::from(f32::from_bits(1)),
        DType::F16 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-133),
        _ => 0.0,
    }
}

/// Panics unless the tensors are equal: bits for integers and bools, NaN for NaN, infinities of one sign, and
/// finite floats within the tolerance times `slack`.
pub fn assert_close(got: &HostTensor, expected: &HostTensor, by: Relative, slack: f64, what: &str) {
    assert_eq!(got.ty(), expected.ty(), "{what}");
    let dtype = got.ty().dtype;
    if !dtype.is_float() {
        assert_eq!(got.to_i64s(), expected.to_i64s(), "{what}");
        return;
    }
    let (got, expected) = (got.to_f64s(), expected.to_f64s());
    let largest = expected
        .iter()
        .copied()
        .map(f64::abs)
        .filter(|x| x.is_finite())
        .fold(0.0, f64::max);
    for (at, (&a, &b)) in got.iter().zip(&expected).enumerate() {
        let scale = if by == Relative::Tensor { largest } else { b.abs() };
        let same = (a.is_nan() && b.is_nan())
            || a == b
            || (a.is_finite()
                && b.is_finite()
                && (a - b).abs() <= slack * tolerance(dtype) * scale + smallest(dtype));
        assert!(same, "{what}: element {at} is {a:e}, expected {b:e}");
    }
}

/// A graph that applies `op` to parameters of the types of `inputs`; every result is an output.
pub fn graph_of(op: &Op, inputs: &[HostTensor]) -> Graph {
    let mut graph = Graph::new("one primitive");
    let values: Vec<_> = inputs.iter().map(|x| graph.parameter(x.ty().clone())).collect();
    let results = graph
        .add_node(op.clone(), &values, Provenance::default())
        .unwrap_or_else(|error| panic!("{error}"));
    results.iter().for_each(|&value| graph.output(value, None));
    graph
}

/// Compares candle with the interpreter on one primitive.
pub fn check_by(op: Op, inputs: &[HostTensor], by: Relative, slack: f64) -> Vec<HostTensor> {
    let graph = graph_of(&op, inputs);
    let types: Vec<_> = inputs.iter().map(HostTensor::ty).collect();
    let what = format!("{op:?} of {types:?}");
    let expected = interpret(&graph, inputs, &[]).unwrap_or_else(|error| panic!("{what}: {error}"));
    let executable = CandleExecutable::new(Arc::new(graph)).unwrap_or_else(|error| panic!("{what}: {error}"));
    let got = executable
        .run(inputs, &[])
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(&expected) {
        assert_close(got, expected, by, slack, &what);
    }
    got
}

/// [`check_by`], element by element.
pub fn check(op: Op, inputs: &[HostTensor]) -> Vec<HostTensor> {
    check_by(op, inputs, Relative::Element, 1.0)
}

/// [`check_by`] for sums of products of up to some hundred terms.
pub fn check_sum(op: Op, inputs: &[HostTensor]) -> Vec<HostTensor> {
    check_by(op, inputs, Relative::Tensor, 4.0)
}

/// Numbers that tell whether an implementation is right: signs, halves, limits, NaN.
pub fn special(dtype: DType) -> Vec<f64> {
    let mut values = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        1.5,
        -1.5,
        2.5,
        -2.5,
        3.0,
        -3.0,
        1e-3,
        -1e-3,
        0.1,
        0.7,
        -0.7,
        0.999,
        7.3,
        -20.6,
        25.0,
        88.0,
        -100.0,
        3e4,
        -3e4,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    if matches!(dtype, DType::F64 | DType::F32 | DType::BF16) {
        values.extend([1e-30, -1e-20, 1e12, -1e20, 1e30, 3e38]);
    }
    if dtype == DType::F64 {
        values.extend([1e-310, 1e-200, 1e-9, -1e-12, 709.9, -745.0, 1e200, -1e300]);
    }
    values
}

/// Integers around every border of `dtype`, as bits.
pub fn special_ints(dtype: DType) -> Vec<i64> {
    let bits = 8 * dtype.size() as u32;
    let mut values = vec![
        0, 1, 2, 3, 5, 7, 8, 15, 31, 32, 33, 63, 64, 65, 100, 127, -1, -2, -3, -7, -63, -64, -128,
    ];
    for border in [15, 16, 31, 32, 47, 62, 63] {
        let power = 1i64 << border;
        values.extend([
            power,
            power.wrapping_sub(1),
            power.wrapping_add(1),
            power.wrapping_neg(),
        ]);
    }
    values.push(0x0123_4567_89ab_cdef);
    values.push(-0x0123_4567_89ab_cdef);
    // Keep each number of the type once.
    let unused = 64 - bits;
    let mut values: Vec<i64> = values.into_iter().map(|x| x << unused >> unused).collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Every pair of the numbers of a list, as two tensors.
pub fn pairs(dtype: DType) -> [HostTensor; 2] {
    fn spread<T: Copy>(values: &[T]) -> (Vec<T>, Vec<T>) {
        values
            .iter()
            .flat_map(|&a| values.iter().map(move |&b| (a, b)))
            .unzip()
    }
    match dtype {
        DType::Bool => {
            let (a, b) = spread(&[0, 1]);
            [a, b].map(|x| HostTensor::from_ints(dtype, [4], x))
        }
        _ if dtype.is_float() => {
            let (a, b) = spread(&special(dtype));
            [a, b].map(|x| HostTensor::from_floats(dtype, [x.len()], x))
        }
        _ => {
            let (a, b) = spread(&special_ints(dtype));
            [a, b].map(|x| HostTensor::from_ints(dtype, [x.len()], x))
        }
    }
}

/// Random numbers: in [-2, 2) for floats, small for integers, coins for bool.
pub fn random(dtype: DType, shape: impl Into<Shape>, seed: u64) -> HostTensor {
    let shape = shape.into();
    let draw = |i: usize| philox::uniform(seed, 1, i as u64, DType::F64);
    let count = shape.numel();
    match dtype {
        DType::Bool => HostTensor::from_ints(dtype, shape, (0..count).map(|i| i64::from(draw(i) < 0.5))),
        _ if dtype.is_float() => {
            HostTensor::from_floats(dtype, shape, (0..count).map(|i| 4.0 * draw(i) - 2.0))
        }
        _ => HostTensor::from_ints(dtype, shape, (0..count).map(|i| (20.0 * draw(i)) as i64 - 10)),
    }
}

/// [`random`] with all bits of integers random, and some NaN and infinities among floats.
pub fn wild(dtype: DType, shape: impl Into<Shape>, seed: u64) -> HostTensor {
    let shape = shape.into();
    let count = shape.numel() as u64;
    if dtype.is_float() {
        let value = |i| match philox::int_range(seed, 2, i, 0, 12) {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => f64::NEG_INFINITY,
            _ => 4.0 * philox::uniform(seed, 1, i, DType::F64) - 2.0,
        };
        return HostTensor::from_floats(dtype, shape, (0..count).map(value));
    }
    if dtype == DType::Bool {
        return random(dtype, shape, seed);
    }
    let value = |i| philox::int_range(seed, 3, i, i64::MIN, i64::MAX);
    HostTensor::from_ints(dtype, shape, (0..count).map(value))
}

/// Valid indices into a dimension of extent `extent`.
pub fn random_indices(dtype: DType, shape: impl Into<Shape>, extent: usize, seed: u64) -> HostTensor {
    let shape = shape.into();
    let count = shape.numel() as u64;
    HostTensor::from_ints(
        dtype,
        shape,
        (0..count).map(|i| philox::int_range(seed, 4, i, 0, extent as i64)),
    )
}

/// A rank-0 tensor.
pub fn scalar(dtype: DType, value: impl Into<Scalar>) -> HostTensor {
    HostTensor::scalar(dtype, value.into())
}

/// A tensor type.
pub fn ty(dtype: DType, shape: impl Into<Shape>) -> TensorType {
    TensorType::new(dtype, shape)
}
