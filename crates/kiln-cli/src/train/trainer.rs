//! The compiled training step with its optimizer's type forgotten.
//!
//! [`kiln::TrainStep`] is generic over the optimizer; a config names one. The loop works on `dyn`
//! [`Trainer`], of which there is one implementation for each optimizer.

use std::path::Path;

use burn::module::ParamId;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::grad_clipping::GradientClipping;
use burn_optim::{Optimizer, SimpleOptimizer};
use hashbrown::HashMap;
use kiln::distributed::World;
use kiln::{
    CompileOptions, Explain, History, Kiln, KilnDevice, LossScale, RegionReport, TrainError, TrainStep,
    Weights,
};

use crate::config::{OptimizerConfig, OptimizerName};
use crate::error::CliError;
use crate::model::{Batch, Model};

/// The backend that models are trained on.
pub type TrainBackend = Autodiff<Kiln>;

/// A model in training.
pub trait Trainer {
    /// One optimizer step with rate `rate` on the mean loss of `batches`; returns that loss, which a GPU may
    /// still be computing.
    ///
    /// # Errors
    ///
    /// [`CliError::Train`] if the step cannot be compiled or run.
    fn step(&mut self, rate: f64, batches: Vec<Batch<TrainBackend>>) -> Result<Loss, CliError>;

    /// The model as it is now.
    ///
    /// # Errors
    ///
    /// [`CliError::Train`] if an earlier step failed and took the model with it.
    fn model(&self) -> Result<&Model<TrainBackend>, CliError>;

    /// The model as a checkpoint stores it; to be called on all ranks where they divide a master copy of its
    /// parameters.
    ///
    /// # Errors
    ///
    /// [`CliError::Train`] as [`Trainer::model`], and if another rank ended.
    fn whole_model(&mut self) -> Result<Model<TrainBackend>, CliError>;

    /// The optimizer's state in Burn's recorder format. Parameters are named by their place in the model,
    /// `order`, because their ids differ from process to process.
    ///
    /// # Errors
    ///
    /// [`CliError::Train`] as [`Trainer::model`]; [`CliError::Usage`] if the recorder fails.
    fn optimizer_state(&mut self, order: &[ParamId]) -> Result<Vec<u8>, CliError>;

    /// Gives this rank's share of the optimizer's state and of the model to rank 0, which calls
    /// [`Trainer::optimizer_state`] and [`Trainer::whole_model`]; to be called on all other ranks where they
    /// divide the state.
    ///
    /// # Errors
    ///
    /// [`CliError::Train`] as [`Trainer::model`], and if another rank ended.
    fn give_state(&mut self) -> Result<(), CliError>;

    /// Where loss scaling stands; none if the loss is not scaled. Waits for the step.
    fn loss_scale(&self) -> Option<LossScale>;

    /// Writes the step, as it is now, as a folder that trains without Kiln.
    ///
    /// # Errors
    ///
    /// [`CliError::Export`] if it cannot be exported.
    fn export(&mut self, folder: &Path) -> Result<(), CliError>;

    /// The report on what was compiled, in numbers.
    fn report(&self) -> RegionReport;

    /// The report on what was compiled, for people.
    fn explain(&self) -> Explain;

    /// How often the step was recorded and replayed, and why.
    fn history(&self) -> &History;
}

/// The loss of a step.
pub struct Loss(Tensor<TrainBackend, 1>);

impl Loss {
    /// Its value. Waits for the step that computes it, and for none behind it.
    ///
    /// # Errors
    ///
    /// [`CliError::Usage`] if the step failed.
    pub fn read(self) -> Result<f32, CliError> {
        let data = self
            .0
            .try_into_data()
            .map_err(|error| CliError::Usage(format!("the loss cannot be read: {error}")))?;
        Ok(data.iter::<f32>().next().unwrap_or(f32::NAN))
    }
}

type MeanLoss = fn(&Model<TrainBackend>, Vec<Batch<TrainBackend>>) -> Tensor<TrainBackend, 1>;
type Input = Vec<Batch<TrainBackend>>;
type Output = Tensor<TrainBackend, 1>;

/// The mean over the batches of one optimizer step: its gradient is the mean of their gradients, as
/// accumulation wants it.
fn mean_loss(model: &Model<TrainBackend>, batches: Input) -> Output {
    let count = batches.len();
    let sum = batches
        .into_iter()
        .map(|batch| model.loss(batch))
        .reduce(|sum, loss| sum + loss);
    let sum = sum.expect("a step has at least one batch: the config was checked");
    if count == 1 {
        sum
    } else {
        sum.div_scalar(count as f64)
    }
}

struct Compiled<O: SimpleOptimizer<Kiln>> {
    step: TrainStep<TrainBackend, Model<TrainBackend>, O, MeanLoss, Input, Output>,
}

impl<O: SimpleOptimizer<Kiln>> Trainer for Compiled<O> {
    fn step(&mut self, rate: f64, batches: Input) -> Result<Loss, CliError> {
        Ok(Loss(self.step.step(rate, batches)?))
    }

    fn model(&self) -> Result<&Model<TrainBackend>, CliError> {
        Ok(self.step.model().ok_or(TrainError::Lost)?)
    }

    fn whole_model(&mut self) -> Result<Model<TrainBackend>, CliError> {
        Ok(self.step.whole_model()?)
    }

    fn optimizer_state(&mut self, order: &[ParamId]) -> Result<Vec<u8>, CliError> {
        let record = self.step.whole_optimizer()?.to_record();
        let places: HashMap<ParamId, u64> = order.iter().copied().zip(0..).collect();
        let named: HashMap<ParamId, _> = record
            .into_iter()
            .filter_map(|(id, state)| Some((ParamId::from(*places.get(&id)?), state)))
            .collect();
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let bytes = Recorder::<TrainBackend>::record(&recorder, named, ());
        bytes.map_err(|error| CliError::Usage(format!("the optimizer's state cannot be recorded: {error}")))
    }

    fn give_state(&mut self) -> Result<(), CliError> {
        self.step.whole_optimizer()?;
        self.step.whole_model()?;
        Ok(())
    }

    fn loss_scale(&self) -> Option<LossScale> {
        self.step.loss_scale()
    }

    fn export(&mut self, folder: &Path) -> Result<(), CliError> {
        Ok(self.step.export(folder)?)
    }

    fn report(&self) -> RegionReport {
        self.step.report()
    }

    fn explain(&self) -> Explain {
        self.step.explain()
    }

    fn history(&self) -> &History {
        self.step.history()
    }
}

/// The optimizer's state from a checkpoint, and the parameters it belongs to.
pub struct SavedState<'a> {
    /// What [`Trainer::optimizer_state`] returned.
    pub bytes: Vec<u8>,
    /// Ids of the model's parameters in order.
    pub order: &'a [ParamId],
    /// What [`Trainer::loss_scale`] returned.
    pub loss_scale: Option<LossScale>,
}

/// How the training step of a config is made, beside model and optimizer.
#[derive(Default)]
pub struct Setting<'a> {
    /// How it is compiled.
    pub options: CompileOptions,
    /// How it stores parameters, if in 16 bits.
    pub weights: Option<Weights>,
    /// Where it goes on.
    pub state: Option<SavedState<'a>>,
    /// The ranks that run it together, if there are any.
    pub together: Option<Together<'a>>,
}

/// The ranks that run a step together.
#[derive(Clone, Copy)]
pub struct Together<'a> {
    /// All of them.
    pub world: &'a World,
    /// Whether they divide the optimizer's state.
    pub sharded: bool,
    /// Whether batch norm looks at the examples of all of them.
    pub synchronised: bool,
}

impl<'a> Together<'a> {
    /// Each of the ranks of `world` with all of the state and batch norms of its own.
    pub fn plain(world: &'a World) -> Self {
        Self {
            world,
            sharded: false,
            synchronised: false,
        }
    }
}

/// Makes the training step of a config.
///
/// # Errors
///
/// [`CliError::Usage`] with the recorder's words if the saved state is not that of this optimizer and model.
pub fn build(
    model: Model<TrainBackend>,
    config: &OptimizerConfig,
    setting: Setting<'_>,
) -> Result<Box<dyn Trainer>, CliError> {
    let clipping = config.clipping();
    match config.name {
        OptimizerName::AdamW => build_with(model, config.adamw().build(), clipping, setting),
        OptimizerName::Adam => build_with(model, config.adam().build(), clipping, setting),
        OptimizerName::Sgd => build_with(model, config.sgd().build::<Kiln>(), clipping, setting),
        OptimizerName::RmsProp => build_with(model, config.rms_prop().build(), clipping, setting),
        OptimizerName::AdaGrad => build_with(model, config.ada_grad().build(), clipping, setting),
    }
}

fn build_with<O: SimpleOptimizer<Kiln> + 'static>(
    model: Model<TrainBackend>,
    optimizer: O,
    clipping: Option<GradientClipping>,
    setting: Setting<'_>,
) -> Result<Box<dyn Trainer>, CliError> {
    let mut adaptor: OptimizerAdaptor<O, Model<TrainBackend>, TrainBackend> =
        OptimizerAdaptor::from(optimizer);
    if let Some(clipping) = clipping {
        adaptor = adaptor.with_grad_clipping(clipping);
    }
    let mut scale = None;
    if let Some(SavedState {
        bytes,
        order,
        loss_scale,
    }) = setting.state
    {
        scale = loss_scale;
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let named: HashMap<ParamId, _> = Recorder::<TrainBackend>::load(&recorder, bytes, &KilnDevice::cpu())
            .map_err(|error| {
                CliError::Usage(format!(
                    "the optimizer's state cannot be read. Most often it is another optimizer's: leave \
                     optimizer.name as it was, or start another run with model.weights = CHECKPOINT ({error})"
                ))
            })?;
        let mut record = HashMap::with_capacity(named.len());
        for (place, state) in named {
            let id = usize::try_from(place.val())
                .ok()
                .and_then(|place| order.get(place));
            let id = id.ok_or_else(|| {
                CliError::Usage("the optimizer's state is that of another model".to_owned())
            })?;
            record.insert(*id, state);
        }
        adaptor = adaptor.load_record(record);
    }
    let mut step = TrainStep::new(model, adaptor, mean_loss as MeanLoss).with_options(setting.options);
    if let Some(weights) = setting.weights {
        step = step.with_weights(weights);
    }
    if let Some(scale) = scale {
        step = step.with_loss_scale(scale);
    }
    if let Some(together) = setting.together {
        step = step.with_data_parallel(together.world);
        if together.sharded {
            step = step.with_sharded_state();
        }
        if together.synchronised {
            step = step.with_synchronised_batch_norm();
        }
    }
    let step = step.build::<Input, Output>()?;
    Ok(Box::new(Compiled { step }))
}
