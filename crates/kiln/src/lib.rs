//! Compiled training steps for Burn.
//!
//! Put a Burn model on the [`Kiln`] backend and wrap the body of its training loop. Kiln records the body's
//! operations (forward pass, Burn's autograd, optimizer), makes one graph of them, compiles the graph to
//! one executable, and runs the executable from then on.
//!
//! ```no_run
//! use burn_autodiff::Autodiff;
//! use burn_core::module::Module;
//! use burn_nn::{Linear, LinearConfig};
//! use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
//! use burn_tensor::{Distribution, Tensor};
//! use kiln::{CompileOptions, Kiln, KilnDevice};
//!
//! type B = Autodiff<Kiln>;
//!
//! # fn main() -> Result<(), kiln::Error> {
//! let device = KilnDevice::default();
//! let mut model: Linear<B> = LinearConfig::new(8, 1).init(&device);
//! let mut optim = AdamWConfig::new().init();
//!
//! let mut step = kiln::compile(CompileOptions::default());
//! for _ in 0..100 {
//!     let x = Tensor::<B, 2>::random([32, 8], Distribution::Default, &device);
//!     let loss = step.run(|| {
//!         let loss = model.forward(x).powf_scalar(2.0).mean();
//!         let grads = GradientsParams::from_grads(loss.backward(), &model);
//!         model = optim.step(1e-3, model.clone(), grads);
//!         loss
//!     })?;
//!     println!("{}", loss.into_scalar());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Three ways to use it:
//!
//! - [`compile`] wraps a closure. The closure's Rust code runs at each call; in place of its tensor
//!   operations the compiled step runs.
//! - [`TrainStep`] owns model and optimizer. After the first calls model code runs at a few calls only, which
//!   are compared.
//! - [`compile_fn`] wraps a function: for inference, or inside an eager training loop, where its backward
//!   pass is compiled, too.
//!
//! [`func`] transforms functions: gradients, Jacobians, batches.
//!
//! Everywhere else Kiln is an eager backend on burn-flex.

#[cfg(feature = "ndarray")]
pub mod arrays;
mod compile;
mod custom;
pub mod distributed;
mod dynamic;
pub mod explain;
pub mod func;
mod function;
pub mod images;
mod input;
pub mod log;
pub mod ops;
mod tracked;
mod train;

pub use compile::{Compiled, compile, disable};
pub use custom::{CSource, HostFunction, HostGradient, HostInputs, NoGradient, custom_op, custom_op_with_c};
pub use dynamic::dynamic;
pub use explain::{Explain, memory_curve};
pub use function::{CompiledFn, compile_fn};
pub use input::{InputVisitor, KilnBackend, KilnTensor, StepInput, TensorMap};
pub use kiln_burn::record::DynamicError;
pub use kiln_burn::table::share as share_tensors;
pub use kiln_burn::{
    BreakReason, Changed, CompileBackend, CompileEvent, CompileOptions, Dynamic, Error, GraphBreak,
    IndexError, Kiln, KilnDevice, Location, LossScaling, Mismatch, Mode, NumericsCheck, Place, Point,
    Recompile, RegionReport, StepReport, UnknownBackend, UnknownDevice, full_precision,
};
pub use kiln_compiler::buckets::Buckets;
pub use kiln_derive::StepInput;
pub use kiln_profile::{CompileTimes, Profile, Summary, compile_times};
pub use tracked::TrackedTensor;
pub use train::{
    Cause, ExportError, History, LossScale, StepOptimizer, StepOutput, TrainError, TrainStep,
    TrainStepBuilder, Weights, cast_parameters,
};

/// The backends a step can be compiled for, in the order in which to try them when a result looks wrong.
///
/// ```
/// assert!(kiln::list_backends().contains(&kiln::CompileBackend::AotEager));
/// ```
pub fn list_backends() -> &'static [CompileBackend] {
    CompileBackend::BUILT
}

/// Opens a profile: until it is dropped, recording, compiling, data loading and every kernel are noted.
///
/// ```no_run
/// let profile = kiln::profile();
/// // some training steps
/// profile.export_chrome_trace("trace.json")?; // for https://ui.perfetto.dev
/// println!("{}", profile.summary());          // by kernel and by Burn operation
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// Without an open profile nothing is collected, at no cost.
pub fn profile() -> Profile {
    Profile::start()
}

/// Marks a part of the program in an open profile, until the result is dropped: loading a batch, an
/// evaluation.
///
/// ```
/// # fn load() {}
/// {
///     let _span = kiln::profile_span("data loading");
///     load();
/// }
/// ```
pub fn profile_span(name: &'static str) -> kiln_profile::Span {
    kiln_profile::span(kiln_profile::Category::User, name)
}

// The derive macro names this crate as `kiln`, also in the crate's own tests and examples.
extern crate self as kiln;
