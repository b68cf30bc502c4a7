//! What compiles the programs of a family.

use std::sync::OnceLock;

use crate::build::{Compiler, Cubin, Source, Store};
use crate::code::{CallKind, Function, StepCode};
use crate::error::Result;
use crate::runtime::{Device, Kernel, Module};

/// A program with its machine code. It is loaded onto a device once, at its first use.
#[derive(Debug)]
pub struct Program {
    source: Source,
    image: Vec<u8>,
    module: OnceLock<Module>,
}

impl Program {
    /// A program that was compiled.
    pub fn new(source: Source, image: Vec<u8>) -> Self {
        Self {
            source,
            image,
            module: OnceLock::new(),
        }
    }

    /// What was compiled.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The machine code.
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// A kernel of the program on `device`, which is that of every call.
    ///
    /// # Errors
    /// Those of loading.
    pub fn kernel(&self, device: &Device, name: &str) -> Result<Kernel> {
        if let Some(module) = self.module.get() {
            return module.kernel(name);
        }
        let module = Module::load(device, &self.source.name, &self.image)?;
        self.module.get_or_init(|| module).kernel(name)
    }
}

/// What a family compiles with.
pub trait Backend: Sync {
    /// Machine code of each source.
    ///
    /// # Errors
    /// [`crate::CudaError::Compile`] of the first that is rejected.
    fn compile(&self, sources: &[Source]) -> Result<Vec<Cubin>>;

    /// Whether [`Backend::compile`] would find machine code on disk.
    fn has(&self, source: &Source) -> bool;

    /// Where steps and templates are kept.
    fn store(&self) -> &Store;

    /// Measures what [`Backend::takes`] will compare, for all calls of `code`.
    ///
    /// # Errors
    /// Those of compiling and of the device.
    fn measure(&self, code: &StepCode) -> Result<()> {
        let _ = code;
        Ok(())
    }

    /// Whether the library's side of a [`CallKind::Either`] is taken ([`crate::code::StepCode::decided`]).
    ///
    /// # Errors
    /// Those of the library.
    fn takes(&self, functions: &[Function], either: &CallKind) -> Result<bool>;
}

/// NVRTC without a device.
impl Backend for (Compiler, Store) {
    fn compile(&self, sources: &[Source]) -> Result<Vec<Cubin>> {
        self.0.compile(sources)
    }

    fn has(&self, source: &Source) -> bool {
        self.0.has(source)
    }

    fn store(&self) -> &Store {
        &self.1
    }

    fn takes(&self, _: &[Function], _: &CallKind) -> Result<bool> {
        Ok(true)
    }
}

/// Nothing is compiled: for tests on the host.
#[cfg(feature = "testing")]
#[derive(Debug)]
pub struct Uncompiled(pub Store);

#[cfg(feature = "testing")]
impl Backend for Uncompiled {
    fn compile(&self, sources: &[Source]) -> Result<Vec<Cubin>> {
        let cubin = Cubin {
            image: Vec::new(),
            cached: false,
            compile_time: std::time::Duration::ZERO,
        };
        Ok(vec![cubin; sources.len()])
    }

    fn has(&self, _: &Source) -> bool {
        true
    }

    fn store(&self) -> &Store {
        &self.0
    }

    fn takes(&self, _: &[Function], _: &CallKind) -> Result<bool> {
        Ok(true)
    }
}
