//! Which side of a call that has two is taken on this device.

use std::sync::Arc;

use super::gpu::Gpu;
use crate::build::{Key, Source};
use crate::code::{CallKind, Function, FunctionText, Pointer, StepCode, Trial};
use crate::error::{CudaError, Result};
use crate::kernels::PRELUDE;
use crate::products::{random, time_runs};
use crate::runtime::{Arguments, Launch, Module, Storage};

/// Runs of a kernel of Kiln's own that are timed together at most, as many as of the library's.
const RUNS: u32 = 10;
/// What a kernel is called while it is timed.
const NAME: &str = "trial";

/// Whether the library's side of `either` is taken.
///
/// A product goes to the faster of cuBLASLt and Kiln's own kernel. A convolution that is a product of
/// matrices goes to the faster of cuDNN and that; Kiln's own tiles are only for convolutions that cuDNN
/// refuses.
pub(super) fn takes(gpu: &Gpu, functions: &[Function], either: &CallKind) -> Result<bool> {
    let CallKind::Either { library, own, trial } = either else {
        return Ok(true);
    };
    if let Some(trial) = trial {
        return match &own[..] {
            [own] if !trial.always => {
                Ok(products_time(gpu, functions, library)? <= own_time(gpu, functions, trial, own))
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

/// Microseconds of a product, on the faster side if it has two.
fn product_time(gpu: &Gpu, functions: &[Function], call: &CallKind) -> Result<f32> {
    match call {
        CallKind::Product {
            product, workspace, ..
        } => Ok(gpu.choice(product, workspace.1)?.microseconds),
        CallKind::Either {
            library,
            own,
            trial: Some(trial),
        } => {
            let library = products_time(gpu, functions, library)?;
            let own = match &own[..] {
                [own] => own_time(gpu, functions, trial, own),
                _ => f32::INFINITY,
            };
            Ok(library.min(own))
        }
        _ => Ok(f32::INFINITY),
    }
}

/// A product's own kernel, with what its time is kept under.
struct Candidate<'a> {
    trial: &'a Trial,
    text: &'a FunctionText,
    grid: [u32; 3],
    shared_bytes: u32,
    arguments: &'a [Pointer],
    source: Source,
    key: Key,
}

impl<'a> Candidate<'a> {
    fn new(gpu: &Gpu, functions: &'a [Function], trial: &'a Trial, own: &'a CallKind) -> Option<Self> {
        let CallKind::Launch {
            function,
            grid,
            shared_bytes,
            arguments,
        } = own
        else {
            return None;
        };
        let text = &functions[*function].text;
        let source = Source {
            name: NAME.into(),
            text: format!("{PRELUDE}{}", text.source(NAME, false)),
        };
        let description = format!("{:?} {grid:?} {}", trial.product, source.text);
        Some(Self {
            trial,
            text,
            grid: *grid,
            shared_bytes: *shared_bytes,
            arguments,
            key: Key::of(&["own product", &gpu.device().description().name, &description]),
            source,
        })
    }

    /// Microseconds of the product by this kernel, whose machine code is `image`.
    fn measure(&self, gpu: &Gpu, image: &[u8]) -> Result<f32> {
        let stream = gpu.stream();
        let module = Module::load(gpu.device(), NAME, image)?;
        // Kept until the last run is over.
        let mut memory: Vec<Arc<Storage>> = Vec::new();
        let mut given = Arguments::new();
        for argument in self.arguments {
            let (bytes, number) = match argument {
                Pointer::Matrix(_, boxes) => (boxes.bytes(), boxes.number),
                _ => (
                    self.trial.product.result_bytes(),
                    self.trial.product.result.number,
                ),
            };
            let own = random(stream, bytes, number)?;
            given = match argument {
                Pointer::Matrix(_, boxes) => given.matrix(gpu.device(), &own, 0, boxes)?,
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
        // SAFETY: the kernel computes this product, from operands and into a result of its sizes.
        time_runs(stream, RUNS, None, || unsafe { stream.launch(&launch) })
    }
}

/// Measures the kernels of Kiln's own for all products of `code` whose times are not known: they are compiled
/// at once, on all cores.
pub(super) fn measure(gpu: &Gpu, code: &StepCode) -> Result<()> {
    let mut candidates: Vec<Candidate<'_>> = Vec::new();
    let mut left: Vec<&CallKind> = code.calls.iter().map(|call| &call.kind).collect();
    while let Some(call) = left.pop() {
        let CallKind::Either { library, own, trial } = call else {
            continue;
        };
        left.extend(library.iter().chain(own));
        let (Some(trial), [own]) = (trial, &own[..]) else {
            continue;
        };
        let found = Candidate::new(gpu, &code.functions, trial, own).filter(|_| !trial.always);
        let is_new = |found: &Candidate<'_>| {
            gpu.known_time(&found.key).is_none() && candidates.iter().all(|other| other.key != found.key)
        };
        candidates.extend(found.filter(is_new));
    }
    let sources: Vec<Source> = candidates.iter().map(|it| it.source.clone()).collect();
    let compiled = gpu.compiler().compile(&sources)?;
    for (candidate, compiled) in candidates.iter().zip(&compiled) {
        if let Some(time) = if_there_is_memory(candidate.measure(gpu, &compiled.image))? {
            gpu.keep_time(&candidate.key, time);
        }
    }
    Ok(())
}

/// Microseconds of the product by Kiln's own kernel, as [`measure`] has found them; one that could not be tried is
/// not taken.
fn own_time(gpu: &Gpu, functions: &[Function], trial: &Trial, own: &CallKind) -> f32 {
    let candidate = Candidate::new(gpu, functions, trial, own);
    let known = candidate.and_then(|candidate| gpu.known_time(&candidate.key));
    known.unwrap_or(f32::INFINITY)
}

/// The time; none if there was no memory for operands to measure it on.
fn if_there_is_memory(measured: Result<f32>) -> Result<Option<f32>> {
    match measured {
        Ok(time) => Ok(Some(time)),
        Err(CudaError::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
