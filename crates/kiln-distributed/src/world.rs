//! The ranks, as the program sees them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kiln_graph::{CollectiveKind, DType};

use crate::agree::{self, Fact};
use crate::carried::{Carried, Carrier, Carriers};
use crate::cpus::{self, Cpus};
use crate::engine::{Done, Engine, Order, PATIENCE, Rate, StepTag, Task, What};
use crate::environment::{Launcher, Place};
use crate::error::Error;
use crate::link::{self, Link};
use crate::mpi;
use crate::rendezvous::{Meeting, Star};
use crate::sum::sum;

/// How long ranks wait for each other when they start, at least: a library may come over a slow network.
const LONGEST_START: Duration = Duration::from_secs(60);

/// The longest timeout.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// How ranks are connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a rank waits for another one in a collective, at most a year. Default: 60 s.
    pub timeout: Duration,
    /// The MPI library. Default: the environment variable `KILN_MPI`, or else that of whoever started the process.
    pub library: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            library: std::env::var("KILN_MPI").ok(),
        }
    }
}

/// All ranks, seen from this process. A handle: clones are the same world, and the last one that is dropped says
/// goodbye to the other ranks, which must have come to their end, too.
///
/// Every rank calls the same methods in the same order. After an error nothing connects the ranks any more.
#[derive(Clone, Debug)]
pub struct World {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    place: Place,
    timeout: Duration,
    library: Option<String>,
    /// This rank's share of the CPUs that it may use.
    threads: usize,
    /// None where there is one process.
    orders: Option<Mutex<Sender<Order>>>,
    /// What moves large operands where no MPI does.
    carriers: Carriers,
    /// How long collectives take, once that was measured.
    link: OnceLock<Link>,
    /// Nanoseconds that callers have waited for collectives.
    waited: AtomicU64,
    /// The learning rate of the step that runs, bit for bit.
    rate: AtomicU64,
}

impl std::fmt::Debug for dyn Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Carrier")
    }
}

/// The world of this process; a process has one.
static WORLD: Mutex<Option<Weak<Inner>>> = Mutex::new(None);

/// [`init_with`] the default options.
///
/// # Errors
/// Those of [`init_with`].
pub fn init() -> Result<World, Error> {
    init_with(Options::default())
}

/// Connects the ranks that the environment speaks of; a process that nobody started as one of several is one rank.
/// A second call gives the same world, as long as there is a handle of it.
///
/// # Errors
/// [`Error::Environment`] if the environment makes no sense, [`Error::NoLibrary`], [`Error::UnknownLibrary`],
/// [`Error::MixedWorld`] and [`Error::Mpi`] if there is no MPI, or not the right one; [`Error::Start`],
/// [`Error::Timeout`] and [`Error::Gone`] if another rank does not start. Under `torchrun`, which starts
/// no MPI, [`Error::Meeting`], [`Error::Worlds`] and [`Error::Timeout`] if the ranks do not meet.
pub fn init_with(options: Options) -> Result<World, Error> {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    match world.as_ref().map(Weak::upgrade) {
        Some(Some(inner)) => return Ok(World { inner }),
        Some(None) => {
            let reason = "the last handle of the world was dropped, and MPI connects a process only once";
            return Err(Error::Broken(reason.into()));
        }
        None => {}
    }
    let place = Place::read(|name| std::env::var(name).ok())?;
    let inner = connect(place, options)?;
    if inner.orders.is_some() {
        *world = Some(Arc::downgrade(&inner));
    }
    Ok(World { inner })
}

/// The world that [`init`] connected, while there is a handle of it; none where there is one rank.
pub fn current() -> Option<World> {
    let world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    let inner = world.as_ref().and_then(Weak::upgrade)?;
    Some(World { inner })
}

/// A world of `ranks` ranks of which this process is rank 0, and in which all others hold what it holds: each collective
/// gives at once what it would give then. A step that is compiled for so many ranks runs in it, without them; that is how
/// their time is predicted.
///
/// # Errors
/// [`Error::Broken`] if the process is in a world, or was in one.
pub fn imagine(ranks: usize) -> Result<World, Error> {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    if world.is_some() {
        return Err(Error::Broken(
            "the process has a world, and cannot imagine another one".into(),
        ));
    }
    let place = Place {
        size: ranks.max(1),
        ..Place::ALONE
    };
    let inner = Arc::new(Inner::of_one_process(place, Options::default().timeout));
    if ranks > 1 {
        *world = Some(Arc::downgrade(&inner));
    }
    Ok(World { inner })
}

impl Inner {
    fn of_one_process(place: Place, timeout: Duration) -> Self {
        Self {
            place,
            timeout,
            library: None,
            threads: cpus::share(&[], place.rank, cpus::allowed(), place.local_size),
            orders: None,
            carriers: Carriers::default(),
            link: OnceLock::new(),
            waited: AtomicU64::new(0),
            rate: AtomicU64::new(0),
        }
    }
}

fn connect(place: Place, mut options: Options) -> Result<Arc<Inner>, Error> {
    // Times are added to it.
    options.timeout = options.timeout.min(LONGEST_WAIT);
    let alone = |place| Inner::of_one_process(place, options.timeout);
    if place.size == 1 {
        return Ok(Arc::new(alone(place)));
    }
    if place.launcher == Launcher::Torchrun {
        let (orders, carriers) = meet(place, options.timeout)?;
        let mut met = alone(place);
        met.orders = Some(Mutex::new(orders));
        met.carriers = carriers;
        return Ok(Arc::new(met));
    }
    let (named, timeout) = (options.library.clone(), options.timeout);
    let (orders, incoming) = channel();
    let (told, connected) = channel();
    let cpus = Cpus::own();
    let thread = std::thread::Builder::new().name("kiln ranks".into());
    let spawned = thread.spawn(move || {
        // MPI counts the thread that connects as the one that makes all calls.
        let loaded = mpi::load(&place, named).and_then(|(functions, library)| {
            let found = functions.init().map_err(|(function, code)| Error::Mpi {
                rank: place.rank,
                function,
                code,
                about: String::new(),
            })?;
            match found == (place.rank, place.size) {
                true => Ok((functions, library)),
                false => Err(Error::MixedWorld {
                    launcher: place.launcher.name(),
                    rank: place.rank,
                    size: place.size,
                    library,
                    found_rank: found.0,
                    found_size: found.1,
                }),
            }
        });
        let introduced = loaded.and_then(|(functions, library)| {
            let engine = Engine::new(functions, place.rank, place.size);
            Ok((engine.introduce(&cpus, timeout.max(LONGEST_START))?, library))
        });
        match introduced {
            Ok(((engine, all), library)) => {
                let _ = told.send(Ok((library, all)));
                engine.run(&incoming);
            }
            Err(error) => {
                let _ = told.send(Err(error));
            }
        }
    });
    spawned.map_err(|error| Error::Broken(format!("no thread for them could be started: {error}")))?;
    let introduced = connected.recv_timeout(2 * timeout.max(LONGEST_START));
    let (library, all) = introduced.map_err(|_| Error::Start {
        rank: place.rank,
        size: place.size,
        waited: 2 * timeout.max(LONGEST_START),
    })??;
    kiln_profile::set_rank(u32::try_from(place.rank).unwrap_or(u32::MAX - 1));
    tracing::info!(target: "kiln", rank = place.rank, size = place.size, library, "ranks are connected");
    let mut connected = alone(place);
    connected.library = Some(library);
    connected.threads = cpus::share(&all, place.rank, cpus::allowed(), place.local_size);
    connected.orders = Some(Mutex::new(orders));
    Ok(Arc::new(connected))
}

/// Connects ranks that no MPI connects, and starts their thread.
fn meet(place: Place, timeout: Duration) -> Result<(Sender<Order>, Carriers), Error> {
    let meeting = Meeting::read(|name| std::env::var(name).ok())?;
    let star = Star::connect(&meeting, &place, timeout)?;
    let carriers = Carriers::default();
    let engine = Carried::new(star, carriers.clone(), place.rank, place.size);
    let (orders, incoming) = channel();
    let thread = std::thread::Builder::new().name("kiln ranks".into());
    let spawned = thread.spawn(move || engine.run(&incoming));
    spawned.map_err(|error| Error::Broken(format!("no thread for them could be started: {error}")))?;
    kiln_profile::set_rank(u32::try_from(place.rank).unwrap_or(u32::MAX - 1));
    tracing::info!(target: "kiln", rank = place.rank, size = place.size, "ranks have met");
    Ok((orders, carriers))
}

/// A collective under way.
#[derive(Debug)]
#[must_use = "the memory of the operand and of the result is lent until it is waited for"]
pub struct Ticket {
    /// None where there was nothing to do.
    done: Option<Arc<Done>>,
    /// Keeps the connection.
    world: World,
}

impl std::fmt::Debug for Done {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Done")
    }
}

impl Ticket {
    /// Waits until the result is there.
    ///
    /// # Errors
    /// If another rank did not take part in time, or does something else, or MPI fails. The result is then
    /// undefined.
    pub fn wait(mut self) -> Result<(), Error> {
        let Some(done) = self.done.take() else {
            return Ok(());
        };
        let begun = Instant::now();
        let result = done.wait();
        let waited = begun.elapsed().as_nanos() as u64;
        self.world.inner.waited.fetch_add(waited, Ordering::Relaxed);
        result
    }
}

impl Drop for Ticket {
    /// Waits: the memory is lent until then.
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = done.wait();
        }
    }
}

/// A collective, its element type and its memory, for [`World::start`].
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// What it computes.
    pub kind: CollectiveKind,
    /// Whether a sum is divided by the number of ranks. Integers are not.
    pub mean: bool,
    /// The rank that [`CollectiveKind::FromRoot`] takes.
    pub root: usize,
    /// Type of the elements.
    pub dtype: DType,
    /// The operand.
    pub from: *const u8,
    /// Bytes of the operand, the same number on every rank.
    pub bytes: usize,
    /// The result, of as many bytes; times the number of ranks for [`CollectiveKind::AllGather`], divided by it
    /// for [`CollectiveKind::ReduceScatter`]. It may begin where the operand does.
    pub to: *mut u8,
}

impl World {
    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.inner.place.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.inner.place.size
    }

    /// The number of this rank among those of its machine; also that of the GPU it should take.
    pub fn local_rank(&self) -> usize {
        self.inner.place.local_rank
    }

    /// How many ranks share its machine.
    pub fn local_size(&self) -> usize {
        self.inner.place.local_size
    }

    /// How many threads this rank should compute with: its share of the CPUs that it may use. Ranks that the
    /// launcher bound to the same CPUs share them, and so do all ranks of a machine where it bound none; a
    /// rank with CPUs of its own has all of these. Ranks that `torchrun` started, which compute on GPUs,
    /// share those of their machine.
    pub fn threads(&self) -> usize {
        self.inner.threads
    }

    /// Whether this is rank 0, which logs and saves.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Who started the ranks.
    pub fn launcher(&self) -> Launcher {
        self.inner.place.launcher
    }

    /// The MPI library; none where there is one rank.
    pub fn library(&self) -> Option<&str> {
        self.inner.library.as_deref()
    }

    /// Gives the world what moves large operands: ranks that `torchrun` started have nothing else that does. Every
    /// rank gives one. Where MPI connects the ranks this changes nothing.
    pub fn carry_by(&self, carrier: Box<dyn Carrier>) {
        let mut carriers = self.inner.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        *carriers = Some(carrier);
    }

    /// Whether it was given what moves large operands.
    pub fn has_carrier(&self) -> bool {
        let carriers = self.inner.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        carriers.is_some()
    }

    /// Whether MPI connects the ranks, which moves operands of any size between hosts.
    pub fn has_mpi(&self) -> bool {
        self.inner.library.is_some()
    }

    /// The error of a rank that has waited so long for `what`, which nobody but the ranks themselves can tell the
    /// state of: the ranks that wait call each other, and whoever does not answer within a quarter of the timeout is
    /// named.
    pub fn missing(&self, what: &str, waited: Duration) -> Error {
        let (rank, what) = (self.rank(), what.to_owned());
        match self.gather(&[], self.inner.timeout / 4) {
            Ok(_) => Error::Stuck { rank, waited, what },
            Err(Error::Timeout { missing, .. }) => Error::Timeout {
                rank,
                missing,
                waited,
                what,
            },
            Err(Error::Gone { missing, .. }) => Error::Gone { rank, missing, what },
            Err(error) => error,
        }
    }

    /// How long ranks wait for each other.
    pub fn timeout(&self) -> Duration {
        self.inner.timeout
    }

    /// How long the program has waited for collectives since the ranks were connected: communication that nothing
    /// hid, and what the ranks waited for each other.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.inner.waited.load(Ordering::Relaxed))
    }

    /// How long collectives take. The first call measures it, which takes some milliseconds, and gives rank 0's
    /// result to all; so all ranks make it at the same place of their program. None where no MPI connects them.
    ///
    /// # Errors
    /// As [`World::all_reduce`].
    pub fn link(&self) -> Result<Option<Link>, Error> {
        // What connects GPUs that torchrun started carries no operand of the host.
        if self.inner.orders.is_none() || self.inner.place.launcher == Launcher::Torchrun {
            return Ok(None);
        }
        if let Some(link) = self.inner.link.get() {
            return Ok(Some(*link));
        }
        let link = *self.inner.link.get_or_init({
            let link = link::measure(self)?;
            move || link
        });
        if self.is_first() {
            tracing::info!(target: "kiln", ranks = self.size(), "the link between the ranks: {link}");
        }
        Ok(Some(link))
    }

    /// Begins a collective. It goes on while the program does something else, behind those that were begun before.
    ///
    /// # Errors
    /// [`Error::Operands`] if they do not fit, [`Error::Broken`] if nothing connects the ranks any more.
    ///
    /// # Safety
    /// Operand and result must stay valid for the bytes that [`Operands`] says until the ticket was waited for or
    /// dropped; until then nobody may write the operand or touch the result.
    pub unsafe fn start(&self, operands: Operands) -> Result<Ticket, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.start_in(StepTag::default(), operands) }
    }

    /// [`World::start`], of a step that compares itself with those of the other ranks.
    ///
    /// # Errors
    /// As [`World::start`]; the ticket's, if another rank runs a step that has no business with this one, are
    /// [`Error::Differs`].
    ///
    /// # Safety
    /// As [`World::start`].
    pub(crate) unsafe fn start_in(&self, step: StepTag, operands: Operands) -> Result<Ticket, Error> {
        let rate = Rate(self.inner.rate.load(Ordering::Relaxed));
        // SAFETY: the caller's promise.
        unsafe { self.begin(operands, (rate, step), self.inner.timeout) }
    }

    /// Tells the other ranks that this one may be late for its next collective, because it compiles: they wait up to
    /// ten minutes for it. Ranks that torchrun started have no such message.
    ///
    /// # Errors
    /// [`Error::Broken`] if nothing connects the ranks any more.
    pub fn be_late(&self) -> Result<(), Error> {
        let Some(orders) = &self.inner.orders else {
            return Ok(());
        };
        let order = Order {
            task: Task {
                what: What::Late,
                dtype: DType::U8,
                bytes: 0,
                rate: Rate::default(),
                step: StepTag::default(),
            },
            from: std::ptr::null(),
            to: std::ptr::null_mut(),
            done: Arc::default(),
            timeout: self.inner.timeout,
        };
        let orders = orders.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = |_| Error::Broken("the thread that connects them has ended".into());
        orders.send(order).map_err(ended)
    }

    /// Notes the learning rate of the steps from here on. Where ranks have different ones, their next sum or
    /// [`World::start`] is [`Error::Differs`] on all of them: their parameters would not be the same any
    /// more. (What NCCL carries is not compared.)
    pub fn set_rate(&self, rate: f64) {
        self.inner.rate.store(rate.to_bits(), Ordering::Relaxed);
    }

    /// # Safety
    /// As [`World::start`].
    unsafe fn begin(
        &self,
        operands: Operands,
        (rate, step): (Rate, StepTag),
        timeout: Duration,
    ) -> Result<Ticket, Error> {
        let Operands {
            kind,
            mean,
            root,
            dtype,
            from,
            bytes,
            to,
        } = operands;
        let wrong = |reason: String| {
            Err(Error::Operands(format!(
                "{kind} of {bytes} bytes of {dtype}: {reason}"
            )))
        };
        if !bytes.is_multiple_of(dtype.size()) {
            return wrong("they are no whole elements".into());
        }
        if kind.reduces() && dtype == DType::Bool {
            return wrong("bools have no sum".into());
        }
        if root >= self.size() {
            return wrong(format!("there is no rank {root}"));
        }
        if kind == CollectiveKind::ReduceScatter && !(bytes / dtype.size()).is_multiple_of(self.size()) {
            return wrong(format!("they do not divide among {} ranks", self.size()));
        }
        let Some(orders) = &self.inner.orders else {
            // SAFETY: the caller's promise.
            unsafe { self.give(&operands) };
            return Ok(self.ticket(None));
        };
        let task = Task {
            what: What::Collective(kind, mean, root),
            dtype,
            bytes,
            rate,
            step,
        };
        let done = Arc::new(Done::default());
        let order = Order {
            task,
            from,
            to,
            done: done.clone(),
            timeout,
        };
        let orders = orders.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = |_| Error::Broken("the thread that connects them has ended".into());
        orders.send(order).map_err(ended)?;
        drop(orders);
        Ok(self.ticket(Some(done)))
    }

    /// The result of a collective where this is the only process: all ranks have its operand.
    ///
    /// # Safety
    /// As [`World::start`].
    unsafe fn give(&self, operands: &Operands) {
        let &Operands {
            kind,
            mean,
            dtype,
            from,
            bytes,
            to,
            ..
        } = operands;
        let count = match kind {
            CollectiveKind::ReduceScatter => bytes / self.size(),
            _ => bytes,
        };
        match kind {
            // Equal numbers have themselves for a mean.
            CollectiveKind::AllReduce | CollectiveKind::ReduceScatter if !(mean && dtype.is_float()) => {
                // SAFETY: the operand has `bytes`.
                let own = unsafe { std::slice::from_raw_parts(from, count) }.to_vec();
                // SAFETY: the result has `count`; the operand is not read any more.
                let out = unsafe { std::slice::from_raw_parts_mut(to, count) };
                sum(dtype, &vec![&own[..]; self.size()], false, out);
            }
            CollectiveKind::AllGather => {
                for rank in (0..self.size()).rev() {
                    // SAFETY: the result has `bytes` for each rank. Where it begins with the operand, that is
                    // written last, with itself.
                    unsafe { std::ptr::copy(from, to.add(rank * bytes), bytes) };
                }
            }
            // SAFETY: operand and result have so many bytes, and may overlap.
            _ => unsafe { std::ptr::copy(from, to, count) },
        }
    }

    fn ticket(&self, done: Option<Arc<Done>>) -> Ticket {
        Ticket {
            done,
            world: self.clone(),
        }
    }

    /// Replaces the elements by their sums over all ranks, or by their means.
    ///
    /// # Errors
    /// Those of [`World::start`] and [`Ticket::wait`].
    pub fn all_reduce(&self, dtype: DType, mean: bool, bytes: &mut [u8]) -> Result<(), Error> {
        let operands = Operands {
            kind: CollectiveKind::AllReduce,
            mean,
            root: 0,
            dtype,
            from: bytes.as_ptr(),
            bytes: bytes.len(),
            to: bytes.as_mut_ptr(),
        };
        // SAFETY: the bytes are borrowed until it is over.
        unsafe { self.start(operands)? }.wait()
    }

    /// The sums over all ranks of this rank's block of the elements, of as many blocks as there are ranks; or the
    /// means.
    ///
    /// # Errors
    /// As [`World::all_reduce`]; also if the elements do not divide among the ranks.
    pub fn reduce_scatter(&self, dtype: DType, mean: bool, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        let mut block = vec![0; bytes.len() / self.size()];
        let operands = Operands {
            kind: CollectiveKind::ReduceScatter,
            mean,
            root: 0,
            dtype,
            from: bytes.as_ptr(),
            bytes: bytes.len(),
            to: block.as_mut_ptr(),
        };
        // SAFETY: as above; a block has its share of the bytes.
        unsafe { self.start(operands)? }.wait()?;
        Ok(block)
    }

    /// The bytes of all ranks, in the order of ranks; as many from each.
    ///
    /// # Errors
    /// As [`World::all_reduce`].
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        self.gather(bytes, self.inner.timeout)
    }

    fn gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<u8>, Error> {
        let mut all = vec![0; bytes.len() * self.size()];
        let operands = Operands {
            kind: CollectiveKind::AllGather,
            mean: false,
            root: 0,
            dtype: DType::U8,
            from: bytes.as_ptr(),
            bytes: bytes.len(),
            to: all.as_mut_ptr(),
        };
        // SAFETY: as above; the result has room for the bytes of every rank.
        unsafe { self.begin(operands, Default::default(), timeout)? }.wait()?;
        Ok(all)
    }

    /// Replaces the bytes by those of rank `root`, which must be as many.
    ///
    /// # Errors
    /// As [`World::all_reduce`].
    pub fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.share(root, bytes, self.inner.timeout)
    }

    /// [`World::broadcast`], waiting as long as [`World::agree`] does.
    ///
    /// # Errors
    /// As [`World::all_reduce`].
    pub fn broadcast_patiently(&self, root: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.share(root, bytes, self.inner.timeout.max(PATIENCE))
    }

    fn share(&self, root: usize, bytes: &mut [u8], timeout: Duration) -> Result<(), Error> {
        let operands = Operands {
            kind: CollectiveKind::FromRoot,
            mean: false,
            root,
            dtype: DType::U8,
            from: bytes.as_ptr(),
            bytes: bytes.len(),
            to: bytes.as_mut_ptr(),
        };
        // SAFETY: the bytes are borrowed until it is over.
        unsafe { self.begin(operands, Default::default(), timeout)? }.wait()
    }

    /// Makes sure that every rank has the same facts, each a name and a value, such as what a step computes. Waits
    /// longer than other collectives: another rank may still be compiling.
    ///
    /// # Errors
    /// [`Error::Disagreement`], on every rank, naming the first rank that differs from rank 0, and in what; and as
    /// [`World::all_reduce`].
    pub fn agree(&self, facts: &[(&str, String)]) -> Result<(), Error> {
        let fact = |(name, value): &(&str, String)| Fact::of_all(*name, value);
        self.agree_on(&facts.iter().map(fact).collect::<Vec<_>>())
    }

    /// [`World::agree`], of facts of which some are compared only among some ranks.
    ///
    /// # Errors
    /// As [`World::agree`]; the error names the first two ranks that differ.
    pub fn agree_on(&self, facts: &[Fact]) -> Result<(), Error> {
        if self.size() == 1 || self.inner.orders.is_none() {
            return Ok(());
        }
        agree::compare(&self.gather_all(&agree::encode(facts))?)
    }

    /// The bytes of every rank, of any number each.
    fn gather_all(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let patience = self.inner.timeout.max(PATIENCE);
        let lengths = self.gather(&(bytes.len() as u64).to_le_bytes(), patience)?;
        let (lengths, _) = lengths.as_chunks::<8>();
        let lengths: Vec<usize> = lengths
            .iter()
            .map(|&length| u64::from_le_bytes(length) as usize)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = self.gather(&padded, self.inner.timeout)?;
        let own = |(rank, &length): (usize, &usize)| all[rank * longest..rank * longest + length].to_vec();
        Ok(lengths.iter().enumerate().map(own).collect())
    }
}

impl Drop for Inner {
    /// Says goodbye, and waits for the others to do so.
    fn drop(&mut self) {
        let Some(orders) = &self.orders else { return };
        let done = Arc::new(Done::default());
        let order = Order {
            task: Task {
                what: What::Goodbye,
                dtype: DType::U8,
                bytes: 0,
                rate: Rate::default(),
                step: StepTag::default(),
            },
            from: std::ptr::null(),
            to: std::ptr::null_mut(),
            done: done.clone(),
            timeout: self.timeout.max(PATIENCE),
        };
        let orders = orders.lock().unwrap_or_else(PoisonError::into_inner);
        if orders.send(order).is_ok()
            && let Err(error) = done.wait()
            && !matches!(error, Error::Broken(_))
        {
            kiln_log::error!(target: "kiln", "the ranks do not end together: {error}");
        }
    }
}
