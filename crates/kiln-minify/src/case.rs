//! A graph with arguments that follow from a few numbers, and its text form.

use std::fmt::Write as _;
use std::ops::Range;

use kiln_graph::{DType, Graph, HostTensor, NodeData, Op, ParseError, Scalar, TensorType, Value, indices};

/// The values that the elements of an argument take: uniformly distributed from `low` to `high`, both
/// included.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Interval {
    /// The least.
    pub low: f64,
    /// The largest.
    pub high: f64,
}

/// Which values float arguments of a graph have that nothing is known of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// From -1 to 1.
    Signed,
    /// From 1/16 to 1: for graphs that take roots and logarithms of their arguments.
    Positive,
}

/// A graph and its arguments.
#[derive(Clone, Debug)]
pub struct Case {
    /// The graph.
    pub graph: Graph,
    /// For each tensor argument the values of its elements.
    pub intervals: Vec<Interval>,
    /// The runtime scalars.
    pub scalars: Vec<Scalar>,
    /// The seed that the elements are drawn from.
    pub seed: u64,
}

/// Why a text is no case.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// The graph does not parse.
    #[error("the graph does not parse: {0}")]
    Graph(#[from] ParseError),
    /// A line about an argument does not parse, or there is no such argument.
    #[error("`{0}` is no line about an argument of this graph")]
    Argument(String),
}

/// The beginning of lines that describe the arguments.
const SEED: &str = "// seed ";
const ARGUMENT: &str = "// argument ";
const SCALAR: &str = "// scalar ";

impl Case {
    /// `graph` with arguments of the given kind. Integers that the graph uses as indices are in range.
    pub fn new(graph: Graph, fill: Fill, seed: u64) -> Self {
        let interval = |&value: &Value| match (graph.dtype(value), fill) {
            (DType::Bool, _) => Interval { low: 0.0, high: 1.0 },
            (dtype, _) if dtype.is_unsigned_int() => Interval { low: 0.0, high: 9.0 },
            (dtype, Fill::Signed) if dtype.is_float() => Interval { low: -1.0, high: 1.0 },
            (dtype, Fill::Positive) if dtype.is_float() => Interval {
                low: 1.0 / 16.0,
                high: 1.0,
            },
            (_, Fill::Signed) => Interval { low: -9.0, high: 9.0 },
            (_, Fill::Positive) => Interval { low: 1.0, high: 9.0 },
        };
        let scalar = |(number, &value): (usize, &Value)| match graph.dtype(value) {
            DType::Bool => Scalar::Bool(true),
            dtype if dtype.is_float() => Scalar::Float(0.25),
            dtype if dtype.is_unsigned_int() => Scalar::UInt(number as u64 + 1),
            _ => Scalar::Int(number as i64 + 1),
        };
        let mut case = Self {
            intervals: graph.parameters().iter().map(interval).collect(),
            scalars: graph.scalars().iter().enumerate().map(scalar).collect(),
            // Arguments are drawn one by one.
            graph: graph.without_copies(),
            seed,
        };
        case.fit_indices();
        case
    }

    /// Brings the arguments whose elements are used as indices into range.
    pub(crate) fn fit_indices(&mut self) {
        for check in indices::checks(&self.graph) {
            let last = check.extent.saturating_sub(1) as f64;
            let mut stack = vec![check.indices];
            while let Some(value) = stack.pop() {
                let data = self.graph.def(value);
                if let Op::Parameter { index, .. } = data.op {
                    let interval = &mut self.intervals[index as usize];
                    interval.low = interval.low.clamp(0.0, last);
                    interval.high = interval.high.clamp(interval.low, last);
                } else {
                    stack.extend_from_slice(&data.inputs[elements_from(data)]);
                }
            }
        }
    }

    /// The arguments: equal for equal cases, on every machine.
    pub fn arguments(&self) -> Vec<HostTensor> {
        let parameters = self.graph.parameters().iter().zip(&self.intervals).enumerate();
        parameters
            .map(|(number, (&value, interval))| self.argument(number, self.graph.ty(value), interval))
            .collect()
    }

    fn argument(&self, number: usize, ty: &TensorType, interval: &Interval) -> HostTensor {
        let mut state = mixed(self.seed ^ mixed(number as u64 + 1));
        let mut draw = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            (mixed(state) >> 11) as f64 / (1u64 << 53) as f64
        };
        let Interval { low, high } = *interval;
        if ty.dtype.is_float() {
            let values = (0..ty.numel()).map(|_| low + (high - low) * draw());
            return HostTensor::from_floats(ty.dtype, ty.shape.clone(), values);
        }
        let whole = (0..ty.numel()).map(|_| (low + ((high - low + 1.0) * draw()).floor()).min(high) as i64);
        HostTensor::from_ints(ty.dtype, ty.shape.clone(), whole)
    }

    /// The case as text: comments that say how the arguments are made, and the graph.
    pub fn to_text(&self) -> String {
        let mut text = format!("{SEED}{}\n", self.seed);
        for (number, Interval { low, high }) in self.intervals.iter().enumerate() {
            let _ = writeln!(text, "{ARGUMENT}{number} from {low:?} to {high:?}");
        }
        for (number, scalar) in self.scalars.iter().enumerate() {
            let _ = match scalar {
                Scalar::Float(value) => writeln!(text, "{SCALAR}{number} float {value:?}"),
                Scalar::Int(value) => writeln!(text, "{SCALAR}{number} int {value}"),
                Scalar::UInt(value) => writeln!(text, "{SCALAR}{number} uint {value}"),
                Scalar::Bool(value) => writeln!(text, "{SCALAR}{number} bool {value}"),
            };
        }
        text.push_str(&self.graph.to_string());
        text
    }

    /// Whether a text says how arguments are made. A recorded step's does not.
    pub fn has_arguments(text: &str) -> bool {
        text.lines().any(|line| line.starts_with(SEED))
    }

    /// Reads [`Case::to_text`]. Arguments that the text does not describe are those of [`Case::new`]; other
    /// comments are ignored.
    ///
    /// # Errors
    /// [`CaseError`] if the graph does not parse or a line about an argument does not fit it.
    pub fn parse(text: &str, fill: Fill, seed: u64) -> Result<Self, CaseError> {
        let graph: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let mut case = Self::new(Graph::parse(&graph.join("\n"))?, fill, seed);
        for line in text.lines() {
            let known = if let Some(seed) = line.strip_prefix(SEED) {
                seed.trim().parse().ok().map(|seed| case.seed = seed)
            } else if let Some(rest) = line.strip_prefix(ARGUMENT) {
                case.read_interval(rest)
            } else if let Some(rest) = line.strip_prefix(SCALAR) {
                case.read_scalar(rest)
            } else {
                Some(())
            };
            known.ok_or_else(|| CaseError::Argument(line.to_owned()))?;
        }
        Ok(case)
    }

    fn read_interval(&mut self, text: &str) -> Option<()> {
        let [number, "from", low, "to", high] = text.split_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        let (low, high) = (low.parse().ok()?, high.parse().ok()?);
        *self.intervals.get_mut(number.parse::<usize>().ok()?)? = Interval { low, high };
        Some(())
    }

    fn read_scalar(&mut self, text: &str) -> Option<()> {
        let [number, kind, value] = text.split_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        let scalar = match kind {
            "float" => Scalar::Float(value.parse().ok()?),
            "int" => Scalar::Int(value.parse().ok()?),
            "uint" => Scalar::UInt(value.parse().ok()?),
            "bool" => Scalar::Bool(value.parse().ok()?),
            _ => return None,
        };
        *self.scalars.get_mut(number.parse::<usize>().ok()?)? = scalar;
        Some(())
    }

    /// How large the case is: nodes first, then elements. Shrinking lowers it.
    pub(crate) fn size(&self) -> (usize, usize, usize) {
        let leaf = |op: &Op| matches!(op, Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. });
        let nodes = self.graph.nodes().filter(|(_, data)| !leaf(&data.op)).count();
        let elements = self.graph.values().map(|(_, data)| data.ty.numel()).sum();
        (nodes, self.graph.outputs.len(), elements)
    }
}

/// The operands whose elements, converted at most, are those of the result.
fn elements_from(data: &NodeData) -> Range<usize> {
    match data.op {
        Op::Cast(_)
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Broadcast { .. }
        | Op::Flip(_)
        | Op::Slice { .. }
        | Op::Gather { .. }
        | Op::IndexSelect { .. } => 0..1,
        Op::Concat { .. } => 0..data.inputs.len(),
        Op::Select => 1..3,
        _ => 0..0,
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// 2014).
fn mixed(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
