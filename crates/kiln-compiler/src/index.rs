//! Symbolic indices: where in a tensor a loop nest reads, as a function of its loop variables.
//!
//! Reshapes, transposes, slices and broadcasts never move data in a fused kernel; they only change the index
//! at which an operand is read. An index is a sum of integer multiples of *atoms* plus a constant. Atoms are
//! loop variables, quotients and remainders of other indices (they come from reshapes), and integers loaded
//! from memory (they come from gathers). Every atom knows its own range, so simplification needs no context:
//!
//! - `(64 i + j) / 64 = i` and `(64 i + j) % 64 = j` whenever `0 <= j < 64`: splitting and joining dimensions
//!   cancels;
//! - `64 (q / 64) + q % 64 = q`: so does joining and splitting;
//! - quotients and remainders of quotients and remainders collapse when the divisors divide each other.
//!
//! After simplification an index tells the code generator all it needs: an index that is affine in the
//! innermost variable with stride 1 is a vector load, with stride 0 one scalar for all lanes, and anything
//! else a gather.
//!
//! Invariant: an index denotes a position, so its value is never negative on the whole iteration space. `/`
//! and `%` below rely on it, and so does the C that is printed.

use std::fmt;

use num_integer::gcd;
use smallvec::SmallVec;

/// A loop variable of a nest, by number.
pub type Var = u32;

/// An indivisible part of an index.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Atom {
    /// A loop variable, running over `0..extent`.
    Var {
        /// Which.
        var: Var,
        /// How many values it takes.
        extent: i64,
    },
    /// The quotient of an index by a positive constant, rounded down.
    Div(Box<Index>, i64),
    /// The remainder of an index by a positive constant.
    Mod(Box<Index>, i64),
    /// An integer loaded from memory and clamped to `0..extent`.
    Data {
        /// Which load: a number the nest gives out.
        slot: u32,
        /// The clamp.
        extent: i64,
        /// Bit set of the variables the load itself depends on.
        vars: u64,
    },
}

/// A position along one dimension, or in a buffer.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Index {
    terms: SmallVec<[(Atom, i64); 2]>,
    constant: i64,
}

impl Index {
    /// A constant position.
    pub fn constant(constant: i64) -> Self {
        Self {
            terms: SmallVec::new(),
            constant,
        }
    }

    /// Loop variable `var` of extent `extent`; the constant 0 if it takes one value only.
    pub fn var(var: Var, extent: i64) -> Self {
        if extent == 1 {
            return Self::constant(0);
        }
        Self::atom(Atom::Var { var, extent })
    }

    /// One atom by itself.
    pub fn atom(atom: Atom) -> Self {
        Self {
            terms: SmallVec::from_iter([(atom, 1)]),
            constant: 0,
        }
    }

    /// The atoms and their factors.
    pub fn terms(&self) -> &[(Atom, i64)] {
        &self.terms
    }

    /// The constant part.
    pub fn offset(&self) -> i64 {
        self.constant
    }

    /// The value, if it does not depend on anything.
    pub fn as_constant(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }

    /// Smallest and largest value.
    pub fn range(&self) -> (i64, i64) {
        let mut range = (self.constant, self.constant);
        for (atom, factor) in &self.terms {
            let (low, high) = atom.range();
            let (a, b) = (low * factor, high * factor);
            range = (range.0 + a.min(b), range.1 + a.max(b));
        }
        range
    }

    /// The largest number that the C of this index computes: its own, that of an index whose quotient or
    /// remainder it takes, or that of an integer it loads. A sum that wraps in between ends where it should.
    pub fn most(&self) -> i64 {
        let inside = self.terms.iter().map(|(atom, _)| match atom {
            Atom::Var { extent, .. } | Atom::Data { extent, .. } => (extent - 1).max(0),
            Atom::Div(inner, _) | Atom::Mod(inner, _) => inner.most(),
        });
        inside.fold(self.range().1, i64::max)
    }

    /// Bit set of the variables this depends on.
    pub fn vars(&self) -> u64 {
        self.terms.iter().fold(0, |vars, (atom, _)| vars | atom.vars())
    }

    /// Whether a loaded integer takes part.
    pub fn has_data(&self) -> bool {
        self.terms.iter().any(|(atom, _)| match atom {
            Atom::Var { .. } => false,
            Atom::Data { .. } => true,
            Atom::Div(inner, _) | Atom::Mod(inner, _) => inner.has_data(),
        })
    }

    /// The factor of `var` if this is affine in it (0 if independent of it); none otherwise.
    pub fn stride(&self, var: Var) -> Option<i64> {
        let mut stride = 0;
        for (atom, factor) in &self.terms {
            match atom {
                Atom::Var { var: own, .. } if *own == var => stride += factor,
                other if other.vars() & bit(var) != 0 => return None,
                _ => {}
            }
        }
        Some(stride)
    }

    /// The sum of two indices.
    pub fn add(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        sum.constant += other.constant;
        for (atom, factor) in &other.terms {
            sum.add_term(atom.clone(), *factor);
        }
        sum.join_quotients();
        sum
    }

    /// A multiple.
    pub fn scale(&self, factor: i64) -> Self {
        if factor == 0 {
            return Self::default();
        }
        let terms = self.terms.iter().map(|(atom, f)| (atom.clone(), f * factor));
        Self {
            terms: terms.collect(),
            constant: self.constant * factor,
        }
    }

    /// This plus a constant.
    pub fn shift(&self, by: i64) -> Self {
        let mut sum = self.clone();
        sum.constant += by;
        sum
    }

    fn add_term(&mut self, atom: Atom, factor: i64) {
        match self.terms.binary_search_by(|(own, _)| own.cmp(&atom)) {
            Ok(at) => {
                self.terms[at].1 += factor;
                if self.terms[at].1 == 0 {
                    self.terms.remove(at);
                }
            }
            Err(at) if factor != 0 => self.terms.insert(at, (atom, factor)),
            Err(_) => {}
        }
    }

    /// `d c (x / d) + c (x % d) = c x`, wherever such a pair occurs.
    fn join_quotients(&mut self) {
        'again: loop {
            for (atom, factor) in &self.terms {
                let Atom::Mod(inner, divisor) = atom else {
                    continue;
                };
                // The quotient may have been simplified: (q / 64) / 128 appears as q / 8192.
                let quotient = inner.div(*divisor);
                let [(partner, 1)] = quotient.terms.as_slice() else {
                    continue;
                };
                let whole = factor * divisor;
                if quotient.constant == 0 && self.terms.iter().any(|(own, f)| own == partner && *f == whole) {
                    let (partner, inner, atom, factor) =
                        (partner.clone(), inner.clone(), atom.clone(), *factor);
                    self.add_term(partner, -whole);
                    self.add_term(atom, -factor);
                    self.constant += inner.constant * factor;
                    for (part, f) in &inner.terms {
                        self.add_term(part.clone(), f * factor);
                    }
                    continue 'again;
                }
            }
            for (atom, factor) in &self.terms {
                let Atom::Div(inner, divisor) = atom else {
                    continue;
                };
                let remainder = inner.rem(*divisor);
                if factor % divisor != 0 {
                    continue;
                }
                let unit = factor / divisor;
                // The remainder may have been simplified to a sum; it is present only if each of its terms
                // is.
                let present = remainder.constant == 0
                    && !remainder.terms.is_empty()
                    && remainder.terms.iter().all(|(part, f)| {
                        self.terms
                            .binary_search_by(|(own, _)| own.cmp(part))
                            .is_ok_and(|at| self.terms[at].1 == f * unit)
                    });
                if present {
                    let (inner, atom, factor) = (inner.clone(), atom.clone(), *factor);
                    self.add_term(atom, -factor);
                    for (part, f) in &remainder.terms {
                        self.add_term(part.clone(), -f * unit);
                    }
                    self.constant += inner.constant * unit;
                    for (part, f) in &inner.terms {
                        self.add_term(part.clone(), f * unit);
                    }
                    continue 'again;
                }
            }
            return;
        }
    }

    /// Separates a multiple of `k` from the rest, such that the rest is never negative.
    fn split(&self, k: i64) -> (Self, Self) {
        let mut whole = Self::default();
        let mut rest = Self::default();
        for (atom, factor) in &self.terms {
            let target = if factor % k == 0 { &mut whole } else { &mut rest };
            target.terms.push((atom.clone(), *factor));
        }
        rest.constant = self.constant;
        let (low, _) = rest.range();
        let multiple = low.div_euclid(k) * k;
        rest.constant -= multiple;
        whole.constant += multiple;
        (whole, rest)
    }

    /// `(g, x, r)` with `self = g x + r`, `0 <= r < g` and `g` a proper divisor of `k`, for the largest such
    /// `g`: then `self / k` is `x / (k / g)`, and what is below `g` does not matter.
    fn coarse(&self, k: i64) -> Option<(i64, Self, Self)> {
        let mut divisors: Vec<i64> = self
            .terms
            .iter()
            .map(|(_, factor)| gcd(factor.abs(), k))
            .collect();
        divisors.sort_unstable_by(|a, b| b.cmp(a));
        for g in divisors.into_iter().filter(|&g| 1 < g && g < k) {
            let mut whole = Self::default();
            let mut rest = Self::constant(self.constant);
            for (atom, factor) in &self.terms {
                let target = if factor % g == 0 { &mut whole } else { &mut rest };
                target.terms.push((atom.clone(), *factor));
            }
            if rest.terms.is_empty() {
                continue;
            }
            let (low, _) = rest.range();
            let multiple = low.div_euclid(g) * g;
            rest.constant -= multiple;
            whole.constant += multiple;
            for (_, factor) in &mut whole.terms {
                *factor /= g;
            }
            whole.constant /= g;
            if rest.range().1 < g && whole.range().0 >= 0 {
                return Some((g, whole, rest));
            }
        }
        None
    }

    /// The greatest common divisor of `k` and all factors.
    fn common(&self, k: i64) -> i64 {
        self.terms
            .iter()
            .fold(k, |common, (_, factor)| gcd(common, factor.abs()))
    }

    /// The quotient by `k >= 1`, rounded down.
    pub fn div(&self, k: i64) -> Self {
        if k == 1 {
            return self.clone();
        }
        let (mut whole, mut rest) = self.split(k);
        for (_, factor) in &mut whole.terms {
            *factor /= k;
        }
        whole.constant /= k;
        if rest.range().1 < k {
            return whole;
        }
        if let Some((g, x, _)) = rest.coarse(k) {
            return whole.add(&x.div(k / g));
        }
        let mut divisor = k;
        let common = rest.common(k);
        if common > 1 {
            // floor((g r + c) / (g d)) = floor((r + floor(c / g)) / d)
            for (_, factor) in &mut rest.terms {
                *factor /= common;
            }
            rest.constant = rest.constant.div_euclid(common);
            divisor /= common;
            if divisor == 1 {
                return whole.add(&rest);
            }
        }
        if rest.constant == 0
            && let [(atom, 1)] = rest.terms.as_slice()
        {
            match atom {
                Atom::Div(inner, by) => return whole.add(&inner.div(by * divisor)),
                Atom::Mod(inner, by) if by % divisor == 0 => {
                    return whole.add(&inner.div(divisor).rem(by / divisor));
                }
                _ => {}
            }
        }
        whole.add(&Self::atom(Atom::Div(Box::new(rest), divisor)))
    }

    /// The remainder by `k >= 1`.
    pub fn rem(&self, k: i64) -> Self {
        if k == 1 {
            return Self::default();
        }
        let (_, mut rest) = self.split(k);
        if rest.range().1 < k {
            return rest;
        }
        if let Some((g, x, low)) = rest.coarse(k) {
            return x.rem(k / g).scale(g).add(&low);
        }
        let common = rest.common(k);
        if common > 1 {
            // (g r + c) mod (g d) = g ((r + floor(c / g)) mod d) + c mod g
            let low = rest.constant.rem_euclid(common);
            rest.constant = rest.constant.div_euclid(common);
            for (_, factor) in &mut rest.terms {
                *factor /= common;
            }
            return rest.rem(k / common).scale(common).shift(low);
        }
        if rest.constant == 0
            && let [(Atom::Mod(inner, by), 1)] = rest.terms.as_slice()
            && by % k == 0
        {
            return inner.rem(k);
        }
        Self::atom(Atom::Mod(Box::new(rest), k))
    }

    /// This with every variable replaced. Data atoms keep their slot and get the variable set of the
    /// replacements.
    pub fn substitute(&self, with: &dyn Fn(Var, i64) -> Self, slot: &dyn Fn(u32) -> u32) -> Self {
        let mut sum = Self::constant(self.constant);
        for (atom, factor) in &self.terms {
            let part = match atom {
                Atom::Var { var, extent } => with(*var, *extent),
                Atom::Div(inner, k) => inner.substitute(with, slot).div(*k),
                Atom::Mod(inner, k) => inner.substitute(with, slot).rem(*k),
                Atom::Data {
                    slot: own,
                    extent,
                    vars,
                } => {
                    let mut replaced = 0;
                    for var in 0..64 {
                        if vars & bit(var) != 0 {
                            replaced |= with(var, i64::MAX / 4).vars();
                        }
                    }
                    Self::atom(Atom::Data {
                        slot: slot(*own),
                        extent: *extent,
                        vars: replaced,
                    })
                }
            };
            sum = sum.add(&part.scale(*factor));
        }
        sum
    }

    /// The index where the variables have these values; none if it depends on integers that are loaded.
    pub fn evaluate(&self, values: &[i64]) -> Option<i64> {
        let mut sum = self.offset();
        for (atom, factor) in self.terms() {
            sum += factor
                * match atom {
                    Atom::Var { var, .. } => values[*var as usize],
                    Atom::Div(inner, by) => inner.evaluate(values)?.div_euclid(*by),
                    Atom::Mod(inner, by) => inner.evaluate(values)?.rem_euclid(*by),
                    Atom::Data { .. } => return None,
                };
        }
        Some(sum)
    }

    /// The C expression. `var` and `data` name variables and loaded integers.
    pub fn to_c(&self, var: &dyn Fn(Var) -> String, data: &dyn Fn(u32) -> String) -> String {
        let mut text = String::new();
        for (atom, factor) in &self.terms {
            let body = match atom {
                Atom::Var { var: own, .. } => var(*own),
                Atom::Data { slot, .. } => data(*slot),
                Atom::Div(inner, k) => format!("({}) / {k}", inner.to_c(var, data)),
                Atom::Mod(inner, k) => format!("({}) % {k}", inner.to_c(var, data)),
            };
            if !text.is_empty() {
                text.push_str(if *factor < 0 { " - " } else { " + " });
            } else if *factor < 0 {
                text.push('-');
            }
            let compound = matches!(atom, Atom::Div(..) | Atom::Mod(..));
            match factor.abs() {
                1 if compound => text.push_str(&format!("({body})")),
                1 => text.push_str(&body),
                f if compound => text.push_str(&format!("({body}) * {f}")),
                f => text.push_str(&format!("{body} * {f}")),
            }
        }
        match self.constant {
            c if text.is_empty() => c.to_string(),
            0 => text,
            c if c < 0 => format!("{text} - {}", -c),
            c => format!("{text} + {c}"),
        }
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_c(&|var| format!("i{var}"), &|slot| format!("at{slot}")))
    }
}

impl Atom {
    /// Smallest and largest value.
    pub fn range(&self) -> (i64, i64) {
        match self {
            Atom::Var { extent, .. } | Atom::Data { extent, .. } => (0, (extent - 1).max(0)),
            Atom::Div(inner, k) => {
                let (low, high) = inner.range();
                (low.div_euclid(*k), high.div_euclid(*k))
            }
            Atom::Mod(inner, k) => (0, (k - 1).min(inner.range().1).max(0)),
        }
    }

    /// Bit set of the variables this depends on.
    pub fn vars(&self) -> u64 {
        match self {
            Atom::Var { var, .. } => bit(*var),
            Atom::Div(inner, _) | Atom::Mod(inner, _) => inner.vars(),
            Atom::Data { vars, .. } => *vars,
        }
    }
}

/// The bit of a variable in a set.
pub fn bit(var: Var) -> u64 {
    1 << var
}

/// Position in a row-major buffer of extents `shape`.
pub fn linear(index: &[Index], shape: &[usize]) -> Index {
    let mut sum = Index::default();
    let mut stride = 1;
    for (position, &extent) in index.iter().zip(shape).rev() {
        sum = sum.add(&position.scale(stride));
        stride *= extent as i64;
    }
    sum
}

/// The coordinates of row-major position `position` in extents `shape`.
pub fn coordinates(position: &Index, shape: &[usize]) -> Vec<Index> {
    let mut stride: i64 = shape.iter().map(|&extent| extent.max(1) as i64).product();
    let mut out = Vec::with_capacity(shape.len());
    for (axis, &extent) in shape.iter().enumerate() {
        let extent = extent.max(1) as i64;
        stride /= extent;
        if extent == 1 {
            out.push(Index::default());
            continue;
        }
        let quotient = position.div(stride);
        // The outermost coordinate needs no remainder: positions are in range.
        let outermost = shape[..axis].iter().all(|&outer| outer <= 1);
        out.push(if outermost { quotient } else { quotient.rem(extent) });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn var(v: Var, extent: i64) -> Index {
        Index::var(v, extent)
    }

    #[test]
    fn splitting_and_joining_cancel() {
        let (i, j, k) = (var(0, 8), var(1, 128), var(2, 64));
        let flat = linear(&[i.clone(), j.clone(), k.clone()], &[8, 128, 64]);
        assert_eq!(
            coordinates(&flat, &[8, 128, 64]),
            [i.clone(), j.clone(), k.clone()]
        );
        // [8, 128, 64] -> [1024, 8, 8] -> back
        let other = coordinates(&flat, &[1024, 8, 8]);
        assert_eq!(other[0], i.scale(128).add(&j));
        assert_eq!(linear(&other, &[1024, 8, 8]), flat);
        assert_eq!(
            coordinates(&linear(&other, &[1024, 8, 8]), &[8, 128, 64]),
            [i, j, k]
        );
        // Rows of [1024, 2000] seen as [8, 128, 2000].
        let wide = linear(&[var(0, 1024), var(1, 2000)], &[1024, 2000]);
        let split = coordinates(&wide, &[8, 128, 2000]);
        assert_eq!(
            split,
            [var(0, 1024).div(128), var(0, 1024).rem(128), var(1, 2000)]
        );
        let q = var(3, 8 * 128 * 64);
        let split = coordinates(&q, &[8, 128, 64]);
        assert_eq!(linear(&split, &[8, 128, 64]), q);
    }

    /// A quotient is small where what it divides is not.
    #[test]
    fn the_largest_number_may_be_inside() {
        let scaled = var(0, 70_000).scale(70_001);
        let quotient = scaled.div(70_000);
        assert_eq!(quotient.range().1, 69_999);
        assert_eq!(quotient.most(), 69_999 * 70_001);
        assert_eq!(quotient.rem(7).most(), 69_999 * 70_001);
        let data = Atom::Data {
            slot: 0,
            extent: 1 << 32,
            vars: 1,
        };
        let backward = Index::constant((1 << 32) - 1).add(&Index::atom(data).scale(-1));
        assert_eq!(backward.div(1 << 20).most(), (1 << 32) - 1);
        assert_eq!(var(0, 8).scale(3).shift(2).most(), 23);
    }

    /// Simplified indices have the values of the formulas they were made from, on every point of a space.
    #[test]
    fn simplification_keeps_values() {
        fn value(index: &Index, at: &[i64]) -> i64 {
            let terms = index.terms.iter().map(|(atom, factor)| {
                factor
                    * match atom {
                        Atom::Var { var, .. } => at[*var as usize],
                        Atom::Div(inner, k) => value(inner, at).div_euclid(*k),
                        Atom::Mod(inner, k) => value(inner, at).rem_euclid(*k),
                        Atom::Data { .. } => unreachable!("no loads here"),
                    }
            });
            terms.sum::<i64>() + index.constant
        }
        let extents = [5, 6, 4];
        let mut seed = 12345u64;
        let mut next = |n: u64| {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for _ in 0..2000 {
            let mut steps: Vec<(u64, i64)> = Vec::new();
            let start: Vec<i64> = (0..4).map(|_| next(9) as i64).collect();
            let mut index = Index::constant(start[3]);
            for v in 0..3 {
                index = index.add(&var(v, extents[v as usize]).scale(start[v as usize]));
            }
            for _ in 0..next(5) {
                let k = 1 + next(12) as i64;
                let kind = next(4);
                steps.push((kind, k));
                index = match kind {
                    0 => index.div(k),
                    1 => index.rem(k),
                    2 => index.scale(k).add(&var(1, 6)),
                    _ => index.scale(k).add(&index.rem(k)).shift(k),
                };
            }
            for at in (0..5 * 6 * 4).map(|q| [q / 24, q / 4 % 6, q % 4]) {
                let mut expected = start[3] + (0..3).map(|v| start[v] * at[v]).sum::<i64>();
                for &(kind, k) in &steps {
                    expected = match kind {
                        0 => expected / k,
                        1 => expected % k,
                        2 => expected * k + at[1],
                        _ => expected * k + expected % k + k,
                    };
                }
                assert_eq!(value(&index, &at), expected, "{index} after {steps:?} at {at:?}");
                let (low, high) = index.range();
                assert!((low..=high).contains(&expected));
            }
        }
    }
}
