//! Compares what generated CUDA C++ computes with the interpreter.

use kiln_compiler::schedule::Buffer;
use kiln_compiler::{CompileError, Options, compile};
use kiln_graph::testing::{difference, random_arguments};
use kiln_graph::{DType, Graph, HostTensor, Scalar, interpret_f64};

use super::{HostStep, StageOrder};
use crate::emit::product::warpgroups::Warpgroups;
use crate::target::{CudaStep, CudaTarget};

/// A comparison of a graph's outputs on the host with those of the interpreter.
#[derive(Clone, Debug)]
pub struct Differential<'a> {
    graph: &'a Graph,
    /// The compiler's options.
    pub options: Options,
    /// What it compiles for.
    pub target: CudaTarget,
    arguments: (Vec<HostTensor>, Vec<Scalar>),
    tolerances: Option<Vec<f64>>,
}

/// The outcome of a comparison that found no difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The outputs agree.
    Same,
    /// The target does not compute one of the operations: its name and the types of its operands.
    Unsupported(String),
}

/// Compiles `graph` for a GPU, runs it on the host with random arguments and compares the outputs with the
/// interpreter's. The tolerance is a few roundings of the outputs' types, relative to each output's largest
/// element.
///
/// # Errors
/// The first difference; what went wrong before. An operation that the target does not compute is an error
/// too.
pub fn differential(graph: &Graph) -> Result<(), String> {
    match Differential::new(graph).check()? {
        Outcome::Same => Ok(()),
        Outcome::Unsupported(what) => Err(what),
    }
}

impl<'a> Differential<'a> {
    /// For the reference machine, with random arguments and tolerances by type.
    pub fn new(graph: &'a Graph) -> Self {
        Self {
            graph,
            options: Options::default(),
            target: CudaTarget {
                warpgroups: Warpgroups::Never,
                ..CudaTarget::default()
            },
            arguments: random_arguments(graph, 7),
            tolerances: None,
        }
    }

    /// Other arguments.
    #[must_use]
    pub fn arguments(mut self, tensors: Vec<HostTensor>, scalars: Vec<Scalar>) -> Self {
        self.arguments = (tensors, scalars);
        self
    }

    /// How far each output's elements may be from the interpreter's.
    #[must_use]
    pub fn tolerances(mut self, tolerances: &[f64]) -> Self {
        self.tolerances = Some(tolerances.to_vec());
        self
    }

    /// Compiles the graph.
    ///
    /// # Errors
    /// Those of [`compile`].
    pub fn compile(&self) -> Result<CudaStep, CompileError> {
        compile(self.graph, &self.options, &self.target)
    }

    /// Compiles, runs with threads in both orders and stages in three, and compares.
    ///
    /// # Errors
    /// The first difference from the interpreter, or between the two orders; what went wrong before.
    pub fn check(&self) -> Result<Outcome, String> {
        let step = match self.compile() {
            Ok(step) => step,
            Err(error @ CompileError::Unsupported { .. }) => {
                return Ok(Outcome::Unsupported(error.to_string()));
            }
            Err(error) => return Err(error.to_string()),
        };
        let host = HostStep::of(&step)?;
        let actual = self.run(&host)?;
        let turns = host.reorders(StageOrder::InTurn);
        let host = host.backward(true).stages(StageOrder::LatestFirst);
        let mut others = vec![self.run(&host)?];
        let host = host.stages(StageOrder::InTurn);
        if turns {
            others.push(self.run(&host)?);
        }
        if let Some((number, found)) = self.first_difference(&actual)? {
            return Err(format!(
                "output {number} ({}): {found}",
                origin(&step, number, &host)
            ));
        }
        let differs = |(one, other): (&HostTensor, &HostTensor)| one.bytes() != other.bytes();
        for other in &others {
            if let Some(number) = actual.iter().zip(other).position(differs) {
                return Err(format!(
                    "output {number} ({}) depends on the order in which threads, or kernels side by side, run",
                    origin(&step, number, &host)
                ));
            }
        }
        Ok(Outcome::Same)
    }

    /// The arguments.
    pub fn given(&self) -> (&[HostTensor], &[Scalar]) {
        (&self.arguments.0, &self.arguments.1)
    }

    /// Compares outputs with the interpreter's.
    ///
    /// # Errors
    /// The first difference; what the interpreter says.
    pub fn compare(&self, actual: &[HostTensor]) -> Result<(), String> {
        match self.first_difference(actual)? {
            Some((number, found)) => {
                let value = self.graph.outputs[number].value;
                Err(format!("output {number} ({value}): {found}"))
            }
            None => Ok(()),
        }
    }

    /// The first output that differs from the interpreter's, and how.
    fn first_difference(&self, actual: &[HostTensor]) -> Result<Option<(usize, String)>, String> {
        let (tensors, scalars) = &self.arguments;
        let expected = interpret_f64(self.graph, tensors, scalars).map_err(|error| error.to_string())?;
        let mut outputs = actual.iter().zip(&expected).enumerate();
        Ok(outputs.find_map(|(number, (actual, expected))| {
            let tolerance = match &self.tolerances {
                Some(tolerances) => tolerances[number],
                None => relative(actual.ty().dtype) * largest(expected),
            };
            difference(actual, expected, tolerance).map(|found| (number, found))
        }))
    }

    /// The outputs of one run.
    ///
    /// # Errors
    /// Those of [`HostStep::run`].
    pub fn run(&self, host: &HostStep) -> Result<Vec<HostTensor>, String> {
        let (tensors, scalars) = &self.arguments;
        let mut inputs: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.bytes().to_vec()).collect();
        let own = self.graph.scalars().iter().zip(scalars);
        let bits: Vec<u64> = own
            .map(|(&value, scalar)| scalar.to_bits(self.graph.dtype(value)))
            .collect();
        let outputs = host.run(&mut inputs, &bits)?;
        let types = self
            .graph
            .outputs
            .iter()
            .map(|output| self.graph.ty(output.value));
        types
            .zip(outputs)
            .map(|(ty, bytes)| {
                HostTensor::from_bytes(ty.clone(), bytes).ok_or_else(|| format!("{ty} has another size"))
            })
            .collect()
    }
}

/// The kernel that writes an output, and where the sources are.
fn origin(step: &CudaStep, output: usize, host: &HostStep) -> String {
    let value = step.graph.outputs[output].value;
    let own = [Buffer::Output(output as u32), Buffer::Value(value)];
    let mut kernels = step.schedule.kernels.iter().zip(&step.kernels);
    let writer = kernels.find(|(kernel, _)| kernel.writes.iter().any(|buffer| own.contains(buffer)));
    let name = writer.map_or("no kernel", |(_, report)| &report.name);
    format!("{value}, written by {name} of {}", host.source().display())
}

/// A few roundings of a type, or of the type that it is computed in.
fn relative(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        _ => 2e-5,
    }
}

/// The largest finite element, at least 1.
fn largest(tensor: &HostTensor) -> f64 {
    let elements = tensor.to_f64s().into_iter().map(f64::abs);
    elements.filter(|x| x.is_finite()).fold(1.0, f64::max)
}
