//! `compile_fn`: a function whose tensor operations become one executable, and whose gradients become another.

use std::sync::atomic::{AtomicBool, Ordering};

use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn_tensor::{Tensor, TensorPrimitive};
use kiln_burn::record::{SplitRegion, session};
use kiln_burn::{CompileBackend, CompileOptions, CompiledRegion, Error, RegionReport};

use crate::explain::Explain;
use crate::input::StepInput;
use crate::tracked::{self, Collect, Leaves};
use crate::train::TrainBackend;

/// Compiles a function, most often a forward pass: `let forward = kiln::compile_fn(move |x| model.forward(x));`. Default options; see
/// [`CompiledFn::with_options`]. Several arguments go in as a tuple.
///
/// ```
/// use burn_tensor::Tensor;
/// use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
///
/// let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
/// let square = kiln::compile_fn(|x: Tensor<Kiln, 1>| x.clone() * x).with_options(options);
/// let x = Tensor::from_floats([1.0, 2.0], &KilnDevice::default());
/// assert_eq!(square.call(x)?.into_data().to_vec::<f32>().unwrap(), [1.0, 4.0]);
/// # Ok::<(), kiln::Error>(())
/// ```
///
/// In an eager training loop, call it with tracked tensors, or with the model whose parameters are to be trained ([`CompiledFn::call_with`]). The result is then part of the
/// program's autograd graph, and its gradients come from a compiled backward pass:
///
/// ```
/// use burn_autodiff::Autodiff;
/// use burn_nn::{Linear, LinearConfig};
/// use burn_optim::{GradientsParams, Optimizer, SgdConfig};
/// use burn_tensor::Tensor;
/// use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
///
/// type B = Autodiff<Kiln>;
///
/// let device = KilnDevice::default();
/// let mut model: Linear<B> = LinearConfig::new(2, 1).init(&device);
/// let mut optim = SgdConfig::new().init();
/// let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
/// let forward = kiln::compile_fn(|model: &Linear<B>, x: Tensor<B, 2>| model.forward(x)).with_options(options);
/// for _ in 0..3 {
///     let x = Tensor::from_floats([[1.0, 2.0]], &device);
///     let loss = forward.call_with(&model, x)?.powf_scalar(2.0).mean();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optim.step(0.1, model, gradients);
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
pub fn compile_fn<F>(function: F) -> CompiledFn<F> {
    crate::log::init_if_asked();
    CompiledFn::new(function, CompileOptions::default().with_name("function"))
}

/// A compiled function: made by [`compile_fn`].
pub struct CompiledFn<F> {
    /// Calls without tracked tensors.
    region: CompiledRegion,
    /// Calls with some.
    split: SplitRegion,
    backend: CompileBackend,
    fullgraph: bool,
    name: String,
    warned: AtomicBool,
    function: F,
}

impl<F> CompiledFn<F> {
    fn new(function: F, options: CompileOptions) -> Self {
        Self {
            split: SplitRegion::new(options.clone()),
            backend: options.backend,
            fullgraph: options.fullgraph,
            name: options.name.clone(),
            warned: AtomicBool::new(false),
            region: CompiledRegion::new(options),
            function,
        }
    }

    /// The same function, compiled with other options. In calls with tracked tensors a memory budget holds for the intermediate values of the forward and of the backward
    /// pass and what is kept between them, all together: forward values are computed again in the backward pass as far as it takes.
    pub fn with_options(self, options: CompileOptions) -> Self {
        Self::new(self.function, options)
    }

    /// Calls the function. Its tensor operations are recorded and run as one executable; see [`crate::Compiled::run`].
    ///
    /// If some of the arguments are tracked by Burn's autograd, the function's gradients with respect to them are recorded and compiled, too, and the result is tracked.
    /// Tensors that the function captures count as constants: pass what is trained as an argument, or as the model of [`CompiledFn::call_with`]. A function that reads a
    /// value cannot be compiled with its gradients, and runs eagerly, after one warning.
    ///
    /// # Errors
    ///
    /// As [`crate::Compiled::run`].
    ///
    /// # Panics
    ///
    /// If the function panics, with the same payload.
    pub fn call<A, R>(&self, arguments: A) -> Result<R, Error>
    where
        F: Fn(A) -> R,
        A: StepInput + Clone,
        R: StepInput,
    {
        let (arguments, tracked) = tracked::tracked_tensors(arguments);
        if tracked.is_empty() || !self.compiles() {
            return self.region.run(|| (self.function)(arguments));
        }
        let traced = |leaves: &mut Leaves| (self.function)(arguments.clone().map(leaves));
        match tracked::call(&self.split, tracked, traced)? {
            Some(result) => Ok(result),
            None => self.eagerly(|| (self.function)(arguments)),
        }
    }

    /// Calls a function of a model and an input. The model's parameters are tracked as they are in the program: their gradients are found where the program looks for
    /// them, also if the program uses them elsewhere. Otherwise as [`CompiledFn::call`].
    ///
    /// # Errors
    ///
    /// As [`CompiledFn::call`].
    ///
    /// # Panics
    ///
    /// If the function panics, with the same payload.
    pub fn call_with<B, M, A, R>(&self, model: &M, input: A) -> Result<R, Error>
    where
        F: Fn(&M, A) -> R,
        B: TrainBackend,
        M: AutodiffModule<B>,
        A: StepInput + Clone,
        R: StepInput,
    {
        let mut parameters = Parameters(Collect::default());
        model.visit(&mut parameters);
        let (input, inputs) = tracked::tracked_tensors(input);
        let mut tracked = parameters.0.0;
        tracked.extend(inputs);
        if tracked.is_empty() || !self.compiles() {
            return self.region.run(|| (self.function)(model, input));
        }
        let traced = |leaves: &mut Leaves| {
            let model = model.clone().map(&mut Replace(leaves));
            (self.function)(&model, input.clone().map(leaves))
        };
        match tracked::call(&self.split, tracked, traced)? {
            Some(result) => Ok(result),
            None => self.eagerly(|| (self.function)(model, input)),
        }
    }

    /// Whether a call is compiled by itself: inside a region it is part of that.
    fn compiles(&self) -> bool {
        self.backend != CompileBackend::Eager && !session::is_nested()
    }

    fn eagerly<R>(&self, function: impl FnOnce() -> R) -> Result<R, Error> {
        if self.fullgraph {
            return Err(Error::ReadInTrace {
                region: self.name.clone(),
            });
        }
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "kiln",
                function = %self.name,
                "the function reads a value, so it cannot be compiled together with its gradients: it runs eagerly where arguments are tracked"
            );
        }
        Ok(function())
    }

    /// What was compiled for calls without tracked tensors, why, and what cut it; see [`CompiledFn::explain_tracked`] for the others.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report())
    }

    /// What was compiled for calls with tracked tensors.
    pub fn explain_tracked(&self) -> String {
        self.split.report()
    }

    /// How many pairs of forward and backward pass were compiled for calls with tracked tensors.
    pub fn compiled_pairs(&self) -> usize {
        self.split.count()
    }

    /// The numbers behind [`CompiledFn::explain`].
    pub fn report(&self) -> RegionReport {
        self.region.report()
    }

    /// The function.
    pub fn into_inner(self) -> F {
        self.function
    }
}

/// The tracked parameters of a module, in order.
struct Parameters(Collect);

impl<B: TrainBackend> ModuleVisitor<B> for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        B::map_float(param.val().into_primitive().tensor(), &mut self.0);
    }
}

/// Puts leaves in the place of tracked parameters, in the same order.
struct Replace<'a>(&'a mut Leaves);

impl<B: TrainBackend> ModuleMapper<B> for Replace<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let primitive = B::map_float(tensor.into_primitive().tensor(), self.0);
        let tensor = Tensor::from_primitive(TensorPrimitive::Float(primitive));
        Param::from_mapped_value(id, tensor, mapper)
    }
}
