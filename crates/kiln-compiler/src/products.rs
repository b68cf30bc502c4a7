//! Products as one: those that share an operand, and those that are added up.
//!
//! The projections to queries, keys and values read the same rows, and so do the gradients of their weights.
//! The gradient of those rows is a sum of three products. Each alone is small for a large device: it ends
//! before all of it is at work, and the terms of a sum pass through memory. As one product they do not:
//!
//! ```text
//!   q = dot_general x, wq                  w = concat wq, wk, wv
//!   k = dot_general x, wk            ──►   y = dot_general x, w
//!   v = dot_general x, wv                  q = slice y ; k = slice y ; v = slice y
//!
//!   a = dot_general p, u                   l = concat p, q ; r = concat u, v
//!   b = dot_general q, v             ──►   s = dot_general l, r
//!   s = add a, b
//! ```
//!
//! These concatenations are never made: a target that asks for this ([`Policy::product_piece`]) has products
//! that read an operand in pieces ([`Cut`]). The pass runs after the partition, which knows each product by
//! itself, and a scheduler that cannot read the pieces where they are stored makes the concatenation after
//! all. Either way the graph says what is computed.
//!
//! Biases that are added to such products are one, too: a nest behind the product adds it.
//!
//! A sum of products of bf16 is rounded once, and not once for each term.

//!
//! `search` finds the products, `write` writes the graph.

mod search;
mod write;

use kiln_graph::op::{DotDims, Op};
use kiln_graph::{Graph, Node, NodeData, TypeError, Value};

use crate::options::Options;
use crate::policy::Policy;
use search::Search;
use write::Writer;

/// Along which dimension a product's operands come in pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// The left operand, along its rows.
    Rows,
    /// The right operand, along its columns.
    Columns,
    /// Both, along what is summed.
    Depth,
}

/// The most matrices that a product with an operand in pieces reads in pieces: each is 128 bytes of the
/// arguments of a kernel, of which all together have 4 KiB.
const MOST_MATRICES: usize = 24;

impl Cut {
    /// The most pieces of an operand that is read in pieces.
    pub fn most_pieces(self) -> usize {
        match self {
            Cut::Rows | Cut::Columns => MOST_MATRICES,
            Cut::Depth => MOST_MATRICES / 2,
        }
    }
}

/// The dimension along which the operands of `node` are concatenations, and no others, as this pass makes
/// them.
pub fn cut(graph: &Graph, node: Node) -> Option<Cut> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let [left, right] = data.inputs[..] else {
        return None;
    };
    let axis = |value: Value| match graph.def(value).op {
        Op::Concat { axis } => Some(axis),
        _ => None,
    };
    let extents = |value: Value, axis: usize| -> Vec<usize> {
        let pieces = graph.def(value).inputs.iter();
        pieces.map(|&piece| graph.shape(piece)[axis]).collect()
    };
    match (axis(left), axis(right)) {
        (Some(a), Some(b)) => {
            let is_depth = dims.a_contract[..] == [a] && dims.b_contract[..] == [b];
            (is_depth && extents(left, a) == extents(right, b)).then_some(Cut::Depth)
        }
        (Some(axis), None) => (free(graph, dims, left, 0)? == axis).then_some(Cut::Rows),
        (None, Some(axis)) => (free(graph, dims, right, 1)? == axis).then_some(Cut::Columns),
        (None, None) => None,
    }
}

/// [`cut`], if the product reads the pieces where they are stored: of types, sizes and extents that a target
/// with such products takes, and not too many.
pub fn read_in_pieces(graph: &Graph, policy: &Policy, node: Node) -> Option<Cut> {
    let unit = policy.product_piece?;
    let cut = cut(graph, node)?;
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let (side, unit) = match cut {
        Cut::Rows => (0, unit),
        Cut::Columns => (1, unit),
        Cut::Depth => (0, policy.epilogue_unit),
    };
    let whole = data.inputs[side];
    let axis = match cut {
        Cut::Depth => dims.a_contract[0],
        _ => free(graph, dims, whole, side)?,
    };
    let mut pieces = graph.def(whole).inputs.iter();
    let fits = dims.a_batch.is_empty()
        && pieces.len() <= cut.most_pieces()
        && data
            .inputs
            .iter()
            .all(|&value| policy.epilogue_types.contains(&graph.dtype(value)))
        && graph.ty(data.outputs[0]).numel() >= policy.epilogue_elements.max(1)
        && pieces.all(|&piece| graph.shape(piece)[axis] > 0 && graph.shape(piece)[axis].is_multiple_of(unit));
    fits.then_some(cut)
}

/// Whether `data` is a convolution of single pixels, each in its own place, or the gradient of such a
/// convolution's input: a product of all pixels by the weight.
pub fn is_of_pixels(graph: &Graph, data: &NodeData) -> bool {
    let (Op::Conv(conv) | Op::ConvInputGrad { conv, .. }) = &data.op else {
        return false;
    };
    let mut pads = conv.pad_low.iter().chain(&conv.pad_high);
    conv.groups == 1
        && conv.stride.iter().all(|&stride| stride == 1)
        && pads.all(|&pad| pad == 0)
        && data.op.is_pixelwise(graph.shape(data.inputs[1]))
}

/// Whether `data` is any other convolution of images of two dimensions or one, without groups, or the
/// gradient of the input of one without strides, and the image that it reads has a multiple of `unit`
/// channels: a product of the image's windows by the weight.
pub fn is_of_windows(graph: &Graph, data: &NodeData, unit: usize) -> bool {
    let conv = match &data.op {
        Op::Conv(conv) => conv,
        Op::ConvInputGrad { conv, .. } if conv.stride.iter().all(|&stride| stride == 1) => conv,
        _ => return false,
    };
    conv.groups == 1
        && (1..=2).contains(&conv.stride.len())
        && graph.shape(data.inputs[0])[1].is_multiple_of(unit)
        && !is_of_pixels(graph, data)
}

/// The stored values, and windows on such, that operand `operand` of a product consists of.
pub fn pieces(graph: &Graph, node: Node, cut: Option<Cut>, operand: usize) -> &[Value] {
    let inputs = &graph.node(node).inputs;
    let is_cut = match cut {
        Some(Cut::Depth) => operand < 2,
        Some(Cut::Rows) => operand == 0,
        Some(Cut::Columns) => operand == 1,
        None => false,
    };
    match is_cut {
        true => &graph.def(inputs[operand]).inputs,
        false => std::slice::from_ref(&inputs[operand]),
    }
}

/// The dimension of an operand that is neither batch nor summed, if there is exactly one.
fn free(graph: &Graph, dims: &DotDims, operand: Value, side: usize) -> Option<usize> {
    let (batch, contract) = dims.of(side);
    match DotDims::free(graph.shape(operand).rank(), batch, contract)[..] {
        [axis] => Some(axis),
        _ => None,
    }
}

/// Joins the products of `graph` where `policy` asks for it, and `options` allow it; none if there is nothing
/// to join.
///
/// # Errors
/// Only if it makes an ill-typed node, which would be a bug.
pub fn join(graph: &Graph, options: &Options, policy: &Policy) -> Result<Option<Graph>, TypeError> {
    let Some(piece) = policy.product_piece.filter(|_| options.transform && options.fuse) else {
        return Ok(None);
    };
    let mut search = Search::new(graph, policy, piece);
    let mut groups = search.sums();
    groups.extend(search.shared());
    if groups.is_empty() {
        return Ok(None);
    }
    // Products that do not need each other may do so through others that become one. Then one stays as it is.
    loop {
        match Writer::new(graph, &groups).write()? {
            Ok(joined) => return Ok(Some(joined)),
            Err(group) => drop(groups.remove(group)),
        }
    }
}

/// Products that become one.
enum Group {
    /// Terms of the sum `root`.
    Sum {
        root: Node,
        products: Vec<Node>,
        /// The dimensions of both operands that are summed.
        axes: [usize; 2],
        /// What is between the first product and the sum, from the product on, as between the others.
        between: Vec<Node>,
        /// What is added besides.
        rest: Vec<Value>,
    },
    /// Products that share an operand.
    Shared {
        products: Vec<Node>,
        /// The operand that they do not share: `Rows` or `Columns`.
        cut: Cut,
        /// The dimension of that operand along which it is a piece.
        axis: usize,
        /// What adds a bias to each, if something does.
        biased: Vec<Biased>,
    },
}

/// What adds a bias to a product: operations that nothing else reads the operands of.
#[derive(Clone)]
struct Biased {
    /// From the product on: casts, and one addition.
    nodes: Vec<Node>,
    /// The bias, a number for each column.
    bias: Value,
}

impl Biased {
    /// The product with its bias.
    fn result(&self, graph: &Graph) -> Value {
        graph.node(self.nodes[self.nodes.len() - 1]).outputs[0]
    }
}
