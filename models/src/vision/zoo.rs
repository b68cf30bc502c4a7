//! All image classifiers behind one type, for programs that choose the model at run time.

use super::alexnet::{AlexNet, AlexNetConfig};
use super::mnasnet::{MnasNet, MnasNetConfig};
use super::mobilenet::{MobileNetV2, MobileNetV2Config};
use super::resnet::{ResNet, ResNetConfig};
use super::squeezenet::{SqueezeNet, SqueezeNetConfig};
use super::vgg::{Vgg, VggConfig};
use super::vit::{VisionTransformer, VitConfig};
use crate::ModelError;
use crate::keys::{KeyPattern, Pretrained};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// A model by name.
#[derive(Config, Debug)]
pub struct VisionConfig {
    /// One of [`VisionConfig::NAMES`].
    pub name: String,
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Pixels per side of an image; only vision transformers are built for a size. Default: 224
    #[config(default = 224)]
    pub image_size: usize,
}

impl VisionConfig {
    /// The known models, by their names in torchvision and timm.
    pub const NAMES: [&str; 13] = [
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnext50_32x4d",
        "resnext101_32x8d",
        "alexnet",
        "vgg16",
        "mobilenet_v2",
        "mnasnet1_0",
        "squeezenet1_1",
        "vit_small_patch16_224",
        "vit_base_patch16_224",
    ];

    /// Builds the model; its parameters are initialised when first used.
    ///
    /// # Errors
    ///
    /// A name that is not known, no classes, or an image size that the patches of a vision transformer do not
    /// divide.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Result<VisionModel<B>, ModelError> {
        let classes = self.num_classes;
        if classes == 0 {
            return Err(ModelError::invalid(
                "vision",
                "num_classes",
                0,
                "it must be at least 1",
            ));
        }
        let resnet =
            |config: ResNetConfig| Ok(VisionModel::ResNet(config.with_num_classes(classes).init(device)));
        let vit = |config: VitConfig| {
            let config = config.with_num_classes(classes).with_image_size(self.image_size);
            config.validate()?;
            Ok(VisionModel::Vit(config.init(device)))
        };
        match self.name.as_str() {
            "resnet18" => resnet(ResNetConfig::resnet18()),
            "resnet34" => resnet(ResNetConfig::resnet34()),
            "resnet50" => resnet(ResNetConfig::resnet50()),
            "resnet101" => resnet(ResNetConfig::resnet101()),
            "resnext50_32x4d" => resnet(ResNetConfig::resnext50_32x4d()),
            "resnext101_32x8d" => resnet(ResNetConfig::resnext101_32x8d()),
            "alexnet" => Ok(VisionModel::AlexNet(
                AlexNetConfig::new().with_num_classes(classes).init(device),
            )),
            "vgg16" => Ok(VisionModel::Vgg(
                VggConfig::vgg16().with_num_classes(classes).init(device),
            )),
            "mobilenet_v2" => Ok(VisionModel::MobileNetV2(
                MobileNetV2Config::new().with_num_classes(classes).init(device),
            )),
            "mnasnet1_0" => Ok(VisionModel::MnasNet(
                MnasNetConfig::new().with_num_classes(classes).init(device),
            )),
            "squeezenet1_1" => Ok(VisionModel::SqueezeNet(
                SqueezeNetConfig::new().with_num_classes(classes).init(device),
            )),
            "vit_small_patch16_224" => vit(VitConfig::vit_small_patch16_224()),
            "vit_base_patch16_224" => vit(VitConfig::vit_base_patch16_224()),
            _ => Err(ModelError::UnknownModel {
                name: self.name.clone(),
                known: Self::NAMES.join(", "),
            }),
        }
    }
}

/// Any image classifier of this crate.
///
/// A path in this module begins with the name of the variant; the original names do not.
#[derive(Module, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a program holds one model, and Burn implements `Module` for no box"
)]
pub enum VisionModel<B: Backend> {
    /// A residual network.
    ResNet(ResNet<B>),
    /// AlexNet.
    AlexNet(AlexNet<B>),
    /// A VGG network.
    Vgg(Vgg<B>),
    /// MobileNet v2.
    MobileNetV2(MobileNetV2<B>),
    /// MNASNet.
    MnasNet(MnasNet<B>),
    /// SqueezeNet 1.1.
    SqueezeNet(SqueezeNet<B>),
    /// A vision transformer.
    Vit(VisionTransformer<B>),
}

/// Runs an expression on the model inside of any variant.
macro_rules! each {
    ($self:expr, $model:ident => $body:expr) => {
        match $self {
            VisionModel::ResNet($model) => $body,
            VisionModel::AlexNet($model) => $body,
            VisionModel::Vgg($model) => $body,
            VisionModel::MobileNetV2($model) => $body,
            VisionModel::MnasNet($model) => $body,
            VisionModel::SqueezeNet($model) => $body,
            VisionModel::Vit($model) => $body,
        }
    };
}

impl<B: Backend> VisionModel<B> {
    /// Whether the model takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, too small, or not of the size a transformer was
    /// built for.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        each!(self, model => model.check_images(dims))
    }

    /// Logits of a batch of images: `[batch, 3, height, width]` to `[batch, classes]`.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        each!(self, model => model.forward(images))
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        self.loss_with(&CrossEntropy::new(), images, targets)
    }

    /// The loss with settings of its own, such as label smoothing; output `[1]`.
    pub fn loss_with(
        &self,
        loss: &CrossEntropy,
        images: Tensor<B, 4>,
        targets: Tensor<B, 1, Int>,
    ) -> Tensor<B, 1> {
        loss.forward(self.forward(images), targets)
    }
}

impl<B: Backend> Pretrained<B> for VisionModel<B> {
    fn family(&self) -> &'static str {
        each!(self, model => model.family())
    }

    fn original_key(&self, path: &str) -> String {
        let inner = path.split_once('.').map_or(path, |(_, inner)| inner);
        each!(self, model => model.original_key(inner))
    }

    fn aliases(&self, key: &str) -> Vec<String> {
        each!(self, model => model.aliases(key))
    }

    fn is_head(&self, key: &str) -> bool {
        each!(self, model => model.is_head(key))
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        each!(self, model => model.ignorable())
    }
}
