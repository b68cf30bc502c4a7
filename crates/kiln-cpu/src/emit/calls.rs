//! A step as data: its functions, each text once, and the calls of them in order.
//!
//! The C entry (`step`) writes the same calls as C. A family of steps ([`crate::family`]) keeps them as data, because
//! steps of different shapes call the same functions in other orders, with other counts, on other places.

use kiln_compiler::plan::{Place as Planned, Plan};
use kiln_compiler::{Check, Emitted, Step};
use kiln_graph::{DType, Graph};
use rustc_hash::FxHashMap;

use super::nest::Argument;
use super::own::OwnCall;
use super::step::template_name;
use super::tree::FileGroup;
use super::{Call, KernelCode};
use crate::kernels::Helper;
use crate::policy::{FLAT_GRAIN, SERIAL_POINTS};

/// How a function takes its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Convention {
    /// `void @(void *ctx, int64_t begin, int64_t end, int thread)`, with so many pointers at `ctx`.
    Task(usize),
    /// `void @(const kiln_runtime *rt, <parameters of these types>, char *workspace)`.
    Kernel(Vec<String>),
}

impl Convention {
    /// Number of arguments.
    pub fn arguments(&self) -> usize {
        match self {
            Convention::Task(count) => *count,
            Convention::Kernel(types) => types.len(),
        }
    }
}

/// A function of the step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepFunction {
    /// What its name begins with.
    pub kind: String,
    /// The part of the step that calls it first.
    pub part: FileGroup,
    /// Its text, with `@` for its name.
    pub text: String,
    /// What it calls.
    pub helpers: Vec<Helper>,
    /// How it is called.
    pub convention: Convention,
}

/// Where an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At a byte of the arena.
    Arena(usize),
    /// An input.
    Input(usize),
    /// An output.
    Output(usize),
    /// Eight bytes of a runtime scalar.
    Scalar(usize),
}

/// One call of a step. `kernel` is the number that profiling events carry.
#[derive(Clone, Debug)]
pub enum StepCall {
    /// A task over `n` iterations, shared between threads in multiples of `grain`, or not at all if that is 0.
    Task {
        /// The kernel it belongs to.
        kernel: usize,
        /// Position among the functions.
        function: usize,
        /// Iterations.
        n: i64,
        /// Iterations that stay together.
        grain: i64,
        /// Arguments.
        places: Vec<Place>,
    },
    /// A task over the elements of several tensors, as if those were one behind the other.
    Each {
        /// The kernel it belongs to.
        kernel: usize,
        /// Position among the functions.
        function: usize,
        /// Elements that stay together, as in a task.
        grain: i64,
        /// Elements up to and with each tensor.
        ends: Vec<i64>,
        /// Arguments of each tensor, one tensor after the other.
        places: Vec<Place>,
    },
    /// A function that shares its work itself.
    Kernel {
        /// The kernel it belongs to.
        kernel: usize,
        /// Position among the functions.
        function: usize,
        /// Arguments.
        places: Vec<Place>,
        /// Byte of the arena where its working memory begins.
        workspace: usize,
    },
    /// An operation that runs outside.
    Extern {
        /// The kernel it belongs to.
        kernel: usize,
        /// Its number among those.
        index: usize,
        /// Operands, then results.
        places: Vec<Place>,
    },
    /// A check: the step stops if an index is out of range.
    Guard {
        /// Number of the check.
        number: usize,
        /// Type of the indices.
        dtype: DType,
        /// The output with the least index.
        least: usize,
        /// The output with the largest index.
        most: usize,
        /// What the indices must be below.
        extent: usize,
    },
}

/// A step: functions and calls.
#[derive(Clone, Debug, Default)]
pub struct StepCalls {
    /// The functions, in the order of first use; no two are equal.
    pub functions: Vec<StepFunction>,
    /// The calls, in order.
    pub calls: Vec<StepCall>,
}

/// Collects the calls of a step.
struct Collector<'a> {
    plan: &'a Plan,
    step: StepCalls,
    /// Positions of functions, by text.
    known: FxHashMap<String, usize>,
}

impl Collector<'_> {
    fn function(&mut self, make: impl FnOnce() -> StepFunction, text: &str) -> usize {
        if let Some(&known) = self.known.get(text) {
            return known;
        }
        self.step.functions.push(make());
        let position = self.step.functions.len() - 1;
        self.known.insert(text.to_owned(), position);
        position
    }

    fn place(&self, argument: Argument, scratch: usize) -> Place {
        match argument {
            Argument::Buffer(buffer) => match self.plan.places.get(&buffer) {
                Some(Planned::Input(index)) => Place::Input(*index as usize),
                Some(Planned::Output(index)) => Place::Output(*index as usize),
                Some(Planned::Arena(offset)) => Place::Arena(*offset),
                // A buffer that no kernel makes: it has no elements.
                None => Place::Arena(0),
            },
            Argument::Scalar(index) => Place::Scalar(index as usize),
            Argument::Scratch(offset) => Place::Arena(scratch + offset),
        }
    }
}

/// The calls of a scheduled and planned step.
pub fn calls<K>(step: &Step<'_, K>, codes: &[KernelCode]) -> Emitted<StepCalls> {
    let Step { graph, schedule, .. } = *step;
    let guards = guards(graph, step);
    let mut collector = Collector {
        plan: step.plan,
        step: StepCalls::default(),
        known: FxHashMap::default(),
    };
    let mut externs = 0..;
    let mut names = Vec::new();
    for (number, (kernel, code)) in schedule.kernels.iter().zip(codes).enumerate() {
        let part = FileGroup::of(graph, kernel);
        let kind = kernel.kind_name(graph);
        names.push(match &code.calls[..] {
            [Call::Kernel { .. }, ..] => template_name(graph, kernel).to_owned(),
            _ => kind.to_owned(),
        });
        for call in &code.calls {
            let scratch = step.plan.scratch[number];
            let task = |text: &str, arguments: usize| StepFunction {
                kind: kind.to_owned(),
                part,
                text: text.to_owned(),
                helpers: Vec::new(),
                convention: Convention::Task(arguments),
            };
            let call = match call {
                Call::Task(launch) if launch.n == 0 => continue,
                Call::Task(launch) => {
                    let arguments = launch.arguments.len();
                    let function = collector.function(|| task(&launch.text, arguments), &launch.text);
                    let places = launch.arguments.iter();
                    StepCall::Task {
                        kernel: number,
                        function,
                        n: launch.n,
                        grain: if launch.parallel { launch.grain } else { 0 },
                        places: places.map(|&it| collector.place(it, scratch)).collect(),
                    }
                }
                Call::Together(all) => {
                    let tensors = || all.tensors.iter().filter(|(_, elements)| *elements > 0);
                    let Some((first, _)) = tensors().next() else {
                        continue;
                    };
                    let function = collector.function(|| task(&all.text, first.len()), &all.text);
                    let mut end = 0;
                    let ends: Vec<i64> = tensors()
                        .map(|(_, elements)| {
                            end += elements;
                            end
                        })
                        .collect();
                    let places = tensors().flat_map(|(arguments, _)| arguments);
                    StepCall::Each {
                        kernel: number,
                        function,
                        grain: if end < SERIAL_POINTS { 0 } else { FLAT_GRAIN },
                        ends,
                        places: places.map(|&it| collector.place(it, scratch)).collect(),
                    }
                }
                Call::Kernel {
                    kernel: template,
                    arguments,
                } => {
                    let make = || StepFunction {
                        kind: template_name(graph, kernel).to_owned(),
                        part,
                        text: template.source.clone(),
                        helpers: template.helpers.clone(),
                        convention: Convention::Kernel(
                            template.params.iter().map(|param| param.ctype.clone()).collect(),
                        ),
                    };
                    let function = collector.function(make, &template.source);
                    let places = arguments.iter().zip(&template.params);
                    StepCall::Kernel {
                        kernel: number,
                        function,
                        places: places.map(|(&it, _)| collector.place(it, scratch)).collect(),
                        workspace: scratch,
                    }
                }
                // Families leave what comes in C to its function, too: their code is written for all shapes.
                Call::Own(OwnCall { arguments, .. }) | Call::Extern { arguments } => StepCall::Extern {
                    kernel: number,
                    index: externs.next().unwrap_or(0),
                    places: arguments.iter().map(|&it| collector.place(it, scratch)).collect(),
                },
            };
            collector.step.calls.push(call);
        }
        let after = guards.get(&number).into_iter().flatten();
        collector.step.calls.extend(after.cloned());
    }
    Emitted {
        code: collector.step,
        names,
    }
}

/// For each kernel after which checks are decided, those.
fn guards<K>(graph: &Graph, step: &Step<'_, K>) -> FxHashMap<usize, Vec<StepCall>> {
    let first = graph.outputs.iter().filter(|output| !output.check).count();
    let mut guards: FxHashMap<usize, Vec<StepCall>> = FxHashMap::default();
    let decided = step.schedule.checks_decided_after(graph);
    for (number, (check, kernel)) in step.checks.iter().zip(decided).enumerate() {
        let least = first + 2 * number;
        let guard = guard(check, number, least, graph.dtype(graph.outputs[least].value));
        guards.entry(kernel).or_default().push(guard);
    }
    guards
}

fn guard(check: &Check, number: usize, least: usize, dtype: DType) -> StepCall {
    StepCall::Guard {
        number,
        dtype,
        least,
        most: least + 1,
        extent: check.extent(),
    }
}
