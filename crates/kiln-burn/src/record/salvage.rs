//! Salvage: running a recording that is not going to be compiled, for the tensors that it leaves behind.
//!
//! A function that panics half way, or cannot be compiled, may have put tensors into cells of its own
//! before: a running mean, a counter of steps. Without Kiln these would have values, and the program would
//! continue with them. So the recorded operations are run node by node on burn-flex, which needs no
//! compiler, and their tensors enter the table. Random operations draw from the streams that they took when
//! they were recorded.

use super::recording::Recorded;
use super::step::Step;
use crate::execute::Setting;
use crate::options::{CompileBackend, CompileOptions};
use crate::table::{self, Slot};

/// Runs `recorded` and enters the tensors that outlive it into the table. A tensor that cannot be computed
/// is entered with the reason.
pub fn run(options: &CompileOptions, recorded: Recorded) {
    let ids = recorded.output_ids.clone();
    if ids.is_empty() {
        return;
    }
    ids.into_iter()
        .zip(compute(options, recorded))
        .for_each(|(id, slot)| match slot {
            Slot::Ready(tensor) => table::insert(id, tensor),
            Slot::Failed(reason) => table::fail(id, reason),
        });
}

/// Runs `recorded`; returns the tensors that outlive it, in order, or why there are none.
pub(super) fn compute(options: &CompileOptions, recorded: Recorded) -> Vec<Slot> {
    let count = recorded.output_ids.len();
    let result = Step::compile(
        &plain(options),
        CompileBackend::AotEager,
        Setting::default(),
        &recorded,
        Default::default(),
    )
    .and_then(|step| {
        let mut inputs = recorded.inputs.into_iter().map(|input| input.tensor).collect();
        step.run(&mut inputs, &recorded.scalars, &recorded.streams)
    });
    match result {
        Ok(tensors) => tensors.into_iter().map(Slot::Ready).collect(),
        Err(error) => vec![Slot::Failed(error.to_string().into()); count],
    }
}

/// The options without those that ask for more than the results.
fn plain(options: &CompileOptions) -> CompileOptions {
    CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_name(options.name.clone())
}
