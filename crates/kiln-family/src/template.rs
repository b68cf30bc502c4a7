//! Templates: functions in which some numbers are variables.
//!
//! Which numbers vary is found by comparing the functions of several shapes ([`generalise`]). A guess too
//! many costs a register, and one too few another template: which functions a template stands for is decided
//! by [`Template::fits`], number by number.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

use crate::text::Kind;
use crate::unit::{Skeleton, Unit};

/// What functions a template stands for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pattern {
    /// What they are without their numbers.
    pub skeleton: Skeleton,
    /// The numbers of one of them: those that are no variables are those of all.
    pub values: Vec<i64>,
    /// Of each value, the variable that stands for it, if one does.
    pub holes: Vec<Option<usize>>,
    /// Of each variable, the first value that it stands for.
    pub variables: Vec<usize>,
}

impl Pattern {
    /// Whether `unit` is one of the functions.
    pub fn fits<F>(&self, unit: &Unit<F>) -> bool {
        let variable = |variable: usize| unit.values[self.variables[variable]];
        unit.skeleton == self.skeleton
            && self.holes.iter().enumerate().all(|(at, hole)| {
                let (value, base) = (unit.values[at], self.values[at]);
                match hole {
                    None => value == base,
                    Some(hole) => value == variable(*hole) && unit.slots[at].kind.is_alike(value, base),
                }
            })
    }

    /// Whether it stands for all functions that `other` stands for.
    pub fn covers(&self, other: &Self) -> bool {
        let same = |one: usize, two: usize| match (other.holes[one], other.holes[two]) {
            (None, None) => other.values[one] == other.values[two],
            (one, two) => one == two,
        };
        self.skeleton == other.skeleton
            && self.holes.iter().enumerate().all(|(at, hole)| match hole {
                None => other.holes[at].is_none() && other.values[at] == self.values[at],
                Some(hole) => same(at, self.variables[*hole]),
            })
    }
}

/// A function in which some numbers are variables.
#[derive(Debug)]
pub struct Template<F> {
    /// A function that it stands for.
    pub base: Arc<Unit<F>>,
    /// All that it stands for.
    pub pattern: Pattern,
}

impl<F> Clone for Template<F> {
    fn clone(&self) -> Self {
        Self {
            base: self.base.clone(),
            pattern: self.pattern.clone(),
        }
    }
}

impl<F> Template<F> {
    /// A template in which `varies` says of each value whether a variable stands for it. Values of equal
    /// columns share a variable: they are equal in all functions that were looked at.
    fn with_columns(
        base: Arc<Unit<F>>,
        varies: impl Fn(usize) -> bool,
        column: impl Fn(usize) -> Vec<i64>,
    ) -> Self {
        let mut variables = Vec::new();
        let mut known: FxHashMap<(Kind, Vec<i64>), usize> = FxHashMap::default();
        let holes = (0..base.values.len()).map(|at| {
            if !varies(at) {
                return None;
            }
            Some(
                *known.entry((base.slots[at].kind, column(at))).or_insert_with(|| {
                    variables.push(at);
                    variables.len() - 1
                }),
            )
        });
        let holes = holes.collect();
        let pattern = Pattern {
            skeleton: base.skeleton,
            values: base.values.clone(),
            holes,
            variables,
        };
        Self { base, pattern }
    }

    /// The template of `unit` alone.
    pub fn constant(unit: &Arc<Unit<F>>) -> Self {
        Self::with_columns(unit.clone(), |_| false, |_| Vec::new())
    }

    /// Whether `unit` is this template with other numbers for its variables.
    pub fn fits(&self, unit: &Unit<F>) -> bool {
        self.pattern.fits(unit)
    }

    /// What kind of number a variable stands for, and one of its values.
    pub fn variable(&self, variable: usize) -> (Kind, i64) {
        let at = self.pattern.variables[variable];
        (self.base.slots[at].kind, self.base.values[at])
    }
}

/// Functions of one skeleton that are taken for the same function of several shapes.
struct Cluster<F> {
    base: Arc<Unit<F>>,
    members: Vec<Arc<Unit<F>>>,
    /// The samples they come from.
    samples: FxHashSet<usize>,
    varies: Vec<bool>,
}

impl<F> Cluster<F> {
    fn new(sample: usize, unit: &Arc<Unit<F>>) -> Self {
        Self {
            base: unit.clone(),
            members: vec![unit.clone()],
            samples: [sample].into_iter().collect(),
            varies: vec![false; unit.values.len()],
        }
    }

    /// How many more values vary if `unit` is a member; none if it cannot be one.
    fn cost(&self, unit: &Unit<F>) -> Option<usize> {
        let mut cost = 0;
        for (at, &varies) in self.varies.iter().enumerate() {
            let (value, base) = (unit.values[at], self.base.values[at]);
            if value == base {
                continue;
            }
            let slot = unit.slots[at];
            if !slot.free || !slot.kind.is_alike(value, base) {
                return None;
            }
            cost += usize::from(!varies);
        }
        Some(cost)
    }

    fn add(&mut self, sample: usize, unit: &Arc<Unit<F>>) {
        for (at, varies) in self.varies.iter_mut().enumerate() {
            *varies |= unit.values[at] != self.base.values[at];
        }
        self.members.push(unit.clone());
        self.samples.insert(sample);
    }

    /// The template. What differs in other forms of the kernel (`siblings`) may in this one, too: a batch, of
    /// which samples had another size in some forms alone. `all` are the functions of all forms. Of a function
    /// of one shape alone, more is guessed: numbers that not all shapes have.
    fn template(self, common: &FxHashSet<i64>, all: &[&[i64]], siblings: &[bool]) -> Template<F> {
        let alone = self.members.len() == 1;
        // What is equal in several samples may be equal in all.
        let may_vary = alone || self.varies.contains(&true);
        let guess = |at: usize| {
            let slot = self.base.slots[at];
            let stranger = || slot.kind.is_integer() && !common.contains(&self.base.values[at]);
            slot.free && ((may_vary && siblings[at]) || (alone && stranger()))
        };
        let members: Vec<&[i64]> = self.members.iter().map(|it| &*it.values).collect();
        let column = |of: &[&[i64]], at: usize| of.iter().map(|values| values[at]).collect::<Vec<_>>();
        Template::with_columns(
            self.base.clone(),
            |at| self.varies[at] || guess(at),
            |at| match self.varies[at] {
                true => column(&members, at),
                // Numbers that did not differ here do where the siblings are.
                false => column(all, at),
            },
        )
    }
}

/// The functions of a step.
#[derive(Debug)]
pub struct Sample<F> {
    /// Its functions, in the order of first use.
    pub units: Vec<Arc<Unit<F>>>,
    /// How many sizes the step stands for, as a multiple of any number.
    pub share: usize,
}

/// A template that samples show.
#[derive(Debug)]
pub struct Found<F> {
    /// The template.
    pub template: Template<F>,
    /// Samples that have a function of it.
    pub samples: usize,
    /// How many sizes these stand for.
    pub share: usize,
    /// Whether known templates stand for all its functions that samples have: it is for others alone.
    pub is_spare: bool,
}

/// Templates for all functions of `samples`: the functions of steps of several shapes.
pub fn generalise<F>(samples: &[Sample<F>]) -> Vec<Found<F>> {
    let mut skeletons: FxHashMap<Skeleton, usize> = FxHashMap::default();
    let mut groups: Vec<Vec<(usize, Arc<Unit<F>>)>> = Vec::new();
    for (number, sample) in samples.iter().enumerate() {
        for unit in &sample.units {
            let group = *skeletons.entry(unit.skeleton).or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[group].push((number, unit.clone()));
        }
    }
    let common = common_integers(samples);
    let share = |number: &usize| samples[*number].share;
    let found = groups.iter().flat_map(|group| generalise_group(group, &common));
    found
        .map(|(template, numbers)| Found {
            template,
            samples: numbers.len(),
            share: numbers.iter().map(share).sum(),
            is_spare: false,
        })
        .collect()
}

/// Integers that occur in every sample.
fn common_integers<F>(samples: &[Sample<F>]) -> FxHashSet<i64> {
    let of = |sample: &Sample<F>| -> FxHashSet<i64> {
        let values = sample
            .units
            .iter()
            .flat_map(|unit| unit.values.iter().zip(&*unit.slots));
        values
            .filter(|(_, slot)| slot.kind.is_integer())
            .map(|(&value, _)| value)
            .collect()
    };
    let all = samples.iter().map(of);
    all.reduce(|some, more| some.intersection(&more).copied().collect())
        .unwrap_or_default()
}

/// Templates for functions of one skeleton, each with the samples that have a function of it. Each function is
/// given with the sample it comes from.
fn generalise_group<F>(
    group: &[(usize, Arc<Unit<F>>)],
    common: &FxHashSet<i64>,
) -> Vec<(Template<F>, FxHashSet<usize>)> {
    let samples: FxHashSet<usize> = group.iter().map(|(sample, _)| *sample).collect();
    let mut having: FxHashMap<&[i64], FxHashSet<usize>> = FxHashMap::default();
    for (sample, unit) in group {
        having.entry(&unit.values).or_default().insert(*sample);
    }
    let is_static = |unit: &Unit<F>| samples.len() > 1 && having[&*unit.values].len() == samples.len();
    let mut fixed: Vec<Template<F>> = Vec::new();
    let mut clusters: Vec<Cluster<F>> = Vec::new();
    let mut order: Vec<usize> = samples.iter().copied().collect();
    order.sort_unstable();
    for sample in order {
        let own = group.iter().filter(|(of, _)| *of == sample).map(|(_, unit)| unit);
        let mut rest: Vec<&Arc<Unit<F>>> = Vec::new();
        for unit in own {
            if !is_static(unit) {
                rest.push(unit);
            } else if !fixed.iter().any(|template| template.fits(unit)) {
                fixed.push(Template::constant(unit));
            }
        }
        // The nearest pairs first.
        let mut pairs: Vec<(usize, usize, usize)> = Vec::new();
        for (number, unit) in rest.iter().enumerate() {
            let costs = clusters.iter().enumerate();
            pairs.extend(costs.filter_map(|(at, it)| it.cost(unit).map(|cost| (cost, number, at))));
        }
        pairs.sort_unstable();
        let (mut placed, mut taken) = (FxHashSet::default(), FxHashSet::default());
        for (cost, number, at) in pairs {
            if placed.contains(&number) || (taken.contains(&at) && cost > 0) {
                continue;
            }
            placed.insert(number);
            taken.insert(at);
            clusters[at].add(sample, rest[number]);
        }
        let alone = rest
            .iter()
            .enumerate()
            .filter(|(number, _)| !placed.contains(number));
        clusters.extend(alone.map(|(_, unit)| Cluster::new(sample, unit)));
    }
    let fixed = fixed.into_iter().map(|template| (template, samples.clone()));
    // What differs in one form of a kernel may in another.
    let mut siblings = vec![false; group[0].1.values.len()];
    for cluster in &clusters {
        siblings
            .iter_mut()
            .zip(&cluster.varies)
            .for_each(|(one, other)| *one |= other);
    }
    let all: Vec<&[i64]> = having.keys().copied().collect();
    let varying = clusters.into_iter().map(|mut cluster| {
        let samples = std::mem::take(&mut cluster.samples);
        (cluster.template(common, &all, &siblings), samples)
    });
    fixed.chain(varying).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Slot;

    /// A function of which the first number is a constant of its form, and the others may vary.
    fn unit(values: &[i64]) -> Arc<Unit<&'static str>> {
        let slot = |at: usize| Slot {
            kind: Kind::Integer,
            free: at > 0,
        };
        Arc::new(Unit {
            function: "",
            skeleton: Skeleton([0; 32]),
            values: values.to_vec(),
            slots: (0..values.len()).map(slot).collect(),
        })
    }

    fn templates(samples: &[&[i64]]) -> Vec<Template<&'static str>> {
        let sample = |values: &&[i64]| Sample {
            units: vec![unit(values)],
            share: 1,
        };
        let samples: Vec<_> = samples.iter().map(sample).collect();
        generalise(&samples)
            .into_iter()
            .map(|found| found.template)
            .collect()
    }

    #[test]
    fn what_varies_in_one_form_varies_in_the_others() {
        // The width of a vector, a batch, heads, and a length. Batches differ where the width is 1.
        let samples: [&[i64]; 5] = [
            &[1, 8, 8, 21],
            &[4, 8, 8, 24],
            &[4, 8, 8, 40],
            &[1, 5, 8, 33],
            &[1, 6, 8, 35],
        ];
        let templates = templates(&samples);
        assert_eq!(templates.len(), 2);
        let fits = |values: &[i64]| templates.iter().any(|it| it.fits(&unit(values)));
        assert!(fits(&[1, 3, 8, 51]) && fits(&[4, 8, 8, 48]));
        // The batch is not taken for the number of heads, which it equals in all samples of this form.
        assert!(fits(&[4, 5, 8, 48]));
        assert!(!fits(&[2, 8, 8, 22]) && !fits(&[4, 5, 6, 48]));
    }

    #[test]
    fn what_is_equal_in_some_shapes_stays_a_constant() {
        let samples: [&[i64]; 4] = [&[1, 384, 21], &[1, 384, 23], &[4, 384, 24], &[4, 384, 40]];
        let templates = templates(&samples);
        let fits = |values: &[i64]| templates.iter().any(|it| it.fits(&unit(values)));
        assert!(fits(&[4, 384, 44]) && !fits(&[4, 383, 44]));
    }

    #[test]
    fn a_template_covers_what_has_fewer_variables() {
        let pattern = |samples: &[&[i64]]| templates(samples).remove(0).pattern;
        let length = pattern(&[&[1, 8, 20], &[1, 8, 30]]);
        let both = pattern(&[&[1, 8, 20], &[1, 8, 30], &[1, 5, 30]]);
        assert!(both.covers(&length) && !length.covers(&both));
        assert!(length.covers(&length));
        let other = pattern(&[&[4, 8, 20], &[4, 8, 24]]);
        assert!(!both.covers(&other));
        // One variable for two numbers covers no template that has one for each.
        let equal = pattern(&[&[1, 8, 8], &[1, 9, 9]]);
        let differing = pattern(&[&[1, 8, 8], &[1, 9, 7]]);
        assert!(differing.covers(&equal) && !equal.covers(&differing));
    }
}
