//! The step: its functions, each once and under a name, and the calls of its kernels in order.

use kiln_compiler::plan::{Place, Plan};
use kiln_compiler::schedule::{Buffer, Kernel, KernelKind};
use kiln_compiler::{Emitted, Step};
use kiln_graph::{Graph, Node, Op};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Argument, Call, KernelCode, Launch};
use crate::code::{Address, CallKind, Function, FunctionText, Pointer, StepCall, StepCode};

/// Puts the calls of a scheduled and planned graph together.
pub fn emit(step: &Step<'_, KernelCode>) -> Emitted<StepCode> {
    let Step {
        graph,
        schedule,
        plan,
        ..
    } = *step;
    let mut writer = Writer {
        plan,
        functions: Functions::default(),
        calls: Vec::new(),
    };
    let first_check = graph.outputs.iter().filter(|output| !output.check).count() as u32;
    let guards = schedule.checks_decided_after(graph);
    let mut externs = 0..;
    let mut names = Vec::new();
    for (number, (kernel, code)) in schedule.kernels.iter().zip(step.kernels).enumerate() {
        let overwrites = writer.overwrites(kernel) && !guards.is_empty();
        let kind = kind_name(graph, kernel);
        let scratch = plan.scratch[number];
        let mut own_name = None;
        for call in &code.calls {
            let kind = writer.kind(
                call,
                &mut Frame {
                    kind: &kind,
                    overwrites,
                    scratch,
                    externs: &mut externs,
                    name: &mut own_name,
                },
            );
            writer.call(number, kind);
        }
        names.push(own_name.unwrap_or(kind));
        let checks = step.checks.iter().zip(&guards).enumerate();
        for (check, (looked, _)) in checks.filter(|(_, (_, after))| **after == number) {
            let output = first_check + 2 * check as u32;
            let extreme = |output: u32| {
                let value = graph.outputs[output as usize].value;
                let own = plan.places.get(&Buffer::Output(output));
                match own.or_else(|| plan.places.get(&Buffer::Value(value))) {
                    Some(&found) => placed(found, 0),
                    None => Address::Output(output, 0),
                }
            };
            writer.call(
                number,
                CallKind::Guard {
                    check: check as u32,
                    dtype: looked.dtype.clone(),
                    extent: looked.extent() as u64,
                    least: extreme(output),
                    most: extreme(output + 1),
                },
            );
        }
    }
    let bytes = |values: &mut dyn Iterator<Item = kiln_graph::Value>| -> Vec<usize> {
        values.map(|value| graph.ty(value).bytes()).collect()
    };
    let code = StepCode {
        functions: writer.functions.list,
        calls: writer.calls,
        arena_bytes: plan.arena_bytes,
        inputs: bytes(&mut graph.parameters().iter().copied()),
        outputs: bytes(&mut graph.outputs.iter().map(|output| output.value)),
        scalars: graph.scalars().len(),
    };
    Emitted { code, names }
}

/// What the calls of one kernel share.
struct Frame<'a> {
    /// What the kernel is, in a word.
    kind: &'a str,
    overwrites: bool,
    /// Where its working memory begins.
    scratch: usize,
    /// Numbers for the operations that run outside.
    externs: &'a mut std::ops::RangeFrom<u32>,
    /// What people call the kernel: after its main call, or after its first.
    name: &'a mut Option<String>,
}

struct Writer<'a> {
    plan: &'a Plan,
    functions: Functions,
    calls: Vec<StepCall>,
}

impl Writer<'_> {
    fn call(&mut self, kernel: usize, kind: CallKind) {
        self.calls.push(StepCall {
            kernel: kernel as u32,
            kind,
        });
    }

    /// A call at the planned addresses.
    fn kind(&mut self, call: &Call, frame: &mut Frame<'_>) -> CallKind {
        let scratch = frame.scratch;
        match call {
            Call::Launch(launch) => {
                let function = self.functions.number(frame.kind, &launch.text, frame.overwrites);
                let name = &self.functions.list[function].name;
                frame.name.get_or_insert_with(|| name.clone());
                self.launch(function, launch, scratch)
            }
            Call::Product(call) => {
                frame
                    .name
                    .get_or_insert_with(|| format!("product {}", call.product));
                let at = |(buffer, bytes): (Buffer, usize)| place(self.plan, buffer, bytes);
                CallKind::Product {
                    product: Box::new(call.product.clone()),
                    left: at(call.left),
                    right: at(call.right),
                    result: at(call.result),
                    workspace: (Address::Arena(scratch), call.workspace),
                }
            }
            Call::Convolution(call) => {
                *frame.name = Some(format!("cuDNN {}", call.convolution));
                let at = |(argument, bytes): &(Argument, usize)| match argument {
                    Argument::Buffer(buffer) => place(self.plan, *buffer, *bytes),
                    Argument::Scratch(offset) => Address::Arena(scratch + offset + bytes),
                    other => address(self.plan, other, scratch),
                };
                let (offset, bytes) = call.workspace;
                CallKind::Convolution {
                    convolution: Box::new(call.convolution.clone()),
                    tensors: [0, 1, 2].map(|tensor: usize| at(&call.tensors[tensor])),
                    workspace: (Address::Arena(scratch + offset), bytes),
                }
            }
            Call::Either(library, own) => {
                let mut name = None;
                let mut side = |calls: &[Call], name: &mut Option<String>| -> Vec<CallKind> {
                    let mut inner = Frame {
                        kind: frame.kind,
                        overwrites: frame.overwrites,
                        scratch,
                        externs: &mut *frame.externs,
                        name,
                    };
                    calls.iter().map(|call| self.kind(call, &mut inner)).collect()
                };
                CallKind::Either {
                    library: side(library, frame.name),
                    own: side(own, &mut name),
                }
            }
            Call::Extern(arguments) => {
                let index = frame.externs.next().unwrap_or(0);
                frame.name.get_or_insert_with(|| format!("extern_{index}"));
                let places = arguments
                    .iter()
                    .map(|argument| address(self.plan, argument, scratch));
                CallKind::Extern(index, places.collect())
            }
        }
    }

    /// Whether the kernel writes into memory that the step was given.
    fn overwrites(&self, kernel: &Kernel) -> bool {
        kernel
            .writes
            .iter()
            .any(|buffer| match self.plan.places.get(buffer) {
                Some(Place::Output(output)) => self.plan.aliases[*output as usize].is_some(),
                Some(Place::Input(_)) => true,
                _ => false,
            })
    }

    fn launch(&self, function: usize, launch: &Launch, scratch: usize) -> CallKind {
        let one = |argument: &Argument| address(self.plan, argument, scratch);
        let arguments = launch.arguments.iter().map(|argument| match argument {
            Argument::Table(rows) => Pointer::Table(
                rows.iter()
                    .map(|(arguments, numbers)| (arguments.iter().map(one).collect(), numbers.clone()))
                    .collect(),
            ),
            argument => Pointer::To(one(argument)),
        });
        CallKind::Launch {
            function,
            grid: launch.grid,
            shared_bytes: launch.shared_bytes,
            arguments: arguments.collect(),
        }
    }
}

/// Functions by their text.
#[derive(Default)]
struct Functions {
    list: Vec<Function>,
    known: FxHashMap<(FunctionText, bool), usize>,
    names: FxHashSet<String>,
}

impl Functions {
    fn number(&mut self, kind: &str, text: &FunctionText, guarded: bool) -> usize {
        let key = (text.clone(), guarded);
        if let Some(&number) = self.known.get(&key) {
            return number;
        }
        let number = self.list.len();
        let mut name = format!("{kind}_{number}");
        while !self.names.insert(name.clone()) {
            name.push('_');
        }
        self.list.push(Function {
            name,
            text: key.0.clone(),
            guarded,
        });
        self.known.insert(key, number);
        number
    }
}

fn is_cast(graph: &Graph, node: Node) -> bool {
    matches!(graph.node(node).op, Op::Cast(_))
}

/// Names of functions say what kind of kernel they are.
fn kind_name(graph: &Graph, kernel: &Kernel) -> String {
    match &kernel.kind {
        KernelKind::Nest(nest) if nest.split.is_some() => "rows".into(),
        KernelKind::Nest(nest) if nest.members.is_empty() => "copy".into(),
        KernelKind::Nest(_) => "points".into(),
        KernelKind::Together(_) if kernel.nodes.iter().all(|&node| is_cast(graph, node)) => "casts".into(),
        KernelKind::Together(_) => "updates".into(),
        KernelKind::Library(node) | KernelKind::Contraction(node, _) => match &graph.node(*node).op {
            Op::Extern(_) => "extern".into(),
            op => op.name().into(),
        },
    }
}

fn address(plan: &Plan, argument: &Argument, scratch: usize) -> Address {
    match argument {
        Argument::Buffer(buffer) => place(plan, *buffer, 0),
        Argument::Scalar(index) => Address::Scalar(*index),
        Argument::Scratch(offset) => Address::Arena(scratch + offset),
        Argument::Table(_) => unreachable!("tables hold addresses, not tables"),
    }
}

fn place(plan: &Plan, buffer: Buffer, bytes: usize) -> Address {
    match plan.places.get(&buffer) {
        Some(&found) => placed(found, bytes),
        // A buffer that no kernel makes: it has no elements.
        None => Address::Arena(0),
    }
}

fn placed(place: Place, bytes: usize) -> Address {
    match place {
        Place::Input(index) => Address::Input(index, bytes),
        Place::Output(index) => Address::Output(index, bytes),
        Place::Arena(offset) => Address::Arena(offset + bytes),
    }
}
