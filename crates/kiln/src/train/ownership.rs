//! Objects that are the only owners of their tensors.
//!
//! A replayed step does not touch the program's objects and changes the tensors behind their ids. Any other
//! object that holds such an id (a clone of the model, a handle that the closure put aside) must stay as it
//! was. So before the first replay, and after the program has looked at the model, each tensor of the
//! step's state that another object holds gets an id of its own: both ids stand for one buffer then, and
//! the step writes to another.

use std::collections::{HashMap, HashSet};

use burn_core::module::AutodiffModule;
use burn_ir::TensorId;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{Optimizer, SimpleOptimizer};
use kiln_burn::record::exchange::{self, Owned};
use kiln_burn::{Error, Kiln, KilnDevice};

use super::TrainBackend;
use super::places::{Cells, map_tensors, with_state};
use crate::input::KilnTensor;

/// `model` with an id of its own for each tensor of `state` that another object holds, and the new id of
/// each old one.
pub(super) fn renew<B: TrainBackend, M: AutodiffModule<B>>(
    model: M,
    state: HashSet<TensorId>,
) -> Result<(M, HashMap<TensorId, TensorId>), Error> {
    let mut owner = Owner {
        only: Only::Ids(state),
        position: 0,
        owned: Owned::default(),
    };
    let model = model.map(&mut owner);
    match owner.owned.error {
        None => Ok((model, owner.owned.renamed)),
        Some(error) => Err(error),
    }
}

/// `model` as the only owner of its tensors, apart from those in cells, which belong to its clones as well.
pub(super) fn own_model<B: TrainBackend, M: AutodiffModule<B>>(
    model: M,
    cells: &Cells,
    owned: &mut Owned,
) -> M {
    let mut owner = Owner {
        only: Only::Outside(cells.clone()),
        position: 0,
        owned: std::mem::take(owned),
    };
    let model = model.map(&mut owner);
    *owned = owner.owned;
    model
}

/// `optim` as the only owner of its tensors.
pub(super) fn own_optimizer<B, M, O>(
    optim: OptimizerAdaptor<O, M, B>,
    owned: &mut Owned,
) -> OptimizerAdaptor<O, M, B>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    let records = optim.to_record();
    // The adaptor's own handles are dropped, so that the records' are the only ones of the program's
    // optimizer.
    let empty = optim.load_record(hashbrown::HashMap::new());
    let mut own = |record: AdaptorRecord<O, B>| {
        with_state!(record, |state, D| {
            let state = exchange::own(owned, |device: &KilnDevice| O::to_device::<D>(state, device));
            AdaptorRecord::from_state::<D>(state)
        })
    };
    let records = records
        .into_iter()
        .map(|(parameter, record)| (parameter, own(record)))
        .collect();
    empty.load_record(records)
}

/// The tensors that get an id of their own.
enum Only {
    /// These.
    Ids(HashSet<TensorId>),
    /// All that are in no cell.
    Outside(Cells),
}

struct Owner {
    only: Only,
    position: usize,
    owned: Owned,
}

map_tensors!(Owner);

impl Owner {
    fn skip(&mut self) {
        self.position += 1;
    }

    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        let position = self.position;
        self.position += 1;
        let wanted = match &self.only {
            Only::Ids(ids) => ids.contains(&tensor.clone().into_ir().id),
            Only::Outside(cells) => !cells.contains(position),
        };
        match wanted {
            true => self.owned.own(tensor),
            false => tensor,
        }
    }
}
