//! Order, prefetch, resume, threads, and failures of a loader.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_hub::data::{Rng, *};
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
