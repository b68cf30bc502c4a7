//! What a step needs before it can be called: its code, from the cache or the compiler; the machine code of
//! its kernels; what the libraries take for its products and convolutions; the other ranks.
//!
//! The disk cache is asked for the step of a graph before anything is compiled: the key is the graph's text
//! without names, the phases of its nodes, the options and the device. The cache stores the step's code with
//! its contract; machine code and the algorithms of products have caches of their own. So a second process
//! compiles nothing and measures nothing.

use std::sync::Arc;
use std::time::Duration;

use kiln_compiler::{Contract, Options, compile, identity, numbered};
use kiln_graph::Graph;

use super::bound::Chosen;
use super::error::StepError;
use super::gpu::Gpu;
use super::{either, guards};
use crate::build::{Cubin, Key, Source, Store};
use crate::code::{CallKind, Function, Pointer, StepCall, StepCode};
use crate::error::CudaError;
use crate::family::Backend;
use crate::ranks::Ranks;
use crate::runtime::{Kernel, Module};
use crate::target::CudaTarget;

/// The key of a graph's code in the cache.
fn code_key(graph: &Graph, options: &Options, target: &CudaTarget) -> Key {
    let fields = identity::fields(graph, options, target);
    let mut parts: Vec<Vec<u8>> = vec![b"step".to_vec()];
    for (name, value) in fields {
        parts.push(name.as_bytes().to_vec());
        parts.push(value);
    }
    Key::of(parts)
}

/// What the compiler made of a graph before, if the cache has it.
pub(crate) fn stored(
    graph: &Graph,
    options: &Options,
    target: &CudaTarget,
    store: &Store,
) -> Option<(StepCode, Contract)> {
    let stored = store.get(&code_key(graph, options, target))?;
    let (code, contract): (StepCode, Contract) = serde_json::from_slice(&stored.content).ok()?;
    Some((code, contract.with_lines_of(graph)))
}

/// What the compiler made of a graph, from the cache or new.
pub(crate) fn compiled(
    graph: &Graph,
    options: &Options,
    target: &CudaTarget,
    store: &Store,
    stages: &mut Vec<(&'static str, Duration)>,
) -> Result<(StepCode, Contract, bool), StepError> {
    let description = |error: serde_json::Error| StepError::Description {
        name: graph.name.clone(),
        reason: error.to_string(),
    };
    if options.debug.is_none()
        && let Some((code, contract)) = stored(graph, options, target, store)
    {
        return Ok((code, contract, true));
    }
    let step = compile(&numbered(graph), options, target)?;
    stages.extend_from_slice(&step.times);
    let contract = step.contract();
    if options.debug.is_none() {
        let bytes = serde_json::to_vec(&(&step.code, &contract)).map_err(description)?;
        store.put(&code_key(graph, options, target), &bytes, &graph.name, "");
    }
    Ok((step.code, contract.with_lines_of(graph), false))
}

impl Backend for Arc<Gpu> {
    fn compile(&self, sources: &[Source]) -> Result<Vec<Cubin>, CudaError> {
        self.compiler().compile(sources)
    }

    fn has(&self, source: &Source) -> bool {
        self.compiler().has(source)
    }

    fn store(&self) -> &Store {
        Gpu::store(self)
    }

    fn measure(&self, code: &StepCode) -> Result<(), CudaError> {
        either::measure(self, code)
    }

    fn takes(&self, functions: &[Function], either: &CallKind) -> Result<bool, CudaError> {
        either::takes(self, functions, either)
    }
}

/// The other ranks, if the step has collectives.
pub(super) fn ranks(code: &StepCode, gpu: &Gpu) -> Result<Option<Ranks>, CudaError> {
    let Some(needed) = code.ranks() else {
        return Ok(None);
    };
    let known = |call: &StepCall| match &call.kind {
        CallKind::Across { across, .. } => across.ranks == needed && across.shape().is_some(),
        _ => true,
    };
    match gpu.ranks() {
        Some(ranks) if ranks.size() == needed && code.calls.iter().all(known) => Ok(Some(ranks.clone())),
        found => Err(CudaError::NotConnected {
            device: gpu.device().ordinal(),
            needed,
            connected: found.map_or(1, Ranks::size),
        }),
    }
}

/// How the libraries compute the calls of a step.
pub(super) fn choices(code: &StepCode, gpu: &Gpu) -> Result<Vec<Chosen>, CudaError> {
    let choice = |call: &StepCall| {
        Ok(match &call.kind {
            CallKind::Product {
                product, workspace, ..
            } => Chosen::Product(gpu.choice(product, workspace.1)?),
            CallKind::Convolution {
                convolution,
                workspace,
                ..
            } => match gpu.plan(convolution, workspace.1)? {
                Some(plan) => Chosen::Convolution(plan),
                None => unreachable!("the library took the convolution when the step was decided"),
            },
            _ => Chosen::Nothing,
        })
    };
    code.calls.iter().map(choice).collect()
}

/// Names the kernels that the library refused after the functions that compute them instead. What these copy
/// first gives no name.
pub(crate) fn name_own_kernels(code: &StepCode, contract: &mut Contract, refused: &[u32]) {
    let own = || code.calls.iter().filter(|call| refused.contains(&call.kernel));
    let template = |call: &&StepCall| match &call.kind {
        CallKind::Launch { arguments, .. } => {
            let copied = |argument: &Pointer| matches!(argument, Pointer::Copied(..));
            arguments.iter().any(copied)
        }
        _ => false,
    };
    for call in own().rev().chain(own().filter(template)) {
        let name = match &call.kind {
            CallKind::Launch { function, .. } => code.functions[*function].name.clone(),
            CallKind::Product { product, .. } => format!("product {product}"),
            _ => continue,
        };
        if let Some(kernel) = contract.kernels.get_mut(call.kernel as usize) {
            kernel.name = name;
        }
    }
}

/// Compiles and loads the kernels of a step, and those of its guards.
pub(super) fn load(
    code: &StepCode,
    contract: &Contract,
    gpu: &Gpu,
) -> Result<(Vec<Kernel>, Vec<Kernel>), CudaError> {
    let (mut sources, programs) = code.sources();
    let guards = guards::source(code);
    sources.extend(guards.clone());
    let cubins: Vec<Cubin> = gpu.compiler().compile(&sources)?;
    let modules = sources.iter().zip(&cubins);
    let modules: Vec<Module> = modules
        .map(|(source, cubin)| Module::load(gpu.device(), &source.name, &cubin.image))
        .collect::<Result<_, _>>()?;
    let kernels = code.functions.iter().zip(programs);
    let kernels = kernels.map(|(function, program)| modules[program].kernel(&function.name));
    let kernels = kernels.collect::<Result<_, _>>()?;
    let guards = match guards {
        Some(_) => (0..contract.checks.len() as u32)
            .map(|number| modules[modules.len() - 1].kernel(&guards::name(number)))
            .collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    Ok((kernels, guards))
}
