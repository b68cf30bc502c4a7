//! Transformed functions called inside of regions: they are part of the region's graph.

use kiln::{CompileBackend, CompileOptions, RegionReport};

use super::*;

const BACKENDS: [CompileBackend; 4] = [
    CompileBackend::Eager,
    CompileBackend::AotEager,
    CompileBackend::Interpret,
    CompileBackend::Cpu,
];

/// Runs `program` three times outside of a region and in a region of each backend, and compares what it
/// returns. The region has one graph, without a break.
fn check(program: impl Fn(usize) -> Tensor<Kiln, 1>, compiled: usize) -> RegionReport {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = || Kiln::seed(&device(), 3);
    seed();
    let expected: Vec<Vec<f64>> = (0..5).map(|call| numbers(&program(call))).collect();
    let mut last = None;
    for backend in BACKENDS {
        let options = CompileOptions::default()
            .with_backend(backend)
            .with_fullgraph(true);
        let mut region = kiln::compile(options);
        seed();
        for (call, expected) in expected.iter().enumerate() {
            let result = region.run(|| program(call)).unwrap();
            assert_close(&numbers(&result), expected, 1e-9);
        }
        let report = region.report();
        assert!(report.breaks.is_empty(), "{:?}", report.breaks);
        if backend != CompileBackend::Eager {
            assert_eq!(
                report.compiles.len(),
                compiled,
                "{backend}: {:?}",
                report.recompiles
            );
        }
        last = Some(report);
    }
    last.unwrap()
}

/// `x^3`, whose gradient is `3 x^2`, between operations of the region.
#[test]
fn a_gradient_in_the_middle_of_a_region() {
    let cubes = |x: Tensor<Kiln, 1>, (): ()| x.powf_scalar(3.0).sum();
    let program = |call: usize| {
        let x = wide([4], call as f64).exp();
        let slopes = grad(cubes).with_options(options()).call(x.clone(), ()).unwrap();
        slopes - x
    };
    check(program, 1);
    let x = numbers(&wide([4], 1.0).exp());
    let expected: Vec<f64> = x.iter().map(|x| 3.0 * x * x - x).collect();
    assert_close(&numbers(&program(1)), &expected, 1e-12);
}

/// Tensors that the closure captures: one that the region makes, one from before, and one made from data.
#[test]
fn what_a_closure_captures() {
    let constant = wide([4], 0.5);
    let program = |call: usize| {
        let made = wide([4], call as f64) + 1.0;
        let function = |x: Tensor<Kiln, 1>, y: Tensor<Kiln, 1>| {
            let data = Tensor::<Kiln, 1>::from_floats([0.5, -1.5, 2.0, 0.25], &device()).cast(DType::F64);
            ((x * made.clone() + constant.clone()).tanh() * y * data).sum()
        };
        let x = wide([4], 0.3) * 2.0;
        let slopes = grad(function)
            .with_options(options())
            .call(x.clone(), made.clone() * 3.0);
        slopes.unwrap() + x + made.clone()
    };
    check(program, 1);
    // By hand: y c a (1 - tanh(a x + b)^2).
    let (x, a) = (numbers(&(wide([4], 0.3) * 2.0)), numbers(&(wide([4], 2.0) + 1.0)));
    let (b, c) = (numbers(&constant), [0.5, -1.5, 2.0, 0.25]);
    let expected: Vec<f64> = (0..4)
        .map(|i| {
            let tanh = (a[i] * x[i] + b[i]).tanh();
            3.0 * a[i] * c[i] * a[i] * (1.0 - tanh * tanh) + x[i] + a[i]
        })
        .collect();
    assert_close(&numbers(&program(2)), &expected, 1e-7);
}

/// Tensors whose last use is in the closure: pending ones, ones from before, arguments.
#[test]
fn tensors_that_end_inside() {
    let program = |call: usize| {
        let pending = RefCell::new(Some(wide([3], call as f64).exp()));
        let ready = RefCell::new(Some(wide([3], 1.0 + call as f64)));
        let dropped = RefCell::new(Some(wide([3], 2.0) + 1.0));
        let function = |x: Tensor<Kiln, 1>, (): ()| {
            let both = pending.take().unwrap() * ready.take().unwrap();
            let kept = dropped.take().unwrap();
            let sum = (x * both + kept.clone()).sin();
            drop(kept);
            sum.sum()
        };
        let slopes = grad(function)
            .with_options(options())
            .call(wide([3], 0.2), ())
            .unwrap();
        // A tensor that the transformed function does not read, and an argument that ends.
        let unread = RefCell::new(Some(wide([3], 0.4)));
        let linear = |x: Tensor<Kiln, 1>, (): ()| (x.mul_scalar(3.0) + unread.take().unwrap()).sum();
        grad(linear)
            .with_options(options())
            .call(slopes.clone(), ())
            .unwrap()
            + slopes
    };
    check(program, 1);
}

/// Numbers of run time are numbers of the region: they change without another compilation.
#[test]
fn numbers_change_from_call_to_call() {
    let program = |call: usize| {
        let factor = 0.5 + call as f64;
        let function = |x: Tensor<Kiln, 1>, (): ()| (x.mul_scalar(factor).exp() + factor).sum();
        let (value, slopes) = value_and_grad(function).call(wide([3], 0.1), ()).unwrap();
        slopes.mul_scalar(2.0) + value.mul_scalar(factor)
    };
    check(program, 1);
    let expected: Vec<f64> = {
        let x = numbers(&wide([3], 0.1));
        let value: f64 = x.iter().map(|x| (3.5 * x).exp() + 3.5).sum();
        x.iter().map(|x| 7.0 * (3.5 * x).exp() + 3.5 * value).collect()
    };
    assert_close(&numbers(&program(3)), &expected, 1e-12);
}

/// Another path through the closure is another step, and the guard says what differs.
#[test]
fn another_branch_is_another_step() {
    let program = |call: usize| {
        let function = |x: Tensor<Kiln, 1>, (): ()| match call % 2 {
            0 => x.sin().sum(),
            _ => x.cos().sum(),
        };
        grad(function)
            .with_options(options())
            .call(wide([3], 0.1), ())
            .unwrap()
            + 1.0
    };
    let report = check(program, 2);
    let mismatch = report.recompiles[0].mismatch.to_string();
    let parts = [
        "the closure of operation 0, func.grad at",
        "Float.Sin at",
        "became",
        "Float.Cos",
    ];
    assert!(parts.iter().all(|part| mismatch.contains(part)), "{mismatch}");
}

/// Random operations take their streams as without a region, between others of the region.
#[test]
fn draws_inside_of_a_region() {
    let noise =
        |shape: [usize; 1]| Tensor::<Kiln, 1>::random(shape, Distribution::Normal(0.0, 1.0), &device());
    for randomness in [Randomness::Same, Randomness::Different] {
        let program = |_: usize| {
            let before = noise([4]);
            let noisy = |x: Tensor<Kiln, 1>, (): ()| {
                let unread = noise([2]);
                let drawn = x * noise([3]) + noise([3]);
                drop(unread);
                drawn
            };
            let drawn = vmap(noisy).with_options(options()).with_randomness(randomness);
            let drawn = drawn.call(wide([4, 3], 0.2), ()).unwrap();
            drawn.sum_dim(1).squeeze_dim::<1>(1) + before * noise([4])
        };
        // The numbers are drawn in f32, and normal ones by functions that round.
        check(program, 1);
    }
}

/// A gradient penalty: the closure of one gradient calls another one. Against differences in f64.
#[test]
fn functions_inside_of_functions() {
    let penalised = |w: Tensor<Kiln, 1>, x: Tensor<Kiln, 1>| {
        let score = |x: Tensor<Kiln, 1>, w: Tensor<Kiln, 1>| (x * w).tanh().sum();
        let captures = |x: Tensor<Kiln, 1>, (): ()| (x * w.clone()).tanh().sum();
        let slope = grad(captures).call(x.clone(), ()).unwrap();
        let given = grad(score).call(x.clone(), w.clone()).unwrap();
        let norm = (slope.powf_scalar(2.0) + given).sum();
        norm.powf_scalar(2.0) + score(x, w.clone())
    };
    let (w, x) = (wide([3], 0.4), wide([3], 0.7));
    let gradient = grad(penalised).with_options(options());
    let found = numbers(&gradient.call(w.clone(), x.clone()).unwrap());
    let value = |w: &[f64]| {
        let x = numbers(&x);
        let score: f64 = w.iter().zip(&x).map(|(w, x)| (w * x).tanh()).sum();
        let slope = |(w, x): (&f64, &f64)| w * (1.0 - (w * x).tanh().powi(2));
        let norm: f64 = w
            .iter()
            .zip(&x)
            .map(slope)
            .map(|slope| slope * slope + slope)
            .sum();
        norm * norm + score
    };
    let w = numbers(&w);
    let expected: Vec<f64> = (0..3)
        .map(|at| {
            let moved = |step: f64| {
                let mut w = w.clone();
                w[at] += step;
                value(&w)
            };
            (moved(1e-5) - moved(-1e-5)) / 2e-5
        })
        .collect();
    assert_close(&found, &expected, 1e-8);
    // Of each sample, and in a region.
    let each = |call: usize| {
        let xs = wide([4, 3], 0.7 + call as f64);
        let gradients = vmap(grad(penalised)).with_options(options());
        let gradients = gradients.call(Same(wide([3], 0.4)), xs).unwrap();
        gradients.sum_dim(0).squeeze_dim::<1>(0)
    };
    check(each, 1);
}

/// A Hessian times a vector, for the network, with a direction that the region computes.
#[test]
fn second_derivatives_in_a_region() {
    let program = |call: usize| {
        let sample: Sample = (wide([3], 0.4 + call as f64), wide([2], 0.5));
        let direction = (
            wide([3, 4], 0.7) * 2.0,
            wide([4], 0.8).exp(),
            wide([4, 2], 0.9) + 1.0,
        );
        let product = jvp(grad(network)).with_options(options());
        let (_, (w, bias, v)) = product.call(weights(), (sample, direction)).unwrap();
        Tensor::cat(vec![w.reshape([12]), bias, v.reshape([8])], 0)
    };
    check(program, 1);
    let (_, (w, bias, v)) = jvp(grad(network))
        .with_options(options())
        .call(
            weights(),
            (
                (wide([3], 1.4), wide([2], 0.5)),
                (
                    wide([3, 4], 0.7) * 2.0,
                    wide([4], 0.8).exp(),
                    wide([4, 2], 0.9) + 1.0,
                ),
            ),
        )
        .unwrap();
    let outside = [numbers(&w), numbers(&bias), numbers(&v)].concat();
    assert_close(&numbers(&program(1)), &outside, 1e-12);
}

/// Results that nobody reads, results that are arguments, arguments given twice, and closures of nothing.
#[test]
fn calls_that_do_little() {
    let outside = wide([3], 0.9);
    let program = |call: usize| {
        let x = wide([3], call as f64) * 2.0;
        let square = |x: Tensor<Kiln, 1>, (): ()| (x.clone() * x).sum();
        let (_, slopes) = value_and_grad(square).call(x.clone(), ()).unwrap();
        drop(grad(square).call(x.clone(), ()).unwrap());
        let product = |a: Tensor<Kiln, 1>, b: Tensor<Kiln, 1>| (a * b).sum();
        let twice = grad(product).call(x.clone(), x.clone()).unwrap();
        let nothing = |_: Tensor<Kiln, 1>, (): ()| outside.clone().sum();
        let zeros = grad(nothing).call(x.clone(), ()).unwrap();
        let itself = |x: Tensor<Kiln, 1>, (): ()| (x, outside.clone());
        let (rows, same) = vmap(itself)
            .call(x.clone().unsqueeze::<2>().repeat_dim(0, 2), ())
            .unwrap();
        let rows = (rows * same).sum_dim(0).squeeze_dim::<1>(0);
        slopes + twice + zeros + rows + x
    };
    check(program, 1);
    let (x, o) = (numbers(&(wide([3], 4.0) * 2.0)), numbers(&outside));
    let expected: Vec<f64> = x.iter().zip(o).map(|(x, o)| 4.0 * x + 2.0 * x * o).collect();
    assert_close(&numbers(&program(4)), &expected, 1e-12);
}

/// A closure that cannot be transformed is a typed error of the call; the region goes on in one graph.
#[test]
fn errors_inside_of_a_region() {
    let options = || options().with_fullgraph(true);
    let mut region = kiln::compile(options());
    for _ in 0..2 {
        let result = region.run(|| {
            let x = wide([2], 0.1) * 2.0;
            let shown = x.clone();
            let reads = |y: Tensor<Kiln, 1>, (): ()| {
                y.mul_scalar(f64::from(shown.clone().into_data().num_elements() as u32))
            };
            assert!(matches!(
                vmap(reads).call(x.clone().unsqueeze::<2>(), ()),
                Err(FuncError::Reads { .. })
            ));
            let branches = |y: Tensor<Kiln, 1>, (): ()| match y.clone().sum().into_scalar() > 0.0 {
                true => y.sum(),
                false => y.exp().sum(),
            };
            assert!(matches!(
                grad(branches).call(x.clone(), ()),
                Err(FuncError::Reads { read: Some(_), .. })
            ));
            let no_loss = |_: Tensor<Kiln, 1>, (): ()| ();
            assert!(matches!(
                grad(no_loss).call(x.clone(), ()),
                Err(FuncError::NoLoss { .. })
            ));
            let pair = |y: Tensor<Kiln, 1>, (): ()| y * 2.0;
            assert!(matches!(
                grad(pair).call(x.clone(), ()),
                Err(FuncError::Transform { .. })
            ));
            let disabled = |y: Tensor<Kiln, 1>, (): ()| kiln::disable(|| y.clone().sum());
            assert!(grad(disabled).call(x.clone(), ()).is_err());
            let tracked = Tensor::<B, 1>::from_inner(x.clone()).require_grad();
            let sum = |y: Tensor<B, 1>, (): ()| y.sum();
            assert!(matches!(
                grad(sum).call(tracked, ()),
                Err(FuncError::Tracked { .. })
            ));
            // A captured tensor that ends in a closure that fails.
            let kept = RefCell::new(Some(x.clone() + 5.0));
            let fails = |y: Tensor<Kiln, 1>, (): ()| y + kept.take().unwrap();
            assert!(matches!(
                grad(fails).call(x.clone(), ()),
                Err(FuncError::Transform { .. })
            ));
            x + 1.0
        });
        assert_close(
            &numbers(&result.unwrap()),
            &numbers(&(wide([2], 0.1) * 2.0 + 1.0)),
            0.0,
        );
    }
    let report = region.report();
    assert!(
        report.breaks.is_empty() && report.compiles.len() == 1,
        "{report:?}"
    );
    // A panic is the program's, and the next call is as usual.
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        region.run(|| {
            let function = |_: Tensor<Kiln, 1>, (): ()| -> Tensor<Kiln, 1> { panic!("mine") };
            grad(function).call(wide([2], 0.1) * 2.0, ()).unwrap()
        })
    }));
    assert_eq!(panics.unwrap_err().downcast_ref::<&str>(), Some(&"mine"));
    let square = |x: Tensor<Kiln, 1>, (): ()| (x.clone() * x).sum();
    let result = region
        .run(|| grad(square).call(wide([2], 0.1), ()).unwrap())
        .unwrap();
    assert_close(&numbers(&result), &numbers(&(wide([2], 0.1) * 2.0)), 1e-12);
}

/// In a part that is not recorded a call compiles by itself; the break is the one that `disable` makes.
#[test]
fn a_call_in_a_part_that_is_not_recorded() {
    let square = |x: Tensor<Kiln, 1>, (): ()| (x.clone() * x).sum();
    let slopes = grad(square).with_options(options());
    let mut region = kiln::compile(options());
    for _ in 0..2 {
        let result = region.run(|| {
            let x = wide([2], 0.1).exp();
            kiln::disable(|| slopes.call(x.clone(), ()).unwrap()) + slopes.call(x, ()).unwrap()
        });
        assert_close(
            &numbers(&result.unwrap()),
            &numbers(&(wide([2], 0.1).exp() * 4.0)),
            1e-12,
        );
    }
    assert_eq!(slopes.compiled(), 1);
    let breaks = region.report().breaks;
    assert!(
        breaks
            .iter()
            .all(|(it, _)| it.reason == kiln::BreakReason::Disabled),
        "{breaks:?}"
    );
}

/// Sizes that vary share their kernels.
#[test]
fn sizes_vary() {
    let function = |x: Tensor<Kiln, 1>, w: Tensor<Kiln, 1>| (x * w).tanh().sum();
    let step = kiln::compile_fn(|x: Tensor<Kiln, 2>| {
        let slopes = vmap(grad(function))
            .call(x.clone(), Same(wide([4], 0.3)))
            .unwrap();
        slopes.sum_dim(0) + x.mean_dim(0)
    })
    .with_options(CompileOptions::default().with_fullgraph(true));
    let alone = vmap(grad(function)).with_options(options());
    for size in [3, 5, 9, 6, 12, 7, 20] {
        let x = wide([size, 4], 0.2);
        let found = numbers(&step.call(x.clone()).unwrap());
        let expected = alone.call(x.clone(), Same(wide([4], 0.3))).unwrap().sum_dim(0) + x.mean_dim(0);
        assert_close(&found, &numbers(&expected), 1e-9);
    }
    let report = step.report();
    let built = report.compiles.iter().filter(|compile| !compile.absorbed).count();
    assert!(built <= 3, "{}", step.explain());
    // What differs is the size, not the function that follows from it.
    let mismatch = report.compiles[1].mismatch.as_ref().unwrap().to_string();
    assert!(mismatch.contains("f64 [3, 4] became f64 [5, 4]"), "{mismatch}");
}

/// A function that is trained eagerly: its gradients go through the operations beside the transformed one.
#[test]
fn a_call_in_a_function_under_autograd() {
    let weigh = |x: Tensor<B, 1>, a: Tensor<B, 1>| {
        let importance = |a: Tensor<Kiln, 1>, (): ()| a.exp().sum();
        let weights = grad(importance)
            .with_options(options())
            .call(a.clone().inner(), ())
            .unwrap();
        (x * a * Tensor::from_inner(weights)).sum()
    };
    let gradients = |compiled: bool, call: usize| {
        let x = Tensor::<B, 1>::from_inner(wide([3], call as f64)).require_grad();
        let a = Tensor::<B, 1>::from_inner(wide([3], 0.5 + call as f64)).require_grad();
        let loss = match compiled {
            true => FUNCTION.with(|function| function.call((x.clone(), a.clone())).unwrap()),
            false => weigh(x.clone(), a.clone()),
        };
        let found = loss.backward();
        (
            numbers(&x.grad(&found).unwrap()),
            numbers(&a.grad(&found).unwrap()),
        )
    };
    type Function = Box<dyn Fn((Tensor<B, 1>, Tensor<B, 1>)) -> Tensor<B, 1>>;
    thread_local! {
        static FUNCTION: kiln::CompiledFn<Function> = kiln::compile_fn(Box::new(|(x, a): (Tensor<B, 1>, Tensor<B, 1>)| {
            let importance = |a: Tensor<Kiln, 1>, (): ()| a.exp().sum();
            let weights = grad(importance).call(a.clone().inner(), ()).unwrap();
            (x * a * Tensor::from_inner(weights)).sum()
        }) as Function)
        .with_options(options());
    }
    for call in 0..3 {
        let (found, expected) = (gradients(true, call), gradients(false, call));
        assert_close(&found.0, &expected.0, 1e-12);
        assert_close(&found.1, &expected.1, 1e-12);
    }
    FUNCTION.with(|function| assert_eq!(function.compiled_pairs(), 1, "{}", function.explain_tracked()));
}

/// Tangents of another shape are a typed error where they are given.
#[test]
fn tangents_that_do_not_fit() {
    let sum = |x: Tensor<Kiln, 1>, (): ()| x.sum();
    let mut region = kiln::compile(options());
    region
        .run(|| {
            let error = jvp(sum)
                .call(wide([3], 0.1) * 2.0, ((), wide([4], 0.2)))
                .unwrap_err();
            assert!(error.to_string().contains("argument 1 is f64 [4]"), "{error}");
        })
        .unwrap();
}

/// Two results that are one tensor from outside, and two that are not, are two functions.
#[test]
fn results_from_outside() {
    let (a, b) = (wide([2], 0.1), wide([2], 0.2));
    for inside in [false, true] {
        let which = std::cell::Cell::new(false);
        let pair = |_: Tensor<Kiln, 1>, (): ()| match which.get() {
            false => (a.clone(), a.clone()),
            true => (a.clone(), b.clone()),
        };
        let rows = vmap(pair).with_options(options());
        let mut region = kiln::compile(options());
        for other in [false, true, false] {
            which.set(other);
            let call = || rows.call(wide([1, 2], 0.3), ()).unwrap();
            let (first, second) = match inside {
                true => region.run(call).unwrap(),
                false => call(),
            };
            assert_close(&numbers(&first), &numbers(&a), 0.0);
            assert_close(&numbers(&second), &numbers(if other { &b } else { &a }), 0.0);
        }
    }
}

/// A function whose closure calls the function itself: the derivative of the sum of a derivative.
#[test]
fn a_function_that_calls_itself() {
    type Closure = Box<dyn Fn(Tensor<Kiln, 1>, ()) -> Tensor<Kiln, 1>>;
    let own = std::rc::Rc::new(std::cell::OnceCell::<Transformed<kiln::func::Grad<Closure>>>::new());
    let depth = std::rc::Rc::new(std::cell::Cell::new(0));
    let (inner, left) = (std::rc::Rc::downgrade(&own), depth.clone());
    let closure = move |x: Tensor<Kiln, 1>, (): ()| match left.replace(left.get() - 1) {
        0 => x.powf_scalar(4.0).sum(),
        _ => inner.upgrade().unwrap().get().unwrap().call(x, ()).unwrap().sum(),
    };
    assert!(
        own.set(grad(Box::new(closure) as Closure).with_options(options()))
            .is_ok()
    );
    let x = numbers(&wide([3], 0.3));
    for (order, expected) in [(0, 4.0), (1, 12.0), (2, 24.0)] {
        depth.set(order);
        let slopes = own.get().unwrap().call(wide([3], 0.3), ()).unwrap();
        let expected: Vec<f64> = x.iter().map(|x| expected * x.powi(3 - order)).collect();
        assert_close(&numbers(&slopes), &expected, 1e-10);
    }
}

/// Draws of functions inside of functions.
#[test]
fn draws_of_nested_functions() {
    for randomness in [Randomness::Same, Randomness::Different] {
        let program = |_: usize| {
            let function = |x: Tensor<Kiln, 1>, (): ()| {
                let outer = x.random_like(Distribution::Uniform(0.0, 1.0));
                let noisy = |y: Tensor<Kiln, 1>, (): ()| {
                    let inner = y.random_like(Distribution::Uniform(0.0, 1.0));
                    (y.sin() * inner).sum()
                };
                let slopes = grad(noisy).call(x.clone(), ()).unwrap();
                let after = x.random_like(Distribution::Uniform(0.0, 1.0));
                slopes * outer + after
            };
            let each = vmap(function).with_options(options()).with_randomness(randomness);
            let rows = each.call(wide([4, 3], 0.2), ()).unwrap();
            rows.sum_dim(1).squeeze_dim::<1>(1)
        };
        check(program, 1);
        // By hand: three draws, in this order.
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let uniform = |shape| Tensor::<Kiln, 2>::random(shape, Distribution::Uniform(0.0, 1.0), &device());
        Kiln::seed(&device(), 8);
        let draw = || match randomness {
            Randomness::Same => uniform([1, 3]).repeat_dim(0, 4),
            _ => uniform([4, 3]),
        };
        let (outer, inner, after) = (draw(), draw(), draw());
        let expected = (wide([4, 3], 0.2).cos() * inner * outer + after).sum_dim(1);
        Kiln::seed(&device(), 8);
        assert_close(&numbers(&program(0)), &numbers(&expected), 1e-6);
    }
}

/// Another thread that reads what the region has made cuts the region, and the call goes on. One that reads
/// what the closure makes is an error of the call.
#[test]
fn other_threads() {
    let mut region = kiln::compile(options());
    let result = region.run(|| {
        let made = wide([3], 0.1).exp();
        let function = |x: Tensor<Kiln, 1>, (): ()| {
            let product = x * made.clone();
            let read = made.clone();
            let seen = std::thread::spawn(move || read.into_data()).join().unwrap();
            assert_eq!(seen.num_elements(), 3);
            (product * made.clone()).sum()
        };
        let slopes = grad(function)
            .with_options(options())
            .call(wide([3], 0.2), ())
            .unwrap();
        let leaks = |x: Tensor<Kiln, 1>, (): ()| {
            let leaked = x.clone() * 2.0;
            assert!(
                std::thread::spawn(move || leaked.try_into_data())
                    .join()
                    .unwrap()
                    .is_err()
            );
            x.sum()
        };
        let error = grad(leaks).call(wide([3], 0.2), ()).unwrap_err();
        assert!(error.to_string().contains("another thread"), "{error}");
        slopes
    });
    let expected: Vec<f64> = numbers(&wide([3], 0.1)).iter().map(|x| (2.0 * x).exp()).collect();
    assert_close(&numbers(&result.unwrap()), &expected, 1e-12);
    let breaks = region.report().breaks;
    assert!(
        breaks
            .iter()
            .all(|(it, _)| it.reason == kiln::BreakReason::OtherThread),
        "{breaks:?}"
    );
    assert_eq!(breaks.len(), 1);
}

/// A frozen region names what differs in the closure.
#[test]
fn a_frozen_region_names_the_closure() {
    let mut region = kiln::compile(options());
    let call = |exponent: f64| {
        let function = |x: Tensor<Kiln, 1>, (): ()| x.powf_scalar(exponent).sum();
        grad(function).call(wide([3], 0.1).exp(), ()).unwrap()
    };
    for _ in 0..2 {
        region.run(|| call(3.5)).unwrap();
    }
    region.freeze();
    region.run(|| call(3.5)).unwrap();
    let mut kept = None;
    let error = region.run(|| kept = Some(call(2.5))).unwrap_err().to_string();
    assert!(
        error.contains("the closure of operation 1, func.grad") && error.contains("Float.PowfScalar"),
        "{error}"
    );
    let expected = numbers(&wide([3], 0.1).exp().powf_scalar(1.5).mul_scalar(2.5));
    assert_close(&numbers(&kept.unwrap()), &expected, 1e-12);
}
