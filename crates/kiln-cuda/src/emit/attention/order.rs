//! Masks that hide the keys behind a position: causal order, computed from coordinates as programs do it.

use kiln_compiler::index::Index;
use kiln_compiler::schedule::access::operand_index;
use kiln_graph::op::{BinaryOp, CompareOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, Scalar, Value};

/// The dimensions of a mask that number queries and keys.
const QUERY: u32 = 2;
const KEY: u32 = 3;

/// The `a` for which `mask`, of shape `[batch, head, query, key]`, hides `key` from `query` if and only if
/// `key > query + a`; none if the mask is not computed from coordinates alone, or hides anything else.
pub fn hidden_ahead(graph: &Graph, mask: Value) -> Option<i64> {
    let shape = graph.shape(mask);
    let index: Vec<Index> = (0..)
        .zip(shape.iter())
        .map(|(axis, &extent)| Index::var(axis, extent as i64))
        .collect();
    // Of one query or one key the index would not tell which dimension a coordinate is of.
    let tells = shape.rank() == 4 && shape[QUERY as usize] > 1 && shape[KEY as usize] > 1;
    if !tells {
        return None;
    }
    let (op, difference) = comparison(graph, mask, &index)?;
    let [query, key] = [QUERY, KEY].map(|var| difference.stride(var));
    let others = difference.terms().len() == 2;
    let constant = difference.offset();
    match (op, query?, key?) {
        (CompareOp::Gt, -1, 1) if others => Some(-constant),
        (CompareOp::Ge, -1, 1) if others => Some(-constant - 1),
        (CompareOp::Lt, 1, -1) if others => Some(constant),
        (CompareOp::Le, 1, -1) if others => Some(constant - 1),
        _ => None,
    }
}

/// How `value` at `index` compares a difference of coordinates with zero.
fn comparison(graph: &Graph, value: Value, index: &[Index]) -> Option<(CompareOp, Index)> {
    let data = graph.def(value);
    match &data.op {
        Op::Compare(op) => {
            let [a, b] = [0, 1].map(|operand| coordinate(graph, data.inputs[operand], index));
            Some((*op, a?.add(&b?.scale(-1))))
        }
        Op::Unary(UnaryOp::Not) => {
            let (op, difference) = comparison(graph, data.inputs[0], index)?;
            let opposite = match op {
                CompareOp::Eq => CompareOp::Ne,
                CompareOp::Ne => CompareOp::Eq,
                CompareOp::Lt => CompareOp::Ge,
                CompareOp::Le => CompareOp::Gt,
                CompareOp::Gt => CompareOp::Le,
                CompareOp::Ge => CompareOp::Lt,
            };
            Some((opposite, difference))
        }
        _ => comparison(graph, *data.inputs.first()?, &operand_index(graph, value, index)?),
    }
}

/// The integer `value` at `index`, if it is a sum of coordinates and constants. Of 32 bits and more, so that
/// coordinates of a tensor and their differences do not wrap.
fn coordinate(graph: &Graph, value: Value, index: &[Index]) -> Option<Index> {
    if !matches!(graph.dtype(value), DType::I32 | DType::I64) {
        return None;
    }
    let data = graph.def(value);
    let operand = |number: usize| coordinate(graph, data.inputs[number], index);
    let sum = match &data.op {
        Op::Iota { axis, .. } => index[*axis].clone(),
        Op::Constant {
            value: Scalar::Int(value),
            ..
        } => Index::constant(*value),
        Op::Cast(_) => operand(0)?,
        Op::Binary(BinaryOp::Add) => operand(0)?.add(&operand(1)?),
        Op::Binary(BinaryOp::Sub) => operand(0)?.add(&operand(1)?.scale(-1)),
        _ => return coordinate(graph, *data.inputs.first()?, &operand_index(graph, value, index)?),
    };
    // Far from where sums of 32 bits wrap.
    (sum.offset().abs() < 1 << 24).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(lines: &str) -> Option<i64> {
        let text = format!("graph @mask {{\n{lines}\n  %w = reshape %m : bool[1,1,12,12]\n  return %w\n}}");
        let graph = Graph::parse(&text).unwrap();
        let mask = graph.outputs[0].value;
        hidden_ahead(&graph, mask)
    }

    /// Every comparison, against the mask's elements, computed here from its definition.
    #[test]
    fn comparisons_of_coordinates() {
        let at = |axis: usize, name: &str| format!("  %{name} = iota {{axis={axis}}} : i32[12,12]\n");
        let both = at(0, "q") + &at(1, "k");
        let compared =
            |op: &str, a: &str, b: &str| format!("{both}  %m = compare {op} %{a}, %{b} : bool[12,12]");
        assert_eq!(ahead(&compared("gt", "k", "q")), Some(0));
        assert_eq!(ahead(&compared("ge", "k", "q")), Some(-1));
        assert_eq!(ahead(&compared("lt", "q", "k")), Some(0));
        assert_eq!(ahead(&compared("le", "q", "k")), Some(-1));
        // Other orders hide what is in front, or hide by position alone.
        for (op, a, b) in [
            ("lt", "k", "q"),
            ("gt", "q", "k"),
            ("eq", "k", "q"),
            ("gt", "k", "k"),
        ] {
            assert_eq!(ahead(&compared(op, a, b)), None, "{op} {a} {b}");
        }
    }

    #[test]
    fn differences_and_negations() {
        let text = "  %q = iota {axis=0} : i64[12]
  %qq = reshape %q : i64[12,1]
  %qw = broadcast %qq {dims=[0,1]} : i64[12,12]
  %k = iota {axis=0} : i64[12]
  %kw = broadcast %k {dims=[1]} : i64[12,12]
  %d = sub %qw, %kw : i64[12,12]
  %c = constant -3 : i64[]
  %cw = broadcast %c {dims=[]} : i64[12,12]
  %seen = compare ge %d, %cw : bool[12,12]
  %m = not %seen : bool[12,12]";
        // q - k < -3, which is k > q + 3.
        assert_eq!(ahead(text), Some(3));
        let scaled = text.replace("%d = sub %qw, %kw", "%d = mul %qw, %kw");
        assert_eq!(ahead(&scaled), None);
    }
}
