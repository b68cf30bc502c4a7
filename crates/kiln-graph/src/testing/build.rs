//! The state of the generator: the graph so far, what is known of each value, and random choices.

use super::{Family, GraphConfig, RandomGraph, Rng};
use crate::alias::assign_aliases;
use crate::op::{BinaryOp, Dims, Op, UnaryOp};
use crate::{DType, Graph, Phase, Provenance, Scalar, Shape, TensorType, Value};

/// What is known of a value. For integers and bools `bound` and `error` are 0 and mean nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fact {
    pub(super) value: Value,
    /// No element is larger in magnitude.
    pub(super) bound: f64,
    /// No executor's error is larger than this, to first order; 0 if every executor has the same bits.
    pub(super) error: f64,
}

/// An error of a few units in the last place of numbers up to `bound`: what one primitive may add.
pub(super) fn rounding(dtype: DType, bound: f64) -> f64 {
    let unit = match dtype {
        DType::F64 => 1e-15,
        DType::F32 => 5e-7,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 0.0,
    };
    unit * bound
}

pub(super) struct Builder<'a> {
    pub(super) graph: Graph,
    pub(super) rng: Rng,
    pub(super) config: &'a GraphConfig,
    facts: Vec<Fact>,
    provenance: Provenance,
    /// The extents that occur, and the step from which on each part begins, if operations belong together.
    extents: Vec<usize>,
    parts: Vec<(usize, Phase)>,
    steps: usize,
}

impl<'a> Builder<'a> {
    pub(super) fn new(seed: u64, config: &'a GraphConfig) -> Self {
        let mut builder = Self {
            graph: Graph::new(format!("random_{seed:x}")),
            rng: Rng::new(seed),
            config,
            facts: Vec::new(),
            provenance: Provenance::default(),
            extents: vec![1, 2, 2, 3, 3, 4, 5, 7],
            parts: Vec::new(),
            steps: 0,
        };
        if config.together {
            // Large graphs have products of whole tiles.
            let (few, many): (&[usize], &[usize]) = match config.max_elements {
                ..10_000 => (&[2, 3, 4], &[4, 5, 6, 8]),
                _ => (&[3, 8, 16], &[20, 32, 64]),
            };
            builder.extents = vec![*builder.choose(few), *builder.choose(many)];
            builder.parts = vec![(0, *builder.choose(&[Phase::Unknown, Phase::Forward]))];
            let backward = builder.between(0, 2 * config.steps);
            let optimizer = builder.between(backward, 2 * config.steps);
            builder.parts.push((backward, Phase::Backward));
            builder.parts.push((optimizer, Phase::Optimizer));
        }
        builder
    }

    /// Adds one operation of a random family.
    pub(super) fn step(&mut self) {
        self.provenance = self.random_provenance();
        self.steps += 1;
        let families = match self.config.together && !self.chance(6) {
            true => self.usual_families(),
            false => self.config.families.clone(),
        };
        let family = *self.choose(&families);
        match family {
            Family::Pointwise => self.pointwise(),
            Family::Random => self.random(),
            Family::Reduce => self.reduce(),
            Family::Movement => self.movement(),
            Family::Index => self.index(),
            Family::Dot => self.dot(),
            Family::Conv => self.conv(),
            Family::Pool => self.pool(),
            Family::Attention => self.attention(),
            Family::Sort => self.sort(),
            Family::Collective => self.collective(),
            Family::Extern => self.external(),
        }
    }

    /// What most operations of a model are, as far as they are asked for.
    fn usual_families(&self) -> Vec<Family> {
        use Family::{Dot, Movement, Pointwise, Reduce};
        let usual = [
            Pointwise, Pointwise, Pointwise, Pointwise, Pointwise, Reduce, Movement, Dot,
        ];
        let asked = |family: &Family| self.config.families.contains(family);
        let usual: Vec<Family> = usual.into_iter().filter(asked).collect();
        match usual.is_empty() {
            true => self.config.families.clone(),
            false => usual,
        }
    }

    /// The graph, with every unused value as an output.
    pub(super) fn finish(mut self) -> RandomGraph {
        if self.facts.is_empty() {
            // Every step was an operation without results, or one too large to add.
            self.parameter(TensorType::scalar(DType::F32));
        }
        let users = self.graph.users();
        let unused: Vec<Fact> = self
            .facts
            .iter()
            .copied()
            .filter(|fact| users.count(fact.value) == 0)
            .collect();
        // One value that other nodes use becomes an output as well, so that tests see outputs from inside
        // the graph.
        let used = self
            .facts
            .iter()
            .copied()
            .find(|fact| users.count(fact.value) > 0);
        let leaving: Vec<Fact> = unused.into_iter().chain(used).collect();
        for fact in &leaving {
            self.graph.output(fact.value, None);
        }
        let dies: Vec<bool> = (0..self.graph.parameters().len())
            .map(|index| {
                let parameter = self.graph.parameters()[index];
                self.rng.below(2) == 0 && leaving.iter().all(|fact| fact.value != parameter)
            })
            .collect();
        assign_aliases(&mut self.graph, &dies);
        // First-order bounds leave out products of errors; a factor covers them.
        let tolerances = leaving.iter().map(|fact| 2.0 * fact.error).collect();
        RandomGraph {
            graph: self.graph,
            tolerances,
        }
    }

    fn random_provenance(&mut self) -> Provenance {
        let mut provenance = Provenance::default();
        let phases = [Phase::Unknown, Phase::Forward, Phase::Backward, Phase::Optimizer];
        let begun = self.parts.iter().rev().find(|(from, _)| *from <= self.steps);
        provenance.phase = match begun {
            Some(&(_, part)) => part,
            None => *self.choose(&phases),
        };
        let bits = self.rng.below(8);
        let pick = |bit: u64, text: &str| (bits >> bit & 1 == 1).then(|| text.into());
        provenance.operation = pick(0, "NumericFloat.Add");
        provenance.location = pick(1, "src/main.rs:12");
        provenance.gradient_of = pick(1, "matmul");
        provenance.module = pick(2, "a name with \"quotes\"");
        provenance.chunk = (self.rng.below(4) == 0).then(|| self.rng.below(9) as u16);
        provenance.full_precision = bits == 7;
        provenance
    }

    // Choices.

    pub(super) fn choose<'b, T>(&mut self, from: &'b [T]) -> &'b T {
        self.rng.choose(from)
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.rng.below(one_in) == 0
    }

    /// A number in `low..=high`.
    pub(super) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.rng.below((high - low + 1) as u64) as usize
    }

    pub(super) fn float_dtype(&mut self) -> DType {
        *self.choose(&self.config.floats.clone())
    }

    pub(super) fn int_dtype(&mut self) -> DType {
        *self.choose(&self.config.ints.clone())
    }

    /// A type for indices: wide enough for any extent that occurs.
    pub(super) fn index_dtype(&mut self) -> DType {
        let wide: Vec<DType> = self
            .config
            .ints
            .iter()
            .copied()
            .filter(|dtype| dtype.size() >= 4)
            .collect();
        if wide.is_empty() {
            DType::I64
        } else {
            *self.choose(&wide)
        }
    }

    pub(super) fn extent(&mut self) -> usize {
        if self.config.zero_sized && self.chance(25) {
            0
        } else {
            *self.choose(&self.extents.clone())
        }
    }

    /// A shape, half of the time one that occurs, so that operands find partners.
    pub(super) fn shape(&mut self) -> Shape {
        let fresh = if self.config.together {
            self.chance(8)
        } else {
            !self.chance(2)
        };
        if !fresh && let Some(other) = self.existing(|_, _| true) {
            return self.ty(other).shape;
        }
        let rank = self.between(0, 4);
        self.shape_of_rank(rank)
    }

    pub(super) fn shape_of_rank(&mut self, rank: usize) -> Shape {
        let mut shape: Shape = (0..rank).map(|_| self.extent()).collect();
        for axis in 0..rank {
            if shape.numel() > self.config.max_elements {
                shape[axis] = shape[axis].min(2);
            }
        }
        shape
    }

    pub(super) fn axis(&mut self, x: Fact) -> usize {
        let rank = self.ty(x).shape.rank();
        self.between(0, rank - 1)
    }

    /// Sorted distinct dimensions of a tensor of rank `rank`, maybe none.
    pub(super) fn axes(&mut self, rank: usize) -> Dims {
        (0..rank).filter(|_| self.chance(2)).collect()
    }

    // Values.

    pub(super) fn ty(&self, fact: Fact) -> TensorType {
        self.graph.ty(fact.value).clone()
    }

    /// Adds a node and remembers its results: bound and error of each, the error without what the node itself
    /// adds.
    pub(super) fn node(&mut self, op: Op, inputs: &[Fact], facts: &[(f64, f64)]) -> Vec<Fact> {
        let inputs: Vec<Value> = inputs.iter().map(|fact| fact.value).collect();
        let outputs = match self.graph.add_node(op, &inputs, self.provenance.clone()) {
            Ok(outputs) => outputs,
            Err(error) => panic!("the generator made an ill-typed node: {error}\n{}", self.graph),
        };
        let facts = outputs
            .iter()
            .zip(facts)
            .map(|(&value, &(bound, error))| Fact { value, bound, error });
        let facts: Vec<Fact> = facts.collect();
        self.facts.extend(&facts);
        facts
    }

    /// Adds a node that computes nothing: its result has the bounds and errors of its operands.
    pub(super) fn moved(&mut self, op: Op, inputs: &[Fact]) -> Fact {
        let bound = inputs.iter().fold(0.0, |bound: f64, fact| bound.max(fact.bound));
        let error = inputs.iter().fold(0.0, |error: f64, fact| error.max(fact.error));
        self.node(op, inputs, &[(bound, error)])[0]
    }

    /// Adds a node that computes: elements up to `bound`, `error` inherited from the operands.
    pub(super) fn computed(&mut self, op: Op, inputs: &[Fact], bound: f64, error: f64) -> Fact {
        let dtype = self.ty(inputs[0]).dtype;
        self.node(op, inputs, &[(bound, error + rounding(dtype, bound))])[0]
    }

    /// Adds a node with integer or bool results, which are exact if the operands are.
    pub(super) fn exact(&mut self, op: Op, inputs: &[Fact]) -> Fact {
        self.node(op, inputs, &[(0.0, 0.0)])[0]
    }

    pub(super) fn parameter(&mut self, ty: TensorType) -> Fact {
        let bound = if ty.dtype.is_float() { 2.0 } else { 0.0 };
        let index = self.graph.parameters().len() as u32;
        let op = Op::Parameter {
            index,
            ty,
            copy_of: None,
        };
        self.node(op, &[], &[(bound, 0.0)])[0]
    }

    pub(super) fn constant(&mut self, value: impl Into<Scalar>, dtype: DType) -> Fact {
        let value = value.into();
        let bound = if dtype.is_float() {
            value.to_f64().abs()
        } else {
            0.0
        };
        self.node(Op::Constant { value, dtype }, &[], &[(bound, 0.0)])[0]
    }

    pub(super) fn full(&mut self, value: impl Into<Scalar>, ty: &TensorType) -> Fact {
        let constant = self.constant(value, ty.dtype);
        if ty.shape.rank() == 0 {
            return constant;
        }
        self.moved(
            Op::Broadcast {
                shape: ty.shape.clone(),
                dims: Dims::new(),
            },
            &[constant],
        )
    }

    /// A new value without operands: an argument, a runtime scalar, a constant or an iota.
    pub(super) fn source(&mut self, ty: TensorType) -> Fact {
        let float = ty.dtype.is_float();
        let kinds = if self.config.together { 20 } else { 8 };
        match self.rng.below(kinds) {
            0 if ty.dtype != DType::Bool => {
                let index = self.graph.scalars().len() as u32;
                let bound = if float { 2.0 } else { 0.0 };
                let scalar = self.node(
                    Op::Scalar {
                        index,
                        dtype: ty.dtype,
                    },
                    &[],
                    &[(bound, 0.0)],
                )[0];
                self.moved(
                    Op::Broadcast {
                        shape: ty.shape,
                        dims: Dims::new(),
                    },
                    &[scalar],
                )
            }
            1 if float => {
                let value = *self.choose(&[0.0, 0.5, 1.0, -1.25]);
                self.full(value, &ty)
            }
            2 if ty.dtype != DType::Bool && ty.shape.rank() > 0 => {
                let axis = self.between(0, ty.shape.rank() - 1);
                let bound = if float { ty.shape[axis] as f64 } else { 0.0 };
                self.node(
                    Op::Iota {
                        dtype: ty.dtype,
                        shape: ty.shape,
                        axis,
                    },
                    &[],
                    &[(bound, 0.0)],
                )[0]
            }
            _ => self.parameter(ty),
        }
    }

    /// A value that exists and satisfies `fits`.
    pub(super) fn existing(&mut self, fits: impl Fn(Fact, &TensorType) -> bool) -> Option<Fact> {
        let fitting: Vec<Fact> = self
            .facts
            .iter()
            .copied()
            .filter(|&fact| fits(fact, self.graph.ty(fact.value)))
            .collect();
        // The later of two, so that chains grow, or of more, so that they grow long.
        let draws = if self.config.together { 5 } else { 2 };
        let later = (0..draws).map(|_| self.rng.below(fitting.len() as u64)).max();
        fitting.get(later? as usize).copied()
    }

    /// Whether arithmetic may go on with this value: neither huge nor mostly error.
    pub(super) fn usable(fact: Fact) -> bool {
        fact.bound <= 1e4 && fact.error <= 1e-2 * fact.bound.max(1.0)
    }

    /// A value of type `ty`: one that exists, or the elements of one under another shape, or a new one.
    pub(super) fn of_type(&mut self, ty: &TensorType) -> Fact {
        if self.config.together
            && self.chance(3)
            && let Some(found) = self.repeated(ty)
        {
            return found;
        }
        if !self.chance(if self.config.together { 12 } else { 4 }) {
            if let Some(found) = self.existing(|fact, other| other == ty && Self::usable(fact)) {
                return found;
            }
            let same_size = |fact: Fact, other: &TensorType| {
                other.dtype == ty.dtype && other.numel() == ty.numel() && Self::usable(fact)
            };
            if let Some(found) = self.existing(same_size) {
                return self.moved(Op::Reshape(ty.shape.clone()), &[found]);
            }
        }
        self.source(ty.clone())
    }

    /// A value of type `ty` that repeats one along one axis or all but one: what a reduction has found, or a
    /// bias.
    fn repeated(&mut self, ty: &TensorType) -> Option<Fact> {
        let rank = ty.shape.rank();
        if rank == 0 {
            return None;
        }
        let axis = self.between(0, rank - 1);
        let shape = ty.shape.clone();
        if self.chance(2) {
            let list = Shape::new([shape[axis]]);
            let fits = |fact: Fact, other: &TensorType| {
                other.dtype == ty.dtype && other.shape == list && Self::usable(fact)
            };
            let found = self.existing(fits)?;
            let dims = [axis].into_iter().collect();
            return Some(self.moved(Op::Broadcast { shape, dims }, &[found]));
        }
        let kept = ty.shape.without(&[axis]);
        let one = ty.shape.with(axis, 1);
        let found = self.existing(|fact, other| {
            other.dtype == ty.dtype && (other.shape == kept || other.shape == one) && Self::usable(fact)
        })?;
        let dims = match self.ty(found).shape == one {
            true => (0..rank).collect(),
            false => (0..rank).filter(|&at| at != axis).collect(),
        };
        Some(self.moved(Op::Broadcast { shape, dims }, &[found]))
    }

    /// A value with elements that `fits`, of any shape.
    fn with_dtype(&mut self, dtype: DType, fits: impl Fn(Fact) -> bool) -> Fact {
        if !self.chance(if self.config.together { 12 } else { 4 })
            && let Some(found) =
                self.existing(|fact, ty| ty.dtype == dtype && Self::usable(fact) && fits(fact))
        {
            return found;
        }
        let shape = self.shape();
        self.source(TensorType { dtype, shape })
    }

    pub(super) fn float(&mut self) -> Fact {
        let dtype = self.float_dtype();
        self.with_dtype(dtype, |_| true)
    }

    pub(super) fn int(&mut self) -> Fact {
        let dtype = self.int_dtype();
        self.with_dtype(dtype, |_| true)
    }

    pub(super) fn bool(&mut self) -> Fact {
        self.with_dtype(DType::Bool, |_| true)
    }

    /// A float or integer value.
    pub(super) fn number(&mut self) -> Fact {
        if self.chance(3) { self.int() } else { self.float() }
    }

    /// A value of any dtype.
    pub(super) fn any(&mut self) -> Fact {
        if self.chance(6) {
            self.bool()
        } else {
            self.number()
        }
    }

    /// A float or integer value that every executor has exactly.
    pub(super) fn exact_number(&mut self) -> Fact {
        let dtype = if self.chance(3) {
            self.int_dtype()
        } else {
            self.float_dtype()
        };
        self.with_dtype(dtype, |fact| fact.error == 0.0)
    }

    /// `make` repeated until the value has a dimension to work along.
    pub(super) fn ranked(&mut self, make: impl Fn(&mut Self) -> Fact) -> Fact {
        for _ in 0..8 {
            let fact = make(self);
            if self.ty(fact).shape.rank() > 0 {
                return fact;
            }
        }
        let rank = self.between(1, 4);
        let (dtype, shape) = (self.float_dtype(), self.shape_of_rank(rank));
        self.parameter(TensorType { dtype, shape })
    }

    // Operands brought into a safe range.

    pub(super) fn unary(&mut self, op: UnaryOp, x: Fact, bound: f64, slope: f64) -> Fact {
        self.computed(Op::Unary(op), &[x], bound, slope * x.error)
    }

    /// Magnitude of a value, exact if it is.
    pub(super) fn magnitude(&mut self, x: Fact) -> Fact {
        self.moved(Op::Unary(UnaryOp::Abs), &[x])
    }

    /// `x` if it is at most `limit` in magnitude, else squashed into `[-1, 1]`.
    pub(super) fn within(&mut self, x: Fact, limit: f64) -> Fact {
        if x.bound <= limit {
            x
        } else {
            self.unary(UnaryOp::Tanh, x, 1.0, 1.0)
        }
    }

    /// `|x| + offset`.
    pub(super) fn at_least(&mut self, x: Fact, offset: f64) -> Fact {
        let magnitude = self.magnitude(x);
        let ty = self.ty(x);
        let offset_value = self.full(offset, &ty);
        let bound = x.bound + offset;
        self.computed(
            Op::Binary(BinaryOp::Add),
            &[magnitude, offset_value],
            bound,
            x.error,
        )
    }

    /// Integers of the shape and type given, in `0..extent`, which is not 0.
    pub(super) fn indices(&mut self, ty: &TensorType, extent: usize) -> Fact {
        let any = self.of_type(ty);
        let extent = self.full(extent as i64, ty);
        self.exact(Op::Binary(BinaryOp::Rem), &[any, extent])
    }
}
