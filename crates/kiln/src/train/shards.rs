//! A training step in which each rank updates its share of every parameter, and keeps its share of the optimizer's
//! state.
//!
//! On `N` ranks a parameter of `n` elements, in row-major order, has `N` shares of `ceil(n / N)` elements; zeros fill
//! the last one up. The optimizer sees a share as a parameter of its own, of shape `[ceil(n / N), 1, ..]` and the
//! parameter's rank, and so the state that it makes is that of the share:
//!
//! ```text
//!   gradient    ── mean over ranks, a share of it ──►  share of the gradient  ┐
//!   parameter   ── this rank's rows ────────────────►  share of the parameter ├─ optimizer ─► share of the parameter
//!                                       state (kept):  share of the state     ┘               share of the state
//!   parameter  ◄── shares of all ranks, joined ─────────────────────────────────────────────┘
//! ```
//!
//! That is right for an update that computes each element from those at the same place. [`Shards::new`] finds out,
//! by a rehearsal of the optimizer, and refuses any other one. Two things that look at a whole gradient are done
//! here, with a sum over ranks: clipping by norm ([`Shards::clip`]), and loss scaling's search for infinities.
//!
//! Filling elements stay finite wherever the update of a parameter, gradient and state of zeros is finite, and are
//! cut off when shares are joined.

use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::grad_clipping::GradientClipping;
use burn_optim::record::AdaptorRecord;
use burn_optim::{GradientsParams, Optimizer, SimpleOptimizer};
use burn_router::RunnerClient;
use burn_tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use hashbrown::{HashMap, HashSet};
use kiln_burn::record::{self, Recorded, exchange, rehearse};
use kiln_burn::{Error, Kiln, KilnDevice, ranks};
use kiln_distributed::World;

use super::places::{tensors_of, with_state};
use super::plan;
use super::rehearsal::rehearse_shadow;
use super::shadow::{Shadow, ShadowOptimizer, without_state};
use super::weights;
use super::{TrainBackend, TrainError};
use crate::input::KilnTensor;

/// How the ranks of a world divide parameters and the optimizer's state.
#[derive(Clone)]
pub(super) struct Shards {
    world: World,
    /// The optimizer's clipping, which is done here.
    clipping: Option<GradientClipping>,
}

/// The shape of each parameter that a step trains.
pub(super) type Shapes = HashMap<ParamId, Vec<usize>>;

/// Elements of a share.
const fn length(elements: usize, ranks: usize) -> usize {
    elements.div_ceil(ranks)
}

/// The shape of a share of `elements`, for a tensor of rank `D`.
fn shape<const D: usize>(elements: usize, ranks: usize) -> [usize; D] {
    let mut shape = [1; D];
    shape[0] = length(elements, ranks);
    shape
}

/// The elements of `tensor` in one row, filled up with zeros so that `ranks` divide them.
fn flat<const D: usize>(tensor: Tensor<Kiln, D>, ranks: usize) -> Tensor<Kiln, 1> {
    let elements = tensor.shape().num_elements();
    let flat = tensor.reshape([elements]);
    match length(elements, ranks) * ranks - elements {
        0 => flat,
        missing => {
            let zeros = Tensor::zeros([missing], (&flat.device(), flat.dtype()));
            Tensor::cat(vec![flat, zeros], 0)
        }
    }
}

/// `operation` on the elements of a tensor.
fn of_elements(tensor: Tensor<Kiln, 1>, operation: impl FnOnce(KilnTensor) -> KilnTensor) -> Tensor<Kiln, 1> {
    let tensor = operation(tensor.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}

impl Shards {
    /// Shards for `optim`, which gives up its clipping and its state: the state becomes this rank's share of it.
    ///
    /// # Errors
    ///
    /// [`TrainError::Sharding`] if the optimizer's update, or the state, does not divide.
    pub(super) fn new<B, M, O>(
        world: &World,
        model: &M,
        optim: OptimizerAdaptor<O, M, B>,
    ) -> Result<(Self, OptimizerAdaptor<O, M, B>), TrainError>
    where
        B: TrainBackend,
        M: AutodiffModule<B> + Clone,
        O: SimpleOptimizer<Kiln>,
    {
        let shards = Self {
            world: world.clone(),
            clipping: optim.grad_clipping().cloned(),
        };
        let plain = OptimizerAdaptor::from(optim.optim().clone());
        shards.check::<B, M, O>(model, &plain)?;
        let shapes = shapes::<B, M>(model);
        let records = optim.to_record().into_iter();
        let records = records.map(|(id, record)| {
            let shape = shapes.get(&id).ok_or_else(|| TrainError::Sharding {
                reason: "there is state of a parameter that the model does not have".into(),
            })?;
            let share = exchanged(record, |data| share_of(world, data, shape))?;
            Ok((id, share))
        });
        let records: HashMap<_, _> = records.collect::<Result<_, TrainError>>()?;
        Ok((shards, plain.load_record(records)))
    }

    /// Among how many ranks state is divided.
    pub(super) fn ranks(&self) -> usize {
        self.world.size()
    }

    /// Whether shares can be updated like whole parameters.
    fn check<B, M, O>(&self, model: &M, optim: &OptimizerAdaptor<O, M, B>) -> Result<(), TrainError>
    where
        B: TrainBackend,
        M: AutodiffModule<B> + Clone,
        O: SimpleOptimizer<Kiln>,
    {
        let refuse = |reason: String| Err(TrainError::Sharding { reason });
        let on = |ranks| two_updates::<B, M, O>(model, optim, ranks);
        let (Some(shares), Some(whole)) = (on(Some(self.world.size())), on(None)) else {
            return refuse("it reads tensors on the host".into());
        };
        for (shares, whole) in shares.iter().zip(&whole) {
            if let Err(reason) = ranks::check_elementwise(shares, whole) {
                return refuse(reason);
            }
        }
        Ok(())
    }

    /// This rank's shares of the means of `gradients` over all ranks, and the shapes of the whole ones.
    pub(super) fn reduce<B: TrainBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        gradients: GradientsParams,
    ) -> (GradientsParams, Shapes) {
        let mut reduce = Reduce {
            ranks: self.world.size(),
            gradients,
            shapes: Shapes::default(),
            seen: HashSet::new(),
        };
        model.visit(&mut reduce);
        (reduce.gradients, reduce.shapes)
    }

    /// Clips shares of gradients as the optimizer would clip whole ones.
    pub(super) fn clip<B: TrainBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        gradients: GradientsParams,
    ) -> GradientsParams {
        let Some(clipping) = &self.clipping else {
            return gradients;
        };
        let mut squares = Squares {
            gradients,
            sums: Vec::new(),
            seen: HashSet::new(),
        };
        if let GradientClipping::Norm(_) = clipping {
            model.visit(&mut squares);
        }
        let Squares { gradients, sums, .. } = squares;
        let sums = match sums.is_empty() {
            true => None,
            false => Some(of_elements(Tensor::cat(sums, 0), ranks::sum)),
        };
        let mut clip = Clip {
            clipping,
            gradients,
            sums,
            seen: HashSet::new(),
        };
        model.visit(&mut clip);
        clip.gradients
    }

    /// `model` with this rank's share in place of each parameter that has one of the `shapes`.
    pub(super) fn own<B: TrainBackend, M: AutodiffModule<B>>(&self, model: M, shapes: &Shapes) -> M {
        model.map(&mut Own {
            world: &self.world,
            shapes: shapes.clone(),
            rank: None,
        })
    }

    /// `model` with this rank's share in place of each of these parameters.
    pub(super) fn own_parameters<B: TrainBackend, M: AutodiffModule<B>>(
        &self,
        model: M,
        parameters: &[ParamId],
    ) -> M {
        let mut shapes = shapes::<B, M>(&model);
        shapes.retain(|parameter, _| parameters.contains(parameter));
        self.own(model, &shapes)
    }

    /// `model` with the whole parameters in place of this rank's shares: of this type, if they are stored in
    /// another one than they are updated in.
    pub(super) fn join<B: TrainBackend, M: AutodiffModule<B>>(
        &self,
        model: M,
        shapes: Shapes,
        stored: Option<DType>,
    ) -> M {
        model.map(&mut Join { shapes, stored })
    }

    /// `optim`, whose state is this rank's share, with the whole state and its clipping. Every rank takes part.
    ///
    /// # Errors
    ///
    /// [`TrainError::Ranks`] if the ranks are not connected any more.
    pub(super) fn whole<B, M, O>(
        &self,
        model: &M,
        optim: &OptimizerAdaptor<O, M, B>,
    ) -> Result<OptimizerAdaptor<O, M, B>, TrainError>
    where
        B: TrainBackend,
        M: AutodiffModule<B>,
        O: SimpleOptimizer<Kiln>,
    {
        let mut records = optim.to_record();
        let mut whole = HashMap::with_capacity(records.len());
        // In the order of the model, which is the same on all ranks.
        for (id, shape) in ordered_shapes::<B, M>(model) {
            if let Some(record) = records.remove(&id) {
                let joined = exchanged(record, |data| joined_of(&self.world, &data, &shape))?;
                whole.insert(id, joined);
            }
        }
        let optim = OptimizerAdaptor::from(optim.optim().clone()).load_record(whole);
        Ok(match &self.clipping {
            Some(clipping) => optim.with_grad_clipping(clipping.clone()),
            None => optim,
        })
    }
}

/// Two updates of all parameters, rehearsed: the first one makes the state. On shares for so many ranks, if
/// there are any; none if the optimizer reads tensors on the host.
fn two_updates<B, M, O>(
    model: &M,
    optim: &OptimizerAdaptor<O, M, B>,
    ranks: Option<usize>,
) -> Option<Vec<Recorded>>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
{
    let mut hollow = Hollow {
        ranks,
        tracked: Vec::new(),
    };
    let (shadow, _) = rehearse(|| {
        let model = model.clone().map(&mut hollow);
        Shadow::of::<M>(&model, &hollow.tracked, false)
    })?;
    let optim: ShadowOptimizer<B, O> = without_state(optim).load_record(optim.to_record());
    let mut shadow = Some((Box::new(shadow), optim));
    let mut step = || rehearse_shadow(&mut shadow, 1e-3);
    Some(vec![step()?.1, step()?.1])
}

/// Makes sure that the optimizers of all ranks are equal: that they compute the same with the same numbers.
/// Their state, which may be another one at the start, is left out.
///
/// # Errors
///
/// [`TrainError::Ranks`] if they are not.
pub(super) fn agree_on_numbers<B, M, O>(
    model: &M,
    optim: &OptimizerAdaptor<O, M, B>,
    world: &World,
) -> Result<(), TrainError>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
{
    let plain: OptimizerAdaptor<O, M, B> = without_state(optim);
    let updates = two_updates::<B, M, O>(model, &plain, None).unwrap_or_default();
    let operations: Vec<usize> = updates.iter().map(|update| update.operations.len()).collect();
    let mut numbers: Vec<String> = Vec::new();
    for scalar in updates.iter().flat_map(|update| &update.scalars) {
        // Each parameter has the same ones.
        let number = plan::number(scalar);
        if !numbers.contains(&number) {
            numbers.push(number);
        }
    }
    Ok(world.agree(&[
        ("the operations of its optimizer", format!("{operations:?}")),
        ("the numbers of its optimizer", numbers.join(", ")),
    ])?)
}

/// The shape of each float tensor of `model`, in the order of its visit, each id once.
fn ordered_shapes<B: TrainBackend, M: AutodiffModule<B>>(model: &M) -> Vec<(ParamId, Vec<usize>)> {
    struct Visitor(Vec<(ParamId, Vec<usize>)>);
    impl<B: TrainBackend> ModuleVisitor<B> for Visitor {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.0.iter().all(|(id, _)| *id != param.id) {
                self.0.push((param.id, param.val().dims().to_vec()));
            }
        }
    }
    let mut visitor = Visitor(Vec::new());
    model.visit(&mut visitor);
    visitor.0
}

fn shapes<B: TrainBackend, M: AutodiffModule<B>>(model: &M) -> Shapes {
    ordered_shapes::<B, M>(model).into_iter().collect()
}

/// This rank's share of a tensor of the optimizer's state, of a parameter of shape `whole`.
pub(super) fn share_of(world: &World, data: TensorData, whole: &[usize]) -> Result<TensorData, TrainError> {
    if data.shape.to_vec() != whole {
        return Err(TrainError::Sharding {
            reason: format!(
                "its state has a tensor of shape {:?} for a parameter of shape {whole:?}",
                data.shape.to_vec()
            ),
        });
    }
    let own = length(data.num_elements(), world.size());
    let mut shape = vec![1; whole.len()];
    shape[0] = own;
    let mut share = zeros(&shape, &data);
    let (bytes, all) = (share.bytes.len(), data.bytes.len());
    let from = (world.rank() * bytes).min(all);
    let to = (from + bytes).min(all);
    share.bytes[..to - from].copy_from_slice(&data.bytes[from..to]);
    Ok(share)
}

/// The whole tensor of the optimizer's state, of a parameter of shape `whole`, from the shares of all ranks.
pub(super) fn joined_of(
    world: &World,
    share: &TensorData,
    whole: &[usize],
) -> Result<TensorData, TrainError> {
    let all = world.all_gather(&share.bytes)?;
    let mut joined = zeros(whole, share);
    let bytes = joined.bytes.len();
    joined.bytes.copy_from_slice(&all[..bytes]);
    Ok(joined)
}

/// Zeros of the type of `like`.
fn zeros(shape: &[usize], like: &TensorData) -> TensorData {
    TensorData::full_dtype(shape.to_vec(), 0, like.dtype)
}

/// `record` with other elements in each of its tensors.
fn exchanged<B: TrainBackend, O: SimpleOptimizer<Kiln>>(
    record: AdaptorRecord<O, B>,
    mut elements: impl FnMut(TensorData) -> Result<TensorData, TrainError>,
) -> Result<AdaptorRecord<O, B>, TrainError> {
    let mut tensors = Vec::new();
    for tensor in tensors_of::<B, O>(record.clone()) {
        let client = tensor.client;
        let storage = record::session::fetch(&tensor.into_ir(), record::BreakReason::Read)?;
        let data = storage.try_into_data().map_err(Error::from)?;
        tensors.push(client.register_tensor_data(elements(data)?));
    }
    let replaced = with_state!(record, |state, D| {
        let state = exchange::replace(tensors, |device: &KilnDevice| O::to_device::<D>(state, device));
        state.map(AdaptorRecord::<O, B>::from_state::<D>)
    });
    replaced.ok_or_else(|| TrainError::Sharding {
        reason: "its state has another number of tensors each time it is looked at".into(),
    })
}

/// Replaces gradients by shares of their means.
struct Reduce {
    ranks: usize,
    gradients: GradientsParams,
    shapes: Shapes,
    seen: HashSet<ParamId>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Reduce {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let parameter = self.seen.len() - 1;
        let Some(gradient) = self.gradients.remove::<Kiln, D>(param.id) else {
            return;
        };
        let whole = gradient.dims();
        let share = of_elements(flat(gradient, self.ranks), |whole| {
            ranks::mean_share(whole, parameter)
        });
        let share = share.reshape(shape::<D>(whole.iter().product(), self.ranks));
        self.gradients.register::<Kiln, D>(param.id, share);
        self.shapes.insert(param.id, whole.to_vec());
    }
}

/// Collects the sum of the squares of each share.
struct Squares {
    gradients: GradientsParams,
    sums: Vec<Tensor<Kiln, 1>>,
    seen: HashSet<ParamId>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Squares {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.gradients.get::<Kiln, D>(param.id);
        if let Some(gradient) = gradient.filter(|_| self.seen.insert(param.id)) {
            self.sums.push(gradient.square().sum());
        }
    }
}

/// Clips shares of gradients, by norm with the sums of squares of the whole ones, in the same order.
struct Clip<'a> {
    clipping: &'a GradientClipping,
    gradients: GradientsParams,
    sums: Option<Tensor<Kiln, 1>>,
    seen: HashSet<ParamId>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Clip<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.seen.contains(&param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<Kiln, D>(param.id) else {
            return;
        };
        let clipped = match (self.clipping, &self.sums) {
            (GradientClipping::Norm(threshold), Some(sums)) => {
                // The formula of `GradientClipping`.
                let at = self.seen.len();
                let norm = sums.clone().slice(at..at + 1).sqrt();
                let least = gradient
                    .dtype()
                    .finfo()
                    .map_or(f64::from(f32::MIN_POSITIVE), |it| it.min_positive);
                let factor = norm
                    .add_scalar(least)
                    .recip()
                    .mul_scalar(*threshold)
                    .clamp_max(1.0);
                gradient.mul(factor.reshape([1; D]))
            }
            (clipping, _) => clipping.clip_gradient(gradient),
        };
        self.seen.insert(param.id);
        self.gradients.register::<Kiln, D>(param.id, clipped);
    }
}

/// Replaces parameters by this rank's shares.
struct Own<'a> {
    world: &'a World,
    /// Of those that are left.
    shapes: Shapes,
    /// The number of this rank, as a tensor of the step.
    rank: Option<Tensor<Kiln, 1, Int>>,
}

impl<B: TrainBackend> ModuleMapper<B> for Own<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if self.shapes.remove(&param.id).is_none() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let (tracked, device) = (tensor.is_require_grad(), tensor.device());
        let elements = tensor.shape().num_elements();
        let ranks = self.world.size();
        let rank = self
            .rank
            .get_or_insert_with(|| Tensor::from_ints([self.world.rank() as i32], &device));
        // A lookup: which rows a rank takes is data, and the step is the same on all ranks.
        let rows = flat(tensor.inner(), ranks).reshape([ranks, length(elements, ranks)]);
        let own = rows.select(0, rank.clone()).reshape(shape::<D>(elements, ranks));
        Param::from_mapped_value(id, Tensor::from_inner(own).set_require_grad(tracked), mapper)
    }
}

/// Replaces this rank's shares by whole parameters.
struct Join {
    /// Of those that are left.
    shapes: Shapes,
    /// The type in which parameters of 16 and 32 bits travel and are stored.
    stored: Option<DType>,
}

impl<B: TrainBackend> ModuleMapper<B> for Join {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(whole) = self.shapes.remove(&param.id) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let tracked = tensor.is_require_grad();
        let own = tensor.inner();
        let elements: usize = whole.iter().product();
        let share = own.shape().num_elements();
        let stored = self.stored;
        let narrow = |share| match stored {
            Some(dtype) => weights::to(share, dtype),
            None => share,
        };
        let joined = of_elements(own.reshape([share]), |share| ranks::joined(narrow(share)));
        let filled = joined.shape().num_elements() > elements;
        let joined = match filled {
            true => joined.slice(0..elements),
            false => joined,
        };
        let whole: [usize; D] = std::array::from_fn(|dimension| whole[dimension]);
        let joined = Tensor::from_inner(joined.reshape(whole)).set_require_grad(tracked);
        Param::from_mapped_value(id, joined, mapper)
    }
}

/// Replaces trained parameters by tensors without elements, of the shape of a share if there are ranks.
struct Hollow {
    ranks: Option<usize>,
    tracked: Vec<ParamId>,
}

impl<B: TrainBackend> ModuleMapper<B> for Hollow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        if !tensor.is_require_grad() || self.tracked.contains(&id) {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        self.tracked.push(id);
        let whole = tensor.dims();
        let dims = match self.ranks {
            Some(ranks) => shape::<D>(whole.iter().product(), ranks),
            None => whole,
        };
        let empty = Tensor::empty(dims, (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, empty.require_grad(), mapper)
    }
}
