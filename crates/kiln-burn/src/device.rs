//! The device: where tensors live and when operations run.

use std::fmt;
use std::sync::LazyLock;

use burn_backend::{DeviceId, DeviceOps};
use burn_std::device::Device;

use crate::options::CompileBackend;

/// A Kiln device.
///
/// There is one place, the CPU, and two modes. **Eager** (the default) runs each operation at once on burn-flex, except inside a
/// compiled region. **Lazy** records until a value is read or `sync` is called, then compiles and runs what was recorded; it
/// carries the backend to run on.
///
/// All devices share one table of tensors: `to_device` between them copies nothing.
///
/// `Default` is the eager CPU unless the environment variable `KILN_DEVICE` says otherwise: `cpu`, `lazy`, or `lazy:BACKEND` with a name of
/// [`CompileBackend`]. That is how an unchanged program or test suite exercises the compiler.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KilnDevice {
    mode: Mode,
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
        Self { mode: Mode::Eager }
    }

    /// The CPU, operations are recorded until a value is needed and then run together on `backend`.
    pub const fn lazy(backend: CompileBackend) -> Self {
        Self {
            mode: Mode::Lazy(backend),
        }
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
                tracing::warn!(
                    "KILN_DEVICE={name} names no device (expected cpu, lazy or lazy:BACKEND); using cpu"
                );
            }
            device
        });
        *DEVICE
    }

    fn parse(name: &str) -> Option<Self> {
        match name.split_once(':') {
            None if name == "cpu" => Some(Self::cpu()),
            None if name == "lazy" => Some(Self::lazy(CompileBackend::default())),
            Some(("lazy", backend)) => backend.parse().ok().map(Self::lazy),
            _ => None,
        }
    }
}

impl Default for KilnDevice {
    fn default() -> Self {
        Self::from_environment().unwrap_or(Self::cpu())
    }
}

impl fmt::Debug for KilnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            Mode::Eager => f.write_str("cpu"),
            Mode::Lazy(backend) => write!(f, "lazy:{backend}"),
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
        match (id.type_id, CompileBackend::ALL.get(id.index_id as usize)) {
            (1, Some(&backend)) => Self::lazy(backend),
            _ => Self::cpu(),
        }
    }

    fn to_id(&self) -> DeviceId {
        match self.mode {
            Mode::Eager => DeviceId::new(0, 0),
            Mode::Lazy(backend) => {
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
        for device in lazy.chain([KilnDevice::cpu()]) {
            assert_eq!(KilnDevice::from_id(device.to_id()), device);
            assert_eq!(KilnDevice::parse(&device.to_string()), Some(device));
        }
        assert_eq!(KilnDevice::parse("gpu"), None);
        assert_eq!(KilnDevice::parse("lazy:nothing"), None);
    }
}
