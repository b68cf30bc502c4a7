//! The families of kiln-models behind one module.
//!
//! A run chooses its model at run time, but a training step is generic over the model's type. [`Model`] is
//! one type for all of them, so that the loop, the optimizers and the checkpoints exist once for each
//! optimizer and not once for each pair.

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Int, Tensor};
use burn_autodiff::Autodiff;
use kiln::{Kiln, StepInput};
use kiln_hub::{Checkpoint, LoadOptions, load_into_with, save_pretrained};
use kiln_models::bert::BertForSequenceClassification;
use kiln_models::keys::Pretrained;
use kiln_models::llama::{Llama, LlamaConfig};
use kiln_models::loss::CrossEntropy;
use kiln_models::mlp::Mlp;
use kiln_models::vision::{VisionConfig, VisionModel};

use crate::architecture::Architecture;
use crate::config::DataSource;
use crate::error::CliError;

/// Any model that the command line knows.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // One model a process: a box would only add a step to every forward pass.
pub enum Model<B: Backend> {
    /// A language model.
    Llama(Llama<B>),
    /// A classifier of texts.
    Bert(BertForSequenceClassification<B>),
    /// A classifier of images.
    Vision(VisionModel<B>),
    /// A classifier of vectors, for measurements.
    Mlp(Mlp<B>),
}

/// The input of a training step.
#[derive(Clone, Debug, StepInput)]
pub enum Batch<B: Backend> {
    /// Windows of a stream of tokens.
    Windows {
        /// `[batch, length]`.
        inputs: Tensor<B, 2, Int>,
        /// `[batch, length]`: the token after each input.
        targets: Tensor<B, 2, Int>,
    },
    /// Texts with a class.
    Texts {
        /// `[batch, length]`.
        tokens: Tensor<B, 2, Int>,
        /// `[batch, length]`: 0 where a token is padding; absent without padding.
        keep: Option<Tensor<B, 2, Int>>,
        /// `[batch]`.
        labels: Tensor<B, 1, Int>,
    },
    /// Images with a class.
    Images {
        /// `[batch, 3, height, width]`.
        pixels: Tensor<B, 4>,
        /// `[batch]`.
        labels: Tensor<B, 1, Int>,
    },
    /// Vectors with a class.
    Vectors {
        /// `[batch, width]`.
        inputs: Tensor<B, 2>,
        /// `[batch]`.
        labels: Tensor<B, 1, Int>,
    },
}

impl<B: Backend> Model<B> {
    /// Mean loss of a batch, `[1]`.
    ///
    /// # Panics
    ///
    /// If the batch is of another family's kind; [`Family::check`] has compared model and data before.
    pub fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        match (self, batch) {
            (Self::Llama(model), Batch::Windows { inputs, targets }) => model.loss(inputs, targets),
            (Self::Bert(model), Batch::Texts { tokens, keep, labels }) => model.loss(tokens, keep, labels),
            (Self::Vision(model), Batch::Images { pixels, labels }) => model.loss(pixels, labels),
            (Self::Mlp(model), Batch::Vectors { inputs, labels }) => model.loss(inputs, labels),
            _ => unreachable!("model and data were compared when the run began"),
        }
    }

    /// Mean loss of a batch, `[1]`, and of classifiers the logits, `[batch, classes]`.
    ///
    /// # Panics
    ///
    /// As [`Model::loss`].
    pub fn evaluate(&self, batch: Batch<B>) -> (Tensor<B, 1>, Option<Tensor<B, 2>>) {
        let (logits, labels) = match (self, batch) {
            (Self::Bert(model), Batch::Texts { tokens, keep, labels }) => {
                (model.forward(tokens, None, keep), labels)
            }
            (Self::Vision(model), Batch::Images { pixels, labels }) => (model.forward(pixels), labels),
            (Self::Mlp(model), Batch::Vectors { inputs, labels }) => (model.forward(inputs), labels),
            (_, batch) => return (self.loss(batch), None),
        };
        (CrossEntropy::new().forward(logits.clone(), labels), Some(logits))
    }

    /// The forward pass alone: logits in whatever shape the family has, flattened to one number a batch so
    /// that all of it is needed.
    ///
    /// # Panics
    ///
    /// As [`Model::loss`].
    pub fn logits(&self, batch: Batch<B>) -> Tensor<B, 2> {
        match (self, batch) {
            (Self::Llama(model), Batch::Windows { inputs, .. }) => model.forward(inputs).flatten(0, 1),
            (Self::Bert(model), Batch::Texts { tokens, keep, .. }) => model.forward(tokens, None, keep),
            (Self::Vision(model), Batch::Images { pixels, .. }) => model.forward(pixels),
            (Self::Mlp(model), Batch::Vectors { inputs, .. }) => model.forward(inputs),
            _ => unreachable!("model and data were compared when the run began"),
        }
    }

    /// Fills the parameters from a checkpoint.
    ///
    /// # Errors
    ///
    /// [`CliError::Hub`] with every key that does not fit.
    pub fn load(self, checkpoint: &Checkpoint, heads: Heads) -> Result<Self, CliError> {
        Ok(match self {
            Self::Llama(model) => Self::Llama(fill(model, checkpoint, heads)?),
            Self::Bert(model) => Self::Bert(fill(model, checkpoint, heads)?),
            Self::Vision(model) => Self::Vision(fill(model, checkpoint, heads)?),
            Self::Mlp(model) => Self::Mlp(fill(model, checkpoint, heads)?),
        })
    }

    /// Writes `model.safetensors` and `config.json` under the names of the original library.
    ///
    /// # Errors
    ///
    /// [`CliError::Hub`].
    pub fn save(&self, architecture: &Architecture, folder: &std::path::Path) -> Result<(), CliError> {
        let config = architecture.to_json();
        let config = Some(config.as_str());
        match self {
            Self::Llama(model) => save_pretrained(model, model.key_map(), config, folder)?,
            Self::Bert(model) => save_pretrained(model, model.key_map(), config, folder)?,
            Self::Vision(model) => save_pretrained(model, model.key_map(), config, folder)?,
            Self::Mlp(model) => save_pretrained(model, model.key_map(), config, folder)?,
        }
        Ok(())
    }
}

/// How a head is treated that the checkpoint lacks or has for other classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// It is an error, because the model's results would be random.
    Stored,
    /// It starts from random values and is trained; a warning names its tensors.
    New,
}

fn fill<B: Backend, M: Pretrained<B>>(
    model: M,
    checkpoint: &Checkpoint,
    heads: Heads,
) -> Result<M, CliError> {
    let map = model.key_map();
    let options = LoadOptions::new().with_new_heads(heads == Heads::New);
    Ok(load_into_with(model, checkpoint, map, &options)?.0)
}

/// Makes sure that every parameter has its initial value: they are drawn when first used, and a first use
/// inside a training step would be part of that step.
pub fn initialise<B: Backend>(model: &Model<B>) -> Vec<ParamId> {
    struct Walk(Vec<ParamId>);
    impl<B: Backend> ModuleVisitor<B> for Walk {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let _ = param.val();
            self.0.push(param.id);
        }
    }
    let mut walk = Walk(Vec::new());
    model.visit(&mut walk);
    walk.0
}

/// The path of the first parameter that holds a number which is not finite, and that number.
///
/// # Errors
///
/// [`CliError::Usage`] if a parameter cannot be read.
pub fn not_finite<B: Backend>(model: &Model<B>) -> Result<Option<(String, f32)>, CliError> {
    struct Look {
        names: Vec<String>,
        variants: usize,
        found: Result<Option<(String, f32)>, CliError>,
    }
    impl<B: Backend> ModuleVisitor<B> for Look {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.names.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.names.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if !matches!(self.found, Ok(None)) {
                return;
            }
            let path = self.names.get(self.variants..).unwrap_or_default().join(".");
            let finite = |value: &f32| value.is_finite();
            self.found = match param.val().try_into_data() {
                Ok(data) => {
                    let bad = match data.as_slice::<f32>() {
                        Ok(values) => values.iter().copied().find(|value| !finite(value)),
                        Err(_) => data.iter::<f32>().find(|value| !finite(value)),
                    };
                    Ok(bad.map(|value| (path, value)))
                }
                Err(error) => Err(CliError::Usage(format!("{path} cannot be read: {error}"))),
            };
        }
    }
    let mut look = Look {
        names: Vec::new(),
        variants: variants(model),
        found: Ok(None),
    };
    model.visit(&mut look);
    look.found
}

/// How many names of enum variants every path in a model begins with.
fn variants<B: Backend>(model: &Model<B>) -> usize {
    if matches!(model, Model::Vision(_)) { 2 } else { 1 }
}

/// Stops the training of parameters whose path begins with one of `prefixes`.
///
/// # Errors
///
/// [`CliError::Config`] if there are prefixes, and no path begins with one of them.
pub fn freeze<B: AutodiffBackend>(model: Model<B>, prefixes: &[String]) -> Result<Model<B>, CliError> {
    struct Freeze<'a> {
        prefixes: &'a [String],
        names: Vec<String>,
        /// Names of enum variants at the beginning of every path; users count from the family's own root.
        variants: usize,
        frozen: usize,
    }
    impl<B: Backend> ModuleMapper<B> for Freeze<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.names.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.names.pop();
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let path = self.names.get(self.variants..).unwrap_or_default().join(".");
            let below = |prefix: &String| {
                path.strip_prefix(prefix.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            if self.prefixes.iter().any(below) {
                self.frozen += 1;
                return param.set_require_grad(false);
            }
            param
        }
    }
    let mut mapper = Freeze {
        prefixes,
        names: Vec::new(),
        variants: variants(&model),
        frozen: 0,
    };
    let model = model.map(&mut mapper);
    if mapper.frozen == 0 && !prefixes.is_empty() {
        return Err(CliError::config(
            "model.freeze",
            "no parameter has a path that begins with one of these; a path is that of kiln-models, such as \
             bert.encoder.layer.0",
        ));
    }
    Ok(model)
}

/// The model without autodiff and in evaluation mode, with parameters of f32.
pub fn without_autodiff(model: &Model<Autodiff<Kiln>>) -> Model<Kiln> {
    kiln::cast_parameters(model.clone(), DType::F32).valid()
}

/// The family of models that a name belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Language models.
    Llama,
    /// Classifiers of texts.
    Bert,
    /// Classifiers of images.
    Vision,
}

impl Family {
    /// The family of a model's name.
    ///
    /// # Errors
    ///
    /// [`CliError::Unknown`] with the nearest name.
    pub fn of(name: &str) -> Result<Self, CliError> {
        match name {
            _ if LlamaConfig::preset_names().any(|known| known == name) => Ok(Self::Llama),
            "bert-base" | "bert-minilm" => Ok(Self::Bert),
            _ if VisionConfig::NAMES.contains(&name) => Ok(Self::Vision),
            _ => Err(CliError::unknown("model", name, names())),
        }
    }

    /// Compares model and data.
    ///
    /// # Errors
    ///
    /// [`CliError::Usage`] if the source does not make this family's batches.
    pub fn check(self, source: DataSource) -> Result<(), CliError> {
        let (fits, sources) = match self {
            Self::Llama => (source == DataSource::Text, "text"),
            Self::Bert => (
                matches!(source, DataSource::Table | DataSource::Passages),
                "table or passages",
            ),
            Self::Vision => (
                matches!(
                    source,
                    DataSource::Shapes | DataSource::Images | DataSource::Cifar10 | DataSource::Cifar100
                ),
                "shapes, images, cifar10 or cifar100",
            ),
        };
        if fits {
            return Ok(());
        }
        Err(CliError::Usage(format!(
            "a model of the {self:?} family trains on data.source = {sources}"
        )))
    }
}

/// Names of all models that a config can name.
pub fn names() -> impl Iterator<Item = &'static str> {
    LlamaConfig::preset_names()
        .chain(["bert-base", "bert-minilm"])
        .chain(VisionConfig::NAMES)
}
