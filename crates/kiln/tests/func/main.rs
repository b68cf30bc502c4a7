//! Transformed functions: against loops, finite differences in f64, and Burn's own autograd.

mod inside;
mod torch;

use std::cell::RefCell;
use std::sync::{Mutex, Once, PoisonError};

use burn_autodiff::Autodiff;
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Distribution, Int, Tensor, TensorData, set_default_dtypes};
use kiln::func::{
    FuncError, Mode, Randomness, Same, Transformed, grad, hessian, jacobian, jvp, value_and_grad, vjp, vmap,
};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};

type B = Autodiff<Kiln>;

/// Programs that use the random generator, which is the process's, take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The device, whose floats are f64 in this program.
fn device() -> KilnDevice {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| set_default_dtypes::<Kiln>(&KilnDevice::cpu(), DType::F64, DType::I32).unwrap());
    KilnDevice::cpu()
}

fn options() -> CompileOptions {
    CompileOptions::default().with_backend(CompileBackend::AotEager)
}

/// Numbers in f64 that look random.
fn wide<const D: usize>(shape: [usize; D], seed: f64) -> Tensor<Kiln, D> {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|at| (seed + 1.7 * at as f64).sin()).collect();
    Tensor::from_data(TensorData::new(values, shape), (&device(), DType::F64))
}

/// The elements in f64. Burn's router hands out f32 whatever the tensor's type: the rest goes apart.
fn numbers<const D: usize>(tensor: &Tensor<Kiln, D>) -> Vec<f64> {
    let whole = tensor.clone().cast(DType::F64);
    let high = whole.clone().cast(DType::F32);
    let low = whole - high.clone().cast(DType::F64);
    let read = |part: Tensor<Kiln, D>| part.into_data().convert::<f64>().to_vec::<f64>().unwrap();
    read(high)
        .into_iter()
        .zip(read(low))
        .map(|(high, low)| high + low)
        .collect()
}

fn assert_close(actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        assert!(
            (actual - expected).abs() <= tolerance * (1.0 + expected.abs()),
            "{actual} is not {expected}"
        );
    }
}

type Weights = (Tensor<Kiln, 2>, Tensor<Kiln, 1>, Tensor<Kiln, 2>);
type Sample = (Tensor<Kiln, 1>, Tensor<Kiln, 1>);

/// The squared error of a network of two layers on one sample.
fn network((w, bias, v): Weights, (x, y): Sample) -> Tensor<Kiln, 1> {
    let hidden = (x.unsqueeze::<2>().matmul(w) + bias.unsqueeze()).tanh();
    let out = hidden.matmul(v).squeeze_dim::<1>(0);
    (out - y).powf_scalar(2.0).sum()
}

fn weights() -> Weights {
    (wide([3, 4], 0.1), wide([4], 0.2), wide([4, 2], 0.3))
}

#[test]
fn gradients_of_each_sample() {
    let (xs, ys) = (wide([5, 3], 0.4), wide([5, 2], 0.5));
    let alone = grad(network).with_options(options());
    for backend in [
        CompileBackend::AotEager,
        CompileBackend::Interpret,
        CompileBackend::Cpu,
    ] {
        let options = CompileOptions::default().with_backend(backend);
        let each = vmap(grad(network)).with_options(options);
        for _ in 0..2 {
            let (w, bias, v) = each.call(Same(weights()), (xs.clone(), ys.clone())).unwrap();
            assert_eq!(w.dims(), [5, 3, 4]);
            assert_eq!(bias.dims(), [5, 4]);
            for sample in 0..5 {
                let x = xs.clone().narrow(0, sample, 1).squeeze_dim::<1>(0);
                let y = ys.clone().narrow(0, sample, 1).squeeze_dim::<1>(0);
                let expected = alone.call(weights(), (x, y)).unwrap();
                let row = |n: usize| sample * n..(sample + 1) * n;
                assert_close(&numbers(&w)[row(12)], &numbers(&expected.0), 1e-9);
                assert_close(&numbers(&bias)[row(4)], &numbers(&expected.1), 1e-9);
                assert_close(&numbers(&v)[row(8)], &numbers(&expected.2), 1e-9);
            }
        }
        assert_eq!(each.compiled(), 1);
    }
    assert_eq!(alone.compiled(), 1);
}

/// Gradients are those of Burn's autograd.
#[test]
fn gradients_are_those_of_burn() {
    let tracked = |tensor: Tensor<Kiln, 2>| Tensor::<B, 2>::from_inner(tensor).require_grad();
    let (w, x) = (wide([3, 4], 0.1), wide([2, 3], 0.2));
    let leaf = tracked(w.clone());
    let loss =
        burn_tensor::activation::softmax(Tensor::<B, 2>::from_inner(x.clone()).matmul(leaf.clone()), 1);
    let loss = loss.log().mul_scalar(0.5).mean();
    let expected = leaf.grad(&loss.clone().backward()).unwrap();
    let function = |w: Tensor<Kiln, 2>, x: Tensor<Kiln, 2>| {
        burn_tensor::activation::softmax(x.matmul(w), 1)
            .log()
            .mul_scalar(0.5)
            .mean()
    };
    let (value, gradient) = value_and_grad(function)
        .with_options(options())
        .call(w, x)
        .unwrap();
    assert_close(&numbers(&value), &numbers(&loss.inner()), 1e-12);
    assert_close(&numbers(&gradient), &numbers(&expected), 1e-10);
}

/// Second derivatives of a network against differences of its gradient.
#[test]
fn second_derivatives_of_a_network() {
    let sample: Sample = (wide([3], 0.4), wide([2], 0.5));
    let second = hessian(network)
        .with_options(options())
        .call(weights(), sample.clone())
        .unwrap();
    let gradient = grad(network).with_options(options());
    let parameters = |moved: usize, element: usize, step: f64| {
        let (w, bias, v) = weights();
        let nudge = |values: &mut Vec<f64>, of: usize| {
            if of == moved {
                values[element] += step;
            }
        };
        let mut all = [numbers(&w), numbers(&bias), numbers(&v)];
        all.iter_mut()
            .enumerate()
            .for_each(|(of, values)| nudge(values, of));
        let [w, bias, v] = all;
        let wide = (&device(), DType::F64);
        (
            Tensor::from_data(TensorData::new(w, [3, 4]), wide),
            Tensor::from_data(TensorData::new(bias, [4]), wide),
            Tensor::from_data(TensorData::new(v, [4, 2]), wide),
        )
    };
    let flat = |(w, bias, v): Weights| [numbers(&w), numbers(&bias), numbers(&v)];
    for (moved, count) in [12, 4, 8].into_iter().enumerate() {
        for element in 0..count {
            let of = |step| {
                flat(
                    gradient
                        .call(parameters(moved, element, step), sample.clone())
                        .unwrap(),
                )
            };
            let (after, before) = (of(1e-5), of(-1e-5));
            for (of, (after, before)) in after.iter().zip(&before).enumerate() {
                let expected: Vec<f64> = after.iter().zip(before).map(|(a, b)| (a - b) / 2e-5).collect();
                let column: Vec<f64> = numbers(&second[of][moved])
                    .chunks(count)
                    .map(|row| row[element])
                    .collect();
                assert_close(&column, &expected, 1e-7);
            }
        }
    }
    assert_eq!(gradient.compiled(), 1, "another value is no other function");
}

/// A Hessian times a vector is forward mode over reverse mode.
#[test]
fn transforms_compose() {
    let sample: Sample = (wide([3], 0.4), wide([2], 0.5));
    let direction = (wide([3, 4], 0.7), wide([4], 0.8), wide([4, 2], 0.9));
    let product = jvp(grad(network)).with_options(options());
    let (_, product) = product
        .call(weights(), (sample.clone(), direction.clone()))
        .unwrap();
    let second = hessian(network)
        .with_options(options())
        .call(weights(), sample)
        .unwrap();
    let direction = [
        numbers(&direction.0),
        numbers(&direction.1),
        numbers(&direction.2),
    ];
    let product = [numbers(&product.0), numbers(&product.1), numbers(&product.2)];
    for (row, product) in second.iter().zip(&product) {
        let mut expected = vec![0.0; product.len()];
        for (matrix, direction) in row.iter().zip(&direction) {
            for (sum, row) in expected.iter_mut().zip(numbers(matrix).chunks(direction.len())) {
                *sum += row.iter().zip(direction).map(|(a, b)| a * b).sum::<f64>();
            }
        }
        assert_close(product, &expected, 1e-9);
    }
}

#[test]
fn jacobians_in_both_modes() {
    let function = |x: Tensor<Kiln, 1>, a: Tensor<Kiln, 2>| (x.unsqueeze::<2>().matmul(a).exp(), ());
    let (x, a) = (wide([3], 0.1), wide([3, 2], 0.2));
    let of = |mode| {
        jacobian(function)
            .with_mode(mode)
            .with_options(options())
            .call(x.clone(), a.clone())
            .unwrap()
    };
    let (forward, reverse) = (of(Mode::Forward), of(Mode::Reverse));
    let y = numbers(&x.clone().unsqueeze::<2>().matmul(a.clone()).exp());
    let a = numbers(&a);
    let expected: Vec<f64> = (0..2)
        .flat_map(|j| [0, 1, 2].map(|i| y[j] * a[2 * i + j]))
        .collect();
    assert_eq!(forward[0][0].dims(), [2, 3]);
    assert_close(&numbers(&forward[0][0]), &expected, 1e-12);
    assert_close(&numbers(&reverse[0][0]), &expected, 1e-12);
}

/// Both modes by hand: `cotangent . J tangent` either way. Integers among the parameters are no obstacle.
#[test]
fn products_with_a_jacobian() {
    type Table = (Tensor<Kiln, 2>, Tensor<Kiln, 1, Int>);
    let look_up =
        |(table, ids): Table, scale: Tensor<Kiln, 1>| table.select(0, ids).sin() * scale.unsqueeze();
    let ids = Tensor::<Kiln, 1, Int>::from_ints([2, 0, 2], &device());
    let (table, scale) = ((wide([4, 2], 0.1), ids.clone()), wide([2], 0.2));
    let (tangent, cotangent) = (wide([4, 2], 0.3), wide([3, 2], 0.4));
    let forward = jvp(look_up).with_options(options());
    let (value, moved) = forward
        .call(table.clone(), (scale.clone(), (tangent.clone(), ids)))
        .unwrap();
    let reverse = vjp(look_up).with_options(options());
    let (again, (gradient, kept)) = reverse.call(table, (scale, cotangent.clone())).unwrap();
    assert_close(&numbers(&value), &numbers(&again), 1e-12);
    assert_eq!(
        kept.into_data().convert::<i64>().to_vec::<i64>().unwrap(),
        [2, 0, 2]
    );
    let inner = |a: &Tensor<Kiln, 2>, b: &Tensor<Kiln, 2>| numbers(&(a.clone() * b.clone()).sum())[0];
    let (by_forward, by_reverse) = (inner(&moved, &cotangent), inner(&gradient, &tangent));
    assert!((by_forward - by_reverse).abs() < 1e-12 && by_forward.abs() > 1e-3);
}

/// Elements draw the same numbers or different ones; different ones are the rows of one draw.
#[test]
fn draws_of_a_batch() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let noisy = |x: Tensor<Kiln, 1>, (): ()| {
        let noise = Tensor::<Kiln, 1>::random([3], Distribution::Uniform(0.0, 1.0), &device());
        x + noise
    };
    let zeros = || Tensor::<Kiln, 2>::zeros([4, 3], &device());
    Kiln::seed(&device(), 7);
    let rows = numbers(&Tensor::<Kiln, 2>::random(
        [4, 3],
        Distribution::Uniform(0.0, 1.0),
        &device(),
    ));
    let different = vmap(noisy)
        .with_options(options())
        .with_randomness(Randomness::Different);
    Kiln::seed(&device(), 7);
    assert_close(&numbers(&different.call(zeros(), ()).unwrap()), &rows, 1e-6);
    let same = vmap(noisy).with_options(options());
    Kiln::seed(&device(), 7);
    let drawn = numbers(&same.call(zeros(), ()).unwrap());
    assert!(drawn.chunks(3).all(|row| row == &drawn[..3]));
    assert_close(&drawn[..3], &rows[..3], 1e-6);
    // The next call draws from the next stream, and compiles nothing.
    let next = numbers(&same.call(zeros(), ()).unwrap());
    assert_ne!(next, drawn);
    assert_eq!(same.compiled(), 1);
}

/// A batch of batches, and what is captured.
#[test]
fn batches_of_batches() {
    let matrix = wide([3, 2], 0.1);
    let captured = matrix.clone();
    let function = move |x: Tensor<Kiln, 1>, y: Tensor<Kiln, 1>| {
        x.unsqueeze::<2>().matmul(captured.clone()).squeeze_dim::<1>(0) * y
    };
    let (x, y) = (wide([2, 4, 3], 0.2), wide([2, 2], 0.3));
    let nested = vmap(vmap(function)).with_options(options());
    let each = y.unsqueeze_dim::<3>(1).repeat_dim(1, 4);
    let both = nested.call(x.clone(), each.clone()).unwrap();
    let expected = x.matmul(matrix.unsqueeze()) * each;
    assert_close(&numbers(&both), &numbers(&expected), 1e-12);
}

/// Inside: a compiled function, and Burn's autograd, whose gradient is differentiated once more. Outside: a
/// compiled function that calls.
#[test]
fn with_compiled_functions_and_autograd() {
    let compiled = kiln::compile_fn(|x: Tensor<Kiln, 1>| x.clone() * x).with_options(options());
    let cubes = move |x: Tensor<Kiln, 1>, (): ()| (compiled.call(x.clone()).unwrap() * x).sum();
    let x = wide([3], 0.1);
    let squares: Vec<f64> = numbers(&x).iter().map(|x| 3.0 * x * x).collect();
    let slopes = grad(cubes).with_options(options());
    assert_close(&numbers(&slopes.call(x.clone(), ()).unwrap()), &squares, 1e-12);

    let by_burn = |x: Tensor<Kiln, 1>, (): ()| {
        let x = Tensor::<B, 1>::from_inner(x).require_grad();
        let gradients = x.clone().powf_scalar(3.0).sum().backward();
        x.grad(&gradients).expect("x is used")
    };
    let second = jacobian(by_burn)
        .with_options(options())
        .call(x.clone(), ())
        .unwrap();
    let mut expected = vec![0.0; 9];
    numbers(&x)
        .iter()
        .enumerate()
        .for_each(|(at, x)| expected[4 * at] = 6.0 * x);
    assert_close(&numbers(&second[0][0]), &expected, 1e-9);

    let outer = kiln::compile_fn(|x: Tensor<Kiln, 1>| {
        let doubled = x.mul_scalar(2.0);
        slopes.call(doubled, ()).unwrap().add_scalar(1.0)
    })
    .with_options(options());
    for _ in 0..2 {
        let expected: Vec<f64> = squares.iter().map(|x| 4.0 * x + 1.0).collect();
        assert_close(&numbers(&outer.call(x.clone()).unwrap()), &expected, 1e-9);
    }
}

/// A closure may return an argument, or something from outside, or compute on nothing that it was given.
#[test]
fn closures_that_do_little() {
    let outside = wide([2], 0.3);
    let kept = outside.clone();
    let pair = move |x: Tensor<Kiln, 1>, (): ()| (x, kept.clone());
    let (x, same) = vmap(pair)
        .with_options(options())
        .call(wide([3, 2], 0.1), ())
        .unwrap();
    assert_close(&numbers(&x), &numbers(&wide([3, 2], 0.1)), 0.0);
    assert_close(
        &numbers(&same),
        &numbers(&outside.clone().unsqueeze::<2>().repeat_dim(0, 3)),
        0.0,
    );
    let constant = move |_: Tensor<Kiln, 1>, (): ()| outside.clone().sum();
    let gradient = grad(constant)
        .with_options(options())
        .call(wide([4], 0.1), ())
        .unwrap();
    assert_eq!(numbers(&gradient), [0.0; 4]);
    // The same tensor in two roles: it is differentiated by the first alone.
    let x = wide([2], 0.1);
    let product = |a: Tensor<Kiln, 1>, b: Tensor<Kiln, 1>| (a * b).sum();
    let gradient = grad(product)
        .with_options(options())
        .call(x.clone(), x.clone())
        .unwrap();
    assert_close(&numbers(&gradient), &numbers(&x), 1e-12);
}

fn square(x: Tensor<Kiln, 1>, (): ()) -> Tensor<Kiln, 1> {
    x.clone() * x
}

#[test]
fn what_cannot_be_transformed_says_so() {
    fn with<T>(function: Transformed<T>) -> Transformed<T> {
        function.with_options(options().with_name("mine"))
    }
    let x = || wide([3], 0.1);
    let read = |x: Tensor<Kiln, 1>, (): ()| {
        if x.clone().sum().into_scalar() > 0.0 {
            x
        } else {
            -x
        }
    };
    let error = with(vmap(read)).call(x().unsqueeze::<2>(), ()).unwrap_err();
    assert!(matches!(&error, FuncError::Reads { .. }), "{error}");
    assert!(
        error.to_string().starts_with("`mine` reads a tensor ("),
        "{error}"
    );
    let argument = |x: Tensor<Kiln, 1>, (): ()| x.clone().mul_scalar(x.into_scalar());
    assert!(matches!(
        with(grad(argument)).call(x().narrow(0, 0, 1), ()),
        Err(FuncError::Reads { .. })
    ));

    let error = with(grad(square)).call(x(), ()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("output 0 is f64[3], and a gradient is of one number"),
        "{error}"
    );
    let counts = |x: Tensor<Kiln, 1>, (): ()| x.argmax(0);
    assert!(matches!(
        with(grad(counts)).call(x(), ()),
        Err(FuncError::NoLoss { .. })
    ));
    let two = |x: Tensor<Kiln, 1>, y: Tensor<Kiln, 1>| x.sum() + y.sum();
    let sizes = with(vmap(two)).call(wide([2, 3], 0.1), wide([4, 3], 0.1));
    assert!(matches!(
        sizes,
        Err(FuncError::Sizes {
            first: 2,
            other: 4,
            ..
        })
    ));
    assert!(matches!(
        with(vmap(two)).call(Same(x()), Same(x())),
        Err(FuncError::NoBatch { .. })
    ));

    let tracked = Tensor::<B, 1>::from_inner(x()).require_grad();
    let of_tracked = |x: Tensor<B, 1>, (): ()| x.sum();
    assert!(matches!(
        with(grad(of_tracked)).call(tracked.clone(), ()),
        Err(FuncError::Tracked { .. })
    ));
    let gradient = with(grad(of_tracked))
        .call(Tensor::from_inner(tracked.inner()), ())
        .unwrap();
    assert_eq!(numbers(&gradient.inner()), [1.0; 3]);
    // Everything goes on afterwards.
    assert_close(&numbers(&(x() + x())), &numbers(&x().mul_scalar(2.0)), 0.0);
}

/// A parameter that the closure captures with its graph would lose its gradient: a penalty on the gradient of
/// a captured model, say. What is constant is captured without its graph.
#[test]
fn a_captured_tensor_that_is_tracked_is_an_error() {
    let w = Tensor::<B, 2>::from_inner(wide([3, 2], 0.3)).require_grad();
    let x = || Tensor::<B, 2>::from_inner(wide([4, 3], 0.1));
    let weight = w.clone();
    let score = move |x: Tensor<B, 2>, (): ()| x.matmul(weight.clone()).tanh().sum();
    let error = grad(score)
        .with_options(options().with_name("score"))
        .call(x(), ())
        .unwrap_err();
    assert!(matches!(error, FuncError::TrackedResult { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("`score` depends on a tensor that autograd tracks"),
        "{error}"
    );
    // In a region the error is the call's, and the region goes on.
    let weight = w.clone();
    let penalty = move || {
        let score = |x: Tensor<B, 2>, (): ()| x.matmul(weight.clone()).tanh().sum();
        assert!(matches!(
            grad(score).call(x(), ()),
            Err(FuncError::TrackedResult { .. })
        ));
        x().matmul(weight.clone()).sum().inner()
    };
    let mut region = kiln::compile(options().with_fullgraph(true));
    let found = region.run(&penalty).unwrap();
    assert_close(&numbers(&found), &numbers(&penalty()), 1e-12);

    let constant = Tensor::<B, 2>::from_inner(w.inner());
    let score = move |x: Tensor<B, 2>, (): ()| x.matmul(constant.clone()).sum();
    let gradient = grad(score).with_options(options()).call(x(), ()).unwrap();
    let row = numbers(&wide([3, 2], 0.3).sum_dim(1));
    assert_close(&numbers(&gradient.inner()), &row.repeat(4), 1e-12);
}

/// A method that Burn runs on the host is named with the function that is no read.
#[test]
fn a_sort_of_burns_names_its_counterpart() {
    let ranks = |x: Tensor<Kiln, 1>, (): ()| x.argsort(0);
    let error = vmap(ranks)
        .with_options(options())
        .call(wide([2, 3], 0.1), ())
        .unwrap_err();
    assert!(error.to_string().contains("use `kiln::ops::argsort`"), "{error}");
}

/// A tensor that the closure keeps elsewhere has no value, and says why.
#[test]
fn tensors_kept_elsewhere_have_no_value() {
    let kept = RefCell::new(None);
    let keeps = |x: Tensor<Kiln, 1>, (): ()| {
        let doubled = x.mul_scalar(2.0);
        *kept.borrow_mut() = Some(doubled.clone());
        doubled.sum()
    };
    assert!(
        grad(keeps)
            .with_options(options())
            .call(wide([2], 0.1), ())
            .is_ok()
    );
    let error = kept.take().expect("it was kept").try_into_data().unwrap_err();
    assert!(
        format!("{error:?}").contains("inside a function that is transformed"),
        "{error:?}"
    );
}

/// Another shape is compiled anew, a known one is not.
#[test]
fn shapes_are_compiled_once_each() {
    let function = vmap(square).with_options(options());
    for size in [2, 3, 2, 3] {
        let out = function.call(wide([size, 4], 0.1), ()).unwrap();
        let expected: Vec<f64> = numbers(&wide([size, 4], 0.1)).iter().map(|x| x * x).collect();
        assert_close(&numbers(&out), &expected, 1e-12);
    }
    assert_eq!(function.compiled(), 2);
}
