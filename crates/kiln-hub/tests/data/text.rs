//! Corpora, streams of tokens, and labelled texts.

use std::path::Path;

use burn_flex::Flex;
use kiln_hub::data::{Rng, *};
use kiln_hub::{BatchOptions, Padding, Tokenizer};

use crate::files::{png, write};

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

#[cfg(unix)]
#[test]
fn what_links_lead_to_is_part_of_a_corpus_and_what_is_missing_is_counted() {
    use std::os::unix::fs::symlink;

    let [folder, elsewhere] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (root, far) = (folder.path(), elsewhere.path());
    write(root, "a.txt", "here");
    write(far, "texts/b.txt", "there");
    write(far, "texts/deep/c.txt", "deeper");
    write(far, "single.txt", "alone");
    symlink(far.join("texts"), root.join("m")).unwrap();
    symlink(far.join("single.txt"), root.join("z.txt")).unwrap();
    // To itself, to what another link leads to, and to nothing.
    symlink(root, far.join("texts/deep/round")).unwrap();
    symlink(far.join("texts/deep"), root.join("n")).unwrap();
    symlink(far.join("gone"), root.join("gone")).unwrap();
    let corpus = Corpus::read(&[root], &CorpusOptions::default()).unwrap();
    assert_eq!(
        corpus.texts().collect::<Vec<_>>(),
        ["here", "there", "deeper", "alone"]
    );
    let dangling = LeftOut {
        dangling: 1,
        ..LeftOut::default()
    };
    assert_eq!(corpus.left_out(), dangling);

    write(far, "large/only.txt", "much too large");
    write(far, "large/other.txt", [0xff, 0xfe]);
    let options = CorpusOptions {
        max_file_bytes: 5,
        ..Default::default()
    };
    let error = Corpus::read(&[far.join("large")], &options)
        .unwrap_err()
        .to_string();
    for part in [
        "at most 5 bytes",
        "links followed",
        "files too large: 1 (14 bytes)",
        "files not UTF-8: 1 (2 bytes)",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
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

/// A row without a label is no class of its own, and a byte order mark no part of a table.
#[test]
fn tables_as_editors_write_them() {
    let folder = tempfile::tempdir().unwrap();
    let fields = TextFields::default();
    let unlabelled = write(folder.path(), "a.csv", "text,label\nx,1\ny, \n");
    let error = TextExamples::from_csv(&unlabelled, &fields)
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 3") && error.contains("`label`"), "{error}");
    let rows = "{\"text\": \"x\", \"label\": 1}\n{\"text\": \"y\", \"label\": 0}\n";
    let plain = write(folder.path(), "plain.jsonl", rows);
    let marked = write(folder.path(), "marked.jsonl", format!("\u{feff}{rows}"));
    let read = |path| TextExamples::from_jsonl(path, &fields).unwrap();
    assert_eq!(read(&marked), read(&plain));
}

/// A saved position tells data from other data of the same length. It goes on in both, after a warning.
#[test]
fn a_saved_position_tells_other_contents() {
    fn differ<D: Dataset>(one: D, other: D) {
        let collate = |items: Vec<D::Item>| Ok(items.len());
        let (one, other) = (Loader::new(one, collate, 1), Loader::new(other, collate, 1));
        let state = one.start_state();
        assert_eq!(one.resume(state).unwrap().state(), state);
        let now = other.resume(state).unwrap().state();
        assert_ne!(now.contents, state.contents);
        assert_eq!(
            now,
            other.start_state(),
            "the next position is one in the data that is there"
        );
        // Positions that were saved before contents were told apart.
        assert_eq!(
            one.resume(LoaderState { contents: 0, ..state }).unwrap().state(),
            state
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let table = |name: &str, rows: &str| {
        let path = write(folder.path(), name, format!("text,label\n{rows}"));
        TextExamples::from_csv(path, &TextFields::default()).unwrap()
    };
    differ(table("a.csv", "x,1\ny,0\n"), table("b.csv", "y,0\nx,1\n"));
    let windows = |text: &str| {
        let corpus = Corpus::from_texts([text]);
        let stream = TokenStream::encode(&corpus, &Tokenizer::bytes().unwrap()).unwrap();
        stream.windows(4, 0.0, 1.0).unwrap()
    };
    differ(windows("one text of letters"), windows("one text of Letters"));
    let pictures = |root: &str, names: [&str; 2]| {
        for name in names {
            write(&folder.path().join(root), name, "not read");
        }
        let source = ImageFolder::open(folder.path().join(root)).unwrap();
        Images::new(source, Pipeline::imagenet_train(16))
    };
    differ(
        pictures("one", ["a/1.png", "b/2.png"]),
        pictures("other", ["a/1.png", "b/3.png"]),
    );
}
