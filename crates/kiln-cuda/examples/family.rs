//! Compiles recorded steps of several shapes for a GPU as one family, without one, and prints what each shape
//! took.
//!
//! ```text
//! cargo run -p kiln-cuda --example family -- [--alone | --plan] [--bf16] [--cudnn] [--sizes] STEP.kg ..
//! ```
//!
//! `--alone` compiles each by itself, `--plan` compiles nothing. NVRTC is searched as everywhere
//! (`KILN_CUDA_PATH`). `RUST_LOG=kiln::family=debug` shows what is learned, and which kernels keep their
//! constants.

use std::error::Error;
use std::time::Instant;

use kiln_compiler::Options;
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::family::{Backend, CudaMaker, Family, Outcome, Uncompiled};
use kiln_cuda::libraries::Nvrtc;
use kiln_cuda::{CudaTarget, Search};
use kiln_family::Maker as _;
use kiln_graph::Graph;

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt::init();
    let (flags, files): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|text| text.starts_with("--"));
    let has = |flag: &str| flags.iter().any(|own| own == flag);
    let target = CudaTarget {
        cudnn: has("--cudnn"),
        ..CudaTarget::default()
    };
    let options = Options {
        autocast: has("--bf16").then_some(kiln_graph::DType::BF16),
        ..Options::default()
    };
    if has("--plan") {
        let family = Family::new(CudaMaker::new(&options, &target, Uncompiled(Store::disabled())));
        return compile_all(&family, &files, false);
    }
    let nvrtc = Nvrtc::open(&Search::from_env())?;
    let compiler = Compiler::new(nvrtc, target.capability, Store::disabled())?;
    let maker = CudaMaker::new(&options, &target, (compiler, Store::disabled()));
    if has("--alone") {
        for file in &files {
            let graph = Graph::parse(&std::fs::read_to_string(file)?)?;
            let step = maker.alone(&graph)?;
            let functions = step.code.functions.len();
            println!(
                "{file}: passes {:.2} s, NVRTC {:.2} s for {functions} functions",
                step.compile_time.as_secs_f64(),
                step.build_time.as_secs_f64()
            );
        }
        return Ok(());
    }
    compile_all(&Family::new(maker), &files, has("--sizes"))
}

/// Compiles the steps of `files` as a family.
fn compile_all<B: Backend>(family: &Family<B>, files: &[String], sizes: bool) -> Result<(), Box<dyn Error>> {
    for file in files {
        let graph = Graph::parse(&std::fs::read_to_string(file)?)?;
        let start = Instant::now();
        let (step, outcome) = family.compile_into(&graph, None)?;
        let took = start.elapsed().as_secs_f64();
        let what = match outcome {
            Outcome::Known => "all kernels were known".to_owned(),
            Outcome::Built {
                functions, reason, ..
            } => format!("{functions} kernels were not known ({reason})"),
            other => format!("{other:?}"),
        };
        let (stats, nvrtc) = (family.stats(), step.build_time.as_secs_f64());
        println!(
            "{file}: {took:.2} s, of it NVRTC {nvrtc:.2} s; {} builds, {} kernels so far; {what}",
            stats.builds, stats.functions
        );
        let templates = step.code.functions.iter().zip(&step.programs);
        for (function, program) in templates.filter(|_| sizes) {
            println!(
                "    {} in a program of {} bytes",
                function.name,
                program.image().len()
            );
        }
    }
    Ok(())
}
