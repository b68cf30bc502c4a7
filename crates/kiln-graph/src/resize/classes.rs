//! Extents that are equal in every graph that the program could record.

use std::collections::HashMap;

use super::Dimension;
use crate::op::{ConvDims, Dims, DotDims, Op};
use crate::{Graph, Node, NodeData, Value};

/// The classes of a graph's extents.
#[derive(Debug)]
pub(super) struct Classes {
    /// Number of the first extent of each value.
    first: Vec<usize>,
    /// The class of each extent: the number of one of its members.
    class: Vec<usize>,
    /// For each class: the dimension of an argument that keeps its size.
    pub fixed: Vec<Option<Dimension>>,
    /// Whether a value depends on an argument that varies.
    varying: Vec<bool>,
}

impl Classes {
    pub fn new(graph: &Graph, varies: &[bool]) -> Self {
        let mut first = Vec::with_capacity(graph.num_values());
        let mut count = 0;
        for (_, data) in graph.values() {
            first.push(count);
            count += data.ty.shape.rank();
        }
        let mut classes = Self {
            first,
            class: (0..count).collect(),
            fixed: vec![None; count],
            varying: varying(graph, varies),
        };
        let forward = Forward::of(graph);
        for (node, data) in graph.nodes() {
            classes.join_node(graph, node, data, &forward);
        }
        (0..count).for_each(|extent| classes.class[extent] = classes.root(extent));
        for (parameter, &value) in graph.parameters().iter().enumerate() {
            if varies.get(parameter).copied().unwrap_or(true) {
                continue;
            }
            for axis in 0..graph.shape(value).rank() {
                let class = classes.of(value, axis);
                classes.fixed[class].get_or_insert(Dimension {
                    parameter: parameter as u32,
                    axis,
                });
            }
        }
        classes
    }

    /// The class of dimension `axis` of `value`.
    pub fn of(&self, value: Value, axis: usize) -> usize {
        self.class[self.first[value.as_u32() as usize] + axis]
    }

    /// Number of extents, which is above the number of every class.
    pub fn len(&self) -> usize {
        self.class.len()
    }

    /// Whether `value` depends on an argument that varies.
    pub fn varies(&self, value: Value) -> bool {
        self.varying[value.as_u32() as usize]
    }

    fn root(&self, mut extent: usize) -> usize {
        while self.class[extent] != extent {
            extent = self.class[extent];
        }
        extent
    }

    fn join(&mut self, (a, axis_a): (Value, usize), (b, axis_b): (Value, usize)) {
        let a = self.root(self.first[a.as_u32() as usize] + axis_a);
        let b = self.root(self.first[b.as_u32() as usize] + axis_b);
        let (low, high) = (a.min(b), a.max(b));
        self.class[high] = low;
    }

    /// All dimensions of values of one rank, but for those in `except`.
    fn join_all(&mut self, graph: &Graph, values: &[Value], except: &[usize]) {
        let Some((&one, others)) = values.split_first() else {
            return;
        };
        let rank = graph.shape(one).rank();
        for &other in others.iter().filter(|&&other| graph.shape(other).rank() == rank) {
            let axes = (0..rank).filter(|axis| !except.contains(axis));
            axes.for_each(|axis| self.join((one, axis), (other, axis)));
        }
    }

    fn join_node(&mut self, graph: &Graph, node: Node, data: &NodeData, forward: &Forward) {
        let (inputs, outputs) = (&data.inputs, &data.outputs);
        let all = || -> Vec<Value> { inputs.iter().chain(outputs).copied().collect() };
        match &data.op {
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => {
                self.join_all(graph, &all(), &[]);
            }
            Op::Cumulative { .. } | Op::Flip(_) | Op::Sort { .. } => self.join_all(graph, &all(), &[]),
            Op::Reduce { axes, .. } => self.join_without(graph, data, axes),
            Op::ArgReduce { axis, .. } => self.join_without(graph, data, &Dims::from_slice(&[*axis])),
            Op::Transpose(permutation) => {
                for (to, &from) in permutation.iter().enumerate() {
                    self.join((inputs[0], from), (outputs[0], to));
                }
            }
            Op::Broadcast { shape, dims } => {
                let x = graph.shape(inputs[0]);
                for (from, &to) in dims
                    .iter()
                    .enumerate()
                    .filter(|&(from, &to)| x[from] == shape[to])
                {
                    self.join((inputs[0], from), (outputs[0], to));
                }
            }
            Op::Slice { .. } | Op::UpdateSlice { .. } | Op::Pad { .. } => self.join_parts(graph, data),
            Op::Concat { axis } => self.join_all(graph, &all(), &[*axis]),
            Op::TopK { axis, k, .. } => {
                let whole = graph.shape(inputs[0])[*axis] == *k;
                self.join_all(graph, outputs, &[]);
                self.join_all(
                    graph,
                    &all(),
                    if whole { &[] } else { std::slice::from_ref(axis) },
                );
            }
            Op::Gather { axis } => {
                self.join_all(graph, &[inputs[1], outputs[0]], &[]);
                self.join_equal(graph, inputs[0], inputs[1], *axis);
            }
            Op::Scatter { axis, .. } => {
                self.join_all(graph, &[inputs[0], outputs[0]], &[]);
                self.join_all(graph, &[inputs[1], inputs[2]], &[]);
                self.join_equal(graph, inputs[0], inputs[1], *axis);
            }
            Op::IndexSelect { axis } => {
                self.join_all(graph, &[inputs[0], outputs[0]], &[*axis]);
                self.join((inputs[1], 0), (outputs[0], *axis));
            }
            Op::IndexPut { axis, .. } => {
                self.join_all(graph, &[inputs[0], outputs[0]], &[]);
                self.join_all(graph, &[inputs[0], inputs[2]], &[*axis]);
                self.join((inputs[1], 0), (inputs[2], *axis));
            }
            Op::Reshape(_) => {
                for (from, to) in groups(graph.shape(inputs[0]).dims(), graph.shape(outputs[0]).dims()) {
                    if let ([from], [to]) = (&*from, &*to) {
                        self.join((inputs[0], *from), (outputs[0], *to));
                    }
                }
            }
            Op::DotGeneral(dims) => self.join_product(graph, data, dims),
            Op::Collective(_) | Op::CollectiveWait => {
                for (&from, &to) in inputs.iter().zip(outputs) {
                    self.join_all(graph, &[from, to], &[]);
                }
            }
            Op::Attention(_) | Op::AttentionGrad(_) => self.join_attention(data),
            _ => self.join_images(graph, node, data, forward),
        }
    }

    /// The dimensions that stay when `axes` go.
    fn join_without(&mut self, graph: &Graph, data: &NodeData, axes: &Dims) {
        let rank = graph.shape(data.inputs[0]).rank();
        for (to, from) in (0..rank).filter(|axis| !axes.contains(axis)).enumerate() {
            self.join((data.inputs[0], from), (data.outputs[0], to));
        }
    }

    /// Dimensions of two values but `axis` that have one extent.
    fn join_equal(&mut self, graph: &Graph, a: Value, b: Value, axis: usize) {
        let (of_a, of_b) = (graph.shape(a), graph.shape(b));
        for other in (0..of_a.rank()).filter(|&other| other != axis && of_a[other] == of_b[other]) {
            self.join((a, other), (b, other));
        }
    }

    /// Dimensions of which an operation takes the whole.
    fn join_parts(&mut self, graph: &Graph, data: &NodeData) {
        let x = data.inputs[0];
        let result = data.outputs[0];
        let shape = graph.shape(x);
        for axis in 0..shape.rank() {
            let whole = match &data.op {
                // A slice of a table of weights is as long as the program says, also where it is the whole
                // table.
                Op::Slice {
                    starts,
                    limits,
                    steps,
                } => self.varies(x) && (starts[axis], limits[axis], steps[axis]) == (0, shape[axis], 1),
                Op::Pad { low, high } => (low[axis], high[axis]) == (0, 0),
                Op::UpdateSlice { .. } => true,
                _ => false,
            };
            if whole {
                self.join((x, axis), (result, axis));
            }
            if let Op::UpdateSlice { starts, steps } = &data.op {
                let update = graph.shape(data.inputs[1])[axis];
                if update == shape[axis]
                    && (starts[axis], steps[axis]) == (0, 1)
                    && self.varies(data.inputs[1])
                {
                    self.join((x, axis), (data.inputs[1], axis));
                }
            }
        }
    }

    fn join_product(&mut self, graph: &Graph, data: &NodeData, dims: &DotDims) {
        let (a, b, result) = (data.inputs[0], data.inputs[1], data.outputs[0]);
        let pairs = dims.a_batch.iter().zip(&dims.b_batch);
        for (&i, &j) in pairs.chain(dims.a_contract.iter().zip(&dims.b_contract)) {
            self.join((a, i), (b, j));
        }
        let free_a = DotDims::free(graph.shape(a).rank(), &dims.a_batch, &dims.a_contract);
        let free_b = DotDims::free(graph.shape(b).rank(), &dims.b_batch, &dims.b_contract);
        let of_a = dims.a_batch.iter().chain(&free_a).map(|&axis| (a, axis));
        let of_b = free_b.iter().map(|&axis| (b, axis));
        for (to, from) in of_a.chain(of_b).enumerate() {
            self.join(from, (result, to));
        }
    }

    /// Query `[batch, heads, length, width]`, key and value with a length of their own.
    fn join_attention(&mut self, data: &NodeData) {
        let (q, k, v) = (data.inputs[0], data.inputs[1], data.inputs[2]);
        self.join((q, 0), (k, 0));
        self.join((q, 3), (k, 3));
        (0..3).for_each(|axis| self.join((k, axis), (v, axis)));
        if let (Op::Attention(_), Some(&result)) = (&data.op, data.outputs.first()) {
            (0..3).for_each(|axis| self.join((q, axis), (result, axis)));
            self.join((v, 3), (result, 3));
        }
    }

    /// Convolutions and pooling: batch and channels, and images whose gradients are taken.
    fn join_images(&mut self, graph: &Graph, node: Node, data: &NodeData, forward: &Forward) {
        let (inputs, outputs) = (&data.inputs, &data.outputs);
        let channels = |conv: &ConvDims| conv.groups == 1;
        match &data.op {
            Op::Conv(conv) => {
                self.join((inputs[0], 0), (outputs[0], 0));
                self.join((inputs[1], 0), (outputs[0], 1));
                if channels(conv) {
                    self.join((inputs[0], 1), (inputs[1], 1));
                }
            }
            Op::ConvInputGrad { conv, .. } => {
                self.join((inputs[0], 0), (outputs[0], 0));
                self.join((inputs[0], 1), (inputs[1], 0));
                if channels(conv) {
                    self.join((inputs[1], 1), (outputs[0], 1));
                }
            }
            Op::ConvWeightGrad { conv, .. } => {
                self.join((inputs[0], 0), (inputs[1], 0));
                self.join((inputs[1], 1), (outputs[0], 0));
                if channels(conv) {
                    self.join((inputs[0], 1), (outputs[0], 1));
                }
            }
            Op::MaxPool(_) | Op::MaxPoolWithIndices { .. } | Op::AvgPool { .. } | Op::AvgPoolGrad { .. } => {
                self.join_all(graph, outputs, &[]);
                (0..2).for_each(|axis| self.join((inputs[0], axis), (outputs[0], axis)));
            }
            Op::MaxPoolGrad { .. } => {
                self.join_all(graph, inputs, &[]);
                (0..2).for_each(|axis| self.join((inputs[0], axis), (outputs[0], axis)));
            }
            _ => return,
        }
        if let Some(image) = forward.image_of(graph, node, data) {
            let spatial = 2..graph.shape(image).rank();
            spatial.for_each(|axis| self.join((image, axis), (outputs[0], axis)));
        }
    }
}

/// Whether each value depends on an argument that varies.
fn varying(graph: &Graph, varies: &[bool]) -> Vec<bool> {
    let mut all = vec![false; graph.num_values()];
    for (_, data) in graph.nodes() {
        let varying = match &data.op {
            Op::Parameter { index, .. } => varies.get(*index as usize).copied().unwrap_or(true),
            _ => data.inputs.iter().any(|input| all[input.as_u32() as usize]),
        };
        let outputs = data.outputs.iter();
        outputs.for_each(|output| all[output.as_u32() as usize] = varying);
    }
    all
}

/// The operations of the forward pass whose gradients keep the extents of the image as a number.
struct Forward {
    /// Convolutions, by weight.
    convolutions: HashMap<Value, Vec<Node>>,
    pools: Vec<Node>,
}

impl Forward {
    fn of(graph: &Graph) -> Self {
        let mut convolutions: HashMap<Value, Vec<Node>> = HashMap::new();
        let mut pools = Vec::new();
        for (node, data) in graph.nodes() {
            match &data.op {
                Op::Conv(_) => convolutions.entry(data.inputs[1]).or_default().push(node),
                Op::AvgPool { .. } => pools.push(node),
                _ => {}
            }
        }
        Self { convolutions, pools }
    }

    /// The image that `node` is the gradient of.
    fn image_of(&self, graph: &Graph, node: Node, data: &NodeData) -> Option<Value> {
        let fits = |node: &&Node, input: &Dims| {
            let forward = graph.node(**node);
            graph.shape(forward.outputs[0]) == graph.shape(data.inputs[0])
                && graph.shape(forward.inputs[0]).dims()[2..] == input[..]
        };
        let found = match &data.op {
            Op::ConvInputGrad { input, .. } => {
                let all = self.convolutions.get(&data.inputs[1])?;
                all.iter().find(|node| fits(node, input))
            }
            Op::AvgPoolGrad { input, .. } => self
                .pools
                .iter()
                .filter(|&&pool| pool < node)
                .find(|node| fits(node, input)),
            Op::MaxPoolGrad { .. } => {
                let indices = graph.def(data.inputs[1]);
                let is_pool = matches!(indices.op, Op::MaxPoolWithIndices { .. });
                return is_pool.then(|| indices.inputs[0]);
            }
            _ => None,
        };
        found.map(|&node| graph.node(node).inputs[0])
    }
}

/// The smallest runs of dimensions with equal products, by which a reshape can be told apart; dimensions of
/// extent 1 are in none. Nothing if an extent is 0.
pub(super) fn groups(from: &[usize], to: &[usize]) -> Vec<(Vec<usize>, Vec<usize>)> {
    let mut groups = Vec::new();
    if from.contains(&0) || to.contains(&0) {
        return groups;
    }
    let all = |dims: &[usize]| -> Vec<usize> { (0..dims.len()).filter(|&axis| dims[axis] > 1).collect() };
    let (all_from, all_to) = (all(from), all(to));
    let (mut next_from, mut next_to) = (all_from.iter(), all_to.iter());
    while let (Some(&i), Some(&j)) = (next_from.next(), next_to.next()) {
        let (mut one, mut other) = (vec![i], vec![j]);
        let (mut product, mut wanted) = (from[i], to[j]);
        while product != wanted {
            let (next, list, dims, total) = match product < wanted {
                true => (&mut next_from, &mut one, from, &mut product),
                false => (&mut next_to, &mut other, to, &mut wanted),
            };
            let Some(&axis) = next.next() else { return groups };
            list.push(axis);
            *total *= dims[axis];
        }
        groups.push((one, other));
    }
    groups
}
