//! The vector instructions that the generated code may use.

use std::fmt;

/// The vector instruction set that kernels are generated for.
///
/// It is read off the compiler's predefined macros under the flags the build uses, so it is by construction
/// something that the compiler will accept and the machine can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// No vectors, one element at a time; right everywhere.
    Scalar,
    /// x86-64 baseline: 4 f32 lanes, no fused multiply-add.
    Sse2,
    /// Armv8: 4 f32 lanes, 32 registers.
    Neon,
    /// AVX2 with FMA: 8 f32 lanes, 16 registers.
    Avx2,
    /// AVX-512 F, DQ, BW and VL: 16 f32 lanes, 32 registers.
    Avx512,
    /// AVX-512 with BF16: sums of products of pairs of bf16.
    Avx512Bf16,
    /// AVX-512 with BF16, and AMX: products of tiles of pairs of bf16 ([`crate::kernels::tile::amx`]).
    AmxBf16,
}

impl Isa {
    /// Number of f32 elements in a vector register.
    pub fn lanes(self) -> usize {
        match self {
            Self::Scalar => 1,
            Self::Sse2 | Self::Neon => 4,
            Self::Avx2 => 8,
            Self::Avx512 | Self::Avx512Bf16 | Self::AmxBf16 => 16,
        }
    }

    /// Number of vector registers.
    pub fn registers(self) -> usize {
        match self {
            Self::Scalar | Self::Sse2 | Self::Avx2 => 16,
            Self::Neon | Self::Avx512 | Self::Avx512Bf16 | Self::AmxBf16 => 32,
        }
    }

    /// Whether a fused multiply-add is one instruction; without it, `fma` is a slow library call.
    pub fn has_fma(self) -> bool {
        self.is_avx512() || matches!(self, Self::Neon | Self::Avx2)
    }

    /// Whether it has AVX-512 F, DQ, BW and VL.
    pub fn is_avx512(self) -> bool {
        matches!(self, Self::Avx512 | Self::Avx512Bf16 | Self::AmxBf16)
    }

    /// Whether one instruction adds the products of a pair of bf16 with another to an f32.
    pub fn has_bf16_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::AmxBf16)
    }

    /// Whether one instruction multiplies tiles of pairs of bf16.
    pub fn has_tiles(self) -> bool {
        self == Self::AmxBf16
    }

    /// This set without tiles, which a process may use only after it asked for them.
    pub fn without_tiles(self) -> Self {
        match self {
            Self::AmxBf16 => Self::Avx512Bf16,
            other => other,
        }
    }

    /// This set and all that it contains, widest first: what a machine with it can run.
    pub fn contained(self) -> &'static [Self] {
        match self {
            Self::AmxBf16 => &[
                Self::AmxBf16,
                Self::Avx512Bf16,
                Self::Avx512,
                Self::Avx2,
                Self::Sse2,
            ],
            Self::Avx512Bf16 => &[Self::Avx512Bf16, Self::Avx512, Self::Avx2, Self::Sse2],
            Self::Avx512 => &[Self::Avx512, Self::Avx2, Self::Sse2],
            Self::Avx2 => &[Self::Avx2, Self::Sse2],
            Self::Sse2 => &[Self::Sse2],
            Self::Neon => &[Self::Neon],
            Self::Scalar => &[Self::Scalar],
        }
    }

    /// The widest set that the compiler's predefined macros (`#define NAME VALUE` lines) allow.
    pub(crate) fn from_macros(macros: &str) -> Self {
        let has = |name: &str| {
            macros
                .lines()
                .any(|line| line.split_whitespace().nth(1) == Some(name))
        };
        if [
            "__AVX512F__",
            "__AVX512DQ__",
            "__AVX512BW__",
            "__AVX512VL__",
            "__FMA__",
        ]
        .iter()
        .all(|m| has(m))
        {
            match (has("__AVX512BF16__"), has("__AMX_TILE__") && has("__AMX_BF16__")) {
                (true, true) => Self::AmxBf16,
                (true, false) => Self::Avx512Bf16,
                (false, _) => Self::Avx512,
            }
        } else if has("__AVX2__") && has("__FMA__") {
            Self::Avx2
        } else if has("__aarch64__") && has("__ARM_NEON") {
            Self::Neon
        } else if has("__SSE2__") {
            Self::Sse2
        } else {
            Self::Scalar
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Sse2 => "sse2",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::AmxBf16 => "amx-bf16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widest_allowed_set() {
        assert_eq!(
            Isa::from_macros("#define __SSE2__ 1\n#define __AVX2__ 1\n"),
            Isa::Sse2,
            "AVX2 needs FMA"
        );
        assert_eq!(
            Isa::from_macros("#define __AVX2__ 1\n#define __FMA__ 1"),
            Isa::Avx2
        );
        assert_eq!(
            Isa::from_macros("#define __aarch64__ 1\n#define __ARM_NEON 1"),
            Isa::Neon
        );
        assert_eq!(Isa::from_macros("#define __riscv 1"), Isa::Scalar);
        let set = ["AVX512F", "AVX512DQ", "AVX512BW", "AVX512VL", "FMA"];
        let avx512: String = set.iter().map(|name| format!("#define __{name}__ 1\n")).collect();
        assert_eq!(Isa::from_macros(&avx512), Isa::Avx512);
        let with_bf16 = avx512 + "#define __AVX512BF16__ 1\n";
        assert_eq!(Isa::from_macros(&with_bf16), Isa::Avx512Bf16);
        let tiles = "#define __AMX_TILE__ 1\n#define __AMX_BF16__ 1\n";
        assert_eq!(Isa::from_macros(&(with_bf16.clone() + tiles)), Isa::AmxBf16);
        assert_eq!(
            Isa::from_macros(&(with_bf16 + "#define __AMX_BF16__ 1\n")),
            Isa::Avx512Bf16
        );
        assert_eq!(Isa::from_macros(tiles), Isa::Scalar);
        assert_eq!(Isa::from_macros("#define __AVX512BF16__ 1\n"), Isa::Scalar);
    }
}
