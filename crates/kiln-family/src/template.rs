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
    /// A template in which `varies` says of each value whether a variable stands for it. Values that are
    /// equal in all of `members` share a variable.
    fn new(base: Arc<Unit<F>>, members: &[&[i64]], varies: impl Fn(usize) -> bool) -> Self {
        let mut variables = Vec::new();
        let mut known: FxHashMap<(Kind, Vec<i64>), usize> = FxHashMap::default();
        let holes = (0..base.values.len()).map(|at| {
            if !varies(at) {
                return None;
            }
            let column: Vec<i64> = members.iter().map(|values| values[at]).collect();
            Some(*known.entry((base.slots[at].kind, column)).or_insert_with(|| {
                variables.push(at);
                variables.len() - 1
            }))
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
        Self::new(unit.clone(), &[], |_| false)
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

    /// The template. Of a function of one shape alone, what varies is guessed: numbers that not all shapes
    /// have.
    fn template(self, common: &FxHashSet<i64>) -> Template<F> {
        let alone = self.members.len() == 1;
        let guess = |at: usize| {
            let slot = self.base.slots[at];
            alone && slot.free && slot.kind.is_integer() && !common.contains(&self.base.values[at])
        };
        let members: Vec<&[i64]> = self.members.iter().map(|it| &*it.values).collect();
        Template::new(self.base.clone(), &members, |at| self.varies[at] || guess(at))
    }
}

/// A template that samples show.
#[derive(Debug)]
pub struct Found<F> {
    /// The template.
    pub template: Template<F>,
    /// Samples that have a function of it.
    pub samples: usize,
}

/// Templates for all functions of `samples`: the functions of steps of several shapes, each step's in the
/// order of first use.
pub fn generalise<F>(samples: &[Vec<Arc<Unit<F>>>]) -> Vec<Found<F>> {
    let mut skeletons: FxHashMap<Skeleton, usize> = FxHashMap::default();
    let mut groups: Vec<Vec<(usize, Arc<Unit<F>>)>> = Vec::new();
    for (sample, units) in samples.iter().enumerate() {
        for unit in units {
            let group = *skeletons.entry(unit.skeleton).or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[group].push((sample, unit.clone()));
        }
    }
    let common = common_integers(samples);
    groups
        .iter()
        .flat_map(|group| generalise_group(group, &common))
        .collect()
}

/// Integers that occur in every sample.
fn common_integers<F>(samples: &[Vec<Arc<Unit<F>>>]) -> FxHashSet<i64> {
    let of = |units: &Vec<Arc<Unit<F>>>| -> FxHashSet<i64> {
        let values = units.iter().flat_map(|unit| unit.values.iter().zip(&*unit.slots));
        values
            .filter(|(_, slot)| slot.kind.is_integer())
            .map(|(&value, _)| value)
            .collect()
    };
    let all = samples.iter().map(of);
    all.reduce(|some, more| some.intersection(&more).copied().collect())
        .unwrap_or_default()
}

/// Templates for functions of one skeleton, each with the sample it comes from.
fn generalise_group<F>(group: &[(usize, Arc<Unit<F>>)], common: &FxHashSet<i64>) -> Vec<Found<F>> {
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
    let fixed = fixed.into_iter().map(|template| Found {
        template,
        samples: samples.len(),
    });
    let varying = clusters.into_iter().map(|cluster| Found {
        samples: cluster.samples.len(),
        template: cluster.template(common),
    });
    fixed.chain(varying).collect()
}
