//! Images: folders, CIFAR and drawn shapes, decoded on the host or by the engines of a GPU.

use std::sync::Once;

use burn::tensor::Tensor;
use kiln::images::{self, Frame, ImageError, Pixels, Rectangle};
use kiln::{Kiln, KilnBackend, KilnDevice, Place};
use kiln_hub::data::{
    Augment, Cifar, CifarKind, Collate, Dataset, Encoded, EncodedBatch, EncodedImages, ImageBatch,
    ImageFolder, ImageSource, Images, Pipeline, Shapes, Share, View, first_jpeg,
};

use super::{Data, HeldOut, HostBatch, Open, Part, loaders, path};
use crate::config::{Config, DataSource, Decoding};
use crate::error::CliError;
use crate::model::Batch;

/// Loaders for training and evaluation.
type Loaders = (Box<dyn Open>, Option<Box<dyn Open>>);

/// The images of a config.
pub(super) fn open(config: &Config, device: &KilnDevice, way: HeldOut) -> Result<Data, CliError> {
    let collate = || |items| ImageBatch::collate(items).map(HostBatch::Images);
    let (data, size) = (&config.data, config.data.image_size);
    let (classes, (train, evaluation)) = match data.source {
        DataSource::Images => folders(config, device, way)?,
        DataSource::Cifar10 | DataSource::Cifar100 => {
            let kind = if data.source == DataSource::Cifar10 {
                CifarKind::Cifar10
            } else {
                CifarKind::Cifar100
            };
            let root = path(
                data,
                "the folder of the binary version, from https://www.cs.toronto.edu/~kriz/cifar.html",
            )?;
            let pipeline = if data.augment {
                Pipeline::cifar_train()
            } else {
                Pipeline::cifar_evaluation()
            };
            let train = Images::new(Cifar::open(root, kind, true)?, pipeline);
            let evaluation = Images::new(Cifar::open(root, kind, false)?, Pipeline::cifar_evaluation());
            (
                train.classes().to_vec(),
                loaders(config, train, Some(evaluation), collate),
            )
        }
        _ => {
            let drawn = |examples: usize, seed: u64| Shapes::new(examples, size, seed);
            let still = Pipeline::plain().with_normalisation([0.5; 3], [0.25; 3]);
            let moving = Pipeline {
                steps: vec![
                    Augment::RandomCrop {
                        size,
                        padding: size / 8,
                    },
                    Augment::HorizontalFlip(0.5),
                ],
                ..still.clone()
            };
            let held_out = (data.examples as f64 * data.evaluation_fraction).round() as usize;
            let train = Images::new(
                drawn(data.examples, config.seed),
                if data.augment { moving } else { still.clone() },
            );
            // Another seed draws other pictures.
            let evaluation =
                (held_out > 0).then(|| Images::new(drawn(held_out, config.seed ^ u64::MAX), still));
            (
                train.source().classes().to_vec(),
                loaders(config, train, evaluation, collate),
            )
        }
    };
    Ok(Data {
        tokenizer: None,
        vocabulary: 0,
        classes,
        tokens: None,
        unit: "images",
        share: Share::WHOLE,
        train,
        evaluation,
    })
}

/// Classes and loaders of a folder of images.
fn folders(config: &Config, device: &KilnDevice, way: HeldOut) -> Result<(Vec<String>, Loaders), CliError> {
    let root = path(&config.data, "one folder with a folder for each class")?;
    let folder = ImageFolder::open(root)?;
    let classes = folder.classes().to_vec();
    let floats = || |items| ImageBatch::collate(items).map(HostBatch::Images);
    let encoded = || |items| EncodedBatch::collate(items).map(HostBatch::Encoded);
    // Without engines a GPU makes floats of the loader's bytes.
    let decodes = !is_decoded_on(device, config.data.decoding, &folder)?;
    let loaders = if device.place() == Place::Host {
        of_folders(config, folder, way, Images::new, floats)
    } else {
        let see = |folder, pipeline| EncodedImages::new(folder, pipeline).with_decoding(decodes);
        of_folders(config, folder, way, see, encoded)
    }?;
    Ok((classes, loaders))
}

/// Loaders of what `see` makes of a folder and a pipeline.
fn of_folders<D, C>(
    config: &Config,
    folder: ImageFolder,
    way: HeldOut,
    see: impl Fn(ImageFolder, Pipeline) -> D,
    collate: impl Fn() -> C,
) -> Result<Loaders, CliError>
where
    D: Dataset,
    C: Collate<D::Item, Batch = HostBatch>,
{
    let (data, size) = (&config.data, config.data.image_size);
    let still = Pipeline::imagenet_evaluation(size);
    let moving = match data.augment {
        true => Pipeline::imagenet_train(size),
        false => still.clone(),
    };
    let train = see(folder.clone(), moving);
    let (train, evaluation) = match data.evaluation_paths.as_slice() {
        [] => (
            Part::split(train, data.evaluation_fraction, way).0,
            Part::split(see(folder, still), data.evaluation_fraction, way).1,
        ),
        [other, ..] => {
            let other = ImageFolder::open_as(other, folder.classes().to_vec())?;
            (Part::whole(train), Some(Part::whole(see(other, still))))
        }
    };
    Ok(loaders(config, train, evaluation, collate))
}

/// Whether the engines of `device` decode the images of a folder. Those that it has are tried on one of them.
fn is_decoded_on(device: &KilnDevice, decoding: Decoding, folder: &ImageFolder) -> Result<bool, CliError> {
    if decoding == Decoding::Host || (decoding == Decoding::Auto && device.place() == Place::Host) {
        return Ok(false);
    }
    match tried(device, folder)? {
        Ok(engines) => {
            tracing::info!("{engines} engines of {} decode the images", device.place());
            Ok(true)
        }
        Err(reason) if decoding == Decoding::Auto => {
            kiln_log::warn!("images are decoded on the host: {reason}");
            Ok(false)
        }
        Err(reason) => Err(CliError::config("data.decoding = \"device\"", reason)),
    }
}

/// How far the engines' pixels may be from the host's, in levels from 0 to 255, on average. Colours that are
/// stored at half the resolution are interpolated in different ways; another picture is some 50 apart.
const FARTHEST: f64 = 8.0;

/// The number of engines, if they decode the first JPEG of a folder to what the host makes of it; why not
/// otherwise.
fn tried(device: &KilnDevice, folder: &ImageFolder) -> Result<Result<u32, String>, CliError> {
    let engines = match images::engines(device) {
        Ok(engines) => engines,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let Some(Encoded::Jpeg(file, (width, height))) = first_jpeg(folder)? else {
        return Ok(Err("the first of them are no baseline JPEGs".to_owned()));
    };
    let name = file.path.display().to_string();
    let batch = EncodedBatch {
        pictures: vec![(Encoded::Jpeg(file, (width, height)), View::whole(width, height))],
        labels: vec![0],
        normalisation: Pipeline::plain().normalisation(),
        width,
        height,
    };
    let expected = batch.clone().decode()?.pixels;
    let found = match decode::<Kiln>(&batch, device) {
        Ok(pixels) => pixels.into_data(),
        Err(error) => return Ok(Err(format!("{name}: {error}"))),
    };
    let apart: f64 = found
        .iter::<f32>()
        .zip(&expected)
        .map(|(found, expected)| f64::from((found - expected).abs()) * 255.0)
        .sum();
    let apart = apart / expected.len() as f64;
    Ok(match apart <= FARTHEST {
        true => Ok(engines),
        false => Err(format!(
            "{name}: a level from the engines is {apart:.1} from that of the host, on average"
        )),
    })
}

/// The pictures of a batch on a device, `[rows, 3, height, width]`.
fn decode<B: KilnBackend>(batch: &EncodedBatch, device: &KilnDevice) -> Result<Tensor<B, 4>, ImageError> {
    // Sides of pictures have 16 bits.
    let side = |side: usize| side as u32;
    let view = |view: &View| images::View {
        from: Rectangle {
            x: side(view.corner.0),
            y: side(view.corner.1),
            width: side(view.from.0),
            height: side(view.from.1),
        },
        scaled: (side(view.scaled.0), side(view.scaled.1)),
        window: (view.window.0 as i32, view.window.1 as i32),
        mirrored: view.mirrored,
    };
    let pictures = batch.pictures.iter().map(|(picture, shown)| {
        let (pixels, width, height) = match picture {
            Encoded::Jpeg(file, (width, height)) => (Pixels::Jpeg(&file.bytes), *width, *height),
            Encoded::Decoded(picture) => (Pixels::Rgb(&picture.rgb), picture.width, picture.height),
        };
        images::Picture {
            pixels,
            width: side(width),
            height: side(height),
            view: view(shown),
        }
    });
    let frame = Frame {
        width: side(batch.width),
        height: side(batch.height),
        scale: batch.normalisation.scale,
        shift: batch.normalisation.shift,
    };
    images::decode(&pictures.collect::<Vec<_>>(), &frame, device)
}

/// An encoded batch as tensors. Where the engines fail the host decodes it, and says what is wrong with which
/// file.
pub(super) fn tensors<B: KilnBackend>(
    batch: EncodedBatch,
    device: &KilnDevice,
) -> Result<Batch<B>, CliError> {
    let (pixels, labels) = match decode(&batch, device) {
        Ok(pixels) => (pixels, Tensor::from_data(&*batch.labels, device)),
        Err(error) => {
            static TOLD: Once = Once::new();
            TOLD.call_once(|| kiln_log::warn!("the host decodes a batch of images: {error}"));
            batch.decode()?.into_tensors(device)
        }
    };
    Ok(Batch::Images { pixels, labels })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_hub::data::{Images, Loader};

    const DEVICE: KilnDevice = KilnDevice::cuda(0);

    /// A folder with JPEGs of all kinds.
    fn folder() -> (tempfile::TempDir, ImageFolder) {
        let folder = tempfile::tempdir().unwrap();
        let class = folder.path().join("all");
        std::fs::create_dir(&class).unwrap();
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../kiln-hub/tests/fixtures/jpegs");
        for entry in std::fs::read_dir(fixtures).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, class.join(path.file_name().unwrap())).unwrap();
        }
        let source = ImageFolder::open(folder.path()).unwrap();
        (folder, source)
    }

    /// Whether there are engines; with `KILN_TEST_CUDA=required` there must be.
    fn has_engines() -> bool {
        match images::engines(&DEVICE) {
            Ok(_) => true,
            Err(error) if std::env::var_os("KILN_TEST_CUDA").is_some_and(|value| value == "required") => {
                panic!("{error}")
            }
            Err(error) => {
                println!(
                    "skipped: {}",
                    error.to_string().lines().next().unwrap_or_default()
                );
                false
            }
        }
    }

    fn batch(source: &ImageFolder, pipeline: &Pipeline, seed: u64) -> EncodedBatch {
        let images = EncodedImages::new(source.clone(), pipeline.clone());
        let all = images.len();
        let loader = Loader::new(images, EncodedBatch::collate, all).with_seed(seed);
        loader.start().unwrap().next().unwrap().unwrap()
    }

    /// Mean distance in levels of each picture from what the host makes of it.
    fn distances(batch: &EncodedBatch, found: &[f32], pipeline: &Pipeline) -> Vec<f64> {
        let expected = batch.clone().decode().unwrap().pixels;
        let each = expected.len() / batch.labels.len();
        let level = 255.0 * f64::from(pipeline.deviation[0]);
        let pictures = found.chunks_exact(each).zip(expected.chunks_exact(each));
        let apart = |(found, expected): (&[f32], &[f32])| {
            let pixels = found.iter().zip(expected);
            pixels.map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() * level / each as f64
        };
        pictures.map(apart).collect()
    }

    #[test]
    fn engines_decode_what_the_host_decodes() {
        if !has_engines() {
            return;
        }
        let (_folder, source) = folder();
        assert!(is_decoded_on(&DEVICE, Decoding::Device, &source).unwrap());
        for pipeline in [Pipeline::imagenet_train(32), Pipeline::imagenet_evaluation(28)] {
            for seed in 0..4 {
                let batch = batch(&source, &pipeline, seed);
                let pixels = decode::<Kiln>(&batch, &DEVICE).unwrap();
                assert_eq!(pixels.dims(), [9, 3, batch.height, batch.width]);
                let found = pixels.into_data().to_vec::<f32>().unwrap();
                let distances = distances(&batch, &found, &pipeline);
                for ((picture, _), apart) in batch.pictures.iter().zip(&distances) {
                    // The host's own pictures are scaled and normalised as the host does it.
                    let (name, most) = match picture {
                        Encoded::Jpeg(file, _) => (file.path.display().to_string(), 3.0),
                        Encoded::Decoded(_) => ("a picture of the host".to_owned(), 1e-3),
                    };
                    println!("{name}: {apart:.3}");
                    assert!(*apart <= most, "{name}: {apart} levels from the host's");
                }
            }
        }
    }

    #[test]
    fn a_damaged_file_is_named_or_decoded_and_the_next_batch_is_right() {
        if !has_engines() {
            return;
        }
        let (_folder, source) = folder();
        let pipeline = Pipeline::imagenet_evaluation(28);
        let right = batch(&source, &pipeline, 1);
        let before = decode::<Kiln>(&right, &DEVICE).unwrap().into_data();
        for noise in 0..6u8 {
            let mut damaged = right.clone();
            for (picture, _) in &mut damaged.pictures {
                if let Encoded::Jpeg(file, _) = picture {
                    let begin = file.bytes.len() / 2;
                    let end = file.bytes.len() - 2;
                    for (at, byte) in file.bytes[begin..end].iter_mut().enumerate() {
                        *byte = (at as u8).wrapping_mul(37).wrapping_add(noise) & 0x7f;
                    }
                }
            }
            match tensors::<Kiln>(damaged, &DEVICE) {
                Ok(Batch::Images { pixels, .. }) => assert_eq!(pixels.into_data().shape, before.shape),
                Ok(_) => panic!("images are no other batch"),
                Err(error) => assert!(error.to_string().contains(".jpeg"), "{error}"),
            }
            let again = decode::<Kiln>(&right, &DEVICE).unwrap().into_data();
            assert!(again == before, "the batch after a damaged one");
        }
    }

    #[test]
    fn without_engines_the_host_decodes() {
        let (_folder, source) = folder();
        let cpu = KilnDevice::cpu();
        assert!(!is_decoded_on(&cpu, Decoding::Auto, &source).unwrap());
        assert!(!is_decoded_on(&DEVICE, Decoding::Host, &source).unwrap());
        let error = is_decoded_on(&cpu, Decoding::Device, &source)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("data.decoding") && error.contains("decoded on GPUs"),
            "{error}"
        );

        // An encoded batch that the device does not decode is the batch that the host would have made.
        let pipeline = Pipeline::imagenet_train(24);
        let encoded = batch(&source, &pipeline, 5);
        let decoded =
            Loader::new(Images::new(source, pipeline), kiln_hub::data::ImageBatcher, 9).with_seed(5);
        let expected = decoded.start().unwrap().next().unwrap().unwrap();
        let Batch::Images { pixels, labels } = tensors::<Kiln>(encoded.clone(), &cpu).unwrap() else {
            panic!("images are no other batch");
        };
        assert_eq!(pixels.into_data().to_vec::<f32>().unwrap(), expected.pixels);
        assert_eq!(labels.dims(), [9]);

        // Ranks have their parts of it.
        let parts: Vec<HostBatch> = (0..2)
            .map(|rank| HostBatch::Encoded(encoded.clone()).share(rank, 2))
            .collect();
        let count = |part: &HostBatch| match part {
            HostBatch::Encoded(part) => (part.pictures.len(), part.labels.len()),
            _ => panic!("images are no other batch"),
        };
        assert_eq!(parts.iter().map(count).collect::<Vec<_>>(), [(4, 4), (5, 5)]);
        let last = match &parts[1] {
            HostBatch::Encoded(part) => part.pictures.last().cloned(),
            _ => None,
        };
        assert_eq!(last.as_ref(), encoded.pictures.last());
    }
}
