//! What a program compiles besides training steps: regions and functions, which run as they are where the
//! program runs plainly.

use burn::module::AutodiffModule;
use kiln::{Compiled, CompiledFn, StepInput};

use crate::program::{B, Program};

/// A part of a loop: as it is, or in `kiln::compile`.
pub struct Region(Option<Compiled>);

impl Region {
    /// Runs the part.
    #[track_caller]
    pub fn run<R>(&mut self, part: impl FnOnce() -> R) -> R {
        match &mut self.0 {
            None => part(),
            Some(region) => region.run(part).expect("the region runs"),
        }
    }
}

/// A function: as it is, or through `kiln::compile_fn`.
#[allow(clippy::large_enum_variant)] // A handful of each in a test.
pub enum Function<F> {
    Plain(F),
    Compiled(CompiledFn<F>),
}

impl<F> Function<F> {
    #[track_caller]
    pub fn call<A, R>(&self, arguments: A) -> R
    where
        F: Fn(A) -> R,
        A: StepInput + Clone,
        R: StepInput,
    {
        match self {
            Self::Plain(function) => function(arguments),
            Self::Compiled(function) => function.call(arguments).expect("the function runs"),
        }
    }

    #[track_caller]
    pub fn call_with<M, A, R>(&self, model: &M, input: A) -> R
    where
        F: Fn(&M, A) -> R,
        M: AutodiffModule<B>,
        A: StepInput + Clone,
        R: StepInput,
    {
        match self {
            Self::Plain(function) => function(model, input),
            Self::Compiled(function) => function.call_with(model, input).expect("the function runs"),
        }
    }
}

impl Program {
    pub fn region(&self) -> Region {
        Region(self.options().map(kiln::compile))
    }

    /// A function of a tuple of arguments.
    pub fn function<A, R, F: Fn(A) -> R>(&self, function: F) -> Function<F> {
        match self.options() {
            None => Function::Plain(function),
            Some(options) => Function::Compiled(kiln::compile_fn(function).with_options(options)),
        }
    }

    /// A function of a model and an input.
    pub fn function_of<M, A, R, F: Fn(&M, A) -> R>(&self, function: F) -> Function<F> {
        match self.options() {
            None => Function::Plain(function),
            Some(options) => Function::Compiled(kiln::compile_fn(function).with_options(options)),
        }
    }
}
