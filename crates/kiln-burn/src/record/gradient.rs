//! Which forward operation a backward operation is the gradient of.
//!
//! Burn's autodiff makes a *node* for each call of one of its functions and runs the node's *step* once in
//! the backward pass. A step reads the gradient of the call's result and tensors that the call saved (its
//! operands and results), and leaves one gradient for each operand. The recording has the tensors, and the
//! stack has the function of each operation ([`super::sighting`]); neither has the call of that function
//! that a step belongs to. [`sources`] finds it.
//!
//! Each backward operation has *candidates*: the calls whose step it may be part of. They begin as all calls
//! of its function, and are never fewer than what is possible:
//!
//! - A forward tensor that it reads was saved: the call has it as operand or result.
//! - A backward tensor that it reads was made in the same step, or is the gradient of the call's result. The
//!   gradient that an operation makes can only be one of an operand of its candidates, of the same type, or
//!   of what an addition (or another call that hands gradients on as they are) made that operand from.
//! - A tensor that does not depend on the gradient of the loss is used only in the step that made it.
//! - A gradient that leaves a step is read by the step of the call that made the operand.
//! - A step runs once. What is known to be one call's step excludes that call elsewhere.
//!
//! The operations of a step follow one another. Two of the same function are in different steps for certain
//! if the same chain of calls has come in between, loops excepted.
//!
//! A line is claimed only if all candidates are at the same line; otherwise the operation keeps the line of
//! `backward()`. At first [`sources`] assumes that no step belongs to a call before the recording. If that
//! leaves some operation without candidates, the assumption is wrong, and such calls become candidates
//! wherever they are possible.

mod calls;

use std::rc::Rc;
use std::sync::Arc;

use burn_ir::OperationIr;
use rustc_hash::FxHashMap;

use self::calls::{Forward, Role, StepOf, Value, push_new};
use super::sighting::{Call, Part, Sighting};

/// Where an operation comes from.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Source {
    /// The user's line, as `file:line`, if it is known. Of an operation that belongs to a gradient: the line
    /// of the forward operation.
    pub line: Option<Arc<str>>,
    /// The forward operation whose gradient it belongs to, by Burn's name, such as `matmul`.
    pub gradient_of: Option<Arc<str>>,
    /// Whether autocast leaves it as it is.
    pub full_precision: bool,
}

/// `matmul` of `float_matmul`.
fn shown(function: &str) -> &str {
    let name = function.strip_prefix("float_").unwrap_or(function);
    name.strip_suffix("_impl").unwrap_or(name)
}

/// A call before the recording.
const OUTSIDE: u32 = u32::MAX;

/// Rounds of refinement; each makes candidates fewer, none is needed for them to be right.
const ROUNDS: usize = 6;

/// Functions of burn-autodiff 0.21 that may hand the gradient of their result on, as it is, to an operand of
/// the same type.
const HANDS_ON: &[&str] = &[
    "float_add",
    "float_add_scalar",
    "float_cast",
    "float_expand",
    "float_flip",
    "float_permute",
    "float_remainder",
    "float_remainder_scalar",
    "float_repeat_dim",
    "float_reshape",
    "float_scatter",
    "float_scatter_add",
    "float_scatter_nd",
    "float_select_add",
    "float_slice",
    "float_sub",
    "float_sub_scalar",
    "float_swap_dims",
    "float_to_device",
];

/// Functions of burn-autodiff 0.21 whose gradient may not depend on the gradient of their result: it is zero.
const ZERO: &[&str] = &[
    "float_ceil",
    "float_floor",
    "float_round",
    "float_sign",
    "float_trunc",
    "float_unfold",
];

/// The source of each of `operations`. Empty if the stack was not looked at. The operations of
/// `full_precision` are known to stay as they are; this finds those that belong to their gradients.
pub fn sources(operations: &[OperationIr], sightings: &[Sighting], full_precision: &[u32]) -> Vec<Source> {
    let mut sources: Vec<Source> = sightings
        .iter()
        .map(|sighting| Source {
            line: sighting.line.clone(),
            ..Source::default()
        })
        .collect();
    for &operation in full_precision {
        if let Some(source) = sources.get_mut(operation as usize) {
            source.full_precision = true;
        }
    }
    let calls = || sightings.iter().filter_map(|sighting| sighting.call.as_ref());
    let part = |part: Part| calls().any(|call| call.part == part);
    let nameless = |call: &Call| {
        let name = call.function.as_ref().and_then(|function| function.name.as_ref());
        call.part == Part::Forward && name.is_none()
    };
    // A call that is missing from the sightings could be the one that is searched.
    let blind = sightings.iter().any(|sighting| sighting.blind) || calls().any(nameless);
    if blind || operations.len() != sightings.len() || !part(Part::Step) || !part(Part::Forward) {
        return sources;
    }
    let recording = Forward::new(operations, sightings);
    let mut tracer = Tracer::new(&recording, false);
    if !tracer.solve() {
        tracer = Tracer::new(&recording, true);
        tracer.solve();
    }
    for (operation, source) in sources.iter_mut().enumerate() {
        if let Some(found) = tracer.claim(operation) {
            *source = found;
        }
        source.full_precision |= tracer.is_part_of(operation, full_precision);
    }
    sources
}

/// The values that a tensor may be the gradient of.
#[derive(Clone)]
enum Adjoint {
    /// Any value of its type.
    Any,
    /// One of these.
    Of(Rc<[u32]>),
}

struct Tracer<'a> {
    recording: &'a Forward<'a>,
    /// Whether steps of calls before the recording are considered.
    outside: bool,
    /// By operation in a step.
    candidates: Vec<Option<Rc<[u32]>>>,
    /// By value of the backward pass.
    adjoints: Vec<Option<Adjoint>>,
    /// By value: whether it depends on a seed.
    tangent: Vec<bool>,
    handed_on: FxHashMap<u32, Rc<[u32]>>,
    /// By value: operations of steps that read it.
    readers: Vec<Vec<u32>>,
    changed: bool,
}

impl<'a> Tracer<'a> {
    fn new(recording: &'a Forward<'a>, outside: bool) -> Self {
        let all: Rc<[u32]> = (0..recording.calls.len() as u32).collect();
        let with_outside = |calls: &[u32]| -> Rc<[u32]> {
            calls.iter().copied().chain(outside.then_some(OUTSIDE)).collect()
        };
        let by_function: Vec<Rc<[u32]>> = recording
            .of_function
            .iter()
            .map(|calls| with_outside(calls))
            .collect();
        let all = with_outside(&all);
        let candidates = recording.roles.iter().map(|role| match role {
            Role::Step(of) | Role::Accumulate(of) => match of {
                StepOf::Function(function) => Some(by_function[*function as usize].clone()),
                StepOf::Any => Some(all.clone()),
                StepOf::Own => None,
            },
            Role::Other | Role::Seed | Role::Recompute => None,
        });
        let mut readers = vec![Vec::new(); recording.values.len()];
        for (operation, role) in recording.roles.iter().enumerate() {
            if matches!(role, Role::Step(_) | Role::Accumulate(_)) {
                for &value in &recording.operands[operation] {
                    push_new(&mut readers[value as usize], operation as u32);
                }
            }
        }
        Self {
            candidates: candidates.collect(),
            adjoints: vec![None; recording.values.len()],
            tangent: vec![false; recording.values.len()],
            handed_on: FxHashMap::default(),
            recording,
            outside,
            readers,
            changed: false,
        }
    }

    /// Narrows candidates down; whether each operation has one left.
    fn solve(&mut self) -> bool {
        for _ in 0..ROUNDS {
            self.changed = false;
            self.follow();
            self.share();
            self.leave();
            self.exclude();
            if !self.changed {
                break;
            }
        }
        self.candidates
            .iter()
            .flatten()
            .all(|candidates| !candidates.is_empty())
    }

    /// The source of an operation; none if its candidates are at different lines.
    fn claim(&self, operation: usize) -> Option<Source> {
        let candidates = self.candidates[operation].as_ref()?;
        let (&first, rest) = candidates.split_first()?;
        if candidates.contains(&OUTSIDE) {
            return None;
        }
        let call = |number: u32| &self.recording.calls[number as usize];
        let line = call(first).line.clone()?;
        if rest.iter().any(|&other| call(other).line.as_ref() != Some(&line)) {
            return None;
        }
        let function = call(first).function;
        let one = rest.iter().all(|&other| call(other).function == function);
        let name = &*self.recording.names[function as usize];
        Some(Source {
            line: Some(line),
            gradient_of: one.then(|| shown(name).into()),
            full_precision: false,
        })
    }

    /// Whether an operation may be part of the gradient of a call that one of `operations` belongs to. In
    /// doubt it is.
    fn is_part_of(&self, operation: usize, operations: &[u32]) -> bool {
        let Some(candidates) = self.candidates[operation]
            .as_ref()
            .filter(|_| !operations.is_empty())
        else {
            return false;
        };
        let known = candidates.iter().filter(|&&call| call != OUTSIDE);
        let mut made = known.flat_map(|&call| &self.recording.calls[call as usize].operations);
        made.any(|made| operations.contains(made))
    }

    fn narrow(&mut self, operation: u32, keep: impl Fn(u32) -> bool) {
        let Some(candidates) = &mut self.candidates[operation as usize] else {
            return;
        };
        if !candidates.iter().all(|&call| keep(call)) {
            *candidates = candidates.iter().copied().filter(|&call| keep(call)).collect();
            self.changed = true;
        }
    }

    /// A value, and the values that its gradient is handed on to.
    fn handed_on(&mut self, value: u32) -> Rc<[u32]> {
        if let Some(known) = self.handed_on.get(&value) {
            return known.clone();
        }
        let recording = self.recording;
        let mut found = vec![value];
        let mut next = 0;
        while let Some(&value) = found.get(next) {
            next += 1;
            let Some(call) = recording.call_that_made(value) else {
                continue;
            };
            if recording.is_function(recording.calls[call as usize].function, HANDS_ON) {
                for operand in recording.operands_of_type(call, recording.values[value as usize].ty) {
                    if !found.contains(&operand) {
                        found.push(operand);
                    }
                }
            }
        }
        let found: Rc<[u32]> = found.into();
        self.handed_on.insert(value, found.clone());
        found
    }

    /// The calls whose step may read `value` in `reader`, sorted; none if any may.
    fn readable(&self, value: u32, reader: u32) -> Option<Vec<u32>> {
        let recording = self.recording;
        let Value { ty, producer, .. } = recording.values[value as usize];
        let role = producer.map_or(Role::Other, |producer| recording.roles[producer as usize]);
        let mut calls = match role {
            Role::Recompute => return None,
            Role::Other => {
                let holders = &recording.holders[value as usize];
                if producer.is_none() && holders.is_empty() {
                    return None;
                }
                let mut holders = holders.clone();
                holders.extend((self.outside && producer.is_none()).then_some(OUTSIDE));
                holders
            }
            Role::Seed | Role::Step(_) | Role::Accumulate(_) => {
                let mut calls = match &self.adjoints[value as usize] {
                    None => Vec::new(),
                    Some(Adjoint::Any) => {
                        let mut calls = recording.of_type[ty as usize].clone();
                        calls.extend(self.outside.then_some(OUTSIDE));
                        calls
                    }
                    Some(Adjoint::Of(values)) => {
                        let outside = |&value: &u32| recording.values[value as usize].producer.is_none();
                        let mut calls: Vec<u32> = values
                            .iter()
                            .filter_map(|&value| recording.call_that_made(value))
                            .collect();
                        calls.extend((self.outside && values.iter().any(outside)).then_some(OUTSIDE));
                        calls
                    }
                };
                let producer = producer.unwrap_or_default();
                if recording.may_share(producer, reader) {
                    calls.extend(self.candidates[producer as usize].iter().flat_map(|it| it.iter()));
                }
                calls
            }
        };
        calls.sort_unstable();
        Some(calls)
    }

    /// Follows gradients from the seeds on, in the order of the recording.
    fn follow(&mut self) {
        let recording = self.recording;
        for operation in 0..recording.roles.len() as u32 {
            let role = recording.roles[operation as usize];
            let operands = &recording.operands[operation as usize];
            let read: &[u32] = match role {
                Role::Other | Role::Recompute => continue,
                Role::Seed => &[],
                Role::Step(_) => operands,
                // The newer gradient is the step's; the older one may be of any step.
                Role::Accumulate(_) => &operands[..operands.len().min(1)],
            };
            for &value in read {
                if let Some(calls) = self.readable(value, operation) {
                    self.narrow(operation, |call| calls.binary_search(&call).is_ok());
                }
            }
            let tangent = role == Role::Seed || operands.iter().any(|&value| self.tangent[value as usize]);
            for &result in &recording.results[operation as usize] {
                self.tangent[result as usize] = tangent;
                self.adjoints[result as usize] = self.adjoint(operation, role, result, tangent);
            }
        }
    }

    /// The values that a result of an operation may be the gradient of.
    fn adjoint(&mut self, operation: u32, role: Role, result: u32, tangent: bool) -> Option<Adjoint> {
        let recording = self.recording;
        let value = recording.values[result as usize];
        if !value.is_float {
            return None;
        }
        if let Role::Accumulate(_) = role {
            let mut both = recording.operands[operation as usize]
                .iter()
                .map(|&value| self.adjoints[value as usize].clone());
            return match (both.next()??, both.next()??) {
                (Adjoint::Any, other) | (other, Adjoint::Any) => Some(other),
                (Adjoint::Of(a), Adjoint::Of(b)) => {
                    let both: Rc<[u32]> = a.iter().copied().filter(|value| b.contains(value)).collect();
                    Some(Adjoint::Of(both))
                }
            };
        }
        let Some(candidates) = self.candidates[operation as usize].clone() else {
            return Some(Adjoint::Any);
        };
        let zero = match role {
            Role::Step(StepOf::Function(function)) => recording.is_function(function, ZERO),
            _ => true,
        };
        if !tangent && !zero {
            return None;
        }
        let mut found: Vec<u32> = Vec::new();
        for &call in candidates.iter() {
            if call == OUTSIDE {
                continue;
            }
            for operand in recording.operands_of_type(call, value.ty) {
                found.extend(self.handed_on(operand).iter());
            }
        }
        found.sort_unstable();
        found.dedup();
        Some(Adjoint::Of(found.into()))
    }

    /// A backward value that does not depend on a seed is used only in the step that made it.
    fn share(&mut self) {
        let recording = self.recording;
        for value in 0..recording.values.len() {
            let Some(producer) = recording.values[value].producer else {
                continue;
            };
            let Role::Step(StepOf::Function(function)) = recording.roles[producer as usize] else {
                continue;
            };
            if self.tangent[value] || recording.is_function(function, ZERO) {
                continue;
            }
            for reader in self.readers[value].clone() {
                if recording.may_share(producer, reader) {
                    let (Some(a), Some(b)) = (
                        self.candidates[producer as usize].clone(),
                        self.candidates[reader as usize].clone(),
                    ) else {
                        continue;
                    };
                    self.narrow(producer, |call| b.contains(&call));
                    self.narrow(reader, |call| a.contains(&call));
                }
            }
        }
    }

    /// A value that leaves a step is the gradient of an operand, and the step of the call that made the
    /// operand reads it.
    fn leave(&mut self) {
        let recording = self.recording;
        for value in 0..recording.values.len() {
            let Value { producer, ty, .. } = recording.values[value];
            let Some(producer) = producer.filter(|_| self.tangent[value]) else {
                continue;
            };
            if !matches!(recording.roles[producer as usize], Role::Step(_)) {
                continue;
            }
            let readers: Vec<u32> = self.readers[value]
                .iter()
                .copied()
                .filter(|&reader| !recording.may_share(producer, reader))
                .collect();
            let Some(candidates) = self.candidates[producer as usize].clone() else {
                continue;
            };
            if readers.is_empty() {
                continue;
            }
            let fits: Vec<u32> = candidates
                .iter()
                .copied()
                .filter(|&call| {
                    call == OUTSIDE || {
                        let operands: Vec<u32> = recording.operands_of_type(call, ty).collect();
                        operands
                            .into_iter()
                            .any(|operand| self.is_read_as(operand, &readers))
                    }
                })
                .collect();
            self.narrow(producer, |call| fits.contains(&call));
        }
    }

    /// Whether all of `readers` may read the gradient of `operand`.
    fn is_read_as(&mut self, operand: u32, readers: &[u32]) -> bool {
        let recording = self.recording;
        let values = self.handed_on(operand);
        let outside = values
            .iter()
            .any(|&value| recording.values[value as usize].producer.is_none());
        readers.iter().all(|&reader| {
            if let Role::Accumulate(_) = recording.roles[reader as usize] {
                let sum = recording.results[reader as usize].first().copied();
                return match sum.and_then(|sum| self.adjoints[sum as usize].as_ref()) {
                    Some(Adjoint::Of(of)) => values.iter().any(|value| of.contains(value)),
                    _ => true,
                };
            }
            let Some(candidates) = &self.candidates[reader as usize] else {
                return true;
            };
            outside && candidates.contains(&OUTSIDE)
                || values
                    .iter()
                    .filter_map(|&value| recording.call_that_made(value))
                    .any(|call| candidates.contains(&call))
        })
    }

    /// A step runs once: where a call's step is known, no other operation is in it.
    fn exclude(&mut self) {
        let recording = self.recording;
        // First and last operation that is known to be in the step of each call.
        let mut known: FxHashMap<u32, (u32, u32)> = FxHashMap::default();
        for (operation, candidates) in self.candidates.iter().enumerate() {
            if let Some([call]) = candidates.as_deref()
                && *call != OUTSIDE
                && recording.calls[*call as usize].single
            {
                let operation = operation as u32;
                known.entry(*call).or_insert((operation, operation)).1 = operation;
            }
        }
        for operation in 0..self.candidates.len() as u32 {
            let elsewhere = |call: &u32| {
                known.get(call).is_some_and(|&(first, last)| {
                    !recording.may_share(operation, first) || !recording.may_share(operation, last)
                })
            };
            self.narrow(operation, |call| !elsewhere(&call));
        }
    }
}
