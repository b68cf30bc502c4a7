//! The search: smaller and smaller cases, as long as they show the fault.
//!
//! Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002), with
//! passes that know graphs. Each pass tries large steps before small ones, because each try runs the backend:
//! the outputs, then the nodes behind the fault, then those before it, in runs of half the graph, a quarter,
//! down to single nodes; then the dimensions. What one pass removes lets another remove more, so the passes
//! repeat until none of them finds anything.

use std::time::{Duration, Instant};

use kiln_graph::{Graph, Node, Value};
use rustc_hash::FxHashSet;

use crate::case::{Case, Fill};
use crate::cut::{Observed, removable};
use crate::fault::Fault;
use crate::outputs::subsets;
use crate::resize::Resize;

/// When to stop looking for a smaller case.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most cases that are tried.
    pub attempts: usize,
    /// The time after which no further case is tried.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            attempts: 2000,
            time: Duration::from_secs(600),
        }
    }
}

/// The smallest case that was found.
#[derive(Clone, Debug)]
pub struct Minified {
    /// The case.
    pub case: Case,
    /// The fault that it shows.
    pub fault: Fault,
    /// How many cases were tried.
    pub attempts: usize,
    /// Whether the search ended because nothing smaller shows the fault, and not at a limit.
    pub complete: bool,
}

impl Minified {
    /// The case as text, with the fault and with the command that repeats it.
    pub fn to_text(&self, command: &str) -> String {
        let fault = self.fault.to_string();
        let fault: Vec<String> = fault.lines().map(|line| format!("// fault: {line}\n")).collect();
        format!(
            "// repeated by: {command}\n{}{}",
            fault.concat(),
            self.case.to_text()
        )
    }
}

/// The smallest case found that shows the fault of `case`; none if `oracle` sees no fault in `case`.
pub fn minify(
    case: Case,
    oracle: &mut dyn FnMut(&Case) -> Option<Fault>,
    limits: &Limits,
) -> Option<Minified> {
    let fault = oracle(&case)?;
    let mut search = Search {
        best: case,
        fault,
        oracle,
        attempts: 1,
        most: limits.attempts,
        until: Instant::now() + limits.time,
    };
    loop {
        let before = search.best.size();
        search.outputs();
        search.tail();
        search.nodes();
        search.bypasses();
        search.dimensions();
        tracing::info!(size = ?search.best.size(), attempts = search.attempts, "smaller");
        if search.is_over() || search.best.size() == before {
            break;
        }
    }
    Some(Minified {
        complete: !search.is_over(),
        case: search.best,
        fault: search.fault,
        attempts: search.attempts,
    })
}

/// Arguments that a graph is tried on, one after the other: of some faults only certain ones show.
const TRIALS: [(Fill, u64); 4] = [
    (Fill::Signed, 1),
    (Fill::Positive, 1),
    (Fill::Signed, 2),
    (Fill::Positive, 2),
];

/// `graph` with arguments on which `oracle` sees a fault; none if it sees none on any that are tried. The
/// results of operations that only the front end knows are arguments there.
pub fn provoke(graph: &Graph, oracle: &mut dyn FnMut(&Case) -> Option<Fault>) -> Option<Case> {
    let cases = TRIALS.iter().filter_map(|&(fill, seed)| {
        let case = Case::new(graph.clone(), fill, seed);
        case.without_externs()
    });
    cases.into_iter().find(|case| oracle(case).is_some())
}

struct Search<'a> {
    best: Case,
    /// The fault that the best case shows.
    fault: Fault,
    oracle: &'a mut dyn FnMut(&Case) -> Option<Fault>,
    attempts: usize,
    most: usize,
    until: Instant,
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        self.attempts >= self.most || Instant::now() >= self.until
    }

    /// Takes `case` for the best if it shows the same fault. Whether it did.
    fn accept(&mut self, case: Option<Case>) -> bool {
        let Some(case) = case else { return false };
        if self.is_over() {
            return false;
        }
        self.attempts += 1;
        match (self.oracle)(&case) {
            Some(fault) if fault.is_like(&self.fault) => {
                self.best = case;
                self.fault = fault;
                true
            }
            _ => false,
        }
    }

    /// Leaves outputs out, and lets no output take over an argument.
    fn outputs(&mut self) {
        let mut found = true;
        while found && !self.is_over() {
            let lists = subsets(&self.best, &self.fault);
            found = lists.iter().any(|list| self.accept(self.best.with_outputs(list)));
        }
        self.accept(self.best.without_aliases());
    }

    /// Leaves out runs of nodes at the end: the values that they read become the outputs.
    fn tail(&mut self) {
        let mut length = removable(&self.best.graph).len() / 2;
        while length > 0 && !self.is_over() {
            let nodes = removable(&self.best.graph);
            let from = nodes.len().saturating_sub(length);
            let cut: FxHashSet<Node> = nodes[from..].iter().copied().collect();
            if from > 0 && self.accept(self.best.before(&cut)) {
                self.outputs();
            } else {
                length /= 2;
            }
        }
    }

    /// Leaves out runs of nodes anywhere: their results that other nodes need become arguments.
    fn nodes(&mut self) {
        let mut length = removable(&self.best.graph).len().div_ceil(2);
        while length > 0 && !self.is_over() {
            let mut observed = Observed::of(&self.best);
            let mut at = 0;
            loop {
                let nodes = removable(&self.best.graph);
                if at >= nodes.len() || self.is_over() {
                    break;
                }
                let end = (at + length).min(nodes.len());
                let cut: FxHashSet<Node> = nodes[at..end].iter().copied().collect();
                if self.accept(self.best.without(&cut, &observed)) {
                    observed = Observed::of(&self.best);
                } else {
                    at = end;
                }
            }
            length = if length == 1 { 0 } else { length.div_ceil(2) };
        }
    }

    /// Lets an operand stand for a result of the same type.
    fn bypasses(&mut self) {
        let mut at = 0;
        while !self.is_over() {
            let graph = &self.best.graph;
            let Some(&node) = removable(graph).get(at) else {
                return;
            };
            let data = graph.node(node);
            let ty = graph.ty(data.outputs[0]);
            let fitting = |value: &Value| graph.ty(*value) == ty;
            let operands: Vec<_> = data.inputs.iter().copied().filter(fitting).collect();
            let single = data.outputs.len() == 1;
            let bypassed = single
                && operands
                    .iter()
                    .any(|&operand| self.accept(self.best.bypassing(node, operand)));
            if !bypassed {
                at += 1;
            }
        }
    }

    /// Makes dimensions smaller: to 1, to a half, and by one.
    fn dimensions(&mut self) {
        let mut tried: FxHashSet<(usize, usize, bool)> = FxHashSet::default();
        'again: while !self.is_over() {
            for from in self.best.extents() {
                for to in [1, from / 2, from.div_ceil(2), from - from / 4, from - 1] {
                    for multiples in [true, false] {
                        if to >= from || to == 0 || !tried.insert((from, to, multiples)) {
                            continue;
                        }
                        if self.accept(self.best.resized(Resize { from, to, multiples })) {
                            tried.clear();
                            continue 'again;
                        }
                    }
                }
            }
            return;
        }
    }
}
