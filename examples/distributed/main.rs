//! A training loop on several ranks: two lines more than on one.

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor};
use burn_autodiff::Autodiff;
use kiln::{Kiln, TrainStep};
use kiln_models::mlp::{Mlp, MlpConfig};

type B = Autodiff<Kiln>;

/// Examples of a step, on all ranks together.
const BATCH: usize = 64;

fn loss(model: &Mlp<B>, (x, y): (Tensor<B, 2>, Tensor<B, 1, Int>)) -> Tensor<B, 1> {
    model.loss(x, y)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let steps = if short { 5 } else { 400 };
    // Who started this process, and as which of how many ranks; one rank if nobody did.
    let world = kiln::distributed::init()?;
    // Its GPU, or the CPU where there is none.
    let device = kiln::distributed::device(&world);
    B::seed(&device, 1);
    let model = MlpConfig::new()
        .with_widths(vec![16, 128, 128, 4])
        .init::<B>(&device);
    if world.is_first() {
        println!("{} ranks, {} parameters", world.size(), model.num_params());
    }
    let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss)
        .with_data_parallel(&world)
        .build()?;
    let examples = BATCH / world.size();
    for index in 1..=steps {
        // Each rank draws examples of its own; a program with a data set takes its share of each batch.
        let x = Tensor::<B, 2>::random([examples, 16], Distribution::Normal(0.0, 1.0), &device);
        let y = x.clone().narrow(1, 0, 4).argmax(1).reshape([examples]);
        let loss = step.step(3e-3, (x, y))?;
        // The mean over all ranks, on each of them.
        if world.is_first() && (index == 1 || index % 100 == 0 || index == steps) {
            println!("step {index}: loss {:.4}", loss.into_scalar());
        }
    }
    Ok(())
}
