//! Graphs that differ in extents alone, and the others on the line through two of them.
//!
//! Two recordings of one program with inputs of two sizes are graphs of one structure in which some numbers differ. A
//! third graph has inputs of a third size: their extents follow the line through both, and the types of
//! results follow from operations and operands. What remains are extents that a program states itself (the
//! shape of a reshape, the count of a mean). A pair of these is a pair that was met before, a product of such, or
//! `a * size + b`. The graph is well typed, but that a program would record it is a guess: it serves
//! as a sample, and nothing is run in its place.

use smallvec::SmallVec;

use crate::op::{Dims, SignedDims, Window};
use crate::{Graph, Op, Scalar, Shape, TensorType, Value};

/// A whole number that differs, in both graphs.
type Pair = (i64, i64);

/// Factors of a number that are tried.
const FACTORS: usize = 3;

/// The line through two graphs.
#[derive(Clone, Debug)]
pub struct Line {
    first: Graph,
    second: Graph,
    sizes: Pair,
    /// The pairs of extents that differ in the inputs, least first.
    kinds: Vec<Pair>,
    /// Whether only the pair of the sizes varies, and others are as in the second graph.
    one_kind: bool,
}

impl Line {
    /// The line through two graphs; none if they are equal, or differ in more than numbers.
    pub fn through(first: &Graph, second: &Graph) -> Option<Self> {
        let alike = first.num_nodes() == second.num_nodes()
            && first.outputs == second.outputs
            && first.nodes().zip(second.nodes()).all(|((_, a), (_, b))| {
                std::mem::discriminant(&a.op) == std::mem::discriminant(&b.op)
                    && a.inputs == b.inputs
                    && a.outputs == b.outputs
            });
        if !alike {
            return None;
        }
        let mut pairs: Vec<Pair> = Vec::new();
        for (&a, &b) in first.parameters().iter().zip(second.parameters()) {
            let (a, b) = (first.ty(a), second.ty(b));
            if a.dtype != b.dtype || a.shape.rank() != b.shape.rank() {
                return None;
            }
            let differing = pairs_of(&a.shape, &b.shape).filter(|(a, b)| a != b);
            pairs.extend(differing);
        }
        let sizes = pairs
            .iter()
            .copied()
            .min_by_key(|(a, b)| ((a - b).abs(), *a.min(b)))?;
        pairs.sort_unstable();
        pairs.dedup();
        Some(Self {
            first: first.clone(),
            second: second.clone(),
            sizes,
            kinds: pairs,
            one_kind: false,
        })
    }

    /// The smallest of the inputs' extents that differ least, in both graphs: the size of a graph on the line.
    pub fn sizes(&self) -> (i64, i64) {
        self.sizes
    }

    /// How many pairs of extents differ in the inputs.
    pub fn kinds(&self) -> usize {
        self.kinds.len()
    }

    /// The lines along which one pair of extents varies and the others are as in the second graph, one for
    /// each pair.
    pub fn of_each_kind(&self) -> impl Iterator<Item = Self> {
        self.kinds.iter().map(move |&sizes| Self {
            sizes,
            one_kind: true,
            ..self.clone()
        })
    }

    /// The graph of a size; none if an extent of it would be no whole number or negative, or if operations do not fit.
    pub fn at(&self, size: i64) -> Option<Graph> {
        let mut third = Third {
            line: self,
            size,
            graph: Graph::new(self.first.name.clone()),
            known: Vec::new(),
        };
        for ((_, a), (_, b)) in self.first.nodes().zip(self.second.nodes()) {
            let op = third.op(&a.op, &b.op, &a.inputs)?;
            let results = third.graph.add_node(op, &a.inputs, a.provenance.clone()).ok()?;
            for (result, &value) in results.iter().zip(&a.outputs) {
                third.learn(*result, value)?;
            }
        }
        third.graph.outputs.clone_from(&self.first.outputs);
        Some(third.graph)
    }
}

/// Extents of two shapes of one rank.
fn pairs_of<'a>(a: &'a [usize], b: &'a [usize]) -> impl Iterator<Item = Pair> + 'a {
    a.iter().zip(b).map(|(&a, &b)| (a as i64, b as i64))
}

/// A graph on the line while it is made.
struct Third<'a> {
    line: &'a Line,
    size: i64,
    graph: Graph,
    /// Pairs that differ, with the number of this graph.
    known: Vec<(Pair, i64)>,
}

impl Third<'_> {
    /// Notes the extents of `value`, which is `of` in the other graphs.
    fn learn(&mut self, value: Value, of: Value) -> Option<()> {
        let (a, b) = (self.line.first.shape(of), self.line.second.shape(of));
        let own = self.graph.shape(value);
        if a.rank() != b.rank() || a.rank() != own.rank() {
            return None;
        }
        for (pair, &own) in pairs_of(a, b).zip(own.iter()) {
            if pair.0 != pair.1 && self.find(pair).is_none() {
                self.known.push((pair, own as i64));
            }
        }
        Some(())
    }

    fn find(&self, pair: Pair) -> Option<i64> {
        let known = self.known.iter().find(|(other, _)| *other == pair);
        known.map(|&(_, number)| number)
    }

    /// The number that is `a * size + b`.
    fn linear(&self, (a, b): Pair) -> Option<i64> {
        let (from, to) = self.line.sizes;
        let more = (b - a).checked_mul(self.size - from)?;
        (more % (to - from) == 0).then(|| a + more / (to - from))
    }

    /// The number that is a product of at most so many that are known, and a constant.
    fn product(&self, (a, b): Pair, factors: usize) -> Option<i64> {
        if a == b {
            return Some(a);
        }
        if let Some(known) = self.find((a, b)) {
            return Some(known);
        }
        if factors == 0 {
            return None;
        }
        self.known.iter().find_map(|&((p, q), number)| {
            let divides = p > 0 && q > 0 && a % p == 0 && b % q == 0;
            let rest = divides.then(|| self.product((a / p, b / q), factors - 1))??;
            rest.checked_mul(number)
        })
    }

    fn number(&self, pair: Pair) -> Option<i64> {
        self.product(pair, FACTORS).or_else(|| self.linear(pair))
    }

    fn extent(&self, a: usize, b: usize) -> Option<usize> {
        self.number((a as i64, b as i64))?.try_into().ok()
    }

    fn dims(&self, a: &[usize], b: &[usize]) -> Option<Dims> {
        let same_rank = a.len() == b.len();
        let dims = same_rank.then(|| a.iter().zip(b).map(|(&a, &b)| self.extent(a, b)));
        dims?.collect()
    }

    fn shape(&self, a: &Shape, b: &Shape) -> Option<Shape> {
        self.dims(a, b).map(Shape::new)
    }

    fn signed(&self, a: &[i64], b: &[i64]) -> Option<SignedDims> {
        let pairs = (a.len() == b.len()).then(|| a.iter().zip(b));
        pairs?.map(|(&a, &b)| self.number((a, b))).collect()
    }

    fn window(&self, a: &Window, b: &Window) -> Option<Window> {
        Some(Window {
            size: self.dims(&a.size, &b.size)?,
            stride: self.dims(&a.stride, &b.stride)?,
            pad_low: self.dims(&a.pad_low, &b.pad_low)?,
            pad_high: self.dims(&a.pad_high, &b.pad_high)?,
            ..a.clone()
        })
    }

    fn scalar(&self, a: Scalar, b: Scalar) -> Option<Scalar> {
        Some(match (a, b) {
            _ if a == b => a,
            (Scalar::Int(a), Scalar::Int(b)) => Scalar::Int(self.number((a, b))?),
            (Scalar::UInt(a), Scalar::UInt(b)) => {
                let pair = (a.try_into().ok()?, b.try_into().ok()?);
                Scalar::UInt(self.number(pair)?.try_into().ok()?)
            }
            (Scalar::Float(a), Scalar::Float(b)) => Scalar::Float(self.float(a, b)?),
            _ => return None,
        })
    }

    /// A count, the reciprocal of one (the weight of a mean), or something in proportion to a reciprocal.
    fn float(&self, a: f64, b: f64) -> Option<f64> {
        let whole = |x: f64| (x.abs() < 1e15 && x.fract() == 0.0).then_some(x as i64);
        if let (Some(a), Some(b)) = (whole(a), whole(b)) {
            return self.number((a, b)).map(|number| number as f64);
        }
        // A reciprocal that was rounded to f32.
        let count = |x: f64| {
            let count = (1.0 / x).round();
            ((1.0 / x - count).abs() <= 1e-6 * count.abs()).then(|| whole(count))?
        };
        if let (Some(a), Some(b)) = (count(a), count(b))
            && let Some(number) = self.number((a, b))
            && number != 0
        {
            return Some(1.0 / number as f64);
        }
        let (from, to) = self.line.sizes;
        let along = (self.size - from) as f64 / (to - from) as f64;
        let number = 1.0 / (1.0 / a + (1.0 / b - 1.0 / a) * along);
        let plausible = number.is_finite() && (number < 0.0) == (a < 0.0);
        Some(if plausible { number } else { a })
    }

    /// The shape of a reshape of `operand`: an extent that no rule gives is the product of neighbouring extents
    /// of the operand, or what is left.
    fn reshape(&self, a: &Shape, b: &Shape, operand: Value) -> Option<Shape> {
        let line = self.line;
        let [from_a, from_b, own] = [
            line.first.shape(operand),
            line.second.shape(operand),
            self.graph.shape(operand),
        ];
        let run = |(a, b): Pair| {
            let rank = own.rank().min(from_a.rank()).min(from_b.rank());
            let ranges = (0..rank).flat_map(|from| (from + 1..=rank).map(move |to| from..to));
            let product = |shape: &Shape, range: &std::ops::Range<usize>| -> i64 {
                shape[range.clone()].iter().map(|&extent| extent as i64).product()
            };
            let mut ranges = ranges.filter(|it| product(from_a, it) == a && product(from_b, it) == b);
            ranges.next().map(|range| product(own, &range))
        };
        if a.rank() != b.rank() {
            return None;
        }
        let found: SmallVec<[Option<i64>; 4]> = pairs_of(a, b)
            .map(|pair| match pair.0 == pair.1 {
                true => Some(pair.0),
                false => self.find(pair).or_else(|| run(pair)),
            })
            .collect();
        let rest: i64 = found.iter().flatten().product();
        let unknown = found.iter().filter(|it| it.is_none()).count();
        let all = own.numel() as i64;
        let dims = found.iter().zip(pairs_of(a, b)).map(|(found, pair)| {
            let number = match found {
                Some(number) => *number,
                None if unknown == 1 && rest > 0 => (all % rest == 0).then_some(all / rest)?,
                None => self.number(pair)?,
            };
            usize::try_from(number).ok()
        });
        dims.collect::<Option<Dims>>().map(Shape::new)
    }

    /// The operation that is `a` and `b` in the other graphs.
    fn op(&self, a: &Op, b: &Op, operands: &[Value]) -> Option<Op> {
        if let (
            Op::Parameter {
                index,
                ty: a,
                copy_of,
            },
            Op::Parameter {
                ty: b,
                copy_of: other,
                ..
            },
        ) = (a, b)
        {
            if copy_of != other {
                return None;
            }
            let line = self.line;
            let dims = pairs_of(&a.shape, &b.shape).map(|pair| match line.one_kind && pair != line.sizes {
                true => usize::try_from(pair.1).ok(),
                false => usize::try_from(self.linear(pair)?).ok(),
            });
            let shape = Shape::new(dims.collect::<Option<Dims>>()?);
            let ty = TensorType {
                dtype: a.dtype,
                shape,
            };
            return Some(Op::Parameter {
                index: *index,
                ty,
                copy_of: *copy_of,
            });
        }
        if a == b {
            return Some(a.clone());
        }
        let mut op = a.clone();
        match (&mut op, b) {
            (Op::Constant { value, .. }, Op::Constant { value: other, .. }) => {
                *value = self.scalar(*value, *other)?;
            }
            (Op::Reshape(shape), Op::Reshape(other)) => *shape = self.reshape(shape, other, operands[0])?,
            (Op::Iota { shape, .. }, Op::Iota { shape: other, .. })
            | (Op::Random { shape, .. }, Op::Random { shape: other, .. })
            | (Op::Broadcast { shape, .. }, Op::Broadcast { shape: other, .. }) => {
                *shape = self.shape(shape, other)?;
            }
            (
                Op::Slice { starts, limits, .. },
                Op::Slice {
                    starts: other_starts,
                    limits: other_limits,
                    ..
                },
            ) => {
                *starts = self.dims(starts, other_starts)?;
                *limits = self.dims(limits, other_limits)?;
            }
            (Op::UpdateSlice { starts, .. }, Op::UpdateSlice { starts: other, .. }) => {
                *starts = self.dims(starts, other)?;
            }
            (
                Op::Pad { low, high },
                Op::Pad {
                    low: other_low,
                    high: other_high,
                },
            ) => {
                *low = self.signed(low, other_low)?;
                *high = self.signed(high, other_high)?;
            }
            (Op::ConvInputGrad { input, .. }, Op::ConvInputGrad { input: other, .. })
            | (Op::MaxPoolGrad { input }, Op::MaxPoolGrad { input: other }) => {
                *input = self.dims(input, other)?;
            }
            (Op::MaxPool(window), Op::MaxPool(other))
            | (Op::MaxPoolWithIndices { window, .. }, Op::MaxPoolWithIndices { window: other, .. })
            | (Op::AvgPool { window, .. }, Op::AvgPool { window: other, .. }) => {
                *window = self.window(window, other)?;
            }
            (
                Op::AvgPoolGrad { window, input, .. },
                Op::AvgPoolGrad {
                    window: other,
                    input: other_input,
                    ..
                },
            ) => {
                *window = self.window(window, other)?;
                *input = self.dims(input, other_input)?;
            }
            (Op::TopK { k, .. }, Op::TopK { k: other, .. }) => *k = self.extent(*k, *other)?,
            // What else has numbers of its own has them for other reasons.
            _ => return None,
        }
        Some(op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(text: &str) -> Graph {
        Graph::parse(text).unwrap()
    }

    fn step(length: usize, kept: usize, scale: &str) -> Graph {
        graph(&format!(
            "graph @step {{\n  %0 = parameter 0 : f32[8,{length}]\n  %1 = reshape %0 : f32[{}]\n  %2 = slice %1 \
             {{starts=[1], limits=[{}], steps=[1]}} : f32[{kept}]\n  %3 = constant {scale} : f32[]\n  return %2, %3\n}}\n",
            8 * length,
            kept + 1
        ))
    }

    #[test]
    fn graphs_of_other_sizes_lie_on_the_line() {
        let line = Line::through(&step(37, 36, "0.5"), &step(128, 127, "0.5")).unwrap();
        assert_eq!(line.sizes(), (37, 128));
        assert_eq!(line.at(64).unwrap(), step(64, 63, "0.5"));
        let line = Line::through(&step(32, 32, "0.25"), &step(64, 64, "0.125")).unwrap();
        assert_eq!(line.at(16).unwrap(), step(16, 16, "0.5"));
        assert_eq!(line.at(-3), None, "extents are not negative");
        let line = Line::through(&step(64, 1, "1"), &step(128, 2, "1")).unwrap();
        assert_eq!(line.at(256).unwrap(), step(256, 4, "1"));
    }

    /// A convolution that halves an image, and the mean over what is left.
    fn image(batch: usize, size: usize) -> Graph {
        let half = size.div_ceil(2);
        graph(&format!(
            "graph @step {{\n  %0 = parameter 0 : f32[{batch},3,{size},{size}]\n  %1 = parameter 1 : f32[5,3,3,3]\n  %2 = conv %0, %1 \
             {{stride=[2,2], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1}} : f32[{batch},5,{half},{half}]\n  %3 = transpose \
             %2 {{perm=[1,0,2,3]}} : f32[5,{batch},{half},{half}]\n  %4 = reshape %3 : f32[5,{all}]\n  %5 = reduce sum %4 {{axes=[1]}} : f32[5]\n  \
             %6 = constant {all}.0 : f32[]\n  %7 = broadcast %6 {{dims=[]}} : f32[5]\n  %8 = div %5, %7 : f32[5]\n  %9 = constant \
             {weight:?} : f32[]\n  return %8, %9\n}}\n",
            all = batch * half * half,
            weight = 1.0 / (batch * half * half) as f64,
        ))
    }

    #[test]
    fn extents_of_images_follow_from_operations() {
        let line = Line::through(&image(4, 64), &image(4, 97)).unwrap();
        assert_eq!(line.sizes(), (64, 97));
        for size in [33, 65, 70, 128_usize] {
            assert_eq!(line.at(size as i64).unwrap(), image(4, size), "size {size}");
        }
        let line = Line::through(&image(4, 64), &image(7, 64)).unwrap();
        assert_eq!(line.at(16).unwrap(), image(16, 64));
        let line = Line::through(&image(4, 97), &image(11, 96)).unwrap();
        let each: Vec<Line> = line.of_each_kind().collect();
        assert_eq!(
            each.iter().map(Line::sizes).collect::<Vec<_>>(),
            [(4, 11), (97, 96)]
        );
        assert_eq!(each[0].at(5).unwrap(), image(5, 96));
        assert_eq!(each[1].at(65).unwrap(), image(11, 65));
    }

    #[test]
    fn other_graphs_are_on_no_line() {
        let one = step(4, 3, "1");
        assert!(Line::through(&one, &one).is_none());
        let other = graph("graph @step {\n  %0 = parameter 0 : f32[8,4]\n  return %0\n}\n");
        assert!(Line::through(&one, &other).is_none());
    }
}
