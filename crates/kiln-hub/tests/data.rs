//! Order, prefetch, resume, and what each kind of data means.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_flex::Flex;
use kiln_hub::data::{Rng, *};
use kiln_hub::{BatchOptions, Padding, Tokenizer};
use proptest::prelude::*;

/// Numbers as examples: the item tells its index and the random number that it drew.
struct Numbers {
    len: usize,
    fail_at: Option<usize>,
    panic_at: Option<usize>,
    made: Arc<AtomicUsize>,
}

impl Numbers {
    fn new(len: usize) -> Self {
        Self {
            len,
            fail_at: None,
            panic_at: None,
            made: Arc::default(),
        }
    }
}

impl Dataset for Numbers {
    type Item = (usize, u64);

    fn len(&self) -> usize {
        self.len
    }

    fn item(&self, index: usize, rng: &mut Rng) -> Result<(usize, u64), DataError> {
        self.made.fetch_add(1, Ordering::SeqCst);
        assert_ne!(Some(index), self.panic_at, "item {index} panics");
        match self.fail_at {
            Some(at) if at == index => Err(DataError::Setting("asked to fail".into())),
            _ => Ok((index, rng.bits())),
        }
    }
}

type Batch = Vec<(usize, u64)>;
type AsTheyAre = fn(Batch) -> Result<Batch, DataError>;

fn numbers(len: usize, size: usize) -> Loader<Numbers, AsTheyAre> {
    Loader::new(Numbers::new(len), Ok as AsTheyAre, size)
}

fn take(batches: &mut Batches<Batch>, n: usize) -> Vec<Batch> {
    batches.by_ref().take(n).map(Result::unwrap).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]

    /// An epoch visits each example once; the same seed gives the same batches with any prefetch; a run
    /// resumed after any batch, through its serialized state, continues exactly.
    #[test]
    fn order_and_resume(
        len in 1usize..40, size in 1usize..9, seed in any::<u64>(), drop_last: bool, shuffle: bool,
        stop in 0usize..20, prefetch in 0usize..4,
    ) {
        let loader = numbers(len, size).with_seed(seed).with_drop_last(drop_last).with_shuffle(shuffle);
        if drop_last && len < size {
            prop_assert!(loader.start().is_err());
            return Ok(());
        }
        let per_epoch = loader.batches_per_epoch();
        let total = 3 * per_epoch.max(8);
        let whole = take(&mut loader.clone().with_prefetch(0).start().unwrap(), total);
        let epoch: Vec<usize> = whole[..per_epoch].iter().flatten().map(|(i, _)| *i).collect();
        let distinct: BTreeSet<usize> = epoch.iter().copied().collect();
        prop_assert_eq!(distinct.len(), epoch.len());
        prop_assert_eq!(epoch.len(), if drop_last { len / size * size } else { len });
        if !shuffle {
            prop_assert!(epoch.is_sorted());
        }

        let mut first = loader.clone().with_prefetch(prefetch).start().unwrap();
        let mut got = take(&mut first, stop);
        let saved: LoaderState = serde_json::from_str(&serde_json::to_string(&first.state()).unwrap()).unwrap();
        drop(first);
        let mut second = loader.with_prefetch(prefetch).resume(saved).unwrap();
        got.extend(take(&mut second, total - stop.min(total)));
        prop_assert_eq!(&got[..total], &whole[..]);
    }
}

#[test]
fn epochs_differ_and_draws_differ() {
    let loader = numbers(64, 64);
    let epochs = take(&mut loader.start().unwrap(), 3);
    let order = |batch: &Batch| batch.iter().map(|(i, _)| *i).collect::<Vec<_>>();
    assert_ne!(order(&epochs[0]), order(&epochs[1]));
    assert_ne!(order(&epochs[1]), order(&epochs[2]));
    let draws: BTreeSet<u64> = epochs.iter().flatten().map(|(_, draw)| *draw).collect();
    assert_eq!(
        draws.len(),
        3 * 64,
        "every visit of every example draws its own numbers"
    );
    let other = take(&mut numbers(64, 64).with_seed(1).start().unwrap(), 1);
    assert_ne!(order(&other[0]), order(&epochs[0]));
}

#[test]
fn evaluation_sees_everything_once_in_order() {
    let collate = Ok as AsTheyAre;
    let mut batches = Loader::evaluation(Numbers::new(10), collate, 4).start().unwrap();
    assert_eq!(batches.remaining(), Some(3));
    let all = take(&mut batches, 10);
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 2]);
    assert!(all.iter().flatten().map(|(i, _)| *i).eq(0..10));
    assert!(batches.next().is_none());
    assert_eq!(batches.remaining(), Some(0));
}

#[test]
fn prefetch_is_bounded_and_dropping_stops_it() {
    let dataset = Numbers::new(1000);
    let made = dataset.made.clone();
    let loader = Loader::new(dataset, Ok as AsTheyAre, 10).with_prefetch(2);
    let mut batches = loader.start().unwrap();
    take(&mut batches, 1);
    drop(batches);
    let after = made.load(Ordering::SeqCst);
    // One taken, two in the channel, one in the hand of the thread, and one started when that one left.
    assert!((10..=50).contains(&after), "{after}");
}

#[test]
fn failures_reach_the_consumer_and_end_the_run() {
    for (prefetch, threads) in [(0, 1), (2, 1), (2, 3)] {
        let failing = Numbers {
            fail_at: Some(5),
            ..Numbers::new(8)
        };
        let loader = Loader::new(failing, Ok as AsTheyAre, 2).with_shuffle(false);
        let loader = loader.with_threads(threads).with_prefetch(prefetch);
        let mut batches = loader.start().unwrap();
        assert_eq!(take(&mut batches, 2).len(), 2);
        assert!(matches!(batches.next(), Some(Err(DataError::Setting(_)))));
        assert!(batches.next().is_none());
        assert_eq!(batches.state().batch, 2, "the failed batch does not count");
    }
    for threads in [1, 3] {
        let panicking = Numbers {
            panic_at: Some(3),
            ..Numbers::new(8)
        };
        let loader = Loader::new(panicking, Ok as AsTheyAre, 2).with_shuffle(false);
        let mut batches = loader.with_threads(threads).start().unwrap();
        assert!(batches.next().unwrap().is_ok());
        let error = batches.next().unwrap().unwrap_err();
        assert!(
            matches!(&error, DataError::Worker(text) if text.contains("item 3 panics")),
            "{error}"
        );
        assert!(batches.next().is_none());
    }
}

#[test]
fn several_threads_make_the_batches_of_one() {
    let batches = |threads| {
        let loader = Loader::new(Numbers::new(50), Ok as AsTheyAre, 7).with_seed(3);
        take(&mut loader.with_threads(threads).start().unwrap(), 20)
    };
    let one = batches(1);
    assert_eq!(one.len(), 20);
    for threads in [0, 2, 5] {
        assert_eq!(batches(threads), one, "{threads} threads");
    }
}

#[test]
fn a_position_in_other_data_is_refused() {
    let loader = numbers(20, 4);
    let good = loader.start_state();
    let bad = [
        LoaderState { seed: 9, ..good },
        LoaderState { examples: 21, ..good },
        LoaderState {
            batch_size: 5,
            ..good
        },
        LoaderState { batch: 6, ..good },
    ];
    for state in bad {
        assert!(
            matches!(loader.resume(state), Err(DataError::Resume { .. })),
            "{state:?}"
        );
    }
    assert!(
        loader.resume(LoaderState { batch: 5, ..good }).is_ok(),
        "the end of an epoch is a position"
    );
    assert!(matches!(numbers(0, 4).start(), Err(DataError::Setting(_))));
    assert!(matches!(numbers(4, 0).start(), Err(DataError::Setting(_))));
}

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_corpus_is_what_a_person_wrote_in_a_fixed_order() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for (name, text) in [
        ("b.md", "second"),
        ("a/x.rs", "first"),
        ("target/skip.rs", "no"),
        (".git/skip.md", "no"),
        ("c.bin", "no"),
        ("d.txt", "  \n"),
        ("z.TXT", "third"),
        ("runs/log.md", "no"),
    ] {
        write(root, name, text);
    }
    write(root, "binary.txt", [0xff, 0xfe, 0x00]);
    #[cfg(unix)]
    std::os::unix::fs::symlink(root, root.join("loop")).unwrap();
    let corpus = Corpus::read(&[root], &CorpusOptions::default()).unwrap();
    assert_eq!(corpus.texts().collect::<Vec<_>>(), ["first", "second", "third"]);
    let small = CorpusOptions {
        max_file_bytes: 5,
        ..Default::default()
    };
    assert_eq!(
        Corpus::read(&[root], &small).unwrap().texts().collect::<Vec<_>>(),
        ["first", "third"]
    );
    let binary = root.join("binary.txt");
    assert!(matches!(
        Corpus::read(&[&binary], &CorpusOptions::default()),
        Err(DataError::Format { .. })
    ));
    assert!(matches!(
        Corpus::read(&[root.join("none")], &CorpusOptions::default()),
        Err(DataError::Io { .. })
    ));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        Corpus::read(&[empty.path()], &CorpusOptions::default()),
        Err(DataError::Empty { .. })
    ));
}

#[test]
fn the_repository_is_a_corpus() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = Corpus::read(&[root], &CorpusOptions::default()).unwrap();
    assert!(
        corpus
            .documents()
            .iter()
            .any(|d| d.path.ends_with("src/data/corpus.rs"))
    );
    let tokenizer = Tokenizer::train_bpe(corpus.texts(), 512).unwrap();
    let stream = TokenStream::encode(&corpus, &tokenizer).unwrap();
    assert!(
        stream.len() * 3 / 2 < corpus.num_bytes(),
        "{} of {}",
        stream.len(),
        corpus.num_bytes()
    );
    assert!((stream.max_token() as usize) < tokenizer.vocabulary());
    let decoded = tokenizer.decode(&stream.read(0..stream.len()), true).unwrap();
    assert!(
        decoded == corpus.texts().collect::<String>(),
        "every byte comes back"
    );
}

#[test]
fn windows_cover_the_stream_and_targets_are_the_next_tokens() {
    let corpus = Corpus::from_texts(["abc", "defgh"]);
    let stream = TokenStream::encode(&corpus, &Tokenizer::bytes().unwrap()).unwrap();
    assert_eq!(
        stream.read(0..99),
        [97, 98, 99, 256, 100, 101, 102, 103, 104, 256]
    );
    let windows = stream.windows(3, 0.0, 1.0).unwrap();
    assert_eq!(windows.len(), 3);
    let loader = Loader::evaluation(windows, WindowBatcher, 3);
    let batch = loader.start().unwrap().next().unwrap().unwrap();
    assert_eq!(batch.inputs, [97, 98, 99, 256, 100, 101, 102, 103, 104]);
    assert_eq!(batch.targets, [98, 99, 256, 100, 101, 102, 103, 104, 256]);
    let (inputs, targets) = batch.tensors::<Flex>(&Default::default());
    assert_eq!((inputs.dims(), targets.dims()), ([3, 3], [3, 3]));
    let (train, rest) = (
        stream.windows(1, 0.0, 0.5).unwrap(),
        stream.windows(1, 0.5, 1.0).unwrap(),
    );
    assert_eq!((train.len(), rest.len()), (4, 4));
    assert_eq!(rest.item(0, &mut Rng::at(&[])).unwrap(), [101, 102]);
    assert!(matches!(
        stream.windows(10, 0.0, 1.0),
        Err(DataError::Empty { .. })
    ));
    assert!(stream.windows(9, 0.0, 1.0).is_ok());
    assert!(stream.windows(0, 0.0, 1.0).is_err());
    assert!(stream.windows(2, 0.9, 0.1).is_err());
    assert!(matches!(
        train.item(4, &mut Rng::at(&[])),
        Err(DataError::OutOfRange { .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_saved_stream_reads_back(
        tokens in prop_oneof![
            prop::collection::vec(0u32..65536, 0..50),
            prop::collection::vec(any::<u32>(), 0..50),
        ],
        from in 0usize..60, to in 0usize..60,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let stream = TokenStream::from_tokens(tokens.clone());
        stream.save(&path).unwrap();
        let mapped = TokenStream::open(&path).unwrap();
        prop_assert_eq!(mapped.read(0..tokens.len()), tokens.clone());
        prop_assert_eq!(mapped.read(from..to), stream.read(from..to));
        prop_assert_eq!(mapped.max_token(), stream.max_token());
    }

    #[test]
    fn damaged_data_files_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
        which in 0usize..5,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = match which {
            0 => {
                let path = folder.path().join("x");
                TokenStream::from_tokens((0..20).collect()).save(&path).unwrap();
                std::fs::read(path).unwrap()
            }
            1 => [vec![3u8; 3073], vec![9; 3073]].concat(),
            2 => png(4, 3, |x, y| [x as u8, y as u8, 7]),
            3 => b"{\"text\": \"a\", \"label\": 1}\n{\"text\": \"b\", \"label\": \"x\"}\n".to_vec(),
            _ => b"text,label\n\"a, \"\"b\"\"\",1\nc,2\n".to_vec(),
        };
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = write(folder.path(), "test_batch.bin", &bytes);
        match which {
            0 => { let _ = TokenStream::open(&path).map(|stream| stream.read(0..stream.len())); }
            1 => { let _ = Cifar::open(folder.path(), CifarKind::Cifar10, false).map(|c| c.picture(0)); }
            2 => { let _ = Picture::open(&path); }
            3 => { let _ = TextExamples::from_jsonl(&path, &TextFields::default()); }
            _ => { let _ = TextExamples::from_csv(&path, &TextFields::default()); }
        }
    }
}

#[test]
fn tables_of_labelled_texts() {
    let folder = tempfile::tempdir().unwrap();
    let jsonl = write(
        folder.path(),
        "a.jsonl",
        "{\"text\": \"good\", \"label\": 10, \"other\": [1]}\n\n{\"text\": \"bad \\u00e9\", \"label\": 2}\n",
    );
    let csv = write(
        folder.path(),
        "a.csv",
        "\u{feff}text,label\n\"good\",10\n\"bad é\",2\n",
    );
    let from_jsonl = TextExamples::from_jsonl(&jsonl, &TextFields::default()).unwrap();
    assert_eq!(
        from_jsonl,
        TextExamples::from_csv(&csv, &TextFields::default()).unwrap()
    );
    assert_eq!(from_jsonl.classes(), ["2", "10"], "integers are ordered by value");
    assert_eq!(
        from_jsonl.examples()[0],
        TextExample {
            text: "good".into(),
            pair: None,
            label: 1
        }
    );

    let pairs = write(
        folder.path(),
        "p.csv",
        "q,p,y\nwho,\"a, \"\"b\"\"\nc\",no\nwhat,d,yes\n",
    );
    let fields = TextFields::new("q", "y").with_pair("p");
    let examples = TextExamples::from_csv(&pairs, &fields).unwrap();
    assert_eq!(examples.examples()[0].pair.as_deref(), Some("a, \"b\"\nc"));
    assert_eq!(examples.classes(), ["no", "yes"]);
    let flipped = TextExamples::from_csv(&pairs, &fields.clone().with_classes(["yes", "no"])).unwrap();
    assert_eq!(flipped.examples()[0].label, 1);

    let error = |result: Result<TextExamples, DataError>| result.unwrap_err().to_string();
    let unknown = error(TextExamples::from_csv(&pairs, &fields.with_classes(["yes"])));
    assert!(
        unknown.contains("line 2") && unknown.contains("`no`"),
        "{unknown}"
    );
    let column = error(TextExamples::from_csv(&pairs, &TextFields::default()));
    assert!(column.contains("`text`") && column.contains("`q`"), "{column}");
    let ragged = write(folder.path(), "r.csv", "text,label\na,1\nb\n");
    assert!(error(TextExamples::from_csv(&ragged, &TextFields::default())).contains("line 3"));
    let broken = write(
        folder.path(),
        "b.jsonl",
        "{\"text\": \"a\", \"label\": 1}\n{\"text\": }\n",
    );
    assert!(error(TextExamples::from_jsonl(&broken, &TextFields::default())).contains("line 2"));
    let typed = write(folder.path(), "t.jsonl", "{\"text\": [1], \"label\": 1}\n");
    assert!(error(TextExamples::from_jsonl(&typed, &TextFields::default())).contains("`text`"));
    let empty = write(folder.path(), "e.jsonl", "\n");
    assert!(matches!(
        TextExamples::from_jsonl(&empty, &TextFields::default()),
        Err(DataError::Empty { .. })
    ));
}

#[test]
fn labelled_texts_become_batches() {
    let examples = ["abc", "d", "ef"]
        .iter()
        .enumerate()
        .map(|(i, text)| TextExample {
            text: text.to_string(),
            pair: None,
            label: i % 2,
        });
    let examples = TextExamples::new(examples.collect(), vec!["even".into(), "odd".into()]).unwrap();
    let options = BatchOptions::new()
        .with_padding(Padding::Fixed(4))
        .with_max_length(4);
    let batcher = TextBatcher::new(Tokenizer::bytes().unwrap().batch_encoder(&options).unwrap());
    let batch = Loader::evaluation(examples, batcher, 3)
        .start()
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    assert_eq!(batch.labels, [0, 1, 0]);
    assert_eq!(batch.tokens.mask, [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0]);
    assert_eq!(batch.labels_tensor::<Flex>(&Default::default()).dims(), [3]);
    assert!(
        TextExamples::new(
            vec![TextExample {
                text: "a".into(),
                pair: None,
                label: 2
            }],
            vec![]
        )
        .is_err()
    );
}

fn png(width: u32, height: u32, colour: impl Fn(u32, u32) -> [u8; 3]) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let picture = image::RgbImage::from_fn(width, height, |x, y| image::Rgb(colour(x, y)));
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// A label that is no class stops the data, with the example's number.
#[test]
fn labels_are_classes() {
    struct Wrong(Vec<String>);
    impl ImageSource for Wrong {
        fn len(&self) -> usize {
            4
        }
        fn picture(&self, index: usize) -> Result<(Picture, usize), DataError> {
            Ok((Picture::filled(2, 2, [0; 3]), index))
        }
        fn classes(&self) -> &[String] {
            &self.0
        }
    }
    let example = |label| TextExample {
        text: "a".into(),
        pair: None,
        label,
    };
    let classes: Vec<String> = ["x", "y", "z"].map(String::from).to_vec();
    assert!(TextExamples::new(vec![example(2)], classes.clone()).is_ok());
    let error = TextExamples::new(vec![example(0), example(3)], classes.clone()).unwrap_err();
    assert!(
        matches!(
            error,
            DataError::Label {
                label: 3,
                classes: 3,
                ..
            }
        ),
        "{error:?}"
    );
    assert!(error.to_string().contains("text 1 has label 3"), "{error}");

    let images = Images::new(Wrong(classes.clone()), Pipeline::plain());
    assert!(images.item(2, &mut Rng::at(&[0])).is_ok());
    let error = images.item(3, &mut Rng::at(&[0])).unwrap_err().to_string();
    assert!(error.contains("image 3 has label 3"), "{error}");

    // A folder for evaluation that lacks a class has the labels of the training all the same.
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "y/0.png", png(2, 2, |_, _| [0; 3]));
    let source = ImageFolder::open_as(folder.path(), classes).unwrap();
    assert_eq!(source.files()[0].1, 1);
    let error = ImageFolder::open_as(folder.path(), vec!["x".into()])
        .unwrap_err()
        .to_string();
    assert!(error.contains("`y`"), "{error}");
}

/// A pair that is too long is cut as transformers cuts it: the longer text loses first, and of an odd length
/// the text that was longer keeps one token more (the second, if both were equally long).
#[test]
fn pairs_are_cut_as_transformers_cuts_them() {
    let tokenizer = Tokenizer::bytes().unwrap();
    let cut = |first: usize, second: usize, length: usize| {
        let options = BatchOptions::new().with_max_length(length);
        let encoder = tokenizer.batch_encoder(&options).unwrap();
        let pair = ("a".repeat(first), "b".repeat(second));
        let batch = encoder.encode_pairs(&[pair]).unwrap();
        let count = |byte: u8| batch.ids.iter().filter(|id| **id == i32::from(byte)).count();
        (count(b'a'), count(b'b'))
    };
    assert_eq!(cut(60, 40, 29), (15, 14));
    assert_eq!(cut(40, 60, 29), (14, 15));
    assert_eq!(cut(40, 40, 29), (14, 15));
    assert_eq!(cut(60, 20, 29), (15, 14));
    assert_eq!(cut(60, 20, 5), (3, 2));
    assert_eq!(cut(60, 2, 29), (27, 2));
    assert_eq!(cut(2, 60, 29), (2, 27));
    assert_eq!(cut(60, 40, 30), (15, 15));
    assert_eq!(cut(60, 40, 1), (1, 0));
}

/// A table of embeddings has a row for the largest id, whatever ids are left out below it.
#[test]
fn a_vocabulary_with_gaps_counts_them() {
    let text =
        r#"{"version": "1.0", "model": {"type": "WordLevel", "unk_token": "u", "vocab": {"u": 0, "a": 7}}}"#;
    assert_eq!(Tokenizer::from_bytes(text.as_bytes()).unwrap().vocabulary(), 8);
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

/// A batch that is not taken keeps the threads from beginning ever more.
#[test]
fn several_threads_stop_when_enough_is_prepared() {
    let dataset = Numbers::new(1000);
    let made = dataset.made.clone();
    let loader = Loader::new(dataset, Ok as AsTheyAre, 10)
        .with_prefetch(2)
        .with_threads(4);
    let mut batches = loader.start().unwrap();
    take(&mut batches, 3);
    drop(batches);
    let after = made.load(Ordering::SeqCst);
    // Three taken, and four open: two ahead, one in the making, and the one that free threads begin
    // meanwhile.
    assert!((30..=70).contains(&after), "{after}");
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
