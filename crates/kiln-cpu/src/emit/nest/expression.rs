//! Expressions: values at an index, written on demand, once for each place.

use kiln_compiler::index::{Index, linear};
use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::access::operand_index;
use kiln_compiler::schedule::bits::reads_rounded;
use kiln_compiler::schedule::class::is_expensive;
use kiln_compiler::schedule::layout::position;
use kiln_graph::op::{Op, RandomKind};
use kiln_graph::{DType, Value};

use super::{Access, Argument, Key, Register, Writer, c};

impl Writer<'_> {
    /// The number of the pass over a row that computes `value`.
    pub(super) fn stage(&mut self, value: Value) -> usize {
        self.stages.of(self.graph, &self.space.loops.nest, value)
    }

    pub(super) fn eval(&mut self, value: Value, index: &[Index]) -> Register {
        let value = *self.equal.get(&value).unwrap_or(&value);
        if let Some((given, register)) = &self.given
            && *given == value
        {
            return register.clone();
        }
        if let Some(register) = self.reduced.get(&value) {
            return register.clone();
        }
        let key = (value, index.to_vec());
        if let Some(register) = self.known.get(&key) {
            return register.clone();
        }
        let register = if is_expensive(&self.graph.def(value).op) {
            self.compute_once(&key)
        } else {
            self.compute(value, index)
        };
        self.known.insert(key, register.clone());
        register
    }

    /// An expensive value: evaluated by the first pass over a row that needs it, kept on the stack for the
    /// others.
    pub(super) fn compute_once(&mut self, key: &Key) -> Register {
        let (value, index) = key;
        let dtype = self.graph.dtype(*value).compute();
        let columns = self.space.loops.cols.clone();
        let position = || {
            let index: Vec<Index> = columns
                .iter()
                .map(|&var| Index::var(var, self.space.loops.extent(var)))
                .collect();
            let extents: Vec<usize> = columns
                .iter()
                .map(|&var| self.space.loops.extent(var) as usize)
                .collect();
            linear(&index, &extents)
        };
        if let Some((name, pass)) = self.kept.get(key)
            && *pass < self.pass
        {
            let text = format!("ld_{dtype}({name} + {})", self.index_text(&position(), false));
            return self.define(self.graph.dtype(*value), true, 2, 0, &text);
        }
        let register = self.compute(*value, index);
        if register.level < 2
            || !register.vector
            || !dtype.is_float()
            || self.vector_rows()
            || self.space.flat()
        {
            return register;
        }
        *self.evaluated.entry(key.clone()).or_default() |= 1 << self.pass.min(63);
        if self.repeated.contains(key) {
            let name = match self.kept.get(key) {
                Some((name, _)) => name.clone(),
                None => {
                    let name = self.fresh("kept");
                    let length = self.space.loops.product(&columns) + self.lanes;
                    let ty = c::memory_type(dtype);
                    self.top
                        .push(format!("{ty} {name}[{length}] __attribute__((aligned(64)));"));
                    self.kept.insert(key.clone(), (name.clone(), self.pass));
                    name
                }
            };
            let at = self.index_text(&position(), false);
            self.body
                .push(format!("st_{dtype}({name} + {at}, {});", register.name));
        }
        register
    }

    pub(super) fn compute(&mut self, value: Value, index: &[Index]) -> Register {
        let graph = self.graph;
        if !self.space.loops.nest.uses_of(value).is_empty() {
            let position = position(graph, &self.space.loops.nest.layouts, value, index);
            return self.load(Buffer::Value(value), &position, 1);
        }
        let data = graph.def(value);
        let dtype = graph.dtype(value);
        if let Some(operand) = operand_index(graph, value, index) {
            return self.eval(data.inputs[0], &operand);
        }
        if let Some(register) = self.power(value, index) {
            return register;
        }
        match &data.op {
            Op::Constant { value, dtype } => {
                let text = c::literal(*value, *dtype);
                Register {
                    name: text,
                    dtype: *dtype,
                    vector: false,
                    level: 0,
                    stage: 0,
                }
            }
            Op::Scalar { index, dtype } => {
                let at = self.argument(Argument::Scalar(*index));
                let at = self.pointer(at);
                let text = match dtype {
                    DType::Bool => format!("*(const uint64_t *){at} != 0"),
                    dtype if dtype.is_float() => {
                        c::cast(DType::F64, *dtype, false, &format!("*(const double *){at}"))
                    }
                    dtype => format!("({})*(const uint64_t *){at}", c::memory_type(*dtype)),
                };
                self.define(*dtype, false, 0, 0, &text)
            }
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
                let registers: Vec<Register> = data.inputs.iter().map(|&v| self.eval(v, index)).collect();
                let vector = registers.iter().any(|register| register.vector);
                let level = registers.iter().map(|register| register.level).max().unwrap_or(0);
                let stage = registers.iter().map(|register| register.stage).max().unwrap_or(0);
                let mut names: Vec<String> = registers
                    .iter()
                    .map(|register| self.operand(register, vector))
                    .collect();
                for (name, operand) in names.iter_mut().zip(&data.inputs) {
                    let operand = *self.equal.get(operand).unwrap_or(operand);
                    if reads_rounded(graph, &self.space.loops.nest, op, operand) {
                        *name = c::cast(DType::F32, graph.dtype(operand), vector, name);
                    }
                }
                let of = registers[0].dtype;
                if let Op::Cast(to) = op
                    && vector
                    && c::narrows(of, *to)
                {
                    let half = self.fresh("h");
                    let converted = c::convert(of, *to, vector, &names[0]);
                    self.line(level, stage, format!("v_u16 {half} = narrow_{to}({converted});"));
                    let register = self.define(dtype, vector, level, stage, &format!("widen_{to}({half})"));
                    self.halves.insert(register.name.clone(), half);
                    return register;
                }
                let text = match op {
                    Op::Unary(op) => c::unary(*op, of, vector, &names[0]),
                    Op::Binary(op) => c::binary(*op, of, vector, &names[0], &names[1]),
                    Op::Compare(op) => c::compare(*op, of, vector, &names[0], &names[1]),
                    Op::Select => c::select(dtype, vector, &names[0], &names[1], &names[2]),
                    Op::Cast(to) => c::cast(of, *to, vector, &names[0]),
                    other => unreachable!("{} is not computed point by point", other.name()),
                };
                self.define(dtype, vector, level, stage, &text)
            }
        }
    }

    /// An index as a number.
    pub(super) fn number(&mut self, index: &Index, dtype: DType) -> Register {
        let (data_level, stage) = self.load_slots(index);
        self.accesses.push(Access {
            index: index.clone(),
            weight: 0,
        });
        let set = index.vars();
        let level = self.level(set).max(data_level);
        let vector = self.is_vector(set);
        let base = format!("(int64_t)({})", self.index_text(index, false));
        if !vector {
            let text = c::cast(DType::I64, dtype, false, &base);
            return self.define(dtype, false, level, stage, &text);
        }
        let text = match self.lane_stride(index) {
            Some(stride) => format!("set_i64({base}) + iota_i64() * {stride}"),
            None => {
                let each = self.index_text(index, true);
                let name = self.fresh("g");
                let n = self.mode.count(self.lanes);
                self.line(
                    level,
                    stage,
                    format!("int64_t {name}[KILN_LANES] = {{0}}; for (int l = 0; l < {n}; l++) {name}[l] = {each};"),
                );
                format!("ld_i64({name})")
            }
        };
        let text = c::cast(DType::I64, dtype, true, &format!("({text})"));
        self.define(dtype, true, level, stage, &text)
    }

    pub(super) fn random(
        &mut self,
        kind: RandomKind,
        dtype: DType,
        position: &Index,
        inputs: &[Value],
    ) -> Register {
        let scalars: Vec<String> = inputs.iter().map(|&v| self.eval(v, &[]).name).collect();
        let arguments = scalars[..2].join(", ");
        let each = |at: &str| match kind {
            RandomKind::IntRange => {
                let ty = c::memory_type(dtype);
                format!(
                    "({ty})random_range({arguments}, {at}, {}, {})",
                    scalars[2], scalars[3]
                )
            }
            RandomKind::Uniform => format!("uniform_{dtype}({arguments}, {at})"),
            RandomKind::Normal => match dtype {
                DType::F64 => format!("normal_f64({arguments}, {at})"),
                DType::F32 => format!("normal_f32({arguments}, {at})"),
                half => format!("s_round_{half}(normal_f32({arguments}, {at}))"),
            },
        };
        // Computing a block of the generator for each lane costs less than reading a cache line for each.
        let by_lane = kind == RandomKind::Uniform && dtype == DType::F32;
        self.accesses.push(Access {
            index: position.clone(),
            weight: if by_lane { 1 } else { 2 },
        });
        let set = position.vars();
        // The position may be one that is looked up.
        let (data_level, stage) = self.load_slots(position);
        let level = self.level(set).max(data_level);
        if !self.is_vector(set) {
            let text = each(&format!("({})", self.index_text(position, false)));
            return self.define(dtype, false, level, stage, &text);
        }
        if by_lane && self.lane_stride(position) == Some(1) {
            let at = self.index_text(position, false);
            return self.define(
                dtype,
                true,
                level,
                stage,
                &format!("v_uniform_f32({arguments}, {at})"),
            );
        }
        if by_lane && let Some(stride) = self.lane_stride(position) {
            let at = self.index_text(position, false);
            let text = format!("v_uniform_f32_at({arguments}, set_i64({at}) + iota_i64() * {stride})");
            return self.define(dtype, true, level, stage, &text);
        }
        let name = self.fresh("g");
        let n = self.mode.count(self.lanes);
        let ty = c::memory_type(dtype.compute());
        let text = each(&format!("({})", self.index_text(position, true)));
        self.line(
            level,
            stage,
            format!("{ty} {name}[KILN_LANES] = {{0}}; for (int l = 0; l < {n}; l++) {name}[l] = {text};"),
        );
        self.define(
            dtype,
            true,
            level,
            stage,
            &format!("ld_{}({name})", dtype.compute()),
        )
    }
}
