//! What a family has learned.

use std::sync::Arc;

use kiln_graph::{Fingerprint, Graph};
use rustc_hash::{FxHashMap, FxHashSet};

use super::template::{Found, Pattern, generalise};
use super::unit::{Skeleton, Unit, Units};
use super::write::Written;
use super::{FamilyStats, Planned};
use crate::emit::calls::StepCall;
use crate::runtime::functions::FunctionLibrary;

/// A template that was built.
#[derive(Debug)]
pub(super) struct Known {
    pub pattern: Pattern,
    pub written: Written,
    pub library: Arc<FunctionLibrary>,
    /// Its position in there.
    pub number: usize,
}

/// What a family has learned.
#[derive(Debug, Default)]
pub(super) struct State {
    pub units: Units,
    pub graphs: Vec<Graph>,
    /// Graphs of other sizes that the caller expects, and that were not planned yet.
    pub expected: Vec<Graph>,
    /// Functions of the steps that were planned, by shape.
    pub samples: Vec<Vec<Arc<Unit>>>,
    /// Graphs whose functions are among the samples.
    pub sampled: FxHashSet<Fingerprint>,
    /// How often functions were built.
    pub learned: usize,
    /// Whether what the cache has was loaded.
    pub loaded: bool,
    pub known: Vec<Known>,
    by_skeleton: FxHashMap<Skeleton, Vec<usize>>,
    /// Functions whose numbers cannot be variables: the C compiler has rejected a template of them.
    pub rejected: FxHashSet<Skeleton>,
    /// Why each graph is compiled on its own, if functions of this family do not compile.
    pub refusal: Option<String>,
    pub stats: FamilyStats,
}

impl State {
    /// Adds a template that was built.
    pub fn add(&mut self, known: Known) {
        let same = self.by_skeleton.entry(known.pattern.skeleton).or_default();
        same.push(self.known.len());
        self.known.push(known);
    }

    /// The units of a step's functions, which are kept.
    pub fn units(&mut self, planned: &Planned) -> Vec<Arc<Unit>> {
        let functions = planned.code.functions.iter();
        functions.map(|function| self.units.keep(function)).collect()
    }

    /// The units of a step's functions. A family of many shapes would grow if all were kept.
    pub fn look_up(&mut self, planned: &Planned) -> Vec<Arc<Unit>> {
        let functions = planned.code.functions.iter();
        functions.map(|function| self.units.get(function)).collect()
    }

    /// The template that stands for `unit`, with the fewest variables if there are several.
    pub fn find(&self, unit: &Unit) -> Option<&Known> {
        let candidates = self
            .by_skeleton
            .get(&unit.skeleton)?
            .iter()
            .map(|&at| &self.known[at]);
        candidates
            .filter(|known| known.pattern.fits(unit))
            .min_by_key(|known| known.pattern.variables.len())
    }

    /// Positions of the units that no template stands for.
    pub fn missing(&self, units: &[Arc<Unit>]) -> Vec<usize> {
        let numbered = units.iter().enumerate();
        numbered
            .filter(|(_, unit)| self.find(unit).is_none())
            .map(|(at, _)| at)
            .collect()
    }

    /// Templates for all units of the samples that none stands for yet.
    pub fn new_templates(&self) -> Vec<Found> {
        let mut seen = FxHashSet::default();
        let all = self.samples.iter().flatten();
        let mut missing: Vec<&Arc<Unit>> = all
            .filter(|unit| seen.insert(Arc::as_ptr(unit)) && self.find(unit).is_none())
            .collect();
        let mut found = generalise(&self.samples);
        found.retain(|it| {
            let before = missing.len();
            missing.retain(|unit| !it.template.fits(unit));
            missing.len() < before
        });
        found
    }

    /// Whether a template's variables stand where the C compiler wants constants.
    pub fn is_rejected(&self, pattern: &Pattern) -> bool {
        !pattern.variables.is_empty() && self.rejected.contains(&pattern.skeleton)
    }

    /// What the first of the `missing` functions computes, and how it differs from those that are known.
    pub fn reason(&self, planned: &Planned, units: &[Arc<Unit>], missing: &[usize]) -> String {
        let first = missing[0];
        let operation = operation(planned, first);
        let unit = &units[first];
        let same = self.by_skeleton.get(&unit.skeleton).into_iter().flatten();
        let differing = same
            .map(|&at| &self.known[at].pattern)
            .map(|pattern| {
                let pairs = unit.values.iter().zip(&pattern.values);
                let pairs = pairs
                    .zip(&pattern.holes)
                    .filter(|((a, b), hole)| hole.is_none() && a != b);
                pairs.map(|((a, b), _)| (*b, *a)).collect::<Vec<_>>()
            })
            .min_by_key(Vec::len);
        match differing.as_deref() {
            Some([(known, now), ..]) => {
                format!("{operation}: a number of its kernel was {known} so far and is {now} now")
            }
            Some([]) => format!("{operation}: numbers that were equal so far are not"),
            None => format!("{operation}: its kernel has another form at this size"),
        }
    }
}

/// What function `position` of a step computes.
fn operation(planned: &Planned, position: usize) -> String {
    let kernel = planned.code.calls.iter().find_map(|call| match call {
        StepCall::Task { kernel, function, .. }
        | StepCall::Each { kernel, function, .. }
        | StepCall::Kernel { kernel, function, .. }
            if *function == position =>
        {
            Some(*kernel)
        }
        _ => None,
    });
    let report = kernel.map(|kernel| &planned.kernels[kernel]);
    report
        .and_then(|report| report.nodes.last())
        .map_or_else(String::new, |node| format!("{node} : {}", node.ty))
}
