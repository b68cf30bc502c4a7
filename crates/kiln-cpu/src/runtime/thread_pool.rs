//! The threads that share the parallel loops of a step.
//!
//! A step is hundreds of short parallel loops in a row, so the time to start and finish a loop matters most.
//! Workers are fixed, and each waits at a mailbox of its own. The caller writes a pointer to the loop (which
//! lives on the caller's stack) into each mailbox, begins with piece 0 itself, and waits for a counter to
//! reach zero. Nothing is allocated and no lock is taken. A worker waits by spinning for some microseconds,
//! then by yielding for as long as a step is running, and then sleeps; between steps it costs nothing.
//!
//! Thread `t` of `T` has the `t`-th run of whole grains and takes it in a few chunks, each half of what is
//! left. A thread that is done with its own goes on with chunks that others have not begun: on 16 virtual
//! processors, which share cores with each other and with other machines, the slowest thread took 1.3 times
//! the even share of a product. So does the caller when it has waited for others for some microseconds: where
//! more threads run than there are cores, a worker may come milliseconds later, and a step has hundreds of
//! loops. A worker that has not come at all when everything is begun is not waited for. Which chunks there
//! are follows from the loop alone, and a loop body never combines values across grains, so results are the
//! same for any number of threads.
//!
//! Measured on the 2-core reference machine (`cargo run --release -p kiln-cpu --example pool_latency`): an
//! empty loop over two threads takes 0.2 µs here, against 12 µs for rayon's `broadcast` and 16 µs for its
//! `scope`, which put jobs in a queue and wake sleepers; hence no rayon.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::hint::spin_loop;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::runtime::abi::Task;

/// Rounds of pure spinning before a waiting thread begins to yield, and before a thread that waits for the
/// end of a loop looks for what others have not begun; some 20 µs.
const SPIN_ROUNDS: u32 = 2_000;

/// How long a worker goes on yielding during a step before it sleeps.
const YIELD_TIME: Duration = Duration::from_millis(2);

/// Most chunks of a piece.
const CHUNKS: u64 = 4;

/// A thread whose own piece took less does not look for chunks of others: asking them all takes about a
/// microsecond.
const WORTH_HELPING: Duration = Duration::from_micros(20);

thread_local! {
    /// Whether this thread is executing a piece of a loop, of any pool.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// A parallel loop in flight; lives on the stack of the thread that started it.
struct Job {
    task: Task,
    ctx: *mut c_void,
    n: i64,
    grain: i64,
    pieces: i64,
    /// Counts the loops of a pool; distinguishes what is taken of this one from what was of others.
    number: u64,
    pending: AtomicUsize,
}

impl Job {
    /// Chunk number `chunk` of piece `piece`: whole grains, half of what the chunks before it have left of
    /// the piece, or all of it for the last. None if nothing is left.
    fn chunk(&self, piece: i64, chunk: u64) -> Option<(i64, i64)> {
        let count = grains(self.n, self.grain);
        let border = |piece: i64| count * piece / self.pieces;
        let (mut begin, end) = (border(piece), border(piece + 1));
        let part = |chunk: u64, left: i64| {
            if chunk + 1 == CHUNKS {
                left
            } else {
                left - left / 2
            }
        };
        for before in 0..chunk {
            begin += part(before, end - begin);
        }
        let last = begin + part(chunk, end - begin);
        (begin < last).then(|| (begin * self.grain, (last * self.grain).min(self.n)))
    }

    /// # Safety
    /// The task must be sound to call with its context for these iterations.
    unsafe fn run(&self, (begin, end): (i64, i64), thread: i64) {
        let outer = IN_TASK.replace(true);
        // SAFETY: the caller's contract.
        unsafe { (self.task)(self.ctx, begin, end, thread as c_int) };
        IN_TASK.set(outer);
    }
}

/// What has been begun of one thread's piece, on a cache line of its own.
#[repr(align(128))]
struct Taken {
    /// How many chunks are taken, in the low byte, and of which loop. Loops never have equal numbers, so
    /// nobody needs to reset it.
    chunks: AtomicU64,
    /// Nanoseconds that threads have spent in the chunks, if they are measured.
    time: AtomicU64,
}

impl Taken {
    /// Takes the next chunk of piece `piece` of `job`, if there is one left.
    fn next(&self, job: &Job, piece: i64) -> Option<(i64, i64)> {
        let mut seen = self.chunks.load(Ordering::Relaxed);
        loop {
            let taken = if seen >> 8 == job.number { seen & 0xff } else { 0 };
            let chunk = if taken < CHUNKS {
                job.chunk(piece, taken)?
            } else {
                return None;
            };
            // What a chunk writes becomes visible with `pending`; here only one thread must get it.
            let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
            match self
                .chunks
                .compare_exchange_weak(seen, job.number << 8 | (taken + 1), success, failure)
            {
                Ok(_) => return Some(chunk),
                Err(now) => seen = now,
            }
        }
    }
}

/// The place where one worker waits, on a cache line of its own, so that workers do not disturb each other.
#[repr(align(128))]
struct Mailbox {
    job: AtomicPtr<Job>,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

struct Shared {
    mailboxes: Box<[Mailbox]>,
    /// For each thread, what is taken of its piece.
    taken: Box<[Taken]>,
    /// Loops that were split.
    loops: AtomicU64,
    /// Number of steps that are running; while there are any, workers stay close.
    active: AtomicUsize,
    shutdown: AtomicBool,
    /// Whether threads note the time that they spend in pieces.
    measuring: AtomicBool,
    /// Nanoseconds in pieces: of all threads, of the longest piece of each loop, and of what the starting
    /// thread ran.
    busy: [AtomicU64; 3],
}

impl Shared {
    /// What `threads` threads share, the caller's included.
    fn new(threads: usize) -> Self {
        let mailboxes = (1..threads)
            .map(|_| Mailbox {
                job: AtomicPtr::new(ptr::null_mut()),
                asleep: AtomicBool::new(false),
                thread: OnceLock::new(),
            })
            .collect();
        Self {
            mailboxes,
            taken: (0..threads)
                .map(|_| Taken {
                    chunks: AtomicU64::new(0),
                    time: AtomicU64::new(0),
                })
                .collect(),
            loops: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            shutdown: AtomicBool::new(false),
            measuring: AtomicBool::new(false),
            busy: [const { AtomicU64::new(0) }; 3],
        }
    }

    /// Takes part in `job` as thread `index`: computes its piece, but for chunks that others take, and then
    /// what is left of theirs, if looking for it pays. Whether it has looked: then nothing is left to begin.
    ///
    /// # Safety
    /// As [`Job::run`], for all iterations.
    unsafe fn run(&self, job: &Job, index: i64) -> bool {
        let start = Instant::now();
        // SAFETY: the caller's contract.
        unsafe { self.run_piece(job, index, index) };
        let helps = start.elapsed() >= WORTH_HELPING;
        if helps {
            // SAFETY: the caller's contract.
            unsafe { self.help(job, index) };
        }
        helps
    }

    /// Computes as thread `index` what is left of all other pieces. Nothing is left to begin then.
    ///
    /// # Safety
    /// As [`Job::run`], for all iterations.
    unsafe fn help(&self, job: &Job, index: i64) {
        for other in 1..job.pieces {
            // SAFETY: the caller's contract.
            unsafe { self.run_piece(job, (index + other) % job.pieces, index) };
        }
    }

    /// Computes as thread `index` the chunks of `piece` that nobody has taken.
    ///
    /// # Safety
    /// As [`Job::run`], for the iterations of the piece.
    unsafe fn run_piece(&self, job: &Job, piece: i64, index: i64) {
        let measuring = self.measuring.load(Ordering::Relaxed);
        let taken = &self.taken[piece as usize];
        while let Some(chunk) = taken.next(job, piece) {
            let start = measuring.then(thread_time);
            // SAFETY: the caller's contract.
            unsafe { job.run(chunk, index) };
            if let Some(start) = start {
                let time = (thread_time() - start).as_nanos() as u64;
                taken.time.fetch_add(time, Ordering::Relaxed);
                self.busy[0].fetch_add(time, Ordering::Relaxed);
                if index == 0 {
                    self.busy[2].fetch_add(time, Ordering::Relaxed);
                }
            }
        }
    }

    /// Takes `job` out of the mailboxes of workers that have not looked yet, because the system runs
    /// something else in their place. Nothing may be left to begin.
    fn withdraw(&self, job: &Job) {
        let posted = (&raw const *job).cast_mut();
        for mailbox in &self.mailboxes[..job.pieces as usize - 1] {
            let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
            let taken = mailbox
                .job
                .compare_exchange(posted, ptr::null_mut(), success, failure);
            if taken.is_ok() {
                job.pending.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

/// A fixed set of threads that execute parallel loops together with the thread that starts them.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a loop is in flight: two steps on one pool take turns, loop by loop.
    turn: Mutex<()>,
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool")
            .field("threads", &self.threads())
            .finish()
    }
}

/// Keeps the workers from sleeping until dropped.
pub(crate) struct Awake<'a>(&'a ThreadPool);

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        self.0.shared.active.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ThreadPool {
    /// A pool of `threads` threads, the caller's included; 0 means one for each available core. If the system
    /// refuses to start a thread, the pool has as many as it got.
    pub fn new(threads: usize) -> Self {
        let wanted = match threads {
            0 => thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let shared = Arc::new(Shared::new(wanted));
        let mut workers = Vec::new();
        for index in 0..wanted - 1 {
            let theirs = Arc::clone(&shared);
            let spawned = thread::Builder::new()
                .name(format!("kiln-{}", index + 1))
                .spawn(move || work(&theirs, index));
            match spawned {
                Ok(handle) => workers.push(handle),
                Err(error) => {
                    kiln_log::warn!(%error, started = workers.len() + 1, wanted, "fewer threads than asked for");
                    break;
                }
            }
        }
        Self {
            shared,
            workers,
            turn: Mutex::new(()),
        }
    }

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(begin, end, thread)` over `[0, n)`, in parts whose borders are multiples of `grain`. A
    /// thread may get several parts, one after the other. From within a loop body it runs inline, as one
    /// part.
    ///
    /// # Panics
    /// If `body` panics, once all pieces are done.
    pub fn parallel_for<F: Fn(usize, usize, usize) + Sync>(&self, n: usize, grain: usize, body: F) {
        struct Closure<F> {
            body: F,
            panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
        }
        unsafe extern "C" fn call<F: Fn(usize, usize, usize) + Sync>(
            ctx: *mut c_void,
            begin: i64,
            end: i64,
            thread: c_int,
        ) {
            // SAFETY: `ctx` is the closure below, borrowed until all pieces are done; `F: Sync` allows
            // sharing.
            let closure = unsafe { &*ctx.cast::<Closure<F>>() };
            let run = || (closure.body)(begin as usize, end as usize, thread as usize);
            if let Err(payload) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
                let mut slot = closure
                    .panic
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                slot.get_or_insert(payload);
            }
        }
        let closure = Closure {
            body,
            panic: Mutex::new(None),
        };
        // SAFETY: `call` matches the context it is given, which lives until `run_task` returns.
        unsafe {
            self.run_task(
                n as i64,
                grain as i64,
                call::<F>,
                (&raw const closure).cast_mut().cast(),
            );
        }
        let panic = closure
            .panic
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(payload) = panic {
            std::panic::resume_unwind(payload);
        }
    }

    /// [`parallel_for`](Self::parallel_for) for a C function.
    ///
    /// # Safety
    /// `task` must be sound to call with `ctx` from several threads at once on disjoint ranges within
    /// `[0, n)`, and must not unwind.
    pub unsafe fn run_task(&self, n: i64, grain: i64, task: Task, ctx: *mut c_void) {
        if n <= 0 {
            return;
        }
        let grain = grain.max(1);
        let pieces = (self.threads() as i64).min(grains(n, grain));
        let job = Job {
            task,
            ctx,
            n,
            grain,
            pieces,
            number: 1 + self.shared.loops.fetch_add(1, Ordering::Relaxed),
            pending: AtomicUsize::new(pieces as usize - 1),
        };
        if pieces == 1 || IN_TASK.get() {
            // SAFETY: this function's contract.
            unsafe { job.run((0, n), 0) };
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for mailbox in &self.shared.mailboxes[..pieces as usize - 1] {
            mailbox.job.store((&raw const job).cast_mut(), Ordering::Release);
        }
        // Pairs with the fence in `wait_for_job`: either the worker sees the job, or we see that it sleeps.
        fence(Ordering::SeqCst);
        for mailbox in &self.shared.mailboxes[..pieces as usize - 1] {
            if mailbox.asleep.load(Ordering::Relaxed) {
                wake(mailbox);
            }
        }
        // SAFETY: this function's contract.
        let mut helped = unsafe { self.shared.run(&job, 0) };
        if helped {
            self.shared.withdraw(&job);
        }
        let mut rounds = 0;
        while job.pending.load(Ordering::Acquire) != 0 {
            if rounds < SPIN_ROUNDS {
                rounds += 1;
                spin_loop();
            } else if helped {
                thread::yield_now();
            } else {
                // A worker is late: perhaps the system runs something else in its place.
                // SAFETY: this function's contract.
                unsafe { self.shared.help(&job, 0) };
                self.shared.withdraw(&job);
                helped = true;
            }
        }
        if self.shared.measuring.load(Ordering::Relaxed) {
            let pieces = &self.shared.taken[..pieces as usize];
            let longest = pieces
                .iter()
                .map(|taken| taken.time.swap(0, Ordering::Relaxed))
                .max();
            self.shared.busy[1].fetch_add(longest.unwrap_or(0), Ordering::Relaxed);
        }
        drop(turn);
    }

    /// From now on threads note how long they compute pieces of loops that are split ([`busy`](Self::busy)).
    pub fn measure_busy(&self) {
        self.shared.measuring.store(true, Ordering::Relaxed);
    }

    /// The time on a core in pieces of loops that were split, since [`measure_busy`](Self::measure_busy): of
    /// all threads together, of the longest piece of each loop, and of the thread that started the loop.
    /// Waiting does not count, nor which thread computes a chunk of a piece, so it does not matter how many
    /// cores there are.
    pub fn busy(&self) -> [Duration; 3] {
        let nanoseconds = |time: &AtomicU64| Duration::from_nanos(time.load(Ordering::Relaxed));
        self.shared.busy.each_ref().map(nanoseconds)
    }

    /// Keeps the workers awake between the loops of a step, for as long as the guard lives.
    pub(crate) fn keep_awake(&self) -> Awake<'_> {
        self.shared.active.fetch_add(1, Ordering::Relaxed);
        Awake(self)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.shared.mailboxes.iter().for_each(wake);
        for worker in self.workers.drain(..) {
            // A worker does not panic: tasks do not unwind.
            let _ = worker.join();
        }
    }
}

/// Time that this thread has been on a core.
#[cfg(unix)]
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists on every unix, and `time` is written before it is read.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Time that passes, where a thread's own is not known.
#[cfg(not(unix))]
fn thread_time() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// Number of grains that cover `n` iterations.
fn grains(n: i64, grain: i64) -> i64 {
    n / grain + i64::from(n % grain != 0)
}

fn wake(mailbox: &Mailbox) {
    if let Some(thread) = mailbox.thread.get() {
        thread.unpark();
    }
}

/// The life of worker `index`.
fn work(shared: &Shared, index: usize) {
    let mailbox = &shared.mailboxes[index];
    mailbox.thread.get_or_init(thread::current);
    while let Some(job) = wait_for_job(shared, mailbox) {
        // SAFETY: the thread that posted the job waits until `pending` is zero, so the job lives until our
        // decrement below, after which we do not touch it; its contract covers the task.
        unsafe {
            shared.run(&*job, index as i64 + 1);
            (*job).pending.fetch_sub(1, Ordering::Release);
        }
    }
}

/// The next job, or `None` when the pool is being dropped.
fn wait_for_job(shared: &Shared, mailbox: &Mailbox) -> Option<*const Job> {
    let mut rounds = 0;
    let mut yielding_since = None;
    loop {
        // Taken out at once: the thread that posted it may withdraw it as long as it is here.
        if !mailbox.job.load(Ordering::Relaxed).is_null() {
            let job = mailbox.job.swap(ptr::null_mut(), Ordering::Acquire);
            if !job.is_null() {
                return Some(job);
            }
        }
        if shared.shutdown.load(Ordering::Relaxed) {
            return None;
        }
        if rounds < SPIN_ROUNDS {
            rounds += 1;
            spin_loop();
            continue;
        }
        let since = *yielding_since.get_or_insert_with(Instant::now);
        if shared.active.load(Ordering::Relaxed) > 0 && since.elapsed() < YIELD_TIME {
            thread::yield_now();
            continue;
        }
        mailbox.asleep.store(true, Ordering::Relaxed);
        // Pairs with the fence in `run_task`.
        fence(Ordering::SeqCst);
        if mailbox.job.load(Ordering::Relaxed).is_null() && !shared.shutdown.load(Ordering::SeqCst) {
            thread::park();
        }
        mailbox.asleep.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Every iteration exactly once, borders on grains, thread numbers in range, for many sizes.
    #[test]
    fn covers_each_iteration_once() {
        for threads in [1, 2, 3, 7] {
            let pool = ThreadPool::new(threads);
            for n in [0, 1, 2, 3, 5, 16, 31, 97, 1000] {
                for grain in [1, 2, 7, 64, 5000] {
                    let seen: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
                    pool.parallel_for(n, grain, |begin, end, thread| {
                        assert!(thread < threads && begin < end && begin % grain == 0);
                        assert!(end == n || end % grain == 0);
                        seen[begin..end].iter().for_each(|s| {
                            s.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                    assert!(
                        seen.iter().all(|s| s.load(Ordering::Relaxed) == 1),
                        "{threads} {n} {grain}"
                    );
                }
            }
        }
    }

    /// Chunks of a piece follow each other, each at most half of what is left, and end with the piece.
    #[test]
    fn chunks_cover_a_piece() {
        unsafe extern "C" fn nothing(_: *mut c_void, _: i64, _: i64, _: c_int) {}
        for (n, grain, pieces) in [(1000, 7, 3), (5, 1, 5), (64, 64, 1), (9, 2, 2)] {
            let job = Job {
                task: nothing,
                ctx: ptr::null_mut(),
                n,
                grain,
                pieces,
                number: 1,
                pending: AtomicUsize::new(0),
            };
            let chunks: Vec<_> = (0..pieces)
                .flat_map(|piece| (0..CHUNKS).map(move |chunk| (piece, chunk)))
                .filter_map(|(piece, chunk)| job.chunk(piece, chunk))
                .collect();
            assert_eq!((chunks[0].0, chunks[chunks.len() - 1].1), (0, n));
            assert!(chunks.windows(2).all(|two| two[0].1 == two[1].0), "{chunks:?}");
            assert!(
                chunks
                    .iter()
                    .all(|(begin, end)| begin < end && begin % grain == 0)
            );
        }
    }

    /// A thread that is held up in its first chunk holds up nothing else.
    #[test]
    fn others_take_what_a_slow_thread_has_not_begun() {
        let pool = ThreadPool::new(3);
        for _ in 0..20 {
            let by: Vec<AtomicU32> = (0..64).map(|_| AtomicU32::new(99)).collect();
            let left = AtomicUsize::new(64);
            pool.parallel_for(64, 1, |begin, end, index| {
                by[begin..end].iter().for_each(|b| {
                    assert_eq!(b.swap(index as u32, Ordering::Relaxed), 99);
                });
                left.fetch_sub(end - begin, Ordering::Relaxed);
                thread::sleep(2 * WORTH_HELPING);
                // The first chunk waits for all the others, so other threads must take the rest of its piece.
                let until = Instant::now() + Duration::from_secs(20);
                while begin == 0 && left.load(Ordering::Relaxed) > 0 {
                    assert!(Instant::now() < until, "nobody helps");
                    thread::yield_now();
                }
            });
            assert_eq!(left.into_inner(), 0);
        }
    }

    /// A worker that never gets a core holds up nothing, not even loops that are too short to look for its
    /// chunks at once.
    #[test]
    fn a_worker_that_does_not_come_is_not_waited_for() {
        let pool = ThreadPool {
            shared: Arc::new(Shared::new(2)),
            workers: vec![thread::spawn(|| ())],
            turn: Mutex::new(()),
        };
        for n in [2, 64] {
            let count = AtomicUsize::new(0);
            pool.parallel_for(n, 1, |begin, end, index| {
                assert_eq!(index, 0);
                count.fetch_add(end - begin, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), n);
        }
    }

    #[test]
    fn uses_all_threads_and_wakes_sleepers() {
        let pool = ThreadPool::new(4);
        for pause in [0, 0, 5, 0, 20] {
            thread::sleep(Duration::from_millis(pause));
            let used = AtomicUsize::new(0);
            let until = Instant::now() + Duration::from_secs(20);
            pool.parallel_for(4, 1, |_, _, index| {
                used.fetch_or(1 << index, Ordering::Relaxed);
                // Nobody has the time to help.
                while used.load(Ordering::Relaxed) != 0b1111 && Instant::now() < until {
                    thread::yield_now();
                }
            });
            assert_eq!(used.into_inner(), 0b1111);
        }
    }

    #[test]
    fn nested_loops_run_inline() {
        let pool = ThreadPool::new(3);
        let count = AtomicUsize::new(0);
        pool.parallel_for(6, 1, |begin, end, _| {
            let me = thread::current().id();
            pool.parallel_for((end - begin) * 10, 1, |b, e, _| {
                assert_eq!(thread::current().id(), me);
                count.fetch_add(e - b, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 60);
    }

    #[test]
    fn callers_take_turns() {
        let pool = ThreadPool::new(2);
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.parallel_for(8, 1, |b, e, _| {
                            total.fetch_add(e - b, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 200 * 8);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.parallel_for(2, 1, |begin, _, _| assert!(begin == 0, "piece {begin}"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.parallel_for(10, 1, |b, e, _| {
            sum.fetch_add((b..e).sum(), Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
