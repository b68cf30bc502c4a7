//! How a training step is made: what is trained with what, on how many ranks, in which types.

use std::sync::atomic::AtomicBool;

use burn_core::module::AutodiffModule;
use burn_optim::SimpleOptimizer;
use burn_optim::adaptor::OptimizerAdaptor;
use kiln_burn::{CompileBackend, CompileOptions, CompiledRegion, Dynamic, Kiln};
use kiln_distributed::World;

use super::loss_scale::{self, LossScale};
use super::masters::Masters;
use super::places::Cells;
use super::shards::{self, Shards};
use super::variants::Variants;
use super::weights::{Weights, cast_parameters};
use super::{History, Start, StepOptimizer, StepOutput, TrainBackend, TrainError, TrainStep, ranks, zeros};
use crate::distributed;
use crate::input::StepInput;

/// Builds a [`TrainStep`]: made by [`TrainStep::new`].
pub struct TrainStepBuilder<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, F> {
    model: Box<M>,
    optim: OptimizerAdaptor<O, M, B>,
    loss: F,
    start: Start<B, M, O>,
    options: CompileOptions,
    /// Where loss scaling begins, if the program says so.
    start_scale: Option<LossScale>,
    weights: Option<Weights>,
    keeps_copies: bool,
    world: Option<World>,
    sharded: bool,
    synchronised: bool,
}

/// Least and greatest number of signatures that are kept; between them it is that of executables
/// ([`CompileOptions::recompile_limit`]). Where shapes share executables the least is a quarter of the
/// greatest.
const VARIANTS: (usize, usize) = (8, 256);

/// What a training step is called in reports, dumps and traces.
const NAME: &str = "train_step";

impl<B: TrainBackend, M: AutodiffModule<B> + Clone, O: SimpleOptimizer<Kiln>, F>
    TrainStepBuilder<B, M, O, F>
{
    /// Sets how the step is compiled. If the options give it no name of its own, it stays `train_step`.
    pub fn with_options(mut self, options: CompileOptions) -> Self {
        let named = options.name != CompileOptions::default().name;
        self.options = if named { options } else { options.with_name(NAME) };
        self
    }

    /// Sets the backend of the compiled step.
    pub fn with_backend(mut self, backend: CompileBackend) -> Self {
        self.options.backend = backend;
        self
    }

    /// Sets where the scaling of the loss goes on: [`TrainStep::loss_scale`] of the run that is resumed. A
    /// step that does not scale its loss ([`CompileOptions::loss_scaling`]) ignores it.
    pub fn with_loss_scale(mut self, scale: LossScale) -> Self {
        self.start_scale = Some(scale);
        self
    }

    /// Stores the parameters of the model in 16 bits. The model is cast when the step is made, so parameters
    /// that Burn draws when they are first used are drawn then.
    pub fn with_weights(mut self, weights: Weights) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Whether a step under autocast ([`CompileOptions::autocast`]) keeps a copy of 16 bits of each parameter
    /// that a product may read, one of two dimensions and more: the update writes it, and the next step reads
    /// it instead of casting the parameter. It does by default. No number depends on that. The copies take
    /// two bytes an element between steps; without them a step makes them at its start, and has them until
    /// its end.
    ///
    /// Parameters that Burn draws when they are first used have copies from the second call on, which is
    /// compiled once more for that; [`TrainStep::freeze`] before that call leaves the step without. There are
    /// none where the parameters themselves have 16 bits ([`Self::with_weights`]), where ranks divide the
    /// update ([`Self::with_sharded_state`]), where a graph break cuts the step, and where two parameters of
    /// the model are one tensor.
    pub fn with_kept_copies(mut self, keeps: bool) -> Self {
        self.keeps_copies = keeps;
        self
    }

    /// Trains on all ranks of `world` together ([`crate::distributed`]): parameters and the optimizer's state
    /// are those of rank 0 at the start, gradients and loss are averaged over the ranks at each step. All
    /// ranks must have equal optimizers, and give each step the same learning rate: otherwise they would go
    /// different ways, and get an error (for the rate on CPUs alone). Options that name no number of threads
    /// mean this rank's share of the CPUs ([`World::threads`]). With one rank this changes nothing.
    pub fn with_data_parallel(mut self, world: &World) -> Self {
        self.world = Some(world.clone());
        self
    }

    /// Divides the optimizer's state among the ranks of [`Self::with_data_parallel`]: each rank gets its
    /// share of the averaged gradients, updates its share of each parameter, and keeps its share of the
    /// state; then the parameters are gathered. Losses are those without it, up to rounding; memory of the
    /// state is divided by the number of ranks. State that was loaded is whole, and so is what
    /// [`TrainStep::optimizer`] and [`TrainStep::into_parts`] return: any number of ranks can go on with it.
    /// Both must be called on every rank.
    ///
    /// A master copy ([`Weights::with_master`]) is state as well. Its share is updated, and what is gathered
    /// are the parameters of 16 bits. [`TrainStep::model`] shows these, without any other rank; a checkpoint
    /// takes those of `f32` from [`TrainStep::whole_model`], on every rank.
    ///
    /// The optimizer's update must compute each element from those at the same place, as those of Adam,
    /// AdamW, SGD, RMSprop and AdaGrad do; clipping is no part of it. Muon multiplies matrices:
    /// [`TrainError::Sharding`]. With one rank this changes nothing.
    pub fn with_sharded_state(mut self) -> Self {
        self.sharded = true;
        self
    }

    /// Takes the statistics of batch norm over the examples of all ranks of [`Self::with_data_parallel`], so
    /// that `n` ranks with batches of `b` train as one rank with a batch of `n * b`; by default each rank
    /// looks at its own batch. The batches of all ranks must be equally large. Batch norm is recognised by
    /// its operations, those of burn-nn and of kiln-models; a step in which that fails is
    /// [`TrainError::BatchNorm`]. With one rank this changes nothing.
    pub fn with_synchronised_batch_norm(mut self) -> Self {
        self.synchronised = true;
        self
    }

    /// Makes the step. Nothing is compiled before the first call.
    ///
    /// # Errors
    ///
    /// [`TrainError::Ranks`] if other ranks have another model or another optimizer, or do not answer;
    /// [`TrainError::Sharding`] if the optimizer's state cannot be divided; [`TrainError::LossScaling`] if a
    /// number of [`CompileOptions::loss_scaling`] makes no sense.
    pub fn build<I, L>(mut self) -> Result<TrainStep<B, M, O, F, I, L>, TrainError>
    where
        F: Fn(&M, I) -> L,
        I: StepInput,
        L: StepOutput<B>,
    {
        crate::log::init_if_asked();
        let scaling = loss_scale::scaling(&self.options)?;
        self.options.loss_scaling = scaling;
        let least = match self.options.dynamic {
            Dynamic::Auto | Dynamic::Marked => VARIANTS.1 / 4,
            Dynamic::Off => VARIANTS.0,
        };
        let capacity = self.options.recompile_limit.clamp(least, VARIANTS.1);
        let model = match &self.world {
            Some(world) => ranks::begin::<B, M>(*self.model, world)?,
            None => *self.model,
        };
        let model = match self.weights {
            Some(weights) if weights.has_master() => cast_parameters::<B, M>(model, burn_tensor::DType::F32),
            Some(weights) => cast_parameters::<B, M>(model, weights.dtype()),
            None => model,
        };
        let world = self.world.filter(|world| world.size() > 1);
        if let Some(world) = &world {
            self.options = distributed::with_own_threads(self.options, world);
        }
        let optim = match &world {
            Some(world) => {
                shards::agree_on_numbers::<B, M, O>(&model, &self.optim, world)?;
                ranks::share_state(&model, self.optim, world)?
            }
            None => self.optim,
        };
        let (shards, optim) = match world.as_ref().filter(|_| self.sharded) {
            Some(world) => {
                let (shards, optim) = Shards::new(world, &model, optim)?;
                (Some(shards), optim)
            }
            None => (None, optim),
        };
        let master = self.weights.filter(|weights| weights.has_master());
        let (model, masters) = match (&shards, &world, master) {
            (Some(_), Some(world), Some(weights)) => {
                let cells = Cells::of::<B, M>(&model);
                let masters = Masters::of::<B, M>(world, &model, &cells)?;
                (cast_parameters::<B, M>(model, weights.dtype()), Some(masters))
            }
            _ => (model, None),
        };
        let has_whole_master = master.is_some() && masters.is_none();
        let widened = self.weights.is_some() && !has_whole_master;
        let rounded = self.options.autocast.filter(|_| {
            let compiles = self.options.backend.compiles();
            self.keeps_copies && compiles && self.weights.is_none() && shards.is_none()
        });
        let variants = Variants::new(capacity, widened, shards.clone());
        Ok(TrainStep {
            replays: self.options.backend != CompileBackend::Eager,
            strict: self.options.strict,
            region: CompiledRegion::new(self.options).for_replay(),
            trained: Some((Box::new(model), optim)),
            synchronised: self.synchronised && world.is_some(),
            world,
            shards,
            whole: None,
            loss: self.loss,
            start: self.start,
            scaling,
            start_scale: self
                .start_scale
                .unwrap_or_else(|| LossScale::start(&scaling.unwrap_or_default())),
            loss_scale: None,
            weights: self.weights,
            rounded,
            copies: None,
            keeps_copies: false,
            masters,
            variants,
            lent: AtomicBool::new(false),
            cells: None,
            seen_in_cells: Vec::new(),
            rate: None,
            warned: Vec::new(),
            history: History::default(),
            types: std::marker::PhantomData,
        })
    }
}

impl<B, M, O, F> TrainStep<B, M, O, F, (), ()>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
{
    /// Begins a training step of `model` with `optim` and the loss closure `loss`.
    #[allow(clippy::new_ret_no_self)] // `new` begins, `build` makes: the shape of Burn's own builders.
    pub fn new(
        model: M,
        optim: impl StepOptimizer<B, M, Simple = O>,
        loss: F,
    ) -> TrainStepBuilder<B, M, O, F> {
        let options = CompileOptions::default().with_name(NAME);
        TrainStepBuilder {
            model: Box::new(model),
            optim: optim.into_adaptor(),
            loss,
            start: zeros::start,
            options,
            start_scale: None,
            weights: None,
            keeps_copies: true,
            world: None,
            sharded: false,
            synchronised: false,
        }
    }
}
