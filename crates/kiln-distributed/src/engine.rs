//! The thread that moves data between ranks.
//!
//! This thread makes every call of MPI and works on one collective at a time. A collective takes one or two
//! *exchanges*, in each of which this rank sends pieces to the other ranks and receives pieces from them. A
//! heading that describes the collective travels with the pieces of the first exchange, so that the ranks
//! notice a rank that runs another collective, and name it.
//!
//! A sum over `n` ranks takes two exchanges. In the first, rank `r` gets the `r`-th block of every rank's
//! elements and adds these up; in the second it sends the sums to all ranks. Each rank sends and receives
//! `2 (n - 1) / n` of the data, which is the least possible. A sum of few bytes takes one exchange instead:
//! each rank sends its elements to all others, and every rank adds up everything. Both ways add in the
//! order of ranks.
//!
//! The engine receives pieces into its own memory and copies them from there: after a collective fails, MPI
//! may still write to the addresses that it was given, and these are then never the caller's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_graph::{CollectiveKind, DType};
use kiln_profile::Category;

use crate::error::Error;
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
pub(crate) const HEADING_BYTES: usize = 24;

/// A task for the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) what: What,
    pub(crate) dtype: DType,
    /// Bytes of the operand.
    pub(crate) bytes: usize,
}

/// A kind of task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A collective; whether sums are divided; the root.
    Collective(CollectiveKind, bool, usize),
    /// Nothing more will come.
    Goodbye,
}

impl Task {
    /// Bytes that are equal on two ranks if these run the same collective.
    pub(crate) fn heading(&self, number: u64) -> [u8; HEADING_BYTES] {
        let (kind, mean, root) = match self.what {
            What::Collective(kind, mean, root) => {
                let kind = CollectiveKind::ALL.iter().position(|&known| known == kind);
                (kind.unwrap_or(0) as u8, mean, root)
            }
            What::Goodbye => (u8::MAX, false, 0),
        };
        let dtype = DType::ALL
            .iter()
            .position(|&known| known == self.dtype)
            .unwrap_or(0);
        let mut heading = [0; HEADING_BYTES];
        heading[..8].copy_from_slice(&number.to_le_bytes());
        heading[8..12].copy_from_slice(&[kind, dtype as u8, u8::from(mean), 0]);
        heading[12..16].copy_from_slice(&(root as u32).to_le_bytes());
        heading[16..].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        heading
    }
}

/// A heading in words.
pub(crate) fn words(heading: &[u8; HEADING_BYTES]) -> String {
    let word = |at: usize| {
        let bytes: [u8; 8] = std::array::from_fn(|i| heading[at + i]);
        u64::from_le_bytes(bytes)
    };
    let (number, bytes) = (word(0), word(16));
    let Some(kind) = CollectiveKind::ALL.get(usize::from(heading[8])) else {
        return format!("its end, after {number} collectives");
    };
    let dtype = DType::ALL
        .get(usize::from(heading[9]))
        .map_or("?", |dtype| dtype.name());
    let mean = if heading[10] != 0 {
        ", divided by their number"
    } else {
        ""
    };
    format!("collective {number} ({kind} of {bytes} bytes of {dtype}{mean})")
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
    /// The heading of the collective under way.
    own: [u8; HEADING_BYTES],
    headings: Vec<[u8; HEADING_BYTES]>,
}

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
            own: [0; HEADING_BYTES],
            headings: vec![[0; HEADING_BYTES]; size],
        }
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
                self.functions.finalize();
            }
            order.done.tell(result);
            if is_last {
                break;
            }
        }
        if self.broken.is_some() {
            // MPI may still have the addresses.
            std::mem::forget(std::mem::take(&mut self.received));
            std::mem::forget(self);
        }
    }

    fn carry_out(&mut self, order: &Order) -> Result<(), Error> {
        self.own = order.task.heading(self.number);
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
                    let own = std::slice::from_raw_parts(self.own.as_ptr(), self.own.len());
                    let heading = &mut self.headings[peer];
                    let heading = std::slice::from_raw_parts_mut(heading.as_mut_ptr(), heading.len());
                    (
                        self.functions.send(peer, HEADING, own),
                        self.functions.receive(peer, HEADING, heading),
                    )
                };
                under.push(self.begun(sent, peer, false)?);
                under.push(self.begun(received, peer, true)?);
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
            self.complete(order, under)?;
            if let Some(&other) = peers.iter().find(|&&peer| self.headings[peer] != self.own) {
                return Err(Error::Differs {
                    rank: self.rank,
                    other,
                    own: words(&self.own),
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
        self.complete(order, pieces)
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
            about: format!(" ({meaning}) at {}, with rank {peer}", words(&self.own)),
        }
    }

    /// Waits until everything has arrived.
    fn complete(&self, order: &Order, mut under: Vec<Under>) -> Result<(), Error> {
        let begun = Instant::now();
        let mut looks = 0u32;
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
            if begun.elapsed() >= order.timeout {
                // A piece that a rank does not send says more than one that it does not fetch.
                let comes = under.iter().any(|one| one.comes);
                let missing = under.iter().filter(|one| one.comes || !comes);
                let mut missing: Vec<usize> = missing.map(|one| one.peer).collect();
                missing.sort_unstable();
                missing.dedup();
                return Err(Error::Timeout {
                    rank: self.rank,
                    missing,
                    waited: order.timeout,
                    what: words(&self.own),
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
