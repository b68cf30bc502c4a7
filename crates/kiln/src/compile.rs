//! `compile`: a closure whose tensor operations become one executable.

use kiln_burn::{CompileOptions, CompiledRegion, Error, RegionReport};

use crate::explain::Explain;

/// Makes a compiled region. See [`Compiled::run`].
pub fn compile(options: CompileOptions) -> Compiled {
    crate::log::init_if_asked();
    Compiled {
        region: CompiledRegion::new(options),
    }
}

/// A region of the program that is compiled: made by [`compile`], one for each place that calls [`Compiled::run`].
pub struct Compiled {
    region: CompiledRegion,
}

impl Compiled {
    /// Runs `closure`; its tensor operations on `Kiln` are recorded instead of run, and the compiled step runs when the closure ends. The tensors it returns
    /// or stores have their elements then.
    ///
    /// What the closure does the same way each time is compiled once. Another shape, dtype, branch or set of trained parameters is another step, compiled when it
    /// first occurs ([`RegionReport::recompiles`] says why); values of float scalars are not part of a step, so schedules never recompile.
    /// Reading a tensor inside (`into_data`, `into_scalar`) cuts the step in two: a graph break.
    ///
    /// Recording belongs to the calling thread. A `run` inside another joins it.
    ///
    /// # Errors
    ///
    /// [`Error`] if the step cannot be compiled or run, or a graph break occurs and the options ask for `fullgraph`. Tensors the closure left behind
    /// report the same error when used.
    ///
    /// # Panics
    ///
    /// If `closure` panics, with the same payload. Nothing it recorded has happened.
    pub fn run<R>(&mut self, closure: impl FnOnce() -> R) -> Result<R, Error> {
        self.region.run(closure)
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
