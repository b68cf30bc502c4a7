//! Aliases: which output may overwrite which argument's buffer.
//!
//! An argument that the program drops during the step (a parameter replaced by its update, a moment, a
//! running mean) leaves a buffer of just the right size behind. [`assign_aliases`] pairs such arguments with
//! outputs of the same type. An executor can only use a pair if it may write the output while it reads the
//! argument. An output is therefore paired only with arguments that it is computed from *elementwise*:
//! through pointwise operations whose operands have the output's own shape. An output that the ranks join
//! from their shares ([`crate::CollectiveKind::AllGather`]) may overwrite what it replaces as well: the
//! collective reads no argument, and a compiler orders it behind their readers. So may the rounded result of
//! an update overwrite the copy of the parameter that it replaces ([`Graph::note_copy`]), which no update
//! reads. Among the possible pairs [`assign_aliases`] chooses a maximum bipartite matching (by augmenting
//! paths), because an update reads several candidates (the parameter and both moments), and a greedy choice
//! would leave other outputs without a buffer.

use crate::{Graph, Value};

/// Sets [`crate::Output::alias`] of every output of `graph`. `dies[i]` says whether argument `i` is dead
/// after the step.
pub fn assign_aliases(graph: &mut Graph, dies: &[bool]) {
    let candidates: Vec<Vec<usize>> = graph
        .outputs
        .iter()
        .map(|output| candidates(graph, output.value, dies))
        .collect();
    // owner[i]: the output that has argument i's buffer.
    let mut owner: Vec<Option<usize>> = vec![None; dies.len()];
    for output in 0..candidates.len() {
        let mut tried = vec![false; dies.len()];
        augment(output, &candidates, &mut owner, &mut tried);
    }
    graph.outputs.iter_mut().for_each(|output| output.alias = None);
    for (argument, output) in owner.into_iter().enumerate() {
        if let Some(output) = output {
            graph.outputs[output].alias = Some(argument as u32);
        }
    }
}

/// Corrects aliases after a rewrite that found an output to be an argument (`x * 1`). An argument that
/// leaves the graph cannot give its buffer to another output: if it leaves once, that output has it; if it
/// leaves more than once, no output has it.
pub(crate) fn settle_aliases(graph: &mut Graph) {
    for index in 0..graph.parameters.len() {
        let taker = graph
            .outputs
            .iter()
            .position(|output| output.alias == Some(index as u32));
        let outputs = graph.outputs.iter().enumerate();
        let mut leaving = outputs
            .filter(|(_, output)| output.value == graph.parameters[index])
            .map(|(position, _)| position);
        match (taker, leaving.next(), leaving.next()) {
            (Some(taker), Some(first), None) if first != taker => {
                // All four tensors have one size.
                let alias = graph.outputs[first].alias;
                graph.outputs[taker].alias = alias;
                graph.outputs[first].alias = Some(index as u32);
            }
            (Some(taker), Some(_), Some(_)) => graph.outputs[taker].alias = None,
            _ => {}
        }
    }
}

/// Finds an argument for `output`, moving others if they have a second choice.
fn augment(
    output: usize,
    candidates: &[Vec<usize>],
    owner: &mut [Option<usize>],
    tried: &mut [bool],
) -> bool {
    for &argument in &candidates[output] {
        if std::mem::replace(&mut tried[argument], true) {
            continue;
        }
        let free = match owner[argument] {
            None => true,
            Some(other) => augment(other, candidates, owner, tried),
        };
        if free {
            owner[argument] = Some(output);
            return true;
        }
    }
    false
}

/// Dying arguments of the type of `output` from which it is computed elementwise, nearest first.
fn candidates(graph: &Graph, output: Value, dies: &[bool]) -> Vec<usize> {
    /// An update formula is some twenty operations deep at most; the bound keeps long pointwise chains
    /// linear.
    const REACH: usize = 64;
    let ty = graph.ty(output);
    let mut found = Vec::new();
    let mut queue = vec![output];
    let mut next = 0;
    // Behind shares that are joined, shapes differ.
    let is_joined = is_joined(graph, output);
    while next < queue.len() && next < REACH {
        let value = queue[next];
        next += 1;
        let node = graph.def(value);
        if let crate::Op::Parameter { index, .. } = node.op {
            // An updated parameter, rounded, replaces the copy that its owner keeps beside it.
            for index in [index].into_iter().chain(copies(graph, index)) {
                let place = index as usize;
                let dies = dies.get(place).copied().unwrap_or(false);
                if dies && graph.ty(graph.parameters()[place]) == ty && !found.contains(&place) {
                    found.push(place);
                }
            }
        } else if is_joined && leads_to_shares(&node.op) {
            for &operand in &node.inputs {
                if graph.dtype(operand) == ty.dtype && !queue.contains(&operand) {
                    queue.push(operand);
                }
            }
        } else if node.op.is_pointwise() {
            for &operand in &node.inputs {
                if graph.shape(operand) == &ty.shape && !queue.contains(&operand) {
                    queue.push(operand);
                }
            }
        }
    }
    found
}

/// The arguments that are copies of argument `of`.
fn copies(graph: &Graph, of: u32) -> impl Iterator<Item = u32> + '_ {
    let is_copy = move |&value: &Value| match graph.def(value).op {
        crate::Op::Parameter { index, copy_of, .. } if copy_of == Some(of) => Some(index),
        _ => None,
    };
    graph.parameters().iter().filter_map(is_copy)
}

/// Whether `output` is joined from the shares of all ranks.
fn is_joined(graph: &Graph, output: Value) -> bool {
    let mut value = output;
    loop {
        let node = graph.def(value);
        match node.op {
            crate::Op::Reshape(_) | crate::Op::Slice { .. } => value = node.inputs[0],
            crate::Op::Collective(it) => return it.kind == crate::CollectiveKind::AllGather,
            _ => return false,
        }
    }
}

/// Whether a share is computed by such an operation from what it replaces, or what it joins from shares.
fn leads_to_shares(op: &crate::Op) -> bool {
    use crate::Op;
    match op {
        Op::Reshape(_) | Op::Slice { .. } | Op::Concat { .. } | Op::IndexSelect { .. } => true,
        Op::Collective(it) => it.kind == crate::CollectiveKind::AllGather,
        op => op.is_pointwise(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::BinaryOp;
    use crate::{DType, Provenance, TensorType};

    /// p' = p - m', m' = m + g: the parameter's update could take either buffer, the moment's update only
    /// the moment's.
    #[test]
    fn every_state_keeps_a_buffer_of_its_own() {
        let mut graph = Graph::new("update");
        let p = Provenance::default();
        let ty = TensorType::new(DType::F32, [4]);
        let [moment, parameter, gradient] = [(); 3].map(|()| graph.parameter(ty.clone()));
        let new_moment = graph.binary(BinaryOp::Add, moment, gradient, &p).unwrap();
        let new_parameter = graph.binary(BinaryOp::Sub, new_moment, parameter, &p).unwrap();
        graph.output(new_parameter, None);
        graph.output(new_moment, None);

        assign_aliases(&mut graph, &[true, true, false]);
        assert_eq!(
            graph
                .outputs
                .iter()
                .map(|output| output.alias)
                .collect::<Vec<_>>(),
            [Some(1), Some(0)]
        );

        assign_aliases(&mut graph, &[true, false, false]);
        let aliases: Vec<_> = graph.outputs.iter().filter_map(|output| output.alias).collect();
        assert_eq!(aliases, [0], "one dying argument serves one output");
    }

    #[test]
    fn the_rounded_result_of_an_update_takes_over_the_copy() {
        let text = "graph @g {
  %0 = parameter 0 : f32[4]
  %1 = parameter 1 : f32[4]
  %2 = parameter 2 {copy_of=0} : bf16[4]
  %3 = parameter 3 : bf16[4]
  %4 = sub %0, %1 : f32[4]
  %5 = cast %4 : bf16[4]
  %6 = cast %1 : bf16[4]
  return %4, %5, %6
}
";
        let aliases = |dies: [bool; 4]| {
            let mut graph = Graph::parse(text).unwrap();
            assign_aliases(&mut graph, &dies);
            assert_eq!(crate::verify(&graph), Ok(()));
            let aliases = graph.outputs.iter().map(|output| output.alias);
            aliases.collect::<Vec<_>>()
        };
        // The third output is not what replaces the fourth argument, as far as the graph says.
        assert_eq!(aliases([true, false, true, true]), [Some(0), Some(2), None]);
        assert_eq!(aliases([true, false, false, true]), [Some(0), None, None]);
        // A caller who keeps the parameter may give up its copy all the same.
        assert_eq!(aliases([false, false, true, true]), [None, Some(2), None]);
    }

    #[test]
    fn an_argument_that_leaves_keeps_its_buffer() {
        let aliases = |text: &str| {
            let mut graph = Graph::parse(text).unwrap();
            assert!(crate::verify(&graph).is_err(), "this is what is to be mended");
            settle_aliases(&mut graph);
            assert_eq!(crate::verify(&graph), Ok(()));
            graph
                .outputs
                .iter()
                .map(|output| output.alias)
                .collect::<Vec<_>>()
        };
        let given = "graph @g {
  %0 = parameter 0 : f32[4]
  %1 = parameter 1 : f32[4]
  %2 = mul %0, %1 : f32[4]
";
        let returning = |outputs: &str| format!("{given}  return {outputs}\n}}\n");
        assert_eq!(aliases(&returning("%2 (alias 0), %0")), [None, Some(0)]);
        assert_eq!(
            aliases(&returning("%2 (alias 0), %0 (alias 1)")),
            [Some(1), Some(0)]
        );
        assert_eq!(aliases(&returning("%2 (alias 0), %0, %0")), [None; 3]);
        assert_eq!(aliases(&returning("%0 (alias 0), %0, %2 (alias 1)"))[2], Some(1));
    }
}
