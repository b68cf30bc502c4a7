//! Running a recording that is not going to be compiled, for what it leaves behind.
//!
//! A function that panics half way, or cannot be compiled, may have put tensors into cells of its own before:
//! a running mean, a counter of steps. Without Kiln these have values, and the program goes on with them. So
//! what was recorded is run node by node on burn-flex, which needs no compiler, and its tensors enter the
//! table. Random operations draw from the streams that they took when they were recorded.

use std::sync::Arc;

use super::recording::Recorded;
use super::step::Step;
use crate::error::Error;
use crate::options::{CompileBackend, CompileOptions};
use crate::table;

/// Runs `recorded` and enters what outlives it into the table. What cannot be run is entered with the reason.
pub fn run(options: &CompileOptions, recorded: Recorded) {
    let ids = recorded.output_ids.clone();
    if ids.is_empty() {
        return;
    }
    let result = Step::compile(
        &plain(options),
        CompileBackend::AotEager,
        false,
        &recorded,
        None,
        Vec::new(),
    )
    .and_then(|step| {
        let mut inputs = recorded.inputs.into_iter().map(|input| input.tensor).collect();
        step.run(&mut inputs, &recorded.scalars, &recorded.streams)
    });
    enter(ids, result);
}

/// The options without what asks for more than the results.
fn plain(options: &CompileOptions) -> CompileOptions {
    CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_name(options.name.clone())
}

fn enter(ids: Vec<burn_ir::TensorId>, result: Result<Vec<crate::storage::Storage>, Error>) {
    match result {
        Ok(tensors) => ids
            .into_iter()
            .zip(tensors)
            .for_each(|(id, tensor)| table::insert(id, tensor)),
        Err(error) => {
            let reason: Arc<str> = error.to_string().into();
            ids.into_iter().for_each(|id| table::fail(id, reason.clone()));
        }
    }
}
