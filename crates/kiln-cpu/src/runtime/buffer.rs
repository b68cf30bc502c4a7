//! Aligned memory for arenas, with counters.
//!
//! Generated kernels load whole vectors, so every buffer starts on a 64-byte border (a cache line, and the
//! widest vector there is). Buffers of [`HUGE`] and more start on a 2 MiB border and ask the kernel for huge
//! pages: an arena of a few hundred megabytes on 4 KiB pages spends a measurable part of a step in page
//! walks. The counters make "planned peak equals allocated peak" a thing that a test can check.

use std::alloc::{self, Layout};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{CpuError, Result};

/// Alignment of every buffer, in bytes.
pub const ALIGNMENT: usize = 64;

/// Size from which a buffer is placed on huge pages, in bytes.
pub const HUGE: usize = 4 << 20;

const HUGE_PAGE: usize = 2 << 20;

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Bytes now held in [`AlignedBuffer`]s of this process.
pub fn current_bytes() -> usize {
    CURRENT.load(Ordering::Relaxed)
}

/// Most bytes held at once since the start of the process or the last [`reset_peak`].
pub fn peak_bytes() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Makes [`peak_bytes`] start again from the bytes that are held now.
pub fn reset_peak() {
    PEAK.store(current_bytes(), Ordering::Relaxed);
}

/// A block of memory on a 64-byte border, zeroed when made, freed when dropped.
#[derive(Debug)]
pub struct AlignedBuffer {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the buffer owns its memory exclusively; access goes through `&self` for reads and `&mut self` for
// writes.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above; a shared reference only gives out a pointer and a shared slice.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// Allocates `bytes` zeroed bytes. Zero bytes give a valid, aligned, empty buffer.
    pub fn zeroed(bytes: usize) -> Result<Self> {
        if bytes == 0 {
            let start = NonNull::new(ALIGNMENT as *mut u8).ok_or(CpuError::OutOfMemory { bytes })?;
            return Ok(Self { start, bytes });
        }
        let layout = Self::layout(bytes).ok_or(CpuError::OutOfMemory { bytes })?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc::alloc(layout) };
        let start = NonNull::new(memory).ok_or(CpuError::OutOfMemory { bytes })?;
        advise_huge(start, bytes);
        // SAFETY: `bytes` bytes were just allocated at `start`. Written after the advice, so that the first
        // touch already maps huge pages.
        unsafe { write_zeros(start, bytes) };
        let now = CURRENT.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(now, Ordering::Relaxed);
        Ok(Self { start, bytes })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// First byte, for reading.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// First byte, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes at `start`, borrowed with the buffer.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` initialised bytes at `start`, borrowed exclusively with the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    fn layout(bytes: usize) -> Option<Layout> {
        let align = if bytes >= HUGE { HUGE_PAGE } else { ALIGNMENT };
        Layout::from_size_align(bytes, align).ok()
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        if let Some(layout) = Self::layout(self.bytes) {
            // SAFETY: allocated in `zeroed` with this same layout.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout) };
            CURRENT.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(target_os = "linux")]
fn advise_huge(start: NonNull<u8>, bytes: usize) {
    if bytes >= HUGE {
        let whole_pages = bytes / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: the range lies inside a live allocation and starts on a page border; the advice changes how
        // it is backed, not what it holds. A refusal (huge pages switched off) is harmless and therefore
        // ignored.
        unsafe { libc::madvise(start.as_ptr().cast(), whole_pages, libc::MADV_HUGEPAGE) };
    }
}

/// Makes `bytes` bytes at `start` zero. Most of that time the system spends on finding pages for memory
/// that is touched first, so several threads touch large buffers.
///
/// # Safety
/// The bytes must be valid for writes.
unsafe fn write_zeros(start: NonNull<u8>, bytes: usize) {
    let threads = match bytes {
        HUGE.. => std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(bytes / HUGE * 2),
        _ => 1,
    };
    let part = bytes.div_ceil(threads).next_multiple_of(HUGE_PAGE);
    std::thread::scope(|scope| {
        for first in (part..bytes).step_by(part) {
            let start = Shared(start);
            let write = move || {
                let Shared(start) = { start };
                // SAFETY: one part of the bytes that are valid by this function's contract, which is written
                // once.
                unsafe { start.add(first).write_bytes(0, part.min(bytes - first)) };
            };
            // Where the system gives no more threads, this one writes all.
            if std::thread::Builder::new().spawn_scoped(scope, write).is_err() {
                write();
            }
        }
        // SAFETY: the first part; the other threads write the rest.
        unsafe { start.write_bytes(0, part.min(bytes)) };
    });
}

/// A pointer that goes to the threads that write different parts behind it.
#[derive(Clone, Copy)]
struct Shared(NonNull<u8>);

// SAFETY: each thread writes a part of its own.
unsafe impl Send for Shared {}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: NonNull<u8>, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_counted_and_zeroed() {
        reset_peak();
        let before = current_bytes();
        let small = AlignedBuffer::zeroed(100).unwrap();
        let mut large = AlignedBuffer::zeroed(HUGE + 12).unwrap();
        assert_eq!(small.as_ptr() as usize % ALIGNMENT, 0);
        assert_eq!(large.as_ptr() as usize % HUGE_PAGE, 0);
        assert!(large.as_slice().iter().all(|&b| b == 0));
        large.as_mut_slice()[HUGE + 11] = 7;
        assert_eq!(current_bytes() - before, 100 + HUGE + 12);
        drop(large);
        drop(small);
        assert_eq!(current_bytes(), before);
        assert!(peak_bytes() >= before + HUGE + 112);
        let empty = AlignedBuffer::zeroed(0).unwrap();
        assert!(empty.is_empty() && empty.as_slice().is_empty());
    }

    #[test]
    fn absurd_sizes_are_errors() {
        assert!(matches!(
            AlignedBuffer::zeroed(usize::MAX),
            Err(CpuError::OutOfMemory { .. })
        ));
        assert!(matches!(
            AlignedBuffer::zeroed(usize::MAX / 4),
            Err(CpuError::OutOfMemory { .. })
        ));
    }
}
