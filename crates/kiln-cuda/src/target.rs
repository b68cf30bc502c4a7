//! An NVIDIA GPU as a target of the step compiler.

use kiln_compiler::schedule::Kernel;
use kiln_compiler::schedule::layout::Layouts;
use kiln_compiler::{CompileError, CompiledStep, Emitted, Policy, Step, Target};
use kiln_graph::Graph;
use kiln_partition::Machine;

use crate::code::StepCode;
use crate::emit::product::padded::Padding;
use crate::emit::product::warpgroups::{CAPABILITY, Warpgroups};
use crate::emit::{self, EmitOptions, KernelCode};
use crate::libraries::DeviceDescription;
use crate::policy::{POLICY, WITH_WARPGROUPS};

/// The name that messages use.
pub const NAME: &str = "cuda";

/// A hash of this crate's sources, for cache keys.
pub const CUDA_SOURCES: &str = env!("KILN_CUDA_SOURCES");

/// A GPU that CUDA C++ is generated for.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaTarget {
    /// The capability that code is made for, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: u32,
    /// Whether products of f32 may round their operands to 10 bits of fraction, for the tensor cores.
    pub tf32: bool,
    /// Whether the device has cuDNN. Code for such a device has two versions of each convolution, cuDNN's
    /// and Kiln's own: the device chooses when it loads the step, as cuDNN may refuse a convolution.
    pub cudnn: bool,
    /// Which products of 16 bits are computed on padded copies.
    pub padding: Padding,
    /// Which products Kiln's own template computes.
    pub warpgroups: Warpgroups,
    /// What the machine can do in a second.
    pub rates: Machine,
}

/// What the reference machine can do in a second.
pub const H200: Machine = Machine {
    // Measured by a copy.
    bytes_per_second: 4.3e12,
    // f32 without tensor cores: 132 x 128 multiply-adds at 1.98 GHz.
    flops_per_second: 60e12,
    // Tensor cores, by the data sheet, without sparsity.
    bf16_flops_per_second: 989e12,
    f16_flops_per_second: 989e12,
    simple_per_second: 30e12,
    special_per_second: 4e12,
    random_per_second: 1e12,
    hidden: 0.95,
    // Measured of kernels over the channels of a batch norm, in the graph of a step: 2.5 to 5 us.
    launch_seconds: 3e-6,
};

impl Default for CudaTarget {
    /// The reference machine.
    fn default() -> Self {
        Self {
            capability: (9, 0),
            processors: 132,
            tf32: false,
            cudnn: false,
            padding: Padding::default(),
            warpgroups: Warpgroups::default(),
            rates: H200,
        }
    }
}

impl CudaTarget {
    /// The GPU that is described.
    pub fn of(description: &DeviceDescription) -> Self {
        Self {
            capability: description.capability,
            processors: description.multiprocessors,
            ..Self::default()
        }
    }

    fn emit_options<'a>(&self, layouts: &'a Layouts) -> EmitOptions<'a> {
        EmitOptions {
            capability: self.capability,
            processors: self.processors,
            tf32: self.tf32,
            padding: self.padding,
            warpgroups: self.warpgroups,
            cudnn: self.cudnn,
            layouts,
        }
    }
}

/// A step that was compiled to CUDA C++.
pub type CudaStep = CompiledStep<CudaTarget>;

impl Target for CudaTarget {
    type Kernel = KernelCode;
    type Code = StepCode;

    fn name(&self) -> &'static str {
        NAME
    }

    fn fingerprint(&self) -> String {
        let (major, minor) = self.capability;
        format!(
            "sm_{major}{minor} processors={} tf32={} cudnn={} padding={:?} warpgroups={:?} sources={CUDA_SOURCES}",
            self.processors, self.tf32, self.cudnn, self.padding, self.warpgroups
        )
    }

    fn rates(&self) -> Machine {
        self.rates
    }

    fn policy(&self) -> &Policy {
        match self.capability {
            CAPABILITY => &WITH_WARPGROUPS,
            _ => &POLICY,
        }
    }

    fn kernel(&self, graph: &Graph, kernel: &Kernel, layouts: &Layouts) -> Result<KernelCode, CompileError> {
        emit::generate(graph, kernel, &self.emit_options(layouts))
    }

    fn scratch(&self, kernel: &KernelCode) -> usize {
        kernel.scratch
    }

    fn emit(&self, step: &Step<'_, KernelCode>) -> Result<Emitted<StepCode>, CompileError> {
        if let Some(node) = emit::step::unguarded(step) {
            return Err(CompileError::Unsupported {
                target: NAME,
                op: step.graph.node(node).op.name().into(),
                types: "the memory of an argument, in a step that checks indices".into(),
            });
        }
        Ok(emit::step::emit(step, self.processors))
    }
}
