//! New names for parameters that the program copied.
//!
//! A replayed step leaves the model's objects alone and changes the tensors behind their ids. A copy of the model holds the same ids, and a copy must
//! stay as it was. So once the model has been lent out ([`super::TrainStep::model`]), each of its tensors that something else holds too gets an id of its own before the next replay:
//! both ids stand for one buffer then, and the step writes to another.

use std::collections::HashMap;

use burn_core::module::{AutodiffModule, ModuleMapper, Param};
use burn_ir::{TensorId, TensorStatus};
use burn_tensor::{Bool, Int, Tensor};
use kiln_burn::Error;
use kiln_burn::record::{self, BreakReason};

use super::TrainBackend;
use crate::input::{KilnTensor, StepInput};

/// `model` with an id of its own for each tensor that something else holds too, and the new id of each old one.
pub(super) fn renew<B: TrainBackend, M: AutodiffModule<B>>(
    model: M,
) -> Result<(M, HashMap<TensorId, TensorId>), Error> {
    let mut renewal = Renewal::default();
    let model = model.map(&mut renewal);
    match renewal.error {
        None => Ok((model, renewal.names)),
        Some(error) => Err(error),
    }
}

#[derive(Default)]
struct Renewal {
    names: HashMap<TensorId, TensorId>,
    error: Option<Error>,
}

impl Renewal {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        let client = tensor.client;
        let dtype = burn_backend::TensorMetadata::dtype(&tensor);
        let ir = tensor.into_ir();
        if ir.status == TensorStatus::ReadWrite {
            // Nobody else holds it: the handle is made again as it was.
            return KilnTensor::new(ir.id, ir.shape, dtype, client);
        }
        match record::session::fetch(&ir, BreakReason::Read) {
            Ok(elements) => {
                let renewed = client.adopt(elements);
                self.names.insert(ir.id, renewed.clone().into_ir().id);
                renewed
            }
            Err(error) => {
                self.error.get_or_insert(error);
                KilnTensor::new(ir.id, ir.shape, dtype, client)
            }
        }
    }
}

impl<B: TrainBackend> ModuleMapper<B> for Renewal {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tracked = tensor.is_require_grad();
        let tensor = tensor.map(&mut |tensor| self.tensor(tensor));
        Param::from_mapped_value(id, tensor.set_require_grad(tracked), mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.map(&mut |tensor| self.tensor(tensor)), mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.map(&mut |tensor| self.tensor(tensor)), mapper)
    }
}
