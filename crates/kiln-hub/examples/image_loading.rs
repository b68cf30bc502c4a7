//! How fast the host loads a folder of images: what reading, decoding and augmenting take of a thread, and
//! what a loader gives as floats (for a step on a CPU), as bytes (for a GPU that normalises them) and as
//! files (for one with engines for JPEGs).
//!
//! ```text
//! cargo run --release -p kiln-hub --example image_loading -- FOLDER [THREADS]
//! ```
//! FOLDER has a folder of images for each class, as `kiln train` takes it. THREADS (all processors, unless
//! given) work at once, so that they share the machine as they do in a loader.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use kiln_hub::data::{
    Collate, DataError, Dataset, EncodedBatch, EncodedImages, ImageBatcher, ImageFolder, ImageSource, Images,
    Loader, Pipeline, Rng,
};

// Pixels a side, and pictures a batch.
const SIZE: usize = 224;
const BATCH: usize = 128;
/// Pictures that the parts are timed with.
const SOME: usize = 512;
/// How long a loader is watched.
const WATCHED: Duration = Duration::from_secs(3);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: image_loading FOLDER [THREADS]")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.next().map_or(Ok(cores), |threads| threads.parse())?;
    let source = ImageFolder::open(&folder)?;
    let pipeline = Pipeline::imagenet_train(SIZE);
    let count = source.len().min(SOME);
    println!("{} images, {threads} threads", source.len());

    let each = |what: &str, work: &(dyn Fn(usize) + Sync)| {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || (0..count).for_each(|i| work((i + thread * 31) % count)));
            }
        });
        let time = begun.elapsed().as_secs_f64() / count as f64;
        let rate = threads as f64 / time;
        println!(
            "{what:<20} {rate:7.0} images/s, {:6.3} ms of a thread an image",
            time * 1e3
        );
    };
    each("read", &|i| {
        black_box(std::fs::read(&source.files()[i].0)).expect("an image can be read");
    });
    each("read, decode", &|i| {
        black_box(source.picture(i)).expect("an image can be read");
    });
    let images = Images::new(source.clone(), pipeline.clone());
    each("read, decode, augment", &|i| {
        black_box(images.item(i, &mut Rng::at(&[i as u64]))).expect("an image can be augmented");
    });

    let encoded = EncodedImages::new(source, pipeline);
    let bytes = encoded.clone().with_decoding(true);
    watch("loader of floats", images, ImageBatcher, threads)?;
    watch("loader of bytes", bytes, EncodedBatch::collate, threads)?;
    watch("loader of files", encoded, EncodedBatch::collate, threads)
}

/// Counts the pictures of a loader.
fn watch<D, C>(what: &str, dataset: D, collate: C, threads: usize) -> Result<(), Box<dyn Error>>
where
    D: Dataset,
    C: Collate<D::Item>,
{
    let size = BATCH.min(dataset.len());
    let batches = Loader::new(dataset, collate, size)
        .with_threads(threads)
        .start()?;
    // What was prepared ahead does not count.
    let mut batches = batches.skip(4);
    let mut next = || {
        batches
            .next()
            .unwrap_or_else(|| Err(DataError::Setting("a loader ended".to_owned())))
    };
    black_box(next()?);
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < WATCHED {
        black_box(next()?);
        count += size;
    }
    println!(
        "{what:<20} {:7.0} images/s",
        count as f64 / begun.elapsed().as_secs_f64()
    );
    Ok(())
}
