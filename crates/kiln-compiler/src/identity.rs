//! The identity of a compiled step: the fields of a cache key that every target shares.

use kiln_graph::{Graph, Provenance};

use crate::options::Options;
use crate::target::Target;

/// A hash of the sources of this crate and of the partitioner's: a step that was built by another version of
/// the compiler, even one with the same version number, is not the same step.
pub const COMPILER_SOURCES: &str = env!("KILN_COMPILER_SOURCES");

/// The phase of each node, as one letter: graphs that differ in phases alone are partitioned differently. A
/// capital marks a node of full precision.
fn phases(graph: &Graph) -> String {
    let letter = |provenance: &Provenance| {
        let letter = provenance.phase.name().chars().next().unwrap_or('-');
        match (provenance.full_precision, letter) {
            (false, letter) => letter,
            (true, '-') => '+',
            (true, letter) => letter.to_ascii_uppercase(),
        }
    };
    graph.nodes().map(|(_, data)| letter(&data.provenance)).collect()
}

/// The named fields that identify the result of [`crate::compile()`] for `graph` and `target`.
pub fn fields<T: Target>(graph: &Graph, options: &Options, target: &T) -> [(&'static str, Vec<u8>); 6] {
    [
        ("graph", graph.fingerprint().0.to_vec()),
        ("phases", phases(graph).into_bytes()),
        ("compiler", COMPILER_SOURCES.as_bytes().to_vec()),
        ("options", options.identity().into_bytes()),
        (
            "target",
            format!("{} {}", target.name(), target.fingerprint()).into_bytes(),
        ),
        ("rates", format!("{:?}", target.rates()).into_bytes()),
    ]
}
