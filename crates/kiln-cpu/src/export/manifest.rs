//! The files for people and for programs that are not C: manifest, state, README.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::{
    ArgumentSource, ExportError, ExportedStep, NamedTensor, NumberSource, ResultSource, safetensors_name,
};

/// The format of the manifest.
const VERSION: u32 = 1;

fn described(tensor: &NamedTensor) -> Value {
    json!({
        "name": tensor.name,
        "dtype": safetensors_name(tensor.ty.dtype),
        "shape": tensor.ty.shape.to_vec(),
    })
}

fn with(mut tensor: Value, key: &str, value: Value) -> Value {
    tensor[key] = value;
    tensor
}

/// The manifest, as JSON.
pub(super) fn json(step: &ExportedStep<'_>, threads: usize) -> String {
    let argument = |source: &ArgumentSource| match *source {
        ArgumentSource::State(state) if step.states[state].constant => json!({ "constant": state }),
        ArgumentSource::State(state) => json!({ "state": state }),
        ArgumentSource::Input(input) => json!({ "fresh": input }),
    };
    let result = |(tensor, source): &(NamedTensor, ResultSource)| {
        let binding = match *source {
            ResultSource::Output(_) => json!("computed"),
            ResultSource::State(state) => json!({ "through_state": state }),
            ResultSource::Input(input) => json!({ "through": input }),
        };
        with(described(tensor), "binding", binding)
    };
    let states = step.states.iter().map(|state| {
        let binding = if state.constant { "constant" } else { "state" };
        with(described(&state.tensor), "binding", json!(binding))
    });
    let number = |source: &NumberSource| match *source {
        NumberSource::Fixed(_) => json!("fixed"),
        NumberSource::Rate { offset, factor } => json!({ "offset": offset, "learning_rate_times": factor }),
        NumberSource::Table(table) => json!({ "table": table }),
        NumberSource::Seed => json!("seed"),
        NumberSource::Stream(stream) => json!({ "stream": stream }),
    };
    let manifest = json!({
        "version": VERSION,
        "name": step.graph.name,
        "threads": threads,
        "step": step.steps,
        // None: there is no limit.
        "steps": last_step(step),
        "learning_rate": step.fixed_rate.map_or(json!("any"), |rate| json!(rate)),
        "random": { "seed": step.random.0, "stream": step.random.1, "streams_of_a_step": step.streams },
        "inputs": step.inputs.iter().map(described).collect::<Vec<_>>(),
        "results": step.results.iter().map(result).collect::<Vec<_>>(),
        "states": states.collect::<Vec<_>>(),
        "arguments": step.arguments.iter().map(argument).collect::<Vec<_>>(),
        "outputs": step.outputs,
        "numbers": step.numbers.iter().map(number).collect::<Vec<_>>(),
    });
    format!("{manifest:#}\n")
}

/// The last step for which there are numbers; none if there is no last one.
fn last_step(step: &ExportedStep<'_>) -> Option<u64> {
    let ending = step.tables.iter().filter(|table| !table.settles);
    ending.map(|table| step.steps + table.bits.len() as u64).min()
}

/// The state that the session starts from.
pub(super) fn write_state(step: &ExportedStep<'_>, path: &Path) -> Result<(), ExportError> {
    let failed = |error: safetensors::SafeTensorError| ExportError::State(error.to_string());
    let view = |state: &'_ super::StateTensor| -> Result<_, ExportError> {
        let name = safetensors_name(state.tensor.ty.dtype);
        let dtype = serde_json::from_value(json!(name))
            .map_err(|error| ExportError::State(format!("{name}: {error}")))?;
        Ok((dtype, state.tensor.ty.shape.to_vec()))
    };
    let mut tensors = Vec::with_capacity(step.states.len());
    for state in &step.states {
        let (dtype, shape) = view(state)?;
        let tensor = TensorView::new(dtype, shape, &state.elements).map_err(failed)?;
        tensors.push((state.tensor.name.as_str(), tensor));
    }
    let metadata = HashMap::from([
        ("step".to_owned(), step.steps.to_string()),
        ("seed".to_owned(), step.random.0.to_string()),
        ("stream".to_owned(), step.random.1.to_string()),
    ]);
    safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(failed)
}

/// How to use the folder.
pub(super) fn readme(step: &ExportedStep<'_>) -> String {
    let list = |tensors: Vec<&NamedTensor>| -> String {
        let line = |tensor: &NamedTensor| format!("- `{}`: {}\n", tensor.name, tensor.ty);
        tensors.into_iter().map(line).collect()
    };
    let inputs = list(step.inputs.iter().collect());
    let results = list(step.results.iter().map(|(tensor, _)| tensor).collect());
    let rate = match step.fixed_rate {
        Some(rate) => {
            format!("The optimizer's numbers were exported for the learning rate {rate:e}: give that one.")
        }
        None => "Calls may have any learning rate.".to_owned(),
    };
    let last = last_step(step).map_or_else(
        || "It runs as often as you like.".to_owned(),
        |last| format!("It runs up to step {last}, and says so then."),
    );
    format!(
        "# The step `{}`\n\n\
         `step.so` holds a compiled training step that keeps its own state. `step.h` declares its functions, `manifest.json` describes its tensors, and \
         `state.safetensors` has the state after {} steps. It needs a C library with threads and nothing else. It was compiled for the processor that it was exported on; \
         `kiln_open` refuses another one that lacks some of its instructions, if it is an x86-64; elsewhere nothing is checked.\n\n\
         Inputs of a call, in this order, row-major:\n\n{inputs}\n\
         Results, in this order:\n\n{results}\n\
         {rate} {last}\n\n\
         From C: `cc main.c ./step.so -lpthread -lm`, with the functions of `step.h`. From Python:\n\n\
         ```python\n\
         import ctypes\n\
         step = ctypes.CDLL(\"./step.so\")\n\
         step.kiln_open.restype = ctypes.c_void_p\n\
         message = ctypes.create_string_buffer(256)\n\
         session = ctypes.c_void_p(step.kiln_open(b\"state.safetensors\", 2, message, 256))\n\
         ```\n",
        step.graph.name, step.steps
    )
}
