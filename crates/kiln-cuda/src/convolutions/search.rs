//! Which of the library's engines is the fastest on a shape.
//!
//! The heuristic names engine configurations in the order in which it believes in them. Left out are engines
//!
//! - that may give other bits from run to run;
//! - that round operands or sums more than asked for: tensor cores for f32 without TF32, narrower operands,
//!   narrower sums;
//! - that transform (Fourier, Winograd), whose rounding errors are larger and spread NaN over tiles of
//!   pixels;
//! - whose results are wrong ([`super::check`]).
//!
//! Engines whose kernels the library compiles when it makes a plan come last, because such a plan takes up
//! to a second to make. The search tries them only where no other engine computes the convolution, such as
//! one of 16-bit operands with a result of f32. The search leaves these engines alone where channels are no
//! whole vectors: in two of their kernels (cuDNN 9, two channels of 16 bits) a load was misaligned, which
//! ends all work on the device.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::Convolver;
use super::check::Check;
use super::convolution::Convolution;
use super::describe::Described;
use super::descriptor::Descriptor;
use super::run::{ConvolutionArguments, PreparedConvolution, about};
use crate::error::{CudaError, Result};
use crate::products::{Number, Operand, fastest, random_for, time_runs};
use crate::runtime::{Storage, Stream};
use crate::sys::cudnn::{
    CudnnHandle, attribute, attribute_type, behavior_note, descriptor, heuristics_mode, numerical_note,
};

/// How far a search goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// Bytes of working memory that a plan may have.
    pub workspace_bytes: usize,
    /// How many plans are timed.
    pub plans: usize,
    /// The most runs of one plan that are timed together.
    pub runs: u32,
    /// Whether engines that compile their kernels are tried beside the others, and not only where there are
    /// no others.
    pub compiling: bool,
    /// Whether a plan's result is looked at before it may be chosen. A stand-in for the library computes no
    /// results.
    pub checked: bool,
}

impl Default for PlanLimits {
    /// 64 MiB; 6 plans; 10 runs; compiling engines only where there are no others.
    fn default() -> Self {
        Self {
            workspace_bytes: 64 << 20,
            plans: 6,
            runs: 10,
            compiling: false,
            checked: true,
        }
    }
}

/// A plan for one convolution, of one version of the library, on one kind of device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The plan in the library's form.
    pub plan: String,
    /// Bytes of working memory.
    pub workspace_bytes: usize,
    /// Time of one run, in microseconds; zero if there was no memory to try plans on.
    pub microseconds: f32,
    /// The same of the library's first proposal.
    pub first_microseconds: f32,
    /// How many plans were timed; zero if there was no memory to try plans on. Then this one's result was not
    /// looked at, either.
    pub timed: usize,
    /// Milliseconds that making the plan took.
    pub made_milliseconds: f32,
    /// Whether making the plan compiled a kernel.
    pub compiles: bool,
    /// The library's version.
    pub library: String,
}

/// What a search has found out.
pub(crate) enum Found<T> {
    /// It has found this.
    Plans(T),
    /// The convolution has no plan, and never will: the library has no engine for it, or only such as compute
    /// something else. An engine that failed, on the other hand, may run another day.
    Nothing(CudaError),
}

impl<T> Found<T> {
    fn ok(self) -> Result<T> {
        match self {
            Self::Plans(plans) => Ok(plans),
            Self::Nothing(error) => Err(error),
        }
    }
}

/// The library's notes on an engine.
struct Notes {
    numerical: Vec<i32>,
    behavior: Vec<i32>,
}

impl Notes {
    fn of(functions: &crate::sys::cudnn::CudnnFunctions, configuration: &Descriptor) -> Result<Self> {
        let mut engine = Descriptor::new(functions, descriptor::ENGINE)?;
        configuration.descriptor_of(attribute::CONFIGURATION_ENGINE, &mut engine)?;
        Ok(Self {
            numerical: engine.choices_of::<{ numerical_note::COUNT }>(
                attribute::ENGINE_NUMERICAL_NOTES,
                attribute_type::NUMERICAL_NOTE,
            )?,
            behavior: engine.choices_of::<{ behavior_note::COUNT }>(
                attribute::ENGINE_BEHAVIOR_NOTES,
                attribute_type::BEHAVIOR_NOTE,
            )?,
        })
    }

    /// Whether the engine's results are what was asked for.
    fn suit(&self, convolution: &Convolution) -> bool {
        let [first, ..] = convolution.tensors();
        let mut refused = vec![
            numerical_note::NONDETERMINISTIC,
            numerical_note::DOWN_CONVERT_INPUTS,
            numerical_note::REDUCED_PRECISION_REDUCTION,
            numerical_note::FFT,
            numerical_note::WINOGRAD,
        ];
        if first.number == Number::F32 && !convolution.tf32 {
            refused.push(numerical_note::TENSOR_CORE);
        }
        !self.numerical.iter().any(|note| refused.contains(note))
    }

    fn compile(&self) -> bool {
        self.behavior.contains(&behavior_note::RUNTIME_COMPILATION)
    }
}

/// A plan that was made.
struct Candidate {
    prepared: PreparedConvolution,
    json: String,
    milliseconds: f32,
    compiles: bool,
}

impl Candidate {
    fn plan(self, microseconds: f32, timed: usize, library: &str) -> Plan {
        Plan {
            plan: self.json,
            workspace_bytes: self.prepared.workspace_bytes(),
            microseconds,
            first_microseconds: microseconds,
            timed,
            made_milliseconds: self.milliseconds,
            compiles: self.compiles,
            library: library.to_owned(),
        }
    }
}

impl Convolver {
    /// Times the library's plans for `convolution` and returns the fastest. Where there is no memory to try
    /// plans on, that is the library's first proposal, as it is: [`Plan::timed`] is zero.
    ///
    /// # Errors
    /// [`CudaError::Convolution`] if the library has none, [`CudaError::Lost`].
    pub fn search(&self, stream: &Stream, convolution: &Convolution, limits: PlanLimits) -> Result<Plan> {
        self.find(stream, convolution, limits)?.ok()
    }

    /// As [`Self::search`], which says whether there never will be a plan.
    ///
    /// # Errors
    /// [`CudaError::Convolution`] if the library's plans failed, [`CudaError::Lost`].
    pub(crate) fn find(
        &self,
        stream: &Stream,
        convolution: &Convolution,
        limits: PlanLimits,
    ) -> Result<Found<Plan>> {
        let (mut plans, best) = match self.timed(stream, convolution, limits)? {
            Found::Plans(found) => found,
            Found::Nothing(error) => return Ok(Found::Nothing(error)),
        };
        let first = plans[0].microseconds;
        let timed = plans.iter().map(|plan| plan.timed).sum();
        let best = Plan {
            first_microseconds: first,
            timed,
            ..plans.swap_remove(best)
        };
        tracing::debug!(
            %convolution,
            microseconds = best.microseconds,
            first,
            timed,
            workspace = best.workspace_bytes,
            "a plan was chosen"
        );
        Ok(Found::Plans(best))
    }

    /// The library's plans for `convolution`, in the order in which it believes in them, each timed if there
    /// is memory to try them on. Never none.
    ///
    /// # Errors
    /// Those of [`Self::search`].
    pub fn survey(
        &self,
        stream: &Stream,
        convolution: &Convolution,
        limits: PlanLimits,
    ) -> Result<Vec<Plan>> {
        Ok(self.timed(stream, convolution, limits)?.ok()?.0)
    }

    /// The same, and the place of the fastest.
    fn timed(
        &self,
        stream: &Stream,
        convolution: &Convolution,
        limits: PlanLimits,
    ) -> Result<Found<(Vec<Plan>, usize)>> {
        let found = self.queue(stream, |handle| {
            let candidates = self.candidates(handle, convolution, limits)?;
            if candidates.is_empty() {
                return Ok(Found::Nothing(no_engine()));
            }
            let bytes = candidates
                .iter()
                .map(|candidate| candidate.prepared.workspace_bytes());
            let trial = match Trial::new(stream, convolution, bytes.max().unwrap_or(0)) {
                Ok(trial) => trial,
                Err(CudaError::OutOfMemory { .. }) => {
                    let plan = |candidate: Candidate| candidate.plan(0.0, 0, self.version());
                    return Ok(Found::Plans((candidates.into_iter().map(plan).collect(), 0)));
                }
                Err(error) => return Err(error),
            };
            let arguments = trial.arguments();
            let check = limits.checked.then(|| Check::new(convolution));
            let (mut timed, mut least, mut failed) = (Vec::new(), None, None);
            for candidate in candidates {
                let run = || candidate.prepared.run_with(handle, stream, &arguments);
                let time = || match &check {
                    Some(check) if !check.passes(stream, convolution.task, &arguments, run)? => Ok(None),
                    _ => time_runs(stream, limits.runs, least, run).map(Some),
                };
                match time() {
                    Ok(Some(microseconds)) => {
                        least = Some(least.map_or(microseconds, |least: f32| least.min(microseconds)));
                        timed.push((candidate, microseconds));
                    }
                    Ok(None) => {
                        let version = self.version();
                        kiln_log::warn!(
                            %convolution,
                            "a plan of cuDNN {version} computes something else: not used"
                        );
                    }
                    Err(error @ CudaError::Convolution { .. }) => failed = Some(error),
                    Err(error) => return Err(error),
                }
            }
            let best = fastest(stream, limits.runs, &mut timed, |candidate| {
                candidate.prepared.run_with(handle, stream, &arguments)
            })?;
            match (best, failed) {
                (Some(best), _) => {
                    let plan = |(candidate, microseconds): (Candidate, f32)| {
                        candidate.plan(microseconds, 1, self.version())
                    };
                    Ok(Found::Plans((timed.into_iter().map(plan).collect(), best)))
                }
                (None, Some(error)) => Err(error),
                (None, None) => Ok(Found::Nothing(wrong())),
            }
        });
        let about = about(convolution);
        match found {
            Ok(Found::Nothing(error)) => Ok(Found::Nothing(about(error))),
            found => found.map_err(about),
        }
    }

    /// Plans of engines that round as asked for, and whose working memory is small enough; none if the
    /// library has none.
    fn candidates(
        &self,
        handle: CudnnHandle,
        convolution: &Convolution,
        limits: PlanLimits,
    ) -> Result<Vec<Candidate>> {
        let described = Described::new(self.functions(), handle, convolution)?;
        let (mut plain, mut compiling) = (Vec::new(), Vec::new());
        for mode in [heuristics_mode::A, heuristics_mode::FALLBACK] {
            let configurations = match self.configurations(&described, mode) {
                Ok(configurations) => configurations,
                // Unsupported shapes have no answer.
                Err(CudaError::Convolution { .. }) => continue,
                Err(error) => return Err(error),
            };
            for configuration in configurations {
                let Ok(notes) = Notes::of(self.functions(), &configuration) else {
                    continue;
                };
                match notes.suit(convolution) {
                    true if notes.compile() => compiling.push(configuration),
                    true => plain.push(configuration),
                    false => {}
                }
            }
            // The second mode's engines are slow: they are asked for only if the first mode has none.
            if !plain.is_empty() {
                break;
            }
        }
        let mut made = self.make(handle, convolution, &plain, false, limits)?;
        if (made.is_empty() || limits.compiling) && !convolution.is_narrow() {
            made.extend(self.make(handle, convolution, &compiling, true, limits)?);
        }
        Ok(made)
    }

    /// The first of `configurations` that make plans.
    fn make(
        &self,
        handle: CudnnHandle,
        convolution: &Convolution,
        configurations: &[Descriptor],
        compiles: bool,
        limits: PlanLimits,
    ) -> Result<Vec<Candidate>> {
        // Making one takes long.
        let most = if compiles {
            2.min(limits.plans)
        } else {
            limits.plans
        };
        let mut made: Vec<Candidate> = Vec::new();
        for configuration in configurations {
            if made.len() >= most.max(1) {
                break;
            }
            let start = Instant::now();
            let plan = || -> Result<Candidate> {
                let mut plan = Descriptor::new(self.functions(), descriptor::EXECUTION_PLAN)?;
                plan.handle(attribute::PLAN_HANDLE, handle)?;
                plan.descriptor(attribute::PLAN_CONFIGURATION, configuration)?;
                plan.finalize()?;
                let json = plan.text_of(attribute::PLAN_JSON)?;
                Ok(Candidate {
                    prepared: self.prepared(convolution, plan, 0.0)?,
                    json,
                    milliseconds: start.elapsed().as_secs_f32() * 1000.0,
                    compiles,
                })
            };
            match plan() {
                Ok(plan) if plan.prepared.workspace_bytes() <= limits.workspace_bytes => made.push(plan),
                // A configuration that the engine refuses, or one of too much working memory.
                Ok(_) | Err(CudaError::Convolution { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(made)
    }

    /// What the heuristic proposes, best first.
    fn configurations(&self, described: &Described, mode: i32) -> Result<Vec<Descriptor>> {
        let functions = self.functions();
        let mut heuristics = Descriptor::new(functions, descriptor::HEURISTICS)?;
        heuristics.descriptor(attribute::HEURISTICS_OPERATION_GRAPH, &described.graph)?;
        heuristics.choice(attribute::HEURISTICS_MODE, attribute_type::HEURISTICS_MODE, mode)?;
        heuristics.finalize()?;
        let count = heuristics.descriptor_count(attribute::HEURISTICS_RESULTS)?;
        let configurations: Vec<Descriptor> = (0..count)
            .map(|_| Descriptor::new(functions, descriptor::ENGINE_CONFIGURATION))
            .collect::<Result<_>>()?;
        if count == 0 {
            return Ok(configurations);
        }
        let written = heuristics.descriptors_of(attribute::HEURISTICS_RESULTS, &configurations)?;
        Ok(configurations.into_iter().take(written).collect())
    }
}

fn no_engine() -> CudaError {
    CudaError::Convolution {
        convolution: "it".into(),
        call: "the heuristic",
        what: "no engine that is deterministic and rounds no more than asked for".into(),
    }
}

fn wrong() -> CudaError {
    CudaError::Convolution {
        convolution: "it".into(),
        call: "Kiln",
        what: "that the library's plans compute something else".into(),
    }
}

/// Bytes of NaNs in front of each tensor that plans are tried on, and behind it: a plan that reads there
/// computes NaNs, if only by their product with zero, where in a step it would depend on what the neighbours
/// are. One of cuDNN 9's weight gradients of large images does.
pub(super) const MARGIN: usize = 1 << 20;

/// Memory to try plans on.
pub(crate) struct Trial {
    x: Arc<Storage>,
    w: Arc<Storage>,
    y: Arc<Storage>,
    workspace: Arc<Storage>,
}

impl Trial {
    /// Memory for `convolution`, with so many bytes for its plans to work in.
    pub(crate) fn new(stream: &Stream, convolution: &Convolution, workspace_bytes: usize) -> Result<Self> {
        let [_, second, _] = convolution.tensors();
        let memory = |tensor: &super::Tensor| {
            let operand = match std::ptr::eq(tensor, second) {
                true => Operand::Second,
                false => Operand::First,
            };
            random_for(stream, tensor.bytes(), tensor.number, operand, MARGIN)
        };
        Ok(Self {
            x: memory(&convolution.x)?,
            w: memory(&convolution.w)?,
            y: memory(&convolution.y)?,
            workspace: Arc::new(Storage::allocate(stream, workspace_bytes)?),
        })
    }

    pub(crate) fn arguments(&self) -> ConvolutionArguments<'_> {
        ConvolutionArguments {
            x: (&self.x, MARGIN),
            w: (&self.w, MARGIN),
            y: (&self.y, MARGIN),
            workspace: Some((&self.workspace, 0)),
        }
    }
}
