//! Optimizers that programs write: numbers that they count decide what becomes of their results.

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::record::Record;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use kiln::{CompileBackend, KilnDevice, TrainStep};

use crate::harness::*;

const CALLS: usize = 40;

/// The updates of a parameter from one that does something else to the next.
const PERIOD: usize = 12;

#[derive(Record, Clone)]
struct State<B: Backend, const D: usize> {
    first: Tensor<B, D>,
    second: Tensor<B, D>,
    calls: usize,
}

/// What becomes of a weight, two averages and the number of calls.
type Choice<B, const D: usize> = (Tensor<B, D>, State<B, D>);

/// Gradient descent that keeps averages of weights and of gradients, and does with them what `R` says.
#[derive(Clone)]
struct Averaging<R>(R);

/// Which result goes where.
trait Rule: Clone + Send + Sync {
    fn choose<B: Backend, const D: usize>(weight: Tensor<B, D>, state: State<B, D>) -> Choice<B, D>;
}

impl<B: Backend, R: Rule> SimpleOptimizer<B> for Averaging<R> {
    type State<const D: usize> = State<B, D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        weight: Tensor<B, D>,
        gradient: Tensor<B, D>,
        state: Option<State<B, D>>,
    ) -> (Tensor<B, D>, Option<State<B, D>>) {
        let state = state.unwrap_or_else(|| State {
            first: weight.clone(),
            second: gradient.clone(),
            calls: 0,
        });
        let weight = weight - gradient.clone() * rate - state.second.clone() * (0.1 * rate);
        let state = State {
            first: state.first * 0.8 + weight.clone() * 0.2,
            second: state.second * 0.7 + gradient * 0.3,
            calls: state.calls + 1,
        };
        let (weight, state) = R::choose(weight, state);
        (weight, Some(state))
    }

    fn to_device<const D: usize>(state: State<B, D>, device: &B::Device) -> State<B, D> {
        State {
            first: state.first.to_device(device),
            second: state.second.to_device(device),
            calls: state.calls,
        }
    }
}

/// Every twelfth call goes on from the average of the weights.
#[derive(Clone)]
struct FromAverage;

impl Rule for FromAverage {
    fn choose<B: Backend, const D: usize>(weight: Tensor<B, D>, state: State<B, D>) -> Choice<B, D> {
        let weight = match state.calls % PERIOD {
            0 => state.first.clone(),
            _ => weight,
        };
        (weight, state)
    }
}

/// Every twelfth call the averages change places.
#[derive(Clone)]
struct Exchange;

impl Rule for Exchange {
    fn choose<B: Backend, const D: usize>(weight: Tensor<B, D>, state: State<B, D>) -> Choice<B, D> {
        let State { first, second, calls } = state;
        let (first, second) = match calls % PERIOD {
            0 => (second, first),
            _ => (first, second),
        };
        (weight, State { first, second, calls })
    }
}

/// Every twelfth update of a parameter forgets one of its averages.
#[derive(Clone)]
struct Restart;

impl Rule for Restart {
    fn choose<B: Backend, const D: usize>(weight: Tensor<B, D>, mut state: State<B, D>) -> Choice<B, D> {
        if state.calls.is_multiple_of(PERIOD) {
            state.second = state.first.clone();
        }
        (weight, state)
    }
}

/// Every twelfth update of a parameter halves it.
#[derive(Clone)]
struct Halve;

impl Rule for Halve {
    fn choose<B: Backend, const D: usize>(weight: Tensor<B, D>, state: State<B, D>) -> Choice<B, D> {
        let weight = match state.calls % PERIOD {
            0 => weight * 0.5,
            _ => weight,
        };
        (weight, state)
    }
}

/// Two layers of one shape.
#[derive(Module, Debug)]
struct Two<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

fn two() -> Two<Compiled> {
    let layer = |value: f64| {
        LinearConfig::new(3, 3)
            .with_bias(false)
            .with_initializer(Initializer::Constant { value })
            .init(&KilnDevice::cpu())
    };
    let model = Two {
        first: layer(0.25),
        second: layer(0.5),
    };
    initialised(model)
}

/// The loss; without `both` the first layer is frozen.
fn loss(model: &Two<Compiled>, (x, both): (Tensor<Compiled, 2>, bool)) -> Tensor<Compiled, 1> {
    let hidden = match both {
        true => model.first.forward(x),
        false => Tensor::from_inner(x.inner().matmul(model.first.weight.val().inner())),
    };
    model.second.forward(hidden).powi_scalar(2).mean()
}

fn input(call: usize) -> Tensor<Compiled, 2> {
    let values: Vec<f32> = (0..12)
        .map(|at| ((at * 7 + call * 3) % 11) as f32 / 8.0)
        .collect();
    Tensor::<Compiled, 1>::from_floats(values.as_slice(), &KilnDevice::cpu()).reshape([4, 3])
}

/// Trains with `rule`, the first layer from call `unfrozen` on, in a plain loop and in a [`TrainStep`], and
/// compares the weights after each call.
fn check<R: Rule + 'static>(rule: R, unfrozen: usize) {
    let optim =
        || -> OptimizerAdaptor<Averaging<R>, Two<Compiled>, Compiled> { Averaging(rule.clone()).into() };
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let mut plain = two();
        let mut plain_optim = optim();
        let step = TrainStep::new(two(), optim(), loss).with_backend(backend);
        let mut step = step.build().unwrap();
        for call in 0..CALLS {
            let arguments = || (input(call), call >= unfrozen);
            let gradients = GradientsParams::from_grads(loss(&plain, arguments()).backward(), &plain);
            plain = plain_optim.step(0.05, plain, gradients);
            step.step(0.05, arguments()).unwrap();
            let expected = parameters::<Compiled, _>(&plain);
            let found = parameters::<Compiled, _>(step.model().unwrap());
            for (found, expected) in found.iter().zip(&expected) {
                let error = relative_error(found, expected, 1e-3);
                assert!(
                    error <= TOLERANCE,
                    "{backend}, call {call}: {error}\n{}",
                    step.history()
                );
            }
        }
        assert!(
            step.history().replayed > 8,
            "{} {:?}",
            step.history(),
            step.history().obstacle
        );
    }
}

#[test]
fn a_weight_becomes_its_average_now_and_then() {
    check(FromAverage, 0);
}

#[test]
fn averages_change_places_now_and_then() {
    check(Exchange, 0);
}

#[test]
fn an_average_is_forgotten_now_and_then() {
    check(Restart, 0);
}

/// Parameters of one shape that were updated as often as each other are updated alike; others are not.
#[test]
fn layers_count_their_own_updates() {
    check(Halve, 2);
    check(FromAverage, 3);
}
