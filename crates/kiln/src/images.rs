//! Pictures that a GPU decodes, crops, scales and normalises.
//!
//! GPUs for data centres (A100, H100, H200 and later) have engines for JPEGs beside their multiprocessors. A
//! training step goes on while they decode the next batch. [`decode`] makes a batch of files, [`engines`]
//! says whether the device can. Pictures that the host has decoded ([`Pixels::Rgb`]) are scaled and
//! normalised on any GPU.
//!
//! Start the program with `CUDA_DEVICE_MAX_CONNECTIONS=32` in its environment, or set it ([`QUEUES`],
//! [`ENOUGH_QUEUES`]) before anything else: with the 8 queues to a GPU that a process has otherwise, files
//! are not decoded before the step that runs is over. A GPU that many processes share is the faster for it if
//! only those that decode set the variable.
//!
//! ```no_run
//! use burn_autodiff::Autodiff;
//! use kiln::images::{Frame, Picture, Pixels, Rectangle, View, decode, engines};
//! use kiln::{Kiln, KilnDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = KilnDevice::cuda(0);
//! println!("{} engines", engines(&device)?);
//! let file = std::fs::read("photograph.jpeg")?; // of 500 by 375 pixels
//! let view = View {
//!     from: Rectangle { x: 40, y: 10, width: 300, height: 320 },
//!     scaled: (224, 224),
//!     window: (0, 0),
//!     mirrored: true,
//! };
//! let picture = Picture { pixels: Pixels::Jpeg(&file), width: 500, height: 375, view };
//! let frame = Frame { width: 224, height: 224, scale: [1.0 / 255.0; 3], shift: [0.0; 3] };
//! let batch = decode::<Autodiff<Kiln>>(&[picture], &frame, &device)?;
//! assert_eq!(batch.dims(), [1, 3, 224, 224]);
//! # Ok(())
//! # }
//! ```

use burn_tensor::{DType, Shape, Tensor, TensorPrimitive};
use kiln_burn::gpu_tensor::GpuTensor;
use kiln_burn::{KilnClient, KilnDevice};
use kiln_cuda::CudaError;
use kiln_cuda::execute::Gpu;
use std::sync::Arc;

pub use kiln_cuda::pictures::{ENOUGH_QUEUES, Frame, Picture, Pixels, QUEUES, Rectangle, View};

use crate::input::KilnBackend;

/// Why pictures are not decoded on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The device is no GPU.
    #[error("pictures are decoded on GPUs, and {0:?} is none")]
    NoGpu(KilnDevice),
    /// The GPU has no engines, a library is missing, a file is of a kind that the engines do not take, or the
    /// GPU failed.
    #[error(transparent)]
    Gpu(#[from] CudaError),
}

/// How many engines for JPEGs a device has, at least 1.
///
/// # Errors
///
/// [`ImageError`] if it has none, or nvJPEG is not there.
pub fn engines(device: &KilnDevice) -> Result<u32, ImageError> {
    Ok(gpu(device)?.decoder()?.engines()?)
}

/// Decodes pictures into a batch `[pictures, 3, height, width]` of `f32` on a GPU: of each picture what its
/// view shows, a level from 0 to 255 times the frame's scale plus its shift, channel by channel.
///
/// The host waits until the files are decoded, not for the rest. Scaling is bilinear and averages where it
/// shrinks, as Pillow does it: a level is within one of the exact average of the decoded pixels, rounded.
/// Decoders round differently: the engines' pixels are not those of a decoder on the host to the bit.
///
/// # Errors
///
/// [`ImageError`], also if one file is no JPEG that the engines take (baseline, of one scan) or a picture has
/// not the size that is given. The next batch is not affected.
pub fn decode<B: KilnBackend>(
    pictures: &[Picture<'_>],
    frame: &Frame,
    device: &KilnDevice,
) -> Result<Tensor<B, 4>, ImageError> {
    let _span = kiln_profile::span(kiln_profile::Category::Data, "image decoding");
    let gpu = gpu(device)?;
    let batch = gpu.decoder()?.batch(pictures, frame)?;
    let shape = [pictures.len(), 3, frame.height as usize, frame.width as usize];
    let tensor = GpuTensor::new(&gpu, batch, Shape::from(shape), DType::F32);
    let tensor = KilnClient::new(*device).adopt(tensor.into());
    Ok(Tensor::from_primitive(TensorPrimitive::Float(B::from_kiln(
        tensor,
    ))))
}

fn gpu(device: &KilnDevice) -> Result<Arc<Gpu>, ImageError> {
    let ordinal = device.place().gpu().ok_or(ImageError::NoGpu(*device))?;
    Ok(Gpu::get(ordinal)?)
}
