//! The calls and steps of a recording, numbered, for [`super`].
//!
//! Forward operations are grouped into calls, tensors and their types are numbered, and each backward
//! operation is given the function whose step it is in and the extent that this step may have.

use std::sync::Arc;

use burn_ir::{OperationIr, TensorId, TensorIr};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::record::sighting::{Call as Seen, Function, Part, Sighting};

/// Functions of burn-autodiff 0.21 whose step issues operations in a loop.
const LOOPS: &[&str] = &["float_cat", "float_expand", "float_reshape", "float_unfold"];

/// A forward call.
pub(super) struct Call {
    pub(super) function: u32,
    pub(super) line: Option<Arc<str>>,
    pub(super) operations: Vec<u32>,
    /// Values read that the call did not make.
    pub(super) operands: Vec<u32>,
    /// Values made.
    pub(super) results: Vec<u32>,
    /// Whether it is one call for certain, and not two of one line taken together.
    pub(super) single: bool,
}

/// A value of the recording.
#[derive(Clone, Copy)]
pub(super) struct Value {
    /// Number of its element type and shape.
    pub(super) ty: u32,
    pub(super) is_float: bool,
    pub(super) producer: Option<u32>,
}

/// The role of an operation in the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// None of it: forward, optimizer.
    Other,
    /// The beginning of the backward pass.
    Seed,
    /// In a step of a function; none if it is any function, or the program's own.
    Step(StepOf),
    /// Adds gradients, in a step.
    Accumulate(StepOf),
    /// Does a forward operation again.
    Recompute,
}

/// Whose step an operation is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StepOf {
    /// A call of this function.
    Function(u32),
    /// A call of some function of burn-autodiff.
    Any,
    /// A node of the program's own.
    Own,
}

/// The recording, in numbers.
pub(super) struct Forward<'a> {
    pub(super) names: Vec<Arc<str>>,
    pub(super) values: Vec<Value>,
    pub(super) operands: Vec<Vec<u32>>,
    pub(super) results: Vec<Vec<u32>>,
    pub(super) calls: Vec<Call>,
    /// By operation.
    pub(super) call_of: Vec<Option<u32>>,
    /// Calls of each function.
    pub(super) of_function: Vec<Vec<u32>>,
    /// Calls that have a value among their operands or results, by value.
    pub(super) holders: Vec<Vec<u32>>,
    /// Calls that have a result of each type.
    pub(super) of_type: Vec<Vec<u32>>,
    pub(super) roles: Vec<Role>,
    /// For each operation, the first one that may be in the same step.
    pub(super) since: Vec<u32>,
    pub(super) sightings: &'a [Sighting],
}

impl<'a> Forward<'a> {
    pub(super) fn new(operations: &[OperationIr], sightings: &'a [Sighting]) -> Self {
        let mut numbers = Numbers::default();
        let mut operands = Vec::new();
        let mut results = Vec::new();
        for (index, operation) in operations.iter().enumerate() {
            operands.push(operation.inputs().map(|ir| numbers.value(ir, None)).collect());
            let made = operation
                .outputs()
                .map(|ir| numbers.value(ir, Some(index as u32)));
            results.push(made.collect());
        }
        let mut new = Self {
            names: Vec::new(),
            call_of: vec![None; operations.len()],
            of_function: Vec::new(),
            holders: vec![Vec::new(); numbers.values.len()],
            of_type: vec![Vec::new(); numbers.types.len()],
            roles: Vec::new(),
            since: Vec::new(),
            calls: Vec::new(),
            values: numbers.values,
            operands,
            results,
            sightings,
        };
        new.find_calls();
        new.find_roles();
        new.find_steps();
        new
    }

    fn seen(&self, operation: usize) -> Option<&'a Seen> {
        self.sightings[operation].call.as_ref()
    }

    /// Takes consecutive forward operations of one call together.
    fn find_calls(&mut self) {
        let mut functions: FxHashMap<Arc<str>, u32> = FxHashMap::default();
        let mut paths: FxHashSet<u64> = FxHashSet::default();
        let mut last: Option<&Seen> = None;
        for operation in 0..self.sightings.len() {
            let seen = self.seen(operation).filter(|seen| seen.part == Part::Forward);
            let before = std::mem::replace(&mut last, seen);
            let Some(seen) = seen else { continue };
            let name = seen.function.as_ref().and_then(|function| function.name.clone());
            let Some(name) = name else {
                last = None;
                continue;
            };
            let function = *functions.entry(name.clone()).or_insert_with(|| {
                self.names.push(name);
                self.of_function.push(Vec::new());
                self.names.len() as u32 - 1
            });
            let line = &self.sightings[operation].line;
            let same = before.is_some_and(|before| before.above == seen.above)
                && self
                    .calls
                    .last()
                    .is_some_and(|call| call.function == function && call.line == *line)
                && (seen.repeats || !paths.contains(&seen.below));
            if !same {
                paths.clear();
                self.of_function[function as usize].push(self.calls.len() as u32);
                self.calls.push(Call {
                    function,
                    line: line.clone(),
                    operations: Vec::new(),
                    operands: Vec::new(),
                    results: Vec::new(),
                    single: true,
                });
            }
            paths.insert(seen.below);
            let number = self.calls.len() as u32 - 1;
            let call = &mut self.calls[number as usize];
            call.single &= !same || seen.above != 0 && !seen.repeats;
            call.operations.push(operation as u32);
            self.call_of[operation] = Some(number);
            let read = self.operands[operation]
                .iter()
                .filter(|value| !call.results.contains(value));
            call.operands.extend(read.copied().collect::<Vec<_>>());
            call.results.extend(&self.results[operation]);
        }
        for (number, call) in self.calls.iter().enumerate() {
            for &value in call.operands.iter().chain(&call.results) {
                push_new(&mut self.holders[value as usize], number as u32);
            }
            for &value in &call.results {
                let ty = self.values[value as usize].ty;
                push_new(&mut self.of_type[ty as usize], number as u32);
            }
        }
    }

    fn find_roles(&mut self) {
        // Lines of forward parts, in order, with their functions, by file.
        let mut lines: FxHashMap<Arc<str>, Vec<(u32, u32)>> = FxHashMap::default();
        for call in &self.calls {
            let seen = call
                .operations
                .iter()
                .filter_map(|&operation| self.seen(operation as usize));
            for function in seen.filter_map(|seen| seen.function.as_ref()) {
                if let Some(line) = function.line {
                    lines
                        .entry(function.file.clone())
                        .or_default()
                        .push((line, call.function));
                }
            }
        }
        for lines in lines.values_mut() {
            lines.sort_unstable();
            lines.dedup();
        }
        let function = |function: &Option<Function>| {
            let Some(function) = function else {
                return StepOf::Own;
            };
            if let Some(name) = &function.name {
                let known = self.names.iter().position(|known| known == name);
                return known.map_or(StepOf::Any, |known| StepOf::Function(known as u32));
            }
            let below = function
                .line
                .zip(lines.get(&function.file))
                .and_then(|(line, lines)| {
                    let next = lines.partition_point(|(forward, _)| *forward < line);
                    lines.get(next)
                });
            below.map_or(StepOf::Any, |&(_, function)| StepOf::Function(function))
        };
        let role = |seen: &Option<Seen>| match seen {
            None => Role::Other,
            Some(seen) => match seen.part {
                Part::Forward => Role::Other,
                Part::Seed => Role::Seed,
                Part::Step => Role::Step(function(&seen.function)),
                Part::Accumulate => Role::Accumulate(function(&seen.function)),
                Part::Recompute => Role::Recompute,
            },
        };
        self.roles = self
            .sightings
            .iter()
            .map(|sighting| role(&sighting.call))
            .collect();
    }

    /// Finds for each operation the first one that may be in the same step.
    fn find_steps(&mut self) {
        let mut last: FxHashMap<u64, u32> = FxHashMap::default();
        let mut run: Option<StepOf> = None;
        let mut begin = 0;
        for index in 0..self.roles.len() {
            let now = match self.roles[index] {
                Role::Step(of) | Role::Accumulate(of) => Some(of),
                // The recomputation belongs to the step that continues after it.
                Role::Recompute => run,
                Role::Other | Role::Seed => None,
            };
            if now != run {
                last.clear();
                run = now;
                begin = index as u32;
            }
            let path = self
                .seen(index)
                .filter(|seen| !seen.repeats)
                .map(|seen| seen.below);
            let loops = match now {
                Some(StepOf::Function(function)) => LOOPS.contains(&&*self.names[function as usize]),
                _ => true,
            };
            if let Some(path) = path.filter(|_| !loops)
                && let Some(before) = last.insert(path, index as u32)
            {
                begin = begin.max(before + 1);
            }
            self.since.push(begin);
        }
    }

    /// Whether two operations of steps may be in the same one.
    pub(super) fn may_share(&self, a: u32, b: u32) -> bool {
        self.since[a.max(b) as usize] <= a.min(b)
    }

    pub(super) fn is_function(&self, function: u32, list: &[&str]) -> bool {
        list.contains(&&*self.names[function as usize])
    }

    pub(super) fn call_that_made(&self, value: u32) -> Option<u32> {
        let producer = self.values[value as usize].producer?;
        self.call_of[producer as usize]
    }

    /// Operands of a call that are of this type.
    pub(super) fn operands_of_type(&self, call: u32, ty: u32) -> impl Iterator<Item = u32> + '_ {
        let operands = self.calls[call as usize].operands.iter().copied();
        operands.filter(move |&value| {
            let value = self.values[value as usize];
            value.ty == ty && value.is_float
        })
    }
}

/// Numbers for tensors and their types.
#[derive(Default)]
struct Numbers {
    values: Vec<Value>,
    ids: FxHashMap<TensorId, u32>,
    types: FxHashMap<(burn_backend::DType, burn_backend::Shape), u32>,
}

impl Numbers {
    fn value(&mut self, ir: &TensorIr, producer: Option<u32>) -> u32 {
        let next = self.types.len() as u32;
        let ty = *self.types.entry((ir.dtype, ir.shape.clone())).or_insert(next);
        *self.ids.entry(ir.id).or_insert_with(|| {
            self.values.push(Value {
                ty,
                is_float: ir.dtype.is_float(),
                producer,
            });
            self.values.len() as u32 - 1
        })
    }
}

pub(super) fn push_new(list: &mut Vec<u32>, item: u32) {
    if list.last() != Some(&item) {
        list.push(item);
    }
}
