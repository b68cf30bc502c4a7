//! The recording of a closure as a graph, and the result of each transform on it.

use kiln_func::{FuncError, Mode, Randomness};
use kiln_graph::op::Op;
use kiln_graph::{Graph, Output, Provenance, Shape, Value};

/// A transform with its options. Its text is part of a compiled function's identity.
#[derive(Clone, Debug)]
pub(super) enum Layer {
    /// The gradient; also the value if that is wanted.
    Grad {
        value: bool,
    },
    Vjp,
    Jvp,
    Jacobian(Mode),
    Hessian,
    /// Which tensors of either argument are a batch.
    Vmap {
        parameters: Vec<bool>,
        rest: Vec<bool>,
        size: usize,
        randomness: Randomness,
    },
}

/// A graph, and the positions of the tensors of the two arguments among its parameters; tensors that the
/// graph does not read have no position. The other parameters are tensors that the closure captures. Its
/// outputs are the tensors that the function returns, in order.
pub(super) struct Program {
    graph: Graph,
    parameters: Vec<usize>,
    rest: Vec<Option<usize>>,
}

type Result<T> = std::result::Result<T, FuncError>;

impl Program {
    /// A graph whose first parameters are those of the closure: `parameters` of the first argument,
    /// `arguments` of both.
    pub(super) fn new(graph: Graph, parameters: usize, arguments: usize) -> Self {
        Self {
            graph,
            parameters: (0..parameters).collect(),
            rest: (parameters..arguments).map(Some).collect(),
        }
    }

    pub(super) fn into_graph(self) -> Graph {
        self.graph
    }

    /// Applies the layers, the innermost first.
    pub(super) fn transform(mut self, layers: &[Layer]) -> Result<Self> {
        for layer in layers {
            self = match layer {
                Layer::Grad { value } => self.grad(*value)?,
                Layer::Vjp => self.vjp()?,
                Layer::Jvp => self.jvp()?,
                Layer::Jacobian(mode) => self.jacobian(*mode)?,
                Layer::Hessian => self.hessian()?,
                Layer::Vmap {
                    parameters,
                    rest,
                    size,
                    randomness,
                } => self.vmap(parameters, rest, *size, *randomness)?,
            };
        }
        Ok(self)
    }

    fn is_float(&self, value: Value) -> bool {
        self.graph.dtype(value).is_float()
    }

    /// The parameters that are differentiated.
    fn wrt(&self) -> Vec<usize> {
        let is_float = |&index: &usize| self.is_float(self.graph.parameters()[index]);
        self.parameters.iter().copied().filter(is_float).collect()
    }

    /// The outputs that are differentiated.
    fn float_outputs(&self) -> Vec<usize> {
        let outputs = 0..self.graph.outputs.len();
        outputs
            .filter(|&index| self.is_float(self.graph.outputs[index].value))
            .collect()
    }

    /// The graph with these outputs.
    fn with_outputs(mut self, graph: Graph, outputs: Vec<Output>) -> Self {
        self.graph = graph;
        self.graph.outputs = outputs;
        self.graph = self.graph.without_dead_code();
        self
    }

    /// For each parameter its gradient: of floats those in `gradients`; other parameters are returned
    /// themselves.
    fn by_parameter(&self, graph: &Graph, gradients: &[Output]) -> Vec<Output> {
        let mut gradients = gradients.iter();
        let of = |&index: &usize| {
            let value = graph.parameters()[index];
            let itself = Output {
                value,
                alias: None,
                check: false,
            };
            match graph.dtype(value).is_float() {
                true => gradients.next().copied().unwrap_or(itself),
                false => itself,
            }
        };
        self.parameters.iter().map(of).collect()
    }

    fn grad(self, value: bool) -> Result<Self> {
        let graph = kiln_func::value_and_grad(&self.graph, &self.wrt(), 0)?;
        let (values, gradients) = graph.outputs.split_at(self.graph.outputs.len());
        let mut outputs = if value { values.to_vec() } else { Vec::new() };
        outputs.extend(self.by_parameter(&graph, gradients));
        Ok(self.with_outputs(graph, outputs))
    }

    fn vjp(mut self) -> Result<Self> {
        let differentiated = self.float_outputs();
        let graph = kiln_func::vjp(&self.graph, &self.wrt(), &differentiated)?;
        let mut next = self.graph.parameters().len();
        for index in 0..self.graph.outputs.len() {
            let has = differentiated.contains(&index);
            self.rest.push(has.then_some(next));
            next += usize::from(has);
        }
        let (values, gradients) = graph.outputs.split_at(self.graph.outputs.len());
        let mut outputs = values.to_vec();
        outputs.extend(self.by_parameter(&graph, gradients));
        Ok(self.with_outputs(graph, outputs))
    }

    fn jvp(mut self) -> Result<Self> {
        let differentiated = self.float_outputs();
        let wrt = self.wrt();
        let graph = kiln_func::jvp(&self.graph, &wrt, &differentiated)?;
        let mut next = self.graph.parameters().len();
        for index in &self.parameters {
            let has = wrt.contains(index);
            self.rest.push(has.then_some(next));
            next += usize::from(has);
        }
        let (values, tangents) = graph.outputs.split_at(self.graph.outputs.len());
        let mut outputs = values.to_vec();
        let mut tangents = tangents.iter();
        outputs.extend(
            values
                .iter()
                .map(|&value| match graph.dtype(value.value).is_float() {
                    true => tangents.next().copied().unwrap_or(value),
                    false => value,
                }),
        );
        Ok(self.with_outputs(graph, outputs))
    }

    fn jacobian(self, mode: Mode) -> Result<Self> {
        let (wrt, outputs) = (self.wrt(), self.float_outputs());
        let rows: Vec<Shape> = outputs
            .iter()
            .map(|&index| self.graph.shape(self.graph.outputs[index].value).clone())
            .collect();
        let graph = kiln_func::jacobian(&self.graph, &wrt, &outputs, mode)?;
        self.into_matrices(graph, &rows)
    }

    fn hessian(self) -> Result<Self> {
        let wrt = self.wrt();
        let rows: Vec<Shape> = wrt
            .iter()
            .map(|&index| self.graph.shape(self.graph.parameters()[index]).clone())
            .collect();
        let graph = kiln_func::hessian(&self.graph, &wrt, 0)?;
        self.into_matrices(graph, &rows)
    }

    /// Outputs of extents `rows`, then those of a parameter, for each of both, as matrices.
    fn into_matrices(self, mut graph: Graph, rows: &[Shape]) -> Result<Self> {
        let columns = self.wrt();
        let mut outputs = Vec::with_capacity(graph.outputs.len());
        for (position, output) in graph.outputs.clone().into_iter().enumerate() {
            let row = &rows[position / columns.len().max(1)];
            let column = graph
                .shape(graph.parameters()[columns[position % columns.len().max(1)]])
                .clone();
            let shape = Shape::from([row.numel(), column.numel()]);
            let value = match *graph.shape(output.value) == shape {
                true => output.value,
                false => graph.add(Op::Reshape(shape), &[output.value], &Provenance::default())?,
            };
            outputs.push(Output { value, ..output });
        }
        Ok(self.with_outputs(graph, outputs))
    }

    fn vmap(
        mut self,
        parameters: &[bool],
        rest: &[bool],
        size: usize,
        randomness: Randomness,
    ) -> Result<Self> {
        let mut in_dims = vec![None; self.graph.parameters().len()];
        for (&index, &varies) in self.parameters.iter().zip(parameters) {
            in_dims[index] = varies.then_some(0);
        }
        for (index, &varies) in self.rest.iter().zip(rest) {
            if let Some(index) = *index {
                in_dims[index] = varies.then_some(0);
            }
        }
        let out_dims = vec![Some(0); self.graph.outputs.len()];
        self.graph = kiln_func::vmap(&self.graph, &in_dims, size, &out_dims, randomness)?;
        Ok(self)
    }
}
