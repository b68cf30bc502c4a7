//! A launch under construction: parameters with their arguments, and the numbers and types for which its
//! text is written.
//!
//! The statements of a kernel are a plain text in CUDA C++ with names such as `EXTENT` for what varies. The
//! names are declared in front of them, so that the text reads like a program and the compiler still knows
//! every number:
//!
//! ```text
//! constexpr int EXTENT = 768;
//! typedef float Element;
//! <the statements>
//! ```

use std::fmt::Write as _;

use super::after::Role;
use super::{Argument, Launch};
use crate::code::FunctionText;

/// Threads of a block where nothing says otherwise.
pub const THREADS: u32 = 256;

/// The number of blocks that `work` items take, with `each` items a block.
///
/// # Panics
/// Where a launch would have 2^31 blocks: no memory has so many elements.
pub fn blocks(work: usize, each: usize) -> u32 {
    let count = work.div_ceil(each.max(1)).max(1);
    u32::try_from(count).expect("tensors of so many elements fit into no memory")
}

/// The type of indices up to `limit`: of 32 bits if it holds them, for 64 bits are several times slower.
pub fn index_type(limit: usize) -> &'static str {
    // The last block's threads count on beyond the end.
    if limit < (1 << 31) - (1 << 16) {
        "int"
    } else {
        "long long"
    }
}

/// A kernel and what it is given.
#[derive(Clone, Debug, Default)]
pub struct Text {
    helpers: String,
    head: String,
    parameters: Vec<String>,
    arguments: Vec<Argument>,
}

impl Text {
    /// Adds the parameter `ty* name` for memory that is read.
    #[must_use]
    pub fn reads(mut self, ty: &str, name: &str, argument: Argument) -> Self {
        self.parameters.push(format!("const {ty}* __restrict__ {name}"));
        self.arguments.push(argument);
        self
    }

    /// Adds the parameter `ty* name` for memory that is written.
    #[must_use]
    pub fn writes(mut self, ty: &str, name: &str, argument: Argument) -> Self {
        self.parameters.push(format!("{ty}* __restrict__ {name}"));
        self.arguments.push(argument);
        self
    }

    /// Declares a number.
    #[must_use]
    pub fn number(mut self, name: &str, value: impl Into<i128>) -> Self {
        let value = value.into();
        let ty = match i32::try_from(value) {
            Ok(_) => "int",
            Err(_) => "long long",
        };
        let _ = writeln!(self.head, "constexpr {ty} {name} = {value};");
        self
    }

    /// Declares the number of elements or blocks that something has.
    #[must_use]
    pub fn count(self, name: &str, value: usize) -> Self {
        self.number(name, value as i128)
    }

    /// Declares a type.
    #[must_use]
    pub fn ty(mut self, name: &str, ty: &str) -> Self {
        let _ = writeln!(self.head, "typedef {ty} {name};");
        self
    }

    /// Adds functions in front of the kernel.
    #[must_use]
    pub fn helpers(mut self, text: &str) -> Self {
        self.helpers.push_str(text);
        self
    }

    /// The launch of `statements` by `blocks` blocks of `threads` threads.
    pub fn launch(self, statements: &str, blocks: u32, threads: u32) -> Launch {
        Launch {
            text: FunctionText {
                helpers: self.helpers,
                parameters: self.parameters,
                body: format!("{}{}", self.head, statements.trim_end()),
                threads,
                device_only: false,
                blocks: 0,
            },
            grid: [blocks, 1, 1],
            shared_bytes: 0,
            role: Role::Alone,
            arguments: self.arguments,
        }
    }
}
