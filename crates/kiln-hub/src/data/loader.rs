//! The loader: order, batches, shares of ranks, prefetch, resume.
//!
//! Epoch `e` of seed `s` visits the examples in the permutation that `Rng::at([s, e])` shuffles, and example
//! `i` draws its augmentation from `Rng::at([s, e, i])`. A position is therefore two numbers, the epoch and
//! the batch within it, and resuming is computing the permutation again and starting there.
//!
//! Ranks that train together have one order and one position: the loader of a rank goes through the batches
//! of all of them, and prepares only its share of each ([`Loader::with_share`]). Since an example draws its
//! random numbers by its own number, a share is the same whether or not the rest of the batch is prepared:
//!
//! ```text
//!   order of the epoch   7 2 9 4 │ 0 5 3 8 │ ..
//!   rank 0 of 2          7 2     │ 0 5     │ ..
//!   rank 1 of 2              9 4 │     3 8 │ ..
//! ```
//!
//! Batches are prepared on threads of their own ([`team`](super::team)), so that reading, decoding and
//! augmenting overlap with the training step. Without them the caller's thread prepares each batch.
//! The position is counted where batches are *taken*: what was prepared but not yet used does not count, and
//! is prepared again after a resume.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::DataError;
use super::rng::Rng;
use super::team::Team;

/// Examples by number.
pub trait Dataset: Send + Sync + 'static {
    /// One example.
    type Item: Send + 'static;

    /// Number of examples.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Example `index`, below `len()`. All randomness comes from `rng`.
    ///
    /// # Errors
    /// [`DataError`] if the example cannot be read.
    fn item(&self, index: usize, rng: &mut Rng) -> Result<Self::Item, DataError>;

    /// A number of what the examples contain, by which [`Loader::resume`] notices other data of the same
    /// length and warns; 0, the default, says nothing. Large datasets look at a part of their examples.
    fn contents(&self) -> u64 {
        0
    }
}

/// Puts examples into one batch. Implemented by every function of that signature.
pub trait Collate<I>: Send + Sync + 'static {
    /// The input of a training step.
    type Batch: Send + 'static;

    /// Makes a batch of at least one example.
    ///
    /// # Errors
    /// [`DataError`] if the examples do not go together.
    fn collate(&self, items: Vec<I>) -> Result<Self::Batch, DataError>;
}

impl<I, T: Send + 'static, F> Collate<I> for F
where
    F: Fn(Vec<I>) -> Result<T, DataError> + Send + Sync + 'static,
{
    type Batch = T;

    fn collate(&self, items: Vec<I>) -> Result<T, DataError> {
        self(items)
    }
}

/// A run's position in its data, and the identity of the data; small enough for every checkpoint. All ranks
/// that train together have the same, whatever their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    /// The seed of order and augmentation.
    pub seed: u64,
    /// Complete passes over the data.
    pub epoch: u64,
    /// Batches taken of the current pass.
    pub batch: u64,
    /// Examples a batch, of all ranks together.
    pub batch_size: u64,
    /// Examples in the dataset.
    pub examples: u64,
    /// [`Dataset::contents`]; 0 in positions that were saved without.
    #[serde(default)]
    pub contents: u64,
}

/// Which examples of each batch one of several ranks prepares: of `n` those from `rank * n / ranks` to
/// `(rank + 1) * n / ranks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The number of the rank, from 0.
    pub rank: usize,
    /// How many ranks train together.
    pub ranks: usize,
}

impl Share {
    /// All examples: the share of a rank that is alone.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// The places of the share in a batch of so many examples.
    fn of(self, examples: usize) -> Range<usize> {
        let border = |rank: usize| examples * rank / self.ranks;
        border(self.rank)..border(self.rank + 1)
    }
}

/// Makes batches of a dataset.
pub struct Loader<D, C> {
    dataset: Arc<D>,
    pub(super) collate: Arc<C>,
    /// Examples of all ranks together.
    batch_size: usize,
    share: Share,
    seed: u64,
    shuffle: bool,
    drop_last: bool,
    epochs: Option<u64>,
    prefetch: usize,
    threads: usize,
}

impl<D, C> Clone for Loader<D, C> {
    fn clone(&self) -> Self {
        Self {
            dataset: self.dataset.clone(),
            collate: self.collate.clone(),
            ..*self
        }
    }
}

impl<D: Dataset, C: Collate<D::Item>> Loader<D, C> {
    /// A loader that shuffles with seed 0, drops an incomplete last batch (a compiled step wants one shape),
    /// repeats for ever, and prepares two batches ahead on one thread.
    pub fn new(dataset: D, collate: C, batch_size: usize) -> Self {
        Self {
            dataset: Arc::new(dataset),
            collate: Arc::new(collate),
            batch_size,
            share: Share::WHOLE,
            seed: 0,
            shuffle: true,
            drop_last: true,
            epochs: None,
            prefetch: 2,
            threads: 1,
        }
    }

    /// A loader for evaluation: one pass, in order, the last batch as large as it is.
    pub fn evaluation(dataset: D, collate: C, batch_size: usize) -> Self {
        Self::new(dataset, collate, batch_size)
            .with_shuffle(false)
            .with_drop_last(false)
            .with_epochs(Some(1))
    }

    /// Sets the seed of order and augmentation.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Prepares only the share of one of several ranks that train together, of batches whose size counts the
    /// examples of all ranks. Other examples are neither read nor decoded; an error of one is its rank's.
    ///
    /// Order, positions and the random numbers of each example are those of whole batches. So the shares of
    /// all ranks, one behind the other, are the batch of a loader without shares, and a position is one to
    /// resume from on any number of ranks.
    ///
    /// A [`Collate`] sees the examples of the share alone, which matters where it makes something of all it
    /// sees: a [`TextBatcher`](super::TextBatcher) with [`Padding::Longest`](crate::Padding::Longest) pads to
    /// the longest text of the share, so that ranks have rows of different lengths. With
    /// [`Padding::Fixed`](crate::Padding::Fixed) all have rows of one.
    pub fn with_share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// Whether each epoch has its own order.
    pub fn with_shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// Whether an incomplete last batch is left out.
    pub fn with_drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Ends after this many passes; `None` repeats for ever.
    pub fn with_epochs(mut self, epochs: Option<u64>) -> Self {
        self.epochs = epochs;
        self
    }

    /// How many batches are prepared ahead on other threads; 0 prepares each when it is asked for, on the
    /// caller's.
    pub fn with_prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// How many threads prepare batches ahead, which are the same with any number; 0 is 1. Images that are
    /// decoded for a GPU want some: one thread decodes about a thousand photographs of 500 by 375 pixels a
    /// second. A step on a CPU needs the cores itself.
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Batches an epoch.
    pub fn batches_per_epoch(&self) -> usize {
        match (self.batch_size, self.drop_last) {
            (0, _) => 0,
            (size, true) => self.dataset.len() / size,
            (size, false) => self.dataset.len().div_ceil(size),
        }
    }

    /// The position before the first batch.
    pub fn start_state(&self) -> LoaderState {
        LoaderState {
            seed: self.seed,
            epoch: 0,
            batch: 0,
            batch_size: self.batch_size as u64,
            examples: self.dataset.len() as u64,
            contents: self.dataset.contents(),
        }
    }

    /// Starts at the first batch.
    ///
    /// # Errors
    /// [`DataError::Setting`] if no epoch would have a batch, or a batch no example for some rank.
    pub fn start(&self) -> Result<Batches<C::Batch>, DataError> {
        self.resume(self.start_state())
    }

    /// Starts after the last batch that was taken when `state` was saved.
    ///
    /// # Errors
    /// [`DataError::Resume`] if the state is of other data, another batch size or another seed;
    /// [`DataError::Setting`] if no epoch would have a batch, or a batch no example for some rank;
    /// [`DataError::Worker`] if a thread cannot be started.
    pub fn resume(&self, mut state: LoaderState) -> Result<Batches<C::Batch>, DataError> {
        let per_epoch = self.batches_per_epoch() as u64;
        if per_epoch == 0 {
            return Err(DataError::Setting(format!(
                "{} examples make no batch of {}{}",
                self.dataset.len(),
                self.batch_size,
                if self.drop_last {
                    " (incomplete batches are dropped)"
                } else {
                    ""
                }
            )));
        }
        self.check_share()?;
        let now = self.start_state();
        let same = [
            ("seed", state.seed, now.seed),
            ("batch size", state.batch_size, now.batch_size),
            ("number of examples", state.examples, now.examples),
        ];
        for (what, saved, now) in same {
            if saved != now {
                return Err(DataError::Resume { what, saved, now });
            }
        }
        if state.contents != now.contents && state.contents != 0 && now.contents != 0 {
            kiln_log::warn!(
                target: "kiln",
                "the data has as many examples as when the position was saved, but others, or in another order: training \
                 goes on with them, and some that are evaluated may have been trained on"
            );
        }
        state.contents = now.contents;
        if state.batch > per_epoch {
            return Err(DataError::Resume {
                what: "batch in its epoch",
                saved: state.batch,
                now: per_epoch,
            });
        }
        normalise(&mut state, per_epoch);
        let plan = Plan {
            state,
            per_epoch,
            epochs: self.epochs,
            order: None,
        };
        let source: Box<dyn Produce<C::Batch>> = match (self.prefetch, self.threads) {
            (0, _) => Box::new(Inline {
                loader: self.clone(),
                plan,
            }),
            (ahead, 0 | 1) => Box::new(Team::start(self.clone(), plan, 1, ahead + 1)?),
            // One more, since threads that have nothing left to do for a batch begin the next one.
            (ahead, threads) => Box::new(Team::start(self.clone(), plan, threads, ahead + 2)?),
        };
        Ok(Batches {
            source,
            state,
            per_epoch,
            epochs: self.epochs,
            failed: false,
        })
    }

    /// Makes sure that each rank has an example of each batch. All ranks find the same, whatever their own
    /// share, so that none goes on without the others.
    fn check_share(&self) -> Result<(), DataError> {
        let Share { rank, ranks } = self.share;
        if rank >= ranks {
            return Err(DataError::Setting(format!(
                "rank {rank} is none of {ranks} ranks; they are counted from 0"
            )));
        }
        let last = self.dataset.len() % self.batch_size;
        let smallest = match self.drop_last || last == 0 {
            true => self.batch_size,
            false => last,
        };
        match smallest >= ranks {
            true => Ok(()),
            false => Err(DataError::Setting(format!(
                "a batch of {smallest} examples does not give each of {ranks} ranks one"
            ))),
        }
    }

    /// Example `index` as epoch `epoch` augments it.
    pub(super) fn item(&self, epoch: u64, index: usize) -> Result<D::Item, DataError> {
        let mut rng = Rng::at(&[self.seed, epoch, index as u64]);
        self.dataset.item(index, &mut rng)
    }

    /// The order of an epoch.
    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.dataset.len()).collect();
        if self.shuffle {
            Rng::at(&[self.seed, epoch]).shuffle(&mut order);
        }
        order
    }
}

/// The end of an epoch is the beginning of the next.
fn normalise(state: &mut LoaderState, per_epoch: u64) {
    if state.batch >= per_epoch {
        state.epoch += 1;
        state.batch = 0;
    }
}

/// Which batch comes next.
pub(super) struct Plan {
    state: LoaderState,
    per_epoch: u64,
    epochs: Option<u64>,
    /// The order of an epoch, kept while it lasts.
    order: Option<(u64, Vec<usize>)>,
}

impl Plan {
    /// The epoch and this rank's examples of the next batch; `None` after the last epoch.
    pub(super) fn next<D, C>(&mut self, loader: &Loader<D, C>) -> Option<(u64, Vec<usize>)>
    where
        D: Dataset,
        C: Collate<D::Item>,
    {
        let epoch = self.state.epoch;
        if self.epochs.is_some_and(|epochs| epoch >= epochs) {
            return None;
        }
        if self.order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.order = Some((epoch, loader.order(epoch)));
        }
        let order = self.order.as_ref().map_or(&[][..], |(_, order)| order);
        let from = self.state.batch as usize * loader.batch_size;
        let to = (from + loader.batch_size).min(order.len());
        self.state.batch += 1;
        normalise(&mut self.state, self.per_epoch);
        Some((epoch, order[from..to][loader.share.of(to - from)].to_vec()))
    }
}

/// What gives a run its batches.
pub(super) trait Produce<T>: Send {
    /// The next batch; `None` after the last.
    fn produce(&mut self) -> Option<Result<T, DataError>>;
}

/// Prepares a batch when it is asked for.
struct Inline<D, C> {
    loader: Loader<D, C>,
    plan: Plan,
}

impl<D: Dataset, C: Collate<D::Item>> Produce<C::Batch> for Inline<D, C> {
    fn produce(&mut self) -> Option<Result<C::Batch, DataError>> {
        let _span = kiln_profile::span(kiln_profile::Category::Data, "data loading");
        let (epoch, indices) = self.plan.next(&self.loader)?;
        let items = indices.into_iter().map(|index| self.loader.item(epoch, index));
        let items: Result<Vec<D::Item>, DataError> = items.collect();
        Some(items.and_then(|items| self.loader.collate.collate(items)))
    }
}

/// The batches of a run; ends after the last epoch or the first error.
pub struct Batches<T> {
    source: Box<dyn Produce<T>>,
    state: LoaderState,
    per_epoch: u64,
    epochs: Option<u64>,
    failed: bool,
}

impl<T: Send + 'static> Batches<T> {
    /// The position after the last batch that was taken: save it with the model, and
    /// [`resume`](Loader::resume) goes on with the next one.
    pub fn state(&self) -> LoaderState {
        self.state
    }

    /// Batches that are still to come, if the run ends.
    pub fn remaining(&self) -> Option<u64> {
        let total = self.epochs?.saturating_mul(self.per_epoch);
        Some(total.saturating_sub(self.state.epoch * self.per_epoch + self.state.batch))
    }
}

impl<T: Send + 'static> Iterator for Batches<T> {
    type Item = Result<T, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let batch = self.source.produce()?;
        match &batch {
            Ok(_) => {
                self.state.batch += 1;
                normalise(&mut self.state, self.per_epoch);
            }
            Err(_) => self.failed = true,
        }
        Some(batch)
    }
}
