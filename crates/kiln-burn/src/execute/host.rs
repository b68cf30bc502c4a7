//! Executors that work on plain host tensors: the interpreter, and the code that it shares with candle-core's
//! (`candle.rs`, with the feature of that name). Both copy inputs and outputs: they are references, not meant
//! to be fast.

use std::sync::Arc;

use burn_flex::FlexTensor;
use kiln_graph::interpret::Interpreter;
use kiln_graph::op::ExternOp;
use kiln_graph::{DType, Graph, HostTensor, Scalar};
use kiln_profile::Category;

use super::check::{Parting, Reference};
use super::profile::next_id;
use super::{Executable, ExecuteError, check_arguments, convert};
use crate::import::external;
use crate::options::CompileBackend;
use crate::storage::Storage;

/// The plain meaning of the graph, in f64.
pub struct Interpret {
    graph: Arc<Graph>,
    id: u64,
}

impl Interpret {
    /// Prepares `graph`.
    pub fn new(graph: Arc<Graph>) -> Self {
        Self { graph, id: next_id() }
    }
}

impl Executable for Interpret {
    fn run_given(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        let _span = kiln_profile::span_with(Category::Step, || self.graph.name.clone().into());
        check_arguments(&self.graph, inputs, scalars)?;
        let types = self.graph.scalars().iter().map(|&value| self.graph.dtype(value));
        let scalars: Vec<Scalar> = scalars
            .iter()
            .zip(types)
            .map(|(&bits, dtype)| scalar_of_bits(bits, dtype))
            .collect();
        let mut handler = |op: &ExternOp, operands: &[HostTensor]| run_extern(op, operands);
        let interpreter = Interpreter::new(&self.graph).with_extern(&mut handler);
        let outputs = interpreter.run(&to_hosts(inputs), &scalars)?;
        inputs.clear();
        Ok(outputs.iter().map(to_storage).collect())
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn locate(&self, reference: &Reference<'_>) -> Result<Option<Parting>, ExecuteError> {
        reference.first_node(&self.graph, CompileBackend::Interpret)
    }

    fn report(&self) -> String {
        format!("{} nodes, interpreted in f64", self.graph.num_nodes())
    }
}

/// The scalar whose [`Scalar::to_bits`] for `dtype` is `bits`.
pub fn scalar_of_bits(bits: u64, dtype: DType) -> Scalar {
    match dtype {
        DType::Bool => Scalar::Bool(bits != 0),
        _ if dtype.is_float() => Scalar::Float(f64::from_bits(bits)),
        _ if dtype.is_unsigned_int() => Scalar::UInt(bits),
        _ => Scalar::Int(bits as i64),
    }
}

/// Runs an operation kept whole on burn-flex, from and to host tensors.
pub(super) fn run_extern(op: &ExternOp, operands: &[HostTensor]) -> Result<Vec<HostTensor>, String> {
    let operands = operands.iter().map(to_flex).collect();
    let results = external::run(op, operands).map_err(|error| error.to_string())?;
    results
        .iter()
        .map(|tensor| {
            convert::to_host(tensor).ok_or_else(|| format!("it gave elements of type {:?}", tensor.dtype()))
        })
        .collect()
}

pub(super) fn to_flex(tensor: &HostTensor) -> FlexTensor {
    convert::from_host(tensor, convert::burn_dtype(tensor.ty().dtype))
}

pub(super) fn to_storage(tensor: &HostTensor) -> Storage {
    to_flex(tensor).into()
}

/// The arguments were checked to have types of the graph.
pub(super) fn to_hosts(tensors: &[Storage]) -> Vec<HostTensor> {
    tensors.iter().filter_map(Storage::to_host_tensor).collect()
}
