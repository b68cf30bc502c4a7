//! A compiled function in an eager training loop: gradients from a compiled backward pass, found where the
//! program looks for them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_autodiff::Autodiff;
use burn_core::module::Module;
use burn_nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn_optim::momentum::MomentumConfig;
use burn_optim::{GradientsParams, Optimizer, SgdConfig};
use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor, activation};
use kiln::{CompileBackend, CompileOptions, CompiledFn, Error, Kiln, KilnDevice};

type B = Autodiff<Kiln>;

/// The random generator is one for the process: tests that draw take turns.
static GENERATOR: Mutex<()> = Mutex::new(());

fn take_turns() -> MutexGuard<'static, ()> {
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn compiled<F>(function: F, backend: CompileBackend) -> CompiledFn<F> {
    kiln::compile_fn(function).with_options(
        CompileOptions::default()
            .with_backend(backend)
            .with_name("forward"),
    )
}

fn matrix<const R: usize, const C: usize>(values: [[f32; C]; R]) -> Tensor<B, 2> {
    Tensor::from_floats(values, &device())
}

fn values<const D: usize>(tensor: Tensor<Kiln, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

fn outer<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let close = |(found, expected): (&f32, &f32)| (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
    assert!(
        found.iter().zip(expected).all(close),
        "{found:?} instead of {expected:?}"
    );
}

#[derive(Module, Debug)]
struct Perceptron<B: Backend> {
    first: Linear<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
    second: Linear<B>,
}

impl<B: Backend> Perceptron<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(3, 8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            second: LinearConfig::new(8, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let h = activation::relu(self.norm.forward(self.first.forward(x)));
        self.second.forward(self.dropout.forward(h))
    }
}

/// Losses, the last running mean and the last weights of a few steps, with `forward` as the forward pass.
fn train(
    model: &Perceptron<B>,
    forward: impl Fn(&Perceptron<B>, Tensor<B, 2>) -> Tensor<B, 2>,
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    Kiln::seed(&device(), 7);
    let mut model = model.clone();
    // Linear in the gradients: where Adam divides by them, rounding decides the sign of a gradient that is
    // zero.
    let mut optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let mut losses = Vec::new();
    for step in 0..5 {
        let x = matrix([
            [0.5, -1.0, 2.0],
            [1.5, 0.25, -0.5],
            [-0.75, 1.0, 0.0],
            [0.1, 0.2, 0.3],
        ]) + step;
        let target = matrix([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0]]);
        let loss = (forward(&model, x) - target).powf_scalar(2.0).mean();
        losses.extend(outer(loss.clone()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.05, model, gradients);
    }
    let mean = values(model.norm.running_mean.value().inner());
    (losses, mean, values(model.first.weight.val().inner()))
}

#[test]
fn an_eager_loop_with_a_compiled_forward_pass_trains_as_the_eager_one() {
    let _turn = take_turns();
    Kiln::seed(&device(), 3);
    // Copies of a model share its running statistics, and draw weights that nobody has used yet once more:
    // each run loads one record.
    let drawn = Perceptron::<B>::new(&device()).into_record();
    let model = Perceptron::<B>::new(&device()).load_record(drawn);
    let fresh = || {
        let record = model.clone().into_record();
        Perceptron::<B>::new(&device()).load_record(record)
    };
    let (losses, mean, weights) = train(&fresh(), |model, x| model.forward(x));
    assert!(losses[4] < losses[0], "{losses:?}");
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let forward = compiled(|model: &Perceptron<B>, x: Tensor<B, 2>| model.forward(x), backend);
        let found = train(&fresh(), |model, x| forward.call_with(model, x).unwrap());
        assert_close(&found.0, &losses);
        assert_close(&found.1, &mean);
        assert_close(&found.2, &weights);
        // Burn's running statistics are averages over threads: no division yet at their first use.
        assert_eq!(forward.compiled_pairs(), 2, "{}", forward.explain_tracked());
    }
}

#[test]
fn several_outputs_of_which_some_have_no_gradient() {
    let forward = compiled(
        |(x, w): (Tensor<B, 2>, Tensor<B, 2>)| {
            let y = x.clone().matmul(w.clone());
            let largest: Tensor<B, 2, Int> = y.clone().argmax(1);
            (y.exp(), w * 3.0, x * 2.0, largest)
        },
        CompileBackend::AotEager,
    );
    let x = matrix([[1.0, 2.0], [-1.0, -0.5]]);
    let w = matrix([[0.1, 0.2], [0.3, -0.4]]).require_grad();
    let (y, triple, double, largest) = forward.call((x.clone(), w.clone())).unwrap();
    assert_eq!(largest.into_data().iter::<i64>().collect::<Vec<_>>(), [0, 1]);
    // `x` is not tracked, so neither is what follows from it alone.
    assert!(y.is_require_grad() || !double.is_require_grad());
    let gradients = y.clone().sum().backward();
    let found = values(w.grad(&gradients).unwrap());
    let eager = w.clone().detach().require_grad();
    let expected = x.matmul(eager.clone()).exp().sum().backward();
    assert_close(&found, &values(eager.grad(&expected).unwrap()));
    // The second output was not used; by itself it has its own gradient.
    let (_, triple_again, ..) = forward
        .call((matrix([[1.0, 2.0], [-1.0, 0.5]]), w.clone()))
        .unwrap();
    let gradients = triple_again.sum().backward();
    assert_close(&values(w.grad(&gradients).unwrap()), &[3.0; 4]);
    assert_close(&outer(triple), &[0.3, 0.6, 0.9, -1.2]);
    assert_eq!(forward.compiled_pairs(), 1, "{}", forward.explain_tracked());
}

#[test]
fn a_tensor_used_inside_and_outside_gets_both_gradients() {
    let forward = compiled(|w: Tensor<B, 1>| w.clone() * w, CompileBackend::AotEager);
    let w = Tensor::<B, 1>::from_floats([1.0, 2.0, 3.0], &device()).require_grad();
    let loss = (forward.call(w.clone()).unwrap() + w.clone() * 5.0).sum();
    let gradients = loss.backward();
    assert_close(&values(w.grad(&gradients).unwrap()), &[7.0, 9.0, 11.0]);
    // Inside a longer graph, and twice.
    let h = w.clone().exp();
    let loss = forward.call(forward.call(h).unwrap()).unwrap().sum();
    let gradients = loss.backward();
    let expected: Vec<f32> = [1.0f32, 2.0, 3.0].iter().map(|x| 4.0 * (4.0 * x).exp()).collect();
    assert_close(&values(w.grad(&gradients).unwrap()), &expected);
}

#[test]
fn without_tracked_tensors_nothing_is_differentiated() {
    let forward = compiled(|x: Tensor<B, 1>| x.clone() * x, CompileBackend::AotEager);
    let x = Tensor::<B, 1>::from_floats([1.0, 2.0], &device());
    let y = forward.call(x).unwrap();
    assert!(!y.is_require_grad());
    assert_eq!(outer(y), [1.0, 4.0]);
    assert_eq!((forward.compiled_pairs(), forward.report().steps.len()), (0, 1));
    let inner = compiled(|x: Tensor<Kiln, 1>| x.clone() * x, CompileBackend::AotEager);
    assert_eq!(
        values(inner.call(Tensor::from_floats([3.0], &device())).unwrap()),
        [9.0]
    );
}

/// The function of an untracked batch that captures a model: gradients are right, and what they cost is told.
#[test]
fn what_is_captured_is_told_where_no_argument_is_tracked() {
    let _turn = take_turns();
    let weight = matrix([[1.0, 2.0], [3.0, -1.0]]).require_grad();
    let captured = weight.clone();
    let forward = compiled(
        move |x: Tensor<B, 2>| x.matmul(captured.clone()),
        CompileBackend::Cpu,
    );
    for _ in 0..2 {
        let loss = forward.call(matrix([[1.0, 0.5]])).unwrap().sum();
        let gradients = loss.backward();
        assert_close(&values(weight.grad(&gradients).unwrap()), &[1.0, 1.0, 0.5, 0.5]);
    }
    let text = forward.explain_tracked();
    for part in [
        "2 of 2 calls had Burn's own backward pass",
        "captures tensors that are trained",
        "call_with",
    ] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

#[test]
fn dropout_has_the_same_mask_forward_and_backward() {
    let _turn = take_turns();
    let dropout = DropoutConfig::new(0.5).init();
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let forward = compiled(|x: Tensor<B, 1>| dropout.forward(x), backend);
        let x = Tensor::<B, 1>::ones([400], &device()).require_grad();
        let mut before = Vec::new();
        for _ in 0..3 {
            let y = forward.call(x.clone()).unwrap();
            let gradients = y.clone().sum().backward();
            let y = outer(y);
            assert_eq!(y, values(x.grad(&gradients).unwrap()));
            assert_ne!(y, before, "each call draws anew");
            before = y;
        }
    }
}

#[test]
fn a_function_that_reads_a_value_runs_eagerly_or_says_so() {
    let function = |w: Tensor<B, 1>| {
        let scale = w.clone().detach().sum().into_scalar();
        w * scale
    };
    let w = Tensor::<B, 1>::from_floats([1.0, 2.0], &device()).require_grad();
    let forward = compiled(function, CompileBackend::AotEager);
    let gradients = forward.call(w.clone()).unwrap().sum().backward();
    assert_close(&values(w.grad(&gradients).unwrap()), &[3.0, 3.0]);
    let options = CompileOptions::default().with_fullgraph(true).with_name("strict");
    let error = forward.with_options(options).call(w).unwrap_err();
    assert!(matches!(error, Error::GraphBreak { .. }), "{error}");
}

#[test]
fn tensors_do_not_pile_up() {
    let forward = compiled(|w: Tensor<B, 1>| w.clone().exp() * w, CompileBackend::AotEager);
    let w = Tensor::<B, 1>::from_floats([1.0, 2.0], &device()).require_grad();
    let step = || {
        let gradients = forward.call(w.clone()).unwrap().sum().backward();
        drop(gradients);
        // Nobody asks for these gradients.
        drop(forward.call(w.clone()).unwrap());
    };
    step();
    let before = kiln_burn::table::len();
    (0..20).for_each(|_| step());
    let after = kiln_burn::table::len();
    // Other tests of this program have tensors of their own, though none so many.
    assert!(after < before + 40, "{before} tensors became {after}");
}

#[test]
fn a_memory_budget_holds_for_both_passes_together() {
    let deep = |(x, weights): (Tensor<B, 2>, Vec<Tensor<B, 2>>)| {
        let layer = |h: Tensor<B, 2>, w: Tensor<B, 2>| h.matmul(w).tanh();
        weights.into_iter().fold(x, layer)
    };
    let weights: Vec<Tensor<B, 2>> = (0..8)
        .map(|layer| {
            let values: Vec<f32> = (0..256)
                .map(|i| ((i * 7 + layer * 5) % 13) as f32 * 0.03 - 0.18)
                .collect();
            Tensor::<B, 1>::from_floats(values.as_slice(), &device())
                .reshape([16, 16])
                .require_grad()
        })
        .collect();
    let x = Tensor::<B, 2>::ones([64, 16], &device());
    let call = |budget: Option<usize>| -> Result<Vec<f32>, Error> {
        let options = CompileOptions {
            memory_budget: budget,
            ..CompileOptions::default().with_name("deep")
        };
        let forward = kiln::compile_fn(deep).with_options(options);
        let gradients = forward.call((x.clone(), weights.clone()))?.sum().backward();
        let gradients = weights.iter().flat_map(|w| values(w.grad(&gradients).unwrap()));
        Ok(gradients.collect())
    };
    let error = call(Some(0)).unwrap_err().to_string();
    let smallest = error.split("smallest budget that fits is ").nth(1).expect(&error);
    let smallest: usize = smallest.split(' ').next().unwrap().parse().expect(&error);
    assert!(call(Some(smallest - 1)).is_err());
    assert_close(&call(Some(smallest)).unwrap(), &call(None).unwrap());
}
