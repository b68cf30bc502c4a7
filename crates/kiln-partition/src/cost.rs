//! The cost model: what moving and computing cost, in picoseconds of a machine.
//!
//! Moving a byte and computing an element both take time, so keeping a value (writing and reading it) and
//! computing it again can be compared. The model is deliberately small: a few rates of a [`Machine`], and
//! operation counts from shapes. Costs are whole picoseconds, so that sums do not depend on their order and
//! equal costs are exactly equal.

use kiln_graph::op::{BinaryOp, UnaryOp};
use kiln_graph::{DType, Graph, NodeData, Op, Value};

use crate::recompute::Recompute;

/// The rates of a machine that the choice between keeping and recomputing depends on.
///
/// [`Machine::default`] is the project's reference machine (two cores with AVX-512, no AMX); measure your own
/// by timing a copy, a matrix product and a loop of each kind.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Machine {
    /// Bytes read or written per second, all cores streaming.
    pub bytes_per_second: f64,
    /// Floating point operations per second in matrix products and convolutions (a multiply-add is two).
    pub flops_per_second: f64,
    /// The same for operands of bf16.
    pub bf16_flops_per_second: f64,
    /// The same for operands of f16.
    pub f16_flops_per_second: f64,
    /// Elements per second through one simple operation (add, compare, select) on data in registers.
    pub simple_per_second: f64,
    /// Elements per second through one transcendental function (exp, tanh, erf) on data in registers.
    pub special_per_second: f64,
    /// Random elements per second. The cost of a draw is counted and reported, but does not decide
    /// anything: draws are never kept.
    pub random_per_second: f64,
    /// The share of a fused kernel's simple arithmetic that takes no time, because the kernel waits for
    /// memory meanwhile; from 0 to 1. Transcendental functions and random numbers are not hidden: a kernel
    /// that computes one waits for it, not for memory.
    pub hidden: f64,
    /// Seconds of a kernel that has next to nothing to do. The backward pass runs one for a small value that
    /// it computes again: such are statistics of channels, which every pixel of a picture reads.
    pub launch_seconds: f64,
}

/// A value is small if moving it takes less than this part of a launch: results of elementwise kernels, which
/// their readers compute again without another kernel, are not.
const SMALL: u64 = 32;

impl Default for Machine {
    /// Two threads of the reference machine, an x86-64 server core with AVX-512 and AMX. Measured: a sum of
    /// arrays of 16 MiB, products of 640 x 640, chains of 64 simple operations on arrays of 512 KiB, sums of
    /// random numbers.
    fn default() -> Self {
        Self {
            bytes_per_second: 54e9,
            flops_per_second: 300e9,
            // Products of tiles.
            bf16_flops_per_second: 1.6e12,
            // Widened to f32.
            f16_flops_per_second: 300e9,
            simple_per_second: 30e9,
            // Alone an exponential does 5.6e9, a tangent 2.8e9, an error function 2e9; but kernels that
            // compute one wait for memory as well. Whole steps are as fast with 6e9 as with 1.5e9, and those
            // of vit_small in f32 keep a sixth less.
            special_per_second: 6e9,
            random_per_second: 3.5e9,
            hidden: 0.8,
            // Threads that wait for work anyway take up the next loop.
            launch_seconds: 0.0,
        }
    }
}

/// `amount / rate` seconds in picoseconds. A rate that is not positive makes the work free rather than
/// infinite.
fn picoseconds(amount: f64, rate: f64) -> u64 {
    if rate > 0.0 {
        (amount / rate * 1e12).round() as u64
    } else {
        0
    }
}

impl Machine {
    /// Time to move `bytes` to or from memory, in picoseconds.
    pub fn moved(&self, bytes: u64) -> u64 {
        picoseconds(bytes as f64, self.bytes_per_second)
    }

    /// Time of the kernel that makes the results of `node`, of so many bytes, if they are small; for others
    /// 0, in picoseconds. What is as cheap as a load is computed for each element of a reader.
    pub(crate) fn launch(&self, node: &NodeData, bytes: u64) -> u64 {
        let launch = (self.launch_seconds * 1e12).round() as u64;
        let is_work = match &node.op {
            Op::Unary(op) => is_special(*op),
            Op::Binary(op) => {
                matches!(
                    op,
                    BinaryOp::Div | BinaryOp::Pow | BinaryOp::Atan2 | BinaryOp::Rem
                )
            }
            Op::Reduce { .. } => true,
            _ => false,
        };
        if is_work && self.moved(bytes) < launch / SMALL {
            launch
        } else {
            0
        }
    }

    /// Time of the arithmetic of `node` alone, in picoseconds: its operands and results are in registers or
    /// caches.
    pub fn arithmetic(&self, graph: &Graph, node: &NodeData) -> u64 {
        let simple = |count: f64| picoseconds(count, self.simple_per_second);
        let special = |count: f64| picoseconds(count, self.special_per_second);
        let out = node
            .outputs
            .first()
            .map_or(0, |&value| graph.shape(value).numel()) as f64;
        let operand = node.inputs.first().map_or(0, |&value| graph.shape(value).numel()) as f64;
        match &node.op {
            Op::Unary(op) if is_special(*op) => special(out),
            Op::Unary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => simple(out),
            Op::Binary(op) => {
                use BinaryOp::*;
                match op {
                    Pow | Atan2 => special(2.0 * out),
                    Rem => special(out),
                    Div => simple(4.0 * out),
                    _ => simple(out),
                }
            }
            Op::Random { .. } => picoseconds(out, self.random_per_second),
            Op::Gather { .. } | Op::IndexSelect { .. } => simple(2.0 * out),
            Op::Reduce { .. } | Op::Cumulative { .. } | Op::ArgReduce { .. } => simple(operand),
            Op::MaxPool(window)
            | Op::MaxPoolWithIndices { window, .. }
            | Op::AvgPool { window, .. }
            | Op::AvgPoolGrad { window, .. } => {
                simple(operand.max(out) * window.size.iter().product::<usize>() as f64)
            }
            Op::Scatter { .. } | Op::IndexPut { .. } | Op::MaxPoolGrad { .. } => {
                simple(4.0 * operand.max(out))
            }
            Op::Sort { axis, .. } | Op::TopK { axis, .. } => {
                let extent = graph.shape(node.inputs[0])[*axis].max(2) as f64;
                special(operand * extent.log2())
            }
            Op::DotGeneral(_)
            | Op::Conv(_)
            | Op::ConvInputGrad { .. }
            | Op::ConvWeightGrad { .. }
            | Op::Attention(_)
            | Op::AttentionGrad(_) => {
                let rate = match graph.dtype(node.inputs[0]) {
                    DType::BF16 => self.bf16_flops_per_second,
                    DType::F16 => self.f16_flops_per_second,
                    _ => self.flops_per_second,
                };
                picoseconds(flops(graph, node), rate)
            }
            _ => 0,
        }
    }

    /// Time of `node` as a kernel of its own: arithmetic, or moving operands and results if that takes
    /// longer.
    pub fn kernel(&self, graph: &Graph, node: &NodeData) -> u64 {
        let moved = node.inputs.iter().chain(&node.outputs);
        let moved = self.moved(moved.map(|&value| bytes(graph, value)).sum());
        self.arithmetic(graph, node).max(moved)
    }

    /// Time of computing `node` again in the backward pass, given that its operands are there.
    pub fn again(&self, graph: &Graph, node: &NodeData) -> u64 {
        match Recompute::of(&node.op) {
            Recompute::Free | Recompute::Never => 0,
            Recompute::Fused => {
                // A recomputed reduction or look-up reads its operand once more. Half of the operand is
                // still in a cache, because the kernel that wants a row's statistics reads the row as well.
                let again = match &node.op {
                    Op::Reduce { .. } => self.moved(bytes(graph, node.inputs[0])) / 2,
                    Op::Gather { .. } | Op::IndexSelect { .. } => self.moved(bytes(graph, node.outputs[0])),
                    _ => 0,
                };
                let visible = if is_slow(&node.op) {
                    1.0
                } else {
                    1.0 - self.hidden.clamp(0.0, 1.0)
                };
                (self.arithmetic(graph, node) as f64 * visible).round() as u64 + again
            }
            Recompute::Kernel | Recompute::Expensive => self.kernel(graph, node),
        }
    }
}

/// Size of a value in bytes.
pub(crate) fn bytes(graph: &Graph, value: Value) -> u64 {
    graph.ty(value).bytes() as u64
}

/// Whether arithmetic outweighs the traffic of a kernel that reads an operand and computes this.
fn is_slow(op: &Op) -> bool {
    match op {
        Op::Unary(op) => is_special(*op),
        Op::Binary(op) => matches!(op, BinaryOp::Pow | BinaryOp::Atan2 | BinaryOp::Rem),
        Op::Random { .. } => true,
        _ => false,
    }
}

fn is_special(op: UnaryOp) -> bool {
    !matches!(
        op,
        UnaryOp::Neg
            | UnaryOp::Abs
            | UnaryOp::Sign
            | UnaryOp::Not
            | UnaryOp::Floor
            | UnaryOp::Ceil
            | UnaryOp::Round
            | UnaryOp::Trunc
            | UnaryOp::IsNan
            | UnaryOp::IsInf
    )
}

/// Floating point operations of a contraction; 0 for other operations.
pub fn flops(graph: &Graph, node: &NodeData) -> f64 {
    let numel = |value: Value| graph.shape(value).numel() as f64;
    match &node.op {
        Op::DotGeneral(dims) => {
            let a = graph.shape(node.inputs[0]);
            let depth: usize = dims.a_contract.iter().map(|&axis| a[axis]).product();
            2.0 * numel(node.outputs[0]) * depth as f64
        }
        Op::Conv(_) => {
            // w is [o, c / groups, k..]: each output element needs the multiplications of one output
            // channel.
            let w = graph.shape(node.inputs[1]);
            2.0 * numel(node.outputs[0]) * numel(node.inputs[1]) / w[0].max(1) as f64
        }
        Op::ConvInputGrad { .. } => {
            let w = graph.shape(node.inputs[1]);
            2.0 * numel(node.inputs[0]) * numel(node.inputs[1]) / w[0].max(1) as f64
        }
        Op::ConvWeightGrad { .. } => {
            let w = graph.shape(node.outputs[0]);
            2.0 * numel(node.inputs[1]) * numel(node.outputs[0]) / w[0].max(1) as f64
        }
        Op::Attention(_) | Op::AttentionGrad(_) => {
            let [q, k, v] = [0, 1, 2].map(|i| graph.shape(node.inputs[i]));
            let scores = (q[0] * q[1] * q[2] * k[2]) as f64;
            let products = 2.0 * scores * (q[3] + v[3]) as f64;
            // The gradient recomputes the scores and has four products where the forward has two.
            if matches!(node.op, Op::Attention(_)) {
                products
            } else {
                2.5 * products
            }
        }
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_last(text: &str) -> f64 {
        let graph = Graph::parse(text).expect("well formed");
        flops(&graph, graph.nodes().next_back().expect("a node").1)
    }

    #[test]
    fn flops_are_two_for_each_multiply_add() {
        let product = "graph @g {
  %a = parameter 0 : f32[3,5,7]
  %b = parameter 1 : f32[3,7,2]
  %c = dot_general %a, %b {a_batch=[0], b_batch=[0], a_contract=[2], b_contract=[1]} : f32[3,5,2]
  return %c
}";
        assert_eq!(of_last(product), 2.0 * (3 * 5 * 2 * 7) as f64);
        // Forward, input gradient and weight gradient of one convolution do the same multiplications (without
        // padding).
        let w = [6.0, 2.0, 3.0, 3.0];
        let outputs = (2 * 6 * 8 * 8) as f64;
        let expected = 2.0 * outputs * w[1] * w[2] * w[3];
        let head = "graph @g {
  %x = parameter 0 : f32[2,4,10,10]
  %w = parameter 1 : f32[6,2,3,3]
  %dy = parameter 2 : f32[2,6,8,8]
";
        let attributes = "stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=2";
        for line in [
            format!("%r = conv %x, %w {{{attributes}}} : f32[2,6,8,8]"),
            format!("%r = conv_input_grad %dy, %w {{{attributes}, input=[10,10]}} : f32[2,4,10,10]"),
            format!("%r = conv_weight_grad %x, %dy {{{attributes}, kernel=[3,3]}} : f32[6,2,3,3]"),
        ] {
            assert_eq!(
                of_last(&format!("{head}  {line}\n  return %r\n}}")),
                expected,
                "{line}"
            );
        }
    }
}
