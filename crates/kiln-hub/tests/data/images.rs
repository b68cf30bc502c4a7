//! Pictures: folders, CIFAR, augmentation, batches.

use std::collections::BTreeMap;

use burn_flex::Flex;
use kiln_hub::data::{Rng, *};

use crate::files::{png, write};

/// A JPEG of waves.
fn jpeg(width: u32, height: u32) -> Vec<u8> {
    let wave = |x: u32, y: u32| image::Rgb([(x * 5) as u8, (y * 7) as u8, ((x + y) * 3) as u8]);
    let mut bytes = Vec::new();
    let picture = image::DynamicImage::ImageRgb8(image::RgbImage::from_fn(width, height, wave));
    let encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, 90);
    picture.write_with_encoder(encoder).unwrap();
    bytes
}

/// A decoder would make up what is missing.
#[test]
fn a_jpeg_that_ends_early_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let whole = jpeg(50, 40);
    for bytes in [2, whole.len() / 3] {
        write(folder.path(), "cut.jpeg", &whole[..whole.len() - bytes]);
        let error = Picture::open(folder.path().join("cut.jpeg"))
            .unwrap_err()
            .to_string();
        for part in ["cut.jpeg", "the file ends before the picture does"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

/// Scaled until it is 256 pixels wide it would take 3 GB.
#[test]
fn a_strip_that_would_fill_the_memory_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        "a/strip.png",
        png(1, 16_000, |_, y| [y as u8, 0, 0]),
    );
    write(folder.path(), "b/0.png", png(9, 9, |_, _| [7; 3]));
    let source = ImageFolder::open(folder.path()).unwrap();
    let seen = Images::new(source, Pipeline::imagenet_evaluation(224));
    let error = seen.item(0, &mut Rng::at(&[1])).unwrap_err().to_string();
    for part in ["strip.png", "1x16000", "256x4096000", "remove it"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(seen.item(1, &mut Rng::at(&[1])).unwrap().picture.width, 224);
}

#[test]
fn encoded_batches_are_those_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a/0.jpeg", jpeg(50, 40));
    write(
        folder.path(),
        "a/1.png",
        png(31, 60, |x, y| [x as u8, y as u8, 9]),
    );
    write(folder.path(), "b/2.jpeg", jpeg(90, 33));
    // Decoders in hardware may not find its end.
    let padded = [jpeg(64, 64), vec![0; 2000]].concat();
    write(folder.path(), "b/3.jpeg", padded);
    let source = ImageFolder::open(folder.path()).unwrap();
    for pipeline in [Pipeline::imagenet_train(16), Pipeline::imagenet_evaluation(16)] {
        let decoded = Images::new(source.clone(), pipeline.clone());
        let encoded = EncodedImages::new(source.clone(), pipeline);
        let batches = Loader::new(decoded, ImageBatcher, 4)
            .with_seed(3)
            .start()
            .unwrap();
        let others = Loader::new(encoded.clone(), EncodedBatch::collate, 4).with_seed(3);
        for (batch, other) in batches.zip(others.start().unwrap()).take(5) {
            let (batch, other) = (batch.unwrap(), other.unwrap());
            let jpegs = |(picture, _): &&(Encoded, View)| matches!(picture, Encoded::Jpeg(..));
            assert_eq!(
                other.pictures.iter().filter(jpegs).count(),
                2,
                "plain JPEGs stay encoded"
            );
            assert!(other.decode().unwrap() == batch);
        }
        // Or the loader decodes all of them.
        let bytes = Loader::new(encoded.clone().with_decoding(true), EncodedBatch::collate, 4);
        let bytes = bytes.with_seed(3).start().unwrap().next().unwrap().unwrap();
        let decoded = |(picture, _): &(Encoded, View)| matches!(picture, Encoded::Decoded(_));
        assert!(bytes.pictures.iter().all(decoded));
        let decoded = Images::new(source.clone(), encoded.pipeline().clone());
        let expected = Loader::new(decoded, ImageBatcher, 4)
            .with_seed(3)
            .start()
            .unwrap()
            .next();
        assert!(bytes.decode().unwrap() == expected.unwrap().unwrap());
        let first = first_jpeg(&source).unwrap();
        assert!(matches!(first, Some(Encoded::Jpeg(_, (50, 40)))), "{first:?}");
    }
    // Twice scaled is no view, so that the host augments.
    let twice = Pipeline::new(vec![
        Augment::Resize(20),
        Augment::Resize(10),
        Augment::CenterCrop(8),
    ]);
    let encoded = EncodedImages::new(source.clone(), twice.clone());
    let (seen, decoded) = (
        encoded.item(0, &mut Rng::at(&[1])).unwrap(),
        Images::new(source, twice),
    );
    let expected = decoded.item(0, &mut Rng::at(&[1])).unwrap().picture;
    assert!(seen.picture == Encoded::Decoded(expected));
}

#[test]
fn plain_jpegs_of_any_encoder_stay_encoded() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/jpegs");
    for entry in std::fs::read_dir(fixtures).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        write(
            folder.path(),
            &format!("all/{name}"),
            std::fs::read(&path).unwrap(),
        );
    }
    let images = EncodedImages::new(ImageFolder::open(folder.path()).unwrap(), Pipeline::plain());
    assert_eq!(images.len(), 9);
    let source = ImageFolder::open(folder.path()).unwrap();
    for (index, (path, _)) in source.files().iter().enumerate() {
        let picture = Picture::open(path).unwrap();
        let is_plain = path.file_name().unwrap().to_string_lossy().starts_with("plain");
        let item = images.item(index, &mut Rng::at(&[0])).unwrap();
        assert_eq!(item.view, View::whole(picture.width, picture.height));
        match item.picture {
            Encoded::Jpeg(_, size) => {
                assert!(is_plain, "{}", path.display());
                assert_eq!(size, (picture.width, picture.height));
            }
            Encoded::Decoded(decoded) => assert!(!is_plain && decoded == picture, "{}", path.display()),
        }
    }
}

#[test]
fn image_folders() {
    let folder = tempfile::tempdir().unwrap();
    for class in ["dog", "cat"] {
        for n in 0..2u8 {
            write(
                folder.path(),
                &format!("{class}/deep/{n}.png"),
                png(6, 4, |x, _| [x as u8, n, 3]),
            );
        }
    }
    write(folder.path(), "cat/notes.txt", "not an image");
    write(folder.path(), "stray.png", "outside of classes");
    let source = ImageFolder::open(folder.path()).unwrap();
    assert_eq!(source.classes(), ["cat", "dog"]);
    assert_eq!(
        source.files().iter().map(|(_, label)| *label).collect::<Vec<_>>(),
        [0, 0, 1, 1]
    );
    let (picture, label) = source.picture(3).unwrap();
    assert_eq!(
        (picture.width, picture.height, picture.pixel(5, 2), label),
        (6, 4, [5, 1, 3], 1)
    );

    let images = Images::new(source.clone(), Pipeline::plain());
    let batch = Loader::evaluation(images, ImageBatcher, 4)
        .start()
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let (pixels, labels) = batch.tensors::<Flex>(&Default::default());
    assert_eq!((pixels.dims(), labels.dims()), ([4, 3, 4, 6], [4]));
    assert_eq!(batch.pixels[24 + 23], 0.0, "green of the first picture");
    assert!(
        (batch.pixels[48] - 3.0 / 255.0).abs() < 1e-6,
        "blue of the first picture"
    );

    write(folder.path(), "cat/broken.png", b"\x89PNG\r\n\x1a\n");
    let source = ImageFolder::open(folder.path()).unwrap();
    assert!(matches!(source.picture(0), Err(DataError::Format { .. })));
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(matches!(
        ImageFolder::open(folder.path()),
        Err(DataError::Empty { .. })
    ));
}

#[cfg(unix)]
#[test]
fn classes_may_be_links() {
    use std::os::unix::fs::symlink;

    let [folder, elsewhere] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (root, far) = (folder.path(), elsewhere.path());
    let picture = || png(2, 2, |_, _| [0; 3]);
    write(root, "b/0.png", picture());
    write(far, "cats/1.png", picture());
    write(far, "cats/deep/2.png", picture());
    symlink(far.join("cats"), root.join("a")).unwrap();
    symlink(root.join("a"), far.join("cats/deep/round")).unwrap();
    let source = ImageFolder::open(root).unwrap();
    assert_eq!(source.classes(), ["a", "b"]);
    let labels: Vec<_> = source.files().iter().map(|(_, label)| *label).collect();
    assert_eq!(labels, [0, 0, 1]);
}

#[cfg(unix)]
#[test]
fn links_that_lead_nowhere_are_no_classes_and_no_pictures() {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write(root, "b/0.png", png(2, 2, |_, _| [0; 3]));
    // What is no class and no picture may be anything.
    symlink("gone", root.join(".cache")).unwrap();
    symlink("gone", root.join("b/notes.txt")).unwrap();
    symlink("gone", root.join("b/.cache")).unwrap();
    let _socket = UnixListener::bind(root.join("b/1.png")).unwrap();
    let source = ImageFolder::open(root).unwrap();
    assert_eq!(source.files(), [(root.join("b/0.png"), 0)]);
    for link in ["a", "b/2.png", "b/deep"] {
        let link = root.join(link);
        symlink("gone", &link).unwrap();
        let error = ImageFolder::open(root).unwrap_err();
        assert!(
            matches!(&error, DataError::DeadLink { path, target } if *path == link && *target == *"gone"),
            "{error}"
        );
        std::fs::remove_file(link).unwrap();
    }
}

#[test]
fn cifar_files() {
    let folder = tempfile::tempdir().unwrap();
    let record = |labels: &[u8], shade: u8| {
        let planes = (0..3072).map(|i| if i < 1024 { shade } else { (i % 1024 % 32) as u8 });
        [labels.to_vec(), planes.collect()].concat()
    };
    for n in 1..=5u8 {
        write(
            folder.path(),
            &format!("cifar-10-batches-bin/data_batch_{n}.bin"),
            [record(&[n], 10 * n), record(&[0], 0)].concat(),
        );
    }
    let train = Cifar::open(folder.path(), CifarKind::Cifar10, true).unwrap();
    assert_eq!(train.len(), 10);
    let (picture, label) = train.picture(4).unwrap();
    assert_eq!((label, picture.pixel(7, 20)), (3, [30, 7, 7]));
    assert!(matches!(train.picture(10), Err(DataError::OutOfRange { .. })));
    assert!(matches!(
        Cifar::open(folder.path(), CifarKind::Cifar10, false),
        Err(DataError::Io { .. })
    ));
    write(
        folder.path(),
        "cifar-10-batches-bin/test_batch.bin",
        record(&[10], 0),
    );
    let error = Cifar::open(folder.path(), CifarKind::Cifar10, false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("label 10"), "{error}");
    write(
        folder.path(),
        "cifar-10-batches-bin/test_batch.bin",
        &record(&[1], 0)[1..],
    );
    assert!(Cifar::open(folder.path(), CifarKind::Cifar10, false).is_err());

    let hundred = tempfile::tempdir().unwrap();
    write(hundred.path(), "train.bin", record(&[19, 99], 5));
    let train = Cifar::open(hundred.path(), CifarKind::Cifar100, true).unwrap();
    assert_eq!(train.picture(0).unwrap().1, 99, "the fine label");
    assert_eq!(train.classes().len(), 100);
}

/// A picture in which every pixel tells its place.
fn marked(width: usize, height: usize) -> Picture {
    let mut picture = Picture::filled(width, height, [0; 3]);
    for y in 0..height {
        for x in 0..width {
            let at = (y * width + x) * 3;
            picture.rgb[at..at + 3].copy_from_slice(&[x as u8 + 1, y as u8 + 1, 200]);
        }
    }
    picture
}

#[test]
fn crops_and_flips_move_pixels_and_do_not_change_them() {
    let picture = marked(8, 6);
    let flipped = picture.flip();
    assert_eq!(flipped.pixel(0, 4), picture.pixel(7, 4));
    assert_eq!(flipped.flip(), picture);
    let cut = picture.crop(-2, 3, 5, 5);
    assert_eq!(
        (cut.pixel(1, 0), cut.pixel(2, 0), cut.pixel(4, 3)),
        ([0; 3], picture.pixel(0, 3), [0; 3])
    );
    assert_eq!(picture.crop(50, 50, 2, 2), Picture::filled(2, 2, [0; 3]));

    // All places of a random crop occur, and each shows a window of the padded picture.
    let pipeline = Pipeline::new(vec![Augment::RandomCrop { size: 6, padding: 2 }]);
    let mut corners = BTreeMap::new();
    for seed in 0..2000 {
        let crop = pipeline.augment(marked(6, 6), &mut Rng::at(&[seed])).unwrap();
        assert_eq!((crop.width, crop.height), (6, 6));
        let (x, y) = (0..36)
            .map(|i| (i % 6, i / 6))
            .find(|&(x, y)| crop.pixel(x, y)[2] == 200)
            .unwrap();
        let [mark_x, mark_y, _] = crop.pixel(x, y);
        let offset = (i32::from(mark_x) - 1 - x as i32, i32::from(mark_y) - 1 - y as i32);
        assert_eq!(
            crop,
            marked(6, 6).crop(offset.0 as isize, offset.1 as isize, 6, 6)
        );
        *corners.entry(offset).or_insert(0) += 1;
    }
    assert_eq!(corners.len(), 25);
    assert!(corners.values().all(|&n| n > 40), "{corners:?}");

    let pipeline = Pipeline::new(vec![Augment::HorizontalFlip(0.5)]);
    let flips =
        (0..1000).filter(|&s| pipeline.augment(marked(4, 4), &mut Rng::at(&[s])).unwrap() != marked(4, 4));
    assert!((430..570).contains(&flips.count()));
}

#[test]
fn resizing_keeps_ratio_and_mean() {
    let evaluation = Pipeline::imagenet_evaluation(28);
    let mut rng = Rng::at(&[1]);
    let picture = evaluation
        .augment(Picture::filled(64, 40, [10, 20, 30]), &mut rng)
        .unwrap();
    assert_eq!(
        (picture.width, picture.height, picture.pixel(3, 3)),
        (28, 28, [10, 20, 30])
    );
    let wide = Pipeline::new(vec![Augment::Resize(20)])
        .augment(marked(90, 60), &mut rng)
        .unwrap();
    assert_eq!((wide.width, wide.height), (30, 20));
    let mean = |p: &Picture| {
        p.rgb.iter().step_by(3).map(|&b| f64::from(b)).sum::<f64>() / (p.width * p.height) as f64
    };
    assert!((mean(&wide) - mean(&marked(90, 60))).abs() < 0.6);

    let train = Pipeline::imagenet_train(16);
    for seed in 0..200 {
        let shape = [(9, 31), (31, 9), (1, 1), (300, 2)][seed as usize % 4];
        let crop = train
            .augment(marked(shape.0.min(200), shape.1), &mut Rng::at(&[seed]))
            .unwrap();
        assert_eq!((crop.width, crop.height), (16, 16));
        assert!(
            crop.rgb.iter().skip(2).step_by(3).all(|&b| b == 200),
            "no pixel from outside the picture"
        );
    }
    assert!(
        Pipeline::new(vec![Augment::CenterCrop(0)])
            .augment(marked(4, 4), &mut rng)
            .is_err()
    );
    assert!(train.augment(Picture::filled(0, 3, [0; 3]), &mut rng).is_err());
}

/// Bilinear resizing by its definition, in doubles: each new pixel is the mean of the old ones under a
/// triangle that reaches one pixel to each side, of the old image when it grows and of the new one when it
/// shrinks.
fn resized(picture: &Picture, width: usize, height: usize) -> Vec<f64> {
    let weights = |from: usize, to: usize| -> Vec<Vec<(usize, f64)>> {
        let ratio = from as f64 / to as f64;
        let reach = ratio.max(1.0);
        let of = |new: usize| {
            let centre = (new as f64 + 0.5) * ratio;
            let weight = |old: usize| (old, 1.0 - ((old as f64 + 0.5 - centre) / reach).abs());
            let inside: Vec<_> = (0..from)
                .map(weight)
                .filter(|(_, weight)| *weight > 0.0)
                .collect();
            let sum: f64 = inside.iter().map(|(_, weight)| weight).sum();
            inside
                .into_iter()
                .map(|(old, weight)| (old, weight / sum))
                .collect()
        };
        (0..to).map(of).collect()
    };
    let (across, down) = (weights(picture.width, width), weights(picture.height, height));
    let mut values = vec![];
    for row in &down {
        for column in &across {
            for channel in 0..3 {
                let part = |&(y, v): &(usize, f64), &(x, h): &(usize, f64)| {
                    v * h * f64::from(picture.pixel(x, y)[channel])
                };
                let sum = row.iter().flat_map(|y| column.iter().map(move |x| part(y, x)));
                values.push(sum.sum());
            }
        }
    }
    values
}

#[test]
fn resizing_is_within_a_level_of_its_definition() {
    let mut rng = Rng::at(&[8]);
    for _ in 0..200 {
        let mut side = || 1 + rng.index(60);
        let (width, height, to_width, to_height) = (side(), side(), side(), side());
        let mut picture = Picture::filled(width, height, [0; 3]);
        picture.rgb.fill_with(|| rng.bits() as u8);
        let small = picture.resize(to_width, to_height).unwrap();
        assert_eq!((small.width, small.height), (to_width, to_height));
        for (value, exact) in small.rgb.iter().zip(resized(&picture, to_width, to_height)) {
            assert!(
                (f64::from(*value) - exact.round()).abs() <= 1.0,
                "{value} for {exact}, {width}x{height} to {to_width}x{to_height}"
            );
        }
    }
    let picture = Picture::filled(5, 4, [1, 2, 3]);
    assert!(matches!(picture.resize(0, 3), Err(DataError::Shape { .. })));
    assert!(matches!(picture.resize(3, 0), Err(DataError::Shape { .. })));
    assert!(Picture::filled(0, 4, [0; 3]).resize(2, 2).is_err());
}

/// Grey pictures are widened and an alpha channel is dropped.
#[test]
fn png_files_of_every_kind_are_rgb() {
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str, image: image::DynamicImage| {
        let path = folder.path().join(name);
        image.save(&path).unwrap();
        Picture::open(path).unwrap()
    };
    let grey = image::GrayImage::from_fn(3, 2, |x, y| image::Luma([(x * 20 + y) as u8]));
    assert_eq!(save("grey.png", grey.into()).pixel(2, 1), [41; 3]);
    let alpha = image::RgbaImage::from_fn(3, 2, |x, y| image::Rgba([x as u8, y as u8, 9, 17]));
    assert_eq!(save("alpha.png", alpha.into()).pixel(2, 1), [2, 1, 9]);
}

/// Pictures of several sizes are no batch.
#[test]
fn a_batch_has_one_size() {
    let example = |width| ImageExample {
        picture: Picture::filled(width, 4, [0; 3]),
        normalisation: Pipeline::plain().normalisation(),
        label: 0,
    };
    let error = ImageBatch::collate(vec![example(4), example(5)]).unwrap_err();
    assert!(error.to_string().contains("5x4 beside 4x4"), "{error}");
}

/// Offsets that torchvision's CenterCrop gives.
#[test]
fn centre_crops_round_as_torchvision_does() {
    for (side, size, first) in [(10, 4, 4), (7, 4, 3), (5, 4, 1), (9, 4, 3), (11, 4, 5), (4, 4, 1)] {
        let crop = Pipeline::new(vec![Augment::CenterCrop(size)])
            .augment(marked(side, side), &mut Rng::at(&[]))
            .unwrap();
        assert_eq!(crop.pixel(0, 0)[0], first, "{side} to {size}");
    }
    for (side, size, before) in [(3, 4, 0), (2, 5, 1), (1, 6, 2)] {
        let crop = Pipeline::new(vec![Augment::CenterCrop(size)])
            .augment(marked(side, side), &mut Rng::at(&[]))
            .unwrap();
        assert_eq!(
            (0..size).position(|x| crop.pixel(x, before)[0] == 1),
            Some(before),
            "{side} to {size}"
        );
    }
}

#[test]
fn normalisation_is_by_channel() {
    let pipeline = Pipeline::plain().with_normalisation([0.0, 0.5, 1.0], [1.0, 0.5, 0.25]);
    let values = pipeline.normalise(&Picture {
        width: 2,
        height: 1,
        rgb: vec![255, 0, 255, 51, 255, 0],
    });
    let expected = [1.0, 0.2, -1.0, 1.0, 0.0, -4.0];
    assert!(
        values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6),
        "{values:?}"
    );
}

#[test]
fn drawn_shapes_differ_by_shape_only() {
    let shapes = Shapes::new(400, 24, 3);
    assert_eq!(shapes.classes().len(), 8);
    assert_eq!(shapes.picture(5).unwrap(), shapes.picture(5).unwrap());
    assert_ne!(
        shapes.picture(5).unwrap().0,
        Shapes::new(400, 24, 4).picture(5).unwrap().0
    );
    let mut by_class: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for index in 0..shapes.len() {
        let (picture, label) = shapes.picture(index).unwrap();
        let mean = picture.rgb.iter().map(|&b| f64::from(b)).sum::<f64>() / picture.rgb.len() as f64;
        by_class.entry(label).or_default().push(mean);
    }
    assert!(by_class.values().all(|means| means.len() == 50));
    // The colour of a picture says nothing about its class: class means lie within the spread of one class's
    // mean.
    let overall: Vec<f64> = by_class.values().map(|m| m.iter().sum::<f64>() / 50.0).collect();
    let centre = overall.iter().sum::<f64>() / 8.0;
    assert!(
        overall.iter().all(|mean| (mean - centre).abs() < 30.0),
        "{overall:?}"
    );

    // Noise-free pictures of one placement differ between every two classes.
    let two = |label: usize| {
        let shapes = Shapes::new(8, 32, 0).with_noise(0.0);
        shapes.picture(label).unwrap().0
    };
    assert_ne!(two(0), two(1));
    assert_eq!(
        Shapes::new(9, 8, 0).with_classes(3).classes(),
        ["circle", "square", "triangle"]
    );
}

#[test]
fn augmented_training_resumes_exactly() {
    let loader = || {
        let images = Images::new(Shapes::new(24, 16, 1), Pipeline::cifar_train());
        Loader::new(images, ImageBatcher, 5).with_seed(7)
    };
    let whole: Vec<ImageBatch> = loader().start().unwrap().take(9).map(Result::unwrap).collect();
    let mut first = loader().start().unwrap();
    first.by_ref().take(6).for_each(drop);
    let rest: Vec<ImageBatch> = loader()
        .resume(first.state())
        .unwrap()
        .take(3)
        .map(Result::unwrap)
        .collect();
    assert_eq!(rest, whole[6..]);
    assert_ne!(whole[0], whole[4], "another epoch, another augmentation");
}
