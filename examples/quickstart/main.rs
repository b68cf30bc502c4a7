//! A Burn training loop whose body is wrapped in `step.run(..)`: the wrapper is all that Kiln adds.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use kiln::{CompileOptions, Kiln, KilnDevice};
use kiln_models::mlp::MlpConfig;

type B = Autodiff<Kiln>;

fn main() -> Result<(), kiln::Error> {
    let steps = if std::env::args().any(|argument| argument == "--short") {
        5
    } else {
        400
    };
    let device = KilnDevice::default();
    let mut model = MlpConfig::new()
        .with_widths(vec![16, 128, 128, 4])
        .init::<B>(&device);
    let mut optim = AdamWConfig::new().init();
    println!("{} parameters", model.num_params());

    let mut step = kiln::compile(CompileOptions::default());
    for index in 1..=steps {
        // The class of an input is the greatest of its first four numbers.
        let x = Tensor::<B, 2>::random([64, 16], Distribution::Normal(0.0, 1.0), &device);
        let y = x.clone().narrow(1, 0, 4).argmax(1).reshape([64]);
        let loss = step.run(|| {
            let loss = model.loss(x, y);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(3e-3, model.clone(), grads);
            loss
        })?;
        if index == 1 || index % 100 == 0 || index == steps {
            println!("step {index}: loss {:.4}", loss.into_scalar());
        }
    }
    print!("{}", step.explain());
    Ok(())
}
