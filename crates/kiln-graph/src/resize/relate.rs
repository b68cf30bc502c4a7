//! Sizes spread from marked dimensions to whatever follows from them.

use super::Pinned;
use super::classes::{Classes, groups};
use crate::op::Op;
use crate::{Graph, Node, NodeData, Value};

/// Most passes over the graph: a size spreads against the order of nodes through one relation a pass.
const PASSES: usize = 16;

/// Who decided the size of a class, from the weakest to the strongest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Strength {
    /// Nobody: it is as it was.
    Old,
    /// An operation that can do with another size.
    Likely,
    /// An operation that has no other result.
    Result,
    /// The program.
    Marked,
}

/// Sizes of all classes while they spread.
#[derive(Debug)]
pub(super) struct Solver<'a> {
    pub graph: &'a Graph,
    classes: &'a Classes,
    now: Vec<usize>,
    by: Vec<(Strength, Option<Node>)>,
    /// Sizes of marked classes: before and now.
    marks: Vec<(usize, usize)>,
    changed: bool,
    /// The first demand that could not be met.
    pub conflict: Option<Pinned>,
}

impl<'a> Solver<'a> {
    pub fn new(graph: &'a Graph, classes: &'a Classes) -> Self {
        let mut now = vec![0; classes.len()];
        for (value, data) in graph.values() {
            for (axis, &extent) in data.ty.shape.iter().enumerate() {
                now[classes.of(value, axis)] = extent;
            }
        }
        Self {
            graph,
            classes,
            by: vec![(Strength::Old, None); now.len()],
            now,
            marks: Vec::new(),
            changed: false,
            conflict: None,
        }
    }

    /// The size of a dimension.
    pub fn now(&self, value: Value, axis: usize) -> usize {
        self.now[self.classes.of(value, axis)]
    }

    /// All sizes of a value.
    pub fn shape(&self, value: Value) -> Vec<usize> {
        (0..self.graph.shape(value).rank())
            .map(|axis| self.now(value, axis))
            .collect()
    }

    /// Whether any size of a value is another than before.
    pub fn has_changed(&self, value: Value) -> bool {
        self.shape(value) != self.graph.shape(value).dims()
    }

    /// Gives a class the size that the program marked it with.
    pub fn mark(&mut self, class: usize, size: usize) {
        self.marks.push((self.now[class], size));
        self.set(class, size, Strength::Marked, None);
    }

    /// Spreads sizes until nothing changes.
    pub fn solve(&mut self) {
        let graph = self.graph;
        for _ in 0..PASSES {
            self.changed = false;
            for (node, data) in graph.nodes() {
                self.relate(node, data);
            }
            if !self.changed {
                return;
            }
        }
    }

    fn set(&mut self, class: usize, size: usize, strength: Strength, node: Option<Node>) {
        let (held, by) = self.by[class];
        if self.now[class] == size {
            if strength > held {
                self.by[class] = (strength, node);
            }
            return;
        }
        if let Some(fixed) = self.classes.fixed[class] {
            self.refuse(
                node,
                format!(
                    "the size is also that of dimension {} of argument {}, which is a weight or state and keeps {}",
                    fixed.axis, fixed.parameter, self.now[class]
                ),
            );
        } else if strength > held || (by == node && strength == held && node.is_some()) {
            self.now[class] = size;
            self.by[class] = (strength, node);
            self.changed = true;
        } else if strength > Strength::Likely {
            let reason = match strength {
                Strength::Marked => format!(
                    "two marked dimensions always have one size, and are asked for {} and {size}",
                    self.now[class]
                ),
                _ => format!(
                    "its result has {size} elements in a dimension where {} are needed",
                    self.now[class]
                ),
            };
            self.refuse(node, reason);
        }
    }

    fn refuse(&mut self, node: Option<Node>, reason: String) {
        if self.conflict.is_none() {
            self.conflict = Some(match node {
                Some(node) => Pinned::by(self.graph, node, reason),
                None => Pinned {
                    operation: None,
                    reason,
                },
            });
        }
    }

    fn set_axis(&mut self, value: Value, axis: usize, size: usize, strength: Strength, node: Node) {
        self.set(self.classes.of(value, axis), size, strength, Some(node));
    }

    fn relate(&mut self, node: Node, data: &NodeData) {
        match &data.op {
            Op::Reshape(_) => self.relate_reshape(node, data),
            Op::Concat { axis } => {
                let total = data.inputs.iter().map(|&input| self.now(input, *axis)).sum();
                self.set_axis(data.outputs[0], *axis, total, Strength::Result, node);
            }
            Op::Slice {
                starts,
                limits,
                steps,
            } => {
                for axis in 0..starts.len() {
                    let extents = self.extents(data.inputs[0], axis);
                    let (start, limit) = bounds(extents, (starts[axis], limits[axis]));
                    let size = limit.saturating_sub(start).div_ceil(steps[axis].max(1));
                    self.set_axis(data.outputs[0], axis, size, Strength::Likely, node);
                }
            }
            Op::Pad { low, high } => {
                for axis in 0..low.len() {
                    let size = self.now(data.inputs[0], axis) as i64 + low[axis] + high[axis];
                    let size = usize::try_from(size).unwrap_or(0);
                    self.set_axis(data.outputs[0], axis, size, Strength::Likely, node);
                }
            }
            _ => self.relate_images(node, data),
        }
    }

    /// The extent of a dimension before and now.
    pub fn extents(&self, value: Value, axis: usize) -> (usize, usize) {
        (self.graph.shape(value)[axis], self.now(value, axis))
    }

    fn relate_images(&mut self, node: Node, data: &NodeData) {
        let Some(&x) = data.inputs.first() else { return };
        let spatial = 2..self.graph.shape(x).rank().max(2);
        for axis in spatial {
            let input = self.now(x, axis);
            let size = match &data.op {
                Op::Conv(conv) => conv.output_extent(axis - 2, input, self.now(data.inputs[1], axis)),
                Op::MaxPool(window) | Op::MaxPoolWithIndices { window, .. } => {
                    window.output_extent(axis - 2, input)
                }
                Op::AvgPool { window, .. } => match window.size[axis - 2] == self.graph.shape(x)[axis] {
                    true => Some(1),
                    false => window.output_extent(axis - 2, input),
                },
                _ => return,
            };
            match size {
                Some(size) => self.set_axis(data.outputs[0], axis, size, Strength::Result, node),
                None => self.refuse(Some(node), "its window does not fit".to_owned()),
            }
        }
    }

    fn relate_reshape(&mut self, node: Node, data: &NodeData) {
        let (x, result) = (data.inputs[0], data.outputs[0]);
        let (from, to) = (self.graph.shape(x), self.graph.shape(result));
        for (inputs, outputs) in groups(from.dims(), to.dims()) {
            if inputs.len() == 1 && outputs.len() == 1 {
                continue;
            }
            let has_changed = |list: &[usize], value: Value| {
                list.iter().any(|&axis| {
                    let (before, now) = self.extents(value, axis);
                    before != now
                })
            };
            match (has_changed(&inputs, x), has_changed(&outputs, result)) {
                (true, _) => self.keep_product(node, (x, &inputs), (result, &outputs)),
                (false, true) => self.keep_product(node, (result, &outputs), (x, &inputs)),
                (false, false) => {}
            }
        }
    }

    /// Sizes for dimensions `to`, whose product must be that of `from`, which has changed.
    fn keep_product(&mut self, node: Node, from: (Value, &[usize]), to: (Value, &[usize])) {
        let product = |solver: &Self, (value, axes): (Value, &[usize])| -> usize {
            axes.iter().map(|&axis| solver.now(value, axis)).product()
        };
        let wanted = product(self, from);
        // A dimension with the extent that another one had changes as that one did.
        for &axis in from.1 {
            let (before, now) = self.extents(from.0, axis);
            let free = |solver: &Self, &other: &usize| {
                let (extent, size) = solver.extents(to.0, other);
                extent == before && size == extent
            };
            if before != now
                && product(self, to) != wanted
                && let Some(&axis) = to.1.iter().find(|axis| free(self, axis))
            {
                self.set_axis(to.0, axis, now, Strength::Result, node);
            }
        }
        if product(self, to) == wanted {
            return;
        }
        if let Some(sizes) = self.split(wanted, to) {
            for (&axis, size) in to.1.iter().zip(sizes) {
                self.set_axis(to.0, axis, size, Strength::Result, node);
            }
            return;
        }
        let solutions = to.1.iter().filter_map(|&axis| {
            let size = self.now(to.0, axis);
            let others = product(self, to) / size.max(1);
            let fits = others > 0 && wanted.is_multiple_of(others);
            fits.then(|| (axis, wanted / others))
        });
        let solutions: Vec<_> = solutions.collect();
        match solutions.first() {
            Some(&(axis, size)) => self.set_axis(to.0, axis, size, Strength::Result, node),
            None => {
                let shape = self.graph.shape(data_result(self.graph, node));
                self.refuse(
                    Some(node),
                    format!("{wanted} elements do not fit the extents of its shape {shape}, which are numbers of the program"),
                );
            }
        }
    }
}

impl Solver<'_> {
    /// Sizes of dimensions with a given product, each as it is or as a marked dimension of its extent became.
    fn split(&self, wanted: usize, (value, axes): (Value, &[usize])) -> Option<Vec<usize>> {
        let Some((&axis, rest)) = axes.split_first() else {
            return (wanted == 1).then(Vec::new);
        };
        let (before, size) = self.extents(value, axis);
        let marked = self
            .marks
            .iter()
            .filter(|mark| before == size && mark.0 == before);
        let mut sizes = marked.map(|mark| mark.1).chain([size]);
        sizes.find_map(|size| {
            let fits = size > 0 && wanted.is_multiple_of(size);
            let mut others = fits.then(|| self.split(wanted / size, (value, rest)))??;
            others.insert(0, size);
            Some(others)
        })
    }
}

fn data_result(graph: &Graph, node: Node) -> Value {
    graph.node(node).outputs[0]
}

/// A bound of a slice of a dimension with another extent: one that is nearer to the end than to the beginning
/// is counted from the end.
pub(super) fn moved((before, now): (usize, usize), bound: usize) -> usize {
    match before.saturating_sub(bound) < bound && bound <= before {
        true => (bound + now).saturating_sub(before),
        false => bound,
    }
}

/// Start and limit of a slice of a dimension with another extent.
pub(super) fn bounds(extents: (usize, usize), (start, limit): (usize, usize)) -> (usize, usize) {
    let limit = moved(extents, limit).min(extents.1);
    (moved(extents, start).min(limit), limit)
}
