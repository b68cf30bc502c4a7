//! Parameters that are stored in 16 bits, and copies of parameters in 16 bits.
//!
//! Checkpoints of language models store `bf16`. A step that keeps them so has half the memory and half the
//! traffic for its parameters. Loss and gradients are still computed from `f32`: a parameter is widened where
//! it is read, which costs nothing inside a kernel, and products under autocast read the 16 bits as they are.
//!
//! ```text
//!                     read by loss and gradients        updated by the optimizer      stored
//! without a master    widened parameters                the same                      narrowed
//! with a master       widened copies                    f32 parameters                f32, and narrowed copies
//! with divided ones   widened parameters                f32 shares                    narrowed, and f32 shares
//! under autocast      f32 parameters, by products       f32 parameters                f32, and narrowed copies
//!                     their copies
//! ```
//!
//! The update writes the 16 bits, in the kernel that makes the new parameter. Copies beside parameters of `f32`
//! are state of the step beside model and optimizer; they follow from the parameters alone, so no checkpoint
//! has them, and copies of tensors that the model does not have any more are made anew.
//!
//! Under autocast alone copies change no number: products would round the same parameters
//! ([`kiln_burn::with_copy`]). Parameters of two dimensions and more have them, which products may read.
//!
//! Ranks that divide the optimizer's state divide the master as well: the model's parameters are the 16 bits
//! then, and beside them each rank has its share of the master ([`super::shards`]).

use std::collections::{BTreeMap, BTreeSet};

use burn_backend::ops::FloatTensorOps;
use burn_backend::{FloatDType, TensorMetadata};
use burn_core::module::AutodiffModule;
use burn_ir::TensorId;
use burn_tensor::DType;
use kiln_burn::Kiln;

use super::TrainBackend;
use super::places::{self, Cells, Found, look_outside, map_outside};
use crate::input::KilnTensor;

/// How a training step stores the parameters of its model between calls: in 16 bits.
///
/// Statistics (of batch norm), the optimizer's state, integers and `f64` are stored as ever.
///
/// ```
/// use burn_autodiff::Autodiff;
/// use burn_nn::{Linear, LinearConfig};
/// use burn_optim::SgdConfig;
/// use burn_tensor::{DType, Tensor};
/// use kiln::{CompileBackend, Kiln, KilnDevice, TrainStep, Weights};
///
/// type B = Autodiff<Kiln>;
///
/// let device = KilnDevice::cpu();
/// let model: Linear<B> = LinearConfig::new(2, 1).init(&device);
/// let loss = |model: &Linear<B>, x: Tensor<B, 2>| model.forward(x).powf_scalar(2.0).mean();
/// let step = TrainStep::new(model, SgdConfig::new().init(), loss).with_weights(Weights::BF16);
/// let mut step = step.with_backend(CompileBackend::AotEager).build()?;
/// step.step(0.1, Tensor::ones([4, 2], &device))?;
/// let model = step.into_model();
/// assert_eq!(model.weight.val().dtype(), DType::BF16);
/// let model = kiln::cast_parameters::<B, _>(model, DType::F32);
/// assert_eq!(model.weight.val().dtype(), DType::F32);
/// # Ok::<(), kiln::TrainError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    dtype: DType,
    master: bool,
}

impl Weights {
    /// `bf16`, without a master copy: 8 bits of precision. An update below 2^-9 of a parameter is lost.
    pub const BF16: Self = Self {
        dtype: DType::BF16,
        master: false,
    };

    /// `f16`, without a master copy: 11 bits of precision, and nothing above 65504.
    pub const F16: Self = Self {
        dtype: DType::F16,
        master: false,
    };

    /// The same with a master copy: the model's parameters are `f32` and take every update; loss and
    /// gradients are computed from copies of 16 bits that the update writes. Where ranks divide the
    /// optimizer's state ([`crate::TrainStepBuilder::with_sharded_state`]) they divide the master copy, and
    /// the model's parameters are the 16 bits; [`crate::TrainStep::whole_model`] has those of `f32`.
    pub const fn with_master(mut self) -> Self {
        self.master = true;
        self
    }

    /// The type of 16 bits.
    pub const fn dtype(self) -> DType {
        self.dtype
    }

    /// Whether there is a master copy.
    pub const fn has_master(self) -> bool {
        self.master
    }
}

/// `model` with its parameters of 16 and 32 bits in `dtype`. The others, and whether parameters are trained,
/// stay as they are. Parameters that Burn draws when they are first used are drawn.
///
/// # Panics
///
/// If `dtype` is none of `f16`, `bf16` and `f32`.
pub fn cast_parameters<B: TrainBackend, M: AutodiffModule<B> + Clone>(model: M, dtype: DType) -> M {
    assert!(
        is_cast(dtype),
        "parameters are cast between f16, bf16 and f32, not to {dtype:?}"
    );
    drop(model.valid());
    let cells = Cells::of::<B, M>(&model);
    let mut casts = Casts::to(dtype);
    map_outside(model, &cells, |_, tensor| casts.of(tensor))
}

pub(super) fn is_cast(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

/// `tensor` in `dtype`, if it is a parameter that is cast; else as it is.
pub(super) fn to(tensor: KilnTensor, dtype: DType) -> KilnTensor {
    if tensor.dtype() == dtype || !is_cast(tensor.dtype()) {
        return tensor;
    }
    let dtype = match dtype {
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    };
    Kiln::float_cast(tensor, dtype)
}

/// Casts each tensor once: a parameter that is in two places of a model stays one.
struct Casts {
    dtype: DType,
    made: BTreeMap<TensorId, KilnTensor>,
}

impl Casts {
    fn to(dtype: DType) -> Self {
        Self {
            dtype,
            made: BTreeMap::new(),
        }
    }

    fn of(&mut self, tensor: KilnTensor) -> KilnTensor {
        let id = tensor.clone().into_ir().id;
        let made = self.made.entry(id).or_insert_with(|| to(tensor, self.dtype));
        made.clone()
    }
}

/// Tensors by their position in the order of a model's map.
pub(super) type Places = BTreeMap<usize, KilnTensor>;

/// What tensors of 16 bits are to the parameters of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// They are the parameters.
    Parameters,
    /// Copies of parameters of f32, of which loss and gradients are computed.
    Widened,
    /// Copies of parameters of f32 that products under autocast read.
    Rounded,
}

/// How the step keeps tensors of 16 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storing {
    dtype: DType,
    role: Role,
}

impl Storing {
    /// Parameters that are stored so.
    pub(super) fn weights(weights: Weights) -> Self {
        Self {
            dtype: weights.dtype,
            role: match weights.master {
                true => Role::Widened,
                false => Role::Parameters,
            },
        }
    }

    /// Copies of parameters for products under autocast to `dtype`.
    pub(super) fn rounded(dtype: DType) -> Self {
        Self {
            dtype,
            role: Role::Rounded,
        }
    }

    /// Whether they are copies that autocast reads.
    pub(super) fn is_rounded(self) -> bool {
        self.role == Role::Rounded
    }

    fn are_copies(self) -> bool {
        self.role != Role::Parameters
    }

    /// Whether a parameter, or what stands for it, is kept in 16 bits.
    fn keeps(self, tensor: &KilnTensor) -> bool {
        match self.role {
            Role::Rounded => tensor.dtype() == DType::F32 && tensor.rank() > 1,
            Role::Parameters | Role::Widened => is_cast(tensor.dtype()),
        }
    }
}

/// Copies of 16 bits beside the parameters of a model.
pub(super) struct Copies {
    tensors: Places,
    /// The parameters that they are copies of.
    of: Ids,
}

/// Ids of tensors by their position in the order of a model's map.
type Ids = BTreeMap<usize, TensorId>;

impl Copies {
    /// Whether the parameters of `model` are those that these are copies of.
    pub(super) fn belong_to<B: TrainBackend, M: AutodiffModule<B> + Clone>(
        &self,
        model: &M,
        cells: &Cells,
    ) -> bool {
        ids_of::<B, M>(model, cells, |position, _| self.of.contains_key(&position)) == self.of
    }

    /// The copies as places of a step of `model`.
    pub(super) fn places<B: TrainBackend, M: AutodiffModule<B>>(&self, model: &M) -> Vec<Found> {
        places_of::<B, M>(model, &self.tensors, COPY)
    }

    /// Bytes of the copies.
    pub(super) fn bytes(&self) -> usize {
        bytes_of(&self.tensors)
    }
}

/// Bytes of `tensors`.
pub(super) fn bytes_of(tensors: &Places) -> usize {
    let of = |tensor: &KilnTensor| tensor.shape().num_elements() * tensor.dtype().size();
    tensors.values().map(of).sum()
}

/// The ids of those tensors of `model` outside cells for which `wanted` says so.
fn ids_of<B: TrainBackend, M: AutodiffModule<B> + Clone>(
    model: &M,
    cells: &Cells,
    wanted: impl Fn(usize, &KilnTensor) -> bool,
) -> Ids {
    let mut ids = Ids::new();
    look_outside::<B, M>(model, cells, |position, tensor| {
        if wanted(position, &tensor) {
            ids.insert(position, tensor.into_ir().id);
        }
    });
    ids
}

/// The parameters of 16 bits that a call begins with.
pub(super) struct Stored {
    storing: Storing,
    tensors: Places,
}

/// What tells parameters that a call did not update: the tensors that it began with.
pub(super) struct Before<M> {
    /// The model that was stored.
    pub model: Box<M>,
    stored: Stored,
    ids: Ids,
}

impl Stored {
    /// The stored parameters of `model`, or the `copies` of them that an earlier call has left. None if two
    /// parameters are one tensor, and copies would make it two.
    pub(super) fn new<B: TrainBackend, M: AutodiffModule<B> + Clone>(
        model: &M,
        cells: &Cells,
        storing: Storing,
        copies: Option<Copies>,
    ) -> Option<Self> {
        if storing.is_rounded() {
            let ids = ids_of::<B, M>(model, cells, |_, _| true);
            let different: BTreeSet<TensorId> = ids.values().copied().collect();
            if different.len() < ids.len() {
                return None;
            }
        }
        let copies = copies.filter(|copies| copies.belong_to::<B, M>(model, cells));
        let tensors = copies.map(|copies| copies.tensors).unwrap_or_else(|| {
            let mut tensors = Places::new();
            let mut narrow = Casts::to(storing.dtype);
            look_outside::<B, M>(model, cells, |position, tensor| {
                if storing.keeps(&tensor) {
                    tensors.insert(position, narrow.of(tensor));
                }
            });
            tensors
        });
        Some(Self { storing, tensors })
    }

    /// The copies as places of a step of `model`. Without them the parameters are places of the model itself.
    pub(super) fn places<B: TrainBackend, M: AutodiffModule<B>>(&self, model: &M) -> Vec<Found> {
        match self.storing.are_copies() {
            true => places_of::<B, M>(model, &self.tensors, COPY),
            false => Vec::new(),
        }
    }

    /// The models of a call: the one of which loss and gradients are computed, and the one that the optimizer
    /// updates.
    pub(super) fn computed<B: TrainBackend, M: AutodiffModule<B> + Clone>(
        self,
        model: Box<M>,
        cells: &Cells,
    ) -> (Box<M>, Box<M>, Before<M>) {
        let mut widened = Casts::to(DType::F32);
        let computed = map_outside(M::clone(&model), cells, |position, tensor| {
            match (self.tensors.get(&position).cloned(), self.storing.role) {
                (None, _) => tensor,
                (Some(stored), Role::Rounded) => kiln_burn::with_copy(tensor, stored),
                (Some(stored), _) => widened.of(stored),
            }
        });
        let computed = Box::new(computed);
        let updated = match self.storing.are_copies() {
            true => model.clone(),
            false => computed.clone(),
        };
        let before = Before {
            ids: ids_of::<B, M>(&updated, cells, |_, _| true),
            model,
            stored: self,
        };
        (computed, updated, before)
    }
}

impl<M> Before<M> {
    /// The type of 16 bits.
    pub(super) fn dtype(&self) -> DType {
        self.stored.storing.dtype
    }

    /// The model that is stored after the optimizer has made `model`, and the copies beside it if there are
    /// any.
    pub(super) fn narrowed<B: TrainBackend>(self, model: M, cells: &Cells) -> (M, Option<Copies>)
    where
        M: AutodiffModule<B>,
    {
        let Self { stored, ids, .. } = self;
        let Stored { storing, mut tensors } = stored;
        let (mut copies, mut of) = (Places::new(), Ids::new());
        let model = map_outside(model, cells, |position, tensor| {
            let Some(stored) = tensors.remove(&position) else {
                return tensor;
            };
            let id = tensor.clone().into_ir().id;
            let narrow = match ids.get(&position) == Some(&id) {
                true => stored,
                false => to(tensor.clone(), storing.dtype),
            };
            match storing.are_copies() {
                true => {
                    copies.insert(position, narrow);
                    of.insert(position, id);
                    tensor
                }
                false => narrow,
            }
        });
        let copies = Copies { tensors: copies, of };
        (model, storing.are_copies().then_some(copies))
    }
}

/// What a copy of 16 bits is called, in front of the parameter's name.
pub(super) const COPY: &str = "the 16-bit copy of";

/// What a share of a master copy is called.
pub(super) const SHARE: &str = "the share of the master of";

/// The places of `copies`, named after the parameters of `model`.
pub(super) fn places_of<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    copies: &Places,
    what: &str,
) -> Vec<Found> {
    let parameters = places::of_model::<B, M>(model);
    let found = copies.iter().filter_map(|(&position, copy)| {
        Some(Found {
            name: format!("{what} {}", parameters.get(position)?.name).into(),
            id: copy.clone().into_ir().id,
        })
    });
    found.collect()
}
