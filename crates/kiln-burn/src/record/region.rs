//! A region: the steps compiled for one `run` call site.
//!
//! A region is cut into segments by graph breaks; usually there is one. Each segment has a list of compiled
//! steps, most recently used first. A recording that no guard accepts is a new step: it is imported,
//! prepared by the region's backend, and remembered with the guard that failed.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn_ir::{ScalarIr, TensorId, TensorIr};
use kiln_profile::Category;
use rustc_hash::FxHashMap;

use super::breaks::{BreakReason, GraphBreak};
use super::deferred;
use super::gradient::{self, Source};
use super::guard;
use super::history::{self, CompileEvent};
use super::host_operations;
use super::location::{Location, user_location};
use super::marks::{self, MarkedInput};
use super::recording::{Input, Recorded};
use super::report::{Recompile, RegionReport};
use super::salvage;
use super::step::Step;
use super::words::type_text;
use crate::error::Error;
use crate::execute::families::Families;
use crate::execute::{Effort, Setting};
use crate::options::{CompileBackend, CompileOptions, Dynamic};
use crate::storage::Storage;
use crate::table;

/// A tensor that the program of a region read on the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostRead {
    /// Its type and shape.
    pub ty: String,
    /// The method of Burn's tensors that runs on the host and reads it, such as `sort`; none if the program
    /// itself does.
    pub method: Option<&'static str>,
    /// The line that reads it, if it could be found.
    pub location: Option<Location>,
}

impl HostRead {
    /// What to use in the place of the method of Burn's that reads; none if the program itself does.
    pub fn counterpart(&self) -> Option<String> {
        self.method.map(host_operations::remedy)
    }
}

impl fmt::Display for HostRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a tensor ({})", self.ty)?;
        match &self.location {
            Some(location) => write!(f, " at {location}"),
            None => Ok(()),
        }
    }
}

/// The last run of a region, as far as a replay needs it ([`super::replay`]).
#[derive(Clone)]
pub struct LastRun {
    /// The step that ran.
    pub step: Arc<Step>,
    /// The segment that it was; a replay needs a region of one segment.
    pub segment: usize,
    /// Ids of the tensors it read, in order.
    pub inputs: Vec<TensorId>,
    /// Ids of the tensors it left behind, in order.
    pub outputs: Vec<TensorId>,
    /// Its runtime scalars, in order.
    pub scalars: Vec<ScalarIr>,
    /// Number of random operations in it.
    pub random_operations: usize,
    /// Inputs that the program made from data on the host, by position; empty unless the region keeps them.
    pub host_data: FxHashMap<usize, Storage>,
    /// The first graph break of the call.
    pub graph_break: Option<GraphBreak>,
}

/// The compiled steps of one region and their history.
pub struct Region {
    /// How steps are compiled.
    pub options: CompileOptions,
    /// Most steps that a segment keeps; the least recently used is dropped. Lazy devices use this: they
    /// have no step to come back to.
    pub capacity: usize,
    /// Whether [`LastRun::host_data`] is kept: a replay needs to know whether it is the same at each call.
    pub keeps_host_data: bool,
    /// Whether a recording that would have to be compiled is an error.
    pub frozen: bool,
    /// Whether a call computes on placeholders, whose values must not be read: a read is noted.
    pub on_placeholders: bool,
    /// Whether a recording that cannot be compiled is run all the same, for the tensors that it leaves
    /// behind ([`super::salvage`]).
    pub salvages: bool,
    /// The first tensor that the program read on the host in this call.
    pub host_read: Option<HostRead>,
    /// Where the program first seeded the generator of random numbers in this call; a line, if one was found.
    pub seeded: Option<Option<Location>>,
    /// The first graph break of this call.
    graph_break: Option<GraphBreak>,
    segments: Vec<Vec<Arc<Step>>>,
    last: Option<LastRun>,
    calls: u64,
    breaks: Vec<(GraphBreak, u64)>,
    recompiles: Vec<Recompile>,
    compiles: Vec<CompileEvent>,
    warned_limit: bool,
    /// Whether a step that fits stays although a better one could be compiled: that has failed.
    keeps_steps: bool,
    /// Steps of several shapes share their kernels; none where each shape is compiled by itself.
    families: Option<Families>,
    /// How long the program took to issue the operations of the recording that comes next.
    pub recorded_in: Duration,
    /// The folder of dumps; none if they were not asked for.
    debug: Option<PathBuf>,
}

impl Region {
    /// A region that has compiled nothing.
    pub fn new(options: CompileOptions) -> Self {
        Self {
            debug: history::debug_folder(options.debug.as_deref(), &options.name),
            ..Self::for_part(options)
        }
    }

    /// A region for recordings that never run.
    pub fn for_part(options: CompileOptions) -> Self {
        Self {
            debug: None,
            frozen: options.frozen,
            families: (options.dynamic != Dynamic::Off).then(Families::default),
            options,
            capacity: usize::MAX,
            keeps_host_data: false,
            on_placeholders: false,
            salvages: false,
            host_read: None,
            seeded: None,
            graph_break: None,
            segments: Vec::new(),
            last: None,
            calls: 0,
            breaks: Vec::new(),
            recompiles: Vec::new(),
            compiles: Vec::new(),
            warned_limit: false,
            keeps_steps: false,
            recorded_in: Duration::ZERO,
        }
    }

    /// Counts a call.
    pub fn begin(&mut self) {
        self.calls += 1;
        self.last = None;
        self.host_read = None;
        self.seeded = None;
        self.graph_break = None;
    }

    /// Notes that the program seeds the generator of random numbers, which a replay would not do.
    pub fn note_seed(&mut self) {
        if self.keeps_host_data {
            self.seeded.get_or_insert_with(user_location);
        }
    }

    /// Notes that the program reads a tensor on the host, if that matters: a replay would not read it, and
    /// a placeholder has no value.
    pub fn note_host_read(&mut self, tensor: &TensorIr, reason: &BreakReason) {
        let is_replayed = self.keeps_host_data && *reason == BreakReason::Read;
        if (is_replayed || self.on_placeholders) && self.host_read.is_none() {
            self.host_read = Some(HostRead {
                ty: type_text(tensor),
                method: host_operations::running(),
                location: user_location(),
            });
        }
    }

    /// The last step that ran in this call; none if nothing was recorded or the step failed.
    pub fn last_run(&self) -> Option<&LastRun> {
        self.last.as_ref()
    }

    /// Whether there is a compiled step for this segment that was not made for one run only.
    pub fn has_compiled(&self, segment: usize) -> bool {
        let steps = self.segments.get(segment);
        steps.is_some_and(|steps| steps.iter().any(|step| !step.provisional))
    }

    /// Remembers a graph break.
    pub fn note_break(&mut self, graph_break: GraphBreak) {
        tracing::info!(target: "kiln::graph_breaks", region = %self.options.name, "{graph_break}");
        if kiln_profile::is_active() {
            let region = ("region", self.options.name.clone().into());
            let text = ("break", graph_break.to_string().into());
            kiln_profile::instant(Category::Break, "graph break", vec![region, text]);
        }
        self.graph_break.get_or_insert_with(|| graph_break.clone());
        match self.breaks.iter_mut().find(|(known, _)| *known == graph_break) {
            Some((_, count)) => *count += 1,
            None => self.breaks.push((graph_break, 1)),
        }
    }

    /// Runs a recording as segment `segment` and enters its outputs into the table. If that fails, the
    /// table says why instead.
    ///
    /// Inputs that the program surrendered have their elements again if the step failed before it ran.
    pub fn run(&mut self, segment: usize, mut recorded: Recorded) -> Result<(), Error> {
        let ids = recorded.output_ids.clone();
        if ids.is_empty() {
            return Ok(());
        }
        self.last = None;
        let index = match self.find_or_compile(segment, &recorded) {
            Err(error @ Error::Frozen { .. }) => {
                let surrendered = recorded.inputs.iter().filter(|input| input.is_surrendered());
                surrendered.for_each(|input| table::insert(input.ir.id, input.tensor.clone()));
                deferred::enter(&self.options, recorded);
                return Err(error);
            }
            Err(error) if self.salvages => {
                salvage::run(&self.options, recorded);
                return Err(error);
            }
            found => found,
        };
        match index.and_then(|index| self.execute(segment, index, &mut recorded)) {
            Ok(tensors) => {
                ids.into_iter()
                    .zip(tensors)
                    .for_each(|(id, tensor)| table::insert(id, tensor));
                Ok(())
            }
            Err(error) => {
                let reason: Arc<str> = error.to_string().into();
                ids.into_iter().for_each(|id| table::fail(id, reason.clone()));
                let surrendered = recorded.inputs.into_iter().filter(Input::is_surrendered);
                surrendered.for_each(|input| table::insert(input.ir.id, input.tensor));
                Err(error)
            }
        }
    }

    /// Runs `recorded` by step `index` of the segment, which takes its inputs.
    fn execute(
        &mut self,
        segment: usize,
        index: usize,
        recorded: &mut Recorded,
    ) -> Result<Vec<Storage>, Error> {
        // Most recently used first.
        self.segments[segment][..=index].rotate_right(1);
        let step = self.segments[segment][0].clone();
        let inputs: Vec<TensorId> = recorded.inputs.iter().map(|input| input.ir.id).collect();
        let host_data = match self.keeps_host_data {
            true => host_data(recorded),
            false => FxHashMap::default(),
        };
        let given = std::mem::take(&mut recorded.inputs);
        let surrendered: Vec<bool> = given.iter().map(Input::is_surrendered).collect();
        let mut given: Vec<Storage> = given.into_iter().map(|input| input.tensor).collect();
        let tensors = match step.run(&mut given, &recorded.scalars, &recorded.streams) {
            Ok(tensors) => tensors,
            Err(error) => {
                // The inputs that the step left in the list are as they were: it stopped before it
                // overwrote anything.
                let left = inputs.into_iter().zip(surrendered).zip(given);
                left.filter(|((_, surrendered), _)| *surrendered)
                    .for_each(|((id, _), tensor)| table::insert(id, tensor));
                return Err(error);
            }
        };
        self.last = Some(LastRun {
            step,
            segment,
            inputs,
            outputs: std::mem::take(&mut recorded.output_ids),
            scalars: std::mem::take(&mut recorded.scalars),
            random_operations: recorded.streams.len(),
            host_data,
            graph_break: self.graph_break.clone(),
        });
        Ok(tensors)
    }

    fn find_or_compile(&mut self, segment: usize, recorded: &Recorded) -> Result<usize, Error> {
        while self.segments.len() <= segment {
            self.segments.push(Vec::new());
        }
        let guard = kiln_profile::span(Category::Host, "guard");
        let known = self.segments[segment]
            .iter()
            .position(|step| step.guard.accepts(recorded));
        drop(guard);
        let mut reason = None;
        if let Some(index) = known {
            let step = &self.segments[segment][index];
            let is_best = !step.provisional && !step.could_overwrite_more(recorded);
            if self.frozen || self.keeps_steps || is_best {
                return Ok(index);
            }
        }
        if self.frozen {
            let nearest = self.nearest(segment, recorded);
            let mismatch = nearest.and_then(|step| step.guard.mismatch(recorded));
            return Err(Error::frozen(&self.options.name, mismatch.as_ref()));
        }
        let lines = self.lines(segment, recorded);
        let (marks, mut notes) = (self.marks(segment, recorded, known), Vec::new());
        let replaced = known.map(|index| (index, self.segments[segment].remove(index)));
        if replaced.is_none()
            && let Some(nearest) = self.nearest(segment, recorded)
            && let Some(mismatch) = nearest.guard.mismatch(recorded)
        {
            let guard = &nearest.guard;
            notes = marks::notes(guard, recorded, &marks, self.options.dynamic);
            let expected = self.segments[segment].iter().all(|step| step.provisional);
            let remedy = if expected {
                history::EXPECTED
            } else {
                mismatch.remedy()
            };
            tracing::info!(
                target: "kiln::recompiles",
                region = %self.options.name,
                segment,
                "{mismatch}; {remedy}"
            );
            reason = Some(mismatch);
        }
        let (backend, provisional, at_limit) = self.choose_backend(segment, recorded, known.is_some());
        let number = self.compiles.len();
        let folder = self
            .debug
            .as_ref()
            .map(|folder| folder.join(format!("step-{number}")));
        let setting = Setting {
            effort: if provisional { Effort::Quick } else { Effort::Full },
            debug: folder.as_deref(),
            families: self.families.as_ref(),
            only_known: at_limit,
            sizes: None,
        };
        let compiled = Step::compile(&self.options, backend, setting, recorded, (lines, marks));
        let absorbed = compiled.as_ref().is_ok_and(Step::is_absorbed);
        if let Some(mismatch) = reason.clone().filter(|_| !absorbed) {
            self.recompiles.push(Recompile { segment, mismatch });
        }
        let mut step = match (compiled, replaced) {
            // Ranks compile together: what one of them keeps would wait for the others.
            (Err(error), Some((index, step))) if !recorded.is_of_ranks() => {
                self.keep_steps(&error);
                self.segments[segment].insert(index, step);
                return Ok(index);
            }
            (compiled, _) => compiled?,
        };
        if at_limit && !absorbed {
            self.warn_of_limit(recorded.is_of_ranks());
        }
        step.number = number;
        step.stages.insert(0, ("record", self.recorded_in));
        let name = &self.options.name;
        let at = (segment, number);
        history::note_compile(
            name,
            at,
            step.backend,
            step.executable.is_from_cache(),
            &step.stages,
        );
        let mut event = CompileEvent::new(
            at,
            (step.backend, provisional),
            reason,
            step.compile_time,
            step.runs.clone(),
        );
        event.absorbed = absorbed;
        event.shares = step.shares_sizes();
        event.notes = step.executable.size_notes().to_vec();
        if !absorbed {
            event.notes.append(&mut notes);
        }
        for note in &event.notes {
            tracing::info!(target: "kiln::recompiles", region = %self.options.name, segment, "{note}");
        }
        self.compiles.push(event);
        let steps = &mut self.segments[segment];
        steps.insert(0, Arc::new(step));
        steps.truncate(self.capacity);
        forget_absorbed(steps);
        Ok(0)
    }

    /// Goes on with the steps that there are, where a better one than a step that fits could not be compiled.
    fn keep_steps(&mut self, error: &Error) {
        self.keeps_steps = true;
        kiln_log::warn!(
            target: "kiln",
            region = %self.options.name,
            %error,
            "a faster step could not be compiled; the one that there is goes on"
        );
    }

    /// The marked dimensions of a recording's inputs, which step `known` of the segment accepts.
    fn marks(&self, segment: usize, recorded: &Recorded, known: Option<usize>) -> Vec<MarkedInput> {
        if self.families.is_none() {
            return Vec::new();
        }
        let resembling = match known {
            Some(index) => Some(&self.segments[segment][index]),
            None => self.nearest(segment, recorded),
        };
        marks::of(recorded, resembling.map_or(&[], |step| &step.marks))
    }

    /// The source of each operation: looked up while recording, or else that of the step that the recording
    /// resembles most.
    fn lines(&self, segment: usize, recorded: &Recorded) -> Vec<Source> {
        match recorded.lines.is_empty() {
            false => gradient::sources(&recorded.operations, &recorded.lines, &recorded.full_precision),
            true => self
                .nearest(segment, recorded)
                .map_or_else(Vec::new, |step| step.guard.lines_of(recorded)),
        }
    }

    /// The compiled step that agrees longest; none if there is no step.
    fn nearest(&self, segment: usize, recorded: &Recorded) -> Option<&Arc<Step>> {
        self.segments[segment]
            .iter()
            .max_by_key(|step| step.guard.agreement(recorded))
    }

    /// The backend for a new step, whether the step is provisional, and whether the recompile limit is
    /// reached. A provisional step is the first call of an optimizer: it has a graph of its own, because the
    /// state does not exist yet, and that graph will not come again. Behind the limit only shapes whose
    /// kernels are all known, and steps on several ranks, run on anything but `aot_eager`.
    fn choose_backend(
        &self,
        segment: usize,
        recorded: &Recorded,
        seen: bool,
    ) -> (CompileBackend, bool, bool) {
        let backend = self.options.backend.on(recorded.gpu());
        let compiled = self.segments[segment]
            .iter()
            .filter(|step| !step.provisional && !step.is_absorbed())
            .count();
        if compiled >= self.options.recompile_limit && backend > CompileBackend::AotEager {
            return match (backend, &self.families) {
                // Other ranks, which may be behind the limit or not, wait for what this step exchanges.
                _ if recorded.is_of_ranks() => (backend, false, true),
                (CompileBackend::Cpu | CompileBackend::Cuda, Some(_)) => (backend, false, true),
                _ => (CompileBackend::AotEager, false, true),
            };
        }
        let first = self.segments[segment].is_empty() && !seen;
        if first && backend.compiles() && creates_state(recorded) {
            return (backend, true, false);
        }
        (backend, false, false)
    }

    /// What made compilations necessary, and what to do about it.
    fn advice(&self) -> String {
        let mismatches = self.recompiles.iter().map(|recompile| &recompile.mismatch);
        let shares = matches!(self.options.backend, CompileBackend::Cpu | CompileBackend::Cuda);
        guard::advice(mismatches, shares.then_some(self.options.dynamic))
    }

    /// Says once that the recompile limit is reached.
    fn warn_of_limit(&mut self, exchanges: bool) {
        if std::mem::replace(&mut self.warned_limit, true) {
            return;
        }
        kiln_log::warn!(
            target: "kiln::recompiles",
            region = %self.options.name,
            "recompile limit of {} reached; further steps {}.{}",
            self.options.recompile_limit,
            guard::behind_limit(exchanges),
            self.advice(),
        );
    }

    /// The report on the region so far.
    pub fn report(&self) -> RegionReport {
        let steps = self.segments.iter().enumerate();
        RegionReport {
            name: self.options.name.clone(),
            calls: self.calls,
            steps: steps
                .flat_map(|(segment, steps)| steps.iter().map(move |step| step.report(segment)))
                .collect(),
            breaks: self.breaks.clone(),
            recompiles: self.recompiles.clone(),
            compiles: self.compiles.clone(),
            recompile_limit: self.options.recompile_limit,
            advice: match self.warned_limit {
                true => self.advice().trim_start().to_owned(),
                false => String::new(),
            },
        }
    }
}

/// Most steps of a segment that are kept although nothing was compiled for them: to plan one again takes a
/// fraction of a second, and to keep one takes the memory of a graph and its schedule.
const ABSORBED: usize = 128;

/// Drops the steps that ran least recently of those for which nothing was compiled.
fn forget_absorbed(steps: &mut Vec<Arc<Step>>) {
    let mut kept = 0;
    steps.retain(|step| {
        kept += usize::from(step.is_absorbed());
        !step.is_absorbed() || kept <= ABSORBED
    });
}

/// Whether the step leaves much more state behind than it replaces. Dying inputs are the state that it
/// replaces; the new state must exceed half of that. Only tensors of a type that both dies and is left
/// behind count: a batch that ends in the step is no state, and neither is a loss that is left.
fn creates_state(recorded: &Recorded) -> bool {
    let ending: Vec<&TensorIr> = recorded
        .inputs
        .iter()
        .filter(|input| input.tensor_dies())
        .map(|input| &input.ir)
        .collect();
    let kept: Vec<&TensorIr> = recorded
        .operations
        .iter()
        .flat_map(|operation| operation.outputs())
        .filter(|output| recorded.output_ids.contains(&output.id))
        .collect();
    let bytes_of_types_in = |these: &[&TensorIr], those: &[&TensorIr]| -> usize {
        let alike = |a: &TensorIr, b: &TensorIr| a.dtype == b.dtype && a.shape == b.shape;
        let both = these.iter().filter(|a| those.iter().any(|b| alike(a, b)));
        both.map(|ir| ir.shape.num_elements() * ir.dtype.size()).sum()
    };
    let replaced = bytes_of_types_in(&ending, &kept);
    replaced > 0 && bytes_of_types_in(&kept, &ending) > replaced + replaced / 2
}

/// The inputs made from data on the host, by position.
fn host_data(recorded: &Recorded) -> FxHashMap<usize, Storage> {
    let made = recorded
        .inputs
        .iter()
        .enumerate()
        .filter(|(_, input)| input.is_host_data());
    made.map(|(index, input)| (index, input.tensor.clone())).collect()
}
