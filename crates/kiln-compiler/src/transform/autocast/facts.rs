//! What autocast knows of each node and value before it changes anything.

use cranelift_entity::SecondaryMap;
use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, Node, NodeData, Phase, Users, Value};
use rustc_hash::FxHashSet;

use super::factors::factors;
use super::report::Reason;

/// The facts that the pass decides from.
pub(super) struct Facts<'a> {
    graph: &'a Graph,
    users: Users,
    /// The type of 16 bits.
    narrow_type: DType,
    /// Whether gradients of convolutions' weights are of 16 bits.
    narrow_gradients: bool,
    /// Values that readers behind the forward pass multiply by.
    factors: SecondaryMap<Value, bool>,
    /// Contractions that will read 16 bits.
    narrowed: SecondaryMap<Node, bool>,
    /// Values that only the optimizer phase and the step's outputs depend on, apart from contractions.
    only_updates: SecondaryMap<Value, bool>,
    /// Values that a contraction of 16 bits made, and the results of moving, pooling and pointwise
    /// operations on them.
    from_products: SecondaryMap<Value, bool>,
    /// Nodes that contract 16 bits, or that lead to one that does in the same pass.
    leads: SecondaryMap<Node, bool>,
    /// The number of kernels that run before a node, on the longest way to it.
    before: SecondaryMap<Node, u32>,
    after: SecondaryMap<Node, u32>,
    /// The number of sums over a batch, of more than a row, on the longest way to a value.
    sums: SecondaryMap<Value, u32>,
    /// Values with elements that may be numbers which 16 bits make infinite: constants, and what follows from
    /// these by a choice, a sum or a product.
    beyond: SecondaryMap<Value, bool>,
    /// What pointwise operations behind the forward pass make of its values alone, and gradients are
    /// multiplied by.
    formulas: SecondaryMap<Value, bool>,
    /// Arguments, and what pointwise operations behind the forward pass make of them on the way to an output:
    /// parameters and the state of an optimizer, where the phases do not tell.
    state: SecondaryMap<Value, bool>,
}

impl<'a> Facts<'a> {
    pub(super) fn new(
        graph: &'a Graph,
        narrow_type: DType,
        narrow_gradients: bool,
        narrow_factors: bool,
    ) -> Self {
        let users = graph.users();
        let factors = match narrow_factors {
            true => factors(graph, &users),
            false => SecondaryMap::new(),
        };
        let mut facts = Self {
            graph,
            users,
            narrow_type,
            narrow_gradients,
            factors,
            narrowed: SecondaryMap::new(),
            only_updates: SecondaryMap::new(),
            from_products: SecondaryMap::new(),
            leads: SecondaryMap::new(),
            before: SecondaryMap::new(),
            after: SecondaryMap::new(),
            sums: SecondaryMap::new(),
            beyond: SecondaryMap::new(),
            formulas: SecondaryMap::new(),
            state: SecondaryMap::new(),
        };
        for (node, data) in graph.nodes() {
            facts.narrowed[node] =
                data.op.is_contraction() && graph.dtype(data.inputs[0]) == DType::F32 && takes_part(data);
            facts.follow_products(node, data);
            facts.count_kernels(node, data);
            facts.count_sums(data);
            facts.follow_large_numbers(data);
            facts.follow_formulas(data);
            facts.follow_state(data);
        }
        for (node, data) in graph.nodes().rev() {
            facts.follow_to_products(node, data);
            facts.follow_to_state(data);
            for &value in &data.outputs {
                facts.only_updates[value] = facts.users.of(value).iter().all(|&user| {
                    let data = graph.node(user);
                    data.provenance.phase == Phase::Optimizer
                        || !data.op.is_contraction()
                            && data.outputs.iter().all(|&made| facts.only_updates[made])
                });
            }
        }
        facts
    }

    /// Whether there is anything to do.
    pub(super) fn has_work(&self) -> bool {
        self.graph.nodes().any(|(node, _)| self.narrowed[node])
    }

    /// Whether `node` is a contraction that will read 16 bits.
    pub(super) fn is_narrowed(&self, node: Node) -> bool {
        self.narrowed[node]
    }

    /// Whether `node` is a pooling that will work on 16 bits.
    pub(super) fn is_narrow_pool(&self, node: Node) -> bool {
        let data = self.graph.node(node);
        is_pool(&data.op) && takes_part(data) && self.from_products[data.inputs[0]]
    }

    /// Why the result `value` of a contraction of 16 bits is f32, if it is.
    pub(super) fn wide_result(&self, value: Value) -> Option<Reason> {
        let data = self.graph.def(value);
        if matches!(data.op, Op::Attention(_) | Op::AttentionGrad(_)) {
            return None;
        }
        if self.only_updates[value] {
            if self.narrow_gradients && matches!(data.op, Op::ConvWeightGrad { .. }) {
                return None;
            }
            return Some(Reason::Update);
        }
        let mut readers = Readers::default();
        self.readers(value, &mut readers);
        if readers.is_output {
            return Some(Reason::Output);
        }
        let wants_f32 = |&(node, _): &(Node, Value)| is_library(&self.graph.node(node).op);
        let narrow = readers
            .list
            .iter()
            .any(|&(node, read)| self.wants_16_bits(node, read));
        (!narrow && readers.list.iter().any(wants_f32)).then_some(Reason::Whole)
    }

    /// Why `value`, which a loop nest makes, is rounded to 16 bits, if it is.
    pub(super) fn rounded(&self, value: Value) -> Option<Reason> {
        let data = self.graph.def(value);
        let in_nest = data.op.is_pointwise() || matches!(data.op, Op::Gather { .. } | Op::IndexSelect { .. });
        let floats = self.graph.dtype(value) == DType::F32;
        let updates = self.only_updates[value] || self.state[value];
        if !in_nest || !floats || !takes_part(data) || updates {
            return None;
        }
        let mut readers = Readers::default();
        self.readers(value, &mut readers);
        if readers
            .list
            .iter()
            .any(|&(node, read)| self.wants_16_bits(node, read))
        {
            return Some(Reason::Operand);
        }
        let node = self.graph.value(value).node;
        let after_forward = data.provenance.phase.is_after_forward();
        let far = readers.list.iter().any(|&(user, _)| {
            let phase = self.graph.node(user).provenance.phase;
            let same_pass = phase.is_after_forward() == after_forward;
            // What no product follows in the forward pass is a loss: where it joins branches, it reads them
            // as they are.
            let is_loss = !after_forward && !self.leads[user];
            same_pass && !is_loss && self.before[user] > self.after[node]
        });
        match self.from_products[value] {
            true if far && !self.is_read_as_it_is(value) => Some(Reason::ReadAgain),
            true if after_forward && !self.is_choice(data) && self.meets_its_sum(&readers) => {
                Some(Reason::Summed)
            }
            true if self.factors[value] => Some(Reason::Factor),
            _ => None,
        }
    }

    /// Whether nests read `value`, which is rounded for `reason`, exactly: a factor in the forward pass, and
    /// an exponential everywhere.
    pub(super) fn is_read_exactly(&self, value: Value, reason: Reason) -> bool {
        match reason {
            Reason::Factor => true,
            Reason::Operand => self.is_exponential(self.graph.def(value)),
            _ => false,
        }
    }

    /// Whether `reader` has `value` rounded, which other readers have exactly: a factor behind the forward
    /// pass.
    pub(super) fn reads_factor(&self, reader: &NodeData, value: Value) -> bool {
        let behind = reader.provenance.phase.is_after_forward() && takes_part(reader);
        behind && self.factors[value] && self.rounded(value) == Some(Reason::Factor)
    }

    /// Whether the kernels behind the next product read `value` in f32: 16 bits have nothing that is near an
    /// exponential's complement or beyond their largest number, and the terms of a gradient's formula may
    /// cancel.
    fn is_read_as_it_is(&self, value: Value) -> bool {
        self.beyond[value] || self.formulas[value] || self.is_exponential(self.graph.def(value))
    }

    /// Whether `value` has numbers that 16 bits make infinite, as far as constants tell.
    pub(super) fn is_beyond(&self, value: Value) -> bool {
        self.beyond[value]
    }

    /// Whether `data` is of the forward pass and computes an exponential, a logarithm, or an exponential
    /// times or over another number, as probabilities are: one bit of these may be all that a logarithm, or a
    /// difference from 1, is made of.
    fn is_exponential(&self, data: &NodeData) -> bool {
        let exponentiates = |op: &Op| {
            use UnaryOp::{Exp, Expm1, Log, Log1p};
            matches!(op, Op::Unary(Exp | Expm1 | Log | Log1p))
        };
        if data.provenance.phase.is_after_forward() {
            return false;
        }
        match &data.op {
            Op::Binary(BinaryOp::Mul | BinaryOp::Div) => data
                .inputs
                .iter()
                .any(|&value| exponentiates(&self.graph.def(value).op)),
            op => exponentiates(op),
        }
    }

    /// Whether `data` chooses between constants and what contractions stored: that has 16 bits, and reading
    /// it again costs no more than the choice.
    fn is_choice(&self, data: &NodeData) -> bool {
        matches!(data.op, Op::Select)
            && data.inputs[1..].iter().all(|&value| {
                let made = self.graph.value(value).node;
                let data = self.graph.node(made);
                self.narrowed[made]
                    || self.is_narrow_pool(made)
                    || matches!(data.op, Op::Constant { .. })
                    || matches!(data.op, Op::Broadcast { .. })
                        && matches!(self.graph.def(data.inputs[0]).op, Op::Constant { .. })
            })
    }

    /// Whether what is read is summed up over the batch, and pointwise operations bring it together with what
    /// depends on that sum: no kernel holds it in registers until then. Gradients at batch normalisation are
    /// like that.
    fn meets_its_sum(&self, readers: &Readers) -> bool {
        let mut sums = readers.list.iter().map(|&(node, _)| self.graph.node(node));
        let Some(sum) = sums.find(|data| self.is_sum_over_batch(data)) else {
            return false;
        };
        let depth = self.sums[sum.outputs[0]];
        let mut nodes: Vec<Node> = readers.list.iter().map(|&(node, _)| node).collect();
        let mut at = 0;
        while at < nodes.len().min(MOST_READERS) {
            let data = self.graph.node(nodes[at]);
            at += 1;
            if !data.op.is_pointwise() {
                continue;
            }
            if data.inputs.iter().any(|&input| self.sums[input] >= depth) {
                return true;
            }
            let users = self.users.of(data.outputs[0]).iter();
            let new: Vec<Node> = users.copied().filter(|user| !nodes.contains(user)).collect();
            nodes.extend(new);
        }
        false
    }

    /// Whether `data` adds up the first axis, and keeps another.
    fn is_sum_over_batch(&self, data: &NodeData) -> bool {
        let Op::Reduce { axes, .. } = &data.op else {
            return false;
        };
        let shape = self.graph.shape(data.inputs[0]);
        let kept = (0..shape.rank()).any(|axis| !axes.contains(&axis) && shape[axis] > 1);
        axes.contains(&0) && shape[0] > 1 && kept
    }

    /// Whether `node` reads its operand `read` in 16 bits.
    fn wants_16_bits(&self, node: Node, read: Value) -> bool {
        let data = self.graph.node(node);
        let is = |operand: usize| data.inputs[operand] == read;
        if self.narrowed[node] {
            return (0..data.inputs.len()).any(|operand| is_narrow_operand(&data.op, operand) && is(operand));
        }
        is(0) && self.is_narrow_pool(node)
    }

    /// Collects the readers of `value`, itself or moved.
    fn readers(&self, value: Value, readers: &mut Readers) {
        // A roll joins two parts of one value: the ways to a reader double with each.
        if !readers.seen.insert(value) {
            return;
        }
        readers.is_output |= self.users.outputs(value) > 0;
        for &user in self.users.of(value) {
            let data = self.graph.node(user);
            if data.op.is_movement() {
                self.readers(data.outputs[0], readers);
            } else {
                readers.list.push((user, value));
            }
        }
    }

    fn follow_products(&mut self, node: Node, data: &NodeData) {
        if self.narrowed[node] {
            let count = match data.op {
                Op::AttentionGrad(_) => 3,
                // The statistics of attention stay f32.
                _ => 1,
            };
            for &value in &data.outputs[..count] {
                self.from_products[value] = true;
            }
            return;
        }
        let follows = data.op.is_pointwise() || data.op.is_movement() || is_pool(&data.op);
        if !follows || !takes_part(data) || self.graph.dtype(data.outputs[0]) != DType::F32 {
            return;
        }
        let from_products = data.inputs.iter().any(|&value| self.from_products[value]);
        self.from_products[data.outputs[0]] = from_products;
    }

    fn follow_to_products(&mut self, node: Node, data: &NodeData) {
        let is_after_forward = data.provenance.phase.is_after_forward();
        self.leads[node] = self.narrowed[node]
            || data.outputs.iter().any(|&value| {
                self.users.of(value).iter().any(|&user| {
                    let phase = self.graph.node(user).provenance.phase;
                    self.leads[user] && phase.is_after_forward() == is_after_forward
                })
            });
    }

    fn follow_large_numbers(&mut self, data: &NodeData) {
        let of_operand = |value: Value| match &self.graph.def(value).op {
            // Nobody knows which one a call brings.
            Op::Scalar { .. } => matches!(data.op, Op::Select),
            _ => self.beyond[value],
        };
        let beyond = match &data.op {
            Op::Constant { value, .. } => {
                let number = value.to_f64();
                let largest = self.narrow_type.largest();
                number.is_finite() && largest.is_some_and(|largest| number.abs() > largest)
            }
            Op::Select
            | Op::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul)
            | Op::Unary(UnaryOp::Neg) => data.inputs.iter().any(|&value| of_operand(value)),
            op => op.is_movement() && data.inputs.iter().any(|&value| of_operand(value)),
        };
        for &value in &data.outputs {
            self.beyond[value] = beyond && self.graph.dtype(value).is_float();
        }
    }

    fn follow_formulas(&mut self, data: &NodeData) {
        let follows = data.op.is_pointwise() || data.op.is_movement();
        if !follows || !data.provenance.phase.is_after_forward() {
            return;
        }
        self.formulas[data.outputs[0]] = data.inputs.iter().all(|&value| {
            let made = self.graph.def(value);
            self.formulas[value] || !made.provenance.phase.is_after_forward()
        });
    }

    fn follow_state(&mut self, data: &NodeData) {
        let Some(&result) = data.outputs.first() else {
            return;
        };
        if let Op::Parameter { .. } = data.op {
            self.state[result] = self.graph.dtype(result) == DType::F32;
        } else if data.op.is_pointwise() && data.provenance.phase.is_after_forward() {
            let ty = self.graph.ty(result);
            let mut inputs = data.inputs.iter();
            self.state[result] = inputs.any(|&value| self.state[value] && self.graph.ty(value) == ty);
        }
    }

    /// Leaves of what follows from arguments that which leads to an output.
    fn follow_to_state(&mut self, data: &NodeData) {
        let Some(&result) = data.outputs.first() else {
            return;
        };
        if self.state[result] && self.users.outputs(result) == 0 {
            let mut users = self.users.of(result).iter();
            self.state[result] = users.any(|&user| {
                let made = self.graph.node(user).outputs.first();
                made.is_some_and(|&made| self.state[made] && self.graph.ty(made) == self.graph.ty(result))
            });
        }
    }

    fn count_sums(&mut self, data: &NodeData) {
        let before = data
            .inputs
            .iter()
            .map(|&value| self.sums[value])
            .max()
            .unwrap_or(0);
        for &value in &data.outputs {
            self.sums[value] = before + u32::from(self.is_sum_over_batch(data));
        }
    }

    fn count_kernels(&mut self, node: Node, data: &NodeData) {
        let operands = data
            .inputs
            .iter()
            .map(|&value| self.after[self.graph.value(value).node]);
        let before = operands.max().unwrap_or(0);
        let kernel = data.op.is_contraction() || is_library(&data.op);
        self.before[node] = before;
        self.after[node] = before + u32::from(kernel);
    }
}

/// Operations behind a value that are looked at for one that meets its sum: a normalisation's gradient has
/// ten.
const MOST_READERS: usize = 32;

/// The readers of a value.
#[derive(Default)]
struct Readers {
    /// The value and what it is moved to, as far as their readers were looked for.
    seen: FxHashSet<Value>,
    /// Each reader, and the value that it reads.
    list: Vec<(Node, Value)>,
    /// Whether the value leaves the step.
    is_output: bool,
}

/// Whether autocast may change the node: it belongs to the forward or the backward pass, and the program
/// did not ask for full precision.
fn takes_part(data: &NodeData) -> bool {
    data.provenance.phase != Phase::Optimizer && !data.provenance.full_precision
}

/// Whether a contraction reads operand number `operand` in 16 bits: all of a product, and the tensors of
/// attention but masks.
pub(super) fn is_narrow_operand(op: &Op, operand: usize) -> bool {
    match op {
        Op::Attention(_) => operand < 3,
        Op::AttentionGrad(dims) => operand < 3 || operand == dims.operands().forward + 1,
        _ => true,
    }
}

pub(super) fn is_pool(op: &Op) -> bool {
    matches!(
        op,
        Op::MaxPool(_)
            | Op::MaxPoolWithIndices { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AvgPool { .. }
            | Op::AvgPoolGrad { .. }
    )
}

/// Whether a kernel of its own computes the operation, reads its operands from memory, and supports only
/// their type.
pub(super) fn is_library(op: &Op) -> bool {
    let in_nests = op.is_pointwise()
        || op.is_movement()
        || matches!(
            op,
            Op::Parameter { .. }
                | Op::Scalar { .. }
                | Op::Constant { .. }
                | Op::Iota { .. }
                | Op::Random { .. }
                | Op::Reduce { .. }
                | Op::Gather { .. }
                | Op::IndexSelect { .. }
        );
    !in_nests && !op.is_contraction()
}
