//! Operands of the host over NCCL.

use std::sync::Arc;
use std::time::Duration;

use kiln_distributed::nccl::Shape;
use kiln_distributed::{Carrier, Error};

use super::Ranks;
use crate::error::{CudaError, Result};
use crate::runtime::{Storage, Stream};

/// Moves large operands of the host over NCCL, for ranks that no MPI connects ([`kiln_distributed::World::carry_by`]): through
/// memory of the device.
#[derive(Debug)]
pub struct DeviceCarrier {
    ranks: Ranks,
    stream: Stream,
}

impl DeviceCarrier {
    /// On `stream`, which must be that of the steps: collectives of all kinds then have one order on every rank.
    pub fn new(ranks: &Ranks, stream: &Stream) -> Self {
        Self {
            ranks: ranks.clone(),
            stream: stream.clone(),
        }
    }

    fn run(&self, shape: &Shape, operand: &[u8], result: &mut [u8]) -> Result<()> {
        let from = Arc::new(Storage::allocate(&self.stream, operand.len())?);
        let to = Arc::new(Storage::allocate(&self.stream, result.len())?);
        self.stream.write(operand, &from, 0)?;
        self.ranks.queue(&self.stream, shape, (&from, 0), (&to, 0))?;
        self.ranks.watch(&self.stream, &Arc::from(shape.to_string()))?;
        let read = self.stream.read(&to, 0, result);
        self.ranks.check()?;
        read
    }
}

impl Carrier for DeviceCarrier {
    fn carry(
        &mut self,
        shape: &Shape,
        operand: &[u8],
        result: &mut [u8],
        _timeout: Duration,
    ) -> std::result::Result<(), Error> {
        self.run(shape, operand, result).map_err(|error| match error {
            CudaError::Ranks(error) => error,
            error => Error::Broken(error.to_string()),
        })
    }
}
