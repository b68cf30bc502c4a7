//! The thread that moves data between ranks.
//!
//! This thread makes every call of MPI and works on one collective at a time. A collective takes one or two
//! *exchanges*, in each of which this rank sends pieces to the other ranks and receives pieces from them. A
//! heading that describes the collective travels with the pieces of the first exchange, so that the ranks
//! notice a rank that runs another collective, and name it. A rank that is going to compile sends a heading
//! that says so, and the others wait longer for the one that follows.
//!
//! A sum over `n` ranks takes two exchanges. In the first, rank `r` gets the `r`-th block of every rank's
//! elements and adds these up; in the second it sends the sums to all ranks. Each rank sends and receives
//! `2 (n - 1) / n` of the data, which is the least possible. A sum of few bytes takes one exchange instead:
//! each rank sends its elements to all others, and every rank adds up everything. Both ways add in the
//! order of ranks.
//!
//! The engine receives pieces into its own memory and copies them from there: after a collective fails, MPI
//! may still write to the addresses that it was given, and these are then never the caller's.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_graph::{CollectiveKind, DType};
use kiln_profile::Category;

use crate::alive::{self, Process};
use crate::cpus::{self, Cpus};
use crate::error::{END, Error};
use crate::link::is_small;
use crate::mpi::{Failure, Functions, Request};
use crate::sum::sum;

/// A sum of up to this many bytes, times the number of ranks, takes one exchange: a second one costs more
/// than the bytes that it saves.
pub(crate) const ONE_EXCHANGE: usize = 64 << 10;

/// No message is longer: MPI counts in 31 bits.
const LONGEST: usize = 1 << 30;

/// How long the thread sleeps between two looks at MPI while no caller waits for a result.
const NAP: Duration = Duration::from_micros(50);

/// Tags of messages: headings and pieces.
const HEADING: i32 = 1;
const PIECE: i32 = 2;

/// Bytes of a heading.
pub(crate) const HEADING_BYTES: usize = 56;

/// A heading, as bytes.
pub(crate) type Heading = [u8; HEADING_BYTES];

/// In place of a kind in a heading: another rank will be late, its heading follows.
const LATE: u8 = u8::MAX - 1;

/// A task for the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) what: What,
    pub(crate) dtype: DType,
    /// Bytes of the operand.
    pub(crate) bytes: usize,
    /// The learning rate of the step that it is a part of, or zero.
    pub(crate) rate: Rate,
    /// The step that it is a part of.
    pub(crate) step: StepTag,
}

/// A learning rate, bit for bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rate(pub(crate) u64);

/// A compiled step, as far as ranks that run it compare it, in hashes. Zeros stand for no step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTag {
    /// What its ranks exchange, and what they do with it: equal on all ranks.
    pub exchanges: u64,
    /// The shapes of its inputs, which may differ from rank to rank.
    pub shapes: u64,
    /// What it computes: equal on all ranks whose inputs have equal shapes.
    pub computes: u64,
}

/// A kind of task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A collective; whether sums are divided; the root.
    Collective(CollectiveKind, bool, usize),
    /// The next collective may come late: other ranks shall wait patiently for it.
    Late,
    /// Nothing more will come.
    Goodbye,
}

impl Task {
    /// What other ranks are told of it. Those of two ranks that run the same collective [`agree`].
    pub(crate) fn heading(&self, number: u64) -> Heading {
        let (kind, mean, root) = match self.what {
            What::Collective(kind, mean, root) => {
                let kind = CollectiveKind::ALL.iter().position(|&known| known == kind);
                (kind.unwrap_or(0) as u8, mean, root)
            }
            What::Goodbye => (u8::MAX, false, 0),
            What::Late => (LATE, false, 0),
        };
        let dtype = DType::ALL
            .iter()
            .position(|&known| known == self.dtype)
            .unwrap_or(0);
        let mut heading = [0; HEADING_BYTES];
        heading[..8].copy_from_slice(&number.to_le_bytes());
        heading[8..12].copy_from_slice(&[kind, dtype as u8, u8::from(mean), 0]);
        heading[12..16].copy_from_slice(&(root as u32).to_le_bytes());
        heading[16..24].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        heading[24..32].copy_from_slice(&self.rate.0.to_le_bytes());
        heading[32..40].copy_from_slice(&self.step.exchanges.to_le_bytes());
        heading[40..48].copy_from_slice(&self.step.shapes.to_le_bytes());
        heading[48..].copy_from_slice(&self.step.computes.to_le_bytes());
        heading
    }
}

/// Whether two ranks with these headings run the same collective: one of steps that exchange the same, and compute the
/// same if their inputs have equal shapes.
fn agree(one: &Heading, other: &Heading) -> bool {
    one[..40] == other[..40] && (one[40..48] != other[40..48] || one[48..] == other[48..])
}

/// Two ranks that do not [`agree`], where all ranks have these headings; rank `own` is one of them if it can be. All
/// ranks find two or none.
pub(crate) fn disagreeing(headings: &[Heading], own: usize) -> Option<(usize, usize)> {
    if headings.iter().all(|heading| *heading == headings[own]) {
        return None;
    }
    if let Some(other) = headings
        .iter()
        .position(|heading| !agree(heading, &headings[own]))
    {
        return Some((own, other));
    }
    // All exchange the same. Of those with equal shapes each is compared with the first.
    let mut first: HashMap<&[u8], usize> = HashMap::new();
    for (rank, heading) in headings.iter().enumerate() {
        let with = *first.entry(&heading[40..48]).or_insert(rank);
        if !agree(&headings[with], heading) {
            return Some((with, rank));
        }
    }
    None
}

/// A heading in words.
pub(crate) fn words(heading: &Heading) -> String {
    let word = |at: usize| {
        let bytes: [u8; 8] = std::array::from_fn(|i| heading[at + i]);
        u64::from_le_bytes(bytes)
    };
    let (number, bytes) = (word(0), word(16));
    let Some(kind) = CollectiveKind::ALL.get(usize::from(heading[8])) else {
        return format!("{END}, after {number} collectives");
    };
    let dtype = DType::ALL
        .get(usize::from(heading[9]))
        .map_or("?", |dtype| dtype.name());
    let mean = if heading[10] != 0 {
        ", divided by their number"
    } else {
        ""
    };
    let rate = match f64::from_bits(word(24)) {
        0.0 => String::new(),
        rate => format!(", of a step with learning rate {rate}"),
    };
    let step = match [word(32), word(40), word(48)].map(|hash| hash as u32) {
        [0, ..] => String::new(),
        [exchanges, shapes, computes] => {
            format!(", exchange {exchanges:08x} of step {computes:08x} on shapes {shapes:08x}")
        }
    };
    format!("collective {number} ({kind} of {bytes} bytes of {dtype}{mean}{rate}{step})")
}

/// A task, the memory that it works on, and where the thread puts the outcome.
pub(crate) struct Order {
    pub(crate) task: Task,
    /// The operand and the result; they may be the same memory.
    pub(crate) from: *const u8,
    pub(crate) to: *mut u8,
    pub(crate) done: Arc<Done>,
    pub(crate) timeout: Duration,
}

// SAFETY: the caller that gives an order leaves its memory to the engine until the order is done.
unsafe impl Send for Order {}

/// Whether an order was carried out.
#[derive(Default)]
pub(crate) struct Done {
    result: Mutex<Option<Result<(), Error>>>,
    changed: Condvar,
    /// Whether a caller waits: the engine does not sleep then.
    awaited: AtomicBool,
}

impl Done {
    /// Waits for it.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        self.awaited.store(true, Ordering::Relaxed);
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*result {
                return result.clone();
            }
            result = self.changed.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn tell(&self, result: Result<(), Error>) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.changed.notify_all();
    }
}

/// The state of the thread.
pub(crate) struct Engine {
    functions: Box<dyn Functions>,
    rank: usize,
    size: usize,
    /// Number of collectives so far.
    number: u64,
    /// The failure after which the engine refuses all orders.
    broken: Option<Error>,
    /// Memory that pieces are received into, kept from one collective to the next.
    received: Vec<Vec<u8>>,
    /// The headings of the collective under way, the own one among them.
    headings: Vec<Heading>,
    /// What told other ranks that this one is late, and is not known to have arrived.
    late: Vec<(Box<Heading>, Vec<Under>)>,
    /// The process of each rank, once they have told.
    processes: Vec<Process>,
}

/// How long pieces of a rank that has ended may still be on their way.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long ranks wait for each other where one of them may be busy for long: while it compiles, or writes its last
/// checkpoint.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// How often a rank that waits looks whether others have ended.
const LOOK: Duration = Duration::from_millis(250);

/// A piece on its way.
struct Under {
    request: Request,
    peer: usize,
    /// Whether this rank receives it from the peer.
    comes: bool,
}

impl Engine {
    pub(crate) fn new(functions: Box<dyn Functions>, rank: usize, size: usize) -> Self {
        Self {
            functions,
            rank,
            size,
            number: 0,
            broken: None,
            received: vec![Vec::new(); size],
            headings: vec![[0; HEADING_BYTES]; size],
            late: Vec::new(),
            processes: Vec::new(),
        }
    }

    /// Tells the other ranks the own process and the CPUs that it may use, and hears theirs. Returns the CPUs
    /// of all ranks.
    ///
    /// # Errors
    /// As a collective. The engine is of no use then.
    pub(crate) fn introduce(mut self, cpus: &Cpus, timeout: Duration) -> Result<(Self, Vec<Cpus>), Error> {
        const BYTES: usize = alive::BYTES + cpus::BYTES;
        let mut own = [0; BYTES];
        own[..alive::BYTES].copy_from_slice(&Process::own().told());
        own[alive::BYTES..].copy_from_slice(&cpus.told());
        let mut all = vec![[0; BYTES]; self.size];
        let order = Order {
            task: Task {
                what: What::Collective(CollectiveKind::AllGather, false, 0),
                dtype: DType::U8,
                bytes: own.len(),
                rate: Rate::default(),
                step: StepTag::default(),
            },
            from: own.as_ptr(),
            to: all.as_flattened_mut().as_mut_ptr(),
            done: Arc::default(),
            timeout,
        };
        if let Err(error) = self.carry_out(&order) {
            self.leave_memory();
            // MPI may read it still.
            std::mem::forget(Box::new(own));
            return Err(error);
        }
        let mut cpus = Vec::with_capacity(self.size);
        for told in &all {
            if let (Some(process), Some(own)) = (told.first_chunk(), told.last_chunk()) {
                self.processes.push(Process::heard(process));
                cpus.push(Cpus::heard(own));
            }
        }
        // The program's collectives are counted from its first one.
        self.number = 0;
        Ok((self, cpus))
    }

    /// Leaves behind what MPI may still have the addresses of.
    fn leave_memory(mut self) {
        std::mem::forget(std::mem::take(&mut self.received));
        std::mem::forget(std::mem::take(&mut self.late));
        std::mem::forget(self);
    }

    /// Carries out orders until there are none to come.
    pub(crate) fn run(mut self, orders: &Receiver<Order>) {
        loop {
            let order = match orders.try_recv() {
                Ok(order) => order,
                Err(TryRecvError::Empty) => match orders.recv() {
                    Ok(order) => order,
                    Err(RecvError) => break,
                },
                Err(TryRecvError::Disconnected) => break,
            };
            let result = match &self.broken {
                Some(error) => Err(Error::Broken(error.to_string())),
                None => catch_unwind(AssertUnwindSafe(|| self.carry_out(&order)))
                    .unwrap_or_else(|_| Err(Error::Broken("the thread that connects them panicked".into()))),
            };
            if let (Err(error), None) = (&result, &self.broken) {
                self.broken = Some(error.clone());
            }
            let is_last = order.task.what == What::Goodbye;
            if is_last && result.is_ok() {
                // Whatever MPI did not say of it, it has arrived.
                std::mem::forget(std::mem::take(&mut self.late));
                self.functions.finalize();
            }
            order.done.tell(result);
            if is_last {
                break;
            }
        }
        if self.broken.is_some() {
            self.leave_memory();
        }
    }

    fn carry_out(&mut self, order: &Order) -> Result<(), Error> {
        self.headings[self.rank] = order.task.heading(self.number);
        if order.task.what == What::Late {
            return self.tell_late();
        }
        self.number += 1;
        let What::Collective(kind, mean, root) = order.task.what else {
            let none = vec![0..0; self.size];
            return self.exchange(order, &[], &none, &none, true);
        };
        let bytes = order.task.bytes;
        let _span = kiln_profile::span_with(Category::Ranks, || {
            format!("{kind} of {} kB", bytes.div_ceil(1000)).into()
        });
        // SAFETY: the order's memory is the engine's until the order is done; the slice is gone before `to`
        // is written.
        let operand = || unsafe { std::slice::from_raw_parts(order.from, bytes) };
        match kind {
            CollectiveKind::AllReduce if is_small(bytes, self.size) => {
                let all = vec![0..bytes; self.size];
                self.exchange(order, operand(), &all, &all, true)?;
                self.add(order, 0..bytes, mean, 0);
            }
            CollectiveKind::AllReduce => {
                let blocks = blocks(bytes, order.task.dtype.size(), self.size);
                let own = blocks[self.rank].clone();
                self.exchange(order, operand(), &blocks, &vec![own.clone(); self.size], true)?;
                self.add(order, own.clone(), mean, own.start);
                // SAFETY: as above; the sums were written just now.
                let sums = unsafe { std::slice::from_raw_parts(order.to, bytes) };
                self.exchange(order, sums, &vec![own; self.size], &blocks, false)?;
                self.store(order, &blocks);
            }
            CollectiveKind::ReduceScatter => {
                let blocks = even(bytes / self.size, self.size);
                let own = blocks[self.rank].clone();
                self.exchange(order, operand(), &blocks, &vec![own.clone(); self.size], true)?;
                self.add(order, own, mean, 0);
            }
            CollectiveKind::AllGather => {
                let blocks = even(bytes, self.size);
                self.exchange(order, operand(), &vec![0..bytes; self.size], &blocks, true)?;
                let own = blocks[self.rank].start;
                // SAFETY: the result has `bytes` for each rank. Operand and result may overlap.
                unsafe { std::ptr::copy(order.from, order.to.add(own), bytes) };
                self.store(order, &blocks);
            }
            CollectiveKind::FromRoot => {
                let mut from = vec![0..0; self.size];
                let mut to = vec![0..0; self.size];
                match self.rank == root {
                    true => from.fill(0..bytes),
                    false => to[root] = 0..bytes,
                }
                self.exchange(order, operand(), &from, &to, true)?;
                match self.rank == root {
                    // SAFETY: operand and result are equally large, and may be the same.
                    true => unsafe { std::ptr::copy(order.from, order.to, bytes) },
                    false => self.store(order, &to),
                }
            }
        }
        Ok(())
    }

    /// Adds up the pieces received from every rank, and the operand's bytes `own`, and writes the sums into
    /// the result from byte `at` on.
    fn add(&mut self, order: &Order, own: std::ops::Range<usize>, mean: bool, at: usize) {
        // The own piece goes where the others are: the result may be the operand's memory.
        let mut mine = std::mem::take(&mut self.received[self.rank]);
        mine.clear();
        // SAFETY: `own` is a range of the operand.
        mine.extend_from_slice(unsafe { std::slice::from_raw_parts(order.from.add(own.start), own.len()) });
        self.received[self.rank] = mine;
        let pieces: Vec<&[u8]> = self.received.iter().map(|piece| &piece[..own.len()]).collect();
        // SAFETY: the result has room for the block, and nobody else looks at it.
        let out = unsafe { std::slice::from_raw_parts_mut(order.to.add(at), own.len()) };
        sum(order.task.dtype, &pieces, mean, out);
    }

    /// Copies the pieces received from other ranks to their places in the result.
    fn store(&self, order: &Order, places: &[std::ops::Range<usize>]) {
        for (peer, place) in places.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            let piece = &self.received[peer][..place.len()];
            // SAFETY: the place is one of the result; the piece is the engine's own memory.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), order.to.add(place.start), piece.len()) };
        }
    }

    /// Sends the ranges `to` of `operand`, one to each rank, and receives as many bytes from each rank as
    /// `from` has, with headings if it is the first exchange of a collective.
    fn exchange(
        &mut self,
        order: &Order,
        operand: &[u8],
        to: &[std::ops::Range<usize>],
        from: &[std::ops::Range<usize>],
        is_first: bool,
    ) -> Result<(), Error> {
        let peers: Vec<usize> = (0..self.size).filter(|&peer| peer != self.rank).collect();
        let mut under = Vec::with_capacity(4 * peers.len());
        if is_first {
            for &peer in &peers {
                // SAFETY: headings are the engine's, and are kept if it breaks.
                let (sent, received) = unsafe {
                    let own = &self.headings[self.rank];
                    let own = std::slice::from_raw_parts(own.as_ptr(), own.len());
                    (
                        self.functions.send(peer, HEADING, own),
                        self.receive_heading(peer),
                    )
                };
                under.push(self.begun(sent, peer, false)?);
                under.push(received?);
            }
        }
        let mut pieces = Vec::with_capacity(2 * peers.len());
        for &peer in &peers {
            for piece in operand[to[peer].clone()].chunks(LONGEST) {
                // SAFETY: the operand is the engine's until the order is done. A failure ends the order,
                // too, and the engine makes no more calls after it.
                let sent = unsafe { self.functions.send(peer, PIECE, piece) };
                pieces.push(self.begun(sent, peer, false)?);
            }
        }
        if is_first {
            self.complete(order, under, order.timeout)?;
            self.wait_for_late(order, &peers)?;
            self.drop_arrived()?;
            if let Some((rank, other)) = disagreeing(&self.headings, self.rank) {
                return Err(Error::Differs {
                    rank,
                    other,
                    own: words(&self.headings[rank]),
                    theirs: words(&self.headings[other]),
                });
            }
        }
        for &peer in &peers {
            let length = from[peer].len();
            let mut room = std::mem::take(&mut self.received[peer]);
            room.resize(length.max(room.len()), 0);
            for piece in room[..length].chunks_mut(LONGEST) {
                // SAFETY: the engine keeps the room, also if it breaks.
                let received = unsafe { self.functions.receive(peer, PIECE, piece) };
                match self.begun(received, peer, true) {
                    Ok(begun) => pieces.push(begun),
                    Err(error) => {
                        std::mem::forget(room);
                        return Err(error);
                    }
                }
            }
            self.received[peer] = room;
        }
        self.complete(order, pieces, order.timeout)
    }

    /// Begins to receive the heading of a rank.
    fn receive_heading(&mut self, peer: usize) -> Result<Under, Error> {
        let heading = &mut self.headings[peer];
        // SAFETY: headings are the engine's, and are kept if it breaks.
        let received = unsafe {
            let heading = std::slice::from_raw_parts_mut(heading.as_mut_ptr(), heading.len());
            self.functions.receive(peer, HEADING, heading)
        };
        self.begun(received, peer, true)
    }

    /// Tells all other ranks that this one will be late for its next collective. Nobody answers.
    fn tell_late(&mut self) -> Result<(), Error> {
        self.drop_arrived()?;
        let heading = Box::new(self.headings[self.rank]);
        let mut under = Vec::with_capacity(self.size - 1);
        for peer in (0..self.size).filter(|&peer| peer != self.rank) {
            // SAFETY: the heading is kept until it was sent, or the engine has broken.
            let sent = unsafe {
                let heading = std::slice::from_raw_parts(heading.as_ptr(), heading.len());
                self.functions.send(peer, HEADING, heading)
            };
            under.push(self.begun(sent, peer, false)?);
        }
        self.late.push((heading, under));
        Ok(())
    }

    /// Forgets what told other ranks that this one is late, and was sent.
    fn drop_arrived(&mut self) -> Result<(), Error> {
        let mut late = std::mem::take(&mut self.late);
        let mut failed = None;
        for (_, under) in &mut late {
            under.retain_mut(|one| match self.functions.is_done(&mut one.request) {
                Ok(done) => !done,
                Err(failure) => {
                    failed.get_or_insert((failure, one.peer));
                    true
                }
            });
        }
        late.retain(|(_, under)| !under.is_empty());
        self.late = late;
        match failed {
            None => Ok(()),
            Some((failure, peer)) => Err(self.failed(failure, peer)),
        }
    }

    /// Waits for the headings of ranks that have told that they are late.
    fn wait_for_late(&mut self, order: &Order, peers: &[usize]) -> Result<(), Error> {
        loop {
            let late: Vec<usize> = peers
                .iter()
                .copied()
                .filter(|&peer| self.headings[peer][8] == LATE)
                .collect();
            if late.is_empty() {
                return Ok(());
            }
            let mut under = Vec::with_capacity(late.len());
            for peer in late {
                under.push(self.receive_heading(peer)?);
            }
            self.complete(order, under, order.timeout.max(PATIENCE))?;
        }
    }

    fn begun(&self, request: Result<Request, Failure>, peer: usize, comes: bool) -> Result<Under, Error> {
        let request = request.map_err(|failure| self.failed(failure, peer))?;
        Ok(Under { request, peer, comes })
    }

    fn failed(&self, (function, code): Failure, peer: usize) -> Error {
        let meaning = self.functions.describe(code);
        Error::Mpi {
            rank: self.rank,
            function,
            code,
            about: format!(
                " ({meaning}) at {}, with rank {peer}",
                words(&self.headings[self.rank])
            ),
        }
    }

    /// Waits until everything has arrived.
    fn complete(&self, order: &Order, mut under: Vec<Under>, timeout: Duration) -> Result<(), Error> {
        let begun = Instant::now();
        let (mut looks, mut next_look, mut ended_since) = (0u32, LOOK, None);
        loop {
            let mut index = 0;
            while index < under.len() {
                let one = &mut under[index];
                let peer = one.peer;
                let done = self.functions.is_done(&mut one.request);
                match done.map_err(|failure| self.failed(failure, peer))? {
                    true => drop(under.swap_remove(index)),
                    false => index += 1,
                }
            }
            if under.is_empty() {
                return Ok(());
            }
            let waited = begun.elapsed();
            if waited >= next_look {
                next_look = waited + LOOK;
                let missing = self.ended(&under);
                match ended_since {
                    _ if missing.is_empty() => ended_since = None,
                    None => ended_since = Some(waited),
                    Some(since) if waited - since < LAST_WORDS => {}
                    Some(_) => {
                        let (rank, what) = (self.rank, words(&self.headings[self.rank]));
                        return Err(Error::Gone { rank, missing, what });
                    }
                }
            }
            if waited >= timeout {
                // A piece that a rank does not send says more than one that it does not fetch.
                let comes = under.iter().any(|one| one.comes);
                let missing = under.iter().filter(|one| one.comes || !comes);
                let mut missing: Vec<usize> = missing.map(|one| one.peer).collect();
                missing.sort_unstable();
                missing.dedup();
                return Err(Error::Timeout {
                    rank: self.rank,
                    missing,
                    waited: timeout,
                    what: words(&self.headings[self.rank]),
                });
            }
            looks = looks.saturating_add(1);
            match order.done.awaited.load(Ordering::Relaxed) && begun.elapsed() < Duration::from_secs(1) {
                // Other ranks may need the core.
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
    }
}

impl Engine {
    /// The ranks among those that something is under way with whose processes have ended.
    fn ended(&self, under: &[Under]) -> Vec<usize> {
        let Some(&own) = self.processes.get(self.rank) else {
            return Vec::new();
        };
        let mut peers: Vec<usize> = under.iter().map(|one| one.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|&peer| self.processes[peer].has_ended(own));
        peers
    }
}

/// The ranges of bytes that each rank adds up: whole elements, as equal as can be.
fn blocks(bytes: usize, size: usize, ranks: usize) -> Vec<std::ops::Range<usize>> {
    let elements = bytes / size.max(1);
    let at = |rank: usize| (elements as u128 * rank as u128 / ranks as u128) as usize * size;
    (0..ranks).map(|rank| at(rank)..at(rank + 1)).collect()
}

/// Blocks of `bytes` each.
fn even(bytes: usize, ranks: usize) -> Vec<std::ops::Range<usize>> {
    (0..ranks).map(|rank| rank * bytes..(rank + 1) * bytes).collect()
}
