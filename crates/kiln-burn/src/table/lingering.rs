//! Tensors that the program dropped, and that a thread may yet hand over to an operation.
//!
//! burn-router decides by a count of handles which use of a tensor is the last one, and takes the count down
//! before it hands the operation over. With two threads the order of what arrives here can be another one:
//!
//! ```text
//!   thread A                                 thread B
//!   x is an operand, count 2: not the last
//!   count 1
//!                                            drops x, count 0: Drop(x) arrives, and the table forgets x
//!   add(x, y) arrives, and there is no x
//! ```
//!
//! If both count before either takes the count down, one thread sends `Drop(x)` and then its own operation on
//! x. So a tensor that several threads have used *lingers*: whoever asks finds it until each of them has
//! handed over one more operation or has ended. A thread that does nothing for [`GRACE`] had no operation on
//! its way, or is one that the system has forgotten. Other threads may be about to use it for the first time;
//! they are waited for as well, but only for [`SHORT_GRACE`], because threads that make batches wait for
//! long, and the batches before would pile up. Tensors of one thread, nearly all, never linger; so one that
//! another thread was given may vanish if the first drops it just while the other hands over its very first
//! use of it. A program that gives tensors away says so before ([`super::share`]): then they linger for
//! [`GRACE`].

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn_ir::TensorId;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Slot;

/// How long a tensor lingers for a thread that hands nothing over. Tests must not depend on how fast they
/// run.
const GRACE: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 1 });

/// The same for a thread that has not used the tensor.
const SHORT_GRACE: Duration = Duration::from_millis(if cfg!(test) { 1_800_000 } else { 10 });

/// A thread that uses tensors.
#[derive(Debug, Default)]
pub struct User {
    /// Operations that it has handed over and that are dealt with.
    operations: AtomicU64,
    ended: AtomicBool,
}

/// The user that a thread is, for as long as it lives.
struct Living(Arc<User>);

impl Living {
    fn new() -> Self {
        let user = Arc::default();
        let mut all = users();
        all.retain(|other| !other.has_ended());
        all.push(Arc::clone(&user));
        Self(user)
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
    }
}

thread_local! {
    static THIS: Living = Living::new();
    /// The user on whose behalf this thread enters tensors at the moment.
    static ACTING_FOR: RefCell<Option<Arc<User>>> = const { RefCell::new(None) };
}

/// All threads that use tensors.
static USERS: Mutex<Vec<Arc<User>>> = Mutex::new(Vec::new());

fn users() -> MutexGuard<'static, Vec<Arc<User>>> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that may be given a tensor and have not used it yet. They hand over nothing under this name.
static OTHERS: LazyLock<Arc<User>> = LazyLock::new(Arc::default);

/// What a thread is whose thread-local values are gone.
static ENDED: LazyLock<Arc<User>> = LazyLock::new(|| {
    Arc::new(User {
        operations: AtomicU64::new(0),
        ended: AtomicBool::new(true),
    })
});

/// This thread.
pub fn this_thread() -> Arc<User> {
    THIS.try_with(|this| this.0.clone())
        .unwrap_or_else(|_| ENDED.clone())
}

/// Runs `action`, in which this thread runs what `user` has recorded: the tensors that it enters are those
/// of `user`.
pub fn acting_for<T>(user: &Arc<User>, action: impl FnOnce() -> T) -> T {
    /// Puts the user before back, also when the thread unwinds.
    struct Before(Option<Arc<User>>);
    impl Drop for Before {
        fn drop(&mut self) {
            let before = self.0.take();
            let _ = ACTING_FOR.try_with(|acting| acting.replace(before));
        }
    }
    let replaced = ACTING_FOR.try_with(|acting| acting.replace(Some(user.clone())));
    let _before = Before(replaced.ok().flatten());
    action()
}

/// The threads that have used a tensor.
#[derive(Debug, Default)]
pub(super) struct Users(SmallVec<[Arc<User>; 1]>);

impl Users {
    /// Notes that this thread, or the one that it acts for, uses the tensor.
    pub(super) fn note(&mut self) {
        let acting = ACTING_FOR.try_with(|acting| acting.borrow().clone());
        let user = acting.ok().flatten().unwrap_or_else(this_thread);
        if !self.0.iter().any(|other| Arc::ptr_eq(other, &user)) {
            self.0.retain(|other| !other.has_ended());
            self.0.push(user);
        }
    }

    /// Notes that other threads may be about to use the tensor.
    pub(super) fn note_others(&mut self) {
        if !self.0.iter().any(|other| Arc::ptr_eq(other, &OTHERS)) {
            self.0.push(OTHERS.clone());
        }
    }

    /// Whether several threads that are still there have used the tensor.
    pub(super) fn are_several(&self) -> bool {
        self.0.iter().filter(|user| !user.has_ended()).count() > 1
    }
}

impl User {
    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn operations(&self) -> u64 {
        self.operations.load(Ordering::Acquire)
    }
}

/// A tensor that left the table.
struct Lingering {
    slot: Slot,
    since: Instant,
    awaited: SmallVec<[Awaited; 2]>,
}

/// A thread that a tensor lingers for.
struct Awaited {
    user: Arc<User>,
    /// How many operations it had handed over.
    operations: u64,
    /// How long it is waited for.
    grace: Duration,
}

impl Lingering {
    fn is_over(&self, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.since);
        let waits =
            |it: &Awaited| age < it.grace && !it.user.has_ended() && it.user.operations() == it.operations;
        !self.awaited.iter().any(waits)
    }
}

static LINGERING: LazyLock<Mutex<FxHashMap<TensorId, Lingering>>> = LazyLock::new(Mutex::default);
/// How many there are: threads that share nothing look at nothing else.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn lingering() -> MutexGuard<'static, FxHashMap<TensorId, Lingering>> {
    LINGERING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets a tensor linger that is about to leave the table, if several threads have used it. The table is
/// locked.
pub(super) fn linger(id: TensorId, slot: &Slot, used_by: &Users) {
    if !used_by.are_several() {
        return;
    }
    let has_used = |user: &Arc<User>| used_by.0.iter().any(|other| Arc::ptr_eq(other, user));
    let awaited = |user: &Arc<User>| Awaited {
        user: user.clone(),
        operations: user.operations(),
        grace: if has_used(user) { GRACE } else { SHORT_GRACE },
    };
    let others = used_by.0.iter().filter(|user| Arc::ptr_eq(user, &OTHERS));
    let awaited = users().iter().chain(others).map(awaited).collect();
    let slot = slot.clone();
    let since = Instant::now();
    let mut lingering = lingering();
    let entry = Lingering { slot, since, awaited };
    lingering.insert(id, entry);
    COUNT.store(lingering.len(), Ordering::Release);
}

/// A tensor that is not in the table, if it lingers. The table is locked.
pub(super) fn get(id: TensorId) -> Option<Slot> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    lingering().get(&id).map(|it| it.slot.clone())
}

/// Notes that an operation which this thread handed over is dealt with; tensors that lingered for it go.
/// Drops do not count: one of them may come between an operation's operands and the operation.
pub fn note_operation() {
    let _ = THIS.try_with(|this| this.0.operations.fetch_add(1, Ordering::Release));
    sweep();
}

/// Lets go of the tensors that have lingered long enough.
pub(super) fn sweep() {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let now = Instant::now();
    let mut lingering = lingering();
    let over: Vec<Lingering> = lingering
        .extract_if(|_, it| it.is_over(now))
        .map(|(_, it)| it)
        .collect();
    COUNT.store(lingering.len(), Ordering::Release);
    drop(lingering);
    // Large buffers are freed here, after the lock is gone.
    drop(over);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use burn_std::{DType, Shape};

    use super::super::{discard, get, insert, new_id, remove};
    use super::*;
    use crate::device::Place;
    use crate::storage::Storage;

    fn entered() -> TensorId {
        let id = new_id(Place::Host);
        insert(id, Storage::zeros(Shape::from([4]), DType::F32));
        id
    }

    /// Runs `here` while there is another thread that has used the tensor `id`.
    fn with_user(id: TensorId, here: impl FnOnce()) {
        let (used, is_used) = channel();
        let (done, is_done) = channel::<()>();
        thread::scope(|scope| {
            let other = scope.spawn(move || {
                assert!(get(id).is_some());
                used.send(()).unwrap();
                let _ = is_done.recv();
            });
            is_used.recv().unwrap();
            here();
            drop(done);
            // A scope alone does not wait for a thread's own values to go.
            other.join().unwrap();
        });
    }

    fn is_there(id: TensorId) -> bool {
        get(id).is_some()
    }

    #[test]
    fn a_tensor_of_one_thread_goes_with_its_last_use() {
        let (dropped, used) = (entered(), entered());
        assert!(discard(dropped) && remove(used).is_some());
        assert!(!is_there(dropped) && !is_there(used));
    }

    #[test]
    fn a_tensor_of_two_threads_lingers_until_both_have_handed_over_an_operation() {
        let id = entered();
        let (go, gone) = (channel::<()>(), channel::<()>());
        thread::scope(|scope| {
            let (go_on, used) = (go.1, gone.0);
            scope.spawn(move || {
                assert!(is_there(id));
                used.send(()).unwrap();
                go_on.recv().unwrap();
                // What this thread was about to hand over when the other one dropped the tensor.
                assert!(is_there(id));
                note_operation();
                used.send(()).unwrap();
                go_on.recv().unwrap();
            });
            gone.1.recv().unwrap();
            assert!(discard(id));
            go.0.send(()).unwrap();
            gone.1.recv().unwrap();
            assert!(is_there(id), "this thread may have an operation on its way, too");
            note_operation();
            assert!(!is_there(id));
            go.0.send(()).unwrap();
        });
    }

    #[test]
    fn a_tensor_lingers_after_a_last_use_and_not_for_threads_that_ended() {
        let id = entered();
        with_user(id, || assert!(remove(id).is_some() && is_there(id)));
        sweep();
        assert!(is_there(id), "this thread has not ended");
        note_operation();
        assert!(!is_there(id));

        let id = entered();
        with_user(id, || ());
        assert!(discard(id) && !is_there(id), "there is no other thread");
    }

    #[test]
    fn a_tensor_lingers_for_a_while_at_most() {
        let id = entered();
        let here = || {
            assert!(discard(id));
            sweep();
            assert!(is_there(id));
            let lingering = lingering();
            let now = Instant::now();
            assert!(!lingering[&id].is_over(now + SHORT_GRACE));
            assert!(lingering[&id].is_over(now + GRACE));
        };
        with_user(id, here);
    }

    /// A third thread may be about to use it for the first time, and is not waited for as long.
    #[test]
    fn a_tensor_lingers_for_threads_that_have_not_used_it() {
        let (id, another) = (entered(), entered());
        with_user(another, || {
            with_user(id, || assert!(discard(id)));
            note_operation();
            assert!(is_there(id));
            assert!(lingering()[&id].is_over(Instant::now() + SHORT_GRACE));
        });
        sweep();
        assert!(!is_there(id), "all others have ended");
    }

    /// The other thread has done nothing yet, not even begun.
    #[test]
    fn a_shared_tensor_lingers_for_threads_that_come() {
        let id = entered();
        super::super::share();
        assert!(discard(id));
        note_operation();
        let there = thread::spawn(move || is_there(id)).join().unwrap();
        assert!(there && is_there(id));
        assert!(lingering()[&id].is_over(Instant::now() + GRACE));
    }

    #[test]
    fn what_a_thread_enters_for_another_is_used_by_both() {
        let other = Arc::new(User::default());
        users().push(other.clone());
        let id = acting_for(&other, entered);
        assert!(is_there(id) && discard(id));
        note_operation();
        assert!(is_there(id));
        other.operations.fetch_add(1, Ordering::Release);
        sweep();
        assert!(!is_there(id));
    }
}
