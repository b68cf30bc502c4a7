//! What goes in and out of a function, and its gradients.

use std::io::{self, Write};
use std::sync::Arc;

use burn_tensor::TensorData;

use super::*;

type Vector = Tensor<B, 1>;
type Six = (Vector, Vector, Vector, Vector, (Vector, Vector));

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
            let w = vector(&[0.5, -(call as f32)]).require_grad();
            let (x2, y, again, kept, (trained2, w2)): Six = function.call((x, w.clone()));
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
fn infinite_derivatives_of_outputs_that_no_loss_uses() {
    compare(|how, seen| {
        let indices = |values: [i32; 4]| Tensor::<B, 1, Int>::from_data(values, &device());
        let (columns, picks) = (
            indices([1, 0, 1, 0]).narrow(0, 0, 3),
            indices([0, 2, 1, 1]).reshape([2, 2]),
        );
        let function = how.function(|(x, w): (Tensor<B, 2>, Tensor<B, 2>)| {
            let h = x.clone().matmul(w.clone());
            let h = Tensor::cat(vec![h.clone().slice([0..1, 0..3]), h.slice([1..2, 0..3])], 0);
            let roots = h.clone().abs().sqrt();
            let shares = activation::softmax(h.clone(), 1) * x.clone().select(1, columns.clone());
            let picked = h.clone().gather(1, picks.clone());
            let distances = x.clone().abs().sqrt();
            // Each is infinite where its operand is 0, and h[0][0] and x[1][1] are.
            (
                x.clone().detach(),
                (h - x.clone().abs().log().sum().unsqueeze::<2>().expand([2, 3])).tanh(),
                roots.recip() + picked.abs().log().repeat_dim(1, 2).narrow(1, 0, 3),
                shares.powf_scalar(2.0) - w.abs().mean().unsqueeze::<2>().expand([2, 3]),
                distances.clone().recip(),
                (
                    distances.clone().reshape([4]).unfold::<2, _>(0, 2, 1),
                    kiln::custom_op("half", distances, [2, 2], half, never_asked),
                    x.abs().sqrt().slice([0..0, 0..2]),
                ),
            )
        });
        type Matrix = Tensor<B, 2>;
        type Six = (Matrix, Matrix, Matrix, Matrix, Matrix, (Matrix, Matrix, Matrix));
        for call in 0..8 {
            let data = |values: [f32; 6]| Tensor::<B, 1>::from_data(values, &device());
            let x = data([1.0, -1.0, 0.5, 0.0, 0.25, 2.0])
                .narrow(0, 0, 4)
                .reshape([2, 2]);
            let w = data([1.0, 0.5, call as f32, 1.0, -0.5, 0.25]).reshape([2, 3]);
            let (x, w) = (x.require_grad(), w.require_grad());
            let (_, sums, infinite, shares, roots, moved): Six = function.call((x.clone(), w.clone()));
            let mut note = |loss: Tensor<B, 1>| {
                let gradients = loss.backward();
                for (name, tensor) in [("dx", &x), ("dw", &w)] {
                    seen.gradient(name, tensor, &gradients);
                    let gradient = tensor.grad(&gradients).map(|gradient| gradient.into_data());
                    let elements = gradient.map(|data| data.to_vec::<f32>().unwrap());
                    assert!(
                        elements.is_none_or(|elements| elements.iter().all(|x| x.is_finite())),
                        "{name}"
                    );
                }
            };
            match call % 4 {
                0 => note(shares.sum()),
                // Each loss has what it uses, and the others stay.
                1 => {
                    note((shares * 2.0).sum());
                    drop((sums, infinite, roots, moved));
                }
                2 => note((shares.clone() * 3.0 + shares).mean()),
                _ => drop((sums, infinite, shares, roots, moved)),
            }
        }
        function.assert_pairs(1);
        function.assert_explained("backward from output 3 alone");
    });
}

#[test]
fn an_empty_output_that_no_loss_uses() {
    compare(|how, seen| {
        let function = how.function(|x: Vector| (x.clone() * 2.0, x.sqrt().slice(0..0)));
        let x = vector(&[0.0, 1.0, 4.0]).require_grad();
        let (used, _): (Vector, Vector) = function.call(x.clone());
        seen.gradient("dx", &x, &used.sum().backward());
    });
}

fn half(inputs: &[TensorData]) -> TensorData {
    let elements: Vec<f32> = inputs[0].iter().map(|x: f32| x * 0.5).collect();
    TensorData::new(elements, inputs[0].shape.clone())
}

fn never_asked(_: &[TensorData], _: &TensorData, _: &TensorData) -> Vec<TensorData> {
    panic!("no loss uses the result")
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn losses_of_many_sets_of_outputs_compile_up_to_the_limit() {
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let options = CompileOptions::default().with_recompile_limit(1);
    let function = kiln::compile_fn(|x: Vector| [x.clone() * 2.0, x.clone() * 3.0, x * 5.0])
        .with_options(options.with_name("function"));
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        for set in [1, 2, 6, 6, 1, 2] {
            let x = vector(&[1.0, -1.0]).require_grad();
            let outputs: [Vector; 3] = function.call(x.clone()).unwrap();
            let used = outputs.into_iter().enumerate().filter(|(i, _)| set >> i & 1 == 1);
            let loss = used.map(|(_, output)| output).reduce(Tensor::add).unwrap();
            let gradient = x.grad(&loss.sum().backward()).unwrap().into_data();
            let expected: f32 = [2.0, 3.0, 5.0]
                .iter()
                .enumerate()
                .map(|(i, slope)| if set >> i & 1 == 1 { *slope } else { 0.0 })
                .sum();
            assert_eq!(gradient.to_vec::<f32>().unwrap(), [expected; 2]);
        }
    });
    let text = function.explain_tracked();
    for (outputs, on_flex) in [("output 0", false), ("output 1", true), ("outputs 1, 2", true)] {
        let line = format!("backward from {outputs} alone: ");
        let report = text
            .split(&line)
            .nth(1)
            .unwrap_or_else(|| panic!("{line}: {text}"));
        let report = report.split("backward from").next().unwrap();
        assert_eq!(report.contains("each on burn-flex"), on_flex, "{text}");
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.matches("recompile limit of 1 reached").count(), 1, "{log}");
    assert_eq!(
        log.matches("its backward pass is compiled on").count(),
        3,
        "{log}"
    );
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
fn a_head_that_no_loss_uses_is_not_trained() {
    compare(|how, seen| {
        let forward = how.function(|net: &Net<B>, x: Tensor<B, 2>| {
            let h = activation::relu(net.first.forward(x));
            (net.second.forward(h.clone()), net.norm.forward(h))
        });
        let mut net = Net::<B>::new(&device());
        let mut optim = AdamWConfig::new()
            .with_weight_decay(0.2)
            .with_epsilon(1e-3)
            .init();
        for call in 0..6 {
            let (scores, normed): (Tensor<B, 2>, Tensor<B, 2>) = forward.call_with(&net, matrix(6, 3, call));
            let loss = match call % 3 {
                0 => scores.powf_scalar(2.0).mean(),
                1 => normed.powf_scalar(3.0).mean(),
                _ => scores.exp().mean() + normed.abs().mean(),
            };
            seen.values("loss", &loss);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optim.step(0.05, net, gradients);
            seen.net(&net);
            seen.values("second", &net.second.weight.val());
            seen.values("gamma", &net.norm.gamma.val());
        }
    });
}

#[test]
fn several_calls_and_one_backward_pass() {
    compare(|how, seen| {
        let function = how.function(|(x, w): (Tensor<B, 2>, Tensor<B, 2>)| x.matmul(w).tanh());
        for call in 0..4 {
            let w = matrix(3, 3, call).require_grad();
            let mut h = matrix(2, 3, call + 1);
            let mut sum = Tensor::zeros([1], &device());
            // A recurrence, and rows that change their number.
            for _ in 0..3 {
                h = function.call((h, w.clone()));
                sum = sum + h.clone().sum() * 0.5;
            }
            let other: Tensor<B, 2> = function.call((matrix(1 + call % 2, 3, call), w.clone()));
            let gradients = (sum + other.sum()).backward();
            seen.gradient("dw", &w, &gradients);
        }
    });
}

#[test]
fn outputs_of_several_types() {
    compare(|how, seen| {
        let function = how.function(|x: Tensor<B, 1>| {
            let wide = x.clone().cast(DType::F64).exp();
            (x.clone() * 2.0, wide, x.int())
        });
        for call in 0..3 {
            let x = vector(&[0.5, 1.5 + call as f32]).require_grad();
            let (y, wide, int): (Tensor<B, 1>, Tensor<B, 1>, Tensor<B, 1, Int>) = function.call(x.clone());
            seen.values("y", &y);
            seen.values("wide", &wide);
            seen.values("int", &int.float());
            let gradients = (y.sum() + wide.cast(DType::F32).sum()).backward();
            seen.gradient("dx", &x, &gradients);
        }
    });
}

#[test]
fn a_captured_model_with_state_between_tracked_tensors() {
    compare(|how, seen| {
        let net = Net::<B>::new(&device());
        let function = how.function(|x: Tensor<B, 2>| net.forward(x) * 2.0);
        for call in 0..4 {
            let x = matrix(5, 3, call).require_grad();
            let gradients = function.call(x.clone()).powf_scalar(2.0).sum().backward();
            seen.gradient("dx", &x, &gradients);
            seen.gradient("d weight", &net.first.weight.val(), &gradients);
            seen.gradient("d gamma", &net.norm.gamma.val(), &gradients);
            seen.net(&net);
        }
    });
}

#[test]
fn a_captured_tensor_that_is_trained_later() {
    type Join = fn(Vector, Vector) -> Vector;
    // The gradient of a sum is that of its terms: no operation tells which of them are trained.
    for join in [(|x, c| x * c) as Join, |x, c| x + c] {
        compare(|how, seen| {
            let captured = RefCell::new(vector(&[2.0, 3.0]));
            let function = how.function(|(x, b): (Vector, Vector)| join(x, captured.borrow().clone()) + b);
            for trained in [false, false, true, true] {
                let x = vector(&[1.0, 5.0]);
                let x = if trained { x } else { x.require_grad() };
                let b = vector(&[1.0, 1.0]).require_grad();
                let c = vector(&[2.0, 3.0]);
                *captured.borrow_mut() = if trained { c.require_grad() } else { c };
                let gradients = function.call((x.clone(), b.clone())).sum().backward();
                seen.gradient("dx", &x, &gradients);
                seen.gradient("db", &b, &gradients);
                seen.gradient("d captured", &captured.borrow(), &gradients);
            }
        });
    }
}

#[derive(Module, Debug)]
struct Mix<B: Backend> {
    scores: Param<Tensor<B, 1>>,
    up: Linear<B>,
}

/// Burn's softmax detaches its argument, and a detached parameter is trained by itself.
#[test]
fn a_detached_parameter_is_not_captured() {
    compare(|how, seen| {
        let model = Mix::<B> {
            scores: Param::from_tensor(vector(&[0.5, -1.0, 0.25])),
            up: LinearConfig::new(3, 3).init(&device()),
        };
        let mix = how.function(|model: &Mix<B>, x: Tensor<B, 2>| {
            model.up.forward(x) * activation::softmax(model.scores.val(), 0).unsqueeze()
        });
        let gate = how.function(|x: Vector| x.clone() * x.detach().tanh());
        let loss = how.function(|(scores, target): (Tensor<B, 2>, Tensor<B, 2>)| {
            -(activation::log_softmax(scores, 1) * target).sum()
        });
        let both = how.function(|x: Vector| {
            let detached = x.clone().detach();
            (x * detached.clone(), detached)
        });
        for call in 0..4 {
            let y = mix.call_with(&model, matrix(4, 3, call));
            let gradients = y.powf_scalar(2.0).sum().backward();
            seen.gradient("d scores", &model.scores.val(), &gradients);
            seen.gradient("d weight", &model.up.weight.val(), &gradients);
            let x = vector(&[1.0, call as f32]).require_grad();
            seen.gradient("dx", &x, &gate.call(x.clone()).sum().backward());
            let scores = matrix(4, 3, call).require_grad();
            let target: Tensor<B, 2> = matrix(4, 3, call + 1);
            let gradients = loss.call((scores.clone(), target)).backward();
            seen.gradient("d scores", &scores, &gradients);
            let (y, detached): (Vector, Vector) = both.call(x.clone());
            let gradients = y.sum().backward();
            seen.gradient("dx", &x, &gradients);
            seen.gradient("d detached", &detached, &gradients);
        }
        mix.assert_all_compiled();
        gate.assert_all_compiled();
        loss.assert_all_compiled();
        both.assert_all_compiled();
    });
}

/// A parameter that the function makes at its first call has its gradient in that call, too.
#[test]
fn a_parameter_that_is_made_in_the_first_call() {
    type Make = fn(&Vector) -> Vector;
    let makes: [Make; 4] = [
        |_| Tensor::random([3], burn_tensor::Distribution::Default, &device()),
        |_| Tensor::random([3], burn_tensor::Distribution::Default, &device()) * 2.0,
        |_| vector(&[1.0, 2.0, 3.0]),
        |base| base.clone().detach(),
    ];
    for make in makes {
        compare(|how, seen| {
            let base = vector(&[0.5, 1.5, 2.5]);
            let weight = RefCell::new(None::<Vector>);
            let function = how.function(|x: Vector| {
                let mut weight = weight.borrow_mut();
                let weight = weight.get_or_insert_with(|| make(&base).require_grad());
                activation::softmax(x, 0) * weight.clone()
            });
            for call in 0..4 {
                let x = vector(&[1.0, 5.0, call as f32]).require_grad();
                let gradients = function.call(x.clone()).powf_scalar(2.0).sum().backward();
                seen.gradient("dx", &x, &gradients);
                let weight = weight.borrow().clone().unwrap();
                assert!(weight.grad(&gradients).is_some(), "call {call}");
                seen.gradient("d weight", &weight, &gradients);
            }
            function.assert_explained("captures tensors that are trained");
        });
    }
}

#[test]
fn a_detached_argument_is_trained_only_if_the_argument_is() {
    compare(|how, seen| {
        let kept = RefCell::new(Vec::new());
        let function = how.function(|z: Tensor<B, 1>| {
            let detached = z.clone().detach();
            kept.borrow_mut().push(detached.is_require_grad());
            z * detached
        });
        for _ in 0..3 {
            let x = vector(&[1.0, 5.0]).require_grad();
            let gradients = function.call(x.clone() * 2.0).sum().backward();
            seen.gradient("dx", &x, &gradients);
        }
        let kept = kept
            .borrow()
            .iter()
            .map(|&kept| f32::from(u8::from(kept)))
            .collect();
        seen.0.push(("is trained".into(), kept));
    });
}
