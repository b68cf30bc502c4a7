//! The step: its functions, each once and under a name, and the calls of its kernels in order.

use kiln_compiler::Check;
use kiln_compiler::plan::{Place, Plan};
use kiln_compiler::schedule::{Buffer, Kernel, KernelKind};
use kiln_compiler::{Emitted, Step};
use kiln_graph::{Graph, Node, Op};
use rustc_hash::{FxHashMap, FxHashSet};

use super::after::{self, Candidate, Role};
use super::beside::{self, Entry, Placed, Range, Small, Space};
use super::stages::Stages;
use super::{Argument, Call, KernelCode, Launch, ProductCall};
use crate::code::{Across, Address, CallKind, Function, FunctionText, Pointer, StepCall, StepCode};
use crate::products::alignment;

/// Puts the calls of a scheduled and planned graph together, for a device of so many multiprocessors.
pub fn emit(step: &Step<'_, KernelCode>, processors: u32) -> Emitted<StepCode> {
    let Step {
        graph,
        schedule,
        plan,
        ..
    } = *step;
    let guards = schedule.checks_decided_after(graph);
    let mut writer = Writer {
        graph,
        plan,
        kernels: &schedule.kernels,
        codes: step.kernels,
        has_guards: !guards.is_empty(),
        functions: Functions::default(),
        calls: Vec::new(),
        stages: Stages::default(),
        externs: 0,
        names: vec![None; schedule.kernels.len()],
        behind: Vec::new(),
    };
    let numbers = 0..schedule.kernels.len();
    let mut entries: Vec<Entry<'_>> = numbers
        .clone()
        .map(|number| writer.entry(number, guards.contains(&number), processors))
        .collect();
    let candidates: Vec<_> = numbers.map(|number| writer.candidate(number)).collect();
    writer.behind = after::partners(&mut entries, &candidates);
    let mut emitted = 0;
    for group in beside::groups(&entries) {
        writer
            .stages
            .begin(group.iter().flatten().map(|&number| &entries[number]));
        match &group[..] {
            [lane] if lane.len() == 1 => writer.alone(lane[0]),
            lanes => writer.beside(lanes),
        }
        let behind = |&&number: &&usize| writer.behind[number].is_some();
        emitted += group.iter().map(Vec::len).sum::<usize>();
        emitted += group.iter().flatten().filter(behind).count();
        // Nothing waits behind a kernel that decides a check: all up to it are emitted by now.
        for (check, looked) in step.checks.iter().enumerate() {
            if guards[check] + 1 == emitted {
                writer.stages.begin_barrier();
                writer.guard(check as u32, looked, emitted - 1);
            }
        }
    }
    let bytes = |values: &mut dyn Iterator<Item = kiln_graph::Value>| -> Vec<usize> {
        values.map(|value| graph.ty(value).bytes()).collect()
    };
    let names = writer.names.into_iter().zip(&schedule.kernels);
    let names = names.map(|(name, kernel)| name.unwrap_or_else(|| kernel.kind_name(graph).to_owned()));
    let names = names.collect();
    let code = StepCode {
        functions: writer.functions.list,
        calls: writer.calls,
        orders: writer.stages.orders,
        arena_bytes: plan.arena_bytes,
        inputs: bytes(&mut graph.parameters().iter().copied()),
        outputs: bytes(&mut graph.outputs.iter().map(|output| output.value)),
        scalars: graph.scalars().len(),
    };
    Emitted { code, names }
}

/// The first kernel of a step with index checks that is a collective into memory that the step was given: NCCL
/// does not look whether the step was stopped.
pub fn unguarded(step: &Step<'_, KernelCode>) -> Option<Node> {
    let Step {
        graph,
        schedule,
        plan,
        ..
    } = *step;
    if schedule.checks_decided_after(graph).is_empty() {
        return None;
    }
    let overwrites = |buffer: &Buffer| match plan.places.get(buffer) {
        Some(Place::Output(output)) => plan.aliases[*output as usize].is_some(),
        Some(Place::Input(_)) => true,
        _ => false,
    };
    schedule.kernels.iter().find_map(|kernel| match kernel.kind {
        KernelKind::Library(node)
            if matches!(graph.node(node).op, Op::Collective(_)) && kernel.writes.iter().any(overwrites) =>
        {
            Some(node)
        }
        _ => None,
    })
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
    graph: &'a Graph,
    plan: &'a Plan,
    kernels: &'a [Kernel],
    codes: &'a [KernelCode],
    /// Whether the step looks at indices.
    has_guards: bool,
    functions: Functions,
    calls: Vec<StepCall>,
    stages: Stages,
    /// Operations outside, so far.
    externs: u32,
    /// The first function of each kernel.
    names: Vec<Option<String>>,
    /// The kernels that others run behind themselves.
    behind: Vec<Option<usize>>,
}

impl<'a> Writer<'a> {
    fn call(&mut self, kernel: usize, kind: CallKind) {
        self.calls.push(StepCall {
            kernel: kernel as u32,
            stage: self.stages.number(),
            kind,
        });
    }

    /// What the place of kernel `number` among the others depends on. `decides` says whether a guard follows it.
    fn entry(&self, number: usize, decides: bool, processors: u32) -> Entry<'a> {
        let (kernel, code) = (&self.kernels[number], &self.codes[number]);
        let ranges =
            |buffers: &[Buffer]| -> Vec<Range> { buffers.iter().filter_map(|&it| self.range(it)).collect() };
        let mut writes = ranges(&kernel.stored());
        let start = self.plan.scratch[number];
        let scratch = Range {
            space: Space::Arena,
            start,
            end: start + code.scratch,
        };
        writes.push(scratch);
        let is_product = |call: &Call| matches!(call, Call::Product(_));
        // A library's side may copy matrices to working memory, which a graph does not replace.
        let is_alone = |call: &Call| match call {
            Call::Either(library, _, Some(_)) => library.iter().all(is_product),
            call => is_product(call),
        };
        let workspace = code.calls.iter().all(is_alone).then_some(scratch);
        let small = match &code.calls[..] {
            [Call::Launch(launch)] => {
                let blocks = launch.grid.iter().fold(1, |all: u32, &it| all.saturating_mul(it));
                let is_table = |argument: &Argument| matches!(argument, Argument::Table(_));
                let fits = blocks <= processors
                    && launch.shared_bytes == 0
                    && !launch.arguments.iter().any(is_table)
                    && beside::is_plain(&launch.text);
                fits.then_some(Small {
                    text: &launch.text,
                    pointers: launch.arguments.len(),
                    blocks,
                })
            }
            _ => None,
        };
        let outside = code.calls.iter().any(|call| matches!(call, Call::Extern(_)));
        let is_across = |call: &Call| matches!(call, Call::Across(..) | Call::Wait(..));
        Entry {
            reads: ranges(&kernel.reads),
            writes,
            workspace,
            small,
            barrier: decides || outside,
            across: code.calls.iter().any(is_across),
            taken: false,
        }
    }

    /// What kernel `number` may be to the one behind it, or before it; none if its last call is no launch.
    fn candidate(&self, number: usize) -> Option<Candidate<'a>> {
        let (code, start) = (&self.codes[number], self.plan.scratch[number]);
        let (Call::Launch(last), before) = code.calls.split_last()? else {
            return None;
        };
        let written = last.arguments.iter().filter_map(|argument| match argument {
            Argument::Buffer(buffer) if matches!(last.role, Role::Sums(_)) => self.range(*buffer),
            _ => None,
        });
        Some(Candidate {
            last,
            has_more: !before.is_empty(),
            results: written.collect(),
            scratch: Range {
                space: Space::Arena,
                start,
                end: start + code.scratch,
            },
        })
    }

    /// The bytes of a buffer; none if it has none.
    fn range(&self, buffer: Buffer) -> Option<Range> {
        let (space, start) = match *self.plan.places.get(&buffer)? {
            Place::Input(index) => (Space::Input(index), 0),
            Place::Output(index) => match self.plan.aliases[index as usize] {
                Some(input) => (Space::Input(input), 0),
                None => (Space::Output(index), 0),
            },
            Place::Arena(offset) => (Space::Arena, offset),
        };
        let end = start + buffer.bytes(self.graph);
        Some(Range { space, start, end })
    }

    /// The calls of kernel `number`.
    fn alone(&mut self, number: usize) {
        let (kernel, codes) = (&self.kernels[number], self.codes);
        let kind = kernel.kind_name(self.graph);
        let (mut externs, mut name) = (self.externs.., None);
        let (calls, behind) = match self.behind[number] {
            None => (&codes[number].calls[..], None),
            Some(behind) => {
                let (last, before) = last_launch(&codes[number]);
                (before, Some((last, behind)))
            }
        };
        for call in calls {
            let mut frame = Frame {
                kind,
                overwrites: self.guarded(kernel),
                scratch: self.plan.scratch[number],
                externs: &mut externs,
                name: &mut name,
            };
            if let Call::Wait(_, places) = call
                && self.is_in_place(places, &mut frame)
            {
                continue;
            }
            let kind = self.kind(call, &mut frame);
            self.call(number, kind);
        }
        self.externs = externs.start;
        if let Some((sums, behind)) = behind {
            let launch = after::together(sums, last_launch(&codes[behind]).0);
            let guarded = self.guarded(kernel) || self.guarded(&self.kernels[behind]);
            let function = self.functions.number(kind, &launch.text, guarded);
            let own = &self.functions.list[function].name;
            name.get_or_insert_with(|| own.clone());
            self.names[behind] = Some(own.clone());
            self.call(number, self.launch(function, &launch, self.plan.scratch[number]));
        }
        self.names[number] = name;
    }

    /// Whether a wait works in place, and needs no call. It has a number like the operations outside.
    fn is_in_place(&self, [from, to]: &[Argument; 2], frame: &mut Frame<'_>) -> bool {
        let is_same = address(self.plan, from, 0) == address(self.plan, to, 0);
        if is_same {
            frame.externs.next();
        }
        is_same
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
                product(self.plan, call, [None; 3], scratch)
            }
            Call::Padded(padded) => {
                let call = &padded.call;
                let name = format!("product {}", call.product);
                // After the product, not after the copies around it.
                *frame.name = Some(name);
                product(self.plan, call, padded.copies, scratch)
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
            Call::Either(library, own, trial) => {
                let mut name = None;
                // A convolution's name is the library's.
                let is_convolution = |call: &Call| matches!(call, Call::Either(..) | Call::Convolution(_));
                if let Some(trial) = trial.as_ref().filter(|_| !library.iter().any(is_convolution)) {
                    frame
                        .name
                        .get_or_insert_with(|| format!("product {}", trial.product));
                }
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
                    trial: trial.clone(),
                }
            }
            Call::Across(across, [operand, result]) => {
                // The contract counts collectives among the operations outside.
                frame.externs.next();
                frame.name.get_or_insert_with(|| {
                    format!("NCCL {} of {} {}", across.kind, across.elements, across.dtype)
                });
                CallKind::Across {
                    across: Across::clone(across),
                    operand: address(self.plan, operand, scratch),
                    result: address(self.plan, result, scratch),
                }
            }
            Call::Wait(launch, _) => {
                frame.externs.next();
                self.kind(&Call::Launch(Launch::clone(launch)), frame)
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

    /// One launch for small kernels, in lanes.
    fn beside(&mut self, lanes: &[Vec<usize>]) {
        let codes = self.codes;
        let placed = |&number: &usize| match &codes[number].calls[..] {
            [Call::Launch(launch)] => Some(Placed {
                text: &launch.text,
                guarded: self.guarded(&self.kernels[number]),
                grid: launch.grid,
                arguments: self.pointers(launch, self.plan.scratch[number]),
            }),
            _ => None,
        };
        let placed: Vec<Vec<Placed<'_>>> = lanes
            .iter()
            .map(|lane| lane.iter().filter_map(placed).collect())
            .collect();
        let (text, grid, arguments) = beside::together(&placed);
        let first = lanes[0][0];
        let guarded = placed.iter().flatten().any(|placed| placed.guarded);
        let function = self.functions.number("beside", &text, guarded);
        let name = &self.functions.list[function].name;
        for &number in lanes.iter().flatten() {
            self.names[number] = Some(name.clone());
        }
        let launch = CallKind::Launch {
            function,
            grid,
            shared_bytes: 0,
            arguments,
        };
        self.call(first, launch);
    }

    /// The guard of check `check`, behind kernel `number`.
    fn guard(&mut self, check: u32, looked: &Check, number: usize) {
        let own_outputs = self.graph.outputs.iter().filter(|output| !output.check);
        let output = own_outputs.count() as u32 + 2 * check;
        let extreme = |output: u32| {
            let value = self.graph.outputs[output as usize].value;
            let own = self.plan.places.get(&Buffer::Output(output));
            match own.or_else(|| self.plan.places.get(&Buffer::Value(value))) {
                Some(&found) => placed(found, 0),
                None => Address::Output(output, 0),
            }
        };
        let guard = CallKind::Guard {
            check,
            dtype: looked.dtype.clone(),
            extent: looked.extent() as u64,
            least: extreme(output),
            most: extreme(output + 1),
        };
        self.call(number, guard);
    }

    /// Whether the kernel does nothing once an index was out of range.
    fn guarded(&self, kernel: &Kernel) -> bool {
        self.has_guards && self.overwrites(kernel)
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
        CallKind::Launch {
            function,
            grid: launch.grid,
            shared_bytes: launch.shared_bytes,
            arguments: self.pointers(launch, scratch),
        }
    }

    fn pointers(&self, launch: &Launch, scratch: usize) -> Vec<Pointer> {
        let one = |argument: &Argument| address(self.plan, argument, scratch);
        let arguments = launch.arguments.iter().map(|argument| match argument {
            Argument::Table(rows) => Pointer::Table(
                rows.iter()
                    .map(|(arguments, numbers)| (arguments.iter().map(one).collect(), numbers.clone()))
                    .collect(),
            ),
            Argument::Copied(at, copied) => Pointer::Copied(one(at), *copied),
            argument => Pointer::To(one(argument)),
        });
        arguments.collect()
    }
}

/// The launch at the end of a kernel that is another one's partner, and the calls in front of it.
fn last_launch(code: &KernelCode) -> (&Launch, &[Call]) {
    match code.calls.split_last() {
        Some((Call::Launch(launch), before)) => (launch, before),
        _ => unreachable!("partners end in a launch"),
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

/// A product's call. `copies` are matrices in working memory, which begins at byte `scratch` of the arena.
fn product(plan: &Plan, call: &ProductCall, copies: [Option<usize>; 3], scratch: usize) -> CallKind {
    let at = |matrix: usize, (buffer, bytes): (Buffer, usize)| match copies[matrix] {
        Some(offset) => Address::Arena(scratch + offset),
        None => place(plan, buffer, bytes),
    };
    let [left, right, result] = [at(0, call.left), at(1, call.right), at(2, call.result)];
    let alignments = [left, right, result].map(|address| alignment(address.bytes()));
    CallKind::Product {
        product: Box::new(call.product.clone().with_alignments(alignments)),
        left,
        right,
        result,
        workspace: (Address::Arena(scratch), call.workspace),
    }
}

fn address(plan: &Plan, argument: &Argument, scratch: usize) -> Address {
    match argument {
        Argument::Buffer(buffer) => place(plan, *buffer, 0),
        Argument::Part(buffer, at) => place(plan, *buffer, *at),
        Argument::Scalar(index) => Address::Scalar(*index),
        Argument::Scratch(offset) => Address::Arena(scratch + offset),
        Argument::Table(_) => unreachable!("tables hold addresses, not tables"),
        Argument::Copied(..) => unreachable!("tensors of the copy engine are arguments of launches alone"),
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
