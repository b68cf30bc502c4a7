//! The graph in which a region runs chunk by chunk.

use std::collections::HashMap;

use cranelift_entity::{EntityRef, EntitySet, SecondaryMap};
use kiln_graph::op::{BinaryOp, Op};
use kiln_graph::{Graph, Node, NodeData, Provenance, Rewriter, Shape, TypeError, Users, Value};

use super::Region;

/// A graph that was rebuilt with chunks.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) graph: Graph,
    /// For each new node, the old node whose work it does, or does a part of.
    pub(crate) origin: Vec<Node>,
    /// The new value for each old one. Values that no longer exist as a whole are not here.
    pub(crate) values: HashMap<Value, Value>,
}

struct Cutter<'a> {
    region: &'a Region,
    users: Users,
    new: Rewriter<'a>,
    origin: Vec<Node>,
    /// Values of the region that are sums over rows: the sum of the chunks so far.
    sums: HashMap<Value, Value>,
    /// Values of the region that nodes outside read: one value for each chunk.
    rows: HashMap<Value, Vec<Value>>,
}

impl Region {
    /// `graph` with this region in chunks, placed where everything that the region reads is computed.
    ///
    /// # Errors
    ///
    /// Only if a rule makes an ill-typed node, which would be a bug.
    pub(crate) fn cut(&self, graph: &Graph) -> Result<Cut, TypeError> {
        let mut cutter = Cutter {
            region: self,
            users: graph.users(),
            new: Rewriter::new(graph),
            origin: Vec::new(),
            sums: HashMap::new(),
            rows: HashMap::new(),
        };
        let stays = self.read_whole(graph, &cutter.users);
        let moved = |node: Node| self.nodes.contains(node) && !stays.contains(node);
        let needed = self.needed(graph);
        let root = graph.value(self.root).node;
        for &value in graph.parameters().iter().chain(graph.scalars()) {
            cutter.copy(graph.value(value).node)?;
        }
        let others: Vec<Node> = graph
            .nodes()
            .filter(|&(node, data)| {
                !moved(node) && !matches!(data.op, Op::Parameter { .. } | Op::Scalar { .. })
            })
            .map(|(node, _)| node)
            .collect();
        let (before, behind): (Vec<Node>, Vec<Node>) = others
            .into_iter()
            .partition(|&node| node < root || needed.contains(node));
        before.into_iter().try_for_each(|node| cutter.copy(node))?;
        for chunk in 0..self.count {
            cutter.chunk(chunk)?;
        }
        cutter.join()?;
        // Nodes that run after the chunks must not share a kernel with nodes that run before (the loss with
        // the number of rows that count).
        for node in behind {
            cutter.copy(node)?;
            let new = Node::new(cutter.origin.len() - 1);
            cutter.new.graph.provenance_mut(new).chunk = Some(self.count as u16);
        }

        let values = graph
            .values()
            .filter_map(|(value, _)| Some((value, cutter.new.get(value)?)));
        Ok(Cut {
            values: values.collect(),
            origin: cutter.origin,
            graph: cutter.new.finish(),
        })
    }

    /// The repeated nodes whose whole results some node outside needs.
    fn read_whole(&self, graph: &Graph, users: &Users) -> EntitySet<Node> {
        let mut stays: EntitySet<Node> = EntitySet::new();
        for (node, data) in graph
            .nodes()
            .rev()
            .filter(|&(node, _)| self.repeated.contains(node))
        {
            let value = data.outputs[0];
            let whole = |&user: &Node| stays.contains(user) || self.reads_whole(graph, user, value);
            if users.outputs(value) > 0 || users.of(value).iter().any(whole) {
                stays.insert(node);
            }
        }
        stays
    }

    /// Whether `user`, which reads `value`, does not read it chunk by chunk.
    fn reads_whole(&self, graph: &Graph, user: Node, value: Value) -> bool {
        let reader = graph.node(user);
        let Some(axes) = self.operands(graph, reader).filter(|_| self.nodes.contains(user)) else {
            return true;
        };
        let mut reads = reader.inputs.iter().zip(axes);
        reads.any(|(&read, axis)| read == value && axis.is_none())
    }

    /// The nodes that must have run before the region can.
    fn needed(&self, graph: &Graph) -> EntitySet<Node> {
        let mut needed: EntitySet<Node> = EntitySet::new();
        for (node, data) in graph.nodes().rev() {
            if needed.contains(node) || self.nodes.contains(node) {
                needed.extend(data.inputs.iter().map(|&value| graph.value(value).node));
            }
        }
        needed
    }
}

impl Cutter<'_> {
    fn copy(&mut self, node: Node) -> Result<(), TypeError> {
        self.new.copy(node)?;
        self.origin.push(node);
        Ok(())
    }

    /// Adds a node that does part of `node`, in a chunk or, after the last one, for all of them.
    fn add(&mut self, node: Node, op: Op, inputs: &[Value], chunk: usize) -> Result<Value, TypeError> {
        let provenance = Provenance {
            chunk: Some(chunk as u16),
            ..self.new.old().node(node).provenance.clone()
        };
        let value = self.new.graph.add(op, inputs, &provenance)?;
        self.origin.push(node);
        Ok(value)
    }

    /// Runs the region for one chunk of the rows.
    fn chunk(&mut self, chunk: usize) -> Result<(), TypeError> {
        let graph = self.new.old();
        // The new values of this chunk: of the region's values, and of the parts of values that the region
        // reads.
        let mut made: SecondaryMap<Value, Option<Value>> = SecondaryMap::new();
        let mut parts: HashMap<(Value, usize), Value> = HashMap::new();
        for (node, data) in graph
            .nodes()
            .filter(|&(node, _)| self.region.nodes.contains(node))
        {
            let axes = self.region.operands(graph, data).expect("it was followed before");
            let mut inputs: Vec<Value> = Vec::with_capacity(data.inputs.len());
            for (&value, axis) in data.inputs.iter().zip(axes) {
                inputs.push(match (axis, made[value]) {
                    (None, _) => self.new.map(value),
                    (Some(_), Some(part)) => part,
                    (Some(axis), None) => match parts.get(&(value, axis)) {
                        Some(&part) => part,
                        None => {
                            let part = self.part(node, value, axis, chunk)?;
                            parts.insert((value, axis), part);
                            part
                        }
                    },
                });
            }
            let result = data.outputs[0];
            let axis = self.region.axis_of(result);
            let value = self.add(node, self.part_of(data, axis), &inputs, chunk)?;
            if axis.is_some() {
                made[result] = Some(value);
                if self.leaves(node, result) {
                    self.rows.entry(result).or_default().push(value);
                }
            } else {
                let sum = match self.sums.get(&result) {
                    Some(&sum) => self.add(node, Op::Binary(BinaryOp::Add), &[sum, value], chunk)?,
                    None => value,
                };
                self.sums.insert(result, sum);
            }
        }
        Ok(())
    }

    /// Rows of `value`, which the region reads.
    fn part(&mut self, node: Node, value: Value, axis: usize, chunk: usize) -> Result<Value, TypeError> {
        let shape = self.new.old().shape(value);
        let rows = shape[axis] / self.region.count;
        let slice = Op::slice(shape, axis, rows * chunk..rows * (chunk + 1));
        let whole = self.new.map(value);
        self.add(node, slice, &[whole], chunk)
    }

    /// The operation of `data` for a chunk whose result is cut along `axis`.
    fn part_of(&self, data: &NodeData, axis: Option<usize>) -> Op {
        let fewer = |shape: &Shape, axis: usize| shape.with(axis, shape[axis] / self.region.count);
        match (data.op.clone(), axis) {
            (Op::Broadcast { shape, dims }, Some(axis)) => Op::Broadcast {
                shape: fewer(&shape, axis),
                dims,
            },
            (
                Op::Iota {
                    dtype,
                    shape,
                    axis: along,
                },
                Some(axis),
            ) => Op::Iota {
                dtype,
                shape: fewer(&shape, axis),
                axis: along,
            },
            (Op::Reshape(shape), Some(axis)) => Op::Reshape(fewer(&shape, axis)),
            (op, _) => op,
        }
    }

    /// Whether somebody outside the region reads `value`.
    fn leaves(&self, node: Node, value: Value) -> bool {
        let region = self.region;
        !region.repeated.contains(node)
            && (self.users.outputs(value) > 0
                || self
                    .users
                    .of(value)
                    .iter()
                    .any(|&user| !region.nodes.contains(user)))
    }

    /// Joins the chunks of the values that nodes outside read.
    fn join(&mut self) -> Result<(), TypeError> {
        let mut sums: Vec<(Value, Value)> = self.sums.drain().collect();
        sums.sort();
        for (old, new) in sums {
            self.new.replace(old, new);
        }
        let mut rows: Vec<(Value, Vec<Value>)> = self.rows.drain().collect();
        rows.sort();
        for (old, chunks) in rows {
            let axis = self.region.axis_of(old).expect("it has rows");
            let node = self.new.old().value(old).node;
            let joined = self.add(node, Op::Concat { axis }, &chunks, self.region.count)?;
            self.new.replace(old, joined);
        }
        Ok(())
    }
}

impl Cut {
    /// The new nodes that do the work of `old` nodes.
    pub(crate) fn of(&self, old: &EntitySet<Node>) -> EntitySet<Node> {
        let parts = self.origin.iter().enumerate();
        let parts = parts.filter(|(_, origin)| old.contains(**origin));
        let mut nodes = EntitySet::new();
        nodes.extend(parts.map(|(new, _)| Node::new(new)));
        nodes
    }
}
