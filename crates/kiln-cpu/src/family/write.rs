//! The C of templates: a shared object of functions, of which each call brings its numbers.
//!
//! A function finds its numbers behind its arguments: the last pointer that it is given is a table of 64-bit
//! words. Variables are constants of the function, loaded at its entry, with the types that C gives the
//! numbers they stand for.

use std::fmt::Write as _;

use kiln_family::text::{Kind, is_int};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::reach::{Reach, Table};
use super::unit::{Helpers, Layout, Site};
use crate::build::SourceFile;
use crate::emit::calls::{Convention, StepFunction};
use crate::emit::tree::Functions;
use crate::isa::Isa;
use crate::kernels::Helper;
use crate::runtime::abi::ABI_VERSION;

/// A C function in which some numbers are variables.
type Template = kiln_family::Template<StepFunction>;

/// A template as a function of an object.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Written {
    /// Its name.
    pub name: String,
    /// Which of a function's values make up its table, in order.
    pub table: Vec<usize>,
}

/// Writes functions for templates.
#[derive(Default)]
pub struct Writer {
    functions: Functions,
    /// Names of helpers, by their definitions and what varies in them.
    helpers: FxHashMap<(String, Vec<Option<usize>>), String>,
    /// How many helpers began with a name.
    names: FxHashMap<String, usize>,
    /// What is exported, in order.
    exported: Vec<String>,
    prototypes: Vec<String>,
}

impl Writer {
    /// Adds the function of `template`.
    pub fn add(&mut self, template: &Template, known: &mut Helpers) -> Written {
        let function = &template.base.function;
        let layout = Layout::of(function, known);
        let mut text = Rewriting::new(&function.text);
        let mut table: Vec<usize> = Vec::new();
        // The function's own variables come first.
        let mut places: FxHashMap<usize, usize> = FxHashMap::default();
        let mut used: Vec<Vec<usize>> = vec![Vec::new(); layout.scanned.definitions.len()];
        let bodies: Vec<usize> = layout.scanned.definitions.iter().map(|it| it.body).collect();
        let body_of = |at: usize| bodies.iter().rposition(|&body| body <= at);
        for (literal, &value) in layout.scanned.literals.iter().zip(&layout.own) {
            let Some(variable) = template.pattern.holes[value] else {
                continue;
            };
            places.entry(variable).or_insert_with(|| {
                table.push(template.pattern.variables[variable]);
                table.len() - 1
            });
            text.replace(literal.at, literal.length, format!("kiln_v{variable}"));
            if let Some(body) = body_of(literal.at)
                && !used[body].contains(&variable)
            {
                used[body].push(variable);
            }
            if let Some(&(from, _)) = layout
                .scanned
                .statics
                .iter()
                .find(|(from, to)| (*from..*to).contains(&literal.at))
            {
                // What varies is no constant of the object.
                text.replace(from, "static".len(), String::new());
            }
        }
        let mut called = Vec::new();
        let mut reached = vec![false; used.len()];
        for call in &layout.reach.calls {
            reached[call.caller] = true;
        }
        for site in &layout.sites {
            let helper = &function.helpers[site.helper];
            let (helper, more) = self.helper(template, site, helper, known);
            if !more.is_empty() {
                text.replace(
                    site.at,
                    function.helpers[site.helper].name.len(),
                    helper.name.clone(),
                );
                let open = site.at + function.text[site.at..].find('(').map_or(0, |at| at + 1);
                text.insert(open, format!("kiln_table + {}, ", table.len()));
                table.extend(more);
                if let Some(definition) = site.definition {
                    reached[definition] = true;
                }
            } else if helper.name != function.helpers[site.helper].name {
                text.replace(
                    site.at,
                    function.helpers[site.helper].name.len(),
                    helper.name.clone(),
                );
            }
            if !called.contains(&helper) {
                called.push(helper);
            }
        }
        for (number, definition) in layout.scanned.definitions.iter().enumerate() {
            if used[number].is_empty() && !reached[number] {
                continue;
            }
            let mut head = match &layout.reach.table[number] {
                Some(Table::At(expression)) => {
                    format!("\nconst int64_t *const kiln_table = {expression};\n")
                }
                Some(Table::Parameter) | None => "\n".to_owned(),
            };
            for &variable in &used[number] {
                declare(&mut head, ctype(template, variable), variable, places[&variable]);
            }
            text.insert(definition.body, head);
        }
        let text = connect(&function.convention, &layout.reach, text);
        let prototype = |name: &str| match &function.convention {
            Convention::Task(_) => format!("void {name}(void *ctx, int64_t begin, int64_t end, int thread);"),
            Convention::Kernel(_) => {
                format!("void {name}_call(const kiln_runtime *rt, void *const *list, char *workspace);")
            }
        };
        let name = self
            .functions
            .name(&function.kind, function.part, &text, &called, |_| String::new());
        let entry = match &function.convention {
            Convention::Task(_) => name.clone(),
            Convention::Kernel(_) => format!("{name}_call"),
        };
        self.prototypes.push(prototype(&name));
        self.exported.push(entry);
        Written { name, table }
    }

    /// The helper that is called at `site`, and the values that its table is made of.
    fn helper(
        &mut self,
        template: &Template,
        site: &Site,
        helper: &Helper,
        known: &mut Helpers,
    ) -> (Helper, Vec<usize>) {
        let literals = known.get(helper);
        // Variables by their first use here: helpers that vary alike are one function.
        let mut order: Vec<usize> = Vec::new();
        let count = literals.literals.len();
        let holes: Vec<Option<usize>> = template.pattern.holes[site.first..site.first + count]
            .iter()
            .map(|hole| {
                hole.map(|variable| {
                    order.iter().position(|&it| it == variable).unwrap_or_else(|| {
                        order.push(variable);
                        order.len() - 1
                    })
                })
            })
            .collect();
        let name = self.helper_name(helper, &holes);
        let table: Vec<usize> = order
            .iter()
            .map(|&variable| template.pattern.variables[variable])
            .collect();
        if order.is_empty() && name == helper.name {
            return (helper.clone(), table);
        }
        let mut text = Rewriting::new(&helper.definition);
        for (literal, hole) in literals.literals.iter().zip(&holes) {
            if let Some(variable) = hole {
                text.replace(literal.at, literal.length, format!("kiln_v{variable}"));
            }
        }
        if !order.is_empty()
            && let Some(body) = helper.definition.find('{')
        {
            let mut head = "\n".to_owned();
            for (place, &variable) in order.iter().enumerate() {
                declare(&mut head, ctype(template, variable), place, place);
            }
            text.insert(body + 1, head);
        }
        let table_parameter = match order.is_empty() {
            true => "(",
            false => "(const int64_t *kiln_table, ",
        };
        let renamed = |text: &str| {
            text.replacen(
                &format!("{}(", helper.name),
                &format!("{name}{table_parameter}"),
                1,
            )
        };
        let helper = Helper {
            prototype: renamed(&helper.prototype),
            definition: renamed(&text.finish()),
            name,
        };
        (helper, table)
    }

    /// A name for a helper in which `holes` vary; its own, if no other helper of the object has that.
    fn helper_name(&mut self, helper: &Helper, holes: &[Option<usize>]) -> String {
        let key = (helper.definition.clone(), holes.to_vec());
        if let Some(name) = self.helpers.get(&key) {
            return name.clone();
        }
        let count = self.names.entry(helper.name.clone()).or_default();
        *count += 1;
        let name = match *count {
            1 => helper.name.clone(),
            count => format!("{}_v{count}", helper.name),
        };
        self.helpers.insert(key, name.clone());
        name
    }

    /// The source tree of an object that exports the functions, in the order in which they were added.
    pub fn finish(self, isa: Isa) -> Vec<SourceFile> {
        let mut files = self.functions.files(isa);
        let mut index = "/* The functions of this object. */\n#include \"kiln_runtime.h\"\n\n".to_owned();
        for prototype in &self.prototypes {
            let _ = writeln!(index, "{prototype}");
        }
        let _ = writeln!(
            index,
            "\nKILN_EXPORT const uint64_t kiln_functions_abi = {ABI_VERSION};\nKILN_EXPORT const uint64_t kiln_functions_count = {};\n\
             KILN_EXPORT const void *const kiln_functions[] = {{",
            self.exported.len()
        );
        for name in &self.exported {
            let _ = writeln!(index, "    (const void *){name},");
        }
        index.push_str("};\n");
        files.push(SourceFile::new("functions.c", index));
        files
    }
}

/// Takes the table to the parts of a kernel, and adds a function that calls the kernel with a list of pointers.
fn connect(convention: &Convention, reach: &Reach, mut text: Rewriting<'_>) -> String {
    let Convention::Kernel(types) = convention else {
        return text.finish();
    };
    for arguments in &reach.arguments {
        text.insert(arguments.fields, "\n    const int64_t *kiln_table;".into());
        for &at in &arguments.made {
            text.insert(at, ".kiln_table = kiln_table, ".into());
        }
    }
    for &at in &reach.parameters {
        text.insert(at, "const int64_t *const kiln_table, ".into());
    }
    for call in &reach.calls {
        text.insert(call.at, "kiln_table, ".into());
    }
    let list = types.iter().enumerate();
    let list: Vec<String> = list.map(|(at, ctype)| format!("({ctype})list[{at}]")).collect();
    let mut text = text.finish();
    let _ = write!(
        text,
        "void @_call(const kiln_runtime *rt, void *const *list, char *workspace) {{\n    @((const int64_t *)list[{}], rt, {}{}workspace);\n}}\n",
        types.len(),
        list.join(", "),
        if list.is_empty() { "" } else { ", " },
    );
    text
}

/// The C type of a variable.
fn ctype(template: &Template, variable: usize) -> &'static str {
    match template.variable(variable) {
        (Kind::Integer, value) if is_int(value) => "int",
        // Generated C has no unsigned literals: the scanner takes them for words.
        (Kind::Integer | Kind::Long | Kind::Unsigned, _) => "long",
        (Kind::Float, _) => "float",
        (Kind::Double, _) => "double",
    }
}

/// `const int kiln_v3 = kiln_table[0]`, and that it is not negative.
fn declare(head: &mut String, ctype: &str, variable: usize, place: usize) {
    let _ = match ctype {
        "float" | "double" => writeln!(
            head,
            "const {ctype} kiln_v{variable} = ({ctype})((const double *)kiln_table)[{place}];"
        ),
        // A literal has no sign.
        _ => writeln!(
            head,
            "const {ctype} kiln_v{variable} = ({ctype})kiln_table[{place}];\nif (kiln_v{variable} < 0) __builtin_unreachable();"
        ),
    };
}

/// Changes of a text, by the places of the unchanged one.
struct Rewriting<'a> {
    text: &'a str,
    /// First byte, bytes replaced, what comes instead.
    changes: Vec<(usize, usize, String)>,
}

impl<'a> Rewriting<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            text,
            changes: Vec::new(),
        }
    }

    fn replace(&mut self, at: usize, length: usize, by: String) {
        if !self
            .changes
            .iter()
            .any(|(other, of, _)| *other == at && *of == length && length > 0)
        {
            self.changes.push((at, length, by));
        }
    }

    fn insert(&mut self, at: usize, text: String) {
        self.changes.push((at, 0, text));
    }

    fn finish(mut self) -> String {
        // Stable: what is inserted at one place stays in order, and comes before what is replaced there.
        self.changes.sort_by_key(|(at, length, _)| (*at, *length));
        let mut out = String::with_capacity(self.text.len() * 5 / 4);
        let mut done = 0;
        for (at, length, by) in &self.changes {
            out.push_str(&self.text[done..*at]);
            out.push_str(by);
            done = at + length;
        }
        out.push_str(&self.text[done..]);
        out
    }
}
