//! Steps of several shapes that share their functions ([`kiln_family`]), as C.
//!
//! A text that equals a known one but for numbers is that function with other numbers, which every call
//! brings along in a table.
//!
//! - [`mod@scan`], [`mod@unit`]: functions apart from their numbers. [`mod@reach`], [`mod@write`]: the C of
//!   templates. `stored`: templates on disk, from which another process starts.

pub mod reach;
pub mod scan;
mod stored;
pub mod unit;
pub mod write;

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kiln_compiler::{CompiledStep, Options, compile, log_step};
use kiln_family::{Batch, Bound, Failure, Maker, Reading, Stored, Template, Times};
use kiln_graph::Graph;

use crate::build::{BuildOptions, Toolchain};
use crate::cache::Cache;
use crate::emit::calls::{StepCall, StepFunction};
use crate::error::{CpuError, StepError};
use crate::runtime::abi::Signature;
use crate::runtime::executable::CpuExecutable;
use crate::runtime::functions::{BoundFunction, CallList, FunctionLibrary};
use crate::runtime::library::Step;
use crate::target::{CallsTarget, CpuTarget};
pub use kiln_family::{FamilyStats, Outcome, Varying};
use unit::{Helpers, Layout};
use write::Written;

/// The CPU, as a family needs it.
#[derive(Debug)]
pub struct CpuMaker {
    options: Options,
    target: CpuTarget,
    toolchain: Toolchain,
    cache: Cache,
    build: BuildOptions,
}

/// A template in a shared object.
#[derive(Debug)]
pub struct Built {
    written: Written,
    library: Arc<FunctionLibrary>,
    /// Its position in there.
    number: usize,
}

/// A step that was planned and is not built.
type Planned = CompiledStep<CallsTarget>;

/// Steps that differ in shapes, and share what was compiled.
#[derive(Debug)]
pub struct Family(kiln_family::Family<CpuMaker>);

impl Deref for Family {
    type Target = kiln_family::Family<CpuMaker>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Family {
    /// A family without members. All of them are compiled with these options, for this target.
    pub fn new(
        options: &Options,
        target: &CpuTarget,
        toolchain: &Toolchain,
        cache: &Cache,
        build: &BuildOptions,
    ) -> Self {
        Self(kiln_family::Family::new(CpuMaker::new(
            options, target, toolchain, cache, build,
        )))
    }

    /// Tells which dimensions vary, and how far ([`kiln_family::Family::with_varying`]).
    #[must_use]
    pub fn with_varying(self, varying: Vec<Varying>) -> Self {
        Self(self.0.with_varying(varying))
    }

    /// The step of `graph`, and what it took ([`kiln_family::Family::compile_into`]).
    ///
    /// # Errors
    /// Those of [`CpuExecutable::new`].
    pub fn compile(&self, graph: &Graph) -> Result<(CpuExecutable, Outcome), StepError> {
        self.0.compile_into(graph, self.maker.options.debug.as_deref())
    }
}

impl CpuMaker {
    /// A maker of steps with these options, for this target.
    pub fn new(
        options: &Options,
        target: &CpuTarget,
        toolchain: &Toolchain,
        cache: &Cache,
        build: &BuildOptions,
    ) -> Self {
        Self {
            options: options.clone(),
            target: target.clone(),
            toolchain: toolchain.clone(),
            cache: cache.clone(),
            build: build.clone(),
        }
    }

    /// Whether its steps start sums over ranks in the order of these options.
    pub fn starts_sums_as(&self, options: &Options) -> bool {
        self.options.sums == options.sums && self.options.buckets == options.buckets
    }

    /// The options of a graph whose stages are written to `debug`, if that is given.
    fn options_of(&self, debug: Option<&Path>) -> Options {
        Options {
            debug: debug.map(Path::to_path_buf),
            ..self.options.clone()
        }
    }
}

impl Maker for CpuMaker {
    type Function = StepFunction;
    type Planned = Planned;
    type Step = CpuExecutable;
    type Built = Built;
    type Helpers = Helpers;
    type Error = StepError;

    fn plan(&self, graph: &Graph) -> Result<Planned, StepError> {
        let target = CallsTarget(self.target.clone());
        Ok(compile(graph, &self.options_of(None), &target)?)
    }

    fn functions(planned: &Planned) -> &[StepFunction] {
        &planned.code.functions
    }

    fn into_functions(planned: Planned) -> Vec<StepFunction> {
        planned.code.functions
    }

    fn operation(planned: &Planned, position: usize) -> String {
        let kernel = planned.code.calls.iter().find_map(|call| match call {
            StepCall::Task { kernel, function, .. }
            | StepCall::Each { kernel, function, .. }
            | StepCall::Kernel { kernel, function, .. }
                if *function == position =>
            {
                Some(*kernel)
            }
            _ => None,
        });
        let report = kernel.map(|kernel| &planned.kernels[kernel]);
        report
            .and_then(|report| report.nodes.last())
            .map_or_else(String::new, |node| format!("{node} : {}", node.ty))
    }

    fn read(function: &StepFunction, helpers: &mut Helpers) -> Reading {
        Layout::of(function, helpers).into()
    }

    fn characters(function: &StepFunction) -> usize {
        function.text.len()
    }

    fn build(
        &self,
        name: &str,
        templates: &[Template<StepFunction>],
        helpers: &mut Helpers,
    ) -> Result<Batch<Built>, Failure<StepError>> {
        self.build_object(name, templates, helpers)
            .map_err(|error| match error {
                CpuError::Compile {
                    ref file, ref stderr, ..
                } => Failure::Rejected {
                    file: file.clone(),
                    log: stderr.clone(),
                    error: error.into(),
                },
                error => Failure::Other(error.into()),
            })
    }

    fn list(&self, graph: &Graph, object: &str) {
        self.list_object(graph, object);
    }

    fn stored(&self, graph: &Graph, number: usize) -> Option<Stored<Built>> {
        self.stored_object(graph, number)
    }

    fn cached(&self, graph: &Graph) -> Result<Option<CpuExecutable>, StepError> {
        let options = self.options_of(None);
        CpuExecutable::cached(
            graph,
            &options,
            &self.target,
            &self.toolchain,
            &self.cache,
            &self.build,
        )
    }

    fn alone(&self, graph: &Graph) -> Result<CpuExecutable, StepError> {
        CpuExecutable::new(
            graph,
            &self.options_of(None),
            &self.target,
            &self.toolchain,
            &self.cache,
            &self.build,
        )
    }

    fn bind(
        &self,
        graph: &Graph,
        planned: Planned,
        bound: &[Bound<'_, Self>],
        times: Times,
    ) -> Result<CpuExecutable, StepError> {
        let mut contract = planned.contract();
        let mut functions = Vec::new();
        let mut names = Vec::new();
        for Bound { unit, built, .. } in bound {
            names.push(&*built.written.name);
            functions.push(BoundFunction {
                library: built.library.clone(),
                number: built.number,
                table: built.written.table.iter().map(|&at| unit.values[at]).collect(),
            });
        }
        for call in planned.code.calls.iter().rev() {
            match call {
                StepCall::Task { kernel, function, .. }
                | StepCall::Each { kernel, function, .. }
                | StepCall::Kernel { kernel, function, .. } => {
                    names[*function].clone_into(&mut contract.kernels[*kernel].name);
                }
                StepCall::Extern { kernel, index, .. } => {
                    contract.kernels[*kernel].name = format!("extern_{index}")
                }
                StepCall::Guard { .. } => {}
            }
        }
        log_step(&graph.name, self.options.keep, &contract);
        let signature = Signature::new(
            planned.graph.parameters().len(),
            planned.graph.outputs.len(),
            planned.graph.scalars().len(),
            planned.plan.arena_bytes,
        );
        let list = CallList::new(planned.code, functions, signature);
        let step = Step::of_calls(list);
        let mut executable = CpuExecutable::of_calls(&graph.name, step, contract, self.target.threads);
        executable.compile_time = times.passes;
        executable.stages = planned.times;
        if let Some(learned) = times.learned {
            executable.compile_time += learned.sample_time;
            executable.stages.push(("samples", learned.sample_time));
            executable.build_time = learned.build_time;
            if learned.build_time > Duration::ZERO {
                executable.stages.push(("cc", learned.build_time));
            }
        }
        Ok(executable)
    }

    fn debug(&self, graph: &Graph, folder: &Path) -> Result<(), StepError> {
        let compiled = compile(graph, &self.options_of(Some(folder)), &self.target)?;
        crate::debug::write(folder, &compiled, &self.target, &self.toolchain, &self.build);
        Ok(())
    }

    fn jobs(&self) -> usize {
        self.build.jobs
    }
}

#[cfg(test)]
mod tests {
    use kiln_family::template::Sample;
    use kiln_family::{State, Unit};

    use super::*;
    use crate::build::OptLevel;
    use crate::emit::calls::Convention;
    use crate::emit::tree::FileGroup;

    /// A function of a number, after `before`.
    fn function(before: &str, number: i64) -> StepFunction {
        StepFunction {
            kind: "fill".to_owned(),
            part: FileGroup::Forward,
            text: format!(
                "void @(void *ctx, int64_t begin, int64_t end, int thread) {{\n    float *to = *(float **)ctx;\n    (void)thread;\n    \
                 {before}\n    for (int64_t i = begin; i < end; i++)\n        to[i] = {number};\n}}\n"
            ),
            helpers: Vec::new(),
            convention: Convention::Task(1),
        }
    }

    /// A function that needs its number when it is compiled is the only one that is compiled for each size.
    #[test]
    fn a_template_that_does_not_compile_leaves_the_others() {
        let toolchain = Toolchain::detect().unwrap();
        let build = BuildOptions {
            level: OptLevel::Quick,
            ..BuildOptions::default()
        };
        let target = CpuTarget::new(&toolchain, 1);
        let family = Family::new(
            &Options::default(),
            &target,
            &toolchain,
            &Cache::disabled(),
            &build,
        );
        let graph = Graph::new("step");
        let mut state: State<CpuMaker> = State::default();
        let units = |state: &mut State<CpuMaker>, number: i64| -> Vec<Arc<Unit<StepFunction>>> {
            let asserted = function(&format!("_Static_assert({number} > 0, \"\");"), number);
            let functions = [
                function("end -= 0;", number),
                asserted,
                function("begin += 0;", number),
            ];
            state.keep_all(&functions)
        };
        let first = units(&mut state, 1000);
        state.samples.push(Sample {
            units: first,
            share: 1,
        });
        let second = units(&mut state, 1001);
        state.learn(&family.maker, &graph, &second).unwrap();
        assert!(second.iter().all(|unit| state.find(unit).is_some()));
        assert_eq!(state.rejected.len(), 1);
        for number in [1002, 1003] {
            let other = units(&mut state, number);
            let known: Vec<bool> = other.iter().map(|unit| state.find(unit).is_some()).collect();
            assert_eq!(known, [true, false, true]);
            let builds = state.stats.builds;
            state.learn(&family.maker, &graph, &other).unwrap();
            assert_eq!(state.stats.builds, builds + 1);
            assert!(other.iter().all(|unit| state.find(unit).is_some()));
        }
    }
}
