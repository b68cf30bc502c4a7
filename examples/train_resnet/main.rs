//! A ResNet-18 that learns drawn shapes, through [`TrainStep`]: after two calls Rust code of the model
//! runs at a few calls only, which are compared.

use std::error::Error;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use kiln::{Kiln, KilnDevice, TrainStep};
use kiln_hub::data::{ImageBatcher, Images, Loader, Pipeline, Shapes};
use kiln_models::vision::resnet::{ResNet, ResNetConfig};

type B = Autodiff<Kiln>;

fn main() -> Result<(), Box<dyn Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let (steps, batch, size) = if short { (4, 4, 16) } else { (150, 32, 32) };
    let device = KilnDevice::default();
    B::seed(&device, 0);

    let drawn = |count, seed| {
        Images::new(
            Shapes::new(count, size, seed),
            Pipeline::plain().with_normalisation([0.5; 3], [0.25; 3]),
        )
    };
    let training = Loader::new(drawn(2048, 1), ImageBatcher, batch);
    let evaluation = Loader::evaluation(drawn(4 * batch, 2), ImageBatcher, batch);

    let model = ResNetConfig::resnet18().with_num_classes(8).init::<B>(&device);
    let loss =
        |model: &ResNet<B>, (images, labels): (Tensor<B, 4>, Tensor<B, 1, Int>)| model.loss(images, labels);
    let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss).build()?;
    let start = Instant::now();
    for (index, images) in training.start()?.take(steps).enumerate() {
        let loss = step.step(1e-3, images?.tensors(&device))?;
        if index % 25 == 0 || index + 1 == steps {
            println!(
                "step {:3}: loss {:.4}, {:.1} s",
                index + 1,
                loss.into_scalar(),
                start.elapsed().as_secs_f64()
            );
        }
    }

    let model = step.into_model().valid();
    let forward = kiln::compile_fn(|images| model.forward(images));
    let (mut right, mut all) = (0, 0);
    for images in evaluation.start()? {
        let (images, labels) = images?.tensors::<Kiln>(&device);
        all += labels.dims()[0];
        let classes = forward.call(images)?.argmax(1).flatten(0, 1);
        right += classes.equal(labels).int().sum().into_scalar();
    }
    println!("{right} of {all} pictures it never saw are right");
    Ok(())
}
