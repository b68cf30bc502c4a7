//! How the functions of a text come by a table of numbers.
//!
//! The text of a kernel has parts: the kernel itself, functions that threads run, and what both call. A kernel
//! may contain another (a convolution its product), which is called like one. The table goes the way that the
//! kernel's arguments go:
//!
//! ```text
//! @(kiln_table, rt, ..)  ──►  struct @_args args = {.kiln_table = kiln_table, ..}  ──►  @_blocks(ctx, ..)  ctx->kiln_table
//!        │                                                                              @_finish(args, ..) args->kiln_table
//!        └──► @_product(kiln_table, rt, ..)  ──►  struct @_product_args args = ..
//! ```
//!
//! A function that no such way leads to has no table: its numbers stay as they are.

use rustc_hash::FxHashMap;

use super::scan::{Definition, Scanned, Token};
use crate::emit::calls::Convention;

/// How a function comes by the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Table {
    /// It is its first parameter, `kiln_table`.
    Parameter,
    /// It is the value of this C expression.
    At(String),
}

/// A structure that carries arguments to the parts of a kernel, and the table with them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arguments {
    /// The byte behind the `{` of its declaration.
    pub fields: usize,
    /// The bytes behind the `{` of its initialisers.
    pub made: Vec<usize>,
}

/// A call of a kernel inside of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InnerCall {
    /// The function that calls.
    pub caller: usize,
    /// The byte behind the `(`.
    pub at: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Reach {
    /// Of each function of the text, how it comes by the table; none if it does not.
    pub table: Vec<Option<Table>>,
    /// The structures that carry the table.
    pub arguments: Vec<Arguments>,
    /// Calls of kernels that take it as a parameter.
    pub calls: Vec<InnerCall>,
    /// The bytes before the parameters of these kernels and of the text's own.
    pub parameters: Vec<usize>,
}

impl Reach {
    /// The ways of the table in the text of a function that is called by `convention`.
    pub fn of(text: &str, scanned: &Scanned<'_>, convention: &Convention) -> Self {
        let has = |it: &Definition, name: &str| it.names.iter().any(|other| other == name);
        let definitions = &scanned.definitions;
        let types = match convention {
            Convention::Task(count) => {
                let table = Table::At(format!("((const int64_t *const *)ctx)[{count}]"));
                let table = definitions.iter().map(|it| has(it, "ctx").then(|| table.clone()));
                return Self {
                    table: table.collect(),
                    ..Self::default()
                };
            }
            Convention::Kernel(_) => Parts::of(text, scanned),
        };
        types.reach(text, definitions)
    }
}

/// What happens in the text of a kernel, by names of functions and structures.
#[derive(Default)]
struct Parts<'a> {
    /// Of each function, the structure that its arguments are in.
    of: Vec<Option<&'a str>>,
    structures: FxHashMap<&'a str, Structure>,
    /// Calls of functions of the text by others, by position of the callee.
    calls: Vec<Vec<InnerCall>>,
    /// Functions that are mentioned otherwise than by a call.
    elsewhere: Vec<bool>,
}

#[derive(Default)]
struct Structure {
    declared: Vec<usize>,
    /// Initialisers: the function, and the byte behind the `{`.
    made: Vec<(usize, usize)>,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str, scanned: &Scanned<'a>) -> Self {
        let definitions = &scanned.definitions;
        let mut parts = Self {
            of: vec![None; definitions.len()],
            calls: vec![Vec::new(); definitions.len()],
            elsewhere: vec![false; definitions.len()],
            ..Self::default()
        };
        let named = |it: &Definition| text[it.name..it.parameters - 1].trim_end();
        let names: FxHashMap<&str, usize> = definitions.iter().map(named).zip(0..).collect();
        let words: Vec<(&str, usize)> = scanned
            .tokens
            .iter()
            .map(|token| match *token {
                Token::Other { text, at } => (text, at),
                Token::Literal(_) => ("0", 0),
            })
            .collect();
        // The function whose head or body a place is in, and whether it is the body.
        let mut current: Option<usize> = None;
        for (number, &(word, at)) in words.iter().enumerate() {
            let next = |ahead: usize| words.get(number + ahead).map_or(("", 0), |&it| it);
            while definitions
                .get(current.map_or(0, |it| it + 1))
                .is_some_and(|it| at >= it.name)
            {
                current = Some(current.map_or(0, |it| it + 1));
            }
            let in_body = current.filter(|&it| at >= definitions[it].body);
            if word == "struct" && next(1).0.ends_with("_args") {
                let name = next(1).0;
                let structure = parts.structures.entry(name).or_default();
                match (next(2).0, next(3).0, next(4).0) {
                    ("{", ..) => structure.declared.push(next(2).1 + 1),
                    (_, "=", "{") => structure.made.extend(in_body.map(|it| (it, next(4).1 + 1))),
                    _ => {}
                }
                if let Some(current) = current {
                    parts.of[current].get_or_insert(name);
                }
            } else if let Some(&callee) = names.get(word)
                && definitions[callee].name != at
            {
                match (in_body, next(1).0) {
                    (Some(caller), "(") => parts.calls[callee].push(InnerCall {
                        caller,
                        at: next(1).1 + 1,
                    }),
                    _ => parts.elsewhere[callee] = true,
                }
            }
        }
        parts
    }

    fn reach(&self, text: &str, definitions: &[Definition]) -> Reach {
        let has = |it: &Definition, name: &str| it.names.iter().any(|other| other == name);
        let mut reach = Reach {
            table: vec![None; definitions.len()],
            ..Reach::default()
        };
        // A caller stands behind what it calls.
        for (number, it) in definitions.iter().enumerate().rev() {
            if !has(it, "rt") {
                continue;
            }
            let is_entry = text[it.name..it.parameters - 1].trim_end() == "@";
            let calls = &self.calls[number];
            let callers_have = calls
                .iter()
                .all(|call| reach.table[call.caller] == Some(Table::Parameter));
            if callers_have && !self.elsewhere[number] && (is_entry || !calls.is_empty()) {
                reach.table[number] = Some(Table::Parameter);
                reach.parameters.push(it.parameters);
                reach.calls.extend_from_slice(calls);
            }
        }
        let mut carrying: Vec<&str> = Vec::new();
        for (name, structure) in &self.structures {
            let is_made = |&(by, _): &(usize, usize)| reach.table[by] == Some(Table::Parameter);
            if let [fields] = structure.declared[..]
                && !structure.made.is_empty()
                && structure.made.iter().all(is_made)
            {
                let made = structure.made.iter().map(|&(_, at)| at).collect();
                reach.arguments.push(Arguments { fields, made });
                carrying.push(name);
            }
        }
        for (number, it) in definitions.iter().enumerate() {
            let Some(structure) = self.of[number].filter(|name| carrying.contains(name)) else {
                continue;
            };
            if reach.table[number].is_none() && has(it, "args") {
                reach.table[number] = Some(Table::At("args->kiln_table".into()));
            } else if reach.table[number].is_none() && has(it, "ctx") {
                let table = format!("((const struct {structure} *)ctx)->kiln_table");
                reach.table[number] = Some(Table::At(table));
            }
        }
        reach
    }
}
