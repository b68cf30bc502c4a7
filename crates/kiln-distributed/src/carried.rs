//! The thread of ranks that `torchrun` started: collectives without MPI.
//!
//! As in [`crate::engine`], one thread works on one collective after the other, and every collective begins
//! with a heading that must be equal on all ranks. Headings and operands of few bytes go through the star
//! ([`crate::rendezvous`]), and this thread computes the result from the operands of all ranks. Operands of
//! more bytes go over the [`Carrier`], which the program gives to the world once the ranks have GPUs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_graph::CollectiveKind;

use crate::engine::{HEADING_BYTES, Heading, Order, Task, What, disagreeing, words};
use crate::error::Error;
use crate::nccl::Shape;
use crate::rendezvous::{MOST, Star};
use crate::sum::sum;

/// What moves large operands between ranks that no MPI connects.
pub trait Carrier: Send {
    /// Computes a collective of all ranks from `operand`, and waits for it. All ranks call it in the same order.
    ///
    /// # Errors
    /// If other ranks do not take part within `timeout`, or what moves the data fails.
    fn carry(
        &mut self,
        shape: &Shape,
        operand: &[u8],
        result: &mut [u8],
        timeout: Duration,
    ) -> Result<(), Error>;
}

/// A place for the carrier, which comes later than the world.
pub(crate) type Carriers = Arc<Mutex<Option<Box<dyn Carrier>>>>;

/// The state of the thread.
pub(crate) struct Carried {
    star: Star,
    carriers: Carriers,
    rank: usize,
    size: usize,
    number: u64,
    broken: Option<Error>,
}

impl Carried {
    pub(crate) fn new(star: Star, carriers: Carriers, rank: usize, size: usize) -> Self {
        Self {
            star,
            carriers,
            rank,
            size,
            number: 0,
            broken: None,
        }
    }

    /// Carries out orders until there are none to come.
    pub(crate) fn run(mut self, orders: &Receiver<Order>) {
        while let Ok(order) = orders.recv() {
            let result = match &self.broken {
                Some(error) => Err(Error::Broken(error.to_string())),
                // A carrier is the program's code. Whoever gave the order waits for an answer all the same.
                None => catch_unwind(AssertUnwindSafe(|| self.carry_out(&order)))
                    .unwrap_or_else(|_| Err(Error::Broken("the thread that connects them panicked".into()))),
            };
            if let (Err(error), None) = (&result, &self.broken) {
                self.broken = Some(error.clone());
            }
            let is_last = order.task.what == What::Goodbye;
            order.done.tell(result);
            if is_last {
                break;
            }
        }
    }

    fn carry_out(&mut self, order: &Order) -> Result<(), Error> {
        let Task {
            what, dtype, bytes, ..
        } = order.task;
        if what == What::Late {
            return Ok(());
        }
        let own = order.task.heading(self.number);
        self.number += 1;
        let fits = bytes + HEADING_BYTES <= MOST;
        let mut given = own.to_vec();
        if fits && bytes > 0 {
            // SAFETY: the order's memory is this thread's until the order is done.
            given.extend_from_slice(unsafe { std::slice::from_raw_parts(order.from, bytes) });
        }
        let all = self.star.exchange(&given, order.timeout, &words(&own))?;
        let heading = |given: &Vec<u8>| given.first_chunk::<HEADING_BYTES>().copied();
        let headings: Option<Vec<Heading>> = all.iter().map(heading).collect();
        let headings = headings.ok_or_else(|| Error::Broken("a rank gave no heading".into()))?;
        if let Some((rank, other)) = disagreeing(&headings, self.rank) {
            return Err(Error::Differs {
                rank,
                other,
                own: words(&headings[rank]),
                theirs: words(&headings[other]),
            });
        }
        let What::Collective(kind, mean, root) = what else {
            return Ok(());
        };
        let shape = Shape {
            kind,
            mean,
            root,
            dtype,
            elements: bytes / dtype.size(),
        };
        let result = shape.bytes(self.size).1;
        if !fits {
            let mut carrier = self.carriers.lock().unwrap_or_else(PoisonError::into_inner);
            let carrier = carrier.as_mut().ok_or_else(|| Error::Torchrun {
                size: self.size,
                what: kind.to_string(),
                bytes,
            })?;
            // SAFETY: as above. The operand is copied, as the result may be in its memory.
            let operand = unsafe { std::slice::from_raw_parts(order.from, bytes) }.to_vec();
            // SAFETY: the result has room for so many bytes, and nobody else looks at it.
            let to = unsafe { std::slice::from_raw_parts_mut(order.to, result) };
            return carrier.carry(&shape, &operand, to, order.timeout);
        }
        let operands: Vec<&[u8]> = all.iter().map(|given| &given[HEADING_BYTES..]).collect();
        if operands.iter().any(|operand| operand.len() != bytes) {
            return Err(Error::Broken("a rank gave fewer bytes than it said".into()));
        }
        if result == 0 {
            return Ok(());
        }
        // SAFETY: as above; the operand is not looked at any more.
        let to = unsafe { std::slice::from_raw_parts_mut(order.to, result) };
        match kind {
            CollectiveKind::AllReduce => sum(dtype, &operands, mean, to),
            CollectiveKind::ReduceScatter => {
                let block = self.rank * result..(self.rank + 1) * result;
                let blocks: Vec<&[u8]> = operands.iter().map(|operand| &operand[block.clone()]).collect();
                sum(dtype, &blocks, mean, to);
            }
            CollectiveKind::AllGather => to.copy_from_slice(&operands.concat()),
            CollectiveKind::FromRoot => to.copy_from_slice(operands[root]),
        }
        Ok(())
    }
}
