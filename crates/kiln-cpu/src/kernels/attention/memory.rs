//! A thread's working memory.

use crate::kernels::round_up;

/// Parts of a thread's memory, each at a multiple of a vector.
pub(super) struct Memory {
    declarations: String,
    bytes: usize,
}

impl Memory {
    pub fn new() -> Self {
        Self {
            declarations: String::new(),
            bytes: 0,
        }
    }

    /// Reserves `ctype *name` for `count` elements and one vector more.
    pub fn part(&mut self, ctype: &str, name: &str, count: usize) {
        let size = match ctype {
            "double" | "int64_t" => 8,
            _ => 4,
        };
        self.declarations.push_str(&format!(
            "    {ctype} *{name} = ({ctype} *)(own + {});\n",
            self.bytes
        ));
        self.bytes += round_up(count * size, 64) + 64;
    }

    /// The bytes of one thread.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The declarations, and the bytes of one thread.
    pub fn finish(self) -> (String, usize) {
        let own = format!(
            "    char *own = args->workspace + thread * INT64_C({});\n",
            self.bytes
        );
        (own + &self.declarations, self.bytes)
    }
}
