//! Graphs of other sizes, which show what numbers of a step's functions vary.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kiln_graph::{Graph, Line};

use super::state::State;
use super::stored::Built;
use super::template::{Found, Template};
use super::unit::Unit;
use super::{Family, GRAPHS};
use crate::emit::calls::StepFunction;
use crate::error::CpuError;

/// Most sizes that are sampled at once, and the fewest, if a size lacks what no sample showed.
const SIZES: [usize; 2] = [16, 128];

/// Nodes of all these samples: planning as many takes a core some three seconds.
const NODES: usize = 200_000;

/// Most nodes of a graph that is sampled at six sizes between powers of two. A larger one is at four, because planning
/// takes long.
const LARGE: usize = 2000;

/// Characters of C that the second shape may bring for others than itself. A hundred thousand take a core about a
/// second.
const SECOND: usize = 64 << 10;

/// Characters of C that the third shape may bring for others.
const THIRD: usize = 1 << 20;

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

impl Varying {
    /// The extent of the dimension in `graph`.
    fn extent(&self, graph: &Graph) -> Option<usize> {
        let input = graph.parameters().get(self.input)?;
        graph.shape(*input).get(self.dim).copied()
    }
}

impl Family {
    /// Builds templates for what is not known of `graph`, whose functions are `units`, and for samples as far as these
    /// are few or likely to be wanted soon.
    pub(super) fn learn(
        &self,
        state: &mut State,
        graph: &Graph,
        units: &[Arc<Unit>],
    ) -> Result<Built, CpuError> {
        let start = Instant::now();
        let is_general = !state.expected.is_empty();
        match state.learned {
            0 => self.sample(state, graph, |sizes| {
                sample_sizes(sizes, graph.num_nodes() > LARGE)
            }),
            1 => self.sample(state, graph, |sizes| {
                all_sizes(sizes, NODES / graph.num_nodes().max(1))
            }),
            _ => {}
        }
        state.sampled.insert(graph.fingerprint());
        state.samples.push(units.to_vec());
        if state.graphs.len() < GRAPHS {
            state.graphs.push(graph.clone());
        }
        let budget = match state.learned {
            // The caller knows which sizes come.
            _ if is_general => THIRD,
            0 => SECOND,
            1 => THIRD,
            _ => 0,
        };
        let templates = within(budget, state.new_templates(), |template| {
            units
                .iter()
                .any(|unit| state.find(unit).is_none() && template.fits(unit))
        });
        state.learned += 1;
        let sample_time = start.elapsed();
        let mut built = self.build(state, &graph.name, templates)?;
        built.sample_time = sample_time;
        self.list(graph, &built);
        Ok(built)
    }

    /// Takes samples: recorded graphs that are none yet, and others on the line through `graph` and one of them.
    fn sample(&self, state: &mut State, graph: &Graph, sizes: impl Fn((i64, i64)) -> Vec<i64>) {
        let lines = state.graphs.iter();
        let lines = lines.filter_map(|known| Some((known, Line::through(known, graph)?)));
        let line = lines.min_by_key(|(_, line)| line.kinds());
        let mut graphs = state.graphs.clone();
        if let Some((known, line)) = &line {
            let sizes = match self.range(known, graph, line.sizes()) {
                Some(range) => spread(range, sizes(line.sizes()).len()),
                None => sizes(line.sizes()),
            };
            let others = sizes.into_iter().filter_map(|size| line.at(size));
            graphs.extend(others.filter(|graph| self.may_occur(graph)));
        }
        graphs.append(&mut state.expected);
        let own = graph.fingerprint();
        graphs.retain(|graph| graph.fingerprint() != own && state.sampled.insert(graph.fingerprint()));
        for functions in self.functions_of(&graphs) {
            let units = functions.iter().map(|function| state.units.keep(function));
            let units = units.collect();
            state.samples.push(units);
        }
    }

    /// The range of the dimension that is `sizes` in two graphs.
    fn range(&self, one: &Graph, two: &Graph, sizes: (i64, i64)) -> Option<(i64, i64)> {
        let range = self.varying.iter().find(|it| {
            let extent = |graph| it.extent(graph).map(|extent| extent as i64);
            extent(one) == Some(sizes.0) && extent(two) == Some(sizes.1)
        });
        // Larger sizes than that are in no memory.
        let bound = |extent: usize| extent.min(1 << 40) as i64;
        range.map(|Varying { range, .. }| (bound(*range.start()), bound(*range.end())))
    }

    /// Whether all dimensions that vary are in their ranges.
    fn may_occur(&self, graph: &Graph) -> bool {
        self.varying
            .iter()
            .all(|it| it.extent(graph).is_none_or(|extent| it.range.contains(&extent)))
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

/// The templates that are `wanted`, and of the others, those of most samples first, as many as have `budget`
/// characters.
fn within(budget: usize, found: Vec<Found>, wanted: impl Fn(&Template) -> bool) -> Vec<Template> {
    let length = |template: &Template| template.base.function.text.len();
    let (mut templates, mut others): (Vec<Found>, Vec<Found>) =
        found.into_iter().partition(|it| wanted(&it.template));
    others.sort_by_key(|it| std::cmp::Reverse(it.samples));
    let mut left = budget;
    templates.extend(others.into_iter().take_while(|it| {
        let fits = length(&it.template) <= left;
        left = left.saturating_sub(length(&it.template));
        fits
    }));
    templates.into_iter().map(|it| it.template).collect()
}

/// Sizes at which a line is sampled: small and large ones, powers of two, odd and even ones.
fn sample_sizes((one, two): (i64, i64), few: bool) -> Vec<i64> {
    let most = one.max(two).max(16).unsigned_abs().next_power_of_two() as i64;
    let least = (one.min(two) / 4).max(one.min(two).clamp(1, 8));
    let mut sizes = Vec::new();
    let mut power = 1 << least.ilog2();
    while power <= most {
        let sixteenths: &[i64] = if few {
            &[16, 19, 25, 29]
        } else {
            &[16, 17, 19, 22, 25, 29]
        };
        for sixteenth in sixteenths {
            sizes.push(power * sixteenth / 16 + i64::from(*sixteenth == 19));
        }
        power *= 2;
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size != one && size != two);
    sizes
}

/// About `count` sizes of a range, from its start.
fn spread((least, most): (i64, i64), count: usize) -> Vec<i64> {
    // An odd stride meets every remainder.
    let stride = ((most - least).max(0) / count.max(1) as i64) | 1;
    (least..=most).step_by(stride.unsigned_abs() as usize).collect()
}

/// Sizes for a line of which a size had a form that no sample showed: all there are, or about `count` of them.
fn all_sizes((one, two): (i64, i64), count: usize) -> Vec<i64> {
    let most = 2 * one.max(two).max(16).unsigned_abs().next_power_of_two() as i64;
    let least = one.min(two).min(8);
    spread((least, most), count.clamp(SIZES[0], SIZES[1]))
}
