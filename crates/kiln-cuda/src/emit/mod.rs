//! Emit: from a schedule and a plan to functions in CUDA C++ and calls.
//!
//! Each kernel of the schedule becomes one or more calls. Functions take pointers, so kernels of equal text
//! (the layers of a model) are one function called several times. [`generate`] says how each kind of kernel
//! is computed; [`step`] puts the calls of a step together.
//!
//! | kernel | computed by |
//! | --- | --- |
//! | loop nests, alone or side by side | [`nest`] |
//! | products of matrices, alone or with a nest behind them | [`product`]: cuBLASLt, or a kernel of our own |
//! | convolutions | [`convolution`] |
//! | pools | [`pooling`] |
//! | attention | [`attention`] |
//! | collectives of all ranks | `across`: NCCL |
//! | everything else of the library: scatter, sort, cumulative sums, .. | [`library`] |
//!
//! Small kernels that do not depend on each other are one launch (`beside`), and so is a kernel over channels
//! with the sums that it is a function of ([`after`]).

mod across;
pub mod after;
pub mod attention;
mod beside;
pub mod convolution;
pub mod elements;
pub mod expressions;
pub mod image;
pub mod library;
pub mod nest;
pub mod pooling;
pub mod product;
mod stages;
pub mod step;
pub mod text;

use kiln_compiler::CompileError;
use kiln_compiler::schedule::layout::Layouts;
use kiln_compiler::schedule::{Buffer, Kernel, KernelKind};
use kiln_graph::{Graph, Node, Op};

use self::after::Role;
use self::product::padded::Padding;
use self::product::warpgroups::Warpgroups;
use crate::code::{Across, Copied, FunctionText, Trial};
use crate::convolutions::Convolution;
use crate::products::Product;
use crate::target::NAME;

/// What a call is given, before memory is planned.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Argument {
    /// A pointer to the first byte of a buffer.
    Buffer(Buffer),
    /// A pointer to a byte of a buffer.
    Part(Buffer, usize),
    /// A tensor from a byte of a buffer, or of working memory, on, for the copy engine.
    Copied(Box<Argument>, Copied),
    /// A pointer to the eight bytes of a runtime scalar.
    Scalar(u32),
    /// A pointer to a byte of this kernel's working memory.
    Scratch(usize),
    /// A pointer to a table: for each row addresses, then numbers, eight bytes each.
    Table(Vec<(Vec<Argument>, Vec<u64>)>),
}

impl Argument {
    /// A pointer to a value's own buffer.
    pub fn value(value: kiln_graph::Value) -> Self {
        Self::Buffer(Buffer::Value(value))
    }
}

/// A launch of a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Launch {
    /// The kernel.
    pub text: FunctionText,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// An argument for each parameter.
    pub arguments: Vec<Argument>,
    /// What it may do together with another one.
    pub role: Role,
}

/// A product of matrices in the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProductCall {
    /// What is multiplied.
    pub product: Product,
    /// The left operand: a buffer and the bytes in front of its first element.
    pub left: (Buffer, usize),
    /// The right operand.
    pub right: (Buffer, usize),
    /// The result.
    pub result: (Buffer, usize),
    /// Bytes of working memory, at the start of the kernel's.
    pub workspace: usize,
}

/// A convolution in the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConvolutionCall {
    /// What is computed.
    pub convolution: Convolution,
    /// Where `x`, `w` and `y` are: a buffer or working memory, and the bytes in front of the first element.
    pub tensors: [(Argument, usize); 3],
    /// Where the library's working memory begins in the kernel's, and its bytes.
    pub workspace: (usize, usize),
}

/// A product some of whose matrices are in the kernel's working memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PaddedProduct {
    /// The product, as the matrices lie there.
    pub call: ProductCall,
    /// Where in working memory the left operand, the right operand and the result are instead of in their
    /// buffers.
    pub copies: [Option<usize>; 3],
}

/// One call of the step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// A kernel.
    Launch(Launch),
    /// A product.
    Product(Box<ProductCall>),
    /// A convolution.
    Convolution(Box<ConvolutionCall>),
    /// The first calls where a library is faster (and takes their convolutions), the others elsewhere; and
    /// what is timed for a product.
    Either(Vec<Call>, Vec<Call>, Option<Box<Trial>>),
    /// A product on copies of matrices.
    Padded(Box<PaddedProduct>),
    /// A collective of all ranks, its operand and its result.
    Across(Box<Across>, [Argument; 2]),
    /// The wait for one that was started, its operand and its result; the launch copies one to the other.
    Wait(Box<Launch>, [Argument; 2]),
    /// An operation that the front end runs: operands, then results.
    Extern(Vec<Argument>),
}

/// The code of one kernel of the schedule.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KernelCode {
    /// Calls, in order.
    pub calls: Vec<Call>,
    /// Bytes of working memory that the calls share.
    pub scratch: usize,
}

impl KernelCode {
    /// Launches without working memory.
    pub fn launches(launches: impl IntoIterator<Item = Launch>) -> Self {
        Self {
            calls: launches.into_iter().map(Call::Launch).collect(),
            scratch: 0,
        }
    }
}

/// What emitting depends on besides the graph.
#[derive(Clone, Copy, Debug)]
pub struct EmitOptions<'a> {
    /// The capability that code is made for, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Multiprocessors of the device. Results must not depend on it.
    pub processors: u32,
    /// Whether products of f32 may round their operands for the tensor cores.
    pub tf32: bool,
    /// Which products are computed on padded copies.
    pub padding: Padding,
    /// Which products Kiln's own template computes.
    pub warpgroups: Warpgroups,
    /// Whether there is cuDNN, which is then asked first for each convolution.
    pub cudnn: bool,
    /// Values that are not stored row-major.
    pub layouts: &'a Layouts,
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
        KernelKind::Nest(nest) => return Ok(nest::generate(graph, nest, options)),
        KernelKind::Together(nests) => return Ok(nest::together(graph, nests, options)),
        KernelKind::Library(node) => *node,
        KernelKind::Contraction(node, nest) => {
            let code = product::warpgroups::with_nest(graph, kernel, *node, nest, options);
            return code.ok_or_else(|| unsupported(graph, *node));
        }
    };
    if let Some(code) = library::empty(graph, node, options) {
        return Ok(code);
    }
    let code = match graph.node(node).op {
        Op::DotGeneral(_) => product::generate(graph, kernel, node, options),
        Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => {
            convolution::generate(graph, kernel, node, options)
        }
        Op::MaxPool(_)
        | Op::MaxPoolWithIndices { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AvgPool { .. }
        | Op::AvgPoolGrad { .. } => pooling::generate(graph, kernel, node, options),
        Op::Attention(_) | Op::AttentionGrad(_) => attention::generate(graph, kernel, node, options),
        Op::Collective(it) => across::collective(graph, node, it),
        Op::CollectiveWait => Some(across::wait(graph, node)),
        Op::Extern(_) => Some(KernelCode {
            calls: vec![Call::Extern(operands(graph, node))],
            scratch: 0,
        }),
        _ => library::generate(graph, kernel, node, options),
    };
    code.ok_or_else(|| unsupported(graph, node))
}

/// Operands and results of an operation, as arguments.
fn operands(graph: &Graph, node: Node) -> Vec<Argument> {
    let data = graph.node(node);
    let all = data.inputs.iter().chain(&data.outputs);
    all.map(|&value| Argument::value(value)).collect()
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
