//! Convolutions that cuDNN computes.

use std::sync::Arc;

use kiln_cuda::CudaTarget;
use kiln_cuda::code::{CallKind, StepCall};
use kiln_cuda::convolutions::{Convolution, ConvolutionArguments, Convolver, PlanLimits, Task};
use kiln_cuda::execute::Gpu;
use kiln_cuda::libraries::{CublasLt, Cudnn, Search};
use kiln_cuda::products::Number;
use kiln_cuda::runtime::Storage;
use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_graph::{DType, HostTensor, Shape, TensorType};

use crate::common;
use crate::compare::{on_gpu, rounding};
use crate::convolution::each;
use crate::kinds::convolutions;
use crate::tensor_cores::convolutions_of_fours;

/// With cuDNN: the copies for the library and from it. The host's stand-in for the library computes
/// convolutions by plain loops.
#[test]
fn convolutions_in_the_library() {
    let mut items = Vec::new();
    for (number, (what, convolution)) in convolutions().into_iter().enumerate() {
        for last in [false, true] {
            let dtype = ["f32", "f16", "bf16"][(number + usize::from(last)) % 3];
            items.push((what, convolution, dtype, last));
        }
    }
    each(&items, |&(what, convolution, dtype, last)| {
        let graph = convolution.graph(dtype, last);
        let mut comparison = Differential::new(&graph);
        comparison.target.cudnn = true;
        let what = format!("{what}, {dtype}, channels last: {last}");
        match comparison.check() {
            Ok(Outcome::Same) => {}
            other => panic!("{what}: {other:?}\n{graph}"),
        }
        let step = comparison.compile().unwrap();
        let either = |call: &StepCall| matches!(call.kind, CallKind::Either { .. });
        let asked = step.code.calls.iter().filter(|call| either(call)).count();
        // The library does not get depthwise convolutions, those of f32 with few channels, or those of
        // pictures that tensor cores compute.
        let depthwise = convolution.groups > 1 && convolution.channels == [convolution.groups; 2];
        let few = dtype == "f32" && convolution.channels[0] < 4;
        let padded = convolution.groups == 1
            && !convolution.channels[0].is_multiple_of(8)
            && convolution.channels[0] < 16
            && convolution.channels[1].is_multiple_of(8);
        match dtype {
            _ if depthwise || few => assert_eq!(asked, 0, "{what}"),
            "f16" | "bf16" if padded => assert!((1..=3).contains(&asked), "{what}: {asked}"),
            _ => assert_eq!(asked, 3, "{what}"),
        }
        let names: Vec<&str> = step.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let named = names.iter().filter(|name| name.starts_with("cuDNN ")).count();
        assert_eq!(named, asked, "{what}: {names:?}");
    });
}

/// The first GPU, where tests use it and cuDNN is there.
fn gpu_with_cudnn() -> Option<Arc<Gpu>> {
    common::gpu()?;
    let gpu = Gpu::get(0).unwrap();
    if !gpu.target().cudnn {
        println!("skipped: no cuDNN here");
        return None;
    }
    Some(gpu)
}

/// Every convolution on a GPU with cuDNN, in every type that the library is asked for.
#[test]
fn convolutions_in_the_library_on_a_gpu() {
    let Some(gpu) = gpu_with_cudnn() else { return };
    let (mut taken, mut asked, mut wrong) = (0, 0, Vec::new());
    let all = convolutions().into_iter().chain(convolutions_of_fours());
    for (number, (what, convolution)) in all.enumerate() {
        for (kind, (dtype, tf32)) in [("f32", false), ("f32", true), ("f16", false), ("bf16", false)]
            .into_iter()
            .enumerate()
        {
            let last = (number + kind) % 4 != 0;
            let graph = convolution.graph(dtype, last);
            let mut comparison = match tf32 {
                true => rounding(&graph),
                false => Differential::new(&graph),
            };
            comparison.target = CudaTarget { tf32, ..gpu.target() };
            let (found, names) = on_gpu(&gpu, &comparison, &graph);
            let is_taken = |name: &&String| name.starts_with("cuDNN ");
            let count = names.iter().filter(is_taken).count();
            (taken, asked) = (taken + count, asked + 3);
            if let Err(error) = comparison.compare(&found) {
                wrong.push(format!(
                    "{what}, {dtype}, TF32 {tf32}, channels last {last}: {error}, of {names:?}"
                ));
            }
        }
    }
    println!("cuDNN computes {taken} of {asked} convolutions");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        taken > asked / 2,
        "cuDNN computes {taken} of {asked} convolutions"
    );
}

/// A tensor of random elements between -1 and 1, or of NaN.
fn memory(gpu: &Gpu, tensor: &kiln_cuda::convolutions::Tensor, seed: Option<u32>) -> Arc<Storage> {
    let count = tensor.bytes() / tensor.number.bytes();
    let element = |at: usize| match seed {
        Some(seed) => {
            let word = (at as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8;
            f64::from(word % 2001) / 1000.0 - 1.0
        }
        None => f64::NAN,
    };
    let values = HostTensor::from_floats(
        dtype(tensor.number),
        Shape::from([count]),
        (0..count).map(element),
    );
    gpu.upload(values.bytes()).unwrap()
}

fn dtype(number: Number) -> DType {
    match number {
        Number::F32 => DType::F32,
        Number::F16 => DType::F16,
        Number::Bf16 => DType::BF16,
        Number::F64 => DType::F64,
    }
}

/// How far the results of the library's plans for a convolution are from those of its first plan, as parts of
/// the largest element.
fn differences(gpu: &Gpu, convolver: &Convolver, convolution: &Convolution) -> Vec<f64> {
    let limits = PlanLimits {
        plans: 16,
        runs: 1,
        ..PlanLimits::default()
    };
    let Ok(plans) = convolver.survey(gpu.stream(), convolution, limits) else {
        return Vec::new();
    };
    let of = |tensor, seed| memory(gpu, tensor, Some(seed));
    let (x, w, y) = (
        of(&convolution.x, 1),
        of(&convolution.w, 2),
        of(&convolution.y, 3),
    );
    let result = convolution.tensors()[2];
    let results = plans.iter().map(|plan| {
        let prepared = convolver.prepare(convolution, plan).unwrap();
        let out = memory(gpu, result, None);
        let workspace = gpu.allocate(prepared.workspace_bytes()).unwrap();
        let arguments = ConvolutionArguments {
            x: (
                if convolution.task == Task::InputGradient {
                    &out
                } else {
                    &x
                },
                0,
            ),
            w: (
                if convolution.task == Task::WeightGradient {
                    &out
                } else {
                    &w
                },
                0,
            ),
            y: (
                if convolution.task == Task::Forward {
                    &out
                } else {
                    &y
                },
                0,
            ),
            workspace: Some((&workspace, 0)),
        };
        prepared.run(gpu.stream(), &arguments).unwrap();
        let mut bytes = vec![0; result.bytes()];
        gpu.download(&out, &mut bytes).unwrap();
        let ty = TensorType {
            dtype: dtype(result.number),
            shape: Shape::from([bytes.len() / result.number.bytes()]),
        };
        HostTensor::from_bytes(ty, bytes).unwrap().to_f64s()
    });
    let results: Vec<Vec<f64>> = results.collect();
    let largest = results[0]
        .iter()
        .fold(0.0, |most: f64, value| most.max(value.abs()));
    let off = |(a, b): (&f64, &f64)| match (a.is_nan(), b.is_nan()) {
        (true, true) => 0.0,
        (false, false) => (a - b).abs() / largest,
        _ => f64::INFINITY,
    };
    let difference = |values: &Vec<f64>| values.iter().zip(&results[0]).map(off).fold(0.0, f64::max);
    results.iter().map(difference).collect()
}

/// Whichever of the library's plans is the fastest on a day, it computes what the others do: plans that do
/// not are left out.
#[test]
fn plans_of_the_library_agree_on_a_gpu() {
    let Some(gpu) = gpu_with_cudnn() else { return };
    // cuDNN finds cuBLASLt only where that was opened before.
    CublasLt::open(&Search::from_env()).unwrap();
    let convolver = Convolver::new(gpu.device(), Cudnn::open(&Search::from_env()).unwrap()).unwrap();
    let (mut known, mut wrong, mut plans): (Vec<Convolution>, _, _) = (Vec::new(), Vec::new(), 0);
    for (what, convolution) in convolutions().into_iter().chain(convolutions_of_fours()) {
        for (dtype, tf32) in [("f32", false), ("f32", true), ("f16", false), ("bf16", false)] {
            for last in [false, true] {
                let graph = convolution.graph(dtype, last);
                let mut comparison = Differential::new(&graph);
                comparison.target = CudaTarget { tf32, ..gpu.target() };
                let step = comparison.compile().unwrap();
                let asked = step.code.calls.iter().flat_map(|call| match &call.kind {
                    CallKind::Either { library, .. } => &library[..],
                    _ => &[],
                });
                for call in asked {
                    let CallKind::Convolution { convolution, .. } = call else {
                        continue;
                    };
                    if known.contains(convolution) {
                        continue;
                    }
                    known.push((**convolution).clone());
                    let tolerance = if dtype == "f32" && !tf32 { 1e-4 } else { 2e-2 };
                    let found = differences(&gpu, &convolver, convolution);
                    plans += found.len();
                    if found.iter().any(|&difference| difference > tolerance) {
                        wrong.push(format!("{what}, channels last {last}: {convolution}: {found:?}"));
                    }
                }
            }
        }
    }
    println!("{plans} plans of {} convolutions", known.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        plans > 2 * known.len(),
        "{plans} plans of {} convolutions",
        known.len()
    );
}
