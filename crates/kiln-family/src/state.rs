//! What a family has learned.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_graph::{Fingerprint, Graph};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::family::{Batch, Failure, FamilyStats, Maker};
use crate::samples::{self, Varying};
use crate::template::{Found, Pattern, Sample, Template, generalise};
use crate::unit::{Skeleton, Unit, Units};

/// Most recorded graphs that are kept to find others on a line with them.
const GRAPHS: usize = 4;

/// Most batches of templates of a family that are listed on disk.
pub const LISTED: usize = 64;

/// A template that was built.
#[derive(Debug)]
pub struct Known<B> {
    /// What it stands for.
    pub pattern: Pattern,
    /// How it is called.
    pub built: B,
}

/// What building the functions of a step took.
#[derive(Debug, Clone, Copy)]
pub struct Learned {
    /// Time of finding the templates.
    pub sample_time: Duration,
    /// Time of the compiler; zero if the cache had everything.
    pub build_time: Duration,
    /// Whether the cache had everything.
    pub from_cache: bool,
}

/// What a family has learned.
#[derive(Debug)]
pub struct State<M: Maker> {
    /// What reading functions keeps.
    pub helpers: M::Helpers,
    units: Units<M::Function>,
    pub(crate) graphs: Vec<Graph>,
    /// Graphs of other sizes that the caller expects, and that were not planned yet.
    pub(crate) expected: Vec<Graph>,
    /// Dimensions that vary, and how far.
    pub(crate) varying: Vec<Varying>,
    /// Functions of the steps that were planned, by shape.
    pub samples: Vec<Sample<M::Function>>,
    /// Graphs whose functions are among the samples.
    pub(crate) sampled: FxHashSet<Fingerprint>,
    /// How often functions were built.
    pub(crate) learned: usize,
    /// Whether what the cache has was loaded.
    loaded: bool,
    known: Vec<Known<M::Built>>,
    by_skeleton: FxHashMap<Skeleton, Vec<usize>>,
    /// Functions whose numbers cannot be variables: the compiler has rejected a template of them.
    pub rejected: FxHashSet<Skeleton>,
    /// Why each graph is compiled on its own, if functions of this family do not compile.
    pub(crate) refusal: Option<String>,
    /// What was done.
    pub stats: FamilyStats,
}

impl<M: Maker> Default for State<M> {
    fn default() -> Self {
        Self {
            helpers: M::Helpers::default(),
            units: Units::default(),
            graphs: Vec::new(),
            expected: Vec::new(),
            varying: Vec::new(),
            samples: Vec::new(),
            sampled: FxHashSet::default(),
            learned: 0,
            loaded: false,
            known: Vec::new(),
            by_skeleton: FxHashMap::default(),
            rejected: FxHashSet::default(),
            refusal: None,
            stats: FamilyStats::default(),
        }
    }
}

impl<M: Maker> State<M> {
    /// Adds the templates of a batch.
    fn add(&mut self, built: Vec<(Pattern, M::Built)>) {
        self.stats.functions += built.len();
        for (pattern, built) in built {
            let same = self.by_skeleton.entry(pattern.skeleton).or_default();
            same.push(self.known.len());
            self.known.push(Known { pattern, built });
        }
    }

    /// The unit of a function, which is kept.
    pub fn keep(&mut self, function: &M::Function) -> Arc<Unit<M::Function>> {
        let helpers = &mut self.helpers;
        self.units.keep(function, |function| M::read(function, helpers))
    }

    /// The units of functions, which are kept.
    pub fn keep_all(&mut self, functions: &[M::Function]) -> Vec<Arc<Unit<M::Function>>> {
        functions.iter().map(|function| self.keep(function)).collect()
    }

    /// The units of functions. A family of many shapes would grow if all were kept.
    pub fn look_up(&mut self, functions: &[M::Function]) -> Vec<Arc<Unit<M::Function>>> {
        let (units, helpers) = (&mut self.units, &mut self.helpers);
        let functions = functions.iter();
        functions
            .map(|function| units.get(function, |function| M::read(function, helpers)))
            .collect()
    }

    /// The template that stands for `unit`, with the fewest variables if there are several.
    pub fn find(&self, unit: &Unit<M::Function>) -> Option<&Known<M::Built>> {
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
    pub(crate) fn missing(&self, units: &[Arc<Unit<M::Function>>]) -> Vec<usize> {
        let numbered = units.iter().enumerate();
        numbered
            .filter(|(_, unit)| self.find(unit).is_none())
            .map(|(at, _)| at)
            .collect()
    }

    /// Templates for all units of the samples that none stands for yet.
    fn new_templates(&self) -> Vec<Found<M::Function>> {
        let mut seen = FxHashSet::default();
        let all = self.samples.iter().flat_map(|sample| &sample.units);
        let mut missing: Vec<&Arc<Unit<M::Function>>> = all
            .filter(|unit| seen.insert(Arc::as_ptr(unit)) && self.find(unit).is_none())
            .collect();
        let mut found = generalise(&self.samples);
        found.retain_mut(|it| {
            let before = missing.len();
            missing.retain(|unit| !it.template.fits(unit));
            it.is_spare = missing.len() == before;
            // What differs in one form of a kernel may in another of which no sample shows it.
            let pattern = &it.template.pattern;
            let same = self.by_skeleton.get(&pattern.skeleton).into_iter().flatten();
            let is_known = same
                .map(|&at| &self.known[at].pattern)
                .any(|known| known.covers(pattern));
            !it.is_spare || (!is_known && it.samples > 1)
        });
        found
    }

    /// Whether a template's variables stand where the compiler wants constants.
    fn is_rejected(&self, pattern: &Pattern) -> bool {
        !pattern.variables.is_empty() && self.rejected.contains(&pattern.skeleton)
    }

    /// What the first of the `missing` functions computes, and how it differs from those that are known.
    pub(crate) fn reason(
        &self,
        planned: &M::Planned,
        units: &[Arc<Unit<M::Function>>],
        missing: &[usize],
    ) -> String {
        let first = missing[0];
        let operation = M::operation(planned, first);
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
        tracing::debug!(target: "kiln::family", operation, ?differing, "unknown");
        match differing.as_deref() {
            Some([(known, now), ..]) => {
                format!("{operation}: a number of its kernel was {known} so far and is {now} now")
            }
            Some([]) => format!("{operation}: numbers that were equal so far are not"),
            None => format!("{operation}: its kernel has another form at this size"),
        }
    }

    /// Builds templates for what is not known of `graph`, whose functions are `units`, and for samples as far
    /// as these are few or likely to be wanted soon.
    ///
    /// # Errors
    /// [`Failure::Rejected`] if not even constants compile.
    pub fn learn(
        &mut self,
        maker: &M,
        graph: &Graph,
        units: &[Arc<Unit<M::Function>>],
    ) -> Result<Learned, Failure<M::Error>> {
        let start = Instant::now();
        let is_general = !self.expected.is_empty();
        tracing::debug!(
            target: "kiln::family",
            round = self.learned,
            sampled = self.sampled.contains(&graph.fingerprint()),
            "a graph with unknown functions"
        );
        samples::take(self, maker, graph);
        self.sampled.insert(graph.fingerprint());
        self.samples.push(Sample {
            units: units.to_vec(),
            share: samples::WHOLE,
        });
        if self.graphs.len() < GRAPHS {
            self.graphs.push(graph.clone());
        }
        let budget = samples::budget(self.learned, is_general);
        let templates = samples::within::<M>(budget, self.new_templates(), |template| {
            units
                .iter()
                .any(|unit| self.find(unit).is_none() && template.fits(unit))
        });
        self.learned += 1;
        let sample_time = start.elapsed();
        let mut built = self.build_accepted(maker, &graph.name, templates)?;
        let constants = self.constants(units);
        if !constants.is_empty() {
            built.push(self.build(maker, &graph.name, &constants)?);
        }
        built.iter().for_each(|built| maker.list(graph, &built.object));
        Ok(Learned {
            sample_time,
            build_time: built.iter().map(|built| built.elapsed).sum(),
            from_cache: built.iter().all(|built| built.from_cache),
        })
    }

    /// Builds `templates`, except those that the compiler rejects: numbers are constants in the functions
    /// that these stand for, and all others are as they would be without them.
    fn build_accepted(
        &mut self,
        maker: &M,
        name: &str,
        mut templates: Vec<Template<M::Function>>,
    ) -> Result<Vec<Done>, Failure<M::Error>> {
        templates.retain(|template| !self.is_rejected(&template.pattern));
        if templates.is_empty() {
            return Ok(Vec::new());
        }
        let (file, log) = match self.build(maker, name, &templates) {
            Err(Failure::Rejected { file, log, .. }) => (file, log),
            built => return Ok(vec![built?]),
        };
        if let [template] = &templates[..] {
            kiln_log::warn!(target: "kiln::family", file, log, "a function with variables does not compile");
            self.rejected.insert(template.pattern.skeleton);
            return Ok(Vec::new());
        }
        let others = templates.split_off(templates.len() / 2);
        let mut built = self.build_accepted(maker, name, templates)?;
        built.extend(self.build_accepted(maker, name, others)?);
        Ok(built)
    }

    /// Builds `templates`, which are known then.
    ///
    /// # Errors
    /// Those of [`Maker::build`].
    pub fn build(
        &mut self,
        maker: &M,
        name: &str,
        templates: &[Template<M::Function>],
    ) -> Result<Done, Failure<M::Error>> {
        let Batch {
            built,
            object,
            elapsed,
            from_cache,
        } = maker.build(name, templates, &mut self.helpers)?;
        self.stats.builds += 1;
        let patterns = templates.iter().map(|template| template.pattern.clone());
        self.add(patterns.zip(built).collect());
        Ok(Done {
            object,
            elapsed,
            from_cache,
        })
    }

    /// The functions of `units` that nothing stands for, with their numbers as constants.
    fn constants(&self, units: &[Arc<Unit<M::Function>>]) -> Vec<Template<M::Function>> {
        let mut constants: Vec<Template<M::Function>> = Vec::new();
        for unit in units.iter().filter(|unit| self.find(unit).is_none()) {
            if !constants.iter().any(|template| template.fits(unit)) {
                constants.push(Template::constant(unit));
            }
        }
        constants
    }

    /// Loads the templates of the family of `graph` that are on disk, if that was not done before, and says
    /// whether anything is known.
    pub(crate) fn load(&mut self, maker: &M, graph: &Graph) -> bool {
        if std::mem::replace(&mut self.loaded, true) {
            return !self.known.is_empty();
        }
        for number in 0..LISTED {
            let Some(stored) = maker.stored(graph, number) else {
                break;
            };
            // One that was evicted may be made again.
            self.add(stored.unwrap_or_default());
        }
        // Another process has sampled what a second shape needs.
        self.learned = usize::from(!self.known.is_empty());
        !self.known.is_empty()
    }
}

/// Templates that were built.
#[derive(Debug)]
pub struct Done {
    /// Where the cache has them.
    object: String,
    /// Time of the compiler; zero if the cache had them.
    elapsed: Duration,
    /// Whether the cache had them.
    from_cache: bool,
}
