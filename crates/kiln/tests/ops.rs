//! `kiln::ops`: the same as Burn's operations, with gradients, and part of the graph; a mixture of experts
//! that routes by them is replayed.

use burn_autodiff::Autodiff;
use burn_core::module::{Module, Param};
use burn_nn::{Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams, LBFGSConfig, Optimizer};
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor, activation};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep, ops};

type B = Autodiff<Kiln>;

const BACKENDS: [CompileBackend; 2] = [CompileBackend::AotEager, CompileBackend::Cpu];

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

/// Different numbers, of both signs.
fn numbers<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<B, D> {
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len)
        .map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 * 0.01 - 5.0)
        .collect();
    Tensor::<B, 1>::from_floats(values.as_slice(), &device()).reshape(shape)
}

fn floats<X: Backend, const D: usize>(tensor: Tensor<X, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn ints<X: Backend, const D: usize>(tensor: Tensor<X, D, Int>) -> Vec<i64> {
    tensor.into_data().iter::<i64>().collect()
}

/// Values, indices and the gradient of the values, weighted, with respect to `x`.
type Found = (Vec<f32>, Vec<i64>, Vec<f32>);

fn found(x: &Tensor<B, 3>, (values, indices): (Tensor<B, 3>, Tensor<B, 3, Int>)) -> Found {
    let weights = numbers(values.dims(), 5);
    let gradients = (values.clone() * weights).sum().backward();
    let gradient = x.grad(&gradients).expect("values follow from x");
    (floats(values), ints(indices), floats(gradient))
}

type Pairs = fn(Tensor<B, 3>, usize) -> (Tensor<B, 3>, Tensor<B, 3, Int>);

#[test]
fn values_indices_and_gradients_are_those_of_burn() {
    let table: [(&str, Pairs, Pairs); 5] = [
        ("sort", |x, dim| x.sort_with_indices(dim), ops::sort_with_indices),
        (
            "sort descending",
            |x, dim| x.sort_descending_with_indices(dim),
            ops::sort_descending_with_indices,
        ),
        (
            "topk",
            |x, dim| x.topk_with_indices(2, dim),
            |x, dim| ops::topk_with_indices(x, 2, dim),
        ),
        (
            "median",
            |x, dim| x.median_with_indices(dim),
            ops::median_with_indices,
        ),
        (
            "parts",
            |x, dim| (x.clone().sort(dim), x.argsort_descending(dim)),
            |x, dim| (ops::sort(x.clone(), dim), ops::argsort_descending(x, dim)),
        ),
    ];
    for (name, burn, kiln_op) in table {
        for dim in 0..3 {
            let x = || numbers([3, 4, 5], 1 + dim).require_grad();
            let (plain, eager) = (x(), x());
            let expected = found(&plain, burn(plain.clone(), dim));
            assert_eq!(
                found(&eager, kiln_op(eager.clone(), dim)),
                expected,
                "{name} along {dim}, eager"
            );
            for backend in BACKENDS {
                let options = CompileOptions::default()
                    .with_backend(backend)
                    .with_fullgraph(true);
                let compiled = kiln::compile_fn(move |x| kiln_op(x, dim)).with_options(options);
                let x = x();
                let again = found(&x, compiled.call(x.clone()).unwrap());
                assert_eq!(again, expected, "{name} along {dim}, {backend}");
            }
        }
    }
}

#[test]
fn equal_elements_keep_their_order_and_nan_is_the_largest() {
    let x = Tensor::<Kiln, 1>::from_floats([2.0, 1.0, f32::NAN, 2.0, 1.0, f32::INFINITY], &device());
    assert_eq!(ints(ops::argsort(x.clone(), 0)), [1, 4, 0, 3, 5, 2]);
    assert_eq!(ints(ops::argsort_descending(x.clone(), 0)), [2, 5, 0, 3, 1, 4]);
    assert_eq!(ints(ops::argtopk(x.clone(), 3, 0)), [2, 5, 0]);
    assert_eq!(
        floats(ops::topk(x.narrow(0, 3, 3), 3, 0)),
        [f32::INFINITY, 2.0, 1.0]
    );
    let int = Tensor::<Kiln, 1, Int>::from_ints([5, i32::MIN, 5, i32::MAX, 0], &device());
    assert_eq!(ints(ops::argsort(int.clone(), 0)), [1, 4, 0, 2, 3]);
    assert_eq!(ints(ops::median(int.clone(), 0)), [5]);
    assert_eq!(ints(ops::sort_descending(int, 0))[0], i64::from(i32::MAX));
    let even = Tensor::<Kiln, 1>::from_floats([4.0, 1.0, 3.0, 2.0], &device());
    assert_eq!(floats(ops::median(even, 0)), [2.0]);
}

#[test]
fn on_another_backend_they_are_burns_own() {
    type Flex = burn_flex::Flex;
    let x = Tensor::<Flex, 2>::from_floats([[3.0, 1.0, 2.0], [4.0, 6.0, 5.0]], &Default::default());
    assert_eq!(floats(ops::topk(x.clone(), 2, 1)), [3.0, 2.0, 6.0, 5.0]);
    assert_eq!(ints(ops::argsort(x, 1)), [1, 2, 0, 0, 2, 1]);
}

#[test]
fn one_hot_is_burns_and_part_of_the_graph() {
    let indices = || Tensor::<Kiln, 2, Int>::from_ints([[0, 2, 1], [3, -1, 0]], &device());
    let expected = ints(indices().one_hot::<3>(4));
    assert_eq!(ints(ops::one_hot::<_, 2, 3>(indices(), 4)), expected);
    for backend in BACKENDS {
        let options = CompileOptions::default()
            .with_backend(backend)
            .with_fullgraph(true);
        let mut region = kiln::compile(options);
        let found = region.run(|| ops::one_hot::<_, 2, 3>(indices() + 0, 4)).unwrap();
        assert_eq!(ints(found), expected, "{backend}");
    }
}

#[test]
fn a_break_in_burns_own_operation_names_the_function_to_use() {
    for (name, operation) in [
        (
            "sort_descending_with_indices",
            (|x: Tensor<Kiln, 1>| x.sort_descending_with_indices(0).0) as fn(_) -> _,
        ),
        ("topk_with_indices", |x| x.topk_with_indices(2, 0).0),
        ("median", |x| x.median(0)),
        ("argsort", |x| x.argsort(0).float()),
        ("one_hot", |x| x.int().one_hot::<2>(5).float().reshape([20])),
    ] {
        let mut region = kiln::compile(CompileOptions::default().with_backend(CompileBackend::AotEager));
        let x = Tensor::from_floats([1.0, 3.0, 0.0, 2.0], &device());
        region.run(|| operation(x + 0.0)).unwrap();
        let text = region.explain().to_string();
        assert!(
            text.contains(&format!("use `kiln::ops::{name}`")),
            "{name}: {text}"
        );
    }
    let mut region = kiln::compile(CompileOptions::default().with_backend(CompileBackend::AotEager));
    let x = Tensor::<Kiln, 1>::from_floats([1.0, 3.0], &device());
    region.run(|| (x + 0.0).into_data()).unwrap();
    assert!(!region.explain().to_string().contains("kiln::ops"));
}

/// Two of four experts for each row, by the router's scores.
#[derive(Module, Debug)]
struct Experts<B: Backend> {
    router: Linear<B>,
    experts: Vec<Linear<B>>,
}

impl<B: Backend> Experts<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            router: LinearConfig::new(6, 4).init(device),
            experts: (0..4).map(|_| LinearConfig::new(6, 3).init(device)).collect(),
        }
    }

    /// `f[rows, 6] -> f[rows, 3]`. `ours` says whose operations the router uses.
    fn forward(&self, x: Tensor<B, 2>, ours: bool) -> Tensor<B, 2> {
        let scores = self.router.forward(x.clone());
        let (best, chosen) = match ours {
            true => ops::topk_with_indices(scores, 2, 1),
            false => scores.topk_with_indices(2, 1),
        };
        let weights = activation::softmax(best, 1);
        let hot: Tensor<B, 3, Int> = match ours {
            true => ops::one_hot(chosen, 4),
            false => chosen.one_hot(4),
        };
        // rows x 4: the weight of each expert, 0 where it was not chosen.
        let gates: Tensor<B, 2> = (hot.float() * weights.unsqueeze_dim(2)).sum_dim(1).squeeze_dim(1);
        let outputs = self
            .experts
            .iter()
            .enumerate()
            .map(|(index, expert)| expert.forward(x.clone()) * gates.clone().narrow(1, index, 1));
        outputs.reduce(|sum, output| sum + output).unwrap()
    }
}

/// The same weights at each run: where two scores nearly tie, rounding would choose the expert.
fn start() -> Experts<B> {
    let mut model = Experts::new(&device());
    let layers = std::iter::once(&mut model.router).chain(&mut model.experts);
    for (seed, layer) in layers.enumerate() {
        layer.weight = Param::from_tensor(numbers(layer.weight.dims(), seed + 1) * 0.1);
        layer.bias = Some(Param::from_tensor(
            numbers([layer.weight.dims()[1]], seed + 9) * 0.1,
        ));
    }
    model
}

fn experts_loss(model: &Experts<B>, batch: usize, ours: bool) -> Tensor<B, 1> {
    loss_of(
        model,
        numbers([16, 6], batch) * 0.3,
        numbers([16, 3], batch + 50) * 0.2,
        ours,
    )
}

fn loss_of(model: &Experts<B>, x: Tensor<B, 2>, target: Tensor<B, 2>, ours: bool) -> Tensor<B, 1> {
    (model.forward(x, ours) - target).powf_scalar(2.0).mean()
}

fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    let close = |(x, y): (&f32, &f32)| (x - y).abs() <= tolerance * y.abs().max(1.0);
    assert!(
        found.len() == expected.len() && found.iter().zip(expected).all(close),
        "{what}: {found:?} in place of {expected:?}"
    );
}

#[test]
fn a_mixture_of_experts_trains_as_plain_burn_and_is_replayed() {
    let start = start();
    let mut optim = AdamWConfig::new().with_epsilon(1e-3).init();
    let mut model = start.clone();
    let mut expected = Vec::new();
    for batch in 0..8 {
        let loss = experts_loss(&model, batch, false);
        expected.extend(floats(loss.clone()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.01, model, gradients);
    }
    for backend in BACKENDS {
        let loss = |model: &Experts<B>, (x, y): (Tensor<B, 2>, Tensor<B, 2>)| loss_of(model, x, y, true);
        let mut step = TrainStep::new(start.clone(), AdamWConfig::new().with_epsilon(1e-3).init(), loss)
            .with_backend(backend)
            .build()
            .unwrap();
        let mut losses = Vec::new();
        for batch in 0..8 {
            let inputs = (numbers([16, 6], batch) * 0.3, numbers([16, 3], batch + 50) * 0.2);
            losses.extend(floats(step.step(0.01, inputs).unwrap()));
        }
        assert_close(&losses, &expected, 1e-4, &backend.to_string());
        let history = step.history();
        assert!(
            history.replayed >= 4 && history.obstacle.is_none(),
            "{history:?} {}",
            step.explain()
        );
        let trained = step.into_model();
        assert_close(
            &floats(trained.router.weight.val()),
            &floats(model.router.weight.val()),
            1e-4,
            "the router's weights",
        );
    }
}

/// Losses and trained weights of some steps of L-BFGS.
fn minimised(
    mut evaluate: impl FnMut(&Linear<B>) -> (Tensor<B, 1>, GradientsParams),
) -> (Vec<f32>, Vec<f32>, usize) {
    let mut model = start().router;
    let mut optim = LBFGSConfig::new().init();
    let (mut losses, mut calls) = (Vec::new(), 0);
    for _ in 0..3 {
        let (next, loss) = optim.step(0.5, model, |model| {
            calls += 1;
            let (loss, gradients) = evaluate(&model);
            (f64::from(loss.into_scalar()), gradients)
        });
        model = next;
        losses.push(loss as f32);
    }
    (losses, floats(model.weight.val()), calls)
}

#[test]
fn lbfgs_with_loss_and_gradient_compiled_compiles_once() {
    // Least squares: one minimum, whatever rounding makes of the search.
    let gradients = |model: &Linear<B>| {
        let error = model.forward(numbers([32, 6], 3) * 0.3) - numbers([32, 4], 4) * 0.2;
        let loss = error.powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        (loss, gradients)
    };
    let expected = minimised(gradients);
    assert!(expected.2 > 8, "{expected:?}");
    for backend in BACKENDS {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        let found = minimised(|model| region.run(|| gradients(model)).unwrap());
        assert_close(&found.0, &expected.0, 1e-3, "losses");
        assert_close(&found.1, &expected.1, 1e-2, "weights");
        assert_eq!(region.report().compiles.len(), 1, "{}", region.explain());
        assert!(region.report().breaks.is_empty());
    }
}

/// Positions up to 999, of integers that end at 255 or 127.
#[test]
fn narrow_integers_are_sorted_like_wide_ones() {
    let values: Vec<i32> = (0..1000).map(|at| at * 7 % 120).collect();
    let wide = Tensor::<Kiln, 1, Int>::from_ints(values.as_slice(), &device());
    let (sorted, order) = ops::sort_with_indices(wide.clone(), 0);
    let (sorted, order) = (ints(sorted), ints(order));
    for dtype in [
        DType::U8,
        DType::I8,
        DType::I16,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::I64,
    ] {
        let narrow = wide.clone().cast(dtype);
        for backend in BACKENDS {
            let found = kiln::compile(CompileOptions::default().with_backend(backend))
                .run(|| {
                    let (values, order) = ops::sort_with_indices(narrow.clone(), 0);
                    let largest = ops::topk(narrow.clone(), 3, 0);
                    (values, order, largest, ops::median(narrow.clone(), 0))
                })
                .unwrap();
            assert_eq!(found.0.dtype(), dtype);
            assert_eq!(ints(found.0), sorted, "{dtype:?} on {backend}");
            assert_eq!(ints(found.1), order, "{dtype:?} on {backend}");
            assert_eq!(ints(found.2), [119, 119, 119], "{dtype:?} on {backend}");
            assert_eq!(ints(found.3), [sorted[499]], "{dtype:?} on {backend}");
        }
        assert_eq!(ints(ops::argsort(narrow, 0)), order, "{dtype:?}, eagerly");
    }
}

/// Burn announces the position of an integer in the integer's own type, which has no 290.
#[test]
fn positions_that_their_type_does_not_have_are_refused() {
    let x = Tensor::<Kiln, 1, Int>::arange(0..300, &device());
    let largest = std::panic::catch_unwind(|| x.clone().cast(DType::I8).argmax(0)).unwrap_err();
    let message = largest.downcast_ref::<String>().expect("a message");
    for part in ["ArgMax", "299", "I8", "cast it to I32"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(ints(x.clone().cast(DType::I16).argmax(0)), [299]);
    assert_eq!(ints(x.narrow(0, 0, 128).cast(DType::I8).argmax(0)), [127]);
}

/// Bounds that the type of the elements does not have.
#[test]
fn integers_are_clamped_to_any_bounds() {
    let values = [-7, 0, 1, 5, i32::MAX, i32::MIN];
    let x = Tensor::<Kiln, 1, Int>::from_ints(values, &device());
    let bytes = Tensor::<Kiln, 1, Int>::from_ints([0, 7, 200, 255], &device()).cast(DType::U8);
    let signed = Tensor::<Kiln, 1, Int>::from_ints([-128, -1, 100, 127], &device()).cast(DType::I8);
    let program = || {
        [
            ints(x.clone().clamp(0, i64::MAX)),
            ints(x.clone().clamp(i64::MIN, 1)),
            ints(bytes.clone().clamp(3, 256)),
            ints(signed.clone().clamp(0, 128)),
        ]
    };
    let expected = program();
    assert_eq!(expected[0], [0, 0, 1, 5, i64::from(i32::MAX), 0]);
    for backend in BACKENDS {
        let compiled = kiln::compile(CompileOptions::default().with_backend(backend))
            .run(|| {
                (
                    x.clone().clamp(0, i64::MAX),
                    x.clone().clamp(i64::MIN, 1),
                    bytes.clone().clamp(3, 256),
                    signed.clone().clamp(0, 128),
                )
            })
            .unwrap();
        let found = [
            ints(compiled.0),
            ints(compiled.1),
            ints(compiled.2),
            ints(compiled.3),
        ];
        assert_eq!(found, expected, "{backend}");
    }
}
