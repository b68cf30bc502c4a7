//! Convolutions that cuDNN computes.

use kiln_cuda::CudaTarget;
use kiln_cuda::code::{CallKind, StepCall};
use kiln_cuda::execute::Gpu;
use kiln_cuda::testing::host::{Differential, Outcome};

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

/// Every convolution on a GPU with cuDNN, in every type that the library is asked for.
#[test]
fn convolutions_in_the_library_on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    if !gpu.target().cudnn {
        println!("skipped: no cuDNN here");
        return;
    }
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
