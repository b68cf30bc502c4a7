//! What cuDNN has for the convolutions of a recorded step: for each shape and task the plans that are
//! deterministic and round no more than asked for, timed.
//!
//! ```text
//! cargo run --release -p kiln-cuda --example convolutions -- STEP.kg [f32|tf32|bf16|bf16-f32] [--compiling] [WINDOW]
//! ```
//!
//! `bf16-f32` has operands of bf16 and a result of f32, `--compiling` asks engines that compile their
//! kernels, too. `WINDOW` is the least side of a window.

use std::error::Error;

use kiln_cuda::Search;
use kiln_cuda::convolutions::{Convolution, Convolver, PlanLimits, Task, Tensor};
use kiln_cuda::execute::Gpu;
use kiln_cuda::libraries::{CublasLt, Cudnn};
use kiln_cuda::products::Number;
use kiln_graph::op::{ConvDims, Op};
use kiln_graph::{Graph, Shape};

/// A whole tensor, channels last.
fn channels_last(shape: &Shape, number: Number) -> Tensor {
    let extents: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
    let mut strides = vec![1; extents.len()];
    let mut stride = extents[1];
    for axis in (2..extents.len()).rev() {
        strides[axis] = stride;
        stride *= extents[axis];
    }
    strides[0] = stride;
    Tensor {
        number,
        extents,
        strides,
    }
}

fn describe(
    graph: &Graph,
    dims: &ConvDims,
    [x, w, y]: [kiln_graph::Value; 3],
    task: Task,
    kind: &str,
) -> Convolution {
    let (operand, result) = match kind {
        "bf16" => (Number::Bf16, Number::Bf16),
        "bf16-f32" => (Number::Bf16, Number::F32),
        _ => (Number::F32, Number::F32),
    };
    let of = |own: Task| if task == own { result } else { operand };
    let list = |numbers: &[usize]| numbers.iter().map(|&number| number as i64).collect();
    Convolution {
        task,
        x: channels_last(graph.shape(x), of(Task::InputGradient)),
        w: channels_last(graph.shape(w), of(Task::WeightGradient)),
        y: channels_last(graph.shape(y), of(Task::Forward)),
        stride: list(&dims.stride),
        dilation: list(&dims.dilation),
        low: list(&dims.pad_low),
        high: list(&dims.pad_high),
        tf32: kind == "tf32",
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let step = arguments.first().ok_or("give the file of a recorded step")?;
    let kind = arguments.get(1).map_or("tf32", String::as_str);
    let compiling = arguments.iter().any(|argument| argument == "--compiling");
    let least: usize = arguments.last().and_then(|text| text.parse().ok()).unwrap_or(1);
    let graph = Graph::parse(&std::fs::read_to_string(step)?)?;
    let gpu = Gpu::get(0)?;
    // cuDNN finds cuBLASLt only where that was opened before.
    CublasLt::open(&Search::from_env())?;
    let convolver = Convolver::new(gpu.device(), Cudnn::open(&Search::from_env())?)?;
    println!(
        "cuDNN {} on {}",
        convolver.version(),
        gpu.device().description().name
    );
    let limits = PlanLimits {
        compiling,
        ..PlanLimits::default()
    };
    let mut known: Vec<(Convolution, usize, f32)> = Vec::new();
    for (_, node) in graph.nodes() {
        let (a, b) = match node.inputs[..] {
            [a, b, ..] => (a, b),
            _ => continue,
        };
        let out = node.outputs[0];
        let (dims, tensors, task) = match &node.op {
            Op::Conv(dims) => (dims, [a, b, out], Task::Forward),
            Op::ConvInputGrad { conv, .. } => (conv, [out, b, a], Task::InputGradient),
            Op::ConvWeightGrad { conv, .. } => (conv, [a, out, b], Task::WeightGradient),
            _ => continue,
        };
        if graph.shape(tensors[1])[2] < least {
            continue;
        }
        let convolution = describe(&graph, dims, tensors, task, kind);
        if let Some((_, count, _)) = known.iter_mut().find(|(own, ..)| *own == convolution) {
            *count += 1;
            continue;
        }
        match convolver.survey(gpu.stream(), &convolution, limits) {
            Ok(plans) => {
                let times: Vec<String> = plans
                    .iter()
                    .map(|plan| {
                        let compiled = if plan.compiles { "c" } else { "" };
                        let megabytes = plan.workspace_bytes >> 20;
                        let made = plan.made_milliseconds;
                        format!(
                            "{:.0}{compiled} ({megabytes} MiB, {made:.0} ms)",
                            plan.microseconds
                        )
                    })
                    .collect();
                println!("{convolution}: {} us", times.join(", "));
                let best = plans
                    .iter()
                    .map(|plan| plan.microseconds)
                    .fold(f32::MAX, f32::min);
                known.push((convolution, 1, best));
            }
            Err(error) => {
                println!("{error}");
                known.push((convolution, 1, 0.0));
            }
        }
    }
    for task in [Task::Forward, Task::InputGradient, Task::WeightGradient] {
        let of_task = known.iter().filter(|(convolution, ..)| convolution.task == task);
        let (count, sum) = of_task.fold((0, 0.0), |(count, sum), (_, times, best)| {
            (count + times, sum + *times as f32 * best)
        });
        println!("{task:?}: {count} in {sum:.0} us");
    }
    Ok(())
}
