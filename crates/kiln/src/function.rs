//! `compile_fn`: a function whose tensor operations become one executable.

use kiln_burn::{CompileOptions, CompiledRegion, Error, RegionReport};

use crate::explain::Explain;

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
pub fn compile_fn<F>(function: F) -> CompiledFn<F> {
    crate::log::init_if_asked();
    CompiledFn {
        region: CompiledRegion::new(CompileOptions::default().with_name("function")),
        function,
    }
}

/// A compiled function: made by [`compile_fn`].
pub struct CompiledFn<F> {
    region: CompiledRegion,
    function: F,
}

impl<F> CompiledFn<F> {
    /// The same function, compiled with other options.
    pub fn with_options(self, options: CompileOptions) -> Self {
        Self {
            region: CompiledRegion::new(options),
            function: self.function,
        }
    }

    /// Calls the function. Its tensor operations are recorded and run as one executable; see [`crate::Compiled::run`].
    ///
    /// # Errors
    ///
    /// As [`crate::Compiled::run`].
    pub fn call<A, R>(&self, arguments: A) -> Result<R, Error>
    where
        F: Fn(A) -> R,
    {
        self.region.run(|| (self.function)(arguments))
    }

    /// What was compiled, why, and what cut it.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report())
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
