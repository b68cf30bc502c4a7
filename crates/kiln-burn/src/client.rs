//! The client: where Burn's router hands over operations.

use burn_backend::backend::ExecutionError;
use burn_backend::backend::ops::IntTensorOps;
use burn_backend::{Backend, DType, DTypeUsageSet, Shape, TensorData};
use burn_flex::{Flex, FlexDevice};
use burn_ir::{
    CustomOpIr, FullOpIr, ModuleOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorId, TensorIr,
};
use burn_router::{RouterTensor, RunnerClient};
use burn_std::future::DynFut;

use crate::channel::Kiln;
use crate::device::KilnDevice;
use crate::error::Error;
use crate::host_data::{IOTA, Pattern};
use crate::record::BreakReason;
use crate::record::session;
use crate::record::{type_text, user_location};
use crate::storage::Storage;
use crate::{random, ranks, table};

/// The client of a [`KilnDevice`]. It holds no state: tensors are in the process's table and recordings
/// belong to threads, so that a clone, which every tensor carries, costs nothing.
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

    /// A tensor of one element, by an operation: `value` is a runtime scalar of the recording.
    pub(crate) fn number(&self, dtype: DType, value: ScalarIr) -> RouterTensor<Self> {
        self.full(Shape::from([1]), dtype, value)
    }

    /// A vector that counts from `start` in steps of `step`, by operations. Start and step are runtime
    /// scalars unless they are 0 and 1.
    fn progression(&self, shape: Shape, dtype: DType, start: i64, step: i64) -> RouterTensor<Self> {
        let out = TensorIr::uninit(self.create_empty_handle(), shape.clone(), dtype);
        let id = out.id;
        self.register_op(OperationIr::Custom(CustomOpIr::new(IOTA, &[], &[out])));
        let mut vector = RouterTensor::new(id, shape, dtype, *self);
        if step != 1 {
            vector = Kiln::int_mul_scalar(vector, step.into());
        }
        if start != 0 {
            vector = Kiln::int_add_scalar(vector, start.into());
        }
        vector
    }

    /// A tensor of zeros that exists at once: for a region that is recording it is an input, not an
    /// operation.
    ///
    /// # Panics
    ///
    /// If the system has no such memory.
    pub fn zeros(&self, shape: Shape, dtype: DType) -> RouterTensor<Self> {
        self.adopt(Storage::zeros(shape, dtype))
    }

    /// Calls the operation of the program's own that has this id ([`crate::custom`]); one result for each
    /// shape and type.
    pub fn custom(
        &self,
        id: &str,
        inputs: Vec<RouterTensor<Self>>,
        outputs: &[(Shape, DType)],
    ) -> Vec<RouterTensor<Self>> {
        let inputs: Vec<TensorIr> = inputs.into_iter().map(RouterTensor::into_ir).collect();
        let result = |(shape, dtype): &(Shape, DType)| {
            TensorIr::uninit(self.create_empty_handle(), shape.clone(), *dtype)
        };
        let results: Vec<TensorIr> = outputs.iter().map(result).collect();
        self.register_op(OperationIr::Custom(CustomOpIr {
            id: id.to_owned(),
            inputs,
            outputs: results.clone(),
        }));
        let tensor = |ir: TensorIr| RouterTensor::new(ir.id, ir.shape, ir.dtype, *self);
        results.into_iter().map(tensor).collect()
    }

    /// Enters a tensor that exists and returns Burn's handle of it.
    pub fn adopt(&self, tensor: Storage) -> RouterTensor<Self> {
        self.enter(self.new_id(), tensor)
    }

    fn new_id(&self) -> TensorId {
        table::new_id(self.device.place())
    }

    fn enter(&self, id: TensorId, tensor: Storage) -> RouterTensor<Self> {
        let shape = tensor.shape().clone();
        let dtype = tensor.dtype();
        table::insert(id, tensor);
        RouterTensor::new(id, shape, dtype, *self)
    }
}

fn to_burn(error: Error) -> ExecutionError {
    ExecutionError::WithContext {
        reason: error.to_string(),
    }
}

/// Panics if a linear layer's input has another width than its weight takes: Burn looks at the shapes of
/// products, not of this operation, and the shapes that follow would be wrong.
fn assert_that_shapes_fit(operation: &OperationIr) {
    let OperationIr::Module(ModuleOperationIr::Linear(linear)) = operation else {
        return;
    };
    let (x, weight) = (&linear.x, &linear.weight);
    let (found, wanted) = (x.shape.last(), weight.shape.first());
    if found != wanted {
        let place = user_location().map_or_else(String::new, |place| format!(", at {place}"));
        panic!(
            "Linear: the last dimension of the input ({}) is not the first of the weight ({}){place}",
            type_text(x),
            type_text(weight),
        );
    }
}

/// Panics if an operation is to give positions in a type that does not have them all: those of integers are
/// announced in the integers' own type, and a program would read other positions.
fn assert_that_positions_fit(operation: &OperationIr) {
    let OperationIr::NumericInt(_, operation) = operation else {
        return;
    };
    let (name, d) = match operation {
        NumericOperationIr::ArgMax(d) => ("ArgMax", d),
        NumericOperationIr::ArgMin(d) => ("ArgMin", d),
        NumericOperationIr::ArgTopK(d) => ("ArgTopK", d),
        _ => return,
    };
    let most: usize = match d.out.dtype {
        DType::I8 => i8::MAX as usize,
        DType::U8 => u8::MAX.into(),
        DType::I16 => i16::MAX as usize,
        DType::U16 => u16::MAX.into(),
        _ => return,
    };
    let last = d.input.shape[d.axis].saturating_sub(1);
    if last > most {
        let place = user_location().map_or_else(String::new, |place| format!(", at {place}"));
        panic!(
            "{name}: positions are up to {last}, which {:?} does not have, and Burn wants them in the type of \
             the tensor; cast it to I32 first{place}",
            d.out.dtype
        );
    }
}

impl RunnerClient for KilnClient {
    type Device = KilnDevice;

    fn register_op(&self, operation: OperationIr) {
        let is_drop = matches!(operation, OperationIr::Drop(_));
        assert_that_shapes_fit(&operation);
        assert_that_positions_fit(&operation);
        match ranks::replaced(&operation, || self.new_id()) {
            Some(operations) => operations
                .into_iter()
                .for_each(|operation| session::submit(self.device, operation)),
            None => session::submit(self.device, operation),
        }
        if !is_drop {
            table::note_operation();
        }
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let data = session::fetch(&tensor, BreakReason::Read)
            .and_then(|tensor| tensor.try_into_data().map_err(Error::from))
            .map_err(to_burn);
        table::note_operation();
        Box::pin(std::future::ready(data))
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        session::sync().map_err(to_burn)
    }

    fn create_empty_handle(&self) -> TensorId {
        self.new_id()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        assert!(
            !matches!(data.dtype, DType::QFloat(_)),
            "Kiln: quantized tensors are not supported (burn-router 0.21 cannot carry them); dequantize the data first"
        );
        if !session::is_recording(self.device) {
            return self.adopt(Storage::from_data(data).at_home(self.device.place()));
        }
        match Pattern::of(&data) {
            Some(Pattern::Splat(value)) => self.full(data.shape.clone(), data.dtype, value),
            Some(Pattern::Progression { start, step }) => {
                self.progression(data.shape.clone(), data.dtype, start, step)
            }
            None => {
                let id = self.new_id();
                session::note_host_data(id, &data);
                self.enter(id, Storage::from_data(data))
            }
        }
    }

    fn device(&self) -> KilnDevice {
        self.device
    }

    fn seed(&self, seed: u64) {
        session::note_seed();
        random::seed(seed);
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        Flex::dtype_usage(&FlexDevice, dtype)
    }
}
