//! Patterns of expressions, written as text.
//!
//! ```text
//! ?x                 any value, the same one wherever the name occurs
//! (exp p)            an operation: the names of kiln-graph, with its operands
//! (add p q)          operands of add and mul match in either order
//! (cast p)           to any type
//! (wide p)           p, maybe behind casts between f32 and a type of 16 bits that is computed in f32
//! (sum p) (max p)    a reduction over the last axis, and nothing else
//! (argmax p)         the position of the largest along the last axis
//! (iota)             the position along the last axis
//! (row p)            a value for each row, repeated along the last axis
//! (splat ?x)         one number in every element
//! (= ?x p)           p, and ?x names it
//! (uniform ?s ?t)    random numbers
//! ```
//!
//! Inside `row`, values have one element for each row; the matcher looks through reshapes that only insert
//! or remove a last dimension of one.

use kiln_graph::op::{ArgReduceOp, BinaryOp, CompareOp, Op, RandomKind, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, Value};

/// A parsed pattern.
#[derive(Debug, Clone)]
pub enum Pattern {
    /// Any value.
    Any(&'static str),
    /// A value with a name.
    Named(&'static str, Box<Pattern>),
    /// An operation and its operands.
    Apply(&'static str, Vec<Pattern>),
}

/// The values that the names of a pattern stand for.
#[derive(Debug, Clone, Default)]
pub struct Bindings(Vec<(&'static str, Value)>);

impl Bindings {
    /// The value that `name` stands for.
    ///
    /// # Panics
    /// If the pattern has no such name.
    pub fn of(&self, name: &str) -> Value {
        self.get(name)
            .unwrap_or_else(|| panic!("the pattern has no {name}"))
    }

    /// The value that `name` stands for, if it occurs.
    pub fn get(&self, name: &str) -> Option<Value> {
        self.0
            .iter()
            .find(|(own, _)| *own == name)
            .map(|&(_, value)| value)
    }

    /// With `name` standing for `value` from the start.
    pub fn with(mut self, name: &'static str, value: Value) -> Self {
        self.0.push((name, value));
        self
    }

    fn bind(&mut self, name: &'static str, value: Value) -> bool {
        match self.get(name) {
            Some(own) => own == value,
            None => {
                self.0.push((name, value));
                true
            }
        }
    }
}

impl Pattern {
    /// Parses the text of a pattern.
    ///
    /// # Panics
    /// If parentheses do not match: patterns are part of the program.
    pub fn parse(text: &'static str) -> Self {
        let mut words = text
            .split_inclusive(['(', ')', ' ', '\n'])
            .flat_map(|piece| {
                let (word, end) =
                    piece.split_at(piece.len() - usize::from(piece.ends_with(['(', ')', ' ', '\n'])));
                [word, end]
            })
            .filter(|word| !word.trim().is_empty());
        let pattern = Self::next(&mut words).expect("a pattern");
        assert!(words.next().is_none(), "one pattern: {text}");
        pattern
    }

    fn next(words: &mut impl Iterator<Item = &'static str>) -> Option<Self> {
        match words.next().expect("a closed pattern") {
            ")" => None,
            "(" => {
                let name = words.next().expect("an operation");
                let mut operands = Vec::new();
                while let Some(operand) = Self::next(words) {
                    operands.push(operand);
                }
                Some(match (name, operands.as_slice()) {
                    ("=", [Pattern::Any(name), pattern]) => Pattern::Named(name, Box::new(pattern.clone())),
                    _ => Pattern::Apply(name, operands),
                })
            }
            word => Some(Pattern::Any(word)),
        }
    }

    /// The bindings of the names if `value` matches, given the bindings of some of them.
    pub fn matches(&self, graph: &Graph, value: Value, known: &Bindings) -> Option<Bindings> {
        let mut bindings = known.clone();
        matches(graph, self, value, false, &mut bindings).then_some(bindings)
    }
}

/// The value for each row behind reshapes between `[.., 1]` and `[..]`.
fn row_value(graph: &Graph, mut value: Value) -> Value {
    loop {
        let data = graph.def(value);
        let Op::Reshape(shape) = &data.op else {
            return value;
        };
        let (own, operand) = (shape.dims(), graph.shape(data.inputs[0]).dims());
        let same = own.strip_suffix(&[1]) == Some(operand) || operand.strip_suffix(&[1]) == Some(own);
        if !same {
            return value;
        }
        value = data.inputs[0];
    }
}

/// The value for each row that `value` repeats along its last axis.
fn repeated_row(graph: &Graph, value: Value) -> Option<Value> {
    let data = graph.def(value);
    let Op::Broadcast { shape, dims } = &data.op else {
        return None;
    };
    let operand = graph.shape(data.inputs[0]);
    let last = shape.rank().checked_sub(1)?;
    let leading =
        dims.iter().copied().take(last).eq(0..last) && operand.dims()[..last] == shape.dims()[..last];
    let rest = operand.rank() == last || (operand.rank() == last + 1 && operand[last] == 1);
    (leading && rest).then(|| row_value(graph, data.inputs[0]))
}

/// The value behind casts between f32 and a type of 16 bits. An operation that reads it instead sees fewer
/// roundings.
pub fn behind_casts(graph: &Graph, mut value: Value) -> Value {
    let half = |dtype: DType| dtype.compute() != dtype;
    loop {
        let data = graph.def(value);
        let Op::Cast(to) = data.op else { return value };
        let from = graph.dtype(data.inputs[0]);
        if !(half(from) && to == DType::F32 || half(to) && from == DType::F32) {
            return value;
        }
        value = data.inputs[0];
    }
}

/// Whether `op` is the one that a pattern calls `name`, and whether its operands may change places.
fn is_op(name: &str, op: &Op) -> Option<bool> {
    let commutes = matches!(
        op,
        Op::Binary(BinaryOp::Add | BinaryOp::Mul | BinaryOp::And | BinaryOp::Or)
    );
    let same = match op {
        Op::Unary(op) => UnaryOp::from_name(name) == Some(*op),
        Op::Binary(op) => BinaryOp::from_name(name) == Some(*op),
        Op::Compare(op) => CompareOp::from_name(name) == Some(*op),
        Op::Select => name == "select",
        Op::Cast(_) => name == "cast",
        Op::Random { kind, .. } => name == "uniform" && *kind == RandomKind::Uniform,
        _ => false,
    };
    same.then_some(commutes)
}

fn matches(graph: &Graph, pattern: &Pattern, value: Value, in_row: bool, bindings: &mut Bindings) -> bool {
    let value = if in_row { row_value(graph, value) } else { value };
    let data = graph.def(value);
    match pattern {
        Pattern::Any(name) => bindings.bind(name, value),
        Pattern::Named(name, pattern) => {
            matches(graph, pattern, value, in_row, bindings) && bindings.bind(name, value)
        }
        Pattern::Apply("wide", p) => matches(graph, &p[0], behind_casts(graph, value), in_row, bindings),
        Pattern::Apply("row", p) if in_row => matches(graph, &p[0], value, true, bindings),
        Pattern::Apply("row", p) => {
            repeated_row(graph, value).is_some_and(|row| matches(graph, &p[0], row, true, bindings))
        }
        Pattern::Apply("splat", p) => graph
            .splatted(value)
            .is_some_and(|number| matches(graph, &p[0], number, false, bindings)),
        Pattern::Apply(name @ ("sum" | "max"), p) => {
            let wanted = if *name == "sum" {
                ReduceOp::Sum
            } else {
                ReduceOp::Max
            };
            let Op::Reduce { op, axes } = &data.op else {
                return false;
            };
            let operand = data.inputs[0];
            *op == wanted
                && axes.as_slice() == [graph.shape(operand).rank() - 1]
                && matches(graph, &p[0], operand, false, bindings)
        }
        Pattern::Apply("argmax", p) => {
            let Op::ArgReduce { op, axis, .. } = &data.op else {
                return false;
            };
            let operand = data.inputs[0];
            *op == ArgReduceOp::Max
                && axis + 1 == graph.shape(operand).rank()
                && matches(graph, &p[0], operand, false, bindings)
        }
        Pattern::Apply("iota", _) => {
            matches!(&data.op, Op::Iota { shape, axis, .. } if axis + 1 == shape.rank())
        }
        Pattern::Apply(name, operands) => {
            let Some(commutes) = is_op(name, &data.op).filter(|_| operands.len() == data.inputs.len()) else {
                return false;
            };
            let before = bindings.clone();
            let mut each = |order: &mut dyn Iterator<Item = &Value>| {
                operands
                    .iter()
                    .zip(order)
                    .all(|(p, &operand)| matches(graph, p, operand, in_row, bindings))
            };
            if each(&mut data.inputs.iter()) {
                return true;
            }
            *bindings = before;
            if !commutes {
                return false;
            }
            operands
                .iter()
                .zip(data.inputs.iter().rev())
                .all(|(p, &operand)| matches(graph, p, operand, in_row, bindings))
        }
    }
}
