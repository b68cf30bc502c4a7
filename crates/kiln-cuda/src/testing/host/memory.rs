//! Memory of a step between guard zones.

/// NaN as f16 and as bf16; two of them as f32, four as f64. The header `kiln_host.h` has the same.
const NOISE: u16 = 0xfff5;

/// What buffers are aligned to, as on a device.
const ALIGNMENT: usize = 256;

/// Bytes on either side that nobody may write.
const GUARD_BYTES: usize = 4096;

#[derive(Clone, Copy)]
#[repr(align(256))]
struct Line([u8; ALIGNMENT]);

/// A buffer. It begins as noise.
pub(super) struct Region {
    lines: Vec<Line>,
    bytes: usize,
}

impl Region {
    /// `bytes` of noise.
    pub fn noise(bytes: usize) -> Self {
        let mut line = Line([0; ALIGNMENT]);
        for pair in line.0.chunks_exact_mut(2) {
            pair.copy_from_slice(&NOISE.to_ne_bytes());
        }
        let lines = bytes.div_ceil(ALIGNMENT) + 2 * GUARD_BYTES / ALIGNMENT;
        Self {
            lines: vec![line; lines],
            bytes,
        }
    }

    /// A copy of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut region = Self::noise(bytes.len());
        let (own, count) = (region.as_mut_ptr(), bytes.len());
        // SAFETY: the region has as many bytes.
        unsafe { std::slice::from_raw_parts_mut(own, count) }.copy_from_slice(bytes);
        region
    }

    /// The first byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: the guard zone in front is a part of the allocation.
        unsafe { self.lines.as_mut_ptr().cast::<u8>().add(GUARD_BYTES) }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.whole()[GUARD_BYTES..GUARD_BYTES + self.bytes]
    }

    /// Whether the guard zones are as they were.
    pub fn is_intact(&self) -> bool {
        let whole = self.whole();
        let noise = NOISE.to_ne_bytes();
        let intact = |from: usize, to: usize| {
            (from..to)
                .zip(&whole[from..to])
                .all(|(at, &byte)| byte == noise[at % 2])
        };
        intact(0, GUARD_BYTES) && intact(GUARD_BYTES + self.bytes, whole.len())
    }

    fn whole(&self) -> &[u8] {
        // SAFETY: lines are arrays of bytes without padding.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * ALIGNMENT) }
    }
}
