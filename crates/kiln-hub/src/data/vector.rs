//! Wide registers for plain loops.
//!
//! The programs are compiled for any x86-64 machine, whose registers hold 16 bytes. Loops over pixels are two
//! to four times faster with AVX2's 32 bytes, which every machine of the last ten years has. The same source
//! is compiled twice, and the machine chooses; the results are the same bits, since the compiler neither
//! reorders nor merges operations on floats.

/// Runs `work`, compiled for AVX2 if the machine has it. What `work` calls takes part as far as it is
/// inlined.
#[inline(always)]
pub(crate) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,bmi1,bmi2")]
        fn wide<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2");
        if has {
            // SAFETY: `wide` only needs the three features that have just been found.
            return unsafe { wide(work) };
        }
    }
    work()
}
