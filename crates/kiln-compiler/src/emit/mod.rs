//! Emit: from a schedule and a plan to a tree of C sources.
//!
//! Each kernel of the schedule becomes one or more calls: a task that the pool shares out ([`nest::Launch`]), a template's
//! function, or an operation that runs outside. Functions take their buffers as arguments, so kernels of equal text (the layers of
//! a model, the updates of equal parameters) are one function called several times. `kiln_step` is the list of calls, each under a
//! comment that says what is computed, for which part of the program, and where its operands live.

pub mod contract;
pub mod library;
pub mod nest;
pub mod pointwise;
mod step;

use kiln_cpu::Isa;
use kiln_graph::{Graph, Op};

use crate::kernels;
use crate::schedule::{Kernel, KernelKind};
use nest::{Argument, Launch};

pub use step::{Emitted, KernelReport, emit};

/// What emitting depends on besides the graph.
#[derive(Clone, Debug)]
pub struct EmitOptions {
    /// Vector instructions.
    pub isa: Isa,
    /// Most threads that will run the step.
    pub threads: usize,
}

/// One call of the step.
#[derive(Clone, Debug)]
pub enum Call {
    /// A task shared between threads.
    Task(Launch),
    /// A template's function, which shares its work itself. Its workspace is the kernel's scratch memory.
    Kernel {
        /// The function, named `@`.
        kernel: Box<kernels::Kernel>,
        /// Its parameters.
        arguments: Vec<Argument>,
    },
    /// An operation that the front end runs.
    Extern {
        /// Which of the step's extern operations.
        index: usize,
        /// Operands, then results.
        arguments: Vec<Argument>,
    },
}

/// The code of one kernel of the schedule.
#[derive(Clone, Debug, Default)]
pub struct KernelCode {
    /// Calls, in order.
    pub calls: Vec<Call>,
    /// Bytes of scratch memory that the calls share.
    pub scratch: usize,
}

/// Writes the code of `kernel`. `externs` counts the operations that run outside.
pub fn generate(graph: &Graph, kernel: &Kernel, options: &EmitOptions, externs: &mut usize) -> KernelCode {
    match &kernel.kind {
        KernelKind::Nest(nest) => {
            let code = nest::generate(graph, nest, kernels::vector::lanes(options.isa) as i64);
            KernelCode {
                calls: code.launches.into_iter().map(Call::Task).collect(),
                scratch: code.scratch,
            }
        }
        KernelKind::Library(node) => match contract::generate(graph, kernel, *node, options) {
            Some(calls) => {
                let workspace = |call: &Call| match call {
                    Call::Kernel { kernel, .. } => kernel.workspace_bytes,
                    _ => 0,
                };
                let scratch = calls.iter().map(workspace).max().unwrap_or(0).max(library::scratch(graph, *node));
                KernelCode { calls, scratch }
            }
            None => {
                let data = graph.node(*node);
                debug_assert!(
                    matches!(data.op, Op::Extern(_) | Op::Attention(_) | Op::AttentionGrad(_) | Op::Random { .. }),
                    "no code for {}",
                    data.op.name()
                );
                *externs += 1;
                KernelCode {
                    calls: vec![Call::Extern {
                        index: *externs - 1,
                        arguments: kernel.operands(graph, *node),
                    }],
                    scratch: 0,
                }
            }
        },
    }
}
