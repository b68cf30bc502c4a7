//! The client: where Burn's router hands over operations.

use burn_backend::backend::ExecutionError;
use burn_backend::{Backend, DType, DTypeUsageSet, Shape, TensorData};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use burn_ir::{FullOpIr, NumericOperationIr, OperationIr, ScalarIr, TensorId, TensorIr};
use burn_router::{RouterTensor, RunnerClient};
use burn_std::future::DynFut;

use crate::device::KilnDevice;
use crate::error::Error;
use crate::record::BreakReason;
use crate::record::session;
use crate::{random, table};

/// The client of a [`KilnDevice`]. It holds no state: tensors are in the process's table and recordings belong to
/// threads, so that a clone, which every tensor carries, costs nothing.
#[derive(Clone, Copy, Debug)]
pub struct KilnClient {
    device: KilnDevice,
}

impl KilnClient {
    /// The client of `device`.
    pub fn new(device: KilnDevice) -> Self {
        Self { device }
    }

    /// A tensor of equal elements, by an operation.
    fn full(&self, shape: Shape, dtype: DType, value: ScalarIr) -> RouterTensor<Self> {
        let out = TensorIr::uninit(self.create_empty_handle(), shape.clone(), dtype);
        let id = out.id;
        self.register_op(OperationIr::NumericFloat(
            dtype,
            NumericOperationIr::Full(FullOpIr { out, value }),
        ));
        RouterTensor::new(id, shape, dtype, *self)
    }

    /// Enters a tensor that exists and returns Burn's handle of it.
    pub fn adopt(&self, tensor: FlexTensor) -> RouterTensor<Self> {
        let id = table::new_id();
        let shape = tensor.layout().shape().clone();
        let dtype = tensor.dtype();
        table::insert(id, tensor);
        RouterTensor::new(id, shape, dtype, *self)
    }
}

/// Fewest elements of a tensor that is taken for a constant because they are all equal: in real data of this size they are not.
const SPLAT_ELEMENTS: usize = 64;

/// The value of every element of a float tensor, if they are all the same. Burn fills tensors on the host in places (constant padding, say); recorded as
/// the operation it is, it needs no memory and does not look like new data at every call.
fn splat(data: &TensorData) -> Option<ScalarIr> {
    if data.dtype != DType::F32 || data.num_elements() < SPLAT_ELEMENTS {
        return None;
    }
    let elements = data.as_slice::<f32>().ok()?;
    let first = elements[0];
    let same = elements
        .iter()
        .all(|element| element.to_bits() == first.to_bits());
    same.then_some(ScalarIr::Float(f64::from(first)))
}

fn to_burn(error: Error) -> ExecutionError {
    ExecutionError::WithContext {
        reason: error.to_string(),
    }
}

impl RunnerClient for KilnClient {
    type Device = KilnDevice;

    fn register_op(&self, operation: OperationIr) {
        session::submit(self.device, operation);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let data = session::fetch(&tensor, BreakReason::Read)
            .map(FlexTensor::into_data)
            .map_err(to_burn);
        Box::pin(std::future::ready(data))
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        session::sync().map_err(to_burn)
    }

    fn create_empty_handle(&self) -> TensorId {
        table::new_id()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        assert!(
            !matches!(data.dtype, DType::QFloat(_)),
            "Kiln: quantized tensors are not supported (burn-router 0.21 cannot carry them); dequantize the data first"
        );
        if session::is_recording(self.device)
            && let Some(value) = splat(&data)
        {
            return self.full(data.shape.clone(), data.dtype, value);
        }
        self.adopt(FlexTensor::from_data(data))
    }

    fn device(&self) -> KilnDevice {
        self.device
    }

    fn seed(&self, seed: u64) {
        random::seed(seed);
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        Flex::dtype_usage(&FlexDevice, dtype)
    }
}
