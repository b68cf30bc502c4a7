//! The C tables that session.c and the callers of an exported step are compiled with.

use std::fmt::Write as _;

use kiln_graph::{DType, TensorType};

use super::{ArgumentSource, ExportedStep, NamedTensor, NumberSource, ResultSource, safetensors_name};
use crate::emit::in_comment;
use crate::target::CpuStep;

/// A file under construction. Every array has one element more than it needs: C has no empty ones.
struct Tables(String);

impl Tables {
    fn define(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "#define {name} {value}");
    }

    fn array(&mut self, ty: &str, name: &str, rows: impl IntoIterator<Item = String>) {
        let rows: Vec<String> = rows.into_iter().collect();
        let _ = writeln!(self.0, "static const {ty} {name}[{} + 1] = {{", rows.len());
        for row in rows {
            let _ = writeln!(self.0, "    {row},");
        }
        self.0.push_str("};\n");
    }
}

/// The tables of the step for session.c.
pub(super) fn text(step: &ExportedStep<'_>, compiled: &CpuStep, threads: usize) -> String {
    let mut tables = Tables(format!(
        "/* What session.c must know of the step `{}`. */\n",
        in_comment(&step.graph.name)
    ));
    tables.define("STATES", step.states.len());
    tables.define("ARGUMENTS", step.arguments.len());
    tables.define("OUTPUTS", step.outputs.len());
    tables.define("RESULTS", step.results.len());
    tables.define("NUMBERS", step.numbers.len());
    tables.define("CHECKS", compiled.checks.len());
    tables.define("ARENA", format_args!("((size_t){}u)", compiled.plan.arena_bytes));
    tables.define("THREADS", threads);
    tables.define("FIRST_STEP", format_args!("((uint64_t){}u)", step.steps));
    tables.define("SEED", format_args!("((uint64_t){}u)", step.random.0));
    tables.define("STREAM", format_args!("((uint64_t){}u)", step.random.1));
    tables.define("STREAMS", step.streams);
    tables.define("FIXED_RATE", u8::from(step.fixed_rate.is_some()));
    tables.define("RATE", format_args!("{:e}", step.fixed_rate.unwrap_or(0.0)));
    let states = step.states.iter().map(|state| tensor(&state.tensor));
    tables.array("struct tensor", "states", states);
    tables.array("struct argument", "arguments", arguments(step, compiled));
    tables.array("struct output", "outputs", outputs(step, compiled));
    tables.array("struct result", "taken", step.results.iter().map(result));
    let types = step.graph.scalars().iter().map(|&value| step.graph.dtype(value));
    let numbers = step.numbers.iter().zip(types);
    tables.array(
        "struct number",
        "numbers",
        numbers.map(|(source, dtype)| number(*source, dtype)),
    );
    number_tables(&mut tables, step);
    tables.array("struct check", "checks", compiled.checks.iter().map(check));
    tables.0
}

fn tensor(tensor: &NamedTensor) -> String {
    let TensorType { dtype, .. } = tensor.ty;
    format!(
        "{{\"{}\", {}u, \"{}\", \"{}\"}}",
        tensor.name,
        tensor.ty.bytes(),
        safetensors_name(dtype),
        extents(&tensor.ty)
    )
}

/// The shape as JSON has it.
pub(super) fn extents(ty: &TensorType) -> String {
    let extents: Vec<String> = ty.shape.iter().map(usize::to_string).collect();
    format!("[{}]", extents.join(","))
}

fn arguments(step: &ExportedStep<'_>, compiled: &CpuStep) -> Vec<String> {
    let parameters = step.graph.parameters().iter();
    let rows = step.arguments.iter().zip(parameters).enumerate();
    let row = |(index, (source, &value)): (usize, (&ArgumentSource, _))| {
        let bytes = step.graph.ty(value).bytes();
        let taken = compiled.plan.aliases.contains(&Some(index as u32));
        let (from, number, protected) = match *source {
            ArgumentSource::State(state) => ("SOURCE_STATE", state, step.states[state].constant),
            ArgumentSource::Input(input) => ("SOURCE_INPUT", input, true),
        };
        format!("{{{from}, {number}, {bytes}u, {}}}", u8::from(taken && protected))
    };
    rows.map(row).collect()
}

fn outputs(step: &ExportedStep<'_>, compiled: &CpuStep) -> Vec<String> {
    let rows = step.outputs.iter().zip(&step.graph.outputs).enumerate();
    let row = |(index, (state, output)): (usize, (&Option<usize>, &kiln_graph::Output))| {
        let alias = compiled.plan.aliases.get(index).copied().flatten();
        let (to, number) = match state {
            Some(state) => ("GOAL_STATE", *state),
            None => ("GOAL_SPARE", 0),
        };
        let bytes = step.graph.ty(output.value).bytes();
        format!("{{{to}, {number}, {bytes}u, {}}}", alias.map_or(-1, i64::from))
    };
    rows.map(row).collect()
}

fn result((tensor, source): &(NamedTensor, ResultSource)) -> String {
    let (from, number) = match *source {
        ResultSource::Output(output) => ("TAKEN_OUTPUT", output),
        ResultSource::State(state) => ("TAKEN_STATE", state),
        ResultSource::Input(input) => ("TAKEN_INPUT", input),
    };
    format!("{{{from}, {number}, {}u}}", tensor.ty.bytes())
}

fn number(source: NumberSource, dtype: DType) -> String {
    let wide = u8::from(dtype == DType::F64);
    match source {
        NumberSource::Fixed(bits) => format!("{{.is = NUMBER_FIXED, .bits = {bits}u}}"),
        NumberSource::Rate { offset, factor } => {
            format!("{{.is = NUMBER_RATE, .offset = {offset:e}, .factor = {factor:e}, .wide = {wide}}}")
        }
        NumberSource::Table(table) => format!("{{.is = NUMBER_TABLE, .index = {table}}}"),
        NumberSource::Seed => "{.is = NUMBER_SEED}".to_owned(),
        NumberSource::Stream(stream) => format!("{{.is = NUMBER_STREAM, .index = {stream}}}"),
    }
}

fn number_tables(tables: &mut Tables, step: &ExportedStep<'_>) {
    for (index, table) in step.tables.iter().enumerate() {
        let _ = writeln!(tables.0, "static const uint64_t table_{index}[] = {{");
        for bits in table.bits.chunks(16) {
            let bits: Vec<String> = bits.iter().map(|bits| format!("{bits}u")).collect();
            let _ = writeln!(tables.0, "    {},", bits.join(", "));
        }
        tables.0.push_str("};\n");
    }
    let rows = step.tables.iter().enumerate().map(|(index, table)| {
        let settles = u8::from(table.settles);
        format!("{{table_{index}, {}u, {settles}}}", table.bits.len())
    });
    tables.array("struct table", "tables", rows);
}

fn check(check: &kiln_compiler::checks::Check) -> String {
    // The smallest extent is the one that an index exceeds first.
    let smallest = check.uses.iter().min_by_key(|it| it.extent);
    let place = smallest.map_or_else(String::new, |it| {
        let location = it.location.as_deref();
        location.map_or_else(|| it.op.clone(), |location| format!("{} at {location}", it.op))
    });
    let extent = smallest.map_or(0, |it| it.extent);
    format!(
        "{{\"{}\", {extent}u, \"{}\"}}",
        check.dtype,
        place.replace(['"', '\\'], " ")
    )
}

/// The header for callers: `fixed`, with how many tensors there are and what they are called.
pub(super) fn header(step: &ExportedStep<'_>, fixed: &str) -> String {
    let mut numbers = String::from("/* The tensors of this step. */\nenum {\n");
    let mut list = |what: &str, names: Vec<&NamedTensor>| {
        for (index, tensor) in names.iter().enumerate() {
            let _ = writeln!(
                numbers,
                "    /* {what} {index}: {}, {} */",
                tensor.name, tensor.ty
            );
        }
        let _ = writeln!(numbers, "    KILN_{}S = {},", what.to_uppercase(), names.len());
    };
    list("input", step.inputs.iter().collect());
    list("result", step.results.iter().map(|(tensor, _)| tensor).collect());
    list("state", step.states.iter().map(|state| &state.tensor).collect());
    numbers.push_str("};\n\n");
    let at = fixed.find("typedef struct kiln_session").unwrap_or(0);
    format!("{}{numbers}{}", &fixed[..at], &fixed[at..])
}
