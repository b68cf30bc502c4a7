//! Huffman codes: from bits to the coefficients of a block.
//!
//! A coefficient is a code, which tells how many zeros precede it and how many bits its value has, and then
//! those bits. A table that is indexed by the next bits tells the code. What comes next depends on nothing
//! but the number of bits consumed, so the table holds that number too, and the next look-up need not wait
//! for the value. There is no branch on the kind of a coefficient, which no processor could foresee.

/// Bits that index the table: 1024 entries of 4 bytes, so that the four tables of a picture stay in the
/// smallest cache. Longer codes are rare, by their nature.
const LOOK: u32 = 10;

/// Where the coefficients of the zigzag order stand in a block. A run of 15 zeros at the last place leads up
/// to place 79; what is written behind place 63 lands on the last coefficient, and the block is refused.
#[rustfmt::skip]
const PLACES: [u8; 80] = [
     0,  1,  8, 16,  9,  2,  3, 10, 17, 24, 32, 25, 18, 11,  4,  5,
    12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,  6,  7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
    58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
];

/// A Huffman code, as a table for its short codes and the limits of its long ones.
pub(super) struct Codes {
    table: Vec<Entry>,
    /// By length: the first 16-bit number, left-aligned, that is no code of this length or a shorter one.
    limits: [u32; 17],
    /// By length: what is added to a code to give the index of its symbol.
    offsets: [i32; 17],
    symbols: Vec<u8>,
}

/// What the next bits mean, packed into 32 bits:
///
/// ```text
/// 25   24   23 ... 20  19 ... 16  15 ... 8  7 ... 0
/// long end  run        size       length    total
/// ```
///
/// A code of `length` bits, followed by `size` bits that hold the value, is `total` bits. `run` zeros precede
/// the value. `end` marks the end of a block, `long` a code that the index is too short for.
#[derive(Clone, Copy)]
struct Entry(u32);

impl Entry {
    const END: u32 = 1 << 24;
    const LONG: u32 = 1 << 25;

    /// A code of `length` bits for `symbol`, whose upper half is the run and whose lower half is the size.
    fn new(length: u32, symbol: u8, is_ac: bool) -> Self {
        let end = if is_ac && symbol == 0 { Self::END } else { 0 };
        let size = u32::from(symbol & 15);
        Self((length + size) | length << 8 | u32::from(symbol) << 16 | end)
    }

    #[inline(always)]
    fn total(self) -> u32 {
        self.0 & 63
    }

    #[inline(always)]
    fn length(self) -> u32 {
        self.0 >> 8 & 31
    }

    #[inline(always)]
    fn size(self) -> u32 {
        self.0 >> 16 & 15
    }

    #[inline(always)]
    fn run(self) -> usize {
        (self.0 >> 20 & 15) as usize
    }
}

/// The value that the highest `size` bits stand for: the lower half of the numbers are the negative values.
#[inline(always)]
fn value(bits: u64, size: u32) -> i32 {
    let number = (bits >> 1 >> (63 - size)) as i32;
    let is_negative = (bits >> 63) as i32 - 1;
    number + (is_negative & (1 - (1 << size)))
}

impl Codes {
    /// The code with `counts[n]` codes of `n + 1` bits, whose symbols come in the order of the codes. `None`
    /// if there are more codes than bits allow, or symbols that a baseline file does not have.
    pub fn new(counts: &[u8; 16], symbols: &[u8], is_ac: bool) -> Option<Self> {
        let is_known = |symbol: u8| match (is_ac, symbol >> 4, symbol & 15) {
            (false, ..) => symbol <= 11,
            (true, run, 0) => run == 0 || run == 15,
            (true, _, size) => size <= 10,
        };
        if !symbols.iter().all(|&symbol| is_known(symbol)) {
            return None;
        }
        let mut table = vec![Entry(Entry::LONG); 1 << LOOK];
        let (mut limits, mut offsets) = ([0u32; 17], [0i32; 17]);
        let (mut code, mut first) = (0u32, 0usize);
        for length in 1..=16u32 {
            let count = usize::from(counts[length as usize - 1]);
            offsets[length as usize] = first as i32 - code as i32;
            for &symbol in symbols.get(first..first + count)? {
                if length <= LOOK {
                    let entry = Entry::new(length, symbol, is_ac);
                    let from = code << (LOOK - length);
                    let to = (code + 1) << (LOOK - length);
                    table.get_mut(from as usize..to as usize)?.fill(entry);
                }
                code += 1;
            }
            if code > 1 << length {
                return None;
            }
            limits[length as usize] = code << (16 - length);
            first += count;
            code <<= 1;
        }
        Some(Self {
            table,
            limits,
            offsets,
            symbols: symbols.to_vec(),
        })
    }

    /// The entry of a code that is longer than the table's index, of the next 16 bits.
    #[cold]
    fn long(&self, next: u32, is_ac: bool) -> Option<Entry> {
        let length = (LOOK + 1..=16).find(|&length| next < self.limits[length as usize])?;
        let index = (next >> (16 - length)) as i32 + self.offsets[length as usize];
        let symbol = *self.symbols.get(usize::try_from(index).ok()?)?;
        Some(Entry::new(length, symbol, is_ac))
    }
}

/// Bits of the entropy-coded bytes, without the zero bytes that are stuffed behind each byte 255.
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    /// The next byte that is not yet among the bits.
    at: usize,
    /// The next bits, from the highest on.
    bits: u64,
    /// How many of them there are.
    count: u32,
    /// How many of them, at the end, are made up because a marker or the end of the file stands there.
    made_up: u32,
}

impl<'a> BitReader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            bits: 0,
            count: 0,
            made_up: 0,
        }
    }

    /// Whether bits have been consumed that the file does not have.
    pub fn is_past_the_end(&self) -> bool {
        self.count < self.made_up
    }

    /// Makes 32 bits or more available: a code and its value have 27 at most.
    #[inline(always)]
    fn refill(&mut self) {
        if self.count >= 32 {
            return;
        }
        if let Some(next) = self.bytes[self.at..].first_chunk() {
            let next = u32::from_be_bytes(*next);
            // A byte of 255 is a byte of 0 in the complement, and the usual test finds a byte of 0.
            if (!next).wrapping_sub(0x0101_0101) & next & 0x8080_8080 == 0 {
                self.bits |= u64::from(next) << (32 - self.count);
                self.count += 32;
                self.at += 4;
                return;
            }
        }
        self.refill_slowly();
    }

    /// Byte by byte, where a byte of 255 or the end is near.
    #[inline(never)]
    fn refill_slowly(&mut self) {
        while self.count <= 56 {
            let byte = match (self.bytes.get(self.at), self.bytes.get(self.at + 1)) {
                (Some(255), Some(0)) => {
                    self.at += 2;
                    255
                }
                (Some(255), _) | (None, _) => {
                    self.made_up += 8;
                    0
                }
                (Some(&byte), _) => {
                    self.at += 1;
                    byte
                }
            };
            self.bits |= u64::from(byte) << (56 - self.count);
            self.count += 8;
        }
    }

    /// Begins anew behind a restart marker, which must come next.
    pub fn restart(&mut self) -> Option<()> {
        // Bits that are left are the padding of the last byte; whole bytes would be unread symbols.
        if self.is_past_the_end() || self.count - self.made_up >= 8 {
            return None;
        }
        match self.bytes.get(self.at..self.at + 2)? {
            [255, 0xd0..=0xd7] => {
                *self = Self {
                    at: self.at + 2,
                    ..Self::new(self.bytes)
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// The next entry of a code, with its bits consumed, and the value behind it.
    #[inline(always)]
    fn entry(&mut self, codes: &Codes, is_ac: bool) -> Option<(Entry, i32)> {
        self.refill();
        let mut entry = codes.table[(self.bits >> (64 - LOOK)) as usize & ((1 << LOOK) - 1)];
        if entry.0 & Entry::LONG != 0 {
            entry = codes.long((self.bits >> 48) as u32, is_ac)?;
        }
        let value = value(self.bits << entry.length(), entry.size());
        self.bits <<= entry.total();
        self.count -= entry.total();
        Some((entry, value))
    }

    /// Reads a block, multiplied by the steps of quantisation. Returns the place of its last coefficient in
    /// the zigzag order; `prediction` is the first coefficient of the block before, without the step.
    #[inline(always)]
    pub fn block(
        &mut self,
        dc: &Codes,
        ac: &Codes,
        steps: &[i32; 64],
        prediction: &mut i32,
        block: &mut [i32; 64],
    ) -> Option<usize> {
        let (_, difference) = self.entry(dc, false)?;
        *prediction = prediction.wrapping_add(difference);
        block[0] = prediction.wrapping_mul(steps[0]);
        let (mut place, mut last) = (1, 0);
        while place < 64 {
            let (entry, value) = self.entry(ac, true)?;
            if entry.0 & Entry::END != 0 {
                break;
            }
            place += entry.run();
            // 16 zeros have the value 0, and storing it changes nothing.
            block[usize::from(PLACES[place]) & 63] = value * steps[place & 63];
            last = place;
            place += 1;
        }
        (place <= 64).then_some(last)
    }

    /// Reads a block that nobody needs.
    #[inline(always)]
    pub fn skip_block(&mut self, dc: &Codes, ac: &Codes, prediction: &mut i32) -> Option<()> {
        let (_, difference) = self.entry(dc, false)?;
        *prediction = prediction.wrapping_add(difference);
        let mut place = 1;
        while place < 64 {
            let (entry, _) = self.entry(ac, true)?;
            if entry.0 & Entry::END != 0 {
                break;
            }
            place += entry.run() + 1;
        }
        (place <= 64).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Symbols 5, 6, 7 have the codes 0, 10 and 110.
    #[test]
    fn codes_and_values() {
        let mut counts = [0; 16];
        counts[..3].fill(1);
        let codes = Codes::new(&counts, &[5, 6, 7], false).unwrap();
        // 0 + 10110 (22), 10 + 000001 (1 - 62), 110 + 1111111 (127), padding of ones.
        let bytes = [0b0101_1010, 0b0000_0111, 0b0111_1111, 0b1111_1111, 0];
        let mut bits = BitReader::new(&bytes);
        let mut next = || bits.entry(&codes, false).map(|(_, value)| value);
        assert_eq!((next(), next(), next()), (Some(22), Some(1 - 63), Some(127)));
        assert_eq!(next(), None, "111 is no code");
    }

    #[test]
    fn impossible_codes_are_refused() {
        let mut counts = [0; 16];
        counts[0] = 3;
        assert!(
            Codes::new(&counts, &[0, 1, 2], false).is_none(),
            "three codes of one bit"
        );
        counts[0] = 2;
        assert!(Codes::new(&counts, &[0], false).is_none(), "a symbol is missing");
        assert!(
            Codes::new(&counts, &[0, 12], false).is_none(),
            "a difference of twelve bits"
        );
    }
}
