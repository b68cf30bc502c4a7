//! Working memory in which elements of 16 bits are added up.
//!
//! Operations that write where indices say read an element again for each update of it. In a result of 16
//! bits each of these steps would round, and a sum of ones would end where the next one is lost. Their
//! iterations have a piece of the result each, a line or some columns, so a piece is computed in f32 and
//! rounded once, when it is stored.

use kiln_graph::op::{Op, ScatterMode};
use kiln_graph::{DType, Graph, Node};

use super::{Text, Writer};
use crate::emit::nest::Argument;
use crate::kernels::pieces::Pieces;

/// Neighbouring columns of an iteration of `index_put`, so that a row of an update is read in whole cache
/// lines.
pub(super) fn columns(dtype: DType, inner: usize) -> usize {
    inner.clamp(1, if is_half(dtype) { 32 } else { 64 })
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// The pieces of a result.
#[derive(Clone, Copy)]
pub(super) struct Sums(Pieces);

impl Sums {
    /// What the plain loops of `node` add up in f32, on at most `threads` threads; none if each step may be
    /// stored.
    pub fn of(graph: &Graph, node: Node, threads: usize) -> Option<Self> {
        let data = graph.node(node);
        let out = *data.outputs.first()?;
        let shape = graph.shape(out).dims();
        let multiplies = |mode: ScatterMode| matches!(mode, ScatterMode::Add | ScatterMode::Mul);
        let count: usize = shape.iter().product();
        if !is_half(graph.dtype(out)) || count == 0 {
            return None;
        }
        let (elements, iterations) = match data.op {
            Op::Scatter { axis, mode } if multiplies(mode) => (shape[axis], count / shape[axis]),
            Op::IndexPut { axis, mode } if multiplies(mode) => {
                let inner: usize = shape[axis + 1..].iter().product();
                let outer: usize = shape[..axis].iter().product();
                let block = columns(graph.dtype(out), inner);
                (shape[axis] * block, outer * inner.div_ceil(block))
            }
            Op::MaxPoolGrad { .. } => {
                let planes = shape[0] * shape[1];
                (count / planes, planes)
            }
            _ => return None,
        };
        let bytes = elements * size_of::<f32>();
        Some(Self(Pieces::new(bytes, iterations, threads)))
    }

    /// Bytes of working memory.
    pub fn scratch(&self) -> usize {
        self.0.total()
    }

    /// Adds the argument for the working memory; the statement that declares the piece of an iteration,
    /// `sums`.
    pub fn declared(&self, w: &mut Writer) -> String {
        let at = w.arguments.len();
        w.arguments.push(Argument::Scratch(0));
        let piece = self.0.at("i");
        format!("float *sums = (float *)((char *)b[{at}] + {piece});")
    }
}

/// Where an operation combines updates with what a result has.
pub(super) struct Place<'a> {
    /// C of an element of the result.
    pub out: &'a str,
    /// C of the place of the same element among the sums.
    pub sum: &'a str,
}

impl Place<'_> {
    /// C of the element as it is.
    pub fn get(&self, dtype: DType, sums: Option<&String>) -> String {
        match sums {
            Some(_) => format!("sums[{}]", self.sum),
            None => format!("get_{dtype}(out0 + {})", self.out),
        }
    }

    /// The statement that makes the element `value`.
    pub fn put(&self, dtype: DType, sums: Option<&String>, value: &str) -> String {
        match sums {
            Some(_) => format!("sums[{}] = {value};", self.sum),
            None => format!("put_{dtype}(out0 + {}, {value});", self.out),
        }
    }

    /// Stores the sum of the element, which is rounded here.
    pub fn store(&self, t: &mut Text, dtype: DType) {
        t.line(format!("put_{dtype}(out0 + {}, sums[{}]);", self.out, self.sum));
    }
}
