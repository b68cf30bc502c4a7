//! What a CPU does in a second, by its instruction set: the numbers that the partitioner's cost model takes.
//!
//! They are a table and no measurement, because the partition is part of what a step computes. Under autocast
//! a value that is kept is rounded to 16 bits where one that is computed again may be in a register, and what
//! shares a kernel decides the order of its sums. Measured rates differ between numbers of threads, and
//! between two moments on a machine with other work, and results would differ with them.
//!
//! Only ratios decide, and those of machines with the same instructions are alike: measured on one, on two
//! and on sixteen threads, they led to the same partition of most models, and elsewhere to one as fast.

use kiln_partition::Machine;

use crate::isa::Isa;

/// The rates of a machine with these instructions: those of the reference machine ([`Machine::default`]),
/// with arithmetic as much slower as its vectors are shorter.
pub fn rates(isa: Isa) -> Machine {
    let reference = Machine::default();
    let vectors = isa.lanes() as f64 / Isa::AmxBf16.lanes() as f64;
    let multiplied = if isa.has_fma() { vectors } else { vectors / 2.0 };
    let flops_per_second = multiplied * reference.flops_per_second;
    Machine {
        flops_per_second,
        bf16_flops_per_second: match isa {
            Isa::AmxBf16 => reference.bf16_flops_per_second,
            _ if isa.has_bf16_pairs() => 2.0 * flops_per_second,
            _ => flops_per_second,
        },
        f16_flops_per_second: flops_per_second,
        simple_per_second: vectors * reference.simple_per_second,
        special_per_second: vectors * reference.special_per_second,
        random_per_second: vectors * reference.random_per_second,
        ..reference
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shorter_vectors_are_slower() {
        assert_eq!(rates(Isa::AmxBf16), Machine::default());
        for isa in [Isa::AmxBf16, Isa::Neon] {
            for pair in isa.contained().windows(2) {
                let [wide, narrow] = [rates(pair[0]), rates(pair[1])];
                assert!(wide.flops_per_second >= narrow.flops_per_second);
                assert!(wide.bf16_flops_per_second >= narrow.bf16_flops_per_second);
                assert!(wide.special_per_second >= narrow.special_per_second);
                assert_eq!(wide.bytes_per_second, narrow.bytes_per_second);
            }
        }
        assert!(rates(Isa::Scalar).flops_per_second > 0.0);
    }
}
