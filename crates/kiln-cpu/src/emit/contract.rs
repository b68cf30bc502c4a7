//! Contractions: which template computes each, and how its operands are addressed.
//!
//! Matrix products of floats go to [`crate::kernels::gemm`]: operands are strided windows on stored values,
//! so transposes, slices, head splits and repeated heads cost nothing. Convolutions and pools are
//! [`super::image`]'s; everything else is the plain loops of [`super::library`].

use kiln_compiler::schedule::access::{side, window};
use kiln_compiler::schedule::epilogue::{self, BATCH, COL, ROW, ResultFrame};
use kiln_compiler::schedule::layout::{product_strides, strides};
use kiln_compiler::schedule::nest::Nest;
use kiln_compiler::schedule::prologue::{PRODUCT, Prologue};
use kiln_compiler::schedule::{Buffer, Kernel};
use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Node, Value};

use super::nest::epilogue::Loops;
use super::nest::prologue::Operand as Computed;
use super::nest::{self, Argument};
use super::{Call, KernelCode};
use super::{image, library};
use crate::kernels;
use crate::kernels::Param;
use crate::kernels::element::Storage;
use crate::kernels::gemm::{self, Axis, Epilogue, GemmSpec, Operand, TileCode};

/// The calls for a library kernel; none if the operation has no template here.
pub fn generate(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    options: &super::EmitOptions<'_>,
) -> Option<Vec<Call>> {
    if let Some(call) = product(graph, kernel, node, options) {
        return Some(vec![call]);
    }
    if let Some(call) = image::generate(graph, kernel, node, options) {
        return Some(vec![call]);
    }
    if let Some(call) = super::attention::generate(graph, kernel, node, options) {
        return Some(vec![call]);
    }
    let launches = library::generate(graph, node, &kernel.reads, options.layouts, options.threads)?;
    Some(launches.into_iter().map(Call::Task).collect())
}

/// The sources of a template's operands.
#[derive(Default)]
pub struct Sources {
    /// Parameters of the kernel.
    pub params: Vec<Param>,
    /// The arguments for them.
    arguments: Vec<Argument>,
    /// Functions that compute operands.
    functions: String,
}

impl Sources {
    /// Adds the memory of `base`, as the pointer `name`.
    pub fn stored(&mut self, storage: Storage, name: &str, base: Value) {
        self.params
            .push(Param::new(format!("const {} *", storage.ctype()), name));
        self.arguments.push(Argument::Buffer(Buffer::Value(base)));
    }

    /// Adds the buffers that `prologue` reads to compute the operand `name`, and the functions that compute
    /// it.
    pub fn computed(
        &mut self,
        graph: &Graph,
        prologue: &Prologue,
        name: &'static str,
        options: &super::EmitOptions<'_>,
    ) -> Computed {
        if !options.writes {
            return Computed::unwritten(prologue, name);
        }
        let lanes = kernels::vector::lanes(options.isa) as i64;
        let computed = Computed::new(graph, prologue, name, lanes);
        self.params.extend(computed.params.iter().cloned());
        self.arguments.extend_from_slice(&computed.arguments);
        self.functions.push_str(&computed.functions);
        computed
    }

    /// The call of `kernel`, whose parameters are those of the operands and then as many as `rest`.
    pub fn call(self, mut kernel: kernels::KernelText, rest: impl IntoIterator<Item = Argument>) -> Call {
        kernel.source.insert_str(0, &self.functions);
        Call::Kernel {
            kernel: Box::new(kernel),
            arguments: self.arguments.into_iter().chain(rest).collect(),
        }
    }
}

/// The description of a matrix product for the template, without its name and without the epilogue.
struct Product {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'static>,
    b: Operand<'static>,
    /// Where the operands are.
    sources: Sources,
    /// How the result is stored.
    storage: Storage,
}

/// How a float type is stored; none for other types.
pub fn storage(dtype: DType) -> Option<Storage> {
    match dtype {
        DType::F32 => Some(Storage::F32),
        DType::F64 => Some(Storage::F64),
        DType::F16 => Some(Storage::F16),
        DType::BF16 => Some(Storage::BF16),
        _ => None,
    }
}

impl Product {
    fn new(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions<'_>) -> Option<Self> {
        let data = graph.node(node);
        let out = data.outputs[0];
        let (result, storage) = (storage(graph.dtype(out))?, storage(graph.dtype(data.inputs[0]))?);
        if graph.ty(out).numel() == 0 {
            return None;
        }
        let mut sources = Sources::default();
        let mut operand = |at: usize, name: &'static str| {
            if let Some(prologue) = kernel.prologue(at) {
                let functions = sources.computed(graph, prologue, name, options);
                return Some(computed(functions, prologue, storage));
            }
            let window = window(graph, options.layouts, data.inputs[at], &kernel.reads);
            let side = side(graph, data, at, &window)?;
            sources.stored(storage, name, window.base);
            let batch = side.batch.iter().map(|&(extent, _)| extent).product();
            let operand = Operand::stored(
                storage,
                &pointer(name, window.offset),
                &side.batch,
                side.free.1,
                side.depth.1,
            );
            Some((operand, [batch, side.free.0, side.depth.0]))
        };
        let (a, [batch, m, k]) = operand(0, "left")?;
        let (b, [_, n, _]) = operand(1, "right")?;
        Some(Self {
            batch,
            m,
            n,
            k,
            a,
            b,
            sources,
            storage: result,
        })
    }

    /// The transposed product.
    fn transposed(self) -> Self {
        Self {
            m: self.n,
            n: self.m,
            a: self.b,
            b: self.a,
            ..self
        }
    }

    /// The call of the kernel, with parameters for the operands before `params`, for which `arguments` are
    /// passed.
    fn emit(
        self,
        epilogue: Epilogue<'_>,
        params: Vec<Param>,
        arguments: Vec<Argument>,
        options: &super::EmitOptions<'_>,
    ) -> Call {
        let Self { batch, m, n, k, .. } = self;
        let operands = self.sources.params.iter().cloned();
        let spec = GemmSpec {
            name: "@".into(),
            comment: format!("{batch} x [{m}, {k}] x [{k}, {n}]"),
            batch,
            m,
            n,
            k,
            a: self.a,
            b: self.b,
            epilogue,
            params: operands.chain(params).collect(),
            threads: options.threads,
        };
        let made = match options.writes {
            true => gemm::emit(spec, options.isa),
            false => kernels::KernelText::planned(gemm::workspace(spec, options.isa)),
        };
        self.sources.call(made, arguments)
    }
}

/// The operand that a prologue computes, which would be stored as `storage` says, and its extents: batch,
/// free and depth.
fn computed(functions: Computed, prologue: &Prologue, storage: Storage) -> (Operand<'static>, [usize; 3]) {
    let [_, free, depth] = PRODUCT;
    let axis = match prologue.vector {
        var if var == free => Some(Axis::Free),
        var if var == depth => Some(Axis::Depth),
        _ => None,
    };
    let load = move |at: &gemm::At<'_>| functions.load(at.width, &[at.batch, at.free, at.depth]);
    let extents = [0, 1, 2].map(|var| prologue.nest.extents[var] as usize);
    (Operand::computed(axis, load).standing_for(storage), extents)
}

fn product(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions<'_>) -> Option<Call> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let out = data.outputs[0];
    let product = Product::new(graph, kernel, node, options)?;
    let strides = strides(graph.shape(out), options.layouts.get(&out));
    let (batch, rows, cols) = product_strides(graph, out, dims, &strides)?;
    let storage = product.storage;
    let epilogue = Epilogue::store_as(storage, "out", &batch, rows.1, cols.1);
    let out_param = Param::new(format!("{} *", storage.ctype()), "out");
    let arguments = vec![Argument::Buffer(Buffer::Value(out))];
    Some(product.emit(epilogue, vec![out_param], arguments, options))
}

/// The calls for the contraction `node` followed by `nest`, and their scratch memory.
///
/// # Panics
/// Never for kernels of the scheduler, which asks [`epilogue::fits`] and [`epilogue::has_template`] first.
pub fn with_epilogue(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    nest: &Nest,
    options: &super::EmitOptions<'_>,
) -> Option<KernelCode> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let value = data.outputs[0];
    let mut product = Product::new(graph, kernel, node, options)?;
    let placed = ResultFrame::product(graph, value, dims).place(graph, nest, value, nest.maps.get(&value)?);
    let vector = epilogue::vector_variable(graph, &placed, value, &[COL, ROW])
        // Operations that joined the nest later may read unevenly; they read element by element.
        .unwrap_or(COL);
    let row = if vector == COL { ROW } else { COL };
    if vector == ROW {
        product = product.transposed();
    }
    let loops = Loops {
        rows: &[BATCH, row],
        vector,
        lanes: kernels::vector::lanes(options.isa) as i64,
    };
    let statements = match options.writes {
        true => nest::epilogue::generate(graph, &placed, value, &loops),
        false => nest::epilogue::Statements::default(),
    };
    let place = format!("const int64_t i{BATCH} = batch, i{row} = i;\n");
    let column = format!("const int64_t i{vector} = j;\n");
    let code = TileCode {
        tile: statements.tile,
        row: format!("{place}{}", statements.row),
        vector: format!("{column}{}", statements.vector),
        rest: format!("{column}{}", statements.rest),
    };
    let call = product.emit(
        Epilogue::tiles(code),
        statements.params,
        statements.arguments,
        options,
    );
    Some(KernelCode {
        scratch: call.workspace_bytes(),
        calls: vec![call],
    })
}

/// A pointer `offset` elements into a parameter.
pub fn pointer(name: &str, offset: i64) -> String {
    if offset == 0 {
        name.to_owned()
    } else {
        format!("({name} + {offset})")
    }
}
