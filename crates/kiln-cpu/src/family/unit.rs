//! A C function of a step, apart from its numbers.
//!
//! Its skeleton is its text with all numbers left out, and that of the helpers that it calls. Its values are
//! the numbers, in the order of the text, where the values of a helper stand at each call of it.

use std::sync::Arc;

use kiln_family::{Reading, Skeleton, Slot};
use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};

use super::reach::Reach;
use super::scan::{Literal, LiteralPlace, Scanned, Token, scan};
use crate::emit::calls::StepFunction;
use crate::kernels::Helper;

/// A call of a helper in a function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    /// Which of the function's helpers.
    pub helper: usize,
    /// The first byte of its name.
    pub at: usize,
    /// The first of its values among the function's.
    pub first: usize,
    /// The function that calls.
    pub definition: Option<usize>,
}

/// A function's text with the places of its values.
#[derive(Debug)]
pub struct Layout<'a> {
    /// The text in tokens.
    pub scanned: Scanned<'a>,
    /// The place of each literal among the values.
    pub own: Vec<usize>,
    /// Calls of helpers.
    pub sites: Vec<Site>,
    /// How the functions of the text come by a table of numbers.
    pub reach: Reach,
    /// All values.
    values: Vec<i64>,
    slots: Vec<Slot>,
    skeleton: Skeleton,
}

impl<'a> Layout<'a> {
    /// Reads `function`.
    pub fn of(function: &'a StepFunction, helpers: &mut Helpers) -> Self {
        let text = &*function.text;
        let scanned = scan(text);
        let reach = Reach::of(text, &scanned, &function.convention);
        let mut layout = Self {
            scanned,
            own: Vec::new(),
            sites: Vec::new(),
            reach,
            values: Vec::new(),
            slots: Vec::new(),
            skeleton: Skeleton([0; 32]),
        };
        layout.read(function, helpers);
        layout
    }

    fn read(&mut self, function: &StepFunction, helpers: &mut Helpers) {
        let mut hash = Sha256::new();
        hash.update(format!("{:?}", function.convention));
        let mut definition = None;
        let definitions = self.scanned.definitions.iter().enumerate();
        let mut bodies = definitions.map(|(number, it)| (it.body, number)).peekable();
        for token in &self.scanned.tokens {
            match *token {
                Token::Literal(number) => {
                    let literal = &self.scanned.literals[number];
                    hash.update(literal.kind.marker());
                    self.own.push(self.values.len());
                    self.values.push(literal.value);
                    let free = match literal.place {
                        LiteralPlace::Body(function) => self.reach.table[function].is_some(),
                        LiteralPlace::Constant => false,
                    };
                    self.slots.push(Slot {
                        kind: literal.kind,
                        free,
                    });
                }
                Token::Other { text, at } => {
                    if let Some((_, number)) = bodies.next_if(|&(body, _)| at >= body) {
                        definition = Some(number);
                    }
                    let helper = text
                        .starts_with("kiln_")
                        .then(|| function.helpers.iter().position(|helper| helper.name == text))
                        .flatten();
                    let Some(helper) = helper else {
                        hash.update(text);
                        hash.update([0]);
                        continue;
                    };
                    let known = helpers.get(&function.helpers[helper]);
                    hash.update([1]);
                    hash.update(known.skeleton.0);
                    self.sites.push(Site {
                        helper,
                        at,
                        first: self.values.len(),
                        definition,
                    });
                    self.values.extend(known.literals.iter().map(|it| it.value));
                    let reaches = definition.is_some_and(|definition| self.reach.table[definition].is_some());
                    self.slots.extend(known.literals.iter().map(|it| Slot {
                        kind: it.kind,
                        free: reaches && matches!(it.place, LiteralPlace::Body(_)),
                    }));
                }
            }
        }
        self.skeleton = Skeleton(hash.finalize().into());
    }
}

impl From<Layout<'_>> for Reading {
    fn from(layout: Layout<'_>) -> Self {
        Self {
            skeleton: layout.skeleton,
            values: layout.values,
            slots: layout.slots,
        }
    }
}

/// What is known of a helper.
#[derive(Debug)]
pub struct HelperUnit {
    skeleton: Skeleton,
    /// Its numbers.
    pub literals: Vec<Literal>,
}

/// Helpers by their definitions.
#[derive(Debug, Default)]
pub struct Helpers {
    known: FxHashMap<String, Arc<HelperUnit>>,
}

impl Helpers {
    /// What is known of `helper`.
    pub fn get(&mut self, helper: &Helper) -> Arc<HelperUnit> {
        if let Some(known) = self.known.get(&helper.definition) {
            return known.clone();
        }
        let scanned = scan(&helper.definition);
        let mut hash = Sha256::new();
        for token in &scanned.tokens {
            match *token {
                Token::Literal(number) => hash.update(scanned.literals[number].kind.marker()),
                // Its name has numbers in it.
                Token::Other { text, .. } if text == helper.name => hash.update([3]),
                Token::Other { text, .. } => {
                    hash.update(text);
                    hash.update([0]);
                }
            }
        }
        let unit = Arc::new(HelperUnit {
            skeleton: Skeleton(hash.finalize().into()),
            literals: scanned.literals,
        });
        self.known.insert(helper.definition.clone(), unit.clone());
        unit
    }
}
