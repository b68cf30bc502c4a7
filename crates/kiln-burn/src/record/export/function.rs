//! From the last call of a compiled function to files.

use std::path::Path;

use burn_ir::{TensorId, TensorIr};
use kiln_cpu::export::{ArgumentSource, ExportedStep, NamedTensor, ResultSource};

use super::{
    Number, Numbers, States, StepExportError, distinct, elements, named_inputs, number_sources, of_state,
};
use crate::execute::cpu;
use crate::options::CompileOptions;
use crate::random;
use crate::record::region::LastRun;

/// Writes the folder of a function whose last call was `run`, with the inputs `fresh` and the results
/// `results`. Every other tensor that it read is a constant.
///
/// # Errors
///
/// [`StepExportError`].
pub fn export_function(
    run: &LastRun,
    fresh: &[TensorIr],
    results: &[TensorId],
    options: &CompileOptions,
    folder: &Path,
) -> Result<(), StepExportError> {
    if let Some(graph_break) = &run.graph_break {
        return Err(StepExportError::Broken {
            graph_break: graph_break.to_string(),
        });
    }
    if run.outputs.iter().any(|output| !results.contains(output)) {
        return Err(StepExportError::Kept);
    }
    distinct(fresh)?;
    let (step, graph) = (&run.step, &*run.step.graph);
    let number = |id: TensorId| fresh.iter().position(|ir| ir.id == id);
    let mut states = States::default();
    let mut arguments = Vec::with_capacity(graph.parameters().len());
    for &position in step.argument_positions() {
        let id = run.inputs[position];
        arguments.push(match (number(id), run.host_data.get(&position)) {
            (Some(input), _) => ArgumentSource::Input(input),
            (None, Some(made)) => ArgumentSource::State(states.of_constant(id, made)?),
            (None, None) => {
                let captured = elements(id, &format!("tensor {position} that the function reads"))?;
                ArgumentSource::State(states.of_constant(id, &captured)?)
            }
        });
    }
    let inputs = named_inputs(fresh)?;
    let mut returned = Vec::with_capacity(results.len());
    for (index, &id) in results.iter().enumerate() {
        let output = run.outputs.iter().position(|&output| output == id);
        let (ty, source) = match (output, number(id)) {
            (Some(output), _) => (
                graph.ty(graph.outputs[output].value).clone(),
                ResultSource::Output(output),
            ),
            (None, Some(input)) => (inputs[input].ty.clone(), ResultSource::Input(input)),
            (None, None) => {
                let captured = elements(id, &format!("result {index}"))?;
                let state = states.of_constant(id, &captured)?;
                of_state(&states, state)
            }
        };
        let name = format!("result.{index}");
        returned.push((NamedTensor { name, ty }, source));
    }
    let numbers = Numbers {
        of: run.scalars.iter().copied().map(Number::Fixed).collect(),
        ..Numbers::default()
    };
    let (sources, tables, fixed_rate) = number_sources(step, &numbers);
    let random = random::state().unwrap_or(random::Stream { seed: 0, stream: 0 });
    let exported = ExportedStep {
        graph,
        inputs,
        results: returned,
        states: states.tensors,
        arguments,
        outputs: vec![None; run.outputs.len()],
        numbers: sources,
        tables,
        fixed_rate,
        steps: 0,
        random: (random.seed, random.stream),
        streams: run.random_operations as u64,
    };
    cpu::export(&exported, options, folder)
}
