//! Cases with fewer nodes: some removed, their results made arguments or replaced by operands.

use kiln_graph::{Graph, HostTensor, Interpreter, Node, NodeData, Op, Scalar, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::case::{Case, Interval};

/// Whether a node computes nothing.
pub(crate) fn is_leaf(op: &Op) -> bool {
    matches!(op, Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. })
}

/// The nodes that can be removed, in program order.
pub(crate) fn removable(graph: &Graph) -> Vec<Node> {
    let nodes = graph.nodes().filter(|(_, data)| !is_leaf(&data.op));
    nodes.map(|(node, _)| node).collect()
}

/// A case being rebuilt: values of the old graph with those of the new one, and the arguments of the new one.
pub(crate) struct Rebuild<'a> {
    old: &'a Case,
    graph: Graph,
    map: FxHashMap<Value, Value>,
    intervals: Vec<Interval>,
    scalars: Vec<Scalar>,
}

impl<'a> Rebuild<'a> {
    pub(crate) fn new(old: &'a Case) -> Self {
        Self {
            old,
            graph: Graph::new(old.graph.name.clone()),
            map: FxHashMap::default(),
            intervals: Vec::new(),
            scalars: Vec::new(),
        }
    }

    /// The replacement of a value of the old graph.
    pub(crate) fn get(&self, value: Value) -> Option<Value> {
        self.map.get(&value).copied()
    }

    /// Lets `new` stand for `old`.
    pub(crate) fn replace(&mut self, old: Value, new: Value) {
        self.map.insert(old, new);
    }

    /// Makes `value` an argument.
    pub(crate) fn argument(&mut self, value: Value, interval: Interval) {
        let new = self.graph.parameter(self.old.graph.ty(value).clone());
        self.intervals.push(interval);
        self.map.insert(value, new);
    }

    /// Copies a node as `op`; none if its operands do not fit that, or are gone.
    pub(crate) fn copy(&mut self, data: &NodeData, op: Op) -> Option<()> {
        let op = match op {
            Op::Parameter { index, ty, .. } => {
                self.intervals.push(self.old.intervals[index as usize]);
                let index = self.graph.parameters().len() as u32;
                Op::Parameter {
                    index,
                    ty,
                    copy_of: None,
                }
            }
            Op::Scalar { index, dtype } => {
                self.scalars.push(self.old.scalars[index as usize]);
                let index = self.graph.scalars().len() as u32;
                Op::Scalar { index, dtype }
            }
            op => op,
        };
        let inputs: Vec<Value> = data
            .inputs
            .iter()
            .map(|&value| self.get(value))
            .collect::<Option<_>>()?;
        let outputs = self.graph.add_node(op, &inputs, data.provenance.clone()).ok()?;
        self.map.extend(data.outputs.iter().copied().zip(outputs));
        Some(())
    }

    /// The new case with these values of the old one as outputs, without nodes that they do not need; none
    /// if one of the values is gone or the graph breaks a rule. An output still takes over its argument, if
    /// both are left.
    pub(crate) fn finish(mut self, outputs: &[Value]) -> Option<Case> {
        let old = &self.old.graph;
        for &value in outputs {
            let new = self.get(value)?;
            let known = old.outputs.iter().find(|output| output.value == value);
            let argument = known.and_then(|output| old.parameters().get(output.alias? as usize));
            let argument = argument.and_then(|&argument| self.get(argument));
            let alias = self
                .graph
                .parameters()
                .iter()
                .position(|&own| Some(own) == argument);
            self.graph.output(new, alias.map(|index| index as u32));
        }
        let mut case = Case {
            graph: self.graph,
            intervals: self.intervals,
            scalars: self.scalars,
            seed: self.old.seed,
        }
        .without_unused()?;
        kiln_graph::verify(&case.graph).ok()?;
        case.fit_indices();
        Some(case)
    }
}

impl Case {
    /// The values that leave.
    pub(crate) fn outputs(&self) -> Vec<Value> {
        self.graph.outputs.iter().map(|output| output.value).collect()
    }

    /// The case without nodes and arguments that no output needs.
    fn without_unused(&self) -> Option<Self> {
        let graph = &self.graph;
        let mut needed: FxHashSet<Value> = FxHashSet::default();
        let taken_over = graph.outputs.iter().filter_map(|output| output.alias);
        let taken_over: Vec<Value> = taken_over
            .map(|index| graph.parameters()[index as usize])
            .collect();
        let mut stack = self.outputs();
        stack.extend(&taken_over);
        while let Some(value) = stack.pop() {
            if needed.insert(value) {
                stack.extend_from_slice(&graph.def(value).inputs);
            }
        }
        let mut new = Graph::new(graph.name.clone());
        let mut map: FxHashMap<Value, Value> = FxHashMap::default();
        let (mut intervals, mut scalars) = (Vec::new(), Vec::new());
        for (_, data) in graph.nodes() {
            if !data.outputs.iter().any(|value| needed.contains(value)) {
                continue;
            }
            let op = match &data.op {
                Op::Parameter { index, ty, .. } => {
                    intervals.push(self.intervals[*index as usize]);
                    let index = new.parameters().len() as u32;
                    Op::Parameter {
                        index,
                        ty: ty.clone(),
                        copy_of: None,
                    }
                }
                Op::Scalar { index, dtype } => {
                    scalars.push(self.scalars[*index as usize]);
                    let index = new.scalars().len() as u32;
                    Op::Scalar { index, dtype: *dtype }
                }
                op => op.clone(),
            };
            let inputs: Vec<Value> = data.inputs.iter().map(|value| map[value]).collect();
            let outputs = new.add_node(op, &inputs, data.provenance.clone()).ok()?;
            map.extend(data.outputs.iter().copied().zip(outputs));
        }
        for output in &graph.outputs {
            let argument = output.alias.map(|index| map[&graph.parameters()[index as usize]]);
            let alias = new.parameters().iter().position(|&own| Some(own) == argument);
            new.output(map[&output.value], alias.map(|index| index as u32));
        }
        Some(Self {
            graph: new,
            intervals,
            scalars,
            seed: self.seed,
        })
    }

    /// The case in which no output takes over an argument; none if it is that already.
    pub(crate) fn without_aliases(&self) -> Option<Self> {
        let mut plain = self.clone();
        let aliases = plain
            .graph
            .outputs
            .iter_mut()
            .filter_map(|output| output.alias.take());
        (aliases.count() > 0).then_some(plain)
    }

    /// The case with only some of the values as outputs.
    pub(crate) fn with_outputs(&self, outputs: &[Value]) -> Option<Self> {
        let mut new = Rebuild::new(self);
        for (_, data) in self.graph.nodes() {
            new.copy(data, data.op.clone())?;
        }
        new.finish(outputs)
    }

    /// The case without the nodes `cut`: their results that other nodes need become arguments, with the
    /// values of `observed`.
    pub(crate) fn without(&self, cut: &FxHashSet<Node>, observed: &Observed) -> Option<Self> {
        let graph = &self.graph;
        let kept = graph.nodes().filter(|(node, _)| !cut.contains(node));
        let read: FxHashSet<Value> = kept.flat_map(|(_, data)| data.inputs.iter().copied()).collect();
        let mut new = Rebuild::new(self);
        for (node, data) in graph.nodes() {
            if !cut.contains(&node) {
                new.copy(data, data.op.clone())?;
                continue;
            }
            for &value in data.outputs.iter().filter(|value| read.contains(value)) {
                new.argument(value, observed.interval(graph, value));
            }
        }
        // An output that would be an argument shows nothing.
        let mut left = self.outputs();
        left.retain(|&value| !cut.contains(&graph.value(value).node));
        if left.is_empty() {
            return None;
        }
        new.finish(&left)
    }

    /// The case without the operations that only a front end knows, or that several ranks run; none if
    /// nothing else is left.
    pub(crate) fn without_externs(&self) -> Option<Self> {
        let is_extern = |op: &Op| matches!(op, Op::Extern(_) | Op::Collective(_) | Op::CollectiveWait);
        let externs = self.graph.nodes().filter(|(_, data)| is_extern(&data.op));
        let externs: FxHashSet<Node> = externs.map(|(node, _)| node).collect();
        if externs.is_empty() {
            return Some(self.clone());
        }
        self.without(&externs, &Observed { values: None })
    }

    /// The case without the nodes `cut`, which lie at the end: the values that they read of other nodes
    /// become the outputs.
    pub(crate) fn before(&self, cut: &FxHashSet<Node>) -> Option<Self> {
        let graph = &self.graph;
        let mut outputs: Vec<Value> = Vec::new();
        let mut leave = |value: Value| {
            let node = graph.value(value).node;
            if !cut.contains(&node) && !is_leaf(&graph.node(node).op) && !outputs.contains(&value) {
                outputs.push(value);
            }
        };
        graph.outputs.iter().for_each(|output| leave(output.value));
        for (node, data) in graph.nodes() {
            if cut.contains(&node) {
                data.inputs.iter().for_each(|&value| leave(value));
            }
        }
        if outputs.is_empty() {
            return None;
        }
        let mut new = Rebuild::new(self);
        for (_, data) in graph.nodes().filter(|(node, _)| !cut.contains(node)) {
            new.copy(data, data.op.clone())?;
        }
        new.finish(&outputs)
    }

    /// The case in which an operand replaces the result of `node`.
    pub(crate) fn bypassing(&self, node: Node, operand: Value) -> Option<Self> {
        let mut new = Rebuild::new(self);
        for (own, data) in self.graph.nodes() {
            if own == node {
                let stand_in = new.get(operand)?;
                new.replace(data.outputs[0], stand_in);
            } else {
                new.copy(data, data.op.clone())?;
            }
        }
        new.finish(&self.outputs())
    }
}

/// The values of a case, as the interpreter computes them.
pub(crate) struct Observed {
    /// By number of the value; none if the interpreter has no answer.
    values: Option<Vec<HostTensor>>,
}

impl Observed {
    pub(crate) fn of(case: &Case) -> Self {
        let values = Interpreter::new(&case.graph).run_values(&case.arguments(), &case.scalars);
        Self { values: values.ok() }
    }

    /// The interval of the finite elements of a value.
    fn interval(&self, graph: &Graph, value: Value) -> Interval {
        let elements = self
            .values
            .as_ref()
            .and_then(|values| values.get(value.as_u32() as usize));
        let mut finite = elements.map_or_else(Vec::new, HostTensor::to_f64s);
        finite.retain(|x| x.is_finite());
        if finite.is_empty() {
            let high = if graph.dtype(value).is_float() { 1.0 } else { 0.0 };
            return Interval { low: 0.0, high };
        }
        Interval {
            low: finite.iter().copied().fold(f64::INFINITY, f64::min),
            high: finite.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}
