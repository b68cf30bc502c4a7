//! A router backend that throws every operation away: what Burn itself costs the host.

use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::backend::ExecutionError;
use burn_backend::{DType, DTypeUsageSet, Shape, TensorData};
use burn_flex::{Flex, FlexDevice};
use burn_ir::{OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient};
use burn_std::future::DynFut;
use burn_tensor::backend::Backend;

/// Burn's router on [`NullClient`].
pub type Null = BackendRouter<NullChannel>;

/// The channel to [`NullClient`].
#[derive(Clone, Copy, Debug, Default)]
pub struct NullChannel;

/// Accepts operations and forgets them. Tensors have ids, types and shapes, and no elements.
#[derive(Clone, Copy, Debug)]
pub struct NullClient;

/// Carries nothing, since there is nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nothing;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl RunnerClient for NullClient {
    type Device = FlexDevice;

    fn register_op(&self, operation: OperationIr) {
        drop(operation);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let data = TensorData::zeros::<f32, _>(tensor.shape).convert_dtype(tensor.dtype);
        Box::pin(std::future::ready(Ok(data)))
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn create_empty_handle(&self) -> TensorId {
        TensorId::new(NEXT_ID.fetch_add(1, Ordering::Relaxed))
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        RouterTensor::new(self.create_empty_handle(), data.shape.clone(), data.dtype, *self)
    }

    fn device(&self) -> FlexDevice {
        FlexDevice
    }

    fn seed(&self, _: u64) {}

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        Flex::dtype_usage(&FlexDevice, dtype)
    }
}

impl MultiBackendBridge for Nothing {
    type TensorHandle = ();
    type Device = FlexDevice;

    fn change_backend_float(_: (), _: Shape, _: &FlexDevice) {}

    fn change_backend_int(_: (), _: Shape, _: &FlexDevice) {}

    fn change_backend_bool(_: (), _: Shape, _: &FlexDevice) {}
}

impl RunnerChannel for NullChannel {
    type Device = FlexDevice;
    type Bridge = Nothing;
    type Client = NullClient;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(_: &FlexDevice) -> String {
        "null".to_owned()
    }

    fn init_client(_: &FlexDevice) -> NullClient {
        NullClient
    }

    fn get_tensor_handle(_: &TensorIr, _: &NullClient) {}

    fn register_tensor(client: &NullClient, (): (), shape: Shape, dtype: DType) -> RouterTensor<NullClient> {
        RouterTensor::new(client.create_empty_handle(), shape, dtype, *client)
    }
}
