//! The graph with recognised attentions in place of their compositions.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use kiln_graph::op::{BinaryOp, Dims, Op, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, NodeData, Provenance, Rewriter, Scalar, Shape, TypeError, Value};

use super::matching::{Gradient, Match, Number};
use crate::transform::view::View;

/// A result of a gradient: its composition's number, which of `dq, dk, dv` it is, and whether transposed.
type GradientResult = (usize, usize, bool);

/// Replaces `found` in `graph`.
pub(super) fn replace(graph: &Graph, found: &[Match]) -> Result<Graph, TypeError> {
    let mut build = Build {
        graph,
        found,
        rewriter: Rewriter::new(graph),
        outs: FxHashMap::default(),
        gradients: FxHashMap::default(),
        forward: vec![None; found.len()],
        shared: Vec::new(),
        backward: vec![None; found.len()],
    };
    for (at, one) in found.iter().enumerate() {
        build.outs.insert(one.out, at);
        let mut shared = shared_heads(graph, one);
        if let Some(gradient) = &one.gradient {
            build.note_gradient(at, gradient, &mut shared);
        }
        build.shared.push(shared);
    }
    // Arguments keep their numbers, whatever is asked for first.
    for (node, data) in graph.nodes() {
        if matches!(data.op, Op::Parameter { .. } | Op::Scalar { .. }) {
            build.rewriter.copy(node)?;
        }
    }
    for (_, data) in graph.nodes() {
        for &value in &data.outputs {
            build.demand(value)?;
        }
    }
    Ok(build.rewriter.finish().without_dead_code())
}

/// Keys and values before their heads were repeated for queries.
struct Shared {
    key: Value,
    value: Value,
}

struct Build<'a> {
    graph: &'a Graph,
    found: &'a [Match],
    rewriter: Rewriter<'a>,
    /// Forward results.
    outs: FxHashMap<Value, usize>,
    /// The results of gradients.
    gradients: FxHashMap<Value, GradientResult>,
    /// Results of the new operations.
    forward: Vec<Option<[Value; 2]>>,
    backward: Vec<Option<[Value; 3]>>,
    shared: Vec<Option<Shared>>,
}

impl Build<'_> {
    /// Notes which old values the gradients replace. Where heads are shared these are the sums over the
    /// heads that share; if there are no such sums, the heads are left as they are.
    fn note_gradient(&mut self, at: usize, gradient: &Gradient, shared: &mut Option<Shared>) {
        let mut list = [gradient.d_query, gradient.d_key, gradient.d_value];
        if let Some(of) = shared {
            let sums = [(gradient.d_key, of.key), (gradient.d_value, of.value)]
                .map(|((value, transposed), like)| sum_of_heads(self.graph, value, transposed, like));
            match sums {
                [Some(key), Some(value)] => (list[1], list[2]) = ((key, false), (value, false)),
                _ => *shared = None,
            }
        }
        for (which, (value, transposed)) in list.into_iter().enumerate() {
            self.gradients.insert(value, (at, which, transposed));
        }
    }

    /// Makes the new value of `value`, after those of its operands.
    fn demand(&mut self, value: Value) -> Result<Value, TypeError> {
        if let Some(known) = self.rewriter.get(value) {
            return Ok(known);
        }
        let data = self.graph.def(value);
        if let Some(&at) = self.outs.get(&value) {
            let [out, _] = self.forward(at, &data.provenance)?;
            self.rewriter.replace(value, out);
        } else if let Some(&(at, which, transposed)) = self.gradients.get(&value) {
            let mut new = self.backward(at, &data.provenance)?[which];
            if transposed {
                let order = Op::Transpose(Dims::from_slice(&[0, 1, 3, 2]));
                new = self.add(order, &[new], &data.provenance)?;
            }
            self.rewriter.replace(value, new);
        } else {
            for &operand in &data.inputs {
                self.demand(operand)?;
            }
            self.rewriter.copy(self.graph.value(value).node)?;
        }
        Ok(self.rewriter.map(value))
    }

    fn add(&mut self, op: Op, inputs: &[Value], p: &Provenance) -> Result<Value, TypeError> {
        self.rewriter.graph.add(op, inputs, p)
    }

    fn view(&mut self, view: &View, p: &Provenance) -> Result<Value, TypeError> {
        let base = self.demand(view.base)?;
        self.add(Op::Transpose(view.order.clone()), &[base], p)
    }

    /// A number; one that has to be computed has type `dtype`.
    fn number(&mut self, number: Number, dtype: DType, p: &Provenance) -> Result<Value, TypeError> {
        match number {
            Number::One => self.constant(1.0, dtype, p),
            Number::Value(value) => self.demand(value),
            Number::Inverse(value) => {
                let mut value = self.demand(value)?;
                if self.rewriter.graph.dtype(value) != dtype {
                    value = self.add(Op::Cast(dtype), &[value], p)?;
                }
                self.add(Op::Unary(UnaryOp::Recip), &[value], p)
            }
        }
    }

    fn constant(&mut self, value: f64, dtype: DType, p: &Provenance) -> Result<Value, TypeError> {
        let op = Op::Constant {
            value: Scalar::Float(value),
            dtype,
        };
        self.add(op, &[], p)
    }

    /// A mask of the shape of the scores, with extents of 1 where it repeats.
    fn mask(&mut self, value: Value, p: &Provenance) -> Result<Value, TypeError> {
        let mut data = self.graph.def(value);
        let mut small = value;
        while let Op::Broadcast { dims, .. } = &data.op
            && dims.iter().copied().eq(0..4)
        {
            small = data.inputs[0];
            data = self.graph.def(small);
        }
        if self.graph.splatted(value).is_none() || small != value {
            return self.demand(small);
        }
        let number = self
            .graph
            .splatted(value)
            .map_or(Ok(value), |number| self.demand(number))?;
        self.add(Op::Reshape([1, 1, 1, 1].into()), &[number], p)
    }

    /// The mask of hidden scores: one mask, or either of two.
    fn hidden(&mut self, one: &Match, p: &Provenance) -> Result<Value, TypeError> {
        let first = self.mask(one.bindings.of("?hidden"), p)?;
        let Some(also) = one.bindings.get("?also") else {
            return Ok(first);
        };
        let second = self.mask(also, p)?;
        let graph = &mut self.rewriter.graph;
        let extents = |axis: usize| graph.shape(first)[axis].max(graph.shape(second)[axis]);
        let shape = Shape::from([0, 1, 2, 3].map(extents));
        let first = graph.broadcast_to(first, &shape, p)?;
        let second = graph.broadcast_to(second, &shape, p)?;
        self.add(Op::Binary(BinaryOp::Or), &[first, second], p)
    }

    /// The type that attention number `at` is computed in.
    fn compute(&self, at: usize) -> DType {
        self.graph.dtype(self.found[at].out).compute()
    }

    /// Operands that forward and gradient share.
    fn operands(&mut self, at: usize, p: &Provenance) -> Result<SmallVec<[Value; 8]>, TypeError> {
        let found = self.found;
        let one = &found[at];
        let query = self.view(&one.query, p)?;
        let (key, value) = match &self.shared[at] {
            Some(Shared { key, value }) => {
                let (key, value) = (*key, *value);
                (self.demand(key)?, self.demand(value)?)
            }
            None => (self.view(&one.key, p)?, self.view(&one.value, p)?),
        };
        let scale = self.number(one.scale, self.compute(at), p)?;
        let mut list = SmallVec::from_slice(&[query, key, value, scale]);
        if one.dims.mask {
            let name = if one.dims.mask_last { "?bias" } else { "?mask" };
            list.push(self.mask(one.bindings.of(name), p)?);
        }
        if one.dims.hidden {
            list.push(self.hidden(one, p)?);
            list.push(self.demand(one.bindings.of("?fill"))?);
        }
        if one.dims.dropout {
            for name in ["?seed", "?stream", "?keep", "?factor"] {
                list.push(self.demand(one.bindings.of(name))?);
            }
        }
        Ok(list)
    }

    fn forward(&mut self, at: usize, p: &Provenance) -> Result<[Value; 2], TypeError> {
        if let Some(known) = self.forward[at] {
            return Ok(known);
        }
        let operands = self.operands(at, p)?;
        let op = Op::Attention(self.found[at].dims);
        let results = self.rewriter.graph.add_node(op, &operands, p.clone())?;
        let results = [results[0], results[1]];
        self.forward[at] = Some(results);
        Ok(results)
    }

    fn backward(&mut self, at: usize, p: &Provenance) -> Result<[Value; 3], TypeError> {
        if let Some(known) = self.backward[at] {
            return Ok(known);
        }
        let found = self.found;
        let one = &found[at];
        let gradient = one.gradient.as_ref().expect("only gradients have results");
        self.demand(one.out)?;
        let [_, stats] = self.forward[at].expect("the forward result was just asked for");
        let mut operands = self.operands(at, p)?;
        operands.push(stats);
        operands.push(self.view(&gradient.d_out, p)?);
        operands.push(self.number(gradient.d_scale, self.compute(at), p)?);
        operands.push(self.demand(gradient.inner)?);
        if one.dims.dropout {
            let factor = match gradient.d_factor {
                Some(factor) => self.demand(factor)?,
                None => self.constant(1.0, self.compute(at), p)?,
            };
            operands.push(factor);
        }
        let op = Op::AttentionGrad(one.dims);
        let results = self.rewriter.graph.add_node(op, &operands, p.clone())?;
        let results = [results[0], results[1], results[2]];
        self.backward[at] = Some(results);
        Ok(results)
    }
}

/// Keys and values before their heads were repeated for the queries.
fn shared_heads(graph: &Graph, one: &Match) -> Option<Shared> {
    let [key, value] = [&one.key, &one.value].map(|view| before_repeat(graph, view));
    let (key, value) = (key?, value?);
    // The operation has one number of heads for both.
    (graph.shape(key)[1] == graph.shape(value)[1]).then_some(Shared { key, value })
}

/// `x` if `view` is `[b, g, s, d] -> [b, g, r, s, d] -> [b, g r, s, d]` of it, each head repeated in place.
fn before_repeat(graph: &Graph, view: &View) -> Option<Value> {
    if !view.order.iter().copied().eq(0..4) {
        return None;
    }
    let heads = graph.def(view.base);
    let Op::Reshape(_) = heads.op else { return None };
    let repeated = graph.def(heads.inputs[0]);
    let Op::Broadcast { shape, dims } = &repeated.op else {
        return None;
    };
    let x = repeated.inputs[0];
    let own = graph.shape(view.base);
    let fits = shape.rank() == 5
        && own[0] == shape[0]
        && own[1] == shape[1] * shape[2]
        && own.dims()[2..] == shape.dims()[3..];
    if !fits {
        return None;
    }
    if dims.as_slice() == [0, 1, 3, 4] {
        return (graph.shape(x).dims() == [shape[0], shape[1], shape[3], shape[4]]).then_some(x);
    }
    // The view inserts a dimension of one first.
    let NodeData {
        op: Op::Reshape(with_one),
        inputs,
        ..
    } = graph.def(x)
    else {
        return None;
    };
    let plain = [shape[0], shape[1], shape[3], shape[4]];
    let put_in =
        with_one.dims() == [shape[0], shape[1], 1, shape[3], shape[4]] && dims.iter().copied().eq(0..5);
    (put_in && graph.shape(inputs[0]).dims() == plain).then_some(inputs[0])
}

/// The sum over the heads that share a key or value, of the gradient `value` for each; `like` has its shape.
fn sum_of_heads(graph: &Graph, value: Value, transposed: bool, like: Value) -> Option<Value> {
    let users = graph.users();
    let only = |value: Value| match users.of(value) {
        [user] if users.outputs(value) == 0 => Some(graph.node(*user)),
        _ => None,
    };
    let mut value = value;
    if transposed {
        let data = only(value)?;
        matches!(&data.op, Op::Transpose(perm) if perm.as_slice() == [0, 1, 3, 2]).then_some(())?;
        value = data.outputs[0];
    }
    let [b, g, s, d] = [0, 1, 2, 3].map(|axis| graph.shape(like)[axis]);
    let apart = only(value)?;
    let repeat = graph.shape(value)[1] / g;
    matches!(&apart.op, Op::Reshape(shape) if shape.dims() == [b, g, repeat, s, d]).then_some(())?;
    let sum = only(apart.outputs[0])?;
    match &sum.op {
        Op::Reduce {
            op: ReduceOp::Sum,
            axes,
        } if axes.as_slice() == [2] => Some(sum.outputs[0]),
        _ => None,
    }
}
