//! `explain`: the report on a region.
//!
//! ```text
//! RegionReport (kiln-burn) ──► collect ──► Report ──► text   Display
//!                                            │     ├► JSON   Report::to_json
//!                     machine, measure ──────┘     └► HTML   Explain::to_html: one file, no network
//! ```

mod collect;
mod html;
mod machine;
mod measure;
mod ranks;
mod report;
mod text;

use std::fmt;

use std::sync::Arc;

use kiln_burn::record::Bindings;
use kiln_burn::{CompileBackend, CompileOptions, Error, Point, RegionReport, StepReport, execute};

pub use machine::{Limit, device_memory_peak};
pub use ranks::Assumptions;
pub use report::{
    Break, Bucketing, Buffer, Compile, Counted, Fused, Guards, Kernel, Machine, Memory, PhaseCount,
    Prediction, Rate, Recomputed, Replay, Report, SavedTensor, State, Step, Traveller,
};

use crate::train::History;

/// What a region compiled, why, and what cut it. Prints as text.
///
/// ```
/// use burn_tensor::Tensor;
/// use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
///
/// let mut step = kiln::compile(CompileOptions::default().with_backend(CompileBackend::AotEager));
/// let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &KilnDevice::default());
/// let y = step.run(|| {
///     let total: f32 = x.clone().sum().into_scalar();
///     x.clone() * total
/// })?;
/// let explain = step.explain();
/// assert_eq!(explain.report().breaks.len(), 1);
/// println!("{explain}");
/// # Ok::<(), kiln::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Explain {
    report: Report,
}

impl Explain {
    pub(crate) fn new(region: RegionReport) -> Self {
        Self {
            report: collect::report(&region),
        }
    }

    /// Adds how a training step of this history is replayed.
    pub(crate) fn with_replay(mut self, history: &History, bindings: Option<&Bindings>) -> Self {
        self.report.replay = Some(collect::replay(history, bindings));
        self
    }

    /// Adds what a training step keeps from call to call.
    pub(crate) fn with_state(mut self, state: Option<State>) -> Self {
        if let Some(replay) = &mut self.report.replay {
            replay.state = state;
        }
        self
    }

    /// The data.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The data, to keep or change.
    pub fn into_report(self) -> Report {
        self.report
    }

    /// The data as JSON.
    pub fn to_json(&self) -> String {
        self.report.to_json()
    }

    /// The data as one HTML file that needs nothing else: findings, memory over the step, the graph with
    /// phases coloured and kernels as boxes, sortable tables.
    pub fn to_html(&self) -> String {
        self.report.to_html()
    }

    /// Adds what the step would take on several ranks, under each of the assumptions. `region` is the report
    /// of a step that was compiled for them ([`kiln_distributed::imagine`]), and `apart` that of the same
    /// step compiled with [`crate::Buckets::NONE`] and its explanation, from which other sizes of buckets are
    /// predicted. The times are those of [`Explain::with_times`], or the shortest that `machine` allows.
    ///
    /// # Errors
    ///
    /// In words, if a step has no collectives.
    pub fn with_predictions(
        mut self,
        region: &RegionReport,
        apart: (&RegionReport, &Explain),
        assumptions: &[Assumptions],
        machine: &Machine,
    ) -> Result<Self, String> {
        let whole = (region, &self.report);
        let apart = (apart.0, apart.1.report());
        let predicted = assumptions
            .iter()
            .map(|one| ranks::predict(whole, apart, one, machine));
        self.report.predictions = predicted.collect::<Result<_, _>>()?;
        if assumptions.iter().any(|one| one.imagined) {
            let steps = self.report.steps.iter_mut();
            steps.for_each(|step| step.collectives.iter_mut().for_each(|it| it.exposed = None));
        }
        Ok(self)
    }

    /// Adds the times of kernels that ran under a profile. `machine` ([`Machine::measure`]) has the limits
    /// to compare them with.
    pub fn with_times(mut self, summary: &kiln_profile::Summary, machine: Option<Machine>) -> Self {
        self.report.add_times(summary, machine);
        self
    }
}

/// The effect of memory budgets on a compiled step: its plans from the fastest to the smallest.
/// [`Point::peak`] is the smallest budget that gets a plan.
///
/// # Errors
///
/// If there is no C compiler, or no GPU for a step that runs on one, or the step cannot be scheduled.
pub fn memory_curve(step: &StepReport, options: &CompileOptions) -> Result<Vec<Point>, Error> {
    let curve = match step.backend {
        CompileBackend::Cuda => execute::cuda::memory_curve(step.gpu, &step.graph, options),
        _ => execute::cpu::memory_curve(&step.graph, options),
    };
    curve.map_err(|source| Error::Execute {
        region: options.name.clone(),
        source: Arc::new(source),
    })
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.report.fmt(f)
    }
}
