//! Which elements of a buffer a store writes, as digits of a number.
//!
//! A store's position is a sum over the loop variables of its nest. A variable of factor 16 that takes 3
//! values adds 0, 16 or 32: it is a *digit* `(16, 3)`. Digits `(1, 4) (4, 4) (16, 3)` write elements 0 to 47,
//! each once.
//!
//! A reshape leaves quotients and remainders of variables in the position, and several terms then depend on
//! one variable. Such terms are digits, too, where their values are:
//!
//! 1. A variable is split where a divisor divides its extent: `i < 48` is `16 a + b` with `a < 3` and `b <
//!    16`, and
//!    `i / 16` and `i % 16` are `a` and `b`.
//! 2. What is left (`(3 i + j) / 4` for `i < 4` and `j < 3`) is evaluated at every point of its variables,
//!    and the
//!    sorted values must be those of some digits, each value once.
//!
//! A store to the whole of a buffer may also be looked at point by point, whatever its position is. Any other
//! position that neither step turns into digits is none of this module's: the verifier refuses its plan.

use num_integer::gcd;

use crate::index::{Atom, Index, Var, bit};

/// Most points at which the terms of a position are evaluated. Verification takes 50 ms at most for a store.
const POINTS: i64 = 1 << 20;

/// Most points that are marked one by one where no digits are found: some seconds for a store.
const MARKS: i64 = 1 << 27;

/// Variables of an index have numbers below this: sets of variables are words.
const VARS: Var = 64;

/// What one store writes: a box of the buffer's elements, by the axes in the order of memory.
pub(super) struct Piece {
    /// The first element and the number of elements along each axis.
    ranges: Vec<(i64, i64)>,
}

impl Piece {
    /// The box in a buffer of extents `shape` that a store to `position` writes. None if it writes something
    /// else, or an element twice.
    pub fn new(position: &Index, shape: &[usize]) -> Option<Self> {
        let mut strides = vec![1i64; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis] as i64;
        }
        let Digits { first, digits } = Digits::of(position)?;
        let mut rest = first;
        let mut ranges: Vec<(i64, i64)> = Vec::with_capacity(shape.len());
        for &stride in &strides {
            ranges.push((rest.div_euclid(stride), 1));
            rest = rest.rem_euclid(stride);
        }
        for (mut factor, mut extent) in digits {
            // A digit may go through several axes: it fills all of them but the last.
            while extent > 1 {
                let axis = strides.iter().position(|stride| factor % stride == 0)?;
                let (start, count) = &mut ranges[axis];
                // Several digits of one axis are digits of its coordinate, the smallest first.
                if factor != strides[axis] * *count {
                    return None;
                }
                let here = match *start + *count * extent <= shape[axis] as i64 {
                    true => extent,
                    false => shape[axis] as i64 / *count,
                };
                let fills = *start == 0 && *count * here == shape[axis] as i64;
                if here <= 1 || extent % here != 0 || (here < extent && !fills) {
                    return None;
                }
                *count *= here;
                factor *= here;
                extent /= here;
            }
            if extent == 0 {
                ranges.iter_mut().for_each(|(_, count)| *count = 0);
                break;
            }
        }
        let mut inside = ranges.iter().zip(shape);
        let inside = inside.all(|((start, count), &extent)| *start >= 0 && start + count <= extent as i64);
        inside.then_some(Self { ranges })
    }

    pub fn elements(&self) -> i64 {
        self.ranges.iter().map(|&(_, count)| count).product()
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        let apart = |(a, b): (&(i64, i64), &(i64, i64))| a.0 + a.1 <= b.0 || b.0 + b.1 <= a.0;
        !self.ranges.iter().zip(&other.ranges).any(apart)
    }
}

/// Elements that a store to `position` in the whole of a buffer of `elements` writes, each once; none if it
/// writes one twice or leaves a gap. A position with another number of points than `elements` is not looked
/// at point by point.
pub(super) fn whole(position: &Index, elements: i64) -> Option<i64> {
    whole_by_digits(position).or_else(|| whole_by_marks(position, elements))
}

/// [`whole`], from the position at every point: for shapes whose extents have no divisor in common, as those
/// of images of odd sizes that were reshaped.
fn whole_by_marks(position: &Index, elements: i64) -> Option<i64> {
    if position.has_data() {
        return None;
    }
    let (extents, points) = points_of(position, MARKS)?;
    // Nothing is to be written to a buffer without elements, and none means nothing: there all are counted.
    if points != elements && elements > 0 {
        return None;
    }
    let mut marks = vec![0u64; points as usize / 64 + 1];
    let mut at = [0; VARS as usize];
    for _ in 0..points {
        let place = usize::try_from(position.evaluate(&at)?).ok()?;
        let mark = 1 << (place % 64);
        if place as i64 >= points || marks[place / 64] & mark != 0 {
            return None;
        }
        marks[place / 64] |= mark;
        // The next point.
        for &(var, extent) in &extents {
            at[var as usize] += 1;
            if at[var as usize] < extent {
                break;
            }
            at[var as usize] = 0;
        }
    }
    Some(points)
}

fn whole_by_digits(position: &Index) -> Option<i64> {
    let Digits { first, digits } = Digits::of(position)?;
    let mut reach = 1;
    for (factor, extent) in digits {
        if factor != reach {
            return None;
        }
        reach *= extent;
    }
    (first == 0).then_some(reach)
}

/// The values of a position: the sums of `first` and one multiple of each digit's factor, for all
/// combinations.
struct Digits {
    /// The smallest value.
    first: i64,
    /// Positive factors and how many multiples each has, by factor.
    digits: Vec<(i64, i64)>,
}

impl Digits {
    /// The values of `position` over its variables. None if they are no digits, or if the integers of a
    /// gather take part.
    fn of(position: &Index) -> Option<Self> {
        if position.has_data() {
            return None;
        }
        let position = split_variables(position.clone())?;
        let mut all = Self {
            first: position.offset(),
            digits: Vec::new(),
        };
        for group in groups(&position) {
            let (first, digits) = match group.terms() {
                [(Atom::Var { extent, .. }, factor)] => {
                    let lowest = factor.min(&0) * (extent - 1).max(0);
                    (lowest, vec![(factor.abs(), *extent)])
                }
                _ => enumerated(&group)?,
            };
            all.first += first;
            all.digits.extend(digits);
        }
        all.digits.sort_unstable();
        Some(all)
    }
}

/// `position` with variables split into two, `k` times the first plus the second, wherever that removes a
/// quotient or a remainder by `k`. None if the position does not depend on all parts: then it has a value
/// twice.
fn split_variables(mut position: Index) -> Option<Index> {
    while let Some((split, by)) = splittable(&position) {
        let used = position.vars();
        let Some(fresh) = (0..VARS).find(|&var| used & bit(var) == 0) else {
            return Some(position);
        };
        let with = |var: Var, extent: i64| match var == split {
            true => {
                let outer = Index::var(var, extent / by).scale(by);
                outer.add(&Index::var(fresh, by))
            }
            false => Index::var(var, extent),
        };
        position = position.substitute(&with, &|slot| slot);
        if position.vars() != used | bit(fresh) {
            return None;
        }
    }
    Some(position)
}

/// A variable of a quotient or remainder in `index`, and a proper divisor of its extent: with the variable
/// split there, its outer part leaves the quotient or remainder.
fn splittable(index: &Index) -> Option<(Var, i64)> {
    index.terms().iter().find_map(|(atom, _)| {
        let (Atom::Div(inner, k) | Atom::Mod(inner, k)) = atom else {
            return None;
        };
        splittable(inner).or_else(|| {
            inner.terms().iter().find_map(|(atom, factor)| {
                let Atom::Var { var, extent } = *atom else {
                    return None;
                };
                let by = k / gcd(factor.abs(), *k);
                (1 < by && by < extent && extent % by == 0).then_some((var, by))
            })
        })
    })
}

/// The terms of `position` in sums that share no variable. Its constant is in none of them.
fn groups(position: &Index) -> Vec<Index> {
    let mut groups: Vec<Index> = Vec::new();
    for (atom, factor) in position.terms() {
        let term = Index::atom(atom.clone()).scale(*factor);
        let shares = |group: &Index| group.vars() & term.vars() != 0;
        let (same, others): (Vec<Index>, Vec<Index>) = groups.into_iter().partition(shares);
        groups = others;
        groups.push(same.iter().fold(term, |sum, group| sum.add(group)));
    }
    groups
}

/// The values of `group`: the smallest, and digits. None if a value occurs twice, if the values are no
/// digits, or if there are more points than [`POINTS`].
fn enumerated(group: &Index) -> Option<(i64, Vec<(i64, i64)>)> {
    let (extents, points) = points_of(group, POINTS)?;
    let mut at = [0; VARS as usize];
    let mut values = Vec::with_capacity(points as usize);
    for point in 0..points {
        let mut rest = point;
        for &(var, extent) in &extents {
            at[var as usize] = rest % extent;
            rest /= extent;
        }
        values.push(group.evaluate(&at)?);
    }
    values.sort_unstable();
    let first = values[0];
    Some((first, digits_of(&values)?))
}

/// The digits whose sums, from the first value on, are `values`; those are sorted. None if there are none, or
/// if a value occurs twice.
fn digits_of(values: &[i64]) -> Option<Vec<(i64, i64)>> {
    let mut digits = Vec::new();
    let mut values = values.to_vec();
    while let [first, second, ..] = values[..] {
        let step = second - first;
        let even = |(one, number): (&i64, i64)| *one == first + number * step;
        let run = values.iter().zip(0..).take_while(|&it| even(it)).count();
        let repeats = |block: &[i64]| {
            let pairs = block.iter().zip(&values[..run]);
            block.len() == run
                && pairs
                    .into_iter()
                    .all(|(one, other)| one - block[0] == other - first)
        };
        if step <= 0 || !values.chunks(run).all(repeats) {
            return None;
        }
        digits.push((step, run as i64));
        values = values.iter().copied().step_by(run).collect();
    }
    Some(digits)
}

/// The variables of `index` with their extents, and how many points they have together; none if there are
/// more than `most`, or no point.
fn points_of(index: &Index, most: i64) -> Option<(Vec<(Var, i64)>, i64)> {
    let mut extents = Vec::new();
    variables(index, &mut extents);
    let points = extents
        .iter()
        .try_fold(1i64, |points, (_, extent)| points.checked_mul(*extent))
        .filter(|points| (1..=most).contains(points))?;
    Some((extents, points))
}

/// Adds the variables of `index` to `found`, with their extents.
fn variables(index: &Index, found: &mut Vec<(Var, i64)>) {
    for (atom, _) in index.terms() {
        match atom {
            Atom::Var { var, extent } => {
                if !found.contains(&(*var, *extent)) {
                    found.push((*var, *extent));
                }
            }
            Atom::Div(inner, _) | Atom::Mod(inner, _) => variables(inner, found),
            Atom::Data { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{coordinates, linear};

    fn var(number: Var, extent: i64) -> Index {
        Index::var(number, extent)
    }

    /// The position in a buffer of `shape`, permuted, of element `position` of the buffer before.
    fn permuted(position: &Index, shape: &[usize], order: &[usize]) -> Index {
        let at = coordinates(position, shape);
        let at: Vec<Index> = order.iter().map(|&axis| at[axis].clone()).collect();
        let shape: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
        linear(&at, &shape)
    }

    /// How often each element is written, by evaluating the position everywhere.
    fn written(position: &Index, elements: usize) -> Option<Vec<usize>> {
        let mut extents = Vec::new();
        variables(position, &mut extents);
        let points: i64 = extents.iter().map(|(_, extent)| extent).product();
        let mut counts = vec![0; elements];
        for point in 0..points {
            let mut at = [0; VARS as usize];
            let mut rest = point;
            for &(var, extent) in &extents {
                at[var as usize] = rest % extent;
                rest /= extent;
            }
            *counts.get_mut(position.evaluate(&at)? as usize)? += 1;
        }
        Some(counts)
    }

    #[test]
    fn odd_images_that_were_reshaped_are_marked_point_by_point() {
        // Rows and columns of coprime extents, numbered the other way round.
        let (rows, columns) = (1031, 1021);
        let number = var(0, rows).scale(columns).add(&var(1, columns));
        let position = permuted(&number, &[columns as usize, rows as usize], &[1, 0]);
        assert_eq!(whole_by_digits(&position), None);
        assert_eq!(whole(&position, rows * columns), Some(rows * columns));
        // One that is written twice.
        let twice = permuted(&number, &[columns as usize, rows as usize - 1], &[1, 0]);
        assert_eq!(whole(&twice, rows * columns), None);
        // One with another number of points than the buffer has elements.
        for elements in [1, rows * columns - 1, rows * columns + 1] {
            assert_eq!(whole(&position, elements), None);
        }
        assert_eq!(whole(&position, 0), Some(rows * columns));
    }

    #[test]
    fn flattened_images_stored_by_channels_fill_their_buffer() {
        // Rows and one variable for all of [3, 4, 4], stored as [row, 4, 4, 3].
        let flat = linear(&[var(0, 4), var(1, 48)], &[4, 48]);
        let position = permuted(&flat, &[4, 3, 4, 4], &[0, 2, 3, 1]);
        assert!(position.terms().len() > 2, "{position}");
        assert_eq!(whole(&position, 192), Some(192));
        // One variable for everything, too many points to look at each.
        let large = permuted(&var(0, 64 * 3 * 224 * 224), &[64, 3, 224, 224], &[0, 2, 3, 1]);
        assert_eq!(whole(&large, 64 * 3 * 224 * 224), Some(64 * 3 * 224 * 224));
    }

    #[test]
    fn variables_across_a_boundary_are_looked_at_point_by_point() {
        // 4 times 3 elements seen as 3 times 4, transposed.
        let flat = linear(&[var(0, 4), var(1, 3)], &[4, 3]);
        let position = permuted(&flat, &[3, 4], &[1, 0]);
        assert!(splittable(&position).is_none(), "{position}");
        assert_eq!(whole(&position, 12), Some(12));
    }

    #[test]
    fn what_writes_twice_or_leaves_a_gap_is_refused() {
        let i = var(0, 12);
        assert_eq!(whole(&i.div(2), 12), None, "each element twice");
        assert_eq!(whole(&i.rem(5), 12), None);
        assert_eq!(whole(&i.scale(2), 12), None, "every other element");
        assert_eq!(whole(&i.shift(1), 12), None, "the first element is left out");
        assert_eq!(whole(&i.div(3).scale(3), 12), None);
        assert_eq!(whole(&i.div(4).scale(3).add(&i.rem(3)), 12), None);
        assert_eq!(
            whole(&i.div(4).scale(5).add(&i.rem(4)), 12),
            None,
            "gaps between rows"
        );
        let data = Atom::Data {
            slot: 0,
            extent: 12,
            vars: 1,
        };
        assert_eq!(
            whole(&Index::atom(data), 12),
            None,
            "nobody knows what is in memory"
        );
        // A flip writes each element once.
        assert_eq!(whole(&i.scale(-1).shift(11), 12), Some(12));
    }

    #[test]
    fn a_piece_of_joined_axes_is_a_box() {
        // All columns and planes of rows 2 to 4 of [8, 3, 5].
        let joined = var(0, 3 * 15).shift(30);
        let piece = Piece::new(&joined, &[8, 3, 5]).unwrap();
        assert_eq!(piece.ranges, [(2, 3), (0, 3), (0, 5)]);
        // Through a quotient and a remainder, with rows of 7 of which 5 are written.
        let i = var(0, 15);
        let inner = i.div(5).scale(7).add(&i.rem(5)).shift(2);
        let piece = Piece::new(&inner, &[3, 7]).unwrap();
        assert_eq!(piece.ranges, [(0, 3), (2, 5)]);
        // Six elements from the middle of a row on are no box.
        assert!(Piece::new(&var(0, 6).shift(3), &[3, 7]).is_none());
        assert!(Piece::new(&var(0, 10), &[3, 7]).is_none());
        // Nor is what lies behind the buffer.
        assert!(Piece::new(&var(0, 7).shift(21), &[3, 7]).is_none());
        assert!(Piece::new(&var(0, 14).shift(14), &[3, 7]).is_none());
    }

    /// Whatever is accepted is covered exactly; reshapes and permutations of a whole buffer are accepted.
    #[test]
    fn accepted_positions_write_each_element_once() {
        let mut seed = 99u64;
        let mut next = |n: usize| {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 33) as usize % n
        };
        let shapes: [&[usize]; 6] = [&[48], &[4, 12], &[3, 16], &[2, 6, 4], &[3, 2, 8], &[4, 3, 2, 2]];
        let mut accepted = 0;
        for _ in 0..3000 {
            let from = shapes[next(shapes.len())];
            let vars: Vec<Index> = (0..)
                .zip(from)
                .map(|(number, &extent)| var(number, extent as i64))
                .collect();
            let mut position = linear(&vars, from);
            for _ in 0..next(4) {
                let shape = shapes[next(shapes.len())];
                let mut order: Vec<usize> = (0..shape.len()).collect();
                (1..order.len()).for_each(|at| order.swap(at, next(at + 1)));
                position = permuted(&position, shape, &order);
            }
            assert_eq!(whole(&position, 48), Some(48), "{position}");
            // And something that is no reshape.
            position = match next(4) {
                0 => position.rem(1 + next(48) as i64),
                1 => position.div(1 + next(3) as i64),
                2 => position.add(&position.rem(1 + next(9) as i64)),
                _ => position.scale(1 + next(2) as i64).shift(next(2) as i64),
            };
            let Some(elements) = whole(&position, 48) else {
                continue;
            };
            accepted += 1;
            let counts = written(&position, elements as usize);
            assert!(
                counts.is_some_and(|counts| counts.iter().all(|&count| count == 1)),
                "{position}"
            );
        }
        assert!(accepted > 100);
    }
}
