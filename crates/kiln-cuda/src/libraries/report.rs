//! The CUDA libraries and devices of a machine, in words: the lower half of `kiln backends`.

use std::fmt;

use super::{CublasLt, Cudnn, DeviceDescription, Driver, Library, Nvjpeg, Nvrtc, Search, open_nccl};
use crate::error::{CudaError, Result};

/// What was found, library by library, and the devices.
#[derive(Debug)]
pub struct Report {
    libraries: Vec<(Library, Result<(String, String)>)>,
    devices: Vec<Result<DeviceDescription>>,
}

impl Report {
    /// Opens every library and asks the driver for its devices. No memory is allocated on them.
    pub fn collect(search: &Search) -> Self {
        let driver = Driver::open(search);
        let devices = match &driver {
            Ok(driver) => match driver.device_count() {
                Ok(count) => (0..count).map(|ordinal| driver.describe(ordinal)).collect(),
                Err(error) => vec![Err(error)],
            },
            Err(_) => Vec::new(),
        };
        let shown = |version: &str, path: &std::path::Path| (version.to_owned(), path.display().to_string());
        let libraries = vec![
            (
                Library::Driver,
                driver.map(|driver| shown(driver.version(), driver.path())),
            ),
            (
                Library::Nvrtc,
                Nvrtc::open(search).map(|found| shown(&found.version, &found.path)),
            ),
            (
                Library::CublasLt,
                CublasLt::open(search).map(|found| shown(&found.version, &found.path)),
            ),
            (
                Library::Cudnn,
                Cudnn::open(search).map(|found| shown(&found.version, &found.path)),
            ),
            (
                Library::Nccl,
                open_nccl(search).map(|found| shown(&found.version(), found.path())),
            ),
            (
                Library::Nvjpeg,
                Nvjpeg::open(search).map(|found| shown(&found.version, &found.path)),
            ),
        ];
        Self { libraries, devices }
    }

    /// The devices that could be described.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceDescription> {
        self.devices.iter().filter_map(|device| device.as_ref().ok())
    }
}

impl fmt::Display for Report {
    /// One line for each library and device; then, once, where the missing libraries were looked for.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut looked = None;
        for (library, found) in &self.libraries {
            write!(f, "{:<11} ", library.name())?;
            match found {
                Ok((version, path)) => writeln!(f, "{version}, {path}")?,
                Err(CudaError::MissingLibrary {
                    library,
                    looked: here,
                }) => {
                    writeln!(f, "not found: {}", library.remedy())?;
                    for (path, reason) in &here.refused {
                        writeln!(f, "{:<11} {} does not open: {reason}", "", path.display())?;
                    }
                    looked = Some(here);
                }
                Err(error) => writeln!(f, "{error}")?,
            }
        }
        for device in &self.devices {
            match device {
                Ok(device) => writeln!(f, "{device}")?,
                Err(error) => writeln!(f, "{error}")?,
            }
        }
        if let Some(looked) = looked {
            writeln!(f, "looked in: {}", looked.places.join(", "))?;
            if !looked.unset.is_empty() {
                writeln!(f, "not set: {}", looked.unset.join(", "))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for DeviceDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        #[allow(clippy::cast_precision_loss, reason = "a size for people")]
        let gib = self.memory as f64 / f64::from(1 << 30);
        let device = format!("cuda:{}", self.ordinal);
        write!(
            f,
            "{device:<11} {}, compute capability {major}.{minor}, {gib:.1} GiB, {} multiprocessors",
            self.name, self.multiprocessors
        )
    }
}
