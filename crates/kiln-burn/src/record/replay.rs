//! Replaying a step without running the program that recorded it.
//!
//! Two consecutive calls that ran the same step tell how state flows: an input of the second call that was an
//! output of the first is *state* (a parameter, a moment, a running mean); one that is the same tensor in
//! both, or is made from equal data on the host in both, is *constant* (a frozen parameter, a table of
//! angles, a mask); one the caller names is *fresh* (the batch). If every input is one of these, the step can
//! be replayed: state is read from, and written back to, the ids under which the program's own objects
//! (model, optimizer) hold it, so that these objects are up to date without being touched.

use burn_flex::FlexTensor;
use burn_ir::{ScalarIr, TensorId};
use rustc_hash::FxHashMap;
use std::sync::Arc;

use super::region::{LastRun, Step};
use crate::error::Error;
use crate::random;
use crate::table::{self, Slot};

/// Where an input of a replayed step comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// The table, under this id, to be replaced by the output written back to it.
    State(TensorId),
    /// The table, under this id, unchanged.
    Constant(TensorId),
    /// The caller's tensor of this number.
    Fresh(usize),
    /// Data that the program makes on the host, the same at each call: number in [`Replay::host_data`].
    HostData(usize),
}

/// Where an output goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Target {
    /// The id of the output in the recording.
    id: TensorId,
    /// To the caller, as result of this number.
    result: Option<usize>,
    /// Back to the table, under its id.
    state: bool,
}

/// Why a step cannot be replayed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplayError {
    /// The two calls did not run the same step.
    #[error("the last two calls ran different steps")]
    Differs,
    /// The region was cut by a graph break.
    #[error("the region has a graph break")]
    Broken,
    /// An input is neither state, nor constant, nor named by the caller.
    #[error(
        "input {index} ({ty}) is a tensor the closure makes anew, with other elements, in each call; pass it as an input of the step, or make it once outside"
    )]
    Unknown {
        /// Its position among the inputs.
        index: usize,
        /// Its type and shape.
        ty: String,
    },
}

/// A step with its state, ready to be replayed.
pub struct Replay {
    step: Arc<Step>,
    sources: Vec<Source>,
    targets: Vec<Target>,
    random_operations: usize,
    host_data: Vec<FlexTensor>,
}

/// Input `index` if both calls made it from equal data on the host.
fn unchanged(previous: &LastRun, last: &LastRun, index: usize) -> Option<FlexTensor> {
    let (before, now) = (previous.host_data.get(&index)?, last.host_data.get(&index)?);
    let (before, now) = (before.to_contiguous(), now.to_contiguous());
    (before.bytes() == now.bytes()).then_some(now)
}

impl Replay {
    /// A replay of `last`, the call after `previous`. `fresh` are the ids of the tensors that the caller supplies at each call, in order, as they were in `last`;
    /// `results` those it takes away.
    pub fn new(
        previous: &LastRun,
        last: &LastRun,
        fresh: &[TensorId],
        results: &[TensorId],
    ) -> Result<Self, ReplayError> {
        if last.segment != 0 || previous.segment != 0 {
            return Err(ReplayError::Broken);
        }
        if !Arc::ptr_eq(&previous.step, &last.step) {
            return Err(ReplayError::Differs);
        }
        let before: FxHashMap<TensorId, usize> = previous
            .outputs
            .iter()
            .enumerate()
            .map(|(position, &id)| (id, position))
            .collect();
        let mut host_data = Vec::new();
        let source = |(index, &id): (usize, &TensorId)| {
            if let Some(position) = fresh.iter().position(|&fresh| fresh == id) {
                Ok(Source::Fresh(position))
            } else if let Some(&position) = before.get(&id) {
                // What was output `position` then is output `position` of the last call now.
                Ok(Source::State(last.outputs[position]))
            } else if previous.inputs[index] == id {
                Ok(Source::Constant(id))
            } else if let Some(data) = unchanged(previous, last, index) {
                host_data.push(data);
                Ok(Source::HostData(host_data.len() - 1))
            } else {
                Err(ReplayError::Unknown {
                    index,
                    ty: last.step.inputs()[index].clone(),
                })
            }
        };
        let sources: Vec<Source> = last
            .inputs
            .iter()
            .enumerate()
            .map(source)
            .collect::<Result<_, _>>()?;
        let target = |&id: &TensorId| {
            let result = results.iter().position(|&result| result == id);
            Target {
                id,
                result,
                state: result.is_none() || sources.contains(&Source::State(id)),
            }
        };
        Ok(Self {
            step: last.step.clone(),
            targets: last.outputs.iter().map(target).collect(),
            sources,
            random_operations: last.random_operations,
            host_data,
        })
    }

    /// Runs the step once. `fresh` and `scalars` are in the order of the recording; the results are in the order of `results` of [`Replay::new`], none for those the step does
    /// not make.
    ///
    /// # Errors
    ///
    /// If the step fails, or state it needs has no value. State that had been handed to the step is then lost and says so when used.
    pub fn run(
        &self,
        fresh: &[FlexTensor],
        scalars: &[ScalarIr],
        results: usize,
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let streams: Vec<random::Stream> = (0..self.random_operations).map(|_| random::take()).collect();
        let inputs = self
            .sources
            .iter()
            .map(|source| self.input(*source, fresh))
            .collect::<Result<_, _>>()?;
        let outputs = match self.step.run(inputs, scalars, &streams) {
            Ok(outputs) => outputs,
            Err(error) => {
                let reason: Arc<str> = error.to_string().into();
                for target in self.targets.iter().filter(|target| target.state) {
                    table::fail(target.id, reason.clone());
                }
                return Err(error);
            }
        };
        let mut taken = vec![None; results];
        for (tensor, target) in outputs.into_iter().zip(&self.targets) {
            if let Some(position) = target.result {
                taken[position] = Some(tensor.clone());
            }
            if target.state {
                table::insert(target.id, tensor);
            }
        }
        Ok(taken)
    }

    fn input(&self, source: Source, fresh: &[FlexTensor]) -> Result<FlexTensor, Error> {
        let slot = match source {
            Source::Fresh(position) => return Ok(fresh[position].clone()),
            Source::HostData(index) => return Ok(self.host_data[index].clone()),
            // Out of the table: the step may overwrite what nobody else holds.
            Source::State(id) => table::remove(id),
            Source::Constant(id) => table::get(id),
        };
        match slot {
            Some(Slot::Ready(tensor)) => Ok(tensor),
            Some(Slot::Failed(reason)) => Err(Error::NoValue { reason }),
            None => Err(Error::NoValue {
                reason: "state of the step was dropped".into(),
            }),
        }
    }
}
