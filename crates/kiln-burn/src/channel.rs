//! The channel: with it burn-router is a backend on Kiln's client.

use burn_backend::{DType, Shape};
use burn_ir::TensorIr;
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, TensorHandle};

use crate::client::KilnClient;
use crate::device::KilnDevice;
use crate::record::BreakReason;
use crate::record::{exchange, session};
use crate::storage::Storage;

/// The Kiln backend. `Autodiff<Kiln>` trains; outside compiled regions it runs each operation at once on
/// burn-flex.
pub type Kiln = BackendRouter<KilnChannel>;

/// Burn-router's channel to [`KilnClient`].
#[derive(Clone, Copy, Debug, Default)]
pub struct KilnChannel;

/// Moves tensors between Kiln devices: all share one memory, so nothing moves.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedMemory;

impl MultiBackendBridge for SharedMemory {
    type TensorHandle = Storage;
    type Device = KilnDevice;

    fn change_backend_float(tensor: Storage, _: Shape, _: &KilnDevice) -> Storage {
        tensor
    }

    fn change_backend_int(tensor: Storage, _: Shape, _: &KilnDevice) -> Storage {
        tensor
    }

    fn change_backend_bool(tensor: Storage, _: Shape, _: &KilnDevice) -> Storage {
        tensor
    }
}

impl RunnerChannel for KilnChannel {
    type Device = KilnDevice;
    type Bridge = SharedMemory;
    type Client = KilnClient;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(device: &KilnDevice) -> String {
        format!("kiln<{device}>")
    }

    fn init_client(device: &KilnDevice) -> KilnClient {
        KilnClient::new(*device)
    }

    fn change_client_backend(
        tensor: RouterTensor<KilnClient>,
        device: &KilnDevice,
    ) -> RouterTensor<KilnClient> {
        let tensor = match exchange::visit(tensor) {
            Ok(exchanged) => return exchanged,
            Err(tensor) => tensor,
        };
        let client = tensor.client;
        let value = Self::get_tensor_handle(&tensor.into_ir(), &client);
        KilnClient::new(*device).adopt(value.at_home(device.place()))
    }

    /// # Panics
    ///
    /// If the tensor has no value because the step that computes it failed: the trait leaves no way to
    /// return an error.
    fn get_tensor_handle(tensor: &TensorIr, _: &KilnClient) -> TensorHandle<SharedMemory> {
        session::fetch(tensor, BreakReason::OutsideOperation).unwrap_or_else(|error| panic!("{error}"))
    }

    fn register_tensor(client: &KilnClient, tensor: Storage, _: Shape, _: DType) -> RouterTensor<KilnClient> {
        client.adopt(tensor)
    }
}
