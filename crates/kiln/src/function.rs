//! `compile_fn`: a function whose tensor operations become one executable, and whose gradients become
//! another.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use burn_backend::ops::FloatTensorOps;
use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn_tensor::{Tensor, TensorPrimitive};
use kiln_burn::record::{BreakReason, SplitRegion, export_function, session};
use kiln_burn::{CompileBackend, CompileOptions, CompiledRegion, Error, RegionReport};

use crate::explain::Explain;
use crate::input::{KilnTensor, StepInput, TensorMap, inspect};
use crate::tracked::{self, Called, Collect, Leaves, TrackedTensor, Tracking};
use crate::train::{ExportError, TrainBackend};

/// Compiles a function, most often a forward pass:
/// `let forward = kiln::compile_fn(move |x| model.forward(x));`. Default options; see
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
/// In an eager training loop, call it with tracked tensors, or with the model whose parameters are to be
/// trained ([`CompiledFn::call_with`]). The result is then part of the program's autograd graph, and its
/// gradients come from a compiled backward pass:
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
    name: String,
    tracked: Mutex<TrackedCalls>,
    function: F,
}

/// Observations of the function in calls with tracked tensors, arguments or captured ones.
#[derive(Default)]
struct TrackedCalls {
    calls: u64,
    /// Those with Burn's own backward pass.
    plain: u64,
    /// The next call to be traced, if the function read a value when it was traced last.
    next_trace: u64,
    /// Whether the function reads values.
    reads: bool,
    /// Whether the function captures tensors that are trained.
    captures: bool,
}

impl<F> CompiledFn<F> {
    fn new(function: F, options: CompileOptions) -> Self {
        Self {
            split: SplitRegion::new(options.clone()),
            backend: options.backend,
            name: options.name.clone(),
            tracked: Mutex::default(),
            region: CompiledRegion::new(options).for_function(),
            function,
        }
    }

    /// The same function, compiled with other options. In calls with tracked tensors a memory budget holds
    /// for the sum of three amounts: the intermediate values of the forward pass, those of the backward
    /// pass, and the values kept between them. To stay within it, the backward pass computes forward values
    /// again.
    pub fn with_options(self, options: CompileOptions) -> Self {
        Self::new(self.function, options)
    }

    /// Calls the function. Its tensor operations are recorded and run as one executable; see
    /// [`crate::Compiled::run`].
    ///
    /// If some of the arguments are tracked by Burn's autograd, the function's gradients with respect to them
    /// are recorded and compiled, too, and the result is tracked.
    ///
    /// There are two exceptions: a function that reads a value, and one that captures tensors that are
    /// trained (pass those as arguments, or as the model of [`CompiledFn::call_with`]). Such a function is
    /// compiled as in [`crate::Compiled::run`], and its backward pass is Burn's own, after one warning;
    /// [`CompiledFn::explain_tracked`] says how often. Each call runs the function once, as without Kiln:
    /// tensors that it leaves in cells of its own, and the random numbers that it draws, are the same.
    ///
    /// # Errors
    ///
    /// As [`crate::Compiled::run`], and [`Error::TrackedCapture`] if the function captures a tensor that
    /// follows from trained ones.
    ///
    /// # Panics
    ///
    /// If the function panics, with the same payload. A backward pass panics if it reaches a tensor that the
    /// function kept elsewhere without returning it, or that the function returned detached only.
    pub fn call<A, R>(&self, arguments: A) -> Result<R, Error>
    where
        F: Fn(A) -> R,
        A: StepInput + Clone,
        R: StepInput,
    {
        let mut tensors = Collect::default();
        let arguments = arguments.map(&mut tensors);
        if tensors.tracked.is_empty() {
            return Ok(self.note_captured(self.region.run(|| (self.function)(arguments))?));
        }
        if !self.compiles() || !self.is_traced() {
            return self.region.run(|| (self.function)(arguments));
        }
        let traced = |leaves: &mut Leaves| (self.function)(arguments.map(leaves));
        let called = tracked::call(&self.region, &self.split, tensors, traced)?;
        Ok(self.note(called))
    }

    /// Calls the function twice, because a first call may draw parameters that were never used before, and
    /// writes it to a folder, as [`crate::TrainStep::export`] does with a training step: `kiln_run` then
    /// computes it without Kiln. It is called on copies of the example's tensors, so each of them is an input
    /// of its own, also if one was passed twice or the function captures it. Tensors that the function
    /// captures, such as a model's parameters, and numbers that it computes on the host are constants of the
    /// exported function. Returns the result of the second call.
    ///
    /// ```no_run
    /// # use burn_tensor::Tensor;
    /// # use kiln::{Kiln, KilnDevice};
    /// let weight = Tensor::<Kiln, 2>::ones([3, 2], &KilnDevice::default());
    /// let forward = kiln::compile_fn(move |x: Tensor<Kiln, 2>| x.matmul(weight.clone()));
    /// let example = Tensor::zeros([8, 3], &KilnDevice::default());
    /// forward.export(example, "exported")?;
    /// # Ok::<(), kiln::ExportError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the call fails, the function is cut by a graph break or keeps a tensor elsewhere, or the folder
    /// cannot be written.
    ///
    /// # Panics
    ///
    /// If the function panics, with the same payload.
    pub fn export<A, R>(&self, example: A, folder: impl AsRef<Path>) -> Result<R, ExportError>
    where
        F: Fn(A) -> R,
        A: StepInput + Clone,
        R: StepInput,
    {
        if session::is_nested() {
            return Err(ExportError::Nothing);
        }
        let mut copies = Copies(None);
        let example = example.map(&mut copies);
        if let Some(error) = copies.0 {
            return Err(error.into());
        }
        let (fresh, _) = inspect(&example);
        self.region.run(|| (self.function)(example.clone()))?;
        self.region.keep_host_data(true);
        let called = self.region.run(|| (self.function)(example.clone()));
        self.region.keep_host_data(false);
        let result = called?;
        let run = self.region.last_run().ok_or(ExportError::Nothing)?;
        let results: Vec<_> = inspect(&result).0.iter().map(|ir| ir.id).collect();
        export_function(&run, &fresh, &results, &self.region.options(), folder.as_ref())?;
        Ok(result)
    }

    /// Calls a function of a model and an input. The model's parameters are tracked as they are in the
    /// program: their gradients are found where the program looks for them, also if the program uses them
    /// elsewhere. Otherwise as [`CompiledFn::call`].
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
        let mut tensors = parameters.0;
        let input = input.map(&mut tensors);
        if tensors.tracked.is_empty() {
            return Ok(self.note_captured(self.region.run(|| (self.function)(model, input))?));
        }
        if !self.compiles() || !self.is_traced() {
            return self.region.run(|| (self.function)(model, input));
        }
        let traced = |leaves: &mut Leaves| {
            let model = model.clone().map(&mut Replace(leaves));
            (self.function)(&model, input.map(leaves))
        };
        let called = tracked::call(&self.region, &self.split, tensors, traced)?;
        Ok(self.note(called))
    }

    /// Whether a call is compiled by itself: inside a region it is part of that.
    fn compiles(&self) -> bool {
        self.backend != CompileBackend::Eager && !session::is_nested()
    }

    /// Counts a call with tracked tensors, and says whether it is traced with its gradients.
    fn is_traced(&self) -> bool {
        let mut tracked = self.tracked.lock().unwrap_or_else(PoisonError::into_inner);
        tracked.calls += 1;
        let traced = !tracked.captures && tracked.calls >= tracked.next_trace;
        tracked.plain += u64::from(!traced);
        traced
    }

    /// Notes the observations of a traced call, and warns the first time.
    fn note<R>(&self, called: Called<R>) -> R {
        let mut tracked = self.tracked.lock().unwrap_or_else(PoisonError::into_inner);
        match called {
            Called::Compiled(result) => result,
            Called::Read(result) => {
                tracked.plain += 1;
                // A function that reads a value now and then is compiled in between; one that always reads
                // is hardly ever traced in vain.
                tracked.next_trace = 2 * tracked.calls;
                if !std::mem::replace(&mut tracked.reads, true) {
                    self.warn(READS);
                }
                result
            }
            Called::Captured(result) => {
                if !std::mem::replace(&mut tracked.captures, true) {
                    self.warn(CAPTURES);
                }
                result
            }
        }
    }

    /// Notes a call without tracked arguments whose result is tracked all the same: what it follows from was
    /// captured.
    fn note_captured<R: StepInput>(&self, result: R) -> R {
        if !self.compiles() {
            return result;
        }
        let (result, tracked) = tracked::tracked_tensors(result);
        if tracked.is_empty() {
            return result;
        }
        let mut calls = self.tracked.lock().unwrap_or_else(PoisonError::into_inner);
        calls.calls += 1;
        calls.plain += 1;
        if !std::mem::replace(&mut calls.captures, true) {
            self.warn(CAPTURES);
        }
        result
    }

    fn warn(&self, reason: &str) {
        kiln_log::warn!(target: "kiln", function = %self.name, "Burn's own backward pass runs: {reason}");
    }

    /// From now on a call that would compile is an error, [`Error::Frozen`], that names the guard that
    /// failed; see [`crate::Compiled::freeze`]. That holds for calls with tracked tensors, too. A backward pass
    /// still compiles once for each different set of outputs that a loss uses, if these are not all of them.
    pub fn freeze(&self) {
        self.region.freeze();
        self.split.freeze();
    }

    /// Takes [`CompiledFn::freeze`] back, and [`CompileOptions::frozen`].
    pub fn unfreeze(&self) {
        self.region.unfreeze();
        self.split.unfreeze();
    }

    /// What was compiled for calls without tracked tensors, why, and what cut it; see
    /// [`CompiledFn::explain_tracked`] for the others.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report())
    }

    /// What was compiled for calls with tracked tensors.
    pub fn explain_tracked(&self) -> String {
        let tracked = self.tracked.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = self.split.report();
        if tracked.plain > 0 {
            let reason = if tracked.captures { CAPTURES } else { READS };
            text += &format!(
                "{} of {} calls had Burn's own backward pass: {reason}\n",
                tracked.plain, tracked.calls
            );
            for (graph_break, count) in self.region.report().breaks {
                text += &format!("  {count} times: {graph_break}\n");
            }
        }
        text
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

/// Why a backward pass is not compiled.
const READS: &str = "the function reads a value (or calls `kiln::disable`), and cannot be compiled together with its \
     gradients; move that out of it";
const CAPTURES: &str = "the function captures tensors that are trained; pass them as arguments, or the \
     module as the model of `call_with`, or detach them (`no_grad`) if they are not trained";

/// Copies the tensors that it is shown, which share their elements; or has the error of the first that has
/// none.
struct Copies(Option<Error>);

impl TensorMap for Copies {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        // A copy beside the original: its status is read-only, so this is no last use.
        match session::fetch(&tensor.clone().into_ir(), BreakReason::Read) {
            Ok(elements) => tensor.client.adopt(elements),
            Err(error) => {
                self.0.get_or_insert(error);
                tensor
            }
        }
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        let is_tracked = tensor.is_tracked();
        let copy = tracked::untracked(self.tensor(tracked::inner(tensor)));
        match is_tracked {
            true => Tracking::float_set_require_grad(copy, true),
            false => copy,
        }
    }
}

/// Collects the parameters of a module, in order.
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
