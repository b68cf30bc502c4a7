//! A device with everything that the steps on it share.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kiln_distributed::World;

use crate::build::{CacheFolder, Compiler, Key, Store, code_store};
use crate::convolutions::{Convolution, Convolver, Found, Plan, PlanLimits, PreparedConvolution};
use crate::error::{CudaError, Result};
use crate::libraries::{CublasLt, Cudnn, Driver, Nvrtc, Search, open_nccl};
use crate::pictures::Decoder;
use crate::products::{Choice, Multiplier, Product, SearchLimits};
use crate::ranks::Ranks;
use crate::runtime::{Device, Staging, Storage, Stream};
use crate::target::CudaTarget;

/// A device in use by this process.
///
/// Steps run on one stream, one after the other, so that they can share the memory of their intermediate
/// values. Inputs arrive on another stream: what a step reads is copied while the step before it runs.
pub struct Gpu {
    device: Device,
    stream: Stream,
    /// Copies to the device.
    copies: Stream,
    /// Copies to the host of what no step will touch any more.
    reads: Stream,
    compiler: Compiler,
    /// cuBLASLt, opened by the first step that multiplies matrices.
    multiplier: OnceLock<Multiplier>,
    /// The algorithms that were found for products, by their description and the bytes of working memory that
    /// they may have.
    choices: Mutex<HashMap<(Product, usize), Choice>>,
    /// Times of kernels of Kiln's own, as parts of the library's.
    shares: Mutex<HashMap<Key, f32>>,
    /// cuDNN, looked for when the first step is compiled; none if the machine has none.
    cudnn: OnceLock<Option<Cudnn>>,
    /// cuDNN on this device, started by the first step with a convolution; none if it does not start.
    convolver: OnceLock<Option<Convolver>>,
    /// The plans that were found for convolutions in so many bytes of working memory; none for those that the
    /// library does not take.
    plans: Mutex<Plans>,
    /// Whether a plan's result is looked at before it may be chosen.
    checks_plans: bool,
    /// Steps and algorithms of earlier processes.
    store: Store,
    staging: Staging,
    /// What decodes pictures, started by the first batch of them.
    decoder: OnceLock<Decoder>,
    /// The other ranks, once the device is connected with theirs; whoever connects it holds the lock.
    ranks: OnceLock<Ranks>,
    connecting: Mutex<()>,
    /// Memory of intermediate values, the largest step's: whoever queues a step holds the lock.
    arena: Mutex<Option<Arc<Storage>>>,
}

/// Plans by convolution and bytes of working memory.
type Plans = HashMap<(Convolution, usize), Option<Arc<PreparedConvolution>>>;

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({:?})", self.device)
    }
}

/// The devices that are in use.
static GPUS: Mutex<Vec<(usize, Arc<Gpu>)>> = Mutex::new(Vec::new());

impl Gpu {
    /// Device `ordinal`, opened at its first use.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] and [`CudaError::OldLibrary`] of the driver and of NVRTC,
    /// [`CudaError::NoDevice`], [`CudaError::UnknownArchitecture`], [`CudaError::Driver`].
    pub fn get(ordinal: usize) -> Result<Arc<Self>> {
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, gpu)) = gpus.iter().find(|(own, _)| *own == ordinal) {
            return Ok(gpu.clone());
        }
        let search = Search::from_env();
        let device = Device::open(&Driver::open(&search)?, ordinal)?;
        let gpu = Arc::new(Self::new(&device, Nvrtc::open(&search)?)?);
        gpus.push((ordinal, gpu.clone()));
        Ok(gpu)
    }

    /// A device that no other [`Gpu`] shares; `nvrtc` compiles for it.
    ///
    /// # Errors
    /// [`CudaError::UnknownArchitecture`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn new(device: &Device, nvrtc: Nvrtc) -> Result<Self> {
        Self::in_cache(device, nvrtc, &CacheFolder::from_env())
    }

    /// As [`Gpu::new`], keeping machine code, steps and algorithms in `cache`.
    ///
    /// # Errors
    /// Those of [`Gpu::new`].
    pub fn in_cache(device: &Device, nvrtc: Nvrtc, cache: &CacheFolder) -> Result<Self> {
        let capability = device.description().capability;
        Ok(Self {
            stream: device.stream()?,
            copies: device.stream()?,
            reads: device.stream()?,
            compiler: Compiler::new(nvrtc, capability, code_store(cache))?,
            device: device.clone(),
            multiplier: OnceLock::new(),
            choices: Mutex::default(),
            shares: Mutex::default(),
            cudnn: OnceLock::new(),
            convolver: OnceLock::new(),
            plans: Mutex::default(),
            checks_plans: true,
            store: cache.store("cuda-steps", "data"),
            staging: Staging::default(),
            decoder: OnceLock::new(),
            ranks: OnceLock::new(),
            connecting: Mutex::default(),
            arena: Mutex::default(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The stream that steps run on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What compiles kernels for this device.
    pub(super) fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// Steps and algorithms on disk.
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// What steps for this device are compiled for.
    pub fn target(&self) -> CudaTarget {
        CudaTarget {
            cudnn: self.cudnn().is_some(),
            ..CudaTarget::of(self.device.description())
        }
    }

    /// cuDNN, if it is there.
    fn cudnn(&self) -> Option<&Cudnn> {
        let find = || {
            let found = Cudnn::open(&Search::from_env());
            found
                .inspect_err(|error| tracing::info!("convolutions use Kiln's own kernels: {error}"))
                .ok()
        };
        self.cudnn.get_or_init(find).as_ref()
    }

    /// Has this device compute convolutions through `library` instead of the one that the environment
    /// names.
    #[must_use]
    pub fn with_cudnn(self, library: Option<Cudnn>) -> Self {
        Self {
            cudnn: OnceLock::from(library),
            ..self
        }
    }

    /// Takes the library's plans as they are: a stand-in for it computes no results to look at.
    #[must_use]
    pub fn without_checks_of_plans(self) -> Self {
        Self {
            checks_plans: false,
            ..self
        }
    }

    /// Connects the device with those of all ranks of `world`, at the first call; every rank makes it at the same
    /// place of its program.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] without NCCL; those of [`Ranks::connect`].
    pub fn connect(&self, world: &World) -> Result<&Ranks> {
        let _connecting = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ranks) = self.ranks.get() {
            return Ok(ranks);
        }
        let made = Ranks::connect(&self.device, open_nccl(&Search::from_env()), world)?;
        Ok(self.ranks.get_or_init(|| made))
    }

    /// The other ranks, if the device is connected with theirs.
    pub fn ranks(&self) -> Option<&Ranks> {
        self.ranks.get()
    }

    /// Has steps of this device communicate through `ranks`.
    #[must_use]
    pub fn with_ranks(self, ranks: Ranks) -> Self {
        Self {
            ranks: OnceLock::from(ranks),
            ..self
        }
    }

    /// Memory for `bytes` bytes, used on the steps' stream first.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn allocate(&self, bytes: usize) -> Result<Arc<Storage>> {
        Ok(Arc::new(Storage::allocate(&self.stream, bytes)?))
    }

    /// The bytes in the device's memory. The host does not wait for the copy.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::OutOfPinnedMemory`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn upload(&self, bytes: &[u8]) -> Result<Arc<Storage>> {
        let storage = Storage::allocate(&self.copies, bytes.len())?;
        self.staging.upload(&self.copies, bytes, &storage)?;
        // The steps that use it wait for this copy and not for later ones.
        storage.end_use()?;
        Ok(Arc::new(storage))
    }

    /// Copies what is in the device's memory to the host, after everything that steps do with it. Where the
    /// end of that is marked, as it is for the small results of a replayed step, nothing that was queued
    /// later is waited for: a program may look at a loss while the next step runs.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::Driver`], [`CudaError::Lost`]; [`CudaError::Ranks`] if a collective was
    /// given up, whose result the bytes may be.
    pub fn download(&self, storage: &Storage, bytes: &mut [u8]) -> Result<()> {
        // Nothing that came of collectives that were given up is worth waiting for.
        self.ranks().map_or(Ok(()), Ranks::check)?;
        let read = match storage.has_end() {
            true => self.read_beside(storage, bytes),
            false => self.stream.read(storage, 0, bytes),
        };
        self.ranks().map_or(Ok(()), Ranks::check)?;
        read
    }

    /// Copies on a stream that steps do not wait for. The next use is on the steps' stream again, also if the
    /// copy failed: memory is freed in the order of the stream that steps use it on.
    fn read_beside(&self, storage: &Storage, bytes: &mut [u8]) -> Result<()> {
        let read = self.reads.read(storage, 0, bytes);
        let back = storage.take_to(&self.stream);
        read.and(back)
    }

    /// A copy in the device's memory.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn duplicate(&self, storage: &Storage) -> Result<Arc<Storage>> {
        let copy = self.allocate(storage.bytes())?;
        self.stream.copy(storage, 0..storage.bytes(), &copy, 0)?;
        Ok(copy)
    }

    /// Does `work` with working memory of at least `bytes` bytes. Steps share it: their kernels follow each
    /// other on one stream, and no other step is queued between them, whichever thread asks.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Driver`], [`CudaError::Lost`]; those of `work`.
    pub(super) fn with_arena<R, E: From<CudaError>>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Arc<Storage>) -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let known = arena.take().filter(|known| known.bytes() >= bytes);
        // The old arena and a larger one do not exist at once: the smaller one is freed by now, unless a
        // graph still uses it.
        let own = match known {
            Some(known) => known,
            None => self.allocate(bytes.max(256))?,
        };
        work(arena.insert(own))
    }

    /// cuBLASLt on this device.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OldLibrary`], [`CudaError::Product`].
    pub(super) fn multiplier(&self) -> Result<&Multiplier> {
        if let Some(multiplier) = self.multiplier.get() {
            return Ok(multiplier);
        }
        let made = Multiplier::new(&self.device, CublasLt::open(&Search::from_env())?)?;
        Ok(self.multiplier.get_or_init(|| made))
    }

    /// The algorithm for a product: known, on disk, or searched for now.
    ///
    /// # Errors
    /// Those of [`Multiplier::search`].
    pub(super) fn choice(&self, product: &Product, workspace: usize) -> Result<Choice> {
        let multiplier = self.multiplier()?;
        let mut choices = self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let own = (product.clone(), workspace);
        if let Some(known) = choices.get(&own) {
            return Ok(known.clone());
        }
        let description = format!("{product:?} {workspace}");
        let key = Key::of([
            "product",
            &self.device.description().name,
            multiplier.version(),
            &description,
        ]);
        let stored = self
            .store
            .get(&key)
            .and_then(|found| serde_json::from_slice(&found.content).ok());
        let choice: Choice = match stored {
            Some(choice) => choice,
            None => {
                let limits = SearchLimits {
                    workspace_bytes: workspace as u64,
                    ..SearchLimits::default()
                };
                let found = multiplier.search(&self.stream, product, limits)?;
                // Later, or for another process, there may be memory to try them on.
                if found.timed > 0
                    && let Ok(bytes) = serde_json::to_vec(&found)
                {
                    self.store.put(&key, &bytes, "choice of an algorithm", "");
                }
                found
            }
        };
        choices.insert(own, choice.clone());
        Ok(choice)
    }

    /// The time of a kernel as a part of another way's, if that was measured before, by this process or by an
    /// earlier one.
    pub(super) fn known_share(&self, key: &Key) -> Option<f32> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&known) = shares.get(key) {
            return Some(known);
        }
        let stored = self.store.get(key)?;
        let known = serde_json::from_slice(&stored.content).ok()?;
        shares.insert(*key, known);
        Some(known)
    }

    /// Keeps the time of a kernel as a part of another way's.
    pub(super) fn keep_share(&self, key: &Key, share: f32) {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.insert(*key, share);
        if let Ok(bytes) = serde_json::to_vec(&share) {
            self.store.put(key, &bytes, "time of a kernel", "");
        }
    }

    /// cuDNN on this device, if it starts. It finds cuBLASLt only where that was opened before.
    pub(super) fn convolver(&self) -> Option<&Convolver> {
        let start = || {
            let library = self.cudnn()?.clone();
            if let Err(error) = CublasLt::open(&Search::from_env()) {
                tracing::debug!("cuDNN starts without cuBLASLt: {error}");
            }
            let started = Convolver::new(&self.device, library);
            started
                .inspect_err(|error| kiln_log::warn!("convolutions use Kiln's own kernels: {error}"))
                .ok()
        };
        self.convolver.get_or_init(start).as_ref()
    }

    /// What makes batches of pictures on this device.
    ///
    /// # Errors
    /// Those of [`Decoder::new`].
    pub fn decoder(&self) -> Result<&Decoder> {
        if let Some(decoder) = self.decoder.get() {
            return Ok(decoder);
        }
        let made = Decoder::new(&self.device, &self.compiler, Search::from_env())?;
        Ok(self.decoder.get_or_init(|| made))
    }

    /// The convolution with the library's fastest plan in `workspace` bytes of working memory: known, on
    /// disk, or searched for now. None if the library is not there or does not take the convolution.
    ///
    /// An answer that may be another one next time is not kept on disk: a plan that there was no memory to
    /// try, or a failure of the library's plans.
    ///
    /// # Errors
    /// [`CudaError::Lost`] and [`CudaError::Driver`].
    pub(super) fn plan(
        &self,
        convolution: &Convolution,
        workspace: usize,
    ) -> Result<Option<Arc<PreparedConvolution>>> {
        let Some(convolver) = self.convolver() else {
            return Ok(None);
        };
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (convolution.clone(), workspace);
        if let Some(known) = plans.get(&key) {
            return Ok(known.clone());
        }
        let description = format!("{convolution:?} {workspace}");
        let name = Key::of([
            "convolution checked beside its tensors",
            &self.device.description().name,
            convolver.version(),
            &description,
        ]);
        let stored = self.store.get(&name);
        let stored = stored.and_then(|found| serde_json::from_slice::<Option<Plan>>(&found.content).ok());
        let prepare = |plan: &Plan| taken(convolver.prepare(convolution, plan));
        let prepared = match stored {
            Some(None) => None,
            Some(Some(plan)) => prepare(&plan)?,
            None => {
                let limits = PlanLimits {
                    workspace_bytes: workspace,
                    checked: self.checks_plans,
                    ..PlanLimits::default()
                };
                let (prepared, kept) = match convolver.find(&self.stream, convolution, limits) {
                    Ok(Found::Plans(plan)) => {
                        let prepared = prepare(&plan)?;
                        if plan.timed == 0 {
                            kiln_log::warn!(
                                %convolution,
                                "no memory to try cuDNN's plans on: its first one is used, unchecked, until \
                                 this process ends"
                            );
                        }
                        let is_kept = prepared.is_some() && plan.timed > 0;
                        (prepared, is_kept.then_some(Some(plan)))
                    }
                    Ok(Found::Nothing(error)) => (taken(Err(error))?, Some(None)),
                    // Its plans failed, which they may not do another time.
                    Err(error @ CudaError::Convolution { .. }) => {
                        kiln_log::warn!("Kiln's own kernel, until this process ends: {error}");
                        (None, None)
                    }
                    Err(error) => return Err(error),
                };
                if let Some(kept) = kept
                    && let Ok(bytes) = serde_json::to_vec(&kept)
                {
                    self.store.put(&name, &bytes, "choice of a plan", "");
                }
                prepared
            }
        };
        let prepared = prepared.map(Arc::new);
        plans.insert(key, prepared.clone());
        Ok(prepared)
    }
}

/// The library's answer; none if it does not take the convolution, which Kiln's own kernels then compute.
fn taken<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error @ CudaError::Convolution { .. }) => {
            tracing::info!("Kiln's own kernel instead: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
