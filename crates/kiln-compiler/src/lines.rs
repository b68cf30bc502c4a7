//! Source lines of compiled steps.
//!
//! A step in the disk cache outlives the program that it was compiled for: an edit of the program moves
//! lines and leaves the graph as it is. So a step that is compiled for the cache has the numbers of
//! recorded nodes in place of lines ([`numbered`]), and each process puts in the lines of its own recording
//! ([`Contract::with_lines_of`]). The same is done for the forward operations that gradients belong to,
//! because they are found through the lines.

use std::sync::Arc;

use kiln_graph::{Graph, Provenance};
use rustc_hash::FxHashMap;

use crate::contract::Contract;
use crate::decision::OriginReport;

/// The text in place of a line: `node 12`.
fn mark(number: usize) -> String {
    format!("node {number}")
}

/// `graph` with each node's number as its location.
pub fn numbered(graph: &Graph) -> Graph {
    let mut marked = graph.clone();
    for (number, (node, _)) in graph.nodes().enumerate() {
        let provenance = marked.provenance_mut(node);
        provenance.location = Some(mark(number).into());
        provenance.gradient_of = None;
    }
    marked
}

impl Contract {
    /// The contract of a step that was compiled from the [`numbered`] graph, with the lines that `graph`, an
    /// equal one, has.
    #[must_use]
    pub fn with_lines_of(mut self, graph: &Graph) -> Self {
        let lines: FxHashMap<String, &Provenance> = graph
            .nodes()
            .enumerate()
            .map(|(number, (_, node))| (mark(number), &node.provenance))
            .collect();
        let line = |location: &mut Option<String>, gradient_of: &mut Option<String>| {
            let provenance = location.take().and_then(|mark| lines.get(&mark).copied());
            let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
            *location = provenance.and_then(|it| text(&it.location));
            *gradient_of = provenance.and_then(|it| text(&it.gradient_of));
        };
        let nodes = self.kernels.iter_mut().flat_map(|kernel| &mut kernel.nodes);
        nodes.for_each(|node| line(&mut node.location, &mut node.gradient_of));
        let uses = self.checks.iter_mut().flat_map(|check| &mut check.uses);
        uses.for_each(|it| line(&mut it.location, &mut it.gradient_of));
        if let Some(report) = &mut self.autocast {
            for origin in report.origins() {
                line(&mut origin.location, &mut origin.gradient_of);
            }
            report.merge_users();
        }
        for saved in self.partition.iter_mut().flat_map(|it| &mut it.saved) {
            line(&mut saved.origin.location, &mut saved.origin.gradient_of);
            let users = saved.users.iter_mut();
            users.for_each(|user| line(&mut user.location, &mut user.gradient_of));
            // Nodes of one line had different numbers, so they were listed separately.
            let mut seen: Vec<OriginReport> = Vec::new();
            saved.users.retain(|user| {
                let new = !seen.contains(user);
                if new {
                    seen.push(user.clone());
                }
                new
            });
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use kiln_graph::op::UnaryOp;
    use kiln_graph::{DType, Op, Provenance, TensorType};

    use super::*;
    use crate::decision::{Decision, SavedReport};
    use crate::report::{FusedNode, KernelReport};

    /// `exp` and `tanh` of a parameter, at these lines.
    fn graph(lines: [&str; 2]) -> Graph {
        let mut graph = Graph::new("step");
        let mut value = graph.parameter(TensorType::new(DType::F32, [4]));
        for (op, line) in [UnaryOp::Exp, UnaryOp::Tanh].into_iter().zip(lines) {
            let provenance = Provenance {
                location: Some(line.into()),
                gradient_of: (op == UnaryOp::Tanh).then(|| "exp".into()),
                ..Provenance::default()
            };
            value = graph.add(Op::Unary(op), &[value], &provenance).unwrap();
        }
        graph.output(value, None);
        graph
    }

    /// The contract of `graph` from a compiler that fuses both operations.
    fn contract(graph: &Graph) -> Contract {
        let origin = |at: usize| {
            let (_, node) = graph.nodes().nth(at).unwrap();
            let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
            OriginReport {
                op: "exp".to_owned(),
                operation: None,
                gradient_of: text(&node.provenance.gradient_of),
                location: text(&node.provenance.location),
                module: None,
            }
        };
        let nodes = (1..3).map(|at| FusedNode {
            location: origin(at).location,
            gradient_of: origin(at).gradient_of,
            ..FusedNode::default()
        });
        let saved = SavedReport {
            name: "%1".to_owned(),
            ty: "f32[4]".to_owned(),
            bytes: 16,
            is_output: false,
            origin: origin(1),
            users: vec![origin(1), origin(2)],
        };
        Contract {
            aliases: Vec::new(),
            arena_bytes: 0,
            autocast: None,
            partition: Some(Decision {
                saved_bytes: 16,
                everything_bytes: 16,
                peak_without_budget: None,
                recompute_picoseconds: 0,
                chunks: None,
                saved: vec![saved],
                recomputed: Vec::new(),
            }),
            kernels: vec![KernelReport {
                nodes: nodes.collect(),
                ..KernelReport::default()
            }],
            buffers: Vec::new(),
            externs: Vec::new(),
            checks: Vec::new(),
        }
    }

    #[test]
    fn a_cached_step_has_the_lines_of_the_program_as_it_is_now() {
        let before = graph(["main.rs:7", "main.rs:7"]);
        let stored = serde_json::to_string(&contract(&numbered(&before))).unwrap();
        assert!(!stored.contains("main.rs"), "the cache holds no lines: {stored}");
        // The line was cut in two, and something put before it.
        let now = graph(["main.rs:9", "main.rs:10"]);
        assert_eq!(before.fingerprint(), now.fingerprint());
        let read: Contract = serde_json::from_str(&stored).unwrap();
        assert_eq!(read.with_lines_of(&now), contract(&now));
    }

    #[test]
    fn users_at_one_line_are_one() {
        let mut graph = graph(["main.rs:7", "main.rs:7"]);
        let (last, _) = graph.nodes().last().unwrap();
        graph.provenance_mut(last).gradient_of = None;
        let found = contract(&numbered(&graph)).with_lines_of(&graph);
        let saved = &found.partition.unwrap().saved[0];
        assert_eq!(saved.users, vec![saved.origin.clone()]);
    }
}
