//! Expressions: values at an index, written on demand, once for each place.

use kiln_compiler::index::{Index, linear};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::access::operand_index;
use kiln_compiler::schedule::bits::reads_rounded;
use kiln_compiler::schedule::layout::position;
use kiln_compiler::schedule::power::power_of_number;
use kiln_graph::op::{BinaryOp, Op, RandomKind};
use kiln_graph::{DType, Value};

use super::space::Lanes;
use super::writer::{Key, Place, Register, Writer};
use super::{Argument, c};

impl Writer<'_> {
    /// How many row reductions, one behind the other, `value` waits for.
    pub(super) fn stage(&mut self, value: Value) -> usize {
        self.stages.of(self.graph, &self.space.loops.nest, value)
    }

    /// The register of `value` at `index`.
    pub(super) fn eval(&mut self, value: Value, index: &[Index]) -> Register {
        let value = *self.equal.get(&value).unwrap_or(&value);
        if let Some(register) = self.reduced.get(&value) {
            return register.clone();
        }
        let key = (value, index.to_vec());
        if let Some(register) = self.known.get(&key) {
            return register.clone();
        }
        let register = match self.kept.arrays.get(&key) {
            Some((element, pass)) if *pass < self.pass => {
                let (dtype, element) = (self.graph.dtype(value), element.clone());
                *self.evaluated.entry(key.clone()).or_default() |= 1 << self.pass.min(63);
                let loaded = !self.space.loops.nest.uses_of(value).is_empty();
                let text = if loaded {
                    c::widened(dtype, &element)
                } else {
                    element
                };
                let place = Place {
                    level: 2,
                    stage: 0,
                    lane: text.contains("[l]"),
                };
                self.define(dtype, place, &text)
            }
            _ => self.compute(&key),
        };
        self.known.insert(key, register.clone());
        register
    }

    fn compute(&mut self, key: &Key) -> Register {
        let (value, index) = (key.0, &key.1);
        let graph = self.graph;
        if self.given == Some(value) {
            let place = Place {
                level: 2,
                stage: 0,
                lane: true,
            };
            let dtype = graph.dtype(value);
            return self.define(dtype, place, "product.wide(l)");
        }
        // A constant may be in memory for a kernel that takes a pointer to it. Here it is part of the text.
        if matches!(graph.def(value).op, Op::Constant { .. }) {
            return self.operation(value, index);
        }
        if !self.space.loops.nest.uses_of(value).is_empty() {
            let position = position(graph, &self.space.loops.nest.layouts, value, index);
            return self.load(Buffer::Value(value), &position, key);
        }
        if let Some(operand) = operand_index(graph, value, index) {
            return self.eval(graph.def(value).inputs[0], &operand);
        }
        let register = self.operation(value, index);
        // A cast takes no more than reading a kept value, which may be wider than what is cast.
        if register.place.level == 2 && !matches!(graph.def(value).op, Op::Cast(_)) {
            *self.evaluated.entry(key.clone()).or_default() |= 1 << self.pass.min(63);
            if self.kept.keys.contains(key) {
                self.keep(key, &register);
            }
        }
        register
    }

    /// Keeps a computed value of a point for later passes.
    fn keep(&mut self, key: &Key, register: &Register) {
        let name = self.fresh("kept");
        let ty = c::register_type(register.dtype);
        let (lanes, lane) = match self.width {
            width if width > 1 && register.place.lane => (format!("[{width}]"), "[l]"),
            _ => (String::new(), ""),
        };
        self.row_arrays
            .push(format!("{ty} {name}[{}]{lanes};", self.turns));
        let element = format!("{name}[k]{lane}");
        self.line(register.place, format!("{element} = {};", register.name));
        self.kept.arrays.insert(key.clone(), (element, self.pass));
    }

    fn operation(&mut self, value: Value, index: &[Index]) -> Register {
        let graph = self.graph;
        let data = graph.def(value);
        let dtype = graph.dtype(value);
        if let Some(register) = self.power(value, index) {
            return register;
        }
        match &data.op {
            Op::Constant { value, dtype } => Register {
                name: c::literal(*value, *dtype),
                dtype: *dtype,
                place: Place::default(),
            },
            Op::Scalar { index, dtype } => self.scalar(*index, *dtype),
            Op::Iota { axis, dtype, .. } => self.number(&index[*axis], *dtype),
            Op::Random { kind, dtype, shape } => {
                self.random(*kind, *dtype, &linear(index, shape), &data.inputs)
            }
            Op::Gather { .. } | Op::IndexSelect { .. } => {
                let node = graph.value(value).node;
                let (x, at) = self.integers.operands(graph, node, index).swap_remove(1);
                self.eval(x, &at)
            }
            op => {
                if let Some(register) = self.quotient(value, index) {
                    return register;
                }
                let registers: Vec<Register> = data.inputs.iter().map(|&v| self.eval(v, index)).collect();
                let places = registers.iter().map(|register| register.place);
                let place = places.fold(Place::default(), Place::and);
                let nest = &self.space.loops.nest;
                let names: Vec<String> = registers
                    .iter()
                    .zip(&data.inputs)
                    .map(|(register, operand)| {
                        let operand = *self.equal.get(operand).unwrap_or(operand);
                        match reads_rounded(graph, nest, op, operand) {
                            true => c::rounded(graph.dtype(operand), &register.name),
                            false => register.name.clone(),
                        }
                    })
                    .collect();
                let name = |at: usize| names[at].as_str();
                let of = registers[0].dtype;
                let near = self.near.contains(&value);
                let text = match op {
                    Op::Unary(op) if near && of.compute() == DType::F32 => c::near(*op, of, name(0)),
                    Op::Binary(BinaryOp::Div) if near && of.compute() == DType::F32 => {
                        format!("kiln_near_quotient({}, {})", name(0), name(1))
                    }
                    Op::Unary(op) => c::unary(*op, of, name(0)),
                    Op::Binary(op) => c::binary(*op, of, name(0), name(1)),
                    Op::Compare(op) => c::compare(*op, name(0), name(1)),
                    Op::Select => format!("{} ? {} : {}", name(0), name(1), name(2)),
                    Op::Cast(to) => c::cast(of, *to, name(0)),
                    other => unreachable!("{} is not computed point by point", other.name()),
                };
                self.define(dtype, place, &text)
            }
        }
    }

    /// The value at `index`, if it divides many numbers by one: that of the kernel or of the row.
    fn quotient(&mut self, value: Value, index: &[Index]) -> Option<Register> {
        let data = self.graph.def(value);
        let dtype = self.graph.dtype(value);
        if !matches!(data.op, Op::Binary(BinaryOp::Div)) || dtype.compute() != DType::F32 {
            return None;
        }
        let [a, b] = [data.inputs[0], data.inputs[1]].map(|operand| self.eval(operand, index));
        if a.place.level < 2 || b.place.level == 2 {
            return None;
        }
        let divisor = self.divisor(&b);
        let function = if self.near.contains(&value) { "near" } else { "of" };
        let text = format!("{divisor}.{function}({})", a.name);
        Some(self.define(dtype, a.place.and(b.place), &text))
    }

    /// The name of what divides by `register`.
    fn divisor(&mut self, register: &Register) -> String {
        if let Some(name) = self.divisors.get(&register.name) {
            return name.clone();
        }
        let name = self.fresh("divisor");
        self.line(
            register.place,
            format!("const kiln_divisor {name}({});", register.name),
        );
        self.divisors.insert(register.name.clone(), name.clone());
        name
    }

    /// Runtime scalar number `index`.
    fn scalar(&mut self, index: u32, dtype: DType) -> Register {
        let at = self.argument(Argument::Scalar(index));
        let text = match dtype {
            DType::Bool => format!("*a{at} != 0"),
            dtype if dtype.is_float() => c::cast(DType::F64, dtype, &format!("*(const double*)a{at}")),
            dtype => format!("({})*a{at}", c::memory_type(dtype)),
        };
        self.define(dtype, Place::default(), &text)
    }

    /// An index as a number.
    fn number(&mut self, index: &Index, dtype: DType) -> Register {
        let data = self.load_slots(index);
        self.see(index, 0, dtype);
        let place = self.place(index.vars()).and(data);
        let base = format!("(kiln_i64)({})", self.index_text(index, place.lane));
        let text = c::cast(DType::I64, dtype, &base);
        self.define(dtype, place, &text)
    }

    fn random(&mut self, kind: RandomKind, dtype: DType, position: &Index, inputs: &[Value]) -> Register {
        let scalars: Vec<String> = inputs.iter().map(|&v| self.eval(v, &[]).name).collect();
        let place = scalars[..2].join(", ");
        let data = self.load_slots(position);
        self.see(position, 1, DType::F32);
        let own = self.place(position.vars()).and(data);
        // Elements of a block of the generator.
        let per = if kind == RandomKind::IntRange || dtype == DType::F64 {
            2
        } else {
            4
        };
        let (first, each) = (
            self.index_text(position, false),
            self.index_text(position, own.lane),
        );
        let width = self.width;
        let (block, element) = if own.level == 2
            && !data.lane
            && width > 1
            && self.lanes(position) == Lanes::Together
        {
            let (name, count) = (self.fresh("g"), (width / per).max(1));
            self.loads.push(format!("kiln_block4 {name}[{count}];"));
            self.loads.push(format!(
                "#pragma unroll\nfor (int j = 0; j < {count}; j++) {name}[j] = kiln_philox({place}, (kiln_u64)({first}) / {per} + j);"
            ));
            (
                format!("{name}[l / {per}]"),
                format!("(int)(({first} + l) % {per})"),
            )
        } else {
            (
                format!("kiln_philox({place}, (kiln_u64)({each}) / {per})"),
                format!("(int)(({each}) % {per})"),
            )
        };
        let text = match kind {
            RandomKind::IntRange => {
                let range = format!(
                    "kiln_random_range({block}, {element}, {}, {})",
                    scalars[2], scalars[3]
                );
                c::cast(DType::I64, dtype, &range)
            }
            RandomKind::Uniform => format!("kiln_uniform_{dtype}({block}, {element})"),
            RandomKind::Normal => match dtype {
                DType::F64 => format!("kiln_normal_f64({block}, {element})"),
                DType::F32 => format!("kiln_normal_f32({block}, {element})"),
                half => c::rounded(half, &format!("kiln_normal_f32({block}, {element})")),
            },
        };
        self.define(dtype, own, &text)
    }

    /// The value at `index`, if it is a power with an exponent that is a number. The code compares a runtime
    /// exponent when it runs: at minus one the power is a division.
    fn power(&mut self, value: Value, index: &[Index]) -> Option<Register> {
        let (base, exponent) = power_of_number(self.graph, &self.space.loops.nest, value)?;
        let (u, s) = (self.eval(base, index), self.eval(exponent, &[]));
        let function = if self.near.contains(&value) {
            "kiln_near_power_of"
        } else {
            "kiln_power_of"
        };
        let text = format!("{function}({}, {})", u.name, s.name);
        Some(self.define(DType::F32, u.place, &text))
    }
}
