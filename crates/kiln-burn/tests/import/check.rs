//! Running a program everywhere and comparing.

use std::sync::Arc;

use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, DType as BurnDType, TensorData};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use burn_ir::{OperationIr, ScalarIr, TensorIr};
use burn_tensor::{Bool, Int, Tensor};
use kiln_burn::execute::convert;
use kiln_burn::import::{self, Imported, ScalarSource};
use kiln_burn::storage::Storage;
use kiln_burn::stream;
use kiln_graph::{DType, Graph};

use crate::record::{self, Log, State};

/// A result of a program.
pub enum Out<B: Backend> {
    Float(FloatTensor<B>),
    Int(IntTensor<B>),
    Bool(BoolTensor<B>),
}

impl<B: Backend, const D: usize> From<Tensor<B, D>> for Out<B> {
    fn from(tensor: Tensor<B, D>) -> Self {
        Out::Float(tensor.into_primitive().tensor())
    }
}

impl<B: Backend, const D: usize> From<Tensor<B, D, Int>> for Out<B> {
    fn from(tensor: Tensor<B, D, Int>) -> Self {
        Out::Int(tensor.into_primitive())
    }
}

impl<B: Backend, const D: usize> From<Tensor<B, D, Bool>> for Out<B> {
    fn from(tensor: Tensor<B, D, Bool>) -> Self {
        Out::Bool(tensor.into_primitive())
    }
}

/// A list of results.
#[macro_export]
macro_rules! outs {
    ($($tensor:expr),* $(,)?) => { vec![$($crate::check::Out::from($tensor)),*] };
}

/// Tests named programs: functions from a device to results, for any backend.
#[macro_export]
macro_rules! programs {
    ($($(#[$meta:meta])* fn $name:ident($device:ident) $body:block)*) => {$(
        $(#[$meta])*
        #[test]
        fn $name() {
            fn program<B: burn_backend::Backend>($device: &B::Device) -> Vec<$crate::check::Out<B>> $body
            $crate::check::check(program::<$crate::record::Log>, program::<burn_flex::Flex>);
        }
    )*};
}

/// Tests named programs with gradients: generic over the backend under autodiff, `A` being autodiff on it.
#[macro_export]
macro_rules! gradients {
    ($(fn $name:ident($device:ident, $a:ident) $body:block)*) => {$(
        #[test]
        fn $name() {
            fn program<B: burn_backend::Backend>($device: &B::Device) -> Vec<$crate::check::Out<B>> {
                type Differentiable<B> = burn_autodiff::Autodiff<B>;
                fn run<B: burn_backend::Backend, $a: burn_backend::AutodiffBackend<InnerBackend = B>>(
                    $device: &$a::Device,
                ) -> Vec<$crate::check::Out<B>> $body
                run::<B, Differentiable<B>>($device)
            }
            $crate::check::check(program::<$crate::record::Log>, program::<burn_flex::Flex>);
        }
    )*};
}

/// Deterministic numbers in about -2..2, with a few equal ones.
pub fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % 401) as f64 / 100.0 - 2.0
    };
    (0..count).map(step).collect()
}

/// A float tensor of [`numbers`].
pub fn floats<B: Backend, const D: usize>(
    device: &B::Device,
    shape: [usize; D],
    seed: u64,
    dtype: BurnDType,
) -> Tensor<B, D> {
    let data = TensorData::new(numbers(shape.iter().product(), seed), shape);
    Tensor::from_data(data, (device, dtype))
}

/// An f32 tensor of [`numbers`].
pub fn f32s<B: Backend, const D: usize>(device: &B::Device, shape: [usize; D], seed: u64) -> Tensor<B, D> {
    floats(device, shape, seed, BurnDType::F32)
}

/// An int tensor of numbers in `range`.
pub fn ints<B: Backend, const D: usize>(
    device: &B::Device,
    shape: [usize; D],
    seed: u64,
    range: std::ops::Range<i64>,
    dtype: BurnDType,
) -> Tensor<B, D, Int> {
    let width = (range.end - range.start) as f64;
    let numbers = numbers(shape.iter().product(), seed).into_iter();
    let values = numbers.map(|x| range.start + ((x + 2.0) / 4.01 * width) as i64);
    Tensor::from_data(
        TensorData::new(values.collect::<Vec<_>>(), shape),
        (device, dtype),
    )
}

/// A bool tensor.
pub fn bools<B: Backend, const D: usize>(
    device: &B::Device,
    shape: [usize; D],
    seed: u64,
) -> Tensor<B, D, Bool> {
    let values: Vec<bool> = numbers(shape.iter().product(), seed)
        .into_iter()
        .map(|x| x > 0.3)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Runs a program on burn-flex, on the logging backend, and its imported log on every executor.
pub fn check(
    logged: impl FnOnce(&FlexDevice) -> Vec<Out<Log>>,
    plain: impl FnOnce(&FlexDevice) -> Vec<Out<Flex>>,
) {
    let reference: Vec<FlexTensor> = plain(&FlexDevice)
        .into_iter()
        .map(|out| match out {
            Out::Float(tensor) | Out::Int(tensor) | Out::Bool(tensor) => tensor,
        })
        .collect();
    let eager = check_executors(logged);
    assert_eq!(eager.len(), reference.len());
    for (index, (eager, reference)) in eager.iter().zip(&reference).enumerate() {
        let what = format!("output {index}: eager against burn-flex");
        // burn-flex loses the type of truth values it selects from.
        let reference = match eager.dtype() {
            dtype @ BurnDType::Bool(_) if reference.dtype() == BurnDType::U8 => {
                FlexTensor::from_arc(reference.data_arc(), reference.layout().clone(), dtype)
            }
            _ => reference.clone(),
        };
        // Kernels of burn-flex take sums in other orders for tensors laid out otherwise.
        let tolerance = Tolerance {
            relative: Tolerance::of(convert::dtype(eager.dtype()).expect("a graph's type")).relative / 10.0,
        };
        compare(eager, &reference, tolerance, &what);
    }
}

/// Runs a program on the logging backend and its imported log on every executor. Returns the eager results.
pub fn check_executors(logged: impl FnOnce(&FlexDevice) -> Vec<Out<Log>>) -> Vec<FlexTensor> {
    check_executors_within(1.0, logged)
}

/// [`check_executors`], with rounding errors that may be `factor` times as large: those of a long program.
pub fn check_executors_within(
    factor: f64,
    logged: impl FnOnce(&FlexDevice) -> Vec<Out<Log>>,
) -> Vec<FlexTensor> {
    record::start();
    let results: Vec<_> = logged(&FlexDevice)
        .into_iter()
        .map(|out| match out {
            Out::Float(tensor) | Out::Int(tensor) | Out::Bool(tensor) => tensor,
        })
        .collect();
    let outs: Vec<TensorIr> = results.iter().map(|tensor| tensor.clone().into_ir()).collect();
    let all: Vec<FlexTensor> = outs.iter().map(record::value).collect();
    let state = record::finish();
    // A result that was made from data by the host is no result of the log.
    let logged = |ir: &&TensorIr| !state.inputs.contains_key(&ir.id);
    let ids: Vec<_> = outs.iter().filter(logged).map(|ir| ir.id).collect();
    let eager = outs.iter().zip(&all).filter(|(ir, _)| logged(ir));
    let eager: Vec<FlexTensor> = eager.map(|(_, tensor)| tensor.clone()).collect();
    let imported =
        import::import(&state.operations, &ids).unwrap_or_else(|error| panic!("import failed: {error}"));
    kiln_graph::verify(&imported.graph).unwrap_or_else(|error| panic!("invalid graph: {error}"));
    let text = imported.graph.to_string();
    let parsed =
        Graph::parse(&text).unwrap_or_else(|error| panic!("the text form does not parse: {error}\n{text}"));
    assert_eq!(parsed.to_string(), text);

    let inputs = |imported: &Imported| -> Vec<FlexTensor> {
        imported
            .inputs
            .iter()
            .map(|ir| state.inputs[&ir.id].clone())
            .collect()
    };
    let scalars = scalars(&imported, &state);
    let graph = Arc::new(imported.graph.clone());
    for (name, executable) in crate::executors(&graph) {
        let results = executable
            .run(
                inputs(&imported).into_iter().map(Storage::from).collect(),
                &scalars,
            )
            .unwrap_or_else(|error| panic!("{name}: {error}\n{text}"));
        assert_eq!(results.len(), eager.len());
        for (index, (result, eager)) in results.iter().zip(&eager).enumerate() {
            let mut tolerance = Tolerance::of(convert::dtype(eager.dtype()).expect("a graph's type"));
            tolerance.relative *= factor;
            compare(
                &result.clone().into_host(),
                eager,
                tolerance,
                &format!("output {index}: {name} against eager\n{text}"),
            );
        }
    }
    all
}

/// The runtime scalars of an imported graph.
pub fn scalars(imported: &Imported, state: &State) -> Vec<u64> {
    let types = imported
        .graph
        .scalars()
        .iter()
        .map(|&value| imported.graph.dtype(value));
    imported
        .scalars
        .iter()
        .zip(types)
        .map(|(source, dtype)| match *source {
            ScalarSource::Operation { op, nth } => {
                stream::to_scalar(scalars_of(&state.operations[op])[nth]).to_bits(dtype)
            }
            ScalarSource::RandomSeed { nth } => state.streams[nth].0,
            ScalarSource::RandomStream { nth } => state.streams[nth].1,
        })
        .collect()
}

fn scalars_of(operation: &OperationIr) -> Vec<ScalarIr> {
    struct Scalars(Vec<ScalarIr>);
    impl stream::Visitor for Scalars {
        fn input(&mut self, _: &TensorIr) {}
        fn output(&mut self, _: &TensorIr) {}
        fn scalar(&mut self, scalar: ScalarIr) {
            self.0.push(scalar);
        }
        fn word(&mut self, _: u64) {}
    }
    let mut scalars = Scalars(Vec::new());
    stream::walk(operation, &mut scalars);
    scalars.0
}

/// How far results may be apart.
#[derive(Clone, Copy)]
pub struct Tolerance {
    relative: f64,
}

impl Tolerance {
    /// Some tens of units in the last place of the type: sums are taken in other orders, functions computed
    /// otherwise.
    fn of(dtype: DType) -> Self {
        let relative = match dtype {
            DType::F64 => 1e-11,
            DType::F32 => 1e-5,
            DType::F16 => 1e-2,
            DType::BF16 => 6e-2,
            _ => 0.0,
        };
        Self { relative }
    }
}

fn compare(found: &FlexTensor, expected: &FlexTensor, tolerance: Tolerance, what: &str) {
    assert_eq!(found.layout().shape(), expected.layout().shape(), "{what}");
    let values = |tensor: &FlexTensor| convert::to_host(tensor).expect("a graph's type");
    let (found, expected) = (values(found), values(expected));
    if found.ty() != expected.ty() {
        // burn-flex gives some indices in 64 bits where another integer type is announced.
        let integers = found.ty().dtype.is_int() && expected.ty().dtype == DType::I64;
        assert!(integers, "{} instead of {}; {what}", found.ty(), expected.ty());
    }
    if !found.ty().dtype.is_float() {
        assert_eq!(found.to_i64s(), expected.to_i64s(), "{what}");
        return;
    }
    let (found, expected) = (found.to_f64s(), expected.to_f64s());
    let scale = expected
        .iter()
        .filter(|x| x.is_finite())
        .fold(0.0f64, |scale, x| scale.max(x.abs()));
    for (index, (&x, &y)) in found.iter().zip(&expected).enumerate() {
        let same = x == y || (x.is_nan() && y.is_nan());
        let near = (x - y).abs() <= tolerance.relative * (scale.min(1.0) + y.abs());
        assert!(same || near, "element {index} is {x}, expected {y}; {what}");
    }
}
