//! Working memory for what is computed one at a time: by each thread, or all at once where these are fewer.

/// Pieces begin at multiples of so many bytes: threads share no cache line.
const LINE: usize = 64;

/// Pieces of working memory, one for each unit of a kernel that is under way.
#[derive(Clone, Copy)]
pub(crate) struct Pieces {
    bytes: usize,
    count: usize,
    /// Whether each unit has its own. Which thread has which unit is not known.
    is_whole: bool,
}

impl Pieces {
    /// Pieces of at least so many bytes, for `units` that at most `threads` threads share.
    pub fn new(bytes: usize, units: usize, threads: usize) -> Self {
        Self {
            bytes: bytes.next_multiple_of(LINE),
            count: units.min(threads),
            is_whole: units <= threads,
        }
    }

    /// Bytes of all.
    pub fn total(&self) -> usize {
        self.bytes * self.count
    }

    /// C of the bytes before the piece of the unit with the number `unit`, which `thread` computes.
    pub fn at(&self, unit: &str) -> String {
        let own = if self.is_whole { unit } else { "thread" };
        format!("{own} * (int64_t){}", self.bytes)
    }
}
