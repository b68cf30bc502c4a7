//! Graphviz: the graph as a picture, one box a node, coloured by phase (`dot -Tsvg step.dot -o step.svg`).

use std::fmt::Write;

use crate::{Graph, NodeData, Op, Phase};

/// Fill colours of the phases: grey for unassigned, then blue, orange and green, told apart by any eye.
fn colour(phase: Phase) -> &'static str {
    match phase {
        Phase::Unknown => "#eeeeee",
        Phase::Forward => "#b3d4f0",
        Phase::Backward => "#fdd0a2",
        Phase::Optimizer => "#c7e9c0",
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace(['\n', '\r'], " ")
}

/// What a box says: the operation without operands, the result types, the recorded operation.
fn label(graph: &Graph, node: &NodeData) -> String {
    let text = graph.node_text(&NodeData {
        inputs: Default::default(),
        ..node.clone()
    });
    let mut lines = vec![escaped(&text)];
    lines.extend(node.provenance.operation.as_deref().map(escaped));
    lines.extend(
        node.provenance
            .gradient_of
            .iter()
            .map(|it| escaped(&format!("gradient of {it}"))),
    );
    lines.extend(node.provenance.location.as_deref().map(escaped));
    lines.join("\\n")
}

/// The graph in Graphviz's language. Arguments are ovals, outputs double ovals; an edge is labelled with the
/// result it carries if its node has several.
pub fn to_dot(graph: &Graph) -> String {
    let mut out = String::new();
    write(graph, &mut out).expect("writing to a string does not fail");
    out
}

fn write(graph: &Graph, out: &mut String) -> std::fmt::Result {
    writeln!(out, "digraph \"{}\" {{", escaped(&graph.name))?;
    writeln!(
        out,
        "  node [shape=box, style=filled, fontname=\"monospace\", fontsize=10];"
    )?;
    for (id, node) in graph.nodes() {
        let shape = match node.op {
            Op::Parameter { .. } | Op::Scalar { .. } => ", shape=oval",
            _ => "",
        };
        let fill = colour(node.provenance.phase);
        writeln!(
            out,
            "  {id} [label=\"{}\", fillcolor=\"{fill}\"{shape}];",
            label(graph, node)
        )?;
        for &input in &node.inputs {
            let data = graph.value(input);
            let several = graph.node(data.node).outputs.len() > 1;
            let edge = if several {
                format!(" [label=\"{input}\"]")
            } else {
                String::new()
            };
            writeln!(out, "  {} -> {id}{edge};", data.node)?;
        }
    }
    for (position, output) in graph.outputs.iter().enumerate() {
        let alias = output
            .alias
            .map_or_else(String::new, |index| format!("\\nin place of parameter {index}"));
        let label = format!(
            "output {position}\\n{} : {}{alias}",
            output.value,
            graph.ty(output.value)
        );
        writeln!(
            out,
            "  output{position} [label=\"{label}\", shape=oval, peripheries=2, fillcolor=\"white\"];"
        )?;
        writeln!(out, "  {} -> output{position};", graph.value(output.value).node)?;
    }
    writeln!(out, "}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_edge_and_output_is_drawn() {
        let graph = Graph::parse(
            "graph @g {
               %0 = parameter 0 : f32[4]
               %1, %2 = sort %0 {axis=0} : f32[4], i64[4]   ; fwd \"a \\\"b\\\"\" at main.rs:1
               %3 = add %1, %1 : f32[4]                     ; bwd
               return %3 (alias 0), %2
             }",
        )
        .expect("well formed");
        let dot = to_dot(&graph);
        assert_eq!(dot.matches(" -> ").count(), 3 + 2);
        assert_eq!(dot.matches("fillcolor").count(), 3 + 2);
        assert!(dot.contains("node0 -> node1;"));
        assert!(dot.contains("node1 -> node2 [label=\"%1\"];"));
        assert!(dot.contains(colour(Phase::Forward)) && dot.contains(colour(Phase::Backward)));
        assert!(dot.contains("a \\\"b\\\""), "labels are escaped: {dot}");
    }
}
