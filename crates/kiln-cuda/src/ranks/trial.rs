//! Trying NCCL before steps rely on it.
//!
//! Every rank adds known numbers through NCCL, once on a stream and twice in a graph in which the collectives stand
//! between copies, as in a step. Sums that are wrong on the stream are an error. Where only the graph is wrong, or
//! cannot be made, steps are queued call by call.

use std::sync::Arc;

use kiln_distributed::nccl::Shape;
use kiln_distributed::{Error, World};
use kiln_graph::{CollectiveKind, DType};

use super::Ranks;
use crate::error::Result;
use crate::runtime::{GraphBuilder, StepGraph, Storage, Stream};

/// Elements of f32: more than NCCL moves in one piece.
const ELEMENTS: usize = 300_001;

/// Bytes of the elements.
const BYTES: usize = 4 * ELEMENTS;

/// The sum over ranks, or the mean, of known numbers.
fn shape(mean: bool) -> Shape {
    Shape {
        kind: CollectiveKind::AllReduce,
        mean,
        root: 0,
        dtype: DType::F32,
        elements: ELEMENTS,
    }
}

/// The numbers of a rank: small integers, so that sums are exact.
fn numbers(rank: usize) -> Vec<u8> {
    let number = |i: usize| ((i * 31 + rank * 17) % 101) as f32;
    (0..ELEMENTS).flat_map(|i| number(i).to_ne_bytes()).collect()
}

/// Whether `bytes` are the sum of the numbers of all ranks, or their mean up to rounding.
fn is_right(bytes: &[u8], ranks: usize, mean: bool) -> bool {
    let (elements, _) = bytes.as_chunks::<4>();
    elements.iter().enumerate().all(|(i, element)| {
        let sum: usize = (0..ranks).map(|rank| (i * 31 + rank * 17) % 101).sum();
        let expected = if mean {
            sum as f32 / ranks as f32
        } else {
            sum as f32
        };
        (f32::from_ne_bytes(*element) - expected).abs() <= 1e-5 * expected.max(1.0)
    })
}

/// The collectives in a graph, as far as the own rank makes it; nothing is launched.
struct Captured {
    graph: StepGraph,
    /// Where the graph leaves the mean, and the sum of the means.
    results: [Arc<Storage>; 2],
}

impl Captured {
    fn new(ranks: &Ranks, stream: &Stream, operand: &Arc<Storage>) -> Result<Self> {
        let device = stream.device();
        let memory = || Storage::allocate(stream, BYTES).map(Arc::new);
        let (first, second, results) = (memory()?, memory()?, [memory()?, memory()?]);
        let mut builder = GraphBuilder::new(device, "trial of NCCL")?;
        let begin = builder.copy(&[], operand, 0..BYTES, &first, 0)?;
        let mean = builder.capture_apart(&[begin], &[&first], |stream| {
            ranks.queue(stream, &shape(true), (&first, 0), (&first, 0))
        })?;
        let sum = builder.capture_apart(&[mean], &[&first, &second], |stream| {
            ranks.queue(stream, &shape(false), (&first, 0), (&second, 0))
        })?;
        builder.copy(&[mean], &first, 0..BYTES, &results[0], 0)?;
        builder.copy(&[sum], &second, 0..BYTES, &results[1], 0)?;
        builder.keep_ranks(ranks);
        let graph = builder.instantiate(stream)?;
        Ok(Self { graph, results })
    }

    /// Whether a launch gives what it should.
    fn is_right(&mut self, ranks: &Ranks, stream: &Stream) -> Result<bool> {
        for result in &self.results {
            stream.fill(result, 0..BYTES, 0xff)?;
        }
        self.graph.launch()?;
        ranks.watch(stream, &Arc::from("the trial of NCCL in a graph"))?;
        let mut bytes = vec![0; BYTES];
        let read = stream.read(&self.results[0], 0, &mut bytes);
        ranks.check()?;
        read?;
        let mean = is_right(&bytes, ranks.size(), true);
        stream.read(&self.results[1], 0, &mut bytes)?;
        // The sum of equal means is the sum.
        Ok(mean && is_right(&bytes, ranks.size(), false))
    }
}

/// Tries NCCL on all ranks, and notes whether its calls can be captured.
///
/// # Errors
/// [`Error::Broken`] if NCCL adds wrongly, [`Error::Disagreement`] if only some ranks can capture its calls; those of
/// [`Ranks::queue`] and [`Ranks::check`].
pub(super) fn run(ranks: &Ranks, world: &World) -> Result<()> {
    let stream = ranks.inner.device.stream()?;
    let operand = Arc::new(Storage::allocate(&stream, BYTES)?);
    let result = Arc::new(Storage::allocate(&stream, BYTES)?);
    stream.write(&numbers(world.rank()), &operand, 0)?;
    for mean in [false, true] {
        ranks.queue(&stream, &shape(mean), (&operand, 0), (&result, 0))?;
        ranks.watch(&stream, &Arc::from("the trial of NCCL"))?;
        let mut bytes = vec![0; BYTES];
        let read = stream.read(&result, 0, &mut bytes);
        ranks.check()?;
        read?;
        if !is_right(&bytes, ranks.size(), mean) {
            let version = ranks.inner.communicator.library().version();
            return Err(Error::Broken(format!("NCCL {version} adds wrongly")).into());
        }
    }
    let captured = Captured::new(ranks, &stream, &operand);
    let can = if captured.is_ok() { "yes" } else { "no" };
    world.agree(&[(
        "whether NCCL's calls can be captured into a graph",
        can.to_owned(),
    )])?;
    let right = match captured {
        Ok(mut captured) => {
            let first = captured.is_right(ranks, &stream)?;
            captured.is_right(ranks, &stream)? && first
        }
        Err(error) => {
            kiln_log::warn!(target: "kiln", "{error}");
            false
        }
    };
    if !right {
        kiln_log::warn!(
            target: "kiln",
            "NCCL's calls do not work in a graph here, so steps of several ranks are queued call by call, which is \
             slower: set NCCL_DEBUG=INFO for NCCL's reason"
        );
    }
    let _ = ranks.inner.captures.set(right);
    Ok(())
}

/// Captures collectives, without other ranks.
///
/// # Errors
/// Those of the capture.
pub(super) fn capture(ranks: &Ranks) -> Result<()> {
    let stream = ranks.inner.device.stream()?;
    let operand = Arc::new(Storage::allocate(&stream, BYTES)?);
    Captured::new(ranks, &stream, &operand).map(drop)
}
