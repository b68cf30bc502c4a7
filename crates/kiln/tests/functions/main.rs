//! Functions as users write them, run plainly and compiled: every value, gradient, draw and cell is the same
//! at every call.
//!
//! A program is a Rust function that runs its calls through a [`How`] and returns all numbers it saw. Add one
//! by adding a test.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Barrier, Mutex, PoisonError};

use burn_autodiff::Autodiff;
use burn_core::module::{AutodiffModule, Module, Param};
use burn_nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor, activation};
use kiln::{CompileBackend, CompileOptions, CompiledFn, Error, Kiln, KilnDevice, StepInput};

mod failures;
mod gradients;
mod state;

type B = Autodiff<Kiln>;

/// The random generator is one for the process: programs take turns.
static GENERATOR: Mutex<()> = Mutex::new(());

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

/// How a program calls its function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    Plain,
    Compiled(CompileBackend),
}

impl How {
    fn function<F>(self, function: F) -> Function<F> {
        let options = |backend| {
            CompileOptions::default()
                .with_backend(backend)
                .with_name("function")
        };
        match self {
            Self::Plain => Function::Plain(function),
            Self::Compiled(backend) => Function::Compiled(Box::new(
                kiln::compile_fn(function).with_options(options(backend)),
            )),
        }
    }
}

enum Function<F> {
    Plain(F),
    Compiled(Box<CompiledFn<F>>),
}

impl<F> Function<F> {
    fn call<A: StepInput + Clone, R: StepInput>(&self, arguments: A) -> R
    where
        F: Fn(A) -> R,
    {
        match self {
            Self::Plain(function) => function(arguments),
            Self::Compiled(function) => function.call(arguments).unwrap(),
        }
    }

    fn call_with<M: AutodiffModule<B>, A: StepInput + Clone, R: StepInput>(
        &self,
        model: &M,
        arguments: A,
    ) -> R
    where
        F: Fn(&M, A) -> R,
    {
        match self {
            Self::Plain(function) => function(model, arguments),
            Self::Compiled(function) => function.call_with(model, arguments).unwrap(),
        }
    }

    /// Whether the calls were compiled in the way that `pairs` says, if they were at all.
    fn assert_pairs(&self, pairs: usize) {
        if let Self::Compiled(function) = self {
            assert_eq!(function.compiled_pairs(), pairs, "{}", function.explain_tracked());
        }
    }

    /// One pair serves all calls, and none had Burn's own backward pass.
    fn assert_all_compiled(&self) {
        self.assert_pairs(1);
        if let Self::Compiled(function) = self {
            let text = function.explain_tracked();
            assert!(!text.contains("own backward pass"), "{text}");
        }
    }

    fn assert_explained(&self, words: &str) {
        if let Self::Compiled(function) = self {
            let text = function.explain_tracked();
            assert!(text.contains(words), "{text}");
        }
    }
}

/// What a program saw, with names for messages.
#[derive(Default)]
struct Seen(Vec<(String, Vec<f32>)>);

impl Seen {
    fn values<X: Backend, const D: usize>(&mut self, name: &str, tensor: &Tensor<X, D>) {
        self.0
            .push((name.to_owned(), tensor.to_data().iter::<f32>().collect()));
    }

    /// The gradient; a missing one is not a gradient of zeros.
    fn gradient<const D: usize>(
        &mut self,
        name: &str,
        tensor: &Tensor<B, D>,
        gradients: &<B as burn_tensor::backend::AutodiffBackend>::Gradients,
    ) {
        match tensor.grad(gradients) {
            Some(gradient) => self.values(name, &gradient),
            None => self.0.push((name.to_owned(), Vec::new())),
        }
    }

    /// The number of the stream that the generator gives next.
    fn generator(&mut self) {
        let drawn = Tensor::<Kiln, 1>::random([3], burn_tensor::Distribution::Default, &device());
        self.values("generator", &drawn);
    }
}

/// Runs a program plainly and on each backend, and compares what it saw.
fn compare(program: impl Fn(How, &mut Seen)) {
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let run = |how| {
        Kiln::seed(&device(), 11);
        let mut seen = Seen::default();
        program(how, &mut seen);
        seen.generator();
        seen.0
    };
    let expected = run(How::Plain);
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let found = run(How::Compiled(backend));
        assert_eq!(found.len(), expected.len());
        for (index, ((name, found), (_, expected))) in found.iter().zip(&expected).enumerate() {
            let close = |(x, y): (&f32, &f32)| (x - y).abs() <= 2e-5 * y.abs().max(1.0);
            assert!(
                found.len() == expected.len() && found.iter().zip(expected).all(close),
                "{backend}, number {index}, {name}: {found:?} in place of {expected:?}"
            );
        }
    }
}

fn vector(values: &[f32]) -> Tensor<B, 1> {
    Tensor::from_floats(values, &device())
}

fn matrix(rows: usize, columns: usize, seed: usize) -> Tensor<B, 2> {
    let values: Vec<f32> = (0..rows * columns)
        .map(|i| ((i * 37 + seed * 101) % 23) as f32 * 0.1 - 1.1)
        .collect();
    vector(&values).reshape([rows, columns])
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
    second: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        let net = Self {
            first: LinearConfig::new(3, 8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(0.4).init(),
            second: LinearConfig::new(8, 2).init(device),
        };
        // Draws the weights now: a copy of a module whose weights nobody has used yet would draw others.
        let _ = (net.first.weight.val(), net.second.weight.val());
        let _ = (
            net.first.bias.as_ref().unwrap().val(),
            net.second.bias.as_ref().unwrap().val(),
        );
        net
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let h = activation::relu(self.norm.forward(self.first.forward(x)));
        self.second.forward(self.dropout.forward(h))
    }
}

impl Seen {
    fn net(&mut self, net: &Net<B>) {
        self.values("weight", &net.first.weight.val());
        self.values("running mean", &net.norm.running_mean.value_sync());
        self.values("running variance", &net.norm.running_var.value_sync());
    }
}

/// Trains a net for some steps by AdamW, which tells a gradient of zeros from none.
fn train(
    seen: &mut Seen,
    mut net: Net<B>,
    steps: usize,
    forward: impl Fn(&Net<B>, Tensor<B, 2>) -> Tensor<B, 2>,
) {
    // The bias before the norm has a gradient that is zero but for rounding: a small epsilon would make a
    // step of that.
    let mut optim = AdamWConfig::new().with_epsilon(1e-3).init();
    for step in 0..steps {
        let loss = (forward(&net, matrix(6, 3, step)) - matrix(6, 2, step + 5))
            .powf_scalar(2.0)
            .mean();
        seen.values("loss", &loss);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optim.step(0.01, net, gradients);
    }
    seen.net(&net);
}
