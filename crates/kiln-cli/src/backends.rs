//! `kiln backends`: the backends that can run a step on this machine, and its CUDA libraries and GPUs.

use kiln::CompileBackend;
use kiln_burn::execute::cpu;
use kiln_cuda::{Report, Search};

use crate::show;

/// Prints every backend with its description and whether it works here; then NVIDIA's libraries and GPUs.
pub fn command() {
    for &backend in kiln::list_backends() {
        show::line(format_args!("{:<10} {}", backend.name(), backend.description()));
        if backend == CompileBackend::Cpu {
            match cpu::toolchain() {
                Ok(toolchain) => show::line(format_args!(
                    "{:<10} compiler: {} for {}",
                    "",
                    toolchain.version().lines().next().unwrap_or_default(),
                    toolchain.isa()
                )),
                Err(error) => show::line(format_args!("{:<10} steps run on aot_eager here: {error}", "")),
            }
        }
    }
    show::line("\nNVIDIA GPUs, and the libraries that the backend cuda uses");
    show::text(Report::collect(&Search::from_env()));
}
