//! Compiles a recorded step for a GPU, without one, and writes what a debug dump has of it.
//!
//! ```text
//! cargo run -p kiln-cuda --example emit -- STEP.kg FOLDER [bf16|f16] [--cudnn]
//! ```
//!
//! The third argument asks for autocast to that type, and prints what it did. `--cudnn` compiles for a machine that has cuDNN.

use std::error::Error;
use std::path::Path;

use kiln_compiler::{Options, compile};
use kiln_cuda::{CudaTarget, debug};
use kiln_graph::Graph;

fn main() -> Result<(), Box<dyn Error>> {
    let (flags, arguments): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|text| text.starts_with("--"));
    let target = CudaTarget {
        cudnn: flags.iter().any(|flag| flag == "--cudnn"),
        ..CudaTarget::default()
    };
    let (step, folder, autocast) = match &arguments[..] {
        [step, folder] => (step, folder, None),
        [step, folder, dtype] => (step, folder, Some(dtype.parse()?)),
        _ => return Err("give the file of a recorded step, a folder, and maybe a type of 16 bits".into()),
    };
    let graph = Graph::parse(&std::fs::read_to_string(step)?)?;
    let options = Options {
        autocast,
        debug: Some(Path::new(folder).to_path_buf()),
        ..Options::default()
    };
    let compiled = compile(&graph, &options, &target)?;
    debug::write(Path::new(folder), &compiled.code, &compiled.contract());
    if let Some(report) = &compiled.autocast {
        print!("{report}");
    }
    if let Some(partition) = &compiled.partition {
        println!("{} bytes kept for the backward pass", partition.saved_bytes);
    }
    println!(
        "{} kernels, {} calls of {} functions, {} KiB of arena",
        compiled.kernels.len(),
        compiled.code.calls.len(),
        compiled.code.functions.len(),
        compiled.code.arena_bytes >> 10
    );
    Ok(())
}
