//! Several ranks in the report: what travels between them, and what a step is predicted to take.

use kiln_burn::{RegionReport, StepReport};
use kiln_compiler::Contract;
use kiln_compiler::buckets::Buckets;
use kiln_compiler::overlap::{Event, Overlap, Timeline, Travel};
use kiln_distributed::Link;
use kiln_graph::{CollectiveKind, Phase};

use super::report::{Bucketing, Machine, Prediction, Report, Step, Traveller};

/// What a prediction rests on, beside the compiled step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Assumptions {
    /// Number of ranks.
    pub ranks: usize,
    /// What connects them.
    pub link: Link,
    /// How fast kernels and communication go while they run beside each other: 1 where the thread that moves data has a
    /// core of its own, `t / (t + 1)` where it shares `t` cores with as many threads of the step.
    pub speed: f64,
    /// Whether the step ran in an imagined world, where nothing is waited for: its waits are then no measurement.
    pub imagined: bool,
}

/// Sizes of buckets that are compared, in MB of 2^20 bytes.
const SIZES: [f64; 7] = [0.5, 1.5625, 6.25, 25.0, 100.0, 400.0, 1600.0];

/// The collectives of a compiled step.
pub fn travellers(contract: &Contract) -> Vec<Traveller> {
    let overlap = Overlap::of(contract, &[]);
    let one = |travel: &Travel| Traveller {
        kind: travel.kind.to_string(),
        bytes: travel.bytes as u64,
        tensors: travel.tensors,
        ..Traveller::default()
    };
    let mut travellers: Vec<Traveller> = overlap.travels.iter().map(one).collect();
    let mut kernels = 0;
    for event in &overlap.events {
        match *event {
            Event::Kernel(..) => kernels += 1,
            Event::Start(kernel, at) => {
                travellers[at].start = kernel;
                travellers[at].wait = kernel;
                // Kernels before it, until the wait is known.
                travellers[at].between = kernels;
            }
            Event::Wait(kernel, of) => {
                travellers[of].wait = kernel;
                travellers[of].between = kernels - travellers[of].between;
            }
        }
    }
    travellers
}

/// The step's time on several ranks.
///
/// # Errors
///
/// In words, if a step has no collectives.
pub fn predict(
    whole: (&RegionReport, &Report),
    apart: (&RegionReport, &Report),
    assumptions: &Assumptions,
    machine: &Machine,
) -> Result<Prediction, String> {
    let Assumptions {
        ranks, link, speed, ..
    } = *assumptions;
    let (step, described) = last(whole)?;
    let (own, measured) = overlap(step, described, machine)?;
    let compiled = ranks_of(step).unwrap_or(ranks);
    // A share is one of the ranks that the step was compiled for.
    let seconds = |travel: &Travel| match travel.kind {
        CollectiveKind::AllGather => link.seconds(travel.kind, travel.bytes * compiled / ranks, ranks),
        kind => link.seconds(kind, travel.bytes, ranks),
    };
    let play = |overlap: &Overlap| -> Timeline { overlap.timeline(seconds, speed) };
    let timeline = play(&own);
    let (apart, _) = {
        let (step, described) = last(apart)?;
        overlap(step, described, machine)?
    };
    // It does the same work, and was timed while the machine was busier, or less so.
    let factor = own.kernel_seconds() / apart.kernel_seconds().max(f64::MIN_POSITIVE);
    let apart = apart.scaled(factor);
    let mut buckets: Vec<Bucketing> = Vec::new();
    for size in SIZES {
        let bytes = (size * f64::from(1 << 20)) as usize;
        let joined = apart.joined(&Buckets::with_others(bytes));
        let timeline = play(&joined);
        // Larger ones would be the same.
        let is_new = buckets
            .last()
            .is_none_or(|last| last.count != joined.travels.len());
        if is_new {
            buckets.push(Bucketing {
                bytes: bytes as u64,
                count: joined.travels.len(),
                step_seconds: timeline.step,
                exposed_seconds: timeline.exposed(),
            });
        }
    }
    let sharded = own
        .travels
        .iter()
        .any(|travel| travel.kind == CollectiveKind::ReduceScatter);
    let memory = described.memory.clone().unwrap_or_default();
    let memory = memory.arena_bytes + memory.input_bytes + memory.output_bytes;
    let state = state_bytes(step);
    let of_rank = match sharded {
        true => (state * compiled as u64).div_ceil(ranks as u64),
        false => state,
    };
    Ok(Prediction {
        ranks,
        bandwidth: link.bandwidth,
        latency: link.latency,
        message: link.message,
        speed,
        measured,
        step_seconds: timeline.step,
        kernel_seconds: timeline.kernels,
        exposed_seconds: timeline.exposed(),
        travel_seconds: own.travels.iter().map(seconds).sum(),
        memory_bytes: memory - state + of_rank,
        state_bytes: of_rank,
        sharded,
        buckets,
    })
}

/// The step that runs in the long run, and its description.
fn last<'a>((region, report): (&'a RegionReport, &'a Report)) -> Result<(&'a StepReport, &'a Step), String> {
    let mut steps = region.steps.iter().rev();
    let step = steps.find(|step| !step.provisional && step.contract.is_some());
    let step = step.ok_or("no step was compiled: only the backends cpu and cuda plan what travels")?;
    let described = report
        .steps
        .iter()
        .find(|other| other.executable == step.executable);
    Ok((step, described.ok_or("the step has no description")?))
}

/// The number of ranks that a step was compiled for.
fn ranks_of(step: &StepReport) -> Option<usize> {
    let mut calls = step.contract.iter().flat_map(|contract| &contract.externs);
    calls.find_map(|call| Some(call.collective?.collective()?.ranks))
}

/// The kernels of a step with their times, and whether these were measured.
fn overlap(step: &StepReport, described: &Step, machine: &Machine) -> Result<(Overlap, bool), String> {
    let contract = step.contract.as_ref().ok_or("the step has no plan")?;
    let measured = described.kernels.iter().any(|kernel| kernel.seconds.is_some());
    let seconds = described.kernels.iter().map(|kernel| match measured {
        true => kernel.seconds.unwrap_or(0.0),
        false => machine.least_seconds(kernel).0,
    });
    let overlap = Overlap::of(contract, &seconds.collect::<Vec<_>>());
    match overlap.travels.is_empty() {
        true => Err(format!(
            "the step on backend {} has no collectives that travel beside it: it was compiled for one rank, or means over \
             ranks are kept whole there",
            step.backend
        )),
        false => Ok((overlap, measured)),
    }
}

/// Bytes of the arguments that the optimizer alone reads, and that outputs take over: its state.
fn state_bytes(step: &StepReport) -> u64 {
    let graph = &step.graph;
    let users = graph.users();
    let taken: Vec<u32> = step
        .contract
        .iter()
        .flat_map(|contract| contract.aliases.iter().flatten().copied())
        .collect();
    let is_state = |index: usize, value| {
        let mut phases = users
            .of(value)
            .iter()
            .map(|&user| graph.node(user).provenance.phase);
        taken.contains(&(index as u32)) && phases.all(|phase| phase == Phase::Optimizer)
    };
    let parameters = graph.parameters();
    let state = parameters
        .iter()
        .enumerate()
        .filter(|&(index, &value)| is_state(index, value));
    state.map(|(_, &value)| graph.ty(value).bytes() as u64).sum()
}
