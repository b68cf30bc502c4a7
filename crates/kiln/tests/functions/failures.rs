//! Functions that panic, cannot be compiled, or lose a gradient: nothing is poisoned, and nothing is silent.

use super::*;

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
fn an_error_of_the_compiler_leaves_state_as_without_kiln() {
    let run = |budget| {
        let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        Kiln::seed(&device(), 5);
        let net = Net::<B>::new(&device());
        let options = CompileOptions {
            memory_budget: budget,
            ..CompileOptions::default()
        };
        let forward = kiln::compile_fn(|net: &Net<B>, x: Tensor<B, 2>| net.forward(x)).with_options(options);
        for call in 0..3 {
            let result = forward.call_with::<B, _, _, _>(&net, matrix(6, 3, call));
            assert_eq!(result.is_err(), budget.is_some());
        }
        let mut seen = Seen::default();
        seen.net(&net);
        seen.generator();
        seen.0
    };
    // No step fits into no memory.
    for ((name, found), (_, expected)) in run(Some(0)).iter().zip(&run(None)) {
        let close = |(x, y): (&f32, &f32)| (x - y).abs() <= 1e-5;
        assert!(
            found.iter().zip(expected).all(close),
            "{name}: {found:?} in place of {expected:?}"
        );
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
    type Beside = fn(&Tensor<B, 1>) -> Tensor<B, 1>;
    let keeps: [(Beside, Beside); 2] = [
        (|h| h.clone() * 2.0, |h| h.clone().detach() * 0.5),
        // What is kept is also returned, but detached.
        (|h| h.clone(), |h| h.clone().detach()),
    ];
    for (keep, beside) in keeps {
        let kept = RefCell::new(None);
        let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
        let function = kiln::compile_fn(|x: Tensor<B, 1>| {
            let h = x.exp();
            *kept.borrow_mut() = Some(keep(&h));
            (h.clone() * 3.0, beside(&h))
        })
        .with_options(options);
        let (y, _): (Tensor<B, 1>, Tensor<B, 1>) = function.call(vector(&[1.0, 2.0]).require_grad()).unwrap();
        let loss = y.sum() + kept.take().unwrap().sum();
        let payload = catch_unwind(AssertUnwindSafe(|| loss.backward()))
            .err()
            .expect("a lost gradient");
        let message = payload.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(message.contains("return the tensor"), "{message}");
    }
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

#[test]
fn other_threads_that_build_graphs_meanwhile_are_no_strays() {
    let (begun, go_on) = (Barrier::new(2), Barrier::new(2));
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let function = kiln::compile_fn(|x: Tensor<B, 1>| {
        let h = x.exp();
        begun.wait();
        go_on.wait();
        h * 3.0
    })
    .with_options(options);
    let x = vector(&[1.0, 2.0]).require_grad();
    let (y, other, w) = std::thread::scope(|scope| {
        let call = scope.spawn(|| function.call(x.clone()).unwrap());
        // Trained, and made while the function is traced.
        begun.wait();
        let w = vector(&[0.5, 0.25]).require_grad();
        let other = w.clone() * w.clone();
        go_on.wait();
        (call.join().unwrap(), other, w)
    });
    let gradients = (y.sum() + (other * w.clone()).sum()).backward();
    let dx = x.grad(&gradients).unwrap().into_data();
    dx.assert_approx_eq::<f32>(
        &(x.inner().exp() * 3.0).into_data(),
        burn_tensor::Tolerance::default(),
    );
    let dw = w.grad(&gradients).unwrap().into_data();
    dw.assert_approx_eq::<f32>(
        &(w.inner().powf_scalar(2.0) * 3.0).into_data(),
        burn_tensor::Tolerance::default(),
    );
}
