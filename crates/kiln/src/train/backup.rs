//! Model and optimizer as they were before a recorded call.
//!
//! A clone of the model is a backup of its parameters but not of its cells ([`super::places`]), whose
//! tensors are kept one by one. While the closure runs, a backup holds the tensors that the step reads.
//! When the closure is over, the backup gives them up ([`Backup::surrender`]), so that the step may
//! overwrite them; if the step fails before it runs, they have their elements again.

use burn_core::module::AutodiffModule;
use burn_ir::TensorId;
use burn_optim::SimpleOptimizer;
use burn_optim::adaptor::OptimizerAdaptor;
use kiln_burn::Kiln;
use kiln_burn::record::exchange::Owned;
use kiln_burn::record::{self, rehearse};

use super::masters::Masters;
use super::ownership::{own_model, own_optimizer};
use super::places::{Cells, map_tensors};
use super::{TrainBackend, Trained};
use crate::input::KilnTensor;

/// See the module.
pub(super) struct Backup<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>> {
    model: Box<M>,
    optim: OptimizerAdaptor<O, M, B>,
    cells: Cells,
    /// The tensors in cells, in order.
    in_cells: Vec<KilnTensor>,
    /// This rank's shares of the master copy, if ranks divide one.
    masters: Option<Masters>,
    surrendered: Vec<TensorId>,
}

/// Model and optimizer, and this rank's shares of a master copy.
pub(super) type Restored<B, M, O> = (Trained<B, M, O>, Option<Masters>);

impl<B: TrainBackend, M: AutodiffModule<B> + Clone, O: SimpleOptimizer<Kiln>> Backup<B, M, O> {
    /// A backup of `model`, with these cells, of `optim`, and of the shares of a master copy.
    pub(super) fn new(
        model: &M,
        optim: &OptimizerAdaptor<O, M, B>,
        cells: &Cells,
        masters: Option<Masters>,
    ) -> Self {
        let mut look = CellMapper {
            cells: cells.clone(),
            position: 0,
            replace: None,
            seen: Vec::new(),
        };
        if cells.any() {
            drop(model.clone().map(&mut look));
        }
        Self {
            model: Box::new(model.clone()),
            optim: optim.clone(),
            cells: cells.clone(),
            in_cells: look.seen,
            masters,
            surrendered: Vec::new(),
        }
    }

    /// Lets the step under way overwrite tensors that only this backup holds.
    pub(super) fn surrender(self) -> Self {
        let mut owned = Owned::default();
        let model = Box::new(own_model::<B, M>(*self.model, &self.cells, &mut owned));
        let optim = own_optimizer(self.optim, &mut owned);
        let in_cells = self
            .in_cells
            .into_iter()
            .map(|tensor| owned.own(tensor))
            .collect();
        let masters = self.masters.map(|masters| masters.owned(&mut owned));
        record::surrender(&owned.sole);
        Self {
            model,
            optim,
            cells: self.cells,
            in_cells,
            masters,
            surrendered: owned.sole,
        }
    }

    /// Model, optimizer and shares as they were; none if the step has overwritten some of their tensors.
    pub(super) fn restore(self) -> Option<Restored<B, M, O>> {
        if !record::are_ready(&self.surrendered) {
            return None;
        }
        let Self {
            model,
            optim,
            cells,
            in_cells,
            masters,
            ..
        } = self;
        if !cells.any() {
            return Some(((model, optim), masters));
        }
        // Pending updates in the cells come from the failed call and may have no elements: they are taken
        // out without being computed. A clone has the same cells, and parameters of its own: those that
        // were not drawn yet would be drawn here, and never computed.
        let _ = rehearse(|| drop(M::clone(&model).valid()));
        let model = Box::new(model.map(&mut CellMapper {
            cells,
            position: 0,
            replace: Some(in_cells.into_iter()),
            seen: Vec::new(),
        }));
        Some(((model, optim), masters))
    }
}

/// Looks at the tensors in cells, or replaces them.
struct CellMapper {
    cells: Cells,
    position: usize,
    replace: Option<std::vec::IntoIter<KilnTensor>>,
    seen: Vec<KilnTensor>,
}

map_tensors!(CellMapper);

impl CellMapper {
    fn skip(&mut self) {
        self.position += 1;
    }

    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        let position = self.position;
        self.position += 1;
        if !self.cells.contains(position) {
            return tensor;
        }
        match &mut self.replace {
            Some(replace) => replace.next().unwrap_or(tensor),
            None => {
                self.seen.push(tensor.clone());
                tensor
            }
        }
    }
}
