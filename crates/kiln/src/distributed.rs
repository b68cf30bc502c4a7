//! Training on several ranks: processes that work on one step together, each on its share of the data.
//!
//! A program that `mpirun`, `srun` or `torchrun` starts several times asks who it is, and gives the answer to its training step:
//!
//! ```no_run
//! # use burn_autodiff::Autodiff;
//! # use burn_nn::{Linear, LinearConfig};
//! # use burn_optim::AdamWConfig;
//! # use burn_tensor::{Distribution, Tensor};
//! # use kiln::{Kiln, TrainStep};
//! # type B = Autodiff<Kiln>;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let world = kiln::distributed::init()?;
//! let device = kiln::distributed::device(&world);
//! let model: Linear<B> = LinearConfig::new(8, 1).init(&device);
//! let loss = |model: &Linear<B>, x: Tensor<B, 2>| model.forward(x).powf_scalar(2.0).mean();
//! let mut train = TrainStep::new(model, AdamWConfig::new().init(), loss).with_data_parallel(&world).build()?;
//! for _ in 0..100 {
//!     // Another batch on each rank.
//!     let loss = train.step(1e-3, Tensor::random([32, 8], Distribution::Default, &device))?;
//!     if world.is_first() {
//!         println!("{}", loss.into_scalar());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Each rank begins with the parameters of rank 0. Gradients are averaged over all ranks before the optimizer, or its
//! clipping, sees them, and so is the loss that a step returns: `n` ranks with batches of `b` compute what one rank
//! computes with a batch of `n * b`, up to rounding, if the loss is a mean over the batch. The sums travel while the
//! backward pass goes on ([`kiln_compiler::buckets`]). Batch norm looks at each rank's own batch. Random operations
//! draw other numbers on each rank, and the same ones in each run.
//!
//! A region of [`crate::compile`] trains on several ranks, too, if its closure averages the gradients
//! ([`average`]).
//!
//! Both compute with the threads of [`World::threads`], a rank's share of the CPUs that it may use, unless
//! [`CompileOptions::threads`] says another number.
//!
//! Batches may have another shape on each rank, and at each step. Gradients and loss are the means of the ranks' own,
//! each rank counted once. Every rank must run the same program, with steps in the same order. Where a rank has died, hangs, or runs another step, the
//! others' step is an error that names it.

use burn_core::module::AutodiffModule;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, SimpleOptimizer};
use burn_tensor::{Tensor, TensorPrimitive};
use kiln_burn::random::{self, Stream};
use kiln_burn::{CompileOptions, Kiln, KilnDevice, ranks};
pub use kiln_distributed::{Error, Launcher, Link, Options, UnknownLink, World, imagine};

use crate::train::{self, TrainBackend, TrainError};

/// [`init_with`] the default options.
///
/// # Errors
///
/// Those of [`init_with`].
pub fn init() -> Result<World, Error> {
    init_with(Options::default())
}

/// Connects the ranks that the environment speaks of; a process that nobody started as one of several is one rank.
/// Ranks that `mpirun` or `srun` started are connected by MPI. Those that `torchrun` started are connected through
/// NCCL, each on its [`device`].
///
/// # Errors
///
/// Those of [`kiln_distributed::init_with`]; under `torchrun`, [`Error::NoGpu`] if there is no GPU or no NCCL, and
/// [`Error::Nccl`].
pub fn init_with(options: Options) -> Result<World, Error> {
    let world = kiln_distributed::init_with(options)?;
    ranks::carry(&world)?;
    Ok(world)
}

/// The device of a rank: the GPU of its number on its machine, the CPU where there is none. A program that trains on
/// CPUs where there are GPUs takes [`KilnDevice::cpu`].
pub fn device(world: &World) -> KilnDevice {
    ranks::device(world)
}

/// `options` of a step on all ranks of `world`: with this rank's share of the CPUs, unless they say how many
/// threads.
pub(crate) fn with_own_threads(options: CompileOptions, world: &World) -> CompileOptions {
    match (options.threads, world.size()) {
        (0, 2..) => options.with_threads(world.threads()),
        _ => options,
    }
}

/// Gives all ranks the random generator of rank 0, and each rank numbers of its own from it: those of a seed that
/// follows from rank 0's and the rank. Rank 0 keeps its own. To be called on every rank, after the generator was
/// seeded or restored; [`crate::TrainStep`] does so once, when it is made.
///
/// # Errors
///
/// If the ranks are not connected any more.
pub fn share_random(world: &World) -> Result<(), Error> {
    if world.size() == 1 {
        return Ok(());
    }
    // A generator that nobody seeded seeds itself when it is first used.
    let own = random::state().unwrap_or_else(random::take);
    let mut bytes = [own.seed.to_le_bytes(), own.stream.to_le_bytes()].concat();
    world.broadcast_patiently(0, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<8>();
    let [seed, stream] = [words[0], words[1]].map(u64::from_le_bytes);
    random::restore(Stream {
        seed: seed_of(seed, world.rank() as u64),
        stream,
    });
    Ok(())
}

/// `model` with the parameters and statistics of rank 0; from now on each rank draws random numbers of its
/// own ([`share_random`]). This is how a [`crate::TrainStep`] begins; a program that compiles a region
/// instead calls it on every rank.
///
/// # Errors
///
/// [`TrainError::Ranks`] if the ranks have different models, or one of them has gone.
pub fn share_model<B: TrainBackend, M: AutodiffModule<B>>(model: M, world: &World) -> Result<M, TrainError> {
    train::ranks::begin(model, world)
}

/// `optim` with the state of rank 0, of parameters of `model`: where a region goes on with a checkpoint.
///
/// # Errors
///
/// [`TrainError::Ranks`] if a rank has gone, or the state of rank 0 cannot be recorded or read.
pub fn share_optimizer<B, M, O>(
    model: &M,
    optim: OptimizerAdaptor<O, M, B>,
    world: &World,
) -> Result<OptimizerAdaptor<O, M, B>, TrainError>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    match world.size() {
        1 => Ok(optim),
        _ => train::ranks::share_state(model, optim, world),
    }
}

/// The means of `gradients`, those of parameters of `model`, over all ranks; between the backward pass and
/// the optimizer of a compiled region. Every rank calls it, for models of one structure.
///
/// ```no_run
/// # use burn_autodiff::Autodiff;
/// # use burn_nn::{Linear, LinearConfig};
/// # use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
/// # use burn_tensor::{Distribution, Tensor};
/// # use kiln::{CompileOptions, Kiln, distributed};
/// # type B = Autodiff<Kiln>;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let world = distributed::init()?;
/// let device = distributed::device(&world);
/// let model: Linear<B> = LinearConfig::new(8, 1).init(&device);
/// let mut model = distributed::share_model(model, &world)?;
/// let mut optim = AdamWConfig::new().init();
/// let mut region = kiln::compile(CompileOptions::default().with_data_parallel(&world));
/// for _ in 0..100 {
///     // Another batch on each rank.
///     let x = Tensor::<B, 2>::random([32, 8], Distribution::Default, &device);
///     let loss;
///     (model, loss) = region.run(|| {
///         let loss = model.forward(x).powf_scalar(2.0).mean();
///         let gradients = GradientsParams::from_grads(loss.backward(), &model);
///         let gradients = distributed::average(&model, gradients);
///         (optim.step(1e-3, model, gradients), distributed::mean(loss.inner()))
///     })?;
///     if world.is_first() {
///         println!("{}", loss.into_scalar());
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub fn average<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    gradients: GradientsParams,
) -> GradientsParams {
    train::ranks::average(model, gradients)
}

/// The mean of `tensor` over all ranks, such as that of a loss; the same on each of them. Every rank calls
/// it, with tensors of one shape. With one rank it is the tensor itself.
pub fn mean<const D: usize>(tensor: Tensor<Kiln, D>) -> Tensor<Kiln, D> {
    let mean = ranks::mean(tensor.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(mean))
}

/// The seed of a rank: rank 0's own, and for others a number that shows no relation to it. (The finalizer of
/// SplitMix64: G. Steele and others, *Fast splittable pseudorandom number generators*, 2014.)
fn seed_of(seed: u64, rank: u64) -> u64 {
    if rank == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(rank.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use kiln_burn::CompileOptions;

    use super::{imagine, seed_of, with_own_threads};

    #[test]
    fn a_step_of_several_ranks_has_their_share_of_the_cpus() {
        // A process has one world.
        let world = imagine(2).expect("the process is alone");
        let threads = |threads| {
            let options = CompileOptions::default().with_threads(threads);
            with_own_threads(options, &world).threads
        };
        assert!(threads(0) == world.threads() && threads(0) > 0);
        assert_eq!(threads(3), 3, "asked for");
    }

    #[test]
    fn ranks_have_seeds_of_their_own() {
        assert_eq!(seed_of(7, 0), 7);
        let mut seeds: Vec<u64> = (0..100).map(|rank| seed_of(7, rank)).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 100);
        assert_ne!(seed_of(7, 1), seed_of(8, 1));
    }
}
