//! Kiln as a Burn backend: everything of Kiln that knows Burn.
//!
//! Burn's router turns each tensor operation into a `burn_ir::OperationIr` and hands it to a client, which
//! is [`client`]. Outside a compiled region an operation runs at once on burn-flex ([`eager`]). Inside, it
//! is recorded ([`record`]). When the region ends, or the program needs a value, the recording is compared
//! with those compiled before, imported into a [`kiln_graph::Graph`] if it is new ([`import`]), and run by
//! an executor ([`execute`]).
//!
//! Global state is where Burn forces it: the table of tensors ([`table`]), the random generator ([`random`])
//! and the sessions of threads ([`record::session`]).

pub mod channel;
pub mod client;
pub mod custom;
pub mod device;
pub mod eager;
pub mod error;
pub mod execute;
pub mod gpu_tensor;
pub mod host_data;
pub mod import;
mod inlined;
pub mod lend;
pub mod options;
mod precision;
pub mod random;
pub mod ranks;
pub mod record;
mod rounded;
pub mod storage;
pub mod stream;
pub mod table;

pub use channel::{Kiln, KilnChannel};
pub use client::KilnClient;
pub use device::{KilnDevice, Mode, Place, UnknownDevice};
pub use error::Error;
pub use kiln_graph::IndexError;
pub use kiln_partition::Point;
pub use options::{CompileBackend, CompileOptions, Dynamic, LossScaling, NumericsCheck, UnknownBackend};
pub use precision::full_precision;
pub use record::{
    BreakReason, Changed, CompileEvent, CompiledRegion, GraphBreak, Guards, Location, Mismatch, Recompile,
    RegionReport, StepReport,
};
pub use rounded::with_copy;
