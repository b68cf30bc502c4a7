//! Operations that belong before a step: they run at once, and leave its recording.
//!
//! Burn draws a parameter when a program first uses it. In the first call of a training step the draws are
//! in the middle of the recording, and no later call draws anything. [`Recording::hoist`] runs the
//! operations that make such tensors, with the random streams that the operations took when they were
//! called, and makes the tensors inputs of the step. So the first call is the same step as all later ones,
//! and the parameters have the values that an eager program draws.

use burn_flex::FlexTensor;
use burn_ir::{TensorId, TensorIr, TensorStatus};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Recording;
use crate::eager::{self, OperationError, TensorStore};
use crate::random::Stream;
use crate::storage::Storage;
use crate::stream;

impl Recording {
    /// Runs the operations that make the tensors `roots`, and takes them out of the recording. Returns the
    /// tensors that the program still has, for the table.
    ///
    /// # Errors
    /// If one of the operations fails. The recording is then as before.
    pub fn hoist(&mut self, roots: &[TensorId]) -> Result<Vec<(TensorId, Storage)>, OperationError> {
        for id in roots {
            // A parameter made of data on the host is no constant of the step.
            if let Some(&position) = self.input_positions.get(id) {
                self.inputs[position as usize].host_data = false;
            }
        }
        let hoisted = self.makers(roots);
        if !hoisted.contains(&true) {
            return Ok(Vec::new());
        }
        let made = self.run(&hoisted)?;
        Ok(self.without(&hoisted, made))
    }

    /// The operations that compute the tensors `roots`.
    fn makers(&self, roots: &[TensorId]) -> Vec<bool> {
        let mut wanted: FxHashSet<TensorId> = roots.iter().copied().collect();
        let mut makers = vec![false; self.operations.len()];
        for (operation, is_maker) in self.operations.iter().zip(&mut makers).rev() {
            if operation.outputs().any(|output| wanted.contains(&output.id)) {
                *is_maker = true;
                wanted.extend(operation.inputs().map(|input| input.id));
            }
        }
        makers
    }

    /// Runs the operations marked in `hoisted`; returns the tensors that they leave.
    fn run(&self, hoisted: &[bool]) -> Result<FxHashMap<TensorId, FlexTensor>, OperationError> {
        let mut results = Results {
            recording: self,
            made: FxHashMap::default(),
        };
        let operations = self.operations.iter().zip(self.streams_by_operation());
        for ((operation, streams), _) in operations.zip(hoisted).filter(|(_, hoisted)| **hoisted) {
            let mut streams = streams.iter();
            let mut streams = || {
                streams
                    .next()
                    .map_or((0, 0), |&Stream { seed, stream }| (seed, stream))
            };
            eager::run(operation, &mut results, &mut streams)?;
        }
        Ok(results.made)
    }

    /// The streams of each operation; none for one that is not random.
    fn streams_by_operation(&self) -> impl Iterator<Item = &[Stream]> {
        let mut left: &[Stream] = &self.streams;
        self.operations.iter().map(move |operation| {
            let (streams, rest) = left.split_at(stream::draws(operation).min(left.len()));
            left = rest;
            streams
        })
    }

    /// Records the operations that are not `hoisted` again, with the tensors `made` as inputs. Returns
    /// those that are alive.
    fn without(
        &mut self,
        hoisted: &[bool],
        mut made: FxHashMap<TensorId, FlexTensor>,
    ) -> Vec<(TensorId, Storage)> {
        let streams: Vec<Vec<Stream>> = self.streams_by_operation().map(<[Stream]>::to_vec).collect();
        let mut old = std::mem::replace(self, Self::new(self.base));
        self.host_data = std::mem::take(&mut old.host_data);
        let alive: FxHashMap<_, _> = old.pending.iter().map(|it| (it.id, it.alive)).collect();
        let is_alive = |id: &TensorId| alive.get(id).copied().unwrap_or(false);
        let entered = made.iter().filter(|(id, _)| is_alive(id));
        let entered = entered.map(|(id, tensor)| (*id, tensor.clone().into())).collect();

        let mut inputs: Vec<_> = old.inputs.into_iter().map(Some).collect();
        let mut lines = old.lines.into_iter();
        for (position, ((operation, streams), &hoisted)) in
            old.operations.into_iter().zip(streams).zip(hoisted).enumerate()
        {
            let line = lines.next();
            if hoisted {
                continue;
            }
            for ir in self.unknown_operands(&operation) {
                if self.knows(ir.id) {
                    continue; // the same tensor twice among the operands
                }
                let earlier = old.input_positions.get(&ir.id);
                match earlier.and_then(|&position| inputs[position as usize].take()) {
                    Some(input) => {
                        self.input_positions.insert(ir.id, self.inputs.len() as u32);
                        self.inputs.push(input);
                    }
                    None => {
                        let made = made.remove(&ir.id);
                        let made = made.expect("an operand is an input or was made just now");
                        self.add_input(&ir, made.into());
                        if !is_alive(&ir.id) {
                            self.kill(ir.id);
                        }
                    }
                }
            }
            if let Some(line) = line {
                self.note_line(line);
            }
            let full_precision = old.full_precision.contains(&(position as u32));
            let mut streams = streams.into_iter();
            self.push_in(full_precision, operation, || {
                streams.next().unwrap_or(Stream { seed: 0, stream: 0 })
            });
        }
        for result in &mut self.pending {
            result.alive = is_alive(&result.id);
        }
        // The table let go of these when they were recorded first.
        self.consumed.clear();
        entered
    }
}

/// The operands and results of hoisted operations.
struct Results<'a> {
    recording: &'a Recording,
    made: FxHashMap<TensorId, FlexTensor>,
}

impl TensorStore for Results<'_> {
    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, OperationError> {
        let made = match ir.status {
            TensorStatus::ReadWrite => self.made.remove(&ir.id),
            _ => self.made.get(&ir.id).cloned(),
        };
        let input = || {
            let position = *self.recording.input_positions.get(&ir.id)?;
            Some(
                self.recording.inputs[position as usize]
                    .tensor
                    .clone()
                    .into_host(),
            )
        };
        made.or_else(input).ok_or(OperationError::Missing {
            tensor: ir.id.value(),
        })
    }

    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor) {
        self.made.insert(ir.id, tensor);
    }
}
