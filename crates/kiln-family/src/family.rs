//! A family: steps that differ in shapes, and share what was compiled.

use std::fmt::Debug;
use std::hash::Hash;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_graph::Graph;

use crate::samples::Varying;
use crate::state::{Learned, State};
use crate::template::{Pattern, Template};
use crate::unit::{Reading, Unit};

/// A target, as a family needs it.
pub trait Maker: Sync {
    /// The text of a function, and what its caller must know.
    type Function: Clone + Debug + Eq + Hash + Send + Sync;
    /// A graph behind all passes: its functions and the calls of them.
    type Planned;
    /// A step that can be called.
    type Step;
    /// How a template that was built is called.
    type Built: Debug;
    /// What reading functions keeps from one to the next.
    type Helpers: Debug + Default;
    /// What can fail.
    type Error;

    /// All passes for `graph`, up to the text of its functions.
    ///
    /// # Errors
    /// Those of the passes.
    fn plan(&self, graph: &Graph) -> Result<Self::Planned, Self::Error>;

    /// [`Maker::plan`] of a graph that is called, where that differs from samples: the cache may have it, and
    /// what is decided by measuring is.
    ///
    /// # Errors
    /// Those of the passes.
    fn plan_wanted(&self, graph: &Graph) -> Result<Self::Planned, Self::Error> {
        self.plan(graph)
    }

    /// The functions of a planned step.
    fn functions(planned: &Self::Planned) -> &[Self::Function];

    /// The functions of a planned step alone.
    fn into_functions(planned: Self::Planned) -> Vec<Self::Function>;

    /// What function `position` of a planned step computes, for people.
    fn operation(planned: &Self::Planned, position: usize) -> String;

    /// A function in parts. Two functions of one skeleton are equal if their values are.
    fn read(function: &Self::Function, helpers: &mut Self::Helpers) -> Reading;

    /// Characters of a function, by which the time of compiling it is estimated.
    fn characters(function: &Self::Function) -> usize;

    /// Builds templates, or finds in the cache what was built of them before.
    ///
    /// # Errors
    /// [`Failure::Rejected`] if the compiler rejects one of them.
    fn build(
        &self,
        name: &str,
        templates: &[Template<Self::Function>],
        helpers: &mut Self::Helpers,
    ) -> Result<Batch<Self::Built>, Failure<Self::Error>>;

    /// Puts a batch that was built on the disk's list of the family of `graph`.
    fn list(&self, graph: &Graph, object: &str);

    /// Batch `number` on that list, if there are so many: its templates, if the cache still has them.
    fn stored(&self, graph: &Graph, number: usize) -> Option<Stored<Self::Built>>;

    /// The step of `graph` with its extents as constants, if the cache has that. It is the fastest there is.
    ///
    /// # Errors
    /// Those of loading.
    fn cached(&self, graph: &Graph) -> Result<Option<Self::Step>, Self::Error>;

    /// The step of `graph` with its extents as constants.
    ///
    /// # Errors
    /// Those of compiling.
    fn alone(&self, graph: &Graph) -> Result<Self::Step, Self::Error>;

    /// The step of a planned graph, each of whose functions is called through the template that stands for
    /// it.
    ///
    /// # Errors
    /// Those of loading.
    fn bind(
        &self,
        graph: &Graph,
        planned: Self::Planned,
        functions: &[Bound<'_, Self>],
        times: Times,
    ) -> Result<Self::Step, Self::Error>;

    /// Writes what each stage makes of `graph` to a folder. It must not depend on what is known.
    ///
    /// # Errors
    /// Those of the passes.
    fn debug(&self, graph: &Graph, folder: &Path) -> Result<(), Self::Error>;

    /// How many graphs are planned side by side.
    fn jobs(&self) -> usize;
}

/// A batch of templates on disk: what each stands for, and how it is called. None if the cache has lost it.
pub type Stored<B> = Option<Vec<(Pattern, B)>>;

/// A function of a step, and how the template that stands for it is called.
#[derive(Debug)]
pub struct Bound<'a, M: Maker + ?Sized> {
    /// The function with its values.
    pub unit: &'a Unit<M::Function>,
    /// What the template stands for.
    pub pattern: &'a Pattern,
    /// How it is called.
    pub built: &'a M::Built,
}

/// Templates that were built.
#[derive(Debug)]
pub struct Batch<B> {
    /// How each is called.
    pub built: Vec<B>,
    /// Where the cache has them.
    pub object: String,
    /// Time of the compiler; zero if the cache had them.
    pub elapsed: Duration,
    /// Whether the cache had them.
    pub from_cache: bool,
}

/// Why templates were not built.
#[derive(Debug)]
pub enum Failure<E> {
    /// The compiler rejects one of them.
    Rejected {
        /// The source.
        file: String,
        /// What the compiler says.
        log: String,
        /// The error.
        error: E,
    },
    /// Anything else.
    Other(E),
}

impl<E> Failure<E> {
    /// The error.
    pub fn into_error(self) -> E {
        match self {
            Self::Rejected { error, .. } | Self::Other(error) => error,
        }
    }
}

/// Where the time of a step went.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Time in the passes.
    pub passes: Duration,
    /// What learning its functions took, if they were not known.
    pub learned: Option<Learned>,
}

/// What became of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was compiled on its own, with its extents as constants: it is the first of its family, or, if there
    /// is a reason, its functions could not be built.
    Alone(Option<String>),
    /// It is the first of its family, and its extents are variables at once ([`Family::compile_general`]).
    General {
        /// Functions that were built.
        functions: usize,
        /// Whether the cache had them.
        from_cache: bool,
    },
    /// All its functions were known, or the cache had the step: the compiler did not run.
    Known,
    /// The compiler ran, or the cache had what it would have made.
    Built {
        /// Functions that were not known.
        functions: usize,
        /// The first of them: what it computes, and how it differs from those that were known.
        reason: String,
        /// Whether the cache had them.
        from_cache: bool,
    },
}

/// Counts of a family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FamilyStats {
    /// Graphs compiled.
    pub graphs: usize,
    /// Runs of the compiler, and what the cache saved of them.
    pub builds: usize,
    /// Functions that the objects of the family have.
    pub functions: usize,
}

/// Steps that differ in shapes, and share what was compiled.
#[derive(Debug)]
pub struct Family<M: Maker> {
    /// The target.
    pub maker: M,
    state: Mutex<State<M>>,
}

/// A step whose functions are wanted.
struct Wanted<M: Maker> {
    planned: M::Planned,
    /// Its functions.
    units: Vec<Arc<Unit<M::Function>>>,
    /// Positions of the functions that no template stands for.
    positions: Vec<usize>,
    /// Time in the passes.
    passes: Duration,
}

/// What looking for a step's functions gave.
enum Search<M: Maker> {
    /// All are known: the step.
    Known(Box<M::Step>),
    /// Some are not.
    Missing(Box<Wanted<M>>),
}

impl<M: Maker> Family<M> {
    /// A family without members, all of which `maker` makes.
    pub fn new(maker: M) -> Self {
        Self {
            maker,
            state: Mutex::default(),
        }
    }

    /// Tells which dimensions vary, and how far. A hint: it decides which sizes are sampled, nothing else. A
    /// shape outside of the ranges is compiled as any other.
    #[must_use]
    pub fn with_varying(self, varying: Vec<Varying>) -> Self {
        self.lock().varying = varying;
        self
    }

    fn lock(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the family has compiled so far.
    pub fn stats(&self) -> FamilyStats {
        self.lock().stats
    }

    /// The step of `graph`, and what it took.
    ///
    /// The first graph is compiled on its own. The second begins to share: what differs between the two, and
    /// between them and graphs of other sizes, becomes variables of the functions. From then on a graph
    /// compiles without the compiler if all its functions are known. Stages are written to `debug`, if that
    /// is given.
    ///
    /// # Errors
    /// Those of the maker.
    pub fn compile_into(&self, graph: &Graph, debug: Option<&Path>) -> Result<(M::Step, Outcome), M::Error> {
        let maker = &self.maker;
        let mut state = self.lock();
        state.stats.graphs += 1;
        if let Some(folder) = debug {
            maker.debug(graph, folder)?;
        }
        let is_general = !state.expected.is_empty();
        let is_first = state.graphs.is_empty() && !is_general;
        if is_first {
            state.graphs.push(graph.clone());
        }
        let cached = if is_general { None } else { maker.cached(graph)? };
        if let Some(step) = cached {
            let outcome = if is_first {
                Outcome::Alone(None)
            } else {
                Outcome::Known
            };
            return Ok((step, outcome));
        }
        if state.refusal.is_some() || (is_first && !state.load(maker, graph)) {
            return self.alone(&mut state, graph);
        }
        let missing = match self.find(&mut state, graph)? {
            Search::Known(step) => {
                // Another process compiled it. The first size that is not known is compiled with the expected
                // ones.
                if state.graphs.is_empty() {
                    state.graphs.push(graph.clone());
                }
                return Ok((*step, Outcome::Known));
            }
            Search::Missing(missing) => missing,
        };
        if is_first {
            return self.alone(&mut state, graph);
        }
        let mut reason = state.reason(&missing.planned, &missing.units, &missing.positions);
        let learned = match state.learn(maker, graph, &missing.units) {
            Ok(learned) => learned,
            // Not even constants compile.
            Err(Failure::Rejected { file, log, .. }) => {
                kiln_log::warn!(target: "kiln::family", file, log, "functions do not compile");
                state.refusal = Some(reason);
                return self.alone(&mut state, graph);
            }
            Err(Failure::Other(error)) => return Err(error),
        };
        let functions = missing.positions.len();
        let mut rejected = missing.positions.iter().map(|&at| &missing.units[at]);
        if rejected.any(|unit| state.rejected.contains(&unit.skeleton)) {
            reason += ", and the compiler wants constants in one of these kernels: each size has its own";
        }
        let step = self.bind(&state, graph, *missing, Some(learned))?;
        let from_cache = learned.from_cache;
        let outcome = match is_general {
            true => Outcome::General {
                functions,
                from_cache,
            },
            false => Outcome::Built {
                functions,
                reason,
                from_cache,
            },
        };
        Ok((step, outcome))
    }

    /// [`Family::compile_into`] of the first graph of a family, of which graphs of other sizes are
    /// `expected`: what differs between them is a variable at once, and the second graph does not pay for it.
    /// The expected graphs only show which numbers vary; nothing of theirs is run.
    ///
    /// # Errors
    /// Those of the maker.
    pub fn compile_general(
        &self,
        graph: &Graph,
        expected: Vec<Graph>,
        debug: Option<&Path>,
    ) -> Result<(M::Step, Outcome), M::Error> {
        self.lock().expected = expected;
        self.compile_into(graph, debug)
    }

    /// The step of `graph` if all its functions are known; none if [`Family::compile_into`] would run the
    /// compiler.
    ///
    /// # Errors
    /// Those of the maker.
    pub fn known(&self, graph: &Graph) -> Result<Option<M::Step>, M::Error> {
        let mut state = self.lock();
        let step = match self.maker.cached(graph)? {
            Some(step) => Some(step),
            None => match self.find(&mut state, graph)? {
                Search::Known(step) => Some(*step),
                Search::Missing(_) => None,
            },
        };
        state.stats.graphs += usize::from(step.is_some());
        Ok(step)
    }

    /// Plans `graph`, and looks for its functions.
    fn find(&self, state: &mut State<M>, graph: &Graph) -> Result<Search<M>, M::Error> {
        let start = Instant::now();
        state.load(&self.maker, graph);
        let planned = self.maker.plan_wanted(graph)?;
        let units = state.look_up(M::functions(&planned));
        let positions = state.missing(&units);
        let wanted = Wanted {
            planned,
            units,
            positions,
            passes: start.elapsed(),
        };
        if wanted.positions.is_empty() {
            return Ok(Search::Known(Box::new(self.bind(state, graph, wanted, None)?)));
        }
        Ok(Search::Missing(Box::new(wanted)))
    }

    /// The step of `graph` with its extents as constants.
    fn alone(&self, state: &mut State<M>, graph: &Graph) -> Result<(M::Step, Outcome), M::Error> {
        state.stats.builds += 1;
        let step = self.maker.alone(graph)?;
        Ok((step, Outcome::Alone(state.refusal.clone())))
    }

    /// The step of `graph` with its extents as constants, of the very functions that [`Family::compile_into`]
    /// calls with variables: their results are equal, bit for bit.
    ///
    /// # Errors
    /// Those of the maker, and of its compiler.
    pub fn compile_constant(&self, graph: &Graph) -> Result<M::Step, M::Error> {
        let start = Instant::now();
        let planned = self.maker.plan_wanted(graph)?;
        let passes = start.elapsed();
        let mut state = State::default();
        let units = state.keep_all(M::functions(&planned));
        let templates: Vec<_> = units.iter().map(Template::constant).collect();
        let built = state.build(&self.maker, &graph.name, &templates);
        built.map_err(Failure::into_error)?;
        let wanted = Wanted {
            planned,
            units,
            positions: Vec::new(),
            passes,
        };
        self.bind(&state, graph, wanted, None)
    }

    /// The step that `wanted` is, with known functions.
    fn bind(
        &self,
        state: &State<M>,
        graph: &Graph,
        wanted: Wanted<M>,
        learned: Option<Learned>,
    ) -> Result<M::Step, M::Error> {
        let bound: Vec<Bound<'_, M>> = wanted
            .units
            .iter()
            .map(|unit| {
                let known = state.find(unit).expect("what was missing has been built");
                Bound {
                    unit,
                    pattern: &known.pattern,
                    built: &known.built,
                }
            })
            .collect();
        let times = Times {
            passes: wanted.passes,
            learned,
        };
        self.maker.bind(graph, wanted.planned, &bound, times)
    }
}
