//! The graph with its 16-bit values.
//!
//! For each old value of f32 there are up to three new ones: the *exact* one, which an f32 operation made;
//! the *narrow* one, of 16 bits; and the *widened* one, a cast of the narrow one back to f32. A value is
//! *settled* on 16 bits if readers of f32 get the widened one, even where an exact one exists.

use cranelift_entity::SecondaryMap;
use cranelift_entity::packed_option::PackedOption;
use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Node, NodeData, Phase, Provenance, Rewriter, TypeError, Value};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::facts::{Facts, is_library, is_narrow_operand};
use super::report::{Reason, StoredReport};

type Map = SecondaryMap<Value, PackedOption<Value>>;

pub(super) struct Rewrite<'a> {
    old: &'a Graph,
    facts: &'a Facts<'a>,
    /// The type of 16 bits.
    narrow_type: DType,
    new: Rewriter<'a>,
    /// New values by old ones. A value that is not f32 has no other new value.
    exact: Map,
    narrow: Map,
    widened: Map,
    settled: SecondaryMap<Value, bool>,
    stored: Vec<StoredReport>,
}

impl<'a> Rewrite<'a> {
    pub(super) fn new(old: &'a Graph, facts: &'a Facts<'a>, narrow_type: DType) -> Self {
        Self {
            old,
            facts,
            narrow_type,
            new: Rewriter::new(old),
            exact: Map::new(),
            narrow: Map::new(),
            widened: Map::new(),
            settled: SecondaryMap::new(),
            stored: Vec::new(),
        }
    }

    /// The new graph, and what it stores in which type.
    pub(super) fn run(mut self) -> Result<(Graph, Vec<StoredReport>), TypeError> {
        for (node, data) in self.old.nodes() {
            self.node(node, data)?;
        }
        for output in &self.old.outputs {
            let value = self.read_exact(output.value)?;
            self.new.replace(output.value, value);
        }
        Ok((self.new.finish().without_dead_code(), self.stored))
    }

    fn node(&mut self, node: Node, data: &NodeData) -> Result<(), TypeError> {
        match &data.op {
            Op::Parameter { .. } | Op::Scalar { .. } => {
                let copies = self.new.copy(node)?;
                self.exact[data.outputs[0]] = copies[0].into();
                self.note_copy(&data.op, copies[0]);
                Ok(())
            }
            _ if self.facts.is_narrowed(node) => self.contraction(data),
            _ if self.facts.is_narrow_pool(node) => self.pool(data),
            op if op.is_movement() && self.moves_narrow(data) => {
                let provenance = &data.provenance;
                let moved = self.moved_narrow(data, provenance)?;
                let result = data.outputs[0];
                self.narrow[result] = moved.into();
                self.settled[result] = true;
                Ok(())
            }
            Op::Cast(to) if *to == self.narrow_type && self.settled[data.inputs[0]] => {
                self.exact[data.outputs[0]] = self.narrow[data.inputs[0]];
                Ok(())
            }
            // A parameter stored in 16 bits: readers of them take it as it is.
            Op::Cast(DType::F32) if self.old.dtype(data.inputs[0]) == self.narrow_type => {
                let stored = self.read_exact(data.inputs[0])?;
                let wide = self.new.graph.add(data.op.clone(), &[stored], &data.provenance)?;
                let result = data.outputs[0];
                self.exact[result] = wide.into();
                self.narrow[result] = stored.into();
                Ok(())
            }
            _ => self.plain(data),
        }
    }

    /// Notes that `argument`, which `op` is, has the rounded elements of another argument: readers of these
    /// take it as it is, and the cast at the start of the step is gone.
    fn note_copy(&mut self, op: &Op, argument: Value) {
        if let Op::Parameter {
            ty,
            copy_of: Some(of),
            ..
        } = op
            && ty.dtype == self.narrow_type
        {
            let of = self.old.parameters()[*of as usize];
            if self.narrow[of].is_none() {
                self.narrow[of] = argument.into();
            }
        }
    }

    /// A contraction: its tensors in 16 bits, its result in them or in f32.
    fn contraction(&mut self, data: &NodeData) -> Result<(), TypeError> {
        let mut inputs: SmallVec<[Value; 3]> = SmallVec::new();
        for (operand, &value) in data.inputs.iter().enumerate() {
            inputs.push(match is_narrow_operand(&data.op, operand) {
                true => self.read_narrow(value, &data.provenance)?,
                false => self.read_exact(value)?,
            });
        }
        let wide = self.facts.wide_result(data.outputs[0]);
        let op = match wide {
            Some(_) => data
                .op
                .with_result(Some(DType::F32))
                .unwrap_or_else(|| data.op.clone()),
            None => data.op.clone(),
        };
        let made = self.new.graph.add_node(op, &inputs, data.provenance.clone())?;
        self.made(data, &made, wide.unwrap_or(Reason::Product));
        Ok(())
    }

    fn pool(&mut self, data: &NodeData) -> Result<(), TypeError> {
        let mut inputs: SmallVec<[Value; 3]> = SmallVec::new();
        for (operand, &value) in data.inputs.iter().enumerate() {
            inputs.push(match operand {
                0 => self.read_narrow(value, &data.provenance)?,
                _ => self.read_exact(value)?,
            });
        }
        let made = self
            .new
            .graph
            .add_node(data.op.clone(), &inputs, data.provenance.clone())?;
        self.made(data, &made, Reason::Pool);
        Ok(())
    }

    /// Notes the results of a library operation, those of 16 bits as such.
    fn made(&mut self, data: &NodeData, made: &[Value], reason: Reason) {
        for (&old, &new) in data.outputs.iter().zip(made) {
            let ty = self.new.graph.ty(new);
            if self.old.dtype(old) == DType::F32 && ty.dtype == self.narrow_type {
                self.narrow[old] = new.into();
                self.settled[old] = true;
                self.stored.push(StoredReport::new(ty, reason, data));
            } else {
                self.exact[old] = new.into();
                if old == data.outputs[0] {
                    self.stored.push(StoredReport::new(ty, reason, data));
                }
            }
        }
    }

    /// A node as it was, and its results rounded where the facts say so.
    fn plain(&mut self, data: &NodeData) -> Result<(), TypeError> {
        // What picks or orders elements sees those that others compare with what it picked.
        let orders = matches!(data.op, Op::ArgReduce { .. } | Op::Sort { .. } | Op::TopK { .. });
        let as_nests_read = orders || !is_library(&data.op);
        let mut inputs: SmallVec<[Value; 3]> = SmallVec::new();
        for &value in &data.inputs {
            inputs.push(match as_nests_read {
                true if self.facts.reads_factor(data, value) => self.widened(value)?,
                true => self.read(value)?,
                false => self.read_exact(value)?,
            });
        }
        let made = self
            .new
            .graph
            .add_node(data.op.clone(), &inputs, data.provenance.clone())?;
        for (&old, &new) in data.outputs.iter().zip(&made) {
            self.exact[old] = new.into();
            if let Some(reason) = self.facts.rounded(old) {
                let cast = Op::Cast(self.narrow_type);
                let narrow = self.new.graph.add(cast, &[new], &data.provenance)?;
                self.narrow[old] = narrow.into();
                self.settled[old] = !self.facts.is_read_exactly(old, reason);
                let ty = self.new.graph.ty(narrow);
                self.stored.push(StoredReport::new(ty, reason, data));
            } else if data.provenance.full_precision && self.old.dtype(old) == DType::F32 {
                let ty = self.old.ty(old);
                self.stored
                    .push(StoredReport::new(ty, Reason::FullPrecision, data));
            }
        }
        Ok(())
    }

    /// Whether everything that `data` moves is settled on 16 bits, or a number that pads it.
    fn moves_narrow(&self, data: &NodeData) -> bool {
        let mut inputs = data.inputs.iter();
        inputs.clone().any(|&value| self.settled[value])
            && inputs.all(|&value| self.settled[value] || self.is_number(value))
    }

    /// Whether every element of `value` is the same constant, which 16 bits can hold.
    fn is_number(&self, value: Value) -> bool {
        let data = self.old.def(value);
        match data.op {
            Op::Constant { .. } => !self.facts.is_beyond(value),
            Op::Broadcast { .. } | Op::Reshape(_) => self.is_number(data.inputs[0]),
            _ => false,
        }
    }

    /// The movement `data` of 16 bits.
    fn moved_narrow(&mut self, data: &NodeData, reader: &Provenance) -> Result<Value, TypeError> {
        let mut inputs: SmallVec<[Value; 3]> = SmallVec::new();
        for &value in &data.inputs {
            inputs.push(self.read_narrow(value, reader)?);
        }
        let provenance = read_by(&data.provenance, reader);
        self.new.graph.add(data.op.clone(), &inputs, &provenance)
    }

    /// `value` as an f32 operation in a loop nest reads it.
    fn read(&mut self, value: Value) -> Result<Value, TypeError> {
        match self.settled[value] {
            true => self.widened(value),
            false => self.read_exact(value),
        }
    }

    /// `value` unrounded, if it ever was.
    fn read_exact(&mut self, value: Value) -> Result<Value, TypeError> {
        if let Some(exact) = self.exact[value].expand() {
            return Ok(exact);
        }
        let data = self.old.def(value);
        if !self.is_known_exactly(value) {
            return self.widened(value);
        }
        let mut inputs: SmallVec<[Value; 3]> = SmallVec::new();
        for &operand in &data.inputs {
            inputs.push(self.read_exact(operand)?);
        }
        let exact = self.new.graph.add(data.op.clone(), &inputs, &data.provenance)?;
        self.exact[value] = exact.into();
        Ok(exact)
    }

    /// Whether `value` or what it is moved from exists unrounded.
    fn is_known_exactly(&self, value: Value) -> bool {
        let (mut left, mut seen) = (vec![value], FxHashSet::default());
        while let Some(value) = left.pop() {
            let data = self.old.def(value);
            if self.exact[value].is_some() || !seen.insert(value) {
                continue;
            }
            if !data.op.is_movement() {
                return false;
            }
            left.extend(&data.inputs);
        }
        true
    }

    /// The widened value of `value`, which is settled on 16 bits.
    fn widened(&mut self, value: Value) -> Result<Value, TypeError> {
        if let Some(widened) = self.widened[value].expand() {
            return Ok(widened);
        }
        let narrow = self.narrow[value]
            .expand()
            .unwrap_or_else(|| unreachable!("{value} has no 16 bits"));
        let provenance = &self.old.def(value).provenance;
        let widened = self.new.graph.add(Op::Cast(DType::F32), &[narrow], provenance)?;
        self.widened[value] = widened.into();
        Ok(widened)
    }

    /// `value` in 16 bits, for `reader`. A cast moves in front of movements, so that one cast serves all
    /// moved copies of a value and no moved f32 is stored.
    fn read_narrow(&mut self, value: Value, reader: &Provenance) -> Result<Value, TypeError> {
        if let Some(narrow) = self.narrow[value].expand() {
            self.needed_by(value, reader);
            return Ok(narrow);
        }
        let data = self.old.def(value);
        let narrow = if data.op.is_movement() {
            self.moved_narrow(data, reader)?
        } else {
            let exact = self.read_exact(value)?;
            let provenance = read_by(&data.provenance, reader);
            self.new
                .graph
                .add(Op::Cast(self.narrow_type), &[exact], &provenance)?
        };
        self.narrow[value] = narrow.into();
        Ok(narrow)
    }

    /// A value that the forward pass reads too is made there, even if the backward pass asked for it first.
    fn needed_by(&mut self, value: Value, reader: &Provenance) {
        let Some(narrow) = self.narrow[value].expand() else {
            return;
        };
        let node = self.new.graph.value(narrow).node;
        let own = self.new.graph.node(node).provenance.phase;
        if reader.phase.is_after_forward() || !own.is_after_forward() {
            return;
        }
        self.new.graph.provenance_mut(node).phase = reader.phase;
        let data = self.old.def(value);
        if data.op.is_movement() {
            for &operand in &data.inputs {
                self.needed_by(operand, reader);
            }
        }
    }
}

/// The provenance of a cast for `reader` of a node with provenance `own`: arguments and constants have no
/// phase of their own.
fn read_by(own: &Provenance, reader: &Provenance) -> Provenance {
    match own.phase {
        Phase::Unknown => reader.clone(),
        _ => own.clone(),
    }
}
