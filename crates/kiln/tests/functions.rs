//! Functions as users write them, run plainly and compiled: every value, gradient, draw and cell is the same
//! at every call.
//!
//! A program is a Rust function that runs its calls through a [`How`] and returns all numbers it saw. Add one
//! by adding a test.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use burn_autodiff::Autodiff;
use burn_core::module::{AutodiffModule, Module};
use burn_nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor, activation};
use kiln::{CompileBackend, CompileOptions, CompiledFn, Error, Kiln, KilnDevice, StepInput};

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
            Self::Compiled(backend) => {
                Function::Compiled(kiln::compile_fn(function).with_options(options(backend)))
            }
        }
    }
}

enum Function<F> {
    Plain(F),
    Compiled(CompiledFn<F>),
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

#[test]
fn a_model_with_state_and_dropout_that_reads_a_value_at_each_call() {
    compare(|how, seen| {
        let reads = Cell::new(0);
        let forward = how.function(|net: &Net<B>, x: Tensor<B, 2>| {
            let h = net.norm.forward(net.first.forward(x));
            let h = net.dropout.forward(h);
            let scale = h.clone().detach().abs().mean().into_scalar();
            reads.set(reads.get() + 1);
            net.second.forward(net.dropout.forward(h) * scale)
        });
        train(seen, Net::new(&device()), 6, |net, x| forward.call_with(net, x));
        assert_eq!(reads.get(), 6, "each call runs the function once");
        forward.assert_pairs(0);
        forward.assert_explained("6 of 6 calls had Burn's own backward pass: the function reads a value");
        forward.assert_explained("functions.rs");
    });
}

#[test]
fn a_function_that_reads_now_and_then_is_compiled_in_between() {
    compare(|how, seen| {
        let calls = Cell::new(0);
        let logged = RefCell::new(Vec::new());
        let forward = how.function(|net: &Net<B>, x: Tensor<B, 2>| {
            let y = net.forward(x);
            calls.set(calls.get() + 1);
            if calls.get() % 3 == 1 {
                let mean: f32 = y.clone().mean().into_scalar();
                logged.borrow_mut().push(mean);
            }
            y
        });
        train(seen, Net::new(&device()), 9, |net, x| forward.call_with(net, x));
        seen.0.push(("logged".into(), logged.borrow().clone()));
        if let Function::Compiled(forward) = &forward {
            assert!(forward.compiled_pairs() > 0, "{}", forward.explain_tracked());
        }
    });
}

#[test]
fn a_panic_leaves_state_and_generator_as_without_kiln() {
    compare(|how, seen| {
        let net = Net::<B>::new(&device());
        let fails = Cell::new(false);
        let forward = how.function(|net: &Net<B>, x: Tensor<B, 2>| {
            let y = net.forward(x);
            assert!(!fails.get(), "stop");
            y
        });
        for call in 0..5 {
            fails.set(call == 0 || call == 3);
            let x = matrix(6, 3, call).require_grad();
            let result = catch_unwind(AssertUnwindSafe(|| forward.call_with(&net, x.clone())));
            assert_eq!(result.is_err(), fails.get());
            if let Ok(y) = result {
                seen.values("y", &y);
                seen.gradient("dx", &x, &y.sum().backward());
            }
            seen.net(&net);
            seen.generator();
        }
    });
}

#[test]
fn a_panic_of_a_function_without_tracked_tensors_leaves_its_state() {
    compare(|how, seen| {
        let norm = BatchNormConfig::new(3).init::<B>(&device());
        let fails = Cell::new(false);
        let norm_in = norm.clone().no_grad();
        let forward = how.function(|x: Tensor<B, 2>| {
            let y = norm_in.forward(x);
            assert!(!fails.get(), "stop");
            y
        });
        for call in 0..4 {
            fails.set(call == 1);
            let result = catch_unwind(AssertUnwindSafe(|| forward.call(matrix(4, 3, call))));
            if let Ok(y) = result {
                seen.values("y", &y);
            }
            seen.values("running mean", &norm_in.running_mean.value_sync());
        }
    });
}

#[test]
fn under_fullgraph_a_read_is_an_error_that_poisons_nothing() {
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let net = Net::<B>::new(&device());
    let options = CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_fullgraph(true);
    let forward = kiln::compile_fn(|net: &Net<B>, x: Tensor<B, 2>| {
        let y = net.forward(x);
        let _: f32 = y.clone().sum().into_scalar();
        y
    })
    .with_options(options);
    for call in 0..2 {
        let error = forward
            .call_with::<B, _, _, _>(&net, matrix(6, 3, call))
            .unwrap_err();
        assert!(matches!(error, Error::GraphBreak { .. }), "{error}");
        let mean = net.norm.running_mean.value_sync().into_data();
        assert!(mean.iter::<f32>().all(f32::is_finite));
    }
    net.forward(matrix(6, 3, 4)).into_data();
}

#[test]
fn inputs_returned_unchanged_twice_or_captured() {
    compare(|how, seen| {
        let captured = vector(&[3.0, 4.0]);
        let trained = vector(&[5.0, 6.0]).require_grad();
        let function = how.function(|(x, w): (Tensor<B, 1>, Tensor<B, 1>)| {
            let y = x.clone() * w.clone();
            (x, y.clone(), y, captured.clone(), (trained.clone(), w))
        });
        for call in 0..4 {
            let x = vector(&[1.0 + call as f32, 2.0]);
            let w = vector(&[0.5, -1.0 * call as f32]).require_grad();
            let (x2, y, again, kept, (trained2, w2)): (
                Tensor<B, 1>,
                Tensor<B, 1>,
                Tensor<B, 1>,
                Tensor<B, 1>,
                (Tensor<B, 1>, Tensor<B, 1>),
            ) = function.call((x, w.clone()));
            [&x2, &y, &again, &kept, &trained2, &w2]
                .into_iter()
                .for_each(|tensor| seen.values("returned", tensor));
            let loss = (x2 + y * 2.0 + again * 3.0 + kept + trained2 * 7.0 + w2 * 11.0).sum();
            let gradients = loss.backward();
            seen.gradient("dw", &w, &gradients);
            seen.gradient("d trained", &trained, &gradients);
        }
    });
}

#[test]
fn inputs_that_coincide_and_then_do_not() {
    compare(|how, seen| {
        let function = how.function(|(x, y): (Tensor<B, 1>, Tensor<B, 1>)| x.clone() * 3.0 + y * x);
        for call in 0..8 {
            let x = vector(&[1.0, 2.0, call as f32]).require_grad();
            let other = vector(&[-1.0, 0.5, 4.0]).require_grad();
            let y = if call % 4 < 2 { x.clone() } else { other.clone() };
            let z: Tensor<B, 1> = function.call((x.clone(), y));
            seen.values("z", &z);
            let gradients = z.sum().backward();
            seen.gradient("dx", &x, &gradients);
            seen.gradient("dy", &other, &gradients);
            // Not tracked: the other way of compiling.
            let (a, b) = (
                matrix(1, 3, call).reshape([3]),
                matrix(1, 3, call + 1).reshape([3]),
            );
            let b = if call % 4 < 2 { a.clone() } else { b };
            seen.values("untracked", &function.call((a, b)));
        }
    });
}

#[test]
fn inputs_read_on_the_host_and_integers() {
    compare(|how, seen| {
        let function = how.function(
            |(x, index, scale): (Tensor<B, 2>, Tensor<B, 1, Int>, Tensor<B, 1>)| {
                // The data of an argument is at hand: no operation is cut.
                let factor = scale.to_data().iter::<f32>().sum::<f32>();
                let largest = index.to_data().iter::<i64>().max().unwrap();
                (x.select(0, index) * factor + largest as f32, factor)
            },
        );
        for call in 0..6i64 {
            let x = matrix(4, 3, 1).require_grad();
            let index =
                Tensor::<B, 1, Int>::from_ints([call % 4, 3, 0].map(|i| i as i32).as_slice(), &device());
            let (y, factor): (Tensor<B, 2>, f32) =
                function.call((x.clone(), index, vector(&[call as f32, 0.5])));
            seen.values("y", &y);
            seen.0.push(("factor".into(), vec![factor]));
            seen.gradient("dx", &x, &(y * matrix(3, 3, 2)).sum().backward());
        }
    });
}

#[test]
fn outputs_that_are_not_differentiated_give_no_gradient_of_zeros() {
    compare(|how, seen| {
        let function = how.function(|(x, v, w): (Tensor<B, 1>, Tensor<B, 1>, Tensor<B, 1>)| {
            (x.clone() * v.clone(), x.clone() + w.exp(), (x * v).detach())
        });
        for call in 0..5 {
            let x = vector(&[1.0, 2.0]).require_grad();
            let v = vector(&[3.0, 4.0]).require_grad();
            let w = vector(&[0.5, 0.25]).require_grad();
            let (a, b, c): (Tensor<B, 1>, Tensor<B, 1>, Tensor<B, 1>) =
                function.call((x.clone(), v.clone(), w.clone()));
            let mut note = |gradients| {
                seen.gradient("dx", &x, &gradients);
                seen.gradient("dv", &v, &gradients);
                seen.gradient("dw", &w, &gradients);
            };
            match call {
                0 => note(a.sum().backward()),
                1 => note(b.sum().backward()),
                2 => note((a + b).sum().backward()),
                // One loss of each: two backward passes.
                3 => {
                    note(a.sum().backward());
                    note((b * 2.0).sum().backward());
                }
                // None at all.
                _ => drop((a, b)),
            }
            seen.values("c", &c);
        }
        function.assert_pairs(1);
    });
}

#[test]
fn functions_in_functions_and_in_sequence() {
    compare(|how, seen| {
        let inner = how.function(|x: Tensor<B, 2>| x.tanh() * 2.0);
        let outer = how.function(|(x, w): (Tensor<B, 2>, Tensor<B, 2>)| inner.call(x.clone().matmul(w)) + x);
        for call in 0..4 {
            let x = matrix(3, 3, call).require_grad();
            let w = matrix(3, 3, call + 1).require_grad();
            // The second call's input is the first one's output, and an inner function by itself.
            let y: Tensor<B, 2> = outer.call((x.clone(), w.clone()));
            let z: Tensor<B, 2> = outer.call((inner.call(y.clone()), w.clone()));
            let gradients = (z.clone() + y).sum().backward();
            seen.values("z", &z);
            seen.gradient("dx", &x, &gradients);
            seen.gradient("dw", &w, &gradients);
        }
    });
}

#[test]
fn captured_parameters_that_are_trained_between_calls() {
    for tracked in [true, false] {
        compare(|how, seen| {
            let weight = RefCell::new(matrix(3, 2, 4).require_grad());
            let frozen = matrix(3, 2, 9).require_grad();
            let function = how.function(|x: Tensor<B, 2>| {
                x.clone().matmul(weight.borrow().clone()) + x.matmul(frozen.clone())
            });
            for call in 0..5 {
                let x = matrix(4, 3, call);
                let x = if tracked { x.require_grad() } else { x };
                let loss = function.call(x.clone()).powf_scalar(2.0).mean();
                seen.values("loss", &loss);
                let gradients = loss.backward();
                seen.gradient("dx", &x, &gradients);
                seen.gradient("d frozen", &frozen, &gradients);
                let w = weight.borrow().clone();
                let step = w.grad(&gradients).expect("the captured weight has a gradient");
                *weight.borrow_mut() = Tensor::from_inner(w.inner() - step * 0.1).require_grad();
            }
            seen.values("weight", &weight.borrow());
            if tracked {
                function.assert_explained("captures tensors that are trained");
            }
        });
    }
}

#[test]
fn a_captured_tensor_that_follows_from_trained_ones_is_refused() {
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let w = matrix(5, 3, 1).require_grad();
    let hidden = matrix(4, 5, 2).matmul(w);
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let function = kiln::compile_fn(move |x: Tensor<B, 2>| x * hidden.clone()).with_options(options);
    let error = function.call(matrix(4, 3, 3).require_grad()).unwrap_err();
    assert!(matches!(error, Error::TrackedCapture { .. }), "{error}");
}

#[test]
fn a_loss_of_a_tensor_that_the_function_kept_elsewhere_is_refused() {
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = RefCell::new(None);
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let function = kiln::compile_fn(|x: Tensor<B, 1>| {
        let h = x.exp();
        *kept.borrow_mut() = Some(h.clone() * 2.0);
        h * 3.0
    })
    .with_options(options);
    let y = function.call(vector(&[1.0, 2.0]).require_grad()).unwrap();
    let loss = y.sum() + kept.take().unwrap().sum();
    let payload = catch_unwind(AssertUnwindSafe(|| loss.backward()))
        .err()
        .expect("a lost gradient");
    let message = payload.downcast_ref::<&str>().copied().unwrap_or_default();
    assert!(message.contains("return the tensor"), "{message}");
}

#[test]
fn parts_without_gradient_and_dropout_of_its_own() {
    compare(|how, seen| {
        let dropout = DropoutConfig::new(0.5).init();
        let function = how.function(|x: Tensor<B, 2>| {
            let scale = Tensor::<B, 2>::from_inner(x.clone().inner().abs().mean_dim(1));
            dropout.forward(x.clone() / scale) + x.detach()
        });
        for call in 0..4 {
            let x = matrix(4, 6, call).require_grad();
            let y = function.call(x.clone());
            seen.values("y", &y);
            seen.gradient("dx", &x, &y.sum().backward());
            seen.generator();
        }
        function.assert_pairs(1);
    });
}

#[test]
fn threads_that_share_a_function_take_turns() {
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let function =
        kiln::compile_fn(|(x, n): (Tensor<B, 1>, Tensor<B, 1>)| (x.clone() * n.clone()).exp() + x * n)
            .with_options(options);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let function = &function;
            scope.spawn(move || {
                for call in 0..20 {
                    let x = vector(&[0.01 * call as f32, 0.02 * thread as f32]);
                    let x = if call % 2 == 0 { x.require_grad() } else { x };
                    let n = vector(&[thread as f32, call as f32 * 0.1]);
                    let found = function.call((x.clone(), n.clone())).unwrap().into_data();
                    let expected = ((x.clone() * n.clone()).exp() + x * n).into_data();
                    found.assert_approx_eq::<f32>(&expected, burn_tensor::Tolerance::default());
                }
            });
        }
    });
}
