//! Long sums of f32 in blocks: a block adds up in f32, the blocks add up in f64.
//!
//! Each addition to an accumulator rounds by up to half a unit of the sum so far, so the error grows with
//! the number of terms: a channel's statistics over 100 000 pixels would be some ten units off, and every
//! value after the normalisation would share that error. A block is so short that it rounds like a short
//! sum, the errors of many blocks average out, and one conversion for every [`BLOCK`] additions costs next
//! to nothing. Blocks follow from the shape alone.

use kiln_graph::DType;
use kiln_graph::op::ReduceOp;

use super::c;

/// Terms that are added up in f32.
pub(super) const BLOCK: i64 = 64;

/// Terms of the longest sum that is not cut.
const LONGEST: i64 = 128;

/// Whether blocks of this reduction add up in f64, if it has many terms.
pub(super) fn widens(op: ReduceOp, dtype: DType) -> bool {
    op == ReduceOp::Sum && dtype.compute() == DType::F32
}

/// Whether a reduction of so many terms an accumulator is cut into blocks.
pub(super) fn in_blocks(op: ReduceOp, dtype: DType, terms: i64) -> bool {
    widens(op, dtype) && terms > LONGEST
}

/// Which of the nested loops with these trip counts, outermost first, is cut into blocks, and how many of its
/// iterations a block has; none if all iterations together are no long sum.
pub(super) fn cut(trips: &[i64]) -> Option<(usize, i64)> {
    if trips.iter().product::<i64>() <= LONGEST {
        return None;
    }
    let mut inner = 1;
    for (at, &trip) in trips.iter().enumerate().rev() {
        if inner * trip > BLOCK {
            return Some((at, (BLOCK / inner).max(1)));
        }
        inner *= trip;
    }
    None
}

/// Opens the loop over `variable` from 0 to `end` by `step`; with `block`, in blocks of so many iterations.
/// The text that closes it runs `flush` after each block.
pub(super) fn counted(
    variable: &str,
    end: i64,
    step: i64,
    block: Option<i64>,
    flush: &str,
) -> (String, String) {
    let Some(block) = block else {
        let head = format!("for (int64_t {variable} = 0; {variable} < {end}; {variable} += {step}) {{");
        return (head, "}\n".to_owned());
    };
    let width = block * step;
    let head = format!(
        "for (int64_t from_{variable} = 0; from_{variable} < {end}; from_{variable} += {width}) {{\n\
         const int64_t to_{variable} = from_{variable} + {width} < {end} ? from_{variable} + {width} : {end};\n\
         for (int64_t {variable} = from_{variable}; {variable} < to_{variable}; {variable} += {step}) {{"
    );
    (head, format!("}}\n{flush}}}\n"))
}

/// Declares the sum of the blocks that `name` adds up, called [`total`].
pub(super) fn declare(name: &str, vector: bool) -> String {
    let (ty, total) = (c::register_type(DType::F64, vector), total(name));
    if vector {
        format!("{ty} {total} = set_f64(0.0);\n")
    } else {
        format!("{ty} {total} = 0.0;\n")
    }
}

/// Adds the block in `name` to its [`total`] and begins the next.
pub(super) fn flush(name: &str, vector: bool) -> String {
    let total = total(name);
    if vector {
        format!("{total} = {total} + __builtin_convertvector({name}, v_f64);\n{name} = set_f32(0.0f);\n")
    } else {
        format!("{total} = {total} + {name};\n{name} = 0.0f;\n")
    }
}

/// The name of the sum of the blocks that `name` adds up.
pub(super) fn total(name: &str) -> String {
    format!("{name}_total")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_at_most_so_many_terms() {
        assert_eq!(cut(&[128]), None);
        assert_eq!(cut(&[2, 64]), None);
        assert_eq!(cut(&[129]), Some((0, 64)));
        assert_eq!(cut(&[3, 64]), Some((0, 1)));
        assert_eq!(cut(&[1000, 7, 7]), Some((0, 1)));
        assert_eq!(cut(&[1000, 3, 7]), Some((0, 3)));
        assert_eq!(cut(&[4, 100]), Some((1, 64)));
        for trips in [[1, 1, 5000], [40, 9, 1], [2, 65, 2], [70, 1, 3]] {
            let (at, block) = cut(&trips).unwrap();
            let inner: i64 = trips[at + 1..].iter().product();
            assert!(block * inner <= BLOCK, "{trips:?}");
        }
    }
}
