//! The verifier: what every graph must satisfy, checked from scratch.
//!
//! [`Graph::add_node`](crate::Graph::add_node) keeps most rules by construction. The verifier trusts
//! nothing, so that a pass that breaks a graph is caught right after it. Debug builds run it after every
//! pass.
//!
//! Rules, in the order in which they are checked: for each node, its operands are results of earlier nodes,
//! its results are recorded as its own, and their types are those [`infer`] gives; the argument nodes are
//! exactly the listed arguments, in order, each once; an argument that is called a copy of another has 16 bits
//! and the shape of that one, which is an earlier one of f32; a collective that is only started is read by one wait
//! alone, which has its operand, too, unless it works in place; every output is a value of the graph; an
//! alias names an existing parameter of the output's size in bytes, no parameter is given away twice, and a
//! parameter that is given away does not itself leave the graph through another output.

use std::fmt;

use crate::graph::may_be_copy;
use crate::infer::infer;
use crate::{Collective, Graph, NodeData, Op, TensorType, Value};

/// A rule that a graph can break.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rule {
    /// An operand is no value of the graph, or is defined by this node or a later one.
    OperandDefinedEarlier,
    /// The values and the node that lists them as results disagree.
    ResultsRecorded,
    /// The recorded type of a result is not the inferred one, or the operands do not fit the operation.
    ResultType,
    /// Parameter or scalar nodes and the lists of arguments disagree: one is missing, doubled or out of
    /// order.
    ArgumentsComplete,
    /// An argument is called the rounded copy of what cannot be that: of no earlier argument of f32, or of one
    /// of another shape.
    CopyOfArgument,
    /// What a collective that was only started gives is read by something else than one wait, or leaves.
    StartedIsWaitedFor,
    /// An output is no value of the graph.
    OutputExists,
    /// An alias names a parameter that does not exist.
    AliasInRange,
    /// Two outputs take the buffer of one parameter.
    AliasOnce,
    /// Output and aliased parameter differ in their size in bytes.
    AliasSize,
    /// A parameter whose buffer is given away also leaves the graph as another output.
    AliasedParameterDies,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::OperandDefinedEarlier => "operands are defined by earlier nodes",
            Rule::ResultsRecorded => "results belong to their node",
            Rule::ResultType => "result types are the inferred ones",
            Rule::ArgumentsComplete => "arguments are complete and in order",
            Rule::CopyOfArgument => "a copy has 16 bits and the shape of an earlier argument of f32",
            Rule::StartedIsWaitedFor => "what is only started is read by one wait",
            Rule::OutputExists => "outputs are values of the graph",
            Rule::AliasInRange => "aliases name parameters",
            Rule::AliasOnce => "a parameter's buffer is given away once",
            Rule::AliasSize => "an output fits the buffer it takes",
            Rule::AliasedParameterDies => "a parameter whose buffer is given away does not leave the graph",
        })
    }
}

/// A broken rule, and where.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("graph `{graph}` is broken: {rule}, but {detail} (in `{place}`)")]
pub struct VerifyError {
    /// Name of the graph.
    pub graph: String,
    /// The rule.
    pub rule: Rule,
    /// The node in its text form, or the output, at fault.
    pub place: String,
    /// What was found.
    pub detail: String,
}

/// Checks every rule; the first broken one is the error.
pub fn verify(graph: &Graph) -> Result<(), VerifyError> {
    let mut next_parameter = 0;
    let mut next_scalar = 0;
    let mut next_value = 0;
    for (id, node) in graph.nodes() {
        let fail = |rule, detail: String| Err(node_error(graph, node, rule, detail));
        for &input in &node.inputs {
            let earlier = graph.values.get(input).is_some_and(|data| data.node < id);
            if !earlier {
                return fail(
                    Rule::OperandDefinedEarlier,
                    format!("{input} is not defined before {id}"),
                );
            }
        }
        for (result, &output) in node.outputs.iter().enumerate() {
            let recorded = graph
                .values
                .get(output)
                .is_some_and(|data| data.node == id && data.result as usize == result);
            // Results are numbered in the order of definition: the text form relies on it.
            if !recorded || output.as_u32() != next_value {
                return fail(
                    Rule::ResultsRecorded,
                    format!("{output} is not recorded as result {result} of {id}"),
                );
            }
            next_value += 1;
        }
        let types: Vec<&TensorType> = node.inputs.iter().map(|&value| graph.ty(value)).collect();
        match infer(&node.op, &types) {
            Err(error) => return fail(Rule::ResultType, error.reason),
            Ok(inferred) => {
                let recorded: Vec<&TensorType> = node.outputs.iter().map(|&value| graph.ty(value)).collect();
                if !inferred.iter().eq(recorded.iter().copied()) {
                    return fail(
                        Rule::ResultType,
                        format!("recorded {recorded:?}, inferred {inferred:?}"),
                    );
                }
            }
        }
        let (list, next, index) = match node.op {
            Op::Parameter { index, .. } => (&graph.parameters, &mut next_parameter, index as usize),
            Op::Scalar { index, .. } => (&graph.scalars, &mut next_scalar, index as usize),
            _ => continue,
        };
        if index != *next || list.get(index) != Some(&node.outputs[0]) {
            return fail(
                Rule::ArgumentsComplete,
                format!("argument {} is expected here", *next),
            );
        }
        *next += 1;
        if let Op::Parameter {
            ty,
            copy_of: Some(of),
            ..
        } = &node.op
            && !is_copy(graph, index, ty, *of)
        {
            return fail(
                Rule::CopyOfArgument,
                format!("it is called a copy of argument {of}"),
            );
        }
    }
    if next_value as usize != graph.num_values() {
        let value = graph.values.keys().nth(next_value as usize);
        let place = value.map_or_else(String::new, |value| value.to_string());
        return Err(error(
            graph,
            Rule::ResultsRecorded,
            place,
            "no node lists this value as a result".into(),
        ));
    }
    for (what, list, found) in [
        ("parameter", &graph.parameters, next_parameter),
        ("scalar", &graph.scalars, next_scalar),
    ] {
        if list.len() != found {
            let detail = format!("{} are listed and {found} defined", list.len());
            return Err(error(
                graph,
                Rule::ArgumentsComplete,
                format!("{what} {found}"),
                detail,
            ));
        }
    }
    verify_outputs(graph)?;
    verify_started(graph)
}

fn verify_started(graph: &Graph) -> Result<(), VerifyError> {
    let is_started = |op: &Op| matches!(op, Op::Collective(collective) if collective.started);
    if !graph
        .nodes()
        .any(|(_, node)| is_started(&node.op) || node.op == Op::CollectiveWait)
    {
        return Ok(());
    }
    let users = graph.users();
    for (_, node) in graph.nodes() {
        let detail = match &node.op {
            Op::CollectiveWait => {
                let started = graph.def(node.inputs[0]);
                let Op::Collective(Collective {
                    kind, started: true, ..
                }) = started.op
                else {
                    let detail = format!(
                        "{} is the result of no collective that is only started",
                        node.inputs[0]
                    );
                    return Err(node_error(graph, node, Rule::StartedIsWaitedFor, detail));
                };
                let operand: &[Value] = if kind.is_in_place() { &[] } else { &started.inputs };
                if node.inputs[1..] == *operand {
                    continue;
                }
                format!("the wait for {} does not keep its operand", node.inputs[0])
            }
            op if is_started(op) => {
                let value = node.outputs[0];
                let is_wait = |&user: &crate::Node| graph.node(user).op == Op::CollectiveWait;
                let readers = users.of(value);
                if users.outputs(value) == 0 && readers.len() == 1 && readers.iter().all(is_wait) {
                    continue;
                }
                let (readers, outputs) = (readers.len(), users.outputs(value));
                format!("{value} has {readers} readers and leaves as {outputs} outputs")
            }
            _ => continue,
        };
        return Err(node_error(graph, node, Rule::StartedIsWaitedFor, detail));
    }
    Ok(())
}

fn verify_outputs(graph: &Graph) -> Result<(), VerifyError> {
    let mut taken: Vec<Option<usize>> = vec![None; graph.parameters.len()];
    for (position, output) in graph.outputs.iter().enumerate() {
        let place = || format!("output {position}, {}", output.value);
        if graph.values.get(output.value).is_none() {
            return Err(error(
                graph,
                Rule::OutputExists,
                place(),
                "there is no such value".into(),
            ));
        }
        let Some(index) = output.alias else { continue };
        let Some(&parameter) = graph.parameters.get(index as usize) else {
            let detail = format!("there is no parameter {index}");
            return Err(error(graph, Rule::AliasInRange, place(), detail));
        };
        if let Some(other) = taken[index as usize].replace(position) {
            let detail = format!("output {other} takes the buffer of parameter {index} too");
            return Err(error(graph, Rule::AliasOnce, place(), detail));
        }
        let (have, want) = (graph.ty(parameter), graph.ty(output.value));
        if have.bytes() != want.bytes() {
            let detail = format!("parameter {index} is {have}, the output {want}");
            return Err(error(graph, Rule::AliasSize, place(), detail));
        }
    }
    for (position, output) in graph.outputs.iter().enumerate() {
        let leaves = |value: Value| graph.parameters.iter().position(|&parameter| parameter == value);
        let Some(parameter) = leaves(output.value) else {
            continue;
        };
        if taken[parameter].is_some_and(|taker| taker != position) {
            let place = format!("output {position}, {}", output.value);
            let detail = format!("the buffer of parameter {parameter} is given to another output");
            return Err(error(graph, Rule::AliasedParameterDies, place, detail));
        }
    }
    Ok(())
}

/// Whether argument `index` of type `ty` may be a copy of argument `of`.
fn is_copy(graph: &Graph, index: usize, ty: &TensorType, of: u32) -> bool {
    let of = of as usize;
    let earlier = graph.parameters.get(of).filter(|_| of < index);
    earlier.is_some_and(|&earlier| may_be_copy(ty, graph.ty(earlier)))
}

fn error(graph: &Graph, rule: Rule, place: String, detail: String) -> VerifyError {
    VerifyError {
        graph: graph.name.clone(),
        rule,
        place,
        detail,
    }
}

fn node_error(graph: &Graph, node: &NodeData, rule: Rule, detail: String) -> VerifyError {
    // A broken node may name results that do not exist; print what can be printed.
    let printable = node
        .outputs
        .iter()
        .all(|&value| graph.values.get(value).is_some());
    let place = if printable {
        graph.node_text(node)
    } else {
        node.op.name().to_owned()
    };
    error(graph, rule, place, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cranelift_entity::EntityRef;

    fn sample() -> Graph {
        Graph::parse(
            "graph @sample {
               %0 = parameter 0 : f32[4]
               %1 = parameter 1 : f32[2,2]
               %2 = scalar 0 : f32[]
               %3 = broadcast %2 {dims=[]} : f32[4]
               %4 = mul %0, %3 : f32[4]
               return %4 (alias 0), %1
             }",
        )
        .expect("the sample is well formed")
    }

    /// The rule that `sample` breaks after `damage`.
    fn broken(damage: impl FnOnce(&mut Graph)) -> Rule {
        let mut graph = sample();
        damage(&mut graph);
        verify(&graph).expect_err("the graph is damaged").rule
    }

    #[test]
    fn a_sound_graph_passes() {
        assert_eq!(verify(&sample()), Ok(()));
    }

    #[test]
    fn every_rule_is_noticed() {
        let node = |n: usize| crate::Node::new(n);
        let value = |n: usize| Value::new(n);
        assert_eq!(
            broken(|g| g.nodes[node(4)].inputs[0] = value(4)),
            Rule::OperandDefinedEarlier
        );
        assert_eq!(
            broken(|g| g.nodes[node(4)].inputs[0] = value(9)),
            Rule::OperandDefinedEarlier
        );
        assert_eq!(
            broken(|g| g.nodes[node(4)].outputs[0] = value(3)),
            Rule::ResultsRecorded
        );
        assert_eq!(
            broken(|g| g.nodes[node(4)].outputs[0] = value(9)),
            Rule::ResultsRecorded
        );
        let spare = |g: &Graph| g.values[value(4)].clone();
        assert_eq!(
            broken(|g| {
                let copy = spare(g);
                g.values.push(copy);
            }),
            Rule::ResultsRecorded
        );
        assert_eq!(broken(|g| g.values[value(4)].ty.shape[0] = 5), Rule::ResultType);
        assert_eq!(
            broken(|g| g.nodes[node(4)].inputs[1] = value(2)),
            Rule::ResultType
        );
        assert_eq!(broken(|g| g.parameters.swap(0, 1)), Rule::ArgumentsComplete);
        assert_eq!(broken(|g| g.scalars.push(value(2))), Rule::ArgumentsComplete);
        for of in [0, 1, 7] {
            let call_copy = |g: &mut Graph| {
                let node = g.values[g.parameters[1]].node;
                if let Op::Parameter { copy_of, .. } = &mut g.nodes[node].op {
                    *copy_of = Some(of);
                }
            };
            assert_eq!(broken(call_copy), Rule::CopyOfArgument, "argument {of}");
        }
        assert_eq!(broken(|g| g.output(value(7), None)), Rule::OutputExists);
        assert_eq!(broken(|g| g.outputs[1].alias = Some(2)), Rule::AliasInRange);
        assert_eq!(broken(|g| g.output(value(3), Some(0))), Rule::AliasOnce);
        assert_eq!(broken(|g| g.output(value(2), Some(1))), Rule::AliasSize);
        assert_eq!(
            broken(|g| g.output(value(3), Some(1))),
            Rule::AliasedParameterDies
        );
        assert_eq!(broken(|g| g.output(value(0), None)), Rule::AliasedParameterDies);
    }

    #[test]
    fn the_error_shows_the_node() {
        let mut graph = sample();
        graph.nodes[crate::Node::new(4)].inputs[1] = Value::new(2);
        let text = verify(&graph).expect_err("the graph is damaged").to_string();
        assert!(text.contains("%4 = mul %0, %2 : f32[4]"), "{text}");
        assert!(text.contains("f32[4] and f32[] differ"), "{text}");
    }
}
