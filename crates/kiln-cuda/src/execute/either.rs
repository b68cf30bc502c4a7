//! Which side of a call that has two is taken on this device.

use std::sync::Arc;

use super::gpu::Gpu;
use crate::build::Key;
use crate::code::{CallKind, Function, Pointer, Trial};
use crate::error::Result;
use crate::products::{Product, random, time_runs};
use crate::runtime::{Arguments, Launch, Module};

/// Runs of a kernel of Kiln's own that are timed together at most, as many as of the library's.
const RUNS: u32 = 10;

/// Whether the library's side of `either` is taken.
///
/// A product goes to the faster of cuBLASLt and Kiln's own kernel. A convolution that is a product of matrices goes
/// to the faster of cuDNN and that; Kiln's own tiles are only for convolutions that cuDNN refuses.
pub(super) fn takes(gpu: &Gpu, functions: &[Function], either: &CallKind) -> Result<bool> {
    let CallKind::Either { library, own, trial } = either else {
        return Ok(true);
    };
    if let Some(trial) = trial {
        return match (&library[..], &own[..]) {
            ([product], [own]) if !trial.always => {
                Ok(product_time(gpu, functions, product)? <= own_time(gpu, functions, trial, own)?)
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
            let [library] = &library[..] else {
                return Ok(f32::INFINITY);
            };
            let library = product_time(gpu, functions, library)?;
            let own = match &own[..] {
                [own] => own_time(gpu, functions, trial, own)?,
                _ => f32::INFINITY,
            };
            Ok(library.min(own))
        }
        _ => Ok(f32::INFINITY),
    }
}

/// Microseconds of the product by Kiln's own kernel: known, on disk, or measured now.
fn own_time(gpu: &Gpu, functions: &[Function], trial: &Trial, own: &CallKind) -> Result<f32> {
    let CallKind::Launch {
        function,
        grid,
        shared_bytes,
        arguments,
    } = own
    else {
        return Ok(f32::INFINITY);
    };
    let product = &trial.product;
    let text = &functions[*function].text;
    let source = crate::build::Source {
        name: "trial".into(),
        text: format!("{}{}", crate::kernels::PRELUDE, text.source("trial", false)),
    };
    let description = format!("{product:?} {grid:?} {}", source.text);
    let key = Key::of(&["own product", &gpu.device().description().name, &description]);
    gpu.measured(&key, || {
        let stream = gpu.stream();
        let compiled = gpu.compiler().compile(std::slice::from_ref(&source))?;
        let module = Module::load(gpu.device(), &source.name, &compiled[0].image)?;
        let memory = Memory::new(gpu, product)?;
        let mut given = Arguments::new();
        let mut operands = [&memory.left, &memory.right].into_iter();
        for argument in arguments {
            given = match argument {
                Pointer::Matrix(_, boxes) => match operands.next() {
                    Some(operand) => given.matrix(gpu.device(), operand, 0, boxes)?,
                    None => given,
                },
                _ => given.memory(&memory.result, 0),
            };
        }
        let launch = Launch {
            kernel: module.kernel(&source.name)?,
            grid: *grid,
            block: [text.threads, 1, 1],
            shared_bytes: *shared_bytes,
            arguments: given,
        };
        // SAFETY: the kernel computes this product, from operands and into a result of its sizes.
        time_runs(stream, RUNS, None, || unsafe { stream.launch(&launch) })
    })
}

/// Memory to try a product on.
struct Memory {
    left: Arc<crate::runtime::Storage>,
    right: Arc<crate::runtime::Storage>,
    result: Arc<crate::runtime::Storage>,
}

impl Memory {
    fn new(gpu: &Gpu, product: &Product) -> Result<Self> {
        let stream = gpu.stream();
        Ok(Self {
            left: random(stream, product.left_bytes(), product.left.number)?,
            right: random(stream, product.right_bytes(), product.right.number)?,
            result: random(stream, product.result_bytes(), product.result.number)?,
        })
    }
}
