//! Templates: C text for the kernels that a loop nest cannot express well (vector mathematics, matrix
//! products, convolutions, pooling).
//!
//! A template is a Rust function from a description (shapes, strides, snippets of C for fused operations)
//! to a [`KernelText`]: C source of one function that the step calls. Shapes are known, so blocks, tails,
//! packing and the split over threads are decided here and appear in the source as constants.
//!
//! - [`element`]: the numbers that templates compute with, and how these lie in memory.
//! - [`vector`]: the headers that all generated sources include: vectors of a fixed width and functions on
//!   them.
//! - [`gemm`]: matrix products of any strides. Operands may be computed while they are packed, and results
//!   are consumed from L1.
//! - [`tile`]: the register-tiled inner loops, shared by all matrix products and convolutions of a step.
//! - [`mod@conv`]: convolutions and their gradients as implicit matrix products over channels-last images.
//! - [`attention`]: attention and its gradient, scores kept in cache.
//! - [`mod@pool`]: pooling of planes and its gradients.
//!
//! This module does not know the graph, or which operations were fused: its callers give it C expressions.

pub mod attention;
pub mod conv;
pub mod element;
mod frame;
pub mod gemm;
pub(crate) mod pieces;
mod plane;
pub mod pool;
pub mod standalone;
pub mod tile;
pub mod vector;

use std::fmt;

/// Names that generated functions use themselves, besides single letters from `c` on; no parameter may have
/// one of them.
pub const RESERVED: &[&str] = &[
    "args",
    "at",
    "base",
    "batch",
    "begin",
    "better",
    "block",
    "block_end",
    "channel",
    "chunk",
    "col",
    "cols",
    "count",
    "count_x",
    "count_y",
    "cp",
    "ctx",
    "current",
    "depth",
    "dy",
    "element",
    "end",
    "ends",
    "extent",
    "few",
    "filled",
    "first_x",
    "first_y",
    "free",
    "fresh",
    "from",
    "from_zero",
    "grad",
    "group",
    "group_end",
    "half",
    "image",
    "images",
    "index",
    "indices",
    "inside",
    "k0",
    "ld",
    "lead",
    "ldc",
    "line",
    "line_rows",
    "lines",
    "lowest",
    "next",
    "number",
    "map",
    "own",
    "packed",
    "panel",
    "part",
    "pixel",
    "pixel0",
    "place",
    "px",
    "py",
    "pz",
    "rest",
    "result",
    "row",
    "rows",
    "rp",
    "rt",
    "run",
    "shift",
    "shifted",
    "slab",
    "some",
    "start",
    "stationary",
    "step",
    "streamed",
    "sum",
    "sums",
    "taps",
    "target",
    "thread",
    "tile",
    "tile_a",
    "tile_b",
    "to",
    "total",
    "to_end",
    "tx",
    "turned",
    "ty",
    "tz",
    "unit",
    "valid",
    "where",
    "wide",
    "wide_end",
    "width",
    "workspace",
    "x_begin",
    "x_end",
    "y0",
    "z0",
];

/// A parameter of a kernel: a C type and a name, as in `const float *x`. Snippets refer to it by its name,
/// which must not be one of [`RESERVED`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Param {
    /// C type, such as `const float *`.
    pub ctype: String,
    /// C identifier.
    pub name: String,
}

impl Param {
    /// Parameter `name` of type `ctype`.
    pub fn new(ctype: impl Into<String>, name: impl Into<String>) -> Self {
        let (ctype, name) = (ctype.into(), name.into());
        let reserved = RESERVED.contains(&name.as_str()) || (name.len() == 1 && name.as_str() >= "c");
        debug_assert!(!reserved, "`{name}` is a name of the generated code itself");
        Self { ctype, name }
    }
}

/// Declaration: `const float *x`.
impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = if self.ctype.ends_with('*') { "" } else { " " };
        write!(f, "{}{space}{}", self.ctype, self.name)
    }
}

/// A function with external linkage that several kernels may need. Equal names mean equal definitions: a
/// step contains each once.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Helper {
    /// C identifier.
    pub name: String,
    /// Its declaration, with the semicolon.
    pub prototype: String,
    /// Its definition.
    pub definition: String,
}

/// A generated kernel: `void name(const kiln_runtime *rt, <params>, char *workspace)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelText {
    /// Name of the function.
    pub name: String,
    /// Parameters between `rt` and `workspace`, in order.
    pub params: Vec<Param>,
    /// Declaration of the function, with the semicolon.
    pub prototype: String,
    /// The function and its own helper functions (all `static`). Expects [`vector::prelude`],
    /// `kiln_runtime.h` and the prototypes of the helpers before it.
    pub source: String,
    /// The shared functions that it calls.
    pub helpers: Vec<Helper>,
    /// Bytes that `workspace` (64-byte aligned) must have; may hold anything before and after.
    pub workspace_bytes: usize,
}

impl KernelText {
    /// A kernel of which only the working memory is known: nothing is written yet.
    pub fn planned(workspace_bytes: usize) -> Self {
        Self {
            name: String::new(),
            params: Vec::new(),
            prototype: String::new(),
            source: String::new(),
            helpers: Vec::new(),
            workspace_bytes,
        }
    }
}

/// How many elements a snippet of C is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Width {
    /// One element; expressions have type `float` (or as [`element::Element`] says).
    Scalar,
    /// As many consecutive elements as a vector has lanes; expressions have type `vf`.
    Vector,
}

/// `x` rounded up to a multiple of `to`.
pub(crate) fn round_up(x: usize, to: usize) -> usize {
    x.div_ceil(to) * to
}

/// The function header of a kernel, without `;` or body.
pub(crate) fn signature(name: &str, params: &[Param]) -> String {
    let params: String = params.iter().map(|p| format!("{p}, ")).collect();
    format!("void {name}(const kiln_runtime *rt, {params}char *workspace)")
}

/// Fields of the structure that carries a kernel's parameters to its parallel parts.
pub(crate) fn fields(params: &[Param]) -> String {
    params.iter().map(|p| format!("    {p};\n")).collect()
}

/// Statements that give a parallel part the parameters under their own names.
pub(crate) fn unpack(params: &[Param]) -> String {
    params
        .iter()
        .map(|p| format!("    {p} = args->{};\n", p.name))
        .collect()
}

/// Initialisers of that structure.
pub(crate) fn pack_fields(params: &[Param]) -> String {
    params.iter().map(|p| format!(".{0} = {0}, ", p.name)).collect()
}

/// Indents every line of `text` by `by` spaces.
pub(crate) fn indent(text: &str, by: usize) -> String {
    let margin = " ".repeat(by);
    text.lines()
        .map(|line| {
            if line.is_empty() {
                "\n".into()
            } else {
                format!("{margin}{line}\n")
            }
        })
        .collect()
}

/// How a part of the kernel is called.
pub(crate) fn run_part(serial: bool) -> impl Fn(&str, usize) -> String {
    move |function, count| call_part(serial, function, count)
}

/// The call of a part over `count` units, a number or a C expression.
pub(crate) fn call_part(serial: bool, function: &str, count: impl fmt::Display) -> String {
    if serial {
        format!("    {function}(&args, 0, {count}, 0);\n")
    } else {
        format!("    rt->parallel_for(rt->pool, {count}, 1, {function}, &args);\n")
    }
}

/// The kernel around its parts.
pub(crate) fn finish_kernel(
    name: &str,
    params: &[Param],
    mut source: String,
    calls: &str,
    workspace: usize,
) -> KernelText {
    let head = signature(name, params);
    source.push_str(&format!(
        "{head} {{\n    struct {name}_args args = {{{}.workspace = workspace}};\n{calls}}}\n",
        pack_fields(params)
    ));
    KernelText {
        name: name.into(),
        params: params.to_vec(),
        prototype: format!("{head};"),
        source,
        helpers: Vec::new(),
        workspace_bytes: workspace,
    }
}
