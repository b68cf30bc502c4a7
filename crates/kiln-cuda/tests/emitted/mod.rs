//! Graphs of many single operations, what the target emits for them, and whether that is right.

#![allow(dead_code, reason = "each test takes a part")]

use kiln_compiler::Options;
use kiln_compiler::schedule::{KernelKind, fuse};
use kiln_cuda::build::{Compiler, Source, Store};
use kiln_cuda::code::FunctionText;
use kiln_cuda::emit::product::padded::Padding;
use kiln_cuda::emit::product::warpgroups::Warpgroups;
use kiln_cuda::emit::{Call, EmitOptions, generate};
use kiln_cuda::kernels::PRELUDE;
use kiln_cuda::policy::POLICY;
use kiln_cuda::testing::host::{Differential, Outcome, differential};
use kiln_graph::{DType, Graph, HostTensor, TensorType};

use crate::common;

/// One graph of many cases: the host's compiler takes longer to start than to compile.
///
/// A case has statements of the text form and ends with `return`. Its values begin with `$`, its parameters
/// are not numbered.
pub fn graph(cases: &[String]) -> Graph {
    let (mut statements, mut outputs, mut parameters) = (String::new(), Vec::new(), 0);
    for (number, case) in cases.iter().enumerate() {
        for line in case.replace('$', &format!("%c{number}")).lines().map(str::trim) {
            if let Some(values) = line.strip_prefix("return ") {
                outputs.push(values.to_owned());
            } else if line.contains("= parameter ") {
                let numbered = line.replace("= parameter ", &format!("= parameter {parameters} "));
                statements.push_str(&format!("  {numbered}\n"));
                parameters += 1;
            } else {
                statements.push_str(&format!("  {line}\n"));
            }
        }
    }
    let text = format!(
        "graph @cases {{\n{statements}  return {}\n}}\n",
        outputs.join(", ")
    );
    Graph::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Compares with the interpreter, on random arguments.
pub fn check(cases: &[String]) {
    let graph = graph(cases);
    differential(&graph).unwrap_or_else(|error| panic!("{error}\n{graph}"));
}

/// Compares with the interpreter, on arguments full of what is special: ties, zeros of both signs,
/// infinities, NaN.
pub fn check_special(cases: &[String]) {
    let graph = graph(cases);
    let types = graph.parameters().iter().map(|&value| graph.ty(value));
    let tensors = types
        .enumerate()
        .map(|(seed, ty)| special(ty, seed as u64))
        .collect();
    let outcome = Differential::new(&graph).arguments(tensors, Vec::new()).check();
    match outcome {
        Ok(Outcome::Same) => {}
        other => panic!("{other:?}\n{graph}"),
    }
}

fn special(ty: &TensorType, seed: u64) -> HostTensor {
    const FLOATS: [f64; 10] = [
        0.0,
        -0.0,
        1.0,
        f64::NAN,
        -1.0,
        f64::INFINITY,
        2.5,
        f64::NEG_INFINITY,
        1.0,
        -3.0,
    ];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        state >> 33
    };
    let count = ty.numel();
    if ty.dtype.is_float() {
        // Few are NaN, or it would hide all the rest.
        let mut float = || match next() % 40 {
            0 => FLOATS[3],
            other => FLOATS[[0, 1, 2, 4, 5, 6, 7, 8, 9][other as usize % 9]],
        };
        return HostTensor::from_floats(ty.dtype, ty.shape.clone(), (0..count).map(|_| float()));
    }
    let mut int = || match (ty.dtype, next()) {
        (DType::Bool, x) => x as i64 % 2,
        (dtype, x) if dtype.is_unsigned_int() => x as i64 % 7,
        (_, x) => x as i64 % 9 - 4,
    };
    HostTensor::from_ints(ty.dtype, ty.shape.clone(), (0..count).map(|_| int()))
}

/// The calls of a graph's operations of the library, in order, and the functions among them.
pub struct Emitted {
    pub calls: Vec<Call>,
    pub functions: Vec<FunctionText>,
    /// Bytes of working memory of each operation.
    pub scratch: Vec<usize>,
}

impl Emitted {
    pub fn new(graph: &Graph) -> Self {
        let schedule = fuse::schedule(graph, &Options::default(), &POLICY);
        let options = EmitOptions {
            capability: (9, 0),
            processors: 132,
            tf32: false,
            padding: Padding::default(),
            warpgroups: Warpgroups::Never,
            cudnn: false,
            layouts: &schedule.layouts,
        };
        let (mut calls, mut scratch) = (Vec::new(), Vec::new());
        for kernel in &schedule.kernels {
            if let KernelKind::Library(_) = kernel.kind {
                let code = generate(graph, kernel, &options);
                let code = code.unwrap_or_else(|error| panic!("{error}\n{graph}"));
                scratch.push(code.scratch);
                calls.extend(code.calls);
            }
        }
        let functions = calls.iter().filter_map(|call| match call {
            Call::Launch(launch) => Some(launch.text.clone()),
            _ => None,
        });
        Self {
            functions: functions.collect(),
            calls,
            scratch,
        }
    }
}

/// Compiles kernels for the oldest and the newest generation, if NVRTC is here.
pub fn machine_code(functions: &[FunctionText]) {
    let Some(nvrtc) = common::nvrtc() else { return };
    let mut functions = functions.to_vec();
    functions.sort_by(|a, b| (&a.body, &a.helpers).cmp(&(&b.body, &b.helpers)));
    functions.dedup();
    let source = |(number, functions): (usize, &[FunctionText])| {
        let mut text = PRELUDE.to_owned();
        for (at, function) in functions.iter().enumerate() {
            text.push_str(&function.source(&format!("kernel_{number}_{at}"), false));
        }
        Source {
            name: format!("kernel_{number}"),
            text,
        }
    };
    let sources: Vec<Source> = functions.chunks(16).enumerate().map(source).collect();
    for capability in [(8, 0), (9, 0)] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        let compiled = compiler
            .compile(&sources)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(compiled.len(), sources.len());
    }
}
