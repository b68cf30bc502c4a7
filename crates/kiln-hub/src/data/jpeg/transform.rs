//! The inverse cosine transform of a block of 8 by 8.
//!
//! The algorithm of Loeffler, Ligtenberg and Moschytz in integers with 12 bits behind the point, rounded as
//! stb_image and zune-jpeg round, so that the samples are theirs. Eight columns are transformed at once, one
//! in each lane of a vector; then the block is turned over and the rows are transformed as columns.

/// The samples of a block of coefficients whose last one, in zigzag order, stands at `last`: eight rows of
/// `target`, `stride` apart.
#[inline(always)]
pub(super) fn inverse(block: &[i32; 64], last: usize, target: &mut [u8], stride: usize) {
    if last == 0 {
        // Only the mean, which is eight times too large.
        let value = ((block[0].wrapping_add(4) >> 3).wrapping_add(128)).clamp(0, 255) as u8;
        for row in target.chunks_mut(stride).take(8) {
            row[..8].fill(value);
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the machine has AVX2.
        unsafe { avx2::inverse(block, target, stride) };
        return;
    }
    inverse_in_lanes(block, target, stride);
}

/// Two bits behind the point are kept between the passes.
const FIRST: (i32, u32) = (512, 10);
/// Half a unit to round, and 128, which is the middle of the samples. The further 512 is stb_image's.
const SECOND: (i32, u32) = (512 + (1 << 16) + (128 << 17), 17);

/// For any machine.
fn inverse_in_lanes(block: &[i32; 64], target: &mut [u8], stride: usize) {
    let lanes = |f: &dyn Fn(usize) -> i32| -> [i32; 8] { std::array::from_fn(f) };
    let pass = |rows: [[i32; 8]; 8], (round, bits): (i32, u32)| {
        columns(
            rows,
            [round; 8],
            |a: [i32; 8], b: [i32; 8]| lanes(&|lane| a[lane].wrapping_add(b[lane])),
            |a: [i32; 8], b: [i32; 8]| lanes(&|lane| a[lane].wrapping_sub(b[lane])),
            |a: [i32; 8], factor| a.map(|a| a.wrapping_mul(factor)),
            |a: [i32; 8]| a.map(|a| a >> bits),
        )
    };
    let turned = |rows: [[i32; 8]; 8]| -> [[i32; 8]; 8] {
        std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column]))
    };
    let rows = std::array::from_fn(|row| std::array::from_fn(|column| block[row * 8 + column]));
    let rows = turned(pass(turned(pass(rows, FIRST)), SECOND));
    for (target, samples) in target.chunks_mut(stride).zip(rows) {
        target[..8].copy_from_slice(&samples.map(|sample| sample.clamp(0, 255) as u8));
    }
}

/// The transform along each column, of eight rows of any kind of vector. `round` is added and `shift` shifts
/// at the end. Numbers wrap around, so that damaged data does no harm.
#[inline(always)]
fn columns<V: Copy>(
    [r0, r1, r2, r3, r4, r5, r6, r7]: [V; 8],
    round: V,
    add: impl Fn(V, V) -> V,
    sub: impl Fn(V, V) -> V,
    mul: impl Fn(V, i32) -> V,
    shift: impl Fn(V) -> V,
) -> [V; 8] {
    // The even half. The factors are cosines, and sums of them, times 4096.
    let p = mul(add(r2, r6), 2217);
    let t2 = add(p, mul(r6, -7567));
    let t3 = add(p, mul(r2, 3135));
    let t0 = add(mul(add(r0, r4), 4096), round);
    let t1 = add(mul(sub(r0, r4), 4096), round);
    let (x0, x3) = (add(t0, t3), sub(t0, t3));
    let (x1, x2) = (add(t1, t2), sub(t1, t2));
    // The odd half.
    let p3 = add(r7, r3);
    let p4 = add(r5, r1);
    let p5 = mul(add(p3, p4), 4816);
    let p1 = add(p5, mul(add(r7, r1), -3685));
    let p2 = add(p5, mul(add(r5, r3), -10497));
    let p3 = mul(p3, -8034);
    let p4 = mul(p4, -1597);
    let t3 = add(add(mul(r1, 6149), p1), p4);
    let t2 = add(add(mul(r3, 12586), p2), p3);
    let t1 = add(add(mul(r5, 8410), p2), p4);
    let t0 = add(add(mul(r7, 1223), p1), p3);
    [
        shift(add(x0, t3)),
        shift(add(x1, t2)),
        shift(add(x2, t1)),
        shift(add(x3, t0)),
        shift(sub(x3, t0)),
        shift(sub(x2, t1)),
        shift(sub(x1, t2)),
        shift(sub(x0, t3)),
    ]
}

/// For machines with registers of eight numbers. The compiler does not find the exchanges of rows and columns
/// by itself, and they would cost more than all the rest.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{FIRST, SECOND, columns};

    /// As [`super::inverse_in_lanes`].
    #[target_feature(enable = "avx2")]
    pub fn inverse(block: &[i32; 64], target: &mut [u8], stride: usize) {
        let rows: [__m256i; 8] = bytemuck::cast(*block);
        let rows = pass::<{ FIRST.1 as i32 }>(rows, FIRST.0);
        let columns = pass::<{ SECOND.1 as i32 }>(turned(rows), SECOND.0);
        // Packing works in each half by itself: the lower gets rows 0 to 3 of four columns, the upper 4 to 7.
        let pack = |n: usize| _mm256_packs_epi32(columns[n], columns[n + 1]);
        let low = _mm256_packus_epi16(pack(0), pack(2));
        let high = _mm256_packus_epi16(pack(4), pack(6));
        // Each half, 4 by 4 bytes, is turned from columns to rows.
        let order = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
        ));
        let (low, high) = (_mm256_shuffle_epi8(low, order), _mm256_shuffle_epi8(high, order));
        // The left four and the right four samples of each row, side by side.
        let left_right: [__m256i; 2] = [_mm256_unpacklo_epi32(low, high), _mm256_unpackhi_epi32(low, high)];
        let halves: [[[u8; 8]; 4]; 2] = bytemuck::cast(left_right);
        let rows = [
            halves[0][0],
            halves[0][1],
            halves[1][0],
            halves[1][1],
            halves[0][2],
            halves[0][3],
            halves[1][2],
            halves[1][3],
        ];
        for (target, row) in target.chunks_mut(stride).zip(rows) {
            target[..8].copy_from_slice(&row);
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn pass<const BITS: i32>(rows: [__m256i; 8], round: i32) -> [__m256i; 8] {
        columns(
            rows,
            _mm256_set1_epi32(round),
            |a, b| _mm256_add_epi32(a, b),
            |a, b| _mm256_sub_epi32(a, b),
            |a, factor| _mm256_mullo_epi32(a, _mm256_set1_epi32(factor)),
            |a| _mm256_srai_epi32::<BITS>(a),
        )
    }

    /// Rows as columns: pairs are interleaved, then pairs of pairs, then the halves are exchanged.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn turned(r: [__m256i; 8]) -> [__m256i; 8] {
        let low = |n: usize| _mm256_unpacklo_epi32(r[n], r[n + 1]);
        let high = |n: usize| _mm256_unpackhi_epi32(r[n], r[n + 1]);
        let (a, b, c, d) = (low(0), high(0), low(2), high(2));
        let (e, f, g, h) = (low(4), high(4), low(6), high(6));
        // Columns 0 and 4 of rows 0 to 3, columns 1 and 5, ...; then the same of rows 4 to 7.
        let top = [
            _mm256_unpacklo_epi64(a, c),
            _mm256_unpackhi_epi64(a, c),
            _mm256_unpacklo_epi64(b, d),
            _mm256_unpackhi_epi64(b, d),
        ];
        let bottom = [
            _mm256_unpacklo_epi64(e, g),
            _mm256_unpackhi_epi64(e, g),
            _mm256_unpacklo_epi64(f, h),
            _mm256_unpackhi_epi64(f, h),
        ];
        std::array::from_fn(|column| match column {
            0..4 => _mm256_permute2x128_si256::<0x20>(top[column], bottom[column]),
            _ => _mm256_permute2x128_si256::<0x31>(top[column - 4], bottom[column - 4]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Rng;

    /// The transform by its definition, in doubles.
    fn exact(block: &[i32; 64]) -> [f64; 64] {
        let scale = |n: usize| if n == 0 { 0.5f64.sqrt() } else { 1.0 };
        let wave = |x: usize, u: usize| ((2 * x + 1) as f64 * u as f64 * std::f64::consts::PI / 16.0).cos();
        std::array::from_fn(|at| {
            let (y, x) = (at / 8, at % 8);
            let parts = (0..64).map(|n| {
                let (v, u) = (n / 8, n % 8);
                scale(u) * scale(v) * f64::from(block[n]) * wave(x, u) * wave(y, v)
            });
            parts.sum::<f64>() / 4.0 + 128.0
        })
    }

    #[test]
    fn samples_are_those_of_the_definition() {
        let mut rng = Rng::at(&[1]);
        for round in 0..500 {
            let mut block = [0i32; 64];
            let last = rng.index(64);
            // Only the first place may be filled where `last` says so; otherwise any.
            for (n, value) in block.iter_mut().enumerate() {
                if n == 0 || (last > 0 && rng.chance(0.4)) {
                    *value = (rng.range(-1.0, 1.0) * [900.0, 90.0, 20.0][round % 3]) as i32;
                }
            }
            let mut samples = [7u8; 80];
            inverse(&block, last, &mut samples[2..], 10);
            let mut others = [7u8; 80];
            inverse_in_lanes(&block, &mut others[2..], 10);
            assert_eq!(samples, others, "both ways give the same");
            for (at, exact) in exact(&block).into_iter().enumerate() {
                let sample = f64::from(samples[2 + at / 8 * 10 + at % 8]);
                let exact = exact.clamp(0.0, 255.0);
                assert!(
                    (sample - exact).abs() < 1.0,
                    "{sample} for {exact} at {at} of {block:?}"
                );
            }
            assert!(
                samples.chunks(10).all(|row| row[..2] == [7, 7]),
                "nothing else is written"
            );
        }
    }
}
