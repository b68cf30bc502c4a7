//! `compile`: a closure whose tensor operations become one executable.

use kiln_burn::{CompileOptions, CompiledRegion, Error, RegionReport};

use crate::distributed;
use crate::explain::Explain;

/// Makes a compiled region. See [`Compiled::run`].
pub fn compile(options: CompileOptions) -> Compiled {
    crate::log::init_if_asked();
    let world = kiln_distributed::current().filter(|_| options.ranks > 1);
    let options = match world {
        Some(world) => distributed::with_own_threads(options, &world),
        None => options,
    };
    Compiled {
        region: CompiledRegion::new(options),
    }
}

/// Runs `closure` with its tensor operations run at once, not recorded, wherever it is called: in a
/// compiled region, in a [`crate::TrainStep`], in a compiled function, on a lazy device. The closure may
/// read elements of tensors.
///
/// The region is cut there, by one graph break that `explain` lists as [`crate::BreakReason::Disabled`];
/// under `fullgraph` that is an error. A `TrainStep` with such a part is recorded at every call, because a
/// replay would not run the part; its history says so. Regions inside of `closure` are not recorded either.
///
/// Gradients go through the part as through any other.
///
/// ```
/// use burn_tensor::Tensor;
/// use kiln::{BreakReason, CompileBackend, CompileOptions, Kiln, KilnDevice};
///
/// let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
/// let mut step = kiln::compile(options);
/// let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.5], &KilnDevice::cpu());
/// let y = step.run(|| {
///     let squares = x.clone() * x;
///     let largest = kiln::disable(|| squares.clone().max().into_scalar());
///     squares / largest
/// })?;
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [0.16, 1.0]);
/// assert_eq!(step.report().breaks[0].0.reason, BreakReason::Disabled);
/// # Ok::<(), kiln::Error>(())
/// ```
///
/// # Panics
///
/// With the panic of `closure`.
pub fn disable<R>(closure: impl FnOnce() -> R) -> R {
    kiln_burn::record::disable(closure)
}

/// A region of the program that is compiled: made by [`compile`], one for each place that calls
/// [`Compiled::run`].
pub struct Compiled {
    region: CompiledRegion,
}

impl Compiled {
    /// Runs `closure`; its tensor operations on `Kiln` are recorded instead of run, and the compiled step
    /// runs when the closure ends. The tensors that the closure returns or stores have their elements then.
    ///
    /// Operations that are the same at each call are compiled once. Another shape, dtype, branch or set of
    /// trained parameters is another step, compiled when it first occurs ([`RegionReport::recompiles`] says
    /// why); values of float scalars are not part of a step, so schedules never recompile, but for exponents
    /// and the numbers that `mask_fill` fills in and comparisons compare with. Reading a tensor inside
    /// (`into_data`, `into_scalar`) cuts the step in two: a graph break.
    ///
    /// Recording belongs to the calling thread. A `run` inside another joins it.
    ///
    /// # Errors
    ///
    /// [`Error`] if the step cannot be compiled or run, or a graph break occurs and the options ask for
    /// `fullgraph`. Tensors the closure left behind report the same error when used.
    ///
    /// # Panics
    ///
    /// If `closure` panics, with the same payload. Tensors that it has left somewhere have their values, as they
    /// would without Kiln; nothing else that it recorded is computed.
    pub fn run<R>(&mut self, closure: impl FnOnce() -> R) -> Result<R, Error> {
        self.region.run(closure)
    }

    /// From now on a call that would compile is an error, [`Error::Frozen`], that names the guard that
    /// failed. The closure has run then, as it does at each call, but none of its tensor operations has:
    /// its inputs are as they were, and tensors that it assigned are computed, one operation at a time,
    /// only if they are used. A region that is cut by graph breaks has run as far as its compiled parts go.
    ///
    /// ```
    /// use burn_tensor::Tensor;
    /// use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
    ///
    /// let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    /// let mut step = kiln::compile(options);
    /// let x = |values: &[f32]| Tensor::<Kiln, 1>::from_floats(values, &KilnDevice::cpu());
    /// step.run(|| x(&[1.0, 2.5]).exp())?;
    /// step.freeze();
    /// step.run(|| x(&[3.0, 4.5]).exp())?;
    /// let error = step.run(|| x(&[3.0, 4.5, 0.5]).exp()).unwrap_err();
    /// assert!(error.is_frozen() && error.to_string().contains("f32 [2] became f32 [3]"), "{error}");
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn freeze(&mut self) {
        self.region.freeze();
    }

    /// Takes [`Compiled::freeze`] back, and [`CompileOptions::frozen`].
    pub fn unfreeze(&mut self) {
        self.region.unfreeze();
    }

    /// What was compiled, why, and what cut it.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report())
    }

    /// The numbers behind [`Compiled::explain`].
    pub fn report(&self) -> RegionReport {
        self.region.report()
    }
}
