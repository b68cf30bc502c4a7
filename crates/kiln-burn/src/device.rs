//! The device: where tensors live and when operations run.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use burn_backend::{DeviceId, DeviceOps};
use burn_std::device::Device;

use crate::options::CompileBackend;

/// A Kiln device.
///
/// A device is a place, the CPU or an NVIDIA GPU, and a mode. **Eager** (the default) runs each operation at
/// once, except inside a compiled region. **Lazy** records until a value is read or `sync` is called, then
/// compiles and runs what was recorded; it carries the backend to run on.
///
/// Compiled steps of tensors on a GPU run on that GPU, and leave their results in its memory. An operation
/// outside of compiled steps runs there as a compiled step of one operation, made once for each shape. The
/// host runs operations on small tensors that are on the host already and, with copies and a warning,
/// operations that have no kernel on the GPU. An operation on tensors of two places is an error;
/// `to_device` moves tensors, and copies nothing before an operation needs the elements.
///
/// `Default` is the eager CPU unless the environment variable `KILN_DEVICE` says otherwise: `cpu`, `cuda`,
/// `cuda:ORDINAL`, `lazy`, or `lazy:BACKEND` with a name of [`CompileBackend`] (and `lazy:cuda:ORDINAL`).
/// That is how an unchanged program or test suite exercises the compiler.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KilnDevice {
    place: Place,
    mode: Mode,
}

/// Where tensors live.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// In the host's memory.
    Host,
    /// In the memory of the NVIDIA GPU of this ordinal.
    Cuda(u8),
}

impl Place {
    /// A number for it, from 0.
    pub(crate) const fn index(self) -> u8 {
        match self {
            Self::Host => 0,
            Self::Cuda(ordinal) => ordinal + 1,
        }
    }

    /// The place of a number.
    pub(crate) const fn from_index(index: u8) -> Self {
        match index.checked_sub(1) {
            None => Self::Host,
            Some(ordinal) => Self::Cuda(ordinal),
        }
    }

    /// The ordinal of the GPU, if it is one.
    pub const fn gpu(self) -> Option<usize> {
        match self {
            Self::Host => None,
            Self::Cuda(ordinal) => Some(ordinal as usize),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// When operations outside a compiled region run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// At once.
    Eager,
    /// When a value is needed, on this backend.
    Lazy(CompileBackend),
}

impl KilnDevice {
    /// The CPU, operations run at once.
    pub const fn cpu() -> Self {
        Self {
            place: Place::Host,
            mode: Mode::Eager,
        }
    }

    /// The NVIDIA GPU of this ordinal: compiled steps run there. Kiln does not use the GPU before the first
    /// of them runs.
    ///
    /// # Panics
    ///
    /// If `ordinal` is 100 or more.
    pub const fn cuda(ordinal: usize) -> Self {
        assert!(ordinal < GPUS, "no machine has so many GPUs");
        Self {
            place: Place::Cuda(ordinal as u8),
            mode: Mode::Eager,
        }
    }

    /// Operations are recorded until a value is needed and then run together on `backend`: on the first GPU
    /// with backend `cuda`, on the CPU with all others.
    pub const fn lazy(backend: CompileBackend) -> Self {
        let place = match backend {
            CompileBackend::Cuda => Place::Cuda(0),
            _ => Place::Host,
        };
        Self {
            place,
            mode: Mode::Lazy(backend),
        }
    }

    /// Where its tensors live.
    pub const fn place(self) -> Place {
        self.place
    }

    /// When operations run.
    pub const fn mode(self) -> Mode {
        self.mode
    }

    /// The device `KILN_DEVICE` names; none if it is not set. An unknown name is reported once and ignored.
    fn from_environment() -> Option<Self> {
        static DEVICE: LazyLock<Option<KilnDevice>> = LazyLock::new(|| {
            let name = std::env::var("KILN_DEVICE").ok()?;
            let device = KilnDevice::parse(&name);
            if device.is_none() {
                kiln_log::warn!(
                    "KILN_DEVICE={name} names no device (expected cpu, cuda, cuda:ORDINAL, lazy or lazy:BACKEND); using cpu"
                );
            }
            device
        });
        *DEVICE
    }

    fn parse(name: &str) -> Option<Self> {
        let gpu = |name: &str| match name.split_once(':') {
            None if name == "cuda" => Some(Self::cuda(0)),
            Some(("cuda", ordinal)) => {
                let ordinal = ordinal.parse().ok().filter(|&ordinal: &usize| ordinal < GPUS);
                ordinal.map(Self::cuda)
            }
            _ => None,
        };
        match name.split_once(':') {
            None if name == "cpu" => Some(Self::cpu()),
            None if name == "lazy" => Some(Self::lazy(CompileBackend::default())),
            Some(("lazy", name)) => match gpu(name) {
                Some(device) => Some(Self {
                    mode: Mode::Lazy(CompileBackend::Cuda),
                    ..device
                }),
                None => name.parse().ok().map(Self::lazy),
            },
            _ => gpu(name),
        }
    }
}

/// More GPUs than a machine has.
const GPUS: usize = 100;

/// A name that is no device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown device `{0}` (expected cpu, cuda, cuda:ORDINAL, lazy or lazy:BACKEND)")]
pub struct UnknownDevice(pub String);

impl FromStr for KilnDevice {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::parse(name).ok_or_else(|| UnknownDevice(name.to_owned()))
    }
}

impl Default for KilnDevice {
    fn default() -> Self {
        Self::from_environment().unwrap_or(Self::cpu())
    }
}

impl fmt::Debug for KilnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.mode, self.place) {
            (Mode::Eager, place) => write!(f, "{place}"),
            (Mode::Lazy(_), place @ Place::Cuda(_)) => write!(f, "lazy:{place}"),
            (Mode::Lazy(backend), Place::Host) => write!(f, "lazy:{backend}"),
        }
    }
}

impl fmt::Display for KilnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Device for KilnDevice {
    /// The reverse of [`Device::to_id`]; an id of no device gives the CPU.
    fn from_id(id: DeviceId) -> Self {
        let index = id.index_id as usize;
        match (id.type_id, CompileBackend::ALL.get(index)) {
            (1, Some(&backend)) => Self::lazy(backend),
            (2, _) if index < GPUS => Self::cuda(index),
            (3, _) if index < GPUS => Self {
                mode: Mode::Lazy(CompileBackend::Cuda),
                ..Self::cuda(index)
            },
            _ => Self::cpu(),
        }
    }

    fn to_id(&self) -> DeviceId {
        match (self.mode, self.place.gpu()) {
            (Mode::Eager, None) => DeviceId::new(0, 0),
            (Mode::Eager, Some(ordinal)) => DeviceId::new(2, ordinal as _),
            (Mode::Lazy(_), Some(ordinal)) => DeviceId::new(3, ordinal as _),
            (Mode::Lazy(backend), None) => {
                let index = CompileBackend::ALL.iter().position(|&other| other == backend);
                DeviceId::new(1, index.unwrap_or(0) as _)
            }
        }
    }
}

impl DeviceOps for KilnDevice {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_lead_back_to_the_device() {
        let lazy = CompileBackend::ALL
            .iter()
            .map(|&backend| KilnDevice::lazy(backend));
        let gpus = ["cuda:0", "cuda:3", "lazy:cuda:2"].map(|name| KilnDevice::parse(name).unwrap());
        assert_eq!(KilnDevice::parse("cuda"), Some(KilnDevice::cuda(0)));
        assert_eq!(KilnDevice::lazy(CompileBackend::Cuda).to_string(), "lazy:cuda:0");
        for device in lazy.chain([KilnDevice::cpu()]).chain(gpus) {
            assert_eq!(KilnDevice::from_id(device.to_id()), device);
            assert_eq!(KilnDevice::parse(&device.to_string()), Some(device));
        }
        assert_eq!(KilnDevice::parse("gpu"), None);
        assert_eq!(KilnDevice::parse("cuda:x"), None);
        assert_eq!(KilnDevice::parse("cuda:100"), None);
        assert_eq!(KilnDevice::parse("lazy:nothing"), None);
    }
}
