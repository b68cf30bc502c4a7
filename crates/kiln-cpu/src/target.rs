//! The CPU as a target of the step compiler.

use kiln_compiler::schedule::Kernel;
use kiln_compiler::schedule::layout::Layouts;
use kiln_compiler::{CompileError, CompiledStep, Emitted, Policy, Step, Target};
use kiln_graph::Graph;
use kiln_partition::Machine;

use crate::build::{SourceFile, Toolchain};
use crate::emit::calls::StepCalls;
use crate::emit::{self, EmitOptions, KernelCode};
use crate::isa::Isa;
use crate::machine::rates;
use crate::policy::POLICY;

/// The name that messages use.
pub const NAME: &str = "cpu";

/// A hash of this crate's sources, for cache keys.
pub(crate) const CPU_SOURCES: &str = env!("KILN_CPU_SOURCES");

/// A CPU that C is generated for.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuTarget {
    /// Vector instructions that the generated code uses.
    pub isa: Isa,
    /// Most threads that will run the step. Sizes working memory; results do not depend on it.
    pub threads: usize,
    /// The machine's rates ([`crate::rates()`]).
    pub rates: Machine,
}

impl CpuTarget {
    /// The CPU that `toolchain` compiles for, run by `threads` threads.
    pub fn new(toolchain: &Toolchain, threads: usize) -> Self {
        Self::of(toolchain.isa(), threads)
    }

    /// A CPU with these instructions, run by `threads` threads.
    pub fn of(isa: Isa, threads: usize) -> Self {
        Self {
            isa,
            threads: threads.max(1),
            rates: rates(isa),
        }
    }
}

/// A step that was compiled to C.
pub type CpuStep = CompiledStep<CpuTarget>;

/// The decision on a kernel before the step is written.
#[derive(Clone, Debug)]
pub struct CpuKernel {
    /// Bytes of working memory.
    scratch: usize,
    /// The code, if only the text tells how much working memory it needs.
    code: Option<KernelCode>,
}

impl CpuTarget {
    fn emit_options<'a>(&self, layouts: &'a Layouts, family: bool) -> EmitOptions<'a> {
        EmitOptions {
            isa: self.isa,
            threads: self.threads,
            writes: true,
            family,
            layouts,
        }
    }
}

impl Target for CpuTarget {
    type Kernel = CpuKernel;
    type Code = Vec<SourceFile>;

    fn name(&self) -> &'static str {
        NAME
    }

    fn fingerprint(&self) -> String {
        format!("{} threads={} sources={CPU_SOURCES}", self.isa, self.threads)
    }

    fn rates(&self) -> Machine {
        self.rates
    }

    fn policy(&self) -> &Policy {
        &POLICY
    }

    fn compiles_c(&self) -> bool {
        true
    }

    fn kernel(&self, graph: &Graph, kernel: &Kernel, layouts: &Layouts) -> Result<CpuKernel, CompileError> {
        self.decide(graph, kernel, layouts, false)
    }

    fn scratch(&self, kernel: &CpuKernel) -> usize {
        kernel.scratch
    }

    fn emit(&self, step: &Step<'_, CpuKernel>) -> Result<Emitted<Vec<SourceFile>>, CompileError> {
        Ok(emit::emit(step, &self.codes(step, false)?, self.isa))
    }
}

impl CpuTarget {
    /// What is decided of `kernel`, for one shape or a family of them.
    fn decide(
        &self,
        graph: &Graph,
        kernel: &Kernel,
        layouts: &Layouts,
        family: bool,
    ) -> Result<CpuKernel, CompileError> {
        let options = self.emit_options(layouts, family);
        if let Some(scratch) = emit::scratch(graph, kernel, &options)? {
            return Ok(CpuKernel { scratch, code: None });
        }
        let code = emit::generate(graph, kernel, &options)?;
        Ok(CpuKernel {
            scratch: code.scratch,
            code: Some(code),
        })
    }

    /// The text of every kernel of a planned step.
    fn codes(&self, step: &Step<'_, CpuKernel>, family: bool) -> Result<Vec<KernelCode>, CompileError> {
        let options = self.emit_options(&step.schedule.layouts, family);
        let kernels = step.schedule.kernels.iter().zip(step.kernels);
        let codes = kernels.map(|(kernel, planned)| {
            let code = match &planned.code {
                Some(code) => code.clone(),
                None => emit::generate(step.graph, kernel, &options)?,
            };
            assert_eq!(
                code.scratch, planned.scratch,
                "a kernel's text needs the working memory of its plan"
            );
            Ok(code)
        });
        codes.collect()
    }
}

/// The same CPU, for which a step becomes a list of calls and no source tree: the functions of steps of
/// several shapes are built together ([`crate::family`]).
#[derive(Clone, Debug, PartialEq)]
pub struct CallsTarget(pub CpuTarget);

impl Target for CallsTarget {
    type Kernel = CpuKernel;
    type Code = StepCalls;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn fingerprint(&self) -> String {
        self.0.fingerprint()
    }

    fn rates(&self) -> Machine {
        self.0.rates()
    }

    fn policy(&self) -> &Policy {
        self.0.policy()
    }

    fn kernel(&self, graph: &Graph, kernel: &Kernel, layouts: &Layouts) -> Result<CpuKernel, CompileError> {
        self.0.decide(graph, kernel, layouts, true)
    }

    fn scratch(&self, kernel: &CpuKernel) -> usize {
        kernel.scratch
    }

    fn emit(&self, step: &Step<'_, CpuKernel>) -> Result<Emitted<StepCalls>, CompileError> {
        Ok(emit::calls::calls(step, &self.0.codes(step, true)?))
    }
}
