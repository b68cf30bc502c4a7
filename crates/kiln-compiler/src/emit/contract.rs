//! Which template makes a contraction, and how its operands are addressed.
//!
//! Matrix products of floats go to [`crate::kernels::gemm`]: operands are strided windows on stored values, so transposes, slices, head
//! splits and repeated heads cost nothing. Convolutions and pools are [`super::image`]'s; everything else is the plain loops of
//! [`super::library`].

use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Node, Value};

use super::nest::epilogue::Loops;
use super::nest::{self, Argument};
use super::{Call, KernelCode};
use super::{image, library};
use crate::kernels;
use crate::kernels::Param;
use crate::kernels::element::Storage;
use crate::kernels::gemm::{self, Epilogue, GemmSpec, Operand, TileCode};
use crate::schedule::access::{Strided, side, strided};
use crate::schedule::epilogue::{self, BATCH, COL, Frame, ROW};
use crate::schedule::layout::{Layouts, product_strides, strides};
use crate::schedule::nest::Nest;
use crate::schedule::{Buffer, Kernel};

/// The window on one of the buffers in `reads` through which a library kernel reads `operand`.
pub fn window(graph: &Graph, layouts: &Layouts, operand: Value, reads: &[Buffer]) -> Strided {
    let stop = |value: Value| reads.contains(&Buffer::Value(value));
    strided(graph, layouts, operand, &stop).unwrap_or_else(|| Strided {
        base: operand,
        offset: 0,
        strides: graph
            .shape(operand)
            .strides()
            .iter()
            .map(|&stride| stride as i64)
            .collect(),
    })
}

/// The calls for a library kernel; none if the operation has no template here.
pub fn generate(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    options: &super::EmitOptions,
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
    let launches = library::generate(graph, node, &kernel.reads, &options.layouts)?;
    Some(launches.into_iter().map(Call::Task).collect())
}

/// A matrix product as the template wants it, but for its name and what happens to the result.
struct Product<'a> {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'a>,
    b: Operand<'a>,
    /// Where the operands are.
    bases: [Value; 2],
    /// How operands and result are stored.
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

impl Product<'_> {
    fn new(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions) -> Option<Self> {
        let data = graph.node(node);
        let out = data.outputs[0];
        let storage = storage(graph.dtype(out))?;
        if graph.ty(out).numel() == 0 {
            return None;
        }
        let layouts = &options.layouts;
        let (wa, wb) = (
            window(graph, layouts, data.inputs[0], &kernel.reads),
            window(graph, layouts, data.inputs[1], &kernel.reads),
        );
        let (a, b) = (side(graph, data, 0, &wa)?, side(graph, data, 1, &wb)?);
        Some(Self {
            batch: a.batch.iter().map(|&(extent, _)| extent).product(),
            m: a.free.0,
            n: b.free.0,
            k: a.depth.0,
            a: Operand::stored(
                storage,
                &pointer("left", wa.offset),
                &a.batch,
                a.free.1,
                a.depth.1,
            ),
            b: Operand::stored(
                storage,
                &pointer("right", wb.offset),
                &b.batch,
                b.free.1,
                b.depth.1,
            ),
            bases: [wa.base, wb.base],
            storage,
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

    /// The kernel, with parameters for the operands before `params`.
    fn emit(
        self,
        epilogue: Epilogue<'_>,
        params: Vec<Param>,
        options: &super::EmitOptions,
    ) -> kernels::Kernel {
        let Self { batch, m, n, k, .. } = self;
        let pointer = format!("const {} *", self.storage.ctype());
        let operands = ["left", "right"].map(|name| Param::new(pointer.clone(), name));
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
            params: operands.into_iter().chain(params).collect(),
            threads: options.threads,
        };
        gemm::emit(spec, options.isa)
    }
}

fn product(graph: &Graph, kernel: &Kernel, node: Node, options: &super::EmitOptions) -> Option<Call> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let out = data.outputs[0];
    let product = Product::new(graph, kernel, node, options)?;
    let strides = strides(graph.shape(out), options.layouts.get(&out));
    let (batch, rows, cols) = product_strides(graph, out, dims, &strides)?;
    let arguments = [product.bases[0], product.bases[1], out]
        .map(|value| Argument::Buffer(Buffer::Value(value)))
        .to_vec();
    let storage = product.storage;
    let epilogue = Epilogue::store_as(storage, "out", &batch, rows.1, cols.1);
    let out_param = Param::new(format!("{} *", storage.ctype()), "out");
    let made = product.emit(epilogue, vec![out_param], options);
    Some(Call::Kernel {
        kernel: Box::new(made),
        arguments,
    })
}

/// The calls for the contraction `node` followed by `nest`, and their scratch memory.
///
/// # Panics
/// Never for kernels of the scheduler: it asks [`epilogue::fits`] and [`epilogue::has_template`] first.
pub fn with_epilogue(
    graph: &Graph,
    kernel: &Kernel,
    node: Node,
    nest: &Nest,
    options: &super::EmitOptions,
) -> Option<KernelCode> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let value = data.outputs[0];
    let mut product = Product::new(graph, kernel, node, options)?;
    let placed = Frame::product(graph, value, dims).place(graph, nest, value, nest.maps.get(&value)?);
    let vector = epilogue::vector_variable(graph, &placed, value, &[COL, ROW])
        // What joined later may be uneven; it is then read element by element.
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
    let statements = nest::epilogue::generate(graph, &placed, value, &loops);
    let place = format!("const int64_t i{BATCH} = batch, i{row} = i;\n");
    let column = format!("const int64_t i{vector} = j;\n");
    let code = TileCode {
        tile: statements.tile,
        row: format!("{place}{}", statements.row),
        vector: format!("{column}{}", statements.vector),
        rest: format!("{column}{}", statements.rest),
    };
    let bases = product.bases.map(|value| Argument::Buffer(Buffer::Value(value)));
    let made = product.emit(Epilogue::tiles(code), statements.params, options);
    let scratch = made.workspace_bytes;
    let call = Call::Kernel {
        kernel: Box::new(made),
        arguments: bases.into_iter().chain(statements.arguments).collect(),
    };
    Some(KernelCode {
        calls: vec![call],
        scratch,
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
