//! From a region's history to the report.

use std::collections::BTreeMap;

use kiln_burn::ranks::is_of_ranks;
use kiln_burn::record::Bindings;
use kiln_burn::record::history::EXPECTED;
use kiln_burn::{CompileBackend, CompileEvent, GraphBreak, Mismatch, RegionReport, StepReport};
use kiln_compiler::Contract;
use kiln_compiler::report::{BufferPlace, BufferReport, FusedNode, KernelReport, arena_in_use};
use kiln_graph::{NodeData, Op, Phase};

use super::ranks;
use super::report::{
    Break, Buffer, Compile, Counted, Fused, Guards, Kernel, Memory, PhaseCount, Recomputed, Replay, Report,
    SavedTensor, Step,
};
use crate::train::History;

/// The report of a region.
pub fn report(region: &RegionReport) -> Report {
    Report {
        region: region.name.clone(),
        calls: region.calls,
        steps: region.steps.iter().map(step).collect(),
        breaks: region.breaks.iter().map(graph_break).collect(),
        compiles: compiles(&region.compiles),
        recompile_limit: region.recompile_limit,
        advice: region.advice.clone(),
        replay: None,
        machine: None,
        predictions: Vec::new(),
    }
}

/// How a training step with this history is replayed; `bindings` are those of its plan.
pub fn replay(history: &History, bindings: Option<&Bindings>) -> Replay {
    let lines = |lines: fn(&Bindings) -> Vec<String>| bindings.map(lines).unwrap_or_default();
    Replay {
        recorded: history.recorded,
        replayed: history.replayed,
        proofs: history.proofs,
        obstacle: history.obstacle.clone(),
        causes: history
            .causes
            .iter()
            .map(|(cause, count)| Counted {
                name: cause.to_string(),
                count: *count as usize,
            })
            .collect(),
        inputs: lines(Bindings::input_lines),
        outputs: lines(Bindings::output_lines),
        results: lines(Bindings::result_lines),
        state: None,
    }
}

fn step(step: &StepReport) -> Step {
    let kernels: Vec<Kernel> = step.contract.iter().flat_map(kernels).collect();
    Step {
        number: step.number,
        executable: step.executable,
        segment: step.segment,
        backend: step.backend.to_string(),
        provisional: step.provisional,
        operations: step.operations,
        nodes: step.nodes,
        phases: phases(step, &kernels),
        inputs: step.inputs,
        outputs: step.outputs,
        in_place: step.aliased,
        scalars: step.scalars,
        guards: Guards {
            inputs: step.guards.inputs.clone(),
            operations: step.guards.operations,
            outputs: step.guards.outputs,
        },
        externs: externs(step),
        exchanges: exchanges(step),
        threads: step.threads,
        from_cache: step.from_cache,
        compile_seconds: step.compile_time.as_secs_f64(),
        stages: step
            .stages
            .iter()
            .map(|&(name, time)| kiln_profile::Stage::new(name, time))
            .collect(),
        runs: step.runs,
        run_seconds: step.run_time.as_secs_f64(),
        memory: step.contract.as_ref().map(|contract| memory(step, contract)),
        kernels,
        saved: step.contract.iter().flat_map(saved).collect(),
        recomputed: step.contract.iter().flat_map(recomputed).collect(),
        collectives: step.contract.iter().flat_map(ranks::travellers).collect(),
        details: step.details.clone(),
    }
}

/// Operations kept whole, each with the line of the program it is for.
fn externs(step: &StepReport) -> Vec<Counted> {
    let name = |(_, node): (_, &NodeData)| match (&node.op, &node.provenance.location) {
        // The code for the CPU has what comes with C.
        (Op::Extern(op), _) if !op.c_source.is_empty() && step.backend == CompileBackend::Cpu => None,
        (op, _) if is_of_ranks(op) => None,
        (Op::Extern(op), Some(line)) => Some(format!("{} at {line}", op.name)),
        (Op::Extern(op), None) => Some(op.name.clone()),
        _ => None,
    };
    counted(&step.graph.nodes().filter_map(name).collect::<Vec<_>>())
}

/// Operations of all ranks that no collective of the compiled code stands for.
fn exchanges(step: &StepReport) -> Vec<Counted> {
    let mut compiled = step.contract.iter().flat_map(|contract| &contract.externs);
    if compiled.any(|call| call.collective.is_some()) {
        return Vec::new();
    }
    let name = |(_, node): (_, &NodeData)| match &node.op {
        Op::Extern(op) if is_of_ranks(&node.op) => Some(op.name.clone()),
        _ => None,
    };
    counted(&step.graph.nodes().filter_map(name).collect::<Vec<_>>())
}

fn saved(contract: &Contract) -> Vec<SavedTensor> {
    let saved = contract.partition.iter().flat_map(|partition| &partition.saved);
    saved
        .map(|saved| SavedTensor {
            name: saved.name.clone(),
            ty: saved.ty.clone(),
            bytes: saved.bytes,
            origin: match saved.is_output {
                true => format!("{} (an output anyway)", saved.origin),
                false => saved.origin.to_string(),
            },
            users: saved.users.iter().map(ToString::to_string).collect(),
        })
        .collect()
}

fn recomputed(contract: &Contract) -> Vec<Recomputed> {
    let recomputed = contract
        .partition
        .iter()
        .flat_map(|partition| &partition.recomputed);
    recomputed
        .map(|again| Recomputed {
            op: again.op.clone(),
            count: again.count,
            bytes: again.bytes,
        })
        .collect()
}

/// A phase in words.
fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
        Phase::Unknown => "unassigned",
    }
}

fn phases(step: &StepReport, kernels: &[Kernel]) -> Vec<PhaseCount> {
    let count = |phase: Phase| {
        let name = word(phase);
        let own = || kernels.iter().filter(|kernel| kernel.phase == name);
        PhaseCount {
            phase: name.to_owned(),
            nodes: step
                .graph
                .nodes()
                .filter(|(_, node)| node.provenance.phase == phase)
                .count(),
            kernels: own().count(),
            bytes: own().map(|kernel| kernel.bytes).sum(),
            flops: own().map(|kernel| kernel.flops).sum(),
        }
    };
    [Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Unknown]
        .map(count)
        .into_iter()
        .filter(|count| count.nodes + count.kernels > 0)
        .collect()
}

fn kernels(contract: &Contract) -> Vec<Kernel> {
    let positions = |list: &[u32]| list.iter().map(|&position| position as usize).collect();
    let kernel = |(number, kernel): (usize, &KernelReport)| Kernel {
        number,
        name: kernel.name.clone(),
        phase: word(Phase::from_name(kernel.phase()).unwrap_or_default()).to_owned(),
        fused: kernel.nodes.iter().map(fused).collect(),
        reads: positions(&kernel.reads),
        writes: positions(&kernel.writes),
        bytes: kernel.bytes,
        flops: kernel.flops,
        scratch_bytes: kernel.scratch.1 as u64,
        seconds: None,
        machine_share: None,
        limit: None,
    };
    contract.kernels.iter().enumerate().map(kernel).collect()
}

fn fused(node: &FusedNode) -> Fused {
    Fused {
        node: node.node as usize,
        op: node.op.clone(),
        ty: node.ty.clone(),
        inputs: node.inputs.iter().map(|&input| input as usize).collect(),
        operation: node.operation.clone(),
        gradient_of: node.gradient_of.clone(),
        location: node.location.clone(),
        module: node.module.clone(),
    }
}

fn memory(step: &StepReport, contract: &Contract) -> Memory {
    let graph = &step.graph;
    let outputs = graph.outputs.iter().zip(&contract.aliases);
    Memory {
        arena_bytes: contract.arena_bytes as u64,
        input_bytes: graph
            .parameters()
            .iter()
            .map(|&value| graph.ty(value).bytes() as u64)
            .sum(),
        output_bytes: outputs
            .filter(|(_, alias)| alias.is_none())
            .map(|(output, _)| graph.ty(output.value).bytes() as u64)
            .sum(),
        in_use: arena_in_use(&contract.kernels, &contract.buffers),
        buffers: contract.buffers.iter().map(buffer).collect(),
    }
}

fn buffer(buffer: &BufferReport) -> Buffer {
    let (place, offset) = match buffer.place {
        BufferPlace::Input(index) => (format!("input {index}"), None),
        BufferPlace::Output(index) => (format!("output {index}"), None),
        BufferPlace::Arena(offset) => ("arena".to_owned(), Some(offset as u64)),
    };
    Buffer {
        name: buffer.name.clone(),
        ty: buffer.ty.clone(),
        bytes: buffer.bytes,
        place,
        offset,
        first: buffer.kernels.0 as usize,
        last: buffer.kernels.1 as usize,
    }
}

fn graph_break((graph_break, times): &(GraphBreak, u64)) -> Break {
    Break {
        reason: graph_break.reason.to_string(),
        operation: graph_break.operation.clone(),
        location: graph_break.location.as_ref().map(ToString::to_string),
        remedy: graph_break.remedy(),
        times: *times,
    }
}

/// What to do about another size of a step.
const ABSORBED: &str = "nothing: it is another size of a step before, whose kernels it has";

/// What to do about a size for which kernels were compiled that other sizes can use.
const SHARED: &str = "nothing: sizes are variables of the kernels that were compiled, and sizes whose kernels are all known compile nothing; where the range of sizes is known, `kiln::dynamic` has them compiled with the first step";

fn compiles(events: &[CompileEvent]) -> Vec<Compile> {
    let one = |(at, event): (usize, &CompileEvent)| {
        let mut before = events[..at].iter().filter(|it| it.segment == event.segment);
        let mut compile = compile(event);
        compile.expected = event.absorbed || event.mismatch.is_none() || before.all(|it| it.provisional);
        let is_size = matches!(event.mismatch, Some(Mismatch::Input { .. }));
        let remedy = match event.absorbed {
            true => Some(ABSORBED),
            false if compile.expected => Some(EXPECTED),
            false if event.shares && is_size => Some(SHARED),
            false => None,
        };
        if let (Some(_), Some(remedy)) = (&event.mismatch, remedy) {
            compile.remedy = Some(remedy.to_owned());
        }
        compile
    };
    events.iter().enumerate().map(one).collect()
}

fn compile(event: &CompileEvent) -> Compile {
    let (before, after) = event.mismatch.as_ref().map(Mismatch::change).unzip();
    Compile {
        segment: event.segment,
        step: event.step,
        backend: event.backend.to_string(),
        provisional: event.provisional,
        expected: false,
        guard: event.mismatch.as_ref().map(Mismatch::guard),
        before,
        after,
        remedy: event
            .mismatch
            .as_ref()
            .map(|mismatch| mismatch.remedy().to_owned()),
        absorbed: event.absorbed,
        notes: event.notes.clone(),
        seconds: event.time.as_secs_f64(),
        runs: event.runs(),
    }
}

/// Names in order of first occurrence, with their number.
fn counted(names: &[String]) -> Vec<Counted> {
    let mut positions: BTreeMap<&str, usize> = BTreeMap::new();
    let mut counts: Vec<Counted> = Vec::new();
    for name in names {
        let position = *positions.entry(name).or_insert_with(|| {
            counts.push(Counted {
                name: name.clone(),
                count: 0,
            });
            counts.len() - 1
        });
        counts[position].count += 1;
    }
    counts
}
