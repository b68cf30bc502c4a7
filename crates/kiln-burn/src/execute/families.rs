//! Steps of one program that differ in shapes, and share what was compiled.
//!
//! A region has one [`Families`]. Graphs of one structure (the same operations on the same operands) are a
//! family, whatever their shapes; a family compiles what no earlier member had ([`kiln_family`]). Under
//! [`Dynamic::Marked`] the members of a family differ in marked dimensions alone.
//!
//! The first graph of a family whose dimensions are marked is compiled with graphs of other sizes, which
//! `kiln_graph::Resizer` makes of it. So its marked sizes are variables at once.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_cpu::family::CpuMaker;
use kiln_cuda::execute::Gpu;
use kiln_cuda::family::CudaMaker;
use kiln_family::{Family, Maker, Outcome};
use kiln_graph::{Dimension, Graph, Pinned, Resizer};

use crate::options::Dynamic;
use crate::record::marks::Mark;

/// Most families that are kept; the oldest goes. A program that is another one at each call has nothing to
/// share.
const FAMILIES: usize = 16;

/// Most graphs of other sizes that are planned for the first graph of a family.
const SAMPLES: usize = 32;

/// Graphs in which several marked dimensions have other sizes at once.
const CROSSED: usize = 16;

/// Which dimensions of a graph's arguments vary, as far as the program says.
#[derive(Clone, Debug, Default)]
pub struct Sizes {
    /// What becomes of shapes.
    pub dynamic: Dynamic,
    /// The marked dimensions.
    pub marks: Vec<(Dimension, Mark)>,
    /// For each argument, the position of the recording's input.
    pub inputs: Vec<usize>,
    /// Whether each argument may have other sizes: state of a training step may not.
    pub varies: Vec<bool>,
}

/// Nothing is marked.
pub(super) static UNMARKED: Sizes = Sizes {
    dynamic: Dynamic::Auto,
    marks: Vec::new(),
    inputs: Vec::new(),
    varies: Vec::new(),
};

/// A step, and what it took.
pub(super) struct Shared<S> {
    pub step: S,
    /// None if it belongs to no family.
    pub outcome: Option<Outcome>,
    /// What became of the marked dimensions, for people.
    pub notes: Vec<String>,
}

impl<S> Shared<S> {
    /// A step that belongs to no family.
    pub fn alone(step: S) -> Self {
        Self {
            step,
            outcome: None,
            notes: Vec::new(),
        }
    }

    fn of((step, outcome): (S, Outcome), notes: Vec<String>) -> Self {
        Self {
            step,
            outcome: Some(outcome),
            notes,
        }
    }
}

/// Families, the newest first, each with its first graph.
type List<M> = Vec<(Arc<Graph>, Arc<Family<M>>)>;

/// The families of a region on one target.
pub(super) struct Kept<M: Maker> {
    list: Mutex<List<M>>,
}

impl<M: Maker> Default for Kept<M> {
    fn default() -> Self {
        Self {
            list: Mutex::default(),
        }
    }
}

/// See the module.
#[derive(Default)]
pub struct Families {
    pub(super) cpu: Kept<CpuMaker>,
    pub(super) cuda: Kept<CudaMaker<Arc<Gpu>>>,
}

impl<M: Maker> Kept<M> {
    fn list(&self) -> MutexGuard<'_, List<M>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The step of `graph` if its family has compiled all its kernels. `fits` says of a maker whether it is
    /// for the device of this graph.
    ///
    /// # Errors
    ///
    /// Those of the maker.
    pub fn known(
        &self,
        graph: &Graph,
        sizes: &Sizes,
        fits: impl Fn(&M) -> bool,
    ) -> Result<Option<Shared<M::Step>>, M::Error> {
        let Some(family) = find(&self.list(), graph, sizes, fits) else {
            return Ok(None);
        };
        let step = family.known(graph)?;
        Ok(step.map(|step| Shared::of((step, Outcome::Known), Vec::new())))
    }

    /// The step of `graph`, and what it took. All graphs that this is called with have the same options, and
    /// `maker` makes those of the same device. The results of the step's stages are written to a folder, if
    /// there is one.
    ///
    /// # Errors
    ///
    /// Those of the maker.
    pub fn compile(
        &self,
        graph: &Arc<Graph>,
        (maker, fits): (impl FnOnce() -> M, impl Fn(&M) -> bool),
        (debug, sizes): (Option<&Path>, &Sizes),
    ) -> Result<Shared<M::Step>, M::Error> {
        let mut list = self.list();
        if let Some(family) = find(&list, graph, sizes, fits) {
            drop(list);
            return Ok(Shared::of(family.compile_into(graph, debug)?, Vec::new()));
        }
        let family = Arc::new(Family::new(maker()));
        list.truncate(FAMILIES - 1);
        list.insert(0, (graph.clone(), family.clone()));
        drop(list);
        let (expected, notes) = sizes.expected(graph);
        let compiled = match expected.is_empty() {
            true => family.compile_into(graph, debug)?,
            false => family.compile_general(graph, expected, debug)?,
        };
        let mut shared = Shared::of(compiled, notes);
        if shared.outcome == Some(Outcome::Known) {
            // The disk had its kernels. It is no other size of a step before, and counts as a step of its
            // own.
            shared.outcome = Some(Outcome::General {
                functions: 0,
                from_cache: true,
            });
        }
        Ok(shared)
    }
}

/// What a step shares with steps of other sizes, for reports: a line, or nothing.
pub(super) fn sharing_text(outcome: Option<&Outcome>) -> String {
    match outcome {
        None | Some(Outcome::Alone(None)) => String::new(),
        Some(Outcome::General { functions, .. }) => {
            format!("marked sizes are variables of its {functions} kernels\n")
        }
        Some(Outcome::Known) => "another size of a step before: all kernels were known\n".to_owned(),
        Some(Outcome::Built {
            functions, reason, ..
        }) => format!(
            "another size of a step before: sizes are variables of {functions} kernels that were compiled for it; the first: {reason}\n"
        ),
        Some(Outcome::Alone(Some(reason))) => format!(
            "another size of a step before, compiled by itself: sizes cannot be variables of its kernels; the first that was not known: {reason}\n"
        ),
    }
}

/// The family of `graph`, if there is one.
fn find<M: Maker>(
    list: &List<M>,
    graph: &Graph,
    sizes: &Sizes,
    fits: impl Fn(&M) -> bool,
) -> Option<Arc<Family<M>>> {
    let belongs = |first: &Graph| {
        has_structure_of(graph, first) && (sizes.dynamic != Dynamic::Marked || sizes.explain(first, graph))
    };
    let known = list
        .iter()
        .find(|(first, family)| fits(&family.maker) && belongs(first));
    known.map(|(_, family)| family.clone())
}

/// Whether two graphs have the same operations on the same operands.
fn has_structure_of(graph: &Graph, other: &Graph) -> bool {
    let same = |((_, a), (_, b)): ((_, &kiln_graph::NodeData), (_, &kiln_graph::NodeData))| {
        a.op.name() == b.op.name() && a.inputs == b.inputs && a.outputs == b.outputs
    };
    graph.num_nodes() == other.num_nodes()
        && graph.outputs.len() == other.outputs.len()
        && graph.nodes().zip(other.nodes()).all(same)
}

/// Marked dimensions that always have one size.
struct Group {
    leader: Dimension,
    least: usize,
    most: usize,
}

impl Sizes {
    /// Whether marked dimensions explain how two graphs differ: each argument differs in marked dimensions,
    /// or in others that had the size of a marked one and have it now.
    fn explain(&self, first: &Graph, graph: &Graph) -> bool {
        let extents = |dimension: Dimension| {
            let at = dimension.parameter as usize;
            let one = first.parameters().get(at).map(|&value| first.shape(value));
            let two = graph.parameters().get(at).map(|&value| graph.shape(value));
            let axis = dimension.axis;
            match (one, two) {
                (Some(one), Some(two)) if axis < one.rank() && axis < two.rank() => {
                    Some((one[axis], two[axis]))
                }
                _ => None,
            }
        };
        let marked: Vec<(usize, usize)> = self
            .marks
            .iter()
            .filter_map(|&(dimension, _)| extents(dimension))
            .filter(|(before, now)| before != now)
            .collect();
        let ranks = |graph: &Graph| -> Vec<usize> {
            let parameters = graph.parameters().iter();
            parameters.map(|&value| graph.shape(value).rank()).collect()
        };
        if first
            .nodes()
            .zip(graph.nodes())
            .all(|((_, a), (_, b))| a.op == b.op)
        {
            return true;
        }
        ranks(first) == ranks(graph)
            && !marked.is_empty()
            && dimensions(first).all(|dimension| {
                extents(dimension).is_some_and(|(before, now)| {
                    before == now
                        || marked.contains(&(before, now))
                        || self.marks.iter().any(|(marked, _)| *marked == dimension)
                })
            })
    }

    /// Graphs of other sizes, and what there is to say of each marked dimension.
    fn expected(&self, graph: &Graph) -> (Vec<Graph>, Vec<String>) {
        let (mut graphs, mut notes) = (Vec::new(), Vec::new());
        if self.marks.is_empty() {
            return (graphs, notes);
        }
        let resizer = Resizer::new(graph, &self.varies);
        let groups = self.groups(&resizer, &mut notes);
        let count = SAMPLES / groups.len().max(1);
        let mut variables: Vec<(Dimension, Vec<usize>)> = Vec::new();
        for group in groups {
            let size = extent(graph, group.leader);
            let mut pinned: Option<(usize, Pinned)> = None;
            let mut fitting = Vec::new();
            for size in sample_sizes(size, (group.least, group.most), count.max(8)) {
                match resizer.at(&[(group.leader, size)]) {
                    Ok(other) => {
                        fitting.push(size);
                        graphs.push(other);
                    }
                    Err(why) => drop(pinned.get_or_insert((size, why))),
                }
            }
            notes.push(self.note(
                graph,
                &group,
                graphs.last().filter(|_| !fitting.is_empty()),
                pinned,
            ));
            if !fitting.is_empty() {
                variables.push((group.leader, fitting));
            }
        }
        if variables.len() > 1 {
            // Sizes that differ at once show which numbers follow which.
            for turn in 0..CROSSED {
                let pick = |(at, (dimension, sizes)): (usize, &(Dimension, Vec<usize>))| {
                    // Another stride for each dimension: sizes meet in many combinations.
                    (*dimension, sizes[(turn * (2 * at + 3) + 5 * at) % sizes.len()])
                };
                let picked: Vec<_> = variables.iter().enumerate().map(pick).collect();
                graphs.extend(resizer.at(&picked));
            }
        }
        (graphs, notes)
    }

    /// The marked dimensions that vary independently.
    fn groups(&self, resizer: &Resizer<'_>, notes: &mut Vec<String>) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for &(dimension, mark) in &self.marks {
            let equals = resizer.equals(dimension);
            match groups.iter_mut().find(|group| equals.contains(&group.leader)) {
                Some(group) => {
                    notes.push(format!(
                        "{} (marked, {mark}) always has the size of {}",
                        self.name(dimension),
                        self.name(group.leader)
                    ));
                    group.least = group.least.max(mark.least);
                    group.most = group.most.min(mark.most);
                }
                None => groups.push(Group {
                    leader: dimension,
                    least: mark.least,
                    most: mark.most,
                }),
            }
        }
        groups
    }

    /// What became of marked dimensions, of which `sample` is a graph of another size.
    fn note(
        &self,
        graph: &Graph,
        group: &Group,
        sample: Option<&Graph>,
        pinned: Option<(usize, Pinned)>,
    ) -> String {
        let mark = Mark {
            axis: group.leader.axis,
            least: group.least,
            most: group.most,
        };
        let name = format!("{} (marked, {mark})", self.name(group.leader));
        let Some(sample) = sample else {
            return match pinned {
                Some((_, why)) => format!("{name} is pinned by {why}; each size is a step of its own"),
                None => format!("{name} has one size in its range"),
            };
        };
        let followers = dimensions(graph).filter(|&dimension| {
            let marked = self.marks.iter().any(|(marked, _)| *marked == dimension);
            !marked && extent(graph, dimension) != extent(sample, dimension)
        });
        let followers: Vec<String> = followers.map(|dimension| self.name(dimension)).collect();
        let with = match followers.is_empty() {
            true => String::new(),
            false => format!(", and with it {}", followers.join(" and ")),
        };
        match pinned {
            Some((size, why)) => format!("{name} is a variable{with}, but not at size {size}: {why}"),
            None => format!("{name} is a variable{with}"),
        }
    }

    fn name(&self, dimension: Dimension) -> String {
        let input = self.inputs.get(dimension.parameter as usize);
        let input = input.copied().unwrap_or(dimension.parameter as usize);
        format!("dimension {} of input {input}", dimension.axis)
    }
}

/// The dimensions of all arguments.
fn dimensions(graph: &Graph) -> impl Iterator<Item = Dimension> {
    let parameters = graph.parameters().iter().enumerate();
    parameters.flat_map(|(parameter, &value)| {
        (0..graph.shape(value).rank()).map(move |axis| Dimension {
            parameter: parameter as u32,
            axis,
        })
    })
}

fn extent(graph: &Graph, dimension: Dimension) -> usize {
    graph.shape(graph.parameters()[dimension.parameter as usize])[dimension.axis]
}

/// The largest sample of a size, unless the size itself is about as large: beyond, a tensor with a few more
/// dimensions is more than a machine has.
const FAR: usize = 1 << 24;

/// About `count` sizes of a range besides `size`: small and large ones, powers of two, odd and even ones; and
/// a few that are shorter than a vector. A range without an end reaches to twice the size, and one with an
/// end that no tensor has to [`FAR`]; there are none of a range that ends before it begins.
fn sample_sizes(size: usize, (least, most): (usize, usize), count: usize) -> Vec<usize> {
    let twice = size.max(16).saturating_mul(2);
    let most = match most {
        usize::MAX => size.max(16).next_power_of_two().saturating_mul(2),
        most => most.min(FAR.max(twice)),
    };
    if most < least {
        return Vec::new();
    }
    let mut sizes: Vec<usize> = if most - least < count {
        (least..=most).collect()
    } else {
        let mut sizes = vec![least, most];
        let mut power = 8;
        while power <= most {
            sizes.extend(
                [16, 17, 19, 21, 23, 25, 27, 29, 31]
                    .map(|part| power * part / 16 + usize::from(part % 4 == 3)),
            );
            power *= 2;
        }
        sizes
    };
    sizes.retain(|other| (least..=most).contains(other) && *other != size);
    sizes.sort_unstable();
    sizes.dedup();
    let length = sizes.len();
    if length > count {
        // Evenly, ends included.
        let picked = (0..count).map(|at| sizes[at * (length - 1) / (count - 1)]);
        sizes = picked.collect();
    }
    // What is shorter than a vector has a form of its own.
    let short = [3, 5, 6].into_iter();
    sizes.extend(short.filter(|other| (least..=most).contains(other) && *other != size));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_reach_over_the_range() {
        assert_eq!(sample_sizes(5, (2, 9), 16), [2, 3, 4, 6, 7, 8, 9]);
        let far = sample_sizes(100, (1, usize::MAX - 1), 16);
        assert_eq!((far[0], far.last()), (1, Some(&FAR)));
        assert!(
            sample_sizes(12, (100, usize::MAX), 16).is_empty(),
            "an end before the beginning"
        );
        let sizes = sample_sizes(40, (10, 500), 16);
        assert_eq!((sizes.len(), sizes[0], sizes[15]), (16, 10, 500));
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(
            sample_sizes(40, (2, usize::MAX), 32)
                .iter()
                .all(|&size| size <= 128 && size != 40)
        );
        assert_eq!(sample_sizes(7, (7, 7), 32), Vec::<usize>::new());
        assert_eq!(sample_sizes(12, (2, 64), 8)[..4], [2, 3, 5, 6]);
    }
}
