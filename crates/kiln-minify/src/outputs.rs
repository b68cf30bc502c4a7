//! Which outputs a fault needs.

use kiln_graph::Value;

use crate::case::Case;
use crate::fault::Fault;

/// The lists of outputs that are worth a try: the one that differs, each half, each alone, all but one. Each
/// is shorter than that of the case.
pub(crate) fn subsets(case: &Case, fault: &Fault) -> Vec<Vec<Value>> {
    let mut all = case.outputs();
    let outputs = all.len();
    let mut subsets: Vec<Vec<Value>> = Vec::new();
    if let Fault::Differs { output, .. } = fault {
        subsets.extend(all.get(*output).map(|&value| vec![value]));
    }
    let mut seen: Vec<Value> = Vec::new();
    all.retain(|value| {
        let new = !seen.contains(value);
        seen.push(*value);
        new
    });
    let (first, second) = all.split_at(all.len() / 2);
    subsets.extend([all.clone(), first.to_vec(), second.to_vec()]);
    subsets.extend(all.iter().map(|&value| vec![value]));
    let but = |value: &Value| all.iter().copied().filter(|other| other != value).collect();
    subsets.extend(all.iter().map(but));
    subsets.retain(|subset| !subset.is_empty() && subset.len() < outputs);
    subsets.dedup();
    subsets
}
