//! The partition as two graphs: a compiled forward pass inside an eager program.
//!
//! The joint graph here takes *tangents* as arguments: the gradients of the forward outputs, which the
//! eager program's autograd engine provides later. [`split`] chooses what is kept as for a whole step and
//! cuts the partitioned graph in two: `forward(inputs) -> (outputs, saved)` and `backward(saved, tangents)
//! -> gradients`. Inputs and outputs that the backward graph reads are not copied: [`SavedSource`] says
//! where to find them.

use cranelift_entity::packed_option::PackedOption;
use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Phase, Value};

use crate::budget::Frontier;
use crate::cost::bytes;
use crate::cut::{Steering, choose};
use crate::error::PartitionError;
use crate::joint::Joint;
use crate::liveness::Planner;
use crate::phase::OutputRole;
use crate::{Options, Partition, Report, Strategy, assemble, build};

/// Where a tensor that the backward graph takes comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SavedSource {
    /// Tensor argument of this index of the *forward* graph.
    Input(u32),
    /// Output of this index of the forward graph.
    Output(u32),
}

/// A joint graph as two.
#[derive(Clone, PartialEq, Debug)]
pub struct Split {
    /// `forward(inputs) -> (outputs, saved)`. Its tensor arguments are those of the joint graph without the
    /// tangents, in order; its outputs are the joint graph's forward and state outputs, in order, and then
    /// what is kept besides.
    pub forward: Graph,
    /// `backward(saved, tangents) -> gradients`. Its tensor arguments are [`Split::saved`], then the tangents
    /// in the order given; its outputs are the joint graph's gradients, in order.
    pub backward: Graph,
    /// What the backward graph takes from the forward pass, in the order of its arguments.
    pub saved: Vec<SavedSource>,
    /// Positions, among the joint graph's outputs, of the forward graph's first outputs.
    pub forward_outputs: Vec<usize>,
    /// Positions, among the joint graph's outputs, of the backward graph's outputs.
    pub gradients: Vec<usize>,
    /// What was decided.
    pub report: Report,
}

/// Splits a joint graph. `tangents` are the indices of the tensor arguments that exist only in the backward
/// pass; `roles` says what each output is. An output whose role is `Auto` is a gradient if it depends on a
/// tangent.
///
/// Both graphs declare all runtime scalars of the joint graph, so one list of scalars serves both.
///
/// # Errors
///
/// If a tangent or the number of roles does not fit the graph, or an output with the role `Forward` or
/// `State` depends on a tangent.
pub fn split(
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &Options,
) -> Result<Split, PartitionError> {
    let _span = tracing::debug_span!("split", graph = %graph.name).entered();
    let (joint_graph, halves) = Halves::new(graph, tangents, roles)?;
    let joint = Joint::with_tangents(&joint_graph, options, tangents)?;
    let kept = match options.strategy {
        Strategy::MinimumCut => choose(&joint, &Steering::FASTEST).0,
        Strategy::KeepEverything => joint.everything(),
    };
    let closure = joint.closure(&kept, false);
    halves.split(build(&joint, assemble(&joint, &closure, false)?)?)
}

/// [`split`] under a memory budget of `budget` bytes. Two amounts count: what the larger of the two graphs
/// takes by `planner`, without arguments, outputs of the function and tangents, and what is kept between
/// the two. So much is allocated if the two graphs take turns in the same working memory.
///
/// # Errors
///
/// Those of [`split`], and [`PartitionError::BudgetTooSmall`], naming the smallest budget that fits, if none
/// of the plans does.
pub fn split_within(
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &Options,
    budget: u64,
    planner: impl Planner,
) -> Result<Split, PartitionError> {
    let (joint_graph, halves) = Halves::new(graph, tangents, roles)?;
    let partition = Frontier::of(joint_graph, options, planner, Some(halves.clone()))?.fit(budget)?;
    halves.split(partition)
}

/// How the forward half of a joint graph differs from the backward half.
#[derive(Clone, Debug)]
pub(crate) struct Halves {
    /// Indices of the tensor arguments that exist only in the backward pass.
    pub(crate) tangents: Vec<u32>,
    /// For each output, whether it is a gradient.
    is_gradient: Vec<bool>,
}

impl Halves {
    /// `graph` without dead nodes, with the phases that follow from `tangents` and `roles`.
    fn new(graph: &Graph, tangents: &[u32], roles: &[OutputRole]) -> Result<(Graph, Self), PartitionError> {
        if !roles.is_empty() && roles.len() != graph.outputs.len() {
            return Err(PartitionError::RoleCount {
                given: roles.len(),
                outputs: graph.outputs.len(),
            });
        }
        let parameters = graph.parameters().len();
        if let Some(&index) = tangents.iter().find(|&&index| index as usize >= parameters) {
            return Err(PartitionError::UnknownTangent {
                graph: graph.name.clone(),
                index,
                parameters,
            });
        }
        let mut graph = graph.without_dead_code();
        let is_gradient = assign(&mut graph, tangents, roles)?;
        let tangents = tangents.to_vec();
        Ok((
            graph,
            Self {
                tangents,
                is_gradient,
            },
        ))
    }

    /// Cuts a partitioned joint graph, of which `backward` are the nodes that run in the backward pass.
    pub(crate) fn cut(&self, graph: &Graph, backward: &EntitySet<Node>) -> Result<Cut, PartitionError> {
        let pieces = Pieces {
            graph,
            backward,
            tangents: &self.tangents,
            is_gradient: &self.is_gradient,
        };
        let (forward, backward, saved) = pieces.cut()?;
        let outputs = self.is_gradient.iter().filter(|is| !**is).count();
        Ok(Cut {
            forward,
            backward,
            saved,
            outputs,
        })
    }

    fn split(&self, partition: Partition) -> Result<Split, PartitionError> {
        let cut = self.cut(&partition.graph, &partition.backward)?;
        let positions = |gradient: bool| -> Vec<usize> {
            (0..self.is_gradient.len())
                .filter(|&i| self.is_gradient[i] == gradient)
                .collect()
        };
        Ok(Split {
            forward: cut.forward,
            backward: cut.backward,
            saved: cut.saved,
            forward_outputs: positions(false),
            gradients: positions(true),
            report: partition.report,
        })
    }
}

/// A joint graph cut in two.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) forward: Graph,
    pub(crate) backward: Graph,
    saved: Vec<SavedSource>,
    /// How many outputs of `forward` are outputs of the function; the others are kept for `backward`.
    outputs: usize,
}

impl Cut {
    /// Bytes that are kept from the forward to the backward pass and that would not be in memory otherwise.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let kept = self.forward.outputs[self.outputs..].iter();
        kept.map(|output| bytes(&self.forward, output.value)).sum()
    }
}

/// Assigns the phases that [`split`] is going to find, for passes that come before it.
///
/// # Errors
/// If an output with the role `Forward` or `State` depends on a tangent.
pub fn assign_phases_of_split(
    graph: &mut Graph,
    tangents: &[u32],
    roles: &[OutputRole],
) -> Result<(), PartitionError> {
    assign(graph, tangents, roles).map(drop)
}

/// Assigns the phases: nodes that the forward outputs need are forward, all others backward. Returns, for
/// each output, whether it is a gradient.
fn assign(graph: &mut Graph, tangents: &[u32], roles: &[OutputRole]) -> Result<Vec<bool>, PartitionError> {
    // One tangent that each node depends on.
    let mut depends: SecondaryMap<Node, Option<u32>> = SecondaryMap::new();
    for (node, data) in graph.nodes() {
        depends[node] = match data.op {
            Op::Parameter { index, .. } if tangents.contains(&index) => Some(index),
            _ => data
                .inputs
                .iter()
                .find_map(|&value| depends[graph.value(value).node]),
        };
    }
    let mut forward: SecondaryMap<Node, bool> = SecondaryMap::new();
    let mut is_gradient = Vec::with_capacity(graph.outputs.len());
    for (position, output) in graph.outputs.iter().enumerate() {
        let node = graph.value(output.value).node;
        let role = roles.get(position).copied().unwrap_or_default();
        match (role, depends[node]) {
            (OutputRole::Forward | OutputRole::State, Some(tangent)) => {
                return Err(PartitionError::ForwardNeedsTangent {
                    graph: graph.name.clone(),
                    output: position,
                    tangent,
                });
            }
            (OutputRole::Gradient, _) | (OutputRole::Auto, Some(_)) => is_gradient.push(true),
            _ => {
                is_gradient.push(false);
                forward[node] = true;
            }
        }
    }
    let order: Vec<Node> = graph.nodes().map(|(node, _)| node).collect();
    for &node in order.iter().rev() {
        let phase = if forward[node] {
            Phase::Forward
        } else {
            Phase::Backward
        };
        if forward[node] {
            for &value in &graph.node(node).inputs {
                forward[graph.value(value).node] = true;
            }
        }
        graph.provenance_mut(node).phase = phase;
    }
    Ok(is_gradient)
}

/// The partitioned joint graph, about to be cut.
struct Pieces<'a> {
    graph: &'a Graph,
    backward: &'a EntitySet<Node>,
    tangents: &'a [u32],
    is_gradient: &'a [bool],
}

/// A copy of some nodes of a graph.
struct Copy<'a> {
    old: &'a Graph,
    new: Graph,
    map: SecondaryMap<Value, PackedOption<Value>>,
}

impl<'a> Copy<'a> {
    fn new(old: &'a Graph, suffix: &str) -> Self {
        let mut copy = Self {
            old,
            new: Graph::new(format!("{}_{suffix}", old.name)),
            map: SecondaryMap::new(),
        };
        for &scalar in old.scalars() {
            copy.map[scalar] = copy.new.scalar(old.dtype(scalar)).into();
        }
        copy
    }

    fn argument(&mut self, value: Value) {
        self.map[value] = self.new.parameter(self.old.ty(value).clone()).into();
    }

    fn get(&self, value: Value) -> Value {
        self.map[value]
            .expand()
            .expect("what crosses was made an argument")
    }

    fn node(&mut self, node: Node) -> Result<(), PartitionError> {
        let data = self.old.node(node);
        let inputs: Vec<Value> = data.inputs.iter().map(|&value| self.get(value)).collect();
        let results = self
            .new
            .add_node(data.op.clone(), &inputs, data.provenance.clone())?;
        for (&old, new) in data.outputs.iter().zip(results) {
            self.map[old] = new.into();
        }
        Ok(())
    }
}

impl Pieces<'_> {
    fn outputs(&self, gradient: bool) -> impl Iterator<Item = kiln_graph::Output> + '_ {
        let outputs = self.graph.outputs.iter().zip(self.is_gradient);
        outputs
            .filter(move |&(_, &is)| is == gradient)
            .map(|(output, _)| *output)
    }

    fn cut(&self) -> Result<(Graph, Graph, Vec<SavedSource>), PartitionError> {
        let graph = self.graph;
        // Which arguments and forward values the backward pass reads, in order of definition.
        let mut crosses: EntitySet<Value> = EntitySet::new();
        let mut read = |value: Value| {
            let node = graph.value(value).node;
            let here = match graph.node(node).op {
                Op::Scalar { .. } | Op::Constant { .. } => true,
                Op::Parameter { index, .. } => self.tangents.contains(&index),
                _ => self.backward.contains(node),
            };
            if !here {
                crosses.insert(value);
            }
        };
        for (node, data) in graph.nodes() {
            if self.backward.contains(node) {
                data.inputs.iter().for_each(|&value| read(value));
            }
        }
        self.outputs(true).for_each(|output| read(output.value));

        let mut forward = Copy::new(graph, "forward");
        let mut index_of: Vec<Option<u32>> = vec![None; graph.parameters().len()];
        for (index, &value) in graph.parameters().iter().enumerate() {
            if !self.tangents.contains(&(index as u32)) {
                index_of[index] = Some(forward.new.parameters().len() as u32);
                forward.argument(value);
            }
        }
        for (node, data) in graph.nodes() {
            let argument = matches!(data.op, Op::Parameter { .. } | Op::Scalar { .. });
            if !argument && !self.backward.contains(node) {
                forward.node(node)?;
            }
        }
        for output in self.outputs(false) {
            // An argument that the backward pass reads must outlive the forward pass.
            let alias = output
                .alias
                .filter(|&index| !crosses.contains(graph.parameters()[index as usize]));
            let alias = alias.and_then(|index| index_of[index as usize]);
            forward.new.output(forward.get(output.value), alias);
        }

        let mut backward = Copy::new(graph, "backward");
        let mut saved = Vec::new();
        for value in crosses.iter() {
            if let Op::Parameter { index, .. } = graph.def(value).op {
                saved.extend(index_of[index as usize].map(SavedSource::Input));
            } else {
                let new = forward.get(value);
                let position = forward.new.outputs.iter().position(|output| output.value == new);
                let position = position.unwrap_or_else(|| {
                    forward.new.output(new, None);
                    forward.new.outputs.len() - 1
                });
                saved.push(SavedSource::Output(position as u32));
            }
            backward.argument(value);
        }
        for &index in self.tangents {
            backward.argument(graph.parameters()[index as usize]);
        }
        for (node, data) in graph.nodes() {
            if matches!(data.op, Op::Constant { .. }) || self.backward.contains(node) {
                backward.node(node)?;
            }
        }
        for output in self.outputs(true) {
            backward.new.output(backward.get(output.value), None);
        }
        Ok((
            forward.new.without_dead_code(),
            backward.new.without_dead_code(),
            saved,
        ))
    }
}
