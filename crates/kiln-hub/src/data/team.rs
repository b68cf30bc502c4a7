//! Threads that prepare batches ahead.
//!
//! Examples are handed out one by one, in the order in which they are needed: a thread that is free takes the
//! next example of the newest batch, and when a batch has none left, the first of a new batch. Whoever
//! finishes the last example of a batch puts the batch together, while the others go on with the examples of
//! the next. So no thread waits for another, unless as many batches as are wanted ahead are open already.
//!
//! ```text
//!   open:   batch 7            batch 8              batch 9
//!           ready              examples 0..128      examples 0..41 handed out
//!             ▲                handed out, 5 of     next: 41
//!             │                them unfinished
//!         the caller takes it
//! ```
//!
//! What a batch holds depends on its place alone ([`Plan`]), so it is the same whichever thread makes what.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::error::DataError;
use super::loader::{Collate, Dataset, Loader, Plan, Produce};

/// The threads of a run, seen from the caller's.
pub(super) struct Team<D: Dataset, C: Collate<D::Item>> {
    shared: Arc<Shared<D, C>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<D: Dataset, C: Collate<D::Item>> {
    loader: Loader<D, C>,
    /// How many batches are open at most.
    most: usize,
    work: Mutex<Work<D::Item, C::Batch>>,
    /// A batch has been taken or the run has been given up: threads may have something to do.
    wanted: Condvar,
    /// A batch is ready or there are no more.
    made: Condvar,
}

struct Work<I, B> {
    plan: Plan,
    /// The batches that have been begun and not taken, in order.
    open: VecDeque<Open<I, B>>,
    /// The number of the first of them.
    first: usize,
    /// No batch is begun any more: the plan has ended, a batch has failed, or the caller is gone.
    is_over: bool,
}

/// The examples of a batch, those that are finished.
type Items<I> = Vec<Option<Result<I, DataError>>>;

/// A batch that has been begun.
struct Open<I, B> {
    epoch: u64,
    indices: Vec<usize>,
    /// How many examples have been handed out.
    handed_out: usize,
    /// How many are unfinished.
    unfinished: usize,
    items: Items<I>,
    batch: Option<Result<B, DataError>>,
}

/// An example that a thread is to prepare.
struct Task {
    /// The number of its batch, and its place there.
    batch: usize,
    place: usize,
    epoch: u64,
    index: usize,
}

impl<D: Dataset, C: Collate<D::Item>> Team<D, C> {
    /// Starts threads that keep up to `most` batches open.
    ///
    /// # Errors
    /// [`DataError::Worker`] if a thread cannot be started.
    pub fn start(loader: Loader<D, C>, plan: Plan, threads: usize, most: usize) -> Result<Self, DataError> {
        let work = Work {
            plan,
            open: VecDeque::new(),
            first: 0,
            is_over: false,
        };
        let shared = Arc::new(Shared {
            loader,
            most,
            work: Mutex::new(work),
            wanted: Condvar::new(),
            made: Condvar::new(),
        });
        let mut team = Self {
            shared,
            threads: Vec::with_capacity(threads),
        };
        for number in 0..threads {
            let shared = team.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("kiln-data-{number}"))
                .spawn(move || shared.run());
            // Those that run already are stopped when the team is dropped.
            team.threads
                .push(thread.map_err(|error| DataError::Worker(error.to_string()))?);
        }
        Ok(team)
    }
}

impl<D: Dataset, C: Collate<D::Item>> Produce<C::Batch> for Team<D, C> {
    fn produce(&mut self) -> Option<Result<C::Batch, DataError>> {
        let mut work = self.shared.lock();
        loop {
            if let Some(batch) = work.open.front_mut().and_then(|open| open.batch.take()) {
                work.open.pop_front();
                work.first += 1;
                self.shared.wanted.notify_all();
                return Some(batch);
            }
            if work.open.is_empty() && work.is_over {
                return None;
            }
            work = wait(&self.shared.made, work);
        }
    }
}

impl<D: Dataset, C: Collate<D::Item>> Drop for Team<D, C> {
    fn drop(&mut self) {
        let mut work = self.shared.lock();
        work.is_over = true;
        work.open.clear();
        drop(work);
        self.shared.wanted.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl<D: Dataset, C: Collate<D::Item>> Shared<D, C> {
    /// Nothing that can panic runs under the lock, so a poisoned lock still guards sound data.
    fn lock(&self) -> MutexGuard<'_, Work<D::Item, C::Batch>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each thread does until the run is over.
    fn run(&self) {
        while let Some(task) = self.next() {
            let item = {
                let _span = kiln_profile::span(kiln_profile::Category::Data, "data loading");
                caught(|| self.loader.item(task.epoch, task.index))
            };
            let Some(items) = self.finish(&task, item) else {
                continue;
            };
            let batch = {
                let _span = kiln_profile::span(kiln_profile::Category::Data, "data collating");
                // The first error is that of the first example, as on one thread.
                let items: Result<Vec<D::Item>, DataError> = items.into_iter().flatten().collect();
                items.and_then(|items| caught(|| self.loader.collate.collate(items)))
            };
            let mut work = self.lock();
            if batch.is_err() {
                work.is_over = true;
                self.wanted.notify_all();
            }
            if let Some(open) = work.batch(task.batch) {
                open.batch = Some(batch);
            }
            drop(work);
            self.made.notify_all();
        }
    }

    /// The next example; waits for the caller while enough batches are open. `None` once the run is over.
    fn next(&self) -> Option<Task> {
        let mut work = self.lock();
        loop {
            if let Some(task) = work.hand_out() {
                return Some(task);
            }
            if work.is_over {
                return None;
            }
            if work.open.len() < self.most {
                match work.plan.next(&self.loader) {
                    Some((epoch, indices)) => work.open.push_back(Open::new(epoch, indices)),
                    None => {
                        work.is_over = true;
                        self.made.notify_all();
                        self.wanted.notify_all();
                    }
                }
                continue;
            }
            work = wait(&self.wanted, work);
        }
    }

    /// Stores an example. Returns those of the whole batch if it was the last one.
    fn finish(&self, task: &Task, item: Result<D::Item, DataError>) -> Option<Items<D::Item>> {
        let mut work = self.lock();
        // The batch is gone if the caller is.
        let open = work.batch(task.batch)?;
        open.items[task.place] = Some(item);
        open.unfinished -= 1;
        (open.unfinished == 0).then(|| std::mem::take(&mut open.items))
    }
}

impl<I, B> Work<I, B> {
    fn batch(&mut self, number: usize) -> Option<&mut Open<I, B>> {
        self.open.get_mut(number.checked_sub(self.first)?)
    }

    /// An example of the newest batch, the only one that may have some left.
    fn hand_out(&mut self) -> Option<Task> {
        let batch = (self.first + self.open.len()).checked_sub(1)?;
        let open = self.open.back_mut()?;
        let place = open.handed_out;
        let index = *open.indices.get(place)?;
        open.handed_out += 1;
        Some(Task {
            batch,
            place,
            epoch: open.epoch,
            index,
        })
    }
}

impl<I, B> Open<I, B> {
    fn new(epoch: u64, indices: Vec<usize>) -> Self {
        Self {
            epoch,
            handed_out: 0,
            unfinished: indices.len(),
            items: indices.iter().map(|_| None).collect(),
            indices,
            batch: None,
        }
    }
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// A panic of a dataset as an error, which reaches the caller in its place among the batches.
fn caught<T>(work: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    // What `work` may have left half done belongs to the dataset, of which a run that has failed asks nothing
    // more.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(DataError::Worker(text.unwrap_or("it panicked").to_string()))
    })
}
