//! Batches of pictures that a GPU decodes, crops, scales and normalises.
//!
//! ```text
//! files ──► engines ──► pixels of all pictures ──► rows scaled ──► columns scaled, mirrored, normalised
//!  host      nvJPEG        8 bits, as decoded                         f32 [pictures, 3, height, width]
//! ```
//!
//! GPUs for data centres have engines for JPEGs beside their multiprocessors: an H100 decodes 22,000
//! photographs of 500 by 375 pixels a second with them, sixteen of its host's processors 6,000, and a
//! training step goes on meanwhile. [`Decoder`] has a stream of its own, on which a batch is prepared while
//! the step before it runs. A picture that the engines do not take comes decoded ([`Pixels::Rgb`]), and so do
//! all of them where there are no engines.
//!
//! nvJPEG spreads a batch over some 14 streams of its own. A process has 8 queues to the device unless
//! `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise, and a stream that shares its queue with a training step
//! waits for the end of it: a batch of 128 then takes 24 ms beside a step of 19 in place of 7 (H100). The
//! variable is read once, when the driver starts, so the program sets it, and only where pictures are
//! decoded: ten processes that each use 32 queues of one GPU at once take more than five times as long as
//! with 8 (H200).

mod engines;
mod layout;

use std::sync::{Arc, Mutex, PoisonError};

pub use layout::{Frame, Layout, Picture, Pixels, Rectangle, View, source};

use crate::build::Compiler;
use crate::error::{CudaError, Result};
use crate::libraries::{Nvjpeg, Search};
use crate::runtime::{Arguments, Device, Kernel, Launch, Module, Staging, Storage, Stream};
use engines::{Engines, Job};
use layout::{COLUMNS, ROWS, check_all};

/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks that share a picture.
const BLOCKS: u32 = 32;

/// Bytes of pixels that are decoded at a time, unless a decoder is told otherwise: 900 photographs of 500 by
/// 375 pixels, or seven of 24 million.
const MOST_DECODED: usize = 512 << 20;

/// The variable with the number of queues to a device.
pub const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// The value of [`QUEUES`] that lets a batch be decoded beside a training step: the most that there can be.
pub const ENOUGH_QUEUES: &str = "32";

/// Makes batches of pictures on a device.
#[derive(Debug)]
pub struct Decoder {
    device: Device,
    stream: Stream,
    staging: Staging,
    rows: Kernel,
    columns: Kernel,
    /// Where nvJPEG is looked for.
    search: Search,
    /// Started by the first who asks for them.
    engines: Mutex<Option<Engines>>,
    /// Bytes of pixels that are decoded at a time.
    most: usize,
}

impl Decoder {
    /// A decoder on a device. `search` says where nvJPEG is looked for, once it is needed.
    ///
    /// # Errors
    /// Those of [`Compiler::compile`]; [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn new(device: &Device, compiler: &Compiler, search: Search) -> Result<Self> {
        let code = compiler.compile(&[source()])?;
        let module = Module::load(device, "pictures", &code[0].image)?;
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            staging: Staging::default(),
            rows: module.kernel(ROWS)?,
            columns: module.kernel(COLUMNS)?,
            search,
            engines: Mutex::default(),
            most: MOST_DECODED,
        })
    }

    /// Decodes at most `bytes` bytes of pixels at a time, three a pixel, or one picture.
    #[must_use]
    pub fn with_most_decoded(self, bytes: usize) -> Self {
        Self { most: bytes, ..self }
    }

    /// How many engines for JPEGs the device has.
    ///
    /// # Errors
    /// [`CudaError::Pictures`] if it has none; [`CudaError::MissingLibrary`] and [`CudaError::OldLibrary`] of
    /// nvJPEG.
    pub fn engines(&self) -> Result<u32> {
        self.with_engines(|engines| Ok(engines.count()))
    }

    fn with_engines<R>(&self, work: impl FnOnce(&mut Engines) -> Result<R>) -> Result<R> {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *engines {
            Some(engines) => work(engines),
            none => {
                let started = Engines::start(&self.device, Nvjpeg::open(&self.search)?)?;
                warn_of_few_queues();
                work(none.insert(started))
            }
        }
    }

    /// The pictures as `f32`, `[pictures, 3, height, width]`. JPEGs are decoded when this returns, the rest
    /// is under way; whoever uses the result waits for it on the device.
    ///
    /// # Errors
    /// [`CudaError::Pictures`] if the engines do not take one of the JPEGs, or a size is not that of its
    /// picture; those of [`Decoder::engines`] if there are JPEGs; [`CudaError::OutOfMemory`],
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn batch(&self, pictures: &[Picture<'_>], frame: &Frame) -> Result<Arc<Storage>> {
        // Before any part, so that an error has a picture's number in the whole batch.
        check_all(pictures, frame)?;
        let each = frame.elements() * size_of::<f32>();
        let result = Arc::new(Storage::allocate(&self.stream, pictures.len() * each)?);
        let mut done = 0;
        for part in parts(pictures, self.most) {
            self.part(part, frame, &result, done * each)?;
            done += part.len();
        }
        result.end_use()?;
        Ok(result)
    }

    /// Makes a part of a batch, from byte `at` of the result on.
    fn part(&self, pictures: &[Picture<'_>], frame: &Frame, result: &Arc<Storage>, at: usize) -> Result<()> {
        let layout = Layout::new(pictures, frame)?;
        let stream = &self.stream;
        let allocate = |bytes| Storage::allocate(stream, bytes).map(Arc::new);
        let table = allocate(layout.table.len())?;
        self.staging.upload(stream, &layout.table, &table)?;
        let decoded = allocate(layout.decoded_bytes)?;
        self.decode(pictures, &layout, &decoded)?;
        let narrowed = allocate(layout.narrowed_bytes)?;
        let launch = |kernel: &Kernel, arguments: Arguments| {
            let launch = Launch {
                kernel: kernel.clone(),
                grid: [pictures.len() as u32, BLOCKS, 1],
                block: [THREADS, 1, 1],
                shared_bytes: 0,
                arguments,
            };
            // SAFETY: the table is of these pictures, the layout has put all that it names inside the two
            // storages, and the result has room for all pictures from `at` on.
            unsafe { stream.launch(&launch) }
        };
        let given = || Arguments::new().memory(&table, 0);
        launch(&self.rows, given().memory(&decoded, 0).memory(&narrowed, 0))?;
        launch(&self.columns, given().memory(&narrowed, 0).memory(result, at))
    }

    /// Puts the pixels of all pictures into their places.
    fn decode(&self, pictures: &[Picture<'_>], layout: &Layout, decoded: &Storage) -> Result<()> {
        let (mut jobs, mut ready) = (Vec::new(), Vec::new());
        for (picture, &at) in pictures.iter().zip(&layout.places) {
            match picture.pixels {
                Pixels::Rgb(rgb) => ready.push((rgb, at)),
                Pixels::Jpeg(bytes) => jobs.push(Job {
                    bytes,
                    width: picture.width,
                    height: picture.height,
                    at,
                }),
            }
        }
        if jobs.is_empty() && layout.decoded_bytes <= Staging::MOST {
            return self
                .staging
                .fill(&self.stream, layout.decoded_bytes, decoded, |block| {
                    for (rgb, at) in ready {
                        block[at..at + rgb.len()].copy_from_slice(rgb);
                    }
                });
        }
        for (rgb, at) in ready {
            self.stream.write(rgb, decoded, at)?;
        }
        if jobs.is_empty() {
            return Ok(());
        }
        let queued = self.with_engines(|engines| engines.decode(&jobs, decoded, &self.stream));
        // When this returns the files are the caller's again, and the memory may be freed: where the library
        // has given up, its own streams may still be busy with the pictures before the one at fault.
        match queued {
            Ok(()) => self.stream.record()?.synchronize(),
            Err(error) => self.device.synchronize().and(Err(error)),
        }
    }
}

/// Pictures of a batch that are decoded together: as many as have at most `bytes` bytes of pixels, at least
/// one.
fn parts<'a, 'b>(pictures: &'a [Picture<'b>], bytes: usize) -> impl Iterator<Item = &'a [Picture<'b>]> {
    let mut rest = pictures;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fits = |picture: &&Picture<'_>| {
            sum += picture.bytes();
            sum <= bytes
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (part, behind) = rest.split_at_checked(count)?;
        rest = behind;
        Some(part)
    })
}

/// Says that pictures will wait for steps, if so.
fn warn_of_few_queues() {
    let queues = std::env::var(QUEUES);
    if queues.as_deref() != Ok(ENOUGH_QUEUES) {
        let set = queues.map_or_else(|_| "not set".to_owned(), |queues| format!("{queues:?}"));
        kiln_log::warn!(
            "{QUEUES} is {set}: pictures that the GPU decodes wait for the step that runs, unless it is \
             {ENOUGH_QUEUES} when the program starts"
        );
    }
}

/// An error about pictures.
fn error(what: impl Into<String>) -> CudaError {
    CudaError::Pictures { what: what.into() }
}
