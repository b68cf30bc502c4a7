//! Functions of functions: derivatives in both modes, and batching, of closures of tensors.
//!
//! A function here takes two arguments, each a tensor or a structure of tensors: the first has the
//! *parameters* of derivatives, the second everything else, `()` if there is nothing. Float tensors of the
//! first are differentiated; its integers and bools are constant.
//!
//! ```
//! use burn_tensor::Tensor;
//! use kiln::func::{Same, grad, vmap};
//! use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
//!
//! let device = KilnDevice::default();
//! let loss = |w: Tensor<Kiln, 1>, x: Tensor<Kiln, 1>| (w * x).sum().powf_scalar(2.0);
//! let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
//! let each = vmap(grad(loss)).with_options(options);
//!
//! // The gradient of the loss of each sample, by weights that are the same for all.
//! let w = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &device);
//! let samples = Tensor::<Kiln, 2>::from_floats([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], &device);
//! let gradients: Tensor<Kiln, 2> = each.call(Same(w), samples)?;
//! assert_eq!(gradients.into_data().to_vec::<f32>().unwrap(), [2.0, 0.0, 6.0, 6.0, 0.0, 16.0]);
//! # Ok::<(), kiln::func::FuncError>(())
//! ```
//!
//! Transforms apply to closures and to transformed functions: `vmap(grad(f))`, `jvp(grad(f))` (a Hessian
//! times a vector), `grad(vmap(f))`. A call runs the closure once, with its operations recorded and not run;
//! the recording is transformed by [`kiln_func`] and compiled, once for each recording, as
//! [`compile_fn`](crate::compile_fn()) compiles. Compiled functions and Burn's own autograd may be used
//! inside.
//!
//! - Tensors that the closure captures are constant: they have no derivative and are the same for all
//!   elements of a batch. A result that Burn's autograd tracks because of one (a parameter of a model) is an
//!   error, because that gradient would be lost: capture `model.valid()` or the tensor's `inner()`, or pass
//!   what is to be differentiated as an argument.
//! - The closure must not read a value, and tensors that it keeps elsewhere have no value afterwards.
//! - Random operations take their streams at each call, as without Kiln, and are constant to derivatives;
//!   [`Transformed::with_randomness`] says whether elements of a batch draw the same.
//! - A result is not tracked by Burn's autograd, so arguments that are tracked are an error: pass their
//!   `inner()`.
//! - Inside a region ([`crate::compile`], [`crate::compile_fn`], [`crate::TrainStep`]) a call is part of the
//!   region's graph: nothing is cut, and the function is replayed with the step. The closure runs when the
//!   region is recorded; another path through it, another shape or another exponent is another step. Options
//!   of the function are not used there.
//! - Inside the closure of another transformed function a call is part of that function. A tensor that the
//!   inner closure captures is constant to the inner transform and differentiated by the outer one.
//!
//! # In a training step
//!
//! The gradient of each sample, clipped by its norm, with noise on the sum: DP-SGD, replayed as one graph.
//!
//! ```
//! use burn_autodiff::Autodiff;
//! use burn_nn::{Linear, LinearConfig};
//! use burn_optim::SgdConfig;
//! use burn_tensor::{Distribution, Tensor};
//! use kiln::func::{Same, grad, vmap};
//! use kiln::{CompileBackend, Kiln, KilnDevice, TrainStep};
//!
//! type B = Autodiff<Kiln>;
//!
//! let error =
//!     |w: Tensor<Kiln, 2>, x: Tensor<Kiln, 1>| x.unsqueeze::<2>().matmul(w).powf_scalar(2.0).sum();
//! let private = move |model: &Linear<B>, samples: Tensor<B, 2>| {
//!     let w = model.weight.val();
//!     let each = vmap(grad(error)).call(Same(w.clone().inner()), samples.inner());
//!     let each: Tensor<Kiln, 3> = each.expect("it has a gradient");
//!     let norms = each.clone().powf_scalar(2.0).sum_dim(2).sum_dim(1).sqrt();
//!     let sum = (each / norms.clamp_min(1.0)).sum_dim(0).squeeze_dim::<2>(0);
//!     let noise = sum.random_like(Distribution::Normal(0.0, 0.1));
//!     // A loss whose gradient is this.
//!     (w * Tensor::from_inner(sum + noise)).sum()
//! };
//! let device = KilnDevice::cpu();
//! let model = LinearConfig::new(2, 1).with_bias(false).init::<B>(&device);
//! let mut step = TrainStep::new(model, SgdConfig::new().init(), private)
//!     .with_backend(CompileBackend::AotEager)
//!     .build()?;
//! for _ in 0..3 {
//!     step.step(0.1, Tensor::from_floats([[1.0, 0.0], [0.5, 2.0]], &device))?;
//! }
//! assert!(step.report().breaks.is_empty());
//! assert_eq!(step.history().replayed, 1);
//! # Ok::<(), kiln::TrainError>(())
//! ```

mod batch;
mod program;

use kiln_burn::record::{
    BreakReason, HostRead, Interrupted, Recorded, Traced, Transformed as Recording, TransformedRegion,
    inline, session,
};
use kiln_burn::storage::Storage;
use kiln_burn::{CompileOptions, CompiledRegion, Error, Kiln};

use burn_backend::{DType, TensorMetadata};
use burn_ir::TensorIr;
use burn_tensor::{Tensor, TensorPrimitive};
use kiln_graph::Graph;

pub use batch::{Batched, Element, Elements, Same};
pub use kiln_func::{Mode, Randomness};

use crate::input::{KilnTensor, StepInput};
use crate::tracked::tracked_tensors;
use program::{Layer, Program};

/// Why a function cannot be transformed, or its transform not run.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuncError {
    /// Recording, compiling or running failed.
    #[error(transparent)]
    Kiln(#[from] Error),
    /// The recording has no derivative, or no batched form.
    #[error("`{function}`: {source}")]
    Transform {
        /// Name of the function.
        function: String,
        /// The obstacle.
        source: kiln_func::FuncError,
    },
    /// The closure read a value.
    #[error(
        "`{function}` reads {}, and a function that is transformed has no values while it is recorded: {}",
        .read.as_ref().map_or_else(|| "a value".to_owned(), ToString::to_string),
        .read.as_ref().and_then(HostRead::counterpart)
            .unwrap_or_else(|| "move the read out of it, or choose with `mask_where`".to_owned())
    )]
    Reads {
        /// Name of the function.
        function: String,
        /// The read, if it is known.
        read: Option<HostRead>,
    },
    /// An argument is part of an autograd graph of Burn's.
    #[error(
        "an argument of `{function}` is tracked by autograd, which the result would not be: pass `Tensor::from_inner(x.inner())`"
    )]
    Tracked {
        /// Name of the function.
        function: String,
    },
    /// A result is part of an autograd graph of Burn's: the closure captures a tensor that is tracked.
    #[error(
        "a result of `{function}` depends on a tensor that autograd tracks, such as a parameter of a captured model, and its \
         gradient would be lost: pass it as an argument (its `inner()`) and differentiate with `kiln::func`, or, if it is \
         constant, capture it without its graph (`Tensor::from_inner(w.inner())`, `model.valid()`)"
    )]
    TrackedResult {
        /// Name of the function.
        function: String,
    },
    /// Batches of different sizes.
    #[error("one argument of `{function}` is a batch of {first}, another of {other}")]
    Sizes {
        /// Name of the function.
        function: String,
        /// Size of the first batch.
        first: usize,
        /// Size of another one.
        other: usize,
    },
    /// No argument is a batch.
    #[error("no argument of `{function}` is a batch: wrap in `Same` only what is the same for all elements")]
    NoBatch {
        /// Name of the function.
        function: String,
    },
    /// A gradient of a function that returns no float.
    #[error("the first tensor that `{function}` returns is what a gradient is of: it must be one float")]
    NoLoss {
        /// Name of the function.
        function: String,
    },
}

/// A function of parameters and other arguments: a closure, or a transform of another function.
pub trait Function<P, X> {
    /// The type of its result.
    type Output: StepInput;

    /// Runs the closure on placeholders, and notes the transforms of the recording.
    ///
    /// # Errors
    ///
    /// If the arguments do not fit the transform.
    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<Self::Output, FuncError>;
}

/// A trace of a function. Transforms make and read it; it has no use outside.
#[derive(Debug)]
pub struct Trace {
    function: String,
    /// Placeholders of the closure: its parameters, then the rest.
    parameters: Vec<KilnTensor>,
    rest: Vec<KilnTensor>,
    results: Vec<KilnTensor>,
    layers: Vec<Layer>,
}

impl Trace {
    fn new(function: &str) -> Self {
        Self {
            function: function.to_owned(),
            parameters: Vec::new(),
            rest: Vec::new(),
            results: Vec::new(),
            layers: Vec::new(),
        }
    }
}

/// The tensors of a structure, which stays as it is except for its place in an autograd graph.
fn tensors<T: StepInput>(structure: T) -> (T, Vec<KilnTensor>) {
    let mut found = Vec::new();
    let structure = structure.map(&mut |tensor: KilnTensor| {
        found.push(tensor.clone());
        tensor
    });
    (structure, found)
}

fn ir(tensor: &KilnTensor) -> TensorIr {
    // A copy beside the original: its status is read-only, so this is no last use.
    tensor.clone().into_ir()
}

impl<F, P, X, R> Function<P, X> for F
where
    F: Fn(P, X) -> R,
    P: StepInput,
    X: StepInput,
    R: StepInput,
{
    type Output = R;

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<R, FuncError> {
        // Placeholders are new tensors, so that a tensor that is also captured, or passed twice, is
        // distinct from the argument.
        let stand_in = |held: &mut Vec<KilnTensor>, tensor: KilnTensor| {
            let placeholder = tensor.client.zeros(tensor.shape(), tensor.dtype());
            held.push(placeholder.clone());
            placeholder
        };
        let parameters = parameters.map(&mut |tensor: KilnTensor| stand_in(&mut trace.parameters, tensor));
        let rest = rest.map(&mut |tensor: KilnTensor| stand_in(&mut trace.rest, tensor));
        let (result, tracked) = tracked_tensors(self(parameters, rest));
        // The placeholders are not tracked, so this gradient is by something else, and nobody would miss it.
        if !tracked.is_empty() {
            let function = trace.function.clone();
            return Err(FuncError::TrackedResult { function });
        }
        let (result, found) = tensors(result);
        trace.results = found;
        Ok(result)
    }
}

/// A transform of a function, as [`grad`] and the others return it. Called with [`Transformed::call`].
pub struct Transformed<T> {
    function: T,
    /// The name of the transform.
    transform: &'static str,
    options: CompileOptions,
    region: CompiledRegion,
    compiled: TransformedRegion,
}

impl<T> Transformed<T> {
    fn new(function: T, transform: &'static str, options: CompileOptions) -> Self {
        Self {
            function,
            transform,
            region: CompiledRegion::new(options.clone()).for_placeholders(),
            compiled: TransformedRegion::new(options.clone()),
            options,
        }
    }

    fn named(function: T, transform: &'static str) -> Self {
        crate::log::init_if_asked();
        Self::new(
            function,
            transform,
            CompileOptions::default().with_name(transform),
        )
    }

    /// The same function, compiled with other options.
    pub fn with_options(self, options: CompileOptions) -> Self {
        Self::new(self.function, self.transform, options)
    }

    /// How often something was compiled: once for each shape and path through the closure. Calls inside of
    /// regions are compiled with these.
    pub fn compiled(&self) -> usize {
        self.compiled.count()
    }

    /// Calls the function.
    ///
    /// # Errors
    ///
    /// [`FuncError`] if the closure cannot be recorded, transformed, compiled or run.
    ///
    /// # Panics
    ///
    /// If the closure panics, with the same payload.
    pub fn call<P, X>(&self, parameters: P, rest: X) -> Result<T::Output, FuncError>
    where
        T: Function<P, X>,
        P: StepInput,
        X: StepInput,
    {
        let function = || self.options.name.clone();
        let (parameters, tracked) = tracked_tensors(parameters);
        let (rest, also_tracked) = tracked_tensors(rest);
        if !tracked.is_empty() || !also_tracked.is_empty() {
            return Err(FuncError::Tracked { function: function() });
        }
        let (parameters, mut arguments) = tensors(parameters);
        let (rest, of_rest) = tensors(rest);
        arguments.extend(of_rest);
        if session::is_inside_region() {
            return self.call_inside(parameters, rest, arguments);
        }
        // In a rehearsal this is its end.
        let fetch = |tensor: &KilnTensor| session::fetch(&ir(tensor), BreakReason::OutsideOperation);
        let given = arguments.iter().map(fetch);
        let given = given.collect::<Result<Vec<Storage>, Error>>()?;
        let (output, called) = self.record(parameters, rest)?;
        let given = called.given(given, Storage::dtype);
        let outputs = self.compiled.run(called.recording(), &given, called.transform());
        let mut outputs = outputs?.into_iter();
        Ok(output.map(&mut |like: KilnTensor| match outputs.next() {
            Some(storage) => like.client.adopt(storage.with_dtype(like.dtype())),
            None => like,
        }))
    }

    /// A call inside a region: the transformed function becomes one operation of the region's recording.
    fn call_inside<P, X>(
        &self,
        parameters: P,
        rest: X,
        arguments: Vec<KilnTensor>,
    ) -> Result<T::Output, FuncError>
    where
        T: Function<P, X>,
        P: StepInput,
        X: StepInput,
    {
        let mut trace = Trace::new(&self.options.name);
        let recorded = session::record_part(self.transform, || {
            self.function.trace(parameters, rest, &mut trace)
        });
        let (output, recorded) = recorded.map_err(|interrupted| match *interrupted {
            Interrupted { read: None, error } => FuncError::from(error),
            Interrupted { read, .. } => FuncError::Reads {
                function: self.options.name.clone(),
                read,
            },
        })?;
        let output = output.inspect_err(|_| inline::abandon(&recorded))?;
        let called = Called::new(trace, recorded);
        let (output, like) = tensors(output);
        let Some(client) = like.first().map(|like| like.client) else {
            return Ok(output);
        };
        let given = called.given(arguments, KilnTensor::dtype);
        let results: Vec<DType> = like.iter().map(KilnTensor::dtype).collect();
        drop(like);
        let (recording, transform) = (called.recording(), called.transform());
        let outputs = inline::call(self.transform, client, recording, given, &results, transform)?;
        let mut outputs = outputs.into_iter();
        Ok(output.map(&mut |like: KilnTensor| outputs.next().unwrap_or(like)))
    }

    /// Records the closure on placeholders. Also returns its result, whose tensors are yet to be filled in.
    fn record<P, X>(&self, parameters: P, rest: X) -> Result<(T::Output, Called), FuncError>
    where
        T: Function<P, X>,
        P: StepInput,
        X: StepInput,
    {
        let mut trace = Trace::new(&self.options.name);
        let traced = self.region.trace(
            self.compiled.is_empty(),
            || self.function.trace(parameters, rest, &mut trace),
            |output, recorded| Ok((output, recorded)),
        );
        let read = self.region.last_host_read();
        match traced? {
            Traced::Whole((output, recorded)) if read.is_none() => {
                Ok((output?, Called::new(trace, recorded)))
            }
            _ => Err(FuncError::Reads {
                function: self.options.name.clone(),
                read,
            }),
        }
    }
}

/// A recorded call of a closure.
struct Called {
    trace: Trace,
    recorded: Recorded,
    arguments: Vec<TensorIr>,
    results: Vec<TensorIr>,
}

impl Called {
    fn new(trace: Trace, recorded: Recorded) -> Self {
        Self {
            recorded,
            arguments: trace.parameters.iter().chain(&trace.rest).map(ir).collect(),
            results: trace.results.iter().map(ir).collect(),
            trace,
        }
    }

    /// The tensors that the transformed graph takes, of those that the caller gives: tangents and cotangents
    /// follow the closure's own arguments, and only floats have any.
    fn given<S>(&self, tensors: Vec<S>, dtype: impl Fn(&S) -> DType) -> Vec<S> {
        let own = self.arguments.len();
        let given = tensors.into_iter().enumerate();
        let taken = given.filter(|(index, tensor)| *index < own || dtype(tensor).is_float());
        taken.map(|(_, tensor)| tensor).collect()
    }

    fn recording(&self) -> Recording<'_> {
        Recording {
            recorded: &self.recorded,
            arguments: &self.arguments,
            results: &self.results,
            transform: format!("{} {:?}", self.trace.parameters.len(), self.trace.layers),
        }
    }

    /// The transform of the closure's graph.
    fn transform(&self) -> impl FnOnce(Graph) -> Result<Graph, FuncError> {
        |graph| {
            let program = Program::new(graph, self.trace.parameters.len(), self.arguments.len());
            let transformed = program.transform(&self.trace.layers);
            transformed
                .map(Program::into_graph)
                .map_err(|source| FuncError::Transform {
                    function: self.trace.function.clone(),
                    source,
                })
        }
    }
}

impl<T: Function<P, X>, P, X> Function<P, X> for Transformed<T> {
    type Output = T::Output;

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<T::Output, FuncError> {
        self.function.trace(parameters, rest, trace)
    }
}

/// See [`grad`].
pub struct Grad<F>(F);
/// See [`value_and_grad`].
pub struct ValueAndGrad<F>(F);
/// See [`vjp`].
pub struct Vjp<F>(F);
/// See [`jvp`].
pub struct Jvp<F>(F);
/// See [`jacobian`].
pub struct Jacobian<F>(F, Mode);
/// See [`hessian`].
pub struct Hessian<F>(F);
/// See [`vmap`].
pub struct Vmap<F>(F, Randomness);

/// The gradient of the first tensor that `function` returns, which has one element, with respect to the
/// parameters: `(P, X) -> P`.
pub fn grad<F>(function: F) -> Transformed<Grad<F>> {
    Transformed::named(Grad(function), "grad")
}

/// The result of `function`, and the gradient of [`grad`]: `(P, X) -> (R, P)`.
pub fn value_and_grad<F>(function: F) -> Transformed<ValueAndGrad<F>> {
    Transformed::named(ValueAndGrad(function), "value_and_grad")
}

/// Reverse mode, given cotangents of the result of `function`: `(P, (X, R)) -> (R, P)`, the value and the
/// cotangents of the parameters.
pub fn vjp<F>(function: F) -> Transformed<Vjp<F>> {
    Transformed::named(Vjp(function), "vjp")
}

/// Forward mode, given tangents of the parameters: `(P, (X, P)) -> (R, R)`, the value and its tangents.
pub fn jvp<F>(function: F) -> Transformed<Jvp<F>> {
    Transformed::named(Jvp(function), "jvp")
}

/// The Jacobian of each float tensor that `function` returns (outer list) with respect to each float
/// parameter (inner list): a matrix whose rows count the elements of the result and whose columns those of
/// the parameter, both row-major.
pub fn jacobian<F>(function: F) -> Transformed<Jacobian<F>> {
    Transformed::named(Jacobian(function, Mode::default()), "jacobian")
}

/// Second derivatives of the first tensor that `function` returns, which has one element: for each pair of
/// float parameters a matrix, the [`jacobian`] of the gradient.
pub fn hessian<F>(function: F) -> Transformed<Hessian<F>> {
    Transformed::named(Hessian(function), "hessian")
}

/// `function` for each element of a batch. The first dimension of arguments counts the elements, except in
/// [`Same`]; so does that of results. The function sees tensors of one dimension less, which have at least
/// one: one number for each element of the batch, such as a label, is passed as `[n, 1]`.
pub fn vmap<F>(function: F) -> Transformed<Vmap<F>> {
    Transformed::named(Vmap(function, Randomness::default()), "vmap")
}

impl<F> Transformed<Vmap<F>> {
    /// Whether random operations draw the same for each element of the batch (the default) or different
    /// numbers.
    pub fn with_randomness(self, randomness: Randomness) -> Self {
        Self::new(Vmap(self.function.0, randomness), self.transform, self.options)
    }
}

impl<F> Transformed<Jacobian<F>> {
    /// The mode that computes the Jacobian: both give the same result up to rounding.
    pub fn with_mode(self, mode: Mode) -> Self {
        Self::new(Jacobian(self.function.0, mode), self.transform, self.options)
    }
}

/// The float tensors of a structure.
fn floats<T: StepInput>(structure: T) -> (T, Vec<KilnTensor>) {
    let (structure, mut found) = tensors(structure);
    found.retain(|tensor| tensor.dtype().is_float());
    (structure, found)
}

/// Adds a layer on a function whose first result is a number.
fn of_number<R: StepInput>(result: R, layer: Layer, trace: &mut Trace) -> Result<R, FuncError> {
    let (result, found) = tensors(result);
    let fits = found.first().is_some_and(|loss| loss.dtype().is_float());
    if !fits {
        return Err(FuncError::NoLoss {
            function: trace.function.clone(),
        });
    }
    trace.layers.push(layer);
    Ok(result)
}

/// A matrix for each pair, with elements like those of the columns. They are filled when the function has
/// run.
fn matrices(rows: &[KilnTensor], columns: &[KilnTensor]) -> Vec<Vec<Tensor<Kiln, 2>>> {
    let matrix = |column: &KilnTensor| {
        let empty = column.client.zeros([0, 0].into(), column.dtype());
        Tensor::from_primitive(TensorPrimitive::Float(empty))
    };
    rows.iter()
        .map(|_| columns.iter().map(matrix).collect())
        .collect()
}

impl<F: Function<P, X>, P: StepInput + Clone, X> Function<P, X> for Grad<F> {
    type Output = P;

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<P, FuncError> {
        let result = self.0.trace(parameters.clone(), rest, trace)?;
        of_number(result, Layer::Grad { value: false }, trace)?;
        Ok(parameters)
    }
}

impl<F: Function<P, X>, P: StepInput + Clone, X> Function<P, X> for ValueAndGrad<F> {
    type Output = (F::Output, P);

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<Self::Output, FuncError> {
        let result = self.0.trace(parameters.clone(), rest, trace)?;
        let result = of_number(result, Layer::Grad { value: true }, trace)?;
        Ok((result, parameters))
    }
}

impl<F, P, X> Function<P, (X, F::Output)> for Vjp<F>
where
    F: Function<P, X>,
    P: StepInput + Clone,
{
    type Output = (F::Output, P);

    fn trace(
        &self,
        parameters: P,
        (rest, _): (X, F::Output),
        trace: &mut Trace,
    ) -> Result<Self::Output, FuncError> {
        let result = self.0.trace(parameters.clone(), rest, trace)?;
        trace.layers.push(Layer::Vjp);
        Ok((result, parameters))
    }
}

impl<F, P, X> Function<P, (X, P)> for Jvp<F>
where
    F: Function<P, X>,
    F::Output: Clone,
{
    type Output = (F::Output, F::Output);

    fn trace(&self, parameters: P, (rest, _): (X, P), trace: &mut Trace) -> Result<Self::Output, FuncError> {
        let result = self.0.trace(parameters, rest, trace)?;
        trace.layers.push(Layer::Jvp);
        Ok((result.clone(), result))
    }
}

impl<F: Function<P, X>, P: StepInput, X> Function<P, X> for Jacobian<F> {
    type Output = Vec<Vec<Tensor<Kiln, 2>>>;

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<Self::Output, FuncError> {
        let (parameters, columns) = floats(parameters);
        let (_, rows) = floats(self.0.trace(parameters, rest, trace)?);
        trace.layers.push(Layer::Jacobian(self.1));
        Ok(matrices(&rows, &columns))
    }
}

impl<F: Function<P, X>, P: StepInput, X> Function<P, X> for Hessian<F> {
    type Output = Vec<Vec<Tensor<Kiln, 2>>>;

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<Self::Output, FuncError> {
        let (parameters, found) = floats(parameters);
        let result = self.0.trace(parameters, rest, trace)?;
        of_number(result, Layer::Hessian, trace)?;
        Ok(matrices(&found, &found))
    }
}

impl<F, P, X> Function<P, X> for Vmap<F>
where
    P: Batched,
    X: Batched,
    F: Function<P::Element, X::Element>,
    F::Output: Element,
{
    type Output = <F::Output as Element>::Batched;

    fn trace(&self, parameters: P, rest: X, trace: &mut Trace) -> Result<Self::Output, FuncError> {
        let mut elements = Elements::default();
        let parameters = parameters.element(&mut elements);
        let of_parameters = std::mem::take(&mut elements.varies);
        let rest = rest.element(&mut elements);
        let size = elements.size(&trace.function)?;
        let result = self.0.trace(parameters, rest, trace)?;
        trace.layers.push(Layer::Vmap {
            parameters: of_parameters,
            rest: elements.varies,
            size,
            randomness: self.1,
        });
        Ok(result.batched())
    }
}
