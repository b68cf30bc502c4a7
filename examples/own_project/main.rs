//! A small network, trained through Kiln: the program of the README, for a project of your own.

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Distribution, Tensor, activation::relu, backend::Backend};
use kiln::{Kiln, KilnDevice, TrainStep};

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = KilnDevice::default();
    let (up, down) = (LinearConfig::new(8, 64), LinearConfig::new(64, 1));
    let (up, down) = (up.init(&device), down.init(&device));
    let model = Mlp::<Autodiff<Kiln>> { up, down };
    let loss = |model: &Mlp<_>, x: Tensor<_, 2>| {
        let wanted = x.clone().sin().sum_dim(1);
        let found = model.down.forward(relu(model.up.forward(x)));
        (found - wanted).powf_scalar(2.0).mean()
    };
    let mut train = TrainStep::new(model, AdamWConfig::new().init(), loss).build()?;
    for step in 1..=500 {
        let x = Tensor::random([64, 8], Distribution::Default, &device);
        let loss = train.step(1e-3, x)?;
        if step % 100 == 0 {
            println!("step {step}: loss {:.4}", loss.into_scalar());
        }
    }
    println!("{}", train.explain());
    Ok(())
}
