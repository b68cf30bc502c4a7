//! What the target emits for single operations, and its machine code.

#![allow(dead_code, reason = "each test takes a part")]

use kiln_compiler::Options;
use kiln_compiler::schedule::{KernelKind, fuse};
use kiln_cuda::build::{Compiler, Cubins, Source};
use kiln_cuda::code::FunctionText;
use kiln_cuda::emit::{Call, EmitOptions, generate};
use kiln_cuda::kernels::PRELUDE;
use kiln_cuda::policy::POLICY;
use kiln_graph::Graph;

use crate::common;

/// The calls of a graph's operations of the library, in order, and the functions among them.
pub struct Emitted {
    pub calls: Vec<Call>,
    pub functions: Vec<FunctionText>,
}

impl Emitted {
    pub fn new(graph: &Graph) -> Self {
        let schedule = fuse::schedule(graph, &Options::default(), &POLICY);
        let options = EmitOptions {
            capability: (9, 0),
            processors: 132,
            tf32: false,
            layouts: &schedule.layouts,
        };
        let mut calls = Vec::new();
        for kernel in &schedule.kernels {
            if let KernelKind::Library(_) = kernel.kind {
                let code = generate(graph, kernel, &options);
                calls.extend(code.unwrap_or_else(|error| panic!("{error}\n{graph}")).calls);
            }
        }
        let functions = calls.iter().filter_map(|call| match call {
            Call::Launch(launch) => Some(launch.text.clone()),
            _ => None,
        });
        Self {
            functions: functions.collect(),
            calls,
        }
    }
}

/// Compiles kernels for the oldest and the newest generation, if NVRTC is here.
pub fn machine_code(functions: &[FunctionText]) {
    let Some(nvrtc) = common::nvrtc() else { return };
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
    let sources: Vec<Source> = functions.chunks(8).enumerate().map(source).collect();
    for capability in [(8, 0), (9, 0)] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Cubins::disabled()).unwrap();
        let compiled = compiler
            .compile(&sources)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(compiled.len(), sources.len());
    }
}
