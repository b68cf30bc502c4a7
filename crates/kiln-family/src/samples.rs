//! Graphs of other sizes, which show what numbers of a step's functions vary.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_graph::{Dimension, Graph, Line, Resizer};

use crate::family::Maker;
use crate::state::State;
use crate::template::{Found, Template};

/// Fewest and most sizes that are sampled at once, if a size lacks what no sample showed.
const SIZES: [usize; 2] = [12, 128];

/// How often samples are taken.
const ROUNDS: usize = 5;

/// Graphs of other batches that are sampled at once, at most.
const BATCHES: usize = 32;

/// Nodes of all these samples: planning as many takes a core some three seconds.
const NODES: usize = 200_000;

/// Most nodes of a graph that is sampled at six sizes between powers of two. A larger one is at four, because
/// planning takes long.
const LARGE: usize = 2000;

/// Characters of code that the second shape may bring for others than itself. A hundred thousand take a core
/// about a second.
const SECOND: usize = 64 << 10;

/// Characters of code that the third shape may bring for others.
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

/// Characters of code that a round of learning may bring for other shapes than the one that is wanted.
pub(crate) fn budget(round: usize, is_general: bool) -> usize {
    match round {
        // The caller knows which sizes come.
        _ if is_general => THIRD,
        0 => SECOND,
        1..ROUNDS => THIRD,
        _ => 0,
    }
}

/// Takes samples for a graph that has functions which are not known, as many as its family's round asks for.
pub(crate) fn take<M: Maker>(state: &mut State<M>, maker: &M, graph: &Graph) {
    let nodes = graph.num_nodes();
    match state.learned {
        0 => sample(state, maker, graph, |sizes, _| sample_sizes(sizes, nodes > LARGE)),
        round @ 1..ROUNDS => {
            let lines = |sizes, lines| more_sizes(sizes, NODES / nodes.max(1) / lines, round as i64);
            sample(state, maker, graph, lines);
        }
        _ => {}
    }
}

/// Takes samples: recorded graphs that are none yet, and others on the line through `graph` and one of
/// them. If several extents differ on it, they vary together and one at a time. `sizes` says which sizes
/// of a line are sampled, given the least and the largest recorded one and the number of lines.
fn sample<M: Maker>(
    state: &mut State<M>,
    maker: &M,
    graph: &Graph,
    sizes: impl Fn((i64, i64), usize) -> Vec<i64>,
) {
    let known = state.graphs.iter();
    let lines: Vec<(&Graph, Line)> = known
        .filter_map(|known| Some((known, Line::through(known, graph)?)))
        .collect();
    let varying = &state.varying;
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
            let sizes = match range(varying, known, graph, line.sizes()) {
                Some(range) => spread(range, sizes.len(), 0),
                None => sizes,
            };
            let others = sizes.into_iter().filter_map(|size| line.at(size));
            graphs.extend(others.filter(|graph| may_occur(varying, graph)));
        }
        if state.learned > 0 {
            graphs.extend(other_batches(known, graph, state.learned));
        }
    }
    graphs.append(&mut state.expected);
    let own = graph.fingerprint();
    graphs.retain(|graph| graph.fingerprint() != own && state.sampled.insert(graph.fingerprint()));
    for functions in functions_of(maker, &graphs) {
        let units = state.keep_all(&functions);
        state.samples.push(units);
    }
}

/// Graphs of smaller batches than `graph`, which differs from `known` in other extents: the last batch of
/// an epoch is smaller, and what was learned by then is to suffice. A batch is the first dimension of an
/// input of which another dimension has varied.
fn other_batches(known: &Graph, graph: &Graph, round: usize) -> Vec<Graph> {
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
fn range(varying: &[Varying], one: &Graph, two: &Graph, sizes: (i64, i64)) -> Option<(i64, i64)> {
    let range = varying.iter().find(|it| {
        let extent = |graph| it.extent(graph).map(|extent| extent as i64);
        extent(one) == Some(sizes.0) && extent(two) == Some(sizes.1)
    });
    // Larger sizes than that are in no memory.
    let bound = |extent: usize| extent.min(1 << 40) as i64;
    range.map(|Varying { range, .. }| (bound(*range.start()), bound(*range.end())))
}

/// Whether all dimensions that vary are in their ranges.
fn may_occur(varying: &[Varying], graph: &Graph) -> bool {
    varying
        .iter()
        .all(|it| it.extent(graph).is_none_or(|extent| it.range.contains(&extent)))
}

/// The functions of `graphs`, which are planned side by side. Graphs that cannot be planned are left out.
fn functions_of<M: Maker>(maker: &M, graphs: &[Graph]) -> Vec<Vec<M::Function>> {
    let next = AtomicUsize::new(0);
    let take = || -> Vec<(usize, Vec<M::Function>)> {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(graph) = graphs.get(at) else { return done };
            if let Ok(planned) = maker.plan(graph) {
                done.push((at, M::into_functions(planned)));
            }
        }
    };
    let mut all = std::thread::scope(|scope| {
        let others: Vec<_> = (1..maker.jobs().min(graphs.len()))
            .map(|_| scope.spawn(take))
            .collect();
        let mut all = take();
        // A panic of a pass is not hidden: it comes again where the graph itself is planned.
        all.extend(others.into_iter().filter_map(|other| other.join().ok()).flatten());
        all
    });
    // Templates follow from the order.
    all.sort_unstable_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, functions)| functions).collect()
}

/// The templates that are `wanted`, and of the others, those of most samples first, as many as have `budget`
/// characters.
pub(crate) fn within<M: Maker>(
    budget: usize,
    found: Vec<Found<M::Function>>,
    wanted: impl Fn(&Template<M::Function>) -> bool,
) -> Vec<Template<M::Function>> {
    let length = |template: &Template<M::Function>| M::characters(&template.base.function);
    let (mut templates, mut others): (Vec<_>, Vec<_>) =
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
