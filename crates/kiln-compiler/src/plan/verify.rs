//! Verification of a finished plan, from its result alone.
//!
//! The verifier knows the kernels, what each reads, writes and stores where, and the plan. It knows nothing
//! of how the plan was made. Memory is a set of spaces: the arena, each argument, and each output that
//! takes over no argument; an output that takes one over is in the argument's space. A buffer *lives* from
//! the kernel that first writes it to the last that touches it, an argument from before the first kernel,
//! an output to after the last.
//!
//! What must hold:
//!
//! - everything that a kernel touches has a place, inside its space and aligned;
//! - nothing is read before it is complete, and every output is made;
//! - the pieces of a buffer that is written in pieces (a concatenation) are apart and fill it;
//! - two buffers share bytes only while one of them does not live. At the kernel where one dies and the
//!   other is made, one memory may be handed on, if that kernel reads each element before, or at, the point
//!   where it writes its place ([`super::super::schedule::inplace`]);
//! - an output takes over an argument only where the graph allows it, at equal size, each argument once,
//!   and after every index was checked.

use rustc_hash::FxHashMap;

use kiln_graph::{Graph, Op};

use super::pieces::{Piece, whole};
use super::{Place, Plan};
use crate::index::Index;
use crate::schedule::kernel::Part;
use crate::schedule::{Buffer, Schedule};

/// A fault of a plan: a bug of the compiler. No kernel of such a step runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanFault {
    /// A buffer that a kernel touches has no place.
    #[error("kernel {kernel} touches {buffer}, which has no place")]
    Unplaced {
        /// The buffer.
        buffer: String,
        /// The kernel.
        kernel: usize,
    },
    /// A buffer or scratch memory ends behind its space, or does not begin at a multiple of the alignment.
    #[error(
        "{what} is at byte {offset} for {bytes} bytes, in {space} of {size} bytes aligned to {alignment}"
    )]
    Outside {
        /// A buffer, or a kernel's scratch memory.
        what: String,
        /// Where it begins.
        offset: usize,
        /// Its size.
        bytes: usize,
        /// The space.
        space: String,
        /// The size of the space.
        size: usize,
        /// What offsets are multiples of.
        alignment: usize,
    },
    /// A kernel reads a buffer before all kernels that write it have run.
    #[error("kernel {reader} reads {buffer}, which kernel {writer} writes later")]
    ReadEarly {
        /// The buffer.
        buffer: String,
        /// The kernel that reads.
        reader: usize,
        /// The kernel that writes later.
        writer: usize,
    },
    /// A kernel reads a buffer that no kernel writes.
    #[error("kernel {reader} reads {buffer}, which nothing writes")]
    NeverWritten {
        /// The buffer.
        buffer: String,
        /// The kernel that reads.
        reader: usize,
    },
    /// No kernel makes an output where the caller looks for it.
    #[error("nothing is written to the memory of output {output}")]
    OutputNotMade {
        /// Number of the output.
        output: usize,
    },
    /// A kernel writes into an argument.
    #[error("kernel {kernel} writes {buffer}, which is argument {argument}")]
    WritesArgument {
        /// The buffer.
        buffer: String,
        /// The kernel that writes.
        kernel: usize,
        /// The argument.
        argument: u32,
    },
    /// The pieces of a buffer overlap, or leave something out.
    #[error("the pieces of {buffer} hold {stored} of its {elements} elements{overlap}")]
    Pieces {
        /// The buffer.
        buffer: String,
        /// Elements that all pieces have together.
        stored: i64,
        /// Elements of the buffer.
        elements: i64,
        /// ` and overlap`, or nothing.
        overlap: &'static str,
    },
    /// A kernel's result is not where its part of a buffer is.
    #[error("{part} is not at element {start} of {buffer}")]
    Part {
        /// The result.
        part: String,
        /// The buffer.
        buffer: String,
        /// The first element of the part.
        start: usize,
    },
    /// Two things share bytes while both live.
    #[error(
        "{one} (kernels {one_first} to {one_last}) and {other} ({other_first} to {other_last}) share bytes of {space}"
    )]
    Shared {
        /// The one.
        one: String,
        /// Its first kernel.
        one_first: usize,
        /// Its last.
        one_last: usize,
        /// The other.
        other: String,
        /// Its first kernel.
        other_first: usize,
        /// Its last.
        other_last: usize,
        /// Where.
        space: String,
    },
    /// Memory is handed on by a kernel that still needs it.
    #[error(
        "kernel {kernel} writes {to} into the memory of {from}, of which it may still read other elements"
    )]
    HandedOn {
        /// Whose memory it was.
        from: String,
        /// Whose it becomes.
        to: String,
        /// The kernel.
        kernel: usize,
    },
    /// An output takes over an argument that it must not.
    #[error("output {output} takes over argument {argument}: {why}")]
    TakenOver {
        /// Number of the output.
        output: usize,
        /// Number of the argument.
        argument: u32,
        /// What forbids it.
        why: &'static str,
    },
}

/// Checks `plan`; `scratch` are the sizes of the kernels' working memory, and offsets are multiples of
/// `alignment`.
///
/// # Errors
/// The first fault that is found.
pub fn verify(
    graph: &Graph,
    schedule: &Schedule,
    plan: &Plan,
    scratch: &[usize],
    alignment: usize,
) -> Result<(), PlanFault> {
    let verifier = Verifier {
        graph,
        schedule,
        plan,
        lives: lives(graph, schedule),
    };
    verifier.reads_and_writes()?;
    verifier.outputs()?;
    verifier.pieces()?;
    verifier.taken_over()?;
    verifier.memory(scratch, alignment)
}

/// The kernels that touch a buffer. Kernels count from one here, so that an argument can live before the
/// first.
#[derive(Clone, Copy)]
struct Life {
    first_write: Option<usize>,
    last_write: usize,
    last: usize,
}

fn lives(graph: &Graph, schedule: &Schedule) -> FxHashMap<Buffer, Life> {
    let mut lives: FxHashMap<Buffer, Life> = FxHashMap::default();
    for (kernel, number) in schedule.kernels.iter().zip(1..) {
        for (buffers, writes) in [(&kernel.reads, false), (&kernel.writes, true)] {
            for &buffer in buffers.iter().filter(|buffer| buffer.bytes(graph) > 0) {
                let life = lives.entry(buffer).or_insert(Life {
                    first_write: None,
                    last_write: 0,
                    last: number,
                });
                life.last = number;
                if writes {
                    life.first_write.get_or_insert(number);
                    life.last_write = number;
                }
            }
        }
    }
    lives
}

/// Memory that is one block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Space {
    Arena,
    Argument(u32),
    Output(u32),
}

impl Space {
    fn text(self) -> String {
        match self {
            Self::Arena => "the arena".to_owned(),
            Self::Argument(number) => format!("argument {number}"),
            Self::Output(number) => format!("output {number}"),
        }
    }
}

/// Bytes in use over some kernels.
struct Tenant {
    space: Space,
    offset: usize,
    bytes: usize,
    first: usize,
    last: usize,
    /// None for a kernel's scratch memory.
    buffer: Option<Buffer>,
}

impl Tenant {
    fn text(&self) -> String {
        self.buffer.map_or_else(
            || format!("the scratch memory of kernel {}", self.first - 1),
            name,
        )
    }
}

fn name(buffer: Buffer) -> String {
    match buffer {
        Buffer::Value(value) => value.to_string(),
        Buffer::Output(output) => format!("the copy for output {output}"),
    }
}

struct Verifier<'a> {
    graph: &'a Graph,
    schedule: &'a Schedule,
    plan: &'a Plan,
    lives: FxHashMap<Buffer, Life>,
}

impl Verifier<'_> {
    fn is_parameter(&self, buffer: Buffer) -> bool {
        matches!(buffer, Buffer::Value(value) if matches!(self.graph.def(value).op, Op::Parameter { .. }))
    }

    fn reads_and_writes(&self) -> Result<(), PlanFault> {
        for (kernel, number) in self.schedule.kernels.iter().zip(1..) {
            if let Some(part) = kernel.part {
                self.is_placed(part)?;
            }
            for &buffer in kernel.reads.iter().chain(&kernel.writes) {
                if buffer.bytes(self.graph) > 0 && !self.plan.places.contains_key(&buffer) {
                    return Err(PlanFault::Unplaced {
                        buffer: name(buffer),
                        kernel: number - 1,
                    });
                }
            }
            for &buffer in &kernel.writes {
                if let Some(&Place::Input(argument)) = self.plan.places.get(&buffer) {
                    return Err(PlanFault::WritesArgument {
                        buffer: name(buffer),
                        kernel: number - 1,
                        argument,
                    });
                }
            }
            for &buffer in &kernel.reads {
                let Some(life) = self.lives.get(&buffer).filter(|_| !self.is_parameter(buffer)) else {
                    continue;
                };
                if life.first_write.is_none() {
                    return Err(PlanFault::NeverWritten {
                        buffer: name(buffer),
                        reader: number - 1,
                    });
                }
                if life.last_write >= number {
                    return Err(PlanFault::ReadEarly {
                        buffer: name(buffer),
                        reader: number - 1,
                        writer: life.last_write - 1,
                    });
                }
            }
        }
        Ok(())
    }

    /// A part is in the memory of its buffer, which is what the kernel writes.
    fn is_placed(&self, part: Part) -> Result<(), PlanFault> {
        let place = |value| self.plan.places.get(&Buffer::Value(value));
        let size = self.graph.dtype(part.value).size();
        match (place(part.of), place(part.value)) {
            (Some(Place::Arena(whole)), Some(Place::Arena(own))) if *own == whole + part.start * size => {
                Ok(())
            }
            _ => Err(PlanFault::Part {
                part: part.value.to_string(),
                buffer: part.of.to_string(),
                start: part.start,
            }),
        }
    }

    /// The buffer in which output `number` is made.
    fn buffer_of(&self, number: usize) -> Buffer {
        let copy = Buffer::Output(number as u32);
        match self.lives.contains_key(&copy) {
            true => copy,
            false => Buffer::Value(self.graph.outputs[number].value),
        }
    }

    fn outputs(&self) -> Result<(), PlanFault> {
        for (number, output) in self.graph.outputs.iter().enumerate() {
            let buffer = self.buffer_of(number);
            let here = self.plan.places.get(&buffer) == Some(&Place::Output(number as u32));
            let made = self
                .lives
                .get(&buffer)
                .is_some_and(|life| life.first_write.is_some());
            if self.graph.ty(output.value).bytes() > 0 && !(here && made) {
                return Err(PlanFault::OutputNotMade { output: number });
            }
        }
        Ok(())
    }

    /// The positions that are stored to in a buffer that loop nests write, or kernels that make a part of it.
    fn stores(&self) -> FxHashMap<Buffer, Vec<Index>> {
        let mut stores: FxHashMap<Buffer, Vec<Index>> = FxHashMap::default();
        for kernel in &self.schedule.kernels {
            for store in kernel.nests().iter().flat_map(|nest| &nest.stores) {
                let positions = stores.entry(store.buffer).or_default();
                positions.push(store.position.clone());
            }
            if let Some(part) = kernel.part {
                let elements = self.graph.ty(part.value).numel() as i64;
                let positions = stores.entry(Buffer::Value(part.of)).or_default();
                positions.push(Index::var(0, elements).shift(part.start as i64));
            }
        }
        stores
    }

    fn pieces(&self) -> Result<(), PlanFault> {
        // Many buffers of a step are stored to in the same way.
        let mut known: FxHashMap<(Index, i64), i64> = FxHashMap::default();
        for (buffer, stores) in self.stores() {
            let value = buffer.value(self.graph);
            let mut shape: Vec<usize> = self.graph.shape(value).to_vec();
            // A copy for the caller is row-major.
            if let (Buffer::Value(_), Some(order)) = (buffer, self.schedule.layouts.get(&value)) {
                shape = order.iter().map(|&axis| shape[axis]).collect();
            }
            let elements = shape.iter().product::<usize>() as i64;
            let (stored, overlap) = match stores[..] {
                [ref position] => {
                    let stored = known.entry((position.clone(), elements));
                    let stored = stored.or_insert_with(|| whole(position, elements).unwrap_or(0));
                    (*stored, false)
                }
                _ => {
                    let boxes: Option<Vec<Piece>> = stores
                        .iter()
                        .map(|position| Piece::new(position, &shape))
                        .collect();
                    let boxes = boxes.unwrap_or_default();
                    let mut rest = boxes.iter();
                    let mut overlap = false;
                    while let Some(one) = rest.next() {
                        overlap |= rest.clone().any(|other| one.overlaps(other));
                    }
                    (boxes.iter().map(Piece::elements).sum(), overlap)
                }
            };
            if stored != elements || overlap {
                return Err(PlanFault::Pieces {
                    buffer: name(buffer),
                    stored,
                    elements,
                    overlap: if overlap { " and overlap" } else { "" },
                });
            }
        }
        Ok(())
    }

    fn taken_over(&self) -> Result<(), PlanFault> {
        let looked = self.schedule.checks_decided_after(self.graph).into_iter().max();
        let mut taken: Vec<u32> = Vec::new();
        for (number, alias) in self.plan.aliases.iter().enumerate() {
            let Some(argument) = *alias else { continue };
            let fault = |why| {
                Err(PlanFault::TakenOver {
                    output: number,
                    argument,
                    why,
                })
            };
            let (buffer, parameter) = (self.buffer_of(number), self.graph.parameters()[argument as usize]);
            if self.graph.outputs[number].alias != Some(argument) {
                return fault("the graph does not allow it");
            }
            if taken.contains(&argument) {
                return fault("another output does so too");
            }
            taken.push(argument);
            if buffer.bytes(self.graph) != self.graph.ty(parameter).bytes() {
                return fault("their sizes differ");
            }
            let written = self.lives.get(&buffer).and_then(|life| life.first_write);
            if let (Some(looked), Some(written)) = (looked, written)
                && written <= looked + 1
            {
                return fault("an index is looked at later");
            }
        }
        Ok(())
    }

    /// Where a buffer is.
    fn tenant(&self, buffer: Buffer, life: Life) -> Option<Tenant> {
        let end = self.schedule.kernels.len() + 1;
        let (space, offset) = match *self.plan.places.get(&buffer)? {
            Place::Arena(offset) => (Space::Arena, offset),
            Place::Input(argument) => (Space::Argument(argument), 0),
            Place::Output(output) => match self.plan.aliases[output as usize] {
                Some(argument) => (Space::Argument(argument), 0),
                None => (Space::Output(output), 0),
            },
        };
        let is_output = matches!(self.plan.places.get(&buffer), Some(Place::Output(_)));
        Some(Tenant {
            space,
            offset,
            bytes: buffer.bytes(self.graph),
            first: life.first_write.unwrap_or(0),
            last: if is_output { end } else { life.last },
            buffer: Some(buffer),
        })
    }

    fn memory(&self, scratch: &[usize], alignment: usize) -> Result<(), PlanFault> {
        let mut tenants: Vec<Tenant> = Vec::new();
        for (&buffer, &life) in &self.lives {
            tenants.extend(self.tenant(buffer, life));
        }
        for ((number, &bytes), &offset) in (1..).zip(scratch).zip(&self.plan.scratch) {
            tenants.push(Tenant {
                space: Space::Arena,
                offset,
                bytes,
                first: number,
                last: number,
                buffer: None,
            });
        }
        tenants.retain(|tenant| tenant.bytes > 0);
        tenants.sort_unstable_by_key(|tenant| (tenant.space, tenant.offset, tenant.first, tenant.buffer));
        for tenant in &tenants {
            let size = match tenant.space {
                Space::Arena => self.plan.arena_bytes,
                Space::Argument(number) => {
                    let parameter = self.graph.parameters()[number as usize];
                    self.graph.ty(parameter).bytes()
                }
                Space::Output(number) => Buffer::Output(number).bytes(self.graph),
            };
            if tenant.offset + tenant.bytes > size || !tenant.offset.is_multiple_of(alignment) {
                return Err(PlanFault::Outside {
                    what: tenant.text(),
                    offset: tenant.offset,
                    bytes: tenant.bytes,
                    space: tenant.space.text(),
                    size,
                    alignment,
                });
            }
        }
        for (number, one) in tenants.iter().enumerate() {
            let behind = tenants[number + 1..].iter();
            let sharing =
                behind.take_while(|other| other.space == one.space && other.offset < one.offset + one.bytes);
            sharing.into_iter().try_for_each(|other| self.share(one, other))?;
        }
        Ok(())
    }

    /// Whether two tenants may have bytes in common.
    fn share(&self, one: &Tenant, other: &Tenant) -> Result<(), PlanFault> {
        let (older, newer) = match one.first <= other.first {
            true => (one, other),
            false => (other, one),
        };
        if older.last < newer.first {
            return Ok(());
        }
        let same = older.offset == newer.offset && older.bytes == newer.bytes;
        if let (Some(from), Some(to)) = (older.buffer, newer.buffer)
            && same
            && older.last == newer.first
            && older.first < newer.first
        {
            let kernel = newer.first - 1;
            let may = self.schedule.kernels[kernel].overwritable(self.graph, to);
            return match from {
                Buffer::Value(value) if may.contains(&value) => Ok(()),
                _ => Err(PlanFault::HandedOn {
                    from: name(from),
                    to: name(to),
                    kernel,
                }),
            };
        }
        Err(PlanFault::Shared {
            one: older.text(),
            one_first: older.first.saturating_sub(1),
            one_last: older.last - 1,
            other: newer.text(),
            other_first: newer.first - 1,
            other_last: newer.last - 1,
            space: older.space.text(),
        })
    }
}
