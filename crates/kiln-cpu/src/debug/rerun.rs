//! The `rerun` script of a debug dump: the step as a program of its own.
//!
//! The step is linked with a small main program in C (`rerun.c`) that makes random arguments, shares loops
//! between threads as the runtime does, and times the step and each kernel. Its constants (sizes, element
//! types, aliases, names of kernels) are generated as `rerun.h`.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use kiln_graph::{DType, Graph, Scalar, Value};

use crate::target::CpuStep;

/// The main program.
const MAIN: &str = include_str!("rerun.c");

/// Writes the script and its files.
pub fn write(folder: &Path, compiled: &CpuStep, threads: usize, compiler: &str) -> io::Result<()> {
    let script = folder.join("rerun");
    std::fs::write(folder.join("rerun.c"), MAIN)?;
    std::fs::write(folder.join("rerun.h"), tables(compiled, threads))?;
    std::fs::write(&script, script_text(compiler))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn script_text(compiler: &str) -> String {
    format!(
        "#!/bin/sh\n\
         # Builds this step and times it alone, on random inputs: ./rerun [RUNS] [THREADS]\n\
         set -e\n\
         here=$(cd \"$(dirname \"$0\")\" && pwd)\n\
         work=$(mktemp -d)\n\
         trap 'rm -rf \"$work\"' EXIT\n\
         cp \"$here\"/source/* \"$here\"/rerun.c \"$here\"/rerun.h \"$work\"\n\
         cd \"$work\"\n\
         sh \"$here\"/build.sh\n\
         {compiler} -O2 -o rerun rerun.c ./step.so -Wl,-rpath,\"$work\" -lpthread -lm\n\
         ./rerun \"$@\"\n"
    )
}

/// How the main program fills a tensor of this type.
fn kind(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "KIND_F32",
        DType::F64 => "KIND_F64",
        DType::I64 | DType::U64 => "KIND_INT64",
        DType::I32 | DType::U32 => "KIND_INT32",
        _ if dtype.is_float() => "KIND_ZERO",
        _ => "KIND_BYTES",
    }
}

fn tables(compiled: &CpuStep, threads: usize) -> String {
    let CpuStep { graph, plan, .. } = compiled;
    let mut text = format!("/* What rerun.c must know of the step `{}`. */\n", graph.name);
    let _ = writeln!(text, "#define INPUTS {}", graph.parameters().len());
    let _ = writeln!(text, "#define OUTPUTS {}", graph.outputs.len());
    let _ = writeln!(text, "#define SCALARS {}", graph.scalars().len());
    let _ = writeln!(text, "#define KERNELS {}", compiled.kernels.len());
    let _ = writeln!(text, "#define ARENA {}", plan.arena_bytes);
    let _ = writeln!(text, "#define DEFAULT_THREADS {}", threads);
    let outputs: Vec<Value> = graph.outputs.iter().map(|output| output.value).collect();
    tensors(&mut text, "inputs", graph, graph.parameters());
    tensors(&mut text, "outputs", graph, &outputs);
    text.push_str("/* The input whose memory an output takes over; -1 if it has its own. */\nstatic const int aliases[OUTPUTS + 1] = {");
    for alias in &plan.aliases {
        let _ = write!(text, "{}, ", alias.map_or(-1, i64::from));
    }
    text.push_str("};\nstatic const uint64_t scalars[SCALARS + 1] = {");
    for &value in graph.scalars() {
        let dtype = graph.dtype(value);
        let scalar = if dtype.is_float() {
            Scalar::Float(0.01)
        } else {
            Scalar::Int(1)
        };
        let _ = write!(text, "{}u, ", scalar.to_bits(dtype));
    }
    text.push_str("};\nstatic const struct kernel kernels[KERNELS + 1] = {\n");
    for kernel in &compiled.kernels {
        let fused: Vec<&str> = kernel.nodes.iter().map(|node| &*node.op).collect();
        let _ = writeln!(
            text,
            "    {{\"{}\", \"{}\", {}u, {}u}},",
            kernel.name,
            fused.join(" ").replace(['"', '\\'], " "),
            kernel.bytes,
            kernel.flops
        );
    }
    text.push_str("};\n");
    text
}

fn tensors(text: &mut String, name: &str, graph: &Graph, values: &[Value]) {
    let length = name.to_uppercase();
    let _ = writeln!(text, "static const struct tensor {name}[{length} + 1] = {{");
    for &value in values {
        let ty = graph.ty(value);
        let _ = writeln!(text, "    {{{}u, {}}}, /* {ty} */", ty.bytes(), kind(ty.dtype));
    }
    text.push_str("};\n");
}
