//! Operations of the program's own in the middle of models: their gradients are those of the same made of
//! Burn's operations, eager, recorded and replayed.

use std::cell::RefCell;

use burn::module::AutodiffModule;
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{Tensor, TensorData};
use kiln::{KilnBackend, NoGradient};

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    an_activation_of_its_own => Replayed,
    an_activation_and_the_same_by_burn => Replayed,
    two_inputs_and_one_that_is_no_float => Replayed,
    an_operation_without_gradient => Replayed,
    an_operation_in_a_region => Any,
    an_operation_in_a_function => Any,
    an_operation_on_a_lazy_device => Any,
    an_operation_with_batches_of_two_sizes => Replayed,
    an_operation_that_is_the_loss => Replayed,
    one_operation_twice_with_one_input => Replayed,
    an_operation_whose_result_is_returned => Replayed,
}

fn floats(data: &TensorData) -> &[f32] {
    data.as_slice().expect("f32")
}

fn like(data: &TensorData, values: impl Iterator<Item = f32>) -> TensorData {
    TensorData::new(values.collect::<Vec<f32>>(), data.shape.clone())
}

/// `x * sigmoid(x)`.
fn swish(inputs: &[TensorData]) -> TensorData {
    let x = floats(&inputs[0]).iter();
    like(&inputs[0], x.map(|&x| x / (1.0 + (-x).exp())))
}

fn swish_gradient(inputs: &[TensorData], y: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
    let (x, y, g) = (floats(&inputs[0]), floats(y), floats(gradient));
    let slope = |index: usize| {
        let s = 1.0 / (1.0 + (-x[index]).exp());
        g[index] * (y[index] + s * (1.0 - y[index]))
    };
    vec![like(&inputs[0], (0..x.len()).map(slope))]
}

/// Swish as an operation, for models of any of the two backends.
fn own_swish<T: KilnBackend, const D: usize>(x: Tensor<T, D>) -> Tensor<T, D> {
    let shape = x.dims();
    kiln::custom_op("swish", x, shape, swish, swish_gradient)
}

fn an_activation_of_its_own(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model: &Normed<B>, x: T2| {
        let hidden = own_swish(model.norm.forward(model.first.forward(x)));
        energy(model.second.forward(hidden))
    });
    for call in 0..10 {
        step.step(LR, p.x(call));
        let model = step.model().valid();
        let hidden = own_swish(model.norm.forward(model.first.forward(p.x(100).inner())));
        p.look("validation", &model.second.forward(hidden));
    }
}

fn an_activation_and_the_same_by_burn(p: &Program) {
    // Plainly by Burn's operation, compiled by the program's.
    let compiled = p.options().is_some();
    let mut step = p.train(p.mlp(), adamw(), move |model: &Mlp<B>, x: T2| {
        let hidden = model.first.forward(x);
        let hidden = if compiled { own_swish(hidden) } else { silu(hidden) };
        (energy(model.second.forward(hidden.clone())), hidden)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

/// Rows of `x` times the weight that each row's label has: `x: [n, d]`, `weights: [classes]`, `labels: [n]`.
fn weigh(inputs: &[TensorData]) -> TensorData {
    let (x, weights) = (floats(&inputs[0]), floats(&inputs[2]));
    let labels: Vec<usize> = inputs[1].iter::<i64>().map(|label| label as usize).collect();
    let width = x.len() / labels.len();
    like(
        &inputs[0],
        (0..x.len()).map(|i| x[i] * weights[labels[i / width]]),
    )
}

fn weigh_gradient(inputs: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
    let (x, weights, g) = (floats(&inputs[0]), floats(&inputs[2]), floats(gradient));
    let labels: Vec<usize> = inputs[1].iter::<i64>().map(|label| label as usize).collect();
    let width = x.len() / labels.len();
    let mut of_weights = vec![0.0; weights.len()];
    for i in 0..x.len() {
        of_weights[labels[i / width]] += x[i] * g[i];
    }
    let of_x = like(
        &inputs[0],
        (0..x.len()).map(|i| g[i] * weights[labels[i / width]]),
    );
    vec![of_x, like(&inputs[2], of_weights.into_iter())]
}

fn two_inputs_and_one_that_is_no_float(p: &Program) {
    let compiled = p.options().is_some();
    let mut step = p.train(p.mlp(), adamw(), move |model: &Mlp<B>, (x, labels): (T2, I1)| {
        let y = model.second.forward(sigmoid(model.first.forward(x)));
        let weights = model.second.bias.as_ref().expect("a bias").val();
        let shape = y.dims();
        let weighted = match compiled {
            true => kiln::custom_op("weigh", (y, labels, weights), shape, weigh, weigh_gradient),
            false => y * weights.select(0, labels).unsqueeze_dim::<2>(1),
        };
        energy(weighted + 0.5)
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
}

fn an_operation_without_gradient(p: &Program) {
    let compiled = p.options().is_some();
    let mut step = p.train(p.mlp(), sgd(), move |model: &Mlp<B>, x: T2| {
        let y = model.forward(x);
        let shape = y.dims();
        let gate = match compiled {
            true => kiln::custom_op("gate", y.clone(), shape, swish, NoGradient),
            false => silu(y.clone()).detach(),
        };
        energy(y * gate)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn an_operation_in_a_region(p: &Program) {
    let mut region = p.region();
    for call in 0..4 {
        let y = region.run(|| own_swish(p.x(call) * 2.0).inner() + 1.0);
        p.look("a region's result", &y);
    }
}

fn an_operation_in_a_function(p: &Program) {
    let forward =
        p.function_of(|model: &Mlp<B>, x: T2| model.second.forward(own_swish(model.first.forward(x))));
    let model = p.mlp();
    for call in 0..4 {
        let gradients = energy(forward.call_with(&model, p.x(call))).backward();
        let gradient = model.first.weight.grad(&gradients).expect("a gradient");
        p.look("the gradient of a weight", &gradient);
    }
}

fn an_operation_on_a_lazy_device(p: &Program) {
    let x = Tensor::<B, 2>::from_data(p.x(3).into_data(), &p.lazy_device()).require_grad();
    let y = own_swish(x.clone() * 2.0) + 1.0;
    p.read("a lazy result", &y.clone().inner());
    let gradients = y.sum().backward();
    p.read("a lazy gradient", &x.grad(&gradients).expect("a gradient"));
}

fn an_operation_with_batches_of_two_sizes(p: &Program) {
    let mut step = p.train(p.dropped(), adamw(), |model: &Dropped<B>, x: T2| {
        let hidden = model.dropout.forward(own_swish(model.first.forward(x)));
        energy(model.second.forward(hidden))
    });
    for call in 0..14 {
        step.step(LR, p.waves(call, [2 + 2 * (call % 2), WIDTH]));
    }
}

/// The sum of squares.
fn squares(inputs: &[TensorData]) -> TensorData {
    TensorData::new(vec![floats(&inputs[0]).iter().map(|x| x * x).sum::<f32>()], [1])
}

fn squares_gradient(inputs: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
    let g = floats(gradient)[0];
    vec![like(&inputs[0], floats(&inputs[0]).iter().map(|x| 2.0 * x * g))]
}

fn an_operation_that_is_the_loss(p: &Program) {
    let compiled = p.options().is_some();
    let mut step = p.train(p.mlp(), adamw(), move |model: &Mlp<B>, x: T2| {
        let y = model.forward(x);
        match compiled {
            true => kiln::custom_op("squares", y, [1], squares, squares_gradient),
            false => y.powf_scalar(2.0).sum(),
        }
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

/// `a * b`.
fn product(inputs: &[TensorData]) -> TensorData {
    let pairs = floats(&inputs[0]).iter().zip(floats(&inputs[1]));
    like(&inputs[0], pairs.map(|(a, b)| a * b))
}

fn product_gradient(inputs: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
    let times = |other: &TensorData| {
        like(
            other,
            floats(gradient).iter().zip(floats(other)).map(|(g, x)| g * x),
        )
    };
    vec![times(&inputs[1]), times(&inputs[0])]
}

fn one_operation_twice_with_one_input(p: &Program) {
    let compiled = p.options().is_some();
    let mut step = p.train(p.mlp(), adamw(), move |model: &Mlp<B>, x: T2| {
        let y = model.forward(x);
        let shape = y.dims();
        let square = |y: T2| match compiled {
            true => kiln::custom_op("product", (y.clone(), y), shape, product, product_gradient),
            false => y.clone() * y,
        };
        square(square(y)).mean()
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn an_operation_whose_result_is_returned(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let y = own_swish(model.forward(x.clone()));
        (energy(y.clone()), (y, own_swish(x)))
    });
    let kept = RefCell::new(Vec::new());
    for call in 0..CALLS {
        kept.borrow_mut().push(step.step(LR, p.x(call)).1);
    }
    for (y, x) in kept.into_inner() {
        p.look("the result", &y);
        p.look("the result of the input", &x);
    }
}
