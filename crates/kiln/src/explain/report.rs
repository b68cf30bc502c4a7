//! The report behind `explain`: plain data, the same for text, JSON and HTML.
//!
//! Everything in it is a fact of this process: counts, times and reasons come from the region's history,
//! kernels and memory from the compiled code. Values that were not measured are `None`, not zero.

use serde::{Deserialize, Serialize};

/// What a region compiled, why, what cut it, and what the compiled code does.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Name of the region.
    pub region: String,
    /// Calls of `run`.
    pub calls: u64,
    /// Compiled steps that the region holds, by segment.
    pub steps: Vec<Step>,
    /// Distinct graph breaks.
    pub breaks: Vec<Break>,
    /// Every compilation, in order: the recompile report.
    pub compiles: Vec<Compile>,
    /// How many steps a segment may compile.
    pub recompile_limit: usize,
    /// What made compilations necessary, and what to do about it, if the limit was reached.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub advice: String,
    /// How a training step is replayed; none for regions, which are recorded at each call.
    pub replay: Option<Replay>,
    /// The machine's limits, if they were measured.
    pub machine: Option<Machine>,
    /// The step's time on several ranks, for each number of them that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub predictions: Vec<Prediction>,
}

/// How a training step is replayed: how often, why calls were recorded, and what every tensor is bound to.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Replay {
    /// Calls that ran model, autograd and optimizer code.
    pub recorded: u64,
    /// Calls that ran none of it.
    pub replayed: u64,
    /// Recorded calls that were compared with the plan and agreed.
    pub proofs: u64,
    /// Why the step is recorded at every call, if it is.
    pub obstacle: Option<String>,
    /// Why calls were recorded.
    pub causes: Vec<Counted>,
    /// Where each input comes from: ``input 3 (f32 [64]): state of `encoder.norm.running_mean` ``. Empty
    /// while there is no plan.
    pub inputs: Vec<String>,
    /// Where each output goes.
    pub outputs: Vec<String>,
    /// The source of each result of the closure.
    pub results: Vec<String>,
    /// What the step keeps from call to call; none before the first call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
}

/// What a training step keeps from call to call, on this rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// Bytes of the model's parameters and statistics.
    pub model_bytes: usize,
    /// Bytes of the optimizer's state.
    pub optimizer_bytes: usize,
    /// Bytes of this rank's share of a master copy that the ranks divide. (A master copy that they do not
    /// divide is the model.)
    #[serde(default)]
    pub master_bytes: usize,
    /// Bytes of the copies of 16 bits beside parameters of `f32`
    /// ([`crate::TrainStepBuilder::with_kept_copies`], [`crate::Weights::with_master`]).
    #[serde(default)]
    pub copy_bytes: usize,
    /// Among how many ranks the optimizer's state and a master copy are divided; 1 if they are not.
    pub ranks: usize,
}

/// A compiled step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Step {
    /// Which step of the region, in the order of compilation, from 0.
    pub number: usize,
    /// Number of the executable in the process: profiles file its kernels under it.
    pub executable: u64,
    /// Segment of the region, from 0; graph breaks cut a region into segments.
    pub segment: usize,
    /// What runs it.
    pub backend: String,
    /// Whether it was prepared for one run only (the first step of an optimizer).
    pub provisional: bool,
    /// Recorded Burn operations.
    pub operations: usize,
    /// Nodes of the recorded graph.
    pub nodes: usize,
    /// The contents of the phases, in the order forward, backward, optimizer, unassigned. Phases without
    /// nodes are left out.
    pub phases: Vec<PhaseCount>,
    /// Tensor arguments.
    pub inputs: usize,
    /// Outputs.
    pub outputs: usize,
    /// Outputs computed in place of an argument.
    pub in_place: usize,
    /// Runtime scalars: learning rate, bias correction and other numbers that never recompile.
    pub scalars: usize,
    /// What must be the same for the step to run again.
    pub guards: Guards,
    /// Operations that run outside the compiled code, with their lines.
    pub externs: Vec<Counted>,
    /// Sums over ranks and the like where the executor runs them one after the other and waits for each;
    /// empty where they are [`Step::collectives`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exchanges: Vec<Counted>,
    /// Threads that share the work.
    pub threads: usize,
    /// Whether the disk cache had it.
    pub from_cache: bool,
    /// Time until it could run, in seconds.
    pub compile_seconds: f64,
    /// The stages of that time.
    pub stages: Vec<kiln_profile::Stage>,
    /// Times it ran.
    pub runs: u64,
    /// Time in all runs, in seconds.
    pub run_seconds: f64,
    /// Kernels in the order in which they run; empty for executors that do not compile.
    pub kernels: Vec<Kernel>,
    /// Memory over the step; none for executors that do not compile.
    pub memory: Option<Memory>,
    /// Tensors kept from the forward for the backward pass.
    pub saved: Vec<SavedTensor>,
    /// Operations that run again in the backward pass instead of being kept.
    pub recomputed: Vec<Recomputed>,
    /// What travels between ranks, in the order of the starts; empty for a step of one rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<Traveller>,
    /// The executor's description.
    pub details: String,
}

/// A collective of a step: a bucket of gradients, most often.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Traveller {
    /// `all_reduce` or another kind.
    pub kind: String,
    /// Bytes of the operand on each rank.
    pub bytes: u64,
    /// How many tensors travel together.
    pub tensors: usize,
    /// The kernel that starts it.
    pub start: usize,
    /// The kernel that waits for it; [`Traveller::start`] for one that is waited for at once.
    pub wait: usize,
    /// Kernels that run between, and hide it.
    pub between: usize,
    /// Mean time of the wait in seconds, if measured: exposed communication.
    pub exposed: Option<f64>,
}

/// What a step is expected to take on several ranks.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Prediction {
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes that a rank sends in a second while it receives as many.
    pub bandwidth: f64,
    /// Seconds of an exchange of next to nothing.
    pub latency: f64,
    /// Seconds of each message of an exchange.
    pub message: f64,
    /// How fast kernels and communication go while they run beside each other; 1 where they do not disturb.
    pub speed: f64,
    /// Whether the times of kernels were measured; otherwise they are the shortest that the machine allows.
    pub measured: bool,
    /// Seconds of the step.
    pub step_seconds: f64,
    /// Seconds of its kernels alone: a step on one rank.
    pub kernel_seconds: f64,
    /// Seconds that the step waits for collectives.
    pub exposed_seconds: f64,
    /// Seconds that collectives take, exposed or not.
    pub travel_seconds: f64,
    /// Bytes of a rank: arguments, new outputs, arena.
    pub memory_bytes: u64,
    /// Of these, state of the optimizer.
    pub state_bytes: u64,
    /// Whether the ranks divide that state; these are then the bytes of a rank's share.
    #[serde(default)]
    pub sharded: bool,
    /// The step with other sizes of buckets.
    pub buckets: Vec<Bucketing>,
}

/// A step with one size of buckets.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Bucketing {
    /// The most bytes of a bucket; of the first, a twenty-fifth of that.
    pub bytes: u64,
    /// How many buckets there are.
    pub count: usize,
    /// Seconds of the step.
    pub step_seconds: f64,
    /// Seconds that it waits for collectives.
    pub exposed_seconds: f64,
}

impl Prediction {
    /// The size with which the step is fastest; the largest of several.
    pub fn best(&self) -> Option<&Bucketing> {
        let faster = |a: &&Bucketing, b: &&Bucketing| {
            let time = b.step_seconds.total_cmp(&a.step_seconds);
            time.then(a.bytes.cmp(&b.bytes))
        };
        self.buckets.iter().max_by(faster)
    }

    /// How much of `ranks` times the throughput of one rank is left.
    pub fn efficiency(&self) -> f64 {
        self.kernel_seconds / self.step_seconds.max(f64::MIN_POSITIVE)
    }

    /// Bytes of a rank whose optimizer state is divided among the ranks.
    pub fn sharded_bytes(&self) -> u64 {
        if self.sharded {
            return self.memory_bytes;
        }
        self.memory_bytes - self.state_bytes + self.state_bytes.div_ceil(self.ranks.max(1) as u64)
    }
}

/// The contents of one phase of a step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PhaseCount {
    /// `forward`, `backward`, `optimizer`, or `unassigned`.
    pub phase: String,
    /// Nodes of the recorded graph.
    pub nodes: usize,
    /// Kernels.
    pub kernels: usize,
    /// Bytes that its kernels read and write.
    pub bytes: u64,
    /// Floating point operations of its kernels.
    pub flops: u64,
}

/// A name and how often it occurs.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Counted {
    /// The name.
    pub name: String,
    /// How often.
    pub count: usize,
}

/// What must be the same for a step to run again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Guards {
    /// Element type and shape of each input, in order of first use.
    pub inputs: Vec<String>,
    /// Number of operations; each with its attributes and operands must be the same.
    pub operations: usize,
    /// Number of results that are alive at the end; the same ones must be.
    pub outputs: usize,
}

/// A graph break.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Break {
    /// Why a value was needed.
    pub reason: String,
    /// The operation whose result was needed, if it was one.
    pub operation: Option<String>,
    /// `file:line` of the user's program, or the function if the program carries no line tables.
    pub location: Option<String>,
    /// What to do about it.
    pub remedy: String,
    /// How often it happened.
    pub times: u64,
}

/// A compilation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Compile {
    /// Segment of the region.
    pub segment: usize,
    /// Which step of the region it made.
    pub step: usize,
    /// What runs it.
    pub backend: String,
    /// Whether it was prepared for one run only.
    pub provisional: bool,
    /// Whether it is no cause for concern: the first of a segment, the one after the first step of an
    /// optimizer, or another size of a step before for which nothing had to be compiled.
    pub expected: bool,
    /// The guard that failed; none for the first compilation of a segment.
    pub guard: Option<String>,
    /// What the guard saw when the nearest step was compiled.
    pub before: Option<String>,
    /// What it sees now.
    pub after: Option<String>,
    /// What most likely makes the step the same again.
    pub remedy: Option<String>,
    /// Whether it is another size of a step before, for which nothing had to be compiled.
    #[serde(default)]
    pub absorbed: bool,
    /// What there is to say about sizes: what became of marked dimensions, and which sizes the program pins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Time until it could run, in seconds.
    pub seconds: f64,
    /// How often it ran since.
    pub runs: u64,
}

/// A kernel of a compiled step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Kernel {
    /// Its place in the order.
    pub number: usize,
    /// Its name in the generated source.
    pub name: String,
    /// `forward`, `backward`, `optimizer`, or `unassigned`.
    pub phase: String,
    /// The operations that it computes, in order.
    pub fused: Vec<Fused>,
    /// Buffers read, by position in [`Memory::buffers`].
    pub reads: Vec<usize>,
    /// Buffers written, likewise.
    pub writes: Vec<usize>,
    /// Bytes read and written, each buffer once.
    pub bytes: u64,
    /// Floating point operations.
    pub flops: u64,
    /// Working memory of its own, in bytes.
    pub scratch_bytes: u64,
    /// Mean time of a run in seconds, if measured.
    pub seconds: Option<f64>,
    /// Share of the machine's limit, from 0 to 1, if measured.
    pub machine_share: Option<f64>,
    /// The limit: `arithmetic`, or the rate of `cache` or `memory` for as many bytes. The limit of a kernel
    /// that would exceed it says that the kernel reads only a part of its buffers.
    pub limit: Option<String>,
}

/// An operation inside a kernel.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Fused {
    /// Its node in the transformed graph.
    pub node: usize,
    /// Mnemonic of the primitive.
    pub op: String,
    /// Type and shape of its result.
    pub ty: String,
    /// The nodes it reads.
    pub inputs: Vec<usize>,
    /// The recorded Burn operation, if known.
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// Path of the Burn module it ran in, if known.
    pub module: Option<String>,
}

/// Memory over a step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Size of the arena: the planned peak of everything that is neither argument nor output.
    pub arena_bytes: u64,
    /// Bytes of all arguments.
    pub input_bytes: u64,
    /// Bytes of the outputs that have memory of their own.
    pub output_bytes: u64,
    /// Bytes of the arena in use while each kernel runs.
    pub in_use: Vec<u64>,
    /// The buffers that kernels share.
    pub buffers: Vec<Buffer>,
}

/// Memory that kernels share.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Buffer {
    /// The value it holds.
    pub name: String,
    /// Element type and shape.
    pub ty: String,
    /// Size.
    pub bytes: u64,
    /// `input 3`, `output 0` or `arena`.
    pub place: String,
    /// Offset in the arena, for buffers there.
    pub offset: Option<u64>,
    /// The first kernel that touches it.
    pub first: usize,
    /// The last kernel that touches it.
    pub last: usize,
}

/// A tensor kept from the forward for the backward pass.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct SavedTensor {
    /// The value.
    pub name: String,
    /// Element type and shape.
    pub ty: String,
    /// Size.
    pub bytes: u64,
    /// The operation that made it.
    pub origin: String,
    /// The operations that read it in the backward pass.
    pub users: Vec<String>,
}

/// Operations of one kind that run again in the backward pass.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Recomputed {
    /// Mnemonic of the primitive.
    pub op: String,
    /// How many.
    pub count: usize,
    /// Bytes that need not be kept.
    pub bytes: u64,
}

/// The machine's limits, measured briefly.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Bytes a second that all threads together read and write, of more than caches hold.
    pub bytes_per_second: f64,
    /// The rates for smaller amounts, the smallest first.
    pub caches: Vec<Rate>,
    /// Floating point operations a second of a large matrix product.
    pub flops_per_second: f64,
    /// Threads it was measured with.
    pub threads: usize,
    /// The GPU that was measured, if it was one.
    #[serde(default)]
    pub gpu: Option<String>,
}

/// How fast an amount of memory is read and written over and over.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Rate {
    /// The amount.
    pub bytes: u64,
    /// Bytes a second.
    pub bytes_per_second: f64,
}

impl Step {
    /// Mean time of a run in seconds; none before the first.
    pub fn mean_seconds(&self) -> Option<f64> {
        (self.runs > 0).then(|| self.run_seconds / self.runs as f64)
    }
}

impl Report {
    /// Whether a segment has as many compiled steps as it may have, so that further steps run node by node.
    pub fn at_recompile_limit(&self) -> bool {
        let lasting = |segment: usize| {
            let own = self.compiles.iter().filter(move |it| it.segment == segment);
            own.filter(|it| !it.provisional && !it.absorbed).count()
        };
        self.compiles
            .iter()
            .any(|compile| lasting(compile.segment) >= self.recompile_limit)
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names are strings and numbers are finite or null")
    }

    /// The report as one HTML file.
    pub fn to_html(&self) -> String {
        super::html::page(self)
    }
}
