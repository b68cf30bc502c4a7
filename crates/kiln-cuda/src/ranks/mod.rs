//! A device among those of all ranks: NCCL's collectives on its streams, and a watch on them.
//!
//! [`Ranks::connect`] joins the device with those of the other ranks, and tries NCCL before it trusts it
//! (`trial`). [`Ranks::queue`] queues a collective on a stream, which may be one that is captured into a
//! step's graph. NCCL's kernels wait on the device for those of the other ranks, so a rank that has died
//! would leave them, and everybody who waits for the stream, waiting for ever. Whoever queued collectives
//! therefore has them *watched*: a thread looks whether the stream gets past them. If it does not within the
//! timeout, the thread finds out which rank is missing ([`kiln_distributed::World::missing`]) and aborts
//! NCCL, which ends its kernels. From then on every call says who was missing ([`Ranks::check`]); what the
//! aborted collectives left behind is nobody's result. Calls of NCCL's are watched in the same way: the first
//! of a kind connects the ranks, and waits for all of them.
//!
//! ```text
//!   step ──► graph launch ──► event ──► watch ──past it──► nothing
//!                                         └──timeout──► who is missing? ──► abort ──► error of every later call
//! ```
//!
//! `ncclCommAbort` ends the kernels first, and returns when every graph is destroyed that has NCCL's calls,
//! which may be at the end of the process. Nobody waits for it, therefore, and the process has a limited time
//! to end ([`exit`]). Where kernels do not end, the device is given up ([`Device::call_off`]), and whoever
//! waits for it gets that error.

mod carrier;
mod exit;
mod trial;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use carrier::DeviceCarrier;
use kiln_distributed::nccl::{Communicator, Nccl, Shape, UniqueId};
use kiln_distributed::{Error, World, current};

use crate::error::{CudaError, Result};
use crate::products::Place;
use crate::runtime::{Device, Event, Stream};

/// How long the watch sleeps between two looks at the device.
const NAP: Duration = Duration::from_millis(5);

/// Looks at the device between two looks at NCCL's own errors.
const LOOKS: u32 = 20;

/// The device among those of all ranks. Cheap to clone; clones are one.
#[derive(Clone, Debug)]
pub struct Ranks {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    communicator: ManuallyDrop<Communicator>,
    /// Whoever calls NCCL holds it.
    calls: Mutex<()>,
    /// The call of NCCL's that is under way.
    calling: Mutex<Option<Calling>>,
    /// Why NCCL was aborted, if it was.
    failed: OnceLock<Error>,
    /// Whether somebody has heard why.
    told: AtomicBool,
    timeout: Duration,
    /// Whether calls can be captured, once that was tried.
    captures: OnceLock<bool>,
    watched: Mutex<VecDeque<Watched>>,
    /// Something is watched, or nobody is left to watch for.
    changed: Condvar,
}

/// A call of NCCL's.
#[derive(Debug)]
struct Calling {
    since: Instant,
    what: Arc<str>,
}

/// Collectives that the device has not done yet.
#[derive(Debug)]
struct Watched {
    /// Behind them.
    event: Event,
    since: Instant,
    /// What they belong to, for people.
    what: Arc<str>,
}

impl Ranks {
    /// Connects `device` with those of the other ranks of `world`; every rank calls it at the same place of its
    /// program. `nccl` is the library, or why there is none: then no rank waits for this one.
    ///
    /// # Errors
    /// That of `nccl`; [`CudaError::Ranks`] if ranks have different versions of NCCL, do not take part, NCCL
    /// fails, for example because two ranks have one GPU, or it computes other sums than expected.
    pub fn connect(device: &Device, nccl: Result<Nccl>, world: &World) -> Result<Self> {
        // NCCL and the driver register handlers of their own meanwhile.
        exit::limit();
        let version = match &nccl {
            Ok(nccl) => nccl.version(),
            Err(_) => "none".to_owned(),
        };
        let agreed = world.agree(&[("the version of its NCCL", version)]);
        let nccl = nccl?;
        agreed?;
        let made = match world.is_first() {
            true => Some(nccl.unique_id()),
            false => None,
        };
        // Others learn of a failure by the first byte.
        let mut bytes = [0; 1 + UniqueId::BYTES];
        if let Some(Ok(id)) = &made {
            bytes[0] = 1;
            bytes[1..].copy_from_slice(&id.0);
        }
        world.broadcast_patiently(0, &mut bytes)?;
        if let Some(Err(error)) = made {
            return Err(error.into());
        }
        let [1, id @ ..] = bytes else {
            return Err(Error::Broken("rank 0 has no id of NCCL's".into()).into());
        };
        let about = (world.rank(), world.size());
        let communicator = within(world, device, move || {
            nccl.connect(UniqueId(id), about.0, about.1)
        })?;
        tracing::info!(
            target: "kiln",
            rank = about.0,
            size = about.1,
            "cuda:{} is connected through NCCL {}",
            device.ordinal(),
            communicator.library().version()
        );
        let ranks = Self::new(device, communicator, world.timeout())?;
        trial::run(&ranks, world)?;
        exit::limit();
        Ok(ranks)
    }

    /// The device of this communicator. Whoever waits for other ranks does so for at most `timeout`.
    ///
    /// # Errors
    /// [`CudaError::Ranks`] if the watch cannot start.
    pub fn new(device: &Device, communicator: Communicator, timeout: Duration) -> Result<Self> {
        device.share();
        let inner = Arc::new(Inner {
            device: device.clone(),
            communicator: ManuallyDrop::new(communicator),
            calls: Mutex::new(()),
            calling: Mutex::default(),
            failed: OnceLock::new(),
            told: AtomicBool::new(false),
            timeout,
            captures: OnceLock::new(),
            watched: Mutex::default(),
            changed: Condvar::new(),
        });
        let watcher = Arc::downgrade(&inner);
        let thread = std::thread::Builder::new().name("kiln NCCL watch".into());
        let spawned = thread.spawn(move || watch(&watcher));
        spawned.map_err(|error| Error::Broken(format!("no thread for NCCL could be started: {error}")))?;
        Ok(Self { inner })
    }

    /// Whether NCCL's calls can be captured into a graph. Otherwise steps are queued call by call, and their
    /// collectives run behind the backward pass, not beside it.
    pub fn can_capture(&self) -> bool {
        *self.inner.captures.get_or_init(|| {
            let tried = trial::capture(self);
            if let Err(error) = &tried {
                kiln_log::warn!(
                    target: "kiln",
                    "NCCL's calls cannot be captured into a graph, so steps of several ranks are queued call by call: {error}"
                );
            }
            tried.is_ok()
        })
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.inner.communicator.size()
    }

    /// An error if an earlier collective was given up.
    ///
    /// # Errors
    /// [`CudaError::Ranks`], which names the missing rank.
    pub fn check(&self) -> Result<()> {
        match self.inner.failed.get() {
            Some(error) => {
                self.inner.told.store(true, Ordering::Release);
                Err(CudaError::Ranks(error.clone()))
            }
            None => Ok(()),
        }
    }

    /// Queues a collective on `stream`, which may be capturing. The places are equal or apart.
    ///
    /// # Errors
    /// [`CudaError::Range`] if a place is too small, [`CudaError::TwoDevices`], [`CudaError::Ranks`],
    /// [`CudaError::Lost`].
    pub fn queue(&self, stream: &Stream, shape: &Shape, from: Place<'_>, to: Place<'_>) -> Result<()> {
        const ACTION: &str = "queuing a collective of all ranks";
        let inner = &*self.inner;
        self.check()?;
        inner.device.same_as(stream.device(), ACTION)?;
        if shape.elements == 0 {
            return Ok(());
        }
        let (operand, result) = shape.bytes(self.size());
        let address =
            |(storage, at): Place<'_>, bytes: usize| storage.part(&(at..at.saturating_add(bytes)), ACTION);
        let (operand, result) = (address(from, operand)?, address(to, result)?);
        from.0.take_to(stream)?;
        to.0.take_to(stream)?;
        let _calls = inner.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        inner.device.enter()?;
        let what: Arc<str> = Arc::from(shape.to_string());
        inner.device.note_launch(&what);
        inner.set_calling(Some(what));
        // SAFETY: both places are as large as the shape says, and are freed in the order of this stream, or
        // kept by the graph that it is captured into; the lock keeps other calls apart.
        let queued = unsafe { inner.communicator.queue(shape, operand, result, stream.raw().0) };
        inner.set_calling(None);
        // A call that was ended says less than why.
        self.check()?;
        Ok(queued?)
    }

    /// Watches over what is queued on `stream` so far.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn watch(&self, stream: &Stream, what: &Arc<str>) -> Result<()> {
        let watched = Watched {
            event: stream.record()?,
            since: Instant::now(),
            what: what.clone(),
        };
        let mut list = self.inner.watched.lock().unwrap_or_else(PoisonError::into_inner);
        list.push_back(watched);
        self.inner.changed.notify_one();
        Ok(())
    }
}

impl Drop for Inner {
    /// Leaves the other ranks, for which NCCL may have to wait.
    fn drop(&mut self) {
        // NCCL has freed what it aborted.
        if self.failed.get().is_some() {
            return;
        }
        // SAFETY: taken here once, and not used afterwards.
        let communicator = unsafe { ManuallyDrop::take(&mut self.communicator) };
        let (device, (told, left)) = (self.device.clone(), channel());
        let leave = move || {
            match device.enter() {
                Ok(()) => drop(communicator),
                Err(_) => communicator.forget(),
            }
            let _ = told.send(());
        };
        let thread = std::thread::Builder::new().name("kiln NCCL end".into());
        if thread.spawn(leave).is_ok() && left.recv_timeout(self.timeout).is_err() {
            kiln_log::warn!(target: "kiln", "NCCL does not leave the other ranks");
        }
    }
}

/// Does `work`, which waits for other ranks, on a thread with the device's context, for at most the world's
/// timeout. The thread stays behind if it takes longer.
fn within(
    world: &World,
    device: &Device,
    work: impl FnOnce() -> std::result::Result<Communicator, Error> + Send + 'static,
) -> Result<Communicator> {
    let (told, done) = channel();
    let device = device.clone();
    let thread = std::thread::Builder::new().name("kiln NCCL start".into());
    let spawned = thread.spawn(move || {
        let made = device.enter().and_then(|()| Ok(work()?));
        let _ = told.send(made);
    });
    spawned.map_err(|error| Error::Broken(format!("no thread for NCCL could be started: {error}")))?;
    done.recv_timeout(world.timeout()).unwrap_or_else(|_| {
        exit::note_failure();
        Err(world.missing("NCCL's start", world.timeout()).into())
    })
}

/// Looks after what is watched as long as somebody has the ranks.
fn watch(ranks: &Weak<Inner>) {
    let (mut looks, mut past) = (0u32, Instant::now());
    while let Some(inner) = ranks.upgrade() {
        let (what, since) = match inner.oldest() {
            // The device is lost, which its own calls say.
            Err(_) => return,
            Ok(Oldest::Done) => {
                past = Instant::now();
                continue;
            }
            Ok(Oldest::Nothing) => continue,
            Ok(Oldest::Call(what, since)) => (what, since),
            // What is queued behind others has its time from when they are done.
            Ok(Oldest::Queued(what, since)) => (what, since.max(past)),
        };
        looks = looks.wrapping_add(1);
        let fault = match looks.is_multiple_of(LOOKS) {
            true => inner.communicator.look().err(),
            false => None,
        };
        let waited = since.elapsed();
        if fault.is_some() || waited > inner.timeout {
            give_up(&inner, &what, fault, waited.min(inner.timeout));
            return;
        }
        drop(inner);
        std::thread::sleep(NAP);
    }
}

/// What has waited the longest.
enum Oldest {
    /// Nothing waits.
    Nothing,
    /// What had is done.
    Done,
    /// A call of NCCL's, and when it began.
    Call(Arc<str>, Instant),
    /// Something that the device has not done, and when it was queued.
    Queued(Arc<str>, Instant),
}

/// How long the answer of another rank may take beyond the time that the ranks give each other.
const ANSWER: Duration = Duration::from_secs(6);

/// How long kernels may take to end, at most, once NCCL was aborted.
const LONGEST_END: Duration = Duration::from_secs(10);

impl Inner {
    fn set_calling(&self, what: Option<Arc<str>>) {
        let since = Instant::now();
        let calling = what.map(|what| Calling { since, what });
        *self.calling.lock().unwrap_or_else(PoisonError::into_inner) = calling;
        self.changed.notify_one();
    }

    /// What waits the longest; takes it off the list if it is done. Sleeps for a while if nothing waits.
    ///
    /// # Errors
    /// [`CudaError::Lost`], [`CudaError::Driver`].
    fn oldest(&self) -> Result<Oldest> {
        let calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        let call = calling.as_ref().map(|call| (call.what.clone(), call.since));
        drop(calling);
        let mut list = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if call.is_none() && list.is_empty() {
            // Not for ever: whoever has the ranks may drop them without a word.
            let waited = self.changed.wait_timeout(list, 10 * NAP);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            return Ok(Oldest::Nothing);
        }
        if let Some(first) = list.front() {
            if first.event.has_happened()? {
                let done = list.pop_front();
                drop(list);
                drop(done);
                return Ok(Oldest::Done);
            }
            if call.is_none() {
                return Ok(Oldest::Queued(first.what.clone(), first.since));
            }
        }
        Ok(call.map_or(Oldest::Nothing, |(what, since)| Oldest::Call(what, since)))
    }

    /// What the ranks say of each other; none where nobody can be asked, or the world itself waits for NCCL.
    fn roll_call(&self, what: &str, waited: Duration) -> Option<Error> {
        let world = current()?;
        let (told, heard) = channel();
        let what = what.to_owned();
        let thread = std::thread::Builder::new().name("kiln roll call".into());
        let spawned = thread.spawn(move || {
            let _ = told.send(world.missing(&what, waited));
        });
        spawned.ok()?;
        heard.recv_timeout(self.timeout / 4 + ANSWER).ok()
    }

    /// Why the ranks are given up: who is missing, if the ranks can tell.
    fn reason(&self, what: &str, fault: Option<Error>, waited: Duration) -> Error {
        let stuck = |fault: Option<Error>| {
            fault.unwrap_or_else(|| Error::Stuck {
                rank: self.communicator.rank(),
                waited,
                what: what.to_owned(),
            })
        };
        match self.roll_call(what, waited) {
            None | Some(Error::Stuck { .. }) => stuck(fault),
            Some(Error::Broken(_)) if fault.is_some() => stuck(fault),
            Some(error) => error,
        }
    }

    /// Whether everything that is watched is over within `time`, one way or another.
    fn ends_within(&self, time: Duration) -> bool {
        let begun = Instant::now();
        loop {
            let list = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            let over = list
                .iter()
                .all(|one| !matches!(one.event.has_happened(), Ok(false)));
            drop(list);
            let calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
            if over && calling.is_none() {
                return true;
            }
            drop(calling);
            if begun.elapsed() > time {
                return false;
            }
            std::thread::sleep(NAP);
        }
    }

    /// Ends NCCL's calls and kernels.
    fn abort(self: &Arc<Self>) {
        // A call that is under way in NCCL may itself wait for a rank, so it is not waited for for long.
        let begun = Instant::now();
        let mut calls = self.calls.try_lock();
        while calls.is_err() && begun.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(NAP);
            calls = self.calls.try_lock();
        }
        drop(calls);
        // It waits for the graphs that have its calls, so on a thread that nobody waits for.
        let inner = self.clone();
        let thread = std::thread::Builder::new().name("kiln NCCL abort".into());
        let spawned = thread.spawn(move || {
            let _ = inner.device.enter();
            inner.communicator.abort();
        });
        if let Err(error) = spawned {
            kiln_log::error!(target: "kiln", "NCCL is not aborted, since no thread could be started: {error}");
        }
    }
}

/// Finds out who is missing, and ends what waits for him.
fn give_up(inner: &Arc<Inner>, what: &str, fault: Option<Error>, waited: Duration) {
    let error = inner.reason(what, fault, waited);
    kiln_log::error!(target: "kiln", "{error}");
    let text = error.to_string();
    let _ = inner.failed.set(error);
    exit::note_failure();
    inner.device.set_ending(true);
    inner.abort();
    if inner.ends_within(inner.timeout.min(LONGEST_END)) {
        inner.device.set_ending(false);
        return;
    }
    inner.device.call_off("ncclCommAbort");
    // Whoever waits in a way that can be ended hears of it now. A call of the driver's or of NCCL's cannot.
    let begun = Instant::now();
    while !inner.told.load(Ordering::Acquire) {
        if begun.elapsed() > inner.timeout {
            kiln_log::error!(target: "kiln", "the process ends, since nothing ends what it waits for: {text}");
            exit::now(1);
        }
        std::thread::sleep(NAP);
    }
}
