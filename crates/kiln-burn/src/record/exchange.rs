//! Looking at, and replacing, the tensors inside an object that only knows how to move itself to a device.
//!
//! The state of a Burn optimizer is an opaque type with one tool: `to_device`, which must reach every tensor in it. Between Kiln devices nothing has to
//! move, so while an exchange is under way on this thread a move does what the exchange wants instead: hands over a copy of the tensor, or puts another one in its
//! place. Objects of one type visit their tensors in one order.

use std::cell::RefCell;
use std::collections::VecDeque;

use burn_router::RouterTensor;

use crate::client::KilnClient;
use crate::device::KilnDevice;
use crate::options::CompileBackend;

/// A device no tensor is on, so that every move is seen.
const ELSEWHERE: KilnDevice = KilnDevice::lazy(CompileBackend::Eager);

/// What a move does instead.
enum Exchange {
    /// Adds a copy of the tensor.
    Collect(Vec<RouterTensor<KilnClient>>),
    /// Puts the next of these in its place; counts the moves for which there was none.
    Replace {
        tensors: VecDeque<RouterTensor<KilnClient>>,
        missing: usize,
    },
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

/// What `to_device` makes of its object, with the tensors it moves replaced by `tensors`, in order. None if their numbers differ.
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

/// A move was asked for. Gives the tensor back if no exchange is under way.
pub(crate) fn visit(
    tensor: RouterTensor<KilnClient>,
) -> Result<RouterTensor<KilnClient>, RouterTensor<KilnClient>> {
    EXCHANGE.with_borrow_mut(|exchange| match exchange {
        None => Err(tensor),
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
