//! Functions with state, random numbers and reads: each call runs the function once.

use super::*;

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
        forward.assert_explained("state.rs");
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
fn state_in_a_cell_of_the_function() {
    compare(|how, seen| {
        let centre = RefCell::new(vector(&[0.0, 0.0, 0.0]));
        let previous = RefCell::new(None::<Tensor<B, 2>>);
        let function = how.function(|x: Tensor<B, 2>| {
            let old = centre.borrow().clone();
            *centre.borrow_mut() = old.clone() * 0.9 + x.clone().detach().mean_dim(0).reshape([3]) * 0.1;
            let change = match previous.replace(Some(x.clone().detach())) {
                Some(previous) => x.clone() - previous,
                None => x.clone(),
            };
            (x - old.reshape([1, 3])) * change
        });
        for call in 0..6 {
            let x = matrix(4, 3, call);
            let x = if call % 3 == 2 { x } else { x.require_grad() };
            let y = function.call(x.clone());
            seen.values("y", &y);
            if call % 3 != 2 {
                seen.gradient("dx", &x, &y.sum().backward());
            }
            let kept = centre.borrow().clone();
            seen.values("centre", &kept);
            if call == 3 {
                *centre.borrow_mut() = vector(&[1.0, 2.0, 3.0]);
            }
            seen.values("centre kept before", &kept);
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
fn a_read_with_a_captured_parameter_and_an_inner_backward_pass() {
    compare(|how, seen| {
        let weight = matrix(3, 3, 4).require_grad();
        let function = how.function(|x: Tensor<B, 2>| {
            let probe = x.clone().detach().require_grad();
            let gradients = probe.clone().powf_scalar(3.0).sum().backward();
            let slope = Tensor::<B, 2>::from_inner(probe.grad(&gradients).unwrap());
            let y = x.matmul(weight.clone()) + slope;
            let size: f32 = y.clone().detach().abs().max().into_scalar();
            if size > 4.0 { y / size } else { y * 2.0 }
        });
        for call in 0..6 {
            let x = (matrix(2, 3, call) * (call as f32 * 0.4)).require_grad();
            let y = function.call(x.clone());
            seen.values("y", &y);
            let gradients = y.powf_scalar(2.0).sum().backward();
            seen.gradient("dx", &x, &gradients);
            seen.gradient("d weight", &weight, &gradients);
        }
    });
}

#[test]
fn a_read_and_an_input_that_the_loss_does_not_follow_from() {
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let options = CompileOptions::default().with_backend(backend);
        let function = kiln::compile_fn(|(x, y): (Tensor<B, 1>, Tensor<B, 1>)| {
            let scale: f32 = y.clone().sum().into_scalar();
            (x * scale, y.exp())
        })
        .with_options(options);
        for _ in 0..3 {
            let p = vector(&[1.0, 2.0]).require_grad();
            let q = vector(&[3.0, 4.0]).require_grad();
            let (z, _): (Tensor<B, 1>, Tensor<B, 1>) = function.call((p.clone(), q.clone() * 2.0)).unwrap();
            let gradients = z.sum().backward();
            let dp: Vec<f32> = p.grad(&gradients).unwrap().to_data().iter().collect();
            assert_eq!(dp, [14.0, 14.0]);
            let dq = q
                .grad(&gradients)
                .map(|dq| dq.to_data().iter::<f32>().collect::<Vec<_>>());
            assert!(dq.is_none_or(|dq| dq == [0.0, 0.0]));
        }
    }
}
