//! The target: each kernel becomes a graph of its own with the places of what it reads and writes.

use kiln_graph::{Graph, Op, Value};
use kiln_partition::Machine;
use rustc_hash::FxHashMap;

use super::policy::POLICY;
use super::program::{Piece, Program, ProgramKernel, Read, Whole};
use crate::error::CompileError;
use crate::plan::Place;
use crate::policy::Policy;
use crate::schedule::layout::Layouts;
use crate::schedule::{Buffer, Kernel, KernelKind};
use crate::target::{Emitted, Step, Target};

/// A target without a machine, with thresholds of its own.
#[derive(Clone, Debug)]
pub struct Stub {
    /// Its thresholds.
    pub policy: Policy,
}

impl Default for Stub {
    fn default() -> Self {
        Self { policy: POLICY }
    }
}

impl Target for Stub {
    /// Bytes of scratch memory.
    type Kernel = usize;
    type Code = Program;

    fn name(&self) -> &'static str {
        "stub"
    }

    fn fingerprint(&self) -> String {
        format!("{:?}", self.policy)
    }

    fn rates(&self) -> Machine {
        Machine::default()
    }

    fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Some kernels get scratch memory, which the program fills with noise, so that a live buffer in it
    /// would be found.
    fn kernel(&self, graph: &Graph, kernel: &Kernel, _: &Layouts) -> Result<usize, CompileError> {
        if let KernelKind::Library(node) = &kernel.kind
            && let Some(name) = outside(&graph.node(*node).op)
        {
            return Err(CompileError::Unsupported {
                target: self.name(),
                op: name,
                types: String::new(),
            });
        }
        Ok(match kernel.nodes.len() % 3 {
            0 => 0,
            rest => 100 * rest * kernel.reads.len(),
        })
    }

    fn scratch(&self, kernel: &usize) -> usize {
        *kernel
    }

    fn emit(&self, step: &Step<'_, usize>) -> Result<Emitted<Program>, CompileError> {
        let Step {
            graph,
            schedule,
            plan,
            ..
        } = *step;
        let kernels = schedule.kernels.iter().zip(step.kernels).zip(&plan.scratch);
        let kernels = kernels.map(|((kernel, &bytes), &offset)| {
            let mut made = Extract::new(step, kernel);
            made.kernel.scratch = (offset, bytes);
            made.finish()
        });
        let code = Program {
            kernels: kernels.collect::<Result<_, _>>()?,
            parameters: graph
                .parameters()
                .iter()
                .map(|&value| graph.ty(value).clone())
                .collect(),
            outputs: graph
                .outputs
                .iter()
                .map(|output| graph.ty(output.value).clone())
                .collect(),
            aliases: plan.aliases.clone(),
            arena_bytes: plan.arena_bytes,
            checks: step.checks.to_vec(),
            decided_after: schedule.checks_decided_after(graph),
        };
        let names = (0..schedule.kernels.len()).map(|number| format!("kernel_{number}"));
        Ok(Emitted {
            code,
            names: names.collect(),
        })
    }
}

/// A kernel's operations, taken out of the whole graph.
struct Extract<'a> {
    step: &'a Step<'a, usize>,
    source: &'a Kernel,
    kernel: ProgramKernel,
    /// Values of the whole graph that the kernel's graph has already.
    known: FxHashMap<Value, Value>,
}

impl<'a> Extract<'a> {
    fn new(step: &'a Step<'a, usize>, source: &'a Kernel) -> Self {
        Self {
            step,
            source,
            kernel: ProgramKernel::new(Graph::new("kernel")),
            known: FxHashMap::default(),
        }
    }

    fn place(&self, buffer: Buffer) -> Place {
        // A buffer without a place has no elements.
        let place = self.step.plan.places.get(&buffer);
        place.copied().unwrap_or(Place::Arena(0))
    }

    /// A value that the kernel reads becomes a parameter; the operations between are copied.
    fn value(&mut self, value: Value) -> Result<Value, CompileError> {
        if let Some(&known) = self.known.get(&value) {
            return Ok(known);
        }
        let graph = self.step.graph;
        let data = graph.def(value);
        let buffer = Buffer::Value(value);
        if self.source.reads.contains(&buffer) || matches!(data.op, Op::Parameter { .. }) {
            let own = self.kernel.graph.parameter(graph.ty(value).clone());
            self.known.insert(value, own);
            self.kernel.reads.push(Read {
                place: self.place(buffer),
                order: self.step.schedule.layouts.get(&value).cloned(),
            });
            return Ok(own);
        }
        if let Op::Scalar { index, dtype } = &data.op {
            let own = self.kernel.graph.scalar(*dtype);
            self.kernel.scalars.push(*index);
            self.known.insert(value, own);
            return Ok(own);
        }
        let inputs = data.inputs.iter().map(|&input| self.value(input));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let provenance = data.provenance.clone();
        let made = self.kernel.graph.add_node(data.op.clone(), &inputs, provenance);
        let made = made.map_err(CompileError::pass("stub"))?;
        self.known
            .extend(data.outputs.iter().copied().zip(made.iter().copied()));
        Ok(self.known[&value])
    }

    fn finish(mut self) -> Result<ProgramKernel, CompileError> {
        let (source, graph) = (self.source, self.step.graph);
        let nests = source.nests();
        for (nest, store) in nests
            .iter()
            .flat_map(|nest| nest.stores.iter().map(move |store| (nest, store)))
        {
            let own = self.value(store.value)?;
            self.kernel.graph.output(own, None);
            self.kernel.pieces.push(Piece {
                place: self.place(store.buffer),
                extents: nest.extents.clone(),
                index: store.index.clone(),
                position: store.position.clone(),
            });
        }
        if nests.is_empty() {
            for buffer in source.stored() {
                let value = buffer.value(graph);
                let own = self.value(value)?;
                self.kernel.graph.output(own, None);
                self.kernel.wholes.push(Whole {
                    place: self.place(buffer),
                    order: self.step.schedule.layouts.get(&value).cloned(),
                });
            }
        }
        Ok(self.kernel)
    }
}

/// The name of an operation that no kernel computes.
fn outside(op: &Op) -> Option<String> {
    match op {
        Op::Extern(op) => Some(op.name.clone()),
        Op::Collective(_) | Op::CollectiveWait => Some(op.name().to_owned()),
        _ => None,
    }
}
