//! The arguments of a step that runs again and again.
//!
//! Most tensors that a training step reads were written by its last run: parameters, moments, statistics.
//! [`Memory`] keeps these tensors from run to run, so that a run hands over only new ones. An executor may
//! keep more beside them ([`Memory::places`]): compiled code keeps its pointers.

use super::ExecuteError;
use super::cpu::Places;
use super::cuda::Resident;
use crate::storage::Storage;

/// The lifetime of an argument.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifetime {
    /// The run uses it up: the next run needs another tensor, given by [`Memory::put`] or by the output
    /// that becomes it.
    Run,
    /// It stays, unchanged.
    Constant,
}

/// The arguments of a step between its runs.
pub struct Memory {
    /// The tensor of each argument; none where one must be given before the next run.
    pub(super) tensors: Vec<Option<Storage>>,
    lifetimes: Vec<Lifetime>,
    /// For each output, the argument whose next value it is.
    pub(super) becomes: Vec<Option<usize>>,
    /// Arguments given since the last run: their types are not checked yet.
    pub(super) given: Vec<usize>,
    /// The pointers of compiled code to tensors that stay in place; none before its first run and after
    /// such a tensor was taken out.
    pub(super) places: Option<Places>,
    /// The same for a step on a GPU.
    pub(super) resident: Option<Resident>,
}

impl Memory {
    /// A memory without tensors. `becomes` has for each output the argument whose next value it is; other
    /// outputs leave the step.
    pub fn new(lifetimes: Vec<Lifetime>, becomes: Vec<Option<usize>>) -> Self {
        Self {
            tensors: vec![None; lifetimes.len()],
            lifetimes,
            becomes,
            given: Vec::new(),
            places: None,
            resident: None,
        }
    }

    /// The memory of a single run.
    pub fn once(inputs: Vec<Storage>, outputs: usize) -> Self {
        Self {
            lifetimes: vec![Lifetime::Run; inputs.len()],
            becomes: vec![None; outputs],
            given: (0..inputs.len()).collect(),
            tensors: inputs.into_iter().map(Some).collect(),
            places: None,
            resident: None,
        }
    }

    /// Gives argument `index` its tensor.
    pub fn put(&mut self, index: usize, tensor: Storage) {
        self.leave_place(index);
        self.tensors[index] = Some(tensor);
        self.given.push(index);
    }

    /// Takes the tensor of argument `index` out; it must be given again before the next run.
    pub fn take(&mut self, index: usize) -> Option<Storage> {
        self.leave_place(index);
        self.tensors[index].take()
    }

    /// Forgets every tensor that a failed run may have left half written.
    pub fn clear(&mut self) {
        self.places = None;
        self.resident = None;
        for (tensor, lifetime) in self.tensors.iter_mut().zip(&self.lifetimes) {
            if *lifetime == Lifetime::Run {
                *tensor = None;
            }
        }
    }

    /// Whether argument `index` stays, unchanged.
    pub(super) fn is_constant(&self, index: usize) -> bool {
        self.lifetimes[index] == Lifetime::Constant
    }

    fn leave_place(&mut self, index: usize) {
        if self.places.as_ref().is_some_and(|places| places.holds(index)) {
            self.places = None;
        }
        if self
            .resident
            .as_ref()
            .is_some_and(|resident| resident.holds(index))
        {
            self.resident = None;
        }
    }

    /// Runs a step that takes all its arguments and returns all its outputs. The result has none for each
    /// output that became an argument.
    ///
    /// Arguments that the step leaves in their list after an error stay where they were.
    pub(crate) fn run_by(
        &mut self,
        run: impl FnOnce(&mut Vec<Storage>) -> Result<Vec<Storage>, ExecuteError>,
    ) -> Result<Vec<Option<Storage>>, ExecuteError> {
        self.places = None;
        self.resident = None;
        self.given.clear();
        if let Some(index) = self.tensors.iter().position(Option::is_none) {
            return Err(ExecuteError::Missing { index });
        }
        let input = |(index, tensor): (usize, &mut Option<Storage>)| {
            let found = match self.lifetimes[index] {
                Lifetime::Constant => tensor.clone(),
                Lifetime::Run => tensor.take(),
            };
            found.ok_or(ExecuteError::Missing { index })
        };
        let inputs = self.tensors.iter_mut().enumerate().map(input);
        let mut inputs: Vec<Storage> = inputs.collect::<Result<_, _>>()?;
        let outputs = match run(&mut inputs) {
            Ok(outputs) => outputs,
            Err(error) => {
                for (tensor, input) in self.tensors.iter_mut().zip(inputs) {
                    *tensor = Some(input);
                }
                return Err(error);
            }
        };
        Ok(outputs
            .into_iter()
            .enumerate()
            .map(|(output, tensor)| self.accept(output, tensor))
            .collect())
    }

    /// Keeps an output that becomes an argument; gives back any other.
    pub(super) fn accept(&mut self, output: usize, tensor: Storage) -> Option<Storage> {
        match self.becomes[output] {
            Some(argument) => {
                self.tensors[argument] = Some(tensor);
                None
            }
            None => Some(tensor),
        }
    }
}
