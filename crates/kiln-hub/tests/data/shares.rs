//! Shares of ranks: together they are the batch that one rank would prepare, bit for bit, and no rank reads
//! what is in the share of another.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_hub::data::{Rng, *};
use kiln_hub::{BatchOptions, Padding, Tokenizer};
use proptest::prelude::*;

use crate::files::{png, write};

/// Examples of a batch of all ranks, and numbers of ranks that do and do not divide it.
const SIZE: usize = 6;
const RANKS: [usize; 5] = [1, 2, 3, 4, 6];

/// The batches of some epochs, each as its rows, and the position after each.
fn batches<D, C, R>(loader: &Loader<D, C>, rows: fn(C::Batch) -> Vec<R>) -> Vec<(Vec<R>, LoaderState)>
where
    D: Dataset,
    C: Collate<D::Item>,
{
    let mut found = Vec::new();
    let mut batches = loader.start().unwrap();
    while found.len() < 2 * loader.batches_per_epoch() + 1 {
        let Some(batch) = batches.next() else { break };
        found.push((rows(batch.unwrap()), batches.state()));
    }
    found
}

/// Compares the shares of ranks with whole batches, which `rows` divides into their rows, for several numbers
/// of ranks. Returns the batches.
fn shares_are_the_batch<D, C, R>(loader: Loader<D, C>, rows: fn(C::Batch) -> Vec<R>) -> Vec<Vec<R>>
where
    D: Dataset,
    C: Collate<D::Item>,
    R: PartialEq + Debug,
{
    let whole = batches(&loader, rows);
    assert!(whole.len() > 3, "more than one epoch");
    for ranks in RANKS {
        let of_rank = |rank: usize| {
            // Ranks may have different numbers of threads, or none.
            let loader = loader.clone().with_threads(1 + rank % 3).with_prefetch(rank % 2);
            batches(&loader.with_share(Share { rank, ranks }), rows).into_iter()
        };
        let mut shares: Vec<_> = (0..ranks).map(of_rank).collect();
        for (number, (whole, state)) in whole.iter().enumerate() {
            let mut together = Vec::new();
            for (rank, share) in shares.iter_mut().enumerate() {
                let (share, own) = share.next().expect("as many batches as on one rank");
                let from = whole.len() * rank / ranks;
                assert_eq!(
                    together.len(),
                    from,
                    "where the share of rank {rank} of {ranks} begins"
                );
                assert_eq!(own, *state, "the position of rank {rank} of {ranks}");
                together.extend(share);
            }
            assert!(
                together == *whole,
                "batch {number} of {ranks} ranks: {together:?} is not {whole:?}"
            );
        }
        assert!(shares.iter_mut().all(|share| share.next().is_none()));
    }
    whole.into_iter().map(|(rows, _)| rows).collect()
}

#[test]
fn of_windows_of_a_corpus() {
    let stream = TokenStream::from_tokens((0..700).map(|token| token * 31 % 257).collect());
    let windows = stream.windows(40, 0.0, 1.0).unwrap();
    let rows = |batch: WindowBatch| -> Vec<(Vec<i32>, Vec<i32>)> {
        let inputs = batch.inputs.chunks(batch.cols).map(<[_]>::to_vec);
        let targets = batch.targets.chunks(batch.cols).map(<[_]>::to_vec);
        let rows: Vec<_> = inputs.zip(targets).collect();
        assert_eq!(rows.len(), batch.rows);
        rows
    };
    shares_are_the_batch(Loader::new(windows, WindowBatcher, SIZE).with_seed(7), rows);
}

/// Texts of very different lengths.
fn texts(pairs: bool) -> TextExamples {
    let example = |number: usize| TextExample {
        text: "kiln ".repeat(1 + number * 5 % 7),
        pair: pairs.then(|| "clay ".repeat(1 + number * 3 % 5)),
        label: number % 3,
    };
    let classes = ["a", "b", "c"].map(String::from).to_vec();
    TextExamples::new((0..20).map(example).collect(), classes).unwrap()
}

fn text_loader(pairs: bool, padding: Padding) -> Loader<TextExamples, TextBatcher> {
    let options = BatchOptions::new().with_max_length(24).with_padding(padding);
    let encoder = Tokenizer::bytes().unwrap().batch_encoder(&options).unwrap();
    Loader::new(texts(pairs), TextBatcher::new(encoder), SIZE).with_seed(5)
}

/// Ids, mask, kinds and class of each text.
type TextRow = (Vec<i32>, Vec<i32>, Vec<i32>, i32);

fn text_rows(batch: TextBatch) -> Vec<TextRow> {
    let tokens = &batch.tokens;
    assert_eq!(tokens.rows, batch.labels.len());
    let row = |row: usize| {
        let of = |values: &[i32]| values[row * tokens.cols..][..tokens.cols].to_vec();
        let (ids, mask, kinds) = (of(&tokens.ids), of(&tokens.mask), of(&tokens.type_ids));
        (ids, mask, kinds, batch.labels[row])
    };
    (0..tokens.rows).map(row).collect()
}

#[test]
fn of_texts_of_one_length() {
    for pairs in [false, true] {
        let found = shares_are_the_batch(text_loader(pairs, Padding::Fixed(24)), text_rows);
        let lengths = found
            .concat()
            .into_iter()
            .map(|(_, mask, ..)| mask.iter().sum::<i32>());
        assert!(
            lengths.clone().min() < lengths.max(),
            "texts have lengths of their own"
        );
    }
}

/// Texts padded to the longest: the tokens are those of the whole batch, rows are as long as a share wants.
#[test]
fn of_texts_padded_to_the_longest() {
    let tokens_alone = |batch: TextBatch| -> Vec<(Vec<i32>, i32)> {
        let cols = batch.tokens.cols;
        let rows = text_rows(batch);
        let longest = rows.iter().map(|(_, mask, ..)| mask.iter().sum::<i32>());
        assert_eq!(longest.max(), Some(cols as i32));
        let row = |(ids, mask, _, label): TextRow| {
            let ids = ids.into_iter().zip(mask).filter(|&(_, mask)| mask == 1);
            (ids.map(|(id, _)| id).collect(), label)
        };
        rows.into_iter().map(row).collect()
    };
    shares_are_the_batch(text_loader(false, Padding::Longest), tokens_alone);
}

/// Size, bits of the pixels, and class of each picture.
fn image_rows(batch: ImageBatch) -> Vec<(usize, usize, Vec<u32>, i32)> {
    let each = 3 * batch.width * batch.height;
    let pictures = batch.pixels.chunks(each).zip(&batch.labels);
    let bits = |pixels: &[f32]| pixels.iter().map(|pixel| pixel.to_bits()).collect();
    pictures
        .map(|(pixels, label)| (batch.width, batch.height, bits(pixels), *label))
        .collect()
}

/// Pictures of two classes and many sizes: PNGs, and JPEGs that a device would decode.
fn folder(root: &Path) -> ImageFolder {
    for number in 0..14u32 {
        let colour = move |x: u32, y: u32| [(x * 9 + number) as u8, (y * 7) as u8, (number * 17) as u8];
        write(
            root,
            &format!("{}/{number:02}.png", ["cup", "pot"][number as usize % 2]),
            png(12 + number * 3, 30 - number, colour),
        );
    }
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/jpegs");
    for entry in std::fs::read_dir(fixtures).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("vase/{}", path.file_name().unwrap().to_string_lossy());
        write(root, &name, std::fs::read(path).unwrap());
    }
    ImageFolder::open(root).unwrap()
}

#[test]
fn of_augmented_images_of_a_folder() {
    let root = tempfile::tempdir().unwrap();
    let source = folder(root.path());
    let pipeline = Pipeline::imagenet_train(8);
    let images = Loader::new(Images::new(source.clone(), pipeline.clone()), ImageBatcher, SIZE);
    let found = shares_are_the_batch(images.with_seed(3), image_rows);
    let mut distinct = found.concat();
    distinct.sort();
    distinct.dedup();
    assert_eq!(
        distinct.len(),
        found.concat().len(),
        "each visit is augmented in its own way"
    );

    // As files and as bytes for a device.
    for decodes in [false, true] {
        let images = EncodedImages::new(source.clone(), pipeline.clone()).with_decoding(decodes);
        let loader = Loader::new(images, EncodedBatch::collate, SIZE).with_seed(3);
        let rows = |batch: EncodedBatch| -> Vec<_> {
            let all = (batch.normalisation, batch.width, batch.height);
            let pictures = batch.pictures.into_iter().zip(batch.labels);
            pictures.map(|picture| (all, picture)).collect()
        };
        let found = shares_are_the_batch(loader, rows).concat();
        let files = found
            .iter()
            .filter(|(_, ((picture, _), _))| matches!(picture, Encoded::Jpeg(..)));
        assert_eq!(files.count() > 0, !decodes);
    }
}

#[test]
fn of_cifar_and_of_drawn_shapes() {
    let root = tempfile::tempdir().unwrap();
    for part in 1..=5u8 {
        let record = |number: u8| {
            let pixels = (0..3072u32).map(move |at| (at * u32::from(number + part)) as u8);
            [vec![number % 10], pixels.collect()].concat()
        };
        let records: Vec<u8> = (0..4).flat_map(record).collect();
        write(root.path(), &format!("data_batch_{part}.bin"), records);
    }
    let cifar = Cifar::open(root.path(), CifarKind::Cifar10, true).unwrap();
    let cifar = Loader::new(Images::new(cifar, Pipeline::cifar_train()), ImageBatcher, SIZE);
    shares_are_the_batch(cifar.with_seed(11), image_rows);

    let steps = vec![
        Augment::RandomCrop { size: 12, padding: 2 },
        Augment::HorizontalFlip(0.5),
    ];
    let shapes = Images::new(Shapes::new(20, 12, 9), Pipeline::new(steps));
    // The last batch of an epoch is smaller: four examples of twenty.
    let shapes = Loader::new(shapes, ImageBatcher, SIZE + 2).with_drop_last(false);
    let shapes = shapes.with_seed(2).with_epochs(Some(2));
    let mut sizes = Vec::new();
    for ranks in [1, 2, 3, 4] {
        for rank in 0..ranks {
            let share = shapes.clone().with_share(Share { rank, ranks });
            sizes.push(
                batches(&share, image_rows)
                    .iter()
                    .map(|(rows, _)| rows.len())
                    .collect::<Vec<_>>(),
            );
        }
    }
    assert_eq!(sizes[0], [8, 8, 4, 8, 8, 4]);
    assert_eq!(sizes[1..3], [[4, 4, 2, 4, 4, 2], [4, 4, 2, 4, 4, 2]]);
    assert_eq!(
        sizes[3..6],
        [[2, 2, 1, 2, 2, 1], [3, 3, 1, 3, 3, 1], [3, 3, 2, 3, 3, 2]]
    );
    assert_eq!(sizes[6..], [[2, 2, 1, 2, 2, 1]; 4]);
}

/// Counts the examples that are read; each tells its number and the random number that it drew.
struct Counted {
    len: usize,
    read: Arc<AtomicUsize>,
}

impl Dataset for Counted {
    type Item = (usize, u64);

    fn len(&self) -> usize {
        self.len
    }

    fn item(&self, index: usize, rng: &mut Rng) -> Result<(usize, u64), DataError> {
        self.read.fetch_add(1, Ordering::SeqCst);
        Ok((index, rng.bits()))
    }
}

type Numbers = Vec<(usize, u64)>;

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]

    /// Ranks that stop after any batch and go on in another number see what one rank sees, with any settings
    /// of their loaders; and each reads its own share alone.
    #[test]
    fn of_ranks_that_go_on_in_another_number(
        batch in 1usize..9, more in 0usize..30, seed in any::<u64>(), drop_last: bool, shuffle: bool,
        stop in 0usize..9, before in 1usize..5, after in 1usize..5,
        prefetch in 0usize..3, threads in 1usize..4,
    ) {
        let len = batch + more;
        let read = Arc::new(AtomicUsize::new(0));
        let loader = Loader::new(Counted { len, read: read.clone() }, Ok as fn(Numbers) -> _, batch)
            .with_seed(seed)
            .with_drop_last(drop_last)
            .with_shuffle(shuffle)
            .with_threads(threads)
            .with_prefetch(0);
        let smallest = if drop_last || len % batch == 0 { batch } else { len % batch };
        let whole: Vec<Numbers> = loader.start().unwrap().take(18).map(Result::unwrap).collect();
        let mut found = vec![Numbers::new(); 18];
        let mut position = loader.start_state();
        for (ranks, places) in [(before, 0..stop), (after, stop..18)] {
            let start = position;
            for rank in 0..ranks {
                let share = loader.clone().with_share(Share { rank, ranks });
                if smallest < ranks {
                    prop_assert!(matches!(share.resume(start), Err(DataError::Setting(_))));
                    return Ok(());
                }
                read.store(0, Ordering::SeqCst);
                let mut batches = share.clone().resume(start).unwrap();
                let own: Vec<Numbers> = batches.by_ref().take(places.len()).map(Result::unwrap).collect();
                prop_assert_eq!(read.load(Ordering::SeqCst), own.concat().len());
                position = batches.state();
                // Threads that prepare ahead make the same.
                let ahead = share.with_prefetch(prefetch).resume(start).unwrap();
                prop_assert!(ahead.take(places.len()).map(Result::unwrap).eq(own.iter().cloned()));
                for (place, part) in places.clone().zip(own) {
                    found[place].extend(part);
                }
            }
        }
        prop_assert_eq!(found, whole);
    }
}

/// A picture that is damaged is an error of the rank that has it in its share. The others go on.
#[test]
fn a_damaged_picture_is_not_touched_by_other_ranks() {
    let root = tempfile::tempdir().unwrap();
    let source = folder(root.path());
    // The fourth of the second batch, in the order of the files.
    let damaged = source.files()[SIZE + 3].0.clone();
    std::fs::write(&damaged, "no picture").unwrap();
    for threads in [1, 3] {
        let images = Images::new(source.clone(), Pipeline::imagenet_train(8));
        let loader = Loader::new(images, ImageBatcher, SIZE)
            .with_shuffle(false)
            .with_threads(threads);
        for (ranks, unlucky) in [(1, 0), (2, 1), (3, 1), (6, 3)] {
            for rank in 0..ranks {
                let mut batches = loader.clone().with_share(Share { rank, ranks }).start().unwrap();
                let _first = batches.next().unwrap().unwrap();
                let second = batches.next().unwrap();
                if rank != unlucky {
                    assert_eq!(second.unwrap().labels.len(), SIZE / ranks);
                    assert!(batches.next().unwrap().is_ok());
                    continue;
                }
                let error = second.unwrap_err().to_string();
                assert!(error.contains(&damaged.display().to_string()), "{error}");
                assert!(batches.next().is_none());
            }
        }
    }
}

#[test]
fn each_rank_needs_an_example_of_each_batch() {
    let loader = |drop_last: bool| {
        let counted = Counted {
            len: 11,
            read: Arc::default(),
        };
        Loader::new(counted, Ok as fn(Numbers) -> _, 4).with_drop_last(drop_last)
    };
    let refused = |drop_last: bool, rank: usize, ranks: usize| {
        let started = loader(drop_last).with_share(Share { rank, ranks }).start();
        started.err().map(|error| error.to_string())
    };
    assert_eq!(refused(true, 3, 4), None);
    assert_eq!(refused(false, 2, 3), None);
    for (drop_last, ranks, said) in [
        (true, 5, "a batch of 4 examples"),
        (false, 4, "a batch of 3 examples"),
    ] {
        for rank in 0..ranks {
            let error = refused(drop_last, rank, ranks).unwrap();
            assert!(
                error.contains(said) && error.contains(&format!("{ranks} ranks")),
                "{error}"
            );
        }
    }
    for (rank, ranks) in [(2, 2), (0, 0)] {
        let error = refused(true, rank, ranks).unwrap();
        assert!(error.contains("counted from 0"), "{error}");
    }
}
