//! A compiled backward pass, also for losses that do not use all outputs of the forward pass.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kiln_compiler::CompileError;
use kiln_graph::Graph;
use kiln_partition::without_tangents;

use crate::execute::{self, Executable, ExecuteError, Setting};
use crate::options::{CompileBackend, CompileOptions};
use crate::ranks;

/// How the halves of a function are prepared.
pub(super) struct Prepare {
    pub(super) backend: CompileBackend,
    pub(super) gpu: usize,
    pub(super) options: CompileOptions,
}

impl Prepare {
    /// The executable for `graph`, and the backend that it runs on.
    pub(super) fn prepare(
        &self,
        graph: Arc<Graph>,
    ) -> Result<(Box<dyn Executable>, CompileBackend), ExecuteError> {
        self.prepare_on(self.backend, graph)
    }

    fn prepare_on(
        &self,
        backend: CompileBackend,
        graph: Arc<Graph>,
    ) -> Result<(Box<dyn Executable>, CompileBackend), ExecuteError> {
        execute::prepare(backend, self.gpu, graph, &self.options, Setting::default())
    }
}

/// A backward pass for a loss of some outputs. It is compiled outside of the list's lock, by the first thread
/// that needs it; others that need it wait for that thread, and nobody else does. A failure is kept: the next
/// attempt would take as long and fail alike.
struct Part {
    /// For each output, whether it is one of them.
    given: Vec<bool>,
    executable: OnceLock<Result<Arc<dyn Executable>, Arc<ExecuteError>>>,
}

/// The backward pass of a function.
pub(super) struct Backward {
    /// With all tangents.
    graph: Arc<Graph>,
    /// How many tensors of the forward pass it takes before the tangents.
    saved: usize,
    /// For each tangent, the position of its output in the function's result.
    outputs: Vec<usize>,
    prepare: Prepare,
    whole: Arc<dyn Executable>,
    ran: CompileBackend,
    parts: Mutex<Vec<Arc<Part>>>,
}

impl Backward {
    pub(super) fn new(
        graph: Graph,
        saved: usize,
        outputs: &[usize],
        prepare: Prepare,
    ) -> Result<Self, ExecuteError> {
        let graph = Arc::new(graph);
        let (whole, ran) = prepare.prepare(graph.clone())?;
        Ok(Self {
            graph,
            saved,
            outputs: outputs.to_vec(),
            prepare,
            whole: whole.into(),
            ran,
            parts: Mutex::default(),
        })
    }

    /// Whether it runs on a backend that compiles.
    pub(super) fn compiles(&self) -> bool {
        self.ran.compiles()
    }

    /// The backward pass for the tangents that are `given`, which takes no others.
    pub(super) fn of(&self, given: &[bool]) -> Result<Arc<dyn Executable>, Arc<ExecuteError>> {
        if given.iter().all(|&given| given) {
            return Ok(self.whole.clone());
        }
        let (position, part) = self.part(given);
        part.executable
            .get_or_init(|| self.compile(position, given).map_err(Arc::new))
            .clone()
    }

    /// The part for the tangents that are `given`, new or known, and its position among the parts.
    fn part(&self, given: &[bool]) -> (usize, Arc<Part>) {
        let mut parts = self.parts();
        let known = parts.iter().position(|part| part.given == given);
        let position = known.unwrap_or_else(|| {
            parts.push(Arc::new(Part {
                given: given.to_vec(),
                executable: OnceLock::new(),
            }));
            parts.len() - 1
        });
        (position, parts[position].clone())
    }

    /// Compiles part number `position`. The parts behind the recompile limit run on `aot_eager`, unless other
    /// ranks wait for what a part exchanges.
    fn compile(&self, position: usize, given: &[bool]) -> Result<Arc<dyn Executable>, ExecuteError> {
        let CompileOptions {
            name,
            recompile_limit,
            ..
        } = &self.prepare.options;
        let outputs = self.names(given);
        let graph = without_tangents(&self.graph, self.saved, given).map_err(CompileError::from)?;
        let exchanges = graph.nodes().any(|(_, data)| ranks::is_of_ranks(&data.op));
        let is_limited = position >= *recompile_limit && !exchanges;
        let mut backend = self.prepare.backend;
        if is_limited && backend > CompileBackend::AotEager {
            backend = CompileBackend::AotEager;
            if position == *recompile_limit {
                tracing::warn!(
                    target: "kiln::recompiles",
                    region = %name,
                    "recompile limit of {recompile_limit} reached: losses have used as many different sets of \
                     the function's outputs. Further backward passes run on aot_eager, which is slower. What \
                     to do: return only what losses use, use the same outputs at each step, or raise \
                     recompile_limit"
                );
            }
        }
        tracing::info!(
            target: "kiln::recompiles",
            region = %name,
            "a loss uses {outputs} alone: its backward pass is compiled on {backend}"
        );
        let (part, _) = self.prepare.prepare_on(backend, Arc::new(graph))?;
        Ok(part.into())
    }

    /// The outputs whose tangents are `given`, for people.
    fn names(&self, given: &[bool]) -> String {
        let outputs = self.outputs.iter().zip(given).filter(|(_, given)| **given);
        let numbers: Vec<String> = outputs.map(|(output, _)| output.to_string()).collect();
        let plural = if numbers.len() == 1 { "" } else { "s" };
        format!("output{plural} {}", numbers.join(", "))
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Arc<Part>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A report on each backward pass that was compiled, for people.
impl fmt::Display for Backward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.whole.report())?;
        let parts = self.parts().clone();
        for part in parts {
            let Some(executable) = part.executable.get() else {
                continue;
            };
            write!(f, "\n  backward from {} alone: ", self.names(&part.given))?;
            match executable {
                Ok(executable) => f.write_str(&executable.report())?,
                Err(error) => write!(f, "failed: {error}")?,
            }
        }
        Ok(())
    }
}
