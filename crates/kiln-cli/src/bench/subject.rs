//! The subject of a measurement: a model by name, and random inputs of its kind.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use kiln_hub::data::Rng;
use kiln_models::bert::BertConfig;
use kiln_models::llama::LlamaConfig;
use kiln_models::mlp::MlpConfig;
use kiln_models::vision::VisionConfig;

use crate::architecture::Architecture;
use crate::error::CliError;
use crate::model::{Batch, names};

/// A model and the size of its inputs.
pub struct Subject {
    /// The model's sizes.
    pub architecture: Architecture,
    batch: usize,
    seq: usize,
    size: usize,
}

impl Subject {
    /// The model called `name` with `batch` examples of `seq` tokens or `size` by `size` pixels. `mlp` and
    /// `vit_small` are names too.
    ///
    /// # Errors
    ///
    /// [`CliError::Unknown`] with the nearest name.
    pub fn new(name: &str, batch: usize, seq: usize, size: usize) -> Result<Self, CliError> {
        if batch == 0 || seq == 0 || size == 0 {
            return Err(CliError::Usage(
                "--batch, --seq and --size must be at least 1".to_owned(),
            ));
        }
        let architecture = match name {
            "mlp" => Architecture::Mlp(MlpConfig::new()),
            "bert-base" | "bert-minilm" => Architecture::Bert(BertConfig::preset(name)?),
            "vit" | "vit_small" => vision("vit_small_patch16_224", size),
            _ if LlamaConfig::preset_names().any(|known| known == name) => {
                let mut sizes = LlamaConfig::preset(name)?;
                sizes.max_position_embeddings = sizes.max_position_embeddings.max(seq);
                Architecture::Llama(sizes)
            }
            _ if VisionConfig::NAMES.contains(&name) => vision(name, size),
            _ => {
                return Err(CliError::unknown(
                    "model",
                    name,
                    ["mlp", "vit_small"].into_iter().chain(names()),
                ));
            }
        };
        Ok(Self {
            architecture,
            batch,
            seq,
            size,
        })
    }

    /// Random inputs, the same at each call.
    pub fn batch<B: Backend>(&self, device: &B::Device) -> Batch<B> {
        let mut rng = Rng::at(&[0]);
        let (batch, seq, size) = (self.batch, self.seq, self.size);
        let one = |values: Vec<i32>| Tensor::<B, 1, Int>::from_data(TensorData::new(values, [batch]), device);
        let two =
            |values: Vec<i32>| Tensor::<B, 2, Int>::from_data(TensorData::new(values, [batch, seq]), device);
        match &self.architecture {
            Architecture::Llama(sizes) => {
                let (inputs, targets) = (
                    indices(&mut rng, batch * seq, sizes.vocab_size),
                    indices(&mut rng, batch * seq, sizes.vocab_size),
                );
                Batch::Windows {
                    inputs: two(inputs),
                    targets: two(targets),
                }
            }
            Architecture::Bert(sizes) => {
                let (tokens, labels) = (
                    indices(&mut rng, batch * seq, sizes.vocab_size),
                    indices(&mut rng, batch, sizes.num_labels),
                );
                Batch::Texts {
                    tokens: two(tokens),
                    keep: None,
                    labels: one(labels),
                }
            }
            Architecture::Vision(sizes) => {
                let labels = one(indices(&mut rng, batch, sizes.num_classes));
                let pixels = normals(&mut rng, batch * 3 * size * size);
                Batch::Images {
                    pixels: Tensor::from_data(TensorData::new(pixels, [batch, 3, size, size]), device),
                    labels,
                }
            }
            Architecture::Mlp(sizes) => {
                let (width, count) = (
                    sizes.widths.first().copied().unwrap_or(1),
                    sizes.widths.last().copied().unwrap_or(1),
                );
                let labels = one(indices(&mut rng, batch, count));
                let inputs = normals(&mut rng, batch * width);
                Batch::Vectors {
                    inputs: Tensor::from_data(TensorData::new(inputs, [batch, width]), device),
                    labels,
                }
            }
        }
    }
}

fn vision(name: &str, size: usize) -> Architecture {
    Architecture::Vision(VisionConfig::new(name.to_owned()).with_image_size(size))
}

/// Uniform numbers below `below`.
fn indices(rng: &mut Rng, count: usize, below: usize) -> Vec<i32> {
    (0..count).map(|_| rng.index(below) as i32).collect()
}

/// Numbers of the standard normal distribution.
fn normals(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| rng.normal()).collect()
}
