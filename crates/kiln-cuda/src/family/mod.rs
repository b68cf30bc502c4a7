//! Steps of several shapes that share their kernels ([`kiln_family`]), in CUDA C++.
//!
//! Every shape goes through all passes, up to the text of its kernels. A text that equals a known one but for
//! numbers is that kernel, and its launches bring the numbers along as a parameter; NVRTC is not asked.
//! Grids, shared memory, order and addresses of launches, and the algorithms of the libraries, are those of
//! the shape: they are data.
//!
//! - [`mod@scan`]: where a variable can stand for a number of CUDA C++. [`mod@write`]: kernels with such
//!   numbers.
//! - [`CudaMaker`] is the target as a family needs it; a [`Backend`] compiles for it: a device, or in tests
//!   NVRTC alone or nothing. `stored`: templates on disk.
//! - The result, a [`SharedStep`], is a [`StepCode`] like any other, with its programs.

mod backend;
pub mod scan;
mod stored;
pub mod write;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_compiler::{Contract, Options, compile};
use kiln_family::{Batch, Bound, Failure, Maker, Reading, Stored, Template, Times};
pub use kiln_family::{FamilyStats, Outcome, Varying};
use kiln_graph::Graph;

use crate::build::{Cubin, Source};
use crate::code::{CallKind, Function, FunctionText, KERNELS_OF_A_PROGRAM, Pointer, StepCode};
use crate::debug;
use crate::error::CudaError;
use crate::execute::StepError;
use crate::execute::guards;
use crate::execute::prepare::{compiled, name_own_kernels};
use crate::kernels::PRELUDE;
use crate::target::CudaTarget;
#[cfg(feature = "testing")]
pub use backend::Uncompiled;
pub use backend::{Backend, Program};
use write::{FamilyFunction, Written};

/// A family of steps on a GPU.
pub type Family<B> = kiln_family::Family<CudaMaker<B>>;

/// Most programs of guards that are kept.
const GUARDS: usize = 64;

/// A GPU, as a family needs it.
#[derive(Debug)]
pub struct CudaMaker<B> {
    options: Options,
    target: CudaTarget,
    backend: B,
    /// The programs of guards, by their text.
    guards: Mutex<HashMap<String, Arc<Program>>>,
}

/// A graph behind all passes.
#[derive(Debug)]
pub struct Planned {
    code: StepCode,
    contract: Contract,
    functions: Vec<FamilyFunction>,
    stages: Vec<(&'static str, Duration)>,
    /// Whether the cache had the code.
    from_cache: bool,
}

/// A template in a program.
#[derive(Clone, Debug)]
pub struct Built {
    written: Arc<Written>,
    program: Arc<Program>,
}

/// Templates as kernels, the programs that they are in, and the program of each.
type Kernels = (Vec<Written>, Vec<Source>, Vec<usize>);

/// A step with the programs that it calls.
#[derive(Debug)]
pub struct SharedStep {
    /// Functions and calls.
    pub code: StepCode,
    /// What the caller must know.
    pub contract: Contract,
    /// The program of each function.
    pub programs: Vec<Arc<Program>>,
    /// The program of the guards, if there are any.
    pub guards: Option<Arc<Program>>,
    /// Whether the cache had the step's code.
    pub from_cache: bool,
    /// Time in the passes, and in planning samples.
    pub compile_time: Duration,
    /// Time in NVRTC.
    pub build_time: Duration,
    /// Time in each stage.
    pub stages: Vec<(&'static str, Duration)>,
}

impl<B: Backend> CudaMaker<B> {
    /// A maker of steps with these options, for this target.
    pub fn new(options: &Options, target: &CudaTarget, backend: B) -> Self {
        Self {
            options: Options {
                debug: None,
                ..options.clone()
            },
            target: target.clone(),
            backend,
            guards: Mutex::default(),
        }
    }

    /// What it compiles with.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The programs of `sources`, and the time that NVRTC took.
    fn programs(&self, sources: Vec<Source>) -> Result<(Vec<Arc<Program>>, Duration, bool), CudaError> {
        let start = Instant::now();
        let cubins = self.backend.compile(&sources)?;
        let cached = cubins.iter().all(|cubin| cubin.cached);
        let programs = sources
            .into_iter()
            .zip(cubins)
            .map(|(source, Cubin { image, .. })| Arc::new(Program::new(source, image)))
            .collect();
        Ok((
            programs,
            if cached { Duration::ZERO } else { start.elapsed() },
            cached,
        ))
    }

    /// The program of a step's guards.
    fn guards(&self, code: &StepCode) -> Result<Option<Arc<Program>>, CudaError> {
        let Some(source) = guards::source(code) else {
            return Ok(None);
        };
        let mut known = self.guards.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = known.get(&source.text) {
            return Ok(Some(program.clone()));
        }
        if known.len() == GUARDS {
            known.clear();
        }
        let text = source.text.clone();
        let (mut programs, ..) = self.programs(vec![source])?;
        let program = programs.pop();
        if let Some(program) = &program {
            known.insert(text, program.clone());
        }
        Ok(program)
    }

    /// A step with the side of each convolution that the device takes.
    fn decide(
        &self,
        code: StepCode,
        mut contract: Contract,
        mut stages: Vec<(&'static str, Duration)>,
        from_cache: bool,
    ) -> Result<Planned, StepError> {
        let start = Instant::now();
        self.backend.measure(&code)?;
        let (code, refused) = code.decided(|functions, either| self.backend.takes(functions, either))?;
        name_own_kernels(&code, &mut contract, &refused);
        stages.push(("choices", start.elapsed()));
        Ok(Planned {
            functions: functions(&code),
            code,
            contract,
            stages,
            from_cache,
        })
    }

    /// A planned step, whose functions are its own.
    fn with_own_functions(&self, planned: Planned, passes: Duration) -> Result<SharedStep, StepError> {
        let Planned {
            code,
            contract,
            mut stages,
            from_cache,
            ..
        } = planned;
        let (sources, places) = code.sources();
        let (programs, build_time, _) = self.programs(sources)?;
        stages.push(("nvrtc", build_time));
        Ok(SharedStep {
            programs: places.into_iter().map(|place| programs[place].clone()).collect(),
            guards: self.guards(&code)?,
            code,
            contract,
            from_cache,
            compile_time: passes,
            build_time,
            stages,
        })
    }
}

/// The functions of a step without the numbers that their names end with.
fn functions(code: &StepCode) -> Vec<FamilyFunction> {
    let functions = code.functions.iter();
    functions
        .map(|Function { name, text, guarded }| {
            let kind = name.trim_end_matches('_');
            let kind = kind.trim_end_matches(|c: char| c.is_ascii_digit());
            FamilyFunction {
                kind: kind.trim_end_matches('_').to_owned(),
                text: text.clone(),
                guarded: *guarded,
            }
        })
        .collect()
}

impl<B: Backend> Maker for CudaMaker<B> {
    type Function = FamilyFunction;
    type Planned = Planned;
    type Step = SharedStep;
    type Built = Built;
    type Helpers = ();
    type Error = StepError;

    fn plan(&self, graph: &Graph) -> Result<Planned, StepError> {
        let step = compile(graph, &self.options, &self.target)?;
        let contract = step.contract();
        // Both sides of a convolution: nothing is measured for a sample.
        Ok(Planned {
            functions: functions(&step.code),
            code: step.code,
            contract,
            stages: step.times,
            from_cache: false,
        })
    }

    fn plan_wanted(&self, graph: &Graph) -> Result<Planned, StepError> {
        // The code of a size is not kept on disk: a program has hundreds.
        let Planned {
            code,
            contract,
            stages,
            ..
        } = self.plan(graph)?;
        self.decide(code, contract, stages, false)
    }

    fn functions(planned: &Planned) -> &[FamilyFunction] {
        &planned.functions
    }

    fn into_functions(planned: Planned) -> Vec<FamilyFunction> {
        planned.functions
    }

    fn operation(planned: &Planned, position: usize) -> String {
        let is_call =
            |kind: &CallKind| matches!(kind, CallKind::Launch { function, .. } if *function == position);
        let call = planned.code.calls.iter().find(|call| is_call(&call.kind));
        let report = call.and_then(|call| planned.contract.kernels.get(call.kernel as usize));
        report
            .and_then(|report| report.nodes.last())
            .map_or_else(String::new, |node| format!("{node} : {}", node.ty))
    }

    fn read(function: &FamilyFunction, (): &mut ()) -> Reading {
        write::read(function)
    }

    fn characters(function: &FamilyFunction) -> usize {
        let FunctionText { helpers, body, .. } = &function.text;
        // What kernels of one program share is compiled once.
        let shared = match (helpers.find("#ifndef"), helpers.rfind("#endif")) {
            (Some(from), Some(to)) => to.saturating_sub(from),
            _ => 0,
        };
        helpers.len() - shared + body.len()
    }

    fn build(
        &self,
        name: &str,
        templates: &[Template<FamilyFunction>],
        (): &mut (),
    ) -> Result<Batch<Built>, Failure<StepError>> {
        self.build_programs(name, templates).map_err(|error| match error {
            CudaError::Compile {
                ref name, ref log, ..
            } => Failure::Rejected {
                file: name.clone(),
                log: log.clone(),
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

    fn cached(&self, graph: &Graph) -> Result<Option<SharedStep>, StepError> {
        let start = Instant::now();
        let store = self.backend.store();
        let Some((code, contract)) =
            crate::execute::prepare::stored(graph, &self.options, &self.target, store)
        else {
            return Ok(None);
        };
        let planned = self.decide(code, contract, Vec::new(), true)?;
        let (sources, _) = planned.code.sources();
        if !sources.iter().all(|source| self.backend.has(source)) {
            return Ok(None);
        }
        Ok(Some(self.with_own_functions(planned, start.elapsed())?))
    }

    fn alone(&self, graph: &Graph) -> Result<SharedStep, StepError> {
        let start = Instant::now();
        let mut stages = Vec::new();
        let store = self.backend.store();
        let (code, contract, from_cache) = compiled(graph, &self.options, &self.target, store, &mut stages)?;
        let planned = self.decide(code, contract, stages, from_cache)?;
        self.with_own_functions(planned, start.elapsed())
    }

    fn bind(
        &self,
        _: &Graph,
        planned: Planned,
        bound: &[Bound<'_, Self>],
        times: Times,
    ) -> Result<SharedStep, StepError> {
        let Planned {
            mut code,
            mut contract,
            mut stages,
            from_cache,
            ..
        } = planned;
        let mut words: Vec<Vec<u64>> = Vec::with_capacity(bound.len());
        let mut programs = Vec::with_capacity(bound.len());
        let mut renamed: HashMap<String, String> = HashMap::new();
        for (function, Bound { unit, pattern, built }) in code.functions.iter_mut().zip(bound) {
            // The text with these numbers is the text that the graph alone gives.
            assert!(pattern.fits(unit), "a template stands for functions that fit it");
            let written = &built.written;
            renamed.insert(function.name.clone(), written.name.clone());
            *function = Function {
                name: written.name.clone(),
                text: written.text.clone(),
                guarded: written.guarded,
            };
            words.push(written.words(&unit.values));
            programs.push(built.program.clone());
        }
        for call in &mut code.calls {
            if let CallKind::Launch {
                function, arguments, ..
            } = &mut call.kind
                && !words[*function].is_empty()
            {
                arguments.push(Pointer::Words(words[*function].clone()));
            }
        }
        for kernel in &mut contract.kernels {
            if let Some(name) = renamed.get(&kernel.name) {
                kernel.name.clone_from(name);
            }
        }
        let mut step = SharedStep {
            guards: self.guards(&code)?,
            code,
            contract,
            programs,
            from_cache,
            compile_time: times.passes,
            build_time: Duration::ZERO,
            stages: Vec::new(),
        };
        if let Some(learned) = times.learned {
            step.compile_time += learned.sample_time;
            stages.push(("samples", learned.sample_time));
            step.build_time = learned.build_time;
            stages.push(("nvrtc", learned.build_time));
        }
        step.stages = stages;
        Ok(step)
    }

    fn debug(&self, graph: &Graph, folder: &Path) -> Result<(), StepError> {
        let options = Options {
            debug: Some(folder.to_path_buf()),
            ..self.options.clone()
        };
        let step = compile(graph, &options, &self.target)?;
        let contract = step.contract();
        debug::write(folder, &step.code, &contract);
        Ok(())
    }

    fn jobs(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }
}

impl<B: Backend> CudaMaker<B> {
    /// Templates as kernels, so many to a program.
    fn written(&self, templates: &[Template<FamilyFunction>]) -> Result<Kernels, CudaError> {
        let mut written = Vec::with_capacity(templates.len());
        for template in templates {
            written.push(write::write(template).ok_or_else(|| CudaError::Compile {
                name: template.base.function.kind.clone(),
                architecture: String::new(),
                excerpt: "it has more numbers than the parameters of a kernel hold".into(),
                log: "it has more numbers than the parameters of a kernel hold".into(),
            })?);
        }
        // Two templates may be written alike, where one has more constants that it does not mention.
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut sources: Vec<Source> = Vec::new();
        let mut of = Vec::with_capacity(written.len());
        for template in &written {
            let next = places.len();
            let known = places.get(&*template.name).copied();
            let place = known.unwrap_or(next / KERNELS_OF_A_PROGRAM);
            if known.is_none() {
                places.insert(&template.name, place);
                if place == sources.len() {
                    sources.push(Source {
                        name: template.name.clone(),
                        text: PRELUDE.to_owned(),
                    });
                }
                sources[place].text += &template.text.source(&template.name, template.guarded);
            }
            of.push(place);
        }
        Ok((written, sources, of))
    }
}
