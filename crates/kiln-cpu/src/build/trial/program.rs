//! The program of a trial: one graph, every output of which has a name.
//!
//! The list is short, because a compiler takes some ten milliseconds for each of its entries while the user
//! waits. Of functions that differ in the type alone, and of those that are a call of the C library for
//! each lane, it has the ones that training needs. Arguments hold zeros of both signs, infinities, NaN,
//! subnormal numbers and the ends of each range among ordinary values. They fill whole vectors and a part
//! of one, because these are different code.

use kiln_graph::op::{
    ArgReduceOp, BinaryOp, CompareOp, ConvDims, Dims, DotDims, Op, RandomKind, ReduceOp, UnaryOp,
};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, Shape, TypeError, Value};

/// Units in the last place that the functions of the C library and of this crate may be off, rounding of the
/// expected value included.
const FUNCTION: f64 = 4.0;

/// Elements of a row: whole vectors of every instruction set, and a part of one.
const ROW: usize = 45;

/// Functions that vectors of f32 have code for, and one of those that are called lane by lane.
const SINGLE: [UnaryOp; 22] = {
    use UnaryOp::*;
    [
        Neg, Abs, Sign, Floor, Ceil, Round, Trunc, IsNan, IsInf, Recip, Sqrt, Rsqrt, Exp, Expm1, Log, Log1p,
        Tanh, Sigmoid, Erf, Sin, Cos, Atan,
    ]
};

/// The same for f64.
const DOUBLE: [UnaryOp; 8] = {
    use UnaryOp::*;
    [Neg, Abs, Sign, Floor, IsNan, Sqrt, Exp, Erf]
};

/// One output.
pub struct Check {
    /// What it computes, for people.
    pub name: String,
    /// Units in the last place that it may be off.
    pub units: f64,
}

/// The graph with its arguments, and what each of its outputs is.
pub struct Program {
    pub graph: Graph,
    pub arguments: Vec<HostTensor>,
    pub scalars: Vec<Scalar>,
    pub checks: Vec<Check>,
}

type Built<T = ()> = Result<T, TypeError>;

impl Program {
    /// The complete list.
    pub fn new() -> Built<Self> {
        let mut program = Self {
            graph: Graph::new("compiler_trial"),
            arguments: Vec::new(),
            scalars: Vec::new(),
            checks: Vec::new(),
        };
        // Basic functions come first, because the error names the first output that is wrong.
        program.functions(DType::F32, &SINGLE, CompareOp::ALL)?;
        program.functions(DType::F64, &DOUBLE, &[CompareOp::Lt])?;
        program.patterns()?;
        program.conversions()?;
        program.integers()?;
        program.reductions()?;
        program.random()?;
        program.kernels()?;
        Ok(program)
    }

    fn argument(&mut self, tensor: HostTensor) -> Value {
        let value = self.graph.parameter(tensor.ty().clone());
        self.arguments.push(tensor);
        value
    }

    fn floats(&mut self, dtype: DType, values: impl IntoIterator<Item = f64>) -> Value {
        let values: Vec<f64> = values.into_iter().collect();
        let shape = [values.len()];
        self.argument(HostTensor::from_floats(dtype, shape, values))
    }

    fn add(&mut self, op: Op, operands: &[Value]) -> Built<Value> {
        self.graph.add(op, operands, &Provenance::default())
    }

    fn unary(&mut self, op: UnaryOp, x: Value) -> Built<Value> {
        self.add(Op::Unary(op), &[x])
    }

    fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Built<Value> {
        self.add(Op::Binary(op), &[a, b])
    }

    fn compare(&mut self, op: CompareOp, a: Value, b: Value) -> Built<Value> {
        self.add(Op::Compare(op), &[a, b])
    }

    fn number(&mut self, number: f64, like: Value) -> Built<Value> {
        let ty = self.graph.ty(like).clone();
        self.graph
            .full(Scalar::Float(number), &ty, &Provenance::default())
    }

    fn check(&mut self, value: Value, name: impl Into<String>, units: f64) {
        self.graph.output(value, None);
        let name = name.into();
        self.checks.push(Check { name, units });
    }

    /// Pointwise functions of floats.
    fn functions(&mut self, dtype: DType, unary: &[UnaryOp], compare: &[CompareOp]) -> Built {
        use BinaryOp::*;
        use UnaryOp::*;
        let x = self.floats(dtype, numbers());
        let y = self.floats(dtype, numbers().into_iter().rev());
        // Either of two zeros with different signs is the larger, so minimum and maximum get arguments
        // without zeros.
        let (a, b) = (self.floats(dtype, mixed(1)), self.floats(dtype, mixed(4)));
        for (op, a, b) in [
            (Add, x, y),
            (Sub, x, y),
            (Mul, x, y),
            (Div, x, y),
            (Max, a, b),
            (Min, a, b),
        ] {
            let result = self.binary(op, a, b)?;
            self.check(result, format!("{} of {dtype}", op.name()), 0.0);
        }
        for &op in compare {
            let result = self.compare(op, x, y)?;
            self.check(result, format!("{} of {dtype}", op.name()), 0.0);
        }
        for &op in unary {
            let units = match op {
                Neg | Abs | Sign | Floor | Ceil | Round | Trunc | Sqrt | Recip | IsNan | IsInf => 0.0,
                _ => FUNCTION,
            };
            let result = self.unary(op, x)?;
            self.check(result, format!("{} of {dtype}", op.name()), units);
        }
        let sixteenths = self.floats(dtype, (0..ROW).map(|i| i as f64 / 16.0 - 1.5));
        let divisor = self.number(-0.75, sixteenths)?;
        let rest = self.binary(Rem, sixteenths, divisor)?;
        self.check(rest, format!("rem of {dtype}"), FUNCTION);
        if dtype == DType::F32 {
            for op in [Pow, Atan2] {
                let result = self.binary(op, x, y)?;
                self.check(result, format!("{} of {dtype}", op.name()), FUNCTION);
            }
        }
        Ok(())
    }

    /// Choices between a function and its argument, and the patterns of activations and losses.
    fn patterns(&mut self) -> Built {
        let x = self.floats(DType::F32, numbers());
        let y = self.floats(DType::F32, numbers().into_iter().rev());
        let chosen = self.compare(CompareOp::Lt, x, y)?;
        let (zero, half, one) = (self.number(0.0, x)?, self.number(0.5, x)?, self.number(1.0, x)?);
        for (op, units) in [
            (UnaryOp::Tanh, FUNCTION),
            (UnaryOp::Erf, FUNCTION),
            (UnaryOp::Log, FUNCTION),
            (UnaryOp::Abs, 0.0),
        ] {
            let function = self.unary(op, x)?;
            let either = self.add(Op::Select, &[chosen, function, x])?;
            self.check(either, format!("select(x < y, {}(x), x)", op.name()), units);
        }
        let function = self.unary(UnaryOp::Tanh, x)?;
        let other = self.add(Op::Select, &[chosen, y, function])?;
        self.check(other, "select(x < y, y, tanh(x))", FUNCTION);
        let number = self.unary(UnaryOp::IsNan, x)?;
        let magnitude = self.unary(UnaryOp::Abs, y)?;
        let negative = self.unary(UnaryOp::Neg, magnitude)?;
        let below = self.compare(CompareOp::Lt, x, zero)?;
        let signed = self.add(Op::Select, &[below, negative, magnitude])?;
        let signed = self.add(Op::Select, &[number, x, signed])?;
        self.check(signed, "select(isnan(x), x, copysign(y, x))", 0.0);
        let rest = self.compare(CompareOp::Ge, y, half)?;
        for op in [BinaryOp::And, BinaryOp::Xor] {
            let both = self.binary(op, below, rest)?;
            let not = self.unary(UnaryOp::Not, both)?;
            let either = self.add(Op::Select, &[not, x, one])?;
            self.check(either, format!("select(!({} of masks), x, 1)", op.name()), 0.0);
        }
        let z = self.floats(DType::F32, tame());
        let (zero, half, one) = (self.number(0.0, z)?, self.number(0.5, z)?, self.number(1.0, z)?);
        let scale = self.number(std::f64::consts::FRAC_1_SQRT_2, z)?;
        let scaled = self.binary(BinaryOp::Mul, z, scale)?;
        let erf = self.unary(UnaryOp::Erf, scaled)?;
        let cumulative = self.binary(BinaryOp::Add, erf, one)?;
        let gate = self.binary(BinaryOp::Mul, cumulative, half)?;
        self.check(gate, "0.5 * (1 + erf(x / sqrt(2)))", 64.0);
        let positive = self.compare(CompareOp::Gt, z, zero)?;
        let growth = self.unary(UnaryOp::Expm1, z)?;
        let elu = self.add(Op::Select, &[positive, z, growth])?;
        self.check(elu, "select(x > 0, x, expm1(x))", FUNCTION);
        let top = self.number(6.0, z)?;
        let clamped = self.binary(BinaryOp::Max, z, one)?;
        let clamped = self.binary(BinaryOp::Min, clamped, top)?;
        self.check(clamped, "min(max(x, 1), 6)", 0.0);
        Ok(())
    }

    /// Types to other types, and sums of 16 bits, which are computed in f32.
    fn conversions(&mut self) -> Built {
        use DType::*;
        for (from, others) in [
            (F32, &[F64, I64, I32, U8, F16, BF16, Bool][..]),
            (F64, &[F32, I64, I32]),
            (F16, &[F32]),
            (BF16, &[F32]),
            (I64, &[F32, F64, I32, BF16, Bool]),
            (I32, &[F32, I64, BF16]),
            (U8, &[F32]),
            (Bool, &[F32, I64]),
        ] {
            let x = match from.is_float() {
                true => self.floats(from, numbers()),
                false => self.whole(from, 3),
            };
            for &to in others {
                let cast = self.add(Op::Cast(to), &[x])?;
                self.check(cast, format!("cast of {from} to {to}"), 0.0);
            }
            if [F16, BF16].contains(&from) {
                let y = self.floats(from, numbers().into_iter().rev());
                let sum = self.binary(BinaryOp::Add, x, y)?;
                self.check(sum, format!("add of {from}"), 0.0);
            }
        }
        Ok(())
    }

    /// Integers, or truth values, of every size that the type has.
    fn whole(&mut self, dtype: DType, seed: i64) -> Value {
        let value = |i: i64| match i % 9 {
            0 => 0,
            1 => -1,
            2 => i64::MIN,
            3 => i64::MAX,
            4 => 1 << (i % 63),
            5 => i32::MIN.into(),
            6 => 127,
            7 => i.wrapping_mul(0x9e37_79b9_7f4a_7c15u64 as i64),
            _ => i * seed - 20,
        };
        let values = (0..ROW as i64).map(|i| value(i + seed));
        self.argument(HostTensor::from_ints(dtype, [ROW], values))
    }

    /// Pointwise functions of integers, and the bits of one or another chosen by a comparison.
    fn integers(&mut self) -> Built {
        use BinaryOp::*;
        for (dtype, unary, binary) in [
            (
                DType::I64,
                &[UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Not][..],
                &[Add, Sub, Mul, Div, Rem, Pow, Max, Min, And, Or, Xor, Shl, Shr][..],
            ),
            (DType::I32, &[UnaryOp::Abs], &[Mul, Div, Rem, Max, Shl, Shr]),
            (DType::U8, &[], &[Add, Max, Shr]),
        ] {
            let (x, y) = (self.whole(dtype, 3), self.whole(dtype, 8));
            for &op in unary {
                let result = self.unary(op, x)?;
                self.check(result, format!("{} of {dtype}", op.name()), 0.0);
            }
            for &op in binary {
                let result = self.binary(op, x, y)?;
                self.check(result, format!("{} of {dtype}", op.name()), 0.0);
            }
            if dtype == DType::U8 {
                continue;
            }
            let less = self.compare(CompareOp::Lt, x, y)?;
            let mask = self.whole(dtype, 5);
            let not = self.unary(UnaryOp::Not, mask)?;
            let (a, b) = (self.binary(And, x, mask)?, self.binary(And, y, not)?);
            let bits = self.binary(Or, a, b)?;
            let either = self.add(Op::Select, &[less, bits, x])?;
            let name = format!("select(x < y, (x & m) | (y & ~m), x) of {dtype}");
            self.check(either, name, 0.0);
        }
        Ok(())
    }

    /// Reductions along vectors and across them.
    fn reductions(&mut self) -> Built {
        let table = |count: usize, from: &dyn Fn(usize) -> f64| (0..count).map(from).collect::<Vec<f64>>();
        let shape = [3, ROW];
        let count = 3 * ROW;
        // Exact in every order: sums of whole numbers, products of small powers of two.
        let whole = table(count, &|i| ((i * 37) % 101) as f64 - 30.0);
        let powers = table(count, &|i| [2.0, 1.0, -1.0, 1.0][(i % 7).min(3)]);
        for (dtype, op, values, axis) in [
            (DType::F32, ReduceOp::Sum, &whole, 1),
            (DType::F32, ReduceOp::Sum, &whole, 0),
            (DType::F32, ReduceOp::Prod, &powers, 1),
            (DType::F32, ReduceOp::Max, &whole, 0),
            (DType::F64, ReduceOp::Sum, &whole, 1),
            (DType::F64, ReduceOp::Max, &whole, 1),
            (DType::I64, ReduceOp::Sum, &whole, 1),
            (DType::I32, ReduceOp::Max, &whole, 1),
        ] {
            let values = values.iter().copied();
            let x = HostTensor::from_floats(dtype, shape, values);
            let x = self.argument(x);
            let axes = Dims::from_slice(&[axis]);
            let name = format!("{} of {dtype} along axis {axis}", op.name());
            let reduced = self.add(Op::Reduce { op, axes }, &[x])?;
            self.check(reduced, name, 0.0);
        }
        let values = table(count, &|i| if i == 60 { f64::NAN } else { (i % 17) as f64 });
        let x = self.argument(HostTensor::from_floats(DType::F32, shape, values));
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let axes = Dims::from_slice(&[1]);
            let reduced = self.add(Op::Reduce { op, axes }, &[x])?;
            self.check(reduced, format!("{} of f32 with a NaN", op.name()), 0.0);
        }
        for op in [ArgReduceOp::Max, ArgReduceOp::Min] {
            let (axis, dtype) = (1, DType::I64);
            let place = self.add(Op::ArgReduce { op, axis, dtype }, &[x])?;
            self.check(place, format!("position of the {} of f32", op.name()), 0.0);
        }
        let truth = table(count, &|i| f64::from(u8::from(i % 50 != 7)));
        let truth = self.argument(HostTensor::from_floats(DType::Bool, shape, truth));
        for op in [ReduceOp::Any, ReduceOp::All] {
            let axes = Dims::from_slice(&[1]);
            let reduced = self.add(Op::Reduce { op, axes }, &[truth])?;
            self.check(reduced, op.name(), 0.0);
        }
        self.softmax()
    }

    /// A row's exponentials by their sum: a row that is read three times.
    fn softmax(&mut self) -> Built {
        let shape = Shape::from([2, ROW]);
        let values = (0..2 * ROW).map(|i| ((i * 29) % 83) as f64 / 8.0 - 5.0);
        let x = self.argument(HostTensor::from_floats(
            DType::F32,
            shape.clone(),
            values.collect::<Vec<_>>(),
        ));
        let axes = Dims::from_slice(&[1]);
        let wide = Op::Broadcast {
            shape,
            dims: Dims::from_slice(&[0]),
        };
        let op = ReduceOp::Max;
        let largest = self.add(
            Op::Reduce {
                op,
                axes: axes.clone(),
            },
            &[x],
        )?;
        let largest = self.add(wide.clone(), &[largest])?;
        let below = self.binary(BinaryOp::Sub, x, largest)?;
        let weights = self.unary(UnaryOp::Exp, below)?;
        let op = ReduceOp::Sum;
        let sum = self.add(Op::Reduce { op, axes }, &[weights])?;
        let sum = self.add(wide, &[sum])?;
        let softmax = self.binary(BinaryOp::Div, weights, sum)?;
        self.check(softmax, "softmax of f32", 16.0);
        Ok(())
    }

    /// Random numbers, which are part of a step's meaning.
    fn random(&mut self) -> Built {
        let (seed, stream) = (self.graph.scalar(DType::U64), self.graph.scalar(DType::U64));
        self.scalars = vec![
            Scalar::UInt(0x1234_5678_9abc_def0),
            Scalar::UInt(0xfedc_ba98_7654_3210),
        ];
        for (kind, dtype, name, units) in [
            (RandomKind::Uniform, DType::F32, "uniform f32", 0.0),
            (RandomKind::Uniform, DType::F64, "uniform f64", 0.0),
            (RandomKind::Normal, DType::F32, "normal f32", FUNCTION),
        ] {
            let shape = Shape::from([ROW]);
            let random = self.add(Op::Random { kind, dtype, shape }, &[seed, stream])?;
            self.check(random, format!("{name} random numbers"), units);
        }
        Ok(())
    }

    /// A matrix product and a convolution of whole numbers, which are exact.
    fn kernels(&mut self) -> Built {
        let whole = |count: usize, by: usize| (0..count).map(move |i| ((i * by) % 15) as f64 - 7.0);
        let a = HostTensor::from_floats(DType::F32, [19, 33], whole(19 * 33, 7));
        let b = HostTensor::from_floats(DType::F32, [33, 37], whole(33 * 37, 11));
        let (a, b) = (self.argument(a), self.argument(b));
        let product = self.add(Op::DotGeneral(DotDims::matmul(0)), &[a, b])?;
        self.check(product, "matrix product of f32", 0.0);
        // As they lie in memory, and rounded while they are packed: along the rows, and turned.
        let cast = |program: &mut Self, value| program.add(Op::Cast(DType::BF16), &[value]);
        let stored = [([33, 19], 7), ([37, 33], 11)].map(|(shape, by)| {
            let values = whole(shape[0] * shape[1], by);
            self.argument(HostTensor::from_floats(DType::BF16, shape, values))
        });
        let transposed = DotDims {
            a_contract: Dims::from_slice(&[0]),
            b_contract: Dims::from_slice(&[1]),
            ..DotDims::matmul(0)
        };
        let product = self.add(Op::DotGeneral(transposed), &stored)?;
        self.check(product, "matrix product of bf16", 0.0);
        let rounded = [cast(self, a)?, cast(self, b)?];
        let product = self.add(Op::DotGeneral(DotDims::matmul(0)), &rounded)?;
        self.check(product, "matrix product of f32 cast to bf16", 0.0);
        let x = HostTensor::from_floats(DType::F32, [1, 16, 7, 9], whole(16 * 63, 7));
        let w = HostTensor::from_floats(DType::F32, [16, 16, 3, 3], whole(256 * 9, 11));
        let (x, w) = (self.argument(x), self.argument(w));
        let conv = ConvDims {
            stride: Dims::from_slice(&[2, 2]),
            pad_low: Dims::from_slice(&[1, 1]),
            pad_high: Dims::from_slice(&[1, 1]),
            dilation: Dims::from_slice(&[1, 1]),
            groups: 1,
            result: None,
        };
        let y = self.add(Op::Conv(conv), &[x, w])?;
        self.check(y, "convolution of f32", 0.0);
        Ok(())
    }
}

/// A row with numbers of every kind.
fn numbers() -> Vec<f64> {
    let special = [
        1.000_05,
        0.0,
        -0.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        1e-40,
        -1e-40,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.5,
        -2.5,
        3.9,
        -4.1,
        0.62,
        0.63,
        1e-4,
        -1e-4,
        10.0,
        -10.0,
        87.0,
        -87.0,
        100.0,
        -100.0,
        1e10,
        -1e10,
        3e38,
        -3e38,
        // Half way between two numbers of bf16, and of f16.
        1.011_718_75,
        1.001_464_843_75,
    ];
    let ordinary = (0..ROW - special.len()).map(|i| i as f64 * 0.37 - 2.71);
    special.into_iter().chain(ordinary).collect()
}

/// A row of both signs with NaN, infinities and no zeros.
fn mixed(seed: usize) -> impl Iterator<Item = f64> {
    (0..ROW).map(move |i| match (i + seed) % 11 {
        0 => f64::NAN,
        5 => f64::INFINITY,
        7 => f64::NEG_INFINITY,
        other => other as f64 - 4.5,
    })
}

/// A row of ordinary numbers.
fn tame() -> impl Iterator<Item = f64> {
    (0..ROW).map(|i| i as f64 * 0.21 - 4.63)
}
