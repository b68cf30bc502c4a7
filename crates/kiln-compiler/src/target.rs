//! Targets: what the compiler asks of a machine.
//!
//! A target computes each kernel of a schedule in two steps. [`Target::kernel`] decides: which template,
//! which tiles, how the work is shared, how much working memory that takes. [`Target::emit`] writes: the text
//! of all kernels, once their memory is planned. A memory budget is met by planning many candidates, and none
//! but the last is written.

use kiln_graph::Graph;
use kiln_partition::Machine;

use crate::checks::Check;
use crate::error::CompileError;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::report::KernelReport;
use crate::schedule::layout::Layouts;
use crate::schedule::{Kernel, Schedule};

/// A machine that steps are compiled for.
pub trait Target {
    /// The target's decision on one kernel, before its text is written.
    type Kernel;
    /// The code that is written: sources, or another form that this target loads and runs.
    type Code;

    /// The name that messages use, such as `cpu`.
    fn name(&self) -> &'static str;

    /// Everything that the code depends on besides graph, options and the compiler's own sources: for cache
    /// keys.
    fn fingerprint(&self) -> String;

    /// The machine's rates: the partitioner compares keeping with computing again by them.
    fn rates(&self) -> Machine;

    /// Where the machine's thresholds lie.
    fn policy(&self) -> &Policy;

    /// Decides how `kernel` is computed, in a step whose values are stored in `layouts`.
    ///
    /// # Errors
    /// [`CompileError::Unsupported`] if nothing computes its operation.
    fn kernel(&self, graph: &Graph, kernel: &Kernel, layouts: &Layouts)
    -> Result<Self::Kernel, CompileError>;

    /// Whether operations of the program's own that come with C are compiled into the step.
    fn compiles_c(&self) -> bool {
        false
    }

    /// Bytes of working memory that a kernel needs while it runs.
    fn scratch(&self, kernel: &Self::Kernel) -> usize;

    /// Writes the step.
    ///
    /// # Errors
    /// [`CompileError::Unsupported`] if nothing computes one of the operations.
    fn emit(&self, step: &Step<'_, Self::Kernel>) -> Result<Emitted<Self::Code>, CompileError>;
}

/// A scheduled and planned step, ready to be written.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a, K> {
    /// The graph after all passes.
    pub graph: &'a Graph,
    /// Its kernels, in the order in which they run.
    pub schedule: &'a Schedule,
    /// The target's decision on each of them.
    pub kernels: &'a [K],
    /// Where every buffer lives.
    pub plan: &'a Plan,
    /// Indices that the step checks before it overwrites anything.
    pub checks: &'a [Check],
    /// The report on each kernel, without its name.
    pub reports: &'a [KernelReport],
}

/// What [`Target::emit`] made.
#[derive(Clone, Debug)]
pub struct Emitted<C> {
    /// The code.
    pub code: C,
    /// For each kernel, the name of its (first) function.
    pub names: Vec<String>,
}
