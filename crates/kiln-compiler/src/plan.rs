//! Memory: where every buffer lives.
//!
//! Arguments and outputs live with the caller. Everything else gets an offset in one arena. A buffer is alive
//! from the kernel that first writes it to the last that touches it; the scratch memory of a kernel is alive
//! during that kernel. Buffers alive at the same time must not overlap.
//!
//! Two reuses come before offsets are chosen. An output that the graph allows to take an argument's memory
//! takes it if its kernel is the argument's last reader and may overwrite the argument
//! ([`crate::schedule::inplace`]), and if all indices have been checked by then ([`crate::checks`]). And a
//! buffer that dies at the kernel that makes another buffer of the same size hands its memory over under
//! the same condition.
//!
//! A result that is made in its part of a larger buffer ([`crate::schedule::parts`]) has no memory of its
//! own.
//!
//! Where a target may run small kernels in another order, small buffers ([`Policy::kept_buffer`]) keep
//! their memory for the whole step.
//!
//! Offsets: largest buffer first, each at the lowest offset where it fits among those already placed that
//! overlap it in time. Finding the optimum is a bin packing problem; this order is within a few per cent of
//! the lower bound (the most bytes alive at once), which the plan also reports. The step allocates exactly
//! what the plan says. [`verify`] checks a finished plan.

mod pieces;
pub mod verify;

use std::fmt::Write as _;

use rustc_hash::FxHashMap;

use kiln_graph::{Graph, Op, Value};

use crate::policy::Policy;
use crate::schedule::{Buffer, KernelKind, Schedule};

/// Where a buffer lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// Tensor argument number `.0`.
    Input(u32),
    /// Output number `.0`.
    Output(u32),
    /// At byte `.0` of the arena.
    Arena(usize),
}

/// The memory of a step.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Where each buffer lives.
    pub places: FxHashMap<Buffer, Place>,
    /// Where the scratch memory of each kernel lives: byte offset in the arena.
    pub scratch: Vec<usize>,
    /// Size of the arena in bytes: the planned peak of everything that is neither argument nor output.
    pub arena_bytes: usize,
    /// Most bytes alive at once, which no plan can go below.
    pub lower_bound: usize,
    /// For each output, the argument whose memory it takes over.
    pub aliases: Vec<Option<u32>>,
}

/// When a piece of memory is in use: from kernel number `first` to kernel number `last`.
#[derive(Clone, Copy)]
struct Lifetime {
    bytes: usize,
    first: usize,
    last: usize,
}

/// Plans the memory of `schedule`. `scratch[k]` is the size of kernel `k`'s working memory.
pub fn plan(graph: &Graph, schedule: &Schedule, scratch: &[usize], policy: &Policy) -> Plan {
    let lifetimes = lifetimes(graph, schedule);
    let mut plan = at_the_caller(graph, schedule, &lifetimes);
    let roots = handed_on(graph, schedule, &lifetimes, &plan, policy);
    let mut joined: FxHashMap<Buffer, Lifetime> = FxHashMap::default();
    for (buffer, root) in &roots {
        let own = lifetimes[buffer];
        let whole = joined.entry(*root).or_insert(lifetimes[root]);
        whole.last = whole.last.max(own.last);
        if own.bytes <= policy.kept_buffer {
            (whole.first, whole.last) = (0, schedule.kernels.len() - 1);
        }
    }
    let mut items: Vec<(Option<Buffer>, Lifetime)> =
        joined.into_iter().map(|(b, life)| (Some(b), life)).collect();
    for (number, &bytes) in scratch.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
        let life = Lifetime {
            bytes,
            first: number,
            last: number,
        };
        items.push((None, life));
    }
    for (_, life) in &mut items {
        life.bytes = life.bytes.next_multiple_of(policy.alignment);
    }
    plan.lower_bound = most_alive(&items, schedule.kernels.len());
    plan.scratch = vec![0; schedule.kernels.len()];
    let mut offsets: FxHashMap<Buffer, usize> = FxHashMap::default();
    for (buffer, life, offset) in offsets_of(items) {
        plan.arena_bytes = plan.arena_bytes.max(offset + life.bytes);
        match buffer {
            Some(buffer) => {
                offsets.insert(buffer, offset);
            }
            None => plan.scratch[life.first] = offset,
        }
    }
    for (buffer, root) in roots {
        plan.places.insert(buffer, Place::Arena(offsets[&root]));
    }
    for part in schedule.kernels.iter().filter_map(|kernel| kernel.part) {
        let at = part.start * graph.dtype(part.value).size();
        if let Some(&Place::Arena(offset)) = plan.places.get(&Buffer::Value(part.of)) {
            plan.places
                .insert(Buffer::Value(part.value), Place::Arena(offset + at));
        }
    }
    plan
}

/// From which kernel to which every buffer is in use.
fn lifetimes(graph: &Graph, schedule: &Schedule) -> FxHashMap<Buffer, Lifetime> {
    let mut lifetimes: FxHashMap<Buffer, Lifetime> = FxHashMap::default();
    for (number, kernel) in schedule.kernels.iter().enumerate() {
        for &buffer in kernel.writes.iter().chain(&kernel.reads) {
            let life = lifetimes.entry(buffer).or_insert(Lifetime {
                bytes: buffer.bytes(graph),
                first: number,
                last: number,
            });
            life.last = number;
        }
    }
    lifetimes
}

/// The plan of the buffers that live with the caller: arguments, outputs, and the outputs that take over
/// arguments.
fn at_the_caller(graph: &Graph, schedule: &Schedule, lifetimes: &FxHashMap<Buffer, Lifetime>) -> Plan {
    let mut plan = Plan {
        aliases: vec![None; graph.outputs.len()],
        ..Plan::default()
    };
    for &value in graph.parameters() {
        if let Op::Parameter { index, .. } = graph.def(value).op {
            plan.places.insert(Buffer::Value(value), Place::Input(index));
        }
    }
    let looked = schedule.checks_decided_after(graph).into_iter().max();
    for (number, output) in graph.outputs.iter().enumerate() {
        let number = number as u32;
        let copy = Buffer::Output(number);
        let buffer = if lifetimes.contains_key(&copy) {
            copy
        } else {
            Buffer::Value(output.value)
        };
        plan.places.entry(buffer).or_insert(Place::Output(number));
        if let Some(argument) = output.alias
            && may_alias(graph, schedule, lifetimes, buffer, argument)
            && looked.is_none_or(|looked| {
                lifetimes.get(&buffer).is_some_and(|own| own.first > looked)
                    && !is_of_contraction(graph, schedule, buffer)
            })
        {
            plan.aliases[number as usize] = Some(argument);
        }
    }
    plan
}

/// The buffers of the arena, each with the first buffer of the chain that hands its memory on to it
/// (itself, if no buffer does). `plan` has the buffers that live elsewhere.
fn handed_on(
    graph: &Graph,
    schedule: &Schedule,
    lifetimes: &FxHashMap<Buffer, Lifetime>,
    plan: &Plan,
    policy: &Policy,
) -> FxHashMap<Buffer, Buffer> {
    let mut roots: FxHashMap<Buffer, Buffer> = FxHashMap::default();
    for (number, kernel) in schedule.kernels.iter().enumerate() {
        let mut taken: Vec<Value> = Vec::new();
        for &buffer in &kernel.writes {
            if plan.places.contains_key(&buffer) || lifetimes[&buffer].first != number {
                continue;
            }
            let kept = lifetimes[&buffer].bytes <= policy.kept_buffer;
            let giver = kernel.overwritable(graph, buffer).into_iter().find(|&value| {
                let dying = Buffer::Value(value);
                !kept
                    && !taken.contains(&value)
                    && !plan.places.contains_key(&dying)
                    && lifetimes[&dying].last == number
            });
            let root = match giver {
                Some(value) => {
                    taken.push(value);
                    roots[&Buffer::Value(value)]
                }
                None => buffer,
            };
            roots.insert(buffer, root);
        }
    }
    roots
}

/// The offset of each piece of memory in the arena, the largest first.
fn offsets_of(mut items: Vec<(Option<Buffer>, Lifetime)>) -> Vec<(Option<Buffer>, Lifetime, usize)> {
    items.sort_by_key(|(buffer, life)| (std::cmp::Reverse(life.bytes), life.first, *buffer));
    // By offset.
    let mut placed: Vec<(usize, Lifetime)> = Vec::new();
    let place = |(buffer, life): (Option<Buffer>, Lifetime)| {
        let mut offset = 0;
        for (start, other) in &placed {
            if other.last < life.first || other.first > life.last {
                continue;
            }
            if *start >= offset + life.bytes {
                break;
            }
            offset = offset.max(start + other.bytes);
        }
        let at = placed.partition_point(|(start, _)| *start <= offset);
        placed.insert(at, (offset, life));
        (buffer, life, offset)
    };
    items.into_iter().map(place).collect()
}

/// The most bytes that are in use at once.
fn most_alive(items: &[(Option<Buffer>, Lifetime)], kernels: usize) -> usize {
    let mut change = vec![0i64; kernels + 1];
    for (_, life) in items {
        change[life.first] += life.bytes as i64;
        change[life.last + 1] -= life.bytes as i64;
    }
    let mut alive = 0;
    let mut most = 0;
    for step in change {
        alive += step;
        most = most.max(alive);
    }
    most as usize
}

/// Whether a contraction writes `buffer`: a library that computes it does not look whether a check has
/// stopped the step, so that what it writes must not be an argument.
fn is_of_contraction(graph: &Graph, schedule: &Schedule, buffer: Buffer) -> bool {
    schedule.kernels.iter().any(|kernel| match kernel.kind {
        KernelKind::Library(node) | KernelKind::Contraction(node, _) => {
            let op = &graph.node(node).op;
            kernel.writes.contains(&buffer) && op.is_contraction()
        }
        _ => false,
    })
}

/// Whether the kernel that writes `buffer` may write into the memory of `argument`.
fn may_alias(
    graph: &Graph,
    schedule: &Schedule,
    lifetimes: &FxHashMap<Buffer, Lifetime>,
    buffer: Buffer,
    argument: u32,
) -> bool {
    let argument = graph.parameters()[argument as usize];
    let Some(own) = lifetimes.get(&buffer) else {
        return false;
    };
    let mut writers = schedule
        .kernels
        .iter()
        .enumerate()
        .filter(|(_, kernel)| kernel.writes.contains(&buffer));
    let (Some((number, kernel)), None) = (writers.next(), writers.next()) else {
        return false;
    };
    let Some(theirs) = lifetimes.get(&Buffer::Value(argument)) else {
        // Nobody reads the argument.
        return graph.ty(argument).bytes() == own.bytes;
    };
    if theirs.last < number {
        return theirs.bytes == own.bytes;
    }
    theirs.last == number && kernel.overwritable(graph, buffer).contains(&argument)
}

impl Plan {
    /// The plan as text: the arena, then one line for each buffer.
    pub fn to_text(&self, graph: &Graph) -> String {
        let mut text = format!(
            "arena {} bytes (lower bound {})\n",
            self.arena_bytes, self.lower_bound
        );
        let mut lines: Vec<(Buffer, Place)> = self.places.iter().map(|(b, p)| (*b, *p)).collect();
        lines.sort_unstable_by_key(|(buffer, _)| *buffer);
        for (buffer, place) in lines {
            let what = match buffer {
                Buffer::Value(value) => format!("{value} {}", graph.ty(value)),
                Buffer::Output(output) => format!("copy for output {output}"),
            };
            let place = match place {
                Place::Input(index) => format!("argument {index}"),
                Place::Output(index) => format!("output {index}"),
                Place::Arena(offset) => format!("arena + {offset}"),
            };
            let _ = writeln!(text, "{place}: {what}");
        }
        for (output, argument) in self.aliases.iter().enumerate() {
            if let Some(argument) = argument {
                let _ = writeln!(text, "output {output} takes over argument {argument}");
            }
        }
        text
    }
}
