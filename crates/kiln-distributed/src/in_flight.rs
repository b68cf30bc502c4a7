//! The collectives of a step that runs: begun in one call, and waited for in another.

use std::cell::RefCell;

use kiln_graph::{Collective, DType};

use crate::engine::StepTag;
use crate::error::Error;
use crate::world::{Operands, Ticket, World};

/// The collectives that a run of a step has begun. Dropping it waits for them.
#[derive(Debug, Default)]
pub struct InFlight {
    /// The step.
    tag: StepTag,
    /// Each with the address of its result.
    begun: RefCell<Vec<(usize, Ticket)>>,
}

/// An operand in memory: so many bytes of elements of a type.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Type of the elements.
    pub dtype: DType,
    /// Where they begin.
    pub from: *const u8,
    /// How many bytes they are.
    pub bytes: usize,
}

impl InFlight {
    /// Of a run of this step, which other ranks compare with theirs.
    pub fn of(tag: StepTag) -> Self {
        Self {
            tag,
            ..Self::default()
        }
    }

    /// Computes `collective` of `operand` into `to`, or begins it if it is started. A started one that works
    /// in place ([`kiln_graph::CollectiveKind::is_in_place`]) does so on a copy of the operand at `to`: the
    /// operand's memory is free as soon as the call returns.
    ///
    /// # Errors
    /// [`Error::Operands`] if the collective is one of another number of ranks; those of [`World::start`] and
    /// [`Ticket::wait`].
    ///
    /// # Safety
    /// Operand and result must be valid for the bytes that [`Operands`] says, and may be the same memory.
    /// Until [`InFlight::wait`] for this result, or the end of this value, nobody may touch the result of a
    /// started collective, nor write an operand that it does not copy.
    pub unsafe fn begin(
        &self,
        world: &World,
        collective: &Collective,
        operand: Operand,
        to: *mut u8,
    ) -> Result<(), Error> {
        let Operand { dtype, from, bytes } = operand;
        if collective.ranks != world.size() {
            return Err(Error::Operands(format!(
                "the step is one of {} ranks, and there are {}",
                collective.ranks,
                world.size()
            )));
        }
        let moves = collective.started && collective.kind.is_in_place();
        if moves {
            // SAFETY: the caller's promise; both have so many bytes, and may be the same.
            unsafe { std::ptr::copy(from, to, bytes) };
        }
        let operands = Operands {
            kind: collective.kind,
            mean: collective.mean,
            root: collective.root,
            dtype,
            from: if moves { to } else { from },
            bytes,
            to,
        };
        // SAFETY: the caller's promise.
        let ticket = unsafe { world.start_in(self.tag, operands)? };
        match collective.started {
            true => {
                self.begun.borrow_mut().push((to as usize, ticket));
                Ok(())
            }
            false => ticket.wait(),
        }
    }

    /// Waits for the collective whose result is at `from`, and copies the result's `bytes` to `to`, which may
    /// be the same place.
    ///
    /// # Errors
    /// [`Error::Operands`] if none was begun there; those of [`Ticket::wait`].
    ///
    /// # Safety
    /// Both places must be valid for so many bytes.
    pub unsafe fn wait(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<(), Error> {
        let mut begun = self.begun.borrow_mut();
        let position = begun.iter().position(|(at, _)| *at == from as usize);
        let position =
            position.ok_or_else(|| Error::Operands("no collective was started there".to_owned()))?;
        let (_, ticket) = begun.remove(position);
        drop(begun);
        ticket.wait()?;
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }

    /// Waits for whatever is still under way: the step's memory is in other use from now on.
    pub fn finish(&self) {
        self.begun.borrow_mut().clear();
    }
}
