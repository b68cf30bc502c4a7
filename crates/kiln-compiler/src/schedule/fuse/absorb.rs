//! Which nests become prologues ([`Prologue`]) of the kernels that read their results.
//!
//! A nest may become a prologue under two conditions. The template must be the only reader of the operand.
//! And the nest must read memory evenly: along each loop of the template neighbours lie at one distance,
//! and along one of the loops they are vectors. A nest that computes other values as well stays for those;
//! the nest and the template then both read the same memory, and one tensor less is written.
//!
//! Products and convolutions of single pixels, which are products, read each element of an operand once.
//! Other convolutions have overlapping windows, and their tiles read some elements more than twice.
//! Computing these elements again was measured to cost what it saves, so such convolutions get no prologue.
//! Only cheap operations become prologues of convolutions, because some convolutions gather pixels one by
//! one, and only cheap operations are computed twice where the nest stays.

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_graph::op::{DotDims, Op};
use kiln_graph::{Graph, Node, NodeData, Value};

use super::section::Section;
use crate::index::{Index, Var};
use crate::policy::Policy;
use crate::schedule::access::{Strided, identity, operand_index, side, strided, vector_variable};
use crate::schedule::buffer::Buffer;
use crate::schedule::class::is_cheap;
use crate::schedule::kernel::{Kernel, KernelKind};
use crate::schedule::layout::{Layouts, position};
use crate::schedule::nest::Nest;
use crate::schedule::prologue::{IMAGE, Prologue};

/// Moves nests that only make an operand into the kernels that read it.
pub fn absorb(graph: &Graph, policy: &Policy, layouts: &Layouts, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let site = Site {
        graph,
        policy,
        layouts,
    };
    let mut readers: FxHashMap<Buffer, usize> = FxHashMap::default();
    let mut writers: FxHashMap<Buffer, Vec<usize>> = FxHashMap::default();
    for (number, kernel) in kernels.iter().enumerate() {
        kernel
            .reads
            .iter()
            .for_each(|&buffer| *readers.entry(buffer).or_default() += 1);
        for &buffer in &kernel.writes {
            writers.entry(buffer).or_default().push(number);
        }
    }
    let outputs: FxHashSet<Value> = graph.outputs.iter().map(|output| output.value).collect();
    let mut kernels: Vec<Option<Kernel>> = kernels.into_iter().map(Some).collect();
    for number in 0..kernels.len() {
        let Some(mut kernel) = kernels[number].take() else {
            continue;
        };
        for operand in 0..2 {
            let Some(made) = site.operand_of(&kernel, operand) else {
                continue;
            };
            let buffer = Buffer::Value(made);
            let [maker] = writers.get(&buffer).map_or(&[][..], Vec::as_slice) else {
                continue;
            };
            let alone = readers.get(&buffer) == Some(&1) && !outputs.contains(&made);
            let found = kernels[*maker].as_ref().filter(|_| alone);
            let Some(prologue) = found.and_then(|maker| site.fit(&kernel, operand, made, maker)) else {
                continue;
            };
            if let Some(maker) = &mut kernels[*maker] {
                give(graph, maker, &prologue);
            }
            take(&mut kernel, prologue);
        }
        kernels[number] = Some(kernel);
    }
    let makes_nothing =
        |kernel: &Kernel| matches!(kernel.kind, KernelKind::Nest(_)) && kernel.writes.is_empty();
    let left = kernels.into_iter().flatten();
    left.filter(|kernel| !makes_nothing(kernel)).collect()
}

/// Removes the value that `prologue` computes from `maker`, and the members that only this value needs.
fn give(graph: &Graph, maker: &mut Kernel, prologue: &Prologue) {
    let KernelKind::Nest(nest) = &mut maker.kind else {
        return;
    };
    nest.drop_store(prologue.value);
    maker
        .writes
        .retain(|&buffer| buffer != Buffer::Value(prologue.value));
    let left: Vec<Value> = nest.stores.iter().map(|store| store.value).collect();
    restrict(graph, nest, &left);
    maker.nodes = if nest.members.is_empty() {
        left.iter().map(|&value| graph.value(value).node).collect()
    } else {
        nest.members.clone()
    };
    let read = |buffer: &Buffer| {
        nest.uses
            .iter()
            .any(|(value, _)| Buffer::Value(*value) == *buffer)
    };
    maker.reads.retain(read);
}

/// Removes the members of `nest` that `values` do not need.
fn restrict(graph: &Graph, nest: &mut Nest, values: &[Value]) {
    let mut needed: FxHashSet<Value> = FxHashSet::default();
    let mut stack = values.to_vec();
    stack.extend(nest.integers.tensors());
    while let Some(value) = stack.pop() {
        if needed.insert(value) && nest.uses_of(value).is_empty() {
            stack.extend_from_slice(&graph.def(value).inputs);
        }
    }
    nest.members
        .retain(|&node| needed.contains(&graph.node(node).outputs[0]));
    nest.maps.retain(|value, _| needed.contains(value));
    nest.uses.retain(|(value, _)| needed.contains(value));
}

/// Makes `prologue` a part of `kernel`.
fn take(kernel: &mut Kernel, prologue: Prologue) {
    kernel.reads.retain(|&own| own != Buffer::Value(prologue.value));
    kernel
        .reads
        .extend(prologue.nest.uses.iter().map(|(value, _)| Buffer::Value(*value)));
    kernel.reads.sort_unstable();
    kernel.reads.dedup();
    kernel.nodes.splice(0..0, prologue.nest.members.iter().copied());
    kernel.prologues.push(prologue);
}

/// The step in which prologues are looked for.
#[derive(Clone, Copy)]
struct Site<'a> {
    graph: &'a Graph,
    policy: &'a Policy,
    layouts: &'a Layouts,
}

impl Site<'_> {
    /// The operation of a template that can compute its operands.
    fn template(&self, kernel: &Kernel) -> Option<Node> {
        let graph = self.graph;
        let (KernelKind::Library(node) | KernelKind::Contraction(node, _)) = kernel.kind else {
            return None;
        };
        let data = graph.node(node);
        let plain = data.inputs.iter().chain(&data.outputs).all(|&value| {
            self.policy.prologue_types.contains(&graph.dtype(value)) && graph.ty(value).numel() > 0
        });
        let kind = match &data.op {
            Op::DotGeneral(_) => true,
            Op::Conv(conv) | Op::ConvInputGrad { conv, .. } | Op::ConvWeightGrad { conv, .. } => {
                conv.groups == 1
                    && (1..=self.policy.convolution_dimensions).contains(&conv.stride.len())
                    && data.op.is_pixelwise(graph.shape(data.inputs[1]))
            }
            _ => false,
        };
        (plain && kind).then_some(node)
    }

    /// The stored value that `kernel`'s template reads as an operand that it could compute, if nothing else
    /// in the kernel reads it.
    fn operand_of(&self, kernel: &Kernel, operand: usize) -> Option<Value> {
        let Self { graph, layouts, .. } = *self;
        let data = graph.node(self.template(kernel)?);
        self.loops(data, operand)?;
        let stop = |value: Value| kernel.reads.contains(&Buffer::Value(value));
        let base = |at: usize| {
            let mut value = data.inputs[at];
            while !stop(value) {
                value = *graph.def(value).inputs.first()?;
            }
            Some(value)
        };
        let other = 1 - operand;
        let made = base(operand)?;
        let fits = |window: &Strided| {
            !matches!(data.op, Op::DotGeneral(_)) || side(graph, data, other, window).is_some()
        };
        let in_place = kernel.prologues.iter().any(|prologue| prologue.operand == other)
            || strided(graph, layouts, data.inputs[other], &stop).is_none_or(|window| fits(&window));
        let shared = base(other) == Some(made)
            || kernel.nests().iter().any(|nest| !nest.uses_of(made).is_empty())
            || kernel
                .prologues
                .iter()
                .any(|own| !own.nest.uses_of(made).is_empty());
        (in_place && !shared).then_some(made)
    }

    /// The axes of an operand that each loop of the template runs over; none for operands that are read as
    /// they lie.
    fn loops(&self, data: &NodeData, operand: usize) -> Option<Vec<Vec<usize>>> {
        let graph = self.graph;
        let shape = graph.shape(data.inputs[operand]);
        match &data.op {
            Op::DotGeneral(dims) => {
                let (batch, depth) = dims.of(operand);
                let free = DotDims::free(shape.rank(), batch, depth);
                Some(vec![batch.to_vec(), free.to_vec(), depth.to_vec()])
            }
            // The other operand is the weight.
            Op::Conv(_) | Op::ConvInputGrad { .. } if operand == 1 => None,
            Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => {
                let pixels: Vec<usize> = (0..shape.rank()).filter(|&axis| axis != 1).collect();
                let count: usize = pixels.iter().map(|&axis| shape[axis]).product();
                (count >= self.policy.prologue_pixels).then(|| vec![pixels, vec![1]])
            }
            _ => None,
        }
    }

    /// The part of `maker` that computes `made`, as the prologue of `kernel` for an operand, if it can be
    /// one.
    fn fit(&self, kernel: &Kernel, operand: usize, made: Value, maker: &Kernel) -> Option<Prologue> {
        let Self {
            graph,
            policy,
            layouts,
        } = *self;
        let node = self.template(kernel)?;
        let data = graph.node(node);
        let KernelKind::Nest(nest) = &maker.kind else {
            return None;
        };
        let mut stores = nest
            .stores
            .iter()
            .filter(|store| store.buffer == Buffer::Value(made));
        let (Some(store), None) = (stores.next(), stores.next()) else {
            return None;
        };
        if store.value != made || Section::of(graph, graph.value(made).node) != Section::of(graph, node) {
            return None;
        }
        let axes = self.loops(data, operand)?;
        let (index, found) = even_loads(graph, layouts, nest, data.inputs[operand], made, &axes)?;
        let once = matches!(data.op, Op::DotGeneral(_)) && nest.stores.len() == 1;
        let numel = graph.ty(made).numel();
        let mut streams: Vec<Value> = found.list.iter().map(|(value, _)| *value).collect();
        streams.retain(|&value| graph.ty(value).numel() == numel);
        streams.sort_unstable();
        streams.dedup();
        if !found.computes
            || !(found.cheap || once)
            || streams.is_empty()
            || streams.len() > policy.prologue_streams
        {
            return None;
        }
        let positions: Vec<Index> = found.list.iter().map(|(_, position)| position.clone()).collect();
        // The innermost first.
        let vector = vector_variable(&positions, (0..axes.len() as Var).rev())?;
        if !matches!(data.op, Op::DotGeneral(_)) && vector != IMAGE[1] {
            // Images are copied with their channels together.
            return None;
        }
        let mut nest = (**nest).clone();
        restrict(graph, &mut nest, &[made]);
        nest.extents = extents(&axes, graph.shape(data.inputs[operand]));
        nest.stores.clear();
        nest.split = None;
        Some(Prologue {
            operand,
            value: made,
            index,
            nest,
            vector,
        })
    }
}

/// The extents of the loops over `axes`.
fn extents(axes: &[Vec<usize>], shape: &[usize]) -> Vec<i64> {
    let extent = |list: &Vec<usize>| list.iter().map(|&axis| shape[axis] as i64).product();
    axes.iter().map(extent).collect()
}

/// The index of `made` for the element of `operand` at the loops over `axes`, and the reads of `nest` that
/// compute it; none unless neighbours along each loop are at one distance in every read.
fn even_loads(
    graph: &Graph,
    layouts: &Layouts,
    nest: &Nest,
    operand: Value,
    made: Value,
    axes: &[Vec<usize>],
) -> Option<(Vec<Index>, Loads)> {
    let shape = graph.shape(operand);
    // The same element by the operand's own axes, and by the loops: the innermost axis of a loop stands for
    // the whole loop.
    let (by_axis, _) = identity(shape, 0);
    let mut by_loop = vec![Index::default(); shape.rank()];
    for (var, (list, extent)) in axes.iter().zip(extents(axes, shape)).enumerate() {
        if let Some(&inner) = list.iter().rev().find(|&&axis| shape[axis] > 1) {
            by_loop[inner] = Index::var(var as Var, extent);
        }
    }
    let joined = |var: Var, _: i64| {
        let mut wide = (0..shape.rank()).filter(|&axis| shape[axis] > 1);
        let axis = wide.nth(var as usize);
        axis.map_or_else(Index::default, |axis| by_loop[axis].clone())
    };
    let by_axis = at_base(graph, operand, made, by_axis)?;
    let index = at_base(graph, operand, made, by_loop.clone())?;
    let (mut wanted, mut found) = (Loads::new(), Loads::new());
    wanted.visit(graph, layouts, nest, made, &by_axis)?;
    found.visit(graph, layouts, nest, made, &index)?;
    let even = wanted.list.len() == found.list.len()
        && wanted.list.iter().zip(&found.list).all(|(by_axis, by_loop)| {
            axes.iter().all(|list| is_even(&by_axis.1, list, shape))
                && by_axis.0 == by_loop.0
                && by_axis.1.substitute(&joined, &|slot| slot) == by_loop.1
        });
    even.then_some((index, found))
}

/// The index of `base` for the element of `value` at `index`: through movements that leave out nothing and
/// repeat nothing.
fn at_base(graph: &Graph, value: Value, base: Value, mut index: Vec<Index>) -> Option<Vec<Index>> {
    let mut value = value;
    while value != base {
        index = operand_index(graph, value, &index)?;
        let operand = graph.def(value).inputs[0];
        if graph.ty(operand).numel() != graph.ty(value).numel() {
            return None;
        }
        value = operand;
    }
    Some(index)
}

/// Whether neighbours along the joined `axes` of an operand are at one distance. The axes of extent above one
/// are numbered in order.
fn is_even(position: &Index, axes: &[usize], shape: &[usize]) -> bool {
    let number = |axis: usize| shape[..axis].iter().filter(|&&extent| extent > 1).count() as Var;
    let mut expected: Option<i64> = None;
    axes.iter().rev().filter(|&&axis| shape[axis] > 1).all(|&axis| {
        let Some(stride) = position.stride(number(axis)) else {
            return false;
        };
        let even = expected.is_none_or(|expected| expected == stride);
        expected = Some(stride * shape[axis] as i64);
        even
    })
}

/// Where a nest reads memory to make a value.
struct Loads {
    list: Vec<(Value, Index)>,
    /// Whether anything is computed.
    computes: bool,
    /// Whether all of it is cheap.
    cheap: bool,
    visited: FxHashSet<(Value, Vec<Index>)>,
}

impl Loads {
    fn new() -> Self {
        Self {
            list: Vec::new(),
            computes: false,
            cheap: true,
            visited: FxHashSet::default(),
        }
    }

    /// Adds the reads that `value` at `index` is computed from; none if it depends on the index itself, or
    /// on integers that are loaded.
    fn visit(
        &mut self,
        graph: &Graph,
        layouts: &Layouts,
        nest: &Nest,
        value: Value,
        index: &[Index],
    ) -> Option<()> {
        if !self.visited.insert((value, index.to_vec())) {
            return Some(());
        }
        if !nest.uses_of(value).is_empty() {
            self.list.push((value, position(graph, layouts, value, index)));
            return Some(());
        }
        let data = graph.def(value);
        if let Some(operand) = operand_index(graph, value, index) {
            return self.visit(graph, layouts, nest, data.inputs[0], &operand);
        }
        match &data.op {
            Op::Constant { .. } | Op::Scalar { .. } => Some(()),
            op if op.is_pointwise() => {
                self.computes = true;
                self.cheap &= is_cheap(op);
                data.inputs
                    .iter()
                    .try_for_each(|&operand| self.visit(graph, layouts, nest, operand, index))
            }
            _ => None,
        }
    }
}
