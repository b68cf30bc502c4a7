//! Graphs of other sizes, which show what numbers of a step's functions vary.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_graph::{Graph, Line};

use super::state::State;
use super::stored::Built;
use super::unit::Unit;
use super::{Family, GRAPHS};
use crate::emit::calls::StepFunction;
use crate::error::CpuError;

/// Most sizes, about, that are sampled at once.
const SIZES: i64 = 128;

/// A dimension of an input that varies.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Varying {
    /// Position of the input among the graph's tensor parameters.
    pub input: usize,
    /// The dimension.
    pub dim: usize,
    /// Its extents.
    pub range: RangeInclusive<usize>,
}

impl Family {
    /// Builds templates for what is not known: of `graph`, whose functions are `units`, and of the samples around it.
    pub(super) fn learn(
        &self,
        state: &mut State,
        graph: &Graph,
        units: &[Arc<Unit>],
    ) -> Result<Built, CpuError> {
        let line = state
            .graphs
            .iter()
            .filter_map(|known| Line::through(known, graph))
            .min_by_key(Line::kinds);
        let mut graphs = state.graphs.clone();
        if let Some(line) = &line {
            let sizes = match state.learned {
                0 => sample_sizes(line.sizes()),
                _ => all_sizes(line.sizes()),
            };
            let others = sizes.into_iter().filter_map(|size| line.at(size));
            graphs.extend(others.filter(|graph| self.may_occur(graph)));
        }
        state.sampled.insert(graph.fingerprint());
        graphs.retain(|graph| state.sampled.insert(graph.fingerprint()));
        for functions in self.functions_of(&graphs) {
            let units = functions.iter().map(|function| state.units.keep(function));
            let units = units.collect();
            state.samples.push(units);
        }
        state.learned += 1;
        state.samples.push(units.to_vec());
        if state.graphs.len() < GRAPHS {
            state.graphs.push(graph.clone());
        }
        let templates = state.new_templates();
        let built = self.build(state, &graph.name, templates)?;
        self.list(graph, &built);
        Ok(built)
    }

    /// Whether all dimensions that vary are in their ranges.
    fn may_occur(&self, graph: &Graph) -> bool {
        self.varying.iter().all(|Varying { input, dim, range }| {
            let input = graph.parameters().get(*input);
            let extent = input.and_then(|&input| graph.shape(input).get(*dim));
            extent.is_none_or(|extent| range.contains(extent))
        })
    }

    /// The functions of `graphs`, which are planned side by side. Graphs that cannot be planned are left out.
    fn functions_of(&self, graphs: &[Graph]) -> Vec<Vec<StepFunction>> {
        let next = AtomicUsize::new(0);
        let take = || -> Vec<(usize, Vec<StepFunction>)> {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(graph) = graphs.get(at) else { return done };
                if let Ok(planned) = self.plan(graph) {
                    done.push((at, planned.code.functions));
                }
            }
        };
        let mut all = std::thread::scope(|scope| {
            let others: Vec<_> = (1..self.build.jobs).map(|_| scope.spawn(take)).collect();
            let mut all = take();
            // A panic of a pass is not hidden: it comes again where the graph itself is planned.
            all.extend(others.into_iter().filter_map(|other| other.join().ok()).flatten());
            all
        });
        // Templates follow from the order.
        all.sort_unstable_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, functions)| functions).collect()
    }
}

/// Sizes at which a line is sampled: small and large ones, powers of two, odd and even ones.
fn sample_sizes((one, two): (i64, i64)) -> Vec<i64> {
    let most = one.max(two).max(16).unsigned_abs().next_power_of_two() as i64;
    let mut sizes = Vec::new();
    let mut power = 8.min(one.min(two).max(1));
    while power <= most {
        for sixteenth in [16, 17, 19, 21, 23, 25, 27, 29, 31] {
            sizes.push(power * sixteenth / 16 + i64::from(sixteenth % 4 == 3));
        }
        power *= 2;
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size != one && size != two);
    sizes
}

/// Sizes for a line of which a size had a form that no sample showed: all there are, or every few of many.
fn all_sizes((one, two): (i64, i64)) -> Vec<i64> {
    let most = 2 * one.max(two).max(16).unsigned_abs().next_power_of_two() as i64;
    let least = one.min(two).min(8);
    // An odd stride meets every remainder.
    let stride = ((most - least) / SIZES) | 1;
    (least..=most).step_by(stride.unsigned_abs() as usize).collect()
}
