//! Master copies that ranks divide: beside a model of 16 bits, each rank's shares of its parameters in f32.
//!
//! ```text
//!   share of the gradient ┐
//!   share of the master   ├─ optimizer ─► share of the master ─► in 16 bits ─► parameter ◄─ shares of other ranks
//!   share of the state    ┘               share of the state
//! ```
//!
//! Shares are those of [`super::shards`]. A parameter that a step does not train keeps its share.

use std::collections::{BTreeSet, HashSet};

use burn_backend::TensorMetadata;
use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_router::RunnerClient;
use burn_tensor::{Bool, DType, Int, Tensor, TensorData};
use kiln_burn::Error;
use kiln_burn::record::exchange::Owned;
use kiln_burn::record::{self, BreakReason};
use kiln_distributed::World;

use super::places::{Cells, Found, look_outside, map_outside};
use super::shards::{Shapes, joined_of, share_of};
use super::weights::{self, Places, SHARE};
use super::{TrainBackend, TrainError};
use crate::input::KilnTensor;

/// This rank's shares, by the position of their parameters.
#[derive(Clone)]
pub(super) struct Masters {
    shares: Places,
}

impl Masters {
    /// This rank's shares of the parameters of `model` that have 32 bits.
    ///
    /// # Errors
    ///
    /// [`TrainError::Step`] if a parameter cannot be read.
    pub(super) fn of<B: TrainBackend, M: AutodiffModule<B> + Clone>(
        world: &World,
        model: &M,
        cells: &Cells,
    ) -> Result<Self, TrainError> {
        let mut parameters = Places::new();
        look_outside::<B, M>(model, cells, |position, tensor| {
            if tensor.dtype() == DType::F32 {
                parameters.insert(position, tensor);
            }
        });
        let share = |(position, tensor): (usize, KilnTensor)| {
            let (client, shape) = (tensor.client, tensor.shape().to_vec());
            let share = share_of(world, elements(tensor)?, &shape)?;
            Ok((position, client.register_tensor_data(share)))
        };
        let shares = parameters
            .into_iter()
            .map(share)
            .collect::<Result<_, TrainError>>()?;
        Ok(Self { shares })
    }

    /// The shares as places of a step of `model`.
    pub(super) fn places<B: TrainBackend, M: AutodiffModule<B>>(&self, model: &M) -> Vec<Found> {
        weights::places_of::<B, M>(model, &self.shares, SHARE)
    }

    /// `model` with a share in place of each parameter that has one of the `shapes`.
    pub(super) fn own<B: TrainBackend, M: AutodiffModule<B>>(
        &self,
        model: M,
        cells: &Cells,
        shapes: &Shapes,
    ) -> M {
        let trained = trained::<B, M>(&model, shapes);
        map_outside(model, cells, |position, tensor| {
            let share = self.shares.get(&position).filter(|_| trained.contains(&position));
            share.cloned().unwrap_or(tensor)
        })
    }

    /// The shares after an update that made `model`, whose parameters with one of the `shapes` are shares.
    pub(super) fn updated<B: TrainBackend, M: AutodiffModule<B> + Clone>(
        mut self,
        model: &M,
        cells: &Cells,
        shapes: &Shapes,
    ) -> Self {
        let trained = trained::<B, M>(model, shapes);
        look_outside::<B, M>(model, cells, |position, tensor| {
            if let Some(share) = self
                .shares
                .get_mut(&position)
                .filter(|_| trained.contains(&position))
            {
                *share = tensor;
            }
        });
        self
    }

    /// `model` with the whole parameters in f32. Every rank takes part.
    ///
    /// # Errors
    ///
    /// [`TrainError::Ranks`] if the ranks are not connected any more, [`TrainError::Step`] if a share cannot
    /// be read.
    pub(super) fn whole<B: TrainBackend, M: AutodiffModule<B> + Clone>(
        &self,
        world: &World,
        model: M,
        cells: &Cells,
    ) -> Result<M, TrainError> {
        let mut joined = Places::new();
        let mut shapes = Vec::new();
        look_outside::<B, M>(&model, cells, |position, tensor| {
            shapes.push((position, tensor.shape().to_vec()));
        });
        for (position, shape) in shapes {
            if let Some(share) = self.shares.get(&position).cloned() {
                let client = share.client;
                let whole = joined_of(world, &elements(share)?, &shape)?;
                joined.insert(position, client.register_tensor_data(whole));
            }
        }
        Ok(map_outside(model, cells, |position, tensor| {
            joined.remove(&position).unwrap_or(tensor)
        }))
    }

    /// The same as the only owner of its tensors.
    pub(super) fn owned(self, owned: &mut Owned) -> Self {
        let own = |(position, tensor)| (position, owned.own(tensor));
        Self {
            shares: self.shares.into_iter().map(own).collect(),
        }
    }

    /// Bytes of the shares.
    pub(super) fn bytes(&self) -> usize {
        weights::bytes_of(&self.shares)
    }
}

/// The elements of a tensor.
fn elements(tensor: KilnTensor) -> Result<TensorData, TrainError> {
    let storage = record::session::fetch(&tensor.into_ir(), BreakReason::Read)?;
    Ok(storage.try_into_data().map_err(Error::from)?)
}

/// The positions of the parameters of `model` that have one of the `shapes`; of one that is there twice the
/// first.
fn trained<B: TrainBackend, M: AutodiffModule<B>>(model: &M, shapes: &Shapes) -> BTreeSet<usize> {
    struct Visitor<'a> {
        shapes: &'a Shapes,
        position: usize,
        seen: HashSet<ParamId>,
        found: BTreeSet<usize>,
    }
    impl<B: TrainBackend> ModuleVisitor<B> for Visitor<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if self.shapes.contains_key(&param.id) && self.seen.insert(param.id) {
                self.found.insert(self.position);
            }
            self.position += 1;
        }

        fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<B, D, Int>>) {
            self.position += 1;
        }

        fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<B, D, Bool>>) {
            self.position += 1;
        }
    }
    let mut visitor = Visitor {
        shapes,
        position: 0,
        seen: HashSet::new(),
        found: BTreeSet::new(),
    };
    model.visit(&mut visitor);
    visitor.found
}
