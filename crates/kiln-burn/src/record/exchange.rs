//! Looking at, and replacing, the tensors inside an object that only knows how to move itself to a device.
//!
//! The state of a Burn optimizer is an opaque type with one tool: `to_device`, which must reach every
//! tensor in it. Between Kiln devices no tensor has to move. So while an exchange is under way on this
//! thread, a move does what the exchange asks for instead: it hands over a copy of the tensor, or puts
//! another one in its place. Objects of one type visit their tensors in one order.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

use burn_backend::TensorMetadata;
use burn_ir::{TensorId, TensorStatus};
use burn_router::RouterTensor;

use super::breaks::BreakReason;
use super::session;
use crate::client::KilnClient;
use crate::device::KilnDevice;
use crate::error::Error;
use crate::options::CompileBackend;

/// A device no tensor is on, so that every move is seen.
const ELSEWHERE: KilnDevice = KilnDevice::lazy(CompileBackend::Eager);

/// The action of a move during an exchange.
enum Exchange {
    /// Adds a copy of the tensor.
    Collect(Vec<RouterTensor<KilnClient>>),
    /// Puts the next of these in its place; counts the moves for which there was none.
    Replace {
        tensors: VecDeque<RouterTensor<KilnClient>>,
        missing: usize,
    },
    /// Makes the object the only owner of its tensors.
    Own(Owned),
}

/// The result of making an object the only owner of its tensors.
#[derive(Default)]
pub struct Owned {
    /// Tensors that only the object held already, in order.
    pub sole: Vec<TensorId>,
    /// The new id of each tensor that something else holds, too, by its old id.
    pub renamed: HashMap<TensorId, TensorId>,
    /// Why a tensor that something else holds could not be given another id.
    pub error: Option<Error>,
}

impl Owned {
    /// A handle of `tensor` whose id no other handle has: `tensor` itself, or a tensor of a new id with the
    /// same elements.
    pub fn own(&mut self, tensor: RouterTensor<KilnClient>) -> RouterTensor<KilnClient> {
        let (client, dtype) = (tensor.client, tensor.dtype());
        let ir = tensor.into_ir();
        if ir.status == TensorStatus::ReadWrite {
            // Nobody else holds it: the handle is made again as it was.
            self.sole.push(ir.id);
            return RouterTensor::new(ir.id, ir.shape, dtype, client);
        }
        match session::fetch(&ir, BreakReason::OutsideOperation) {
            Ok(elements) => {
                let renewed = client.adopt(elements);
                self.renamed.insert(ir.id, renewed.clone().into_ir().id);
                renewed
            }
            Err(error) => {
                self.error.get_or_insert(error);
                RouterTensor::new(ir.id, ir.shape, dtype, client)
            }
        }
    }
}

thread_local! {
    static EXCHANGE: RefCell<Option<Exchange>> = const { RefCell::new(None) };
}

/// Starts an exchange; ends it on drop, also by a panic.
struct Running;

impl Running {
    fn start(exchange: Exchange) -> Self {
        EXCHANGE.with_borrow_mut(|running| *running = Some(exchange));
        Self
    }

    fn end(self) -> Option<Exchange> {
        EXCHANGE.with_borrow_mut(Option::take)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Tensors that are left are dropped outside the borrow: that reaches the client.
        let left = EXCHANGE.with_borrow_mut(Option::take);
        drop(left);
    }
}

/// The tensors that `to_device` moves, in order.
pub fn collect<R>(to_device: impl FnOnce(&KilnDevice) -> R) -> Vec<RouterTensor<KilnClient>> {
    let running = Running::start(Exchange::Collect(Vec::new()));
    to_device(&ELSEWHERE);
    match running.end() {
        Some(Exchange::Collect(tensors)) => tensors,
        _ => Vec::new(),
    }
}

/// The result of `to_device`, with the tensors that it moves replaced by `tensors`, in order. None if their
/// numbers differ.
pub fn replace<R>(
    tensors: Vec<RouterTensor<KilnClient>>,
    to_device: impl FnOnce(&KilnDevice) -> R,
) -> Option<R> {
    let running = Running::start(Exchange::Replace {
        tensors: tensors.into(),
        missing: 0,
    });
    let object = to_device(&ELSEWHERE);
    match running.end() {
        Some(Exchange::Replace { tensors, missing: 0 }) if tensors.is_empty() => Some(object),
        _ => None,
    }
}

/// The result of `to_device`, which is the only owner of its tensors afterwards; adds to `owned` what
/// happened to them.
pub fn own<R>(owned: &mut Owned, to_device: impl FnOnce(&KilnDevice) -> R) -> R {
    let running = Running::start(Exchange::Own(std::mem::take(owned)));
    let object = to_device(&ELSEWHERE);
    if let Some(Exchange::Own(found)) = running.end() {
        *owned = found;
    }
    object
}

/// A move was asked for. Gives the tensor back if no exchange is under way.
pub(crate) fn visit(
    tensor: RouterTensor<KilnClient>,
) -> Result<RouterTensor<KilnClient>, RouterTensor<KilnClient>> {
    // Not while the exchange is borrowed: making an id reaches the client.
    let owning = EXCHANGE.with_borrow_mut(|exchange| match exchange {
        Some(Exchange::Own(owned)) => Some(std::mem::take(owned)),
        _ => None,
    });
    if let Some(mut owned) = owning {
        let tensor = owned.own(tensor);
        EXCHANGE.with_borrow_mut(|exchange| *exchange = Some(Exchange::Own(owned)));
        return Ok(tensor);
    }
    EXCHANGE.with_borrow_mut(|exchange| match exchange {
        None | Some(Exchange::Own(_)) => Err(tensor),
        Some(Exchange::Collect(tensors)) => {
            tensors.push(tensor.clone());
            Ok(tensor)
        }
        // The tensor that makes room is dropped by the client, which takes no part in exchanges.
        Some(Exchange::Replace { tensors, missing }) => Ok(tensors.pop_front().unwrap_or_else(|| {
            *missing += 1;
            tensor
        })),
    })
}
