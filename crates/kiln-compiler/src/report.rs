//! The report on a compiled step, for people: its kernels and the buffers they touch.
//!
//! The report is part of what is stored beside the shared object ([`crate::Contract`]), so that a step from
//! the disk cache can be explained, profiled and drawn without compiling it again.

use std::fmt;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use kiln_graph::op::{ConvDims, DotDims, Op};
use kiln_graph::{Graph, Node, Shape};

use crate::plan::{Place, Plan};
use crate::schedule::{Buffer, Kernel, Schedule};

/// A report on a kernel of a compiled step.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct KernelReport {
    /// Name of its (first) function.
    pub name: String,
    /// The operations computed, in order.
    pub nodes: Vec<FusedNode>,
    /// Bytes read and written, each buffer once.
    pub bytes: u64,
    /// Floating point operations of contractions, and one for each pointwise operation and element.
    pub flops: u64,
    /// Buffers read, by position in [`crate::Contract::buffers`].
    pub reads: Vec<u32>,
    /// Buffers written, likewise.
    pub writes: Vec<u32>,
    /// Working memory of the kernel itself: offset in the arena and bytes. Zero bytes if it needs none.
    pub scratch: (usize, usize),
}

impl KernelReport {
    /// The phase of most of its operations, as in the text form of graphs; the later one where two have as
    /// many.
    pub fn phase(&self) -> &'static str {
        let count = |phase: &&str| self.nodes.iter().filter(|node| node.phase == **phase).count();
        let phases = ["fwd", "bwd", "opt"].into_iter().filter(|phase| count(phase) > 0);
        phases.max_by_key(count).unwrap_or("-")
    }
}

/// An operation of the graph inside a kernel.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct FusedNode {
    /// Its number in the transformed graph.
    pub node: u32,
    /// Mnemonic of the primitive; the name of an operation that is kept whole.
    pub op: String,
    /// Type and shape of its first result.
    pub ty: String,
    /// The nodes it reads.
    pub inputs: Vec<u32>,
    /// The phase, as in the text form of graphs.
    pub phase: String,
    /// The recorded Burn operation, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Path of the Burn module it ran in, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Its share of the kernel's floating point operations.
    pub flops: u64,
    /// Elements of its results.
    pub elements: u64,
}

impl FusedNode {
    fn new(graph: &Graph, node: Node) -> Self {
        let data = graph.node(node);
        let text = |text: &Option<std::sync::Arc<str>>| text.as_deref().map(str::to_owned);
        Self {
            node: node.as_u32(),
            op: match &data.op {
                Op::Extern(op) => op.name.clone(),
                op => op.name().to_owned(),
            },
            ty: data
                .outputs
                .first()
                .map_or_else(String::new, |&value| graph.ty(value).to_string()),
            inputs: data
                .inputs
                .iter()
                .map(|&value| graph.value(value).node.as_u32())
                .collect(),
            phase: data.provenance.phase.name().to_owned(),
            operation: text(&data.provenance.operation),
            gradient_of: text(&data.provenance.gradient_of),
            location: text(&data.provenance.location),
            module: text(&data.provenance.module),
            flops: flops(graph, node),
            elements: data
                .outputs
                .iter()
                .map(|&value| graph.ty(value).numel() as u64)
                .sum(),
        }
    }
}

/// `mnemonic (phase operation gradient location)`, with what is known.
impl fmt::Display for FusedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.op)?;
        let gradient = self
            .gradient_of
            .as_ref()
            .map(|forward| format!("gradient of `{forward}`"));
        let words: Vec<&str> = [
            (self.phase != "-" && !self.phase.is_empty()).then_some(&*self.phase),
            self.operation.as_deref(),
            gradient.as_deref(),
            self.location.as_deref(),
        ]
        .into_iter()
        .flatten()
        .collect();
        if words.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", words.join(" "))
    }
}

/// Memory that kernels share.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct BufferReport {
    /// The value it holds, as in the text of the transformed graph, or `copy for output N`.
    pub name: String,
    /// Element type and shape.
    pub ty: String,
    /// Size.
    pub bytes: u64,
    /// Where it is.
    pub place: BufferPlace,
    /// The first and the last kernel that touch it.
    pub kernels: (u32, u32),
}

/// Where a buffer is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum BufferPlace {
    /// With the caller: tensor argument of this number.
    Input(u32),
    /// With the caller: output of this number.
    Output(u32),
    /// At this byte of the arena.
    Arena(usize),
}

/// The buffers of a scheduled and planned graph.
#[derive(Clone, Debug, Default)]
struct Buffers {
    /// In the order of the graph's values.
    list: Vec<BufferReport>,
    positions: FxHashMap<Buffer, u32>,
}

impl Buffers {
    /// Collects them from the kernels.
    fn new(graph: &Graph, schedule: &Schedule, plan: &Plan) -> Self {
        let mut touched: FxHashMap<Buffer, (u32, u32)> = FxHashMap::default();
        for (number, kernel) in schedule.kernels.iter().enumerate() {
            for &buffer in kernel.reads.iter().chain(&kernel.writes) {
                touched.entry(buffer).or_insert((number as u32, 0)).1 = number as u32;
            }
        }
        let mut order: Vec<(Buffer, (u32, u32))> = touched.into_iter().collect();
        order.sort_unstable_by_key(|&(buffer, _)| buffer);
        let positions = order.iter().zip(0..).map(|(&(buffer, _), at)| (buffer, at));
        let report = |&(buffer, kernels): &(Buffer, (u32, u32))| {
            let (name, value) = match buffer {
                Buffer::Value(value) => (value.to_string(), value),
                Buffer::Output(output) => (
                    format!("copy for output {output}"),
                    graph.outputs[output as usize].value,
                ),
            };
            let place = match plan.places.get(&buffer) {
                Some(Place::Input(index)) => BufferPlace::Input(*index),
                Some(Place::Output(index)) => BufferPlace::Output(*index),
                Some(Place::Arena(offset)) => BufferPlace::Arena(*offset),
                // The buffer is empty.
                None => BufferPlace::Arena(0),
            };
            let ty = graph.ty(value);
            BufferReport {
                name,
                ty: ty.to_string(),
                bytes: ty.bytes() as u64,
                place,
                kernels,
            }
        };
        Self {
            positions: positions.collect(),
            list: order.iter().map(report).collect(),
        }
    }

    /// The report on a kernel before its code has a name.
    fn describe(&self, graph: &Graph, kernel: &Kernel, scratch: (usize, usize)) -> KernelReport {
        let positions = |buffers: &[Buffer]| -> Vec<u32> {
            buffers.iter().map(|buffer| self.positions[buffer]).collect()
        };
        let nodes: Vec<FusedNode> = kernel
            .nodes
            .iter()
            .map(|&node| FusedNode::new(graph, node))
            .collect();
        let (reads, writes) = (positions(&kernel.reads), positions(&kernel.writes));
        let bytes = |buffer: &Buffer| buffer.bytes(graph) as u64;
        let touched = kernel.reads.iter().copied().chain(kernel.stored());
        KernelReport {
            name: String::new(),
            bytes: touched.map(|buffer| bytes(&buffer)).sum(),
            flops: nodes.iter().map(|node| node.flops).sum(),
            nodes,
            reads,
            writes,
            scratch,
        }
    }
}

/// The buffers of a step, and its kernels but for their names; `scratch` are the sizes of their working
/// memory.
pub fn describe(
    graph: &Graph,
    schedule: &Schedule,
    plan: &Plan,
    scratch: &[usize],
) -> (Vec<BufferReport>, Vec<KernelReport>) {
    let buffers = Buffers::new(graph, schedule, plan);
    let kernels = schedule.kernels.iter().zip(&plan.scratch).zip(scratch);
    let reports = kernels.map(|((kernel, &offset), &bytes)| buffers.describe(graph, kernel, (offset, bytes)));
    let reports = reports.collect();
    (buffers.list, reports)
}

/// Bytes of the arena in use while each kernel runs: memory that is handed on counts once.
pub fn arena_in_use(kernels: &[KernelReport], buffers: &[BufferReport]) -> Vec<u64> {
    let mut alive: Vec<Vec<(usize, usize)>> = kernels.iter().map(|kernel| vec![kernel.scratch]).collect();
    for buffer in buffers {
        if let BufferPlace::Arena(offset) = buffer.place {
            let (first, last) = buffer.kernels;
            for spans in &mut alive[first as usize..=last as usize] {
                spans.push((offset, buffer.bytes as usize));
            }
        }
    }
    let covered = |mut spans: Vec<(usize, usize)>| {
        spans.sort_unstable();
        let (mut bytes, mut end) = (0, 0);
        for (offset, length) in spans {
            let stop = offset + length;
            bytes += stop.saturating_sub(offset.max(end));
            end = end.max(stop);
        }
        bytes as u64
    };
    alive.into_iter().map(covered).collect()
}

/// Floating point operations of a node.
pub fn flops(graph: &Graph, node: Node) -> u64 {
    let data = graph.node(node);
    let out = data.outputs.first().map_or(0, |&v| graph.ty(v).numel() as u64);
    let shape = |at: usize| -> &Shape { graph.shape(data.inputs[at]) };
    let window = |conv: &ConvDims, kernel: &[usize], channels: usize| {
        let _ = conv;
        2 * (kernel.iter().product::<usize>() * channels) as u64
    };
    match &data.op {
        Op::DotGeneral(DotDims { a_contract, .. }) => {
            2 * out
                * a_contract
                    .iter()
                    .map(|&axis| shape(0)[axis] as u64)
                    .product::<u64>()
        }
        Op::Conv(conv) => out * window(conv, &shape(1)[2..], shape(1)[1]),
        Op::ConvInputGrad { conv, .. } => {
            graph.ty(data.inputs[0]).numel() as u64 * window(conv, &shape(1)[2..], shape(1)[1])
        }
        Op::ConvWeightGrad { conv, kernel } => {
            graph.ty(data.inputs[1]).numel() as u64 * window(conv, kernel, shape(0)[1] / conv.groups)
        }
        Op::Attention(_) | Op::AttentionGrad(_) => {
            let (q, k, v) = (shape(0), shape(1), shape(2));
            let products = 2 * (q[0] * q[1] * q[2] * k[2]) as u64 * (q[3] + v[3]) as u64;
            // The gradient recomputes the scores and has four products where the forward has two.
            if matches!(data.op, Op::Attention(_)) {
                products
            } else {
                products * 5 / 2
            }
        }
        Op::Reduce { .. } => graph.ty(data.inputs[0]).numel() as u64,
        op if op.is_pointwise() => out,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(offset: usize, bytes: u64, kernels: (u32, u32)) -> BufferReport {
        BufferReport {
            name: String::new(),
            ty: String::new(),
            bytes,
            place: BufferPlace::Arena(offset),
            kernels,
        }
    }

    #[test]
    fn memory_that_is_handed_on_counts_once() {
        let kernels = vec![KernelReport::default(); 3];
        let buffers = [
            buffer(0, 64, (0, 1)),
            buffer(0, 64, (1, 2)),
            buffer(64, 128, (1, 1)),
        ];
        assert_eq!(arena_in_use(&kernels, &buffers), [64, 192, 64]);
    }
}
