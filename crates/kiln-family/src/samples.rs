//! Graphs of other sizes, which show what numbers of a step's functions vary.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_graph::{Dimension, Graph, Line, Resizer};
use num_integer::gcd;

use crate::family::Maker;
use crate::state::State;
use crate::template::{Found, Sample, Template};

/// Fewest and most sizes that are sampled at once, if a size lacks what no sample showed.
const SIZES: [usize; 2] = [12, 128];

/// How often samples are taken.
const ROUNDS: usize = 5;

/// Graphs of other batches that are sampled at once, at most.
const BATCHES: usize = 48;

/// Sizes at which a batch is sampled: 32nds of the largest size of all samples, which is twice the largest
/// one that was recorded, and the largest power of two that divides the size (0 for any even size). Odd sizes
/// leave a part of a vector; vectors have up to 16 elements, and kernels take them in pairs.
const PLACES: [(i64, i64); 8] = [
    (15, 1),
    (14, 0),
    (8, 1),
    (26, 0),
    (4, 1),
    (13, 8),
    (12, 16),
    (11, 32),
];

/// What a sample stands for that stands for one size, between those that were recorded.
pub(crate) const WHOLE: usize = 16;

/// How much likelier a size is to come that has the factor of all recorded ones: pictures are scaled to
/// multiples of 32, and sentences padded to multiples of 8.
const LIKELIER: i64 = 4;

/// The least common factor of recorded sizes that is taken for no accident.
const COMMON: i64 = 4;

/// Nodes of all these samples: planning as many takes a core some three seconds.
const NODES: usize = 200_000;

/// Characters of the functions of all samples of a round, after which no more are taken. A core plans and
/// compares some five million in a second.
const TEXT: usize = 256 << 20;

/// Samples that are planned before their characters are counted, so that it does not depend on the number of
/// threads which ones are taken.
const AT_ONCE: usize = 16;

/// Most nodes of a graph that is sampled at six sizes between powers of two. A larger one is at four, because
/// planning takes long.
const LARGE: usize = 2000;

/// Characters of code that the second shape may bring for others than itself. A hundred thousand take a core
/// about a second.
const SECOND: usize = 64 << 10;

/// Characters of code that the third shape may bring for others: some 25 seconds of a core, and the forms of
/// resnet18 at all sizes of pictures.
const THIRD: usize = 5 << 19;

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
    let alone = |graph| Chosen { graph, share: WHOLE };
    let mut chosen: Vec<Chosen> = state.graphs.iter().cloned().map(alone).collect();
    let mut other = Vec::new();
    if let Some((known, line)) = lines.iter().min_by_key(|(_, line)| line.kinds()) {
        let alike = lines.iter().filter(|(_, other)| other.kinds() == line.kinds());
        let recorded = alike.flat_map(|(_, it)| <[i64; 2]>::from(it.sizes()));
        let recorded = Recorded::of(recorded.chain(<[i64; 2]>::from(line.sizes())));
        let sizes_in_range = |pair: (i64, i64), recorded: Recorded, lines: usize| {
            let mut sizes = sizes((recorded.least, recorded.most), lines);
            match range(varying, known, graph, pair) {
                Some(range) => spread(range, sizes.len(), 0),
                None => {
                    let more = recorded.multiples(sizes.len() / 2);
                    sizes.extend(more);
                    sizes.sort_unstable();
                    sizes.dedup();
                    sizes
                }
            }
        };
        let of_pair = |sizes: (i64, i64)| Recorded::of(<[i64; 2]>::from(sizes).into_iter());
        let mut among = vec![(line.clone(), recorded)];
        if line.kinds() > 1 {
            among.extend(
                line.of_each_kind()
                    .map(|line| (line.clone(), of_pair(line.sizes()))),
            );
        }
        for (line, recorded) in &among {
            let sizes = sizes_in_range(line.sizes(), *recorded, among.len());
            let others = with_shares(&sizes, *recorded).filter_map(|(size, share)| {
                let graph = line.at(size)?;
                Some(Chosen { graph, share })
            });
            other.extend(others.filter(|it| may_occur(varying, &it.graph)));
        }
        let batches = Batches::of(known, graph).filter(|_| state.learned > 0);
        if let Some(batches) = batches {
            let recorded = match batches.lengths == line.sizes() {
                true => recorded,
                false => of_pair(batches.lengths),
            };
            let sizes = sizes_in_range(batches.lengths, recorded, 1);
            let others = batches.others(graph, line, &sizes, state.learned);
            other.extend(others.into_iter().filter(|it| may_occur(varying, &it.graph)));
        }
    }
    chosen.extend(std::mem::take(&mut state.expected).into_iter().map(alone));
    let own = graph.fingerprint();
    let mut is_new = |it: &Chosen| {
        let fingerprint = it.graph.fingerprint();
        fingerprint != own && state.sampled.insert(fingerprint)
    };
    chosen.retain(&mut is_new);
    let certain = chosen.len();
    chosen.extend(other.into_iter().filter(is_new));
    plan_samples(state, maker, &chosen, certain);
}

/// Plans the first `certain` graphs, and of the others as many as [`TEXT`] allows, from all lines.
fn plan_samples<M: Maker>(state: &mut State<M>, maker: &M, chosen: &[Chosen], certain: usize) {
    let mut order: Vec<usize> = (0..chosen.len()).collect();
    // Multiples of the golden ratio lie evenly.
    order[certain..].sort_by_key(|&at| (at as u32).wrapping_mul(0x9e37_79b9));
    let mut planned = Vec::new();
    let mut characters = 0;
    for some in order.chunks(AT_ONCE) {
        for (at, functions) in functions_of(maker, chosen, some) {
            characters += functions.iter().map(M::characters).sum::<usize>();
            planned.push((at, state.keep_all(&functions)));
        }
        if characters > TEXT && planned.len() >= certain {
            break;
        }
    }
    tracing::debug!(target: "kiln::family", samples = planned.len(), of = chosen.len(), characters, "planned");
    // Templates follow from the order.
    planned.sort_unstable_by_key(|(at, _)| *at);
    for (at, units) in planned {
        let share = chosen[at].share;
        state.samples.push(Sample { units, share });
    }
}

/// A graph that is sampled.
struct Chosen {
    graph: Graph,
    /// How many sizes it stands for ([`with_shares`]).
    share: usize,
}

/// The sizes that were recorded, of one line.
#[derive(Debug, Clone, Copy)]
struct Recorded {
    least: i64,
    most: i64,
    /// The largest factor of all; 1 if that is less than [`COMMON`].
    factor: i64,
}

impl Recorded {
    fn of(mut sizes: impl Iterator<Item = i64>) -> Self {
        let first = sizes.next().unwrap_or(1).max(1);
        let mut all = Self {
            least: first,
            most: first,
            factor: first,
        };
        for size in sizes.map(|size| size.max(1)) {
            all = Self {
                least: all.least.min(size),
                most: all.most.max(size),
                factor: gcd(all.factor, size),
            };
        }
        if all.factor < COMMON {
            all.factor = 1;
        }
        all
    }

    /// Multiples of the common factor up to twice the largest size, then those of its half, its quarter and
    /// so on: at most `count` of them, of each step the nearest ones to those recorded.
    fn multiples(self, count: usize) -> Vec<i64> {
        let mut all: Vec<i64> = Vec::new();
        let mut step = self.factor;
        while step >= COMMON && all.len() < count {
            let sizes = self.nearest(step).filter(|size| !all.contains(size));
            let sizes: Vec<i64> = sizes.take(count - all.len()).collect();
            all.extend(sizes);
            step /= 2;
        }
        all
    }

    /// Multiples of `step` up to twice the largest size: those between the sizes that were recorded, then
    /// from these outward, of two that are as near the smaller one first.
    fn nearest(self, step: i64) -> impl Iterator<Item = i64> {
        let Self { least, most, .. } = self;
        let (first, last) = ((least + step - 1) / step, most / step);
        let mut below = (1..first).rev().map(move |it| it * step).peekable();
        let mut above = (last + 1..=2 * most / step).map(move |it| it * step).peekable();
        let outside = std::iter::from_fn(move || match (below.peek(), above.peek()) {
            (Some(less), Some(more)) if least - less > more - most => above.next(),
            (Some(_), _) => below.next(),
            _ => above.next(),
        });
        (first..=last).map(move |it| it * step).chain(outside)
    }

    /// How many sizes a size stands for that comes so far behind the sampled one before it.
    fn stands_for(self, size: i64, gap: u64) -> usize {
        let shared = gcd(size, self.factor);
        let expected = match shared {
            COMMON.. => shared * shared * LIKELIER / self.factor,
            _ => 0,
        };
        (gap as usize).max(expected as usize)
    }
}

/// Ascending sizes, each with the number of sizes that it stands for, as a multiple of [`WHOLE`]: those
/// behind the one before. A size counts less the farther it is from those that were recorded, and more if it
/// shares their common factor: few sizes between two multiples of that are expected.
fn with_shares(sizes: &[i64], recorded: Recorded) -> impl Iterator<Item = (i64, usize)> {
    let before = sizes.first().map(|first| first - 1);
    let before = before.into_iter().chain(sizes.iter().copied());
    let pairs = sizes.iter().copied().zip(before);
    pairs.map(move |(size, before)| {
        let nearest = size.clamp(recorded.least, recorded.most);
        let [less, more] = [size.min(nearest), size.max(nearest)].map(|it| it.max(1) as usize);
        let stands = recorded.stands_for(size, size.abs_diff(before));
        (size, (WHOLE * stands).saturating_mul(less) / more)
    })
}

/// Which dimensions of inputs are a batch, and which follow another size.
struct Batches {
    /// The batch.
    batch: Dimension,
    /// Its size in two graphs.
    sizes: [usize; 2],
    /// The other size in these.
    lengths: (i64, i64),
    /// Dimensions of the other size, and whether each is that times the batch.
    follow: Vec<(Dimension, bool)>,
}

impl Batches {
    /// Those of two graphs that differ in another size; none if no input has both.
    fn of(known: &Graph, graph: &Graph) -> Option<Self> {
        let parameters = known.parameters().iter().zip(graph.parameters()).enumerate();
        let mut varied: Vec<(Dimension, [usize; 2])> = Vec::new();
        let mut found: Option<(Dimension, [usize; 2], [usize; 2])> = None;
        for (parameter, (&a, &b)) in parameters {
            let (a, b) = (known.shape(a), graph.shape(b));
            let parameter = parameter as u32;
            for axis in (0..a.rank()).filter(|&axis| a[axis] != b[axis]) {
                let sizes = [a[axis], b[axis]];
                varied.push((Dimension { parameter, axis }, sizes));
                if axis > 0 && a[0].min(b[0]) > 1 && found.is_none() {
                    found = Some((Dimension { parameter, axis: 0 }, [a[0], b[0]], sizes));
                }
            }
        }
        let (batch, batches, lengths) = found?;
        let products = [0, 1].map(|at| batches[at] * lengths[at]);
        // All dimensions that follow one size have it.
        let follow = varied.into_iter().filter_map(|(dimension, sizes)| {
            let per_batch = sizes == products;
            (per_batch || sizes == lengths).then_some((dimension, per_batch))
        });
        Some(Self {
            batch,
            sizes: batches,
            lengths: (lengths[0] as i64, lengths[1] as i64),
            follow: follow.collect(),
        })
    }

    /// Graphs of other batches than that of `graph`, which is on `line`: the last batch of an epoch is
    /// smaller, and what was learned by then is to suffice. All up to the largest one are sampled if batches
    /// have varied, too. Each is at some of `sizes`: where the line has the form of a kernel with one batch,
    /// another one shows which of its numbers follow the batch.
    fn others(&self, graph: &Graph, line: &Line, sizes: &[i64], round: usize) -> Vec<Chosen> {
        let batches: Vec<usize> = match self.sizes {
            [one, own] if one == own => (2..own).collect(),
            [one, own] => (2..=one.max(own)).collect(),
        };
        // What a program computes from the other size itself, such as the weight of a mean, follows it on the
        // line alone.
        let joint = std::iter::once(line.clone()).filter(|_| self.sizes[0] == self.sizes[1]);
        let line = joint
            .chain(line.of_each_kind())
            .find(|line| line.sizes() == self.lengths);
        let count = (NODES / graph.num_nodes().max(1)).clamp(SIZES[0], BATCHES);
        pairs(&batches, sizes, count, round)
            .into_iter()
            .filter_map(|(batch, size)| {
                let follow = self
                    .follow
                    .iter()
                    .map(|&(dimension, per_batch)| (dimension, if per_batch { size * batch } else { size }));
                let sizes: Vec<(Dimension, usize)> = follow.chain([(self.batch, batch)]).collect();
                let base = line.as_ref().and_then(|line| line.at(size as i64));
                let base = base.as_ref().unwrap_or(graph);
                let resizer = Resizer::new(base, &vec![true; base.parameters().len()]);
                let graph = resizer.at(&sizes).ok()?;
                Some(Chosen { graph, share: WHOLE })
            })
            .collect()
    }
}

/// Each of `batches`, or some of many, with some of `sizes`, which ascend: about `count` pairs, others in
/// each round.
///
/// A kernel that is unrolled has a text of its own for each batch, and another form from some size on, from
/// twice that, where a size is odd and where vectors are whole. So a batch is sampled at several places.
fn pairs(batches: &[usize], sizes: &[i64], count: usize, round: usize) -> Vec<(usize, usize)> {
    let Some(&most) = sizes.last() else {
        return Vec::new();
    };
    let some = batches.iter().step_by(batches.len().div_ceil(count).max(1));
    let each = (count / batches.len().max(1)).clamp(1, PLACES.len());
    let all = some.enumerate().flat_map(|(number, &batch)| {
        // Of many batches, each has other places.
        let first = if each < PLACES.len() { number + round } else { 0 };
        (first..first + each).filter_map(move |at| {
            let (parts, factor) = PLACES[at % PLACES.len()];
            // Batches have different sizes: what is equal wherever a form is seen looks like a constant.
            let wanted = most * parts / 32 * (32 - (number + round) as i64 % 4) / 32;
            let alike = sizes.iter().filter(|&size| size & 1 == factor & 1);
            let shared = |size: i64| 1 << size.trailing_zeros();
            let nearest = alike.min_by_key(|&&size| (shared(size) != factor, size.abs_diff(wanted)))?;
            Some((batch, *nearest as usize))
        })
    });
    all.collect()
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

/// The functions of some graphs, which are planned side by side, each with its place. Graphs that cannot be
/// planned are left out.
fn functions_of<M: Maker>(maker: &M, chosen: &[Chosen], places: &[usize]) -> Vec<(usize, Vec<M::Function>)> {
    let next = AtomicUsize::new(0);
    let take = || -> Vec<(usize, Vec<M::Function>)> {
        let mut done = Vec::new();
        loop {
            let next = next.fetch_add(1, Ordering::Relaxed);
            let Some(&at) = places.get(next) else { return done };
            if let Ok(planned) = maker.plan(&chosen[at].graph) {
                done.push((at, M::into_functions(planned)));
            }
        }
    };
    let mut all = std::thread::scope(|scope| {
        let others: Vec<_> = (1..maker.jobs().min(places.len()))
            .map(|_| scope.spawn(take))
            .collect();
        let mut all = take();
        // A panic of a pass is not hidden: it comes again where the graph itself is planned.
        all.extend(others.into_iter().filter_map(|other| other.join().ok()).flatten());
        all
    });
    // Units are numbered as they come.
    all.sort_unstable_by_key(|(at, _)| *at);
    all
}

/// The templates that are `wanted`, and of the others as many as have `budget` characters: first those that
/// stand for functions of samples that nothing stands for yet, and of these, those of most sizes.
pub(crate) fn within<M: Maker>(
    budget: usize,
    found: Vec<Found<M::Function>>,
    wanted: impl Fn(&Template<M::Function>) -> bool,
) -> Vec<Template<M::Function>> {
    let length = |template: &Template<M::Function>| M::characters(&template.base.function);
    let (mut templates, mut others): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|it| wanted(&it.template));
    others.sort_by_key(|it| (it.is_spare, std::cmp::Reverse(it.share)));
    let mut left = budget;
    tracing::debug!(
        target: "kiln::family",
        wanted = templates.len(),
        others = others.len(),
        spare = others.iter().filter(|it| it.is_spare).count(),
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

/// Sizes for a line of which a size had a form that no sample showed: all around it, at most `count` of them,
/// others in each round.
///
/// Forms change where sizes grow by some factor (a device is full, a loop turns twice) and with the power of
/// two that divides a size. So sizes of each such power lie between any two powers of two, and not at equal
/// distances, which would leave out the small ones.
fn more_sizes((one, two): (i64, i64), count: usize, round: i64) -> Vec<i64> {
    let (least, most) = ((one.min(two) / 2).clamp(1, 4), 2 * one.max(two).max(16));
    let count = count.clamp(SIZES[0], SIZES[1]);
    if round > 1 {
        return spread((least, most), count, round - 1);
    }
    let mut sizes = Vec::new();
    let mut power = 1 << least.ilog2();
    while power <= most {
        // The power itself and half as much again, odd sizes, and behind them one for each lower power that
        // may be the largest one to divide a size.
        for (sixteenths, divisor, rest) in [
            (16, 1, 0),
            (18, 4, 2),
            (20, 8, 4),
            (22, 16, 8),
            (23, 2, 1),
            (24, 8, 0),
            (26, 32, 16),
            (27, 2, 1),
            (30, 4, 2),
        ] {
            sizes.push(power * sixteenths / 16 / divisor * divisor + rest);
        }
        power *= 2;
    }
    sizes.retain(|size| (least..=most).contains(size));
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.len() > count {
        let all = sizes.len();
        return (0..count).map(|at| sizes[at * all / count]).collect();
    }
    // What else may be planned.
    sizes.extend(spread((least, most), count - sizes.len(), 0));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiples_of_what_sizes_have_in_common_are_expected() {
        let recorded = Recorded::of([64, 96, 128].into_iter());
        assert_eq!((recorded.least, recorded.most, recorded.factor), (64, 128, 32));
        let multiples = recorded.multiples(64);
        // All multiples of 32, nearest first, then those of 16.
        assert_eq!(multiples[..8], [64, 96, 128, 32, 160, 192, 224, 256]);
        assert_eq!(multiples[8..10], [80, 112]);
        assert!(multiples.iter().all(|size| size % 4 == 0));
        assert_eq!(recorded.multiples(3), [64, 96, 128]);
        // Two sizes without a multiple between them; those around are as near.
        let pair = Recorded {
            least: 46,
            most: 50,
            factor: 32,
        };
        assert_eq!(pair.multiples(2), [32, 64]);
        // Of long ones no more are made than are asked for.
        let long = Recorded::of([1_000_000_000, 1_000_000_004].into_iter());
        assert_eq!(
            long.multiples(4),
            [1_000_000_000, 1_000_000_004, 999_999_996, 1_000_000_008]
        );
        assert_eq!(long.multiples(1 << 10).len(), 1 << 10);
        let stands_for = |size| recorded.stands_for(size, 8);
        assert_eq!([160, 144, 136].map(stands_for), [128, 32, 8]);
    }

    #[test]
    fn sizes_without_a_factor_are_as_likely_as_any() {
        let recorded = Recorded::of([243, 259, 275].into_iter());
        assert_eq!(recorded.multiples(64), Vec::<i64>::new());
        assert_eq!(recorded.stands_for(256, 3), 3);
        // Two even sizes are an accident.
        assert_eq!(Recorded::of([6, 10].into_iter()).factor, 1);
    }

    /// Kernels take pairs of vectors of 8 or 16 elements, and have another form where one is left and where a
    /// part of one is. The last batch of an epoch may have any of these forms.
    #[test]
    fn a_smaller_batch_is_sampled_where_vectors_are_whole_and_where_not() {
        let sizes = more_sizes((243, 275), SIZES[1], 1);
        let pairs = pairs(&[2, 3, 4, 5, 6, 7], &sizes, BATCHES, 2);
        for batch in 2..8 {
            let of_batch = pairs.iter().filter(|(it, _)| *it == batch);
            let sizes: Vec<usize> = of_batch.map(|&(_, size)| size).collect();
            for pair in [16, 32] {
                for rest in [0, pair / 2] {
                    assert!(sizes.iter().any(|size| size % pair == rest), "{batch}: {sizes:?}");
                }
            }
            assert!(sizes.iter().any(|size| size % 2 == 1), "{batch}: {sizes:?}");
        }
    }

    /// Sizes that a program marks may have none that vectors fill.
    #[test]
    fn a_batch_is_sampled_among_the_sizes_that_there_are() {
        let of = |sizes: &[i64]| pairs(&[2], sizes, PLACES.len(), 0);
        assert_eq!(of(&[9]), [(2, 9); 3]);
        assert_eq!(of(&[6]), [(2, 6); 5]);
        assert_eq!(of(&[6, 9]).len(), PLACES.len());
        assert_eq!(of(&[]), []);
    }
}
