//! A compiled backward pass, also for losses that do not use all outputs of the forward pass.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// A part that was compiled, or why it was not.
type Compiled = Result<Arc<dyn Executable>, Arc<ExecuteError>>;

/// A backward pass for a loss of some outputs.
struct Part {
    /// For each output, whether it is one of them.
    given: Vec<bool>,
    compiled: OnceLock<Compiled>,
}

/// The backward passes for losses of some outputs, in the order in which losses needed them.
#[derive(Default)]
struct Parts(Mutex<Vec<Arc<Part>>>);

impl Parts {
    /// The part for the outputs that are `given`, known or made now by `compile`, which gets its position. A
    /// part is compiled outside of the list's lock, by the first thread that needs it; others that need it
    /// wait for that thread, and nobody else does. A failure is kept if the next attempt would take as long
    /// and fail alike ([`ExecuteError::is_of_graph`]). After any other the part is new to the next loss.
    fn get(
        &self,
        given: &[bool],
        compile: impl FnOnce(usize) -> Result<Arc<dyn Executable>, ExecuteError>,
    ) -> Compiled {
        let (position, part) = self.find(given);
        let compiled = part.compiled.get_or_init(|| compile(position).map_err(Arc::new));
        if compiled.as_ref().is_err_and(|error| !error.is_of_graph()) {
            self.lock().retain(|known| !Arc::ptr_eq(known, &part));
        }
        compiled.clone()
    }

    /// The part for the outputs that are `given`, new or known, and its position.
    fn find(&self, given: &[bool]) -> (usize, Arc<Part>) {
        let mut parts = self.lock();
        let known = parts.iter().position(|part| part.given == given);
        let position = known.unwrap_or_else(|| {
            parts.push(Arc::new(Part {
                given: given.to_vec(),
                compiled: OnceLock::new(),
            }));
            parts.len() - 1
        });
        (position, parts[position].clone())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Part>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    parts: Parts,
    /// Whether the warning that the recompile limit is reached was given.
    warned_limit: AtomicBool,
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
            parts: Parts::default(),
            warned_limit: AtomicBool::new(false),
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
        self.parts.get(given, |position| self.compile(position, given))
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
        let graph = without_tangents(&self.graph, self.saved, given, ranks::is_of_ranks)
            .map_err(CompileError::from)?;
        let exchanges = graph.nodes().any(|(_, data)| ranks::is_of_ranks(&data.op));
        let is_limited = position >= *recompile_limit && !exchanges;
        let mut backend = self.prepare.backend;
        if is_limited && backend > CompileBackend::AotEager {
            backend = CompileBackend::AotEager;
            if !self.warned_limit.swap(true, Ordering::Relaxed) {
                kiln_log::warn!(
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
}

/// A report on each backward pass that was compiled, for people.
impl fmt::Display for Backward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.whole.report())?;
        let parts = self.parts.lock().clone();
        for part in parts {
            let Some(compiled) = part.compiled.get() else {
                continue;
            };
            write!(f, "\n  backward from {} alone: ", self.names(&part.given))?;
            match compiled {
                Ok(executable) => f.write_str(&executable.report())?,
                Err(error) => write!(f, "failed: {error}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An executable that does nothing.
    fn nothing() -> Arc<dyn Executable> {
        let prepare = Prepare {
            backend: CompileBackend::AotEager,
            gpu: 0,
            options: CompileOptions::default(),
        };
        let (executable, _) = prepare.prepare(Arc::new(Graph::new("nothing"))).unwrap();
        executable.into()
    }

    fn never(_: usize) -> Result<Arc<dyn Executable>, ExecuteError> {
        panic!("it is known")
    }

    #[test]
    fn what_failed_is_tried_again_unless_it_would_fail_alike() {
        let parts = Parts::default();
        let passing = ExecuteError::Panicked {
            message: "the disk is full".into(),
        };
        let lasting = ExecuteError::from(CompileError::Autocast(kiln_graph::DType::F32));
        assert!(parts.get(&[true, false], |_| Err(passing)).is_err());
        // The part that failed leaves its position to others.
        let first = |position: usize| {
            assert_eq!(position, 0);
            Ok(nothing())
        };
        assert!(parts.get(&[true, false], first).is_ok());
        assert!(parts.get(&[true, false], never).is_ok());

        assert!(parts.get(&[false, true], |_| Err(lasting)).is_err());
        let error = parts.get(&[false, true], never).err().expect("it was kept");
        assert!(matches!(*error, ExecuteError::Compile(_)), "{error}");
    }
}
