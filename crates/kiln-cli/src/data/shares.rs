//! Tests: whatever the source, a rank prepares what it would take of a whole batch.

use std::fmt::Write as _;
use std::path::Path;

use kiln::KilnDevice;
use kiln_hub::TokenBatch;
use kiln_hub::data::{EncodedBatch, ImageBatch, Share, TextBatch, WindowBatch};

use super::{Data, HeldOut, HostBatch};
use crate::config::Config;

impl HostBatch {
    /// Examples `rank * n / size` to `(rank + 1) * n / size` of its `n`.
    pub(super) fn share(self, rank: usize, size: usize) -> Self {
        fn part<T: Copy>(all: &[T], rank: usize, size: usize) -> Vec<T> {
            all[all.len() * rank / size..all.len() * (rank + 1) / size].to_vec()
        }
        match self {
            Self::Windows(batch) => Self::Windows(WindowBatch {
                rows: batch.rows / size,
                cols: batch.cols,
                inputs: part(&batch.inputs, rank, size),
                targets: part(&batch.targets, rank, size),
            }),
            Self::Texts(batch) => Self::Texts(TextBatch {
                labels: part(&batch.labels, rank, size),
                tokens: TokenBatch {
                    rows: batch.tokens.rows / size,
                    cols: batch.tokens.cols,
                    ids: part(&batch.tokens.ids, rank, size),
                    mask: part(&batch.tokens.mask, rank, size),
                    type_ids: part(&batch.tokens.type_ids, rank, size),
                },
            }),
            Self::Images(batch) => Self::Images(ImageBatch {
                pixels: part(&batch.pixels, rank, size),
                labels: part(&batch.labels, rank, size),
                ..batch
            }),
            Self::Encoded(mut batch) => Self::Encoded(EncodedBatch {
                labels: part(&batch.labels, rank, size),
                pictures: {
                    let all = batch.pictures.len();
                    batch.pictures.truncate(all * (rank + 1) / size);
                    batch.pictures.split_off(all * rank / size)
                },
                ..batch
            }),
        }
    }
}

/// Examples of all ranks.
const BATCH: usize = 12;

/// Compares ranks' own batches over more than an epoch, and after a resume within it, with the parts of whole
/// ones, on a device. `root` has the paths of the config. Returns the first of the whole batches.
fn ranks_prepare_their_parts(root: &Path, config: &str, device: KilnDevice) -> HostBatch {
    let text = format!("{config}\n[train]\nbatch_size = {BATCH}\n");
    let text = text.replace("ROOT", &root.display().to_string());
    let parsed = Config::parse(&text, "x.toml", &["seed=5".to_owned()]).unwrap();
    let prepared = tempfile::tempdir().unwrap();
    let open = || Data::open(&parsed, &device, prepared.path(), None, HeldOut::Random).unwrap();
    let whole = open();
    let mut batches = whole.train(None).unwrap();
    let expected: Vec<_> = (0..6)
        .map(|_| (batches.next().unwrap().unwrap(), batches.state()))
        .collect();
    assert!(
        expected.iter().any(|(_, state)| state.epoch > 0),
        "{config}: more than an epoch"
    );
    assert!(expected.iter().all(|(batch, _)| batch.rows() == BATCH));
    let evaluated = |data: &Data| -> Option<Vec<HostBatch>> {
        let batches = data.evaluation().unwrap()?;
        Some(batches.map(Result::unwrap).collect())
    };
    for ranks in [1, 2, 3, 6] {
        for rank in 0..ranks {
            let own = open().with_share(Share { rank, ranks });
            for start in [0usize, 2] {
                let state = start.checked_sub(1).map(|before| expected[before].1);
                let mut batches = own.train(state).unwrap();
                for (number, (whole, state)) in expected.iter().enumerate().skip(start) {
                    let part = batches.next().unwrap().unwrap();
                    assert_eq!(part.rows() * ranks, BATCH);
                    assert_eq!(part.units() * ranks, whole.units());
                    assert!(
                        part == whole.clone().share(rank, ranks),
                        "{config}: batch {number} of rank {rank} of {ranks}"
                    );
                    assert_eq!(batches.state(), *state);
                }
            }
            assert!(evaluated(&own) == evaluated(&whole), "every rank evaluates all");
        }
    }
    expected.into_iter().next().unwrap().0
}

#[test]
fn of_texts() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let line =
        |kind: &str, line: usize| format!("{kind} {line}: the kiln fires clay number {}\n", line * 7 % 13);
    for kind in ["md", "rs"] {
        let text: String = (0..260).map(|number| line(kind, number)).collect();
        std::fs::write(root.join(format!("text.{kind}")), text).unwrap();
    }
    let cpu = KilnDevice::cpu();
    let config = |rest: &str| format!("[model]\nname = \"llama-tiny\"\n[data]\nvocabulary = 300\n{rest}");
    let text = "source = \"text\"\npaths = [\"ROOT/text.md\"]\ntokenizer = \"bytes\"\nlength = 200\n";
    let first = ranks_prepare_their_parts(root, &config(text), cpu);
    assert!(matches!(first, HostBatch::Windows(_)));

    let passages = "source = \"passages\"\npaths = [\"ROOT\"]\nlength = 16\n";
    let first = ranks_prepare_their_parts(root, &config(passages), cpu);
    assert!(matches!(first, HostBatch::Texts(_)));

    // Texts of many lengths, all shorter than a row.
    let mut rows = String::from("text,label\n");
    for row in 0..40 {
        writeln!(
            rows,
            "{},{}",
            "kiln ".repeat(1 + row * 5 % 9),
            ["a", "b"][row % 2]
        )
        .unwrap();
    }
    std::fs::write(root.join("table.csv"), rows).unwrap();
    let table = "source = \"table\"\npaths = [\"ROOT/table.csv\"]\nlength = 64\n";
    let HostBatch::Texts(first) = ranks_prepare_their_parts(root, &config(table), cpu) else {
        panic!("texts are no other batch");
    };
    assert_eq!(first.tokens.cols, 64);
    let lengths = first.tokens.mask.chunks(64).map(|row| row.iter().sum::<i32>());
    assert!(lengths.clone().min() < lengths.clone().max() && lengths.max() < Some(64));
}

#[test]
fn of_images() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let (cpu, gpu) = (KilnDevice::cpu(), KilnDevice::cuda(0));
    let config = |rest: &str| format!("[model]\nname = \"resnet18\"\n[data]\naugment = true\n{rest}");
    let shapes = "source = \"shapes\"\nexamples = 40\nimage_size = 16\n";
    let first = ranks_prepare_their_parts(root, &config(shapes), cpu);
    assert!(matches!(first, HostBatch::Images(_)));

    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../kiln-hub/tests/fixtures/jpegs");
    for class in ["cup", "pot", "vase"] {
        std::fs::create_dir_all(root.join("pictures").join(class)).unwrap();
        for entry in std::fs::read_dir(fixtures).unwrap() {
            let path = entry.unwrap().path();
            let to = root.join("pictures").join(class).join(path.file_name().unwrap());
            std::fs::copy(&path, to).unwrap();
        }
    }
    let folder = "source = \"images\"\npaths = [\"ROOT/pictures\"]\nimage_size = 12\ndecoding = \"host\"\n";
    let first = ranks_prepare_their_parts(root, &config(folder), cpu);
    assert!(matches!(first, HostBatch::Images(_)));
    // Bytes, for a GPU that normalises them.
    let first = ranks_prepare_their_parts(root, &config(folder), gpu);
    assert!(matches!(first, HostBatch::Encoded(_)));

    for name in (1..=5)
        .map(|part| format!("data_batch_{part}"))
        .chain(["test_batch".to_owned()])
    {
        let record = |number: usize| {
            let by = number + name.len();
            let pixels = (0..3072).map(|at| (at * by) as u8);
            [vec![number as u8], pixels.collect()].concat()
        };
        let records: Vec<u8> = (0..6).flat_map(record).collect();
        std::fs::write(root.join(format!("{name}.bin")), records).unwrap();
    }
    let cifar = "source = \"cifar10\"\npaths = [\"ROOT\"]\nimage_size = 32\n";
    let first = ranks_prepare_their_parts(root, &config(cifar), cpu);
    assert!(matches!(first, HostBatch::Images(_)));
}
