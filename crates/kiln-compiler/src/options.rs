//! Options of the step compiler: those that belong to no machine.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use kiln_graph::DType;

use crate::buckets::Buckets;

/// What the backward pass keeps of the forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Keep {
    /// Everything it reads, as an eager autograd engine does.
    Everything,
    /// The values that are cheaper to keep than to compute again.
    #[default]
    Cheapest,
    /// The values with which the step is fastest while its arena has at most so many bytes.
    Within(u64),
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Keep::Everything => f.write_str("everything"),
            Keep::Cheapest => f.write_str("cheapest"),
            Keep::Within(bytes) => write!(f, "within {bytes} bytes"),
        }
    }
}

/// How far the compiler goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Whether operations are fused. Without, each is a kernel of its own: slow, for narrowing down a wrong
    /// result.
    pub fuse: bool,
    /// Whether an optimizer's update may run in the epilogue of the product that makes its gradient.
    /// Without this option updates are kernels of their own, and all other kernels are equal to those of a
    /// step with other updates. It is meant for a step that runs once, before the step that replaces it.
    pub update_in_epilogue: bool,
    /// Whether the graph is simplified and rewritten first.
    pub transform: bool,
    /// The type, `f16` or `bf16`, in which products of f32 are computed and values between them are stored
    /// ([`crate::transform::autocast`]); none to keep f32. Needs [`Options::transform`].
    pub autocast: Option<DType>,
    /// What the backward pass keeps of the forward pass.
    pub keep: Keep,
    /// How large the buckets are in which sums over ranks travel.
    pub buckets: Buckets,
    /// The order in which sums over ranks are started, each by its position among those of the graph
    /// ([`crate::buckets::order`]): ranks that compile graphs of different shapes join the same sums. None for the
    /// order in which this graph makes them.
    pub sums: Option<Arc<[u32]>>,
    /// Whether to keep the text of the graph after each pass.
    pub dump: bool,
    /// Folder in which to write the result of each stage ([`crate::debug`]); none to write nothing.
    pub debug: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            fuse: true,
            update_in_epilogue: true,
            transform: true,
            autocast: None,
            keep: Keep::default(),
            buckets: Buckets::default(),
            sums: None,
            dump: false,
            debug: None,
        }
    }
}

impl Options {
    /// The options that the generated code depends on, for cache keys.
    pub fn identity(&self) -> String {
        let autocast = self.autocast.map_or("none", DType::name);
        let mut text = format!(
            "fuse={} update_in_epilogue={} transform={} autocast={autocast} keep={} buckets={}",
            self.fuse, self.update_in_epilogue, self.transform, self.keep, self.buckets,
        );
        if let Some(sums) = &self.sums {
            let numbers: Vec<String> = sums.iter().map(u32::to_string).collect();
            text += &format!(" sums={}", numbers.join(","));
        }
        text
    }

    /// Whether an option asks for the text of the graph after each pass.
    pub(crate) fn wants_dumps(&self) -> bool {
        self.dump || self.debug.is_some()
    }
}
