//! A compiled backward pass, also for losses that do not use all outputs of the forward pass.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_compiler::CompileError;
use kiln_graph::Graph;
use kiln_partition::without_tangents;

use crate::execute::{self, Executable, ExecuteError, Setting};
use crate::options::{CompileBackend, CompileOptions};

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
        let Self {
            backend,
            gpu,
            options,
        } = self;
        execute::prepare(*backend, *gpu, graph, options, Setting::default())
    }
}

/// A backward pass for a loss of some outputs: for each output, whether it is one of them.
type Part = (Vec<bool>, Arc<dyn Executable>);

/// The backward pass of a function.
pub(super) struct Backward {
    /// With all tangents.
    graph: Arc<Graph>,
    /// How many tensors of the forward pass it takes before the tangents.
    saved: usize,
    prepare: Prepare,
    whole: Arc<dyn Executable>,
    ran: CompileBackend,
    parts: Mutex<Vec<Part>>,
}

impl Backward {
    pub(super) fn new(graph: Graph, saved: usize, prepare: Prepare) -> Result<Self, ExecuteError> {
        let graph = Arc::new(graph);
        let (whole, ran) = prepare.prepare(graph.clone())?;
        Ok(Self {
            graph,
            saved,
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
    pub(super) fn of(&self, given: &[bool]) -> Result<Arc<dyn Executable>, ExecuteError> {
        if given.iter().all(|&given| given) {
            return Ok(self.whole.clone());
        }
        let mut parts = self.parts();
        if let Some((_, part)) = parts.iter().find(|(of, _)| of == given) {
            return Ok(part.clone());
        }
        let graph = without_tangents(&self.graph, self.saved, given).map_err(CompileError::from)?;
        let (part, _) = self.prepare.prepare(Arc::new(graph))?;
        let part: Arc<dyn Executable> = part.into();
        parts.push((given.to_vec(), part.clone()));
        Ok(part)
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A report on each backward pass that was compiled, for people.
impl fmt::Display for Backward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.whole.report())?;
        for (given, part) in &*self.parts() {
            let outputs: Vec<String> = (0..given.len())
                .filter(|&output| given[output])
                .map(|output| output.to_string())
                .collect();
            write!(
                f,
                "\n  backward from output {} alone: {}",
                outputs.join(", "),
                part.report()
            )?;
        }
        Ok(())
    }
}
