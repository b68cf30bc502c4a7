//! Compiles a recorded step for a GPU, without one, and writes what a debug dump has of it.
//!
//! ```text
//! cargo run -p kiln-cuda --example emit -- STEP.kg FOLDER
//! ```

use std::error::Error;
use std::path::Path;

use kiln_compiler::{Options, compile};
use kiln_cuda::{CudaTarget, debug};
use kiln_graph::Graph;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [step, folder] = &arguments[..] else {
        return Err("give the file of a recorded step and a folder".into());
    };
    let graph = Graph::parse(&std::fs::read_to_string(step)?)?;
    let options = Options {
        debug: Some(Path::new(folder).to_path_buf()),
        ..Options::default()
    };
    let compiled = compile(&graph, &options, &CudaTarget::default())?;
    debug::write(Path::new(folder), &compiled.code, &compiled.contract());
    println!(
        "{} kernels, {} calls of {} functions, {} KiB of arena",
        compiled.kernels.len(),
        compiled.code.calls.len(),
        compiled.code.functions.len(),
        compiled.code.arena_bytes >> 10
    );
    Ok(())
}
