//! How fast a folder of images is decoded, augmented and put into batches, and what each part takes.
//!
//! ```text
//! cargo run --release -p kiln-hub --example image_loading -- FOLDER [THREADS]
//! ```
//! FOLDER has a folder of images for each class, as `kiln train` takes it. The parts are timed one after the
//! other on each of THREADS threads (default: every processor) at once, so that they share the machine as they
//! do in a loader.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use kiln_hub::data::{
    Dataset, ImageBatch, ImageBatcher, ImageFolder, ImageSource, Images, Loader, Pipeline, Rng,
};

const SIZE: usize = 224;
const BATCH: usize = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: image_loading FOLDER [THREADS]")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.next().map_or(Ok(cores), |threads| threads.parse())?;
    let source = ImageFolder::open(&folder)?;
    let pipeline = Pipeline::imagenet_train(SIZE);
    println!("{} images, {threads} threads", source.len());

    let each = |what: &str, work: &(dyn Fn(usize) + Sync)| {
        let count = source.len().min(512);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || (0..count).for_each(|i| work((i + thread * 31) % count)));
            }
        });
        let time = begun.elapsed().as_secs_f64() / count as f64;
        println!(
            "{what:<28} {:7.3} ms of a thread an image, {:6.0} images/s",
            time * 1e3,
            threads as f64 / time
        );
    };
    each("read", &|i| {
        black_box(std::fs::read(&source.files()[i].0).expect("an image can be read"));
    });
    each("read and decode", &|i| {
        black_box(source.picture(i).expect("an image can be read"));
    });
    let pictures: Vec<_> = (0..source.len().min(512))
        .map(|i| Ok(source.picture(i)?.0))
        .collect::<Result<_, Box<dyn Error>>>()?;
    each("augment", &|i| {
        let picture = pictures[i].clone();
        black_box(pipeline.augment(picture, &mut Rng::at(&[i as u64]))).expect("a size above 0");
    });
    let images = Images::new(source.clone(), pipeline.clone());
    let items: Vec<_> = (0..8)
        .map(|i| images.item(i % images.len(), &mut Rng::at(&[0])))
        .collect::<Result<_, _>>()?;
    let batch: Vec<_> = items.iter().cycle().take(BATCH).cloned().collect();
    each("collate", &|i| {
        if i % BATCH == 0 {
            black_box(ImageBatch::collate(batch.clone())).expect("pictures of one size");
        }
    });

    let loader = Loader::new(images, ImageBatcher, BATCH.min(source.len())).with_threads(threads);
    let mut batches = loader.start()?;
    for batch in batches.by_ref().take(4) {
        black_box(batch?);
    }
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed().as_secs() < 5 {
        let batch = batches.next().ok_or("a loader that repeats ends")??;
        count += batch.labels.len();
    }
    println!(
        "{:<28} {:>45.0} images/s",
        "the loader",
        count as f64 / begun.elapsed().as_secs_f64()
    );
    Ok(())
}
