//! A step whose arguments stay from call to call.
//!
//! Each call of a training step reads what its last call has left: parameters, moments, statistics.
//! [`CudaExecutable::settle`] looks up once where these are, and builds the graph over them. A call then
//! copies the new arguments, launches the graph, and looks at no argument that stays. A caller that takes
//! one of these away, or puts another in its place, must drop the [`Settled`] and settle anew.

use std::sync::{Arc, Mutex, PoisonError};

use super::error::StepError;
use super::executable::CudaExecutable;
use super::gpu::Gpu;
use super::replayed::{Arrangement, Given, Replayed};
use crate::error::CudaError;
use crate::runtime::Storage;

/// A result of at most so many bytes reuses the memory of an earlier result that the caller has dropped:
/// asking the driver takes longer than copying the result.
const SMALL_RESULT: usize = 64 << 10;

/// Results of one output that are remembered.
const REMEMBERED: usize = 16;

/// The graph of the last call, or of the last [`Settled`]: the next call at the same addresses takes it
/// from here.
pub(super) type Parked = Arc<Mutex<Option<Replayed>>>;

/// Where the arguments and outputs of a step are from call to call.
pub struct Settled {
    arrangement: Arrangement,
    fresh: Vec<usize>,
    leaving: Vec<usize>,
    graph: Option<Replayed>,
    /// Which graph the next call launches: with pairs, two graphs take turns.
    turn: usize,
    /// Memory of earlier results, for each output that leaves.
    results: Vec<Results>,
    parked: Parked,
}

/// Memory of earlier results of one output.
#[derive(Debug, Default)]
struct Results(Vec<Arc<Storage>>);

impl Results {
    /// Memory for a result: that of a result that the caller has dropped, or new memory.
    fn take(&mut self, gpu: &Gpu, bytes: usize) -> Result<Arc<Storage>, CudaError> {
        if bytes > SMALL_RESULT {
            return gpu.allocate(bytes);
        }
        // `Storage::take_to` waits for uses on other streams, as with any storage.
        if let Some(free) = self.0.iter().find(|storage| Arc::strong_count(storage) == 1) {
            return Ok(free.clone());
        }
        let made = gpu.allocate(bytes)?;
        if self.0.len() < REMEMBERED {
            self.0.push(made.clone());
        }
        Ok(made)
    }
}

impl std::fmt::Debug for Settled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (fresh, leaving) = (&self.fresh, &self.leaving);
        write!(f, "Settled(fresh {fresh:?}, leaving {leaving:?})")
    }
}

impl Drop for Settled {
    /// The graph stays with the executable: the next arguments that are settled are often at the same
    /// addresses.
    fn drop(&mut self) {
        if let Some(graph) = self.graph.take() {
            let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
            let before = parked.replace(graph);
            drop(parked);
            // Dropping a graph waits for its last launch.
            drop(before);
        }
    }
}

impl Settled {
    /// Arguments that each call must be given, in order.
    pub fn fresh(&self) -> &[usize] {
        &self.fresh
    }

    /// Outputs that each call returns, in order.
    pub fn leaving(&self) -> &[usize] {
        &self.leaving
    }

    /// Arguments that the step does not overwrite, each with the output that is its next value. The two
    /// storages change roles at each call.
    pub fn pairs(&self) -> &[(usize, usize)] {
        &self.arrangement.pairs
    }

    /// Where argument `index` is now; none if each call is given it.
    pub fn argument(&self, index: usize) -> Option<&Arc<Storage>> {
        let pair = self.arrangement.pairs.iter().find(|(input, _)| *input == index);
        match pair {
            Some((_, output)) if self.turn == 1 => self.arrangement.outputs[*output].as_ref(),
            _ => self.arrangement.inputs[index].as_ref(),
        }
    }

    /// Where the next call leaves output `index`; none if it returns it.
    pub fn output(&self, index: usize) -> Option<&Arc<Storage>> {
        let pair = self.arrangement.pairs.iter().find(|(_, output)| *output == index);
        match pair {
            Some((input, _)) if self.turn == 1 => self.arrangement.inputs[*input].as_ref(),
            _ => self.arrangement.outputs[index].as_ref(),
        }
    }
}

impl CudaExecutable {
    /// Settles the arguments of further calls. `inputs` has the storage of each argument that stays; from
    /// now on only the step may write it or rely on its elements. `becomes` has for each output the
    /// argument whose next value it is. If that argument stays, so does the output; each call returns all
    /// other outputs.
    ///
    /// # Errors
    /// [`StepError::Arguments`] if storages or `becomes` do not fit the step, or the step has operations
    /// outside; [`StepError::Cuda`].
    pub fn settle(
        &self,
        inputs: Vec<Option<Arc<Storage>>>,
        becomes: &[Option<usize>],
    ) -> Result<Settled, StepError> {
        let own = self.own_outputs();
        self.expect("tensors", self.code().inputs.len(), inputs.len())?;
        self.expect("outputs", own, becomes.len())?;
        self.expect("operations outside", self.outside(), 0)?;
        for (storage, &bytes) in inputs.iter().zip(&self.code().inputs) {
            if let Some(storage) = storage {
                self.expect("bytes", bytes, storage.bytes())?;
            }
        }
        let aliases = &self.contract().aliases;
        let mut arrangement = Arrangement {
            outputs: vec![None; own],
            inputs,
            pairs: Vec::new(),
        };
        for (output, becomes) in becomes.iter().enumerate() {
            let Some(input) = *becomes else { continue };
            let Some(storage) = arrangement.inputs.get(input).and_then(Option::as_ref) else {
                continue;
            };
            self.expect("bytes", self.code().outputs[output], storage.bytes())?;
            arrangement.outputs[output] = Some(if aliases[output] == Some(input as u32) {
                storage.clone()
            } else {
                arrangement.pairs.push((input, output));
                self.gpu().allocate(storage.bytes())?
            });
        }
        let without = |storages: &[Option<Arc<Storage>>]| -> Vec<usize> {
            let numbered = storages.iter().enumerate();
            numbered
                .filter(|(_, storage)| storage.is_none())
                .map(|(index, _)| index)
                .collect()
        };
        let (fresh, leaving) = (without(&arrangement.inputs), without(&arrangement.outputs));
        Ok(Settled {
            arrangement,
            fresh,
            results: leaving.iter().map(|_| Results::default()).collect(),
            leaving,
            graph: None,
            turn: 0,
            parked: self.parked().clone(),
        })
    }

    /// Queues the step on the settled arguments and returns. `given` has the elements of each argument of
    /// [`Settled::fresh`]; the result has the storage of each output of [`Settled::leaving`]. `wait` says
    /// whether to wait for the index checks.
    ///
    /// # Errors
    /// As [`CudaExecutable::run`]; after [`StepError::Index`] the settled arguments are unchanged.
    pub fn run_settled(
        &self,
        settled: &mut Settled,
        given: &[Given<'_>],
        scalars: &[u64],
        wait: bool,
    ) -> Result<Vec<Arc<Storage>>, StepError> {
        self.expect("fresh tensors", settled.fresh.len(), given.len())?;
        self.expect("scalars", self.code().scalars, scalars.len())?;
        for (&index, given) in settled.fresh.iter().zip(given) {
            self.expect("bytes", self.code().inputs[index], given.bytes())?;
        }
        self.check_ranks()?;
        let leaving = settled.leaving.iter().zip(&mut settled.results);
        let results: Vec<_> = leaving
            .map(|(&output, results)| results.take(self.gpu(), self.code().outputs[output]))
            .collect::<Result<_, _>>()?;
        self.with_state(|state, arena| {
            if !settled.graph.as_ref().is_some_and(|graph| graph.has_arena(arena)) {
                settled.graph = None;
                let parked = settled
                    .parked
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                let known = parked.filter(|graph| graph.is_of(&settled.arrangement, arena));
                settled.graph = Some(match known {
                    Some(known) => known,
                    None => self.build(&settled.arrangement, state, arena)?,
                });
            }
            let Some(graph) = &mut settled.graph else {
                unreachable!("a graph was just put there")
            };
            graph.launch(
                settled.turn,
                self.gpu(),
                scalars,
                given.iter().copied(),
                results.iter(),
            )?;
            self.watch_ranks()?;
            if wait && !self.contract().checks.is_empty() {
                self.look_at_checks(&graph.memory(settled.turn))?;
            }
            settled.turn = (settled.turn + 1) % graph.variants();
            // What is queued later touches no result: a caller can read one while the next call runs.
            let mut small = results.iter().filter(|result| result.bytes() <= SMALL_RESULT);
            Ok(small.try_for_each(|result| result.end_use())?)
        })?;
        Ok(results)
    }
}

/// A step and what it is settled on go from thread to thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Settled>();
    is_shared::<CudaExecutable>();
};
