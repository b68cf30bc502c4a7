//! How a region is compiled.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use burn_backend::DType;
use kiln_compiler::buckets::Buckets;
use kiln_distributed::World;

/// The backend that runs a recorded step. The order is a ladder: when a result looks wrong, go down it
/// until the result is right; the fault lies between the last two backends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub enum CompileBackend {
    /// Does not record: each operation runs at once on burn-flex.
    Eager,
    /// Records and imports, then interprets the graph operation by operation on burn-flex.
    AotEager,
    /// The same graph on candle-core, whose kernels share nothing with Burn's. Needs the feature `candle`.
    Candle,
    /// The plain meaning of each operation in f64; slow, for tests.
    Interpret,
    /// Compiles the step to one shared object through C.
    #[default]
    Cpu,
    /// Compiles the step to one graph of kernels on an NVIDIA GPU.
    Cuda,
}

impl CompileBackend {
    /// Every backend, in the order of the ladder.
    pub const ALL: [Self; 6] = [
        Self::Eager,
        Self::AotEager,
        Self::Candle,
        Self::Interpret,
        Self::Cpu,
        Self::Cuda,
    ];

    /// The backends that this build has, in the order of the ladder.
    pub const BUILT: &[Self] = match cfg!(feature = "candle") {
        true => &Self::ALL,
        false => &[
            Self::Eager,
            Self::AotEager,
            Self::Interpret,
            Self::Cpu,
            Self::Cuda,
        ],
    };

    /// The name on command lines and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::AotEager => "aot_eager",
            Self::Candle => "candle",
            Self::Interpret => "interpret",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// What it does, in one line.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Eager => "no recording: every operation runs at once on burn-flex",
            Self::AotEager => "record the step, then interpret its graph operation by operation on burn-flex",
            Self::Candle => "the recorded graph on candle-core, an executor that shares no kernel with Burn",
            Self::Interpret => "the plain meaning of the recorded graph, in f64; slow, for tests",
            Self::Cpu => "the recorded step compiled to one shared object through C",
            Self::Cuda => "the recorded step compiled to one graph of kernels on an NVIDIA GPU",
        }
    }

    /// Whether it compiles a step as a whole and plans its memory.
    pub const fn compiles(self) -> bool {
        matches!(self, Self::Cpu | Self::Cuda)
    }

    /// The backend for a step on `gpu`, where the program asked for this one: on a GPU the compiler for the
    /// CPU is replaced by the one for the GPU.
    pub(crate) const fn on(self, gpu: Option<usize>) -> Self {
        match (self, gpu) {
            (Self::Cpu, Some(_)) => Self::Cuda,
            (backend, _) => backend,
        }
    }
}

impl fmt::Display for CompileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CompileBackend {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|backend| backend.name() == name)
            .ok_or_else(|| UnknownBackend(name.to_owned()))
    }
}

/// A name that is no backend.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown backend `{0}` (expected one of eager, aot_eager, candle, interpret, cpu, cuda)")]
pub struct UnknownBackend(pub String);

/// Options of a compiled region. Build with [`CompileOptions::default`] and the `with_*` methods.
#[derive(Clone, PartialEq, Debug)]
pub struct CompileOptions {
    /// What runs the recorded step. Default: [`CompileBackend::Cpu`], which stands for
    /// [`CompileBackend::Cuda`] where the step's tensors are on a GPU.
    pub backend: CompileBackend,
    /// Whether a graph break is an error. Default: false.
    pub fullgraph: bool,
    /// Upper bound in bytes of the step's intermediate values: its allocations beyond parameters, optimizer
    /// state, inputs and outputs. To stay within it, the backends `cpu` and `cuda` recompute values in the
    /// backward pass, or report the smallest possible budget; a larger budget never gives a slower step.
    /// The other backends have no plan of memory and ignore the budget, which `explain` reports. Default:
    /// none.
    pub memory_budget: Option<usize>,
    /// Whether a training step that is found to compute another function than the one that was replayed fails
    /// with an error. Otherwise there is a warning, and the step is recorded at each call from then on. A
    /// step whose first two calls differ is never replayed and only warned of: nothing of it can be wrong.
    /// Default: false.
    pub strict: bool,
    /// Whether a call that would compile is an error ([`crate::Error::Frozen`]) that names the guard,
    /// before anything runs. With this option nothing is compiled until `unfreeze` is called; more often a
    /// region is frozen (`freeze`) when it has compiled the steps that it needs. Default: false.
    pub frozen: bool,
    /// What becomes of a step that comes again with another shape. Default: [`Dynamic::Auto`].
    pub dynamic: Dynamic,
    /// How many different executables one region may have before further ones run on `aot_eager`, after one
    /// warning that says what differed. A shape for which nothing had to be compiled ([`Dynamic::Auto`],
    /// [`Dynamic::Marked`]) does not count, and what exchanges something with other ranks is compiled behind
    /// the limit, too. For each forward pass of a function that is compiled with its gradients this also
    /// bounds how many backward passes are compiled for losses of some of its outputs. Default: 8.
    pub recompile_limit: usize,
    /// Threads of the executable; 0 is the number of cores, and in a step of several ranks this rank's share
    /// of them. Results are the same bits on any number of threads. With a [`CompileOptions::memory_budget`]
    /// they may differ in rounding: the working memory of threads counts, and what fits decides what is kept
    /// and which operations share a kernel. Default: 0.
    pub threads: usize,
    /// Whether products of f32 on a GPU may round their operands to 10 bits of fraction, for the tensor
    /// cores: several times faster, with errors of some 1e-3. Default: false.
    pub tf32: bool,
    /// Mixed precision: products, convolutions and attention of f32 read this type, [`DType::BF16`] or
    /// [`DType::F16`], and add up in f32; values between them are stored in it. Parameters, optimizer
    /// state, statistics, losses and everything that leaves the step stay f32; [`crate::full_precision`]
    /// keeps more of the step so. With f16 a `TrainStep` scales its loss ([`CompileOptions::loss_scaling`]);
    /// elsewhere small gradients become zero. The backends `cpu` and `cuda` do this, the others compute in
    /// f32. Default: none.
    pub autocast: Option<DType>,
    /// How a `TrainStep` scales its loss, so that gradients which are stored in 16 bits do not underflow; a
    /// step with a gradient that is not finite is skipped. Regions without an optimizer ignore it. Default:
    /// [`LossScaling::default`] if [`CompileOptions::autocast`] is f16, else no scaling.
    pub loss_scaling: Option<LossScaling>,
    /// How large the buckets are in which sums over ranks travel. Default: none, for sizes that follow from the
    /// latency and bandwidth between the ranks, which are measured once; they change no bit of a result. 25 MB
    /// and 1 MB for the first where a measured choice could change something: on a GPU, and with a memory
    /// budget.
    pub buckets: Option<Buckets>,
    /// On how many ranks the region trains ([`CompileOptions::with_data_parallel`]). Default: 1.
    pub ranks: usize,
    /// Name of the region in reports, dumps and traces. Default: `step`.
    pub name: String,
    /// Folder for the results of each compilation ([`kiln_compiler::debug`]): recorded stream, graphs,
    /// schedule, plan, sources, a script that runs the step alone. Default: the environment variable
    /// `KILN_DEBUG`; nothing is written without it.
    pub debug: Option<PathBuf>,
    /// Whether the first runs of each compiled step are compared with another backend. Default: no.
    pub check: Option<NumericsCheck>,
}

/// What becomes of a step that comes again with another shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Dynamic {
    /// The second shape of a step makes its sizes variables of the compiled code (of dimensions that the
    /// program marked with `kiln::dynamic`, the first does): from then on a shape is
    /// planned, which takes a fraction of a second, and the C compiler or NVRTC runs for kernels that no
    /// earlier shape had. The step computes what it would if it were compiled for its shape alone. On the
    /// backends `cpu` and `cuda`; the others compile nothing.
    #[default]
    Auto,
    /// Only dimensions that the program marked (`kiln::dynamic`), and those that follow from them, become
    /// variables, and they are variables from the first shape on. A step whose other dimensions differ is
    /// compiled by itself, and `explain` names the dimension.
    Marked,
    /// Each shape is compiled by itself, with its sizes as constants. Marks are ignored.
    Off,
}

/// Dynamic loss scaling of a training step: how the number moves by which the loss is multiplied before the
/// backward pass, and by which the gradients are divided after it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScaling {
    /// The scale of the first step; a power of two keeps scaling exact. Default: 65536.
    pub initial: f32,
    /// What the scale is multiplied by after [`LossScaling::interval`] steps without a skipped one; at most
    /// 2^24 results. Default: 2.
    pub growth: f32,
    /// What the scale is multiplied by when a gradient is not finite and the step is skipped; at least 1
    /// results. Default: 0.5.
    pub backoff: f32,
    /// Steps without a skipped one from one growth to the next. Default: 2000.
    pub interval: u32,
}

impl Default for LossScaling {
    fn default() -> Self {
        Self {
            initial: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
        }
    }
}

/// A comparison of the first runs of each compiled step with another backend. See
/// [`CompileOptions::check_against`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NumericsCheck {
    /// The backend that is taken to be right.
    pub backend: CompileBackend,
    /// Largest difference, relative to the largest magnitude of a tensor, that counts as equal.
    pub tolerance: f64,
    /// Runs of each compiled step that are compared.
    pub steps: u64,
}

/// Runs that [`CompileOptions::check_against`] compares unless told otherwise.
const CHECKED_STEPS: u64 = 3;

impl Default for CompileOptions {
    fn default() -> Self {
        Self {
            backend: CompileBackend::default(),
            fullgraph: false,
            strict: false,
            frozen: false,
            memory_budget: None,
            dynamic: Dynamic::Auto,
            recompile_limit: 8,
            threads: 0,
            tf32: false,
            autocast: None,
            loss_scaling: None,
            buckets: None,
            ranks: 1,
            name: "step".to_owned(),
            debug: None,
            check: None,
        }
    }
}

impl CompileOptions {
    /// Sets [`CompileOptions::backend`].
    pub fn with_backend(mut self, backend: CompileBackend) -> Self {
        self.backend = backend;
        self
    }

    /// Sets [`CompileOptions::fullgraph`].
    pub fn with_fullgraph(mut self, fullgraph: bool) -> Self {
        self.fullgraph = fullgraph;
        self
    }

    /// Sets [`CompileOptions::strict`].
    pub fn with_strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets [`CompileOptions::frozen`].
    pub fn with_frozen(mut self, frozen: bool) -> Self {
        self.frozen = frozen;
        self
    }

    /// Sets [`CompileOptions::memory_budget`], in bytes.
    pub fn with_memory_budget(mut self, bytes: usize) -> Self {
        self.memory_budget = Some(bytes);
        self
    }

    /// Sets [`CompileOptions::recompile_limit`].
    pub fn with_recompile_limit(mut self, limit: usize) -> Self {
        self.recompile_limit = limit;
        self
    }

    /// Sets [`CompileOptions::dynamic`].
    pub fn with_dynamic(mut self, dynamic: Dynamic) -> Self {
        self.dynamic = dynamic;
        self
    }

    /// Sets [`CompileOptions::threads`].
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets [`CompileOptions::autocast`].
    pub fn with_autocast(mut self, dtype: DType) -> Self {
        self.autocast = Some(dtype);
        self
    }

    /// Sets [`CompileOptions::loss_scaling`].
    pub fn with_loss_scaling(mut self, scaling: LossScaling) -> Self {
        self.loss_scaling = Some(scaling);
        self
    }

    /// Sets [`CompileOptions::buckets`].
    pub fn with_buckets(mut self, buckets: Buckets) -> Self {
        self.buckets = Some(buckets);
        self
    }

    /// For a region that trains on all ranks of `world` together: its closure runs a backward pass and an
    /// optimizer, and in between averages the gradients over the ranks (`kiln::distributed::average`). What
    /// the closure calls a gradient only the closure knows, so it averages them itself, and the region checks
    /// that: where something that follows from a gradient leaves the region and was not averaged, the call is
    /// [`crate::Error::NotAveraged`], and nothing has run. Sums travel beside the backward pass as those of a
    /// `TrainStep`, and ranks compare their steps before the first call. A graph break is an error
    /// ([`CompileOptions::fullgraph`]): a part of a step cannot be checked. With one rank this changes
    /// nothing.
    ///
    /// A `TrainStep` has a method of this name, which does all of it, and ignores this.
    pub fn with_data_parallel(mut self, world: &World) -> Self {
        self.ranks = world.size();
        self.fullgraph |= self.ranks > 1;
        self
    }

    /// Sets [`CompileOptions::tf32`].
    pub fn with_tf32(mut self, tf32: bool) -> Self {
        self.tf32 = tf32;
        self
    }

    /// Compares the first runs of each compiled step with `backend` (a name of the ladder, such as
    /// `aot_eager`) on the same inputs. If results differ by more than `tolerance`, relative to the largest
    /// magnitude of a tensor, `run` fails with an error that names the first kernel, operation and Burn
    /// call whose results differ. A tensor that is nothing but rounding (the gradient of a bias before batch
    /// norm, and the bias, where an optimizer divides by the gradient's size) may differ as far as rounding
    /// explains. A training step that fails so keeps the model and the optimizer that it was called with.
    ///
    /// Under [`CompileOptions::autocast`] the step is compared with one of `f32`, and the tolerance is at least
    /// `2^-4` for `bf16` and `2^-7` for `f16`. A tensor that is stored in 16 bits may differ by one unit in its
    /// last place, whatever the tolerance.
    ///
    /// ```
    /// use kiln_burn::CompileOptions;
    ///
    /// let options = CompileOptions::default().check_against("aot_eager", 1e-4)?;
    /// assert_eq!(options.check.unwrap().tolerance, 1e-4);
    /// # Ok::<(), kiln_burn::UnknownBackend>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no backend of that name.
    pub fn check_against(mut self, backend: &str, tolerance: f64) -> Result<Self, UnknownBackend> {
        self.check = Some(NumericsCheck {
            backend: backend.parse()?,
            tolerance,
            steps: CHECKED_STEPS,
        });
        Ok(self)
    }

    /// Sets how many runs of each compiled step [`CompileOptions::check_against`] compares. Default: 3.
    pub fn with_check_steps(mut self, steps: u64) -> Self {
        if let Some(check) = &mut self.check {
            check.steps = steps;
        }
        self
    }

    /// Sets [`CompileOptions::debug`].
    pub fn with_debug(mut self, folder: impl Into<PathBuf>) -> Self {
        self.debug = Some(folder.into());
        self
    }

    /// Sets [`CompileOptions::name`].
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}
