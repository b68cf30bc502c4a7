//! Steps for operations whose result looks like their operand: pointwise, random, reduce, movement, sort,
//! over ranks, extern.

use smallvec::smallvec;

use super::build::{Builder, Fact, rounding};
use crate::op::{
    ArgReduceOp, BinaryOp, CompareOp, Dims, ExternOp, Op, RandomKind, ReduceOp, SignedDims, UnaryOp,
};
use crate::{Collective, CollectiveKind, DType, Scalar, Shape, TensorType};

impl Builder<'_> {
    pub(super) fn pointwise(&mut self) {
        let kind = match self.config.together && !self.chance(4) {
            true => *self.choose(&[0, 0, 4]),
            false => self.rng.below(10),
        };
        match kind {
            0..=2 => self.float_unary(),
            3 => {
                let op = *self.choose(&[UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Not]);
                let x = if op == UnaryOp::Not && self.chance(2) {
                    self.bool()
                } else {
                    self.int()
                };
                self.exact(Op::Unary(op), &[x]);
            }
            4..=5 => self.float_binary(),
            6 => self.int_binary(),
            7 => {
                let a = self.exact_number();
                let ty = self.ty(a);
                let b = self.exact_of_type(&ty);
                let op = *self.choose(CompareOp::ALL);
                self.exact(Op::Compare(op), &[a, b]);
            }
            8 => {
                let a = self.any();
                let ty = self.ty(a);
                let b = self.of_type(&ty);
                let c = self.of_type(&TensorType {
                    dtype: DType::Bool,
                    shape: ty.shape,
                });
                self.moved(Op::Select, &[c, a, b]);
            }
            _ => self.cast(),
        }
    }

    /// A value of type `ty` that every executor has exactly.
    fn exact_of_type(&mut self, ty: &TensorType) -> Fact {
        let found = self.existing(|fact, other| other == ty && fact.error == 0.0);
        match found {
            Some(found) if !self.chance(3) => found,
            _ => self.source(ty.clone()),
        }
    }

    fn float_unary(&mut self) {
        use UnaryOp::*;
        let op = *self.choose(UnaryOp::ALL);
        let x = self.float();
        match op {
            Not => {}
            Neg | Abs => drop(self.moved(Op::Unary(op), &[x])),
            IsNan | IsInf => drop(self.exact(Op::Unary(op), &[x])),
            Sign | Floor | Ceil | Round | Trunc => {
                let ty = self.ty(x);
                let x = if x.error == 0.0 {
                    x
                } else {
                    self.exact_of_type(&ty)
                };
                self.node(Op::Unary(op), &[x], &[(x.bound + 1.0, 0.0)]);
            }
            Exp | Expm1 | Sinh | Cosh => {
                let x = self.within(x, 3.0);
                self.unary(op, x, x.bound.exp(), x.bound.exp());
            }
            Log | Sqrt | Rsqrt | Recip => {
                let x = self.at_least(x, 0.5);
                // Steepest at 0.5, where 1 / x has slope 4; ln and sqrt stay below their operand's bound or
                // 1.
                self.unary(op, x, x.bound.max(2.0), 4.0);
            }
            Log1p => {
                let x = self.magnitude(x);
                self.unary(op, x, x.bound, 1.0);
            }
            Asinh | Atan | Tanh | Erf | Sigmoid | Sin | Cos => {
                // The slope of erf at 0 is 2 / sqrt(pi).
                self.unary(op, x, x.bound.clamp(1.0, 10.0), 1.2);
            }
            Tan => {
                let x = self.within(x, 1.0);
                self.unary(op, x, 2.0, 4.0);
            }
            Asin | Acos | Atanh => {
                // At 0.5 at most, where the steepest of them (atanh) has slope 4 / 3.
                let x = self.within(x, 1.0);
                let ty = self.ty(x);
                let half = self.full(0.5, &ty);
                let x = self.computed(Op::Binary(BinaryOp::Mul), &[x, half], 0.5, 0.5 * x.error);
                self.unary(op, x, 2.2, 1.4);
            }
            Acosh => {
                let x = self.at_least(x, 1.5);
                self.unary(op, x, x.bound, 1.0);
            }
        }
    }

    fn float_binary(&mut self) {
        use BinaryOp::*;
        let op = *self.choose(&[Add, Sub, Mul, Div, Rem, Pow, Atan2, Max, Min]);
        let a = self.float();
        let ty = self.ty(a);
        let b = self.of_type(&ty);
        match op {
            Add | Sub => drop(self.computed(Op::Binary(op), &[a, b], a.bound + b.bound, a.error + b.error)),
            Mul => {
                let error = a.error * b.bound + b.error * a.bound;
                self.computed(Op::Binary(op), &[a, b], a.bound * b.bound, error);
            }
            Div => {
                let b = self.at_least(b, 0.5);
                let error = 2.0 * a.error + 4.0 * a.bound * b.error;
                self.computed(Op::Binary(op), &[a, b], 2.0 * a.bound, error);
            }
            Rem => {
                // A quotient by a power of two is exact, so every executor takes the same floor.
                let a = if a.error == 0.0 {
                    a
                } else {
                    self.exact_of_type(&ty)
                };
                let divisor = *self.choose(&[0.5, -2.0, 4.0]);
                let divisor = self.full(divisor, &ty);
                self.computed(Op::Binary(op), &[a, divisor], a.bound + 4.0, 0.0);
            }
            Pow if self.chance(2) => {
                let a = self.within(a, 4.0);
                let exponent = *self.choose(&[2.0, 3.0]);
                let exponent = self.full(exponent, &ty);
                self.computed(Op::Binary(op), &[a, exponent], 64.0, 48.0 * a.error);
            }
            Pow => {
                // a in [0.5, 2.5], b in [-2, 2]: |da| is at most 2 * 0.5^-3, |db| at most 6.25 ln 2.5.
                let a = self.within(a, 2.0);
                let a = self.at_least(a, 0.5);
                let b = self.within(b, 2.0);
                self.computed(Op::Binary(op), &[a, b], 6.25, 16.0 * a.error + 6.0 * b.error);
            }
            Atan2 => {
                let b = self.at_least(b, 0.5);
                self.computed(Op::Binary(op), &[a, b], 1.6, 2.0 * (a.error + b.error));
            }
            _ => drop(self.moved(Op::Binary(op), &[a, b])),
        }
    }

    fn int_binary(&mut self) {
        use BinaryOp::*;
        let logical = [And, Or, Xor];
        let (op, a) = if self.chance(4) {
            (*self.choose(&logical), self.bool())
        } else {
            let op = *self.choose(&[Add, Sub, Mul, Div, Rem, Pow, Max, Min, And, Or, Xor, Shl, Shr]);
            (op, self.int())
        };
        let ty = self.ty(a);
        let b = self.of_type(&ty);
        self.exact(Op::Binary(op), &[a, b]);
    }

    fn cast(&mut self) {
        let x = self.any();
        let from = self.ty(x).dtype;
        let to = match self.rng.below(3) {
            0 => DType::Bool,
            1 => self.int_dtype(),
            _ => self.float_dtype(),
        };
        match (from.is_float(), to.is_float()) {
            (true, true) => {
                let narrows = to.size() < from.size() || (to.size() == 2 && to != from);
                let added = if narrows { rounding(to, x.bound) } else { 0.0 };
                self.node(Op::Cast(to), &[x], &[(x.bound, x.error + added)]);
            }
            (true, false) => {
                let ty = self.ty(x);
                let x = if x.error == 0.0 {
                    x
                } else {
                    self.exact_of_type(&ty)
                };
                self.exact(Op::Cast(to), &[x]);
            }
            (false, true) => {
                let ty = self.ty(x);
                let x = if from == DType::Bool {
                    x
                } else {
                    self.indices(&ty, 13)
                };
                self.node(Op::Cast(to), &[x], &[(13.0, 0.0)]);
            }
            (false, false) => drop(self.exact(Op::Cast(to), &[x])),
        }
    }

    /// A rank-0 seed or stream: a runtime scalar or a constant.
    pub(super) fn word(&mut self) -> Fact {
        if self.chance(2) {
            let index = self.graph.scalars().len() as u32;
            self.exact(
                Op::Scalar {
                    index,
                    dtype: DType::U64,
                },
                &[],
            )
        } else {
            let value = Scalar::UInt(self.rng.draw());
            self.constant(value, DType::U64)
        }
    }

    pub(super) fn random(&mut self) {
        let (seed, stream) = (self.word(), self.word());
        let shape = self.shape();
        let kind = *self.choose(RandomKind::ALL);
        let dtype = if kind == RandomKind::IntRange {
            self.int_dtype()
        } else {
            self.float_dtype()
        };
        let op = Op::Random { kind, dtype, shape };
        match kind {
            RandomKind::Uniform => drop(self.node(op, &[seed, stream], &[(1.0, 0.0)])),
            // The error is 4 times larger, because logarithm, root and sine each round. The largest draw is
            // sqrt(2 * 53 ln 2).
            RandomKind::Normal => drop(self.node(op, &[seed, stream], &[(9.0, 4.0 * rounding(dtype, 9.0))])),
            RandomKind::IntRange => {
                let low = self.constant(3i64, DType::I64);
                let high = self.rng.below(60) as i64;
                let high = self.constant(high, DType::I64);
                self.exact(op, &[seed, stream, low, high]);
            }
        }
    }

    pub(super) fn reduce(&mut self) {
        let kinds = if self.config.together { 12 } else { 4 };
        match self.rng.below(kinds) {
            0 | 1 | 4.. => self.plain_reduce(),
            2 => {
                let x = self.ranked(Self::exact_number);
                let axis = self.axis(x);
                let x = if self.ty(x).shape[axis] > 0 && x.error == 0.0 {
                    x
                } else {
                    let ty = self.ty(x);
                    self.parameter(TensorType {
                        dtype: ty.dtype,
                        shape: ty.shape.with(axis, 3),
                    })
                };
                let (op, dtype) = (*self.choose(ArgReduceOp::ALL), self.index_dtype());
                self.exact(Op::ArgReduce { op, axis, dtype }, &[x]);
            }
            _ => {
                let x = self.ranked(Self::number);
                let axis = self.axis(x);
                let op = *self.choose(&[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]);
                let run = self.ty(x).shape[axis];
                let (x, fact) = self.combined(op, x, run);
                self.node(Op::Cumulative { op, axis }, &[x], &[fact]);
            }
        }
    }

    fn plain_reduce(&mut self) {
        if self.chance(6) {
            let x = self.bool();
            let rank = self.ty(x).shape.rank();
            let axes = self.axes(rank);
            if !axes.is_empty() {
                let op = *self.choose(&[ReduceOp::Any, ReduceOp::All]);
                self.exact(Op::Reduce { op, axes }, &[x]);
            }
            return;
        }
        let x = self.ranked(Self::number);
        let shape = self.ty(x).shape;
        let mut axes = self.axes(shape.rank());
        if self.config.together && self.chance(2) {
            // The sums of the gradients of a bias, or the statistics of a normalisation.
            let kept = self.axis(x);
            axes = (0..shape.rank()).filter(|&axis| axis != kept).collect();
        }
        if axes.is_empty() {
            axes.push(shape.rank() - 1);
        }
        let mut op = *self.choose(&[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]);
        if self.config.together && self.chance(2) {
            op = ReduceOp::Sum;
        }
        let run: usize = axes.iter().map(|&axis| shape[axis]).product();
        let (x, fact) = self.combined(op, x, run);
        self.node(Op::Reduce { op, axes }, &[x], &[fact]);
    }

    /// The operand of a reduction over `run` elements made safe, and the bound and error of the result.
    fn combined(&mut self, op: ReduceOp, x: Fact, run: usize) -> (Fact, (f64, f64)) {
        let dtype = self.ty(x).dtype;
        if !dtype.is_float() {
            return (x, (0.0, 0.0));
        }
        let n = run as f64;
        match op {
            ReduceOp::Sum => {
                let bound = n * x.bound;
                (x, (bound, n * x.error + n * rounding(dtype, bound)))
            }
            ReduceOp::Prod => {
                let x = self.within(x, 1.0);
                (x, (1.0, n * x.error + n * rounding(dtype, 1.0)))
            }
            // The extremes of nothing are infinite, and no node computes on with infinities.
            _ if run == 0 => (x, (f64::INFINITY, 0.0)),
            _ => (x, (x.bound, x.error)),
        }
    }

    pub(super) fn movement(&mut self) {
        let x = self.ranked(Self::any);
        let ty = self.ty(x);
        let (shape, rank) = (ty.shape.clone(), ty.shape.rank());
        match self.rng.below(10) {
            0 => {
                let target = self.regrouped(&shape);
                self.moved(Op::Reshape(target), &[x]);
            }
            1 | 2 => {
                let mut perm: Dims = (0..rank).collect();
                for to in 1..rank {
                    let from = self.between(0, to);
                    perm.swap(to, from);
                }
                self.moved(Op::Transpose(perm), &[x]);
            }
            3 => {
                // Extents of 1 may grow, and new dimensions come in anywhere.
                let (mut target, mut dims) = (Shape::scalar(), Dims::new());
                for axis in 0..rank {
                    if self.chance(4) && target.rank() + rank - axis < 5 {
                        target = target.iter().copied().chain([2]).collect();
                    }
                    dims.push(target.rank());
                    let extent = if shape[axis] == 1 {
                        self.extent()
                    } else {
                        shape[axis]
                    };
                    target = target.iter().copied().chain([extent]).collect();
                }
                if target.numel() <= 4 * self.config.max_elements {
                    self.moved(Op::Broadcast { shape: target, dims }, &[x]);
                }
            }
            4 | 5 => {
                let (mut starts, mut limits, mut steps) = (Dims::new(), Dims::new(), Dims::new());
                for &extent in shape.iter() {
                    let start = self.between(0, extent);
                    starts.push(start);
                    limits.push(self.between(start, extent));
                    steps.push(self.between(1, 3));
                }
                self.moved(
                    Op::Slice {
                        starts,
                        limits,
                        steps,
                    },
                    &[x],
                );
            }
            6 => {
                let value = if ty.dtype.is_float() {
                    Scalar::Float(0.5)
                } else {
                    Scalar::Int(1)
                };
                let value = self.constant(value, ty.dtype);
                let (mut low, mut high) = (SignedDims::new(), SignedDims::new());
                for &extent in shape.iter() {
                    let crop = -((extent as i64) / 2);
                    low.push(crop.max(-2) + self.rng.below(4) as i64);
                    high.push(crop.max(-2) + self.rng.below(4) as i64);
                }
                self.moved(Op::Pad { low, high }, &[x, value]);
            }
            7 => {
                let axis = self.axis(x);
                let mut parts = vec![x];
                for _ in 0..self.between(0, 2) {
                    let shape = shape.with(axis, self.extent());
                    parts.push(self.of_type(&TensorType {
                        dtype: ty.dtype,
                        shape,
                    }));
                }
                self.moved(Op::Concat { axis }, &parts);
            }
            8 => {
                let axes = self.axes(rank);
                self.moved(Op::Flip(axes), &[x]);
            }
            _ => {
                let (mut starts, mut steps, mut extents) = (Dims::new(), Dims::new(), Dims::new());
                for &extent in shape.iter() {
                    let (start, step) = (self.between(0, extent), self.between(1, 3));
                    starts.push(start);
                    steps.push(step);
                    extents.push(self.between(0, (extent - start).div_ceil(step)));
                }
                let update = self.of_type(&TensorType::new(ty.dtype, Shape::from(&extents[..])));
                self.moved(Op::UpdateSlice { starts, steps }, &[x, update]);
            }
        }
    }

    /// Another shape of the same number of elements: neighbours merged, ones put in.
    fn regrouped(&mut self, shape: &[usize]) -> Shape {
        let mut out: Dims = Dims::new();
        for &extent in shape {
            if self.chance(2) && !out.is_empty() {
                *out.last_mut().expect("not empty") *= extent;
            } else {
                out.push(extent);
            }
            if self.chance(4) && out.len() < 4 {
                out.push(1);
            }
        }
        Shape::from(&out[..])
    }

    pub(super) fn sort(&mut self) {
        let mut x = self.ranked(Self::exact_number);
        if x.error > 0.0 {
            let ty = self.ty(x);
            x = self.parameter(ty);
        }
        let (axis, dtype) = (self.axis(x), self.index_dtype());
        let facts = [(x.bound, 0.0), (0.0, 0.0)];
        if self.chance(2) {
            let descending = self.chance(2);
            self.node(
                Op::Sort {
                    axis,
                    descending,
                    dtype,
                },
                &[x],
                &facts,
            );
        } else {
            let extent = self.ty(x).shape[axis];
            let k = self.between(0, extent);
            self.node(Op::TopK { axis, k, dtype }, &[x], &facts);
        }
    }

    /// A mean or sum over two ranks, or a copy of rank 1; of one rank elsewhere would be no test.
    pub(super) fn collective(&mut self) {
        let x = self.any();
        let (float, number) = {
            let dtype = self.ty(x).dtype;
            (dtype.is_float(), dtype != DType::Bool)
        };
        let reduces = number && self.chance(2);
        let kind = if reduces {
            CollectiveKind::AllReduce
        } else {
            CollectiveKind::FromRoot
        };
        let collective = Collective {
            mean: reduces && float && self.chance(2),
            root: usize::from(!reduces),
            ..Collective::new(kind, 2)
        };
        self.node(Op::Collective(collective), &[x], &[(f64::INFINITY, 0.0)]);
    }

    pub(super) fn external(&mut self) {
        let operands: Vec<Fact> = (0..self.between(0, 2)).map(|_| self.any()).collect();
        let outputs = match self.between(0, 2) {
            0 => smallvec![],
            1 => smallvec![TensorType::new(DType::F32, [2])],
            _ => smallvec![
                TensorType::new(DType::F32, []),
                TensorType::new(DType::Bool, [0, 3])
            ],
        };
        let op = ExternOp {
            name: "user op \"x\"".into(),
            attributes: "{a = 1;\n b = %2}".into(),
            c_source: ["", "/* \"c\" */\nint x;"][self.between(0, 1)].into(),
            outputs,
        };
        self.node(
            Op::Extern(Box::new(op)),
            &operands,
            &[(f64::INFINITY, 0.0), (0.0, 0.0)],
        );
    }
}
