//! The machine's rates, measured with kernels of this compiler's own: the numbers that the partitioner's
//! cost model takes.
//!
//! One small step has a kernel for each rate: a sum of arrays that no cache holds, matrix products of f32
//! and of bf16, a chain of simple operations and one of transcendental functions on data that a cache
//! holds, a sum of random numbers. It runs some ten times for a few milliseconds, and the shortest time of
//! each kernel counts, because other work of the machine can only make a kernel slower.
//!
//! Rates are part of a step's identity, because another partition is another step. So they must not change
//! from process to process: they are measured once, rounded to two digits and kept in the cache, for each
//! compiler, CPU and number of threads. Without a cache folder each process measures its own.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ffi::c_void;
use std::time::{Duration, Instant};

use kiln_compiler::{CompileError, Options, identity};
use kiln_graph::op::{BinaryOp, Dims, DotDims, Op, RandomKind, ReduceOp, UnaryOp};
use kiln_graph::{DType, Graph, Provenance, Scalar, Shape, TensorType, TypeError, Value};
use kiln_partition::Machine;

use crate::build::{BuildOptions, Toolchain};
use crate::cache::{Cache, step_key};
use crate::error::StepError;
use crate::runtime::buffer::AlignedBuffer;
use crate::runtime::executable::CpuExecutable;
use crate::runtime::library::{KernelEvent, StepHooks};
use crate::runtime::thread_pool::ThreadPool;
use crate::target::{CPU_SOURCES, CpuTarget};

/// Name of the step that measures.
const NAME: &str = "machine_rates";

/// Elements of each of the three arrays that no cache holds: 16 MiB.
const FAR: [usize; 2] = [1024, 4096];

/// Elements of the data that the chains work on.
const NEAR: [usize; 2] = [128, 1024];

/// Rows and columns of the matrices.
const SIDE: usize = 640;

/// Random numbers drawn, in rows that are summed.
const DRAWN: [usize; 2] = [512, 1024];

/// Operations in the chain of simple ones; functions in the other.
const SIMPLE: usize = 64;
const SPECIAL: usize = 12;

/// The step runs for this time, but not more often than [`RUNS`].
const TIME: Duration = Duration::from_millis(30);
const RUNS: usize = 12;

/// The rates of this machine with `threads` threads: from `cache` if it has them, otherwise measured and
/// stored there. If they cannot be measured, those of [`Machine::default`].
pub fn rates(toolchain: &Toolchain, cache: &Cache, threads: usize) -> Machine {
    let key = step_key(toolchain, &BuildOptions::default())
        .field("compiler", identity::COMPILER_SOURCES)
        .field("cpu", CPU_SOURCES)
        .field(NAME, threads.to_string())
        .finish();
    let measured = || {
        let machine = measure(toolchain, threads).unwrap_or_else(|error| {
            tracing::warn!(%error, "the machine's rates cannot be measured; using those of the reference machine");
            Machine::default()
        });
        Ok::<_, Infallible>(to_text(&machine))
    };
    let Ok(text) = cache
        .notes()
        .note(&key, |text| from_text(text).is_some(), measured);
    from_text(&text).unwrap_or_default()
}

/// Measures the rates.
fn measure(toolchain: &Toolchain, threads: usize) -> Result<Machine, StepError> {
    let _span = tracing::info_span!("measure the machine").entered();
    let probe = Probe::new().map_err(|source| CompileError::Pass { pass: NAME, source })?;
    let options = Options {
        // Transforms would change the operations that are measured.
        transform: false,
        ..Options::default()
    };
    let target = CpuTarget::new(toolchain, threads);
    let build = BuildOptions::default();
    let step = CpuExecutable::new(
        &probe.graph,
        &options,
        &target,
        toolchain,
        &Cache::disabled(),
        &build,
    )?;
    let shortest = probe.run(&step, &ThreadPool::new(threads))?;
    let mut machine = Machine::default();
    for (kernel, time) in step.contract().kernels.iter().zip(shortest) {
        let has = |name: &str| kernel.nodes.iter().any(|node| node.op == name);
        let (rate, work) = if has("random") {
            (&mut machine.random_per_second, DRAWN[0] * DRAWN[1])
        } else if has("dot_general") {
            // The kernels differ in the bytes of an element.
            let rate = match kernel.bytes < 3 * 4 * (SIDE * SIDE) as u64 {
                true => &mut machine.bf16_flops_per_second,
                false => &mut machine.flops_per_second,
            };
            (rate, 2 * SIDE * SIDE * SIDE)
        } else if has("exp") {
            (&mut machine.special_per_second, SPECIAL * NEAR[0] * NEAR[1])
        } else if has("max") {
            (&mut machine.simple_per_second, SIMPLE * NEAR[0] * NEAR[1])
        } else {
            (&mut machine.bytes_per_second, 3 * 4 * FAR[0] * FAR[1])
        };
        if time > Duration::ZERO {
            *rate = two_digits(work as f64 / time.as_secs_f64());
        }
    }
    tracing::info!(?machine, threads, "measured");
    Ok(machine)
}

/// `rate` with two significant digits: further digits are noise between two measurements.
fn two_digits(rate: f64) -> f64 {
    let unit = 10f64.powf(rate.log10().floor() - 1.0);
    (rate / unit).round() * unit
}

/// The step that measures.
struct Probe {
    graph: Graph,
}

impl Probe {
    fn new() -> Result<Self, TypeError> {
        let mut graph = Graph::new(NAME);
        let at = Provenance::default();
        let array = |graph: &mut Graph, shape: &[usize]| graph.parameter(TensorType::new(DType::F32, shape));

        let (a, b) = (array(&mut graph, &FAR), array(&mut graph, &FAR));
        let moved = graph.add(Op::Binary(BinaryOp::Add), &[a, b], &at)?;

        let (a, b) = (array(&mut graph, &[SIDE, SIDE]), array(&mut graph, &[SIDE, SIDE]));
        let product = graph.add(Op::DotGeneral(DotDims::matmul(0)), &[a, b], &at)?;

        let halves = [0; 2].map(|_| graph.parameter(TensorType::new(DType::BF16, [SIDE, SIDE])));
        let half_product = graph.add(Op::DotGeneral(DotDims::matmul(0)), &halves, &at)?;

        let (a, b) = (array(&mut graph, &NEAR), array(&mut graph, &NEAR));
        let mut simple = a;
        for number in 0..SIMPLE {
            let op = [BinaryOp::Max, BinaryOp::Sub][number % 2];
            simple = graph.add(Op::Binary(op), &[simple, b], &at)?;
        }

        // Of another shape, so that the two chains are two kernels.
        let a = array(&mut graph, &[NEAR[0] * NEAR[1]]);
        let mut special = a;
        for number in 0..SPECIAL {
            // The second keeps the first one's next operand small.
            let op = [UnaryOp::Exp, UnaryOp::Tanh, UnaryOp::Sigmoid][number % 3];
            special = graph.add(Op::Unary(op), &[special], &at)?;
        }

        let (seed, stream) = (graph.scalar(DType::U64), graph.scalar(DType::U64));
        let random = Op::Random {
            kind: RandomKind::Uniform,
            dtype: DType::F32,
            shape: Shape::from(DRAWN),
        };
        let random = graph.add(random, &[seed, stream], &at)?;
        let axes = Dims::from_slice(&[1]);
        let op = ReduceOp::Sum;
        let drawn = graph.add(Op::Reduce { op, axes }, &[random], &at)?;

        let outputs: [Value; 6] = [moved, product, half_product, simple, special, drawn];
        outputs.into_iter().for_each(|value| graph.output(value, None));
        Ok(Self { graph })
    }

    /// The shortest time of each kernel.
    fn run(&self, step: &CpuExecutable, pool: &ThreadPool) -> Result<Vec<Duration>, StepError> {
        let memory = |value: &Value| AlignedBuffer::zeroed(self.graph.ty(*value).bytes());
        let arguments = self.graph.parameters().iter().map(memory);
        let arguments: Vec<AlignedBuffer> = arguments.collect::<Result<_, _>>()?;
        let results = self.graph.outputs.iter().map(|output| memory(&output.value));
        let mut results: Vec<AlignedBuffer> = results.collect::<Result<_, _>>()?;
        let inputs: Vec<*const u8> = arguments.iter().map(AlignedBuffer::as_ptr).collect();
        let outputs: Vec<*mut u8> = results.iter_mut().map(AlignedBuffer::as_mut_ptr).collect();
        let scalars = [Scalar::UInt(1).to_bits(DType::U64); 2];
        let clock = Clock {
            begin: RefCell::new(Instant::now()),
            shortest: RefCell::new(vec![Duration::MAX; step.contract().kernels.len()]),
        };
        let start = Instant::now();
        for _ in 0..RUNS {
            // SAFETY: one buffer of the declared size for each parameter and output, and no output takes over
            // an argument's memory.
            unsafe { step.run(pool, &inputs, &outputs, &scalars, &clock) }?;
            if start.elapsed() > TIME {
                break;
            }
        }
        Ok(clock.shortest.into_inner())
    }
}

/// Takes the time of each kernel.
struct Clock {
    begin: RefCell<Instant>,
    shortest: RefCell<Vec<Duration>>,
}

impl StepHooks for Clock {
    fn call_extern(&self, _: usize, _: *mut *mut c_void) -> Result<(), String> {
        Err("all of this step is compiled".to_owned())
    }

    fn wants_events(&self) -> bool {
        true
    }

    fn kernel_event(&self, kernel: usize, event: KernelEvent) {
        match event {
            KernelEvent::Begin => *self.begin.borrow_mut() = Instant::now(),
            KernelEvent::End => {
                let time = self.begin.borrow().elapsed();
                let shortest = &mut self.shortest.borrow_mut()[kernel];
                *shortest = (*shortest).min(time);
            }
        }
    }
}

/// One line for each rate.
fn to_text(machine: &Machine) -> String {
    let rates = [
        ("bytes", machine.bytes_per_second),
        ("flops", machine.flops_per_second),
        ("bf16_flops", machine.bf16_flops_per_second),
        ("simple", machine.simple_per_second),
        ("special", machine.special_per_second),
        ("random", machine.random_per_second),
    ];
    rates.map(|(name, rate)| format!("{name} {rate:e}\n")).concat()
}

/// Reads what [`to_text`] wrote.
fn from_text(text: &str) -> Option<Machine> {
    let rate = |name: &str| -> Option<f64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        line.parse()
            .ok()
            .filter(|rate: &f64| rate.is_finite() && *rate > 0.0)
    };
    Some(Machine {
        bytes_per_second: rate("bytes")?,
        flops_per_second: rate("flops")?,
        bf16_flops_per_second: rate("bf16_flops")?,
        // Products of f16 are those of f32.
        f16_flops_per_second: rate("flops")?,
        simple_per_second: rate("simple")?,
        special_per_second: rate("special")?,
        random_per_second: rate("random")?,
        ..Machine::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_list_of_rates_is_not_read() {
        assert_eq!(from_text(""), None);
        let text = to_text(&Machine::default());
        assert_eq!(from_text(&text), Some(Machine::default()));
        assert_eq!(from_text(&text.replace("flops 2.6e11", "flops -1")), None);
    }

    #[test]
    fn two_digits_count() {
        assert_eq!(two_digits(28.84e9), 29e9);
        assert_eq!(two_digits(101.0), 100.0);
        assert_eq!(two_digits(9.96), 10.0);
    }
}
