//! A function of a step, apart from its numbers.
//!
//! The *skeleton* of a function is its text with all numbers left out. Functions of equal skeletons differ in
//! their *values*: the numbers, in an order that follows from the skeleton.

use std::hash::Hash;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::text::Kind;

/// What a text is without its numbers: a hash of that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Skeleton(pub [u8; 32]);

/// What is known of the place of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// What kind of number stands there.
    pub kind: Kind,
    /// Whether a variable can stand there.
    pub free: bool,
}

/// A function in parts.
#[derive(Debug)]
pub struct Reading {
    /// What it is without its numbers.
    pub skeleton: Skeleton,
    /// Its numbers: integers, or the bits of fractions as `f64`.
    pub values: Vec<i64>,
    /// What each of them is.
    pub slots: Vec<Slot>,
}

/// A function `F`, its skeleton and its values.
#[derive(Debug)]
pub struct Unit<F> {
    /// The function.
    pub function: F,
    /// What it is without its numbers.
    pub skeleton: Skeleton,
    /// Its numbers.
    pub values: Vec<i64>,
    /// Of each value, what it is and whether a variable can stand for it.
    pub slots: Arc<[Slot]>,
}

/// Units by their functions: steps of several shapes share most of them.
#[derive(Debug)]
pub struct Units<F> {
    known: FxHashMap<F, Arc<Unit<F>>>,
    slots: FxHashMap<Skeleton, Arc<[Slot]>>,
}

impl<F> Default for Units<F> {
    fn default() -> Self {
        Self {
            known: FxHashMap::default(),
            slots: FxHashMap::default(),
        }
    }
}

impl<F: Clone + Eq + Hash> Units<F> {
    /// The unit of `function`, which `read` takes apart if it is not known.
    pub fn get(&mut self, function: &F, read: impl FnOnce(&F) -> Reading) -> Arc<Unit<F>> {
        if let Some(known) = self.known.get(function) {
            return known.clone();
        }
        let Reading {
            skeleton,
            values,
            slots,
        } = read(function);
        let slots = self.slots.entry(skeleton).or_insert_with(|| slots.into()).clone();
        Arc::new(Unit {
            function: function.clone(),
            skeleton,
            values,
            slots,
        })
    }

    /// [`Units::get`], and keeps it.
    pub fn keep(&mut self, function: &F, read: impl FnOnce(&F) -> Reading) -> Arc<Unit<F>> {
        let unit = self.get(function, read);
        self.known.entry(function.clone()).or_insert(unit).clone()
    }
}
