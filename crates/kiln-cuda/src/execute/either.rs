//! Which side of a call that has two is taken on this device.

use std::sync::Arc;

use super::gpu::Gpu;
use crate::build::{Key, Source};
use crate::code::{CallKind, Function, FunctionText, Pointer, StepCode, Trial};
use crate::convolutions::{Convolution, PreparedConvolution, Trial as ConvolutionTrial};
use crate::error::{CudaError, Result};
use crate::kernels::PRELUDE;
use crate::products::{PreparedProduct, Product, Trial as ProductTrial, random, time_in_turns};
use crate::runtime::{Arguments, Launch, Module, Storage, Stream};
use crate::sys::cudnn::CudnnHandle;

/// Runs of a kernel of Kiln's own, and of the library's calls, that are timed together at most.
const RUNS: u32 = 10;
/// The largest part of the library's time that a kernel of Kiln's own may take. Where the power of the device
/// is the limit, a few percent less in a short measurement are more in a step: with all products that were
/// timed below the library's, decoder-2l took 19.8 ms, with those below 0.94 of it 19.4; bert-base and
/// llama-125m took as long with both (H200).
const WORTH: f32 = 0.95;
/// What a kernel is called while it is timed.
const NAME: &str = "trial";

/// Whether the library's side of `either` is taken.
///
/// A product goes to Kiln's own kernel if that is faster than cuBLASLt by more than a little, and a
/// convolution of windows likewise, if it is faster than cuDNN or there is none. A convolution that is a
/// product of matrices goes to the faster of cuDNN and that; Kiln's own tiles are only for convolutions that
/// cuDNN refuses.
pub(super) fn takes(gpu: &Gpu, functions: &[Function], either: &CallKind) -> Result<bool> {
    let CallKind::Either { library, own, trial } = either else {
        return Ok(true);
    };
    if let Some(trial) = trial {
        return match own.last() {
            Some(own) if !trial.always && offers(gpu, library)? != Offer::None => {
                Ok(own_share(gpu, functions, trial, library, own)?.is_none())
            }
            _ => Ok(false),
        };
    }
    for call in library {
        let CallKind::Convolution {
            convolution,
            workspace,
            ..
        } = call
        else {
            continue;
        };
        let Some(plan) = gpu.plan(convolution, workspace.1)? else {
            return Ok(false);
        };
        if let [product @ (CallKind::Product { .. } | CallKind::Either { trial: Some(_), .. })] = &own[..]
            && (library.len() > 1 || plan.microseconds() >= product_time(gpu, functions, product)?)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Microseconds of products, one after the other.
fn products_time(gpu: &Gpu, functions: &[Function], calls: &[CallKind]) -> Result<f32> {
    let times = calls.iter().map(|call| product_time(gpu, functions, call));
    times.sum()
}

/// Microseconds of a product, on the faster side if it has two; no end where there was no memory to time it.
fn product_time(gpu: &Gpu, functions: &[Function], call: &CallKind) -> Result<f32> {
    match call {
        CallKind::Product {
            product, workspace, ..
        } => {
            let choice = gpu.choice(product, workspace.1)?;
            Ok(match choice.timed {
                0 => f32::INFINITY,
                _ => choice.microseconds,
            })
        }
        CallKind::Either {
            library,
            own,
            trial: Some(trial),
        } => {
            let share = match &own[..] {
                [own] => own_share(gpu, functions, trial, library, own)?,
                _ => None,
            };
            Ok(products_time(gpu, functions, library)? * share.unwrap_or(1.0))
        }
        _ => Ok(f32::INFINITY),
    }
}

/// What a library computes, and what working memory it may have.
#[derive(Clone, Copy, Debug)]
enum Asked<'a> {
    Product(&'a Product, usize),
    Convolution(&'a Convolution, usize),
}

/// What libraries are asked for by `calls`, where they are asked first.
fn asked<'a>(calls: &'a [CallKind], all: &mut Vec<Asked<'a>>) {
    for call in calls {
        match call {
            CallKind::Product {
                product, workspace, ..
            } => all.push(Asked::Product(product, workspace.1)),
            CallKind::Convolution {
                convolution,
                workspace,
                ..
            } => all.push(Asked::Convolution(convolution, workspace.1)),
            CallKind::Either { library, .. } => asked(library, all),
            _ => {}
        }
    }
}

/// Whether libraries compute what they are asked for.
#[derive(Clone, Copy, PartialEq)]
enum Offer {
    /// One of them does not, or none was asked.
    None,
    /// They do, but cuDNN's plan could not be tried for want of memory: its time is not known.
    Untried,
    Tried,
}

/// Whether libraries compute `calls`. The plans of convolutions are searched for here, while nothing else has
/// memory for a trial.
fn offers(gpu: &Gpu, calls: &[CallKind]) -> Result<Offer> {
    let mut all = Vec::new();
    asked(calls, &mut all);
    let mut offer = if all.is_empty() { Offer::None } else { Offer::Tried };
    for asked in all {
        let Asked::Convolution(convolution, workspace) = asked else {
            continue;
        };
        match gpu.plan(convolution, workspace)? {
            None => return Ok(Offer::None),
            Some(plan) if plan.microseconds() == 0.0 => offer = Offer::Untried,
            Some(_) => {}
        }
    }
    Ok(offer)
}

/// What a library computes, ready to run on memory of its own.
enum Ready<'g> {
    Product(Box<PreparedProduct<'g>>, ProductTrial),
    Convolution(Arc<PreparedConvolution>, ConvolutionTrial),
}

impl Ready<'_> {
    /// Queues it on a stream, which is that of cuDNN's `handle`.
    fn run(&mut self, stream: &Stream, handle: Option<CudnnHandle>) -> Result<()> {
        match (self, handle) {
            (Self::Product(product, memory), _) => product.run(stream, &memory.arguments()),
            (Self::Convolution(convolution, memory), Some(handle)) => {
                convolution.run_with(handle, stream, &memory.arguments())
            }
            (Self::Convolution(convolution, memory), None) => convolution.run(stream, &memory.arguments()),
        }
    }
}

/// A product's own kernel beside the library's calls, with what their times are kept under. What both sides
/// copy first is not timed.
struct Candidate<'a> {
    trial: &'a Trial,
    library: Vec<Asked<'a>>,
    text: &'a FunctionText,
    grid: [u32; 3],
    shared_bytes: u32,
    arguments: &'a [Pointer],
    source: Source,
    key: Key,
}

impl<'a> Candidate<'a> {
    /// None if `own` is no launch.
    fn new(
        gpu: &Gpu,
        functions: &'a [Function],
        trial: &'a Trial,
        library: &'a [CallKind],
        own: &'a CallKind,
    ) -> Result<Option<Self>> {
        let CallKind::Launch {
            function,
            grid,
            shared_bytes,
            arguments,
        } = own
        else {
            return Ok(None);
        };
        let text = &functions[*function].text;
        let source = Source {
            name: NAME.into(),
            text: format!("{PRELUDE}{}", text.source(NAME, false)),
        };
        let mut all = Vec::new();
        asked(library, &mut all);
        let library = all;
        let description = format!("{:?} {library:?} {grid:?} {}", trial.product, source.text);
        let device = &gpu.device().description().name;
        let is_convolution = library.iter().any(|it| matches!(it, Asked::Convolution(..)));
        let version = match gpu.convolver().filter(|_| is_convolution) {
            Some(convolver) => convolver.version(),
            None => gpu.multiplier()?.version(),
        };
        Ok(Some(Self {
            trial,
            library,
            text,
            grid: *grid,
            shared_bytes: *shared_bytes,
            arguments,
            key: Key::of(["own product beside the library's", device, version, &description]),
            source,
        }))
    }

    /// The time of this kernel, whose machine code is `image`, as a part of that of the library's calls.
    fn measure(&self, gpu: &Gpu, image: &[u8]) -> Result<f32> {
        let stream = gpu.stream();
        let module = Module::load(gpu.device(), NAME, image)?;
        // Kept until the last run is over.
        let mut memory: Vec<Arc<Storage>> = Vec::new();
        let mut given = Arguments::new();
        for argument in self.arguments {
            let (bytes, number) = match argument {
                Pointer::Copied(_, copied) => (copied.bytes(), copied.number()),
                _ => (
                    self.trial.product.result_bytes(),
                    self.trial.product.result.number,
                ),
            };
            let own = random(stream, bytes, number)?;
            given = match argument {
                Pointer::Copied(_, copied) => given.copied(gpu.device(), &own, 0, copied)?,
                _ => given.memory(&own, 0),
            };
            memory.push(own);
        }
        let launch = Launch {
            kernel: module.kernel(NAME)?,
            grid: self.grid,
            block: [self.text.threads, 1, 1],
            shared_bytes: self.shared_bytes,
            arguments: given,
        };
        let mut library = self.ready(gpu)?;
        let has_convolutions = library
            .iter()
            .any(|ready| matches!(ready, Ready::Convolution(..)));
        // SAFETY: the kernel computes this product, from operands and into a result of its sizes.
        let mut own = || unsafe { stream.launch(&launch) };
        let mut timed = |handle| {
            let mut library = || library.iter_mut().try_for_each(|ready| ready.run(stream, handle));
            time_in_turns(stream, RUNS, &mut [&mut library, &mut own])
        };
        let times = match has_convolutions.then(|| gpu.convolver()).flatten() {
            Some(convolver) => convolver.queue(stream, |handle| timed(Some(handle)))?,
            None => timed(None)?,
        };
        Ok(times[1] / times[0])
    }

    /// The library's calls, each with memory to try it on.
    fn ready<'g>(&self, gpu: &'g Gpu) -> Result<Vec<Ready<'g>>> {
        let mut all = Vec::new();
        for &asked in &self.library {
            all.push(match asked {
                Asked::Product(product, workspace) => {
                    let choice = gpu.choice(product, workspace)?;
                    let prepared = gpu.multiplier()?.prepare(product, &choice)?;
                    let memory = ProductTrial::new(gpu.stream(), product, prepared.workspace_bytes())?;
                    Ready::Product(Box::new(prepared), memory)
                }
                Asked::Convolution(convolution, workspace) => {
                    let Some(plan) = gpu.plan(convolution, workspace)? else {
                        unreachable!("only what libraries offer is tried")
                    };
                    let bytes = plan.workspace_bytes();
                    let memory = ConvolutionTrial::new(gpu.stream(), convolution, bytes)?;
                    Ready::Convolution(plan, memory)
                }
            });
        }
        Ok(all)
    }
}

/// Measures the kernels of Kiln's own for all products of `code` beside the library's calls, where that is
/// not known: they are compiled at once, on all cores.
pub(super) fn measure(gpu: &Gpu, code: &StepCode) -> Result<()> {
    let mut candidates: Vec<Candidate<'_>> = Vec::new();
    let mut left: Vec<&CallKind> = code.calls.iter().map(|call| &call.kind).collect();
    while let Some(call) = left.pop() {
        let CallKind::Either { library, own, trial } = call else {
            continue;
        };
        left.extend(library.iter().chain(own));
        let (Some(trial), Some(own)) = (trial.as_ref().filter(|trial| !trial.always), own.last()) else {
            continue;
        };
        if offers(gpu, library)? != Offer::Tried {
            continue;
        }
        let found = Candidate::new(gpu, &code.functions, trial, library, own)?;
        let is_new = |found: &Candidate<'_>| {
            gpu.known_share(&found.key).is_none() && candidates.iter().all(|other| other.key != found.key)
        };
        candidates.extend(found.filter(is_new));
    }
    let sources: Vec<Source> = candidates.iter().map(|it| it.source.clone()).collect();
    let compiled = gpu.compiler().compile(&sources)?;
    for (candidate, compiled) in candidates.iter().zip(&compiled) {
        if let Some(share) = if_there_is_memory(candidate.measure(gpu, &compiled.image))? {
            gpu.keep_share(&candidate.key, share);
        }
    }
    Ok(())
}

/// The time of Kiln's own kernel as a part of the library's, as [`measure`] has found it; none if it is not
/// worth taking, or could not be tried.
fn own_share(
    gpu: &Gpu,
    functions: &[Function],
    trial: &Trial,
    library: &[CallKind],
    own: &CallKind,
) -> Result<Option<f32>> {
    let candidate = Candidate::new(gpu, functions, trial, library, own)?;
    let known = candidate.and_then(|candidate| gpu.known_share(&candidate.key));
    Ok(known.filter(|&share| share <= WORTH))
}

/// What was measured; none if there was no memory for operands to measure it on.
fn if_there_is_memory(measured: Result<f32>) -> Result<Option<f32>> {
    match measured {
        Ok(share) => Ok(Some(share)),
        Err(CudaError::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
