//! Graph breaks: why a recording had to be run before the region was over.

use std::fmt;

use super::host_operations;
use super::location::Location;

/// Why a value was needed.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum BreakReason {
    /// The program read a tensor's elements (`into_data`, `into_scalar`, printing, a data-dependent branch).
    Read,
    /// The program called `sync`.
    Sync,
    /// A thread other than the recording one used a tensor of the recording.
    OtherThread,
    /// An operation outside the recording used a tensor of it (a move to another device).
    OutsideOperation,
    /// The lazy recording reached its greatest length.
    Length,
    /// The program runs a part of the region without recording it (`kiln::disable`).
    Disabled,
}

impl BreakReason {
    /// What to do about it.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::Read => {
                "return the tensor from the region and read it outside, or compute what depends on it with tensor operations"
            }
            Self::Sync => "call sync outside the region",
            Self::OtherThread => "use the tensor on the thread that runs the region, or after the region",
            Self::OutsideOperation => "move the tensor to its device before the region",
            Self::Length => "read a value or call sync once a step",
            Self::Disabled => {
                "the program asks for this break; without `kiln::disable` the operations are part of the step"
            }
        }
    }
}

impl fmt::Display for BreakReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "a value was read",
            Self::Sync => "sync was called",
            Self::OtherThread => "another thread used a tensor of the recording",
            Self::OutsideOperation => "an operation outside the recording used a tensor of it",
            Self::Length => "the recording became too long",
            Self::Disabled => "`kiln::disable` runs a part outside of the recording",
        })
    }
}

/// One graph break.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GraphBreak {
    /// Why a value was needed.
    pub reason: BreakReason,
    /// The operation whose result was needed, such as `NumericFloat.Sum`; none if no single one was.
    pub operation: Option<String>,
    /// The method of Burn's tensors that runs on the host and needed it, such as `sort`; none if the
    /// program itself needed it.
    pub method: Option<&'static str>,
    /// The line of the user's program, if it could be found.
    pub location: Option<Location>,
}

impl GraphBreak {
    /// What to do about it.
    pub fn remedy(&self) -> String {
        match self.method {
            Some(method) => host_operations::remedy(method),
            None => self.reason.remedy().to_owned(),
        }
    }
}

impl fmt::Display for GraphBreak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if let Some(operation) = &self.operation {
            write!(f, " (result of {operation})")?;
        }
        if let Some(location) = &self.location {
            write!(f, " at {location}")?;
        }
        write!(f, "; {}", self.remedy())
    }
}
