//! Steps of one program that differ in shapes, and share what was compiled.
//!
//! A region has one [`Families`]. Graphs of one structure (the same operations on the same operands) are a
//! family, whatever their shapes; a family compiles what no earlier member had (`kiln_cpu::family`).

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_compiler::Options;
use kiln_cpu::family::{Family, Outcome};
use kiln_cpu::{BuildOptions, CpuExecutable, CpuTarget, StepError, Toolchain};
use kiln_graph::Graph;

use super::process::CACHE;

/// Most families that are kept; the oldest goes. A program that is another one at each call has nothing to
/// share.
const FAMILIES: usize = 16;

/// Families, the newest first, each with its first graph.
type List = Vec<(Arc<Graph>, Arc<Family>)>;

/// See the module.
#[derive(Default)]
pub struct Families {
    list: Mutex<List>,
}

impl Families {
    /// The step of `graph` if its family has compiled all its kernels.
    ///
    /// # Errors
    ///
    /// As [`CpuExecutable::new`].
    pub(super) fn known(&self, graph: &Graph) -> Result<Option<CpuExecutable>, StepError> {
        let family = find(&self.list(), graph);
        family.map_or(Ok(None), |family| family.known(graph))
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The step of `graph`, and what it took. All graphs that this is called with have the same options and
    /// target.
    ///
    /// # Errors
    ///
    /// As [`CpuExecutable::new`].
    pub(super) fn compile(
        &self,
        graph: &Arc<Graph>,
        (options, target): (&Options, &CpuTarget),
        toolchain: &Toolchain,
        debug: Option<&Path>,
    ) -> Result<(CpuExecutable, Outcome), StepError> {
        let family = {
            let mut list = self.list();
            find(&list, graph).unwrap_or_else(|| {
                let build = BuildOptions::default();
                let family = Arc::new(Family::new(options, target, toolchain, &CACHE, &build));
                list.truncate(FAMILIES - 1);
                list.insert(0, (graph.clone(), family.clone()));
                family
            })
        };
        family.compile_into(graph, debug)
    }
}

/// The family of `graph`, if there is one.
fn find(list: &List, graph: &Graph) -> Option<Arc<Family>> {
    let known = list.iter().find(|(first, _)| has_structure_of(graph, first));
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
