//! The partition inside the compiler: phases apart, a memory budget that holds. (`memory.rs` runs what is
//! compiled.)

use kiln_compiler::schedule::KernelKind;
use kiln_compiler::{CompileError, Keep, Options, memory_curve};
use kiln_cpu::{CpuStep, CpuTarget, Toolchain};
use kiln_graph::alias::assign_aliases;
use kiln_graph::{Graph, Phase};
use kiln_partition::testing::{Sizes, decoder_step};
use kiln_partition::{PartitionError, assign_phases};

const SMALL: Sizes = Sizes {
    layers: 4,
    batch: 2,
    length: 16,
    width: 32,
    heads: 2,
    hidden: 96,
    vocabulary: 40,
    keep: 0.8,
};

/// A decoder's training step with dropout, phases assigned, every argument ready to be overwritten.
fn decoder(sizes: Sizes) -> Graph {
    let mut step = decoder_step(sizes);
    let dies = vec![true; step.graph.parameters().len()];
    assign_aliases(&mut step.graph, &dies);
    assign_phases(&mut step.graph);
    step.graph
}

fn target() -> CpuTarget {
    CpuTarget::new(&Toolchain::detect().unwrap(), 3)
}

fn compile(graph: &Graph, keep: Keep) -> Result<CpuStep, CompileError> {
    let options = Options {
        keep,
        ..Options::default()
    };
    kiln_compiler::compile(graph, &options, &target())
}

fn smallest_budget(graph: &Graph) -> u64 {
    match compile(graph, Keep::Within(0)) {
        Err(CompileError::Partition(PartitionError::BudgetTooSmall { smallest, .. })) => smallest,
        other => panic!(
            "no step fits in nothing: {:?}",
            other.map(|step| step.plan.arena_bytes)
        ),
    }
}

#[test]
fn no_kernel_mixes_forward_and_backward() {
    let graph = decoder(SMALL);
    for keep in [
        Keep::Everything,
        Keep::Cheapest,
        Keep::Within(smallest_budget(&graph)),
    ] {
        let step = compile(&graph, keep).unwrap();
        for kernel in &step.schedule.kernels {
            let forward = |node: &kiln_graph::Node| {
                let data = step.graph.node(*node);
                (!data.inputs.is_empty()).then_some(data.provenance.phase == Phase::Forward)
            };
            let mut sides: Vec<bool> = kernel.nodes.iter().filter_map(forward).collect();
            sides.dedup();
            assert!(
                sides.len() <= 1,
                "{keep}:\n{}",
                step.schedule.to_text(&step.graph)
            );
        }
    }
}

#[test]
fn more_memory_is_never_slower_and_every_budget_holds() {
    let graph = decoder(Sizes { layers: 6, ..SMALL });
    let curve = memory_curve(&graph, &Options::default(), &target()).unwrap();
    let (smallest, largest) = (curve[curve.len() - 1].peak, curve[0].peak);
    assert_eq!(smallest, smallest_budget(&graph));
    assert_eq!(
        largest,
        compile(&graph, Keep::Cheapest).unwrap().plan.arena_bytes as u64
    );
    assert!(5 * smallest <= 3 * largest, "{smallest} of {largest} bytes");
    let everything = compile(&graph, Keep::Everything).unwrap();
    assert!(largest < everything.plan.arena_bytes as u64);

    let mut last_cost = u64::MAX;
    for share in 0..12 {
        let budget = smallest + (largest - smallest) * share / 11;
        let step = compile(&graph, Keep::Within(budget)).unwrap();
        let arena = step.plan.arena_bytes as u64;
        let report = step.partition.unwrap();
        assert!(arena <= budget, "{arena} bytes under a budget of {budget}");
        assert_eq!(report.peak, Some(arena), "what was measured is what was planned");
        assert_eq!(report.peak_without_budget, Some(largest));
        // The point of the curve that the budget buys.
        let point = curve.iter().find(|point| point.peak <= budget).unwrap();
        assert_eq!(point.peak, arena);
        assert!(point.cost <= last_cost);
        last_cost = point.cost;
    }
    let error = compile(&graph, Keep::Within(smallest - 1)).unwrap_err();
    assert!(error.to_string().contains(&smallest.to_string()), "{error}");
}

/// A vocabulary that outweighs the rest: its chunks are kernels of their own, and their memory is one
/// chunk's.
#[test]
fn a_wide_vocabulary_runs_in_chunks() {
    let graph = decoder(Sizes {
        batch: 8,
        length: 64,
        vocabulary: 4000,
        width: 256,
        layers: 2,
        ..SMALL
    });
    let whole = compile(&graph, Keep::Cheapest).unwrap();
    let smallest = smallest_budget(&graph);
    let step = compile(&graph, Keep::Within(smallest)).unwrap();
    let report = step.partition.unwrap();
    let chunks = report.chunks.expect("the logits are most of the memory");
    let logits = chunks.bytes * chunks.count as u64;
    assert_eq!(logits, 4 * 8 * 64 * 4000);
    let whole = whole.plan.arena_bytes as u64;
    assert!(smallest + logits / 4 < whole, "{smallest} of {whole}");
    for kernel in &step.schedule.kernels {
        // The nest that joins the chunks computes nothing.
        if matches!(&kernel.kind, KernelKind::Nest(nest) if nest.members.is_empty()) {
            continue;
        }
        let chunk = |node: &kiln_graph::Node| {
            let data = step.graph.node(*node);
            (!data.inputs.is_empty()).then_some(data.provenance.chunk)
        };
        let mut parts: Vec<Option<u16>> = kernel.nodes.iter().filter_map(chunk).collect();
        parts.dedup();
        assert!(parts.len() <= 1, "{parts:?}: {:?}", kernel.nodes);
    }
}

#[test]
fn a_graph_without_backward_pass_fits_or_says_what_would() {
    let graph = Graph::parse(
        "graph @forward {
  %x = parameter 0 : f32[64,64]
  %w = parameter 1 : f32[64,64]
  %h = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[64,64]
  %y = dot_general %h, %w {a_contract=[1], b_contract=[0]} : f32[64,64]
  return %y
}",
    )
    .unwrap();
    assert!(compile(&graph, Keep::Cheapest).unwrap().partition.is_none());
    let smallest = smallest_budget(&graph);
    let step = compile(&graph, Keep::Within(smallest)).unwrap();
    assert_eq!(step.plan.arena_bytes as u64, smallest);
}
