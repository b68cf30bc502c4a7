//! The gradients and statistics of one training step, for a comparison with PyTorch's.
//!
//! ```sh
//! python crates/kiln-cli/peers/torch_errors.py write resnet18 --folder /tmp/resnet18
//! cargo run --release -p kiln-cli --example gradients -- resnet18 /tmp/resnet18
//! python crates/kiln-cli/peers/torch_errors.py compare resnet18 --folder /tmp/resnet18
//! ```
//!
//! The folder holds `model.safetensors` (the weights under torchvision's names) and `batch.safetensors`
//! (`images`, f32 of `[batch, 3, height, width]`, and `labels`, i32 of `[batch]`). The model computes the
//! cross entropy of that batch in training mode, without dropout, and its gradients, as one compiled step.
//! Written to the folder: `gradients.safetensors` (under the name of each weight its gradient; the running
//! statistics after the step under theirs) and `outputs.safetensors` (`logits` and `loss`).

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use kiln::{CompileOptions, Kiln, KilnDevice};
use kiln_hub::{SaveOptions, load, load_into, save_safetensors};
use kiln_models::keys::Pretrained;
use kiln_models::loss::CrossEntropy;
use kiln_models::vision::VisionConfig;
use kiln_models::vision::mnasnet::MnasNetConfig;
use kiln_models::vision::mobilenet::MobileNetV2Config;
use kiln_models::vision::vgg::VggConfig;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

type B = Autodiff<Kiln>;

/// Puts each parameter's gradient in the parameter's place.
struct Gradients(GradientsParams);

impl ModuleMapper<B> for Gradients {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        match self.0.get::<Kiln, D>(param.id) {
            Some(gradient) => param.map(|_| Tensor::from_inner(gradient)),
            None => param,
        }
    }
}

/// One step of `model` from the weights in `folder`.
fn step<M: Pretrained<B> + AutodiffModule<B>>(
    model: M,
    forward: impl Fn(&M, Tensor<B, 4>) -> Tensor<B, 2>,
    folder: &Path,
) -> Result<(), Box<dyn Error>> {
    let device = KilnDevice::default();
    let map = model.key_map();
    let model = load_into(model, &load(folder.to_string_lossy())?, map)?;
    let bytes = std::fs::read(folder.join("batch.safetensors"))?;
    let batch = SafeTensors::deserialize(&bytes)?;
    let data = |name: &str, dtype| -> Result<TensorData, Box<dyn Error>> {
        let view = batch.tensor(name)?;
        Ok(TensorData::from_bytes_vec(
            view.data().to_vec(),
            view.shape().to_vec(),
            dtype,
        ))
    };
    let images = Tensor::<B, 4>::from_data(data("images", burn::tensor::DType::F32)?, &device);
    let labels = Tensor::<B, 1, Int>::from_data(data("labels", burn::tensor::DType::I32)?, &device);

    let mut region = kiln::compile(CompileOptions::default().with_name("gradients"));
    let (gradients, logits, loss) = region.run(|| {
        let logits = forward(&model, images);
        let loss = CrossEntropy::new().forward(logits.clone(), labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        (
            model.clone().map(&mut Gradients(gradients)),
            logits.inner(),
            loss.inner(),
        )
    })?;

    let map = gradients.key_map();
    save_safetensors(
        &gradients,
        map,
        folder.join("gradients.safetensors"),
        &SaveOptions::default(),
    )?;
    let outputs = [("logits", logits.into_data()), ("loss", loss.into_data())];
    let mut views = HashMap::new();
    for (name, data) in &outputs {
        views.insert(
            name,
            TensorView::new(Dtype::F32, data.shape.to_vec(), data.as_bytes())?,
        );
    }
    safetensors::serialize_to_file(views, None, &folder.join("outputs.safetensors"))?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(name), Some(folder)) = (arguments.next(), arguments.next()) else {
        return Err("give a model's name and a folder".into());
    };
    let (device, folder) = (KilnDevice::default(), Path::new(&folder));
    match name.as_str() {
        "mobilenet_v2" => {
            let model = MobileNetV2Config::new().with_dropout(0.0).init(&device);
            step(model, |model, images| model.forward(images), folder)
        }
        "mnasnet1_0" => {
            let model = MnasNetConfig::new().with_dropout(0.0).init(&device);
            step(model, |model, images| model.forward(images), folder)
        }
        "vgg16" => {
            let model = VggConfig::vgg16().with_dropout(0.0).init(&device);
            step(model, |model, images| model.forward(images), folder)
        }
        name => {
            let model = VisionConfig::new(name.to_owned()).init(&device)?;
            step(model, |model, images| model.forward(images), folder)
        }
    }
}
