//! Graphs of other sizes, which show what numbers of a step's functions vary.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kiln_graph::{Dimension, Graph, Line, Resizer};

use super::state::State;
use super::stored::Built;
use super::template::{Found, Template};
use super::unit::Unit;
use super::{Family, GRAPHS};
use crate::emit::calls::StepFunction;
use crate::error::CpuError;

/// Fewest and most sizes that are sampled at once, if a size lacks what no sample showed.
const SIZES: [usize; 2] = [12, 128];

/// How often samples are taken.
const ROUNDS: usize = 5;

/// Graphs of other batches that are sampled at once, at most.
const BATCHES: usize = 32;

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

/// What building the functions of a step took.
pub(super) struct Learned {
    /// Time of finding the templates.
    pub sample_time: Duration,
    /// Time of the C compiler; zero if the cache had everything.
    pub build_time: Duration,
    /// Whether the cache had everything.
    pub from_cache: bool,
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
    ) -> Result<Learned, CpuError> {
        let start = Instant::now();
        let is_general = !state.expected.is_empty();
        let nodes = graph.num_nodes();
        match state.learned {
            0 => self.sample(state, graph, |sizes, _| sample_sizes(sizes, nodes > LARGE)),
            round @ 1..ROUNDS => {
                let lines = |sizes, lines| more_sizes(sizes, NODES / nodes.max(1) / lines, round as i64);
                self.sample(state, graph, lines);
            }
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
            1..ROUNDS => THIRD,
            _ => 0,
        };
        let templates = within(budget, state.new_templates(), |template| {
            units
                .iter()
                .any(|unit| state.find(unit).is_none() && template.fits(unit))
        });
        state.learned += 1;
        let sample_time = start.elapsed();
        let mut built = self.build_accepted(state, &graph.name, templates)?;
        let constants = constants(state, units);
        if !constants.is_empty() {
            built.push(self.build(state, &graph.name, constants)?);
        }
        built.iter().for_each(|built| self.list(graph, built));
        Ok(Learned {
            sample_time,
            build_time: built.iter().map(|built| built.elapsed).sum(),
            from_cache: built.iter().all(|built| built.from_cache),
        })
    }

    /// Builds `templates`, except those that the C compiler rejects: numbers are constants in the functions
    /// that these stand for, and all others are as they would be without them.
    fn build_accepted(
        &self,
        state: &mut State,
        name: &str,
        mut templates: Vec<Template>,
    ) -> Result<Vec<Built>, CpuError> {
        templates.retain(|template| !state.is_rejected(&template.pattern));
        if templates.is_empty() {
            return Ok(Vec::new());
        }
        let (file, stderr) = match self.build(state, name, templates.clone()) {
            Err(CpuError::Compile { file, stderr, .. }) => (file, stderr),
            built => return Ok(vec![built?]),
        };
        if let [template] = &templates[..] {
            tracing::warn!(target: "kiln::family", file, stderr, "a function with variables does not compile");
            state.rejected.insert(template.pattern.skeleton);
            return Ok(Vec::new());
        }
        let others = templates.split_off(templates.len() / 2);
        let mut built = self.build_accepted(state, name, templates)?;
        built.extend(self.build_accepted(state, name, others)?);
        Ok(built)
    }

    /// Takes samples: recorded graphs that are none yet, and others on the line through `graph` and one of
    /// them. If several extents differ on it, they vary together and one at a time. `sizes` says which sizes
    /// of a line are sampled, given the least and the largest recorded one and the number of lines.
    fn sample(&self, state: &mut State, graph: &Graph, sizes: impl Fn((i64, i64), usize) -> Vec<i64>) {
        let known = state.graphs.iter();
        let lines: Vec<(&Graph, Line)> = known
            .filter_map(|known| Some((known, Line::through(known, graph)?)))
            .collect();
        let mut graphs = state.graphs.clone();
        if let Some((known, line)) = lines.iter().min_by_key(|(_, line)| line.kinds()) {
            let alike = lines.iter().filter(|(_, other)| other.kinds() == line.kinds());
            let recorded: Vec<i64> = alike.flat_map(|(_, it)| <[i64; 2]>::from(it.sizes())).collect();
            let (one, two) = line.sizes();
            let least = recorded.iter().fold(one.min(two), |a, b| a.min(*b));
            let most = recorded.iter().fold(one.max(two), |a, b| a.max(*b));
            let mut among = vec![(line.clone(), (least, most))];
            if line.kinds() > 1 {
                among.extend(line.of_each_kind().map(|line| (line.clone(), line.sizes())));
            }
            for (line, recorded) in &among {
                let sizes = sizes(*recorded, among.len());
                let sizes = match self.range(known, graph, line.sizes()) {
                    Some(range) => spread(range, sizes.len(), 0),
                    None => sizes,
                };
                let others = sizes.into_iter().filter_map(|size| line.at(size));
                graphs.extend(others.filter(|graph| self.may_occur(graph)));
            }
            if state.learned > 0 {
                graphs.extend(self.other_batches(known, graph, state.learned));
            }
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

    /// Graphs of smaller batches than `graph`, which differs from `known` in other extents: the last batch of
    /// an epoch is smaller, and what was learned by then is to suffice. A batch is the first dimension of an
    /// input of which another dimension has varied.
    fn other_batches(&self, known: &Graph, graph: &Graph, round: usize) -> Vec<Graph> {
        let parameters = known.parameters().iter().zip(graph.parameters()).enumerate();
        let mut varied: Vec<(Dimension, [usize; 2])> = Vec::new();
        let mut batch: Option<Dimension> = None;
        for (parameter, (&a, &b)) in parameters {
            let (a, b) = (known.shape(a), graph.shape(b));
            for axis in (0..a.rank()).filter(|&axis| a[axis] != b[axis]) {
                let parameter = parameter as u32;
                varied.push((Dimension { parameter, axis }, [a[axis], b[axis]]));
                if axis > 0 && a[0] == b[0] && b[0] > 1 {
                    batch = Some(Dimension { parameter, axis: 0 });
                }
            }
        }
        let (Some(batch), Some(&(_, [one, two]))) = (batch, varied.first()) else {
            return Vec::new();
        };
        let resizer = Resizer::new(graph, &vec![true; graph.parameters().len()]);
        // All dimensions that follow one size have it.
        varied.retain(|(_, sizes)| *sizes == [one, two]);
        let own = graph.shape(graph.parameters()[batch.parameter as usize])[0];
        let batches: Vec<usize> = (2..own).collect();
        if batches.is_empty() {
            return Vec::new();
        }
        let count = BATCHES.min(NODES / 2 / graph.num_nodes().max(1));
        let sizes = more_sizes((one as i64, two as i64), count, round as i64);
        let pairs = sizes.into_iter().enumerate().map(|(number, size)| {
            // Every other turn through the batches meets lengths that are whole vectors.
            let size = match number / batches.len() % 2 {
                0 => size as usize,
                _ => (size as usize).next_multiple_of(8),
            };
            (size, batches[(number + round) % batches.len()])
        });
        pairs
            .filter_map(|(size, count)| {
                let mut sizes: Vec<(Dimension, usize)> =
                    varied.iter().map(|&(dimension, _)| (dimension, size)).collect();
                sizes.push((batch, count));
                resizer.at(&sizes).ok()
            })
            .collect()
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

/// The functions of `units` that nothing stands for, with their numbers as constants.
fn constants(state: &State, units: &[Arc<Unit>]) -> Vec<Template> {
    let mut constants: Vec<Template> = Vec::new();
    for unit in units.iter().filter(|unit| state.find(unit).is_none()) {
        if !constants.iter().any(|template| template.fits(unit)) {
            constants.push(Template::constant(unit));
        }
    }
    constants
}

/// The templates that are `wanted`, and of the others, those of most samples first, as many as have `budget`
/// characters.
fn within(budget: usize, found: Vec<Found>, wanted: impl Fn(&Template) -> bool) -> Vec<Template> {
    let length = |template: &Template| template.base.function.text.len();
    let (mut templates, mut others): (Vec<Found>, Vec<Found>) =
        found.into_iter().partition(|it| wanted(&it.template));
    others.sort_by_key(|it| std::cmp::Reverse(it.samples));
    let mut left = budget;
    tracing::debug!(
        target: "kiln::family",
        wanted = templates.len(),
        others = others.len(),
        characters = others.iter().map(|it| length(&it.template)).sum::<usize>(),
        budget,
        "templates"
    );
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

/// About `count` sizes of a range, from `skip` behind its start.
fn spread((least, most): (i64, i64), count: usize, skip: i64) -> Vec<i64> {
    // An odd stride meets every remainder.
    let stride = ((most - least).max(0) / count.max(1) as i64) | 1;
    let first = least + skip % stride;
    (first..=most).step_by(stride.unsigned_abs() as usize).collect()
}

/// Sizes for a line of which a size had a form that no sample showed: all around it, or about `count` of
/// them, others in each round.
fn more_sizes((one, two): (i64, i64), count: usize, round: i64) -> Vec<i64> {
    let (least, most) = ((one.min(two) / 2).clamp(1, 8), 2 * one.max(two).max(16));
    spread((least, most), count.clamp(SIZES[0], SIZES[1]), round - 1)
}

#[cfg(test)]
mod tests {
    use kiln_compiler::Options;

    use super::*;
    use crate::build::{BuildOptions, OptLevel, Toolchain};
    use crate::cache::Cache;
    use crate::emit::calls::Convention;
    use crate::emit::tree::FileGroup;
    use crate::target::CpuTarget;

    /// A function of a number, after `before`.
    fn function(before: &str, number: i64) -> StepFunction {
        StepFunction {
            kind: "fill".to_owned(),
            part: FileGroup::Forward,
            text: format!(
                "void @(void *ctx, int64_t begin, int64_t end, int thread) {{\n    float *to = *(float **)ctx;\n    (void)thread;\n    \
                 {before}\n    for (int64_t i = begin; i < end; i++)\n        to[i] = {number};\n}}\n"
            ),
            helpers: Vec::new(),
            convention: Convention::Task(1),
        }
    }

    /// A function that needs its number when it is compiled is the only one that is compiled for each size.
    #[test]
    fn a_template_that_does_not_compile_leaves_the_others() {
        let toolchain = Toolchain::detect().unwrap();
        let build = BuildOptions {
            level: OptLevel::Quick,
            ..BuildOptions::default()
        };
        let target = CpuTarget::new(&toolchain, 1);
        let family = Family::new(
            &Options::default(),
            &target,
            &toolchain,
            &Cache::disabled(),
            &build,
        );
        let graph = Graph::new("step");
        let mut state = State::default();
        let units = |state: &mut State, number: i64| -> Vec<Arc<Unit>> {
            let asserted = function(&format!("_Static_assert({number} > 0, \"\");"), number);
            let functions = [
                function("end -= 0;", number),
                asserted,
                function("begin += 0;", number),
            ];
            functions
                .iter()
                .map(|function| state.units.keep(function))
                .collect()
        };
        let first = units(&mut state, 1000);
        state.samples.push(first);
        let second = units(&mut state, 1001);
        family.learn(&mut state, &graph, &second).unwrap();
        assert!(second.iter().all(|unit| state.find(unit).is_some()));
        assert_eq!(state.rejected.len(), 1);
        for number in [1002, 1003] {
            let other = units(&mut state, number);
            let known: Vec<bool> = other.iter().map(|unit| state.find(unit).is_some()).collect();
            assert_eq!(known, [true, false, true]);
            let builds = state.stats.builds;
            family.learn(&mut state, &graph, &other).unwrap();
            assert_eq!(state.stats.builds, builds + 1);
            assert!(other.iter().all(|unit| state.find(unit).is_some()));
        }
    }
}
