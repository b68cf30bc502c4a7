//! The step as one graph.
//!
//! A graph holds addresses. State is computed in place and constants stay, so most addresses are the same at every call: the graph is built over those. What is somewhere
//! else at each call (a batch, a loss) gets a *slot*, memory of the executable's own: an input is copied into its slot in front of the launch, an output from its slot behind it.
//!
//! Which is which is seen from two calls: the first is queued call by call, and addresses that are the same in the second become the graph's. When one of
//! them changes all the same, that call is queued call by call, and the next one builds the graph anew.

use std::sync::Arc;

use super::bound::{Chain, Memory, Parts, bind};
use crate::error::Result;
use crate::products::Multiplier;
use crate::runtime::{GraphBuilder, StepGraph, Storage, Stream};

/// The addresses of a call: inputs, then outputs.
pub fn addresses(inputs: &[Arc<Storage>], outputs: &[Arc<Storage>]) -> Vec<u64> {
    inputs
        .iter()
        .chain(outputs)
        .map(|storage| storage.address())
        .collect()
}

/// A graph, and what it relies on.
pub struct Replayed {
    graph: StepGraph,
    /// For each input and output the address that the graph has; none for one with a slot.
    fixed: Vec<Option<u64>>,
    slots: Vec<(usize, Arc<Storage>)>,
    arena: Arc<Storage>,
}

impl Replayed {
    /// Builds the graph for a call at these addresses; `moves` says which inputs and outputs are elsewhere at each call.
    pub fn build(
        name: &str,
        parts: &Parts<'_>,
        memory: &Memory<'_>,
        moves: &[bool],
        multiplier: Option<&Multiplier>,
        stream: &Stream,
    ) -> Result<Self> {
        let count = memory.inputs.len();
        let mut slots = Vec::new();
        let mut own = |index: usize, storage: &Arc<Storage>| -> Result<Arc<Storage>> {
            if !moves[index] {
                return Ok(storage.clone());
            }
            let slot = Arc::new(Storage::allocate(stream, storage.bytes())?);
            slots.push((index, slot.clone()));
            Ok(slot)
        };
        let inputs = memory.inputs.iter().enumerate();
        let inputs: Vec<_> = inputs.map(|(at, it)| own(at, it)).collect::<Result<_>>()?;
        let outputs = memory.outputs.iter().enumerate();
        let outputs: Vec<_> = outputs
            .map(|(at, it)| own(count + at, it))
            .collect::<Result<_>>()?;
        let memory = Memory {
            inputs: &inputs,
            outputs: &outputs,
            ..*memory
        };
        let mut chain = Chain::new(GraphBuilder::new(stream.device(), name)?);
        if !parts.guards.is_empty() {
            super::bound::Sink::clear(&mut chain, memory.stopped)?;
        }
        for mut call in bind(parts, &memory, multiplier, stream)? {
            call.give(&mut chain, &memory)?;
        }
        let fixed = addresses(&inputs, &outputs).into_iter().zip(moves);
        Ok(Self {
            graph: chain.finish().instantiate(stream)?,
            fixed: fixed
                .map(|(address, moves)| (!moves).then_some(address))
                .collect(),
            slots,
            arena: memory.arena.clone(),
        })
    }

    /// Whether the graph is that of a call at these addresses.
    pub fn fits(&self, addresses: &[u64], arena: &Arc<Storage>) -> bool {
        let same = |(fixed, own): (&Option<u64>, &u64)| fixed.is_none_or(|fixed| fixed == *own);
        Arc::ptr_eq(&self.arena, arena) && self.fixed.iter().zip(addresses).all(same)
    }

    /// Queues the step.
    pub fn launch(&mut self, memory: &Memory<'_>, stream: &Stream) -> Result<()> {
        let count = memory.inputs.len();
        for (index, slot) in self.slots.iter().filter(|(index, _)| *index < count) {
            stream.copy(&memory.inputs[*index], 0..slot.bytes(), slot, 0)?;
        }
        self.graph.launch()?;
        for (index, slot) in self.slots.iter().filter(|(index, _)| *index >= count) {
            stream.copy(slot, 0..slot.bytes(), &memory.outputs[index - count], 0)?;
        }
        Ok(())
    }

    /// How many nodes the graph has.
    pub fn nodes(&self) -> usize {
        self.graph.nodes()
    }
}
