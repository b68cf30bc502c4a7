//! The engines of a device that decode JPEGs, through nvJPEG.

use std::ptr;

use super::error;
use crate::error::Result;
use crate::libraries::Nvjpeg;
use crate::runtime::{Device, Storage, Stream};
use crate::sys::nvjpeg::{
    BACKEND_HARDWARE, Image, JpegState, NvjpegHandle, NvjpegStatus, OUTPUT_RGBI, meaning,
};

/// A JPEG, and where its pixels go.
pub(super) struct Job<'a> {
    pub bytes: &'a [u8],
    pub width: u32,
    pub height: u32,
    /// Where among the decoded pixels.
    pub at: usize,
}

/// The engines. Calls change the library's state, so there is one at a time.
#[derive(Debug)]
pub(super) struct Engines {
    device: Device,
    library: Nvjpeg,
    handle: NvjpegHandle,
    state: JpegState,
    count: u32,
    /// JPEGs a call that the state was prepared for.
    prepared: usize,
}

impl Engines {
    /// Starts the engines of `device`.
    ///
    /// # Errors
    /// [`crate::CudaError::Pictures`] if it has none, [`crate::CudaError::Lost`].
    pub fn start(device: &Device, library: Nvjpeg) -> Result<Self> {
        device.enter()?;
        let mut engines = Self {
            device: device.clone(),
            library,
            handle: NvjpegHandle::NULL,
            state: JpegState::NULL,
            count: 0,
            prepared: 0,
        };
        let functions = engines.library.functions;
        // SAFETY: the device's context is current; without allocators the library takes CUDA's own. What was
        // created when a later call fails is destroyed with `engines`.
        unsafe {
            let handle = &raw mut engines.handle;
            check("nvjpegCreateEx", {
                (functions.nvjpegCreateEx)(BACKEND_HARDWARE, ptr::null_mut(), ptr::null_mut(), 0, handle)
            })?;
            let mut cores = 0;
            check("nvjpegGetHardwareDecoderInfo", {
                (functions.nvjpegGetHardwareDecoderInfo)(
                    engines.handle,
                    &raw mut engines.count,
                    &raw mut cores,
                )
            })?;
            check("nvjpegJpegStateCreate", {
                (functions.nvjpegJpegStateCreate)(engines.handle, &raw mut engines.state)
            })?;
        }
        match engines.count {
            0 => Err(error("the device has no engines for JPEGs")),
            _ => Ok(engines),
        }
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Queues the decoding of JPEGs, at least one, into `pixels` on `stream`: red, green and blue of a pixel beside each
    /// other, rows without gaps.
    ///
    /// # Errors
    /// [`crate::CudaError::Pictures`] if the library does not take one, or if it has another size;
    /// [`crate::CudaError::Lost`].
    pub fn decode(&mut self, jobs: &[Job<'_>], pixels: &Storage, stream: &Stream) -> Result<()> {
        pixels.take_to(stream)?;
        self.device.enter()?;
        let functions = self.library.functions;
        let count = i32::try_from(jobs.len()).map_err(|_| error("a batch of so many pictures"))?;
        if self.prepared != jobs.len() {
            self.prepared = 0;
            // SAFETY: handle and state are the library's.
            check("nvjpegDecodeBatchedInitialize", unsafe {
                (functions.nvjpegDecodeBatchedInitialize)(self.handle, self.state, count, 1, OUTPUT_RGBI)
            })?;
            self.prepared = jobs.len();
        }
        let mut images = Vec::with_capacity(jobs.len());
        for job in jobs {
            self.check_size(job)?;
            let row = job.width as usize * 3;
            // A range that is not inside the storage is an error here.
            let address = pixels.part(
                &(job.at..job.at + row * job.height as usize),
                "decoding a picture",
            )?;
            images.push(Image {
                channel: [address, 0, 0, 0],
                pitch: [row, 0, 0, 0],
            });
        }
        let data: Vec<*const u8> = jobs.iter().map(|job| job.bytes.as_ptr()).collect();
        let bytes: Vec<usize> = jobs.iter().map(|job| job.bytes.len()).collect();
        // SAFETY: the three arrays have an element for each JPEG, and every picture has room where it goes:
        // its size is the one that the library itself has read. The caller keeps the files until `stream` is
        // done.
        check("nvjpegDecodeBatched", unsafe {
            (functions.nvjpegDecodeBatched)(
                self.handle,
                self.state,
                data.as_ptr(),
                bytes.as_ptr(),
                images.as_mut_ptr(),
                stream.raw(),
            )
        })
    }

    /// Whether the library reads the size that room was made for.
    fn check_size(&self, job: &Job<'_>) -> Result<()> {
        let (mut components, mut sampling) = (0, 0);
        let (mut widths, mut heights) = ([0; 4], [0; 4]);
        // SAFETY: the file's bytes are all there; the others are pointers to as many integers as the function
        // writes.
        check("nvjpegGetImageInfo", unsafe {
            (self.library.functions.nvjpegGetImageInfo)(
                self.handle,
                job.bytes.as_ptr(),
                job.bytes.len(),
                &raw mut components,
                &raw mut sampling,
                widths.as_mut_ptr(),
                heights.as_mut_ptr(),
            )
        })?;
        let size = |side: i32| u32::try_from(side).unwrap_or(0);
        match (size(widths[0]), size(heights[0])) == (job.width, job.height) {
            true => Ok(()),
            false => Err(error(format!(
                "a JPEG of {}x{} pixels that was said to have {}x{}",
                widths[0], heights[0], job.width, job.height
            ))),
        }
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        if self.device.enter().is_err() {
            return;
        }
        let functions = self.library.functions;
        // SAFETY: both were created by `start`, where they are not null, and are destroyed here once.
        unsafe {
            if self.state != JpegState::NULL {
                (functions.nvjpegJpegStateDestroy)(self.state);
            }
            if self.handle != NvjpegHandle::NULL {
                (functions.nvjpegDestroy)(self.handle);
            }
        }
    }
}

/// Success, or an error with the library's answer.
fn check(call: &'static str, status: NvjpegStatus) -> Result<()> {
    match status {
        0 => Ok(()),
        status => Err(error(format!("{call} answered {} ({status})", meaning(status)))),
    }
}
