//! Emit: from a schedule and a plan to a tree of C sources.
//!
//! Each kernel of the schedule becomes one or more calls: a task that the pool shares out
//! ([`nest::Launch`]), a template's function, or an operation that runs outside. Functions take their
//! buffers as arguments, so kernels of equal text (the layers of a model, the updates of equal parameters)
//! are one function called several times. `kiln_step` is the list of calls. A comment above each says what
//! it computes, for which part of the program, and where its operands live.

pub mod attention;
pub mod calls;
pub mod contract;
pub mod expressions;
mod guards;
pub mod image;
pub mod library;
pub mod nest;
mod own;
mod step;
pub(crate) mod tree;

use kiln_compiler::CompileError;
use kiln_compiler::schedule::layout::Layouts;
use kiln_compiler::schedule::nest::Nest;
use kiln_compiler::schedule::{Buffer, Kernel, KernelKind};
use kiln_graph::{Graph, Node, Op};

use crate::isa::Isa;
use crate::kernels;
use crate::target::NAME;
use nest::{Argument, Launch, NestCode};

pub use step::emit;

/// The options of emitting: what the code depends on besides the graph.
#[derive(Clone, Copy, Debug)]
pub struct EmitOptions<'a> {
    /// Vector instructions.
    pub isa: Isa,
    /// Most threads that will run the step.
    pub threads: usize,
    /// Whether text is wanted. Without it, templates are only planned and tell their working memory; a
    /// template whose working memory only its text tells is written all the same.
    pub writes: bool,
    /// Whether the text is for a family of shapes: a choice between forms that gains little at one extent is not
    /// made, so that other extents have the same form.
    pub family: bool,
    /// Values that are not stored row-major.
    pub layouts: &'a Layouts,
}

/// One call of the step.
#[derive(Clone, Debug)]
pub enum Call {
    /// A task shared between threads.
    Task(Launch),
    /// The same task for several tensors, shared between threads as a whole.
    Together(Together),
    /// A template's function, which shares its work itself. Its workspace is the kernel's scratch memory.
    Kernel {
        /// The function, named `@`.
        kernel: Box<kernels::KernelText>,
        /// Its parameters.
        arguments: Vec<Argument>,
    },
    /// An operation of the program's own, in C.
    Own(own::OwnCall),
    /// An operation that the front end runs.
    Extern {
        /// Operands, then results.
        arguments: Vec<Argument>,
    },
}

impl Call {
    /// Bytes of working memory.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Call::Kernel { kernel, .. } => kernel.workspace_bytes,
            _ => 0,
        }
    }
}

/// A task over independent elements of several tensors.
#[derive(Clone, Debug)]
pub struct Together {
    /// The text of the function, with `@` for its name.
    pub text: String,
    /// For each tensor the arguments of the function and the number of elements.
    pub tensors: Vec<(Vec<Argument>, i64)>,
}

/// The code of one kernel of the schedule.
#[derive(Clone, Debug, Default)]
pub struct KernelCode {
    /// Calls, in order.
    pub calls: Vec<Call>,
    /// Bytes of scratch memory that the calls share.
    pub scratch: usize,
}

/// Bytes of working memory that the code of `kernel` needs, from plans; none if only its text tells.
///
/// # Errors
/// Those of [`generate`].
pub fn scratch(
    graph: &Graph,
    kernel: &Kernel,
    options: &EmitOptions<'_>,
) -> Result<Option<usize>, CompileError> {
    let node = match &kernel.kind {
        KernelKind::Nest(nest) => return Ok(nest::scratch(graph, nest)),
        KernelKind::Together(_) => return Ok(Some(0)),
        KernelKind::Library(node) | KernelKind::Contraction(node, _) => *node,
    };
    let template_plans = match graph.node(node).op {
        Op::DotGeneral(_) | Op::Attention(_) | Op::AttentionGrad(_) => true,
        Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => image::is_product(graph, node),
        Op::MaxPool(_)
        | Op::MaxPoolWithIndices { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AvgPool { .. }
        | Op::AvgPoolGrad { .. } => true,
        // Plain loops.
        _ => return Ok(Some(library::scratch(graph, node, options.threads))),
    };
    if !template_plans {
        return Ok(None);
    }
    let options = EmitOptions {
        writes: false,
        ..*options
    };
    Ok(Some(generate(graph, kernel, &options)?.scratch))
}

/// Writes the code of `kernel`.
///
/// # Errors
/// [`CompileError::Unsupported`] for operations that nothing here computes.
pub fn generate(
    graph: &Graph,
    kernel: &Kernel,
    options: &EmitOptions<'_>,
) -> Result<KernelCode, CompileError> {
    let node = match &kernel.kind {
        KernelKind::Nest(nest) => {
            let code = nest::generate(graph, nest, kernels::vector::lanes(options.isa) as i64);
            return Ok(KernelCode {
                calls: code.launches.into_iter().map(Call::Task).collect(),
                scratch: code.scratch,
            });
        }
        KernelKind::Together(nests) => {
            let lanes = kernels::vector::lanes(options.isa) as i64;
            return Ok(together(graph, nests, lanes));
        }
        KernelKind::Library(node) => *node,
        KernelKind::Contraction(node, nest) => {
            return contract::with_epilogue(graph, kernel, *node, nest, options)
                .ok_or_else(|| unsupported(graph, *node));
        }
    };
    if let Some(calls) = contract::generate(graph, kernel, node, options) {
        // A template has working memory of its own; that of plain loops follows from the operation, also where
        // there is nothing to do.
        let is_template = calls.iter().any(|call| matches!(call, Call::Kernel { .. }));
        let scratch = match is_template {
            true => calls.iter().map(Call::workspace_bytes).max().unwrap_or(0),
            false => library::scratch(graph, node, options.threads),
        };
        return Ok(KernelCode { calls, scratch });
    }
    if let Op::Extern(op) = &graph.node(node).op
        && !op.c_source.is_empty()
    {
        return Ok(KernelCode {
            calls: vec![Call::Own(own::OwnCall::new(graph, node, op))],
            scratch: 0,
        });
    }
    let is_outside = |op: &Op| matches!(op, Op::Extern(_) | Op::Collective(_) | Op::CollectiveWait);
    if !is_outside(&graph.node(node).op) {
        return Err(unsupported(graph, node));
    }
    Ok(KernelCode {
        calls: vec![Call::Extern {
            arguments: operands(graph, node),
        }],
        scratch: 0,
    })
}

/// Operands and results of an operation, as arguments.
/// `text` as a part of a comment in C, which it does not end.
pub(crate) fn in_comment(text: &str) -> String {
    text.replace("*/", "* /")
}

fn operands(graph: &Graph, node: Node) -> Vec<Argument> {
    let data = graph.node(node);
    let all = data.inputs.iter().chain(&data.outputs);
    all.map(|&value| Argument::Buffer(Buffer::Value(value))).collect()
}

/// Nests side by side: those of equal text become one task.
fn together(graph: &Graph, nests: &[Nest], lanes: i64) -> KernelCode {
    let mut code = KernelCode::default();
    let mut tasks: Vec<Together> = Vec::new();
    for nest in nests {
        let NestCode { launches, scratch } = nest::generate(graph, nest, lanes);
        debug_assert_eq!(scratch, 0, "what reduces is not joined");
        for launch in launches {
            if !launch.flat {
                code.calls.push(Call::Task(launch));
                continue;
            }
            let tensor = (launch.arguments, launch.n);
            match tasks.iter_mut().find(|task| task.text == launch.text) {
                Some(task) => task.tensors.push(tensor),
                None => tasks.push(Together {
                    text: launch.text,
                    tensors: vec![tensor],
                }),
            }
        }
    }
    code.calls.extend(tasks.into_iter().map(Call::Together));
    code
}

fn unsupported(graph: &Graph, node: Node) -> CompileError {
    let data = graph.node(node);
    let types: Vec<String> = data.inputs.iter().map(|&v| graph.ty(v).to_string()).collect();
    CompileError::Unsupported {
        target: NAME,
        op: data.op.name().into(),
        types: types.join(", "),
    }
}
