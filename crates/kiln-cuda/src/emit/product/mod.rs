//! Products of matrices.
//!
//! Operands are strided windows on stored values, so transposes, slices, head splits and repeated heads cost
//! nothing. A product is described by its dimensions. Each has a distance between neighbours, in elements, in
//! the left operand, the right one and the result (zero where it does not occur):
//!
//! ```text
//! dimensions   left  right  result
//! batch         x      x      x
//! rows          x             x
//! columns              x      x
//! depth         x      x
//! ```
//!
//! [`matrices`] turns this into the matrices that cuBLASLt takes, and [`padded`] pads their extents where
//! that pays. `pieces` are products that read an operand in pieces. [`warpgroups`] offers a template of
//! Kiln's own for those of 16 bits, alone and with a nest behind them. [`tiles`] computes all other products:
//! of integers, of windows that no matrix describes, and those whose results are single numbers.

mod case;
mod matrices;
pub mod padded;
mod pieces;
mod tiles;
pub mod warpgroups;

use kiln_compiler::schedule::Kernel;
use kiln_compiler::schedule::access::window;
use kiln_compiler::schedule::layout::{Layouts, strides};
use kiln_graph::op::{DotDims, Op, ReduceOp};
use kiln_graph::{DType, Graph, Node, Value};

use self::pieces::Pieces;
use super::{Call, EmitOptions, KernelCode, ProductCall, expressions, library};

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    if graph.ty(graph.node(node).outputs[0]).numel() == 0 {
        return Some(KernelCode::default());
    }
    if let Some(pieces) = Pieces::new(graph, kernel, node, options.layouts) {
        return Some(pieces::generate(graph, &pieces, options));
    }
    let frame = Frame::new(graph, kernel, node, options.layouts)?;
    Some(code(graph, &frame, options))
}

/// The code of a product whose operands are whole.
fn code(graph: &Graph, frame: &Frame, options: &EmitOptions<'_>) -> KernelCode {
    if frame.extent(&frame.depth) == 0 {
        let zero = expressions::neutral(ReduceOp::Sum, frame.result_dtype);
        return KernelCode::launches([library::fill(graph, frame.result.0, &zero)]);
    }
    if !frame.is_single_numbers()
        && let Some(mut calls) = matrices::calls(frame, options.tf32)
    {
        if calls.len() == 1
            && let Some(call) = calls.pop()
        {
            let mut code = padded::calls(call, options.padding);
            if let [Call::Product(call)] = &code.calls[..] {
                code.calls = vec![warpgroups::offered(ProductCall::clone(call), options)];
            }
            return code;
        }
        let scratch = calls.iter().map(|call| call.workspace).max().unwrap_or(0);
        return KernelCode {
            calls: calls
                .into_iter()
                .map(|call| Call::Product(Box::new(call)))
                .collect(),
            scratch,
        };
    }
    KernelCode::launches([tiles::launch(frame)])
}

/// A dimension of a product: its extent, and the elements between neighbours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Dim {
    extent: usize,
    left: i64,
    right: i64,
    result: i64,
}

impl Dim {
    /// No dimension: one element.
    const ONE: Self = Self {
        extent: 1,
        left: 0,
        right: 0,
        result: 0,
    };

    /// The same dimension of the transposed product.
    fn exchanged(self) -> Self {
        Self {
            left: self.right,
            right: self.left,
            ..self
        }
    }
}

/// Joins dimensions that are evenly spaced in all tensors; returns the dimensions outermost first, without
/// those of one element.
fn joined(mut dims: Vec<Dim>) -> Vec<Dim> {
    dims.retain(|dim| dim.extent != 1);
    // The order in which elements are visited or summed is free.
    dims.sort_by_key(|dim| std::cmp::Reverse((dim.result.abs(), dim.left.abs(), dim.right.abs())));
    let mut out: Vec<Dim> = Vec::new();
    for dim in dims {
        let inner = dim.extent as i64;
        match out.last_mut() {
            Some(outer)
                if outer.left == dim.left * inner
                    && outer.right == dim.right * inner
                    && outer.result == dim.result * inner =>
            {
                outer.extent *= dim.extent;
                (outer.left, outer.right, outer.result) = (dim.left, dim.right, dim.result);
            }
            _ => out.push(dim),
        }
    }
    out
}

/// A product as its dimensions.
#[derive(Clone, Debug)]
struct Frame {
    /// Element type of the operands.
    dtype: DType,
    /// Element type of the result.
    result_dtype: DType,
    /// The left operand's buffer, and the elements in front of its first.
    left: (Value, i64),
    /// The right operand's.
    right: (Value, i64),
    /// The result's buffer, and the elements in front of its first.
    result: (Value, i64),
    batch: Vec<Dim>,
    rows: Vec<Dim>,
    columns: Vec<Dim>,
    depth: Vec<Dim>,
}

impl Frame {
    fn new(graph: &Graph, kernel: &Kernel, node: Node, layouts: &Layouts) -> Option<Self> {
        let data = graph.node(node);
        Self::of(graph, kernel, node, layouts, [data.inputs[0], data.inputs[1]])
    }

    /// The product of `a` and `b`, which are the operands of `node` or pieces of them, at the start of its
    /// result.
    fn of(graph: &Graph, kernel: &Kernel, node: Node, layouts: &Layouts, [a, b]: [Value; 2]) -> Option<Self> {
        let data = graph.node(node);
        let Op::DotGeneral(dims) = &data.op else {
            return None;
        };
        let out = data.outputs[0];
        let left = window(graph, layouts, a, &kernel.reads);
        let right = window(graph, layouts, b, &kernel.reads);
        let result = strides(graph.shape(out), layouts.get(&out));
        let (a, b) = (graph.shape(a), graph.shape(b));
        let batch = dims.a_batch.iter().zip(&dims.b_batch).enumerate();
        let batch: Vec<Dim> = batch
            .map(|(at, (&i, &j))| Dim {
                extent: a[i],
                left: left.strides[i],
                right: right.strides[j],
                result: result[at],
            })
            .collect();
        let free = DotDims::free(a.rank(), &dims.a_batch, &dims.a_contract);
        let rows: Vec<Dim> = free
            .iter()
            .zip(&result[batch.len()..])
            .map(|(&i, &result)| Dim {
                extent: a[i],
                left: left.strides[i],
                right: 0,
                result,
            })
            .collect();
        let free = DotDims::free(b.rank(), &dims.b_batch, &dims.b_contract);
        let columns = free.iter().zip(&result[batch.len() + rows.len()..]);
        let columns = columns.map(|(&j, &result)| Dim {
            extent: b[j],
            left: 0,
            right: right.strides[j],
            result,
        });
        let depth = dims.a_contract.iter().zip(&dims.b_contract).map(|(&i, &j)| Dim {
            extent: a[i],
            left: left.strides[i],
            right: right.strides[j],
            result: 0,
        });
        Some(Self {
            dtype: graph.dtype(data.inputs[0]),
            result_dtype: graph.dtype(out),
            left: (left.base, left.offset),
            right: (right.base, right.offset),
            result: (out, 0),
            columns: joined(columns.collect()),
            depth: joined(depth.collect()),
            batch: joined(batch),
            rows: joined(rows),
        })
    }

    fn extent(&self, dims: &[Dim]) -> usize {
        dims.iter().map(|dim| dim.extent).product()
    }

    /// Whether the product multiplies many pairs of vectors, each pair giving one number: the library's
    /// tiles would be mostly empty.
    fn is_single_numbers(&self) -> bool {
        self.rows.is_empty() && self.columns.is_empty() && self.extent(&self.batch) >= 32
    }
}
