//! JPEG files through Kiln's decoder of parts, beside the general decoder of the `image` crate.

use std::path::{Path, PathBuf};

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use kiln_hub::data::*;

/// Smooth colours with noise and a hard edge, as photographs have them.
fn drawn(width: usize, height: usize, rng: &mut Rng) -> Vec<u8> {
    let waves: Vec<[f32; 4]> = (0..9)
        .map(|_| std::array::from_fn(|_| rng.range(-0.2, 0.2)))
        .collect();
    let noise = rng.range(0.0, 60.0);
    let mut rgb = Vec::with_capacity(width * height * 3);
    for y in 0..height {
        for x in 0..width {
            for three in waves.chunks(3) {
                let wave =
                    |w: &[f32; 4]| (w[0] * x as f32 + w[1] * y as f32 + w[2] * 30.0).sin() * w[3] * 200.0;
                let edge = if x * 3 > y * 2 + 11 { 40.0 } else { 0.0 };
                let level = 110.0 + edge + three.iter().map(wave).sum::<f32>() + rng.range(-noise, noise);
                rgb.push(level.clamp(0.0, 255.0) as u8);
            }
        }
    }
    rgb
}

/// A file of any kind that the encoder writes.
fn encoded(width: usize, height: usize, rng: &mut Rng) -> Vec<u8> {
    let samplings = [
        SamplingFactor::F_1_1,
        SamplingFactor::F_2_1,
        SamplingFactor::F_1_2,
        SamplingFactor::F_2_2,
    ];
    let mut bytes = Vec::new();
    let quality = [20, 75, 90, 100][rng.index(4)];
    let mut encoder = Encoder::new(&mut bytes, quality);
    encoder.set_sampling_factor(samplings[rng.index(4)]);
    // The encoder's own count of symbols forgets restarts.
    match rng.index(3) {
        0 => encoder.set_optimized_huffman_tables(true),
        1 => encoder.set_restart_interval(1 + rng.index(7) as u16),
        _ => {}
    }
    let is_grey = rng.chance(0.2);
    let channels = if is_grey { 1 } else { 3 };
    let pixels: Vec<u8> = drawn(width, height, rng)
        .into_iter()
        .take(width * height * channels)
        .collect();
    let colours = if is_grey { ColorType::Luma } else { ColorType::Rgb };
    encoder
        .encode(&pixels, width as u16, height as u16, colours)
        .unwrap();
    bytes
}

fn write(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("a.jpg");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The picture as the general decoder sees it.
fn reference(bytes: &[u8]) -> Option<Picture> {
    let decoded = image::load_from_memory(bytes).ok()?.into_rgb8();
    Some(Picture {
        width: decoded.width() as usize,
        height: decoded.height() as usize,
        rgb: decoded.into_raw(),
    })
}

fn difference(a: &Picture, b: &Picture) -> Option<(usize, usize)> {
    assert_eq!((a.width, a.height), (b.width, b.height));
    let at = a.rgb.iter().zip(&b.rgb).position(|(a, b)| a != b)?;
    Some((at / 3 % a.width, at / 3 / a.width))
}

#[test]
fn pixels_are_those_of_the_general_decoder() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = Rng::at(&[1]);
    for round in 0..300 {
        let (width, height) = (1 + rng.index(90), 1 + rng.index(70));
        let bytes = encoded(width, height, &mut rng);
        let path = write(folder.path(), &bytes);
        let whole = Picture::open(&path).unwrap();
        let expected = reference(&bytes).unwrap();
        assert_eq!(
            difference(&whole, &expected),
            None,
            "{width}x{height}, round {round}"
        );

        let (x, y) = (rng.index(width), rng.index(height));
        let region = Region {
            x,
            y,
            width: 1 + rng.index(width - x),
            height: 1 + rng.index(height - y),
        };
        let mut seen = None;
        let part = Picture::open_part(&path, |width, height| {
            seen = Some((width, height));
            region
        });
        assert_eq!(seen, Some((width, height)));
        let cut = expected.crop(x as isize, y as isize, region.width, region.height);
        assert_eq!(
            difference(&part.unwrap(), &cut),
            None,
            "{region:?} of {width}x{height}, round {round}"
        );
    }
}

#[test]
fn parts_over_the_edge_are_black_there() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = encoded(40, 30, &mut Rng::at(&[2]));
    let path = write(folder.path(), &bytes);
    let region = Region {
        x: 30,
        y: 20,
        width: 20,
        height: 20,
    };
    let part = Picture::open_part(&path, |_, _| region).unwrap();
    assert_eq!(part, reference(&bytes).unwrap().crop(30, 20, 20, 20));
    assert_eq!(part.pixel(15, 3), [0; 3]);
}

/// Kinds that are left to the general decoder.
#[test]
fn progressive_and_cmyk_files_are_read_too() {
    let folder = tempfile::tempdir().unwrap();
    let pixels = drawn(50, 40, &mut Rng::at(&[3]));
    let mut progressive = Vec::new();
    let mut encoder = Encoder::new(&mut progressive, 90);
    encoder.set_progressive(true);
    encoder.encode(&pixels, 50, 40, ColorType::Rgb).unwrap();
    let mut cmyk = Vec::new();
    let encoder = Encoder::new(&mut cmyk, 90);
    encoder
        .encode(&pixels[..40 * 30 * 4], 40, 30, ColorType::Cmyk)
        .unwrap();
    for bytes in [progressive, cmyk] {
        let path = write(folder.path(), &bytes);
        assert_eq!(Picture::open(&path).unwrap(), reference(&bytes).unwrap());
    }
}

/// Damage gives what the general decoder makes of it: the same pixels, or an error that names the file.
#[test]
fn damaged_files_are_what_the_general_decoder_makes_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = Rng::at(&[4]);
    let mut refused = 0;
    for round in 0..1500 {
        let (width, height) = (1 + rng.index(60), 1 + rng.index(60));
        let mut bytes = encoded(width, height, &mut rng);
        for _ in 0..rng.index(4) {
            // The marker at the end is not read: the general decoder greys the last rows where it is damaged.
            let at = rng.index(bytes.len() - 2);
            bytes[at] = rng.bits() as u8;
        }
        if rng.chance(0.3) {
            bytes.truncate(rng.index(bytes.len()));
        }
        let path = write(folder.path(), &bytes);
        // Header damage may announce a size that Kiln refuses, or for which this test has no patience.
        let size = image::ImageReader::new(std::io::Cursor::new(&bytes)).with_guessed_format();
        let size = size.unwrap().into_dimensions();
        if size.is_ok_and(|(width, height)| width.max(height) > 1 << 14 || width * height > 1 << 20) {
            continue;
        }
        match (Picture::open(&path), reference(&bytes)) {
            (Ok(picture), Some(expected)) => {
                assert_eq!(difference(&picture, &expected), None, "round {round}");
            }
            (Err(error), None) => {
                refused += 1;
                assert!(
                    matches!(&error, DataError::Format { path: of, .. } if *of == path),
                    "{error}"
                );
                assert!(error.to_string().contains("a.jpg"), "{error}");
            }
            (picture, expected) => panic!("round {round}: {picture:?} for {expected:?}"),
        }
    }
    assert!(refused > 50, "{refused}");
}

/// What a dataset gives is the pipeline applied to the whole picture, though it decodes a part.
#[test]
fn examples_are_augmented_whole_pictures() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = Rng::at(&[5]);
    for n in 0..6 {
        let path = folder.path().join(format!("class/{n}.jpg"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, encoded(20 + n * 13, 90 - n * 9, &mut rng)).unwrap();
    }
    let source = ImageFolder::open(folder.path()).unwrap();
    for pipeline in [Pipeline::imagenet_train(24), Pipeline::imagenet_evaluation(24)] {
        let images = Images::new(source.clone(), pipeline.clone());
        for index in 0..6 {
            for seed in 0..20 {
                let item = images.item(index, &mut Rng::at(&[seed])).unwrap();
                let whole = source.picture(index).unwrap().0;
                let expected = pipeline.augment(whole, &mut Rng::at(&[seed])).unwrap();
                assert_eq!(item.picture, expected);
                let batch = ImageBatch::collate(vec![item]).unwrap();
                assert_eq!(batch.pixels, pipeline.normalise(&expected));
            }
        }
    }

    let batches = |threads| -> Vec<ImageBatch> {
        let images = Images::new(source.clone(), Pipeline::imagenet_train(24));
        let loader = Loader::new(images, ImageBatcher, 4).with_threads(threads);
        loader.start().unwrap().take(7).map(Result::unwrap).collect()
    };
    let one = batches(1);
    assert!(batches(2) == one && batches(5) == one, "threads change nothing");
}
