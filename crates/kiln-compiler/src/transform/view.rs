//! Values seen through transposes, and products of them in one normal form.
//!
//! Programs transpose operands before products, and simplification joins such transposes with those that
//! make heads. Whether two operands are the same matrix therefore depends on their views: the value behind
//! the transposes, and the order of its dimensions.

use kiln_graph::op::{Dims, DotDims, Op};
use kiln_graph::{Graph, Node, Value};

/// A value behind transposes: dimension `i` of the view is dimension `order[i]` of `base`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    /// The value behind all transposes.
    pub base: Value,
    /// Dimensions of `base`.
    pub order: Dims,
}

impl View {
    /// The view that `value` is.
    pub fn of(graph: &Graph, value: Value) -> Self {
        let mut view = Self {
            base: value,
            order: (0..graph.shape(value).rank()).collect(),
        };
        while let Op::Transpose(perm) = &graph.def(view.base).op {
            view.order = view.order.iter().map(|&axis| perm[axis]).collect();
            view.base = graph.def(view.base).inputs[0];
        }
        view
    }

    /// With dimensions in another order: dimension `i` of the result is dimension `order[i]` of this.
    pub fn permuted(&self, order: &[usize]) -> Self {
        Self {
            base: self.base,
            order: order.iter().map(|&axis| self.order[axis]).collect(),
        }
    }

    /// With the last two dimensions exchanged.
    pub fn transposed(&self) -> Self {
        let mut out = self.clone();
        let rank = out.order.len();
        out.order.swap(rank - 2, rank - 1);
        out
    }
}

/// A product `[b, h, m, k] x [b, h, k, n] -> [b, h, m, n]`.
#[derive(Clone, Debug)]
pub struct Matmul {
    /// Its left operand, `[b, h, m, k]`.
    pub left: View,
    /// Its right operand, `[b, h, k, n]`.
    pub right: View,
    /// The result.
    pub out: Value,
}

/// `node` as a product with two batch dimensions and a result of its operands' type, if it is one.
pub fn matmul(graph: &Graph, node: Node) -> Option<Matmul> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    if dims.a_batch.len() != 2 || dims.a_contract.len() != 1 || dims.result.is_some() {
        return None;
    }
    let operand = |at: usize, batch: &Dims, contract: &Dims, free_first: bool| {
        let free = DotDims::free(graph.shape(data.inputs[at]).rank(), batch, contract);
        let &[free] = free.as_slice() else { return None };
        let last = if free_first {
            [free, contract[0]]
        } else {
            [contract[0], free]
        };
        let order = [batch[0], batch[1], last[0], last[1]];
        Some(View::of(graph, data.inputs[at]).permuted(&order))
    };
    Some(Matmul {
        left: operand(0, &dims.a_batch, &dims.a_contract, true)?,
        right: operand(1, &dims.b_batch, &dims.b_contract, false)?,
        out: data.outputs[0],
    })
}
