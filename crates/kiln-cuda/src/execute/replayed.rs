//! The step as one graph.
//!
//! A graph holds addresses. State is computed in place and constants stay, so most addresses are the same at
//! every call: the graph is built over those. What is somewhere else at each call (a batch, a loss) gets a
//! *slot*, memory of the graph's own: an input is copied into its slot in front of the launch, an output from
//! its slot behind it. The slots of small inputs lie behind the runtime scalars in one [`Parcel`], so that
//! what comes from the host arrives in one copy. A large input whose readers are kernels of the step's own has
//! no slot: in front of the launch these kernels are told where it is ([`StepGraph::point`]).
//!
//! ```text
//! host       [ scalars | tokens | labels ]
//!                     one copy
//! device     [ scalars | tokens | labels ] ─► graph ─► slot of the loss ─► loss
//! ```
//!
//! State that no output takes over in place has two buffers, which change roles after each call: there are
//! then two graphs, and no copy.

use std::sync::Arc;

use super::bound::{Bound, Branches, Memory, Parts, Place, Sink, bind};
use super::gpu::Gpu;
use crate::error::{CudaError, Result};
use crate::products::Multiplier;
use crate::runtime::{GraphBuilder, Parcel, StepGraph, Storage, Stream};
use crate::sys::driver::result;

/// Most bytes of an input of the host that travels with a step's numbers, in one copy. Inputs of more bytes get
/// memory of their own: the parcel's ring is pinned memory, eight times its size.
pub const SMALL_INPUT: usize = 256 << 10;

/// How often a graph is built where a capture is ended from outside. Kiln's own threads do not wait for a
/// device while another one captures; libraries may. cuDNN failed to be captured once in some thousands of
/// times while other threads and processes used the device, with plans that had run just before.
const ATTEMPTS: usize = 3;

/// Slots in the parcel begin at such addresses: kernels load sixteen bytes at once.
const ALIGNMENT: usize = 256;

/// Where arguments and outputs of the calls are.
#[derive(Clone, Debug, Default)]
pub struct Arrangement {
    /// The storage of each argument that stays; none for one that is elsewhere at each call.
    pub inputs: Vec<Option<Arc<Storage>>>,
    /// The storage of each output that stays.
    pub outputs: Vec<Option<Arc<Storage>>>,
    /// Arguments and outputs whose two storages change roles after each call.
    pub pairs: Vec<(usize, usize)>,
}

impl Arrangement {
    /// The roles of the pairs at every other call.
    fn swapped(&self) -> Self {
        let mut other = self.clone();
        for &(input, output) in &self.pairs {
            std::mem::swap(&mut other.inputs[input], &mut other.outputs[output]);
        }
        other
    }

    /// The address of each argument and each output that stays.
    fn addresses(&self) -> Vec<Option<u64>> {
        let all = self.inputs.iter().chain(&self.outputs);
        all.map(|storage| storage.as_ref().map(|storage| storage.address()))
            .collect()
    }
}

/// The elements of an argument that is elsewhere at each call.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// In the memory of the host; they may change as soon as the call returns.
    Host(&'a [u8]),
    /// On the device.
    Device(&'a Arc<Storage>),
}

impl Given<'_> {
    /// How many bytes they are.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(storage) => storage.bytes(),
        }
    }
}

/// The slot of an output.
#[derive(Debug)]
struct Slot {
    /// The output's number.
    index: usize,
    place: Place,
    bytes: usize,
}

/// An argument that is elsewhere at each call.
#[derive(Debug)]
struct Entry {
    /// Its number.
    index: usize,
    bytes: usize,
    /// Its slot; none if the graph's kernels are pointed to it.
    slot: Option<Place>,
}

/// The graph for one assignment of roles.
struct Variant {
    graph: StepGraph,
    inputs: Vec<Place>,
    outputs: Vec<Place>,
    /// The addresses that the graph relies on, arguments and then outputs; none for slots.
    fixed: Vec<Option<u64>>,
}

/// One graph, or two that take turns, and what they rely on.
pub struct Replayed {
    variants: Vec<Variant>,
    entering: Vec<Entry>,
    /// The numbers of those without a slot.
    moving: Vec<u32>,
    leaving: Vec<Slot>,
    /// The runtime scalars, and the slots of small inputs behind them.
    parcel: Parcel,
    arena: Arc<Storage>,
    stopped: Arc<Storage>,
    /// Whether the last call did not fit.
    pub missed: bool,
}

/// What all graphs of a step have in common.
pub struct Common<'a> {
    /// The step's name.
    pub name: &'a str,
    /// Its code and kernels.
    pub parts: &'a Parts<'a>,
    /// cuBLASLt, if a call needs it.
    pub multiplier: Option<&'a Multiplier>,
    /// The stream of launches.
    pub stream: &'a Stream,
    /// Intermediate values.
    pub arena: &'a Arc<Storage>,
    /// The mark that guards leave.
    pub stopped: &'a Arc<Storage>,
    /// Where the extremes of the index checks are left.
    pub extremes: &'a [Arc<Storage>],
    /// For each output the input whose memory it takes over.
    pub aliases: &'a [Option<u32>],
}

impl Common<'_> {
    /// Whether kernels can be pointed to input `index` wherever it is: the step only reads it, and a library
    /// does not.
    fn moves(&self, index: usize) -> bool {
        let index = index as u32;
        !self.aliases.contains(&Some(index)) && self.parts.code.reads_by_pointers(index)
    }
}

/// The step's calls at these addresses, as a graph.
fn captured(common: &Common<'_>, memory: &Memory<'_>) -> Result<StepGraph> {
    let bound = bind(common.parts, memory, common.multiplier, common.stream)?;
    let bytes = bound.iter().map(Bound::workspace_bytes).max().unwrap_or(0);
    let workspace = match bytes {
        0 => None,
        _ => Some(Arc::new(Storage::allocate(common.stream, bytes)?)),
    };
    let builder = GraphBuilder::new(common.stream.device(), common.name)?;
    let mut graph = Branches::new(builder, &common.parts.code.orders, workspace);
    if !common.parts.guards.is_empty() {
        graph.clear(memory.stopped)?;
    }
    graph.begin();
    for (call, mut bound) in common.parts.code.calls.iter().zip(bound) {
        graph.enter(call.stage);
        bound.give(&mut graph, memory)?;
    }
    graph.finish().instantiate(common.stream)
}

impl Replayed {
    /// Builds the graphs for calls whose arguments and outputs are so arranged.
    pub fn build(common: &Common<'_>, arrangement: &Arrangement) -> Result<Self> {
        let code = common.parts.code;
        let mut bytes = 8 * code.scalars;
        let mut offsets = Vec::with_capacity(code.inputs.len());
        for (storage, &size) in arrangement.inputs.iter().zip(&code.inputs) {
            let small = storage.is_none() && size <= SMALL_INPUT;
            offsets.push(small.then(|| {
                let at = bytes.next_multiple_of(ALIGNMENT);
                bytes = at + size;
                at
            }));
        }
        let parcel = Parcel::new(common.stream, bytes.max(8))?;
        let mut entering = Vec::new();
        for (index, (offset, &bytes)) in offsets.into_iter().zip(&code.inputs).enumerate() {
            if arrangement.inputs[index].is_some() {
                continue;
            }
            let slot = match offset {
                Some(at) => Some((parcel.storage().clone(), at)),
                None if common.moves(index) => None,
                None => Some((Arc::new(Storage::allocate(common.stream, bytes)?), 0)),
            };
            entering.push(Entry { index, bytes, slot });
        }
        let mut leaving = Vec::new();
        for (index, (storage, &bytes)) in arrangement.outputs.iter().zip(&code.outputs).enumerate() {
            if storage.is_none() {
                let place = (Arc::new(Storage::allocate(common.stream, bytes)?), 0);
                leaving.push(Slot { index, place, bytes });
            }
        }
        let moving = entering.iter().filter(|entry| entry.slot.is_none());
        let mut replayed = Self {
            variants: Vec::new(),
            moving: moving.map(|entry| entry.index as u32).collect(),
            entering,
            leaving,
            parcel,
            arena: common.arena.clone(),
            stopped: common.stopped.clone(),
            missed: false,
        };
        let first = replayed.variant(common, arrangement)?;
        replayed.variants.push(first);
        if !arrangement.pairs.is_empty() {
            let second = replayed.variant(common, &arrangement.swapped())?;
            replayed.variants.push(second);
        }
        Ok(replayed)
    }

    fn variant(&self, common: &Common<'_>, arrangement: &Arrangement) -> Result<Variant> {
        // No launch reads what stands for a moving input here: the graph must be told first where it is.
        let nowhere: Place = (Arc::new(Storage::allocate(common.stream, 0)?), 0);
        let slots = self
            .entering
            .iter()
            .map(|entry| entry.slot.as_ref().unwrap_or(&nowhere));
        let inputs = places(&arrangement.inputs, slots);
        let mut outputs = places(&arrangement.outputs, self.leaving.iter().map(|slot| &slot.place));
        outputs.extend(common.extremes.iter().map(|storage| (storage.clone(), 0)));
        let memory = Memory {
            inputs: &inputs,
            moving: &self.moving,
            outputs: &outputs,
            arena: common.arena,
            scalars: self.parcel.storage(),
            stopped: common.stopped,
        };
        let mut graph = captured(common, &memory);
        for _ in 1..ATTEMPTS {
            let error = match &graph {
                Err(error @ CudaError::Convolution { .. }) => error,
                // A library waited for the whole device on another thread, which ends all captures.
                Err(error @ CudaError::Driver { what, .. }) if what.code == result::CAPTURE_INVALIDATED => {
                    error
                }
                _ => break,
            };
            tracing::debug!("{} is captured again: {error}", common.name);
            graph = captured(common, &memory);
        }
        Ok(Variant {
            graph: graph?,
            fixed: arrangement.addresses(),
            inputs,
            outputs,
        })
    }

    /// Whether the graphs are those of calls so arranged.
    pub fn is_of(&self, arrangement: &Arrangement, arena: &Arc<Storage>) -> bool {
        self.has_arena(arena)
            && (self.variants.len() == 2) != arrangement.pairs.is_empty()
            && self.variants[0].fixed == arrangement.addresses()
            && (arrangement.pairs.is_empty() || self.variants[1].fixed == arrangement.swapped().addresses())
    }

    /// The graph of a call at these addresses, arguments and then outputs.
    pub fn fitting(&self, addresses: &[u64], arena: &Arc<Storage>) -> Option<usize> {
        let same = |(fixed, own): (&Option<u64>, &u64)| fixed.is_none_or(|fixed| fixed == *own);
        let fits = |variant: &Variant| variant.fixed.iter().zip(addresses).all(same);
        self.variants
            .iter()
            .position(fits)
            .filter(|_| self.has_arena(arena))
    }

    /// Whether the graphs' intermediate values are in `arena`.
    pub fn has_arena(&self, arena: &Arc<Storage>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }

    /// Queues the step by graph `variant`. `given` has the elements of each argument of
    /// [`Replayed::entering`], in order; `results` takes each output of [`Replayed::leaving`].
    pub fn launch<'a>(
        &mut self,
        variant: usize,
        gpu: &Gpu,
        scalars: &[u64],
        given: impl Iterator<Item = Given<'a>> + Clone,
        results: impl Iterator<Item = &'a Arc<Storage>>,
    ) -> Result<()> {
        let stream = gpu.stream();
        let entering = self.entering.iter().zip(given);
        let packed = |(entry, given): (&Entry, Given<'a>)| match (&entry.slot, given) {
            (Some((_, at)), Given::Host(bytes)) if entry.bytes <= SMALL_INPUT => Some((*at, bytes)),
            _ => None,
        };
        let ends = entering
            .clone()
            .filter_map(packed)
            .map(|(at, bytes)| at + bytes.len());
        let end = ends.fold(8 * scalars.len(), usize::max);
        self.parcel.send(stream, end, |block| {
            let (words, _) = block.as_chunks_mut::<8>();
            for (word, bits) in words.iter_mut().zip(scalars) {
                *word = bits.to_ne_bytes();
            }
            for (at, bytes) in entering.clone().filter_map(packed) {
                block[at..at + bytes.len()].copy_from_slice(bytes);
            }
        })?;
        let Variant { graph, fixed, .. } = &mut self.variants[variant];
        for (entry, given) in entering.filter(|both| packed(*both).is_none()) {
            let storage = match given {
                // While the step before runs, on another stream.
                Given::Host(bytes) => gpu.upload(bytes)?,
                Given::Device(storage) => storage.clone(),
            };
            match &entry.slot {
                Some((to, at)) => stream.copy(&storage, 0..entry.bytes, to, *at)?,
                None => {
                    // What the step writes is not what it reads here, as with a slot.
                    let storage = match fixed.contains(&Some(storage.address())) {
                        true => gpu.duplicate(&storage)?,
                        false => storage,
                    };
                    // SAFETY: it has the bytes of the input, which the step only reads (`Common::moves`).
                    unsafe { graph.point(entry.index as u32, &storage) }?;
                }
            }
        }
        graph.launch()?;
        for (slot, to) in self.leaving.iter().zip(results) {
            stream.copy(&slot.place.0, 0..slot.bytes, to, 0)?;
        }
        Ok(())
    }

    /// The arguments that are elsewhere at each call, in order.
    pub fn entering(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.entering.iter().map(|entry| entry.index)
    }

    /// The outputs that are elsewhere at each call, in order.
    pub fn leaving(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.leaving.iter().map(|slot| slot.index)
    }

    /// Where everything of graph `variant` is.
    pub fn memory(&self, variant: usize) -> Memory<'_> {
        let Variant { inputs, outputs, .. } = &self.variants[variant];
        Memory {
            inputs,
            moving: &self.moving,
            outputs,
            arena: &self.arena,
            scalars: self.parcel.storage(),
            stopped: &self.stopped,
        }
    }

    /// How many graphs take turns.
    pub fn variants(&self) -> usize {
        self.variants.len()
    }

    /// How many nodes a graph has.
    pub fn nodes(&self) -> usize {
        self.variants[0].graph.nodes()
    }
}

/// The storage of each argument, or of each output, and the slots of those that have none.
fn places<'a>(storages: &[Option<Arc<Storage>>], mut slots: impl Iterator<Item = &'a Place>) -> Vec<Place> {
    let mut place = |storage: &Option<Arc<Storage>>| match storage {
        Some(storage) => (storage.clone(), 0),
        None => {
            let slot = slots.next().expect("a slot for each argument without a storage");
            slot.clone()
        }
    };
    storages.iter().map(&mut place).collect()
}
