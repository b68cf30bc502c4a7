//! How long partitioning takes, on decoder steps of about 10,000 and 50,000 nodes.
//!
//! ```sh
//! cargo run --release -p kiln-partition --example partition_speed
//! ```

use std::time::Instant;

use kiln_partition::{Frontier, Liveness, Options, Planner, assign_phases, partition};

#[path = "../tests/support/mod.rs"]
mod support;

use support::{Sizes, decoder_step};

fn main() -> Result<(), kiln_partition::PartitionError> {
    for layers in [12, 24, 120] {
        let sizes = Sizes {
            layers,
            batch: 4,
            length: 256,
            width: 288,
            heads: 6,
            hidden: 768,
            vocabulary: 1024,
            keep: 0.9,
        };
        let mut step = decoder_step(sizes);
        let start = Instant::now();
        assign_phases(&mut step.graph);
        let phases = start.elapsed();
        let options = Options::default();
        let start = Instant::now();
        let partitioned = partition(&step.graph, &options)?;
        let cut = start.elapsed();
        let report = &partitioned.report;
        println!(
            "{layers} layers, {} nodes: phases {phases:.2?}, partition {cut:.2?}; keeps {:.1} of {:.1} MiB",
            step.graph.num_nodes(),
            report.saved_bytes as f64 / 1048576.0,
            report.everything_bytes as f64 / 1048576.0,
        );
        if layers > 24 {
            continue;
        }
        let calls = std::cell::Cell::new(0);
        let start = Instant::now();
        let mut frontier = Frontier::new(&step.graph, &options, |graph: &kiln_graph::Graph| {
            calls.set(calls.get() + 1);
            Liveness.peak(graph)
        })?;
        let listed = start.elapsed();
        let curve = frontier.curve()?;
        println!(
            "  frontier: listed in {listed:.2?}, {} plans measured in {:.2?}",
            calls.get(),
            start.elapsed()
        );
        for point in curve {
            println!(
                "    peak {:8.1} MiB  kept {:8.1} MiB  cost {:8.3} ms",
                point.peak as f64 / 1048576.0,
                point.saved as f64 / 1048576.0,
                point.cost as f64 * 1e-9
            );
        }
    }
    Ok(())
}
