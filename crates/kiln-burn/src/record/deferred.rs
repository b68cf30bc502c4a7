//! Recordings that did not run, kept until one of their tensors is needed.
//!
//! A frozen region ([`CompileOptions::frozen`]) refuses a recording that no compiled step fits, but the
//! recorded closure has assigned tensors: in a training loop the whole model. Computing them is forbidden,
//! and taking them away would lose the model. A closure that panics may have assigned some, too, such as
//! running statistics, of which the program most often uses none. So the recording is kept for these tensors.
//! None of its operations runs unless one of the tensors is used; then it is run node by node, as by
//! [`super::salvage`]. Tensors that are dropped unused cost nothing.

use std::sync::{Arc, Mutex, PoisonError};

use super::recording::Recorded;
use super::salvage;
use crate::options::CompileOptions;
use crate::table::{self, Keeper};

struct Deferred {
    recorded: Mutex<Option<Recorded>>,
    options: CompileOptions,
}

impl Keeper for Deferred {
    fn give_back(&self, _: usize) {
        // Held to the end: another thread that asks meanwhile waits for the results.
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recorded) = recorded.take() else {
            return;
        };
        kiln_log::warn!(
            target: "kiln",
            "a call of `{}` did not end, and a tensor that it has assigned is needed: its {} operations run \
             one by one on the CPU",
            self.options.name,
            recorded.operations.len(),
        );
        let ids = recorded.output_ids.clone();
        let slots = salvage::compute(&self.options, recorded);
        ids.into_iter()
            .zip(slots)
            .for_each(|(id, slot)| table::settle(id, slot));
    }

    fn is_needed_for_drop(&self) -> bool {
        false
    }
}

/// Enters the tensors that outlive `recorded` into the table, to be computed when one is needed.
pub(super) fn enter(options: &CompileOptions, recorded: Recorded) {
    let ids = recorded.output_ids.clone();
    let keeper = Arc::new(Deferred {
        recorded: Mutex::new(Some(recorded)),
        options: options.clone(),
    });
    for (index, id) in ids.into_iter().enumerate() {
        table::defer(id, keeper.clone(), index);
    }
}
