//! What one decoder layer keeps for its backward pass.
//!
//! ```sh
//! cargo run -p kiln-partition --example saved_tensors
//! ```

use kiln_partition::{Options, assign_phases, partition};

#[path = "../tests/support/mod.rs"]
mod support;

use support::{Sizes, decoder_step};

fn main() -> Result<(), kiln_partition::PartitionError> {
    let sizes = Sizes {
        layers: 2,
        batch: 4,
        length: 256,
        width: 288,
        heads: 6,
        hidden: 768,
        vocabulary: 32_000,
        keep: 0.9,
    };
    let mut step = decoder_step(sizes);
    assign_phases(&mut step.graph);
    println!("{}", partition(&step.graph, &Options::default())?.report);
    Ok(())
}
