//! A step of one's own: two models, two losses and two optimizers, adversarial training of points on a
//! circle, compiled as one executable.

use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use kiln::{CompileOptions, Kiln, KilnDevice};
use kiln_models::loss::binary_cross_entropy;
use kiln_models::mlp::{Mlp, MlpConfig};

type B = Autodiff<Kiln>;

const BATCH: usize = 128;
const NOISE: usize = 8;

fn main() -> Result<(), kiln::Error> {
    let steps = if std::env::args().any(|argument| argument == "--short") {
        4
    } else {
        1500
    };
    let device = KilnDevice::default();
    B::seed(&device, 0);
    let mut generator: Mlp<B> = MlpConfig::new().with_widths(vec![NOISE, 64, 64, 2]).init(&device);
    let mut critic: Mlp<B> = MlpConfig::new().with_widths(vec![2, 64, 64, 1]).init(&device);
    let mut generator_optim = AdamConfig::new().with_beta_1(0.5).init();
    let mut critic_optim = AdamConfig::new().with_beta_1(0.5).init();

    let mut step = kiln::compile(CompileOptions::default().with_name("adversarial"));
    for index in 1..=steps {
        let real = circle(&device);
        let (critic_loss, generator_loss) = step.run(|| {
            let ones = Tensor::<B, 2>::ones([BATCH, 1], &device);
            let noise = || Tensor::<B, 2>::random([BATCH, NOISE], Distribution::Normal(0.0, 1.0), &device);

            // The critic learns to tell; the generator has no part in it, hence `detach`.
            let fake = generator.forward(noise()).detach();
            let critic_loss = binary_cross_entropy(critic.forward(real), ones.clone())
                + binary_cross_entropy(critic.forward(fake), ones.zeros_like());
            let gradients = GradientsParams::from_grads(critic_loss.backward(), &critic);
            critic = critic_optim.step(1e-3, critic.clone(), gradients);

            // The generator learns to pass for real with the critic as it is now.
            let generator_loss = binary_cross_entropy(critic.forward(generator.forward(noise())), ones);
            let gradients = GradientsParams::from_grads(generator_loss.backward(), &generator);
            generator = generator_optim.step(1e-3, generator.clone(), gradients);
            (critic_loss, generator_loss)
        })?;
        if index == 1 || index % 250 == 0 || index == steps {
            let noise = Tensor::<B, 2>::random([BATCH, NOISE], Distribution::Normal(0.0, 1.0), &device);
            let radius = generator
                .forward(noise)
                .square()
                .sum_dim(1)
                .sqrt()
                .mean()
                .into_scalar();
            println!(
                "step {index:4}: critic {:.3}, generator {:.3}, mean radius of its points {radius:.3} (the circle's is 1)",
                critic_loss.into_scalar(),
                generator_loss.into_scalar()
            );
        }
    }
    print!("{}", step.explain());
    Ok(())
}

/// Points on the unit circle, `[BATCH, 2]`.
fn circle(device: &KilnDevice) -> Tensor<B, 2> {
    let angle = Tensor::<B, 2>::random(
        [BATCH, 1],
        Distribution::Uniform(0.0, std::f64::consts::TAU),
        device,
    );
    Tensor::cat(vec![angle.clone().cos(), angle.sin()], 1)
}
