//! Running compiled graphs on host tensors, for tests.

// Each test program has its own copy of this module and uses a part of it.
#![allow(dead_code)]

use kiln_compiler::{CompileError, Options, compile};
use kiln_cpu::{
    AlignedBuffer, BuildOptions, Cache, CpuExecutable, CpuStep, CpuTarget, NoHooks, StepError, StepHooks,
    ThreadPool, Toolchain,
};
use kiln_graph::testing::{GraphConfig, difference, random_arguments, random_graph, seeds};
use kiln_graph::{Graph, HostTensor, Op, Provenance, Scalar, Value, interpret_f64};

/// How a test compiles.
#[derive(Clone)]
pub struct Setup {
    /// The compiler's options.
    pub options: Options,
    /// The target.
    pub target: CpuTarget,
}

impl Setup {
    /// For code that `toolchain` builds and `threads` threads run.
    pub fn new(toolchain: &Toolchain, threads: usize) -> Self {
        Self {
            options: Options::default(),
            target: CpuTarget::new(toolchain, threads),
        }
    }

    /// [`Setup::new`] with the machine's own C compiler.
    pub fn detect(threads: usize) -> Self {
        Self::new(&Toolchain::detect().unwrap(), threads)
    }

    /// Compiles `graph` to C.
    pub fn compile(&self, graph: &Graph) -> Result<CpuStep, CompileError> {
        compile(graph, &self.options, &self.target)
    }
}

/// Builds `graph` without a cache.
pub fn build(graph: &Graph, change: impl FnOnce(&mut Setup)) -> Result<CpuExecutable, StepError> {
    build_with(&Toolchain::detect()?, graph, change)
}

/// [`build`] with a certain compiler.
pub fn build_with(
    toolchain: &Toolchain,
    graph: &Graph,
    change: impl FnOnce(&mut Setup),
) -> Result<CpuExecutable, StepError> {
    let mut setup = Setup::new(toolchain, 3);
    change(&mut setup);
    let (cache, build) = (Cache::disabled(), BuildOptions::default());
    CpuExecutable::new(graph, &setup.options, &setup.target, toolchain, &cache, &build)
}

/// `count` random graphs as one step, with the tolerances of its outputs: a compiler run each would be most
/// of the time.
pub fn batch(first_seed: u64, count: u64, config: &GraphConfig) -> (Graph, Vec<f64>) {
    let mut whole = Graph::new("random");
    let mut tolerances = Vec::new();
    for seed in seeds(first_seed..first_seed + count) {
        let random = random_graph(seed, config);
        append(&mut whole, &random.graph);
        tolerances.extend(random.tolerances);
    }
    (whole, tolerances)
}

/// Appends `part` to `whole`: parameters and scalars after those that are there, outputs too.
pub fn append(whole: &mut Graph, part: &Graph) {
    let mut map: Vec<Value> = Vec::new();
    for (_, node) in part.nodes() {
        let inputs: Vec<Value> = node.inputs.iter().map(|v| map[v.as_u32() as usize]).collect();
        let outputs = match &node.op {
            Op::Parameter { ty, .. } => vec![whole.parameter(ty.clone())],
            Op::Scalar { dtype, .. } => vec![whole.scalar(*dtype)],
            op => whole
                .add_node(op.clone(), &inputs, Provenance::default())
                .unwrap()
                .to_vec(),
        };
        map.extend(outputs);
    }
    for output in &part.outputs {
        whole.output(map[output.value.as_u32() as usize], None);
    }
}

/// [`check_on`] for random arguments.
pub fn check_relative(graph: &Graph, what: &str, tolerance: f64, change: impl FnOnce(&mut Setup)) {
    check_on(graph, &random_arguments(graph, 3), what, tolerance, change);
}

/// Builds and runs `graph` and compares with the interpreter, relative to the largest element of each output
/// (1 at least); one and two threads must give the same bits.
pub fn check_on(
    graph: &Graph,
    (tensors, scalars): &(Vec<HostTensor>, Vec<Scalar>),
    what: &str,
    tolerance: f64,
    change: impl FnOnce(&mut Setup),
) {
    let expected = interpret_f64(graph, tensors, scalars).unwrap();
    let step = build(graph, change).unwrap();
    let one = run(&step, graph, tensors, scalars, 1);
    let two = run(&step, graph, tensors, scalars, 2);
    for (number, (actual, expected)) in two.iter().zip(&expected).enumerate() {
        assert_eq!(
            one[number].bytes(),
            actual.bytes(),
            "{what}: output {number} with one and two threads"
        );
        let scale = expected.to_f64s().iter().fold(1.0f64, |a, b| a.max(b.abs()));
        if let Some(found) = difference(actual, expected, tolerance * scale) {
            panic!("{what}: output {number}: {found}");
        }
    }
}

/// Runs a step on `threads` threads. Outputs that take over an argument's memory get a copy of it.
pub fn run(
    step: &CpuExecutable,
    graph: &Graph,
    inputs: &[HostTensor],
    scalars: &[Scalar],
    threads: usize,
) -> Vec<HostTensor> {
    let mut memory = Memory::new(step, graph, inputs, scalars);
    memory.run(&ThreadPool::new(threads));
    memory.results()
}

/// A step with memory for its arguments and results.
pub struct Memory<'a> {
    step: &'a CpuExecutable,
    graph: &'a Graph,
    arguments: Vec<AlignedBuffer>,
    results: Vec<AlignedBuffer>,
    scalars: Vec<u64>,
}

impl<'a> Memory<'a> {
    /// Copies of `inputs`, and memory for the results.
    pub fn new(step: &'a CpuExecutable, graph: &'a Graph, inputs: &[HostTensor], scalars: &[Scalar]) -> Self {
        let arguments = inputs.iter().map(|tensor| {
            let mut buffer = AlignedBuffer::zeroed(tensor.bytes().len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(tensor.bytes());
            buffer
        });
        let results = graph.outputs.iter().map(|output| {
            let mut buffer = AlignedBuffer::zeroed(graph.ty(output.value).bytes()).unwrap();
            // Bytes that the step does not write are visible.
            buffer.as_mut_slice().fill(0xa5);
            buffer
        });
        let bits = graph.scalars().iter().zip(scalars);
        Self {
            step,
            graph,
            arguments: arguments.collect(),
            results: results.collect(),
            scalars: bits
                .map(|(&value, scalar)| scalar.to_bits(graph.dtype(value)))
                .collect(),
        }
    }

    /// Runs the step once.
    pub fn run(&mut self, pool: &ThreadPool) {
        self.try_run(pool).unwrap();
    }

    /// Runs the step once, if it can.
    pub fn try_run(&mut self, pool: &ThreadPool) -> Result<(), StepError> {
        self.run_with(pool, &NoHooks)
    }

    /// Runs the step once, with somebody who runs what stays outside of it.
    pub fn run_with(&mut self, pool: &ThreadPool, hooks: &dyn StepHooks) -> Result<(), StepError> {
        let inputs: Vec<*const u8> = self.arguments.iter().map(AlignedBuffer::as_ptr).collect();
        let mut outputs: Vec<*mut u8> = Vec::new();
        for (buffer, alias) in self.results.iter_mut().zip(&self.step.contract().aliases) {
            outputs.push(match alias {
                Some(index) => self.arguments[*index as usize].as_mut_ptr(),
                None => buffer.as_mut_ptr(),
            });
        }
        // SAFETY: one buffer of the declared size for each parameter and output.
        unsafe { self.step.run(pool, &inputs, &outputs, &self.scalars, hooks) }
    }

    /// The current arguments.
    pub fn arguments(&self) -> impl Iterator<Item = &[u8]> {
        self.arguments.iter().map(AlignedBuffer::as_slice)
    }

    /// The current outputs.
    pub fn results(&self) -> Vec<HostTensor> {
        let outputs = self.graph.outputs.iter().zip(&self.results);
        let outputs = outputs.zip(&self.step.contract().aliases);
        outputs
            .map(|((output, buffer), alias)| {
                let bytes = match alias {
                    Some(index) => self.arguments[*index as usize].as_slice(),
                    None => buffer.as_slice(),
                };
                HostTensor::from_bytes(self.graph.ty(output.value).clone(), bytes.to_vec()).unwrap()
            })
            .collect()
    }
}
