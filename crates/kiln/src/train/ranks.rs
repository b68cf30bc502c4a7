//! A training step on several ranks: what it begins with, and where its ranks meet.
//!
//! Each gradient is averaged over the ranks where the backward pass hands it to the optimizer, by an operation of the
//! recording ([`kiln_burn::ranks::mean`]). So clipping sees averaged gradients, several backward passes of one step
//! communicate once, and parameters without a gradient not at all.

use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{GradientsParams, Optimizer, SimpleOptimizer};
use burn_tensor::{Bool, Int, Tensor, TensorData, TensorPrimitive};
use hashbrown::{HashMap, HashSet};
use kiln_burn::{Kiln, ranks};
use kiln_distributed::World;

use super::{StepOutput, TrainBackend, TrainError, places};
use crate::distributed;
use crate::input::KilnTensor;
use crate::tracked;

/// `model` with the parameters and statistics of rank 0; all ranks draw random numbers of their own from now on.
///
/// # Errors
///
/// If the ranks have different models, or one of them has gone.
pub(crate) fn begin<B: TrainBackend, M: AutodiffModule<B>>(model: M, world: &World) -> Result<M, TrainError> {
    if world.size() == 1 {
        return Ok(model);
    }
    let mut shapes = Shapes::default();
    model.visit(&mut shapes);
    world.agree(&[("the parameters of its model", shapes.0.join(", "))])?;
    distributed::share_random(world)?;
    let mut share = Share { world, failed: None };
    let model = model.map(&mut share);
    match share.failed {
        Some(error) => Err(error.into()),
        None => Ok(model),
    }
}

/// `optim` with the state of rank 0. Ids of parameters differ from process to process: their places in `model`
/// name them.
///
/// # Errors
///
/// If a rank has gone, or the state of rank 0 cannot be recorded or read.
pub(crate) fn share_state<B, M, O>(
    model: &M,
    optim: OptimizerAdaptor<O, M, B>,
    world: &World,
) -> Result<OptimizerAdaptor<O, M, B>, TrainError>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let broken = |error: &dyn std::fmt::Display| {
        distributed::Error::Broken(format!("the optimizer's state cannot be shared: {error}"))
    };
    let places = places::order::<B, M>(model);
    let mut bytes = Vec::new();
    let records = optim.to_record();
    if world.is_first() && !records.is_empty() {
        let named = records.into_iter().filter_map(|(id, state)| {
            let place = *places.get(&id)? as u64;
            Some((ParamId::from(place), state))
        });
        let named: HashMap<ParamId, AdaptorRecord<O, B>> = named.collect();
        bytes = Recorder::<B>::record(&recorder, named, ()).map_err(|error| broken(&error))?;
    }
    let mut length = (bytes.len() as u64).to_le_bytes();
    world.broadcast_patiently(0, &mut length)?;
    bytes.resize(u64::from_le_bytes(length) as usize, 0);
    world.broadcast(0, &mut bytes)?;
    if world.is_first() {
        return Ok(optim);
    }
    let device = model.devices().first().copied().unwrap_or_default();
    let mut records = HashMap::new();
    if !bytes.is_empty() {
        let named: HashMap<ParamId, AdaptorRecord<O, B>> =
            Recorder::<B>::load(&recorder, bytes, &device).map_err(|error| broken(&error))?;
        let ids: HashMap<u64, ParamId> = places.iter().map(|(id, place)| (*place as u64, *id)).collect();
        let own = named
            .into_iter()
            .filter_map(|(place, state)| Some((*ids.get(&place.val())?, state)));
        records = own.collect();
    }
    Ok(optim.load_record(records))
}

/// The shape of each parameter.
#[derive(Default)]
struct Shapes(Vec<String>);

impl<B: TrainBackend> ModuleVisitor<B> for Shapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(format!("{:?}", param.val().dims()));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.0.push(format!("int {:?}", param.val().dims()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.0.push(format!("bool {:?}", param.val().dims()));
    }
}

/// Exchanges each tensor for rank 0's.
struct Share<'a> {
    world: &'a World,
    failed: Option<distributed::Error>,
}

impl Share<'_> {
    fn of_first(&mut self, mut data: TensorData) -> TensorData {
        if self.failed.is_none() {
            self.failed = self.world.broadcast(0, &mut data.bytes).err();
        }
        data
    }
}

impl<B: TrainBackend> ModuleMapper<B> for Share<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let (device, dtype, tracked) = (tensor.device(), tensor.dtype(), tensor.is_require_grad());
        let shared = Tensor::from_data(self.of_first(tensor.into_data()), (&device, dtype));
        Param::from_mapped_value(id, shared.set_require_grad(tracked), mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        let shared = Tensor::from_data(self.of_first(tensor.into_data()), (&device, dtype));
        Param::from_mapped_value(id, shared, mapper)
    }
}

/// The means of `gradients` over all ranks.
pub(crate) fn average<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    gradients: GradientsParams,
) -> GradientsParams {
    let mut average = Average {
        gradients,
        seen: HashSet::new(),
    };
    model.visit(&mut average);
    average.gradients
}

/// In the order in which modules show their parameters, which is the same on all ranks.
struct Average {
    gradients: GradientsParams,
    /// A parameter that a model has twice has one gradient.
    seen: HashSet<ParamId>,
}

impl Average {
    fn one<const D: usize>(&mut self, id: ParamId) {
        if !self.seen.insert(id) {
            return;
        }
        if let Some(gradient) = self.gradients.remove::<Kiln, D>(id) {
            let parameter = self.seen.len() - 1;
            let mean = ranks::mean_gradient(gradient.into_primitive().tensor(), parameter);
            let mean = Tensor::<Kiln, D>::from_primitive(TensorPrimitive::Float(mean));
            self.gradients.register::<Kiln, D>(id, mean);
        }
    }
}

impl<B: TrainBackend> ModuleVisitor<B> for Average {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.one::<D>(param.id);
    }
}

/// `output` with the mean of the loss over all ranks in place of the loss. What else leaves the step is each rank's
/// own.
pub(super) fn average_loss<B: TrainBackend, L: StepOutput<B>>(output: L) -> L {
    let loss = B::to_kiln(output.loss().into_primitive().tensor());
    let id = tracked::id(&loss);
    let mut mean = None;
    output.map(&mut |tensor: KilnTensor| match tracked::id(&tensor) == id {
        true => mean.get_or_insert_with(|| ranks::mean(loss.clone())).clone(),
        false => tensor,
    })
}
