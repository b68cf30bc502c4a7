//! Guards: the statements that stop a step when an index is out of range.
//!
//! The least and the largest element of each tensor of indices are outputs of the step
//! ([`kiln_compiler::checks`]). After the kernel that completes such a pair the step compares it with the
//! bounds and returns. Kernels that write into an argument's memory run after all guards.

use std::fmt::Write as _;

use kiln_compiler::Check;
use kiln_compiler::schedule::Schedule;
use kiln_graph::Graph;
use rustc_hash::FxHashMap;

/// For each kernel after which a check is decided, the statements that decide it.
pub fn guards(graph: &Graph, schedule: &Schedule, checks: &[Check]) -> FxHashMap<usize, String> {
    let first = graph.outputs.iter().filter(|output| !output.check).count();
    let mut guards: FxHashMap<usize, String> = FxHashMap::default();
    for (number, (check, kernel)) in checks
        .iter()
        .zip(schedule.checks_decided_after(graph))
        .enumerate()
    {
        let (least, most) = (first + 2 * number, first + 2 * number + 1);
        let _ = writeln!(
            guards.entry(kernel).or_default(),
            "    if (KILN_OUTSIDE({}, outputs[{least}], outputs[{most}], {})) return -1 - {number};",
            check.dtype,
            check.extent()
        );
    }
    guards
}
