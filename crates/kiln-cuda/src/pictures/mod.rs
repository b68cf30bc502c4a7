//! Batches of pictures that a GPU decodes, crops, scales and normalises.
//!
//! ```text
//! files ──► engines ──► pixels of all pictures ──► rows scaled ──► columns scaled, mirrored, normalised
//!  host      nvJPEG        8 bits, as decoded                         f32 [pictures, 3, height, width]
//! ```
//!
//! GPUs for data centres have engines for JPEGs beside their multiprocessors: an H100 decodes 22,000
//! photographs of 500 by 375 pixels a second with them, sixteen of its host's processors 6,000, and a training
//! step goes on meanwhile. [`Decoder`] has a stream of its own, on which a batch is prepared while the step
//! before it runs. A picture that the engines do not take comes decoded ([`Pixels::Rgb`]).

mod engines;
mod layout;

use std::sync::{Arc, Mutex, PoisonError};

pub use layout::{Frame, Layout, Picture, Pixels, Rectangle, View, source};

use crate::build::Compiler;
use crate::error::{CudaError, Result};
use crate::libraries::Nvjpeg;
use crate::runtime::{Arguments, Device, Kernel, Launch, Module, Storage, Stream};
use engines::{Engines, Job};
use layout::{COLUMNS, ROWS};

/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks that share a picture.
const BLOCKS: u32 = 32;

/// Decodes batches of pictures on a device.
#[derive(Debug)]
pub struct Decoder {
    stream: Stream,
    engines: Mutex<Engines>,
    count: u32,
    rows: Kernel,
    columns: Kernel,
}

impl Decoder {
    /// Starts the engines of a device.
    ///
    /// # Errors
    /// [`CudaError::Pictures`] if the device has no such engines; those of [`Compiler::compile`],
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn new(device: &Device, library: Nvjpeg, compiler: &Compiler) -> Result<Self> {
        let engines = Engines::start(device, library)?;
        let code = compiler.compile(&[source()])?;
        let module = Module::load(device, "pictures", &code[0].image)?;
        Ok(Self {
            stream: device.stream()?,
            count: engines.count(),
            engines: Mutex::new(engines),
            rows: module.kernel(ROWS)?,
            columns: module.kernel(COLUMNS)?,
        })
    }

    /// How many engines the device has.
    pub fn engines(&self) -> u32 {
        self.count
    }

    /// The pictures as `f32`, `[pictures, 3, height, width]`. JPEGs are decoded when this returns, the rest is
    /// under way; whoever uses the result waits for it on the device.
    ///
    /// # Errors
    /// [`CudaError::Pictures`] if the engines do not take one of the JPEGs, or a size is not that of its
    /// picture; [`CudaError::OutOfMemory`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn batch(&self, pictures: &[Picture<'_>], frame: &Frame) -> Result<Arc<Storage>> {
        let layout = Layout::new(pictures, frame)?;
        let stream = &self.stream;
        let allocate = |bytes| Storage::allocate(stream, bytes).map(Arc::new);
        let table = allocate(layout.table.len())?;
        stream.write(&layout.table, &table, 0)?;
        let decoded = allocate(layout.decoded_bytes)?;
        let mut jobs = Vec::with_capacity(pictures.len());
        for (picture, &at) in pictures.iter().zip(&layout.places) {
            match picture.pixels {
                Pixels::Rgb(rgb) => stream.write(rgb, &decoded, at)?,
                Pixels::Jpeg(bytes) => jobs.push(Job {
                    bytes,
                    width: picture.width,
                    height: picture.height,
                    at,
                }),
            }
        }
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.decode(&jobs, &decoded, stream)?;
        let is_decoded = stream.record()?;
        let narrowed = allocate(layout.narrowed_bytes)?;
        let result = allocate(pictures.len() * frame.elements() * size_of::<f32>())?;
        if !pictures.is_empty() {
            let launch = |kernel: &Kernel, from: &Arc<Storage>, to: &Arc<Storage>| {
                let launch = Launch {
                    kernel: kernel.clone(),
                    grid: [pictures.len() as u32, BLOCKS, 1],
                    block: [THREADS, 1, 1],
                    shared_bytes: 0,
                    arguments: Arguments::new().memory(&table, 0).memory(from, 0).memory(to, 0),
                };
                // SAFETY: the table is of these pictures, and the layout has put all that it names inside the
                // two storages.
                unsafe { stream.launch(&launch) }
            };
            launch(&self.rows, &decoded, &narrowed)?;
            launch(&self.columns, &narrowed, &result)?;
        }
        result.end_use()?;
        // The files are the caller's again.
        is_decoded.synchronize()?;
        Ok(result)
    }
}

/// An error about pictures.
fn error(what: impl Into<String>) -> CudaError {
    CudaError::Pictures { what: what.into() }
}
