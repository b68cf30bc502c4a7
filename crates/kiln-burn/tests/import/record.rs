//! A backend that runs operations eagerly and logs them.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_backend::backend::ExecutionError;
use burn_backend::{Backend, DType, DTypeUsageSet, Shape, TensorData};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient};
use burn_std::future::DynFut;
use kiln_burn::eager::{self, OperationError, TensorStore};
use rustc_hash::FxHashMap;

/// The logging backend. Everything it knows belongs to the thread.
pub type Log = BackendRouter<LogChannel>;

#[derive(Default)]
pub struct State {
    tensors: FxHashMap<TensorId, FlexTensor>,
    /// Tensors that no operation made.
    pub inputs: FxHashMap<TensorId, FlexTensor>,
    pub operations: Vec<OperationIr>,
    /// Seed and stream of each random operation.
    pub streams: Vec<(u64, u64)>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// Forgets what was logged.
pub fn start() {
    STATE.with_borrow_mut(|state| *state = State::default());
}

/// What was logged since [`start`].
pub fn finish() -> State {
    STATE.with_borrow_mut(std::mem::take)
}

/// The value of a tensor that is alive.
pub fn value(ir: &TensorIr) -> FlexTensor {
    STATE.with_borrow(|state| state.tensors[&ir.id].clone())
}

impl TensorStore for State {
    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, OperationError> {
        let tensor = match ir.status {
            TensorStatus::ReadWrite => self.tensors.remove(&ir.id),
            _ => self.tensors.get(&ir.id).cloned(),
        };
        tensor.ok_or_else(|| OperationError::missing(ir.id))
    }

    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor) {
        assert_eq!(tensor.layout().shape(), &ir.shape, "shape of {ir:?}");
        assert_eq!(tensor.dtype(), ir.dtype, "type of {ir:?}");
        self.tensors.insert(ir.id, tensor);
    }
}

#[derive(Clone, Debug)]
pub struct LogClient;

fn new_id() -> TensorId {
    TensorId::new(NEXT.fetch_add(1, Ordering::Relaxed))
}

fn adopt(tensor: FlexTensor) -> RouterTensor<LogClient> {
    let id = new_id();
    STATE.with_borrow_mut(|state| {
        state.inputs.insert(id, tensor.clone());
        state.tensors.insert(id, tensor.clone());
    });
    RouterTensor::new(id, tensor.layout().shape().clone(), tensor.dtype(), LogClient)
}

impl RunnerClient for LogClient {
    type Device = FlexDevice;

    fn register_op(&self, operation: OperationIr) {
        STATE.with_borrow_mut(|state| {
            let mut streams = std::mem::take(&mut state.streams);
            let mut next = || {
                // Any seed and stream do.
                let position = (0x5eed, 100 + streams.len() as u64);
                streams.push(position);
                position
            };
            let result = eager::run(&operation, state, &mut next);
            state.streams = streams;
            result.unwrap_or_else(|error| panic!("{error}"));
            state.operations.push(operation);
        });
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let value = STATE.with_borrow_mut(|state| state.take(&tensor)).expect("alive");
        Box::pin(async move { Ok(value.into_data()) })
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn create_empty_handle(&self) -> TensorId {
        new_id()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        adopt(FlexTensor::from_data(data))
    }

    fn device(&self) -> FlexDevice {
        FlexDevice
    }

    fn seed(&self, _: u64) {}

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        <Flex as Backend>::dtype_usage(&FlexDevice, dtype)
    }
}

#[derive(Clone, Debug)]
pub struct LogChannel;

pub struct Nowhere;

impl MultiBackendBridge for Nowhere {
    type TensorHandle = FlexTensor;
    type Device = FlexDevice;

    fn change_backend_float(tensor: FlexTensor, _: Shape, _: &FlexDevice) -> FlexTensor {
        tensor
    }

    fn change_backend_int(tensor: FlexTensor, _: Shape, _: &FlexDevice) -> FlexTensor {
        tensor
    }

    fn change_backend_bool(tensor: FlexTensor, _: Shape, _: &FlexDevice) -> FlexTensor {
        tensor
    }
}

impl RunnerChannel for LogChannel {
    type Device = FlexDevice;
    type Bridge = Nowhere;
    type Client = LogClient;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(_: &FlexDevice) -> String {
        "log".into()
    }

    fn init_client(_: &FlexDevice) -> LogClient {
        LogClient
    }

    fn get_tensor_handle(tensor: &TensorIr, _: &LogClient) -> FlexTensor {
        STATE.with_borrow_mut(|state| state.take(tensor)).expect("alive")
    }

    fn register_tensor(_: &LogClient, tensor: FlexTensor, _: Shape, _: DType) -> RouterTensor<LogClient> {
        adopt(tensor)
    }
}
